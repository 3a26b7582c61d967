// What is made on a thread of its own, some ahead of who uses it: so that reading the next piece and working
// on this one take place at once.
//
//   ReadAhead<Chunk> ahead(/*slots=*/2, [&](Chunk* to) -> absl::StatusOr<bool> { ... });  // false: no more
//   while (true) {
//     ASSIGN_OR_RETURN(Chunk* const chunk, ahead.Next());
//     if (chunk == nullptr) break;
//     ... until the next call ...
//   }
//
// The slots are made once and filled again and again: one is with the user, the others are filled. What
// `fill` touches is the thread's from construction to the end of this object, which waits for a call of
// `fill` that is under way. An error ends it; it comes after the pieces before it. An exception is an error:
// std::bad_alloc is kResourceExhausted, others kInternal.
#ifndef PENSTOCK_BASE_READ_AHEAD_H_
#define PENSTOCK_BASE_READ_AHEAD_H_

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace penstock {

template <typename Item>
class ReadAhead {
 public:
  using Fill = std::function<absl::StatusOr<bool>(Item* to)>;

  ReadAhead(size_t slots, Fill fill) : items_(slots), fill_(std::move(fill)) {
    PENSTOCK_CHECK(slots >= 2, "reading ahead takes two slots: one is used while the other is filled");
    try {
      thread_ = std::thread([this] { Run(); });
    } catch (const std::system_error& error) {
      Ended(absl::ResourceExhaustedError(absl::StrCat("no thread could be started: ", error.what())));
    }
  }
  ~ReadAhead() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // The next piece, valid until the following call; null after the last. One thread.
  absl::StatusOr<Item*> Next() {
    std::unique_lock lock(mutex_);
    if (used_) {
      used_ = false;
      ++taken_;
      changed_.notify_all();
    }
    changed_.wait(lock, [this] { return filled_ > taken_ || ended_; });
    if (filled_ == taken_) {
      if (!status_.ok()) return status_;
      return nullptr;
    }
    used_ = true;
    return &items_[taken_ % items_.size()];
  }

 private:
  void Run() {
    while (true) {
      Item* item = nullptr;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return filled_ - taken_ < items_.size() || stop_; });
        if (stop_) return;
        item = &items_[filled_ % items_.size()];
      }
      const absl::StatusOr<bool> more = FillOne(item);
      if (!more.ok() || !*more) return Ended(more.status());
      {
        std::lock_guard lock(mutex_);
        ++filled_;
      }
      changed_.notify_all();
    }
  }

  absl::StatusOr<bool> FillOne(Item* item) {
    try {
      return fill_(item);
    } catch (const std::bad_alloc&) {
      return absl::ResourceExhaustedError("there is not enough memory to read ahead");
    } catch (const std::exception& error) {
      return absl::InternalError(error.what());
    }
  }

  void Ended(absl::Status status) {
    {
      std::lock_guard lock(mutex_);
      status_ = std::move(status);
      ended_ = true;
    }
    changed_.notify_all();
  }

  std::vector<Item> items_;  // a ring
  const Fill fill_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t filled_ = 0, taken_ = 0;  // since the beginning
  bool used_ = false;              // item `taken_` is with the user
  bool stop_ = false, ended_ = false;
  absl::Status status_;
  std::thread thread_;  // last: it uses the others
};

}  // namespace penstock

#endif  // PENSTOCK_BASE_READ_AHEAD_H_
