#include "tools/penstock/resource_flags.h"

#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "run/config_options.h"
#include "tools/base/flag_check.h"
#include "tools/base/size.h"
#include "tools/penstock/device_flags.h"
#include "tools/state/state_reader.h"
#include "zero/memory/thread_times.h"

namespace penstock::tools {
namespace {

// Processes on this host that train together.
int Sharing(const zero::EngineOptions& engine) {
  return engine.comm != nullptr ? engine.comm->environment().local_world : 1;
}

}  // namespace

absl::Status ResolveMemory(const TrainOptions& flags, const run::Config& config, TrainSettings* settings) {
  zero::EngineOptions& engine = settings->engine;
  if (config.penstock.host_memory_budget_bytes.has_value()) {
    engine.memory.host_memory_budget_bytes = *config.penstock.host_memory_budget_bytes;
  } else if (engine.storage.offload == zero::OffloadDevice::kNvme) {
    const int sharing = Sharing(engine);
    engine.memory.host_memory_budget_bytes = DefaultHostMemory(sharing, engine.intra_op_threads);
    settings->notes.push_back(
        absl::StrCat("no --host-memory given: ", sharing == 1 ? "" : "a rank's share of ",
                     "half of what is free, ", FormatBytes(engine.memory.host_memory_budget_bytes)));
  }
  return ResolveDevice(flags, config, settings);
}

void ResolveIo(const run::Config& config, TrainSettings* settings) {
  zero::EngineOptions& engine = settings->engine;
  run::ApplyConfig(config, run::Door::kCommandLine, &engine);
  engine.optimizer.workers = static_cast<int>(config.penstock.update_threads.value_or(
      zero::DefaultUpdateThreads(engine.device->has_own_memory(), Sharing(engine))));
}

}  // namespace penstock::tools
