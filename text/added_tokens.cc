#include "text/added_tokens.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/status_macros.h"
#include "text/utf8.h"

namespace penstock::text {
namespace {

// What Rust's \w knows as part of a word.
constexpr std::string_view kWordCharacter = R"([\w\x{200c}\x{200d}])";

}  // namespace

AddedTokens::AddedTokens() : nodes_(1) {}

void AddedTokens::Add(const AddedToken& token, std::string_view spelling) {
  PENSTOCK_CHECK(!spelling.empty(), "an added token that is spelled by nothing");
  if (token.single_word && word_.empty()) {
    absl::StatusOr<Regex> word = Regex::Compile(kWordCharacter);
    PENSTOCK_CHECK(word.ok(), "the pattern of a word's character");
    word_.push_back(*std::move(word));
  }
  plain_ = plain_ && !token.single_word && !token.lstrip && !token.rstrip;
  longest_ = std::max(longest_, spelling.size());
  uint32_t node = 0;
  for (const char c : spelling) {
    const auto byte = static_cast<unsigned char>(c);
    const auto [edge, made] = nodes_[node].next.try_emplace(byte, static_cast<uint32_t>(nodes_.size()));
    node = edge->second;
    if (made) nodes_.emplace_back();
  }
  if (nodes_[node].token < 0) nodes_[node].token = static_cast<int32_t>(tokens_.size());
  const auto first = static_cast<unsigned char>(spelling[0]);
  only_first_ = tokens_.empty() || only_first_ == first ? first : -1;
  first_[first] = true;
  tokens_.push_back(token);
}

int32_t AddedTokens::LongestAt(std::string_view text, size_t at, size_t* end) const {
  int32_t best = -1;
  uint32_t node = 0;
  for (; at < text.size(); ++at) {
    const auto edge = nodes_[node].next.find(static_cast<unsigned char>(text[at]));
    if (edge == nodes_[node].next.end()) break;
    node = edge->second;
    if (nodes_[node].token >= 0) {
      best = nodes_[node].token;
      *end = at + 1;
    }
  }
  return best;
}

bool AddedTokens::MoveToFirstByte(std::string_view text, size_t* at) const {
  if (only_first_ >= 0 && *at < text.size()) {
    const void* const found = std::memchr(text.data() + *at, only_first_, text.size() - *at);
    *at = found == nullptr ? text.size() : static_cast<size_t>(static_cast<const char*>(found) - text.data());
  } else {
    while (*at < text.size() && !first_[static_cast<unsigned char>(text[*at])]) ++*at;
  }
  return *at < text.size();
}

AddedTokens::Piece AddedTokens::FindFirst(std::string_view text, size_t from) const {
  for (; MoveToFirstByte(text, &from); ++from) {
    size_t end = 0;
    const int32_t index = LongestAt(text, from, &end);
    if (index >= 0) return {tokens_[static_cast<size_t>(index)].id, from, end};
  }
  return {-1, text.size(), text.size()};
}

absl::StatusOr<bool> AddedTokens::Scan::FindToken() {
  while (tokens_.MoveToFirstByte(text_, &search_)) {
    size_t begin = search_;
    size_t end = 0;
    const int32_t index = tokens_.LongestAt(text_, begin, &end);
    if (index < 0) {
      ++search_;
      continue;
    }
    search_ = end;
    const AddedToken& token = tokens_.tokens_[static_cast<size_t>(index)];
    if (token.single_word) {
      const auto is_word = [&](size_t at, size_t bytes) -> absl::StatusOr<bool> {
        ASSIGN_OR_RETURN(const Regex::Match match,
                         tokens_.word_.front().Find(text_.substr(at, bytes), 0, scratch_));
        return match.begin == 0;
      };
      bool alone = true;
      if (begin > 0) {
        const size_t bytes = LastCharacterBytes(text_.substr(0, begin));
        ASSIGN_OR_RETURN(const bool word, is_word(begin - bytes, bytes));
        alone = !word;
      }
      if (alone && end < text_.size()) {
        ASSIGN_OR_RETURN(const bool word, is_word(end, CharacterBytes(text_[end])));
        alone = !word;
      }
      if (!alone) continue;
    }
    if (token.lstrip) {
      while (begin > done_) {
        const size_t bytes = LastCharacterBytes(text_.substr(0, begin));
        if (!IsWhiteSpace(ValidCharacter(text_.substr(begin - bytes)))) break;
        begin -= bytes;
      }
      begin = std::max(begin, done_);
    }
    if (token.rstrip) {
      while (end < text_.size() && IsWhiteSpace(ValidCharacter(text_.substr(end))))
        end += CharacterBytes(text_[end]);
    }
    waiting_ = {token.id, begin, end};
    return true;
  }
  return false;
}

absl::StatusOr<bool> AddedTokens::Scan::Next(Piece& piece) {
  if (has_waiting_) {
    has_waiting_ = false;
    piece = waiting_;
    done_ = piece.end;
    return true;
  }
  if (ended_) return false;
  ASSIGN_OR_RETURN(const bool found, tokens_.empty() ? absl::StatusOr<bool>(false) : FindToken());
  if (!found) {
    ended_ = true;
    piece = {-1, std::min(done_, text_.size()), text_.size()};
    return true;
  }
  piece = {-1, done_, std::max(done_, waiting_.begin)};
  has_waiting_ = true;
  return true;
}

}  // namespace penstock::text
