"""benchmarks/multi_gpu.sh and what it runs, on the CPU: two ranks, mok, torch's all-to-all, stand-ins.

What trains is tried by DRY=1 as a whole, and by test_ab_training; ranks that are killed by test_ends.
"""

import argparse
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from megatron_mok.bench import across, distributed, killed, multi_gpu
from megatron_mok.bench.ab import Training
from megatron_mok.bench.cases import SHAPES, Shape

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = Path(__file__).with_name("stand_ins")


def script(**variables):
    return subprocess.run(
        ["bash", "benchmarks/multi_gpu.sh"],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    """(what the script said, its folder) with DeepEP's stand-in to be found."""
    folder = tmp_path_factory.mktemp("dry")
    into = {name: str(folder) for name in ("RESULTS", "REPORTS", "RUNS", "PYTHONPATH")}
    into["PYTHONPATH"] = str(STAND_INS)
    done = script(DRY="1", PARTS="layer bandwidth report", COMMIT="abc", **into)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout, folder


def records(dry, what):
    return json.loads((dry[1] / f"dry-x2-{what}.json").read_text())


def test_records_of_all_ways_that_agree(dry):
    """What differs from alltoall is not measured (Bench.layer), so the adapters suit the stand-in."""
    seen = {(r["impl"], r["routing"], r["pass"]) for r in records(dry, "layer") if "absent" not in r}
    ways = [("mok", "local"), *((impl, "balanced") for impl in ("alltoall", "mok", *across.PEERS))]
    assert seen == {(*way, which) for way in ways for which in ("fwd", "bwd", "bwd_acc32")}
    for r in records(dry, "layer"):
        assert (r["ranks"], r["commit"]) == (2, "abc")
        assert "absent" in r or r["routing"] == "balanced" or r["received_gbps"] == 0


def test_who_is_absent_is_said(dry):
    out, folder = dry
    assert [r["impl"] for r in records(dry, "layer") if "absent" in r] == ["ligermoe"]
    assert "not measured: ligermoe: no adapter" in out
    assert "Not measured: ligermoe: no adapter" in (folder / "dry-x2.md").read_text()


def test_why_a_peer_cannot_take_part():
    reasons = across.absent()
    for name, attribute in (("deepep", "DeepEP"), ("hybridep", "hybrid-ep branch")):
        assert attribute in reasons[name] and "found: ModuleNotFoundError" in reasons[name]


def test_bandwidth_by_size_and_comm_sms(dry):
    made = records(dry, "bandwidth")
    seen = {(r["hidden"], r["tokens"], r["comm_sms"], r["pass"]) for r in made if r["impl"] == "mok"}
    assert seen == {
        (64, tokens, sms, which) for tokens in (16, 64) for sms in (0, 4) for which in ("fwd", "bwd")
    }
    assert [r["pass"] for r in made if r["impl"] == "alltoall"] == ["transfer"] * 2
    assert all(r["local_ms"] for r in made if r["impl"] == "mok")


def test_report_has_what_there_is_and_names_the_rest(dry):
    text = (dry[1] / "dry-x2.md").read_text()
    assert "its figures mean nothing" in text and "| layer, 2 ranks | done |" in text
    assert "### T24 H64 I32 E8 K2" in text and "| 128 | 64 | mok bwd | 4 |" in text
    assert text.count(multi_gpu.NOT_RUN) == 2  # training, and the worker that is killed


def test_report_keeps_the_parts_of_earlier_calls(dry):
    """And says of trainings what they were."""
    a, b = {"dispatcher": "alltoall", "step_ms_median": 2.0}, {"losses": [1.0], "step_ms_median": 1.0}
    facts = {"gpu": None, **dict.fromkeys(("commit", "torch", "megatron-core", "transformer-engine"), "x")}
    made = {"a": a, "b": b, "facts": facts}
    made |= {"max_abs_loss_diff": 0.0, "speedup": 2.0}
    (dry[1] / "dry-x2-train-ab.json").write_text(json.dumps(made))
    into = {name: str(dry[1]) for name in ("RESULTS", "REPORTS", "RUNS")}
    assert script(DRY="1", PARTS="report", COMMIT="def", **into).returncode == 0
    text = (dry[1] / "dry-x2.md").read_text()
    assert "| layer, 2 ranks | done |" in text and "gpu none, commit x, torch x, megatron-core x" in text


def layer_record(shape, ranks, impl, which, ms, routing="balanced", gbps=0.0):
    case = {"shape": vars(SHAPES[shape]), "ranks": ranks, "impl": impl, "pass": which, "routing": routing}
    return {**case, "ms": ms, "received_gbps": gbps}


def test_targets_and_exposed_communication():
    """225 GB/s over 4 ms are 2 ms at 450; 1 ms of them is exposed."""
    made = [
        layer_record("A", 8, "mok", "fwd", 4.0, gbps=225.0),
        layer_record("A", 8, "mok", "fwd", 3.0, "local"),
        layer_record("A", 8, "alltoall", "fwd", 9.0),
        layer_record("A", 8, "deepep", "fwd", 8.0),
        *(layer_record("C", ranks, "mok", "bwd", ms) for ranks, ms in ((1, 4.5), (8, 5.0))),
    ]
    layers = multi_gpu.Layers([*made, {"impl": "x", "absent": "gone", "ranks": 8}])
    assert "8 ranks, fwd: best other (deepep) / mok | >= 1.8 | 2.00 |" in layers.targets()
    assert "C (DeepSeek-V3), bwd: rate of 8 ranks / rate of one | >= 0.85 | 0.90 |" in layers.targets()
    assert "D (DeepSeek-V3), fwd: rate of 8 ranks / rate of one | >= 0.85 | - |" in layers.targets()
    assert "| fwd | 8 | 4.000 | 9.000 | 8.000 | 2.00 | 225.0 | 3.000 | 1.000 | 0.50 |" in layers.tables()


def test_experts_that_do_not_divide_are_refused():
    bench = types.SimpleNamespace(ranks=2, baseline=False, leave_out=lambda *_: None)
    args = argparse.Namespace(bandwidth=False, shape=["8,64,32,3,1"])
    with pytest.raises(ValueError, match="got E = 3 for 2 ranks, need a multiple of the ranks"):
        distributed.run(args, bench)


def test_bytes_from_other_ranks():
    """As performance.md has them: T * K * H * 2 * (R - 1) / R a transfer; x and y, or x, dy and dx."""
    shape = Shape(8192, 2048, 768, 128, 8)
    assert distributed.remote_bytes(shape, 8, "fwd") == 2 * 8192 * 8 * 2048 * 2 * 7 // 8
    assert distributed.remote_bytes(shape, 8, "bwd") == 3 * 8192 * 8 * 2048 * 2 * 7 // 8
    assert distributed.remote_bytes(shape, 1, "bwd") == 0


@pytest.mark.parametrize("experts", [32, 8])
def test_local_routing_gives_each_expert_here_the_same(experts):
    """Also where a rank has fewer experts than a token has routes."""
    inputs = across.rank_inputs(Shape(12, 16, 8, experts, 4), "local", 2, 4, "cpu", 0)
    local = experts // 4
    counts = torch.bincount(inputs.ids.reshape(-1).long(), minlength=experts)
    assert counts.tolist() == [48 // local if 2 * local <= e < 3 * local else 0 for e in range(experts)]


def test_script_for_several_gpus_says_what_it_needs():
    done = script(CUDA_VISIBLE_DEVICES="", PARTS="layer")
    assert done.returncode == 2 and "got 0 GPUs, need 2 or more" in done.stderr
    done = script(DRY="1", PARTS="layer speed")
    assert done.returncode == 2 and "PARTS: got speed, need some of tests layer" in done.stderr


@pytest.mark.parametrize(
    "parts, seconds",
    [
        ("tests layer bandwidth report", 0),
        ("train killed report", 0),
        ("peers report", 0),
        ("tests layer train", 540),
    ],
)
def test_a_call_has_time_for_all_of_its_parts(tmp_path, parts, seconds):
    """Eight GPUs, as a stand-in of python says, whose every command ends at once."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\ncase $2 in *device_count*) echo 8 ;; esac\n")
    python.chmod(0o755)
    into = {name: str(tmp_path) for name in ("RESULTS", "REPORTS", "RUNS")}
    done = script(PYTHON=str(python), PARTS=parts, **into)
    assert done.returncode == (2 if seconds else 0), done.stderr
    assert not seconds or f"may take {seconds} s, need at most 490 s; remedy: several calls" in done.stderr


# ---- a worker that is killed


class Plain(Training):
    """torchrun on a script that is no training."""

    def command(self, flags, steps, metrics, observed):
        return [*self.launcher, self.script, str(metrics)]


COUNTS = """
import json, os, sys, time
step = 0
while True:
    time.sleep(0.05)
    step += 1
    if os.environ["RANK"] == "0":
        print(json.dumps({"step": step, "loss": 1 / step}), file=open(sys.argv[1], "a"))
"""


def test_torchrun_ends_and_names_the_rank_that_was_killed(tmp_path):
    (tmp_path / "counts.py").write_text(COUNTS)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    job = Plain(torchrun, str(tmp_path / "counts.py"), (), ranks=2, here=2, gpus=0)
    found = killed.run(job, 3, 10, tmp_path, 100)
    assert killed.faults(found, [1.0, 0.5, 1 / 3], 40) == [] and found["same_losses"]
    assert (found["killed"], found["error"]) == (1, "rank 1 ended with exit code -9")


def test_what_is_wrong_after_a_kill_is_said():
    found = {
        "killed": 1,
        "exit_code": 0,
        "seconds": 50.0,
        "error": None,
        "survivors": 1,
        "losses": [1.0, 2.0],
    }
    text = "\n".join(killed.faults(found, [1.0, 2.5, 3.0], 40))
    for part in (
        "exit code: got 0",
        "got 50.0, need at most 40",
        "error: got None",
        "live on: got 1",
        "2 steps",
    ):
        assert part in text
