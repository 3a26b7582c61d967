// What several ranks keep together, seen as one: the parts of a run or checkpoint, and any range of a block's
// elements read from them, whichever rank's part it lies in.
//
//   DIR/rank-0/penstock.store, DIR/rank-1/penstock.store, ...    each a store of its own (swap/FORMAT.md)
//
// Rank k of W has, of every block, elements [k * P, (k + 1) * P) with P = tiering::ShardElements(run, W), cut
// into tiles as its plan wanted. The identity of each part says W ("ranks", absent where there is one) and k
// ("rank"); all else of it, the uuid, the step and the number of the commit are the same in all of them.
// Parts of a checkpoint also have its number (Record::checkpoint), which older ones lack. In a state
// directory a part may have made one commit more than others when its run was killed: the run is at the least
// of them.
//
// Needs no LibTorch.
#ifndef PENSTOCK_ZERO_RANKS_SHARDED_STATE_H_
#define PENSTOCK_ZERO_RANKS_SHARDED_STATE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "swap/inspect.h"
#include "swap/store.h"
#include "tiering/plan/model_graph.h"

namespace penstock::zero {

// [rank] its directories, striped as those given were.
using ShardDirectories = std::vector<std::vector<std::string>>;

// What `directories` hold: themselves where a run of one rank (or one rank's part) is there, else the parts
// of all ranks. kNotFound: neither; kFailedPrecondition: other files, or one that may or may not have been
// a run's; kDataLoss: a part is missing.
absl::StatusOr<ShardDirectories> FindShards(const std::vector<std::string>& directories);

// Where rank `rank` keeps its part of what all ranks keep in `directories`.
std::vector<std::string> RankDirectories(const std::vector<std::string>& directories, int rank);

// Of how many ranks the run is of which a part, damaged or not, is in `directories`, as that part says; 0:
// there is none. `rank`: whose part is looked at before those of others. Errors: what could not be read.
absl::StatusOr<int64_t> RanksIn(const std::vector<std::string>& directories, int rank = 0);

// An identity without what says whose part it is of; {} where it is no object.
nlohmann::json WholeIdentity(const std::string& identity);

// All parts, at the newest commit that all of them have. kDataLoss: they are not parts of one run, of commits
// too far apart (unless one is in use and may be moving on: its newest then), or of two checkpoints.
absl::StatusOr<std::vector<swap::Inspection>> InspectShards(const ShardDirectories& parts);

// Ranges of blocks. Every tile that is read is checked.
class ShardedState {
 public:
  // `memory`: swap::kSectorBytes-aligned, MemoryBytes of the same inspections, for one tile; only Read needs
  // it. With a multiple of it so many tiles less one are on their way while one is used. `engine` outlives
  // it.
  static absl::StatusOr<std::unique_ptr<ShardedState>> Open(aio::Engine& engine,
                                                            const ShardDirectories& parts,
                                                            const std::vector<swap::Inspection>& inspections,
                                                            const std::vector<int64_t>& block_elements,
                                                            const tiering::Precision& precision,
                                                            std::span<std::byte> memory);
  static uint64_t MemoryBytes(const std::vector<swap::Inspection>& inspections);
  ~ShardedState();
  ShardedState(const ShardedState&) = delete;
  ShardedState& operator=(const ShardedState&) = delete;

  // All segments of elements [first, first + elements) of a block, as a tile of that many has them, to
  // `places`, or the first of them, for as many as there are. What was frozen and has its weights alone has
  // masters equal to them, and moments of zero. What lies beyond the block's end is zero. Best asked for in
  // ascending order.
  absl::Status Read(tiering::BlockIndex block, int64_t first, int64_t elements,
                    std::span<void* const> places);
  // The weights of a block that lie in the parts of ranks `from` and later, each to its place in the whole
  // run at `run`, which has room for all parts.
  absl::Status ReadWeights(tiering::BlockIndex block, size_t from, void* run);
  // The block has its weights alone, everywhere.
  bool WeightsAlone(tiering::BlockIndex block) const;
  // Elements of the largest tile that the block has anywhere.
  int64_t LargestTile(tiering::BlockIndex block) const;
  const swap::Recovered& recovered() const { return stores_.front()->recovered(); }

 private:
  struct Tile {
    size_t store = 0;
    uint32_t number = 0;  // in its store
    int64_t first = 0;    // element of the block's run
    int64_t elements = 0;
  };

  ShardedState() = default;
  // A tile in memory, or on its way there.
  struct Loaded {
    const Tile* tile = nullptr;  // null: none
    bool is_checked = false;
    std::byte* memory = nullptr;
    swap::TileIo io;
  };
  absl::Status PlaceTiles(const std::vector<int64_t>& block_elements);
  std::vector<const Tile*> From(tiering::BlockIndex block, const Tile& tile, size_t most) const;
  absl::Status Ask(const Tile& tile, Loaded* to);
  absl::StatusOr<const std::byte*> Load(tiering::BlockIndex block, const Tile& tile);

  tiering::Precision precision_;
  uint64_t memory_for_one_ = 0;  // bytes of each Loaded
  std::vector<std::unique_ptr<swap::Store>> stores_;
  tiering::PerBlock<std::vector<Tile>> blocks_;  // in ascending order
  swap::TileIo ios_[2];
  std::vector<std::unique_ptr<Loaded>> loaded_;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_RANKS_SHARDED_STATE_H_
