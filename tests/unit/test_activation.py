"""Activations against Megatron-Core's own functions and torch's autograd, in fp64."""

import pytest
import torch
import torch.nn.functional as F

from megatron_mok.reference import activation as act
from megatron_mok.reference.activation import Activation


def eager(function):
    """Megatron-Core compiles these where it can; here they are wanted as written."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def plain(kind, limit, h):
    """As Megatron-Core's MLP writes it (unfused, glu_linear_offset 0)."""
    from megatron.core.activations import quick_gelu, squared_relu

    if kind is Activation.SQUARED_RELU:
        return eager(squared_relu)(h)
    function = {
        Activation.SWIGLU: F.silu,
        Activation.GEGLU: F.gelu,
        Activation.QUICK_GEGLU: eager(quick_gelu),
    }[kind]
    gate, up = h.chunk(2, -1)
    if limit:
        gate, up = gate.clamp(min=None, max=limit), up.clamp(min=-limit, max=limit)
    return function(gate) * up


CASES = [(kind, limit) for kind in Activation for limit in (0.0, 1.0) if kind.gated or not limit]


@pytest.mark.parametrize(("kind", "limit"), CASES, ids=lambda v: getattr(v, "name", v))
def test_value_and_gradient(kind, limit):
    h = 2 * torch.randn(50, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    h.requires_grad_()
    want = plain(kind, limit, h)
    assert torch.allclose(act.forward(kind, limit, h), want, rtol=1e-14, atol=1e-14)
    grad = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (slope,) = torch.autograd.grad(want, h, grad)
    got = act.backward(kind, limit, h.detach(), grad)
    assert torch.allclose(got, slope, rtol=1e-12, atol=1e-14)


def test_swiglu_equals_megatron_s_fused_weighted_swiglu_in_fp32():
    from megatron.core.fusions.fused_bias_swiglu import swiglu, swiglu_back

    h = torch.randn(33, 64, generator=torch.Generator().manual_seed(3))
    grad = torch.randn(33, 32, generator=torch.Generator().manual_seed(4))
    assert torch.equal(act.forward(Activation.SWIGLU, 0.0, h), eager(swiglu)(h))
    want = eager(swiglu_back)(grad, h)
    assert torch.allclose(act.backward(Activation.SWIGLU, 0.0, h, grad), want, rtol=1e-5, atol=1e-6)


def test_limit_at_its_edge_lets_the_gradient_through():
    h = torch.tensor([[1.0, -1.0, -1.0, 1.0]])  # gate 1 and -1, up -1 and 1
    got = act.backward(Activation.SWIGLU, 1.0, h, torch.ones(1, 2))
    assert (got != 0).all()
    assert (act.backward(Activation.SWIGLU, 0.99, h, torch.ones(1, 2)) != 0).tolist() == [
        [False, True, False, False]
    ]


def test_B27_unknown_activation_names_those_there_are():
    with pytest.raises(ValueError, match="swiglu.*squared_relu"):
        act.from_name("relu6")
    assert act.from_name("swiglu") is Activation.SWIGLU
    assert Activation.SQUARED_RELU.fc1_rows(64) == 64 and Activation.GEGLU.fc1_rows(64) == 128
