#include "tiering/advice/estimate.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tiering/plan/byte_size.h"

namespace penstock::tiering {
namespace {

constexpr double kGiB = 0x1p30;  // DeepSpeed's "GB"

// Python's int(a / b) and int(x * factor): in doubles, then truncated.
int64_t Truncated(double value) { return static_cast<int64_t>(value); }

std::string Header(const EstimateInput& in, bool layer) {
  const auto millions = [](int64_t n) { return n / 1'000'000; };
  std::string text = absl::StrFormat(
      "Estimated memory needed for params, optim states and gradients for a:\n"
      "HW: Setup with %d node%s, %d GPU%s per node.\n"
      "SW: Model with %dM total params",
      in.nodes, in.nodes > 1 ? "s" : "", in.gpus_per_node, in.gpus_per_node > 1 ? "s" : "",
      millions(in.params));
  if (layer) absl::StrAppend(&text, ", ", millions(in.largest_layer_params), "M largest layer params");
  return text + ".\n  per CPU  |  per GPU |   Options\n";
}

std::string Rows(const std::vector<MemoryRow>& rows) {
  std::string text;
  for (const MemoryRow& row : rows) {
    absl::StrAppendFormat(&text, " %7.2fGB | %6.2fGB | %s\n", static_cast<double>(row.cpu_bytes) / kGiB,
                          static_cast<double>(row.gpu_bytes) / kGiB, row.options);
  }
  return text;
}

double StateBytesPerParameter(const Precision& precision) {
  return static_cast<double>(precision.UnpaddedBytes(kScaleBlock)) / kScaleBlock;
}

// Fills in what follows from bytes on and off the drives of one node.
void Finish(TierRow& row, int64_t node_params, const DriveInput& in) {
  const auto drives = static_cast<double>(in.drives);
  const auto read = static_cast<double>(row.read_bytes_per_step);
  const auto written = static_cast<double>(row.write_bytes_per_step);
  row.bytes_per_param_per_step = (read + written) / static_cast<double>(node_params);
  row.io_seconds_per_step = read / (drives * in.read_bytes_per_s) + written / (drives * in.write_bytes_per_s);
  row.step_seconds = std::max(in.step_seconds, row.io_seconds_per_step);
  row.steps_to_rated_writes =
      written > 0 ? drives * in.rated_bytes_written / written : std::numeric_limits<double>::infinity();
  row.days_to_rated_writes = row.steps_to_rated_writes * row.step_seconds / 86400;
  // Nothing written in no time: 0 x infinity.
  if (!(written > 0)) row.days_to_rated_writes = std::numeric_limits<double>::infinity();
}

}  // namespace

absl::Status CheckEstimate(const EstimateInput& in) {
  // 10^15 parameters on 10^6 ranks is beyond anybody's plans, and leaves int64 a factor of 10 for bytes.
  if (in.params < 1 || in.params > 1'000'000'000'000'000) {
    return absl::InvalidArgumentError(absl::StrCat("params: ", in.params, " is not between 1 and 1e15"));
  }
  if (in.largest_layer_params < 0 || in.largest_layer_params > in.params) {
    return absl::InvalidArgumentError(absl::StrCat("largest layer: ", in.largest_layer_params,
                                                   " parameters, but the model has ", in.params));
  }
  if (in.frozen_params < 0 || in.frozen_params >= in.params)
    return absl::InvalidArgumentError("frozen parameters: not fewer than there are");
  for (const int64_t count : {in.gpus_per_node, in.nodes}) {
    if (count < 1 || count > 1'000'000) {
      return absl::InvalidArgumentError(
          absl::StrCat("nodes and GPUs per node: ", count, " is not between 1 and 1e6"));
    }
  }
  if (!(in.buffer_factor >= 1 && in.buffer_factor <= 100)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("buffer factor: %g is not between 1 and 100", in.buffer_factor));
  }
  const double host = static_cast<double>(in.params) * 4 * static_cast<double>(in.gpus_per_node * in.nodes);
  if (host * in.buffer_factor >= 0x1p62) {
    return absl::InvalidArgumentError("params x GPUs: beyond what fits in 62 bits of bytes; give fewer");
  }
  return absl::OkStatus();
}

std::vector<MemoryRow> EstimateZero2(const EstimateInput& in) {
  const int64_t p = in.params;
  const auto params = static_cast<double>(p);
  const int64_t gpus = in.nodes * in.gpus_per_node;
  const double offloaded = params * static_cast<double>(std::max<int64_t>(4 * gpus, 16)) * in.buffer_factor;
  const double start_up = params * 4 * static_cast<double>(in.gpus_per_node) * in.buffer_factor;
  return {{"offload_optimizer=cpu ", Truncated(offloaded), 2 * p},
          {"offload_optimizer=none", Truncated(start_up),
           4 * p + Truncated(16 * params / static_cast<double>(gpus))}};
}

std::vector<MemoryRow> EstimateZero3(const EstimateInput& in) {
  const auto params = static_cast<double>(in.params);
  const auto gpus = static_cast<double>(in.nodes * in.gpus_per_node);
  const auto per_node = static_cast<double>(in.gpus_per_node);
  const double share = 1.0 / static_cast<double>(in.nodes);
  const int64_t layer = 4 * in.largest_layer_params;
  std::vector<MemoryRow> rows;
  const auto add = [&](std::string_view devices, int64_t gpu, double with_init, double without_init) {
    const std::string options(devices);
    rows.push_back({options + ", zero_init=1", Truncated(with_init * in.buffer_factor), gpu});
    rows.push_back({options + ", zero_init=0", Truncated(without_init * in.buffer_factor), gpu});
  };
  add("offload_param=cpu , offload_optimizer=cpu ", layer, params * 18 * share,
      params * std::max(4 * per_node, 18 * share));
  add("offload_param=none, offload_optimizer=cpu ", layer + Truncated(2 * params / gpus), params * 16 * share,
      params * std::max(4 * per_node, 16 * share));
  add("offload_param=none, offload_optimizer=none", layer + Truncated(18 * params / gpus),
      static_cast<double>(in.largest_layer_params) * 4 * per_node, params * 4 * per_node);
  return rows;
}

std::string FormatZero2(const EstimateInput& in) { return Header(in, false) + Rows(EstimateZero2(in)); }
std::string FormatZero3(const EstimateInput& in) { return Header(in, true) + Rows(EstimateZero3(in)); }

std::vector<TierRow> EstimateTiers(const EstimateInput& in, const DriveInput& drives) {
  const Precision& precision = drives.precision;
  const int64_t ranks = in.nodes * in.gpus_per_node;
  const int64_t per_rank = (in.params + ranks - 1) / ranks;
  const int64_t per_node = per_rank * in.gpus_per_node;
  const int64_t layer = in.largest_layer_params;
  const int64_t block = in.largest_block_params > 0 ? in.largest_block_params : layer;
  // One block computes while the next arrives; the gradient is one block's.
  const int64_t device = (2 * precision.weight_bytes() + precision.gradient_bytes) * block;
  // Two blocks' cuts on their way: one read ahead, one being updated or written.
  const int64_t streaming = 2 * precision.UnpaddedBytes((block + ranks - 1) / ranks) * in.gpus_per_node;
  const int64_t trained = per_rank - in.frozen_params;
  const int64_t state = precision.UnpaddedBytes(trained), gradient = precision.gradient_bytes * trained;
  const int64_t frozen = precision.weight_bytes() * in.frozen_params;

  std::vector<TierRow> rows(in.frozen_params > 0 ? 4 : 5);
  rows[0].options = "offload=none";
  rows[0].device_bytes = state + gradient + frozen + (ranks > 1 ? device : 0);
  rows[1].options = "offload=cpu";
  rows[1].device_bytes = device;
  rows[1].host_bytes = (state + gradient + frozen) * in.gpus_per_node;
  rows[2].options = "offload=nvme, order=next_forward";
  rows[3].options = "offload=nvme, order=in_backward";
  for (TierRow* row : {&rows[2], &rows[3]}) {
    row->device_bytes = device;
    row->host_bytes = streaming + (row == &rows[2] ? gradient * in.gpus_per_node : 0);
    row->nvme_bytes = 2 * state * in.gpus_per_node;
    row->read_bytes_per_step = state * in.gpus_per_node + precision.weight_bytes() * per_node + frozen;
    row->write_bytes_per_step = state * in.gpus_per_node;
  }
  if (in.frozen_params == 0) {
    rows[4].options = "DeepSpeed 0.9, all on NVMe";
    rows[4].device_bytes = 4 * layer;
    rows[4].host_bytes = 2 * per_node;  // 16-bit gradients, which it also writes to NVMe as fp32
    rows[4].nvme_bytes = 18 * per_node;
    rows[4].read_bytes_per_step = 20 * per_node;
    rows[4].write_bytes_per_step = 18 * per_node;
  }
  for (TierRow& row : rows) Finish(row, per_node, drives);
  return rows;
}

std::string FormatTiers(const EstimateInput& in, const DriveInput& drives) {
  std::string text = absl::StrFormat(
      "Penstock, %s, %.1f bytes of state a parameter, per node: %d drive%s of %s read, %s write, rated %.0f "
      "TB written\n"
      "  per device |       host |       NVMe | moved/step | B/param |  I/O s/step | days to rating | "
      "Options\n",
      drives.precision.name, StateBytesPerParameter(drives.precision), drives.drives,
      drives.drives > 1 ? "s" : "", FormatBandwidth(drives.read_bytes_per_s),
      FormatBandwidth(drives.write_bytes_per_s), drives.rated_bytes_written / 1e12);
  for (const TierRow& row : EstimateTiers(in, drives)) {
    const auto until = [](int decimals, double value) {
      return std::isfinite(value) ? absl::StrFormat("%.*f", decimals, value) : std::string("-");
    };
    absl::StrAppendFormat(
        &text, " %11s | %10s | %10s | %10s | %7.1f | %11.2f | %15s | %10s | %s\n",
        FormatBytes(row.device_bytes), FormatBytes(row.host_bytes), FormatBytes(row.nvme_bytes),
        FormatBytes(row.read_bytes_per_step + row.write_bytes_per_step), row.bytes_per_param_per_step,
        row.io_seconds_per_step, until(0, row.steps_to_rated_writes), until(1, row.days_to_rated_writes),
        row.options);
  }
  return text;
}

nlohmann::json EstimateJson(const EstimateInput& in, const DriveInput& drives) {
  const auto memory = [](const std::vector<MemoryRow>& rows) {
    nlohmann::json list = nlohmann::json::array();
    for (const MemoryRow& row : rows) {
      list.push_back({{"options", row.options}, {"cpu_bytes", row.cpu_bytes}, {"gpu_bytes", row.gpu_bytes}});
    }
    return list;
  };
  nlohmann::json tiers = nlohmann::json::array();
  for (const TierRow& row : EstimateTiers(in, drives)) {
    tiers.push_back({{"options", row.options},
                     {"device_bytes", row.device_bytes},
                     {"host_bytes", row.host_bytes},
                     {"nvme_bytes", row.nvme_bytes},
                     {"read_bytes_per_step", row.read_bytes_per_step},
                     {"write_bytes_per_step", row.write_bytes_per_step},
                     {"nvme_bytes_per_param_per_step", row.bytes_per_param_per_step},
                     {"io_seconds_per_step", row.io_seconds_per_step},
                     {"step_seconds", row.step_seconds},
                     {"steps_to_rated_writes", std::isfinite(row.steps_to_rated_writes)
                                                   ? nlohmann::json(row.steps_to_rated_writes)
                                                   : nlohmann::json(nullptr)},
                     {"days_to_rated_writes", std::isfinite(row.days_to_rated_writes)
                                                  ? nlohmann::json(row.days_to_rated_writes)
                                                  : nlohmann::json(nullptr)}});
  }
  return {{"input",
           {{"params", in.params},
            {"largest_layer_params", in.largest_layer_params},
            {"largest_block_params",
             in.largest_block_params > 0 ? in.largest_block_params : in.largest_layer_params},
            {"frozen_params", in.frozen_params},
            {"gpus_per_node", in.gpus_per_node},
            {"nodes", in.nodes},
            {"buffer_factor", in.buffer_factor},
            {"dtype", drives.precision.name},
            {"state_bytes_per_param", StateBytesPerParameter(drives.precision)},
            {"drives_per_node", drives.drives},
            {"read_bytes_per_s", drives.read_bytes_per_s},
            {"write_bytes_per_s", drives.write_bytes_per_s},
            {"rated_bytes_written", drives.rated_bytes_written},
            {"compute_seconds_per_step", drives.step_seconds}}},
          {"zero2", memory(EstimateZero2(in))},
          {"zero3", memory(EstimateZero3(in))},
          {"penstock", tiers}};
}

}  // namespace penstock::tiering
