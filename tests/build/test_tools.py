"""The project's own tools: resource report, refusal to build what is not committed, GPU record, Python."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"
sys.path.insert(0, str(TOOLS))

import ptxas_report  # noqa: E402

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z7forwardPf' for 'sm_90a'
ptxas info    : Function properties for _Z7forwardPf
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Function properties for _Z6helperPf
    100 bytes stack frame, 50 bytes spill stores, 50 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 1024 bytes smem
ptxas info    : Compiling entry function '_Z7forwardPf' for 'sm_100a'
ptxas info    : Function properties for _Z7forwardPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers
"""


def test_ptxas_log_is_read_by_kernel_and_arch():
    first, second = ptxas_report.parse(LOG)
    assert first == dict(
        name="_Z7forwardPf", arch="90a", registers=168, spill_bytes=16, shared_bytes=1024, stack_bytes=8
    )
    assert (second["arch"], second["registers"], second["spill_bytes"]) == ("100a", 40, 0)


@pytest.mark.parametrize(
    ("budget", "over"),
    [
        ({"registers": 168, "spill_bytes": 16, "shared_bytes": 1024}, None),
        ({"registers": 167, "spill_bytes": 16, "shared_bytes": 1024}, "registers got 168, need <= 167"),
        ({"registers": 168, "spill_bytes": 15, "shared_bytes": 1024}, "spill_bytes got 16, need <= 15"),
        ({"registers": 168, "spill_bytes": 16, "shared_bytes": 1023}, "shared_bytes got 1024, need <= 1023"),
    ],
)
@pytest.mark.parametrize("entry", ["default", "kernel"])
def test_budget(tmp_path, capsys, budget, over, entry):
    (tmp_path / "x.o.ptxas.txt").write_text(LOG)
    none = dict.fromkeys(budget, 0)
    file = {"default": budget} if entry == "default" else {"default": none, "kernels": {"forward": budget}}
    (tmp_path / "budget.json").write_text(json.dumps(file))
    status = ptxas_report.check(tmp_path, tmp_path / "budget.json")
    assert status == (1 if over else 0)
    assert over is None or over in capsys.readouterr().out


def fake_compiler(tmp_path: Path, says: str) -> list[str]:
    script = tmp_path / "nvcc.py"
    script.write_text(f"import sys; open(sys.argv[2], 'w').close(); print({says!r})")
    return [sys.executable, str(script), "-o", str(tmp_path / "kernel.o")]


def test_compilation_keeps_the_log_and_hides_it(tmp_path, capsys):
    status = ptxas_report.compile_and_keep(fake_compiler(tmp_path, LOG + "kernel.cu(3): warning: unused"))
    assert status == 0
    assert "168 registers" in (tmp_path / "kernel.o.ptxas.txt").read_text()
    shown = capsys.readouterr().out
    assert "warning: unused" in shown and "registers" not in shown


@pytest.mark.parametrize("code", ["C7509", "C7510"])
def test_serialised_wgmma_fails_the_build(tmp_path, capsys, code):
    line = f"ptxas info    : ({code}) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    assert ptxas_report.compile_and_keep(fake_compiler(tmp_path, line)) == 1
    assert code in capsys.readouterr().out


@pytest.fixture
def small_repo(tmp_path):
    """A git repository with the build tool and one file in each folder that a build records."""
    for folder in ("tools", "csrc", "megatron_mok"):
        (tmp_path / folder).mkdir()
    shutil.copy(TOOLS / "build.py", tmp_path / "tools")
    (tmp_path / "csrc" / "a.cu").write_text("// a\n")
    (tmp_path / "megatron_mok" / "__init__.py").write_text("")
    user = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    for command in (["init", "-q"], ["add", "."], [*user, "commit", "-qm", "x"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.parametrize("changed", ["csrc/a.cu", "csrc/new.cu", "megatron_mok/__init__.py"])
def test_build_refuses_what_is_not_committed(small_repo, changed):
    (small_repo / changed).write_text("// changed\n")
    (small_repo / "build").mkdir()
    (small_repo / "build" / "trees.json").write_text("{}")
    script = [sys.executable, str(small_repo / "tools" / "build.py")]
    done = subprocess.run(script, text=True, capture_output=True, timeout=60)
    assert done.returncode != 0
    assert changed in done.stderr and "--dirty" in done.stderr
    assert not (small_repo / "build" / "trees.json").exists(), (
        "an old record must not outlive a refused build"
    )


RECORD = """
import json, sys
sys.path.insert(0, sys.argv[1])
import pytest, gpu_test
recorder = gpu_test.Recorder()
options = ["--rootdir", sys.argv[2], "-p", "no:cacheprovider", "--continue-on-collection-errors"]
status = pytest.main([sys.argv[2], *options], plugins=[recorder])
print()
print(json.dumps([int(status), recorder.files(), recorder.skip_reasons]))
"""


def test_gpu_record_counts_every_outcome(tmp_path):
    (tmp_path / "test_a.py").write_text(
        "import pytest\n"
        "@pytest.fixture\ndef broken():\n    raise OSError\n"
        "@pytest.fixture\ndef late():\n    yield\n    raise OSError\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert False\n"
        "def test_setup_fails(broken): pass\n"
        "def test_teardown_fails(late): pass\n"
        "def test_skips(): pytest.skip('needs two GPUs')\n"
    )
    (tmp_path / "test_b.py").write_text("import does_not_exist\n")
    (tmp_path / "test_c.py").write_text(
        "import pytest\npytest.skip('needs NVLink', allow_module_level=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", RECORD, str(TOOLS), str(tmp_path)], text=True, capture_output=True, timeout=120
    )
    status, files, reasons = json.loads(done.stdout.splitlines()[-1])
    assert status != 0
    assert files == {
        "test_a.py": {"passed": 1, "failed": 3, "skipped": 1},
        "test_b.py": {"passed": 0, "failed": 1, "skipped": 0},
        "test_c.py": {"passed": 0, "failed": 0, "skipped": 1},
    }
    assert {reason.removeprefix("Skipped: ") for reason in reasons} == {"needs two GPUs", "needs NVLink"}


def find_python(**environment: str) -> subprocess.CompletedProcess:
    command = ["/bin/sh", str(TOOLS / "find-python")]
    return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=60)


def test_find_python_passes_over_a_shim_that_does_not_run(tmp_path):
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shims, real = tmp_path / "shims", tmp_path / "pyenv" / "versions" / f"{version}.7" / "bin"
    shims.mkdir()
    real.mkdir(parents=True)
    (shims / f"python{version}").write_text("#!/bin/sh\nexit 127\n")
    (shims / f"python{version}").chmod(0o755)
    (real / "python").symlink_to(Path(sys.base_prefix) / "bin" / f"python{version}")
    done = find_python(PATH=f"{shims}:/usr/bin:/bin", PYENV_ROOT=str(tmp_path / "pyenv"))
    assert done.stdout.strip() == str(real / "python"), done.stderr


def test_find_python_says_what_is_missing(tmp_path):
    done = find_python(PATH=str(tmp_path), PYENV_ROOT=str(tmp_path))
    assert done.returncode == 1 and "PYTHON=" in done.stderr
    done = find_python(PATH=os.environ["PATH"], PYTHON="/does/not/exist")
    assert done.returncode == 1 and "/does/not/exist" in done.stderr
