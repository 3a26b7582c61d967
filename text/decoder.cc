#include "text/decoder.h"

#include "absl/strings/ascii.h"
#include "text/bpe.h"
#include "text/strings.h"
#include "text/utf8.h"

namespace penstock::text {
namespace {

int HexDigit(char c) {
  const auto u = static_cast<unsigned char>(c);
  if (absl::ascii_isdigit(u)) return u - '0';
  if (absl::ascii_isxdigit(u)) return absl::ascii_tolower(u) - 'a' + 10;
  return -1;
}

}  // namespace

std::string Decoder::TextOf(std::string_view token, bool first) const {
  if (kind == Kind::kByteLevel) {
    auto bytes = BytesOfSpelling(token);
    return bytes.has_value() ? *std::move(bytes) : std::string(token);
  }
  std::string text(token);
  for (const auto& step : token_steps) {
    if (const auto* replace = std::get_if<DecoderReplace>(&step)) {
      text = ReplacedAll(text, replace->from, replace->to);
    } else if (const auto* metaspace = std::get_if<DecoderMetaspace>(&step)) {
      const bool drop = first && metaspace->drop_in_first;
      text = ReplacedAll(text, metaspace->replacement, drop ? "" : " ");
    } else {
      const auto& cut = std::get<DecoderStrip>(step);
      std::string_view rest = text;
      for (int64_t i = 0; i < cut.start && RemovedPrefix(rest, cut.content); ++i) continue;
      for (int64_t i = 0; i < cut.stop && rest.ends_with(cut.content); ++i)
        rest.remove_suffix(cut.content.size());
      text = std::string(rest);
    }
  }
  return text;
}

int Decoder::ByteOf(std::string_view text) const {
  if (!byte_fallback || text.size() != 6 || !text.starts_with("<0x") || text.back() != '>') return -1;
  // A sign is no digit here; Hugging Face's parser takes "+" as one.
  const int high = text[3] == '+' ? 0 : HexDigit(text[3]);
  const int low = HexDigit(text[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

void DecodedText::Emit(std::string_view text, std::string& out) {
  while (to_strip_ > 0 && !text.empty()) {
    if (!RemovedPrefix(text, decoder_->strip)) to_strip_ = 1;
    --to_strip_;
  }
  out.append(text);
}

void DecodedText::EndOfBytes(std::string& out) {
  if (pending_.empty()) return;
  std::string text;
  if (decoder_->kind == Decoder::Kind::kByteLevel) {
    AppendRepaired(pending_, text);
  } else if (FindBroken(pending_) == std::string_view::npos) {
    text = pending_;
  } else {
    for (size_t i = 0; i < pending_.size(); ++i) text.append(kReplacementCharacter);
  }
  pending_.clear();
  Emit(text, out);
}

void DecodedText::Take(std::string_view text, std::string& out) {
  const bool first = first_;
  first_ = false;
  if (decoder_->kind == Decoder::Kind::kNone) {
    if (!first) out.push_back(' ');
    out.append(text);
    return;
  }
  const bool byte_level = decoder_->kind == Decoder::Kind::kByteLevel;
  if (byte_level) {
    if (pending_.empty() && FindBroken(text) == std::string_view::npos) {
      out.append(text);
      return;
    }
    pending_.append(text);
  } else {
    const int byte = decoder_->ByteOf(text);
    if (byte < 0) {
      EndOfBytes(out);
      Emit(text, out);
      return;
    }
    pending_.push_back(static_cast<char>(byte));
    if (whole_) return;
  }
  // What is whole goes out, what may still become a character stays.
  std::string_view rest = pending_;
  std::string ready;
  while (!rest.empty()) {
    const Utf8Character character = FirstCharacter(rest);
    if (character.kind == Utf8Character::kCutShort) break;
    if (character.kind == Utf8Character::kWhole) {
      ready.append(rest.substr(0, character.bytes));
    } else {
      for (size_t i = 0; i < (byte_level ? 1 : character.bytes); ++i) ready.append(kReplacementCharacter);
    }
    rest.remove_prefix(character.bytes);
  }
  pending_.erase(0, pending_.size() - rest.size());
  Emit(ready, out);
}

void DecodedText::Finish(std::string& out) { EndOfBytes(out); }

}  // namespace penstock::text
