// ds_nvme_tune as a function: sweeps block sizes and depths in one process, finds what saturates every drive,
// says what to put into a config and why, and stores a profile that planning and training read. Its flags,
// log files and last lines are those of DeepSpeed's tool of the same name; the main program is
// ds_nvme_tune.cc.
#ifndef PENSTOCK_TOOLS_DS_DS_IO_TUNE_H_
#define PENSTOCK_TOOLS_DS_DS_IO_TUNE_H_

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace penstock::tools {

struct TuneOptions {
  std::vector<std::string> nvme_dirs;
  std::string sweep_config;
  bool no_read = false;
  bool no_write = false;
  uint64_t io_bytes = 400ull << 20;
  std::string io_size_text = "400M";
  bool gpu = false;
  bool gds = false;
  bool flush_page_cache = false;
  std::string log_dir = "_aio_bench_logs";
  int64_t loops = 1;
  bool verbose = false;
  std::string engine = "aio_handle";
  std::string json_path;
  std::string profile_path;  // empty: the default place
  bool no_profile = false;
};

absl::StatusOr<TuneOptions> ParseTune(const std::vector<std::string>& arguments, std::string* help);

// One way of doing I/O, and what it came to. Speeds in bytes a second, of all directories together; 0: not
// measured.
struct TunePoint {
  uint64_t block_bytes = 1ull << 20;
  uint64_t queue_depth = 32;  // blocks in flight a directory and thread
  uint64_t parallel = 1;
  bool single_submit = false;
  bool sequential = false;
  double read_bytes_per_s = 0;
  double write_bytes_per_s = 0;
  double mixed_bytes_per_s = 0;

  uint64_t in_flight_bytes() const { return block_bytes * queue_depth * parallel; }
  double score() const;  // reads and writes as they were measured; in training they come mixed
};

// The points of a sweep file: an object of ds_io's option names to lists, in the order of its keys.
// kInvalidArgument names the key and what is wrong with it.
absl::StatusOr<std::vector<TunePoint>> ReadSweep(const std::string& json_text);

// The point to recommend: among those within 5% of the best score the one with the fewest bytes in flight, of
// these the largest block. Beyond that only latency and pinned memory grow. Pre: not empty.
const TunePoint& Choose(const std::vector<TunePoint>& points);

// What to put into a config when `saturation` saturates a drive: twice its bytes in flight, so that handing
// over in batches never drains the drive, in at least four blocks, of 1 MiB or more each.
TunePoint Recommend(const TunePoint& saturation);

// { "aio": { ... } } with real booleans.
std::string AioBlock(const TunePoint& point);

// The whole program: 0 done, 1 the run failed, 2 the arguments or the sweep file are wrong.
int TuneMain(const std::vector<std::string>& arguments, std::FILE* out, std::FILE* err);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_DS_DS_IO_TUNE_H_
