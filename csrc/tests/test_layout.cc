// Offsets that do not overlap, capacities that hold, words that can be taken apart again.
#include <algorithm>
#include <set>
#include <utility>

#include "layout/places.h"
#include "layout/workspace.h"
#include "tests/harness.h"

using namespace mok;
using mok::test::Random;

namespace {

// (offset, bytes) regions in [0, total), given in ascending order.
void check_regions(const std::vector<std::pair<int64_t, int64_t>>& regions, int64_t total, int64_t alignment) {
  int64_t end = 0;
  for (const auto& [offset, bytes] : regions) {
    CHECK(offset >= end, offset, end);
    CHECK(offset % alignment == 0, offset);
    end = offset + bytes;
  }
  CHECK(end <= total, end, total);
}

MokProblem random_problem(Random& random) {
  MokProblem p{};
  p.num_ranks = int(random.of({1, 2, 3, 5, 8, 72}));
  p.num_experts = p.num_ranks * int(random.in(1, 40));
  p.top_k = int(random.in(1, MOK_MAX_TOP_K));
  p.hidden = 128 * int(random.in(1, 64));
  p.intermediate = 128 * int(random.in(1, 64));
  p.max_tokens = random.of({1, 7, 512, 8192, 40000, random.in(1, 100000)});
  p.num_sms = 2 * int(random.in(1, 74));
  return p;
}

}  // namespace

TEST(schedule_columns_do_not_overlap_in_100000_random_cases) {
  Random random(11);
  for (int i = 0; i < 100000; ++i) {
    const int ranks = int(random.in(1, MOK_MAX_RANKS)), local = int(random.in(1, MOK_MAX_LOCAL_EXPERTS));
    const int top_k = int(random.in(1, MOK_MAX_TOP_K));
    const int64_t tokens = random.in(0, 20000);
    const ScheduleLayout s = ScheduleLayout::make(ranks, tokens, top_k, local);
    CHECK(s.cap % kBlockRows == 0, s.cap);
    check_regions({{0, 16}, {kScheduleExperts, local}, {s.block_start, local + 1}, {s.group_start, local + 1}}, s.src, 1);
    check_regions({{s.src, s.cap}, {s.slot, s.cap}, {s.prob, s.cap}}, s.block, 32);
    check_regions({{s.block, s.cap / kBlockRows}, {s.unit, s.cap / kBlockRows}}, s.ints, 1);
  }
}

TEST(capacity_holds_the_worst_routing) {
  Random random(12);
  for (int i = 0; i < 20000; ++i) {
    const int ranks = int(random.in(1, 8)), local = int(random.in(1, 64)), top_k = int(random.in(1, 8));
    const int64_t tokens = random.in(0, 300);
    const ScheduleLayout s = ScheduleLayout::make(ranks, tokens, top_k, local);
    int64_t left = ranks * tokens * top_k, blocks = 0;  // every route of every rank comes here
    for (int e = 0; e < local; ++e) {
      int64_t rows = e == local - 1 ? left : std::min(left, random.of({0, 1, 129, random.in(0, 500)}));
      left -= rows;
      blocks += ceil_div<int64_t>(rows, kBlockRows);
    }
    CHECK(blocks * kBlockRows <= s.cap, blocks, s.cap);
  }
}

TEST(workspace_regions_do_not_overlap) {
  Random random(13);
  for (int i = 0; i < 20000; ++i) {
    const MokProblem p = random_problem(random);
    const int64_t routes = p.max_tokens * p.top_k, rows = p.max_tokens * p.hidden * 2;
    const SymmetricLayout s = SymmetricLayout::make(p.num_ranks, p.max_tokens, p.top_k, p.hidden);
    check_regions({{0, sizeof(Flags)},
                   {s.control, sizeof(Control)},
                   {s.tokens, p.num_ranks * 4},
                   {s.ids, p.num_ranks * routes * 4},
                   {s.probs, p.num_ranks * routes * 4},
                   {s.x, rows},
                   {s.dy, rows},
                   {s.slots, routes * p.hidden * 2},
                   {s.dp_slots, routes * 4}},
                  s.bytes, kRegionAlign);
    const Sizes sizes = Sizes::make(p);
    const LocalLayout l = LocalLayout::make(p, sizes);
    const int64_t experts = p.num_experts / p.num_ranks, words = l.max_blocks * 2 * 4;
    CHECK(l.chunks_per_rank * kScheduleChunk >= routes && (l.chunks_per_rank - 1) * kScheduleChunk < routes);
    check_regions({{l.chunk_counts, p.num_ranks * l.chunks_per_rank * experts * 4},
                   {l.source_counts, p.num_ranks * experts * 4},
                   {l.x_ready, words},
                   {l.act_done, words},
                   {l.y_done, words},
                   {l.x_ring, int64_t(sizes.ring_blocks) * kBlockRows * p.hidden * 2},
                   {l.act_ring, int64_t(sizes.act_blocks) * kBlockRows * p.intermediate * 2}},
                  l.bytes, kRegionAlign);
    const auto& b = l.backward;
    const int64_t ring = int64_t(sizes.backward_blocks) * kBlockRows;
    check_regions({{b.dy_ready, words},
                   {b.x_ready, words},
                   {b.h_done, words},
                   {b.dact_done, words},
                   {b.batch_read, words},
                   {b.turns_stored, weight_gradient_tiles(p.hidden, p.intermediate) * 4},
                   {b.dp_parts, l.max_blocks * kBlockRows * ceil_div(p.intermediate, kTileN) * 4},
                   {b.dy_ring, ring * p.hidden * 2},
                   {b.x_ring, ring * p.hidden * 2},
                   {b.dh_ring, ring * p.intermediate * 4},
                   {b.act_ring, ring * p.intermediate * 2},
                   {b.h_ring, ring * p.intermediate * 4}},
                  b.bytes, kRegionAlign);
  }
}

// Sections 2 and 7 of the design: 2*T*H*(2+K) bytes and little more.
TEST(symmetric_bytes_are_what_the_buffers_need) {
  for (const int ranks : {1, 8, 64}) {
    const int64_t tokens = 8192, hidden = 7168, top_k = 8;
    const SymmetricLayout s = SymmetricLayout::make(ranks, tokens, int(top_k), int(hidden));
    const int64_t rows = 2 * tokens * hidden * (2 + top_k), routing = ranks * tokens * top_k * 8;
    CHECK(s.bytes >= rows + routing && s.bytes <= rows + routing + (int64_t(1) << 20), s.bytes, rows, routing);
  }
}

TEST(row_position_is_the_rank_in_a_plain_sort) {
  Random random(14);
  for (int i = 0; i < 20000; ++i) {
    const int ranks = int(random.in(1, 9)), stride = int(random.in(1, 4));
    std::vector<int> counts(size_t(ranks) * stride, -7);  // other experts' counts must not be looked at
    std::vector<std::pair<int, int>> rows;                // (ordinal, source)
    for (int s = 0; s < ranks; ++s) {
      counts[size_t(s) * stride] = int(random.of({0, 1, random.in(0, 5), random.in(0, 20)}));
      for (int o = 0; o < counts[size_t(s) * stride]; ++o) rows.push_back({o, s});
    }
    std::sort(rows.begin(), rows.end());
    for (int at = 0; at < int(rows.size()); ++at)
      CHECK(row_position(counts.data(), stride, ranks, rows[at].second, rows[at].first) == at, at, i);
  }
}

TEST(block_words_can_be_taken_apart) {
  for (int expert : {0, 1, 127, MOK_MAX_LOCAL_EXPERTS - 1})
    for (int rows = 1; rows <= kBlockRows; ++rows) {
      const int word = block_word(expert, rows);
      CHECK(block_expert(word) == expert && block_rows(word) == rows, expert, rows);
    }
}

TEST(stamps_differ_where_anything_differs) {
  std::set<uint64_t> seen;
  const uint64_t calls[] = {1, 2, 255, 256, (1ull << 32) + 1, (1ull << 40) - 1};
  const uint32_t layers[] = {0, 1, 61, (1u << 20) - 1};
  for (uint64_t call : calls)
    for (uint32_t kind : {uint32_t(kCallForward), uint32_t(kCallBackward)})
      for (uint32_t layer : layers) {
        const uint64_t word = stamp(call, kind, layer);
        CHECK(word != 0 && stamp_call(word) == call, call, kind, layer);
        CHECK(seen.insert(word).second, call, kind, layer);
      }
}

TEST(places_of_experts_anywhere_in_memory) {
  Random random(11);
  for (int i = 0; i < 20000; ++i) {
    const int experts = int(random.in(1, 64));
    const uint64_t alignment = uint64_t(random.of({16, 32, 128, 256, 512, 1 << 20}));
    const int64_t range = random.of({1 << 24, int64_t(1) << 36, int64_t(1) << 47});  // an address has 47 bits
    std::vector<uint64_t> tensors;
    for (int e = 0; e < experts; ++e) tensors.push_back(uint64_t(random.in(0, range - 1)) / alignment * alignment);
    const Places places = Places::make(tensors.data(), experts, experts, 0);
    CHECK(places.aligned && places.far_stride() < uint64_t(1) << 40 && places.near_stride() % 16 == 0, places.shift);
    for (int e = 0; e < experts; ++e) {
      CHECK(places.address(e) == tensors[e], e, tensors[e], places.address(e));
      const uint64_t near = places.at[e] & 0xffffffffu, far = places.at[e] >> 32;
      CHECK(near < places.near_count && near < uint64_t(1) << 31 && far < places.far_count, near, far);
    }
    tensors[random.in(0, experts - 1)] += 8;
    CHECK(!Places::make(tensors.data(), experts, experts, 0).aligned);
    const uint64_t stacked[1] = {uint64_t(random.in(0, range - 1)) / 16 * 16}, bytes = 16 * uint64_t(random.in(1, 1 << 24));
    const Places each = Places::make(stacked, 1, experts, bytes);
    for (int e = 0; e < experts; ++e) CHECK(each.address(e) == stacked[0] + e * bytes, e);
  }
}
