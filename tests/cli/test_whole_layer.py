"""benchmarks/whole_layer.py on the CPU back end: both sides agree, and a side that is wrong is said."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# the script, with experts of mok's that forget the routing weights of the first expert
WRONG = """
import runpy, sys
from megatron_mok import runtime
moe = runtime.moe
def wrong(x, ids, p, *args, **options):
    return moe(x, ids, p * (ids != 0), *args, **options)
runtime.moe = wrong
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command, "--experts", "sequential", "--shape", "48,64,32,8,2", "--reps", "2"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )


def test_both_sides_are_timed(tmp_path):
    out = tmp_path / "whole.json"
    done = run(str(ROOT / "benchmarks/whole_layer.py"), "--json", str(out), "--commit", "c0ffee")
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads(out.read_text())
    assert made["facts"]["commit"] == "c0ffee" and made["facts"]["megatron-core"]
    baseline, ours = made["records"]
    assert (baseline["experts"], ours["experts"]) == ("SequentialMLP", "MokSequentialMLP")
    assert all(0 < r["fwd_ms"] < r["step_ms"] for r in made["records"])
    assert ours["alltoall_over_mok_step_ms"] == pytest.approx(baseline["step_ms"] / ours["step_ms"], abs=1e-3)
    assert 0 < ours["largest_distance"] < 2e-2 and made["troubles"] == []


def test_a_side_that_is_wrong_is_not_timed():
    done = run("-c", WRONG, str(ROOT / "benchmarks/whole_layer.py"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "TROUBLE" in done.stdout and ": out: " in done.stdout and " fwd " not in done.stdout
