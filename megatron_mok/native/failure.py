"""What a bounded wait left behind, as an exception."""

from __future__ import annotations

from ..errors import MokError, PeerAbort, PeerTimeout, ProtocolMismatch, WorkspaceTooSmall
from .structs import CallKind, ErrorRecord, Failure, Phase

_KINDS = {kind.value: kind.name.lower() for kind in CallKind}
_STAMPED = (Phase.PUBLISH, Phase.COMBINE)  # phases that wait for a peer's stamp; the others wait for a count
# Where the workspace still counts the previous call: in these phases of a forward, and in a whole backward.
_BEFORE_CALL = (Phase.PUBLISH, Phase.GRID)


def describe_stamp(word: int) -> str:
    """A flag word in words: call number, kind and layer (see layout/workspace.h)."""
    if word == 0:
        return "no call yet"
    call, kind, layer = word >> 24, word >> 20 & 0xF, word & 0xFFFFF
    return f"call {call} ({_KINDS.get(kind, f'kind {kind}')}, layer {layer})"


def workspace_too_small(tokens: int, max_tokens: int) -> WorkspaceTooSmall:
    return WorkspaceTooSmall(
        f"tokens: got {tokens}, need at most {max_tokens}, for which the workspace was made; raise "
        "max_tokens (--mok-max-tokens), or between steps call reserve(max_tokens) on all ranks",
        got=tokens,
        max_tokens=max_tokens,
    )


def from_record(record: ErrorRecord) -> MokError | None:
    """The error that ended a workspace, or None while it lives."""
    if record.code == Failure.NONE:
        return None
    phase = Phase(record.phase)
    stamped = phase in _STAMPED
    call = record.call + (phase in _BEFORE_CALL or record.kind == CallKind.BACKWARD)
    if record.code == Failure.TIMEOUT:
        return PeerTimeout(
            rank=record.rank,
            call=call,
            layer=record.layer,
            phase=phase.name.lower(),
            peer=record.peer,
            expected=describe_stamp(record.expected) if stamped else record.expected,
            seen=describe_stamp(record.seen) if stamped else record.seen,
            seconds=record.waited_ns / 1e9,
        )
    if record.code == Failure.MISMATCH:
        return ProtocolMismatch(
            rank=record.rank,
            call=describe_stamp(record.expected),
            peer=record.peer,
            peer_call=describe_stamp(record.seen),
        )
    if record.code == Failure.TOO_MANY_TOKENS and record.peer == record.rank:
        return workspace_too_small(record.seen, record.expected)
    if record.code == Failure.TOO_MANY_TOKENS:
        return PeerAbort(
            f"rank {record.peer} announced {record.seen} tokens, this workspace was made for at most "
            f"{record.expected}",
            peer=record.peer,
        )
    return PeerAbort(
        f"rank {record.rank}, in {phase.name.lower()} of call {call}: rank {record.peer} gave up before or "
        "in that call; see its own error",
        peer=record.peer,
    )
