"""mok doctor against made-up machines (a fake runner and fake files), and for real on this one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_mok.cli import doctor, main
from megatron_mok.cli.machine import Machine

ROOT = Path(__file__).resolve().parents[2]
H200 = ("NVIDIA H200", (9, 0))
B200 = ("NVIDIA B200", (10, 0))
GB300 = ("NVIDIA GB300", (10, 3))
A100 = ("NVIDIA A100-SXM4-80GB", (8, 0))

FABRIC = """GPU 00000000:04:00.0
    Product Name                          : {name}
    Fabric
        State                             : {state}
        Status                            : {status}
        CliqueId                          : 0
        ClusterUUID                       : {cluster}
    Processes                             : None
"""
NO_CLUSTER = "00000000-0000-0000-0000-000000000000"


class FakeMachine(Machine):
    """A healthy host with `gpus`; keyword arguments say what is wrong with it."""

    def __init__(
        self,
        *gpus,
        archs=("90a", "100a", "103a"),
        library_cuda="13.0",
        driver_cuda="13.0",
        torch=None,
        **also,
    ):
        super().__init__()
        self.cards, self.also = gpus, also
        self.says = {
            "version": "2.11.0+cu130",
            "cuda": "13.0",
            "nccl": [2, 28, 9],
            "symmetric_memory": True,
            "no_peer_access": [],
            "gpus": [{"name": name, "capability": list(cap), "sms": 132} for name, cap in gpus],
            **(torch or {}),
        }
        self.built = {"archs": list(archs), "cuda": library_cuda} if gpus else None
        self.driver_serves = driver_cuda

    def execute(self, command, timeout_s):
        if command[0] == "nvidia-smi" and not self.cards:
            return None
        if command == ["nvidia-smi"]:
            return (
                f"| NVIDIA-SMI 580.95   Driver Version: 580.95   CUDA Version: {self.driver_serves}     |\n"
            )
        if command[0] == "nvidia-smi" and command[1].startswith("--query-gpu=name"):
            return "".join(f"{name}, {cap[0]}.{cap[1]}, 580.95, 143771\n" for name, cap in self.cards)
        if command == ["nvidia-smi", "-q"]:
            fabric = {
                "state": "Completed",
                "status": "Success",
                "cluster": NO_CLUSTER,
                **self.also.get("fabric", {}),
            }
            return FABRIC.format(name=self.cards[0][0], **fabric)
        if command == ["nvidia-smi", "topo", "-m"]:
            return self.also.get("topo") or topo(len(self.cards), lambda i, j: "NV18")
        if command[-1] == "--version":
            return f"Cuda compilation tools, release {self.also.get('nvcc', '13.0')}, V13.0.88\n"
        return None

    def read(self, path):
        files = {
            "/proc/sys/kernel/yama/ptrace_scope": "1\n",
            "/proc/self/status": "Name:\tpython\nSeccomp:\t2\n",
        }
        return {**files, **self.also.get("files", {})}.get(path)

    def listdir(self, path):
        return self.also.get("folders", {}).get(path)

    def env(self, name):
        return self.also.get("env", {}).get(name)

    def which(self, command):
        return self.also.get("which", "/usr/local/cuda/bin/nvcc")

    def is_file(self, path):
        return path in self.also.get("paths", ())

    def python(self):
        return (3, 12, 3)

    def system(self):
        return "Linux x86_64"

    def distribution(self, name):
        have = {"torch": self.says["version"], "megatron-core": "0.19.2", "transformer-engine": "2.20.2"}
        return {**have, **self.also.get("distributions", {})}.get(name)

    def module(self, name):
        return self.also.get("modules", {}).get(name)

    def free_and_total_bytes(self, path):
        return self.also.get("shm", (8 << 30, 8 << 30))

    def locked_memory_limit_bytes(self):
        return self.also.get("memlock", -1)

    def torch(self):
        return self.says

    def library_path(self):
        return "/opt/libmegatron_mok.so" if self.built is not None else None

    def library(self):
        return self.also.get("library", self.built)

    def descriptor_exchange_errno(self):
        return self.also.get("exchange", 0)


def topo(n, link):
    header = "\t" + "\t".join(f"\x1b[4mGPU{i}\x1b[0m" for i in range(n)) + "\tCPU Affinity\tNUMA Affinity\n"
    rows = (
        f"GPU{i}\t" + "\t".join(" X " if i == j else link(i, j) for j in range(n)) + "\t0-63\t0\n"
        for i in range(n)
    )
    return (
        header
        + "".join(rows)
        + "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
    )


def look(name, machine):
    """The check `name`, and the whole report for context."""
    made = {c.check: c for c in doctor.checks(machine)}
    return made[name]


def test_healthy_machines_have_nothing_to_look_at():
    for machine in (FakeMachine(), FakeMachine(H200), FakeMachine(*[H200] * 8), FakeMachine(*[GB300] * 4)):
        bad = [c for c in doctor.checks(machine) if c.status != "ok"]
        assert not bad, bad
    assert doctor.backends(FakeMachine(*[H200] * 8)) == ["cuda", "reference"]
    assert doctor.backends(FakeMachine()) == ["reference"]


def test_B62_container_forbids_handle_exchange():
    refused = look("handle exchange", FakeMachine(H200, H200, exchange=1))
    assert refused.status == "warn" and "EPERM" in refused.found and "SYS_PTRACE" in refused.remedy
    assert "seccomp 2" in refused.found and "ptrace_scope 1" in refused.found
    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    both = look("allocator", FakeMachine(H200, H200, exchange=1, env=expandable))
    assert both.status == "fail" and "expandable_segments" in both.remedy
    assert look("allocator", FakeMachine(H200, H200, env=expandable)).status == "ok"


@pytest.mark.parametrize(
    "name, machine, status, words",
    [
        (
            "fabric manager",
            FakeMachine(*[B200] * 8, fabric={"state": "In Progress", "status": "N/A"}),
            "fail",
            "fabricmanager",
        ),
        (
            "fabric manager",
            FakeMachine(*[B200] * 8, fabric={"status": "Insufficient resources"}),
            "fail",
            "fabricmanager",
        ),
        (
            "imex",
            FakeMachine(*[GB300] * 4, fabric={"cluster": "9a7e3c1d-5f5e-4a61-9f3b-2b0d6c4e8f10"}),
            "fail",
            "IMEX",
        ),
        (
            "imex",
            FakeMachine(
                *[GB300] * 4,
                fabric={"cluster": "9a7e3c1d-5f5e-4a61-9f3b-2b0d6c4e8f10"},
                folders={"/dev/nvidia-caps-imex-channels": ["channel0"]},
            ),
            "warn",
            "nvidia-imex",
        ),
        ("imex", FakeMachine(*[H200] * 8), "ok", ""),
    ],
    ids=["B63-starting", "B63-failed", "B63-no-channel", "B63-no-service", "B63-one-host"],
)
def test_B63_fabric_manager_and_imex(name, machine, status, words):
    seen = look(name, machine)
    assert seen.status == status and words in seen.remedy


def test_B64_peer_access_missing_for_some_pairs():
    seen = look("peer access", FakeMachine(*[H200] * 4, torch={"no_peer_access": [[0, 2], [2, 0]]}))
    assert seen.status == "fail" and "0->2, 2->0" in seen.found and "alltoall" in seen.remedy
    many = [[i, j] for i in range(4) for j in range(4) if i != j]
    assert "4 more" in look("peer access", FakeMachine(*[H200] * 4, torch={"no_peer_access": many})).found


def test_B64_pairs_without_nvlink_are_named():
    half = topo(4, lambda i, j: "NV18" if i // 2 == j // 2 else "SYS")
    seen = look("nvlink", FakeMachine(*[H200] * 4, topo=half))
    assert (
        seen.status == "warn"
        and "0-2 SYS" in seen.found
        and "0-1" not in seen.found
        and "alltoall" in seen.remedy
    )
    assert look("nvlink", FakeMachine(*[H200] * 4)).found == "6 pairs, NV18"


def test_B65_multicast_is_not_needed():
    set_by_user = look("multicast", FakeMachine(*[H200] * 2, env={"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}))
    assert set_by_user.status == "ok" and "=1" in set_by_user.found
    assert "the runtime sets it" in look("multicast", FakeMachine(*[H200] * 2)).found


def test_B66_more_ranks_than_gpus_or_one_gpu_twice():
    seen = look("ranks per gpu", FakeMachine(H200, env={"LOCAL_WORLD_SIZE": "2"}))
    assert seen.status == "fail" and "LOCAL_RANK" in seen.remedy and "--mok-shared-device" in seen.remedy
    twice = look("ranks per gpu", FakeMachine(H200, env={"CUDA_VISIBLE_DEVICES": "0,0"}))
    assert twice.status == "fail" and "twice" in twice.remedy
    assert look("ranks per gpu", FakeMachine(H200, H200, env={"LOCAL_WORLD_SIZE": "2"})).status == "ok"


def test_B69_shared_and_locked_memory_limits():
    docker = FakeMachine(H200, shm=(64 << 20, 64 << 20), memlock=64 << 10)
    shm, memlock = look("shared memory", docker), look("locked memory", docker)
    assert shm.status == "warn" and "64 MiB" in shm.found and "--shm-size" in shm.remedy
    assert memlock.status == "warn" and "64 KB" in memlock.found and "memlock=-1" in memlock.remedy
    assert look("locked memory", FakeMachine(memlock=64 << 10)).status == "ok"  # no GPU, no InfiniBand


def test_B71_different_gpus():
    seen = look("gpus alike", FakeMachine(H200, B200))
    assert seen.status == "warn" and "H200" in seen.found and "B200" in seen.found


def test_B87_library_built_for_another_architecture():
    seen = look("gpu architecture", FakeMachine(B200, archs=["90a"]))
    assert seen.status == "fail" and "100a" in seen.found and "90a" in seen.found
    assert seen.remedy == "MOK_ARCHS=100a make build"
    assert doctor.backends(FakeMachine(B200, archs=["90a"])) == ["reference"]
    assert look("back end", FakeMachine(B200, archs=["90a"])).status == "warn"


def test_B87_gpu_without_kernels():
    old = FakeMachine(A100)
    assert look("gpu", old).status == "fail" and "alltoall" in look("gpu", old).remedy
    assert look("gpu architecture", old).status == "fail"


def test_B89_library_missing_broken_or_silent():
    missing = look("kernel library", FakeMachine(H200, library=None))
    assert missing.status == "fail" and "make build" in missing.remedy
    broken = look(
        "kernel library", FakeMachine(H200, library={"error": "/opt/libmegatron_mok.so does not load"})
    )
    assert broken.status == "fail" and "does not load" in broken.found
    assert look("kernel library", FakeMachine(H200, library={})).status == "warn"
    assert look("gpu architecture", FakeMachine(H200, library={})).status == "warn"


def test_B89_nvcc_and_cuda_home():
    colon = look("nvcc", FakeMachine(H200, env={"CUDA_HOME": ":/usr/local/cuda"}))
    assert colon.status == "warn" and "':'" in colon.remedy
    empty = look("nvcc", FakeMachine(H200, env={"CUDA_HOME": "/usr/local/cuda-99"}))
    assert empty.status == "warn" and "bin/nvcc" in empty.remedy
    none = look("nvcc", FakeMachine(H200, which=None, library=None))
    assert none.status == "warn" and "not found" in none.found
    assert look("nvcc", FakeMachine(H200, which=None)).status == "ok"  # the library is there already
    assert look("nvcc", FakeMachine(H200, nvcc="12.4")).status == "warn"
    good = FakeMachine(H200, env={"CUDA_HOME": "/usr/local/cuda"}, paths=["/usr/local/cuda/bin/nvcc"])
    assert look("nvcc", good).status == "ok"


def test_B90_driver_older_than_the_toolkit():
    seen = look("cuda versions", FakeMachine(H200, driver_cuda="12.8", library_cuda="13.2"))
    assert seen.status == "fail" and "12.8" in seen.found and "13.2" in seen.found and "13.0" in seen.found
    assert "driver" in seen.remedy
    assert doctor.backends(FakeMachine(H200, driver_cuda="12.8", library_cuda="13.2")) == ["reference"]
    minor = look("cuda versions", FakeMachine(H200, driver_cuda="13.0", library_cuda="13.2"))
    assert minor.status == "warn" and "PTX" in minor.remedy
    other = look("nvcc", FakeMachine(H200, torch={"cuda": "12.8"}, nvcc="13.0"))
    assert other.status == "warn" and "12.8" in other.found and "13.0" in other.found


def test_apex_of_pypi_is_another_project():
    pypi = FakeMachine(modules={"apex": "/site/apex"})
    assert look("apex", pypi).status == "warn" and "NVIDIA/apex" in look("apex", pypi).remedy
    folders = {"/site/apex/multi_tensor_apply": ["__init__.py"]}
    nvidia = FakeMachine(modules={"apex": "/site/apex", "amp_C": "/site/amp_C.so"}, folders=folders)
    assert look("apex", nvidia).status == "ok" and "NVIDIA's" in look("apex", nvidia).found
    assert "without amp_C" in look("apex", FakeMachine(modules={"apex": "/site/apex"}, folders=folders)).found


def test_old_software():
    assert look("torch", FakeMachine(torch={"version": "2.8.0"})).status == "fail"
    assert doctor.backends(FakeMachine(torch={"version": "2.8.0"})) == []
    assert look("megatron-core", FakeMachine(distributions={"megatron-core": "0.16.1"})).status == "fail"
    assert look("megatron-core", FakeMachine(distributions={"megatron-core": None})).status == "warn"
    cpu_torch = look("torch", FakeMachine(H200, torch={"cuda": None, "gpus": []}))
    assert cpu_torch.status == "fail" and "CUDA" in cpu_torch.remedy


class Broken(Machine):
    """Every question raises."""

    def __getattribute__(self, name):
        if name.startswith("__"):
            return super().__getattribute__(name)
        raise RuntimeError(f"no {name} today")


def test_never_raises(capsys):
    assert doctor.run(["--json"], Broken()) == 1
    made = json.loads(capsys.readouterr().out)["checks"]
    assert len(made) >= 15 and all(c["status"] == "warn" and "RuntimeError" in c["found"] for c in made)


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_what_a_library_says_of_itself(tmp_path, monkeypatch):
    """A real shared library, loaded in a child process as the kernels' library is."""
    source, library = tmp_path / "x.c", tmp_path / "libmegatron_mok.so"
    monkeypatch.setenv("MOK_LIBRARY", str(library))
    assert "no file" in Machine().library()["error"]
    source.write_text(
        r"""const char* mok_build_info(void) { return "{\"archs\": [\"90a\"], \"cuda\": \"13.0\"}"; }"""
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60)
    assert Machine().library() == {"archs": ["90a"], "cuda": "13.0"}
    assert look("kernel library", FakeMachine(library=Machine().library())).found.endswith(" for 90a")
    source.write_text("int nothing;")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60)
    assert Machine().library() == {}
    library.write_text("no ELF file")
    assert "does not load" in Machine().library()["error"]


def test_a_hanging_tool_costs_its_time_limit_once(tmp_path):
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nsleep 60\n")
    slow.chmod(0o755)
    machine = Machine()
    assert machine.run([str(slow)], timeout_s=0.2) is None
    slow.unlink()
    assert machine.run([str(slow)], timeout_s=60) is None  # remembered, not asked again


def test_this_machine_in_json():
    """The real thing, as a user starts it; the report's shape is an interface."""
    done = subprocess.run(
        [sys.executable, "-m", "megatron_mok.cli", "doctor", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    made = json.loads(done.stdout)["checks"]
    assert len(made) >= 15 and len({c["check"] for c in made}) == len(made)
    assert all(set(c) == {"check", "found", "needed", "status", "remedy"} for c in made)
    assert all(c["status"] in ("ok", "warn", "fail") and (c["status"] == "ok" or c["remedy"]) for c in made)
    assert done.returncode == (
        1 if next(c for c in made if c["check"] == "back end")["status"] == "fail" else 0
    )


def test_bare_interpreter_from_a_source_tree():
    """No site-packages at all (-S -E): the answer is exit 1, with a full report."""
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-m", "megatron_mok.cli", "doctor", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": ""},
    )
    made = {c["check"]: c for c in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1 and len(made) >= 15, done.stderr
    assert made["torch"]["found"] == "not installed" and made["back end"]["status"] == "fail"


def test_sources_keep_to_python_39():
    import ast

    for name in (
        "__init__.py",
        "cli/__init__.py",
        "cli/__main__.py",
        "cli/machine.py",
        "cli/doctor.py",
        "env.py",
    ):
        ast.parse((ROOT / "megatron_mok" / name).read_text(), feature_version=(3, 9))


def test_command_table(capsys):
    assert main([]) == 2 and "doctor" in capsys.readouterr().out
    assert main(["--help"]) == 0
    assert main(["docter"]) == 2 and "'docter'" in capsys.readouterr().err
