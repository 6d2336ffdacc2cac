"""`mok bench --layer`: one MoE layer on this GPU, mok beside torch and the peers that are installed."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

EPILOG = """Exit code: 0 done, 1 an implementation was wrong or failed (it is not timed, the others are),
2 there is nothing to measure on. torch-eager and torch-compiled always take part."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="mok bench", description=__doc__, epilog=EPILOG)
    p.add_argument("--layer", action="store_true", required=True, help="measure one layer after the router")
    p.add_argument(
        "--shape", nargs="+", default=["C"], metavar="S", help="A B C C512 C64 D or T,H,I,E,K; one rank (C)"
    )
    p.add_argument("--routing", nargs="+", default=["balanced"], metavar="R", help="balanced random skewed")
    p.add_argument("--pass", nargs="+", dest="passes", metavar="P", help="fwd_nograd fwd bwd bwd_acc32 (all)")
    p.add_argument(
        "--ranks", nargs="+", type=int, default=[], metavar="R",
        help="also mok on R virtual ranks, each with 1/R of the tokens, experts and SMs of this GPU",
    )  # fmt: skip
    p.add_argument(
        "--peers", default="auto", help="auto: those that import; none; or names with commas (auto)"
    )
    p.add_argument("--reps", type=int, default=30, help="timed calls of a pass; fewer for a quick look (30)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--commit", help="for the records; default: git's HEAD")
    p.add_argument("--json", type=Path, metavar="F", help="append the records to the list in this file")
    p.add_argument("--plot", type=Path, metavar="F", help="draw ratios to dense there (PNG)")
    return p


def git_head() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def choose_peers(wanted: str) -> list[Any]:
    """Classes of the peers asked for; auto says which are not here. ValueError for one that is unknown or
    asked for and not here.
    """
    from megatron_mok.bench import peers

    if wanted == "none":
        return []
    names = list(peers.PEERS) if wanted == "auto" else wanted.split(",")
    for name in names:
        if name not in peers.PEERS:
            raise ValueError(f"--peers: got {name!r}, need auto, none or some of {', '.join(peers.PEERS)}")
    absent = {name: why for name in names if (why := peers.missing(name))}
    if absent and wanted != "auto":
        raise ValueError(f"--peers: {'; '.join(absent.values())}; remedy: install it or leave it out")
    for why in absent.values():
        print(f"not measured: {why}")
    return [peers.PEERS[name] for name in names if name not in absent]


def run(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    import torch

    from megatron_mok.bench import ab, cases, layer
    from megatron_mok.bench.implementations import Mok, MokRanks, TorchCompiled, TorchEager
    from megatron_mok.cli.machine import Machine

    try:
        todo = [
            case
            for text in args.shape
            for case in cases.cases(cases.Shape.parse(text), check(args.routing, cases.ROUTINGS))
        ]
        passes = check(args.passes or cases.PASSES, cases.PASSES)
        if args.reps < 1:
            raise ValueError(f"--reps: got {args.reps}, need at least 1")
        on_ranks = [MokRanks.of(ranks) for ranks in dict.fromkeys(args.ranks)]
        for way in on_ranks:
            for shape, _ in todo:
                way.fit(shape)
        if args.plot and (missing := ab.matplotlib_missing()):
            raise ValueError(missing)
        if not torch.cuda.is_available():
            raise ValueError("device: got no GPU, need one: kernels are measured; remedy: see `mok doctor`")
        ways = [TorchEager, TorchCompiled, *choose_peers(args.peers), Mok, *on_ranks]
    except ValueError as e:
        print(f"mok bench: {e}", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    facts = {
        "commit": args.commit or git_head(),
        "gpu": torch.cuda.get_device_name(),
        "driver": Machine().driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
    }
    clock = layer.CudaClock()
    dense = layer.Dense(clock, "cuda")
    copy_tbps = layer.copy_tbps(clock, "cuda")
    records: list[dict[str, Any]] = []
    troubles: list[str] = []
    for shape, routing in dict.fromkeys(todo):
        print(f"{shape.label}, {routing} ...", flush=True)
        report = layer.measure(
            shape, routing, ways, environment=facts, passes=passes, reps=args.reps, seed=args.seed,
            dense=dense, clock=clock, copy_tbps=copy_tbps, before=records,
        )  # fmt: skip
        records += report.records
        troubles += report.troubles
        if args.json:  # case by case: what is measured stays, whatever comes next
            layer.append(args.json, report.records)
    print("\n" + layer.table(records))
    if args.plot and records:
        layer.plot(records, args.plot)
    return 1 if troubles else 0


def check(given: Any, known: Any) -> list[str]:
    """The words of an option, also with commas, in the order of `known`. ValueError for any other word."""
    given = [word for text in given for word in text.split(",")]
    for word in given:
        if word not in known:
            raise ValueError(f"got {word!r}, need some of {', '.join(known)}")
    return [word for word in known if word in given]
