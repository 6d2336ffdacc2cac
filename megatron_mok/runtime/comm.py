"""Communicators: one per (group, hidden size, top-k, dtype, device), shared by every layer of that shape.

They are opened collectively, at first use. All ranks first exchange what they are about to do, so that a
difference is the same error everywhere and not a hang or wrong data.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from typing import Any

import torch

from .. import __version__
from ..config import MokConfig
from ..errors import ConfigError, LibraryMissing, Problem, UnsupportedDevice
from ..reference import exchange
from .agreement import on_all
from .check import LayerCheck
from .provider import Provider, ReferenceProvider, Request
from .sizes import workspace_bytes

_REFERENCE = ReferenceProvider()


def _cuda_provider() -> Provider:
    try:
        return import_module("megatron_mok.runtime.cuda").PROVIDER
    except ImportError as error:
        raise LibraryMissing(
            f"backend cuda: {error}: the kernels are not part of this installation; run `make build` (needs "
            "nvcc), or ask for plain torch with backend='reference' (--mok-backend reference)"
        ) from error


def _provider(backend: str, device: torch.device) -> Provider:
    if backend == "reference" or (backend == "auto" and device.type == "cpu"):
        return _REFERENCE
    if device.type != "cuda":
        raise UnsupportedDevice(
            f"backend cuda: got a layer on {device}, need one on a GPU; move the model, or use backend='auto'"
        )
    return _cuda_provider()


def choose_backend(config: MokConfig, device: torch.device | str) -> tuple[str, str]:
    """(back end, why in one line) for a layer on `device`. Local; never falls back silently.

    auto is cuda for a layer on a GPU and reference for one on the CPU. UnsupportedDevice or LibraryMissing,
    with the remedy, where the back end cannot run.
    """
    device = torch.device(device)
    provider = _provider(config.backend, device)
    asked = f"backend={config.backend}: "
    return provider.name, asked + provider.why(device)


class Comm:
    """A communicator. It stays valid over reserve() and release(): the next forward opens it again.

    handle      integer for the operators; -1 and below are the reference's; None while closed
    rank, size  in the expert-parallel group
    backend     "cuda" or "reference", and `why` in one line
    max_tokens  the largest number of tokens per rank and call, agreed over the group
    control     handle of the reference exchange that carries the host's messages; None while closed
    """

    def __init__(
        self,
        group: Any,
        hidden: int,
        top_k: int,
        num_experts: int,
        max_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        config: MokConfig,
    ) -> None:
        self.group, self.config = group, config
        self.hidden, self.top_k, self.num_experts = hidden, top_k, num_experts
        self.device, self.dtype = device, dtype
        self.max_tokens = max_tokens
        self.handle: int | None = None
        self.backend, self.why = "", ""
        self.control: int | None = None
        self.check = LayerCheck(config.check_every)
        self._provider: Provider = _REFERENCE
        self.rank = 0 if group is None else torch.distributed.get_rank(group)
        self.size = 1 if group is None else torch.distributed.get_world_size(group)

    def open(self) -> Comm:
        """Agree with the peers and make the workspace, where that is not done yet. Collective.

        ConfigError, UnsupportedDevice or LibraryMissing on all ranks if it fails on any.
        """
        if self.handle is not None:
            return self
        number = _opened[self.group] = _opened.get(self.group, -1) + 1
        control = exchange.register(
            self.group,
            number=number,
            timeout_s=self.config.timeout_s,
            precision=self.config.precision,
        )
        ranks = exchange.lookup(control)
        try:
            everyone = on_all(ranks, self._describe)
            self.max_tokens = max(facts.pop("max_tokens") for facts in everyone)
            self._check_equal(everyone)
            request = Request(
                self.group, control, self.hidden, self.top_k, self.num_experts, self.max_tokens, self.dtype,
                self.device, self.config,
            )  # fmt: skip
            handle = None

            def make() -> None:
                nonlocal handle
                handle = self._provider.open(request)

            try:
                on_all(ranks, make)
            except Exception:
                if handle is not None:
                    self._provider.close(handle)
                raise
        except Exception:
            exchange.close(control)
            raise
        self.handle, self.control = handle, control
        return self

    def close(self) -> None:
        """Free the workspace. Local; a backward that is still to come cannot run any more."""
        if self.handle is not None and self.control is not None:
            self._provider.close(self.handle)
            exchange.close(self.control)
            self.handle = self.control = None

    @contextmanager
    def aborting(self) -> Iterator[None]:
        """Whatever is raised inside also ends, on the peers, the call that they are about to start."""
        try:
            yield
        except Exception as error:
            if self.handle is not None:
                self._provider.abort(self.handle, error)
            raise

    def set_layer(self, layer: int) -> None:
        """The layer of the next forward call, for error texts."""
        if self.handle is not None:
            self._provider.set_layer(self.handle, layer)

    def _describe(self) -> dict[str, Any]:
        """What must be the same on all ranks, and max_tokens, of which the largest counts."""
        self._provider = _provider(self.config.backend, self.device)
        self.backend, self.why = choose_backend(self.config, self.device)
        settings = {f"config.{k}": v for k, v in asdict(self.config).items() if k != "max_tokens"}
        return {
            "max_tokens": self.max_tokens,
            "hidden": self.hidden,
            "top_k": self.top_k,
            "num_experts": self.num_experts,
            "dtype": str(self.dtype),
            "megatron_mok": __version__,
            "backend": self.backend,
            **self._provider.facts(self.device),
            **settings,
        }

    def _check_equal(self, everyone: list[dict[str, Any]]) -> None:
        problems = []
        for field in dict.fromkeys(name for facts in everyone for name in facts):
            values = {rank: facts.get(field) for rank, facts in enumerate(everyone)}
            if any(value != values[0] for value in values.values()):
                problems.append(
                    Problem(
                        field,
                        values,
                        "the same on all ranks of the expert-parallel group",
                        "use the same settings, versions and GPUs everywhere, and build layers in one order",
                    )
                )
        if self.num_experts % self.size:
            problems.append(
                Problem("num_experts", self.num_experts, f"a multiple of {self.size} ranks", "change either")
            )
        if problems:
            raise ConfigError(problems, where="expert-parallel group")


_comms: dict[tuple, Comm] = {}
_opened: dict[Any, int] = {}  # number of the last communicator opened over each group; part of every word
_reserved = 0


def get_comm(
    group: Any,
    *,
    hidden: int,
    top_k: int,
    num_experts: int,
    max_tokens: int,
    device: torch.device | str,
    dtype: torch.dtype,
    config: MokConfig,
) -> Comm:
    """The communicator of (group, hidden, top_k, dtype, device), opened. A dictionary look-up once it exists.

    group: process group, or None for one rank. max_tokens: the most that this rank will bring to a call; the
    maximum over the group counts. Collective at first use, and again after release(), reserve(), a failure or
    with another `config`: all ranks ask in one order. Errors: see Comm.open.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = (group, hidden, top_k, dtype, device)
    comm = _comms.get(key)
    if comm is not None and comm.config != config:
        comm.close()
        comm = None
    if comm is None:
        comm = _comms[key] = Comm(group, hidden, top_k, num_experts, max_tokens, device, dtype, config)
    if comm.handle is None:
        comm.max_tokens = max(max_tokens, _reserved)
    return comm.open()


def reserve(max_tokens: int) -> None:
    """Make every workspace large enough for `max_tokens` tokens per rank and call; later ones too.

    Collective: all ranks, between steps, when no backward is due. ValueError unless it is a positive integer.
    """
    global _reserved
    if max_tokens <= 0:
        raise ValueError(f"reserve: max_tokens: got {max_tokens}, need a positive integer")
    _reserved = max(_reserved, max_tokens)
    for comm in list(_comms.values()):
        if comm.max_tokens < max_tokens:
            again = comm.handle is not None
            comm.close()
            comm.max_tokens = max_tokens
            if again:
                comm.open()


def release() -> None:
    """Free every workspace. Local; the next forward of a layer makes its workspace again, collectively."""
    global _reserved
    _reserved = 0
    for comm in _comms.values():
        comm.close()


@atexit.register
def _forget() -> None:
    """Let go of the groups while Python still runs.

    A group that has been destroyed ends its threads with its last reference. Gloo's, alive when the
    interpreter goes, now and then abort the process ("terminate called without an active exception").
    """
    exchange.close_all()
    _comms.clear()
    _opened.clear()


def waited_ns() -> list[torch.Tensor]:
    """int64 [1] on its device for each open workspace: nanoseconds that this rank has waited for peers in it.

    No host synchronisation. The reference back end, whose waits are the host's, does not count.
    """
    waited = [c._provider.waited_ns(c.handle) for c in _comms.values() if c.handle is not None]
    return [w for w in waited if w is not None]


def open_workspace_bytes() -> int:
    """Bytes of symmetric memory of this rank's open workspaces; the reference back end has none."""
    return sum(
        workspace_bytes(
            max_tokens=c.max_tokens, hidden=c.hidden, top_k=c.top_k, num_ranks=c.size, dtype=c.dtype
        )
        for c in _comms.values()
        if c.handle is not None and c.backend != _REFERENCE.name
    )
