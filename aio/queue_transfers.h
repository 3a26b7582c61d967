// The blocks of a device queue that are at the device, from their start to their end.
//
// A short transfer is continued, a one-sector write is read, changed and written, a transient refusal is
// tried again, an I/O error as often as the options say. A file that a one-sector write made too long is cut
// back once no other write of it is in flight.
#ifndef PENSTOCK_AIO_QUEUE_TRANSFERS_H_
#define PENSTOCK_AIO_QUEUE_TRANSFERS_H_

#include <string>
#include <vector>

#include "aio/bounce_pool.h"
#include "aio/device_queue.h"

namespace penstock::aio {

// The queue's thread only. Allocates nothing once the bounce buffers are made, but for lines of the log.
class DeviceQueue::Transfers {
 public:
  // As many pieces as may be in flight.
  explicit Transfers(DeviceQueue& queue);

  // A piece that is not in flight, set anew; null: all are.
  Piece* Free();
  // Makes the bounce buffers ready for a piece that needs one. errno: EINVAL: its bytes are in a device's
  // memory, which is not copied to or from here; ENOMEM; 0.
  int PrepareBounce(const Request& request, const Piece& piece);
  // No bounce buffer is free, the sector is being rewritten, or the file is about to be cut to its length.
  // All of these end with a completion, so a piece that waits is looked at again in time.
  bool MustWait(const Piece& piece) const;
  // The piece, which is the one of the last Free, goes to the device.
  void Launch(Request& request, Piece& piece);

  bool has_retries() const { return retries_ != nullptr; }
  void Retry();
  // Ends the piece, or sends what is left of it: then DeviceQueue::EndPiece.
  void Complete(const Completion& completion);
  // The backend is gone: every piece ends.
  void FailAll(int error);

 private:
  void Send(Piece& piece) { queue_.backend_->Queue(piece); }
  void SendRest(Piece& piece);
  void AfterRead(Piece& piece, uint64_t moved);
  void AfterWrite(Piece& piece, uint64_t moved);
  void RetryOrFail(Piece& piece, int error, const std::string* why = nullptr);
  void End(Piece& piece, int error);
  void RunTrims(FileSlot& slot);

  DeviceQueue& queue_;
  QueueCounters& counters_;
  BouncePool bounces_;
  SlowDeviceWatch slow_;
  std::vector<Piece> pieces_;
  Piece* free_ = nullptr;
  Piece* retries_ = nullptr;  // to be sent again
  uint64_t device_errors_ = 0;
};

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_QUEUE_TRANSFERS_H_
