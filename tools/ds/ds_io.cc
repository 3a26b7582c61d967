// ds_io: measures reading and writing of files; see ds_io_bench.h.
#include <cstdio>
#include <string>
#include <vector>

#include "aio/program.h"
#include "tools/ds/ds_io_bench.h"

int main(int argc, char** argv) {
  penstock::aio::IgnoreFileSizeSignal();
  return penstock::tools::DsIoMain(std::vector<std::string>(argv + 1, argv + argc), stdout, stderr);
}
