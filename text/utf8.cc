#include "text/utf8.h"

#include <cstdint>
#include <cstring>

namespace penstock::text {

Utf8Character FirstCharacter(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return {Utf8Character::kWhole, 1, first};
  // The second byte's range keeps out what is too long for its value, surrogates and numbers above 0x10FFFF.
  size_t length = 0;
  unsigned char low = 0x80, high = 0xBF;
  char32_t code = 0;
  if (first >= 0xC2 && first <= 0xDF) {
    length = 2;
    code = first & 0x1F;
  } else if (first >= 0xE0 && first <= 0xEF) {
    length = 3;
    code = first & 0x0F;
    if (first == 0xE0) low = 0xA0;
    if (first == 0xED) high = 0x9F;
  } else if (first >= 0xF0 && first <= 0xF4) {
    length = 4;
    code = first & 0x07;
    if (first == 0xF0) low = 0x90;
    if (first == 0xF4) high = 0x8F;
  } else {
    return {Utf8Character::kBroken, 1, 0};
  }
  for (size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {Utf8Character::kCutShort, i, 0};
    if (byte(i) < low || byte(i) > high) return {Utf8Character::kBroken, i, 0};
    code = code << 6 | (byte(i) & 0x3Fu);
    low = 0x80;
    high = 0xBF;
  }
  return {Utf8Character::kWhole, length, code};
}

char32_t ValidCharacter(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<char32_t>(static_cast<unsigned char>(text[i])); };
  switch (CharacterBytes(text[0])) {
    case 1:
      return byte(0);
    case 2:
      return (byte(0) & 0x1F) << 6 | (byte(1) & 0x3F);
    case 3:
      return (byte(0) & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F);
    default:
      return (byte(0) & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 | (byte(3) & 0x3F);
  }
}

size_t LastCharacterBytes(std::string_view text) {
  size_t bytes = 1;
  while (bytes < text.size() && (static_cast<unsigned char>(text[text.size() - bytes]) & 0xC0) == 0x80)
    ++bytes;
  return bytes;
}

void AppendCharacter(char32_t code, std::string& to) {
  const auto put = [&](char32_t byte) { to.push_back(static_cast<char>(byte)); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 | code >> 6);
    put(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    put(0xE0 | code >> 12);
    put(0x80 | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  } else {
    put(0xF0 | code >> 18);
    put(0x80 | (code >> 12 & 0x3F));
    put(0x80 | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  }
}

size_t FindBroken(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    if (text.size() - at >= 8) {
      uint64_t word = 0;
      std::memcpy(&word, text.data() + at, 8);
      if ((word & 0x8080808080808080u) == 0) {
        at += 8;
        continue;
      }
    }
    const Utf8Character character = FirstCharacter(text.substr(at));
    if (character.kind != Utf8Character::kWhole) return at;
    at += character.bytes;
  }
  return std::string_view::npos;
}

void AppendRepaired(std::string_view text, std::string& to) {
  while (!text.empty()) {
    const size_t broken = FindBroken(text);
    to.append(text.substr(0, broken));
    if (broken == std::string_view::npos) return;
    to.append(kReplacementCharacter);
    text.remove_prefix(broken);
    text.remove_prefix(FirstCharacter(text).bytes);
  }
}

bool IsWhiteSpace(char32_t code) {
  return (code >= 0x09 && code <= 0x0D) || code == 0x20 || code == 0x85 || code == 0xA0 || code == 0x1680 ||
         (code >= 0x2000 && code <= 0x200A) || code == 0x2028 || code == 0x2029 || code == 0x202F ||
         code == 0x205F || code == 0x3000;
}

}  // namespace penstock::text
