"""The backward kernel against fp64, and the invariants that concern it.

Sizes in the names: R ranks, T most tokens of a rank, K experts per token, E experts, H hidden size,
I intermediate size.
"""

import gc
import itertools
import math
import random
import weakref
from dataclasses import replace

import pytest
import torch

from megatron_mok import errors, native, ops, runtime
from megatron_mok.native import Settings
from megatron_mok.native.structs import CallKind
from tests.gpu.world import (
    CORNERS,
    KINDS,
    SHAPES,
    SMALL,
    THREE,
    Case,
    Gradients,
    Layer,
    Neighbour,
    Variant,
    World,
    assert_close,
    assert_gradients,
    assert_named,
    assert_same_bits,
    assert_same_gradients,
    backward_cases,
    expected_gradients,
    knobs,
    python,
    random_variant,
    relative_error,
    route,
    routed_rows,
)

BF16, FP32 = torch.bfloat16, torch.float32
RANDOM = backward_cases()
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="an index other than 0 needs two GPUs")


def same_turns(layer: Layer, *worlds: World) -> bool:
    """Does every expert's weight gradient take one turn in each of the worlds?"""
    return int(routed_rows(layer).max()) <= min(world.turn_rows(layer.case) for world in worlds)


def assert_layer(case: Case, device: torch.device, variant: Variant | None = None) -> None:
    """Correct, and equal over knobs: bit for bit, weight gradients of several turns to fp32 accuracy."""
    layer = Layer.make(case, device)
    variant = variant or Variant(save=1.25, dtype=FP32, accumulate=False)
    before = 0.25 if variant.accumulate else math.nan

    def step(world: World) -> tuple[list[torch.Tensor], list[Gradients]]:
        calls = world.forward(layer, variant.save)
        into = [Gradients.empty(case, device, variant.dtype, before) for _ in range(case.ranks)]
        gradients = world.backward(layer, calls, into, accumulate=variant.accumulate)
        return [call.out for call in calls], gradients

    exact, rounded = expected_gradients(layer)
    touched = (routed_rows(layer) > 0).split(case.local)
    if variant.accumulate:
        for r, rows in enumerate(touched):
            for g in (exact[r], rounded[r]):
                g.dw1[rows] += before
                g.dw2[rows] += before
    with World(case, device) as world, World(case, device, knobs(case, device)) as other:
        out, first = step(world)
        again, second = step(other)
        exactly = same_turns(layer, world, other)
    for r in range(case.ranks):
        assert_close(out[r], exact[r].out, rounded[r].out, f"out of rank {r}")
        assert torch.equal(out[r], again[r]), f"out of rank {r}"
    if variant.accumulate:
        for r, rows in enumerate(touched):
            for g in (first[r], second[r]):
                for dw in (g.dw1, g.dw2):
                    assert bool((dw[~rows] == before).all()), "an expert without rows was touched"
                    dw[~rows] = 0
    assert_gradients(layer, first, (exact, rounded))
    assert_same_gradients(first, second, None if exactly else 1e-5 if variant.dtype == FP32 else 1e-2)


@pytest.mark.parametrize("name", RANDOM)
def test_random(name, device):
    case = RANDOM[name]
    assert_layer(case, device, random_variant(case.seed))


@pytest.mark.parametrize("name", SHAPES)
def test_shape(name, device):
    """The shapes that performance is measured at."""
    layer = Layer.make(SHAPES[name], device)
    with World(layer.case, device) as world:
        got = world.step(layer)
    assert_gradients(layer, got)


@pytest.mark.parametrize("name", CORNERS)
def test_corner(name, device):
    assert_layer(CORNERS[name], device)


@pytest.mark.parametrize("save", [0.0, 0.5])
def test_B07_all_rows_on_one_rank_whatever_is_saved(save, device):
    """The default, 1.25, is among the corners."""
    assert_layer(CORNERS["B07-all on one rank"], device, Variant(save, dtype=FP32, accumulate=False))


@pytest.mark.parametrize(
    "rows", [(1, 17, 33, 127), (128, 64, 0, 64), (0, 129, 0, 257), (9, 511, 2, 513)], ids=str
)
def test_B29_rows_of_each_expert(rows, device):
    """Row counts around granules, blocks and units, and experts without rows between others."""
    layer = Layer.make(Case((sum(rows),), 1, 4, 512, 384), device)
    layer.ids = [torch.repeat_interleave(torch.tensor(rows)).int().view(-1, 1).to(device)]
    with World(layer.case, device) as world:
        for save in (0.0, 1.25):
            assert_gradients(layer, world.step(layer, save))


@pytest.mark.parametrize("accumulate", [False, True], ids=["fresh", "accumulate"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_B02_B03_experts_without_rows(dtype, accumulate, device):
    """Exact zeros where gradients are written, untouched memory where they are added."""
    layer = Layer.make(Case((300, 200), 2, 16, 512, 256), device)
    for ids in layer.ids:
        ids[ids % 3 == 0] = 1
    empty = (routed_rows(layer) == 0).view(2, 8)
    assert int(empty.sum()) == 6
    with World(layer.case, device) as world:
        into = [Gradients.empty(layer.case, device, dtype, 3.0 if accumulate else math.nan) for _ in range(2)]
        world.backward(layer, world.forward(layer, True), into, accumulate=accumulate)
        for r, got in enumerate(into):
            for dw in (got.dw1, got.dw2):
                assert bool((dw[empty[r]] == (3.0 if accumulate else 0.0)).all())
                assert bool(dw.isfinite().all()) and bool((dw[~empty[r]] != 3.0).any())


def test_the_gradient_of_a_zero_probability(device):
    """dp does not divide by p: its value is that of any other p, and dx and dW get nothing from the route."""
    layer = Layer.make(Case((300,), 2, 8, 512, 256), device)
    with World(layer.case, device) as world:
        usual = world.step(layer)[0].dp.clone()
        layer.probs[0][::2] = 0.0
        got = world.step(layer)
    assert torch.equal(got[0].dp, usual) and bool((usual[::2] != 0).all())
    assert not bool(got[0].dx[::2].any())
    assert_gradients(layer, got)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_B39_any_number_of_saved_rows_gives_the_same_bits(ranks, device):
    layer = Layer.make(Case((700,) * ranks, 4, 6, 512, 384, "skewed"), device)
    with World(layer.case, device) as world:
        first = world.step(layer, 1.25)
        assert_gradients(layer, first)
        for save in (0.0, 0.01, 0.3, 0.77, 4.0):
            assert_same_gradients(first, world.step(layer, save))


# ---- turns ----


@pytest.mark.parametrize("ranks", [1, 2])
def test_B33_turns_add_up_in_fp32(ranks, device):
    """Small rings, so that an expert takes many turns, against one turn; bf16 is rounded once at the end."""
    case = Case((1200,) * ranks, 2, 2 * ranks, 512, 256, "skewed")
    layer = Layer.make(case, device)
    exact, _ = expected_gradients(layer)
    with (
        World(case, device, Settings(ring_rows=512)) as many,
        World(case, device, Settings(ring_rows=1 << 16)) as few,
    ):
        assert many.turn_rows(case) < int(routed_rows(layer).max())
        assert many.turn_rows(case) < few.turn_rows(case)
        turns, once = many.step(layer), few.step(layer)
        assert_gradients(layer, turns)
        assert_same_gradients(once, turns, weights=1e-5)
        for name in ("dw1", "dw2"):
            ours, theirs, truth = (getattr(g[0], name) for g in (turns, once, exact))
            assert relative_error(ours, truth) < 1.1 * relative_error(theirs, truth)
        calls = many.forward(layer, True)
        bf16 = many.backward(layer, calls, [Gradients.empty(case, device, BF16) for _ in range(ranks)])
        held = [Gradients.empty(case, device, BF16, 0.75) for _ in range(ranks)]
        added = many.backward(layer, calls, held, accumulate=True)
        for r, g in enumerate(turns):
            for name in ("dw1", "dw2"):
                total = getattr(g, name)
                assert torch.equal(getattr(bf16[r], name), total.bfloat16())
                assert torch.equal(getattr(added[r], name), (total + 0.75).bfloat16())


@pytest.mark.parametrize("grid", [4, 10, 66, 0])
def test_B33_turns_around_an_expert_that_needs_one(grid, device):
    """Experts with turns share the fp32 sums of a bf16 gradient, whoever stands between them."""
    rows = [300, 40, 1200, 20, 700, 10]
    case = Case((sum(rows),), 1, len(rows), 512, 384)
    layer = Layer.make(case, device)
    experts = torch.arange(len(rows), device=device).repeat_interleave(torch.tensor(rows, device=device))
    layer.ids[0].copy_(experts[torch.randperm(len(experts), device=device)].unsqueeze(1))
    with World(case, device, Settings(ring_rows=512, num_sms=grid)) as world:
        assert rows[1] < world.turn_rows(case) < rows[0]
        total = world.step(layer)
        assert_gradients(layer, total)
        calls = world.forward(layer, True)
        for _ in range(5):
            (bf16,) = world.backward(layer, calls, [Gradients.empty(case, device, BF16)])
            assert torch.equal(bf16.dw1, total[0].dw1.bfloat16())
            assert torch.equal(bf16.dw2, total[0].dw2.bfloat16())


def test_B36_fp32_main_grad_keeps_what_bf16_would_lose(device):
    """Two micro-batches into one buffer: the second adds to the first; one turn each, so the sum is exact."""
    layer = Layer.make(Case((200,), 2, 8, 512, 256), device)
    with World(layer.case, device) as world:
        calls = world.forward(layer, True)
        fresh = world.backward(layer, calls)[0]
        main = Gradients.empty(layer.case, device, FP32, 1000.0)
        for count in (1, 2):
            world.backward(layer, calls, [main], accumulate=True)
            for name in ("dw1", "dw2"):
                want = torch.full_like(getattr(main, name), 1000.0)
                for _ in range(count):
                    want += getattr(fresh, name)
                assert torch.equal(getattr(main, name), want), (name, count)
        assert not torch.equal(main.dw1.bfloat16().float(), main.dw1)


def test_one_gradient_in_fp32_and_the_other_in_bf16(device):
    layer = Layer.make(Case((600,), 2, 4, 512, 256), device)
    with World(layer.case, device) as world:
        calls = world.forward(layer, True)
        want = world.backward(layer, calls)[0]
        for dtypes in ((FP32, BF16), (BF16, FP32)):
            for accumulate in (False, True):
                mixed = Gradients(
                    torch.full_like(want.dw1, 0.5, dtype=dtypes[0]),
                    torch.full_like(want.dw2, 0.5, dtype=dtypes[1]),
                )
                world.backward(layer, calls, [mixed], accumulate=accumulate)
                for name in ("dw1", "dw2"):
                    got, sums = getattr(mixed, name), getattr(want, name)
                    assert torch.equal(got, (sums + 0.5 if accumulate else sums).to(got.dtype))


# ---- the same bits ----


@pytest.mark.parametrize("top_k", [1, 2, 4, 8, 16], ids="B25-K{}".format)
def test_error_does_not_grow_with_top_k(top_k, device):
    layer = Layer.make(Case((256,), top_k, 16, 1024, 256, "distinct"), device)
    with World(layer.case, device) as world:
        got = world.step(layer)[0]
    want = expected_gradients(layer)[0][0]
    for name in ("dx", "dw1", "dw2"):
        assert relative_error(getattr(got, name), getattr(want, name)) < 0.008, name


@pytest.mark.parametrize("ranks", [1, 2])
def test_B40_fifty_runs_give_the_same_bits(ranks, device):
    """Random grids and roles while another stream keeps the GPU busy."""
    case = Case((600,) * ranks, 4, 8, 1024, 512)
    layer = Layer.make(case, device)
    rng = random.Random(ranks)
    neighbour = Neighbour(device)
    share = torch.cuda.get_device_properties(device).multi_processor_count // ranks // 2 * 2
    with World(case, device) as world:
        first = world.step(layer)
    assert_gradients(layer, first)
    for _ in range(10):
        num_sms = rng.randrange(8, share + 1, 2)
        settings = Settings(num_sms=num_sms, backward_comm_sms=rng.choice([0, 2, 4, 6]))
        with World(case, device, settings) as world:
            for i in range(5):
                neighbour.multiply(2 * i)
                assert_same_gradients(first, world.step(layer, rng.choice([0.0, 0.5, 1.25])))


def test_B40_thirty_layers_are_recomputed_as_they_were(device):
    """Four ranks, ten steps, a busy neighbour: forward again has the rows, their order and the output of the
    first time, and each step the gradients of the first.
    """
    case = Case((256,) * 4, 4, 8, 256, 128)
    one, generator = Layer.make(case, device), torch.Generator(device).manual_seed(1)
    layers = [
        replace(one, ids=[route(KINDS[i % len(KINDS)], t, 4, 8, generator) for t in case.tokens])
        for i in range(30)
    ]
    neighbour, first = Neighbour(device), {}
    with World(case, device) as world:
        for _ in range(10):
            calls = [world.forward(layer) for layer in layers]
            for i in reversed(range(30)):
                neighbour.multiply(3)
                again = world.forward(layers[i], True)
                assert_same_bits(layers[i], calls[i], again)
                got = world.backward(layers[i], again)
                assert_same_gradients(first.setdefault(i, got), got)


GRIDS = [
    Settings(num_sms=4, backward_comm_sms=2),
    Settings(num_sms=8, backward_comm_sms=6),
    Settings(num_sms=64, backward_comm_sms=16),
    Settings(backward_comm_sms=2),
    Settings(backward_comm_sms=32),
    Settings(minibatch_units=1),
    Settings(ring_rows=1 << 13),
    Settings(ring_rows=1 << 16),
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_bits_do_not_depend_on_the_knobs(ranks, device):
    """Rings that hold every expert in one turn."""
    case = Case((800,) * ranks, 4, 16, 768, 384)
    layer = Layer.make(case, device)
    with World(case, device, Settings(ring_rows=1 << 14)) as world:
        first = world.step(layer)
        assert same_turns(layer, world)
    assert_gradients(layer, first)
    for settings in GRIDS:
        with World(case, device, settings) as world:
            assert_same_gradients(first, world.step(layer), None if same_turns(layer, world) else 1e-5)


def test_B47_nothing_stale_is_read(device):
    """Workspaces full of zeros and full of NaN give the same bits; so do outputs."""
    layer = Layer.make(Case((300, 150), 4, 8, 512, 384, "absent"), device)
    with World(layer.case, device) as world:
        calls = world.forward(layer, 0.5)
        first = world.backward(layer, calls)
        second = [Gradients.empty(layer.case, device, value=7.0) for _ in calls]
        prepared = world.prepare_backward(layer, calls, second)
        torch.cuda.synchronize()
        world.poison(layer.case, 0)
        torch.cuda.synchronize()
        world.virtual.launch_backward(prepared)
        torch.cuda.synchronize()
        world.virtual.check()
        assert_same_gradients(first, second)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_B72_ranks_give_the_gradients_of_one(ranks, device):
    """The same batch on one rank and over several: dx and dp bit for bit, weights to fp32 accuracy."""
    tokens = tuple(80 + 17 * r for r in range(ranks))
    layer = Layer.make(Case(tokens, 4, 24, 512, 256, "absent"), device)
    alone = Layer(
        Case((sum(tokens),), 4, 24, 512, 256, "absent"),
        *[[torch.cat(t)] for t in (layer.x, layer.ids, layer.probs)], layer.w1, layer.w2,
        [torch.cat(layer.dy)],
    )  # fmt: skip
    with World(layer.case, device) as many, World(alone.case, device) as one:
        got, want = many.step(layer), one.step(alone)[0]
    assert_gradients(layer, got)
    assert torch.equal(torch.cat([g.dx for g in got]), want.dx)
    assert torch.equal(torch.cat([g.dp for g in got]), want.dp)
    for name in ("dw1", "dw2"):
        assert relative_error(torch.cat([getattr(g, name) for g in got]), getattr(want, name)) < 1e-5


@pytest.mark.parametrize("ranks", [1, 3])
def test_B28_bad_tokens_leave_others_alone(ranks, device):
    """NaN and Inf in x or dy reach their own tokens and the weight gradients of their experts only."""
    case = Case((200,) * ranks, 2, 24, 512, 256, "distinct")
    layer = Layer.make(case, device)
    with World(case, device) as world:
        clean = world.step(layer)
        for tensors in (layer.x, layer.dy):
            tensors[0][7], tensors[0][8] = math.nan, math.inf
            bad = world.step(layer)
            for r, (got, want) in enumerate(zip(bad, clean, strict=True)):
                others = [t for t in range(200) if r > 0 or t not in (7, 8)]
                assert torch.equal(got.dx[others], want.dx[others])
                assert torch.equal(got.dp[others], want.dp[others])
                touched = set(layer.ids[0][7:9].flatten().tolist())
                alone = [e for e in range(case.local) if r * case.local + e not in touched]
                assert torch.equal(got.dw1[alone], want.dw1[alone])
                assert torch.equal(got.dw2[alone], want.dw2[alone])
            assert bool(bad[0].dx[7].isnan().all())


@pytest.mark.parametrize("settings", [Settings(), Settings(ring_rows=512)], ids=["ring", "small ring"])
def test_needs(settings, device):
    """Only dx, only dp, one of the weight gradients, nothing; most rows recomputed in rings that wrap."""
    layer = Layer.make(Case((1500,), 2, 8, 512, 256), device)
    x, ids, _, w1, w2 = layer.inputs()[0]
    with World(layer.case, device, settings) as world:
        call = world.forward(layer, 0.4)[0]
        want = world.backward(layer, [call])[0]
        rank = world.virtual.ranks[0]
        for needs, with_dw1, with_dw2 in itertools.product(range(4), (False, True), (False, True)):
            dw1 = [torch.full_like(want.dw1, math.nan)] if with_dw1 else []
            dw2 = [torch.full_like(want.dw2, math.nan)] if with_dw2 else []
            world.poison(layer.case)
            backward = rank.prepare_backward(
                layer.dy[0], x, ids, w1, w2, call.h, call.schedule, dw1, dw2, 8, False, needs, 0, 0.0
            )
            backward.backward()
            backward.finish()
            torch.cuda.synchronize()
            world.virtual.check()
            assert torch.equal(backward.dx, want.dx if needs & 1 else want.dx[:0])
            assert torch.equal(backward.dp, want.dp if needs & 2 else want.dp[:0])
            assert all(torch.equal(got, want.dw1) for got in dw1)
            assert all(torch.equal(got, want.dw2) for got in dw2)


def test_B74_calls_of_a_workspace_in_any_order(device):
    """Two ranks: F0 F1 F2 B0 B1 B2, F0 F1 B1 B0 and one after the other give the same bits."""
    layers = [
        Layer.make(Case((t, 2 * t), 4, 8, 512, 256, seed=t, max_tokens=400), device) for t in (100, 200, 33)
    ]
    for layer in layers[1:]:
        layer.w1, layer.w2 = layers[0].w1, layers[0].w2
    with World(layers[1].case, device) as world:
        want = [world.step(layer, 0.8) for layer in layers]
        for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
            calls = [world.forward(layer, 0.8) for layer in layers]
            for i in order:
                assert_same_gradients(want[i], world.backward(layers[i], calls[i]))


@pytest.mark.timeout(300)
def test_B20_more_than_2_31_elements(device):
    """304,000 rows of 7168: slots and gathered rows pass 2^31 elements; the last tokens as if alone."""
    layer = Layer.make(Case((38000,), 8, 8, 7168, 128), device)
    with World(layer.case, device) as world:
        got = world.step(layer, 0.1)[0]
    tail = Case((64,), 8, 8, 7168, 128)
    last = Layer(
        tail,
        *[[t[0][-64:]] for t in (layer.x, layer.ids, layer.probs)],
        layer.w1,
        layer.w2,
        [layer.dy[0][-64:]],
    )
    with World(tail, device) as world:
        want = world.step(last)[0]
    assert torch.equal(got.dx[-64:], want.dx) and torch.equal(got.dp[-64:], want.dp)


# ---- ranks that are late or never come ----


@pytest.mark.parametrize("late", [0, 2])
def test_a_late_rank_is_waited_for(late, device):
    layer = Layer.make(THREE, device)

    def hook(rank):
        if rank == late:
            torch.cuda._sleep(100_000_000)  # about 50 ms

    with World(THREE, device) as world:
        calls = world.forward(layer, 0.5)
        want = world.backward(layer, calls)
        got = [Gradients.empty(THREE, device) for _ in calls]
        world.virtual.launch_backward(world.prepare_backward(layer, calls, got), before=hook)
        torch.cuda.synchronize()
        world.virtual.check()
        assert_same_gradients(want, got)


@pytest.mark.parametrize("phase", ["publish", "combine"])
def test_B49_a_rank_that_never_comes_is_named(phase, device):
    """B50: one error for each waiting rank, with phase, peer, call and layer, in bounded time."""
    layer = Layer.make(THREE, device)
    with World(THREE, device, timeout_s=0.3) as world:
        calls = world.forward(layer, True, layers=[5] * 3)
        into = [Gradients.empty(THREE, device) for _ in calls]
        backward = world.prepare_backward(layer, calls, into, layers=[5] * 3)
        torch.cuda.synchronize()
        if phase == "combine":  # it goes away between its publication and its pushes
            world.pretend_published(2, 2, CallKind.BACKWARD, 5)
        world.virtual.launch_backward(backward, ranks=[0, 1])
        torch.cuda.synchronize()
        assert_named(
            world, 2, call=2, layer=5, phase=phase,
            expected="call 2 (backward, layer 5)", seen="call 1 (forward, layer 5)",
        )  # fmt: skip
        with pytest.raises((errors.PeerTimeout, errors.PeerAbort)):
            world.prepare_backward(layer, calls, into)


def test_B50_a_rank_that_stops_for_too_long_is_named(device):
    """It goes on when its peers have given up: nothing stands still, and it is told."""
    layer = Layer.make(THREE, device)

    def stop(rank):
        if rank == 2:
            torch.cuda._sleep(2_000_000_000)  # about 1 s

    with World(THREE, device, timeout_s=0.3) as world:
        calls = world.forward(layer, True, layers=[5] * 3)
        into = [Gradients.empty(THREE, device) for _ in calls]
        backward = world.prepare_backward(layer, calls, into, layers=[5] * 3)
        world.virtual.launch_backward(backward, before=stop)
        torch.cuda.synchronize()
        assert_named(
            world, 2, call=2, layer=5, phase="publish",
            expected="call 2 (backward, layer 5)", seen="call 1 (forward, layer 5)",
        )  # fmt: skip
        assert isinstance(world.failures()[2], errors.PeerAbort)


def test_B49_backward_after_a_forward_that_failed():
    """Queued before anybody knows, with a schedule that was never written: named errors, no bad address. In a
    process of its own, which such an address would end.
    """
    code = """
import torch
from megatron_mok import errors
from tests.gpu.world import THREE, Gradients, Layer, World
device = torch.device("cuda", 0)
layer = Layer.make(THREE, device)
with World(THREE, device, timeout_s=0.3) as world:
    calls = world.prepare(layer, True)
    backward = world.prepare_backward(layer, calls, [Gradients.empty(THREE, device) for _ in calls])
    for call in calls:
        call.schedule.fill_(0x3F803F80)
    torch.cuda.synchronize()
    world.virtual.launch(calls, schedule=[0, 1], main=[0, 1])
    world.virtual.launch_backward(backward, ranks=[0, 1])
    torch.cuda.synchronize()
    found = world.failures()[:2]
    assert all(isinstance(e, errors.PeerTimeout | errors.PeerAbort) for e in found), found
print("named")
"""
    assert python(code).strip() == "named"


def test_B39_a_rank_in_forward_and_one_in_backward_are_told_apart(device):
    layer = Layer.make(THREE, device)
    with World(THREE, device) as world:
        calls = world.forward(layer, True)
        into = [Gradients.empty(THREE, device) for _ in calls]
        backward = world.prepare_backward(layer, calls, into)
        forward = world.virtual.prepare(layer.inputs(), num_experts=6)
        for r, stream in enumerate(world.virtual.streams):
            with torch.cuda.stream(stream):
                forward[r].schedule_rows() if r == 2 else backward[r].backward()
        torch.cuda.synchronize()
        found = world.failures()
        assert all(isinstance(e, errors.ProtocolMismatch | errors.PeerAbort) for e in found), found
        text = str(next(e for e in found if isinstance(e, errors.ProtocolMismatch)))
        assert "forward" in text and "backward" in text


# ---- through autograd ----


class Model:
    """One layer with leaves of its own, as a module has them: a weight for each expert."""

    def __init__(self, layer: Layer, comm, main_grad: torch.dtype | None = None, **needs: bool) -> None:
        self.comm, self.case = comm, layer.case
        self.x = layer.x[0].clone().requires_grad_(needs.get("x", True))
        self.ids = layer.ids[0].clone()
        self.probs = layer.probs[0].clone().requires_grad_(needs.get("probs", True))
        self.w1 = [w.clone().requires_grad_(needs.get("weights", True)) for w in layer.w1]
        self.w2 = [w.clone().requires_grad_(needs.get("weights", True)) for w in layer.w2]
        for w in self.weights if main_grad else []:
            w.main_grad = torch.zeros_like(w, dtype=main_grad)
            w.grad_added_to_main_grad = False
        self.dy = layer.dy[0].clone()

    @property
    def weights(self) -> list[torch.Tensor]:
        return [*self.w1, *self.w2]

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [self.x, self.probs, *self.weights]

    def forward(self, x=None, **options) -> torch.Tensor:
        return runtime.moe(
            self.x if x is None else x, self.ids, self.probs, self.w1, self.w2, comm=self.comm,
            num_experts=self.case.experts, act_limit=self.case.act_limit or None, **options,
        )  # fmt: skip

    def gradients(self) -> list[torch.Tensor | None]:
        """Of all leaves, taken away."""
        grads = []
        for t in self.leaves:
            fused = getattr(t, "main_grad", None)
            grads.append(t.grad if fused is None else fused.clone())
            t.grad = None
            if fused is not None:
                fused.zero_()
        return grads

    def step(self, **options) -> list[torch.Tensor | None]:
        self.forward(**options).backward(self.dy)
        return self.gradients()


def assert_equal(got, want, what="") -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a is None) == (b is None), (what, i)
        assert a is None or torch.equal(a, b), (what, i)


def as_gradients(grads: list[torch.Tensor], case: Case) -> Gradients:
    dx, dp, *dw = grads
    return Gradients(torch.stack(dw[: case.local]), torch.stack(dw[case.local :]), dx, dp)


@pytest.mark.parametrize("main_grad", [None, FP32, BF16], ids=["fresh", "fp32", "bf16"])
def test_B34_B43_one_rank_through_autograd(main_grad, opened, device):
    layer = Layer.make(SMALL, device)
    model = Model(layer, opened(SMALL), main_grad)
    grads = model.step()
    assert_gradients(layer, [as_gradients(grads, SMALL)])
    for w in model.weights if main_grad else []:
        assert w.grad_added_to_main_grad


@pytest.mark.parametrize("x", [False, True], ids=["frozen input", "input"])
@pytest.mark.parametrize("probs", [False, True], ids=["frozen router", "router"])
@pytest.mark.parametrize("weights", [False, True], ids=["frozen experts", "experts"])
def test_B35_any_of_the_inputs_frozen(x, probs, weights, opened, device):
    layer = Layer.make(SMALL, device)
    comm = opened(SMALL)
    want = Model(layer, comm).step()
    model = Model(layer, comm, x=x, probs=probs, weights=weights)
    out = model.forward()
    assert out.requires_grad == (x or probs or weights)
    if out.requires_grad:
        out.backward(model.dy)
    on = [x, probs, *[weights] * 16]
    assert_equal(model.gradients(), [g if flag else None for g, flag in zip(want, on, strict=True)])


def test_B35_single_frozen_experts(opened, device):
    layer = Layer.make(SMALL, device)
    comm = opened(SMALL)
    want = Model(layer, comm).step()
    model = Model(layer, comm)
    for i in (0, 3, 8, 15):
        model.weights[i].requires_grad_(False)
        want[2 + i] = None
    assert_equal(model.step(), want)


def test_B22_an_expanded_output_gradient(opened, device):
    layer = Layer.make(SMALL, device)
    model = Model(layer, opened(SMALL))
    model.dy = torch.ones_like(model.dy)
    want = model.step()
    model.forward().sum().backward()
    assert_equal(model.gradients(), want, "sum")
    model.dy = torch.ones(512, 200, dtype=BF16, device=device).t()
    assert_equal(model.step(), want, "transposed")
    flat = torch.ones(1 + 200 * 512, dtype=BF16, device=device)
    model.dy = flat[1:].view(200, 512)  # not aligned to 16 bytes
    assert_equal(model.step(), want, "misaligned")


def test_a_zero_output_gradient(opened, device):
    layer = Layer.make(SMALL, device)
    model = Model(layer, opened(SMALL))
    (model.forward() * 0).sum().backward()
    assert all(not bool(g.any()) for g in model.gradients())


def test_a_layer_used_twice_in_one_graph(opened, device):
    layer = Layer.make(SMALL, device)
    comm = opened(SMALL)
    second = Model(layer, comm)
    between = second.forward().detach()
    second.x = between.clone().requires_grad_()
    want2 = second.step()
    first = Model(layer, comm)
    first.dy = want2[0]
    want1 = first.step()
    model = Model(layer, comm)
    model.forward(model.forward()).backward(model.dy)
    got = model.gradients()
    assert torch.equal(got[0], want1[0])
    for g, a, b in zip(got[1:], want2[1:], want1[1:], strict=True):
        assert torch.equal(g, a + b)  # autograd adds in this order and dtype


@pytest.mark.parametrize("main_grad", [None, FP32], ids=["fresh", "main_grad"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=["F0F1F2B0B1B2", "F0F1F2B2B1B0"])
def test_B74_several_micro_batches_in_flight(order, main_grad, opened, device):
    comm = opened(SMALL)
    layers = [Layer.make(Case((t,), 2, 8, 512, 256, seed=t), device) for t in (200, 90, 7)]
    models = [Model(layer, comm, main_grad) for layer in layers]
    want = [model.step() for model in models]
    outs = [model.forward() for model in models]
    for i in order:
        outs[i].backward(models[i].dy)
        assert_equal(models[i].gradients(), want[i], i)


def test_B74_one_forward_one_backward(opened, device):
    """F0 F1 B1 B0 and F0 F1 B0 F2 B1 B2 on one set of weights: main_grad is the sum over micro-batches."""
    comm = opened(SMALL)
    layer = Layer.make(SMALL, device)
    want = Model(layer, comm, FP32).step()
    for order in ("F0 F1 B1 B0", "F0 F1 B0 F2 B1 B2"):
        model, outs = Model(layer, comm, FP32), {}
        for kind, number in order.split():
            if kind == "F":
                outs[number] = model.forward()
            else:
                model.x.grad = model.probs.grad = None
                outs.pop(number).backward(model.dy)
                assert_equal([model.x.grad, model.probs.grad], want[:2], order)
        times = order.count("B")
        for got, once in zip(model.gradients()[2:], want[2:], strict=True):
            total = torch.zeros_like(once)
            for _ in range(times):
                total += once
            assert torch.equal(got, total), order


def test_B77_two_layers_and_two_models(opened, device):
    """Layers of one workspace and of two, in turns, as if each were alone."""
    other = Case((150,), 4, 16, 256, 128, seed=3)
    wider = Case((200,), 2, 16, 512, 384, seed=4)
    cases = (SMALL, wider, other)
    models = [Model(Layer.make(case, device), opened(case)) for case in cases]
    assert models[0].comm is models[1].comm is not models[2].comm
    want = [model.step() for model in models]
    for backward in itertools.permutations(range(3)):
        outs = [model.forward(layer=i) for i, model in enumerate(models)]
        for i in backward:
            outs[i].backward(models[i].dy)
        for i, model in enumerate(models):
            assert_equal(model.gradients(), want[i], (backward, i))


def test_B48_on_other_streams(opened, device):
    """Forward late on one stream, backward asked for on another, tensors freed and their memory reused."""
    layer = Layer.make(SMALL, device)
    comm = opened(SMALL)
    want = Model(layer, comm).step()
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        torch.cuda._sleep(50_000_000)
        model = Model(layer, comm)
        out = model.forward()
    two.wait_stream(one)
    with torch.cuda.stream(two):
        out.backward(model.dy)
        del out
        for _ in range(4):
            torch.full((200, 512), math.nan, dtype=BF16, device=device)
    torch.cuda.synchronize()
    assert_equal(model.gradients(), want)


def test_B48_the_operator_on_another_stream_than_its_forward(opened, device):
    """Saved tensors are freed right after the launch; their stream may not reuse them before it has ended."""
    layer = Layer.make(SMALL, device)
    comm = opened(SMALL)
    x, ids, probs, w1, w2 = layer.inputs()[0]
    integers = (comm.handle, 8, comm.max_tokens, 1)

    def run(stream):
        y, h, table = ops.moe_forward(x * 1, ids, probs, w1, w2, *integers, 504, 0, 0.0)
        dw1, dw2 = torch.empty_like(layer.w1), torch.empty_like(layer.w2)
        dy = layer.dy[0] * 1
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            if stream != torch.cuda.default_stream():
                torch.cuda._sleep(50_000_000)
            dx, dp = ops.moe_backward(
                dy,
                x,
                ids,
                w1,
                w2,
                h,
                table,
                [dw1],
                [dw2],
                comm.handle,
                8,
                2,
                comm.max_tokens,
                1,
                0,
                3,
                0,
                0.0,
            )
        sizes = [(t.shape, t.dtype) for t in (dy, h, table)]
        del dy, h, table
        for shape, dtype in sizes:
            for _ in range(3):
                torch.full(shape, -1, dtype=dtype, device=device)
        torch.cuda.synchronize()
        return [dx, dp, dw1, dw2]

    assert_equal(run(torch.cuda.Stream()), run(torch.cuda.default_stream()))


def test_B39_recomputation(opened, device):
    """torch's checkpointing runs forward again inside backward."""
    layer = Layer.make(SMALL, device)
    comm = opened(SMALL)
    want = Model(layer, comm).step()
    for reentrant in (False, True):
        model = Model(layer, comm)
        out = torch.utils.checkpoint.checkpoint(model.forward, model.x, use_reentrant=reentrant)
        out.backward(model.dy)
        assert_equal(model.gradients(), want, reentrant)


def test_list_and_stacked_weights_give_the_same_bits(opened, device):
    layer = Layer.make(SMALL, device)
    comm = opened(SMALL)
    want = as_gradients(Model(layer, comm).step(), SMALL)
    stacked = Model(layer, comm)
    stacked.w1 = [layer.w1.clone().requires_grad_()]
    stacked.w2 = [layer.w2.clone().requires_grad_()]
    dx, dp, dw1, dw2 = stacked.step()
    assert_same_gradients([want], [Gradients(dw1, dw2, dx, dp)])


def test_B55_memory_does_not_grow(opened, device):
    """200 steps with 100 token counts, then 1,000 whose skew rises until one expert has 90% of the routes."""
    case = Case((25600,), 2, 8, 128, 128)
    comm = opened(case)
    model = Model(Layer.make(case, device), comm, FP32)
    draw = torch.rand(case.tokens[0], case.top_k, device=device)
    spread = model.ids.clone()

    def step(tokens: int, skew: float = 0.0) -> None:
        model.ids.copy_(torch.where(draw < skew, 3, spread))
        x, probs = (t.detach()[:tokens].requires_grad_() for t in (model.x, model.probs))
        out = runtime.moe(x, model.ids[:tokens], probs, model.w1, model.w2, comm=comm, num_experts=8)
        out.backward(model.dy[:tokens])

    counts = [256 * n for n in range(1, 101)]
    random.Random(0).shuffle(counts)
    step(case.tokens[0])
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated()
    for tokens in counts * 2:
        step(tokens)
        assert torch.cuda.memory_allocated() == kept, tokens

    peaks = []
    for i in range(1000):
        torch.cuda.reset_peak_memory_stats()
        step(4096, 0.9 * i / 999)
        peaks.append(torch.cuda.max_memory_allocated())
    assert set(peaks) == {peaks[0]} and torch.cuda.memory_allocated() == kept
    assert int((model.ids[:4096] == 3).sum()) > 0.85 * 4096 * 2
    step(256)  # which raises what went wrong before


def test_B57_nothing_is_kept_after_backward(opened, device):
    comm = opened(SMALL)
    model = Model(Layer.make(SMALL, device), comm)
    out = model.forward()
    out.backward(model.dy)
    alive = [weakref.ref(t) for t in (out, model.x, model.dy, model.w1[0])]
    torch.cuda.synchronize()
    del out, model
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4


def test_B58_no_synchronisation(opened, device):
    models = [Model(Layer.make(SMALL, device), opened(SMALL), main_grad) for main_grad in (None, FP32, BF16)]
    for model in models:
        model.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for model in models:
            model.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("capacity", [0.0, 0.3, 1.25])
def test_B56_saved_bytes_are_what_the_allocator_sees(capacity, opened, device):
    """h and the schedule; x and the weights are there anyway. The allocator rounds up to 512 bytes."""
    case = Case((512,), 4, 8, 512, 256)
    model = Model(Layer.make(case, device), opened(case))
    model.ids = model.ids.contiguous()
    model.step(save_capacity=capacity)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = model.forward(save_capacity=capacity)
    kept = torch.cuda.memory_allocated() - before - out.nbytes
    want = runtime.saved_bytes(
        tokens=512, ffn=256, top_k=4, num_experts=8, num_ranks=1, save_capacity=capacity
    )
    assert want <= kept <= want + 2 * 512
    out.backward(model.dy)


def test_B54_the_workspace_takes_what_the_query_says(device):
    case = Case((512,), 4, 8, 512, 256)
    layer = Layer.make(case, device)
    settings = Settings(timeout_s=10.0, num_sms=64)
    layout = native.workspace_layout(
        rank=0,
        num_ranks=1,
        num_experts=8,
        top_k=4,
        hidden=512,
        intermediate=256,
        max_tokens=512,
        settings=settings,
    )[1]
    want = runtime.workspace_bytes(max_tokens=512, hidden=512, top_k=4, num_ranks=1)
    assert want == layout.symmetric_bytes
    local = runtime.local_bytes(
        max_tokens=512, hidden=512, ffn=256, top_k=4, num_experts=8, num_ranks=1, num_sms=64
    )
    assert local == layout.local_backward_bytes
    with World(case, device, settings) as world:
        world.step(layer)
        assert sum(region.numel() for region in world.virtual.regions) == want
        assert world.virtual.ranks[0]._shape(8, 256).local.numel() == local


@pytest.mark.parametrize("fullgraph", [False, True])
def test_B61_compiled(fullgraph, opened, device):
    comm = opened(Case((1024,), 2, 8, 512, 256))

    def run(x, ids, probs, w1, w2):
        return runtime.moe(x, ids, probs, w1, w2, comm=comm, num_experts=8)

    compiled = torch.compile(run, fullgraph=fullgraph, backend="aot_eager")
    for tokens in (512, 1024):
        layer = Layer.make(Case((tokens,), 2, 8, 512, 256), device)
        want = Model(layer, comm).step()
        model = Model(layer, comm)
        out = compiled(model.x, model.ids, model.probs, model.w1, model.w2)
        assert torch.equal(out, model.forward())
        out.backward(model.dy)
        assert_equal(model.gradients(), want)


def test_released_between_forward_and_backward(opened, device):
    layer = Layer.make(SMALL, device)
    model = Model(layer, opened(SMALL))
    out = model.forward()
    runtime.release()
    with pytest.raises(ValueError, match="released"):
        out.backward(model.dy)


def test_a_workspace_made_anew_refuses_an_older_schedule(opened, device):
    layer = Layer.make(SMALL, device)
    comm = opened(SMALL)
    x, ids, probs, w1, w2 = layer.inputs()[0]
    _, h, table = ops.moe_forward(x, ids, probs, w1, w2, comm.handle, 8, comm.max_tokens, 1, 504, 0, 0.0)
    runtime.reserve(1000)
    with pytest.raises(ValueError, match="schedule: got .* made anew"):
        ops.moe_backward(
            layer.dy[0], x, ids, w1, w2, h, table, [], [], comm.handle, 8, 2, comm.max_tokens, 1, 0, 3, 0, 0.0
        )


def test_a_step_launches_three_kernels_of_its_own(opened, device):
    """Forward two, backward one, and no memset, with an fp32 main_grad."""
    from torch.profiler import ProfilerActivity, profile

    layer = Layer.make(SMALL, device)
    model = Model(layer, opened(SMALL), FP32)
    model.forward().backward(model.dy)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        model.forward().backward(model.dy)
        torch.cuda.synchronize()
    names = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if not names:
        pytest.skip("the profiler sees no GPU activity on this machine")
    assert sum("mok" in name for name in names) == 3, names
    assert not any("memset" in name.lower() for name in names), names


# ---- CUDA graphs ----


@pytest.mark.parametrize("main_grad", [None, FP32], ids=["fresh", "main_grad"])
def test_B60_graph_of_forward_and_backward(main_grad, opened, device):
    """A hundred replays with other routing and tokens, each equal to eager calls in between."""
    comm = opened(SMALL)
    layer = Layer.make(SMALL, device)
    model, eager = Model(layer, comm, main_grad), Model(layer, comm, main_grad)
    generator = torch.Generator(device).manual_seed(3)

    def step():
        for t in model.leaves:
            t.grad = None
        for w in model.weights if main_grad else []:
            w.main_grad.zero_()
        out = model.forward(save_capacity=0.6)
        out.backward(model.dy)
        return out

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    kinds = ("random", "absent", "one expert", "repeated")
    for i in range(100):
        with torch.no_grad():
            model.ids.copy_(route(kinds[i % 4], 200, 2, 8, generator))
            model.x.normal_(generator=generator)
            model.dy.normal_(generator=generator)
            eager.ids, eager.dy = model.ids.clone(), model.dy.clone()
            eager.x.copy_(model.x)
        graph.replay()
        got = [t.clone() for t in (out.detach(), model.x.grad, model.probs.grad)]
        got += [(w.main_grad if main_grad else w.grad).clone() for w in model.weights]
        again = eager.forward(save_capacity=0.6)
        again.backward(eager.dy)
        assert_equal(got, [again.detach(), *eager.gradients()], i)


def test_graph_of_two_ranks(device):
    """Forward and backward of two ranks that wait for each other, with another routing each time."""
    case = Case((150, 90), 4, 8, 512, 256)
    layer = Layer.make(case, device)
    generator = torch.Generator(device).manual_seed(3)

    def backward_of(virtual, calls, into):
        prepared = virtual.prepare_backward(
            layer.inputs(), calls, layer.dy, [g.buffers(case) for g in into], num_experts=8
        )
        virtual.launch_backward(prepared)
        for call, g in zip(prepared, into, strict=True):
            g.dx, g.dp = call.dx, call.dp

    with World(case, device) as world:
        world.step(layer)
        into = [Gradients.empty(case, device) for _ in range(2)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls = world.virtual.forward(layer.inputs(), num_experts=8, save_rows=[600, 360])
            backward_of(world.virtual, calls, into)
        for _ in range(20):
            for r, t in enumerate(case.tokens):
                layer.ids[r].copy_(route("absent", t, 4, 8, generator))
            graph.replay()
            torch.cuda.synchronize()
            world.virtual.check()
            replayed = [Gradients(*[t.clone() for t in (g.dw1, g.dw2, g.dx, g.dp)]) for g in into]
            assert_same_gradients(replayed, world.step(layer))


def test_B60_a_thousand_replays_with_a_late_rank(device):
    """Another routing each time, rank 1 late in both passes; bit for bit as eager calls in between."""
    case = Case((150, 90), 4, 8, 512, 256)
    layer = Layer.make(case, device)
    generator = torch.Generator(device).manual_seed(5)
    replayed, eager = ([Gradients.empty(case, device) for _ in range(2)] for _ in range(2))

    def late(rank: int) -> None:
        if rank == 1:
            torch.cuda._sleep(400_000)  # 0.2 ms or more

    def step(virtual, into, hook=None) -> list[torch.Tensor]:
        calls = virtual.prepare(layer.inputs(), num_experts=8, save_rows=[300, 180])
        virtual.launch(calls, between=hook)
        backward = virtual.prepare_backward(
            layer.inputs(), calls, layer.dy, [g.buffers(case) for g in into], num_experts=8
        )
        virtual.launch_backward(backward, before=hook)
        given = [(call.out, b.dx, b.dp) for call, b in zip(calls, backward, strict=True)]
        return [t for r, g in enumerate(into) for t in (*given[r], g.dw1, g.dw2)]

    with World(case, device) as world:
        world.step(layer)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = step(world.virtual, replayed, late)
        wrong = torch.zeros(len(got), dtype=torch.int64, device=device)
        waited = [int(rank.waited_ns()) for rank in world.virtual.ranks]
        for i in range(1000):
            for r, tokens in enumerate(case.tokens):
                kind = ("random", "absent", "repeated", "rank 0", "one expert")[i % 5]
                layer.ids[r].copy_(route(kind, tokens, case.top_k, case.experts, generator))
            graph.replay()
            want = step(world.virtual, eager)
            wrong += torch.stack([(a != b).any() for a, b in zip(got, want, strict=True)])
        torch.cuda.synchronize()
        world.virtual.check()
        waited = [int(rank.waited_ns()) - w for rank, w in zip(world.virtual.ranks, waited, strict=True)]
    assert wrong.tolist() == [0] * len(got), "replays in which out, dx, dp, dw1, dw2 of rank 0 and 1 differ"
    assert waited[0] > 0.2e9, waited  # 2,000 times, and 0.1 ms each at the least


@two_gpus
def test_B70_through_autograd_on_another_device_than_the_current_one(opened, device):
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    layer = Layer.make(SMALL, last)
    before = torch.cuda.memory_allocated(device)
    model = Model(layer, opened(SMALL, device=last), FP32)
    assert_gradients(layer, [as_gradients(model.step(), SMALL)])
    assert torch.cuda.memory_allocated(device) <= before
    assert torch.cuda.current_device() == device.index != last.index


@two_gpus
def test_the_last_gpu_gives_the_bits_of_the_first(device):
    """While the first is the current device, as in a process that never calls set_device."""
    case = Case((150, 90), 4, 8, 512, 256)
    layer, last = Layer.make(case, device), torch.device("cuda", torch.cuda.device_count() - 1)
    there = Layer(
        case,
        *([t.to(last) for t in tensors] for tensors in (layer.x, layer.ids, layer.probs)),
        layer.w1.to(last),
        layer.w2.to(last),
        [t.to(last) for t in layer.dy],
    )
    with World(case, device) as world:
        want = world.step(layer)
    with World(case, last) as world:
        got = world.step(there)
    for g in got:
        for name in ("dw1", "dw2", "dx", "dp"):
            setattr(g, name, getattr(g, name).to(device))
    assert_same_gradients(want, got)
