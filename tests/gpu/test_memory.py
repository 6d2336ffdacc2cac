"""What a layer takes at the benchmark's shapes, measured with the allocator: saved bytes, workspace, rings.

`requested_bytes` of the allocator's statistics is what was asked for, without its rounding.
"""

import gc

import pytest
import torch

from megatron_mok import runtime
from megatron_mok.bench.cases import SHAPES, Inputs, make_inputs, route
from megatron_mok.native.communicator import ALIGN_BYTES
from tests.gpu.world import Case

MIB = 2**20
NAMES = ("A", "B", "C", "D")


class Layer:
    """The inputs of a benchmark's shape, through autograd."""

    def __init__(self, inputs: Inputs, fp32_main_grad: bool = False):
        self.inputs, self.shape = inputs, inputs.shape
        self.leaves = [t.requires_grad_() for t in (inputs.x, inputs.p, inputs.w1, inputs.w2)]
        if fp32_main_grad:
            for w in self.leaves[2:]:
                w.main_grad = torch.zeros_like(w, dtype=torch.float32)
                w.grad_added_to_main_grad = False

    @property
    def case(self) -> Case:
        s = self.shape
        return Case((s.T,), s.K, s.E, s.H, s.I)

    def forward(self, comm, **options):
        x, p, w1, w2 = self.leaves
        return runtime.moe(x, self.inputs.ids, p, w1, w2, comm=comm, num_experts=self.shape.E, **options)

    def step(self, comm, **options) -> None:
        torch.autograd.grad(self.forward(comm, **options), self.leaves, self.inputs.dy)


def requested() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


@pytest.fixture
def layer(request, device):
    yield Layer(make_inputs(SHAPES[request.param], "random", device, seed=0))
    torch.cuda.empty_cache()


@pytest.mark.parametrize("capacity", [0.0, 0.5, 1.25])
@pytest.mark.parametrize("layer", NAMES, indirect=True)
def test_saved_bytes_are_four_i_a_row_and_the_schedule(layer, capacity, opened):
    comm, s = opened(layer.case), layer.shape
    layer.step(comm, save_capacity=capacity)
    before = requested()
    out = layer.forward(comm, save_capacity=capacity)
    kept = requested() - before - out.nbytes
    h = int(4 * s.I * capacity * s.rows)  # rows are a multiple of 8, in which they are kept
    schedule_rows = s.rows + 128 * s.E
    assert h + 12 * s.rows < kept < h + 12.1 * schedule_rows + 8192
    assert kept == runtime.saved_bytes(
        tokens=s.T, ffn=s.I, top_k=s.K, num_experts=s.E, num_ranks=1, save_capacity=capacity
    )
    del out
    assert requested() == before


@pytest.mark.parametrize("layer", NAMES, indirect=True)
def test_B54_workspace_and_rings(layer, opened):
    """The workspace is 2 * T * H * (2 + K) bytes and a little; rings come with the first call."""
    s = layer.shape
    before = requested()
    comm = opened(layer.case)
    workspace = requested() - before
    assert workspace == ALIGN_BYTES + runtime.workspace_bytes(
        max_tokens=s.T, hidden=s.H, top_k=s.K, num_ranks=1
    )
    assert 2 * s.T * s.H * (2 + s.K) < workspace < 2 * s.T * s.H * (2 + s.K) + 64 * MIB
    layer.step(comm)
    rings = requested() - before - workspace
    assert rings == ALIGN_BYTES + runtime.local_bytes(
        max_tokens=s.T, hidden=s.H, ffn=s.I, top_k=s.K, num_experts=s.E, num_ranks=1
    )
    for _ in range(2):
        layer.step(comm)
    assert requested() == before + workspace + rings
    runtime.release()
    assert requested() == before


@pytest.mark.parametrize("fp32_main_grad", [False, True], ids=["fresh", "main_grad"])
@pytest.mark.parametrize("name", ["A", "C"])
def test_B55_no_device_allocation_in_a_warm_step(name, fp32_main_grad, opened, device):
    """Whatever the routing: after two steps, everything comes from what the allocator holds."""
    shape = SHAPES[name]
    layer = Layer(make_inputs(shape, "balanced", device, seed=0), fp32_main_grad)
    comm = opened(layer.case)
    generator = torch.Generator(device).manual_seed(1)
    routings = [route(shape, kind, generator) for kind in ("random", "balanced", "random")]
    routings.append(torch.zeros_like(routings[0]))  # every token K times on one expert
    for _ in range(2):
        layer.step(comm)
    torch.cuda.synchronize()

    def held():
        stats = torch.cuda.memory_stats()
        names = (
            "segment.all.allocated",
            "segment.all.freed",
            "reserved_bytes.all.current",
            "num_alloc_retries",
        )
        return {name: stats[name] for name in names}

    before = held()
    for ids in routings:
        layer.inputs.ids = ids
        layer.step(comm)
    torch.cuda.synchronize()
    assert held() == before
    torch.cuda.empty_cache()
