#include "zero/ranks/rank_position.h"

#include <nlohmann/json.hpp>

#include "absl/strings/numbers.h"
#include "base/io_error.h"
#include "base/json.h"
#include "base/status_macros.h"

namespace penstock::zero {
namespace {

using Json = nlohmann::json;

absl::Status NoPosition() { return absl::InvalidArgumentError("not the position of a rank"); }

absl::StatusOr<uint64_t> Whole(const Json& of, const char* key) {
  const auto at = of.find(key);
  if (at == of.end() || !at->is_number_unsigned()) return NoPosition();
  return at->get<uint64_t>();
}

}  // namespace

std::string RankPosition::ToText() const {
  Json told_calls = Json::object(), told_exchanges = Json::array(), told_begun = Json::array();
  for (const auto& [number, call] : calls)
    told_calls[std::to_string(number)] = OneLine(call, kMostPositionText);
  for (const auto& [place, exchange] : exchanges) {
    if (told_exchanges.size() == kMostPositionExchanges) break;
    told_exchanges.push_back({{"is", OneLine(exchange.text, kMostPositionText)},
                              {"calls", exchange.calls},
                              {"channel", place.first},
                              {"number", place.second}});
  }
  for (const uint64_t count : begun) told_begun.push_back(count);
  return Json{{"beat", beat},
              {"calls", told_calls},
              {"exchanges", told_exchanges},
              {"begun", told_begun},
              {"ended", ended}}
      .dump(-1, ' ', false, Json::error_handler_t::replace);
}

absl::StatusOr<RankPosition> RankPosition::FromText(std::string_view text) {
  ASSIGN_OR_RETURN(const Json json,
                   ParseJsonObject(text, "a rank's position", {.max_depth = 4, .max_values = 4096}));
  RankPosition position;
  ASSIGN_OR_RETURN(position.beat, Whole(json, "beat"));
  const auto calls = json.find("calls"), exchanges = json.find("exchanges"), begun = json.find("begun"),
             ended = json.find("ended");
  if (calls == json.end() || !calls->is_object() || exchanges == json.end() || !exchanges->is_array() ||
      exchanges->size() > kMostPositionExchanges || begun == json.end() || !begun->is_array() ||
      begun->size() != position.begun.size() || ended == json.end() || !ended->is_boolean())
    return NoPosition();
  for (const auto& [key, call] : calls->items()) {
    uint64_t number = 0;
    if (!absl::SimpleAtoi(key, &number) || !call.is_string()) return NoPosition();
    position.calls[number] = OneLine(call.get<std::string>(), kMostPositionText + 3);
  }
  for (const Json& exchange : *exchanges) {
    if (!exchange.is_object()) return NoPosition();
    const auto is = exchange.find("is");
    ASSIGN_OR_RETURN(const uint64_t channel, Whole(exchange, "channel"));
    ASSIGN_OR_RETURN(const uint64_t number, Whole(exchange, "number"));
    Exchange told;
    ASSIGN_OR_RETURN(told.calls, Whole(exchange, "calls"));
    if (is == exchange.end() || !is->is_string() || channel >= kChannels) return NoPosition();
    told.text = OneLine(is->get<std::string>(), kMostPositionText + 3);
    position.exchanges[{channel, number}] = std::move(told);
  }
  for (size_t i = 0; i < position.begun.size(); ++i) {
    if (!(*begun)[i].is_number_unsigned()) return NoPosition();
    position.begun[i] = (*begun)[i].get<uint64_t>();
  }
  position.ended = ended->get<bool>();
  return position;
}

std::optional<PositionDifference> ComparePositions(const std::vector<RankPosition>& positions,
                                                   const std::string& end_text) {
  std::map<uint64_t, size_t> first_call;  // which rank is at the call of a number, the first of them
  std::map<std::pair<size_t, uint64_t>, size_t> first_exchange;
  for (size_t k = 0; k < positions.size(); ++k) {
    for (const auto& [number, call] : positions[k].calls) {
      const size_t other = first_call.emplace(number, k).first->second;
      const std::string& others = positions[other].calls.at(number);
      if (call != others) return PositionDifference{k, other, call, others};
    }
  }
  for (size_t k = 0; k < positions.size(); ++k) {
    for (const auto& [place, exchange] : positions[k].exchanges) {
      const size_t other = first_exchange.emplace(place, k).first->second;
      const RankPosition::Exchange& others = positions[other].exchanges.at(place);
      if (exchange != others) return PositionDifference{k, other, exchange.text, others.text};
    }
  }
  for (size_t k = 0; k < positions.size(); ++k) {
    for (size_t other = 0; other < positions.size(); ++other) {
      if (!positions[other].ended) continue;
      for (const auto& [place, exchange] : positions[k].exchanges) {
        if (place.second >= positions[other].begun.at(place.first))
          return PositionDifference{k, other, exchange.text, end_text};
      }
    }
  }
  return std::nullopt;
}

}  // namespace penstock::zero
