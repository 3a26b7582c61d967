// Tokenizers in every published form against Hugging Face's tokenizers. tests/golden/text has what it
// answered; scripts/golden-text asks it.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "text/tokenizer.h"
#include "text/utf8.h"

namespace penstock::text {
namespace {

using nlohmann::json;

std::vector<std::string> Forms() {
  std::vector<std::string> forms;
  for (const auto& entry : std::filesystem::directory_iterator(PENSTOCK_GOLDEN "/text"))
    forms.push_back(entry.path().stem().string());
  std::sort(forms.begin(), forms.end());
  return forms;
}

class TextGoldenTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    std::ifstream file(std::string(PENSTOCK_GOLDEN) + "/text/" + GetParam() + ".json");
    golden_ = json::parse(file, nullptr, /*allow_exceptions=*/false);
    ASSERT_TRUE(golden_.is_object());
    auto tokenizer = Tokenizer::Parse(golden_["tokenizer"].dump());
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    tokenizer_ = *std::move(tokenizer);
  }
  std::string Streamed(const std::vector<int32_t>& ids, bool skip) {
    TextDecoder decoder(*tokenizer_, skip);
    std::string text;
    for (const int32_t id : ids) {
      const std::string piece = decoder.Push(id);
      EXPECT_EQ(FindBroken(piece), std::string::npos);
      text += piece;
    }
    return text + decoder.Finish();
  }

  json golden_;
  std::unique_ptr<Tokenizer> tokenizer_;
};

TEST_P(TextGoldenTest, TextsHaveTheIdsThatHuggingFaceGivesThem) {
  for (const json& c : golden_["cases"]) {
    const std::string text = c["in"];
    const auto ids = tokenizer_->Encode(text);
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_EQ(*ids, c["ids"].get<std::vector<int32_t>>()) << c["in"];
    const auto plain = tokenizer_->Encode(text, {.add_special_tokens = false});
    ASSERT_TRUE(plain.ok()) << plain.status();
    EXPECT_EQ(*plain, c["plain"].get<std::vector<int32_t>>()) << c["in"];
  }
}

TEST_P(TextGoldenTest, IdsHaveTheTextThatHuggingFaceGivesThem) {
  for (const json& c : golden_["cases"]) {
    if (!c.contains("text")) continue;
    const auto ids = c["ids"].get<std::vector<int32_t>>();
    EXPECT_EQ(tokenizer_->Decode(ids), c["text"].get<std::string>());
    EXPECT_EQ(tokenizer_->Decode(ids, /*skip_special_tokens=*/false), c["shown"].get<std::string>());
  }
  for (const json& c : golden_["decoded"])
    EXPECT_EQ(tokenizer_->Decode(c["ids"].get<std::vector<int32_t>>()), c["text"].get<std::string>())
        << c["ids"];
}

TEST_P(TextGoldenTest, DecodingTokenByTokenGivesTheSameTextInWholeCharacters) {
  for (const json& c : golden_["cases"]) {
    const auto ids = c["ids"].get<std::vector<int32_t>>();
    EXPECT_EQ(Streamed(ids, true), tokenizer_->Decode(ids));
    EXPECT_EQ(Streamed(ids, false), tokenizer_->Decode(ids, false));
  }
  for (const json& c : golden_["decoded"]) Streamed(c["ids"].get<std::vector<int32_t>>(), true);
}

// All texts one after the other, and each alone, in parts of any length.
TEST_P(TextGoldenTest, ATextInPartsHasTheIdsOfTheWhole) {
  std::string all;
  std::vector<std::string> texts;
  for (const json& c : golden_["cases"]) {
    texts.push_back(c["in"]);
    all += texts.back();
  }
  texts.push_back(all);
  std::minstd_rand random(11);
  Encoder encoder(*tokenizer_);
  for (const std::string& text : texts) {
    const auto whole = tokenizer_->Encode(text);
    ASSERT_TRUE(whole.ok()) << whole.status();
    for (const size_t longest : {size_t{1}, size_t{7}, size_t{300}, size_t{5000}}) {
      std::vector<int32_t> ids;
      std::string_view rest = text;
      while (!rest.empty()) {
        const size_t bytes = std::min(rest.size(), 1 + random() % longest);
        ASSERT_TRUE(encoder.Append(rest.substr(0, bytes), ids).ok());
        rest.remove_prefix(bytes);
      }
      ASSERT_TRUE(encoder.Finish(ids).ok());
      EXPECT_EQ(ids, *whole) << json(text);
    }
  }
}

TEST_P(TextGoldenTest, PublishedFormsNeedNotBeInMemoryAsAWhole) {
  const std::set<std::string> published = {"gpt2",   "llama3",   "qwen2",  "o200k",
                                           "smollm", "deepseek", "llama2", "mistral"};
  EXPECT_EQ(Encoder(*tokenizer_).streams(), published.contains(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Forms, TextGoldenTest, testing::ValuesIn(Forms()),
                         [](const auto& form) { return form.param; });

}  // namespace
}  // namespace penstock::text
