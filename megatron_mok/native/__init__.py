"""The library with the kernels: loading it, its structs, and the calls."""

from .communicator import (
    UNIT_ROWS,
    BackwardCall,
    Call,
    Communicator,
    Settings,
    aligned_empty,
    close,
    load_kernels,
    lookup,
    moe_backward,
    moe_forward,
    register,
    symmetric_bytes,
    workspace_layout,
)
from .library import build_info, load
from .saved import unpack_h

__all__ = [
    "UNIT_ROWS",
    "BackwardCall",
    "Call",
    "Communicator",
    "Settings",
    "aligned_empty",
    "build_info",
    "close",
    "load",
    "load_kernels",
    "lookup",
    "moe_backward",
    "moe_forward",
    "register",
    "symmetric_bytes",
    "unpack_h",
    "workspace_layout",
]
