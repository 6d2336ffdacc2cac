"""mok ab for real: tiny model, real text, two expert-parallel ranks over gloo; and its command line."""

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from megatron_mok import cli
from megatron_mok.bench import killed, training
from megatron_mok.cli import ab as command

SMALL = ["--nproc-per-node", "2", "--seq-length", "64", "--global-batch-size", "2", "--num-layers", "2"]
SMALL += ["--moe-layer-freq", "([0]*1+[1]*1)"]


@pytest.mark.timeout(700)  # two runs of 15 s on two idle cores
def test_mok_against_alltoall(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "ab.json"
    argv = [
        "ab",
        "--baseline",
        "alltoall",
        "--steps",
        "4",
        "--no-repeat",
        "--json",
        str(out),
        "--timeout",
        "300",
    ]
    argv += ["--runs", str(tmp_path / "runs"), "--plot", str(tmp_path / "ab.png"), "--commit", "abc"]
    assert cli.main([*argv, "--", *SMALL]) == 0, capfd.readouterr().err
    result = json.loads(out.read_text())
    a, b = result["a"], result["b"]
    assert (a["dispatcher"], b["dispatcher"]) == ("alltoall", "mok")
    assert len(a["losses"]) == len(b["losses"]) == 4 and a["losses"][0] > a["losses"][-1] > 0
    assert 0 <= result["max_abs_loss_diff"] <= 1e-6  # fp32 on a machine without a GPU
    assert a["losses"] != a["grad_norms"] and b["grad_norms"][0] == pytest.approx(
        a["grad_norms"][0], rel=1e-5
    )
    assert result["speedup"] == pytest.approx(a["step_ms_median"] / b["step_ms_median"])
    for side in (a, b):
        assert 0 < side["moe_ms_median"] < side["step_ms_median"]
        assert side["tokens_per_s_per_gpu"] == pytest.approx(
            2 * 64 / side["step_ms_median"] * 1e3 / 2, rel=0.5
        )
        assert side["energy_j_per_step"] is None and side["peak_memory_bytes"] is None
    facts = result["facts"]
    assert (facts["commit"], facts["flags"]["b"]) == ("abc", "--moe-token-dispatcher-type mok")
    assert facts["torch"] == torch.__version__ and facts["megatron-core"] == metadata.version("megatron-core")
    assert "examples/pretrain.py" in facts["command"] and "--num-layers 2" in facts["command"]
    assert facts["command"].endswith("--train-iters 4") and sys.executable not in facts["command"]
    assert (tmp_path / "ab.png").stat().st_size > 1000
    assert "speedup (a / b step time)" in capfd.readouterr().out


def test_facts_of_a_gpu(monkeypatch):
    monkeypatch.setattr(command.Machine, "smi", lambda self: [{"name": "another", "driver": "580.159.04"}])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    words = [sys.executable, "-m", "x", str(Path.cwd() / "examples" / "a b.py")]
    found = command.facts(words, "abc")
    assert (found["gpu"], found["driver"], found["commit"]) == ("NVIDIA H200", "580.159.04", "abc")
    assert found["command"] == "python -m x 'examples/a b.py'"


# ---- what is refused, and the command that is made


@pytest.mark.parametrize(
    "steps, said",
    [
        (None, "got no .*, need it: what `te` leaves"),
        (2, 'STEPS: got 3, need 2, .*remedy: STEPS=2, or PARTS="te'),
    ],
)
def test_noise_needs_as_many_steps_as_what_it_is_compared_with(tmp_path, steps, said):
    if steps:
        (tmp_path / "h200-train-ab.json").write_text(json.dumps({"a": {"losses": [1.0] * steps}}))
    into = {name: str(tmp_path) for name in ("RESULTS", "REPORTS", "RUNS")}
    done = subprocess.run(
        ["bash", "benchmarks/h200_train_ab.sh"],
        cwd=training.CHECKOUT,
        env={**os.environ, **into, "PYTHON": sys.executable, "PARTS": "noise", "STEPS": "3"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and re.search(said, done.stderr) and "Traceback" not in done.stderr


def refused(argv, capsys):
    assert command.run(argv) == 2
    return capsys.readouterr().err


def test_baseline_that_is_not_installed(capsys):
    said = refused(["--baseline", "hybridep"], capsys)
    assert "hybridep: needs NVIDIA GPUs and DeepEP's hybrid-ep branch" in said and "found:" in said


def test_bad_command_lines(capsys, monkeypatch):
    assert "--steps: got 1" in refused(["--baseline", "alltoall", "--steps", "1"], capsys)
    assert "need torchrun" in refused(["--baseline", "alltoall", "--", "torchrun", "--x"], capsys)
    monkeypatch.setattr(training, "prepare_text", lambda folder: folder / "stdlib")
    said = refused(["--baseline", "alltoall", "--config", "gpt-17"], capsys)
    assert "--config: got 'gpt-17'" in said and "deepseek-v3" in said
    with pytest.raises(SystemExit) as exit_:
        command.run(["--baseline", "fastest"])
    assert exit_.value.code == 2
    monkeypatch.setattr(command.ab, "matplotlib_missing", lambda: "--plot: matplotlib is not installed")
    assert "matplotlib" in refused(["--baseline", "alltoall", "--plot", "x.png"], capsys)


def test_the_training_is_the_users_command_or_the_built_in_one(monkeypatch, capsys):
    assert training.choose("tiny", ["torchrun", "a.py", "--lr", "1"]).script == "a.py"
    made = []
    monkeypatch.setattr(training, "prepare_text", lambda folder: made.append(folder) or folder / "stdlib")
    for words in ([], ["--nproc-per-node", "2", "--lr", "1"]):
        job = training.choose("tiny", words)
        assert job.script.endswith("examples/pretrain.py")
    assert (job.ranks, job.args[-2:], len(made)) == (2, ("--lr", "1"), 2)
    assert killed.main(["--", "torchrun", "--x"]) == 2
    assert "bench.killed: training command: got 'torchrun --x', need torchrun" in capsys.readouterr().err


def test_another_text_has_another_cache(tmp_path):
    caches = []
    for sha256 in ("a" * 64, "b" * 64, "a" * 64):
        (tmp_path / "stdlib.json").write_text(json.dumps({"sha256": sha256}))
        words = training.default_command("tiny", [], 0, tmp_path / "stdlib")
        caches.append(words[words.index("--data-cache-path") + 1])
    assert caches[0] != caches[1] and caches[0] == caches[2]


def test_built_in_command_without_and_with_gpus(tmp_path):
    words = training.default_command("tiny", ["--nproc-per-node=2", "--lr", "1"], 0, tmp_path / "stdlib")
    text = " ".join(words)
    assert "-m torch.distributed.run --nproc-per-node=2 --standalone -m megatron_mok.launch" in text
    assert "--expert-model-parallel-size 2" in text and "--distributed-backend gloo" in text
    assert "--bf16" not in words and words[-2:] == ["--lr", "1"]  # the user's word is the last
    on_gpus = training.default_command("tiny", [], 6, tmp_path / "stdlib")
    assert "--nproc-per-node 4" in " ".join(on_gpus) and "--bf16" in on_gpus
    assert [training.default_ranks(n) for n in (0, 1, 2, 3, 8, 72)] == [4, 1, 2, 2, 8, 8]


def test_torchrun_options_are_told_from_training_arguments():
    words = "--nnodes 2 --seq-length 64 --master_addr=a --swiglu --node-rank 1 --lr 1".split()
    mine, rest = training.split_torchrun(words)
    assert " ".join(mine) == "--nnodes 2 --master_addr=a --node-rank 1"
    assert " ".join(rest) == "--seq-length 64 --swiglu --lr 1"


def test_config_may_be_a_file(tmp_path):
    file = tmp_path / "model.json"
    file.write_text(json.dumps({"flags": {"swiglu": True, "num-layers": 2}}))
    assert training.model_flags(str(file)) == ["--swiglu", "--num-layers", "2"]
    file.write_text("[]")
    with pytest.raises(ValueError, match="need one"):
        training.model_flags(str(file))
    assert "--num-experts" in training.model_flags("deepseek-v3")


def test_no_checkout(monkeypatch):
    monkeypatch.setattr(training, "CHECKOUT", Path("/nowhere"))
    with pytest.raises(ValueError, match="put yours after --"):
        training.default_command("tiny", [], 0, Path("x"))
