// Training on text that a tokenizer reads: prompts and messages in lines of JSON, going on without the flags,
// and text from what was learned.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/text/byte_tokenizer.h"
#include "tests/tools/penstock_program.h"

namespace penstock::tools::penstock_text_test {
namespace {

using testing::HasSubstr;
using testing::Not;
using testing_support::Arguments;
using testing_support::Lines;
using testing_support::ProgramTest;
using testing_support::Ran;
using testing_support::ReadFile;
using testing_support::WriteFile;
using testing_support::operator+;

class PenstockTextTest : public ProgramTest {
 protected:
  PenstockTextTest() {
    model_ = dir_ + "/model";
    std::filesystem::create_directory(model_);
    WriteFile(model_ + "/tokenizer.json", text::ByteTokenizer({"</s>", "<|im_start|>", "<|im_end|>"}));
    WriteFile(model_ + "/tokenizer_config.json", R"({"eos_token": "</s>"})");
    WriteFile(
        dir_ + "/config.json",
        R"({"model_type": "gpt2", "vocab_size": 264, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32})");
    std::string lines;
    for (int i = 0; i < 40; ++i) {
      lines += nlohmann::json{{"prompt", "count: "}, {"completion", "abcabc"}}.dump() + "\n";
      lines += nlohmann::json{{"messages",
                               {{{"role", "user"}, {"content", "count"}},
                                {{"role", "assistant"}, {"content", "abcabc"}}}}}
                   .dump() +
               "\n";
    }
    data_ = dir_ + "/prompts.jsonl";
    WriteFile(data_, lines);
  }
  Arguments Flags(const std::string& state, const Arguments& more = {}) const {
    return Arguments{"train",  "--model", dir_ + "/config.json", "--dtype",  "fp32",  "--threads", "1",
                     "--data", data_,     "--state-dir",         state,      "--seq", "32",        "--batch",
                     "4",      "--log",   state + ".log",        "--warmup", "1",     "--lr",      "0.01"} +
           more;
  }
  Arguments Texts() const { return {"--tokenizer", model_, "--chat-template", "chatml"}; }
  static std::string Losses(const std::string& log) {
    std::string losses;
    for (const std::string& line : Lines(ReadFile(log))) {
      const auto entry = nlohmann::json::parse(line, nullptr, false);
      if (entry.contains("loss")) losses += entry["step"].dump() + ":" + entry["loss"].dump() + " ";
    }
    return losses;
  }

  std::string model_, data_;
};

TEST_F(PenstockTextTest, PromptsAreLearnedAndSpoken) {
  const Ran trained = Run(Flags("whole", Texts() + Arguments{"--steps", "60", "--eval-data", data_}));
  ASSERT_EQ(trained.code, 0) << trained.err << trained.out;
  EXPECT_THAT(trained.out, HasSubstr("of them learned"));
  // What is not learned counts in no loss: what is left is known by heart.
  double evaluated = 1;
  for (const std::string& line : Lines(ReadFile(dir_ + "/whole.log"))) {
    const auto entry = nlohmann::json::parse(line);
    if (entry.contains("windows")) evaluated = entry.value("loss", 1.0);
  }
  EXPECT_LT(evaluated, 0.05);
  const Ran sampled = Run({"sample", "whole", "--prompt", "count: ", "--temperature", "0", "--tokens", "5"});
  ASSERT_EQ(sampled.code, 0) << sampled.err;
  EXPECT_THAT(sampled.out, HasSubstr("count: abcabc"));

  // Stopped somewhere, and going on without a word about tokens: the same losses.
  testing_support::Program stopped(
      dir_, Flags("parts", Texts() + Arguments{"--steps", "60", "--eval-data", data_}));
  EXPECT_TRUE(WaitForLines(dir_ + "/parts.log", 10));
  stopped.Signal(SIGTERM);
  stopped.Wait();
  const Ran resumed = Run(Flags("parts", {"--steps", "60", "--resume", "--eval-data", data_}));
  ASSERT_EQ(resumed.code, 0) << resumed.err << resumed.out;
  EXPECT_EQ(Losses(dir_ + "/whole.log"), Losses(dir_ + "/parts.log"));

  // The tokenizer is part of the run.
  WriteFile(model_ + "/tokenizer_config.json", R"({"eos_token": "<|im_end|>"})");
  const Ran other = Run(Flags("parts", {"--steps", "61", "--resume"}));
  EXPECT_NE(other.code, 0);
  EXPECT_THAT(other.err, HasSubstr("another tokenizer"));
  std::filesystem::remove_all(model_);
  const Ran gone = Run({"sample", "whole", "--prompt", "1 2", "--temperature", "0", "--tokens", "2"});
  EXPECT_EQ(gone.code, 0) << gone.err;
  EXPECT_THAT(gone.err, HasSubstr("--tokenizer"));
}

// Weights and what is held out belong to the run: it goes on with them when nothing is said.
TEST_F(PenstockTextTest, SeveralTextsAreMixedAndTheirEndsHeldOut) {
  WriteFile(dir_ + "/more.jsonl", nlohmann::json{{"text", std::string(2000, 'z')}}.dump() + "\n");
  const Arguments texts = Texts() + Arguments{"--data", dir_ + "/more.jsonl", "--eval-every", "4"};
  const Arguments mixed = texts + Arguments{"--data-weights", "3,1", "--eval-split", "0.2"};
  const Ran whole = Run(Flags(dir_ + "/whole", mixed) + Arguments{"--steps", "8"});
  ASSERT_EQ(whole.code, 0) << whole.err;
  EXPECT_THAT(whole.out, HasSubstr("prompts.jsonl: 750 of every 1000 sequences"));
  EXPECT_THAT(whole.out, HasSubstr("more.jsonl: 250 of every 1000 sequences"));
  ASSERT_EQ(Run(Flags(dir_ + "/cut", mixed) + Arguments{"--steps", "4", "--quiet"}).code, 0);
  const Ran on = Run(Flags(dir_ + "/cut", texts) + Arguments{"--steps", "8", "--resume"});
  ASSERT_EQ(on.code, 0) << on.err;
  EXPECT_THAT(on.out + on.err, Not(HasSubstr("changed from step")));
  EXPECT_EQ(Losses(dir_ + "/cut.log").substr(0, 30), Losses(dir_ + "/whole.log").substr(0, 30));
  EXPECT_EQ(Lines(ReadFile(dir_ + "/whole.log")).size(), 10u) << "8 steps and 2 evaluations";
  // Other weights are another text from then on, and said.
  const Ran other =
      Run(Flags(dir_ + "/cut", texts) + Arguments{"--steps", "9", "--resume", "--data-weights", "1,1"});
  ASSERT_EQ(other.code, 0) << other.err;
  EXPECT_THAT(other.err, HasSubstr("the text: another one"));
  for (const auto& [flags, line] : std::vector<std::pair<Arguments, std::string>>{
           {{"--data-weights", "1"}, "--data-weights has 1 numbers for 2 --data"},
           {{"--data-weights", "1,-1"}, "a weight is above 0"},
           {{"--eval-split", "1"}, "--eval-split 1: a share below 1"},
           {{"--eval-split", "0.1", "--eval-data", data_}, "one or the other"}}) {
    const Ran refused = Run(Flags(dir_ + "/refused", texts) + flags);
    EXPECT_EQ(refused.code, 2);
    EXPECT_THAT(refused.err, HasSubstr(line));
    EXPECT_EQ(Lines(refused.err).size(), 1u);
  }
}

// One array of JSON learns what the same records in lines do, whatever the file is called.
TEST_F(PenstockTextTest, TheFormOfDataIsToldByWhatIsInIt) {
  std::string array, lines;
  for (int i = 0; i < 40; ++i) {
    const std::string record =
        nlohmann::json{{"instruction", "count"}, {"input", ""}, {"output", "abc, [abc] \"{\""}}.dump();
    lines += record + "\n";
    array += (i == 0 ? "[\n  " : ",\n  ") + record;
  }
  WriteFile(dir_ + "/alpaca.txt", lines);
  WriteFile(dir_ + "/alpaca.json", array + "\n]\n");
  WriteFile(
      dir_ + "/long.json",
      R"({"model_type": "gpt2", "vocab_size": 264, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 256})");
  std::vector<std::string> losses;
  for (const char* const name : {"/alpaca.txt", "/alpaca.json"}) {
    data_ = dir_ + name;
    const Ran ran = Run({"train",
                         "--model",
                         dir_ + "/long.json",
                         "--dtype",
                         "fp32",
                         "--threads",
                         "1",
                         "--data",
                         data_,
                         "--state-dir",
                         data_ + ".state",
                         "--seq",
                         "256",
                         "--batch",
                         "4",
                         "--log",
                         data_ + ".log",
                         "--tokenizer",
                         model_,
                         "--steps",
                         "3",
                         "--eval-data",
                         dir_ + "/alpaca.json",
                         "--eval-every",
                         "3"});
    EXPECT_EQ(ran.code, 0) << ran.err;
    losses.push_back(Losses(data_ + ".log"));
    EXPECT_THAT(losses.back(), HasSubstr("3:"));
  }
  EXPECT_EQ(losses[0], losses[1]);
  // Bytes are no examples: nothing is made.
  const Ran bytes = Run({"train", "--data", data_, "--state-dir", dir_ + "/bytes"});
  EXPECT_EQ(bytes.code, 2);
  EXPECT_THAT(bytes.err, HasSubstr("alpaca.json has texts in an array of JSON"));
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/bytes"));
}

TEST_F(PenstockTextTest, DataOfAnotherFormatIsNamedBeforeAnythingIsMade) {
  const std::pair<const char*, std::string> files[] = {
      {"git lfs pull", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"},
      {"read_parquet", "PAR1" + std::string(64, '\x01')},
      {"gunzip -k", std::string("\x1f\x8b\x08\x00", 4)},
      {"zstd -d", "\x28\xb5\x2f\xfd"},
      {"numpy.load", "\x93NUMPY"},
      {"pickle.load(open('", std::string("\x80\x04\x95", 3)},
      {"Dataset.from_file", std::string("\xff\xff\xff\xff\xc8\x01\x00\x00\x10\x00\x00\x00", 12)},
  };
  for (const auto& [says, content] : files) {
    for (const char* const flag : {"--data", "--eval-data"}) {
      const std::string path = dir_ + "/strange.jsonl";
      WriteFile(path, content);
      const Ran ran = Run(Flags(dir_ + "/none", Texts() + Arguments{flag, path}));
      EXPECT_EQ(ran.code, 2) << says;
      EXPECT_THAT(ran.err, HasSubstr(says));
      EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
      EXPECT_FALSE(std::filesystem::exists(dir_ + "/none"));
    }
  }
  WriteFile(dir_ + "/data.csv", "text,label\na,1\n");
  EXPECT_THAT(Run(Flags("a", Texts() + Arguments{"--data", dir_ + "/data.csv"})).err,
              HasSubstr("csv.DictReader"));
  WriteFile(dir_ + "/tokens.bin", "version https://git-lfs.github.com/spec/v1\n");
  EXPECT_THAT(Run(Flags("a", Texts() + Arguments{"--data", dir_ + "/tokens.bin"})).err,
              HasSubstr("git lfs pull"));
  WriteFile(dir_ + "/one.json", "{\n \"data\": [{\"text\": \"a\"}]\n}\n");
  EXPECT_THAT(Run(Flags("a", Texts() + Arguments{"--data", dir_ + "/one.json"})).err,
              HasSubstr("is one object of JSON"));
}

TEST_F(PenstockTextTest, ATokenThatTheModelHasNoRowForIsNamedAndOthersAreLearned) {
  WriteFile(model_ + "/tokenizer_config.json", R"({"eos_token": "</s>", "pad_token": "[PAD]"})");
  WriteFile(
      dir_ + "/config.json",
      R"({"model_type": "gpt2", "vocab_size": 261, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32})");
  Ran ran = Run(Flags(dir_ + "/right", Texts() + Arguments{"--steps", "1"}));
  EXPECT_EQ(ran.code, 0) << ran.err;
  WriteFile(data_, ReadFile(data_) + "{\"text\": \"a[PAD]\"}\n");
  ran = Run(Flags(dir_ + "/wrong", Texts() + Arguments{"--steps", "1"}));
  EXPECT_NE(ran.code, 0);
  EXPECT_THAT(ran.err, HasSubstr("line 81: the token [PAD] has the id 261, and the model has rows for 261"));
}

TEST_F(PenstockTextTest, WhatIsWrongIsSaid) {
  Ran ran = Run(Flags("a"));
  EXPECT_NE(ran.code, 0);
  EXPECT_THAT(ran.err, HasSubstr("--tokenizer DIR"));
  ran = Run(Flags("a", {"--tokenizer", model_}));
  EXPECT_NE(ran.code, 0);
  EXPECT_THAT(ran.err, HasSubstr("prompts.jsonl: line 2: messages need a template"));
  ran = Run(Flags("a", {"--tokenizer", model_, "--chat-template", "jinja"}));
  EXPECT_THAT(ran.err, HasSubstr("must be chatml, llama3 or llama2"));
  ran = Run(Flags("a", {"--tokenizer", model_, "--chat-template", "llama3"}));
  EXPECT_THAT(ran.err, HasSubstr("<|begin_of_text|>"));
  ran = Run(Flags("a", {"--tokenizer", dir_ + "/none"}));
  EXPECT_NE(ran.code, 0);
  EXPECT_THAT(ran.err, HasSubstr(dir_ + "/none"));
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/a"));
  // A model whose tokenizer is of another form: no text is learned as bytes.
  const std::string other = dir_ + "/other";
  std::filesystem::create_directory(other);
  WriteFile(other + "/config.json", ReadFile(dir_ + "/config.json"));
  WriteFile(other + "/tokenizer.model", "model");
  WriteFile(dir_ + "/words.txt", std::string(4000, 'a'));
  ran = Run({"train", "--model", other, "--data", dir_ + "/words.txt", "--state-dir", dir_ + "/a"});
  EXPECT_EQ(ran.code, 2);
  EXPECT_THAT(ran.err, HasSubstr("has tokenizer.model and no tokenizer.json: transformers makes one"));
  EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/a"));
  // Lines that cannot be used, with --quiet too.
  WriteFile(data_, ReadFile(data_) + "{\"text\": 1}\n");
  ran = Run(Flags("a", Texts() + Arguments{"--steps", "1", "--skip-broken-lines", "--quiet"}));
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.out + ran.err,
              HasSubstr("1 line or element passed over that cannot be used, the first is number 81"));
  // A model of fewer tokens.
  WriteFile(
      dir_ + "/config.json",
      R"({"model_type": "gpt2", "vocab_size": 200, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32})");
  ran = Run(Flags("b", Texts()));
  EXPECT_NE(ran.code, 0);
  EXPECT_THAT(ran.err, HasSubstr("they do not belong together"));
}

}  // namespace
}  // namespace penstock::tools::penstock_text_test
