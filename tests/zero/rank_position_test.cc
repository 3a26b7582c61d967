// What goes with a rank's signs of life: read back as it was, or refused, whatever somebody sends.
#include "zero/ranks/rank_position.h"

#include <gtest/gtest.h>

#include <string>

#include "zero/ranks/store_service.h"

namespace penstock::zero::rank_position_test {
namespace {

RankPosition Somewhere() {
  RankPosition position{.beat = 3, .calls = {{6, "step 6"}, {7, "an evaluation"}}, .begun = {1, 2, 3, 4, 5}};
  position.exchanges[{1, 1}] = {.text = "weights of block 2 (64 bytes)", .calls = 9};
  return position;
}

TEST(RankPosition, IsReadBackAsItWas) {
  const RankPosition told = Somewhere();
  const auto read = RankPosition::FromText(told.ToText());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->beat, told.beat);
  EXPECT_EQ(read->calls, told.calls);
  EXPECT_EQ(read->exchanges, told.exchanges);
  EXPECT_EQ(read->begun, told.begun);
  EXPECT_FALSE(read->ended);
  EXPECT_FALSE(ComparePositions({told, *read}, "the end").has_value());
}

TEST(RankPosition, FitsIntoOneValueOfTheMeetingPoint) {
  RankPosition position;
  for (uint64_t i = 0; i < 16; ++i) position.calls[i] = std::string(100000, '"');
  for (uint64_t i = 0; i < 1000; ++i)
    position.exchanges[{i % kChannels, i}] = {.text = std::string(100000, '\xff')};
  const std::string text = position.ToText();
  EXPECT_LE(text.size(), kStoreMostValueBytes);
  EXPECT_TRUE(RankPosition::FromText(text).ok());
}

// Numbers that are used as indexes, values of other types, and what is missing.
TEST(RankPosition, WhatNoRankSendsIsRefused) {
  const std::string right = Somewhere().ToText();
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = right;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return text.replace(at, from.size(), to);
  };
  for (const std::string& text :
       {std::string(), std::string("{}"), std::string("[]"), std::string(100000, '['),
        with("\"channel\":1", "\"channel\":4000000"), with("\"channel\":1", "\"channel\":-1"),
        with("\"channel\":1", "\"channel\":5"), with("\"channel\":1", "\"channel\":\"1\""),
        with("\"number\":1", "\"number\":1.5"), with("[1,2,3,4,5]", "[1,2,3,4]"),
        with("[1,2,3,4,5]", "[1,2,3,4,-5]"), with("[1,2,3,4,5]", "5"), with("\"ended\":false", "\"ended\":0"),
        with("\"7\":", "\"seven\":"), with("\"an evaluation\"", "[]"),
        with("\"exchanges\":[", "\"exchanges\":[7,"), with("\"is\":", "\"isn't\":"),
        with("\"beat\":3", "\"beat\":null")}) {
    EXPECT_EQ(RankPosition::FromText(text).status().code(), absl::StatusCode::kInvalidArgument)
        << text.substr(0, 300);
  }
}

TEST(RankPosition, DifferencesAreFoundAndNamed) {
  const RankPosition here = Somewhere();
  RankPosition other = here;
  other.calls[7] = "step 7";
  auto differ = ComparePositions({here, other}, "the end");
  ASSERT_TRUE(differ.has_value());
  EXPECT_EQ(differ->at, "step 7");
  EXPECT_EQ(differ->other_at, "an evaluation");
  other = here;
  other.exchanges[{1, 1}].calls = 10;
  differ = ComparePositions({here, other}, "the end");
  ASSERT_TRUE(differ.has_value());
  EXPECT_EQ(differ->at, differ->other_at);
  other = RankPosition{.ended = true};
  differ = ComparePositions({here, other}, "the end");
  ASSERT_TRUE(differ.has_value());
  EXPECT_EQ(differ->other_at, "the end");
}

}  // namespace
}  // namespace penstock::zero::rank_position_test
