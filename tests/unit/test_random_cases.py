"""The random cases that tests/gpu runs are what their seeds say; checked without a GPU."""

import collections

import pytest
import torch

from megatron_mok import native
from megatron_mok.native import library
from tests.gpu.world import (
    CORNERS,
    KINDS,
    SHAPES,
    WEIGHT_BYTES,
    backward_cases,
    forward_cases,
    knobs,
    random_variant,
    route,
)

CPU = torch.device("cpu")
SMS = 132  # of an H200


def test_cases_are_many_different_and_within_their_limits():
    forward, backward = forward_cases(), backward_cases()
    assert len(forward) == 320 and len(backward) == 300
    assert len(set(forward.values()) | set(backward.values())) == 620
    for case in [*forward.values(), *backward.values()]:
        weights = 6 * case.experts * case.hidden * case.intermediate
        assert weights <= (5e8 if case.seed >= 10_000 else WEIGHT_BYTES)
        assert case.most_tokens >= max(case.tokens)


def test_every_case_has_a_routed_row_and_some_have_ranks_without_tokens():
    generator = torch.Generator(CPU)
    for cases in (forward_cases(), backward_cases()):
        for case in cases.values():
            generator.manual_seed(case.seed)
            rows = 0
            for tokens in case.tokens:
                ids = route(case.routing, min(tokens, 8), case.top_k, case.experts, generator)
                rows += int(((ids >= 0) & (ids < case.experts)).sum())
            assert rows > 0, case
        assert sum(0 in case.tokens for case in cases.values()) >= 5


def test_cases_reach_the_ends():
    for cases in (forward_cases(), backward_cases()):
        seen = collections.Counter(case.routing for case in cases.values())
        assert min(seen[kind] for kind in KINDS) >= 20
        assert {case.ranks for case in cases.values()} == {1, 2, 3, 4, 8}
        assert min(case.local for case in cases.values()) == 1
        assert max(case.local for case in cases.values()) > 64
        assert {case.top_k for case in cases.values()} >= {1, 8, 16}
        assert any(case.act_limit for case in cases.values())
        assert {case.stacked for case in cases.values()} == {True, False}


def test_variants_reach_every_combination():
    seen = {random_variant(case.seed) for case in backward_cases().values()}
    assert len(seen) == 3 * 2 * 2  # save_capacity, dtype, accumulate


def test_nearly_every_token_of_a_crowd_chooses_the_same_experts_each_once():
    ids = route("crowded", 2304, 8, 64, torch.Generator(CPU).manual_seed(0)).sort(1).values
    together = (ids == torch.arange(8)).all(1).float().mean()
    assert 0.95 < together < 1 and int(ids.max()) > 8


@pytest.mark.skipif(not library.path().exists(), reason="the library is not built")
def test_the_library_takes_every_case(monkeypatch):
    """As many ranks and experts, with the default knobs and the others."""
    properties = type("Properties", (), {"multi_processor_count": SMS})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    for case in [*CORNERS.values(), *SHAPES.values(), *forward_cases().values(), *backward_cases().values()]:
        share = SMS // case.ranks // 2 * 2
        for settings in (native.Settings(num_sms=share), knobs(case, CPU)):
            assert max(settings.comm_sms, settings.backward_comm_sms) < settings.num_sms <= share
            native.workspace_layout(
                rank=case.ranks - 1, num_ranks=case.ranks, num_experts=case.experts, top_k=case.top_k,
                hidden=case.hidden, intermediate=case.intermediate, max_tokens=case.most_tokens,
                settings=settings,
            )  # fmt: skip
