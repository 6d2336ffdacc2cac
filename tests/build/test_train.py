"""`make train`, cut to a few steps: data, launcher, Megatron's loop, metrics, plot and summary."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tools")]

import prepare_data  # noqa: E402
import train  # noqa: E402

STEPS = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, str]:
    """The run's folder and what the command printed."""
    folder = tmp_path_factory.mktemp("run")
    command = [sys.executable, str(ROOT / "tools" / "train.py"), "--run-dir", str(folder)]
    command += ["--train-iters", str(STEPS), "--log-interval", "1", "--lr-warmup-iters", "1"]
    done = subprocess.run(command, text=True, capture_output=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


@pytest.mark.short
def test_metrics_have_a_line_for_each_step(run):
    folder, _ = run
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    for step in steps:
        assert {"step", "loss", "grad_norm", "tokens_per_s", "step_ms"} <= set(step)
        assert step["tokens_per_s"] == pytest.approx(8 * 256 / step["step_ms"] * 1e3)
    assert steps[0]["loss"] == pytest.approx(math.log(257), abs=0.2), "an untrained model guesses evenly"
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_progress_and_summary(run):
    folder, printed = run
    lines = printed.splitlines()
    assert sum(line.startswith("step ") and "loss" in line for line in lines) == STEPS
    summary = {line.split()[0]: line for line in lines[lines.index("") :] if line}
    assert "mok" in summary["dispatcher"] and "reference" in summary["back"]
    assert "tokens/s" in summary and "sha256" in printed
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    attention = [line for line in (folder / "log.txt").read_text().splitlines() if "attention: MLA" in line]
    assert len(attention) == 1 and "scaled_dot_product_attention" in attention[0]


def test_the_folder_of_the_metrics_is_made_before_training(tmp_path, monkeypatch):
    import pretrain

    for name in ("train_step", "training_log"):  # put back afterwards what record_metrics wraps
        monkeypatch.setattr(pretrain.training, name, getattr(pretrain.training, name))
    pretrain.record_metrics(tmp_path / "new" / "folder" / "metrics.jsonl")
    assert (tmp_path / "new" / "folder").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        pretrain.record_metrics(tmp_path / "file" / "metrics.jsonl")


def test_steps_without_a_figure_are_shown(tmp_path, capsys):
    """Without clipping Megatron has no gradient norm; a skipped step has no loss."""
    metrics = tmp_path / "metrics.jsonl"
    step = {"step": 1, "loss": None, "grad_norm": None, "tokens_per_s": 10.0, "step_ms": 3.0}
    script = f"open({str(metrics)!r}, 'w').write({json.dumps(step)!r}); print(' iteration 1 | lm loss: 1')"
    train.train([sys.executable, "-c", script], {}, metrics, tmp_path / "log.txt")
    assert "loss -  grad norm -  10 tokens/s" in capsys.readouterr().out
    train.plot([step, {**step, "loss": 2.0}], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").exists()


def test_another_text_has_another_cache(tmp_path):
    caches = set()
    for sha256 in ("a" * 64, "b" * 64, "a" * 64):
        argv, _ = train.command(tmp_path / "set", sha256, tmp_path / "metrics.jsonl", [])
        caches.add(argv[argv.index("--data-cache-path") + 1])
    assert len(caches) == 2


def test_an_old_run_leaves_nothing_to_be_read(tmp_path, monkeypatch):
    for name in ("metrics.jsonl", "loss.png", "log.txt"):
        (tmp_path / name).write_text("old")
    monkeypatch.setattr(sys, "argv", ["train.py", "--run-dir", str(tmp_path)])
    monkeypatch.setattr(train, "prepare", lambda data: pytest.fail("no data"))
    with pytest.raises(pytest.fail.Exception, match="no data"):
        train.main()
    assert not list(tmp_path.iterdir())


def test_a_failing_run_shows_why(tmp_path, capsys):
    script = "print('pretrain.py: error: --no-such-flag'); raise SystemExit(2)"
    log = tmp_path / "log.txt"
    with pytest.raises(SystemExit, match=r"exit status 2.*log\.txt"):
        train.train([sys.executable, "-c", script], {}, tmp_path / "metrics.jsonl", log)
    assert "--no-such-flag" in capsys.readouterr().out and "--no-such-flag" in log.read_text()


def test_data_set_is_the_text_byte_by_byte(tmp_path):
    sources = tmp_path / "lib"
    for name, text in {
        "b.py": b"x = 1\n",
        "a.py": "ä = 2\n".encode(),
        "test/t.py": b"no",
        "z/tests/t.py": b"no",
    }.items():
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        (sources / name).write_bytes(text)
    (sources / "empty.py").touch()
    summary = prepare_data.prepare(tmp_path / "out" / "set", sources)
    data = IndexedDataset(str(tmp_path / "out" / "set"))
    assert [data[i].tolist() for i in range(len(data))] == [
        [*"ä = 2\n".encode(), prepare_data.EOD],
        [*b"x = 1\n", prepare_data.EOD],
    ]
    assert data[0].dtype == numpy.uint16 and len(data.document_indices) == 3
    assert (summary["files"], summary["bytes"]) == (2, 13)
    (sources / "a.py").unlink()
    assert prepare_data.prepare(tmp_path / "out" / "set", sources) == summary, "made once for a folder"
    other = tmp_path / "other" / "lib"
    other.mkdir(parents=True)
    (other / "c.py").write_bytes(b"y = 3\n")
    assert prepare_data.prepare(tmp_path / "out" / "set", other)["bytes"] == 6, "a folder of the same name"


def test_no_text_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="Python sources"):
        prepare_data.prepare(tmp_path / "set", tmp_path)
