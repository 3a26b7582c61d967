#include "zero/engine/driven_engine.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "base/status_macros.h"

namespace penstock::zero {

// Runs what it is given, one after the other.
class DrivenEngine::Thread {
 public:
  Thread() : thread_([this] { Work(); }) {}
  // After all that it was given.
  ~Thread() {
    Add(nullptr);
    thread_.join();
  }
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;

  void Add(std::function<void()> work) {
    {
      std::lock_guard lock(mutex_);
      queue_.push_back(std::move(work));
    }
    there_.notify_one();
  }

  // And waits until it has run; `meanwhile`: now and then.
  template <typename T>
  T Run(const std::function<T()>& work, const std::function<void()>& meanwhile = nullptr) {
    std::promise<T> promise;
    std::future<T> future = promise.get_future();
    Add([&] { promise.set_value(work()); });
    while (meanwhile && future.wait_for(DrivenCompute::kPatience) != std::future_status::ready) meanwhile();
    return future.get();
  }

 private:
  void Work() {
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock lock(mutex_);
        there_.wait(lock, [&] { return !queue_.empty(); });
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      if (!work) return;
      work();
    }
  }

  std::mutex mutex_;
  std::condition_variable there_;
  std::deque<std::function<void()>> queue_;
  std::thread thread_;
};

DrivenEngine::DrivenEngine(std::shared_ptr<DrivenCompute> compute, std::unique_ptr<Thread> thread)
    : compute_(std::move(compute)), thread_(std::move(thread)) {}

absl::StatusOr<std::unique_ptr<DrivenEngine>> DrivenEngine::Create(Measured given, EngineOptions options,
                                                                   int drivers) {
  auto compute = std::make_shared<DrivenCompute>(std::move(given), drivers);
  auto made = std::unique_ptr<DrivenEngine>(new DrivenEngine(std::move(compute), std::make_unique<Thread>()));
  made->micro_batches_ = options.micro_batches;
  made->comm_ = options.comm;
  options.example = DrivenCompute::Unseen();
  RETURN_IF_ERROR(made->thread_->Run<absl::Status>([&]() -> absl::Status {
    ASSIGN_OR_RETURN(made->engine_, Engine::Create(made->compute_, std::move(options)));
    return absl::OkStatus();
  }));
  return made;
}

DrivenEngine::~DrivenEngine() {
  if (!made_in_.here()) {
    // Their thread and their waiters are the parent's: nothing of them may even be destroyed.
    (void)engine_.release();
    (void)thread_.release();
    // Without memory for that the child ends. NOLINTBEGIN(bugprone-unhandled-exception-at-new)
    (void)new auto(std::move(pass_));
    (void)new auto(std::move(compute_));
    // NOLINTEND(bugprone-unhandled-exception-at-new)
    return;
  }
  if (pass_.has_value()) {
    compute_->Fail(absl::CancelledError("the engine was closed in the middle of a pass"));
    pass_->wait();
  }
  thread_->Run<bool>([this] {
    engine_.reset();
    return true;
  });
  thread_.reset();
}

absl::Status DrivenEngine::Start(std::function<absl::StatusOr<StepResult>(Engine&)> pass) {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  if (pass_.has_value()) return absl::FailedPreconditionError("a pass is open: Finish ends it");
  compute_->Open();
  auto promise = std::make_shared<std::promise<absl::StatusOr<StepResult>>>();
  pass_ = promise->get_future();
  thread_->Add([this, promise, pass = std::move(pass)] {
    absl::StatusOr<StepResult> result = pass(*engine_);
    compute_->Close(result.status());
    promise->set_value(std::move(result));
  });
  return absl::OkStatus();
}

absl::Status DrivenEngine::Begin(StepOptions options) {
  return Start([batches = micro_batches_, options = std::move(options)](Engine& engine) {
    return engine.Step(std::vector<Batch>(static_cast<size_t>(batches), DrivenCompute::Unseen()), options);
  });
}

absl::Status DrivenEngine::BeginEvaluation() {
  return Start([](Engine& engine) -> absl::StatusOr<StepResult> {
    StepResult result;
    ASSIGN_OR_RETURN(result.loss, engine.Evaluate({DrivenCompute::Unseen()}));
    return result;
  });
}

absl::StatusOr<StepResult> DrivenEngine::Finish() {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  if (!pass_.has_value()) return absl::FailedPreconditionError("no pass is open: Begin opens one");
  RETURN_IF_ERROR(compute_->EntersNoMore());
  while (pass_->wait_for(DrivenCompute::kPatience) != std::future_status::ready) {
    if (compute_->Interrupted())
      return absl::CancelledError("interrupted: the pass goes on to its end, for which Finish waits again");
  }
  absl::StatusOr<StepResult> result = pass_->get();
  pass_.reset();
  return result;
}

absl::Status DrivenEngine::Call(const std::function<absl::Status(Engine&)>& call) {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  if (pass_.has_value()) return absl::FailedPreconditionError("a pass is open: Finish ends it");
  if (comm_ == nullptr) return thread_->Run<absl::Status>([&] { return call(*engine_); });
  return thread_->Run<absl::Status>([&] { return call(*engine_); },
                                    [this] {
                                      if (!compute_->Interrupted()) return;
                                      comm_->Abort(absl::CancelledError("interrupted while it waited"));
                                    });
}

absl::Status DrivenEngine::Replan(Measured again) {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  return Call(
      [example = compute_->UnseenOf(std::move(again))](Engine& engine) { return engine.Replan(example); });
}

}  // namespace penstock::zero
