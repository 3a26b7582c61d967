// From tokens back to text: tokenizer.json's "decoder", brought to one form.
//
//   each token's text: replacements, the bytes of a byte-level spelling
//   byte tokens (<0x0A>) in a row become characters
//   one strip at the begin of the whole
//
// What the file says in another order is refused.
#ifndef PENSTOCK_TEXT_DECODER_H_
#define PENSTOCK_TEXT_DECODER_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace penstock::text {

struct DecoderReplace {
  std::string from;
  std::string to;
};
struct DecoderStrip {
  std::string content;  // one character
  int64_t start = 0;
  int64_t stop = 0;
};
struct DecoderMetaspace {
  std::string replacement;
  bool drop_in_first = true;
};

struct Decoder {
  enum class Kind {
    kNone,       // tokens with spaces between them
    kByteLevel,  // GPT-2's alphabet of bytes
    kSteps,
  };
  Kind kind = Kind::kNone;
  std::vector<std::variant<DecoderReplace, DecoderStrip, DecoderMetaspace>> token_steps;
  bool byte_fallback = false;
  std::string strip;  // one character, at most strip_start times at the begin of the whole
  int64_t strip_start = 0;

  // The text of one token, before byte tokens are put together; `first`: of the first of a sequence.
  std::string TextOf(std::string_view token, bool first) const;
  // The byte that a token's text stands for; -1: none.
  int ByteOf(std::string_view text) const;
};

// Puts text together as tokens come, so that no character is broken. See Tokenizer's TextDecoder.
class DecodedText {
 public:
  // `whole`: as if all tokens came at once: byte tokens in a row that are no UTF-8 together become one U+FFFD
  // each, also where some of them are characters.
  DecodedText(const Decoder& decoder, bool whole)
      : decoder_(&decoder), whole_(whole), to_strip_(decoder.strip_start) {}

  bool first() const { return first_; }
  // `text`: TextOf the token.
  void Take(std::string_view text, std::string& out);
  void Finish(std::string& out);

 private:
  void Emit(std::string_view text, std::string& out);
  void EndOfBytes(std::string& out);

  const Decoder* decoder_;
  bool whole_;
  bool first_ = true;
  int64_t to_strip_;
  std::string pending_;  // bytes that are no whole character yet
};

}  // namespace penstock::text

#endif  // PENSTOCK_TEXT_DECODER_H_
