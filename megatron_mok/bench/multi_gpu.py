"""The report on several GPUs, from what benchmarks/multi_gpu.sh has left.

    python -m megatron_mok.bench.multi_gpu --results benchmarks/results --name h200-x8 --output FILE.md

Reads NAME-parts.json, -layer.json, -bandwidth.json, -train-ab*.json and -killed.json; says what is not there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_mok.bench.cases import PASSES, SHAPES, Shape

NVLINK_GBPS = 450
NOT_RUN = "Not run."
Record = dict[str, Any]

LAYER = f"""GB/s in: what a rank receives, over the whole pass; NVLink gives {NVLINK_GBPS} per direction.
Exposed: the time less that of local routing, where all rows stay on their rank. Not hidden: the exposed share
of what the transfers take at {NVLINK_GBPS} GB/s."""
TRANSFERS = """Layers with I = 128 and K = 1, which transfers bound: two into a rank forward, three backward.
GB/s in is what a rank receives over the whole pass: dispatch, the little arithmetic and combine are one
kernel, and neither dispatch nor combine was timed alone. SMs: how many let their spare warps move rows
(comm_sms); none is set aside for it. Local: the time of the same layer without transfers."""


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def markdown(header: list[str], rows: Iterable[list[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


class Layers:
    """The records of bench.distributed on layers; `absent`: who did not take part, and why."""

    def __init__(self, records: list[Record]):
        self.absent = dict.fromkeys(f"{r['impl']}: {r['absent']}" for r in records if "absent" in r)
        self.records = [{**r, "shape": Shape(**r["shape"])} for r in records if "absent" not in r]

    def each(self, field: str) -> list[Any]:
        return list(dict.fromkeys(r[field] for r in self.records))

    def find(self, **key: Any) -> Record | None:
        return next((r for r in self.records if all(r[k] == v for k, v in key.items())), None)

    def ms(self, shape: Shape, ranks: int, which: str, impl: str, routing: str = "balanced") -> float | None:
        r = self.find(**{"shape": shape, "ranks": ranks, "pass": which, "impl": impl, "routing": routing})
        return r["ms"] if r else None

    def best_other(self, shape: Shape, ranks: int, which: str) -> tuple[float, str] | tuple[None, None]:
        """(ms, name) of the fastest way that is not mok."""
        times = [(self.ms(shape, ranks, which, impl), impl) for impl in self.each("impl") if impl != "mok"]
        return min(((ms, impl) for ms, impl in times if ms is not None), default=(None, None))

    def tables(self) -> str:
        """One a shape, balanced routing: time by ranks of every way."""
        ways = self.each("impl")
        header = ["pass", "ranks", *(f"{impl}, ms" for impl in ways), "best other / mok", "GB/s in"]
        header += ["local, ms", "exposed, ms", "not hidden"]
        parts = []
        for shape in self.each("shape"):
            rows = []
            for which in PASSES:
                for ranks in sorted(self.each("ranks")):
                    case = {"shape": shape, "ranks": ranks, "pass": which, "impl": "mok"}
                    mok = self.find(routing="balanced", **case)
                    if mok is None:
                        continue
                    times = [number(self.ms(shape, ranks, which, impl), 3) for impl in ways]
                    other, _ = self.best_other(shape, ranks, which)
                    local = self.ms(shape, ranks, which, "mok", "local") if ranks > 1 else None
                    exposed = None if local is None else mok["ms"] - local
                    transfer = mok["ms"] * mok["received_gbps"] / NVLINK_GBPS
                    row = [which, ranks, *times, number(ratio(other, mok["ms"])), mok["received_gbps"]]
                    rows.append(
                        [*row, number(local, 3), number(exposed, 3), number(ratio(exposed, transfer))]
                    )
            parts.append(f"### {shape.label}\n\n{markdown(header, rows)}")
        return "\n\n".join(parts)

    def targets(self) -> str:
        rows = []
        for which, need in (("fwd", 1.8), ("bwd", 1.6)):
            other, name = self.best_other(SHAPES["A"], 8, which)
            found = ratio(other, self.ms(SHAPES["A"], 8, which, "mok"))
            what = f"A (Qwen3-30B), 8 ranks, {which}: best other ({name or 'not measured'}) / mok"
            rows.append([what, f">= {need}", number(found)])
        for shape in ("C", "D"):
            for which in ("fwd", "bwd"):
                one, eight = (self.ms(SHAPES[shape], ranks, which, "mok") for ranks in (1, 8))
                what = f"{shape} (DeepSeek-V3), {which}: rate of 8 ranks / rate of one"
                rows.append([what, ">= 0.85", number(ratio(one, eight))])
        return markdown(["target", "need", "found"], rows)


def transfers(records: list[Record]) -> str:
    header = ["bytes a row", "tokens a rank", "pass", "SMs that move rows", "ms", "GB/s in"]
    rows = []
    for r in records:
        mok, rate = r["impl"] == "mok", r["received_gbps"]
        which = f"mok {r['pass']}" if mok else f"{r['impl']}, the rows once"
        row = [r["hidden"] * 2, r["tokens"], which, (r["comm_sms"] or "all") if mok else "-"]
        row += [number(r["ms"], 4), rate, number(rate / NVLINK_GBPS)]
        rows.append([*row, number(r.get("local_ms"), 4)])
    return markdown([*header, f"of {NVLINK_GBPS}", "local, ms"], rows)


def trainings(results: list[Record]) -> str:
    header = ["other", "steps", "its step, ms", "mok step, ms", "speed-up", "max loss difference"]
    rows = []
    for r in results:
        steps = [number(side["step_ms_median"], 1) for side in (r["a"], r["b"])]
        row = [r["a"]["dispatcher"], len(r["b"]["losses"]), *steps]
        apart = r["max_abs_loss_diff"]
        rows.append([*row, number(r["speedup"]), "-" if apart is None else f"{apart:.3g}"])
    keys = ("gpu", "commit", "torch", "megatron-core", "transformer-engine")
    made = dict.fromkeys(
        ", ".join(f"{key} {r['facts'][key] or 'none'}" for key in keys) for r in results if "facts" in r
    )
    return "\n\n".join([markdown(header, rows), *made])


def death(r: Record) -> str:
    lines = [
        f"Rank {r['killed']} of {r['ranks']} was killed after step {r['at_step']}: torchrun ended after "
        f"{r['seconds']} s with exit code {r['exit_code']}; {r['error']}."
    ]
    if "same_losses" in r:
        same = "the same bits" if r["same_losses"] else "NOT the same bits"
        lines += [f"Losses up to there and those of the run beside alltoall: {same}."]
    return "\n".join(lines + [f"- FAULT: {fault}" for fault in r["faults"]])


def report(folder: Path, name: str) -> str:
    """The whole report in markdown."""

    def load(what: str) -> Any:
        path = folder / f"{name}-{what}.json"
        return json.loads(path.read_text()) if path.exists() else None

    layers, bandwidth, killed = Layers(load("layer") or []), load("bandwidth"), load("killed")
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}-train-ab*.json"))]
    facts: Record = next(iter(layers.records or bandwidth or []), {})
    on = f"{facts.get('gpu')}, driver {facts.get('driver')}, torch {facts.get('torch')}, "
    on += f"commit {facts.get('commit') or 'not said'}"
    dry = "\n\nA dry run on the CPU: it shows that the commands hold, and its figures mean nothing."
    parts = [
        f"# Several GPUs: {name}",
        f"`benchmarks/multi_gpu.sh`, {facts.get('date')}: {on}. Each time is the median over calls of the "
        f"slowest rank's.{dry if facts.get('gpu') == 'none' else ''}",
        "## What ran",
        markdown(["part", "outcome", "s", "date", "commit"], load("parts") or []),
        "## Targets",
        layers.targets(),
        "## One layer",
        LAYER,
        layers.tables() if layers.records else NOT_RUN,
        *(f"Not measured: {line}" for line in layers.absent),
        "## Transfers",
        TRANSFERS,
        transfers(bandwidth) if bandwidth else NOT_RUN,
        "## Training",
        trainings(runs) if runs else NOT_RUN,
        "## A worker that is killed",
        death(killed) if killed else NOT_RUN,
    ]
    return "\n\n".join(parts) + "\n"


def main(argv: list[str]) -> int:
    about = (__doc__ or "").split("\n")[0]
    p = argparse.ArgumentParser("python -m megatron_mok.bench.multi_gpu", description=about)
    p.add_argument("--results", type=Path, required=True, metavar="DIR")
    p.add_argument("--name", required=True, help="results are DIR/NAME-*.json")
    p.add_argument("--output", type=Path, required=True, metavar="F")
    args = p.parse_args(argv)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(report(args.results, args.name))
    print(f"report: {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
