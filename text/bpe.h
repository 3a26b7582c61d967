// Byte-pair encoding: the symbols of a word, merged pair by pair in the order of rank.
//
// A word begins as one symbol a character, or a byte in byte-level models (GPT-2's), whose vocabulary is kept
// as bytes here. Of all neighbours that may be merged, those of the lowest rank go first, from left to right.
//
// A long text without spaces is cut where no merge can ever reach across: a pair of neighbours (x, y) is a
// seam if no merge joins a token that ends in x to one that begins with y. The parts are words of their own,
// with the same tokens in the end. This is what makes models without a pre-tokenizer (Llama 2) linear in the
// text, and lets them use the cache of words.
#ifndef PENSTOCK_TEXT_BPE_H_
#define PENSTOCK_TEXT_BPE_H_

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "text/strings.h"

namespace penstock::text {

struct BpeModel {
  std::vector<std::pair<std::string, int32_t>> vocab;       // as the file spells it; no token twice
  std::vector<std::pair<std::string, std::string>> merges;  // in the order of rank
  std::optional<std::string> unk_token;
  bool fuse_unk = false;
  bool byte_fallback = false;
  bool ignore_merges = false;
  bool byte_level = false;  // words are bytes, tokens are spelled in GPT-2's alphabet of them
};

// The bytes that a token spells in GPT-2's alphabet; null if it has a character that is none of it.
std::optional<std::string> BytesOfSpelling(std::string_view token);

class Bpe {
 public:
  // What is merged as one takes some 50 times its bytes of memory.
  static constexpr size_t kMostPartBytes = size_t{1} << 30;

  // Words that were encoded before; for one thread at a time. Bounded: it starts over when it is full.
  class Cache {
   public:
    Cache() = default;
    // Bytes of the longest part that is merged; a longer one gets no tokens, and is noted.
    size_t most_bytes = kMostPartBytes;
    bool too_long = false;

   private:
    friend class Bpe;
    struct Symbol {
      int32_t id;
      int32_t previous;
      int32_t next;
    };
    struct Candidate {
      int32_t rank;
      int32_t at;
      int32_t id;
    };
    struct Tokens {
      uint32_t begin;
      uint32_t count;
    };
    // [1]: words that are looked up whole first (ignore_merges); [0]: parts, which are not.
    std::array<TextMap<std::string_view, Tokens>, 2> words_;
    std::vector<std::unique_ptr<char[]>> blocks_;  // the words' bytes
    size_t block_used_ = 0;
    std::vector<int32_t> ids_;
    std::vector<Symbol> symbols_;
    std::vector<Candidate> heap_;
    std::vector<int32_t> ranks_;
  };

  // kInvalidArgument: a merge or the unknown token is not in the vocabulary.
  static absl::StatusOr<Bpe> Create(const BpeModel& model);

  // Appends the tokens of `word`, valid UTF-8 unless the model is byte-level.
  void Encode(std::string_view word, Cache& cache, std::vector<int32_t>& to) const;

  // A word that comes part by part, if it may be cut at seams. Appends the tokens of all parts but the last,
  // which may go on, and gives the bytes that they take. `EncodeRest`: the last part, behind others.
  bool cuts() const { return cuts_; }
  size_t EncodeBegin(std::string_view word, Cache& cache, std::vector<int32_t>& to) const;
  void EncodeRest(std::string_view word, Cache& cache, std::vector<int32_t>& to) const;
  // Bytes; a longer word is no token.
  size_t longest_token() const { return longest_token_; }

 private:
  struct Merge {
    int32_t rank;
    int32_t id;
  };
  struct Alone {  // what a character or a byte becomes
    std::vector<int32_t> ids;
    bool unknown = false;
    bool own_token = false;
  };

  struct Spelling;

  Bpe() = default;
  static Spelling SpellingOf(const BpeModel& model);
  absl::Status AddMerges(const BpeModel& model, Spelling& spelling);
  void AddJoint(std::string_view left, std::string_view right);
  void AddVocabulary(const BpeModel& model);
  bool AddBytes(const Spelling& spelling);
  const Merge* FindMerge(int32_t left, int32_t right) const;
  bool IsSeam(char32_t left, char32_t right) const;
  Alone MeaningOf(std::string_view character) const;
  void EncodePart(std::string_view word, bool look_up, Cache& cache, std::vector<int32_t>& to) const;
  void Split(std::string_view word, std::vector<Cache::Symbol>& symbols) const;
  void MergeShort(Cache& cache) const;
  void MergeLong(Cache& cache) const;

  bool byte_level_ = false;
  bool ignore_merges_ = false;
  bool fuse_unk_ = false;
  bool byte_fallback_ = false;
  bool cuts_ = false;
  size_t longest_token_ = 0;
  int32_t unk_ = -1;
  TextMap<std::string, int32_t> vocab_;  // the keys are bytes if byte_level_
  absl::flat_hash_map<uint64_t, Merge> merges_;
  std::vector<Alone> bytes_;                       // byte-level: of each byte
  absl::flat_hash_map<char32_t, int32_t> single_;  // else: characters with a token of their own
  std::vector<uint64_t> joints_;                   // a bit for each hash of a pair that is no seam
};

}  // namespace penstock::text

#endif  // PENSTOCK_TEXT_BPE_H_
