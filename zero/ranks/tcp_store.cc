#include "zero/ranks/tcp_store.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <stdexcept>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace penstock::zero {
namespace {

using Clock = std::chrono::steady_clock;

// A request: the mark, what is asked, bytes of key and value, and both. An answer: whether the key was there,
// bytes of its value, and that. Numbers as they lie in memory: all ranks run the same program.
constexpr uint32_t kMark = 0x31545350;  // "PST1"
constexpr char kSet = 's', kGet = 'g', kHas = 'h', kAdd = 'a';
struct Request {
  uint32_t mark = kMark;
  char what = 0;
  std::array<char, 3> unused{};
  uint32_t key_bytes = 0;
  uint32_t value_bytes = 0;
};
struct Answer {
  uint32_t found = 0;
  uint32_t value_bytes = 0;
};
// Whoever sends more is none of us.
constexpr uint32_t kMostKeyBytes = 64 << 10;
constexpr uint32_t kMostValueBytes = 64 << 20;

std::runtime_error Failed(const std::string& what, int error) {
  return std::runtime_error(absl::StrCat(what, ": ", std::strerror(error), " (errno ", error, ")"));
}

void SendAll(int socket, const void* data, size_t bytes) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = send(socket, at, bytes, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) throw Failed("the meeting point has gone: send", errno);
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
    if (received < 0) throw Failed("the meeting point has gone: recv", errno);
    at += received;
    bytes -= static_cast<size_t>(received);
  }
}

void SetAtOnce(int socket) {
  const int on = 1;
  (void)setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

// At all addresses, of IPv6 and IPv4, or where there is no IPv6, of IPv4.
int Listen(int port) {
  const int on = 1, off = 0;
  int listens = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  int result = -1;
  if (listens >= 0) {
    (void)setsockopt(listens, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    (void)setsockopt(listens, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    sockaddr_in6 address{};
    address.sin6_family = AF_INET6;
    address.sin6_addr = in6addr_any;
    address.sin6_port = htons(static_cast<uint16_t>(port));
    result = bind(listens, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
    if (result != 0 && errno != EADDRINUSE && errno != EACCES) {
      close(listens);
      listens = -1;
    }
  }
  if (listens < 0) {
    listens = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listens < 0) throw Failed("socket", errno);
    (void)setsockopt(listens, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    address.sin_port = htons(static_cast<uint16_t>(port));
    result = bind(listens, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  }
  if (result != 0 || listen(listens, SOMAXCONN) != 0) {
    const int error = errno;
    close(listens);
    throw Failed(absl::StrCat("listening at port ", port), error);
  }
  return listens;
}

int PortOf(int socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length) != 0)
    throw Failed("getsockname", errno);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

// One try at each address of the host, until `until`; -1 and *why: none answers.
int TryToConnect(const std::string& host, int port, Clock::time_point until, std::string* why) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found); error != 0) {
    *why = absl::StrCat("getaddrinfo: ", gai_strerror(error));
    return -1;
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owned(found, &freeaddrinfo);
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    const int tried = socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (tried < 0) continue;
    int error = connect(tried, one->ai_addr, one->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      pollfd there{tried, POLLOUT, 0};
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
      error = ETIMEDOUT;
      socklen_t length = sizeof(error);
      if (poll(&there, 1, static_cast<int>(std::clamp<int64_t>(left, 1, 60000))) == 1)
        (void)getsockopt(tried, SOL_SOCKET, SO_ERROR, &error, &length);
    }
    if (error == 0) return tried;
    *why = absl::StrCat("connect: ", std::strerror(error), " (errno ", error, ")");
    close(tried);
  }
  return -1;
}

int Connect(const std::string& host, int port, std::chrono::milliseconds patience) {
  const auto until = Clock::now() + patience;
  for (;;) {
    std::string why;
    const int connected = TryToConnect(host, port, until, &why);
    if (connected >= 0) {
      // From here on calls wait for their answers.
      (void)fcntl(connected, F_SETFL, fcntl(connected, F_GETFL) & ~O_NONBLOCK);
      SetAtOnce(connected);
      return connected;
    }
    if (Clock::now() > until) throw std::runtime_error(why);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

}  // namespace

// One thread answers whoever has sent a whole request.
class TcpStore::Server {
 public:
  explicit Server(int port) : listens_(Listen(port)), wakes_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    thread_ = std::thread([this] { Work(); });
  }
  ~Server() {
    const uint64_t one = 1;
    (void)!write(wakes_, &one, sizeof(one));
    thread_.join();
    for (const auto& [socket, bytes] : peers_) close(socket);
    close(listens_);
    close(wakes_);
  }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;
  int port() const { return PortOf(listens_); }

 private:
  struct Peer {
    std::string received, to_send;
  };

  void Work() {
    for (;;) {
      std::vector<pollfd> polled = {{wakes_, POLLIN, 0}, {listens_, POLLIN, 0}};
      for (const auto& [socket, peer] : peers_) {
        polled.push_back({socket, static_cast<short>(peer.to_send.empty() ? POLLIN : POLLOUT), 0});
      }
      if (poll(polled.data(), polled.size(), -1) < 0 && errno != EINTR) return;
      if (polled[0].revents != 0) return;
      if (polled[1].revents != 0) {
        if (const int came = accept4(listens_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK); came >= 0) {
          SetAtOnce(came);
          peers_[came];
        } else if (errno == EMFILE || errno == ENFILE) {
          std::this_thread::sleep_for(std::chrono::milliseconds(50));  // they may be closed meanwhile
        }
      }
      for (size_t i = 2; i < polled.size(); ++i) {
        if (polled[i].revents == 0 || Serve(polled[i].fd, &peers_[polled[i].fd])) continue;
        close(polled[i].fd);
        peers_.erase(polled[i].fd);
      }
    }
  }

  // false: it has gone, or is none of us.
  bool Serve(int socket, Peer* peer) {
    if (peer->to_send.empty()) {
      std::array<char, 4096> piece;  // NOLINT(cppcoreguidelines-pro-type-member-init): filled
      const ssize_t received = recv(socket, piece.data(), piece.size(), 0);
      if (received == 0) return false;
      if (received < 0) return errno == EAGAIN || errno == EINTR;
      peer->received.append(piece.data(), static_cast<size_t>(received));
      if (!Reply(peer)) return false;
    }
    while (!peer->to_send.empty()) {
      const ssize_t sent = send(socket, peer->to_send.data(), peer->to_send.size(), MSG_NOSIGNAL);
      if (sent < 0) return errno == EAGAIN || errno == EINTR;
      peer->to_send.erase(0, static_cast<size_t>(sent));
    }
    return true;
  }

  static_assert(std::is_trivially_copyable_v<Request> && std::is_trivially_copyable_v<Answer>);
  // What has been received is answered as soon as it is whole: one request, since each waits for its answer.
  bool Reply(Peer* peer) {
    Request request;
    const std::string& received = peer->received;
    if (received.size() < sizeof(request)) return true;
    std::memcpy(&request, received.data(), sizeof(request));
    if (request.mark != kMark || request.key_bytes > kMostKeyBytes || request.value_bytes > kMostValueBytes)
      return false;
    const size_t whole = sizeof(request) + request.key_bytes + request.value_bytes;
    if (received.size() < whole) return true;
    if (received.size() > whole) return false;
    const std::string key = received.substr(sizeof(request), request.key_bytes);
    std::string value = received.substr(sizeof(request) + request.key_bytes);
    peer->received.clear();
    const auto at = values_.find(key);
    Answer answer;
    answer.found = at != values_.end() ? 1 : 0;
    std::string content;
    switch (request.what) {
      case kSet:
        values_[key] = std::move(value);
        break;
      case kGet:
        if (at != values_.end()) content = at->second;
        break;
      case kHas:
        break;
      case kAdd: {
        int64_t sum = 0, number = 0;
        if (at != values_.end() && !absl::SimpleAtoi(at->second, &sum)) return false;
        if (!absl::SimpleAtoi(value, &number)) return false;
        content = values_[key] = std::to_string(sum + number);
        break;
      }
      default:
        return false;
    }
    answer.value_bytes = static_cast<uint32_t>(content.size());
    peer->to_send.assign(reinterpret_cast<const char*>(&answer), sizeof(answer));
    peer->to_send += content;
    return true;
  }

  const int listens_, wakes_;
  std::map<int, Peer> peers_;  // by socket
  std::map<std::string, std::string> values_;
  std::thread thread_;
};

TcpStore::TcpStore(const std::string& host, int port, bool serves, std::chrono::milliseconds patience) {
  if (serves) server_ = std::make_unique<Server>(port);
  port_ = server_ != nullptr ? server_->port() : port;
  socket_ = Connect(host, port_, patience);
}

TcpStore::~TcpStore() {
  if (socket_ >= 0) close(socket_);
}

std::string TcpStore::Ask(char what, const std::string& key, const std::string& value, bool* found) {
  if (key.size() > kMostKeyBytes || value.size() > kMostValueBytes)
    throw std::runtime_error(absl::StrCat("a value of ", value.size(), " bytes for the meeting point"));
  Request request;
  request.what = what;
  request.key_bytes = static_cast<uint32_t>(key.size());
  request.value_bytes = static_cast<uint32_t>(value.size());
  std::string all(reinterpret_cast<const char*>(&request), sizeof(request));
  all += key;
  all += value;
  std::lock_guard lock(mutex_);
  SendAll(socket_, all.data(), all.size());
  Answer answer;
  ReceiveAll(socket_, &answer, sizeof(answer));
  if (answer.value_bytes > kMostValueBytes) {
    Shut();
    throw std::runtime_error("the meeting point answers in another language");
  }
  std::string content(answer.value_bytes, '\0');
  ReceiveAll(socket_, content.data(), content.size());
  if (found != nullptr) *found = answer.found != 0;
  return content;
}

void TcpStore::Set(const std::string& key, const std::string& value) { Ask(kSet, key, value, nullptr); }

std::string TcpStore::Get(const std::string& key) {
  bool found = false;
  std::string value = Ask(kGet, key, "", &found);
  if (!found) throw std::runtime_error(absl::StrCat("the meeting point has no ", key));
  return value;
}

bool TcpStore::Has(const std::string& key) {
  bool found = false;
  Ask(kHas, key, "", &found);
  return found;
}

int64_t TcpStore::Add(const std::string& key, int64_t number) {
  int64_t sum = 0;
  if (!absl::SimpleAtoi(Ask(kAdd, key, std::to_string(number), nullptr), &sum))
    throw std::runtime_error(absl::StrCat(key, " is no number"));
  return sum;
}

void TcpStore::Wait(const std::string& key, std::chrono::milliseconds patience) {
  const auto until = Clock::now() + patience;
  while (!Has(key)) {
    if (Clock::now() > until) throw std::runtime_error(absl::StrCat("no ", key, " in time"));
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

void TcpStore::Shut() const { shutdown(socket_, SHUT_RDWR); }

}  // namespace penstock::zero
