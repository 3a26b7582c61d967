// Weights that are frozen, read from where they lie instead of being copied into a run's state.
//
// A run whose options name a source keeps nothing of what is frozen: the source brings it tile by tile, as
// often as it is used, and it is never written. Who makes one must bring the same values every time; that the
// files are those that a run began with is its maker's to check.
//
//   RETURN_IF_ERROR(source.Start(io, read, block, first, elements, to, &OnDone, context));
//   ... OnDone ...
//   RETURN_IF_ERROR(source.Finish(read));   // on any thread: now `to` holds weights
//
// Threads: Start on one thread, Finish on any, each read by one at a time. Errors: as aio::Engine; kDataLoss:
// what was read cannot be weights.
#ifndef PENSTOCK_ZERO_COMPUTE_FROZEN_SOURCE_H_
#define PENSTOCK_ZERO_COMPUTE_FROZEN_SOURCE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "aio/engine.h"
#include "tiering/plan/model_graph.h"

namespace penstock::zero {

class FrozenSource {
 public:
  // One read in flight, reused. Left alone from Start until `done` has run.
  class Read {
   public:
    virtual ~Read() = default;
  };
  // On an I/O thread: nothing is in flight any more. Must be short and must not block.
  using Done = void (*)(void* context);

  virtual ~FrozenSource() = default;

  // What reading elements [0, elements) of a block's flat parameters moves.
  virtual int64_t BytesOf(tiering::BlockIndex block, int64_t elements) const = 0;
  // The file that they lie in, for messages.
  virtual std::string PlaceOf(tiering::BlockIndex block) const = 0;

  virtual std::unique_ptr<Read> MakeRead() const = 0;
  // Begins to read elements [first, first + elements) to `to`, which has room for them in the type of the
  // run's weights and belongs to the source until Finish. An error: nothing is in flight, and `done` is not
  // called.
  virtual absl::Status Start(aio::Engine& io, Read* read, tiering::BlockIndex block, int64_t first,
                             int64_t elements, std::byte* to, Done done, void* context) = 0;
  // Makes weights of what has come, zeros between parameters and behind them.
  virtual absl::Status Finish(Read* read) = 0;
};

// Start, and Finish when it has come.
absl::Status ReadFrozenNow(FrozenSource& source, aio::Engine& io, tiering::BlockIndex block, int64_t first,
                           int64_t elements, std::byte* to);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_FROZEN_SOURCE_H_
