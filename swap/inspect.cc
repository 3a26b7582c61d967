#include "swap/inspect.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/directory.h"
#include "base/status_macros.h"
#include "swap/store_files.h"

namespace penstock::swap {
namespace {

Finding Found(Holding holding, std::string text) {
  Finding finding;
  finding.holding = holding;
  finding.text = std::move(text);
  return finding;
}

// Of what could not be looked at: something else has the store's place, or what it holds is not known.
Finding NotSeen(const absl::Status& status) {
  const bool foreign = absl::IsFailedPrecondition(status) || absl::IsInvalidArgument(status) ||
                       absl::IsPermissionDenied(status);
  Finding finding = Found(foreign ? Holding::kForeign : Holding::kDamaged, std::string(status.message()));
  if (!foreign || absl::IsPermissionDenied(status)) finding.unread = status;
  return finding;
}

}  // namespace

std::string_view HoldingName(Holding holding) {
  switch (holding) {
    case Holding::kNothing:
      return "nothing";
    case Holding::kForeign:
      return "foreign";
    case Holding::kNeverCommitted:
      return "never-committed";
    case Holding::kRun:
      return "run";
    case Holding::kDamaged:
      return "damaged";
    case Holding::kOverwritten:
      return "overwritten";
    case Holding::kInUse:
      return "in-use";
  }
  return "nothing";
}

Finding Probe(const std::string& directory, int lock_patience_ms) {
  if (const absl::Status fine = CheckDirectory(directory); !fine.ok()) return NotSeen(fine);
  const std::string path = StorePath(directory);
  const auto file = PlainFile::Open(path);
  if (absl::IsNotFound(file.status())) {
    absl::StatusOr<std::vector<std::string>> others = ListDirectoryIfThere(directory);
    if (!others.ok()) return NotSeen(others.status());
    std::erase_if(*others, [](const std::string& name) { return name.starts_with(kOwnPrefix); });
    if (others->empty()) return Found(Holding::kNothing, absl::StrCat(directory, " holds nothing"));
    Finding beside = Found(Holding::kForeign,
                           absl::StrCat(directory, " holds no run, but other files (", others->front(), ")"));
    beside.beside = true;
    return beside;
  }
  if (!file.ok()) return NotSeen(file.status());

  auto super = LoadSuperblock(*file);
  Finding finding;
  if (super.ok()) {
    finding.uuid = super->shape.uuid;
    finding.identity = super->shape.identity;
    finding.directory = super->directory;
    finding.directories = super->shape.directories();
  }
  const auto with = [&](Holding holding, std::string text) {
    finding.holding = holding;
    finding.text = std::move(text);
    return finding;
  };
  const auto locked = file->TryLock(/*exclusive=*/false, lock_patience_ms);
  if (!locked.ok()) {
    finding.unread = locked.status();
    return with(Holding::kDamaged, std::string(locked.status().message()));
  }
  if (!*locked) return with(Holding::kInUse, absl::StrCat(path, " is in use by another run"));
  // Under the lock nothing changes any more.
  super = LoadSuperblock(*file);
  if (absl::IsNotFound(super.status())) {
    return with(Holding::kNeverCommitted, absl::StrCat(path, " is of a run whose creation was cut short"));
  }
  if (absl::IsInvalidArgument(super.status())) {
    return with(Holding::kForeign,
                absl::StrCat(path, " was made by something else, or its superblock was overwritten"));
  }
  if (!super.ok()) return with(Holding::kDamaged, absl::StrCat(path, ": ", super.status().message()));
  finding.uuid = super->shape.uuid;
  finding.identity = super->shape.identity;
  finding.directory = super->directory;
  finding.directories = super->shape.directories();
  const auto geometry = Geometry::Make(super->shape);
  if (!geometry.ok()) return with(Holding::kDamaged, absl::StrCat(path, ": ", geometry.status().message()));
  if (const uint64_t whole = geometry->file_bytes(super->directory); file->bytes() < whole) {
    return with(Holding::kDamaged,
                absl::StrCat(path, " has ", file->bytes(), " bytes of ", whole, ": it was cut off"));
  }
  if (super->directory != 0) {
    return with(Holding::kRun, absl::StrCat(directory, " is directory ", super->directory, " of the ",
                                            super->shape.directories(), " of run ", UuidText(finding.uuid)));
  }
  const auto found = LoadRecord(*file, *geometry, super->shape.uuid);
  if (!found.ok()) return with(Holding::kDamaged, std::string(found.status().message()));
  if (found->record.sequence == 0) {
    if (found->damage.empty() || found->only_first_place) {
      return with(Holding::kNeverCommitted, absl::StrCat(directory, " holds a run that was never committed"));
    }
    return with(Holding::kDamaged, absl::StrCat(path, ": no commit record is whole: ", found->damage.back()));
  }
  finding.step = found->record.step;
  finding.updates = found->record.updates;
  finding.sequence = found->record.sequence;
  if (found->record.overwriting) {
    return with(Holding::kOverwritten, absl::StrCat(directory, ": ", OverwrittenText(finding.step)));
  }
  return with(Holding::kRun, absl::StrCat(directory, " holds a run at step ", finding.step));
}

Finding Probe(const std::vector<std::string>& directories, int lock_patience_ms) {
  if (directories.empty()) return Found(Holding::kNothing, "no directory was given");
  std::vector<Finding> findings;
  findings.reserve(directories.size());
  for (const std::string& directory : directories) findings.push_back(Probe(directory, lock_patience_ms));
  const auto first = [&](Holding holding) -> const Finding* {
    for (const Finding& finding : findings) {
      if (finding.holding == holding) return &finding;
    }
    return nullptr;
  };
  if (const Finding* found = first(Holding::kInUse)) return *found;
  if (const Finding* found = first(Holding::kDamaged)) return *found;
  const auto committed = [](const Finding& finding) {
    const bool run = finding.holding == Holding::kRun || finding.holding == Holding::kOverwritten;
    return run && finding.directory == 0;
  };
  if (const Finding* found = first(Holding::kNeverCommitted)) {
    // Creation ends with directory 0: with a commit there, this one was whole.
    const auto whole = std::find_if(findings.begin(), findings.end(), committed);
    if (whole == findings.end()) return *found;
    return Found(Holding::kDamaged, absl::StrCat(whole->text, ", but ", LostSuperblockText(found->text)));
  }
  const Finding* run = nullptr;
  size_t parts = 0;
  for (const Finding& finding : findings) {
    if (finding.holding != Holding::kRun && finding.holding != Holding::kOverwritten) continue;
    ++parts;
    if (run != nullptr && run->uuid != finding.uuid) {
      return Found(Holding::kDamaged,
                   absl::StrCat("directories of different runs were given: ", run->text, "; ", finding.text));
    }
    if (run == nullptr || finding.directory == 0) run = &finding;
  }
  if (run == nullptr) {
    // Of these the one that says more than that other files are there.
    const auto in_the_way = std::find_if(findings.begin(), findings.end(), [](const Finding& finding) {
      return finding.holding == Holding::kForeign && !finding.beside;
    });
    if (in_the_way != findings.end()) return *in_the_way;
    const Finding* found = first(Holding::kForeign);
    return found != nullptr ? *found : findings.front();
  }
  if (parts == run->directories && parts == findings.size()) return *run;
  Finding partial = *run;
  partial.holding = Holding::kDamaged;
  partial.text = absl::StrCat("the run has ", run->directories, " directories; of the ", findings.size(),
                              " given, ", parts, " belong to it");
  return partial;
}

absl::StatusOr<bool> HoldsRun(const Finding& finding) {
  if (absl::IsOutOfRange(finding.unread)) return absl::DataLossError(finding.text);  // not kOverwritten
  RETURN_IF_ERROR(finding.unread);
  switch (finding.holding) {
    case Holding::kRun:
    case Holding::kInUse:  // the kernel may still finish a killed run's writes: opening waits for them
      return true;
    case Holding::kNothing:
    case Holding::kNeverCommitted:
      return false;
    case Holding::kForeign:
      return absl::FailedPreconditionError(finding.text);
    case Holding::kOverwritten:
      return absl::OutOfRangeError(finding.text);
    case Holding::kDamaged:
      break;
  }
  return absl::DataLossError(finding.text);
}

absl::StatusOr<Inspection> Inspect(const std::vector<std::string>& directories,
                                   std::optional<uint64_t> sequence) {
  Inspection result;
  std::optional<StoreShape> shape;
  std::vector<std::optional<PlainFile>> files(kMaxDirectories);
  absl::Status unfinished;
  for (const std::string& directory : directories) {
    RETURN_IF_ERROR(CheckDirectory(directory));
    auto file = PlainFile::Open(StorePath(directory));
    if (absl::IsNotFound(file.status())) return absl::NotFoundError(absl::StrCat(directory, " holds no run"));
    RETURN_IF_ERROR(file.status());
    auto super = LoadSuperblock(*file);
    if (!super.ok()) {
      const auto code = absl::IsInvalidArgument(super.status()) ? absl::StatusCode::kFailedPrecondition
                                                                : super.status().code();
      if (absl::IsNotFound(super.status()) && unfinished.ok()) {
        unfinished = absl::NotFoundError(absl::StrCat(file->path(), ": ", super.status().message()));
      }
      if (absl::IsNotFound(super.status())) continue;
      return absl::Status(code, absl::StrCat(file->path(), ": ", super.status().message()));
    }
    for (const std::string& line : super->damage)
      result.damage.push_back(absl::StrCat(file->path(), ": ", line));
    if (shape.has_value() && !(*shape == super->shape)) {
      return absl::DataLossError(
          absl::StrCat(file->path(), " belongs to another run than ", directories.front()));
    }
    shape = std::move(super->shape);
    const auto locked = file->TryLock(/*exclusive=*/false, 0);
    result.in_use = result.in_use || (locked.ok() && !*locked);
    files[super->directory] = *std::move(file);
  }
  // Creation ends with directory 0.
  if (!unfinished.ok() && (!shape.has_value() || !files[0].has_value())) return unfinished;
  if (!unfinished.ok()) return absl::DataLossError(LostSuperblockText(std::string(unfinished.message())));
  if (!shape.has_value()) return absl::InvalidArgumentError("no directory was given");
  for (uint32_t d = 0; d < shape->directories(); ++d) {
    if (!files[d].has_value()) {
      return absl::DataLossError(absl::StrCat(
          "directory ", d, " of the ", shape->directories(), " of run ", UuidText(shape->uuid),
          " is missing (it was ", shape->directory_paths[d], " when the run was created): give it as well"));
    }
    result.paths.push_back(files[d]->path());
    result.file_bytes.push_back(files[d]->bytes());
    result.allocated_bytes.push_back(files[d]->allocated_bytes());
  }
  const auto geometry = Geometry::Make(*shape);
  if (!geometry.ok()) return absl::DataLossError(geometry.status().message());
  for (uint32_t d = 0; d < shape->directories(); ++d) {
    if (const uint64_t whole = geometry->file_bytes(d); result.file_bytes[d] < whole) {
      return absl::DataLossError(absl::StrCat(result.paths[d], " has ", result.file_bytes[d], " bytes of ",
                                              whole, ": it was cut off"));
    }
  }
  ASSIGN_OR_RETURN(auto found, LoadRecord(*files[0], *geometry, shape->uuid, sequence));
  if (found.record.sequence == 0) {
    if (found.damage.empty() || found.only_first_place) {
      return absl::NotFoundError(absl::StrCat(result.paths[0], ": the run was created and never committed"));
    }
    return absl::DataLossError(
        absl::StrCat(result.paths[0], ": no commit record is whole: ", found.damage.back()));
  }
  if (sequence.has_value() && found.record.sequence != *sequence) {
    return absl::DataLossError(absl::StrCat(result.paths[0], " is at step ", found.record.step, ", commit ",
                                            found.record.sequence, ", and has no commit ", *sequence,
                                            " any more"));
  }
  for (const std::string& line : found.damage)
    result.damage.push_back(absl::StrCat(result.paths[0], ": ", line));
  result.record = std::move(found.record);
  result.state_bytes = geometry->state_bytes();
  result.shape = *std::move(shape);
  return result;
}

}  // namespace penstock::swap
