// --device and --device-memory, with the test-only device in a GPU's place.
#include <gmock/gmock.h>
#include <stdlib.h>

#include <nlohmann/json.hpp>

#include "tests/tools/penstock_program.h"
#include "tests/tools/rank_programs.h"

namespace penstock::tools::device_cli_test {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing_support::Arguments;
using testing_support::Lines;
using testing_support::ProgramTest;
using testing_support::Ran;
using testing_support::operator+;
using testing_support::ReadFile;
using testing_support::WaitForAll;

class DeviceFlags : public ProgramTest {
 protected:
  ~DeviceFlags() override { unsetenv("PENSTOCK_TEST_DEVICE"); }
  // No state lives on the device.
  Arguments ProcessorUpdates() const {
    testing_support::WriteFile(
        dir_ + "/processor.json",
        R"({"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/unused", "ratio": 1}}})");
    return {"--config", dir_ + "/processor.json", "--warmup", "0"};  // the schedule of a run without a file
  }
};

TEST_F(DeviceFlags, TrainingIsTheProcessorsToTheBitAndTheReportSaysWhatWasCopied) {
  const Arguments steps = {"--steps", "4", "--host-memory", "32MiB"};
  const Ran cpu = Run(Train(dir_ + "/cpu") + steps + Arguments{"--report", dir_ + "/cpu.json"});
  ASSERT_EQ(cpu.code, 0) << cpu.err;
  setenv("PENSTOCK_TEST_DEVICE", "capacity=256MiB", 1);
  const Arguments device = {"--device", "cuda", "--device-memory", "24MiB"};
  const Ran cuda = Run(Train(dir_ + "/cuda") + steps + device + ProcessorUpdates() +
                       Arguments{"--report", dir_ + "/cuda.json"});
  ASSERT_EQ(cuda.code, 0) << cuda.err;
  const json of_cpu = json::parse(ReadFile(dir_ + "/cpu.json")),
             of_cuda = json::parse(ReadFile(dir_ + "/cuda.json"));
  ASSERT_EQ(of_cpu["steps"].size(), 4u);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(of_cpu["steps"][i]["loss"], of_cuda["steps"][i]["loss"]) << i;
  EXPECT_EQ(of_cpu["device"], "cpu");
  EXPECT_EQ(of_cpu["totals"]["h2d_bytes"], 0);
  EXPECT_EQ(of_cpu["peak_device_bytes"], 0);
  EXPECT_EQ(of_cuda["device"], "test");
  EXPECT_EQ(of_cuda["device_memory_budget_bytes"], 24 << 20);
  EXPECT_LE(of_cuda["peak_device_bytes"], 24 << 20);
  EXPECT_GT(of_cuda["totals"]["h2d_bytes"], of_cuda["params"].get<int64_t>() * 4 * 4);
  // fp32 gradients, every step; the run's padding comes with them.
  EXPECT_GE(of_cuda["totals"]["d2h_bytes"], of_cuda["params"].get<int64_t>() * 4 * 4);
  EXPECT_LE(of_cuda["totals"]["d2h_bytes"], of_cuda["params"].get<int64_t>() * 4 * 5);
  EXPECT_EQ(of_cuda["updated_on_device_share"], 0);

  // Without a word about it all of the state lives there, since it fits; every step goes to the drive.
  const Ran there =
      Run(Train(dir_ + "/there") + steps + device + Arguments{"--report", dir_ + "/there.json"});
  ASSERT_EQ(there.code, 0) << there.err;
  const json lives = json::parse(ReadFile(dir_ + "/there.json"));
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(of_cpu["steps"][i]["loss"], lives["steps"][i]["loss"]) << i;
  EXPECT_LE(lives["peak_device_bytes"], 24 << 20);
#ifndef __SANITIZE_ADDRESS__  // it slows the device that stands in far more than the processor, and the plan
                              // goes by speed
  EXPECT_EQ(lives["updated_on_device_share"], 1);
  EXPECT_LT(lives["totals"]["h2d_bytes"], of_cuda["totals"]["h2d_bytes"]);
#endif
  EXPECT_EQ(Run({"verify", dir_ + "/there", "--quiet"}).code, 0);
}

// aio.use_gds: the device's own reads of the drive, where it has them.
TEST_F(DeviceFlags, WeightsPastHostMemoryWhereTheConfigurationAsks) {
  testing_support::WriteFile(dir_ + "/gds.json", R"({"aio": {"use_gds": true}, "zero_optimization":
      {"offload_optimizer": {"device": "nvme", "nvme_path": "/unused", "ratio": 1}}})");
  const auto train = [&](const std::string& name, const Arguments& more) {
    Arguments arguments = Train(dir_ + "/" + name) + Arguments{"--steps",       "3",
                                                               "--host-memory", "32MiB",
                                                               "--eval-data",   text_,
                                                               "--eval-every",  "2",
                                                               "--config",      dir_ + "/gds.json",
                                                               "--report",      dir_ + "/" + name + ".json"};
    std::erase(arguments, "--quiet");
    const Ran ran = Run(arguments + more);
    EXPECT_EQ(ran.code, 0) << ran.err;
    json report = json::parse(ReadFile(dir_ + "/" + name + ".json"));
    report["text"] = ran.out + ran.err;
    return report;
  };
  const json cpu = train("cpu", {});
  EXPECT_THAT(cpu["text"].get<std::string>(), HasSubstr("aio.use_gds: accepted and ignored"));
  EXPECT_EQ(cpu["gds"], false);
  for (const bool has : {false, true}) {
    setenv("PENSTOCK_TEST_DEVICE", has ? "capacity=256MiB,gds=1" : "capacity=256MiB", 1);
    const std::string name = has ? "straight" : "around";
    const json report = train(name, {"--device", "cuda", "--device-memory", "24MiB"});
    EXPECT_EQ(report["gds"], has);
    EXPECT_EQ(report["totals"]["gds_read_bytes"].get<int64_t>() > 0, has);
    EXPECT_LE(report["totals"]["gds_read_bytes"], report["totals"]["nvme_read_bytes"]);
    EXPECT_THAT(
        report["text"].get<std::string>(),
        HasSubstr(has ? "(GPUDirect Storage, test)" : "no GPUDirect Storage: the test device has none"));
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(report["steps"][i]["loss"], cpu["steps"][i]["loss"]) << i;
  }
  const Ran plan =
      Run(Arguments{"plan", "--model", "gpt-tiny", "--host-memory", "32MiB", "--device", "cuda", "--seq",
                    "32", "--no-probe", "--config", dir_ + "/gds.json", "--state-dir", dir_ + "/planned"});
  EXPECT_THAT(plan.out, HasSubstr("weights that only it needs come straight from the drive"));
}

// Two ranks, a device each: the losses of two ranks on processors.
TEST_F(DeviceFlags, RanksTrainOnADeviceEach) {
  const auto losses = [&](const std::string& name, const Arguments& device) {
    const Arguments arguments = Train(dir_ + "/" + name) +
                                Arguments{"--steps", "3", "--host-memory", "48MiB"} + device +
                                Arguments{"--report", dir_ + "/" + name + ".json"};
    for (const Ran& ran : WaitForAll(testing_support::StartRanks(dir_, {arguments, arguments}))) {
      EXPECT_EQ(ran.code, 0) << ran.err;
    }
    std::vector<double> of_steps;
    const json report = json::parse(ReadFile(dir_ + "/" + name + ".json"));
    for (const json& step : report["steps"]) of_steps.push_back(step["loss"]);
    EXPECT_EQ(report["world_size"], 2);
    if (!device.empty()) {
      EXPECT_LE(report["peak_device_bytes"], 24 << 20);
      EXPECT_GT(report["totals"]["d2h_bytes"], 0);
    }
    return of_steps;
  };
  const std::vector<double> processors = losses("processors", {});
  setenv("PENSTOCK_TEST_DEVICE", "capacity=256MiB", 1);
  EXPECT_EQ(processors.size(), 3u);
  EXPECT_EQ(losses("devices", {"--device", "cuda", "--device-memory", "24MiB"}), processors);
  setenv("PENSTOCK_TEST_DEVICE", "capacity=256MiB,linked=1", 1);
  EXPECT_EQ(losses("linked", {"--device", "cuda", "--device-memory", "24MiB"}), processors);
}

// Without a drive state lives on the device; the configuration's ratio leaves the processor its share.
TEST_F(DeviceFlags, TheRatioDividesTheStateBetweenProcessorAndDevice) {
  const auto trained = [&](const std::string& name, const Arguments& more) {
    const Ran ran = Run(Arguments{"train",       "--model",
                                  "gpt-tiny",    "--dtype",
                                  "fp32",        "--offload",
                                  "cpu",         "--threads",
                                  "1",           "--data",
                                  text_,         "--quiet",
                                  "--batch",     "2",
                                  "--seq",       "32",
                                  "--steps",     "3",
                                  "--report",    dir_ + "/" + name,
                                  "--state-dir", dir_ + "/state-" + name,
                                  "--overwrite"} +
                        more);
    EXPECT_EQ(ran.code, 0) << ran.err;
    return json::parse(ReadFile(dir_ + "/" + name));
  };
  const json of_cpu = trained("cpu.json", {});
  EXPECT_EQ(of_cpu["updated_on_device_share"], 0);
  setenv("PENSTOCK_TEST_DEVICE", "capacity=256MiB", 1);
  for (const char* ratio : {"0", "0.5", "1"}) {
    testing_support::WriteFile(
        dir_ + "/config.json",
        std::string(R"({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": )") + ratio +
            "}}}");
    const Arguments arguments = {"--device", "cuda", "--config", dir_ + "/config.json", "--warmup", "0"};
    const json of_both = trained("both.json", arguments);
    const double share = of_both["updated_on_device_share"];
    EXPECT_LE(share, 1 - std::stod(ratio));
    constexpr double kLargestBlock = 0.25;  // whole blocks live there: one more would be too many
    EXPECT_GT(share, 1 - std::stod(ratio) - kLargestBlock);
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(of_cpu["steps"][i]["loss"], of_both["steps"][i]["loss"]) << i;
    const Ran plan =
        Run(Arguments{"plan", "--model", "gpt-tiny", "--offload", "cpu", "--no-probe"} + arguments);
    ASSERT_EQ(plan.code, 0) << plan.err;
    EXPECT_THAT(plan.out, HasSubstr(share > 0 ? "optimizer state on the device" : "0% of the state lives"));
  }
  const Ran alone = Run(Arguments{"plan", "--model", "gpt-tiny", "--offload", "cpu", "--no-probe", "--config",
                                  dir_ + "/config.json"});
  EXPECT_THAT(alone.out + alone.err, HasSubstr("ratio: accepted and ignored"));
}

TEST_F(DeviceFlags, PlanShowsTheTier) {
  setenv("PENSTOCK_TEST_DEVICE", "capacity=64MiB", 1);
  const Arguments arguments = Arguments{"plan", "--model", "gpt-tiny", "--host-memory", "32MiB", "--device",
                                        "cuda", "--seq",   "32",       "--no-probe"} +
                              ProcessorUpdates();
  const Ran text = Run(arguments);
  ASSERT_EQ(text.code, 0) << text.err;
  EXPECT_THAT(text.out, HasSubstr("device memory ("));
  EXPECT_THAT(text.out, HasSubstr("copies to the device"));
  const Ran ran = Run(arguments + Arguments{"--json"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const json plan = json::parse(ran.out);
  const int64_t least = plan["least_device_memory_bytes"];
  EXPECT_GT(least, 0);
  EXPECT_EQ(plan["device"]["memory_budget_bytes"], 64 << 20);
  EXPECT_GT(plan["device"]["h2d_bytes_per_step"], 0);
  const Ran fits = Run(arguments + Arguments{"--device-memory", std::to_string(least)});
  EXPECT_EQ(fits.code, 0) << fits.err;
  const Ran refused = Run(arguments + Arguments{"--device-memory", std::to_string(least - 1)});
  EXPECT_EQ(refused.code, 2);
  // What the config leaves open is told before it.
  ASSERT_EQ(Lines(refused.err).size(), 2u) << refused.err;
  EXPECT_THAT(Lines(refused.err)[0], HasSubstr("leaves open"));
  EXPECT_THAT(Lines(refused.err)[1], HasSubstr("the least that works is " + std::to_string(least)));
}

TEST_F(DeviceFlags, WrongOnesAreOneLineAndExitTwo) {
  setenv("PENSTOCK_TEST_DEVICE", "capacity=64MiB", 1);
  const std::vector<std::pair<Arguments, std::string>> wrong = {
      {{"--device", "tpu"}, "must be cpu or cuda"},
      {{"--device", "cuda", "--device-memory", "0"},
       "--device-memory: must be a size such as \"4GiB\" of 1 or more, not \"0\""},
      {{"--device", "cuda", "--device-memory", "lots"}, "--device-memory: "},
      {{"--device", "cuda", "--device-memory", "65MiB"}, "the device has 67108864"},
  };
  for (const auto& [arguments, text] : wrong) {
    const Ran ran = Run(Train(dir_ + "/state") + arguments);
    EXPECT_EQ(ran.code, 2) << text;
    EXPECT_THAT(ran.err, HasSubstr(text));
    EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
  }
}

TEST_F(DeviceFlags, WithoutCudaTheLineSaysWhatIsMissingAndTheWayOut) {
  const Ran ran = Run(Train(dir_ + "/state") + Arguments{"--device", "cuda", "--steps", "1"});
  if (ran.code == 0) GTEST_SKIP() << "there is a CUDA device here";
  EXPECT_EQ(ran.code, 2);
  EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
  EXPECT_THAT(ran.err, HasSubstr("--device cuda: "));
  EXPECT_THAT(ran.err, HasSubstr("--device cpu"));
}

}  // namespace
}  // namespace penstock::tools::device_cli_test
