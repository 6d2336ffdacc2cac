"""Gloo ranks that train a step and then end in the way that is asked for (see test_ends)."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


@atexit.register  # before megatron_mok is imported, so that it runs after what that registers
def say_threads() -> None:
    names = [Path(f"/proc/self/task/{t}/comm").read_text().strip() for t in os.listdir("/proc/self/task")]
    print("threads at the end:", *names, flush=True)


from megatron_mok import errors, runtime
from megatron_mok.config import MokConfig
from megatron_mok.reference.exchange import Exchange
from tests.oracle import problem


def end(way: str, rank: int, step) -> None:
    step()
    if way == "exception on one rank":
        if rank == 1:
            raise OSError("no data left")
        step()  # without rank 1
    elif way == "destroy":
        runtime.release()
        dist.destroy_process_group()
        runtime.release()
    elif way == "collect on one rank":
        if rank == 0:
            runtime.comm._comms.clear()
            gc.collect()
        dist.barrier()  # what is freed on one rank has taken nothing from the other
        dist.destroy_process_group()
    else:
        assert way == "return"


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(rank: int, step) -> None:
    """Rank 2 is killed between two steps of three ranks, then rank 1 inside one of the two that are left."""
    groups = [dist.new_group([0, 1, 2]), dist.new_group([0, 1])]
    for victim, group in zip((2, 1), groups, strict=True):
        step(group)
        if rank == victim == 2:
            die()
        if rank == victim:
            Exchange.pull = die  # type: ignore[method-assign]  # it has published the call, and its routes
        start = time.monotonic()
        try:
            step(group)
        except errors.MokError as error:
            print(f"{time.monotonic() - start:.1f} s, {type(error).__name__}: {error}", flush=True)
        runtime.release()
    print("ended", flush=True)
    dist.destroy_process_group()


def main() -> None:
    rank, size, store, way = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[5]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=30)
    )
    q = problem(tokens=8, experts=12, top_k=2)

    def step(group=dist.group.WORLD) -> None:
        local = 12 // dist.get_world_size(group)
        comm = runtime.get_comm(
            group, hidden=q.x.shape[1], top_k=2, num_experts=12, max_tokens=8, device="cpu",
            dtype=q.x.dtype, config=MokConfig(timeout_s=20.0),
        )  # fmt: skip
        w1, w2 = (list(w[local * rank : local * (rank + 1)].clone().requires_grad_()) for w in (q.w1, q.w2))
        runtime.moe(q.x, q.ids, q.p, w1, w2, comm=comm, num_experts=12).backward(q.dy)

    if way == "killed":
        killed(rank, step)
        return
    end(way, rank, step)
    print("ended", flush=True)


if __name__ == "__main__":
    main()
