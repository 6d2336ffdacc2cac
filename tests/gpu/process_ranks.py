"""One process of test_processes, on a GPU of its own where there are as many as ranks, else they share one.

    python -m tests.gpu.process_ranks RESULT_FOLDER [LIMIT_S]

Gloo between hosts, symmetric memory for the rest. Runs every scenario in one order on all ranks and writes
what it saw to RESULT_FOLDER/rank.json. With LIMIT_S, the longest wait for a peer, ranks are killed instead.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_mok import errors, native, runtime
from megatron_mok.config import MokConfig
from tests.gpu.world import Case, Layer, expected, expected_gradients, relative_error

GPUS = torch.cuda.device_count()
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"]) if GPUS >= SIZE else 0)
CONFIG = MokConfig(backend="cuda", shared_device=GPUS < SIZE, timeout_s=60.0)
LIMIT_S = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0


def open_comm(group, case, config=CONFIG, device=DEVICE):
    return runtime.get_comm(
        group,
        hidden=case.hidden,
        top_k=case.top_k,
        num_experts=case.experts,
        max_tokens=case.most_tokens,
        device=device,
        dtype=torch.bfloat16,
        config=config,
    )


def call(layer, comm, rank, number):
    w1, w2 = layer.weights(rank)
    x, ids, probs = layer.x[rank], layer.ids[rank], layer.probs[rank]
    return runtime.moe(x, ids, probs, w1, w2, comm=comm, num_experts=layer.case.experts, layer=number)


def correct(group, tokens, routing):
    """[error of the kernels, error of torch in bf16, whether a second call gives the same bits]"""
    rank = dist.get_rank(group)
    case = Case(tokens, 2, 2 * len(tokens), 512, 256, routing)
    layer = Layer.make(case, DEVICE)
    comm = open_comm(group, Case((512,) * len(tokens), 2, 8, 512, 256))
    out = call(layer, comm, rank, 1)
    again = call(layer, comm, rank, 2)
    torch.cuda.synchronize()
    native.lookup(comm.handle).check()
    want = expected(layer)
    exact, theirs = want.out[rank], want.out_bf16[rank]
    return [relative_error(out, exact), relative_error(theirs, exact), torch.equal(out, again)]


def gradients(group, tokens, routing):
    """[{name: [error of the kernels, error of torch in bf16]}, whether a second step gives the same bits]"""
    rank = dist.get_rank(group)
    layer = Layer.make(Case(tokens, 2, 2 * len(tokens), 512, 256, routing), DEVICE)
    comm = open_comm(group, Case((512,) * len(tokens), 2, 8, 512, 256))
    leaves = [layer.x[rank], layer.probs[rank], *(w[0].clone() for w in layer.weights(rank))]
    x, probs, w1, w2 = (t.requires_grad_() for t in leaves)

    def step():
        out = runtime.moe(
            x, layer.ids[rank], probs, w1, w2, comm=comm, num_experts=layer.case.experts, layer=3,
            save_capacity=0.6,
        )  # fmt: skip
        return torch.autograd.grad(out, (x, probs, w1, w2), layer.dy[rank])

    got, again = step(), step()
    torch.cuda.synchronize()
    native.lookup(comm.handle).check()
    exact, rounded = (every[rank] for every in expected_gradients(layer))
    results = {}
    for name, ours in zip(("dx", "dp", "dw1", "dw2"), got, strict=True):
        truth, theirs = getattr(exact, name), getattr(rounded, name).to(ours.dtype)
        results[name] = [relative_error(ours, truth), relative_error(theirs, truth)]
    return [results, all(torch.equal(a, b) for a, b in zip(got, again, strict=True))]


def refused(group):
    """All ranks on one GPU without shared_device."""
    config = MokConfig(backend="cuda", timeout_s=60.0)
    try:
        open_comm(group, Case((8,) * SIZE, 2, 2 * SIZE, 256, 128), config, torch.device("cuda", 0))
    except (ValueError, errors.PeerAbort) as error:
        return f"{type(error).__name__}: {error}"
    return "opened"


def too_many(group):
    """Rank 1 brings more tokens than its workspace was made for."""
    comm = open_comm(group, Case((64,) * SIZE, 2, 2 * SIZE, 128, 128))
    tokens = 200 if RANK == 1 else 64
    layer = Layer.make(Case((tokens,) * SIZE, 2, 2 * SIZE, 128, 128), DEVICE)
    try:
        call(layer, comm, RANK, 3)
        torch.cuda.synchronize()
        native.lookup(comm.handle).check()
    except errors.MokError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        runtime.release()
    return "nothing"


def grown(group):
    """Rank 1 alone brings more tokens to a second step, for which the workspace has grown.

    {way: [max_tokens before, after, whether the bits are those of a workspace that was large all along]}
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    small = Case((64,) * size, 2, 2 * size, 256, 256)
    large = replace(small, tokens=tuple(200 if r == 1 else 64 for r in range(size)))
    mine = replace(small, tokens=(large.tokens[rank],) * size)  # ranks ask for different sizes
    results, first = {}, None
    for way in ("from the start", "reserve", "release"):
        comm = open_comm(group, large if way == "from the start" else small)
        bits, before = step(small, comm, rank), comm.max_tokens
        if way == "reserve":
            runtime.reserve(200)
        elif way == "release":
            runtime.release()
            comm = open_comm(group, mine)
        bits += step(large, comm, rank)
        torch.cuda.synchronize()
        native.lookup(comm.handle).check()
        first = first or bits
        results[way] = [before, comm.max_tokens, all(map(torch.equal, bits, first))]
        runtime.release()
    return results


def step(case, comm, rank):
    """Output and gradients of two layers, the second forward before the first backward."""
    layers = [Layer.make(replace(case, seed=seed), DEVICE) for seed in (0, 1)]
    leaves, outs = [], []
    for number, layer in enumerate(layers, 1):
        tensors = [layer.x[rank], layer.probs[rank], *(w[0].clone() for w in layer.weights(rank))]
        x, probs, w1, w2 = (t.requires_grad_() for t in tensors)
        ids, experts = layer.ids[rank], case.experts
        outs.append(runtime.moe(x, ids, probs, w1, w2, comm=comm, num_experts=experts, layer=number))
        leaves.append((x, probs, w1, w2))
    gradients = [
        torch.autograd.grad(out, inputs, layer.dy[rank])
        for out, inputs, layer in zip(outs, leaves, layers, strict=True)
    ]
    return [*(out.detach() for out in outs), *(g for of_layer in gradients for g in of_layer)]


def absent(group):
    """The last rank stays away from a forward."""
    case = Case((64,) * SIZE, 2, 2 * SIZE, 256, 256)
    comm = open_comm(group, case, CONFIG.with_(timeout_s=2.0))
    layer = Layer.make(case, DEVICE)
    call(layer, comm, RANK, 1)
    torch.cuda.synchronize()
    try:
        if RANK != SIZE - 1:
            call(layer, comm, RANK, 2)
            torch.cuda.synchronize()
            native.lookup(comm.handle).check()
    except errors.MokError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier(group)
        runtime.release()
    return "nothing"


def scenarios() -> dict[str, Callable[[], object]]:
    """By name, what each rank does; halves run at the same time, each a group of its own."""
    half = SIZE // 2
    everyone, halves = dist.group.WORLD, [dist.new_group(list(range(r, r + half))) for r in (0, half)]
    mine, tokens = halves[RANK // half], ((300, 0, 200, 512) * 2)[:SIZE]
    made = {
        "refused": lambda: refused(everyone),
        "all": lambda: correct(everyone, tokens, "random"),
        "all-one rank gets all": lambda: correct(everyone, ((100, 200, 200, 100) * 2)[:SIZE], "rank 0"),
        "half": lambda: correct(mine, (300, 250, 0, 100)[:half], "absent"),
        "backward of all": lambda: gradients(everyone, tokens, "random"),
        "backward of half": lambda: gradients(mine, (300, 250, 0, 100)[:half], "absent"),
        "grown": lambda: grown(everyone),
        "grown of half": lambda: grown(mine),
        "too many": lambda: too_many(everyone),
        "absent": lambda: absent(everyone),
    }
    return {name: made[name] for name in made if half > 1 or "half" not in name}


# ---- ranks that are killed: the last one, then the last of those that are left


def wait_for_the_end_of(pid):
    """Until the process is gone and the driver has taken its kernels away; a part of LIMIT_S at most."""
    try:
        gone = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([gone], [], [], 0.7 * LIMIT_S)
    os.close(gone)
    time.sleep(0.2)


def killed(group, way):
    """The group's last rank is killed. What the others saw: [error, seconds from the kill to it].

    between calls: before a forward of the others. inside a forward, a backward: its kernel and those of all
    others but rank 0 run and wait for rank 0, which comes when the process is gone.
    """
    ranks = dist.get_world_size(group)
    case = Case((64,) * ranks, 2, 2 * ranks, 256, 256)
    comm = open_comm(group, case, CONFIG.with_(timeout_s=LIMIT_S))
    layer = Layer.make(case, DEVICE)
    w1, w2 = (w[0].clone().requires_grad_() for w in layer.weights(RANK))
    x = layer.x[RANK].requires_grad_()

    def forward():
        return runtime.moe(
            x, layer.ids[RANK], layer.probs[RANK], w1, w2, comm=comm, num_experts=case.experts, layer=5
        )

    def backward(out):
        torch.autograd.grad(out, (x, w1, w2), layer.dy[RANK])

    backward(forward())  # the first call waits longer
    out = forward() if way == "inside a backward" else None
    torch.cuda.synchronize()
    native.lookup(comm.handle).check()
    act = forward if out is None else lambda: backward(out)
    key, victim = f"dies {way}", RANK == ranks - 1
    store = dist.distributed_c10d._get_default_store()
    dist.barrier(group)
    if victim:
        if way != "between calls":
            act()
        store.set(key, str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    if RANK == 0 or way == "between calls":
        wait_for_the_end_of(int(store.get(key)))
    start = time.monotonic()
    try:
        act()
        torch.cuda.synchronize()
        native.lookup(comm.handle).check()
    except errors.MokError as error:
        return [f"{type(error).__name__}: {error}", time.monotonic() - start]
    finally:
        runtime.release()
    return ["nothing", time.monotonic() - start]


def kills() -> dict[str, Callable[[], object]]:
    """Each way takes the last rank of a group that is one rank smaller than the one before."""
    ways = ["between calls", "inside a forward", "inside a backward"] if SIZE > 2 else ["inside a forward"]
    groups = [dist.new_group(list(range(SIZE - i))) for i in range(len(ways))]  # while all ranks are there
    pairs = list(zip(ways, groups, strict=True))
    return {
        way: lambda way=way, group=group: killed(group, way)
        for i, (way, group) in enumerate(pairs)
        if RANK < SIZE - i
    }


def main():
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    file = Path(sys.argv[1], f"{RANK}.json")
    results = {}
    for name, scenario in (kills() if LIMIT_S else scenarios()).items():
        try:
            results[name] = scenario()
        except Exception:
            results[name] = traceback.format_exc()
        file.write_text(json.dumps(results))
    runtime.release()
    dist.destroy_process_group()
    results["ended"] = SIZE
    file.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
