// `penstock sample`: text from a state directory or checkpoint. It is `penstock generate` with other
// defaults.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/io_error.h"
#include "base/status_macros.h"
#include "generate/generator.h"
#include "run/record/run_record.h"
#include "tools/base/cli.h"
#include "tools/base/flag_check.h"
#include "tools/base/size.h"
#include "tools/base/verbs.h"
#include "tools/generate/generate_flags.h"
#include "tools/generate/text_model.h"
#include "tools/state/state_reader.h"
#include "zero/memory/thread_times.h"

namespace penstock::tools {
namespace {

constexpr const char* kSampleName = "penstock sample";
constexpr int64_t kSampledTokens = 200;

struct SampleFlags {
  std::vector<std::string> dirs;
  std::string prompt = "\n";
  int64_t top_k = 0, seed = 1, samples = 1;
  std::optional<int64_t> tokens;
  double temperature = 0.8;
  std::optional<int64_t> threads;
  std::optional<std::string> host_memory, tokenizer;
  std::string model;
  bool verbose = false;
};

absl::Status CheckNumbers(const SampleFlags& flags) {
  for (const absl::Status& status :
       {CheckFlag<int64_t>("--tokens", flags.tokens.value_or(kSampledTokens), 1, int64_t{1} << 40),
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

// Of a model with a vocabulary of its own, numbers with blanks between; none is token 0.
absl::StatusOr<std::vector<int64_t>> PromptTokens(const SampleFlags& flags, const TextModel& text) {
  const bool numbers = !text.bytes && text.tokenizer == nullptr;
  const bool blank = flags.prompt.find_first_not_of(" \t\n") == std::string::npos;
  absl::StatusOr<std::vector<int64_t>> tokens = text.TokensOf(numbers && blank ? "0" : flags.prompt);
  if (!tokens.ok())
    return absl::InvalidArgumentError(absl::StrCat("--prompt: ", std::string(tokens.status().message())));
  if (std::ssize(*tokens) >= text.window) {
    return absl::InvalidArgumentError(absl::StrCat("--prompt: it has ", tokens->size(),
                                                   " tokens: the run was trained on sequences of ",
                                                   text.window, ", prompt and text together"));
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

std::string TextOf(const std::vector<int64_t>& tokens, TokenText* text) {
  std::string all;
  for (const int64_t token : tokens) all += text->Push(token);
  return all;
}

// All samples beside each other; written one after the other, the first of those under way as it comes.
absl::Status Sample(const SampleFlags& flags, std::ostream& out, std::ostream& err) {
  RETURN_IF_ERROR(CheckNumbers(flags));
  ASSIGN_OR_RETURN(const TextModel source,
                   OpenTrainedText(flags.dirs, flags.tokenizer, flags.model, kSampleName, err));
  ASSIGN_OR_RETURN(const std::vector<int64_t> prompt, PromptTokens(flags, source));
  ASSIGN_OR_RETURN(const int64_t budget, Budget(flags));
  const auto prompted = static_cast<int64_t>(prompt.size());
  const int64_t tokens = std::min(flags.tokens.value_or(kSampledTokens), source.window - prompted);
  if (flags.tokens.value_or(tokens) > tokens)
    err << kSampleName << ": "
        << "a text ends after " << tokens << " tokens: the run was trained on sequences of " << source.window
        << "\n"
        << std::flush;
  generate::GeneratorOptions options;
  options.wish.budget_bytes = static_cast<uint64_t>(budget);
  options.wish.sequences = flags.samples;
  options.wish.prompt = prompted;
  options.wish.positions = prompted + tokens;
  options.wish.cache = generate::CachePlace::kHost;
  options.threads = static_cast<int>(flags.threads.value_or(source.threads));
  options.sampling = {.temperature = flags.temperature, .top_k = flags.top_k};
  options.ends = source.ends;
  options.log = [&](const std::string& line) {
    if (flags.verbose) err << line << "\n" << std::flush;
  };
  ASSIGN_OR_RETURN(const std::unique_ptr<generate::Generator> generator,
                   generate::Generator::Create(source.model, OpenWeightsOf(source), std::move(options)));
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
    Text& text = under_way.try_emplace(begun, source).first->second;
    text.unwritten = TextOf(prompt, &text.decoder);
    const int64_t id = begun++;
    return generate::GenerationRequest{id, prompt, tokens, static_cast<uint64_t>(flags.seed + id)};
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
  DeclareFrozenWeights(app, flags.model);
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
