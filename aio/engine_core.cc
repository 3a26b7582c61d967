#include "aio/engine_core.h"

#include <algorithm>
#include <cstdio>

namespace penstock::aio {

void Stopwatch::Set(bool on, int64_t now_ns) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (on == on_) return;
  if (on) {
    since_ns_ = now_ns;
  } else {
    total_ns_ += now_ns - since_ns_;
  }
  on_ = on;
}

int64_t Stopwatch::TotalNs(int64_t now_ns) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return total_ns_ + (on_ ? std::max<int64_t>(0, now_ns - since_ns_) : 0);
}

void SharedStopwatch::Set(bool on, int64_t now_ns) {
  const std::lock_guard<std::mutex> lock(mutex_);
  count_ += on ? 1 : -1;
  watch_.Set(count_ > 0, now_ns);
}

WaiterGuard::WaiterGuard(EngineCore& core, const Request* awaited) : core_(core) {
  for (size_t i = 0; awaited != nullptr && slot_ == nullptr && i < core.awaited.size(); ++i) {
    const Request* none = nullptr;
    if (core.awaited[i].compare_exchange_strong(none, awaited)) slot_ = &core.awaited[i];
  }
  (slot_ != nullptr ? core.awaited_count : core.waiters).fetch_add(1, std::memory_order_seq_cst);
}

WaiterGuard::~WaiterGuard() {
  if (slot_ != nullptr) slot_->store(nullptr);
  (slot_ != nullptr ? core_.awaited_count : core_.waiters).fetch_sub(1, std::memory_order_seq_cst);
}

bool EngineCore::IsAwaited(const Request* request) const {
  if (awaited_count.load(std::memory_order_seq_cst) == 0) return false;
  return std::any_of(awaited.begin(), awaited.end(),
                     [&](const auto& slot) { return slot.load(std::memory_order_seq_cst) == request; });
}

void EngineCore::NotifyWaiters() {
  { const std::lock_guard<std::mutex> lock(wait_mutex); }
  wait_changed.notify_all();
}

void EngineCore::Log(std::string_view line) {
  const std::lock_guard<std::mutex> lock(log_mutex);
  if (options.log) {
    options.log(line);
  } else {
    std::fprintf(stderr, "penstock: aio: %.*s\n", static_cast<int>(line.size()), line.data());
  }
}

void EngineCore::NoteFallback(std::string_view line) {
  {
    const std::lock_guard<std::mutex> lock(log_mutex);
    if (std::find(fallbacks.begin(), fallbacks.end(), line) != fallbacks.end()) return;
    fallbacks.emplace_back(line);
  }
  Log(line);
}

}  // namespace penstock::aio
