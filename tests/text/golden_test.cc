// Tokenizers in every published form against Hugging Face's tokenizers. tests/golden/text has what it
// answered; tests/golden/make text asks it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "text/tokenizer.h"
#include "text/utf8.h"

namespace penstock::text::golden_test {
namespace {

using nlohmann::json;

std::vector<std::string> NamesIn(const char* directory) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    names.push_back(entry.path().stem().string());
  std::sort(names.begin(), names.end());
  return names;
}

json Read(const std::string& name) {
  std::ifstream file(std::string(PENSTOCK_GOLDEN) + "/" + name + ".json");
  return json::parse(file, nullptr, /*allow_exceptions=*/false);
}

class TextGoldenTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    golden_ = Read("text/" + GetParam());
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
  const std::set<std::string> published = {"gpt2",     "llama3",       "qwen2",          "o200k",  "smollm",
                                           "deepseek", "deepseek_llm", "spaces_at_ends", "llama2", "mistral"};
  EXPECT_EQ(Encoder(*tokenizer_).streams(), published.contains(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Forms, TextGoldenTest, testing::ValuesIn(NamesIn(PENSTOCK_GOLDEN "/text")),
                         [](const auto& form) { return form.param; });

// tokenizer.json with other files beside it, against transformers.
class ConfigGoldenTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "penstock-config-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    directory_ = name;
    golden_ = Read("text_config/" + GetParam());
    ASSERT_TRUE(golden_.is_object());
    Write("tokenizer", Read("text/" + golden_["base"].get<std::string>())["tokenizer"]);
    // In the order of their keys.
    std::ifstream file(std::string(PENSTOCK_GOLDEN) + "/text_config/" + GetParam() + ".json");
    const auto ordered = nlohmann::ordered_json::parse(file, nullptr, /*allow_exceptions=*/false);
    for (const auto& [stem, content] : ordered["files"].items()) Write(stem, content);
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }
  template <typename Json>
  void Write(const std::string& stem, const Json& content) {
    std::ofstream(directory_ / (stem + ".json")) << content.dump();
  }

  std::filesystem::path directory_;
  json golden_;
};

TEST_P(ConfigGoldenTest, TokensThatOnlyTheFilesBesideItNameHaveTheIdsThatTransformersGivesThem) {
  const auto opened = Tokenizer::Open(directory_.string());
  ASSERT_TRUE(opened.ok()) << opened.status();
  const Tokenizer& tokenizer = **opened;
  EXPECT_EQ(tokenizer.vocab_size(), golden_["length"].get<int32_t>());
  for (const json& c : golden_["cases"]) {
    const std::string text = c["in"];
    const auto ids = c["ids"].get<std::vector<int32_t>>();
    EXPECT_EQ(tokenizer.Encode(text).value_or(std::vector<int32_t>{}), ids) << text;
    EXPECT_EQ(tokenizer.Encode(text, {.add_special_tokens = false}).value_or(std::vector<int32_t>{}),
              c["plain"].get<std::vector<int32_t>>())
        << text;
    EXPECT_EQ(tokenizer.Decode(ids), c["text"].get<std::string>());
    EXPECT_EQ(tokenizer.Decode(ids, /*skip_special_tokens=*/false), c["shown"].get<std::string>());
  }
  const SpecialIds& special = tokenizer.special_ids();
  const json& named = golden_["special"];
  const auto id = [&](const char* key) {
    return named[key].is_null() ? std::nullopt : std::optional<int32_t>(named[key].get<int32_t>());
  };
  EXPECT_EQ(special.bos, id("bos"));
  EXPECT_EQ(special.pad, id("pad"));
  EXPECT_EQ(special.unk, id("unk"));
  EXPECT_EQ(special.eos.empty() ? std::nullopt : std::optional<int32_t>(special.eos.front()), id("eos"));
}

INSTANTIATE_TEST_SUITE_P(Files, ConfigGoldenTest, testing::ValuesIn(NamesIn(PENSTOCK_GOLDEN "/text_config")),
                         [](const auto& files) { return files.param; });

}  // namespace
}  // namespace penstock::text::golden_test
