// What the host calls. Arguments have been validated, problem.num_sms is filled in; a failure has called fail().
#ifndef MEGATRON_MOK_SCHEDULE_SCHEDULE_H_
#define MEGATRON_MOK_SCHEDULE_SCHEDULE_H_

#include <cuda_runtime_api.h>

#include "megatron_mok/api.h"

namespace mok {

int launch_schedule(const MokForwardArgs& args, cudaStream_t stream);
int launch_abort(const MokWorkspace& workspace, const MokErrorRecord& why, cudaStream_t stream);
int load_schedule();  // so that no kernel is loaded behind one that waits

}  // namespace mok
#endif  // MEGATRON_MOK_SCHEDULE_SCHEDULE_H_
