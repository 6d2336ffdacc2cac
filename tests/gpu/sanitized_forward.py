"""One small forward call through the C ABI, for compute-sanitizer: no torch, so that only our kernels run.

Nothing is initialised but the inputs and what the library initialises, so that initcheck sees every read of
memory that was not written in the call. Exit status 1 where the result is wrong.
"""

import ctypes
import importlib.util
import sys
from pathlib import Path

import numpy as np

NATIVE = Path(__file__).resolve().parents[2] / "megatron_mok" / "native"
TOKENS, TOP_K, EXPERTS, HIDDEN, INTERMEDIATE = 70, 2, 3, 256, 128

spec = importlib.util.spec_from_file_location("structs", NATIVE / "structs.py")
structs = importlib.util.module_from_spec(spec)  # by path: the package would import torch
spec.loader.exec_module(structs)

driver = ctypes.CDLL("libcuda.so.1")
library = ctypes.CDLL(str(NATIVE / "libmegatron_mok.so"))
for name, (result, arguments) in structs.FUNCTIONS.items():
    getattr(library, name).restype, getattr(library, name).argtypes = result, arguments


def cuda(name, *arguments):
    if status := getattr(driver, name)(*arguments):
        sys.exit(f"{name}: error {status}")


def mok(name, *arguments):
    if status := getattr(library, name)(*arguments):
        sys.exit(f"{name}: status {status}: {library.mok_last_error().decode()}")


def allocate(size_bytes):
    pointer = ctypes.c_uint64()
    cuda("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size_bytes))
    return pointer.value


def upload(array):
    array = np.ascontiguousarray(array)
    pointer = allocate(array.nbytes)
    cuda("cuMemcpyHtoD_v2", ctypes.c_uint64(pointer), array.ctypes.data_as(ctypes.c_void_p),
         ctypes.c_size_t(array.nbytes))  # fmt: skip
    return pointer


def bf16(values):
    """fp32 values that bf16 holds, and their 16 bits."""
    bits = (values.astype(np.float32).view(np.uint32) + 0x8000) >> 16
    return (bits << 16).astype(np.uint32).view(np.float32), bits.astype(np.uint16)


def main():
    context, device = ctypes.c_void_p(), ctypes.c_int()
    cuda("cuInit", 0)
    cuda("cuDeviceGet", ctypes.byref(device), 0)
    cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    cuda("cuCtxSetCurrent", context)
    mok("mok_load_kernels", 0)

    rng = np.random.default_rng(0)
    x, x_bits = bf16(rng.standard_normal((TOKENS, HIDDEN)))
    w1, w1_bits = bf16(rng.standard_normal((EXPERTS, 2 * INTERMEDIATE, HIDDEN)) / HIDDEN**0.5)
    w2, w2_bits = bf16(rng.standard_normal((EXPERTS, HIDDEN, INTERMEDIATE)) / INTERMEDIATE**0.5)
    ids = rng.integers(-1, EXPERTS, (TOKENS, TOP_K)).astype(np.int32)
    probs = rng.random((TOKENS, TOP_K)).astype(np.float32)

    problem = structs.Problem(
        num_ranks=1, num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, intermediate=INTERMEDIATE,
        max_tokens=TOKENS, num_sms=8, minibatch_units=1, ring_rows=128,
    )  # fmt: skip
    layout = structs.Layout()
    mok("mok_workspace_layout", ctypes.byref(problem), ctypes.byref(layout))
    record, record_pointer = ctypes.POINTER(structs.ErrorRecord)(), ctypes.c_uint64()
    mok("mok_record_alloc", ctypes.byref(record), ctypes.byref(record_pointer))
    workspace = structs.Workspace(
        problem=problem, local=allocate(layout.local_bytes), error_record=record_pointer.value,
        timeout_ns=120 * 10**9,
    )  # fmt: skip
    workspace.peers[0] = allocate(layout.symmetric_bytes)
    mok("mok_workspace_init", ctypes.byref(workspace), 0)
    saved = 64
    out = allocate(TOKENS * HIDDEN * 2)
    args = structs.ForwardArgs(
        workspace=workspace, num_tokens=TOKENS, x=upload(x_bits), ids=upload(ids), probs=upload(probs),
        out=out, schedule=allocate(4 * layout.schedule_ints), h=allocate(saved * layout.saved_row_bytes),
        save_rows=saved, num_w=1, layer=1,
    )  # fmt: skip
    args.w1, args.w2 = (ctypes.c_uint64 * 1)(upload(w1_bits)), (ctypes.c_uint64 * 1)(upload(w2_bits))
    for _ in range(2):
        mok("mok_schedule", ctypes.byref(args))
        mok("mok_forward", ctypes.byref(args))
    cuda("cuCtxSynchronize")
    if record.contents.code:
        sys.exit(f"a wait failed: code {record.contents.code} in phase {record.contents.phase}")

    got = np.empty((TOKENS, HIDDEN), np.uint16)
    cuda("cuMemcpyDtoH_v2", got.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint64(out),
         ctypes.c_size_t(got.nbytes))  # fmt: skip
    got = (got.astype(np.uint32) << 16).view(np.float32)
    want = np.zeros((TOKENS, HIDDEN))
    for token in range(TOKENS):
        for k in range(TOP_K):
            if (e := ids[token, k]) >= 0:
                gate, up = np.split(x[token].astype(np.float64) @ w1[e].T.astype(np.float64), 2)
                want[token] += gate / (1 + np.exp(-gate)) * up * probs[token, k] @ w2[e].T
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    print(f"relative error {error:.2g}")
    if not error < 0.01:
        sys.exit("wrong result")


if __name__ == "__main__":
    main()
