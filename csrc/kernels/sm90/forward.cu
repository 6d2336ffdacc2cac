// The forward megakernel on SM90: pull x, GEMM 1 with SwiGLU, GEMM 2, push y, reduce. One launch, one CTA an SM, clusters of two.
//
// Who does what in a CTA of 384 threads:
//   all warps      pull the first units' rows together
//   warp 0         producer: TMA loads of a tile's operands into four stages; its half of B goes to both CTAs of the cluster
//   warp 1         store warp: writes finished tiles, act into its ring, y rows into their owners' slots
//   warp 2, 3      pull the other rows in the first comm_ctas CTAs; but warp 3 of CTA 0 of a cluster is the
//                  scheduler: claims a ticket, waits for what it needs, tells both CTAs
//   warps 4..11    two consumer warpgroups, 64 rows each: WGMMA and epilogue
// Each consumer warpgroup leaves its output in a place of its own (pipeline.cuh), so neither waits for the other.
// Legend: T tokens, K experts a token, H hidden, I intermediate, L local experts; unit, block, granule, group: constants.h.
#include <cuda_bf16.h>

#include "kernels/activation.cuh"
#include "kernels/forward_params.h"
#include "kernels/launch.h"
#include "kernels/sm90/pipeline.cuh"
#include "kernels/tensor_map.h"

namespace mok::sm90 {
namespace {

enum Phase { kGemm1, kGemm2 };

struct Kernel {
  const ForwardParams& p;
  Smem& s;
  WaitContext wait;
  const int cta;  // in the cluster

  __device__ const int* blob(int64_t word) const { return p.schedule + word; }
  template <class T>
  __device__ T* local(int64_t offset) const {
    return reinterpret_cast<T*>(p.local + offset);
  }
  __device__ int n1() const { return p.intermediate / kTileI; }
  __device__ int n2() const { return (p.hidden + kTileN - 1) / kTileN; }

  // ---- dispatch ----
  __device__ PullJob job() const {
    PullJob job{};
    job.ring = local<char>(p.offsets.x_ring);
    job.row_bytes = int64_t(p.hidden) * 2;
    job.ring_blocks = p.ring_blocks;
    job.top_k = p.top_k;
    job.schedule_src = blob(p.blob.src);
    job.schedule_slot = blob(p.blob.slot);
    job.block_words = blob(p.blob.block);
    job.ready = local<uint32_t>(p.offsets.x_ready);
    job.local_rank = p.rank;
    job.local_rows = p.x;
    job.peers = p.peers;
    job.peer_offset = p.symmetric.x;
    return job;
  }
  // Rows of the units that the first tickets need.
  __device__ int head_rows() const {
    const int blocks = __ldg(p.schedule + kScheduleBlocks), units = __ldg(p.schedule + kScheduleUnits);
    const int head_units = min(units, ceil_div(int(gridDim.x) / 2, QuadTile::kQuad * n1()) * QuadTile::kQuad);
    return min(head_units < units ? __ldg(blob(p.blob.unit) + head_units) : blocks, p.ring_blocks) * kBlockRows;
  }
  // These come row by row over all warps: the kernel starts at memory speed.
  __device__ void pull_head() const {
    if (__any_sync(~0u, workspace_dead(wait))) return;  // its schedule may be garbage
    const PullJob x = job();
    const int rows = head_rows(), warps = gridDim.x * (kThreads / 32), me = threadIdx.x / 32 * gridDim.x + blockIdx.x;
    for (int64_t base = me; base < rows; base += warps * 32) {
      const int64_t row = base + int64_t(threadIdx.x % 32) * warps;
      pull_scattered<16>(x, row < rows ? int(row) : -1);
    }
  }
  // The rest in order, by the warps that have nothing else to do.
  __device__ void pull_rest(int me, int pullers) const {
    if (__any_sync(~0u, workspace_dead(wait))) return;
    const PullJob x = job();
    const int lane = threadIdx.x % 32, rows = x.chunk_rows(), total = __ldg(p.schedule + kScheduleBlocks) * kBlockRows;
    const auto row = [&](int base) { return lane < rows && base < total ? base + lane : -1; };
    int base = head_rows() + me * rows;
    SourceRow next = SourceRow::load(x, row(base));
    for (; base < total; base += pullers * rows) {
      const SourceRow mine = next;
      next = SourceRow::load(x, row(base + pullers * rows));  // ahead of its copies
      pull_rows<kPullAhead>(x, base, row(base), mine, [&] {
        // A slot is free when every GEMM 1 tile has read the granule that had it before.
        const int old = last_in_slot(x.block_words, base / kGranuleRows, p.ring_blocks);
        if (old < 0) return;
        if (lane == 0) wait_count(wait, MOK_PHASE_DISPATCH, local<uint32_t>(p.offsets.act_done) + old, n1());
        __syncwarp();
      });
    }
  }

  // ---- scheduler: one warp of CTA 0 ----
  __device__ void schedule_tiles() const {
    const int lane = threadIdx.x % 32;
    const TicketOrder order{__ldg(p.schedule + kScheduleUnits), p.minibatch_units, n1(), n2()};
    const uint32_t total = uint32_t(order.total());
    const int blocks = __ldg(p.schedule + kScheduleBlocks);
    TileInfo info{};
    for (int i = 0; info.phase != kNoMoreTiles; ++i) {
      const uint32_t ticket = claim_ticket(s, i, &wait.control->ticket, total, wait);
      info = {kNoMoreTiles};
      if (ticket < total) {
        const Tile tile = order.decode(int(ticket));
        const int block = __ldg(blob(p.blob.unit) + tile.unit);
        const int rows = unit_rows(blob(p.blob.block), block, blocks);
        info = {tile.phase, tile.n, block, block_expert(__ldg(blob(p.blob.block) + block)), rows};
        const int left = rows - lane * kGranuleRows;  // rows of the granule that this lane waits for
        if (lane < kUnitRows / kGranuleRows && left > 0) {
          const int granule = block * 2 + lane;
          if (tile.phase == kGemm1)
            wait_count(wait, MOK_PHASE_GEMM1, local<uint32_t>(p.offsets.x_ready) + granule, min(left, kGranuleRows));
          else
            wait_count(wait, MOK_PHASE_GEMM2, local<uint32_t>(p.offsets.act_done) + granule, n1());
        }
      }
      announce_tile(s, i, info);
    }
  }

  // Ring positions of a tile's output (pipeline.cuh): both pieces of act fit into the staging buffer.
  __device__ static int slots(const TileInfo& tile) { return tile.phase == kGemm1 ? 0 : output_slots(1); }

  // ---- producer: one thread ----
  __device__ void load_tiles() const {
    StageCursor at;
    TileInfo tile;
    for (int i = 0; next_tile(s, i, tile); ++i) {
      await_store_warp(s, i);
      ptx::fence_proxy_async_global();  // the scheduler acquired the flags; our next accesses go through the async proxy
      const GranuleShare share = GranuleShare::make(tile.rows, cta);
      const int steps = (tile.phase == kGemm1 ? p.hidden : p.intermediate) / kTileK;
      const uint32_t bytes = share.count * kBoxBytes + 2 * kBHalfBytes;
      // Gate rows come from CTA 0, up rows from CTA 1; in GEMM 2 the two halves of the 256 columns.
      const int w_row = tile.phase == kGemm1 ? tile.n * kTileI + cta * p.intermediate : tile.n * kTileN + cta * (kTileN / 2);
      const ExpertTensors& w = tile.phase == kGemm1 ? p.w1 : p.w2;
      const uint64_t expert = w.places.at[tile.expert];
      const CUtensorMap* a_map = tile.phase == kGemm1 ? &p.x_map : &p.act_map;
      const int a_blocks = tile.phase == kGemm1 ? p.ring_blocks : p.act_blocks;
      int row[2];
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        const int granule = share.first + g;
        row[g] = (tile.block + granule / 2) % a_blocks * kBlockRows + granule % 2 * kGranuleRows;
      }
      const int claim_step = max(steps - kClaimAhead, 0);
      for (int k = 0; k < steps; ++k) {
        const uint32_t full = ptx::smem(&s.full[at.stage]);
        const uint32_t a = ptx::smem(s.stages[at.stage]);
        ptx::mbarrier_wait(ptx::smem(&s.empty[at.stage]), at.parity ^ 1);
        ptx::mbarrier_expect_tx(full, bytes);
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          if (g < share.count) ptx::tensor_load_2d(a + g * kBoxBytes, a_map, k * kTileK, row[g], full);
        }
        ptx::tensor_load_4d_multicast(a + kABytes + cta * kBHalfBytes, &w.map, k * kTileK, w_row, expert, full, 3);
        if (cta == 0 && k == claim_step) ptx::mbarrier_arrive(ptx::smem(&s.claim));
        at.next();
      }
      leave_stages(s, at, slots(tile));
    }
  }

  // ---- store warp ----
  __device__ void store_tiles() const {
    const int lane = threadIdx.x % 32;
    Outbox out(s, cta);
    TileInfo tile;
    for (int i = 0; next_tile(s, i, tile); ++i) {
      saw_tile(s, i);
      const GranuleShare share = GranuleShare::make(tile.rows, cta);
      out.pass((tile.phase == kGemm1 ? p.hidden : p.intermediate) / kTileK);
      if (share.count == 0) out.pass(slots(tile));
      for (int piece = 0; piece < share.count; ++piece) {
        const int g = share.first + piece;
        const int block = tile.block + g / 2, half = g % 2;
        if (tile.phase == kGemm1) {
          if (lane == 0) {
            const int old = last_in_slot(blob(p.blob.block), block * 2 + half, p.act_blocks);
            if (old >= 0) wait_count(wait, MOK_PHASE_ACT_RING, local<uint32_t>(p.offsets.y_done) + old, n2());
            ptx::fence_proxy_async_global();
            const uint32_t from = out.wait(piece, slots(tile));
            for (int j = 0; j < 2; ++j)
              ptx::tensor_store_2d(&p.act_map, tile.n * kTileI + j * kTileK, block % p.act_blocks * kBlockRows + half * kGranuleRows,
                                   from + j * kBoxBytes);
          }
          out.give_back(piece, slots(tile));
          if (lane == 0) {
            ptx::bulk_wait<0>();
            ptx::add_release_gpu(local<uint32_t>(p.offsets.act_done) + block * 2 + half, 1);
          }
        } else {
          const int column = tile.n * kTileN;
          const uint32_t bytes = min(kTileN, p.hidden - column) * 2;
          char* target[2];
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int row = block * kBlockRows + half * kGranuleRows + r * 32 + lane;
            const int src = __ldg(blob(p.blob.src) + row), slot = __ldg(blob(p.blob.slot) + row);
            target[r] = src < 0 ? nullptr : reinterpret_cast<char*>(p.peers[src]) + p.symmetric.slots + (int64_t(slot) * p.hidden + column) * 2;
          }
          const uint32_t from = out.wait(piece, slots(tile));
#pragma unroll
          for (int r = 0; r < 2; ++r)
            if (target[r]) ptx::bulk_store(target[r], from + (r * 32 + lane) * kPitch, bytes);
          out.give_back(piece, slots(tile));
        }
      }
    }
    ptx::bulk_wait<0>();
    __syncwarp();
  }

  // ---- consumers ----
  template <MokActivation kAct>
  __device__ void compute_tiles() const {
    const int group = threadIdx.x / 128 - 1;  // consumer warpgroup
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const StageRelease release(s, cta);
    uint32_t uses = 0;  // of the staging buffer
    StageCursor at;
    TileInfo tile;
    for (int i = 0; next_tile(s, i, tile); ++i) {
      float d[128];
      const GranuleShare share = GranuleShare::make(tile.rows, cta);
      const int steps = (tile.phase == kGemm1 ? p.hidden : p.intermediate) / kTileK;
      Output out(s, at, release, slots(tile), uses);
      uses += max(share.count - slots(tile), 0);
      if (group >= share.count) {
        skip_stages(s, at, steps, release);
        out.close();
        continue;
      }
      const int granule = share.first + group;
      const int first_row = tile.block * kBlockRows + granule * kGranuleRows;  // padded row of the schedule
      const int valid = min(tile.rows - granule * kGranuleRows, kGranuleRows);
      float p0 = 0.f, p1 = 0.f;
      if (tile.phase == kGemm1) {
        const int* prob = blob(p.blob.prob) + first_row + warp * 16 + lane / 4;
        p0 = __int_as_float(__ldg(prob));
        p1 = __int_as_float(__ldg(prob + 8));
      }
      multiply<false, false>(d, s, at, steps, group, release);
      if (tile.phase == kGemm1)
        finish_gemm1<kAct>(d, tile, first_row, valid, p0, p1, out, group);
      else
        finish_gemm2(d, tile, granule, out, group);
      out.close();
    }
  }

  // Rounds h, saves it, applies the activation and the probability, and leaves act as two images.
  template <MokActivation kAct>
  __device__ __forceinline__ void finish_gemm1(float (&d)[128], const TileInfo& tile, int first_row, int valid, float p0, float p1,
                                               Output& out, int piece) const {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int r0 = warp * 16 + lane / 4;
    const bool ok0 = r0 < valid, ok1 = r0 + 8 < valid;
    const int group = __ldg(blob(p.blob.group_start) + tile.expert) +
                      (first_row - __ldg(blob(p.blob.block_start) + tile.expert) * kBlockRows + warp * 16) / kGroupRows;
    uint4* to_h = reinterpret_cast<uint4*>(p.h) + (int64_t(group) * n1() + tile.n) * 256 + lane;
    const bool save0 = p.h != nullptr && warp * 16 < valid && group < p.save_groups;
    const bool save1 = p.h != nullptr && warp * 16 + 8 < valid && group + 1 < p.save_groups;
    const uint32_t to = out.open(piece);
    // 32 columns of gate and up a turn, always in the same registers, which then move up: a loop's instructions are fetched once.
#pragma unroll 1
    for (int v = 0; v < 4; ++v) {
      uint32_t h[2][2][4], act[2][4];  // [row][gate, up][pair of columns]
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int up = 0; up < 2; ++up) {
          const int a = up * 64 + 4 * j;
          // Padding rows become exact zeros, whatever the ring held.
          h[0][up][j] = ok0 ? pack_bf16(d[a], d[a + 1]) : 0u;
          h[1][up][j] = ok1 ? pack_bf16(d[a + 2], d[a + 3]) : 0u;
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float2 g = unpack_bf16(h[r][0][j]), u = unpack_bf16(h[r][1][j]);
          const float prob = r ? p1 : p0;
          act[r][j] = pack_bf16(activate<kAct>(g.x, u.x, p.act_limit) * prob, activate<kAct>(g.y, u.y, p.act_limit) * prob);
        }
      }
#pragma unroll
      for (int up = 0; up < 2; ++up) {
        uint4* at = to_h + h_vector(up * 4 + v) * 32;
        if (save0) __stcs(at, make_uint4(h[0][up][0], h[0][up][1], h[0][up][2], h[0][up][3]));
        if (save1) __stcs(at + int64_t(n1()) * 256, make_uint4(h[1][up][0], h[1][up][1], h[1][up][2], h[1][up][3]));
      }
#pragma unroll
      for (int j = 0; j < 4; j += 2) ptx::store_matrix_x4(to + image_offset(4 * v + j), act[0][j], act[1][j], act[0][j + 1], act[1][j + 1]);
#pragma unroll
      for (int i = 0; i < 48; ++i) d[i] = d[i + 16], d[64 + i] = d[64 + i + 16];
    }
    out.hand_over();
  }

  __device__ __forceinline__ void finish_gemm2(const float (&d)[128], const TileInfo& tile, int granule, Output& out, int piece) const {
    // The act rows of this granule have been read by this tile: loads complete before their stage is full.
    if (threadIdx.x % 128 == 0) ptx::add_relaxed_gpu(local<uint32_t>(p.offsets.y_done) + tile.block * 2 + granule, 1);
    const uint32_t to = out.open(piece) + matrix_row() * kPitch + matrix_column() * 16;
#pragma unroll
    for (int j = 0; j < 32; j += 2)
      ptx::store_matrix_x4(to + j * 16, pack_bf16(d[4 * j], d[4 * j + 1]), pack_bf16(d[4 * j + 2], d[4 * j + 3]),
                           pack_bf16(d[4 * j + 4], d[4 * j + 5]), pack_bf16(d[4 * j + 6], d[4 * j + 7]));
    out.hand_over();
  }
};

template <MokActivation kAct>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1) forward_kernel(const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(1024) char raw[];
  Smem& s = *reinterpret_cast<Smem*>(raw);
  Control* control = reinterpret_cast<Control*>(p.peers[p.rank] + p.symmetric.control);
  Flags* flags = reinterpret_cast<Flags*>(p.peers[p.rank]);
  Kernel kernel{p, s,
                WaitContext{control, p.record, p.peers, flags, p.rank, p.ranks, kCallForward, p.layer, p.timeout_ns},
                int(ptx::cluster_cta_rank())};
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    init_barriers(s);
    ptx::prefetch_tensor_map(&p.x_map);
    ptx::prefetch_tensor_map(&p.w1.map);
    ptx::prefetch_tensor_map(&p.w2.map);
  }
  __syncthreads();
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
  const uint64_t expected = stamp(ptx::load_relaxed_gpu(&control->call), kCallForward, p.layer);
  if (finish_call(kernel.wait, &control->finished, expected))
    reduce_slots(reinterpret_cast<const char*>(p.peers[p.rank]) + p.symmetric.slots, p.ids, p.out, p.num_tokens, p.top_k, p.hidden,
                 p.experts);
}

template <MokActivation kAct>
int launch(const ForwardParams& p, int ctas, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(forward_kernel<kAct>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Smem));
  if (error != cudaSuccess) return fail_cuda(error, "forward kernel: shared memory");
  forward_kernel<kAct><<<ctas, kThreads, sizeof(Smem), stream>>>(p);
  return check_launch("forward kernel");
}

}  // namespace

int launch_forward(const MokForwardArgs& args, cudaStream_t stream) {
  const MokProblem& problem = args.workspace.problem;
  const Sizes sizes = Sizes::make(problem);
  const int local_experts = problem.num_experts / problem.num_ranks;
  ForwardParams p{};
  p.x = reinterpret_cast<const char*>(args.x);
  for (int r = 0; r < problem.num_ranks; ++r) p.peers[r] = args.workspace.peers[r];
  p.local = reinterpret_cast<char*>(args.workspace.local);
  p.record = reinterpret_cast<MokErrorRecord*>(args.workspace.error_record);
  p.ids = reinterpret_cast<const int*>(args.ids);
  p.out = reinterpret_cast<char*>(args.out);
  p.schedule = reinterpret_cast<const int*>(args.schedule);
  p.h = reinterpret_cast<char*>(args.h);
  p.save_groups = int(args.save_rows / kGroupRows);
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
  p.minibatch_units = sizes.minibatch_units;
  p.ring_blocks = sizes.ring_blocks;
  p.act_blocks = sizes.act_blocks;
  const int ctas = sizes.num_sms / 2 * 2;
  if (const int status = comm_ctas(args.comm_sms, ctas, &p.comm_ctas); status != MOK_OK) return status;
  p.act_limit = args.act_limit;
  p.layer = args.layer;
  p.timeout_ns = args.workspace.timeout_ns;

  int status = encode_rows_map(&p.x_map, args.workspace.local + p.offsets.x_ring, problem.hidden,
                               int64_t(sizes.ring_blocks) * kBlockRows, kGranuleRows, "x ring");
  if (status == MOK_OK)
    status = encode_rows_map(&p.act_map, args.workspace.local + p.offsets.act_ring, problem.intermediate,
                             int64_t(sizes.act_blocks) * kBlockRows, kGranuleRows, "act ring");
  if (status == MOK_OK)
    status = encode_experts(&p.w1, args.w1, args.num_w, local_experts, problem.hidden,
                                2 * problem.intermediate, kTileN / 2, "w1");
  if (status == MOK_OK)
    status = encode_experts(&p.w2, args.w2, args.num_w, local_experts, problem.intermediate,
                                problem.hidden, kTileN / 2, "w2");
  if (status != MOK_OK) return status;
  switch (args.activation) {
    case MOK_ACT_SWIGLU: return launch<MOK_ACT_SWIGLU>(p, ctas, stream);
    case MOK_ACT_SWIGLU_CLAMPED: return launch<MOK_ACT_SWIGLU_CLAMPED>(p, ctas, stream);
    default:
      return fail(MOK_ERR_NOT_COMPILED, "activation: got %d, the kernels have 0 (swiglu) and 1 (clamped swiglu)", args.activation);
  }
}

int load_forward() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, forward_kernel<MOK_ACT_SWIGLU>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, forward_kernel<MOK_ACT_SWIGLU_CLAMPED>);
  return error == cudaSuccess ? MOK_OK : fail_cuda(error, "forward kernel: loading");
}

}  // namespace mok::sm90
