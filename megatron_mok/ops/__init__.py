"""The layer as torch operators on tensors and integers: torch.ops.megatron_mok.moe_forward and .moe_backward.

Importing this package defines them, with implementations for CPU (megatron_mok.reference) and CUDA
(megatron_mok.native), fake implementations for torch.compile, and autograd.
"""

from .autograd import weight_gradient_buffers
from .definitions import moe_backward, moe_forward

__all__ = ["moe_backward", "moe_forward", "weight_gradient_buffers"]
