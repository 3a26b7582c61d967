#include "tools/generate/generate_prompts.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "base/io_error.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "tools/base/cli.h"
#include "zero/config/nearest_name.h"

namespace penstock::tools {
namespace {

absl::Status In(const std::string& where, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(where, ": ", status.message()));
}

// Refuses a key that nothing reads: an option that is misspelt would be lost in silence.
absl::Status CheckKeys(const nlohmann::json& record) {
  static const std::vector<std::string_view> known = {"prompt", "tokens", "max_tokens", "id"};
  for (const auto& [key, value] : record.items()) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    const std::string near = zero::DidYouMean(key, known);
    return absl::InvalidArgumentError(absl::StrCat(
        "unknown key ", nlohmann::json(key).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace),
        near.empty()
            ? ": there are \"prompt\", \"tokens\", \"max_tokens\" and \"id\", which may be anything and "
              "is copied to the answer"
            : near));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Prompts::Rewind() {
  next_ = 0;
  if (path_.empty()) return absl::OkStatus();
  const absl::StatusOr<models::DataForm> form = models::DataFormOf(path_);
  if (!form.ok()) return absl::InvalidArgumentError(absl::StrCat("--prompts: ", form.status().message()));
  // Whatever is no array is lines, whose errors say what they are.
  splitter_.emplace(*form == models::DataForm::kArray ? *form : models::DataForm::kLines);
  read_.clear();
  file_ = std::ifstream(path_, std::ios::binary);
  open_ = true;
  if (!file_) return absl::InvalidArgumentError(absl::StrCat("--prompts ", path_, ": cannot be read"));
  return absl::OkStatus();
}

absl::StatusOr<Prompt> Prompts::Parse(const std::string& record) const {
  ASSIGN_OR_RETURN(const nlohmann::json json, ParseJsonObject(record, "not a JSON object"));
  RETURN_IF_ERROR(CheckKeys(json));
  Prompt prompt;
  if (json.contains("id")) prompt.id = json["id"];
  const auto text = json.find("prompt"), tokens = json.find("tokens"), most = json.find("max_tokens");
  if ((text == json.end()) == (tokens == json.end()))
    return absl::InvalidArgumentError("either \"prompt\" or \"tokens\" is needed");
  if (text != json.end()) {
    if (!text->is_string()) return absl::InvalidArgumentError("\"prompt\" is not a text");
    ASSIGN_OR_RETURN(prompt.tokens, model_.TokensOf(text->get<std::string>()));
  } else {
    if (!tokens->is_array()) return absl::InvalidArgumentError("\"tokens\" is not a list of numbers");
    for (const nlohmann::json& token : *tokens) {
      // What no 64 bits hold is read as a floating number, and what 63 do not as an unsigned one.
      const bool large = token.is_number_float() && std::fabs(token.get<double>()) >= 0x1p63;
      if (large || (token.is_number_unsigned() && token.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)))
        return model_.NoSuchToken(token.dump());
      if (!token.is_number_integer())
        return absl::InvalidArgumentError("\"tokens\" is not a list of whole numbers");
      prompt.tokens.push_back(token.get<int64_t>());
    }
    RETURN_IF_ERROR(model_.CheckTokens(prompt.tokens));
  }
  if (most != json.end() && !most->is_null()) {
    if (!most->is_number_integer() || most->get<int64_t>() < 1)
      return absl::InvalidArgumentError("\"max_tokens\" is not a number above 0");
    prompt.max_tokens = most->get<int64_t>();
  }
  return prompt;
}

absl::StatusOr<std::optional<Prompt>> Prompts::Next() {
  if (path_.empty()) {
    if (static_cast<size_t>(next_) == texts_.size()) return std::nullopt;
    absl::StatusOr<std::vector<int64_t>> tokens = model_.TokensOf(texts_[static_cast<size_t>(next_)]);
    if (!tokens.ok()) return In("--prompt", tokens.status());
    return Prompt{next_++, nullptr, *std::move(tokens), 0};
  }
  if (!open_) RETURN_IF_ERROR(Rewind());
  while (read_.empty() && splitter_.has_value()) RETURN_IF_ERROR(ReadMore());
  if (read_.empty()) return std::nullopt;
  const auto [place, record] = std::move(read_.front());
  read_.pop_front();
  absl::StatusOr<Prompt> prompt = Parse(record);
  if (!prompt.ok()) return In(absl::StrCat("--prompts ", path_, ", ", place), prompt.status());
  prompt->index = next_++;
  return *std::move(prompt);
}

// Reads on, to the end of a record at least; at the file's end there is no splitter any more.
absl::Status Prompts::ReadMore() {
  const auto take = [&](std::string_view record) {
    read_.emplace_back(splitter_->place(), record);
    return absl::OkStatus();
  };
  std::string piece(64 << 10, '\0');
  file_.read(piece.data(), static_cast<std::streamsize>(piece.size()));
  if (file_.bad()) return StreamError(absl::StrCat("--prompts ", path_, ": read"));
  piece.resize(static_cast<size_t>(file_.gcount()));
  absl::Status status = piece.empty() ? splitter_->Finish(take) : splitter_->Push(piece, take);
  if (piece.empty()) splitter_.reset();
  return status.ok() ? status : In(absl::StrCat("--prompts ", path_), status);
}

}  // namespace penstock::tools
