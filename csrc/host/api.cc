// The entry points: validate, choose the code for this GPU, launch.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <new>
#include <string>

#include "common/error.h"
#include "kernels/launch.h"
#include "layout/workspace.h"
#include "schedule/schedule.h"

namespace mok {
namespace {

#define MOK_TRY(expression) \
  if (const int status_ = (expression); status_ != MOK_OK) return status_

int cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return MOK_OK;
  cudaGetLastError();  // not sticky for whoever calls CUDA next
  return fail_cuda(error, what);
}

template <class Struct>
int check_abi(const Struct* s, const char* name) {
  if (!s) return fail(MOK_ERR_ARGUMENT, "%s: got a null pointer", name);
  if (s->size != sizeof(Struct) || s->abi != MOK_ABI_VERSION)
    return fail(MOK_ERR_ABI,
                "%s: got size %u and ABI version %u, need %zu and %d; use the package and the library of one build", name,
                s->size, s->abi, sizeof(Struct), MOK_ABI_VERSION);
  return MOK_OK;
}

int out_of_range(const char* field, long long got, const char* need) {
  return fail(MOK_ERR_ARGUMENT, "%s: got %lld, need %s", field, got, need);
}

int check_problem(const MokProblem& p) {
  if (p.num_ranks < 1 || p.num_ranks > MOK_MAX_RANKS) return out_of_range("num_ranks", p.num_ranks, "1 to 72");
  if (p.rank < 0 || p.rank >= p.num_ranks) return out_of_range("rank", p.rank, "0 to num_ranks - 1");
  if (p.num_experts < 1 || p.num_experts % p.num_ranks != 0)
    return out_of_range("num_experts", p.num_experts, "a positive multiple of num_ranks");
  if (p.num_experts / p.num_ranks > MOK_MAX_LOCAL_EXPERTS)
    return out_of_range("num_experts / num_ranks", p.num_experts / p.num_ranks, "1 to 512");
  if (p.top_k < 1 || p.top_k > MOK_MAX_TOP_K) return out_of_range("top_k", p.top_k, "1 to 32");
  if (p.hidden < 128 || p.hidden % 128 != 0) return out_of_range("hidden", p.hidden, "a positive multiple of 128");
  if (p.intermediate < 128 || p.intermediate % 128 != 0)
    return out_of_range("intermediate", p.intermediate, "a positive multiple of 128");
  if (p.max_tokens < 1 || p.max_tokens > INT32_MAX / p.top_k)
    return out_of_range("max_tokens", p.max_tokens, "1 to 2^31 / top_k");
  // Rows are counted in 32 bits.
  const int64_t cap = ScheduleLayout::make(p.num_ranks, p.max_tokens, p.top_k, p.num_experts / p.num_ranks).cap;
  if (cap > INT32_MAX) return out_of_range("num_ranks * max_tokens * top_k", cap, "fewer than 2^31 rows");
  // One cluster of two CTAs moves tokens and another one computes.
  if (p.num_sms != 0 && (p.num_sms < 4 || p.num_sms % 2 != 0))
    return out_of_range("num_sms", p.num_sms, "0 or an even number from 4");
  if (p.minibatch_units < 0 || p.minibatch_units > 65536) return out_of_range("minibatch_units", p.minibatch_units, "0 to 65536");
  if (p.ring_rows < 0) return out_of_range("ring_rows", p.ring_rows, "0 or more");
  return MOK_OK;
}

struct Device {
  int id, arch, num_sms;  // arch: 90 for compute capability 9.0
};

int present_device(Device* device, int id = -1) {
  if (id < 0) MOK_TRY(cuda_status(cudaGetDevice(&id), "cudaGetDevice"));
  int major = 0, minor = 0;
  device->id = id;
  MOK_TRY(cuda_status(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id), "compute capability"));
  MOK_TRY(cuda_status(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, id), "compute capability"));
  MOK_TRY(cuda_status(cudaDeviceGetAttribute(&device->num_sms, cudaDevAttrMultiProcessorCount, id), "SM count"));
  device->arch = 10 * major + minor;
  return MOK_OK;
}

// Is the arch-specific code for compute capability `arch` in this library?
bool compiled_for(int arch) {
  const std::string archs = "," MOK_ARCHS ",";
  return archs.find("," + std::to_string(arch) + "a,") != std::string::npos;
}

int check_arch(const Device& device) {
  if (compiled_for(device.arch)) return MOK_OK;
  return fail(MOK_ERR_DEVICE,
              "device %d has compute capability %d.%d, this library has code for %s; build it with MOK_ARCHS=%da",
              device.id, device.arch / 10, device.arch % 10, MOK_ARCHS, device.arch);
}

int unsupported_forward(int status, const Device& device) {
  return fail(status, "the forward kernel does not support compute capability %d.%d yet, need 9.0",
              device.arch / 10, device.arch % 10);
}

// Fills in the number of SMs and holds it against the device's.
int resolve_sms(MokProblem* p, const Device& device) {
  if (p->num_sms == 0) p->num_sms = device.num_sms / 2 * 2;
  if (p->num_sms > device.num_sms)
    return fail(MOK_ERR_ARGUMENT, "num_sms: got %d, need an even number up to %d (SMs of device %d)", p->num_sms,
                device.num_sms, device.id);
  return MOK_OK;
}

int check_pointer(const char* field, uint64_t pointer, int alignment, bool needed = true) {
  if ((needed && !pointer) || pointer % alignment)
    return fail(MOK_ERR_ARGUMENT, "%s: got %#llx, need a device pointer aligned to %d bytes", field,
                static_cast<unsigned long long>(pointer), alignment);
  return MOK_OK;
}

int check_workspace(const MokWorkspace& w, bool with_local) {
  MOK_TRY(check_abi(&w, "MokWorkspace"));
  MOK_TRY(check_abi(&w.problem, "MokWorkspace.problem"));
  MOK_TRY(check_problem(w.problem));
  MOK_TRY(check_pointer("local", w.local, kRegionAlign, with_local));
  MOK_TRY(check_pointer("error_record", w.error_record, alignof(MokErrorRecord)));
  for (int r = 0; r < w.problem.num_ranks; ++r)
    MOK_TRY(check_pointer(("peers[" + std::to_string(r) + "]").c_str(), w.peers[r], kRegionAlign));
  if (!w.timeout_ns) return fail(MOK_ERR_ARGUMENT, "timeout_ns: got 0, need the bound of every wait");
  return MOK_OK;
}

// What all calls share. `args` gets the knobs filled in.
template <class Args>
int check_call(Args* args, Device* device) {
  MOK_TRY(check_workspace(args->workspace, true));
  MokProblem& p = args->workspace.problem;
  MOK_TRY(present_device(device));
  MOK_TRY(check_arch(*device));
  // Binds the device's context to this thread: tensor maps are encoded by the driver, and an autograd thread may not have one yet.
  MOK_TRY(cuda_status(cudaSetDevice(device->id), "cudaSetDevice"));
  MOK_TRY(resolve_sms(&p, *device));
  if (args->num_tokens < 0 || args->num_tokens > p.max_tokens)
    return fail(MOK_ERR_ARGUMENT, "num_tokens: got %lld, need 0 to max_tokens (%lld)",
                static_cast<long long>(args->num_tokens), static_cast<long long>(p.max_tokens));
  if (args->layer >> 20) return out_of_range("layer", args->layer, "fewer than 2^20");
  const bool any = args->num_tokens > 0;
  MOK_TRY(check_pointer("x", args->x, 16, any));
  MOK_TRY(check_pointer("ids", args->ids, 4, any));
  return check_pointer("schedule", args->schedule, 16);
}

int check_tensors(const char* field, const uint64_t* tensors, int count, int local_experts) {
  if (count != 1 && count != local_experts)
    return fail(MOK_ERR_ARGUMENT, "number of %s: got %d, need 1 (stacked) or %d (one tensor an expert)", field, count,
                local_experts);
  if (!tensors) return fail(MOK_ERR_ARGUMENT, "%s: got a null pointer, need an array of %d device pointers", field, count);
  for (int i = 0; i < count; ++i) MOK_TRY(check_pointer(field, tensors[i], 16));
  return MOK_OK;
}

// What forward and backward share beyond check_call.
template <class Args>
int check_main(const Args& args) {
  const MokProblem& p = args.workspace.problem;
  const int local_experts = p.num_experts / p.num_ranks;
  if (args.save_rows < 0 || args.save_rows % kGroupRows)
    return out_of_range("save_rows", args.save_rows, "a multiple of 8, 0 or more");
  MOK_TRY(check_pointer("h", args.h, 16, args.save_rows > 0));
  MOK_TRY(check_tensors("w1", args.w1, args.num_w, local_experts));
  MOK_TRY(check_tensors("w2", args.w2, args.num_w, local_experts));
  if (args.activation < MOK_ACT_SWIGLU || args.activation > MOK_ACT_SQUARED_RELU)
    return out_of_range("activation", args.activation, "a MokActivation");
  if (args.comm_sms < 0 || args.comm_sms % 2 || args.comm_sms >= p.num_sms)
    return fail(MOK_ERR_ARGUMENT, "comm_sms: got %d, need an even number below num_sms (%d), or 0", args.comm_sms,
                p.num_sms);
  return MOK_OK;
}

cudaStream_t as_stream(uint64_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

std::string make_build_info() {
  std::string archs = MOK_ARCHS, list;
  for (size_t at = 0; at < archs.size();) {
    const size_t end = std::min(archs.find(',', at), archs.size());
    list += (list.empty() ? "\"" : ", \"") + archs.substr(at, end - at) + "\"";
    at = end + 1;
  }
  char text[512];
  std::snprintf(text, sizeof(text), "{\"abi\": %d, \"archs\": [%s], \"cuda\": \"%d.%d\", \"csrc_tree\": \"%s\"}",
                MOK_ABI_VERSION, list.c_str(), CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10, MOK_CSRC_TREE);
  return text;
}

}  // namespace
}  // namespace mok

using namespace mok;

extern "C" const char* mok_build_info(void) {
  static const std::string info = make_build_info();
  return info.c_str();
}

extern "C" int mok_workspace_layout(const MokProblem* problem, MokLayout* layout) {
  MOK_TRY(check_abi(problem, "MokProblem"));
  MOK_TRY(check_abi(layout, "MokLayout"));
  MOK_TRY(check_problem(*problem));
  MokProblem p = *problem;
  if (p.num_sms == 0) {
    Device device{};
    p.num_sms = present_device(&device) == MOK_OK ? device.num_sms / 2 * 2 : 132;
  }
  const ScheduleLayout schedule = ScheduleLayout::make(p.num_ranks, p.max_tokens, p.top_k, p.num_experts / p.num_ranks);
  const SymmetricLayout symmetric = SymmetricLayout::make(p.num_ranks, p.max_tokens, p.top_k, p.hidden);
  const Sizes sizes = Sizes::make(p);
  const LocalLayout local = LocalLayout::make(p, sizes);
  *layout = {
      .size = sizeof(MokLayout),
      .abi = MOK_ABI_VERSION,
      .symmetric_bytes = symmetric.bytes,
      .local_bytes = local.bytes,
      .local_backward_bytes = std::max(local.bytes, local.backward.bytes),
      .schedule_ints = schedule.ints,
      .schedule_rows = schedule.cap,
      .saved_row_bytes = int64_t(4) * p.intermediate,
      .minibatch_units = sizes.minibatch_units,
      .ring_blocks = sizes.ring_blocks,
      .act_blocks = sizes.act_blocks,
      .segment_units = sizes.segment_units,
      .off_flags = 0,
      .off_tokens = symmetric.tokens,
      .off_ids = symmetric.ids,
      .off_probs = symmetric.probs,
      .off_x = symmetric.x,
      .off_dy = symmetric.dy,
      .off_slots = symmetric.slots,
      .off_dp_slots = symmetric.dp_slots,
      .off_waited_ns = symmetric.control + int64_t(offsetof(Control, waited_ns)),
  };
  return MOK_OK;
}

extern "C" int mok_load_kernels(int32_t id) {
  Device device{};
  MOK_TRY(present_device(&device, id));
  MOK_TRY(check_arch(device));
  int before = 0;
  MOK_TRY(cuda_status(cudaGetDevice(&before), "cudaGetDevice"));
  MOK_TRY(cuda_status(cudaSetDevice(device.id), "cudaSetDevice"));
  int status = load_schedule();
#if MOK_HAVE_SM90
  if (status == MOK_OK && device.arch == 90) status = sm90::load_forward();
  if (status == MOK_OK && device.arch == 90) status = sm90::load_backward();
#endif
  if (status == MOK_OK && device.arch != 90) status = unsupported_forward(MOK_ERR_DEVICE, device);
  cudaSetDevice(before);
  return status;
}

extern "C" int mok_workspace_init(const MokWorkspace* workspace, uint64_t stream) {
  MOK_TRY(check_abi(workspace, "MokWorkspace"));
  MOK_TRY(check_workspace(*workspace, false));
  const MokProblem& p = workspace->problem;
  const int64_t words = SymmetricLayout::make(p.num_ranks, p.max_tokens, p.top_k, p.hidden).control + sizeof(Control);
  void* region = reinterpret_cast<void*>(workspace->peers[p.rank]);
  return cuda_status(cudaMemsetAsync(region, 0, words, as_stream(stream)), "zeroing flags and control words");
}

extern "C" int mok_record_alloc(MokErrorRecord** record, uint64_t* device_pointer) {
  if (!record || !device_pointer) return fail(MOK_ERR_ARGUMENT, "mok_record_alloc: got a null pointer");
  void *host = nullptr, *device = nullptr;
  MOK_TRY(cuda_status(cudaHostAlloc(&host, sizeof(MokErrorRecord), cudaHostAllocMapped | cudaHostAllocPortable),
                      "cudaHostAlloc"));
  if (const cudaError_t error = cudaHostGetDevicePointer(&device, host, 0); error != cudaSuccess) {
    cudaFreeHost(host);
    return cuda_status(error, "cudaHostGetDevicePointer");
  }
  *record = new (host) MokErrorRecord{};
  *device_pointer = reinterpret_cast<uint64_t>(device);
  return MOK_OK;
}

extern "C" int mok_record_free(MokErrorRecord* record) { return cuda_status(cudaFreeHost(record), "cudaFreeHost"); }

extern "C" int mok_abort(const MokWorkspace* workspace, const MokErrorRecord* why, uint64_t stream) {
  MOK_TRY(check_abi(workspace, "MokWorkspace"));
  MOK_TRY(check_workspace(*workspace, false));
  if (!why || why->code == 0) return fail(MOK_ERR_ARGUMENT, "mok_abort: got no reason, need a record with a code");
  return launch_abort(*workspace, *why, as_stream(stream));
}

extern "C" int mok_schedule(const MokForwardArgs* args) {
  MOK_TRY(check_abi(args, "MokForwardArgs"));
  MokForwardArgs call = *args;
  Device device{};
  MOK_TRY(check_call(&call, &device));
  MOK_TRY(check_pointer("probs", call.probs, 4, call.num_tokens > 0));
  return launch_schedule(call, as_stream(call.stream));
}

extern "C" int mok_forward(const MokForwardArgs* args) {
  MOK_TRY(check_abi(args, "MokForwardArgs"));
  MokForwardArgs call = *args;
  Device device{};
  MOK_TRY(check_call(&call, &device));
  MOK_TRY(check_main(call));
  MOK_TRY(check_pointer("out", call.out, 16, call.num_tokens > 0));
#if MOK_HAVE_SM90
  if (device.arch == 90) return sm90::launch_forward(call, as_stream(call.stream));
#endif
  return unsupported_forward(MOK_ERR_NOT_COMPILED, device);
}

extern "C" int mok_backward(const MokBackwardArgs* args) {
  MOK_TRY(check_abi(args, "MokBackwardArgs"));
  MokBackwardArgs call = *args;
  Device device{};
  MOK_TRY(check_call(&call, &device));
  MOK_TRY(check_main(call));
  const int local_experts = call.workspace.problem.num_experts / call.workspace.problem.num_ranks;
  const bool any = call.num_tokens > 0;
  MOK_TRY(check_pointer("dy", call.dy, 16, any));
  if (call.needs & ~(MOK_NEED_DX | MOK_NEED_DP)) return out_of_range("needs", call.needs, "MokNeeds bits");
  MOK_TRY(check_pointer("dx", call.dx, 16, any && call.needs & MOK_NEED_DX));
  MOK_TRY(check_pointer("dp", call.dp, 4, any && call.needs & MOK_NEED_DP));
  if (call.dw1) MOK_TRY(check_tensors("dw1", call.dw1, call.num_dw1, local_experts));
  if (call.dw2) MOK_TRY(check_tensors("dw2", call.dw2, call.num_dw2, local_experts));
#if MOK_HAVE_SM90
  if (device.arch == 90) return sm90::launch_backward(call, as_stream(call.stream));
#endif
  return fail(MOK_ERR_NOT_COMPILED, "the backward kernel does not support compute capability %d.%d yet, need 9.0",
              device.arch / 10, device.arch % 10);
}
