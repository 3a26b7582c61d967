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

class SlotUsers {
 public:
  explicit SlotUsers(size_t slots) : users_(slots) {}

  // For whoever makes the next content, which starts without users.
  Edges Take(int slot) { return TakeAll(&users(slot)); }
  // `id` uses the content, or makes it.
  void Add(int slot, OpId id) {
    Edges& of = users(slot);
    PENSTOCK_CHECK(of.empty() || of.back() < id, "a use of a slot that is recorded late");
    of.push_back(id);
  }
  // These wait for all users so far, and stand for them.
  void Replace(int slot, Edges ids) {
    Edges& of = users(slot);
    PENSTOCK_CHECK(of.empty() || of.back() < ids.back(), "users of a slot that earlier ones stand for");
    of = std::move(ids);
  }
  const Edges& of(int slot) const { return users_.at(At(slot)); }

 private:
  Edges& users(int slot) {
    PENSTOCK_CHECK(At(slot) < users_.size(), "a slot beyond the plan");
    return users_[At(slot)];
  }

  std::vector<Edges> users_;  // [slot]
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PROGRAM_SLOT_USERS_H_
