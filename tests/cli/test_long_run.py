"""benchmarks/h200_long_run.py without its trainings: what a late one leaves."""

import importlib.util
import subprocess
import time

import pytest

from megatron_mok.bench import killed, training

WORKER = """
import os, pathlib, time
pathlib.Path(__file__).with_name("pid").write_text(str(os.getpid()))
time.sleep(600)
"""
LIMIT_S = 77


@pytest.fixture
def long_run():
    path = training.CHECKOUT / "benchmarks" / "h200_long_run.py"
    spec = importlib.util.spec_from_file_location("h200_long_run", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_late_run_ends_with_its_workers(long_run, tmp_path, monkeypatch):
    """torchrun's worker is a program of ours; the limit is over once that runs."""
    script, pid = tmp_path / "worker.py", tmp_path / "pid"
    script.write_text(WORKER)
    monkeypatch.setattr(long_run, "__file__", str(script))

    class Late(subprocess.Popen):
        def wait(self, timeout=None):
            if timeout != LIMIT_S:
                return super().wait(timeout)
            while not (pid.exists() and pid.read_text()):
                assert self.poll() is None
                time.sleep(0.05)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(long_run.subprocess, "Popen", Late)
    with pytest.raises(RuntimeError, match=f"name: exit code none, stopped after {LIMIT_S} s, 0 steps"):
        long_run.train("name", 3, tmp_path, tmp_path / "data", "", gpu=False, timeout_s=LIMIT_S)
    assert not killed.alive(int(pid.read_text()))
