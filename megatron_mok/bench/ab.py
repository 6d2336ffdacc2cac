"""The same training under a baseline dispatcher (a) and under mok (b), in turns; one JSON, one plot.

Seed, data and order come from the one command that both sides share: only the dispatcher's flags differ.
"""

from __future__ import annotations

import json
import math
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_mok.bench.telemetry import Telemetry, open_nvml

LAUNCH = ("-m", "megatron_mok.launch")
OBSERVE = ("-m", "megatron_mok.bench.observe")  # as LAUNCH, and writes what MoE layers take
LAST_LINES = 30
POLL_S = 0.2
STOP_GRACE_S = 45.0  # torchrun itself gives its workers 30 s


class RunFailed(RuntimeError):
    """A run that ended badly, gave no metrics or outran its time; the message ends with its last lines."""


@dataclass(frozen=True)
class Training:
    """A training command without its dispatcher: `launcher` is torchrun with its options.

    ranks: processes in all; here: processes on this host; gpus: GPUs they use on this host (0 on a CPU).
    """

    launcher: tuple[str, ...]
    script: str
    args: tuple[str, ...]
    ranks: int
    here: int
    gpus: int

    @classmethod
    def parse(cls, command: list[str], gpus: int) -> Training:
        """From `torchrun OPTIONS [-m megatron_mok.launch] SCRIPT ARGS`.

        gpus: GPUs on this host. ValueError where the command names no script or fixes what ab decides.
        """
        at = next((i for i, word in enumerate(command) if i and word.endswith(".py")), None)
        if at is None:
            raise ValueError(
                f"training command: got {' '.join(command)!r}, need torchrun ... SCRIPT.py ...; "
                "remedy: put the whole command after --"
            )
        options, args = command[:at], tuple(command[at + 1 :])
        for fixed in ("--save", "--load"):
            if any(word.partition("=")[0] == fixed for word in args):
                raise ValueError(
                    f"{fixed}: got it in the training arguments, need none: the second run would resume from "
                    "the first; remedy: leave it out"
                )
        here = int(option(options, "nproc-per-node") or 1)
        if list(LAUNCH) == options[-2:]:
            options = options[:-2]
        return cls(tuple(options), command[at], args, total_ranks(options), here, min(here, gpus))

    def command(self, flags: tuple[str, ...], steps: int, metrics: Path, observed: Path) -> list[str]:
        """The whole command for one side, and the files that it is to write."""
        extra = ["--train-iters", str(steps), "--log-interval", "1", *flags]
        if self.writes_metrics():
            extra += ["--metrics-file", str(metrics)]
        return [*self.launcher, *OBSERVE, str(observed), self.script, *self.args, *extra]

    def writes_metrics(self) -> bool:
        """Whether the script itself writes a line of JSON a step; otherwise Megatron's log is read."""
        try:
            return "--metrics-file" in Path(self.script).read_text()
        except OSError:
            return False

    def tokens_per_step(self, global_batch: int) -> int | None:
        sequence = option(list(self.args), "seq-length")
        return global_batch * int(sequence) if sequence else None


def option(words: list[str], name: str) -> str | None:
    """Value of --name in `--name value` or `--name=value`, dashes or underscores; the last one wins."""
    value = None
    for i, word in enumerate(words):
        key, eq, after = word.partition("=")
        if key.startswith("--") and key[2:].replace("_", "-") == name:
            value = after if eq else (words[i + 1] if i + 1 < len(words) else None)
    return value


def total_ranks(options: list[str]) -> int:
    """Processes that torchrun starts in all, from its options."""
    nodes = (option(options, "nnodes") or "1").split(":")[-1]
    return int(option(options, "nproc-per-node") or 1) * int(nodes)


# ---------------------------------------------------------------- one run


@dataclass
class Run:
    """What one run of one side left: a row per step, and what was seen of the GPUs meanwhile."""

    rows: list[dict]
    gpu: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


_LOG_LINE = re.compile(r"iteration\s+(\d+)/\s*\d+\s*\|(.*)")
_LOG_KEYS = {
    "step_ms": r"elapsed time per iteration \(ms\):\s*([\d.]+)",
    "loss": r"lm loss:\s*(\S+)",
    "grad_norm": r"grad norm:\s*(\S+)",
    "global_batch": r"global batch size:\s*(\d+)",
}


def read_log(text: str, training: Training) -> list[dict]:
    """Rows from Megatron's own log lines (its losses have six digits)."""
    rows = []
    for step, line in _LOG_LINE.findall(text):
        found = {key: re.search(pattern, line) for key, pattern in _LOG_KEYS.items()}
        row = {key: float(match.group(1)) if match else None for key, match in found.items()}
        batch, step_ms = row.pop("global_batch"), row["step_ms"]
        tokens = training.tokens_per_step(int(batch)) if batch else None
        row["tokens_per_s"] = tokens / step_ms * 1e3 if tokens and step_ms else None
        rows.append({"step": int(step), **row})
    return rows


def read_metrics(path: Path) -> list[dict]:
    """Rows of a metrics.jsonl: step, loss, grad_norm, tokens_per_s, step_ms; no half-written last line."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


_TORCHRUN = re.compile(r"[WE]\d{4} .*torch/distributed/elastic/")


def last_lines(path: Path) -> str:
    """The last lines of the script itself; what torchrun adds about its workers' ends says no more."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    end = next((i for i, line in enumerate(lines) if i and _TORCHRUN.match(line)), len(lines))
    lines = lines[:end]
    return "\n".join(f"  | {line}" for line in lines[-LAST_LINES:])


def stop(process: subprocess.Popen) -> None:
    """End a run that we started: torchrun ends its workers on SIGTERM; SIGKILL after a grace time."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def run_training(
    training: Training,
    flags: tuple[str, ...],
    steps: int,
    *,
    stem: Path,
    timeout_s: float,
    environment: dict[str, str],
    warmup: int = 1,
    say: Callable[[str], None] = print,
) -> Run:
    """Run one side; writes STEM.log, STEM.jsonl (metrics) and STEM.moe.jsonl (what the MoE layers took).

    RunFailed on a bad end, a time-out or too few steps.
    """
    log, metrics, observed = (stem.with_suffix(end) for end in (".log", ".jsonl", ".moe.jsonl"))
    stem.parent.mkdir(parents=True, exist_ok=True)
    metrics.unlink(missing_ok=True)
    observed.unlink(missing_ok=True)
    command = training.command(flags, steps, metrics, observed)
    telemetry = Telemetry(open_nvml(training.gpus), warmup, steps)

    def rows() -> list[dict]:
        if training.writes_metrics():
            return read_metrics(metrics)
        return read_log(log.read_text(errors="replace"), training) if log.exists() else []

    began = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment
        )
    try:
        while process.poll() is None:
            if time.monotonic() - began > timeout_s:
                raise RunFailed(f"{' '.join(flags)}: not done in {timeout_s:.0f} s\n{last_lines(log)}")
            seen = rows()
            telemetry.sample(seen[-1]["step"] if seen else 0)
            time.sleep(POLL_S)
    finally:
        if process.poll() is None:
            stop(process)
    if process.returncode:
        raise RunFailed(f"{' '.join(flags)}: exit code {process.returncode}\n{last_lines(log)}")
    seen = rows()
    if len(seen) < steps or any(row.get("loss") is None for row in seen):
        raise RunFailed(f"{' '.join(flags)}: {len(seen)} steps with a loss, need {steps}\n{last_lines(log)}")
    inside = {row["step"]: row for row in read_metrics(observed)}
    seen = [{**inside.get(row["step"] - seen[0]["step"] + 1, {}), **row} for row in seen]
    gpu = telemetry.figures()
    allocated = [row["peak_memory_bytes"] for row in seen if row.get("peak_memory_bytes") is not None]
    gpu["peak_memory_bytes"] = max(allocated, default=gpu["peak_memory_bytes"])
    seconds = time.monotonic() - began
    say(f"{stem.name}: {steps} steps, loss {seen[0]['loss']:.6f} -> {seen[-1]['loss']:.6f}, {seconds:.0f} s")
    return Run(seen, gpu, seconds)


# ---------------------------------------------------------------- comparison


def side(dispatcher: str, runs: list[Run], ranks: int, warmup: int) -> dict[str, Any]:
    """One side of the JSON: its first run's losses and norms, medians over the warm steps of all its runs."""

    def column(run: Run, key: str) -> list[Any]:
        return [row.get(key) for row in run.rows]

    def median(key: str) -> float | None:
        warm = [value for run in runs for value in column(run, key)[warmup:] if value is not None]
        return statistics.median(warm) if warm else None

    def gpu(key: str, over: Callable[[list], float]) -> float | None:
        known = [run.gpu[key] for run in runs if run.gpu.get(key) is not None]
        return over(known) if known else None

    tokens_per_s = median("tokens_per_s")
    bits = [(column(run, "loss"), column(run, "grad_norm")) for run in runs]
    return {
        "dispatcher": dispatcher,
        "losses": column(runs[0], "loss"),
        "grad_norms": column(runs[0], "grad_norm"),
        "step_ms_median": median("step_ms"),
        "moe_ms_median": median("moe_ms"),
        "tokens_per_s_per_gpu": None if tokens_per_s is None else tokens_per_s / ranks,
        "peak_memory_bytes": gpu("peak_memory_bytes", max),
        "nvlink_bytes_per_step": gpu("nvlink_bytes_per_step", statistics.median),
        "energy_j_per_step": gpu("energy_j_per_step", statistics.median),
        "idle_fraction": gpu("idle_fraction", statistics.median),
        "bitwise_repeatable": all(b == bits[0] for b in bits[1:]) if len(runs) > 1 else None,
    }


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """The JSON: {a, b, max_abs_loss_diff, speedup}; null where a figure is unknown or not finite."""
    differences = [abs(x - y) for x, y in zip(a["losses"], b["losses"], strict=True)]
    speedup = (
        a["step_ms_median"] / b["step_ms_median"] if a["step_ms_median"] and b["step_ms_median"] else None
    )
    worst = max(differences) if all(map(math.isfinite, differences)) else math.nan  # max() would lose a NaN
    return _finite({"a": a, "b": b, "max_abs_loss_diff": worst, "speedup": speedup})


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def warmup_steps(steps: int) -> int:
    """Steps left out of the medians: a fifth, at least 1 and at most 5, never all."""
    return min(max(1, min(5, steps // 5)), steps - 1)


def measure(
    training: Training,
    baseline: tuple[str, tuple[str, ...]],
    mok: tuple[str, tuple[str, ...]],
    steps: int,
    *,
    folder: Path,
    timeout_s: float,
    environment: dict[str, str],
    repeat: bool | None,
    cheap_s: float = 60.0,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Both sides in turns: a, b, and a, b again for repeatability if asked (None: if that is cheap)."""
    runs: dict[str, list[Run]] = {"a": [], "b": []}
    warmup = warmup_steps(steps)
    for turn in (1, 2):
        for name, (_, flags) in (("a", baseline), ("b", mok)):
            runs[name].append(
                run_training(
                    training,
                    flags,
                    steps,
                    stem=folder / f"{name}-{turn}",
                    timeout_s=timeout_s,
                    environment=environment,
                    warmup=warmup,
                    say=say,
                )
            )
        spent = sum(run.seconds for both in runs.values() for run in both)
        if repeat is False or (repeat is None and spent > cheap_s):
            break
    a = side(baseline[0], runs["a"], training.ranks, warmup)
    b = side(mok[0], runs["b"], training.ranks, warmup)
    return compare(a, b)


# ---------------------------------------------------------------- report

_ROWS: tuple[tuple[str, str, float, str], ...] = (
    ("step time, median", "step_ms_median", 1, "ms"),
    ("of that MoE layers", "moe_ms_median", 1, "ms"),
    ("tokens/s/GPU", "tokens_per_s_per_gpu", 1, ""),
    ("peak memory", "peak_memory_bytes", 2**30, "GiB"),
    ("NVLink per step", "nvlink_bytes_per_step", 1e9, "GB"),
    ("energy per step", "energy_j_per_step", 1, "J"),
    ("GPU idle", "idle_fraction", 0.01, "%"),
)


def table(result: dict[str, Any]) -> str:
    """The report in text; a dash stands for what the machine cannot tell."""
    a, b = result["a"], result["b"]

    def number(value: float | None, scale: float = 1, unit: str = "") -> str:
        return "-" if value is None else f"{value / scale:,.2f} {unit}".rstrip()

    def yes(value: bool | None) -> str:
        return {None: "not tried", True: "yes", False: "no"}[value]

    rows: list[tuple[str, ...]] = [("", "a: " + a["dispatcher"], "b: " + b["dispatcher"])]
    known = [row for row in _ROWS if a[row[1]] is not None or b[row[1]] is not None]
    rows += [(label, *(number(s[key], scale, unit) for s in (a, b))) for label, key, scale, unit in known]
    rows += [("loss, first", *(_digits(s["losses"][0]) for s in (a, b)))]
    rows += [("loss, last", *(_digits(s["losses"][-1]) for s in (a, b)))]
    rows += [("bitwise repeatable", yes(a["bitwise_repeatable"]), yes(b["bitwise_repeatable"]))]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [f"{r[0]:<{widths[0]}}  {r[1]:>{widths[1]}}  {r[2]:>{widths[2]}}" for r in rows]
    norms = [abs(x - y) / y for x, y in zip(b["grad_norms"], a["grad_norms"], strict=True) if x and y]
    lines += ["", f"steps {len(a['losses'])}, max |loss difference| {_digits(result['max_abs_loss_diff'])}"]
    lines[-1] += f", max relative gradient norm difference {_digits(max(norms, default=None))}"
    lines += [f"speedup (a / b step time) {number(result['speedup'])}"]
    if unknown := [row[0] for row in _ROWS if row not in known]:
        lines += [f"this machine cannot tell: {', '.join(unknown)}"]
    return "\n".join(lines)


def _digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def matplotlib_missing() -> str | None:
    """Why no plot can be drawn, None where it can."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "--plot: matplotlib is not installed; remedy: pip install matplotlib, or leave --plot out"
    return None


def plot(result: dict[str, Any], path: Path) -> None:
    """PNG: both loss curves, their difference step by step, and the step times."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    a, b = result["a"], result["b"]
    figure, (losses, difference, times) = pyplot.subplots(1, 3, figsize=(13, 4), width_ratios=(3, 3, 2))
    steps = range(1, len(a["losses"]) + 1)
    for which, style in ((a, "-"), (b, "--")):
        losses.plot(
            steps, [math.nan if v is None else v for v in which["losses"]], style, label=which["dispatcher"]
        )
    losses.set(xlabel="step", ylabel="loss", title="loss")
    losses.legend()
    pairs = zip(a["losses"], b["losses"], strict=True)
    gaps = [math.nan if x is None or y is None else abs(x - y) for x, y in pairs]
    difference.plot(steps, gaps, ".-")
    difference.set_yscale("symlog", linthresh=1e-7)
    difference.set(xlabel="step", title="|loss difference|")
    names = [f"a: {a['dispatcher']}", f"b: {b['dispatcher']}"]
    bars = times.bar(names, [which["step_ms_median"] or 0 for which in (a, b)])
    times.bar_label(bars, fmt="%.1f")
    speedup = "" if result["speedup"] is None else f", a/b {result['speedup']:.2f}"
    times.margins(y=0.15)
    times.set(ylabel="ms", title=f"step, median{speedup}")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
