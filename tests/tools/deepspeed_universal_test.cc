// Every value of a universal checkpoint, against where it was read: tensors of all sizes and shapes, in
// little memory and in much.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/atomic_file.h"
#include "base/small_file.h"
#include "models/deepspeed/universal.h"
#include "models/weights/torch_file.h"
#include "tests/tampered_call.h"

namespace penstock::models::deepspeed_universal_test {
namespace {

using testing::HasSubstr;

class DeepSpeedUniversalTest : public testing::Test {
 protected:
  DeepSpeedUniversalTest() {
    char name[] = "universal-test-XXXXXX";
    directory_ = std::filesystem::absolute(mkdtemp(name)).string();
    // A matrix that three blocks have the rows of; then a block of everything.
    layout_.tensors.push_back({.name = "wte", .rows = 250, .columns = 64, .rows_of_block = 100});
    const auto add = [&](PublishedTensor tensor) {
      tensor.block = 3;
      tensor.offset = end_;
      end_ += (tensor.elements() + kParameterAlignment - 1) / kParameterAlignment * kParameterAlignment;
      layout_.tensors.push_back(std::move(tensor));
    };
    add({.name = "in", .rows = 300, .columns = 500, .transposed = true});
    add({.name = "bias", .rows = 7});
    add({.name = "empty", .rows = 0});
    add({.name = "tall", .rows = 40'000, .columns = 3, .transposed = true});  // a column is more than a batch
    add({.name = "wide", .rows = 2, .columns = 50'000, .transposed = true});  // and a row more than a chunk
    add({.name = "plain", .rows = 321, .columns = 400});
    add({.name = "cube", .rows = 24, .shape = std::vector<uint64_t>{2, 3, 4}});
    add({.name = "last", .rows = 1, .columns = 1, .transposed = true});
    layout_.block_elements = {6400, 6400, 6400, end_};
    progress_.step = progress_.updates = 3;
    progress_.groups = nlohmann::json::array({{{"lr", 0.5}}});
    options_.directory = directory_;
    options_.tag = "tag";
    options_.overwrite = true;
  }
  ~DeepSpeedUniversalTest() override { std::filesystem::remove_all(directory_); }

  static float ValueAt(size_t kind, int block, int64_t element) {
    return static_cast<float>((element * 31 + block * 7 + static_cast<int64_t>(kind) * 13) % 16'777'213);
  }
  static absl::Status Read(int block, int64_t first, int64_t elements, float* master, float* m, float* v) {
    const std::array<float*, 3> to = {master, m, v};
    for (size_t k = 0; k < 3; ++k) {
      for (int64_t i = 0; i < elements; ++i) to[k][i] = ValueAt(k, block, first + i);
    }
    return absl::OkStatus();
  }

  void ExpectWhole() const {
    for (const PublishedTensor& tensor : layout_.tensors) {
      for (size_t k = 0; k < 3; ++k) {
        const std::string path = directory_ + "/tag/zero/" + tensor.name + "/" +
                                 std::array{"fp32.pt", "exp_avg.pt", "exp_avg_sq.pt"}[k];
        SCOPED_TRACE(path);
        const absl::StatusOr<std::unique_ptr<TorchFile>> file = TorchFile::Open(path);
        ASSERT_TRUE(file.ok()) << file.status();
        const TorchTensor* const found = (*file)->root()["param"].tensor();
        ASSERT_NE(found, nullptr);
        std::vector<int64_t> sizes;
        for (const uint64_t size : tensor.published_shape()) sizes.push_back(static_cast<int64_t>(size));
        ASSERT_EQ(found->sizes, sizes);
        std::vector<float> values(static_cast<size_t>(found->elements));
        ASSERT_TRUE((*file)->Read(*found, 0, std::as_writable_bytes(std::span(values))).ok());
        for (int64_t e = 0; e < found->elements; ++e) {
          const int64_t kept = tensor.transposed ? e % tensor.rows * tensor.columns + e / tensor.rows : e;
          const TensorPlace place = PlaceOf(tensor, kept);
          ASSERT_EQ(values[static_cast<size_t>(e)], ValueAt(k, place.block, place.first)) << e;
        }
      }
      EXPECT_TRUE(std::filesystem::exists(directory_ + "/tag/zero/" + tensor.name + "/step.pt"));
    }
  }

  std::string directory_;
  int64_t end_ = 0;
  ModelLayout layout_;
  DeepSpeedProgress progress_;
  UniversalOptions options_;
};

TEST_F(DeepSpeedUniversalTest, HasEveryValueInAnyMemory) {
  for (const uint64_t memory : {uint64_t{1} << 20, uint64_t{3'456'789}, uint64_t{128} << 20}) {
    SCOPED_TRACE(memory);
    options_.memory_bytes = memory;
    uint64_t last = 0, all = 0;
    options_.progress = [&](uint64_t done, uint64_t total) {
      EXPECT_GE(done, last);
      last = done;
      all = total;
    };
    const absl::Status written = WriteUniversal(progress_, layout_, Read, options_);
    ASSERT_TRUE(written.ok()) << written;
    EXPECT_EQ(last, all);
    ExpectWhole();
  }
}

// Wherever reading fails, the error is told and the checkpoint before it stands.
TEST_F(DeepSpeedUniversalTest, AReadThatFailsLeavesTheOldOne) {
  options_.memory_bytes = 1 << 20;
  std::atomic<int> reads{0};
  int fails_at = -1;
  const auto read = [&](int block, int64_t first, int64_t elements, float* master, float* m, float* v) {
    if (reads++ == fails_at) return absl::DataLossError("a tile is damaged");
    return Read(block, first, elements, master, m, v);
  };
  ASSERT_TRUE(WriteUniversal(progress_, layout_, read, options_).ok());
  const int all = reads;
  ASSERT_GT(all, 20);
  for (const int at : {0, 1, all / 3, all / 2, all - 1}) {
    reads = 0;
    fails_at = at;
    EXPECT_EQ(WriteUniversal(progress_, layout_, read, options_), absl::DataLossError("a tile is damaged"));
    EXPECT_FALSE(std::filesystem::exists(directory_ + "/.tag.partial"));
    ExpectWhole();
  }
}

TEST_F(DeepSpeedUniversalTest, KilledAtAnyMomentTheNameOfTheNewestIsOfAWholeOne) {
  layout_.tensors.erase(layout_.tensors.begin() + 1, layout_.tensors.end());
  ASSERT_TRUE(WriteUniversal(progress_, layout_, Read, options_).ok());
  const std::vector<uint64_t> calls = {SYS_renameat, SYS_renameat2, SYS_linkat, SYS_unlinkat,
#ifdef SYS_rename
                                       SYS_rename,   SYS_unlink
#endif
  };
  bool reached = true;
  size_t at = 0;
  for (; reached; ++at) {
    const Tampered ran = RunTampered({.calls = calls, .at = at}, [&] {
      return WriteUniversal(progress_, layout_, Read, options_).ok() ? 0 : 1;
    });
    if (!ran.can) GTEST_SKIP() << "no process can be traced here";
    reached = ran.reached;
    EXPECT_EQ(ran.code, reached ? 1000 + SIGKILL : 0) << at;
    EXPECT_EQ(ReadSmallFile(directory_ + "/latest_universal").value(), "tag") << at;
    EXPECT_TRUE(std::filesystem::exists(directory_ + "/tag/mp_rank_00_model_states.pt")) << at;
    ExpectWhole();
  }
  EXPECT_GT(at, 4U);
  // A kill between a new file's own name and its right one leaves it under the former, which is hidden.
  int shown = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory_))
    shown += entry.path().filename().string()[0] != '.' ? 1 : 0;
  EXPECT_EQ(shown, 2);
}

// Whatever a directory is called, it is removed or renamed only where all of it is of a checkpoint.
TEST_F(DeepSpeedUniversalTest, WhatIsNotOfACheckpointStaysWhereItIs) {
  namespace fs = std::filesystem;
  ASSERT_TRUE(WriteUniversal(progress_, layout_, Read, options_).ok());
  const std::string original = directory_ + "/original";
  fs::rename(directory_ + "/tag", original);
  fs::remove(directory_ + "/latest_universal");
  const auto tree = [&] {
    std::vector<std::string> found;
    for (const auto& entry : fs::recursive_directory_iterator(directory_))
      found.push_back(entry.path().string() + (fs::is_regular_file(entry.symlink_status())
                                                   ? ":" + std::to_string(fs::file_size(entry.path()))
                                                   : "/"));
    std::sort(found.begin(), found.end());
    return found;
  };
  for (const char* name : {"tag", ".tag.partial", ".tag.replaced"}) {
    const std::string place = directory_ + "/" + name;
    for (const char* mine : {"notes.txt", "zero/notes.txt", "zero/plain/notes.txt", "runs/notes.txt",
                             "zero/plain/deeper/fp32.pt", "model.safetensors", "fp32.pt"}) {
      for (const bool overwrite : {false, true}) {
        if (!overwrite && name == std::string("tag")) continue;
        SCOPED_TRACE(place + " " + mine);
        fs::copy(original, place, fs::copy_options::recursive);
        fs::create_directories(fs::path(place + "/" + mine).parent_path());
        ASSERT_TRUE(ReplaceFile(place + "/" + mine, "years").ok());
        const std::vector<std::string> before = tree();
        options_.overwrite = overwrite;
        const absl::Status refused = WriteUniversal(progress_, layout_, Read, options_);
        EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
        EXPECT_THAT(refused.message(), HasSubstr(place + " is neither replaced nor removed: "));
        EXPECT_EQ(tree(), before);
        fs::remove_all(place);
      }
    }
    // Nor is a link, or a file of such a name.
    fs::create_directory_symlink(original, place);
    const std::vector<std::string> before = tree();
    EXPECT_EQ(WriteUniversal(progress_, layout_, Read, options_).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(tree(), before);
    fs::remove(place);
  }
  // What a killed export leaves goes, and what it has set aside comes back.
  fs::copy(original, directory_ + "/.tag.partial", fs::copy_options::recursive);
  fs::remove(directory_ + "/.tag.partial/zero/optimizer_state.pt");
  fs::rename(original, directory_ + "/.tag.replaced");
  options_.overwrite = false;
  EXPECT_TRUE(absl::IsAlreadyExists(WriteUniversal(progress_, layout_, Read, options_)));
  options_.overwrite = true;
  EXPECT_TRUE(WriteUniversal(progress_, layout_, Read, options_).ok());
  ExpectWhole();
  EXPECT_FALSE(fs::exists(directory_ + "/.tag.partial") || fs::exists(directory_ + "/.tag.replaced"));
}

// What comes into the old one while the new one is written.
TEST_F(DeepSpeedUniversalTest, WhatIsPutIntoTheOldOneMeanwhileStays) {
  ASSERT_TRUE(WriteUniversal(progress_, layout_, Read, options_).ok());
  const std::string mine = directory_ + "/tag/notes.txt";
  const auto read = [&](int block, int64_t first, int64_t elements, float* master, float* m, float* v) {
    if (ReadSmallFile(mine).ok() || ReplaceFile(mine, "years").ok())
      return Read(block, first, elements, master, m, v);
    return absl::InternalError("not written");
  };
  const absl::Status refused = WriteUniversal(progress_, layout_, read, options_);
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
  EXPECT_EQ(ReadSmallFile(mine).value_or(""), "years");
  EXPECT_FALSE(std::filesystem::exists(directory_ + "/.tag.partial"));
  ExpectWhole();
}

TEST_F(DeepSpeedUniversalTest, NamesThatAreNoneOrTwosAreRefused) {
  for (const auto& [name, why] : {std::pair{"../tall", "\"../tall\" is no name of a parameter"},
                                  {"plain", "two parameters are called \"plain\""},
                                  {"wte", "two parameters are called \"wte\""},
                                  {".", "or it is no name of one"}}) {
    options_.names["tall"] = name;
    const absl::Status refused = WriteUniversal(progress_, layout_, Read, options_);
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_THAT(refused.message(), HasSubstr(why));
    EXPECT_TRUE(std::filesystem::is_empty(directory_));
  }
}

}  // namespace
}  // namespace penstock::models::deepspeed_universal_test
