#!/usr/bin/env bash
# One node with 8 GPUs, the experts of each layer spread over all of them, mok. Arguments are appended.
#   DATA=/data/text_document TOKENIZER=/data/tokenizer examples/launch_node8_mok.sh [MEGATRON_FLAGS]
source "$(dirname "$0")/launch_common.sh"
MODEL=${MODEL:-qwen3-30b-a3b}
# Gradients and parameters travel by NCCL meanwhile: of the 132 SMs of an H100 or H200 it gets 16 (docs/user-guide.md).
export NCCL_MAX_CTAS=${NCCL_MAX_CTAS:-16}
launch 8 8 -m megatron_mok.launch --moe-token-dispatcher-type mok --mok-num-sms $((132 - NCCL_MAX_CTAS)) "$@"
