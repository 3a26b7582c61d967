// What golden files do not say: refusals, broken UTF-8, long words, threads, the files beside tokenizer.json.
#include "text/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/hostile_files.h"
#include "tests/text/byte_tokenizer.h"
#include "text/regex.h"
#include "text/utf8.h"

namespace penstock::text::tokenizer_test {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

using Ids = std::vector<int32_t>;

// Characters a to e, a few merges, one special token.
json Small() {
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", json::array({{{"id", 7},
                                         {"content", "<e>"},
                                         {"single_word", false},
                                         {"lstrip", false},
                                         {"rstrip", false},
                                         {"normalized", false},
                                         {"special", true}}})},
          {"normalizer", nullptr},
          {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}},
          {"post_processor", nullptr},
          {"decoder", {{"type", "ByteLevel"}}},
          {"model",
           {{"type", "BPE"},
            {"vocab", {{"a", 0}, {"b", 1}, {"c", 2}, {"ab", 3}, {"abc", 4}, {"aa", 5}, {"aaaa", 6}}},
            {"merges", {"a b", "ab c", "a a", "aa aa"}}}}};
}

std::unique_ptr<Tokenizer> Opened(const json& description) {
  auto tokenizer = Tokenizer::Parse(description.dump());
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

std::string Refusal(const json& description) {
  const auto tokenizer = Tokenizer::Parse(description.dump());
  EXPECT_FALSE(tokenizer.ok());
  EXPECT_TRUE(absl::IsInvalidArgument(tokenizer.status()));
  return std::string(tokenizer.status().message());
}

Ids Encoded(const Tokenizer& tokenizer, std::string_view text) {
  const auto ids = tokenizer.Encode(text);
  EXPECT_TRUE(ids.ok()) << ids.status();
  return ids.value_or(Ids());
}

TEST(TokenizerTest, MergesGoByRankFromLeftToRight) {
  const auto tokenizer = Opened(Small());
  EXPECT_THAT(Encoded(*tokenizer, "abcab"), ElementsAre(4, 3));
  EXPECT_THAT(Encoded(*tokenizer, "aaaaa"), ElementsAre(6, 0));
  EXPECT_THAT(Encoded(*tokenizer, "ab<e>c"), ElementsAre(3, 7, 2));
  EXPECT_EQ(tokenizer->Decode(Ids{4, 7, 3}), "abcab");
  EXPECT_EQ(tokenizer->Decode(Ids{4, 7, 3}, false), "abc<e>ab");
  EXPECT_EQ(tokenizer->Decode(Ids{-1, 4, 99}), "abc");
  EXPECT_EQ(tokenizer->vocab_size(), 8);
  EXPECT_EQ(tokenizer->IdOf("aaaa"), 6);
  EXPECT_EQ(tokenizer->IdOf("x"), std::nullopt);
  EXPECT_EQ(tokenizer->TokenOf(7), "<e>");
  EXPECT_TRUE(tokenizer->IsSpecial(7));
  EXPECT_FALSE(tokenizer->IsSpecial(6));
}

TEST(TokenizerTest, BothSpellingsOfMergesAreRead) {
  json pairs = Small();
  pairs["model"]["merges"] = json::array({{"a", "b"}, {"ab", "c"}, {"a", "a"}, {"aa", "aa"}});
  EXPECT_THAT(Encoded(*Opened(pairs), "abcab"), ElementsAre(4, 3));
}

TEST(TokenizerTest, WhatIsNotServedIsRefusedByName) {
  const auto refusal = [](const std::function<void(json&)>& change) {
    json description = Small();
    change(description);
    return Refusal(description);
  };
  const auto replaced = [&](const char* section, const json& with) {
    return refusal([&](json& d) { d[section] = with; });
  };
  const auto in_model = [&](const char* key, const json& with) {
    return refusal([&](json& d) { d["model"][key] = with; });
  };
  EXPECT_THAT(in_model("type", "Unigram"),
              HasSubstr("model is of type \"Unigram\", which is not served; served are BPE"));
  EXPECT_THAT(in_model("type", "WordPiece"), HasSubstr("WordPiece"));
  EXPECT_THAT(in_model("dropout", 0.1), HasSubstr("model.dropout is not 0"));
  EXPECT_THAT(in_model("end_of_word_suffix", "</w>"), HasSubstr("model.end_of_word_suffix is \"</w>\""));
  EXPECT_THAT(in_model("unk_token", "<unk>"), HasSubstr("model.unk_token is \"<unk>\", which is not in"));
  EXPECT_THAT(in_model("novelty", 1), HasSubstr("model has the key \"novelty\""));
  EXPECT_THAT(in_model("merges", {"a z"}),
              HasSubstr("model.merges[0] is \"a\" and \"z\", and \"z\" is not in"));
  EXPECT_THAT(in_model("merges", {"abc"}), HasSubstr("model.merges[0] is neither"));
  EXPECT_THAT(in_model("vocab", {{"a", 0}, {"b", 0}}), HasSubstr("have one id, 0"));
  EXPECT_THAT(in_model("vocab", {{"a", 2000000000}}), HasSubstr("the id of \"a\" is no whole number below"));
  EXPECT_THAT(in_model("vocab", {{"a", "0"}}), HasSubstr("the id of \"a\""));
  EXPECT_THAT(replaced("normalizer", {{"type", "BertNormalizer"}}), HasSubstr("\"BertNormalizer\""));
  EXPECT_THAT(replaced("normalizer", {{"type", "Precompiled"}}), HasSubstr("\"Precompiled\""));
  EXPECT_THAT(replaced("pre_tokenizer", {{"type", "Whitespace"}}),
              HasSubstr("pre_tokenizer is of type \"Whitespace\""));
  EXPECT_THAT(replaced("decoder", {{"type", "WordPiece"}}), HasSubstr("decoder is of type \"WordPiece\""));
  EXPECT_THAT(replaced("post_processor", {{"type", "BertProcessing"}}), HasSubstr("\"BertProcessing\""));
  EXPECT_THAT(replaced("version", "2.0"), HasSubstr("version must be \"1.0\""));
  EXPECT_THAT(replaced("unheard", 1), HasSubstr("\"unheard\""));
  EXPECT_THAT(replaced("decoder", {{"type", "Sequence"},
                                   {"decoders", {{{"type", "Fuse"}}, {{"type", "ByteFallback"}}}}}),
              HasSubstr("decoder.decoders[1] is \"ByteFallback\", which is not served behind"));
  EXPECT_THAT(replaced("pre_tokenizer", {{"type", "Sequence"},
                                         {"pretokenizers",
                                          {{{"type", "ByteLevel"}, {"add_prefix_space", false}},
                                           {{"type", "Digits"}, {"individual_digits", true}}}}}),
              HasSubstr("pre_tokenizer.pretokenizers[1] is \"Digits\" behind ByteLevel"));
  EXPECT_THAT(refusal([](json& d) { d["added_tokens"][0]["id"] = 9; }),
              HasSubstr("\"<e>\" has the id 9, and Hugging Face's tokenizers gives it 7"));
  EXPECT_THAT(refusal([](json& d) { d["added_tokens"][0].erase("special"); }),
              HasSubstr("added_tokens[0].special is missing"));
  EXPECT_THAT(std::string(Tokenizer::Parse("{\"model\": ").status().message()),
              HasSubstr("the JSON is malformed at byte 11"));
}

TEST(TokenizerTest, FilesOfStrangersAreRefusedWithoutWaitingForThem) {
  const std::filesystem::path directory = std::filesystem::path(testing::TempDir()) / "hostile_tokenizer";
  std::filesystem::remove_all(directory);
  std::filesystem::create_directories(directory);
  for (const std::string name :
       {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"}) {
    std::ofstream(directory / "tokenizer.json") << Small().dump();
    for (const hostile::Maker& maker : hostile::Makers()) {
      hostile::Remove(directory / name);
      ASSERT_TRUE(maker.make(directory / name)) << maker.name;
      const auto opened = Tokenizer::Open(directory);
      ASSERT_FALSE(opened.ok()) << maker.name;
      EXPECT_THAT(std::string(opened.status().message()), HasSubstr(directory / name)) << maker.name;
    }
    hostile::Remove(directory / name);
  }
}

TEST(TokenizerTest, PatternsThatMeanSomethingElseToPcreAreRewrittenOrRefused) {
  const auto rewritten = [](std::string_view pattern) {
    return RewrittenForPcre(pattern).value_or("refused");
  };
  EXPECT_EQ(rewritten(R"(\p{L}+|\p{N}{1,3}|\P{Lu}?)"), R"(\p{L}+|\p{N}{1,3}|\P{Lu}?)");
  EXPECT_EQ(rewritten(R"((?i:'s|'t)|(a|b)(?!x)(?>y))"), R"((?i:'s|'t)|(?:a|b)(?!x)(?>y))");
  EXPECT_EQ(rewritten(R"(\h\v\u0041{,2}{x)"), R"([0-9A-Fa-f]\x0b\x{41}{0,2}\{x)");
  EXPECT_EQ(rewritten(R"(\p{Han}\p{^L})"), R"(\p{sc:Han}\p{^L})");
  EXPECT_EQ(rewritten("^a|b$|[$^]"), "(?m:^)a|b(?m:$)|[$^]");
  for (const char* const pattern :
       {"[[a]b]", "[a&&b]", "[]a]", R"(\p{N}{1,3}+)", R"(\bword)", R"((?m:a))", R"((?<name>a))", R"(\k<a>)",
        R"(\1)", "(", "[a", R"(\)", R"(\x{110000})", R"(\x80)", R"(\p{Nonsense})", R"(\p{L)", R"([\W])"}) {
    const auto regex = Regex::Compile(pattern);
    EXPECT_FALSE(regex.ok()) << pattern;
    EXPECT_TRUE(absl::IsInvalidArgument(regex.status())) << pattern;
  }
  // U+180E was white space once, and is to PCRE2.
  const auto space = Regex::Compile(R"(\s+)");
  ASSERT_TRUE(space.ok());
  RegexScratch scratch;
  EXPECT_EQ(space->Find("\xE1\xA0\x8E", 0, scratch)->begin, std::string_view::npos);
  EXPECT_EQ(space->Find("x\xE3\x80\x80\n", 0, scratch)->begin, 1u);
}

TEST(TokenizerTest, SpacesAreLookedThroughOnceForTheEndOfALine) {
  const auto regex = Regex::Compile(R"(\s+$)");
  ASSERT_TRUE(regex.ok()) << regex.status();
  EXPECT_TRUE(regex->LooksForwardOnly());
  RegexScratch scratch;
  std::string text(1 << 20, ' ');  // each tried up to the last would be 5 * 10^11 steps
  text += "x \n ";
  const auto match = regex->Find(text, 0, scratch);
  ASSERT_TRUE(match.ok()) << match.status();
  EXPECT_EQ(match->begin, text.size() - 3);
  EXPECT_EQ(match->end, text.size());
  // What follows may be no space.
  EXPECT_EQ(regex->FindFinal(text, 0, scratch)->begin, std::string::npos);
}

TEST(TokenizerTest, BrokenUtf8IsRefusedWithItsPlaceOrReplacedAsAsked) {
  json description = Small();
  for (int i = 0; i < 3; ++i)  // U+FFFD in GPT-2's alphabet
    description["model"]["vocab"][std::vector<std::string>{"ï", "¿", "½"}[static_cast<size_t>(i)]] = 7 + i;
  description["added_tokens"][0]["id"] = 10;
  const auto tokenizer = Opened(description);
  for (const std::string text : {"ab\xff", "ab\xed\xa0\x80", "ab\xf0\x9f\x98", "ab\xc0\x80"}) {
    const auto ids = tokenizer->Encode(text);
    EXPECT_TRUE(absl::IsInvalidArgument(ids.status()));
    EXPECT_THAT(std::string(ids.status().message()), HasSubstr("no UTF-8 at byte 2"));
  }
  const auto ids = tokenizer->Encode("ab\xf0\x9f\x98", {.replace_broken_utf8 = true});
  ASSERT_TRUE(ids.ok());
  EXPECT_THAT(*ids, ElementsAre(3, 7, 8, 9));
  EXPECT_EQ(tokenizer->Decode(*ids), "ab\xEF\xBF\xBD");
  Ids behind = {5};
  EXPECT_FALSE(tokenizer->Append("ab\xff", {}, behind).ok());
  EXPECT_THAT(behind, ElementsAre(5));
}

TEST(TokenizerTest, ADecoderHoldsBackWhatIsNoWholeCharacter) {
  json description = Small();
  description["model"]["vocab"] = {{"ð", 0}, {"Ł", 1}, {"ĺ", 2}, {"Ģ", 3}, {"a", 4}};  // F0 9F 98 80
  description["model"]["merges"] = json::array();
  description["added_tokens"] = json::array();
  const auto tokenizer = Opened(description);
  TextDecoder decoder(*tokenizer);
  for (const int32_t id : {0, 1, 2}) EXPECT_EQ(decoder.Push(id), "");
  EXPECT_EQ(decoder.Push(3), "😀");
  EXPECT_EQ(decoder.Push(0), "");
  EXPECT_EQ(decoder.Push(4),
            "\xEF\xBF\xBD"
            "a");
  EXPECT_EQ(decoder.Push(0), "");
  EXPECT_EQ(decoder.Finish(), "\xEF\xBF\xBD");
  EXPECT_EQ(decoder.Push(4), "a");
}

// With quadratic merging, ordering of marks or search these would take hours.
TEST(TokenizerTest, AMegabyteWithoutASpaceIsEncoded) {
  json description = Small();
  description["normalizer"] = {{"type", "NFC"}};
  description["model"]["vocab"].update({{"Ì", 8}, {"ģ", 9}, {"Ķ", 10}, {"Ġ", 11}});
  description["added_tokens"][0]["id"] = 11;
  description["model"]["vocab"]["Ġ"] = 7;
  const auto tokenizer = Opened(description);
  const Ids a = Encoded(*tokenizer, std::string(1 << 20, 'a'));
  EXPECT_EQ(a.size(), size_t{1} << 18);
  EXPECT_EQ(a.front(), 6);
  std::string mixed;
  std::minstd_rand random(1);
  for (int i = 0; i < 1 << 20; ++i) mixed.push_back(static_cast<char>('a' + random() % 3));
  EXPECT_EQ(tokenizer->Decode(Encoded(*tokenizer, mixed)), mixed);
  std::string marks = "a";  // U+0301 above, U+0316 below: ordered anew
  for (int i = 0; i < 1 << 18; ++i) marks += i % 2 == 0 ? "\u0301" : "\u0316";
  EXPECT_GT(Encoded(*tokenizer, marks).size(), size_t{1} << 18);
  EXPECT_GT(Encoded(*tokenizer, std::string(1 << 20, ' ')).size(), 0u);
}

TEST(TokenizerTest, WordsAreEncodedAlikeWhetherTheyAreCutAtSeamsOrNot) {
  // Characters with byte fallback, as Llama 2: with all byte tokens the text may be cut, without one it is
  // not.
  json description = Small();
  json& model = description["model"];
  model = {{"type", "BPE"},         {"unk_token", "<unk>"},  {"fuse_unk", true},
           {"byte_fallback", true}, {"ignore_merges", true}, {"merges", json::array()}};
  json vocab = {{"<unk>", 0}};
  for (int byte = 0; byte < 256; ++byte) {
    char token[8];
    std::snprintf(token, sizeof(token), "<0x%02X>", static_cast<unsigned>(byte));
    vocab[token] = vocab.size();
  }
  for (const char* const token : {"a", "b", "c", "▁", "ab", "▁a", "ca", "bc", "cab", "▁ab", "▁▁", "abc"})
    vocab[token] = vocab.size();
  model["merges"] =
      json::array({{"a", "b"}, {"c", "a"}, {"▁", "ab"}, {"▁", "a"}, {"b", "c"}, {"c", "ab"}, {"▁", "▁"}});
  model["vocab"] = vocab;
  description["pre_tokenizer"] = nullptr;
  description["decoder"] = nullptr;
  description["added_tokens"] = json::array();
  const auto cut = Opened(description);
  model["merges"].push_back({"<0x00>", "<0x00>"});  // a merge of byte tokens: what is cut may be merged
  model["vocab"]["<0x00><0x00>"] = vocab.size();
  const auto whole = Opened(description);
  std::minstd_rand random(5);
  for (int round = 0; round < 200; ++round) {
    std::string text;
    for (int i = 0; i < 200; ++i) text += std::vector<std::string>{"a", "b", "c", "▁", "é"}[random() % 5];
    EXPECT_EQ(Encoded(*cut, text), Encoded(*whole, text)) << text;
  }
}

// Of a text in parts of a megabyte: its ids, or the error of the first part that has one.
absl::StatusOr<Ids> InParts(const Tokenizer& tokenizer, std::string_view text) {
  Encoder encoder(tokenizer);
  Ids ids;
  for (; !text.empty(); text.remove_prefix(std::min<size_t>(text.size(), 1 << 20))) {
    const absl::Status status = encoder.Append(text.substr(0, 1 << 20), ids);
    if (!status.ok()) return status;
  }
  const absl::Status status = encoder.Finish(ids);
  return status.ok() ? absl::StatusOr<Ids>(ids) : status;
}

TEST(TokenizerTest, WhatTakesMoreMemoryThanThereIsIsRefusedAndAllElseIsTheSame) {
  constexpr uint64_t kMemory = uint64_t{64} << 20;
  json whole = Small();
  whole["added_tokens"][0]["lstrip"] = true;  // looks beside it: no parts
  json joint = json::parse(ByteTokenizer({"<e>"}));
  joint["model"]["vocab"]["aa"] = 258;
  joint["added_tokens"][0]["id"] = 259;
  joint["model"]["merges"].push_back("a a");
  std::string words;
  while (words.size() < (6 << 20)) words += "abc aab cab a ";
  for (const json& description : {Small(), whole, joint}) {
    const auto free = Opened(description), bound = Opened(description);
    bound->LimitMemory(kMemory);
    EXPECT_EQ(InParts(*bound, words).value(), InParts(*free, words).value());
    EXPECT_EQ(Encoded(*bound, words), Encoded(*free, words));
    // Any two neighbours may be merged: the word is one to the end.
    const std::string word(2 << 20, 'a');
    for (const std::string& text : {word, words + word + " a"}) {
      for (const absl::Status& refused : {bound->Encode(text).status(), InParts(*bound, text).status()}) {
        EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
        EXPECT_THAT(std::string(refused.message()), HasSubstr("`host_memory`"));
      }
    }
    EXPECT_TRUE(InParts(*free, word).ok());
    const std::string endless(10 << 20, 'a');
    EXPECT_TRUE(absl::IsResourceExhausted(InParts(*bound, endless).status()));
    EXPECT_TRUE(absl::IsResourceExhausted(bound->Encode(endless).status()));
    EXPECT_EQ(Encoded(*bound, "abc"), Encoded(*free, "abc")) << "a refused text leaves nothing behind";
  }
  // No merge reaches across two zeros: each is a word.
  const auto bound = Opened(joint);
  bound->LimitMemory(kMemory);
  EXPECT_EQ(InParts(*bound, std::string(6 << 20, '\0')).value(), Ids(6 << 20, 0));
  EXPECT_THAT(std::string(InParts(*bound, words + std::string(2 << 20, 'a') + "b").status().message()),
              HasSubstr("before byte 8"));
}

TEST(TokenizerTest, ThreadsShareOneTokenizer) {
  const auto tokenizer = Opened(Small());
  std::vector<std::string> texts;
  std::vector<Ids> expected;
  std::minstd_rand random(3);
  for (int i = 0; i < 100; ++i) {
    std::string text;
    for (int n = 0; n < 100; ++n) text += std::vector<std::string>{"a", "b", "c", "<e>"}[random() % 4];
    texts.push_back(text);
    expected.push_back(Encoded(*tokenizer, text));
  }
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int round = 0; round < 20; ++round) {
        for (size_t i = 0; i < texts.size(); ++i) EXPECT_EQ(Encoded(*tokenizer, texts[i]), expected[i]);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

class TokenizerDirectoryTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "penstock-text-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    directory_ = name;
    Write("tokenizer.json", Small());
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }
  void Write(const std::string& name, const json& content) {
    std::ofstream(directory_ / name) << content.dump();
  }
  absl::StatusOr<std::unique_ptr<Tokenizer>> Open() { return Tokenizer::Open(directory_.string()); }

  std::filesystem::path directory_;
};

TEST_F(TokenizerDirectoryTest, SpecialTokensAreNamedByTheFilesBesideIt) {
  ASSERT_TRUE(Open().ok());
  EXPECT_FALSE((*Open())->special_ids().bos.has_value());
  Write("tokenizer_config.json",
        {{"bos_token", nullptr}, {"eos_token", {{"content", "<e>"}, {"lstrip", false}}}});
  Write("special_tokens_map.json", {{"bos_token", "abc"}, {"pad_token", "aa"}});
  Write("generation_config.json", {{"bos_token_id", 5}, {"eos_token_id", {7, 2}}, {"pad_token_id", 1}});
  const auto tokenizer = Tokenizer::Open((directory_ / "tokenizer.json").string());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const SpecialIds& special = (*tokenizer)->special_ids();
  EXPECT_EQ(special.bos, 4);
  EXPECT_EQ(special.pad, 5);
  EXPECT_EQ(special.unk, std::nullopt);
  EXPECT_THAT(special.eos, ElementsAre(7, 2));
}

TEST_F(TokenizerDirectoryTest, WhatTheFilesSayAndIsNotFollowedIsTold) {
  const int32_t next = (*Open())->vocab_size();
  EXPECT_THAT((*Open())->notes(), IsEmpty());
  Write("tokenizer_config.json", {{"eos_token", "<e>"},
                                  {"add_eos_token", true},
                                  {"add_prefix_space", true},
                                  {"added_tokens_decoder", {{"99", {{"content", "<n>"}}}}}});
  const auto tokenizer = Open();
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->IdOf("<n>"), next);
  EXPECT_EQ((*tokenizer)->base_vocab_size(), next);
  EXPECT_THAT(
      (*tokenizer)->notes(),
      ElementsAre(HasSubstr("<n> has the id 99 there, and tokenizer.json leaves it " + std::to_string(next)),
                  HasSubstr("add_eos_token is true"), HasSubstr("add_prefix_space is true")));
}

TEST_F(TokenizerDirectoryTest, AClassThatCutsTextsInItsOwnWayIsTold) {
  const auto notes = [&](const std::string& named, const std::string& type) {
    Write("tokenizer_config.json", named.empty() ? json::object() : json{{"tokenizer_class", named}});
    Write("config.json", {{"model_type", type}});
    const auto opened = Open();
    EXPECT_TRUE(opened.ok()) << opened.status();
    return opened.ok() ? (*opened)->notes() : std::vector<std::string>{"refused"};
  };
  const auto differs = [](const char* kind) {
    return ElementsAre(AllOf(HasSubstr(std::string("the tokenizer_class ") + kind + " of transformers 5"),
                             HasSubstr("tokenizer.json is followed")));
  };
  // Of bytes, with the steps of GPT-2.
  EXPECT_THAT(notes("Qwen2TokenizerFast", "llama"), differs("Qwen2Tokenizer"));
  EXPECT_THAT(notes("LlamaTokenizer", "qwen2"), differs("Qwen2Tokenizer"));
  EXPECT_THAT(notes("", "qwen3"), differs("Qwen2Tokenizer"));
  for (const auto& [named, type] : {std::pair{"PreTrainedTokenizerFast", "llama"},
                                    {"TokenizersBackend", "qwen3"},
                                    {"GPT2Tokenizer", "qwen3"},
                                    {"", "gpt2"},
                                    {"LlamaTokenizer", "llama"},
                                    {"Qwen2Tokenizer", "olmo2"},
                                    {"", "llama"}}) {
    EXPECT_THAT(notes(named, type), IsEmpty()) << named << " " << type;
  }
  // Of Llama 2, as its published file has it.
  json llama = Small();
  llama["normalizer"] = {{"type", "Prepend"}, {"prepend", "a"}};
  llama["pre_tokenizer"] = nullptr;
  llama["decoder"] = nullptr;
  Write("tokenizer.json", llama);
  EXPECT_THAT(notes("LlamaTokenizerFast", "llama"),
              ElementsAre(HasSubstr("by steps of its own (Metaspace first), tokenizer.json by Prepend")));
  EXPECT_THAT(notes("LlamaTokenizer", "mistral"), IsEmpty());
  llama["normalizer"] = nullptr;
  llama["pre_tokenizer"] = {
      {"type", "Metaspace"}, {"replacement", "a"}, {"prepend_scheme", "first"}, {"split", false}};
  Write("tokenizer.json", llama);
  EXPECT_THAT(notes("LlamaTokenizer", "llama"), IsEmpty());
}

TEST_F(TokenizerDirectoryTest, FilesThatDisagreeAreRefused) {
  Write("tokenizer_config.json", {{"split_special_tokens", true}});
  EXPECT_THAT(std::string(Open().status().message()), HasSubstr("split_special_tokens is true"));
  Write("tokenizer_config.json", {{"added_tokens_decoder", {{"x", "<n>"}}}});
  EXPECT_THAT(std::string(Open().status().message()), HasSubstr("the id \"x\", no whole number"));
  Write("tokenizer_config.json", {{"eos_token", 7}});
  EXPECT_THAT(std::string(Open().status().message()), HasSubstr("eos_token names no token"));
  Write("tokenizer_config.json", json::object());
  Write("generation_config.json", {{"eos_token_id", "7"}});
  EXPECT_THAT(std::string(Open().status().message()), HasSubstr("eos_token_id is neither"));
}

TEST_F(TokenizerDirectoryTest, ATokenizerOfAnotherFormIsNamedWithWhatConvertsIt) {
  std::filesystem::remove(directory_ / "tokenizer.json");
  const auto says = [&](const std::string& path) {
    return std::string(Tokenizer::Open(path).status().message());
  };
  const std::string converts =
      "T.from_pretrained('" + directory_.string() + "').save_pretrained('" + directory_.string() + "')";
  Write("vocab.txt", json::object());
  EXPECT_THAT(says(directory_), HasSubstr("a vocab.txt of WordPiece, which is not served"));
  EXPECT_THAT(says(directory_ / "vocab.txt"), HasSubstr("WordPiece"));
  for (const char* const name : {"qwen.tiktoken", "tekken.json", "spiece.model", "tokenizer.model"}) {
    Write(name, json::object());
    EXPECT_THAT(says(directory_), AllOf(HasSubstr(std::string("has ") + name), HasSubstr(converts)));
    EXPECT_THAT(says(directory_ / name), HasSubstr(converts));
    std::filesystem::remove(directory_ / name);
  }
  Write("vocab.json", json::object());
  EXPECT_THAT(says(directory_ / "vocab.json"), HasSubstr(converts));
  EXPECT_THAT(says(directory_), HasSubstr("WordPiece"));
  Write("merges.txt", json::object());
  EXPECT_THAT(says(directory_), AllOf(HasSubstr("has vocab.json and merges.txt"), HasSubstr(converts)));
}

TEST_F(TokenizerDirectoryTest, AFileThatIsMissingIsNamed) {
  std::filesystem::remove(directory_ / "tokenizer.json");
  EXPECT_TRUE(absl::IsNotFound(Open().status()));
  EXPECT_THAT(std::string(Open().status().message()), HasSubstr((directory_ / "tokenizer.json").string()));
}

}  // namespace
}  // namespace penstock::text::tokenizer_test
