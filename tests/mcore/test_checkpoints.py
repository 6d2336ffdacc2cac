"""Checkpoints pass freely between mok and alltoall and between expert-parallel sizes.

The distributed optimizer's own state does not resume without apex or Transformer Engine (an assertion of
Megatron's), so the losses after a resume are those of the plain optimizer.

B80's grouped form (TEGroupedMLP) needs Transformer Engine: its keys are the same by Megatron's construction,
and the subclass does not touch them; with one grouped weight (moe_single_grouped_weight) the configuration is
refused.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

BEFORE, AFTER = 3, 6
ONE_UNIT = 2.0**-21  # in the last place of an fp32 loss between 4 and 8


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Checkpoints of both dispatchers at EP 4 and EP 1, with the losses of their own continuation."""
    folder = tmp_path_factory.mktemp("checkpoints")
    result = {}
    for dispatcher, ep in (("mok", 4), ("alltoall", 4), ("mok", 1)):
        path = str(folder / f"{dispatcher}{ep}")
        losses = ranks.run(
            "checkpoints:save_and_go_on",
            dispatcher=dispatcher,
            folder=path,
            ep=ep,
            before=BEFORE,
            after=AFTER,
        )
        result[dispatcher, ep] = (path, losses[0])
    return result


ROUTES = [
    pytest.param("mok", 4, "mok", 4, marks=pytest.mark.short),
    pytest.param("mok", 4, "alltoall", 4, marks=pytest.mark.short),
    pytest.param("alltoall", 4, "mok", 4, marks=pytest.mark.short),
    ("mok", 4, "mok", 2),
    ("mok", 4, "alltoall", 2),
    ("mok", 4, "mok", 1),
    ("mok", 4, "alltoall", 1),
    ("alltoall", 4, "mok", 2),
    ("alltoall", 4, "mok", 1),
    ("mok", 1, "mok", 4),
    ("mok", 1, "alltoall", 2),
]


@pytest.mark.parametrize(("source", "saved_ep", "target", "ep"), ROUTES)
def test_resume_B80_B81(
    ranks: Any, saved: dict[str, Any], source: str, saved_ep: int, target: str, ep: int
) -> None:
    path, want = saved[source, saved_ep]
    # Across EP=1 Megatron's own optimizer state does not resume: see checkpoints.moments.
    optimizer = "moments" if 1 in (saved_ep, ep) and saved_ep != ep else "megatron"
    options = dict(folder=path, optimizer=optimizer, ep=ep, before=BEFORE, after=AFTER)
    got = ranks.run("checkpoints:resume", dispatcher=target, **options)[0]
    if source == target:
        assert got[0] == want[0], "the same weights and dispatcher: the same bits, whatever the layout"
    # Dispatchers add up a token's experts in different orders: a loss may round the other way.
    assert abs(got[0] - want[0]) <= ONE_UNIT
    if (source, saved_ep) == (target, ep):
        assert got == want
    # Layouts add up an expert's gradient in different orders, too, and each step builds on the last.
    assert max(abs(a - b) for a, b in zip(got, want, strict=True)) <= 2 * ONE_UNIT


def test_expert_keys_are_megatrons_B80(ranks: Any) -> None:
    ours = ranks.run("checkpoints:keys", dispatcher="mok", mtp_num_layers=1)
    stock = ranks.run("checkpoints:keys", dispatcher="alltoall", mtp_num_layers=1)
    assert ours == stock
    assert any("experts.experts.linear_fc1.weight" in value[0] for value in ours[0].values())


@pytest.mark.parametrize(("first", "second"), [("mok", "alltoall"), ("alltoall", "mok")])
def test_gate_and_up_order_B83(ranks: Any, tmp_path: pathlib.Path, first: str, second: str) -> None:
    folder = str(tmp_path / "pattern")
    for result in ranks.run("checkpoints:pattern_round_trip", first=first, second=second, folder=folder):
        assert all(result.values()), result
