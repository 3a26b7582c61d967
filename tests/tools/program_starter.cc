// `penstock`, loaded once and started many times: most of a short run is the loading of LibTorch. Each packet
// on descriptor 3 asks for one start (penstock_program.h); the answer is the process's number, or -1. What
// runs is penstock's own main, in a fork that has one thread, as after an exec.
//
// Drives are not measured here, which would take most of a short training and write hundreds of MB each time.
// The linker puts AssumeDevice in the place of aio::MeasureDevice (--wrap in CMakeLists.txt). A test of the
// measuring starts the program itself.
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "aio/profile.h"

namespace penstock::aio {
absl::StatusOr<DeviceProfile> MeasureStripe(const ProbeOptions& options) __asm__(
    "__real__ZN8penstock3aio13MeasureDeviceERKNS0_12ProbeOptionsE");
absl::StatusOr<DeviceProfile> AssumeDevice(const ProbeOptions& options) __asm__(
    "__wrap__ZN8penstock3aio13MeasureDeviceERKNS0_12ProbeOptionsE");
absl::StatusOr<DeviceProfile> AssumeDevice(const ProbeOptions& options) {
  if (options.rounds == 1) return MeasureStripe(options);  // drives beside each other, for their shares
  DeviceProfile profile;
  profile.directory = options.directory;
  profile.device = "assumed";
  profile.read_bytes_per_s = profile.mixed_bytes_per_s = 3e9;
  profile.write_bytes_per_s = 2e9;
  profile.saturating_bytes_in_flight = 2 << 20;
  profile.read_latency_us = 100;
  profile.write_latency_us = 50;
  return profile;
}
}  // namespace penstock::aio

int PenstockMain(int argc, char** argv);  // of tools/penstock/penstock.cc, by a definition in CMakeLists.txt

namespace {

constexpr int kSocket = 3;

// Becomes the program; `words` as penstock_program.h sends them.
[[noreturn]] void Become(std::vector<char*> words) {
  const std::string prefix = words[1];
  const std::string names[] = {"/dev/null", prefix + ".out", prefix + ".err"};
  close(kSocket);
  bool ready = chdir(words[0]) == 0;
  for (int fd = 0; fd < 3; ++fd) {
    const int file = open(names[fd].c_str(), fd == 0 ? O_RDONLY : O_CREAT | O_WRONLY, 0600);
    ready = ready && file >= 0 && dup2(file, fd) == fd;
    if (file > 2) close(file);
  }
  if (!ready) _exit(127);
  const int argc = std::stoi(words[2]);
  std::vector<char*> argv(words.begin() + 3, words.begin() + 3 + argc);
  argv.push_back(nullptr);
  clearenv();
  for (size_t i = 3 + static_cast<size_t>(argc); i < words.size(); ++i) putenv(words[i]);
  const int code = PenstockMain(argc, argv.data());
  // LibTorch's destructors take twenty times as long as a refusal. They run where a thread is left to meet
  // them, and where a sanitizer looks for leaks after them.
#if defined(__SANITIZE_ADDRESS__)
  exit(code);
#endif
  const std::filesystem::directory_iterator threads("/proc/self/task");
  if (std::distance(begin(threads), end(threads)) > 1) exit(code);
  std::cout.flush();
  std::fflush(nullptr);
  _exit(code);
}

}  // namespace

int main() {
  close_range(kSocket + 1, ~0U, 0);  // what the test had open must not stay so
  // The second fork's number, which the first one learns: a process whose parent has ended is the test's.
  void* const shared =
      mmap(nullptr, sizeof(pid_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 1;
  auto* const started = static_cast<volatile pid_t*>(shared);
  std::vector<char> packet(1 << 20);
  for (;;) {
    const ssize_t size = recv(kSocket, packet.data(), packet.size(), 0);
    if (size <= 0) return 0;  // the test has ended
    *started = -1;
    const pid_t between = fork();
    if (between == 0) {
      const pid_t program = fork();
      if (program == 0) {
        std::vector<char*> words;
        for (char* word = packet.data(); word < packet.data() + size; word += std::strlen(word) + 1)
          words.push_back(word);
        Become(std::move(words));
      }
      *started = program;
      _exit(0);
    }
    if (between > 0) waitpid(between, nullptr, 0);
    const pid_t answer = *started;
    if (send(kSocket, &answer, sizeof(answer), MSG_NOSIGNAL) != sizeof(answer)) return 0;
  }
}
