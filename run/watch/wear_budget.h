// penstock.wear_budget_tb: how much a run may write to drives in all. A plan that will write more is reported
// before the first step, and by `penstock plan`, with what would write less; a run that has written as much
// stops after its step.
//
// It stops rather than warns: wear cannot be undone, and a stop loses nothing, since --resume with a larger
// budget goes on.
#ifndef PENSTOCK_RUN_WATCH_WEAR_BUDGET_H_
#define PENSTOCK_RUN_WATCH_WEAR_BUDGET_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "zero/engine/engine.h"

namespace penstock::run {

class WearBudget {
 public:
  // `terabytes`: of 10^12 bytes; empty: no bound.
  explicit WearBudget(std::optional<double> terabytes)
      : bytes_(terabytes.has_value() ? *terabytes * 1e12 : 0) {}

  bool any() const { return bytes_ > 0; }
  // Of all ranks, with what was written before this process. kResourceExhausted: it is used up.
  absl::Status Check(double written_bytes) const;

  struct Future {
    double written_bytes = 0;               // by now, of all ranks
    int64_t first_step = 0, last_step = 0;  // the one that was made last, and the one that will be
  };
  // What the run will have written by its end. Where that is more than the budget, lines that say so, after
  // which step it will stop, and what would write less; else none.
  std::vector<std::string> Warnings(const zero::EnginePlan& plan, const zero::EngineOptions& options,
                                    const Future& future) const;

 private:
  const double bytes_;
};

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_WATCH_WEAR_BUDGET_H_
