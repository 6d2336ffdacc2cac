"""The structs of csrc/include/megatron_mok/api.h for ctypes, field by field, and its constants."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_uint32, c_uint64
from enum import IntEnum
from typing import Any

ABI_VERSION = 2
MAX_RANKS = 72


class Status(IntEnum):
    """What every function returns."""

    OK = 0
    ABI = 1
    ARGUMENT = 2
    DEVICE = 3
    CUDA = 4
    NOT_COMPILED = 5


class Failure(IntEnum):
    """`code` of an error record: why a workspace died."""

    NONE = 0
    TIMEOUT = 1
    MISMATCH = 2
    PEER_ABORT = 3
    TOO_MANY_TOKENS = 4


class Phase(IntEnum):
    """Where a wait was, `phase` of an error record."""

    NONE = 0
    PUBLISH = 1
    GRID = 2
    DISPATCH = 3
    GEMM1 = 4
    GEMM2 = 5
    ACT_RING = 6
    COMBINE = 7


class CallKind(IntEnum):
    """What a call is, in a flag word and in `kind` of an error record."""

    FORWARD = 1
    BACKWARD = 2


class _Versioned(ctypes.Structure):
    """A struct that starts with its size and the ABI version, filled in here."""

    def __init__(self, **values: Any) -> None:
        super().__init__(size=ctypes.sizeof(type(self)), abi=ABI_VERSION, **values)


class Problem(_Versioned):
    _fields_ = [
        ("size", c_uint32),
        ("abi", c_uint32),
        ("rank", c_int32),
        ("num_ranks", c_int32),
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("max_tokens", c_int64),
        ("num_sms", c_int32),
        ("minibatch_units", c_int32),
        ("ring_rows", c_int64),
    ]


class Layout(_Versioned):
    _fields_ = [
        ("size", c_uint32),
        ("abi", c_uint32),
        ("symmetric_bytes", c_int64),
        ("local_bytes", c_int64),
        ("local_backward_bytes", c_int64),
        ("schedule_ints", c_int64),
        ("schedule_rows", c_int64),
        ("saved_row_bytes", c_int64),
        ("minibatch_units", c_int32),
        ("ring_blocks", c_int32),
        ("act_blocks", c_int32),
        ("segment_units", c_int32),
        ("off_flags", c_int64),
        ("off_tokens", c_int64),
        ("off_ids", c_int64),
        ("off_probs", c_int64),
        ("off_x", c_int64),
        ("off_dy", c_int64),
        ("off_slots", c_int64),
        ("off_dp_slots", c_int64),
        ("off_waited_ns", c_int64),
    ]


class ErrorRecord(ctypes.Structure):
    _fields_ = [
        ("code", c_uint32),
        ("phase", c_uint32),
        ("rank", c_int32),
        ("peer", c_int32),
        ("call", c_uint64),
        ("expected", c_uint64),
        ("seen", c_uint64),
        ("waited_ns", c_uint64),
        ("layer", c_uint32),
        ("kind", c_uint32),
    ]


class Workspace(_Versioned):
    _fields_ = [
        ("size", c_uint32),
        ("abi", c_uint32),
        ("problem", Problem),
        ("local", c_uint64),
        ("error_record", c_uint64),
        ("peers", c_uint64 * MAX_RANKS),
        ("timeout_ns", c_uint64),
    ]


class ForwardArgs(_Versioned):
    _fields_ = [
        ("size", c_uint32),
        ("abi", c_uint32),
        ("workspace", Workspace),
        ("stream", c_uint64),
        ("num_tokens", c_int64),
        ("x", c_uint64),
        ("ids", c_uint64),
        ("probs", c_uint64),
        ("out", c_uint64),
        ("schedule", c_uint64),
        ("h", c_uint64),
        ("save_rows", c_int64),
        ("w1", POINTER(c_uint64)),
        ("w2", POINTER(c_uint64)),
        ("num_w", c_int32),
        ("activation", c_int32),
        ("act_limit", c_float),
        ("comm_sms", c_int32),
        ("layer", c_uint32),
        ("reserved", c_int32),
    ]


class BackwardArgs(_Versioned):
    _fields_ = [
        ("size", c_uint32),
        ("abi", c_uint32),
        ("workspace", Workspace),
        ("stream", c_uint64),
        ("num_tokens", c_int64),
        ("dy", c_uint64),
        ("x", c_uint64),
        ("ids", c_uint64),
        ("schedule", c_uint64),
        ("h", c_uint64),
        ("save_rows", c_int64),
        ("w1", POINTER(c_uint64)),
        ("w2", POINTER(c_uint64)),
        ("num_w", c_int32),
        ("activation", c_int32),
        ("act_limit", c_float),
        ("comm_sms", c_int32),
        ("layer", c_uint32),
        ("needs", c_int32),
        ("dx", c_uint64),
        ("dp", c_uint64),
        ("dw1", POINTER(c_uint64)),
        ("dw2", POINTER(c_uint64)),
        ("num_dw1", c_int32),
        ("num_dw2", c_int32),
        ("dw1_is_fp32", c_int32),
        ("dw2_is_fp32", c_int32),
        ("accumulate", c_int32),
        ("reserved", c_int32),
    ]


# By the name that each has in C, for the test that compares offsets.
STRUCTS = {
    "MokProblem": Problem,
    "MokLayout": Layout,
    "MokErrorRecord": ErrorRecord,
    "MokWorkspace": Workspace,
    "MokForwardArgs": ForwardArgs,
    "MokBackwardArgs": BackwardArgs,
}

# Every function: result type and argument types.
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "mok_last_error": (ctypes.c_char_p, ()),
    "mok_build_info": (ctypes.c_char_p, ()),
    "mok_workspace_layout": (ctypes.c_int, (POINTER(Problem), POINTER(Layout))),
    "mok_load_kernels": (ctypes.c_int, (c_int32,)),
    "mok_workspace_init": (ctypes.c_int, (POINTER(Workspace), c_uint64)),
    "mok_record_alloc": (ctypes.c_int, (POINTER(POINTER(ErrorRecord)), POINTER(c_uint64))),
    "mok_record_free": (ctypes.c_int, (POINTER(ErrorRecord),)),
    "mok_abort": (ctypes.c_int, (POINTER(Workspace), POINTER(ErrorRecord), c_uint64)),
    "mok_schedule": (ctypes.c_int, (POINTER(ForwardArgs),)),
    "mok_forward": (ctypes.c_int, (POINTER(ForwardArgs),)),
    "mok_backward": (ctypes.c_int, (POINTER(BackwardArgs),)),
}
