// Row copies of the dispatch: a warp pulls rows of the schedule from their owners into a ring, through registers. The warps that have
// nothing else to do move about 500 GB/s on an H200, so no SM is given to copies and no shared memory either.
#ifndef MEGATRON_MOK_KERNELS_PULL_CUH_
#define MEGATRON_MOK_KERNELS_PULL_CUH_

#include "sync/wait.cuh"

namespace mok {

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

  // Rows that a warp copies before it signals: about 32 KiB, a power of two that divides a granule.
  __device__ int chunk_rows() const {
    int rows = 1;
    while (rows < 32 && 2 * rows * row_bytes <= 32768) rows *= 2;
    return rows;
  }
};

// The last granule before this one that had the same slot of a ring and has rows, or -1. An expert's last block may have none in
// its second half; whoever had that half before it may still be read.
__device__ __forceinline__ int last_in_slot(const int* block_words, int granule, int ring_blocks) {
  do {
    granule -= 2 * ring_blocks;
  } while (granule >= 0 && block_rows(__ldg(block_words + granule / 2)) <= kGranuleRows * (granule & 1));
  return granule < 0 ? -1 : granule;
}

// What this lane's row of the schedule is: it comes from a row of `src` (its token's), or is padding.
struct SourceRow {
  int src = -1, slot = 0;
  __device__ static SourceRow load(const PullJob& job, int row) {  // of a padded row, or -1
    SourceRow s;
    if (row >= 0) {
      s.src = __ldg(job.schedule_src + row);
      s.slot = __ldg(job.schedule_slot + row);
    }
    return s;
  }
  __device__ const uint4* address(const PullJob& job) const {  // of nothing that may be read, for padding
    const char* rows = src == job.local_rank ? job.local_rows : reinterpret_cast<const char*>(job.peers[max(src, 0)]) + job.peer_offset;
    return reinterpret_cast<const uint4*>(rows + int64_t(slot / job.top_k) * job.row_bytes);
  }
  // Padding in a granule that has rows, where it is to become zeros.
  __device__ bool is_zero(const PullJob& job, int row) const {
    return src < 0 && row >= 0 && job.zero_padding &&
           block_rows(__ldg(job.block_words + row / kBlockRows)) > row % kBlockRows / kGranuleRows * kGranuleRows;
  }
};

// A warp copies up to 32 consecutive padded rows of one granule, of which lane l names row `first` + l (`row`, or -1), kAhead loads in
// flight a lane, and signals them. The rows were published in this call, so they do not come from the L1 cache. `await` comes before
// the first write.
template <int kAhead, class Await>
__device__ __forceinline__ void pull_rows(const PullJob& job, int first, int row, const SourceRow& mine, Await await) {
  const int lane = threadIdx.x % 32, vectors = int(job.row_bytes / 16);
  const int copies = __popc(__ballot_sync(~0u, mine.src >= 0));  // an expert's padding comes last
  const int rows = copies + __popc(__ballot_sync(~0u, mine.is_zero(job, row)));
  if (rows == 0) return;
  const uint64_t address = reinterpret_cast<uint64_t>(mine.address(job));
  uint4* to = reinterpret_cast<uint4*>(job.ring + (int64_t(first / kBlockRows % job.ring_blocks) * kBlockRows + first % kBlockRows) * job.row_bytes);
  await();
  int i = 0, column = lane;
  for (int base = lane; base - lane < copies * vectors; base += 32 * kAhead) {
    uint4 v[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      while (column >= vectors) column -= vectors, ++i;
      const uint4* from = reinterpret_cast<const uint4*>(__shfl_sync(~0u, address, i)) + column;
      if (i < copies) v[a] = __ldcg(from);
      column += 32;
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
      if (base + 32 * a < copies * vectors) to[base + 32 * a] = v[a];
  }
  for (int at = copies * vectors + lane; at < rows * vectors; at += 32) to[at] = make_uint4(0, 0, 0, 0);
  ptx::fence_proxy_async_global();  // tiles read the ring by TMA
  __syncwarp();
  if (lane == 0) ptx::add_release_gpu(job.ready + first / kGranuleRows, rows);
}

// Up to 32 rows one by one, wherever they are: for a start in which all warps take part.
template <int kAhead>
__device__ __forceinline__ void pull_scattered(const PullJob& job, int row) {
  const SourceRow mine = SourceRow::load(job, row);
  for (uint32_t left = __ballot_sync(~0u, row >= 0); left; left &= left - 1) {
    const int i = __ffs(left) - 1, first = __shfl_sync(~0u, row, i);
    const SourceRow one{__shfl_sync(~0u, mine.src, i), __shfl_sync(~0u, mine.slot, i)};
    const bool here = threadIdx.x % 32 == 0;
    pull_rows<kAhead>(job, first, here ? first : -1, here ? one : SourceRow{}, [] {});
  }
}

}  // namespace mok
#endif  // MEGATRON_MOK_KERNELS_PULL_CUH_
