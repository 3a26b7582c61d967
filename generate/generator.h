// Text from a model larger than memory: many sequences at once, each weight read once a pass for all of them.
//
//   ASSIGN_OR_RETURN(auto generator, Generator::Create(model, open_weights, options));
//   callbacks.next = ...;  callbacks.token = ...;  callbacks.finished = ...;
//   RETURN_IF_ERROR(generator->Run(callbacks));
//
// A pass takes the next token of each sequence that decodes, and pieces of the prompts of those that begin.
// Between passes, sequences that ended give their places to those that wait. The tokens of a sequence depend
// on its prompt, its seed and the options for sampling; not on the budget, on what is resident, on where keys
// and values live, on what is drafted, or on the others. That holds to the bit (generate/host_pass.h). So
// sequences with one prompt that are under way together compute it once, where keys and values are in host
// memory: the others are given copies.
//
// Memory: the budget bounds the arena and what passes compute in together, and so does the device's there.
// Not counted: code, stacks, what the callbacks hold, the tokens themselves; and what CUDA and its libraries
// take for themselves.
//
// Threads: one; `threads` of its own compute, and others of these may run meanwhile. Errors:
// kFailedPrecondition: the budget is too small; kUnimplemented: a mixture of experts on a device with memory
// of its own; as generate/weight_source.h and aio/engine.h.
#ifndef PENSTOCK_GENERATE_GENERATOR_H_
#define PENSTOCK_GENERATE_GENERATOR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/engine.h"
#include "generate/expert_cache.h"
#include "generate/memory_plan.h"
#include "generate/pass.h"
#include "generate/weight_source.h"
#include "models/data/text_sampler.h"
#include "models/families/family.h"
#include "zero/compute/device.h"

namespace penstock::generate {

// Opens the weights over an engine, for the matrices of a pass.
using OpenWeights =
    std::function<absl::StatusOr<std::unique_ptr<WeightSource>>(aio::Engine*, const WeightUses& uses)>;

struct GeneratorOptions {
  // Budget, batch, place of the cache, and what is known of the sequences: positions and prompt are limits.
  // The rates are measured.
  GenerationWish wish;
  // Computes; with memory of its own, wish.device has its budget, and no other Generator uses it meanwhile.
  std::shared_ptr<zero::Device> device = zero::HostDevice();
  std::shared_ptr<DeviceCompute> compute;  // where NeedsDeviceCompute(*device)
  int threads = 1;                         // that compute in host memory, the caller's included
  models::SamplingOptions sampling;
  std::vector<int64_t> ends;  // tokens that end a text
  std::string cache_directory = ".";
  std::function<void(const std::string&)> log;  // fallbacks of the I/O engine; one line each
};

struct GenerationRequest {
  int64_t id = 0;
  std::vector<int64_t> prompt;  // at least one, at most wish.prompt
  int64_t tokens = 1;           // to be made, at most; prompt and these at most wish.positions
  uint64_t seed = 0;
  std::optional<models::SamplingOptions> sampling = std::nullopt;  // instead of the generator's
  std::optional<int64_t> logprobs = std::nullopt;  // asked for: how many of the likeliest tokens too
};

enum class Finish : uint8_t { kEnd, kStop, kLength };  // a token that ends; the caller; as many as asked for
const char* FinishName(Finish finish);                 // "end", "stop", "length"

struct GenerationStats {
  int64_t passes = 0, prompt_tokens = 0, tokens = 0, finished = 0, active = 0;
  uint64_t weight_read_bytes = 0, cache_read_bytes = 0, cache_written_bytes = 0;
  double seconds = 0;            // in Run
  double wait_seconds = 0;       // of those, for the drive
  double copy_wait_seconds = 0;  // and for copies to the device
  int64_t h2d_bytes = 0, d2h_bytes = 0, peak_device_bytes = 0;
  double decode_seconds = 0;  // in passes without prompts, but for the first pass
  int64_t decode_tokens = 0, decode_passes = 0;
  int64_t drafted_tokens = 0, accepted_tokens = 0;  // guessed, and of those the right ones
  uint64_t decode_read_bytes = 0;
  ExpertStats experts;  // of a model with mixtures
  int64_t peak_tensor_bytes = 0, io_errors_retried = 0;
};

struct GenerationCallbacks {
  // The next sequence; nullopt: there is none now. Asked again before the next pass, if others are under way.
  std::function<absl::StatusOr<std::optional<GenerationRequest>>()> next;
  // Before `token`, and with it, of a request that asks for them.
  std::function<void(int64_t id, models::TokenLogprobs logprobs)> logprobs;
  // A token was made, which is not one of `ends`; true: the text is to end with it.
  std::function<bool(int64_t id, int64_t token)> token;
  std::function<absl::Status(int64_t id, Finish finish)> finished;
  std::function<void(const GenerationStats&)> progress;  // after each pass; may be empty
  std::function<bool()> cancelled;                       // asked before each pass; may be empty
};

// Makes of weights that are not coded what `penstock pack` would make of them, for a plan: bytes, and the
// seconds that their products take here.
absl::Status PlanAsPacked(const kernels::WeightCode& code, const GeneratorOptions& options,
                          GenerationSizes* sizes, GenerationWish* wish);

class Generator {
 public:
  // Opens, measures and plans; reads what stays in memory. kFailedPrecondition: the budget.
  static absl::StatusOr<std::unique_ptr<Generator>> Create(std::shared_ptr<const models::LanguageModel> model,
                                                           const OpenWeights& open, GeneratorOptions options);
  // Opens and measures without memory for the model: what PlanGeneration goes by. The rates go to
  // options->wish.
  static absl::StatusOr<GenerationSizes> Survey(const models::LanguageModel& model, const OpenWeights& open,
                                                GeneratorOptions* options);
  ~Generator();

  const GenerationPlan& plan() const;
  const GenerationWish& wish() const;  // with the rates measured
  std::string backend_name() const;
  // Until there is no next sequence and all are finished; it may be called again then. kCancelled:
  // callbacks.cancelled said so, and those under way are not finished.
  absl::Status Run(const GenerationCallbacks& callbacks);
  GenerationStats stats() const;

 private:
  class Impl;
  explicit Generator(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace penstock::generate

#endif  // PENSTOCK_GENERATE_GENERATOR_H_
