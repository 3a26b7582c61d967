// The flags that say how generation divides its memory, and the text of the plan that comes of them: what
// `generate` and `plan --generate` share.
#ifndef PENSTOCK_TOOLS_GENERATE_GENERATE_FLAGS_H_
#define PENSTOCK_TOOLS_GENERATE_GENERATE_FLAGS_H_

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "generate/generator.h"
#include "tools/generate/text_model.h"

namespace CLI {
class App;
}  // namespace CLI

namespace penstock::tools {

struct GenerateMemoryFlags {
  std::optional<std::string> host_memory, device_memory;
  std::string device = "cpu";
  std::string batch = "auto", kv = "auto";
  std::optional<int64_t> threads;
  int64_t prompt_lookup = 0;
};

void DeclareGenerateMemory(CLI::App& app, GenerateMemoryFlags& flags);

// --model: where OpenTextModel finds what a run with adapters reads in place.
void DeclareFrozenWeights(CLI::App& app, std::string& directory);

// Opens what --device names beside the processor, for options of `threads` threads: sets device, compute and
// wish.device. A program without LibTorch has none. kInvalidArgument names the flag.
using OpenGenerateDevice =
    std::function<absl::Status(const GenerateMemoryFlags& flags, generate::GeneratorOptions* options)>;

// Device and threads, and of the wish batch, cache, drafted and budgets. `threads`: that will compute.
// kInvalidArgument names the flag.
absl::Status ResolveGenerateMemory(const GenerateMemoryFlags& flags, int threads,
                                   const OpenGenerateDevice& open_device,
                                   generate::GeneratorOptions* options);

// `penstock generate` of a program that has such devices, or none.
int RunGenerateWith(const OpenGenerateDevice& open_device, int argc, const char* const* argv,
                    std::ostream& out, std::ostream& err);

// Opens the weights of `model`, which must outlive what is returned.
generate::OpenWeights OpenWeightsOf(const TextModel& model);

// Bits of a weight as it is stored: 16 (of what is not coded), 8 or 4.
int64_t WeightBits(const TextModel& model);

// Some lines for people, and the keys that reports and --json have of a plan.
std::string GenerationPlanText(const generate::GenerationPlan& plan, const generate::GenerationWish& wish);
nlohmann::ordered_json GenerationPlanJson(const generate::GenerationPlan& plan,
                                          const generate::GenerationWish& wish);
// Adds what a run has done so far: counts, bytes and seconds; of experts, to what the plan says of them.
void AddGenerationRun(const generate::GenerationStats& stats, nlohmann::ordered_json* json);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_GENERATE_GENERATE_FLAGS_H_
