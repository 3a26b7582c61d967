#include "text/tokenizer_config.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "base/json.h"
#include "base/small_file.h"
#include "base/status_macros.h"
#include "text/strings.h"
#include "text/tokenizer_class.h"

namespace penstock::text {
namespace {

using nlohmann::json;

// In the order in which transformers adds them.
constexpr std::array<const char*, 7> kNamed = {"bos_token", "eos_token", "unk_token", "sep_token",
                                               "pad_token", "cls_token", "mask_token"};

absl::Status Wrong(const std::string& path, std::string_view what) {
  return absl::InvalidArgumentError(Cat(path, ": ", what));
}

// A file's object and its text; an empty object where there is no such file.
struct File {
  std::string path, text;
  json object = json::object();
  bool exists = false;
};

absl::StatusOr<File> Read(const std::string& directory, const char* name) {
  File file;
  file.path = Cat(directory.empty() ? "." : directory, "/", name);
  absl::StatusOr<std::string> text = ReadSmallFile(file.path);
  if (absl::IsNotFound(text.status())) return file;
  RETURN_IF_ERROR(text.status());
  file.text = *std::move(text);
  ASSIGN_OR_RETURN(file.object, ParseJsonObject(file.text, file.path));
  file.exists = true;
  return file;
}

// "[PAD]", or {"content": "[PAD]", "lstrip": false, ...}. `special`: of a name alone.
absl::StatusOr<AddedToken> TokenOf(const json& value, bool special, const std::string& path,
                                   std::string_view key) {
  AddedToken token;
  token.id = -1;
  token.special = special;
  if (value.is_string()) {
    token.content = value.get<std::string>();
    token.normalized = !special;
    return token;
  }
  if (!value.is_object() || !value.contains("content") || !value["content"].is_string())
    return Wrong(path, Cat(key, " names no token"));
  token.content = value["content"].get<std::string>();
  const auto flag = [&](const char* name, bool absent, bool* to) -> absl::Status {
    const auto found = value.find(name);
    *to = absent;
    if (found == value.end()) return absl::OkStatus();
    if (!found->is_boolean()) return Wrong(path, Cat(key, ".", name, " must be true or false"));
    *to = found->get<bool>();
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(flag("special", special, &token.special));
  RETURN_IF_ERROR(flag("single_word", false, &token.single_word));
  RETURN_IF_ERROR(flag("lstrip", false, &token.lstrip));
  RETURN_IF_ERROR(flag("rstrip", false, &token.rstrip));
  RETURN_IF_ERROR(flag("normalized", !token.special, &token.normalized));
  return token;
}

// Each key of these is looked for in the whole text: no file may make that long.
constexpr size_t kMostKeys = 4096;

// The keys of `object` in the order of the file's text, which decides the ids of tokens that are appended.
std::vector<std::string> InOrder(const json& object, std::string_view text) {
  std::vector<std::pair<size_t, std::string>> places;
  for (const auto& [key, unused] : object.items()) places.emplace_back(text.find(json(key).dump()), key);
  std::sort(places.begin(), places.end());
  std::vector<std::string> keys;
  keys.reserve(places.size());
  for (auto& [unused, key] : places) keys.push_back(std::move(key));
  return keys;
}

absl::StatusOr<std::optional<bool>> Flag(const File& file, const char* key) {
  const auto found = file.object.find(key);
  if (found == file.object.end() || found->is_null()) return std::nullopt;
  if (!found->is_boolean()) return Wrong(file.path, Cat(key, " must be true or false"));
  return found->get<bool>();
}

class Reader {
 public:
  explicit Reader(File config) : config_(std::move(config)) {}

  absl::StatusOr<TokenizerConfig> Run(const std::string& directory) {
    if (config_.object.contains("added_tokens_decoder")) {
      RETURN_IF_ERROR(ReadDecoder());
    } else {
      RETURN_IF_ERROR(ReadOlderFiles(directory));
    }
    RETURN_IF_ERROR(AddNamed());
    RETURN_IF_ERROR(AddModelsOwn());
    RETURN_IF_ERROR(AddExtra());
    RETURN_IF_ERROR(ReadSettings(directory));
    return std::move(read_);
  }

 private:
  absl::Status ReadDecoder() {
    const json& decoder = config_.object["added_tokens_decoder"];
    if (!decoder.is_object()) return Wrong(config_.path, "added_tokens_decoder is no object");
    std::map<int32_t, AddedToken> by_id;
    for (const auto& [key, value] : decoder.items()) {
      int32_t id = -1;
      if (!absl::SimpleAtoi(key, &id) || id < 0)
        return Wrong(config_.path, Cat("added_tokens_decoder has the id ", Quoted(key), ", no whole number"));
      ASSIGN_OR_RETURN(AddedToken token, TokenOf(value, /*special=*/false, config_.path,
                                                 Cat("added_tokens_decoder[", key, "]")));
      token.id = id;
      by_id.insert_or_assign(id, std::move(token));
    }
    for (auto& [unused, token] : by_id) Add(std::move(token));
    return absl::OkStatus();
  }

  // special_tokens_map.json says more than tokenizer_config.json; added_tokens.json has what neither has.
  absl::Status ReadOlderFiles(const std::string& directory) {
    ASSIGN_OR_RETURN(const File map, Read(directory, "special_tokens_map.json"));
    for (const auto& [key, value] : map.object.items()) {
      if (value.is_null()) continue;
      json& to = config_.object[key];
      if (value.is_object() && value.contains("content")) {
        to = value;
        to["special"] = true;
      } else if (key == "extra_special_tokens" && value.is_array() && to.is_array()) {
        to.insert(to.end(), value.begin(), value.end());
      } else {
        to = value;
      }
    }
    ASSIGN_OR_RETURN(const File added, Read(directory, "added_tokens.json"));
    if (!added.exists) return absl::OkStatus();
    absl::flat_hash_set<std::string> special;
    for (const char* const key : kNamed) {
      if (!Has(key)) continue;
      ASSIGN_OR_RETURN(const AddedToken token, TokenOf(config_.object[key], true, config_.path, key));
      special.insert(token.content);
    }
    ASSIGN_OR_RETURN(const std::vector<AddedToken> extra, Extra());
    for (const AddedToken& token : extra) special.insert(token.content);
    std::map<int32_t, AddedToken> by_id;
    for (const auto& [content, id] : added.object.items()) {
      if (!id.is_number_unsigned() || id.get<uint64_t>() > std::numeric_limits<int32_t>::max())
        return Wrong(added.path, Cat("the id of ", Quoted(content), " is no whole number"));
      AddedToken token;
      token.content = content;
      token.id = static_cast<int32_t>(id.get<uint64_t>());
      token.special = special.contains(content);
      token.normalized = !token.special;
      by_id.insert_or_assign(token.id, std::move(token));
    }
    for (auto& [unused, token] : by_id) Add(std::move(token));
    read_.from_added_tokens_json = true;
    return absl::OkStatus();
  }

  bool Has(const char* key) const {
    const auto found = config_.object.find(key);
    return found != config_.object.end() && !found->is_null();
  }

  absl::Status AddNamed() {
    for (const char* const key : kNamed) {
      if (!Has(key)) continue;
      ASSIGN_OR_RETURN(AddedToken token, TokenOf(config_.object[key], /*special=*/true, config_.path, key));
      const std::string_view name = key;
      for (const auto& [named, to] :
           {std::pair<std::string_view, std::optional<std::string>*>{"bos_token", &read_.bos},
            {"eos_token", &read_.eos},
            {"unk_token", &read_.unk},
            {"pad_token", &read_.pad}}) {
        if (name == named && !token.content.empty()) *to = token.content;
      }
      AddSpecial(std::move(token));
    }
    return absl::OkStatus();
  }

  // "image_token": "<image>", and {"extra_special_tokens": {"image_token": "<image>"}}.
  absl::Status AddModelsOwn() {
    const json own = config_.object;
    if (own.size() > kMostKeys) return Wrong(config_.path, Cat("has more than ", kMostKeys, " keys"));
    for (const std::string& key : InOrder(own, config_.text)) {
      const bool named = std::find(kNamed.begin(), kNamed.end(), key) != kNamed.end();
      const json& value = own[key];
      if (named || !key.ends_with("_token") || !(value.is_string() || value.is_object())) continue;
      ASSIGN_OR_RETURN(AddedToken token, TokenOf(value, /*special=*/true, config_.path, key));
      AddSpecial(std::move(token));
    }
    const auto extra = own.find("extra_special_tokens");
    if (extra == own.end() || !extra->is_object()) return absl::OkStatus();
    if (extra->size() > kMostKeys)
      return Wrong(config_.path, Cat("extra_special_tokens has more than ", kMostKeys, " keys"));
    for (const std::string& key : InOrder(*extra, config_.text)) {
      ASSIGN_OR_RETURN(AddedToken token, TokenOf((*extra)[key], /*special=*/true, config_.path,
                                                 Cat("extra_special_tokens.", key)));
      AddSpecial(std::move(token));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<AddedToken>> Extra() const {
    std::vector<AddedToken> tokens;
    for (const char* const key : {"extra_special_tokens", "additional_special_tokens"}) {
      const auto list = config_.object.find(key);
      if (list == config_.object.end() || list->is_null() || list->empty()) continue;
      if (list->is_object()) break;
      if (!list->is_array()) return Wrong(config_.path, Cat(key, " is no list of tokens"));
      for (const json& value : *list) {
        ASSIGN_OR_RETURN(tokens.emplace_back(), TokenOf(value, /*special=*/true, config_.path, key));
      }
      break;
    }
    return tokens;
  }

  absl::Status AddExtra() {
    ASSIGN_OR_RETURN(std::vector<AddedToken> extra, Extra());
    for (AddedToken& token : extra) Add(std::move(token));
    return absl::OkStatus();
  }

  void Add(AddedToken token) {
    if (!token.content.empty() && seen_.insert(token.content).second)
      read_.tokens.push_back(std::move(token));
  }
  void AddSpecial(AddedToken token) {
    read_.named.insert(token.content);
    Add(std::move(token));
  }

  absl::Status ReadSettings(const std::string& directory) {
    ASSIGN_OR_RETURN(read_.add_bos_token, Flag(config_, "add_bos_token"));
    ASSIGN_OR_RETURN(read_.add_eos_token, Flag(config_, "add_eos_token"));
    ASSIGN_OR_RETURN(read_.add_prefix_space, Flag(config_, "add_prefix_space"));
    ASSIGN_OR_RETURN(const std::optional<bool> splits, Flag(config_, "split_special_tokens"));
    if (splits.value_or(false))
      return Wrong(config_.path,
                   "split_special_tokens is true, which is not served: special tokens in a text are tokens");
    ASSIGN_OR_RETURN(const std::optional<bool> legacy, Flag(config_, "legacy"));
    ASSIGN_OR_RETURN(const File model, Read(directory, "config.json"));
    const auto text_of = [](const File& file, const char* key) -> std::string {
      const auto found = file.object.find(key);
      return found == file.object.end() || !found->is_string() ? "" : found->get<std::string>();
    };
    std::string named = text_of(config_, "tokenizer_class");
    if (named.empty()) named = text_of(model, "tokenizer_class");
    read_.tokenizer_class = TokenizerClass(named, text_of(model, "model_type"));
    read_.class_steps =
        StepsOfClass(read_.tokenizer_class, read_.add_prefix_space.value_or(true), legacy.value_or(false));
    if (SetsByteLevelPrefix(read_.tokenizer_class))
      read_.byte_level_prefix = read_.add_prefix_space.value_or(false);
    return absl::OkStatus();
  }

  File config_;
  TokenizerConfig read_;
  absl::flat_hash_set<std::string> seen_;
};

bool Same(const AddedToken& a, const AddedToken& b) {
  return a.content == b.content && a.single_word == b.single_word && a.lstrip == b.lstrip &&
         a.rstrip == b.rstrip && a.normalized == b.normalized && a.special == b.special;
}

// A line where `says` of one of the template's tokens is not what tokenizer.json's template has.
void NoteTemplate(const char* key, std::optional<bool> says, const std::optional<std::string>& token,
                  const std::vector<int32_t>& fixed, const TokenizerParts& parts, const char* where,
                  std::vector<std::string>* notes) {
  if (!says.has_value() || !token.has_value()) return;
  bool has = false;
  for (const AddedToken& added : parts.added_tokens) {
    if (added.content == *token) has = std::find(fixed.begin(), fixed.end(), added.id) != fixed.end();
  }
  if (has == *says) return;
  notes->push_back(Cat("tokenizer_config.json: ", key, " is ", *says ? "true" : "false",
                       ", and the post_processor of tokenizer.json has ", has ? "a " : "no ", *token, " ",
                       where, " a text: tokenizer.json is followed, as by transformers"));
}

// Whether transformers cuts texts by other steps than tokenizer.json says.
bool OtherSteps(const TokenizerConfig& config, const TokenizerParts& parts) {
  if (config.class_steps.empty() || config.class_steps == parts.steps) return false;
  // A LlamaTokenizer of bytes is opened as tokenizer.json says.
  return config.tokenizer_class != "LlamaTokenizer" || !parts.model.byte_level;
}

// For a line: without the patterns.
std::string StepTypes(const std::vector<std::string>& steps) {
  std::string types;
  for (const std::string& step : steps) {
    std::string_view shown = step;
    for (const std::string_view patterned : {"Split", "Replace", "Prepend"}) {
      if (step.starts_with(patterned)) shown = patterned;
    }
    CatTo(types, types.empty() ? "" : ", ", shown);
  }
  return types.empty() ? "none" : types;
}

}  // namespace

absl::StatusOr<TokenizerConfig> ReadTokenizerConfig(const std::string& directory) {
  ASSIGN_OR_RETURN(File config, Read(directory, "tokenizer_config.json"));
  return Reader(std::move(config)).Run(directory);
}

AddedByConfig AddTokens(const TokenizerConfig& config, TokenizerParts* parts) {
  AddedByConfig result;
  std::vector<std::string>& notes = result.notes;
  TextMap<std::string, size_t> added;  // places in parts->added_tokens
  absl::flat_hash_set<int32_t> added_ids;
  const auto vocab_size = static_cast<int32_t>(parts->model.vocab.size());
  int32_t next = vocab_size;
  for (size_t i = 0; i < parts->added_tokens.size(); ++i) {
    added.emplace(parts->added_tokens[i].content, i);
    added_ids.insert(parts->added_tokens[i].id);
    next = std::max(next, parts->added_tokens[i].id + 1);
  }
  TextMap<std::string_view, int32_t> vocab;
  for (AddedToken token : config.tokens) {
    const int32_t said = token.id;
    if (config.from_added_tokens_json && added_ids.contains(said)) continue;
    if (const auto known = added.find(token.content); known != added.end()) {
      AddedToken& before = parts->added_tokens[known->second];
      token.id = before.id;
      // One that is only named keeps its properties.
      if (said >= 0 && !Same(before, token)) {
        token.special = token.special || config.named.contains(token.content);
        before = token;
        result.any = true;
      }
    } else {
      if (vocab.empty()) {
        for (const auto& [text, id] : parts->model.vocab) vocab.emplace(text, id);
      }
      const auto in_model = vocab.find(token.content);
      token.id = in_model != vocab.end() ? in_model->second : next++;
      token.special = token.special || config.named.contains(token.content);
      added.emplace(token.content, parts->added_tokens.size());
      parts->added_tokens.push_back(token);
      result.any = true;
    }
    if (said >= 0 && said != token.id)
      notes.push_back(Cat("tokenizer_config.json: the token ", token.content, " has the id ", said,
                          " there, and tokenizer.json leaves it ", token.id,
                          ", which it has here, as with transformers"));
  }
  NoteTemplate("add_bos_token", config.add_bos_token, config.bos, parts->prefix, *parts, "before", &notes);
  NoteTemplate("add_eos_token", config.add_eos_token, config.eos, parts->suffix, *parts, "behind", &notes);
  const bool other_steps = OtherSteps(config, *parts);
  if (other_steps) {
    notes.push_back(
        Cat("tokenizer_config.json: the tokenizer_class ", config.tokenizer_class,
            " of transformers 5 cuts texts by steps of its own (", StepTypes(config.class_steps),
            "), tokenizer.json by ", StepTypes(parts->steps),
            ": tokenizer.json is followed, as by transformers 4; save_pretrained of transformers 5 "
            "writes a tokenizer.json that has the class's steps"));
  }
  if (!other_steps && !config.byte_level_prefix.has_value() && config.add_prefix_space.has_value() &&
      *config.add_prefix_space != parts->prefixes_space) {
    notes.push_back(Cat("tokenizer_config.json: add_prefix_space is ",
                        *config.add_prefix_space ? "true" : "false",
                        ", and tokenizer.json says the opposite: ", "tokenizer.json is followed"));
  }
  return result;
}

}  // namespace penstock::text
