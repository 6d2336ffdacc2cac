"""Stands in for apex's extension of this name, in plain torch: put this folder on PYTHONPATH.

Megatron-Core's own linear layers refuse gradient accumulation fusion without that extension. With
Transformer Engine one such layer is left, the output layer; all others add to main_grad in its kernels, the
experts in its grouped GEMMs, and a comparison with those at their best needs the fusion.
"""

from torch import Tensor


def wgrad_gemm_accum_fp32(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """main_grad [O, I] += grad_output [T, O]^T @ total_input [T, I], rounded to the inputs' dtype."""
    main_grad.add_(grad_output.t() @ total_input)


wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32  # a main_grad in the inputs' own dtype
