"""Gradients, accumulation, recomputation, several calls in flight, what is kept and what is freed.

Cases that cannot apply here: B48 (streams) and B60 (allocation during capture) need a GPU; B58 (host waits)
too.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

FP32 = 2e-6


def test_empty_ranks_in_ddp_B04(ranks: Any) -> None:
    ours = ranks.run("cases:empty_ranks_in_ddp", dispatcher="mok")
    stock = ranks.run("cases:empty_ranks_in_ddp", dispatcher="alltoall")
    for rank, (a, b) in enumerate(zip(ours, stock, strict=True)):
        assert a["losses"] == pytest.approx(b["losses"], abs=1e-6)
        assert a["added"] == [True] * 3, "gradient hooks have fired on every rank in every step"
        assert a["zeros"] == [rank != 0] * 3


COMBINATIONS = [
    *itertools.product([True, False], [True, False], [True], [True]),
    *itertools.product([True, False], [True, False], [False], [False]),
    (True, True, True, False),
    (True, True, False, True),
]


@pytest.mark.parametrize(
    "flags", COMBINATIONS, ids=lambda f: "".join("xpgd"[i] if v else "-" for i, v in enumerate(f))
)
def test_frozen_weights_or_inputs_B35(ranks: Any, flags: tuple[bool, ...]) -> None:
    names = ("x_grad", "probs_grad", "fc1_grad", "fc2_grad")
    for result in ranks.run("cases:requires_grad", **dict(zip(names, flags, strict=True))):
        assert result["error"] <= FP32
        assert result["any"] == any(flags)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_main_grad_of_two_micro_batches_B36(ranks: Any, dtype: str) -> None:
    for result in ranks.run("cases:main_grad_accumulation", main_grad_dtype=dtype):
        assert result["dtype"] == ("torch.float32" if dtype == "fp32" else "torch.bfloat16")
        assert result["doubled"]
        assert result["fired"] == 3
        assert result["flag"]
    assert any(r["nonzero"] for r in ranks.run("cases:main_grad_accumulation", main_grad_dtype=dtype))


def test_low_bits_of_accumulation_B36(ranks: Any) -> None:
    for values in ranks.run("cases:low_bits"):
        assert values == [256.0, 257.0]


@pytest.mark.short
def test_parameters_keep_megatrons_attributes_B38(ranks: Any) -> None:
    ours = ranks.run("cases:parameter_attributes", dispatcher="mok")
    stock = ranks.run("cases:parameter_attributes", dispatcher="alltoall")
    for a, b in zip(ours, stock, strict=True):
        assert a["attributes"] == b["attributes"]
        assert a["norm"] == pytest.approx(b["norm"]) == pytest.approx(math.sqrt(a["global"]))


RECOMPUTE = {
    "moe": dict(recompute_granularity="selective", recompute_modules=["moe"]),
    "full": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
}


@pytest.mark.parametrize("kind", RECOMPUTE)
def test_recomputation_routes_the_same_B39_B40(ranks: Any, kind: str) -> None:
    plain = ranks.run("cases:tied_routes", recompute={})
    again = ranks.run("cases:tied_routes", recompute=RECOMPUTE[kind])
    for a, b in zip(plain, again, strict=True):
        assert a["loss"] == b["loss"]
        assert all(x.equal(y) for x, y in zip(a["grads"], b["grads"], strict=True))


@pytest.mark.short
def test_micro_batches_in_flight_B74(ranks: Any) -> None:
    assert all(ranks.run("cases:micro_batches_in_flight"))


def test_two_models_B77(ranks: Any) -> None:
    for result in ranks.run("cases:two_models"):
        assert max(result.values()) <= FP32


def test_evaluation_changes_nothing_B78(ranks: Any) -> None:
    for result in ranks.run("cases:evaluation_between_steps"):
        assert all(result.values()), result


def test_nothing_is_kept_B57(ranks: Any) -> None:
    assert all(all(result.values()) for result in ranks.run("cases:nothing_is_kept"))


def test_one_workspace_for_all_layers_and_lengths_B54_B55(ranks: Any) -> None:
    assert ranks.run("cases:one_workspace") == [1] * 4


def test_other_layouts_in_the_same_processes_B57(ranks: Any) -> None:
    """Megatron's groups are destroyed and made anew, with release() before or without: the same bits."""
    freed = ranks.run("cases:other_layouts", release=True)
    kept = ranks.run("cases:other_layouts", release=False)
    for result in (*freed, *kept):
        four, two, again = result["curves"]
        assert again == four == freed[0]["curves"][0]
        assert two == freed[0]["curves"][1]
        assert two["losses"] == pytest.approx(four["losses"], abs=1e-6)


@pytest.mark.parametrize("release", [True, False])
def test_other_process_groups_B52(ranks: Any, release: bool) -> None:
    """torch's groups are destroyed; release() may also come when they are no more."""
    assert all(result["equal"] for result in ranks.run("cases:groups_destroyed", release=release))


def test_absent_rank_is_named_B49_B51(ranks: Any) -> None:
    results = ranks.run("cases:absent_rank")
    assert results[1]["failure"] == ("MemoryError", "simulated")
    for rank in (0, 2, 3):
        name, text = results[rank]["failure"]
        assert name in ("PeerTimeout", "PeerAbort")
        assert "rank 1" in text or name == "PeerAbort"
        assert results[rank]["seconds"] < 20
    assert any(results[rank]["failure"][0] == "PeerTimeout" for rank in (0, 2, 3))
    assert all(result["again"] <= FP32 for result in results), "new groups work"


def test_torch_compile_B61(ranks: Any) -> None:
    for result in ranks.run("cases:compiled", limit_s=200):
        assert result["equal"] == [True, True]
        assert result["op_inside"], "a graph was compiled, and the op is part of it"
        assert result["graphs"] == 1, "it serves any number of tokens"
