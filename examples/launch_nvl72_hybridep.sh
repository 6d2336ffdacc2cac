#!/usr/bin/env bash
# The same training as launch_nvl72_mok.sh with HybridEP (package deep_ep, branch hybrid-ep), for comparison.
#   NODE_RANK=0 MASTER_ADDR=tray0 DATA=... TOKENIZER=... examples/launch_nvl72_hybridep.sh [MEGATRON_FLAGS]
source "$(dirname "$0")/launch_common.sh"
MODEL=${MODEL:-qwen3-235b-a22b}
NNODES=${NNODES:-16}
export USE_MNNVL=1 NVLINK_DOMAIN_SIZE=72 NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN=64
launch 4 64 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep \
    --moe-router-dtype fp32 --moe-permute-fusion "$@"
