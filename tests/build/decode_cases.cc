// The arithmetic that decodes tickets of the backward and places rows, over 100,000 random cases each, against plain loops.
#include <algorithm>
#include <utility>
#include <vector>

#include "layout/schedule.h"
#include "tests/harness.h"

using namespace mok;
using mok::test::Random;

constexpr int kCases = 100000;

TEST(banded_tiles_cover_every_tile_once) {
  Random random(21);
  for (int i = 0; i < kCases; ++i) {
    const int rows = int(random.in(1, 30)), columns = int(random.in(1, 20));
    std::vector<bool> seen(size_t(rows) * columns);
    for (int t = 0; t < rows * columns; ++t) {
      const BandedTile tile = BandedTile::make(t, rows, columns);
      CHECK(0 <= tile.row && tile.row < rows && 0 <= tile.column && tile.column < columns, rows, columns, t);
      CHECK(!seen[size_t(tile.row) * columns + tile.column], rows, columns, t);
      seen[size_t(tile.row) * columns + tile.column] = true;
    }
  }
}

TEST(interleaved_tickets_keep_their_order_and_are_dealt_evenly) {
  Random random(22);
  for (int i = 0; i < kCases; ++i) {
    const int first = int(random.of({0, 1, random.in(0, 200)})), second = int(random.of({0, 1, random.in(0, 200)}));
    int seen[2] = {};
    for (int t = 0; t < first + second; ++t) {
      const Interleave turn = Interleave::make(t, first, second);
      CHECK(turn.index == seen[turn.second], first, second, t);
      ++seen[turn.second];
      CHECK(int64_t(seen[1]) * (first + second) <= int64_t(t + 1) * second, first, second, t);
      CHECK(int64_t(seen[1] + 1) * (first + second) > int64_t(t + 1) * second, first, second, t);
    }
    CHECK(seen[0] == first && seen[1] == second, first, second);
  }
}

TEST(segments_cover_an_expert_in_even_pieces) {
  Random random(23);
  for (int i = 0; i < kCases; ++i) {
    const int rows = int(random.in(1, 60000)), most = int(random.in(1, 31)), each = even_segment_units(rows, most);
    const int units = ceil_div(rows, kUnitRows), pieces = ceil_div(units, each);
    CHECK(1 <= each && each <= most && pieces == ceil_div(units, most), rows, most, each);
    int covered = 0, made = 0;
    while (covered < rows) {
      const int n = segment_rows(rows, covered, each);
      CHECK(n > 0 && n <= most * kUnitRows && covered % (each * kUnitRows) == 0, rows, most, covered);
      covered += n;
      ++made;
    }
    CHECK(covered == rows && made == pieces, rows, most, made);
  }
}

TEST(row_positions_are_those_of_a_sort) {
  Random random(24);
  for (int i = 0; i < kCases; ++i) {
    const int ranks = int(random.in(1, 8));
    std::vector<int> counts;
    std::vector<std::pair<int, int>> rows;  // (ordinal, source)
    for (int s = 0; s < ranks; ++s) {
      counts.push_back(int(random.of({0, 1, random.in(0, 6)})));
      for (int o = 0; o < counts[s]; ++o) rows.push_back({o, s});
    }
    std::sort(rows.begin(), rows.end());
    for (int at = 0; at < int(rows.size()); ++at)
      CHECK(row_position(counts.data(), 1, ranks, rows[at].second, rows[at].first) == at, at, i);
  }
}

TEST(quads_cover_every_tile_of_every_unit_once) {
  Random random(25);
  for (int i = 0; i < kCases; ++i) {
    const int units = int(random.in(1, 24)), columns = int(random.in(1, 20));
    std::vector<bool> seen(size_t(units) * columns);
    for (int t = 0; t < units * columns; ++t) {
      const QuadTile tile = QuadTile::make(t, units, columns);
      CHECK(0 <= tile.unit && tile.unit < units && 0 <= tile.n && tile.n < columns, units, columns, t);
      CHECK(!seen[size_t(tile.unit) * columns + tile.n], units, columns, t);
      seen[size_t(tile.unit) * columns + tile.n] = true;
    }
  }
}
