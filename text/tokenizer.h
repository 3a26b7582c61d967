// Tokenizers of published models: Hugging Face's tokenizer.json, without LibTorch and without Python.
//
//   ASSIGN_OR_RETURN(const std::unique_ptr<Tokenizer> tokenizer, Tokenizer::Open("Llama-3.2-1B"));
//   ASSIGN_OR_RETURN(const std::vector<int32_t> ids, tokenizer->Encode("Penstock trains models."));
//   const std::string text = tokenizer->Decode(ids);
//
// The ids are those of PyPI's `tokenizers`. Served are byte-pair encodings:
//   byte-level ones with any split pattern that text/regex.h takes: GPT-2, Llama 3, Qwen2 and 3, SmolLM,
//     o200k and their kin
//   ones over characters with byte fallback: Llama 2, Mistral, in the spelling with a normalizer (Prepend,
//     Replace) and in that with the pre-tokenizer Metaspace
// with normal forms, added tokens, and TemplateProcessing. What else a file asks for (WordPiece, Unigram,
// BertNormalizer, dropout, ...) is refused by name, and so is every key that is not known here.
// `truncation` and `padding` are no part of what a text is: they are not applied.
//
// Memory: the vocabulary and its merges, some 40 MB for 128k tokens; a few MB for each thread that encodes
// at the same time; besides, twice the longest text, and some 50 times the longest word that no merge lets be
// cut. Texts are at most 1 GiB long; longer ones, and those that are not to be in memory at once, go through
// an Encoder. LimitMemory refuses what would take more than it allows.
#ifndef PENSTOCK_TEXT_TOKENIZER_H_
#define PENSTOCK_TEXT_TOKENIZER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace penstock::text {

struct EncodeOptions {
  // The tokens that the file's template puts before and behind a text (`<s>`). Default: yes, as `tokenizers`
  // does. Special tokens that stand in the text itself are always read as tokens.
  bool add_special_tokens = true;
  // Text that is no UTF-8 is refused, with its place; or each broken part is read as U+FFFD.
  // Default: refused.
  bool replace_broken_utf8 = false;
};

// Bytes of what is in memory at once while texts become tokens.
struct TextLimits {
  size_t text = size_t{1} << 30;    // that is encoded as a whole
  size_t record = size_t{1} << 30;  // of JSON, which is parsed besides
  size_t begun = size_t{1} << 30;   // a word of an Encoder's text whose end is not known yet
  size_t word = size_t{1} << 30;    // or a part of one, within which any two characters may be merged
};

struct SpecialIds {
  std::optional<int32_t> bos, unk, pad;
  std::vector<int32_t> eos;  // each ends a text; the tokenizer's own first
};

// Immutable after opening: any number of threads may use one.
class Tokenizer {
 public:
  // A directory with tokenizer.json, or the file itself. tokenizer_config.json beside it (or the older
  // special_tokens_map.json and added_tokens.json, where it has no added_tokens_decoder) names special tokens
  // and adds tokens; those that tokenizer.json does not have get the ids behind its last, as with
  // transformers. generation_config.json has more tokens that end a text.
  // kNotFound, kInvalidArgument: with the file, the place in it, and what is not served.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Open(const std::string& path);
  // From the text of a tokenizer.json; nothing beside it is read.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Parse(std::string_view json);
  ~Tokenizer();

  // To be called before a text is encoded: what would take more memory than about `bytes`, besides the
  // vocabulary and some MB, is kResourceExhausted from here on. The ids of all else are the same.
  void LimitMemory(uint64_t bytes);
  const TextLimits& limits() const;

  // kInvalidArgument: `text` is no UTF-8. kResourceExhausted: it is too long, or has a word that is.
  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text, const EncodeOptions& options = {}) const;
  // The same, behind what `ids` holds already. After an error `ids` is as it was.
  absl::Status Append(std::string_view text, const EncodeOptions& options, std::vector<int32_t>& ids) const;

  // Valid UTF-8. Ids that name no token are passed over: the logits of many models are longer than the
  // vocabulary.
  std::string Decode(std::span<const int32_t> ids, bool skip_special_tokens = true) const;

  // 1 more than the largest id: the least rows of an embedding. A model may have more.
  int32_t vocab_size() const;
  // The same of tokenizer.json alone, without what the files beside it append: a model that was not grown for
  // those tokens has no rows for them.
  int32_t base_vocab_size() const;
  // Of a token as the file spells it ("<|endoftext|>"; byte-level tokens in GPT-2's alphabet).
  std::optional<int32_t> IdOf(std::string_view token) const;
  // Empty where no token has this id.
  std::string TokenOf(int32_t id) const;
  // The bytes that a token adds within a text, special ones their spelling; they may be a part of a
  // character. Empty where no token has this id.
  std::string BytesOf(int32_t id) const;
  bool IsSpecial(int32_t id) const;
  const SpecialIds& special_ids() const;
  // Whether a file beside tokenizer.json changes what becomes of a text.
  bool config_counts() const;
  // What the files beside tokenizer.json say and what is not followed, a line each.
  const std::vector<std::string>& notes() const;

 private:
  friend class Encoder;
  friend class TextDecoder;
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Encodes one text that comes in parts, of some MB best: the ids are those of the whole text, to the last.
//
//   Encoder encoder(tokenizer);
//   while (ReadSome(&part)) { RETURN_IF_ERROR(encoder.Append(part, ids)); Write(ids); ids.clear(); }
//   RETURN_IF_ERROR(encoder.Finish(ids));
//
// A part may end within a character. Memory: twice a part, and the word at its end. The forms of tokenizers
// whose cuts depend on more than that (streams() is false: added tokens that look beside them, Strip,
// patterns that look back) hold the whole text until Finish. What is beyond the tokenizer's limits is
// kResourceExhausted, with its place. For one thread; the tokenizer must outlive it.
class Encoder {
 public:
  explicit Encoder(const Tokenizer& tokenizer, const EncodeOptions& options = {});
  ~Encoder();

  bool streams() const;
  // Appends the ids that are certain now. Errors are Tokenizer::Append's; after one only destruction is left.
  absl::Status Append(std::string_view part, std::vector<int32_t>& ids);
  // Appends the rest; the next Append begins a new text.
  absl::Status Finish(std::vector<int32_t>& ids);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Decodes as the tokens come. What it has handed out is always whole characters; together it is Decode's
// text, but for byte tokens in a row that are no UTF-8: there, characters that were whole stay.
// For one thread; the tokenizer must outlive it.
class TextDecoder {
 public:
  explicit TextDecoder(const Tokenizer& tokenizer, bool skip_special_tokens = true);
  ~TextDecoder();

  // The text that is certain now; often empty.
  std::string Push(int32_t id);
  // What was held back; the next Push begins a new text.
  std::string Finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace penstock::text

#endif  // PENSTOCK_TEXT_TOKENIZER_H_
