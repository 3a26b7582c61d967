// Tokens beside the model's: found in the text before anything else is made of it.
//
// Of those that begin first, the longest wins. One with `single_word` counts only where no letter, digit or
// mark stands next to it; `lstrip` and `rstrip` take the white space beside it with it.
#ifndef PENSTOCK_TEXT_ADDED_TOKENS_H_
#define PENSTOCK_TEXT_ADDED_TOKENS_H_

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "text/regex.h"

namespace penstock::text {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool single_word = false;
  bool lstrip = false;
  bool rstrip = false;
  bool normalized = false;
  bool special = false;
};

class AddedTokens {
 public:
  AddedTokens();
  AddedTokens(AddedTokens&&) = default;
  AddedTokens& operator=(AddedTokens&&) = default;

  // `spelling` is what stands in the text for it. The first of two of one spelling counts.
  void Add(const AddedToken& token, std::string_view spelling);
  bool empty() const { return tokens_.empty(); }
  // None looks at what stands beside it, so that the first match at or after a place is FindFirst's.
  bool plain() const { return plain_; }
  size_t longest() const { return longest_; }  // bytes of the longest spelling

  // A token, or a stretch of text between tokens (id -1), in turn; stretches may be empty, tokens may overlap
  // in the white space that they take.
  struct Piece {
    int32_t id = -1;
    size_t begin = 0;
    size_t end = 0;
  };
  // The first token at or after `from`; id -1 where there is none. Only if plain().
  Piece FindFirst(std::string_view text, size_t from) const;
  class Scan {
   public:
    Scan(const AddedTokens& tokens, std::string_view text, RegexScratch& scratch)
        : tokens_(tokens), text_(text), scratch_(scratch) {}
    // False behind the last piece.
    absl::StatusOr<bool> Next(Piece& piece);

   private:
    absl::StatusOr<bool> FindToken();

    const AddedTokens& tokens_;
    const std::string_view text_;
    RegexScratch& scratch_;
    size_t search_ = 0;  // where the search for the next match goes on
    size_t done_ = 0;    // what was handed out
    Piece waiting_;      // a token whose text before it was handed out
    bool has_waiting_ = false;
    bool ended_ = false;
  };

 private:
  // A node of the tree of spellings: its children by byte, and the token that ends here.
  struct Node {
    int32_t token = -1;
    absl::flat_hash_map<unsigned char, uint32_t> next;
  };
  // Moves `at` on to a byte that a token begins with; false where there is none.
  bool MoveToFirstByte(std::string_view text, size_t* at) const;
  // The longest token that begins at `at`; its index, or -1.
  int32_t LongestAt(std::string_view text, size_t at, size_t* end) const;

  bool plain_ = true;
  size_t longest_ = 0;
  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_;
  std::array<bool, 256> first_{};
  int only_first_ = -1;      // the byte that all begin with; -1: several, or none
  std::vector<Regex> word_;  // one pattern if any token is a single word: a character of a word
};

}  // namespace penstock::text

#endif  // PENSTOCK_TEXT_ADDED_TOKENS_H_
