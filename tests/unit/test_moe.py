"""The reference layer on one rank against loops in fp64: values, gradients, rounding points, any routing."""

import pytest
import torch

from megatron_mok.ops import moe_backward, moe_forward
from megatron_mok.reference import activation as act
from megatron_mok.reference import exchange, moe, schedule
from tests import oracle
from tests.oracle import assert_close, assert_equal_bits, problem, relative_error, solve


@pytest.fixture(scope="module")
def comm():
    handle = exchange.register()
    yield handle
    exchange.close(handle)


def run(comm, q, *, save_rows=None, max_tokens=None, poison=False):
    """out and gradients through the operators, with stacked fp32 (fp64 for fp64) weight gradients."""
    tokens, top_k = q.ids.shape
    save_rows = 8 * (tokens * top_k + 8 * q.num_experts) // 8 if save_rows is None else save_rows
    kind, limit = int(act.from_name(q.activation)), q.limit or act.NO_LIMIT
    size = (q.num_experts, max_tokens or tokens, 1)
    out, h, table = moe_forward(q.x, q.ids, q.p, [q.w1], [q.w2], comm, *size, save_rows, kind, limit)
    if poison:  # what no row was saved to must not be read
        written = torch.zeros(len(h), dtype=torch.bool)
        index = schedule.rows(table, q.num_experts).saved_index()
        written[index[index < len(h) // 8 * 8]] = True
        h[~written] = float("nan")
    wide = moe.accumulation_dtype(q.x.dtype)
    dw1, dw2 = (torch.full_like(w, float("nan"), dtype=wide) for w in (q.w1, q.w2))
    dx, dp = moe_backward(
        q.dy, q.x, q.ids, [q.w1], [q.w2], h, table, [dw1], [dw2], comm, size[0], top_k, size[1], 1, 0, 3,
        kind, limit,
    )  # fmt: skip
    return {"out": out, "dx": dx, "dp": dp, "dw1": dw1, "dw2": dw2}


ACTIVATIONS = [
    ("swiglu", None),
    ("swiglu", 0.7),
    ("geglu", None),
    ("quick_geglu", 0.7),
    ("squared_relu", None),
]


@pytest.mark.parametrize(("activation", "limit"), ACTIVATIONS)
def test_fp64_equals_the_token_loop(comm, activation, limit):
    q = problem(dtype=torch.float64, activation=activation, limit=limit)
    want = solve(q, oracle.token_loop)
    assert_close(solve(q), want, 1e-13)
    got = run(comm, q)
    assert relative_error(got.pop("dp"), want.pop("dp")) < 1e-7  # dp is fp32
    assert_close(got, want, 1e-13)


@pytest.mark.parametrize(("activation", "limit"), ACTIVATIONS)
def test_gradcheck(activation, limit):
    """Also of the probabilities, which the operator takes in fp32 only: on rows, in fp64."""
    q = problem(tokens=5, hidden=4, ffn=3, experts=3, top_k=1, dtype=torch.float64, activation=activation)
    kind, rows = act.from_name(activation), torch.tensor([3, 0, 2])

    class Rows(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, p, w1, w2):
            y, h = moe.forward(x, p, rows, [w1], [w2], kind, limit or 0.0)
            ctx.save_for_backward(x, p, w1, w2, h)
            return y

        @staticmethod
        def backward(ctx, dy):
            x, p, w1, w2, h = ctx.saved_tensors
            dw1, dw2 = torch.empty_like(w1), torch.empty_like(w2)
            saved = torch.ones(len(x), dtype=torch.bool)
            dx, dp = moe.backward(
                dy, x, p, rows, [w1], [w2], h, saved, [dw1], [dw2], False, kind, limit or 0.0
            )
            return dx, dp, dw1, dw2

    inputs = [t.requires_grad_() for t in (q.x, q.p[:, 0].double(), q.w1, q.w2)]
    assert torch.autograd.gradcheck(Rows.apply, inputs)


def test_gradcheck_of_the_operator(comm):
    q = problem(tokens=6, hidden=4, ffn=3, experts=3, dtype=torch.float64)

    def layer(x, w1, w2):
        return moe_forward(x, q.ids, q.p, [w1], [w2], comm, 3, 6, 1, 8, 0, 0.0)[0]

    assert torch.autograd.gradcheck(layer, [t.requires_grad_() for t in (q.x, q.w1, q.w2)])


@pytest.mark.parametrize(("activation", "limit"), ACTIVATIONS)
def test_fp32_and_bf16_stay_near_fp64(comm, activation, limit):
    """error(ours) <= 2 * error(torch in the same dtype): the same GEMMs with torch's own rounding."""
    for dtype, floor in ((torch.float32, 1e-6), (torch.bfloat16, 1e-3)):
        q = problem(130, 64, 48, 4, 2, dtype=dtype, activation=activation, limit=limit)
        want, got = solve(q), run(comm, q)
        x, p, w1, w2 = (t.detach().requires_grad_() for t in (q.x, q.p, q.w1, q.w2))
        out = oracle.expert_loop(x, q.ids, p.to(dtype), w1, w2, activation, limit)
        grads = torch.autograd.grad(out, (x, p, w1, w2), q.dy)
        torchs = dict(zip(want, (out, *grads), strict=True))
        for name in want:
            bound = 2 * relative_error(torchs[name], want[name]) + floor
            assert relative_error(got[name], want[name]) <= bound, (dtype, name)


def test_bf16_rounding_points(comm):
    """Each formula of docs/numerics.md once more, all tokens on one expert so that the GEMMs are the same."""
    q = problem(tokens=48, hidden=64, ffn=32, experts=1, top_k=1, dtype=torch.bfloat16)
    x, dy, w1, w2 = (t.float() for t in (q.x, q.dy, q.w1[0], q.w2[0]))

    def bf16(t):
        return t.bfloat16().float()

    h = bf16(x @ w1.T)
    gate, up = h.chunk(2, -1)
    a = bf16(torch.nn.functional.silu(gate) * up * q.p)
    y = bf16(a @ w2.T)
    d_a = dy @ w2
    s = torch.sigmoid(gate)
    d = d_a * q.p
    d_gate = d * (s * (1 + gate * (1 - s))) * up
    dh = bf16(torch.cat([d_gate, d * torch.nn.functional.silu(gate)], -1))
    want = {
        "out": y.bfloat16(),
        "dx": (dh @ w1).bfloat16(),
        "dp": (torch.nn.functional.silu(gate) * up * d_a).sum(1, keepdim=True),
        "dw1": (dh.T @ x).unsqueeze(0),
        "dw2": (dy.T @ a).unsqueeze(0),
    }
    assert_equal_bits(run(comm, q), want)


def test_out_is_the_fp32_sum_over_k_ascending_rounded_once():
    slots = torch.tensor([[256.0, 1.0, 1.0], [1.0, 1.0, 256.0]]).bfloat16().unsqueeze(-1)
    assert moe.combine(slots, torch.bfloat16).flatten().tolist() == [258.0, 258.0]  # in bf16: 256 and 258
    big = torch.tensor([[2.0**24, 1.0, -(2.0**24)], [2.0**24, -(2.0**24), 1.0]]).unsqueeze(-1)
    assert moe.combine(big, torch.float32).flatten().tolist() == [0.0, 1.0]  # order of the sum
    zeros = moe.combine(torch.tensor([[[-0.0], [-0.0]]]), torch.float32)
    assert not torch.signbit(zeros).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_how_many_rows_were_saved(comm, dtype):
    q = problem(tokens=100, hidden=32, ffn=24, experts=5, top_k=3, dtype=dtype, seed=1)
    want = run(comm, q)
    for save_rows in (0, 7, 8, 64, 200, 296, 400):
        assert_equal_bits(run(comm, q, save_rows=save_rows, poison=True), want)
    few = problem(tokens=5, experts=1, top_k=1, dtype=dtype)  # rows are saved by whole groups of 8
    assert_equal_bits(run(comm, few, save_rows=7, poison=True), run(comm, few))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_inputs_same_bits_whatever_max_tokens_and_weights_in_a_list(comm, dtype):
    q = problem(tokens=64, hidden=32, ffn=24, experts=5, top_k=3, dtype=dtype, seed=2)
    want = run(comm, q)
    assert_equal_bits(run(comm, q), want)
    assert_equal_bits(run(comm, q, max_tokens=1000), want)
    args = (comm, 5, 64, 1, -1, 0, 0.0)
    out, h, table = moe_forward(q.x, q.ids, q.p, list(q.w1), list(q.w2), *args)
    assert torch.equal(out, want["out"]) and h.numel() == table.numel() == 0


# ---- routing: any is exact ----


def routing(kind, tokens, experts, top_k):
    g = torch.Generator().manual_seed(5)
    ids = torch.randint(0, experts, (tokens, top_k), generator=g, dtype=torch.int32)
    if kind == "B01-all-on-one":
        ids[:] = 0
    elif kind == "B08-repeated":
        ids[5], ids[6] = torch.zeros(top_k), torch.arange(top_k) // 2
    elif kind == "B08-foreign":
        ids[::3, 0], ids[1::3, 1], ids[2::3, -1] = experts, 2**31 - 1, -(2**31)
    elif kind == "B09-absent":
        ids[::3, 1] = -1
        ids[::7] = -1
    elif kind == "B02-only-the-last-expert":
        ids[:] = experts - 1
    elif kind == "B02-no-route-at-all":
        ids[:] = -1
    return ids


KINDS = ["B01-all-on-one", "B08-repeated", "B08-foreign", "B09-absent", "B02-only-the-last-expert"]


@pytest.mark.parametrize("kind", [*KINDS, "B02-no-route-at-all"])
def test_routing(comm, kind):
    q = problem(tokens=64, experts=8, top_k=4, dtype=torch.float64)
    q.ids = routing(kind, 64, 8, 4)
    got, want = run(comm, q), solve(q)
    assert relative_error(got.pop("dp"), want.pop("dp")) < 1e-7
    assert_close(got, want, 1e-13)
    none = ~((q.ids >= 0) & (q.ids < 8)).any(1)
    assert (got["out"][none] == 0).all() and (got["dx"][none] == 0).all()
    for e in range(8):
        if not (q.ids == e).any():
            assert (got["dw1"][e] == 0).all() and (got["dw2"][e] == 0).all()


def rows_per_expert(counts):
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).int()
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))].unsqueeze(1)


COUNTS = [
    [162, 0, 2577, 446, 0, 83],
    [128, 64, 64, 0],
    [0, 0, 0, 256],
    [0, 256, 0, 0],
    [1, 17, 33, 127],
    *([40, 40, 40, n] for n in (0, 1, 7, 8, 9, 16)),
]


@pytest.mark.parametrize("counts", COUNTS, ids=lambda c: "B02-B03-B29-" + "-".join(map(str, c)))
def test_uneven_experts(comm, counts):
    """Weight gradients of empty experts are exact zeros although their buffers held NaN."""
    q = problem(sum(counts), 32, 16, len(counts), 1, torch.float32)
    q.ids = rows_per_expert(counts)
    got = run(comm, q, poison=True)
    assert_close(got, solve(q), 2e-6)
    for e, count in enumerate(counts):
        if not count:
            assert (got["dw1"][e] == 0).all() and (got["dw2"][e] == 0).all()


@pytest.mark.parametrize("tokens", [0, 1, 255, 257, 511, 513], ids="B05-B18-T{}".format)
def test_any_number_of_tokens(comm, tokens):
    q = problem(tokens=tokens, dtype=torch.float32)
    got = run(comm, q, max_tokens=max(tokens, 1))
    assert got["out"].shape == (tokens, 16) and got["dp"].shape == (tokens, 2)
    assert_close(got, solve(q), 2e-6)


def test_B13_top_1_keeps_its_probability_and_its_gradient(comm):
    q = problem(experts=8, top_k=1, dtype=torch.float64)
    q.p = torch.rand(24, 1, generator=torch.Generator().manual_seed(9)) / 2
    got = run(comm, q)
    ones = oracle.expert_loop(q.x, q.ids, torch.ones_like(q.p).double(), q.w1, q.w2)
    assert relative_error(got["out"], ones * q.p.double()) < 1e-13
    assert relative_error(got["dp"], (ones * q.dy).sum(1, keepdim=True)) < 1e-6
    assert (got["dp"] != 0).all()


def test_probability_zero_has_its_true_gradient(comm):
    q = problem(dtype=torch.float64)
    q.p[::2] = 0
    got, want = run(comm, q), solve(q)
    assert (want["dp"][::2] != 0).all()
    assert relative_error(got["dp"], want["dp"]) < 1e-7


@pytest.mark.parametrize("experts", [63, 64, 65, 128, 896, 1025], ids="B15-E{}".format)
def test_many_experts(comm, experts):
    q = problem(256, 8, 4, experts, 8, torch.float32)
    assert_close(run(comm, q), solve(q), 2e-6)


@pytest.mark.parametrize(
    ("hidden", "ffn", "top_k"),
    [(129, 100, 2), (320, 36, 16), (1600, 7, 17), (2880, 8, 1)],
    ids=lambda value: f"B16-{value}",
)
def test_any_size(comm, hidden, ffn, top_k):
    q = problem(20, hidden, ffn, 17, top_k, torch.float32)
    assert_close(run(comm, q), solve(q), 2e-6)


@pytest.mark.parametrize("top_k", [1, 2, 4, 8, 16], ids="B25-K{}".format)
def test_error_is_flat_in_top_k(comm, top_k):
    q = problem(200, 32, 16, 32, top_k, torch.bfloat16)
    got, want = run(comm, q), solve(q)
    assert relative_error(got["out"], want["out"]) < 5e-3
    assert relative_error(got["dx"], want["dx"]) < 5e-3


def test_B26_probability_is_applied_exactly_once(comm):
    q = problem(dtype=torch.float64)
    half, ones = torch.full_like(q.p, 0.5), torch.ones_like(q.p)
    q.p = half
    at_half = run(comm, q)["out"]
    q.p = ones
    assert torch.allclose(at_half, run(comm, q)["out"] / 2, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_B28_nan_and_inf_tokens_stay_in_their_rows(comm, dtype):
    q = problem(40, 32, 16, 8, 2, dtype, seed=3)
    want = run(comm, q)
    q.x[7], q.x[8] = float("nan"), float("inf")
    got = run(comm, q)
    good = torch.ones(40, dtype=torch.bool)
    good[7:9] = False
    for name in ("out", "dx", "dp"):
        assert torch.equal(got[name][good], want[name][good]), name
        assert not got[name][7].isfinite().all()
    touched = set(q.ids[7:9].flatten().tolist())
    for e in set(range(8)) - touched:
        assert torch.equal(got["dw1"][e], want["dw1"][e]) and torch.equal(got["dw2"][e], want["dw2"][e])


def test_B20_sizes_beyond_32_bits_do_not_overflow():
    """38000 tokens, k = 8, H = 7168: offsets of rows pass 2^31 elements; the arithmetic is Python's."""
    from megatron_mok.runtime import saved_bytes, workspace_bytes

    bytes_ = workspace_bytes(max_tokens=38000, hidden=7168, top_k=8, num_ranks=1)
    assert bytes_ >= 2 * 38000 * 7168 * 10 > 2**32
    assert saved_bytes(tokens=38000, ffn=2048, top_k=8, num_experts=8, num_ranks=1) > 2 * 380000 * 4096


def test_B33_weight_gradients_of_many_turns_add_up_in_fp32(comm):
    """Five turns into one bf16-valued problem's fp32 buffer are as near to fp64 as one turn."""
    q = problem(640, 32, 16, 1, 1, torch.bfloat16)
    want, once = solve(q), run(comm, q)
    total = {"dw1": torch.zeros(1, 32, 32), "dw2": torch.zeros(1, 32, 16)}
    for part in torch.arange(640).chunk(5):
        out, h, table = moe_forward(
            q.x[part], q.ids[part], q.p[part], [q.w1], [q.w2], comm, 1, 128, 1, 128, 0, 0.0
        )
        moe_backward(
            q.dy[part], q.x[part], q.ids[part], [q.w1], [q.w2], h, table, [total["dw1"]], [total["dw2"]],
            comm, 1, 1, 128, 1, 1, 0, 0, 0.0,
        )  # fmt: skip
    for name in total:
        assert relative_error(total[name], once[name]) < 1e-6
        assert relative_error(total[name], want[name]) < 1.5 * relative_error(once[name], want[name])
