"""Runs inside a rank: tiny DeepSeek-V3-style models and a training loop with comparable numbers.

On a GPU (tests/gpu) where there is one, else on the CPU with stand-ins for what Megatron asks of CUDA.

Legend: S sequence length, B micro-batch, H hidden size, E experts, V vocabulary.
"""

from __future__ import annotations

import datetime
import itertools
import os
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import megatron_mok
import megatron_mok.runtime
from megatron_mok.testing import cpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    cpu.install()
megatron_mok.register()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import MLATransformerConfig, TransformerConfig  # noqa: E402
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker  # noqa: E402

from examples.attention import serve_mla  # noqa: E402

S, B, V = 32, 2, 128
GROUP_TIMEOUT_S = 60

MODEL: dict[str, Any] = dict(
    num_layers=3,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=4,
    add_bias_linear=False,
    gated_linear_unit=True,
    activation_func=torch.nn.functional.silu,
    normalization="RMSNorm",
    hidden_dropout=0.0,
    attention_dropout=0.0,
    use_cpu_initialization=True,
    bias_activation_fusion=False,
    bias_dropout_fusion=False,
    masked_softmax_fusion=False,
    gradient_accumulation_fusion=False,
    apply_rope_fusion=False,
    qk_layernorm=True,
    # mixture of experts
    num_moe_experts=16,
    moe_ffn_hidden_size=32,
    moe_layer_freq=[0, 1, 1],
    moe_router_topk=4,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=1e-3,
    moe_router_num_groups=4,
    moe_router_group_topk=2,
    moe_router_topk_scaling_factor=2.0,
    moe_router_load_balancing_type="seq_aux_loss",
    moe_aux_loss_coeff=1e-2,
    moe_router_dtype="fp32",
    moe_shared_expert_intermediate_size=32,
)
MLA: dict[str, Any] = dict(
    q_lora_rank=32,
    kv_lora_rank=16,
    qk_head_dim=16,
    qk_pos_emb_head_dim=8,
    v_head_dim=16,
    rope_type="rope",
)

_layout: tuple[int | None, ...] | None = None
_generation = itertools.count()
_store: dist.Store | None = None
_groups: dict[tuple[bool, tuple[int, ...]], Any] = {}
_new_group = parallel_state.create_group


def _group_of(ranks: list[int], *args: Any, group_desc: str = "", **kwargs: Any) -> Any:
    """Megatron's create_group, with one group per set of ranks for all its names, in every layout.

    A layout has 24 names a rank, and each gloo group runs three threads, one of which wakes up a hundred
    times a second. The experts' groups stay apart from the others: a gradient's all-reduce must not queue up
    with dispatch.
    """
    key = (len(ranks) > 1 and group_desc.startswith("EXPERT"), tuple(ranks))
    if key not in _groups:
        _groups[key] = _new_group(ranks, *args, group_desc=group_desc, **kwargs)
    return _groups[key]


parallel_state.create_group = _group_of


def layout(ep: int = 4, pp: int = 1, vpp: int | None = None, tp: int = 1, cp: int = 1) -> None:
    """Megatron's process groups for this layout (kept if they are already there), and mok's defaults."""
    global _store
    megatron_mok.configure(megatron_mok.MokConfig())
    megatron_mok.runtime.release()  # the next case has other token counts
    if _layout == (ep, pp, vpp, tp, cp):
        return
    if not dist.is_initialized():
        timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
        if _store is None:
            _store, _, _ = next(iter(dist.rendezvous("env://", timeout=timeout)))
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.PrefixStore(f"world{next(_generation)}", _store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    _initialise_groups(ep, pp, vpp, tp, cp)


def _initialise_groups(ep: int, pp: int = 1, vpp: int | None = None, tp: int = 1, cp: int = 1) -> None:
    global _layout
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=1,
        create_gloo_process_groups=False,  # they all are
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    _layout = (ep, pp, vpp, tp, cp)


def layouts_in_turn(
    sizes: list[int], release: bool, make: Callable[[], Trainer], steps: int
) -> dict[str, list[Any]]:
    """A new model for each of these expert-parallel sizes in one process; groups as no other case has them.

    Between two of them Megatron's groups are destroyed and made anew, with megatron_mok.release() before or
    without. Losses and norms of each model, and the bytes of workspace that were open after it.
    """
    curves, workspace = [], []
    for ep in sizes:
        _groups.clear()
        _initialise_groups(ep)
        curves.append(make().steps(steps))
        workspace.append(megatron_mok.runtime.open_workspace_bytes())
        if release:
            megatron_mok.release()
    megatron_mok.release()
    workspace.append(megatron_mok.runtime.open_workspace_bytes())
    return {"curves": curves, "workspace": workspace}


def leave() -> None:
    """Give up the process groups: gloo closes the connections of one in which a wait has timed out."""
    global _layout
    parallel_state.destroy_model_parallel()
    _groups.clear()
    dist.destroy_process_group()
    _layout = None


def make_config(
    dispatcher: str, *, bf16: bool = False, mla: bool = True, **changes: Any
) -> TransformerConfig:
    dtype = torch.bfloat16 if bf16 else torch.float32
    kind = MLATransformerConfig if mla else TransformerConfig
    settings: dict[str, Any] = dict(
        MODEL,
        moe_token_dispatcher_type=dispatcher,
        multi_latent_attention=mla,
        bf16=bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # With two stages and virtual stages two tensors travel between one pair of ranks: never in one batch.
        batch_p2p_comm=False,
        overlap_p2p_comm=parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None,
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=parallel_state.get_virtual_pipeline_model_parallel_world_size(),
    )
    if mla:
        settings.update(MLA)
    settings.update(changes)
    return kind(**settings)


def build(config: TransformerConfig, seed: int = 1) -> list[GPTModel]:
    """Model chunks of this rank; weights depend on the seed and the parameter's global name only."""
    chunks = config.virtual_pipeline_model_parallel_size
    models = []
    for stage in range(chunks or 1):
        vp_stage = stage if chunks else None
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        mtp = None
        if config.mtp_num_layers:
            mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=vp_stage)
        serve_mla(config, spec, mtp)
        model = GPTModel(
            config,
            spec,
            V,
            S,
            pre_process=first,
            post_process=last,
            mtp_block_spec=mtp,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        ).to(DEVICE)
        if config.bf16:
            model = model.bfloat16()
        initialise(model, config, seed)
        models.append(model)
    return models


def global_name(name: str, model: GPTModel, config: TransformerConfig) -> str:
    """Name that is the same at every EP and PP layout."""
    parts = name.split(".")
    if "layers" in parts and "mtp" not in parts:
        at = parts.index("layers") + 1
        parts[at] = str(model.decoder.layers[int(parts[at])].layer_number)
    grouped = "experts" in parts and parts[-1].startswith("weight") and parts[-1][6:].isdigit()
    if "local_experts" in parts or grouped:
        ep_rank = parallel_state.get_expert_model_parallel_rank()
        first = ep_rank * config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
        if grouped:
            parts[-1] = f"weight{first + int(parts[-1][6:])}"
        else:
            at = parts.index("local_experts") + 1
            parts[at] = str(first + int(parts[at]))
    return ".".join(parts)


def initialise(model: GPTModel, config: TransformerConfig, seed: int) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue
            generator = torch.Generator().manual_seed(
                seed + zlib.crc32(global_name(name, model, config).encode())
            )
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)


class Batches:
    """Endless micro-batches from a Markov chain that a model can learn; a stream for each data-parallel rank.

    The length of the sequences, S, can be changed between two of them.

    padded: most tokens at each sequence's end that a mask calls padding, as Megatron means it: True there,
    which takes them out of the router's losses; they are routed all the same.
    """

    def __init__(self, seed: int = 7, stream: int | None = None, padded: int = 0) -> None:
        stream = parallel_state.get_data_parallel_rank() if stream is None else stream
        self.generator = torch.Generator().manual_seed(seed * 1000 + stream)
        chain = torch.Generator().manual_seed(seed)
        self.next_token = torch.randint(V, (V, 4), generator=chain)
        self.length, self.padded = S, padded

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        tokens = torch.empty(B, self.length + 1, dtype=torch.long)
        tokens[:, 0] = torch.randint(V, (B,), generator=self.generator)
        choice = torch.randint(4, (B, self.length), generator=self.generator)
        for s in range(self.length):
            tokens[:, s + 1] = self.next_token[tokens[:, s], choice[:, s]]
        batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
        if self.padded:
            valid = self.length - torch.randint(self.padded + 1, (B, 1), generator=self.generator)
            batch["padding_mask"] = torch.arange(self.length) >= valid
        return {name: value.contiguous().to(DEVICE) for name, value in batch.items()}


def forward_step(batches: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    positions = torch.arange(batch["tokens"].shape[1], device=DEVICE).expand_as(batch["tokens"])
    mask = {name: batch[name] for name in batch.keys() & {"padding_mask"}}
    losses = model(batch["tokens"], positions, None, labels=batch["labels"], **mask)

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = output.float().mean()
        return mean, {"loss": mean.detach().clone()}  # the schedule divides `mean` in place

    return losses, loss


def wrap(models: list[GPTModel], config: TransformerConfig, **ddp: Any) -> list[DistributedDataParallel]:
    ddp_config = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True, "bucket_size": 20000, **ddp})
    wrapped = [
        DistributedDataParallel(config, ddp_config, model, disable_bucketing=i > 0)
        for i, model in enumerate(models)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    if ddp_config.overlap_grad_reduce:
        no_sync = [model.no_sync for model in wrapped]
        config.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync
    for model in wrapped:
        model.broadcast_params()
    return wrapped


class Trainer:
    """A model with Megatron's DDP and optimizer, advanced step by step."""

    def __init__(
        self,
        dispatcher: str,
        *,
        seed: int = 1,
        bf16: bool = False,
        micro_batches: int = 1,
        lr: float = 1e-3,
        clip_grad: float = 1.0,
        ddp: dict[str, Any] | None = None,
        frozen: str = "",
        padded: int = 0,
        **changes: Any,
    ) -> None:
        """`frozen`: a part of the names of parameters that are not trained. `padded`: see Batches."""
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        destroy_moe_metrics_tracker()  # sized by the first model that records
        self.micro_batches = micro_batches
        self.config = make_config(dispatcher, bf16=bf16, **changes)
        self.config.grad_scale_func = None
        ddp = ddp or {}
        models = build(self.config, seed)
        for name, parameter in itertools.chain(*(model.named_parameters() for model in models)):
            parameter.requires_grad_(not frozen or frozen not in name)
        self.models = wrap(models, self.config, **ddp)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=lr,
                weight_decay=0.01,
                bf16=bf16,
                params_dtype=self.config.params_dtype,
                clip_grad=clip_grad,
                use_distributed_optimizer=ddp.get("use_distributed_optimizer", False),
                overlap_param_gather=ddp.get("overlap_param_gather", False),
            ),
            self.models,
            use_gloo_process_groups=False,
        )
        if ddp.get("overlap_param_gather"):
            sync = [model.start_param_sync for model in self.models]
            self.config.param_sync_func = sync[0] if len(sync) == 1 else sync
        self.batches: list[Any] = [Batches(padded=padded) for _ in self.models]
        self.run = get_forward_backward_func()

    def gradients(self) -> float:
        """Forward and backward over one global batch; the loss averaged over data-parallel ranks."""
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self.run(
            forward_step_func=forward_step,
            data_iterator=self.batches if len(self.models) > 1 else self.batches[0],
            model=self.models if len(self.models) > 1 else self.models[0],
            num_microbatches=self.micro_batches,
            seq_length=self.batches[0].length,  # what pipeline stages send each other
            micro_batch_size=B,
            forward_only=False,
        )
        mine = [sum(float(loss["loss"]) for loss in losses), float(len(losses))]
        total = torch.tensor(mine, device=DEVICE)
        dist.all_reduce(total)
        return float(total[0] / total[1])

    def step(self) -> tuple[float, float]:
        """(loss, gradient norm) of one training step."""
        loss = self.gradients()
        _, norm, _ = self.optimizer.step()
        return loss, float(norm)

    def steps(self, count: int) -> dict[str, list[float]]:
        pairs = [self.step() for _ in range(count)]
        return {"losses": [loss for loss, _ in pairs], "norms": [norm for _, norm in pairs]}


def train(
    dispatchers: list[str],
    *,
    steps: int,
    ep: int = 4,
    pp: int = 1,
    vpp: int | None = None,
    mok: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, dict[str, list[float]]]:
    """The same training once per dispatcher; `mok` changes fields of MokConfig."""
    layout(ep, pp, vpp)
    megatron_mok.configure(megatron_mok.MokConfig(**(mok or {})))
    results = {}
    for dispatcher in dispatchers:
        results[dispatcher] = Trainer(dispatcher, **options).steps(steps)
    return results
