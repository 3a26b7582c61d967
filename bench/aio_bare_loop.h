// Bare loops with the raw system calls: what the engine is measured against. No requests, no priorities, no
// statistics, no error handling beyond giving up: just a queue kept full from one thread.
#ifndef PENSTOCK_BENCH_AIO_BARE_LOOP_H_
#define PENSTOCK_BENCH_AIO_BARE_LOOP_H_

#include <cstddef>
#include <cstdint>
#include <memory>

namespace penstock::bench {

enum class BareOp : uint8_t {
  kRead,
  kWrite,
  kMixed
};  // mixed: each block is read and then written to the other half

// An io_uring as fast as it goes: SINGLE_ISSUER, DEFER_TASKRUN, the memory registered. Belongs to one thread.
class BareRing {
 public:
  // `memory`: registered if `fixed`; depth * block of it is used. Null where the kernel has no such ring.
  static std::unique_ptr<BareRing> Make(std::byte* memory, uint64_t memory_bytes, bool fixed);
  ~BareRing();
  // Moves `bytes` of the file from offset 0 on (mixed: half of them read, half written), `depth` blocks in
  // flight. Returns false when any transfer fails or is short.
  bool Run(int fd, BareOp op, uint64_t bytes, uint64_t block_bytes, unsigned depth);

 private:
  struct State;
  explicit BareRing(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// The same with libaio's io_submit and io_getevents.
bool RunBareLibaio(int fd, std::byte* memory, BareOp op, uint64_t bytes, uint64_t block_bytes,
                   unsigned depth);

}  // namespace penstock::bench

#endif  // PENSTOCK_BENCH_AIO_BARE_LOOP_H_
