"""Stand-ins that let Transformer Engine's GroupedLinear run on CPU tensors: for names, hooks and main_grad.

None of its kernels is run. To be installed after megatron_mok.testing.cpu's.
"""

from __future__ import annotations

from typing import Any

import torch


def prepare_forward(
    self: Any, inp: torch.Tensor, num_gemms: int = 1, allow_non_contiguous: bool = False, **_: Any
) -> torch.Tensor:
    """TransformerEngineBaseModule's, without its assertion that the tensor is on a GPU."""
    self.fast_setattr("allow_different_data_and_param_types", False)
    self.fast_setattr("forwarded_at_least_once", True)
    self.set_activation_dtype(inp)
    self.init_fp8_metadata(num_gemms=num_gemms)
    return inp if allow_non_contiguous else inp.contiguous()


def grouped_gemm(
    A: list, B: list, out: list, *_: Any, layout: str = "TN", m_splits: Any = None, gelu: bool = False,
    grad: bool = False, accumulate: bool = False, bias: Any = None, use_bias: bool = False,
    single_output: bool = False, **__: Any,
) -> tuple:  # fmt: skip
    """general_grouped_gemm: out = op(B) @ op(A) of row-major matrices, added to out if accumulate."""
    assert not gelu and not use_bias, "the tests have neither"
    outs = torch.split(out[0], list(m_splits)) if single_output else out
    for a, b, o in zip(A, B, outs, strict=True):
        if o.numel():
            a, b = (
                m.float().t() if code == "T" else m.float() for m, code in zip((a, b), layout, strict=True)
            )
            product = b @ a
            o.copy_(o.float() + product if accumulate else product)
    none = [torch.empty(0)] * len(A)
    return out, none if grad or bias is None else bias, none


def install() -> None:
    from megatron.core.transformer.moe import moe_utils
    from transformer_engine.pytorch.module import base, grouped_linear

    base.TransformerEngineBaseModule.prepare_forward = prepare_forward
    base.TransformerEngineBaseModule.end_forward = lambda self: None
    base.nvtx_range_push = base.nvtx_range_pop = lambda *_, **__: None
    grouped_linear.general_grouped_gemm = grouped_gemm
    moe_utils.te_general_gemm = None  # the router multiplies with torch
    torch.cuda.is_available = lambda: True  # what the grouped linear's constructor asks
    torch.cuda.is_current_stream_capturing = lambda: False
