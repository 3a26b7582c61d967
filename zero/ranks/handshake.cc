#include "zero/ranks/handshake.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/io_error.h"

namespace penstock::zero {
namespace {

constexpr std::string_view kRanksMark = "PSTRANK2";
static_assert(kRanksMark.size() == kMarkBytes);
constexpr uint64_t kRightProof = 1, kWrongProof = 0;

template <typename T>
void AppendBytes(std::string* to, const T& value) {
  to->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <typename T>
T BytesAt(std::string_view bytes, size_t offset) {
  T value{};
  std::memcpy(&value, bytes.data() + offset, sizeof(value));
  return value;
}

}  // namespace

absl::StatusOr<RankSecret> RankSecret::Of(std::string_view words) {
  if (words.size() < kLeastSecretBytes) {
    return absl::InvalidArgumentError(absl::StrCat("the secret of the ranks has ", words.size(),
                                                   " bytes: it needs at least ", kLeastSecretBytes,
                                                   ", at random, as from `openssl rand -hex 32`"));
  }
  return RankSecret(words);
}

RankSecret::RankSecret(std::string_view words)
    : key_(KeyedHash({}, absl::StrCat("penstock ranks ", absl::string_view(words.data(), words.size())))) {}

HashBytes RankSecret::Proof(End end, std::string_view purpose, uint32_t number, const HashBytes& challenge,
                            const HashBytes& claim) const {
  std::string of(1, static_cast<char>(end));
  AppendBytes(&of, number);
  AppendBytes(&of, challenge);
  AppendBytes(&of, claim);
  of.append(purpose);  // the last: all before it has a fixed size
  return KeyedHash(key_, of);
}

HashBytes RandomBytes() {
  HashBytes bytes{};
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t n = getrandom(bytes.data() + done, bytes.size() - done, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) throw std::runtime_error(absl::StrCat("getrandom: ", ErrnoText(errno)));
    done += static_cast<size_t>(n);
  }
  return bytes;
}

Challenger::Challenger(const RankSecret& secret, std::string purpose, const HashBytes& random)
    : secret_(secret), purpose_(std::move(purpose)), random_(random) {}

std::string Challenger::Challenge() const {
  std::string challenge(kRanksMark);
  AppendBytes(&challenge, random_);
  return challenge;
}

Challenger::State Challenger::Take(std::string_view* bytes) {
  PENSTOCK_CHECK(state_ == State::kWaits, "a second claim on one connection");
  const size_t taken = std::min(bytes->size(), kClaimBytes - received_.size());
  received_.append(bytes->substr(0, taken));
  bytes->remove_prefix(taken);
  if (received_.size() < kClaimBytes) {
    // Another language is known by its first bytes.
    const size_t compared = std::min(received_.size(), kMarkBytes);
    if (received_.compare(0, compared, kRanksMark.substr(0, compared)) != 0) state_ = State::kRefused;
    return state_;
  }
  const auto number = BytesAt<uint32_t>(received_, kMarkBytes);
  const auto claim = BytesAt<HashBytes>(received_, kMarkBytes + 8);
  const auto proof = BytesAt<HashBytes>(received_, kMarkBytes + 8 + kHashBytes);
  const HashBytes right = secret_.Proof(RankSecret::End::kConnects, purpose_, number, random_, claim);
  if (received_.compare(0, kMarkBytes, kRanksMark) != 0 || !SameInConstantTime(proof, right)) {
    state_ = State::kRefused;
    return state_;
  }
  number_ = number;
  proof_ = secret_.Proof(RankSecret::End::kServes, purpose_, number, random_, claim);
  state_ = State::kAccepted;
  return state_;
}

std::string Challenger::Verdict() const {
  std::string verdict;
  AppendBytes(&verdict, state_ == State::kAccepted ? kRightProof : kWrongProof);
  AppendBytes(&verdict, proof_);
  return verdict;
}

Claimant::Claimant(const RankSecret& secret, std::string purpose, uint32_t number, const HashBytes& random)
    : secret_(secret), purpose_(std::move(purpose)), number_(number), random_(random) {}

absl::StatusOr<std::string> Claimant::Claim(std::string_view challenge) {
  if (challenge.size() != kChallengeBytes || challenge.substr(0, kMarkBytes) != kRanksMark) {
    return absl::InvalidArgumentError("what answers there is not a rank of this version of Penstock");
  }
  challenge_ = BytesAt<HashBytes>(challenge, kMarkBytes);
  std::string claim(kRanksMark);
  AppendBytes(&claim, uint64_t{number_});
  AppendBytes(&claim, random_);
  AppendBytes(&claim, secret_.Proof(RankSecret::End::kConnects, purpose_, number_, challenge_, random_));
  return claim;
}

absl::Status Claimant::Judge(std::string_view verdict) const {
  const absl::Status denied = absl::PermissionDeniedError("it does not know the secret that this rank knows");
  if (verdict.size() != kVerdictBytes || BytesAt<uint64_t>(verdict, 0) != kRightProof) return denied;
  const HashBytes right = secret_.Proof(RankSecret::End::kServes, purpose_, number_, challenge_, random_);
  return SameInConstantTime(BytesAt<HashBytes>(verdict, 8), right) ? absl::OkStatus() : denied;
}

}  // namespace penstock::zero
