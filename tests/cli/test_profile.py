"""What the profile tool reads out of a trace: ranges, groups, idle time, host waits."""

import json

import pytest
import torch

from megatron_mok.bench import profile


def span(name, cat, ts, dur, tid=1, **args):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid, "args": args}


def launched(name, at, ts, dur, correlation, tid=1):
    """A kernel, and its launch on the host at `at`."""
    return [
        span("cudaLaunchKernel", "cuda_runtime", at, 1, tid=tid, correlation=correlation),
        span(name, "kernel", ts, dur, tid=7, correlation=correlation),
    ]


TRACE = [
    {"ph": "M", "name": "process_name"},
    span("MoE forward", "user_annotation", 100, 50),
    span("attention forward", "user_annotation", 10, 50),
    span("MoE backward begins", "user_annotation", 300, 0, tid=2),
    span("MoE backward ends", "user_annotation", 340, 0, tid=2),
    span("optimizer forward", "user_annotation", 400, 50),
    *launched("flash_fwd", 20, 1000, 100, 1),
    *launched("nvjet_tst_128x256", 110, 1100, 200, 2),
    *launched("_permute_kernel", 120, 1300, 100, 3),
    *launched("elementwise", 130, 1400, 50, 4),
    *launched("nvjet_tst_128x256", 310, 1500, 300, 5, tid=2),  # after a gap of 50
    *launched("elementwise", 350, 1700, 100, 6, tid=2),  # beside the one before; after the layer's backward
    *launched("multi_tensor_adam", 410, 1800, 200, 7),
    span("void mok::sm90::(anonymous namespace)::forward_kernel<2>(mok::P)", "kernel", 2000, 400, tid=7),
    span("void mok::(anonymous namespace)::schedule_kernel(mok::S)", "kernel", 2400, 20, tid=7),
    span("cudaStreamSynchronize", "cuda_runtime", 125, 9),
    span("aten::item", "cpu_op", 320, 4, tid=2),
    span("cudaDeviceSynchronize", "cuda_runtime", 500, 6),
    span("cudaMemcpyAsync", "cuda_runtime", 126, 9),  # does not wait
]


def test_groups_idle_time_and_waits_of_a_trace():
    found = profile.analyse(TRACE, steps=2)
    assert found["groups_ms"] == pytest.approx(
        {
            "mok forward": 0.2,
            "MoE GEMM": 0.25,
            "optimizer": 0.1,
            "attention": 0.05,
            "MoE permute": 0.05,
            "other": 0.05,
            "MoE other": 0.025,
            "mok schedule": 0.01,
        }
    )
    assert found["step_ms"] == pytest.approx(1.42 / 2) and found["idle_fraction"] == pytest.approx(50 / 1420)
    moe = {"forward_ms": 0.385, "backward_ms": 0.15, "share": (770 + 300) / 1420}
    assert found["moe"] == pytest.approx(moe)
    inside = {"cudaStreamSynchronize": [0.5, 0.0045], "aten::item": [0.5, 0.002]}
    assert found["waits"]["inside"] == {name: pytest.approx(figures) for name, figures in inside.items()}
    assert found["waits"]["elsewhere"] == {"cudaDeviceSynchronize": pytest.approx([0.5, 0.003])}
    first = found["kernels"][0]
    assert (first["name"], first["group"], first["calls"]) == ("nvjet_tst_128x256", "MoE GEMM", 1)
    json.dumps(found, allow_nan=False)


def test_a_trace_without_a_gpu_is_an_error():
    with pytest.raises(RuntimeError, match="no GPU activity"):
        profile.analyse([span("aten::add", "cpu_op", 1, 1)], steps=1)


def test_marks_of_torchs_profiler(tmp_path):
    """Forward and backward of a layer in a real trace: all and only its operators are inside."""

    class Layer(torch.nn.Module):
        def forward(self, x):
            return torch.special.erf(x), None

    Layer.forward = profile.ranged(profile.MOE, Layer.forward)
    layer, x = Layer(), torch.randn(8, requires_grad=True)
    with torch.profiler.profile() as profiler:
        for _ in range(2):
            out, _ = layer(x.sin())
            out.cos().sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ranges = profile.Ranges(event for event in events if event.get("ph") == "X")
    assert sorted(len(spans) for spans in ranges.spans.values()) in ([4], [2, 2])
    seen = {
        (event["name"], *ranges.at(event["tid"], event["ts"]))
        for event in events
        if event.get("cat") == "cpu_op"
    }
    inside = {(name, direction) for name, layer, direction in seen if layer == profile.MOE}
    assert ("aten::erf", "forward") in inside or ("aten::special_erf", "forward") in inside
    assert ("ErfBackward0", "backward") in inside
    outside = {name for name, layer, _ in seen if not layer}
    assert {"aten::sin", "SinBackward0", "CosBackward0"} <= outside
    assert not {"SinBackward0", "CosBackward0"} & {name for name, _ in inside}
