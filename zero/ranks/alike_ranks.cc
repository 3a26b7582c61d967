#include "zero/ranks/alike_ranks.h"

#include <cstring>

#include "base/status_macros.h"

namespace penstock::zero {
namespace {

class Done final : public Exchange {
 public:
  absl::Status Wait() override { return absl::OkStatus(); }
};

class Alike final : public Comm {
 public:
  explicit Alike(const RankEnvironment& environment) : Comm(environment) {}
  std::string name() const override { return "ranks that are not there"; }

  // What this one sends to rank k is what k would send to it.
  absl::StatusOr<std::unique_ptr<Exchange>> Begin(Channel /*channel*/, const What& /*what*/,
                                                  std::span<const void* const> send,
                                                  std::span<void* const> receive, size_t bytes) override {
    RETURN_IF_ERROR(failure_);
    for (size_t k = 0; k < receive.size(); ++k) {
      if (k != static_cast<size_t>(rank())) std::memcpy(receive[k], send[k], bytes);
    }
    return std::make_unique<Done>();
  }
  void Abort(const absl::Status& why) override { failure_.Update(why); }
  absl::Status failure() override { return failure_; }

 private:
  absl::Status failure_;
};

}  // namespace

std::unique_ptr<Comm> AlikeRanks(const RankEnvironment& environment) {
  return std::make_unique<Alike>(environment);
}

}  // namespace penstock::zero
