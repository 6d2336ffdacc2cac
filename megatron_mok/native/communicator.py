"""One rank's end of a workspace, and the calls through it.

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
from .structs import BackwardArgs, CallKind, ErrorRecord, Failure, ForwardArgs, Layout, Workspace
from .structs import Problem as ProblemStruct

_log = logging.getLogger(__name__)
ALIGN_BYTES = 1024  # of every region
UNIT_ROWS = 256  # what a cluster of two SMs computes at a time
LAYERS = 1 << 20  # a layer's number has 20 bits in a flag word
NEEDS_DX, NEEDS_DP = 1, 2
VECTOR_BYTES = 16  # alignment of every tensor that the kernels touch
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

    num_sms            SMs (one thread block each) of a main kernel; even
    comm_sms           of these, SMs whose spare warps move rows in forward; even; 0: all
    backward_comm_sms  and in backward
    minibatch_units    units of 256 rows a minibatch
    ring_rows          rows of the rings
    timeout_s          longest wait; first_timeout_s in the first call
    """

    num_sms: int = 0
    comm_sms: int = 0
    backward_comm_sms: int = 0
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
    layer       number of the next call's layer, for flags and error texts; back to 0 after it
    last_layer  that of the last call
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
        self.layer, self.last_layer, self.calls = 0, 0, 0
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

    def waited_ns(self) -> Tensor:
        """int64 [1] on the device: nanoseconds that this rank has waited for peers, over all calls so far.

        In the current stream's order, without a host synchronisation. CTA 0 takes the times, each from this
        rank's own publication or completion to the last peer's. ValueError after close().
        """
        if not self._record:
            raise ValueError("waited_ns: got a closed communicator, need an open one")
        layout = self._problem(self.size, 128)[1]
        word = _DeviceWord(self.regions[self.rank] + layout.off_waited_ns)
        return torch.as_tensor(word, device=self.device).clone()

    def abort(self, cause: Exception, kind: CallKind = CallKind.FORWARD) -> None:
        """Mark the workspace as dead and tell the peers, who are at the start of a call of that kind."""
        if self.size == 1 or self.failure is not None or self._record.contents.code:
            return
        self.failure = cause if isinstance(cause, MokError) else MokError(str(cause))
        tokens = getattr(cause, "got", None) or 0
        why = ErrorRecord(
            code=Failure.TOO_MANY_TOKENS,
            layer=self.layer or self.last_layer,  # a call that was prepared has taken the number
            kind=kind,
            expected=self.max_tokens,
            seen=tokens,
        )
        workspace = self._workspace(self._problem(self.size, 128)[0])
        try:
            with torch.cuda.device(self.device):
                stream = torch.cuda.current_stream().cuda_stream
                library.call("mok_abort", ctypes.byref(workspace), ctypes.byref(why), stream)
        except RuntimeError as error:  # the cause is what the user must see
            _log.error("mok: rank %d could not tell its peers that it gave up: %s", self.rank, error)

    @contextmanager
    def aborting(self, kind: CallKind = CallKind.FORWARD) -> Iterator[None]:
        """Whatever is raised inside also ends, on the peers, the call that they are about to start."""
        try:
            yield
        except Exception as error:
            self.abort(error, kind)
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
            x, ids, probs = _vectors(x), ids.contiguous(), probs.contiguous()
            out = torch.empty_like(x)
            schedule = ids.new_empty(shape.layout.schedule_ints)
            h = x.new_empty(max(save_rows, 0), w1[0].shape[-2])
            args = ForwardArgs.from_buffer_copy(shape.forward)
            self._fill(args, stream, x, ids, w1, w2, activation, act_limit)
            args.probs, args.out, args.schedule = probs.data_ptr(), out.data_ptr(), schedule.data_ptr()
            args.h, args.save_rows = h.data_ptr(), len(h)
        return Call(self.device, args, out, h, schedule, (x, ids, probs, w1, w2))

    def prepare_backward(
        self,
        dy: Tensor,
        x: Tensor,
        ids: Tensor,
        w1: Sequence[Tensor],
        w2: Sequence[Tensor],
        h: Tensor,
        schedule: Tensor,
        dw1: Sequence[Tensor],
        dw2: Sequence[Tensor],
        num_experts: int,
        accumulate: bool,
        needs: int,
        activation: int,
        act_limit: float,
    ) -> BackwardCall:
        """The backward of a forward call, on the current stream, with nothing launched yet.

        ValueError or ConfigError naming what the kernels cannot take.
        """
        with torch.cuda.device(self.device):
            stream = self._ordered_stream()
            shape = self._shape(num_experts, w2[0].shape[-1])
            need = shape.layout.schedule_ints
            if schedule.numel() != need:
                raise ValueError(
                    f"moe: schedule: got {schedule.numel()} words, need {need}; the workspace was made anew "
                    "between forward and backward"
                )
            for tensor in (dy, x, ids, h, schedule):
                tensor.record_stream(stream)  # nothing where it was allocated on this stream
            dy, x, ids = _vectors(dy), _vectors(x), ids.contiguous()
            # Peers push what this rank asks for by what they were asked for themselves.
            asked = needs if self.size == 1 else NEEDS_DX | NEEDS_DP
            dx = torch.empty_like(x) if asked & NEEDS_DX else x.new_empty(0, self.hidden)
            rows = len(x) if asked & NEEDS_DP else 0
            dp = x.new_empty(rows, self.top_k, dtype=torch.float32)
            written1, written2, add = _gradient_targets(dw1, dw2, bool(accumulate))
            args = BackwardArgs.from_buffer_copy(shape.backward)
            self._fill(args, stream, x, ids, w1, w2, activation, act_limit)
            args.dy, args.schedule = dy.data_ptr(), schedule.data_ptr()
            args.h, args.save_rows = h.data_ptr(), len(h)
            args.needs, args.dx, args.dp = asked, dx.data_ptr(), dp.data_ptr()
            if written1:
                args.dw1, args.num_dw1 = _pointers(written1, "dw1"), len(written1)
                args.dw1_is_fp32 = written1[0].dtype == torch.float32
            if written2:
                args.dw2, args.num_dw2 = _pointers(written2, "dw2"), len(written2)
                args.dw2_is_fp32 = written2[0].dtype == torch.float32
            args.accumulate = add
        # What the kernel leaves in fp32 and the caller wants elsewhere.
        pairs = [(dw1, written1), (dw2, written2)]
        rounded = [(list(to), list(of)) for to, of in pairs if to and to is not of]
        return BackwardCall(
            self.device,
            args,
            dx if needs & NEEDS_DX else dx[:0],
            dp if needs & NEEDS_DP else dp[:0],
            rounded,
            bool(accumulate),
            (dy, x, ids, w1, w2, h, schedule, dw1, dw2, dx, dp),
        )

    def _fill(
        self,
        args: ForwardArgs | BackwardArgs,
        stream: torch.cuda.Stream,
        x: Tensor,
        ids: Tensor,
        w1: Sequence[Tensor],
        w2: Sequence[Tensor],
        activation: int,
        act_limit: float,
    ) -> None:
        """What both kinds of call have, and the count of calls."""
        args.stream = stream.cuda_stream
        args.num_tokens = len(x)
        args.x, args.ids = x.data_ptr(), ids.data_ptr()
        args.w1, args.w2, args.num_w = _pointers(w1, "w1"), _pointers(w2, "w2"), len(w1)
        args.activation, args.act_limit = _activation(activation, act_limit), act_limit
        args.layer = self.layer % LAYERS
        limit = self.settings.timeout_s if self.calls else self.settings.first_timeout_s
        args.workspace.timeout_ns = int(limit * 1e9)
        self.calls, self.layer, self.last_layer = self.calls + 1, 0, self.layer

    def _shape(self, num_experts: int, intermediate: int) -> _Shape:
        """Local buffers and prepared arguments for layers of E experts and intermediate size I."""
        key = (num_experts, intermediate)
        shape = self._shapes.get(key)
        if shape is None:
            problem, layout = self._problem(num_experts, intermediate)
            local = aligned_empty(layout.local_backward_bytes, self.device)
            workspace = self._workspace(problem, local.data_ptr())
            shape = self._shapes[key] = _Shape(
                layout,
                local,
                ForwardArgs(workspace=workspace, comm_sms=self.settings.comm_sms),
                BackwardArgs(workspace=workspace, comm_sms=self.settings.backward_comm_sms),
            )
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


class _DeviceWord:
    """An int64 in device memory, as the protocol that torch takes views from."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (1,), "typestr": "<i8", "data": (address, False), "version": 3, "strides": None
        }  # fmt: skip


@dataclass
class _Shape:
    layout: Layout
    local: Tensor
    forward: ForwardArgs
    backward: BackwardArgs


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


@dataclass
class BackwardCall:
    """One backward call of one rank: dx [T, H] bf16 and dp [T, K] fp32, without rows where not needed.

    `backward` launches the kernel and does not wait. `finish` then rounds weight gradients that are not
    wanted in the kernel's fp32; where one thread launches for several ranks, after the kernels of all.
    """

    device: torch.device
    args: BackwardArgs
    dx: Tensor
    dp: Tensor
    rounded: list[tuple[list[Tensor], list[Tensor]]]
    accumulate: bool
    keep: Any

    def backward(self) -> None:
        with torch.cuda.device(self.device):
            library.call("mok_backward", ctypes.byref(self.args))

    def finish(self) -> None:
        add_or_copy = torch._foreach_add_ if self.accumulate else torch._foreach_copy_
        for wanted, sums in self.rounded:
            add_or_copy(wanted, sums)


def _gradient_targets(
    dw1: Sequence[Tensor], dw2: Sequence[Tensor], accumulate: bool
) -> tuple[Sequence[Tensor], Sequence[Tensor], bool]:
    """(what the kernel writes for dw1, for dw2, whether it adds): the tensors wanted, or fp32 in their place.

    A sum is rounded once, so the kernel writes bf16 itself only where it does not add to what is there. (It
    sums the turns of an expert in fp32.)
    """

    def direct(wanted: Sequence[Tensor]) -> bool:
        dtypes = {t.dtype for t in wanted}
        reachable = all(t.is_contiguous() and t.data_ptr() % VECTOR_BYTES == 0 for t in wanted)
        rounds_once = not accumulate and dtypes == {torch.bfloat16}
        return reachable and (dtypes <= {torch.float32} or rounds_once)

    def target(wanted: Sequence[Tensor], keep: bool) -> Sequence[Tensor]:
        if keep or not wanted:
            return wanted
        sums = wanted[0].new_empty(len(wanted), *wanted[0].shape, dtype=torch.float32)
        return list(sums.unbind())

    kept = [direct(dw1), direct(dw2)]
    if accumulate and not all(kept):
        kept, accumulate = [False, False], False
    return target(dw1, kept[0]), target(dw2, kept[1]), accumulate


def _vectors(rows: Tensor) -> Tensor:
    """The same values, contiguous and aligned to VECTOR_BYTES."""
    rows = rows.contiguous()
    return rows if rows.data_ptr() % VECTOR_BYTES == 0 else rows.clone()


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
        _check_fits(communicator, x, ids, num_ranks, max_tokens)
        if len(x) > max_tokens:
            raise workspace_too_small(len(x), max_tokens)
        call = communicator.prepare(x, ids, probs, w1, w2, num_experts, save_rows, activation, act_limit)
        call.schedule_rows()
        call.forward()
    return call.out, call.h, call.schedule if save_rows >= 0 else call.schedule.new_empty(0)


def moe_backward(
    dy: Tensor,
    x: Tensor,
    ids: Tensor,
    w1: Sequence[Tensor],
    w2: Sequence[Tensor],
    h: Tensor,
    schedule: Tensor,
    dw1: Sequence[Tensor],
    dw2: Sequence[Tensor],
    comm: int,
    num_experts: int,
    top_k: int,
    max_tokens: int,
    num_ranks: int,
    accumulate: int,
    needs: int,
    activation: int,
    act_limit: float,
) -> tuple[Tensor, Tensor]:
    """torch.ops.megatron_mok.moe_backward on CUDA (see ops.definitions).

    PeerTimeout, PeerAbort, ProtocolMismatch where an earlier call failed.
    """
    communicator = lookup(comm)
    communicator.check()
    with communicator.aborting(CallKind.BACKWARD):
        _check_fits(communicator, x, ids, num_ranks, max_tokens)
        if dy.shape != x.shape or dy.dtype != x.dtype:
            raise ValueError(f"moe: dy: got {tuple(dy.shape)} {dy.dtype}, need {tuple(x.shape)} {x.dtype}")
        call = communicator.prepare_backward(
            dy, x, ids, w1, w2, h, schedule, dw1, dw2, num_experts, bool(accumulate), needs, activation,
            act_limit,
        )  # fmt: skip
        call.backward()
    call.finish()
    return call.dx, call.dp


def _check_fits(communicator: Communicator, x: Tensor, ids: Tensor, num_ranks: int, max_tokens: int) -> None:
    """ValueError naming what the communicator was not made for."""
    for name, got, need in (
        ("num_ranks", num_ranks, communicator.size),
        ("max_tokens", max_tokens, communicator.max_tokens),
        ("x.shape[1]", x.shape[1], communicator.hidden),
        ("ids.shape[1]", ids.shape[1], communicator.top_k),
        ("x.dtype", x.dtype, torch.bfloat16),
    ):
        if got != need:
            raise ValueError(f"moe: {name}: got {got}, need {need}, for which the communicator was made")
