"""What mok refuses: every row of the table, all offenders in one message, on all ranks, before Megatron's own
checks."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import megatron_mok
from megatron_mok.config import kernel_problems
from megatron_mok.errors import ConfigError
from megatron_mok.mcore import refusals
from megatron_mok.mcore.refusals import REFUSALS, Refusal

BASE: dict[str, Any] = dict(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    num_moe_experts=8,
    moe_ffn_hidden_size=32,
    moe_token_dispatcher_type="mok",
    add_bias_linear=False,
    gated_linear_unit=True,
    activation_func=torch.nn.functional.silu,
    bf16=True,
    params_dtype=torch.bfloat16,
)
ARGUMENTS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-experts 8 --moe-ffn-hidden-size 32 "
    "--swiglu --disable-bias-linear --bf16 --moe-token-dispatcher-type mok"
)
IDS = {
    "B12": {"moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_token_dropping",
            "moe_expert_rank_capacity_factor"},
    "B26": {"moe_apply_probs_on_input"},
    "B27": {"add_bias_linear", "activation_func", "activation_func_clamp_value", "glu_linear_offset", "fp16",
            "fp8", "fp8_param", "fp4", "fp4_param", "params_dtype", "use_te_activation_func"},
    "B59": {"cuda_graph_modules"},
    "B72": {"num_moe_experts", "expert_model_parallel_size"},
    "B73": {"expert_tensor_parallel_size", "sequence_parallel"},
    "B75": {"moe_shared_expert_overlap", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute",
            "moe_paged_stash", "offload_modules", "recompute_modules",
            "overlap_dispatch_backward_with_experts_wgrad"},
    "B83": {"moe_mlp_glu_interleave_size"},
    "B84": {"moe_megakernel_backend"},
    "B85": {"moe_enable_deepep", "moe_flex_dispatcher_backend"},
}  # fmt: skip


def name(row: Refusal) -> str:
    return "-".join([row.field, *(fault for fault, fields in IDS.items() if row.field in fields)])


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other tests have imported megatron.training
        megatron_mok.register()
    megatron_mok.configure(megatron_mok.MokConfig())
    yield
    megatron_mok.unregister()


def build(**changes: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(**{**BASE, **changes})


# Settings that a supported Megatron-Core may lack, and the first version that has them. A configuration of
# that version is TransformerConfig with the field added: registration, validation and message are the real
# ones.
NEWER = {
    "expert_gtp_weight_remat_size": "0.19",
    "moe_use_grouped_tensor": "main",
    "moe_megakernel_backend": "main",
}


def newer(field: str) -> Any:
    """TransformerConfig of a version that has `field`."""
    from megatron.core.transformer import TransformerConfig

    if field in TransformerConfig.__dataclass_fields__:
        return TransformerConfig
    return dataclasses.make_dataclass("TransformerConfig", [(field, Any, None)], bases=(TransformerConfig,))


def parse(*flags: str) -> None:
    """Have Megatron's own parser read a MoE model and these flags."""
    from megatron.training import arguments

    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    parser.parse_args([*ARGUMENTS.split(), *flags])


def refused_fields(row: Refusal) -> list[str]:
    """What is wrong with a model that has the row's example, as this Megatron-Core comes to see it."""
    from megatron.core.transformer import TransformerConfig

    unknown = set(row.example) - set(TransformerConfig.__dataclass_fields__)
    with pytest.raises(ConfigError) as caught:
        if not unknown:
            build(**row.example)
        elif unknown <= set(NEWER):
            newer(row.field)(**{**BASE, **row.example})
        else:  # no field of the configuration, so an argument
            assert row.example == {row.field: True}
            parse(f"--{row.field.replace('_', '-')}")
    return [problem.field for problem in caught.value.problems]


@pytest.mark.short
def test_what_is_allowed_is_accepted() -> None:
    build()
    build(
        moe_shared_expert_intermediate_size=32, moe_aux_loss_coeff=1e-2, moe_z_loss_coeff=1e-3,
        recompute_granularity="selective", recompute_modules=["moe", "shared_experts", "core_attn"],
        moe_router_force_load_balancing=True, variable_seq_lengths=True,
    )  # fmt: skip
    build(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    build(tensor_model_parallel_size=2, sequence_parallel=True, expert_tensor_parallel_size=1)
    build(num_moe_experts=None, moe_ffn_hidden_size=None, add_bias_linear=True)


@pytest.mark.short
@pytest.mark.parametrize("row", REFUSALS, ids=name)
def test_each_row(row: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    if row.on_gpu_only:
        build(**row.example)  # allowed on the CPU
        monkeypatch.setattr(refusals, "on_gpu", lambda: True)
        monkeypatch.setattr(refusals, "kernel_problems", lambda *_, **__: [])
    assert row.field in refused_fields(row)


@pytest.mark.short
def test_what_the_rows_start_from_is_accepted() -> None:
    parse()
    for field in NEWER:
        newer(field)(**BASE)


def test_ids_name_existing_rows() -> None:
    assert set().union(*IDS.values()) <= {row.field for row in REFUSALS}


@pytest.mark.short
def test_all_offenders_in_one_message_before_megatrons_own() -> None:
    with pytest.raises(ConfigError) as caught:
        build(
            moe_shared_expert_overlap=True, moe_expert_capacity_factor=1.0, add_bias_linear=True,
            overlap_moe_expert_parallel_comm=True, expert_tensor_parallel_size=2,
        )  # fmt: skip
    fields = ["moe_shared_expert_overlap", "moe_expert_capacity_factor", "add_bias_linear"]
    fields += ["overlap_moe_expert_parallel_comm", "expert_tensor_parallel_size"]
    assert sorted(p.field for p in caught.value.problems) == sorted(fields)
    assert all(field in str(caught.value) for field in fields)
    assert "--expert-tensor-parallel-size 1" in str(caught.value)


@pytest.mark.parametrize(
    ("activation", "gated"),
    [("gelu", False), ("gelu", True), ("relu", False), ("silu", False)],
)
def test_other_activations_B27(activation: str, gated: bool) -> None:
    with pytest.raises(ConfigError, match="SwiGLU"):
        build(activation_func=getattr(torch.nn.functional, activation), gated_linear_unit=gated)


def test_squared_relu_and_quick_geglu_B27() -> None:
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    for function, gated in ((squared_relu, False), (quick_gelu, True)):
        with pytest.raises(ConfigError, match="SwiGLU"):
            build(activation_func=function, gated_linear_unit=gated)


@pytest.mark.parametrize(
    ("impl", "modules", "refused"),
    [
        ("transformer_engine", ["moe"], True),
        ("local", ["moe"], True),
        ("transformer_engine", [], True),
        ("local", [], False),
        ("local", "full", False),
        ("local", ["moe_router"], False),
        ("full_iteration", [], False),
        ("transformer_engine", ["attn", "moe_router", "moe_preprocess"], False),
        ("transformer_engine", ["attn"], False),
        ("transformer_engine", ["attn", "moe_router"], False),
        ("none", [], False),
    ],
)
def test_graph_scopes_B59(impl: str, modules: Any, refused: bool) -> None:
    if not refused:
        build(cuda_graph_impl=impl, cuda_graph_modules=modules)
        return
    with pytest.raises(ConfigError) as caught:
        build(cuda_graph_impl=impl, cuda_graph_modules=modules)
    assert [p.field for p in caught.value.problems] == ["cuda_graph_modules"]


@pytest.mark.parametrize("ep", [1, 2, 3, 6, 12, 72])
def test_expert_parallel_sizes_B72(ep: int) -> None:
    build(num_moe_experts=72, expert_model_parallel_size=ep)


def test_expert_tensor_parallel_defaults_to_tp_B73() -> None:
    with pytest.raises(ConfigError) as caught:
        build(tensor_model_parallel_size=2, sequence_parallel=True)
    assert [p.field for p in caught.value.problems] == ["expert_tensor_parallel_size"]


def test_kernel_limits_B16() -> None:
    assert not kernel_problems(hidden=2048, ffn=768, top_k=8, local_experts=128, ranks=72)
    bad = kernel_problems(
        {"ffn": "moe_ffn_hidden_size"}, hidden=2880, ffn=100, top_k=33, local_experts=513, ranks=73
    )
    assert [p.field for p in bad] == ["hidden", "moe_ffn_hidden_size", "top_k", "local_experts", "ranks"]
    assert all("128" in p.need for p in bad[:2])


def test_sizes_are_judged_where_the_kernels_run_B16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "on_gpu", lambda: True)
    with pytest.raises(ConfigError) as caught:
        build()
    assert {p.field for p in caught.value.problems} == {"hidden_size", "moe_ffn_hidden_size"}
    build(hidden_size=256, moe_ffn_hidden_size=128)


@pytest.mark.short
def test_other_dispatchers_stay_stock() -> None:
    build(moe_token_dispatcher_type="alltoall", moe_expert_capacity_factor=1.0, add_bias_linear=True)
    with pytest.raises(ValueError, match="only works with alltoall|flex") as caught:
        build(moe_token_dispatcher_type="allgather", moe_shared_expert_overlap=True,
              moe_shared_expert_intermediate_size=32)  # fmt: skip
    assert not isinstance(caught.value, ConfigError)


@pytest.mark.parametrize("changes", [
    dict(num_moe_experts=6, moe_ffn_hidden_size=16),
    dict(add_bias_linear=True),
    dict(tensor_model_parallel_size=2),
    dict(moe_expert_capacity_factor=1.0),
], ids=["experts-B72", "bias-B27", "tp-B73", "capacity-B12"])  # fmt: skip
def test_all_ranks_raise_the_same(ranks: Any, changes: dict[str, Any]) -> None:
    results = ranks.run("cases:refused", changes=changes)
    assert results[0] is not None and results[0][0] == "ConfigError"
    assert all(result == results[0] for result in results)


def test_the_table_is_printed() -> None:
    command = [sys.executable, "-m", "megatron_mok.mcore"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "found in sys.modules" not in done.stderr
    printed = done.stdout
    assert [line.split("`")[1] for line in printed.splitlines()[2:]] == [row.field for row in REFUSALS]
