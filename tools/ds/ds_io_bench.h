// ds_io as a function: reads its flags, runs the processes, reports. The flags, their defaults and the four
// result lines are those of DeepSpeed's tool of the same name; the main program is ds_io.cc.
#ifndef PENSTOCK_TOOLS_DS_DS_IO_BENCH_H_
#define PENSTOCK_TOOLS_DS_DS_IO_BENCH_H_

#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/engine.h"
#include "aio/stats.h"

namespace penstock::tools {

struct DsIoOptions {
  std::string folder;
  std::vector<std::string> folder_to_device_mapping;
  uint64_t io_bytes = 0;
  std::string io_size_text;
  uint64_t fast_io_bytes = 64ull << 20;
  std::string fast_io_size_text = "64M";
  bool read = false;
  int64_t processes = 1;
  uint64_t block_bytes = 1ull << 20;
  std::string block_size_text = "1M";
  int64_t queue_depth = 32;
  bool single_submit = false;
  bool sequential_requests = false;
  bool validate = false;
  std::string engine = "aio_handle";
  int64_t loops = 3;
  int64_t io_parallel = 0;  // 0: not given, counts as 1
  bool gpu = false;
  bool use_gds = false;
  bool slow_bounce_buffer = false;
  bool torch_legacy_save = false;
  bool use_accelerator_pin_memory = false;
  int64_t warmup_loops = 1;
  bool include_warmup_time = false;
  bool different_file_each_iteration = false;
  std::string json_path;

  // Where each process works: (device label, folder).
  std::vector<std::pair<std::string, std::string>> Mapping() const;
  uint64_t Parallel() const { return io_parallel == 0 ? 1 : static_cast<uint64_t>(io_parallel); }
};

// kInvalidArgument: one line saying which arguments are wrong. `help` is set to the text of --help if that
// was asked for.
absl::StatusOr<DsIoOptions> ParseDsIo(const std::vector<std::string>& arguments, std::string* help);

struct DsIoResult {
  uint64_t bytes = 0;                // of the measured loops, all processes
  std::vector<double> task_seconds;  // per measured loop, the slowest process
  std::vector<double> e2e_seconds;
  double task_latency_s = 0;  // the slowest process's sum
  double e2e_latency_s = 0;
  double cpu_seconds = 0;  // all processes, measured loops
  uint64_t errors = 0;
  uint64_t device_read_bytes = 0;  // by the kernel's counters, measured loops
  aio::Histogram block_latency;
  std::string backend;  // that it came down to
};

// Forks one process a mapping entry, so no thread may run in the caller. Progress goes to `out`, warnings to
// `err`. An error is the first one that any process met.
absl::StatusOr<DsIoResult> RunDsIo(const DsIoOptions& options, std::FILE* out, std::FILE* err);

// The four lines that everything downstream reads. GB is 2^30 here, as it always was.
std::string ResultLines(const DsIoOptions& options, const DsIoResult& result);
std::string ResultJson(const DsIoOptions& options, const DsIoResult& result);

// The whole program: 0 done, 1 the run failed, 2 the arguments are wrong.
int DsIoMain(const std::vector<std::string>& arguments, std::FILE* out, std::FILE* err);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_DS_DS_IO_BENCH_H_
