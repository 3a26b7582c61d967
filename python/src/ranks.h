// The processes that train one model, as Python and the engine have them.
#ifndef PENSTOCK_PYTHON_RANKS_H_
#define PENSTOCK_PYTHON_RANKS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "errors.h"
#include "owned.h"
#include "zero/ranks/comm.h"

namespace penstock::python {

// Owned as a whole: a comm has threads, and its end waits for the other ranks.
struct ConnectedRanks {
  std::shared_ptr<zero::Comm> comm;
};
using HeldRanks = std::shared_ptr<Owned<ConnectedRanks>>;

// Where they meet, made by the first of them.
class PyMeetingPlace;

// What Python holds.
class PyRanks {
 public:
  // `place`: of rank 0, which others meet at `address` and `port`.
  PyRanks(int rank, int world, int local_rank, int local_world, const std::string& address, int port,
          const std::string& session, const std::string& secret, double patience_seconds,
          const PyMeetingPlace* place);

  // Of every rank, by rank.
  std::vector<std::string> Texts(const std::string& what, const std::string& mine) const;
  // ValueError where another rank has something else: it names rank, key and both values.
  void Agree(const std::string& json) const;
  // What rank `from` has at its address is there on all. In pieces, so that it takes little memory.
  void Share(uint64_t address, uint64_t bytes, int from) const;
  // Every call fails from now on, here and on the others, with `why` as the reason.
  void Abort(const std::string& why) const;
  // Why every call fails; empty: they do not.
  std::string Failure() const { return MessageOf(held()->get().comm->failure()); }
  std::string Name() const { return held()->get().comm->name(); }
  // Waits for the others to do the same, unless something failed; an engine that has them keeps them.
  void Close() { held_.reset(); }

  // RuntimeError where they were closed.
  HeldRanks held() const;

 private:
  HeldRanks held_;
};

}  // namespace penstock::python

#endif  // PENSTOCK_PYTHON_RANKS_H_
