"""The example's core attention: numbers, dropout, and what it refuses."""

import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

import examples.attention
from examples.attention import DeterministicSdpaCoreAttention, SdpaCoreAttention, serve_mla
from megatron_mok.errors import ConfigError

CONFIG = dict(
    attention_dropout=0.0, sequence_parallel=False, context_parallel_size=1, window_size=None,
    softmax_type="vanilla", qk_clip=False, log_max_attention_logit=False,
)  # fmt: skip
FP32 = dict(rtol=1e-5, atol=1e-5)
S, B, N, D, V = 12, 2, 3, 8, 5


def attention(scale=None, kind=SdpaCoreAttention, **changes):
    return kind(
        SimpleNamespace(**CONFIG | changes), 1, AttnMaskType.causal, "self", softmax_scale=scale, k_channels=D
    )


def tensors(value_size=V):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(S, B, N, size, generator=generator).requires_grad_() for size in (D, D, value_size)]


def plain(q, k, v, scale):
    """Softmax over the keys up to each query, in fp64."""
    q, k, v = (t.double() for t in (q, k, v))
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) * scale
    later = torch.ones(S, S, dtype=torch.bool).triu(1)
    out = torch.einsum("bnst,tbnv->sbnv", scores.masked_fill(later, -math.inf).softmax(-1), v)
    return out.flatten(2)


@pytest.mark.parametrize("kind", [SdpaCoreAttention, DeterministicSdpaCoreAttention])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_output_and_gradients_are_those_of_causal_softmax(scale, kind):
    ours, theirs = tensors(), tensors()
    out = attention(scale, kind)(*ours, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=None)
    want = plain(*theirs, scale or D**-0.5)
    assert out.shape == (S, B, N * V)
    torch.testing.assert_close(out.double(), want, **FP32)
    for loss in (out.double(), want):
        (loss * torch.arange(loss.numel()).view(loss.shape).cos()).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, **FP32)


@pytest.mark.parametrize("outside", [(False, False), (True, True)], ids=["off", "warn-only"])
def test_deterministic_attention_sets_it_strictly_in_both_passes_and_nowhere_else(monkeypatch, outside):
    """On a GPU that picks the kernels that repeat their bits; with warn_only torch does not pick them."""
    seen, sdpa = {}, torch.nn.functional.scaled_dot_product_attention

    def mode(name):
        enabled = torch.are_deterministic_algorithms_enabled()
        seen[name] = enabled, torch.is_deterministic_algorithms_warn_only_enabled()

    def watched(*args, **kwargs):
        mode("forward")
        out = sdpa(*args, **kwargs)
        out.register_hook(lambda grad: mode("backward"))
        return out

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    layer, inputs = attention(kind=DeterministicSdpaCoreAttention), tensors()
    try:
        torch.use_deterministic_algorithms(outside[0], warn_only=outside[1])
        out = layer(*inputs, None)
        mode("between")
        out.register_hook(lambda grad: mode("before"))
        out.sum().backward()
        mode("after")
    finally:
        torch.use_deterministic_algorithms(False)
    strict = (True, False)
    rest = dict.fromkeys(("between", "before", "after"), outside)
    assert seen == {"forward": strict, "backward": strict, **rest}


class Tracker:
    """Megatron's tracker of generators: a fork draws from a generator of its own and moves it on."""

    def __init__(self, seed=5):
        self.state = torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def fork(self):
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.state)
            yield
            self.state = torch.get_rng_state()


def test_dropout_keeps_the_mean_in_training_and_is_off_in_evaluation(monkeypatch):
    layer, (q, k, _) = attention(attention_dropout=0.5), tensors()
    ones = torch.ones(S, B, N, V)

    def draw(count, tracker):
        monkeypatch.setattr(examples.attention, "get_cuda_rng_tracker", lambda: tracker)
        return torch.stack([layer(q, k, ones, None) for _ in range(count)]).detach()

    kept = draw(200, Tracker())
    assert kept.mean() == pytest.approx(1.0, abs=0.02) and kept.std(dim=0).min() > 0.1
    assert draw(2, Tracker()).equal(kept[:2]), "drawn from Megatron's tracker"
    torch.testing.assert_close(layer.eval()(q, k, ones, None), torch.ones(S, B, N * V))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("context_parallel_size", 2),
        ("window_size", (128, 0)),
        ("softmax_type", "learnable"),
        ("qk_clip", True),
        ("log_max_attention_logit", True),
    ],
)
def test_settings_that_it_does_not_honour_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"{field}: got .*transformer_engine"):
        attention(**{field: value})


def test_other_masks_are_refused_when_it_is_built():
    with pytest.raises(ConfigError, match="attn_mask_type.*\n.*attention_type"):
        SdpaCoreAttention(SimpleNamespace(**CONFIG), 1, AttnMaskType.padding, "cross")


@pytest.mark.parametrize(
    "argument",
    [
        dict(attention_mask=torch.zeros(B, 1, S, S, dtype=torch.bool)),
        dict(attention_bias=torch.zeros(B, N, S, S)),
        dict(packed_seq_params=SimpleNamespace(qkv_format="thd")),
        dict(attn_mask_type=AttnMaskType.no_mask),
    ],
    ids=lambda argument: next(iter(argument)),
)
def test_arguments_that_it_does_not_honour_are_refused(argument):
    with pytest.raises(ConfigError, match=next(iter(argument))):
        attention()(*tensors(), **{"attention_mask": None} | argument)


def test_fewer_queries_than_keys_are_refused():
    q, k, v = tensors()
    with pytest.raises(ConfigError, match="keys"):
        attention()(q[-1:], k, v, None)


def spec(core_attention):
    inner = SimpleNamespace(core_attention=core_attention)
    return SimpleNamespace(submodules=SimpleNamespace(self_attention=SimpleNamespace(submodules=inner)))


def test_it_serves_mla_in_place_of_the_local_attention_alone():
    other = type("TEDotProductAttention", (), {})
    for mla, before, after in (
        (True, DotProductAttention, SdpaCoreAttention),
        (True, other, other),
        (False, DotProductAttention, DotProductAttention),
    ):
        layer, inner = spec(before), spec(before)
        mtp_layer = SimpleNamespace(submodules=SimpleNamespace(mtp_model_layer=inner))
        config = SimpleNamespace(multi_latent_attention=mla)
        block, mtp = SimpleNamespace(layer_specs=[layer, layer]), SimpleNamespace(layer_specs=[mtp_layer])
        did = serve_mla(config, block, mtp)
        assert did == (after is SdpaCoreAttention)
        for part in (layer, inner):
            assert part.submodules.self_attention.submodules.core_attention is after


def test_it_serves_mla_deterministically_where_asked():
    config = SimpleNamespace(multi_latent_attention=True)
    for before, always in ((type("TEDotProductAttention", (), {}), True), (SdpaCoreAttention, False)):
        layer = spec(before)
        assert serve_mla(config, SimpleNamespace(layer_specs=[layer]), always=always, deterministic=True)
        served = layer.submodules.self_attention.submodules.core_attention
        assert served is DeterministicSdpaCoreAttention


def test_a_second_backward_through_deterministic_attention_is_refused():
    q, k, v = (t.requires_grad_() for t in tensors())
    core = DeterministicSdpaCoreAttention(SimpleNamespace(**CONFIG), 1, AttnMaskType.causal, "self")
    out = core(q, k, v, None).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        out.backward()
