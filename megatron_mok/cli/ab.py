"""`mok ab`: the same training under a baseline dispatcher and under mok, and what the difference is."""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from megatron_mok import __version__
from megatron_mok.bench import ab, training
from megatron_mok.bench.baselines import BASELINES, MOK_FLAGS
from megatron_mok.cli.bench import git_head
from megatron_mok.cli.machine import Machine

USAGE = (
    "mok ab --baseline NAME [--steps N] [--config F] [--json F] [--plot F] [-- torchrun and training args]"
)
EPILOG = """After --: a whole command (torchrun ... SCRIPT.py ARGS; any Megatron script), or torchrun options
and Megatron arguments that are added to the built-in training: a model of configs/models on real text, in
fp32 on a machine without a GPU. Exit code: 0 done, 1 a run failed, 2 the comparison cannot be made."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="mok ab", usage=USAGE, description=__doc__, epilog=EPILOG)
    p.add_argument(
        "--baseline", required=True, choices=list(BASELINES), help="the dispatcher to compare with (a)"
    )
    p.add_argument("--steps", type=int, default=20, metavar="N", help="training steps of each run (20)")
    p.add_argument(
        "--config", default="tiny", metavar="F", help="model: a file or a name in configs/models (tiny)"
    )
    p.add_argument("--json", type=Path, metavar="F", help="write the result there")
    p.add_argument("--commit", help="of megatron_mok, for the result; default: git's HEAD")
    p.add_argument(
        "--plot", type=Path, metavar="F", help="draw losses, differences and step times there (PNG)"
    )
    p.add_argument(
        "--repeat",
        action=argparse.BooleanOptionalAction,
        help="run both sides twice: do they repeat bit for bit? (by itself only where that is cheap)",
    )
    p.add_argument("--timeout", type=float, default=1800, metavar="S", help="longest time of one run (1800)")
    p.add_argument("--runs", type=Path, default=Path("runs/ab"), metavar="D", help="logs, metrics (runs/ab)")
    return p


def facts(command: list[str], commit: str | None = None) -> dict[str, Any]:
    """What a training's figures say little without; None for what this machine lacks or does not tell.

    command: kept as one types it in this folder. commit: git's HEAD where none is given. gpu: the first that
    torch sees.
    """
    import torch

    machine = Machine()
    words = ["python" if word == sys.executable else word for word in command]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or git_head(),
        "command": shlex.join(words).replace(f"{Path.cwd()}/", ""),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": machine.driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "megatron_mok": __version__,
        **{name: machine.distribution(name) for name in ("megatron-core", "transformer-engine")},
    }


def run(argv: list[str]) -> int:
    argv, tail = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    args = parser().parse_args(argv)
    baseline = BASELINES[args.baseline]
    try:
        impossible = baseline.missing() or (ab.matplotlib_missing() if args.plot else None)
        if impossible:
            raise ValueError(impossible)
        if args.steps < 2:
            raise ValueError(
                f"--steps: got {args.steps}, need at least 2: the first is left out of the medians"
            )
        job = training.choose(args.config, tail)
    except ValueError as e:
        print(f"mok ab: {e}", file=sys.stderr)
        return 2
    try:
        result = ab.measure(
            job,
            (args.baseline, baseline.flags),
            ("mok", MOK_FLAGS),
            args.steps,
            folder=args.runs,
            timeout_s=args.timeout,
            environment=training.environment(job.gpus, job.here),
            repeat=args.repeat,
        )
    except ab.RunFailed as e:
        print(f"mok ab: {e}", file=sys.stderr)
        return 1
    command = [*job.launcher, *ab.LAUNCH, job.script, *job.args, "--train-iters", str(args.steps)]
    flags = {"a": shlex.join(baseline.flags), "b": shlex.join(MOK_FLAGS)}
    result = {"facts": {**facts(command, args.commit), "flags": flags}, **result}
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    if args.plot:
        ab.plot(result, args.plot)
    print("\n" + ab.table(result))
    return 0
