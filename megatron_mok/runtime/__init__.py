"""Communicators, the choice of the back end, and the layer as one function call."""

from .comm import Comm, choose_backend, get_comm, release, reserve
from .layer import moe
from .sizes import saved_bytes, workspace_bytes

__all__ = [
    "Comm",
    "choose_backend",
    "get_comm",
    "moe",
    "release",
    "reserve",
    "saved_bytes",
    "workspace_bytes",
]
