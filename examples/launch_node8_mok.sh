#!/usr/bin/env bash
# One node with 8 GPUs, the experts of each layer spread over all of them, mok. Arguments are appended.
#   DATA=/data/text_document TOKENIZER=/data/tokenizer examples/launch_node8_mok.sh [MEGATRON_FLAGS]
source "$(dirname "$0")/launch_common.sh"
MODEL=${MODEL:-qwen3-30b-a3b}
launch 8 8 -m megatron_mok.launch --moe-token-dispatcher-type mok "$@"
