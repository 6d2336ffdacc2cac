"""mok bench --layer without a GPU: routing, arithmetic, oracle, checks and records, on tiny shapes."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_mok.bench import implementations, layer, peers
from megatron_mok.bench.cases import PASSES, SHAPES, Inputs, Shape, cases, make_inputs, route
from megatron_mok.bench.implementations import Explicit, Mok, MokRanks, Routes, TorchEager
from megatron_mok.cli import bench
from megatron_mok.reference.schedule import saved_rows

TINY = Shape(48, 64, 32, 8, 2)
FACTS = {"commit": "abc", "gpu": "none", "driver": None, "cuda": None, "torch": torch.__version__}
ROOT = Path(__file__).resolve().parents[2]


class TorchExplicit(Explicit):
    """torch-compiled without the compiler."""

    name = "torch-explicit"


@pytest.fixture(scope="module")
def inputs():
    return make_inputs(TINY, "random", "cpu", seed=3)


@pytest.fixture(scope="module")
def want(inputs):
    return layer.oracle(inputs)


def measure(ways, shape=TINY, routing="random", **options):
    clock = layer.HostClock()
    dense = layer.Dense(clock, "cpu", size=64, reps=2)
    settings = dict(
        environment=FACTS, device="cpu", reps=3, warmup=1, clock=clock, dense=dense, say=lambda line: None
    )
    return layer.measure(shape, routing, ways, **{**settings, **options})


# ---- shapes and routing


def test_shapes_of_the_published_table():
    assert Shape.parse("c") == SHAPES["C"] == Shape(2048, 7168, 2048, 8, 8)
    assert Shape.parse("512,7168,2048,8,8").rows == 4096
    assert SHAPES["C"].flops("fwd") == 6 * 16384 * 7168 * 2048
    assert SHAPES["C"].flops("bwd_acc32") == 2 * SHAPES["C"].flops("fwd_nograd")
    assert SHAPES["C"].label.startswith("C: T2048") and TINY.label == "T48 H64 I32 E8 K2"
    assert Shape.parse("c512").T == 512 and Shape.parse("C64").rows == 512
    assert SHAPES["C64"].weight_bytes == 8 * 3 * 7168 * 2048 * 2 == SHAPES["C"].weight_bytes


@pytest.mark.parametrize("text", ["X", "1,2,3", "1,2,3,4,5", "0,2,3,4,1", "a,b,c,d,e"])
def test_bad_shapes(text):
    with pytest.raises(ValueError, match="--shape: got"):
        Shape.parse(text)


@pytest.mark.parametrize("shape", [TINY, Shape(50, 64, 32, 6, 4), Shape(8192, 8, 8, 128, 8)], ids=str)
@pytest.mark.parametrize("routing", ["balanced", "random", "skewed"])
def test_routing(shape, routing):
    ids = route(shape, routing, torch.Generator().manual_seed(0))
    assert ids.shape == (shape.T, shape.K) and ids.dtype == torch.int32
    assert ids.min() >= 0 and ids.max() < shape.E
    counts = torch.bincount(ids.reshape(-1), minlength=shape.E)
    if routing != "balanced" or shape.E % shape.K == 0:
        assert (ids.sort(dim=1).values.diff(dim=1) != 0).all(), "a token names an expert twice"
    if routing == "balanced":
        assert counts.max() - counts.min() <= 1
    if routing == "skewed":
        assert counts[0] == shape.T
    again = route(shape, routing, torch.Generator().manual_seed(1))
    assert not torch.equal(ids, again)


def test_skew_follows_zipf():
    shape = Shape(20000, 8, 8, 32, 2)
    ids = route(shape, "skewed", torch.Generator().manual_seed(0))
    counts = torch.bincount(ids[:, 1], minlength=32)[1:].double() / shape.T
    zipf = torch.arange(1, 32).double() ** -1.2
    assert (counts - zipf / zipf.sum()).abs().max() < 0.01


def test_skew_where_every_token_goes_everywhere():
    """At K = E there is no skew: K = 1 with half of the tokens on expert 0, beside a balanced K = 1."""
    one = Shape(2048, 7168, 2048, 8, 1)
    assert cases(SHAPES["C"], ["balanced", "skewed"]) == [
        (SHAPES["C"], "balanced"), (one, "balanced"), (one, "skewed"),
    ]  # fmt: skip
    assert cases(SHAPES["D"], ["skewed"]) == [(SHAPES["D"], "skewed")]
    counts = torch.bincount(route(one, "skewed", torch.Generator().manual_seed(0)).reshape(-1), minlength=8)
    assert counts[0] == 1024 and counts[1:].min() > 0


def test_several_routings_in_one_run():
    """Shapes, then routings in the order balanced, random, skewed, so that skewed can be compared."""
    words = bench.check(["skewed,random", "balanced"], ["balanced", "random", "skewed"])
    assert words == ["balanced", "random", "skewed"]
    assert cases(SHAPES["A"], words) == [(SHAPES["A"], routing) for routing in words]
    with pytest.raises(ValueError, match="got 'upside', need some of balanced, random, skewed"):
        bench.check(["balanced,upside"], ["balanced", "random", "skewed"])


# ---- oracle and implementations


def test_oracle_equals_a_plain_loop(inputs, want):
    """fp64 autograd over tokens and slots, one at a time."""
    x, p, w1, w2 = (t.double().requires_grad_() for t in (inputs.x, inputs.p, inputs.w1, inputs.w2))
    rows = []
    for t in range(TINY.T):
        out = 0
        for k in range(TINY.K):
            e = int(inputs.ids[t, k])
            gate, up = (w1[e] @ x[t]).chunk(2)
            out = out + w2[e] @ (torch.nn.functional.silu(gate) * up * p[t, k])
        rows.append(out)
    out = torch.stack(rows)
    grads = torch.autograd.grad(out, (x, p, w1, w2), inputs.dy.double())
    assert torch.allclose(want.out, out, rtol=0, atol=1e-12)
    for got, exact, atol in zip(
        (want.dx, want.dp, want.dw1, want.dw2), grads, (1e-11, 1e-11, 1e-5, 1e-5), strict=True
    ):
        assert torch.allclose(got.double(), exact, rtol=0, atol=atol)


@pytest.mark.parametrize("way", [TorchEager, TorchExplicit, Mok], ids=lambda way: way.name)
@pytest.mark.parametrize("which", PASSES)
def test_every_pass_holds(inputs, want, way, which):
    found = layer.errors(way(inputs), which, want)
    assert found and all(error < 0.01 for error in found.values()), found


class FakeRanks:
    """VirtualRanks on the CPU: takes what each rank is given, computes the layer of all, hands out shares."""

    def __init__(self, num_ranks, *, hidden, top_k, max_tokens, device, settings):
        assert settings.timeout_s == settings.first_timeout_s == MokRanks.timeout_s
        self.num_ranks, self.max_tokens, self.checked = num_ranks, max_tokens, 0
        self.settings = SimpleNamespace(num_sms=132 // num_ranks // 2 * 2)

    def forward(self, inputs, *, num_experts, save_rows):
        assert len(inputs) == len(save_rows) == self.num_ranks
        assert set(save_rows) in ({0}, {saved_rows(1.25, self.max_tokens, TINY.K)})
        x, ids, p, w1, w2 = zip(*inputs, strict=True)
        assert [len(part) for part in x] == [self.max_tokens] * self.num_ranks
        stacked = [torch.cat([tensor for (tensor,) in weights]) for weights in (w1, w2)]
        assert all(len(w) == num_experts for w in stacked)
        x, ids, p = map(torch.cat, (x, ids, p))
        self.layer = TorchExplicit(Inputs(TINY, "random", x, None, ids, p, *stacked))
        return [SimpleNamespace(out=out) for out in self.layer.fwd().split(self.max_tokens)]

    def prepare_backward(self, inputs, calls, dy, gradients, *, num_experts, accumulate):
        self.layer.inputs.dy = torch.cat(dy)
        dx, dp, *weights = self.layer.step()
        for into, gradient in zip(zip(*gradients, strict=True), weights, strict=True):
            for (part,), share in zip(into, gradient.split(num_experts // self.num_ranks), strict=True):
                part.add_(share) if accumulate else part.copy_(share)
        return [
            SimpleNamespace(dx=a, dp=b)
            for a, b in zip(dx.split(self.max_tokens), dp.split(self.max_tokens), strict=True)
        ]

    def launch_backward(self, calls):
        assert len(calls) == self.num_ranks

    def check(self):
        self.checked += 1

    def close(self):
        assert self.checked, "nobody looked whether a wait had failed"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("which", PASSES)
def test_virtual_ranks_share_the_layer(inputs, want, ranks, which, monkeypatch):
    monkeypatch.setattr(implementations, "VirtualRanks", FakeRanks)
    found = layer.errors(MokRanks.of(ranks)(inputs), which, want)
    assert found and all(error < 0.01 for error in found.values()), found


@pytest.mark.parametrize(
    ("ranks", "need"), [(1, "2 or more"), (3, "a divisor of 48 tokens and 8"), (16, "a divisor")]
)
def test_ranks_that_do_not_divide_the_layer(ranks, need):
    with pytest.raises(ValueError, match=f"--ranks: got {ranks}, need {need}"):
        MokRanks.of(ranks).fit(TINY)


def test_routes():
    ids = torch.tensor([[2, 0], [0, 3], [2, 2]], dtype=torch.int32)
    routes = Routes.of(ids, 4)
    assert routes.order.tolist() == [1, 2, 0, 4, 5, 3] and routes.token.tolist() == [0, 1, 0, 2, 2, 1]
    assert routes.ends.tolist() == [2, 2, 5, 6] and routes.slot.tolist() == [[2, 0], [1, 5], [3, 4]]


def test_relative_error_sees_what_is_wrong():
    want = torch.ones(40, 3)
    assert layer.relative_error(want, want) == 0
    assert layer.relative_error(want * 2, want, scale=2.0) == 0
    assert layer.relative_error(want * 1.5, want) == pytest.approx(0.5)
    assert layer.relative_error(torch.full((40, 3), float("nan")), want) == float("inf")
    assert layer.relative_error(torch.ones(3, 40), want) == float("inf")


# ---- measuring


class Wrong(TorchExplicit):
    """Three per cent too much in the output; gradients right."""

    name = "wrong"

    def fwd(self):
        return super().fwd() * 1.03


class Writes(TorchExplicit):
    """Writes the fp32 gradients instead of adding them."""

    name = "writes"

    def step_acc32(self, main):
        dx, dp, dw1, dw2 = self.step()
        main[0].copy_(dw1)
        main[1].copy_(dw2)
        return dx, dp


class Forward(TorchExplicit):
    name = "forward-only"

    def step(self):
        raise NotImplementedError("no backward yet")

    def step_acc32(self, main):
        return self.step()


class Absent(TorchExplicit):
    name = "absent"

    def __init__(self, inputs):
        raise ImportError("not built")


class Breaks(TorchExplicit):
    """A wait fails while the second turn is timed."""

    name = "breaks"
    turns = 0

    def check(self):
        self.turns += 1
        if self.turns == 2:
            raise TimeoutError("rank 1 waited")


def passes_of(report, impl):
    return [r["pass"] for r in report.records if r["impl"] == impl]


def test_wrong_implementations_are_not_timed():
    report = measure([TorchEager, Wrong, Writes, Forward, Absent])
    assert passes_of(report, "torch-eager") == list(PASSES)
    assert "fwd" not in passes_of(report, "wrong") and "fwd_nograd" in passes_of(report, "wrong")
    assert passes_of(report, "writes") == ["fwd_nograd", "fwd", "bwd"]
    assert passes_of(report, "forward-only") == ["fwd_nograd", "fwd"] and not passes_of(report, "absent")
    text = "\n".join(report.troubles)
    assert "wrong fwd: out: relative error" in text and "writes bwd_acc32: dw1" in text
    assert "no backward yet" in text and "absent: ImportError: not built" in text


def test_what_fails_while_timed_leaves_no_record():
    report = measure([TorchEager, Breaks, TorchExplicit], passes=("fwd",))
    assert [r["impl"] for r in report.records] == ["torch-eager", "torch-explicit"]
    assert "breaks, while timed: TimeoutError: rank 1 waited" in report.troubles[0]


def test_a_wrong_yardstick_excuses_nobody():
    report = measure([Wrong, Writes, TorchEager], passes=("fwd", "bwd_acc32"))
    assert passes_of(report, "wrong") == ["bwd_acc32"] and passes_of(report, "writes") == ["fwd"]
    assert passes_of(report, "torch-eager") == ["fwd", "bwd_acc32"]
    far_off = type("FarOff", (Wrong,), {"name": "far-off", "fwd": lambda self: TorchExplicit.fwd(self) * 9})
    report = measure([far_off, Wrong], passes=("fwd",))
    assert passes_of(report, "far-off") == [] and passes_of(report, "wrong") == []


def test_records_are_the_interface(tmp_path):
    report = measure([TorchEager, TorchExplicit, Mok], reps=4)
    assert not report.troubles, report.troubles
    assert len(report.records) == 3 * len(PASSES)
    for r in report.records:
        assert list(r) == [
            "commit", "date", "gpu", "driver", "cuda", "torch", "shape", "ranks", "routing", "pass", "impl",
            "ms", "tflops", "dense_tflops", "ratio_to_dense", "notes",
        ]  # fmt: skip
        assert r["shape"] == {"T": 48, "H": 64, "I": 32, "E": 8, "K": 2} and r["ranks"] == 1
        assert (
            r["commit"] == "abc" and r["routing"] == "random" and r["ms"] > 0 or r["pass"].startswith("bwd")
        )
    file = tmp_path / "deep" / "layer.json"
    layer.append(file, report.records[:2])
    layer.append(file, report.records[2:3])
    assert json.loads(file.read_text()) == report.records[:3]
    file.write_text("{}")
    with pytest.raises(ValueError, match="need a list of records"):
        layer.append(file, [])
    assert "torch-explicit" in layer.table(report.records) and "bwd_acc32" in layer.table(report.records)
    layer.plot(report.records, tmp_path / "layer.png")
    assert (tmp_path / "layer.png").stat().st_size > 1000


def test_arithmetic_of_a_record():
    """bwd = (forward + backward) - forward, and the ratio is to the mean dense rate around."""

    class Named:
        name, notes, ranks = "x", "n", 1

    times = {"fwd": [2.0, 3.0, 2.5], "bwd": [7.5, 7.4, 9.0]}
    subject = layer.Subject(Named(), list(times), times, dense=[600.0, 800.0])
    forward = layer.record(subject, "fwd", SHAPES["C"], "balanced", FACTS)
    backward = layer.record(subject, "bwd", SHAPES["C"], "balanced", FACTS)
    assert forward["ms"] == 2.5 and backward["ms"] == 5.0
    assert forward["tflops"] == round(6 * 16384 * 7168 * 2048 / 2.5e9, 1) == backward["tflops"]
    assert forward["dense_tflops"] == 700 and forward["ratio_to_dense"] == pytest.approx(
        577.2 / 700, abs=1e-3
    )


def test_ranks_are_compared_with_one(monkeypatch):
    """In one case, by time; the record says how many ranks it is of."""
    monkeypatch.setattr(implementations, "VirtualRanks", FakeRanks)
    report = measure([TorchEager, Mok, MokRanks.of(4)], passes=("fwd", "bwd"), say=print)
    assert not report.troubles
    one, four = ([r for r in report.records if r["impl"] == "mok" and r["ranks"] == n] for n in (1, 4))
    assert [r["pass"] for r in four] == ["fwd", "bwd"] and "32 SMs each" in four[0]["notes"]
    for a, b in zip(one, four, strict=True):
        assert "ratio_to_one_rank" not in a
        assert b["ratio_to_one_rank"] == pytest.approx(a["ms"] / b["ms"], abs=1e-4)
        assert b["shape"] == a["shape"]
    table = layer.table(report.records)
    assert "mok R4" in table and "ratio_to_one_rank" in table


def test_comparisons():
    facts = {"shape": vars(SHAPES["C64"]), "ranks": 1, "pass": "fwd", "impl": "mok", "ms": 0.2}
    balanced = {**facts, "dense_tflops": 700.0, "routing": "balanced", "ratio_to_dense": 0.8}
    skewed = {**balanced, "routing": "skewed", "ratio_to_dense": 0.76}
    other = {**skewed, "impl": "torch-eager"}
    layer.compare([skewed, other], [balanced], 4.24)
    assert skewed["ratio_to_balanced"] == 0.95 and "ratio_to_balanced" not in other
    assert skewed["memory_floor_ms"] == pytest.approx(704.6e6 / 4.24e9, abs=1e-3)
    many = {**balanced, "shape": {**facts["shape"], "T": 2048}}
    layer.compare([many], [], 4.24)
    assert "memory_floor_ms" not in many  # arithmetic bounds it


def test_copy_rate():
    assert layer.copy_tbps(layer.HostClock(), "cpu", size_bytes=2**20, reps=3) > 0


class Count(layer.HostClock):
    def __init__(self):
        self.seen = []

    def times(self, call, reps):
        self.seen.append((getattr(call, "__qualname__", "dense"), reps))
        return super().times(call, reps)


def test_in_turns_with_warm_ups_and_dense_around():
    clock = Count()
    dense = layer.Dense(clock, "cpu", size=16, reps=2)
    measure([TorchEager, TorchExplicit], clock=clock, dense=dense, reps=30, warmup=10, passes=("fwd",))
    forward = [reps for name, reps in clock.seen if name.endswith(".fwd")]
    # two implementations, three turns: warm-ups full in the first, short later; 30 timed calls each
    assert forward == [10, 10, 10, 10, 3, 10, 3, 10, 3, 10, 3, 10]
    assert clock.seen[-1][0] == clock.seen[0][0] != clock.seen[2][0]


# ---- peers and the command


def test_peers_that_are_not_installed(monkeypatch, capsys):
    """auto leaves them out and says so; a name is an error that says what is missing."""

    def import_module(name):
        if name == "deep_gemm":
            raise OSError("libcuda.so.1: no such file\nmore")
        if name.startswith("liger"):
            return None
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(peers.importlib, "import_module", import_module)
    assert bench.choose_peers("none") == []
    with pytest.raises(ValueError, match="got 'nonsense', need auto, none or some of sonicmoe"):
        bench.choose_peers("nonsense")
    with pytest.raises(ValueError, match="needs sonic-moe with quack-kernels; found: .*No module named"):
        bench.choose_peers("sonicmoe")
    with pytest.raises(ValueError, match="deepgemm: needs sgl-deep-gemm; found: OSError: libcuda.so.1: .*;"):
        bench.choose_peers("liger-triton,deepgemm")
    assert bench.choose_peers("auto") == [peers.LigerTriton]
    assert capsys.readouterr().out.count("not measured: ") == 2


def test_sonicmoe_weight_layout_round_trip(inputs):
    way = object.__new__(peers.SonicMoe)
    way.inputs = inputs
    in_turns, _ = way.weights()
    assert torch.equal(in_turns[:, 0], inputs.w1[:, 0]) and torch.equal(in_turns[:, 1], inputs.w1[:, TINY.I])
    assert torch.equal(way.restore(in_turns), inputs.w1)


class FakeDeepGemm:
    """DeepGEMM's grouped GEMMs by plain loops over the padded layout."""

    def m_grouped_bf16_gemm_nt_contiguous(self, a, w, out, layout):
        for i, e in enumerate(layout.tolist()):
            out[i] = a[i] @ w[e].T if e >= 0 else float("nan")

    def m_grouped_bf16_gemm_nn_contiguous(self, a, w, out, layout):
        self.m_grouped_bf16_gemm_nt_contiguous(a, w.transpose(1, 2), out, layout)

    def k_grouped_bf16_gemm_tn_contiguous(self, a, b, out, rows, rows_on_device, added):
        assert rows == rows_on_device.tolist() and added is out
        start = 0
        for e, count in enumerate(rows):
            span = slice(start, start + count)
            out[e] += (a[span].float().T @ b[span].float()).to(out.dtype)
            start += count


def test_padded_rows_of_deepgemm(inputs, want, monkeypatch):
    """Padding rows hold garbage after a GEMM; none of it may reach a result."""
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: FakeDeepGemm())
    pieces = peers.replace(peers.Pieces(), gather=peers.gather_padded)
    way = Explicit(inputs, peers.DeepGemms(inputs), pieces)
    for which in PASSES:
        found = layer.errors(way, which, want)
        assert all(error < 0.01 for error in found.values()), (which, found)


def test_without_a_gpu_exit_2(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert bench.run(["--layer"]) == 2
    assert "got no GPU" in capsys.readouterr().err
    assert bench.run(["--layer", "--shape", "nine"]) == 2 and "--shape: got 'nine'" in capsys.readouterr().err
    assert bench.run(["--layer", "--pass", "sideways"]) == 2 and "'sideways'" in capsys.readouterr().err
    assert bench.run(["--layer", "--shape", "C", "--ranks", "3"]) == 2
    assert "--ranks: got 3, need a divisor of 2048 tokens and 8 experts" in capsys.readouterr().err


def test_does_not_import_megatron():
    """Machines that measure kernels have torch and no Megatron-Core."""
    code = (
        "import sys; sys.modules['megatron'] = None; sys.modules['megatron.core'] = None\n"
        "from megatron_mok.bench import layer, implementations, peers\n"
        "from megatron_mok.cli import main\n"
        "sys.exit(main(['bench', '--layer', '--shape', 'nine']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "nine" in done.stderr, done.stderr
