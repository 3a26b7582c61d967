// DeepSpeed's JSON: parsing, and what is derived from it.
#include <cmath>

#include "run/config.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  using penstock::fuzz::Refused;
  const auto parsed = penstock::run::ParseConfig(penstock::fuzz::TextOf(data, bytes));
  if (!parsed.ok()) {
    FUZZ_CHECK(absl::IsInvalidArgument(parsed.status()));
    Refused(parsed.status());
    return 0;
  }
  penstock::fuzz::Accepted();
  for (const std::string& note : parsed->notes)
    FUZZ_CHECK(!note.empty() && note.find('\n') == std::string::npos);
  const penstock::run::Config& config = parsed->config;
  for (const int64_t world : {1, 3, 8}) {
    const auto batch = penstock::run::ResolveBatch(
        {config.train_batch_size, config.micro_batch_per_rank, config.gradient_accumulation_steps}, world, 4);
    if (!batch.ok()) {
      Refused(batch.status());
    } else {
      FUZZ_CHECK(batch->train_batch == batch->micro_batch * batch->accumulation * world);
    }
  }
  if (config.scheduler.has_value()) {
    const auto schedule =
        penstock::run::MakeSchedule(*config.scheduler, config.optimizer.lr.value_or(1e-3), 1000);
    if (!schedule.ok()) {
      Refused(schedule.status());
    } else {
      for (const int64_t step : {0, 1, 10, 999, 1000, 1000000})
        FUZZ_CHECK(!std::isnan(schedule->At(step).lr));
    }
  }
  if (const auto scaler = penstock::run::MakeLossScaler(config.fp16); !scaler.ok()) Refused(scaler.status());
  (void)penstock::run::CombinedOffload(config.zero);
  (void)penstock::run::NvmePaths(config.zero);
  return 0;
}
