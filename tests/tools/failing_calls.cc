// A library to be loaded before the C library's (LD_PRELOAD): one call of one function fails.
//
//   FAIL_CALL   readdir (an entry of a directory), stat, or open
//   FAIL_PATH   of the directory or file
//   FAIL_WHEN   which of the calls of it, from 1
//   FAIL_NOTE   a file that is made when the call fails
//   FAIL_ERROR  the number of its error [EIO]
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

template <typename Function>
Function Next(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

using Open = int (*)(const char*, int, ...);

bool Fails(const char* call, const char* path) {
  static const char* const fail_call = ::getenv("FAIL_CALL");
  static const char* const fail_path = ::getenv("FAIL_PATH");
  static const char* const fail_when = ::getenv("FAIL_WHEN");
  static const char* const fail_note = ::getenv("FAIL_NOTE");
  static std::atomic<int> calls = 0;
  if (fail_call == nullptr || fail_path == nullptr || fail_when == nullptr || fail_note == nullptr)
    return false;
  if (path == nullptr || std::strcmp(call, fail_call) != 0 || std::strcmp(path, fail_path) != 0) return false;
  if (++calls != std::atoi(fail_when)) return false;
  static const auto open = Next<Open>("open");
  ::close(open(fail_note, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
  static const char* const fail_error = ::getenv("FAIL_ERROR");
  errno = fail_error == nullptr ? EIO : std::atoi(fail_error);
  return true;
}

bool ListingFails(DIR* directory) {
  char link[64], path[PATH_MAX];
  std::snprintf(link, sizeof(link), "/proc/self/fd/%d", ::dirfd(directory));
  const ssize_t length = ::readlink(link, path, sizeof(path) - 1);
  if (length < 0) return false;
  path[length] = '\0';
  return Fails("readdir", path);
}

int OpenUnlessItFails(const char* name, const char* path, int flags, va_list more) {
  if (Fails("open", path)) return -1;
  const bool makes = (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE;
  const mode_t mode = makes ? va_arg(more, mode_t) : 0;
  return Next<Open>(name)(path, flags, mode);
}

}  // namespace

extern "C" {

dirent* readdir(DIR* directory) {
  static const auto next = Next<dirent* (*)(DIR*)>("readdir");
  return ListingFails(directory) ? nullptr : next(directory);
}

dirent64* readdir64(DIR* directory) {
  static const auto next = Next<dirent64* (*)(DIR*)>("readdir64");
  return ListingFails(directory) ? nullptr : next(directory);
}

int stat(const char* path, struct stat* info) noexcept {
  static const auto next = Next<int (*)(const char*, struct stat*)>("stat");
  return Fails("stat", path) ? -1 : next(path, info);
}

int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const int fd = OpenUnlessItFails("open", path, flags, more);
  va_end(more);
  return fd;
}

int open64(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const int fd = OpenUnlessItFails("open64", path, flags, more);
  va_end(more);
  return fd;
}

}  // extern "C"
