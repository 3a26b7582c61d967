// Lines of JSONL as tokens, and which of them are learned.
#include "text/example.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "tests/text/byte_tokenizer.h"

namespace penstock::text::example_test {
namespace {

using testing::HasSubstr;

class ExampleTest : public testing::Test {
 protected:
  // With "</s>" as the end of a text, as tokenizer_config.json says it.
  explicit ExampleTest(std::vector<std::string> specials = {"<s>", "</s>", "<|im_start|>", "<|im_end|>",
                                                            "<|begin_of_text|>", "<|start_header_id|>",
                                                            "<|end_header_id|>", "<|eot_id|>"}) {
    std::string name = (std::filesystem::current_path() / "example_test.XXXXXX").string();
    directory_ = ::mkdtemp(name.data());
    std::ofstream(directory_ + "/tokenizer.json") << ByteTokenizer(specials);
    std::ofstream(directory_ + "/tokenizer_config.json") << R"({"eos_token": "</s>"})";
    auto tokenizer = Tokenizer::Open(directory_);
    EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
    tokenizer_ = *std::move(tokenizer);
  }
  ~ExampleTest() override { std::filesystem::remove_all(directory_); }

  // The text of the tokens, those that are learned in brackets.
  std::string Shown(const absl::StatusOr<Example>& example) const {
    if (!example.ok()) return std::string(example.status().message());
    EXPECT_EQ(example->ids.size(), example->learned.size());
    std::string text;
    bool inside = false;
    for (size_t i = 0; i < example->ids.size(); ++i) {
      if (example->learned[i] != inside) text += inside ? "]" : "[";
      inside = example->learned[i];
      const int32_t id = example->ids[i];
      text += tokenizer_->Decode({&id, 1}, /*skip_special_tokens=*/false);
    }
    return inside ? text + "]" : text;
  }
  std::string Line(const std::string& line, std::optional<ChatTemplate> chat = std::nullopt) const {
    return Shown(ExampleOfLine(line, *tokenizer_, chat));
  }

  std::string directory_;
  std::unique_ptr<Tokenizer> tokenizer_;
};

TEST_F(ExampleTest, ATextIsLearnedWholeAndEnds) {
  EXPECT_EQ(Line(R"({"text": "abba", "source": 7})"), "[abba</s>]");
  EXPECT_EQ(Line(R"({"text": "abba</s>"})"), "[abba</s>]");  // ends already
  EXPECT_EQ(Line(R"({"text": ""})"), "[</s>]");
}

TEST_F(ExampleTest, OfAPromptTheCompletionIsLearned) {
  EXPECT_EQ(Line(R"({"prompt": "Say it: ", "completion": "yes"})"), "Say it: [yes</s>]");
  EXPECT_EQ(Line(R"({"prompt": "", "completion": "yes"})"), "[yes</s>]");
  EXPECT_EQ(Line(R"({"prompt": "yes", "completion": ""})"), "yes[</s>]");
  // "a" + "b" is one token: what has characters of both is the completion's.
  EXPECT_EQ(Line(R"({"prompt": "xa", "completion": "bx"})"), "x[abx</s>]");
}

TEST_F(ExampleTest, APromptIsNotLearnedWhereItsEndIsCutOtherwise) {
  // Alone the prompt ends in one token, "\n\n" or spaces; before a word the pattern cuts off the last of
  // them.
  nlohmann::json description = nlohmann::json::parse(ByteTokenizer({}));
  description["pre_tokenizer"]["use_regex"] = true;
  description["model"]["vocab"]["ĊĊ"] = 258;
  description["model"]["vocab"]["ĠĠ"] = 259;
  description["model"]["merges"].push_back("Ċ Ċ");
  description["model"]["merges"].push_back("Ġ Ġ");
  const auto tokenizer = Tokenizer::Parse(description.dump());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const auto learned = [&](const char* line) {
    const auto example = ExampleOfLine(line, **tokenizer, std::nullopt);
    EXPECT_TRUE(example.ok()) << example.status();
    std::vector<int32_t> ids;
    for (size_t i = 0; i < example->ids.size(); ++i)
      if (example->learned[i]) ids.push_back(example->ids[i]);
    return (*tokenizer)->Decode(ids);
  };
  EXPECT_EQ(learned(R"({"prompt": "Q:\n\n", "completion": "answer"})"), "answer");
  EXPECT_EQ(learned(R"({"prompt": "Q:  ", "completion": "xyz"})"), "xyz");
  EXPECT_EQ(learned(R"({"prompt": "Größe: ", "completion": "€"})"), "€");
}

TEST_F(ExampleTest, ALongTalkTakesTimeInProportion) {
  nlohmann::json messages = nlohmann::json::array();
  for (int i = 0; i < 20'000; ++i) {
    messages.push_back({{"role", "user"}, {"content", "count"}});
    messages.push_back({{"role", "assistant"}, {"content", "abab"}});
  }
  const auto example =
      ExampleOfLine(nlohmann::json{{"messages", messages}}.dump(), *tokenizer_, ChatTemplate::kChatMl);
  ASSERT_TRUE(example.ok()) << example.status();
  EXPECT_EQ(std::count(example->learned.begin(), example->learned.end(), true), 20'000 * 3);
}

TEST_F(ExampleTest, OfMessagesTheAssistantIsLearned) {
  const std::string line = R"({"messages": [
      {"role": "system", "content": " Be kind."}, {"role": "user", "content": "Hi"},
      {"role": "assistant", "content": " Hello! "}, {"role": "user", "content": "Bye\n"},
      {"role": "assistant", "content": "c"}]})";
  EXPECT_EQ(Line(line, ChatTemplate::kChatMl),
            "<|im_start|>system\n Be kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\n[ Hello! <|im_end|>]\n<|im_start|>user\nBye\n<|im_end|>\n"
            "<|im_start|>assistant[\nc<|im_end|>]\n");  // "\nc" is one token
  EXPECT_EQ(Line(line, ChatTemplate::kLlama3),
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n[Hello!<|eot_id|>]"
            "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n[\nc<|eot_id|>]");
  EXPECT_EQ(
      Line(line, ChatTemplate::kLlama2),
      "<s>[INST] <<SYS>>\n Be kind.\n<</SYS>>\n\nHi [/INST][ Hello! </s>]<s>[INST] Bye [/INST][ c </s>]");
}

TEST_F(ExampleTest, AlpacasExamplesStandInTheWordsThatAlpacaWasTrainedWith) {
  EXPECT_EQ(
      Line(R"({"instruction": "Add.", "input": "1, 2", "output": "3"})"),
      "Below is an instruction that describes a task, paired with an input that provides further context. "
      "Write a response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### "
      "Input:\n1, 2\n\n### Response:[3</s>]");
  for (const char* const line : {R"({"instruction": "Say it.", "input": "", "output": "yes"})",
                                 R"({"instruction": "Say it.", "input": null, "output": "yes"})",
                                 R"({"instruction": "Say it.", "output": "yes", "history": []})"}) {
    EXPECT_EQ(
        Line(line),
        "Below is an instruction that describes a task. Write a response that appropriately completes the "
        "request.\n\n### Instruction:\nSay it.\n\n### Response:[yes</s>]");
  }
  EXPECT_EQ(Line(R"({"system": "S", "instruction": "Add.", "input": "1, 2", "output": "3"})",
                 ChatTemplate::kChatMl),
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nAdd.\n1, 2<|im_end|>\n"
            "<|im_start|>assistant\n[3<|im_end|>]\n");
}

TEST_F(ExampleTest, ShareGptsConversationsAreMessages) {
  const std::string expected = Line(R"({"messages": [{"role": "system", "content": "S"},
      {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]})",
                                    ChatTemplate::kChatMl);
  EXPECT_THAT(expected, HasSubstr("assistant\n[Hello<|im_end|>]"));
  for (
      const char* const line :
      {R"({"id": 7, "conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "Hi"},
            {"from": "gpt", "value": "Hello"}]})",
       R"({"system": "S", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]})",
       R"({"conversations": [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"}]})"}) {
    EXPECT_EQ(Line(line, ChatTemplate::kChatMl), expected);
  }
  EXPECT_THAT(Line(R"({"conversations": [{"from": "human", "value": "Hi"}]})"), HasSubstr("need a template"));
  EXPECT_THAT(Line(R"({"conversations": [{"from": "tool", "value": "Hi"}]})", ChatTemplate::kChatMl),
              HasSubstr("conversations[0] is of role \"tool\""));
}

TEST_F(ExampleTest, WhatIsWrongWithALineIsNamed) {
  const std::pair<const char*, const char*> wrong[] = {
      {"{", "the JSON is malformed at byte 2"},
      {"[1]", "no object"},
      {R"({"txt": "x"})", "none of text, prompt and completion, messages"},
      {R"({"text": 7})", "text is no text"},
      {R"({"prompt": "x"})", "no completion"},
      {R"({"completion": "x"})", "no prompt"},
      {R"({"prompt": ["x"], "completion": "x"})", "prompt is no text"},
      {R"({"messages": []})", "not a list of messages"},
      {R"({"messages": [{"role": "user"}]})", "messages[0] has no content"},
      {R"({"messages": [{"role": "tool", "content": "x"}]})", "messages[0] is of role \"tool\""},
      {R"({"messages": [{"role": "user", "content": "x"}]})", "nothing to learn"},
      {"{\"text\": \"\xFF\"}", "the JSON is malformed at byte 11"},
  };
  for (const auto& [line, text] : wrong) {
    const auto example = ExampleOfLine(line, *tokenizer_, ChatTemplate::kChatMl);
    EXPECT_TRUE(absl::IsInvalidArgument(example.status())) << line;
    EXPECT_THAT(example.status().message(), HasSubstr(text)) << line;
  }
  EXPECT_THAT(Line(R"({"messages": [{"role": "assistant", "content": "x"}]})"), HasSubstr("`chat_template`"));
  EXPECT_THAT(Line(R"({"messages": [{"role": "assistant", "content": "x"}]})", ChatTemplate::kLlama2),
              HasSubstr("user and assistant in turns"));
}

TEST_F(ExampleTest, ATemplateNeedsItsTokens) {
  for (const ChatTemplate chat : {ChatTemplate::kChatMl, ChatTemplate::kLlama3, ChatTemplate::kLlama2})
    EXPECT_TRUE(CheckChatTemplate(chat, *tokenizer_).ok());
  const auto plain = Tokenizer::Parse(ByteTokenizer({"<|im_start|>"}));
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_THAT(CheckChatTemplate(ChatTemplate::kChatMl, **plain).message(), HasSubstr("<|im_end|>"));
  EXPECT_EQ(ParseChatTemplate("chatml"), ChatTemplate::kChatMl);
  EXPECT_EQ(ParseChatTemplate("jinja"), std::nullopt);
}

}  // namespace
}  // namespace penstock::text::example_test
