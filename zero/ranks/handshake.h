// Who may speak to a rank: both ends of a connection prove that they know the run's secret, before either
// interprets anything else that the other one sends. The secret itself is never sent.
//
//   serving end    -> challenge: a mark, 32 random bytes
//   connecting end -> claim: the mark, its number, 32 random bytes of its own, its proof
//   serving end    -> verdict: whether the proof is right, and where it is, its own proof
//
// A proof is KeyedHash under a key made of the secret, of which end proves, of the connection's purpose, of
// the claimed number and of both ends' random bytes: one that was heard is of no use a second time, in the
// other direction, or for another purpose. What is sent afterwards is neither encrypted nor signed.
//
// All messages have a fixed size. Nothing here knows sockets.
#ifndef PENSTOCK_ZERO_RANKS_HANDSHAKE_H_
#define PENSTOCK_ZERO_RANKS_HANDSHAKE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "zero/ranks/keyed_hash.h"

namespace penstock::zero {

inline constexpr size_t kMarkBytes = 8;
inline constexpr size_t kChallengeBytes = kMarkBytes + kHashBytes;
inline constexpr size_t kClaimBytes = kMarkBytes + 8 + 2 * kHashBytes;
inline constexpr size_t kVerdictBytes = 8 + kHashBytes;
// A shorter secret could be guessed.
inline constexpr size_t kLeastSecretBytes = 16;

// What all ranks of a run know and nobody else does.
class RankSecret {
 public:
  // kInvalidArgument: fewer than kLeastSecretBytes.
  static absl::StatusOr<RankSecret> Of(std::string_view words);

  enum class End : char { kServes = 's', kConnects = 'c' };
  HashBytes Proof(End end, std::string_view purpose, uint32_t number, const HashBytes& challenge,
                  const HashBytes& claim) const;

 private:
  explicit RankSecret(std::string_view words);
  HashBytes key_;
};

// 32 bytes of the kernel's random numbers. Throws std::runtime_error where it gives none.
HashBytes RandomBytes();

// The serving end of one connection.
class Challenger {
 public:
  Challenger(const RankSecret& secret, std::string purpose, const HashBytes& random = RandomBytes());
  // The first thing to send.
  std::string Challenge() const;

  enum class State { kWaits, kAccepted, kRefused };
  // Takes what the connecting end sent, up to the end of its claim: removes that from `bytes`. kAccepted and
  // kRefused: Verdict() is to be sent; after the latter the connection is to be closed.
  State Take(std::string_view* bytes);
  std::string Verdict() const;
  // How many bytes of the claim are still to come.
  size_t left() const { return kClaimBytes - received_.size(); }
  // What the connecting end says that it is. Must be asked for after kAccepted only.
  uint32_t number() const { return number_; }

 private:
  const RankSecret secret_;
  const std::string purpose_;
  const HashBytes random_;
  std::string received_;
  State state_ = State::kWaits;
  uint32_t number_ = 0;
  HashBytes proof_{};  // of this end
};

// The connecting end of one connection.
class Claimant {
 public:
  Claimant(const RankSecret& secret, std::string purpose, uint32_t number,
           const HashBytes& random = RandomBytes());
  // Returns the claim that answers a challenge of kChallengeBytes. kInvalidArgument: what serves there is not
  // a Penstock of this version.
  absl::StatusOr<std::string> Claim(std::string_view challenge);
  // Judges a verdict of kVerdictBytes. kPermissionDenied: the ends do not know the same secret.
  absl::Status Judge(std::string_view verdict) const;

 private:
  const RankSecret secret_;
  const std::string purpose_;
  const uint32_t number_;
  const HashBytes random_;
  HashBytes challenge_{};
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_RANKS_HANDSHAKE_H_
