#!/usr/bin/env bash
# Pretraining on one GPU, alltoall against mok: h200_train_ab.json on the standard library's text, bf16, one process.
#
#   te          alltoall with TEGroupedMLP in the transformer_engine implementation   h200-train-ab.json
#   sequential  alltoall with SequentialMLP in the local implementation               h200-train-ab-sequential.json
#   noise       alltoall with TEGroupedMLP once more, without fused permutation, which adds in another order: what its
#               losses and gradient norms differ by from those of `te`, beside what mok's differ by from alltoall's
#                                                                                     h200-train-ab-noise.json
#   profile     where the GPU's time of steps 6 to 8 goes, both sides of `te` by themselves: milliseconds by group, the
#               MoE layers' share, host waits inside them, idle time              h200-profile.json
#
# MLA runs on torch's scaled_dot_product_attention on all sides (examples/attention.py). With Transformer Engine all
# weight gradients are added to main_grad where they are computed; examples/without_apex stands in for apex in one
# layer. STEPS=200 is the whole comparison, fewer are a shorter one; PARTS picks parts, `noise` needs `te`, and
# `profile` is left out unless named.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${STEPS:=200}" "${SEQUENTIAL_STEPS:=$STEPS}" "${PARTS:=te sequential noise}" "${EXPERTS:=32}" "${MICRO_BATCH:=8}"
: "${SEQ:=4096}" "${MODEL:=benchmarks/h200_train_ab.json}" "${TIMEOUT:=900}" "${PYTHON:=python3}" "${EXTRA:=}"
: "${RESULTS:=benchmarks/results}" "${REPORTS:=benchmarks/reports}" "${RUNS:=runs/h200-train-ab}"
: "${COMMIT:=$(git describe --always --dirty --abbrev=40 2>/dev/null || true)}"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
rm -rf "$RUNS/cache" # of sample indices, which know the path of a data set but not what is in it
mkdir -p "$RESULTS" "$REPORTS" "$RUNS"

if [[ " $PARTS " == *" noise "* && " ${PARTS%%noise*}" != *" te "* ]]; then # before it trains
    "$PYTHON" - "$RESULTS/h200-train-ab.json" "$STEPS" <<'PYTHON'
import json, sys
from pathlib import Path

path, steps = Path(sys.argv[1]), int(sys.argv[2])
there = len(json.loads(path.read_text())["a"]["losses"]) if path.exists() else None
if there is None:
    sys.exit(f'PARTS=noise: got no {path}, need it: what `te` leaves; remedy: PARTS="te noise"')
if there != steps:
    sys.exit(f'STEPS: got {steps}, need {there}, those of {path}; remedy: STEPS={there}, or PARTS="te noise"')
PYTHON
fi

"$PYTHON" examples/prepare_data.py --output runs/data/stdlib
words=$("$PYTHON" -c 'import sys
from megatron_mok.bench.training import model_flags
print(*model_flags(sys.argv[1]))' "$MODEL")
read -ra model <<<"$words"
read -ra extra <<<"$EXTRA"
train=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 1)
flags=(examples/pretrain.py "${model[@]}" --num-experts "$EXPERTS"
    --seq-length "$SEQ" --micro-batch-size "$MICRO_BATCH" --global-batch-size "$MICRO_BATCH"
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.1 --clip-grad 1.0
    --adam-beta2 0.95 --hidden-dropout 0 --attention-dropout 0 --bf16
    --eval-iters 0 --eval-interval 1000000 --split 100,0,0 --num-workers 0 --tokenizer-type NullTokenizer
    --no-create-attention-mask-in-dataloader --distributed-timeout-minutes 10 --no-rope-fusion
    --data-path runs/data/stdlib --data-cache-path "$RUNS/cache")
te=(--transformer-impl transformer_engine --moe-grouped-gemm --sdpa "${extra[@]}")
sequential=(--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion
    --no-gradient-accumulation-fusion "${extra[@]}")

# `timeout --foreground` below: in the caller's process group, so that a limit of the caller ends the training too.
compare() { # STEPS NAME FLAGS...
    local steps=$1 name=$2
    shift 2
    "$PYTHON" -m megatron_mok.cli ab --baseline alltoall --steps "$steps" --no-repeat --timeout "$TIMEOUT" \
        --commit "$COMMIT" \
        --runs "$RUNS/$name" --json "$RESULTS/$name.json" --plot "$REPORTS/$name.png" \
        -- "${train[@]}" "${flags[@]}" "$@"
}

for part in $PARTS; do
    echo "== $part"
    case $part in
    te) PYTHONPATH=examples/without_apex:$PYTHONPATH \
        compare "$STEPS" h200-train-ab "${te[@]}" --moe-permute-fusion ;;
    sequential) compare "$SEQUENTIAL_STEPS" h200-train-ab-sequential "${sequential[@]}" ;;
    noise)
        metrics=$RUNS/noise.jsonl
        rm -f "$metrics"
        noise=("${train[@]}" -m megatron_mok.launch "${flags[@]}" "${te[@]}" --moe-token-dispatcher-type alltoall
            --train-iters "$STEPS" --log-interval 1 --metrics-file "$metrics")
        PYTHONPATH=examples/without_apex:$PYTHONPATH timeout --foreground "$TIMEOUT" "${noise[@]}" \
            >"$RUNS/noise.log" 2>&1 || { tail -30 "$RUNS/noise.log"; exit 1; }
        "$PYTHON" - "$metrics" "$RESULTS" "$COMMIT" "${noise[@]}" <<'PYTHON'
import json, sys
from pathlib import Path

from megatron_mok.cli.ab import facts

rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
folder, made = Path(sys.argv[2]), {"facts": facts(sys.argv[4:], sys.argv[3])}
pair = json.loads((folder / "h200-train-ab.json").read_text())
other = {"losses": [row["loss"] for row in rows], "grad_norms": [row["grad_norm"] for row in rows]}


def differences(x, y):
    losses = zip(x["losses"], y["losses"], strict=True)
    norms = zip(x["grad_norms"], y["grad_norms"], strict=True)
    return {
        "max_abs_loss_diff": max(abs(a - b) for a, b in losses),
        "max_relative_grad_norm_diff": max(abs(a - b) / b for a, b in norms),
    }


found = {
    "from_alltoall": differences(pair["a"], other),
    "from_mok": differences(pair["b"], other),
    "mok_from_alltoall": differences(pair["b"], pair["a"]),
}
(folder / "h200-train-ab-noise.json").write_text(json.dumps(made | other | found, indent=1) + "\n")
print("alltoall in another order, from alltoall:", found["from_alltoall"], "from mok:", found["from_mok"])
print("mok from alltoall:", found["mok_from_alltoall"])
PYTHON
        ;;
    profile)
        for dispatcher in alltoall mok; do
            profiled=("${train[@]}" -m megatron_mok.bench.profile "$RUNS/profile-$dispatcher.json" 6 8 "${flags[@]}"
                "${te[@]}" --moe-permute-fusion --train-iters 9 --log-interval 1
                --moe-token-dispatcher-type "$dispatcher")
            PYTHONPATH=examples/without_apex:$PYTHONPATH timeout --foreground "$TIMEOUT" "${profiled[@]}" \
                >"$RUNS/profile-$dispatcher.log" 2>&1 || { tail -30 "$RUNS/profile-$dispatcher.log"; exit 1; }
        done
        "$PYTHON" - "$RUNS" "$RESULTS/h200-profile.json" "$COMMIT" "${profiled[@]}" <<'PYTHON'
import json, sys
from pathlib import Path

from megatron_mok.cli.ab import facts

sides = {side: json.loads(Path(sys.argv[1], f"profile-{side}.json").read_text()) for side in ("alltoall", "mok")}
made = {"facts": facts(sys.argv[4:], sys.argv[3])}  # the command is mok's
Path(sys.argv[2]).write_text(json.dumps(made | sides, indent=1) + "\n")
for side, found in sides.items():
    moe = found["moe"]
    print(f"{side}: step {found['step_ms']:.1f} ms, idle {found['idle_fraction']:.1%}, MoE layers {moe['share']:.1%} "
          f"(forward {moe['forward_ms']:.1f}, backward {moe['backward_ms']:.1f} ms), waits {found['waits']['inside']}")
    print("  " + ", ".join(f"{name} {ms:.1f}" for name, ms in found["groups_ms"].items()))
PYTHON
        ;;
    *) echo "PARTS: got $part, need te, sequential, noise, profile" >&2 && exit 2 ;;
    esac
done
