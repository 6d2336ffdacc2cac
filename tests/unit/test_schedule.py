"""The schedule against a plain loop: integers, so every comparison is exact."""

import random

import pytest
import torch

from megatron_mok.reference import schedule


def loop_table(ids, probs, tokens, rank, num_experts, max_tokens):
    """The table of docs/schedule.md written as a loop over Python integers."""
    num_ranks, top_k = len(ids), ids.shape[2]
    num_local = num_experts // num_ranks
    rows = [[] for _ in range(num_local)]
    for source in range(num_ranks):
        seen = [0] * num_local
        for token in range(int(tokens[source])):
            for k in range(top_k):
                e = int(ids[source, token, k]) - rank * num_local
                if 0 <= e < num_local:
                    rows[e].append((seen[e], source, token * top_k + k, float(probs[source, token, k])))
                    seen[e] += 1
    size = -(-(num_ranks * max_tokens * top_k + 127 * num_local) // 128) * 128
    n = [len(r) for r in rows]
    block_start, group_start = [0], [0]
    for count in n:
        block_start.append(block_start[-1] + -(-count // 128))
        group_start.append(group_start[-1] + -(-count // 8))
    block, unit = [], []
    for e, count in enumerate(n):
        for b in range(block_start[e + 1] - block_start[e]):
            block.append(e << 8 | min(128, count - 128 * b))
            unit += [block_start[e] + b] if b % 2 == 0 else []
    head = [sum(n), block_start[-1], group_start[-1], len(unit), *[0] * 12, *n, *block_start, *group_start]
    head += [0] * (-len(head) % 32)
    src, slot, p = [-1] * size, [-1] * size, [0.0] * size
    for e, mine in enumerate(rows):
        for i, (_, source, s, prob) in enumerate(sorted(mine)):
            row = 128 * block_start[e] + i
            src[row], slot[row], p[row] = source, s, prob
    p_bits = torch.tensor(p, dtype=torch.float32).view(torch.int32)
    last = [column + [0] * (size // 128 - len(column)) for column in (block, unit)]
    whole = torch.cat(
        [torch.tensor(head + src + slot, dtype=torch.int32), p_bits, torch.tensor(sum(last, []))]
    )
    return whole.int(), len(head), block_start[-1]


def equal_where_specified(got, want, header, blocks):
    assert got.dtype == torch.int32 and got.shape == want.shape
    assert torch.equal(got[:header], want[:header])
    size, units = (got.numel() - header) * 128 // (3 * 128 + 2), int(want[3])
    starts = [header + i * size for i in range(4)]
    for first, used in [(start, 128 * blocks) for start in starts[:3]] + [
        (starts[3], blocks),
        (starts[3] + size // 128, units),
    ]:
        assert torch.equal(got[first : first + used], want[first : first + used])


def random_case(seed):
    rng = random.Random(seed)
    num_ranks = rng.choice([1, 1, 2, 3, 4, 8])
    num_experts = num_ranks * rng.choice([1, 2, 3, 7, 33])
    top_k = rng.choice([1, 2, 3, 8])
    tokens = torch.tensor([rng.choice([0, 1, 5, 37, 130]) for _ in range(num_ranks)])
    width = int(tokens.max()) + rng.choice([0, 3])
    max_tokens = width + rng.choice([0, 11])
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, num_experts, (num_ranks, width, top_k), generator=generator, dtype=torch.int32)
    if rng.random() < 0.3:  # skew: most routes on one expert
        ids[torch.rand(ids.shape, generator=generator) < 0.8] = rng.randrange(num_experts)
    probs = torch.rand(ids.shape, generator=generator)
    return ids, probs, tokens, num_experts, max_tokens


@pytest.mark.parametrize("seed", range(40))
def test_random_routing_equals_the_loop_on_every_rank(seed):
    ids, probs, tokens, num_experts, max_tokens = random_case(seed)
    for rank in range(len(ids)):
        got = schedule.build(ids, probs, tokens, rank=rank, num_experts=num_experts, max_tokens=max_tokens)
        want, header, blocks = loop_table(ids, probs, tokens, rank, num_experts, max_tokens)
        equal_where_specified(got, want, header, blocks)


def one_rank(ids, num_experts, max_tokens=None):
    ids = torch.as_tensor(ids, dtype=torch.int32).unsqueeze(0)
    probs = torch.full(ids.shape, 0.25)
    tokens = torch.tensor([ids.shape[1]])
    max_tokens = max_tokens or max(ids.shape[1], 1)
    got = schedule.build(ids, probs, tokens, rank=0, num_experts=num_experts, max_tokens=max_tokens)
    want, header, blocks = loop_table(ids, probs, tokens, 0, num_experts, max_tokens)
    equal_where_specified(got, want, header, blocks)
    return schedule.rows(got, num_experts)


def test_B08_repeated_experts_are_routes_of_their_own_and_foreign_ids_are_none():
    ids = [[0, 0, 0, 0], [2, 2, 3, 3], [8, 9, 2**31 - 1, -(2**31)], [7, -1, -2, 1]]
    rows = one_rank(ids, num_experts=8)
    assert rows.per_expert.tolist() == [4, 1, 2, 2, 0, 0, 0, 1]
    assert rows.slot.tolist() == [0, 1, 2, 3, 15, 4, 5, 6, 7, 12]


def test_B09_absent_routes_take_no_row():
    ids = torch.randint(0, 8, (512, 2), generator=torch.Generator().manual_seed(0))
    ids[::3, 1] = -1
    ids[::7] = -1
    rows = one_rank(ids, num_experts=8)
    assert torch.equal(rows.per_expert, torch.bincount(ids[ids >= 0], minlength=8))
    assert torch.equal(rows.slot.sort().values, (ids.reshape(-1) >= 0).nonzero().squeeze(1))


@pytest.mark.parametrize("num_experts", [63, 64, 65, 128, 256, 512, 896, 1024, 1025], ids="B15-E{}".format)
def test_many_experts(num_experts):
    ids = torch.randint(0, num_experts, (1024, 8), generator=torch.Generator().manual_seed(num_experts))
    rows = one_rank(ids, num_experts)
    assert torch.equal(rows.per_expert, torch.bincount(ids.reshape(-1), minlength=num_experts))


@pytest.mark.parametrize("tokens", [0, 1, 255, 257, 511, 513, 3552], ids="B18-T{}".format)
def test_any_token_count_and_padding_rows_are_not_counted(tokens):
    ids = torch.randint(0, 4, (tokens, 2), generator=torch.Generator().manual_seed(tokens))
    rows = one_rank(ids, 4)
    assert rows.per_expert.sum() == 2 * tokens == rows.slot.numel()


def test_B07_all_tokens_on_one_rank_fit_the_capacity():
    ids = torch.zeros(4, 64, 2, dtype=torch.int32)
    ids[..., 1] = 1
    table = schedule.build(
        ids, torch.ones(ids.shape), torch.full((4,), 64), rank=0, num_experts=8, max_tokens=64
    )
    rows = schedule.rows(table, 2)
    assert rows.per_expert.tolist() == [256, 256]
    assert schedule.capacity(4, 64, 2, 2) >= 512
    # neighbouring rows come from different ranks
    assert rows.source[:8].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_rows_beyond_a_rank_s_tokens_are_not_read():
    ids = torch.zeros(2, 16, 1, dtype=torch.int32)
    probs = torch.full(ids.shape, float("nan"))
    probs[0, :3], probs[1, :5] = 1.0, 2.0
    table = schedule.build(ids, probs, torch.tensor([3, 5]), rank=0, num_experts=2, max_tokens=16)
    rows = schedule.rows(table, 1)
    assert rows.p.tolist() == [1, 2, 1, 2, 1, 2, 2, 2]
    assert rows.slot.tolist() == [0, 0, 1, 1, 2, 2, 3, 4]


def test_saved_index_counts_groups_of_eight():
    ids = [[0]] * 9 + [[1]] * 3 + [[2]]
    rows = one_rank(ids, num_experts=3)
    assert rows.saved_index().tolist() == [*range(9), 16, 17, 18, 24]


def test_B56_table_is_linear_in_tokens_and_ranks():
    def words(ranks, tokens):
        return schedule.table_words(ranks, tokens, 8, 32)

    fixed = words(1, 0)
    assert words(8, 4096) - fixed == 2 * (words(8, 2048) - fixed) == 2 * (words(4, 4096) - fixed)
    # the figure of the design: 12 bytes for each possible row, and two words for each block of 128
    assert 4 * words(8, 8192) == pytest.approx(12 * 8 * 8192 * 8, rel=0.02)


def test_wrong_shapes_are_value_errors():
    ids, probs = torch.zeros(2, 4, 1), torch.zeros(2, 4, 1)
    with pytest.raises(ValueError, match=r"need \[R, T, K\]"):
        schedule.build(ids, probs[:, :3], torch.tensor([4, 4]), rank=0, num_experts=2, max_tokens=4)
    with pytest.raises(ValueError, match="multiple of the ranks"):
        schedule.build(ids, probs, torch.tensor([4, 4]), rank=0, num_experts=3, max_tokens=4)
    with pytest.raises(ValueError, match="no more tokens than the maximum"):
        schedule.build(ids, probs, torch.tensor([4, 4]), rank=0, num_experts=2, max_tokens=3)
