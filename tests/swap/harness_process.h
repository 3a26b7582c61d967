// The store harness (store_harness.cc) as a process of its own: started, listened to, and killed.
#ifndef PENSTOCK_TESTS_SWAP_HARNESS_PROCESS_H_
#define PENSTOCK_TESTS_SWAP_HARNESS_PROCESS_H_

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace penstock::swap {

struct HarnessOutcome {
  bool killed = false;
  int exit_code = -1;
  int64_t last_step = -1;        // printed last in this run
  int64_t last_checkpoint = -1;  // likewise
  bool overwritten = false;      // it found its only version half overwritten and started over
  std::string error;
};

class HarnessProcess {
 public:
  explicit HarnessProcess(std::vector<std::string> arguments) {
    int in[2], out[2], err[2];
    if (::pipe2(in, O_CLOEXEC) != 0 || ::pipe2(out, O_CLOEXEC) != 0 || ::pipe2(err, O_CLOEXEC) != 0) return;
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, in[0], 0);
    ::posix_spawn_file_actions_adddup2(&actions, out[1], 1);
    ::posix_spawn_file_actions_adddup2(&actions, err[1], 2);
    arguments.insert(arguments.begin(), STORE_HARNESS);
    std::vector<char*> argv;
    for (std::string& word : arguments) argv.push_back(word.data());
    argv.push_back(nullptr);
    if (::posix_spawn(&pid_, STORE_HARNESS, &actions, nullptr, argv.data(), environ) != 0) {
      pid_ = -1;
      outcome_.error = "cannot start " STORE_HARNESS;
    }
    ::posix_spawn_file_actions_destroy(&actions);
    for (const int fd : {in[0], out[1], err[1]}) ::close(fd);
    in_ = in[1];
    out_ = out[0];
    err_ = err[0];
  }
  ~HarnessProcess() {
    if (pid_ > 0) {
      Kill();
      (void)End();
    }
  }
  HarnessProcess(const HarnessProcess&) = delete;
  HarnessProcess& operator=(const HarnessProcess&) = delete;

  // Takes in what it prints, waiting for it up to `wait_ms` (below 0: for ever). False: there will be no
  // more.
  bool Listen(int wait_ms = -1) {
    pollfd poll_fd{out_, POLLIN, 0};
    if (::poll(&poll_fd, 1, wait_ms) <= 0) return true;
    char buffer[4096];
    const ssize_t n = ::read(out_, buffer, sizeof buffer);
    if (n <= 0) return false;
    text_.append(buffer, static_cast<size_t>(n));
    return true;
  }
  // Only whole lines count: a torn one was never said.
  int64_t Last(const std::string& what) const {
    const size_t end = text_.rfind('\n');
    if (end == std::string::npos) return -1;
    const size_t start = text_.rfind(what + " ", end);
    const size_t number = start + what.size() + 1;
    return start == std::string::npos ? -1 : std::stoll(text_.substr(number, end - number));
  }
  bool said_something() const { return !text_.empty(); }

  void Kill() const { ::kill(pid_, SIGKILL); }
  // Closes its standard input.
  void LetGo() {
    if (in_ >= 0) ::close(std::exchange(in_, -1));
  }
  // Waits for its end.
  HarnessOutcome End() {
    LetGo();
    if (pid_ <= 0) return outcome_;
    while (Listen()) continue;
    char buffer[4096];
    for (ssize_t n; (n = ::read(err_, buffer, sizeof buffer)) > 0;)
      outcome_.error.append(buffer, static_cast<size_t>(n));
    ::close(out_);
    ::close(err_);
    int status = 0;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
    outcome_.killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    if (WIFEXITED(status)) outcome_.exit_code = WEXITSTATUS(status);
    outcome_.overwritten = text_.rfind("overwritten\n", 0) == 0;
    outcome_.last_step = Last("step");
    outcome_.last_checkpoint = Last("checkpoint");
    return outcome_;
  }

 private:
  pid_t pid_ = -1;
  int in_ = -1, out_ = -1, err_ = -1;
  std::string text_;
  HarnessOutcome outcome_;
};

// Runs it to its end, or kills it `kill_after_us` after its first printed line (below 0: never).
inline HarnessOutcome RunHarness(std::vector<std::string> arguments, int64_t kill_after_us = -1) {
  using Clock = std::chrono::steady_clock;
  HarnessProcess process(std::move(arguments));
  std::optional<Clock::time_point> deadline;
  int wait_ms = -1;
  while (process.Listen(wait_ms)) {
    if (kill_after_us < 0 || !process.said_something()) continue;
    if (!deadline.has_value()) deadline = Clock::now() + std::chrono::microseconds(kill_after_us);
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(*deadline - Clock::now());
    wait_ms = static_cast<int>(std::max<int64_t>(0, left.count()));
    if (Clock::now() < *deadline) continue;
    process.Kill();
    break;
  }
  return process.End();
}

}  // namespace penstock::swap

#endif  // PENSTOCK_TESTS_SWAP_HARNESS_PROCESS_H_
