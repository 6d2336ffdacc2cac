"""The only place that reads or sets environment variables. `KNOWN` lists all that the package looks at."""

from __future__ import annotations

import os

KNOWN = {
    "RANK": "rank of this process in the job (set by torchrun)",
    "WORLD_SIZE": "processes in the job (set by torchrun)",
    "LOCAL_RANK": "rank of this process on its host (set by torchrun)",
    "LOCAL_WORLD_SIZE": "processes on this host (set by torchrun)",
    "MOK_LIBRARY": "path of the kernel library to load instead of the installed one",
    "MOK_ARCHS": "GPU architectures to build for, as in 90a,100a,103a",
    "CUDA_HOME": "CUDA toolkit",
    "CUDA_VISIBLE_DEVICES": "GPUs that this process may use",
    "CUDA_DEVICE_MAX_CONNECTIONS": "hardware queues; Megatron wants 1 with TP or CP on Hopper",
    "PYTORCH_CUDA_ALLOC_CONF": "settings of torch's caching allocator",
    "PYTORCH_ALLOC_CONF": "settings of torch's caching allocator (newer name)",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1: unicast only (set before the first allocation)",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "allows several ranks on one GPU",
    "PATH": "where commands are looked up",
    "HOME": "the user's folder",
}


def text(name: str, default: str | None = None) -> str | None:
    """Value of the variable `name`, or `default` where it is unset or empty. KeyError if not in `KNOWN`."""
    if name not in KNOWN:
        raise KeyError(f"{name} is not listed in megatron_mok.env.KNOWN")
    return os.environ.get(name) or default


def integer(name: str, default: int | None = None) -> int | None:
    """Value of `name` as an int. ValueError, naming the variable, where it is no number."""
    value = text(name)
    if value is None:
        return default
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"environment variable {name}: got {value!r}, need an integer") from None


def flag(name: str) -> bool:
    """True where `name` is set to anything but 0, false, no or off."""
    value = text(name)
    return value is not None and value.strip().lower() not in ("0", "false", "no", "off")


def put(name: str, value: str) -> None:
    """Set a variable for libraries that this process loads or calls later. KeyError if not in `KNOWN`."""
    if name not in KNOWN:
        raise KeyError(f"{name} is not listed in megatron_mok.env.KNOWN")
    os.environ[name] = value


def child(**defaults: str) -> dict[str, str]:
    """Environment for a child process: this one's, with `defaults` where a variable is unset."""
    return {**defaults, **os.environ}
