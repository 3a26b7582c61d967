#include "tools/generate/generate_text.h"

#include <algorithm>

namespace penstock::tools {

GrowingText::GrowingText(const TextModel* model, const std::vector<std::string>* stops)
    : stops_(*stops), decoder_(*model) {
  for (const std::string& stop : stops_) longest_stop_ = std::max(longest_stop_, stop.size());
}

bool GrowingText::Cut(size_t from) {
  size_t first = std::string::npos;
  for (const std::string& stop : stops_) first = std::min(first, text_.find(stop, from));
  if (first == std::string::npos) return false;
  text_.resize(first);
  return true;
}

bool GrowingText::Push(int64_t token) {
  tokens_.push_back(token);
  const size_t before = text_.size();
  begins_.push_back(before);
  text_ += decoder_.Push(token);
  finished_ = Cut(before - std::min(before, longest_stop_));
  return finished_;
}

void GrowingText::Finish() {
  if (finished_) return;
  finished_ = true;
  const size_t before = text_.size();
  text_ += decoder_.Finish();
  Cut(before - std::min(before, longest_stop_));
}

std::string GrowingText::TakeCertain() {
  const size_t held = finished_ || longest_stop_ == 0 ? 0 : longest_stop_ - 1;
  const size_t certain = std::max(taken_, text_.size() - std::min(text_.size(), held));
  std::string part = text_.substr(std::min(taken_, text_.size()), certain - std::min(taken_, certain));
  taken_ = certain;
  return part;
}

}  // namespace penstock::tools
