// What a rank is at, as it goes with its signs of life to rank 0, which compares (comm.h).
#ifndef PENSTOCK_ZERO_RANKS_RANK_POSITION_H_
#define PENSTOCK_ZERO_RANKS_RANK_POSITION_H_

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "zero/ranks/comm.h"

namespace penstock::zero {

inline constexpr size_t kMostPositionText = 200;      // bytes of one call or exchange
inline constexpr size_t kMostPositionExchanges = 64;  // of one report; the others are compared later

struct RankPosition {
  struct Exchange {
    std::string text{};  // "weights of block 3, step 7 (4096 bytes)"
    uint64_t calls = 0;
    friend bool operator==(const Exchange&, const Exchange&) = default;
  };
  uint64_t beat = 0;                                            // tells one report from the last
  std::map<uint64_t, std::string> calls{};                      // the newest, by number
  std::map<std::pair<size_t, uint64_t>, Exchange> exchanges{};  // under way, by channel and number there
  std::array<uint64_t, kChannels> begun{};                      // by channel
  bool ended = false;                                           // nothing is begun any more

  // JSON of at most kStoreMostValueBytes (store_service.h).
  std::string ToText() const;
  // Takes any text. kInvalidArgument: not a rank's position.
  static absl::StatusOr<RankPosition> FromText(std::string_view text);
};

// Two ranks that are not at the same, so that what they wait for does not come.
struct PositionDifference {
  size_t rank = 0, other = 0;
  std::string at, other_at;
};
// Returns the first difference between the ranks' positions, by rank.
std::optional<PositionDifference> ComparePositions(const std::vector<RankPosition>& positions,
                                                   const std::string& end_text);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_RANKS_RANK_POSITION_H_
