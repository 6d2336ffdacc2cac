"""Forward and backward through the C ABI, for compute-sanitizer: sanitized_backward.py RANKS.

Each kind of weight gradient once, with all, none and some of h saved. Expert 0 has more rows than one turn of
a weight gradient, the last expert none, and the last tiles of every product are narrow. Exit status 1 where a
result is wrong, TAKE_TURNS where the kernels of the ranks do not run at the same time.
"""

import ctypes
import sys
from dataclasses import dataclass

import numpy as np
import sanitized_common as gpu

TOKENS = {1: (330,), 2: (200, 130)}
TOP_K, EXPERTS, HIDDEN, INTERMEDIATE = 2, 4, 384, 384
TURN_ROWS, GROUP_ROWS = 256, 8
TAKE_TURNS = 77
PROBE_NS = 10 * 10**9  # for the first call of several ranks
# name: (rows of h saved; None: all; fp32 weight gradients, added to what is there)
VARIANTS = {
    "bf16, all saved": (None, False, False),
    "fp32, none saved": (0, True, False),
    "fp32 added, some saved": (64, True, True),
}


@dataclass
class Layer:
    """Per rank: x, dy [T, H]; ids, probs [T, K]. w1 [E, 2I, H], w2 [E, H, I]. fp32 that bf16 holds."""

    x: list
    dy: list
    ids: list
    probs: list
    w1: np.ndarray
    w2: np.ndarray


def make_layer(tokens, rng):
    def normal(*shape, scale=1.0):
        return gpu.bf16(rng.standard_normal(shape) * scale)[0]

    def route(t):  # expert 0 for nearly all; for some -1, no route; nobody goes to the last
        ids = rng.integers(-1, EXPERTS - 1, (t, TOP_K))
        ids[:, 0] = np.where(rng.random(t) < 0.95, 0, ids[:, 0])
        return ids.astype(np.int32)

    return Layer(
        [normal(t, HIDDEN) for t in tokens],
        [normal(t, HIDDEN) for t in tokens],
        [route(t) for t in tokens],
        [rng.random((t, TOP_K)).astype(np.float32) for t in tokens],
        normal(EXPERTS, 2 * INTERMEDIATE, HIDDEN, scale=HIDDEN**-0.5),
        normal(EXPERTS, HIDDEN, INTERMEDIATE, scale=INTERMEDIATE**-0.5),
    )


def expected(layer):
    """(out, dx, dp of all tokens; dw1, dw2) in fp64."""
    x, dy, probs, w1, w2 = (
        np.asarray(a, np.float64)
        for a in (*map(np.concatenate, (layer.x, layer.dy, layer.probs)), layer.w1, layer.w2)
    )
    ids = np.concatenate(layer.ids)
    out, dx, dp, dw1, dw2 = map(np.zeros_like, (x, x, probs, w1, w2))
    for e in range(EXPERTS):
        token, k = np.nonzero(ids == e)
        p = probs[token, k][:, None]
        gate, up = np.split(x[token] @ w1[e].T, 2, axis=1)
        s = 1 / (1 + np.exp(-gate))
        act = gate * s * up
        d_act = dy[token] @ w2[e]
        dp[token, k] = (act * d_act).sum(1)
        dh = np.concatenate([d_act * p * up * s * (1 + gate * (1 - s)), d_act * p * gate * s], axis=1)
        np.add.at(out, token, act * p @ w2[e].T)
        np.add.at(dx, token, dh @ w1[e])
        dw1[e], dw2[e] = dh.T @ x[token], dy[token].T @ (act * p)
    return out, dx, dp, dw1, dw2


class Rank:
    """One rank's memory for the layer."""

    def __init__(self, rank, layer, workspace, layout):
        self.rank, self.workspace, self.layout = rank, workspace, layout
        self.local = EXPERTS // workspace.problem.num_ranks
        here = slice(rank * self.local, (rank + 1) * self.local)
        self.tokens = len(layer.x[rank])
        self.w1, self.w2 = (gpu.pointers(gpu.upload(gpu.bf16(w[here])[1])) for w in (layer.w1, layer.w2))
        self.x, self.dy = (gpu.upload(gpu.bf16(t[rank])[1]) for t in (layer.x, layer.dy))
        self.ids, self.probs = gpu.upload(layer.ids[rank]), gpu.upload(layer.probs[rank])
        self.stream = gpu.new_stream()

    def prepare(self, saved, fp32, add, main):
        """The three launches of a step and what they write: all memory is allocated here."""
        element = 4 if fp32 else 2
        self.fp32 = fp32
        self.shapes = [(self.local, 2 * INTERMEDIATE, HIDDEN), (self.local, HIDDEN, INTERMEDIATE)]
        if add:
            self.dw = [gpu.upload(w) for w in main]
        else:
            self.dw = [gpu.allocate(int(np.prod(shape)) * element) for shape in self.shapes]
            for pointer, shape in zip(
                self.dw, self.shapes, strict=True
            ):  # initcheck does not follow bulk copies
                gpu.poison(pointer, int(np.prod(shape)) * element)
        self.out, self.dx = (gpu.allocate(self.tokens * HIDDEN * 2) for _ in range(2))
        self.dp = gpu.allocate(self.tokens * TOP_K * 4)
        common = dict(
            workspace=self.workspace, stream=self.stream, num_tokens=self.tokens, x=self.x, ids=self.ids,
            schedule=gpu.allocate(4 * self.layout.schedule_ints), save_rows=saved,
            h=gpu.allocate(saved * self.layout.saved_row_bytes) if saved else 0,
            w1=self.w1, w2=self.w2, num_w=1, layer=1,
        )  # fmt: skip
        self.forward = gpu.structs.ForwardArgs(probs=self.probs, out=self.out, **common)
        self.backward = gpu.structs.BackwardArgs(
            dy=self.dy, needs=3, dx=self.dx, dp=self.dp, num_dw1=1, num_dw2=1, dw1_is_fp32=fp32,
            dw2_is_fp32=fp32, accumulate=add, dw1=gpu.pointers(self.dw[0]),
            dw2=gpu.pointers(self.dw[1]), **common,
        )  # fmt: skip

    def results(self):
        """out, dx, dp, dw1, dw2 as fp32"""
        rows = (self.tokens, HIDDEN)
        dtype = np.float32 if self.fp32 else np.uint16
        return [
            gpu.download(self.out, rows, np.uint16),
            gpu.download(self.dx, rows, np.uint16),
            gpu.download(self.dp, (self.tokens, TOP_K), np.float32),
            *[
                gpu.download(pointer, shape, dtype)
                for pointer, shape in zip(self.dw, self.shapes, strict=True)
            ],
        ]


def probe(ranks, opened):
    """Schedules of several ranks, which wait for each other."""
    for rank in ranks:
        rank.forward.workspace.timeout_ns = PROBE_NS
        gpu.mok("mok_schedule", ctypes.byref(rank.forward))
        rank.forward.workspace.timeout_ns = gpu.TIMEOUT_NS
    gpu.synchronize()
    if any(record.contents.code == gpu.structs.Failure.TIMEOUT for _, record in opened):
        print("the kernels of the ranks do not run at the same time under this tool")
        sys.exit(TAKE_TURNS)


def main():
    num_ranks = int(sys.argv[1])
    tokens = TOKENS[num_ranks]
    rng = np.random.default_rng(0)
    layer = make_layer(tokens, rng)
    want = expected(layer)
    rows = np.bincount(np.concatenate(layer.ids).ravel() + 1, minlength=EXPERTS + 1)[1:]
    assert rows[0] > TURN_ROWS and rows[-1] == 0, rows
    gpu.start()
    opened, layout = gpu.open_workspaces(
        num_ranks, num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, intermediate=INTERMEDIATE,
        max_tokens=max(tokens), num_sms=8, minibatch_units=1, ring_rows=128,
    )  # fmt: skip
    assert layout.segment_units * TURN_ROWS < rows[0], "expert 0 fits into one turn"
    ranks = [Rank(r, layer, workspace, layout) for r, (workspace, _) in enumerate(opened)]
    all_rows = -(-sum(tokens) * TOP_K // GROUP_ROWS + EXPERTS) * GROUP_ROWS
    wrong = []
    for number, (name, (saved, fp32, add)) in enumerate(VARIANTS.items()):
        main_grads = [rng.standard_normal(w.shape).astype(np.float32) for w in want[3:]]
        for rank in ranks:
            here = slice(rank.rank * rank.local, (rank.rank + 1) * rank.local)
            rank.prepare(all_rows if saved is None else saved, fp32, add, [w[here] for w in main_grads])
        gpu.synchronize()
        if number == 0 and num_ranks > 1:
            probe(ranks, opened)
        else:
            for rank in ranks:
                gpu.mok("mok_schedule", ctypes.byref(rank.forward))
        for rank in ranks:
            gpu.mok("mok_forward", ctypes.byref(rank.forward))
        for rank in ranks:
            gpu.mok("mok_backward", ctypes.byref(rank.backward))
        gpu.synchronize()
        gpu.check(opened)
        results = [np.concatenate(parts) for parts in zip(*[r.results() for r in ranks], strict=True)]
        if add:
            results[3:] = [a.astype(np.float64) - b for a, b in zip(results[3:], main_grads, strict=True)]
        errors = dict(
            zip(("out", "dx", "dp", "dw1", "dw2"), map(gpu.relative_error, results, want), strict=True)
        )
        print(f"{name}: relative error", ", ".join(f"{key} {error:.2g}" for key, error in errors.items()))
        wrong += [f"{name}: {key}" for key, error in errors.items() if not error < 0.01]
        if any(w[-1].any() for w in results[3:]):
            wrong.append(f"{name}: gradients of an expert without rows")
    if wrong:
        sys.exit(f"wrong results: {wrong}")


if __name__ == "__main__":
    main()
