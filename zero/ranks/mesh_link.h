// What goes over one connection of a mesh (tcp_mesh.h), without sockets: messages that are under way, what
// has been received of the next frame, and what is to be sent. A message is sent when its receiver has asked
// for it, goes straight from its memory to the receiver's, in pieces, and nothing is kept in between.
//
// Everything that the peer sends is checked. What no rank sends breaks the link: from then on it touches no
// message's memory. Threads: one at a time.
#ifndef PENSTOCK_ZERO_RANKS_MESH_LINK_H_
#define PENSTOCK_ZERO_RANKS_MESH_LINK_H_

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <string>

namespace penstock::zero {

inline constexpr size_t kMeshPieceBytes = 256 << 10;  // of a message, between which others pass
// Messages that the peer asks for before this rank sends them: ranks are at the same exchanges, give or take
// what they have begun ahead.
inline constexpr size_t kMeshMostAsked = 4096;

// "I wait for this message", or a piece of one, which follows. Numbers as they lie in memory: all ranks run
// the same program.
enum class MeshKind : uint32_t { kAsks = 1, kPiece = 2 };
struct MeshFrame {
  MeshKind kind = MeshKind::kAsks;
  uint32_t unused = 0;
  uint64_t number = 0;
  uint64_t bytes = 0;  // kAsks: of the message; kPiece: of the piece
};

class MeshLink {
 public:
  // One end of a message: `bytes` at `data`, at least one.
  struct End {
    bool sends = false;
    char* data = nullptr;
    size_t bytes = 0;
    // Of the link, from Start on:
    bool started = false, over = false;
    bool asked = false;  // sends: its receiver has asked for it
    uint64_t number = 0;
    size_t done = 0;  // bytes
  };

  // The message is under way, until it is over, dropped, or the link is broken. Must not be called on a
  // broken link; no two ends of one kind and number may be under way.
  void Start(End* end, uint64_t number);
  // Its memory is touched no more. A link that was not done with it is broken.
  void Drop(End* end);
  void Break(const std::string& why);
  // Why the link is broken; empty: it is not.
  const std::string& broken() const { return broken_; }

  // Where the next bytes of the peer belong; of as many as were put there Received says how many. Neither
  // may be called on a broken link.
  std::span<char> Place();
  void Received(size_t bytes);

  bool HasToSend() const { return !outgoing_.empty(); }
  // The next bytes for the peer, in at most two parts; of as many as were sent Sent says how many.
  std::span<const iovec> ToSend();
  void Sent(size_t bytes);

  // Whether a message is over or the link broken since the last call.
  bool TakeChanged();

 private:
  // A frame, and of kPiece the bytes of `of` from its done on.
  struct Outgoing {
    MeshFrame frame;
    End* of = nullptr;
    size_t sent = 0;  // of both together
  };
  void TakeFrame();
  void TakeRequest(const MeshFrame& frame);
  bool IsAskedFor(End* end, uint64_t bytes);
  void QueuePiece(End* end);
  void Over(std::map<uint64_t, End*>* of, End* end);

  std::string broken_;
  bool changed_ = false;
  std::map<uint64_t, End*> sends_, receives_;  // under way, by number
  std::map<uint64_t, uint64_t> asked_;         // what this rank has not begun to send: bytes, by number
  std::deque<Outgoing> outgoing_;
  std::array<iovec, 2> parts_{};
  // What is being received: a frame, then of kPiece its bytes.
  MeshFrame frame_;
  size_t of_frame_ = 0;
  End* to_ = nullptr;
  size_t left_ = 0;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_RANKS_MESH_LINK_H_
