"""The training that `mok ab` compares when the user names none: a model of configs/models on real text.

It needs a checkout (examples/ and configs/ are not installed): Megatron-Core's own loop through
examples/pretrain.py, the source of Python's standard library as text, fp32 and gloo without a GPU, else bf16.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from megatron_mok import env
from megatron_mok.bench.ab import Training, total_ranks

CHECKOUT = Path(__file__).resolve().parents[2]
DATA_TIMEOUT_S = 300.0

TRAINING = """
    --seq-length 256 --micro-batch-size 1 --global-batch-size 8
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 1
    --weight-decay 0.1 --clip-grad 1.0 --hidden-dropout 0 --attention-dropout 0
    --eval-iters 0 --eval-interval 1000000 --split 100,0,0 --num-workers 0 --tokenizer-type NullTokenizer
    --no-create-attention-mask-in-dataloader --distributed-timeout-minutes 10
"""
# Megatron's own layers in plain torch: nothing of apex or Transformer Engine.
LOCAL = """
    --transformer-impl local --attention-backend unfused --no-persist-layer-norm --no-rope-fusion
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-bias-swiglu-fusion --no-bias-dropout-fusion
"""
ON_CPU = "--distributed-backend gloo --use-cpu-initialization"
ON_GPU = "--bf16"
WITH_TE = "--transformer-impl transformer_engine --moe-grouped-gemm"
TORCHRUN_OPTIONS = {"nproc-per-node", "nnodes", "node-rank", "rdzv-backend", "rdzv-endpoint", "rdzv-id"}
TORCHRUN_OPTIONS |= {"master-addr", "master-port"}


def model_flags(config: str) -> list[str]:
    """Megatron arguments of a model: a JSON file {"flags": {...}} or the name of one in configs/models.

    ValueError where there is none.
    """
    path = Path(config)
    if not path.is_file():
        path = CHECKOUT / "configs" / "models" / f"{config}.json"
    if not path.is_file():
        names = sorted(f.stem for f in path.parent.glob("*.json"))
        raise ValueError(
            f"--config: got {config!r}, need a file or one of {', '.join(names) or 'none: no checkout'}"
        )
    try:
        flags = json.loads(path.read_text())["flags"]
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"--config: {path}: got no JSON object with flags ({e!r}), need one") from None
    return [
        word for name, v in flags.items() for word in ([f"--{name}"] if v is True else [f"--{name}", str(v)])
    ]


def split_torchrun(words: list[str]) -> tuple[list[str], list[str]]:
    """(torchrun's options, the rest), from a mix of both."""
    mine, rest, words = [], [], list(words)
    while words:
        word = words.pop(0)
        if word.startswith("--") and word[2:].partition("=")[0].replace("_", "-") in TORCHRUN_OPTIONS:
            mine += [word] if "=" in word else [word, *words[:1]]
            words = words if "=" in word else words[1:]
        else:
            rest.append(word)
    return mine, rest


def default_ranks(gpus: int) -> int:
    """4 on a CPU; the largest of 1, 2, 4, 8 that the GPUs allow."""
    return max(n for n in (1, 2, 4, 8) if n <= gpus) if gpus else 4


def prepare_text(folder: Path) -> Path:
    """Path prefix of the text as Megatron's indexed dataset, made by examples/prepare_data.py if need be."""
    prefix = folder / "stdlib"
    script = CHECKOUT / "examples" / "prepare_data.py"
    command = [sys.executable, str(script), "--output", str(prefix)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DATA_TIMEOUT_S, env=environment(0, 1)
    )
    if done.returncode:
        raise ValueError(f"{script}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return prefix


def _cache(data: Path) -> Path:
    """For Megatron's sample indices, which know the path of a data set but not what is in it."""
    summary = data.with_suffix(".json")
    key = json.loads(summary.read_text())["sha256"][:16] if summary.exists() else data.name
    return data.parent / "cache" / key


def default_command(config: str, words: list[str], gpus: int, data: Path) -> list[str]:
    """The torchrun command for a model and any more torchrun options and training arguments in `words`."""
    script = CHECKOUT / "examples" / "pretrain.py"
    if not script.is_file():
        raise ValueError(
            f"training command: got none, and {script} is not there (this is no checkout); "
            "remedy: put yours after --, as in `-- torchrun --nproc-per-node 8 pretrain_gpt.py ...`"
        )
    options, rest = split_torchrun(words)
    names = [word[2:].partition("=")[0].replace("_", "-") for word in options]
    if "nproc-per-node" not in names:
        options += ["--nproc-per-node", str(default_ranks(gpus))]
    ranks = total_ranks(options)
    if not {"nnodes", "rdzv-endpoint", "master-addr"} & set(names):
        options.append("--standalone")
    # torchrun as the interpreter that runs this: the one that has megatron_mok
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *options,
        "-m",
        "megatron_mok.launch",
        str(script),
    ]
    flags = shlex.split(TRAINING)
    if gpus and importlib.util.find_spec("transformer_engine"):
        flags += shlex.split(WITH_TE + " " + ON_GPU)
        if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:  # apex's, for the output layer
            flags.append("--no-gradient-accumulation-fusion")
    else:
        flags += shlex.split(LOCAL + (ON_GPU if gpus else ON_CPU))
    flags += ["--data-path", str(data), "--data-cache-path", str(_cache(data))]
    flags += ["--expert-model-parallel-size", str(ranks)]
    return [*launch, *flags, *model_flags(config), *rest]


def choose(config: str, words: list[str]) -> Training:
    """The training that a command line asks for; `words`: what stands after --, whole command or additions.

    ValueError where there is none.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not words or words[0].startswith("-"):
        words = default_command(config, words, gpus, prepare_text(Path("runs/data").absolute()))
    return Training.parse(words, gpus)


def environment(gpus: int, ranks: int) -> dict[str, str]:
    """For the training processes; whatever the user has set stays."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    made = env.child(PYTHONUNBUFFERED="1", OMP_NUM_THREADS=str(threads), PYTHONPATH="")
    if not gpus:  # compiling small functions takes longer than a short training on a CPU
        made.setdefault("TORCHDYNAMO_DISABLE", "1")
    if (CHECKOUT / "examples").is_dir():  # a source tree that need not be installed
        made["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CHECKOUT), made["PYTHONPATH"]]))
    return made
