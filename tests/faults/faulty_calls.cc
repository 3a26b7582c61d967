#include "tests/faults/faulty_calls.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace penstock::tests {
namespace {

constexpr int kMostDescriptors = 1 << 16;
constexpr int64_t kMostNoted = 1 << 16;

// All of it has static storage without constructors: calls come before main() already.
char watched[8][PATH_MAX];
int watched_count = 0;
std::atomic<bool> on{false};
FaultyCall faulty_call;
std::atomic<int64_t> counted{0};
std::atomic<const char*> lasting_function{nullptr};
std::array<const char*, kMostNoted> noted{};
std::array<std::atomic<bool>, kMostDescriptors> ours{};
std::array<std::atomic<DIR*>, 64> listings{};
char failed_call[PATH_MAX + 64] = {};

bool IsWatched(const char* path) {
  if (path == nullptr) return false;
  for (int i = 0; i < watched_count; ++i) {
    const size_t length = std::strlen(watched[i]);
    if (std::strncmp(path, watched[i], length) == 0 && (path[length] == '/' || path[length] == '\0'))
      return true;
  }
  // Relative paths are below the current directory, which is a watched one in the tests.
  if (path[0] != '/') return true;
  int fd = -1;
  if (std::sscanf(path, "/proc/self/fd/%d", &fd) == 1 && fd >= 0 && fd < kMostDescriptors) return ours[fd];
  return false;
}

// Of the arguments that the C library declares as never null, but a program may pass.
bool IsAbsolute(const char* path) { return path != nullptr && path[0] == '/'; }
bool IsEmpty(const char* path) { return path == nullptr || path[0] == '\0'; }

bool IsWatched(int fd) { return fd >= 0 && fd < kMostDescriptors && ours[static_cast<size_t>(fd)]; }

// Whether this call, of a watched path or descriptor, is to fail; sets errno then.
bool Fails(const char* function, const char* path) {
  const int64_t number = counted.fetch_add(1) + 1;
  if (number <= kMostNoted) noted[static_cast<size_t>(number - 1)] = function;
  const char* const lasting = lasting_function.load();
  const bool now = number == faulty_call.number;
  if (!now && (lasting == nullptr || std::strcmp(lasting, function) != 0)) return false;
  if (now) {
    std::snprintf(failed_call, sizeof(failed_call), "%s %s", function, path == nullptr ? "" : path);
    if (faulty_call.lasting) lasting_function = function;
  }
  if (faulty_call.kills) (void)raise(SIGKILL);
  errno = faulty_call.error;
  return true;
}
bool FailsAt(const char* function, const char* path) {
  return on && IsWatched(path) && Fails(function, path);
}
bool FailsOn(const char* function, int fd) {
  if (!on || !IsWatched(fd)) return false;
  char path[32];
  std::snprintf(path, sizeof(path), "fd %d", fd);
  return Fails(function, path);
}

int Note(int fd, bool is_ours) {
  if (fd >= 0 && fd < kMostDescriptors) ours[static_cast<size_t>(fd)] = is_ours;
  return fd;
}
DIR* Note(DIR* listing) {
  if (listing == nullptr) return nullptr;
  for (std::atomic<DIR*>& each : listings) {
    DIR* none = nullptr;
    if (each.compare_exchange_strong(none, listing)) break;
  }
  return listing;
}
bool IsOurs(DIR* listing) {
  return std::any_of(listings.begin(), listings.end(), [&](const auto& each) { return each == listing; });
}

template <typename Function>
Function* Real(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

void WatchCalls(const std::vector<std::string>& directories, const FaultyCall& faulty) {
  on = false;
  watched_count = 0;
  for (const std::string& directory : directories) {
    if (watched_count == 8) break;
    std::snprintf(watched[watched_count++], PATH_MAX, "%s", directory.c_str());
  }
  faulty_call = faulty;
  counted = 0;
  lasting_function = nullptr;
  failed_call[0] = '\0';
  on = true;
}
int64_t CountedCalls() { return counted; }
std::string FailedCall() { return failed_call; }
std::vector<const char*> CountedFunctions() {
  return {noted.begin(), noted.begin() + std::min<int64_t>(counted, kMostNoted)};
}

}  // namespace penstock::tests

using penstock::tests::Fails;
using penstock::tests::FailsAt;
using penstock::tests::FailsOn;
using penstock::tests::IsAbsolute;
using penstock::tests::IsEmpty;
using penstock::tests::IsOurs;
using penstock::tests::IsWatched;
using penstock::tests::Note;
using penstock::tests::Real;

// The calls. (Each is what its manual page says; "64" variants are the same functions under another name.)
#define PENSTOCK_REAL(name) static auto* const real = Real<decltype(name)>(#name)

#define PENSTOCK_OPEN(name)                                \
  int name(const char* path, int flags, ...) {             \
    PENSTOCK_REAL(name);                                   \
    va_list arguments;                                     \
    va_start(arguments, flags);                            \
    const mode_t mode = va_arg(arguments, mode_t);         \
    va_end(arguments);                                     \
    if (FailsAt("open", path)) return -1;                  \
    return Note(real(path, flags, mode), IsWatched(path)); \
  }
#define PENSTOCK_OPENAT(name)                                                                             \
  int name(int directory, const char* path, int flags, ...) {                                             \
    PENSTOCK_REAL(name);                                                                                  \
    va_list arguments;                                                                                    \
    va_start(arguments, flags);                                                                           \
    const mode_t mode = va_arg(arguments, mode_t);                                                        \
    va_end(arguments);                                                                                    \
    const bool ours = IsAbsolute(path) ? IsWatched(path) : directory == AT_FDCWD || IsWatched(directory); \
    if (ours && penstock::tests::on && Fails("open", path)) return -1;                                    \
    return Note(real(directory, path, flags, mode), ours);                                                \
  }
#define PENSTOCK_STAT(name, type)                         \
  int name(const char* path, type* info) noexcept {       \
    PENSTOCK_REAL(name);                                  \
    return FailsAt("stat", path) ? -1 : real(path, info); \
  }
#define PENSTOCK_FSTAT(name, type)                     \
  int name(int fd, type* info) noexcept {              \
    PENSTOCK_REAL(name);                               \
    return FailsOn("fstat", fd) ? -1 : real(fd, info); \
  }
#define PENSTOCK_FSTATAT(name, type)                                                                     \
  int name(int fd, const char* path, type* info, int flags) noexcept {                                   \
    PENSTOCK_REAL(name);                                                                                 \
    const bool fails = fd == AT_FDCWD || IsAbsolute(path) ? FailsAt("stat", path) : FailsOn("stat", fd); \
    return fails ? -1 : real(fd, path, info, flags);                                                     \
  }
#define PENSTOCK_READDIR(name, type)                                                    \
  type* name(DIR* listing) {                                                            \
    PENSTOCK_REAL(name);                                                                \
    if (penstock::tests::on && IsOurs(listing) && Fails("readdir", "")) return nullptr; \
    return real(listing);                                                               \
  }
#define PENSTOCK_READ_AT(name, offset_type)                          \
  ssize_t name(int fd, void* to, size_t bytes, offset_type offset) { \
    PENSTOCK_REAL(name);                                             \
    return FailsOn("pread", fd) ? -1 : real(fd, to, bytes, offset);  \
  }
#define PENSTOCK_WRITE_AT(name, offset_type)                                 \
  ssize_t name(int fd, const void* from, size_t bytes, offset_type offset) { \
    PENSTOCK_REAL(name);                                                     \
    return FailsOn("pwrite", fd) ? -1 : real(fd, from, bytes, offset);       \
  }
#define PENSTOCK_ALLOCATE(name, offset_type)                              \
  int name(int fd, int mode, offset_type offset, offset_type bytes) {     \
    PENSTOCK_REAL(name);                                                  \
    return FailsOn("fallocate", fd) ? -1 : real(fd, mode, offset, bytes); \
  }
#define PENSTOCK_TRUNCATE(name, offset_type)                \
  int name(int fd, offset_type bytes) noexcept {            \
    PENSTOCK_REAL(name);                                    \
    return FailsOn("ftruncate", fd) ? -1 : real(fd, bytes); \
  }
// What is not watched is synced; see the header.
#define PENSTOCK_SYNC(name)                                     \
  int name(int fd) {                                            \
    PENSTOCK_REAL(name);                                        \
    if (FailsOn(#name, fd)) return -1;                          \
    return penstock::tests::on && IsWatched(fd) ? 0 : real(fd); \
  }
#define PENSTOCK_ON_PATH(name)                     \
  int name(const char* path) noexcept {            \
    PENSTOCK_REAL(name);                           \
    return FailsAt(#name, path) ? -1 : real(path); \
  }

extern "C" {

PENSTOCK_OPEN(open)
PENSTOCK_OPEN(open64)
PENSTOCK_OPENAT(openat)
PENSTOCK_OPENAT(openat64)
PENSTOCK_STAT(stat, struct stat)
PENSTOCK_STAT(lstat, struct stat)
PENSTOCK_STAT(stat64, struct stat64)
PENSTOCK_STAT(lstat64, struct stat64)
PENSTOCK_FSTAT(fstat, struct stat)
PENSTOCK_FSTAT(fstat64, struct stat64)
PENSTOCK_FSTATAT(fstatat, struct stat)
PENSTOCK_FSTATAT(fstatat64, struct stat64)
PENSTOCK_READDIR(readdir, dirent)
PENSTOCK_READDIR(readdir64, dirent64)
PENSTOCK_READ_AT(pread, off_t)
PENSTOCK_READ_AT(pread64, off64_t)
PENSTOCK_WRITE_AT(pwrite, off_t)
PENSTOCK_WRITE_AT(pwrite64, off64_t)
PENSTOCK_ALLOCATE(fallocate, off_t)
PENSTOCK_ALLOCATE(fallocate64, off64_t)
PENSTOCK_TRUNCATE(ftruncate, off_t)
PENSTOCK_TRUNCATE(ftruncate64, off64_t)
PENSTOCK_SYNC(fsync)
PENSTOCK_SYNC(fdatasync)
PENSTOCK_ON_PATH(unlink)
PENSTOCK_ON_PATH(rmdir)

int statx(int fd, const char* path, int flags, unsigned mask, struct statx* info) noexcept {
  PENSTOCK_REAL(statx);
  const bool named = IsAbsolute(path) || (fd == AT_FDCWD && !IsEmpty(path));
  return (named ? FailsAt("statx", path) : FailsOn("statx", fd)) ? -1 : real(fd, path, flags, mask, info);
}
int access(const char* path, int mode) noexcept {
  PENSTOCK_REAL(access);
  return FailsAt("access", path) ? -1 : real(path, mode);
}
int mkdir(const char* path, mode_t mode) noexcept {
  PENSTOCK_REAL(mkdir);
  return FailsAt("mkdir", path) ? -1 : real(path, mode);
}
int rename(const char* from, const char* to) noexcept {
  PENSTOCK_REAL(rename);
  return FailsAt("rename", to) ? -1 : real(from, to);
}
int renameat2(int from_directory, const char* from, int to_directory, const char* to,
              unsigned flags) noexcept {
  PENSTOCK_REAL(renameat2);
  return FailsAt("rename", to) ? -1 : real(from_directory, from, to_directory, to, flags);
}
int link(const char* from, const char* to) noexcept {
  PENSTOCK_REAL(link);
  return FailsAt("link", to) ? -1 : real(from, to);
}
int linkat(int from_directory, const char* from, int to_directory, const char* to, int flags) noexcept {
  PENSTOCK_REAL(linkat);
  return FailsAt("link", to) ? -1 : real(from_directory, from, to_directory, to, flags);
}
int unlinkat(int directory, const char* path, int flags) noexcept {
  PENSTOCK_REAL(unlinkat);
  const bool named = directory == AT_FDCWD || IsAbsolute(path);
  return (named ? FailsAt("unlink", path) : FailsOn("unlink", directory)) ? -1 : real(directory, path, flags);
}
int flock(int fd, int operation) noexcept {
  PENSTOCK_REAL(flock);
  return FailsOn("flock", fd) ? -1 : real(fd, operation);
}
ssize_t read(int fd, void* to, size_t bytes) {
  PENSTOCK_REAL(read);
  return FailsOn("read", fd) ? -1 : real(fd, to, bytes);
}
ssize_t write(int fd, const void* from, size_t bytes) {
  PENSTOCK_REAL(write);
  return FailsOn("write", fd) ? -1 : real(fd, from, bytes);
}
DIR* opendir(const char* path) {
  PENSTOCK_REAL(opendir);
  if (FailsAt("opendir", path)) return nullptr;
  return IsWatched(path) ? Note(real(path)) : real(path);
}
DIR* fdopendir(int fd) {
  PENSTOCK_REAL(fdopendir);
  if (FailsOn("opendir", fd)) return nullptr;
  return IsWatched(fd) ? Note(real(fd)) : real(fd);
}
int closedir(DIR* listing) {
  PENSTOCK_REAL(closedir);
  for (auto& each : penstock::tests::listings) {
    DIR* mine = listing;
    if (each.compare_exchange_strong(mine, nullptr)) break;
  }
  return real(listing);
}
// Has the number of a file, perhaps, that the C library closed by itself.
int eventfd(unsigned int value, int flags) {
  PENSTOCK_REAL(eventfd);
  return Note(real(value, flags), false);
}
int close(int fd) {
  PENSTOCK_REAL(close);
  Note(fd, false);
  return real(fd);
}

}  // extern "C"
