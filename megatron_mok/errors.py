"""Errors that users see. Each says which field, what it got, what it needs and what to do.

`ConfigError`s come at configuration time; the others belong to a machine (`UnsupportedDevice`,
`LibraryMissing`) or to a call in which several ranks take part (`WorkspaceTooSmall`, `PeerTimeout`,
`ProtocolMismatch`, `PeerAbort`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Problem(NamedTuple):
    """One offending setting: its name, the value found, the values allowed, and what to change."""

    field: str
    got: object
    need: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: got {self.got!r}, need {self.need}; {self.remedy}"


class MokError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(MokError, ValueError):
    """Settings that cannot work. `problems` lists all offenders, and so does the message.

    `where` says what was being configured ("MokConfig", "moe_token_dispatcher_type='mok'", ...).
    """

    def __init__(self, problems: Iterable[Problem], where: str = "megatron_mok") -> None:
        self.problems = list(problems)
        self.where = where
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        count = "1 setting" if len(self.problems) == 1 else f"{len(self.problems)} settings"
        super().__init__(f"{where}: {count} cannot be used:{lines}")

    def __reduce__(self):
        return type(self), (self.problems, self.where)


class UnsupportedDevice(MokError, RuntimeError):
    """The GPU (or the set of GPUs) cannot run the kernels."""


class LibraryMissing(MokError, RuntimeError):
    """The shared library with the kernels is absent, of another ABI, or lacks what is asked for."""


class WorkspaceTooSmall(MokError, RuntimeError):
    """This rank has more tokens (`got`) in a call than the workspace was made for (`max_tokens`)."""

    def __init__(self, message: str, *, got: int | None = None, max_tokens: int | None = None) -> None:
        super().__init__(message)
        self.got, self.max_tokens = got, max_tokens


class PeerTimeout(MokError, RuntimeError):
    """A peer did not answer in time.

    `rank` waited in its call number `call`, in layer `layer`, in `phase`, for `peer`; the word it waited for
    is `expected`, the one it found is `seen`, and it waited `seconds`. Unknown values are None.
    """

    def __init__(
        self,
        *,
        rank: int | None,
        call: int | None,
        layer: int | str | None,
        phase: str | None,
        peer: int | None,
        expected: object,
        seen: object,
        seconds: float | None,
    ) -> None:
        self.rank, self.call, self.layer, self.phase = rank, call, layer, phase
        self.peer, self.expected, self.seen, self.seconds = peer, expected, seen, seconds
        waited = "" if seconds is None else f" after {seconds:g} s"
        super().__init__(
            f"rank {rank}: no answer from rank {peer}{waited} in {phase} of call {call} (layer {layer}): "
            f"expected {expected}, seen {seen}. Look at rank {peer}'s log first; a slow but healthy peer "
            "needs a larger timeout_s (--mok-timeout-s)"
        )


class ProtocolMismatch(MokError, RuntimeError):
    """Two ranks are in different calls (one skipped a layer, or one is in forward and the other in backward).

    `rank` is in `call`, `peer` in `peer_call` (each a short text).
    """

    def __init__(self, *, rank: int, call: object, peer: int, peer_call: object) -> None:
        self.rank, self.call, self.peer, self.peer_call = rank, call, peer, peer_call
        super().__init__(
            f"rank {rank} is in {call}, but rank {peer} is in {peer_call}. All ranks of an expert-parallel "
            "group must make the same MoE calls in the same order"
        )


class PeerAbort(MokError, RuntimeError):
    """A peer gave up (its own error is the cause) and told this rank so. `peer` is its rank, where known."""

    def __init__(self, message: str, *, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


def of_peer(rank: int, name: str, text: str) -> MokError:
    """What the other ranks raise where `rank` failed with an error of type `name`, before a call.

    What belongs to a machine keeps its type, so that a launcher can tell; the rest becomes a PeerAbort.
    """
    for kind in (UnsupportedDevice, LibraryMissing):
        if name == kind.__name__:
            return kind(f"rank {rank}: {text}")
    return PeerAbort(f"rank {rank} gave up: {name}: {text}", peer=rank)
