"""What `mok doctor` asks of the machine. Every answer is bounded in time and None where there is none.

Python 3.9 syntax and the standard library only. What could hang or crash the interpreter (importing torch,
loading a shared library, a vendor's tool) happens in a child process with a time limit.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from megatron_mok import env

COMMAND_TIMEOUT_S = 15.0
TORCH_TIMEOUT_S = 120.0  # the first import on a cold network file system takes a minute

# Prints one JSON object; each fact on its own, so that one that fails costs no other.
_TORCH_FACTS = r"""
import json
facts = {}
def fact(name, make):
    try:
        facts[name] = make()
    except BaseException as e:
        facts[name + "_error"] = "%s: %s" % (type(e).__name__, str(e).strip().split("\n")[0][:200])
import torch
fact("version", lambda: torch.__version__)
fact("cuda", lambda: torch.version.cuda)
fact("gpus", lambda: [
    {"name": p.name, "capability": [p.major, p.minor], "sms": p.multi_processor_count}
    for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))])
fact("nccl", lambda: list(torch.cuda.nccl.version()) if torch.cuda.is_available() else None)
def symmetric():
    import torch.distributed._symmetric_memory as s
    return hasattr(s, "rendezvous") and hasattr(s, "empty")
fact("symmetric_memory", symmetric)
def no_peer():
    n, reaches = torch.cuda.device_count(), torch.cuda.can_device_access_peer
    return [[i, j] for i in range(n) for j in range(n) if i != j and not reaches(i, j)]
fact("no_peer_access", no_peer)
print("\nFACTS" + json.dumps(facts))
"""

_LIBRARY_FACTS = r"""
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.mok_build_info.restype = ctypes.c_char_p
print("\nFACTS" + library.mok_build_info().decode())
"""

# A sibling, as another rank would be, takes a file descriptor out of process argv[1]; prints the errno, 0 for
# success.
_TAKE_DESCRIPTOR = r"""
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
try:
    pidfd = os.pidfd_open(int(sys.argv[1]))
    got = libc.syscall(438, pidfd, 0, 0)
    print("FACTS", 0 if got >= 0 else ctypes.get_errno())
except OSError as e:
    print("FACTS", e.errno)
"""


class Machine:
    """The machine this process runs on. Tests replace `execute`, `read`, `env` and the like."""

    def __init__(self):
        self._outputs: dict[tuple, str | None] = {}

    def run(self, command: list[str], timeout_s: float = COMMAND_TIMEOUT_S) -> str | None:
        """Output of a command, None where it failed or outran its time. Run once, then remembered."""
        key = tuple(command)
        if key not in self._outputs:
            self._outputs[key] = self.execute(command, timeout_s)
        return self._outputs[key]

    def execute(self, command: list[str], timeout_s: float) -> str | None:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout if done.returncode == 0 else None

    def read(self, path: str) -> str | None:
        """Text of a small file, None where it cannot be read."""
        try:
            with open(path, errors="replace") as f:
                return f.read(1 << 20)
        except OSError:
            return None

    def listdir(self, path: str) -> list[str] | None:
        try:
            return sorted(os.listdir(path))
        except OSError:
            return None

    def env(self, name: str) -> str | None:
        return env.text(name)

    def which(self, command: str) -> str | None:
        return shutil.which(command)

    def is_file(self, path: str) -> bool:
        return os.path.isfile(path)

    def python(self) -> tuple[int, int, int]:
        return sys.version_info[:3]

    def system(self) -> str:
        return f"{platform.system()} {platform.machine()}"

    def distribution(self, name: str) -> str | None:
        """Version of an installed Python distribution, None where it is not installed."""
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    def module(self, name: str) -> str | None:
        """File of a top-level module, folder of a package; None without it. Imports nothing."""
        spec = importlib.util.find_spec(name)
        if spec is None:
            return None
        return spec.submodule_search_locations[0] if spec.submodule_search_locations else spec.origin

    def free_and_total_bytes(self, path: str) -> tuple[int, int] | None:
        try:
            usage = shutil.disk_usage(path)
        except OSError:
            return None
        return usage.free, usage.total

    def locked_memory_limit_bytes(self) -> int | None:
        """Soft limit of locked memory; -1 means none, None unknown."""
        try:
            import resource

            soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            return -1 if soft == resource.RLIM_INFINITY else soft
        except (ImportError, OSError, ValueError):
            return None

    def torch(self) -> dict | None:
        """Facts from `import torch` in a child process; None where that fails or takes too long."""
        if not self.module("torch"):
            return None
        return facts(self.run([sys.executable, "-c", _TORCH_FACTS], TORCH_TIMEOUT_S))

    def library_path(self) -> str | None:
        """The kernel library that megatron_mok.native loads: MOK_LIBRARY, or the one in the package."""
        named = self.env("MOK_LIBRARY")
        if named:
            return named
        path = str(Path(__file__).resolve().parent.parent / "native" / "libmegatron_mok.so")
        return path if self.is_file(path) else None

    def library(self) -> dict | None:
        """What the kernel library says of itself (`mok_build_info`: archs, cuda, ...).

        {} where it loads but does not say, None where it is missing, {"error": ...} where it does not load.
        """
        path = self.library_path()
        if path is None:
            return None
        if not self.is_file(path):
            return {"error": f"no file {path}"}
        said = facts(self.run([sys.executable, "-c", _LIBRARY_FACTS, path]))
        if said is not None:
            return said
        loads = self.run([sys.executable, "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", path])
        return {} if loads is not None else {"error": f"{path} does not load"}

    def smi(self) -> list[dict] | None:
        """nvidia-smi's GPUs: name, capability (major, minor), driver, memory_mib; None without it."""
        out = self.run(
            [
                "nvidia-smi",
                "--query-gpu=name,compute_cap,driver_version,memory.total",
                "--format=csv,noheader,nounits",
            ]
        )
        if out is None:
            return None
        gpus = []
        for line in out.strip().splitlines():
            cells = [cell.strip() for cell in line.split(",")]
            if len(cells) == 4:
                cap = version(cells[1])
                gpus.append({"name": cells[0], "capability": cap, "driver": cells[2], "memory_mib": cells[3]})
        return gpus

    def gpus(self) -> list[dict]:
        """Every visible GPU: {name, capability}; from torch where it sees any, else from nvidia-smi."""
        seen = (self.torch() or {}).get("gpus") or []
        if seen:
            return [
                {"name": g["name"], "capability": tuple(g["capability"]), "sms": g.get("sms")} for g in seen
            ]
        return self.smi() or []

    def driver_cuda(self) -> tuple[int, ...] | None:
        """Newest CUDA version that the driver serves, from nvidia-smi's header."""
        found = re.search(r"CUDA[ \w]*Version\s*:\s*(\d+\.\d+)", self.run(["nvidia-smi"]) or "")
        return version(found.group(1)) if found else None

    def driver(self) -> str | None:
        """Version of the NVIDIA kernel driver."""
        for gpu in self.smi() or []:
            return gpu["driver"]
        found = re.search(r"Kernel Module\D*(\d+\.[\d.]+)", self.read("/proc/driver/nvidia/version") or "")
        return found.group(1) if found else None

    def nvcc(self) -> tuple[int, ...] | None:
        """Release of the nvcc that a build would use."""
        home = self.env("CUDA_HOME")
        inside = f"{home}/bin/nvcc" if home else None
        path = inside if inside and self.is_file(inside) else self.which("nvcc")
        found = re.search(r"release (\d+\.\d+)", (self.run([path, "--version"]) if path else None) or "")
        return version(found.group(1)) if found else None

    def fabric(self) -> dict:
        """The first GPU's Fabric section in `nvidia-smi -q`: State, Status, ClusterUUID."""
        section = re.search(
            r"^ +Fabric\s*\n((?: {8,}.*\n)+)", self.run(["nvidia-smi", "-q"]) or "", re.MULTILINE
        )
        if not section:
            return {}
        pairs = (line.split(":", 1) for line in section.group(1).splitlines() if ":" in line)
        return {key.strip(): value.strip() for key, value in pairs}

    def descriptor_exchange_errno(self) -> int | None:
        """May a process take a sibling's descriptor (pidfd_getfd)? 0 if so, else errno; None unknown."""
        if not hasattr(os, "pidfd_open"):
            return None
        try:
            holder = subprocess.Popen(
                [sys.executable, "-c", "import sys; sys.stdin.read()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
            )
        except OSError:
            return None
        try:
            out = self.run([sys.executable, "-c", _TAKE_DESCRIPTOR, str(holder.pid)]) or ""
        finally:
            holder.kill()
            holder.communicate()
        found = re.search(r"FACTS (\d+)", out)
        return int(found.group(1)) if found else None


def facts(output: str | None) -> dict | None:
    """The JSON object behind the FACTS mark in a child's output."""
    for line in (output or "").splitlines():
        if line.startswith("FACTS"):
            try:
                said = json.loads(line[len("FACTS") :])
            except ValueError:
                return None
            return said if isinstance(said, dict) else None
    return None


def version(text: str | None) -> tuple[int, ...] | None:
    """Leading numbers of a version: "2.14.1+cu130" is (2, 14, 1); None where there are none."""
    found = re.match(r"\s*(\d+(?:\.\d+)*)", text or "")
    return tuple(int(part) for part in found.group(1).split(".")) if found else None


def dotted(parts) -> str:
    return ".".join(str(part) for part in parts)
