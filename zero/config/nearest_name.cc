#include "zero/config/nearest_name.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <limits>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace penstock::zero {
namespace {

constexpr size_t kLongestCompared = 128;

char Lower(char c) { return static_cast<char>(std::tolower(static_cast<unsigned char>(c))); }

bool BeginsWith(std::string_view text, std::string_view prefix) {
  if (text.size() < prefix.size()) return false;
  for (size_t i = 0; i < prefix.size(); ++i) {
    if (Lower(text[i]) != Lower(prefix[i])) return false;
  }
  return true;
}

// "comm_overlap" and "overlap_comm".
bool SameWords(std::string_view a, std::string_view b) {
  const auto sorted = [](std::string_view name) {
    std::vector<std::string> words = absl::StrSplit(
        absl::AsciiStrToLower(absl::string_view(name.data(), name.size())), '_', absl::SkipEmpty());
    std::sort(words.begin(), words.end());
    return words;
  };
  return a.size() <= kLongestCompared && sorted(a) == sorted(b);
}

}  // namespace

size_t EditDistance(std::string_view a, std::string_view b) {
  a = a.substr(0, kLongestCompared);
  b = b.substr(0, kLongestCompared);
  // Three rows of the usual table: a swap of neighbours looks two rows back.
  std::array<std::array<size_t, kLongestCompared + 1>, 3> rows{};
  for (size_t j = 0; j <= b.size(); ++j) rows[0][j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    auto& row = rows[i % 3];
    const auto& above = rows[(i - 1) % 3];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const bool same = Lower(a[i - 1]) == Lower(b[j - 1]);
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (same ? 0 : 1)});
      if (i > 1 && j > 1 && Lower(a[i - 1]) == Lower(b[j - 2]) && Lower(a[i - 2]) == Lower(b[j - 1])) {
        row[j] = std::min(row[j], rows[(i - 2) % 3][j - 2] + 1);
      }
    }
  }
  return rows[a.size() % 3][b.size()];
}

std::optional<std::string> NearestName(std::string_view word,
                                       const std::vector<std::string_view>& candidates) {
  std::optional<std::string> best;
  size_t best_distance = std::numeric_limits<size_t>::max();
  for (const std::string_view candidate : candidates) {
    const size_t distance = EditDistance(word, candidate);
    const size_t allowed = std::max<size_t>(1, std::max(word.size(), candidate.size()) / 3);
    if (distance <= allowed && distance < best_distance) {
      best = std::string(candidate);
      best_distance = distance;
    }
  }
  if (best) return best;
  for (const std::string_view candidate : candidates) {
    if (SameWords(word, candidate)) return std::string(candidate);
  }
  constexpr size_t kShortestPrefix = 4;
  for (const std::string_view candidate : candidates) {
    if ((word.size() >= kShortestPrefix && BeginsWith(candidate, word)) ||
        (candidate.size() >= kShortestPrefix && BeginsWith(word, candidate))) {
      return std::string(candidate);
    }
  }
  return std::nullopt;
}

std::string DidYouMean(std::string_view word, const std::vector<std::string_view>& candidates,
                       std::string_view prefix) {
  const std::optional<std::string> name = NearestName(word, candidates);
  if (!name) return "";
  return absl::StrCat(" (did you mean \"", std::string(prefix), *name, "\"?)");
}

}  // namespace penstock::zero
