"""The A/B harness on made-up training scripts: arithmetic, files, bad children, missing baselines."""

import ctypes
import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint

from megatron_mok.bench import ab, baselines, observe, telemetry

# Knows the flags that the harness adds, counts its runs, and has a loss that depends on the dispatcher.
SCRIPT = """
import argparse, json, pathlib, sys, time
p = argparse.ArgumentParser()
p.add_argument("--train-iters", type=int)
p.add_argument("--log-interval", type=int)
p.add_argument("--moe-token-dispatcher-type")
{METRICS}
p.add_argument("--seq-length", type=int, default=8)
p.add_argument("--trouble", default="")
a = p.parse_args()
mok = a.moe_token_dispatcher_type == "mok"
count = pathlib.Path(__file__).with_suffix(".count-" + a.moe_token_dispatcher_type)
turn = len(count.read_text()) if count.exists() else 0
count.write_text("x" * (turn + 1))
print("hello from", a.moe_token_dispatcher_type, flush=True)
if a.trouble == "crash" and mok:
    sys.exit("boom: the reason")
if a.trouble == "hang" and mok:
    time.sleep(600)
for step in range(1, a.train_iters + (a.trouble != "short")):
    loss = 4.0 / step + (1e-6 if mok else 0) * step + (1e-9 * turn if a.trouble == "drift" and mok else 0)
    loss = float("nan") if a.trouble == "nan" and mok and step == 3 else loss
    ms = 1000.0 if step == 1 else (5.0 if mok else 10.0)
    {WRITE}
"""
JSONL = SCRIPT.replace("{METRICS}", 'p.add_argument("--metrics-file")').replace(
    "{WRITE}",
    """row = {"step": step, "loss": loss, "grad_norm": 1 + loss, "tokens_per_s": 6400 / ms, "step_ms": ms}
    open(a.metrics_file, "a").write(json.dumps(row) + "\\n")""",
)
LOG = SCRIPT.replace("{METRICS}", "").replace(
    "{WRITE}",
    """print(f" [2026-01-01 00:00:00] iteration {step:8d}/ {a.train_iters:8d} | consumed samples: 16 | "
          f"elapsed time per iteration (ms): {ms:.1f} | global batch size:    16 | lm loss: {loss:.6E} | "
          f"loss scale: 1.0 | grad norm: {1 + loss:.3f} | number of skipped iterations:   0 |")""",
)
BASELINE = ("alltoall", ("--moe-token-dispatcher-type", "alltoall"))
MOK = ("mok", ("--moe-token-dispatcher-type", "mok"))


class Direct(ab.Training):
    """`python script.py` instead of torchrun and Megatron."""

    def command(self, flags, steps, metrics, observed):
        torchrun, rest = super().command(flags, steps, metrics, observed), len(ab.OBSERVE) + 2
        return [*self.launcher, *torchrun[rest:]]


@pytest.fixture
def measure(tmp_path):
    """measure(source, *script args, **options) -> result."""

    def run(source, *args, steps=5, repeat=False, timeout_s=60, **options):
        script = tmp_path / "train.py"
        script.write_text(source)
        training = Direct((sys.executable,), str(script), args, ranks=2, here=2, gpus=0)
        return ab.measure(
            training,
            BASELINE,
            MOK,
            steps,
            folder=tmp_path / "runs",
            timeout_s=timeout_s,
            environment=dict(os.environ),
            repeat=repeat,
            say=lambda line: None,
            **options,
        )

    return run


def test_json_is_the_interface(measure):
    result = measure(JSONL)
    assert list(result) == ["a", "b", "max_abs_loss_diff", "speedup"]
    keys = {"dispatcher", "losses", "grad_norms", "step_ms_median", "moe_ms_median", "tokens_per_s_per_gpu"}
    keys |= {
        "peak_memory_bytes",
        "nvlink_bytes_per_step",
        "energy_j_per_step",
        "idle_fraction",
        "bitwise_repeatable",
    }
    assert set(result["a"]) == set(result["b"]) == keys
    assert (result["a"]["dispatcher"], result["b"]["dispatcher"]) == ("alltoall", "mok")
    assert len(result["a"]["losses"]) == 5 and result["a"]["losses"][1] == 2.0
    assert result["max_abs_loss_diff"] == pytest.approx(5e-6, rel=1e-6)
    # the slow first step is left out; a = baseline, so mok at half the time is a speedup of 2
    assert (result["a"]["step_ms_median"], result["b"]["step_ms_median"], result["speedup"]) == (
        10.0,
        5.0,
        2.0,
    )
    assert result["a"]["tokens_per_s_per_gpu"] == 6400 / 10 / 2
    unknown = (
        "moe_ms_median",
        "peak_memory_bytes",
        "nvlink_bytes_per_step",
        "energy_j_per_step",
        "idle_fraction",
    )
    assert all(result["a"][key] is None for key in unknown)
    assert result["a"]["bitwise_repeatable"] is None
    json.dumps(result, allow_nan=False)


def test_repeat_tells_bits_apart(measure):
    same = measure(JSONL, repeat=True)
    assert same["a"]["bitwise_repeatable"] is True and same["b"]["bitwise_repeatable"] is True
    drift = measure(JSONL, "--trouble", "drift", repeat=True)
    assert drift["a"]["bitwise_repeatable"] is True and drift["b"]["bitwise_repeatable"] is False


def test_repeats_by_itself_only_where_cheap(measure):
    assert measure(JSONL, repeat=None, cheap_s=60)["a"]["bitwise_repeatable"] is True
    assert measure(JSONL, repeat=None, cheap_s=0)["a"]["bitwise_repeatable"] is None


def test_a_script_without_metrics_is_read_from_its_log(measure):
    result = measure(LOG, "--seq-length", "8")
    assert result["a"]["losses"] == pytest.approx([4 / n for n in range(1, 6)], rel=1e-6)
    assert result["a"]["grad_norms"][0] == 5.0 and result["speedup"] == 2.0
    assert result["a"]["tokens_per_s_per_gpu"] == 16 * 8 / 10e-3 / 2


def test_failing_child_shows_its_last_lines(measure):
    with pytest.raises(ab.RunFailed, match=r"(?s)mok: exit code 1.*hello from mok.*boom: the reason"):
        measure(JSONL, "--trouble", "crash")


def test_torchruns_own_report_does_not_hide_the_reason(tmp_path):
    log = tmp_path / "x.log"
    boilerplate = "W1201 04:52:33.1 7 .venv/torch/distributed/elastic/api.py:1] Sending SIGTERM\n"
    log.write_text("first\n[rank0]: AssertionError: why\n" + boilerplate + "Traceback\n" * 50)
    assert ab.last_lines(log).splitlines() == ["  | first", "  | [rank0]: AssertionError: why"]
    log.write_text(boilerplate)  # nothing else: better than nothing
    assert "SIGTERM" in ab.last_lines(log)


def test_hanging_child_is_ended(measure):
    began = time.monotonic()
    with pytest.raises(ab.RunFailed, match=r"(?s)mok: not done in 1 s.*hello from mok"):
        measure(JSONL, "--trouble", "hang", timeout_s=1)
    assert time.monotonic() - began < 20


def test_too_few_steps_is_a_failure(measure):
    with pytest.raises(ab.RunFailed, match="4 steps with a loss, need 5"):
        measure(JSONL, "--trouble", "short")


def test_nan_loss_becomes_null_not_a_small_difference(measure):
    result = measure(JSONL, "--trouble", "nan")
    assert result["b"]["losses"][2] is None and result["max_abs_loss_diff"] is None
    assert "max |loss difference| -" in ab.table(result)


def test_table_and_plot(measure, tmp_path):
    result = measure(JSONL, repeat=True)
    text = ab.table(result)
    assert "a: alltoall" in text and "speedup (a / b step time) 2.00" in text
    assert "10.00 ms" in text and "5.00 ms" in text
    assert ab.matplotlib_missing() is None
    ab.plot(result, tmp_path / "deep" / "ab.png")
    assert (tmp_path / "deep" / "ab.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_plot_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib" in ab.matplotlib_missing()


@pytest.mark.parametrize(
    "command, gpus, launcher, counts",
    [
        ("torchrun --nproc-per-node 8 a/b.py --lr 1", 8, "torchrun --nproc-per-node 8", (8, 8, 8)),
        (
            "torchrun --nproc_per_node=4 --nnodes=2 -m megatron_mok.launch a/b.py --lr 1",
            8,
            "torchrun --nproc_per_node=4 --nnodes=2",
            (8, 4, 4),
        ),
        ("torchrun --nproc-per-node 2 a/b.py --lr 1", 0, "torchrun --nproc-per-node 2", (2, 2, 0)),
    ],
    ids=["stock", "with-launcher", "cpu"],
)
def test_training_command(command, gpus, launcher, counts):
    training = ab.Training.parse(command.split(), gpus)
    assert (" ".join(training.launcher), training.script, training.args) == (
        launcher,
        "a/b.py",
        ("--lr", "1"),
    )
    assert (training.ranks, training.here, training.gpus) == counts
    words = training.command(MOK[1], 7, Path("m"), Path("o"))
    assert " ".join(words) == (
        f"{launcher} -m megatron_mok.bench.observe o a/b.py --lr 1 "
        "--train-iters 7 --log-interval 1 --moe-token-dispatcher-type mok"
    )


def test_training_command_that_cannot_be_compared():
    with pytest.raises(ValueError, match="need torchrun"):
        ab.Training.parse(["--seq-length", "8"], 0)
    for words in (["--save", "here"], ["--save=here"], ["--load=here"]):
        with pytest.raises(ValueError, match=f"{words[0].partition('=')[0]}: got it"):
            ab.Training.parse(["torchrun", "x.py", *words], 0)
    ab.Training.parse(["torchrun", "x.py", "--save-interval=5"], 0)


class Layer(torch.nn.Module):
    """Takes 10 ms forward and 20 ms backward."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            time.sleep(0.01)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            time.sleep(0.02)
            return grad * 2

    def forward(self, hidden_states, factor=1):
        return self.Slow.apply(hidden_states) * factor, None


def test_observed_time_of_moe_layers(monkeypatch):
    """Forward and backward of every call, recomputed ones too, and nothing of what lies between."""
    clock = observe.MoeClock()
    monkeypatch.setattr(Layer, "forward", clock.around(Layer.forward))
    layer, x = Layer(), torch.ones(4, requires_grad=True)
    began = time.perf_counter()
    hidden = x * 1
    out = layer(layer(hidden)[0], factor=3)[0]
    time.sleep(0.05)
    out.sum().backward()
    assert x.grad.tolist() == [12.0] * 4
    assert 60 <= clock.take() <= (time.perf_counter() - began) * 1e3 - 50
    with torch.no_grad():
        layer(hidden)
    assert 10 <= clock.take()
    again = torch.utils.checkpoint.checkpoint(lambda h: layer(h)[0], x * 1, use_reentrant=True)
    again.sum().backward()
    assert 40 <= clock.take()
    assert clock.take() == 0


@pytest.mark.parametrize("steps, left_out", [(2, 1), (5, 1), (10, 2), (100, 5)])
def test_warmup_steps(steps, left_out):
    assert ab.warmup_steps(steps) == left_out


def test_missing_baselines_name_what_they_need():
    assert baselines.BASELINES["alltoall"].missing() is None
    broken = baselines.Baseline("hybridep", (), "from no_such_package import X", "DeepEP's hybrid-ep branch")
    said = broken.missing()
    assert "hybridep: needs DeepEP's hybrid-ep branch" in said and "no_such_package" in said
    assert {b.flags[3] for b in baselines.BASELINES.values() if len(b.flags) > 2} == {
        "deepep",
        "hybridep",
        "ncclep",
    }


class FakeNvml:
    """Stands for libnvidia-ml: two GPUs, 100 J and 1 MiB of NVLink payload a reading and GPU."""

    def __init__(self, nvlink=True):
        self.mj, self.kib, self.nvlink = 0, 0, nvlink

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, out):
        self.mj += 50_000
        out._obj.value = self.mj
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, out):
        out._obj.used = handle.value << 30
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle, out):
        out._obj.gpu = 75
        return 0

    def nvmlDeviceGetFieldValues(self, handle, count, request):
        if not self.nvlink:
            return 3
        assert (request._obj.field_id, request._obj.scope_id) == (138, 0xFFFFFFFF)
        self.kib += 512
        request._obj.value = self.kib
        return 0

    def nvmlSystemGetDriverVersion(self, text, size):
        text.value = b"580.159.04"
        return 0 if size.value == 80 else 7


def test_telemetry_per_step():
    seen = telemetry.Telemetry(telemetry.Nvml(2, FakeNvml()), warmup=2, steps=6, period_s=0)
    for step in (0, 1, 2, 2, 4, 6):
        seen.sample(step)
    figures = seen.figures()
    assert figures["peak_memory_bytes"] == 2 << 30 and figures["idle_fraction"] == pytest.approx(0.25)
    # readings at steps 2, 4, 6: each reads both GPUs, so 2 * 50 J and 2 * 512 KiB apart, over 4 steps
    readings = [sum(50 * (2 * k + g) for g in (1, 2)) for k in range(3)]
    assert figures["energy_j_per_step"] == pytest.approx((readings[2] - readings[0]) / 4)
    assert figures["nvlink_bytes_per_step"] == round(2 * 2 * 2 * 512 * 1024 / 4)
    assert telemetry.Nvml(2, FakeNvml()).driver() == "580.159.04"


def test_idle_time_is_that_of_the_steps_after_warm_up():
    """Start-up, the steps before `warmup`, and what the process does after the last step are idle."""
    nvml, idle = FakeNvml(), []

    def utilization(handle, out):
        out._obj.gpu = 0 if idle else 100
        return 0

    nvml.nvmlDeviceGetUtilizationRates = utilization
    seen = telemetry.Telemetry(telemetry.Nvml(1, nvml), warmup=2, steps=5, period_s=0.05)
    idle.append("start")
    for step in (0, 1, 2):  # the last of these is asked within a period of warm-up's end
        seen.sample(step)
    idle.clear()
    time.sleep(0.06)
    for step in (3, 4):
        seen.sample(step)
    idle.append("end")
    for _ in range(3):
        seen.sample(5)
    assert seen.busy == [1.0, 1.0] and seen.figures()["idle_fraction"] == 0


def test_telemetry_of_a_machine_that_cannot_tell():
    assert telemetry.open_nvml(0) is None
    silent = telemetry.Telemetry(None, warmup=1, steps=9)
    silent.sample(5)
    assert set(silent.figures().values()) == {None}
    no_nvlink = telemetry.Telemetry(telemetry.Nvml(2, FakeNvml(nvlink=False)), warmup=1, steps=9)
    for step in (1, 2):
        no_nvlink.sample(step)
    assert no_nvlink.figures()["nvlink_bytes_per_step"] is None
    assert no_nvlink.figures()["energy_j_per_step"] > 0


def test_telemetry_field_layout():
    assert ctypes.sizeof(telemetry._FieldValue) == 40 and telemetry._FieldValue.value.offset == 32
