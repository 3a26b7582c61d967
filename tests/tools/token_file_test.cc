// Tokens beside a data file: made once, whole or not at all; and the rows that training sees of them.
#include "models/data/token_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "kernels/checksum.h"
#include "models/data/dataset.h"
#include "tests/text/byte_tokenizer.h"

namespace penstock::models::token_file_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class TokenFileTest : public testing::Test {
 protected:
  TokenFileTest() {
    std::string name = (std::filesystem::current_path() / "token_file_test.XXXXXX").string();
    directory_ = ::mkdtemp(name.data());
    Write("tokenizer.json", text::ByteTokenizer({"</s>", "<|im_start|>", "<|im_end|>"}));
    Write("tokenizer_config.json", R"({"eos_token": "</s>"})");
    tokenizer_ = *text::Tokenizer::Open(directory_);
  }
  ~TokenFileTest() override { std::filesystem::remove_all(directory_); }

  std::string Write(const std::string& name, const std::string& content) {
    const std::string path = directory_ + "/" + name;
    std::ofstream(path, std::ios::binary) << content;
    return path;
  }
  absl::StatusOr<TokenFile> Make(const std::string& path, const TokenFileOptions& options = {}) {
    return MakeTokenFile(path, *tokenizer_, directory_, options);
  }
  std::set<std::string> Files() const {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(directory_))
      names.insert(entry.path().filename().string());
    return names;
  }
  static std::vector<uint16_t> TokensIn(const TokenFile& file) {
    std::vector<uint16_t> tokens(static_cast<size_t>(file.tokens));
    std::ifstream in(file.tokens_path, std::ios::binary);
    in.read(reinterpret_cast<char*>(tokens.data()), static_cast<std::streamsize>(tokens.size() * 2));
    EXPECT_TRUE(in.good() && in.peek() == EOF);
    return tokens;
  }
  // "tokens|targets" of a row: characters, "." for padding and for what is not learned, "$" for the end.
  static std::string Shown(const std::vector<int64_t>& tokens, const std::vector<int64_t>& targets) {
    const auto shown = [](const std::vector<int64_t>& ids) {
      std::string text;
      for (const int64_t id : ids)
        text += id <= 0 ? '.' : id == text::kFirstSpecialId ? '$' : static_cast<char>(id);
      return text;
    };
    return shown(tokens) + "|" + shown(targets);
  }
  static std::vector<std::string> Rows(const Dataset& data) {
    std::vector<std::string> rows;
    for (int64_t w = 0; w < data.EvalWindows(); ++w) {
      std::vector<int64_t> tokens(static_cast<size_t>(data.seq())), targets = tokens;
      EXPECT_TRUE(data.FillEval(w, 1, tokens.data(), targets.data()).ok());
      rows.push_back(Shown(tokens, targets));
    }
    return rows;
  }

  std::string directory_;
  std::unique_ptr<text::Tokenizer> tokenizer_;
};

TEST_F(TokenFileTest, ATextIsOneStreamOfTokens) {
  const std::string path = Write("data.txt", "abba");
  const auto file = Make(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_THAT(TokensIn(*file), ElementsAre(256, 'b', 'a', text::kFirstSpecialId));
  EXPECT_EQ(file->examples, 1);
  EXPECT_TRUE(file->is_stream());
  EXPECT_FALSE(file->was_there);
  const auto data = Dataset::OpenExamples(*file, 300, 3);
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ((*data)->rows(), 0);
  EXPECT_EQ((*data)->EvalWindows(), 1);
}

TEST_F(TokenFileTest, EveryFileOfTheTokenizerDecidesWhetherTokensAreTheSame) {
  std::set<uint64_t> digests = {*TokenizerDigest(directory_)};
  size_t files = 1;
  for (const char* const name :
       {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json"}) {
    Write(name, "{}");
    digests.insert(*TokenizerDigest(directory_));
    EXPECT_EQ(digests.size(), ++files) << name;
  }
}

TEST_F(TokenFileTest, ATextThatComesInManyPiecesIsOneText) {
  std::string content;
  std::minstd_rand random(3);
  while (content.size() < (9 << 20)) content += static_cast<char>("ab \ncé"[random() % 6]);
  content.erase(std::remove(content.begin(), content.end(), '\xC3'), content.end());
  content.erase(std::remove(content.begin(), content.end(), '\xA9'), content.end());
  const auto file = Make(Write("data.txt", content));
  ASSERT_TRUE(file.ok()) << file.status();
  const auto ids = tokenizer_->Encode(content);
  ASSERT_TRUE(ids.ok());
  const std::vector<uint16_t> tokens = TokensIn(*file);
  ASSERT_EQ(tokens.size(), ids->size() + 1);
  EXPECT_TRUE(std::equal(ids->begin(), ids->end(), tokens.begin()));
}

TEST_F(TokenFileTest, WhatIsThereIsTakenAndAnotherTextIsNot) {
  const std::string path = Write("data.txt", "one");
  ASSERT_FALSE(Make(path)->was_there);
  EXPECT_TRUE(Make(path)->was_there);
  EXPECT_EQ(Files().size(), 5U);  // two of the tokenizer, the text, its pair
  Write("data.txt", "two");
  const auto other = Make(path);
  EXPECT_FALSE(other->was_there);
  EXPECT_THAT(TokensIn(*other), ElementsAre('t', 'w', 'o', text::kFirstSpecialId));
  // Another tokenizer, other words of the same one.
  Write("tokenizer_config.json", R"({"eos_token": "<|im_end|>"})");
  tokenizer_ = *text::Tokenizer::Open(directory_);
  EXPECT_THAT(TokensIn(*Make(path)), ElementsAre('t', 'w', 'o', text::kFirstSpecialId + 2));
  TokenFileOptions options;
  options.skip_broken = true;
  EXPECT_FALSE(Make(path, options)->was_there);
}

TEST_F(TokenFileTest, APairThatIsNotWholeIsMadeAnew) {
  const std::string path = Write("data.jsonl", "{\"prompt\": \"x\", \"completion\": \"y\"}\n");
  const auto file = Make(path);
  ASSERT_TRUE(file.ok()) << file.status();
  const std::vector<uint16_t> tokens = TokensIn(*file);
  const auto bytes = std::filesystem::file_size(file->examples_path);
  for (size_t cut = 0; cut < bytes; ++cut) {
    std::filesystem::resize_file(file->examples_path, cut);
    const auto again = Make(path);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_FALSE(again->was_there) << cut;
    EXPECT_EQ(TokensIn(*again), tokens);
  }
  for (size_t flipped = 0; flipped < bytes; ++flipped) {
    std::fstream damaged(file->examples_path, std::ios::in | std::ios::out | std::ios::binary);
    damaged.seekg(static_cast<std::streamoff>(flipped));
    const char byte = static_cast<char>(damaged.get() ^ 4);
    damaged.seekp(static_cast<std::streamoff>(flipped));
    damaged.put(byte);
    damaged.close();
    EXPECT_FALSE(Make(path)->was_there) << flipped;
  }
  std::filesystem::resize_file(file->tokens_path, 2);
  EXPECT_FALSE(Make(path)->was_there);
  EXPECT_EQ(TokensIn(*Make(path)), tokens);
}

TEST_F(TokenFileTest, RowsHaveWholeExamplesAndPadding) {
  const auto file = Make(Write("data.jsonl",
                               "{\"prompt\": \"p\", \"completion\": \"xy\"}\n\n"
                               "{\"prompt\": \"q\", \"completion\": \"z\"}\r\n"
                               "{\"text\": \"stu\"}\n"
                               "{\"prompt\": \"01234567\", \"completion\": \"8\"}\n"
                               "{\"prompt\": \"r\", \"completion\": \"1234567890\"}"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->examples, 5);
  EXPECT_FALSE(file->is_stream());
  const auto data = Dataset::OpenExamples(*file, 300, 7);
  ASSERT_TRUE(data.ok()) << data.status();
  // Eight tokens a row. The first two examples are 4 and 3 tokens; the fourth learns nothing among its
  // first 8.
  EXPECT_THAT(Rows(**data), ElementsAre("pxy$qz$|xy$.z$.", "stu$...|tu$....", "r123456|1234567"));
  EXPECT_EQ((*data)->cut_examples(), 2);
}

TEST_F(TokenFileTest, EveryRowComesOnceAnEpochWhateverTheCut) {
  std::string lines;
  for (int i = 0; i < 23; ++i)
    lines +=
        "{\"prompt\": \"" + std::string(1, static_cast<char>('a' + i)) + "\", \"completion\": \"xyz\"}\n";
  const auto file = Make(Write("data.jsonl", lines));
  const auto data = *Dataset::OpenExamples(*file, 300, 6);
  ASSERT_EQ(data->rows(), 23);
  // Steps of 6 rows: as one rank's, as three ranks' with a batch of 2, as two micro-batches of 3.
  const auto step = [&](int64_t number, int64_t micro_batches, int64_t world, int64_t batch) {
    std::vector<std::string> rows;
    for (int64_t m = 0; m < micro_batches; ++m) {
      for (int64_t rank = 0; rank < world; ++rank) {
        std::vector<int64_t> tokens(static_cast<size_t>(6 * batch)), targets = tokens;
        const BatchPlace place = {number, m, rank, world, micro_batches * world * batch};
        EXPECT_TRUE(data->Fill(place, batch, 7, tokens.data(), targets.data()).ok());
        for (int64_t r = 0; r < batch; ++r)
          rows.emplace_back(1, static_cast<char>(tokens[static_cast<size_t>(6 * r)]));
      }
    }
    return rows;
  };
  std::map<std::string, int> seen;
  std::vector<std::string> order;
  for (int64_t s = 1; s <= 23; ++s) {  // six epochs
    EXPECT_EQ(step(s, 1, 1, 6), step(s, 1, 3, 2));
    EXPECT_EQ(step(s, 1, 1, 6), step(s, 2, 1, 3));
    for (const std::string& row : step(s, 1, 1, 6)) {
      ++seen[row];
      order.push_back(row);
    }
  }
  EXPECT_EQ(seen.size(), 23U);
  for (const auto& [row, times] : seen) EXPECT_EQ(times, 6) << row;
  EXPECT_FALSE(
      std::equal(order.begin(), order.begin() + 23, order.begin() + 23));  // each epoch its own order
}

TEST_F(TokenFileTest, AnEpochIsAPermutation) {
  for (int64_t rows = 1; rows < 300; ++rows) {
    std::set<int64_t> seen;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = RowOfEpoch(11, rows % 5, i, rows);
      ASSERT_GE(row, 0);
      ASSERT_LT(row, rows);
      seen.insert(row);
    }
    EXPECT_EQ(static_cast<int64_t>(seen.size()), rows);
  }
}

TEST_F(TokenFileTest, ABrokenLineIsNamedOrPassedOver) {
  const std::string path = Write("data.jsonl", "{\"text\": \"x\"}\n{\"text\": 3}\n{\"text\": \"y\"}\nno\n");
  EXPECT_TRUE(absl::IsInvalidArgument(Make(path).status()));
  EXPECT_THAT(Make(path).status().message(), HasSubstr("data.jsonl: line 2: text is no text"));
  EXPECT_EQ(Files().size(), 3U);  // nothing is left of it
  TokenFileOptions options;
  options.skip_broken = true;
  const auto file = Make(path, options);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->skipped, 2);
  EXPECT_EQ(file->first_skipped_line, 2);
  EXPECT_EQ(file->examples, 2);
  EXPECT_EQ(Make(path, options)->skipped, 2);  // and of the pair that is there
}

TEST_F(TokenFileTest, LongFilesInTheirPlacesAreRefusedWithoutBeingRead) {
  const std::string path = Write("data.jsonl", "{\"prompt\": \"x\", \"completion\": \"y\"}\n");
  const auto file = Make(path);
  ASSERT_TRUE(file.ok()) << file.status();
  std::filesystem::resize_file(file->examples_path, uint64_t{1} << 40);
  EXPECT_FALSE(Make(path)->was_there);
  for (const char* name : {"tokenizer.json", "tokenizer_config.json"}) {
    const auto bytes = std::filesystem::file_size(directory_ + "/" + name);
    std::filesystem::resize_file(directory_ + "/" + name, uint64_t{1} << 40);
    EXPECT_THAT(std::string(TokenizerDigest(directory_).status().message()), HasSubstr(name));
    std::filesystem::resize_file(directory_ + "/" + name, bytes);
  }
  EXPECT_TRUE(TokenizerDigest(directory_).ok());
}

// The checksum is no secret.
TEST_F(TokenFileTest, AForgedHeaderIsMadeAnew) {
  const std::string path = Write("data.jsonl", "{\"prompt\": \"x\", \"completion\": \"y\"}\n");
  const auto file = Make(path);
  ASSERT_TRUE(file.ok()) << file.status();
  std::ifstream in(file->examples_path, std::ios::binary);
  const std::string good(std::istreambuf_iterator<char>(in), {});
  const std::vector<std::function<void(TokenFileHeader*)>> forgeries = {
      [](TokenFileHeader* header) { header->tokens += uint64_t{1} << 63; },  // twice that is 0
      [](TokenFileHeader* header) { header->examples = uint64_t{1} << 61; },
      [](TokenFileHeader* header) { header->examples += 1; },
      [](TokenFileHeader* header) { header->learned = header->tokens; },
      [](TokenFileHeader* header) { header->learned = header->tokens + 1; }};
  for (size_t i = 0; i < forgeries.size(); ++i) {
    TokenFileHeader header;
    std::memcpy(&header, good.data(), sizeof(header));
    header.checksum = 0;
    forgeries[i](&header);
    kernels::Checksummer sum;
    sum.Update(&header, sizeof(header));
    sum.Update(good.data() + sizeof(header), good.size() - sizeof(header));
    header.checksum = sum.Digest();
    std::string forged = good;
    std::memcpy(forged.data(), &header, sizeof(header));
    std::ofstream(file->examples_path, std::ios::binary) << forged;
    const auto again = Make(path);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_FALSE(again->was_there) << i;
    EXPECT_EQ(again->tokens, file->tokens);
    EXPECT_TRUE(Dataset::OpenExamples(*again, 300, 3).ok());
  }
}

TEST_F(TokenFileTest, ALineThatIsLongerThanMemoryAllowsIsNamed) {
  const std::string line = "{\"text\": \"a\"}\n";
  const std::string long_line = "{\"text\": \"" + std::string(3 << 20, 'b') + "\"}";
  const std::string lines = Write("data.jsonl", line + long_line + "\n" + line);
  const std::string array = Write("data.json", "[" + line + "," + long_line + "]");
  EXPECT_TRUE(Make(lines).ok());
  tokenizer_->LimitMemory(uint64_t{64} << 20);
  for (const auto& [path, place] : {std::pair(array, "element 2"), std::pair(lines + "l", "line 2")}) {
    if (path != array) std::filesystem::rename(lines, path);  // without the tokens that were made
    for (const bool skips : {false, true}) {
      TokenFileOptions options;
      options.skip_broken = skips;
      const absl::Status refused = Make(path, options).status();
      EXPECT_FALSE(refused.ok());
      EXPECT_THAT(std::string(refused.message()), HasSubstr(place));
      EXPECT_THAT(std::string(refused.message()), HasSubstr("`host_memory`"));
    }
  }
}

TEST_F(TokenFileTest, WrongFilesAreRefused) {
  EXPECT_THAT(Make(directory_ + "/none.txt").status().message(), HasSubstr("cannot open"));
  EXPECT_THAT(Make(directory_).status().message(), HasSubstr("no regular file"));
  EXPECT_THAT(Make(Write("empty.jsonl", "\n \n")).status().message(), HasSubstr("nothing in it to learn"));
  EXPECT_THAT(Make(Write("broken.txt", "x\xFFy")).status().message(), HasSubstr("broken.txt"));
  TokenFileOptions options;
  options.chat = text::ChatTemplate::kLlama3;
  EXPECT_THAT(Make(Write("x.jsonl", "{}"), options).status().message(), HasSubstr("<|begin_of_text|>"));
  options.chat.reset();
  options.progress = [](double) { return false; };
  EXPECT_TRUE(absl::IsCancelled(Make(Write("text.txt", "text"), options).status()));
}

TEST_F(TokenFileTest, ATextThatChangesMeanwhileIsRefused) {
  const std::string path = Write("data.txt", "old");
  TokenFileOptions options;
  options.progress = [&](double) {
    Write("data.txt", "newer");
    return true;
  };
  EXPECT_TRUE(absl::IsAborted(Make(path, options).status()));
  EXPECT_EQ(Files().size(), 3U);
  EXPECT_EQ(Make(path)->tokens, 6);
}

TEST_F(TokenFileTest, AFullDriveIsAnErrorThatLeavesNothing) {
  const std::string path = Write("data.txt", std::string(1 << 20, 'x'));
  const std::set<std::string> before = Files();
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  rlimit small = limit;
  small.rlim_cur = 64 << 10;
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status status = Make(path).status();
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_EQ(Files(), before);
  EXPECT_TRUE(Make(path).ok());
}

TEST_F(TokenFileTest, ManyAtOnceMakeItOnce) {
  const std::string path = Write("data.txt", std::string(3 << 20, 'y'));
  std::vector<std::thread> threads;
  std::vector<absl::StatusOr<TokenFile>> files(8);
  for (auto& file : files) threads.emplace_back([&] { file = Make(path); });
  for (std::thread& thread : threads) thread.join();
  int made = 0;
  for (const auto& file : files) {
    ASSERT_TRUE(file.ok()) << file.status();
    made += file->was_there ? 0 : 1;
    EXPECT_EQ(file->tokens, (3 << 20) + 1);
  }
  EXPECT_EQ(made, 1);
  EXPECT_EQ(Files().size(), 5U);
}

}  // namespace
}  // namespace penstock::models::token_file_test
