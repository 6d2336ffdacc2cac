"""The random cases that tests/gpu runs are what their seeds say; checked without a GPU."""

import collections

import torch

from tests.gpu.world import WEIGHT_BYTES, backward_cases, forward_cases, route

CPU = torch.device("cpu")


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
        assert min(seen[kind] for kind in ("random", "absent", "skewed", "repeated", "one expert")) >= 20
        assert {case.ranks for case in cases.values()} == {1, 2, 3, 4, 8}
        assert min(case.local for case in cases.values()) == 1
        assert max(case.local for case in cases.values()) > 64
        assert {case.top_k for case in cases.values()} >= {1, 8, 16}
        assert any(case.act_limit for case in cases.values())
        assert {case.stacked for case in cases.values()} == {True, False}
