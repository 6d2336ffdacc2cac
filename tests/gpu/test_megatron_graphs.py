"""CUDA graphs: torch's of a whole MoE layer, and Megatron-Core's own without Transformer Engine.

One process (megatron_graphs) runs every case; the tests below look at what it left. A graph is captured once
and replayed with other tokens and other routes, and everything must have the bits of eager calls.
"""

import importlib.util

import pytest

from tests.gpu.programs import found, results_of

LIMIT_S = 150

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-Core is not installed"),
    pytest.mark.timeout(LIMIT_S + 30),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("graphs")
    return results_of(
        "tests.gpu.megatron_graphs", folder, LIMIT_S, CUBLAS_WORKSPACE_CONFIG=":4096:8"
    )  # repeatable


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
