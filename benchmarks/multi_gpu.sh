#!/usr/bin/env bash
# What needs several GPUs of one host, one process a GPU. A call ends in under 9 minutes whatever happens; all parts
# together may take longer, so they are two calls, and a third where a peer is installed:
#   benchmarks/multi_gpu.sh                              tests layer bandwidth report
#   PARTS="train killed report" benchmarks/multi_gpu.sh
#   PARTS="peers report" benchmarks/multi_gpu.sh
# What the parts are:
#   tests      2, 4 and 8 ranks in processes: rendezvous, forward, backward, errors, ranks that stay away or are killed
#   layer      one layer on 1, 2, 4 and 8 GPUs: mok, NCCL's all-to-all with grouped_mm, DeepEP and HybridEP where they
#              are installed (who is absent is said), and the same with routing inside each rank: what that saves is
#              communication that did not hide
#   bandwidth  layers that transfers bound: GB/s of whole passes by bytes a row, tokens and SMs that move rows
#   train      50 steps of h200_train_ab.json at EP = GPUs, mok and alltoall, with attention that repeats its bits
#   killed     the same with mok, one worker killed half-way; its losses must be those of `train`, bit for bit
#   peers      `train` with DeepEP and HybridEP in Megatron's flex dispatcher, where they are installed
#   report     a page from what all of them left, in earlier calls with `report` too
# A part that fails or is late does not stop the others; the exit code is then 1. PARTS picks parts, refused where their
# limits do not fit into one call; SHAPES, STEPS and GPUS (a smaller number of them) are for a quick look. GPUS=1 tries
# the script on one GPU, where nothing crosses NVLink; DRY=1 all of it on the CPU, in 2 minutes on two idle cores.
# NVLink multicast stays off.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${DRY:=}" "${PARTS:=tests layer bandwidth ${DRY:+train killed peers} report}" "${SHAPES:=A B C D}" "${STEPS:=50}"
: "${PYTHON:=python3}" "${GPUS:=}" "${COMMIT:=$(git describe --always --dirty --abbrev=40 2>/dev/null || true)}"
: "${RESULTS:=benchmarks/results}" "${REPORTS:=benchmarks/reports}" "${RUNS:=runs}"
TOTAL_S=490 GRACE_S=40 # torchrun gives its workers 30 s to end
. benchmarks/parts.sh
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1

if [ -n "$DRY" ]; then
    export CUDA_VISIBLE_DEVICES=
    GPUS=2 STEPS=4 SHAPES=24,64,32,8,2 name=dry-x2
    tests=(tests/dist/test_ends.py -k killed) sizes=2 layer=(--reps 3)
    bandwidth=(--hidden 64 --tokens 16 64 --comm-sms 0 4 --reps 3)
    train=(--config tiny -- --deterministic-sdpa --seq-length 64 --global-batch-size 2 --num-layers 2 --moe-layer-freq '([0]*1+[1]*1)')
else
    seen=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())') || exit 2
    if [[ ! "${GPUS:-$seen}" =~ ^[0-9]+$ ]] || [ "$GPUS" = 0 ]; then
        echo "multi_gpu.sh: GPUS: got $GPUS, need a number from 1 to $seen, the GPUs here" >&2
        exit 2
    fi
    if [ "${GPUS:-$seen}" -gt "$seen" ] || { [ -z "$GPUS" ] && [ "$seen" -lt 2 ]; }; then
        echo "multi_gpu.sh: got $seen GPUs, need ${GPUS:-2} or more; DRY=1 runs it on the CPU" >&2
        exit 2
    fi
    : "${GPUS:=$seen}"
    name=h200-x$GPUS tests=(tests/gpu/test_processes.py) sizes="1 2 4 8" layer=() bandwidth=()
    train=(--config benchmarks/h200_train_ab.json -- --num-experts 32 --deterministic-sdpa --no-rope-fusion
        --seq-length 4096 --micro-batch-size 2 --global-batch-size $((2 * GPUS)) --lr 3e-4 --min-lr 3e-5)
    if "$PYTHON" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("transformer_engine"))'; then
        PYTHONPATH=examples/without_apex:$PYTHONPATH
        train+=(--moe-permute-fusion)
    fi
fi
train+=(--nproc-per-node "$GPUS")

# A training starts and ends in more than a minute, and `train` and each of the peers are two.
declare -A limits=([tests]=140 [layer]=0 [bandwidth]=40 [train]=200 [killed]=100 [peers]=400 [report]=0) layer_limits
for ranks in $sizes; do
    [ "$ranks" -le "$GPUS" ] || continue
    layer_limits[$ranks]=55
    [ "$ranks" -gt 1 ] || [ "$GPUS" = 1 ] || layer_limits[$ranks]=35 # fewer shapes
    limits[layer]=$((limits[layer] + layer_limits[$ranks]))
done
all=0
for part in $PARTS; do
    if [ -z "${limits[$part]:-}" ]; then
        echo "multi_gpu.sh: PARTS: got $part, need some of tests layer bandwidth train killed peers report" >&2
        exit 2
    fi
    all=$((all + limits[$part]))
done
if [ "$all" -gt "$TOTAL_S" ] && [ -z "$DRY" ]; then
    echo "multi_gpu.sh: PARTS: got $PARTS, which may take $all s, need at most $TOTAL_S s; remedy: several calls, as" \
        "at the top of this script" >&2
    exit 2
fi
mkdir -p "$RESULTS" "$REPORTS" "$RUNS"
read -ra shapes <<<"$SHAPES"
torchrun=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node)
bench=(-m megatron_mok.bench.distributed --commit "$COMMIT")
training=(env CUBLAS_WORKSPACE_CONFIG=:4096:8 "$PYTHON" -m) # cuBLAS then repeats its bits too
ab=("${training[@]}" megatron_mok.cli ab --steps "$STEPS" --no-repeat --commit "$COMMIT")

for part in $PARTS; do
    case $part in
    tests) run tests "${limits[tests]}" "$PYTHON" -m pytest -q "${tests[@]}" ;;
    layer)
        rm -f "$RESULTS/$name-layer.json"
        for ranks in $sizes; do
            [ "$ranks" -le "$GPUS" ] || continue
            chosen=("${shapes[@]}")
            [ "$ranks" -gt 1 ] || [ "$GPUS" = 1 ] || chosen=(C D) # to compare the rates of several with
            run "layer, $ranks ranks" "${layer_limits[$ranks]}" "${torchrun[@]}" "$ranks" "${bench[@]}" \
                --shape "${chosen[@]}" "${layer[@]}" --json "$RESULTS/$name-layer.json"
        done ;;
    bandwidth)
        rm -f "$RESULTS/$name-bandwidth.json"
        run bandwidth "${limits[bandwidth]}" "${torchrun[@]}" "$GPUS" "${bench[@]}" \
            --bandwidth "${bandwidth[@]}" --json "$RESULTS/$name-bandwidth.json" ;;
    train)
        rm -f "$RESULTS/$name-train-ab.json"
        run train "${limits[train]}" "${ab[@]}" --baseline alltoall --json "$RESULTS/$name-train-ab.json" \
            --runs "$RUNS/$name" "${train[@]}" ;;
    killed)
        # An earlier call's `train` may have been another training.
        like=() ab_json=$RESULTS/$name-train-ab.json
        [[ " $PARTS " != *" train "* ]] || [ ! -f "$ab_json" ] || like=(--like "$ab_json")
        rm -f "$RESULTS/$name-killed.json"
        run killed "${limits[killed]}" "${training[@]}" megatron_mok.bench.killed --steps "$STEPS" --at $((STEPS / 2)) "${like[@]}" \
            --json "$RESULTS/$name-killed.json" --runs "$RUNS/$name" "${train[@]}" ;;
    peers)
        for peer in deepep hybridep; do
            absent=$("$PYTHON" -c 'import sys; from megatron_mok.bench.baselines import BASELINES
print(BASELINES[sys.argv[1]].missing() or "")' "$peer")
            rm -f "$RESULTS/$name-train-ab-$peer.json"
            if [ -z "$absent" ]; then
                run "train, $peer" $((limits[peers] / 2)) "${ab[@]}" --baseline "$peer" \
                    --json "$RESULTS/$name-train-ab-$peer.json" --runs "$RUNS/$name-$peer" "${train[@]}"
            else
                note "train, $peer" "absent: $absent" 0
            fi
        done ;;
    report) ;; # below, whatever the order
    esac
done

if [[ " $PARTS " == *" report "* ]]; then
    "$PYTHON" - "$RESULTS/$name-parts.json" "$COMMIT" "${outcomes[@]}" <<'PYTHON'
import datetime, json, sys
from pathlib import Path

path, commit, *words = Path(sys.argv[1]), *sys.argv[2:]
rows = {row[0]: row for row in (json.loads(path.read_text()) if path.exists() else [])}  # of earlier calls
date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
for part, outcome, seconds in zip(words[::3], words[1::3], map(int, words[2::3])):
    rows[part] = [part, outcome, seconds, date, commit]
path.write_text("[\n" + ",\n".join(map(json.dumps, rows.values())) + "\n]\n")
PYTHON
    "$PYTHON" -m megatron_mok.bench.multi_gpu --results "$RESULTS" --name "$name" --output "$REPORTS/$name.md" ||
        status=1
fi
exit "$status"
