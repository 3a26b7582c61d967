// `penstock pack`: a model's weights in 8 or 4 bit.
//
// The directory is written beside its name and takes it when all of it is on the drive: a kill leaves
// OUT.partial, which the next pack to OUT replaces. A mark in it says that pack made it.
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/atomic_file.h"
#include "base/directory.h"
#include "base/file_lock.h"
#include "base/io_error.h"
#include "base/output_path.h"
#include "base/status_macros.h"
#include "kernels/weight_code.h"
#include "models/families/family.h"
#include "models/families/mixture.h"
#include "models/weights/weight_files.h"
#include "models/weights/weight_import.h"
#include "models/weights/weight_pack.h"
#include "tools/base/cli.h"
#include "tools/base/size.h"
#include "tools/base/verbs.h"
#include "tools/generate/model_files.h"
#include "tools/state/state_reader.h"

namespace penstock::tools {
namespace {

namespace fs = std::filesystem;
constexpr const char* kPackName = "penstock pack";
// In a directory that is being written: what tells it from one that somebody else gave such a name.
constexpr const char* kMark = ".penstock.pack";

struct PackFlags {
  std::string from, out;
  int64_t weights = 8, group = 64;
  std::string max_shard = "4GiB";
  bool overwrite = false, quiet = false;
};

absl::Status Errno(const std::string& what) { return absl::ErrnoToStatus(errno, what); }

bool IsOurs(const std::string& name) {
  // Also under the name that a kill leaves it, just before it has its own.
  if (const std::string_view whole = NameInTemporary(name, ".new"); !whole.empty())
    return IsOurs(std::string(whole));
  if (name == "config.json" || name == kMark) return true;
  if (absl::StartsWith(name, "model") && absl::StrContains(name, ".safetensors")) return true;
  return std::find(std::begin(kTokenizerFiles), std::end(kTokenizerFiles), name) != std::end(kTokenizerFiles);
}

// kAlreadyExists: it holds what pack did not write.
absl::Status CheckOnlyOurs(const std::string& directory) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectory(directory));
  for (const std::string& name : names) {
    ASSIGN_OR_RETURN(const bool is_file, IsRegularFile(absl::StrCat(directory, "/", name)));
    if (IsOurs(name) && is_file) continue;
    return absl::AlreadyExistsError(
        absl::StrCat(directory, " holds ", name, ", which is not of a packed model: it is not replaced"));
  }
  return absl::OkStatus();
}

// Removes the files in a directory, but for the mark.
absl::Status RemoveFiles(const std::string& directory) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectory(directory));
  for (const std::string& name : names) {
    const std::string path = absl::StrCat(directory, "/", name);
    if (name != kMark && ::unlink(path.c_str()) != 0) return Errno(absl::StrCat("remove ", path));
  }
  return absl::OkStatus();
}

// A directory that becomes another: this process's alone, empty, gone again unless it was published.
class Partial {
 public:
  explicit Partial(std::string out) : out_(std::move(out)), path_(out_ + ".partial") {}
  ~Partial() {
    if (fd_ < 0) return;
    if (owned_) {
      // What cannot be removed now is left to the next pack, which knows it by the mark.
      (void)SetMark();
      if (RemoveFiles(path_).ok()) {
        (void)::unlink(Mark().c_str());
        (void)::rmdir(path_.c_str());
      }
    }
    ::close(fd_);
  }
  Partial(const Partial&) = delete;
  Partial& operator=(const Partial&) = delete;
  const std::string& path() const { return path_; }

  absl::Status Begin() {
    if (::mkdir(path_.c_str(), 0777) != 0 && errno != EEXIST) return Errno(absl::StrCat("mkdir ", path_));
    fd_ = ::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd_ < 0) return Errno(absl::StrCat("open ", path_));
    ASSIGN_OR_RETURN(const bool locked, TryLockFile(fd_, path_));
    if (!locked) return absl::FailedPreconditionError(absl::StrCat(path_, ": another pack is writing there"));
    RETURN_IF_ERROR(CheckIsALeftover());
    owned_ = true;
    RETURN_IF_ERROR(SetMark());
    return RemoveFiles(path_);
  }

  // Takes the name. What had it is gone, unless something else than a packed model was put there meanwhile:
  // then it stays, and this is an error.
  absl::Status Publish(bool replace) {
    if (::unlink(Mark().c_str()) != 0) return Errno(absl::StrCat("remove ", Mark()));
    RETURN_IF_ERROR(SyncDirectory(path_));
    RETURN_IF_ERROR(Rename(replace ? RENAME_EXCHANGE : RENAME_NOREPLACE));
    if (replace) {
      owned_ = false;  // it has the old content now
      if (absl::Status old = CheckReplaceable(path_); !old.ok()) {
        RETURN_IF_ERROR(Rename(RENAME_EXCHANGE));
        owned_ = true;
        return absl::Status(old.code(), absl::StrCat(out_, " has changed meanwhile: ", old.message()));
      }
    }
    RETURN_IF_ERROR(SyncDirectory(ParentOf(out_)));
    owned_ = replace;
    return absl::OkStatus();
  }

  // Whether a packed model's directory may give way to another.
  static absl::Status CheckReplaceable(const std::string& directory) {
    ASSIGN_OR_RETURN(const PathKind kind, LinkKindOf(directory));
    std::optional<models::PackedWeights> packed;
    if (kind == PathKind::kDirectory) {
      ASSIGN_OR_RETURN(packed, models::PackingOf(directory));
    }
    if (!packed.has_value())
      return absl::AlreadyExistsError(absl::StrCat(directory, " is not a packed model: it is not replaced"));
    return CheckOnlyOurs(directory);
  }

 private:
  std::string Mark() const { return absl::StrCat(path_, "/", kMark); }
  absl::Status SetMark() const { return ReplaceFile(Mark(), ""); }

  // It is empty, or a killed pack has left it: with the mark or what was to become that, or with a whole
  // packed model.
  absl::Status CheckIsALeftover() const {
    ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectory(path_));
    const auto of_mark = [](const std::string& name) { return NameInTemporary(name, ".new") == kMark; };
    if (std::all_of(names.begin(), names.end(), of_mark)) return absl::OkStatus();
    ASSIGN_OR_RETURN(const bool marked, IsRegularFile(Mark()));
    return marked ? CheckOnlyOurs(path_) : CheckReplaceable(path_);
  }

  absl::Status Rename(unsigned flags) const {
    if (::renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, out_.c_str(), flags) == 0) return absl::OkStatus();
    const bool unknown = errno == EINVAL || errno == ENOSYS;  // to this file system, NFS for one
    if (unknown && flags == RENAME_EXCHANGE)
      return absl::FailedPreconditionError(absl::StrCat(
          out_, ": this file system cannot exchange directories: remove it first, or give another OUT"));
    // A directory that is not empty is not replaced by this one either.
    if (unknown && ::rename(path_.c_str(), out_.c_str()) == 0) return absl::OkStatus();
    return Errno(absl::StrCat("rename ", path_, " to ", out_));
  }

  const std::string out_, path_;
  int fd_ = -1;
  bool owned_ = false;
};

absl::StatusOr<models::PackOptions> OptionsOf(const PackFlags& flags) {
  const auto wrong = [](const std::string& what) { return absl::InvalidArgumentError(what); };
  if (flags.weights != 8 && flags.weights != 4)
    return wrong(absl::StrCat("--weights ", flags.weights, ": must be 8 or 4"));
  if (flags.group <= 0 || flags.group % static_cast<int64_t>(kernels::kCodeBlock) != 0 ||
      flags.group > static_cast<int64_t>(kernels::kMostCodeGroup)) {
    return wrong(absl::StrCat("--group ", flags.group, ": must be a multiple of ", kernels::kCodeBlock,
                              " up to ", kernels::kMostCodeGroup));
  }
  const absl::StatusOr<int64_t> shard = ParseSize(flags.max_shard);
  if (!shard.ok() || *shard <= 0)
    return wrong(absl::StrCat("--max-shard ", flags.max_shard, ": must be a size above 0, as 4GiB"));
  models::PackOptions options;
  options.bits = static_cast<int>(flags.weights);
  options.group = static_cast<size_t>(flags.group);
  options.max_shard_bytes = static_cast<uint64_t>(*shard);
  return options;
}

// Whether OUT is there, and may be replaced.
absl::StatusOr<bool> CheckOut(const PackFlags& flags) {
  struct stat info {};
  if (::lstat(flags.out.c_str(), &info) != 0) {
    return errno == ENOENT ? absl::StatusOr<bool>(false) : Errno(absl::StrCat("stat ", flags.out));
  }
  if (!flags.overwrite)
    return absl::AlreadyExistsError(absl::StrCat(flags.out, " is there already (--overwrite replaces it)"));
  RETURN_IF_ERROR(Partial::CheckReplaceable(flags.out));
  return true;
}

absl::Status Pack(PackFlags flags, std::ostream& out, std::ostream& err) {
  ASSIGN_OR_RETURN(models::PackOptions options, OptionsOf(flags));
  while (flags.out.size() > 1 && flags.out.back() == '/') flags.out.pop_back();
  const std::string config = absl::StrCat(flags.from, "/config.json");
  ASSIGN_OR_RETURN(const bool has_config, PathExists(config));
  if (!has_config) {
    return absl::InvalidArgumentError(absl::StrCat(
        flags.from,
        ": not a Hugging Face directory (config.json and model.safetensors or its index); `penstock "
        "export` makes one of a state"));
  }
  if (!models::HasWeights(flags.from)) {
    return absl::InvalidArgumentError(
        absl::StrCat(flags.from, ": a config.json without weights: ", models::WhyNoWeights(flags.from)));
  }
  ASSIGN_OR_RETURN(const std::optional<models::PackedWeights> packed, models::PackingOf(flags.from));
  if (packed.has_value()) {
    return absl::FailedPreconditionError(absl::StrCat(
        flags.from, " is packed in ", packed->bits, " bit already: pack the directory that it was made of"));
  }
  std::vector<std::string> notes;
  ASSIGN_OR_RETURN(const std::shared_ptr<const models::LanguageModel> model,
                   models::OpenModel(flags.from, &notes));
  for (const std::string& note : notes) err << kPackName << ": " << note << "\n" << std::flush;
  const models::ModelLayout layout = model->Layout();
  ASSIGN_OR_RETURN(const std::unique_ptr<models::WeightImport> import,
                   models::WeightImport::Open(flags.from, layout, "weights"));
  RETURN_IF_ERROR(CheckNoRunAt(flags.out, /*into_directory=*/true));
  ASSIGN_OR_RETURN(const bool replace, CheckOut(flags));
  options.vocabulary = model->vocabulary();
  options.whole = models::RoutersOf(*model);
  std::error_code error;
  options.source = fs::absolute(flags.from, error).lexically_normal().string();
  Partial partial(flags.out);
  RETURN_IF_ERROR(partial.Begin());
  models::PackResult result;
  {
    ByteProgress progress("packing", flags.quiet);
    options.progress = [&](uint64_t done, uint64_t total) { progress.Update(done, total); };
    ASSIGN_OR_RETURN(result, models::PackWeights(import.get(), layout, partial.path(), options));
  }
  RETURN_IF_ERROR(CopyTokenizer(flags.from, partial.path()));
  RETURN_IF_ERROR(CopyFile(config, absl::StrCat(partial.path(), "/config.json")));
  RETURN_IF_ERROR(partial.Publish(replace));
  if (!flags.quiet) {
    out << absl::StrFormat("%s: %d parameters in %s, %.2f bits each; error of the weights %.3f%%\n",
                           flags.out, layout.parameters(), FormatBytes(static_cast<int64_t>(result.bytes)),
                           8.0 * static_cast<double>(result.bytes) / static_cast<double>(layout.parameters()),
                           100 * result.mean_error)
        << std::flush;
  }
  return out ? absl::OkStatus() : StreamError("stdout: write");
}

}  // namespace

int RunPack(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  CLI::App app(
      "Codes the weights of a Hugging Face directory in 8 or 4 bit, with a scale for each group of a row. "
      "`penstock generate` reads the result as it reads the original, with less from the drive",
      kPackName);
  PackFlags flags;
  app.add_option("DIR", flags.from, "Hugging Face directory")->required();
  app.add_option("OUT", flags.out, "The directory to write, whole or not at all")->required();
  app.add_option("--weights", flags.weights,
                 "Bits of a weight: 8 or 4; embeddings and output have 8, vectors stay as they are [8]");
  app.add_option("--group", flags.group, "Weights that share a scale: a multiple of 32 [64]");
  app.add_option("--max-shard", flags.max_shard, "Bytes of a file, at the most [4GiB]");
  app.add_flag("--overwrite", flags.overwrite, "Replace OUT, if it is a packed model");
  app.add_flag("--quiet", flags.quiet, "No progress, no summary");
  if (const auto code = ParseFlags(app, argc, argv, out, err)) return *code;
  const absl::Status status = Pack(std::move(flags), out, err);
  return status.ok() ? kExitOk : Fail(kPackName, status, err);
}

}  // namespace penstock::tools
