#include "zero/ranks/comm.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace penstock::zero {

constexpr uint64_t kMostRankText = 16 << 20;  // bytes of one rank's text for all

std::string RankName(int rank, int world) { return absl::StrCat("rank ", rank, " of ", world); }

std::string What::Text(size_t bytes) const {
  std::string text = name;
  if (block >= 0) absl::StrAppend(&text, " of block ", block);
  if (piece >= 0) absl::StrAppend(&text, ", piece ", piece);
  if (step >= 0) absl::StrAppend(&text, block >= 0 ? ", step " : " of step ", step);
  return absl::StrCat(text, " (", bytes, " bytes)");
}

absl::Status Comm::AllToAll(Channel channel, const What& what, std::span<const void* const> send,
                            std::span<void* const> receive, size_t bytes) {
  absl::StatusOr<std::unique_ptr<Exchange>> exchange = Begin(channel, what, send, receive, bytes);
  return exchange.ok() ? (*exchange)->Wait() : exchange.status();
}

absl::Status Comm::AllGather(Channel channel, const What& what, void* run, size_t bytes) {
  auto* const base = static_cast<std::byte*>(run);
  const std::vector<const void*> send(static_cast<size_t>(world()),
                                      base + static_cast<size_t>(rank()) * bytes);
  std::vector<void*> receive;
  for (int k = 0; k < world(); ++k) receive.push_back(base + static_cast<size_t>(k) * bytes);
  return AllToAll(channel, what, send, receive, bytes);
}

absl::StatusOr<std::vector<std::string>> Comm::AllTexts(Channel channel, const What& what,
                                                        const std::string& mine) {
  const auto ranks = static_cast<size_t>(world());
  std::vector<uint64_t> lengths(ranks);
  lengths[static_cast<size_t>(rank())] = mine.size();
  RETURN_IF_ERROR(AllGather(channel, what, lengths.data(), sizeof(uint64_t)));
  uint64_t longest = 0;
  for (size_t k = 0; k < ranks; ++k) {
    if (lengths[k] > kMostRankText) {
      return absl::InvalidArgumentError(absl::StrCat(RankName(static_cast<int>(k), world()),
                                                     " has a text of ", lengths[k], " bytes for all ranks (",
                                                     what.name, "): at most ", kMostRankText));
    }
    longest = std::max(longest, lengths[k]);
  }
  std::string all(ranks * longest, '\0');
  all.replace(static_cast<size_t>(rank()) * longest, mine.size(), mine);
  RETURN_IF_ERROR(AllGather(channel, what, all.data(), longest));
  std::vector<std::string> texts;
  for (size_t k = 0; k < ranks; ++k) texts.push_back(all.substr(k * longest, lengths[k]));
  return texts;
}

#ifndef PENSTOCK_HAVE_NCCL
absl::Status NcclThere() { return absl::UnimplementedError("this Penstock was built without NCCL"); }
absl::StatusOr<std::shared_ptr<Comm>> ConnectNccl(const std::shared_ptr<Comm>&) { return NcclThere(); }
#endif

}  // namespace penstock::zero
