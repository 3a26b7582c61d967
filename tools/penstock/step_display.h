// The live line of a training: where it is, how fast, and what it waits for.
#ifndef PENSTOCK_TOOLS_PENSTOCK_STEP_DISPLAY_H_
#define PENSTOCK_TOOLS_PENSTOCK_STEP_DISPLAY_H_

#include <cstdint>
#include <deque>

#include "tiering/program/op.h"
#include "tools/base/progress.h"
#include "zero/engine/engine.h"

namespace penstock::tools {

class StepDisplay {
 public:
  StepDisplay(Progress* progress, int64_t steps, int64_t tokens_per_step)
      : progress_(*progress), steps_(steps), tokens_per_step_(tokens_per_step) {}

  // `newest`: the last step of this process, step 0 if there is none; `seconds`: since its first began.
  // Called after every step and, within one, as often as somebody may look.
  void Show(const zero::Engine& engine, const zero::StepResult& newest, double seconds,
            tiering::Stall waiting);

 private:
  // By the drive, until then.
  struct Moved {
    double at = 0;
    uint64_t read_bytes = 0, write_bytes = 0;
  };
  void NoteMoved(const zero::Engine& engine, double at, double step_seconds);

  Progress& progress_;
  const int64_t steps_, tokens_per_step_;
  std::deque<Moved> moved_;
};

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_STEP_DISPLAY_H_
