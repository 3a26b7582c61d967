// A kernel that refuses system calls, for ever or when it is told to, by seccomp filters in a child process.
#ifndef PENSTOCK_TESTS_AIO_REFUSING_KERNEL_H_
#define PENSTOCK_TESTS_AIO_REFUSING_KERNEL_H_

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <initializer_list>
#include <thread>
#include <vector>

namespace penstock::aio {

// Answers the system calls named with EPERM from now on, in this process and its threads.
inline void ForbidSyscalls(std::initializer_list<uint32_t> numbers) {
  std::vector<sock_filter> program;
  program.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)));
  for (const uint32_t number : numbers) {
    program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1));
    program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0) {
    _exit(77);
  }
}

// Runs the body in a child process; its exit status, 77 for "cannot be set up here".
inline int InChild(const std::function<int()>& body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Lets the system calls named through or refuses them, as it is told at the time: those of the threads that
// are started after it. For the life of the process, which is a child.
class SyscallGate {
 public:
  explicit SyscallGate(std::initializer_list<uint32_t> numbers) {
    std::vector<sock_filter> program;
    program.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)));
    for (const uint32_t number : numbers) {
      program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1));
      program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF));
    }
    program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) _exit(77);
    listener_ = static_cast<int>(
        syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &filter));
    if (listener_ < 0) _exit(77);
    std::thread([this] { Answer(); }).detach();
  }

  void Refuse(int error) { refuse_ = error; }
  void LetThrough() { refuse_ = 0; }
  uint64_t refused() const { return refused_; }
  uint64_t seen() const { return seen_; }

 private:
  void Answer() {
    while (true) {
      seccomp_notif call{};
      if (ioctl(listener_, SECCOMP_IOCTL_NOTIF_RECV, &call) != 0) continue;
      ++seen_;
      seccomp_notif_resp answer{};
      answer.id = call.id;
      answer.error = -refuse_;
      if (answer.error == 0) answer.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
      if (answer.error != 0) ++refused_;
      ioctl(listener_, SECCOMP_IOCTL_NOTIF_SEND, &answer);
    }
  }

  int listener_ = -1;
  std::atomic<int> refuse_{0};
  std::atomic<uint64_t> seen_{0};
  std::atomic<uint64_t> refused_{0};
};

}  // namespace penstock::aio

#endif  // PENSTOCK_TESTS_AIO_REFUSING_KERNEL_H_
