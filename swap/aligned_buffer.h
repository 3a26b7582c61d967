// Heap memory for metadata, aligned as direct I/O wants it. State itself travels through the arena of aio/.
#ifndef PENSTOCK_SWAP_ALIGNED_BUFFER_H_
#define PENSTOCK_SWAP_ALIGNED_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>

#include "swap/format.h"

namespace penstock::swap {

// `bytes` zeroed bytes at a multiple of kSectorBytes. Move-only; empty by default.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(uint64_t bytes)
      : data_(static_cast<std::byte*>(::operator new[](bytes, std::align_val_t{kSectorBytes}))),
        bytes_(bytes) {
    if (bytes > 0) std::memset(data_.get(), 0, bytes);
  }
  std::byte* data() const { return data_.get(); }
  std::span<std::byte> span() const { return {data_.get(), bytes_}; }
  uint64_t bytes() const { return bytes_; }

 private:
  struct Deleter {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{kSectorBytes}); }
  };
  std::unique_ptr<std::byte[], Deleter> data_;
  uint64_t bytes_ = 0;
};

}  // namespace penstock::swap

#endif  // PENSTOCK_SWAP_ALIGNED_BUFFER_H_
