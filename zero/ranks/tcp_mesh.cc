#include "zero/ranks/tcp_mesh.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <list>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "zero/ranks/mesh_link.h"
#include "zero/ranks/sockets.h"

namespace penstock::zero {
namespace {

constexpr size_t kTurn = 1 << 20;  // bytes of one connection, before it is the next one's turn

// Of the proofs that open a connection of the mesh to `rank`.
std::string MeshPurpose(const MeshPlace& place, int rank) {
  return absl::StrCat("mesh ", place.prefix, " to ", rank);
}

// Takes the connections of the ranks beyond this one. Whoever connects is heard beside all others, so that a
// stranger who says nothing costs nobody any time.
class Reception {
 public:
  Reception(const MeshPlace& place, const std::vector<Socket>& listens,
            const std::function<bool(uint32_t number, Socket socket)>& take)
      : purpose_(MeshPurpose(place, place.rank)), secret_(*place.secret), listens_(listens), take_(take) {}

  // Until there is something to do, or `until`; then does it.
  void Work(SocketClock::time_point until) {
    std::vector<pollfd> polled;
    for (const Socket& listens : listens_) polled.push_back({listens.fd(), POLLIN, 0});
    for (const Guest& guest : guests_) {
      until = std::min(until, guest.since + kProofPatience);
      polled.push_back({guest.socket.fd(), static_cast<short>(guest.to_send.empty() ? POLLIN : POLLOUT), 0});
    }
    // A millisecond more: the deadline is over then.
    if (poll(polled.data(), polled.size(), MillisecondsUntil(until) + 1) < 0) {
      if (errno != EINTR) throw SocketError("poll", errno);
      return;
    }
    size_t i = listens_.size();
    for (auto guest = guests_.begin(); guest != guests_.end(); ++i) {
      const bool stays =
          (polled[i].revents == 0 || Hear(&*guest)) && SocketClock::now() - guest->since < kProofPatience;
      guest = stays ? std::next(guest) : guests_.erase(guest);
    }
    for (size_t k = 0; k < listens_.size(); ++k) {
      if (polled[k].revents == 0) continue;
      bool out_of_descriptors = false;
      Socket accepted = AcceptOne(listens_[k], &out_of_descriptors);
      if (out_of_descriptors) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      if (accepted.fd() < 0) continue;
      Challenger challenger(secret_, purpose_);
      std::string challenge = challenger.Challenge();
      guests_.push_back({std::move(accepted), std::move(challenger), std::move(challenge)});
      if (guests_.size() > kMostUnproved) guests_.pop_front();
    }
  }

 private:
  struct Guest {
    Socket socket;
    Challenger challenger;
    std::string to_send;
    Challenger::State state = Challenger::State::kWaits;
    SocketClock::time_point since = SocketClock::now();
  };

  // false: there is nothing more to hear from it.
  bool Hear(Guest* guest) {
    if (guest->to_send.empty()) {
      // No more than its claim: what follows belongs to the mesh.
      char piece[kClaimBytes];
      const ssize_t received = recv(guest->socket.fd(), piece, guest->challenger.left(), 0);
      if (received < 0) return errno == EAGAIN || errno == EINTR;
      if (received == 0) return false;
      std::string_view bytes(piece, static_cast<size_t>(received));
      guest->state = guest->challenger.Take(&bytes);
      if (guest->state != Challenger::State::kWaits) guest->to_send = guest->challenger.Verdict();
    }
    if (!guest->to_send.empty()) {
      const ssize_t sent =
          send(guest->socket.fd(), guest->to_send.data(), guest->to_send.size(), MSG_NOSIGNAL);
      if (sent < 0) return errno == EAGAIN || errno == EINTR;
      guest->to_send.erase(0, static_cast<size_t>(sent));
      if (!guest->to_send.empty()) return true;
      if (guest->state == Challenger::State::kRefused) return false;
      if (guest->state == Challenger::State::kAccepted) {
        (void)take_(guest->challenger.number(), std::move(guest->socket));
        return false;
      }
    }
    return true;
  }

  const std::string purpose_;
  const RankSecret secret_;
  const std::vector<Socket>& listens_;
  const std::function<bool(uint32_t number, Socket socket)> take_;
  std::list<Guest> guests_;  // the oldest first
};

class TcpMesh final : public Mesh {
 public:
  explicit TcpMesh(const MeshPlace& place) : rank_(place.rank), peers_(static_cast<size_t>(place.world)) {
    Meet(place);
    wakes_ = Socket(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (wakes_.fd() < 0) throw SocketError("eventfd", errno);
    thread_ = std::thread([this] { Work(); });
  }
  ~TcpMesh() override { Close(); }  // NOLINT(clang-analyzer-optin.cplusplus.VirtualCall): it is final

  std::unique_ptr<Message> Send(int to, const void* data, size_t bytes) override {
    return std::make_unique<MeshMessage>(this, to, /*sends=*/true, const_cast<void*>(data), bytes);
  }
  std::unique_ptr<Message> Receive(int from, void* data, size_t bytes) override {
    return std::make_unique<MeshMessage>(this, from, /*sends=*/false, data, bytes);
  }

  void Probe(int peer) override {
    const std::lock_guard lock(mutex_);
    if (const std::string& broken = At(peer).link.broken(); !broken.empty()) throw std::runtime_error(broken);
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
  class MeshMessage final : public Message {
   public:
    MeshMessage(TcpMesh* mesh, int peer, bool sends, void* data, size_t bytes)
        : mesh_(mesh), peer_(peer), end_{.sends = sends, .data = static_cast<char*>(data), .bytes = bytes} {}
    ~MeshMessage() override { mesh_->Drop(peer_, &end_); }
    void Start(uint64_t number) override { mesh_->Start(peer_, &end_, number); }
    bool Wait() override { return mesh_->Wait(peer_, &end_); }
    void GiveUp() override { mesh_->GiveUp(); }

   private:
    TcpMesh* const mesh_;
    const int peer_;
    MeshLink::End end_;  // under the mesh's lock
  };
  struct Peer {
    Socket socket;
    MeshLink link;
  };

  Peer& At(int rank) { return peers_[static_cast<size_t>(rank)]; }

  void Meet(const MeshPlace& place) {
    const auto until = SocketClock::now() + place.wait;
    TcpStore& store = *place.store;
    const std::vector<Socket> listens = ListenAt(place.address, /*port=*/0);
    const auto key = [&](int rank) { return absl::StrCat(place.prefix, "at/", rank); };
    store.Set(key(rank_), absl::StrCat(place.address, " ", PortOf(listens.front())));
    for (int k = 0; k < rank_; ++k) {
      store.Wait(key(k), std::chrono::milliseconds(MillisecondsUntil(until) + 1));
      const std::string at = store.Get(key(k));
      const size_t space = at.rfind(' ');
      int port = 0;
      if (space == std::string::npos || !absl::SimpleAtoi(at.substr(space + 1), &port) || port < 1 ||
          port > 65535)
        throw std::runtime_error(absl::StrCat("no address of rank ", k));
      At(k).socket = ConnectAndProve(at.substr(0, space), port, *place.secret, MeshPurpose(place, k),
                                     static_cast<uint32_t>(rank_), until);
    }
    int missing = place.world - 1 - rank_;
    Reception reception(place, listens, [&](uint32_t number, Socket socket) {
      const auto theirs = static_cast<int64_t>(number);
      if (theirs <= rank_ || theirs >= place.world || At(static_cast<int>(theirs)).socket.fd() >= 0)
        return false;
      At(static_cast<int>(theirs)).socket = std::move(socket);
      --missing;
      return true;
    });
    while (missing > 0) {
      if (SocketClock::now() >= until)
        throw std::runtime_error(absl::StrCat(missing, " ranks have not connected to rank ", rank_));
      reception.Work(until);
    }
  }

  void Wake() {
    const uint64_t one = 1;
    if (wakes_.fd() >= 0) (void)!write(wakes_.fd(), &one, sizeof(one));
  }

  void Start(int rank, MeshLink::End* end, uint64_t number) {
    {
      const std::lock_guard lock(mutex_);
      MeshLink& link = At(rank).link;
      if (!link.broken().empty()) throw std::runtime_error(link.broken());
      link.Start(end, number);
      TellChanges(&link);
    }
    Wake();
  }

  bool Wait(int rank, const MeshLink::End* end) {
    std::unique_lock lock(mutex_);
    const std::string& broken = At(rank).link.broken();
    changed_.wait(lock, [&] { return end->over || given_up_ || !broken.empty(); });
    if (end->over) return true;
    if (given_up_) return false;
    throw std::runtime_error(broken);
  }

  void GiveUp() {
    const std::lock_guard lock(mutex_);
    given_up_ = true;
    changed_.notify_all();
  }

  void Drop(int rank, MeshLink::End* end) {
    const std::lock_guard lock(mutex_);
    MeshLink& link = At(rank).link;
    link.Drop(end);
    TellChanges(&link);
  }

  // --- under the lock

  void TellChanges(MeshLink* link) {
    if (link->TakeChanged()) changed_.notify_all();
  }

  void Work() {
    for (;;) {
      std::vector<pollfd> polled = {{wakes_.fd(), POLLIN, 0}};
      std::vector<Peer*> of;
      {
        const std::lock_guard lock(mutex_);
        if (stopping_) return;
        for (Peer& peer : peers_) {
          if (given_up_ || peer.socket.fd() < 0 || !peer.link.broken().empty()) continue;
          polled.push_back(
              {peer.socket.fd(), static_cast<short>(POLLIN | (peer.link.HasToSend() ? POLLOUT : 0)), 0});
          of.push_back(&peer);
        }
      }
      if (poll(polled.data(), polled.size(), -1) < 0 && errno != EINTR) return BreakAll(errno);
      if (polled[0].revents != 0) {
        uint64_t count = 0;
        (void)!read(wakes_.fd(), &count, sizeof(count));
      }
      for (size_t i = 0; i < of.size(); ++i) {
        const std::lock_guard lock(mutex_);
        if (given_up_ || !of[i]->link.broken().empty()) continue;
        const short events = polled[i + 1].revents;
        if ((events & ~POLLOUT) != 0) ReceiveSome(of[i]);
        if ((events & POLLOUT) != 0 && of[i]->link.broken().empty()) SendSome(of[i]);
        TellChanges(&of[i]->link);
      }
    }
  }

  void SendSome(Peer* peer) {
    for (size_t turn = 0; turn < kTurn && peer->link.HasToSend();) {
      const std::span<const iovec> parts = peer->link.ToSend();
      msghdr message{};
      message.msg_iov = const_cast<iovec*>(parts.data());
      message.msg_iovlen = parts.size();
      const ssize_t sent = sendmsg(peer->socket.fd(), &message, MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
      if (sent < 0) return BreakBy(peer, errno);
      turn += static_cast<size_t>(sent);
      peer->link.Sent(static_cast<size_t>(sent));
    }
  }

  void ReceiveSome(Peer* peer) {
    for (size_t turn = 0; turn < kTurn && peer->link.broken().empty();) {
      const std::span<char> place = peer->link.Place();
      const ssize_t received = recv(peer->socket.fd(), place.data(), place.size(), 0);
      if (received < 0 && errno == EINTR) continue;
      if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
      if (received < 0) return BreakBy(peer, errno);
      if (received == 0) return peer->link.Break("the connection was closed by peer");
      turn += static_cast<size_t>(received);
      peer->link.Received(static_cast<size_t>(received));
    }
  }

  static void BreakBy(Peer* peer, int error) {
    peer->link.Break(error == ECONNRESET || error == EPIPE ? "the connection was reset by peer"
                                                           : SocketError("the connection", error).what());
  }

  void BreakAll(int error) {
    const std::lock_guard lock(mutex_);
    for (Peer& peer : peers_) peer.link.Break(SocketError("poll", error).what());
    changed_.notify_all();
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
