"""Runs inside a rank: one MoE layer with given routing, beside a plain loop in fp64 over all ranks' tokens.

Legend: T tokens here, H hidden size, I expert intermediate size, E experts, K experts per token.
"""

from __future__ import annotations

import gc
import os
import time
import weakref
from typing import Any

import model
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec
from megatron.core.transformer import TransformerConfig
from model import layout

import megatron_mok
from megatron_mok import errors, runtime

H, INTERMEDIATE, E, K = 32, 16, 8, 2


def layer_config(dispatcher: str = "mok", **changes: Any) -> TransformerConfig:
    """A configuration without shared experts, bias or losses: only what the routed experts need."""
    settings: dict[str, Any] = dict(
        mla=False,
        num_layers=1,
        hidden_size=H,
        ffn_hidden_size=INTERMEDIATE,
        moe_ffn_hidden_size=INTERMEDIATE,
        num_moe_experts=E,
        moe_router_topk=K,
        moe_layer_freq=1,
        moe_router_score_function="softmax",
        moe_router_enable_expert_bias=False,
        moe_router_num_groups=None,
        moe_router_group_topk=None,
        moe_router_topk_scaling_factor=None,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_shared_expert_intermediate_size=None,
    )
    settings.update(changes)
    return model.make_config(dispatcher, **settings)


def make_layer(config: TransformerConfig, seed: int = 3, **kwargs: Any) -> torch.nn.Module:
    """A MoE layer from Megatron's local spec; expert weights depend on the seed and the global expert
    only."""
    spec = get_mlp_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    layer = spec(config=config, **kwargs)
    layer.set_layer_number(1)
    layer = layer.to(config.params_dtype)
    with torch.no_grad():
        for local, expert in enumerate(layer.experts.local_experts):
            generator = torch.Generator().manual_seed(100 * seed + layer.local_expert_indices[local])
            for weight in (expert.linear_fc1.weight, expert.linear_fc2.weight):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
        generator = torch.Generator().manual_seed(seed)
        layer.router.weight.copy_(torch.randn(layer.router.weight.shape, generator=generator) * 0.3)
    return layer


def random_routes(
    tokens: int, experts: int = E, k: int = K, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(probs [T, E], map [T, E]); differs from rank to rank."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    scores = torch.rand(tokens, experts, generator=generator)
    chosen = scores.topk(k, dim=1).indices if tokens else torch.zeros(0, k, dtype=torch.long)
    routing = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)
    return (scores * routing), routing


def tokens_of(count: int, hidden: int = H, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7000 * (seed + 1) + dist.get_rank())
    return torch.randn(count, hidden, generator=generator).to(dtype)


def run(
    layer: torch.nn.Module,
    x: torch.Tensor,
    probs: torch.Tensor,
    routing: torch.Tensor,
    dy: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Forward and backward with given routes: out and the gradients of x, of probs and of all expert
    weights."""
    x = x.detach().clone().requires_grad_()
    probs = probs.detach().clone().requires_grad_()
    layer.router.forward = lambda *_: (probs, routing)
    out, bias = layer(x.unsqueeze(1))
    assert bias is None and out.shape == (x.shape[0], 1, x.shape[1])
    dy = torch.ones_like(x) if dy is None else dy
    for weight in layer.experts.parameters():
        weight.grad = None
    out.squeeze(1).backward(dy)
    grads = [
        [w.grad for w in (e.linear_fc1.weight, e.linear_fc2.weight)] for e in layer.experts.local_experts
    ]
    return {"out": out.detach().squeeze(1), "dx": x.grad, "dprobs": probs.grad, "dw": grads}


def oracle(
    layer: torch.nn.Module,
    x: torch.Tensor,
    probs: torch.Tensor,
    routing: torch.Tensor,
    dy: torch.Tensor | None = None,
) -> dict[str, Any]:
    """The same in fp64 by a plain loop over the tokens and experts of all ranks of the layer's group."""
    group = layer.ep_group
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    mine = dict(
        x=x.double(),
        probs=probs.double(),
        routing=routing,
        dy=(torch.ones_like(x) if dy is None else dy).double(),
        weights=[
            [w.detach().double() for w in (e.linear_fc1.weight, e.linear_fc2.weight)]
            for e in layer.experts.local_experts
        ],
    )
    every: list[Any] = [None] * size
    dist.all_gather_object(every, mine, group=group)
    weights = [[w.requires_grad_() for w in pair] for theirs in every for pair in theirs["weights"]]
    outs = []
    for theirs in every:
        theirs["x"].requires_grad_()
        theirs["probs"].requires_grad_()
        out = torch.zeros_like(theirs["x"])
        for expert, (w1, w2) in enumerate(weights):
            rows = theirs["routing"][:, expert].nonzero().squeeze(1)
            gate, up = (theirs["x"][rows] @ w1.t()).chunk(2, dim=1)
            act = torch.nn.functional.silu(gate) * up * theirs["probs"][rows, expert].unsqueeze(1)
            out = out.index_add(0, rows, act @ w2.t())
        outs.append(out)
    torch.autograd.backward(outs, [theirs["dy"] for theirs in every])
    first = rank * len(mine["weights"])
    dw = [[w.grad for w in pair] for pair in weights[first : first + len(mine["weights"])]]
    return {
        "out": outs[rank].detach(),
        "dx": every[rank]["x"].grad,
        "dprobs": every[rank]["probs"].grad,
        "dw": dw,
    }


def difference(got: Any, want: Any) -> float:
    """Largest |got - want| relative to the largest |want| of that tensor (or to 1); infinite where a NaN
    is."""
    if isinstance(got, dict):
        return max(difference(got[k], want[k]) for k in got)
    if isinstance(got, list):
        return max((difference(g, w) for g, w in zip(got, want, strict=True)), default=0.0)
    if got is None or want is None:
        both = got if got is not None else want
        return 0.0 if both is None else float(both.abs().max())
    assert got.shape == want.shape, (got.shape, want.shape)
    if got.numel() == 0:
        return 0.0
    error = (got.double() - want.double()).abs().max() / want.abs().max().clamp(min=1.0)
    return float(error) if not torch.isnan(got).any() else float("inf")


def equal(a: Any, b: Any) -> bool:
    """The same bits."""
    if isinstance(a, dict):
        return all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return all(equal(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b)


# --- routing


def all_to_first_rank(ep: int = 4) -> dict[str, Any]:
    """B01: every token picks experts 0 and 1, both on rank 0."""
    layout(ep)
    layer = make_layer(layer_config())
    routing = torch.zeros(24, E, dtype=torch.bool)
    routing[:, :2] = True
    probs = routing * torch.rand(24, E)
    x = tokens_of(24)
    got = run(layer, x, probs, routing)
    zero = all(bool((g == 0).all()) for pair in got["dw"] for g in pair)
    return {"error": difference(got, oracle(layer, x, probs, routing)), "grads_are_zeros": zero}


def token_counts(counts: list[list[int]], max_tokens: int | None = None) -> list[float]:
    """B05, B06: one forward and backward per entry; an entry lists the tokens of each rank."""
    layout(4)
    megatron_mok.configure(megatron_mok.MokConfig(max_tokens=max_tokens))
    layer = make_layer(layer_config())
    results = []
    for step, per_rank in enumerate(counts):
        tokens = per_rank[dist.get_rank()]
        x, (probs, routing) = tokens_of(tokens, seed=step), random_routes(tokens, seed=step)
        results.append(difference(run(layer, x, probs, routing), oracle(layer, x, probs, routing)))
    return results


def above_max_tokens() -> dict[str, Any]:
    """B06: rank 1 brings more tokens than the workspace takes; then all ranks reserve more and go on."""
    layout(4)
    megatron_mok.configure(megatron_mok.MokConfig(max_tokens=16))
    layer = make_layer(layer_config())

    def step(tokens: int) -> float:
        x, (probs, routing) = tokens_of(tokens), random_routes(tokens)
        return difference(run(layer, x, probs, routing), oracle(layer, x, probs, routing))

    before = step(16)
    failure = None
    try:
        tokens = 24 if dist.get_rank() == 1 else 16
        x, (probs, routing) = tokens_of(tokens), random_routes(tokens)
        run(layer, x, probs, routing)
    except errors.MokError as error:
        failure = (type(error).__name__, str(error))
    dist.barrier()
    megatron_mok.release()
    megatron_mok.reserve(24)
    return {"before": before, "failure": failure, "after": step(24)}


def grown_workspace() -> list[bool]:
    """From the second step on rank 1 alone brings more tokens: bits beside those of a workspace that was
    large from the start, by reserve() and by release(), after which the largest rank's tokens count."""
    layout(4)
    counts = [8, 24 if dist.get_rank() == 1 else 8]
    runs = []
    for enlarge in (None, lambda: megatron_mok.reserve(24), megatron_mok.release):
        megatron_mok.release()
        megatron_mok.configure(megatron_mok.MokConfig(max_tokens=None if enlarge else 24))
        layers = [make_layer(layer_config(), seed=seed) for seed in (3, 4)]
        results = []
        for step, count in enumerate(counts):
            if step and enlarge:
                enlarge()
            batch = (tokens_of(count, seed=step), *random_routes(count, seed=step))
            results += [run(layer, *batch) for layer in layers]
        runs.append(results)
    return [equal(run, runs[0]) for run in runs[1:]]


def cleared_padding() -> dict[str, Any]:
    """B11: a quarter of the rows has no route at all; some others have one instead of two."""
    layout(4)
    layer = make_layer(layer_config())
    x, (probs, routing) = tokens_of(32), random_routes(32)
    routing[::4] = False
    routing[1] &= torch.arange(E) == int(routing[1].nonzero()[0])
    probs = probs * routing
    got = run(layer, x, probs, routing)
    return {
        "error": difference(got, oracle(layer, x, probs, routing)),
        "padding_is_zero": bool((got["out"][::4] == 0).all() and (got["dx"][::4] == 0).all()),
        "routes": int(routing.sum()),
    }


def padding_mask(dispatchers: list[str]) -> list[dict[str, Any]]:
    """A layer of each dispatcher with Megatron's padding mask, and the first also without: output, gradients
    and the router's losses. Without expert bias, with which Megatron-Core 0.19.2's router cannot take a mask:
    it combines [T, E] with [T]."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    layout(4)
    MoEAuxLossAutoScaler.main_loss_backward_scale = None  # it keeps the shape of the first that it gets
    options = dict(
        moe_router_load_balancing_type=["aux_loss", "seq_aux_loss", "global_aux_loss"],
        moe_aux_loss_coeff=[1e-1, 1e-1, 1e-1],
        moe_z_loss_coeff=1e-2,
    )
    x, r = (tokens_of(2 * 12, seed=seed).view(12, 2, H) for seed in (0, 5))
    mask = torch.arange(12) >= torch.tensor([[12 - 3 * dist.get_rank()], [5]])  # [B, S], True: padding
    results = []
    for name, given in [(dispatchers[0], None), *((name, mask) for name in dispatchers)]:
        model.destroy_moe_metrics_tracker()
        layer = make_layer(layer_config(name, **options))
        leaf = x.clone().requires_grad_()
        out, _ = layer(leaf, padding_mask=given)
        (out * r).sum().backward()
        losses = {name: entry.values.clone() for name, entry in get_moe_metrics_tracker().metrics.items()}
        results.append(
            {
                "out": out.detach(),
                "dx": leaf.grad,
                "router": layer.router.weight.grad,
                "experts": [w.grad for w in layer.experts.parameters()],
                "losses": losses,
            }
        )
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    model.destroy_moe_metrics_tracker()
    return results


def underflowed_probability() -> float:
    """A chosen expert whose probability is 0 keeps its gradient: the map decides, not the probability."""
    layout(4)
    layer = make_layer(layer_config())
    x, (probs, routing) = tokens_of(16), random_routes(16)
    first = routing.int().argmax(dim=1)
    probs = probs.scatter(1, first.unsqueeze(1), 0.0)
    got, want = run(layer, x, probs, routing), oracle(layer, x, probs, routing)
    assert want["dprobs"].gather(1, first.unsqueeze(1)).abs().min() > 0
    return difference(got, want)


def equal_probabilities(dispatchers: list[str]) -> list[float]:
    """B26: all probabilities 0.5; differences of the dispatchers' outputs and gradients to the oracle's."""
    layout(4)
    x, (_, routing) = tokens_of(16), random_routes(16)
    probs = 0.5 * routing
    layers = [make_layer(layer_config(name)) for name in dispatchers]
    return [difference(run(layer, x, probs, routing), oracle(layer, x, probs, routing)) for layer in layers]


def one_rank(k: int = 4) -> float:
    """B43: EP=1."""
    layout(1)
    layer = make_layer(layer_config(moe_router_topk=k, moe_router_pre_softmax=k == 1))
    x, (probs, routing) = tokens_of(24), random_routes(24, k=k)
    return difference(run(layer, x, probs, routing), oracle(layer, x, probs, routing))


def real_router(dispatcher: str, ep: int, **changes: Any) -> dict[str, Any]:
    """B13, B24: output and gradients of everything, router included, for loss = sum(y * r)."""
    layout(ep)
    layer = make_layer(layer_config(dispatcher, **changes))
    x = tokens_of(24).requires_grad_()
    r = tokens_of(24, seed=5)
    out, _ = layer(x.unsqueeze(1))
    (out.squeeze(1) * r).sum().backward()
    grad = layer.router.weight.grad.clone()
    dist.all_reduce(grad)  # every layout sees the same tokens
    return {"out": out.detach().squeeze(1), "dx": x.grad, "router": grad}


def same_tokens_everywhere(router_dtype: str | None) -> bool:
    """B23: the same bf16 tokens on all ranks give the same bits on all ranks."""
    layout(4)
    layer = make_layer(layer_config(bf16=True, moe_router_dtype=router_dtype))
    x = torch.randn(16, 1, H, generator=torch.Generator().manual_seed(1)).bfloat16()
    out, _ = layer(x)
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, out.detach())
    return all(torch.equal(other, out) for other in every)


def shared_experts(dispatchers: list[str], **changes: Any) -> list[dict[str, Any]]:
    """B79: layer output and gradient of x with Megatron's shared expert beside the routed ones."""
    layout(4)
    results = []
    for name in dispatchers:
        layer = make_layer(layer_config(name, **changes))
        with torch.no_grad():
            generator = torch.Generator().manual_seed(9)
            for parameter in layer.shared_experts.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        x = tokens_of(12).requires_grad_()
        out, _ = layer(x.unsqueeze(1))
        out.sum().backward()
        results.append({"out": out.detach(), "dx": x.grad})
    return results


# --- gradients and state


def requires_grad(x_grad: bool, probs_grad: bool, fc1_grad: bool, fc2_grad: bool) -> dict[str, Any]:
    """B35: only the requested gradients are made, and they equal the oracle's."""
    layout(4)
    layer = make_layer(layer_config())
    x, (probs, routing) = tokens_of(16), random_routes(16)
    want = oracle(layer, x, probs, routing)
    layer.router.weight.requires_grad_(False)
    for expert in layer.experts.local_experts:
        expert.linear_fc1.weight.requires_grad_(fc1_grad)
        expert.linear_fc2.weight.requires_grad_(fc2_grad)
    x, probs = x.clone().requires_grad_(x_grad), probs.clone().requires_grad_(probs_grad)
    layer.router.forward = lambda *_: (probs, routing)
    out, _ = layer(x.unsqueeze(1))
    error = difference(out.detach().squeeze(1), want["out"])
    if out.requires_grad:
        out.sum().backward()
    flags = [(x.grad, want["dx"], x_grad), (probs.grad, want["dprobs"], probs_grad)]
    for expert, (dw1, dw2) in zip(layer.experts.local_experts, want["dw"], strict=True):
        flags += [
            (expert.linear_fc1.weight.grad, dw1, fc1_grad),
            (expert.linear_fc2.weight.grad, dw2, fc2_grad),
        ]
    for got, expected, wanted in flags:
        assert (got is not None) == wanted
        if wanted:
            error = max(error, difference(got, expected))
    return {"error": error, "any": out.requires_grad}


def micro_batches_in_flight() -> bool:
    """B74: F0 F1 F2 B0 B1 B2 and F0 F1 B1 B0, other routes and token counts each: bits of the sequential
    run."""
    layout(4)
    megatron_mok.configure(megatron_mok.MokConfig(max_tokens=32))
    layer = make_layer(layer_config())
    batches = [
        (tokens_of(count, seed=i), *random_routes(count, seed=i)) for i, count in enumerate((16, 32, 8))
    ]
    sequential = [run(layer, *batch) for batch in batches]

    def interleaved(order: list[int]) -> list[dict[str, Any]]:
        flying = []
        for x, probs, routing in batches[: len(order)]:
            x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
            layer.router.forward = lambda *_, p=probs, m=routing: (p, m)
            flying.append((x, probs, layer(x.unsqueeze(1))[0]))
        results: list[Any] = [None] * len(order)
        for i in order:
            for weight in layer.experts.parameters():
                weight.grad = None
            x, probs, out = flying[i]
            out.squeeze(1).backward(torch.ones_like(x))
            grads = [
                [e.linear_fc1.weight.grad, e.linear_fc2.weight.grad] for e in layer.experts.local_experts
            ]
            results[i] = {"out": out.detach().squeeze(1), "dx": x.grad, "dprobs": probs.grad, "dw": grads}
        return results

    return equal(sequential, interleaved([0, 1, 2])) and equal(sequential[:2], interleaved([1, 0]))


def evaluation_between_steps(dispatcher: str = "mok") -> dict[str, Any]:
    """B78: no_grad and inference_mode forwards with another token count between training steps."""
    layout(4)
    plain = model.Trainer(dispatcher).steps(3)
    trainer = model.Trainer(dispatcher)
    first = trainer.step()
    chunk = trainer.models[0].module
    routers = [layer.mlp.router for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")]
    counts = [router.local_tokens_per_expert.clone() for router in routers]
    tokens = torch.arange(model.S).expand(1, model.S)
    outs = []
    positions = torch.arange(model.S).expand(1, model.S)
    chunk.eval()
    with torch.no_grad():
        outs.append(chunk(tokens, positions, None))
        saved = outs[-1].grad_fn is None
    with torch.inference_mode():
        outs.append(chunk(tokens, positions, None).clone())
    same_counts = all(torch.equal(r.local_tokens_per_expert, c) for r, c in zip(routers, counts, strict=True))
    chunk.train()
    after = trainer.steps(2)
    return {
        "losses_equal": plain["losses"] == [first[0], *after["losses"]],
        "no_context": saved,
        "same_counts": same_counts,
        "same_outputs": torch.equal(outs[0], outs[1]),
    }


def nothing_is_kept() -> dict[str, bool]:
    """B57: tensors of a step die with it; release() frees the workspace and the next forward makes it
    again."""
    layout(4)
    layer = make_layer(layer_config())
    x, (probs, routing) = tokens_of(16).requires_grad_(), random_routes(16)
    probs = probs.clone().requires_grad_()
    layer.router.forward = lambda *_, kept=[(probs, routing)]: kept[0]
    out, _ = layer(x.unsqueeze(1))
    out.sum().backward()
    watched = [weakref.ref(t) for t in (x, probs, routing, out)]
    layer.router.forward = None
    del x, probs, routing, out
    gc.collect()
    dead = all(ref() is None for ref in watched)
    megatron_mok.release()
    x, (probs, routing) = tokens_of(16), random_routes(16)
    return {
        "dead": dead,
        "again": difference(run(layer, x, probs, routing), oracle(layer, x, probs, routing)) < 1e-5,
    }


def other_layouts(release: bool) -> dict[str, Any]:
    """EP 4, EP 2 and EP 4 in one process, one after the other."""
    layout(4)
    return model.layouts_in_turn([4, 2, 4], release, lambda: model.Trainer("mok"), 3)


def groups_destroyed(release: bool) -> dict[str, Any]:
    """The same layer's outputs before and after torch's process groups were destroyed and made anew."""
    results = []
    for _ in range(2):
        layout(4)
        layer = make_layer(layer_config())
        results.append(run(layer, tokens_of(8), *random_routes(8)))
        if release:
            megatron_mok.release()
        model.leave()
    return {"equal": equal(*results)}


def two_models() -> dict[str, float]:
    """B77: two layers of other hidden size, top-k and group in one process; one is deleted half way."""
    layout(4)
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[rank // 2]
    groups = get_default_pg_collection()
    groups.ep = groups.tp_ep = pair
    actor = make_layer(layer_config(moe_router_topk=4))
    config = layer_config(hidden_size=16, num_attention_heads=4)
    config.expert_model_parallel_size = 2
    reference = make_layer(config, seed=4, pg_collection=groups)
    a = (tokens_of(16), *random_routes(16, k=4))
    b = (tokens_of(8, hidden=16), *random_routes(8))
    want_a, want_b = oracle(actor, *a), oracle(reference, *b)

    def forward(layer: Any, batch: Any) -> Any:
        x, probs, routing = (t.clone() for t in batch)
        x.requires_grad_()
        layer.router.forward = lambda *_: (probs, routing)
        return x, layer(x.unsqueeze(1))[0]

    (xa, ya), (xb, yb) = forward(actor, a), forward(reference, b)
    ya.sum().backward()
    yb.sum().backward()
    first = max(difference(xa.grad, want_a["dx"]), difference(xb.grad, want_b["dx"]))
    del actor, ya, xa
    gc.collect()
    return {"together": first, "after_delete": difference(run(reference, *b), want_b)}


def one_workspace() -> int:
    """B54, B55: workspaces after several layers and many token counts."""
    layout(4)
    megatron_mok.configure(megatron_mok.MokConfig(max_tokens=40))
    layers = [make_layer(layer_config(), seed=s) for s in range(3)]
    seen = set()
    real = runtime.get_comm

    def spy(*args: Any, **kwargs: Any) -> Any:
        comm = real(*args, **kwargs)
        seen.add(comm.handle)
        return comm

    runtime.get_comm = spy
    try:
        for count in (8, 40, 16, 1, 24):
            for layer in layers:
                run(layer, tokens_of(count), *random_routes(count))
    finally:
        runtime.get_comm = real
    return len(seen)


def absent_rank() -> dict[str, Any]:
    """B49, B51: rank 1 fails before its MoE forward while the others are in theirs."""
    layout(4)
    megatron_mok.configure(megatron_mok.MokConfig(timeout_s=3.0))
    layer = make_layer(layer_config())
    x, (probs, routing) = tokens_of(8), random_routes(8)
    for _ in range(2):
        run(layer, x, probs, routing)
    start = time.monotonic()
    failure = None
    try:
        if dist.get_rank() == 1:
            raise MemoryError("simulated")
        run(layer, x, probs, routing)
    except (errors.MokError, MemoryError) as error:
        failure = (type(error).__name__, str(error))
    seconds = time.monotonic() - start
    # A wait has timed out: new groups, new layer.
    model.leave()
    layout(4)
    layer = make_layer(layer_config())
    again = difference(run(layer, x, probs, routing), oracle(layer, x, probs, routing))
    return {"failure": failure, "seconds": seconds, "again": again}


# --- Megatron's training around it


class Forced(torch.nn.Module):
    """Wraps a router: the first K experts are chosen for every token, with their scores as probabilities."""

    def __init__(self, router: torch.nn.Module) -> None:
        super().__init__()
        self.gate = router.gating
        self.k, self.experts = router.topk, router.config.num_moe_experts

    def __call__(self, hidden: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.gate(hidden).reshape(-1, self.experts)
        routing = (torch.arange(self.experts) < self.k).expand(len(logits), -1)
        return logits.sigmoid() * routing, routing


def empty_ranks_in_ddp(dispatcher: str = "mok") -> dict[str, Any]:
    """B04: as B01 inside Megatron's DDP with overlapped reduction and the distributed optimizer; 3 steps."""
    layout(4)
    trainer = model.Trainer(
        dispatcher, ddp=dict(overlap_grad_reduce=True, use_distributed_optimizer=True), moe_router_topk=4
    )
    chunk = trainer.models[0].module
    layers = [layer.mlp for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")]
    for layer in layers:
        layer.router.forward = Forced(layer.router).__call__
    flags, zeros, losses = [], [], []
    for _ in range(3):
        losses.append(trainer.gradients())
        weights = [w for layer in layers for w in layer.experts.parameters()]
        flags.append(all(w.grad_added_to_main_grad for w in weights))
        zeros.append(all(bool((w.main_grad == 0).all()) for w in weights))
        trainer.optimizer.step()
    return {"losses": losses, "added": flags, "zeros": zeros}


def main_grad_accumulation(main_grad_dtype: str = "fp32") -> dict[str, Any]:
    """B36: two micro-batches of the same data give exactly twice one; the hook fires once per micro-batch."""
    layout(4)
    config = layer_config(bf16=True)
    layer = make_layer(config)
    config.hidden_size = H
    wrapped = model.wrap([layer], config, grad_reduce_in_fp32=main_grad_dtype == "fp32", bucket_size=None)[0]
    x, (probs, routing) = tokens_of(16, dtype=torch.bfloat16), random_routes(16)
    layer.router.forward = lambda *_: (probs, routing)
    fired = []
    first = layer.experts.local_experts[0].linear_fc1.weight
    first.register_post_accumulate_grad_hook(lambda _: fired.append(1))

    def micro_batches(count: int) -> list[torch.Tensor]:
        wrapped.zero_grad_buffer()
        with wrapped.no_sync():
            for _ in range(count):
                layer(x.unsqueeze(1).clone().requires_grad_())[0].float().sum().backward()
        return [w.main_grad.clone() for w in layer.experts.parameters()]

    one, two = micro_batches(1), micro_batches(2)
    return {
        "dtype": str(one[0].dtype),
        "doubled": all(torch.equal(2 * a, b) for a, b in zip(one, two, strict=True)),
        "nonzero": any(bool((a != 0).any()) for a in one),
        "fired": len(fired),
        "flag": first.grad_added_to_main_grad,
    }


def low_bits() -> list[float]:
    """B36: two micro-batches whose exact gradient of one weight is 256 and 1 add to 257 in fp32."""
    layout(1)
    config = layer_config(bf16=True, moe_router_topk=1, moe_router_pre_softmax=True)
    layer = make_layer(config)
    wrapped = model.wrap([layer], config, bucket_size=None)[0]
    routing = torch.zeros(1, E, dtype=torch.bool)
    routing[0, 0] = True
    layer.router.forward = lambda *_: (routing.float(), routing)
    weight = layer.experts.local_experts[0].linear_fc2.weight
    with torch.no_grad():
        # h = (gate, up) = (100, 1/100): silu(gate) * up is 1 in bf16 arithmetic up to its one rounding
        layer.experts.local_experts[0].linear_fc1.weight.zero_()
        layer.experts.local_experts[0].linear_fc1.weight[:INTERMEDIATE, 0] = 32.0
        layer.experts.local_experts[0].linear_fc1.weight[INTERMEDIATE:, 0] = 1.0 / 32.0
    x = torch.zeros(1, 1, H, dtype=torch.bfloat16)
    x[..., 0] = 1.0
    wrapped.zero_grad_buffer()
    values = []
    with wrapped.no_sync():
        for dy in (256.0, 1.0):
            layer(x)[0].backward(torch.full((1, 1, H), dy, dtype=torch.bfloat16))
            values.append(float(weight.main_grad[0, 0]))
    return values


def parameter_attributes(dispatcher: str) -> dict[str, Any]:
    """B38: names and attributes of every parameter, and Megatron's gradient norm with all gradients 1."""
    layout(2)
    trainer = model.Trainer(dispatcher)
    chunk = trainer.models[0].module
    keep = (
        "allreduce",
        "tensor_model_parallel",
        "partition_dim",
        "partition_stride",
        "sequence_parallel",
        "shared",
    )
    attributes = {
        name: (tuple(p.shape), str(p.dtype), {k: getattr(p, k, None) for k in keep})
        for name, p in chunk.named_parameters()
    }
    for parameter in chunk.parameters():
        parameter.main_grad.fill_(1.0)
    _, norm, _ = trainer.optimizer.step()
    count = sum(p.numel() for p in chunk.parameters())
    experts = sum(p.numel() for n, p in chunk.named_parameters() if ".experts." in n)
    return {"attributes": attributes, "norm": float(norm), "global": count - experts + 2 * experts}


def tied_routes(recompute: dict[str, Any]) -> dict[str, Any]:
    """B39, B40: losses and gradients with logits on a coarse grid, where ties are common."""
    layout(4)
    torch.manual_seed(0)
    trainer = model.Trainer("mok", bf16=True, moe_router_enable_expert_bias=False, **recompute)
    chunk = trainer.models[0].module
    for layer in chunk.decoder.layers:
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            gating = router.gating
            router.gating = lambda hidden, gating=gating: (gating(hidden) * 8).round() / 8
    loss = trainer.gradients()
    return {"loss": loss, "grads": [p.main_grad.clone() for p in chunk.parameters()]}


def compiled() -> dict[str, Any]:
    """B61: the whole layer under torch.compile(fullgraph=True), two token counts other than H.

    The router is replaced: Megatron's own first moves a weight that is on the CPU, which cannot be traced.
    """
    import torch._dynamo
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch._dynamo.utils import counters

    layout(1)
    megatron_mok.configure(megatron_mok.MokConfig(max_tokens=64))
    layer = make_layer(layer_config())
    torch._dynamo.config.disable = False
    os.environ.pop("TORCHDYNAMO_DISABLE", None)
    torch._dynamo.reset()
    counters.clear()
    run(layer, tokens_of(8), *random_routes(8))  # opens the communicator
    results = []
    backend = CompileCounterWithBackend("aot_eager")
    try:
        forward = torch.compile(layer.forward, backend=backend, fullgraph=True, dynamic=True)
        for count in (24, 64):
            x, (probs, routing) = tokens_of(count, seed=count), random_routes(count, seed=count)
            layer.router.forward = lambda *_, p=probs, m=routing: (p, m)
            eager = [x.clone().unsqueeze(1).requires_grad_() for _ in range(2)]
            outs = [layer(eager[0])[0], forward(eager[1])[0]]
            for out in outs:
                out.sum().backward()
            results.append(torch.equal(*outs) and torch.equal(eager[0].grad, eager[1].grad))
    finally:
        torch._dynamo.config.disable = True
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    inside = {str(node.target) for graph in backend.graphs for node in graph.graph.nodes}
    return {
        "equal": results,
        "graphs": counters["stats"]["unique_graphs"],
        "op_inside": "megatron_mok.moe_forward.default" in inside,
    }


def refused(changes: dict[str, Any], ep: int = 4) -> tuple[str, str] | None:
    """What building a configuration raises on this rank."""
    layout(ep)
    assert parallel_state.get_expert_model_parallel_world_size() == ep
    try:
        layer_config(**changes)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


# --- construction


def announce() -> dict[str, Any]:
    """Classes of the layers of both dispatchers, and the lines that were printed."""
    import contextlib
    import io

    layout(4)
    megatron_mok.unregister()
    megatron_mok.register()
    printed = io.StringIO()
    result: dict[str, Any] = {}
    with contextlib.redirect_stdout(printed):
        for name in ("mok", "alltoall", "mok"):
            trainer = model.Trainer(name)
            layer = trainer.models[0].module.decoder.layers[-1].mlp
            result[name] = [type(part).__name__ for part in (layer, layer.experts, layer.token_dispatcher)]
            if name == "mok":
                configs = (layer.config, layer.experts.config, layer.shared_experts.config)
                result["type_kept"] = {c.moe_token_dispatcher_type for c in configs} == {"mok"}
    result["lines"] = [line for line in printed.getvalue().splitlines() if "megatron_mok" in line]
    return result


class _PlainGroupedLinear(torch.nn.Module):
    """The part of a grouped linear layer that the fused experts use: its weights' names."""

    def __init__(self, count: int, in_features: int, out_features: int, **_: Any) -> None:
        super().__init__()
        for i in range(count):
            self.register_parameter(f"weight{i}", torch.nn.Parameter(torch.empty(out_features, in_features)))


def grouped_experts() -> bool:
    """TEGroupedMLP's subclass against SequentialMLP's, same weights and routes."""
    import dataclasses
    import functools

    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP

    from megatron_mok.mcore.layer import MokMoELayer

    layout(4)
    config = layer_config()
    sequential = make_layer(config)
    parts = GroupedMLPSubmodules(
        linear_fc1=_PlainGroupedLinear, linear_fc2=_PlainGroupedLinear, activation_func=None
    )
    submodules = dataclasses.replace(
        sequential.submodules, experts=functools.partial(TEGroupedMLP, submodules=parts)
    )
    grouped = MokMoELayer(config, submodules)
    names = [name for name, _ in grouped.experts.named_parameters()]
    assert names == ["linear_fc1.weight0", "linear_fc1.weight1", "linear_fc2.weight0", "linear_fc2.weight1"]
    with torch.no_grad():
        for i, expert in enumerate(sequential.experts.local_experts):
            grouped.experts.linear_fc1.get_parameter(f"weight{i}").copy_(expert.linear_fc1.weight)
            grouped.experts.linear_fc2.get_parameter(f"weight{i}").copy_(expert.linear_fc2.weight)
    probs, routing = random_routes(16)
    outs = []
    for layer in (sequential, grouped):
        x = tokens_of(16).requires_grad_()
        layer.router.forward = lambda *_: (probs, routing)
        out, _ = layer(x.unsqueeze(1))
        out.sum().backward()
        outs.append((out, x.grad))
    same = torch.equal(outs[0][0], outs[1][0]) and torch.equal(outs[0][1], outs[1][1])
    for i, expert in enumerate(sequential.experts.local_experts):
        same &= torch.equal(
            grouped.experts.linear_fc1.get_parameter(f"weight{i}").grad, expert.linear_fc1.weight.grad
        )
    return same
