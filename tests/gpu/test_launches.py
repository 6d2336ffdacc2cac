"""What a forward call puts on its stream: two kernels, no memset, no copy."""

import ctypes
import re

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.gpu.world import Case, Layer, World

CASE = Case((500,), 4, 8, 512, 256)
KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL


@pytest.fixture
def run(device):
    layer = Layer.make(CASE, device)
    with World(CASE, device) as world:
        world.forward(layer, save=True)
        calls = world.prepare(layer, save=True)
        torch.cuda.synchronize()

        def launch():
            for call in calls:
                call.args.stream = torch.cuda.current_stream().cuda_stream
                call.schedule_rows()
                call.forward()

        yield launch
        torch.cuda.synchronize()
        world.virtual.check()


def test_profiler_sees_two_kernels(run):
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(4):
            run()
        torch.cuda.synchronize()
    on_gpu = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if not on_gpu:
        pytest.skip("the profiler sees no GPU activity on this machine; the next test counts graph nodes")
    assert [name for name in on_gpu if re.search("memset|memcpy", name, re.IGNORECASE)] == []
    assert len(on_gpu) == 2 * 4, on_gpu


def test_graph_has_two_kernel_nodes(run):
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        run()
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
    assert kinds == [KERNEL_NODE] * 2
