"""`make train`: trains the tiny model of configs/models on real text with the mok dispatcher, and sums it up.

    train.py [--run-dir DIR] [MEGATRON_FLAGS...]      the flags are appended to the training command

Without a GPU: the CPU back end, 4 ranks, EP 4, gloo. With n GPUs: as many ranks, and EP, as the largest of
1, 2, 4, 8 that is <= n. Leaves metrics.jsonl (a JSON object a step), loss.png and log.txt (all that Megatron
printed) in DIR, runs/train by default.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from model_flags import model_flags  # noqa: E402

STEPS = 80
TRAINING = f"""
    --seq-length 256 --micro-batch-size 1 --global-batch-size 8 --train-iters {STEPS} --log-interval 5
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 5 --weight-decay 0.1 --clip-grad 1.0
    --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --eval-interval 1000
    --tokenizer-type NullTokenizer --split 100,0,0 --num-workers 0 --no-create-attention-mask-in-dataloader
    --distributed-timeout-minutes 10
"""
# Megatron's own layers in plain torch: nothing of Apex or Transformer Engine.
LOCAL = """
    --transformer-impl local --attention-backend unfused --no-persist-layer-norm --no-rope-fusion
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion
"""
CPU = "--distributed-backend gloo --use-cpu-initialization"
GPU = "--bf16"


def command(
    data: Path, sha256: str, metrics_file: Path, extra: list[str]
) -> tuple[list[str], dict[str, str]]:
    """The torchrun command and its environment for this machine.

    sha256: of the text. Megatron's cache of sample indices knows the path of the data set, not what is in it.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = max(n for n in (1, 2, 4, 8) if n <= gpus) if gpus else 4
    flags = model_flags("tiny") + shlex.split(TRAINING)
    if gpus and importlib.util.find_spec("transformer_engine"):
        flags += shlex.split(GPU) + ["--transformer-impl", "transformer_engine", "--moe-grouped-gemm"]
        if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:  # apex's, for the output layer
            flags.append("--no-gradient-accumulation-fusion")
    else:
        flags += shlex.split(LOCAL + (GPU if gpus else CPU))
    flags += ["--expert-model-parallel-size", str(ranks), "--moe-token-dispatcher-type", "mok"]
    flags += ["--data-path", str(data), "--data-cache-path", str(data.parent / "cache" / sha256[:16])]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    script = ["-m", "megatron_mok.launch", "examples/pretrain.py", "--metrics-file", str(metrics_file)]

    environment = dict(os.environ, PYTHONUNBUFFERED="1")
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    if not gpus:  # compiling small functions takes longer than this whole training
        environment.setdefault("TORCHDYNAMO_DISABLE", "1")
    return [*launch, *script, *flags, *extra], environment


def prepare(data: Path) -> dict:
    """Make the data set, or find it made; what it was made from. A process apart: Megatron's import talks."""
    script = [sys.executable, "examples/prepare_data.py", "--output", str(data)]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stderr}preparing the data failed: {shlex.join(script)}")
    return json.loads(done.stdout)


def read(metrics: Path) -> list[dict]:
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


def digits(value: float | None, count: int) -> str:
    """A figure of a step; a dash where Megatron has none, as without clipping or in a skipped step."""
    return "-" if value is None else f"{value:.{count}f}"


def train(argv: list[str], environment: dict[str, str], metrics: Path, log_file: Path) -> str | None:
    """Run the training and show a line for each logging step; what mok said of its back end, if it ran."""
    backend = None
    with (
        log_file.open("w") as log,
        subprocess.Popen(
            argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            if " iteration " in line and "lm loss:" in line and (steps := read(metrics)):
                now = steps[-1]
                print(
                    f"step {now['step']:>4}  loss {digits(now['loss'], 4)}  "
                    f"grad norm {digits(now['grad_norm'], 3)}  "
                    f"{now['tokens_per_s']:.0f} tokens/s  {now['step_ms']:.0f} ms",
                    flush=True,
                )
            elif "back end" in line and backend is None:
                print(line.strip(), flush=True)
                backend = line.strip().removeprefix("megatron_mok: ")
    if process.returncode:
        lines = log_file.read_text().splitlines()
        end = next((i for i, line in enumerate(lines) if "torch/distributed/elastic" in line), len(lines))
        print(*lines[:end][-40:], sep="\n")  # without torchrun's own report, which only says where
        raise SystemExit(f"training failed (exit status {process.returncode}); all of its output: {log_file}")
    return backend


def plot(steps: list[dict], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    axes.plot([s["step"] for s in steps], [math.nan if s["loss"] is None else s["loss"] for s in steps])
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="tiny model, Python's standard library")
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False
    )
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "train")
    options, extra = parser.parse_known_args()
    run = options.run_dir.resolve()
    run.mkdir(parents=True, exist_ok=True)
    metrics, figure, log = run / "metrics.jsonl", run / "loss.png", run / "log.txt"
    for old in (metrics, figure, log):
        old.unlink(missing_ok=True)

    data = ROOT / "runs" / "data" / "stdlib"
    text = prepare(data)
    argv, environment = command(data, text["sha256"], metrics, extra)
    print(f"text: {text['origin']}, {text['files']} files, {text['bytes']} bytes", flush=True)
    backend = train(argv, environment, metrics, log)

    steps = read(metrics)
    if not steps:
        raise SystemExit(f"training ended without a step; all of its output: {log}")
    plot(steps, figure)
    settled = steps[len(steps) // 5 :]
    used = re.findall(r"--moe-token-dispatcher-type[= ](\S+)", " ".join(argv))[-1]
    first, last = steps[0], steps[-1]
    print(
        f"\ndispatcher   {used}"
        f"\nback end     {backend or 'Megatron-Core'}"
        f"\nloss         {digits(first['loss'], 4)} at step {first['step']}"
        f"\n             {digits(last['loss'], 4)} at step {last['step']}"
        f"\ntokens/s     {statistics.median(s['tokens_per_s'] for s in settled):.0f} (median)"
        f"\nstep         {statistics.median(s['step_ms'] for s in settled):.0f} ms (median)"
        f"\ntext sha256  {text['sha256']}"
        f"\nleft         {metrics}, {figure.name}, {log.name}"
    )


if __name__ == "__main__":
    main()
