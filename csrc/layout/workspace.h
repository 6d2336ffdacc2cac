// Offsets of everything in a workspace: the single truth for host and device.
#ifndef MEGATRON_MOK_LAYOUT_WORKSPACE_H_
#define MEGATRON_MOK_LAYOUT_WORKSPACE_H_

#include "common/constants.h"
#include "layout/schedule.h"
#include "megatron_mok/api.h"

namespace mok {

constexpr int kScheduleChunk = 512;  // routes that one warp of the schedule kernel counts
constexpr int kRegionAlign = 1024;

// Words that cross ranks, at offset 0 of every symmetric region. A word is written by one peer only.
struct Flags {
  uint64_t published[MOK_MAX_RANKS];  // stamp: peer r's x (or dy), ids, probs and token count of that call are in place
  uint64_t done[MOK_MAX_RANKS];       // stamp: peer r has pulled and pushed everything of that call
  uint32_t abort;                     // 1 + rank of a peer that gave up; sticky, the workspace is dead
};

// Words of one rank that peers leave alone. They stand in the symmetric region because they belong to it: layers of different E
// and I share a region, each with local buffers of its own. `call`, `waited_ns` and `aborted` live as long as the workspace; the launch that
// publishes leaves the rest at zero.
struct Control {
  uint64_t call;         // number of the last published call
  uint64_t waited_ns;    // that CTA 0 has waited for words of peers after this rank's own, over all calls
  uint32_t aborted;      // a MokErrorRecord code; sticky
  uint32_t reserved;
  uint32_t arrived[6];   // grid barriers of the publishing launch, in turn
  uint32_t ticket;
  uint32_t finished;     // CTAs of the main kernel whose pushes are complete
  uint32_t backward_arrived, backward_ticket, backward_finished, backward_left;  // the backward leaves them at zero itself
};

// A stamp names call, kind and layer; it is compared exactly.
enum CallKind : uint32_t { kCallForward = 1, kCallBackward = 2 };
MOK_HD uint64_t stamp(uint64_t call, uint32_t kind, uint32_t layer) {
  return call << 24 | uint64_t(kind & 0xf) << 20 | (layer & 0xfffff);
}
MOK_HD uint64_t stamp_call(uint64_t word) { return word >> 24; }

struct SymmetricLayout {
  int64_t control, tokens, ids, probs, x, dy, slots, dp_slots, bytes;

  static MOK_HD SymmetricLayout make(int ranks, int64_t max_tokens, int top_k, int hidden) {
    SymmetricLayout s;
    int64_t at = round_up<int64_t>(sizeof(Flags), kRegionAlign);
    auto take = [&](int64_t bytes) {
      const int64_t here = at;
      at = round_up<int64_t>(at + bytes, kRegionAlign);
      return here;
    };
    s.control = take(sizeof(Control));
    s.tokens = take(int64_t(ranks) * 4);
    s.ids = take(int64_t(ranks) * max_tokens * top_k * 4);
    s.probs = take(int64_t(ranks) * max_tokens * top_k * 4);
    s.x = take(max_tokens * hidden * 2);
    s.dy = take(max_tokens * hidden * 2);
    s.slots = take(max_tokens * top_k * hidden * 2);
    s.dp_slots = take(max_tokens * top_k * 4);
    s.bytes = at;
    return s;
  }
};

// Knobs with their defaults filled in.
struct Sizes {
  int num_sms, minibatch_units, ring_blocks, act_blocks;
  int backward_blocks, segment_units;  // ring of the backward; units of one turn of a weight gradient

  static MOK_HD Sizes make(const MokProblem& p) {
    Sizes s;
    s.num_sms = p.num_sms > 0 ? p.num_sms : 132;
    const int clusters = s.num_sms / 2 > 0 ? s.num_sms / 2 : 1;
    const int n1 = ceil_div<int>(p.intermediate, kTileI);
    // Between the last GEMM 1 ticket of a minibatch and its first GEMM 2 ticket lie the tickets of a whole round; they must
    // outnumber the clusters, or GEMM 2 waits for tiles in flight. Twice that many leaves room for uneven progress.
    s.minibatch_units = p.minibatch_units > 0 ? p.minibatch_units : round_up(ceil_div(2 * clusters, n1), 4);
    const int64_t cap_blocks =
        ScheduleLayout::make(p.num_ranks, p.max_tokens, p.top_k, p.num_experts / p.num_ranks).cap / kBlockRows;
    const int64_t wanted = p.ring_rows > 0 ? ceil_div<int64_t>(p.ring_rows, kBlockRows)
                                           : int64_t(3) * min_ring_blocks(s.minibatch_units);
    auto fit = [&](int64_t want, int64_t least) {  // no larger than the worst case, no smaller than correctness needs
      const int64_t n = want > least ? want : least;
      return int(n < cap_blocks ? n : (cap_blocks > 0 ? cap_blocks : 1));
    };
    s.ring_blocks = fit(wanted, min_ring_blocks(s.minibatch_units));
    s.act_blocks = fit(min_act_blocks(s.minibatch_units), min_act_blocks(s.minibatch_units));
    // Backward: about 400 MB of rings, 64 to 124 blocks (a segment's units fit into a warp), or what the user asks for.
    const int64_t by_memory = 400000000 / ((int64_t(4) * p.hidden + 10 * p.intermediate) * kBlockRows);
    int64_t blocks = p.ring_rows > 0 ? ceil_div<int64_t>(p.ring_rows, kBlockRows) : by_memory < 64 ? 64 : by_memory;
    if (blocks > cap_blocks) blocks = cap_blocks;
    s.backward_blocks = int(blocks < 4 ? 4 : blocks > 124 ? 124 : round_up<int64_t>(blocks, 4));
    s.segment_units = s.backward_blocks / 4;
    return s;
  }
};

// Tiles of 256 x 256 of both weight gradients of an expert; of dW1 128 rows of gate and of up.
MOK_HD int weight_gradient_tiles(int hidden, int intermediate) {
  return ceil_div(hidden, kTileN) * (ceil_div(intermediate, kTileI) + ceil_div(intermediate, kTileN));
}

struct LocalLayout {
  int64_t max_blocks, chunks_per_rank;
  int64_t chunk_counts, source_counts, x_ready, act_done, y_done, x_ring, act_ring, bytes;
  // What the backward adds: it zeroes its counters itself, and its rings lie over the forward's.
  struct Backward {
    int64_t dy_ready, x_ready, h_done, dact_done;  // per granule: rows in place (64 when whole), tiles stored
    int64_t batch_read;    // tiles that have read a batch
    int64_t turns_stored;  // a tile of the weight gradients: its granules stored in turns, of all experts
    int64_t dp_parts;                              // [rows][column tiles of I] fp32
    int64_t dy_ring, x_ring, dh_ring, act_ring, h_ring;
    int64_t turns;  // fp32 [2I, H] and [H, I]: sums of a bf16 weight gradient between its turns; empty where one turn holds every row
    int64_t bytes;
  } backward;

  static MOK_HD LocalLayout make(const MokProblem& p, const Sizes& sizes) {
    LocalLayout s;
    const int local_experts = p.num_experts / p.num_ranks;
    const ScheduleLayout schedule = ScheduleLayout::make(p.num_ranks, p.max_tokens, p.top_k, local_experts);
    int64_t at = 0;
    auto take = [&](int64_t bytes) {
      const int64_t here = at;
      at = round_up<int64_t>(at + bytes, kRegionAlign);
      return here;
    };
    s.max_blocks = schedule.cap / kBlockRows;
    s.chunks_per_rank = ceil_div<int64_t>(p.max_tokens * p.top_k, kScheduleChunk);
    s.chunk_counts = take(p.num_ranks * s.chunks_per_rank * local_experts * 4);
    s.source_counts = take(int64_t(p.num_ranks) * local_experts * 4);
    // Per granule, two a block: rows that lie in the x ring; GEMM 1 tiles whose act is stored; GEMM 2 tiles that read it.
    s.x_ready = take(s.max_blocks * 2 * 4);
    s.act_done = take(s.max_blocks * 2 * 4);
    s.y_done = take(s.max_blocks * 2 * 4);
    s.x_ring = take(int64_t(sizes.ring_blocks) * kBlockRows * p.hidden * 2);
    s.act_ring = take(int64_t(sizes.act_blocks) * kBlockRows * p.intermediate * 2);
    s.bytes = at;

    at = s.x_ring;
    Backward& b = s.backward;
    for (int64_t* counter : {&b.dy_ready, &b.x_ready, &b.h_done, &b.dact_done, &b.batch_read})
      *counter = take(s.max_blocks * 2 * 4);
    b.turns_stored = take(weight_gradient_tiles(p.hidden, p.intermediate) * 4);
    b.dp_parts = take(schedule.cap * ceil_div(p.intermediate, kTileN) * 4);
    const int64_t rows = int64_t(sizes.backward_blocks) * kBlockRows;
    b.dy_ring = take(rows * p.hidden * 2);
    b.x_ring = take(rows * p.hidden * 2);
    b.dh_ring = take(rows * p.intermediate * 4);
    b.act_ring = take(rows * p.intermediate * 2);
    b.h_ring = take(rows * p.intermediate * 4);
    const bool several = p.num_ranks * p.max_tokens * p.top_k > int64_t(sizes.segment_units) * kUnitRows;
    b.turns = take(several ? int64_t(12) * p.intermediate * p.hidden : 0);
    b.bytes = at;
    return s;
  }
};

}  // namespace mok
#endif  // MEGATRON_MOK_LAYOUT_WORKSPACE_H_
