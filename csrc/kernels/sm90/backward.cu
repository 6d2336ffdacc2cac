// The backward megakernel on SM90: publish dy and x, pull both, and per segment of an expert's rows
//   kRecompute  h = x W1^T, where it was not saved
//   kDAct       d_act = dy W2, with the activation's gradient, act and the router gradient's parts in the epilogue
//   kDx         dx rows = dh W1, pushed to their owners
//   kDw1, kDw2  dW1 = dh^T x, dW2 = dy^T act, K running over the segment's rows
// in one launch. Roles and pipeline as in the forward (pipeline.cuh); order of tickets and why it cannot deadlock: layout/schedule.h.
//
// dh is kept as [rows][I/128][gate 128 | up 128], so that a tile of d_act stores neighbouring boxes; the K steps of dx and the row tiles of
// dW1 follow that order. Rows of x and dy that pad a granule are zeros, so they add nothing to a weight gradient.
// Legend: T tokens, K experts a token, H hidden, I intermediate, L local experts; unit, block, granule, group: constants.h.
#include <cuda_bf16.h>

#include "kernels/backward_params.h"
#include "kernels/launch.h"
#include "kernels/sm90/pipeline.cuh"
#include "kernels/tensor_map.h"

namespace mok::sm90 {
namespace {

enum Phase { kRecompute, kDAct, kDx, kDw1, kDw2 };
constexpr int kHBytes = kGroupRows * 2 * kTileI * 2;  // a group of 8 rows by 128 columns of I: gate and up
constexpr int kFirstSegment = 1, kLastSegment = 2;  // bits of TileInfo::segment

// A batch of segments (layout/schedule.h), known to a whole warp; what differs by segment stands in the segment's lane.
struct Batch {
  int index = -1, first_segment = 0, segments = 0;
  int unit = 0, units = 0, again = 0;  // the last `again` units need their h computed again
  int end_block = 0;
  int block = 0, rows = 0, expert = 0;
  bool first = false, last = false;    // of its expert's segments
  uint32_t turns = 0;                  // a bit for each segment that is not its expert's only one

  static __device__ Batch after(const Batch& b, const BackwardParams& p) {
    const int lane = threadIdx.x % 32;
    const int* table = p.schedule;
    Batch next;
    next.index = b.index + 1;
    next.first_segment = b.first_segment + b.segments;
    next.unit = b.unit + b.units;
    const int left = __ldg(table + kScheduleUnits) - next.unit;
    if (left <= 0) return next;
    // Lane i looks at unit i of the batch.
    int block = __ldg(table + kScheduleBlocks), expert = 0, before = 0, rows = 0, units_of_segment = 1;
    bool again = false, last = false;
    if (lane < left) {
      block = __ldg(table + p.blob.unit + next.unit + lane);
      expert = block_expert(__ldg(table + p.blob.block + block));
      before = (block - __ldg(table + p.blob.block_start + expert)) * kBlockRows;
      const int all = __ldg(table + kScheduleExperts + expert);
      units_of_segment = even_segment_units(all, p.segment_units);
      rows = segment_rows(all, before, units_of_segment);
      last = before + rows == all;
      again = __ldg(table + p.blob.group_start + expert) + ceil_div(before + min(all - before, kUnitRows), kGroupRows) > p.save_groups;
    }
    const bool starts = lane < left && before / kUnitRows % units_of_segment == 0;
    const uint32_t ends = __ballot_sync(~0u, starts || lane >= left) & ~1u;  // a segment ends before these units
    const uint32_t within = ends & __ballot_sync(~0u, block - __shfl_sync(~0u, block, 0) <= p.batch_blocks);
    next.units = min(within ? 31 - __clz(within) : __ffs(ends) - 1, left);
    const uint32_t mask = (1u << next.units) - 1;
    const uint32_t segments = __ballot_sync(~0u, starts) & mask;
    next.segments = __popc(segments);
    next.again = __popc(__ballot_sync(~0u, again) & mask);
    next.end_block = __shfl_sync(~0u, block, next.units);
    const int from = lane < next.segments ? __fns(segments, 0, lane + 1) : 0;
    next.block = __shfl_sync(~0u, block, from);
    next.rows = __shfl_sync(~0u, rows, from);
    next.expert = __shfl_sync(~0u, expert, from);
    next.first = __shfl_sync(~0u, before == 0, from);
    next.last = __shfl_sync(~0u, last, from);
    next.turns = __ballot_sync(~0u, lane < next.segments && (!next.first || !next.last));
    return next;
  }
};

struct Kernel {
  const BackwardParams& p;
  Smem& s;
  WaitContext wait;
  const int cta;  // in the cluster

  __device__ const int* blob(int64_t word) const { return p.schedule + word; }
  template <class T>
  __device__ T* local(int64_t offset) const {
    return reinterpret_cast<T*>(p.local + offset);
  }
  __device__ uint32_t* counter(int64_t offset) const { return local<uint32_t>(offset); }
  __device__ int h_tiles() const { return p.intermediate / kTileI; }
  __device__ int act_tiles() const { return ceil_div(p.intermediate, kTileN); }
  __device__ int hidden_tiles() const { return ceil_div(p.hidden, kTileN); }
  // Tiles of dx a unit; where only dp is wanted, one that carries it.
  __device__ int dx_tiles() const { return p.needs & MOK_NEED_DX ? hidden_tiles() : (p.needs & MOK_NEED_DP ? 1 : 0); }
  __device__ int dw1_tiles() const { return p.want_dw1 ? h_tiles() * hidden_tiles() : 0; }
  __device__ int dw2_tiles() const { return p.want_dw2 ? hidden_tiles() * act_tiles() : 0; }

  // ---- publication: this rank's counters, dy and x; every rank's word ----
  __device__ void publish(uint64_t expected) const {
    const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x, threads = int64_t(gridDim.x) * kThreads;
    const int blocks = workspace_dead(wait) ? 0 : __ldg(p.schedule + kScheduleBlocks);
    const auto& o = p.offsets.backward;
    for (const int64_t offset : {o.dy_ready, o.x_ready, o.h_done, o.dact_done, o.batch_read})
      for (int64_t i = thread; i < 2 * blocks; i += threads) counter(offset)[i] = 0;
    for (int64_t i = thread; i < weight_gradient_tiles(p.hidden, p.intermediate); i += threads) counter(o.turns_stored)[i] = 0;
    if (p.ranks > 1) {
      char* mine = reinterpret_cast<char*>(p.peers[p.rank]);
      uint4* to[2] = {reinterpret_cast<uint4*>(mine + p.symmetric.dy), reinterpret_cast<uint4*>(mine + p.symmetric.x)};
      const uint4* from[2] = {reinterpret_cast<const uint4*>(p.dy), reinterpret_cast<const uint4*>(p.x)};
      const int64_t vectors = p.num_tokens * (p.hidden / 8);
      constexpr int kInFlight = 4;
      for (int side = 0; side < 2; ++side) {
        for (int64_t i = thread; i < vectors; i += kInFlight * threads) {
          uint4 v[kInFlight];
#pragma unroll
          for (int j = 0; j < kInFlight; ++j)
            if (i + j * threads < vectors) v[j] = __ldcs(from[side] + i + j * threads);
#pragma unroll
          for (int j = 0; j < kInFlight; ++j)
            if (i + j * threads < vectors) to[side][i + j * threads] = v[j];
        }
      }
    }
    __syncthreads();
    arrive_and_tell_peers(wait, &wait.control->backward_arrived, &Flags::published, expected);
    uint64_t start = 0;
    if (int(threadIdx.x) < p.ranks) {
      start = start_of_wait(wait, MOK_PHASE_PUBLISH, wait.flags->published, expected);
      wait_stamp(wait, MOK_PHASE_PUBLISH, &wait.flags->published[threadIdx.x], threadIdx.x, expected);
    }
    __syncthreads();
    end_of_wait(wait, start);
  }

  // ---- dispatch ----
  __device__ PullJob job(const char* rows, int64_t peer_offset, int64_t ring, int64_t ready) const {
    PullJob job{};
    job.zero_padding = true;
    job.ring = local<char>(ring);
    job.row_bytes = int64_t(p.hidden) * 2;
    job.ring_blocks = p.ring_blocks;
    job.top_k = p.top_k;
    job.schedule_src = blob(p.blob.src);
    job.schedule_slot = blob(p.blob.slot);
    job.block_words = blob(p.blob.block);
    job.ready = counter(ready);
    job.local_rank = p.rank;
    job.local_rows = rows;
    job.peers = p.peers;
    job.peer_offset = peer_offset;
    return job;
  }

  __device__ PullJob dy_job() const { return job(p.dy, p.symmetric.dy, p.offsets.backward.dy_ring, p.offsets.backward.dy_ready); }
  __device__ PullJob x_job() const { return job(p.x, p.symmetric.x, p.offsets.backward.x_ring, p.offsets.backward.x_ready); }
  // Rows of the units that the first tickets need.
  __device__ int head_rows() const {
    const int blocks = __ldg(p.schedule + kScheduleBlocks), units = __ldg(p.schedule + kScheduleUnits);
    const int head_units = min(units, ceil_div(int(gridDim.x) / 2, QuadTile::kQuad * act_tiles()) * QuadTile::kQuad);
    return min(head_units < units ? __ldg(blob(p.blob.unit) + head_units) : blocks, p.ring_blocks) * kBlockRows;
  }
  // Their dy comes row by row over all warps: the kernel starts at memory speed.
  __device__ void pull_head() const {
    if (__any_sync(~0u, workspace_dead(wait))) return;  // its schedule may be garbage
    const PullJob dy = dy_job();
    const int rows = head_rows(), warps = gridDim.x * (kThreads / 32), me = threadIdx.x / 32 * gridDim.x + blockIdx.x;
    for (int64_t base = me; base < rows; base += warps * 32) {
      const int64_t row = base + int64_t(threadIdx.x % 32) * warps;
      pull_scattered<16>(dy, row < rows ? int(row) : -1);
    }
  }
  // The rest in order, by the warps that have nothing else to do.
  __device__ void pull_rest(int me, int pullers) const {
    if (__any_sync(~0u, workspace_dead(wait))) return;
    const PullJob dy = dy_job(), x = x_job();
    const int lane = threadIdx.x % 32, rows = dy.chunk_rows(), head = head_rows(), total = __ldg(p.schedule + kScheduleBlocks) * kBlockRows;
    const bool with_x = pulls_x();
    const auto row = [&](int base) { return lane < rows && base < total ? base + lane : -1; };
    Batch old = Batch::after(Batch{}, p);
    int free_batch = -1;
    int base = me * rows;
    SourceRow next = SourceRow::load(x, row(base));
    for (; base < total; base += pullers * rows) {
      const SourceRow mine = next;
      next = SourceRow::load(x, row(base + pullers * rows));  // ahead of its copies
      // A slot is free when every tile of the batch that had it has read it.
      const auto await = [&] {
        const int before = last_in_slot(x.block_words, base / kGranuleRows, p.ring_blocks);
        if (before < 0) return;
        while (before / 2 >= old.end_block) old = Batch::after(old, p);
        if (old.index == free_batch) return;
        if (lane == 0)
          wait_count(wait, MOK_PHASE_DISPATCH, counter(p.offsets.backward.batch_read) + old.index,
                     2u * uint32_t(old.units * dx_tiles() + old.segments * (dw1_tiles() + dw2_tiles())));
        __syncwarp();
        free_batch = old.index;
      };
      if (base >= head) pull_rows<kPullAhead>(dy, base, row(base), mine, await);
      if (with_x) pull_rows<kPullAhead>(x, base, row(base), mine, await);
    }
  }

  // ---- scheduler: one warp of CTA 0 ----
  __device__ void await_granules(uint32_t phase, int64_t offset, int block, int rows, uint32_t expected) const {
    for (int g = threadIdx.x % 32; g * kGranuleRows < rows; g += 32)
      wait_count(wait, phase, counter(offset) + block * 2 + g, expected);
  }

  // Is x pulled at all?
  __device__ bool pulls_x() const { return p.want_dw1 || p.save_groups < __ldg(p.schedule + kScheduleGroups); }
  // Before a batch's slots are given on, its x must have arrived, read or not.
  __device__ void await_x(const TileInfo& tile) const {
    if (pulls_x()) await_granules(MOK_PHASE_GEMM2, p.offsets.backward.x_ready, tile.block, tile.rows, kGranuleRows);
  }

  __device__ void schedule_tiles() const {
    const auto& o = p.offsets.backward;
    const int blocks = __ldg(p.schedule + kScheduleBlocks);
    const int dw_tiles = dw1_tiles() + dw2_tiles();
    // The schedule of a workspace that died in its making may be garbage.
    const bool dead = __shfl_sync(~0u, workspace_dead(wait), 0);
    Batch current = dead ? Batch{} : Batch::after(Batch{}, p), previous{};
    int turns = 0;  // before the segments of `previous`
    uint32_t base = 0;  // first ticket of the round
    TileInfo info{};
    for (int i = 0; info.phase != kNoMoreTiles; ++i) {
      const uint32_t ticket = claim_ticket(s, i, &wait.control->backward_ticket, ~0u, wait);
      info = {kNoMoreTiles};
      while (ticket != ~0u && (current.units > 0 || previous.units > 0)) {
        const int in_round = current.again * h_tiles() + previous.units * dx_tiles() + current.units * act_tiles() +
                             previous.segments * dw_tiles;
        if (ticket - base < uint32_t(in_round)) break;
        base += in_round;
        turns += __popc(previous.turns);
        previous = current;
        current = Batch::after(current, p);
      }
      if (ticket != ~0u && (current.units > 0 || previous.units > 0)) {
        const int again_tiles = current.again * h_tiles(), dact_tiles = current.units * act_tiles();
        const Interleave turn = Interleave::make(int(ticket - base), again_tiles + dact_tiles + previous.units * dx_tiles(),
                                                 previous.segments * dw_tiles);
        int t = turn.index;
        const auto unit_tile = [&](int phase, const Batch& batch, int first, int units, int columns) {
          const QuadTile tile = QuadTile::make(t, units, columns);
          const int block = __ldg(blob(p.blob.unit) + batch.unit + first + tile.unit);
          info = {phase, tile.n, block, block_expert(__ldg(blob(p.blob.block) + block)), unit_rows(blob(p.blob.block), block, blocks),
                  batch.index, 0};
          return first + tile.unit >= batch.units - batch.again;  // is its h computed again?
        };
        if (turn.second) {
          const int j = t / dw_tiles;
          t -= j * dw_tiles;
          const bool dw1 = t < dw1_tiles();
          const BandedTile tile = dw1 ? BandedTile::make(t, h_tiles(), hidden_tiles())
                                      : BandedTile::make(t - dw1_tiles(), hidden_tiles(), act_tiles());
          const bool first = __shfl_sync(~0u, previous.first, j), last = __shfl_sync(~0u, previous.last, j);
          info = {dw1 ? kDw1 : kDw2, tile.row << 16 | tile.column, __shfl_sync(~0u, previous.block, j),
                  __shfl_sync(~0u, previous.expert, j), __shfl_sync(~0u, previous.rows, j), previous.index,
                  t << 2 | (last ? kLastSegment : 0) | (first ? kFirstSegment : 0)};
          await_granules(MOK_PHASE_GEMM2, o.dact_done, info.block, info.rows, act_tiles());
          await_x(info);
          // Turns of one expert add in order, and all experts share the fp32 sums between the turns: a tile waits for its turns before.
          if (!(first && last) && threadIdx.x % 32 == 0) {
            const int granules = dw1 ? 4 : min(4, p.hidden / kGranuleRows - tile.row * 4);
            wait_count(wait, MOK_PHASE_GEMM2, counter(o.turns_stored) + t, (turns + __popc(previous.turns & ((1u << j) - 1))) * granules);
          }
        } else if (t < again_tiles) {
          unit_tile(kRecompute, current, current.units - current.again, current.again, h_tiles());
          await_granules(MOK_PHASE_GEMM1, o.x_ready, info.block, info.rows, kGranuleRows);
        } else if ((t -= again_tiles) < dact_tiles) {
          const bool again = unit_tile(kDAct, current, 0, current.units, act_tiles());
          await_granules(MOK_PHASE_GEMM1, o.dy_ready, info.block, info.rows, kGranuleRows);
          if (again) await_granules(MOK_PHASE_GEMM1, o.h_done, info.block, info.rows, h_tiles());
        } else {
          t -= dact_tiles;
          unit_tile(kDx, previous, 0, previous.units, dx_tiles());
          if (!p.want_dw1) await_x(info);
          await_granules(MOK_PHASE_GEMM2, o.dact_done, info.block, info.rows, act_tiles());
        }
      }
      announce_tile(s, i, info);
    }
  }

  // ---- what a tile is to this CTA ----
  struct Work {
    GranuleShare share;
    int steps;
    int parts;       // of the output, of each warpgroup that has rows
    int output_row;  // weight gradients: first row of this CTA's 128
    int column;      // first output column
  };
  __device__ Work work(const TileInfo& tile) const {
    Work w{GranuleShare::make(tile.rows, cta), p.hidden / kTileK, 0, 0, tile.n * kTileN};
    switch (tile.phase) {
      case kDAct: w.parts = 2 + (tile.n * 2 + 1 < h_tiles()); break;  // dh of one or two tiles of I, act
      case kDx: w.steps = p.intermediate * 2 / kTileK, w.parts = 1; break;
      case kDw1:
      case kDw2: {
        const bool dw1 = tile.phase == kDw1;
        const int row = tile.n >> 16;
        w.output_row = dw1 ? cta * p.intermediate + row * kTileI : row * kUnitRows + cta * kBlockRows;
        w.column = (tile.n & 0xffff) * kTileN;
        w.share = {0, dw1 || w.output_row < p.hidden ? 2 : 0};
        w.steps = ceil_div(tile.rows, kGranuleRows);
        // 256 columns of bf16, or 128 of fp32 at a time; sums between the turns of a bf16 one leave from registers.
        w.parts = is_fp32(tile) ? 2 : tile.segment & kLastSegment ? 1 : 0;
        break;
      }
    }
    return w;
  }
  __device__ bool is_fp32(const TileInfo& tile) const { return tile.phase == kDw1 ? p.dw1_fp32 : p.dw2_fp32; }
  // Is this tile of a weight gradient added to what its tensor holds? Turns of a bf16 one are summed elsewhere, in fp32.
  __device__ bool adds(const TileInfo& tile) const {
    return p.accumulate || (is_fp32(tile) && !(tile.segment & kFirstSegment));
  }
  // Is it one of several turns? Then others wait for it.
  __device__ static bool is_turn(const TileInfo& tile) {
    return (tile.segment & (kFirstSegment | kLastSegment)) != (kFirstSegment | kLastSegment);
  }
  __device__ int ring_row(int block, int granule) const {
    return (block + granule / 2) % p.ring_blocks * kBlockRows + granule % 2 * kGranuleRows;
  }

  // ---- producer: one thread ----
  __device__ void load_tiles() const {
    StageCursor at;
    TileInfo tile;
    for (int i = 0; next_tile(s, i, tile); ++i) {
      await_store_warp(s, i);
      ptx::fence_proxy_async_global();  // the scheduler acquired the flags; our next accesses go through the async proxy
      const Work w = work(tile);
      const uint32_t bytes = w.share.count * kBoxBytes + 2 * kBHalfBytes;
      const int column = w.column + cta * (kTileN / 2);  // of this CTA's half of B
      const uint64_t expert1 = p.w1.places.at[tile.expert], expert2 = p.w2.places.at[tile.expert];
      const CUtensorMap* a_map = tile.phase == kRecompute ? &p.x_map
                                 : tile.phase == kDAct || tile.phase == kDw2 ? &p.dy_map
                                                                             : &p.dh_map;
      const bool weight_gradient = tile.phase >= kDw1;
      // Column of A: dh keeps gate and up of 128 columns of I side by side.
      const int a_column = tile.phase == kDw1 ? (tile.n >> 16) * kTileN + cta * kTileI : w.output_row;
      const int row[2] = {ring_row(tile.block, w.share.first), ring_row(tile.block, w.share.first + 1)};
      const int claim_step = max(w.steps - kClaimAhead, 0);
      for (int k = 0; k < w.steps; ++k) {
        const uint32_t full = ptx::smem(&s.full[at.stage]);
        const uint32_t a = ptx::smem(s.stages[at.stage]), b = a + kABytes + cta * kBHalfBytes;
        ptx::mbarrier_wait(ptx::smem(&s.empty[at.stage]), at.parity ^ 1);
        ptx::mbarrier_expect_tx(full, bytes);
        const int k_row = weight_gradient ? ring_row(tile.block, k) : 0;
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          if (g >= w.share.count) break;
          if (weight_gradient)
            ptx::tensor_load_2d(a + g * kBoxBytes, a_map, a_column + g * kTileK, k_row, full);
          else
            ptx::tensor_load_2d(a + g * kBoxBytes, a_map, k * kTileK, row[g], full);
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint32_t to = b + j * kBoxBytes;
          switch (tile.phase) {
            case kRecompute:
              ptx::tensor_load_4d_multicast(to, &p.w1.map, k * kTileK, tile.n * kTileI + cta * p.intermediate + j * kTileK, expert1,
                                            full, 3);
              break;
            case kDAct:
              ptx::tensor_load_4d_multicast(to, &p.w2.map, column + j * kTileK, k * kTileK, expert2, full, 3);
              break;
            case kDx: {
              const int w1_row = k / 4 * kTileI + (k & 2 ? p.intermediate : 0) + (k & 1) * kTileK;
              ptx::tensor_load_4d_multicast(to, &p.w1.map, column + j * kTileK, w1_row, expert1, full, 3);
              break;
            }
            case kDw1: ptx::tensor_load_2d_multicast(to, &p.x_map, column + j * kTileK, k_row, full, 3); break;
            case kDw2: ptx::tensor_load_2d_multicast(to, &p.act_map, column + j * kTileK, k_row, full, 3); break;
          }
        }
        if (cta == 0 && k == claim_step) ptx::mbarrier_arrive(ptx::smem(&s.claim));
        at.next();
      }
      const int h_pieces = tile.phase == kDAct ? 2 * (w.parts - 1) : 0;
      for (int piece = 0; piece < h_pieces; ++piece) load_h(tile, w.share, at, piece);
      leave_stages(s, at, output_slots(w.parts) - h_pieces);
    }
  }

  // The h that a piece of d_act's output comes from, into that piece's place in the ring: groups of 8 rows by 128 columns of I.
  __device__ __forceinline__ void load_h(const TileInfo& tile, const GranuleShare& share, StageCursor& at, int piece) const {
    const uint32_t full = ptx::smem(&s.full[at.stage]), to = ptx::smem(s.stages[at.stage]);
    const int granule = share.first + piece % 2, tile_of_i = tile.n * 2 + piece / 2;
    const int rows = piece % 2 < share.count ? min(tile.rows - granule * kGranuleRows, kGranuleRows) : 0;
    const int groups = ceil_div(rows, kGroupRows);
    const int block = tile.block + granule / 2, row = granule % 2 * kGranuleRows;
    const int group = __ldg(blob(p.blob.group_start) + tile.expert) +
                      ((tile.block - __ldg(blob(p.blob.block_start) + tile.expert)) * kBlockRows + granule * kGranuleRows) / kGroupRows;
    ptx::mbarrier_wait(ptx::smem(&s.empty[at.stage]), at.parity ^ 1);
    ptx::mbarrier_expect_tx(full, groups * kHBytes);
    for (int g = 0; g < groups; ++g) {
      const void* from = group + g < p.save_groups ? static_cast<const void*>(p.h + (int64_t(group + g) * h_tiles() + tile_of_i) * kHBytes)
                                                   : ring_h(block, row + g * kGroupRows, tile_of_i);
      ptx::bulk_load(to + g * kHBytes, from, kHBytes, full);
    }
    at.next();
  }

  // ---- store warp ----
  __device__ void store_tiles() const {
    const auto& o = p.offsets.backward;
    const int lane = threadIdx.x % 32;
    Outbox out(s, cta);
    TileInfo tile;
    for (int i = 0; next_tile(s, i, tile); ++i) {
      saw_tile(s, i);
      const Work w = work(tile);
      const bool weight_gradient = tile.phase >= kDw1;
      const bool add = weight_gradient && adds(tile), fp32 = is_fp32(tile);
      out.pass(w.steps);
      const int slots = output_slots(w.parts);
      for (int piece = 0; piece < 2 * w.parts; ++piece) {
        const int part = piece / 2, g = w.share.first + piece % 2;
        if (piece % 2 >= w.share.count) {
          if (piece < slots) out.pass(1);
          continue;
        }
        const int row = ring_row(tile.block, g);
        char* target[2] = {};  // of a lane's rows of dx
        if (tile.phase == kDx && p.needs & MOK_NEED_DX) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int padded = tile.block * kBlockRows + g * kGranuleRows + r * 32 + lane;
            const int src = __ldg(blob(p.blob.src) + padded), slot = __ldg(blob(p.blob.slot) + padded);
            if (src >= 0) target[r] = reinterpret_cast<char*>(p.peers[src]) + p.symmetric.slots + (int64_t(slot) * p.hidden + w.column) * 2;
          }
        }
        const uint32_t from = out.wait(piece, slots);
        if (tile.phase == kDx) {
#pragma unroll
          for (int r = 0; r < 2; ++r)
            if (target[r]) ptx::bulk_store(target[r], from + (r * 32 + lane) * kPitch, min(kTileN, p.hidden - w.column) * 2);
        } else if (lane == 0 && tile.phase == kDAct) {
          for (int i = 0; i < 4; ++i) {
            if (part + 1 < w.parts)  // dh: 16 rows by 256 columns a warp
              ptx::tensor_store_3d(&p.dh_rows_map, 0, row + i * 16, (tile.n * 2 + part) * 4, from + i * kBoxBytes);
            else if (w.column + i * kTileK < p.intermediate)
              ptx::tensor_store_2d(&p.act_map, w.column + i * kTileK, row, from + i * kBoxBytes);
          }
        } else if (lane == 0) {
          const bool dw1 = tile.phase == kDw1;
          const ExpertTensors& gradient = dw1 ? p.dw1 : p.dw2;
          const uint64_t expert = gradient.places.at[tile.expert];
          const int columns = dw1 ? p.hidden : p.intermediate, output_row = w.output_row + g * kGranuleRows;
          const int width = fp32 ? kTileK / 2 : kTileK, column = w.column + part * 4 * width;  // of an image
          if (add) ptx::fence_proxy_async_global();
          for (int i = 0; i < 4 && column + i * width < columns; ++i) {
            if (add)
              ptx::tensor_add_4d(&gradient.map, column + i * width, output_row, expert, from + i * kBoxBytes);
            else
              ptx::tensor_store_4d(&gradient.map, column + i * width, output_row, expert, from + i * kBoxBytes);
          }
        }
        out.give_back(piece, slots);
        if (part + 1 < w.parts) continue;
        const bool turn = weight_gradient && is_turn(tile);
        if (tile.phase == kDAct || turn) {
          ptx::bulk_wait<0>();
          __syncwarp();
          if (lane == 0)
            ptx::add_release_gpu(turn ? counter(o.turns_stored) + (tile.segment >> 2) : counter(o.dact_done) + tile.block * 2 + g, 1);
        }
      }
    }
    ptx::bulk_wait<0>();
    __syncwarp();
  }

  // ---- consumers ----
  template <MokActivation kAct>
  __device__ void compute_tiles() const {
    const auto& o = p.offsets.backward;
    const int group = threadIdx.x / 128 - 1;  // consumer warpgroup
    const StageRelease release(s, cta);
    uint32_t uses = 0;  // of the staging buffer
    StageCursor at;
    TileInfo tile;
    for (int i = 0; next_tile(s, i, tile); ++i) {
      float d[128];
      const Work w = work(tile);
      Output out(s, at, release, output_slots(w.parts), uses);
      uses += w.share.count == 2 && w.parts > 0;
      if (group >= w.share.count) {
        skip_stages(s, at, w.steps, release);
      } else {
        const int granule = w.share.first + group;
        if (tile.phase == kRecompute || tile.phase == kDAct) {
          if (tile.phase == kRecompute) {
            multiply<false, false>(d, s, at, w.steps, group, release);
            keep_h(d, tile, granule);
          } else {
            multiply<false, true>(d, s, at, w.steps, group, release);
            finish_dact<kAct>(d, tile, granule, out, w.parts);
          }
        } else if (tile.phase == kDx) {
          if (tile.n == 0 && (p.needs & MOK_NEED_DP)) push_dp(tile, granule);
          multiply<false, true>(d, s, at, w.steps, group, release);
          write_rows(d, out, group);
        } else {
          multiply<true, true>(d, s, at, w.steps, group, release);
          if (!is_fp32(tile) && !(tile.segment & kFirstSegment)) add_turns(d, tile, w, group);
          if (w.parts == 0)
            store_turn(d, tile, w, group);
          else if (is_fp32(tile))
            write_fp32_images(d, out, group);
          else
            write_images(d, out, group);
        }
      }
      out.close();
      // This CTA's loads of the tile are complete: they are, before their stages are full.
      if (tile.phase >= kDx && threadIdx.x == 128)
        ptx::add_relaxed_gpu(counter(o.batch_read) + tile.batch, 1);
    }
  }

  __device__ __forceinline__ void write_rows(const float (&d)[128], Output& out, int piece) const {
    const uint32_t to = out.open(piece) + matrix_row() * kPitch + matrix_column() * 16;
#pragma unroll
    for (int j = 0; j < 32; j += 2)
      ptx::store_matrix_x4(to + j * 16, pack_bf16(d[4 * j], d[4 * j + 1]), pack_bf16(d[4 * j + 2], d[4 * j + 3]),
                           pack_bf16(d[4 * j + 4], d[4 * j + 5]), pack_bf16(d[4 * j + 6], d[4 * j + 7]));
    out.hand_over();
  }

  // Four images of 64 columns.
  __device__ __forceinline__ void write_images(const float (&d)[128], Output& out, int piece) const {
    const uint32_t to = out.open(piece);
#pragma unroll
    for (int j = 0; j < 32; j += 2)
      ptx::store_matrix_x4(to + image_offset(j), pack_bf16(d[4 * j], d[4 * j + 1]), pack_bf16(d[4 * j + 2], d[4 * j + 3]),
                           pack_bf16(d[4 * j + 4], d[4 * j + 5]), pack_bf16(d[4 * j + 6], d[4 * j + 7]));
    out.hand_over();
  }

  // 128 columns a part, in four images of 32. Odd rows write column j ^ 2 where even ones write j: so four neighbouring rows, whose
  // swizzles come in pairs, meet no bank twice.
  __device__ __forceinline__ void write_fp32_images(const float (&d)[128], Output& out, int group) const {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, r = lane / 4;
    const bool odd = r & 1;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const uint32_t to = out.open(part * 2 + group) + (warp * 16 + r) * 128 + lane % 2 * 8;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const int a = (part * 16 + j) * 4, b = (part * 16 + (j ^ 2)) * 4;
        const int chunk = (odd ? j ^ 2 : j) % 4 * 2 + lane % 4 / 2;
        const uint32_t at = to + j / 4 * kBoxBytes + ((chunk ^ r) << 4);
        ptx::store_shared_v2(at, odd ? d[b] : d[a], odd ? d[b + 1] : d[a + 1]);
        ptx::store_shared_v2(at + 8 * 128, odd ? d[b + 2] : d[a + 2], odd ? d[b + 3] : d[a + 3]);
      }
      out.hand_over();
    }
  }

  // This thread's first element in a 64 x 256 tile of the fp32 sums between the turns of a bf16 weight gradient; its others are 8 rows
  // and 8 columns apart.
  __device__ float* turns(const TileInfo& tile, const Work& w, int group) const {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const bool dw1 = tile.phase == kDw1;
    const int64_t columns = dw1 ? p.hidden : p.intermediate;
    return local<float>(p.offsets.backward.turns) + (dw1 ? 0 : int64_t(2) * p.intermediate * p.hidden) +
           (w.output_row + group * kGranuleRows + warp * 16 + lane / 4) * columns + w.column + lane % 4 * 2;
  }

  // Adds what the turns before have summed.
  __device__ __forceinline__ void add_turns(float (&d)[128], const TileInfo& tile, const Work& w, int group) const {
    const int64_t columns = tile.phase == kDw1 ? p.hidden : p.intermediate;
    const float* from = turns(tile, w, group);
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      if (w.column + j * 8 >= columns) break;
      const float2 a = __ldcg(reinterpret_cast<const float2*>(from + 8 * j));
      const float2 b = __ldcg(reinterpret_cast<const float2*>(from + 8 * columns + 8 * j));
      d[4 * j] += a.x;
      d[4 * j + 1] += a.y;
      d[4 * j + 2] += b.x;
      d[4 * j + 3] += b.y;
    }
  }

  // Straight from registers: a warp's instruction covers 8 rows x 32 bytes, whole sectors.
  __device__ __forceinline__ void store_turn(const float (&d)[128], const TileInfo& tile, const Work& w, int group) const {
    const int64_t columns = tile.phase == kDw1 ? p.hidden : p.intermediate;
    float *to = turns(tile, w, group), *to8 = to + 8 * columns;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      if (w.column + j * 8 >= columns) break;
      *reinterpret_cast<float2*>(to + 8 * j) = make_float2(d[4 * j], d[4 * j + 1]);
      *reinterpret_cast<float2*>(to8 + 8 * j) = make_float2(d[4 * j + 2], d[4 * j + 3]);
    }
    ptx::named_barrier(1 + group, 128);
    if (threadIdx.x % 128 == 0) ptx::add_release_gpu(counter(p.offsets.backward.turns_stored) + (tile.segment >> 2), 1);
  }

  // Where the h of a group of 8 rows and a tile of 128 columns of I lies: 8 vectors of 32 lanes x 16 bytes.
  __device__ uint4* ring_h(int block, int row, int tile_of_i) const {
    const int64_t group = (int64_t(block % p.ring_blocks) * kBlockRows + row) / kGroupRows;
    return local<uint4>(p.offsets.backward.h_ring) + (group * h_tiles() + tile_of_i) * 256;
  }

  // As the forward saves it (forward.cu, finish_gemm1), into the ring.
  __device__ __forceinline__ void keep_h(const float (&d)[128], const TileInfo& tile, int granule) const {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int block = tile.block + granule / 2, row = granule % 2 * kGranuleRows + warp * 16;
    uint4 *to0 = ring_h(block, row, tile.n) + lane, *to1 = ring_h(block, row + 8, tile.n) + lane;
#pragma unroll
    for (int v = 0; v < 8; ++v) {
      uint32_t a[4], b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = 4 * v + i;
        a[i] = pack_bf16(d[4 * j], d[4 * j + 1]);
        b[i] = pack_bf16(d[4 * j + 2], d[4 * j + 3]);
      }
      to0[h_vector(v) * 32] = make_uint4(a[0], a[1], a[2], a[3]);
      to1[h_vector(v) * 32] = make_uint4(b[0], b[1], b[2], b[3]);
    }
    ptx::fence_proxy_async_global();  // d_act loads it by bulk copies
    ptx::named_barrier(threadIdx.x / 128, 128);
    if (threadIdx.x % 128 == 0) ptx::add_release_gpu(counter(p.offsets.backward.h_done) + tile.block * 2 + granule, 1);
  }

  template <MokActivation kAct>
  __device__ __forceinline__ void finish_dact(float (&d)[128], const TileInfo& tile, int granule, Output& out, int parts) const {
    const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int valid = min(tile.rows - granule * kGranuleRows, kGranuleRows);
    const int r0 = warp * 16 + lane / 4;
    const bool ok[2] = {r0 < valid, r0 + 8 < valid};
    const int padded = tile.block * kBlockRows + granule * kGranuleRows + r0;
    const int* probs = blob(p.blob.prob) + padded;
    const float prob[2] = {__int_as_float(__ldg(probs)), __int_as_float(__ldg(probs + 8))};
    float dp[2] = {};
    // 64 columns a turn, always in the same 32 registers, after which all move up: a loop's instructions are fetched once. Behind them
    // follows act: in the end d[32 * quarter + 8 * row + pair of columns].
    uint32_t mine = 0;
#pragma unroll 1
    for (int quarter = 0; quarter < 4; ++quarter) {
      const int half = quarter / 2, s = quarter % 2;
      uint32_t act[2][8] = {};  // [row][pair of columns]
      const bool inside = half == 0 || parts == 3;  // I may end within this tile
      if (inside) {
      // This warp's 16 rows, 8 KiB: h, which it overwrites by dh 64 columns at a time.
      if (s == 0) mine = out.open(half * 2 + group) + warp * 2 * kHBytes;
      uint32_t dgate[2][8], dup[2][8];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          const uint32_t from = mine + r * kHBytes + s * 2048 + v * 512 + lane * 16;  // stale where the row is padding
          const uint4 g4 = ptx::load_shared_v4(from), u4 = ptx::load_shared_v4(from + 1024);
          const uint32_t gate[4] = {g4.x, g4.y, g4.z, g4.w}, up[4] = {u4.x, u4.y, u4.z, u4.w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int j = 4 * v + i, a = j * 4 + 2 * r;
            const float2 g = unpack_bf16(gate[i]), u = unpack_bf16(up[i]);
            const ActivationGradient x = activate_backward<kAct>(g.x, u.x, p.act_limit), y = activate_backward<kAct>(g.y, u.y, p.act_limit);
            dp[r] += ok[r] ? x.activation * d[a] + y.activation * d[a + 1] : 0.f;
            const float dx = d[a] * prob[r], dy = d[a + 1] * prob[r];
            dgate[r][j] = ok[r] ? pack_bf16(x.gate * dx, y.gate * dy) : 0u;
            dup[r][j] = ok[r] ? pack_bf16(x.up * dx, y.up * dy) : 0u;
            act[r][j] = ok[r] ? pack_bf16(x.activation * prob[r], y.activation * prob[r]) : 0u;
          }
        }
      }
      __syncwarp();  // these columns of h have been read
      const int row = (lane >> 3 & 1) * 8 + (lane & 7);
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const uint32_t to = mine + s * 2048 + row * 128 + (((j + matrix_column()) ^ (row & 7)) << 4);
        ptx::store_matrix_x4(to, dgate[0][j], dgate[1][j], dgate[0][j + 1], dgate[1][j + 1]);
        ptx::store_matrix_x4(to + 4096, dup[0][j], dup[1][j], dup[0][j + 1], dup[1][j + 1]);
      }
      if (s == 1) out.hand_over();
      }
#pragma unroll
      for (int i = 0; i < 96; ++i) d[i] = d[i + 32];
#pragma unroll
      for (int i = 0; i < 16; ++i) d[96 + i] = __uint_as_float(act[i / 8][i % 8]);
    }
    // This tile's part of the router gradient: columns in order within a lane, then the four lanes of a row.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int step = 1; step < 4; step *= 2) dp[r] += __shfl_xor_sync(~0u, dp[r], step);
      if (lane % 4 == 0) local<float>(p.offsets.backward.dp_parts)[int64_t(padded + 8 * r) * act_tiles() + tile.n] = dp[r];
    }
    const uint32_t to = out.open((parts - 1) * 2 + group);
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      const float* act = d + j / 8 * 32 + j % 8;
      ptx::store_matrix_x4(to + image_offset(j), __float_as_uint(act[0]), __float_as_uint(act[8]), __float_as_uint(act[1]),
                           __float_as_uint(act[9]));
    }
    out.hand_over();
  }

  // dp of this granule's rows: parts in the order of their tiles, to the rows' owners.
  __device__ void push_dp(const TileInfo& tile, int granule) const {
    const int row = threadIdx.x % 128;
    if (row >= kGranuleRows || granule * kGranuleRows + row >= tile.rows) return;
    const int padded = tile.block * kBlockRows + granule * kGranuleRows + row;
    const float* parts = local<float>(p.offsets.backward.dp_parts) + int64_t(padded) * act_tiles();
    float sum = 0.f;
    for (int n = 0; n < act_tiles(); ++n) sum += __ldcg(parts + n);
    const int src = __ldg(blob(p.blob.src) + padded), slot = __ldg(blob(p.blob.slot) + padded);
    reinterpret_cast<float*>(p.peers[src] + p.symmetric.dp_slots)[slot] = sum;
  }

  // ---- after every peer's pushes ----
  __device__ void collect() const {
    const char* mine = reinterpret_cast<const char*>(p.peers[p.rank]);
    if (p.needs & MOK_NEED_DX)
      reduce_slots(mine + p.symmetric.slots, p.ids, p.dx, p.num_tokens, p.top_k, p.hidden, p.experts);
    if (p.needs & MOK_NEED_DP) {
      const float* slots = reinterpret_cast<const float*>(mine + p.symmetric.dp_slots);
      const int64_t routes = p.num_tokens * p.top_k;
      for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < routes; i += int64_t(gridDim.x) * kThreads)
        p.dp[i] = uint32_t(__ldg(p.ids + i)) < uint32_t(p.experts) ? __ldcg(slots + i) : 0.f;
    }
  }

  // Weight gradients of experts without rows: exact zeros where they are written, untouched where they are added to.
  __device__ void clear_empty_experts() const {
    const int local_experts = p.blob.local_experts;
    for (int e = 0; e < local_experts; ++e) {
      if (__ldg(blob(kScheduleExperts) + e) != 0) continue;
      const int64_t elements = int64_t(p.hidden) * p.intermediate;
      auto clear = [&](uint64_t base, int64_t bytes) {
        uint4* to = reinterpret_cast<uint4*>(base);
        for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < bytes / 16; i += int64_t(gridDim.x) * kThreads)
          to[i] = make_uint4(0, 0, 0, 0);
      };
      if (p.want_dw1) clear(p.dw1.places.address(e), 2 * elements * (p.dw1_fp32 ? 4 : 2));
      if (p.want_dw2) clear(p.dw2.places.address(e), elements * (p.dw2_fp32 ? 4 : 2));
    }
  }
};

template <MokActivation kAct>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1) backward_kernel(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(1024) char raw[];
  Smem& s = *reinterpret_cast<Smem*>(raw);
  char* mine = reinterpret_cast<char*>(p.peers[p.rank]);
  Control* control = reinterpret_cast<Control*>(mine + p.symmetric.control);
  Flags* flags = reinterpret_cast<Flags*>(mine);
  Kernel kernel{p, s, WaitContext{control, p.record, p.peers, flags, p.rank, p.ranks, kCallBackward, p.layer, p.timeout_ns},
                int(ptx::cluster_cta_rank())};
  const int warp = threadIdx.x / 32;
  // The last CTA to leave advances the counter: every CTA has read it by then.
  const uint64_t call = ptx::load_relaxed_gpu(&control->call) + 1;
  const uint64_t expected = stamp(call, kCallBackward, p.layer);
  if (threadIdx.x == 0) {
    init_barriers(s);
    ptx::prefetch_tensor_map(&p.dy_map);
    ptx::prefetch_tensor_map(&p.x_map);
    ptx::prefetch_tensor_map(&p.w1.map);
    ptx::prefetch_tensor_map(&p.w2.map);
  }
  kernel.publish(expected);
  kernel.pull_head();
  __syncwarp();
  // The barriers of both CTAs exist before anyone multicasts.
  ptx::cluster_arrive();
  ptx::cluster_wait();

  if (warp < 4) {
    ptx::set_max_registers_down<56>();
    if (warp == 0) {
      if (threadIdx.x == 0) kernel.load_tiles();
    } else if (warp == 1) {
      kernel.store_tiles();
    } else if (warp == 3 && kernel.cta == 0) {
      kernel.schedule_tiles();
    } else if (int(blockIdx.x) < p.comm_ctas) {
      kernel.pull_rest(blockIdx.x / 2 * kPullersOfCluster + puller_of_cluster(warp, kernel.cta), p.comm_ctas / 2 * kPullersOfCluster);
    }
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
    ptx::set_max_registers_up<168>();
  } else {
    ptx::set_max_registers_up<224>();
    kernel.compute_tiles<kAct>();
    ptx::cluster_arrive();
    ptx::cluster_wait();
    ptx::set_max_registers_down<168>();
  }
  // The cluster barrier also was this CTA's: its pushes are complete.
  if (finish_call(kernel.wait, &control->backward_finished, expected)) {
    kernel.collect();
    if (!p.accumulate) kernel.clear_empty_experts();
  }
  if (threadIdx.x == 0 && ptx::fetch_add_acq_rel_gpu(&control->backward_left, 1) == gridDim.x - 1) {
    control->backward_arrived = control->backward_ticket = control->backward_finished = control->backward_left = 0;
    control->call = call;
  }
}

template <MokActivation kAct>
int launch(const BackwardParams& p, int ctas, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(backward_kernel<kAct>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Smem));
  if (error != cudaSuccess) return fail_cuda(error, "backward kernel: shared memory");
  backward_kernel<kAct><<<ctas, kThreads, sizeof(Smem), stream>>>(p);
  return check_launch("backward kernel");
}

}  // namespace

int launch_backward(const MokBackwardArgs& args, cudaStream_t stream) {
  const MokProblem& problem = args.workspace.problem;
  const Sizes sizes = Sizes::make(problem);
  const int local_experts = problem.num_experts / problem.num_ranks;
  const int64_t hidden = problem.hidden, intermediate = problem.intermediate;
  BackwardParams p{};
  p.dy = reinterpret_cast<const char*>(args.dy);
  p.x = reinterpret_cast<const char*>(args.x);
  for (int r = 0; r < problem.num_ranks; ++r) p.peers[r] = args.workspace.peers[r];
  p.local = reinterpret_cast<char*>(args.workspace.local);
  p.record = reinterpret_cast<MokErrorRecord*>(args.workspace.error_record);
  p.ids = reinterpret_cast<const int*>(args.ids);
  p.dx = reinterpret_cast<char*>(args.dx);
  p.dp = reinterpret_cast<float*>(args.dp);
  p.schedule = reinterpret_cast<const int*>(args.schedule);
  p.h = reinterpret_cast<const char*>(args.h);
  p.save_groups = args.h ? int(args.save_rows / kGroupRows) : 0;
  p.rank = problem.rank;
  p.ranks = problem.num_ranks;
  p.experts = problem.num_experts;
  p.top_k = problem.top_k;
  p.hidden = problem.hidden;
  p.intermediate = problem.intermediate;
  p.num_tokens = args.num_tokens;
  p.blob = ScheduleLayout::make(problem.num_ranks, problem.max_tokens, problem.top_k, local_experts);
  p.symmetric = SymmetricLayout::make(problem.num_ranks, problem.max_tokens, problem.top_k, problem.hidden);
  p.offsets = LocalLayout::make(problem, sizes);
  p.ring_blocks = sizes.backward_blocks;
  p.segment_units = sizes.segment_units;
  p.batch_blocks = sizes.backward_blocks / 4;
  p.needs = args.needs;
  p.want_dw1 = args.dw1 != nullptr;
  p.want_dw2 = args.dw2 != nullptr;
  p.dw1_fp32 = args.dw1_is_fp32;
  p.dw2_fp32 = args.dw2_is_fp32;
  p.accumulate = args.accumulate;
  const int ctas = sizes.num_sms / 2 * 2;
  if (const int status = comm_ctas(args.comm_sms, ctas, &p.comm_ctas); status != MOK_OK) return status;
  p.act_limit = args.act_limit;
  p.layer = args.layer;
  p.timeout_ns = args.workspace.timeout_ns;

  const int64_t rows = int64_t(p.ring_blocks) * kBlockRows;
  const auto& o = p.offsets.backward;
  const auto ring = [&](CUtensorMap* map, int64_t offset, int64_t columns, const char* name) {
    return encode_rows_map(map, args.workspace.local + offset, columns, rows, kGranuleRows, name);
  };
  int status = ring(&p.dy_map, o.dy_ring, hidden, "dy ring");
  if (status == MOK_OK) status = ring(&p.x_map, o.x_ring, hidden, "x ring");
  if (status == MOK_OK) status = ring(&p.dh_map, o.dh_ring, 2 * intermediate, "dh ring");
  if (status == MOK_OK) status = ring(&p.act_map, o.act_ring, intermediate, "act ring");
  if (status == MOK_OK)
    status = encode_row_group_map(&p.dh_rows_map, args.workspace.local + o.dh_ring, 2 * intermediate, rows, "dh ring");
  if (status == MOK_OK)
    status = encode_experts(&p.w1, args.w1, args.num_w, local_experts, hidden, 2 * intermediate,
                                kGranuleRows, "w1");
  if (status == MOK_OK)
    status = encode_experts(&p.w2, args.w2, args.num_w, local_experts, intermediate, hidden, kGranuleRows,
                                "w2");
  if (status == MOK_OK && p.want_dw1)
    status = encode_experts(&p.dw1, args.dw1, args.num_dw1, local_experts, hidden, 2 * intermediate,
                                kGranuleRows, "dw1", p.dw1_fp32);
  if (status == MOK_OK && p.want_dw2)
    status = encode_experts(&p.dw2, args.dw2, args.num_dw2, local_experts, intermediate, hidden, kGranuleRows,
                                "dw2", p.dw2_fp32);
  if (status != MOK_OK) return status;
  switch (args.activation) {
    case MOK_ACT_SWIGLU: return launch<MOK_ACT_SWIGLU>(p, ctas, stream);
    case MOK_ACT_SWIGLU_CLAMPED: return launch<MOK_ACT_SWIGLU_CLAMPED>(p, ctas, stream);
    default:
      return fail(MOK_ERR_NOT_COMPILED, "activation: got %d, the kernels have 0 (swiglu) and 1 (clamped swiglu)", args.activation);
  }
}

int load_backward() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, backward_kernel<MOK_ACT_SWIGLU>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, backward_kernel<MOK_ACT_SWIGLU_CLAMPED>);
  return error == cudaSuccess ? MOK_OK : fail_cuda(error, "backward kernel: loading");
}

}  // namespace mok::sm90
