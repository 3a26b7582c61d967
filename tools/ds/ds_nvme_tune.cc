// ds_nvme_tune: finds how to drive these drives; see ds_io_tune.h.
#include <cstdio>
#include <string>
#include <vector>

#include "aio/program.h"
#include "tools/ds/ds_io_tune.h"

int main(int argc, char** argv) {
  penstock::aio::IgnoreFileSizeSignal();
  return penstock::tools::TuneMain(std::vector<std::string>(argv + 1, argv + argc), stdout, stderr);
}
