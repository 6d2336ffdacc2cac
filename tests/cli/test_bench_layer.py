"""mok bench --layer without a GPU: routing, arithmetic, oracle, checks and records, on tiny shapes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_mok.bench import layer, peers
from megatron_mok.bench.cases import PASSES, SHAPES, Shape, cases, make_inputs, route
from megatron_mok.bench.implementations import Explicit, Mok, Routes, TorchEager
from megatron_mok.cli import bench

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
        name, notes = "x", "n"

    times = {"fwd": [2.0, 3.0, 2.5], "bwd": [7.5, 7.4, 9.0]}
    subject = layer.Subject(Named(), list(times), times, dense=[600.0, 800.0])
    forward = layer.record(subject, "fwd", SHAPES["C"], "balanced", FACTS)
    backward = layer.record(subject, "bwd", SHAPES["C"], "balanced", FACTS)
    assert forward["ms"] == 2.5 and backward["ms"] == 5.0
    assert forward["tflops"] == round(6 * 16384 * 7168 * 2048 / 2.5e9, 1) == backward["tflops"]
    assert forward["dense_tflops"] == 700 and forward["ratio_to_dense"] == pytest.approx(
        577.2 / 700, abs=1e-3
    )


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


def test_peers_that_are_not_installed():
    assert bench.choose_peers("none") == []
    with pytest.raises(ValueError, match="got 'nonsense', need auto, none or some of sonicmoe"):
        bench.choose_peers("nonsense")
    if not peers.present("sonicmoe"):
        with pytest.raises(ValueError, match="sonicmoe does not import"):
            bench.choose_peers("sonicmoe")


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
