// The flags of ds_io.
#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "aio/io_error.h"
#include "base/status_macros.h"
#include "tools/ds/ds_io_args.h"
#include "tools/ds/ds_io_bench.h"
#include "tools/ds/ds_io_gpu.h"

namespace penstock::tools {
namespace {

constexpr const char* kSummary =
    "Measures how fast files are read or written past the page cache, in blocks, with a queue kept full.\n"
    "Result lines count in 2^30 bytes (\"GB\"), the JSON in 10^9.";

absl::Status CheckEngine(const DsIoOptions& options) {
  const std::string& engine = options.engine;
  if (engine == "aio_handle" || engine == "io_uring" || engine == "libaio" || engine == "threads") {
    return absl::OkStatus();
  }
  if (engine == "aio_basic") {
    return absl::InvalidArgumentError(
        "--engine aio_basic is a Python binding without a queue of its own; use aio_handle, or libaio for "
        "the same system "
        "calls");
  }
  if (engine == "torch_io" || engine == "torch_fastio") {
    return absl::InvalidArgumentError(absl::StrCat(
        "--engine ", engine,
        " measures Python's serialisation; use aio_handle (the best of io_uring, libaio, threads)"));
  }
  return absl::InvalidArgumentError(absl::StrCat("argument --engine: '", aio::OneLine(engine),
                                                 "' is none of aio_handle, io_uring, libaio, threads"));
}

absl::Status Check(const DsIoOptions& options) {
  const bool mapped = !options.folder_to_device_mapping.empty();
  if (options.folder.empty() && !mapped) {
    return absl::InvalidArgumentError(
        "one of --folder and --folder_to_device_mapping is required; see --help");
  }
  if (!options.folder.empty() && mapped) {
    return absl::InvalidArgumentError("--folder and --folder_to_device_mapping exclude each other");
  }
  if (mapped && options.processes > 1) {
    return absl::InvalidArgumentError(
        "--multi_process goes with --folder; with --folder_to_device_mapping there is one process an entry");
  }
  std::set<std::string> devices;
  for (const std::string& entry : options.folder_to_device_mapping) {
    const size_t colon = entry.rfind(':');
    if (colon == std::string::npos || colon == 0 || colon + 1 == entry.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("argument --folder_to_device_mapping: '", aio::OneLine(entry), "' is not DIR:DEVICE"));
    }
    if (!devices.insert(entry.substr(colon + 1)).second) {
      return absl::InvalidArgumentError(absl::StrCat("argument --folder_to_device_mapping: device ",
                                                     aio::OneLine(entry.substr(colon + 1)),
                                                     " is named twice"));
    }
  }
  if (options.use_gds && !options.gpu) return absl::InvalidArgumentError("--use_gds needs --gpu");
  if (options.slow_bounce_buffer && !options.gpu) {
    return absl::InvalidArgumentError("--slow_bounce_buffer needs --gpu");
  }
  if (options.use_gds && options.slow_bounce_buffer) {
    return absl::InvalidArgumentError("--use_gds has no bounce buffer: leave out --slow_bounce_buffer");
  }
  if (options.gpu) {
    for (const auto& [device, folder] : options.Mapping()) {
      RETURN_IF_ERROR(GpuNumber(device).status());
    }
  }
  if (options.block_bytes % 4096 != 0 || options.block_bytes > (64ull << 20)) {
    return absl::InvalidArgumentError(absl::StrCat("argument --block_size: ", options.block_size_text,
                                                   " is not a multiple of 4096 up to 64M"));
  }
  if (options.io_bytes > (1ull << 46))
    return absl::InvalidArgumentError("argument --io_size: more than 64 TiB");
  if (static_cast<uint64_t>(options.queue_depth) * options.Parallel() > 4096) {
    return absl::InvalidArgumentError("--queue_depth times --io_parallel is more than 4096 blocks in flight");
  }
  return CheckEngine(options);
}

}  // namespace

std::vector<std::pair<std::string, std::string>> DsIoOptions::Mapping() const {
  std::vector<std::pair<std::string, std::string>> mapping;
  for (const std::string& entry : folder_to_device_mapping) {
    const size_t colon = entry.rfind(':');
    mapping.emplace_back(entry.substr(colon + 1), entry.substr(0, colon));
  }
  for (int64_t i = 0; !folder.empty() && i < processes; ++i) mapping.emplace_back(std::to_string(i), folder);
  return mapping;
}

absl::StatusOr<DsIoOptions> ParseDsIo(const std::vector<std::string>& arguments, std::string* help) {
  DsIoOptions o;
  ArgumentTable table("ds_io", kSummary);
  table.Text("--folder", &o.folder, "DIR", "folder of the files; or:");
  table.List("--folder_to_device_mapping", &o.folder_to_device_mapping, "DIR:DEV", "one process for each");
  table.Size("--io_size", &o.io_bytes, &o.io_size_text, "bytes of a file, one operation: 400M, 1G");
  table.Require("--io_size");
  table.Size("--fast_io_size", &o.fast_io_bytes, &o.fast_io_size_text, "buffer of torch_fastio; not used");
  table.Switch("--read", &o.read, "read; default: write");
  table.Integer("--multi_process", &o.processes, 1, 256, "processes in --folder (1)");
  table.Size("--block_size", &o.block_bytes, &o.block_size_text, "of one transfer (1M)");
  table.Integer("--queue_depth", &o.queue_depth, 1, 4096, "blocks in flight (32)");
  table.Switch("--single_submit", &o.single_submit, "hand blocks over one by one");
  table.Switch("--sequential_requests", &o.sequential_requests, "wait for a whole queue before the next");
  table.Switch("--validate", &o.validate, "read back through the page cache and compare; not timed");
  table.Text("--engine", &o.engine, "ENGINE", "aio_handle (the best there is), io_uring, libaio, threads");
  table.Integer("--loops", &o.loops, 1, 1'000'000, "measured repetitions (3)");
  table.Integer("--io_parallel", &o.io_parallel, 1, 1024, "times --queue_depth blocks in flight (1)");
  table.Switch("--gpu", &o.gpu, "to and from CUDA device DEV (or the process's number), by pinned memory");
  table.Switch("--use_gds", &o.use_gds, "with --gpu: straight to the device with cuFile");
  table.Switch("--slow_bounce_buffer", &o.slow_bounce_buffer,
               "with --gpu: pin the memory within every operation");
  table.Switch("--torch_legacy_save", &o.torch_legacy_save, "of torch_io; not used");
  table.Switch("--use_accelerator_pin_memory", &o.use_accelerator_pin_memory, "memory is pinned in any case");
  table.Integer("--warmup_loops", &o.warmup_loops, 0, 1'000'000, "repetitions before the measured ones (1)");
  table.Switch("--include_warmup_time", &o.include_warmup_time, "count them too");
  table.Switch("--different_file_each_iteration", &o.different_file_each_iteration,
               "a file for every repetition");
  table.Text("--json", &o.json_path, "FILE", "write the result as JSON too");
  RETURN_IF_ERROR(table.Parse(arguments));
  if (table.help_asked()) {
    *help = table.Help();
    return o;
  }
  RETURN_IF_ERROR(Check(o));
  return o;
}

}  // namespace penstock::tools
