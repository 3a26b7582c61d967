// The states on a drive give the kernels' bits, and no failing transfer leaves a state that is believed.
#include "optim/drive_optimizer.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "aio/backend.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/split_master.h"

namespace penstock::optim::drive_optimizer_test {
namespace {

using aio::kMiB;
using kernels::DType;

#define ASSERT_OK(expression)                           \
  do {                                                  \
    const absl::Status ok_status = (expression);        \
    ASSERT_TRUE(ok_status.ok()) << ok_status.message(); \
  } while (false)

// A directory under the current one (not /tmp, which may be in memory), removed with everything in it.
class ScratchDirectory {
 public:
  ScratchDirectory() {
    char name[] = "optim-test-XXXXXX";
    path_ = std::filesystem::absolute(mkdtemp(name)).string();
  }
  ~ScratchDirectory() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::vector<float> Random(size_t n, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& value : values) value = normal(generator);
  return values;
}

// Parameters of all sizes and one type, with their gradients of any step.
struct Model {
  explicit Model(DType of = DType::kFp32) : type(of) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      masters.push_back(Random(sizes[i], static_cast<uint32_t>(i)));
      std::vector<uint16_t> half(sizes[i]);
      if (type == DType::kBf16) kernels::Fp32ToBf16(masters[i].data(), half.data(), sizes[i]);
      if (type == DType::kFp16) kernels::Fp32ToFp16(masters[i].data(), half.data(), sizes[i]);
      if (type == DType::kBf16) kernels::Bf16ToFp32(half.data(), masters[i].data(), sizes[i]);
      if (type == DType::kFp16) kernels::Fp16ToFp32(half.data(), masters[i].data(), sizes[i]);
      halves.push_back(half);
    }
  }
  std::vector<Parameter> Parameters() const {
    std::vector<Parameter> parameters;
    for (const size_t n : sizes) parameters.push_back({.n = n, .type = type, .has_m = true, .has_v = true});
    return parameters;
  }
  void* Values(size_t i) {
    return type == DType::kFp32 ? static_cast<void*>(masters[i].data())
                                : static_cast<void*>(halves[i].data());
  }
  std::vector<Update> Updates(int step, const UpdateOptions& options) {
    gradients.clear();
    std::vector<Update> updates;
    for (size_t i = 0; i < sizes.size(); ++i) {
      gradients.push_back(Random(sizes[i], static_cast<uint32_t>(100 * step) + static_cast<uint32_t>(i)));
    }
    for (size_t i = 0; i < sizes.size(); ++i) {
      updates.push_back({.parameter = static_cast<int>(i),
                         .values = Values(i),
                         .gradient = gradients[i].data(),
                         .options = options,
                         .update = step});
    }
    return updates;
  }

  DType type;
  std::vector<size_t> sizes = {1, 7, 100, 4096, 150'001, 5, 200'000, 12'289, 0, 3};
  std::vector<std::vector<float>> masters;  // the parameters themselves in fp32
  std::vector<std::vector<uint16_t>> halves;
  std::vector<std::vector<float>> gradients;
};

std::unique_ptr<DriveOptimizer> Make(const ScratchDirectory& directory, uint64_t memory, int threads = 2) {
  DriveOptimizerOptions options;
  options.directory = directory.path();
  options.host_memory_budget_bytes = memory;
  options.threads = threads;
  options.log = [](std::string_view) {};
  absl::StatusOr<std::unique_ptr<DriveOptimizer>> made = DriveOptimizer::Create(std::move(options));
  EXPECT_TRUE(made.ok()) << made.status();
  return std::move(*made);
}

constexpr uint64_t kLeast = 2 * kMiB;

class TypesTest : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Types, TypesTest, testing::Values(DType::kFp32, DType::kBf16, DType::kFp16));

TEST_P(TypesTest, TheBitsAreTheKernelsWhereverTheStatesLive) {
  for (const uint64_t memory : {kLeast, 4 * kMiB, 64 * kMiB}) {
    const ScratchDirectory directory;
    Model model(GetParam());
    auto optimizer = Make(directory, memory);
    ASSERT_OK(optimizer->Add(model.Parameters()).status());
    Model whole;  // the masters in memory, in fp32
    whole.masters = model.masters;
    std::vector<std::vector<float>> m, v;
    for (const size_t n : model.sizes) {
      m.emplace_back(n);
      v.emplace_back(n);
    }
    const kernels::AdamOptions adam = {.lr = 1e-2, .weight_decay = 0.1};
    for (int step = 1; step <= 4; ++step) {
      ASSERT_OK(optimizer->Step(model.Updates(step, adam)));
      for (size_t i = 0; i < model.sizes.size(); ++i) {
        kernels::AdamWFp32(kernels::MakeAdamStep(adam, step), whole.masters[i].data(), m[i].data(),
                           v[i].data(), model.gradients[i].data(), model.sizes[i]);
        if (GetParam() == DType::kFp32) {
          ASSERT_EQ(model.masters[i], whole.masters[i]);
        } else {
          std::vector<uint16_t> rounded(model.sizes[i]);
          if (GetParam() == DType::kFp16) {
            kernels::Fp32ToFp16(whole.masters[i].data(), rounded.data(), rounded.size());
          }
          for (size_t j = 0; j < rounded.size() && GetParam() == DType::kBf16; ++j) {
            rounded[j] = kernels::SplitOne(whole.masters[i][j]).master_high;
          }
          ASSERT_EQ(model.halves[i], rounded) << "parameter " << i << ", step " << step;
        }
      }
    }
    const DriveOptimizerStats stats = optimizer->stats();
    EXPECT_EQ(stats.drive_bytes == 0, memory == 64 * kMiB);
    EXPECT_LE(stats.ring_bytes + stats.resident_bytes, memory);
  }
}

TEST_P(TypesTest, StatesComeOutAndGoBackIn) {
  const ScratchDirectory directory;
  Model model(GetParam());
  auto optimizer = Make(directory, kLeast);
  ASSERT_OK(optimizer->Add(model.Parameters()).status());
  const kernels::AdamOptions adam = {.lr = 1e-2};
  for (int step = 1; step <= 3; ++step) ASSERT_OK(optimizer->Step(model.Updates(step, adam)));
  FILE* const file = std::tmpfile();
  ASSERT_NE(file, nullptr);
  std::vector<StatePlaces> places;
  std::vector<std::vector<float>> arrays;
  int64_t end = 0;
  for (size_t i = 0; i < model.sizes.size(); ++i) {
    const auto bytes = static_cast<int64_t>(4 * model.sizes[i]);
    places.push_back({.parameter = static_cast<int>(i),
                      .values = model.Values(i),
                      .master = GetParam() == DType::kFp32 ? -1 : end,
                      .m = end + bytes,
                      .v = end + 2 * bytes});
    end += 3 * bytes;
  }
  ASSERT_OK(optimizer->CopyStates(places, fileno(file)));
  const auto read = [&](int64_t offset, size_t n) {
    std::vector<float> values(n);
    if (offset >= 0) {
      EXPECT_EQ(pread(fileno(file), values.data(), 4 * n, offset), static_cast<ssize_t>(4 * n));
    }
    return values;
  };
  Model other(GetParam());
  other.masters = model.masters;
  other.halves = model.halves;
  auto again = Make(directory, 4 * kMiB);
  ASSERT_OK(again->Add(other.Parameters()).status());
  std::vector<StateValues> states;
  arrays.reserve(3 * model.sizes.size());
  for (size_t i = 0; i < model.sizes.size(); ++i) {
    arrays.push_back(read(places[i].master, model.sizes[i]));
    arrays.push_back(read(places[i].m, model.sizes[i]));
    arrays.push_back(read(places[i].v, model.sizes[i]));
    states.push_back({.parameter = static_cast<int>(i),
                      .master = arrays[3 * i].data(),
                      .m = arrays[3 * i + 1].data(),
                      .v = arrays[3 * i + 2].data()});
  }
  ASSERT_OK(again->SetStates(states));
  for (int step = 4; step <= 6; ++step) {
    ASSERT_OK(optimizer->Step(model.Updates(step, adam)));
    ASSERT_OK(again->Step(other.Updates(step, adam)));
  }
  EXPECT_EQ(model.masters, other.masters);
  EXPECT_EQ(model.halves, other.halves);
  std::fclose(file);
}

TEST(DriveOptimizerTest, WhatIsWrongIsRefusedAndNothingChanges) {
  const ScratchDirectory directory;
  Model model;
  auto optimizer = Make(directory, kLeast);
  ASSERT_OK(optimizer->Add(model.Parameters()).status());
  const auto before = model.masters;
  for (const auto& spoil : std::vector<std::function<void(std::vector<Update>*)>>{
           [](auto* updates) { updates->back().parameter = 99; },
           [](auto* updates) { updates->back().parameter = -1; },
           [](auto* updates) { updates->back().parameter = 0; },
           [](auto* updates) { updates->at(4).gradient = nullptr; },
           [](auto* updates) { updates->back().update = 0; }}) {
    std::vector<Update> updates = model.Updates(1, kernels::AdamOptions{});
    spoil(&updates);
    EXPECT_EQ(optimizer->Step(updates).code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(model.masters, before);
  EXPECT_TRUE(optimizer->broken().ok());
  Parameter stateless = {.n = 10};
  ASSERT_OK(optimizer->Add({&stateless, 1}).status());
  std::vector<float> values(10), gradient(10);
  Update update = {.parameter = static_cast<int>(model.sizes.size()),
                   .values = values.data(),
                   .gradient = gradient.data(),
                   .options = kernels::LionOptions{}};
  EXPECT_EQ(optimizer->Step({&update, 1}).code(), absl::StatusCode::kInvalidArgument);
  update.options = kernels::SgdOptions{};
  EXPECT_TRUE(optimizer->Step({&update, 1}).ok());

  DriveOptimizerOptions options;
  EXPECT_EQ(DriveOptimizer::Create(options).status().code(), absl::StatusCode::kInvalidArgument);
  options.directory = directory.path() + "/none";
  EXPECT_EQ(DriveOptimizer::Create(options).status().code(), absl::StatusCode::kNotFound);
  options.directory = directory.path();
  options.host_memory_budget_bytes = kMiB;
  EXPECT_EQ(DriveOptimizer::Create(options).status().code(), absl::StatusCode::kInvalidArgument);
}

// Transfers until a given one; that and all later ones fail, for as long as it is told so.
struct Fuse {
  std::atomic<int64_t> left{INT64_MAX};
};

class FusedBackend final : public aio::Backend {
 public:
  explicit FusedBackend(Fuse* fuse) : fuse_(fuse), behind_(aio::MakeThreadsBackend()) {}
  std::string_view name() const override { return "fused"; }
  absl::Status Start(const aio::BackendConfig& config) override { return behind_->Start(config); }
  void Finish() override { behind_->Finish(); }
  void Queue(aio::Piece& piece) override {
    if (fuse_->left.fetch_sub(1) <= 0) {
      failed_.push_back({&piece, -EREMOTEIO});
    } else {
      behind_->Queue(piece);
    }
  }
  int64_t Run(std::span<aio::Completion> out, uint32_t want, int64_t timeout_ns) override {
    if (failed_.empty()) return behind_->Run(out, want, timeout_ns);
    const size_t count = std::min(out.size(), failed_.size());
    std::copy_n(failed_.begin(), count, out.begin());
    failed_.erase(failed_.begin(), failed_.begin() + static_cast<ptrdiff_t>(count));
    return static_cast<int64_t>(count);
  }
  void Wake() override { behind_->Wake(); }
  void ForgetFile(int fd) override { behind_->ForgetFile(fd); }

 private:
  Fuse* const fuse_;
  std::unique_ptr<aio::Backend> behind_;
  std::vector<aio::Completion> failed_;
};

class FaultTest : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(AdamAndLamb, FaultTest, testing::Bool());

TEST_P(FaultTest, AStepThatFailsIsMadeAgainOrTheStateIsKnownToBeLost) {
  UpdateOptions update = kernels::AdamOptions{.lr = 1e-2};
  if (GetParam()) update = kernels::LambOptions{};
  const auto steps = [&](DriveOptimizer& optimizer, Model& model, int first, int last) {
    for (int step = first; step <= last; ++step)
      EXPECT_TRUE(optimizer.Step(model.Updates(step, update)).ok());
  };
  Model expected(DType::kBf16);
  const ScratchDirectory directory;
  {
    auto optimizer = Make(directory, 64 * kMiB);
    ASSERT_OK(optimizer->Add(expected.Parameters()).status());
    steps(*optimizer, expected, 1, 3);
  }
  int again = 0, lost = 0, done = 0;
  for (int64_t at = 0; done < 2; ++at) {
    Fuse fuse;
    DriveOptimizerOptions options;
    options.directory = directory.path();
    options.host_memory_budget_bytes = kLeast;
    options.log = [](std::string_view) {};
    options.backend_factory = [&] { return std::make_unique<FusedBackend>(&fuse); };
    auto made = DriveOptimizer::Create(options);
    ASSERT_OK(made.status());
    DriveOptimizer& optimizer = **made;
    Model model(DType::kBf16);
    ASSERT_OK(optimizer.Add(model.Parameters()).status());
    steps(optimizer, model, 1, 1);
    const auto values = model.halves;
    fuse.left = at;
    const absl::Status status = optimizer.Step(model.Updates(2, update));
    fuse.left = INT64_MAX;
    if (status.ok()) {
      ++done;
    } else if (optimizer.broken().ok()) {
      ++again;
      EXPECT_EQ(model.halves, values);
      EXPECT_THAT(std::string(status.message()), testing::HasSubstr("offset"));
      steps(optimizer, model, 2, 2);
    } else {
      ++lost;
      EXPECT_EQ(optimizer.Step(model.Updates(2, update)).code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_EQ(optimizer.CopyStates({}, 0).code(), absl::StatusCode::kFailedPrecondition);
      // Some states put back do not make it whole. All do.
      std::vector<StateValues> states = {{.parameter = 4}};
      EXPECT_EQ(optimizer.SetStates(states).code(), absl::StatusCode::kFailedPrecondition);
      states.clear();
      for (size_t i = 0; i < model.sizes.size(); ++i) states.push_back({.parameter = static_cast<int>(i)});
      ASSERT_OK(optimizer.SetStates(states));
      ASSERT_TRUE(optimizer.broken().ok());
      Model fresh(DType::kBf16);
      model.halves = fresh.halves;
      steps(optimizer, model, 1, 2);
    }
    steps(optimizer, model, 3, 3);
    ASSERT_EQ(model.halves, expected.halves) << "the transfer that failed: " << at;
  }
  EXPECT_GT(again, 0);
  EXPECT_GT(lost, 0);
}

}  // namespace
}  // namespace penstock::optim::drive_optimizer_test
