#include "models/deepspeed/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/directory.h"
#include "base/io_error.h"
#include "base/json.h"
#include "base/small_file.h"
#include "base/status_macros.h"
#include "models/weights/stored_type.h"
#include "swap/checkpoint.h"

namespace penstock::models {
namespace {

using Kind = TorchValue::Kind;

constexpr const char* kOptimizerEnding = "_optim_states.pt";
constexpr const char* kModelEnding = "_model_states.pt";
// Of the moments in the optimizer's state, by StateKind; the masters have names of their own.
constexpr const char* kMoments[] = {"", "exp_avg", "exp_avg_sq"};
constexpr const char* kUniversal[] = {"fp32", "exp_avg", "exp_avg_sq"};
constexpr int kDeepestJson = 32;
constexpr int64_t kTextValue = 64;  // bytes of a text that count as one
constexpr int64_t kMostOpenRanks = 16;
constexpr uint64_t kMostLatestBytes = 4096;
constexpr size_t kLongestName = 1024;  // of a parameter or a buffer
constexpr int64_t kUnitsOfName = 4;    // of those that a value counts as: it stands in several lists
constexpr size_t kMostDimensions = 64;
// What all files that are open take together. Each may take some more where it has contents: a real
// checkpoint's bytes are nearly all its tensors'.
constexpr int64_t kFreeFileBytes = 8 << 10;
// What a file may take for each byte of its pickle: where tens of thousands of parameters are described, as
// mixtures of experts have them, it takes 19.
constexpr uint64_t kBytesPerPickleByte = 24;
constexpr int64_t kDiskBytesPerByte = 16;
constexpr absl::string_view kOwnKeys[] = {"module",
                                          "buffer_names",
                                          "optimizer",
                                          "param_shapes",
                                          "frozen_param_shapes",
                                          "frozen_param_fragments",
                                          "shared_params",
                                          "lr_scheduler",
                                          "data_sampler",
                                          "random_ltd",
                                          "sparse_tensor_module_names",
                                          "skipped_steps",
                                          "global_steps",
                                          "global_samples",
                                          "dp_world_size",
                                          "mp_world_size",
                                          "ds_config",
                                          "ds_version",
                                          "universal_checkpoint_info",
                                          "num_experts",
                                          "ds_autoep_layers",
                                          "checkpoint_parallel_dimensions"};

// What cannot be looked at counts as there: whoever reads it says what is wrong.
bool Exists(const std::string& path) { return PathExists(path).value_or(true); }

std::string Text(std::string_view text) { return std::string(text); }

std::vector<int64_t> SizesOf(const TorchValue& shape) {
  if (shape.size() > kMostDimensions) return {-1};
  std::vector<int64_t> sizes;
  sizes.reserve(shape.size());
  for (size_t d = 0; d < shape.size(); ++d) sizes.push_back(shape[d].integer().value_or(-1));
  return sizes;
}

// -1: none that a parameter has.
int64_t ElementsOf(const std::vector<int64_t>& sizes) {
  int64_t elements = 1;
  for (const int64_t size : sizes) {
    if (size < 0 || __builtin_mul_overflow(elements, size, &elements)) return -1;
  }
  return elements;
}

// A value may stand in many places of a file, so that a short file can have very many: each place counts,
// with the list or dict that it is in.
bool Spend(const TorchValue& value, size_t items, int64_t* left) {
  *left -= static_cast<int64_t>(items) + static_cast<int64_t>(value.text().size()) / kTextValue;
  return *left >= 0;
}

nlohmann::json JsonOf(const TorchValue& value, int depth, int64_t* left) {
  if (depth > kDeepestJson || !Spend(value, value.size(), left)) return nullptr;
  switch (value.kind()) {
    case Kind::kBool:
      return *value.boolean();
    case Kind::kInt:
      return *value.integer();
    case Kind::kFloat:
      return *value.number();
    case Kind::kText:
      return Text(value.text());
    case Kind::kList: {
      nlohmann::json list = nlohmann::json::array();
      for (size_t i = 0; i < value.size() && *left >= 0; ++i)
        list.push_back(JsonOf(value[i], depth + 1, left));
      return list;
    }
    case Kind::kObject:
    case Kind::kDict: {
      if (value.name() == "collections.Counter" && value.size() == 1)
        return JsonOf(value[0], depth + 1, left);
      nlohmann::json dict = nlohmann::json::object();
      const TorchValue::Entries entries = value.entries();
      if (!Spend({}, entries.size(), left)) return nullptr;
      for (const auto& [k, v] : entries) {
        if (*left < 0) break;
        const std::string key = k.integer().has_value() ? absl::StrCat(*k.integer()) : Text(k.text());
        dict[key] = JsonOf(v, depth + 1, left);
      }
      return dict;
    }
    default:
      return nullptr;
  }
}

// A value of client_state, such that Python finds the same one (_engine/_json.py). `why`: gets what in it
// would not come back.
class ClientValue {
 public:
  ClientValue(int64_t* left, std::string* why) : left_(left), why_(why) {}

  nlohmann::json Of(const TorchValue& value, int depth = 0) {
    if (depth > kDeepestJson) return No(absl::StrCat("nested more than ", kDeepestJson, " deep"));
    if (!Spend(value, value.size(), left_)) return No("too much");
    switch (value.kind()) {
      case Kind::kNone:
        return nullptr;
      case Kind::kBool:
        return *value.boolean();
      case Kind::kInt:
        return *value.integer();
      case Kind::kFloat:
        return Float(*value.number());
      case Kind::kText:
        return value.form() == Form::kBytes ? No("bytes") : nlohmann::json(Text(value.text()));
      case Kind::kList:
        return value.form() == Form::kSet ? No("a set") : List(value, depth);
      case Kind::kDict:
        return Dict(value, depth);
      case Kind::kTensor:
        return No("a tensor");
      default:
        return No(Text(value.name()));
    }
  }

 private:
  using Form = TorchValue::Form;

  nlohmann::json No(const std::string& why) {
    if (why_->empty()) *why_ = why;
    return nullptr;
  }
  bool Failed() const { return !why_->empty(); }
  static nlohmann::json Tagged(const char* tag, nlohmann::json value) {
    return {{"__penstock__", tag}, {"value", std::move(value)}};
  }

  static nlohmann::json Float(double value) {
    if (std::isfinite(value)) return value;
    return Tagged("float", std::isnan(value) ? "nan" : (value > 0 ? "inf" : "-inf"));
  }

  nlohmann::json List(const TorchValue& value, int depth) {
    nlohmann::json list = nlohmann::json::array();
    for (size_t i = 0; i < value.size() && !Failed(); ++i) list.push_back(Of(value[i], depth + 1));
    return value.form() == Form::kTuple ? Tagged("tuple", std::move(list)) : list;
  }

  nlohmann::json Dict(const TorchValue& value, int depth) {
    const auto entries = value.entries();
    if (!Spend({}, entries.size(), left_)) return No("too much");
    const bool plain = std::all_of(entries.begin(), entries.end(), [](const auto& entry) {
      const TorchValue& key = entry.first;
      return key.kind() == Kind::kText && key.form() == Form::kOwn && key.text() != "__penstock__";
    });
    nlohmann::json dict = plain ? nlohmann::json::object() : nlohmann::json::array();
    for (const auto& [k, v] : entries) {
      if (Failed()) break;
      if (plain) {
        dict[Text(k.text())] = Of(v, depth + 1);
      } else {
        nlohmann::json key = Of(k, depth + 1), item = Of(v, depth + 1);
        dict.push_back(nlohmann::json::array({std::move(key), std::move(item)}));
      }
    }
    return plain ? dict : Tagged("dict", std::move(dict));
  }

  int64_t* const left_;
  std::string* const why_;
};

bool IsUtf8(const nlohmann::json& value) {
  try {
    value.dump();  // which is strict
    return true;
  } catch (const nlohmann::json::exception&) {
    return false;
  }
}

// Rank of "[bf16_]zero_pp_rank_3_mp_rank_00_optim_states.pt"; nullopt: not such a name.
std::optional<int64_t> RankOf(const std::string& name) {
  constexpr absl::string_view kRank = "zero_pp_rank_";
  const size_t at = name.find(kRank.data(), 0, kRank.size());
  int64_t rank = 0;
  if (at == std::string::npos) return std::nullopt;
  const absl::string_view rest = absl::string_view(name).substr(at + kRank.size());
  if (!absl::SimpleAtoi(rest.substr(0, rest.find('_')), &rank) || rank < 0) return std::nullopt;
  return rank;
}

// What a file that names a tag says; nullopt: there is none. A tag is beside the file and nowhere else,
// whoever wrote it.
absl::StatusOr<std::optional<std::string>> NamedBy(const std::string& list) {
  const absl::StatusOr<std::string> text = ReadSmallFile(list, kMostLatestBytes);
  if (absl::IsNotFound(text.status())) return std::nullopt;
  RETURN_IF_ERROR(text.status());
  std::string tag(absl::StripAsciiWhitespace(*text));
  const char* why = tag.empty() ? "it is empty" : tag == "." || tag == ".." ? "it leads elsewhere" : nullptr;
  for (const auto& [character, has] : {std::pair{'\0', "it has a zero byte in it"},
                                       {'\n', "it has more than one line"},
                                       {'/', "it has a slash in it"}}) {
    if (why == nullptr && tag.find(character) != std::string::npos) why = has;
  }
  if (why == nullptr) return tag;
  return absl::InvalidArgumentError(absl::StrCat(list, " names no checkpoint beside it (\"",
                                                 absl::CEscape(tag.substr(0, 80)), "\"): ", why,
                                                 ": give the directory of one"));
}

// The directory of the tag that `path` means. Where `latest` names what is not there, what was made of that
// very tag is as good; an older one is not.
absl::StatusOr<std::string> TagOf(const std::string& path) {
  ASSIGN_OR_RETURN(const bool directory, IsDirectory(path));
  if (!directory) return absl::NotFoundError(absl::StrCat(path, ": no such directory"));
  const std::string list = path + "/latest";
  const auto has = [&](const std::string& tag) { return IsDirectory(absl::StrCat(path, "/", tag)); };
  ASSIGN_OR_RETURN(const std::optional<std::string> latest, NamedBy(list));
  if (latest.has_value()) {
    ASSIGN_OR_RETURN(const bool there, has(*latest));
    if (there) return absl::StrCat(path, "/", *latest);
  }
  ASSIGN_OR_RETURN(const std::optional<std::string> universal, NamedBy(list + "_universal"));
  const bool other = latest.has_value() && universal != *latest + "_universal";
  if (universal.has_value() && !other) {
    ASSIGN_OR_RETURN(const bool there, has(*universal));
    if (there) return absl::StrCat(path, "/", *universal);
  }
  if (latest.has_value() || universal.has_value())
    return absl::InvalidArgumentError(absl::StrCat(list, latest.has_value() ? "" : "_universal", " names ",
                                                   latest.has_value() ? *latest : *universal,
                                                   ", which is not there"));
  return path;
}

struct Listing {
  std::vector<std::string> optimizer;  // by rank
  std::vector<std::string> model;      // the first rank's, and where each has one those of the others
  bool universal = false;
};

absl::StatusOr<Listing> ListTag(const std::string& directory) {
  const auto wrong = [&](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat(directory, ": ", why));
  };
  Listing listing;
  ASSIGN_OR_RETURN(listing.universal, IsDirectory(absl::StrCat(directory, "/zero")));
  ASSIGN_OR_RETURN(const std::vector<std::string> entries, ListDirectory(directory));
  std::map<int64_t, std::string> by_rank, models;
  for (const std::string& name : entries) {
    if (name == "offloaded_tensors")
      return wrong(
          "the optimizer's state was left on an NVMe drive by DeepSpeed (offloaded_tensors): its files "
          "have no names; save with offload_optimizer on cpu, or use ds_to_universal there");
    if (absl::StartsWith(name, "layer_") || absl::StrContains(name, "expert_"))
      return wrong(absl::StrCat(name, ": pipeline and expert parallelism are not served"));
    const bool optimizer = absl::EndsWith(name, kOptimizerEnding), model = absl::EndsWith(name, kModelEnding);
    if (!optimizer && !model) continue;
    // Of the universal format the values are whole, whatever the ranks were.
    const bool whole = listing.universal && (optimizer || !absl::StrContains(name, "mp_rank_00"));
    if (whole) continue;
    if (!absl::StrContains(name, "mp_rank_00"))
      return wrong(absl::StrCat(name, ": tensor parallelism is not served; use ds_to_universal there"));
    const std::optional<int64_t> rank = RankOf(name);
    if (model) {
      std::string& of_rank = models[rank.value_or(0)];
      if (of_rank.empty() || name < of_rank) of_rank = name;
    }
    if (!optimizer) continue;
    if (!rank.has_value()) return wrong(absl::StrCat(name, ": of no rank"));
    if (!by_rank.emplace(*rank, name).second)
      return wrong(absl::StrCat(name, " and ", by_rank[*rank], " are of one rank: which counts?"));
  }
  for (const auto& [rank, name] : by_rank) {
    if (rank != static_cast<int64_t>(listing.optimizer.size()))
      return wrong(absl::StrCat("the optimizer's state of rank ", listing.optimizer.size(), " is missing"));
    listing.optimizer.push_back(name);
  }
  for (const auto& [rank, name] : models) listing.model.push_back(name);
  if (!listing.universal && (listing.model.empty() || listing.optimizer.empty()))
    return absl::NotFoundError(absl::StrCat(directory, ": no checkpoint of DeepSpeed with ZeRO: no *",
                                            kModelEnding, " and *", kOptimizerEnding,
                                            ", no zero/, and no `latest` that names a directory of them"));
  return listing;
}

}  // namespace

absl::StatusOr<bool> IsDeepSpeedCheckpoint(const std::string& path) {
  const absl::StatusOr<std::string> tag = TagOf(path);
  // What is no file of a name, or names nothing that is there, is nobody's.
  if (absl::IsNotFound(tag.status()) || absl::IsInvalidArgument(tag.status()) ||
      absl::IsFailedPrecondition(tag.status()))
    return false;
  RETURN_IF_ERROR(tag.status());
  ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectory(*tag));
  for (const std::string& name : names) {
    bool theirs = absl::EndsWith(name, kModelEnding) || absl::EndsWith(name, kOptimizerEnding);
    if (name == "zero") {
      ASSIGN_OR_RETURN(const PathKind kind, LinkKindOf(absl::StrCat(*tag, "/", name)));
      theirs = kind == PathKind::kDirectory;
    }
    if (!theirs) continue;
    const absl::StatusOr<std::string> ours = swap::FindCheckpoint(path);
    if (!ours.ok() && !absl::IsNotFound(ours.status())) return ours.status();
    if (!ours.ok() || *ours != path) return true;
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": which of two is meant: the checkpoint of DeepSpeed's, ", *tag,
        ", or the state or checkpoint of Penstock's beside it? Move one of them to a directory of its own"));
  }
  return false;
}

std::span<const absl::string_view> DeepSpeedKeys() { return kOwnKeys; }

absl::StatusOr<nlohmann::json> LossScaleOf(kernels::DType weights, const zero::LossScaleOptions& options,
                                           const DeepSpeedProgress& progress, std::string* note) {
  if (weights != kernels::DType::kFp16) return zero::LossScaler().ToJson();
  ASSIGN_OR_RETURN(const zero::LossScaler begun, zero::LossScaler::Create(options));
  nlohmann::json json = begun.ToJson();
  const nlohmann::json& theirs = progress.loss_scaler;
  const auto number = [&](const char* name) {
    return theirs.is_object() && theirs.contains(name) && theirs[name].is_number();
  };
  const bool has = number("cur_scale");
  const bool said = has && theirs.contains("dynamic") && theirs["dynamic"].is_boolean();
  const bool moves = said ? theirs["dynamic"].get<bool>() : number("cur_iter");
  const auto kept = [&](const std::string& why) {
    *note = absl::StrCat("the checkpoint's loss scale ", why, ": this run's begins with ", begun.scale());
    return begun.ToJson();
  };
  if (!moves || !begun.dynamic()) {
    if (!has && begun.dynamic()) return kept("is not there");
    if (!has || (!moves && !begun.dynamic() && theirs["cur_scale"].get<double>() == begun.scale()))
      return json;
    return kept(absl::StrCat("is ", theirs["cur_scale"].get<double>(), moves ? " and dynamic" : " for ever",
                             ", and is not taken over"));
  }
  for (const auto& [ours, name] : {std::pair{"scale", "cur_scale"},
                                   {"iteration", "cur_iter"},
                                   {"last_overflow", "last_overflow_iter"},
                                   {"hysteresis_left", "cur_hysteresis"}}) {
    if (number(name)) json[ours] = theirs[name];
  }
  return zero::LossScaler::FromJson(json).ok() ? json : kept("does not fit the configuration");
}

absl::StatusOr<NameMap> ReadNames(const std::string& path) {
  const auto wrong = [&](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat("names in ", path, ": ", why));
  };
  const absl::StatusOr<nlohmann::json> json = ReadJsonObject(path);
  const char* const what =
      "must be a JSON object of texts: {\"transformer.wte.weight\": \"embedding.weight\", ...}";
  if (absl::IsNotFound(json.status())) return wrong("no such file");
  if (!json.ok()) return wrong(absl::StrCat(what, ": ", json.status().message()));
  NameMap names;
  for (const auto& [published, theirs] : json->items()) {
    if (!theirs.is_string()) return wrong(what);
    names[published] = theirs.get<std::string>();
  }
  return names;
}

absl::Status DeepSpeedCheckpoint::Wrong(const std::string& why) const {
  return absl::InvalidArgumentError(absl::StrCat(directory_, ": ", why));
}

absl::StatusOr<std::unique_ptr<DeepSpeedCheckpoint>> DeepSpeedCheckpoint::Open(const std::string& path,
                                                                               ModelLayout layout,
                                                                               const NameMap& names,
                                                                               CheckpointWords words) {
  ASSIGN_OR_RETURN(std::string directory, TagOf(path));
  std::unique_ptr<DeepSpeedCheckpoint> checkpoint(
      new DeepSpeedCheckpoint(std::move(directory), std::move(layout), std::move(words)));
  RETURN_IF_ERROR(checkpoint->Load(names));
  return checkpoint;
}

absl::StatusOr<std::unique_ptr<DeepSpeedCheckpoint>> DeepSpeedCheckpoint::OpenWeights(
    const std::string& path) {
  ASSIGN_OR_RETURN(std::string directory, TagOf(path));
  std::unique_ptr<DeepSpeedCheckpoint> checkpoint(new DeepSpeedCheckpoint(std::move(directory), {}, {}));
  checkpoint->weights_alone_ = true;
  RETURN_IF_ERROR(checkpoint->LoadWeights());
  return checkpoint;
}

absl::Status DeepSpeedCheckpoint::ReadFiles(Parameters* parameters) {
  ASSIGN_OR_RETURN(Listing listing, ListTag(directory_));
  if (listing.model.empty())
    return Wrong(absl::StrCat("no *", kModelEnding, ": it says at which step the run was"));
  model_files_ = std::move(listing.model);
  optimizer_ranks_ = static_cast<int64_t>(listing.optimizer.size());
  ASSIGN_OR_RETURN(const TorchFile* const model, OpenFile(model_files_.front()));
  RETURN_IF_ERROR(ReadModelStates(*model, listing.universal, parameters));
  return listing.universal ? ReadUniversal(parameters) : ReadPartitions(listing.optimizer, parameters);
}

absl::Status DeepSpeedCheckpoint::LoadWeights() {
  Parameters parameters;
  RETURN_IF_ERROR(ReadFiles(&parameters));
  RETURN_IF_ERROR(ReadFrozen(&parameters));
  std::set<std::string> frozen;
  for (const auto& [name, shape] : files_.front()->root()["frozen_param_shapes"].entries())
    frozen.insert(Text(name.text()));  // ReadFrozen has counted them
  const auto add = [&](const std::string& name, const std::string& holder, const Values& values) {
    weights_.push_back({.name = name,
                        .sizes = values.sizes,
                        .values = values.of.front(),
                        .tied_to = name == holder ? "" : holder,
                        .frozen = frozen.count(holder) > 0});
  };
  for (const auto& [name, values] : parameters) {
    const int64_t there = values.of.front().elements(), elements = ElementsOf(values.sizes);
    if (there != elements) return Wrong(absl::StrCat(name, " has ", there, " elements there, of ", elements));
    if (shared_.count(name) == 0) add(name, name, values);
  }
  for (const auto& [name, holder] : shared_) {
    if (const auto found = parameters.find(holder); found != parameters.end())
      add(name, holder, found->second);
  }
  progress_.unread.clear();  // of client_state, which is no weight
  RETURN_IF_ERROR(ReadBuffers());
  std::sort(weights_.begin(), weights_.end(),
            [](const Weight& a, const Weight& b) { return a.name < b.name; });
  return absl::OkStatus();
}

absl::Status DeepSpeedCheckpoint::Load(const NameMap& names) {
  Parameters parameters;
  RETURN_IF_ERROR(ReadFiles(&parameters));
  // The optimizer counts its own steps; where its state does not say, skipped ones are not counted.
  const int64_t counted = progress_.updates;
  progress_.updates = optimizer_step_.value_or(counted);
  if (progress_.updates < 1 || progress_.updates > progress_.step)
    return Wrong(absl::StrCat("its optimizer is at step ", progress_.updates, ", the run at ", progress_.step,
                              ": a checkpoint from before the first step has no moments"));
  return Match(names, &parameters);
}

absl::StatusOr<const TorchFile*> DeepSpeedCheckpoint::OpenFile(const std::string& name) {
  ASSIGN_OR_RETURN(std::unique_ptr<TorchFile> file,
                   TorchFile::Open(absl::StrCat(directory_, "/", name),
                                   std::clamp<uint64_t>(static_cast<uint64_t>(bytes_left_), kFreeFileBytes,
                                                        TorchFile::kMostBytes),
                                   kBytesPerPickleByte));
  files_.push_back(std::move(file));
  const TorchFile* const opened = files_.back().get();
  const int64_t free =
      kFreeFileBytes + std::max(static_cast<int64_t>(opened->disk_bytes()) / kDiskBytesPerByte,
                                static_cast<int64_t>(std::min(TorchFile::kMostBytesOfAny,
                                                              kBytesPerPickleByte * opened->pickle_bytes())));
  RETURN_IF_ERROR(SpendBytes(*opened, static_cast<int64_t>(opened->memory_bytes()) - free));
  return opened;
}

absl::Status DeepSpeedCheckpoint::SpendBytes(const TorchFile& file, int64_t bytes) {
  bytes_left_ -= bytes;
  if (bytes_left_ >= 0) return absl::OkStatus();
  return Wrong(absl::StrCat(file.path(), " describes more than is read of such a checkpoint"));
}

absl::StatusOr<std::string> DeepSpeedCheckpoint::TakeName(const TorchFile& file, const TorchValue& value) {
  if (value.kind() != Kind::kText || value.text().empty() || value.text().size() > kLongestName)
    return Wrong(absl::StrCat(file.path(), " has a name that no parameter has"));
  values_left_ -= kUnitsOfName;
  Spend(value, 0, &values_left_);
  RETURN_IF_ERROR(CheckLeft(file));
  return Text(value.text());
}

absl::Status DeepSpeedCheckpoint::CheckLeft(const TorchFile& file) const {
  if (values_left_ >= 0) return absl::OkStatus();
  return Wrong(absl::StrCat(file.path(), " has more values beside its tensors than are read"));
}

absl::StatusOr<nlohmann::json> DeepSpeedCheckpoint::ToJson(const TorchFile& file, const TorchValue& value) {
  nlohmann::json json = JsonOf(value, 0, &values_left_);
  RETURN_IF_ERROR(CheckLeft(file));
  return json;
}

absl::Status DeepSpeedCheckpoint::ReadModelStates(const TorchFile& file, bool universal,
                                                  Parameters* parameters) {
  const TorchValue root = file.root();
  const std::optional<int64_t> step = root["global_steps"].integer();
  if (!step.has_value() || *step < 0) return Wrong(absl::StrCat(file.path(), " has no global_steps"));
  sliced_ = root["mp_world_size"].integer().value_or(1) != 1;
  if (sliced_ && !universal) return Wrong("tensor parallelism is not served; use ds_to_universal there");
  progress_.ranks = std::max<int64_t>(1, root["dp_world_size"].integer().value_or(1));
  progress_.step = *step;
  progress_.updates = *step - root["skipped_steps"].integer().value_or(0);
  progress_.samples = std::max<int64_t>(0, root["global_samples"].integer().value_or(0));
  progress_.version = Text(root["ds_version"].text());
  RETURN_IF_ERROR(TakeClientState(file));
  const TorchValue buffers = root["buffer_names"];
  for (size_t i = 0; i < buffers.size(); ++i) {
    ASSIGN_OR_RETURN(progress_.buffers.emplace_back(), TakeName(file, buffers[i]));
  }
  ASSIGN_OR_RETURN(progress_.lr_scheduler, ToJson(file, root["lr_scheduler"]));
  ASSIGN_OR_RETURN(progress_.config, ToJson(file, root["ds_config"]));
  if (!weights_alone_ && !root["frozen_param_shapes"].entries().empty())
    return Wrong(absl::StrCat(OneLine(root["frozen_param_shapes"].entries().front().first.text()),
                              " is frozen, which is not served: all parameters must be trained"));
  for (const auto& [name, holder] : root["shared_params"].entries()) {
    ASSIGN_OR_RETURN(const std::string tied, TakeName(file, name));
    ASSIGN_OR_RETURN(shared_[tied], TakeName(file, holder));
  }
  const TorchValue groups = root["param_shapes"];
  for (size_t g = 0; g < groups.size(); ++g) {
    std::vector<std::string>& order = order_.emplace_back();
    values_left_ -= kUnitsOfName;
    RETURN_IF_ERROR(CheckLeft(file));
    for (const auto& [name, shape] : groups[g].entries()) {
      Values values;
      values.sizes = SizesOf(shape);
      ASSIGN_OR_RETURN(order.emplace_back(), TakeName(file, name));
      if (ElementsOf(values.sizes) < 0)
        return Wrong(absl::StrCat(file.path(), ": ", order.back(), " has no shape"));
      if (!parameters->emplace(order.back(), std::move(values)).second)
        return Wrong(absl::StrCat(file.path(), ": ", order.back(), " is there twice"));
    }
  }
  return absl::OkStatus();
}

absl::Status DeepSpeedCheckpoint::TakeClientState(const TorchFile& file) {
  for (const auto& [key, value] : file.root().entries()) {
    // Each may be said not to have been read.
    values_left_ -= kUnitsOfName;
    Spend(key, 0, &values_left_);
    RETURN_IF_ERROR(CheckLeft(file));
    const std::string name = Text(key.text());
    if (std::find(std::begin(kOwnKeys), std::end(kOwnKeys), name) != std::end(kOwnKeys)) continue;
    std::string why;
    if (key.kind() != Kind::kText || key.form() != TorchValue::Form::kOwn || name == "__penstock__") {
      const std::string number = key.integer().has_value() ? absl::StrCat(*key.integer()) : name;
      progress_.unread.push_back(absl::StrCat(number, " (such a key)"));
      continue;
    }
    nlohmann::json taken = ClientValue(&values_left_, &why).Of(value);
    RETURN_IF_ERROR(CheckLeft(file));
    if (why.empty() && !IsUtf8(nlohmann::json::array({name, taken}))) why = "a text that is no Unicode";
    if (why.empty()) {
      progress_.client[name] = std::move(taken);
    } else {
      progress_.unread.push_back(absl::StrCat(name, " (", why, ")"));
    }
  }
  return absl::OkStatus();
}

TorchValue DeepSpeedCheckpoint::FindModuleBuffer(const std::string& name, const NameMap& names) const {
  const TorchValue module = files_.front()->root()["module"];
  const auto named = names.find(name);
  if (named != names.end()) return module[named->second];
  for (const std::string& candidate : OwnNames(name)) {
    if (const TorchValue found = module[candidate]) return found;
  }
  return {};
}

absl::Status DeepSpeedCheckpoint::ReadModuleBuffer(const TorchTensor& buffer, std::span<std::byte> to) const {
  return files_.front()->Read(buffer, 0, to);
}

// The optimizer's options; the loss scale.
absl::Status DeepSpeedCheckpoint::TakeOptions(const TorchFile& file, const TorchValue& optimizer,
                                              const TorchValue& base) {
  if (weights_alone_ || !progress_.groups.empty()) return absl::OkStatus();  // every rank has them
  if (optimizer["loss_scaler"]) {
    ASSIGN_OR_RETURN(progress_.loss_scaler, ToJson(file, optimizer["loss_scaler"]));
  }
  ASSIGN_OR_RETURN(nlohmann::json groups, ToJson(file, base["param_groups"]));
  if (!groups.is_array() || groups.empty()) return absl::OkStatus();  // older ones keep the steps alone
  for (nlohmann::json& group : groups) {
    if (!group.is_object()) return Wrong(absl::StrCat(file.path(), ": a group of param_groups is no dict"));
    group.erase("params");
  }
  progress_.groups = std::move(groups);
  progress_.optimizer = progress_.groups[0];
  return absl::OkStatus();
}

// A count of updates: a number, or a tensor of one. nullopt: it is none.
absl::StatusOr<std::optional<int64_t>> DeepSpeedCheckpoint::ReadSteps(const TorchFile& file,
                                                                      const TorchValue& state) {
  std::optional<int64_t> step = state.integer();
  if (const TorchTensor* const tensor = state.tensor(); tensor != nullptr && tensor->elements == 1) {
    ScatteredTensor one;
    float value = 0;
    RETURN_IF_ERROR(one.Add(file, *tensor, 0, 1));
    RETURN_IF_ERROR(one.Read(0, 1, &value, &buffers_[0]));
    if (!(value >= 0 && value < 0x1p62F))
      return Wrong(absl::StrCat(file.path(), " says that ", value, " updates were made"));
    step = static_cast<int64_t>(value);
    progress_.step_is_tensor = true;
  }
  if (step.value_or(0) < 0 || step.value_or(0) >= int64_t{1} << 62)
    return Wrong(absl::StrCat(file.path(), " says that ", *step, " updates were made"));
  return step;
}

// The optimizer's count, the same wherever it is said.
absl::Status DeepSpeedCheckpoint::TakeSteps(const TorchFile& file, const TorchValue& state) {
  if (weights_alone_) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::optional<int64_t> step, ReadSteps(file, state));
  if (!step.has_value()) return absl::OkStatus();
  if (optimizer_step_.value_or(*step) != *step)
    return Wrong(absl::StrCat(file.path(), ": parameters have had ", *step, " and ", *optimizer_step_,
                              " updates: one count for all is served"));
  optimizer_step_ = step;
  return absl::OkStatus();
}

absl::Status DeepSpeedCheckpoint::ReadPartitions(const std::vector<std::string>& names,
                                                 Parameters* parameters) {
  const auto ranks = static_cast<int64_t>(names.size());
  int64_t stage = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    ASSIGN_OR_RETURN(const TorchFile* const file, OpenFile(names[static_cast<size_t>(rank)]));
    const TorchValue optimizer = file->root()["optimizer_state_dict"];
    if (optimizer.kind() != Kind::kDict)
      return Wrong(absl::StrCat(file->path(), " has no optimizer_state_dict"));
    const TorchValue zero_stage = optimizer["zero_stage"];
    stage = zero_stage.integer().value_or(zero_stage.size() > 0 ? zero_stage[0].integer().value_or(1) : 1);
    const int64_t count = optimizer["partition_count"].size() > 0
                              ? optimizer["partition_count"][0].integer().value_or(ranks)
                              : optimizer["partition_count"].integer().value_or(ranks);
    if (count != ranks)
      return Wrong(
          absl::StrCat(file->path(), " is of a run of ", count, " ranks, of which ", ranks, " are here"));
    RETURN_IF_ERROR(stage == 3 ? ReadRank3(*file, optimizer, rank, ranks, parameters)
                               : ReadRank12(*file, optimizer, parameters));
    if (rank >= kMostOpenRanks) files_.back()->Rest();
  }
  progress_.format = absl::StrCat("ZeRO-", stage, " of ", ranks, ranks == 1 ? " rank" : " ranks");
  return absl::OkStatus();
}

absl::StatusOr<DeepSpeedCheckpoint::FlatTensors> DeepSpeedCheckpoint::TakeGroup(const TorchFile& file,
                                                                                size_t group,
                                                                                const TorchValue& masters,
                                                                                const TorchValue& state,
                                                                                const char* where) {
  RETURN_IF_ERROR(SpendBytes(file, ScatteredTensor::kPieceBytes));
  RETURN_IF_ERROR(TakeSteps(file, state["step"]));
  const FlatTensors flat = {masters.tensor(), state[kMoments[1]].tensor(), state[kMoments[2]].tensor()};
  for (size_t k = 0; k < kinds(); ++k) {
    if (flat[k] == nullptr)
      return Wrong(absl::StrCat(file.path(), " has no ", kUniversal[k], " of parameter group ", group,
                                weights_alone_ ? "" : ": Adam and AdamW are served", where));
  }
  return flat;
}

absl::Status DeepSpeedCheckpoint::AddPart(const TorchFile& file, const FlatTensors& flat, int64_t first,
                                          int64_t elements, Values* values) {
  RETURN_IF_ERROR(SpendBytes(file, static_cast<int64_t>(kinds()) * ScatteredTensor::kPieceBytes));
  for (size_t k = 0; k < kinds(); ++k) RETURN_IF_ERROR(values->of[k].Add(file, *flat[k], first, elements));
  return absl::OkStatus();
}

// A rank's flat tensor of each group has pieces of parameters, as its mappings say.
absl::Status DeepSpeedCheckpoint::ReadRank12(const TorchFile& file, const TorchValue& optimizer,
                                             Parameters* parameters) {
  const TorchValue masters = optimizer["single_partition_of_fp32_groups"];
  const TorchValue mappings = optimizer["param_slice_mappings"], base = optimizer["base_optimizer_state"];
  if (masters.size() == 0 || mappings.size() != masters.size())
    return Wrong(absl::StrCat(file.path(),
                              " does not say where its parameters are (param_slice_mappings): load and "
                              "save it with a newer DeepSpeed"));
  RETURN_IF_ERROR(TakeOptions(file, optimizer, base));
  RETURN_IF_ERROR(TakeSteps(file, optimizer["base_optimizer_state_step"]));
  for (size_t group = 0; group < masters.size(); ++group) {
    const TorchValue state =
        base.kind() == Kind::kDict ? base["state"].AtNumber(static_cast<int64_t>(group)) : base[group];
    ASSIGN_OR_RETURN(const FlatTensors flat, TakeGroup(file, group, masters[group], state, ""));
    for (const auto& [name, address] : mappings[group].entries()) {
      if (name.text().size() > kLongestName)
        return Wrong(absl::StrCat(file.path(), " has a name that no parameter has"));
      const auto found = parameters->find(Text(name.text()));
      const std::optional<int64_t> start = address["start"].integer(), count = address["numel"].integer();
      if (found == parameters->end() || !start.has_value() || !count.has_value())
        return Wrong(absl::StrCat(file.path(), ": ", OneLine(name.text()), " is in no list of parameters"));
      RETURN_IF_ERROR(AddPart(file, flat, *start, *count, &found->second));
    }
  }
  return absl::OkStatus();
}

// Every parameter is cut evenly over the ranks; a rank's flat tensors have its parts in the order of
// parameters, which a tensor never cuts: one for each group, or several (sub_group_size).
absl::Status DeepSpeedCheckpoint::ReadRank3(const TorchFile& file, const TorchValue& optimizer, int64_t rank,
                                            int64_t ranks, Parameters* parameters) {
  const TorchValue masters = optimizer["fp32_flat_groups"], base = optimizer["optimizer_state_dict"];
  if (optimizer["ds_zero_partition_groups"].size() > 0)
    return Wrong(absl::StrCat(file.path(), ": expert parallelism is not served"));
  if (masters.size() == 0 || masters.size() < order_.size())
    return Wrong(absl::StrCat(file.path(), " has ", masters.size(),
                              " flat tensors, and the list of parameters has ", order_.size(), " groups"));
  RETURN_IF_ERROR(TakeOptions(file, optimizer, base));
  size_t number = 0;
  FlatTensors flat{};
  int64_t at = 0;
  for (const std::vector<std::string>& group : order_) {
    flat = {};  // the next group has a tensor of its own
    for (const std::string& name : group) {
      Values& values = (*parameters)[name];
      const int64_t elements = ElementsOf(values.sizes), part = (elements + ranks - 1) / ranks;
      const int64_t mine = std::clamp<int64_t>(elements - rank * part, 0, part);
      if (flat[0] == nullptr || at + part > flat[0]->elements) {
        const TorchValue state = base["state"].AtNumber(static_cast<int64_t>(number));
        ASSIGN_OR_RETURN(flat,
                         TakeGroup(file, number, masters[number], state, ", with their state in memory"));
        ++number;
        at = 0;
      }
      RETURN_IF_ERROR(AddPart(file, flat, at, mine, &values));
      at += part;
    }
  }
  if (number != masters.size())
    return Wrong(absl::StrCat(file.path(), " has ", masters.size(), " flat tensors, and the parameters fill ",
                              number));
  return absl::OkStatus();
}

// zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt: a tensor, or a dict with it.
absl::Status DeepSpeedCheckpoint::ReadUniversal(Parameters* parameters) {
  progress_.format = "universal";
  RETURN_IF_ERROR(ReadUniversalState());
  int64_t most = -1;  // updates of a parameter
  ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectory(directory_ + "/zero"));
  for (const std::string& name : names) {
    ASSIGN_OR_RETURN(const bool is_parameter, IsDirectory(absl::StrCat(directory_, "/zero/", name)));
    if (!is_parameter) continue;
    if (shared_.count(name) > 0) continue;  // a tied parameter's values, without moments: the holder has both
    // Persistent buffers of floating point are there too, without moments.
    if (std::find(progress_.buffers.begin(), progress_.buffers.end(), name) != progress_.buffers.end())
      continue;
    if (!weights_alone_ && !Exists(absl::StrCat(directory_, "/zero/", name, "/", kUniversal[1], ".pt")))
      return Wrong(
          absl::StrCat(name, " has no moments there: a parameter that is not trained, which is not served"));
    Values& values = (*parameters)[name];
    if (sliced_) values.sizes.clear();
    for (size_t k = 0; k < kinds(); ++k) {
      const absl::StatusOr<const TorchFile*> file =
          OpenFile(absl::StrCat("zero/", name, "/", kUniversal[k], ".pt"));
      RETURN_IF_ERROR(file.status());
      const TorchValue root = (*file)->root();
      const TorchTensor* const tensor = root.tensor() != nullptr ? root.tensor() : root["param"].tensor();
      if (tensor == nullptr) return Wrong(absl::StrCat((*file)->path(), " has no tensor"));
      RETURN_IF_ERROR(values.of[k].Add(**file, *tensor, 0, tensor->elements));
      if (values.sizes.empty() && (weights_alone_ || tensor->sizes.size() != 1)) values.sizes = tensor->sizes;
      files_.back()->Rest();  // three a parameter
    }
    if (Exists(absl::StrCat(directory_, "/zero/", name, "/step.pt"))) {
      ASSIGN_OR_RETURN(const TorchFile* const step, OpenFile(absl::StrCat("zero/", name, "/step.pt")));
      if (!weights_alone_) {
        ASSIGN_OR_RETURN(values.updates, ReadSteps(*step, step->root()));
      }
      files_.pop_back();
    }
    if (!values.updates.has_value()) continue;  // of an older DeepSpeed, or only weights are read
    most = std::max(most, *values.updates);
    if (*values.updates > optimizer_step_.value_or(most))
      return Wrong(absl::StrCat(name, " has had ", *values.updates, " updates, and the optimizer made ",
                                *optimizer_step_));
  }
  if (!optimizer_step_.has_value() && most >= 0) optimizer_step_ = most;
  return absl::OkStatus();
}

absl::Status DeepSpeedCheckpoint::ReadUniversalState() {
  if (!Exists(directory_ + "/zero/optimizer_state.pt")) return absl::OkStatus();
  ASSIGN_OR_RETURN(const TorchFile* const file, OpenFile("zero/optimizer_state.pt"));
  const TorchValue root = file->root();
  // Of stage 3 the optimizer's own dict, of stages 1 and 2 what it has beside the state.
  const TorchValue base = root["optimizer_state_dict"] ? root["optimizer_state_dict"] : root;
  RETURN_IF_ERROR(TakeOptions(*file, root, root["param_groups"] ? root : base));
  return TakeSteps(*file, base["state"].AtNumber(0)["step"]);
}

// A frozen parameter is whole in the first rank's file, or under stage 3 cut evenly over those of all ranks.
absl::Status DeepSpeedCheckpoint::ReadFrozen(Parameters* parameters) {
  const auto shapes = files_.front()->root()["frozen_param_shapes"].entries();
  if (shapes.empty()) return absl::OkStatus();
  std::vector<const TorchFile*> files = {files_.front().get()};
  for (size_t rank = 1; rank < model_files_.size(); ++rank) {
    ASSIGN_OR_RETURN(const TorchFile* const file, OpenFile(model_files_[rank]));
    files.push_back(file);
    if (static_cast<int64_t>(rank) >= kMostOpenRanks) files_.back()->Rest();
  }
  const auto ranks = static_cast<int64_t>(files.size());
  for (const auto& [key, shape] : shapes) {
    ASSIGN_OR_RETURN(const std::string name, TakeName(*files_.front(), key));
    Values& values = (*parameters)[name];
    if (values.of.front().elements() > 0) continue;  // the universal format has it with the others
    values.sizes = SizesOf(shape);
    const int64_t elements = ElementsOf(values.sizes), part = elements / ranks + (elements % ranks > 0);
    for (int64_t rank = 0; rank < ranks && values.of.front().elements() < elements; ++rank) {
      const TorchFile& file = *files[static_cast<size_t>(rank)];
      const TorchTensor* const tensor = file.root()["frozen_param_fragments"][name].tensor();
      if (tensor == nullptr) return Wrong(absl::StrCat(file.path(), " has no values of ", name));
      const bool whole = rank == 0 && tensor->elements == elements;
      if (!whole && optimizer_ranks_ > 0 && ranks != optimizer_ranks_)
        return Wrong(absl::StrCat("a part of ", name, " is missing: ", ranks, " of ", optimizer_ranks_,
                                  " ranks have their *", kModelEnding));
      const int64_t mine = whole ? elements : std::clamp<int64_t>(elements - rank * part, 0, part);
      RETURN_IF_ERROR(values.of.front().Add(file, *tensor, 0, mine));
    }
  }
  return absl::OkStatus();
}

// The module's, or what the universal format has among the parameters.
absl::Status DeepSpeedCheckpoint::ReadBuffers() {
  const TorchFile* const model = files_.front().get();
  for (const std::string& name : progress_.buffers) {
    const TorchFile* file = model;
    const TorchTensor* tensor = model->root()["module"][name].tensor();
    const std::string path = absl::StrCat("zero/", name, "/", kUniversal[0], ".pt");
    if (tensor == nullptr && Exists(absl::StrCat(directory_, "/", path))) {
      ASSIGN_OR_RETURN(file, OpenFile(path));
      files_.back()->Rest();  // one a buffer
      tensor = file->root().tensor() != nullptr ? file->root().tensor() : file->root()["param"].tensor();
    }
    // (The universal format widens what it has there: another type is none that it wrote.)
    if (tensor == nullptr || (file != model && !IsFloat(tensor->dtype))) {
      progress_.unread.push_back(absl::StrCat(name, " (a buffer without values)"));
      continue;
    }
    Weight weight{name, tensor->sizes, {}};
    if (IsFloat(tensor->dtype)) {
      RETURN_IF_ERROR(weight.values.Add(*file, *tensor, 0, tensor->elements));
    } else {
      weight.other = *tensor;
    }
    weights_.push_back(std::move(weight));
  }
  return absl::OkStatus();
}

std::vector<std::string> DeepSpeedCheckpoint::OwnNames(const std::string& published) const {
  const std::string bare(absl::StripPrefix(published, layout_.prefix));
  return {published, bare, "module." + published, "module." + bare};
}

// Finds what each parameter of the model has become, and that nothing is left over.
absl::Status DeepSpeedCheckpoint::Match(const NameMap& names, Parameters* parameters) {
  // The list of shapes may have names of the model under which there are no values, since --names says where
  // they are; and a tied parameter's, which are its holder's.
  std::set<std::string> elsewhere;
  for (const auto& [published, theirs] : names) {
    for (const std::string& name : OwnNames(published)) elsewhere.insert(name);
  }
  std::set<std::string> left;
  for (const auto& [name, values] : *parameters) {
    const bool empty = values.of.front().elements() == 0;
    if (!empty || (elsewhere.count(name) == 0 && shared_.count(name) == 0)) left.insert(name);
  }
  for (const auto& [published, theirs] : names) {
    const bool known = std::any_of(layout_.tensors.begin(), layout_.tensors.end(),
                                   [&](const PublishedTensor& tensor) { return tensor.name == published; });
    if (!known)
      return Wrong(absl::StrCat(words_.names, " has ", published, ", which is no parameter of this model"));
  }
  for (const PublishedTensor& tensor : layout_.tensors) {
    const auto named = names.find(tensor.name);
    const std::vector<std::string> candidates =
        named != names.end() ? std::vector<std::string>{named->second} : OwnNames(tensor.name);
    auto found = parameters->end();
    for (const std::string& name : candidates) {
      const auto holder = shared_.find(name);
      found = parameters->find(holder != shared_.end() ? holder->second : name);
      if (found != parameters->end()) break;
    }
    if (found == parameters->end())
      return Wrong(absl::StrCat("no parameter ", candidates.front(),
                                ": not of this model, or under another name (", words_.names,
                                " says which)"));
    const std::vector<uint64_t> shape = tensor.published_shape();
    const std::vector<int64_t>& sizes = found->second.sizes;
    const bool same =
        sizes.empty() || std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end(),
                                    [](int64_t a, uint64_t b) { return a == static_cast<int64_t>(b); });
    if (!same)
      return Wrong(absl::StrCat(found->first, " is [", absl::StrJoin(sizes, ", "), "] there and [",
                                absl::StrJoin(shape, ", "), "] in this model: ", words_.model));
    for (const ScatteredTensor& values : found->second.of) {
      if (values.elements() != tensor.elements())
        return Wrong(absl::StrCat(found->first, " has ", values.elements(), " elements there and ",
                                  tensor.elements(), " in this model"));
    }
    sources_.push_back(found->second.of);
    updates_.push_back(std::min(found->second.updates.value_or(progress_.updates), progress_.updates));
    left.erase(found->first);
  }
  if (!left.empty()) return Wrong(absl::StrCat(*left.begin(), " has no place in this model: ", words_.model));
  return absl::OkStatus();
}

absl::Status DeepSpeedCheckpoint::CheckRead() const {
  for (const std::unique_ptr<TorchFile>& file : files_) RETURN_IF_ERROR(file->CheckRead());
  return absl::OkStatus();
}

absl::Status DeepSpeedCheckpoint::Read(zero::StateKind kind, int block, int64_t first, int64_t elements,
                                       float* to) {
  std::memset(to, 0, static_cast<size_t>(elements) * sizeof(float));
  const auto k = static_cast<size_t>(kind);
  if (k >= kKinds) return absl::InvalidArgumentError("a checkpoint has masters and moments");
  return ForTensorsIn(layout_, block, first, elements, [&](size_t i, const TensorPiece& piece) {
    return sources_[i][k].ReadParameter(layout_.tensors[i], piece.from, piece.to, to + piece.at,
                                        &buffers_[k]);
  });
}

}  // namespace penstock::models
