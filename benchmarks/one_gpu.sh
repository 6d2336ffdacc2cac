#!/usr/bin/env bash
# Everything that is measured and tested on one GPU; the library is built before (`make build`).
#   tests    make gpu-test, into $RESULTS/gpu-tests.json; complete where megatron-core and Transformer Engine are on
#            PYTHONPATH, else their tests are skipped with that reason                                     about 400 s
#   layer    the layer benchmark of README, into $RESULTS/h200-layer.json                                        100 s
#   whole    Megatron's whole MoE layer at A to D, alltoall with TEGroupedMLP against mok                         60 s
#   train    200 steps at size: alltoall with TEGroupedMLP against mok, and alltoall in another order            320 s
#   local    20 steps of the same in Megatron's local implementation, SequentialMLP against mok                  120 s
#   profile  where the GPU's time of steps 6 to 8 of that training goes, both sides                              120 s
#   long     2,000 steps without growth of memory; the same seed twice; checkpoints to the CPU and back          200 s
#   multi    multi_gpu.sh with one GPU, where nothing crosses NVLink                                             180 s
# PARTS picks parts. One that fails or is late does not stop the others; the exit code is then 1, and a table at the end
# says which.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${PARTS:=tests layer whole train local profile long multi}" "${PYTHON:=python3}"
: "${RESULTS:=benchmarks/results}" "${REPORTS:=benchmarks/reports}" "${RUNS:=runs/one-gpu}"
: "${COMMIT:=$(git describe --always --dirty --abbrev=40 2>/dev/null || true)}"
export PYTHON RESULTS REPORTS COMMIT
. benchmarks/parts.sh
mkdir -p "$RESULTS" "$REPORTS" "$RUNS"

layer() { "$PYTHON" -m megatron_mok.cli bench --layer --peers none --commit "$COMMIT" --json "$RESULTS/h200-layer.json" "$@"; }
layers() {
    local code=0
    rm -f "$RESULTS/h200-layer.json"
    layer --shape C --ranks 2 4 || code=1
    layer --shape D B A || code=1
    return "$code"
}
export -f layer layers
train=(env "RUNS=$RUNS/train" TIMEOUT=200 bash benchmarks/h200_train_ab.sh)

for part in $PARTS; do
    case $part in
    tests) run tests 560 "$PYTHON" tools/gpu_test.py --output "$RESULTS/gpu-tests.json" -q ;;
    layer) run layer 180 bash -c layers ;;
    whole) run whole 180 "$PYTHON" benchmarks/whole_layer.py --shape A B C D --commit "$COMMIT" \
        --json "$RESULTS/h200-whole-layer.json" ;;
    train) run train 480 env PARTS="te noise" STEPS=200 "${train[@]}" ;;
    local) run local 300 env PARTS=sequential SEQUENTIAL_STEPS=20 "${train[@]}" ;;
    profile) run profile 300 env PARTS=profile "${train[@]}" ;;
    long) run long 570 "$PYTHON" benchmarks/h200_long_run.py --json "$RESULTS/h200-long-run.json" --runs "$RUNS/long" \
        --commit "$COMMIT" ;;
    multi) run multi 530 env GPUS=1 RUNS="$RUNS/multi" STEPS=10 PARTS="layer bandwidth train killed report" \
        SHAPES="A C" bash benchmarks/multi_gpu.sh ;;
    *) echo "one_gpu.sh: PARTS: got $part, need some of tests layer whole train local profile long multi" >&2 && exit 2 ;;
    esac
done
printf '%-8s %-40s %6s s\n' "${outcomes[@]}"
exit "$status"
