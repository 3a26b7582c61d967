// Connections between every two ranks, and messages over them: what a comm that watches over its ranks
// (watched_comm.h) stands on. Over sockets (tcp_mesh.h).
//
// A message has a number. What is sent to a rank under one goes to where that rank receives it, and nowhere
// else; neither end copies it. Messages of different numbers do not wait for each other.
//
// Errors are thrown, as std::exception. Threads: any, but for the destructor.
#ifndef PENSTOCK_ZERO_RANKS_MESH_H_
#define PENSTOCK_ZERO_RANKS_MESH_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "zero/ranks/handshake.h"
#include "zero/ranks/tcp_store.h"

namespace penstock::zero {

// One end of a message that is under way. Its memory is the caller's again when Wait has returned or thrown.
class Message {
 public:
  virtual ~Message() = default;
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;
  // It is under way from here on.
  virtual void Start(uint64_t number) = 0;
  // Until it is over; false: it was given up. Throws where the connection is broken.
  virtual bool Wait() = 0;
  // Ends Wait, from any thread. The mesh is of no use for others from then on.
  virtual void GiveUp() = 0;

 protected:
  Message() = default;
};

class Mesh {
 public:
  virtual ~Mesh() = default;
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  // `bytes`: at least one.
  virtual std::unique_ptr<Message> Send(int to, const void* data, size_t bytes) = 0;
  virtual std::unique_ptr<Message> Receive(int from, void* data, size_t bytes) = 0;
  // Throws where the connection with `peer` is known to be broken.
  virtual void Probe(int peer) = 0;
  // The others see that this rank has gone. Nothing is under way any more.
  virtual void Close() = 0;

 protected:
  Mesh() = default;
};

// Where a mesh is made: all ranks call the maker at about the same time.
struct MeshPlace {
  int rank = 0;
  int world = 1;
  std::string address;        // of this host, which the others can reach
  TcpStore* store = nullptr;  // where they meet
  std::string prefix;         // of the keys there
  const RankSecret* secret = nullptr;
  std::chrono::milliseconds wait;  // for all of them
};
using MeshMaker = std::function<std::unique_ptr<Mesh>(const MeshPlace& place)>;

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_RANKS_MESH_H_
