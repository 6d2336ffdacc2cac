"""Pretrain a GPT-style model with Megatron-Core's own training loop, on GPUs or on a CPU.

    torchrun --nproc-per-node 8 -m megatron_mok.launch examples/pretrain.py \\
        MEGATRON_FLAGS --moe-token-dispatcher-type mok

Nothing below knows the dispatcher: the launcher registers it; without the launcher this is a stock run.
Three flags are added: --metrics-file, a JSON line for each step with its loss, gradient norm and time;
--sdpa, torch's core attention for MLA with Transformer Engine's layers too; --deterministic-sdpa, the same
with gradients that repeat bit for bit.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from attention import serve_mla
from megatron.core import parallel_state
from megatron.core.datasets import utils as dataset_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import get_args, get_tokenizer, pretrain, training
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import (
    get_blend_and_blend_per_split,
    is_first_or_last_pipeline_stage,
    is_last_rank,
    print_rank_0,
)

from megatron_mok.errors import ConfigError, Problem

# --- model --------------------------------------------------------------------------------------------------


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """The stage of the model that this rank holds, as the command line describes it."""
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    asked = "--deterministic-sdpa" if args.deterministic_sdpa else "--sdpa" if args.sdpa else None
    if asked and not config.multi_latent_attention:
        remedy = "leave it out, or say --multi-latent-attention"
        raise ConfigError([Problem(asked, "a model without MLA", "MLA, which it serves alone", remedy)])
    transformer_engine = args.transformer_impl == "transformer_engine"
    spec_arguments = dict(
        use_transformer_engine=transformer_engine,
        normalization=args.normalization,
        qk_l2_norm=args.qk_l2_norm,
        vp_stage=vp_stage,
    )
    block_spec = get_gpt_decoder_block_spec(config, **spec_arguments)
    mtp_spec = None
    if args.mtp_num_layers:
        layer_spec = get_gpt_decoder_layer_specs(config, **spec_arguments)[-1]
        mtp_spec = get_gpt_mtp_block_spec(
            config, layer_spec, use_transformer_engine=transformer_engine, vp_stage=vp_stage
        )
    if serve_mla(config, block_spec, mtp_spec, bool(asked), args.deterministic_sdpa):
        why = asked or "Megatron's local DotProductAttention takes one head size"
        print_rank_0(f"attention: MLA on torch's scaled_dot_product_attention (examples/attention.py): {why}")
    return GPTModel(
        config=config,
        transformer_layer_spec=block_spec,
        mtp_block_spec=mtp_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )


# --- data ---------------------------------------------------------------------------------------------------


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Train, validation and test sets from --data-path (or --mock-data), on the stages that need tokens."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    needed = functools.partial(is_first_or_last_pipeline_stage, vp_stage)
    return BlendedMegatronDatasetBuilder(kind, num_samples, needed, config).build()


# Every tensor-parallel rank reads its own copy: no broadcast of batches.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]

BATCH = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def get_batch(samples: Iterator[dict], vp_stage: int | None) -> list[Any]:
    """The next micro-batch on this rank's device, [B, S/CP] each; None for every entry on a middle stage."""
    if not is_first_or_last_pipeline_stage(vp_stage):
        return [None] * len(BATCH)
    batch = {
        key: value.to(torch.cuda.current_device(), non_blocking=True) for key, value in next(samples).items()
    }
    if parallel_state.get_context_parallel_world_size() > 1:
        batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False)
    return [batch.get(key) for key in BATCH]


# --- step ---------------------------------------------------------------------------------------------------


def forward_step(samples: Iterator[dict], model: Any) -> tuple[torch.Tensor, Callable]:
    """Token losses of one micro-batch, and the function that sums them up."""
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    tokens, labels, loss_mask, attention_mask, position_ids = get_batch(samples, vp_stage)
    losses = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
    return losses, functools.partial(sum_losses, loss_mask)


def sum_losses(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """(loss summed over the micro-batch's tokens, their number, what Megatron is to report)."""
    mask = loss_mask.reshape(-1).float()
    loss = (losses.reshape(-1).float() * mask).sum()
    tokens = mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


# --- metrics ------------------------------------------------------------------------------------------------


def record_metrics(path: Path) -> None:
    """Write a JSON line to path after each step: step, loss, grad_norm, tokens_per_s (all GPUs), step_ms.

    Megatron prints its losses rounded; comparisons of runs need all digits. The last rank writes.
    OSError, before any training, where path's folder cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    train_step, training_log = training.train_step, training.training_log
    parameters = inspect.signature(training_log)
    step_ms = 0.0

    @functools.wraps(train_step)
    def timed_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal step_ms
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = train_step(*args, **kwargs)
        torch.cuda.synchronize()
        step_ms = (time.perf_counter() - start) * 1e3
        return result

    @functools.wraps(training_log)
    def log(*args: Any, **kwargs: Any) -> Any:
        values = parameters.bind(*args, **kwargs).arguments
        # Written before Megatron logs: whoever sees its line finds the numbers here.
        loss = {key: float(value) for key, value in values["loss_dict"].items()}
        if is_last_rank():
            batch = get_args().global_batch_size * get_args().seq_length
            record = dict(
                step=values["iteration"],
                loss=loss.pop("lm loss", None),
                grad_norm=None if values["grad_norm"] is None else float(values["grad_norm"]),
                tokens_per_s=batch / step_ms * 1e3,
                step_ms=step_ms,
                **loss,
            )
            with path.open("a") as file:
                file.write(json.dumps(record) + "\n")
        return training_log(*args, **kwargs)

    training.train_step, training.training_log = timed_step, log


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    parser.add_argument("--metrics-file", type=Path, help="append a JSON line for each step to this file")
    parser.add_argument("--sdpa", action="store_true", help="MLA on torch's attention in any implementation")
    parser.add_argument(
        "--deterministic-sdpa", action="store_true", help="--sdpa whose gradients repeat bit for bit; slower"
    )
    return parser


def main() -> None:
    if not torch.cuda.is_available():
        from megatron_mok.testing import cpu

        cpu.install(training=True)
    # A wheel holds the compiled helper but no Makefile, and make's failure would end the process.
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp"):
        dataset_utils.compile_helpers = lambda: None
    args: Namespace = parse_and_validate_args(extra_args_provider=add_arguments)
    if args.metrics_file:
        record_metrics(args.metrics_file)
    pretrain(
        pretrain_cfg_container_from_args(args),
        datasets_provider,
        model_provider=model_provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
    )


if __name__ == "__main__":
    main()
