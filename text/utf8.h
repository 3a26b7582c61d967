// UTF-8, a character at a time.
#ifndef PENSTOCK_TEXT_UTF8_H_
#define PENSTOCK_TEXT_UTF8_H_

#include <cstddef>
#include <string>
#include <string_view>

namespace penstock::text {

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

// The character that `text` begins with, and its bytes; or why there is none. `text` is not empty.
struct Utf8Character {
  enum Kind { kWhole, kBroken, kCutShort };
  Kind kind = kBroken;
  // kWhole: the character's bytes. kBroken: the bytes that one U+FFFD stands for, as Unicode recommends (its
  // "maximal subpart"). kCutShort: all of `text`; more bytes could make a character of it.
  size_t bytes = 1;
  char32_t code = 0;
};
Utf8Character FirstCharacter(std::string_view text);

// The same for text that is known to be valid and not empty.
inline size_t CharacterBytes(char first) {
  const auto byte = static_cast<unsigned char>(first);
  return byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}
char32_t ValidCharacter(std::string_view text);
// The bytes of the last character of valid text.
size_t LastCharacterBytes(std::string_view text);

void AppendCharacter(char32_t code, std::string& to);

// Where the first byte that is no part of valid UTF-8 stands; npos where all is valid.
size_t FindBroken(std::string_view text);

// Appends `text` with U+FFFD for what is broken.
void AppendRepaired(std::string_view text, std::string& to);

// Unicode's property White_Space.
bool IsWhiteSpace(char32_t code);

}  // namespace penstock::text

#endif  // PENSTOCK_TEXT_UTF8_H_
