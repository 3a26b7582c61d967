#include "aio/queue_files.h"

#include <mutex>
#include <utility>

namespace penstock::aio {

DeviceQueue::Files::~Files() {
  while (free_ != nullptr) delete std::exchange(free_, free_->next);
}

FileSlot* DeviceQueue::Files::SlotOf(File& file) {
  for (FileSlot* slot = slots_; slot != nullptr; slot = slot->next) {
    if (slot->file == &file) return slot;
  }
  FileSlot* slot = free_;
  if (slot != nullptr) {
    free_ = slot->next;
  } else {
    slot = new FileSlot();
  }
  *slot = FileSlot();
  slot->file = &file;
  if (!backend_is_gone_ && file.fd() >= 0) slot->registered = backend_.RegisterFile(file.fd());
  slot->next = slots_;
  slots_ = slot;
  const std::lock_guard<std::mutex> lock(file.users_mutex_);
  file.users_.push_back(&queue_);
  return slot;
}

void DeviceQueue::Files::Forget(const File& file) {
  for (FileSlot** link = &slots_; *link != nullptr; link = &(*link)->next) {
    FileSlot* const slot = *link;
    if (slot->file != &file) continue;
    if (slot->registered >= 0) backend_.UnregisterFile(slot->registered);
    backend_.ForgetFile(file.fd());
    *link = slot->next;
    slot->next = free_;
    free_ = slot;
    return;
  }
}

void DeviceQueue::Files::ForgetAll() {
  while (slots_ != nullptr) {
    FileSlot* const slot = std::exchange(slots_, slots_->next);
    backend_.ForgetFile(slot->file->fd());
    {
      const std::lock_guard<std::mutex> lock(slot->file->users_mutex_);
      std::erase(slot->file->users_, &queue_);
    }
    delete slot;
  }
}

void DeviceQueue::Files::BackendIsGone() {
  backend_is_gone_ = true;
  for (FileSlot* slot = slots_; slot != nullptr; slot = slot->next) {
    slot->trims = nullptr;
    slot->trim_count = 0;
    slot->registered = -1;
  }
}

}  // namespace penstock::aio
