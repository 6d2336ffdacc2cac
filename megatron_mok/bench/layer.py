"""One layer on one GPU against its peers: check every implementation, then time them in turns.

A pass that fails or is wrong is reported and not timed. `bwd` is (forward + backward) - forward of the same
implementation; the dense rate (bf16 8192^3) is measured just before and just after each implementation.
"""

from __future__ import annotations

import datetime
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_mok.bench.cases import PASSES, Inputs, Shape, make_inputs
from megatron_mok.bench.implementations import Implementation
from megatron_mok.reference import moe as reference
from megatron_mok.reference.activation import NO_LIMIT, Activation

ROUNDS = 3
DENSE = 8192
WARMUP = 10
COMPARISONS = ("ratio_to_one_rank", "ratio_to_balanced", "memory_floor_ms")
# Relative error: at most twice that of torch in the same dtype and SLACK, never above LIMIT.
SLACK, LIMIT = 1e-3, 2e-2


# ---------------------------------------------------------------- time


class CudaClock:
    """Milliseconds of calls on the current stream, by CUDA events."""

    def times(self, call: Callable[[], object], reps: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(reps)]
        for start, end in events:
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]


class HostClock:
    """Milliseconds by the host's clock, for a device that works in step with it."""

    def times(self, call: Callable[[], object], reps: int) -> list[float]:
        made = []
        for _ in range(reps):
            start = time.perf_counter()
            call()
            made.append((time.perf_counter() - start) * 1e3)
        return made


Clock = CudaClock | HostClock


class Dense:
    """The dense rate: a bf16 square matmul on random data."""

    def __init__(self, clock: Clock, device: str, size: int = DENSE, reps: int = 10):
        self.clock, self.size, self.reps = clock, size, reps
        self.a, self.b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
        self.c = torch.empty_like(self.a)

    def tflops(self) -> float:
        ms = statistics.median(self.clock.times(lambda: torch.mm(self.a, self.b, out=self.c), self.reps))
        return 2 * self.size**3 / ms / 1e9


def copy_tbps(clock: Clock, device: str, size_bytes: int = 2**30, reps: int = 10) -> float:
    """TB/s read and written by a copy of random data."""
    source = torch.randn(size_bytes // 4, device=device)
    target = torch.empty_like(source)
    clock.times(lambda: target.copy_(source), 3)
    ms = statistics.median(clock.times(lambda: target.copy_(source), reps))
    return 2 * size_bytes / ms / 1e9


# ---------------------------------------------------------------- correctness


@dataclass
class Expected:
    """The layer in fp64 from the same bf16 values: out, dx [T, H], dp [T, K]; dw1, dw2 rounded to fp32."""

    out: Tensor
    dx: Tensor
    dp: Tensor
    dw1: Tensor
    dw2: Tensor


def oracle(inputs: Inputs) -> Expected:
    """Expert by expert in fp64, by the package's reference."""

    def double(t: Tensor, axis: int) -> Tensor:
        return t.double()

    shape = inputs.shape
    flat = inputs.ids.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=shape.E)
    token, p = order // shape.K, inputs.p.reshape(-1)[order].double()
    rows, dy = inputs.x[token].double(), inputs.dy[token].double()
    weights = [inputs.w1], [inputs.w2]
    y, h = reference.forward(rows, p, counts, *weights, Activation.SWIGLU, NO_LIMIT, double)
    dw1, dw2 = (torch.empty_like(w, dtype=torch.float32) for w in (inputs.w1, inputs.w2))
    saved = torch.ones(len(h), dtype=torch.bool, device=h.device)
    dx, dp = reference.backward(
        dy, rows, p, counts, *weights, h, saved, [dw1], [dw2], False, Activation.SWIGLU, NO_LIMIT, double
    )

    def combined(by_row: Tensor) -> Tensor:
        slots = torch.empty_like(by_row)
        slots[order] = by_row
        return slots.view(shape.T, shape.K, *by_row.shape[1:])

    return Expected(combined(y).sum(1), combined(dx).sum(1), combined(dp), dw1, dw2)


def relative_error(got: Tensor, want: Tensor, scale: float = 1.0) -> float:
    """||got - scale * want|| / ||scale * want||, in fp64 slices; inf where anything is not finite."""
    if got.shape != want.shape:
        return float("inf")
    difference = norm = 0.0
    for g, w in zip(got.split(16), want.split(16), strict=True):
        exact = w.double() * scale
        difference += (g.double() - exact).square().sum().item()
        norm += exact.square().sum().item()
    error = (difference / norm) ** 0.5 if norm else (0.0 if difference == 0 else float("inf"))
    return error if error == error else float("inf")


def errors(implementation: Implementation, which: str, want: Expected) -> dict[str, float]:
    """Relative errors of everything that one pass gives."""
    if which.startswith("fwd"):
        out = implementation.fwd_nograd() if which == "fwd_nograd" else implementation.fwd()
        return {"out": relative_error(implementation.whole(out).detach(), want.out)}
    if which == "bwd":
        dx, dp, dw1, dw2 = implementation.step()
        scale = 1.0
    else:  # twice into zeros: what is written instead of added shows
        zeros = [torch.zeros_like(w, dtype=torch.float32) for w in implementation.weights()]
        implementation.step_acc32(zeros)
        dx, dp = implementation.step_acc32(zeros)
        dw1, dw2 = zeros
        scale = 2.0
    return {
        "dx": relative_error(implementation.whole(dx), want.dx),
        "dp": relative_error(implementation.whole(dp), want.dp),
        "dw1": relative_error(implementation.restore(dw1), want.dw1, scale),
        "dw2": relative_error(dw2, want.dw2, scale),
    }


# ---------------------------------------------------------------- one case


@dataclass
class Subject:
    """An implementation under measurement: the passes that hold, their times, the dense rates around them."""

    implementation: Implementation
    passes: list[str] = field(default_factory=list)
    times: dict[str, list[float]] = field(default_factory=dict)
    dense: list[float] = field(default_factory=list)

    def ms(self, which: str) -> float:
        """Median of a forward pass; for a backward pass that of the step minus the forward's."""
        median = statistics.median(self.times[which])
        return median if which.startswith("fwd") else median - statistics.median(self.times["fwd"])


@dataclass
class Report:
    """Records of one case, and what went wrong in words."""

    records: list[dict[str, Any]]
    troubles: list[str]


def measure(
    shape: Shape,
    routing: str,
    implementations: Sequence[type[Implementation]],
    *,
    environment: dict[str, Any],
    device: str = "cuda",
    passes: Sequence[str] = PASSES,
    reps: int = 30,
    warmup: int = WARMUP,
    seed: int = 0,
    dense: Dense | None = None,
    clock: Clock | None = None,
    copy_tbps: float | None = None,
    before: Sequence[dict[str, Any]] = (),
    say: Callable[[str], None] = print,
) -> Report:
    """Check and time every implementation on one shape and routing. The first is the yardstick: torch-eager.

    environment: {commit, gpu, driver, cuda, torch}, copied into the records. copy_tbps: the device's, for
    memory floors. before: records of the run's earlier cases, for comparing skewed with balanced.
    """
    clock = clock or CudaClock()
    dense = dense or Dense(clock, device)
    inputs = make_inputs(shape, routing, device, seed)
    want = oracle(inputs)
    troubles: list[str] = []
    subjects: list[Subject] = []
    limits: dict[tuple[str, str], float] = {}
    for make in implementations:
        case = f"{shape.label}, {routing}: {make.title()}"
        try:
            subject = Subject(make(inputs))
        except Exception as e:
            troubles.append(f"{case}: {type(e).__name__}: {e}")
            continue
        for which in passes:
            trouble = _check(subject.implementation, which, want, limits)
            if trouble:
                troubles.append(f"{case} {which}: {trouble}")
            else:
                subject.passes.append(which)
        subjects.append(subject)
        _free()
    del want
    _free()
    main = None
    if "bwd_acc32" in passes:
        main = [torch.zeros_like(w, dtype=torch.float32) for w in (inputs.w1, inputs.w2)]
    rounds = min(ROUNDS, reps)
    share = -(-reps // rounds)
    for turn in range(rounds):
        for subject in subjects:
            if not subject.passes:
                continue
            try:  # the first turn warms up in full, later ones after the others' work
                _time(subject, main, share, warmup if turn == 0 else min(warmup, 3), dense, clock)
                subject.implementation.check()
            except Exception as e:  # what it has measured before may be as wrong
                subject.passes.clear()
                title = subject.implementation.title()
                troubles.append(f"{shape.label}, {routing}: {title}, while timed: {type(e).__name__}: {e}")
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    records = [
        record(subject, which, shape, routing, {"date": date, **environment})
        for subject in subjects
        for which in passes
        if which in subject.passes
    ]
    compare(records, before, copy_tbps)
    for subject in subjects:
        subject.implementation.close()
    for line in troubles:
        say(f"TROUBLE {line}")
    return Report(records, troubles)


def _check(implementation: Implementation, which: str, want: Expected, limits: dict) -> str | None:
    """Why a pass does not count, None where it holds. The first implementation sets the limits."""
    try:
        found = errors(implementation, which, want)
    except Exception as e:
        return f"{type(e).__name__}: {str(e).strip()[:500]}"
    bad = []
    for output, error in found.items():
        if (which, output) not in limits:
            limit = LIMIT
            limits[which, output] = min(2 * error + SLACK, limit)
        else:
            limit = limits[which, output]
        if not error <= limit:
            bad.append(f"{output}: relative error {error:.3g}, need <= {limit:.3g}")
    return "; ".join(bad) or None


def _time(
    subject: Subject, main: list[Tensor] | None, reps: int, warmup: int, dense: Dense, clock: Clock
) -> None:
    implementation = subject.implementation
    calls: dict[str, Callable[[], object]] = {
        "fwd_nograd": implementation.fwd_nograd,
        "fwd": implementation.fwd,
        "bwd": implementation.step,
        "bwd_acc32": lambda: implementation.step_acc32(main or []),
    }
    needed = [which for which in PASSES if which in subject.passes]
    if "fwd" not in needed and any(which.startswith("bwd") for which in needed):
        needed.insert(0, "fwd")
    dense.tflops()  # after checks or another implementation: warm up
    subject.dense.append(dense.tflops())
    for which in needed:
        clock.times(calls[which], warmup)
        subject.times.setdefault(which, []).extend(clock.times(calls[which], reps))
    subject.dense.append(dense.tflops())


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---------------------------------------------------------------- records


def record(subject: Subject, which: str, shape: Shape, routing: str, facts: dict[str, Any]) -> dict[str, Any]:
    """One line of benchmarks/results/*.json."""
    ms = subject.ms(which)
    tflops = shape.flops(which) / ms / 1e9
    dense = statistics.mean(subject.dense)
    return {
        **{key: facts.get(key) for key in ("commit", "date", "gpu", "driver", "cuda", "torch")},
        "shape": asdict(shape),
        "ranks": subject.implementation.ranks,
        "routing": routing,
        "pass": which,
        "impl": subject.implementation.name,
        "ms": round(ms, 4),
        "tflops": round(tflops, 1),
        "dense_tflops": round(dense, 1),
        "ratio_to_dense": round(tflops / dense, 4),
        "notes": subject.implementation.notes,
    }


def compare(
    records: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]], copy_tbps: float | None
) -> None:
    """Adds COMPARISONS to the records to which they apply, from themselves and from earlier ones.

    ratio_to_one_rank  rate of several ranks over that of one, from the times of one case
    ratio_to_balanced  ratio_to_dense of skewed over that of balanced routing, same shape
    memory_floor_ms    of a forward that arithmetic does not bound: the weights read once at the copy's rate
    """

    def key(r: dict[str, Any], **other: Any) -> str:
        return json.dumps([({**r, **other})[k] for k in ("shape", "ranks", "routing", "pass", "impl")])

    known = {key(r): r for r in [*before, *records]}
    for r in records:
        one, balanced = known.get(key(r, ranks=1)), known.get(key(r, routing="balanced"))
        if r["ranks"] > 1 and one:
            r["ratio_to_one_rank"] = round(one["ms"] / r["ms"], 4)
        if r["routing"] == "skewed" and balanced:
            r["ratio_to_balanced"] = round(r["ratio_to_dense"] / balanced["ratio_to_dense"], 4)
        shape = Shape(**r["shape"])
        if copy_tbps and r["pass"].startswith("fwd"):
            memory_ms = shape.weight_bytes / copy_tbps / 1e9
            if memory_ms * r["dense_tflops"] * 1e9 > shape.flops(r["pass"]):
                r["memory_floor_ms"] = round(memory_ms, 4)


def append(path: Path, records: list[dict[str, Any]]) -> None:
    """Add records to the JSON list in `path`. ValueError where it holds something else."""
    made = json.loads(path.read_text()) if path.exists() else []
    if not isinstance(made, list):
        raise ValueError(f"--json: {path}: got a JSON {type(made).__name__}, need a list of records")
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(r) for r in [*made, *records])
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(f"[\n{lines}\n]\n")
    temporary.replace(path)


def _title(r: dict[str, Any]) -> str:
    return r["impl"] if r["ranks"] == 1 else f"{r['impl']} R{r['ranks']}"


def table(records: list[dict[str, Any]]) -> str:
    """Milliseconds (TFLOP/s, ratio to dense) of every pass, one block a case."""
    lines = []
    for shape, routing in dict.fromkeys((Shape(**r["shape"]), r["routing"]) for r in records):
        mine = [r for r in records if Shape(**r["shape"]) == shape and r["routing"] == routing]
        dense = [r["dense_tflops"] for r in mine]
        lines.append(f"\n{shape.label}, {routing}; dense {min(dense):.0f} to {max(dense):.0f} TFLOP/s")
        lines.append(f"  {'':<16}" + "".join(f"{which:>24}" for which in PASSES))
        for title in dict.fromkeys(map(_title, mine)):
            cells = {r["pass"]: f"{r['ms']:.3f} ({r['tflops']:.0f}, {r['ratio_to_dense']:.2f})" for r in mine
                     if _title(r) == title}  # fmt: skip
            lines.append(f"  {title:<16}" + "".join(f"{cells.get(which, '-'):>24}" for which in PASSES))
            for name in COMPARISONS:
                cells = {r["pass"]: f"{r[name]:.3f}" for r in mine if _title(r) == title and name in r}
                if cells:
                    lines.append(f"    {name:<18}" + "".join(f"{cells.get(w, ''):>24}" for w in PASSES)[4:])
    return "\n".join(lines).strip("\n")


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """PNG: ratio to dense of every pass and implementation, one panel a case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys((Shape(**r["shape"]), r["routing"]) for r in records))
    titles = list(dict.fromkeys(map(_title, records)))
    figure, axes = pyplot.subplots(1, len(cases), figsize=(1 + 4 * len(cases), 4), squeeze=False, sharey=True)
    for (shape, routing), panel in zip(cases, axes[0], strict=True):
        for i, title in enumerate(titles):
            bars = {r["pass"]: r["ratio_to_dense"] for r in records
                    if (Shape(**r["shape"]), r["routing"], _title(r)) == (shape, routing, title)}  # fmt: skip
            at = [PASSES.index(which) + i * 0.8 / len(titles) for which in bars]
            panel.bar(at, list(bars.values()), width=0.8 / len(titles), label=title, align="edge")
        panel.set_xticks([k + 0.4 for k in range(len(PASSES))], PASSES)
        panel.set_title(f"{shape.label}\n{routing}", fontsize=9)
    axes[0][0].set_ylabel("ratio to dense bf16 matmul")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
