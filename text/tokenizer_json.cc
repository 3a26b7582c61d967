#include "text/tokenizer_json.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "text/strings.h"
#include "text/utf8.h"

namespace penstock::text {
namespace {

using nlohmann::json;

constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr int kDeepest = 8;  // sequences in sequences
// 262,144 tokens and 580,000 merges, each a list of two, are 2 million values.
constexpr uint64_t kMostValues = 4'000'000;

// `what` goes on with the place (".merges[3]", ": twice") or is a predicate ("is no object").
absl::Status Bad(std::string_view where, std::string_view what) {
  const bool joined = what.starts_with('.') || what.starts_with(':');
  return absl::InvalidArgumentError(Cat(where, joined ? "" : " ", what));
}

// An object of the file, with its place there ("model", "normalizer.normalizers[1]"), and typed fields.
class Section {
 public:
  Section(const json& value, std::string where) : value_(&value), where_(std::move(where)) {}

  const std::string& where() const { return where_; }
  const json& value() const { return *value_; }
  absl::Status CheckObject() const {
    return value_->is_object() ? absl::OkStatus() : Bad(where_, "is no object");
  }
  // Keys that are not known may change what the file means.
  absl::Status OnlyKeys(std::initializer_list<std::string_view> known) const {
    for (const auto& [key, unused] : value_->items()) {
      if (std::find(known.begin(), known.end(), key) == known.end())
        return Bad(where_, Cat("has the key ", Quoted(key), ", which is not served"));
    }
    return absl::OkStatus();
  }
  // Null where the key is absent or null.
  const json* Find(const char* key) const {
    const auto found = value_->find(key);
    return found == value_->end() || found->is_null() ? nullptr : &*found;
  }
  absl::StatusOr<bool> Bool(const char* key, std::optional<bool> absent) const {
    const json* const found = Find(key);
    if (found == nullptr && absent.has_value()) return *absent;
    if (found == nullptr || !found->is_boolean()) return Wrong(key, "true or false");
    return found->get<bool>();
  }
  absl::StatusOr<std::string> String(const char* key) const {
    const json* const found = Find(key);
    if (found == nullptr || !found->is_string()) return Wrong(key, "a text");
    return found->get<std::string>();
  }
  absl::StatusOr<int64_t> Count(const char* key) const {
    const json* const found = Find(key);
    if (found == nullptr || !found->is_number_unsigned() ||
        found->get<uint64_t>() > std::numeric_limits<int32_t>::max())
      return Wrong(key, "a whole number");
    return found->get<int64_t>();
  }
  absl::StatusOr<std::string> OneCharacter(const char* key) const {
    ASSIGN_OR_RETURN(std::string text, String(key));
    if (text.empty() || CharacterBytes(text[0]) != text.size()) return Wrong(key, "one character");
    return text;
  }
  absl::Status Wrong(const char* key, std::string_view wanted) const {
    const char* const is = Find(key) == nullptr ? " is missing; it must be " : " must be ";
    return absl::InvalidArgumentError(Cat(where_, ".", key, is, wanted));
  }
  // The elements of a list of objects.
  absl::StatusOr<std::vector<Section>> List(const char* key) const {
    const json* const found = Find(key);
    if (found == nullptr || !found->is_array()) return Wrong(key, "a list");
    std::vector<Section> sections;
    for (size_t i = 0; i < found->size(); ++i) {
      sections.emplace_back((*found)[i], Cat(where_, ".", key, "[", i, "]"));
      RETURN_IF_ERROR(sections.back().CheckObject());
    }
    return sections;
  }

 private:
  const json* value_;
  std::string where_;
};

absl::Status NotServed(const Section& section, std::string_view type, std::string_view served) {
  return Bad(section.where(), Cat("is of type ", Quoted(type), ", which is not served; served are ", served));
}

// A "Sequence": each of its steps, one level deeper.
template <typename Read, typename To>
absl::Status ReadSteps(const Section& section, const char* key, int depth, Read read, To& to) {
  RETURN_IF_ERROR(section.OnlyKeys({"type", key}));
  if (depth == kDeepest) return Bad(section.where(), "is nested too deep");
  ASSIGN_OR_RETURN(const std::vector<Section> steps, section.List(key));
  for (const Section& step : steps) RETURN_IF_ERROR(read(step, depth + 1, to));
  return absl::OkStatus();
}

// {"String": "..."} or {"Regex": "..."}; `literal` is the text of the former.
absl::StatusOr<Regex> Pattern(const Section& section, std::string* literal) {
  const json* const pattern = section.Find("pattern");
  if (pattern == nullptr || !pattern->is_object() || pattern->size() != 1 || !pattern->begin()->is_string())
    return section.Wrong("pattern", R"({"String": "..."} or {"Regex": "..."})");
  const auto text = pattern->begin()->get<std::string>();
  const std::string& kind = pattern->begin().key();
  if (kind != "String" && kind != "Regex")
    return section.Wrong("pattern", R"({"String": "..."} or {"Regex": "..."})");
  if (kind == "String") *literal = text;
  absl::StatusOr<Regex> regex = kind == "String" ? Regex::Literal(text) : Regex::Compile(text);
  if (!regex.ok()) return Bad(section.where(), Cat(".pattern: ", regex.status().message()));
  return regex;
}

// The pattern as the file has it, once it has been read.
std::string PatternText(const Section& section) {
  return section.Find("pattern")->begin()->get<std::string>();
}

// ---- Normalizer.

absl::Status ReadNormalizer(const Section& section, int depth, TokenizerParts& parts) {
  Normalizer& to = parts.normalizer;
  RETURN_IF_ERROR(section.CheckObject());
  ASSIGN_OR_RETURN(const std::string type, section.String("type"));
  if (type == "Sequence") return ReadSteps(section, "normalizers", depth, ReadNormalizer, parts);
  for (const auto& [name, form] : {std::pair<std::string_view, NormalForm>{"NFC", {true, false}},
                                   {"NFD", {false, false}},
                                   {"NFKC", {true, true}},
                                   {"NFKD", {false, true}}}) {
    if (type != name) continue;
    RETURN_IF_ERROR(section.OnlyKeys({"type"}));
    to.Add(form);
    parts.steps.push_back(type);
    return absl::OkStatus();
  }
  if (type == "Prepend") {
    RETURN_IF_ERROR(section.OnlyKeys({"type", "prepend"}));
    ASSIGN_OR_RETURN(std::string prepend, section.String("prepend"));
    parts.prefixes_space = true;
    parts.steps.push_back(Cat(type, " ", prepend));
    to.Add(PrependText{std::move(prepend)});
  } else if (type == "Replace") {
    RETURN_IF_ERROR(section.OnlyKeys({"type", "pattern", "content"}));
    std::string literal;
    ASSIGN_OR_RETURN(Regex pattern, Pattern(section, &literal));
    ASSIGN_OR_RETURN(std::string with, section.String("content"));
    if (literal.empty() && with.find('$') != std::string::npos)
      return Bad(section.where(), ".content has a $ for an expression, which is not served");
    parts.steps.push_back(Cat(type, " ", PatternText(section), " ", with));
    to.Add(ReplaceText{std::move(pattern), std::move(literal), std::move(with)});
  } else if (type == "Strip") {
    RETURN_IF_ERROR(section.OnlyKeys({"type", "strip_left", "strip_right"}));
    ASSIGN_OR_RETURN(const bool left, section.Bool("strip_left", std::nullopt));
    ASSIGN_OR_RETURN(const bool right, section.Bool("strip_right", std::nullopt));
    to.Add(StripSpace{left, right});
    parts.steps.push_back(type);
  } else if (type == "Lowercase") {
    RETURN_IF_ERROR(section.OnlyKeys({"type"}));
    to.Add(LowerCase{});
    parts.steps.push_back(type);
  } else {
    return NotServed(section, type, "NFC, NFD, NFKC, NFKD, Prepend, Replace, Strip, Lowercase and Sequence");
  }
  return absl::OkStatus();
}

// ---- Pre-tokenizer.

absl::StatusOr<SplitBehavior> Behavior(const Section& section) {
  ASSIGN_OR_RETURN(const std::string name, section.String("behavior"));
  for (const auto& [known, behavior] :
       {std::pair<std::string_view, SplitBehavior>{"Removed", SplitBehavior::kRemoved},
        {"Isolated", SplitBehavior::kIsolated},
        {"MergedWithPrevious", SplitBehavior::kMergedWithPrevious},
        {"MergedWithNext", SplitBehavior::kMergedWithNext},
        {"Contiguous", SplitBehavior::kContiguous}}) {
    if (name == known) return behavior;
  }
  return section.Wrong("behavior", "Removed, Isolated, MergedWithPrevious, MergedWithNext or Contiguous");
}

absl::StatusOr<Metaspace> ReadMetaspace(const Section& section) {
  RETURN_IF_ERROR(
      section.OnlyKeys({"type", "replacement", "prepend_scheme", "split", "add_prefix_space", "str_rep"}));
  Metaspace metaspace;
  ASSIGN_OR_RETURN(metaspace.replacement, section.OneCharacter("replacement"));
  ASSIGN_OR_RETURN(metaspace.split, section.Bool("split", true));
  if (section.Find("prepend_scheme") != nullptr) {
    ASSIGN_OR_RETURN(const std::string scheme, section.String("prepend_scheme"));
    if (scheme == "first") {
      metaspace.prepend = Metaspace::Prepend::kFirst;
    } else if (scheme == "never") {
      metaspace.prepend = Metaspace::Prepend::kNever;
    } else if (scheme != "always") {
      return section.Wrong("prepend_scheme", "first, never or always");
    }
  }
  ASSIGN_OR_RETURN(const bool add_prefix_space, section.Bool("add_prefix_space", true));
  if (!add_prefix_space && metaspace.prepend != Metaspace::Prepend::kNever)
    return Bad(section.where(), ".add_prefix_space is false and does not agree with prepend_scheme");
  return metaspace;
}

// What a step of the pre-tokenizer is read into.
struct PreTokenizerTo {
  TokenizerParts& parts;
  std::optional<bool> byte_level_prefix;
};

absl::Status ReadPreTokenizer(const Section& section, int depth, PreTokenizerTo& into) {
  TokenizerParts& to = into.parts;
  RETURN_IF_ERROR(section.CheckObject());
  ASSIGN_OR_RETURN(const std::string type, section.String("type"));
  if (type == "Sequence") return ReadSteps(section, "pretokenizers", depth, ReadPreTokenizer, into);
  if (to.model.byte_level)
    return Bad(section.where(), Cat("is ", Quoted(type), " behind ByteLevel, which must be the last"));
  const auto add_pattern = [&](std::string_view pattern, SplitBehavior behavior) -> absl::Status {
    ASSIGN_OR_RETURN(Regex regex, Regex::Compile(pattern));
    to.pre_tokenizer.Add(SplitText{std::move(regex), behavior, false});
    return absl::OkStatus();
  };
  if (type == "Split") {
    RETURN_IF_ERROR(section.OnlyKeys({"type", "pattern", "behavior", "invert"}));
    std::string literal;
    ASSIGN_OR_RETURN(Regex pattern, Pattern(section, &literal));
    ASSIGN_OR_RETURN(const SplitBehavior behavior, Behavior(section));
    ASSIGN_OR_RETURN(const bool invert, section.Bool("invert", std::nullopt));
    to.pre_tokenizer.Add(SplitText{std::move(pattern), behavior, invert});
    ASSIGN_OR_RETURN(const std::string name, section.String("behavior"));
    to.steps.push_back(Cat(type, " ", PatternText(section), " ", name, invert ? " inverted" : ""));
  } else if (type == "ByteLevel") {
    RETURN_IF_ERROR(section.OnlyKeys({"type", "add_prefix_space", "trim_offsets", "use_regex"}));
    ASSIGN_OR_RETURN(const bool says, section.Bool("add_prefix_space", std::nullopt));
    const bool prefix = into.byte_level_prefix.value_or(says);
    to.byte_level_prefix_changed = prefix != says;
    ASSIGN_OR_RETURN(const bool use_regex, section.Bool("use_regex", true));
    if (prefix) to.pre_tokenizer.Add(PrefixSpace{});
    to.prefixes_space = to.prefixes_space || prefix;
    if (use_regex) RETURN_IF_ERROR(add_pattern(kGpt2Pattern, SplitBehavior::kIsolated));
    to.model.byte_level = true;
    to.steps.push_back(use_regex ? "ByteLevel words" : type);
  } else if (type == "Metaspace") {
    ASSIGN_OR_RETURN(Metaspace metaspace, ReadMetaspace(section));
    to.prefixes_space = to.prefixes_space || metaspace.prepend != Metaspace::Prepend::kNever;
    to.steps.push_back(Cat(type,
                           metaspace.prepend == Metaspace::Prepend::kFirst   ? " first"
                           : metaspace.prepend == Metaspace::Prepend::kNever ? " never"
                                                                             : " always",
                           metaspace.split ? " split" : ""));
    to.pre_tokenizer.Add(std::move(metaspace));
  } else if (type == "Digits") {
    RETURN_IF_ERROR(section.OnlyKeys({"type", "individual_digits"}));
    ASSIGN_OR_RETURN(const bool each, section.Bool("individual_digits", std::nullopt));
    to.steps.push_back(each ? "Digits each" : type);
    RETURN_IF_ERROR(add_pattern(R"(\p{N})", each ? SplitBehavior::kIsolated : SplitBehavior::kContiguous));
  } else {
    return NotServed(section, type, "ByteLevel, Split, Digits, Metaspace and Sequence");
  }
  return absl::OkStatus();
}

// ---- Model.

absl::Status ReadModel(const Section& section, BpeModel& to) {
  RETURN_IF_ERROR(section.CheckObject());
  if (section.Find("type") != nullptr || section.Find("merges") == nullptr) {
    ASSIGN_OR_RETURN(const std::string type, section.String("type"));
    if (type != "BPE") return NotServed(section, type, "BPE");
  }
  RETURN_IF_ERROR(
      section.OnlyKeys({"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
                        "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"}));
  if (const json* const dropout = section.Find("dropout");
      dropout != nullptr && (!dropout->is_number() || dropout->get<double>() != 0))
    return Bad(section.where(),
               ".dropout is not 0, which is not served: the same text would have other tokens "
               "each time");
  for (const char* const key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (section.Find(key) == nullptr) continue;
    ASSIGN_OR_RETURN(const std::string affix, section.String(key));
    if (!affix.empty())
      return Bad(section.where(), Cat(".", key, " is ", Quoted(affix), ", which is not served"));
  }
  if (section.Find("unk_token") != nullptr) {
    ASSIGN_OR_RETURN(to.unk_token, section.String("unk_token"));
  }
  ASSIGN_OR_RETURN(to.fuse_unk, section.Bool("fuse_unk", false));
  ASSIGN_OR_RETURN(to.byte_fallback, section.Bool("byte_fallback", false));
  ASSIGN_OR_RETURN(to.ignore_merges, section.Bool("ignore_merges", false));

  const json* const vocab = section.Find("vocab");
  if (vocab == nullptr || !vocab->is_object())
    return section.Wrong("vocab", "an object of tokens and their ids");
  // Ids are places in tables: they may have gaps, not abysses.
  const uint64_t most = 4 * vocab->size() + 65536;
  absl::flat_hash_map<uint64_t, const std::string*> by_id;
  to.vocab.reserve(vocab->size());
  for (auto entry = vocab->begin(); entry != vocab->end(); ++entry) {
    const std::string& token = entry.key();
    if (!entry->is_number_unsigned() || entry->get<uint64_t>() >= most)
      return Bad(section.where(),
                 Cat(".vocab: the id of ", Quoted(token), " is no whole number below ", most));
    const auto id = entry->get<uint64_t>();
    const auto [there, made] = by_id.emplace(id, &token);
    if (!made)
      return Bad(section.where(),
                 Cat(".vocab: ", Quoted(*there->second), " and ", Quoted(token), " have one id, ", id));
    to.vocab.emplace_back(token, static_cast<int32_t>(id));
  }

  const json* const merges = section.Find("merges");
  if (merges == nullptr || !merges->is_array()) return section.Wrong("merges", "a list");
  to.merges.reserve(merges->size());
  for (size_t i = 0; i < merges->size(); ++i) {
    const json& merge = (*merges)[i];
    if (merge.is_string()) {
      const auto& text = merge.get_ref<const std::string&>();
      if (text.starts_with("#version")) continue;
      const size_t space = text.find(' ');
      if (space != std::string::npos && text.find(' ', space + 1) == std::string::npos) {
        to.merges.emplace_back(text.substr(0, space), text.substr(space + 1));
        continue;
      }
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      to.merges.emplace_back(merge[0].get<std::string>(), merge[1].get<std::string>());
      continue;
    }
    return Bad(section.where(), Cat(".merges[", i, R"(] is neither "a b" nor ["a", "b"])"));
  }
  return absl::OkStatus();
}

// ---- Added tokens.

absl::Status ReadAddedTokens(const Section& root, const BpeModel& model, std::vector<AddedToken>& to) {
  if (root.Find("added_tokens") == nullptr) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::vector<Section> list, root.List("added_tokens"));
  TextMap<std::string_view, int32_t> ids;
  for (const auto& [token, id] : model.vocab) ids.emplace(token, id);
  int64_t next = static_cast<int64_t>(model.vocab.size());
  absl::flat_hash_set<std::string> seen;
  to.reserve(list.size());  // `ids` names their contents
  for (const Section& section : list) {
    RETURN_IF_ERROR(
        section.OnlyKeys({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"}));
    AddedToken token;
    ASSIGN_OR_RETURN(token.content, section.String("content"));
    ASSIGN_OR_RETURN(const int64_t id, section.Count("id"));
    ASSIGN_OR_RETURN(token.single_word, section.Bool("single_word", std::nullopt));
    ASSIGN_OR_RETURN(token.lstrip, section.Bool("lstrip", std::nullopt));
    ASSIGN_OR_RETURN(token.rstrip, section.Bool("rstrip", std::nullopt));
    ASSIGN_OR_RETURN(token.normalized, section.Bool("normalized", std::nullopt));
    ASSIGN_OR_RETURN(token.special, section.Bool("special", std::nullopt));
    if (token.content.empty()) return section.Wrong("content", "a text that is not empty");
    if (!seen.insert(token.content).second)
      return Bad(section.where(), Cat(": ", Quoted(token.content), " is added twice"));
    // tokenizers takes the id of the vocabulary, or the next that is free, whatever the file says.
    const auto known = ids.find(token.content);
    const int64_t given = known != ids.end() ? known->second : next;
    if (known == ids.end()) ++next;
    if (given != id)
      return Bad(section.where(), Cat(": ", Quoted(token.content), " has the id ", id,
                                      ", and Hugging Face's tokenizers gives it ", given,
                                      ", after the vocabulary and the tokens before it"));
    token.id = static_cast<int32_t>(given);
    to.push_back(std::move(token));
  }
  return absl::OkStatus();
}

// ---- Post-processor.

absl::Status ReadTemplate(const Section& section, TokenizerParts& to) {
  RETURN_IF_ERROR(section.OnlyKeys({"type", "single", "pair", "special_tokens"}));
  ASSIGN_OR_RETURN(const std::vector<Section> pieces, section.List("single"));
  const json* const specials = section.Find("special_tokens");
  if (specials == nullptr || !specials->is_object()) return section.Wrong("special_tokens", "an object");
  std::vector<int32_t> before, behind;
  bool text_seen = false;
  for (const Section& piece : pieces) {
    const bool text = piece.Find("Sequence") != nullptr;
    RETURN_IF_ERROR(piece.OnlyKeys({text ? "Sequence" : "SpecialToken"}));
    const char* const key = text ? "Sequence" : "SpecialToken";
    const Section inside(piece.Find(key) == nullptr ? piece.value() : *piece.Find(key),
                         Cat(piece.where(), ".", key));
    RETURN_IF_ERROR(inside.CheckObject());
    ASSIGN_OR_RETURN(const std::string id, inside.String("id"));
    if (text) {
      if (id != "A" || text_seen)
        return Bad(inside.where(), "is not the text, or is there twice, which is not served");
      text_seen = true;
      continue;
    }
    const auto special = specials->find(id);
    if (special == specials->end() || !special->is_object())
      return Bad(inside.where(), Cat("is ", Quoted(id), ", which special_tokens has not"));
    const auto ids = special->find("ids");
    if (ids == special->end() || !ids->is_array())
      return Bad(section.where(), Cat(".special_tokens: ", Quoted(id), " has no list of ids"));
    for (const json& each : *ids) {
      if (!each.is_number_unsigned() || each.get<uint64_t>() > std::numeric_limits<int32_t>::max())
        return Bad(section.where(), Cat(".special_tokens: an id of ", Quoted(id), " is no whole number"));
      (text_seen ? behind : before).push_back(static_cast<int32_t>(each.get<uint64_t>()));
    }
  }
  if (!text_seen) return Bad(section.where(), ".single leaves the text out, which is not served");
  to.prefix.insert(to.prefix.begin(), before.begin(), before.end());
  to.suffix.insert(to.suffix.end(), behind.begin(), behind.end());
  return absl::OkStatus();
}

absl::Status ReadPostProcessor(const Section& section, int depth, TokenizerParts& to) {
  RETURN_IF_ERROR(section.CheckObject());
  ASSIGN_OR_RETURN(const std::string type, section.String("type"));
  if (type == "Sequence") return ReadSteps(section, "processors", depth, ReadPostProcessor, to);
  if (type == "TemplateProcessing") return ReadTemplate(section, to);
  if (type == "ByteLevel") return absl::OkStatus();  // it trims offsets
  return NotServed(section, type, "TemplateProcessing, ByteLevel and Sequence");
}

// ---- Decoder.

struct DecoderOrder {
  bool fallback = false, fused = false, stripped = false;
};

absl::Status ReadDecoder(const Section& section, int depth, DecoderOrder& order, Decoder& to) {
  RETURN_IF_ERROR(section.CheckObject());
  ASSIGN_OR_RETURN(const std::string type, section.String("type"));
  if (type == "Sequence") {
    const auto read = [&order](const Section& step, int deeper, Decoder& decoder) {
      return ReadDecoder(step, deeper, order, decoder);
    };
    RETURN_IF_ERROR(ReadSteps(section, "decoders", depth, read, to));
    if (to.kind == Decoder::Kind::kNone) to.kind = Decoder::Kind::kSteps;
    return absl::OkStatus();
  }
  const bool per_token = type == "Replace" || type == "Metaspace" || (type == "Strip" && !order.fused);
  const bool late = order.fallback || order.fused;
  if (to.kind == Decoder::Kind::kByteLevel || (type == "ByteLevel" && to.kind != Decoder::Kind::kNone) ||
      (per_token && late) || (type == "ByteFallback" && late) || (type == "Strip" && order.stripped))
    return Bad(section.where(),
               Cat("is ", Quoted(type), ", which is not served behind what stands before it"));
  if (type == "ByteLevel") {
    RETURN_IF_ERROR(section.OnlyKeys({"type", "add_prefix_space", "trim_offsets", "use_regex"}));
    to.kind = Decoder::Kind::kByteLevel;
    return absl::OkStatus();
  }
  to.kind = Decoder::Kind::kSteps;
  if (type == "Replace") {
    RETURN_IF_ERROR(section.OnlyKeys({"type", "pattern", "content"}));
    DecoderReplace replace;
    ASSIGN_OR_RETURN(const Regex unused, Pattern(section, &replace.from));
    if (replace.from.empty())
      return section.Wrong("pattern", R"({"String": "..."}; expressions are not served here)");
    ASSIGN_OR_RETURN(replace.to, section.String("content"));
    to.token_steps.emplace_back(std::move(replace));
  } else if (type == "Metaspace") {
    ASSIGN_OR_RETURN(const Metaspace metaspace, ReadMetaspace(section));
    to.token_steps.emplace_back(
        DecoderMetaspace{metaspace.replacement, metaspace.prepend != Metaspace::Prepend::kNever});
  } else if (type == "ByteFallback") {
    RETURN_IF_ERROR(section.OnlyKeys({"type"}));
    to.byte_fallback = order.fallback = true;
  } else if (type == "Fuse") {
    RETURN_IF_ERROR(section.OnlyKeys({"type"}));
    order.fused = true;
  } else if (type == "Strip") {
    RETURN_IF_ERROR(section.OnlyKeys({"type", "content", "start", "stop"}));
    DecoderStrip strip;
    ASSIGN_OR_RETURN(strip.content, section.OneCharacter("content"));
    ASSIGN_OR_RETURN(strip.start, section.Count("start"));
    ASSIGN_OR_RETURN(strip.stop, section.Count("stop"));
    if (!order.fused) {
      to.token_steps.emplace_back(std::move(strip));
      return absl::OkStatus();
    }
    if (strip.stop != 0) return section.Wrong("stop", "0; a strip at the end of the text is not served");
    order.stripped = true;
    to.strip = strip.content;
    to.strip_start = strip.start;
  } else {
    return NotServed(section, type, "ByteLevel, Replace, ByteFallback, Fuse, Strip, Metaspace and Sequence");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TokenizerParts> ParseTokenizerJson(std::string_view text,
                                                  std::optional<bool> byte_level_prefix) {
  ASSIGN_OR_RETURN(const json parsed, ParseJson(text, "", {.max_values = kMostValues}));
  const Section root(parsed, "the file");
  RETURN_IF_ERROR(root.CheckObject());
  RETURN_IF_ERROR(root.OnlyKeys({"version", "truncation", "padding", "added_tokens", "normalizer",
                                 "pre_tokenizer", "post_processor", "decoder", "model"}));
  if (const json* const version = root.Find("version");
      version != nullptr && (!version->is_string() || version->get_ref<const std::string&>() != "1.0"))
    return root.Wrong("version", R"("1.0")");
  TokenizerParts parts;
  const json* const model = root.Find("model");
  if (model == nullptr) return absl::InvalidArgumentError("has no model");
  RETURN_IF_ERROR(ReadModel(Section(*model, "model"), parts.model));
  RETURN_IF_ERROR(ReadAddedTokens(root, parts.model, parts.added_tokens));
  if (const json* const normalizer = root.Find("normalizer"))
    RETURN_IF_ERROR(ReadNormalizer(Section(*normalizer, "normalizer"), 0, parts));
  if (const json* const pre_tokenizer = root.Find("pre_tokenizer")) {
    PreTokenizerTo into{parts, byte_level_prefix};
    RETURN_IF_ERROR(ReadPreTokenizer(Section(*pre_tokenizer, "pre_tokenizer"), 0, into));
  }
  if (const json* const post_processor = root.Find("post_processor"))
    RETURN_IF_ERROR(ReadPostProcessor(Section(*post_processor, "post_processor"), 0, parts));
  if (const json* const decoder = root.Find("decoder")) {
    DecoderOrder order;
    RETURN_IF_ERROR(ReadDecoder(Section(*decoder, "decoder"), 0, order, parts.decoder));
  }
  return parts;
}

}  // namespace penstock::text
