"""Training with mok, one worker killed in mid-run: the job must end soon, with an error that names the rank.

    python -m megatron_mok.bench.killed --at 20 --steps 50 [--like AB.json] [--json F] [-- TRAINING ARGUMENTS]

The training is that of `mok ab` (see bench.training). The last rank gets SIGKILL once step --at has been
logged. --like: the JSON of `mok ab` over the same training; the losses up to then must be those of its side
b, bit for bit; on GPUs the rest of the training has to repeat them too, so where attention is torch's both
need --deterministic-sdpa. Exit code: 0 as it must be, 1 not, 2 the training cannot be made.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from megatron_mok.bench import ab, training
from megatron_mok.bench.baselines import MOK_FLAGS

POLL_S = 0.02
ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.S)  # torchrun's words


def worker(launcher: int, rank: int) -> int | None:
    """Process id of a rank that torchrun (`launcher`) started, None while there is none."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    for pid in children.read_text().split() if children.exists() else ():
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"LOCAL_RANK={rank}".encode() in variables:
            return int(pid)
    return None


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def run(job: ab.Training, at: int, steps: int, folder: Path, timeout_s: float) -> dict[str, Any]:
    """{ranks, killed, at_step, seconds, exit_code, error, survivors, losses}: what came of the kill.

    seconds: from the kill to the end of torchrun. error: what torchrun wrote of the worker, on one line.
    survivors: workers that live on. RunFailed where the training did not come as far as step `at` in
    timeout_s.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log, metrics, observed = (folder / f"killed.{end}" for end in ("log", "jsonl", "moe.jsonl"))
    for old in (metrics, observed):
        old.unlink(missing_ok=True)
    command = job.command(MOK_FLAGS, steps, metrics, observed)
    environment = training.environment(job.gpus, job.here)
    end = time.monotonic() + timeout_s
    victim = job.here - 1
    with log.open("w") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
    try:
        while len(rows := ab.read_metrics(metrics)) < at:
            if process.poll() is not None or time.monotonic() > end:
                why = "ended" if process.poll() is not None else "was slow"
                raise ab.RunFailed(f"{why} after {len(rows)} steps, need {at}\n{ab.last_lines(log)}")
            time.sleep(POLL_S)
        workers = [worker(process.pid, rank) for rank in range(job.here)]
        if (target := workers[victim]) is None:
            raise ab.RunFailed(f"no worker of rank {victim} among torchrun's children")
        killed = time.monotonic()
        subprocess.run(["kill", "-KILL", str(target)], check=True)
        try:
            process.wait(max(end - killed, 1))
        except subprocess.TimeoutExpired:
            why = f"rank {victim} was killed and the job did not end"
            raise ab.RunFailed(f"{why}\n{ab.last_lines(log)}") from None
        seconds = time.monotonic() - killed
    finally:
        if process.poll() is None:
            ab.stop(process)
    found = ROOT_CAUSE.search(log.read_text(errors="replace"))
    return {
        "ranks": job.ranks, "killed": victim, "at_step": len(rows), "seconds": round(seconds, 2),
        "exit_code": process.returncode,
        "error": f"rank {found[1]} ended with exit code {found[2]}" if found else None,
        "survivors": sum(alive(pid) for pid in workers if pid),
        "losses": [row["loss"] for row in ab.read_metrics(metrics)],
    }  # fmt: skip


def faults(result: dict[str, Any], like: list[float] | None, most_s: float) -> list[str]:
    """What is not as it must be. like: the losses that the same training had."""
    found = []
    if not result["exit_code"]:
        found.append("exit code: got 0 although a worker was killed, need another")
    if result["seconds"] > most_s:
        found.append(f"seconds from the kill to the end: got {result['seconds']}, need at most {most_s}")
    need = f"rank {result['killed']} ended with exit code {-signal.SIGKILL}"
    if result["error"] != need:
        found.append(f"error: got {result['error']!r}, need {need!r}")
    if result["survivors"]:
        found.append(f"workers that live on: got {result['survivors']}, need 0")
    if like is not None:
        same = min(len(like), len(result["losses"]))
        result["same_losses"] = result["losses"][:same] == like[:same]
        if not result["same_losses"]:
            found.append(f"losses of {same} steps: got {result['losses'][:same]}, need {like[:same]}")
    return found


def parser() -> argparse.ArgumentParser:
    about = (__doc__ or "").split("\n")[0]
    p = argparse.ArgumentParser("python -m megatron_mok.bench.killed", description=about)
    p.add_argument("--steps", type=int, default=50, metavar="N", help="as in the run of --like (50)")
    p.add_argument("--at", type=int, default=20, metavar="N", help="kill after this step (20)")
    p.add_argument("--config", default="tiny", metavar="F", help="as of `mok ab`")
    p.add_argument("--like", type=Path, metavar="F", help="JSON of `mok ab` over the same training")
    p.add_argument("--timeout", type=float, default=300, metavar="S", help="longest time of all (300)")
    p.add_argument("--most", type=float, default=40, metavar="S", help="longest time from kill to end (40)")
    p.add_argument("--runs", type=Path, default=Path("runs/killed"), metavar="D")
    p.add_argument("--json", type=Path, metavar="F")
    return p


def main(argv: list[str]) -> int:
    argv, tail = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    args = parser().parse_args(argv)
    try:
        job = training.choose(args.config, tail)
        if job.here != job.ranks:
            raise ValueError(f"ranks on this host: got {job.here} of {job.ranks}, need all of them")
        like = json.loads(args.like.read_text())["b"]["losses"] if args.like else None
    except (OSError, ValueError) as error:
        print(f"bench.killed: {error}", file=sys.stderr)
        return 2
    try:
        result = run(job, args.at, args.steps, args.runs, args.timeout)
    except ab.RunFailed as error:
        print(f"bench.killed: {error}", file=sys.stderr)
        return 1
    result["faults"] = faults(result, like, args.most)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    for fault in result["faults"]:
        print(f"bench.killed: {fault}", file=sys.stderr)
    print(
        f"rank {result['killed']} of {result['ranks']} killed after step {result['at_step']}: torchrun ended "
        f"after {result['seconds']} s with exit code {result['exit_code']}; {result['error']}"
    )
    if like is not None:
        print(f"losses before that as in {args.like}: {'the same bits' if result['same_losses'] else 'no'}")
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
