"""The Makefile's own decisions."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASE = str(Path(sys.base_prefix) / "bin" / "python3")

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["make", "-s", *words], cwd=ROOT, text=True, capture_output=True, timeout=60)


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment that another Python made."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 3.99.0 in /elsewhere\n")
    python.chmod(0o755)
    return tmp_path


def test_python_that_did_not_make_the_environment_is_an_error(venv: Path) -> None:
    done = make("venv", f"VENV={venv}", f"PYTHON={BASE}")
    assert done.returncode != 0
    assert f"PYTHON: got {BASE}" in done.stderr and "made by 3.99.0 in /elsewhere" in done.stderr
    assert f"remove {venv}, or say VENV=" in done.stderr
    assert [path.name for path in venv.iterdir()] == ["bin"], "nothing was installed"
    assert make("same-python", f"VENV={venv}", "PYTHON=/does/not/exist").returncode != 0


def test_python_that_made_the_environment_is_taken(venv: Path) -> None:
    python = venv / "bin" / "python"
    python.unlink()
    python.symlink_to(BASE)
    done = make("same-python", f"VENV={venv}", f"PYTHON={BASE}")
    assert done.returncode == 0, done.stderr
    for words in ((f"VENV={venv}",), (f"VENV={venv / 'none'}", f"PYTHON={BASE}")):
        assert make("same-python", *words).returncode == 0
