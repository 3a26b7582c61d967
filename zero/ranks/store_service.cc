#include "zero/ranks/store_service.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "absl/strings/numbers.h"
#include "base/check.h"
#include "zero/ranks/sockets.h"

namespace penstock::zero {

static_assert(std::is_trivially_copyable_v<StoreRequest> && std::is_trivially_copyable_v<StoreAnswer>);

void StoreService::Open(int peer, Clock::time_point now, const HashBytes& random) {
  const auto [place, is_new] = peers_.try_emplace(peer);
  PENSTOCK_CHECK(is_new, "two connections of one name");
  place->second.unproved.emplace(secret_, kStorePurpose, random);
  place->second.since = now;
  Send(&place->second, place->second.unproved->Challenge());
}

bool StoreService::Receive(int peer, std::string_view bytes) {
  Peer& from = peers_.at(peer);
  if (!from.to_send.empty()) return false;  // whoever asks waits for the answer
  if (from.unproved.has_value()) {
    const Challenger::State state = from.unproved->Take(&bytes);
    if (state == Challenger::State::kWaits) return true;
    if (state == Challenger::State::kRefused) ++refused_;
    Send(&from, from.unproved->Verdict());
    from.unproved.reset();
    return state == Challenger::State::kAccepted && bytes.empty();
  }
  if (under_way_bytes_ + bytes.size() > kStoreMostUnderWay) return false;
  from.received.append(bytes);
  under_way_bytes_ += bytes.size();
  return Reply(&from);
}

std::string_view StoreService::ToSend(int peer) const {
  const Peer& to = peers_.at(peer);
  return std::string_view(to.to_send).substr(to.sent);
}

void StoreService::Sent(int peer, size_t bytes) {
  Peer& to = peers_.at(peer);
  to.sent += bytes;
  PENSTOCK_CHECK(to.sent <= to.to_send.size(), "more sent than there was to send");
  if (to.sent < to.to_send.size()) return;
  under_way_bytes_ -= to.to_send.size();
  to.to_send.clear();
  to.sent = 0;
}

void StoreService::Close(int peer) {
  const auto gone = peers_.find(peer);
  if (gone == peers_.end()) return;
  under_way_bytes_ -= gone->second.received.size() + gone->second.to_send.size();
  peers_.erase(gone);
}

std::vector<int> StoreService::Overdue(Clock::time_point now) const {
  std::vector<int> overdue;
  std::vector<std::pair<Clock::time_point, int>> waiting;
  for (const auto& [name, peer] : peers_) {
    if (!peer.unproved.has_value()) continue;
    if (now - peer.since >= kProofPatience) {
      overdue.push_back(name);
    } else {
      waiting.emplace_back(peer.since, name);
    }
  }
  if (waiting.size() > kMostUnproved) {
    std::sort(waiting.begin(), waiting.end());
    waiting.resize(waiting.size() - kMostUnproved);
    for (const auto& [since, name] : waiting) overdue.push_back(name);
  }
  return overdue;
}

std::optional<StoreService::Clock::time_point> StoreService::NextDeadline() const {
  std::optional<Clock::time_point> next;
  for (const auto& [name, peer] : peers_) {
    if (peer.unproved.has_value() && (!next.has_value() || peer.since + kProofPatience < *next))
      next = peer.since + kProofPatience;
  }
  return next;
}

// Answers what has been received as soon as it is whole: one request, since each waits for its answer.
bool StoreService::Reply(Peer* peer) {
  StoreRequest request;
  const std::string_view received = peer->received;
  if (received.size() < sizeof(request)) return true;
  std::memcpy(&request, received.data(), sizeof(request));
  if (request.mark != kStoreMark || request.key_bytes > kStoreMostKeyBytes ||
      request.value_bytes > kStoreMostValueBytes)
    return false;
  const size_t whole = sizeof(request) + request.key_bytes + request.value_bytes;
  if (received.size() < whole) return true;
  if (received.size() > whole) return false;
  if (request.what != StoreAsks::kSet && request.what != StoreAsks::kGet && request.what != StoreAsks::kHas &&
      request.what != StoreAsks::kAdd)
    return false;
  std::string content;
  StoreAnswer answer = Answer(request.what, received.substr(sizeof(request), request.key_bytes),
                              received.substr(sizeof(request) + request.key_bytes), &content);
  under_way_bytes_ -= peer->received.size();
  peer->received.clear();
  answer.value_bytes = static_cast<uint32_t>(content.size());
  std::string all(reinterpret_cast<const char*>(&answer), sizeof(answer));
  all += content;
  if (under_way_bytes_ + all.size() > kStoreMostUnderWay) return false;
  Send(peer, std::move(all));
  return true;
}

StoreAnswer StoreService::Answer(StoreAsks what, std::string_view key, std::string_view value,
                                 std::string* content) {
  const auto at = values_.find(key);
  const StoreSays there = at != values_.end() ? StoreSays::kFound : StoreSays::kMissing;
  switch (what) {
    case StoreAsks::kSet:
      return {.says = Put(key, value)};
    case StoreAsks::kGet:
      if (at != values_.end()) *content = at->second;
      return {.says = there};
    case StoreAsks::kHas:
      return {.says = there};
    case StoreAsks::kAdd: {
      int64_t sum = 0, number = 0;
      if (!absl::SimpleAtoi(absl::string_view(value.data(), value.size()), &number) ||
          (at != values_.end() && !absl::SimpleAtoi(at->second, &sum)))
        return {.says = StoreSays::kNoNumber};
      if (__builtin_add_overflow(sum, number, &sum)) return {.says = StoreSays::kTooLarge};
      std::string text = std::to_string(sum);
      const StoreSays put = Put(key, text);
      if (put != StoreSays::kFull) *content = std::move(text);
      return {.says = put};
    }
  }
  return {.says = there};
}

StoreSays StoreService::Put(std::string_view key, std::string_view value) {
  const auto at = values_.find(key);
  const bool is_new = at == values_.end();
  const size_t before = is_new ? 0 : at->second.size();
  const size_t after = kept_bytes_ - before + value.size() + (is_new ? key.size() + kStoreEntryBytes : 0);
  // What makes room is taken even where there is too much already.
  if (after > kStoreMostBytes && after > kept_bytes_) return StoreSays::kFull;
  kept_bytes_ = after;
  if (is_new) {
    values_.emplace(key, value);
    return StoreSays::kMissing;
  }
  at->second.assign(value);
  return StoreSays::kFound;
}

void StoreService::Send(Peer* peer, std::string bytes) {
  under_way_bytes_ += bytes.size();
  peer->to_send = std::move(bytes);
  peer->sent = 0;
}

}  // namespace penstock::zero
