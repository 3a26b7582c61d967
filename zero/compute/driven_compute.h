// Computation from outside: the owner of the model also owns the thread and the order of calls. The engine
// says when a stage's weights are there, and takes what the stage leaves.
//
//   drivers                                   the engine's compute thread
//   Enter(kForward, stage, micro_batch)  <-   Forward offers the use and waits
//   ... computes with the weights ...
//   Leave(entered, result)               ->   goes on
//   Enter(kBackward, ...)                <-   Backward offers, waits
//   Leave(entered, gradients)            ->   sums them; Leave returns when it has
//
// Every use of a pass is entered once, in the program's order: of a training pass forward of all stages but
// the last; then backward from the last to the first one whose block trains, of which the last one's has its
// forward too. Before Enter returns the weights have arrived.
//
// On a device with memory of its own (Device::has_own_memory) weights are addresses of its memory, and so are
// gradients. What a driver computes there it enqueues on streams of the device's (DeviceStream): Enter and
// Leave say which, and the engine's own work there takes its place among theirs. Nothing waits for the
// device: Leave returns when what the engine does with the gradients is enqueued behind the driver's stream,
// and copies to host memory begin when the device has computed.
//
// Threads: Enter, Leave and Fail from any; each driver is a thread that is inside one use at a time. The
// overrides are the engine's. Two drivers enter uses of different micro-batches; a use is entered by one. A
// driver that may be inside when the engine goes holds this (shared_from_this): its wait ends, a use that it
// has entered is waited for, and no other can be entered.
#ifndef PENSTOCK_ZERO_COMPUTE_DRIVEN_COMPUTE_H_
#define PENSTOCK_ZERO_COMPUTE_DRIVEN_COMPUTE_H_

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/process_mark.h"
#include "zero/compute/compute.h"
#include "zero/compute/device_gradients.h"
#include "zero/memory/tensor_memory.h"

namespace penstock::zero {

enum class Direction : uint8_t { kForward, kBackward };

class DrivenCompute final : public Compute, public std::enable_shared_from_this<DrivenCompute> {
 public:
  // `given`: the model's sizes, and the bytes and times that its owner has measured. Inputs that forward of a
  // stage is left with (Result::inputs) may wait for its backward elsewhere: StageShape::input_bytes and
  // input_scratch_bytes are theirs. 0: the owner keeps all that backward wants, and none are moved.
  // `drivers`: threads that enter, as many as micro-batches are under way at once.
  explicit DrivenCompute(Measured given, int drivers = 1);

  // The right to compute one use. Dropped without Leave, it fails the pass.
  class Entered {
   public:
    Entered(Entered&& other) noexcept : compute_(std::exchange(other.compute_, nullptr)) {}
    Entered& operator=(Entered&& other) noexcept {
      std::swap(compute_, other.compute_);
      return *this;
    }
    ~Entered();
    const StageUse& use() const { return compute_->use_; }
    // Until Leave; on a device, by what is enqueued until then on the stream that it is left with.
    std::span<const Weights> weights() const { return compute_->weights_; }

   private:
    friend class DrivenCompute;
    explicit Entered(DrivenCompute* compute) : compute_(compute) {}
    DrivenCompute* compute_;
  };

  // Waits until the engine offers exactly this. kFailedPrecondition: no pass is open. kCancelled: the caller
  // was interrupted. kAborted: all drivers wait, and none for what is offered; says both. Else why the pass
  // failed. stream: on a device, that on which the use will be computed, behind what the engine has enqueued
  // (the updates that the device makes); none where the driver computes in the device's own order
  // (Device::ComputeOn).
  absl::StatusOr<Entered> Enter(Direction direction, tiering::StageIndex stage, int micro_batch,
                                std::optional<DeviceStream> stream = std::nullopt);

  struct Result {
    // Of the use's block, if it trains, after backward: without any, none took part. Their memory is the
    // caller's again when Leave returns; on the engine's device, for what is enqueued on `stream` from then
    // on. Where the engine computes in host memory they may lie on a CUDA device (TensorView::on_device), and
    // are then complete when what has been enqueued on `stream` is.
    std::vector<std::pair<tiering::BlockIndex, std::vector<Gradient>>> gradients;
    // On the engine's device: the use is computed when what has been enqueued on `stream` is, and on the
    // streams of `also`.
    std::optional<DeviceStream> stream;
    std::vector<DeviceStream> also;
    // Of forward, where backward will be computed from them: values that may leave memory until then. They
    // are the caller's, and stay unchanged until TakeDropped names the use, or the pass is over.
    std::vector<TensorView> inputs;
    // Of the use's micro-batch. Given with any of its backward uses, at the latest with its last one: nobody
    // has to wait for a device to tell it earlier.
    std::optional<double> loss;
  };
  // The use is computed, or on a device enqueued. After backward of a block that trains it returns when the
  // gradients have been copied, added or refused, or on the engine's device when that is enqueued: what the
  // engine has against them is how the pass ends. Those in host memory are read where they lie. Where the
  // engine computes in host memory, those on a device are copied first, on their stream and the caller's
  // thread, to memory that is kept for it, the largest block's gradients once: what the owner has measured of
  // the stage (StageShape::backward_peak_bytes) has it in it. kInvalidArgument: the result is not of this
  // use, which fails the pass. Other errors are why it had failed, the device's among them
  // (zero/compute/device_gradients.h).
  absl::Status Leave(Entered entered, Result result);

  // A use of forward whose inputs are not looked at any more: they have left, and their memory is free.
  struct Dropped {
    tiering::StageIndex stage;
    int micro_batch = 0;
  };
  // Those since the last call. A driver that calls it after each Enter of forward keeps no more in memory
  // than the plan has counted.
  std::vector<Dropped> TakeDropped();
  // Within a use of backward that is entered: what forward of it was left with, in memory that is the
  // caller's from here on, in their order. Empty: they did not leave memory, or were taken before.
  std::vector<HostBuffer> TakeInputs(tiering::StageIndex stage, int micro_batch);
  // The memory in which inputs come back, on a device: `bytes` that stay until the use of backward is left.
  // On the engine's thread; null: there is none. Default: host memory, of a pool of its own.
  using MakeRoom = std::function<void*(tiering::StageIndex stage, int micro_batch, int64_t bytes)>;
  // Set while no pass is open.
  void set_make_room(MakeRoom make_room) { make_room_ = std::move(make_room); }
  struct InputTraffic {
    int64_t left_bytes = 0, returned_bytes = 0;  // since this was made
    int64_t peak_bytes = 0;                      // of host memory in which they came back, at one time
  };
  InputTraffic input_traffic();

  // The pass cannot go on, for this reason. Outside of a pass it does nothing.
  void Fail(const absl::Status& why);

  // Asked on the waiting thread every 50 ms: true ends the wait, and that of Enter the pass too. Set while no
  // pass is open.
  static constexpr std::chrono::milliseconds kPatience{50};
  void set_interrupted(std::function<bool()> interrupted) { interrupted_ = std::move(interrupted); }
  bool Interrupted() const { return interrupted_ && interrupted_(); }

  // Stands for a micro-batch that only its owner sees.
  static Batch Unseen();
  // The same, as an example for which Measure says this: what the owner has measured anew, for other batches
  // of the same model (DrivenEngine::Replan).
  Batch UnseenOf(Measured again);

  // A pass may be entered from here on, before the engine has begun it. Its drivers enter no more: what the
  // engine still offers fails it (kFailedPrecondition names the use). It is over, and this is how.
  void Open();
  absl::Status EntersNoMore();  // kFailedPrecondition: a use is entered and not left
  void Close(const absl::Status& ended);

  absl::StatusOr<Measured> Measure(const ComputeSetup& setup, const Batch& example,
                                   const MeasureOptions& options) override;
  // kFailedPrecondition: the values come from EngineOptions::initial_values.
  absl::StatusOr<std::unique_ptr<InitialReader>> Initial(tiering::BlockIndex block, uint64_t seed) override;
  absl::Status Begin(const PassInfo& pass, std::vector<Batch> batches) override;
  absl::Status Forward(const StageUse& use, std::span<const Weights> weights) override;
  absl::Status Backward(const StageUse& use, std::span<const Weights> weights) override;
  absl::StatusOr<std::span<const Gradient>> Gradients(const StageUse& use,
                                                      tiering::BlockIndex block) override;
  void Release(const StageUse& use) override;
  absl::StatusOr<std::span<const TensorView>> SavedInputs(tiering::Position position,
                                                          int micro_batch) override;
  void DropInputs(tiering::Position position, int micro_batch) override;
  absl::StatusOr<std::span<const TensorView>> RestoreInputs(tiering::Position position,
                                                            int micro_batch) override;
  absl::StatusOr<std::vector<double>> Losses() override;
  absl::StatusOr<std::vector<std::vector<HostTensor>>> Outputs() override;

  const PassInfo& pass() const { return pass_; }  // of the use that is entered

 private:
  // What a driver waits for.
  struct Wanted {
    Direction direction;
    tiering::StageIndex stage;
    int micro_batch;
  };
  // Inputs that forward of a use was left with, while they may move.
  struct Inputs {
    std::vector<TensorView> given, restored;  // both stay as they are while the engine has a span of them
    std::vector<HostBuffer> memory;           // of `restored`, on the host
  };
  // By position: the program's name for a use.
  using InputsKey = std::pair<tiering::Position, int>;

  // Of the use that the engine waits with, under mutex_.
  enum class State : uint8_t { kNone, kOffered, kEntered, kLeft };

  absl::Status Offer(Direction direction, const StageUse& use, std::span<const Weights> weights);
  bool IsOffered(const Wanted& wanted) const;
  absl::Status Deadlock() const;
  void FailIfNeverEntered();
  absl::Status CheckResult(const Result& result) const;
  // The streams of a device that the driver has computed the use on.
  absl::Status JoinStreams(const Result& result);
  absl::Status CheckStream(const DeviceStream& stream) const;
  // Why Enter must wait no longer; OK: it is offered, or may yet be.
  absl::Status WhyNot();
  void FailLocked(const absl::Status& why);

  const ProcessMark made_in_;
  const Measured given_;
  std::vector<std::weak_ptr<const Measured>> again_;  // by their examples, under mutex_
  const size_t drivers_;
  Device* device_ = nullptr;  // where the engine computes, with memory of its own; null: in the host's
  std::function<bool()> interrupted_;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false, enters_no_more_ = false;
  absl::Status failure_;
  PassInfo pass_;
  TensorPool* pool_ = nullptr;  // the engine's, of the pass that is open
  State state_ = State::kNone;
  Direction direction_ = Direction::kForward;
  StageUse use_;
  std::vector<Weights> weights_;
  Result result_;
  DeviceGradients device_gradients_;  // of the use that is entered
  bool taken_ = true;                 // the gradients of the last backward are no longer needed
  bool taking_ = false;               // the engine reads them
  std::vector<const Wanted*> waiting_;
  std::map<InputsKey, Inputs> inputs_;
  std::map<InputsKey, tiering::StageIndex> stage_at_;
  std::vector<Dropped> dropped_;
  MakeRoom make_room_;
  TensorAccount room_;  // inputs come back there, beside the engine's memory
  InputTraffic traffic_;
  std::vector<double> losses_;
  std::vector<char> has_loss_;  // by micro-batch
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_DRIVEN_COMPUTE_H_
