// The serving end of the ranks' meeting point, in whole conversations: connections are opened and closed,
// prove that they know the secret or do not, ask, or send anything, in pieces; time passes. Input: steps of
// one byte, and what each of them needs. A model of the values says what each answer must be, as long as only
// whole requests were sent. The input is also read as a rank's position.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <map>
#include <string>

#include "absl/strings/numbers.h"
#include "tests/fuzz/fuzz.h"
#include "zero/ranks/rank_position.h"
#include "zero/ranks/sockets.h"
#include "zero/ranks/store_service.h"

namespace penstock::fuzz {
namespace {

using namespace zero;

constexpr unsigned kPeers = 4;
constexpr size_t kMostUnproved = kChallengeBytes + kVerdictBytes;  // bytes that a stranger hears

class Conversation {
 public:
  explicit Conversation(std::string_view input) : input_(input) {}

  void Run() {
    while (!input_.empty()) {
      const unsigned step = Byte();
      Step(static_cast<int>(step / 16 % kPeers), step % 16);
      size_t kept = 0;
      for (const auto& [key, value] : values_) kept += key.size() + value.size() + kStoreEntryBytes;
      FUZZ_CHECK(!model_knows_ || service_.kept_bytes() == kept);
      FUZZ_CHECK(service_.kept_bytes() <= kStoreMostBytes);
      FUZZ_CHECK(service_.under_way_bytes() <= kStoreMostUnderWay + kPeers * kMostUnproved);
    }
    while (!peers_.empty()) Close(peers_.begin()->first);
    FUZZ_CHECK(service_.under_way_bytes() == 0);
    if (answers_ > 0) {
      Accepted();
    } else {
      Refused(absl::InvalidArgumentError("nobody was answered"));
    }
  }

 private:
  struct Peer {
    HashBytes random{};
    bool proved = false, said_anything = false;
    size_t heard = 0;  // bytes, until it has proved
  };

  unsigned Byte() {
    if (input_.empty()) return 0;
    const auto byte = static_cast<uint8_t>(input_.front());
    input_.remove_prefix(1);
    return byte;
  }
  std::string Some(size_t bytes) {
    const std::string some(input_.substr(0, bytes));
    input_.remove_prefix(some.size());
    return some;
  }

  void Step(int peer, unsigned what) {
    if (what == 0) {
      if (peers_.count(peer) == 0) Open(peer);
      return;
    }
    if (what == 1) {
      now_ += std::chrono::seconds(Byte() % 16);
      for (const int overdue : service_.Overdue(now_)) {
        FUZZ_CHECK(!peers_.at(overdue).proved);
        Close(overdue);
      }
      FUZZ_CHECK(!service_.NextDeadline().has_value() || *service_.NextDeadline() > now_);
      return;
    }
    if (peers_.count(peer) == 0) return;
    switch (what) {
      case 2:
        return Close(peer);
      case 3:
        (void)Hear(peer, Byte());
        return;
      case 4:
      case 5:
        Hear(peer, SIZE_MAX);
        return Prove(peer, secret_);
      case 6:
        Hear(peer, SIZE_MAX);
        return Prove(peer, another_);
      case 7:
        if (peers_.at(peer).proved) model_knows_ = false;
        (void)Say(peer, Some(Byte()));
        return;
      default:
        Hear(peer, SIZE_MAX);
        if (peers_.at(peer).proved) Ask(peer);
    }
  }

  void Open(int peer) {
    Peer& opened = peers_[peer];
    ++connections_;
    std::memcpy(opened.random.data(), &connections_, sizeof(connections_));
    service_.Open(peer, now_, opened.random);
  }
  void Close(int peer) {
    service_.Close(peer);
    peers_.erase(peer);
  }

  // As the driver does: nothing is received while there is something to send. false: it was closed.
  bool Say(int peer, std::string_view bytes) {
    if (bytes.empty() || !service_.ToSend(peer).empty()) return true;
    peers_.at(peer).said_anything = true;
    if (service_.Receive(peer, bytes)) return true;
    Hear(peer, SIZE_MAX);
    Close(peer);
    return false;
  }

  // All or a part of what there is to send.
  std::string Hear(int peer, size_t most) {
    Peer& by = peers_.at(peer);
    const std::string heard(service_.ToSend(peer).substr(0, most));
    if (!by.proved) {
      by.heard += heard.size();
      FUZZ_CHECK(by.heard <= kMostUnproved);
    }
    FUZZ_CHECK(heard.size() <= std::max(kMostUnproved, sizeof(StoreAnswer) + kStoreMostValueBytes));
    service_.Sent(peer, heard.size());
    return heard;
  }

  void Prove(int peer, const RankSecret& secret) {
    const Peer before = peers_.at(peer);
    if (before.proved) return;
    Claimant claimant(secret, kStorePurpose, 1, HashBytes{});
    const std::string claim = *claimant.Claim(Challenger(secret, kStorePurpose, before.random).Challenge());
    const size_t cut = Byte() % (kClaimBytes + 1);
    const uint64_t refused = service_.refused();
    const bool stays = Say(peer, claim.substr(0, cut)) && Say(peer, claim.substr(cut));
    if (before.said_anything) return;  // what was sent before belongs to the claim
    FUZZ_CHECK(stays == (&secret == &secret_));
    FUZZ_CHECK(service_.refused() == refused + (stays ? 0 : 1));
    if (!stays) return;
    FUZZ_CHECK(claimant.Judge(Hear(peer, SIZE_MAX)).ok());
    peers_.at(peer).proved = true;
  }

  // A whole request in two pieces, and its answer.
  void Ask(int peer) {
    static constexpr StoreAsks kAsks[] = {StoreAsks::kSet, StoreAsks::kGet, StoreAsks::kHas, StoreAsks::kAdd};
    const unsigned what = Byte();
    StoreRequest request{.what = kAsks[what % 4]};
    const std::string key(1 + what / 4 % 4, static_cast<char>(Byte()));
    std::string value;
    if (request.what == StoreAsks::kSet) {
      const unsigned bytes = Byte() * 257;
      value = what >= 128 ? std::to_string(static_cast<int64_t>(uint64_t{bytes} << 48))
                          : std::string(std::min<size_t>(bytes, kStoreMostValueBytes), 'v');
    } else if (request.what == StoreAsks::kAdd) {
      value = std::to_string(static_cast<int64_t>(uint64_t{Byte()} << 56));
    }
    request.key_bytes = static_cast<uint32_t>(key.size());
    request.value_bytes = static_cast<uint32_t>(value.size());
    std::string all(reinterpret_cast<const char*>(&request), sizeof(request));
    all += key + value;
    const size_t cut = Byte() % all.size();
    if (!Say(peer, all.substr(0, cut)) || !Say(peer, all.substr(cut))) {
      FUZZ_CHECK(!model_knows_);
      return;
    }
    const std::string heard = Hear(peer, SIZE_MAX);
    if (!model_knows_) return;  // a part of a request may have been sent before
    StoreAnswer answer;
    FUZZ_CHECK(heard.size() >= sizeof(answer));
    std::memcpy(&answer, heard.data(), sizeof(answer));
    FUZZ_CHECK(heard.size() == sizeof(answer) + answer.value_bytes);
    ++answers_;
    Expect(request.what, key, value, answer.says, heard.substr(sizeof(answer)));
  }

  void Expect(StoreAsks what, const std::string& key, std::string value, StoreSays says,
              const std::string& content) {
    const auto at = values_.find(key);
    const bool there = at != values_.end();
    if (what == StoreAsks::kGet || what == StoreAsks::kHas) {
      FUZZ_CHECK(says == (there ? StoreSays::kFound : StoreSays::kMissing));
      FUZZ_CHECK(content == (there && what == StoreAsks::kGet ? at->second : ""));
      return;
    }
    if (what == StoreAsks::kAdd) {
      int64_t sum = 0, number = 0;
      FUZZ_CHECK(absl::SimpleAtoi(value, &number));
      if (there && !absl::SimpleAtoi(at->second, &sum)) {
        FUZZ_CHECK(says == StoreSays::kNoNumber);
        return;
      }
      const bool too_large = number > 0 ? sum > std::numeric_limits<int64_t>::max() - number
                                        : sum < std::numeric_limits<int64_t>::min() - number;
      if (too_large) {
        FUZZ_CHECK(says == StoreSays::kTooLarge);
        return;
      }
      value = std::to_string(sum + number);
      FUZZ_CHECK(content == value || says == StoreSays::kFull);
    }
    if (says == StoreSays::kFull) {
      // Only where little is left.
      FUZZ_CHECK(service_.kept_bytes() + key.size() + value.size() + kStoreEntryBytes > kStoreMostBytes);
      return;
    }
    FUZZ_CHECK(says == (there ? StoreSays::kFound : StoreSays::kMissing));
    values_[key] = value;
  }

  std::string_view input_;
  const RankSecret secret_ = *RankSecret::Of("the secret that is known");
  const RankSecret another_ = *RankSecret::Of("a secret that is another");
  StoreService service_{secret_};
  StoreService::Clock::time_point now_{};
  std::map<int, Peer> peers_;
  std::map<std::string, std::string> values_;
  bool model_knows_ = true;
  uint64_t connections_ = 0, answers_ = 0;
};

void ReadPosition(std::string_view text) {
  const auto position = RankPosition::FromText(text);
  if (!position.ok()) return Refused(position.status());
  const std::string again = position->ToText();
  FUZZ_CHECK(again.size() <= kStoreMostValueBytes || position->calls.size() > 16);
  FUZZ_CHECK(RankPosition::FromText(again).ok());
  (void)ComparePositions({*position, RankPosition{.ended = true}, *position}, "the end");
}

}  // namespace
}  // namespace penstock::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  const std::string_view input = penstock::fuzz::TextOf(data, bytes);
  penstock::fuzz::ReadPosition(input);
  penstock::fuzz::Conversation(input).Run();
  return 0;
}
