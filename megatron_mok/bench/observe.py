"""Runs a training script as megatron_mok.launch does, and writes what its MoE layers take.

    torchrun ... -m megatron_mok.bench.observe FILE SCRIPT ARGUMENTS

The last rank appends a JSON line to FILE after each training step: step (counted from 1), moe_ms (forward and
backward of every MoE layer and micro-batch, router to combine) and peak_memory_bytes (None without a GPU).
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_mok import launch


def mark(like: Tensor) -> Any:
    """Now, on the stream that computes `like`: a CUDA event, or the host's clock in ms for a CPU tensor."""
    if not like.is_cuda:
        return time.perf_counter() * 1e3
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between_ms(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end)


class MoeClock:
    """Time spans of MoE layers since the last `take`."""

    def __init__(self) -> None:
        self.spans: list[tuple[Any, Any]] = []
        self.cuda = False

    def around(self, forward: Callable) -> Callable:
        """`forward` of an MoE layer, timed; its backward is timed by hooks on its output and its input."""

        @functools.wraps(forward)
        def timed(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if hidden_states.is_cuda and torch.cuda.is_current_stream_capturing():
                return forward(layer, hidden_states, *args, **kwargs)
            self.cuda = hidden_states.is_cuda
            start = mark(hidden_states)
            result = forward(layer, hidden_states, *args, **kwargs)
            self.spans.append((start, mark(hidden_states)))
            out = result[0] if isinstance(result, tuple) else result
            if torch.is_grad_enabled() and out.requires_grad and hidden_states.requires_grad:
                started: list[Any] = []

                def begin(grad: Tensor) -> None:
                    started.append(mark(grad))

                def end(grad: Tensor) -> None:
                    if started:
                        self.spans.append((started.pop(), mark(grad)))

                out.register_hook(begin)
                hidden_states.register_hook(end)
            return result

        return timed

    def take(self) -> float:
        """Milliseconds of the spans so far, which are forgotten."""
        total = sum(between_ms(start, end) for start, end in self.spans)
        self.spans.clear()
        return total


def install(file: Path) -> None:
    """Watch every MoE layer and training step of this process; the last rank writes to `file`."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.training import training
    from megatron.training.utils import is_last_rank

    clock = MoeClock()
    MoELayer.forward = clock.around(MoELayer.forward)
    train_step, step = training.train_step, 0

    @functools.wraps(train_step)
    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal step
        result = train_step(*args, **kwargs)
        step += 1
        moe_ms = clock.take()
        peak = torch.cuda.max_memory_allocated() if clock.cuda else None
        if is_last_rank():
            with file.open("a") as out:
                out.write(json.dumps({"step": step, "moe_ms": moe_ms, "peak_memory_bytes": peak}) + "\n")
        return result

    training.train_step = watched


if __name__ == "__main__":
    install(Path(sys.argv[1]))
    launch.main(sys.argv[2:])
