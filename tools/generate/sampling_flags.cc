#include "tools/generate/sampling_flags.h"

#include <CLI/CLI.hpp>
#include <string_view>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/status_macros.h"
#include "tools/base/flag_check.h"

namespace penstock::tools {
namespace {

template <typename T>
absl::Status CheckBound(std::string_view name, std::optional<T> value) {
  if (!value.has_value()) return absl::OkStatus();
  const models::SamplingBound& bound = models::SamplingBoundOf(name);
  if (bound.holds(static_cast<double>(*value))) return absl::OkStatus();
  const std::string flag = absl::StrReplaceAll(std::string(name), {{"_", "-"}});
  return WrongFlag(absl::StrCat("--", flag, " ", *value, ": ", bound.words(),
                                name == "temperature" ? "; 0 takes the likeliest token" : ""));
}

}  // namespace

void DeclareSampling(CLI::App& app, SamplingFlags& flags) {
  app.add_option("--temperature", flags.temperature,
                 "Softmax temperature; 0 is greedy decoding [the model's, else 0]");
  app.add_option("--top-k", flags.top_k,
                 "Sample among the k most likely tokens; 0 disables [the model's, else 0]");
  app.add_option("--top-p", flags.top_p,
                 "Top-p (nucleus) sampling threshold; 1 disables [the model's, else 1]");
  app.add_option("--min-p", flags.min_p,
                 "Least probability, as a part of the most likely token's; 0 disables [the model's, else 0]");
  app.add_option("--repetition-penalty", flags.repetition_penalty,
                 "Repetition penalty over prompt and text; 1 disables [the model's, else 1]");
  app.add_option("--presence-penalty", flags.presence_penalty,
                 "Subtracted from the logits of tokens that the text has, -2 to 2 [0]");
  app.add_option("--frequency-penalty", flags.frequency_penalty,
                 "Subtracted from a token's logit for each time that the text has it, -2 to 2 [0]");
  app.add_option("--logit-bias", flags.logit_bias,
                 "TOKEN=X adds X, -100 to 100, to the logit of a token id. Repeat the flag for several")
      ->take_all()
      ->allow_extra_args(false);
  app.add_option("--min-tokens", flags.min_tokens,
                 "Number of new tokens before which no end token is chosen [the model's, else 0]");
  app.add_option("--logprobs", flags.logprobs,
                 "Log-probabilities of the tokens and of this many of the most likely ones, in JSON lines");
  app.add_option("--n", flags.n, "Texts for each prompt [1]");
}

absl::Status CheckSampling(const SamplingFlags& flags) {
  RETURN_IF_ERROR(CheckBound("temperature", flags.temperature));
  RETURN_IF_ERROR(CheckBound("top_k", flags.top_k));
  RETURN_IF_ERROR(CheckBound("top_p", flags.top_p));
  RETURN_IF_ERROR(CheckBound("min_p", flags.min_p));
  RETURN_IF_ERROR(CheckBound("repetition_penalty", flags.repetition_penalty));
  RETURN_IF_ERROR(CheckBound<double>("presence_penalty", flags.presence_penalty));
  RETURN_IF_ERROR(CheckBound<double>("frequency_penalty", flags.frequency_penalty));
  RETURN_IF_ERROR(CheckBound("min_tokens", flags.min_tokens));
  RETURN_IF_ERROR(CheckBound("logprobs", flags.logprobs));
  return CheckBound<int64_t>("n", flags.n);
}

absl::StatusOr<models::SamplingOptions> ResolveSampling(const SamplingFlags& flags, const TextModel& model) {
  const GenerationDefaults& defaults = model.defaults;
  models::SamplingOptions made;
  const auto chosen = [&](std::string_view name, std::optional<double> flag, double otherwise) {
    return flag.has_value() ? *flag : defaults.Of(name).value_or(otherwise);
  };
  made.temperature = chosen("temperature", flags.temperature, made.temperature);
  made.top_k = static_cast<int64_t>(chosen("top_k", flags.top_k, 0));
  made.top_p = chosen("top_p", flags.top_p, made.top_p);
  made.min_p = chosen("min_p", flags.min_p, made.min_p);
  made.repetition_penalty = chosen("repetition_penalty", flags.repetition_penalty, made.repetition_penalty);
  made.min_tokens = static_cast<int64_t>(chosen("min_tokens", flags.min_tokens, 0));
  made.presence_penalty = flags.presence_penalty;
  made.frequency_penalty = flags.frequency_penalty;
  for (const std::string& given : flags.logit_bias) {
    const auto wrong = [&](const std::string& why) {
      return WrongFlag(absl::StrCat("--logit-bias ", given, ": ", why));
    };
    const size_t equals = given.find('=');
    int64_t token = 0;
    double bias = 0;
    if (equals == std::string::npos || !absl::SimpleAtoi(given.substr(0, equals), &token) ||
        !absl::SimpleAtod(given.substr(equals + 1), &bias)) {
      return wrong("must be a token id and a number, as 15043=-5");
    }
    if (const models::SamplingBound& bound = models::SamplingBoundOf("logit_bias"); !bound.holds(bias))
      return wrong(absl::StrCat("the bias ", bound.words()));
    if (const absl::Status there = model.CheckTokens({token}); !there.ok())
      return wrong(std::string(there.message()));
    made.logit_bias[token] = bias;
  }
  return made;
}

}  // namespace penstock::tools
