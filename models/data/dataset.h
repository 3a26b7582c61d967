// Training text as tokens: bytes of any file, nanoGPT's .bin (little-endian uint16 or uint32 tokens, no
// header), or what a tokenizer made of texts and of prompts (models/data/token_file.h).
//
// Of examples that are not learned whole, a row has as many as fit, whole and in the file's order; what is
// left of it is padding. Longer ones are cut. Targets that are not learned are kNotLearned. Every row comes
// once in an epoch: row r of a step is the next one of a permutation that is a function of seed and epoch.
//
// Which sequences a step sees is a pure function of (seed, step): nothing is stored but the step. Row r of a
// step's accumulation * world * batch rows starts at hash(seed, step, r) modulo the number of places where a
// sequence fits, so W ranks with batch B see what one rank with batch W * B sees, in the same order, and a
// step's rows do not depend on how they are cut into micro-batches, ranks and batches.
//
// Reads are pread into a small buffer: a file that shrinks or fails under a run is an error, never a signal.
// Nothing is cached here beyond the kernel's page cache. All methods are const and may be called from many
// threads at once.
#ifndef PENSTOCK_MODELS_DATA_DATASET_H_
#define PENSTOCK_MODELS_DATA_DATASET_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "models/data/token_file.h"

namespace penstock::models {

// A target that no loss counts, as LibTorch's and transformers' losses have it.
inline constexpr int64_t kNotLearned = -100;

enum class TokenFormat { kBytes, kUint16, kUint32 };

// By the contract of --data and --vocab: a name that ends in .bin, or any file when a vocabulary is given
// (vocab > 0), holds tokens, of 16 bits up to a vocabulary of 65536 and of 32 beyond; everything else is
// text, its bytes the tokens.
TokenFormat InferTokenFormat(const std::string& path, int64_t vocab);

// Which rows of which step. Ranks count from 0, steps from 1, micro-batches from 0 within a step.
struct BatchPlace {
  int64_t step = 1;
  int64_t micro_batch = 0;
  int64_t rank = 0;
  int64_t world = 1;
  int64_t rows = 0;  // of a whole step, all ranks and micro-batches: what an epoch of examples is counted by
};

class Dataset {
 public:
  // Opens and checks `path`: kInvalidArgument with one line when it is missing, not readable, not a regular
  // file, empty, not a whole number of tokens, or shorter than one sequence of `seq` + 1 tokens. `vocab`:
  // token ids must be below it; 0 means 256 for bytes and the format's whole range otherwise.
  static absl::StatusOr<std::unique_ptr<Dataset>> Open(const std::string& path, TokenFormat format,
                                                       int64_t vocab, int64_t seq);
  // Of a pair that MakeTokenFile made: a stream of all tokens, or rows of examples. Memory: 16 bytes a row.
  static absl::StatusOr<std::unique_ptr<Dataset>> OpenExamples(const TokenFile& file, int64_t vocab,
                                                               int64_t seq);
  ~Dataset();
  Dataset(const Dataset&) = delete;
  Dataset& operator=(const Dataset&) = delete;

  const std::string& path() const { return path_; }
  TokenFormat format() const { return format_; }
  int64_t vocab() const { return vocab_; }
  int64_t seq() const { return seq_; }
  int64_t tokens() const { return tokens_; }
  // Of examples that are not learned whole; 0: a stream.
  int64_t rows() const { return static_cast<int64_t>(rows_.size()); }
  int64_t cut_examples() const { return cut_; }
  int64_t lost_examples() const { return lost_; }            // nothing of them is left to learn
  int64_t learned_tokens() const { return learned_count_; }  // of all rows
  // Of where examples begin and what of them is learned; 0: a stream.
  uint64_t examples_digest() const { return examples_digest_; }
  // Takes the last `share` (above 0, below 1) away, and returns it as a dataset of its own: of a stream its
  // last tokens, of examples the last rows, at least one sequence. Before the first Fill. kInvalidArgument:
  // not even one sequence would be left.
  absl::StatusOr<std::unique_ptr<Dataset>> HoldOut(double share);
  // A digest of the file's length and 16 samples of 4 KiB, spread evenly: enough to refuse the resume of a
  // run with other data, at the cost of 16 small reads. Of a part also where it begins and ends.
  absl::StatusOr<uint64_t> Fingerprint() const;

  // Fills `batch` rows of seq() token ids and, shifted by one, their targets; both arrays hold batch * seq()
  // values, row by row. kDataLoss when the file ends early (it was truncated), kOutOfRange when a token id is
  // not below the vocabulary, another code when the read fails; always with path, offset and the way out. The
  // outputs are then unspecified.
  absl::Status Fill(const BatchPlace& place, int64_t batch, uint64_t seed, int64_t* tokens,
                    int64_t* targets) const;

  // One row of Fill: row `row` of step `step` (of a stream), or the `index`-th from 0 of all epochs (of
  // examples).
  struct SequencePlace {
    int64_t step = 1, row = 0, index = 0;
  };
  absl::Status FillSequence(const SequencePlace& place, uint64_t seed, int64_t* tokens,
                            int64_t* targets) const;
  // kInvalidArgument where no batch is at `place`.
  absl::Status CheckPlace(const BatchPlace& place, int64_t batch, bool needs_rows) const;

  // Evaluation: windows of seq() tokens one after the other, window w at token w * seq(); none overlap but
  // for the one token that is the last target of a window and the first input of the next.
  // Of examples: their rows.
  int64_t EvalWindows() const { return rows_.empty() ? (tokens_ - 1) / seq_ : rows(); }
  // As Fill, for windows first .. first + count - 1, which must exist.
  absl::Status FillEval(int64_t first, int64_t count, int64_t* tokens, int64_t* targets) const;

 private:
  Dataset(std::string path, int fd, TokenFormat format, int64_t vocab, int64_t seq, int64_t tokens);
  struct Row {
    int64_t first = 0, count = 0;  // tokens, seq + 1 at the most
  };
  void Pack(const std::vector<uint64_t>& starts);
  absl::Status ReadRow(int64_t start, int64_t count, uint32_t* row) const;
  int64_t LearnedOf(const Row& row) const;
  absl::Status FillExamples(const Row& of, uint32_t* row, int64_t* tokens, int64_t* targets) const;
  absl::Status FillRow(int64_t start, uint32_t* row, int64_t* tokens, int64_t* targets) const;

  std::string path_;
  int fd_;
  TokenFormat format_;
  int64_t vocab_;
  int64_t seq_;
  int64_t tokens_;
  // Of a part of a file (HoldOut): its first token, and how many the file has.
  int64_t first_token_ = 0, file_tokens_ = 0;
  bool is_part_ = false;
  // Of examples.
  std::vector<Row> rows_;
  std::shared_ptr<std::vector<uint8_t>> learned_;  // a bit a token of the file
  uint64_t examples_digest_ = 0;
  int64_t cut_ = 0, lost_ = 0, learned_count_ = 0;
};

// What decides which sequences a step sees, as a run's record names it.
inline constexpr const char* kSequenceOrder = "a hash of seed, step and row";

// The first token of row `row` of step `step` among `places` possible ones: a counter-based hash (three
// rounds of splitmix64's finalizer), mapped to the range by the high half of a 128-bit product. Part of what
// a run's losses depend on: it never changes. Exposed for tests.
int64_t SequenceStart(uint64_t seed, int64_t step, int64_t row, int64_t places);

// The row that comes `index`-th in an epoch of `rows`: a permutation for each seed and epoch (a Feistel
// network over the bits of a row, walked until it is one). Never changes either.
int64_t RowOfEpoch(uint64_t seed, int64_t epoch, int64_t index, int64_t rows);

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_DATA_DATASET_H_
