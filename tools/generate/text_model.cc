#include "tools/generate/text_model.h"

#include <algorithm>
#include <charconv>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "base/directory.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "kernels/checksum.h"
#include "models/families/family.h"
#include "models/weights/weight_files.h"
#include "models/weights/weight_import.h"
#include "run/record/run_record.h"
#include "swap/inspect.h"
#include "text/foreign_tokenizer.h"
#include "tools/state/base_files.h"
#include "tools/state/state_reader.h"
#include "zero/compute/tile_format.h"
#include "zero/config/json_field.h"
#include "zero/memory/thread_times.h"

namespace penstock::tools {
namespace {

constexpr int64_t kBytes = 256;  // tokens of a model of plain text

absl::Status OpenDirectory(const std::string& directory, std::string_view program, std::ostream& err,
                           TextModel* text) {
  std::vector<std::string> notes;
  absl::StatusOr<std::shared_ptr<const models::LanguageModel>> model = models::OpenModel(directory, &notes);
  RETURN_IF_ERROR(model.status());
  for (const std::string& note : notes) err << program << ": " << note << "\n" << std::flush;
  text->directory = directory;
  text->model = *std::move(model);
  text->window = text->model->context();
  text->bytes = text->model->vocabulary() == kBytes;
  text->threads = zero::DefaultIntraOpThreads();
  text->identity = {{"model", text->model->ToJson()}};
  ASSIGN_OR_RETURN(text->packed, models::PackingOf(directory));
  if (text->packed.has_value())
    text->identity.update({{"bits", text->packed->bits}, {"group", text->packed->group}});
  ASSIGN_OR_RETURN(GenerationConfig config, ReadGenerationConfig(directory));
  for (const std::string& note : config.notes)
    err << program << ": " << directory << "/" << note << "\n" << std::flush;
  text->defaults = std::move(config.defaults);
  // As in transformers, generation_config.json replaces those of config.json.
  text->ends = config.ends.empty() ? EndsIn(text->model->ToPublished()) : std::move(config.ends);
  return absl::OkStatus();
}

// kInvalidArgument: a directory with a config.json is a state or checkpoint too. Of checkpoints within it, as
// transformers' Trainer leaves them beside the model, a line goes to `err`.
absl::Status CheckOneOfTwo(const std::string& directory, std::string_view program, std::ostream& err) {
  const absl::StatusOr<std::vector<std::string>> run = ResolveStateDirs({directory});
  if (absl::IsNotFound(run.status())) return absl::OkStatus();
  RETURN_IF_ERROR(run.status());
  if (run->front() != directory) {
    err << program << ": " << directory << ": the model of its config.json is read, and not the checkpoint "
        << run->front() << ": name that one to read it\n"
        << std::flush;
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      directory, ": which of two is meant: the model of its config.json, or the state or checkpoint ",
      run->front(),
      "? Move config.json and the weights to a directory of their own, and name the one or the other"));
}

// Where the frozen weights of a run's record lie: at `base` or, if that is empty, where they were last.
absl::StatusOr<std::string> FindBase(const nlohmann::json& record, const std::string& base) {
  ASSIGN_OR_RETURN(const nlohmann::json found, CompareBase(record, base, BaseCheck::kTimes, /*quiet=*/false));
  std::string path = PathOfBase(found);
  const std::string given = absl::StrCat("--model ", path);
  ASSIGN_OR_RETURN(const std::string main, models::MainWeightFile(path, given));
  ASSIGN_OR_RETURN(const models::WeightFiles files, models::WeightFilesOf(main, given));
  std::vector<std::string> paths;
  for (const auto& [file, tensors] : files) paths.push_back(file);
  RETURN_IF_ERROR(CheckSameFiles(paths, found));
  return path;
}

absl::StatusOr<std::string> OpenRun(const std::vector<std::string>& arguments, const std::string& base,
                                    TextModel* text) {
  ASSIGN_OR_RETURN(text->state_dirs, ResolveStateDirs(arguments));
  ASSIGN_OR_RETURN(const FoundState state, FindState(arguments));
  RETURN_IF_ERROR(CheckNotTrained(state));
  const swap::Inspection& inspection = state.inspections.front();
  const nlohmann::json identity = ParseOrNull(inspection.shape.identity);
  const nlohmann::json payload = ParseOrNull(inspection.record.payload);
  const auto foreign = [&](const std::string& why) {
    return absl::FailedPreconditionError(
        absl::StrCat(text->state_dirs.front(), ": not a model of penstock train (", why, ")"));
  };
  if (!identity.is_object() || !identity.contains("model") || !identity.contains("dtype"))
    return foreign("its identity has no model");
  if (identity.contains("ranks") && state.parts.size() == 1)
    return foreign("it is one rank's part of a run of several");
  const auto model = models::ModelFromJson(identity["model"]);
  if (!model.ok()) return foreign(std::string(model.status().message()));
  text->model = *model;
  const std::optional<kernels::DType> dtype =
      identity["dtype"].is_string() ? zero::ParseDType(identity["dtype"].get<std::string>()) : std::nullopt;
  if (!dtype.has_value()) return foreign("its weights are of no known type");
  text->dtype = *dtype;
  text->parts = state.parts;
  text->sequence = inspection.record.sequence;
  const int64_t context = text->model->context();
  text->window = context;
  text->bytes = true;
  text->threads = zero::DefaultIntraOpThreads();
  nlohmann::json run;
  if (payload.is_object() && payload.contains("run") && payload["run"].is_object()) run = payload["run"];
  if (run.is_object()) {
    if (run.contains(kBaseKey)) {
      ASSIGN_OR_RETURN(text->base, FindBase(run[kBaseKey], base));
    }
    // Positions beyond those of training have never been trained.
    text->window = std::clamp<int64_t>(zero::JsonField<int64_t>(run, "seq").value_or(context), 1, context);
    text->bytes = zero::JsonField<int64_t>(run, "vocab").value_or(0) == 0;
  }
  if (text->base.empty() && !base.empty()) return NoBase(base);
  text->bytes = text->bytes && text->model->vocabulary() == kBytes;
  kernels::Checksummer values;
  for (const swap::Inspection& part : state.inspections) {
    const std::vector<uint64_t>& sums = part.record.checksums;
    values.Update(sums.data(), sums.size() * sizeof(uint64_t));
  }
  text->identity = {
      {"model", identity["model"]}, {"step", inspection.record.step}, {"values", values.Digest()}};
  return run::RecordedTokenizer(run);
}

// `tokenizer`: what was asked for, which must be there; else `recorded`, which may be gone if it is
// `optional`.
absl::Status OpenTokenizer(const std::optional<std::string>& tokenizer, const std::string& recorded,
                           bool optional, std::string_view program, std::ostream& err, TextModel* text) {
  const std::string path = tokenizer.value_or(recorded);
  if (path.empty()) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<text::Tokenizer>> opened = text::Tokenizer::Open(path);
  if (opened.ok()) {
    text->tokenizer = *std::move(opened);
    for (const std::string& note : text->tokenizer->notes())
      err << program << ": " << note << "\n" << std::flush;
    // A model's own files come before those of the tokenizer, and the numbers there before the names.
    if (text->ends.empty()) {
      ASSIGN_OR_RETURN(const std::string directory, models::WeightDirectory(path));
      ASSIGN_OR_RETURN(const GenerationConfig config, ReadGenerationConfig(directory));
      text->ends = config.ends;
    }
    if (text->ends.empty()) {
      const std::vector<int32_t>& ends = text->tokenizer->special_ids().eos;
      text->ends.assign(ends.begin(), ends.end());
    }
    return absl::OkStatus();
  }
  if (!optional || tokenizer.has_value()) return opened.status();
  err << program << ": " << opened.status().message()
      << ": tokens are shown as numbers (--tokenizer says where it is)"
      << "\n"
      << std::flush;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TextModel> OpenTextModel(const std::vector<std::string>& arguments,
                                        const std::optional<std::string>& tokenizer, const std::string& base,
                                        std::string_view program, std::ostream& err) {
  if (arguments.empty())
    return absl::InvalidArgumentError(
        "a Hugging Face directory, a state directory or a checkpoint is needed");
  TextModel text;
  std::string recorded;
  const std::string& first = arguments.front();
  bool published = arguments.size() == 1;
  if (published) {
    ASSIGN_OR_RETURN(published, PathExists(first + "/config.json"));
  }
  if (published) RETURN_IF_ERROR(CheckOneOfTwo(first, program, err));
  if (published && !models::HasWeights(first)) {
    return absl::InvalidArgumentError(
        absl::StrCat(first, ": a config.json without weights: ", models::WhyNoWeights(first)));
  }
  if (published && !base.empty()) return NoBase(base);
  if (published) {
    RETURN_IF_ERROR(OpenDirectory(first, program, err, &text));
    ASSIGN_OR_RETURN(const bool has_tokenizer, PathExists(first + "/tokenizer.json"));
    if (has_tokenizer) recorded = first;
    if (!has_tokenizer && !tokenizer.has_value()) {
      ASSIGN_OR_RETURN(const std::string other, text::DescribeForeignTokenizer(first));
      if (!other.empty()) err << program << ": " << first << " " << other << "\n" << std::flush;
    }
  } else {
    ASSIGN_OR_RETURN(recorded, OpenRun(arguments, base, &text));
  }
  RETURN_IF_ERROR(OpenTokenizer(tokenizer, recorded, /*optional=*/!published, program, err, &text));
  if (text.tokenizer != nullptr) text.bytes = false;
  return text;
}

absl::StatusOr<TextModel> OpenTrainedText(const std::vector<std::string>& arguments,
                                          const std::optional<std::string>& tokenizer,
                                          const std::string& base, std::string_view program,
                                          std::ostream& err) {
  TextModel text;
  ASSIGN_OR_RETURN(const std::string recorded, OpenRun(arguments, base, &text));
  RETURN_IF_ERROR(OpenTokenizer(tokenizer, recorded, /*optional=*/true, program, err, &text));
  return text;
}

absl::Status TextModel::CheckTokens(const std::vector<int64_t>& tokens) const {
  if (tokens.empty()) return absl::InvalidArgumentError("a prompt must have at least one token");
  for (const int64_t token : tokens) {
    if (token >= 0 && token < model->vocabulary()) continue;
    return NoSuchToken(absl::StrCat(token));
  }
  return absl::OkStatus();
}

absl::Status TextModel::NoSuchToken(std::string_view token) const {
  return absl::InvalidArgumentError(
      absl::StrCat("token ", std::string(token), " is not one of the model's ", model->vocabulary()));
}

std::string TextModel::BytesOf(int64_t token) const {
  if (tokenizer != nullptr) return tokenizer->BytesOf(static_cast<int32_t>(token));
  return bytes ? std::string(1, static_cast<char>(token)) : absl::StrCat(token, " ");
}

absl::StatusOr<std::vector<int64_t>> TextModel::Encode(const std::string& prompt) const {
  std::vector<int64_t> tokens;
  if (bytes) {
    for (const char c : prompt) tokens.push_back(static_cast<unsigned char>(c));
    return tokens;
  }
  ASSIGN_OR_RETURN(const std::vector<int32_t> ids, tokenizer->Encode(prompt));
  tokens.assign(ids.begin(), ids.end());
  return tokens;
}

absl::StatusOr<std::vector<int64_t>> TextModel::TokensOf(const std::string& prompt) const {
  std::vector<int64_t> tokens;
  if (bytes || tokenizer != nullptr) {
    ASSIGN_OR_RETURN(tokens, Encode(prompt));
  } else {
    std::istringstream words(prompt);
    for (std::string word; words >> word;) {
      int64_t token = -1;
      const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), token);
      if (error != std::errc() || end != word.data() + word.size()) {
        return absl::InvalidArgumentError(
            absl::StrCat("\"", word, "\": this model has no tokenizer: give token numbers from 0 to ",
                         model->vocabulary() - 1, ", or the `tokenizer`"));
      }
      tokens.push_back(token);
    }
  }
  if (const absl::Status checked = CheckTokens(tokens); !checked.ok()) {
    const bool others = tokenizer != nullptr && !tokens.empty();
    return others ? absl::InvalidArgumentError(
                        absl::StrCat(checked.message(), ": the tokenizer is of another model"))
                  : checked;
  }
  return tokens;
}

}  // namespace penstock::tools
