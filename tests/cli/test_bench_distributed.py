"""The layer benchmark over processes: two ranks on the CPU, mok beside torch's all-to-all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_mok.bench import distributed
from megatron_mok.bench.cases import Shape

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [sys.executable, *launch, "-m", "megatron_mok.bench.distributed", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    file = tmp_path_factory.mktemp("distributed") / "records.json"
    shapes = ["24,64,32,8,2", "16,64,32,4,3"]
    done = run("--shape", *shapes, "--comm-sms", "4", "--reps", "3", "--commit", "abc", "--json", str(file))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads(file.read_text())


def test_records_of_both_implementations_that_agree(measured):
    """It measures nothing where they differ, see `difference`."""
    _, records = measured
    first = [r for r in records if r["shape"]["T"] == 24 and not r["notes"].startswith("comm_sms")]
    seen = {(r["impl"], r["routing"], r["pass"]) for r in first}
    passes = ("fwd", "bwd", "bwd_acc32")
    ways = [(impl, routing) for impl in ("alltoall", "mok") for routing in ("balanced", "local")]
    assert seen == {(*way, which) for way in ways for which in passes}
    for r in first:
        assert (r["ranks"], r["commit"]) == (2, "abc")
        assert r["routing"] == "balanced" or r["received_gbps"] == 0


def test_what_a_shape_does_not_allow_is_said(measured):
    out, records = measured
    assert "not measured: T16 H64 I32 E4 K3, local: a rank has fewer experts than K" in out
    assert {r["routing"] for r in records if r["shape"]["T"] == 16} == {"balanced"}


def test_communication_sms_are_swept(measured):
    out, records = measured
    swept = [r for r in records if r["notes"] == "comm_sms 4"]
    assert [r["impl"] for r in swept] == ["mok", "mok"] and "GB/s received" in out


def test_experts_that_do_not_divide_are_refused():
    done = run("--shape", "8,64,32,3,1")
    assert "got E = 3 for 2 ranks, need a multiple of the ranks" in done.stderr
    assert done.returncode != 0


def test_bytes_from_other_ranks():
    """As performance.md has them: T * K * H * 2 * (R - 1) / R a transfer; x and y, or x, dy and dx."""
    shape = Shape(8192, 2048, 768, 128, 8)
    assert distributed.remote_bytes(shape, 8, "fwd") == 2 * 8192 * 8 * 2048 * 2 * 7 // 8
    assert distributed.remote_bytes(shape, 8, "bwd") == 3 * 8192 * 8 * 2048 * 2 * 7 // 8
    assert distributed.remote_bytes(shape, 1, "bwd") == 0


def test_script_for_several_gpus_says_what_it_needs():
    nowhere = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable, "PARTS": "layer"}
    done = subprocess.run(
        ["bash", "benchmarks/multi_gpu.sh"], cwd=ROOT, env=nowhere, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "got 0 GPUs, need 2 or more" in done.stderr
