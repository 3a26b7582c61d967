#include "zero/ranks/comm.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace penstock::zero {

std::string RankName(int rank, int world) { return absl::StrCat("rank ", rank, " of ", world); }

absl::Status Comm::AllToAll(Channel channel, std::span<const void* const> send,
                            std::span<void* const> receive, size_t bytes) {
  absl::StatusOr<std::unique_ptr<Exchange>> exchange = Begin(channel, send, receive, bytes);
  return exchange.ok() ? (*exchange)->Wait() : exchange.status();
}

absl::Status Comm::AllGather(Channel channel, void* run, size_t bytes) {
  auto* const base = static_cast<std::byte*>(run);
  const std::vector<const void*> send(static_cast<size_t>(world()),
                                      base + static_cast<size_t>(rank()) * bytes);
  std::vector<void*> receive;
  for (int k = 0; k < world(); ++k) receive.push_back(base + static_cast<size_t>(k) * bytes);
  return AllToAll(channel, send, receive, bytes);
}

absl::StatusOr<std::vector<std::string>> Comm::AllTexts(Channel channel, const std::string& mine) {
  const auto ranks = static_cast<size_t>(world());
  std::vector<uint64_t> lengths(ranks);
  lengths[static_cast<size_t>(rank())] = mine.size();
  if (absl::Status status = AllGather(channel, lengths.data(), sizeof(uint64_t)); !status.ok()) return status;
  uint64_t longest = 0;
  for (const uint64_t length : lengths) longest = std::max(longest, length);
  std::string all(ranks * longest, '\0');
  all.replace(static_cast<size_t>(rank()) * longest, mine.size(), mine);
  if (absl::Status status = AllGather(channel, all.data(), longest); !status.ok()) return status;
  std::vector<std::string> texts;
  for (size_t k = 0; k < ranks; ++k) texts.push_back(all.substr(k * longest, lengths[k]));
  return texts;
}

#ifndef PENSTOCK_HAVE_NCCL
absl::Status NcclThere() { return absl::UnimplementedError("this Penstock was built without NCCL"); }
absl::StatusOr<std::shared_ptr<Comm>> ConnectNccl(const std::shared_ptr<Comm>&) { return NcclThere(); }
#endif

}  // namespace penstock::zero
