// Numbers that name things, each kind a type of its own: a block's number is no tile's.
//
//   using BlockIndex = Index<struct BlockTag>;
//   IndexedVector<BlockIndex, BlockPlan> blocks;
//   for (const BlockIndex block : blocks.indices()) Use(blocks[block]);
//
// A number comes in by the explicit constructor and goes out by value(); nothing else converts. A default one
// is none (-1): it compares less than all others and names nothing. What lies outside of a vector is a defect
// of this program and ends it, in every build.
#ifndef PENSTOCK_BASE_INDEX_H_
#define PENSTOCK_BASE_INDEX_H_

#include <compare>
#include <cstddef>
#include <functional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"

namespace penstock {

template <class Tag>
class Index {
 public:
  constexpr Index() = default;  // none
  constexpr explicit Index(int value) : value_(value) {}
  constexpr explicit Index(size_t value) : value_(static_cast<int>(value)) {}

  constexpr int value() const { return value_; }
  constexpr bool valid() const { return value_ >= 0; }  // not none

  constexpr Index& operator++() {
    ++value_;
    return *this;
  }
  constexpr Index& operator--() {
    --value_;
    return *this;
  }
  friend constexpr auto operator<=>(Index, Index) = default;
  // As many further on, and back.
  friend constexpr Index operator+(Index index, int by) { return Index(index.value_ + by); }
  friend constexpr Index operator-(Index index, int by) { return Index(index.value_ - by); }

  template <class Hash>
  friend Hash AbslHashValue(Hash hash, Index index) {
    return Hash::combine(std::move(hash), index.value_);
  }
  template <class Sink>
  friend void AbslStringify(Sink& sink, Index index) {
    sink.Append(std::to_string(index.value_));
  }
  template <class Char, class Traits>
  friend std::basic_ostream<Char, Traits>& operator<<(std::basic_ostream<Char, Traits>& to, Index index) {
    return to << index.value_;
  }

 private:
  int value_ = -1;
};

// Where a vector that is not an IndexedVector has what a number names.
inline size_t At(int index) {
  PENSTOCK_CHECK(index >= 0, "an index that names nothing");
  return static_cast<size_t>(index);
}
template <class Tag>
size_t At(Index<Tag> index) {
  return At(index.value());
}

// From `first` on, until `end` is reached.
template <class I>
class IndexRange {
 public:
  class Iterator {
   public:
    constexpr explicit Iterator(I at) : at_(at) {}
    constexpr I operator*() const { return at_; }
    constexpr Iterator& operator++() {
      ++at_;
      return *this;
    }
    friend constexpr bool operator==(Iterator, Iterator) = default;

   private:
    I at_;
  };
  constexpr IndexRange(I first, I end) : first_(first), end_(end) {}
  constexpr Iterator begin() const { return Iterator(first_); }
  constexpr Iterator end() const { return Iterator(end_); }

 private:
  I first_, end_;
};

// A std::vector that is asked by an index of its own kind only.
template <class I, class T>
class IndexedVector {
 public:
  using value_type = T;
  using reference = typename std::vector<T>::reference;
  using const_reference = typename std::vector<T>::const_reference;

  IndexedVector() = default;
  explicit IndexedVector(size_t size) : values_(size) {}
  IndexedVector(size_t size, const T& value) : values_(size, value) {}
  explicit IndexedVector(std::vector<T> values) : values_(std::move(values)) {}

  reference operator[](I index) { return values_[Checked(index)]; }
  const_reference operator[](I index) const { return values_[Checked(index)]; }

  size_t size() const { return values_.size(); }
  bool empty() const { return values_.empty(); }
  I end_index() const { return I(values_.size()); }  // that of the next one
  IndexRange<I> indices() const { return {I(0), end_index()}; }
  const std::vector<T>& values() const { return values_; }  // for who counts by itself
  bool contains(I index) const { return index.valid() && static_cast<size_t>(index.value()) < size(); }

  auto begin() { return values_.begin(); }
  auto end() { return values_.end(); }
  auto begin() const { return values_.begin(); }
  auto end() const { return values_.end(); }
  reference front() { return values_.front(); }
  const_reference front() const { return values_.front(); }
  reference back() { return values_.back(); }
  const_reference back() const { return values_.back(); }

  void push_back(T value) { values_.push_back(std::move(value)); }
  template <class... Args>
  reference emplace_back(Args&&... args) {
    return values_.emplace_back(std::forward<Args>(args)...);
  }
  void assign(size_t size, const T& value) { values_.assign(size, value); }
  void resize(size_t size) { values_.resize(size); }
  void reserve(size_t size) { values_.reserve(size); }
  void clear() { values_.clear(); }

  friend bool operator==(const IndexedVector&, const IndexedVector&) = default;

 private:
  size_t Checked(I index) const {
    PENSTOCK_CHECK(contains(index), "an index beyond its vector");
    return static_cast<size_t>(index.value());
  }

  std::vector<T> values_;
};

}  // namespace penstock

template <class Tag>
struct std::hash<penstock::Index<Tag>> {
  size_t operator()(penstock::Index<Tag> index) const noexcept { return std::hash<int>()(index.value()); }
};

#endif  // PENSTOCK_BASE_INDEX_H_
