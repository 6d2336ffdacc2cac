#!/usr/bin/env bash
# What needs several GPUs of one host, one process a GPU, in under 9 minutes:
#   tests   four ranks in processes: rendezvous, forward, backward, errors, a rank that stays away
#   layer   one layer on 2, 4 and 8 GPUs: mok beside NCCL's all-to-all with grouped_mm, the same with routing inside each
#           rank (what that saves is communication that did not hide), forward with other numbers of comm SMs
#   train   50 steps of the example at EP = GPUs, mok and alltoall, losses and bitwise repetition
# PARTS picks parts, SHAPES and STEPS are smaller for a quick look. NVLink multicast stays off.
# DeepEP, HybridEP and LigerMoE are not measured, and no rank is killed. DRY=1 runs layer and train on the CPU, to see
# that the commands hold.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${PARTS:=tests layer train}" "${SHAPES:=A B C D}" "${STEPS:=50}" "${PYTHON:=python3}" "${DRY:=}"
: "${RESULTS:=benchmarks/results}" "${REPORTS:=benchmarks/reports}" "${COMMIT:=$(git rev-parse HEAD 2>/dev/null || true)}"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1

if [ -n "$DRY" ]; then
    gpus=2 name=dry-x2 SHAPES=32,64,32,8,2 layer=(--reps 3) train=(--config tiny)
else
    gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
    name=h200-x$gpus layer=(--comm-sms 2 4 8 16) train=(--config benchmarks/h200_train_ab.json)
    [ "$gpus" -ge 2 ] || { echo "multi_gpu.sh: got $gpus GPUs, need 2 or more; DRY=1 runs it on the CPU" >&2; exit 2; }
fi
mkdir -p "$RESULTS" "$REPORTS"
read -ra shapes <<<"$SHAPES"

for part in $PARTS; do
    echo "== $part"
    case $part in
    tests) [ -n "$DRY" ] || timeout 180 "$PYTHON" -m pytest -q tests/gpu/test_processes.py ;;
    layer)
        rm -f "$RESULTS/$name-layer.json"
        for ranks in 2 4 8; do
            [ "$ranks" -le "$gpus" ] || continue
            timeout 150 "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
                -m megatron_mok.bench.distributed --shape "${shapes[@]}" "${layer[@]}" --commit "$COMMIT" \
                --json "$RESULTS/$name-layer.json"
        done ;;
    train)
        "$PYTHON" -m megatron_mok.cli ab --baseline alltoall --steps "$STEPS" "${train[@]}" \
            --runs "runs/$name" --json "$RESULTS/$name-train-ab.json" --plot "$REPORTS/$name-train-ab.png" --repeat -- --nproc-per-node "$gpus" ;;
    *) echo "multi_gpu.sh: PARTS: got $part, need tests, layer or train" >&2; exit 2 ;;
    esac
done
