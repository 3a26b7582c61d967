#include "zero/ranks/tcp_mesh.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace penstock::zero {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kPieceBytes = 256 << 10;  // of a message, between which others pass
constexpr size_t kTurn = 1 << 20;          // bytes of one connection, before it is the next one's turn
constexpr std::chrono::seconds kHelloPatience{5};

// Before anything else on a connection: that whoever connects is of this run, and which rank it is.
struct Hello {
  uint32_t mark = 0x314d5350;  // "PSM1"
  uint32_t rank = 0;
  uint64_t token = 0;
};
// "I wait for this message", or a piece of one, which follows. Numbers as they lie in memory: all ranks run
// the same program.
enum class Kind : uint32_t { kWaits = 1, kPiece = 2 };
struct Frame {
  Kind kind = Kind::kWaits;
  uint32_t unused = 0;
  uint64_t number = 0;
  uint64_t bytes = 0;  // kWaits: of the message; kPiece: of the piece
};
static_assert(std::is_trivially_copyable_v<Hello> && std::is_trivially_copyable_v<Frame>);

std::runtime_error Failed(const std::string& what, int error) {
  return std::runtime_error(absl::StrCat(what, ": ", std::strerror(error), " (errno ", error, ")"));
}

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
  void Close() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }
  int fd() const { return fd_; }

 private:
  int fd_;
};

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;
Addresses Resolved(const std::string& address, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found);
      error != 0)
    throw std::runtime_error(absl::StrCat("the address ", address, ": ", gai_strerror(error)));
  return {found, &freeaddrinfo};
}

// At any free port of this address, which is returned.
Socket Listen(const std::string& address, int* port) {
  const Addresses at = Resolved(address, 0);
  Socket listens(socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (listens.fd() < 0 || bind(listens.fd(), at->ai_addr, at->ai_addrlen) != 0 ||
      listen(listens.fd(), SOMAXCONN) != 0)
    throw Failed(absl::StrCat("listening at ", address), errno);
  sockaddr_storage own{};
  socklen_t length = sizeof(own);
  if (getsockname(listens.fd(), reinterpret_cast<sockaddr*>(&own), &length) != 0)
    throw Failed("getsockname", errno);
  *port = ntohs(own.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(own).sin6_port
                                          : reinterpret_cast<const sockaddr_in&>(own).sin_port);
  return listens;
}

int MillisecondsUntil(Clock::time_point until) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 60000));
}

Socket Connect(const std::string& address, int port, Clock::time_point until) {
  const Addresses to = Resolved(address, port);
  Socket connects(socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (connects.fd() < 0) throw Failed("socket", errno);
  int error = connect(connects.fd(), to->ai_addr, to->ai_addrlen) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    pollfd there{connects.fd(), POLLOUT, 0};
    error = ETIMEDOUT;
    socklen_t length = sizeof(error);
    if (poll(&there, 1, MillisecondsUntil(until)) == 1)
      (void)getsockopt(connects.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
  }
  if (error != 0) throw Failed(absl::StrCat("connecting to ", address, ":", port), error);
  return connects;
}

void SetUp(int fd) {
  const int on = 1;
  (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  (void)fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

void SendHello(int fd, const Hello& hello, Clock::time_point until) {
  pollfd there{fd, POLLOUT, 0};
  (void)poll(&there, 1, MillisecondsUntil(until));
  // It is the first thing on a connection whose buffer is empty.
  if (send(fd, &hello, sizeof(hello), MSG_NOSIGNAL) != sizeof(hello)) throw Failed("send", errno);
}

// Whether one of this run says hello in time.
bool ReceiveHello(int fd, Hello* hello, Clock::time_point until) {
  size_t received = 0;
  while (received < sizeof(*hello)) {
    pollfd there{fd, POLLIN, 0};
    if (poll(&there, 1, MillisecondsUntil(until)) != 1) return false;
    const ssize_t n = recv(fd, reinterpret_cast<char*>(hello) + received, sizeof(*hello) - received, 0);
    if (n <= 0) return false;
    received += static_cast<size_t>(n);
  }
  return hello->mark == Hello().mark;
}

class TcpMesh final : public Mesh {
 public:
  explicit TcpMesh(const MeshPlace& place) : rank_(place.rank) {
    peers_.resize(static_cast<size_t>(place.world));
    Meet(place);
    wakes_ = Socket(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (wakes_.fd() < 0) throw Failed("eventfd", errno);
    thread_ = std::thread([this] { Work(); });
  }
  ~TcpMesh() override { Close(); }  // NOLINT(clang-analyzer-optin.cplusplus.VirtualCall): it is final

  std::unique_ptr<Message> Send(int to, const void* data, size_t bytes) override {
    return std::make_unique<End>(this, to, /*sends=*/true, const_cast<void*>(data), bytes);
  }
  std::unique_ptr<Message> Receive(int from, void* data, size_t bytes) override {
    return std::make_unique<End>(this, from, /*sends=*/false, data, bytes);
  }

  void Probe(int peer) override {
    const std::lock_guard lock(mutex_);
    if (const std::string& broken = At(peer).broken; !broken.empty()) throw std::runtime_error(broken);
  }

  void Close() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    Wake();
    if (thread_.joinable()) thread_.join();
    for (Peer& peer : peers_) peer.socket.Close();
  }

 private:
  // One end of a message.
  class End final : public Message {
   public:
    End(TcpMesh* mesh, int peer, bool sends, void* data, size_t bytes)
        : mesh_(mesh), peer_(peer), sends_(sends), data_(static_cast<char*>(data)), bytes_(bytes) {}
    ~End() override { mesh_->Drop(this); }
    void Start(uint64_t number) override { mesh_->Start(this, number); }
    bool Wait() override { return mesh_->Wait(this); }
    void GiveUp() override { mesh_->GiveUp(); }

    TcpMesh* const mesh_;
    const int peer_;
    const bool sends_;
    char* const data_;
    const size_t bytes_;
    // Under the mesh's lock:
    bool started_ = false, over_ = false;
    uint64_t number_ = 0;
    size_t done_ = 0;  // bytes
  };
  // What goes over a connection as one: a frame, and of kPiece the bytes of `of` from its done_ on.
  struct Outgoing {
    Frame frame;
    End* of = nullptr;
    size_t sent = 0;  // of both together
  };
  struct Peer {
    Socket socket;
    std::string broken;                        // why; empty: it is not
    std::map<uint64_t, End*> sends, receives;  // under way, by number
    std::map<uint64_t, uint64_t> waits;        // what it waits for and this rank has not begun to send: bytes
    std::deque<Outgoing> outgoing;
    // What is being received: a frame, then of kPiece its bytes.
    Frame frame;
    size_t of_frame = 0;
    End* to = nullptr;
    size_t left = 0;
  };

  Peer& At(int rank) { return peers_[static_cast<size_t>(rank)]; }

  void Meet(const MeshPlace& place) {
    const auto until = Clock::now() + place.wait;
    TcpStore& store = *place.store;
    int port = 0;
    const Socket listens = Listen(place.address, &port);
    const auto key = [&](int rank) { return absl::StrCat(place.prefix, "at/", rank); };
    if (rank_ == 0) {
      std::random_device random;
      store.Set(absl::StrCat(place.prefix, "token"),
                absl::StrCat((static_cast<uint64_t>(random()) << 32) | random()));
    }
    store.Set(key(rank_), absl::StrCat(place.address, " ", port));
    const auto wait = [&](const std::string& of) {
      store.Wait(of, std::chrono::milliseconds(MillisecondsUntil(until) + 1));
      return store.Get(of);
    };
    uint64_t token = 0;
    if (!absl::SimpleAtoi(wait(absl::StrCat(place.prefix, "token")), &token))
      throw std::runtime_error("no token of this run");
    for (int k = 0; k < rank_; ++k) {
      const std::string at = wait(key(k));
      const size_t space = at.rfind(' ');
      int theirs = 0;
      if (space == std::string::npos || !absl::SimpleAtoi(at.substr(space + 1), &theirs))
        throw std::runtime_error(absl::StrCat("no address of rank ", k, ": ", at));
      Socket connected = Connect(at.substr(0, space), theirs, until);
      SendHello(connected.fd(), {.rank = static_cast<uint32_t>(rank_), .token = token}, until);
      SetUp(connected.fd());
      At(k).socket = std::move(connected);
    }
    for (int missing = place.world - 1 - rank_; missing > 0;) {
      pollfd there{listens.fd(), POLLIN, 0};
      if (poll(&there, 1, MillisecondsUntil(until)) < 1 && Clock::now() >= until)
        throw std::runtime_error(absl::StrCat(missing, " ranks have not connected to rank ", rank_));
      Socket came(accept4(listens.fd(), nullptr, nullptr, SOCK_CLOEXEC));
      Hello hello;
      if (came.fd() < 0 || !ReceiveHello(came.fd(), &hello, std::min(until, Clock::now() + kHelloPatience)))
        continue;
      const auto theirs = static_cast<int>(hello.rank);
      if (hello.token != token || theirs <= rank_ || theirs >= place.world || At(theirs).socket.fd() >= 0)
        continue;  // none of this run
      SetUp(came.fd());
      At(theirs).socket = std::move(came);
      --missing;
    }
  }

  void Wake() {
    const uint64_t one = 1;
    if (wakes_.fd() >= 0) (void)!write(wakes_.fd(), &one, sizeof(one));
  }

  void Start(End* end, uint64_t number) {
    {
      const std::lock_guard lock(mutex_);
      Peer& peer = At(end->peer_);
      if (!peer.broken.empty()) throw std::runtime_error(peer.broken);
      end->started_ = true;
      end->number_ = number;
      if (!end->sends_) {
        PENSTOCK_CHECK(peer.receives.emplace(number, end).second, "two messages of one number");
        peer.outgoing.push_back({.frame = {.kind = Kind::kWaits, .number = number, .bytes = end->bytes_}});
      } else {
        PENSTOCK_CHECK(peer.sends.emplace(number, end).second, "two messages of one number");
        const auto waits = peer.waits.find(number);
        if (waits == peer.waits.end()) return;
        if (!QueuePiece(&peer, end, waits->second)) return;
        peer.waits.erase(waits);
      }
    }
    Wake();
  }

  bool Wait(const End* end) {
    std::unique_lock lock(mutex_);
    const std::string& broken = At(end->peer_).broken;
    changed_.wait(lock, [&] { return end->over_ || given_up_ || !broken.empty(); });
    if (end->over_) return true;
    if (given_up_) return false;
    throw std::runtime_error(broken);
  }

  void GiveUp() {
    const std::lock_guard lock(mutex_);
    given_up_ = true;
    changed_.notify_all();
  }

  // Its memory is touched no more. A connection that was in the middle of it is of no use then.
  void Drop(End* end) {
    const std::lock_guard lock(mutex_);
    if (!end->started_ || end->over_) return;
    Peer& peer = At(end->peer_);
    (end->sends_ ? peer.sends : peer.receives).erase(end->number_);
    if (peer.broken.empty()) Break(&peer, "a message was given up");
  }

  // --- under the lock, on the mesh's own thread, but for QueuePiece and Break

  void Break(Peer* peer, const std::string& why) {
    peer->broken = why;
    peer->outgoing.clear();
    peer->to = nullptr;
    changed_.notify_all();
  }

  // The message's next piece; false: the other end waits for another size.
  bool QueuePiece(Peer* peer, End* end, uint64_t waits_for) {
    if (waits_for != end->bytes_) {
      Break(peer, absl::StrCat(waits_for, " bytes are waited for where ", end->bytes_, " are sent"));
      return false;
    }
    const size_t bytes = std::min(kPieceBytes, end->bytes_ - end->done_);
    peer->outgoing.push_back(
        {.frame = {.kind = Kind::kPiece, .number = end->number_, .bytes = bytes}, .of = end});
    return true;
  }

  void Work() {
    for (;;) {
      std::vector<pollfd> polled = {{wakes_.fd(), POLLIN, 0}};
      std::vector<Peer*> of;
      {
        const std::lock_guard lock(mutex_);
        if (stopping_) return;
        for (Peer& peer : peers_) {
          if (given_up_ || peer.socket.fd() < 0 || !peer.broken.empty()) continue;
          polled.push_back(
              {peer.socket.fd(), static_cast<short>(POLLIN | (peer.outgoing.empty() ? 0 : POLLOUT)), 0});
          of.push_back(&peer);
        }
      }
      if (poll(polled.data(), polled.size(), -1) < 0 && errno != EINTR) return;
      if (polled[0].revents != 0) {
        uint64_t count = 0;
        (void)!read(wakes_.fd(), &count, sizeof(count));
      }
      for (size_t i = 0; i < of.size(); ++i) {
        const std::lock_guard lock(mutex_);
        if (given_up_ || !of[i]->broken.empty()) continue;
        const short events = polled[i + 1].revents;
        if ((events & ~POLLOUT) != 0) ReceiveSome(of[i]);
        if ((events & POLLOUT) != 0 && of[i]->broken.empty()) SendSome(of[i]);
      }
    }
  }

  // What is left to be sent of the first outgoing, at most; bytes that went, or -1.
  static ssize_t SendFirst(const Peer& peer) {
    const Outgoing& first = peer.outgoing.front();
    std::array<iovec, 2> parts{};
    size_t count = 0;
    if (first.sent < sizeof(Frame)) {
      const char* frame = reinterpret_cast<const char*>(&first.frame) + first.sent;
      parts[count++] = {const_cast<char*>(frame), sizeof(Frame) - first.sent};
    }
    if (first.of != nullptr) {
      const size_t sent = first.sent - std::min(first.sent, sizeof(Frame));
      parts[count++] = {first.of->data_ + first.of->done_ + sent, first.frame.bytes - sent};
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    return sendmsg(peer.socket.fd(), &message, MSG_NOSIGNAL);
  }

  void SendSome(Peer* peer) {
    for (size_t turn = 0; turn < kTurn && !peer->outgoing.empty();) {
      const ssize_t sent = SendFirst(*peer);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
      if (sent < 0) return BreakBy(peer, errno);
      turn += static_cast<size_t>(sent);
      Outgoing& first = peer->outgoing.front();
      first.sent += static_cast<size_t>(sent);
      const size_t bytes = first.of != nullptr ? first.frame.bytes : 0;
      if (first.sent < sizeof(Frame) + bytes) continue;
      End* const end = first.of;
      peer->outgoing.pop_front();
      if (end == nullptr) continue;
      end->done_ += bytes;
      if (end->done_ < end->bytes_) {
        (void)QueuePiece(peer, end, end->bytes_);
      } else {
        Over(&peer->sends, end);
      }
    }
  }

  void ReceiveSome(Peer* peer) {
    for (size_t turn = 0; turn < kTurn && peer->broken.empty();) {
      const bool frame = peer->left == 0;
      char* const place =
          frame ? reinterpret_cast<char*>(&peer->frame) + peer->of_frame : peer->to->data_ + peer->to->done_;
      const size_t wanted = frame ? sizeof(Frame) - peer->of_frame : peer->left;
      const ssize_t received = recv(peer->socket.fd(), place, wanted, 0);
      if (received < 0 && errno == EINTR) continue;
      if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
      if (received < 0) return BreakBy(peer, errno);
      if (received == 0) return Break(peer, "the connection was closed by peer");
      turn += static_cast<size_t>(received);
      if (frame) {
        peer->of_frame += static_cast<size_t>(received);
        if (peer->of_frame == sizeof(Frame)) TakeFrame(peer);
        continue;
      }
      peer->left -= static_cast<size_t>(received);
      peer->to->done_ += static_cast<size_t>(received);
      if (peer->left > 0) continue;
      End* const end = std::exchange(peer->to, nullptr);
      if (end->done_ == end->bytes_) Over(&peer->receives, end);
    }
  }

  void TakeFrame(Peer* peer) {
    const Frame frame = peer->frame;
    peer->of_frame = 0;
    if (frame.kind == Kind::kWaits) {
      const auto sends = peer->sends.find(frame.number);
      if (sends == peer->sends.end()) {
        peer->waits[frame.number] = frame.bytes;
      } else {
        (void)QueuePiece(peer, sends->second, frame.bytes);
      }
      return;
    }
    const auto receives = peer->receives.find(frame.number);
    if (frame.kind != Kind::kPiece || receives == peer->receives.end() || frame.bytes == 0 ||
        frame.bytes > receives->second->bytes_ - receives->second->done_)
      return Break(peer, "it sent what nobody waits for");
    peer->to = receives->second;
    peer->left = frame.bytes;
  }

  void Over(std::map<uint64_t, End*>* of, End* end) {
    of->erase(end->number_);
    end->over_ = true;
    changed_.notify_all();
  }

  void BreakBy(Peer* peer, int error) {
    Break(peer, error == ECONNRESET || error == EPIPE ? "the connection was reset by peer"
                                                      : Failed("the connection", error).what());
  }

  const int rank_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Peer> peers_;  // [rank]; own: no socket
  bool given_up_ = false, stopping_ = false;
  Socket wakes_;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Mesh> MakeTcpMesh(const MeshPlace& place) { return std::make_unique<TcpMesh>(place); }

absl::StatusOr<std::unique_ptr<Comm>> ConnectTcp(const RankEnvironment& environment,
                                                 const WatchOver& options) {
  return ConnectOver(&MakeTcpMesh, "TCP", environment, options);
}

}  // namespace penstock::zero
