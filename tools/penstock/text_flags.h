// --tokenizer, --chat-template and --skip-broken-lines: how the files of --data and --eval-data become
// tokens.
#ifndef PENSTOCK_TOOLS_PENSTOCK_TEXT_FLAGS_H_
#define PENSTOCK_TOOLS_PENSTOCK_TEXT_FLAGS_H_

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "models/data/data_mixture.h"
#include "text/tokenizer.h"
#include "tools/penstock/train_options.h"
#include "tools/penstock/train_settings.h"

namespace penstock::tools {

// settings->text, and settings->to_record of it. The tokenizer is the one that is given, a run's own where it
// goes on (`run`: its record, or null), or that of the directory that --model or --init-from names; none
// where there is none: then bytes or .bin are the tokens. After the model. kFailedPrecondition: the run was
// made with another one, or it is not where it was.
absl::Status ResolveText(const TrainOptions& flags, const nlohmann::json& run, TrainSettings* settings);

// Where a text has to be made into tokens first: `preparing` shows how far that is,
// and `stops` ends it with kCancelled; `say` gets a line about what became of it, `tell` one that must be
// heard.
struct TextHooks {
  std::function<void(const std::string&)> preparing, say, tell;
  std::function<bool()> stops;
};

// All that a training reads: its texts, and what it is evaluated on (--eval-data, or the ends that
// --eval-split holds out); null: nothing.
struct Texts {
  std::unique_ptr<models::DataMixture> training, evaluation;
};
absl::StatusOr<Texts> OpenTexts(const TrainSettings& settings, const text::Tokenizer* tokenizer,
                                const TextHooks& hooks);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_TEXT_FLAGS_H_
