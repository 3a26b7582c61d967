// `penstock sample`: text from a state directory or checkpoint. It is `penstock generate` with other
// defaults, where a text fits into the sequences of training; one that goes on beyond them, and one of a
// model with adapters, are computed anew for each token, with what fits into a window.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/io_error.h"
#include "base/status_macros.h"
#include "generate/generator.h"
#include "models/data/text_sampler.h"
#include "models/families/causal_attention.h"
#include "models/families/family.h"
#include "models/families/stages.h"
#include "run/record/run_record.h"
#include "tools/base/cli.h"
#include "tools/base/flag_check.h"
#include "tools/base/size.h"
#include "tools/base/verbs.h"
#include "tools/generate/generate_flags.h"
#include "tools/generate/text_model.h"
#include "tools/penstock/lora_base.h"
#include "tools/penstock/train_settings.h"
#include "tools/state/state_reader.h"
#include "zero/compute/libtorch/create_engine.h"
#include "zero/compute/libtorch/threads.h"
#include "zero/engine/engine.h"
#include "zero/memory/thread_times.h"

namespace penstock::tools {
namespace {

constexpr const char* kSampleName = "penstock sample";

struct SampleFlags {
  std::vector<std::string> dirs;
  std::string prompt = "\n";
  int64_t tokens = 200, top_k = 0, seed = 1, samples = 1;
  double temperature = 0.8;
  std::optional<int64_t> threads;
  std::optional<std::string> host_memory, tokenizer;
  std::string model;
  bool verbose = false;
};

absl::Status CheckNumbers(const SampleFlags& flags) {
  for (const absl::Status& status :
       {CheckFlag<int64_t>("--tokens", flags.tokens, 1, int64_t{1} << 40),
        CheckFlag<int64_t>("--top-k", flags.top_k, 0, int64_t{1} << 32),
        CheckFlag<int64_t>("--seed", flags.seed, 0, int64_t{1} << 62),
        CheckFlag<int64_t>("--samples", flags.samples, 1, int64_t{1} << 32),
        CheckFlag<int64_t>("--threads", flags.threads.value_or(1), 1, run::kMostThreads)}) {
    RETURN_IF_ERROR(status);
  }
  if (!(flags.temperature >= 0 && flags.temperature <= 1e6)) {
    return absl::InvalidArgumentError(absl::StrCat("--temperature ", flags.temperature,
                                                   ": must be between 0 (the likeliest token) and 1e6"));
  }
  return absl::OkStatus();
}

// Of a model with its own vocabulary: numbers with blanks between; none is token 0.
absl::StatusOr<std::vector<int64_t>> TokenNumbers(const std::string& prompt, int64_t vocabulary) {
  std::vector<int64_t> tokens;
  std::istringstream words(prompt);
  for (std::string word; words >> word;) {
    int64_t token = -1;
    if (!absl::SimpleAtoi(word, &token) || token < 0 || token >= vocabulary) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--prompt \"", word, "\": this model has its own vocabulary: give token numbers from 0 to ",
          vocabulary - 1));
    }
    tokens.push_back(token);
  }
  if (tokens.empty()) tokens.push_back(0);
  return tokens;
}

absl::StatusOr<std::vector<int64_t>> PromptTokens(const SampleFlags& flags, const TextModel& text) {
  const int64_t vocabulary = text.model->vocabulary();
  if (!text.bytes && text.tokenizer == nullptr) return TokenNumbers(flags.prompt, vocabulary);
  ASSIGN_OR_RETURN(std::vector<int64_t> tokens, text.Encode(flags.prompt));
  if (std::any_of(tokens.begin(), tokens.end(), [&](int64_t id) { return id >= vocabulary; }))
    return absl::InvalidArgumentError("--prompt: the tokenizer is of another model: it has more tokens");
  if (tokens.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--prompt \"\": must have at least one ", text.bytes ? "byte" : "token"));
  }
  return tokens;
}

absl::StatusOr<int64_t> Budget(const SampleFlags& flags) {
  if (!flags.host_memory.has_value()) return DefaultHostMemory(1, zero::DefaultIntraOpThreads());
  const absl::StatusOr<int64_t> bytes = ParseSize(*flags.host_memory);
  if (bytes.ok() && *bytes > 0) return *bytes;
  return absl::InvalidArgumentError(
      absl::StrCat("--host-memory ", *flags.host_memory, ": must be a size above 0, as 512MiB or 4GiB"));
}

// Of the lengths of text up to `longest`, the one that takes most memory: attention goes by blocks in long
// texts, in less than a short one can take in one piece.
int64_t LargestLength(const zero::Model& model, zero::EngineOptions options, int64_t longest) {
  if (longest <= models::kWholeLength) return longest;
  options.memory.host_memory_budget_bytes = 0;
  options.hooks.log = nullptr;
  const auto least = [&](int64_t length) -> int64_t {
    options.example = ExampleBatch(1, length);
    const absl::StatusOr<zero::EnginePlan> plan = zero::PlanEngine(model, options);
    return plan.ok() ? plan->plan.least_host_memory_bytes : 0;  // Create says why there is none
  };
  return least(models::kWholeLength) > least(longest) ? models::kWholeLength : longest;
}

// What a text is asked to be.
struct Asked {
  const SampleFlags& flags;
  const TextModel& source;
  std::vector<int64_t> prompt;
  int64_t budget = 0;
  std::function<void(const std::string&)> log;
};

std::string TextOf(const std::vector<int64_t>& tokens, TokenText* text) {
  std::string all;
  for (const int64_t token : tokens) all += text->Push(token);
  return all;
}

// All samples beside each other; written one after the other, the first of those under way as it comes.
absl::Status Generate(const Asked& asked, std::ostream& out) {
  const SampleFlags& flags = asked.flags;
  generate::GeneratorOptions options;
  options.wish.budget_bytes = static_cast<uint64_t>(asked.budget);
  options.wish.sequences = flags.samples;
  options.wish.prompt = static_cast<int64_t>(asked.prompt.size());
  options.wish.positions = options.wish.prompt + flags.tokens;
  options.wish.cache = generate::CachePlace::kHost;
  options.sampling = {.temperature = flags.temperature, .top_k = flags.top_k};
  options.ends = asked.source.ends;
  options.log = asked.log;
  ASSIGN_OR_RETURN(
      const std::unique_ptr<generate::Generator> generator,
      generate::Generator::Create(asked.source.model, OpenWeightsOf(asked.source), std::move(options)));
  struct Text {
    explicit Text(const TextModel& model) : decoder(model) {}
    TokenText decoder;
    std::string unwritten;
    bool finished = false;
  };
  std::map<int64_t, Text> under_way;  // those not written whole
  const auto write = [&] {
    while (!under_way.empty()) {
      Text& text = under_way.begin()->second;
      out << std::exchange(text.unwritten, {}) << std::flush;
      if (!text.finished) return;
      under_way.erase(under_way.begin());
    }
  };
  int64_t begun = 0;
  generate::GenerationCallbacks callbacks;
  callbacks.next = [&]() -> absl::StatusOr<std::optional<generate::GenerationRequest>> {
    if (begun == flags.samples) return std::nullopt;
    Text& text = under_way.try_emplace(begun, asked.source).first->second;
    text.unwritten = TextOf(asked.prompt, &text.decoder);
    const int64_t id = begun++;
    return generate::GenerationRequest{id, asked.prompt, flags.tokens,
                                       static_cast<uint64_t>(flags.seed + id)};
  };
  callbacks.token = [&](int64_t id, int64_t token) {
    Text& text = under_way.at(id);
    text.unwritten += text.decoder.Push(token);
    write();
    return false;
  };
  callbacks.finished = [&](int64_t id, generate::Finish) {
    Text& text = under_way.at(id);
    text.unwritten += text.decoder.Finish() + "\n";
    text.finished = true;
    write();
    return out ? absl::OkStatus() : StreamError("stdout: write");
  };
  return generator->Run(callbacks);
}

absl::Status ComputeAnew(const Asked& asked, std::ostream& out) {
  const SampleFlags& flags = asked.flags;
  const TextModel& source = asked.source;
  const auto prompted = static_cast<int64_t>(asked.prompt.size());
  const int64_t longest = std::min(source.window, prompted + flags.tokens);
  zero::EngineOptions options;
  options.trains = false;
  options.dtype = source.dtype;
  options.storage.state_dirs = source.state_dirs;
  if (!source.base.is_null()) {
    ASSIGN_OR_RETURN(const LoraBase base, ReopenBase(source.base, flags.model, *source.model, source.dtype,
                                                     BaseCheck::kTimes, /*quiet=*/false));
    options.frozen = base.weights;
  }
  options.memory.host_memory_budget_bytes = asked.budget;
  options.intra_op_threads = static_cast<int>(flags.threads.value_or(source.threads));
  options.hooks.log = asked.log;
  const zero::Model model = models::MakeModel(*source.model, models::Head::kLastLogits);
  options.example = ExampleBatch(1, LargestLength(model, options, longest));
  ASSIGN_OR_RETURN(std::unique_ptr<zero::Engine> engine, zero::CreateEngine(model, options));

  for (int64_t sample = 0; sample < flags.samples; ++sample) {
    models::TextSampler sampler(flags.temperature, flags.top_k, static_cast<uint64_t>(flags.seed + sample));
    std::vector<int64_t> tokens = asked.prompt;
    TokenText text(source);
    out << TextOf(tokens, &text);
    for (int64_t i = 0; i < flags.tokens; ++i) {
      const auto length = std::min(static_cast<int64_t>(tokens.size()), source.window);
      zero::TensorBatch batch;
      batch.inputs = torch::empty({1, length}, torch::kInt64);
      std::copy(tokens.end() - length, tokens.end(), batch.inputs.data_ptr<int64_t>());
      batch.targets = batch.inputs;
      ASSIGN_OR_RETURN(const std::vector<torch::Tensor> outputs, zero::InferTensors(*engine, {batch}));
      const torch::Tensor logits = outputs.front().contiguous();
      const int64_t token = sampler.Next({logits.data_ptr<float>(), static_cast<size_t>(logits.numel())});
      if (std::find(source.ends.begin(), source.ends.end(), token) != source.ends.end()) break;
      tokens.push_back(token);
      out << text.Push(token) << std::flush;
    }
    out << text.Finish() << "\n" << std::flush;
    if (!out) return StreamError("stdout: write");
  }
  return absl::OkStatus();
}

absl::Status Sample(const SampleFlags& flags, std::ostream& out, std::ostream& err) {
  RETURN_IF_ERROR(CheckNumbers(flags));
  ASSIGN_OR_RETURN(const TextModel source, OpenTrainedText(flags.dirs, flags.tokenizer, kSampleName, err));
  if (source.base.is_null() && !flags.model.empty()) return NoBase(flags.model);
  Asked asked = {.flags = flags, .source = source, .prompt = {}, .budget = 0, .log = nullptr};
  ASSIGN_OR_RETURN(asked.prompt, PromptTokens(flags, source));
  ASSIGN_OR_RETURN(asked.budget, Budget(flags));
  asked.log = [&](const std::string& line) {
    if (flags.verbose) err << line << "\n" << std::flush;
  };
  zero::SetIntraOpThreads(static_cast<int>(flags.threads.value_or(source.threads)));
  const bool fits = static_cast<int64_t>(asked.prompt.size()) + flags.tokens <= source.window;
  return fits && source.model->lora() == nullptr ? Generate(asked, out) : ComputeAnew(asked, out);
}

}  // namespace

int RunSample(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  CLI::App app("Generates text from a state directory or checkpoint, streaming its blocks", kSampleName);
  SampleFlags flags;
  std::vector<std::string> flagged;
  app.add_option("DIR", flags.dirs, "State directory or checkpoint; all directories of a striped run");
  app.add_option("--state-dir", flagged, "The same, as a flag");
  app.add_option("--prompt", flags.prompt,
                 "What the text begins with; token numbers where the tokens are no bytes [a line break]");
  app.add_option("--tokenizer", flags.tokenizer,
                 "tokenizer.json or its directory [the run's, if it still exists]");
  app.add_option(
      "--model", flags.model,
      "Directory of the frozen weights of a run with --lora-rank, if it has moved [where the run last "
      "read them]");
  app.add_option("--tokens", flags.tokens, "Tokens to generate [200]");
  app.add_option("--temperature", flags.temperature,
                 "Sampling temperature; 0 takes the likeliest token each time [0.8]");
  app.add_option("--top-k", flags.top_k, "Choose among this many of the likeliest tokens, 0 for all [0]");
  app.add_option("--seed", flags.seed, "Sampling seed; text i of --samples uses seed + i [1]");
  app.add_option("--samples", flags.samples, "Number of texts to generate [1]");
  app.add_option("--threads", flags.threads, "Intra-op threads [one per core]");
  app.add_option("--host-memory", flags.host_memory,
                 "Hard host memory budget, such as 512MiB or 4GiB [half of the free memory]");
  app.add_flag("--verbose", flags.verbose, "Say on stderr how memory and drive are used, and fallbacks");
  if (const auto code = ParseFlags(app, argc, argv, out, err)) return *code;
  flags.dirs.insert(flags.dirs.end(), flagged.begin(), flagged.end());
  const absl::Status status = Sample(flags, out, err);
  return status.ok() ? kExitOk : Fail(kSampleName, status, err);
}

}  // namespace penstock::tools
