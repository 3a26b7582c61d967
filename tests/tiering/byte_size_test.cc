#include "tiering/plan/byte_size.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

namespace penstock::tiering::byte_size_test {
namespace {

int64_t Size(std::string_view text) {
  const auto size = ParseSize(text);
  EXPECT_TRUE(size.ok()) << size.status();
  return size.value_or(-1);
}

TEST(ParseSize, UnitsWithAnIArePowersOf1024) {
  EXPECT_EQ(Size("512MiB"), 512LL << 20);
  EXPECT_EQ(Size("4GiB"), 4LL << 30);
  EXPECT_EQ(Size("4gib"), 4LL << 30);
  EXPECT_EQ(Size("1.5GiB"), 3LL << 29);
  EXPECT_EQ(Size("2TiB"), 2LL << 40);
  EXPECT_EQ(Size("1PiB"), 1LL << 50);
  EXPECT_EQ(Size("64kib"), 65536);
}

TEST(ParseSize, UnitsWithoutArePowersOf1000) {
  EXPECT_EQ(Size("1KB"), 1000);
  EXPECT_EQ(Size("4G"), 4'000'000'000);
  EXPECT_EQ(Size("4GB"), 4'000'000'000);
  EXPECT_EQ(Size("512m"), 512'000'000);
  EXPECT_EQ(Size("1P"), 1'000'000'000'000'000);
  EXPECT_EQ(Size("3MB"), 3'000'000);
  EXPECT_EQ(Size("1.92TB"), 1'920'000'000'000);
}

TEST(ParseSize, PlainNumbersAreBytes) {
  EXPECT_EQ(Size("0"), 0);
  EXPECT_EQ(Size("1e9"), 1'000'000'000);
  EXPECT_EQ(Size("1E9B"), 1'000'000'000);
  EXPECT_EQ(Size("+17"), 17);
  EXPECT_EQ(Size(" 4 GiB "), 4LL << 30);
  EXPECT_EQ(Size("9007199254740993"), 9007199254740993);  // 2^53 + 1: no double holds it
  EXPECT_EQ(Size("9223372036854775807"), std::numeric_limits<int64_t>::max());
}

TEST(ParseSize, RefusesNonsenseInOneLine) {
  for (const char* text : {"",
                           " ",
                           "M",
                           "GiB",
                           "-1",
                           "-4G",
                           "4X",
                           "4GG",
                           "4GiBs",
                           "4 4",
                           "nan",
                           "inf",
                           "1e",
                           "1e999",
                           "1e30",
                           "9223372037G",
                           "9223372036854775808",
                           "0x10",
                           "4G\n4G",
                           "\x01\xff",
                           "1..5",
                           "1,5G",
                           "++1",
                           "e9"}) {
    const auto size = ParseSize(text);
    ASSERT_FALSE(size.ok()) << text;
    EXPECT_EQ(size.status().code(), absl::StatusCode::kInvalidArgument);
    const std::string message(size.status().message());
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    EXPECT_NE(message.find("is not a size"), std::string::npos) << message;
  }
}

TEST(ParseSize, AnyBytesGiveASizeOrOneLine) {
  std::mt19937 random(7);
  const std::string_view alphabet = "0123456789.eE+-KMGTPiBb \n\xff";
  for (int i = 0; i < 20000; ++i) {
    std::string text;
    for (size_t n = random() % 8; n > 0; --n) text += alphabet[random() % alphabet.size()];
    const auto size = ParseSize(text);
    if (size.ok()) {
      ASSERT_GE(*size, 0) << text;
    } else {
      ASSERT_EQ(size.status().message().find('\n'), absl::string_view::npos);
    }
  }
}

TEST(ParseCount, PowersOf1000) {
  const auto count = [](std::string_view text) { return ParseCount(text).value_or(-1); };
  EXPECT_EQ(count("7B"), 7'000'000'000);
  EXPECT_EQ(count("350m"), 350'000'000);
  EXPECT_EQ(count("2851e6"), 2'851'000'000);
  EXPECT_EQ(count("1.5T"), 1'500'000'000'000);
  EXPECT_EQ(count("4K"), 4000);
  EXPECT_EQ(count("1G"), 1'000'000'000);
  EXPECT_EQ(count("17"), 17);
  for (const char* text : {"", "B", "-1B", "7BB", "7GiB", "7 x"}) {
    EXPECT_EQ(ParseCount(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
  EXPECT_EQ(std::string(ParseCount("7X").status().message()),
            "\"7X\" is not a count: its unit is unknown; write it like 350M, 7B or 1e9");
}

TEST(FormatBytes, OneDecimalAndItsUnit) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1024), "1.0 KiB");
  EXPECT_EQ(FormatBytes(512LL << 20), "512.0 MiB");
  EXPECT_EQ(FormatBytes(3LL << 29), "1.5 GiB");
  EXPECT_EQ(FormatBytes((1LL << 30) - 1), "1.0 GiB");  // never "1024.0 MiB"
  EXPECT_EQ(FormatBytes(-(1LL << 20)), "-1.0 MiB");
  EXPECT_EQ(FormatBytes(std::numeric_limits<int64_t>::max()), "8.0 EiB");
}

TEST(FormatBandwidth, PowersOf1000) {
  EXPECT_EQ(FormatBandwidth(0), "0 B/s");
  EXPECT_EQ(FormatBandwidth(1500), "2 kB/s");
  EXPECT_EQ(FormatBandwidth(12.345e6), "12.35 MB/s");
  EXPECT_EQ(FormatBandwidth(999.999e6), "1.00 GB/s");
  EXPECT_EQ(FormatBandwidth(3.42e9), "3.42 GB/s");
  EXPECT_EQ(FormatBandwidth(std::numeric_limits<double>::quiet_NaN()), "-");
  EXPECT_EQ(FormatBandwidth(-1), "-");
}

}  // namespace
}  // namespace penstock::tiering::byte_size_test
