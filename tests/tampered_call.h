// A child process whose n-th system call of some kinds fails, or never happens because the process is killed
// at it: what a program leaves at every moment between two changes of a directory, and what it does where a
// single read, rename or sync fails.
#ifndef PENSTOCK_TESTS_TAMPERED_CALL_H_
#define PENSTOCK_TESTS_TAMPERED_CALL_H_

#include <elf.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <vector>

namespace penstock {

// The calls that change names.
inline const std::vector<uint64_t>& NamingCalls() {
  static const std::vector<uint64_t> calls = {
#ifdef SYS_rename
      SYS_rename,   SYS_link,      SYS_unlink, SYS_mkdir,    SYS_rmdir,
#endif
      SYS_renameat, SYS_renameat2, SYS_linkat, SYS_unlinkat, SYS_mkdirat};
  return calls;
}

struct Tampering {
  std::vector<uint64_t> calls;
  size_t at = 0;  // the how manieth of them, from 0, of the process's first thread
  int error = 0;  // what it fails with; 0: SIGKILL
  // Counted are the calls for which this is true; empty: all.
  std::function<bool(const uint64_t* arguments)> counts = {};
};

struct Tampered {
  bool can = true;       // false: this place does not allow tracing, or the processor is not served
  bool reached = false;  // there were so many calls
  int code = -1;         // exit code; 1000 + n: ended by signal n
};

// Runs `body` in a child process, whose exit code is what it returns; it may as well become another program.
inline Tampered RunTampered(const Tampering& tampering, const std::function<int()>& body) {
#if !defined(__x86_64__)
  if (tampering.error != 0) return {.can = false};
#endif
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(77);
    raise(SIGSTOP);
    _exit(body());
  }
  Tampered result;
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child || !WIFSTOPPED(status)) return {.can = false};
  ptrace(PTRACE_SETOPTIONS, child, nullptr, PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL);
  bool failing = false;
  size_t seen = 0;
  long signal = 0;
  while (ptrace(PTRACE_SYSCALL, child, nullptr, signal) == 0 && waitpid(child, &status, 0) == child &&
         WIFSTOPPED(status)) {
    signal = 0;
    if (WSTOPSIG(status) != (SIGTRAP | 0x80)) {
      signal = WSTOPSIG(status) == SIGTRAP ? 0 : WSTOPSIG(status);
      continue;
    }
    __ptrace_syscall_info info{};
    if (ptrace(PTRACE_GET_SYSCALL_INFO, child, sizeof(info), &info) <= 0) {
      kill(child, SIGKILL);
      result.can = false;
      continue;
    }
#if defined(__x86_64__)
    user_regs_struct registers{};
    iovec place{&registers, sizeof(registers)};
    if (failing) {
      failing = false;
      ptrace(PTRACE_GETREGSET, child, NT_PRSTATUS, &place);
      registers.rax = static_cast<unsigned long long>(-static_cast<long long>(tampering.error));
      ptrace(PTRACE_SETREGSET, child, NT_PRSTATUS, &place);
    }
#endif
    if (info.op != PTRACE_SYSCALL_INFO_ENTRY ||
        std::find(tampering.calls.begin(), tampering.calls.end(), info.entry.nr) == tampering.calls.end() ||
        (tampering.counts && !tampering.counts(reinterpret_cast<const uint64_t*>(info.entry.args))) ||
        seen++ != tampering.at) {
      continue;
    }
    result.reached = true;
    if (tampering.error == 0) {
      kill(child, SIGKILL);
      continue;
    }
#if defined(__x86_64__)
    failing = true;
    ptrace(PTRACE_GETREGSET, child, NT_PRSTATUS, &place);
    registers.orig_rax = static_cast<unsigned long long>(-1);
    ptrace(PTRACE_SETREGSET, child, NT_PRSTATUS, &place);
#endif
  }
  if (WIFSTOPPED(status)) waitpid(child, &status, 0);
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  result.can = result.can && result.code != 77;
  return result;
}

}  // namespace penstock

#endif  // PENSTOCK_TESTS_TAMPERED_CALL_H_
