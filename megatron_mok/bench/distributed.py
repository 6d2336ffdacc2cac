"""One MoE layer over several GPUs, one process each: mok beside torch's all-to-all with grouped_mm.

    torchrun --nproc-per-node 8 -m megatron_mok.bench.distributed --shape A B --json F

Every rank brings T tokens and holds E/R experts. Times are the slowest rank's of each call. Routing `local`
sends every token to experts of its own rank, in the same numbers: what that saves is communication that did
not hide. Without a GPU it runs the CPU back end over gloo, for its own test.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_mok import env, runtime
from megatron_mok.bench.cases import PASSES, Inputs, Shape, make_inputs, route
from megatron_mok.bench.implementations import Implementation, grouped_mm
from megatron_mok.bench.layer import Clock, CudaClock, Dense, HostClock, append, relative_error, table
from megatron_mok.config import MokConfig

ROUTINGS = ("balanced", "random", "local")
TRANSFERS = {"fwd_nograd": 2, "fwd": 2, "bwd": 3, "bwd_acc32": 3}  # x, y; x, dy, dx
LIMIT = 2e-2  # relative difference of two bf16 implementations


def remote_bytes(shape: Shape, ranks: int, which: str) -> int:
    """Bytes that one rank receives from others in a pass, with balanced routing."""
    return TRANSFERS[which] * shape.rows * shape.H * 2 * (ranks - 1) // ranks


def rank_inputs(shape: Shape, routing: str, rank: int, ranks: int, device: str, seed: int) -> Inputs:
    """What one rank brings and holds: T tokens of its own, routed over all E experts; E/R experts."""
    local = shape.E // ranks
    mine = make_inputs(replace(shape, E=local, K=min(shape.K, local)), "random", device, seed + rank)
    g = torch.Generator(device=device).manual_seed(seed + 1000 + rank)
    if routing == "local":
        ids = route(replace(shape, E=local), "balanced", g) + rank * local
    else:
        ids = route(shape, routing, g)
    p = torch.rand(shape.T, shape.K, device=device, generator=g) + 0.1
    return Inputs(shape, routing, mine.x, mine.dy, ids, p / p.sum(1, keepdim=True), mine.w1, mine.w2)


class _Exchange(torch.autograd.Function):
    """Rows to other ranks, in consecutive pieces of `send` rows; `receive` rows come back from each."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        ctx.counts = send, receive
        got = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(got, rows.contiguous(), receive, send)
        return got

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        send, receive = ctx.counts
        return _Exchange.apply(grads[0], receive, send), None, None


def _activate(h: Tensor, weight: Tensor) -> Tensor:
    gate, up = h.float().chunk(2, -1)
    return (F.silu(gate) * up * weight).to(h.dtype)


class AllToAll(Implementation):
    """torch.distributed's all-to-all on rows sorted by expert, grouped_mm, a compiled activation."""

    name = "alltoall"

    def __init__(self, inputs: Inputs):
        super().__init__(inputs)
        self.ranks = dist.get_world_size()
        self.activate: Callable[[Tensor, Tensor], Tensor] = _activate
        if inputs.x.is_cuda:
            torch._dynamo.reset()
            self.activate = torch.compile(_activate, dynamic=False, fullgraph=True)

    def layer(self, x: Tensor, p: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        T, K, E, R = *self.inputs.ids.shape, self.inputs.shape.E, self.ranks
        flat = self.inputs.ids.reshape(-1).long()
        order = torch.argsort(flat, stable=True)
        sent = torch.bincount(flat, minlength=E).view(R, E // R)  # [to rank, its expert]
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        send, receive = sent.sum(1).tolist(), received.sum(1).tolist()
        rows = _Exchange.apply(x.index_select(0, order // K), send, receive)
        weight = _Exchange.apply(p.reshape(-1, 1).index_select(0, order), send, receive)
        expert = torch.arange(E // R, device=x.device).repeat(R).repeat_interleave(received.view(-1))
        by_expert = torch.argsort(expert, stable=True)
        ends = received.sum(0).cumsum(0).int()
        h = grouped_mm(rows.index_select(0, by_expert), w1.transpose(1, 2), offs=ends)
        y = grouped_mm(self.activate(h, weight.index_select(0, by_expert)), w2.transpose(1, 2), offs=ends)
        back = _Exchange.apply(y.index_select(0, torch.argsort(by_expert)), receive, send)
        return back.index_select(0, torch.argsort(order)).view(T, K, -1).float().sum(1).to(x.dtype)


class MokDistributed(Implementation):
    """The operators of this package over the ranks of the default group."""

    name = "mok"

    def __init__(self, inputs: Inputs, config: MokConfig):
        super().__init__(inputs)
        s, x = inputs.shape, inputs.x
        self.ranks = dist.get_world_size()
        self.comm = runtime.Comm(dist.group.WORLD, s.H, s.K, s.E, s.T, x.device, x.dtype, config).open()
        self.notes = f"back end {self.comm.backend}"

    def layer(self, x: Tensor, p: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return self._moe("off", x, p, w1, w2)

    def _moe(self, main_grad: str, x: Tensor, p: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return runtime.moe(
            x,
            self.inputs.ids,
            p,
            w1,
            w2,
            comm=self.comm,
            num_experts=self.inputs.shape.E,
            main_grad=main_grad,
        )

    def step_acc32(self, main: list[Tensor]) -> tuple[Tensor, Tensor]:
        for weight, buffer in zip(self.leaves[2:], main, strict=True):
            vars(weight).update(main_grad=buffer, grad_added_to_main_grad=False)
        dx, dp, *_ = torch.autograd.grad(self._moe("on", *self.leaves), self.leaves, self.inputs.dy)
        return dx, dp

    def close(self) -> None:
        self.comm.close()


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


def measure(
    shape: Shape,
    routing: str,
    passes: Sequence[str],
    reps: int,
    facts: dict[str, Any],
    clock: Clock,
    dense: Dense,
    *,
    device: str,
    config: MokConfig,
    seed: int = 0,
    baseline: bool = True,
    notes: str = "",
) -> list[dict[str, Any]]:
    """Records of both implementations, in turns. RuntimeError on all ranks where they disagree.

    facts: {commit, gpu, driver, cuda, torch}, copied into the records. baseline: alltoall too. A record is as
    in bench.layer, with the GB/s that a rank receives from others over the whole pass.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    inputs = rank_inputs(shape, routing, rank, ranks, device, seed)
    mok = MokDistributed(inputs, config)
    ways: list[Implementation] = [AllToAll(inputs), mok] if baseline else [mok]
    if baseline and not (found := difference(*ways)) <= LIMIT:
        raise RuntimeError(f"{shape.label}, {routing}: mok and alltoall differ by {found:.3g}, need {LIMIT}")
    main = [torch.zeros_like(w, dtype=torch.float32) for w in (inputs.w1, inputs.w2)]

    def call(way: Implementation, which: str) -> Callable[[], object]:
        if which == "bwd_acc32":
            return lambda: way.step_acc32(main)
        return {"fwd_nograd": way.fwd_nograd, "fwd": way.fwd, "bwd": way.step}[which]

    times: dict[tuple[str, str], list[float]] = {}
    rates = []
    needed = [w for w in PASSES if w in passes or w == "fwd"]  # a backward pass is the step less the forward
    for turn in range(3):
        rates.append(dense.tflops())
        for way in ways:
            for which in needed:
                clock.times(call(way, which), 10 if turn == 0 else 3)
                dist.barrier()
                times.setdefault((way.name, which), []).extend(clock.times(call(way, which), -(-reps // 3)))
    records = []
    for way in ways:
        for which in passes:
            ms = statistics.median(largest(times[way.name, which]))
            if which.startswith("bwd"):
                ms -= statistics.median(largest(times[way.name, "fwd"]))
            tflops, rate = shape.flops(which) / ms / 1e9, statistics.mean(rates)
            moved = 0 if routing == "local" else remote_bytes(shape, ranks, which)
            records.append({
                **facts, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "shape": vars(shape), "ranks": ranks, "routing": routing, "pass": which, "impl": way.name,
                "ms": round(ms, 4), "tflops": round(tflops, 1), "dense_tflops": round(rate, 1),
                "ratio_to_dense": round(tflops / rate, 4), "received_gbps": round(moved / ms / 1e6, 1),
                "notes": notes or way.notes,
            })  # fmt: skip
        way.close()
    runtime.release()
    return records


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
    p.add_argument(
        "--comm-sms", type=int, nargs="+", default=[], help="forward again with so many, mok alone"
    )
    p.add_argument(
        "--shared-device", action="store_true", help="ranks on one GPU: for function, not for time"
    )
    p.add_argument("--reps", type=int, default=30)
    p.add_argument("--commit", default="")
    p.add_argument("--json", type=Path)
    return p


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(0 if args.shared_device else (env.integer("LOCAL_RANK") or 0))
    dist.init_process_group("gloo" if args.shared_device or not cuda else "nccl")
    ranks, device = dist.get_world_size(), "cuda" if cuda else "cpu"
    clock: Clock = CudaClock() if cuda else HostClock()
    dense = Dense(clock, device) if cuda else Dense(clock, device, size=256)
    facts = {
        "commit": args.commit, "gpu": torch.cuda.get_device_name() if cuda else "none",
        "driver": "", "cuda": torch.version.cuda, "torch": torch.__version__,
    }  # fmt: skip
    config = MokConfig(shared_device=args.shared_device)
    records: list[dict[str, Any]] = []
    try:
        for text in args.shape:
            shape = Shape.parse(text)
            if shape.E % ranks:
                raise ValueError(
                    f"--shape: got E = {shape.E} for {ranks} ranks, need a multiple of the ranks; "
                    "remedy: another --shape or --nproc-per-node"
                )
            # Without NCCL there is nothing to compare with on GPUs.
            baseline = not (cuda and args.shared_device)
            for routing in args.routing:
                if routing == "local" and shape.K > shape.E // ranks:
                    say(f"not measured: {shape.label}, local: a rank has fewer experts than K")
                    continue
                records += measure(
                    shape, routing, args.passes, args.reps, facts, clock, dense, device=device, config=config,
                    baseline=baseline,
                )  # fmt: skip
            for sms in args.comm_sms:
                records += measure(
                    shape, "balanced", ["fwd"], args.reps, facts, clock, dense, device=device, baseline=False,
                    config=config.with_(comm_sms=(sms, sms)), notes=f"comm_sms {sms}",
                )  # fmt: skip
    except (ValueError, RuntimeError) as error:
        say(f"bench.distributed: {error}", sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    finally:
        dist.destroy_process_group()
    if env.integer("RANK") == 0:
        if args.json:
            append(args.json, records)
        print(table([r for r in records if not r["notes"].startswith("comm_sms")]))
        for r in records:
            if r["notes"].startswith("comm_sms"):
                print(f"  {r['notes']:<16} {r['ms']:9.3f} ms {r['received_gbps']:8.1f} GB/s received")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
