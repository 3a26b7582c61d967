#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "base/status_macros.h"
#include "text/strings.h"
#include "text/tokenizer.h"
#include "text/tokenizer_impl.h"
#include "text/utf8.h"

namespace penstock::text {

// A part goes through three buffers: bytes that are no whole character yet, text in which an added token may
// still begin or which may be composed with what follows, and normalized text whose last word may go on.
struct Encoder::Impl {
  Impl(const Tokenizer& made_for, const EncodeOptions& with)
      : tokenizer(made_for), parts(*made_for.impl_), options(with), work(parts), streams(Streams()) {}

  // With normalized tokens, those stand in the text as it is only if nothing is normalized.
  const AddedTokens& tokens() const {
    return parts.raw_tokens.empty() ? parts.normalized_tokens : parts.raw_tokens;
  }
  bool Streams() const {
    const bool one_set = parts.raw_tokens.empty()
                             ? parts.normalizer.empty() || parts.normalized_tokens.empty()
                             : parts.normalized_tokens.empty();
    const bool words = parts.pre_tokenizer.HasParts();
    const bool seams =
        parts.bpe.cuts() && (parts.pre_tokenizer.empty() || parts.pre_tokenizer.OnlyMetaspace() != nullptr);
    return one_set && tokens().plain() && parts.normalizer.HasParts() && (words || seams);
  }

  absl::Status Run(bool last, std::vector<int32_t>& ids);
  absl::Status TakeText(std::string_view text, bool ends, std::vector<int32_t>& ids);
  absl::Status TakeWords(bool ends, std::vector<int32_t>& ids);
  // An error with the place in the text up to which it was read.
  absl::Status Placed(const absl::Status& status) const {
    return absl::Status(status.code(), Cat("before byte ", taken, ": ", status.message()));
  }
  void StartOver() {
    bytes.clear();
    raw.clear();
    normal.clear();
    taken = 0;
    begun = in_stretch = in_word = false;
    at_start = true;
  }

  const Tokenizer& tokenizer;
  const Tokenizer::Impl& parts;
  const EncodeOptions options;
  Tokenizer::Impl::Borrowed work;
  const bool streams;
  std::string bytes, raw, normal;
  uint64_t taken = 0;       // bytes of the text before `bytes`
  bool begun = false;       // the template's begin is out
  bool at_start = true;     // nothing but this stretch was seen
  bool in_stretch = false;  // text between added tokens has begun
  bool in_word = false;     // tokens of the word that `normal` begins with are out
};

// Words of `normal` that are certain; all, where the stretch ends.
absl::Status Encoder::Impl::TakeWords(bool ends, std::vector<int32_t>& ids) {
  const auto encode = [&](std::string_view word) { return parts.EncodeWord(word, *work, ids); };
  if (parts.pre_tokenizer.HasParts()) {
    if (ends) return parts.pre_tokenizer.Run(normal, false, (*work).scratch, encode);
    ASSIGN_OR_RETURN(const size_t done, parts.pre_tokenizer.RunPart(normal, (*work).scratch, encode));
    normal.erase(0, done);
    return absl::OkStatus();
  }
  // The stretch is one word; while it is short it may still be a token.
  if (ends && !in_word) return normal.empty() ? absl::OkStatus() : encode(normal);
  if (ends) {
    parts.bpe.EncodeRest(normal, (*work).cache, ids);
  } else if (in_word || normal.size() > parts.bpe.longest_token()) {
    const size_t done = parts.bpe.EncodeBegin(normal, (*work).cache, ids);
    in_word = in_word || done > 0;
    normal.erase(0, done);
  }
  return parts.CheckWords(*work);
}

// Text of the stretch between two added tokens.
absl::Status Encoder::Impl::TakeText(std::string_view text, bool ends, std::vector<int32_t>& ids) {
  if (!text.empty()) {
    std::string part(text);
    RETURN_IF_ERROR(parts.normalizer.ApplyToPart(!in_stretch, part, (*work).scratch));
    if (const Metaspace* const metaspace = parts.pre_tokenizer.OnlyMetaspace()) {
      part = ReplacedAll(part, " ", metaspace->replacement);
      const bool prepend = metaspace->prepend == Metaspace::Prepend::kAlways ||
                           (metaspace->prepend == Metaspace::Prepend::kFirst && at_start);
      if (!in_stretch && prepend && !part.starts_with(metaspace->replacement))
        normal.append(metaspace->replacement);
    }
    in_stretch = true;
    normal.append(part);
    // Metaspace is done; what it makes is a word.
    RETURN_IF_ERROR(TakeWords(ends, ids));
  } else if (ends && in_stretch) {
    RETURN_IF_ERROR(TakeWords(true, ids));
  }
  if (ends) {
    normal.clear();
    at_start = at_start && !in_stretch;
    in_stretch = in_word = false;
  }
  return absl::OkStatus();
}

absl::Status Encoder::Impl::Run(bool last, std::vector<int32_t>& ids) {
  if (!begun && options.add_special_tokens) ids.insert(ids.end(), parts.prefix.begin(), parts.prefix.end());
  begun = true;
  // Whole characters go on.
  std::string_view rest = bytes;
  while (!rest.empty()) {
    const size_t whole = std::min(FindBroken(rest), rest.size());
    raw.append(rest.substr(0, whole));
    taken += whole;
    rest.remove_prefix(whole);
    if (rest.empty()) break;
    const Utf8Character broken = FirstCharacter(rest);
    if (broken.kind == Utf8Character::kCutShort && !last) break;
    if (!options.replace_broken_utf8)
      return absl::InvalidArgumentError(
          Cat("the text is no UTF-8 at byte ", taken, "; convert it, or ask for U+FFFD in its place"));
    raw.append(kReplacementCharacter);
    taken += broken.bytes;
    rest.remove_prefix(broken.bytes);
  }
  bytes.erase(0, bytes.size() - rest.size());

  // A token that begins before `certain` is the same whatever follows.
  const std::string_view text = raw;
  const size_t longest = tokens().longest();
  const size_t certain =
      last ? text.size() : text.size() - std::min(text.size(), longest == 0 ? 0 : longest - 1);
  size_t from = 0;
  size_t cut = certain;
  while (true) {
    const AddedTokens::Piece token = tokens().FindFirst(text, from);
    if (token.id < 0 || token.begin >= certain) break;
    RETURN_IF_ERROR(TakeText(text.substr(from, token.begin - from), /*ends=*/true, ids));
    ids.push_back(token.id);
    at_start = false;
    from = token.end;
  }
  cut = std::max(cut, from);
  if (!last) {
    const auto may_cut = [&](size_t at) {
      return (static_cast<unsigned char>(text[at]) & 0xC0) != 0x80 &&
             parts.normalizer.MayBeginPart(ValidCharacter(text.substr(at)));
    };
    // What comes next is not known, and may be composed with the last character.
    if (cut == text.size() && cut > from) cut -= LastCharacterBytes(text);
    while (cut > from && !may_cut(cut)) --cut;
  }
  RETURN_IF_ERROR(TakeText(text.substr(from, cut - from), last, ids));
  raw.erase(0, cut);
  return absl::OkStatus();
}

Encoder::Encoder(const Tokenizer& tokenizer, const EncodeOptions& options)
    : impl_(new Impl(tokenizer, options)) {}
Encoder::~Encoder() = default;

bool Encoder::streams() const { return impl_->streams; }

absl::Status Encoder::Append(std::string_view part, std::vector<int32_t>& ids) {
  Impl& impl = *impl_;
  const TextLimits& limits = impl.parts.limits;
  if (!impl.streams) {
    if (part.size() > limits.text - std::min(limits.text, impl.bytes.size()))
      return Tokenizer::Impl::TooLong("the text, which this tokenizer cuts only as a whole,", limits.text);
    impl.bytes.append(part);
    return absl::OkStatus();
  }
  impl.bytes.append(part);
  absl::Status status = impl.Run(/*last=*/false, ids);
  // What `raw` and `normal` hold back is of one word.
  if (status.ok() && impl.raw.size() + impl.normal.size() > limits.begun)
    status = Tokenizer::Impl::TooLong("a word without an end", limits.begun);
  return absl::IsResourceExhausted(status) ? impl.Placed(status) : status;
}

absl::Status Encoder::Finish(std::vector<int32_t>& ids) {
  if (!impl_->streams) {
    RETURN_IF_ERROR(impl_->tokenizer.Append(impl_->bytes, impl_->options, ids));
  } else {
    const absl::Status status = impl_->Run(/*last=*/true, ids);
    if (!status.ok()) return absl::IsResourceExhausted(status) ? impl_->Placed(status) : status;
    if (impl_->options.add_special_tokens)
      ids.insert(ids.end(), impl_->parts.suffix.begin(), impl_->parts.suffix.end());
  }
  impl_->StartOver();
  return absl::OkStatus();
}

}  // namespace penstock::text
