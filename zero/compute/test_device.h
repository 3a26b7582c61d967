// A device for tests, on the processor: what makes a GPU a tier of its own, and nothing else.
//
//   memory     an arena apart from the host's, filled with NaNs at first, so that weights which were never
//              copied in show; capacity is checked at every allocation. Tensors are the host's counting
//              allocator's (Device::tensors_are_host).
//   copies     one thread for each direction, in order, each copy no faster than bandwidth and latency allow;
//              one into a tensor that does not wait for compute fails
//   compute    the processor's own: the same bits as `cpu`; of a late device on streams, each a thread that
//   runs
//              what it is given one after the other and some time later, so that an order which nobody asks
//              for is not there
//   storage    reads of files straight into the arena, where the caller asks for them
//   faults     copies and such reads may be made to fail, or to bring damage, to see what becomes of the run
#ifndef PENSTOCK_ZERO_COMPUTE_TEST_DEVICE_H_
#define PENSTOCK_ZERO_COMPUTE_TEST_DEVICE_H_

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "zero/compute/device.h"

namespace penstock::zero {

struct TestDeviceOptions {
  int64_t capacity_bytes = int64_t{1} << 30;
  double bytes_per_s = 0;      // of each direction; 0: as fast as memory is copied
  double latency_seconds = 0;  // between a copy's end and its being known
  int64_t fail_copy = 0;       // the number of the copy that fails, from 1; 0: none
  std::string identity = {};   // Device::identity
  bool gds = false;            // Device::OpenStorage
  int64_t fail_read = 0;       // by its number, from 1: the read of a file that fails, and goes on failing,
  int64_t damage_read = 0;     // and the one that brings other bytes than the file has; 0: none
  bool linked = false;         // to those of other ranks: exchanges are of its memory, over the host's comm
  // What is enqueued in the order of compute runs on streams (NewStream). For a Compute whose own work is on
  // them; a Compute that computes at once would free what is still to be read.
  bool late = false;
};

class TestDevice : public CpuDevice {
 public:
  explicit TestDevice(const TestDeviceOptions& options);
  // Finishes what was started.
  ~TestDevice() override;

  bool late() const { return options_.late; }
  // Of a late device: a stream, which lives as long as the device. From any thread.
  void* NewStream();
  // Runs `work` on the stream's thread, behind what was enqueued there. From any thread.
  void Enqueue(void* stream, std::function<void()> work);

  // From "capacity=64MiB,bandwidth=1e9,latency=1e-5,linked=1"; kInvalidArgument names what is wrong.
  static absl::StatusOr<std::shared_ptr<Device>> Parse(const std::string& given);

  std::string_view name() const override { return "test"; }
  std::string Describe() const override;
  std::string identity() const override { return options_.identity; }
  bool has_own_memory() const override { return true; }
  int64_t capacity_bytes() const override { return options_.capacity_bytes; }
  absl::StatusOr<std::byte*> AllocateArena(int64_t bytes) override;
  absl::Status LimitTensors(int64_t bytes) override;
  void CopyIn(void* to, const void* from, int64_t bytes, bool after_compute, Done done) override;
  void CopyOut(void* to, const void* from, int64_t bytes, Done done) override;
  void AfterCompute(Done done) override;
  absl::Status ComputeOn(void* stream, std::span<void* const> after) override;
  void Convert(kernels::DType from, const void* in, kernels::DType to, void* out, size_t n) override;
  void Accumulate(kernels::DType type, const void* in, float* sums, size_t n) override;
  void SquarePartials(kernels::DType type, const void* in, size_t n, double* partials) override;
  void Update(const OptimizerStep& step, const std::vector<kernels::UpdateArrays>& arrays) override;
  void Zero(void* memory, size_t bytes) override;
  Traffic traffic() const override { return {bytes_[0].load(), bytes_[1].load()}; }
  void CountCopied(const Traffic& copied) override {
    bytes_[0] += copied.h2d_bytes;
    bytes_[1] += copied.d2h_bytes;
  }
  absl::StatusOr<std::shared_ptr<aio::DeviceTransfers>> OpenStorage() override;
  std::string link() const override { return options_.linked ? "test" : ""; }
  absl::StatusOr<std::shared_ptr<Comm>> Connect(const std::shared_ptr<Comm>& host) override;

 private:
  class Storage;
  class Stream;
  struct Copy {
    void* to = nullptr;
    const void* from = nullptr;
    int64_t bytes = 0;
    Done done;
  };
  // One direction.
  struct Engine {
    std::mutex mutex;
    std::condition_variable there;
    std::deque<Copy> copies;
    bool stopping = false;
    std::thread thread;
  };
  void Start(int direction, Copy copy);
  void Work(int direction);
  // In the order of compute: at once, unless the device is late.
  void Compute(std::function<void()> work);

  const TestDeviceOptions options_;
  std::vector<std::byte> memory_;
  std::span<std::byte> arena_;                   // in memory_, from a page's beginning on
  std::array<std::atomic<int64_t>, 2> bytes_{};  // in, out
  std::atomic<int64_t> copies_{0};
  std::array<Engine, 2> engines_;
  std::shared_ptr<Storage> storage_;
  std::mutex streams_mutex_;
  std::vector<std::unique_ptr<Stream>> streams_;
  Stream* compute_ = nullptr;  // the stream of the order of compute; null: the device is not late
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_TEST_DEVICE_H_
