// Text made into tokens once: what lies beside a data file when its model has a tokenizer.
//
//   DATA.DIGEST.bin       the tokens, as nanoGPT has them: uint16, or uint32 where the vocabulary is larger
//   DATA.DIGEST.examples  where each example begins, and which tokens are learned (the layout stands below)
//
// DIGEST names the text (its length, time and samples of it), the tokenizer and everything else that decides
// the tokens: another text or another tokenizer is another pair of files. The second file is written last, by
// renaming, when both are on the drive: a pair that was cut short is never used. Several processes that need
// one pair make it once.
//
// Layout of .examples, little-endian: 64 bytes {"PENSTOCK", uint64 1, tokens, examples, learned, skipped,
// first line skipped, XXH3 of all other bytes}; uint64 first token of each example; one bit for each token,
// the lowest first: it is learned; no bits where all tokens are. Where there are bits, no example's first
// token is learned: nothing is before it.
#ifndef PENSTOCK_MODELS_DATA_TOKEN_FILE_H_
#define PENSTOCK_MODELS_DATA_TOKEN_FILE_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "text/example.h"
#include "text/tokenizer.h"

namespace penstock::models {

// The first 64 bytes of .examples.
struct TokenFileHeader {
  char magic[8] = {'P', 'E', 'N', 'S', 'T', 'O', 'C', 'K'};
  uint64_t version = 1;
  uint64_t tokens = 0, examples = 0, learned = 0, skipped = 0, first_skipped_line = 0;
  uint64_t checksum = 0;
};

// Of a tokenizer's files: what it makes of a text is a function of these.
absl::StatusOr<uint64_t> TokenizerDigest(const std::string& path);

struct TokenFileOptions {
  // Of lines with messages. Default: they are refused.
  std::optional<text::ChatTemplate> chat;
  // Records that cannot be used are passed over and counted, and what is no UTF-8 in a text is read as
  // U+FFFD. Default: the first one is an error.
  bool skip_broken = false;
  // Of the model: a text with a token from here on is an error, for the model has no row for it. 0: none is.
  int64_t vocabulary = 0;
  // Asked now and then with the share that is done; false ends with kCancelled.
  std::function<bool(double share)> progress;
};

struct TokenFile {
  std::string tokens_path, examples_path;
  int64_t tokens = 0, examples = 0, learned = 0;
  int64_t skipped = 0, first_skipped_line = 0;  // records count from 1
  bool was_there = false;
  // All of it is learned: one stream, whatever its examples.
  bool is_stream() const { return learned == tokens; }
};

// The tokens of `path`: an example of each record, or one text, as models/data/data_records.h tells them
// apart. `tokenizer_path`: the file or directory that `tokenizer` was opened from. kInvalidArgument names the
// record; kPermissionDenied, kResourceExhausted: the directory of `path` takes no files; kAborted: the text
// changed meanwhile; kResourceExhausted too: a word, a record or a text is longer than the tokenizer's limits
// (Tokenizer::LimitMemory). Memory: what these allow, a few MB, 8 bytes an example, and a bit a token where
// not all are learned.
absl::StatusOr<TokenFile> MakeTokenFile(const std::string& path, const text::Tokenizer& tokenizer,
                                        const std::string& tokenizer_path, const TokenFileOptions& options);

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_DATA_TOKEN_FILE_H_
