// What the SM90 kernels share: the shared memory of a CTA, the ring of tiles that the scheduler fills, the stages that the producer
// fills and the main loop that empties them. Clusters of two CTAs work on one ticket; each loads half of B for both.
#ifndef MEGATRON_MOK_KERNELS_SM90_PIPELINE_CUH_
#define MEGATRON_MOK_KERNELS_SM90_PIPELINE_CUH_

#include "kernels/activation.cuh"
#include "kernels/pull.cuh"
#include "mma/sm90.cuh"

namespace mok::sm90 {

constexpr int kThreads = 384;
constexpr int kStages = 4;
constexpr int kBoxBytes = kGranuleRows * kTileK * 2;  // a box of 64 x 64
constexpr int kABytes = 2 * kBoxBytes;                // 64 rows of A for each consumer warpgroup
constexpr int kBHalfBytes = kTileN / 2 * kTileK * 2;  // what one CTA loads and both receive
constexpr int kStageBytes = kABytes + 2 * kBHalfBytes;
constexpr int kPitch = kTileN * 2 + 16;               // of output rows: conflict-free for stmatrix, 16-byte aligned for bulk copies
constexpr int kStagingBytes = kGranuleRows * kPitch;
constexpr int kTileSlots = 8;   // the scheduler is at most 5 tiles ahead of the producers, these at most 3 ahead of the store warps
constexpr int kClaimAhead = 8;  // k-steps before a tile's last load at which the next ticket is claimed
constexpr int kNoMoreTiles = -1;

// Warps that move rows while others compute: warp 2 of every CTA, and warp 3 of the second CTA of a cluster. As many loads in flight as
// their registers hold: 12 KiB a cluster.
constexpr int kPullersOfCluster = 3, kPullAhead = 8;
__device__ __forceinline__ int puller_of_cluster(int warp, int cta) { return warp == 2 ? cta : warp == 3 && cta == 1 ? 2 : -1; }

struct TileInfo {
  int phase;   // kNoMoreTiles, or what the kernel calls its GEMMs
  int n;       // column tile, or the number of a tile inside its GEMM
  int block;   // first row block
  int expert;
  int rows;    // valid rows
  int batch, segment;  // backward only; segment: the tile's number in the weight gradients, and whether it is its expert's first and last
};

struct Smem {
  char stages[kStages][kStageBytes];
  char staging[kStagingBytes];
  TileInfo tiles[kTileSlots];
  uint64_t full[kStages], empty[kStages];
  uint64_t tile_full[kTileSlots];
  uint64_t filled[kStages];  // by a warpgroup's output, for the store warp
  uint64_t staging_full[2], claim;  // by warpgroup
  uint32_t staging_released;  // uses of the staging buffer that the store warp has read
  uint32_t tiles_seen;        // tiles that the store warp has read the description of
};
static_assert(sizeof(Smem) <= 232448, "shared memory of an SM");
static_assert(kStagingBytes <= kStageBytes);

__device__ __forceinline__ void init_barriers(Smem& s) {
  for (int i = 0; i < kStages; ++i) {
    ptx::mbarrier_init(ptx::smem(&s.full[i]), 1);
    ptx::mbarrier_init(ptx::smem(&s.empty[i]), 16);  // 2 CTAs x 2 warpgroups x 4 warps
  }
  for (uint64_t& barrier : s.filled) ptx::mbarrier_init(ptx::smem(&barrier), 128);
  for (int i = 0; i < kTileSlots; ++i) ptx::mbarrier_init(ptx::smem(&s.tile_full[i]), 1);
  for (uint64_t& barrier : s.staging_full) ptx::mbarrier_init(ptx::smem(&barrier), 128);
  ptx::mbarrier_init(ptx::smem(&s.claim), 1);
  s.staging_released = s.tiles_seen = 0;
  ptx::fence_mbarrier_init_cluster();
}

// ---- the ring of tiles ----

// One warp tells both CTAs of the cluster about tile i. What its lanes acquired before is passed on with it.
__device__ __forceinline__ void announce_tile(Smem& s, int i, const TileInfo& tile) {
  const int lane = threadIdx.x % 32;
  __syncwarp();
  if (lane < 2) {  // lane l tells CTA l
    const int slot = i % kTileSlots;
    const uint32_t at = ptx::map_to_cta(ptx::smem(&s.tiles[slot]), lane);
    ptx::store_cluster(at, tile.phase);
    ptx::store_cluster(at + 4, tile.n);
    ptx::store_cluster(at + 8, tile.block);
    ptx::store_cluster(at + 12, tile.expert);
    ptx::store_cluster(at + 16, tile.rows);
    ptx::store_cluster(at + 20, tile.batch);
    ptx::store_cluster(at + 24, tile.segment);
    ptx::mbarrier_arrive_cluster(ptx::map_to_cta(ptx::smem(&s.tile_full[slot]), lane));
  }
  __syncwarp();
}

__device__ __forceinline__ bool next_tile(Smem& s, int i, TileInfo& tile) {
  const int slot = i % kTileSlots;
  ptx::mbarrier_wait_cluster(ptx::smem(&s.tile_full[slot]), (i / kTileSlots) & 1);
  tile = s.tiles[slot];
  return tile.phase != kNoMoreTiles;
}

// Tiles that use no staging buffer do not hold the others back for the store warp: it tells what it has read, and the producer waits
// before its description can be overwritten. (Consumers need no such wait: each tile has a position in the ring of stages, of which the
// producer is at most kStages ahead.)
__device__ __forceinline__ void saw_tile(Smem& s, int i) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::store_release_cta(ptx::smem(&s.tiles_seen), i + 1);
}
__device__ __forceinline__ void await_store_warp(Smem& s, int i) {
  if (i > 2) ptx::wait_shared_count(ptx::smem(&s.tiles_seen), i - 2);
}

// Claims a ticket once the producer nears the end of tile i - 1; `total` where there are no more or the workspace is dead.
__device__ __forceinline__ uint32_t claim_ticket(Smem& s, int i, uint32_t* counter, uint32_t total, const WaitContext& wait) {
  if (i > 0) ptx::mbarrier_wait(ptx::smem(&s.claim), (i - 1) & 1);
  uint32_t ticket = 0;
  if (threadIdx.x % 32 == 0) {
    ticket = ptx::fetch_add_relaxed_gpu(counter, 1);
    if (workspace_dead(wait)) ticket = total;
  }
  return __shfl_sync(~0u, ticket, 0);
}

// Valid rows of the unit that starts at `block`: one block, or two of the same expert.
__device__ __forceinline__ int unit_rows(const int* block_words, int block, int blocks) {
  const int word = __ldg(block_words + block);
  const int next = block + 1 < blocks ? __ldg(block_words + block + 1) : -1;
  const bool two = next >= 0 && block_rows(word) == kBlockRows && block_expert(next) == block_expert(word);
  return block_rows(word) + (two ? block_rows(next) : 0);
}

// ---- stages ----

// Position in the ring of stages; `parity` is the phase that a consumer waits for.
struct StageCursor {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// What a consumer warp tells the producers: a stage has been read. Every warp of both warpgroups of both CTAs does, since B was
// multicast.
struct StageRelease {
  uint32_t own, peer;
  __device__ __forceinline__ StageRelease(Smem& s, int cta) : own(ptx::smem(s.empty)), peer(ptx::map_to_cta(own, cta ^ 1)) {}
  __device__ __forceinline__ void operator()(int stage) const {
    const int lane = threadIdx.x % 32;
    if (lane == 0) ptx::mbarrier_arrive(own + stage * 8);
    if (lane == 1) ptx::mbarrier_arrive_relaxed_cluster(peer + stage * 8);
  }
};

// d = A B^T over `steps` stages, for consumer warpgroup `group`.
template <bool kAIsMn, bool kBIsMn>
__device__ __forceinline__ void multiply(float (&d)[128], Smem& s, StageCursor& at, int steps, int group,
                                         const StageRelease& release) {
  constexpr int kAStep = kAIsMn ? 128 : 2, kBStep = kBIsMn ? 128 : 2;
  int previous = 0;
  // Nothing of the tile before lives on in these registers: epilogues move them, and the compiler would serialise the MMAs (C7520).
#pragma unroll
  for (float& x : d) x = 0.f;
  for (int k = 0; k < steps; ++k) {
    ptx::mbarrier_wait(ptx::smem(&s.full[at.stage]), at.parity);
    const uint32_t stage = ptx::smem(s.stages[at.stage]);
    const uint64_t a = kAIsMn ? descriptor_mn(stage + group * kBoxBytes) : descriptor(stage + group * kBoxBytes);
    const uint64_t b = kBIsMn ? descriptor_mn(stage + kABytes) : descriptor(stage + kABytes);
    mma_fence();
#pragma unroll
    for (int kk = 0; kk < kTileK / 16; ++kk) mma_m64n256k16<kAIsMn, kBIsMn>(d, a + kk * kAStep, b + kk * kBStep);
    mma_commit();
    if (k > 0) {
      mma_wait<1>();
      release(previous);
    }
    previous = at.stage;
    at.next();
  }
  mma_wait<0>();
  release(previous);
  mma_pin(d);
}

// A warpgroup without rows only keeps step.
__device__ __forceinline__ void skip_stages(Smem& s, StageCursor& at, int steps, const StageRelease& release) {
  for (int k = 0; k < steps; ++k) {
    ptx::mbarrier_wait(ptx::smem(&s.full[at.stage]), at.parity);
    __syncwarp();
    release(at.stage);
    at.next();
  }
}

// ---- output: from the consumer warpgroups through shared memory to the store warp ----

// A tile's output leaves in pieces of up to 64 rows x 512 bytes; piece = part * 2 + warpgroup, stored in this order. The first `slots`
// pieces go through the positions of the ring of stages after the tile's k-steps, which the producer leaves empty, or with what the
// epilogue reads before it writes; the last one, or the last two if they are small, through the staging buffer. So both warpgroups
// write all they have at once and go on with the next tile, whose loads have the rest of the stages.
__device__ __forceinline__ int output_slots(int parts) { return parts > 0 ? 2 * parts - 1 : 0; }

// The producer's: nothing is loaded, the positions go to the consumers once they are empty. (A peer may pass such a position without our
// multicast and arrive at our `empty` for its next use while an arrival for this one is under way. The count still tells phases apart:
// it is there only after all sixteen have released this use at the peer's.)
__device__ __forceinline__ void leave_stages(Smem& s, StageCursor& at, int count) {
  for (int i = 0; i < count; ++i) {
    ptx::mbarrier_wait(ptx::smem(&s.empty[at.stage]), at.parity ^ 1);
    ptx::mbarrier_arrive(ptx::smem(&s.full[at.stage]));
    at.next();
  }
}

// A consumer warpgroup's way through the output of one tile.
class Output {
 public:
  __device__ __forceinline__ Output(Smem& s, StageCursor& at, const StageRelease& release, int slots, uint32_t staging_uses)
      : s_(s), at_(at), release_(release), slots_(slots), staging_uses_(staging_uses) {}

  // Where `piece` goes: free to be written, or with what the producer loaded there. Pieces are opened in ascending order.
  __device__ __forceinline__ uint32_t open(int piece) {
    pass_before(min(piece, slots_));
    if (piece >= slots_) {
      ptx::wait_shared_count(ptx::smem(&s_.staging_released), staging_uses_);
      filled_ = ptx::smem(&s_.staging_full[piece % 2]);
      return ptx::smem(s_.staging) + (piece - slots_) * 2 * kBoxBytes;
    }
    ptx::mbarrier_wait(ptx::smem(&s_.full[at_.stage]), at_.parity);
    filled_ = ptx::smem(&s_.filled[at_.stage]);
    const uint32_t to = ptx::smem(s_.stages[at_.stage]);
    at_.next();
    ++passed_;
    return to;
  }
  // The piece opened last is written: by all 128 threads.
  __device__ __forceinline__ void hand_over() const {
    ptx::fence_proxy_async_shared();
    ptx::mbarrier_arrive(filled_);
  }
  // Behind the last piece, and all that a warpgroup without rows does.
  __device__ __forceinline__ void close() { pass_before(slots_); }

 private:
  // The other warpgroup's positions; both release every position, or have the store warp do it.
  __device__ __forceinline__ void pass_before(int piece) {
    const int passed = passed_;
    if (piece > passed) skip_stages(s_, at_, piece - passed, release_), passed_ = piece;
  }

  Smem& s_;
  StageCursor& at_;
  const StageRelease& release_;
  const int slots_;
  const uint32_t staging_uses_;  // of the tiles before
  int passed_ = 0;
  uint32_t filled_ = 0;
};

// The store warp's side.
class Outbox {
 public:
  __device__ __forceinline__ Outbox(Smem& s, int cta) : s_(s), empty_(ptx::smem(s.empty)), peer_(ptx::map_to_cta(empty_, cta ^ 1)) {}

  // Goes over `count` positions of the ring: k-steps, or pieces that do not exist here.
  __device__ __forceinline__ void pass(int count) { stage_ = (stage_ + count) % kStages; }
  // Waits until `piece` is written and returns where it lies.
  __device__ __forceinline__ uint32_t wait(int piece, int slots) const {
    if (piece >= slots) {
      ptx::mbarrier_wait(ptx::smem(&s_.staging_full[piece % 2]), staging_parities_ >> piece % 2 & 1);
      return ptx::smem(s_.staging) + (piece - slots) * 2 * kBoxBytes;
    }
    ptx::mbarrier_wait(ptx::smem(&s_.filled[stage_]), parities_ >> stage_ & 1);
    return ptx::smem(s_.stages[stage_]);
  }
  // Its bulk copies are issued: gives its memory back once they have read it.
  __device__ __forceinline__ void give_back(int piece, int slots) {
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
    __syncwarp();  // no lane runs ahead: a parity tells two neighbouring uses apart, no more
    const int lane = threadIdx.x % 32;
    if (piece >= slots) {
      ++staging_uses_;
      staging_parities_ ^= 1u << piece % 2;
      if (lane == 0) ptx::store_release_cta(ptx::smem(&s_.staging_released), staging_uses_);
      return;
    }
    if (lane == 0) ptx::mbarrier_arrive(empty_ + stage_ * 8, 4);  // for the four warps that wrote it
    if (lane == 1) ptx::mbarrier_arrive_relaxed_cluster(peer_ + stage_ * 8, 4);
    parities_ ^= 1u << stage_;
    pass(1);
  }

 private:
  Smem& s_;
  const uint32_t empty_, peer_;
  int stage_ = 0;
  uint32_t parities_ = 0, staging_parities_ = 0;  // of filled and staging_full, a bit each
  uint32_t staging_uses_ = 0;
};

// This lane's matrix row inside a warp's 16 rows, and which of two neighbouring 16-byte columns, for stmatrix.x4 of the
// fragments (column, rows 0-7), (column, rows 8-15), (column + 1, rows 0-7), (column + 1, rows 8-15).
__device__ __forceinline__ int matrix_row() {
  const int lane = threadIdx.x % 32;
  return threadIdx.x / 32 % 4 * 16 + (lane >> 3 & 1) * 8 + (lane & 7);
}
__device__ __forceinline__ int matrix_column() { return threadIdx.x % 32 >> 4; }
// Where they lie in images of 64 rows x 128 swizzled bytes, which tensor maps and GEMMs read: 8 columns of 16 bytes an image.
__device__ __forceinline__ uint32_t image_offset(int column) {
  const int row = matrix_row(), at = column + matrix_column();
  return (at >> 3) * kBoxBytes + row * 128 + (((at & 7) ^ (row & 7)) << 4);
}

// Where h of one row lies, its lane's vectors of 16 bytes: eight a tile of 128 columns of I, in the order gate, gate, up, up of the first
// 64 columns, then of the others, so that the backward can overwrite 64 columns of h by those of its gradient.
__device__ __forceinline__ int h_vector(int v) { return (v & 1) | (v & 2) << 1 | (v & 4) >> 1; }

// ---- reduction of the slots: out[t] = sum over k ascending, fp32, one rounding ----

// Which of a token's up to 32 routes exist.
__device__ __forceinline__ uint32_t routes_of(const int* ids, int top_k, int experts) {
  uint32_t routes = 0;
  for (int k = 0; k < top_k; ++k) routes |= uint32_t(uint32_t(__ldg(ids + k)) < uint32_t(experts)) << k;
  return routes;
}

__device__ __forceinline__ void reduce_slots(const char* slots, const int* ids, char* out, int64_t tokens, int top_k, int hidden,
                                             int experts) {
  const int vectors = hidden / 8;  // of 16 bytes a row
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int stride = gridDim.x * kThreads;
  const int token_step = stride / vectors, column_step = stride % vectors;
  int64_t token = first / vectors;
  int column = int(first % vectors);
  uint32_t routes = token < tokens ? routes_of(ids + token * top_k, top_k, experts) : 0;
  while (token < tokens) {
    const uint4* from = reinterpret_cast<const uint4*>(slots) + token * top_k * vectors + column;
    uint4* to = reinterpret_cast<uint4*>(out) + token * vectors + column;
    column += column_step;
    token += token_step + (column >= vectors);
    column -= column >= vectors ? vectors : 0;
    uint32_t next = 0;  // its routes come while the slots do
    float sum[8] = {};
    constexpr int kAhead = 8;  // loads in flight a thread; with 4 the reduction runs at half of the memory's rate
    for (int k = 0; k < top_k; k += kAhead) {
      uint4 v[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a)
        if (routes >> (k + a) & 1) v[a] = __ldcg(from + int64_t(k + a) * vectors);
      if (k == 0 && token < tokens) next = routes_of(ids + token * top_k, top_k, experts);
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (!(routes >> (k + a) & 1)) continue;
        const uint32_t w[4] = {v[a].x, v[a].y, v[a].z, v[a].w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float2 f = unpack_bf16(w[c]);
          sum[2 * c] += f.x;
          sum[2 * c + 1] += f.y;
        }
      }
    }
    *to = make_uint4(pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7]));
    routes = next;
  }
}

// All CTAs of this rank have pushed: the last one tells every peer, then each waits for every peer. False in a dead workspace.
__device__ __forceinline__ bool finish_call(const WaitContext& wait, uint32_t* finished, uint64_t expected) {
  arrive_and_tell_peers(wait, finished, &Flags::done, expected);
  bool ok = true;
  uint64_t start = 0;
  if (int(threadIdx.x) < wait.ranks) {
    start = start_of_wait(wait, MOK_PHASE_COMBINE, wait.flags->done, expected);
    ok = wait_stamp(wait, MOK_PHASE_COMBINE, &wait.flags->done[threadIdx.x], threadIdx.x, expected);
  }
  ok = __syncthreads_and(ok && !workspace_dead(wait));
  end_of_wait(wait, start);
  return ok;
}

}  // namespace mok::sm90
#endif  // MEGATRON_MOK_KERNELS_SM90_PIPELINE_CUH_
