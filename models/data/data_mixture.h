// Several texts that a run learns from, each with its share of the sequences; or one.
//
// A cycle is kCycle sequences. Each text has a fixed number of them, by the largest remainder of its share,
// in an order that is a function of seed and cycle. So shares hold exactly over every cycle, and which
// sequence comes when is a pure function of seed, step and row, as in a Dataset. Rows of examples come once
// in an epoch of their own text. Of one text, all is as that Dataset has it.
#ifndef PENSTOCK_MODELS_DATA_DATA_MIXTURE_H_
#define PENSTOCK_MODELS_DATA_DATA_MIXTURE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "models/data/dataset.h"

namespace penstock::models {

class DataMixture {
 public:
  static constexpr int64_t kCycle = 1000;

  // `weights`: one for each text, above 0, in any unit; empty: by the texts' tokens. All texts have one
  // seq(). kInvalidArgument: another number of weights than texts, one that is not above 0 or not finite, or
  // a share of less than half a sequence in a cycle.
  static absl::StatusOr<std::unique_ptr<DataMixture>> Of(std::vector<std::unique_ptr<Dataset>> texts,
                                                         const std::vector<double>& weights);

  const std::vector<std::unique_ptr<Dataset>>& texts() const { return texts_; }
  // Sequences of each text in a cycle; kCycle for one text.
  const std::vector<int64_t>& sequences_in_cycle() const { return counts_; }
  // Of one text its own; of several, of all of them and their numbers in a cycle.
  absl::StatusOr<uint64_t> Fingerprint() const;
  // Takes the end of each text away (Dataset::HoldOut), as a mixture of its own, to evaluate on.
  absl::StatusOr<std::unique_ptr<DataMixture>> HoldOut(double share);

  // As Dataset's. `place.rows` is needed.
  absl::Status Fill(const BatchPlace& place, int64_t batch, uint64_t seed, int64_t* tokens,
                    int64_t* targets) const;
  // The windows of all texts, one text after the other.
  int64_t EvalWindows() const;
  absl::Status FillEval(int64_t window, int64_t* tokens, int64_t* targets) const;

 private:
  DataMixture(std::vector<std::unique_ptr<Dataset>> texts, std::vector<int64_t> counts)
      : texts_(std::move(texts)), counts_(std::move(counts)) {}

  std::vector<std::unique_ptr<Dataset>> texts_;
  std::vector<int64_t> counts_;
};

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_DATA_DATA_MIXTURE_H_
