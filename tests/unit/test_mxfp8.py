"""MXFP8 against its definition: every E4M3 value, the OCP scale rule, exactness in bf16, the layer on top."""

import math

import pytest
import torch

from megatron_mok.ops import moe_backward, moe_forward
from megatron_mok.reference import exchange, moe, mxfp8
from tests.oracle import assert_equal_bits, expert_loop, problem, relative_error, solve


def e4m3_values():
    """All finite values from the bits: 4 exponent bits with bias 7, 3 mantissa bits, S.1111.111 is NaN."""
    values = {0.0} | {m / 8 * 2**-6 for m in range(1, 8)}
    values |= {(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)}
    return sorted(values | {-v for v in values})


def nearest_even(v, values):
    """The nearest value, ties to the even mantissa, saturating: by search, not by bits."""
    v = min(max(v, -448.0), 448.0)
    below, above = max(x for x in values if x <= v), min(x for x in values if x >= v)
    if v - below != above - v:
        return below if v - below < above - v else above
    step = above - below
    return below if step == 0 or (below / step) % 2 == 0 else above


def block_by_definition(block, rule):
    """(scale exponent, decoded values) of at most 32 numbers, in Python floats."""
    values = e4m3_values()
    amax = max(map(abs, block))
    if amax == 0:
        return -127, [0.0] * len(block)
    if rule == "floor":
        shift = math.floor(math.log2(amax)) - 8
    else:
        shift = math.ceil(math.log2(amax / 448))
    shift = max(shift, -127)
    return shift, [nearest_even(v / 2.0**shift, values) * 2.0**shift for v in block]


@pytest.mark.parametrize("rule", ["floor", "ceil"])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 3e30, 2.0**-120])
def test_quantise_equals_its_definition(rule, scale):
    t = (scale * torch.randn(3, 70, generator=torch.Generator().manual_seed(0))).bfloat16()
    t[0, 5], t[1, 40:] = 0.0, 0.0
    q = mxfp8.quantise(t, 1, rule)
    assert q.data.shape == (3, 70) and q.scale.shape == (3, 3)
    decoded = q.dequantise(torch.float64)
    for row in range(3):
        for b in range(3):
            shift, want = block_by_definition(t[row, 32 * b : 32 * b + 32].tolist(), rule)
            assert q.scale[row, b].item() == shift + 127
            assert decoded[row, 32 * b : 32 * b + 32].tolist() == want


def test_every_e4m3_value_and_midpoint_rounds_to_nearest_even():
    values = e4m3_values()
    middles = [(a + b) / 2 for a, b in zip(values, values[1:], strict=False)]
    for v in [*values, *middles]:
        block = torch.tensor([256.0, v])  # amax 256 .. 448: the scale is 1
        got = mxfp8.quantise(block, 0)
        assert got.scale.item() == 127
        assert got.dequantise()[1].item() == nearest_even(v, values)


def test_floor_saturates_where_ceil_does_not():
    t = torch.tensor([500.0])
    assert mxfp8.quantise(t, 0).dequantise().item() == 448.0
    assert mxfp8.quantise(t, 0, "ceil").dequantise().item() == 512.0
    with pytest.raises(ValueError, match="rule: got 'up'"):
        mxfp8.quantise(t, 0, "up")


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_both_orientations_are_the_same_blocks(axis):
    t = torch.randn(70, 45, generator=torch.Generator().manual_seed(1))
    q, turned = mxfp8.quantise(t, axis), mxfp8.quantise(t.T.contiguous(), 1 - axis % 2)
    assert torch.equal(q.dequantise(), turned.dequantise().T)
    assert q.scale.shape == ((3, 45) if axis == 0 else (70, 2))


def test_decoding_to_bf16_is_exact_within_the_stated_scales():
    """Every E4M3 value at every scale code, against fp64, which holds all of them."""
    values = torch.tensor(e4m3_values(), dtype=torch.float32).to(torch.float8_e4m3fn)
    normal = torch.finfo(torch.bfloat16).smallest_normal
    low, high = mxfp8.EXACT_IN_BF16
    for code in range(255):
        scale = torch.full((8,), code, dtype=torch.uint8)
        q = mxfp8.Mxfp8(values, scale, 0)
        want, got = q.dequantise(torch.float64), q.dequantise(torch.bfloat16)
        exact = torch.equal(got.double(), want)
        all_normal = bool((got[want != 0].abs() >= normal).all()) and bool(got.isfinite().all())
        assert (exact and all_normal) == (low <= code - 127 <= high)
        assert exact == (-124 <= code - 127 <= high)  # down to -124 with bf16 subnormals
        assert torch.equal(q.dequantise(torch.float32).double(), want) == (code - 127 <= high)


def test_scales_of_bf16_data_never_exceed_the_exact_range():
    assert mxfp8.quantise(torch.tensor([torch.finfo(torch.bfloat16).max]), 0).scale.item() - 127 == 119


def test_B28_nan_and_infinity_do_not_touch_their_block():
    t = torch.randn(2, 64, generator=torch.Generator().manual_seed(2))
    want = mxfp8.quantise(t, 1).dequantise()
    at = t[0].abs().argsort()[:2]  # not the largest, which sets the scale
    t[0, at[0]], t[0, at[1]] = float("nan"), float("inf")
    got = mxfp8.quantise(t, 1).dequantise()
    bad = torch.zeros(2, 64, dtype=torch.bool)
    bad[0, at] = True
    assert got[bad].isnan().all() and torch.equal(got[~bad], want[~bad])


# ---- the layer ----


@pytest.fixture(scope="module")
def comm():
    handle = exchange.register(precision="mxfp8")
    yield handle
    exchange.close(handle)


def run(comm, q, save_rows=1024):
    tokens, top_k = q.ids.shape
    size = (q.num_experts, tokens, 1)
    out, h, table = moe_forward(q.x, q.ids, q.p, [q.w1], [q.w2], comm, *size, save_rows, 0, 0.0)
    dw1, dw2 = (torch.empty(w.shape) for w in (q.w1, q.w2))
    dx, dp = moe_backward(
        q.dy, q.x, q.ids, [q.w1], [q.w2], h, table, [dw1], [dw2], comm, size[0], top_k, size[1], 1, 0, 3, 0,
        0.0,
    )  # fmt: skip
    return {"out": out, "dx": dx, "dp": dp, "dw1": dw1, "dw2": dw2}


def test_forward_and_backward_multiply_the_quantised_operands(comm):
    """One expert, every GEMM written out with the orientation its reduction axis asks for."""
    q = problem(tokens=44, hidden=96, ffn=64, experts=1, top_k=1, dtype=torch.bfloat16)

    def mx(t, axis):
        return mxfp8.quantise(t.bfloat16(), axis).dequantise()

    def bf16(t):
        return t.bfloat16().float()

    w1, w2 = q.w1[0], q.w2[0]
    h = bf16(mx(q.x, 1) @ mx(w1, 1).T)  # over H
    gate, up = h.chunk(2, -1)
    a = bf16(torch.nn.functional.silu(gate) * up * q.p)
    d_a = mx(q.dy, 1) @ mx(w2, 0)  # over H
    s = torch.sigmoid(gate)
    d = d_a * q.p
    dh = bf16(torch.cat([d * (s * (1 + gate * (1 - s))) * up, d * torch.nn.functional.silu(gate)], -1))
    want = {
        "out": (mx(a, 1) @ mx(w2, 1).T).bfloat16(),  # over I
        "dx": (mx(dh, 1) @ mx(w1, 0)).bfloat16(),  # over 2I
        "dp": (torch.nn.functional.silu(gate) * up * d_a).sum(1, keepdim=True),
        "dw1": (mx(dh, 0).T @ mx(q.x, 0)).unsqueeze(0),  # over rows
        "dw2": (mx(q.dy, 0).T @ mx(a, 0)).unsqueeze(0),
    }
    assert_equal_bits(run(comm, q), want)


@pytest.mark.parametrize("counts", [[44, 31, 33, 0, 1]], ids=lambda c: "B31-" + "-".join(map(str, c)))
@pytest.mark.parametrize(("hidden", "ffn"), [(64, 64), (64, 192), (96, 40)])
def test_any_row_count_needs_no_padding_by_the_caller(comm, counts, hidden, ffn):
    q = problem(sum(counts), hidden, ffn, len(counts), 1, torch.bfloat16)
    q.ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).int().unsqueeze(1)
    got, want = run(comm, q), solve(q)
    for name in want:
        assert 1e-3 < relative_error(got[name], want[name]) < 0.1, name  # near bf16's result, not equal to it
    assert (got["dw1"][3] == 0).all() and (got["dw2"][3] == 0).all()


def test_bits_do_not_depend_on_how_many_rows_were_saved(comm):
    q = problem(100, 64, 32, 5, 2, torch.bfloat16)
    want = run(comm, q)
    for save_rows in (0, 64):
        assert_equal_bits(run(comm, q, save_rows), want)


def test_B32_weights_are_read_anew_in_every_call(comm):
    """Nothing quantised is kept between calls."""
    q = problem(20, 64, 32, 2, 1, torch.bfloat16)
    before = run(comm, q)["out"]
    q.w2.mul_(2)
    after = run(comm, q)["out"]
    assert torch.equal(after, 2 * before)
    assert relative_error(after, expert_loop(q.x.float(), q.ids, q.p, q.w1.float(), q.w2.float())) < 0.1


def test_plain_operands_are_exact():
    t = torch.randn(5, 5).bfloat16()
    assert torch.equal(moe.exact_operand(t, 0), t.float())
