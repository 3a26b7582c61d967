// Where ranks meet: values by their keys, at one who may not be there yet, may go, or may hear strangers.
#include "zero/ranks/tcp_store.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace penstock::zero {
namespace {

using std::chrono::milliseconds;

constexpr const char* kHere = "127.0.0.1";
constexpr milliseconds kLong = std::chrono::seconds(60);

std::unique_ptr<TcpStore> Join(const TcpStore& first) {
  return std::make_unique<TcpStore>(kHere, first.port(), /*serves=*/false, kLong);
}

TEST(TcpStore, WhatOneSetsTheOthersRead) {
  TcpStore first(kHere, 0, /*serves=*/true, kLong);
  const auto second = Join(first);
  EXPECT_FALSE(second->Has("a"));
  EXPECT_THROW(second->Get("a"), std::runtime_error);
  const std::string binary("\0\n\xff", 3);
  first.Set("a", binary);
  EXPECT_TRUE(second->Has("a"));
  EXPECT_EQ(second->Get("a"), binary);
  second->Set("a", "");
  EXPECT_EQ(first.Get("a"), "");
  const std::string large(3 << 20, 'x');
  second->Set("large", large);
  EXPECT_EQ(first.Get("large"), large);
}

TEST(TcpStore, AdditionsOfAllAreCountedOnce) {
  TcpStore first(kHere, 0, /*serves=*/true, kLong);
  constexpr int kThreads = 4, kEach = 200;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      const auto own = Join(first);
      for (int n = 0; n < kEach; ++n) own->Add("sum", 1);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(first.Add("sum", 0), kThreads * kEach);
  first.Set("word", "many");
  const auto second = Join(first);
  EXPECT_THROW(second->Add("word", 1), std::runtime_error);
}

TEST(TcpStore, OneThatWaitsKeepsNobodyWaiting) {
  TcpStore first(kHere, 0, /*serves=*/true, kLong);
  std::thread waits([&] { Join(first)->Wait("late", kLong); });
  const auto second = Join(first);
  for (int i = 0; i < 100; ++i) second->Set("other", std::to_string(i));
  second->Set("late", "now");
  waits.join();
  EXPECT_THROW(second->Wait("never", milliseconds(20)), std::runtime_error);
}

TEST(TcpStore, OneThatComesEarlyWaitsForTheFirst) {
  int port = 0;
  {
    const TcpStore free(kHere, 0, /*serves=*/true, kLong);
    port = free.port();
  }
  EXPECT_THROW(TcpStore(kHere, port, /*serves=*/false, milliseconds(30)), std::runtime_error);
  std::string read;
  std::thread early([&] {
    TcpStore store(kHere, port, /*serves=*/false, kLong);
    store.Wait("key", kLong);
    read = store.Get("key");
  });
  TcpStore first(kHere, port, /*serves=*/true, kLong);
  first.Set("key", "value");
  early.join();
  EXPECT_EQ(read, "value");
}

TEST(TcpStore, WhenTheFirstHasGoneEveryCallSaysSo) {
  auto first = std::make_unique<TcpStore>(kHere, 0, /*serves=*/true, kLong);
  const auto second = Join(*first);
  second->Set("a", "b");
  first.reset();
  EXPECT_THROW(second->Get("a"), std::runtime_error);
  EXPECT_THROW(second->Set("a", "c"), std::runtime_error);
}

TEST(TcpStore, APortThatIsTakenIsNamed) {
  const TcpStore first(kHere, 0, /*serves=*/true, kLong);
  try {
    const TcpStore second(kHere, first.port(), /*serves=*/true, kLong);
    FAIL() << "two listen at one port";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find(std::to_string(first.port())), std::string::npos)
        << error.what();
  }
}

// Who is asked nothing answers nothing: a call that waits for that ends when the store is shut.
TEST(TcpStore, ACallThatIsNotAnsweredEndsWithShut) {
  const int listens = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(listens, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(listens, 1), 0);
  socklen_t length = sizeof(address);
  ASSERT_EQ(getsockname(listens, reinterpret_cast<sockaddr*>(&address), &length), 0);
  TcpStore store(kHere, ntohs(address.sin_port), /*serves=*/false, kLong);
  std::atomic<bool> ended{false};
  std::thread asks([&] {
    EXPECT_THROW(store.Get("a"), std::runtime_error);
    ended.store(true);
  });
  while (!ended.load()) {
    store.Shut();
    std::this_thread::sleep_for(milliseconds(1));
  }
  asks.join();
  close(listens);
}

TEST(TcpStore, StrangersAreTurnedAwayAndDisturbNobody) {
  TcpStore first(kHere, 0, /*serves=*/true, kLong);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(first.port()));
  std::vector<int> strangers;
  for (const char* says : {"GET / HTTP/1.1\r\nHost: here\r\n\r\n", "PST1", ""}) {
    strangers.push_back(socket(AF_INET, SOCK_STREAM, 0));
    ASSERT_EQ(connect(strangers.back(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    const std::string text(says);
    ASSERT_EQ(send(strangers.back(), text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
  }
  char answer = 0;
  EXPECT_LE(recv(strangers.front(), &answer, 1, 0), 0);  // closed
  first.Set("a", "b");
  EXPECT_EQ(Join(first)->Get("a"), "b");
  for (const int stranger : strangers) close(stranger);
  EXPECT_EQ(first.Get("a"), "b");
}

}  // namespace
}  // namespace penstock::zero
