// The schedule blob and the order of work: the single truth for host and device.
//
// Blob (int32 words): [0] M rows, [1] NB row blocks, [2] NG row groups, [3] NU units, [4..15] 0; rows per local expert [L];
// block_start [L+1], group_start [L+1] (exclusive prefixes of ceil(n/128), ceil(n/8)); padding to 32 words; then the columns
// source rank [CAP], slot = token*K + k [CAP], probability bits [CAP] (-1, -1, 0 in padding rows), then per block
// expert << 8 | valid rows [CAP/128], and per unit its first block [CAP/128]. An expert's rows start at 128*block_start[e], in the order of
// (ordinal within (expert, source), source). Words past the counted blocks and units are unspecified.
#ifndef MEGATRON_MOK_LAYOUT_SCHEDULE_H_
#define MEGATRON_MOK_LAYOUT_SCHEDULE_H_

#include "common/constants.h"

namespace mok {

constexpr int kScheduleRows = 0, kScheduleBlocks = 1, kScheduleGroups = 2, kScheduleUnits = 3;
constexpr int kScheduleExperts = 16;  // first word of the per-expert rows

struct ScheduleLayout {
  int local_experts;
  int64_t cap;  // rows of the columns
  int64_t block_start, group_start, src, slot, prob, block, unit, ints;  // word offsets

  // The worst case: every route of every rank arrives here, and every expert wastes 127 rows.
  static MOK_HD ScheduleLayout make(int ranks, int64_t max_tokens, int top_k, int local_experts) {
    ScheduleLayout s;
    s.local_experts = local_experts;
    s.cap = round_up<int64_t>(ranks * max_tokens * top_k + int64_t(kBlockRows - 1) * local_experts, kBlockRows);
    s.block_start = kScheduleExperts + local_experts;
    s.group_start = s.block_start + local_experts + 1;
    s.src = round_up<int64_t>(s.group_start + local_experts + 1, 32);
    s.slot = s.src + s.cap;
    s.prob = s.slot + s.cap;
    s.block = s.prob + s.cap;
    s.unit = s.block + s.cap / kBlockRows;
    s.ints = s.unit + s.cap / kBlockRows;
    return s;
  }
};

// Position of the row with the given ordinal within (expert, source) among an expert's rows: rows of lower ordinal of all
// sources come first, then the same ordinal of lower sources. counts[s * stride] = rows of source s for this expert.
MOK_HD int row_position(const int* counts, int stride, int ranks, int source, int ordinal) {
  int position = 0;
  for (int s = 0; s < ranks; ++s) {
    const int n = counts[s * stride];
    position += (n < ordinal ? n : ordinal) + ((s < source && n > ordinal) ? 1 : 0);
  }
  return position;
}

MOK_HD int block_word(int expert, int valid_rows) { return expert << 8 | valid_rows; }
MOK_HD int block_expert(int word) { return word >> 8; }
MOK_HD int block_rows(int word) { return word & 0xff; }

// A ticket is one tile of one unit. Order: GEMM 1 of minibatch m, then GEMM 2 of minibatch m-1. Inside a minibatch units go
// in quads, column tiles outside units, so that neighbouring clusters share a weight tile while few rows are needed at once.
struct Tile {
  int phase;  // 0 GEMM 1, 1 GEMM 2
  int unit, n;
};

struct QuadTile {
  static constexpr int kQuad = 4;
  int unit, n;
  static MOK_HD QuadTile make(int t, int units, int columns) {
    const int quad = t / (kQuad * columns), left = units - quad * kQuad;
    const int width = left < kQuad ? left : kQuad;
    t -= quad * kQuad * columns;
    return {quad * kQuad + t % width, t / width};
  }
};

struct TicketOrder {
  int units, minibatch_units, n1, n2;  // n1, n2: column tiles of GEMM 1 and GEMM 2

  MOK_HD int64_t total() const { return int64_t(units) * (n1 + n2); }

  MOK_HD Tile decode(int ticket) const {
    const int batches = ceil_div(units, minibatch_units);
    const int last = units - (batches - 1) * minibatch_units;
    const int first = batches == 1 ? last : minibatch_units;
    int t = ticket;
    if (t < first * n1) return inside(0, 0, first, n1, t);
    t -= first * n1;
    if (batches == 1) return inside(1, 0, last, n2, t);
    const int g1 = minibatch_units * n1, g2 = minibatch_units * n2;
    const int middle = batches - 2;
    const int round = t / (g1 + g2);
    if (round < middle) {
      t -= round * (g1 + g2);
      return t < g1 ? inside(0, round + 1, minibatch_units, n1, t) : inside(1, round, minibatch_units, n2, t - g1);
    }
    t -= middle * (g1 + g2);
    if (t < last * n1) return inside(0, batches - 1, last, n1, t);
    t -= last * n1;
    if (t < g2) return inside(1, batches - 2, minibatch_units, n2, t);
    return inside(1, batches - 1, last, n2, t - g2);
  }

 private:
  MOK_HD Tile inside(int phase, int batch, int size, int columns, int t) const {
    const QuadTile q = QuadTile::make(t, size, columns);
    return {phase, batch * minibatch_units + q.unit, q.n};
  }
};

// A unit's valid rows are dealt out in granules of 64: the first half (rounded up) to CTA 0 of the cluster, the rest to CTA 1.
struct GranuleShare {
  int first, count;  // granules of the unit that this CTA computes
  static MOK_HD GranuleShare make(int unit_rows, int cta) {
    const int granules = ceil_div(unit_rows, kGranuleRows);
    const int half = (granules + 1) / 2;
    return cta == 0 ? GranuleShare{0, half} : GranuleShare{half, granules - half};
  }
};

// The backward goes by segments: up to `segment_units` consecutive units of one expert, whose rows a weight gradient sums in one turn;
// and by batches: consecutive whole segments of up to `batch_blocks` row blocks, at least one. Order of tickets in round b: h again where
// it was not saved (batch b), d_act (b), dx (b-1), and among all of these, evenly, the weight gradients (b-1). These are bound by
// memory, the others by arithmetic: side by side they hide each other. A ring of four times segment_units or batch_blocks
// holds batches b-1 and b whole; batch b needs slots that b-2 had, whose tickets are lower: no ticket waits for a higher one.
MOK_HD int segment_rows(int expert_rows, int rows_before, int segment_units) {
  const int left = expert_rows - rows_before, most = segment_units * kUnitRows;
  return left < most ? left : most;
}
// Units of each segment of an expert that needs several: about the same, so that no round is short.
MOK_HD int even_segment_units(int expert_rows, int most) {
  const int units = ceil_div(expert_rows, kUnitRows);
  return units <= most ? most : ceil_div(units, ceil_div(units, most));
}

// Ticket t of first + second ones, where those of the second kind are dealt evenly among the first: which kind, and its number there.
struct Interleave {
  bool second;
  int index;
  static MOK_HD Interleave make(int t, int first, int second) {
    const int64_t all = int64_t(first) + second;
    const int before = int(t * int64_t(second) / all), after = int((t + 1) * int64_t(second) / all);
    return {after > before, after > before ? before : t - before};
  }
};

// Tile t of `rows` x `columns` tiles, in bands of eight rows, so that neighbouring tickets share both operands.
struct BandedTile {
  int row, column;
  static MOK_HD BandedTile make(int t, int rows, int columns) {
    constexpr int kBand = 8;
    const int band = t / (kBand * columns), left = rows - band * kBand;
    const int height = left < kBand ? left : kBand;
    t -= band * kBand * columns;
    return {band * kBand + t % height, t / height};
  }
};

// Ring sizes that the proof of no deadlock needs (a ticket waits for lower tickets only): a block's x slot was last used by an
// earlier minibatch, its act slot by one whose GEMM 2 is ticketed earlier too. A unit is at most two blocks.
MOK_HD int min_ring_blocks(int minibatch_units) { return 2 * minibatch_units; }
MOK_HD int min_act_blocks(int minibatch_units) { return 4 * minibatch_units; }

}  // namespace mok
#endif  // MEGATRON_MOK_LAYOUT_SCHEDULE_H_
