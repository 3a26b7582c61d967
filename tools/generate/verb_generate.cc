// `penstock generate`: text from a model larger than memory, for one prompt or a long list of them.
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/io_error.h"
#include "base/output_path.h"
#include "base/status_macros.h"
#include "base/whole_file.h"
#include "generate/clock.h"
#include "generate/generator.h"
#include "kernels/checksum.h"
#include "models/weights/weight_files.h"
#include "tools/base/cli.h"
#include "tools/base/flag_check.h"
#include "tools/base/progress.h"
#include "tools/base/size.h"
#include "tools/base/stop_signal.h"
#include "tools/base/verbs.h"
#include "tools/generate/generate_flags.h"
#include "tools/generate/generate_output.h"
#include "tools/generate/generate_prompts.h"
#include "tools/generate/generate_text.h"
#include "tools/generate/sampling_flags.h"
#include "tools/generate/text_model.h"

namespace penstock::tools {
namespace {

constexpr const char* kGenerateName = "penstock generate";
constexpr int64_t kUsualTokens = 128;

struct GenerateFlags {
  std::vector<std::string> dirs, prompt, stop;
  std::optional<std::string> prompts, out, report, tokenizer, kv_dir;
  GenerateMemoryFlags memory;
  std::string model;
  int64_t seed = 1;
  std::optional<int64_t> tokens, weights;
  SamplingFlags sampling;
  bool stream = false, json = false, overwrite = false, quiet = false, verbose = false;
};

absl::Status CheckFlags(const GenerateFlags& flags) {
  RETURN_IF_ERROR(CheckFlag<int64_t>("--tokens", flags.tokens.value_or(1), 1, int64_t{1} << 40));
  RETURN_IF_ERROR(CheckFlag<int64_t>("--seed", flags.seed, 0, int64_t{1} << 62));
  RETURN_IF_ERROR(CheckSampling(flags.sampling));
  if (flags.sampling.min_tokens.value_or(0) > flags.tokens.value_or(INT64_MAX)) {
    return WrongFlag(absl::StrCat("--min-tokens ", *flags.sampling.min_tokens, ": must be at most the ",
                                  *flags.tokens, " of --tokens"));
  }
  if (flags.prompt.empty() == !flags.prompts.has_value())
    return WrongFlag("either --prompt TEXT or --prompts FILE.jsonl is needed");
  if (flags.stream &&
      (flags.prompts.has_value() || flags.out.has_value() || flags.prompt.size() > 1 || flags.sampling.n > 1))
    return WrongFlag(
        "--stream writes one text as it comes: it goes with one --prompt and without --out and --n");
  if (flags.sampling.logprobs.has_value() && !flags.prompts.has_value() && !flags.out.has_value() &&
      !flags.json)
    return WrongFlag("--logprobs is written to JSON lines: it goes with --json, --out or --prompts");
  if (flags.json && (flags.stream || flags.out.has_value()))
    return WrongFlag("--json writes to stdout: it goes without --out and --stream");
  if (flags.overwrite && !flags.out.has_value()) return WrongFlag("--overwrite requires --out");
  RETURN_IF_ERROR(CheckWritable("--report", flags.report, /*replaced=*/true));
  if (flags.out.has_value()) RETURN_IF_ERROR(CheckIsNoModelFile("--out", *flags.out));
  std::vector<std::string> read;
  for (const auto* file : {&flags.prompts, &flags.tokenizer}) {
    if (file->has_value()) read.push_back(**file);
  }
  RETURN_IF_ERROR(CheckDistinctFiles({{"--report", flags.report}, {"--out", flags.out}}, read));
  for (const std::string& stop : flags.stop) {
    if (stop.empty()) return WrongFlag("--stop \"\": must have at least one character");
  }
  return absl::OkStatus();
}

// Beside what is written, or where the program runs.
std::string CacheDirectory(const GenerateFlags& flags) {
  if (flags.kv_dir.has_value()) return *flags.kv_dir;
  if (!flags.out.has_value()) return ".";
  return ParentOf(*flags.out);
}

// A run of the verb: what is asked for, what is done, what is under way.
class Generation {
 public:
  Generation(const GenerateFlags& flags, const OpenGenerateDevice& open_device, std::ostream& out,
             std::ostream& err)
      : flags_(flags),
        open_device_(open_device),
        out_(out),
        err_(err),
        terminal_(::isatty(STDERR_FILENO) == 1) {}

  absl::Status Run() {
    RETURN_IF_ERROR(CheckFlags(flags_));
    ASSIGN_OR_RETURN(model_, OpenTextModel(flags_.dirs, flags_.tokenizer, flags_.model, kGenerateName, err_));
    RETURN_IF_ERROR(CheckWeights());
    ASSIGN_OR_RETURN(sampling_, ResolveSampling(flags_.sampling, model_));
    tokens_ = flags_.tokens.value_or(model_.defaults.max_tokens.value_or(kUsualTokens));
    stops_ = flags_.stop.empty() ? model_.defaults.stop : flags_.stop;
    if (flags_.prompts.has_value()) {
      prompts_.emplace(&model_, *flags_.prompts);
    } else {
      prompts_.emplace(&model_, flags_.prompt);
    }
    threads_ = static_cast<int>(flags_.memory.threads.value_or(model_.threads));
    generate::GeneratorOptions options;
    RETURN_IF_ERROR(ResolveGenerateMemory(flags_.memory, threads_, open_device_, &options));
    options.sampling = sampling_;
    options.ends = model_.ends;
    options.cache_directory = CacheDirectory(flags_);
    options.log = [this](const std::string& line) {
      if (flags_.verbose) err_ << line << "\n" << std::flush;
    };
    if (flags_.out.has_value()) {
      ASSIGN_OR_RETURN(output_, GenerateOutput::Open(*flags_.out, flags_.overwrite));
      if (!model_.directory.empty()) {
        ASSIGN_OR_RETURN(const std::string main, models::MainWeightFile(model_.directory, model_.directory));
        ASSIGN_OR_RETURN(const models::WeightFiles files, models::WeightFilesOf(main, model_.directory));
        ASSIGN_OR_RETURN(weights_, models::SampleWeights(files));
      }
    }
    RETURN_IF_ERROR(Survey(&options.wish));
    if (left_ == 0) {
      Say(absl::StrCat(*flags_.out, ": all ", total_, " are there"));
      return absl::OkStatus();
    }
    if (flags_.report.has_value()) {
      RETURN_IF_ERROR(RemoveOldFile("--report", *flags_.report));
    }
    absl::Status status = Generate(std::move(options));
    if (flags_.report.has_value()) {
      absl::Status reported = WriteReport(status);
      if (status.ok()) return reported;
    }
    return status;
  }

 private:
  struct Active {
    Prompt prompt;
    int64_t sample = 0;
    std::string key;
    std::unique_ptr<GrowingText> text;
    std::vector<models::TokenLogprobs> logprobs;  // parallel to its tokens
  };

  void Say(const std::string& line) {
    if (!flags_.quiet) err_ << line << "\n" << std::flush;
  }

  absl::Status CheckWeights() const {
    const int64_t there = WeightBits(model_), asked = flags_.weights.value_or(there);
    if (asked != 16 && asked != 8 && asked != 4)
      return WrongFlag(absl::StrCat("--weights ", asked, ": must be 16, 8 or 4"));
    if (asked == there) return absl::OkStatus();
    const std::string& directory = flags_.dirs.front();
    if (there == 16) {
      return WrongFlag(absl::StrCat("--weights ", asked, ": ", directory, " is not packed; `penstock pack ",
                                    directory, " OUT --weights ", asked, "` makes a directory that is"));
    }
    return WrongFlag(absl::StrCat("--weights ", asked, ": ", directory, " is packed in ", there,
                                  " bit; give the directory that it was made of",
                                  asked == 16 ? "" : ", packed in the other way by `penstock pack`"));
  }

  int64_t TokensOf(const Prompt& prompt) const {
    const int64_t asked = prompt.max_tokens > 0 ? std::min(prompt.max_tokens, tokens_) : tokens_;
    return std::min(asked, model_.window - static_cast<int64_t>(prompt.tokens.size()));
  }

  // The text of a prompt's sample, among those of all.
  int64_t IndexOf(const Prompt& prompt, int64_t sample) const {
    return prompt.index * flags_.sampling.n + sample;
  }

  // Of all that a text depends on, and of what is written with it.
  std::string KeyOf(const Prompt& prompt, int64_t sample) const {
    const models::SamplingOptions& s = sampling_;
    nlohmann::json all = {{"model", model_.identity},     {"weights", weights_},
                          {"ends", model_.ends},          {"prompt", prompt.tokens},
                          {"tokens", TokensOf(prompt)},   {"stop", stops_},
                          {"temperature", s.temperature}, {"repetition_penalty", s.repetition_penalty}};
    if (flags_.memory.device != "cpu")
      all["device"] = flags_.memory.device;  // sums are rounded otherwise there
    if (s.temperature > 0)
      all.update({{"seed", flags_.seed + IndexOf(prompt, sample)}, {"top_k", s.top_k}, {"top_p", s.top_p}});
    if (s.temperature > 0 && s.min_p > 0) all["min_p"] = s.min_p;
    if (s.presence_penalty != 0) all["presence_penalty"] = s.presence_penalty;
    if (s.frequency_penalty != 0) all["frequency_penalty"] = s.frequency_penalty;
    if (s.min_tokens > 0) all["min_tokens"] = s.min_tokens;
    if (!s.logit_bias.empty()) all["logit_bias"] = s.logit_bias;
    if (flags_.sampling.logprobs.has_value()) all["logprobs"] = *flags_.sampling.logprobs;
    const std::string text = all.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    return absl::StrFormat("%016x", kernels::Checksum(text.data(), text.size()));
  }

  // Reads all prompts once: whether they are right, how many and how long they are, which are done.
  absl::Status Survey(generate::GenerationWish* wish) {
    total_ = 0;
    while (true) {
      ASSIGN_OR_RETURN(const std::optional<Prompt> prompt, prompts_->Next());
      if (!prompt.has_value()) break;
      total_ += flags_.sampling.n;
      const auto length = static_cast<int64_t>(prompt->tokens.size());
      if (length >= model_.window) {
        return WrongFlag(absl::StrCat("prompt ", prompt->index, " has ", length, " tokens: the model takes ",
                                      model_.window, ", prompt and text together"));
      }
      wish->prompt = std::max(wish->prompt, length);
      wish->positions = std::max(wish->positions, length + TokensOf(*prompt));
    }
    if (total_ == 0) return WrongFlag(absl::StrCat("--prompts ", *flags_.prompts, ": no prompt in it"));
    wish->sequences = total_;
    left_ = 0;
    RETURN_IF_ERROR(prompts_->Rewind());
    while (true) {
      ASSIGN_OR_RETURN(const std::optional<Prompt> prompt, prompts_->Next());
      if (!prompt.has_value()) break;
      for (int64_t sample = 0; sample < flags_.sampling.n; ++sample) {
        bool done = false;
        if (output_ != nullptr) {
          ASSIGN_OR_RETURN(done, output_->Has(IndexOf(*prompt, sample), KeyOf(*prompt, sample)));
        }
        if (!done) ++left_;
        tokens_left_ += done ? 0 : TokensOf(*prompt);
      }
    }
    if (left_ < total_ && left_ > 0)
      Say(absl::StrCat(*flags_.out, ": ", total_ - left_, " of ", total_, " are there; going on"));
    return prompts_->Rewind();
  }

  absl::Status Generate(generate::GeneratorOptions options) {
    ASSIGN_OR_RETURN(generator_,
                     generate::Generator::Create(model_.model, OpenWeightsOf(model_), std::move(options)));
    if (!flags_.quiet) err_ << GenerationPlanText(generator_->plan(), generator_->wish()) << std::flush;
    std::optional<NotedStopSignals> signals(std::in_place);
    generate::GenerationCallbacks callbacks;
    callbacks.next = [this] { return NextRequest(); };
    callbacks.logprobs = [this](int64_t id, models::TokenLogprobs logprobs) {
      active_.at(id).logprobs.push_back(std::move(logprobs));
    };
    callbacks.token = [this](int64_t id, int64_t token) { return TakeToken(id, token); };
    callbacks.finished = [this](int64_t id, generate::Finish finish) { return Finished(id, finish); };
    callbacks.progress = [this](const generate::GenerationStats& stats) { Show(stats); };
    callbacks.cancelled = [] { return StopSignal() != 0; };
    const absl::Status status = generator_->Run(callbacks);
    signals.reset();
    const generate::GenerationStats stats = generator_->stats();
    EndLine();
    if (absl::IsCancelled(status) && StopSignal() != 0) {
      Say(absl::StrCat("stopped by a signal: ", total_ - left_ + stats.finished, " of ", total_, " are done",
                       output_ != nullptr ? "; the same command goes on" : ""));
      return absl::OkStatus();
    }
    RETURN_IF_ERROR(status);
    Say(absl::StrFormat("%d texts, %d tokens in %s: %.2f tokens/s; read %s, %s", stats.finished, stats.tokens,
                        FormatDuration(stats.seconds),
                        static_cast<double>(stats.tokens) / std::max(stats.seconds, 1e-9),
                        FormatBytes(static_cast<int64_t>(stats.weight_read_bytes + stats.cache_read_bytes)),
                        FormatBandwidth(Rate(stats))));
    if (const generate::ExpertStats& experts = stats.experts; experts.used > 0) {
      Say(absl::StrFormat(
          "experts: %d used, %d of them in memory; %d of %d guesses were right; read %s, waited %s",
          experts.used, experts.hits, experts.right_guesses, experts.guesses,
          FormatBytes(static_cast<int64_t>(experts.read_bytes)),
          FormatDuration(experts.wait_seconds + experts.guess_wait_seconds)));
    }
    if (stats.drafted_tokens > 0) {
      Say(absl::StrFormat("%d of %d guessed tokens were right: %.2f tokens a pass of each text",
                          stats.accepted_tokens, stats.drafted_tokens,
                          static_cast<double>(stats.tokens) / static_cast<double>(std::max<int64_t>(
                                                                  stats.tokens - stats.accepted_tokens, 1))));
    }
    if (!out_) return StreamError("stdout: write");
    return absl::OkStatus();
  }

  static double Rate(const generate::GenerationStats& stats) {
    return static_cast<double>(stats.weight_read_bytes + stats.cache_read_bytes) /
           std::max(stats.seconds, 1e-9);
  }

  absl::StatusOr<std::optional<generate::GenerationRequest>> NextRequest() {
    while (true) {
      if (sample_ == flags_.sampling.n) {
        ASSIGN_OR_RETURN(prompt_, prompts_->Next());
        sample_ = 0;
      }
      if (!prompt_.has_value()) return std::nullopt;
      const int64_t sample = sample_++, index = IndexOf(*prompt_, sample);
      std::string key = KeyOf(*prompt_, sample);
      if (output_ != nullptr) {
        ASSIGN_OR_RETURN(const bool done, output_->Has(index, key));
        if (done) continue;
      }
      active_.emplace(index, Active{.prompt = *prompt_,
                                    .sample = sample,
                                    .key = std::move(key),
                                    .text = std::make_unique<GrowingText>(&model_, &stops_),
                                    .logprobs = {}});
      return generate::GenerationRequest{.id = index,
                                         .prompt = prompt_->tokens,
                                         .tokens = TokensOf(*prompt_),
                                         .seed = static_cast<uint64_t>(flags_.seed + index),
                                         .logprobs = flags_.sampling.logprobs};
    }
  }

  nlohmann::ordered_json LogprobsJson(const Active& active) const {
    const auto json_of = [this](int64_t token, double logprob) {
      return nlohmann::ordered_json{{"token", token}, {"text", model_.BytesOf(token)}, {"logprob", logprob}};
    };
    nlohmann::ordered_json all = nlohmann::ordered_json::array();
    for (size_t i = 0; i < active.logprobs.size(); ++i) {
      nlohmann::ordered_json each = json_of(active.text->tokens()[i], active.logprobs[i].logprob);
      each["top"] = nlohmann::ordered_json::array();
      for (const auto& [token, logprob] : active.logprobs[i].top)
        each["top"].push_back(json_of(token, logprob));
      all.push_back(std::move(each));
    }
    return all;
  }

  bool TakeToken(int64_t id, int64_t token) {
    GrowingText& text = *active_.at(id).text;
    const bool stops = text.Push(token);
    if (flags_.stream) out_ << text.TakeCertain() << std::flush;
    return stops;
  }

  absl::Status Finished(int64_t id, generate::Finish finish) {
    const auto at = active_.find(id);
    Active& active = at->second;
    active.text->Finish();
    tokens_left_ -= TokensOf(active.prompt);
    nlohmann::ordered_json line = {{"index", id}};
    if (!active.prompt.id.is_null()) line["id"] = active.prompt.id;
    if (flags_.sampling.n > 1) line["sample"] = active.sample;
    line["text"] = active.text->text();
    line["tokens"] = active.text->tokens();
    line["prompt_tokens"] = active.prompt.tokens.size();
    line["finish"] = generate::FinishName(finish);
    if (flags_.sampling.logprobs.has_value()) line["logprobs"] = LogprobsJson(active);
    line["key"] = active.key;
    if (output_ != nullptr) {
      RETURN_IF_ERROR(output_->Append(line));
    } else if (flags_.prompts.has_value() || flags_.json) {
      out_ << line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << "\n"
           << std::flush;
    } else if (flags_.stream) {
      out_ << active.text->TakeCertain() << "\n" << std::flush;
    } else {
      texts_[id] = active.text->text();
      // In the order of the prompts.
      for (auto next = texts_.find(shown_); next != texts_.end(); next = texts_.find(++shown_))
        out_ << next->second << "\n" << std::flush;
    }
    active_.erase(at);
    if (!out_) return StreamError("stdout: write");
    return absl::OkStatus();
  }

  void Show(const generate::GenerationStats& stats) {
    const double now = generate::Now();
    if (flags_.quiet || flags_.stream || now - shown_at_ < (terminal_ ? 0.1 : 5.0)) return;
    shown_at_ = now;
    const double rate = static_cast<double>(stats.tokens) / std::max(stats.seconds, 1e-9);
    // At most: texts may end before their length.
    int64_t left = tokens_left_;
    for (const auto& [id, active] : active_) left -= static_cast<int64_t>(active.text->tokens().size());
    const std::string line = absl::StrFormat(
        "pass %d  %d of %d done, %d under way  %.2f tok/s  read %s  left %s at most", stats.passes,
        total_ - left_ + stats.finished, total_, stats.active, rate, FormatBandwidth(Rate(stats)),
        FormatDuration(static_cast<double>(left) / std::max(rate, 1e-9)));
    std::fprintf(stderr, terminal_ ? "\r\x1b[K%s" : "%s\n", line.c_str());
    std::fflush(stderr);
    line_open_ = terminal_;
  }

  void EndLine() {
    if (line_open_) std::fputc('\n', stderr);
    line_open_ = false;
  }

  absl::Status WriteReport(const absl::Status& status) const {
    nlohmann::ordered_json report = {{"version", 1},
                                     {"status", status.ok() ? "ok" : "failed"},
                                     {"error", status.ok() ? "" : MessageOf(status)},
                                     {"params", model_.model->Layout().parameters()},
                                     {"prompts", total_},
                                     {"prompts_done_before", total_ - left_},
                                     {"threads", threads_},
                                     {"weights", WeightBits(model_)},
                                     {"device", flags_.memory.device},
                                     {"stopped_by", nullptr}};
    if (StopSignal() != 0) report["stopped_by"] = StopSignalName(StopSignal());
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    report["peak_rss_bytes"] = int64_t{1024} * usage.ru_maxrss;
    if (generator_ != nullptr) AddRun(&report);
    return WriteWholeFile("--report", *flags_.report, report.dump(2) + "\n");
  }

  void AddRun(nlohmann::ordered_json* report) const {
    report->update(GenerationPlanJson(generator_->plan(), generator_->wish()));
    report->update({{"io_backend", generator_->backend_name()}});
    AddGenerationRun(generator_->stats(), report);
  }

  const GenerateFlags& flags_;
  const OpenGenerateDevice& open_device_;
  std::ostream &out_, &err_;
  const bool terminal_;
  TextModel model_;
  models::SamplingOptions sampling_;
  int64_t tokens_ = 0;              // of each text, at most
  std::vector<std::string> stops_;  // that end one
  int threads_ = 1;
  std::optional<Prompts> prompts_;
  std::optional<Prompt> prompt_;        // whose samples are begun
  int64_t sample_ = flags_.sampling.n;  // the next of them
  std::unique_ptr<GenerateOutput> output_;
  uint64_t weights_ = 0;  // of a directory's, for the keys of the output
  std::unique_ptr<generate::Generator> generator_;
  int64_t total_ = 0, left_ = 0;  // prompts; those not done when this began
  int64_t tokens_left_ = 0;       // of prompts that are not finished, at most
  std::map<int64_t, Active> active_;
  std::map<int64_t, std::string> texts_;  // of --prompt, finished
  int64_t shown_ = 0;                     // of texts_, on stdout
  double shown_at_ = 0;
  bool line_open_ = false;
};

}  // namespace

int RunGenerateWith(const OpenGenerateDevice& open_device, int argc, const char* const* argv,
                    std::ostream& out, std::ostream& err) {
  CLI::App app(
      "Generates text with a model larger than memory; a pass reads each weight from the drive once for all "
      "texts",
      kGenerateName);
  GenerateFlags flags;
  app.add_option("DIR", flags.dirs,
                 "Hugging Face directory, packed or not, state directory or checkpoint; all directories of a "
                 "striped run");
  app.add_option("--prompt", flags.prompt, "Prompt; repeat the flag for several prompts")
      ->take_all()
      ->allow_extra_args(false);
  app.add_option("--prompts", flags.prompts,
                 "JSONL: {\"prompt\": ...} or {\"tokens\": [...]}, with an \"id\"");
  app.add_option("--out", flags.out,
                 "JSONL file for finished texts; prompts that it already answers are skipped");
  app.add_flag("--overwrite", flags.overwrite, "Replace --out instead of continuing it");
  app.add_option("--tokens,--max-tokens", flags.tokens,
                 "Maximum number of new tokens of each text [the model's, else 128]");
  app.add_option("--stop", flags.stop,
                 "Stop string; the text ends before it. Repeat the flag for several [the model's]")
      ->take_all()
      ->allow_extra_args(false);
  DeclareGenerateMemory(app, flags.memory);
  app.add_option("--weights", flags.weights,
                 "Bits per weight: 16 (unpacked), 8 or 4 (packed); must match DIR [as in DIR]");
  app.add_option("--kv-dir", flags.kv_dir,
                 "Directory for the on-disk KV cache [directory of --out, else the current one]");
  DeclareSampling(app, flags.sampling);
  app.add_option("--seed", flags.seed, "Sampling seed; text i of all prompts' uses seed + i [1]");
  app.add_option("--tokenizer", flags.tokenizer, "A tokenizer.json or its directory [the model's own]");
  DeclareFrozenWeights(app, flags.model);
  app.add_option("--report", flags.report, "Write a JSON report of the run: bytes, seconds, tokens/s");
  app.add_flag("--json", flags.json, "Print texts as JSON lines, in the format of --out");
  app.add_flag("--stream", flags.stream, "Print the text while it is generated");
  app.add_flag("--quiet", flags.quiet, "Print neither progress nor plan");
  app.add_flag("--verbose", flags.verbose,
               "Print on stderr which I/O features are missing and what replaces them");
  if (const auto code = ParseFlags(app, argc, argv, out, err)) return *code;
  const absl::Status status = Generation(flags, open_device, out, err).Run();
  return status.ok() ? kExitOk : Fail(kGenerateName, status, err);
}

}  // namespace penstock::tools
