// The one parser of JSON.
#include "base/json.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace penstock::json_test {
namespace {

using ::testing::HasSubstr;

std::string Repeat(const std::string& text, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all += text;
  return all;
}

TEST(JsonTest, ValuesAreThoseOfTheText) {
  const std::string text =
      R"({"a": [1, -2, 3.5, true, false, null, "x\u00e9\n", {}, []], "b": {"c": {"d": 18446744073709551615}}, "": 0})";
  const auto json = ParseJson(text, "text");
  ASSERT_TRUE(json.ok()) << json.status();
  EXPECT_EQ(*json, nlohmann::json::parse(text));
  EXPECT_EQ(ParseJson("7", "text").value(), 7);
}

TEST(JsonTest, MalformedTextIsNamedWithItsPlace) {
  for (const std::string text :
       {"", "{", "[1,]", "{\"a\" 1}", "nul", "[1] 2", "\"\xff\"", "{\"a\": 1e999}"}) {
    const auto json = ParseJson(text, "/models/config.json");
    EXPECT_TRUE(absl::IsInvalidArgument(json.status())) << text << ": " << json.status();
    EXPECT_THAT(std::string(json.status().message()), HasSubstr("/models/config.json"));
  }
  EXPECT_THAT(std::string(ParseJson("[1,]", "f").status().message()),
              HasSubstr("f: the JSON is malformed at byte 4"));
  EXPECT_EQ(ParseJson("[1,]", "").status().message(), "the JSON is malformed at byte 4");
  EXPECT_THAT(
      std::string(
          ParseJson("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "f").status().message()),
      HasSubstr("f: is a Git LFS pointer"));
}

TEST(JsonTest, NestingIsBounded) {
  for (const auto& [open, close] : {std::pair{"[", "]"}, std::pair{"{\"a\":", "}"}}) {
    EXPECT_TRUE(ParseJson(Repeat(open, 128) + (*open == '{' ? "1" : "") + Repeat(close, 128), "f").ok());
    const auto deep = ParseJson(Repeat(open, 200'000) + Repeat(close, 200'000), "f");
    EXPECT_TRUE(absl::IsInvalidArgument(deep.status()));
    EXPECT_THAT(std::string(deep.status().message()), HasSubstr("nested more than 128 deep"));
  }
  EXPECT_TRUE(ParseJson("[[1]]", "f", {.max_depth = 2}).ok());
  EXPECT_FALSE(ParseJson("[[[1]]]", "f", {.max_depth = 2}).ok());
}

TEST(JsonTest, TheNumberOfValuesIsBounded) {
  EXPECT_TRUE(ParseJson("[1,2,3]", "f", {.max_values = 4}).ok());
  EXPECT_THAT(std::string(ParseJson("[1,2,3]", "f", {.max_values = 3}).status().message()),
              HasSubstr("more than 3 values"));
  EXPECT_FALSE(ParseJson("[" + Repeat("[],", 500'000) + "[]]", "f").ok());
}

TEST(JsonTest, CommentsAndKeysThatStandTwiceAreAChoice) {
  EXPECT_FALSE(ParseJson("{/* x */}", "f").ok());
  EXPECT_TRUE(ParseJson("{/* x */} // y", "f", {.comments = true}).ok());
  EXPECT_EQ(ParseJson(R"({"a":1,"a":2})", "f").value()["a"], 2);
  EXPECT_THAT(std::string(ParseJson(R"({"a":1,"a":2})", "f", {.duplicate_keys = false}).status().message()),
              HasSubstr("the key \"a\" twice"));
}

TEST(JsonTest, AnObjectIsAskedFor) {
  EXPECT_TRUE(ParseJsonObject("{}", "f").ok());
  EXPECT_THAT(std::string(ParseJsonObject("[]", "f").status().message()), HasSubstr("f: is no JSON object"));
  EXPECT_TRUE(absl::IsNotFound(ReadJsonObject("none/of/it.json").status()));
}

}  // namespace
}  // namespace penstock::json_test
