"""Megatron-Core models with the kernels: one rank over NCCL, then EP 4 and 2 as processes on one GPU.

All processes are started once and run every case (megatron_ranks); the tests below look at what they left.
Losses are those of whole training steps in bf16. Alltoall with SequentialMLP is what Megatron has without
Transformer Engine.
"""

import importlib.util
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RANKS = 4
LIMIT_S = 360
# Loss and relative gradient norm of two bf16 trainings that add in another order, over the steps of a case.
LOSS, NORM = 6e-3, 4e-2
# Relative errors of one layer. Where some tokens go to another expert: of nine tenths of them, of a gradient.
LAYER, SOME_TIES = 1.5e-2, (3e-2, 0.3)
ON_ONE = (
    *(
        "recompute moe",
        "recompute full",
        "overlap_grad_reduce",
        "distributed optimizer",
        "overlap_param_gather",
    ),
    *("gradients in bf16", "clipping", "mtp", "aux and z loss", "padding mask", "frozen experts"),
    *("frozen fc1", "lengths"),
)

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-Core is not installed"),
    pytest.mark.timeout(LIMIT_S + 60),
]


def start(folder: Path, limit_s: float = LIMIT_S) -> list[dict]:
    """What each rank saw, by case. AssertionError with its output for a rank that wrote nothing."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
        "OMP_NUM_THREADS": "2",
        "TORCHDYNAMO_DISABLE": "1",  # compiling Megatron's small functions takes longer than all cases
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # repeatable
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    logs = [folder / f"{rank}.log" for rank in range(RANKS)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.gpu.megatron_ranks", folder],
                    cwd=ROOT,
                    env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        end = time.monotonic() + limit_s
        for process in processes:
            process.wait(max(end - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        pass  # the cases that were reached still count
    finally:
        for process in processes:
            process.kill()
    for rank, log in enumerate(logs):
        assert (folder / f"{rank}.json").exists(), f"rank {rank} wrote nothing:\n{log.read_text()[-3000:]}"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return start(tmp_path_factory.mktemp("megatron"))


def found(results: list[dict], name: str, rank: int = 0):
    """A case's result. AssertionError with the traceback of a rank where it failed."""
    result = results[rank].get(name, "not reached")
    assert not isinstance(result, str), f"rank {rank}, {name}: {result}"
    return result


def on_all(results: list[dict], name: str):
    """Rank 0's result of a case of four ranks, which must have ended well, with equal losses, on all."""
    every = [found(results, name, rank) for rank in range(RANKS)]
    assert all(one["losses"] == every[0]["losses"] for one in every)
    return every[0]


def close(ours: dict, theirs: dict, loss: float = LOSS, norm: float = NORM) -> None:
    steps = min(len(ours["losses"]), len(theirs["losses"]))
    pairs = list(zip(ours["losses"], theirs["losses"], strict=False))
    worst = max(abs(a - b) for a, b in pairs)
    assert worst <= loss, f"losses differ by {worst:.2g} in {steps} steps: {pairs}"
    norms = list(zip(ours["norms"], theirs["norms"], strict=False))
    worst = max(abs(a - b) / b for a, b in norms)
    assert worst <= norm, f"gradient norms differ by {worst:.2g}: {norms}"


def same_bits(ours: dict, theirs: dict) -> bool:
    return all(ours[key] == theirs[key] for key in ("losses", "norms", "weights"))


# --- one rank


def test_losses_of_alltoall(results):
    ours = found(results, "mok")
    close(ours, found(results, "alltoall"))
    assert ours["losses"][-1] < ours["losses"][0] - 0.1, "it learns"


def test_B42_twice_the_same_bits(results):
    assert same_bits(found(results, "mok"), found(results, "mok again"))


@pytest.mark.parametrize("name", ON_ONE)
def test_variant_equals_alltoall(results, name):
    close(found(results, f"{name}, mok"), found(results, f"{name}, alltoall"))


@pytest.mark.parametrize("name", ["recompute moe", "recompute full", "overlap_grad_reduce"])
def test_B39_variants_that_change_no_bit(results, name):
    assert same_bits(found(results, f"{name}, mok"), found(results, "plain"))


@pytest.mark.parametrize("name", ["main_grad on", "save nothing", "save half", "small rings"])
def test_B07_knobs_change_no_bit(results, name):
    """B34: auto is on where Megatron's DDP made a main_grad."""
    assert same_bits(found(results, name), found(results, "plain"))


def test_B34_main_grad_off(results):
    """DDP adds what autograd gives it: gradients rounded to bf16 for each micro-batch."""
    close(found(results, "main_grad off"), found(results, "plain"))


def test_B57_steps_leave_nothing_behind(results):
    memory = found(results, "mok")["memory"]
    assert memory[-1] == memory[3], memory


def test_B78_evaluation_changes_nothing(results):
    case = found(results, "evaluation")
    assert case["losses"]["mixed"] == case["losses"]["plain"] and case["weights"] and case["repeated"]
    assert max(case["allocated"]) == 0, "no gradient is wanted, so nothing is kept"
    ours, theirs = case["first"]
    assert abs(ours - theirs) <= LOSS


def test_B37_loaded_weights_are_read(results):
    before, source, target = found(results, "loaded")
    assert target == source != before


def test_B77_two_models_of_other_sizes(results):
    assert found(results, "two models")


def test_B58_no_host_waits_in_the_layer(results):
    assert found(results, "host waits") == []


def check_figures(written: dict, steps: list[str]) -> None:
    """Of steps whose calls bring 2 sequences of 256 tokens to 4 experts each, half of the rows saved."""
    routes = 256 * 2 * 4
    assert list(written) == steps, "one step late, and only where they were asked for"
    for step in written.values():
        assert step["mok/rows"] == routes, "on average: no route is lost"
        assert routes <= step["mok/rows-max"] <= 4 * routes
        assert routes / 4 <= step["mok/rows-recomputed"] <= 2 * routes
        assert step["mok/workspace-bytes"] > 1 << 20
        assert 0 <= step["mok/peer-wait-ms"] <= step["mok/peer-wait-ms-max"] < 60_000


def test_B58_figures_make_no_host_wait(results):
    written = found(results, "figures")
    check_figures(written, ["1", "2", "3"])
    assert all(step["mok/rows-max"] == 256 * 2 * 4 for step in written.values()), "one rank gets all"
    assert all(step["mok/peer-wait-ms-max"] == 0 for step in written.values()), "it has no peers"


def test_figures_of_training(results):
    check_figures(found(results, "figures of training"), ["1", "2"])


# --- four ranks


def test_figures_of_four_ranks(results):
    every = [found(results, "ep4, figures", rank) for rank in range(RANKS)]
    check_figures(every[0], ["1", "2"])
    assert all(one == every[0] for one in every)
    assert all(step["mok/peer-wait-ms"] > 0 for step in every[0].values()), "ranks on one GPU take turns"


@pytest.mark.parametrize("name", ["ep4", "ep2"])
def test_expert_parallel_losses_are_those_of_one_rank(results, name):
    close(on_all(results, name), found(results, "mok"))


def test_ep4_equals_alltoall(results):
    close(on_all(results, "ep4"), on_all(results, "ep4, alltoall"))


def test_B42_ep4_twice_the_same_bits(results):
    for rank in range(RANKS):
        assert same_bits(found(results, "ep4", rank), found(results, "ep4 again", rank))


def test_B05_uneven_tokens(results):
    close(on_all(results, "ep4, uneven"), on_all(results, "ep4, uneven, alltoall"))


@pytest.mark.parametrize(
    "name",
    ["ep4, recompute moe", "ep4, overlap_param_gather", "ep2, overlap_param_gather", "ep2, main_grad off"],
)
def test_expert_parallel_variants(results, name):
    close(on_all(results, name), on_all(results, name.split(",")[0]))


def test_frozen_experts_with_four_ranks(results):
    close(on_all(results, "ep4, frozen experts"), on_all(results, "ep4, frozen experts, alltoall"))


@pytest.mark.parametrize("name", ["tp2 ep4", "tp2 ep2", "cp2 ep4", "cp2 ep2"])
def test_B73_split_tokens_of_a_layer(results, name):
    """Half of each sequence's tokens on each of two ranks, by sequence parallelism beside TP 2 (ETP 1) or by
    context parallelism: output, dx and all weight gradients are those of whole sequences."""
    errors = found(results, name)
    assert len(errors) == 2 + 2 * 16 + 3, "16 experts, the shared one and the router"
    assert max(errors.values()) <= LAYER, errors


def test_B73_attention_of_two_ranks_before_the_layer(results):
    """Attention's sums are in another order with TP 2, so some tokens' scores tie the other way."""
    errors = found(results, "tp2 ep4, attention")
    assert errors.pop("out") <= SOME_TIES[0] and errors.pop("dx") <= SOME_TIES[0]
    assert len(errors) == 2 + 2 * 16 + 3 and max(errors.values()) <= SOME_TIES[1], errors


@pytest.mark.parametrize("way", ["reserved", "released"])
def test_B06_a_workspace_that_grows_between_steps(results, way):
    """From the second step on rank 1 alone brings more tokens: the bits of a workspace that was large before.

    By reserve(), the same on all ranks, or by release(): the next forward takes the largest rank's tokens.
    """
    for rank in range(RANKS):
        assert same_bits(found(results, f"ep4, {way}", rank), found(results, "ep4, large workspace", rank))


def test_B57_other_layouts_in_the_same_processes(results):
    """EP 4, EP 2, EP 4 by destroy_model_parallel, with release() before it and without: the same bits.
    Without it, the workspaces of groups that are no more stay until the next release()."""
    for rank in range(RANKS):
        freed, kept = (found(results, f"layouts, {way}", rank) for way in ("released", "not released"))
        first, _, again = freed["curves"]
        assert first == again and freed["curves"] == kept["curves"]
        *freed, after = freed["workspace"]
        assert min(freed) > 1 << 20 and freed[0] == freed[2] and after == 0
        assert kept["workspace"] == [*itertools.accumulate(freed), 0]


def test_B74_virtual_pipeline_stages(results):
    """Two stages of two chunks each, four micro-batches: several of a layer are in flight."""
    close(on_all(results, "pp2 with virtual stages"), on_all(results, "one stage"))


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
)
def test_B73_a_transformer_engine_model_with_tp2(results):
    """Sequence parallelism, which the local norms refuse; ETP 1, EP 2, TEGroupedMLP."""
    ours, theirs = (on_all(results, f"tp2, transformer_engine, {name}") for name in ("mok", "alltoall"))
    close(ours, theirs)


def test_all_ranks_end(results):
    """Groups were destroyed and made anew between layouts, and at the end."""
    assert [result.get("ended") for result in results] == [RANKS] * RANKS
