// The fibers themselves: a kernel that is right passes, the same one with a defect is reported.
#include "tests/kernels/fibers/fibers.h"

#include <cuda_runtime.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/fibers/defects.h"

namespace penstock::fibers {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr size_t kN = 128;

class Fibers : public ::testing::Test {
 protected:
  void SetUp() override {
    for (size_t i = 0; i < kN; ++i) values_[i] = static_cast<float>(i);
    ASSERT_EQ(cudaMalloc(&in_, sizeof(values_)), cudaSuccess);
    ASSERT_EQ(cudaMalloc(&out_, sizeof(values_)), cudaSuccess);
    ASSERT_EQ(cudaMemcpy(in_, values_.data(), sizeof(values_), cudaMemcpyHostToDevice), cudaSuccess);
  }
  void TearDown() override {
    cudaFree(in_);
    cudaFree(out_);
  }
  // What is said of the kernel with this defect.
  std::string Said(Defect defect) {
    const int error = Reverse(defect, static_cast<float*>(in_), static_cast<float*>(out_), kN);
    std::string report = TakeReport();
    EXPECT_EQ(error == cudaSuccess, report.empty());
    return report;
  }
  void* in_ = nullptr;
  void* out_ = nullptr;
  std::array<float, kN> values_{};
};

TEST_F(Fibers, AKernelThatIsRightPasses) {
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(Said(Defect::kNone), "");
    std::array<float, kN> out{};
    ASSERT_EQ(cudaMemcpy(out.data(), out_, sizeof(out), cudaMemcpyDeviceToHost), cudaSuccess);
    for (size_t at = 0; at < kN; ++at) ASSERT_EQ(out[at], values_[at / 64 * 64 + 63 - at % 64]) << at;
  }
}

TEST_F(Fibers, BarriersThatNotAllReachAreReported) {
  EXPECT_THAT(Said(Defect::kHalfABarrier), HasSubstr("at the barrier defects.cu:"));
  EXPECT_THAT(Said(Defect::kTwoBarriers), HasSubstr("two barriers at once"));
  EXPECT_THAT(Said(Defect::kLeavesBeforeBarrier), HasSubstr("thread 5 has ended"));
}

TEST_F(Fibers, ShufflesThatNotAllReachAreReported) {
  EXPECT_THAT(Said(Defect::kHalfAShuffle), HasSubstr("at the shuffle defects.cu:"));
  EXPECT_THAT(Said(Defect::kLeavesBeforeShuffle),
              AnyOf(HasSubstr("a mask names lane 8"), HasSubstr("thread 40 has ended")));
  EXPECT_THAT(Said(Defect::kForeignMask), HasSubstr("a mask that does not name its lane"));
  EXPECT_THAT(Said(Defect::kForeignSource), HasSubstr("a shuffle from lane "));
}

TEST_F(Fibers, RacesAreReportedWhateverTheSchedule) {
  if (!WatchesMemory()) GTEST_SKIP() << "memory is not watched under a sanitizer";
  for (int i = 0; i < 10; ++i) {
    for (const Defect defect :
         {Defect::kNoBarrierAtTurn, Defect::kShuffleForOrder, Defect::kBlocksRace, Defect::kReaderRaces}) {
      ASSERT_THAT(Said(defect), HasSubstr("in no order")) << static_cast<int>(defect);
    }
    // The read comes before the write, or after it.
    ASSERT_THAT(Said(Defect::kNoBarrier),
                AnyOf(HasSubstr("in no order"), HasSubstr("that nobody has written")));
  }
}

TEST_F(Fibers, WrongAccessesAreReported) {
  if (!WatchesMemory()) GTEST_SKIP() << "memory is not watched under a sanitizer";
  EXPECT_THAT(Said(Defect::kWritesPastTheEnd),
              HasSubstr("thread 63 writes byte 512 of an allocation of 512 bytes outside"));
  EXPECT_THAT(Said(Defect::kReadsPastTheEnd), HasSubstr("thread 63 reads byte 512"));
  EXPECT_THAT(Said(Defect::kReadsBeforeTheStart), HasSubstr("outside of every allocation"));
  EXPECT_THAT(Said(Defect::kReadsUnwrittenShared), HasSubstr("reads shared memory that nobody has written"));
  EXPECT_THAT(Said(Defect::kMisaligned), HasSubstr("a misaligned access: defects.cu:"));
  void* unwritten = nullptr;
  ASSERT_EQ(cudaMalloc(&unwritten, kN * sizeof(float)), cudaSuccess);
  std::swap(in_, unwritten);
  EXPECT_THAT(Said(Defect::kNone), HasSubstr("that nobody has written"));
  std::swap(in_, unwritten);
  ASSERT_EQ(cudaFree(unwritten), cudaSuccess);
  std::swap(out_, unwritten);
  EXPECT_THAT(Said(Defect::kNone), HasSubstr("outside of every allocation"));
  std::swap(out_, unwritten);
  // After all of it the device works.
  EXPECT_EQ(Said(Defect::kNone), "");
}

TEST_F(Fibers, LaunchesThatNoDeviceTakesAreRefused) {
  const auto body = [](void*) {};
  EXPECT_FALSE(RunThreads(0, 1, 0, body, nullptr));
  EXPECT_FALSE(RunThreads(1, 1025, 0, body, nullptr));
  EXPECT_FALSE(RunThreads(1, 1, 4097, body, nullptr));
  EXPECT_THAT(TakeReport(), HasSubstr("4097 bytes of parameters"));
}

// The order in which 64 threads get to a warp's synchronisation and past it.
std::vector<unsigned> Order(uint64_t seed) {
  std::vector<unsigned> order;
  SetSeed(seed);
  EXPECT_TRUE(RunThreads(
      2, 64, 0,
      [](void* context) {
        auto* const threads = static_cast<std::vector<unsigned>*>(context);
        threads->push_back(threadIdx.x);
        __syncwarp();
        threads->push_back(threadIdx.x);
      },
      &order));
  return order;
}
TEST_F(Fibers, ASeedIsASchedule) {
  EXPECT_EQ(Order(1).size(), 256);
  EXPECT_EQ(Order(1), Order(1));
  EXPECT_NE(Order(1), Order(2));
}

}  // namespace
}  // namespace penstock::fibers
