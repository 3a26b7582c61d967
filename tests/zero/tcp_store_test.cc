// Where ranks meet: values by their keys, at one who may not be there yet, may go, or may hear strangers.
#include "zero/ranks/tcp_store.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace penstock::zero::tcp_store_test {
namespace {

using std::chrono::milliseconds;

constexpr const char* kHere = "127.0.0.1";
constexpr milliseconds kLong = std::chrono::seconds(60);

RankSecret Secret() { return *RankSecret::Of("what the ranks of these tests know"); }

std::unique_ptr<TcpStore> Join(const TcpStore& first) {
  return std::make_unique<TcpStore>(kHere, first.port(), /*serves=*/false, kLong, Secret());
}

// A connection that says what it likes.
class Stranger {
 public:
  explicit Stranger(int port, const char* address = kHere) : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in to{};
    to.sin_family = AF_INET;
    inet_pton(AF_INET, address, &to.sin_addr);
    to.sin_port = htons(static_cast<uint16_t>(port));
    connected_ = connect(socket_.fd(), reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0;
  }
  bool connected() const { return connected_; }
  void Say(const std::string& text) const {
    EXPECT_EQ(send(socket_.fd(), text.data(), text.size(), MSG_NOSIGNAL), static_cast<ssize_t>(text.size()));
  }
  // All that it hears until it is turned away.
  std::string Hear() const {
    std::string heard;
    char piece[256];
    for (ssize_t n = 0; (n = recv(socket_.fd(), piece, sizeof(piece), 0)) > 0;)
      heard.append(piece, static_cast<size_t>(n));
    return heard;
  }

 private:
  const Socket socket_;
  bool connected_ = false;
};

TEST(TcpStore, WhatOneSetsTheOthersRead) {
  TcpStore first(kHere, 0, /*serves=*/true, kLong, Secret());
  const auto second = Join(first);
  EXPECT_FALSE(second->Has("a"));
  EXPECT_THROW(second->Get("a"), std::runtime_error);
  const std::string binary("\0\n\xff", 3);
  first.Set("a", binary);
  EXPECT_TRUE(second->Has("a"));
  EXPECT_EQ(second->Get("a"), binary);
  second->Set("a", "");
  EXPECT_EQ(first.Get("a"), "");
  const std::string large(kStoreMostValueBytes, 'x');
  second->Set("large", large);
  EXPECT_EQ(first.Get("large"), large);
}

TEST(TcpStore, AdditionsOfAllAreCountedOnce) {
  TcpStore first(kHere, 0, /*serves=*/true, kLong, Secret());
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
  TcpStore first(kHere, 0, /*serves=*/true, kLong, Secret());
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
    const TcpStore free(kHere, 0, /*serves=*/true, kLong, Secret());
    port = free.port();
  }
  EXPECT_THROW(TcpStore(kHere, port, /*serves=*/false, milliseconds(30), Secret()), std::runtime_error);
  std::string read;
  std::thread early([&] {
    TcpStore store(kHere, port, /*serves=*/false, kLong, Secret());
    store.Wait("key", kLong);
    read = store.Get("key");
  });
  TcpStore first(kHere, port, /*serves=*/true, kLong, Secret());
  first.Set("key", "value");
  early.join();
  EXPECT_EQ(read, "value");
}

TEST(TcpStore, WhenTheFirstHasGoneEveryCallSaysSo) {
  auto first = std::make_unique<TcpStore>(kHere, 0, /*serves=*/true, kLong, Secret());
  const auto second = Join(*first);
  second->Set("a", "b");
  first.reset();
  EXPECT_THROW(second->Get("a"), std::runtime_error);
  EXPECT_THROW(second->Set("a", "c"), std::runtime_error);
}

TEST(TcpStore, APortThatIsTakenIsNamed) {
  const TcpStore first(kHere, 0, /*serves=*/true, kLong, Secret());
  try {
    const TcpStore second(kHere, first.port(), /*serves=*/true, kLong, Secret());
    FAIL() << "two listen at one port";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find(std::to_string(first.port())), std::string::npos)
        << error.what();
  }
}

// One that proves that it knows the secret and answers nothing after that: a call that waits for it ends when
// the store is shut.
TEST(TcpStore, ACallThatIsNotAnsweredEndsWithShut) {
  const std::vector<Socket> listens = ListenAt(kHere, 0);
  std::atomic<bool> ended{false};
  std::thread serves([&] {
    Socket peer;
    while (peer.fd() < 0) {
      bool out_of_descriptors = false;
      peer = AcceptOne(listens.front(), &out_of_descriptors);
      std::this_thread::sleep_for(milliseconds(1));
    }
    Challenger challenger(Secret(), kStorePurpose);
    EXPECT_EQ(send(peer.fd(), challenger.Challenge().data(), kChallengeBytes, 0),
              static_cast<ssize_t>(kChallengeBytes));
    while (challenger.left() > 0) {
      char piece[kClaimBytes];
      const ssize_t n = recv(peer.fd(), piece, challenger.left(), 0);
      std::string_view bytes(piece, static_cast<size_t>(std::max<ssize_t>(n, 0)));
      if (n > 0) (void)challenger.Take(&bytes);
    }
    EXPECT_EQ(send(peer.fd(), challenger.Verdict().data(), kVerdictBytes, 0),
              static_cast<ssize_t>(kVerdictBytes));
    while (!ended.load()) std::this_thread::sleep_for(milliseconds(1));
  });
  TcpStore store(kHere, PortOf(listens.front()), /*serves=*/false, kLong, Secret());
  std::thread asks([&] {
    EXPECT_THROW(store.Get("a"), std::runtime_error);
    ended.store(true);
  });
  while (!ended.load()) {
    store.Shut();
    std::this_thread::sleep_for(milliseconds(1));
  }
  asks.join();
  serves.join();
}

// Another program has the port: it is not taken for a meeting point, and nothing waits for it for ever.
TEST(TcpStore, OneThatDoesNotSpeakIsNoMeetingPoint) {
  const std::vector<Socket> listens = ListenAt(kHere, 0);
  EXPECT_THROW(TcpStore(kHere, PortOf(listens.front()), /*serves=*/false, milliseconds(50), Secret()),
               std::runtime_error);
}

TEST(TcpStore, StrangersAreTurnedAwayAndDisturbNobody) {
  TcpStore first(kHere, 0, /*serves=*/true, kLong, Secret());
  const Stranger http(first.port()), partial(first.port()), silent(first.port());
  http.Say("GET / HTTP/1.1\r\nHost: here\r\n\r\n");
  partial.Say("PST");
  // A challenge, perhaps a verdict, and no more.
  EXPECT_LE(http.Hear().size(), kChallengeBytes + kVerdictBytes);
  first.Set("a", "b");
  EXPECT_EQ(Join(first)->Get("a"), "b");
}

TEST(TcpStore, WhoDoesNotKnowTheSecretIsRefusedBeforeAnythingIsRead) {
  TcpStore first(kHere, 0, /*serves=*/true, kLong, Secret());
  first.Set("a", "b");
  EXPECT_THROW(
      TcpStore(kHere, first.port(), /*serves=*/false, kLong, *RankSecret::Of("another secret, as long")),
      RefusedConnection);
  // A request in place of the proof, right in every other way.
  StoreRequest request{.what = StoreAsks::kSet, .key_bytes = 1, .value_bytes = 1};
  const Stranger stranger(first.port());
  stranger.Say(std::string(reinterpret_cast<const char*>(&request), sizeof(request)) + "ac");
  EXPECT_LE(stranger.Hear().size(), kChallengeBytes + kVerdictBytes);
  EXPECT_EQ(first.Get("a"), "b");
  while (first.refused() < 2) std::this_thread::sleep_for(milliseconds(1));  // counted after it was told
}

// Strangers that connect and say nothing, more than the server listens to at once: it lets go of the oldest,
// and ranks are served beside the others.
TEST(TcpStore, SilentStrangersKeepNoRankWaiting) {
  TcpStore first(kHere, 0, /*serves=*/true, kLong, Secret());
  std::vector<std::unique_ptr<Stranger>> strangers;
  for (size_t i = 0; i < 2 * kMostUnproved; ++i)
    strangers.push_back(std::make_unique<Stranger>(first.port()));
  const auto second = Join(first);
  second->Set("a", "b");
  EXPECT_EQ(first.Get("a"), "b");
  EXPECT_EQ(strangers.front()->Hear().size(), kChallengeBytes) << "it is turned away";
}

TEST(TcpStore, WhatIsKeptForAllIsBounded) {
  TcpStore first(kHere, 0, /*serves=*/true, kLong, Secret());
  const auto second = Join(first);
  const std::string large(kStoreMostValueBytes, 'x');
  size_t kept = 0;
  EXPECT_THROW(
      {
        for (; kept < 10 * kStoreMostBytes / large.size(); ++kept) second->Set(std::to_string(kept), large);
      },
      RefusedByStore);
  EXPECT_LE(kept * large.size(), kStoreMostBytes);
  EXPECT_GE((kept + 1) * (large.size() + 256), kStoreMostBytes);
  // What was there is, what is no longer than before is taken, and so is what makes room.
  EXPECT_EQ(first.Get("0"), large);
  first.Set("0", "small");
  first.Set("another", "small too");
  EXPECT_EQ(second->Get("another"), "small too");
  EXPECT_THROW(first.Set("too long", large + "x"), RefusedByStore);
  EXPECT_THROW(first.Set(std::string(kStoreMostKeyBytes + 1, 'k'), ""), RefusedByStore);
  EXPECT_EQ(second->Get("0"), "small") << "a refusal ends nothing";
}

TEST(TcpStore, SumsBeyond64BitsAreRefused) {
  TcpStore first(kHere, 0, /*serves=*/true, kLong, Secret());
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max(), kLeast = std::numeric_limits<int64_t>::min();
  EXPECT_EQ(first.Add("sum", kMost), kMost);
  EXPECT_THROW(first.Add("sum", 1), RefusedByStore);
  EXPECT_EQ(first.Add("sum", 0), kMost);
  EXPECT_EQ(first.Add("sum", kLeast), -1);
  EXPECT_THROW(first.Add("sum", kLeast), RefusedByStore);
  EXPECT_EQ(first.Add("sum", 0), -1);
}

// All addresses of the loopback are this machine's: only the one that the ranks were told listens.
TEST(TcpStore, ListensWhereTheRanksAreToldToMeetAndNowhereElse) {
  const TcpStore first(kHere, 0, /*serves=*/true, kLong, Secret());
  EXPECT_TRUE(Stranger(first.port()).connected());
  EXPECT_FALSE(Stranger(first.port(), "127.0.0.2").connected());
}

// An address that is translated on its way is not this machine's: all of its own listen.
TEST(TcpStore, ListensEverywhereWhereTheAddressIsNotItsOwn) {
  const std::vector<Socket> listens = ListenAt("192.0.2.1", 0);  // of documentation, nobody's
  ASSERT_EQ(listens.size(), 1u);
  EXPECT_TRUE(Stranger(PortOf(listens.front())).connected());
}

}  // namespace
}  // namespace penstock::zero::tcp_store_test
