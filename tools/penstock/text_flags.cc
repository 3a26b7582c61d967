#include "tools/penstock/text_flags.h"

#include <algorithm>
#include <filesystem>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/directory.h"
#include "base/status_macros.h"
#include "models/data/data_records.h"
#include "models/data/token_file.h"
#include "models/families/family.h"
#include "run/record/run_record.h"
#include "text/foreign_tokenizer.h"
#include "tools/base/flag_check.h"
#include "zero/config/json_field.h"

namespace penstock::tools {
namespace {

// The directory's, if it has one.
absl::StatusOr<std::string> TokenizerOf(const std::optional<std::string>& directory) {
  if (!directory.has_value()) return "";
  ASSIGN_OR_RETURN(const bool there, PathExists(absl::StrCat(*directory, "/tokenizer.json")));
  return there ? *directory : "";
}

std::string Absolute(const std::string& path) {
  std::error_code error;
  const std::filesystem::path absolute = std::filesystem::absolute(path, error);
  return error ? path : absolute.lexically_normal().string();
}

// A model whose tokenizer is of a form that is not read learns no text.
absl::Status CheckNoOtherTokenizer(const TrainOptions& flags, const TrainSettings& settings) {
  std::vector<std::string> paths = settings.data_paths;
  if (!settings.eval_path.empty()) paths.push_back(settings.eval_path);
  const bool only_tokens = std::all_of(paths.begin(), paths.end(),
                                       [](const std::string& path) { return absl::EndsWith(path, ".bin"); });
  if (only_tokens || flags.vocab.has_value()) return absl::OkStatus();
  for (const std::optional<std::string>& directory : {flags.model, flags.init_from}) {
    if (!directory.has_value()) continue;
    ASSIGN_OR_RETURN(const bool there, IsDirectory(*directory));
    if (!there) continue;
    ASSIGN_OR_RETURN(const std::string other, text::DescribeForeignTokenizer(*directory));
    if (!other.empty()) return WrongFlag(absl::StrCat(*directory, " ", other));
  }
  return absl::OkStatus();
}

absl::Status TakeTokenizer(const TrainOptions& flags, const nlohmann::json& run, TrainSettings* settings) {
  const std::string recorded = run::RecordedTokenizer(run);
  std::string& path = settings->text.tokenizer;
  path = flags.tokenizer.value_or(recorded);
  if (!flags.tokenizer.has_value() && !recorded.empty()) {
    ASSIGN_OR_RETURN(const bool there, PathExists(recorded));
    std::string moved;  // its digest tells whether it is the same
    if (!there) {
      ASSIGN_OR_RETURN(moved, TokenizerOf(flags.model));
    }
    if (!moved.empty()) path = moved;
  }
  for (const std::optional<std::string>& directory :
       {flags.model, flags.init_from, std::optional<std::string>(settings->model_directory)}) {
    if (!run.is_null() || !path.empty()) break;
    ASSIGN_OR_RETURN(path, TokenizerOf(directory));
  }
  if (path.empty()) return run.is_null() ? CheckNoOtherTokenizer(flags, *settings) : absl::OkStatus();
  if (flags.vocab.has_value()) {
    if (flags.tokenizer.has_value()) return WrongFlag("--tokenizer and --vocab: one or the other");
    path.clear();
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const uint64_t digest, models::TokenizerDigest(path));
  const nlohmann::json record = {{"path", Absolute(path)}, {"digest", digest}};
  if (run.is_null()) {
    settings->to_record["tokenizer"] = record;
    return absl::OkStatus();
  }
  if (recorded.empty())
    return absl::FailedPreconditionError(
        absl::StrCat("--tokenizer ", path,
                     ": this run learns without one; leave it out, or start another run in another "
                     "--state-dir"));
  const nlohmann::json& before = run["tokenizer"];
  if (zero::JsonField<uint64_t>(before, "digest") != digest) {
    return absl::FailedPreconditionError(absl::StrCat(
        path,
        ": this run was made with another tokenizer, and its weights are made of that; give the one it was "
        "made with (--tokenizer), or start another run in another --state-dir"));
  }
  settings->to_record["tokenizer"] = record;
  return absl::OkStatus();
}

// Whether a file holds what it is read as. One that cannot be read is left to those who read it.
absl::Status CheckForm(const std::string& path, TrainSettings* settings) {
  if (absl::EndsWith(path, ".bin") || (settings->text.tokenizer.empty() && settings->vocab > 0)) {
    const absl::Status tokens = models::CheckTokenData(path);
    return absl::IsInvalidArgument(tokens) ? tokens : absl::OkStatus();
  }
  bool keys_unknown = false;
  const absl::StatusOr<models::DataForm> form = models::DataFormOf(path, &keys_unknown);
  if (!form.ok()) return absl::IsInvalidArgument(form.status()) ? form.status() : absl::OkStatus();
  if (*form != models::DataForm::kText && settings->text.tokenizer.empty()) {
    return WrongFlag(absl::StrCat(path, " has texts in ",
                                  *form == models::DataForm::kLines ? "lines" : "an array",
                                  " of JSON, which become tokens by a tokenizer: give --tokenizer DIR"));
  }
  if (keys_unknown) {
    settings->notes.push_back(
        absl::StrCat(path,
                     ": its first line is an object of JSON without a key that examples have (text, prompt, "
                     "messages, conversations, instruction): its characters are learned as they are"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<models::Dataset>> OpenText(const std::string& path,
                                                          const TrainSettings& settings,
                                                          const text::Tokenizer* tokenizer,
                                                          const TextHooks& hooks) {
  if (tokenizer == nullptr || absl::EndsWith(path, ".bin")) {
    // Of a .bin nobody says anything of, the model says how wide its tokens are.
    const bool says = settings.vocab > 0 || !absl::EndsWith(path, ".bin");
    const int64_t vocab = says                   ? settings.vocab
                          : tokenizer != nullptr ? tokenizer->vocab_size()
                                                 : settings.model->vocabulary();
    return models::Dataset::Open(path, models::InferTokenFormat(path, vocab), settings.model->vocabulary(),
                                 settings.seq);
  }
  if (tokenizer->base_vocab_size() > settings.model->vocabulary()) {
    return absl::InvalidArgumentError(
        absl::StrCat(settings.text.tokenizer, ": the tokenizer has ", tokenizer->base_vocab_size(),
                     " tokens, the model ", settings.model->vocabulary(), ": they do not belong together"));
  }
  models::TokenFileOptions options;
  options.chat = settings.text.chat;
  options.skip_broken = settings.text.skip_broken;
  options.vocabulary = settings.model->vocabulary();
  options.progress = [&](double share) {
    hooks.preparing(absl::StrFormat("making tokens of %s: %.0f%%", path, 100 * share));
    return !hooks.stops();
  };
  ASSIGN_OR_RETURN(const models::TokenFile file,
                   models::MakeTokenFile(path, *tokenizer, settings.text.tokenizer, options));
  if (file.skipped > 0) {
    hooks.tell(
        absl::StrCat(path, ": ", file.skipped, file.skipped == 1 ? " line or element" : " lines or elements",
                     " passed over that cannot be used, the first is number ", file.first_skipped_line));
  }
  ASSIGN_OR_RETURN(std::unique_ptr<models::Dataset> data,
                   models::Dataset::OpenExamples(file, settings.model->vocabulary(), settings.seq));
  hooks.say(absl::StrCat(path, ": ", file.tokens, " tokens",
                         file.is_stream()
                             ? ""
                             : absl::StrCat(", ", data->learned_tokens(), " of them learned, in ",
                                            data->rows(), " sequences of --seq ", settings.seq),
                         file.was_there ? ", as they lie in " : ", kept in ", file.tokens_path));
  if (data->cut_examples() > 0) {
    hooks.tell(absl::StrCat(
        path, ": ", data->cut_examples(), " of ", file.examples, " examples are longer than --seq ",
        settings.seq, " and are cut there",
        data->lost_examples() == 0
            ? ""
            : absl::StrCat("; nothing is left to learn of ", data->lost_examples(), ", which are left out")));
  }
  return data;
}

}  // namespace

absl::Status ResolveText(const TrainOptions& flags, const nlohmann::json& run, TrainSettings* settings) {
  RETURN_IF_ERROR(TakeTokenizer(flags, run, settings));
  const std::optional<std::string> recorded =
      run.is_object() ? zero::JsonField<std::string>(run, "chat_template") : std::nullopt;
  if (const std::optional<std::string> chat =
          flags.chat_template.has_value() ? flags.chat_template : recorded;
      chat.has_value()) {
    settings->text.chat = text::ParseChatTemplate(*chat);
    if (!settings->text.chat.has_value())
      return WrongFlag(absl::StrCat("--chat-template ", *chat, ": must be chatml, llama3 or llama2"));
    if (settings->text.tokenizer.empty())
      return WrongFlag("--chat-template: messages become tokens by a tokenizer: give --tokenizer as well");
    settings->to_record["chat_template"] = *chat;
  }
  settings->text.skip_broken =
      flags.skip_broken_lines ||
      (run.is_object() && zero::JsonField<bool>(run, "skip_broken_lines").value_or(false));
  if (settings->text.skip_broken) settings->to_record["skip_broken_lines"] = true;
  std::vector<std::string> paths = settings->data_paths;
  paths.push_back(settings->eval_path);
  for (const std::string& path : paths) {
    if (!path.empty()) RETURN_IF_ERROR(CheckForm(path, settings));
  }
  return absl::OkStatus();
}

absl::StatusOr<Texts> OpenTexts(const TrainSettings& settings, const text::Tokenizer* tokenizer,
                                const TextHooks& hooks) {
  Texts texts;
  std::vector<std::unique_ptr<models::Dataset>> opened;
  for (const std::string& path : settings.data_paths) {
    ASSIGN_OR_RETURN(opened.emplace_back(), OpenText(path, settings, tokenizer, hooks));
  }
  ASSIGN_OR_RETURN(texts.training, models::DataMixture::Of(std::move(opened), settings.data_weights));
  if (settings.eval_split > 0) {
    ASSIGN_OR_RETURN(texts.evaluation, texts.training->HoldOut(settings.eval_split));
  } else if (!settings.eval_path.empty()) {
    std::vector<std::unique_ptr<models::Dataset>> held;
    ASSIGN_OR_RETURN(held.emplace_back(), OpenText(settings.eval_path, settings, tokenizer, hooks));
    ASSIGN_OR_RETURN(texts.evaluation, models::DataMixture::Of(std::move(held), {}));
  }
  const auto& parts = texts.training->texts();
  for (size_t i = 0; parts.size() > 1 && i < parts.size(); ++i) {
    hooks.say(absl::StrFormat("%s: %d of every %d sequences", settings.data_paths[i],
                              texts.training->sequences_in_cycle()[i], models::DataMixture::kCycle));
  }
  return texts;
}

}  // namespace penstock::tools
