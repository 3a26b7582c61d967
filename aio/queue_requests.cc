#include "aio/queue_requests.h"

#include "absl/strings/str_format.h"

namespace penstock::aio {
namespace {

std::string DescribeRequest(const Request& request, int64_t now_ns) {
  const Request::State state = request.state();
  return absl::StrFormat("%s %s: offset %u, %u bytes, %u done, %s, %s for %.1f s",
                         std::string(OpName(request.op())).c_str(), request.file()->path().c_str(),
                         request.offset(), request.bytes(), request.done_bytes(),
                         std::string(PriorityName(request.priority())).c_str(),
                         state == Request::State::kQueued ? "queued" : "at the device",
                         static_cast<double>(now_ns - request.submit_ns()) * 1e-9);
}

}  // namespace

bool DeviceQueue::Unfinished::Add(Request* chain) {
  if (chain == nullptr) return false;
  bool cancelled = false;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Request* request = chain; request != nullptr; request = request->next_) {
    cancelled |= request->cancel_.load(std::memory_order_relaxed);
    request->all_next_ = nullptr;
    request->all_previous_ = last_;
    (last_ == nullptr ? first_ : last_->all_next_) = request;
    last_ = request;
  }
  return cancelled;
}

void DeviceQueue::Unfinished::Remove(Request& request) {
  const std::lock_guard<std::mutex> lock(mutex_);
  (request.all_previous_ == nullptr ? first_ : request.all_previous_->all_next_) = request.all_next_;
  (request.all_next_ == nullptr ? last_ : request.all_next_->all_previous_) = request.all_previous_;
}

void DeviceQueue::Unfinished::Describe(int64_t now_ns, size_t limit, std::vector<std::string>& lines) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Request* request = first_; request != nullptr && lines.size() < limit;
       request = request->all_next_) {
    lines.push_back(DescribeRequest(*request, now_ns));
  }
}

std::vector<std::string> DeviceQueue::Unfinished::TellStuck(int64_t now_ns, int64_t limit_ns, Counter& told) {
  std::vector<std::string> lines;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Request* request = first_; request != nullptr; request = request->all_next_) {
    const int64_t age_ns = now_ns - request->submit_ns_;
    if (age_ns < limit_ns) break;  // the list is in order of submission
    if (request->reported_ns_ != 0 && age_ns < 2 * (request->reported_ns_ - request->submit_ns_)) continue;
    request->reported_ns_ = now_ns;
    told.Add(1);
    if (lines.size() < 4) lines.push_back(DescribeRequest(*request, now_ns));
  }
  return lines;
}

}  // namespace penstock::aio
