#include "tools/penstock/lora_flags.h"

#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "tools/base/flag_check.h"

namespace penstock::tools {
namespace {

// The flags that are there, by name and as given.
std::vector<std::pair<const char*, std::string>> Given(const TrainOptions& flags) {
  std::vector<std::pair<const char*, std::string>> given;
  if (flags.lora_rank.has_value()) given.emplace_back("--lora-rank", absl::StrCat(*flags.lora_rank));
  if (flags.lora_alpha.has_value()) given.emplace_back("--lora-alpha", absl::StrCat(*flags.lora_alpha));
  if (flags.lora_dropout.has_value()) given.emplace_back("--lora-dropout", absl::StrCat(*flags.lora_dropout));
  if (flags.lora_targets.has_value()) given.emplace_back("--lora-targets", *flags.lora_targets);
  return given;
}

// What the flags say, over what there is without them.
absl::StatusOr<models::LoraOptions> Over(models::LoraOptions options, const TrainOptions& flags) {
  options.rank = flags.lora_rank.value_or(options.rank);
  options.alpha = flags.lora_alpha.value_or(options.alpha);
  options.dropout = flags.lora_dropout.value_or(options.dropout);
  if (!flags.lora_targets.has_value()) return options;
  options.targets.clear();
  for (const auto& word : absl::StrSplit(*flags.lora_targets, ',')) {
    options.targets.emplace_back(absl::StripAsciiWhitespace(word));
    if (options.targets.back().empty()) {
      return WrongFlag(absl::StrCat("--lora-targets ", *flags.lora_targets,
                                    ": must be names with commas between, as q_proj,v_proj, or ",
                                    models::kAllLinear));
    }
  }
  return options;
}

// A name of models::LoraOptions begins what is wrong with it.
absl::Status OfFlags(const absl::Status& status) {
  return WrongFlag(absl::StrCat("--lora-", std::string(status.message())));
}

// The flag that asks for something else than `there`; "": none. Dropout is of the training alone.
absl::StatusOr<std::string> Difference(const models::LanguageModel& there, const TrainOptions& flags,
                                       bool dropout_too) {
  const models::LoraOptions& has = *there.lora();
  ASSIGN_OR_RETURN(const models::LoraOptions wanted, Over(has, flags));
  const auto differs = [](const char* flag, const auto& asked, const auto& is) {
    return absl::StrCat(flag, " ", asked, ": it has ", is);
  };
  if (wanted.rank != has.rank) return differs("--lora-rank", wanted.rank, has.rank);
  if (wanted.alpha != has.alpha) return differs("--lora-alpha", wanted.alpha, has.alpha);
  if (dropout_too && wanted.dropout != has.dropout)
    return differs("--lora-dropout", wanted.dropout, has.dropout);
  if (!flags.lora_targets.has_value()) return std::string();
  const auto with = models::WithLora(there.base(), wanted);
  if (!with.ok()) return OfFlags(with.status());
  if ((*with)->lora()->targets == has.targets) return std::string();
  return differs("--lora-targets", *flags.lora_targets, absl::StrJoin(has.targets, ","));
}

}  // namespace

absl::StatusOr<std::optional<models::PublishedAdapter>> AdapterIn(const TrainOptions& flags) {
  if (!flags.init_from.has_value() || !models::IsAdapter(*flags.init_from)) return std::nullopt;
  absl::StatusOr<models::PublishedAdapter> adapter = models::ReadAdapterConfig(*flags.init_from);
  if (!adapter.ok()) return WrongFlag(absl::StrCat("--init-from ", std::string(adapter.status().message())));
  return *std::move(adapter);
}

absl::StatusOr<std::shared_ptr<const models::LanguageModel>> Adapted(
    std::shared_ptr<const models::LanguageModel> model, const TrainOptions& flags,
    const std::optional<models::PublishedAdapter>& adapter) {
  const auto given = Given(flags);
  if (!adapter.has_value()) {
    if (given.empty()) return model;
    if (!flags.lora_rank.has_value())
      return WrongFlag(absl::StrCat(given.front().first, " goes with --lora-rank N"));
    ASSIGN_OR_RETURN(models::LoraOptions options, Over({}, flags));
    auto adapted = models::WithLora(std::move(model), std::move(options));
    return adapted.ok() ? adapted : OfFlags(adapted.status());
  }
  const auto theirs = models::WithLora(model, adapter->options);
  if (!theirs.ok()) {
    return WrongFlag(absl::StrCat("--init-from ", *flags.init_from, "/", models::kAdapterConfig, ": ",
                                  std::string(theirs.status().message())));
  }
  ASSIGN_OR_RETURN(const std::string difference, Difference(**theirs, flags, /*dropout_too=*/false));
  if (!difference.empty()) {
    return WrongFlag(absl::StrCat(difference, " by ", *flags.init_from, "/", models::kAdapterConfig,
                                  ": leave the flag out"));
  }
  models::LoraOptions options = *(*theirs)->lora();
  options.dropout = flags.lora_dropout.value_or(options.dropout);
  auto adapted = models::WithLora(std::move(model), std::move(options));
  return adapted.ok() ? adapted : OfFlags(adapted.status());
}

absl::Status CheckOneProcess(const models::LanguageModel& model, int ranks) {
  if (model.lora() == nullptr || ranks == 1) return absl::OkStatus();
  return WrongFlag("--lora-rank: adapters are trained by one process: start it without other ranks");
}

absl::Status CheckSameAdapters(const models::LanguageModel& model, const TrainOptions& flags) {
  constexpr const char* kWayOut = "; leave the flag out, or start another run in another --state-dir";
  const auto given = Given(flags);
  if (given.empty()) return absl::OkStatus();
  if (model.lora() == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(given.front().first, " ", given.front().second,
                                                      ": this run has no adapters, it trains all of its "
                                                      "weights",
                                                      kWayOut));
  }
  ASSIGN_OR_RETURN(const std::string difference, Difference(model, flags, /*dropout_too=*/true));
  if (difference.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(difference, " since it was created, and its state is made of that", kWayOut));
}

std::string DescribeAdapters(const models::LanguageModel& model) {
  const models::LoraOptions& lora = *model.lora();
  const models::ModelLayout layout = model.Layout();
  return absl::StrCat("lora: rank ", lora.rank, ", alpha ", lora.alpha,
                      lora.dropout > 0 ? absl::StrCat(", dropout ", lora.dropout) : "", ", on ",
                      absl::StrJoin(lora.targets, ", "), ": ", models::AdaptersOf(layout).parameters(),
                      " of ", layout.parameters(), " parameters train");
}

}  // namespace penstock::tools
