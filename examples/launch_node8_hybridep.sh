#!/usr/bin/env bash
# The same training as launch_node8_mok.sh with HybridEP (package deep_ep, branch hybrid-ep), for comparison.
#   DATA=/data/text_document TOKENIZER=/data/tokenizer examples/launch_node8_hybridep.sh [MEGATRON_FLAGS]
source "$(dirname "$0")/launch_common.sh"
MODEL=${MODEL:-qwen3-30b-a3b}
export USE_MNNVL=0 NVLINK_DOMAIN_SIZE=8 NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN=8
launch 8 8 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep \
    --moe-router-dtype fp32 --moe-permute-fusion "$@"
