// Pieces come in order and once, errors after the pieces before them, and nobody is waited for who waits.
#include "base/read_ahead.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <new>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

namespace penstock::read_ahead_test {
namespace {

using Filled = absl::StatusOr<bool>;

TEST(ReadAheadTest, PiecesComeInOrderWhoeverIsTheSlowerOne) {
  std::mt19937 random(1);
  for (const size_t slots : {size_t{2}, size_t{3}, size_t{7}}) {
    for (int slow = 0; slow < 3; ++slow) {
      const int pieces = std::uniform_int_distribution(0, 60)(random);
      int next = 0;
      ReadAhead<std::vector<int>> ahead(slots, [&](std::vector<int>* to) -> Filled {
        if (slow == 1) std::this_thread::sleep_for(std::chrono::microseconds(200));
        if (next == pieces) return false;
        to->assign(10, next++);
        return true;
      });
      for (int i = 0; i < pieces; ++i) {
        const absl::StatusOr<std::vector<int>*> piece = ahead.Next();
        ASSERT_TRUE(piece.ok()) << piece.status();
        ASSERT_NE(*piece, nullptr) << i;
        if (slow == 2) std::this_thread::sleep_for(std::chrono::microseconds(200));
        EXPECT_EQ(**piece, std::vector<int>(10, i));
      }
      for (int again = 0; again < 2; ++again) {
        const absl::StatusOr<std::vector<int>*> end = ahead.Next();
        ASSERT_TRUE(end.ok());
        EXPECT_EQ(*end, nullptr);
      }
    }
  }
}

// The piece that is used is not the one that is filled: the next is there while this one is held.
TEST(ReadAheadTest, TheNextIsReadWhileOneIsUsed) {
  std::atomic<int> filled{0};
  ReadAhead<int> ahead(3, [&](int* to) -> Filled {
    *to = ++filled;
    return true;
  });
  const absl::StatusOr<int*> first = ahead.Next();
  ASSERT_TRUE(first.ok());
  while (filled < 3) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(filled, 3);  // and no slot more
  EXPECT_EQ(**first, 1);
}

TEST(ReadAheadTest, AnErrorComesAfterThePiecesBeforeItAndStays) {
  int next = 0;
  ReadAhead<int> ahead(2, [&](int* to) -> Filled {
    if (next == 3) return absl::DataLossError("cut short");
    *to = next++;
    return true;
  });
  for (int i = 0; i < 3; ++i) {
    const absl::StatusOr<int*> piece = ahead.Next();
    ASSERT_TRUE(piece.ok());
    EXPECT_EQ(**piece, i);
  }
  EXPECT_EQ(ahead.Next().status(), absl::DataLossError("cut short"));
  EXPECT_EQ(ahead.Next().status(), absl::DataLossError("cut short"));
}

TEST(ReadAheadTest, ExceptionsAreErrors) {
  ReadAhead<int> memory(2, [](int*) -> Filled { throw std::bad_alloc(); });
  EXPECT_EQ(memory.Next().status().code(), absl::StatusCode::kResourceExhausted);
  ReadAhead<int> other(2, [](int*) -> Filled { throw std::runtime_error("no such place"); });
  EXPECT_EQ(other.Next().status(), absl::InternalError("no such place"));
}

TEST(ReadAheadTest, ItMayEndAnyTime) {
  for (int taken = 0; taken < 5; ++taken) {
    int next = 0;
    ReadAhead<int> ahead(2, [&](int* to) -> Filled {
      *to = next++;
      return true;
    });
    for (int i = 0; i < taken; ++i) ASSERT_TRUE(ahead.Next().ok());
  }
}

}  // namespace
}  // namespace penstock::read_ahead_test
