#include "base/check.h"

#include <cstdio>
#include <cstdlib>

namespace penstock {

void CheckFailed(const char* file, int line, const char* condition, const char* what) {
  std::fprintf(stderr, "penstock: this is a bug, please report this line: %s:%d: %s (%s)\n", file, line, what,
               condition);
  std::abort();
}

}  // namespace penstock
