"""The project's own tools: resource report, refusal to build what is not committed, GPU record, Python."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"
sys.path.insert(0, str(TOOLS))

import gpu_test  # noqa: E402
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


@pytest.mark.parametrize("code", ["C7509", "C7510", "C7520"])
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


# ---- the record of the GPU tests: tools/gpu_test.py over a folder of tests that need no GPU

RUN = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import gpu_test
here = Path(sys.argv[2])
gpu_test.ROOT, gpu_test.TESTS, gpu_test.RECORD = here, here / "tests", here / "results" / "record.json"
gpu_test.facts = lambda: {"date": "2026", "trees": {}}
sys.argv = ["gpu_test.py", *sys.argv[3:]]
sys.exit(gpu_test.main())
"""


@pytest.fixture
def gpu_run(tmp_path):
    """A function that writes tests, given by file, and runs gpu_test over them with arguments: (exit status,
    output, record or None). A record of an earlier run is there before.
    """
    (tmp_path / "tests").mkdir()
    record = tmp_path / "results" / "record.json"

    def run(files, *arguments, output=record, **environment):
        for name, text in files.items():
            (tmp_path / "tests" / name).write_text(text)
        record.parent.mkdir(exist_ok=True)
        record.write_text('{"earlier": true}')
        command = [sys.executable, "-c", RUN, str(TOOLS), str(tmp_path), *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | environment, text=True, capture_output=True, timeout=120
        )
        assert not list(tmp_path.rglob("*.new"))
        return (
            done.returncode,
            done.stdout + done.stderr,
            json.loads(output.read_text()) if output.exists() else None,
        )

    return run


EARLIER = {"earlier": True}
TWO_FILES = {
    "test_a.py": "import pytest\ndef test_one(): pass\ndef test_two(): pass\n",
    "test_b.py": "def test_three(): pass\n",
}


def test_gpu_record_counts_every_outcome(gpu_run):
    status, _, record = gpu_run(
        {
            "test_a.py": "import pytest\n"
            "@pytest.fixture\ndef broken():\n    raise OSError\n"
            "@pytest.fixture\ndef late():\n    yield\n    raise OSError\n"
            "def test_passes(): pass\n"
            "def test_fails(): assert False\n"
            "def test_setup_fails(broken): pass\n"
            "def test_teardown_fails(late): pass\n"
            "def test_skips(): pytest.skip('needs two GPUs')\n",
            "test_b.py": "import does_not_exist\n",
            "test_c.py": "import pytest\npytest.skip('needs NVLink', allow_module_level=True)\n",
        }
    )
    assert status == 1
    assert list(record) == ["date", "trees", "files", "skip_reasons"]
    assert record["files"] == {
        "tests/test_a.py": {"passed": 1, "failed": 3, "skipped": 1},
        "tests/test_b.py": {"passed": 0, "failed": 1, "skipped": 0},
        "tests/test_c.py": {"passed": 0, "failed": 0, "skipped": 1},
    }
    reasons = {reason.removeprefix("Skipped: ") for reason in record["skip_reasons"]}
    assert reasons == {"needs two GPUs", "needs NVLink"}


@pytest.mark.parametrize("arguments", [(), ("-q", "-x", "-p", "no:cacheprovider")], ids=str)
def test_gpu_record_of_a_complete_run(gpu_run, arguments):
    status, output, record = gpu_run(TWO_FILES, *arguments)
    assert status == 0 and "wrote" in output and "incomplete" not in record
    assert record["files"] == {
        "tests/test_a.py": {"passed": 2, "failed": 0, "skipped": 0},
        "tests/test_b.py": {"passed": 1, "failed": 0, "skipped": 0},
    }


@pytest.mark.parametrize(
    ("arguments", "ran"),
    [
        (("-k", "not two"), 2),
        (("--deselect", "tests/test_a.py::test_two"), 2),
        (("--ignore", "tests/test_b.py"), 2),
        (("-o", "python_functions=test_t*"), 2),
        (("--collect-only",), 0),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_gpu_record_needs_every_test(gpu_run, arguments, ran):
    """What is left out leaves the earlier record alone; --output says that it is a part."""
    _, output, record = gpu_run(TWO_FILES, *arguments)
    assert record == EARLIER and f"{ran} of 3 tests ran" in output


def test_gpu_record_needs_every_test_whatever_the_environment_says(gpu_run):
    _, output, record = gpu_run(TWO_FILES, PYTEST_ADDOPTS="-k three")
    assert record == EARLIER and "1 of 3 tests ran" in output


def test_gpu_record_of_a_part_says_so(gpu_run, tmp_path):
    part = tmp_path / "deep" / "part.json"
    status, _, record = gpu_run(TWO_FILES, "-k", "three", "--output", str(part), output=part)
    assert status == 0 and record["incomplete"] == "1 of 3 tests ran, and 0 others"
    assert record["files"] == {"tests/test_b.py": {"passed": 1, "failed": 0, "skipped": 0}}
    assert json.loads((tmp_path / "results" / "record.json").read_text()) == EARLIER


@pytest.mark.parametrize(
    ("last", "arguments", "says"),
    [
        ("raise KeyboardInterrupt", (), "pytest ended with INTERRUPTED"),
        ("import os; os._exit(9)", (), ""),  # as a driver does that aborts
        ("pytest.exit('enough')", (), "pytest ended with INTERRUPTED"),
        ("assert False\ndef test_last(): pass", ("-x",), "3 of 4 tests ran"),
        ("pass", ("--setup-plan",), "0 of 3 tests ran"),
    ],
)
def test_gpu_run_that_ends_early_leaves_no_record(gpu_run, last, arguments, says):
    """Nor that of an earlier run, which would pass for this one's."""
    files = TWO_FILES | {"test_b.py": f"import pytest\ndef test_three(): {last}\n"}
    _, output, record = gpu_run(files, *arguments)
    assert record is None and says in output


def test_gpu_record_counts_what_could_not_be_collected(gpu_run):
    """A file that does not import is no missing test that another one could stand for."""
    files = TWO_FILES | {"test_c.py": "import does_not_exist\n"}
    assert gpu_run(files)[2]["files"]["tests/test_c.py"] == {"passed": 0, "failed": 1, "skipped": 0}
    _, output, record = gpu_run(files, "-k", "not two")
    assert record == EARLIER and "2 of 3 tests ran" in output


SKIPS = "import pytest\ndef test_four(): pytest.skip('needs NVLink')\n"


@pytest.fixture
def parts(gpu_run, tmp_path):
    """Records of a run without test_two and of one of test_a.py alone."""
    made = [tmp_path / f"{name}.json" for name in ("one", "two")]
    for part, words in zip(made, (("-k", "not two"), ("-k", "test_a")), strict=True):
        status, _, record = gpu_run(
            TWO_FILES | {"test_c.py": SKIPS}, *words, "--output", str(part), output=part
        )
        assert status == 0 and "incomplete" in record
    return [str(part) for part in made]


def test_gpu_records_of_parts_are_joined(gpu_run, parts):
    status, _, record = gpu_run({}, "--join", *parts)
    assert status == 0 and list(record) == ["date", "trees", "files", "skip_reasons"]
    assert record["files"] == {
        "tests/test_a.py": {"passed": 2, "failed": 0, "skipped": 0},
        "tests/test_b.py": {"passed": 1, "failed": 0, "skipped": 0},
        "tests/test_c.py": {"passed": 0, "failed": 0, "skipped": 1},
    }
    assert record["skip_reasons"] == {"Skipped: needs NVLink": 1}


def test_gpu_records_of_one_file_twice(gpu_run, parts, tmp_path):
    """Passed counts more than skipped; a failure before a pass is told."""

    def part(date, **counts):
        record = json.loads(Path(parts[1]).read_text()) | {"date": date}
        record["parts"]["tests/test_a.py"]["counts"] = {"passed": 0, "failed": 0, "skipped": 0} | counts
        (tmp_path / f"{date}.json").write_text(json.dumps(record))
        return str(tmp_path / f"{date}.json")

    later = [part("2028", skipped=2), part("2027", passed=2), part("2026-2", passed=1, failed=1)]
    status, _, record = gpu_run({}, "--join", *parts, *later)
    assert status == 0 and record["date"] == "2028"
    assert record["files"]["tests/test_a.py"] == {"passed": 2, "failed": 0, "skipped": 0}
    assert record["failed_before"] == {"tests/test_a.py": 1}


def test_gpu_records_that_do_not_make_up_a_run_are_not_joined(gpu_run, parts, tmp_path):
    def said(files, *joined, want=3):
        status, output, record = gpu_run(files, "--join", *joined)
        assert status == want and record == EARLIER
        return output

    assert "test_a.py: no part has all of its 2 tests" in said({}, parts[0])
    other = tmp_path / "other.json"
    other.write_text(json.dumps(json.loads(Path(parts[1]).read_text()) | {"trees": {"csrc": "0"}}))
    assert "trees differs: {}, {'csrc': '0'}" in said({}, parts[0], str(other))
    assert "there.json: [Errno 2] No such file" in said({}, parts[0], "there.json", want=2)
    other.write_text('{"date": "2026"}')
    assert "other.json: not the record of a part" in said({}, str(other), want=2)
    assert "got -k two too" in said({}, *parts, "-k", "two", want=2)
    assert "test_b.py: has changed" in said({"test_b.py": "def test_three(): assert 1\n"}, *parts)
    assert "test_b.py: has changed" in said({"test_b.py": TWO_FILES["test_b.py"] * 2}, *parts)
    assert "test_d.py: no part has all" in said(TWO_FILES | {"test_d.py": "def test_five(): pass\n"}, *parts)


def git(repo: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=repo, text=True, capture_output=True, check=True)
    return done.stdout.strip()


def test_tree_hashes_are_those_of_git(small_repo):
    folder = small_repo / "csrc"
    (folder / "deep").mkdir()
    (folder / "deep.h").write_text("\n")
    (folder / "deep" / "b.cu").write_text("// b\n")
    (folder / "empty").mkdir()
    git(small_repo, "add", ".")
    want = git(small_repo, "rev-parse", f"{git(small_repo, 'write-tree')}:csrc")
    (folder / "built.so").write_text("ignored")
    assert gpu_test.git_tree(folder) == want
    (folder / "a.cu").write_text("// b\n")
    assert gpu_test.git_tree(folder) != want


@pytest.mark.parametrize("changed", [None, "csrc", "megatron_mok"])
def test_gpu_run_needs_the_build_that_is_recorded(small_repo, changed, monkeypatch, capsys):
    """The library says what csrc it is of; the package is looked at."""
    trees = {name: git(small_repo, "rev-parse", f"HEAD:{name}") for name in ("csrc", "megatron_mok")}
    for file in ("build/trees.json", "megatron_mok/native/libmegatron_mok.so"):
        (small_repo / file).parent.mkdir()
        (small_repo / file).write_text(json.dumps(trees))
    info = {"csrc_tree": "" if changed == "csrc" else trees["csrc"]}
    library = SimpleNamespace(mok_build_info=lambda: json.dumps(info).encode())
    monkeypatch.setattr(gpu_test, "ROOT", small_repo)
    monkeypatch.setattr(gpu_test.ctypes, "CDLL", lambda path: library)
    if changed is None:
        assert gpu_test.trees() == trees
        return
    (small_repo / "megatron_mok" / "__init__.py").write_text("changed = True\n")
    with pytest.raises(SystemExit, match="3"):
        gpu_test.trees()
    said = capsys.readouterr().err
    assert f"{changed} is" in said and f"says {trees[changed]}; run make build" in said


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
