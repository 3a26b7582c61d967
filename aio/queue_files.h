// What a device queue and its backend keep about files.
#ifndef PENSTOCK_AIO_QUEUE_FILES_H_
#define PENSTOCK_AIO_QUEUE_FILES_H_

#include "aio/device_queue.h"

namespace penstock::aio {

// A slot for each file that the queue has seen, until the file closes. The queue's thread only.
class DeviceQueue::Files {
 public:
  Files(DeviceQueue& queue, Backend& backend) : queue_(queue), backend_(backend) {}
  ~Files();
  Files(const Files&) = delete;
  Files& operator=(const Files&) = delete;

  // The file's slot, made for one that is new: the file tells the queue before it closes.
  FileSlot* SlotOf(File& file);
  // The file closes: the backend forgets it, and its slot is free.
  void Forget(const File& file);
  // The queue ends: of no file anything is kept.
  void ForgetAll();
  // The backend is gone, and with it what was registered and what it would have cut back.
  void BackendIsGone();

 private:
  DeviceQueue& queue_;
  Backend& backend_;
  bool backend_is_gone_ = false;
  FileSlot* slots_ = nullptr;
  FileSlot* free_ = nullptr;
};

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_QUEUE_FILES_H_
