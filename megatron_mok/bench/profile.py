"""Runs a training script as megatron_mok.launch does, and says where the GPU's time of a few steps goes.

    torchrun ... -m megatron_mok.bench.profile FILE FIRST LAST SCRIPT ARGUMENTS

Steps FIRST to LAST (counted from 1) run under torch's profiler; rank 0 writes `analyse`'s result to FILE. The
profiler slows the host down: idle time is what it is at most.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
import tempfile
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from megatron_mok import launch

MOE, ATTENTION, OPTIMIZER = "MoE", "attention", "optimizer"
FORWARD, BEGIN, END = "forward", "backward begins", "backward ends"

_OURS = re.compile(r"\bmok::.*?(forward|backward|schedule)_kernel")
_GEMM = re.compile(r"gemm|cutlass|nvjet|xmma|cublas", re.IGNORECASE)
_PERMUTE = re.compile(r"permut|row_id_map|chunks?_(sort|by)|sort_chunk", re.IGNORECASE)
_WAITS = re.compile(r"cu(da)?(Stream|Device|Event|Ctx)Synchronize|cudaMemcpy(_v|$)|cudaMalloc$|cudaFree$")
_ASKS = ("aten::item", "aten::_local_scalar_dense", "aten::nonzero")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
TOP = 25


# --- what is marked while the steps run


def ranged(name: str, forward: Callable) -> Callable:
    """`forward` of a layer, marked in the trace; hooks on its output and its input mark its backward."""

    def mark(what: str) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            with record_function(f"{name} {what}"):  # a point: autograd's own ranges do not nest with ours
                pass

        return hook

    @functools.wraps(forward)
    def marked(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        with record_function(f"{name} {FORWARD}"):
            result = forward(layer, hidden_states, *args, **kwargs)
        out = result[0] if isinstance(result, tuple) else result
        if torch.is_grad_enabled() and out.requires_grad and hidden_states.requires_grad:
            out.register_hook(mark(BEGIN))
            hidden_states.register_hook(mark(END))
        return result

    return marked


def install(file: Path, first: int, last: int) -> None:
    """Mark the layers and profile steps `first` to `last` of this process; rank 0 writes to `file`."""
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
    from megatron.training import training

    MoELayer.forward = ranged(MOE, MoELayer.forward)
    for kind in (Attention, MultiLatentAttention):
        if "forward" in vars(kind):
            kind.forward = ranged(ATTENTION, kind.forward)
    train_step, step = training.train_step, 0
    signature = inspect.signature(train_step)
    profiler = torch.profiler.profile()

    @functools.wraps(train_step)
    def profiled(*args: Any, **kwargs: Any) -> Any:
        nonlocal step
        step += 1
        if step == first:
            optimizer = signature.bind(*args, **kwargs).arguments["optimizer"]
            optimizer.step = record_function(f"{OPTIMIZER} {FORWARD}")(optimizer.step)
            torch.cuda.synchronize()
            profiler.start()
        result = train_step(*args, **kwargs)
        if step == last:
            torch.cuda.synchronize()
            profiler.stop()
            if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
                with tempfile.TemporaryDirectory() as folder:
                    trace = Path(folder) / "trace.json"
                    profiler.export_chrome_trace(str(trace))
                    events = json.loads(trace.read_text(errors="replace"))["traceEvents"]
                file.write_text(json.dumps(analyse(events, last - first + 1), indent=1) + "\n")
        return result

    training.train_step = profiled


# --- what the trace says


class Ranges:
    """Where on the host's threads each layer's forward and backward is."""

    def __init__(self, events: Iterable[dict]) -> None:
        self.spans: dict[Any, list[tuple[float, float, str, str]]] = defaultdict(list)
        begun: dict[tuple[Any, str], float] = {}
        names = (MOE, ATTENTION, OPTIMIZER)
        for event in sorted(events, key=lambda event: event.get("ts", 0)):
            name, _, what = event.get("name", "").partition(" ")
            if event.get("cat") != "user_annotation" or name not in names:
                continue
            thread, at = event["tid"], event["ts"]
            if what == FORWARD:
                self.spans[thread].append((at, at + event["dur"], name, FORWARD))
            elif what == BEGIN:
                begun[thread, name] = at
            elif what == END and (thread, name) in begun:
                self.spans[thread].append((begun.pop((thread, name)), at, name, "backward"))
        for spans in self.spans.values():
            spans.sort()

    def at(self, thread: Any, time: float) -> tuple[str, str]:
        """(layer, pass) that the thread is in; empty strings outside. A thread's spans do not overlap."""
        spans = self.spans.get(thread, [])
        here = bisect_right(spans, time, key=lambda span: span[0]) - 1
        if here >= 0 and time <= spans[here][1]:
            return spans[here][2:]
        return "", ""


def group_of(kernel: str, layer: str) -> str:
    """The group that a kernel counts to, by its name and by the layer that launched it."""
    if ours := _OURS.search(kernel):
        return f"mok {ours[1]}"
    if "nccl" in kernel.lower():
        return "communication"
    if layer == MOE:
        if _PERMUTE.search(kernel):
            return "MoE permute"
        return "MoE GEMM" if _GEMM.search(kernel) else "MoE other"
    return layer or "other"


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def analyse(events: list[dict], steps: int) -> dict[str, Any]:
    """Milliseconds and counts a step, of a chrome trace of `steps` training steps.

        step_ms         from the first kernel's start to the last one's end
        idle_fraction   of that, the part in which no kernel and no copy ran
        groups_ms       kernels and copies by group; those that run side by side count both
        moe             forward_ms and backward_ms of what MoE layers launch, and its share of step_ms
        waits           host waits by name, inside MoE layers and elsewhere: calls, and milliseconds in them
        kernels         the TOP by time: name, group, ms, calls

    RuntimeError where the trace has no GPU activity.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    ranges = Ranges(spans)
    launches = {
        event["args"]["correlation"]: (event["tid"], event["ts"])
        for event in spans
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    on_gpu = [event for event in spans if event.get("cat") in _ON_GPU]
    if not on_gpu:
        raise RuntimeError("the trace has no GPU activity: CUPTI is not there, or may not be used")
    scale = 1e-3 / steps
    groups: Counter[str] = Counter()
    passes: Counter[str] = Counter()
    kernels: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in on_gpu:
        layer, direction = ranges.at(*launches.get(event.get("args", {}).get("correlation"), (None, 0.0)))
        group = group_of(event["name"], layer)
        if group.startswith("mok"):  # launched by a library that the profiler may not have followed
            layer, direction = MOE, "backward" if group == "mok backward" else FORWARD
        groups[group] += event["dur"]
        kernels[event["name"], group].append(event["dur"])
        if layer == MOE:
            passes[direction] += event["dur"]
    start = min(event["ts"] for event in on_gpu)
    window = max(event["ts"] + event["dur"] for event in on_gpu) - start
    at_work = busy((event["ts"], event["ts"] + event["dur"]) for event in on_gpu)
    waits: dict[str, dict[str, list[float]]] = {"inside": defaultdict(list), "elsewhere": defaultdict(list)}
    for event in spans:
        name = event.get("name", "")
        runtime = event.get("cat") in ("cuda_runtime", "cuda_driver") and _WAITS.match(name)
        if runtime or (event.get("cat") == "cpu_op" and name in _ASKS):
            inside = ranges.at(event["tid"], event["ts"])[0] == MOE
            waits["inside" if inside else "elsewhere"][name].append(event["dur"])
    top = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:TOP]
    return {
        "steps": steps,
        "step_ms": window * scale,
        "idle_fraction": 1 - at_work / window,
        "groups_ms": {name: time * scale for name, time in groups.most_common()},
        "moe": {
            "forward_ms": passes[FORWARD] * scale,
            "backward_ms": passes["backward"] * scale,
            "share": sum(passes.values()) / window,
        },
        "waits": {
            where: {name: [len(times) / steps, sum(times) * scale] for name, times in found.items()}
            for where, found in waits.items()
        },
        "kernels": [
            {"name": name[:160], "group": group, "ms": sum(times) * scale, "calls": len(times) / steps}
            for (name, group), times in top
        ],
    }


if __name__ == "__main__":
    install(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    launch.main(sys.argv[4:])
