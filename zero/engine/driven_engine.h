// An engine on a thread of its own, for a model that its owner drives (zero/compute/driven_compute.h).
//
//   auto engine = DrivenEngine::Create(measured, options);
//   for each step:
//     (*engine)->Begin(Next::kTrain);
//     ... the owner computes: Enter and Leave of every use, on (*engine)->compute() ...
//     StepResult result = *(*engine)->Finish();
//
// Threads: Begin, Finish and Call from one thread at a time. EngineHooks run on the engine's thread.
#ifndef PENSTOCK_ZERO_ENGINE_DRIVEN_ENGINE_H_
#define PENSTOCK_ZERO_ENGINE_DRIVEN_ENGINE_H_

#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/process_mark.h"
#include "zero/compute/driven_compute.h"
#include "zero/engine/engine.h"

namespace penstock::zero {

class DrivenEngine {
 public:
  // `options.initial_values` gives a new run's values; `options.example` and batches are the owner's alone,
  // and are not looked at. `drivers` as DrivenCompute's.
  static absl::StatusOr<std::unique_ptr<DrivenEngine>> Create(Measured given, EngineOptions options,
                                                              int drivers = 1);
  // A pass that is open fails: the last commit stands. Waits for a use that is entered, by whichever thread.
  ~DrivenEngine();
  DrivenEngine(const DrivenEngine&) = delete;
  DrivenEngine& operator=(const DrivenEngine&) = delete;

  DrivenCompute& compute() { return *compute_; }

  // A training step begins: its uses may be entered. kFailedPrecondition: one is open.
  absl::Status Begin(StepOptions options = {});
  // An evaluation of one micro-batch begins.
  absl::Status BeginEvaluation();
  // The pass is over: no driver is inside a use, and none enters any more. Waits for the engine.
  // kFailedPrecondition: none is open; a use is entered, and the pass stays open; or a use was not entered,
  // which fails the pass. kCancelled: the caller was interrupted (DrivenCompute::set_interrupted) while the
  // engine was at work; the pass stays open, and Finish may be called again. After an error of the pass the
  // next one may begin where Engine::usable is OK.
  absl::StatusOr<StepResult> Finish();  // of an evaluation only the loss is set

  // `call` on the engine's thread, while no pass is open: everything else that an Engine does, steps and
  // evaluations excepted (kFailedPrecondition). Over several ranks an interrupt of the caller's
  // (DrivenCompute::set_interrupted) ends the wait for the others, and with it the run, on all of them.
  absl::Status Call(const std::function<absl::Status(Engine&)>& call);
  // Engine::Replan, with what the owner has measured of the same model for other batches.
  absl::Status Replan(Measured again);
  // Of what does not change but by Replan.
  const EnginePlan& plan() const { return engine_->plan(); }

 private:
  class Thread;
  DrivenEngine(std::shared_ptr<DrivenCompute> compute, std::unique_ptr<Thread> thread);
  absl::Status Start(std::function<absl::StatusOr<StepResult>(Engine&)> pass);

  const ProcessMark made_in_;
  std::shared_ptr<DrivenCompute> compute_;
  std::shared_ptr<Comm> comm_;      // null: there are no other ranks
  std::unique_ptr<Engine> engine_;  // made, used and destroyed on the thread
  int micro_batches_ = 1;
  std::optional<std::future<absl::StatusOr<StepResult>>> pass_;
  std::unique_ptr<Thread> thread_;  // ends first
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_ENGINE_DRIVEN_ENGINE_H_
