#include "zero/ranks/tcp_store.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace penstock::zero {
namespace {

void SendAll(int socket, const void* data, size_t bytes) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = send(socket, at, bytes, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) throw SocketError("the meeting point has gone: send", errno);
    at += sent;
    bytes -= static_cast<size_t>(sent);
  }
}

void ReceiveAll(int socket, void* data, size_t bytes) {
  auto* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t received = recv(socket, at, bytes, 0);
    if (received < 0 && errno == EINTR) continue;
    if (received == 0) throw std::runtime_error("the meeting point has gone: its connection was closed");
    if (received < 0) throw SocketError("the meeting point has gone: recv", errno);
    at += received;
    bytes -= static_cast<size_t>(received);
  }
}

}  // namespace

// One thread carries bytes between the connections and the service.
class TcpStore::Server {
 public:
  Server(const std::string& host, int port, const RankSecret& secret)
      : listens_(ListenAt(host, port)), wakes_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), service_(secret) {
    if (wakes_.fd() < 0) throw SocketError("eventfd", errno);
    thread_ = std::thread([this] { Work(); });
  }
  ~Server() {
    const uint64_t one = 1;
    (void)!write(wakes_.fd(), &one, sizeof(one));
    thread_.join();
  }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;
  int port() const { return PortOf(listens_.front()); }
  uint64_t refused() const { return refused_.load(); }

 private:
  void Work() {
    for (;;) {
      std::vector<pollfd> polled = {{wakes_.fd(), POLLIN, 0}};
      for (const Socket& listens : listens_) polled.push_back({listens.fd(), POLLIN, 0});
      for (const auto& [fd, peer] : peers_)
        polled.push_back({fd, static_cast<short>(service_.ToSend(fd).empty() ? POLLIN : POLLOUT), 0});
      const auto deadline = service_.NextDeadline();
      // A millisecond more: the deadline is over then.
      const int patience = deadline.has_value() ? MillisecondsUntil(*deadline) + 1 : -1;
      if (poll(polled.data(), polled.size(), patience) < 0 && errno != EINTR) return;
      if (polled[0].revents != 0) return;
      for (size_t i = 1 + listens_.size(); i < polled.size(); ++i) {
        if (polled[i].revents != 0 && !Carry(polled[i].fd)) Close(polled[i].fd);
      }
      for (size_t i = 0; i < listens_.size(); ++i) {
        if (polled[i + 1].revents != 0) Accept(listens_[i]);
      }
      for (const int fd : service_.Overdue(StoreService::Clock::now())) Close(fd);
      refused_.store(service_.refused());
    }
  }

  void Accept(const Socket& listens) {
    bool out_of_descriptors = false;
    Socket peer = AcceptOne(listens, &out_of_descriptors);
    if (out_of_descriptors)
      std::this_thread::sleep_for(std::chrono::milliseconds(50));  // until some are closed
    if (peer.fd() < 0) return;
    const int fd = peer.fd();
    service_.Open(fd, StoreService::Clock::now());
    peers_.emplace(fd, std::move(peer));
  }

  // false: it has gone, or is none of us.
  bool Carry(int fd) {
    bool stays = true;
    if (service_.ToSend(fd).empty()) {
      std::array<char, 4096> piece;  // NOLINT(cppcoreguidelines-pro-type-member-init): filled
      const ssize_t received = recv(fd, piece.data(), piece.size(), 0);
      if (received == 0) return false;
      if (received < 0) return errno == EAGAIN || errno == EINTR;
      stays = service_.Receive(fd, std::string_view(piece.data(), static_cast<size_t>(received)));
    }
    for (std::string_view left = service_.ToSend(fd); !left.empty(); left = service_.ToSend(fd)) {
      const ssize_t sent = send(fd, left.data(), left.size(), MSG_NOSIGNAL);
      if (sent < 0) return stays && (errno == EAGAIN || errno == EINTR);
      service_.Sent(fd, static_cast<size_t>(sent));
    }
    return stays;
  }

  void Close(int fd) {
    service_.Close(fd);
    peers_.erase(fd);
  }

  const std::vector<Socket> listens_;
  const Socket wakes_;
  // Of the thread:
  StoreService service_;
  std::map<int, Socket> peers_;  // by descriptor, which is the service's name for it
  std::atomic<uint64_t> refused_{0};
  std::thread thread_;
};

TcpStore::TcpStore(const std::string& host, int port, bool serves, std::chrono::milliseconds patience,
                   const RankSecret& secret) {
  if (serves) server_ = std::make_unique<Server>(host, port, secret);
  port_ = server_ != nullptr ? server_->port() : port;
  socket_ = ConnectAndProve(host, port_, secret, kStorePurpose, /*number=*/0, SocketClock::now() + patience);
  // From here on calls wait for their answers.
  (void)fcntl(socket_.fd(), F_SETFL, fcntl(socket_.fd(), F_GETFL) & ~O_NONBLOCK);
}

TcpStore::~TcpStore() = default;

StoreAnswer TcpStore::Ask(StoreAsks what, const std::string& key, const std::string& value,
                          std::string* content) {
  if (key.size() > kStoreMostKeyBytes || value.size() > kStoreMostValueBytes) {
    throw RefusedByStore(absl::StrCat("a key of ", key.size(), " bytes with a value of ", value.size(),
                                      " for the meeting point: at most ", kStoreMostKeyBytes, " and ",
                                      kStoreMostValueBytes));
  }
  StoreRequest request;
  request.what = what;
  request.key_bytes = static_cast<uint32_t>(key.size());
  request.value_bytes = static_cast<uint32_t>(value.size());
  std::string all(reinterpret_cast<const char*>(&request), sizeof(request));
  all += key;
  all += value;
  StoreAnswer answer;
  {
    std::lock_guard lock(mutex_);
    SendAll(socket_.fd(), all.data(), all.size());
    ReceiveAll(socket_.fd(), &answer, sizeof(answer));
    if (answer.value_bytes > kStoreMostValueBytes) {
      Shut();
      throw std::runtime_error("the meeting point answers in another language");
    }
    std::string received(answer.value_bytes, '\0');
    ReceiveAll(socket_.fd(), received.data(), received.size());
    if (content != nullptr) *content = std::move(received);
  }
  switch (answer.says) {
    case StoreSays::kMissing:
    case StoreSays::kFound:
      return answer;
    case StoreSays::kFull:
      throw RefusedByStore(absl::StrCat("the meeting point is full: it keeps at most ", kStoreMostBytes,
                                        " bytes for all ranks, and ", key, " is not among them"));
    case StoreSays::kNoNumber:
      throw RefusedByStore(absl::StrCat(key, " is no number"));
    case StoreSays::kTooLarge:
      throw RefusedByStore(absl::StrCat("the sum at ", key, " is beyond 64 bits"));
  }
  throw std::runtime_error("the meeting point answers in another language");
}

void TcpStore::Set(const std::string& key, const std::string& value) {
  (void)Ask(StoreAsks::kSet, key, value, nullptr);
}

std::string TcpStore::Get(const std::string& key) {
  std::string value;
  if (Ask(StoreAsks::kGet, key, "", &value).says == StoreSays::kMissing)
    throw RefusedByStore(absl::StrCat("the meeting point has no ", key));
  return value;
}

bool TcpStore::Has(const std::string& key) {
  return Ask(StoreAsks::kHas, key, "", nullptr).says == StoreSays::kFound;
}

int64_t TcpStore::Add(const std::string& key, int64_t number) {
  std::string text;
  (void)Ask(StoreAsks::kAdd, key, std::to_string(number), &text);
  int64_t sum = 0;
  if (!absl::SimpleAtoi(text, &sum)) throw std::runtime_error(absl::StrCat(key, " is no number"));
  return sum;
}

void TcpStore::Wait(const std::string& key, std::chrono::milliseconds patience) {
  const auto until = SocketClock::now() + patience;
  while (!Has(key)) {
    if (SocketClock::now() > until) throw std::runtime_error(absl::StrCat("no ", key, " in time"));
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

void TcpStore::Shut() const { shutdown(socket_.fd(), SHUT_RDWR); }

uint64_t TcpStore::refused() const { return server_ != nullptr ? server_->refused() : 0; }

}  // namespace penstock::zero
