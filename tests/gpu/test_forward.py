"""The forward kernel against fp64, and the invariants that concern it.

Sizes in the names: R ranks, T most tokens of a rank, K experts per token, E experts, H hidden size,
I intermediate size.
"""

import gc
import math
import threading
import weakref

import pytest
import torch

from megatron_mok import errors, native, runtime
from megatron_mok.config import MokConfig
from megatron_mok.native import Settings
from tests.gpu.world import (
    CORNERS,
    SHAPES,
    SMALL,
    THREE,
    Case,
    Layer,
    Neighbour,
    World,
    assert_close,
    assert_named,
    assert_outputs,
    assert_row_counts,
    assert_same_bits,
    assert_saved,
    assert_schedules,
    expected,
    forward_cases,
    knobs,
    python,
    route,
)

RANDOM = forward_cases()


def assert_layer(case: Case, device: torch.device, save: bool = True) -> None:
    """Correct, equal over knobs bit for bit, and the same schedule as the reference's."""
    layer = Layer.make(case, device)
    with World(case, device) as world:
        first = world.forward(layer, save)
    assert_schedules(layer, first)
    assert_outputs(layer, first)
    if save:
        assert_saved(layer, first)
    with World(case, device, knobs(case, device)) as world:
        assert_same_bits(layer, first, world.forward(layer, save))


@pytest.mark.parametrize("name", RANDOM)
def test_random(name, device):
    case = RANDOM[name]
    assert_layer(case, device, save=case.seed % 3 != 0)


@pytest.mark.parametrize("name", SHAPES)
def test_shape(name, device):
    """The shapes that performance is measured at."""
    layer = Layer.make(SHAPES[name], device)
    with World(layer.case, device) as world:
        calls = world.forward(layer, save=True)
    assert_schedules(layer, calls)
    assert_outputs(layer, calls)


@pytest.mark.parametrize("name", CORNERS)
def test_corner(name, device):
    assert_layer(CORNERS[name], device)


@pytest.mark.parametrize(
    "rows", [(1, 17, 33, 127), (128, 64, 64, 0), (0, 0, 0, 256), (0, 129, 0, 257)], ids=str
)
def test_B29_rows_of_each_expert(rows, device):
    """Padding rows are never read: everything is NaN beforehand."""
    case = Case((sum(rows),), 1, len(rows), 512, 256)
    layer = Layer.make(case, device)
    counts = torch.tensor(rows, device=device)
    layer.ids = [torch.arange(len(rows), device=device).repeat_interleave(counts).int().unsqueeze(1)]
    with World(case, device) as world:
        calls = world.forward(layer, save=True)
    assert_schedules(layer, calls)
    assert_outputs(layer, calls)
    assert_saved(layer, calls)


@pytest.mark.parametrize("top_k", [1, 2, 4, 8, 16], ids="B25-K{}".format)
def test_error_does_not_grow_with_top_k(top_k, device):
    layer = Layer.make(Case((256,), top_k, 16, 1024, 256, "distinct"), device)
    with World(layer.case, device) as world:
        call = world.forward(layer)[0]
    want = expected(layer).out[0]
    assert ((call.out.double() - want).norm() / want.norm()).item() < 0.006


def test_B07_a_hundred_batches_for_eight_experts(device):
    """No route is lost where nearly all rows go to 8 of 64 experts, whatever is saved."""
    layer = Layer.make(Case((2304,), 8, 64, 512, 256, "crowded"), device)
    generator = torch.Generator(device).manual_seed(7)
    with World(layer.case, device) as world:
        for i in range(100):
            layer.ids[0].copy_(route("crowded", 2304, 8, 64, generator))
            calls = world.forward(layer, save=(0.0, 0.5, 1.25)[i % 3])
            assert_row_counts(layer, calls)
            assert_outputs(layer, calls)


@pytest.mark.parametrize("ranks", [1, 3])
def test_B28_bad_tokens_leave_others_alone(ranks, device):
    case = Case((200,) * ranks, 2, 6, 512, 256)
    layer = Layer.make(case, device)
    with World(case, device) as world:
        clean = [call.out.clone() for call in world.forward(layer)]
        for x in layer.x:
            x[7], x[8] = math.nan, math.inf
        bad = world.forward(layer)
    for r, call in enumerate(bad):
        others = [t for t in range(200) if t not in (7, 8)]
        assert torch.equal(call.out[others], clean[r][others])
        assert bool(call.out[7].isnan().all())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_B40_the_same_call_gives_the_same_bits(ranks, device):
    """A hundred times, while another stream keeps the GPU busy."""
    case = Case((700,) * ranks, 4, 8, 1024, 512)
    layer = Layer.make(case, device)
    neighbour = Neighbour(device)
    with World(case, device) as world:
        first = world.forward(layer, save=True)
        for i in range(100):
            neighbour.multiply(i % 10)
            assert_same_bits(layer, first, world.forward(layer, save=True))


GRIDS = [
    Settings(num_sms=4, comm_sms=2),
    Settings(num_sms=8, comm_sms=2),
    Settings(num_sms=64, comm_sms=16),
    Settings(comm_sms=2),
    Settings(comm_sms=32),
    Settings(minibatch_units=1, ring_rows=128),
    Settings(minibatch_units=3, ring_rows=4096),
    Settings(minibatch_units=64, ring_rows=1 << 16),
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_bits_do_not_depend_on_the_knobs(ranks, device):
    case = Case((1500,) * ranks, 8, 16, 1024, 768, "skewed")
    layer = Layer.make(case, device)
    with World(case, device) as world:
        first = world.forward(layer, save=True)
    assert_outputs(layer, first)
    assert_saved(layer, first)
    for settings in GRIDS:
        with World(case, device, settings) as world:
            assert_same_bits(layer, first, world.forward(layer, save=True))


def test_one_workspace_serves_many_calls_and_shapes(device):
    """B54, B55, B77: other token counts, expert counts and intermediate sizes, one symmetric region."""
    sizes = [((300, 200), 8, 256), ((10, 500), 16, 128), ((0, 1), 8, 256), ((500, 500), 4, 640)]
    widest = Case((500, 500), 4, 8, 512, 256)
    with World(widest, device) as world:
        for i in range(8):
            tokens, experts, intermediate = sizes[i % len(sizes)]
            case = Case(tokens, 4, experts, 512, intermediate, seed=i, max_tokens=500)
            layer = Layer.make(case, device)
            calls = world.forward(layer, save=True)
            assert_schedules(layer, calls)
            assert_outputs(layer, calls)


@pytest.mark.parametrize("rank_count", [1, 2])
def test_saving_fewer_rows_changes_no_output(rank_count, device):
    """B07: save_capacity 0 and above; rows beyond it are simply not kept, and nothing past h is written."""
    case = Case((600,) * rank_count, 4, 8, 512, 256, "skewed")
    layer = Layer.make(case, device)
    with World(case, device) as world:
        first = [c.out.clone() for c in world.forward(layer)]
        for saved in (8, 512, 1000):
            calls = world.virtual.prepare(
                layer.inputs(), num_experts=8, save_rows=[saved] * rank_count, act_limit=0.0
            )
            guarded = [torch.full((saved + 64, 512), 7.0, dtype=torch.bfloat16, device=device) for _ in calls]
            for call, h in zip(calls, guarded, strict=True):
                call.h = h[:saved]
                call.args.h = h.data_ptr()
            world.virtual.launch(calls)
            torch.cuda.synchronize()
            world.virtual.check()
            assert_saved(layer, calls)
            for call, h, out in zip(calls, guarded, first, strict=True):
                assert bool((h[saved:] == 7).all())
                assert torch.equal(call.out, out)


@pytest.mark.timeout(300)
def test_B20_more_than_2_31_elements(device):
    """304,000 rows of 7168: the slots and the gathered rows pass 2^31 elements."""
    case = Case((38000,), 8, 8, 7168, 128)
    layer = Layer.make(case, device)
    with World(case, device) as world:
        out = world.forward(layer)[0].out[-64:].clone()
    tail = Case((64,), 8, 8, 7168, 128)
    last = Layer(tail, [layer.x[0][-64:]], [layer.ids[0][-64:]], [layer.probs[0][-64:]], layer.w1, layer.w2)
    want = expected(last)
    assert_close(out, want.out[0], want.out_bf16[0])


# ---- through the operator ----


def moe(layer, comm, **options):
    w1, w2 = layer.weights(0)
    values = {"x": layer.x[0], "ids": layer.ids[0], "probs": layer.probs[0], "w1": w1, "w2": w2} | options
    return runtime.moe(comm=comm, num_experts=layer.case.experts, **values)


def test_B43_one_rank_through_the_operator(opened, device):
    layer = Layer.make(SMALL, device)
    out = moe(layer, opened(SMALL))
    want = expected(layer)
    assert out.shape == layer.x[0].shape
    assert_close(out, want.out[0], want.out_bf16[0])


def test_B22_any_strides_and_index_types(opened, device):
    layer = Layer.make(SMALL, device)
    comm = opened(SMALL)
    want = moe(layer, comm)
    x, ids, probs = layer.x[0], layer.ids[0], layer.probs[0]
    wide = torch.empty(200, 1024, dtype=x.dtype, device=device)
    wide[:, ::2] = x
    forms = [
        {"x": wide[:, ::2]},
        {"x": x.t().contiguous().t()},
        {"ids": ids.t().contiguous().t()},
        {"ids": ids.long()},
        {"ids": ids.short()},
        {"ids": ids.to(torch.uint8)},
        {"probs": probs.t().contiguous().t()},
    ]
    for form in forms:
        assert torch.equal(moe(layer, comm, **form), want), next(iter(form))
    same = torch.full((200, 1), 0.5, device=device)
    assert torch.equal(moe(layer, comm, probs=same.expand(200, 2)), moe(layer, comm, probs=same.repeat(1, 2)))
    with pytest.raises(ValueError, match=r"w1\[0\].*contiguous"):
        moe(layer, comm, w1=[torch.empty(8, 512, 512, dtype=x.dtype, device=device).transpose(1, 2)])


def test_B26_probabilities_enter_once(opened, device):
    layer = Layer.make(SMALL, device)
    comm = opened(SMALL)
    one = moe(layer, comm, probs=torch.ones(200, 2, device=device))
    half = moe(layer, comm, probs=torch.full((200, 2), 0.5, device=device))
    assert torch.equal(half * 2, one)


def test_list_and_stacked_weights_give_the_same_bits(opened, device):
    layer = Layer.make(SMALL, device)
    comm = opened(SMALL)
    apart = [w.clone() for w in layer.w1], [w.clone() for w in layer.w2]
    assert torch.equal(moe(layer, comm, w1=apart[0], w2=apart[1]), moe(layer, comm))


def test_B48_on_another_stream(opened, device):
    layer = Layer.make(SMALL, device)
    comm = opened(SMALL)
    want = moe(layer, comm)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late = Layer(SMALL, [layer.x[0] * 1], layer.ids, layer.probs, layer.w1, layer.w2)
        out = moe(late, comm)
        del late
        torch.full((200, 512), math.nan, dtype=torch.bfloat16, device=device)
    again = moe(layer, comm)  # ordered behind the call on the other stream
    torch.cuda.synchronize()
    assert torch.equal(out, want) and torch.equal(again, want)


def test_B55_memory_does_not_grow(opened, device):
    comm = opened(Case((512,), 2, 8, 512, 256))
    layers = [Layer.make(Case((t,), 2, 8, 512, 256, seed=t), device) for t in (512, 7, 300, 0, 511)]
    for layer in layers:
        moe(layer, comm)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for i in range(100):
        moe(layers[i % 5], comm)
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


def test_B57_nothing_is_kept(opened, device):
    comm = opened(SMALL)
    layer = Layer.make(SMALL, device)
    out = moe(layer, comm)
    alive = [weakref.ref(t) for t in (layer.x[0], layer.ids[0], layer.probs[0], out)]
    del layer, out
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4


def test_B58_no_synchronisation(opened, device):
    comm = opened(SMALL)
    layer = Layer.make(SMALL, device)
    moe(layer, comm)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            moe(layer, comm)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_B78_evaluation_between_steps(opened, device):
    comm = opened(SMALL)
    layer, other = Layer.make(SMALL, device), Layer.make(Case((33,), 2, 8, 512, 256, seed=5), device)
    want = moe(layer, comm)
    with torch.inference_mode():
        evaluated = moe(other, comm)
    assert_close(evaluated, expected(other).out[0], expected(other).out_bf16[0])
    assert torch.equal(moe(layer, comm), want)


def test_too_many_tokens_are_refused_before_any_launch(opened, device):
    comm = opened(SMALL)
    with pytest.raises(errors.WorkspaceTooSmall, match="got 300, need at most 200") as caught:
        moe(Layer.make(Case((300,), 2, 8, 512, 256), device), comm)
    assert (caught.value.got, caught.value.max_tokens) == (300, 200)


@pytest.mark.parametrize(
    "config",
    [{"num_sms": 1000}, {"num_sms": 2}, {"comm_sms": (134, 134)}, {"num_sms": 8, "comm_sms": (10, 10)}],
    ids=str,
)
def test_B46_more_sms_than_there_are(config, opened):
    with pytest.raises(errors.ConfigError, match="num_sms|comm_sms"):
        opened(SMALL, **config)


def test_B27_other_dtypes_are_refused(device):
    with pytest.raises(errors.ConfigError, match="dtype"):
        runtime.get_comm(
            None, hidden=512, top_k=2, num_experts=8, max_tokens=8, device=device, dtype=torch.float32,
            config=MokConfig(backend="cuda"),
        )  # fmt: skip


def test_B16_sizes_that_the_kernels_lack_are_named(device):
    with pytest.raises(errors.ConfigError, match="hidden: got 320"):
        runtime.get_comm(
            None, hidden=320, top_k=2, num_experts=8, max_tokens=8, device=device, dtype=torch.bfloat16,
            config=MokConfig(backend="cuda"),
        )  # fmt: skip
    with pytest.raises(ValueError, match="intermediate: got 100, need a positive multiple of 128"):
        native.workspace_layout(
            rank=0, num_ranks=1, num_experts=8, top_k=2, hidden=512, intermediate=100, max_tokens=8
        )


def test_activations_that_the_kernels_lack_are_named(opened, device):
    layer = Layer.make(SMALL, device)
    with pytest.raises((errors.ConfigError, errors.LibraryMissing), match="activation"):
        moe(layer, opened(SMALL), activation="quick_geglu")


def test_B61_compiled(opened, device):
    comm = opened(SMALL)
    layer = Layer.make(SMALL, device)
    want = moe(layer, comm)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(layer, comm), want)


# ---- CUDA graphs ----


def test_B60_graph_replays_with_other_routing(opened, device):
    comm = opened(SMALL)
    layer = Layer.make(SMALL, device)
    generator = torch.Generator(device).manual_seed(3)
    moe(layer, comm)  # warm-up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe(layer, comm)
    for i in range(50):
        kind = ("random", "absent", "one expert", "repeated")[i % 4]
        layer.ids[0].copy_(route(kind, 200, 2, 8, generator))
        layer.x[0].normal_(generator=generator)
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, moe(layer, comm)), i  # eager calls go on counting in between


def test_B60_first_forward_inside_a_capture_says_to_warm_up(opened, device):
    layer = Layer.make(SMALL, device)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="capture"), torch.cuda.graph(graph):
        moe(layer, opened(SMALL))
    torch.cuda.synchronize()


def test_graph_of_two_ranks(device):
    case = Case((150, 90), 4, 8, 512, 256)
    layer = Layer.make(case, device)
    generator = torch.Generator(device).manual_seed(3)
    with World(case, device) as world:
        world.forward(layer)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls = world.virtual.forward(layer.inputs(), num_experts=8)
        for _ in range(20):
            for r, t in enumerate(case.tokens):
                layer.ids[r].copy_(route("absent", t, 4, 8, generator))
            graph.replay()
            torch.cuda.synchronize()
            world.virtual.check()
            replayed = [call.out.clone() for call in calls]
            eager = world.forward(layer)
            for a, b in zip(replayed, eager, strict=True):
                assert torch.equal(a, b.out)


# ---- ranks that are late, stall, or never come ----


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("when", ["before", "between"])
def test_a_late_rank_is_waited_for(late, when, device):
    layer = Layer.make(THREE, device)

    def hook(rank):
        if rank == late:
            torch.cuda._sleep(100_000_000)  # about 50 ms

    with World(THREE, device) as world:
        want = world.forward(layer)
        calls = world.prepare(layer)
        before = [int(rank.waited_ns()) for rank in world.virtual.ranks]
        world.virtual.launch(calls, **{when: hook})
        torch.cuda.synchronize()
        world.virtual.check()
        assert_same_bits(layer, want, calls)
        waited = [int(rank.waited_ns()) - b for rank, b in zip(world.virtual.ranks, before, strict=True)]
        assert all((ns > 20e6) == (rank != late) for rank, ns in enumerate(waited)), waited


@pytest.mark.parametrize("phase", ["publish", "combine"])
def test_B49_a_rank_that_never_comes_is_named(phase, device):
    """B50: every waiting rank has one error, with phase, peer, call and layer, in bounded time."""
    layer = Layer.make(THREE, device)
    with World(THREE, device, timeout_s=0.3) as world:
        world.forward(layer, layers=[5] * 3)
        calls = world.prepare(layer, layers=[6] * 3)
        come = [0, 1]
        world.virtual.launch(calls, schedule=come if phase == "publish" else None, main=come)
        torch.cuda.synchronize()
        assert_named(
            world, 2, call=2, layer=6, phase=phase,
            expected="call 2 (forward, layer 6)", seen="call 1 (forward, layer 5)",
        )  # fmt: skip
        with pytest.raises((errors.PeerTimeout, errors.PeerAbort)):
            world.prepare(layer)


@pytest.mark.parametrize(("when", "phase"), [("before", "publish"), ("between", "combine")])
def test_B50_a_rank_that_stops_for_too_long_is_named(when, phase, device):
    """It goes on when its peers have given up: nothing stands still, and it is told where it needed them."""
    layer = Layer.make(THREE, device)

    def stop(rank):
        if rank == 2:
            torch.cuda._sleep(2_000_000_000)  # about 1 s

    with World(THREE, device, timeout_s=0.3) as world:
        world.forward(layer, layers=[5] * 3)
        world.virtual.launch(world.prepare(layer, layers=[6] * 3), **{when: stop})
        torch.cuda.synchronize()
        assert_named(
            world, 2, call=2, layer=6, phase=phase,
            expected="call 2 (forward, layer 6)", seen="call 1 (forward, layer 5)",
        )  # fmt: skip
        if phase == "publish":  # behind its publication its peers had pushed all that it waits for
            assert isinstance(world.failures()[2], errors.PeerAbort)


def test_ranks_in_different_calls_are_told_apart(device):
    layer = Layer.make(THREE, device)
    with World(THREE, device) as world:
        calls = world.prepare(layer, layers=[1, 1, 2])
        world.virtual.launch(calls)
        torch.cuda.synchronize()
        found = world.failures()
        assert all(isinstance(e, errors.ProtocolMismatch | errors.PeerAbort) for e in found)
        text = str(next(e for e in found if isinstance(e, errors.ProtocolMismatch)))
        assert "layer 1" in text and "layer 2" in text


def test_B06_a_rank_that_brings_too_many_tokens_tells_its_peers(device):
    layer = Layer.make(THREE, device)
    with World(THREE, device) as world:
        world.forward(layer)
        handle = native.register(world.virtual.ranks[1])
        calls = world.prepare(layer)
        more = Layer.make(Case((500,) * 3, 2, 6, 512, 256), device)
        world.virtual.launch(calls, schedule=[0, 2], main=[0, 2])
        with (
            torch.cuda.stream(world.virtual.streams[1]),
            pytest.raises(errors.WorkspaceTooSmall, match="got 500, need at most 120"),
        ):
            x, ids, probs, w1, w2 = more.inputs()[1]
            native.moe_forward(x, ids, probs, w1, w2, handle, 6, 120, 3, -1, 0, 0.0)
        torch.cuda.synchronize()
        found = world.failures()
        assert isinstance(found[1], errors.WorkspaceTooSmall)
        for error in (found[0], found[2]):
            assert isinstance(error, errors.PeerAbort) and error.peer == 1


def test_a_dead_workspace_leaves_others_alone(device):
    """B77: a failure belongs to its workspace."""
    layer = Layer.make(THREE, device)
    with World(THREE, device, timeout_s=0.2) as dead, World(THREE, device) as alive:
        want = alive.forward(layer)
        dead.virtual.launch(dead.prepare(layer), schedule=[0], main=[0])
        torch.cuda.synchronize()
        assert isinstance(dead.failures()[0], errors.PeerTimeout)
        assert_same_bits(layer, want, alive.forward(layer))


# ---- process settings ----


def test_one_hardware_queue():
    """Four ranks that wait for each other with CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron asks for."""
    code = """
import torch
from tests.gpu.world import Case, Layer, World, assert_gradients, assert_outputs
case, device = Case((200,) * 4, 4, 8, 512, 256), torch.device("cuda", 0)
layer = Layer.make(case, device)
with World(case, device) as world:
    for _ in range(3):
        assert_outputs(layer, world.forward(layer))
        assert_gradients(layer, world.step(layer, 0.5))
print("correct")
"""
    assert python(code, CUDA_DEVICE_MAX_CONNECTIONS="1").strip() == "correct"


def test_B70_importing_starts_no_cuda():
    code = "import megatron_mok.runtime, megatron_mok.runtime.cuda, torch; print(torch.cuda.is_initialized())"
    assert python(code).strip() == "False"


def test_B70_from_a_worker_thread(opened, device):
    comm = opened(SMALL)
    layer = Layer.make(SMALL, device)
    want, got = moe(layer, comm), []
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: got.append(moe(layer, comm)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(got[0], want)
