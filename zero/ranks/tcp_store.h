// Where the ranks of a run meet: rank 0 keeps values by their keys, everybody sets and reads them over TCP.
//
// Small values, seldom: addresses, signs of life, why somebody failed. Every call is one request and one
// answer on one connection; nothing waits at the server, so that one who waits keeps nobody else waiting.
//
// Errors are thrown, as std::runtime_error: rank 0 is not there, or has gone. A call on a host that does not
// answer returns when Shut is called. Threads: any; one call at a time goes out.
#ifndef PENSTOCK_ZERO_RANKS_TCP_STORE_H_
#define PENSTOCK_ZERO_RANKS_TCP_STORE_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

namespace penstock::zero {

class TcpStore {
 public:
  // `serves`: keeps the values, at that port of all of this host's addresses; 0: at any that is free.
  // Everybody connects to `host`, and tries for `patience`.
  TcpStore(const std::string& host, int port, bool serves, std::chrono::milliseconds patience);
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

  // Whoever waits for an answer is told that there will be none. From any thread.
  void Shut() const;
  int port() const { return port_; }

 private:
  class Server;
  std::string Ask(char what, const std::string& key, const std::string& value, bool* found);

  std::unique_ptr<Server> server_;
  int port_ = 0;
  int socket_ = -1;
  std::mutex mutex_;  // of what goes over the socket
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_RANKS_TCP_STORE_H_
