// What DeepSpeed and Hugging Face's Trainer make of keys that a file leaves open. tests/golden/configs.json
// has their own answers.
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "run/config.h"
#include "run/settings.h"

namespace penstock::run {

using zero::LrRangeTest;
using zero::OneCycle;
using zero::WarmupCosineLr;
using zero::WarmupLr;
using zero::WarmupType;
namespace {

// Fills what is empty and keeps account of it.
class Opener {
 public:
  explicit Opener(const std::set<std::string>& autos) : autos_(autos) {}

  bool IsAuto(const std::string& path) const { return autos_.contains(path); }

  // `to` becomes `absent`, or `automatic` where the file says "auto". `remark` follows the value.
  template <typename T>
  void Take(const std::string& path, std::optional<T>& to, T absent, T automatic,
            const std::string& remark = "") {
    if (to.has_value()) return;
    to = IsAuto(path) ? automatic : absent;
    Say(path, absl::StrCat(Shown(*to), remark.empty() ? "" : " ", remark));
  }
  // Where there is one answer to both.
  template <typename T>
  void Take(const std::string& path, std::optional<T>& to, T value, const std::string& remark = "") {
    Take(path, to, value, value, remark);
  }
  void Say(const std::string& path, const std::string& value) {
    filled_.push_back(absl::StrCat(path, IsAuto(path) ? " \"auto\": " : ": ", value));
  }
  std::vector<std::string> TakeFilled() { return std::move(filled_); }

 private:
  static std::string Shown(bool value) { return value ? "true" : "false"; }
  static std::string Shown(double value) { return absl::StrCat(value); }
  static std::string Shown(int64_t value) { return absl::StrCat(value); }
  static std::string Shown(WarmupType value) { return value == WarmupType::kLog ? "log" : "linear"; }

  const std::set<std::string>& autos_;
  std::vector<std::string> filled_;
};

// The arguments' defaults of Hugging Face's Trainer.
constexpr double kTrainersRate = 5e-5;
constexpr double kTrainersBeta1 = 0.9, kTrainersBeta2 = 0.999, kTrainersEps = 1e-8;
constexpr int64_t kTrainersMicroBatch = 8;

void FillBatch(Opener& open, Config& c) {
  // DeepSpeed derives what is missing from the rest; only "auto" without anything to derive it from is
  // filled.
  const bool derived = c.train_batch_size.has_value() || c.micro_batch_per_rank.has_value();
  if (!derived && open.IsAuto("train_micro_batch_size_per_gpu")) {
    open.Take("train_micro_batch_size_per_gpu", c.micro_batch_per_rank, kTrainersMicroBatch);
  }
  if (open.IsAuto("gradient_accumulation_steps") && !c.train_batch_size.has_value()) {
    open.Take("gradient_accumulation_steps", c.gradient_accumulation_steps, int64_t{1});
  }
}

// The rate by which the scheduler goes is the optimizer's, so this comes before it.
void FillOptimizer(Opener& open, OptimizerConfig& o) {
  if (!o.type.has_value()) {
    open.Say("optimizer", "the program's own, AdamW");
    return;
  }
  const std::string at = "optimizer.params.";
  const bool adam = *o.type == OptimizerType::kAdam || *o.type == OptimizerType::kAdamW;
  open.Take(at + "lr", o.lr, *o.type == OptimizerType::kAdagrad ? 1e-2 : 1e-3, kTrainersRate);
  const bool lamb = *o.type == OptimizerType::kLamb;
  if (adam || lamb || *o.type == OptimizerType::kLion) {
    if (!o.beta1.has_value()) {
      o.beta1 = kTrainersBeta1;  // DeepSpeed's too
      o.beta2 = kTrainersBeta2;
      open.Say(at + "betas", absl::StrCat("[", *o.beta1, ", ", *o.beta2, "]"));
    }
  }
  if (adam || lamb) {
    open.Take(at + "eps", o.eps, kTrainersEps);
  } else if (*o.type == OptimizerType::kAdagrad) {
    open.Take(at + "eps", o.eps, 1e-10, kTrainersEps);
  }
  const bool libtorchs = adam && o.torch_adam.value_or(false) && o.DecoupledDecay();
  open.Take(at + "weight_decay", o.weight_decay, libtorchs ? 1e-2 : 0.0, 0.0);
  if (*o.type == OptimizerType::kSgd) {
    open.Take(at + "momentum", o.momentum, 0.0);
  }
}

void FillScheduler(Opener& open, int64_t total_steps, int64_t auto_warmup,
                   const std::optional<double>& optimizers_rate, SchedulerConfig& s) {
  const std::string at = "scheduler.params.";
  const auto warmup = [&] {
    const std::string key = at + "warmup_num_steps";
    std::string remark;
    if (open.IsAuto(key)) {
      remark = absl::StrCat("(a tenth of `steps` ", total_steps, ", 100 at the most)");
    } else if (total_steps < 1000) {
      remark = absl::StrCat("(longer than `steps` ", total_steps, ": the rate never gets to its maximum)");
    }
    open.Take(key, s.warmup_num_steps, int64_t{1000}, auto_warmup, remark);
    open.Take(at + "warmup_type", s.warmup_type, WarmupType::kLog);
  };
  const auto maximum = [&](std::optional<double> absent) {
    const std::string key = at + "warmup_max_lr";
    if (s.warmup_max_lr.has_value()) return;
    const std::optional<double> value = open.IsAuto(key) ? optimizers_rate : absent;
    if (value.has_value()) {
      open.Take(key, s.warmup_max_lr, *value);
    } else {
      open.Say(key, "the optimizer's lr");  // of the program's own
    }
  };
  switch (s.type) {
    case SchedulerType::kLrRangeTest: {
      const LrRangeTest d;
      open.Take(at + "lr_range_test_min_lr", s.lr_range_test_min_lr, d.min_lr);
      open.Take(at + "lr_range_test_step_size", s.lr_range_test_step_size, d.step_size);
      open.Take(at + "lr_range_test_step_rate", s.lr_range_test_step_rate, d.step_rate);
      open.Take(at + "lr_range_test_staircase", s.lr_range_test_staircase, d.staircase);
      return;
    }
    case SchedulerType::kOneCycle: {
      const OneCycle d;
      open.Take(at + "decay_lr_rate", s.decay_lr_rate, d.decay_lr_rate);
      open.Take(at + "cycle_first_step_size", s.cycle_first_step_size, d.first_step_size);
      open.Take(at + "cycle_second_step_size", s.cycle_second_step_size, *s.cycle_first_step_size);
      open.Take(at + "cycle_first_stair_count", s.cycle_first_stair_count, d.first_stair_count);
      open.Take(at + "cycle_second_stair_count", s.cycle_second_stair_count, *s.cycle_first_stair_count);
      open.Take(at + "decay_step_size", s.decay_step_size, d.decay_step_size);
      open.Take(at + "cycle_momentum", s.cycle_momentum, d.cycle_momentum);
      if (!*s.cycle_momentum) return;
      open.Take(at + "cycle_min_mom", s.cycle_min_mom, d.cycle_min_mom);
      open.Take(at + "cycle_max_mom", s.cycle_max_mom, d.cycle_max_mom);
      open.Take(at + "decay_mom_rate", s.decay_mom_rate, d.decay_mom_rate);
      return;
    }
    case SchedulerType::kWarmupDecayLr:
      open.Take(at + "total_num_steps", s.total_num_steps, total_steps, "(`steps`)");
      open.Take(at + "warmup_min_lr", s.warmup_min_lr, 0.0);
      maximum(WarmupLr().warmup_max_lr);
      warmup();
      return;
    case SchedulerType::kWarmupLr:
      open.Take(at + "warmup_min_lr", s.warmup_min_lr, 0.0);
      maximum(optimizers_rate);
      warmup();
      return;
    case SchedulerType::kWarmupCosineLr: {
      const WarmupCosineLr d;
      open.Take(at + "total_num_steps", s.total_num_steps, total_steps, "(`steps`)");
      open.Take(at + "warmup_min_ratio", s.warmup_min_ratio, d.warmup_min_ratio);
      open.Take(at + "cos_min_ratio", s.cos_min_ratio, d.cos_min_ratio);
      warmup();
      return;
    }
  }
}

void FillPrecision(Opener& open, Config& c) {
  const bool fp16_auto = open.IsAuto("fp16.enabled"), bf16_auto = open.IsAuto("bf16.enabled");
  if (c.fp16.enabled.value_or(false)) {
    c.bf16 = false;
    Fp16Config& f = c.fp16;
    open.Take("fp16.loss_scale", f.loss_scale, 0.0, "(dynamic)");
    if (*f.loss_scale != 0) return;
    open.Take("fp16.initial_scale_power", f.initial_scale_power, int64_t{16});
    open.Take("fp16.loss_scale_window", f.loss_scale_window, int64_t{1000});
    open.Take("fp16.hysteresis", f.hysteresis, int64_t{2});
    return;  // min_loss_scale: MakeLossScaler, which has the scale to compare it with
  }
  if (c.bf16.has_value()) return;
  c.bf16 = false;
  open.Say(bf16_auto || !fp16_auto ? "bf16.enabled" : "fp16.enabled", "false (fp32)");
}

}  // namespace

std::vector<std::string> FillDefaults(const std::set<std::string>& autos, int64_t total_steps,
                                      int64_t auto_warmup, Config* config) {
  Opener open(autos);
  FillBatch(open, *config);
  for (const Setting& setting : SectionKeys("")) {
    if (setting.deepspeeds.empty() || !setting.Find(*config).is_null()) continue;
    const nlohmann::json value = ScalarOf(setting.deepspeeds);
    setting.Put(*config, value);
    open.Say(std::string(setting.name), absl::StrCat(value.get<double>()));
  }
  FillOptimizer(open, config->optimizer);
  if (config->scheduler.has_value()) {
    FillScheduler(open, total_steps, auto_warmup, config->optimizer.lr, *config->scheduler);
  } else {
    open.Say("scheduler", "none, a constant rate");
  }
  FillPrecision(open, *config);
  return open.TakeFilled();
}

}  // namespace penstock::run
