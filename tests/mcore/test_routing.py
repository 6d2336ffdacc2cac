"""Routes and token counts that have broken other dispatchers, one MoE layer against a plain fp64 loop.

Cases that cannot apply to a Megatron-Core layer on a CPU:
- B12 (capacity factors), B59 (graph scopes), B75 (overlap options): refused, see test_refusals.py.
- B79's latent width: Megatron's latent projections need Transformer Engine.
- B16, B18, B31 (sizes off the kernels' tile): the CPU back end takes any size; the GPU's limits are
predicates in
  megatron_mok.config, tested in test_refusals.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

FP32 = 2e-6  # relative to the largest element, against fp64


@pytest.mark.short
@pytest.mark.parametrize("ep", [4, 2])
def test_ranks_without_tokens_B01(ranks: Any, ep: int) -> None:
    results = ranks.run("cases:all_to_first_rank", ep=ep)
    assert all(r["error"] <= FP32 for r in results)
    assert [r["grads_are_zeros"] for r in results] == [i % ep != 0 for i in range(4)]


@pytest.mark.short
def test_rank_that_sends_nothing_B05(ranks: Any) -> None:
    for errors in ranks.run(
        "cases:token_counts", counts=[[16, 0, 16, 16], [0, 0, 0, 8], [0, 0, 0, 0]], max_tokens=16
    ):
        assert max(errors) <= FP32


def test_unequal_tokens_B06(ranks: Any) -> None:
    for errors in ranks.run("cases:token_counts", counts=[[16, 24, 16, 32], [32, 16, 16, 16]]):
        assert max(errors) <= FP32


def test_more_tokens_than_the_workspace_takes_B06(ranks: Any) -> None:
    results = ranks.run("cases:above_max_tokens")
    names = [r["failure"][0] for r in results]
    assert names == ["PeerAbort", "WorkspaceTooSmall", "PeerAbort", "PeerAbort"]
    assert "24" in results[1]["failure"][1] and "16" in results[1]["failure"][1]
    assert all("rank 1" in r["failure"][1] for i, r in enumerate(results) if i != 1)
    assert all(max(r["before"], r["after"]) <= FP32 for r in results), "after reserve() all go on"


def test_workspace_that_grows_between_steps_B06(ranks: Any) -> None:
    """By reserve() and by release(): the bits of one that was large from the start."""
    assert ranks.run("cases:grown_workspace") == [[True, True]] * 4


@pytest.mark.short
def test_padding_rows_without_routes_B11(ranks: Any) -> None:
    for result in ranks.run("cases:cleared_padding"):
        assert result["error"] <= FP32
        assert result["padding_is_zero"]
        assert result["routes"] == 32 * 2 - 8 * 2 - 1


def test_padding_mask_of_megatron(ranks: Any) -> None:
    """It takes padding out of the router's losses; padded tokens are routed all the same."""
    for whole, ours, stock in ranks.run("cases:padding_mask", dispatchers=["mok", "alltoall"]):
        assert len(stock["losses"]) == 4, "three of balance, and the z loss"
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)
        assert ours["out"].equal(whole["out"]) and (ours["out"] != 0).any(-1).all()
        assert all((ours["losses"][name] != whole["losses"][name]).any() for name in whole["losses"])
        assert (ours["router"] - whole["router"]).abs().max() > 1e-4


def test_chosen_expert_with_probability_zero(ranks: Any) -> None:
    assert max(ranks.run("cases:underflowed_probability")) <= FP32


def test_top_1_trains_the_router_B13(ranks: Any) -> None:
    options = dict(ep=4, moe_router_topk=1, moe_router_pre_softmax=True)
    ours = ranks.run("cases:real_router", dispatcher="mok", **options)
    stock = ranks.run("cases:real_router", dispatcher="alltoall", **options)
    for a, b in zip(ours, stock, strict=True):
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-6)
        assert a["router"].abs().max() > 1e-3


@pytest.mark.parametrize("router_dtype", [None, "fp32"])
def test_same_tokens_same_bits_on_all_ranks_B23(ranks: Any, router_dtype: str | None) -> None:
    assert all(ranks.run("cases:same_tokens_everywhere", router_dtype=router_dtype))


def test_router_gradient_at_every_ep_B24(ranks: Any) -> None:
    one = ranks.run("cases:real_router", dispatcher="alltoall", ep=1)
    for ep in (1, 2, 4):
        for a, b in zip(ranks.run("cases:real_router", dispatcher="mok", ep=ep), one, strict=True):
            for name in a:
                torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-6)
            assert a["router"].abs().max() > 1e-3


def test_probabilities_are_applied_once_B26(ranks: Any) -> None:
    """moe_apply_probs_on_input, the other placement, is refused: test_refusals.py."""
    for errors in ranks.run("cases:equal_probabilities", dispatchers=["mok", "alltoall"]):
        assert max(errors) <= FP32


@pytest.mark.short
@pytest.mark.parametrize("k", [1, 4])
def test_one_rank_combines_B43(ranks: Any, k: int) -> None:
    assert max(ranks.run("cases:one_rank", k=k)) <= FP32


@pytest.mark.parametrize(
    "shared",
    [
        dict(moe_shared_expert_intermediate_size=8),
        dict(moe_shared_expert_intermediate_size=48, moe_shared_expert_gate=True),
    ],
    ids=["narrow", "gated"],
)
def test_shared_expert_of_another_width_B79(ranks: Any, shared: dict[str, Any]) -> None:
    for ours, stock in ranks.run("cases:shared_experts", dispatchers=["mok", "alltoall"], **shared):
        for name in ours:
            torch.testing.assert_close(ours[name], stock[name], rtol=1e-5, atol=2e-6)
