// A port of the loopback for tests whose processes meet there.
#ifndef PENSTOCK_TESTS_FREE_PORT_H_
#define PENSTOCK_TESTS_FREE_PORT_H_

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>

namespace penstock::tests {

// Below those that Linux gives to outgoing connections (32768 on): what the kernel would choose, another
// program's connection may have taken before the test listens. Test programs that run at once begin at places
// of their own.
inline int FreePort() {
  constexpr int kFirst = 12000, kPorts = 20000;
  static int next = getpid() * 37 % kPorts;
  for (int tries = 0; tries < kPorts; ++tries) {
    const int port = kFirst + next;
    next = (next + 1) % kPorts;
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    address.sin_port = htons(static_cast<uint16_t>(port));
    const bool bound = bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
    close(fd);
    if (bound) return port;
  }
  ADD_FAILURE() << "no port is free";
  return 0;
}

}  // namespace penstock::tests

#endif  // PENSTOCK_TESTS_FREE_PORT_H_
