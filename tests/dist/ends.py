"""Two gloo ranks that train a step and then end in the way that is asked for (see test_ends)."""

from __future__ import annotations

import gc
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_mok import runtime
from megatron_mok.config import MokConfig
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


def main() -> None:
    rank, size, store, way = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[5]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=30)
    )
    q = problem(tokens=8, experts=4, top_k=2)
    w1, w2 = (list(w[2 * rank : 2 * rank + 2].clone().requires_grad_()) for w in (q.w1, q.w2))

    def step() -> None:
        comm = runtime.get_comm(
            dist.group.WORLD, hidden=q.x.shape[1], top_k=2, num_experts=4, max_tokens=8, device="cpu",
            dtype=q.x.dtype, config=MokConfig(timeout_s=20.0),
        )  # fmt: skip
        runtime.moe(q.x, q.ids, q.p, w1, w2, comm=comm, num_experts=4).backward(q.dy)

    end(way, rank, step)
    print("ended", flush=True)


if __name__ == "__main__":
    main()
