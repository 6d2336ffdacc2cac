# Sourced by the launch scripts: the training command that all of them share. Paths are relative to the repository.
#
#   MODEL      a name of configs/models         DATA      prefix of a Megatron indexed dataset
#   TOKENIZER  folder of a Hugging Face tokenizer
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT: this job, as torchrun wants it (one node by default)
#   LAUNCH     instead of torchrun; `LAUNCH=echo` prints the command
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# launch GPUS_PER_NODE EP MODULE_AND_FLAGS...: the dispatcher's flags, then the user's own
launch() {
    local gpus=$1 ep=$2
    shift 2
    local module=()
    if [[ $1 == -m ]]; then
        module=("$1" "$2")
        shift 2
    fi
    local model
    read -ra model <<<"$(python3 tools/model_flags.py "$MODEL")"
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
    exec ${LAUNCH:-torchrun} --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" --nproc-per-node "$gpus" \
        --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-6000}" \
        "${module[@]}" examples/pretrain.py \
        "${model[@]}" \
        --tensor-model-parallel-size 1 --pipeline-model-parallel-size "${PP:-1}" \
        --expert-model-parallel-size "$ep" --expert-tensor-parallel-size 1 \
        --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
        --bf16 --transformer-impl transformer_engine --moe-grouped-gemm \
        --seq-length 4096 --micro-batch-size 1 --global-batch-size "${GLOBAL_BATCH:-1024}" \
        --train-iters "${STEPS:-1000}" --log-interval 1 --eval-iters 0 --eval-interval 1000 \
        --lr 2.2e-4 --min-lr 2.2e-5 --lr-decay-style cosine --lr-warmup-iters 100 --weight-decay 0.1 --clip-grad 1.0 \
        --adam-beta2 0.95 --hidden-dropout 0 --attention-dropout 0 --no-create-attention-mask-in-dataloader \
        --data-path "$DATA" --split 99,1,0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER" \
        "$@"
}
