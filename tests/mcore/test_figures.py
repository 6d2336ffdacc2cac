"""Figures for Megatron's writers, and NVTX ranges. That nothing waits for the GPU is a test of tests/gpu."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_mok
from megatron_mok import runtime
from megatron_mok.mcore import figures


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    figures.forget()
    yield
    figures.forget()


UNEQUAL, EQUAL = [[32, 24], [16, 0], [64, 8]], [[32, 24], [16, 24], [48, 48]]


@pytest.mark.parametrize(
    ("capacity", "counts", "beyond"),
    [(0.0, UNEQUAL, 6), (0.5, EQUAL, 6), (1.25, UNEQUAL, 3), (4.0, EQUAL, 0)],
)
def test_figures_are_what_the_routing_says(
    pair: Any, capacity: float, counts: list[list[int]], beyond: int
) -> None:
    """`beyond`: how many of the six calls recompute rows."""
    of_ranks = pair.run("figure_cases:in_a_group", save_capacity=capacity, counts=counts)
    calls = list(itertools.chain(*(r["want"] for r in of_ranks)))
    rows, recomputed = zip(*calls, strict=True)
    assert sum(rows) == 2 * sum(map(sum, counts)) and sum(n > 0 for n in recomputed) == beyond
    want = [
        ("mok/rows", sum(rows) / 6, 5),
        ("mok/rows-max", max(rows), 5),
        ("mok/rows-recomputed", sum(recomputed) / 6, 5),
        ("mok/workspace-bytes", 0, 5),
    ]
    assert of_ranks[0]["written"] == [None] * 3, "this rank has no writer"
    after = of_ranks[1]["written"]
    assert after == [[], want, want], "one step late, once; a step without calls has no figures"
    assert of_ranks[1]["logged"] == [({name: value}, step) for name, value, step in want]


RECOMPUTE = {
    "none": {},
    "moe": dict(recompute_granularity="selective", recompute_modules=["moe"]),
    "full": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
}


def test_a_call_counts_once(pair: Any) -> None:
    """Two MoE layers, two micro-batches, each recomputed by Megatron or not."""
    results = {
        kind: pair.run("figure_cases:trained", ep=2, pp=1, micro_batches=2, **options)
        for kind, options in RECOMPUTE.items()
    }
    for of_ranks in results.values():
        assert [r["calls"] for r in of_ranks] == [4, 4]
        assert [r["idle"] for r in of_ranks] == [0, 0], "nothing is recorded where nobody reads it"
        assert of_ranks[1]["scalars"] == results["none"][1]["scalars"]
        assert of_ranks[1]["scalars"]["mok/rows"] == 32 * 2 * 4, "tokens * top-k"
        assert of_ranks[1]["scalars"]["mok/rows-max"] > 32 * 2 * 4
        assert of_ranks[1]["all"] == 4


@pytest.mark.parametrize("experts", [[0, 1], [1, 0]], ids=["last", "first"])
def test_one_pipeline_stage_without_moe_layers(pair: Any, experts: list[int]) -> None:
    options = dict(num_layers=2, moe_layer_freq=experts, micro_batches=2)
    results = pair.run("figure_cases:trained", ep=1, pp=2, **options)
    assert [r["calls"] for r in results] == [2 * n for n in experts]
    assert results[1]["scalars"] == {
        "mok/rows": 256, "mok/rows-max": 256, "mok/rows-recomputed": 0, "mok/workspace-bytes": 0
    }  # fmt: skip


class Log:
    """Megatron's training_log, its writer, and what both did, in order."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.events.append((name, value, step))

    def __call__(self, loss_dict: Any, iteration: int, pg_collection: Any = None) -> str:
        self.events.append(iteration)
        return "flag"


@pytest.mark.short
@pytest.mark.parametrize("yaml", [False, True])
def test_megatrons_interval_and_writers(monkeypatch: pytest.MonkeyPatch, yaml: bool) -> None:
    import megatron.training

    log = Log()
    args = SimpleNamespace(tensorboard_dir="somewhere", tensorboard_log_interval=3)
    chooser = args
    if yaml:
        chooser = args.language_model = SimpleNamespace()
    chooser.moe_token_dispatcher_type = "mok"
    monkeypatch.setattr(megatron.training, "get_args", lambda: args)
    monkeypatch.setattr(megatron.training, "get_tensorboard_writer", lambda: log)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    training_log = figures.wrap(log)

    def steps(iterations: range) -> list[int]:
        recorded = []
        for iteration in iterations:
            if (observe := figures.recorder()) is not None:
                recorded.append(iteration)
                observe(torch.tensor([100 * iteration, 9, 50, 7]), 80)
            assert training_log({}, iteration) == "flag"
        return recorded

    assert steps(range(1, 8)) == [3, 6]
    of_3, of_6 = (
        [("mok/rows", n, n // 100), ("mok/rows-max", n, n // 100), ("mok/rows-recomputed", 320, n // 100),
         ("mok/workspace-bytes", 0, n // 100)] for n in (300, 600)
    )  # fmt: skip
    assert log.events == [1, 2, 3, *of_3, 4, 5, 6, *of_6, 7], (
        "before Megatron's of the next step: W&B's order"
    )

    figures.forget()
    args.tensorboard_dir = ""
    assert steps(range(1, 8)) == [], "nobody asked for a writer"
    args.wandb_project, chooser.moe_token_dispatcher_type = "some", "alltoall"
    assert steps(range(1, 8)) == []
    chooser.moe_token_dispatcher_type = "mok"
    assert steps(range(1, 8)) == [3, 6]


@pytest.mark.short
def test_register_finds_megatrons_training_log() -> None:
    from megatron.training import training

    stock = training.training_log
    assert "iteration" in inspect.signature(stock).parameters
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other tests have imported megatron.training
        megatron_mok.register()
    try:
        assert inspect.unwrap(training.training_log) is stock and training.training_log is not stock
        figures.after_step(1)
        assert figures.recorder() is not None
    finally:
        megatron_mok.unregister()
    assert training.training_log is stock and figures.recorder() is None


def test_a_captured_call_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    figures.after_step(1)
    observe = figures.recorder()
    assert observe is not None
    observe(SimpleNamespace(is_cuda=True), 8)  # type: ignore[arg-type]
    assert not figures._calls
    observe(torch.zeros(64, dtype=torch.int32), 8)
    assert [t.untyped_storage().nbytes() for t in figures._calls[8]] == [12], "the table itself is not kept"


def test_workspace_bytes_of_open_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = dict(hidden=128, top_k=4, max_tokens=256, dtype=torch.bfloat16)

    def comm(**changes: Any) -> Any:
        return SimpleNamespace(**sizes | dict(size=8, handle=3, backend="cuda") | changes)

    comms = [comm(), comm(hidden=256), comm(handle=None), comm(backend="reference")]
    monkeypatch.setattr("megatron_mok.runtime.comm._comms", dict(enumerate(comms)))
    want = [runtime.workspace_bytes(num_ranks=8, **sizes | {"hidden": h}) for h in (128, 256)]
    assert runtime.open_workspace_bytes() == sum(want)


def test_nvtx_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call's kernels, and nothing else, stand between push and pop."""
    from megatron_mok.ops import autograd
    from megatron_mok.runtime import layer

    events: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: events.append(name) or 1)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: events.append("end") or 0)
    backward = autograd.moe_backward
    monkeypatch.setattr(autograd, "moe_backward", lambda *a: events.append("backward") or backward(*a))
    comm = runtime.get_comm(
        None, hidden=8, top_k=1, num_experts=2, max_tokens=4, device="cpu", dtype=torch.float32,
        config=megatron_mok.MokConfig(),
    )  # fmt: skip
    x = torch.randn(4, 8, requires_grad=True)
    w1, w2 = torch.randn(2, 8, 8), torch.randn(2, 8, 4)
    ids, probs = torch.tensor([[0], [1], [1], [0]]), torch.rand(4, 1)

    def call(number: int, value: torch.Tensor) -> torch.Tensor:
        return runtime.moe(value, ids, probs, w1, w2, comm=comm, num_experts=2, layer=number)

    call(1, x).sum().backward()
    assert events == ["backward"], "none on the CPU"
    want, x.grad = x.grad, None
    events.clear()
    monkeypatch.setattr(layer, "_is_traced", lambda _: True)
    call(1, x).sum().backward()
    torch.testing.assert_close(x.grad, want, rtol=0, atol=0)
    assert events == ["mok forward layer 1", "end", "mok backward layer 1", "backward", "end"]
    events.clear()
    call(2, call(1, x)).sum().backward()
    assert events[:4] == ["mok forward layer 1", "end", "mok forward layer 2", "end"]
    assert events[4:] == [e for n in (2, 1) for e in (f"mok backward layer {n}", "backward", "end")]
    events.clear()
    with torch.no_grad():
        call(7, x)
    assert events == ["mok forward layer 7", "end"]
