"""The same training under mok, alltoall and allgather: losses and gradient norms step by step.

Tolerances: fp32 1e-6 over 10 steps and 2e-5 over 20, gradient norms 1e-5 relative over 10. In bf16 the
summation order of the stock dispatchers alone moves the loss by some 1e-3 a step: 2e-3 over 10 steps, and
over 20 at most twice what alltoall and allgather differ from each other in the same run.
"""

from __future__ import annotations

from typing import Any

import pytest

Curves = dict[str, dict[str, list[float]]]


def loss_difference(curves: Curves, a: str, b: str, steps: int) -> float:
    pairs = zip(curves[a]["losses"][:steps], curves[b]["losses"][:steps], strict=True)
    return max(abs(x - y) for x, y in pairs)


def norm_difference(curves: Curves, a: str, b: str, steps: int) -> float:
    pairs = zip(curves[a]["norms"][:steps], curves[b]["norms"][:steps], strict=True)
    return max(abs(x - y) / abs(y) for x, y in pairs)


def train(ranks: Any, dispatchers: list[str], steps: int, **options: Any) -> Curves:
    """All ranks are one expert-parallel group unless `ep` says otherwise."""
    options = {"ep": ranks.world, **options}
    every = ranks.run("model:train", dispatchers=dispatchers, steps=steps, limit_s=280, **options)
    assert all(curves == every[0] for curves in every), "losses are averages over ranks: the same on all"
    assert all(curve["losses"][-1] < curve["losses"][0] for curve in every[0].values()), "it learns"
    return every[0]


@pytest.mark.parametrize("ep", [1, 2, pytest.param(4, marks=pytest.mark.short)])
def test_fp32_equals_both_stock_dispatchers_B42(ranks: Any, pair: Any, ep: int) -> None:
    curves = train(pair if ep == 1 else ranks, ["mok", "alltoall", "allgather"], 20, ep=ep)
    for stock in ("alltoall", "allgather"):
        assert loss_difference(curves, "mok", stock, 10) <= 1e-6
        assert loss_difference(curves, "mok", stock, 20) <= 2e-5
        assert norm_difference(curves, "mok", stock, 10) <= 1e-5


@pytest.mark.parametrize("ep", [1, 2, pytest.param(4, marks=pytest.mark.short)])
def test_bf16_equals_both_stock_dispatchers_B42(ranks: Any, pair: Any, ep: int) -> None:
    curves = train(pair if ep == 1 else ranks, ["mok", "alltoall", "allgather"], 20, ep=ep, bf16=True)
    stock = loss_difference(curves, "alltoall", "allgather", 20)
    # At EP 1 the stock two are equal bit for bit and do not tell what the order of sums makes of it: the
    # bound of the first 10 steps then holds for all 20 (seen: 1e-3, as between the two at EP 2 and 4).
    assert (stock == 0) == (ep == 1)
    for name in ("alltoall", "allgather"):
        assert loss_difference(curves, "mok", name, 10) <= 2e-3
        assert loss_difference(curves, "mok", name, 20) <= (2 * stock if ep > 1 else 2e-3)


FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
OVERLAP = dict(overlap_grad_reduce=True, use_distributed_optimizer=True, overlap_param_gather=True)
VARIANTS: dict[str, dict[str, Any]] = {
    "mtp": dict(mtp_num_layers=1),
    "aux_and_z_loss": dict(
        moe_router_load_balancing_type="aux_loss", moe_router_score_function="softmax",
        moe_router_enable_expert_bias=False, moe_z_loss_coeff=1e-3, moe_router_num_groups=None,
        moe_router_group_topk=None,
    ),
    "padding_mask": dict(
        padded=20, moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"],
        moe_aux_loss_coeff=[1e-2, 1e-2], moe_z_loss_coeff=1e-3, moe_router_enable_expert_bias=False,
    ),
    "sinkhorn": dict(
        moe_router_load_balancing_type="sinkhorn", moe_router_score_function="softmax",
        moe_aux_loss_coeff=0.0,
        moe_router_enable_expert_bias=False, moe_router_num_groups=None, moe_router_group_topk=None,
        moe_router_topk_scaling_factor=None,
    ),
    "forced_balancing": dict(moe_router_force_load_balancing=True),
    "pp2_virtual_stages": dict(ep=2, pp=2, vpp=2, num_layers=4, moe_layer_freq=1, micro_batches=4),
    "recompute_moe": dict(recompute_granularity="selective", recompute_modules=["moe"]),
    "recompute_full": FULL,
    "recompute_shared_experts": dict(
        recompute_granularity="selective", recompute_modules=["shared_experts", "core_attn"]
    ),
    "4_micro_batches": dict(micro_batches=4),
    "overlap_grad_reduce": dict(micro_batches=2, ddp=dict(overlap_grad_reduce=True)),
    "distributed_optimizer": dict(ddp=dict(use_distributed_optimizer=True)),
    "overlap_param_gather": dict(micro_batches=2, ddp=OVERLAP),
    "grad_reduce_in_bf16": dict(bf16=True, ddp=dict(grad_reduce_in_fp32=False)),
    "clipping": dict(clip_grad=0.1),
    "bias_activation_fusion": dict(bias_activation_fusion=True),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_equals_stock_dispatchers(ranks: Any, pair: Any, name: str) -> None:
    """The expert bias and group limits are part of each that does not say otherwise.

    Where the stock two themselves part (seen with MTP at EP 4: 3e-6 once a near tie of the router had gone
    the other way), twice that is the bound to allgather, as in bf16. No allgather with pipeline stages: 4
    ranks and 4 micro-batches take long.
    """
    options = VARIANTS[name]
    staged = "pp" in options
    stock = ["alltoall"] if staged else ["alltoall", "allgather"]
    curves = train(ranks if staged else pair, ["mok", *stock], 10, **options)
    bf16 = options.get("bf16", False)
    for difference, limit in (
        (loss_difference, 2e-3 if bf16 else 1e-6),
        (norm_difference, 2e-2 if bf16 else 1e-5),
    ):
        assert difference(curves, "mok", "alltoall", 10) <= limit
        if "allgather" in stock:
            parted = difference(curves, "alltoall", "allgather", 10)
            assert difference(curves, "mok", "allgather", 10) <= max(limit, 2 * parted)


def test_twice_the_same_bits_B42(ranks: Any) -> None:
    first = train(ranks, ["mok"], 4, bf16=True)
    again = train(ranks, ["mok"], 4, bf16=True)
    assert first == again


@pytest.mark.parametrize("save_capacity", [0.0, 0.5])
def test_saved_rows_do_not_change_bits_B07(pair: Any, save_capacity: float) -> None:
    """Rows that are recomputed in backward give the same bits as saved ones."""
    assert train(pair, ["mok"], 3, bf16=True) == train(
        pair, ["mok"], 3, bf16=True, mok=dict(save_capacity=save_capacity)
    )


@pytest.mark.parametrize("main_grad", ["on", "off"])
def test_main_grad_modes_B34(pair: Any, main_grad: str) -> None:
    """Adding into main_grad, and returning the gradient for DDP to add, are the same training in fp32."""
    fused = train(pair, ["mok"], 4, micro_batches=2)
    other = train(pair, ["mok"], 4, micro_batches=2, mok=dict(main_grad=main_grad))
    both = {"fused": fused["mok"], "other": other["mok"]}
    assert loss_difference(both, "fused", "other", 4) <= 1e-6
    assert norm_difference(both, "fused", "other", 4) <= 1e-6
