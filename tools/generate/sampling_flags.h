// The flags that say how tokens are chosen, beside what a model's generation_config.json says.
#ifndef PENSTOCK_TOOLS_GENERATE_SAMPLING_FLAGS_H_
#define PENSTOCK_TOOLS_GENERATE_SAMPLING_FLAGS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "models/data/text_sampler.h"
#include "tools/generate/text_model.h"

namespace CLI {
class App;
}  // namespace CLI

namespace penstock::tools {

struct SamplingFlags {
  std::optional<double> temperature, top_p, min_p, repetition_penalty;
  std::optional<int64_t> top_k, min_tokens, logprobs;
  double presence_penalty = 0, frequency_penalty = 0;
  int64_t n = 1;
  std::vector<std::string> logit_bias;
};

void DeclareSampling(CLI::App& app, SamplingFlags& flags);

// kInvalidArgument names the flag whose value is out of its bounds.
absl::Status CheckSampling(const SamplingFlags& flags);

// Of flags that are right, for a model. kInvalidArgument: a bias that is none, or of no token of it.
absl::StatusOr<models::SamplingOptions> ResolveSampling(const SamplingFlags& flags, const TextModel& model);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_GENERATE_SAMPLING_FLAGS_H_
