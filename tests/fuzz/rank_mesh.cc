// One connection of the ranks' mesh, in whole conversations: the proof that opens it, then messages that are
// started, dropped and asked for, and a peer that sends right and wrong frames, in pieces. Input: steps of
// one byte, and what each of them needs. Nothing but memory of messages under way may be read or written, no
// byte of a message is sent twice, and nothing is sent unasked.
#include <sys/uio.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <memory>
#include <string>

#include "tests/fuzz/fuzz.h"
#include "zero/ranks/handshake.h"
#include "zero/ranks/mesh_link.h"

namespace penstock::fuzz {
namespace {

using namespace zero;

class Conversation {
 public:
  explicit Conversation(std::string_view input) : input_(input) {}

  void Run() {
    if (!Open()) return Refused(absl::InvalidArgumentError("no proof"));
    while (!input_.empty()) Step(Byte());
    if (link_.broken().empty() && over_ > 0) {
      Accepted();
    } else {
      Refused(absl::InvalidArgumentError(link_.broken().empty() ? "no message" : link_.broken()));
    }
    while (!messages_.empty()) Drop(messages_.begin());
  }

 private:
  struct Message {
    MeshLink::End end;
    std::unique_ptr<char[]> memory;  // of its size exactly: a sanitizer sees each byte beyond it
    size_t sent = 0;
  };

  unsigned Byte() {
    if (input_.empty()) return 0;
    const auto byte = static_cast<uint8_t>(input_.front());
    input_.remove_prefix(1);
    return byte;
  }

  // The first byte says how the peer begins: rightly, or with bytes of the input.
  bool Open() {
    const RankSecret secret = *RankSecret::Of("the secret that is known");
    Challenger challenger(secret, "mesh", HashBytes{});
    const unsigned how = Byte();
    std::string claim(input_.substr(0, kClaimBytes));
    const bool right = how % 8 != 0;
    if (right) {
      claim = *Claimant(secret, "mesh", 1, HashBytes{}).Claim(challenger.Challenge());
    } else {
      input_.remove_prefix(claim.size());
    }
    std::string_view first = std::string_view(claim).substr(0, how % (kClaimBytes + 1));
    std::string_view rest = std::string_view(claim).substr(first.size());
    Challenger::State state = challenger.Take(&first);
    if (state == Challenger::State::kWaits) state = challenger.Take(&rest);
    FUZZ_CHECK(!right || state == Challenger::State::kAccepted);
    FUZZ_CHECK(right || state != Challenger::State::kAccepted);  // nobody guesses 32 bytes
    FUZZ_CHECK(challenger.Verdict().size() == kVerdictBytes);
    return right;
  }

  void Step(unsigned step) {
    const uint64_t number = step / 8 % 4;
    switch (step % 8) {
      case 0:
      case 1:
        return Start(number, /*sends=*/step % 8 == 0);
      case 2: {  // the peer asks
        const unsigned size = Byte();
        return Frame(MeshKind::kAsks, number, Size(size));
      }
      case 3: {  // the peer sends a piece
        const unsigned size = Byte();
        Frame(MeshKind::kPiece, number, Size(size));
        return Feed(std::string(Byte(), 'p'));
      }
      case 4: {  // anything
        const std::string bytes(input_.substr(0, Byte()));
        input_.remove_prefix(bytes.size());
        return Feed(bytes);
      }
      case 5:
        return Send(Byte());
      case 6:
        return Send(SIZE_MAX);
      default:
        for (auto each = messages_.begin(); each != messages_.end(); ++each) {
          if (each->end.number == number) return Drop(each);
        }
    }
  }

  // 1 to 64 bytes, and some beyond a piece.
  static size_t Size(unsigned byte) { return byte < 250 ? byte % 64 + 1 : kMeshPieceBytes + byte; }

  void Start(uint64_t number, bool sends) {
    const size_t bytes = Size(Byte());
    if (!link_.broken().empty()) return;
    for (const Message& each : messages_) {
      if (each.end.number == number && each.end.sends == sends && !each.end.over) return;
    }
    Message& message = messages_.emplace_back();
    message.memory = std::make_unique<char[]>(bytes);
    std::memset(message.memory.get(), sends ? 's' : '.', bytes);
    message.end.sends = sends;
    message.end.data = message.memory.get();
    message.end.bytes = bytes;
    link_.Start(&message.end, number);
  }

  void Drop(std::list<Message>::iterator at) {
    if (at->end.over) ++over_;
    link_.Drop(&at->end);
    messages_.erase(at);  // and its memory is gone
  }

  // Whose memory this is; null: no message's that is under way.
  Message* Of(const void* data, size_t bytes) {
    const auto* const at = static_cast<const char*>(data);
    for (Message& each : messages_) {
      if (!each.end.over && at >= each.memory.get() && at + bytes <= each.memory.get() + each.end.bytes)
        return &each;
    }
    return nullptr;
  }

  void Frame(MeshKind kind, uint64_t number, uint64_t bytes) {
    const MeshFrame frame{.kind = kind, .number = number, .bytes = bytes};
    Feed(std::string(reinterpret_cast<const char*>(&frame), sizeof(frame)));
  }

  void Feed(std::string_view bytes) {
    while (!bytes.empty() && link_.broken().empty()) {
      const std::span<char> place = link_.Place();
      FUZZ_CHECK(!place.empty());
      const Message* const of = Of(place.data(), place.size());
      FUZZ_CHECK(of != nullptr ? !of->end.sends : place.size() <= sizeof(MeshFrame));
      const size_t n = std::min(place.size(), bytes.size());
      std::memcpy(place.data(), bytes.data(), n);
      link_.Received(n);
      bytes.remove_prefix(n);
    }
    Count();
  }

  void Send(size_t most) {
    size_t sent = 0;
    while (sent < most && link_.HasToSend() && link_.broken().empty()) {
      size_t n = 0;
      for (const iovec& part : link_.ToSend()) {
        const size_t bytes = std::min(part.iov_len, most - sent - n);
        Message* const of = Of(part.iov_base, part.iov_len);
        FUZZ_CHECK(of != nullptr ? of->end.sends : part.iov_len <= sizeof(MeshFrame));
        // Every byte is read, for the sanitizer.
        const auto* const text = static_cast<const char*>(part.iov_base);
        if (of != nullptr) {
          FUZZ_CHECK(std::all_of(text, text + part.iov_len, [](char c) { return c == 's'; }));
          of->sent += bytes;
          FUZZ_CHECK(of->sent <= of->end.bytes);
        }
        n += bytes;
        if (bytes < part.iov_len) break;
      }
      link_.Sent(n);
      sent += n;
    }
    Count();
  }

  void Count() {
    if (!link_.broken().empty()) FUZZ_CHECK(!link_.HasToSend());
    for (auto each = messages_.begin(); each != messages_.end();) {
      const auto at = each++;
      if (!at->end.over) continue;
      FUZZ_CHECK(at->end.done == at->end.bytes);
      FUZZ_CHECK(!at->end.sends || at->sent == at->end.bytes);
      Drop(at);
    }
  }

  std::string_view input_;
  MeshLink link_;
  std::list<Message> messages_;
  size_t over_ = 0;
};

}  // namespace
}  // namespace penstock::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  penstock::fuzz::Conversation(penstock::fuzz::TextOf(data, bytes)).Run();
  return 0;
}
