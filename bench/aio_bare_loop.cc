#include "bench/aio_bare_loop.h"

#include <libaio.h>
#include <liburing.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <vector>

namespace penstock::bench {
namespace {

// Where block number `i` goes. In the mix, block 2k is the read and 2k+1 the write of one pair.
struct Place {
  bool write;
  uint64_t offset;
};
Place PlaceOf(BareOp op, uint64_t i, uint64_t blocks, uint64_t block_bytes) {
  if (op != BareOp::kMixed) return {op == BareOp::kWrite, i * block_bytes};
  return {i % 2 == 1, (i % 2 == 1 ? blocks / 2 + i / 2 : i / 2) * block_bytes};
}

}  // namespace

struct BareRing::State {
  io_uring ring{};
  std::byte* memory = nullptr;
  bool fixed = false;
};

BareRing::BareRing(std::unique_ptr<State> state) : state_(std::move(state)) {}

BareRing::~BareRing() { io_uring_queue_exit(&state_->ring); }

std::unique_ptr<BareRing> BareRing::Make(std::byte* memory, uint64_t memory_bytes, bool fixed) {
  auto state = std::make_unique<State>();
  state->memory = memory;
  state->fixed = fixed;
  if (io_uring_queue_init(256, &state->ring, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN) != 0)
    return nullptr;
  std::unique_ptr<BareRing> ring(new BareRing(std::move(state)));
  const iovec buffer{memory, memory_bytes};
  if (fixed && io_uring_register_buffers(&ring->state_->ring, &buffer, 1) != 0) return nullptr;
  return ring;
}

bool BareRing::Run(int fd, BareOp op, uint64_t bytes, uint64_t block_bytes, unsigned depth) {
  io_uring* const ring = &state_->ring;
  const uint64_t blocks = bytes / block_bytes;
  uint64_t issued = 0, done = 0;
  const auto issue = [&](uint64_t slot) {
    const Place place = PlaceOf(op, issued++, blocks, block_bytes);
    io_uring_sqe* const entry = io_uring_get_sqe(ring);
    std::byte* const data = state_->memory + slot * block_bytes;
    const auto length = static_cast<unsigned>(block_bytes);
    if (place.write) {
      state_->fixed ? io_uring_prep_write_fixed(entry, fd, data, length, place.offset, 0)
                    : io_uring_prep_write(entry, fd, data, length, place.offset);
    } else {
      state_->fixed ? io_uring_prep_read_fixed(entry, fd, data, length, place.offset, 0)
                    : io_uring_prep_read(entry, fd, data, length, place.offset);
    }
    io_uring_sqe_set_data64(entry, slot);
  };
  bool ok = true;
  for (uint64_t slot = 0; slot < std::min<uint64_t>(depth, blocks); ++slot) issue(slot);
  while (done < blocks) {
    const int result = io_uring_submit_and_wait(ring, 1);
    if (result < 0 && result != -EINTR) return false;
    unsigned head = 0, seen = 0;
    uint64_t slots[256];
    io_uring_cqe* entry = nullptr;
    io_uring_for_each_cqe(ring, head, entry) {
      ok = ok && entry->res == static_cast<int>(block_bytes);
      slots[seen++] = io_uring_cqe_get_data64(entry);
      if (seen == 256) break;
    }
    io_uring_cq_advance(ring, seen);
    done += seen;
    for (unsigned i = 0; i < seen && issued < blocks; ++i) issue(slots[i]);
  }
  return ok;
}

bool RunBareLibaio(int fd, std::byte* memory, BareOp op, uint64_t bytes, uint64_t block_bytes,
                   unsigned depth) {
  io_context_t context = nullptr;
  if (io_setup(static_cast<int>(depth), &context) != 0) return false;
  const uint64_t blocks = bytes / block_bytes;
  std::vector<iocb> control(depth);
  std::vector<io_event> events(depth);
  uint64_t issued = 0, done = 0;
  bool ok = true;
  std::vector<iocb*> batch;
  const auto issue = [&](iocb* block) {
    const auto slot = static_cast<uint64_t>(block - control.data());
    const Place place = PlaceOf(op, issued++, blocks, block_bytes);
    const auto offset = static_cast<long long>(place.offset);
    place.write ? io_prep_pwrite(block, fd, memory + slot * block_bytes, block_bytes, offset)
                : io_prep_pread(block, fd, memory + slot * block_bytes, block_bytes, offset);
    batch.push_back(block);
  };
  for (uint64_t slot = 0; slot < std::min<uint64_t>(depth, blocks); ++slot) issue(&control[slot]);
  while (ok && done < blocks) {
    if (!batch.empty() &&
        io_submit(context, static_cast<long>(batch.size()), batch.data()) != static_cast<int>(batch.size())) {
      ok = false;
      break;
    }
    batch.clear();
    const int got = io_getevents(context, 1, static_cast<long>(depth), events.data(), nullptr);
    if (got < 0) break;
    for (int i = 0; i < got; ++i) {
      ok = ok && events[static_cast<size_t>(i)].res == block_bytes;
      if (issued < blocks) issue(events[static_cast<size_t>(i)].obj);
    }
    done += static_cast<uint64_t>(got);
  }
  io_destroy(context);
  return ok && done == blocks;
}

}  // namespace penstock::bench
