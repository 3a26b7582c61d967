#include "text/tokenizer.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <mutex>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/directory.h"
#include "base/json.h"
#include "base/small_file.h"
#include "base/status_macros.h"
#include "text/foreign_tokenizer.h"
#include "text/strings.h"
#include "text/tokenizer_impl.h"
#include "text/tokenizer_json.h"
#include "text/utf8.h"

namespace penstock::text {
namespace {

using nlohmann::json;

// Vocabularies of 262,144 tokens make a tokenizer.json of 33 MB.
constexpr uint64_t kLongestTokenizer = uint64_t{128} << 20;

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer::Impl>> Tokenizer::Impl::Create(std::string_view text,
                                                                         const TokenizerConfig& config) {
  ASSIGN_OR_RETURN(TokenizerParts parts, ParseTokenizerJson(text, config.byte_level_prefix));
  int32_t largest = -1;
  for (const auto& [unused, id] : parts.model.vocab) largest = std::max(largest, id);
  for (const AddedToken& token : parts.added_tokens) largest = std::max(largest, token.id);
  AddedByConfig by_config = AddTokens(config, &parts);
  ASSIGN_OR_RETURN(Bpe bpe, Bpe::Create(parts.model));
  auto impl = std::make_unique<Impl>(std::move(bpe));
  impl->base_tokens = static_cast<size_t>(int64_t{largest} + 1);
  impl->notes = std::move(by_config.notes);
  impl->config_counts = by_config.any || parts.byte_level_prefix_changed;
  impl->normalizer = std::move(parts.normalizer);
  impl->pre_tokenizer = std::move(parts.pre_tokenizer);
  impl->decoder = std::move(parts.decoder);
  impl->prefix = std::move(parts.prefix);
  impl->suffix = std::move(parts.suffix);
  const auto add = [&](const std::string& token, int32_t id) {
    if (impl->tokens.size() <= static_cast<size_t>(id)) impl->tokens.resize(static_cast<size_t>(id) + 1);
    impl->tokens[static_cast<size_t>(id)] = token;
    impl->ids.emplace(token, id);
  };
  for (const auto& [token, id] : parts.model.vocab) add(token, id);
  for (const AddedToken& token : parts.added_tokens) add(token.content, token.id);
  for (const auto* fixed : {&impl->prefix, &impl->suffix}) {
    for (const int32_t id : *fixed) {
      if (static_cast<size_t>(id) >= impl->tokens.size())
        return absl::InvalidArgumentError(Cat("post_processor adds the id ", id, ", which no token has"));
    }
  }
  impl->special.resize(impl->tokens.size());
  // Special tokens come first where two are spelled alike.
  Borrowed work(*impl);
  for (const bool special : {true, false}) {
    for (const AddedToken& token : parts.added_tokens) {
      if (token.special != special) continue;
      impl->special[static_cast<size_t>(token.id)] = special;
      if (!token.normalized) {
        impl->raw_tokens.Add(token, token.content);
        continue;
      }
      std::string spelling = token.content;
      bool from_start = true;
      RETURN_IF_ERROR(impl->normalizer.Apply(spelling, (*work).scratch, &from_start));
      if (spelling.empty())
        return absl::InvalidArgumentError(
            Cat("added_tokens: the normalizer leaves nothing of ", Quoted(token.content)));
      impl->normalized_tokens.Add(token, spelling);
    }
  }
  for (const std::string& token : impl->tokens)
    impl->texts.push_back(impl->decoder.TextOf(token, /*first=*/false));
  const auto id_of = [&](const std::optional<std::string>& token) -> std::optional<int32_t> {
    if (!token.has_value()) return std::nullopt;
    const auto found = impl->ids.find(*token);
    return found == impl->ids.end() ? std::nullopt : std::optional<int32_t>(found->second);
  };
  impl->special_ids.bos = id_of(config.bos);
  impl->special_ids.unk = id_of(config.unk);
  impl->special_ids.pad = id_of(config.pad);
  if (const std::optional<int32_t> eos = id_of(config.eos)) impl->special_ids.eos.push_back(*eos);
  return impl;
}

absl::Status Tokenizer::Impl::EncodePiece(std::string_view piece, bool at_start, Workspace& work,
                                          std::vector<int32_t>& to) const {
  std::string_view normal = piece;
  if (!normalizer.empty()) {
    work.normalized.assign(piece);
    RETURN_IF_ERROR(normalizer.Apply(work.normalized, work.scratch, &at_start));
    normal = work.normalized;
  }
  AddedTokens::Scan scan(normalized_tokens, normal, work.scratch);
  AddedTokens::Piece found;
  while (true) {
    ASSIGN_OR_RETURN(const bool more, scan.Next(found));
    if (!more) return absl::OkStatus();
    if (found.id >= 0) {
      to.push_back(found.id);
      continue;
    }
    RETURN_IF_ERROR(pre_tokenizer.Run(normal.substr(found.begin, found.end - found.begin),
                                      at_start && found.begin == 0, work.scratch,
                                      [&](std::string_view word) { return EncodeWord(word, work, to); }));
  }
}

absl::Status Tokenizer::Impl::NumberSpecialIds(const std::string& path, const json& config) {
  const auto ids_of = [&](const char* key) -> absl::StatusOr<std::vector<int32_t>> {
    std::vector<int32_t> numbers;
    const auto found = config.find(key);
    if (found == config.end() || found->is_null()) return numbers;
    const json list = found->is_array() ? *found : json::array({*found});
    for (const json& number : list) {
      if (!number.is_number_unsigned() || number.get<uint64_t>() > std::numeric_limits<int32_t>::max())
        return absl::InvalidArgumentError(Cat(path, ": ", key, " is neither an id nor a list of ids"));
      numbers.push_back(static_cast<int32_t>(number.get<uint64_t>()));
    }
    return numbers;
  };
  for (const auto& [key, to] :
       {std::pair<const char*, std::optional<int32_t>*>{"bos_token_id", &special_ids.bos},
        {"pad_token_id", &special_ids.pad}}) {
    ASSIGN_OR_RETURN(const std::vector<int32_t> numbers, ids_of(key));
    if (!to->has_value() && !numbers.empty()) *to = numbers.front();
  }
  ASSIGN_OR_RETURN(const std::vector<int32_t> eos, ids_of("eos_token_id"));
  for (const int32_t id : eos) {
    if (std::find(special_ids.eos.begin(), special_ids.eos.end(), id) == special_ids.eos.end())
      special_ids.eos.push_back(id);
  }
  return absl::OkStatus();
}

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Open(const std::string& path) {
  std::filesystem::path file = path;
  ASSIGN_OR_RETURN(const bool directory, IsDirectory(path));
  if (directory) file /= "tokenizer.json";
  std::string foreign = DescribeForeignTokenizerFile(file.string());
  if (directory) {
    ASSIGN_OR_RETURN(foreign, DescribeForeignTokenizer(path));
  }
  if (!foreign.empty()) return absl::InvalidArgumentError(Cat(path, ": ", foreign));
  ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(file.string(), kLongestTokenizer));
  const std::string beside = file.parent_path().string();
  ASSIGN_OR_RETURN(const TokenizerConfig config, ReadTokenizerConfig(beside));
  absl::StatusOr<std::unique_ptr<Impl>> impl = Impl::Create(text, config);
  if (!impl.ok())
    return absl::Status(impl.status().code(), Cat(file.string(), ": ", impl.status().message()));
  const std::string generation = (file.parent_path() / "generation_config.json").string();
  const absl::StatusOr<json> ids = ReadJsonObject(generation);
  if (ids.ok()) {
    RETURN_IF_ERROR((*impl)->NumberSpecialIds(generation, *ids));
  } else if (!absl::IsNotFound(ids.status())) {
    return ids.status();
  }
  return std::unique_ptr<Tokenizer>(new Tokenizer(*std::move(impl)));
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Parse(std::string_view text) {
  absl::StatusOr<std::unique_ptr<Impl>> impl = Impl::Create(text, {});
  if (!impl.ok()) return absl::Status(impl.status().code(), Cat("tokenizer.json: ", impl.status().message()));
  return std::unique_ptr<Tokenizer>(new Tokenizer(*std::move(impl)));
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::Encode(std::string_view text,
                                                       const EncodeOptions& options) const {
  std::vector<int32_t> ids;
  RETURN_IF_ERROR(Append(text, options, ids));
  return ids;
}

absl::Status Tokenizer::Append(std::string_view text, const EncodeOptions& options,
                               std::vector<int32_t>& ids) const {
  if (text.size() > impl_->limits.text)
    return Impl::TooLong(Cat("a text of ", text.size(), " bytes"), impl_->limits.text);
  std::string repaired;
  if (const size_t broken = FindBroken(text); broken != std::string_view::npos) {
    if (!options.replace_broken_utf8)
      return absl::InvalidArgumentError(
          Cat("the text is no UTF-8 at byte ", broken, " (0x",
              absl::Hex(static_cast<unsigned char>(text[broken]), absl::kZeroPad2),
              "); convert it, or ask for U+FFFD in its place"));
    AppendRepaired(text, repaired);
    text = repaired;
  }
  const size_t before = ids.size();
  const auto encode = [&]() -> absl::Status {
    Impl::Borrowed work(*impl_);
    if (options.add_special_tokens) ids.insert(ids.end(), impl_->prefix.begin(), impl_->prefix.end());
    AddedTokens::Scan scan(impl_->raw_tokens, text, (*work).scratch);
    AddedTokens::Piece piece;
    while (true) {
      ASSIGN_OR_RETURN(const bool more, scan.Next(piece));
      if (!more) break;
      if (piece.id >= 0) {
        ids.push_back(piece.id);
      } else if (piece.end > piece.begin) {
        RETURN_IF_ERROR(impl_->EncodePiece(text.substr(piece.begin, piece.end - piece.begin),
                                           piece.begin == 0, *work, ids));
      }
    }
    if (options.add_special_tokens) ids.insert(ids.end(), impl_->suffix.begin(), impl_->suffix.end());
    return absl::OkStatus();
  };
  absl::Status done = encode();
  if (!done.ok()) ids.resize(before);
  return done;
}

namespace {

// The ids that decoding sees.
bool IsShown(const std::vector<std::string>& tokens, const std::vector<bool>& special, int32_t id,
             bool skip) {
  const auto at = static_cast<size_t>(id);
  return id >= 0 && at < tokens.size() && !tokens[at].empty() && !(skip && special[at]);
}

}  // namespace

std::string Tokenizer::Decode(std::span<const int32_t> ids, bool skip_special_tokens) const {
  DecodedText decoded(impl_->decoder, /*whole=*/true);
  std::string text;
  for (const int32_t id : ids) {
    if (!IsShown(impl_->tokens, impl_->special, id, skip_special_tokens)) continue;
    const auto at = static_cast<size_t>(id);
    decoded.Take(decoded.first() ? impl_->decoder.TextOf(impl_->tokens[at], true) : impl_->texts[at], text);
  }
  decoded.Finish(text);
  return text;
}

void Tokenizer::LimitMemory(uint64_t bytes) {
  // A text stands twice and has up to 4 bytes of ids for each of its own; of a record the JSON's value and
  // the places of its ids are added, of a word the symbols and the heap of their merges.
  const auto within = [&](uint64_t share, size_t least) {
    return std::clamp<uint64_t>(bytes / share, least, size_t{1} << 30);
  };
  impl_->limits = {.text = within(8, 1 << 20),
                   .record = within(32, 1 << 20),
                   .begun = within(16, 1 << 20),
                   .word = within(64, 1 << 18)};
}

const TextLimits& Tokenizer::limits() const { return impl_->limits; }

int32_t Tokenizer::vocab_size() const { return static_cast<int32_t>(impl_->tokens.size()); }

std::optional<int32_t> Tokenizer::IdOf(std::string_view token) const {
  const auto found = impl_->ids.find(token);
  return found == impl_->ids.end() ? std::nullopt : std::optional<int32_t>(found->second);
}

std::string Tokenizer::TokenOf(int32_t id) const {
  return id >= 0 && static_cast<size_t>(id) < impl_->tokens.size() ? impl_->tokens[static_cast<size_t>(id)]
                                                                   : "";
}

std::string Tokenizer::BytesOf(int32_t id) const {
  if (id < 0 || static_cast<size_t>(id) >= impl_->texts.size()) return "";
  const std::string& text = impl_->texts[static_cast<size_t>(id)];
  const int byte = impl_->decoder.ByteOf(text);
  return byte < 0 ? text : std::string(1, static_cast<char>(byte));
}

bool Tokenizer::IsSpecial(int32_t id) const {
  return id >= 0 && static_cast<size_t>(id) < impl_->special.size() &&
         impl_->special[static_cast<size_t>(id)];
}

int32_t Tokenizer::base_vocab_size() const { return static_cast<int32_t>(impl_->base_tokens); }

bool Tokenizer::config_counts() const { return impl_->config_counts; }

const std::vector<std::string>& Tokenizer::notes() const { return impl_->notes; }

const SpecialIds& Tokenizer::special_ids() const { return impl_->special_ids; }

struct TextDecoder::Impl {
  const Tokenizer::Impl* tokenizer;
  bool skip_special_tokens;
  DecodedText decoded;
};

TextDecoder::TextDecoder(const Tokenizer& tokenizer, bool skip_special_tokens)
    : impl_(new Impl{tokenizer.impl_.get(), skip_special_tokens,
                     DecodedText(tokenizer.impl_->decoder, /*whole=*/false)}) {}
TextDecoder::~TextDecoder() = default;

std::string TextDecoder::Push(int32_t id) {
  std::string text;
  const Tokenizer::Impl& tokenizer = *impl_->tokenizer;
  if (!IsShown(tokenizer.tokens, tokenizer.special, id, impl_->skip_special_tokens)) return text;
  const auto at = static_cast<size_t>(id);
  impl_->decoded.Take(
      impl_->decoded.first() ? tokenizer.decoder.TextOf(tokenizer.tokens[at], true) : tokenizer.texts[at],
      text);
  return text;
}

std::string TextDecoder::Finish() {
  std::string text;
  impl_->decoded.Finish(text);
  impl_->decoded = DecodedText(impl_->tokenizer->decoder, /*whole=*/false);
  return text;
}

}  // namespace penstock::text
