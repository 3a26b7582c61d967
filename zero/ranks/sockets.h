// TCP between ranks: addresses, connections with a deadline, and the proof that opens each of them
// (handshake.h). Errors are thrown, as std::runtime_error, but for RefusedConnection.
#ifndef PENSTOCK_ZERO_RANKS_SOCKETS_H_
#define PENSTOCK_ZERO_RANKS_SOCKETS_H_

#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "zero/ranks/handshake.h"

namespace penstock::zero {

using SocketClock = std::chrono::steady_clock;

// How long a stranger is listened to: a connection that has not proved in this time that it is of the run is
// closed.
inline constexpr std::chrono::seconds kProofPatience{10};
// Connections that have not proved it yet; of more the oldest is closed.
inline constexpr size_t kMostUnproved = 64;

// A file descriptor that is closed with its scope.
class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() { Close(); }
  void Close();
  int fd() const { return fd_; }

 private:
  int fd_;
};

// The other end says that this end's proof is wrong, or has a wrong one itself: trying again is of no use.
class RefusedConnection : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

std::runtime_error SocketError(const std::string& what, int error);

// For poll(): 0 where `until` is over; at most a minute.
int MillisecondsUntil(SocketClock::time_point until);

// Listens at `host`: at all of its addresses that this machine has, and at the same `port` of each; 0: at any
// that is free. Where this machine has none of them (its address is translated on the way), at all addresses.
std::vector<Socket> ListenAt(const std::string& host, int port);
int PortOf(const Socket& socket);

// Takes one connection that waits, without blocking and without delays; no descriptor: none waits.
// *out_of_descriptors: one waits, and this process may have no more files.
Socket AcceptOne(const Socket& listens, bool* out_of_descriptors);

// Connects to `host`, proves that this end knows the secret and checks that the other one does, again and
// again until `until`. Throws RefusedConnection where one of them does not. The socket does not block.
Socket ConnectAndProve(const std::string& host, int port, const RankSecret& secret,
                       const std::string& purpose, uint32_t number, SocketClock::time_point until);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_RANKS_SOCKETS_H_
