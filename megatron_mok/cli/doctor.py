"""`mok doctor`: what this machine has, what megatron_mok needs, and what to do about the difference.

Python 3.9 syntax and the standard library only. It never raises: a check that cannot be made says so as a
warning. A check is a function of a `Machine` that returns (found, status, remedy), or (found, "ok").
"""

from __future__ import annotations

import argparse
import errno
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from megatron_mok.cli.machine import Machine, dotted, version

PYTHON_NEEDED = (3, 12)
TORCH_NEEDED = (2, 10)
CORE_NEEDED = (0, 18)
NVCC_NEEDED = (12, 9)  # the first that knows sm_103a
ARCHS = {(9, 0): "90a", (10, 0): "100a", (10, 3): "103a"}
DOCKER_SHM_BYTES = 64 << 20  # docker's default /dev/shm
NO_GPU = "no GPU: the CPU back end does not need it"
UNICAST = "--moe-token-dispatcher-type alltoall"


@dataclass(frozen=True)
class Check:
    """One line of the report; `status` is ok, warn or fail; `remedy` is empty where nothing is to be done."""

    check: str
    found: str
    needed: str
    status: str
    remedy: str


CHECKS: list[tuple[str, str, Callable[[Machine], tuple]]] = []


def check(name, needed):
    """Registers a function of a Machine that returns (found, status, remedy), or (found, "ok")."""

    def register(probe):
        CHECKS.append((name, needed, probe))
        return probe

    return register


def checks(machine: Machine) -> list[Check]:
    """All checks, in the order of the table. Never raises."""
    made = []
    for name, needed, probe in CHECKS:
        try:
            found, status, *remedy = probe(machine)
        except Exception as e:  # a doctor that falls ill tells nobody anything
            found, status, remedy = (
                f"could not be checked: {type(e).__name__}: {e}",
                "warn",
                ["report this line"],
            )
        found = str(found).encode("ascii", "backslashreplace").decode()  # any terminal can print it
        made.append(Check(name, found, needed, status, remedy[0] if remedy else ""))
    return made


def _older(have, needed):
    return (version(have) or (0,))[: len(needed)] < needed


# ---------------------------------------------------------------- software


@check("python", f">= {dotted(PYTHON_NEEDED)}")
def _python(m):
    have = m.python()
    if tuple(have[:2]) >= PYTHON_NEEDED:
        return dotted(have), "ok"
    return dotted(have), "fail", "install Python 3.12 or 3.13 (`make venv PYTHON=...` takes the one you name)"


@check("system", "Linux on x86_64 or aarch64")
def _system(m):
    have = m.system()
    if have in ("Linux x86_64", "Linux aarch64"):
        return have, "ok"
    return have, "warn", "only Linux is tested; the CPU back end may still run"


@check("torch", f">= {dotted(TORCH_NEEDED)}")
def _torch(m):
    installed = m.distribution("torch")
    if installed is None:
        return "not installed", "fail", "pip install torch (in a checkout: make venv)"
    said = m.torch()
    if not said or "version" not in said:
        return (
            f"{installed}, but `import torch` fails or hangs",
            "fail",
            "run python3 -c 'import torch' and mend what it says",
        )
    found = f"{said['version']}, CUDA {said.get('cuda') or 'none'}"
    if _older(said["version"], TORCH_NEEDED):
        return found, "fail", f"pip install 'torch>={dotted(TORCH_NEEDED)}'"
    if m.smi() and not said.get("cuda"):
        return (
            found,
            "fail",
            "this torch is built without CUDA, the machine has a GPU: install a CUDA build of torch",
        )
    if m.smi() and not said.get("gpus"):
        return (
            f"{found}, sees no GPU",
            "fail",
            "check CUDA_VISIBLE_DEVICES, the driver's version and /dev/nvidia*",
        )
    return found, "ok"


@check("megatron-core", f">= {dotted(CORE_NEEDED)}")
def _core(m):
    have = m.distribution("megatron-core")
    if have is None:
        return (
            "not installed",
            "warn",
            "pip install megatron-core (the operators run without it, training does not)",
        )
    if _older(have, CORE_NEEDED):
        return have, "fail", f"pip install 'megatron-core>={dotted(CORE_NEEDED)}'"
    return have, "ok"


@check("transformer-engine", "optional; on GPUs Megatron's grouped experts come from it")
def _te(m):
    have = m.distribution("transformer-engine")
    if have is None and m.gpus():
        return "not installed", "warn", "pip install --no-build-isolation 'transformer-engine[pytorch]'"
    return have or "not installed", "ok"


@check("apex", "optional: NVIDIA's (amp_C, fused optimizers), from github.com/NVIDIA/apex")
def _apex(m):
    where = m.module("apex")
    if where is None:
        return "not installed", "ok"
    if not m.listdir(f"{where}/multi_tensor_apply"):
        remedy = "pip uninstall apex, then build NVIDIA's from github.com/NVIDIA/apex if you want it"
        return "another project of that name (PyPI's)", "warn", remedy
    if m.module("amp_C") is None:
        return (
            "NVIDIA's, without amp_C",
            "warn",
            "rebuild it with APEX_CPP_EXT=1 APEX_CUDA_EXT=1 for its fused optimizers",
        )
    return "NVIDIA's, with amp_C", "ok"


# ---------------------------------------------------------------- GPU, driver, toolkit, library


@check("gpu", "compute capability 9.0, 10.0 or 10.3; or none")
def _gpu(m):
    gpus = m.gpus()
    if not gpus:
        return "none: the CPU back end is used", "ok"
    found = ", ".join(f"{i}: {g['name']} (sm_{_sm(g)})" for i, g in enumerate(gpus))
    if all(g["capability"] in ARCHS for g in gpus):
        return found, "ok"
    return (
        found,
        "fail",
        f"no kernels for this GPU: use {UNICAST}, or --mok-backend reference to try the plugin",
    )


@check("gpus alike", "one kind of GPU in an expert-parallel group")
def _alike(m):
    kinds = sorted({f"{g['name']} (sm_{_sm(g)}, {g.get('sms') or '?'} SMs)" for g in m.gpus()})
    if len(kinds) <= 1:
        return f"{len(m.gpus())} GPU(s), {len(kinds)} kind(s)", "ok"
    return "; ".join(kinds), "warn", "choose GPUs of one kind with CUDA_VISIBLE_DEVICES"


@check("driver", "an NVIDIA driver, where there is a GPU")
def _driver(m):
    if not m.gpus():
        return m.driver() or "none", "ok"
    have, cuda = m.driver(), m.driver_cuda()
    if have is None:
        return (
            "not found",
            "warn",
            "install nvidia-smi in this container (the driver's utility capability) to see its version",
        )
    return f"{have}, serves CUDA {dotted(cuda) if cuda else 'unknown'}", "ok"


@check("cuda versions", "driver >= the CUDA that torch and the library are built with")
def _cuda_versions(m):
    driver = m.driver_cuda()
    built = {}
    for name, said in (("torch", m.torch()), ("library", m.library())):
        have = version((said or {}).get("cuda"))
        if have:
            built[name] = have
    found = ", ".join(
        f"{name} {dotted(have[:2])}" for name, have in {"driver": driver, **built}.items() if have
    )
    if not m.gpus():
        return found or "none", "ok"
    if driver is None:
        return found or "none", "warn", "nvidia-smi does not tell the driver's CUDA version"
    newer = [name for name, have in built.items() if have[0] > driver[0]]
    if newer:
        remedy = f"driver for CUDA {max(built[n] for n in newer)[0]}, or builds for CUDA {driver[0]}"
        return f"{found}: driver older than {' and '.join(newer)}", "fail", remedy
    minor = [name for name, have in built.items() if have[:2] > driver[:2]]
    if minor:
        remedy = "machine code runs, PTX does not ('unsupported toolchain'): update the driver"
        return f"{found}: driver of an older minor release than {' and '.join(minor)}", "warn", remedy
    return found, "ok"


@check("nvcc", f">= {dotted(NVCC_NEEDED)} to build the library; CUDA_HOME one folder")
def _nvcc(m):
    home, have = m.env("CUDA_HOME"), m.nvcc()
    found = f"nvcc {dotted(have) if have else 'not found'}, CUDA_HOME {home or 'unset'}"
    needed_now = bool(m.gpus()) and m.library() is None
    if home and ":" in home:
        return (
            found,
            "warn",
            "CUDA_HOME must be one folder, with no ':' in it: export CUDA_HOME=/usr/local/cuda",
        )
    if home and not m.is_file(f"{home}/bin/nvcc"):
        return found, "warn", "CUDA_HOME has no bin/nvcc: point it at the toolkit, or unset it"
    if have is None:
        remedy = "install the CUDA toolkit (nvcc) or put it on PATH, then `make build`"
        return (found, "warn", remedy) if needed_now else (found, "ok")
    if have < NVCC_NEEDED:
        return (
            found,
            "warn",
            f"`make build` for all architectures needs nvcc {dotted(NVCC_NEEDED)}; MOK_ARCHS=90a needs 12.3",
        )
    cuda = version((m.torch() or {}).get("cuda"))
    if cuda and cuda[0] != have[0]:
        remedy = (
            "torch extensions would not build with this nvcc; megatron_mok's library does not depend on torch"
        )
        return f"{found}, torch's CUDA {dotted(cuda)}", "warn", remedy
    return found, "ok"


@check("kernel library", "libmegatron_mok.so, where there is a GPU")
def _library(m):
    path, said = m.library_path(), m.library()
    if said is None:
        if m.gpus():
            return "not built", "fail", "make build (set MOK_ARCHS to build for this GPU alone)"
        return f"not built ({NO_GPU})", "ok"
    if "error" in said:
        return said["error"], "fail", "make build, or set MOK_LIBRARY to a library that loads"
    archs = _library_archs(said)
    if not archs:
        return (
            f"{path}, does not tell its architectures",
            "warn",
            "built by another version of this package: make build",
        )
    return f"{path} for {', '.join(archs)}", "ok"


@check("gpu architecture", "the library has machine code for every GPU here")
def _architecture(m):
    gpus = m.gpus()
    if not gpus:
        return NO_GPU, "ok"
    wanted = sorted({ARCHS.get(g["capability"], _sm(g)) for g in gpus})
    archs = _library_archs(m.library())
    missing = [arch for arch in wanted if arch not in archs]
    if m.library() == {}:
        return f"GPU {', '.join(wanted)}; library does not tell", "warn", "make build"
    found = f"GPU {', '.join(wanted)}; library {', '.join(archs) or 'none'}"
    if not missing:
        return found, "ok"
    known = [arch for arch in missing if arch in ARCHS.values()]
    remedy = (
        f"MOK_ARCHS={','.join(known)} make build"
        if known
        else f"use {UNICAST}: there are no kernels for this GPU"
    )
    return found, "fail", remedy


def _sm(gpu):
    return "".join(str(n) for n in gpu["capability"] or "?")


def _library_archs(said):
    archs = (said or {}).get("archs") or []
    if isinstance(archs, str):
        archs = archs.replace(",", " ").split()
    return [str(arch)[3:] if str(arch).startswith("sm_") else str(arch) for arch in archs]


# ---------------------------------------------------------------- between GPUs


@check("nccl", "any that torch brings, where there is a GPU")
def _nccl(m):
    have = (m.torch() or {}).get("nccl")
    if have:
        return dotted(have), "ok"
    if m.gpus():
        return "torch tells none", "warn", "install a CUDA build of torch; Megatron itself needs NCCL"
    return NO_GPU, "ok"


@check("peer access", "every GPU reaches every other")
def _peers(m):
    if len(m.gpus()) < 2:
        return f"{len(m.gpus())} GPU(s)", "ok"
    said = m.torch() or {}
    if "no_peer_access" not in said:
        return "unknown", "warn", "torch could not tell; compare nvidia-smi topo -p2p r"
    missing = said["no_peer_access"]
    if not missing:
        return "all pairs", "ok"
    pairs = ", ".join(f"{i}->{j}" for i, j in missing[:8]) + (
        f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    )
    remedy = (
        f"keep them out of one expert-parallel group, or use {UNICAST}; check IOMMU/ACS and the container"
    )
    return f"none for {pairs}", "fail", remedy


@check("nvlink", "NVLink between every pair (nvidia-smi topo -m)")
def _nvlink(m):
    if len(m.gpus()) < 2:
        return f"{len(m.gpus())} GPU(s)", "ok"
    links = topology(m.run(["nvidia-smi", "topo", "-m"]) or "")
    if not links:
        return "unknown", "warn", "nvidia-smi topo -m gives no table"
    slow = sorted(pair for pair, link in links.items() if not link.startswith("NV"))
    if not slow:
        return f"{len(links)} pairs, {', '.join(sorted(set(links.values())))}", "ok"
    kinds = ", ".join(f"{i}-{j} {links[i, j]}" for i, j in slow[:8])
    return (
        f"no NVLink for {kinds}",
        "warn",
        f"function only, slow: keep expert-parallel groups on NVLink, or use {UNICAST}",
    )


def topology(text: str) -> dict:
    """{(i, j): link} for i < j from `nvidia-smi topo -m`; a link is NV18, SYS, NODE, PHB, PXB or PIX."""
    rows = [line.replace("\x1b[4m", "").replace("\x1b[0m", "").split() for line in text.splitlines()]
    header = next((row for row in rows if row and row[0].startswith("GPU")), [])
    columns = [name for name in header if name.startswith("GPU") and name[3:].isdigit()]
    links = {}
    for row in rows:
        if row and row is not header and row[0] in columns:
            for k, name in enumerate(columns):
                i, j = int(row[0][3:]), int(name[3:])
                if i < j and k + 1 < len(row):
                    links[i, j] = row[k + 1]
    return links


@check("multicast", "not used: peers are reached by unicast loads, stores and bulk copies")
def _multicast(m):
    value = m.env("TORCH_SYMM_MEM_DISABLE_MULTICAST")
    if value and value not in ("0", "false"):
        return f"TORCH_SYMM_MEM_DISABLE_MULTICAST={value}", "ok"
    return "TORCH_SYMM_MEM_DISABLE_MULTICAST unset: the runtime sets it", "ok"


@check("symmetric memory", "torch's symmetric memory, for several GPUs")
def _symmetric(m):
    said = m.torch() or {}
    if said.get("symmetric_memory"):
        return "in torch", "ok"
    found = said.get("symmetric_memory_error") or ("not in this torch" if said else "no torch")
    if len(m.gpus()) < 2:
        return found, "ok"
    return found, "fail", f"pip install 'torch>={dotted(TORCH_NEEDED)}' with CUDA"


@check("allocator", "no expandable_segments, or a container that allows pidfd_getfd")
def _allocator(m):
    values = [m.env(name) for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")]
    found = ", ".join(value for value in values if value) or "default"
    if "expandable_segments:true" in found.lower().replace(" ", "") and m.descriptor_exchange_errno():
        remedy = "drop expandable_segments (PYTORCH_CUDA_ALLOC_CONF), or container --cap-add=SYS_PTRACE"
        return f"{found}, and pidfd_getfd is refused", "fail", remedy
    return found, "ok"


@check("handle exchange", "ranks may pass file descriptors of GPU memory (pidfd_getfd)")
def _handles(m):
    failed = m.descriptor_exchange_errno()
    scope = (m.read("/proc/sys/kernel/yama/ptrace_scope") or "").strip() or "none"
    seccomp = _status_field(m.read("/proc/self/status"), "Seccomp") or "?"
    found = f"Yama ptrace_scope {scope}, seccomp {seccomp}, "
    if failed == 0:
        return found + "a trial succeeded", "ok"
    found += f"a trial failed: {errno.errorcode.get(failed, failed)}" if failed else "not tried"
    if len(m.gpus()) < 2:
        return found, "ok"
    remedy = "container: --cap-add=SYS_PTRACE, or seccomp=unconfined; host: kernel.yama.ptrace_scope=0"
    return found, "warn", remedy


def _status_field(text, name):
    for line in (text or "").splitlines():
        if line.startswith(name + ":"):
            return line.split(":", 1)[1].strip()
    return None


@check("shared memory", "/dev/shm above docker's default of 64 MB, for NCCL")
def _shm(m):
    space = m.free_and_total_bytes("/dev/shm")
    if space is None:
        return "no /dev/shm", "warn", "mount a tmpfs there (container: --shm-size=8g or --ipc=host)"
    free, total = space
    found = f"{_mib(free)} free of {_mib(total)}"
    if total <= DOCKER_SHM_BYTES or free < DOCKER_SHM_BYTES // 2:
        return found, "warn", "container: --shm-size=8g or --ipc=host; or remove what fills /dev/shm"
    return found, "ok"


@check("locked memory", "no limit (ulimit -l), for NCCL over InfiniBand")
def _memlock(m):
    limit = m.locked_memory_limit_bytes()
    found = {None: "unknown", -1: "unlimited"}.get(limit) or f"{limit // 1024} KB"
    if limit in (None, -1) or not m.gpus():
        return found, "ok"
    return found, "warn", "ulimit -l unlimited (container: --ulimit memlock=-1)"


def _mib(count):
    return f"{count / (1 << 20):,.0f} MiB"


@check("fabric manager", "running, where NVSwitch connects the GPUs")
def _fabric(m):
    fabric = m.fabric()
    state, status = fabric.get("State", "N/A"), fabric.get("Status", "N/A")
    found = f"fabric state {state}, status {status}"
    if not m.gpus() or state == "N/A":
        return (found if m.gpus() else NO_GPU), "ok"
    if state == "Completed" and status in ("Success", "N/A"):
        return found, "ok"
    # CUDA says "system not yet initialized" until it runs
    remedy = "start nvidia-fabricmanager, of the driver's version, on the host"
    return found, "fail", remedy


@check("imex", "a channel and the service, where NVLink spans hosts")
def _imex(m):
    cluster = m.fabric().get("ClusterUUID", "N/A")
    spans_hosts = bool(cluster.replace("0", "").replace("-", "")) and cluster != "N/A"
    channels = m.listdir("/dev/nvidia-caps-imex-channels") or []
    if not m.gpus() or not spans_hosts:
        return "NVLink does not span hosts here", "ok"
    found = f"NVLink cluster {cluster}, {len(channels)} channel(s)"
    if not channels:
        remedy = "add an IMEX channel (/dev/nvidia-caps-imex-channels), or keep groups within a host"
        return found, "fail", remedy
    service = m.run(["nvidia-imex-ctl", "-N"])
    if service is None:
        return (
            f"{found}, nvidia-imex-ctl does not answer",
            "warn",
            "start nvidia-imex on every host of the NVLink domain",
        )
    return found, "ok"


@check("ranks per gpu", "one rank on each GPU")
def _ranks(m):
    visible, ranks = m.env("CUDA_VISIBLE_DEVICES"), version(m.env("LOCAL_WORLD_SIZE"))
    names = [name.strip() for name in visible.split(",")] if visible else []
    gpus = len(m.gpus())
    found = (
        f"{gpus} GPU(s), CUDA_VISIBLE_DEVICES {visible or 'unset'}, ranks {ranks[0] if ranks else 'unset'}"
    )
    if len(set(names)) < len(names):
        return found, "fail", "CUDA_VISIBLE_DEVICES names a GPU twice: list each once"
    if gpus and ranks and ranks[0] > gpus:
        remedy = "one rank a GPU, chosen by LOCAL_RANK; --mok-shared-device allows sharing (slow)"
        return found, "fail", remedy
    return found, "ok"


# ---------------------------------------------------------------- verdict


def backends(m: Machine) -> list[str]:
    """The back ends that can run here: "cuda", "reference", both or none."""
    torch = m.torch() or {}
    if tuple(m.python()[:2]) < PYTHON_NEEDED or _older(torch.get("version"), TORCH_NEEDED):
        return []
    archs, driver = _library_archs(m.library()), m.driver_cuda()
    built = version((m.library() or {}).get("cuda"))
    gpus = torch.get("gpus") or []
    loads = bool(gpus) and all(ARCHS.get(tuple(g["capability"])) in archs for g in gpus)
    serves = not (built and driver) or driver[0] >= built[0]
    return (["cuda"] if loads and serves else []) + ["reference"]


@check("back end", "cuda on a supported GPU, reference (CPU) elsewhere")
def _backend(m):
    runs = backends(m)
    if not runs:
        return "none can run", "fail", "mend python and torch above"
    if m.gpus() and "cuda" not in runs:
        remedy = "mend the lines above: backend=auto never falls back; --mok-backend reference is slow"
        return "reference only, on a machine with a GPU", "warn", remedy
    return f"{runs[0]} (backend=auto takes it)", "ok"


# ---------------------------------------------------------------- report


def table(made: list[Check]) -> str:
    rows = [("", "check", "found", "needed"), *((c.status, c.check, c.found, c.needed) for c in made)]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    width = min(60, max(len(row[2]) for row in rows))
    lines = []
    remedies = ["", *(c.remedy for c in made)]
    for i, row in enumerate(rows):
        lines.append(f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:<{width}}  {row[3]}".rstrip())
        if remedies[i]:
            lines.append(" " * (sum(widths) + 4) + f"-> {remedies[i]}")
    return "\n".join(lines)


def run(argv: list[str], machine: Machine | None = None) -> int:
    """`mok doctor [--json]`; exit code 0 where some back end can run, else 1."""
    parser = argparse.ArgumentParser(prog="mok doctor", description=__doc__.splitlines()[0].strip())
    parser.add_argument("--json", action="store_true", help="print JSON alone: {checks: [...]}")
    args = parser.parse_args(argv)
    machine = machine or Machine()
    made = checks(machine)
    if args.json:
        print(json.dumps({"checks": [asdict(c) for c in made]}, indent=1))
    else:
        print(table(made))
        bad = [c.check for c in made if c.status != "ok"]
        print(f"\n{len(made)} checks, {len(bad)} to look at{': ' + ', '.join(bad) if bad else ''}")
    try:
        return 0 if backends(machine) else 1
    except Exception:
        return 1
