#include "zero/compute/missed_updates.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "tiering/plan/model_graph.h"

namespace penstock::zero {

int64_t TrainedParameters(const GradientSums::Layouts& layouts) {
  int64_t count = 0;
  for (const auto& layout : layouts) {
    count += std::count_if(layout->parameters.begin(), layout->parameters.end(),
                           [](const Parameter& parameter) { return parameter.trains; });
  }
  return count;
}

bool ShareScales(const GradientSums::Layouts& layouts) {
  for (const auto& layout : layouts) {
    for (const Parameter& parameter : layout->parameters) {
      if (parameter.trains && parameter.offset % tiering::kScaleBlock != 0) return true;
    }
  }
  return false;
}

MissedUpdates MissedUpdates::Of(std::vector<int64_t> counts) {
  MissedUpdates made;
  if (std::any_of(counts.begin(), counts.end(), [](int64_t count) { return count != 0; }))
    made.counts_ = std::make_shared<const std::vector<int64_t>>(std::move(counts));
  return made;
}

MissedUpdates MissedUpdates::And(std::span<const uint8_t> came) const {
  if (std::find(came.begin(), came.end(), uint8_t{0}) == came.end()) return *this;
  std::vector<int64_t> counts = counts_ != nullptr ? *counts_ : std::vector<int64_t>(came.size(), int64_t{0});
  for (size_t p = 0; p < counts.size(); ++p) counts[p] += came[p] == 0 ? 1 : 0;
  return Of(std::move(counts));
}

nlohmann::json MissedUpdates::ToJson() const {
  if (none()) return {};
  nlohmann::json json = nlohmann::json::array();
  const std::vector<int64_t>& counts = *counts_;
  for (size_t begin = 0, end = 0; begin < counts.size(); begin = end) {
    while (end < counts.size() && counts[end] == counts[begin]) ++end;
    json.push_back(counts[begin]);
    json.push_back(end - begin);
  }
  return json;
}

absl::StatusOr<MissedUpdates> MissedUpdates::FromJson(const nlohmann::json& json, int64_t parameters) {
  const absl::Status wrong = absl::DataLossError("counts of missed updates");
  if (json.is_null()) return MissedUpdates();
  if (!json.is_array() || json.size() % 2 != 0) return wrong;
  std::vector<int64_t> counts;
  for (size_t i = 0; i < json.size(); i += 2) {
    if (!json[i].is_number_unsigned() || !json[i + 1].is_number_unsigned()) return wrong;
    const auto count = json[i].get<uint64_t>(), times = json[i + 1].get<uint64_t>();
    const auto room = static_cast<uint64_t>(parameters) - counts.size();
    if (times > room || count > uint64_t{1} << 62) return wrong;
    counts.insert(counts.end(), static_cast<size_t>(times), static_cast<int64_t>(count));
  }
  if (counts.size() != static_cast<size_t>(parameters)) return wrong;
  return Of(std::move(counts));
}

}  // namespace penstock::zero
