#include "base/index.h"

#include <gtest/gtest.h>

#include <sstream>
#include <type_traits>
#include <unordered_set>

namespace penstock::index_test {
namespace {

using Row = Index<struct RowTag>;
using Column = Index<struct ColumnTag>;

static_assert(!std::is_convertible_v<int, Row>);
static_assert(!std::is_convertible_v<Row, int>);
static_assert(!std::is_constructible_v<Row, Column>);
static_assert(!std::is_invocable_v<decltype([](auto& v, auto i) -> decltype(v[i]) { return v[i]; }),
                                   IndexedVector<Row, int>&, Column>);

TEST(Index, ADefaultOneIsNoneAndComesBeforeAllOthers) {
  EXPECT_FALSE(Row().valid());
  EXPECT_TRUE(Row(0).valid());
  EXPECT_LT(Row(), Row(0));
  EXPECT_EQ(Row(-1), Row());
}

TEST(Index, CountsAndIsPrinted) {
  Row row(3);
  EXPECT_EQ(++row, Row(4));
  EXPECT_EQ(--row, Row(3));
  EXPECT_EQ(row + 2, Row(5));
  EXPECT_EQ(row - 1, Row(2));
  std::ostringstream text;
  text << row;
  EXPECT_EQ(text.str(), "3");
  EXPECT_EQ((std::unordered_set<Row>{Row(1), Row(2), Row(1)}.size()), 2u);
}

TEST(IndexedVector, IsWalkedByItsIndices) {
  IndexedVector<Row, int> rows;
  EXPECT_EQ(rows.end_index(), Row(0));
  for (int i = 0; i < 3; ++i) rows.push_back(10 * i);
  int sum = 0;
  for (const Row row : rows.indices()) sum += rows[row] * row.value();
  EXPECT_EQ(sum, 10 + 40);
  EXPECT_EQ(rows.end_index(), Row(3));
  EXPECT_FALSE(rows.contains(Row()));
  EXPECT_FALSE(rows.contains(Row(3)));
}

TEST(IndexedVectorDeathTest, EndsTheProcessAtWhatLiesOutside) {
  IndexedVector<Row, int> rows(2);
  EXPECT_DEATH(rows[Row(2)] = 1, "beyond its vector");
  EXPECT_DEATH(rows[Row()] = 1, "beyond its vector");
  EXPECT_DEATH(At(-1), "names nothing");
  EXPECT_DEATH(At(Row()), "names nothing");
}

}  // namespace
}  // namespace penstock::index_test
