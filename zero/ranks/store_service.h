// The serving end of a TcpStore (tcp_store.h), without sockets: values by their keys, and what each
// connection has sent and is still to be sent. A client that has not proved that it knows the run's secret
// (handshake.h) gets no other answer.
//
// Everything that a peer sends is checked, and what is kept for all peers together is bounded: a value too
// many is refused, a connection that sends what no rank sends is closed.
#ifndef PENSTOCK_ZERO_RANKS_STORE_SERVICE_H_
#define PENSTOCK_ZERO_RANKS_STORE_SERVICE_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "zero/ranks/handshake.h"

namespace penstock::zero {

inline constexpr const char* kStorePurpose = "store";

// A request: the mark, what is asked, bytes of key and value, and both. An answer: what became of it, bytes
// of its value, and that. Numbers as they lie in memory: all ranks run the same program.
inline constexpr uint32_t kStoreMark = 0x32545350;  // "PST2"
enum class StoreAsks : uint8_t { kSet = 's', kGet = 'g', kHas = 'h', kAdd = 'a' };
struct StoreRequest {
  uint32_t mark = kStoreMark;
  StoreAsks what = StoreAsks::kHas;
  std::array<uint8_t, 3> unused{};
  uint32_t key_bytes = 0;
  uint32_t value_bytes = 0;
};
enum class StoreSays : uint32_t {
  kMissing = 0,   // there is no such key (kAdd, kSet: there was none)
  kFound = 1,     // there is (was) one
  kFull = 2,      // refused: kStoreMostBytes
  kNoNumber = 3,  // kAdd refused: one of the two is no number
  kTooLarge = 4,  // kAdd refused: the sum is beyond 64 bits
};
struct StoreAnswer {
  StoreSays says = StoreSays::kMissing;
  uint32_t value_bytes = 0;
};

inline constexpr size_t kStoreMostKeyBytes = 4 << 10;
inline constexpr size_t kStoreMostValueBytes = 64 << 10;
// Of all keys and values, with kStoreEntryBytes for each.
inline constexpr size_t kStoreMostBytes = 16 << 20;
inline constexpr size_t kStoreEntryBytes = 128;
// Of what has been received in part and what is still to be sent, over all connections.
inline constexpr size_t kStoreMostUnderWay = 8 << 20;

class StoreService {
 public:
  using Clock = std::chrono::steady_clock;
  explicit StoreService(const RankSecret& secret) : secret_(secret) {}

  // A connection begins; `peer` is a name that no other open one has. ToSend(peer) is its challenge.
  void Open(int peer, Clock::time_point now, const HashBytes& random = RandomBytes());
  // Takes bytes that `peer` sent. false: it is to be closed, once ToSend(peer) has been sent.
  bool Receive(int peer, std::string_view bytes);
  // What is to be sent to `peer`. As long as there is something, nothing more is to be received from it.
  std::string_view ToSend(int peer) const;
  void Sent(int peer, size_t bytes);
  // The connection is gone.
  void Close(int peer);

  // Returns the connections that are to be closed because they have not proved in time that they know the
  // secret, or because younger ones wait for their turn.
  std::vector<int> Overdue(Clock::time_point now) const;
  // When to ask for them next; none: nobody has still to prove it.
  std::optional<Clock::time_point> NextDeadline() const;

  // Connections that were closed because their proof was wrong.
  uint64_t refused() const { return refused_; }
  size_t kept_bytes() const { return kept_bytes_; }
  size_t under_way_bytes() const { return under_way_bytes_; }

 private:
  struct Peer {
    std::optional<Challenger> unproved;
    Clock::time_point since;
    std::string received, to_send;
    size_t sent = 0;  // of to_send
  };
  bool Reply(Peer* peer);
  StoreAnswer Answer(StoreAsks what, std::string_view key, std::string_view value, std::string* content);
  StoreSays Put(std::string_view key, std::string_view value);
  void Send(Peer* peer, std::string bytes);

  const RankSecret secret_;
  std::map<int, Peer> peers_;
  std::map<std::string, std::string, std::less<>> values_;
  size_t kept_bytes_ = 0, under_way_bytes_ = 0;
  uint64_t refused_ = 0;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_RANKS_STORE_SERVICE_H_
