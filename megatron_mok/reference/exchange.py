"""Ranks of an expert-parallel group that exchange rows over torch.distributed (gloo), or one rank alone.

The protocol is the kernels': in every call each rank first publishes one word to every peer, here a `Word`
sent point to point, and waits for every peer's. Words are compared exactly, so ranks in different calls
find out at once; a rank that cannot take part publishes an abort instead. Then rows are pulled from, and
results pushed back to, the ranks that own the tokens. Every wait is bounded; after a time-out or a
mismatch the exchange is dead.

Symbols: R ranks, T tokens here, K experts per token, M rows that arrive here; slot = token * K + k.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import PeerAbort, PeerTimeout, ProtocolMismatch

_TAG = 0x6D6F6B  # of the words; nothing else in an expert-parallel group sends point to point with it


class Call(IntEnum):
    """What a rank publishes that it is doing."""

    FORWARD = 1
    BACKWARD = 2
    CONTROL = 3  # agreeing on sizes and settings
    ABORT = 4


@dataclass(frozen=True)
class Word:
    """What one rank publishes at the start of a call. `asks[s]`: rows that it will pull from rank s (or
    []).
    """

    exchange: int
    call: int
    kind: int
    layer: int
    tokens: int
    needs: int
    asks: tuple[int, ...]

    def __str__(self) -> str:
        kind = Call(self.kind).name.lower()
        layer = f", layer {self.layer}" if self.layer else ""
        return f"{kind} call {self.call} of exchange {self.exchange}{layer}"

    def integers(self, num_ranks: int) -> list[int]:
        asks = self.asks or (0,) * num_ranks
        return [self.exchange, self.call, self.kind, self.layer, self.tokens, self.needs, *asks]

    @staticmethod
    def from_integers(values: list[int]) -> Word:
        exchange, call, kind, layer, tokens, needs, *asks = values
        return Word(exchange, call, kind, layer, tokens, needs, tuple(asks))

    def same_call(self, other: Word) -> bool:
        layers = {self.layer, other.layer}
        return (self.exchange, self.call, self.kind) == (other.exchange, other.call, other.kind) and (
            len(layers) == 1 or 0 in layers  # 0: not known, as under torch.compile
        )


@dataclass(frozen=True)
class Route:
    """Who sends which rows to whom in this call; both directions use it.

    order   [M] int64     the rows here, ordered by the rank that owns their tokens
    owned   [R] ints      how many of them each rank owns
    asked   [R] ints      how many rows each rank computes for this one
    slot    [sum(asked)]  the slots of those rows, rank by rank
    """

    order: Tensor
    owned: list[int]
    asked: list[int]
    slot: Tensor


@dataclass
class _Wait:
    """Waits that end at `end` together. peer: of which rank the last word is due, None where of all."""

    end: float
    peer: int | None = None

    def __call__(self, work: Any, peer: int | None = None) -> None:
        self.peer = peer
        work.wait(timedelta(seconds=max(self.end - time.monotonic(), 0.001)))


class Exchange:
    """One rank's end. `layer` may be set before a forward call, for the words and the error texts.

    group       a process group, or None for a rank alone
    timeout_s   longest wait in seconds; up to the first forward call it is `first_timeout_s`, by default the
                group's own time-out
    number      which exchange of the group this is, the same on all ranks
    precision   "bf16" (operands as they are) or "mxfp8"
    """

    def __init__(
        self,
        group: Any = None,
        *,
        timeout_s: float | None = None,
        first_timeout_s: float | None = None,
        number: int = 0,
        precision: str = "bf16",
    ) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        limit = group_timeout_s(group)
        self.timeout_s = min(300.0, limit / 2) if timeout_s is None else timeout_s
        self.first_timeout_s = limit if first_timeout_s is None else first_timeout_s
        self.number, self.precision = number, precision
        self.calls, self.layer = 0, 0
        self.last_layer, self._forwards = 0, 0  # of the call that runs or ran last; begun so far
        self.failure: Exception | None = None
        self._wire = _wire_device(group)
        self._peers = [r for r in range(self.size) if r != self.rank]

    def publish(
        self, kind: Call, *, tokens: int = 0, needs: int = 0, asks: tuple[int, ...] = ()
    ) -> list[Word]:
        """Start a call: the words of all ranks, by rank.

        ProtocolMismatch where a peer is in another call, PeerTimeout where it is silent, PeerAbort where it
        gave up. After the last one the ranks are still in step, and the next call may follow.
        """
        if self.failure is not None:
            raise PeerAbort(
                f"this communicator failed before ({type(self.failure).__name__}: {self.failure}); call "
                "megatron_mok.release() on all ranks, then the next forward makes it anew"
            )
        self._begin()
        self._forwards += kind == Call.FORWARD
        words = self._trade(Word(self.number, self.calls, kind, self.last_layer, tokens, needs, asks))
        mine = words[self.rank]
        for peer, word in enumerate(words):
            if word.kind == Call.ABORT:
                raise PeerAbort(f"rank {peer} gave up before {mine}: see its own error", peer=peer)
        for peer, word in enumerate(words):
            if not mine.same_call(word):
                raise self._dead(
                    ProtocolMismatch(rank=self.rank, call=str(mine), peer=peer, peer_call=str(word))
                )
        return words

    def abort(self) -> None:
        """Tell the peers, who are at the start of a call, that this rank will not take part in it."""
        if self.failure is None:
            self._begin()
            try:
                self._trade(Word(self.number, self.calls, Call.ABORT, self.last_layer, 0, 0, ()))
            except (PeerAbort, PeerTimeout):
                pass  # they have an error of their own; ours is the one to raise

    @contextmanager
    def aborting(self) -> Iterator[None]:
        """Whatever is raised inside also ends the call that the peers are about to start."""
        try:
            yield
        except Exception:
            self.abort()
            raise

    def gather_routing(self, ids: Tensor, probs: Tensor, words: list[Word]) -> tuple[Tensor, Tensor, Tensor]:
        """ids and probs [R, max T, K] and tokens [R] of all ranks, from ids [T, K] int32 and probs [T, K]
        fp32.
        """
        tokens = torch.tensor([word.tokens for word in words])
        if self.size == 1:
            return ids.unsqueeze(0), probs.unsqueeze(0), tokens.to(ids.device)
        width, top_k = int(tokens.max()), ids.shape[1]
        mine = torch.full((2, width, top_k), -1, dtype=torch.int32, device=self._wire)
        mine[0, : len(ids)] = ids
        mine[1, : len(ids)] = probs.view(torch.int32)
        every = mine.new_empty(self.size, *mine.shape)
        if mine.numel():
            with self._bounded("routing") as wait:
                wait(dist.all_gather(list(every), mine, group=self.group, async_op=True))
        every = every.to(ids.device)
        return every[:, 0], every[:, 1].view(torch.float32), tokens.to(ids.device)

    def connect(self, source: Tensor, slot: Tensor, asked: list[int]) -> Route:
        """The route for the rows here, whose tokens stand in `slot` [M] of rank `source` [M].

        asked[r]: how many rows rank r computes for this one.
        """
        if self.size == 1:
            return Route(torch.arange(len(slot), device=slot.device), [len(slot)], [len(slot)], slot)
        order = source.argsort(stable=True)
        owned = torch.bincount(source, minlength=self.size).tolist()
        wanted = self._swap(slot[order].int(), owned, asked, "slots").long()
        return Route(order, owned, asked, wanted)

    def pull(self, route: Route, values: Tensor) -> Tensor:
        """Rows here [M, ...], from `values`, which has one row for each of this rank's slots in
        `route.slot`.
        """
        if self.size == 1:
            return values
        rows = torch.empty(len(route.order), *values.shape[1:], dtype=values.dtype, device=values.device)
        rows[route.order] = self._swap(values, route.asked, route.owned, "dispatch")
        return rows

    def push(self, route: Route, rows: Tensor, slots: int) -> Tensor:
        """[slots, ...] on the owners, from the rows [M, ...] computed here; zeros where no route was."""
        if self.size > 1:
            rows = self._swap(rows[route.order], route.owned, route.asked, "combine")
        out = rows.new_zeros(slots, *rows.shape[1:])
        out[route.slot] = rows
        return out

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """The payloads of all ranks, by rank: a call of its own."""
        words = self.publish(Call.CONTROL, tokens=len(payload))
        if self.size == 1:
            return [payload]
        width = max(word.tokens for word in words)
        mine = torch.frombuffer(bytearray(payload.ljust(width, b"\0")), dtype=torch.uint8).to(self._wire)
        every = mine.new_empty(self.size, width)
        with self._bounded("settings") as wait:
            wait(dist.all_gather(list(every), mine, group=self.group, async_op=True))
        return [bytes(row[: word.tokens].tolist()) for row, word in zip(every, words, strict=True)]

    # ---- below: messages with a time limit ----

    def _dead(self, error: Exception) -> Exception:
        self.failure = error
        return error

    def _begin(self) -> None:
        self.calls += 1
        self.last_layer, self.layer = self.layer, 0

    def _trade(self, word: Word) -> list[Word]:
        """Every rank's word. Point to point, so that a silent peer is known by its rank."""
        mine = torch.tensor(word.integers(self.size), dtype=torch.int64, device=self._wire)
        if self._wire.type != "cpu":  # NCCL orders sends behind receives: only a collective is safe
            every = mine.new_empty(self.size, len(mine))
            with self._bounded("publication", str(word)) as wait:
                wait(dist.all_gather(list(every), mine, group=self.group, async_op=True))
            return [Word.from_integers(row) for row in every.tolist()]
        seen = {r: torch.empty_like(mine) for r in self._peers}
        with self._bounded("publication", str(word)) as wait:
            receiving, sending = {}, {}
            for r in self._peers:  # gloo may know already here that a peer has gone
                wait.peer = r
                receiving[r] = dist.irecv(seen[r], group=self.group, group_src=r, tag=_TAG)
                sending[r] = dist.isend(mine, group=self.group, group_dst=r, tag=_TAG)
            for works in (receiving, sending):
                for peer, work in works.items():
                    wait(work, peer)
        seen[self.rank] = mine
        return [Word.from_integers(seen[r].tolist()) for r in range(self.size)]

    def _swap(self, values: Tensor, send: list[int], receive: list[int], phase: str) -> Tensor:
        """send[r] rows of `values` to each rank r, receive[r] rows from it, in rank order."""
        mine = values.to(self._wire).contiguous()
        out = mine.new_empty(sum(receive), *mine.shape[1:])
        with self._bounded(phase) as wait:
            wait(dist.all_to_all_single(out, mine, receive, send, group=self.group, async_op=True))
        return out.to(values.device)

    @contextmanager
    def _bounded(self, phase: str, expected: object = "data") -> Iterator[_Wait]:
        """Gives wait(work, peer): all waits together get the time limit; failures become this package's."""
        limit = self.timeout_s if self._forwards > 1 else self.first_timeout_s
        wait = _Wait(time.monotonic() + limit)
        try:
            yield wait
        except RuntimeError as error:
            peer = wait.peer
            if "timed out" in str(error).lower():
                late = PeerTimeout(
                    rank=self.rank,
                    call=self.calls,
                    layer=self.last_layer or None,
                    phase=phase,
                    peer=peer,
                    expected=expected,
                    seen="nothing",
                    seconds=limit,
                )
                raise self._dead(late) from error
            who = "a peer" if peer is None else f"rank {peer}"
            lost = PeerAbort(
                f"rank {self.rank} lost {who} in {phase} of call {self.calls}: {error}", peer=peer
            )
            raise self._dead(lost) from error


def group_timeout_s(group: Any) -> float:
    """The process group's own time-out in seconds; half an hour, torch's default, without a group."""
    if group is None:
        return 1800.0
    return group._get_backend(_wire_device(group)).options._timeout.total_seconds()


def _wire_device(group: Any) -> torch.device:
    """Where tensors must live that the group moves: the CPU if it can."""
    if group is None or torch.device("cpu") in group._device_types:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


# Handles are integers, as the operators' schema wants them. Negative: the kernels' communicators count from
# 0.
_exchanges: dict[int, Exchange] = {}
_registered = 0


def register(group: Any = None, **settings: Any) -> int:
    """A handle for a new Exchange(group, **settings), for the operators' `comm`. Local: no communication."""
    global _registered
    _registered += 1
    _exchanges[-_registered] = Exchange(group, **settings)
    return -_registered


def lookup(handle: int) -> Exchange:
    """The exchange behind a handle. ValueError where it is not registered, or not any more."""
    try:
        return _exchanges[handle]
    except KeyError:
        raise ValueError(
            f"comm: got {handle}, need a handle of a communicator that was not released; "
            "run forward again after megatron_mok.release()"
        ) from None


def registered(handle: int) -> bool:
    return handle in _exchanges


def close(handle: int) -> None:
    """Forget an exchange. Local; the process group stays the caller's."""
    _exchanges.pop(handle, None)


def close_all() -> None:
    """Forget every exchange. Local."""
    _exchanges.clear()
