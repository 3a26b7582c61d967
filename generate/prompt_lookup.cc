#include "generate/prompt_lookup.h"

#include <algorithm>
#include <cstddef>

namespace penstock::generate {
namespace {

constexpr size_t kLongestMatch = 3;

}  // namespace

std::vector<int64_t> LookUp(std::span<const int64_t> tokens, int64_t most) {
  if (most <= 0) return {};
  const auto wanted = static_cast<size_t>(most);
  for (size_t length = std::min(kLongestMatch, tokens.size()); length >= 1; --length) {
    const auto end = tokens.last(length);
    std::span<const int64_t> found;
    // `next`: behind an occurrence, of which the end itself is none.
    for (size_t next = tokens.size() - 1; next >= length && found.size() < wanted; --next) {
      if (!std::equal(end.begin(), end.end(), tokens.begin() + static_cast<std::ptrdiff_t>(next - length)))
        continue;
      const auto follows = tokens.subspan(next, std::min(wanted, tokens.size() - next));
      if (follows.size() > found.size()) found = follows;
    }
    if (!found.empty()) return {found.begin(), found.end()};
  }
  return {};
}

}  // namespace penstock::generate
