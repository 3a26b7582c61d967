// `penstock inspect`: what a state directory or checkpoint says about itself.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "swap/inspect.h"
#include "tiering/plan/model_graph.h"
#include "tools/base/cli.h"
#include "tools/base/size.h"
#include "tools/base/verbs.h"
#include "tools/state/inspect_weights.h"
#include "tools/state/state_reader.h"

namespace penstock::tools {
namespace {

constexpr const char* kInspectName = "penstock inspect";

using OrderedJson = nlohmann::ordered_json;

std::string Bytes(uint64_t bytes) { return FormatBytes(static_cast<int64_t>(bytes)); }

// The parts of a run's record that the engine wrote; null where another program made the store.
struct RecordedRun {
  nlohmann::json identity, payload;

  explicit RecordedRun(const swap::Inspection& inspection)
      : identity(ParseOrNull(inspection.shape.identity)), payload(ParseOrNull(inspection.record.payload)) {}
  nlohmann::json Of(const char* key) const { return identity.is_object() ? identity.value(key, null) : null; }
  nlohmann::json Committed(const char* key) const {
    return payload.is_object() ? payload.value(key, null) : null;
  }

 private:
  const nlohmann::json null;
};

uint64_t BytesPerElement(const RecordedRun& recorded) { return recorded.Of("dtype") == "fp32" ? 4 : 2; }

// A run of one rank has one of them.
struct Part {
  swap::Inspection inspection;
  swap::Geometry geometry;
};

OrderedJson TilesJson(const Part& part, size_t rank, size_t ranks) {
  const auto& [inspection, geometry] = part;
  const RecordedRun recorded(inspection);
  const nlohmann::json blocks = recorded.Of("block_elements");
  size_t block = 0;
  uint64_t element = 0;  // within its block, or the rank's part of it
  OrderedJson tiles = OrderedJson::array();
  for (uint32_t t = 0; t < geometry.tiles(); ++t) {
    const swap::TileVersion& live = inspection.record.tiles[t];
    OrderedJson segments = OrderedJson::array();
    for (uint32_t s = 0; s < geometry.segments(t); ++s) {
      segments.push_back(
          {{"bytes", geometry.segment_bytes(t, s)},
           {"offset", geometry.segment_offset(t, live.slot, s)},
           {"checksum",
            absl::StrFormat("%016x", inspection.record.checksums[geometry.first_segment(t) + s])}});
    }
    OrderedJson& tile = tiles.emplace_back(OrderedJson{{"tile", t},
                                                       {"path", inspection.paths[geometry.directory(t)]},
                                                       {"version", live.version},
                                                       {"slot", live.slot},
                                                       {"segments", std::move(segments)}});
    if (!blocks.is_array() || block >= blocks.size() || !blocks[block].is_number_unsigned()) continue;
    const uint64_t elements = geometry.segment_bytes(t, 0) / BytesPerElement(recorded);
    const auto of_rank =
        static_cast<uint64_t>(tiering::ShardElements(blocks[block].get<int64_t>(), static_cast<int>(ranks)));
    if (ranks > 1) tile["rank"] = rank;
    tile["block"] = block;
    tile["first_element"] = rank * of_rank + element;
    tile["elements"] = elements;
    element += elements;
    if (element < of_rank) continue;
    ++block;
    element = 0;
  }
  return tiles;
}

// What all parts have of something.
template <typename Of>
auto Sum(const std::vector<Part>& parts, Of&& of) {
  decltype(of(parts.front())) sum = 0;
  for (const Part& part : parts) sum += of(part);
  return sum;
}

bool InUse(const std::vector<Part>& parts) {
  return std::any_of(parts.begin(), parts.end(), [](const Part& part) { return part.inspection.in_use; });
}

uint64_t FileBytes(const Part& part) {
  const std::vector<uint64_t>& bytes = part.inspection.file_bytes;
  return std::accumulate(bytes.begin(), bytes.end(), uint64_t{0});
}
uint64_t StateBytes(const Part& part) { return part.inspection.state_bytes; }

OrderedJson ToJson(const std::vector<Part>& parts) {
  const swap::Inspection& inspection = parts.front().inspection;
  const RecordedRun recorded(inspection);
  OrderedJson files = OrderedJson::array(), tiles = OrderedJson::array(), damage = OrderedJson::array();
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    const swap::Inspection& part = parts[rank].inspection;
    for (size_t d = 0; d < part.paths.size(); ++d) {
      files.push_back({{"path", part.paths[d]},
                       {"bytes", part.file_bytes[d]},
                       {"allocated_bytes", part.allocated_bytes[d]}});
    }
    for (OrderedJson& tile : TilesJson(parts[rank], rank, parts.size())) tiles.push_back(std::move(tile));
    for (const std::string& line : part.damage) damage.push_back(line);
  }
  return {{"uuid", swap::UuidText(inspection.shape.uuid)},
          {"step", inspection.record.step},
          {"updates", inspection.record.updates},
          {"commits", inspection.record.sequence},
          {"ranks", parts.size()},
          {"in_use", InUse(parts)},
          {"overwriting", inspection.record.overwriting},
          {"model", recorded.Of("model")},
          {"dtype", recorded.Of("dtype")},
          {"optimizer", recorded.Of("optimizer")},
          {"optimizer_states", recorded.Of("optimizer_states")},
          {"seed", recorded.Of("seed")},
          {"block_elements", recorded.Of("block_elements")},
          {"versions", inspection.shape.slots},
          {"state_bytes", Sum(parts, StateBytes)},
          {"disk_bytes", Sum(parts, FileBytes)},
          {"run", recorded.Committed("run")},
          {"schedule", recorded.Committed("schedule")},
          {"last_step", recorded.Committed("step")},
          {"files", std::move(files)},
          {"damage", std::move(damage)},
          {"tiles", std::move(tiles)}};
}

std::string Plain(const nlohmann::json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

std::string ModelLine(const nlohmann::json& model) {
  if (!model.is_object()) return Plain(model);
  std::string line = model.contains("architecture") ? Plain(model["architecture"]) : "";
  for (const auto& [key, value] : model.items()) {
    if (key != "architecture") absl::StrAppend(&line, line.empty() ? "" : "  ", key, " ", Plain(value));
  }
  return line;
}

std::string Text(const std::vector<Part>& parts) {
  const swap::Inspection& inspection = parts.front().inspection;
  const RecordedRun recorded(inspection);
  const swap::Record& record = inspection.record;
  std::string text = absl::StrCat("run       ", swap::UuidText(inspection.shape.uuid),
                                  InUse(parts) ? ", in use by a running process" : "", "\n");
  if (parts.size() > 1) absl::StrAppend(&text, "ranks     ", parts.size(), ", each with its part\n");
  absl::StrAppend(&text, "step      ", record.step, " (", record.updates, " updates, ", record.sequence,
                  " commits)\n");
  if (!recorded.Of("model").is_null())
    absl::StrAppend(&text, "model     ", ModelLine(recorded.Of("model")), "\n");
  if (!recorded.Of("dtype").is_null())
    absl::StrAppend(&text, "dtype     ", Plain(recorded.Of("dtype")), "  seed ", Plain(recorded.Of("seed")),
                    "\n");
  if (!recorded.Of("optimizer").is_null()) {
    absl::StrAppend(&text, "optimizer ", Plain(recorded.Of("optimizer")), ", states ",
                    Plain(recorded.Of("optimizer_states")), "\n");
  }
  const auto [least, most] = std::minmax_element(
      record.tiles.begin(), record.tiles.end(),
      [](const swap::TileVersion& a, const swap::TileVersion& b) { return a.version < b.version; });
  uint64_t largest = 0;
  for (const Part& part : parts) largest = std::max(largest, part.geometry.largest_slot_bytes());
  absl::StrAppend(&text, "state     ", Bytes(Sum(parts, StateBytes)), " in ",
                  Sum(parts, [](const Part& part) { return uint64_t{part.geometry.tiles()}; }),
                  " tiles of at most ", Bytes(largest), ", ",
                  Sum(parts, [](const Part& part) { return uint64_t{part.geometry.total_segments()}; }),
                  " checksums (XXH3)\n");
  if (!record.tiles.empty()) {
    absl::StrAppend(&text, "versions  ", inspection.shape.slots, " kept of each tile; live ", least->version,
                    least->version == most->version ? "" : absl::StrCat(" to ", most->version),
                    record.overwriting ? "; being overwritten: of no use until the next commit" : "", "\n");
  }
  for (const Part& part : parts) {
    const swap::Inspection& of = part.inspection;
    for (size_t d = 0; d < of.paths.size(); ++d) {
      absl::StrAppend(&text, "file      ", of.paths[d], "  ", Bytes(of.file_bytes[d]), " (",
                      Bytes(of.allocated_bytes[d]), " on disk)\n");
    }
  }
  const nlohmann::json last = recorded.Committed("step");
  if (last.is_object()) {
    absl::StrAppend(&text, "last step loss ", Plain(last.value("loss", nlohmann::json())), "  grad_norm ",
                    Plain(last.value("grad_norm", nlohmann::json())), "  lr ",
                    Plain(last.value("lr", nlohmann::json())), "\n");
  }
  for (const Part& part : parts) {
    for (const std::string& line : part.inspection.damage) absl::StrAppend(&text, "healed    ", line, "\n");
  }
  return text;
}

absl::Status Inspect(const std::vector<std::string>& flags, bool json, std::ostream& out) {
  absl::StatusOr<FoundState> found = FindState(flags);
  if (absl::IsNotFound(found.status()) && flags.size() == 1) {
    ASSIGN_OR_RETURN(const bool weights, HoldsWeights(flags.front()));
    if (weights) return InspectWeights(flags.front(), json, out);
  }
  RETURN_IF_ERROR(found.status());
  FoundState& state = *found;
  std::vector<Part> parts;
  for (swap::Inspection& inspection : state.inspections) {
    ASSIGN_OR_RETURN(swap::Geometry geometry, swap::Geometry::Make(inspection.shape));
    parts.push_back({std::move(inspection), std::move(geometry)});
  }
  if (json) {
    out << ToJson(parts).dump(2, ' ', false, OrderedJson::error_handler_t::replace) << "\n" << std::flush;
  } else {
    out << Text(parts) << std::flush;
  }
  return absl::OkStatus();
}

}  // namespace

int RunInspect(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  CLI::App app(
      "Shows a state directory or checkpoint: model, step, tiles, versions, bytes, checksums; or a directory "
      "of weights: how they are packed, of what, types and bytes",
      kInspectName);
  std::vector<std::string> dirs;
  bool json = false;
  app.add_option("DIR", dirs, "State directory or checkpoint, all directories of a striped run; or weights")
      ->required();
  app.add_flag("--json", json, "Print JSON, with every tile and checksum");
  if (const auto code = ParseFlags(app, argc, argv, out, err)) return *code;
  const absl::Status status = Inspect(dirs, json, out);
  return status.ok() ? kExitOk : Fail(kInspectName, status, err);
}

}  // namespace penstock::tools
