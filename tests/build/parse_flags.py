"""Runs in a process of its own: has Megatron parse and validate the command lines on standard input.

Input: JSON {name: {"world": processes, "argv": [...]}}. Output: JSON {name: {field: value}} of the arguments
and of the configuration that Megatron builds from them; {name: {"error": text}} where Megatron refuses.
"""

import json
import os
import sys

import megatron_mok
from megatron_mok.testing import cpu

megatron_mok.register()
cpu.install(training=True)

from megatron.training import arguments  # noqa: E402
from megatron.training.argument_utils import core_transformer_config_from_args  # noqa: E402

ARGUMENTS = ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "world_size", "data_parallel_size")
CONFIG = (
    *(
        "num_layers",
        "hidden_size",
        "moe_ffn_hidden_size",
        "num_moe_experts",
        "moe_router_topk",
        "moe_layer_freq",
    ),
    *("expert_model_parallel_size", "multi_latent_attention", "moe_shared_expert_intermediate_size"),
)


def parse(world: int, argv: list[str]) -> dict:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world))
    sys.argv = ["pretrain.py", *argv]
    try:
        args = arguments.parse_args()
        args.apply_rope_fusion = args.moe_permute_fusion = False  # they ask for Transformer Engine
        arguments.validate_args(args)
        config = core_transformer_config_from_args(args)
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {name: getattr(args, name) for name in ARGUMENTS} | {
        name: getattr(config, name) for name in CONFIG
    }


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, sys.stderr  # Megatron prints
    json.dump({name: parse(**case) for name, case in asked.items()}, out)
