#include "tools/base/file_limit.h"

#include <sys/resource.h>

namespace penstock::tools {

void AllowManyFiles() {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return;
  files.rlim_cur = files.rlim_max;
  (void)setrlimit(RLIMIT_NOFILE, &files);  // without it, opening the last of many says so
}

}  // namespace penstock::tools
