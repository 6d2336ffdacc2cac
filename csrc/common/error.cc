#include "common/error.h"

#include <cstdarg>
#include <cstdio>

namespace mok {
namespace {
thread_local char last_error[1024] = "";
}

int fail(int status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last_error, sizeof(last_error), format, arguments);
  va_end(arguments);
  return status;
}

}  // namespace mok

extern "C" const char* mok_last_error(void) { return mok::last_error; }
