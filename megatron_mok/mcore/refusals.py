"""What the dispatcher `mok` refuses: ONE table, read by the validation, by the tests and by the
documentation.

`python -m megatron_mok.mcore` prints it as Markdown.

A row looks at settings by their TransformerConfig names. The same rows judge a TransformerConfig (before its
own __post_init__, whose messages would know nothing of mok) and the namespace of Megatron's arguments.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ..config import current, kernel_problems
from ..errors import ConfigError, Problem

NAME = "mok"
OTHER = "or use --moe-token-dispatcher-type alltoall"


class Settings:
    """Uniform view on a TransformerConfig or an argparse namespace; a setting that does not exist is None."""

    # Arguments whose destination differs from the TransformerConfig field.
    ALIASES = {"num_moe_experts": "num_experts"}

    def __init__(self, source: Any) -> None:
        self._source = source
        self._is_args = isinstance(source, Namespace)

    def __getattr__(self, name: str) -> Any:
        if self._is_args:
            name = self.ALIASES.get(name, name)
        return getattr(self._source, name, None)

    @property
    def activation(self) -> str:
        """The activation's name: swiglu, or what stands in its place."""
        if self._is_args:
            chosen = [n for n in ("swiglu", "squared_relu", "quick_geglu") if getattr(self._source, n, False)]
            return " and ".join(chosen) or "gelu"
        import torch.nn.functional as F

        function = self.activation_func
        name = "silu" if function in (F.silu,) else getattr(function, "__name__", repr(function))
        if self.gated_linear_unit and name == "silu":
            return "swiglu"
        return f"gated {name}" if self.gated_linear_unit else name

    @property
    def expert_tp(self) -> int:
        """Expert tensor parallel size; Megatron takes the tensor parallel size where it is not given."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size or 1

    def modules(self, name: str) -> set[str]:
        """A setting that lists modules (strings or enum members), as a set of names."""
        value = getattr(self, name)
        if value is None:
            return set()
        if isinstance(value, str) or not isinstance(value, Iterable):
            value = [value]
        return {str(getattr(item, "name", item)) for item in value}


class Refusal(NamedTuple):
    """One row. `when` says whether the settings are refused; `example` is a change that must trigger it."""

    field: str
    when: Callable[[Settings], Any]
    need: str
    remedy: str
    example: dict[str, Any]
    got: Callable[[Settings], Any] | None = None
    on_gpu_only: bool = False

    def problem(self, settings: Settings) -> Problem:
        got = self.got(settings) if self.got else getattr(settings, self.field)
        return Problem(self.field, got, self.need, self.remedy)


def _truthy(field: str, why: str, example: Any = True, **options: Any) -> Refusal:
    """A switch that must stay off."""
    return Refusal(
        field,
        lambda s: getattr(s, field),
        f"it unset ({why})",
        f"leave it out, {OTHER}",
        {field: example},
        **options,
    )


def _uses_cuda_graph(s: Settings) -> bool:
    return (s.cuda_graph_impl or "none") != "none" or bool(s.enable_cuda_graph or s.external_cuda_graph)


def _graph_modules(s: Settings) -> set[str]:
    """Captured modules; {"full"} for whole layers."""
    return s.modules("cuda_graph_scope") or s.modules("cuda_graph_modules") or {"full"}


def _graph_refused(s: Settings) -> bool:
    """Parts of layers beside the experts may be captured by anyone, the experts by Megatron's own graphs."""
    if not _uses_cuda_graph(s) or s.cuda_graph_impl == "full_iteration":
        return False
    own = s.cuda_graph_impl == "local" or s.enable_cuda_graph
    parts = {"attn", "mlp", "mamba", "moe_router", "moe_preprocess"}
    return not (_graph_modules(s) <= parts or (own and _graph_modules(s) <= {"full", "full_iteration"}))


_OFFLOADED = {"expert_fc1", "moe_act", "fused_group_mlp"}

REFUSALS: tuple[Refusal, ...] = (
    # --- parallel layout
    Refusal(
        "num_moe_experts",
        lambda s: s.num_moe_experts % (s.expert_model_parallel_size or 1),
        "a multiple of expert_model_parallel_size",
        "change --expert-model-parallel-size or --num-experts",
        {"num_moe_experts": 6, "expert_model_parallel_size": 4},
        got=lambda s: f"{s.num_moe_experts} with expert_model_parallel_size {s.expert_model_parallel_size}",
    ),
    Refusal(
        "expert_model_parallel_size",
        lambda s: (s.expert_model_parallel_size or 1) > 72,
        "at most 72 (one NVLink domain)",
        f"use fewer expert-parallel ranks, {OTHER}",
        {"num_moe_experts": 146, "expert_model_parallel_size": 73},
    ),
    Refusal(
        "expert_tensor_parallel_size",
        lambda s: s.expert_tp > 1,
        "1 (unset means the tensor parallel size)",
        "pass --expert-tensor-parallel-size 1",
        {"expert_tensor_parallel_size": 2},
        got=lambda s: (
            f"{s.expert_tensor_parallel_size} with tensor_model_parallel_size {s.tensor_model_parallel_size}"
        ),
    ),
    Refusal(
        "sequence_parallel",
        lambda s: (s.tensor_model_parallel_size or 1) > 1 and not s.sequence_parallel,
        "True where tensor_model_parallel_size > 1",
        "pass --sequence-parallel",
        {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "sequence_parallel": False},
    ),
    Refusal(
        "expert_gtp_weight_remat_size",
        lambda s: (
            max(s.expert_gtp_weight_remat_size or 1, s.expert_tensor_parallel_num_weight_shards or 1) > 1
        ),
        "1 (expert weights must be whole on their rank)",
        f"leave --expert-tensor-parallel-num-weight-shards out, {OTHER}",
        {"expert_gtp_weight_remat_size": 2},
    ),
    # --- arithmetic
    Refusal(
        "add_bias_linear",
        lambda s: s.add_bias_linear,
        "False (experts have no bias)",
        f"pass --disable-bias-linear, {OTHER}",
        {"add_bias_linear": True},
    ),
    Refusal(
        "activation_func",
        lambda s: s.activation != "swiglu",
        "SwiGLU: silu with gated_linear_unit",
        f"pass --swiglu, {OTHER}",
        {"gated_linear_unit": False},
        got=lambda s: s.activation,
    ),
    _truthy("activation_func_clamp_value", "SwiGLU without clamp", example=7.0),
    _truthy("glu_linear_offset", "SwiGLU without offset", example=1.0),
    _truthy("use_te_activation_func", "the activation is part of the kernel"),
    _truthy("fp16", "bf16, or fp32 on the CPU"),
    Refusal(
        "params_dtype",
        lambda s: not s.bf16 and not s.fp16,
        "bf16=True on a GPU (fp32 runs on the CPU)",
        "pass --bf16",
        {"bf16": False},
        got=lambda s: f"bf16={s.bf16}",
        on_gpu_only=True,
    ),
    _truthy("fp8", "bf16 experts", example="e4m3"),
    _truthy("fp8_param", "bf16 parameters", example=True),
    _truthy("fp4", "bf16 experts", example="e2m1"),
    _truthy("fp4_param", "bf16 parameters", example=True),
    _truthy("use_kitchen", "Megatron's own linear layers"),
    Refusal(
        "quant_recipe",
        lambda s: s.quant_recipe is not None,
        "it unset (bf16 experts)",
        f"leave it out, {OTHER}",
        {"quant_recipe": "recipe"},
    ),
    _truthy("batch_invariant_mode", "the kernel has no such mode"),
    # --- routing
    Refusal(
        "moe_expert_capacity_factor",
        lambda s: s.moe_expert_capacity_factor is not None,
        "it unset (no route is ever dropped)",
        f"leave --moe-expert-capacity-factor out, {OTHER}",
        {"moe_expert_capacity_factor": 1.0},
    ),
    _truthy("moe_pad_expert_input_to_capacity", "there is no capacity"),
    _truthy("moe_token_dropping", "no route is ever dropped"),
    Refusal(
        "moe_expert_rank_capacity_factor",
        lambda s: s.moe_expert_rank_capacity_factor is not None,
        "it unset (there is no capacity)",
        f"leave it out, {OTHER}",
        {"moe_expert_rank_capacity_factor": 1.5},
    ),
    _truthy("moe_router_padding_for_quantization", "rows are padded inside"),
    _truthy("moe_router_padding_for_fp8", "rows are padded inside"),
    _truthy("moe_apply_probs_on_input", "probabilities are applied after the activation"),
    _truthy("moe_pad_experts_for_cuda_graph_inference", "there is no capacity"),
    # --- form of the experts
    _truthy("moe_mlp_glu_interleave_size", "gate rows first, then up rows", example=32),
    _truthy("moe_single_grouped_weight", "one weight an expert"),
    _truthy("moe_single_grouped_bias", "one weight an expert"),
    _truthy("moe_use_grouped_tensor", "one weight an expert"),
    _truthy("use_transformer_engine_op_fuser", "the experts are fused already"),
    # --- overlap and memory
    _truthy("moe_shared_expert_overlap", "dispatch and combine are inside one kernel"),
    _truthy("overlap_moe_expert_parallel_comm", "dispatch and combine are inside one kernel"),
    _truthy("delay_wgrad_compute", "weight gradients are part of the backward kernel"),
    _truthy(
        "overlap_dispatch_backward_with_experts_wgrad", "weight gradients are part of the backward kernel"
    ),
    _truthy("ep_overlap_early_attn_memory_release", "it belongs to overlap_moe_expert_parallel_comm"),
    Refusal(
        "recompute_modules",
        lambda s: s.recompute_granularity == "selective" and "moe_act" in s.modules("recompute_modules"),
        "no moe_act (choose what backward recomputes with save_capacity)",
        "drop moe_act; --mok-save-capacity 0 recomputes everything in the kernel",
        {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
    ),
    Refusal(
        "offload_modules",
        lambda s: s.fine_grained_activation_offloading and s.modules("offload_modules") & _OFFLOADED,
        f"none of {', '.join(sorted(_OFFLOADED))}",
        f"drop them, {OTHER}",
        {"fine_grained_activation_offloading": True, "offload_modules": ["expert_fc1"]},
    ),
    _truthy("moe_paged_stash", "saved activations are bounded already"),
    _truthy("cpu_offloading", "it is not tested"),
    Refusal(
        "cuda_graph_modules",
        _graph_refused,
        "attn, mlp, mamba, moe_router or moe_preprocess, or whole layers with cuda_graph_impl local",
        f"list only these in --cuda-graph-modules, capture with local or full_iteration, {OTHER}",
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["moe"]},
        got=lambda s: f"{sorted(_graph_modules(s))} with cuda_graph_impl {s.cuda_graph_impl!r}",
    ),
    # --- other implementations of the same layer
    Refusal(
        "transformer_impl",
        lambda s: s.transformer_impl == "inference_optimized",
        "local or transformer_engine",
        f"drop inference_optimized, {OTHER}",
        {"transformer_impl": "inference_optimized"},
    ),
    _truthy("moe_enable_deepep", "it belongs to the flex dispatcher"),
    Refusal(
        "moe_flex_dispatcher_backend",
        lambda s: (s.moe_flex_dispatcher_backend or "deepep") != "deepep",
        "it unset (it belongs to the flex dispatcher)",
        "leave it out, or use --moe-token-dispatcher-type flex",
        {"moe_flex_dispatcher_backend": "hybridep"},
    ),
    Refusal(
        "moe_megakernel_backend",
        lambda s: s.moe_megakernel_backend,
        f"it unset (Megatron-Core's own option and the dispatcher {NAME!r} both replace the experts)",
        f"choose one: drop --moe-megakernel-backend or --moe-token-dispatcher-type {NAME}",
        {"moe_megakernel_backend": "mok"},
    ),
    # --- known from the arguments only
    _truthy("use_megatron_fsdp", "it is not tested"),
    _truthy("use_torch_fsdp2", "it is not tested"),
    _truthy("fake_process_group", "ranks exchange tokens"),
    _truthy("moe_use_upcycling", "upcycle with another dispatcher, then continue with mok"),
)


def on_gpu() -> bool:
    """True where the kernels will run: what depends on their limits is judged only then."""
    import torch

    backend = current().backend
    return backend == "cuda" or (backend == "auto" and torch.cuda.is_available())


def problems(source: Any) -> list[Problem]:
    """All offenders in a TransformerConfig or in a namespace of arguments; empty where it is no MoE model."""
    settings = Settings(source)
    if not settings.num_moe_experts:
        return []
    gpu = on_gpu()
    found = [row.problem(settings) for row in REFUSALS if (gpu or not row.on_gpu_only) and row.when(settings)]
    if gpu:
        found += kernel_problems(
            {
                "hidden": "moe_latent_size" if settings.moe_latent_size else "hidden_size",
                "ffn": "moe_ffn_hidden_size",
                "top_k": "moe_router_topk",
                "local_experts": "num_moe_experts / expert_model_parallel_size",
            },
            hidden=settings.moe_latent_size or settings.hidden_size,
            ffn=settings.moe_ffn_hidden_size or settings.ffn_hidden_size or 4 * settings.hidden_size,
            top_k=settings.moe_router_topk,
            local_experts=settings.num_moe_experts // (settings.expert_model_parallel_size or 1),
        )
    return found


def validate(source: Any) -> None:
    """ConfigError with every offender if `source` chooses mok and cannot have it."""
    if getattr(source, "moe_token_dispatcher_type", None) == NAME and (found := problems(source)):
        raise ConfigError(found, where=f"moe_token_dispatcher_type={NAME!r}")


def markdown() -> str:
    """The table for the user guide."""
    lines = ["| setting | needs | remedy |", "|---|---|---|"]
    lines += [f"| `{row.field}` | {row.need} | {row.remedy} |" for row in REFUSALS]
    return "\n".join(lines) + "\n"
