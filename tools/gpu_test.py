"""`make gpu-test`: run everything under tests/gpu and record it in benchmarks/results/gpu-tests.json.

    gpu_test.py [--output FILE] [PYTEST_ARGUMENTS...]

Needs no git: the tree hashes come from build/trees.json, which `make build` writes, and the library must name
the same hash of csrc. Exit status: pytest's; 3 if the library and that file disagree or there is no GPU.
A run of a part of the tests is only recorded if --output is given.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import datetime
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "gpu"
RECORD = ROOT / "benchmarks" / "results" / "gpu-tests.json"
OUTCOMES = ("passed", "failed", "skipped")


class Recorder:
    """A pytest plugin that counts outcomes by file. A failing setup or teardown counts as failed."""

    def __init__(self) -> None:
        self.outcome: dict[str, str] = {}  # by test
        self.skip_reasons: collections.Counter[str] = collections.Counter()
        self.deselected = False
        self.complete = False  # did every test run?

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.deselected = True

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.complete = (
            not self.deselected
            and session.config.args == [str(TESTS)]
            and len(self.outcome) >= session.testscollected
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            worse = self.outcome.get(report.nodeid) == "failed"
            self.outcome[report.nodeid] = "failed" if worse else report.outcome
        if report.outcome == "skipped":
            place = report.longrepr
            self.skip_reasons[str(place[2]) if isinstance(place, tuple) else str(place)] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome == "failed":
            self.outcome[report.nodeid] = "failed"
        elif report.outcome == "skipped":
            self.outcome[report.nodeid] = "skipped"
            place = report.longrepr
            self.skip_reasons[str(place[2]) if isinstance(place, tuple) else str(place)] += 1

    def files(self) -> dict[str, dict[str, int]]:
        counts: dict[str, dict[str, int]] = {}
        for test, outcome in self.outcome.items():
            counts.setdefault(test.split("::")[0], dict.fromkeys(OUTCOMES, 0))[outcome] += 1
        return dict(sorted(counts.items()))


def trees() -> dict[str, str]:
    """The hashes of the build; SystemExit(3) unless the library was built from that csrc."""
    file = ROOT / "build" / "trees.json"
    if not file.exists():
        print(
            "gpu-test: no build/trees.json, so nothing says what would be tested; run make build",
            file=sys.stderr,
        )
        raise SystemExit(3)
    recorded = json.loads(file.read_text())
    library = ctypes.CDLL(str(ROOT / "megatron_mok" / "native" / "libmegatron_mok.so"))
    library.mok_build_info.restype = ctypes.c_char_p
    inside = json.loads(library.mok_build_info())["csrc_tree"]
    if inside != recorded["csrc"]:
        print(
            f"gpu-test: the library was built from csrc {inside or 'unrecorded'}, build/trees.json says "
            f"{recorded['csrc']}; run make build",
            file=sys.stderr,
        )
        raise SystemExit(3)
    return recorded


def driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    return done.stdout.splitlines()[0].strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, help=f"default: {RECORD.relative_to(ROOT)}")
    options, selection = parser.parse_known_args()
    if not torch.cuda.is_available():
        print("gpu-test: no GPU that torch can use; tests/gpu need one", file=sys.stderr)
        return 3
    recorder = Recorder()
    record: dict[str, object] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "driver": driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "trees": trees(),
    }
    arguments = [
        str(TESTS),
        f"--rootdir={ROOT}",
        "--continue-on-collection-errors",
        *selection,
    ]
    status = pytest.main(arguments, plugins=[recorder])
    record |= {"files": recorder.files(), "skip_reasons": dict(recorder.skip_reasons)}
    output = options.output or (RECORD if recorder.complete else None)
    if output is None:
        print("gpu-test: not every test ran, so nothing is recorded (--output FILE records a part)")
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(record, indent=2) + "\n")
        print(f"wrote {output}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
