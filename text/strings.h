// Abseil's strings for std::string_view, which Debian's Abseil does not take, and what errors are made of.
#ifndef PENSTOCK_TEXT_STRINGS_H_
#define PENSTOCK_TEXT_STRINGS_H_

#include <string>
#include <string_view>
#include <type_traits>

#include "absl/container/flat_hash_map.h"
#include "absl/hash/hash.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace penstock::text {

inline absl::string_view Viewed(std::string_view text) { return {text.data(), text.size()}; }

template <typename T>
decltype(auto) CatArgument(const T& value) {
  if constexpr (std::is_same_v<T, std::string_view>) {
    return Viewed(value);
  } else {
    return (value);
  }
}
template <typename... T>
std::string Cat(const T&... parts) {
  return absl::StrCat(CatArgument(parts)...);
}
template <typename... T>
void CatTo(std::string& to, const T&... parts) {
  absl::StrAppend(&to, CatArgument(parts)...);
}

// What a file holds, in an error's one line: between quotes, escaped, and not longer than a line should be.
inline std::string Quoted(std::string_view text) {
  constexpr size_t kLongest = 100;
  return Cat("\"", absl::CHexEscape(Viewed(text.substr(0, kLongest))), text.size() > kLongest ? "..." : "",
             "\"");
}

inline std::string ReplacedAll(std::string_view text, std::string_view from, std::string_view to) {
  std::string result;
  size_t copied = 0;
  for (size_t at = 0; (at = text.find(from, copied)) != std::string_view::npos; copied = at + from.size())
    result.append(text.substr(copied, at - copied)).append(to);
  return result.append(text.substr(copied));
}

inline bool RemovedPrefix(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

struct TextHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return absl::Hash<absl::string_view>{}(Viewed(text)); }
};
struct TextEqual {
  using is_transparent = void;
  bool operator()(std::string_view a, std::string_view b) const { return a == b; }
};
// Found by std::string_view, whichever of the two it holds.
template <typename Key, typename Value>
using TextMap = absl::flat_hash_map<Key, Value, TextHash, TextEqual>;

}  // namespace penstock::text

#endif  // PENSTOCK_TEXT_STRINGS_H_
