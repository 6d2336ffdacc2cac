"""One small forward call twice through the C ABI, for compute-sanitizer. Exit status 1 where it is wrong."""

import ctypes
import sys

import numpy as np
import sanitized_common as gpu

TOKENS, TOP_K, EXPERTS, HIDDEN, INTERMEDIATE = 70, 2, 3, 256, 128


def main():
    gpu.start()
    rng = np.random.default_rng(0)
    x, x_bits = gpu.bf16(rng.standard_normal((TOKENS, HIDDEN)))
    w1, w1_bits = gpu.bf16(rng.standard_normal((EXPERTS, 2 * INTERMEDIATE, HIDDEN)) / HIDDEN**0.5)
    w2, w2_bits = gpu.bf16(rng.standard_normal((EXPERTS, HIDDEN, INTERMEDIATE)) / INTERMEDIATE**0.5)
    ids = rng.integers(-1, EXPERTS, (TOKENS, TOP_K)).astype(np.int32)
    probs = rng.random((TOKENS, TOP_K)).astype(np.float32)

    opened, layout = gpu.open_workspaces(
        1, num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, intermediate=INTERMEDIATE, max_tokens=TOKENS,
        num_sms=8, minibatch_units=1, ring_rows=128,
    )  # fmt: skip
    saved = 64
    out = gpu.allocate(TOKENS * HIDDEN * 2)
    args = gpu.structs.ForwardArgs(
        workspace=opened[0][0], num_tokens=TOKENS, x=gpu.upload(x_bits), ids=gpu.upload(ids),
        probs=gpu.upload(probs), out=out, schedule=gpu.allocate(4 * layout.schedule_ints),
        h=gpu.allocate(saved * layout.saved_row_bytes), save_rows=saved, num_w=1, layer=1,
    )  # fmt: skip
    args.w1, args.w2 = gpu.pointers(gpu.upload(w1_bits)), gpu.pointers(gpu.upload(w2_bits))
    for _ in range(2):
        gpu.mok("mok_schedule", ctypes.byref(args))
        gpu.mok("mok_forward", ctypes.byref(args))
    gpu.synchronize()
    gpu.check(opened)

    want = np.zeros((TOKENS, HIDDEN))
    for token in range(TOKENS):
        for k in range(TOP_K):
            if (e := ids[token, k]) >= 0:
                gate, up = np.split(x[token].astype(np.float64) @ w1[e].T.astype(np.float64), 2)
                want[token] += gate / (1 + np.exp(-gate)) * up * probs[token, k] @ w2[e].T
    error = gpu.relative_error(gpu.download(out, want.shape, np.uint16), want)
    print(f"relative error {error:.2g}")
    if not error < 0.01:
        sys.exit("wrong result")


if __name__ == "__main__":
    main()
