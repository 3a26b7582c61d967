// What one step computes, block by block, and how fast: DeepSpeed's flops_profiler, from the shapes of the
// model's family (models/families/family.h: StageProducts) and the times of the engine's lanes.
//
// Counted are matrix products. Forward is what StageProducts says; backward twice that, for the gradients of
// inputs and of weights. The model's own work is so three times forward. Backward computes each stage once
// more from its saved activations, which is work but not the model's: four times forward is computed.
#ifndef PENSTOCK_TOOLS_PENSTOCK_FLOPS_PROFILE_H_
#define PENSTOCK_TOOLS_PENSTOCK_FLOPS_PROFILE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "models/families/family.h"
#include "run/config.h"
#include "tiering/plan/model_graph.h"
#include "tiering/program/op.h"
#include "zero/engine/engine.h"

namespace penstock::tools {

// Of all micro-batches of one rank.
double ModelFlopsPerStep(const std::vector<models::StageProducts>& products, int64_t sequences,
                         int64_t length);

class FlopsProfile {
 public:
  struct Step {
    int64_t sequences = 0, length = 0;  // of one rank's step
    int64_t parameters = 0;
    int ranks = 1;
    // What the best product of matrices reaches here, in operations a second; 0: not measured.
    double product_flops_per_second = 0;
    std::string product = "";  // "1024 x 1024 in bf16, 2 threads"
  };
  FlopsProfile(const run::FlopsProfilerConfig& config, const std::vector<models::StageProducts>& products,
               const Step& step);

  int64_t profile_step() const { return step_number_; }
  // Of the executor's observer.
  void Observe(const tiering::Op& op, double start_seconds, double end_seconds);
  // When the step is over. Lines, the last with its end.
  std::string Text(const zero::StepResult& result) const;

 private:
  struct Block {
    std::string name;  // of its first stage
    double flops = 0, backward_flops = 0, forward_seconds = 0, backward_seconds = 0;
    int64_t parameters = 0;  // of matrices, once for each use
    double seconds() const { return forward_seconds + backward_seconds; }
  };
  std::string Summary(const zero::StepResult& result) const;
  std::string Share(double achieved) const;
  std::string Top() const;
  std::string Table() const;

  const run::FlopsProfilerConfig config_;
  const int64_t step_number_;
  const Step step_;
  std::vector<Block> stages_;  // in the order of a pass
};

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_FLOPS_PROFILE_H_
