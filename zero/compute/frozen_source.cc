#include "zero/compute/frozen_source.h"

#include <future>

#include "base/status_macros.h"

namespace penstock::zero {

absl::Status ReadFrozenNow(FrozenSource& source, aio::Engine& io, tiering::BlockIndex block, int64_t first,
                           int64_t elements, std::byte* to) {
  const std::unique_ptr<FrozenSource::Read> read = source.MakeRead();
  std::promise<void> done;
  RETURN_IF_ERROR(source.Start(
      io, read.get(), block, first, elements, to,
      [](void* context) { static_cast<std::promise<void>*>(context)->set_value(); }, &done));
  done.get_future().wait();
  return source.Finish(read.get());
}

}  // namespace penstock::zero
