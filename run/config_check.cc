// Walks a configuration along the table of settings.cc.
#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "run/settings.h"
#include "tiering/plan/byte_size.h"
#include "zero/config/config_json.h"
#include "zero/config/nearest_name.h"

namespace penstock::run {

using zero::DidYouMean;
using zero::EditDistance;
using zero::Printable;
using zero::ShowValue;
namespace {

using Json = nlohmann::ordered_json;

std::string Join(const std::string& path, std::string_view key) {
  return path.empty() ? std::string(key) : absl::StrCat(path, ".", std::string(key));
}

bool SameName(std::string_view a, std::string_view b) {
  return absl::EqualsIgnoreCase(absl::string_view(a.data(), a.size()), absl::string_view(b.data(), b.size()));
}

// Optimizers that DeepSpeed knows and Penstock does not serve, and why.
struct OtherOptimizer {
  std::string_view name, why;
};
constexpr std::string_view kCompresses = "it compresses what ranks exchange; gradients cross ranks unchanged";
constexpr std::string_view kWholeTensor =
    "an update needs its whole tensor at once, and state passes through memory in tiles";
constexpr std::string_view kMuP = "it scales rates by the shape of each tensor";
constexpr auto kOtherOptimizers = std::to_array<OtherOptimizer>({{"Muon", kWholeTensor},
                                                                 {"OneBitAdam", kCompresses},
                                                                 {"OneBitLamb", kCompresses},
                                                                 {"ZeroOneAdam", kCompresses},
                                                                 {"MuAdam", kMuP},
                                                                 {"MuAdamW", kMuP},
                                                                 {"MuSGD", kMuP}});

class Walker {
 public:
  absl::Status Walk(std::string_view section, const std::string& shown, const std::string& canonical,
                    const Json& object) {
    // The type decides what the parameters may be, so it goes first wherever it stands.
    const auto type = object.find("type");
    const bool typed = !SectionKeys(section).empty() && Find(section, "type") != nullptr;
    if (typed && type != object.end()) {
      RETURN_IF_ERROR(Key(section, shown, canonical, "type", *type));
    }
    for (const auto& [name, value] : object.items()) {
      if (typed && name == "type") continue;
      RETURN_IF_ERROR(Key(section, shown, canonical, name, value));
    }
    return absl::OkStatus();
  }

  // The booleans of DeepSpeed's first years, which the offload blocks have replaced.
  absl::Status OldOffloadFlags() {
    constexpr auto kFlags = std::to_array<std::array<std::string_view, 2>>(
        {{"cpu_offload", "offload_optimizer"}, {"cpu_offload_param", "offload_param"}});
    for (const auto& [old, block] : kFlags) {
      const std::string path = absl::StrCat("zero_optimization.", std::string(old));
      const std::string replaced_by = absl::StrCat("zero_optimization.", std::string(block));
      const auto it = result_.served.find(path);
      if (it == result_.served.end()) continue;
      if (given_.contains(replaced_by)) {
        return absl::InvalidArgumentError(absl::StrCat(path, ": given beside ", replaced_by,
                                                       ", which has replaced it; keep ", replaced_by));
      }
      const bool on = it->second.get<bool>();
      result_.served.erase(it);
      if (on) result_.served[replaced_by + ".device"] = "cpu";
      result_.notes.push_back(absl::StrCat(path, ": an old name; write \"", std::string(block),
                                           "\": {\"device\": \"", on ? "cpu" : "none", "\"}"));
    }
    return absl::OkStatus();
  }

  // The value in the form that CheckedKeys documents.
  static absl::StatusOr<nlohmann::json> Value(const Setting& spec, const std::string& shown,
                                              const Json& value);

  CheckedKeys Take() {
    if (!needless_.empty()) {
      result_.notes.push_back(absl::StrCat("accepted and ignored, the results are the same without: ",
                                           absl::StrJoin(needless_, ", ")));
    }
    return std::move(result_);
  }

 private:
  static const Setting* Find(std::string_view section, std::string_view name) {
    for (const Setting& spec : SectionKeys(section)) {
      if (spec.name == name) return &spec;
    }
    return nullptr;
  }

  absl::Status Key(std::string_view section, const std::string& parent, const std::string& canonical_parent,
                   const std::string& name, const Json& value) {
    const std::string shown = Join(parent, Printable(name));
    const Setting* spec = Find(section, name);
    if (spec == nullptr) {
      absl::Status unknown = Unknown(section, shown, name);
      if (!section.empty() || Misspelt(name)) return unknown;
      result_.notes.push_back(absl::StrCat(unknown.message(), "; passed over, as DeepSpeed does"));
      return absl::OkStatus();
    }
    const std::string path = Join(canonical_parent, spec->canonical.empty() ? spec->name : spec->canonical);
    if (value.is_null()) return absl::OkStatus();
    const auto [other, first] = given_.try_emplace(path, shown);
    if (!first) {
      return absl::InvalidArgumentError(absl::StrCat(shown, ": given beside ", other->second,
                                                     ", another spelling of the same key; keep one"));
    }
    if (spec->old_name) {
      result_.notes.push_back(absl::StrCat(shown, ": an old name of ", std::string(spec->canonical)));
    }
    if (value == "auto" && spec->choices.find("auto") == std::string_view::npos) {
      result_.autos.insert(path);
      return absl::OkStatus();
    }
    switch (spec->use) {
      case KeyUse::kRefused:
        if (Neutral(*spec, value)) return absl::OkStatus();
        return absl::InvalidArgumentError(absl::StrCat(shown, ": not served: ", std::string(spec->why)));
      case KeyUse::kNeedless:
      case KeyUse::kIgnored: {
        // Of a feature that is switched off there is nothing to say.
        if (value.is_object() && value.contains("enabled") && value["enabled"] == false)
          return absl::OkStatus();
        if (!spec->neutral.empty() && value == Json::parse(spec->neutral)) return absl::OkStatus();
        // Checked all the same: what DeepSpeed would refuse is a slip of the pen.
        if (spec->type == KeyType::kObject && !SectionKeys(path).empty()) {
          const size_t told = needless_.size();
          RETURN_IF_ERROR(Object(shown, path, value));
          needless_.resize(told);  // that the whole has no effect is said once
        } else if (spec->type != KeyType::kAny) {
          ASSIGN_OR_RETURN(const nlohmann::json checked, Value(*spec, shown, value));
        }
        if (spec->use == KeyUse::kNeedless) {
          needless_.push_back(shown);
        } else {
          result_.notes.push_back(absl::StrCat(shown, ": accepted and ignored: ", std::string(spec->why)));
        }
        return absl::OkStatus();
      }
      case KeyUse::kServed:
        break;
    }
    if (spec->type == KeyType::kObject) return Object(shown, path, value);
    ASSIGN_OR_RETURN(nlohmann::json checked, Value(*spec, shown, value));
    result_.served[path] = std::move(checked);
    return absl::OkStatus();
  }

  absl::Status Object(const std::string& shown, const std::string& path, const Json& value) {
    if (!value.is_object()) return Wrong(shown, "an object", value);
    // Of a feature that is switched off nothing is said; its keys may be some that are refused.
    const bool feature =
        path == "elasticity" || path == "flops_profiler" || path == "comms_logger" || path == "wandb";
    if (feature && value.contains("enabled") && value["enabled"] == false) return absl::OkStatus();
    if (path != "optimizer.params" && path != "scheduler.params") {
      RETURN_IF_ERROR(Walk(path, shown, path, value));
      // What has parameters must say whose they are.
      if ((path == "optimizer" || path == "scheduler") && !value.empty() &&
          !result_.served.contains(path + ".type")) {
        return absl::InvalidArgumentError(
            absl::StrCat(shown, ".type: missing; it is one of ", ChoicesOf(*Find(path, "type"))));
      }
      return absl::OkStatus();
    }
    const auto type = result_.served.find(path == "optimizer.params" ? "optimizer.type" : "scheduler.type");
    if (type == result_.served.end()) return absl::OkStatus();  // the caller reports the missing type
    return Walk(absl::StrCat(path, "/", type->second.get<std::string>()), shown, path, value);
  }

  // A key of the top level with a slip of the pen, rather than one of somebody else's.
  static bool Misspelt(std::string_view name) {
    constexpr size_t kLong = 8;
    const std::span<const Setting> keys = SectionKeys("");
    const size_t slips = name.size() < kLong ? 1 : 2;
    return std::any_of(keys.begin(), keys.end(), [name, slips](const Setting& spec) {
      const size_t shorter = std::min(name.size(), spec.name.size());
      return std::max(name.size(), spec.name.size()) - shorter <= slips &&
             EditDistance(name, spec.name) <= slips;
    });
  }

  static bool Neutral(const Setting& spec, const Json& value) {
    if (value.is_boolean() && !value.get<bool>() && spec.neutral != "true") return true;
    if (value.is_object()) {
      if (value.empty()) return true;
      const auto enabled = value.find("enabled");
      return enabled != value.end() && *enabled == false;
    }
    if (spec.neutral.empty() || value.is_array()) return false;
    return value == Json::parse(spec.neutral);
  }

  static absl::Status Wrong(const std::string& shown, std::string_view wanted, const Json& value) {
    return absl::InvalidArgumentError(
        absl::StrCat(shown, ": must be ", std::string(wanted), ", not ", ShowValue(value)));
  }

  static constexpr std::string_view kSizeKind = "a size such as \"4GiB\"";

  static absl::StatusOr<nlohmann::json> WholeValue(const Setting& spec, const std::string& shown,
                                                   const Json& value) {
    const std::string_view kind = spec.type == KeyType::kSize ? kSizeKind : "a whole number";
    int64_t whole = 0;
    if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) {
      return Wrong(shown, RangeOf(spec, kind), value);
    }
    if (value.is_number_integer()) {
      whole = value.get<int64_t>();
    } else if (value.is_number_float()) {
      const double number = value.get<double>();
      if (number != std::floor(number) || std::fabs(number) >= 0x1p63)
        return Wrong(shown, RangeOf(spec, kind), value);
      whole = static_cast<int64_t>(number);
    } else {
      return Wrong(shown, kind, value);
    }
    if (!InRange(spec, static_cast<double>(whole))) return Wrong(shown, RangeOf(spec, kind), value);
    return nlohmann::json(whole);
  }

  static absl::StatusOr<nlohmann::json> ChoiceValue(const Setting& spec, const std::string& shown,
                                                    const Json& value) {
    const std::string choices = ChoicesOf(spec);
    if (!value.is_string()) return Wrong(shown, absl::StrCat("one of ", choices), value);
    const auto& given = value.get_ref<const std::string&>();
    std::vector<std::string_view> names;
    for (const absl::string_view name :
         absl::StrSplit(absl::string_view(spec.choices.data(), spec.choices.size()), '|')) {
      names.emplace_back(name.data(), name.size());
      if (SameName(given, names.back())) return nlohmann::json(std::string(names.back()));
    }
    if (spec.choices == kServedOptimizers) {
      for (const auto& [other, why] : kOtherOptimizers) {
        if (SameName(given, other)) {
          return absl::InvalidArgumentError(absl::StrCat(shown, ": ", std::string(other),
                                                         " is not served: ", std::string(why),
                                                         "; Penstock's optimizers are ", choices));
        }
      }
    }
    return absl::InvalidArgumentError(absl::StrCat(shown, ": must be one of ", choices, ", not ",
                                                   ShowValue(value), DidYouMean(given, names)));
  }

  static bool InRange(const Setting& spec, double number) {
    return std::isfinite(number) && number >= spec.least && number <= spec.most;
  }

  // Where else a key of this name is at home.
  static std::string Elsewhere(std::string_view section, const std::string& name) {
    for (const std::string_view other : SectionPaths()) {
      if (other == section || Find(other, name) == nullptr) continue;
      const std::string place(other);
      const size_t slash = place.find('/');
      if (slash != std::string::npos) {
        return absl::StrCat("it belongs in the ", place.substr(0, slash), " of ", place.substr(slash + 1));
      }
      return place.empty() ? "it belongs at the top level" : absl::StrCat("it belongs in ", place);
    }
    return "";
  }

  static absl::Status Unknown(std::string_view section, const std::string& shown, const std::string& name) {
    std::vector<std::string_view> names;
    for (const Setting& spec : SectionKeys(section)) names.push_back(spec.name);
    std::string hint = DidYouMean(name, names);
    if (const std::string elsewhere = Elsewhere(section, name); !elsewhere.empty()) {
      hint = absl::StrCat("; ", elsewhere);
    } else if (hint.empty() && names.size() <= 14) {
      hint = absl::StrCat(
          "; known here: ",
          absl::StrJoin(names, ", ", [](std::string* out, std::string_view n) { out->append(n); }));
    }
    return absl::InvalidArgumentError(absl::StrCat(shown, ": no such key", hint));
  }

  CheckedKeys result_;
  std::vector<std::string> needless_;         // paths as given
  std::map<std::string, std::string> given_;  // canonical path -> the path as given
};

absl::StatusOr<nlohmann::json> Walker::Value(const Setting& spec, const std::string& shown,
                                             const Json& value) {
  switch (spec.type) {
    case KeyType::kBool:
      if (!value.is_boolean()) return Wrong(shown, "true or false", value);
      return nlohmann::json(value.get<bool>());
    case KeyType::kText:
      if (!value.is_string()) return Wrong(shown, "text", value);
      if (value.get_ref<const std::string&>().empty()) return Wrong(shown, "text that is not empty", value);
      return nlohmann::json(value.get<std::string>());
    case KeyType::kPath:
      if (!value.is_string()) return Wrong(shown, "text", value);
      return nlohmann::json(value.get<std::string>());
    case KeyType::kChoice:
      return ChoiceValue(spec, shown, value);
    case KeyType::kWhole:
      return WholeValue(spec, shown, value);
    case KeyType::kNumber: {
      if (!value.is_number()) return Wrong(shown, "a number", value);
      const double number = value.get<double>();
      if (!InRange(spec, number)) return Wrong(shown, RangeOf(spec, "a number"), value);
      return nlohmann::json(number);
    }
    case KeyType::kSize: {
      if (!value.is_string()) return WholeValue(spec, shown, value);
      const absl::StatusOr<int64_t> bytes = tiering::ParseSize(value.get_ref<const std::string&>());
      if (!bytes.ok()) return absl::InvalidArgumentError(absl::StrCat(shown, ": ", bytes.status().message()));
      if (!InRange(spec, static_cast<double>(*bytes))) return Wrong(shown, RangeOf(spec, kSizeKind), value);
      return nlohmann::json(*bytes);
    }
    case KeyType::kPair: {
      const auto fits = [](const Json& v) {
        return v.is_number() && v.get<double>() >= 0 && v.get<double>() < 1;
      };
      if (!value.is_array() || value.size() != 2 || !fits(value[0]) || !fits(value[1])) {
        return Wrong(shown, "two numbers, each at least 0 and below 1", value);
      }
      return nlohmann::json::array({value[0].get<double>(), value[1].get<double>()});
    }
    case KeyType::kWholes: {
      constexpr size_t kMost = 64;
      if (!value.is_array() || value.empty() || value.size() > kMost)
        return Wrong(shown, absl::StrCat("a list of whole numbers, at most ", kMost), value);
      nlohmann::json wholes = nlohmann::json::array();
      for (const Json& each : value) {
        ASSIGN_OR_RETURN(nlohmann::json whole, WholeValue(spec, shown, each));
        wholes.push_back(std::move(whole));
      }
      return wholes;
    }
    case KeyType::kPaths: {
      constexpr size_t kMost = 64;
      const auto is_path = [](const Json& each) {
        return each.is_string() && !each.get_ref<const std::string&>().empty();
      };
      if (!value.is_array() || value.empty() || value.size() > kMost ||
          !std::all_of(value.begin(), value.end(), is_path))
        return Wrong(shown, absl::StrCat("a list of directories, at most ", kMost), value);
      return value;
    }
    case KeyType::kNames: {
      constexpr size_t kMost = 100'000;
      if (!value.is_array() || value.size() > kMost ||
          !std::all_of(value.begin(), value.end(), [](const Json& each) { return each.is_string(); }))
        return Wrong(shown, "a list of names", value);
      return value;
    }
    case KeyType::kObject:
      if (!value.is_object()) return Wrong(shown, "an object", value);
      return nlohmann::json();
    case KeyType::kAny:
      break;
  }
  return nlohmann::json();
}

}  // namespace

absl::StatusOr<CheckedKeys> CheckKeys(const nlohmann::ordered_json& root) {
  Walker walker;
  RETURN_IF_ERROR(walker.Walk("", "", "", root));
  RETURN_IF_ERROR(walker.OldOffloadFlags());
  return walker.Take();
}

absl::StatusOr<nlohmann::json> CheckValue(const Setting& setting, const std::string& spelling,
                                          const nlohmann::ordered_json& value) {
  return Walker::Value(setting, spelling, value);
}

}  // namespace penstock::run
