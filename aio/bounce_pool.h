// The buffers that ragged pieces go through.
#ifndef PENSTOCK_AIO_BOUNCE_POOL_H_
#define PENSTOCK_AIO_BOUNCE_POOL_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "aio/arena.h"
#include "aio/piece.h"

namespace penstock::aio {

// A fixed number of buffers, each of whole sectors, whose memory is made by the first Prepare. One thread.
class BouncePool {
 public:
  BouncePool(uint64_t buffer_bytes, uint32_t buffers);

  // False: there is no memory for them. Cheap from the second call on.
  bool Prepare();
  // All are in use, or the piece is one sector that another piece with a buffer is rewriting.
  bool MustWait(const Piece& piece) const;
  // The piece gets a buffer: `bounce` and `data` are set. Not MustWait, and Prepare was true.
  void Give(Piece& piece);
  // Nothing if it has none.
  void TakeBack(const Piece& piece);

 private:
  const uint64_t bytes_;
  std::unique_ptr<Arena> memory_;
  std::vector<const Piece*> users_;  // by buffer; null: free
  std::vector<int> free_;
};

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_BOUNCE_POOL_H_
