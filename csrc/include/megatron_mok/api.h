// The C ABI of libmegatron_mok.so, its only public header. Plain C, no CUDA or torch headers.
//
// Every struct starts with its size and the ABI version; a mismatch is MOK_ERR_ABI. Functions return a MokStatus and never
// throw; mok_last_error() is the text of this thread's last failure. Pointers to device memory and streams travel as
// integers (0 = absent). The device of the workspace has to be the current one in every call that takes a stream.
//
// Legend: R ranks, T tokens of this rank, K experts per token, E experts, L = E/R local experts, H hidden size, I expert
// intermediate size, M routed rows that arrive at this rank.
#ifndef MEGATRON_MOK_API_H_
#define MEGATRON_MOK_API_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MOK_ABI_VERSION 2
#define MOK_MAX_RANKS 72
#define MOK_MAX_LOCAL_EXPERTS 512
#define MOK_MAX_TOP_K 32

#if defined(_WIN32)
#define MOK_API
#else
#define MOK_API __attribute__((visibility("default")))
#endif

typedef enum {
  MOK_OK = 0,
  MOK_ERR_ABI = 1,          // struct size or ABI version does not match the library
  MOK_ERR_ARGUMENT = 2,     // a field is out of range; the message names it
  MOK_ERR_DEVICE = 3,       // no code for this GPU in the library
  MOK_ERR_CUDA = 4,         // a CUDA call failed
  MOK_ERR_NOT_COMPILED = 5  // the instance asked for is not in this build
} MokStatus;

typedef enum { MOK_ACT_SWIGLU = 0, MOK_ACT_SWIGLU_CLAMPED = 1, MOK_ACT_GEGLU = 2, MOK_ACT_SQUARED_RELU = 3 } MokActivation;

// The problem that a workspace is made for; identical on all ranks but for `rank`.
typedef struct {
  uint32_t size, abi;
  int32_t rank, num_ranks;
  int32_t num_experts, top_k;
  int32_t hidden, intermediate;
  int64_t max_tokens;       // T_max: the largest T of any rank and call
  int32_t num_sms;          // CTAs of a main kernel (one an SM); even, 4 or more; 0 = all SMs of the device
  int32_t minibatch_units;  // units of 256 rows a minibatch; 0 = chosen from the shape
  int64_t ring_rows;        // rows of the x ring; 0 = chosen from the shape; rounded up to what correctness needs
} MokProblem;

// Byte counts and offsets; see layout/workspace.h for what each region holds.
typedef struct {
  uint32_t size, abi;
  int64_t symmetric_bytes;   // one region per rank, same offsets on all, mapped by every peer
  int64_t local_bytes;       // this rank's own region, forward
  int64_t local_backward_bytes;  // local region including what backward adds
  int64_t schedule_ints;     // int32 words of one schedule blob
  int64_t schedule_rows;     // CAP: rows of its columns
  int64_t saved_row_bytes;   // bytes of h per saved row (4*I in bf16)
  int32_t minibatch_units, ring_blocks, act_blocks;
  int32_t segment_units;     // units of 256 rows of one expert that a weight gradient sums in one turn, at least 1
  int64_t off_flags, off_tokens, off_ids, off_probs, off_x, off_dy, off_slots, off_dp_slots;
  int64_t off_waited_ns;     // uint64: time that this rank has waited for peers since the workspace was made
} MokLayout;

// What a bounded wait leaves behind, in host-visible memory. `code` is written last.
typedef struct {
  uint32_t code;        // 0 none, 1 time-out, 2 protocol mismatch, 3 a peer aborted, 4 a rank announced too many tokens
  uint32_t phase;       // MokPhase
  int32_t rank, peer;
  uint64_t call;        // call number of the waiting rank
  uint64_t expected, seen;
  uint64_t waited_ns;
  uint32_t layer, kind;  // of the waiting call
} MokErrorRecord;

typedef enum {
  MOK_PHASE_NONE = 0, MOK_PHASE_PUBLISH = 1, MOK_PHASE_GRID = 2, MOK_PHASE_DISPATCH = 3, MOK_PHASE_GEMM1 = 4,
  MOK_PHASE_GEMM2 = 5, MOK_PHASE_ACT_RING = 6, MOK_PHASE_COMBINE = 7
} MokPhase;

// One rank's view of its workspace. Made once; passed by value with every call.
typedef struct {
  uint32_t size, abi;
  MokProblem problem;
  uint64_t local;                      // device pointer, local_bytes (or local_backward_bytes); not used by init and abort
  uint64_t error_record;               // device-visible pointer to a MokErrorRecord in pinned host memory
  uint64_t peers[MOK_MAX_RANKS];       // device pointers of every rank's symmetric region, own one included
  uint64_t timeout_ns;                 // bound of every wait
} MokWorkspace;

// One call of the layer. The same struct serves schedule and forward; backward adds its own.
typedef struct {
  uint32_t size, abi;
  MokWorkspace workspace;
  uint64_t stream;
  int64_t num_tokens;                  // T
  uint64_t x, ids, probs;              // [T,H] bf16, [T,K] int32, [T,K] fp32, contiguous
  uint64_t out;                        // [T,H] bf16
  uint64_t schedule;                   // int32[schedule_ints]: written by mok_schedule, read by mok_forward
  uint64_t h;                          // saved activations, 0 = do not save
  int64_t save_rows;                   // rows that fit into h
  const uint64_t* w1;                  // host array of device pointers: one stacked tensor or L tensors [2I,H]
  const uint64_t* w2;                  // the same: [H,I]
  int32_t num_w;                       // 1 (stacked) or L
  int32_t activation;                  // MokActivation
  float act_limit;
  int32_t comm_sms;                    // CTAs that move tokens; even; 0 = chosen from the shape
  uint32_t layer;                      // identity of the layer, stamped into the flags
  int32_t reserved;
} MokForwardArgs;

// What a backward call is asked for.
typedef enum { MOK_NEED_DX = 1, MOK_NEED_DP = 2 } MokNeeds;

// The backward of one call. Publishes dy and x itself; follows its forward at any distance.
typedef struct {
  uint32_t size, abi;
  MokWorkspace workspace;
  uint64_t stream;
  int64_t num_tokens;                  // T
  uint64_t dy, x, ids;                 // [T,H] bf16, [T,H] bf16, [T,K] int32, contiguous
  uint64_t schedule;                   // of the forward call
  uint64_t h;                          // what it saved, 0 = nothing
  int64_t save_rows;
  const uint64_t* w1;
  const uint64_t* w2;
  int32_t num_w;                       // 1 (stacked) or L, of w1 and w2
  int32_t activation;
  float act_limit;
  int32_t comm_sms;
  uint32_t layer;
  int32_t needs;                       // MokNeeds
  uint64_t dx, dp;                     // [T,H] bf16, [T,K] fp32; 0 where not needed
  const uint64_t* dw1;                 // host arrays like w1 and w2, of num_dw1 and num_dw2 pointers; 0 = not wanted
  const uint64_t* dw2;
  int32_t num_dw1, num_dw2;            // 1 (stacked) or L
  int32_t dw1_is_fp32, dw2_is_fp32;    // else bf16
  int32_t accumulate;                  // add, else write (zeros for an expert without rows)
  int32_t reserved;
} MokBackwardArgs;

MOK_API const char* mok_last_error(void);
// JSON: {"abi", "archs": ["90a", ...], "cuda", "csrc_tree"}. Static storage; needs no GPU.
MOK_API const char* mok_build_info(void);

// Pure arithmetic; needs no GPU unless problem->num_sms is 0 and minibatch_units is 0 (then 132 SMs are assumed without one).
MOK_API int mok_workspace_layout(const MokProblem* problem, MokLayout* layout);
// Loads every kernel for a device (-1: the current one), so that none is loaded lazily behind one that waits. Call before the
// first launch. MOK_ERR_DEVICE where the library has no code for it or a kernel does not support it yet.
MOK_API int mok_load_kernels(int32_t device);
// Zeroes flags and control words of this rank's symmetric region (asynchronously, on the stream). A barrier over the ranks must
// follow.
MOK_API int mok_workspace_init(const MokWorkspace* workspace, uint64_t stream);
// An error record in pinned host memory, zeroed: its address here, and the one for MokWorkspace.error_record.
MOK_API int mok_record_alloc(MokErrorRecord** record, uint64_t* device_pointer);
MOK_API int mok_record_free(MokErrorRecord* record);
// This rank gives up (why->code, layer, kind, expected and seen are taken over): marks its workspace as dead in stream order
// and tells the peers, whose waits then end with code 3. The workspace cannot be used again.
MOK_API int mok_abort(const MokWorkspace* workspace, const MokErrorRecord* why, uint64_t stream);
// Publishes x, ids and probs to the peers and builds the schedule. One launch.
MOK_API int mok_schedule(const MokForwardArgs* args);
// Dispatch, experts, combine and reduction. One launch; must follow mok_schedule of the same call on the same stream.
MOK_API int mok_forward(const MokForwardArgs* args);
// Publication of dy and x, all gradients. One launch.
MOK_API int mok_backward(const MokBackwardArgs* args);

#ifdef __cplusplus
}
#endif
#endif  // MEGATRON_MOK_API_H_
