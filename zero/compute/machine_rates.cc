#include "zero/compute/machine_rates.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/cache.h"
#include "kernels/checksum.h"
#include "zero/compute/stopwatch.h"
#include "zero/compute/update.h"
#include "zero/memory/guarded.h"
#include "zero/memory/tensor_memory.h"

namespace penstock::zero {
namespace {

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

absl::StatusOr<CopyRates> MeasureCopyRates(Device& device) {
  constexpr int64_t kPiece = int64_t{4} << 20;  // about a tile's weights
  const int64_t bytes = std::clamp(device.capacity_bytes() / 4 / kPiece * kPiece, kPiece, 16 * kPiece);
  ASSIGN_OR_RETURN(const auto there, device.AllocateArena(bytes));
  // A whole page of its own: neighbours must not be pinned and let go with it.
  std::unique_ptr<std::byte, decltype(&std::free)> here(
      static_cast<std::byte*>(std::aligned_alloc(2 << 20, static_cast<size_t>(bytes))), &std::free);
  if (here == nullptr)
    return absl::ResourceExhaustedError(absl::StrCat(bytes, " bytes to measure copies with"));
  std::memset(here.get(), 0, static_cast<size_t>(bytes));
  RETURN_IF_ERROR(device.RegisterHost(here.get(), bytes));
  absl::Status failed;
  // Pieces one after the other, as the lanes have them in flight, for long enough that what begins and ends
  // the series does not count; the second series does.
  constexpr int64_t kSeries = int64_t{512} << 20;
  constexpr double kLongest = 0.05;  // seconds
  auto rate = [&](bool in) {
    double per_second = 0;
    for (int series = 0; series < 2; ++series) {
      int64_t moved = 0;
      const double begin = Seconds();
      while (moved == 0 || (moved < kSeries && Seconds() - begin < kLongest)) {
        std::vector<std::promise<absl::Status>> done(static_cast<size_t>(bytes / kPiece));
        for (size_t i = 0; i < done.size(); ++i) {
          std::byte* const host = here.get() + static_cast<int64_t>(i) * kPiece;
          std::byte* const far = there + static_cast<int64_t>(i) * kPiece;
          auto report = [&done, i](absl::Status status) { done[i].set_value(std::move(status)); };
          if (in) {
            device.CopyIn(far, host, kPiece, /*after_compute=*/false, report);
          } else {
            device.CopyOut(host, far, kPiece, report);
          }
        }
        for (std::promise<absl::Status>& each : done) failed.Update(each.get_future().get());
        moved += bytes;
      }
      per_second = static_cast<double>(moved) / std::max(Seconds() - begin, 1e-9);
    }
    return per_second;
  };
  CopyRates rates;
  rates.h2d_bytes_per_s = rate(true);
  rates.d2h_bytes_per_s = rate(false);
  device.UnregisterHost(here.get());
  RETURN_IF_ERROR(failed);
  return rates;
}

absl::StatusOr<double> MeasureUpdateRateThere(Device& device, const TileFormat& format,
                                              const OptimizerOptions& optimizer) {
  const tiering::Precision precision = format.precision();
  const int64_t unit = tiering::kElementAlignment;
  const int64_t of_unit = precision.TotalBytes(unit) + unit * precision.gradient_bytes;
  const int64_t elements = unit * std::clamp<int64_t>(device.capacity_bytes() / 4 / of_unit, 1, 8192);
  const int64_t bytes = precision.TotalBytes(elements) + elements * precision.gradient_bytes;
  ASSIGN_OR_RETURN(const auto arena, device.AllocateArena(bytes));
  TileMemory memory;
  memory.elements = elements;
  std::byte* place = arena;
  for (size_t s = 0; s < precision.segment_bytes.size(); ++s) {
    (s == 0 ? memory.weights : memory.state.emplace_back()) = place;
    place += tiering::AlignUp(precision.SegmentBytes(s, elements), tiering::kPage);
  }
  memory.gradient = place;
  FlatLayout layout;
  layout.elements = elements;
  layout.trained = {{.from = 0, .to = elements}};
  UpdateDecision decision;
  decision.groups = {MakeOptimizerStep(optimizer, {{.lr = 1e-3}}, 1, 1.0)};
  const std::vector<StepArrays> updates =
      UpdatesOf(format, {decision, layout}, /*seed=*/1, {0, elements}, memory);
  double best = 1e9;
  for (int repeat = 0; repeat < 3; ++repeat) {
    const double begin = Seconds();
    std::promise<absl::Status> done;
    absl::Status status = Guarded("update on the device", [&] {
      if (repeat == 0) device.Zero(arena, static_cast<size_t>(bytes));  // numbers, whatever was there
      for (const auto& [step, arrays] : updates) device.Update(*step, arrays);
    });
    RETURN_IF_ERROR(status);
    device.AfterCompute([&done](absl::Status computed) { done.set_value(std::move(computed)); });
    status = done.get_future().get();
    RETURN_IF_ERROR(status);
    best = std::min(best, Seconds() - begin);
  }
  return static_cast<double>(elements) / std::max(best, 1e-9);
}

absl::StatusOr<double> MeasureUpdateRate(const TileFormat& format, const OptimizerOptions& optimizer,
                                         int64_t memory_bytes, int compute_threads) {
  const tiering::Precision precision = format.precision();
  const int64_t unit = tiering::kElementAlignment;
  const int64_t of_unit = precision.TotalBytes(unit) + unit * precision.gradient_bytes;
  int64_t elements = int64_t{1} << 19;
  if (memory_bytes > 0) elements = std::clamp(memory_bytes / 2 / of_unit * unit, unit, elements);
  FlatLayout layout;
  layout.elements = elements;
  layout.trained = {{.from = 0, .to = elements}};
  layout.parameters = {{.name = "measured", .sizes = {elements}, .elements = elements}};
  TileMemory memory;
  memory.elements = elements;
  std::vector<HostBuffer> held;
  absl::Status refused;
  auto take = [&](int64_t bytes) -> void* {
    absl::StatusOr<HostBuffer> buffer = HostBuffer::Of(bytes, "memory to measure updates with");
    refused.Update(buffer.status());
    if (!buffer.ok()) return nullptr;
    held.push_back(*std::move(buffer));
    std::memset(held.back().data(), 0, static_cast<size_t>(bytes));
    return held.back().data();
  };
  memory.weights = take(precision.SegmentBytes(0, elements));
  for (size_t s = 1; s < precision.segment_bytes.size(); ++s)
    memory.state.push_back(take(precision.SegmentBytes(s, elements)));
  memory.gradient = take(elements * precision.gradient_bytes);
  RETURN_IF_ERROR(refused);
  UpdateDecision decision;
  decision.groups = {MakeOptimizerStep(optimizer, {{.lr = 1e-3}}, 1, 1.0)};
  double best = 1e9;
  for (int repeat = 0; repeat < 4; ++repeat) {
    for (const HostBuffer& each : held)
      kernels::EvictFromCaches(each.data(), static_cast<size_t>(each.bytes()));
    const Stopwatch watch(compute_threads);
    // As an update on the drive: what was read is checked, what is written is checksummed.
    for (int pass = 0; pass < 2; ++pass) {
      uint64_t sum = 0;
      for (const HostBuffer& each : held)
        sum += kernels::Checksum(each.data(), static_cast<size_t>(each.bytes()));
      if (sum == 1) best = 0;  // the sums must not be optimised away
      if (pass == 0) UpdateTile(format, {decision, layout}, /*seed=*/1, {0, elements}, memory);
    }
    best = std::min(best, watch.Read().seconds);
  }
  return static_cast<double>(elements) / std::max(best, 1e-9);
}

double SecondsOfCompute(const std::function<void()>& compute, int threads, bool* disturbed) {
  const Stopwatch watch(threads);
  int calls = 0;
  for (; calls < 1 || watch.Passed() < 0.25; ++calls) compute();
  const double seconds = watch.Passed() / calls;
  if (disturbed != nullptr) *disturbed = watch.Read().disturbed;
  return seconds;
}

}  // namespace penstock::zero
