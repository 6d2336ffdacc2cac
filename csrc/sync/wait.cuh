// Bounded waits. A wait that fails marks the workspace as dead, leaves a record for the host and tells the peers; it returns
// false and so does every later wait, at once. Kernels then run through their remaining work without waiting, so nothing
// hangs and nothing traps; what they compute is void, and the host raises.
#ifndef MEGATRON_MOK_SYNC_WAIT_CUH_
#define MEGATRON_MOK_SYNC_WAIT_CUH_

#include "layout/workspace.h"
#include "ptx/memory.cuh"

namespace mok {

// What a wait needs to know to fail well. Lives in constant memory or registers of the waiting thread.
struct WaitContext {
  Control* control;
  MokErrorRecord* record;
  const uint64_t* peers;  // symmetric regions of all ranks
  Flags* flags;           // this rank's
  int rank, ranks;
  uint32_t kind, layer;
  uint64_t timeout_ns;
};

__device__ __forceinline__ void give_up(const WaitContext& w, uint32_t code, uint32_t phase, int peer, uint64_t expected,
                                            uint64_t seen, uint64_t waited_ns) {
  if (atomicCAS(&w.control->aborted, 0u, code) != 0u) return;
  volatile MokErrorRecord* r = w.record;
  r->phase = phase;
  r->rank = w.rank;
  r->peer = peer;
  r->call = ptx::load_relaxed_gpu(&w.control->call);
  r->expected = expected;
  r->seen = seen;
  r->waited_ns = waited_ns;
  r->layer = w.layer;
  r->kind = w.kind;
  __threadfence_system();
  r->code = code;
  const uint32_t culprit = code == 3 ? peer : w.rank;  // pass on who gave up first
  for (int p = 0; p < w.ranks; ++p)
    if (p != w.rank) ptx::store_relaxed_sys(&reinterpret_cast<Flags*>(w.peers[p])->abort, culprit + 1);
}

__device__ __forceinline__ bool workspace_dead(const WaitContext& w) {
  return ptx::load_relaxed_gpu(&w.control->aborted) != 0;
}

// Polls `ready` (a functor that stores what it saw) until it holds. Time is looked at every 64 polls only: reading the global
// timer costs more than a poll.
template <class Ready>
__device__ __forceinline__ bool wait_until(const WaitContext& w, uint32_t phase, int peer, uint64_t expected, Ready ready) {
  uint64_t seen = 0;
  if (ready(seen)) return true;
  const uint64_t start = ptx::global_timer();
  for (uint32_t polls = 1;; ++polls) {
    if (ready(seen)) return true;
    if ((polls & 63) == 0) {
      if (workspace_dead(w)) return false;
      if (const uint32_t peer_gone = ptx::load_relaxed_sys(&w.flags->abort)) {
        give_up(w, 3, phase, int(peer_gone) - 1, expected, seen, ptx::global_timer() - start);
        return false;
      }
      const uint64_t waited = ptx::global_timer() - start;
      if (waited > w.timeout_ns) {
        give_up(w, 1, phase, peer, expected, seen, waited);
        return false;
      }
    }
  }
}

// Counter of this GPU reaches `expected`; acquires what its adders released.
__device__ __forceinline__ bool wait_count(const WaitContext& w, uint32_t phase, const uint32_t* counter, uint32_t expected) {
  return wait_until(w, phase, w.rank, expected, [&](uint64_t& seen) {
    const uint32_t v = ptx::load_acquire_gpu(counter);
    seen = v;
    return v >= expected;
  });
}

// Word that `peer` wrote into this rank's flags equals the stamp. A word of this call or a later one that differs is a
// protocol mismatch: the ranks are in different calls, and waiting longer cannot help.
__device__ __forceinline__ bool wait_stamp(const WaitContext& w, uint32_t phase, const uint64_t* word, int peer,
                                           uint64_t expected) {
  bool mismatch = false;
  const bool ok = wait_until(w, phase, peer, expected, [&](uint64_t& seen) {
    const uint64_t v = ptx::load_acquire_sys(word);
    seen = v;
    if (v == expected) return true;
    mismatch = v != 0 && stamp_call(v) >= stamp_call(expected);
    if (mismatch) give_up(w, 2, phase, peer, expected, v, 0);
    return mismatch;
  });
  return ok && !mismatch;
}

// How long a rank waits for others: CTA 0 takes the time from this rank's own word (of `words`) to the last peer's.
__device__ __forceinline__ uint64_t start_of_wait(const WaitContext& w, uint32_t phase, const uint64_t* words, uint64_t expected) {
  if (blockIdx.x != 0 || w.ranks == 1) return 0;
  wait_stamp(w, phase, &words[w.rank], w.rank, expected);
  return ptx::global_timer();
}
// Behind a barrier of the CTA that follows every peer's word. `start`: thread 0's.
__device__ __forceinline__ void end_of_wait(const WaitContext& w, uint64_t start) {
  if (start != 0 && threadIdx.x == 0) w.control->waited_ns += ptx::global_timer() - start;
}

// All CTAs of one launch (all resident) pass together. `counter` starts at 0 and is used once a launch.
__device__ __forceinline__ bool grid_barrier(const WaitContext& w, uint32_t* counter, uint32_t ctas) {
  __shared__ bool ok;
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::add_release_gpu(counter, 1);
    ok = wait_count(w, MOK_PHASE_GRID, counter, ctas);
  }
  __syncthreads();
  return ok;
}

// Every CTA of this rank calls it, with all threads, behind a barrier; the last one writes the stamp to this rank's word (of `words`) at
// every peer, a thread a peer: a release at system scope takes too long for one after the other.
__device__ __forceinline__ void arrive_and_tell_peers(const WaitContext& w, uint32_t* counter, uint64_t (Flags::*words)[MOK_MAX_RANKS],
                                                      uint64_t expected) {
  const bool last = __syncthreads_or(threadIdx.x == 0 && ptx::fetch_add_acq_rel_sys(counter, 1) == gridDim.x - 1);
  if (last && int(threadIdx.x) < w.ranks && !workspace_dead(w))
    ptx::store_release_sys(&(reinterpret_cast<Flags*>(w.peers[threadIdx.x])->*words)[w.rank], expected);
}

}  // namespace mok
#endif  // MEGATRON_MOK_SYNC_WAIT_CUH_
