"""One MoE layer over several GPUs, one process each: mok beside torch's all-to-all with grouped_mm and peers.

    torchrun --nproc-per-node 8 -m megatron_mok.bench.distributed --shape A B --json F
    torchrun --nproc-per-node 8 -m megatron_mok.bench.distributed --bandwidth --json F

Every rank brings T tokens and holds E/R experts. Times are the slowest rank's of each call. Routing `local`
sends every token to experts of its own rank, in the same numbers: what that saves is communication that did
not hide. --bandwidth times layers with so little arithmetic that transfers bound them, for sizes of messages
and numbers of SMs whose spare warps move rows (comm_sms), beside torch's all-to-all of the same rows: whole
passes, never dispatch or combine alone, which are parts of one kernel. A peer that cannot take part is
named with the reason. Without a GPU everything runs on the CPU back end over gloo, to see that it works.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from megatron_mok import env, runtime
from megatron_mok.bench.across import PEERS, ROUTINGS, AllToAll, MokAcross, absent, open_comm, rank_inputs
from megatron_mok.bench.cases import PASSES, Shape
from megatron_mok.bench.implementations import Implementation
from megatron_mok.bench.layer import Clock, CudaClock, Dense, HostClock, append, relative_error, table
from megatron_mok.bench.telemetry import open_nvml
from megatron_mok.config import MokConfig

TRANSFERS = {"fwd_nograd": 2, "fwd": 2, "bwd": 3, "bwd_acc32": 3}  # x, y; x, dy, dx
LIMIT = 2e-2  # relative difference of two bf16 implementations
GROUP_TIMEOUT = datetime.timedelta(seconds=60)  # a rank that fails alone ends the others
# --bandwidth: I is the least that the kernels take, K = 1 so that a row is a token, L experts a rank.
INTERMEDIATE, LOCAL_EXPERTS = 128, 4


def remote_bytes(shape: Shape, ranks: int, which: str) -> int:
    """Bytes that one rank receives from others in a pass, with balanced routing."""
    return TRANSFERS[which] * shape.rows * shape.H * 2 * (ranks - 1) // ranks


def largest(values: list[float]) -> list[float]:
    """The largest over the ranks, one by one."""
    each = torch.tensor(values, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(each, dist.ReduceOp.MAX)
    return each.tolist()


def difference(one: Implementation, other: Implementation) -> float:
    """The largest relative difference, over the ranks, of an output or gradient of two implementations."""
    outs = [each.fwd().detach() for each in (one, other)]
    worst = relative_error(outs[1], outs[0])
    for a, b in zip(one.step(), other.step(), strict=True):
        worst = max(worst, relative_error(b, a))
    return largest([worst])[0]


class Bench:
    """What all measurements of a run share. `facts` {commit, gpu, driver, cuda, torch} go into every record.

    Records are appended to `json`, if given, as they are made.
    """

    def __init__(self, facts: dict[str, Any], device: str, config: MokConfig, reps: int, json: Path | None):
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.facts, self.device, self.config = facts, device, config
        self.reps, self.json = reps, json
        self.clock: Clock = CudaClock() if device == "cuda" else HostClock()
        self.dense = Dense(self.clock, device) if device == "cuda" else Dense(self.clock, device, size=256)
        # Without NCCL there is nothing to compare with on GPUs.
        self.baseline = dist.get_backend() == "nccl" or device == "cpu"
        self.made: list[dict[str, Any]] = []

    def add(self, records: list[dict[str, Any]]) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        records = [{**self.facts, "date": now, "ranks": self.ranks, **r} for r in records]
        self.made += records
        if self.json and self.rank == 0:
            append(self.json, records)

    def times(self, call: Callable[[], object], warmup: int, reps: int) -> list[float]:
        self.clock.times(call, warmup if self.device == "cuda" else 1)
        dist.barrier()
        return self.clock.times(call, reps)

    def layer(
        self, shape: Shape, routing: str, passes: Sequence[str], peers: Sequence[str], seed: int = 0
    ) -> None:
        """Every way on one layer, in turns; with local routing mok alone. Records are as in bench.layer, with
        the GB/s that a rank receives from others over the whole pass.

        RuntimeError on all ranks where mok and alltoall disagree. A peer that fails or disagrees is left out.
        """
        torch._dynamo.reset()  # shapes are static: another case must not count as a recompilation
        inputs = rank_inputs(shape, routing, self.rank, self.ranks, self.device, seed)
        comm = open_comm(shape, inputs.x.device, inputs.x.dtype, self.config)
        mok = MokAcross(inputs, comm)
        ways: list[Implementation] = [mok]
        if self.baseline and routing != "local":  # that one is there for what mok hides
            yardstick = AllToAll(inputs)
            if not (found := difference(yardstick, mok)) <= LIMIT:
                raise RuntimeError(
                    f"{shape.label}, {routing}: mok and alltoall differ by {found:.3g}, need {LIMIT}"
                )
            ways = [yardstick, mok]
            for name in peers:
                try:
                    peer = PEERS[name](inputs)
                    if not (found := difference(yardstick, peer)) <= LIMIT:
                        raise RuntimeError(f"differs from alltoall by {found:.3g}, need {LIMIT}")
                    ways.append(peer)
                except Exception as error:
                    self.leave_out(name, f"{shape.label}, {routing}: {type(error).__name__}: {error}")
        main = [torch.zeros_like(w, dtype=torch.float32) for w in (inputs.w1, inputs.w2)]

        def call(way: Implementation, which: str) -> Callable[[], object]:
            if which == "bwd_acc32":
                return lambda: way.step_acc32(main)
            return {"fwd_nograd": way.fwd_nograd, "fwd": way.fwd, "bwd": way.step}[which]

        times: dict[tuple[str, str], list[float]] = {}
        rates = []
        needed = [
            w for w in PASSES if w in passes or w == "fwd"
        ]  # a backward pass is the step less the forward
        for turn in range(3):
            rates.append(self.dense.tflops())
            for way in ways:
                for which in needed:
                    made = self.times(call(way, which), 10 if turn == 0 else 3, -(-self.reps // 3))
                    times.setdefault((way.name, which), []).extend(made)
        records, rate = [], statistics.mean(rates)
        for way in ways:
            median = {which: statistics.median(largest(times[way.name, which])) for which in needed}
            for which in passes:
                ms = median[which] - (median["fwd"] if which.startswith("bwd") else 0)
                tflops = shape.flops(which) / ms / 1e9
                moved = 0 if routing == "local" else remote_bytes(shape, self.ranks, which)
                records.append({
                    "shape": asdict(shape), "routing": routing, "pass": which, "impl": way.name,
                    "ms": round(ms, 4), "tflops": round(tflops, 1), "dense_tflops": round(rate, 1),
                    "ratio_to_dense": round(tflops / rate, 4), "received_gbps": round(moved / ms / 1e6, 1),
                    "notes": way.notes,
                })  # fmt: skip
            way.close()
        self.add(records)
        comm.close()

    def leave_out(self, peer: str, why: str) -> None:
        say(f"not measured: {peer}: {why}")
        self.add([{"impl": peer, "absent": why}])

    def bandwidth(self, hidden: int, tokens: int, comm_sms: Sequence[int], seed: int = 0) -> None:
        """Forward and backward of a layer that transfers bound, for each number of SMs that move rows (0:
        all), remote and local; and one all-to-all of its rows. Records {hidden, tokens, comm_sms,
        pass (fwd, bwd, transfer), impl, ms, local_ms, received_gbps}.
        """
        shape = Shape(tokens, hidden, INTERMEDIATE, LOCAL_EXPERTS * self.ranks, 1)
        remote, local = (
            rank_inputs(shape, routing, self.rank, self.ranks, self.device, seed)
            for routing in ("balanced", "local")
        )
        common = {"hidden": hidden, "tokens": tokens}
        records = []

        def record(which: str, impl: str, sms: int, ms: float, moved: int, **more: Any) -> None:
            figures = {"ms": round(ms, 4), "received_gbps": round(moved / ms / 1e6, 1)}
            records.append({**common, "comm_sms": sms, "pass": which, "impl": impl, **figures, **more})

        for sms in comm_sms:
            config = self.config.with_(comm_sms=(sms, sms) if sms else None)
            comm = open_comm(shape, remote.x.device, remote.x.dtype, config)
            ms = {}
            for name, inputs in (("remote", remote), ("local", local)):
                mok = MokAcross(inputs, comm)
                for which, call in (("fwd", mok.fwd), ("bwd", mok.step)):
                    ms[name, which] = statistics.median(largest(self.times(call, 3, self.reps)))
                ms[name, "bwd"] -= ms[name, "fwd"]
            for which in ("fwd", "bwd"):
                moved = remote_bytes(shape, self.ranks, which)
                record(which, "mok", sms, ms["remote", which], moved, local_ms=round(ms["local", which], 4))
            comm.close()
        if self.baseline:
            rows = remote.x[: tokens // self.ranks * self.ranks]
            got = torch.empty_like(rows)
            times = self.times(lambda: dist.all_to_all_single(got, rows), 3, self.reps)
            moved = rows.nbytes * (self.ranks - 1) // self.ranks
            record("transfer", "alltoall", 0, statistics.median(largest(times)), moved)
        self.add(records)


def bandwidth_table(records: Sequence[dict[str, Any]]) -> str:
    """GB/s that a rank receives over a pass; local ms: the time of the same pass without transfers."""
    columns = ("hidden", "tokens", "impl", "comm_sms", "pass", "ms", "received_gbps", "local_ms")
    rows = [columns, *(tuple(str(r.get(c, "-")) for c in columns) for r in records)]
    return "\n".join(" ".join(f"{cell:>13}" for cell in row) for row in rows)


def say(text: str, file: TextIO = sys.stdout) -> None:
    if env.integer("RANK") == 0:
        print(text, file=file, flush=True)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "torchrun ... -m megatron_mok.bench.distributed", description=(__doc__ or "").split("\n")[0]
    )
    p.add_argument("--shape", nargs="+", default=["A"], help="A B C D or T,H,I,E,K; T tokens a rank")
    p.add_argument("--routing", nargs="+", default=["balanced", "local"], choices=ROUTINGS)
    p.add_argument("--pass", dest="passes", nargs="+", default=["fwd", "bwd", "bwd_acc32"], choices=PASSES)
    p.add_argument("--bandwidth", action="store_true", help="instead of the shapes: what transfers reach")
    p.add_argument(
        "--hidden", type=int, nargs="+", default=[2048, 7168], help="of --bandwidth: a row has H * 2 bytes"
    )
    p.add_argument("--tokens", type=int, nargs="+", default=[512, 4096, 32768], help="of --bandwidth, a rank")
    p.add_argument(
        "--comm-sms", type=int, nargs="+", default=[0, 4, 8, 16, 32], help="of --bandwidth; 0: all"
    )
    p.add_argument(
        "--shared-device", action="store_true", help="ranks on one GPU: for function, not for time"
    )
    p.add_argument("--reps", type=int, default=30)
    p.add_argument("--commit", default="")
    p.add_argument("--json", type=Path)
    return p


def run(args: argparse.Namespace, bench: Bench) -> None:
    """Everything that the command line asks for. ValueError, RuntimeError on all ranks."""
    if args.bandwidth:
        for hidden in args.hidden:
            for tokens in args.tokens:
                bench.bandwidth(hidden, tokens, args.comm_sms)
        say(bandwidth_table(bench.made))
        return
    gone = absent() if bench.baseline else dict.fromkeys(PEERS, "the ranks share a GPU")
    for name, why in gone.items():
        bench.leave_out(name, why)
    for shape in map(Shape.parse, args.shape):
        if shape.E % bench.ranks:
            raise ValueError(
                f"--shape: got E = {shape.E} for {bench.ranks} ranks, need a multiple of the ranks; "
                "remedy: another --shape or --nproc-per-node"
            )
        for routing in args.routing:
            if routing == "local" and bench.ranks == 1:
                continue  # all routing is
            bench.layer(shape, routing, args.passes, [name for name in PEERS if name not in gone])
    say(table([r for r in bench.made if "absent" not in r]))


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(0 if args.shared_device else (env.integer("LOCAL_RANK") or 0))
    dist.init_process_group("gloo" if args.shared_device or not cuda else "nccl", timeout=GROUP_TIMEOUT)
    nvml = open_nvml(int(cuda))
    facts = {
        "commit": args.commit, "gpu": torch.cuda.get_device_name() if cuda else "none",
        "driver": nvml.driver() if nvml else None,
        "cuda": torch.version.cuda, "torch": torch.__version__,
    }  # fmt: skip
    config = MokConfig(shared_device=args.shared_device)
    try:
        run(args, Bench(facts, "cuda" if cuda else "cpu", config, args.reps, args.json))
    except (ValueError, RuntimeError) as error:
        say(f"bench.distributed: {error}", sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    finally:
        runtime.release()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # torch, with gloo, now and then aborts as the interpreter ends
