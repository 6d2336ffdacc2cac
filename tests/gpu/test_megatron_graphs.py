"""CUDA graphs: torch's of a whole MoE layer, and Megatron-Core's own without Transformer Engine.

One process (megatron_graphs) runs every case; the tests below look at what it left. A graph is captured once
and replayed with other tokens and other routes, and everything must have the bits of eager calls.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 150

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-Core is not installed"),
    pytest.mark.timeout(LIMIT_S + 30),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("graphs")
    file, log = folder / "results.json", folder / "log"
    environment = os.environ | {
        "TORCHDYNAMO_DISABLE": "1",  # compiling Megatron's small functions takes longer than all cases
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # repeatable
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    with log.open("w") as out:
        try:
            subprocess.run(
                [sys.executable, "-m", "tests.gpu.megatron_graphs", file],
                cwd=ROOT,
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            pass  # the cases that were reached still count
    assert file.exists(), f"no case ended:\n{log.read_text()[-3000:]}"
    return json.loads(file.read_text())


def found(results: dict, name: str):
    result = results.get(name, "not reached: the process ended before")
    assert not isinstance(result, str), f"{name}: {result}"
    return result


@pytest.mark.parametrize("name", ["callables", "main_grad"])
def test_B60_whole_layer_replays_with_other_routes(results, name):
    """Router, shared expert and experts, forward and backward; with main_grad as one graph of both."""
    case = found(results, name)
    assert case["routings"] >= 20, "every replay has other routes"
    assert case["differ"] == []


@pytest.mark.parametrize(
    ("name", "graphs"),
    [
        ("full iteration", 1),
        ("moe_router", 0),  # see test_B59_moe_router_captures_nothing_in_gpt_layers
        ("moe_router, MoE layers", 4),  # of each of two what comes before the experts and what comes after
        ("whole layers", 3),
    ],
)
def test_B59_megatrons_graphs_change_no_bit(results, name, graphs):
    graphed, eager = found(results, name), found(results, "eager")
    assert graphed["graphs"] == graphs and eager["graphs"] == 0
    for key in ("losses", "norms", "weights"):
        assert graphed[key] == eager[key], key


def test_B59_moe_router_captures_nothing_in_gpt_layers(results):
    """Megatron's, whatever the dispatcher: the local implementation captures parts of a MoE layer only in a
    MoETransformerLayer, which the specs of its hybrid models name and those of its GPT models do not.
    """
    assert [found(results, name)["graphs"] for name in ("moe_router", "moe_router, alltoall")] == [0, 0]
