"""Starts gloo ranks once and runs many cases in them; the results come back as JSON.

A script calls `main` with its cases, functions of a `Ranks`. The test file calls `run`, which ends every
process at the time limit, whatever they are doing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
CASE_TIMEOUT_S = 30.0  # of a case's process group: what a rank waits for one that failed its case


class Ranks:
    """A case's view: `rank`, `size`, `group` (fresh for each case) and sub-groups."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.group = self.subgroup(range(self.size))

    def subgroup(self, ranks, timeout_s: float = CASE_TIMEOUT_S):
        """Collective over all ranks; a rank that is not in it gets a value that it must not use."""
        return dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))

    def gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        """The value of every rank; shapes may differ."""
        every: list = [None] * self.size
        dist.all_gather_object(every, value.detach())
        return every


def main(cases: dict[str, Callable[[Ranks], None]]) -> None:
    rank, size, store, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    results = {}
    for name, case in cases.items():
        start = time.monotonic()
        error = ""
        ranks = Ranks()
        try:
            case(ranks)
        except Exception:
            error = traceback.format_exc()
        results[name] = {"error": error, "seconds": time.monotonic() - start}
        out.write_text(json.dumps(results))
        dist.barrier()
    dist.destroy_process_group()


def run(script: Path, size: int, folder: Path, timeout_s: float, *arguments: str) -> list[dict[str, dict]]:
    """The results of every rank, as far as each came: {case: {error, seconds}}; `exit` holds the exit
    codes. `arguments` follow main's own.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    outs = [folder / f"rank{r}.json" for r in range(size)]
    logs = [(folder / f"rank{r}.log").open("w") for r in range(size)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(r), str(size), str(folder / "store"), str(outs[r]), *arguments],
            env=environment,
            stdout=logs[r],
            stderr=subprocess.STDOUT,
        )
        for r in range(size)
    ]
    end = time.monotonic() + timeout_s
    try:
        for process in processes:
            process.wait(max(end - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for log in logs:
            log.close()
    return [
        {
            "exit": {"error": "" if process.returncode == 0 else f"exit code {process.returncode}\n" + log},
            **(json.loads(out.read_text()) if out.exists() else {}),
        }
        for process, out, log in zip(
            processes, outs, [(folder / f"rank{r}.log").read_text()[-4000:] for r in range(size)], strict=True
        )
    ]
