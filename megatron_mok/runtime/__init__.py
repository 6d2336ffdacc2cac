"""Communicators, the choice of the back end, and the layer as one function call."""

from .comm import Comm, choose_backend, get_comm, open_workspace_bytes, release, reserve, waited_ns
from .layer import moe
from .sizes import local_bytes, saved_bytes, workspace_bytes

__all__ = [
    "Comm",
    "choose_backend",
    "get_comm",
    "local_bytes",
    "moe",
    "open_workspace_bytes",
    "release",
    "reserve",
    "saved_bytes",
    "waited_ns",
    "workspace_bytes",
]
