// What csrc/tests leave out of the decoding of tickets: tiles within a GEMM, over 100,000 random shapes each.
#include <vector>

#include "layout/schedule.h"
#include "tests/harness.h"

using namespace mok;

// tile(t, rows, columns) gives (row, column): each of rows x columns exactly once.
template <class Tile>
static void covers_every_tile_once(uint64_t seed, Tile tile) {
  mok::test::Random random(seed);
  for (int i = 0; i < 100000; ++i) {
    const int rows = int(random.in(1, 30)), columns = int(random.in(1, 20));
    std::vector<bool> seen(size_t(rows) * columns);
    for (int t = 0; t < rows * columns; ++t) {
      const auto [row, column] = tile(t, rows, columns);
      CHECK(0 <= row && row < rows && 0 <= column && column < columns, rows, columns, t);
      CHECK(!seen[size_t(row) * columns + column], rows, columns, t);
      seen[size_t(row) * columns + column] = true;
    }
  }
}

TEST(banded_tiles_cover_every_tile_once) { covers_every_tile_once(21, BandedTile::make); }
TEST(quads_cover_every_tile_of_every_unit_once) { covers_every_tile_once(22, QuadTile::make); }
