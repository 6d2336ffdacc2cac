// Publication and schedule, one launch. Legend: R ranks, T tokens of this rank, K experts per token, L local experts, H hidden
// size; a route is one (source rank, token, k), numbered token*K + k within its source.
//
//   publish  (R > 1) x into x_src, ids, probabilities and T to every peer; the last CTA releases "published" to all
//   count    a warp takes 512 routes of one source and counts them per local expert
//   prefix   a warp takes one (source, expert) and turns its chunk counts into first ordinals
//   place    every CTA derives the expert starts, then the warps of `count` give each route its row
//
// A row follows from counts and prefixes alone, so the same ids give the same table. No launch before this one has to leave
// the grid barriers' counters at zero: the last CTA to leave does it, when nobody can still wait on them.
#include "schedule/schedule.h"

#include "kernels/launch.h"
#include "layout/workspace.h"
#include "sync/wait.cuh"

namespace mok {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kSteps = kScheduleChunk / 32;  // routes a lane looks at in one chunk
constexpr uint32_t kAll = 0xffffffffu;
enum Arrival { kArrivedPublish, kArrivedCount, kArrivedPrefix, kArrivedLeave, kArrivals };

struct ScheduleGlobals {
  MokWorkspace workspace;
  SymmetricLayout symmetric;
  LocalLayout local;
  ScheduleLayout schedule;
  int64_t tokens;
  const uint4* x;
  const int* ids;
  const float* probs;
  int* table;
  uint32_t layer;
};

// Words of this rank's regions, and what the launch has learnt about its peers.
struct Context {
  const ScheduleGlobals& g;
  WaitContext wait;
  Control* control;
  const char* mine;   // symmetric region
  int* chunk_counts;  // [R][chunks_per_rank][L]
  int* source_counts; // [R][L]
  const int* tokens;  // [R], shared memory
  int rank, ranks, top_k, local_experts;
  int warp, warps;    // of the whole grid; the first warps of all CTAs come first, so that little work spreads out
  int lane;

  __device__ int64_t routes(int source) const { return int64_t(tokens[source]) * top_k; }
  __device__ int chunks(int source) const { return int(ceil_div<int64_t>(routes(source), kScheduleChunk)); }
  // This rank's own routing is read in place.
  __device__ const int* ids(int source) const {
    return source == rank ? g.ids : reinterpret_cast<const int*>(mine + g.symmetric.ids) + offset(source);
  }
  __device__ const float* probs(int source) const {
    return source == rank ? g.probs : reinterpret_cast<const float*>(mine + g.symmetric.probs) + offset(source);
  }
  __device__ int* counts(int source, int chunk) const {
    return chunk_counts + (source * g.local.chunks_per_rank + chunk) * local_experts;
  }

 private:
  __device__ int64_t offset(int source) const { return source * g.workspace.problem.max_tokens * top_k; }
};

__device__ void publish(const Context& c, uint64_t call) {
  const ScheduleGlobals& g = c.g;
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x, threads = int64_t(gridDim.x) * kThreads;
  const int64_t vectors = g.tokens * (g.workspace.problem.hidden / 8);
  uint4* x_src = reinterpret_cast<uint4*>(g.workspace.peers[c.rank] + g.symmetric.x);
  constexpr int kInFlight = 8;
  for (int64_t i = thread; i < vectors; i += kInFlight * threads) {
    uint4 v[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j)
      if (i + j * threads < vectors) v[j] = __ldcs(g.x + i + j * threads);
#pragma unroll
    for (int j = 0; j < kInFlight; ++j)
      if (i + j * threads < vectors) x_src[i + j * threads] = v[j];
  }
  const int64_t routes = c.routes(c.rank);
  const int64_t mine = c.rank * g.workspace.problem.max_tokens * c.top_k;
  for (int64_t i = thread; i < routes; i += threads) {
    const int id = __ldg(g.ids + i);
    const float p = __ldg(g.probs + i);
    for (int j = 1; j < c.ranks; ++j) {  // starting at the next rank, so that the peers' links share the load
      const int peer = c.rank + j < c.ranks ? c.rank + j : c.rank + j - c.ranks;
      const uint64_t region = g.workspace.peers[peer];
      reinterpret_cast<int*>(region + g.symmetric.ids)[mine + i] = id;
      reinterpret_cast<float*>(region + g.symmetric.probs)[mine + i] = p;
    }
  }
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0)
    last = ptx::fetch_add_acq_rel_sys(&c.control->arrived[kArrivedPublish], 1) == gridDim.x - 1;
  __syncthreads();
  if (last && threadIdx.x < c.ranks) {
    const uint64_t region = g.workspace.peers[threadIdx.x];
    reinterpret_cast<int*>(region + g.symmetric.tokens)[c.rank] = int(g.tokens);
    ptx::store_release_sys(&reinterpret_cast<Flags*>(region)->published[c.rank], stamp(call, kCallForward, g.layer));
  }
}

// Waits for every peer's publication and keeps the token counts in `tokens`. False if the workspace is dead.
__device__ bool await_peers(const Context& c, uint64_t call, int* tokens) {
  const int source = threadIdx.x;
  bool ok = true;
  uint64_t start = 0;
  if (source == 0) start = start_of_wait(c.wait, MOK_PHASE_PUBLISH, c.wait.flags->published, stamp(call, kCallForward, c.g.layer));
  if (source < c.ranks && source != c.rank) {
    ok = wait_stamp(c.wait, MOK_PHASE_PUBLISH, &c.wait.flags->published[source], source,
                    stamp(call, kCallForward, c.g.layer));
    const int n = ok ? reinterpret_cast<const int*>(c.mine + c.g.symmetric.tokens)[source] : 0;
    const int64_t most = c.g.workspace.problem.max_tokens;
    if (n < 0 || n > most) {  // a peer that was set up for other sizes
      give_up(c.wait, 4, MOK_PHASE_PUBLISH, source, most, n, 0);
      ok = false;
    }
    tokens[source] = n;
  }
  ok = __syncthreads_and(ok);
  end_of_wait(c.wait, start);
  return ok;
}

// Calls use(route, expert, peers, probability) for the 32 routes of each step of a chunk: expert is -1 where the route is not
// for this rank, peers are the lanes whose route goes to the same expert. All loads are issued before the first use.
template <bool kWithProbs, class Use>
__device__ __forceinline__ void for_chunk(const Context& c, int source, int chunk, Use use) {
  const int* ids = c.ids(source);
  const float* probs = c.probs(source);
  const int64_t first = int64_t(chunk) * kScheduleChunk + c.lane, end = c.routes(source);
  const uint32_t first_expert = uint32_t(c.rank) * c.local_experts;
  int expert[kSteps];
  float p[kSteps];
#pragma unroll
  for (int j = 0; j < kSteps; ++j) expert[j] = first + 32 * j < end ? ids[first + 32 * j] : -1;
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    const uint32_t local = uint32_t(expert[j]) - first_expert;
    expert[j] = expert[j] >= 0 && local < uint32_t(c.local_experts) ? int(local) : -1;
    if (kWithProbs) p[j] = expert[j] >= 0 ? probs[first + 32 * j] : 0.f;
  }
#pragma unroll
  for (int j = 0; j < kSteps; ++j)
    if (__any_sync(kAll, expert[j] >= 0))
      use(first + 32 * j, expert[j], __match_any_sync(kAll, expert[j]), kWithProbs ? p[j] : 0.f);
}

// Walks the chunks of all sources; chunk i of the grid goes to warp i.
template <class Use>
__device__ __forceinline__ void for_chunks(const Context& c, Use use) {
  int next = c.warp;
  for (int source = 0; source < c.ranks; ++source) {
    const int n = c.chunks(source);
    for (; next < n; next += c.warps) use(source, next);
    next -= n;
  }
}

__device__ void count(const Context& c, int* counter) {
  for_chunks(c, [&](int source, int chunk) {
    for (int e = c.lane; e < c.local_experts; e += 32) counter[e] = 0;
    __syncwarp();
    for_chunk<false>(c, source, chunk, [&](int64_t, int expert, uint32_t same, float) {
      if (expert >= 0 && c.lane == __ffs(same) - 1) counter[expert] += __popc(same);
      __syncwarp();
    });
    int* out = c.counts(source, chunk);
    for (int e = c.lane; e < c.local_experts; e += 32) out[e] = counter[e];
    __syncwarp();
  });
}

// Inclusive sum over the warp.
__device__ __forceinline__ int warp_sum_to(int v, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int below = __shfl_up_sync(kAll, v, d);
    if (lane >= d) v += below;
  }
  return v;
}

__device__ void prefix(const Context& c) {
  constexpr int kInFlight = 4;
  for (int i = c.warp; i < c.ranks * c.local_experts; i += c.warps) {
    const int source = i / c.local_experts, e = i % c.local_experts, n = c.chunks(source);
    int before = 0;
    for (int first = c.lane; first - c.lane < n; first += 32 * kInFlight) {
      int v[kInFlight];
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) v[j] = first + 32 * j < n ? c.counts(source, first + 32 * j)[e] : 0;
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const int upto = warp_sum_to(v[j], c.lane);
        if (first + 32 * j < n) c.counts(source, first + 32 * j)[e] = before + upto - v[j];
        before += __shfl_sync(kAll, upto, 31);
      }
    }
    if (c.lane == 0) c.source_counts[i] = before;
  }
}

// One warp: out[e] = sum of value(0..e-1), out[L] the total.
template <class Value>
__device__ void exclusive_prefix(int* out, int n, int lane, Value value) {
  int before = 0;
  for (int first = 0; first < n; first += 32) {
    const int e = first + lane, v = e < n ? value(e) : 0;
    const int upto = warp_sum_to(v, lane);
    if (e < n) out[e] = before + upto - v;
    before += __shfl_sync(kAll, upto, 31);
  }
  if (lane == 0) out[n] = before;
}

// The last e with start[e] <= i. Experts without blocks share their start with the next one, which is then the answer.
__device__ __forceinline__ int find_expert(const int* start, int n, int i) {
  int low = 0, high = n;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (start[middle] <= i ? low : high) = middle;
  }
  return low;
}

// Per expert, in shared memory: rows [L], then exclusive prefixes [L+1] of row blocks, units, groups of 8 rows and rows.
struct Experts {
  int *rows, *block, *unit, *group, *row;
  static constexpr int words(int n) { return n + 4 * (n + 1); }
  __device__ Experts(int* at, int n)
      : rows(at), block(rows + n), unit(block + n + 1), group(unit + n + 1), row(group + n + 1) {}
};

__device__ void build_experts(const Context& c, const Experts& x) {
  const int n = c.local_experts;
  for (int e = threadIdx.x; e < n; e += kThreads) x.rows[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < c.ranks * n; i += kThreads)
    if (const int v = c.source_counts[i]) atomicAdd(&x.rows[i % n], v);
  __syncthreads();
  auto blocks = [&](int e) { return ceil_div(x.rows[e], kBlockRows); };
  switch (threadIdx.x / 32) {
    case 0: exclusive_prefix(x.block, n, c.lane, blocks); break;
    case 1: exclusive_prefix(x.unit, n, c.lane, [&](int e) { return ceil_div(blocks(e), kUnitRows / kBlockRows); }); break;
    case 2: exclusive_prefix(x.group, n, c.lane, [&](int e) { return ceil_div(x.rows[e], kGroupRows); }); break;
    case 3: exclusive_prefix(x.row, n, c.lane, [&](int e) { return x.rows[e]; }); break;
  }
  __syncthreads();
}

__device__ void write_header(const Context& c, const Experts& x) {
  const ScheduleLayout& s = c.g.schedule;
  const int n = c.local_experts;
  for (int i = threadIdx.x; i < s.src; i += kThreads) {
    int v = 0;
    if (i == kScheduleRows) v = x.row[n];
    else if (i == kScheduleBlocks) v = x.block[n];
    else if (i == kScheduleGroups) v = x.group[n];
    else if (i == kScheduleUnits) v = x.unit[n];
    else if (i >= s.group_start + n + 1) v = 0;
    else if (i >= s.group_start) v = x.group[i - s.group_start];
    else if (i >= s.block_start) v = x.block[i - s.block_start];
    else if (i >= kScheduleExperts) v = x.rows[i - kScheduleExperts];
    c.g.table[i] = v;
  }
}

// Block and unit columns, padding rows, and the main kernel's counters.
__device__ void write_blocks(const Context& c, const Experts& x) {
  const ScheduleGlobals& g = c.g;
  const ScheduleLayout& s = g.schedule;
  const int n = c.local_experts, blocks = x.block[n], units = x.unit[n];
  const int thread = blockIdx.x * kThreads + threadIdx.x, threads = gridDim.x * kThreads;
  char* local = reinterpret_cast<char*>(g.workspace.local);
  for (int b = thread; b < blocks; b += threads) {
    const int e = find_expert(x.block, n, b), left = x.rows[e] - (b - x.block[e]) * kBlockRows;
    g.table[s.block + b] = block_word(e, left < kBlockRows ? left : kBlockRows);
    for (const int64_t counter : {g.local.x_ready, g.local.act_done, g.local.y_done})
      reinterpret_cast<uint2*>(local + counter)[b] = make_uint2(0, 0);  // one word per granule
  }
  for (int u = thread; u < units; u += threads) {
    const int e = find_expert(x.unit, n, u);
    g.table[s.unit + u] = x.block[e] + (u - x.unit[e]) * (kUnitRows / kBlockRows);
  }
  for (int e = c.warp; e < n; e += c.warps) {
    const int end = x.block[e + 1] * kBlockRows;
    for (int row = x.block[e] * kBlockRows + x.rows[e] + c.lane; row < end; row += 32) {
      g.table[s.src + row] = -1;
      g.table[s.slot + row] = -1;
      g.table[s.prob + row] = 0;
    }
  }
}

__device__ void place(const Context& c, const Experts& x, int* counter) {
  const ScheduleLayout& s = c.g.schedule;
  int* table = c.g.table;
  for_chunks(c, [&](int source, int chunk) {
    const int* first = c.counts(source, chunk);
    for (int e = c.lane; e < c.local_experts; e += 32) counter[e] = first[e];
    __syncwarp();
    for_chunk<true>(c, source, chunk, [&](int64_t route, int expert, uint32_t same, float p) {
      int before = 0;
      if (expert >= 0) before = counter[expert];
      __syncwarp();
      if (expert >= 0) {
        if (c.lane == __ffs(same) - 1) counter[expert] = before + __popc(same);
        const int ordinal = before + __popc(same & ((1u << c.lane) - 1));
        const int position =
            c.ranks == 1 ? ordinal
                         : row_position(c.source_counts + expert, c.local_experts, c.ranks, source, ordinal);
        const int row = x.block[expert] * kBlockRows + position;
        table[s.src + row] = source;
        table[s.slot + row] = int(route);
        table[s.prob + row] = __float_as_int(p);
      }
      __syncwarp();
    });
  });
}

__global__ void __launch_bounds__(kThreads, 2) schedule_kernel(const __grid_constant__ ScheduleGlobals g) {
  extern __shared__ int shared[];  // counters of each warp [kWarps][L], then Experts
  __shared__ int tokens[MOK_MAX_RANKS];
  const MokProblem& problem = g.workspace.problem;
  char* local = reinterpret_cast<char*>(g.workspace.local);
  char* mine = reinterpret_cast<char*>(g.workspace.peers[problem.rank]);
  Control* control = reinterpret_cast<Control*>(mine + g.symmetric.control);
  const int warp = threadIdx.x / 32;
  const Context c{
      .g = g,
      .wait = {.control = control,
               .record = reinterpret_cast<MokErrorRecord*>(g.workspace.error_record),
               .peers = g.workspace.peers,
               .flags = reinterpret_cast<Flags*>(mine),
               .rank = problem.rank,
               .ranks = problem.num_ranks,
               .kind = kCallForward,
               .layer = g.layer,
               .timeout_ns = g.workspace.timeout_ns},
      .control = control,
      .mine = mine,
      .chunk_counts = reinterpret_cast<int*>(local + g.local.chunk_counts),
      .source_counts = reinterpret_cast<int*>(local + g.local.source_counts),
      .tokens = tokens,
      .rank = problem.rank,
      .ranks = problem.num_ranks,
      .top_k = problem.top_k,
      .local_experts = problem.num_experts / problem.num_ranks,
      .warp = warp * int(gridDim.x) + int(blockIdx.x),
      .warps = int(gridDim.x) * kWarps,
      .lane = int(threadIdx.x) % 32,
  };
  // One thread decides for the CTA: a peer's abort may arrive between two reads.
  if (__syncthreads_or(threadIdx.x == 0 && workspace_dead(c.wait))) return;
  const uint64_t call = ptx::load_relaxed_gpu(&control->call) + 1;
  if (threadIdx.x == c.rank) tokens[c.rank] = int(g.tokens);
  __syncthreads();
  if (c.ranks > 1) {
    publish(c, call);
    if (!await_peers(c, call, tokens)) return;
  }

  int* counter = shared + warp * c.local_experts;
  count(c, counter);
  if (!grid_barrier(c.wait, &control->arrived[kArrivedCount], gridDim.x)) return;
  prefix(c);
  if (!grid_barrier(c.wait, &control->arrived[kArrivedPrefix], gridDim.x)) return;
  const Experts experts(shared + kWarps * c.local_experts, c.local_experts);
  build_experts(c, experts);
  place(c, experts, counter);
  write_blocks(c, experts);
  if (blockIdx.x == 0) write_header(c, experts);

  __syncthreads();
  if (threadIdx.x == 0 &&
      ptx::fetch_add_acq_rel_gpu(&control->arrived[kArrivedLeave], 1) == gridDim.x - 1) {
    for (int i = 0; i < kArrivals; ++i) control->arrived[i] = 0;
    control->ticket = control->finished = 0;
    control->call = call;  // every CTA has read it
  }
}

__global__ void abort_kernel(const __grid_constant__ MokWorkspace workspace, const __grid_constant__ MokErrorRecord why,
                             int64_t control) {
  const int rank = workspace.problem.rank;
  const WaitContext wait{.control = reinterpret_cast<Control*>(workspace.peers[rank] + control),
                         .record = reinterpret_cast<MokErrorRecord*>(workspace.error_record),
                         .peers = workspace.peers,
                         .flags = reinterpret_cast<Flags*>(workspace.peers[rank]),
                         .rank = rank,
                         .ranks = workspace.problem.num_ranks,
                         .kind = why.kind,
                         .layer = why.layer,
                         .timeout_ns = workspace.timeout_ns};
  give_up(wait, why.code, why.phase, rank, why.expected, why.seen, 0);
}

size_t shared_bytes(int local_experts) {
  return size_t(kWarps * local_experts + Experts::words(local_experts)) * sizeof(int);
}
static_assert(sizeof(int) * (kWarps * MOK_MAX_LOCAL_EXPERTS + Experts::words(MOK_MAX_LOCAL_EXPERTS)) <= 48 * 1024);

}  // namespace

int launch_schedule(const MokForwardArgs& args, cudaStream_t stream) {
  const MokProblem& p = args.workspace.problem;
  const int local_experts = p.num_experts / p.num_ranks;
  const Sizes sizes = Sizes::make(p);
  const ScheduleGlobals g{
      .workspace = args.workspace,
      .symmetric = SymmetricLayout::make(p.num_ranks, p.max_tokens, p.top_k, p.hidden),
      .local = LocalLayout::make(p, sizes),
      .schedule = ScheduleLayout::make(p.num_ranks, p.max_tokens, p.top_k, local_experts),
      .tokens = args.num_tokens,
      .x = reinterpret_cast<const uint4*>(args.x),
      .ids = reinterpret_cast<const int*>(args.ids),
      .probs = reinterpret_cast<const float*>(args.probs),
      .table = reinterpret_cast<int*>(args.schedule),
      .layer = args.layer,
  };
  // Alone, one CTA a chunk is enough (barriers cost by the CTA); with peers the copy of x wants every SM of the share.
  const int64_t chunks = ceil_div<int64_t>(args.num_tokens * p.top_k, kScheduleChunk);
  const int useful = p.num_ranks > 1 || chunks > sizes.num_sms ? sizes.num_sms : chunks > 8 ? int(chunks) : 8;
  const int ctas = useful < sizes.num_sms ? useful : sizes.num_sms;
  schedule_kernel<<<ctas, kThreads, shared_bytes(local_experts), stream>>>(g);
  return check_launch("schedule kernel");
}

int launch_abort(const MokWorkspace& workspace, const MokErrorRecord& why, cudaStream_t stream) {
  const MokProblem& p = workspace.problem;
  const int64_t control = SymmetricLayout::make(p.num_ranks, p.max_tokens, p.top_k, p.hidden).control;
  abort_kernel<<<1, 1, 0, stream>>>(workspace, why, control);
  return check_launch("abort kernel");
}

int load_schedule() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, schedule_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, abort_kernel);
  return error == cudaSuccess ? MOK_OK : fail_cuda(error, "schedule kernel: loading");
}

}  // namespace mok
