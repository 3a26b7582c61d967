#include "text/bpe.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "text/strings.h"
#include "text/utf8.h"

namespace penstock::text {
namespace {

constexpr size_t kCachedWord = 128;  // bytes: longer words hardly come twice
constexpr size_t kCachedWords = 1 << 16;
constexpr size_t kCacheBlock = 1 << 18;
constexpr size_t kUncutWord = 48;  // bytes: shorter words are not searched for seams
constexpr size_t kShortWord = 32;  // symbols that are merged without a heap
constexpr size_t kJointBits = 1 << 20;
constexpr int32_t kNoRank = std::numeric_limits<int32_t>::max();

uint64_t PairKey(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

size_t JointBit(char32_t left, char32_t right) {
  const uint64_t mixed = (static_cast<uint64_t>(left) << 32 | right) * 0x9e3779b97f4a7c15u;
  return mixed >> 44;  // 20 bits
}

// GPT-2's character for each byte: itself where it is printable Latin-1, else the next from U+0100 on.
std::array<char32_t, 256> Alphabet() {
  std::array<char32_t, 256> alphabet{};
  char32_t next = 0x100;
  for (char32_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    alphabet[byte] = printable ? byte : next++;
  }
  return alphabet;
}

std::string ByteToken(unsigned char byte) { return absl::StrFormat("<0x%02X>", byte); }

}  // namespace

std::optional<std::string> BytesOfSpelling(std::string_view token) {
  static const auto* const bytes = [] {
    auto* made = new std::array<int, 0x200>();
    made->fill(-1);
    const std::array<char32_t, 256> alphabet = Alphabet();
    for (size_t byte = 0; byte < 256; ++byte) (*made)[alphabet[byte]] = static_cast<int>(byte);
    return made;
  }();
  std::string spelled;
  while (!token.empty()) {
    const char32_t code = ValidCharacter(token);
    if (code >= bytes->size() || (*bytes)[code] < 0) return std::nullopt;
    spelled.push_back(static_cast<char>((*bytes)[code]));
    token.remove_prefix(CharacterBytes(token[0]));
  }
  return spelled;
}

// What a model's tokens are spelled like, and those that no text spells (<unk>, <0x0A>): they are what other
// characters become, and where one is merged, the text's characters do not tell where merges reach.
struct Bpe::Spelling {
  TextMap<std::string_view, int32_t> ids;
  std::vector<std::string> stand_ins;  // sorted
  bool all_bytes = false;              // every byte has one
  bool stand_in_merged = false;
};

Bpe::Spelling Bpe::SpellingOf(const BpeModel& model) {
  Spelling spelling;
  for (const auto& [token, id] : model.vocab) spelling.ids.emplace(token, id);
  std::vector<std::string>& stand_ins = spelling.stand_ins;
  if (model.byte_fallback) {
    for (int byte = 0; byte < 256; ++byte) stand_ins.push_back(ByteToken(static_cast<unsigned char>(byte)));
  }
  spelling.all_bytes = model.byte_fallback &&
                       std::all_of(stand_ins.begin(), stand_ins.end(),
                                   [&](const std::string& token) { return spelling.ids.contains(token); });
  if (model.unk_token.has_value()) stand_ins.push_back(*model.unk_token);
  std::sort(stand_ins.begin(), stand_ins.end());
  return spelling;
}

absl::Status Bpe::AddMerges(const BpeModel& model, Spelling& spelling) {
  joints_.assign(kJointBits / 64, 0);
  if (model.merges.size() >= static_cast<size_t>(kNoRank))
    return absl::InvalidArgumentError("model.merges has more than 2^31 merges");
  const auto is_stand_in = [&](const std::string& token) {
    return std::binary_search(spelling.stand_ins.begin(), spelling.stand_ins.end(), token);
  };
  std::string joined;
  for (size_t rank = 0; rank < model.merges.size(); ++rank) {
    const auto& [left, right] = model.merges[rank];
    joined.assign(left).append(right);
    std::array<int32_t, 3> ids{};
    const std::array<const std::string*, 3> tokens = {&left, &right, &joined};
    for (size_t i = 0; i < tokens.size(); ++i) {
      const auto known = spelling.ids.find(*tokens[i]);
      if (known == spelling.ids.end()) {
        return absl::InvalidArgumentError(Cat("model.merges[", rank, "] is ", Quoted(left), " and ",
                                              Quoted(right), ", and ", Quoted(*tokens[i]),
                                              " is not in model.vocab"));
      }
      ids[i] = known->second;
    }
    // Of a pair that comes twice the last rank counts, as in Hugging Face's map of them.
    merges_[PairKey(ids[0], ids[1])] = {static_cast<int32_t>(rank), ids[2]};
    if (left.empty() || right.empty() || is_stand_in(left) || is_stand_in(right)) {
      spelling.stand_in_merged = true;
    }
    AddJoint(left, right);
  }
  return absl::OkStatus();
}

// Between the last character of the one and the first of the other there is no seam.
void Bpe::AddJoint(std::string_view left, std::string_view right) {
  if (left.empty() || right.empty()) return;
  char32_t last = 0, next = 0;
  if (byte_level_) {
    const auto left_bytes = BytesOfSpelling(left), right_bytes = BytesOfSpelling(right);
    if (!left_bytes.has_value() || !right_bytes.has_value()) return;  // no text is spelled so
    last = static_cast<unsigned char>(left_bytes->back());
    next = static_cast<unsigned char>(right_bytes->front());
  } else {
    last = ValidCharacter(left.substr(left.size() - LastCharacterBytes(left)));
    next = ValidCharacter(right);
  }
  const size_t bit = JointBit(last, next);
  joints_[bit / 64] |= uint64_t{1} << (bit % 64);
}

void Bpe::AddVocabulary(const BpeModel& model) {
  for (const auto& [token, id] : model.vocab) {
    if (byte_level_) {
      if (auto bytes = BytesOfSpelling(token)) vocab_.emplace(*std::move(bytes), id);
      // Byte tokens of a fallback are looked up as they are spelled; they are bytes of their own spelling.
      continue;
    }
    vocab_.emplace(token, id);
    if (!token.empty() && CharacterBytes(token[0]) == token.size()) single_[ValidCharacter(token)] = id;
  }
  for (const auto& [token, id] : vocab_) longest_token_ = std::max(longest_token_, token.size());
}

// Of a byte-level model; returns whether every byte has a token of its own.
bool Bpe::AddBytes(const Spelling& spelling) {
  const std::array<char32_t, 256> alphabet = Alphabet();
  bool all_known = true;
  for (const char32_t letter : alphabet) {
    Alone alone;
    std::string character;
    AppendCharacter(letter, character);
    if (const auto known = spelling.ids.find(character); known != spelling.ids.end()) {
      alone.ids.push_back(known->second);
      alone.own_token = true;
    } else {
      all_known = false;
      alone = MeaningOf(character);
    }
    bytes_.push_back(std::move(alone));
  }
  return all_known;
}

absl::StatusOr<Bpe> Bpe::Create(const BpeModel& model) {
  Bpe bpe;
  bpe.byte_level_ = model.byte_level;
  bpe.ignore_merges_ = model.ignore_merges;
  bpe.fuse_unk_ = model.fuse_unk;
  bpe.byte_fallback_ = model.byte_fallback;
  Spelling spelling = SpellingOf(model);
  if (model.unk_token.has_value()) {
    const auto unk = spelling.ids.find(*model.unk_token);
    if (unk == spelling.ids.end()) {
      return absl::InvalidArgumentError(
          Cat("model.unk_token is ", Quoted(*model.unk_token), ", which is not in model.vocab"));
    }
    bpe.unk_ = unk->second;
  }
  RETURN_IF_ERROR(bpe.AddMerges(model, spelling));
  bpe.AddVocabulary(model);
  if (model.byte_level) {
    bpe.cuts_ = bpe.AddBytes(spelling);
  } else {
    const bool all_known = spelling.all_bytes || (bpe.unk_ >= 0 && !model.fuse_unk && !model.byte_fallback);
    bpe.cuts_ = all_known && !spelling.stand_in_merged;
  }
  return bpe;
}

Bpe::Alone Bpe::MeaningOf(std::string_view character) const {
  Alone alone;
  if (byte_fallback_) {
    for (const char byte : character) {
      const auto token = vocab_.find(ByteToken(static_cast<unsigned char>(byte)));
      if (token == vocab_.end()) break;
      alone.ids.push_back(token->second);
    }
    if (alone.ids.size() == character.size()) return alone;
    alone.ids.clear();
  }
  if (unk_ >= 0) {
    alone.ids.push_back(unk_);
    alone.unknown = true;
  }
  return alone;
}

const Bpe::Merge* Bpe::FindMerge(int32_t left, int32_t right) const {
  const auto found = merges_.find(PairKey(left, right));
  return found == merges_.end() ? nullptr : &found->second;
}

bool Bpe::IsSeam(char32_t left, char32_t right) const {
  const size_t bit = JointBit(left, right);
  return (joints_[bit / 64] >> (bit % 64) & 1) == 0;
}

void Bpe::Encode(std::string_view word, Cache& cache, std::vector<int32_t>& to) const {
  if (!cuts_ || word.size() <= kUncutWord) {
    EncodePart(word, ignore_merges_, cache, to);
    return;
  }
  if (ignore_merges_) {
    if (const auto whole = vocab_.find(word); whole != vocab_.end()) {
      to.push_back(whole->second);
      return;
    }
  }
  EncodeRest(word, cache, to);
}

void Bpe::EncodeRest(std::string_view word, Cache& cache, std::vector<int32_t>& to) const {
  EncodePart(word.substr(EncodeBegin(word, cache, to)), /*look_up=*/false, cache, to);
}

size_t Bpe::EncodeBegin(std::string_view word, Cache& cache, std::vector<int32_t>& to) const {
  size_t begin = 0;
  size_t at = 0;
  char32_t left = 0;
  while (at < word.size()) {
    const size_t bytes = byte_level_ ? 1 : CharacterBytes(word[at]);
    const char32_t right =
        byte_level_ ? static_cast<unsigned char>(word[at]) : ValidCharacter(word.substr(at));
    if (at > begin && IsSeam(left, right)) {
      EncodePart(word.substr(begin, at - begin), /*look_up=*/false, cache, to);
      begin = at;
    }
    left = right;
    at += bytes;
  }
  return begin;
}

void Bpe::EncodePart(std::string_view word, bool look_up, Cache& cache, std::vector<int32_t>& to) const {
  if (word.empty()) return;
  auto& words = cache.words_[look_up];
  const bool cached = word.size() <= kCachedWord;
  if (cached) {
    if (const auto known = words.find(word); known != words.end()) {
      const auto first = cache.ids_.begin() + static_cast<ptrdiff_t>(known->second.begin);
      to.insert(to.end(), first, first + static_cast<ptrdiff_t>(known->second.count));
      return;
    }
  }
  const size_t before = to.size();
  const auto whole = look_up ? vocab_.find(word) : vocab_.end();
  if (whole != vocab_.end()) {
    to.push_back(whole->second);
  } else {
    PENSTOCK_CHECK(cache.most_bytes <= kMostPartBytes, "symbols are numbered by 31 bits");
    if (word.size() > cache.most_bytes) {
      cache.too_long = true;
      return;
    }
    Split(word, cache.symbols_);
    if (cache.symbols_.size() <= kShortWord) {
      MergeShort(cache);
    } else {
      MergeLong(cache);
    }
    for (const Cache::Symbol& symbol : cache.symbols_) {
      if (symbol.id >= 0) to.push_back(symbol.id);
    }
    if (cache.symbols_.capacity() > kCacheBlock) {  // a very long word's
      cache.symbols_ = {};
      cache.heap_ = {};
    }
  }
  if (!cached) return;
  if (words.size() >= kCachedWords) {
    for (auto& each : cache.words_) each.clear();
    cache.ids_.clear();
    cache.blocks_.resize(1);
    cache.block_used_ = 0;
  }
  if (cache.blocks_.empty() || cache.block_used_ + word.size() > kCacheBlock) {
    cache.blocks_.push_back(std::make_unique<char[]>(kCacheBlock));
    cache.block_used_ = 0;
  }
  char* const copy = cache.blocks_.back().get() + cache.block_used_;
  std::memcpy(copy, word.data(), word.size());
  cache.block_used_ += word.size();
  words.emplace(
      std::string_view(copy, word.size()),
      Cache::Tokens{static_cast<uint32_t>(cache.ids_.size()), static_cast<uint32_t>(to.size() - before)});
  cache.ids_.insert(cache.ids_.end(), to.begin() + static_cast<ptrdiff_t>(before), to.end());
}

void Bpe::Split(std::string_view word, std::vector<Cache::Symbol>& symbols) const {
  symbols.clear();
  const auto add = [&](int32_t id) {
    const auto at = static_cast<int32_t>(symbols.size());
    symbols.push_back({id, at - 1, at + 1});
  };
  // Unknown characters in a row become one token if they are to be fused. Hugging Face's order is kept: an
  // unknown token waits for the next character that has a token of its own, past characters that fall back
  // to bytes.
  bool waiting = false;
  const auto put = [&](const Alone& alone) {
    if (alone.unknown) {
      if (waiting && !fuse_unk_) add(unk_);
      waiting = true;
      return;
    }
    if (alone.own_token && waiting) {
      add(unk_);
      waiting = false;
    }
    for (const int32_t id : alone.ids) add(id);
  };
  if (byte_level_) {
    for (const char c : word) {
      const Alone& alone = bytes_[static_cast<unsigned char>(c)];
      if (cuts_) {
        add(alone.ids[0]);
      } else {
        put(alone);
      }
    }
  } else {
    for (size_t at = 0; at < word.size();) {
      const size_t bytes = CharacterBytes(word[at]);
      const std::string_view character = word.substr(at, bytes);
      at += bytes;
      if (const auto known = single_.find(ValidCharacter(character)); known != single_.end()) {
        if (waiting) {
          add(unk_);
          waiting = false;
        }
        add(known->second);
      } else {
        put(MeaningOf(character));
      }
    }
  }
  if (waiting) add(unk_);
  if (!symbols.empty()) symbols.back().next = -1;
}

// The lowest rank is looked for anew each time: faster than a heap for a few symbols.
void Bpe::MergeShort(Cache& cache) const {
  std::vector<Cache::Symbol>& symbols = cache.symbols_;
  std::array<int32_t, kShortWord> ids, ranks, merged;
  size_t count = symbols.size();
  for (size_t i = 0; i < count; ++i) ids[i] = symbols[i].id;
  const auto look = [&](size_t i) {
    const Merge* const merge = i + 1 < count ? FindMerge(ids[i], ids[i + 1]) : nullptr;
    ranks[i] = merge == nullptr ? kNoRank : merge->rank;
    merged[i] = merge == nullptr ? -1 : merge->id;
  };
  for (size_t i = 0; i < count; ++i) look(i);
  while (count > 1) {
    const auto lowest = static_cast<size_t>(
        std::min_element(ranks.begin(), ranks.begin() + static_cast<ptrdiff_t>(count)) - ranks.begin());
    if (ranks[lowest] == kNoRank) break;
    ids[lowest] = merged[lowest];
    --count;
    for (size_t i = lowest + 1; i < count; ++i) {
      ids[i] = ids[i + 1];
      ranks[i] = ranks[i + 1];
      merged[i] = merged[i + 1];
    }
    look(lowest);
    if (lowest > 0) look(lowest - 1);
  }
  symbols.resize(count);
  for (size_t i = 0; i < count; ++i) symbols[i].id = ids[i];
}

void Bpe::MergeLong(Cache& cache) const {
  std::vector<Cache::Symbol>& symbols = cache.symbols_;
  std::vector<Cache::Candidate>& heap = cache.heap_;
  const auto later = [](const Cache::Candidate& a, const Cache::Candidate& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.at > b.at;
  };
  const auto candidate = [&](int32_t at) -> std::optional<Cache::Candidate> {
    const Cache::Symbol& symbol = symbols[static_cast<size_t>(at)];
    if (symbol.next < 0) return std::nullopt;
    const Merge* const merge = FindMerge(symbol.id, symbols[static_cast<size_t>(symbol.next)].id);
    if (merge == nullptr) return std::nullopt;
    return Cache::Candidate{merge->rank, at, merge->id};
  };
  heap.clear();
  for (size_t i = 0; i < symbols.size(); ++i) {
    if (const auto found = candidate(static_cast<int32_t>(i))) heap.push_back(*found);
  }
  std::make_heap(heap.begin(), heap.end(), later);
  const auto push = [&](int32_t at) {
    if (const auto found = candidate(at)) {
      heap.push_back(*found);
      std::push_heap(heap.begin(), heap.end(), later);
    }
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), later);
    const Cache::Candidate best = heap.back();
    heap.pop_back();
    Cache::Symbol& left = symbols[static_cast<size_t>(best.at)];
    if (left.id < 0 || left.next < 0) continue;
    Cache::Symbol& right = symbols[static_cast<size_t>(left.next)];
    const Merge* const merge = FindMerge(left.id, right.id);
    if (merge == nullptr || merge->id != best.id) continue;  // one of the two is another by now
    left.id = best.id;
    right.id = -1;
    left.next = right.next;
    if (left.next >= 0) symbols[static_cast<size_t>(left.next)].previous = best.at;
    if (left.previous >= 0) push(left.previous);
    push(best.at);
  }
}

}  // namespace penstock::text
