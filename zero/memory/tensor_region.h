// Address space for tensors, far more than there is memory; memory backs what is in use and what is kept for
// the next. Buffers of any size share it: what is freed joins its neighbours and is cut anew, so that the
// same memory serves a step's large and small tensors one after the other, and no page is faulted in twice
// while the bound allows. Where a buffer has no room among what is kept, it goes to fresh addresses, and as
// much is given back elsewhere: fragments cost time, never memory.
//
// In granules of 16 KiB. Not thread-safe.
#ifndef PENSTOCK_ZERO_MEMORY_TENSOR_REGION_H_
#define PENSTOCK_ZERO_MEMORY_TENSOR_REGION_H_

#include <cstdint>
#include <map>
#include <vector>

namespace penstock::zero {

class TensorRegion {
 public:
  static constexpr int64_t kGranule = int64_t{16} << 10;

  // Reserves several times the addresses that the machine has memory for; none is no error, but nothing is
  // found then.
  TensorRegion();
  ~TensorRegion();
  TensorRegion(const TensorRegion&) = delete;
  TensorRegion& operator=(const TensorRegion&) = delete;

  struct Place {
    int64_t at = -1;  // none
    int64_t granules = 0;
    int64_t fresh = 0;  // granules that have no memory yet and get it: its own, and what shares a huge page
  };
  // Where `granules` need the least fresh memory.
  Place Find(int64_t granules) const;
  // Returns kept memory elsewhere to the system until no more than `most` granules, these among them, are not
  // in use by others. `most`: no less than the place has.
  void Fit(int64_t most, Place* place);
  // From the last Find, as Fit left it. Null: the system gives no more.
  void* Take(const Place& place);
  bool Owns(const void* base) const;
  void GiveBack(void* base, int64_t granules);

  // Granules that are free and have memory.
  int64_t kept() const { return kept_; }
  // Returns the memory of at most `granules` of them to the system.
  void Release(int64_t granules) { Release(granules, Place()); }
  // Huge pages back the first `bytes`, whole, so that no page reaches beyond; normal ones the rest. Until
  // memory is returned for the first time: after that the count must be exact, and all pages are normal.
  void UseHugePages(int64_t bytes);

 private:
  bool Touched(int64_t granule) const;
  int64_t CountTouched(int64_t from, int64_t to) const;
  void Mark(int64_t from, int64_t to, bool touched);
  Place Consider(int64_t at, int64_t granules) const;
  void Release(int64_t granules, const Place& spare);  // none in `spare`
  // Visits the parts of huge pages that lie outside a place and come with it.
  template <typename Visit>
  void ForSpill(int64_t at, int64_t granules, Visit&& visit) const;

  char* base_ = nullptr;
  int64_t size_ = 0;      // granules
  int64_t usable_ = 0;    // of them, which may be accessed
  int64_t huge_end_ = 0;  // of the granules that huge pages back
  int64_t kept_ = 0;
  std::map<int64_t, int64_t> free_;  // runs: first granule, granules
  std::vector<uint64_t> touched_;    // a bit for each granule that has memory; beyond the end: none has
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_MEMORY_TENSOR_REGION_H_
