// Row copies of the dispatch: each warp pulls rows of the schedule from their owners into a ring, with several loads and
// several stores in flight (one in flight is bound by latency: 285 ns a copy and warp on an H200).
#ifndef MEGATRON_MOK_KERNELS_PULL_CUH_
#define MEGATRON_MOK_KERNELS_PULL_CUH_

#include "sync/wait.cuh"

namespace mok {

constexpr int kPullWarps = 8;          // warps of a CTA that pull
constexpr int kPullStages = 6;         // chunks in a warp's part of shared memory
constexpr int kPullStores = 2;         // stores in flight; the other stages hold loads
constexpr int kPullChunk = 4096;       // bytes of a stage
constexpr int kPullBytes = kPullWarps * kPullStages * kPullChunk;
constexpr int kPullBarrierBytes = kPullWarps * kPullStages * 8;

// One source of rows and the ring that receives them.
struct PullJob {
  bool zero_padding;           // padding rows of a granule that has valid ones become zeros, and count as ready
  int local_rank;              // its rows are read in place
  const char* local_rows;
  const uint64_t* peers;       // symmetric regions; the other ranks' rows lie at peer_offset
  int64_t peer_offset;
  char* ring;
  int64_t row_bytes;           // a multiple of 16
  int ring_blocks, top_k;
  const int* schedule_src;     // columns of the schedule
  const int* schedule_slot;
  const int* block_words;
  uint32_t* ready;             // per granule: rows in place
};

// The last granule before this one that had the same slot of a ring and has rows, or -1. An expert's last block may have none in
// its second half; whoever had that half before it may still be read.
__device__ __forceinline__ int last_in_slot(const int* block_words, int granule, int ring_blocks) {
  do {
    granule -= 2 * ring_blocks;
  } while (granule >= 0 && block_rows(__ldg(block_words + granule / 2)) <= kGranuleRows * (granule & 1));
  return granule < 0 ? -1 : granule;
}

// Free(granule) names the counter that says that an earlier granule's slot may be overwritten, and the count to wait for. Every lane
// calls it with the same granule, and a warp asks for granules in ascending order.
struct SlotFree {
  const uint32_t* counter;
  uint32_t count;
};

template <class Free>
class RowPuller {
 public:
  __device__ RowPuller(const WaitContext& wait, uint32_t smem, uint32_t barriers, uint32_t zeros, int warp, Free free)
      : wait_(wait), lane_(threadIdx.x % 32), zeros_(zeros), free_(free) {
    stage_ = smem + warp * kPullStages * kPullChunk;
    barrier_ = barriers + warp * kPullStages * 8;
  }

  // Pulls the rows of one batch: this lane names padded row `row` (or -1). Rows of the same `width` neighbouring lanes form a
  // group of one granule, signalled once.
  __device__ void batch(const PullJob& job, int row, int width) {
    const int chunks = int(ceil_div<int64_t>(job.row_bytes, kPullChunk));
    const int chunk_bytes = int(round_up<int64_t>(ceil_div<int64_t>(job.row_bytes, chunks), 16));
    int src = -1, slot = 0;
    bool zero = false;
    if (row >= 0) {
      src = __ldg(job.schedule_src + row);
      slot = __ldg(job.schedule_slot + row);
      zero = src < 0 && job.zero_padding &&
             block_rows(__ldg(job.block_words + row / kBlockRows)) > row % kBlockRows / kGranuleRows * kGranuleRows;
    }
    const char* from = nullptr;
    char* to = nullptr;
    if (src >= 0) {
      const char* rows = src == job.local_rank ? job.local_rows
                                                : reinterpret_cast<const char*>(job.peers[src]) + job.peer_offset;
      from = rows + int64_t(slot / job.top_k) * job.row_bytes;
    }
    if (src >= 0 || zero)
      to = job.ring + (int64_t(row / kBlockRows % job.ring_blocks) * kBlockRows + row % kBlockRows) * job.row_bytes;
    uint32_t valid = __ballot_sync(~0u, src >= 0 || zero);
    while (valid) {
      const int i = __ffs(valid) - 1;
      valid &= valid - 1;
      const int granule = __shfl_sync(~0u, row / kGranuleRows, i);
      const uint32_t group = ((width == 32 ? 0u : (1u << width)) - 1u) << (i / width * width);
      // The last row of the group signals for all of it.
      const bool last = (valid & group) == 0;
      if (granule != free_granule_) await_slot(job, granule);
      const char* source = reinterpret_cast<const char*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(from), i));
      char* target = reinterpret_cast<char*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(to), i));
      pending_ += 1;
      const bool is_zero = source == nullptr;
      for (int c = 0; c < chunks; ++c) {
        const int at = c * chunk_bytes;
        const int bytes = int(min(int64_t(chunk_bytes), job.row_bytes - at));
        if (is_zero) {
          if (lane_ == 0) {
            ptx::bulk_store(target + at, zeros_, bytes);
            ptx::bulk_commit();
          }
        } else {
          copy(source + at, target + at, bytes, last && c == chunks - 1 ? job.ready + granule : nullptr, pending_);
        }
      }
      if (last && is_zero) {  // an expert's end: rare enough to wait for everything
        drain();
        if (lane_ == 0) ptx::add_release_gpu(job.ready + granule, pending_);
      }
      if (last) pending_ = 0;
    }
  }

  // Completes and signals everything in flight.
  __device__ void finish() { drain(); }

 private:
  // Before a wait all copies in flight are completed and signalled, or the tiles that we wait for could wait for them.
  __device__ void await_slot(const PullJob& job, int granule) {
    free_granule_ = granule;
    const int old = last_in_slot(job.block_words, granule, job.ring_blocks);
    if (old < 0) return;
    const SlotFree slot = free_(old);
    uint32_t seen = 0;
    if (lane_ == 0) seen = ptx::load_acquire_gpu(slot.counter);
    if (__shfl_sync(~0u, seen, 0) < slot.count) {
      drain();
      if (lane_ == 0) wait_count(wait_, MOK_PHASE_DISPATCH, slot.counter, slot.count);
      __syncwarp();
    }
    ptx::fence_proxy_async_global();
  }

  __device__ void copy(const char* source, char* target, int bytes, uint32_t* signal, int count) {
    while (issued_ - drained_ >= kPullStages - kPullStores) store_one();
    const int s = issued_ % kPullStages;
    if (lane_ == s) {
      target_ = target;
      bytes_ = bytes;
      signal_ = signal;
      count_ = count;
    }
    if (lane_ == 0) {
      ptx::mbarrier_expect_tx(barrier_ + s * 8, bytes);
      ptx::bulk_load(stage_ + s * kPullChunk, source, bytes, barrier_ + s * 8);
    }
    ++issued_;
  }

  __device__ void store_one() {
    const int s = drained_ % kPullStages;
    char* target = reinterpret_cast<char*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(target_), s));
    const int bytes = __shfl_sync(~0u, bytes_, s);
    if (lane_ == 0) {
      ptx::mbarrier_wait(barrier_ + s * 8, (parity_ >> s) & 1);
      ptx::bulk_store(target, stage_ + s * kPullChunk, bytes);
      ptx::bulk_commit();
      ptx::bulk_wait<kPullStores>();
    }
    __syncwarp();
    parity_ ^= 1u << s;
    ++drained_;
    if (drained_ > kPullStores + signalled_) signal_one();
  }

  // Chunk number signalled_ is complete in memory.
  __device__ void signal_one() {
    const int s = signalled_ % kPullStages;
    uint32_t* counter = reinterpret_cast<uint32_t*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(signal_), s));
    const int count = __shfl_sync(~0u, count_, s);
    if (lane_ == 0 && counter) ptx::add_release_gpu(counter, count);
    ++signalled_;
  }

  __device__ void drain() {
    while (drained_ < issued_) store_one();
    if (lane_ == 0) ptx::bulk_wait<0>();
    __syncwarp();
    while (signalled_ < drained_) signal_one();
  }

  const WaitContext& wait_;
  const int lane_;
  const uint32_t zeros_;  // kPullChunk bytes of zeros in shared memory, or 0 where no job wants them
  Free free_;
  uint32_t stage_, barrier_, parity_ = 0;
  int issued_ = 0, drained_ = 0, signalled_ = 0, pending_ = 0, free_granule_ = -1;
  char* target_ = nullptr;  // of the stage that this lane keeps
  uint32_t* signal_ = nullptr;
  int bytes_ = 0, count_ = 0;
};

}  // namespace mok
#endif  // MEGATRON_MOK_KERNELS_PULL_CUH_
