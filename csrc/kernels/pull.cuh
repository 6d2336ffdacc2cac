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
  const uint32_t* ring_free;   // per granule: tiles that have read it; a slot is free when its last granule's count is full
  uint32_t ring_free_count;
};

class RowPuller {
 public:
  __device__ RowPuller(const PullJob& job, const WaitContext& wait, uint32_t smem, uint32_t barriers, int warp)
      : job_(job), wait_(wait), lane_(threadIdx.x % 32) {
    stage_ = smem + warp * kPullStages * kPullChunk;
    barrier_ = barriers + warp * kPullStages * 8;
    chunks_ = int(ceil_div<int64_t>(job.row_bytes, kPullChunk));
    chunk_bytes_ = int(round_up<int64_t>(ceil_div<int64_t>(job.row_bytes, chunks_), 16));
  }

  // Pulls the rows of one batch: this lane names padded row `row` (or -1). Rows of the same `width` neighbouring lanes form a
  // group of one granule, signalled once.
  __device__ void batch(int row, int width) {
    int src = -1, slot = 0;
    if (row >= 0) {
      src = __ldg(job_.schedule_src + row);
      slot = __ldg(job_.schedule_slot + row);
    }
    const char* from = nullptr;
    char* to = nullptr;
    int block = 0;
    if (src >= 0) {
      block = row / kBlockRows;
      const char* rows = src == job_.local_rank ? job_.local_rows
                                                : reinterpret_cast<const char*>(job_.peers[src]) + job_.peer_offset;
      from = rows + int64_t(slot / job_.top_k) * job_.row_bytes;
      to = job_.ring + (int64_t(block % job_.ring_blocks) * kBlockRows + row % kBlockRows) * job_.row_bytes;
    }
    uint32_t valid = __ballot_sync(~0u, src >= 0);
    while (valid) {
      const int i = __ffs(valid) - 1;
      valid &= valid - 1;
      const int granule = __shfl_sync(~0u, row / kGranuleRows, i);
      const uint32_t group = ((width == 32 ? 0u : (1u << width)) - 1u) << (i / width * width);
      // The last row of the group signals for all of it.
      const bool last = (valid & group) == 0;
      if (granule >= 2 * job_.ring_blocks) await_slot(granule - 2 * job_.ring_blocks);
      const char* source = reinterpret_cast<const char*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(from), i));
      char* target = reinterpret_cast<char*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(to), i));
      pending_ += 1;
      for (int c = 0; c < chunks_; ++c) {
        const int at = c * chunk_bytes_;
        const int bytes = int(min(int64_t(chunk_bytes_), job_.row_bytes - at));
        const bool signal = last && c == chunks_ - 1;
        copy(source + at, target + at, bytes, signal ? granule : -1, pending_);
        if (signal) pending_ = 0;
      }
    }
  }

  // Completes and signals everything in flight.
  __device__ void finish() { drain(); }

 private:
  // An earlier block's rows may be overwritten once every GEMM 1 tile has read them. Before a wait all copies in flight are
  // completed and signalled, or the tiles that we wait for could wait for them.
  __device__ void await_slot(int old_granule) {
    const int word = __ldg(job_.block_words + old_granule / 2);
    if (block_rows(word) <= kGranuleRows * (old_granule & 1)) return;
    if (old_granule == free_granule_) return;
    uint32_t seen = 0;
    if (lane_ == 0) seen = ptx::load_acquire_gpu(job_.ring_free + old_granule);
    if (__shfl_sync(~0u, seen, 0) < job_.ring_free_count) {
      drain();
      if (lane_ == 0) wait_count(wait_, MOK_PHASE_DISPATCH, job_.ring_free + old_granule, job_.ring_free_count);
      __syncwarp();
    }
    free_granule_ = old_granule;
    ptx::fence_proxy_async_global();
  }

  __device__ void copy(const char* source, char* target, int bytes, int signal, int count) {
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
    const int granule = __shfl_sync(~0u, signal_, s);
    const int count = __shfl_sync(~0u, count_, s);
    if (lane_ == 0 && granule >= 0) ptx::add_release_gpu(job_.ready + granule, count);
    ++signalled_;
  }

  __device__ void drain() {
    while (drained_ < issued_) store_one();
    if (lane_ == 0) ptx::bulk_wait<0>();
    __syncwarp();
    while (signalled_ < drained_) signal_one();
  }

  const PullJob& job_;
  const WaitContext& wait_;
  const int lane_;
  uint32_t stage_, barrier_, parity_ = 0;
  int chunks_, chunk_bytes_;
  int issued_ = 0, drained_ = 0, signalled_ = 0, pending_ = 0, free_granule_ = -1;
  char* target_ = nullptr;  // of the stage that this lane keeps
  int bytes_ = 0, signal_ = -1, count_ = 0;
};

}  // namespace mok
#endif  // MEGATRON_MOK_KERNELS_PULL_CUH_
