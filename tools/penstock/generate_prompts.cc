#include "tools/penstock/generate_prompts.h"

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "tools/base/cli.h"

namespace penstock::tools {
namespace {

absl::Status In(const std::string& where, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(where, ": ", status.message()));
}

}  // namespace

absl::Status Prompts::Rewind() {
  line_ = next_ = 0;
  if (path_.empty()) return absl::OkStatus();
  file_ = std::ifstream(path_, std::ios::binary);
  open_ = true;
  if (!file_) return absl::InvalidArgumentError(absl::StrCat("--prompts ", path_, ": cannot be read"));
  return absl::OkStatus();
}

absl::StatusOr<Prompt> Prompts::Parse(const std::string& line) const {
  const nlohmann::json json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return absl::InvalidArgumentError("not a JSON object");
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
  for (std::string line; std::getline(file_, line);) {
    ++line_;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    absl::StatusOr<Prompt> prompt = Parse(line);
    if (!prompt.ok()) return In(absl::StrCat("--prompts ", path_, ", line ", line_), prompt.status());
    prompt->index = next_++;
    return *std::move(prompt);
  }
  if (file_.bad()) return StreamError(absl::StrCat("--prompts ", path_, ": read"));
  return std::nullopt;
}

}  // namespace penstock::tools
