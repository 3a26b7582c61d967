#include "zero/ranks/sockets.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/io_error.h"

namespace penstock::zero {
namespace {

constexpr std::chrono::milliseconds kBetweenTries{50};

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;
Addresses Resolve(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found); error != 0)
    throw std::runtime_error(absl::StrCat("the address ", host, ": ", gai_strerror(error)));
  return {found, &freeaddrinfo};
}

void SetPort(sockaddr_storage* address, int port) {
  (address->ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(address)->sin6_port
                                  : reinterpret_cast<sockaddr_in*>(address)->sin_port) =
      htons(static_cast<uint16_t>(port));
}

void SetAtOnce(int fd) {
  const int on = 1;
  (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
}

// *error: why not.
Socket BindAndListen(const sockaddr_storage& address, socklen_t length, bool v6_only, int* error) {
  Socket listens(socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1, only = v6_only ? 1 : 0;
  if (listens.fd() >= 0) {
    (void)setsockopt(listens.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (address.ss_family == AF_INET6)
      (void)setsockopt(listens.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &only, sizeof(only));
    if (bind(listens.fd(), reinterpret_cast<const sockaddr*>(&address), length) == 0 &&
        listen(listens.fd(), SOMAXCONN) == 0) {
      *error = 0;
      return listens;
    }
  }
  *error = errno;
  return Socket();
}

// At all addresses, of IPv6 and IPv4, or where there is no IPv6, of IPv4.
Socket ListenAnywhere(int port) {
  int error = 0;
  sockaddr_storage any{};
  any.ss_family = AF_INET6;
  SetPort(&any, port);
  Socket listens = BindAndListen(any, sizeof(sockaddr_in6), /*v6_only=*/false, &error);
  if (error != 0 && error != EADDRINUSE && error != EACCES) {
    any.ss_family = AF_INET;
    SetPort(&any, port);
    listens = BindAndListen(any, sizeof(sockaddr_in), /*v6_only=*/false, &error);
  }
  if (error != 0) throw SocketError(absl::StrCat("listening at port ", port), error);
  return listens;
}

// One try; no descriptor and *why: it does not answer.
Socket TryToConnect(const addrinfo& address, SocketClock::time_point until, std::string* why) {
  Socket tried(socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  int error = errno;
  if (tried.fd() >= 0) error = connect(tried.fd(), address.ai_addr, address.ai_addrlen) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    pollfd there{tried.fd(), POLLOUT, 0};
    error = ETIMEDOUT;
    socklen_t length = sizeof(error);
    if (poll(&there, 1, std::max(1, MillisecondsUntil(until))) == 1)
      (void)getsockopt(tried.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
  }
  if (error == 0) {
    SetAtOnce(tried.fd());
    return tried;
  }
  *why = absl::StrCat("connect: ", ErrnoText(error));
  return Socket();
}

std::string ReceiveBy(int fd, size_t bytes, SocketClock::time_point until) {
  std::string received(bytes, '\0');
  for (size_t done = 0; done < bytes;) {
    pollfd there{fd, POLLIN, 0};
    const int ready = poll(&there, 1, MillisecondsUntil(until));
    if (ready < 0 && errno == EINTR) continue;
    if (ready < 1) throw std::runtime_error("what is connected there does not answer");
    const ssize_t n = recv(fd, received.data() + done, bytes - done, 0);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n < 0) throw SocketError("recv", errno);
    if (n == 0) throw std::runtime_error("the connection was closed");
    done += static_cast<size_t>(n);
  }
  return received;
}

void Prove(int fd, Claimant claimant, SocketClock::time_point until) {
  const absl::StatusOr<std::string> claim = claimant.Claim(ReceiveBy(fd, kChallengeBytes, until));
  if (!claim.ok()) throw std::runtime_error(std::string(claim.status().message()));
  // It is the first thing that is sent, into a buffer that is empty.
  if (send(fd, claim->data(), claim->size(), MSG_NOSIGNAL) != static_cast<ssize_t>(claim->size()))
    throw SocketError("send", errno);
  if (const absl::Status judged = claimant.Judge(ReceiveBy(fd, kVerdictBytes, until)); !judged.ok())
    throw RefusedConnection(std::string(judged.message()));
}

}  // namespace

void Socket::Close() {
  if (fd_ >= 0) close(std::exchange(fd_, -1));
}

std::runtime_error SocketError(const std::string& what, int error) {
  return std::runtime_error(absl::StrCat(what, ": ", ErrnoText(error)));
}

int MillisecondsUntil(SocketClock::time_point until) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - SocketClock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 60000));
}

std::vector<Socket> ListenAt(const std::string& host, int port) {
  const Addresses addresses = Resolve(host, port);
  std::vector<Socket> listens;
  std::set<std::string> seen;  // a name may have an address twice
  for (const addrinfo* one = addresses.get(); one != nullptr; one = one->ai_next) {
    if (!seen.emplace(reinterpret_cast<const char*>(one->ai_addr), one->ai_addrlen).second) continue;
    sockaddr_storage address{};
    std::copy_n(reinterpret_cast<const char*>(one->ai_addr),
                std::min<size_t>(one->ai_addrlen, sizeof(address)), reinterpret_cast<char*>(&address));
    if (port == 0 && !listens.empty()) SetPort(&address, PortOf(listens.front()));
    int error = 0;
    Socket bound = BindAndListen(address, one->ai_addrlen, /*v6_only=*/true, &error);
    if (error == 0) {
      listens.push_back(std::move(bound));
    } else if (error != EADDRNOTAVAIL && error != EAFNOSUPPORT) {
      throw SocketError(absl::StrCat("listening at ", host, ", port ", port), error);
    }
  }
  if (listens.empty()) listens.push_back(ListenAnywhere(port));
  return listens;
}

int PortOf(const Socket& socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&address), &length) != 0)
    throw SocketError("getsockname", errno);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

Socket AcceptOne(const Socket& listens, bool* out_of_descriptors) {
  Socket accepted(accept4(listens.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  *out_of_descriptors = accepted.fd() < 0 && (errno == EMFILE || errno == ENFILE);
  if (accepted.fd() >= 0) SetAtOnce(accepted.fd());
  return accepted;
}

Socket ConnectAndProve(const std::string& host, int port, const RankSecret& secret,
                       const std::string& purpose, uint32_t number, SocketClock::time_point until) {
  for (;;) {
    std::string why;
    try {
      const Addresses addresses = Resolve(host, port);
      for (const addrinfo* one = addresses.get(); one != nullptr; one = one->ai_next) {
        Socket connected = TryToConnect(*one, until, &why);
        if (connected.fd() < 0) continue;
        Prove(connected.fd(), Claimant(secret, purpose, number),
              std::min(until, SocketClock::now() + kProofPatience));
        return connected;
      }
    } catch (const RefusedConnection&) {
      throw;
    } catch (const std::runtime_error& error) {
      why = error.what();
    }
    if (SocketClock::now() > until)
      throw std::runtime_error(absl::StrCat("connecting to ", host, ", port ", port, ": ", why));
    std::this_thread::sleep_for(kBetweenTries);
  }
}

}  // namespace penstock::zero
