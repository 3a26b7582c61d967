// `penstock verify`: reads a state directory or checkpoint back and checks every checksum.
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/directory.h"
#include "base/io_error.h"
#include "base/json.h"
#include "base/sha256.h"
#include "base/small_file.h"
#include "base/status_macros.h"
#include "swap/checkpoint.h"
#include "swap/verify.h"
#include "tools/base/cli.h"
#include "tools/base/size.h"
#include "tools/base/verbs.h"
#include "tools/state/base_files.h"
#include "tools/state/state_reader.h"

namespace penstock::tools {
namespace {

constexpr const char* kVerifyName = "penstock verify";
constexpr uint64_t kMemoryBytes = uint64_t{32} << 20;

struct VerifyFlags {
  std::vector<std::string> dirs;
  std::string model;
  bool json = false;
  bool quiet = false;
};

// Of a run whose adapters go to weights that it keeps nothing of.
struct Base {
  nlohmann::json record;  // null: there is none
  absl::Status status;    // what is wrong with it
  nlohmann::ordered_json Json() const {
    if (record.is_null()) return nullptr;
    nlohmann::ordered_json json = {{"path", PathOfBase(record)},
                                   {"bytes", BaseBytes(record)},
                                   {"whole", status.ok()},
                                   {"error", nullptr}};
    if (!status.ok()) json["error"] = std::string(status.message());
    return json;
  }
};

// Its files are read, whatever their times say.
Base VerifyBase(const nlohmann::json& payload, const VerifyFlags& flags) {
  Base base;
  const nlohmann::json run = payload.is_object() ? payload.value("run", nlohmann::json()) : nlohmann::json();
  if (!run.is_object() || !run.contains(kBaseKey)) {
    if (!flags.model.empty()) base.status = NoBase(flags.model);
    return base;
  }
  base.record = run[kBaseKey];
  absl::StatusOr<nlohmann::json> now = CompareBase(base.record, flags.model, BaseCheck::kBytes, flags.quiet);
  if (now.ok()) {
    base.record = *std::move(now);
  } else {
    base.status = absl::DataLossError(std::string(now.status().message()));
  }
  return base;
}

// Of a run of the Python package: what names its parameters lies beside the store, and ends with a digest of
// its own (python/penstock/_engine/_parameters.py).
absl::Status VerifyDescriptionAt(const std::string& path) {
  constexpr uint64_t kMostBytes = uint64_t{64} << 20;
  constexpr uint64_t kMostValues = 1'200'000;
  constexpr std::string_view kDigest = ", \"sha256\": \"", kEnd = "\"}";
  constexpr size_t kDigits = 64;
  const auto damaged = [&](const std::string& why) {
    return absl::DataLossError(absl::StrCat(
        path, ": ", why,
        ": parameters are not found by their names; the checkpoint itself can be loaded and saved "
        "again"));
  };
  absl::StatusOr<std::string> read = ReadSmallFile(path, kMostBytes);
  if (absl::IsNotFound(read.status())) return absl::OkStatus();
  if (!read.ok()) return absl::DataLossError(std::string(read.status().message()));
  absl::StripTrailingAsciiWhitespace(&*read);
  const std::string_view text = *read;
  const size_t at = text.rfind(kDigest);
  if (at != std::string_view::npos) {
    const std::string_view rest = text.substr(at + kDigest.size());
    const bool matches = rest.size() == kDigits + kEnd.size() && rest.ends_with(kEnd) &&
                         Sha256(read->substr(0, at) + "}") == rest.substr(0, kDigits);
    return matches ? absl::OkStatus() : damaged("was changed after it was written");
  }
  // Older ones have none.
  const absl::StatusOr<nlohmann::json> described = ParseJsonObject(text, "", {.max_values = kMostValues});
  if (!described.ok()) return damaged(std::string(described.status().message()));
  for (const auto& [key, unused] : described->items()) {
    if (key != "model" && key != "parameters" && key != "tied" && key != "buffers" && key != "large_buffers")
      return damaged(absl::StrCat("has the key ", OneLine(key), ", which none has"));
  }
  return absl::OkStatus();
}

absl::Status VerifyDescription(const FoundState& state) {
  std::vector<std::string> directories = state.parts.front();
  if (state.parts.size() > 1) directories.push_back(DirectoryOf(directories.front()));
  for (const std::string& directory : directories)
    RETURN_IF_ERROR(VerifyDescriptionAt(absl::StrCat(directory, "/", swap::kDescriptionFile)));
  return absl::OkStatus();
}

nlohmann::ordered_json Json(uint64_t step, size_t ranks, const swap::VerifyReport& report, const Base& base,
                            const absl::Status& description) {
  nlohmann::ordered_json damaged = nlohmann::ordered_json::array();
  for (const swap::DamagedRange& range : report.damaged) {
    damaged.push_back({{"path", range.path},
                       {"offset", range.offset},
                       {"bytes", range.bytes},
                       {"tile", range.tile},
                       {"segment", range.segment},
                       {"version", range.version},
                       {"reason", range.reason}});
  }
  std::vector<std::string> notes = report.notes;
  if (!description.ok()) notes.emplace_back(description.message());
  return {{"whole", report.whole() && base.status.ok() && description.ok()},
          {"step", step},
          {"ranks", ranks},
          {"tiles", report.tiles},
          {"bytes", report.bytes},
          {"seconds", report.seconds},
          {"damaged", std::move(damaged)},
          {"metadata_damage", notes},
          {"base", base.Json()}};
}

absl::Status Verify(const VerifyFlags& flags, std::ostream& out, std::ostream& err) {
  ASSIGN_OR_RETURN(FoundState state, FindState(flags.dirs));
  ASSIGN_OR_RETURN(std::unique_ptr<StateReader> reader,
                   StateReader::Open(state, kMemoryBytes, [&](const std::string& line) {
                     if (!flags.quiet) err << line << "\n" << std::flush;
                   }));
  const uint64_t step = reader->parts().front()->committed_step();
  const size_t ranks = state.parts.size();
  swap::VerifyReport report;
  {
    ByteProgress progress("verifying", flags.quiet);
    for (swap::Store* part : reader->parts()) {
      // Parts are as good as equal.
      ASSIGN_OR_RETURN(const swap::VerifyReport of_part,
                       swap::VerifyAll(*part, reader->memory(), [&](uint64_t done, uint64_t total) {
                         progress.Update(report.bytes + done, total * ranks);
                         return true;
                       }));
      report.tiles += of_part.tiles;
      report.bytes += of_part.bytes;
      report.seconds += of_part.seconds;
      report.damaged.insert(report.damaged.end(), of_part.damaged.begin(), of_part.damaged.end());
      report.notes.insert(report.notes.end(), of_part.notes.begin(), of_part.notes.end());
    }
  }
  const Base base = VerifyBase(ParseOrNull(state.inspections.front().record.payload), flags);
  if (absl::IsInvalidArgument(base.status)) return base.status;
  const absl::Status description = VerifyDescription(state);
  if (flags.json) {
    out << Json(step, ranks, report, base, description).dump(2) << "\n" << std::flush;
  } else {
    for (const swap::DamagedRange& range : report.damaged) out << "damaged: " << range.Text() << "\n";
    for (const std::string& note : report.notes) out << "damaged: " << note << "\n";
    if (!description.ok()) out << "damaged: " << description.message() << "\n";
    if (!flags.quiet) {
      const double rate = static_cast<double>(report.bytes) / std::max(report.seconds, 1e-9);
      out << absl::StrFormat("step %u: %u tiles, %s read and checked in %.1f s, %s\n", step, report.tiles,
                             FormatBytes(static_cast<int64_t>(report.bytes)), report.seconds,
                             FormatBandwidth(rate));
      if (!base.record.is_null() && base.status.ok()) {
        out << absl::StrFormat("the weights that its adapters go to: %s in %s, read and checked\n",
                               FormatBytes(BaseBytes(base.record)), PathOfBase(base.record));
      }
      if (report.whole() && base.status.ok() && description.ok()) out << "whole: every checksum matches\n";
    }
    out.flush();
  }
  if (report.whole()) return base.status.ok() ? description : base.status;
  if (report.damaged.empty()) {
    return absl::DataLossError(absl::StrCat(
        state.name(), ": ", report.notes.size(),
        " copies of superblock or commit record are damaged; their twins are whole, so the run still "
        "resumes: copy it to another drive, or keep a checkpoint"));
  }
  return absl::DataLossError(absl::StrCat(state.name(), ": ", report.damaged.size(), " damaged ranges in ",
                                          report.tiles, " tiles: go back to a checkpoint that is whole"));
}

}  // namespace

int RunVerify(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  CLI::App app("Reads a state directory or checkpoint back and checks every checksum; exit 1 if not whole",
               kVerifyName);
  VerifyFlags flags;
  app.add_option("DIR", flags.dirs, "State directory or checkpoint; all directories of a striped run")
      ->required();
  app.add_option(
      "--model", flags.model,
      "Directory of the frozen weights of a run with --lora-rank, if it has moved; they are checked too "
      "[where the run last read them]");
  app.add_flag("--json", flags.json, "Print JSON");
  app.add_flag("--quiet", flags.quiet, "No progress, no summary: damaged ranges only");
  if (const auto code = ParseFlags(app, argc, argv, out, err)) return *code;
  const absl::Status status = Verify(flags, out, err);
  return status.ok() ? kExitOk : Fail(kVerifyName, status, err);
}

}  // namespace penstock::tools
