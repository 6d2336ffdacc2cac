#!/usr/bin/env bash
# An NVL72 rack: 16 of its 18 trays with 4 GPUs each, the experts of each layer spread over 64 GPUs, mok.
# Run it once on each tray, with NODE_RANK 0 to 15 and MASTER_ADDR of the first. The expert-parallel group must lie in
# one rack: for more racks raise NNODES (16 a rack) and PP, in whole racks. Arguments are appended.
#   NODE_RANK=0 MASTER_ADDR=tray0 DATA=... TOKENIZER=... examples/launch_nvl72_mok.sh [MEGATRON_FLAGS]
# The kernels for Blackwell do not exist yet: until then this ends with the error that says so.
source "$(dirname "$0")/launch_common.sh"
MODEL=${MODEL:-qwen3-235b-a22b}
NNODES=${NNODES:-16}
launch 4 64 -m megatron_mok.launch --moe-token-dispatcher-type mok "$@"
