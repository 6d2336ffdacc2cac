// The order of work: every tile once, and no ticket waits for a higher one.
#include <algorithm>
#include <cstdlib>

#include "layout/workspace.h"
#include "tests/harness.h"

using namespace mok;
using mok::test::Random;

namespace {

// Units of one routing: per unit its first block and how many blocks it has.
struct Units {
  std::vector<int> first, blocks;
  int total_blocks = 0;
  int size() const { return int(first.size()); }
};

Units random_units(Random& random) {
  Units units;
  const int experts = int(random.of({1, 2, 3, 8, 17}));
  for (int e = 0; e < experts; ++e) {
    const int rows = int(random.of({0, 1, random.in(1, 127), 128, 129, random.in(1, 600), random.in(1, 3000)}));
    for (int left = ceil_div(rows, kBlockRows); left > 0; left -= 2) {
      units.first.push_back(units.total_blocks);
      units.blocks.push_back(std::min(left, 2));
      units.total_blocks += units.blocks.back();
    }
  }
  return units;
}

// Ticket of every tile, [phase][unit * columns + n]; fails if a tile is missing or decoded twice.
struct Tickets {
  TicketOrder order;
  std::vector<int> of[2];

  explicit Tickets(const TicketOrder& o) : order(o) {
    const int columns[2] = {o.n1, o.n2};
    for (int phase : {0, 1}) of[phase].assign(size_t(o.units) * columns[phase], -1);
    for (int t = 0; t < order.total(); ++t) {
      const Tile tile = order.decode(t);
      CHECK(tile.phase == 0 || tile.phase == 1, tile.phase);
      CHECK(tile.unit >= 0 && tile.unit < o.units, tile.unit, o.units);
      CHECK(tile.n >= 0 && tile.n < columns[tile.phase], tile.n);
      int& slot = of[tile.phase][size_t(tile.unit) * columns[tile.phase] + tile.n];
      CHECK(slot == -1, slot, t);
      slot = t;
    }
  }
  int first(int phase, int unit) const { return *std::min_element(begin(phase, unit), end(phase, unit)); }
  int last(int phase, int unit) const { return *std::max_element(begin(phase, unit), end(phase, unit)); }

 private:
  int columns(int phase) const { return phase == 0 ? order.n1 : order.n2; }
  std::vector<int>::const_iterator begin(int phase, int unit) const { return of[phase].begin() + unit * columns(phase); }
  std::vector<int>::const_iterator end(int phase, int unit) const { return begin(phase, unit) + columns(phase); }
};

TicketOrder random_order(Random& random, int units) {
  return {units, int(random.of({1, 2, 3, 4, 5, 8, 12})), int(random.of({1, 2, 6, 16})), int(random.of({1, 2, 9}))};
}

// Every wait of a GEMM 1 or GEMM 2 tile is for lower tickets: the tiles that free its x and act slots, the act of its own unit.
bool waits_for_lower_tickets_only(const Units& units, const Tickets& tickets, int ring_blocks, int act_blocks) {
  std::vector<int> unit_of(units.total_blocks);
  for (int u = 0; u < units.size(); ++u)
    for (int b = 0; b < units.blocks[u]; ++b) unit_of[units.first[u] + b] = u;
  for (int u = 0; u < units.size(); ++u) {
    if (tickets.last(0, u) >= tickets.first(1, u)) return false;
    for (int b = units.first[u]; b < units.first[u] + units.blocks[u]; ++b) {
      if (b >= ring_blocks && tickets.last(0, unit_of[b - ring_blocks]) >= tickets.first(0, u)) return false;
      if (b >= act_blocks && tickets.last(1, unit_of[b - act_blocks]) >= tickets.first(0, u)) return false;
    }
  }
  return true;
}

}  // namespace

TEST(segments_of_an_expert_are_even_and_few) {
  Random random(5);
  for (int i = 0; i < 20000; ++i) {
    const int rows = random.in(1, 40000), most = random.in(1, 31);
    const int units = ceil_div(rows, kUnitRows), each = even_segment_units(rows, most);
    CHECK(each >= 1 && each <= most, rows, most);
    if (units <= most) {
      CHECK(each == most, rows, most);
      continue;
    }
    CHECK(ceil_div(units, each) == ceil_div(units, most), rows, most);
    const int last = units - (ceil_div(units, each) - 1) * each;
    CHECK(last >= 1 && each - last < ceil_div(units, each), rows, most);
    int covered = 0;
    while (covered < rows) covered += segment_rows(rows, covered, each);
    CHECK(covered == rows, rows, covered);
  }
}

TEST(tickets_cover_every_tile_once_in_100000_random_cases) {
  Random random(1);
  for (int i = 0; i < 100000; ++i) {
    const TicketOrder order{int(random.in(0, 40)), int(random.in(1, 13)), int(random.in(1, 5)), int(random.in(1, 5))};
    Tickets tickets(order);
  }
}

TEST(gemm2_of_a_minibatch_follows_gemm1_of_the_next) {
  Random random(2);
  for (int i = 0; i < 20000; ++i) {
    const TicketOrder order = random_order(random, int(random.in(1, 60)));
    const Tickets tickets(order);
    const int batches = ceil_div(order.units, order.minibatch_units);
    for (int u = 0; u < order.units; ++u) {
      const int next = std::min(u / order.minibatch_units + 1, batches - 1);
      const int first_of_next = next * order.minibatch_units;
      const int end_of_next = std::min(first_of_next + order.minibatch_units, order.units);
      for (int v = first_of_next; v < end_of_next; ++v) CHECK(tickets.last(0, v) < tickets.first(1, u), u, v);
      // ... and does not fall further behind.
      if (end_of_next < order.units) CHECK(tickets.last(1, u) < tickets.first(0, end_of_next), u, end_of_next);
    }
  }
}

TEST(no_ticket_waits_for_a_higher_one_with_the_smallest_rings) {
  Random random(3);
  for (int i = 0; i < 20000; ++i) {
    const Units units = random_units(random);
    const TicketOrder order = random_order(random, units.size());
    const Tickets tickets(order);
    const int ring = min_ring_blocks(order.minibatch_units), act = min_act_blocks(order.minibatch_units);
    CHECK(waits_for_lower_tickets_only(units, tickets, ring, act), i);
    CHECK(waits_for_lower_tickets_only(units, tickets, ring + int(random.in(0, 9)), act + int(random.in(0, 9))), i);
  }
}

TEST(half_of_the_smallest_rings_could_deadlock) {
  Random random(4);
  int ring_too_small = 0, act_too_small = 0;
  for (int i = 0; i < 2000; ++i) {
    const Units units = random_units(random);
    const TicketOrder order = random_order(random, units.size());
    const Tickets tickets(order);
    const int ring = min_ring_blocks(order.minibatch_units), act = min_act_blocks(order.minibatch_units);
    ring_too_small += !waits_for_lower_tickets_only(units, tickets, ring / 2, act);
    act_too_small += !waits_for_lower_tickets_only(units, tickets, ring, act / 2);
  }
  CHECK(ring_too_small > 0);
  CHECK(act_too_small > 0);
}

TEST(sizes_of_any_problem_keep_the_proof) {
  Random random(5);
  for (int i = 0; i < 20000; ++i) {
    MokProblem p{};
    p.num_ranks = int(random.of({1, 2, 3, 8, 72}));
    p.num_experts = p.num_ranks * int(random.of({1, 2, 5, 32}));
    p.top_k = int(random.of({1, 2, 8, 32}));
    p.hidden = 128 * int(random.in(1, 56));
    p.intermediate = 128 * int(random.in(1, 56));
    p.max_tokens = random.of({1, 64, 2048, 8192});
    p.num_sms = 2 * int(random.in(1, 74));
    p.minibatch_units = int(random.of({0, 0, 1, 3, 16}));
    p.ring_rows = random.of({0, 0, 1, 128, 5000, 1 << 20});
    const Sizes sizes = Sizes::make(p);
    const int64_t most = ScheduleLayout::make(p.num_ranks, p.max_tokens, p.top_k, p.num_experts / p.num_ranks).cap / kBlockRows;
    CHECK(sizes.minibatch_units >= 1 && sizes.ring_blocks >= 1 && sizes.act_blocks >= 1);
    CHECK(p.minibatch_units == 0 || sizes.minibatch_units == p.minibatch_units, sizes.minibatch_units);
    // Either a ring holds every block there can be, or it is as large as the proof needs.
    CHECK(sizes.ring_blocks == most || sizes.ring_blocks >= min_ring_blocks(sizes.minibatch_units), sizes.ring_blocks);
    CHECK(sizes.act_blocks == most || sizes.act_blocks >= min_act_blocks(sizes.minibatch_units), sizes.act_blocks);
    CHECK(sizes.ring_blocks <= most && sizes.act_blocks <= most);
    if (p.ring_rows > 0 && sizes.ring_blocks < most) CHECK(int64_t(sizes.ring_blocks) * kBlockRows >= p.ring_rows);
  }
}

TEST(granules_of_a_unit_are_shared_by_two_ctas) {
  for (int rows = 1; rows <= kUnitRows; ++rows) {
    const GranuleShare a = GranuleShare::make(rows, 0), b = GranuleShare::make(rows, 1);
    CHECK(a.first == 0 && b.first == a.count, rows);
    CHECK((a.count + b.count - 1) * kGranuleRows < rows && rows <= (a.count + b.count) * kGranuleRows, rows);
    CHECK(a.count >= b.count && a.count - b.count <= 1 && a.count <= 2, rows);
  }
}

TEST(interleaved_tickets_are_each_dealt_once_in_order_and_evenly) {
  Random random(12);
  for (int i = 0; i < 20000; ++i) {
    const int first = int(random.of({0, 1, random.in(0, 50), random.in(0, 500)}));
    const int second = int(random.of({0, 1, random.in(0, 50), random.in(0, 500)}));
    int next[2] = {0, 0};
    for (int t = 0; t < first + second; ++t) {
      const Interleave ticket = Interleave::make(t, first, second);
      CHECK(ticket.index == next[ticket.second]++, t, ticket.index);
      // At any time either kind is within one of its share.
      CHECK(std::abs(int64_t(next[1]) * (first + second) - int64_t(t + 1) * second) < first + second, t, next[1]);
    }
    CHECK(next[0] == first && next[1] == second, next[0], next[1]);
  }
  const int most = 1 << 30;  // no overflow
  CHECK(Interleave::make(most - 1, most / 2, most / 2).index == most / 2 - 1);
}
