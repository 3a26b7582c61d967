// A library to be loaded before the C library's (LD_PRELOAD): from the moment that a file is there the clock
// of intervals (CLOCK_MONOTONIC) runs faster, and waits until a time by it end when it is that time.
//
//   FAST_CLOCK_FROM    the file
//   FAST_CLOCK_FACTOR  how much faster
#include <dlfcn.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace {

template <typename Function>
Function Next(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

constexpr int64_t kSecond = 1'000'000'000;

std::atomic<int64_t> began = 0;  // when it became fast, by the true clock; 0: not yet

double Factor() {
  static const char* const factor = ::getenv("FAST_CLOCK_FACTOR");
  return factor == nullptr ? 1 : std::atof(factor);
}

bool Begins() {
  static const char* const from = ::getenv("FAST_CLOCK_FROM");
  return from != nullptr && ::access(from, F_OK) == 0;
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec* time) noexcept {
  static const auto next = Next<int (*)(clockid_t, timespec*)>("clock_gettime");
  const int result = next(clock, time);
  if (result != 0 || clock != CLOCK_MONOTONIC) return result;
  const int64_t now = time->tv_sec * kSecond + time->tv_nsec;
  int64_t from = began.load();
  if (from == 0) {
    if (!Begins()) return 0;
    from = began.compare_exchange_strong(from, now) ? now : from;
  }
  const int64_t fast = from + static_cast<int64_t>(static_cast<double>(now - from) * Factor());
  time->tv_sec = fast / kSecond;
  time->tv_nsec = fast % kSecond;
  return 0;
}

int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const timespec* until) {
  static const auto next =
      Next<int (*)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*)>("pthread_cond_clockwait");
  const int64_t from = began.load();
  timespec real = *until;
  if (from != 0 && clock == CLOCK_MONOTONIC) {
    const int64_t fast = until->tv_sec * kSecond + until->tv_nsec;
    const int64_t then = from + static_cast<int64_t>(static_cast<double>(fast - from) / Factor());
    real.tv_sec = then / kSecond;
    real.tv_nsec = then % kSecond;
  }
  return next(condition, mutex, clock, &real);
}

}  // extern "C"
