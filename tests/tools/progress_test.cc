#include "tools/base/progress.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <thread>
#include <vector>

namespace penstock::tools::progress_test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

ProgressSample Sample(int64_t step = 12, int64_t steps = 200) {
  return {.step = step,
          .steps = steps,
          .loss = 3.14159,
          .tokens_per_second = 5210,
          .read_bytes_per_second = 3.42e9,
          .write_bytes_per_second = 1.2e9,
          .waits_for = "read",
          .seconds_left = 3723};
}

TEST(FormatDuration, Ranges) {
  EXPECT_EQ(FormatDuration(0), "0:00");
  EXPECT_EQ(FormatDuration(4.6), "0:05");
  EXPECT_EQ(FormatDuration(754), "12:34");
  EXPECT_EQ(FormatDuration(3599.9), "1:00:00");
  EXPECT_EQ(FormatDuration(3723), "1:02:03");
  EXPECT_EQ(FormatDuration(3 * 86400 + 4 * 3600 + 5 * 60), "3d 04:05");
  EXPECT_EQ(FormatDuration(-1), "-");
  EXPECT_EQ(FormatDuration(kNan), "-");
  EXPECT_EQ(FormatDuration(std::numeric_limits<double>::infinity()), "-");
}

TEST(FormatCount, Ranges) {
  EXPECT_EQ(FormatCount(0), "0");
  EXPECT_EQ(FormatCount(950), "950");
  EXPECT_EQ(FormatCount(999.7), "1.0k");
  EXPECT_EQ(FormatCount(5210), "5.2k");
  EXPECT_EQ(FormatCount(999'960), "1.0M");
  EXPECT_EQ(FormatCount(1.3e9), "1.3G");
  EXPECT_EQ(FormatCount(kNan), "-");
}

TEST(FormatProgress, WholeLine) {
  EXPECT_EQ(
      FormatProgress(Sample()),
      "step 12/200  loss 3.1416  5.2k tok/s  read 3.42 GB/s  write 1.20 GB/s  waits: read  left 1:02:03");
}

TEST(FormatProgress, LeavesOutWhatIsNotKnown) {
  ProgressSample sample = Sample();
  sample.loss = sample.tokens_per_second = sample.write_bytes_per_second = sample.seconds_left = kNan;
  sample.waits_for.clear();
  EXPECT_EQ(FormatProgress(sample), "step 12/200  read 3.42 GB/s");
}

TEST(FormatProgress, DropsTheLeastImportantToFit) {
  EXPECT_EQ(FormatProgress(Sample(), 90),
            "step 12/200  loss 3.1416  5.2k tok/s  read 3.42 GB/s  write 1.20 GB/s  left 1:02:03");
  EXPECT_EQ(FormatProgress(Sample(), 60), "step 12/200  loss 3.1416  5.2k tok/s  left 1:02:03");
  EXPECT_EQ(FormatProgress(Sample(), 30), "step 12/200  loss 3.1416");
  EXPECT_EQ(FormatProgress(Sample(), 12), "step 12/200");
  EXPECT_EQ(FormatProgress(Sample(), 4), "step");
  for (int columns = 1; columns < 120; ++columns) {
    EXPECT_LE(FormatProgress(Sample(), columns).size(), static_cast<size_t>(columns));
  }
}

class ProgressTest : public testing::Test {
 protected:
  Progress::Options Options(bool terminal, bool quiet = false) {
    Progress::Options options;
    options.quiet = quiet;
    options.terminal = terminal;
    options.sink = [this](std::string_view text) { written_.emplace_back(text); };
    options.clock = [this] { return now_; };
    options.columns = 80;
    return options;
  }
  std::string All() const {
    std::string all;
    for (const std::string& text : written_) all += text;
    return all;
  }

  double now_ = 100;
  std::vector<std::string> written_;
};

TEST_F(ProgressTest, TerminalRedrawsAtMostTenTimesASecond) {
  Progress progress(Options(true));
  for (int i = 1; i <= 1000; ++i) {
    progress.Update(Sample(i, 100000));
    now_ += 0.01;
  }
  EXPECT_GE(written_.size(), 90u);
  EXPECT_LE(written_.size(), 101u);
  for (const std::string& text : written_) {
    EXPECT_EQ(text.front(), '\r');
    EXPECT_EQ(text.find('\n'), std::string::npos);
    EXPECT_LE(text.size(), 1 + 79 + 3u);  // return, line, erase to the end
  }
}

TEST_F(ProgressTest, TerminalFinishesWithTheNewestSampleAndOneNewline) {
  {
    Progress progress(Options(true));
    progress.Update(Sample(1, 200));
    progress.Update(Sample(2, 200));  // too soon: not shown
    EXPECT_EQ(written_.size(), 1u);
    progress.Finish();
    progress.Finish();
  }
  EXPECT_NE(All().find("step 2/200"), std::string::npos);
  EXPECT_EQ(std::count(written_.begin(), written_.end(), "\n"), 1);
  EXPECT_EQ(All().back(), '\n');
}

TEST_F(ProgressTest, PlainLinesEveryFewSecondsAndAtTheEnd) {
  Progress progress(Options(false));
  for (int i = 1; i <= 200; ++i) {
    progress.Update(Sample(i, 200));
    now_ += 0.1;
  }
  progress.Finish();
  // 0 s, 5 s, 10 s, 15 s, and the last step.
  ASSERT_EQ(written_.size(), 5u);
  EXPECT_NE(written_.front().find("step 1/200"), std::string::npos);
  EXPECT_NE(written_.back().find("step 200/200"), std::string::npos);
  for (const std::string& text : written_) {
    EXPECT_EQ(text.back(), '\n');
    EXPECT_EQ(text.find('\r'), std::string::npos);
    EXPECT_EQ(text.find('\x1b'), std::string::npos);
  }
}

TEST_F(ProgressTest, QuietWritesOnlyWhatIsPrinted) {
  Progress progress(Options(true, true));
  progress.Update(Sample());
  progress.Print("note");
  progress.Finish();
  EXPECT_EQ(All(), "note\n");
}

TEST_F(ProgressTest, PrintGoesAboveTheLiveLine) {
  Progress progress(Options(true));
  progress.Update(Sample(1, 200));
  written_.clear();
  progress.Print("checkpoint saved");
  ASSERT_EQ(written_.size(), 2u);
  EXPECT_EQ(written_[0], "\r\x1b[Kcheckpoint saved\n");
  EXPECT_NE(written_[1].find("step 1/200"), std::string::npos);
}

TEST_F(ProgressTest, NothingToFinishWritesNothing) {
  { Progress progress(Options(true)); }
  EXPECT_EQ(All(), "");
}

TEST_F(ProgressTest, ManyThreads) {
  Progress progress(Options(false));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        progress.Update(Sample(i + 1, 1000));
        progress.Print("x");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(std::count(written_.begin(), written_.end(), "x\n"), 800);
}

}  // namespace
}  // namespace penstock::tools::progress_test
