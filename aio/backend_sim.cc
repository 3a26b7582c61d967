// The simulated disk as a backend: transfers start when they are queued and end when the virtual clock says
// so.
#include <vector>

#include "aio/backend.h"
#include "aio/sim_disk.h"

namespace penstock::aio {
namespace {

class SimBackend final : public Backend {
 public:
  explicit SimBackend(SimDisk* disk) : disk_(disk) {}

  std::string_view name() const override { return "sim"; }

  absl::Status Start(const BackendConfig& config) override {
    done_.resize(config.options->max_blocks_in_flight);
    return absl::OkStatus();
  }

  void Queue(Piece& piece) override {
    SimDisk::Transfer transfer;
    transfer.file = piece.slot->file->sim_file();
    transfer.op = piece.op;
    transfer.offset = piece.device_offset();
    transfer.data = piece.op == Op::kSync ? nullptr : piece.device_data();
    transfer.bytes = piece.device_bytes();
    transfer.tag = &piece;
    disk_ = piece.slot->file->sim();  // that of all files of a queue, which is a device's
    disk_->Start(transfer);
  }

  int64_t Run(std::span<Completion> out, uint32_t /*want*/, int64_t /*timeout_ns*/) override {
    const size_t count = disk_->Reap(done_.data(), std::min(done_.size(), out.size()));
    for (size_t i = 0; i < count; ++i) out[i] = {static_cast<Piece*>(done_[i].tag), done_[i].result};
    return static_cast<int64_t>(count);
  }

  void Wake() override {}
  int64_t NextEventNs() const override { return disk_->NextDueNs(); }

 private:
  SimDisk* disk_;
  std::vector<SimDisk::Transfer> done_;
};

}  // namespace

std::unique_ptr<Backend> MakeSimBackend(SimDisk* disk) { return std::make_unique<SimBackend>(disk); }

}  // namespace penstock::aio
