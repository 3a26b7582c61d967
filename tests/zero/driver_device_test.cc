// A CUDA device over the driver alone, with a stand-in for the driver on which everything happens late
// (fake_libcuda.cc).
#include "zero/compute/cuda/driver_device.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
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
  int64_t pinned_bytes = 0;
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
    (void)(*engine)->Call([&](Engine& of) {
      trained.pinned_bytes = of.pinned_for_device_bytes();
      return absl::OkStatus();
    });
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

// In a process that has not looked for a driver yet: what opening the device says.
class DriverToBeFoundDeathTest : public testing::Test {
 protected:
  DriverToBeFoundDeathTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  // driver: "": none. fault: as FAKE_LIBCUDA_FAULT.
  [[noreturn]] static void TellOfOpening(const char* driver, const char* fault) {
    setenv("FAKE_LIBCUDA_FAULT", fault, 1);
    if (*driver != 0 && ::dlopen(driver, RTLD_NOW | RTLD_GLOBAL) == nullptr) std::_Exit(2);
    std::fputs(std::string(OpenDriverDevice(0).status().message()).c_str(), stderr);
    std::_Exit(0);
  }
};

TEST_F(DriverToBeFoundDeathTest, AMachineWithoutADriverSaysSo) {
  if (void* const library = ::dlopen("libcuda.so.1", RTLD_NOW); library != nullptr) {
    ::dlclose(library);
    GTEST_SKIP() << "a driver is installed here";
  }
  EXPECT_EXIT(TellOfOpening("", ""), testing::ExitedWithCode(0),
              "no CUDA driver .libcuda.so.1. is installed; `device cpu`");
}

TEST_F(DriverToBeFoundDeathTest, ADriverThatIsTooOldSaysWhatItLacks) {
  EXPECT_EXIT(TellOfOpening(FAKE_LIBCUDA_OLD, ""), testing::ExitedWithCode(0),
              "driver is too old: it has no cuDeviceGetUuid_v2; a newer one.*`device cpu`");
  EXPECT_EXIT(TellOfOpening(FAKE_LIBCUDA, "image"), testing::ExitedWithCode(0),
              "older than the kernels: a newer one");
}

TEST_F(DriverToBeFoundDeathTest, DevicesThatAreHiddenAndAForkedChildHaveAWayOut) {
  EXPECT_EXIT(TellOfOpening(FAKE_LIBCUDA, "hidden"), testing::ExitedWithCode(0),
              "does not start.*CUDA_VISIBLE_DEVICES hides it; `device cpu`");
  EXPECT_EXIT(TellOfOpening(FAKE_LIBCUDA, "forked"), testing::ExitedWithCode(0), "started by spawn");
}

// And where the library itself began CUDA before the fork: the child calls nothing of the driver, whose
// streams it would wait for without end.
TEST_F(DriverDeviceTest, AForkedChildIsToldAndTheParentGoesOn) {
  const absl::StatusOr<std::shared_ptr<Device>> device = OpenDriverDevice(0);
  ASSERT_TRUE(device.ok()) << device.status();
  const pid_t child = ::fork();
  if (child == 0) {
    const absl::Status status = OpenDriverDevice(0).status();
    const bool told = status.code() == absl::StatusCode::kFailedPrecondition &&
                      status.message().find("forked") != absl::string_view::npos;
    std::_Exit(told ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(Train({}, true, [](EngineOptions&) {}).status.ok());
}

TEST_F(DriverDeviceTest, ACardThatTheKernelsAreNotForIsNamed) {
  setenv("FAKE_LIBCUDA_CAPABILITY", "7", 1);
  const absl::Status status = OpenDriverDevice(0).status();
  unsetenv("FAKE_LIBCUDA_CAPABILITY");
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("compute capability 7.0, and the kernels need 8.0"));
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
  EXPECT_EQ(trained.pinned_bytes, 0);
  EXPECT_GE(pinned.pinned_bytes, pinned.plan.slot_bytes);
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
  const std::pair<const char*, const char*> said[] = {
      {"alloc", "cuMemAlloc of [0-9]+ bytes on Fake device.*: out of memory .2.; .*smaller device memory"},
      {"launch", "gradient.*: .*.701."},
      {"record", "cuEventRecord: .*lost to this process.*resume"},
      {"copy", "copy of [0-9]+ bytes to the device: .*lost to this process.*resume"}};
  for (const auto& [call, text] : said) {
    SCOPED_TRACE(call);
    std::optional<Fault> fault;
    const Trained trained = Train({}, true, [&](EngineOptions&) { fault.emplace(call); });
    EXPECT_FALSE(trained.status.ok());
    EXPECT_THAT(std::string(trained.status.message()), testing::ContainsRegex(text));
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
    const absl::Status lost = owner.Step(**engine, 3, &result);
    EXPECT_THAT(std::string(lost.message()), HasSubstr("lost to this process, and the last commit stands"));
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
