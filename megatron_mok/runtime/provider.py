"""What a back end has to offer. One provider object per back end; communicators are made through it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..config import MokConfig
from ..reference import exchange


@dataclass(frozen=True)
class Request:
    """A communicator to be opened. The same on all ranks of the group.

    group       the expert-parallel process group, or None for one rank
    control     handle of a reference exchange over the group: carries the host's messages, with time limits
    max_tokens  the largest number of tokens per call of any rank
    """

    group: Any
    control: int
    hidden: int
    top_k: int
    num_experts: int
    max_tokens: int
    dtype: torch.dtype
    device: torch.device
    config: MokConfig


class Provider(Protocol):
    """A back end. `name` is the value of MokConfig.backend that asks for it."""

    name: str

    def why(self, device: torch.device) -> str:
        """One line: why it serves this device. UnsupportedDevice or LibraryMissing, with the remedy, if
        not.
        """

    def facts(self, device: torch.device) -> dict[str, object]:
        """What must be equal on all ranks (architecture, SMs, library version); JSON values."""

    def open(self, request: Request) -> int:
        """Make the workspace; the handle for the operators. Collective; may raise on some ranks only."""

    def abort(self, handle: int, cause: Exception) -> None:
        """Tell the peers that this rank will not take part in the call that they are about to start."""

    def set_layer(self, handle: int, layer: int) -> None:
        """The layer of the next forward call, for error texts."""

    def waited_ns(self, handle: int) -> torch.Tensor | None:
        """int64 [1] on the device: time waited for peers since it was opened; None where nobody takes it."""

    def close(self, handle: int) -> None:
        """Free the workspace. No collective communication."""


class ReferenceProvider:
    """Plain torch over the process group: needs no more than the control exchange."""

    name = "reference"

    def why(self, device: torch.device) -> str:
        if device.type != "cpu":
            return f"plain torch on {device}, as asked for"
        return "no GPU on this machine" if not torch.cuda.is_available() else "the layer is on the CPU"

    def facts(self, device: torch.device) -> dict[str, object]:
        return {"device": device.type}

    def open(self, request: Request) -> int:
        return request.control

    def abort(self, handle: int, cause: Exception) -> None:
        exchange.lookup(handle).abort()

    def set_layer(self, handle: int, layer: int) -> None:
        exchange.lookup(handle).layer = layer

    def waited_ns(self, handle: int) -> None:
        return None

    def close(self, handle: int) -> None:
        exchange.close(handle)
