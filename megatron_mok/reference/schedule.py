"""The schedule: which (source rank, token, k) each row of a local expert computes, in which order.

Integers only, so it is exact: the table made here and the one made by the GPU are equal bit for bit
(docs/schedule.md has the layout of the table).

Symbols: R ranks, T tokens, K experts per token, E experts, L = E/R experts here, M rows that arrive here.
A route is one (source rank, token, k); its slot is token * K + k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ROWS = 128  # an expert starts on a row block; the tile height of the GEMMs
GROUP_ROWS = 8  # rows of h are saved, or recomputed, by groups
UNIT_BLOCKS = 2  # a unit is up to two row blocks of one expert: what one cluster of the kernels computes
_COUNTERS = 16  # words 0..15: M, row blocks, groups, units, then zeros
_ALIGN_WORDS = 32  # the columns start on 128 bytes


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def capacity(num_ranks: int, max_tokens: int, top_k: int, num_local: int) -> int:
    """Rows that the columns of the table have room for: every route of every rank, plus the padding."""
    return _round_up(num_ranks * max_tokens * top_k + (BLOCK_ROWS - 1) * num_local, BLOCK_ROWS)


def header_words(num_local: int) -> int:
    """Words in front of the columns: counters, rows per expert, block starts, group starts."""
    return _round_up(_COUNTERS + num_local + 2 * (num_local + 1), _ALIGN_WORDS)


def table_words(num_ranks: int, max_tokens: int, top_k: int, num_local: int) -> int:
    """Length of the table in int32 words."""
    rows = capacity(num_ranks, max_tokens, top_k, num_local)
    return header_words(num_local) + 3 * rows + 2 * (rows // BLOCK_ROWS)


def saved_rows(save_capacity: float, tokens: int, top_k: int) -> int:
    """Rows S of h that are kept for backward: save_capacity * T * K, rounded up to whole groups."""
    return _round_up(int(save_capacity * tokens * top_k), GROUP_ROWS)


@dataclass(frozen=True)
class Rows:
    """The M rows of a table without its padding, in schedule order.

    per_expert [L] int64   rows of each local expert
    expert     [M] int64   local expert of a row
    index      [M] int64   row number inside its expert
    source     [M] int64   rank that the token comes from
    slot       [M] int64   token * K + k on that rank
    p          [M] fp32    router probability
    group_start [L+1] int64  first group of GROUP_ROWS rows of each expert
    """

    per_expert: Tensor
    expert: Tensor
    index: Tensor
    source: Tensor
    slot: Tensor
    p: Tensor
    group_start: Tensor

    def saved_index(self) -> Tensor:
        """[M] int64: where row i stands in the saved h, which keeps whole groups, expert by expert."""
        return GROUP_ROWS * self.group_start[self.expert] + self.index


def _starts(rows_per_expert: Tensor, unit: int) -> Tensor:
    """Exclusive prefix sum, with the total at the end, of how many units of rows each expert needs."""
    units = (rows_per_expert + (unit - 1)) // unit
    return torch.cat([units.new_zeros(1), units.cumsum(0)])


def build(
    ids: Tensor, probs: Tensor, tokens: Tensor, *, rank: int, num_experts: int, max_tokens: int
) -> Tensor:
    """The table of `rank`, int32 [table_words], from the routing of all ranks.

    ids     [R, T, K] int     expert of each route; values outside [0, E) (as -1) are no route
    probs   [R, T, K] fp32    router probabilities
    tokens  [R] int           tokens of each rank; rows of ids at or after it are not read
    max_tokens                the largest number of tokens that a rank may have, >= T

    Inside an expert, rows go by (ordinal within (expert, source), source): neighbours come from different
    ranks. ValueError where the shapes do not fit.
    """
    num_ranks, width, top_k = ids.shape
    if probs.shape != ids.shape or tokens.shape != (num_ranks,):
        raise ValueError(
            f"schedule: ids {tuple(ids.shape)}, probs {tuple(probs.shape)}, tokens {tuple(tokens.shape)}: "
            "need [R, T, K], [R, T, K] and [R]"
        )
    if num_experts % num_ranks or width > max_tokens:
        raise ValueError(
            f"schedule: {num_experts} experts on {num_ranks} ranks, {width} tokens of at most {max_tokens}: "
            "need a multiple of the ranks and no more tokens than the maximum"
        )
    num_local = num_experts // num_ranks
    slots = width * top_k
    local = ids.reshape(num_ranks, slots).long() - rank * num_local
    present = torch.arange(slots, device=ids.device) < tokens.long().unsqueeze(1) * top_k
    here = present & (local >= 0) & (local < num_local)

    source, slot = here.nonzero(as_tuple=True)  # ordered by (source, slot)
    expert = local[here]
    num_rows = expert.numel()
    pair = expert * num_ranks + source
    per_pair = torch.bincount(pair, minlength=num_local * num_ranks)
    by_pair = pair.argsort(stable=True)
    first = per_pair.cumsum(0) - per_pair
    ordinal = torch.empty_like(pair)
    ordinal[by_pair] = torch.arange(num_rows, device=ids.device) - first[pair[by_pair]]
    order = ((expert * max(slots, 1) + ordinal) * num_ranks + source).argsort()
    source, slot, expert = source[order], slot[order], expert[order]

    per_expert = per_pair.view(num_local, num_ranks).sum(1)
    block_start, group_start = _starts(per_expert, BLOCK_ROWS), _starts(per_expert, GROUP_ROWS)
    index = torch.arange(num_rows, device=ids.device) - (per_expert.cumsum(0) - per_expert)[expert]
    row = BLOCK_ROWS * block_start[expert] + index

    size = capacity(num_ranks, max_tokens, top_k, num_local)
    header = header_words(num_local)
    blocks = block_start.diff()
    unit_start = _starts(blocks, UNIT_BLOCKS)
    table = torch.zeros(
        table_words(num_ranks, max_tokens, top_k, num_local), dtype=torch.int32, device=ids.device
    )
    counters = torch.stack([per_expert.sum(), block_start[-1], group_start[-1], unit_start[-1]])
    table[:4] = counters.int()
    lists = torch.cat([per_expert, block_start, group_start])
    table[_COUNTERS : _COUNTERS + lists.numel()] = lists.int()
    columns = table[header : header + 3 * size].view(3, size)
    columns[:2] = -1
    columns[0, row] = source.int()
    columns[1, row] = slot.int()
    columns[2, row] = probs.reshape(num_ranks, slots)[source, slot].float().view(torch.int32)
    block_column, unit_column = table[header + 3 * size :].view(2, size // BLOCK_ROWS)
    of_block = torch.repeat_interleave(torch.arange(num_local, device=ids.device), blocks)
    block = torch.arange(of_block.numel(), device=ids.device)
    left = per_expert[of_block] - BLOCK_ROWS * (block - block_start[of_block])
    block_column[: block.numel()] = (of_block << 8 | left.clamp(max=BLOCK_ROWS)).int()
    of_unit = torch.repeat_interleave(torch.arange(num_local, device=ids.device), unit_start.diff())
    unit = torch.arange(of_unit.numel(), device=ids.device)
    unit_column[: unit.numel()] = (block_start[of_unit] + UNIT_BLOCKS * (unit - unit_start[of_unit])).int()
    return table


def rows(table: Tensor, num_local: int) -> Rows:
    """The rows of a table (see `build`). Reads M on the host."""
    header = header_words(num_local)
    lists = table[_COUNTERS : _COUNTERS + 3 * num_local + 2].long()
    per_expert, block_start, group_start = lists.split([num_local, num_local + 1, num_local + 1])
    device = table.device
    expert = torch.repeat_interleave(torch.arange(num_local, device=device), per_expert)
    index = torch.arange(expert.numel(), device=device) - (per_expert.cumsum(0) - per_expert)[expert]
    size = (table.numel() - header) * BLOCK_ROWS // (3 * BLOCK_ROWS + 2)
    columns = table[header : header + 3 * size].view(3, size)[:, BLOCK_ROWS * block_start[expert] + index]
    return Rows(
        per_expert=per_expert,
        expert=expert,
        index=index,
        source=columns[0].long(),
        slot=columns[1].long(),
        p=columns[2].contiguous().view(torch.float32),
        group_start=group_start,
    )
