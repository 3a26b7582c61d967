// Runs the `penstock` program as a user does, and gives back its exit code and what it wrote.
#ifndef PENSTOCK_TESTS_TOOLS_PENSTOCK_PROGRAM_H_
#define PENSTOCK_TESTS_TOOLS_PENSTOCK_PROGRAM_H_

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace penstock::tools::testing_support {

using Arguments = std::vector<std::string>;

inline std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

inline void WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

inline std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

inline Arguments operator+(Arguments left, const Arguments& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

struct Ran {
  int code = -1;  // exit code; 1000 + n: ended by signal n
  std::string out, err;
  int64_t read_bytes = 0, written_bytes = 0;  // of drives, as the kernel counts
  int64_t peak_bytes = 0;                     // of memory
};

// Starts programs by forks of one that is loaded (program_starter.cc). It ends with the test program.
class ProgramStarter {
 public:
  static ProgramStarter& Get() {
    static ProgramStarter starter;
    return starter;
  }

  // The number of a process that is now a child of this one; -1: it could not be started. What libraries read
  // as they are loaded (OMP_*, LD_*) is this process's environment at the first start.
  pid_t Start(const std::string& directory, const std::string& prefix, const Arguments& arguments) {
    std::string packet;
    const auto add = [&packet](const std::string& word) { packet.append(word.c_str(), word.size() + 1); };
    for (const std::string& word : {directory, prefix, std::to_string(arguments.size())}) add(word);
    for (const std::string& word : arguments) add(word);
    for (char** each = environ; *each != nullptr; ++each) add(*each);
    pid_t started = -1;
    prctl(PR_SET_CHILD_SUBREAPER, 1);  // orphans are this process's children
    if (send(socket_, packet.data(), packet.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(packet.size()) ||
        recv(socket_, &started, sizeof(started), 0) != sizeof(started))
      started = -1;
    prctl(PR_SET_CHILD_SUBREAPER, 0);
    return started;
  }

 private:
  ProgramStarter() {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) return;
    for (const int end : ends) {
      const int bytes = 1 << 20;  // the longest packet
      setsockopt(end, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
    }
    socket_ = ends[0];
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 3);
    char program[] = PENSTOCK_STARTER;
    char* argv[] = {program, nullptr};
    EXPECT_EQ(posix_spawn(&pid_, program, &actions, nullptr, argv, environ), 0) << program;
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
  }
  ~ProgramStarter() {
    if (pid_ <= 0 || getpid() != owner_) return;  // a fork of the test ends
    shutdown(socket_, SHUT_RDWR);
    waitpid(pid_, nullptr, 0);
    close(socket_);
  }

  const pid_t owner_ = getpid();
  int socket_ = -1;
  pid_t pid_ = -1;
};

// A running program, in `directory`, which its output's files go to and what it makes by default. `launcher`:
// arguments before it, of a program that becomes it (exec); {"env"} where a start of its own matters.
class Program {
 public:
  Program(const std::string& directory, Arguments arguments, Arguments launcher = {}) {
    static int count = 0;
    prefix_ = directory + "/program." + std::to_string(++count);
    arguments.insert(arguments.begin(), PENSTOCK_PROGRAM);
    if (launcher.empty()) {
      pid_ = ProgramStarter::Get().Start(directory, prefix_, arguments);
      EXPECT_GT(pid_, 0) << PENSTOCK_STARTER;
      return;
    }
    arguments.insert(arguments.begin(), launcher.begin(), launcher.end());
    std::vector<char*> argv;
    for (std::string& word : arguments) argv.push_back(word.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addchdir_np(&actions, directory.c_str());
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, (prefix_ + ".out").c_str(), O_CREAT | O_WRONLY, 0600);
    posix_spawn_file_actions_addopen(&actions, 2, (prefix_ + ".err").c_str(), O_CREAT | O_WRONLY, 0600);
    const int failed = posix_spawnp(&pid_, argv[0], &actions, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    if (failed != 0) pid_ = -1;
    EXPECT_EQ(failed, 0) << argv[0];
  }
  ~Program() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Program(Program&& other) noexcept
      : pid_(std::exchange(other.pid_, -1)), prefix_(std::move(other.prefix_)) {}
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void Signal(int signal) const { kill(pid_, signal); }
  const std::string& prefix() const { return prefix_; }  // of its output's files: .out, .err

  // Ended by itself; it is still to be waited for.
  bool EndsWithin(double seconds) const {
    for (; seconds > 0; seconds -= 0.02) {
      siginfo_t info{};
      if (waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
          info.si_pid == pid_)
        return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return false;
  }

  Ran Wait() {
    Ran ran;
    int status = 0;
    rusage usage{};
    if (pid_ <= 0 || wait4(pid_, &status, 0, &usage) != pid_) return ran;
    pid_ = -1;
    ran.read_bytes = int64_t{512} * usage.ru_inblock;
    ran.written_bytes = int64_t{512} * usage.ru_oublock;
    ran.peak_bytes = int64_t{1024} * usage.ru_maxrss;
    ran.code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
    ran.out = ReadFile(prefix_ + ".out");
    ran.err = ReadFile(prefix_ + ".err");
    return ran;
  }

 private:
  pid_t pid_ = -1;
  std::string prefix_;
};

// A directory of its own below the current one, which may be on a disk with direct I/O.
class ProgramTest : public testing::Test {
 protected:
  ProgramTest() {
    std::string name = (std::filesystem::current_path() / "penstock_test.XXXXXX").string();
    dir_ = ::mkdtemp(name.data());
    text_ = dir_ + "/text";
    std::string text;
    // Words in an order that is not regular, and the same everywhere.
    static const char* const kWords[] = {"water ", "runs ", "through ", "the ", "gate ", "and ", "down.\n"};
    for (uint32_t i = 0, x = 1; i < 6000; ++i) {
      x = x * 1664525u + 1013904223u;
      text += kWords[(x >> 24) % 7];
    }
    WriteFile(text_, text);
  }
  ~ProgramTest() override { std::filesystem::remove_all(dir_); }

  Ran Run(Arguments arguments) { return Program(dir_, std::move(arguments)).Wait(); }

  // Several at a time, since most of each is the start of the program.
  std::vector<Ran> RunAll(const std::vector<Arguments>& all) {
    std::vector<Ran> results;
    for (size_t from = 0; from < all.size(); from += 4) {
      std::vector<Program> some;
      for (size_t i = from; i < std::min(from + 4, all.size()); ++i) some.emplace_back(dir_, all[i]);
      for (Program& program : some) results.push_back(program.Wait());
    }
    return results;
  }

  // A small training of this directory's text, in one thread: fast, and the same bits every time.
  Arguments Train(const std::string& state, Arguments more = {}) const {
    Arguments arguments = {"train", "--model", "gpt-tiny", "--dtype", "fp32", "--threads", "1", "--quiet"};
    return arguments + Arguments{"--data", text_, "--state-dir", state} + more;
  }

  // Blocks until the file has that many lines; false after a minute.
  static bool WaitForLines(const std::string& path, size_t lines) {
    for (int i = 0; i < 12000; ++i) {
      if (Lines(ReadFile(path)).size() >= lines) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }

  // Blocks until the file is there, which may be for a moment only; false after a minute.
  static bool WaitForFile(const std::string& path) {
    for (int i = 0; i < 300000; ++i) {
      if (std::filesystem::exists(path)) return true;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    return false;
  }

  std::string dir_;
  std::string text_;
};

}  // namespace penstock::tools::testing_support

#endif  // PENSTOCK_TESTS_TOOLS_PENSTOCK_PROGRAM_H_
