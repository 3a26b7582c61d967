// Several texts of one training: shares that hold, an order that no cut changes, and ends that are held out.
#include "models/data/data_mixture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "models/data/token_file.h"
#include "tests/text/byte_tokenizer.h"

namespace penstock::models::data_mixture_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr int64_t kSeq = 6;

class DataMixtureTest : public testing::Test {
 protected:
  DataMixtureTest() {
    std::string name = (std::filesystem::current_path() / "data_mixture_test.XXXXXX").string();
    directory_ = ::mkdtemp(name.data());
    Write("tokenizer.json", text::ByteTokenizer({"</s>", "<|im_start|>", "<|im_end|>"}));
    Write("tokenizer_config.json", R"({"eos_token": "</s>"})");
    tokenizer_ = *text::Tokenizer::Open(directory_);
  }
  ~DataMixtureTest() override { std::filesystem::remove_all(directory_); }

  std::string Write(const std::string& name, const std::string& content) {
    const std::string path = directory_ + "/" + name;
    std::ofstream(path, std::ios::binary) << content;
    return path;
  }
  // A text of one letter.
  std::unique_ptr<Dataset> Stream(char letter, size_t length) {
    return *Dataset::Open(Write(std::string(1, letter), std::string(length, letter)), TokenFormat::kBytes, 0,
                          kSeq);
  }
  // Prompts that nobody learns, and a letter each: from `first` on.
  std::unique_ptr<Dataset> Examples(char first, int count) {
    std::string lines;
    for (int i = 0; i < count; ++i)
      lines += std::string(R"({"prompt": ")") + static_cast<char>(first + i) + R"(", "completion": "abcd"})" +
               "\n";
    const std::string path = Write(std::string(1, first) + ".jsonl", lines);
    return *Dataset::OpenExamples(*MakeTokenFile(path, *tokenizer_, directory_, {}), 300, kSeq);
  }
  std::unique_ptr<DataMixture> Of(const std::vector<double>& weights, std::unique_ptr<Dataset> a,
                                  std::unique_ptr<Dataset> b) {
    std::vector<std::unique_ptr<Dataset>> texts;
    texts.push_back(std::move(a));
    texts.push_back(std::move(b));
    auto mixture = DataMixture::Of(std::move(texts), weights);
    EXPECT_TRUE(mixture.ok()) << mixture.status();
    return *std::move(mixture);
  }
  // The first letters of a step's rows, whoever has them.
  static std::string Step(const DataMixture& data, int64_t step, int64_t world, int64_t micro_batches,
                          int64_t batch, uint64_t seed = 7) {
    std::string letters;
    std::vector<int64_t> tokens(static_cast<size_t>(batch * kSeq)), targets = tokens;
    for (int64_t m = 0; m < micro_batches; ++m) {
      for (int64_t rank = 0; rank < world; ++rank) {
        const BatchPlace place = {step, m, rank, world, micro_batches * world * batch};
        EXPECT_TRUE(data.Fill(place, batch, seed, tokens.data(), targets.data()).ok());
        for (int64_t r = 0; r < batch; ++r)
          letters += static_cast<char>(tokens[static_cast<size_t>(r * kSeq)]);
      }
    }
    return letters;
  }

  std::string directory_;
  std::unique_ptr<text::Tokenizer> tokenizer_;
};

TEST_F(DataMixtureTest, SharesHoldOverEveryCycleInAnOrderOfItsOwn) {
  const auto data = Of({3, 1}, Stream('a', 100), Stream('b', 1000));
  EXPECT_THAT(data->sequences_in_cycle(), ElementsAre(750, 250));
  const std::string first = Step(*data, 1, 1, 1, 1000), second = Step(*data, 2, 1, 1, 1000);
  for (const std::string& cycle : {first, second})
    EXPECT_EQ(std::count(cycle.begin(), cycle.end(), 'a'), 750);
  EXPECT_NE(first, second);
  EXPECT_NE(first, Step(*data, 1, 1, 1, 1000, /*seed=*/8));
  // Within a cycle too: no long runs of one text.
  EXPECT_EQ(first.find(std::string(60, 'a')), std::string::npos);
}

TEST_F(DataMixtureTest, NoCutIntoRanksAndMicroBatchesChangesIt) {
  const auto data = Of({1, 2}, Stream('a', 100), Examples('A', 9));
  for (int64_t step = 1; step < 200; ++step) {
    const std::string whole = Step(*data, step, 1, 1, 12);
    EXPECT_EQ(Step(*data, step, 3, 1, 4), whole);
    EXPECT_EQ(Step(*data, step, 2, 3, 2), whole);
  }
}

TEST_F(DataMixtureTest, ExamplesComeOnceInAnEpochOfTheirOwnText) {
  const auto data = Of({1, 1}, Stream('a', 100), Examples('A', 10));
  std::string seen;
  for (int64_t step = 1; step <= 100; ++step) seen += Step(*data, step, 1, 1, 10);
  std::erase(seen, 'a');
  ASSERT_EQ(seen.size(), 500U);
  std::map<char, int> times;
  for (const char letter : seen) ++times[letter];
  EXPECT_EQ(times.size(), 10U);
  for (const auto& [letter, count] : times) EXPECT_EQ(count, 50) << letter;
}

TEST_F(DataMixtureTest, WithoutWeightsATokenOfEachTextCountsTheSame) {
  EXPECT_THAT(Of({}, Stream('a', 3000), Stream('b', 1000))->sequences_in_cycle(), ElementsAre(750, 250));
}

TEST_F(DataMixtureTest, OneTextIsAsItIsAlone) {
  const auto alone = Stream('a', 100);
  std::vector<std::unique_ptr<Dataset>> texts;
  texts.push_back(Stream('a', 100));
  const auto data = *DataMixture::Of(std::move(texts), {});
  EXPECT_EQ(*data->Fingerprint(), *alone->Fingerprint());
  EXPECT_EQ(data->EvalWindows(), alone->EvalWindows());
}

TEST_F(DataMixtureTest, WhatIsHeldOutIsNeverLearned) {
  // A stream whose last 10% are another letter, and ten examples.
  auto stream =
      *Dataset::Open(Write("s", std::string(900, 's') + std::string(100, 't')), TokenFormat::kBytes, 0, kSeq);
  const auto data = Of({1, 1}, std::move(stream), Examples('A', 10));
  const uint64_t before = *data->Fingerprint();
  auto held = data->HoldOut(0.1);
  ASSERT_TRUE(held.ok()) << held.status();
  EXPECT_NE(*data->Fingerprint(), before);
  std::set<char> learned, evaluated;
  for (int64_t step = 1; step <= 100; ++step) {
    for (const char letter : Step(*data, step, 1, 1, 20)) learned.insert(letter);
  }
  std::vector<int64_t> tokens(kSeq), targets = tokens;
  for (int64_t w = 0; w < (*held)->EvalWindows(); ++w) {
    ASSERT_TRUE((*held)->FillEval(w, tokens.data(), targets.data()).ok());
    evaluated.insert(static_cast<char>(tokens.front()));
  }
  EXPECT_EQ((*held)->EvalWindows(), 99 / kSeq + 1);
  EXPECT_EQ(evaluated, (std::set<char>{'t', 'J'}));
  for (const char letter : evaluated) EXPECT_EQ(learned.count(letter), 0U) << letter;
  EXPECT_EQ(learned.size(), 10U);
  EXPECT_FALSE((*held)->FillEval((*held)->EvalWindows(), tokens.data(), targets.data()).ok());
}

TEST_F(DataMixtureTest, WhatCannotBeIsRefused) {
  const auto refused = [&](const std::vector<double>& weights) {
    std::vector<std::unique_ptr<Dataset>> texts;
    texts.push_back(Stream('a', 100));
    texts.push_back(Stream('b', 100));
    return std::string(DataMixture::Of(std::move(texts), weights).status().message());
  };
  EXPECT_THAT(refused({1}), HasSubstr("2 texts and 1 weights"));
  EXPECT_THAT(refused({1, 0}), HasSubstr("must be above 0"));
  EXPECT_THAT(refused({10000, 1}), HasSubstr("less than one in 1000"));
  const auto few = Of({1, 1}, Stream('a', 100), Stream('b', kSeq + 1));
  EXPECT_THAT(few->HoldOut(0.5).status().message(), HasSubstr("not enough to hold some of them out"));
  // A place beyond its step.
  std::vector<int64_t> tokens(4 * kSeq), targets = tokens;
  EXPECT_TRUE(absl::IsInvalidArgument(few->Fill({1, 0, 0, 1, 0}, 4, 7, tokens.data(), targets.data())));
}

}  // namespace
}  // namespace penstock::models::data_mixture_test
