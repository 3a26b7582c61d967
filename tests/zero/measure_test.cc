// What a model's compute takes, measured while other work has the processors.
#include "zero/compute/libtorch/measure.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <thread>
#include <vector>

#include "zero/compute/device.h"
#include "zero/compute/libtorch/threads.h"
#include "zero/memory/thread_times.h"

namespace penstock::zero::measure_test {
namespace {

// Processes that compute without end, four a processor.
class OtherWork {
 public:
  OtherWork() {
    for (unsigned i = 0; i < 4 * std::thread::hardware_concurrency(); ++i) {
      const pid_t child = fork();
      if (child == 0) {
        volatile unsigned spins = 0;
        for (;;) spins = spins + 1;
      }
      children_.push_back(child);
    }
  }
  ~OtherWork() {
    for (const pid_t child : children_) kill(child, SIGKILL);
    for (const pid_t child : children_) waitpid(child, nullptr, 0);
  }

 private:
  std::vector<pid_t> children_;
};

Model Wide() {
  Model model;
  const int wide =
      model.AddBlock("wide", "", [] { return std::make_shared<torch::nn::LinearImpl>(1024, 1024); });
  model.AddStage("wide", wide, [](torch::nn::Module& module, const torch::Tensor& x, const TensorBatch&) {
    return module.as<torch::nn::LinearImpl>()->forward(x).square().mean();
  });
  return model;
}

double BackwardSeconds(bool* disturbed) {
  MeasureOptions options;
  const absl::StatusOr<MeasuredModel> measured =
      MeasureModel(Lower(Wide()), {torch::randn({2048, 1024}), torch::zeros({2})}, kernels::DType::kFp32,
                   options, *HostDevice());
  EXPECT_TRUE(measured.ok()) << measured.status();
  if (!measured.ok()) return 0;
  *disturbed = measured->disturbed;
  return measured->graph.stages.front().backward_seconds;
}

// Nine threads to two processors make everything 4 to 6 times as long; a plan must not be made for that.
TEST(MeasureModel, OtherWorkIsTakenOffAndSaid) {
  if (access("/proc/self/schedstat", R_OK) != 0) GTEST_SKIP() << "the kernel does not say who waited";
  SetIntraOpThreads(DefaultIntraOpThreads());
  bool disturbed = false;
  double alone = 1e9;
  for (int i = 0; i < 3; ++i) alone = std::min(alone, BackwardSeconds(&disturbed));
  double beside = 1e9;
  {
    const OtherWork work;
    for (int i = 0; i < 3; ++i) {
      beside = std::min(beside, BackwardSeconds(&disturbed));
      EXPECT_TRUE(disturbed);
    }
  }
  EXPECT_LT(beside, 2.5 * alone);
  EXPECT_GT(beside, 0.4 * alone);
}

}  // namespace
}  // namespace penstock::zero::measure_test
