#include "zero/ranks/sharded_state.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "kernels/float16.h"
#include "swap/checkpoint.h"
#include "swap/replace_parts.h"
#include "zero/config/json_field.h"

namespace penstock::zero {
namespace {

constexpr const char* kRanks = "ranks";
constexpr const char* kRank = "rank";
constexpr int kMostRanksLookedFor = 64;  // for any that is there, where rank 0 is not

nlohmann::json Parsed(const std::string& identity) {
  return ParseJsonObject(identity, "").value_or(nlohmann::json::object());
}

int64_t NumberIn(const nlohmann::json& json, const char* key, int64_t otherwise) {
  return JsonField<int64_t>(json, key).value_or(otherwise);
}

bool HoldsAnything(const swap::Finding& finding) {
  return finding.holding != swap::Holding::kNothing && finding.holding != swap::Holding::kForeign;
}

// Parts at one number of commits are of one commit: every checkpoint's has the number 1.
absl::Status CheckOfOneCommit(const ShardDirectories& parts,
                              const std::vector<swap::Inspection>& inspections) {
  const swap::Record& first = inspections.front().record;
  for (size_t k = 1; k < parts.size(); ++k) {
    const swap::Record& record = inspections[k].record;
    if (record.sequence != first.sequence) continue;  // in use, and moving on
    const bool same_step = record.step == first.step && record.updates == first.updates;
    if (same_step && record.checkpoint == first.checkpoint) continue;
    return absl::DataLossError(absl::StrCat(
        parts[k].front(), " is of step ", record.step, same_step ? " in another checkpoint than " : ", and ",
        parts.front().front(), same_step ? "" : absl::StrCat(" of step ", first.step),
        ": bring the parts of one checkpoint together"));
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<std::string> RankDirectories(const std::vector<std::string>& directories, int rank) {
  std::vector<std::string> of_rank;
  for (const std::string& directory : directories) of_rank.push_back(swap::RankDirectory(directory, rank));
  return of_rank;
}

absl::StatusOr<ShardDirectories> FindShards(const std::vector<std::string>& directories) {
  if (directories.empty()) return absl::InvalidArgumentError("no directory was given");
  ASSIGN_OR_RETURN(const bool cut_short, swap::IsReplacementCutShort(directories));
  if (cut_short) {
    return absl::DataLossError(
        absl::StrCat(directories.front(),
                     ": a change of its number of ranks was cut short: the next start of its training "
                     "finishes it (`resume`)"));
  }
  const swap::Finding found = swap::Probe(directories);
  RETURN_IF_ERROR(found.unread);
  if (HoldsAnything(found)) return ShardDirectories{directories};
  const std::vector<std::string> first = RankDirectories(directories, 0);
  const auto missing = [&directories](int rank, int64_t ranks, const swap::Finding& there) {
    return absl::DataLossError(absl::StrCat(
        RankDirectories(directories, rank).front(), ": the part of rank ", rank, " of the run's ", ranks,
        " is missing", there.holding == swap::Holding::kForeign ? absl::StrCat(" (", there.text, ")") : "",
        ": bring all parts together"));
  };
  const swap::Finding of_first = swap::Probe(first);
  RETURN_IF_ERROR(of_first.unread);
  if (!HoldsAnything(of_first)) {
    // Other ranks' parts may still be there.
    for (int rank = 1; rank < kMostRanksLookedFor; ++rank) {
      const std::vector<std::string> other = RankDirectories(directories, rank);
      const swap::Finding of_other = swap::Probe(other);
      RETURN_IF_ERROR(of_other.unread);
      if (!HoldsAnything(of_other)) continue;
      const absl::StatusOr<swap::Inspection> inspection = swap::Inspect(other);
      if (absl::IsNotFound(inspection.status())) continue;  // it was never committed
      RETURN_IF_ERROR(inspection.status());
      return missing(0, NumberIn(Parsed(inspection->shape.identity), kRanks, rank + 1), of_first);
    }
    // Something is there, perhaps what was a run: that is not the same as nothing.
    for (const swap::Finding& each : {of_first, found}) {
      if (each.holding == swap::Holding::kForeign) return absl::FailedPreconditionError(each.text);
    }
    return absl::NotFoundError(
        absl::StrCat(directories.front(), " holds neither a run nor rank-0/ of one of several ranks"));
  }
  ASSIGN_OR_RETURN(const swap::Inspection inspection, swap::Inspect(first));
  const int64_t ranks = NumberIn(Parsed(inspection.shape.identity), kRanks, 1);
  ShardDirectories parts;
  for (int rank = 0; rank < ranks; ++rank) {
    parts.push_back(RankDirectories(directories, rank));
    const swap::Finding of_rank = swap::Probe(parts.back());
    RETURN_IF_ERROR(of_rank.unread);
    if (HoldsAnything(of_rank)) continue;
    return missing(rank, ranks, of_rank);
  }
  return parts;
}

absl::StatusOr<int64_t> RanksIn(const std::vector<std::string>& directories, int rank) {
  const auto holds = [](const swap::Finding& finding) {
    return finding.holding != swap::Holding::kNeverCommitted && HoldsAnything(finding);
  };
  if (directories.empty()) return 0;
  const swap::Finding whole = swap::Probe(directories);
  RETURN_IF_ERROR(whole.unread);
  if (holds(whole)) return 1;
  int64_t least = 0;  // where no part can say
  for (int k = -1; k < kMostRanksLookedFor; ++k) {
    const int part = k < 0 ? rank : k;
    const swap::Finding found = swap::Probe(RankDirectories(directories, part));
    RETURN_IF_ERROR(found.unread);
    if (!holds(found)) continue;
    if (!found.identity.empty()) return NumberIn(Parsed(found.identity), kRanks, 1);
    least = std::max<int64_t>(least, part + 1);
  }
  return least;
}

nlohmann::json WholeIdentity(const std::string& identity) {
  nlohmann::json json = Parsed(identity);
  json.erase(kRanks);
  json.erase(kRank);
  return json;
}

absl::StatusOr<std::vector<swap::Inspection>> InspectShards(const ShardDirectories& parts) {
  std::vector<swap::Inspection> inspections;
  for (const std::vector<std::string>& part : parts) {
    ASSIGN_OR_RETURN(swap::Inspection inspection, swap::Inspect(part));
    inspections.push_back(std::move(inspection));
  }
  // One rank's part may be looked at alone.
  if (parts.size() == 1) return inspections;
  uint64_t sequence = ~uint64_t{0};
  for (const swap::Inspection& each : inspections) sequence = std::min(sequence, each.record.sequence);
  const swap::StoreShape& first = inspections.front().shape;
  for (size_t k = 0; k < parts.size(); ++k) {
    const swap::StoreShape& shape = inspections[k].shape;
    const nlohmann::json identity = Parsed(shape.identity);
    const bool its_own = NumberIn(identity, kRanks, 1) == static_cast<int64_t>(parts.size()) &&
                         NumberIn(identity, kRank, 0) == static_cast<int64_t>(k);
    if (!its_own || shape.uuid != first.uuid ||
        WholeIdentity(shape.identity) != WholeIdentity(first.identity)) {
      return absl::DataLossError(absl::StrCat(parts[k].front(), " is not the part of rank ", k,
                                              " of the run in ", parts.front().front(),
                                              ": bring the parts of one run together"));
    }
    if (inspections[k].record.sequence == sequence) continue;
    absl::StatusOr<swap::Inspection> before = swap::Inspect(parts[k], sequence);
    if (before.ok()) {
      inspections[k] = *std::move(before);
    } else if (!inspections[k].in_use) {
      return before.status();
    }
  }
  RETURN_IF_ERROR(CheckOfOneCommit(parts, inspections));
  return inspections;
}

uint64_t ShardedState::MemoryBytes(const std::vector<swap::Inspection>& inspections) {
  uint64_t most = swap::kSectorBytes;
  for (const swap::Inspection& inspection : inspections) {
    for (const swap::TilePlacement& tile : inspection.shape.tiles) {
      uint64_t bytes = 0;
      for (const uint64_t segment : tile.layout.segment_bytes) bytes += swap::PaddedBytes(segment);
      most = std::max(most, bytes);
    }
  }
  return most;
}

absl::StatusOr<std::unique_ptr<ShardedState>> ShardedState::Open(
    aio::Engine& engine, const ShardDirectories& parts, const std::vector<swap::Inspection>& inspections,
    const std::vector<int64_t>& block_elements, const tiering::Precision& precision,
    std::span<std::byte> memory) {
  std::unique_ptr<ShardedState> result(new ShardedState());
  result->precision_ = precision;
  result->memory_for_one_ = MemoryBytes(inspections);
  for (uint64_t at = 0; at + result->memory_for_one_ <= memory.size(); at += result->memory_for_one_) {
    result->loaded_.push_back(std::make_unique<Loaded>());
    result->loaded_.back()->memory = memory.data() + at;
  }
  for (size_t k = 0; k < parts.size(); ++k) {
    swap::StoreOptions options;
    options.directories = parts[k];
    options.read_only = true;
    options.sequence = inspections[k].record.sequence;
    ASSIGN_OR_RETURN(std::unique_ptr<swap::Store> store, swap::Store::Open(engine, options));
    if (store->uuid() != inspections[k].shape.uuid ||
        store->committed_sequence() != inspections.front().record.sequence) {
      return absl::FailedPreconditionError(
          absl::StrCat(parts[k].front(), " changed while it was being opened: is a run writing there?"));
    }
    result->stores_.push_back(std::move(store));
  }
  RETURN_IF_ERROR(result->PlaceTiles(block_elements));
  return result;
}

absl::Status ShardedState::PlaceTiles(const std::vector<int64_t>& block_elements) {
  const auto world = static_cast<int>(stores_.size());
  blocks_.resize(block_elements.size());
  for (size_t k = 0; k < stores_.size(); ++k) {
    const swap::Geometry& geometry = stores_[k]->geometry();
    const auto not_its_models = [&](uint32_t tile) {
      return absl::DataLossError(
          absl::StrCat("tile ", tile, " of ", stores_[k]->path(0), " is not one of its model's"));
    };
    uint32_t next = 0;
    for (size_t b = 0; b < block_elements.size(); ++b) {
      const int64_t part = tiering::ShardElements(block_elements[b], world);
      for (int64_t at = 0; at < part;) {
        if (next == geometry.tiles()) return not_its_models(next);
        const int64_t elements = precision_.ElementsOf(stores_[k]->shape().tiles[next].layout.segment_bytes);
        if (elements <= 0 || elements > part - at || elements % tiering::kScaleBlock != 0)
          return not_its_models(next);
        blocks_[tiering::BlockIndex(b)].push_back({k, next++, static_cast<int64_t>(k) * part + at, elements});
        at += elements;
      }
    }
    if (next != geometry.tiles()) return not_its_models(next);
  }
  return absl::OkStatus();
}

bool ShardedState::WeightsAlone(tiering::BlockIndex block) const {
  if (precision_.segment_bytes.size() == 1) return false;
  return std::all_of(blocks_[block].begin(), blocks_[block].end(), [this](const Tile& tile) {
    return stores_[tile.store]->geometry().segments(tile.number) == 1;
  });
}

int64_t ShardedState::LargestTile(tiering::BlockIndex block) const {
  int64_t most = 0;
  for (const Tile& tile : blocks_[block]) most = std::max(most, tile.elements);
  return most;
}

ShardedState::~ShardedState() {
  // Reads ahead that nobody wants any more: only their memory has to be free.
  for (const auto& each : loaded_) {
    if (each->tile != nullptr && !each->is_checked) stores_[each->tile->store]->Wait(&each->io).IgnoreError();
  }
}

// The tile and those that follow it, in this block and the next ones.
std::vector<const ShardedState::Tile*> ShardedState::From(tiering::BlockIndex block, const Tile& tile,
                                                          size_t most) const {
  std::vector<const Tile*> tiles;
  for (const Tile* next = &tile; blocks_.contains(block); next = blocks_[++block].data()) {
    const Tile* const end = blocks_[block].data() + blocks_[block].size();
    for (; next != end; ++next) {
      if (tiles.size() == most) return tiles;
      tiles.push_back(next);
    }
    if (block.value() + 1 == static_cast<int>(blocks_.size())) break;
  }
  return tiles;
}

absl::Status ShardedState::Ask(const Tile& tile, Loaded* to) {
  if (to->tile != nullptr && !to->is_checked) stores_[to->tile->store]->Wait(&to->io).IgnoreError();
  to->tile = nullptr;
  swap::Store& store = *stores_[tile.store];
  std::array<void*, swap::kMaxSegments> places;
  RETURN_IF_ERROR(store.ReadSegments(&to->io, tile.number, 0, store.geometry().segments(tile.number),
                                     store.geometry().SegmentPlaces(tile.number, to->memory, &places),
                                     aio::Priority::kDemand, swap::VersionChoice::kCommitted));
  to->tile = &tile;
  to->is_checked = false;
  return absl::OkStatus();
}

// Where the tile's segments are, until the next call.
absl::StatusOr<const std::byte*> ShardedState::Load(tiering::BlockIndex block, const Tile& tile) {
  if (loaded_.empty() || stores_[tile.store]->geometry().slot_bytes(tile.number) > memory_for_one_)
    return absl::InvalidArgumentError("the parts of a run are read through memory for one tile");
  const auto holder = [this](const Tile* of) {
    return std::find_if(loaded_.begin(), loaded_.end(), [of](const auto& each) { return each->tile == of; });
  };
  auto found = holder(&tile);
  if (found == loaded_.end() || !(*found)->is_checked) {
    const std::vector<const Tile*> wanted = From(block, tile, loaded_.size());
    for (const Tile* const next : wanted) {
      if (holder(next) != loaded_.end()) continue;
      const auto free = std::find_if(loaded_.begin(), loaded_.end(), [&](const auto& each) {
        return std::find(wanted.begin(), wanted.end(), each->tile) == wanted.end();
      });
      RETURN_IF_ERROR(Ask(*next, free->get()));
    }
    found = holder(&tile);
  }
  Loaded& loaded = **found;
  if (!loaded.is_checked) {
    swap::Store& store = *stores_[tile.store];
    absl::Status status = store.Wait(&loaded.io);
    if (status.ok()) status = store.VerifyRead(loaded.io);
    loaded.is_checked = status.ok();
    if (!status.ok()) {
      loaded.tile = nullptr;
      return status;
    }
  }
  return loaded.memory;
}

absl::Status ShardedState::ReadWeights(tiering::BlockIndex block, size_t from, void* run) {
  std::vector<const Tile*> tiles;
  for (const Tile& tile : blocks_[block]) {
    if (tile.store >= from) tiles.push_back(&tile);
  }
  const auto read = [&](size_t i) {
    void* const place = static_cast<std::byte*>(run) + tiles[i]->first * precision_.weight_bytes();
    return stores_[tiles[i]->store]->ReadSegments(&ios_[i % 2], tiles[i]->number, 0, 1,
                                                  std::span<void* const>(&place, 1), aio::Priority::kDemand,
                                                  swap::VersionChoice::kCommitted);
  };
  // One ahead: the next tile is on its way while this one is checked.
  absl::Status status = tiles.empty() ? absl::OkStatus() : read(0);
  for (size_t i = 0; i < tiles.size() && status.ok(); ++i) {
    if (i + 1 < tiles.size()) status = read(i + 1);
    swap::Store& store = *stores_[tiles[i]->store];
    absl::Status arrived = store.Wait(&ios_[i % 2]);
    if (arrived.ok()) arrived = store.VerifyRead(ios_[i % 2]);
    status.Update(arrived);
  }
  for (swap::TileIo& io : ios_) {
    if (io.pending()) (void)stores_.front()->Wait(&io);  // the error before it is the one to tell
  }
  return status;
}

absl::Status ShardedState::Read(tiering::BlockIndex block, int64_t first, int64_t elements,
                                std::span<void* const> places) {
  const size_t segments = std::min(precision_.segment_bytes.size(), places.size());
  for (size_t s = 0; s < segments; ++s) {
    std::memset(places[s], 0, static_cast<size_t>(precision_.SegmentBytes(s, elements)));
  }
  for (const Tile& tile : blocks_[block]) {
    const int64_t from = std::max(first, tile.first),
                  to = std::min(first + elements, tile.first + tile.elements);
    if (from >= to) continue;
    ASSIGN_OR_RETURN(const std::byte* const memory, Load(block, tile));
    const swap::Geometry& geometry = stores_[tile.store]->geometry();
    const size_t there = std::min<size_t>(segments, geometry.segments(tile.number));
    for (size_t s = 0; s < there; ++s) {
      const std::byte* source = memory + geometry.segment_start(tile.number, static_cast<uint32_t>(s));
      auto* target = static_cast<std::byte*>(places[s]);
      const int64_t width = precision_.segment_bytes[s];
      const auto copy = [&](int64_t target_at, int64_t source_at, int64_t bytes) {
        std::memcpy(target + target_at, source + source_at, static_cast<size_t>(bytes));
      };
      copy((from - first) * width, (from - tile.first) * width, (to - from) * width);
      if (width != 1) continue;
      // Behind the codes of all elements, their scales.
      constexpr int64_t kScaleBytes = 4;
      copy(elements + (from - first) / tiering::kScaleBlock * kScaleBytes,
           tile.elements + (from - tile.first) / tiering::kScaleBlock * kScaleBytes,
           (to - from) / tiering::kScaleBlock * kScaleBytes);
    }
    // Weights that are all that there is stand for their masters; of bf16 the low halves are zero then.
    if (there < segments && precision_.name == "fp16") {
      kernels::Convert(kernels::DType::kFp16, static_cast<const uint16_t*>(places[0]) + (from - first),
                       kernels::DType::kFp32, static_cast<float*>(places[1]) + (from - first),
                       static_cast<size_t>(to - from));
    }
  }
  return absl::OkStatus();
}

}  // namespace penstock::zero
