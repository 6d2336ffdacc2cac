"""The process of test_megatron_te: our experts on Transformer Engine's grouped linear layers.

    python -m tests.gpu.megatron_te RESULT_FILE

One rank. Every case is a function; its result, or its traceback, goes to RESULT_FILE. On a machine without
a GPU (Transformer Engine imports there) the cases with local attention run on te_on_cpu's stand-ins.

Legend: S sequence length, B batch, H hidden size, I expert intermediate size, E experts.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GPU = torch.cuda.is_available()
import transformer_engine.pytorch  # noqa: E402  before Megatron-Core looks for it

if not GPU:  # its optimizers have kernels: Megatron-Core then takes torch's
    sys.modules["transformer_engine.pytorch.optimizers"] = None  # type: ignore[assignment]
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "without_apex"))

import megatron_mok  # noqa: E402
from megatron_mok import MokConfig, runtime  # noqa: E402
from tests.mcore import model  # noqa: E402

from megatron.core.models.gpt import moe_module_specs  # noqa: E402  isort: skip
from megatron.core.transformer.enums import AttnBackend  # noqa: E402  isort: skip
from megatron.core.transformer.moe import moe_utils  # noqa: E402  isort: skip
from megatron.core.transformer.moe.experts import TEGroupedMLP  # noqa: E402  isort: skip

from examples.attention import serve_mla  # noqa: E402  isort: skip
from megatron_mok.mcore.experts import MokTEGroupedMLP  # noqa: E402  isort: skip

STEPS, LENGTH = (8, 256) if GPU else (2, 16)
SIZES: dict[str, Any] = dict(
    bf16=True,
    hidden_size=256 if GPU else 128,
    ffn_hidden_size=256,
    moe_ffn_hidden_size=128,
    moe_grouped_gemm=True,
    moe_shared_expert_intermediate_size=128 if GPU else None,
    attention_backend=AttnBackend.unfused,
)
stock_spec = model.get_gpt_decoder_block_spec


def whole_te(config: Any, use_transformer_engine: bool = True, **options: Any) -> Any:
    """Megatron's transformer_engine implementation."""
    return stock_spec(config, use_transformer_engine=True, **options)


def te_sdpa(config: Any, **options: Any) -> Any:
    """The same with torch's attention, as benchmarks/h200_train_ab.sh has it."""
    block = whole_te(config, **options)
    assert serve_mla(config, block, always=True)
    return block


def te_experts(config: Any, use_transformer_engine: bool = False, **options: Any) -> Any:
    """The local implementation with TEGroupedMLP in its MoE layers."""
    block = stock_spec(config, use_transformer_engine=False, **options)
    builder = moe_module_specs.get_moe_module_spec(
        use_te=True, num_experts=config.num_moe_experts, moe_grouped_gemm=True
    )
    for layer in block.layer_specs:
        mlp = layer.submodules.mlp
        if isinstance(mlp, partial) and mlp.func is builder.func:
            layer.submodules.mlp = builder
    return block


def trainer(dispatcher: str, spec: Callable, **options: Any) -> model.Trainer:
    model.get_gpt_decoder_block_spec = spec
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)  # each model's own configuration says which
    made = model.Trainer(dispatcher, **dict(micro_batches=2) | SIZES | options)
    for batches in made.batches:
        batches.length = LENGTH
    return made


def configure(**changes: Any) -> None:
    runtime.release()
    megatron_mok.configure(MokConfig(**dict(timeout_s=60.0) | changes))


def experts(made: model.Trainer) -> list[torch.nn.Module]:
    return [m for m in made.models[0].modules() if isinstance(m, TEGroupedMLP)]


def train(
    dispatcher: str, spec: Callable, steps: int = STEPS, mok: dict | None = None, **options: Any
) -> dict[str, Any]:
    """{losses, norms, experts: the class of each MoE layer's, memory: bytes allocated after each step}."""
    configure(**(mok or {}))
    made = trainer(dispatcher, spec, **options)
    pairs, memory = [], []
    for _ in range(steps):
        pairs.append(made.step())
        memory.append(torch.cuda.memory_allocated())
    return {
        "losses": [loss for loss, _ in pairs],
        "norms": [norm for _, norm in pairs],
        "experts": sorted({type(module).__name__ for module in experts(made)}),
        "memory": memory,
    }


def gradients(spec: Callable, **options: Any) -> dict[str, Any]:
    """Relative error, by name, of main_grad of all parameters after two micro-batches, and who added it."""
    configure()
    ours, theirs = (trainer(dispatcher, spec, **options) for dispatcher in ("mok", "alltoall"))
    losses = [ours.gradients(), theirs.gradients()]
    errors = {}
    reference = dict(theirs.models[0].named_parameters())
    for name, parameter in ours.models[0].named_parameters():
        expected = reference[name].main_grad.double()
        distance = (parameter.main_grad.double() - expected).norm()
        errors[name] = float(distance / expected.norm().clamp_min(1e-30))
    weights = [
        weight
        for module in experts(ours)
        for linear in (module.linear_fc1, module.linear_fc2)
        for weight in linear.parameters()
    ]
    return {
        "losses": losses,
        "errors": errors,
        "same_names": list(reference) == [name for name, _ in ours.models[0].named_parameters()],
        "same_state": sorted(ours.models[0].state_dict()) == sorted(theirs.models[0].state_dict()),
        "same_sharded": sorted(ours.models[0].module.sharded_state_dict())
        == sorted(theirs.models[0].module.sharded_state_dict()),
        "added": all(weight.grad_added_to_main_grad for weight in weights),
        "weights": len(weights),
        "names": sorted(name for name, _ in experts(ours)[0].named_parameters()),
    }


def layer(parts: tuple[str, ...] = ("linear_fc",), **options: Any) -> dict[str, float]:
    """One MoE layer without DDP: relative errors of the output and of autograd's gradients of x and of every
    parameter with one of `parts` in its name."""
    configure()
    ours, theirs = (trainer(dispatcher, te_experts, **options) for dispatcher in ("mok", "alltoall"))
    layers = [made.models[0].module.decoder.layers[-1].mlp for made in (ours, theirs)]
    generator = torch.Generator().manual_seed(3)
    x, dy = (
        torch.randn(LENGTH, 2, SIZES["hidden_size"], generator=generator).to(model.DEVICE, torch.bfloat16)
        for _ in range(2)
    )
    results = []
    for moe in layers:
        for parameter in moe.parameters():  # as without Megatron's DDP
            del parameter.main_grad, parameter.grad_added_to_main_grad
        leaf = x.clone().requires_grad_()
        out, _ = moe(leaf)
        wanted = {name: p for name, p in moe.named_parameters() if any(part in name for part in parts)}
        results.append([out, *torch.autograd.grad(out, [leaf, *wanted.values()], dy)])
    names = ["out", "dx", *wanted]
    return {
        name: float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))
        for name, a, b in zip(names, *results, strict=True)
    }


def router_fusion() -> dict[str, Any]:
    """A layer behind Transformer Engine's fused router: errors as of `layer`, the router's weight included,
    and what the router handed to either dispatcher."""
    fused, seen = moe_utils.fused_topk_with_score_function, []

    def observed(*args: Any, **kwargs: Any) -> Any:
        probs, routing = fused(*args, **kwargs)
        seen.append([[str(t.dtype), list(t.shape)] for t in (probs, routing)] + [int(routing.sum())])
        return probs, routing

    moe_utils.fused_topk_with_score_function = observed
    try:
        errors = layer(("linear_fc", "router.weight"), moe_router_fusion=True)
    finally:
        moe_utils.fused_topk_with_score_function = fused
    return {"errors": errors, "seen": seen}


def loaded() -> list[float]:
    """A mok model that has run takes an alltoall model's trained weights.

    Losses on a batch that the latter has seen: mok's before and after, alltoall's.
    """
    configure()
    source, target = trainer("alltoall", te_experts), trainer("mok", te_experts, seed=2)
    source.steps(STEPS)
    target.step()
    batches = model.Batches()
    batches.length = LENGTH
    batch = next(batches)
    before = evaluate(target, batch)
    target.models[0].load_state_dict(source.models[0].state_dict())
    return [before, evaluate(target, batch), evaluate(source, batch)]


def evaluate(made: model.Trainer, batch: dict[str, torch.Tensor]) -> float:
    chunk = made.models[0].eval()
    with torch.no_grad():
        positions = torch.arange(batch["tokens"].shape[1], device=model.DEVICE).expand_as(batch["tokens"])
        return float(chunk(batch["tokens"], positions, None, labels=batch["labels"]).float().mean())


def fused_attention() -> dict[str, Any]:
    """cuDNN's attention through Transformer Engine: nothing of ours, but benchmarks want to know."""
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

    dot_product_attention._attention_backends["backend_selection_requires_update"] = True
    return train("alltoall", whole_te, steps=2, attention_backend=AttnBackend.fused)


def cases() -> dict[str, Callable[[], Any]]:
    """The likeliest to end the process come last."""
    fused = dict(gradient_accumulation_fusion=True)
    sharded = dict(overlap_grad_reduce=True, use_distributed_optimizer=True, overlap_param_gather=True)
    made: dict[str, Callable[[], Any]] = {
        "gradients": partial(gradients, te_experts, **fused),
        "layer": layer,  # not first: Megatron's aux losses take the shape of their scale from a schedule
        "loaded": loaded,
    }
    variants: dict[str, tuple[Callable, dict[str, Any]]] = {
        "experts": (te_experts, {}),
        "experts, fused": (te_experts, fused),
        "experts, overlap_param_gather": (te_experts, dict(ddp=sharded) | fused),
    }
    if GPU:
        variants |= {
            "experts, router fusion": (te_experts, dict(moe_router_fusion=True)),
            "whole": (whole_te, {}),
            "whole, fused": (whole_te, fused),
            "whole, sdpa": (te_sdpa, dict(moe_permute_fusion=True) | fused),
            "whole, recompute moe": (
                whole_te,
                dict(recompute_granularity="selective", recompute_modules=["moe"]),
            ),
        }
    for name, (spec, options) in variants.items():
        for dispatcher in ("mok", "alltoall"):
            made[f"{name}, {dispatcher}"] = partial(train, dispatcher, spec, **options)
    made["main_grad on"] = partial(train, "mok", te_experts, mok=dict(main_grad="on"), **fused)
    if GPU:
        made["router fusion"] = router_fusion
        made["whole, gradients"] = partial(gradients, whole_te, **fused)
        made["fused attention"] = fused_attention
    return made


def main() -> None:
    file = Path(sys.argv[1])
    results: dict[str, Any] = {"seconds": {}, "te": transformer_engine.__version__}
    if GPU:
        torch.cuda.set_device(0)
    else:
        from tests.gpu import te_on_cpu

        te_on_cpu.install()
    dist.init_process_group(
        "nccl" if GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=90)
    )
    model.layout(1)
    for name, case in cases().items():
        began = time.monotonic()
        try:
            results[name] = case()
        except Exception:
            results[name] = traceback.format_exc()
        results["seconds"][name] = time.monotonic() - began
        file.write_text(json.dumps(results))
        gc.collect()
    runtime.release()
    model.leave()
    results["ended"] = True
    file.write_text(json.dumps(results))


if __name__ == "__main__":
    assert issubclass(MokTEGroupedMLP, TEGroupedMLP)
    main()
