#include "tiering/program/op.h"

#include <array>

namespace penstock::tiering {
namespace {

constexpr std::array<OpTraits, kOpKinds> kTraits = {{
    // kind, name, the compute lane's stall, of no use without its step
    {OpKind::kReadWeights, "read weights", Stall::kRead, true},
    {OpKind::kReadState, "read state", Stall::kRead, true},
    {OpKind::kReadGradient, "read gradient", Stall::kRead, false},
    {OpKind::kVerify, "verify", Stall::kUpdate, true},
    {OpKind::kUpdate, "update", Stall::kUpdate, false},
    {OpKind::kWriteTile, "write tile", Stall::kWrite, false},
    {OpKind::kWriteState, "write state", Stall::kWrite, false},
    {OpKind::kWriteWeights, "write weights", Stall::kWrite, false},
    {OpKind::kWriteGradient, "write gradient", Stall::kWrite, true},
    {OpKind::kWriteInput, "write input", Stall::kWrite, true},
    {OpKind::kReadInput, "read input", Stall::kRead, true},
    {OpKind::kReadSums, "read sums", Stall::kRead, true},
    {OpKind::kWriteSums, "write sums", Stall::kWrite, true},
    {OpKind::kForward, "forward", Stall::kHost, true},
    {OpKind::kBackward, "backward", Stall::kHost, true},
    {OpKind::kAccumulateGradient, "accumulate gradient", Stall::kHost, true},
    {OpKind::kRoundGradient, "round gradient", Stall::kUpdate, true},
    {OpKind::kNorm, "norm", Stall::kHost, false},
    {OpKind::kChecksumTile, "checksum tile", Stall::kUpdate, false},
    {OpKind::kCommit, "commit", Stall::kCommit, false},
    {OpKind::kBatch, "batch", Stall::kBatch, false},
    {OpKind::kEvaluated, "evaluated", Stall::kHost, false},
    {OpKind::kSummed, "summed", Stall::kHost, false},
    {OpKind::kCopyIn, "copy in", Stall::kHost, true},
    {OpKind::kRoundOnDevice, "round gradient on device", Stall::kHost, true},
    {OpKind::kCopyOut, "copy out", Stall::kHost, true},
    {OpKind::kAllGather, "all-gather weights", Stall::kNetwork, false},
    {OpKind::kReduceScatter, "reduce-scatter gradient", Stall::kNetwork, false},
    {OpKind::kExchange, "exchange norms", Stall::kNetwork, false},
    {OpKind::kAgree, "agree on commit", Stall::kNetwork, false},
    {OpKind::kSquareGradient, "square gradient", Stall::kHost, true},
    {OpKind::kUpdateOnDevice, "update on device", Stall::kHost, false},
    {OpKind::kCopyStateIn, "copy state in", Stall::kHost, true},
    {OpKind::kCopyStateOut, "copy state out", Stall::kHost, false},
    {OpKind::kUpdateNorms, "norms of an update", Stall::kUpdate, true},
    {OpKind::kExchangeNorms, "exchange norms of updates", Stall::kNetwork, false},
    {OpKind::kTrust, "trust ratios", Stall::kHost, false},
}};

// The table is in the order of the kinds: a kind is its own place in it.
constexpr bool InOrder() {
  for (size_t i = 0; i < kTraits.size(); ++i) {
    if (kTraits[i].kind != static_cast<OpKind>(i) || kTraits[i].name.empty()) return false;
  }
  return true;
}
static_assert(InOrder());

// In the order of the lanes, and of the stalls.
constexpr std::array<std::string_view, kLanes> kLaneNames = {
    "read", "write", "compute", "update", "commit", "host", "copy in", "copy out", "gather", "reduce"};
static_assert(kLaneNames[static_cast<size_t>(Lane::kReduceScatter)] == "reduce");
constexpr std::array<std::string_view, kStalls + 1> kStallNames = {
    "read", "write", "update", "commit", "batch", "copy", "network", "host", "compute"};
static_assert(kStallNames[static_cast<size_t>(Stall::kNone)] == "compute");

}  // namespace

const OpTraits& TraitsOf(OpKind kind) { return kTraits[static_cast<size_t>(kind)]; }

std::string_view StallName(Stall stall) { return kStallNames[static_cast<size_t>(stall)]; }
std::string_view LaneName(Lane lane) { return kLaneNames[static_cast<size_t>(lane)]; }

}  // namespace penstock::tiering
