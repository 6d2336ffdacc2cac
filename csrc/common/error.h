// Status codes and this thread's last error.
#ifndef MEGATRON_MOK_COMMON_ERROR_H_
#define MEGATRON_MOK_COMMON_ERROR_H_

#include "megatron_mok/api.h"

namespace mok {

// Keeps the text for mok_last_error() and returns `status`.
__attribute__((format(printf, 2, 3))) int fail(int status, const char* format, ...);

}  // namespace mok
#endif  // MEGATRON_MOK_COMMON_ERROR_H_
