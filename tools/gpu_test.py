"""`make gpu-test`: run everything under tests/gpu and record it in benchmarks/results/gpu-tests.json.

    gpu_test.py [--output FILE] [PYTEST_ARGUMENTS...]
    gpu_test.py --join PART... [--output FILE]

Needs no git: the tree hashes come from build/trees.json, which `make build` writes; the library must name the
same hash of csrc, and the files of megatron_mok must have the other one. Exit status: pytest's; 3 if they do
not or there is no GPU.

A record stands for a complete run: every test that a collection without arguments finds has an outcome. Other
runs write nothing, or into --output FILE a record that says what it lacks. The record of an earlier run is
removed when the first test of a complete run is about to start, so a run that crashes leaves none.

--join makes one record of such parts, where a GPU is lent for less time than all tests take; it needs no GPU.
The parts must be of one build on one kind of GPU with the same packages. A file counts from the part that
ran all of its tests and skipped the fewest, the last of these, and must read as it did then; helper modules
are not compared. Where the same file failed in an earlier part the record says so: failed_before.
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
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "gpu"
RECORD = ROOT / "benchmarks" / "results" / "gpu-tests.json"
OUTCOMES = ("passed", "failed", "skipped")
OF_A_RUN = ("files", "skip_reasons", "incomplete", "parts")  # what a record says beside its facts
File = dict[str, Any]  # counts {passed, failed, skipped}, skip_reasons, missing: tests that did not run, hash


class Recorder:
    """A pytest plugin that counts outcomes by file. A failing setup or teardown counts as failed.

    every: the ids of all tests there are. output: removed where all of them are about to run
    """

    def __init__(self, every: set[str], output: Path) -> None:
        self.every, self.output = every, output
        self.outcome: dict[str, str] = {}  # by test, or by file that could not be collected or skips itself
        self.skip_reasons: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)

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
            self._skipped(report)

    def _skipped(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        place = report.longrepr
        reason = str(place[2]) if isinstance(place, tuple) else str(place)
        self.skip_reasons[file_of(report.nodeid)][reason] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome == "failed":
            self.outcome[report.nodeid] = "failed"
        elif report.outcome == "skipped":
            self.outcome[report.nodeid] = "skipped"
            self._skipped(report)

    def files(self) -> dict[str, File]:
        """What is known of each file of which a test ran."""
        made: dict[str, File] = {}
        for test, outcome in sorted(self.outcome.items()):
            name = file_of(test)
            if name not in made:
                missing = sum(file_of(one) == name and one not in self.outcome for one in self.every)
                counts = dict.fromkeys(OUTCOMES, 0)
                made[name] = {"counts": counts, "skip_reasons": dict(self.skip_reasons[name]),
                              "missing": missing, "hash": blob_hash(ROOT / name)}  # fmt: skip
            made[name]["counts"][outcome] += 1
        return made


def file_of(test: str) -> str:
    return test.split("::")[0]


def blob_hash(path: Path) -> str:
    """git's hash of a file."""
    text = path.read_bytes()
    return hashlib.sha1(b"blob %d\0%s" % (len(text), text)).hexdigest()


def summary(files: dict[str, File]) -> dict[str, Any]:
    """{files: {passed, failed, skipped} by file, skip_reasons}."""
    reasons: collections.Counter[str] = collections.Counter()
    for file in files.values():
        reasons.update(file["skip_reasons"])
    return {"files": {name: file["counts"] for name, file in files.items()}, "skip_reasons": dict(reasons)}


def join(parts: list[dict[str, Any]], every: set[str]) -> dict[str, Any]:
    """One record of parts. SystemExit(3) unless they make up a complete run of one build."""
    parts = sorted(parts, key=lambda part: part["date"])
    troubles = []
    for what in sorted({key for part in parts for key in part} - {"date", *OF_A_RUN}):
        if any(part.get(what) != parts[0].get(what) for part in parts):
            troubles.append(f"{what} differs: {', '.join(str(part.get(what)) for part in parts)}")
    files: dict[str, File] = {}
    failed: dict[str, int] = {}
    for part in parts:
        for name, file in part["parts"].items():
            known = files.get(name)
            if known and known["hash"] == file["hash"] and known["counts"]["failed"]:
                failed[name] = known["counts"]["failed"]
            if not file["missing"] and (
                known is None
                or known["hash"] != file["hash"]
                or file["counts"]["skipped"] <= known["counts"]["skipped"]
            ):
                files[name] = file
    for name, count in sorted(collections.Counter(map(file_of, every)).items()):
        if name not in files:
            troubles.append(f"{name}: no part has all of its {count} tests")
        elif sum(files[name]["counts"].values()) != count or files[name]["hash"] != blob_hash(ROOT / name):
            troubles.append(f"{name}: has changed since its tests ran")
    if troubles:
        print("gpu-test: --join: " + "; ".join(troubles), file=sys.stderr)
        raise SystemExit(3)
    facts = {name: value for name, value in parts[-1].items() if name not in OF_A_RUN}
    return facts | summary(dict(sorted(files.items()))) | ({"failed_before": failed} if failed else {})


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
            entries.append((path.name.encode(), b"100644", bytes.fromhex(blob_hash(path))))
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


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


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
        "megatron-core": version("megatron-core"),
        "transformer-engine": version("transformer-engine"),
        "trees": trees(),
    }


def write(output: Path, record: dict[str, Any]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(output.name + ".new")
    temporary.write_text(json.dumps(record, indent=2) + "\n")
    temporary.replace(output)
    print(f"wrote {output}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, help=f"default: {RECORD.relative_to(ROOT)}")
    parser.add_argument("--join", type=Path, nargs="+", metavar="PART", help="records of parts, oldest first")
    options, selection = parser.parse_known_args()
    output = options.output or RECORD
    if options.join:
        if selection:
            parser.error(f"--join: got {' '.join(selection)} too, need nothing else but --output")
        parts = []
        for file in options.join:
            try:
                parts.append(json.loads(file.read_text()))
            except (OSError, ValueError) as error:
                parser.error(f"--join: {file}: {error}")
            if "parts" not in parts[-1]:
                parser.error(f"--join: {file}: not the record of a part, which `--output FILE` writes")
        write(output, join(parts, every_test()))
        return 0
    record = facts()
    recorder = Recorder(every_test(), output)
    status = pytest.main(
        [str(TESTS), f"--rootdir={ROOT}", "--continue-on-collection-errors", *selection], plugins=[recorder]
    )
    lacks = recorder.lacks(status)
    if lacks and not options.output:
        print(f"gpu-test: {lacks}, so nothing is recorded (--output FILE records a part)")
        return int(status)
    files = recorder.files()
    record |= summary(files)
    if lacks:
        record |= {"incomplete": lacks, "parts": files}
    write(output, record)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
