// --lora-rank and its kin, and an adapter of PEFT's as --init-from: what they make of a model.
#ifndef PENSTOCK_TOOLS_PENSTOCK_LORA_FLAGS_H_
#define PENSTOCK_TOOLS_PENSTOCK_LORA_FLAGS_H_

#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "models/families/family.h"
#include "models/families/lora.h"
#include "tools/penstock/train_options.h"

namespace penstock::tools {

// The adapter that --init-from points at; nullopt: it points at none.
absl::StatusOr<std::optional<models::PublishedAdapter>> AdapterIn(const TrainOptions& flags);

// Of a new run: the model with the adapters that the flags or `adapter` ask for, else itself.
// kInvalidArgument: what is wrong with them, or where they disagree.
absl::StatusOr<std::shared_ptr<const models::LanguageModel>> Adapted(
    std::shared_ptr<const models::LanguageModel> model, const TrainOptions& flags,
    const std::optional<models::PublishedAdapter>& adapter);

// kInvalidArgument: its adapters would be trained by several ranks.
absl::Status CheckOneProcess(const models::LanguageModel& model, int ranks);

// Of a run that goes on, whose model is `model`. kFailedPrecondition: a flag asks for other adapters.
absl::Status CheckSameAdapters(const models::LanguageModel& model, const TrainOptions& flags);

// What trains, for people.
std::string DescribeAdapters(const models::LanguageModel& model);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_LORA_FLAGS_H_
