"""The C ABI without torch, for programs that run under compute-sanitizer: only our kernels run, and memory is
as the driver hands it out, so that initcheck sees every read of what was not written.

Slots are filled first (with NaN): the tool does not follow the bulk copies that write them.
"""

import ctypes
import importlib.util
import sys
from pathlib import Path

import numpy as np

NATIVE = Path(__file__).resolve().parents[2] / "megatron_mok" / "native"
TIMEOUT_NS = 120 * 10**9  # the tools slow kernels down by a factor of 10 to 100
ALIGN_BYTES = 1024  # of every region

spec = importlib.util.spec_from_file_location("structs", NATIVE / "structs.py")
structs = importlib.util.module_from_spec(spec)  # by path: the package would import torch
spec.loader.exec_module(structs)


def cuda(name, *arguments):
    if status := getattr(driver, name)(*arguments):
        sys.exit(f"{name}: error {status}")


def mok(name, *arguments):
    if status := getattr(library, name)(*arguments):
        sys.exit(f"{name}: status {status}: {library.mok_last_error().decode()}")


def start():
    """Context of GPU 0 and our kernels."""
    global driver, library
    driver = ctypes.CDLL("libcuda.so.1")
    library = ctypes.CDLL(str(NATIVE / "libmegatron_mok.so"))
    for name, (result, arguments) in structs.FUNCTIONS.items():
        getattr(library, name).restype, getattr(library, name).argtypes = result, arguments
    context, device = ctypes.c_void_p(), ctypes.c_int()
    cuda("cuInit", 0)
    cuda("cuDeviceGet", ctypes.byref(device), 0)
    cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    cuda("cuCtxSetCurrent", context)
    mok("mok_load_kernels", 0)


def allocate(size_bytes):
    pointer = ctypes.c_uint64()
    cuda("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size_bytes))
    return pointer.value


def allocate_region(size_bytes):
    pointer = allocate(size_bytes)
    if pointer % ALIGN_BYTES:
        pointer = -(-allocate(size_bytes + ALIGN_BYTES) // ALIGN_BYTES) * ALIGN_BYTES
    return pointer


def poison(pointer, size_bytes):
    cuda("cuMemsetD8_v2", ctypes.c_uint64(pointer), ctypes.c_ubyte(0xFF), ctypes.c_size_t(size_bytes))


def upload(array):
    array = np.ascontiguousarray(array)
    pointer = allocate(array.nbytes)
    cuda("cuMemcpyHtoD_v2", ctypes.c_uint64(pointer), array.ctypes.data_as(ctypes.c_void_p),
         ctypes.c_size_t(array.nbytes))  # fmt: skip
    return pointer


def download(pointer, shape, dtype):
    """fp32 of a buffer of np.float32, or of bf16 where dtype is np.uint16."""
    array = np.empty(shape, dtype)
    cuda("cuMemcpyDtoH_v2", array.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint64(pointer),
         ctypes.c_size_t(array.nbytes))  # fmt: skip
    return (array.astype(np.uint32) << 16).view(np.float32) if dtype is np.uint16 else array


def synchronize():
    cuda("cuCtxSynchronize")


def new_stream():
    """One that the default stream does not order."""
    stream = ctypes.c_void_p()
    cuda("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(1))
    return stream.value


def bf16(values):
    """fp32 values that bf16 holds, and their 16 bits."""
    bits = (values.astype(np.float32).view(np.uint32) + 0x8000) >> 16
    return (bits << 16).astype(np.uint32).view(np.float32), bits.astype(np.uint16)


def pointers(*addresses):
    return (ctypes.c_uint64 * len(addresses))(*addresses)


def open_workspaces(ranks, **sizes):
    """(workspace, error record) of every rank, and the layout."""
    problems = [structs.Problem(rank=r, num_ranks=ranks, **sizes) for r in range(ranks)]
    layout = structs.Layout()
    mok("mok_workspace_layout", ctypes.byref(problems[0]), ctypes.byref(layout))
    peers = [allocate_region(layout.symmetric_bytes) for _ in range(ranks)]
    opened = []
    for problem in problems:
        record, record_pointer = ctypes.POINTER(structs.ErrorRecord)(), ctypes.c_uint64()
        mok("mok_record_alloc", ctypes.byref(record), ctypes.byref(record_pointer))
        workspace = structs.Workspace(
            problem=problem, local=allocate_region(layout.local_backward_bytes),
            error_record=record_pointer.value, timeout_ns=TIMEOUT_NS,
        )  # fmt: skip
        workspace.peers[:ranks] = peers
        mok("mok_workspace_init", ctypes.byref(workspace), 0)
        poison(peers[problem.rank] + layout.off_slots, layout.off_dp_slots - layout.off_slots)
        opened.append((workspace, record))
    synchronize()
    return opened, layout


def check(opened):
    """Ends the program where a wait failed."""
    for workspace, record in opened:
        r = record.contents
        if r.code:
            sys.exit(
                f"rank {workspace.problem.rank}: a wait failed: code {r.code}, phase {r.phase}, "
                f"kind {r.kind}, call {r.call}, peer {r.peer}, expected {r.expected:#x}, seen {r.seen:#x}"
            )


def relative_error(got, want):
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))
