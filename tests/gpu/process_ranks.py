"""One process of test_processes: four ranks, each on a GPU of its own where there are four, else they share.

Gloo between hosts, symmetric memory for the rest.

Runs every scenario in one order on all ranks and writes what it saw to RESULT_FOLDER/rank.json.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_mok import errors, native, runtime
from megatron_mok.config import MokConfig
from tests.gpu.world import Case, Layer, expected, expected_gradients, relative_error

GPUS = torch.cuda.device_count()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % GPUS)
CONFIG = MokConfig(backend="cuda", shared_device=GPUS < int(os.environ["WORLD_SIZE"]), timeout_s=60.0)


def open_comm(group, case, config=CONFIG):
    return runtime.get_comm(
        group,
        hidden=case.hidden,
        top_k=case.top_k,
        num_experts=case.experts,
        max_tokens=case.most_tokens,
        device=DEVICE,
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
    """Two ranks on one GPU without shared_device."""
    config = MokConfig(backend="cuda", timeout_s=60.0)
    try:
        open_comm(group, Case((8,) * 4, 2, 8, 256, 128), config)
    except (ValueError, errors.PeerAbort) as error:
        return f"{type(error).__name__}: {error}"
    return "opened"


def too_many(group, rank):
    """Rank 1 brings more tokens than its workspace was made for."""
    comm = open_comm(group, Case((64,) * 4, 2, 8, 128, 128))
    tokens = 200 if rank == 1 else 64
    layer = Layer.make(Case((tokens,) * 4, 2, 8, 128, 128), DEVICE)
    try:
        call(layer, comm, rank, 3)
        torch.cuda.synchronize()
        native.lookup(comm.handle).check()
    except errors.MokError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        runtime.release()
    return "nothing"


def absent(group, rank):
    """Rank 3 stays away from a forward."""
    comm = open_comm(group, Case((64,) * 4, 2, 8, 256, 256), CONFIG.with_(timeout_s=2.0))
    layer = Layer.make(Case((64,) * 4, 2, 8, 256, 256), DEVICE)
    call(layer, comm, rank, 1)
    torch.cuda.synchronize()
    try:
        if rank != 3:
            call(layer, comm, rank, 2)
            torch.cuda.synchronize()
            native.lookup(comm.handle).check()
    except errors.MokError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier(group)
        runtime.release()
    return "nothing"


def main():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    results = {}
    everyone = dist.group.WORLD
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    scenarios = {
        "refused": lambda: refused(everyone),
        "four": lambda: correct(everyone, (300, 0, 200, 512), "random"),
        "four-one rank gets all": lambda: correct(everyone, (100, 200, 200, 100), "rank 0"),
        "two": lambda: correct(pairs[rank // 2], (300, 250), "absent"),
        "backward of four": lambda: gradients(everyone, (300, 0, 200, 512), "random"),
        "backward of two": lambda: gradients(pairs[rank // 2], (300, 250), "absent"),
        "too many": lambda: too_many(everyone, rank),
        "absent": lambda: absent(everyone, rank),
    }
    for name, scenario in scenarios.items():
        try:
            results[name] = scenario()
        except Exception:
            results[name] = traceback.format_exc()
        Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(results))
    runtime.release()
    dist.destroy_process_group()
    results["ended"] = size
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
