#include "zero/config/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace penstock::zero {
namespace {

// For products of two step counts.
__extension__ typedef __int128 Wide;

constexpr double kPi = 3.14159265358979323846;

// ---- Names and fields: one list for each schedule serves writing, reading and counting.
// -------------------------------

std::string_view TypeName(const Constant&) { return "Constant"; }
std::string_view TypeName(const WarmupThenCosine&) { return "WarmupThenCosine"; }
std::string_view TypeName(const LrRangeTest&) { return "LRRangeTest"; }
std::string_view TypeName(const OneCycle&) { return "OneCycle"; }
std::string_view TypeName(const WarmupLr&) { return "WarmupLR"; }
std::string_view TypeName(const WarmupDecayLr&) { return "WarmupDecayLR"; }
std::string_view TypeName(const WarmupCosineLr&) { return "WarmupCosineLR"; }

template <typename Spec, typename Visitor>
void VisitFields(Spec& s, const Visitor& visit) {
  using T = std::remove_const_t<Spec>;
  if constexpr (std::is_same_v<T, Constant>) {
    visit("lr", s.lr);
  } else if constexpr (std::is_same_v<T, WarmupThenCosine>) {
    visit("lr", s.lr);
    visit("min_lr", s.min_lr);
    visit("warmup", s.warmup);
    visit("horizon", s.horizon);
  } else if constexpr (std::is_same_v<T, LrRangeTest>) {
    visit("min_lr", s.min_lr);
    visit("step_size", s.step_size);
    visit("step_rate", s.step_rate);
    visit("staircase", s.staircase);
  } else if constexpr (std::is_same_v<T, OneCycle>) {
    visit("cycle_min_lr", s.cycle_min_lr);
    visit("cycle_max_lr", s.cycle_max_lr);
    visit("decay_lr_rate", s.decay_lr_rate);
    visit("first_step_size", s.first_step_size);
    visit("second_step_size", s.second_step_size);
    visit("first_stair_count", s.first_stair_count);
    visit("second_stair_count", s.second_stair_count);
    visit("decay_step_size", s.decay_step_size);
    visit("cycle_momentum", s.cycle_momentum);
    visit("cycle_min_mom", s.cycle_min_mom);
    visit("cycle_max_mom", s.cycle_max_mom);
    visit("decay_mom_rate", s.decay_mom_rate);
  } else if constexpr (std::is_same_v<T, WarmupLr>) {
    visit("warmup_min_lr", s.warmup_min_lr);
    visit("warmup_max_lr", s.warmup_max_lr);
    visit("warmup_num_steps", s.warmup_num_steps);
    visit("warmup_type", s.warmup_type);
  } else if constexpr (std::is_same_v<T, WarmupDecayLr>) {
    VisitFields(s.warmup, visit);
    visit("total_num_steps", s.total_num_steps);
  } else {
    static_assert(std::is_same_v<T, WarmupCosineLr>);
    visit("lr", s.lr);
    visit("total_num_steps", s.total_num_steps);
    visit("warmup_min_ratio", s.warmup_min_ratio);
    visit("warmup_num_steps", s.warmup_num_steps);
    visit("cos_min_ratio", s.cos_min_ratio);
    visit("warmup_type", s.warmup_type);
  }
}

nlohmann::json FieldToJson(double value) { return value; }
nlohmann::json FieldToJson(int64_t value) { return value; }
nlohmann::json FieldToJson(bool value) { return value; }
nlohmann::json FieldToJson(WarmupType value) { return value == WarmupType::kLog ? "log" : "linear"; }
nlohmann::json FieldToJson(const std::optional<int64_t>& value) {
  return value ? nlohmann::json(*value) : nlohmann::json(nullptr);
}

absl::Status BadField(std::string_view name, std::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("schedule state: \"", std::string(name), "\" ", std::string(what)));
}

absl::Status FieldFromJson(const nlohmann::json& json, std::string_view name, double& value) {
  if (!json.is_number()) return BadField(name, "is not a number");
  value = json.get<double>();
  return absl::OkStatus();
}
absl::Status FieldFromJson(const nlohmann::json& json, std::string_view name, int64_t& value) {
  if (!json.is_number_integer()) return BadField(name, "is not a whole number");
  value = json.get<int64_t>();
  return absl::OkStatus();
}
absl::Status FieldFromJson(const nlohmann::json& json, std::string_view name, bool& value) {
  if (!json.is_boolean()) return BadField(name, "is not true or false");
  value = json.get<bool>();
  return absl::OkStatus();
}
absl::Status FieldFromJson(const nlohmann::json& json, std::string_view name, WarmupType& value) {
  if (json != "log" && json != "linear") return BadField(name, "is neither \"log\" nor \"linear\"");
  value = json == "log" ? WarmupType::kLog : WarmupType::kLinear;
  return absl::OkStatus();
}
absl::Status FieldFromJson(const nlohmann::json& json, std::string_view name, std::optional<int64_t>& value) {
  if (json.is_null()) {
    value.reset();
    return absl::OkStatus();
  }
  value = 0;
  return FieldFromJson(json, name, *value);
}

// ---- Validation.
// ------------------------------------------------------------------------------------------------------

// Collects the first thing wrong.
class Checker {
 public:
  explicit Checker(std::string_view type) : type_(type) {}
  void AtLeast(std::string_view field, double value, double least) {
    if (!(std::isfinite(value) && value >= least)) Fail(field, value, absl::StrFormat("%g or more", least));
  }
  void Between(std::string_view field, double value, double least, double below) {
    if (!(value >= least && value < below))
      Fail(field, value, absl::StrFormat("at least %g and below %g", least, below));
  }
  absl::Status status() const { return status_; }

 private:
  void Fail(std::string_view field, double value, const std::string& wanted) {
    if (!status_.ok()) return;
    status_ = absl::InvalidArgumentError(
        absl::StrFormat("%s: %s is %g, must be %s", type_, std::string(field), value, wanted));
  }
  std::string type_;
  absl::Status status_;
};

void Check(const Constant& s, Checker& c) { c.AtLeast("lr", s.lr, 0); }
void Check(const WarmupThenCosine& s, Checker& c) {
  c.AtLeast("lr", s.lr, 0);
  c.AtLeast("min_lr", s.min_lr, 0);
  c.AtLeast("warmup", static_cast<double>(s.warmup), 0);
  c.AtLeast("horizon", static_cast<double>(s.horizon), 1);
}
void Check(const LrRangeTest& s, Checker& c) {
  c.AtLeast("lr_range_test_min_lr", s.min_lr, 0);
  c.AtLeast("lr_range_test_step_size", static_cast<double>(s.step_size), 1);
  c.AtLeast("lr_range_test_step_rate", s.step_rate, 0);
}
void Check(const OneCycle& s, Checker& c) {
  c.AtLeast("cycle_min_lr", s.cycle_min_lr, 0);
  c.AtLeast("cycle_max_lr", s.cycle_max_lr, s.cycle_min_lr);
  c.AtLeast("decay_lr_rate", s.decay_lr_rate, 0);
  c.AtLeast("cycle_first_step_size", static_cast<double>(s.first_step_size), 1);
  c.AtLeast("cycle_second_step_size", static_cast<double>(s.second_step_size.value_or(1)), 1);
  c.AtLeast("cycle_first_stair_count", static_cast<double>(s.first_stair_count), 0);
  c.AtLeast("cycle_second_stair_count", static_cast<double>(s.second_stair_count.value_or(0)), 0);
  c.AtLeast("decay_step_size", static_cast<double>(s.decay_step_size), 0);
  if (!s.cycle_momentum) return;
  c.Between("cycle_min_mom", s.cycle_min_mom, 0, 1);
  c.Between("cycle_max_mom", s.cycle_max_mom, s.cycle_min_mom, 1);
  c.AtLeast("decay_mom_rate", s.decay_mom_rate, 0);
}
void Check(const WarmupLr& s, Checker& c) {
  c.AtLeast("warmup_min_lr", s.warmup_min_lr, 0);
  c.AtLeast("warmup_max_lr", s.warmup_max_lr, 0);
  c.AtLeast("warmup_num_steps", static_cast<double>(s.warmup_num_steps), 0);
}
void Check(const WarmupDecayLr& s, Checker& c) {
  Check(s.warmup, c);
  c.AtLeast("total_num_steps", static_cast<double>(s.total_num_steps), 1);
}
void Check(const WarmupCosineLr& s, Checker& c) {
  c.AtLeast("lr", s.lr, 0);
  c.AtLeast("total_num_steps", static_cast<double>(s.total_num_steps), 1);
  c.AtLeast("warmup_min_ratio", s.warmup_min_ratio, 0);
  c.AtLeast("warmup_num_steps", static_cast<double>(s.warmup_num_steps), 0);
  c.AtLeast("cos_min_ratio", s.cos_min_ratio, 0);
}

// ---- Rates.
// -----------------------------------------------------------------------------------------------------------

ScheduledRates Rate(double lr) { return {.lr = lr, .beta1 = std::nullopt, .beta2 = std::nullopt}; }

ScheduledRates At(const Constant& s, int64_t) { return Rate(s.lr); }

ScheduledRates At(const WarmupThenCosine& s, int64_t step) {
  if (step <= std::min(s.warmup, s.horizon))
    return Rate(s.lr * (static_cast<double>(step) / static_cast<double>(s.warmup)));
  if (step >= s.horizon) return Rate(s.min_lr);
  const double progress = static_cast<double>(step - s.warmup) / static_cast<double>(s.horizon - s.warmup);
  return Rate(s.min_lr + (s.lr - s.min_lr) * (0.5 * (1.0 + std::cos(kPi * progress))));
}

ScheduledRates At(const LrRangeTest& s, int64_t step) {
  double x = static_cast<double>(step - 1) / static_cast<double>(s.step_size);
  if (s.staircase) x = std::floor(x);
  return Rate(s.min_lr * (1 + s.step_rate * x));
}

// How far the cycle is between its minimum (0) and its maximum (1), k steps into it.
double CycleScale(const OneCycle& s, int64_t k, int64_t first, int64_t second) {
  const bool rising = k <= first;
  const int64_t stairs = rising ? s.first_stair_count : s.second_stair_count.value_or(s.first_stair_count);
  const int64_t done = rising ? k : first + second - k;
  const int64_t length = rising ? first : second;
  if (stairs == 0) return static_cast<double>(done) / static_cast<double>(length);
  // From whole numbers, so that a boundary is never a hair below its stair.
  const auto stair = static_cast<int64_t>(static_cast<Wide>(done) * stairs / length);
  return static_cast<double>(stair) / static_cast<double>(stairs);
}

ScheduledRates At(const OneCycle& s, int64_t step) {
  const int64_t first = s.first_step_size;
  const int64_t second = s.second_step_size.value_or(first);
  const int64_t total = first + second;
  ScheduledRates rates;
  if (s.cycle_momentum) rates.beta2 = OneCycle::kBeta2;
  const int64_t k = step - 1;
  if (k <= total) {
    // At k == total the cycle has come back to its minimum; DeepSpeed begins to decay one step later.
    const double scale = k == total ? 0.0 : CycleScale(s, k, first, second);
    rates.lr = s.cycle_min_lr + (s.cycle_max_lr - s.cycle_min_lr) * scale;
    if (s.cycle_momentum) {
      rates.beta1 =
          step == 1 ? s.cycle_min_mom : s.cycle_max_mom - (s.cycle_max_mom - s.cycle_min_mom) * scale;
    }
    return rates;
  }
  const double interval =
      s.decay_step_size == 0 ? 0.0 : static_cast<double>(k - total) / static_cast<double>(s.decay_step_size);
  rates.lr = s.cycle_min_lr / (1 + s.decay_lr_rate * interval);
  if (s.cycle_momentum) {
    rates.beta1 = std::min(s.cycle_max_mom * (1 + s.decay_mom_rate * interval), OneCycle::kLargestBeta1);
  }
  return rates;
}

// The rise of DeepSpeed's warm-ups at batch index i, 0 to 1; `steps` is already at least 2.
double WarmupGamma(WarmupType type, int64_t i, int64_t steps) {
  if (i >= steps) return 1.0;
  const auto n = static_cast<double>(steps);
  if (type == WarmupType::kLog) return std::log(static_cast<double>(i + 1)) / std::log(n);
  return static_cast<double>(i) / n;
}

ScheduledRates At(const WarmupLr& s, int64_t step) {
  if (step == 1) return Rate(s.warmup_min_lr);
  const int64_t steps = std::max<int64_t>(2, s.warmup_num_steps);
  return Rate(s.warmup_min_lr +
              (s.warmup_max_lr - s.warmup_min_lr) * WarmupGamma(s.warmup_type, step - 2, steps));
}

ScheduledRates At(const WarmupDecayLr& s, int64_t step) {
  const WarmupLr& w = s.warmup;
  const int64_t steps = std::max<int64_t>(2, w.warmup_num_steps);
  const int64_t i = step - 2;
  if (i < steps) return At(w, step);
  const double left = static_cast<double>(s.total_num_steps - i) /
                      static_cast<double>(std::max<int64_t>(1, s.total_num_steps - steps));
  return Rate(w.warmup_min_lr + (w.warmup_max_lr - w.warmup_min_lr) * std::max(0.0, left));
}

ScheduledRates At(const WarmupCosineLr& s, int64_t step) {
  if (step == 1) return Rate(0);
  const int64_t steps = std::max<int64_t>(2, s.warmup_num_steps);
  const int64_t i = step - 2;
  if (i < steps) {
    return Rate(s.lr *
                (s.warmup_min_ratio + (1 - s.warmup_min_ratio) * WarmupGamma(s.warmup_type, i, steps)));
  }
  const double progress =
      std::min(1.0, static_cast<double>(i - steps + 1) /
                        static_cast<double>(std::max<int64_t>(1, s.total_num_steps - steps)));
  const double cosine = (1 + std::cos(kPi * progress)) / 2;
  return Rate(s.lr * std::max(0.0, s.cos_min_ratio + (1 - s.cos_min_ratio) * cosine));
}

template <typename Spec>
absl::StatusOr<LrSchedule> Read(const nlohmann::json& params) {
  Spec spec;
  absl::Status status;
  size_t fields = 0;
  VisitFields(spec, [&](const char* name, auto& value) {
    ++fields;
    if (!status.ok()) return;
    const auto it = params.find(name);
    status = it == params.end() ? BadField(name, "is missing") : FieldFromJson(*it, name, value);
  });
  RETURN_IF_ERROR(status);
  if (params.size() != fields)
    return absl::InvalidArgumentError("schedule state: \"params\" has unknown fields");
  return LrSchedule::Create(spec);
}

}  // namespace

absl::StatusOr<LrSchedule> LrSchedule::Create(const LrScheduleSpec& spec) {
  RETURN_IF_ERROR(std::visit(
      [](const auto& s) {
        Checker checker(TypeName(s));
        Check(s, checker);
        return checker.status();
      },
      spec));
  return LrSchedule(spec);
}

ScheduledRates LrSchedule::At(int64_t step) const {
  const int64_t at = std::max<int64_t>(1, step);
  return std::visit([at](const auto& s) { return zero::At(s, at); }, spec_);
}

std::string_view LrSchedule::name() const {
  return std::visit([](const auto& s) { return TypeName(s); }, spec_);
}

nlohmann::json LrSchedule::ToJson() const {
  nlohmann::json params = nlohmann::json::object();
  std::visit(
      [&](const auto& s) {
        VisitFields(s, [&](const char* n, const auto& v) { params[n] = FieldToJson(v); });
      },
      spec_);
  return {{"type", std::string(name())}, {"params", params}};
}

absl::StatusOr<LrSchedule> LrSchedule::FromJson(const nlohmann::json& json) {
  if (!json.is_object() || json.size() != 2 || !json.contains("type") || !json["type"].is_string() ||
      !json.contains("params") || !json["params"].is_object()) {
    return absl::InvalidArgumentError("schedule state: not an object of \"type\" and \"params\"");
  }
  const auto type = json["type"].get<std::string>();
  const nlohmann::json& params = json["params"];
  if (type == TypeName(Constant())) return Read<Constant>(params);
  if (type == TypeName(WarmupThenCosine())) return Read<WarmupThenCosine>(params);
  if (type == TypeName(LrRangeTest())) return Read<LrRangeTest>(params);
  if (type == TypeName(OneCycle())) return Read<OneCycle>(params);
  if (type == TypeName(WarmupLr())) return Read<WarmupLr>(params);
  if (type == TypeName(WarmupDecayLr())) return Read<WarmupDecayLr>(params);
  if (type == TypeName(WarmupCosineLr())) return Read<WarmupCosineLr>(params);
  return absl::InvalidArgumentError(absl::StrCat("schedule state: unknown type \"", type, "\""));
}

}  // namespace penstock::zero
