"""One rank's end of a workspace, and forward calls through it.

Symbols: R ranks, T tokens here, K experts per token, E experts, L = E/R local experts, H hidden size,
I expert intermediate size, S rows of h saved.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, MokError, Problem
from . import library
from .failure import from_record, workspace_too_small
from .structs import ErrorRecord, Failure, ForwardArgs, Layout, Workspace
from .structs import Problem as ProblemStruct

_log = logging.getLogger(__name__)
ALIGN_BYTES = 1024  # of every region
UNIT_ROWS = 256  # what a cluster of two SMs computes at a time
LAYERS = 1 << 20  # a layer's number has 20 bits in a flag word
# reference.activation.Activation -> MokActivation, without and with a limit; None: the kernels lack it.
_ACTIVATIONS: tuple[tuple[int | None, int | None], ...] = ((0, 1), (2, None), (None, None), (3, None))


def aligned_empty(size_bytes: int, device: torch.device) -> Tensor:
    """Uninitialised uint8 [size_bytes] that starts on ALIGN_BYTES."""
    raw = torch.empty(size_bytes + ALIGN_BYTES, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % ALIGN_BYTES
    return raw[start : start + size_bytes]


@dataclass(frozen=True)
class Settings:
    """What all layers of a workspace share. 0: chosen by the library.

    num_sms          SMs (one thread block each) of the main kernel; even
    comm_sms         of these, SMs that move tokens; even
    minibatch_units  units of 256 rows a minibatch
    ring_rows        rows of the x ring
    timeout_s        longest wait; first_timeout_s in the first call
    """

    num_sms: int = 0
    comm_sms: int = 0
    minibatch_units: int = 0
    ring_rows: int = 0
    timeout_s: float = 300.0
    first_timeout_s: float = 300.0


def load_kernels(device: torch.device) -> None:
    """Load every kernel for the device. UnsupportedDevice or LibraryMissing, with the reason, if not."""
    library.call("mok_load_kernels", device.index)


def workspace_layout(
    *,
    rank: int,
    num_ranks: int,
    num_experts: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    max_tokens: int,
    settings: Settings | None = None,
) -> tuple[ProblemStruct, Layout]:
    """The problem as the library sees it, and its byte counts and offsets. ValueError naming a bad size."""
    settings = settings or Settings()
    problem = ProblemStruct(
        rank=rank,
        num_ranks=num_ranks,
        num_experts=num_experts,
        top_k=top_k,
        hidden=hidden,
        intermediate=intermediate,
        max_tokens=max_tokens,
        num_sms=settings.num_sms,
        minibatch_units=settings.minibatch_units,
        ring_rows=settings.ring_rows,
    )
    layout = Layout()
    library.call("mok_workspace_layout", ctypes.byref(problem), ctypes.byref(layout))
    return problem, layout


def symmetric_bytes(*, num_ranks: int, top_k: int, hidden: int, max_tokens: int) -> int:
    """Bytes of one rank's symmetric region. It depends on neither E nor I."""
    _, layout = workspace_layout(
        rank=0, num_ranks=num_ranks, num_experts=num_ranks, top_k=top_k, hidden=hidden, intermediate=128,
        max_tokens=max_tokens,
    )  # fmt: skip
    return layout.symmetric_bytes


class Communicator:
    """One rank of a workspace. All calls through it are issued in one order on all ranks.

    regions     address of every rank's symmetric region, own one included; `keep` owns them
    init()      zeroes this rank's flags; a barrier over the ranks has to follow
    layer       number of the next forward call, for flags and error texts; back to 0 after it
    """

    def __init__(
        self,
        *,
        rank: int,
        regions: Sequence[int],
        hidden: int,
        top_k: int,
        max_tokens: int,
        device: torch.device,
        settings: Settings,
        keep: Any = None,
    ) -> None:
        self.rank, self.size = rank, len(regions)
        self.hidden, self.top_k, self.max_tokens = hidden, top_k, max_tokens
        self.device, self.settings, self.keep = device, settings, keep
        self.regions = list(regions)
        self.layer, self.calls = 0, 0
        self.failure: MokError | None = None
        self._shapes: dict[tuple[int, int], _Shape] = {}
        self._stream: torch.cuda.Stream | None = None
        self._record = ctypes.POINTER(ErrorRecord)()
        record_address = ctypes.c_uint64()
        load_kernels(device)
        with torch.cuda.device(device):
            library.call("mok_record_alloc", ctypes.byref(self._record), ctypes.byref(record_address))
        self._record_address = record_address.value

    def init(self) -> None:
        """Zero this rank's flags and wait until that is done."""
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            workspace = self._workspace(self._problem(self.size, 128)[0])
            library.call("mok_workspace_init", ctypes.byref(workspace), stream.cuda_stream)
            stream.synchronize()

    def check(self) -> None:
        """Raise the error that ended this workspace, if one did. Costs one read of host memory."""
        if self.failure is None and self._record and self._record.contents.code:
            self.failure = from_record(self._record.contents)
        if self.failure is not None:
            raise self.failure

    def abort(self, cause: Exception) -> None:
        """Mark the workspace as dead and tell the peers, who are at the start of a call."""
        if self.size == 1 or self.failure is not None or self._record.contents.code:
            return
        self.failure = cause if isinstance(cause, MokError) else MokError(str(cause))
        tokens = getattr(cause, "got", None) or 0
        why = ErrorRecord(
            code=Failure.TOO_MANY_TOKENS, layer=self.layer, kind=1, expected=self.max_tokens, seen=tokens
        )
        workspace = self._workspace(self._problem(self.size, 128)[0])
        try:
            with torch.cuda.device(self.device):
                stream = torch.cuda.current_stream().cuda_stream
                library.call("mok_abort", ctypes.byref(workspace), ctypes.byref(why), stream)
        except RuntimeError as error:  # the cause is what the user must see
            _log.error("mok: rank %d could not tell its peers that it gave up: %s", self.rank, error)

    @contextmanager
    def aborting(self) -> Iterator[None]:
        """Whatever is raised inside also ends, on the peers, the call that they are about to start."""
        try:
            yield
        except Exception as error:
            self.abort(error)
            raise

    def close(self) -> None:
        """Free the workspace once this rank's kernels have ended. Local and idempotent."""
        if not self._record:
            return
        torch.cuda.synchronize(self.device)
        if self.failure is None and (failure := from_record(self._record.contents)) is not None:
            _log.error("mok: the last call before closing failed: %s", failure)
        library.call("mok_record_free", self._record)
        self._record = ctypes.POINTER(ErrorRecord)()
        self._shapes.clear()
        self.keep = None

    def prepare(
        self,
        x: Tensor,
        ids: Tensor,
        probs: Tensor,
        w1: Sequence[Tensor],
        w2: Sequence[Tensor],
        num_experts: int,
        save_rows: int,
        activation: int,
        act_limit: float,
    ) -> Call:
        """A forward call on the current stream with everything allocated and nothing launched yet.

        ValueError or ConfigError naming what the kernels cannot take.
        """
        with torch.cuda.device(self.device):
            stream = self._ordered_stream()
            shape = self._shape(num_experts, w2[0].shape[-1])
            x, ids, probs = x.contiguous(), ids.contiguous(), probs.contiguous()
            out = torch.empty_like(x)
            schedule = ids.new_empty(shape.layout.schedule_ints)
            h = x.new_empty(max(save_rows, 0), w1[0].shape[-2])
            args = ForwardArgs.from_buffer_copy(shape.args)
            args.stream = stream.cuda_stream
            args.num_tokens = len(x)
            args.x, args.ids, args.probs = x.data_ptr(), ids.data_ptr(), probs.data_ptr()
            args.out, args.schedule = out.data_ptr(), schedule.data_ptr()
            args.h, args.save_rows = h.data_ptr(), len(h)
            args.w1, args.w2, args.num_w = _pointers(w1, "w1"), _pointers(w2, "w2"), len(w1)
            args.activation, args.act_limit = _activation(activation, act_limit), act_limit
            args.layer = self.layer % LAYERS
            limit = self.settings.timeout_s if self.calls else self.settings.first_timeout_s
            args.workspace.timeout_ns = int(limit * 1e9)
            self.calls, self.layer = self.calls + 1, 0
        return Call(self.device, args, out, h, schedule, (x, ids, probs, w1, w2))

    def _shape(self, num_experts: int, intermediate: int) -> _Shape:
        """Local buffers and prepared arguments for layers of E experts and intermediate size I."""
        key = (num_experts, intermediate)
        shape = self._shapes.get(key)
        if shape is None:
            problem, layout = self._problem(num_experts, intermediate)
            local = aligned_empty(layout.local_bytes, self.device)
            workspace = self._workspace(problem, local.data_ptr())
            args = ForwardArgs(workspace=workspace, comm_sms=self.settings.comm_sms)
            shape = self._shapes[key] = _Shape(layout, local, args)
        return shape

    def _problem(self, num_experts: int, intermediate: int) -> tuple[ProblemStruct, Layout]:
        return workspace_layout(
            rank=self.rank, num_ranks=self.size, num_experts=num_experts, top_k=self.top_k,
            hidden=self.hidden, intermediate=intermediate, max_tokens=self.max_tokens, settings=self.settings,
        )  # fmt: skip

    def _workspace(self, problem: ProblemStruct, local: int = 0) -> Workspace:
        workspace = Workspace(
            problem=problem,
            local=local,
            error_record=self._record_address,
            timeout_ns=int(self.settings.timeout_s * 1e9),
        )
        workspace.peers[: self.size] = self.regions
        return workspace

    def _ordered_stream(self) -> torch.cuda.Stream:
        """The current stream, ordered behind the previous call if that was on another one."""
        stream = torch.cuda.current_stream(self.device)
        before, self._stream = self._stream, stream
        if before is not None and before != stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(before)
        return stream


@dataclass
class _Shape:
    layout: Layout
    local: Tensor
    args: ForwardArgs


@dataclass
class Call:
    """One forward call of one rank: out [T, H] bf16, h [S, 2I] bf16 in fragment order, the schedule int32.

    `schedule_rows` and `forward` each launch one kernel and do not wait. Where one thread launches for
    several ranks, it launches the first of all before the second of any: with one hardware queue a rank's
    second kernel would hold up a peer's first, for which it waits.
    """

    device: torch.device
    args: ForwardArgs
    out: Tensor
    h: Tensor
    schedule: Tensor
    keep: Any

    def schedule_rows(self) -> None:
        with torch.cuda.device(self.device):
            library.call("mok_schedule", ctypes.byref(self.args))

    def forward(self) -> None:
        with torch.cuda.device(self.device):
            library.call("mok_forward", ctypes.byref(self.args))


def _pointers(weights: Sequence[Tensor], name: str) -> Any:
    """Addresses of the weights as a C array."""
    for i, w in enumerate(weights):
        if not w.is_contiguous():
            raise ValueError(f"moe: {name}[{i}]: got strides {w.stride()}, need a contiguous tensor")
    return (ctypes.c_uint64 * len(weights))(*[w.data_ptr() for w in weights])


def _activation(kind: int, limit: float) -> int:
    """The kernels' number of an activation. ConfigError where they lack it."""
    number = _ACTIVATIONS[kind][limit > 0]
    if number is None:
        need = "swiglu with or without a limit, geglu or squared_relu without"
        got = f"{kind} with limit {limit}"
        raise ConfigError([Problem("activation", got, need, "use backend='reference'")], where="moe")
    return number


# Handles are integers, as the operators' schema wants them: 0 and above, the reference's are negative.
_communicators: dict[int, Communicator] = {}
_registered = -1


def register(communicator: Communicator) -> int:
    """A handle for the operators' `comm`."""
    global _registered
    _registered += 1
    _communicators[_registered] = communicator
    return _registered


def lookup(handle: int) -> Communicator:
    """ValueError where the handle is not registered, or not any more."""
    try:
        return _communicators[handle]
    except KeyError:
        raise ValueError(
            f"comm: got {handle}, need a handle of a communicator that was not released; "
            "run forward again after megatron_mok.release()"
        ) from None


def close(handle: int) -> None:
    """Free a communicator. Local and idempotent."""
    communicator = _communicators.pop(handle, None)
    if communicator is not None:
        communicator.close()


def moe_forward(
    x: Tensor,
    ids: Tensor,
    probs: Tensor,
    w1: Sequence[Tensor],
    w2: Sequence[Tensor],
    comm: int,
    num_experts: int,
    max_tokens: int,
    num_ranks: int,
    save_rows: int,
    activation: int,
    act_limit: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """torch.ops.megatron_mok.moe_forward on CUDA (see ops.definitions); arguments have been checked.

    WorkspaceTooSmall where T > max_tokens, after telling the peers; PeerTimeout, PeerAbort, ProtocolMismatch
    where an earlier call failed.
    """
    communicator = lookup(comm)
    communicator.check()
    with communicator.aborting():
        for name, got, need in (
            ("num_ranks", num_ranks, communicator.size),
            ("max_tokens", max_tokens, communicator.max_tokens),
            ("x.shape[1]", x.shape[1], communicator.hidden),
            ("ids.shape[1]", ids.shape[1], communicator.top_k),
            ("x.dtype", x.dtype, torch.bfloat16),
        ):
            if got != need:
                raise ValueError(f"moe: {name}: got {got}, need {need}, for which the communicator was made")
        if len(x) > max_tokens:
            raise workspace_too_small(len(x), max_tokens)
        call = communicator.prepare(x, ids, probs, w1, w2, num_experts, save_rows, activation, act_limit)
        call.schedule_rows()
        call.forward()
    return call.out, call.h, call.schedule if save_rows >= 0 else call.schedule.new_empty(0)
