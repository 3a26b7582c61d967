// What a Tokenizer holds. Internal to text/.
#ifndef PENSTOCK_TEXT_TOKENIZER_IMPL_H_
#define PENSTOCK_TEXT_TOKENIZER_IMPL_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/decoder.h"
#include "text/normalizer.h"
#include "text/pre_tokenizer.h"
#include "text/strings.h"
#include "text/tokenizer.h"
#include "text/tokenizer_config.h"

namespace penstock::text {

struct Tokenizer::Impl {
  // What a thread needs while it encodes. It goes back when it is done, with its cache of words.
  struct Workspace {
    RegexScratch scratch;
    Bpe::Cache cache;
    std::string normalized;
  };
  class Borrowed {
   public:
    explicit Borrowed(const Impl& impl) : impl_(impl) {
      const std::lock_guard lock(impl_.mutex);
      if (!impl_.idle.empty()) {
        workspace_ = std::move(impl_.idle.back());
        impl_.idle.pop_back();
      }
      if (workspace_ == nullptr) workspace_ = std::make_unique<Workspace>();
      workspace_->cache.most_bytes = impl.limits.word;
      workspace_->cache.too_long = false;
    }
    ~Borrowed() {
      if (workspace_->normalized.capacity() > (1 << 20)) workspace_->normalized = {};
      const std::lock_guard lock(impl_.mutex);
      impl_.idle.push_back(std::move(workspace_));
    }
    Borrowed(const Borrowed&) = delete;
    Borrowed& operator=(const Borrowed&) = delete;
    Workspace& operator*() { return *workspace_; }

   private:
    const Impl& impl_;
    std::unique_ptr<Workspace> workspace_;
  };

  explicit Impl(Bpe made) : bpe(std::move(made)) {}
  static absl::StatusOr<std::unique_ptr<Impl>> Create(std::string_view text, const TokenizerConfig& config);
  // Appends the tokens of one word.
  absl::Status EncodeWord(std::string_view word, Workspace& work, std::vector<int32_t>& to) const {
    bpe.Encode(word, work.cache, to);
    return CheckWords(work);
  }
  // Whether all of the words so far were merged.
  absl::Status CheckWords(const Workspace& work) const {
    return work.cache.too_long ? TooLong("a word without a place to cut it", limits.word) : absl::OkStatus();
  }
  static absl::Status TooLong(std::string_view what, size_t most) {
    return absl::ResourceExhaustedError(Cat(
        what, " is longer than ", most,
        " bytes, the most that is taken at once: cut it (a space, a line break, a document of its own), or "
        "allow more memory (`host_memory`)"));
  }
  absl::Status EncodePiece(std::string_view piece, bool at_start, Workspace& work,
                           std::vector<int32_t>& ids) const;
  absl::Status NumberSpecialIds(const std::string& path, const nlohmann::json& config);

  const Bpe bpe;
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  Decoder decoder;
  AddedTokens raw_tokens;         // found in the text as it is
  AddedTokens normalized_tokens;  // found in what the normalizer makes of it
  std::vector<int32_t> prefix, suffix;
  std::vector<std::string> tokens;  // by id; empty where there is none
  std::vector<std::string> texts;   // what Decoder::TextOf makes of them, but for the first of a sequence
  std::vector<bool> special;
  TextMap<std::string, int32_t> ids;
  SpecialIds special_ids;
  std::vector<std::string> notes;
  bool config_counts = false;
  size_t base_tokens = 0;  // of tokenizer.json alone
  TextLimits limits;
  mutable std::mutex mutex;
  mutable std::vector<std::unique_ptr<Workspace>> idle;
};

}  // namespace penstock::text

#endif  // PENSTOCK_TEXT_TOKENIZER_IMPL_H_
