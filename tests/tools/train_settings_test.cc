// Flags over the config over DeepSpeed's defaults: what `penstock train` makes of a file's open keys.
#include "tools/penstock/train_settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "models/families/family.h"
#include "tests/tools/penstock_program.h"
#include "tools/penstock/ranks.h"
#include "zero/compute/libtorch/tensors.h"
#include "zero/ranks/comm.h"

namespace penstock::tools::train_settings_test {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;
using testing::Not;

class TrainSettingsTest : public testing_support::ProgramTest {
 protected:
  // A run of 100 steps on a new directory.
  TrainSettings Resolve(const std::string& config, TrainOptions flags = {}) {
    flags.model = "gpt-tiny";
    flags.steps = flags.steps.value_or(100);
    flags.config = dir_ + "/config.json";
    testing_support::WriteFile(*flags.config, config);
    auto settings = ResolveTrainOptions(flags, /*needs_data=*/false);
    EXPECT_TRUE(settings.ok()) << settings.status();
    return settings.ok() ? *std::move(settings) : TrainSettings{};
  }
  static double RateAt(const TrainSettings& settings, int64_t update) {
    return settings.engine.optimizer.schedule->At(update).lr;
  }
  static kernels::AdamOptions AdamOf(const TrainSettings& settings) {
    return std::get<kernels::AdamOptions>(settings.engine.optimizer.algorithm);
  }
  // The one line of what the file leaves open.
  static std::string Open(const TrainSettings& settings) {
    std::string line;
    for (const std::string& note : settings.notes) {
      if (note.find("leaves open") == std::string::npos) continue;
      EXPECT_EQ(line, "") << "one line, not two";
      line = note;
    }
    return line;
  }
};

TEST_F(TrainSettingsTest, OfASwitchOfTheTableTheLastValueCounts) {
  const std::string flag = "--zero-quantized-weights";
  for (const auto& [given, is] :
       std::vector<std::pair<std::vector<std::string>, bool>>{{{""}, true},
                                                              {{"=false"}, false},
                                                              {{"=false", ""}, true},
                                                              {{"", "=off"}, false},
                                                              {{"", ""}, true}}) {
    CLI::App app;
    TrainOptions flags;
    DeclareTrainOptions(app, flags, /*plans=*/false);
    EXPECT_FALSE(GivenFlags(flags).contains(flag));
    std::vector<std::string> arguments;  // CLI11 takes them in reverse
    for (const std::string& value : given) arguments.insert(arguments.begin(), flag + value);
    app.parse(arguments);
    EXPECT_EQ(GivenFlags(flags).at(flag), is);
  }
}

TEST_F(TrainSettingsTest, AWarmUpOfAutoStepsFitsTheRun) {
  const std::string config = R"({"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                                                  "warmup_num_steps": "auto"}}})";
  const TrainSettings settings = Resolve(config);
  EXPECT_EQ(RateAt(settings, 1), 0);
  EXPECT_LT(RateAt(settings, 10), 5e-5);
  EXPECT_EQ(RateAt(settings, 12), 5e-5);
  EXPECT_EQ(RateAt(settings, 100), 5e-5);
  EXPECT_EQ(AdamOf(settings).weight_decay, 0.0);
  EXPECT_EQ(settings.batch, 8);
  EXPECT_EQ(settings.engine.optimizer.clip, 1.0);
  EXPECT_EQ(settings.engine.dtype, kernels::DType::kFp32);
  EXPECT_THAT(Open(settings), AllOf(HasSubstr("optimizer.params.lr \"auto\": 5e-05"),
                                    HasSubstr("warmup_num_steps \"auto\": 10 (a tenth of --steps 100"),
                                    HasSubstr("bf16.enabled: false (fp32)")));
  // Flags win, into the places that are open.
  TrainOptions flags;
  flags.lr = 0.25;
  flags.warmup = 40;
  flags.others["--weight-decay"] = 0.5;
  flags.batch = 3;
  flags.others["--clip"] = 0;
  flags.dtype = "fp16";
  const TrainSettings flagged = Resolve(config, flags);
  EXPECT_EQ(flagged.engine.optimizer.schedule->name(), "WarmupLR");
  EXPECT_LT(RateAt(flagged, 40), 0.25);
  EXPECT_EQ(RateAt(flagged, 42), 0.25);
  EXPECT_EQ(AdamOf(flagged).weight_decay, 0.5);
  EXPECT_EQ(flagged.batch, 3);
  EXPECT_EQ(flagged.engine.optimizer.clip, 0);
  EXPECT_EQ(flagged.engine.dtype, kernels::DType::kFp16);
  EXPECT_THAT(Open(flagged), AllOf(Not(HasSubstr("params.lr")), Not(HasSubstr("warmup_num_steps")),
                                   Not(HasSubstr("weight_decay")), Not(HasSubstr("gradient_clipping")),
                                   Not(HasSubstr("bf16")), Not(HasSubstr("micro_batch"))));
}

TEST_F(TrainSettingsTest, WithoutASchedulerTheRateIsConstant) {
  const std::string config =
      R"({"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.002}}})";
  const TrainSettings settings = Resolve(config);
  EXPECT_EQ(settings.engine.optimizer.schedule->name(), "Constant");
  EXPECT_EQ(RateAt(settings, 1), 0.002);
  EXPECT_EQ(RateAt(settings, 100), 0.002);
  EXPECT_EQ(AdamOf(settings).weight_decay, 0.0);
  EXPECT_EQ(AdamOf(settings).mode, kernels::AdamMode::kAdamW);
  EXPECT_THAT(Open(settings), HasSubstr("scheduler: none, a constant rate"));
  TrainOptions flags;
  flags.lr = 0.004;
  EXPECT_EQ(RateAt(Resolve(config, flags), 50), 0.004);
  flags.warmup = 10;
  EXPECT_EQ(Resolve(config, flags).engine.optimizer.schedule->name(), "WarmupThenCosine");
  EXPECT_THAT(Open(Resolve(config, flags)), Not(HasSubstr("scheduler")));
}

TEST_F(TrainSettingsTest, AnAbsentWarmUpIsDeepSpeedsThousandSteps) {
  const TrainSettings settings = Resolve(
      R"({"train_batch_size": 4, "optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}})");
  EXPECT_LT(RateAt(settings, 100), 1e-3);
  EXPECT_THAT(Open(settings), AllOf(HasSubstr("warmup_num_steps: 1000 (longer than --steps 100"),
                                    HasSubstr("optimizer.params.lr: 0.001")));
}

TEST_F(TrainSettingsTest, WithoutOffloadThereIsNoneButForAStateDir) {
  const std::string config = R"({"train_batch_size": 4, "fp16": {"enabled": false}})";
  const TrainSettings settings = Resolve(config);
  EXPECT_EQ(settings.engine.storage.offload, zero::OffloadDevice::kNone);
  EXPECT_EQ(settings.engine.dtype, kernels::DType::kFp32);
  EXPECT_THAT(Open(settings), HasSubstr("zero_optimization.offload_optimizer: none (--offload nvme"));
  TrainOptions flags;
  flags.state_dirs = {dir_ + "/state"};
  EXPECT_EQ(Resolve(config, flags).engine.storage.offload, zero::OffloadDevice::kNvme);
  flags.state_dirs.clear();
  flags.others["--offload"] = "cpu";
  EXPECT_EQ(Resolve(config, flags).engine.storage.offload, zero::OffloadDevice::kCpu);
  EXPECT_THAT(Open(Resolve(config, flags)), Not(HasSubstr("offload")));
}

// DeepSpeed's "Adam" is AdamW unless its file says otherwise; a flag means what it says.
TEST_F(TrainSettingsTest, AnOptimizerByFlagIsThatOneAndALineSaysWhatBecomesOfTheFilesParameters) {
  TrainOptions flags;
  flags.optimizer = std::string("Adam");
  EXPECT_EQ(AdamOf(Resolve("{}", flags)).mode, kernels::AdamMode::kAdam);
  const std::string file = R"({"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.5}}})";
  EXPECT_EQ(AdamOf(Resolve(file, flags)).mode, kernels::AdamMode::kAdamW) << "as the file has it";
  for (const char* other : {"AdamW", "Lion", "SGD", "Lamb"}) {
    const std::string of_other =
        absl::StrCat(R"({"train_batch_size": 4, "optimizer": {"type": ")", other, R"("}})");
    EXPECT_EQ(AdamOf(Resolve(of_other, flags)).mode, kernels::AdamMode::kAdam) << other;
  }
  flags.optimizer = std::string("Lion");
  const TrainSettings lion = Resolve(file, flags);
  EXPECT_EQ(std::get<kernels::LionOptions>(lion.engine.optimizer.algorithm).lr, 0.5F);
  EXPECT_THAT(lion.notes, Contains(HasSubstr("--optimizer Lion in the place of the config's Adam")));
}

// Penstock's own keys say nothing of DeepSpeed's: the program's defaults hold, as without a file.
TEST_F(TrainSettingsTest, AFileOfPenstocksKeysAloneChangesNothingElse) {
  const TrainSettings settings = Resolve(R"({"penstock": {"host_memory": "64MiB"}})");
  EXPECT_EQ(settings.engine.storage.offload, zero::OffloadDevice::kNvme);
  EXPECT_EQ(settings.engine.optimizer.schedule->name(), "WarmupThenCosine");
  EXPECT_EQ(AdamOf(settings).weight_decay, 0.01);
  EXPECT_EQ(Open(settings), "");
}

TEST_F(TrainSettingsTest, TheRatioOnAProcessorIsAnsweredForTheDeviceThatComputes) {
  const TrainSettings settings =
      Resolve(R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": ")" +
              dir_ + R"(", "ratio": 0.5}}})");
  EXPECT_THAT(settings.notes,
              Contains("zero_optimization.offload_optimizer.ratio: accepted and ignored: with "
                       "--device cpu the processor updates everything"));
}

// Where the state is gone and a checkpoint is left, its run is restored and goes on as it was made.
TEST_F(TrainSettingsTest, ARestoredRunHasItsOwnSyncUnlessTheConfigSaysAnother) {
  const std::string config = dir_ + "/config.json", state = dir_ + "/state";
  testing_support::WriteFile(config, R"({"penstock": {"sync": "power", "durability": "checkpoint"}})");
  const auto ran = Run(Train(state, {"--seq", "16", "--steps", "2", "--config", config, "--checkpoint-dir",
                                     dir_ + "/kept", "--checkpoint-every", "2"}));
  ASSERT_EQ(ran.code, 0) << ran.err;
  const auto restored = [&](const std::optional<std::string>& said) {
    std::filesystem::remove_all(state);
    TrainOptions arguments;
    arguments.resume = true;
    arguments.data = {text_};
    arguments.state_dirs = {state};
    arguments.checkpoint_dir = dir_ + "/kept";
    arguments.config = said;
    auto settings = ResolveTrainOptions(arguments, /*needs_data=*/true);
    EXPECT_TRUE(settings.ok()) << settings.status();
    return settings.ok() ? settings->engine : zero::EngineOptions{};
  };
  EXPECT_EQ(restored(std::nullopt).storage.sync, swap::Sync::kPower);
  EXPECT_EQ(restored(std::nullopt).storage.durability, zero::Durability::kCheckpoint);
  testing_support::WriteFile(config, R"({"penstock": {"sync": "process"}})");
  EXPECT_EQ(restored(config).storage.sync, swap::Sync::kProcess);
  EXPECT_EQ(restored(config).storage.durability, zero::Durability::kStep);
}

// The other ranks' answers, as they were written down.
class WrittenRanks final : public zero::Comm {
 public:
  explicit WrittenRanks(std::vector<std::string> texts)
      : Comm(Environment(static_cast<int>(texts.size()) + 1)), texts_(std::move(texts)) {}
  std::string name() const override { return "written down"; }
  // Of AllTexts: the lengths, then the texts.
  absl::StatusOr<std::unique_ptr<zero::Exchange>> Begin(zero::Channel, const zero::What&,
                                                        std::span<const void* const>,
                                                        std::span<void* const> receive,
                                                        size_t bytes) override {
    class Done final : public zero::Exchange {
      absl::Status Wait() override { return absl::OkStatus(); }
    };
    for (size_t k = 1; k < receive.size(); ++k) {
      const std::string& text = texts_[k - 1];
      const uint64_t length = text.size();
      std::memcpy(receive[k], calls_ == 0 ? static_cast<const void*>(&length) : text.data(),
                  calls_ == 0 ? sizeof(length) : std::min<size_t>(bytes, text.size()));
    }
    ++calls_;
    return std::make_unique<Done>();
  }
  void Abort(const absl::Status&) override {}
  absl::Status failure() override { return absl::OkStatus(); }

 private:
  static zero::RankEnvironment Environment(int world) {
    zero::RankEnvironment environment;
    environment.world = world;
    return environment;
  }

  const std::vector<std::string> texts_;
  int calls_ = 0;
};

TEST(OldestRecordTest, IsThatOfTheRankThatHasComeLeastFar) {
  const nlohmann::json mine = {{"lr", 0.5}}, theirs = {{"lr", 0.25}};
  const auto oldest = [&](int64_t step, std::vector<std::string> others) {
    WrittenRanks comm(std::move(others));
    return OldestRecord(comm, mine, step);
  };
  const auto record = [&](int64_t step) { return nlohmann::json({step, theirs}).dump(); };
  EXPECT_EQ(*oldest(5, {record(4)}), theirs);
  EXPECT_EQ(*oldest(4, {record(5)}), mine);
  EXPECT_EQ(*oldest(4, {record(4)}), mine) << "the first of them, on all ranks";
  EXPECT_EQ(*oldest(5, {record(6), record(4), record(5)}), theirs);
  // What cannot be read is no record.
  EXPECT_EQ(*oldest(5, {"", "[", "{}", R"(["2", {}])", "[2]"}), mine);
}

}  // namespace
}  // namespace penstock::tools::train_settings_test
