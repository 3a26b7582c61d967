// Who may speak to a rank: the hash, both ends' proofs, and what does not pass for one.
#include "zero/ranks/handshake.h"

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"

namespace penstock::zero::handshake_test {
namespace {

RankSecret Secret(std::string_view words = "sixteen bytes at least") { return *RankSecret::Of(words); }

std::string Hex(const HashBytes& hash) {
  return absl::BytesToHexString({reinterpret_cast<const char*>(hash.data()), hash.size()});
}

// As Python's hashlib.blake2b(data, digest_size=32, key=key) has them.
TEST(KeyedHash, HasTheKnownAnswersOfBlake2b) {
  std::vector<uint8_t> key(64);
  std::iota(key.begin(), key.end(), uint8_t{0});
  std::string data;
  for (int i = 0; i < 1000; ++i) data.push_back(static_cast<char>(i % 251));
  const struct {
    size_t key;
    std::string_view data;
    const char* hash;
  } known[] = {
      {0, "", "0e5751c026e543b2e8ab2eb06099daa1d1e5df47778f7787faab45cdf12fe3a8"},
      {0, "abc", "bddd813c634239723171ef3fee98579b94964e3bb1cb3e427262c8c068d52319"},
      {32, "", "4e51e7a913fc80137da52880fecca175bf81e117d5c68126dc2774033517ea0d"},
      {32, "abc", "d63a32d3e44738d7907f964316c241adaba0abfeabc32349677578a15a203f7f"},
      {64, std::string_view(data).substr(0, 127),
       "7c0bfe069b3ba04e2c88bac200999e2b1c9ef2f96f9ffa69b665efca9230c9ab"},
      {64, std::string_view(data).substr(0, 128),
       "6a591b356f19ca93ae2bcc7406653ff34aea53cea58bec62803e571d94944165"},
      {64, std::string_view(data).substr(0, 129),
       "20f607da31ed9652deecf4ef78905d4916ba6f5df37bfc4b610d50ba5447623a"},
      {64, std::string_view(data).substr(0, 256),
       "5c73ab0067eed3fbff21ea081698f37a1420623e07e033305fec788ebd36c6ab"},
      {64, std::string_view(data).substr(0, 257),
       "42744b5cb233ba363c32253312cb72f789e2036dc614159703d5ba415036f929"},
      {0, data, "b372d0608f720c8c3dd41e9c8eecb10143b41abe520b616607e754bf79c08331"},
      {1, data, "99754e85e163840f2952909351986ef421bb1ee8b75a9d59d7d265c183e15e1c"},
  };
  for (const auto& each : known) {
    EXPECT_EQ(Hex(KeyedHash(std::span(key).first(each.key), each.data)), each.hash)
        << "a key of " << each.key << ", " << each.data.size() << " bytes";
  }
  HashBytes a{}, b{};
  EXPECT_TRUE(SameInConstantTime(a, b));
  b.back() = 1;
  EXPECT_FALSE(SameInConstantTime(a, b));
}

TEST(Handshake, BothEndsKnowTheSecretOfEachOther) {
  Challenger serves(Secret(), "mesh");
  Claimant connects(Secret(), "mesh", 7);
  const auto claim = connects.Claim(serves.Challenge());
  ASSERT_TRUE(claim.ok()) << claim.status();
  ASSERT_EQ(claim->size(), kClaimBytes);
  // In pieces, and what follows is left.
  std::string_view first = std::string_view(*claim).substr(0, 3);
  EXPECT_EQ(serves.Take(&first), Challenger::State::kWaits);
  EXPECT_TRUE(first.empty());
  const std::string more = claim->substr(3) + "next";
  std::string_view rest = more;
  EXPECT_EQ(serves.Take(&rest), Challenger::State::kAccepted);
  EXPECT_EQ(rest, "next");
  EXPECT_EQ(serves.number(), 7u);
  EXPECT_TRUE(connects.Judge(serves.Verdict()).ok());
  // The secret is in nothing that was sent.
  for (const std::string& sent : {serves.Challenge(), *claim, serves.Verdict()})
    EXPECT_EQ(sent.find("sixteen"), std::string::npos);
}

// What does not open a connection: every other byte of a claim, another secret, purpose or number, a claim
// that was heard on another connection, and the serving end's own words.
TEST(Handshake, NothingElsePassesForAProof) {
  const HashBytes random = RandomBytes();
  const Challenger serves(Secret(), "store", random);
  const std::string right = *Claimant(Secret(), "store", 1).Claim(serves.Challenge());
  const auto judged = [&](std::string claim, const HashBytes& challenge) {
    Challenger fresh(Secret(), "store", challenge);
    std::string_view bytes = claim;
    const Challenger::State state = fresh.Take(&bytes);
    // Whoever is refused learns nothing that a proof could be made of.
    if (state == Challenger::State::kRefused) {
      EXPECT_EQ(fresh.Verdict(), std::string(kVerdictBytes, '\0'));
    }
    return state;
  };
  EXPECT_EQ(judged(right, random), Challenger::State::kAccepted);
  EXPECT_EQ(judged(right, RandomBytes()), Challenger::State::kRefused) << "heard on another connection";
  for (size_t i = 0; i < right.size(); ++i) {
    if (i >= kMarkBytes + 4 && i < kMarkBytes + 8) continue;  // unused
    std::string wrong = right;
    wrong[i] = static_cast<char>(wrong[i] ^ 1);
    EXPECT_EQ(judged(wrong, random), Challenger::State::kRefused) << "byte " << i;
  }
  EXPECT_EQ(
      judged(*Claimant(Secret("another secret, as long"), "store", 1).Claim(serves.Challenge()), random),
      Challenger::State::kRefused);
  EXPECT_EQ(judged(*Claimant(Secret(), "mesh", 1).Claim(serves.Challenge()), random),
            Challenger::State::kRefused);
  EXPECT_EQ(judged("GET / HTTP/1.1\r\n", random), Challenger::State::kRefused);
  EXPECT_EQ(judged(right.substr(0, kMarkBytes - 1) + "?", random), Challenger::State::kRefused);
}

TEST(Handshake, TheConnectingEndIsNotTakenInEither) {
  Claimant connects(Secret(), "store", 1);
  EXPECT_FALSE(connects.Claim(std::string(kChallengeBytes, 'x')).ok());
  EXPECT_FALSE(connects.Claim("").ok());
  Challenger knows_another(Secret("another secret, as long"), "store");
  const std::string claim = *connects.Claim(knows_another.Challenge());
  EXPECT_EQ(connects.Judge("").code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(connects.Judge(knows_another.Verdict()).code(), absl::StatusCode::kPermissionDenied);
  // Its own proof, sent back to it.
  std::string reflected(8, '\0');
  reflected[0] = 1;
  reflected += claim.substr(claim.size() - kHashBytes);
  EXPECT_EQ(connects.Judge(reflected).code(), absl::StatusCode::kPermissionDenied);
}

TEST(Handshake, AShortSecretIsRefused) {
  const auto secret = RankSecret::Of("guess me");
  EXPECT_EQ(secret.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(secret.status().message(), "8 bytes")) << secret.status();
  EXPECT_FALSE(absl::StrContains(secret.status().message(), "guess")) << "a secret is not printed";
}

}  // namespace
}  // namespace penstock::zero::handshake_test
