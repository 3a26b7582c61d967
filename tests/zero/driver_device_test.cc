// A CUDA device over the driver alone, with a stand-in for the driver on which everything happens late
// (fake_libcuda.cc).
#include "zero/compute/cuda/driver_device.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "aio/cufile.h"
#include "kernels/cuda/driver.h"
#include "tests/zero/arithmetic_owner.h"
#include "zero/engine/driven_engine.h"

namespace penstock::zero::driver_device_test {
namespace {

using kernels::DType;
using testing::HasSubstr;
using testing_support::ArithmeticOwner;
using testing_support::DeviceQueue;
using testing_support::Shape;

// Of this name, and so the one that the device finds in the process.
void* FakeLibrary() {
  static void* const library = ::dlopen(FAKE_LIBCUDA, RTLD_NOW | RTLD_GLOBAL);
  return library;
}

class Fault {
 public:
  explicit Fault(const char* call) { setenv("FAKE_LIBCUDA_FAULT", call, 1); }
  ~Fault() { unsetenv("FAKE_LIBCUDA_FAULT"); }
};

// Work of the test's own on the driver's streams.
class Queue final : public DeviceQueue {
 public:
  void* NewStream() override {
    CUstream stream = nullptr;
    std::string why;
    const kernels::cuda::Driver* const driver = kernels::cuda::LoadDriver(&why);
    EXPECT_EQ(driver->StreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0), CUDA_SUCCESS);
    return stream;
  }
  void Enqueue(void* stream, std::function<void()> work) override {
    auto* const launch =
        reinterpret_cast<CUresult (*)(CUstream, CUhostFn, void*)>(::dlsym(FakeLibrary(), "cuLaunchHostFunc"));
    const auto run = [](void* data) {
      const std::unique_ptr<std::function<void()>> held(static_cast<std::function<void()>*>(data));
      (*held)();
    };
    launch(static_cast<CUstream>(stream), run, new std::function<void()>(std::move(work)));
  }
};

struct Trained {
  absl::Status status;
  std::vector<double> losses, norms;
  std::vector<float> state;
  tiering::Plan plan;
  std::vector<std::string> log;
  int64_t read_past_host = 0;
};

class DriverDeviceTest : public testing::Test {
 protected:
  static void SetUpTestSuite() { ASSERT_NE(FakeLibrary(), nullptr) << ::dlerror(); }
  ~DriverDeviceTest() override { std::filesystem::remove_all(directory_); }

  Trained Train(const Shape& shape, bool on_device, const std::function<void(EngineOptions&)>& adjust,
                int64_t steps = 4) {
    Trained trained;
    Queue queue;
    ArithmeticOwner owner(shape, on_device, on_device ? &queue : nullptr);
    EngineOptions options = owner.Options(directory_);
    options.hooks.log = [&](const std::string& line) { trained.log.push_back(line); };
    if (on_device) {
      absl::StatusOr<std::shared_ptr<Device>> device = OpenDriverDevice(0);
      trained.status = device.status();
      if (!device.ok()) return trained;
      options.device = *std::move(device);
    }
    adjust(options);
    auto engine = DrivenEngine::Create(owner.Measure(), options);
    trained.status = engine.status();
    if (!engine.ok()) return trained;
    trained.plan = (*engine)->plan().plan;
    for (int64_t step = 1; step <= steps && trained.status.ok(); ++step) {
      StepResult result;
      trained.status = owner.Step(**engine, step, &result);
      trained.losses.push_back(result.loss);
      trained.norms.push_back(result.grad_norm);
    }
    if (!trained.status.ok()) return trained;
    trained.status = (*engine)->Call([&](Engine& of) {
      trained.read_past_host = of.gds_read_bytes();
      for (const std::string& name : of.ParameterNames()) {
        const auto value = of.ReadState(name, StateKind::kParameter);
        if (!value.ok()) return value.status();
        const auto* const values = static_cast<const float*>(value->view.data);
        trained.state.insert(trained.state.end(), values, values + value->view.elements());
      }
      return absl::OkStatus();
    });
    return trained;
  }

  const std::string directory_ =
      (std::filesystem::current_path() / ("driver-device-" + std::to_string(getpid()))).string();
};

TEST_F(DriverDeviceTest, ADeviceThatIsNotThereIsNamed) {
  EXPECT_TRUE(OpenDriverDevice(0).ok()) << OpenDriverDevice(0).status();
  EXPECT_THAT(std::string(OpenDriverDevice(1).status().message()), HasSubstr("no CUDA device 1"));
}

TEST_F(DriverDeviceTest, TheBitsAreThoseOfHostMemoryAtEveryBudget) {
  std::mt19937 random(11);
  const auto below = [&](int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(random); };
  int updated_there = 0;
  for (int round = 0; round < 12; ++round) {
    Shape shape;
    shape.dtype = std::array{DType::kBf16, DType::kFp32, DType::kFp16}[static_cast<size_t>(below(3))];
    shape.micro_batches = 1 + static_cast<int>(below(3));
    if (below(3) == 0) shape.frozen = {1};
    const OffloadDevice offload = below(2) == 0 ? OffloadDevice::kCpu : OffloadDevice::kNvme;
    const auto common = [&](EngineOptions& options) { options.storage.offload = offload; };
    SCOPED_TRACE(testing::Message() << "round " << round << ", " << DTypeName(shape.dtype) << ", "
                                    << shape.micro_batches << " micro-batches");
    const Trained host = Train(shape, false, common);
    ASSERT_TRUE(host.status.ok()) << host.status;
    int64_t least = 0, most = 0;
    for (int number = 0; number < 3; ++number) {
      const int64_t budget = number == 0 ? 0 : number == 1 ? least : least + below(most - least + 1);
      const Trained device = Train(shape, true, [&](EngineOptions& options) {
        common(options);
        options.memory.device_memory_budget_bytes = budget;
        if (below(2) == 0) options.memory.bounds.processor_share = 0.5 * static_cast<double>(below(3));
      });
      ASSERT_TRUE(device.status.ok()) << device.status;
      EXPECT_EQ(device.losses, host.losses);
      EXPECT_EQ(device.norms, host.norms);
      EXPECT_EQ(device.state, host.state);
      updated_there += device.plan.device.resident_elements > 0 ? 1 : 0;
      if (number == 0) least = device.plan.device.least_bytes, most = device.plan.device.bytes();
    }
  }
  EXPECT_GT(updated_there, 5);
}

TEST_F(DriverDeviceTest, WeightsThatComePastHostMemoryHaveTheSameBits) {
  const auto straight = [](EngineOptions& options) {
    options.storage.gds = true;
    options.memory.host_memory_budget_bytes = 0;
    options.optimizer.order = tiering::UpdateOrder::kInNextForward;
    options.memory.bounds.processor_share = 1;
  };
  const auto at_least = [&](int64_t host, int64_t device) {
    return [=](EngineOptions& options) {
      straight(options);
      options.memory.host_memory_budget_bytes = host;
      options.memory.device_memory_budget_bytes = device;
    };
  };
  const Trained free = Train({}, true, straight);
  ASSERT_TRUE(free.status.ok()) << free.status;
  const auto least = at_least(free.plan.least_host_memory_bytes, free.plan.device.least_bytes);
  const Trained by_host = Train({}, true, least);
  ASSERT_TRUE(by_host.status.ok()) << by_host.status;
  if (!aio::CuFile::IsInstalled()) {
    EXPECT_THAT(by_host.log, testing::Contains(HasSubstr("no GPUDirect Storage: no libcufile.so")));
    EXPECT_EQ(by_host.read_past_host, 0);
  }
  // Of this name, and so the one that is found in the process from now on.
  ASSERT_NE(::dlopen(FAKE_LIBCUFILE, RTLD_NOW | RTLD_GLOBAL), nullptr) << ::dlerror();
  const Trained past_host = Train({}, true, least);
  ASSERT_TRUE(past_host.status.ok()) << past_host.status;
  EXPECT_THAT(past_host.log, testing::Contains(HasSubstr("(GPUDirect Storage, cuFile)")));
  EXPECT_GT(past_host.read_past_host, 0);
  EXPECT_EQ(past_host.losses, by_host.losses);
  EXPECT_EQ(past_host.norms, by_host.norms);
  EXPECT_EQ(past_host.state, by_host.state);
  setenv("FAKE_LIBCUFILE_FAULT", "transfer", 1);
  const Trained refused = Train({}, true, least);
  unsetenv("FAKE_LIBCUFILE_FAULT");
  ASSERT_TRUE(refused.status.ok()) << refused.status;
  EXPECT_THAT(refused.log, testing::Contains(HasSubstr("cuFile error 5008")));
  EXPECT_EQ(refused.losses, by_host.losses);
  EXPECT_EQ(refused.read_past_host, 0);
}

TEST_F(DriverDeviceTest, MemoryThatIsNotPinnedIsToldAndTheBitsAreTheSame) {
  const auto plain = [](EngineOptions& options) { options.storage.offload = OffloadDevice::kCpu; };
  const Trained pinned = Train({}, true, plain);
  ASSERT_TRUE(pinned.status.ok()) << pinned.status;
  const Fault fault("register");
  const Trained trained = Train({}, true, plain);
  ASSERT_TRUE(trained.status.ok()) << trained.status;
  EXPECT_EQ(trained.losses, pinned.losses);
  EXPECT_THAT(trained.log, testing::Contains(HasSubstr("pageable memory")));
  EXPECT_THAT(pinned.log, testing::Not(testing::Contains(HasSubstr("pageable memory"))));
}

TEST_F(DriverDeviceTest, ADeviceWithoutRoomIsRefusedWithTheLeastThatWouldDo) {
  setenv("FAKE_LIBCUDA_MEMORY", "65536", 1);
  const Trained small = Train({}, true, [](EngineOptions&) {});
  unsetenv("FAKE_LIBCUDA_MEMORY");
  EXPECT_EQ(small.status.code(), absl::StatusCode::kFailedPrecondition) << small.status;
  EXPECT_THAT(std::string(small.status.message()), HasSubstr("the least that works"));
}

// Another process takes it between the plan and the arena; a kernel cannot be launched; an event cannot be
// recorded.
TEST_F(DriverDeviceTest, CallsThatFailAreNamedAndNothingHangs) {
  for (const char* call : {"alloc", "launch", "record", "copy"}) {
    SCOPED_TRACE(call);
    std::optional<Fault> fault;
    const Trained trained = Train({}, true, [&](EngineOptions&) { fault.emplace(call); });
    EXPECT_FALSE(trained.status.ok());
    EXPECT_THAT(std::string(trained.status.message()),
                testing::MatchesRegex(".*(cu[A-Z]|copy of|updat|gradient|[0-9]).*"));
  }
  EXPECT_TRUE(Train({}, true, [](EngineOptions&) {}).status.ok());
}

// Last: nothing works on it afterwards.
TEST_F(DriverDeviceTest, ALostDeviceEndsTheStepAndTheLastCommitStands) {
  Queue queue;
  ArithmeticOwner owner({}, true, &queue);
  EngineOptions options = owner.Options(directory_);
  absl::StatusOr<std::shared_ptr<Device>> device = OpenDriverDevice(0);
  ASSERT_TRUE(device.ok()) << device.status();
  options.device = *std::move(device);
  StepResult result;
  {
    auto engine = DrivenEngine::Create(owner.Measure(), options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    for (int64_t step = 1; step <= 2; ++step) ASSERT_TRUE(owner.Step(**engine, step, &result).ok());
    ASSERT_TRUE((*engine)->Call([](Engine& of) { return of.Flush(); }).ok());
    reinterpret_cast<void (*)()>(::dlsym(FakeLibrary(), "fake_libcuda_lose_device"))();
    EXPECT_FALSE(owner.Step(**engine, 3, &result).ok());
  }
  options.device = HostDevice();
  options.storage.overwrite = false;
  options.resume.enabled = true;
  ArithmeticOwner on_host({}, false, nullptr);
  auto engine = DrivenEngine::Create(on_host.Measure(), options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  ASSERT_TRUE(on_host.Step(**engine, 3, &result).ok());
  EXPECT_EQ(result.step, 3);
}

}  // namespace
}  // namespace penstock::zero::driver_device_test
