"""What a call puts on its stream: two kernels in forward, one in backward, no memset, no copy."""

import ctypes
import re

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.gpu.world import Case, Gradients, Layer, World

CASE = Case((500,), 4, 8, 512, 256)
KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL
# name: (kernels; dtype of the weight gradients, whether they are added to what is there)
CALLS: dict[str, tuple[int, torch.dtype | None, bool]] = {
    "forward": (2, None, False),
    "backward-bf16": (1, torch.bfloat16, False),
    "backward-fp32": (1, torch.float32, False),
    "backward-fp32-added": (1, torch.float32, True),
}


@pytest.fixture(params=CALLS)
def run(request, device):
    """(a function that launches one call on the current stream, the kernels that this is)"""
    expected, dtype, add = CALLS[request.param]
    layer = Layer.make(CASE, device)
    with World(CASE, device) as world:
        calls = world.forward(layer, save=0.5)  # half of the rows are computed again in backward
        world.backward(layer, calls)
        if dtype is None:
            (call,) = world.prepare(layer, save=True)
            kernels = [call.schedule_rows, call.forward]
        else:
            into = Gradients.empty(CASE, device, dtype, 0.0)
            (call,) = world.prepare_backward(layer, calls, [into], accumulate=add)
            kernels = [call.backward, call.finish]
        torch.cuda.synchronize()

        def launch():
            call.args.stream = torch.cuda.current_stream().cuda_stream
            for kernel in kernels:
                kernel()

        yield launch, expected
        torch.cuda.synchronize()
        world.virtual.check()


def test_profiler_sees_the_kernels_alone(run):
    launch, kernels = run
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(4):
            launch()
        torch.cuda.synchronize()
    on_gpu = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if not on_gpu:
        pytest.skip("the profiler sees no GPU activity on this machine; the next test counts graph nodes")
    assert [name for name in on_gpu if re.search("memset|memcpy", name, re.IGNORECASE)] == []
    assert len(on_gpu) == kernels * 4, on_gpu


def test_graph_has_kernel_nodes_alone(run):
    launch, kernels = run
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        launch()
    driver = ctypes.CDLL("libcuda.so.1")
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    assert driver.cuGraphGetNodes(handle, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)) == 0
    kinds = []
    for node in nodes:
        kind = ctypes.c_int()
        assert driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        kinds.append(kind.value)
    assert kinds == [KERNEL_NODE] * kernels
