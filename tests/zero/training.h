// Small trainings for tests: a GPT of some layers on made-up tokens, through the engine.
#ifndef PENSTOCK_TESTS_ZERO_TRAINING_H_
#define PENSTOCK_TESTS_ZERO_TRAINING_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "models/families/gpt.h"
#include "models/families/stages.h"
#include "zero/compute/libtorch/create_engine.h"
#include "zero/compute/seed.h"
#include "zero/compute/test_device.h"
#include "zero/compute/tile_format.h"
#include "zero/engine/engine.h"

namespace penstock::kernels {
// For messages.
inline std::ostream& operator<<(std::ostream& to, DType type) { return to << zero::DTypeName(type); }
}  // namespace penstock::kernels

namespace penstock::zero::testing_support {

struct RunOptions {
  models::GptConfig model{4, 64, 4, 32, 256, 0};
  kernels::DType dtype = kernels::DType::kBf16;
  OffloadDevice offload = OffloadDevice::kNone;
  int64_t host_memory_budget_bytes = 0;
  std::shared_ptr<Device> device = HostDevice();
  int64_t device_memory_budget_bytes = 0;
  int micro_batches = 1;
  int64_t batch = 2, seq = 16;  // few: LibTorch 1.13 multiplies bf16 one by one on processors without AVX-512
  int64_t steps = 5;
  int64_t stop_after = 0;  // 0: at the end
  int64_t evaluate_every = 0;
  bool announce_always = false;
  int64_t poison_step = 0;                            // its loss is infinite
  bool shuffles = false;                              // the layers run in another order every other step
  double clip = 1.0, lr = 3e-3, weight_decay = 0.01;  // of AdamW
  std::optional<OptimizerOptions> optimizer;          // empty: AdamW
  kernels::StateType optimizer_states = kernels::StateType::kFp32;
  LossScaleOptions loss_scale = {.dynamic = true, .initial_scale = 65536};
  uint64_t seed = 7;
  int update_workers = 1;
  tiering::UpdateOrder update_order = tiering::UpdateOrder::kAuto;
  int64_t tile_bytes = 0;
  bool resume = false;
  std::string resume_from;  // a checkpoint, where nothing lives on a drive
  CheckpointSchedule checkpoints;
  std::string state_dir;  // empty: a scratch directory, removed afterwards
  bool keep_state = false;
  std::function<void(EngineOptions&)> adjust;               // whatever else, last
  std::function<Model()> make_model;                        // empty: a GPT of `model`
  bool hashes_state = false;                                // TrainedLosses::state
  std::function<absl::Status(Engine&)> opened, after_step;  // an error ends the run
  std::shared_ptr<Comm> comm;  // the other ranks: micro-batch m is number m * world + rank of all
};

struct TrainedLosses {
  absl::Status status;
  std::vector<double> losses, norms, evaluations, loss_scales;
  std::vector<int64_t> committed, skipped, replayed;
  // Of every parameter's master, moments and gradient at the end; 0 where there is none.
  std::vector<uint64_t> state;
  double speculative_share = 0;  // the largest share of tiles updated in backward
  int64_t resumed_from = -1;
  // Of every checkpoint: its step, the last step that was finished when it stood, what became of it.
  struct Checkpoint {
    int64_t step = 0, at = 0;
    std::string path;
    absl::Status status;
  };
  std::vector<Checkpoint> checkpoints;
  int64_t least_host_memory_bytes = 0;  // of a refusal; of one for the device's sake, that one's least
  int64_t peak_device_bytes = 0;
  int64_t gds_read_bytes = 0;
  tiering::Plan plan;
  int64_t peak_managed_bytes = 0;
  int64_t input_scratch_bytes = 0;
  int64_t read_bytes = 0, write_bytes = 0;  // of the drive, by the program
};

// Learnable, not random: each row counts up from a start by a stride.
TensorBatch MakeBatch(const RunOptions& run, int64_t step, int micro_batch);
std::string ScratchDirectory();
// A test with such a directory of its own, removed with all that is in it.
class ScratchTest : public testing::Test {
 protected:
  ~ScratchTest() override;
  const std::string scratch_ = ScratchDirectory();
};
inline std::shared_ptr<Device> MakeTestDevice(const TestDeviceOptions& options = {}) {
  return std::make_shared<TestDevice>(options);
}
EngineOptions OptionsOf(const RunOptions& run);  // without hooks; the state directory is run.state_dir
TrainedLosses TrainGpt(const RunOptions& run);

}  // namespace penstock::zero::testing_support

#endif  // PENSTOCK_TESTS_ZERO_TRAINING_H_
