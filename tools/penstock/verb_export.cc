// `penstock export`: weights out of a state directory or checkpoint, for everybody else.
#include <sys/stat.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/directory.h"
#include "base/status_macros.h"
#include "models/deepspeed/checkpoint.h"
#include "models/families/family.h"
#include "models/families/lora.h"
#include "models/weights/weight_export.h"
#include "swap/format.h"
#include "swap/inspect.h"
#include "tools/base/cli.h"
#include "tools/base/flag_check.h"
#include "tools/base/size.h"
#include "tools/base/verbs.h"
#include "tools/generate/model_files.h"
#include "tools/penstock/lora_base.h"
#include "tools/state/export_deepspeed.h"
#include "tools/state/state_reader.h"
#include "zero/compute/tile_format.h"
#include "zero/config/json_field.h"

namespace penstock::tools {
namespace {

constexpr uint64_t kDefaultExportMemoryBytes = uint64_t{256} << 20;

struct ExportFlags {
  std::vector<std::string> dirs;
  std::string out;
  std::string dtype = "fp32";
  std::optional<std::string> host_memory;
  std::optional<std::string> max_shard;
  std::string model, tag;
  bool merge = false;
  bool overwrite = false;
  bool quiet = false;
};

nlohmann::ordered_json PublishedConfig(const models::LanguageModel& model, const std::string& dtype) {
  nlohmann::ordered_json json = model.ToPublished();
  json["torch_dtype"] = dtype == "fp32" ? "float32" : "bfloat16";
  return json;
}

absl::StatusOr<std::optional<uint64_t>> SizeOf(const char* flag, const std::optional<std::string>& text) {
  if (!text.has_value()) return std::nullopt;
  const absl::StatusOr<int64_t> bytes = ParseSize(*text);
  if (bytes.ok() && *bytes > 0) return static_cast<uint64_t>(*bytes);
  return absl::InvalidArgumentError(
      absl::StrCat(flag, " ", *text, ": must be a size above 0, as 512MiB or 4GiB"));
}

// What is written of a run's model, and under which names.
struct Export {
  models::ModelLayout all;      // of the run
  models::ModelLayout written;  // of it
  std::string weights, config;  // file names
  bool adapters_alone = false;
};

// The adapters of a run that has some, as PEFT keeps them; with --merge the whole model, as of any other run.
absl::StatusOr<Export> Choose(const ExportFlags& flags, const models::LanguageModel& model, bool apart) {
  Export what;
  what.all = model.Layout();
  what.weights = "model.safetensors";
  what.config = "config.json";
  const bool adapted = model.lora() != nullptr;
  if (flags.merge && !adapted)
    return absl::InvalidArgumentError(
        absl::StrCat("--merge: ", flags.dirs.front(), " has no adapters: leave the flag out"));
  what.written = adapted && !flags.merge ? models::AdaptersOf(what.all) : models::WithoutAdapters(what.all);
  if (apart) what.written = models::KeptApart(model, what.written);
  if (!adapted || flags.merge) return what;
  what.adapters_alone = true;
  what.weights = models::kAdapterWeights;
  what.config = models::kAdapterConfig;
  if (flags.max_shard.has_value())
    return absl::InvalidArgumentError("--max-shard: adapters are one file: leave it out, or give --merge");
  ASSIGN_OR_RETURN(const bool into_directory, IsDirectory(flags.out));
  if (into_directory) return what;
  ASSIGN_OR_RETURN(const bool there, PathExists(flags.out));
  if (there || absl::EndsWith(flags.out, ".safetensors")) {
    return absl::InvalidArgumentError(absl::StrCat(flags.out, ": adapters are two files, ", what.weights,
                                                   " and ", what.config,
                                                   ": give a directory, or --merge for a whole model"));
  }
  return what;
}

// By the name of the matrix that each is merged into.
std::map<std::string, models::MatrixAdapter> AdaptersIn(const models::ModelLayout& layout, double scaling) {
  std::map<std::string, const models::PublishedTensor*> by_name;
  for (const models::PublishedTensor& tensor : layout.tensors) by_name[tensor.name] = &tensor;
  std::map<std::string, models::MatrixAdapter> adapters;
  for (const models::PublishedTensor& tensor : layout.tensors) {
    const auto down = by_name.find(models::PublishedDown(tensor.name));
    const auto up = by_name.find(models::PublishedUp(tensor.name));
    if (down != by_name.end() && up != by_name.end())
      adapters[tensor.name] = {down->second, up->second, scaling};
  }
  return adapters;
}

// Of the weights that the run's adapters go to: where --model says, or where they were last read.
std::string BaseDirectoryOf(const nlohmann::json& run, const std::string& model_directory) {
  if (!run.is_object() || !run.contains(kBaseKey)) return model_directory;
  return BaseDirectory(zero::JsonField<std::string>(run[kBaseKey], "path").value_or(""));
}

// --model says where what the run reads in place, and the tokenizer, lie now.
absl::Status TakeModel(const ExportFlags& flags, nlohmann::json* run, std::string* model_directory) {
  if (flags.model.empty()) return absl::OkStatus();
  if (!run->is_object() || !run->contains(kBaseKey)) return NoBase(flags.model);
  std::error_code error;
  const std::string path = std::filesystem::absolute(flags.model, error).lexically_normal();
  ASSIGN_OR_RETURN(const bool there, PathExists(path));
  if (!there)
    return absl::InvalidArgumentError(absl::StrCat("--model ", flags.model, ": no such file or directory"));
  (*run)[kBaseKey]["path"] = path;
  *model_directory = BaseDirectory(path);
  return absl::OkStatus();
}

// What is merged is read while it is written: it must not take the place of what it comes from.
absl::Status CheckApart(const models::FrozenWeights& base, const std::string& out, bool into_directory) {
  for (const std::string& file : base.Paths()) {
    ASSIGN_OR_RETURN(const bool same, IsSameFile(into_directory ? DirectoryOf(file) : file, out));
    if (!same) continue;
    return absl::InvalidArgumentError(absl::StrCat(out, ": holds the weights that this run reads (", file,
                                                   "), which would be replaced: give another place"));
  }
  return absl::OkStatus();
}

// A state or checkpoint as its record describes it, and what of it is written.
struct Source {
  FoundState state;
  std::vector<swap::Geometry> geometries;
  std::shared_ptr<const models::LanguageModel> model;
  Export what;
  kernels::DType weights = kernels::DType::kFp32;
  bool apart = false;           // its adapters go to weights that lie elsewhere
  nlohmann::json run;           // the run's record
  std::string model_directory;  // of its tokenizer

  const swap::Inspection& inspection() const { return state.inspections.front(); }
  absl::Status Foreign(const std::string& why) const {
    return absl::FailedPreconditionError(
        absl::StrCat(state.name(), ": not a model of penstock train (", why, "): cannot be exported"));
  }
};

absl::StatusOr<Source> FindSource(const ExportFlags& flags) {
  Source source;
  ASSIGN_OR_RETURN(source.state, FindState(flags.dirs));
  for (const swap::Inspection& part : source.state.inspections) {
    ASSIGN_OR_RETURN(swap::Geometry geometry, swap::Geometry::Make(part.shape));
    source.geometries.push_back(std::move(geometry));
  }
  const nlohmann::json identity = ParseOrNull(source.inspection().shape.identity);
  if (!identity.is_object() || !identity.contains("model") || !identity.contains("dtype") ||
      !identity.contains("block_elements")) {
    return source.Foreign("its identity has no model");
  }
  if (identity.contains("ranks") && source.state.parts.size() == 1)
    return source.Foreign("it is one rank's part of a run of several");
  auto described = models::ModelFromJson(identity["model"]);
  if (!described.ok()) return source.Foreign(std::string(described.status().message()));
  source.model = *std::move(described);
  source.apart = zero::JsonField<bool>(identity, "frozen_elsewhere").value_or(false);
  if (source.apart && source.model->lora() == nullptr)
    return source.Foreign("its weights lie elsewhere, and it has no adapters");
  ASSIGN_OR_RETURN(source.what, Choose(flags, *source.model, source.apart));
  if (identity["block_elements"] != nlohmann::json(source.what.written.block_elements))
    return source.Foreign("its blocks have other sizes");
  const std::optional<kernels::DType> weights =
      identity["dtype"].is_string() ? zero::ParseDType(identity["dtype"].get<std::string>()) : std::nullopt;
  if (!weights.has_value()) return source.Foreign("its weights are of no known type");
  source.weights = *weights;
  const nlohmann::json payload = ParseOrNull(source.inspection().record.payload);
  if (payload.is_object()) source.run = payload.value("run", nlohmann::json());
  source.model_directory = zero::JsonField<std::string>(source.run, "model_directory").value_or("");
  RETURN_IF_ERROR(TakeModel(flags, &source.run, &source.model_directory));
  return source;
}

// The config that lies beside the weights, and within a single file's metadata.
nlohmann::ordered_json ConfigFor(const ExportFlags& flags, const Source& source) {
  return source.what.adapters_alone
             ? models::AdapterConfigOf(*source.model, BaseDirectoryOf(source.run, source.model_directory))
             : PublishedConfig(*source.model, flags.dtype);
}

models::ExportOptions OptionsFor(const ExportFlags& flags, const Source& source, uint64_t max_shard_bytes,
                                 bool into_directory, const nlohmann::ordered_json& config) {
  models::ExportOptions options;
  options.dtype = flags.dtype == "fp32" ? swap::Dtype::kF32 : swap::Dtype::kBf16;
  options.overwrite = flags.overwrite;
  options.max_shard_bytes = max_shard_bytes;
  options.path = into_directory ? absl::StrCat(flags.out, "/", source.what.weights) : flags.out;
  options.metadata = {{"format", "pt"},
                      {"penstock_step", absl::StrCat(source.inspection().record.step)},
                      {"penstock_run", swap::UuidText(source.inspection().shape.uuid)}};
  if (!source.what.adapters_alone) options.metadata["config"] = config.dump();
  if (into_directory) {
    options.config_path = absl::StrCat(flags.out, "/", source.what.config);
    options.config = config.dump(2) + "\n";
  }
  if (flags.merge) options.adapters = AdaptersIn(source.what.all, source.model->lora()->scaling());
  return options;
}

// The weights that adapters are merged into, where they lie elsewhere; else none.
absl::StatusOr<LoraBase> BaseToMerge(const ExportFlags& flags, const Source& source, bool into_directory) {
  if (!source.apart || !flags.merge) return LoraBase();
  if (!source.run.is_object() || !source.run.contains(kBaseKey))
    return source.Foreign("it does not say what its adapters go to");
  ASSIGN_OR_RETURN(LoraBase base, ReopenBase(source.run[kBaseKey], "", *source.model, kernels::DType::kFp32,
                                             BaseCheck::kBytes, flags.quiet));
  RETURN_IF_ERROR(CheckApart(*base.weights, flags.out, into_directory));
  return base;
}

// Of the arena, which takes whole huge pages; `budget`: --host-memory.
absl::StatusOr<uint64_t> ArenaBytes(const ExportFlags& flags, const models::ExportMemory& needs,
                                    std::optional<uint64_t> budget) {
  constexpr uint64_t kHugePage = uint64_t{2} << 20;
  const uint64_t least = (needs.least_bytes + kHugePage - 1) / kHugePage * kHugePage;
  const uint64_t given = budget.value_or(std::max(kDefaultExportMemoryBytes, least + needs.beside_bytes));
  if (given < least + needs.beside_bytes) {
    return absl::FailedPreconditionError(
        absl::StrCat("--host-memory ", *flags.host_memory, ": needs at least ",
                     FormatBytes(static_cast<int64_t>(least + needs.beside_bytes)), " (",
                     least + needs.beside_bytes, " bytes)"));
  }
  const uint64_t most = given - needs.beside_bytes;
  return std::min(most / kHugePage * kHugePage, std::max(least, needs.comfortable_bytes));
}

// Adapters have a directory of their own, and no config is replaced that nobody said to replace.
absl::Status PrepareOutput(const ExportFlags& flags, const Export& what, const std::string& weights_path,
                           bool into_directory) {
  if (what.adapters_alone) {
    std::error_code error;
    std::filesystem::create_directory(flags.out, error);
    if (error)
      return absl::InvalidArgumentError(absl::StrCat(flags.out, ": cannot be made: ", error.message()));
  }
  if (!into_directory || flags.overwrite) return absl::OkStatus();
  // Of the weights ExportWeights says so itself.
  for (const std::string& weights : {weights_path, weights_path + ".index.json"}) {
    ASSIGN_OR_RETURN(const bool there, PathExists(weights));
    if (there) return absl::OkStatus();
  }
  const std::string path = absl::StrCat(flags.out, "/", what.config);
  ASSIGN_OR_RETURN(const bool has_config, PathExists(path));
  if (!has_config) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat(path, " is there already: use --overwrite to replace it"));
}

// Which checkpoint of DeepSpeed's is asked for; empty: none, it is a state or a checkpoint of ours.
absl::StatusOr<std::string> DeepSpeedsOwn(const ExportFlags& flags) {
  const std::string& directory = flags.dirs.front();
  bool theirs = false;
  if (flags.dirs.size() == 1) {
    ASSIGN_OR_RETURN(
        theirs, models::IsDeepSpeedCheckpoint(flags.tag.empty() ? directory : directory + "/" + flags.tag));
  }
  if (!theirs && !flags.tag.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--tag ", flags.tag, ": no checkpoint of DeepSpeed's of that name in ", directory));
  }
  if (!theirs) return std::string();
  const char* const ours = flags.merge                   ? "--merge"
                           : !flags.model.empty()        ? "--model"
                           : flags.max_shard.has_value() ? "--max-shard"
                                                         : nullptr;
  if (ours != nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(ours, ": ", directory,
                     " is a checkpoint of DeepSpeed's, of which one file is written: leave the flag out"));
  }
  return flags.tag.empty() ? directory : directory + "/" + flags.tag;
}

absl::Status Run(const ExportFlags& flags, std::ostream& out, std::ostream& err) {
  if (flags.dtype != "fp32" && flags.dtype != "bf16") {
    return absl::InvalidArgumentError(absl::StrCat("--dtype ", flags.dtype, ": must be fp32 or bf16"));
  }
  // The weights that are written may be of that name; a state's own file is never replaced by them.
  if (std::filesystem::path(flags.out).filename() == swap::kStoreFileName) {
    return absl::InvalidArgumentError(
        absl::StrCat(flags.out, ": is a state's own file by its name: give another file, or a directory"));
  }
  ASSIGN_OR_RETURN(const std::string theirs, DeepSpeedsOwn(flags));
  if (!theirs.empty()) {
    return ExportDeepSpeed({.checkpoint = theirs,
                            .out = flags.out,
                            .dtype = flags.dtype == "fp32" ? swap::Dtype::kF32 : swap::Dtype::kBf16,
                            .overwrite = flags.overwrite,
                            .quiet = flags.quiet},
                           out, err);
  }
  ASSIGN_OR_RETURN(const std::optional<uint64_t> budget, SizeOf("--host-memory", flags.host_memory));
  ASSIGN_OR_RETURN(const std::optional<uint64_t> max_shard, SizeOf("--max-shard", flags.max_shard));
  ASSIGN_OR_RETURN(const Source source, FindSource(flags));
  const models::ModelLayout& layout = source.what.written;
  ASSIGN_OR_RETURN(const bool has_directory, IsDirectory(flags.out));
  const bool into_directory = source.what.adapters_alone || has_directory;
  RETURN_IF_ERROR(CheckNoRunAt(flags.out, into_directory));
  const nlohmann::ordered_json config = ConfigFor(flags, source);
  models::ExportOptions options = OptionsFor(flags, source, max_shard.value_or(0), into_directory, config);
  ASSIGN_OR_RETURN(const LoraBase base, BaseToMerge(flags, source, into_directory));
  aio::Engine* engine = nullptr;  // there before anything is read
  if (base.weights != nullptr) {
    options.elsewhere = [&](int block, int64_t first, int64_t elements, float* to) {
      return zero::ReadFrozenNow(*base.weights, *engine, tiering::BlockIndex(block), first, elements,
                                 reinterpret_cast<std::byte*>(to));
    };
  }
  const models::ExportMemory needs =
      models::MemoryForExport(source.geometries, layout, options, source.weights);
  ASSIGN_OR_RETURN(const uint64_t memory, ArenaBytes(flags, needs, budget));
  ASSIGN_OR_RETURN(std::unique_ptr<StateReader> reader,
                   StateReader::Open(source.state, memory, [&](const std::string& line) {
                     if (!flags.quiet) err << line << "\n" << std::flush;
                   }));
  engine = &reader->engine();
  RETURN_IF_ERROR(PrepareOutput(flags, source.what, options.path, into_directory));
  int files = 0;
  {
    ByteProgress progress("exporting", flags.quiet);
    options.progress = [&](uint64_t done, uint64_t total) { progress.Update(done, total); };
    ASSIGN_OR_RETURN(
        files, models::ExportWeights(reader->parts(), layout, source.weights, reader->memory(), options));
  }
  if (into_directory && !source.what.adapters_alone && !source.model_directory.empty())
    RETURN_IF_ERROR(CopyTokenizer(source.model_directory, flags.out));
  if (!flags.quiet) {
    out << absl::StrFormat("%s: step %u, %u tensors, %d parameters as %s%s\n",
                           files > 1 ? options.path + ".index.json" : options.path,
                           reader->parts().front()->committed_step(), layout.tensors.size(),
                           layout.parameters(), flags.dtype + (flags.merge ? ", adapters merged" : ""),
                           files > 1 ? absl::StrFormat(" in %d files", files) : "")
        << std::flush;
  }
  return absl::OkStatus();
}

// A file that torch.load is to read, by its name, would be one that it does not read.
absl::Status CheckIsSafetensors(const std::string& path) {
  const std::string ending = std::filesystem::path(path).extension().string();
  ASSIGN_OR_RETURN(const bool is_directory, IsDirectory(path));
  if (is_directory) return absl::OkStatus();
  for (const char* const torchs : {".bin", ".pt", ".pth", ".ckpt"}) {
    if (ending != torchs) continue;
    return WrongFlag(absl::StrCat(
        path, ": what is written is safetensors, and ", ending,
        " a name of torch's files: call it .safetensors; the Python package's penstock zero_to_fp32 writes ",
        ending, " too"));
  }
  return absl::OkStatus();
}

}  // namespace

int RunExport(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  const std::string name = absl::StrCat("penstock ", argv[0]);  // it has two
  CLI::App app(
      "Streams the weights of a state directory or checkpoint to safetensors, in Hugging Face's names and "
      "shapes; of a checkpoint of DeepSpeed's, in its own",
      name);
  ExportFlags flags;
  std::vector<std::string> paths;
  app.add_option(
         "DIR... OUT", paths,
         "State directory or checkpoint (all directories of a striped run), then the file to write; "
         "an existing directory gets model.safetensors, config.json and the model's tokenizer. Or what "
         "DeepSpeed's save_checkpoint was given, and the file")
      ->required()
      ->expected(2, 65);
  app.add_option("-t,--tag", flags.tag,
                 "Name of the checkpoint in a directory of DeepSpeed's [the one that `latest` names]");
  app.add_flag("--merge", flags.merge,
               "Write the whole model of a run with --lora-rank, its adapters merged [the adapters alone, as "
               "PEFT keeps them, into the directory OUT]");
  app.add_option(
      "--model", flags.model,
      "Directory of the frozen weights of a run with --lora-rank, if it has moved [where the run last "
      "read them]");
  app.add_option("--dtype", flags.dtype,
                 "fp32 (the exact masters) or bf16 (of a bf16 run: what forward sees) [fp32]");
  app.add_option("--max-shard", flags.max_shard,
                 "Largest size of a file, as 5GB: several files and their index [one file]");
  app.add_option("--host-memory", flags.host_memory, "Most memory for tiles and turned matrices [256MiB]");
  app.add_flag("--overwrite", flags.overwrite,
               "Replace existing files, which stay until all is written: the disk needs room for both");
  app.add_flag("--quiet", flags.quiet, "No progress, no summary");
  if (const auto code = ParseFlags(app, argc, argv, out, err)) return *code;
  flags.out = paths.back();
  flags.dirs.assign(paths.begin(), paths.end() - 1);
  absl::Status status = CheckIsSafetensors(flags.out);
  if (status.ok()) status = Run(flags, out, err);
  return status.ok() ? kExitOk : Fail(name, status, err);
}

}  // namespace penstock::tools
