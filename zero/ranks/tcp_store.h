// Where the ranks of a run meet: rank 0 keeps values by their keys, everybody sets and reads them over TCP.
//
// Small values, seldom: addresses, signs of life, why somebody failed. Every call is one request and one
// answer on one connection; nothing waits at the server, so that one who waits keeps nobody else waiting.
// A client that connects proves that it knows the run's secret, and checks that rank 0 does (handshake.h).
// What is kept is bounded (store_service.h).
//
// Errors are thrown, as std::runtime_error: rank 0 is not there, or has gone. RefusedConnection (sockets.h):
// one of the two ends does not know the secret. RefusedByStore: the call cannot be served, the next one may.
// A call on a host that does not answer returns when Shut is called. Threads: any; one call at a time goes
// out.
#ifndef PENSTOCK_ZERO_RANKS_TCP_STORE_H_
#define PENSTOCK_ZERO_RANKS_TCP_STORE_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

#include "zero/ranks/sockets.h"
#include "zero/ranks/store_service.h"

namespace penstock::zero {

class RefusedByStore : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class TcpStore {
 public:
  // `serves`: keeps the values, at that port of `host` (sockets.h: ListenAt); 0: at any that is free.
  // Everybody connects to `host`, and tries for `patience`.
  TcpStore(const std::string& host, int port, bool serves, std::chrono::milliseconds patience,
           const RankSecret& secret);
  // The values are gone with the one that serves.
  ~TcpStore();
  TcpStore(const TcpStore&) = delete;
  TcpStore& operator=(const TcpStore&) = delete;

  void Set(const std::string& key, const std::string& value);
  // Throws where there is no such key.
  std::string Get(const std::string& key);
  bool Has(const std::string& key);
  // Adds to the number there, 0 where there is none; what it is then.
  int64_t Add(const std::string& key, int64_t number);
  // Until the key is there, asking again and again; throws where it is not within `patience`.
  void Wait(const std::string& key, std::chrono::milliseconds patience);

  // Ends the wait of every caller that waits for an answer, with an error. From any thread.
  void Shut() const;
  int port() const { return port_; }
  // Of the one that serves: how many connections did not know the secret.
  uint64_t refused() const;

 private:
  class Server;
  StoreAnswer Ask(StoreAsks what, const std::string& key, const std::string& value, std::string* content);

  std::unique_ptr<Server> server_;
  int port_ = 0;
  Socket socket_;
  std::mutex mutex_;  // of what goes over the socket
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_RANKS_TCP_STORE_H_
