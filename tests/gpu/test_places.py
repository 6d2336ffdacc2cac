"""Weights and gradients of one layer anywhere in memory: allocators take them from distant ranges."""

import ctypes
from contextlib import contextmanager

import pytest
import torch

from .test_forward import SMALL, moe
from .world import Layer

FAR = 1 << 40  # bytes, more than one coordinate of a tensor map reaches


class Foreign:
    """What torch.as_tensor takes: bytes at an address."""

    def __init__(self, address, size_bytes):
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


@contextmanager
def memory_of_a_pool(size_bytes, device):
    """Bytes from the driver's stream-ordered allocator, whose addresses lie far from those of cudaMalloc."""
    driver, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    assert driver.cuMemAllocAsync(ctypes.byref(address), ctypes.c_size_t(size_bytes), stream) == 0
    try:
        yield torch.as_tensor(Foreign(address.value, size_bytes), device=device)
    finally:
        assert driver.cuMemFreeAsync(address, stream) == 0


def test_tensors_of_experts_far_apart(opened, device):
    layer = Layer.make(SMALL, device)
    comm = opened(SMALL)

    def step(w1, w2, main1, main2):
        """out, with the gradients added into main1 and main2."""
        for weight, main in zip((*w1, *w2), (*main1, *main2), strict=True):
            weight.requires_grad_()
            vars(weight).update(main_grad=main.zero_(), grad_added_to_main_grad=False)
        out = moe(layer, comm, w1=w1, w2=w2, main_grad="on")
        out.backward(layer.dy[0])
        return out.detach()

    def separate(stacked, dtype=torch.bfloat16):
        return [w.detach().to(dtype, copy=True) for w in stacked]

    w1, w2 = separate(layer.w1), separate(layer.w2)
    main1, main2 = separate(layer.w1, torch.float32), separate(layer.w2, torch.float32)
    out = step(w1, w2, main1, main2)
    size = main1[0].nbytes
    with memory_of_a_pool(2 * size, device) as memory:
        distant = memory[:size].view(torch.float32).view_as(main1[0])
        weight = memory[size:].view(torch.bfloat16)[: w1[0].numel()].view_as(w1[0]).copy_(w1[0].detach())
        if abs(distant.data_ptr() - main1[0].data_ptr()) < FAR:
            pytest.skip("the driver takes both from one range of addresses")
        others = [torch.empty_like(m) for m in main1[1:]]
        again2 = [torch.empty_like(m) for m in main2]
        again = step([weight, *separate(w1[1:])], separate(w2), [distant, *others], again2)
        assert torch.equal(again, out)
        for got, want in zip((distant, *others, *again2), (*main1, *main2), strict=True):
            assert torch.equal(got, want)
