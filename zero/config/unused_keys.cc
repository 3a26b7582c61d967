#include "zero/config/unused_keys.h"

#include "absl/strings/str_cat.h"

namespace penstock::zero {

std::vector<std::string> UnusedKeys(const Config& config) {
  std::vector<std::string> notes;
  const auto ignored = [&](bool given, std::string_view key, std::string_view why) {
    if (given) notes.push_back(absl::StrCat(std::string(key), ": accepted and ignored: ", std::string(why)));
  };
  const OffloadOptimizerConfig& optimizer = config.zero.offload_optimizer;
  const bool no_ahead = optimizer.pipeline_read == false, no_behind = optimizer.pipeline_write == false;
  if (no_ahead != no_behind) {
    notes.push_back(absl::StrCat(
        "zero_optimization.offload_optimizer.pipeline_", no_ahead ? "read" : "write",
        " false: at most two tiles of optimizer state are in flight at once, one of which may still be read ",
        "ahead or written behind; with pipeline_read and pipeline_write false it is one at a time"));
  }
  ignored(config.zero.reduce_bucket_size_elements.has_value(), "zero_optimization.reduce_bucket_size",
          "a block is reduced as one, in small pieces");
  ignored(config.zero.allgather_bucket_size_elements.has_value(), "zero_optimization.allgather_bucket_size",
          "a block is gathered as one");
  ignored(config.penstock.io_threads.has_value(), "penstock.io_threads",
          "one thread drives a device at its full speed");
  return notes;
}

std::vector<std::string> UnusedDeviceKeys(const Config& config, std::string_view where) {
  std::vector<std::string> notes;
  const auto ignored = [&](bool given, std::string_view key, std::string_view why) {
    if (!given) return;
    notes.push_back(absl::StrCat(std::string(key), ": accepted and ignored: ", std::string(where), " ",
                                 std::string(why)));
  };
  ignored(config.penstock.device_memory_budget_bytes.has_value(), "penstock.device_memory",
          "state is in host memory and on drives");
  ignored(config.aio.use_gds.value_or(false), "aio.use_gds", "weights go by way of host memory");
  ignored(config.zero.offload_optimizer.ratio.has_value(), "zero_optimization.offload_optimizer.ratio",
          "the processor updates everything");
  return notes;
}

}  // namespace penstock::zero
