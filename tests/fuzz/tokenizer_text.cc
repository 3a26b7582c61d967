// Texts through two tokenizers, of bytes and of characters: encoded at once and in parts, decoded at
// once and token by token.
// Input: any bytes, as a text and as ids.
#include <algorithm>
#include <string>
#include <vector>

#include "tests/fuzz/fuzz.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

namespace {

using penstock::text::TextDecoder;
using penstock::text::Tokenizer;

// All bytes, as tokens of their own, and a few merges.
std::string OfBytes() {
  std::string vocab;
  int id = 0;
  const auto add = [&](const std::string& token) {
    const bool escaped = token == "\"" || token == "\\";
    vocab += (vocab.empty() ? "\"" : ",\"") + std::string(escaped ? "\\" : "") + token +
             "\":" + std::to_string(id++);
  };
  char32_t next = 0x100;
  for (char32_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    std::string token;
    penstock::text::AppendCharacter(printable ? byte : next++, token);
    add(token);
  }
  for (const char* const merged : {"\xC4\xA0"
                                   "a",
                                   "aa", "ab", "aab"})
    add(merged);
  return R"({"added_tokens":[{"id":260,"content":"<s>","single_word":true,"lstrip":true,"rstrip":true,"normalized":false,"special":true}],
    "pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":"(?i:'s|'t)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"},"behavior":"Isolated","invert":false},
    {"type":"ByteLevel","add_prefix_space":false,"use_regex":false}]},"decoder":{"type":"ByteLevel"},
    "model":{"type":"BPE","vocab":{)" +
         vocab + R"(},"merges":["Ġ a","a a","a b","a ab"]}})";
}

// Characters with bytes to fall back to.
std::string OfCharacters() {
  std::string vocab = "\"<unk>\":0";
  int id = 1;
  for (int byte = 0; byte < 256; ++byte) {
    char token[16];
    std::snprintf(token, sizeof(token), ",\"<0x%02X>\":%d", static_cast<unsigned>(byte), id++);
    vocab += token;
  }
  for (const char* const token : {"a", "b", "▁", "ab", "▁a"})
    vocab += ",\"" + std::string(token) + "\":" + std::to_string(id++);
  return R"({"normalizer":{"type":"Sequence","normalizers":[{"type":"NFC"},{"type":"Prepend","prepend":"▁"},{"type":"Replace","pattern":{"String":" "},"content":"▁"}]},
    "decoder":{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"▁"},"content":" "},{"type":"ByteFallback"},{"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0}]},
    "model":{"type":"BPE","unk_token":"<unk>","fuse_unk":true,"byte_fallback":true,"vocab":{)" +
         vocab + R"(},"merges":["a b","▁ a"]}})";
}

std::string Streamed(const Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  TextDecoder decoder(tokenizer, /*skip_special_tokens=*/false);
  std::string text;
  for (const int32_t id : ids) {
    const std::string piece = decoder.Push(id);
    FUZZ_CHECK(penstock::text::FindBroken(piece) == std::string_view::npos);
    text += piece;
  }
  return text + decoder.Finish();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  static const auto* const tokenizers = [] {
    auto* made = new std::vector<std::unique_ptr<Tokenizer>>();
    for (const std::string& json : {OfBytes(), OfCharacters()}) {
      auto tokenizer = Tokenizer::Parse(json);
      if (!tokenizer.ok()) std::fprintf(stderr, "%s\n", std::string(tokenizer.status().message()).c_str());
      FUZZ_CHECK(tokenizer.ok());
      made->push_back(*std::move(tokenizer));
    }
    return made;
  }();
  const std::string_view text = penstock::fuzz::TextOf(data, bytes);
  for (size_t kind = 0; kind < 2; ++kind) {
    const Tokenizer& tokenizer = *(*tokenizers)[kind];
    std::vector<int32_t> any;
    for (size_t i = 0; i + 1 < bytes; i += 2) any.push_back(data[i] + 256 * (data[i + 1] % 2));
    FUZZ_CHECK(penstock::text::FindBroken(tokenizer.Decode(any)) == std::string_view::npos);
    const std::string streamed = Streamed(tokenizer, any);
    if (kind == 0) FUZZ_CHECK(streamed == tokenizer.Decode(any, /*skip_special_tokens=*/false));

    const auto ids = tokenizer.Encode(text);
    if (!ids.ok()) {
      penstock::fuzz::Refused(ids.status());
      FUZZ_CHECK(penstock::text::FindBroken(text) != std::string_view::npos);
      FUZZ_CHECK(tokenizer.Encode(text, {.replace_broken_utf8 = true}).ok());
      continue;
    }
    penstock::fuzz::Accepted();
    penstock::text::Encoder encoder(tokenizer);
    std::vector<int32_t> in_parts;
    for (size_t at = 0; at < bytes;) {
      const size_t part = std::min<size_t>(bytes - at, 1 + data[at] % 9);
      FUZZ_CHECK(encoder.Append(text.substr(at, part), in_parts).ok());
      at += part;
    }
    FUZZ_CHECK(encoder.Finish(in_parts).ok());
    FUZZ_CHECK(in_parts == *ids);
    const std::string decoded = tokenizer.Decode(*ids, /*skip_special_tokens=*/false);
    FUZZ_CHECK(Streamed(tokenizer, *ids) == decoded);
    // Bytes come back as they were, but for white space that <s> takes.
    if (kind == 0 && text.find("<s>") == std::string_view::npos) FUZZ_CHECK(decoded == text);
  }
  return 0;
}
