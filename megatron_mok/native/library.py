"""Finds, loads and checks libmegatron_mok.so; turns its status codes into exceptions."""

from __future__ import annotations

import ctypes
import json
from functools import cache
from pathlib import Path
from typing import Any

from .. import env
from ..errors import LibraryMissing, UnsupportedDevice
from .structs import ABI_VERSION, FUNCTIONS, Status

NAME = "libmegatron_mok.so"
_ERRORS: dict[int, type[Exception]] = {
    Status.ABI: LibraryMissing,
    Status.ARGUMENT: ValueError,
    Status.DEVICE: UnsupportedDevice,
    Status.CUDA: RuntimeError,
    Status.NOT_COMPILED: LibraryMissing,
}


def path() -> Path:
    """Where the library is looked for: $MOK_LIBRARY, else beside this file (wheel and source tree alike)."""
    return Path(env.text("MOK_LIBRARY") or Path(__file__).parent / NAME)


@cache
def load() -> ctypes.CDLL:
    """The library, ready to call; needs no GPU. LibraryMissing if it is absent or of another ABI."""
    where = path()
    if not where.exists():
        raise LibraryMissing(
            f"{where}: not there; run `make build` (needs nvcc), or use backend='reference' "
            "(--mok-backend reference)"
        )
    try:
        library = ctypes.CDLL(str(where))
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise LibraryMissing(f"{where}: cannot be loaded: {error}; run `make build` again") from error
    found = json.loads(library.mok_build_info())["abi"]
    if found != ABI_VERSION:
        raise LibraryMissing(
            f"{where}: got ABI version {found}, need {ABI_VERSION}, this package's; run `make build` again"
        )
    return library


def build_info() -> dict[str, Any]:
    """{"abi", "archs": ["90a", ...], "cuda": "13.0", "csrc_tree"} of the library. LibraryMissing."""
    return json.loads(load().mok_build_info())


def call(name: str, *arguments: Any) -> None:
    """Call a function that returns a status; raise its last error if that is not OK.

    ValueError for a bad argument, LibraryMissing for another ABI or something not compiled,
    UnsupportedDevice, RuntimeError from CUDA.
    """
    library = load()
    status = getattr(library, name)(*arguments)
    if status != Status.OK:
        raise _ERRORS[status](f"{name}: {library.mok_last_error().decode()}")
