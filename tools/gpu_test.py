"""`make gpu-test`: run everything under tests/gpu and record it in benchmarks/results/gpu-tests.json.

    gpu_test.py [--output FILE] [PYTEST_ARGUMENTS...]

Needs no git: the tree hashes come from build/trees.json, which `make build` writes; the library must name the
same hash of csrc, and the files of megatron_mok must have the other one. Exit status: pytest's; 3 if they do
not or there is no GPU.

A record stands for a complete run: every test that a collection without arguments finds has an outcome. Other
runs write nothing, or into --output FILE a record that says what it lacks. The record of an earlier run is
removed when the first test of a complete run is about to start, so a run that crashes leaves none.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import datetime
import hashlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "gpu"
RECORD = ROOT / "benchmarks" / "results" / "gpu-tests.json"
OUTCOMES = ("passed", "failed", "skipped")


class Recorder:
    """A pytest plugin that counts outcomes by file. A failing setup or teardown counts as failed.

    every: the ids of all tests there are. output: removed where all of them are about to run
    """

    def __init__(self, every: set[str], output: Path) -> None:
        self.every, self.output = every, output
        self.outcome: dict[str, str] = {}  # by test, or by file that could not be collected or skips itself
        self.skip_reasons: collections.Counter[str] = collections.Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if self.every == {item.nodeid for item in session.items} and not session.config.option.collectonly:
            self.output.unlink(missing_ok=True)

    def lacks(self, status: int) -> str | None:
        """Why this was not a complete run."""
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return f"pytest ended with {pytest.ExitCode(status).name}"
        ran = {test for test in self.outcome if "::" in test}
        if ran != self.every:
            return (
                f"{len(self.every & ran)} of {len(self.every)} tests ran, and {len(ran - self.every)} others"
            )
        return None

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


def every_test() -> set[str]:
    """The ids that pytest finds when nobody tells it what to leave out. SystemExit(3) where it finds none."""
    command = [sys.executable, "-m", "pytest", str(TESTS), f"--rootdir={ROOT}", "--collect-only", "-q"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(
        [*command, "--continue-on-collection-errors", "-p", "no:cacheprovider"],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    tests = {line for line in itertools.takewhile(str.strip, done.stdout.splitlines()) if "::" in line}
    if not tests:
        print(f"gpu-test: no test was found:\n{done.stdout[-2000:]}{done.stderr[-2000:]}", file=sys.stderr)
        raise SystemExit(3)
    return tests


def git_tree(folder: Path) -> str | None:
    """The hash that git has for a folder of plain files; None for one without files. Leaves out what
    .gitignore does.
    """
    entries = []
    for path in folder.iterdir():
        if path.name in ("__pycache__", ".mypy_cache", ".ruff_cache") or path.suffix == ".so":
            continue
        if not path.is_dir():
            text = path.read_bytes()
            digest = hashlib.sha1(b"blob %d\0%s" % (len(text), text)).digest()
            entries.append((path.name.encode(), b"100644", digest))
        elif tree := git_tree(path):
            entries.append((path.name.encode() + b"/", b"40000", bytes.fromhex(tree)))
    entries.sort()
    text = b"".join(b"%s %s\0%s" % (mode, name.rstrip(b"/"), digest) for name, mode, digest in entries)
    return hashlib.sha1(b"tree %d\0%s" % (len(text), text)).hexdigest() if entries else None


def trees() -> dict[str, str]:
    """The hashes of the build; SystemExit(3) unless library and package are of them."""
    file, library = ROOT / "build" / "trees.json", ROOT / "megatron_mok" / "native" / "libmegatron_mok.so"
    if not (file.exists() and library.exists()):
        print(
            "gpu-test: no build/trees.json or library, so nothing says what would be tested; run make build",
            file=sys.stderr,
        )
        raise SystemExit(3)
    recorded = json.loads(file.read_text())
    info = ctypes.CDLL(str(library)).mok_build_info
    info.restype = ctypes.c_char_p
    found = {"csrc": json.loads(info())["csrc_tree"], "megatron_mok": git_tree(ROOT / "megatron_mok")}
    for name, tree in found.items():
        if tree != recorded[name]:
            print(
                f"gpu-test: {name} is {tree or 'unrecorded'}, build/trees.json says {recorded[name]}; "
                "run make build",
                file=sys.stderr,
            )
            raise SystemExit(3)
    return recorded


def driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    return done.stdout.splitlines()[0].strip()


def facts() -> dict[str, object]:
    """What was tested, on what; SystemExit(3) where there is no GPU or no such build."""
    import torch

    if not torch.cuda.is_available():
        print("gpu-test: no GPU that torch can use; tests/gpu need one", file=sys.stderr)
        raise SystemExit(3)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "driver": driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "trees": trees(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, help=f"default: {RECORD.relative_to(ROOT)}")
    options, selection = parser.parse_known_args()
    record = facts()
    output = options.output or RECORD
    recorder = Recorder(every_test(), output)
    status = pytest.main(
        [str(TESTS), f"--rootdir={ROOT}", "--continue-on-collection-errors", *selection], plugins=[recorder]
    )
    lacks = recorder.lacks(status)
    if lacks and not options.output:
        print(f"gpu-test: {lacks}, so nothing is recorded (--output FILE records a part)")
        return int(status)
    record |= {"files": recorder.files(), "skip_reasons": dict(recorder.skip_reasons)}
    if lacks:
        record["incomplete"] = lacks
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(output.name + ".new")
    temporary.write_text(json.dumps(record, indent=2) + "\n")
    temporary.replace(output)
    print(f"wrote {output}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
