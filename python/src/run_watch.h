// What a driven training tells of itself: the report (zero/engine/report.h), with what its own steps predict,
// and which step was committed last. An engine from Python measures no machine before it begins: there is a
// prediction when the first steps are over.
#ifndef PENSTOCK_PYTHON_RUN_WATCH_H_
#define PENSTOCK_PYTHON_RUN_WATCH_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "tiering/simulate/run_prediction.h"
#include "zero/engine/engine.h"
#include "zero/engine/report.h"

namespace penstock::python {

class RunWatch {
 public:
  // Hooks that call back here: the watch outlives the engine.
  void Attach(zero::EngineOptions* options);
  // The engine is made. `run_id`: as the run's record has it.
  void Planned(const zero::Engine& engine, const std::string& run_id);
  // A training step of `tokens` (0: not known) that computed `flops` in matrix products (0: not known). On
  // the engine's thread.
  void Stepped(const zero::Engine& engine, const zero::StepResult& result, int64_t tokens, double flops);
  // JSON, of all steps so far.
  std::string Report(const zero::Engine& engine);
  int64_t committed() const { return committed_.load(); }

 private:
  zero::Report report_;
  std::unique_ptr<tiering::RunPrediction> prediction_;
  std::atomic<int64_t> committed_ = 0;
};

}  // namespace penstock::python

#endif  // PENSTOCK_PYTHON_RUN_WATCH_H_
