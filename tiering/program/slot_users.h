// Who still uses the content of each slot of one kind.
//
// Invariant: a slot gets a new content from an operation that waits for everyone who used the former one.
// Take() hands them out for that. Uses are recorded in the order of the program.
#ifndef PENSTOCK_TIERING_PROGRAM_SLOT_USERS_H_
#define PENSTOCK_TIERING_PROGRAM_SLOT_USERS_H_

#include <cstddef>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/index.h"
#include "tiering/program/op.h"

namespace penstock::tiering {

template <class I>
class SlotUsers {
 public:
  explicit SlotUsers(size_t slots) : users_(slots) {}

  // For the maker of the next content, which starts without users.
  Edges Take(I slot) { return TakeAll(&users_[slot]); }
  // `id` uses the content, or makes it.
  void Add(I slot, OpId id) {
    Edges& of = users_[slot];
    PENSTOCK_CHECK(of.empty() || of.back() < id, "a use of a slot that is recorded late");
    of.push_back(id);
  }
  // These wait for all users so far, and stand for them.
  void Replace(I slot, Edges ids) {
    Edges& of = users_[slot];
    PENSTOCK_CHECK(of.empty() || of.back() < ids.back(), "users of a slot that earlier ones stand for");
    of = std::move(ids);
  }
  const Edges& of(I slot) const { return users_[slot]; }

 private:
  IndexedVector<I, Edges> users_;
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PROGRAM_SLOT_USERS_H_
