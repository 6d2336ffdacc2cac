"""Build libmegatron_mok.so from the committed sources and put it beside megatron_mok/native.

    build.py [--dirty] [--optional] [--arch 90a ...]

Refuses a csrc or megatron_mok with changes that git has not recorded, since the library carries the git tree
hash of csrc and the GPU test record names both; writes them to build/trees.json. Runs the host C++ tests and
holds the kernels against csrc/budget.json. --dirty is for the edit-run loop: it builds what is there, records
no hash, removes build/trees.json and checks nothing. --optional is for the install: it succeeds without nvcc.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "cmake"
TREES = ROOT / "build" / "trees.json"
RECORDED = ("csrc", "megatron_mok")


def git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"build: git {' '.join(args)}: {done.stderr.strip()}; need a git checkout (or --dirty)")
    return done.stdout


def tree_hashes() -> dict[str, str]:
    changed = git("status", "--porcelain", "--", *RECORDED).splitlines()
    if changed:
        sys.exit("build: uncommitted changes; commit, or pass --dirty:\n" + "\n".join(changed))
    return {path: git("rev-parse", f"HEAD:{path}").strip() for path in RECORDED}


def tool(name: str) -> str:
    """The tool of this environment if it has one, else the one on PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    return found or sys.exit(f"build: {name} not found; need it on PATH or in the environment (make venv)")


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT)
    if done.returncode:
        sys.exit(f"build: failed: {' '.join(command)}")


def compiler_found() -> bool:
    """Whether CMake found nvcc (or was told to do without)."""
    cached = re.search(r"^MOK_NVCC:\w+=(.*)$", (BUILD / "CMakeCache.txt").read_text(), flags=re.M)
    return cached is not None and cached[1] not in ("OFF", "MOK_NVCC-NOTFOUND")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dirty", action="store_true", help="build uncommitted sources, record nothing")
    parser.add_argument("--optional", action="store_true", help="succeed without nvcc")
    parser.add_argument("--arch", nargs="+", help="instead of MOK_ARCHS or all of 90a 100a 103a")
    options = parser.parse_args()

    TREES.unlink(missing_ok=True)
    trees = {} if options.dirty else tree_hashes()
    archs = " ".join(options.arch) if options.arch else os.environ.get("MOK_ARCHS") or "90a 100a 103a"
    run(
        tool("cmake"), "-S", ".", "-B", str(BUILD), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        "-DCMAKE_BUILD_TYPE=Release", f"-DMOK_BUILD_TESTS={not options.dirty}",
        f"-DMOK_ARCHS={archs.replace(' ', ';')}",
        f"-DMOK_CSRC_TREE={trees.get('csrc', '')}", f"-DPython3_EXECUTABLE={sys.executable}",
    )  # fmt: skip
    if not compiler_found():
        print("megatron-mok: no nvcc, no CUDA library (CPU back end; with a GPU: get nvcc, then make build)")
        sys.exit(0 if options.optional else 1)
    run(tool("cmake"), "--build", str(BUILD))
    run(tool("cmake"), "--install", str(BUILD), "--prefix", str(ROOT), "--component", "library")
    if not options.dirty:
        run(tool("ctest"), "--test-dir", str(BUILD), "--output-on-failure")
        run(sys.executable, "tools/ptxas_report.py", "check", str(BUILD), "csrc/budget.json")
        TREES.write_text(json.dumps(trees, indent=2) + "\n")
    recorded = trees.get("csrc", "not recorded")
    print(f"built megatron_mok/native/libmegatron_mok.so for {archs}, csrc tree {recorded}")


if __name__ == "__main__":
    main()
