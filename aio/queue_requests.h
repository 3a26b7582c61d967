// The unfinished requests of a device queue, in order of submission.
#ifndef PENSTOCK_AIO_QUEUE_REQUESTS_H_
#define PENSTOCK_AIO_QUEUE_REQUESTS_H_

#include <mutex>
#include <string>
#include <vector>

#include "aio/device_queue.h"

namespace penstock::aio {

// The queue's thread adds and removes under a mutex, any thread describes.
class DeviceQueue::Unfinished {
 public:
  // A chain linked by next_. Returns whether one of them is to be cancelled: its cancel may have come before
  // it was here to be found.
  bool Add(Request* chain);
  void Remove(Request& request);
  bool empty() const { return first_ == nullptr; }  // the queue's thread

  void Describe(int64_t now_ns, size_t limit, std::vector<std::string>& lines) const;
  // Describes those that are older than limit_ns and were not told since they were half as old: four at the
  // most, all of them are counted.
  std::vector<std::string> TellStuck(int64_t now_ns, int64_t limit_ns, Counter& told);

 private:
  mutable std::mutex mutex_;
  Request* first_ = nullptr;
  Request* last_ = nullptr;
};

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_QUEUE_REQUESTS_H_
