// Places in a run of memory for what comes and goes in one order: each behind the last, and at the front
// again where the end is too near. Pure numbers; `bytes` are above 0.
#ifndef PENSTOCK_GENERATE_RING_H_
#define PENSTOCK_GENERATE_RING_H_

#include <cstdint>
#include <deque>
#include <optional>

namespace penstock::generate {

class Ring {
 public:
  explicit Ring(uint64_t bytes) : bytes_(bytes) {}

  // A contiguous place behind the last one; nullopt while what is held leaves none.
  std::optional<uint64_t> Take(uint64_t bytes) {
    uint64_t at = 0;
    if (!held_.empty()) {
      const uint64_t head = held_.back().end, tail = held_.front().begin;
      if (head > tail) {
        at = head + bytes <= bytes_ ? head : 0;
        if (at == 0 && bytes > tail) return std::nullopt;
      } else {
        at = head;
        if (head + bytes > tail) return std::nullopt;
      }
    }
    if (at + bytes > bytes_) return std::nullopt;
    held_.push_back({at, at + bytes, true});
    return at;
  }

  // Gives back the n-th of those held, counted from the oldest that is. Its bytes are free when all before it
  // are given back too. Returns how many the oldest moved on by.
  size_t Give(size_t n) {
    held_[n].live = false;
    size_t gone = 0;
    for (; !held_.empty() && !held_.front().live; ++gone) held_.pop_front();
    return gone;
  }

  size_t held() const { return held_.size(); }
  uint64_t bytes() const { return bytes_; }

 private:
  struct Place {
    uint64_t begin = 0, end = 0;
    bool live = true;
  };
  const uint64_t bytes_;
  std::deque<Place> held_;
};

}  // namespace penstock::generate

#endif  // PENSTOCK_GENERATE_RING_H_
