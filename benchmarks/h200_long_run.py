"""Long and repeated runs of a small model with mok on one GPU; exit code 0 where all holds, 1 where not.

    python benchmarks/h200_long_run.py --json F [--parts memory checkpoints] [--steps 2000]

memory       `--steps` steps; every hundred, torch's allocated and reserved bytes and NVML's of the whole GPU
             are read, and after a fifth of the steps none of them may grow.
checkpoints  50 steps twice with the same seed: losses, gradient norms and all tensors of both checkpoints
             must be equal bit for bit. Then the first checkpoint goes on for 10 steps under alltoall on the
             CPU (gloo, no GPU visible), and what that saves for 10 more with mok on the GPU. The losses of
             both must be those of mok going on from the first checkpoint without a break, up to a tolerance.

The model is configs/models/tiny.json, smaller for `memory`, on the standard library's text, trained by
examples/pretrain.py in Megatron's local implementation, bf16. Without a GPU everything runs on the CPU back
end and there is no memory to read: a dry run.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from megatron_mok.bench import training  # noqa: E402
from megatron_mok.bench.ab import last_lines, read_metrics, stop  # noqa: E402
from megatron_mok.bench.telemetry import open_nvml  # noqa: E402
from megatron_mok.cli.ab import facts  # noqa: E402

GPU = torch.cuda.is_available()
EVERY = 100  # steps between two readings of memory
SMALLER = "--num-layers 2 --moe-layer-freq [0]*1+[1]*1 --num-experts 8 --seq-length 256"
BATCH = "--micro-batch-size 4 --global-batch-size 4"
STEPS, MORE = 50, 10  # of `checkpoints`: to the first one, and under each of the two that follow
# What memory may grow by between the first and the last third of the readings. Torch's own count is exact;
# the others move in pieces of 2 MiB, and 16 MiB would be 12 KB a step.
GROWTH = {"allocated": 1 << 16, "reserved": 16 << 20, "nvml": 16 << 20}
# Losses of trainings that add in another order, bf16: of the first step after loading, and of the ten.
FIRST, LATER = 0.02, 0.1


# --- inside the training process


def inside(file: Path, script: list[str]) -> None:
    """Run a training script as megatron_mok.launch does, with a reading of memory every EVERY steps."""
    # Where it imports, Megatron takes its optimizer and norms, on the CPU too, where they do not run.
    sys.modules["transformer_engine"] = None
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.training import training as loop

    from megatron_mok import launch

    # Bits repeat only where the rest of the model repeats them. warn_only: an operator that cannot does not
    # end the run. Attention could, but not with warn_only: hence --deterministic-sdpa in train().
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    # It only logs how much memory a save takes, and needs psutil for it.
    filesystem_async._process_memory = lambda: 0
    nvml, train_step, step = open_nvml(int(GPU)), loop.train_step, 0

    @functools.wraps(train_step)
    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal step
        result = train_step(*args, **kwargs)
        step += 1
        if step % EVERY == 0:
            row = {
                "step": step,
                "allocated": torch.cuda.memory_allocated(),
                "reserved": torch.cuda.memory_reserved(),
                "nvml": nvml.used_bytes() if nvml else None,
                "host": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            }
            with file.open("a") as out:
                out.write(json.dumps(row) + "\n")
        return result

    loop.train_step = watched
    launch.main(script)


# --- one run


def train(
    name: str, steps: int, folder: Path, data: Path, words: str, gpu: bool = GPU, timeout_s: float = 300
) -> tuple[list[dict], list[dict]]:
    """(rows of losses, readings of memory) of one training. RuntimeError with its last lines if it fails."""
    metrics, memory, log = (folder / f"{name}.{kind}" for kind in ("jsonl", "memory.jsonl", "log"))
    for file in (metrics, memory):
        file.unlink(missing_ok=True)
    device = training.ON_GPU if gpu else f"{training.ON_CPU} {training.ON_GPU}"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"),
        *(__file__, "--inside", str(memory), str(ROOT / "examples" / "pretrain.py")),
        *shlex.split(f"{training.TRAINING} {training.LOCAL} {device} --deterministic-sdpa"),
        *training.model_flags("tiny"),
        *shlex.split(BATCH),
        *("--data-path", str(data), "--data-cache-path", str(folder / "cache")),
        *("--train-iters", str(steps), "--metrics-file", str(metrics), "--log-interval", str(EVERY)),
        *shlex.split(words),
    ]
    environment = training.environment(int(gpu), 1) | {
        "TORCHDYNAMO_DISABLE": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    if not gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    began = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    code: int | str
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = f"none, stopped after {timeout_s:.0f} s"
    finally:
        if process.poll() is None:
            stop(process)  # torchrun with its workers
    rows = read_metrics(metrics)
    if code or not rows:
        raise RuntimeError(f"{name}: exit code {code}, {len(rows)} steps\n{last_lines(log)}")
    print(f"{name}: to step {rows[-1]['step']}, loss {rows[0]['loss']:.4f} -> {rows[-1]['loss']:.4f}, "
          f"{time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
    return rows, read_metrics(memory)


# --- the parts


def grown(readings: list[dict]) -> dict[str, int | None]:
    """By how much each kind of memory has grown, from the first to the last third of the readings."""
    third = max(1, len(readings) // 3)

    def most(key: str, rows: list[dict]) -> int | None:
        return None if any(row[key] is None for row in rows) else max(row[key] for row in rows)

    result = {}
    for key in ("allocated", "reserved", "nvml", "host"):
        early, late = most(key, readings[:third]), most(key, readings[-third:])
        result[key] = None if early is None or late is None else late - early
    return result


def memory(folder: Path, data: Path, steps: int) -> dict[str, Any]:
    rows, readings = train(
        "memory", steps, folder, data, f"{SMALLER} --moe-token-dispatcher-type mok", timeout_s=500
    )
    readings = [row for row in readings if row["step"] > steps // 5]
    growth = grown(readings)
    problems = [
        f"{key}: grew by {growth[key]} bytes, need at most {most}"
        for key, most in GROWTH.items()
        if growth[key] is not None and growth[key] > most
    ]
    if GPU and growth["nvml"] is None:
        problems.append("nvml: could not be read")
    if len(rows) != steps or not all(math.isfinite(row["loss"]) for row in rows):
        problems.append(f"losses: {len(rows)} of {steps}, or not all finite")
    return {
        "steps": len(rows),
        "step_ms_median": statistics.median(row["step_ms"] for row in rows),
        "losses": [rows[0]["loss"], rows[-1]["loss"]],
        "growth": growth,
        "readings": readings,
        "problems": problems,
    }


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of one of Megatron's distributed checkpoints, model and optimizer."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(checkpoint)
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
    return state


def checkpoints(folder: Path, data: Path) -> dict[str, Any]:
    end = STEPS + 2 * MORE
    common = f"--seed 1 --lr-decay-iters {end} --save-interval 1000 --override-opt_param-scheduler"
    mok = f"{common} --moe-token-dispatcher-type mok"
    alltoall = f"{common} --moe-token-dispatcher-type alltoall"
    first, again, other = (folder / name for name in ("mok", "mok-again", "alltoall"))

    def run(name: str, steps: int, words: str, gpu: bool = GPU) -> list[dict]:
        return train(name, steps, folder, data, words, gpu)[0]

    one = run("mok", STEPS, f"{mok} --save {first}")
    two = run("mok-again", STEPS, f"{mok} --save {again}")
    through = run("mok-through", end, f"{mok} --load {first} --no-load-rng")
    cpu = run("alltoall", STEPS + MORE, f"{alltoall} --load {first} --save {other} --no-load-rng", gpu=False)
    back = run("mok-back", end, f"{mok} --load {other} --no-load-rng")

    problems = [
        f"{key}: differ between two runs of the same seed"
        for key in ("loss", "grad_norm")
        if [row[key] for row in one] != [row[key] for row in two]
    ]
    saved = [tensors(where / f"iter_{STEPS:07d}") for where in (first, again)]
    unequal = [
        key
        for key, value in saved[0].items()
        if key not in saved[1] or not torch.equal(value.view(torch.uint8), saved[1][key].view(torch.uint8))
    ]
    if unequal or saved[0].keys() != saved[1].keys():
        problems.append(f"checkpoints: {len(unequal)} of {len(saved[0])} tensors differ, {unequal[:5]}")
    reference = {row["step"]: row["loss"] for row in through}
    differences = {}
    for name, rows in (("alltoall on the CPU", cpu), ("mok again", back)):
        apart = [abs(row["loss"] - reference[row["step"]]) for row in rows]
        differences[name] = apart
        if len(rows) != MORE or apart[0] > FIRST or max(apart) > LATER:
            need = f"{MORE} steps, the first within {FIRST}, all within {LATER}"
            problems.append(f"{name}: losses apart by {[round(x, 4) for x in apart]}, need {need}")
    return {
        "losses": {
            name: [row["loss"] for row in rows]
            for name, rows in (("mok", one), ("mok through", through), ("alltoall", cpu), ("mok back", back))
        },
        "differences": differences,
        "tensors": len(saved[0]),
        "problems": problems,
    }


def main() -> int:
    if sys.argv[1:2] == ["--inside"]:
        inside(Path(sys.argv[2]), sys.argv[3:])
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the result goes")
    parser.add_argument("--parts", nargs="+", default=["memory", "checkpoints"])
    parser.add_argument("--steps", type=int, default=2000, help="steps of `memory` (2000)")
    parser.add_argument("--runs", type=Path, default=Path("runs/h200-long-run"), help="logs, checkpoints")
    parser.add_argument("--commit", help="for the result; default: git's HEAD")
    options = parser.parse_args()
    if options.steps < 2 * EVERY:
        parser.error(f"--steps: got {options.steps}, need at least {2 * EVERY}: two readings of memory")
    folder = options.runs.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for made in ("cache", "mok", "mok-again", "alltoall"):  # a cache knows the path of a text, not the text
        shutil.rmtree(folder / made, ignore_errors=True)
    data = training.prepare_text(Path("runs/data").absolute())
    parts = {
        "memory": lambda: memory(folder, data, options.steps),
        "checkpoints": lambda: checkpoints(folder, data),
    }
    result: dict[str, Any] = {"facts": facts([sys.executable, *sys.argv], options.commit)}
    for part in options.parts:
        try:
            result[part] = parts[part]()
        except RuntimeError as error:
            result[part] = {"problems": [str(error)]}
        for problem in result[part]["problems"]:
            print(f"{part}: {problem}", flush=True)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    wrong = sum(len(result[part]["problems"]) for part in options.parts)
    print("all holds" if not wrong else f"{wrong} problems")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
