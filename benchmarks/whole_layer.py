"""Megatron-Core's whole MoE layer on one GPU, router to combine: mok against alltoall, in turns.

    python benchmarks/whole_layer.py --shape A B C D --json benchmarks/results/h200-whole-layer.json

alltoall runs TEGroupedMLP with fused permutation; mok runs in the same specification, on the same
weights, input and routes (the router's own choice, as it is initialised). Expert weights have an fp32
main_grad, and what autograd leaves in .grad is added to it as Megatron's DDP does. Output, input gradient
and every main_grad of both sides must agree before anything is timed. `--experts sequential` is
Megatron's own path without Transformer Engine (SequentialMLP, local specification).

A record a shape and side: milliseconds of forward and of the whole step (medians; the rounds alternate),
and from torch's allocator the bytes that the forward leaves for the backward, those that the layer keeps
between steps (mok's workspace), and the peak of a step with these. Exit code 1 where the sides disagree.
Without a GPU it runs on the CPU back end, on host time: a dry run.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# Before CUDA starts. Transformer Engine runs grouped GEMMs on several streams; with one queue they would wait
# for each other, as Megatron asks for under tensor parallelism only.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import megatron_mok  # noqa: E402
from megatron_mok.bench.cases import Shape  # noqa: E402
from megatron_mok.bench.layer import CudaClock, Dense, HostClock, relative_error  # noqa: E402
from megatron_mok.cli.ab import facts  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SIDES = ("alltoall", "mok")
ROUNDS, WARMUP = 3, 10
# Relative distance of two bf16 computations that round in other places; each is within half of it of fp64.
LIMIT = 2e-2
# Step of alltoall with TEGroupedMLP over that of mok, at least; its saved bytes twice those of mok, at least.
TARGETS, SAVED_TARGET = {"A": 4.5, "B": 1.8, "C": 1.25, "D": 1.25}, 2


def start() -> None:
    """Megatron's process groups for one rank, and mok in Megatron."""
    if not GPU:
        from megatron_mok.testing import cpu

        cpu.install()
    dist.init_process_group("nccl" if GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    megatron_mok.register()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)


def build(shape: Shape, side: str, experts: str) -> torch.nn.Module:
    """Megatron's MoE layer of these sizes, bf16, with that dispatcher."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    te = experts == "te"
    config = TransformerConfig(
        num_layers=1,
        hidden_size=shape.H,
        num_attention_heads=1,
        ffn_hidden_size=shape.I,
        moe_ffn_hidden_size=shape.I,
        num_moe_experts=shape.E,
        moe_router_topk=shape.K,
        moe_router_dtype="fp32",
        moe_router_pre_softmax=shape.K == 1,  # or the only probability would be 1
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type=side,
        moe_grouped_gemm=te,
        moe_permute_fusion=te and side == "alltoall",
        gradient_accumulation_fusion=te,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=GPU,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=not GPU,
    )
    made = get_moe_module_spec(use_te=te, num_experts=shape.E, moe_grouped_gemm=te)
    layer: torch.nn.Module = made(config=config).to(DEVICE)
    layer.set_layer_number(1)
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
    return layer.train()


class Side:
    """One layer under measurement."""

    def __init__(self, name: str, layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor):
        self.name, self.layer, self.dy = name, layer, dy
        self.x = x.clone().requires_grad_()
        self.times: dict[str, list[float]] = {"fwd": [], "step": []}
        self.kept_bytes = 0
        self.dense: list[float] = []

    def forward(self) -> torch.Tensor:
        out: torch.Tensor = self.layer(self.x)[0]
        return out

    def step(self) -> torch.Tensor:
        """Forward, backward, and Megatron's hook of every parameter. The output."""
        self.x.grad = None
        out = self.forward()
        out.backward(self.dy)
        for parameter in self.layer.parameters():
            if parameter.grad is not None and not parameter.grad_added_to_main_grad:
                parameter.main_grad.add_(parameter.grad)
            parameter.grad = None
        return out

    def time(self, reps: int, warmup: int, clock: Any, dense: Dense) -> None:
        dense.tflops()
        self.dense.append(dense.tflops())
        for name, call in (("fwd", self.forward), ("step", self.step)):
            clock.times(call, warmup)
            self.times[name] += clock.times(call, reps)
        self.dense.append(dense.tflops())

    def warm_up(self) -> torch.Tensor:
        """Two steps, the second of which adds to the first one's gradients; the second's output.

        What the layer still holds afterwards, mok's workspace for instance, is `kept_bytes`.
        """
        before = torch.cuda.memory_allocated() if GPU else 0
        self.step()
        out = self.step().detach()
        if GPU:
            torch.cuda.synchronize()
            new = out.untyped_storage().nbytes() + self.x.nbytes  # and x.grad
            self.kept_bytes = torch.cuda.memory_allocated() - before - new
        return out

    def memory(self) -> dict[str, int]:
        """{saved_bytes, peak_bytes, kept_bytes} of a step, empty without a GPU."""
        if not GPU:
            return {}
        self.step()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = self.forward()
        saved = torch.cuda.memory_allocated() - before - out.untyped_storage().nbytes()
        del out
        torch.cuda.reset_peak_memory_stats()
        self.step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before + self.kept_bytes
        return {"saved_bytes": saved, "peak_bytes": peak, "kept_bytes": self.kept_bytes}

    def record(self) -> dict[str, Any]:
        fwd, step = (statistics.median(self.times[name]) for name in ("fwd", "step"))
        return {
            "side": self.name,
            "experts": type(self.layer.experts).__name__,
            "fwd_ms": round(fwd, 4),
            "step_ms": round(step, 4),
            "dense_tflops": round(statistics.mean(self.dense), 1),
            **self.memory(),
        }


def distances(one: Side, other: Side) -> dict[str, float]:
    """Relative distance of all that two steps give, `other`'s as the measure."""
    outs = [side.warm_up() for side in (one, other)]
    found = {"out": relative_error(*outs), "dx": relative_error(one.x.grad, other.x.grad)}
    theirs = dict(other.layer.named_parameters())
    for name, parameter in one.layer.named_parameters():
        found[name] = relative_error(parameter.main_grad, theirs[name].main_grad)
    return found


def measure(shape: Shape, experts: str, reps: int, clock: Any, dense: Dense) -> tuple[list[dict], list[str]]:
    """(a record a side, what is wrong)."""
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    x, dy = (
        torch.randn(shape.T, 1, shape.H, device=DEVICE, generator=generator).bfloat16() for _ in range(2)
    )
    sides = {name: Side(name, build(shape, name, experts), x, dy) for name in SIDES}
    theirs = dict(sides["alltoall"].layer.named_parameters())
    with torch.no_grad():
        for name, parameter in sides["mok"].layer.named_parameters():
            parameter.copy_(theirs[name])
    found = distances(sides["mok"], sides["alltoall"])
    wrong = {name: distance for name, distance in found.items() if not distance <= LIMIT}
    if wrong:
        return [], [f"{shape.label}: {name}: {d:.3g}, need <= {LIMIT}" for name, d in wrong.items()]
    rounds = min(ROUNDS, reps)
    for turn in range(rounds):
        for side in sides.values():
            side.time(-(-reps // rounds), WARMUP if turn == 0 else min(WARMUP, 3), clock, dense)
    records = [side.record() for side in sides.values()]
    ours, baseline = records[SIDES.index("mok")], records[SIDES.index("alltoall")]
    for key in ("fwd_ms", "step_ms", "saved_bytes", "peak_bytes"):
        if key in ours:
            ours[f"alltoall_over_mok_{key}"] = round(baseline[key] / ours[key], 3)
    ours["largest_distance"] = max(found.values())
    return [{"shape": asdict(shape), **record} for record in records], []


def table(records: list[dict[str, Any]], experts: str) -> str:
    lines = []
    for r in records:
        size = Shape(**r["shape"])
        line = f"{size.label:<34} {r['side']:<9} fwd {r['fwd_ms']:8.3f}  step {r['step_ms']:8.3f} ms"
        if "saved_bytes" in r:
            saved, kept, peak = (r[f"{name}_bytes"] / 2**20 for name in ("saved", "kept", "peak"))
            line += f"  saved {saved:6.0f}  kept {kept:6.0f}  peak {peak:6.0f} MiB"
        if r["side"] == "mok":
            wanted = TARGETS.get(size.label.partition(":")[0]) if experts == "te" else None
            line += f"  step {r['alltoall_over_mok_step_ms']:.2f}x"
            line += f" (target {wanted})" if wanted else ""
            if "saved_bytes" in r:
                line += f"  saved {r['alltoall_over_mok_saved_bytes']:.2f}x"
                line += f" (target {SAVED_TARGET})" if wanted else ""
        lines.append(line)
    return "\n".join(lines)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shape", nargs="+", default=["C"], metavar="S", help="A B C D or T,H,I,E,K (C)")
    p.add_argument("--experts", choices=("te", "sequential"), default="te", help="of alltoall (te)")
    p.add_argument("--reps", type=int, default=30, help="timed calls of each pass (30)")
    p.add_argument("--commit", help="for the records; default: git's HEAD")
    p.add_argument("--json", type=Path, metavar="F", help="write {facts, records} there")
    args = p.parse_args()
    try:
        shapes = [Shape.parse(text) for text in args.shape]
        if args.reps < 1:
            raise ValueError(f"--reps: got {args.reps}, need at least 1")
        if importlib.util.find_spec("megatron") is None:
            raise ValueError("megatron.core: not installed; it is what is measured")
    except ValueError as error:
        p.error(str(error))
    if args.experts == "te":
        try:
            import transformer_engine.pytorch  # noqa: F401  before Megatron-Core looks for it
        except Exception as error:  # its library says what it lacks in several ways
            p.error(f"--experts te: {error}; need Transformer Engine, or say --experts sequential")
    start()
    clock = CudaClock() if GPU else HostClock()
    dense = Dense(clock, DEVICE) if GPU else Dense(clock, DEVICE, 256)
    dense.tflops()  # cuBLAS's workspace is nobody's
    made: dict[str, Any] = {
        "facts": facts([sys.executable, *sys.argv], args.commit),
        "connections": os.environ["CUDA_DEVICE_MAX_CONNECTIONS"],
        "experts": args.experts,
        "records": [],
        "troubles": [],
    }
    troubles = made["troubles"]
    for shape in shapes:
        print(f"{shape.label} ...", flush=True)
        records, wrong = measure(shape, args.experts, args.reps, clock, dense)
        made["records"] += records
        troubles += wrong
        if args.json:  # shape by shape: what is measured stays
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(made, indent=1) + "\n")
        megatron_mok.release()
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()
    for line in troubles:
        print(f"TROUBLE {line}")
    print(table(made["records"], args.experts))
    dist.destroy_process_group()
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
