// The table. Names and defaults are those of DeepSpeed up to 0.19 (deepspeed/runtime/config.py, constants.py,
// precision_config.py, zero/config.py, zero/offload_config.py, swap_tensor/aio_config.py).
#include "run/settings.h"

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/json.h"
#include "run/config.h"
#include "run/config_names.h"
#include "zero/compute/tile_format.h"
#include "zero/engine/engine_options.h"

namespace penstock::run {
namespace {

using nlohmann::json;

constexpr KeyUse kServed = KeyUse::kServed;
constexpr KeyUse kNeedless = KeyUse::kNeedless;
constexpr KeyUse kIgnored = KeyUse::kIgnored;
constexpr KeyUse kRefused = KeyUse::kRefused;
constexpr double kInf = std::numeric_limits<double>::infinity();

// Builders, so that each row names only what matters to it.
constexpr Setting Bool(std::string_view name) {
  return {.name = name, .use = kServed, .type = KeyType::kBool};
}
constexpr Setting Text(std::string_view name) {
  return {.name = name, .use = kServed, .type = KeyType::kText};
}
constexpr Setting Path(std::string_view name) {
  return {.name = name, .use = kServed, .type = KeyType::kPath};
}
constexpr Setting Paths(std::string_view name) {
  return {.name = name, .use = kServed, .type = KeyType::kPaths};
}
constexpr Setting Names(std::string_view name) {
  return {.name = name, .use = kServed, .type = KeyType::kNames};
}
constexpr Setting Object(std::string_view name) {
  return {.name = name, .use = kServed, .type = KeyType::kObject};
}
constexpr Setting Whole(std::string_view name, double least, double most = 0x1p62) {
  return {.name = name, .use = kServed, .type = KeyType::kWhole, .least = least, .most = most};
}
constexpr Setting Wholes(std::string_view name, double least, double most) {
  return {.name = name, .use = kServed, .type = KeyType::kWholes, .least = least, .most = most};
}
constexpr Setting Number(std::string_view name, double least, double most = kInf) {
  return {.name = name, .use = kServed, .type = KeyType::kNumber, .least = least, .most = most};
}
constexpr Setting Pair(std::string_view name, double least, double most) {
  return {.name = name, .use = kServed, .type = KeyType::kPair, .least = least, .most = most};
}
constexpr Setting Size(std::string_view name, double least, double most = 0x1p62) {
  return {.name = name, .use = kServed, .type = KeyType::kSize, .least = least, .most = most};
}
constexpr Setting Choice(std::string_view name, std::string_view choices) {
  return {.name = name, .use = kServed, .type = KeyType::kChoice, .choices = choices};
}
constexpr Setting Needless(std::string_view name, KeyType type, std::string_view why) {
  return {.name = name, .use = kNeedless, .type = type, .why = why};
}
constexpr Setting Ignored(std::string_view name, KeyType type, std::string_view why,
                          std::string_view neutral = "") {
  return {.name = name, .use = kIgnored, .type = type, .why = why, .neutral = neutral};
}
constexpr Setting Refused(std::string_view name, std::string_view why, std::string_view neutral = "") {
  return {.name = name, .use = kRefused, .type = KeyType::kAny, .why = why, .neutral = neutral};
}
constexpr Setting AlsoCalled(Setting setting, std::string_view other) {
  setting.canonical = setting.name;
  setting.name = other;
  return setting;
}
constexpr Setting OnceCalled(Setting setting, std::string_view old) {
  setting = AlsoCalled(setting, old);
  setting.old_name = true;
  return setting;
}
// Settings that configurations do not have.
constexpr Setting OnlyFlag(std::string_view flag) {
  return Setting{.use = kServed, .type = KeyType::kAny}.Flag(flag).EachStart();
}
constexpr Setting OnlyKeyword(std::string_view keyword) {
  return Setting{.use = kServed, .type = KeyType::kAny}.Keyword(keyword).EachStart();
}

// A checked value, into its place.
template <typename T>
void Take(const json& value, std::optional<T>& to) {
  to = value.get<T>();
}
// By the name that NamesOf has for it.
template <typename Enum>
requires std::is_enum_v<Enum>
void Take(const json& value, std::optional<Enum>& to) {
  for (const auto& [of, name] : NamesOf(Enum())) {
    if (name == value.get_ref<const std::string&>()) to = of;
  }
}

void Take(const json& value, std::optional<kernels::StateType>& to) {
  to = zero::ParseStateType(value.get_ref<const std::string&>());
}

// The value in a place; null: it is empty.
template <typename T>
json ValueIn(const std::optional<T>& place) {
  if (!place.has_value()) return nullptr;
  if constexpr (std::is_same_v<T, kernels::StateType>) {
    return std::string(zero::StateTypeName(*place));
  } else if constexpr (std::is_enum_v<T>) {
    return std::string(zero::NameIn(NamesOf(*place), *place));
  } else {
    return *place;
  }
}

}  // namespace

template <typename Place>
constexpr Setting Setting::At(Place) const {
  return Into([](Config& config, const nlohmann::json& value) { Take(value, Place()(config)); },
              [](const Config& config) { return ValueIn(Place()(config)); });
}

template <typename Place>
constexpr Setting Setting::Sets(Place) const {
  Setting made = *this;
  made.option = [](zero::EngineOptions& options, const json& value) {
    std::optional taken(Place()(options));
    Take(value, taken);
    Place()(options) = *taken;
  };
  made.option_of = [](const zero::EngineOptions& options) {
    return ValueIn(std::optional(Place()(options)));
  };
  return made;
}

void Setting::Put(Config& config, const json& value) const {
  if (into != nullptr) {
    into(config, value);
  } else if (option != nullptr) {
    config.plain[std::string(name)] = value;
  }
}

json Setting::Find(const Config& config) const {
  if (from != nullptr) return from(config);
  const auto found = config.plain.find(name);
  return found == config.plain.end() ? json() : found->second;
}

namespace {

SchedulerConfig& SchedulerOf(Config& config) {
  return config.scheduler.has_value() ? *config.scheduler : config.scheduler.emplace();
}
const SchedulerConfig& SchedulerOf(const Config& config) {
  static const SchedulerConfig kNone;
  return config.scheduler.has_value() ? *config.scheduler : kNone;
}

constexpr std::string_view kOwnReports = "Penstock has its own: `report`, `log` and `trace`, always complete";
constexpr std::string_view kWandbsClient =
    "its client is Python's; switch tensorboard on and upload its directory with wandb sync "
    "--sync-tensorboard DIR, or give `log`, whose lines are objects that wandb.log takes";
constexpr std::string_view kCometsClient =
    "its client is Python's; give `log`, whose lines are objects that comet's log_metrics takes, or switch "
    "tensorboard on";
constexpr std::string_view kPythonsModels =
    "it is about models of Python, whose front end serves it; the command line knows the blocks of its "
    "models";
constexpr std::string_view kBaseFlag =
    "the command line's is the directory that --model names, with --lora-rank";
constexpr std::string_view kSeedFlag = "the command line's seed is --seed";
constexpr std::string_view kDeviceFlag = "the command line's device is --device";
constexpr std::string_view kQuietFlag = "the command line prints its progress without --quiet";
constexpr std::string_view kRankTimeoutFlag = "the command line's timeout is --rank-timeout";
constexpr std::string_view kNoOtherRanks = "there is nobody to exchange with";
constexpr std::string_view kRankOrderSum =
    "gradients cross ranks as bytes and are summed in fp32 in the order of ranks";

constexpr auto kTop = std::to_array<Setting>({
    Whole("train_batch_size", 1)
        .Says("Sequences in a step, over all ranks and micro-batches",
              "micro-batch times accumulation times ranks")
        .ByName("train_batch")
        .At([](auto& c) -> auto& { return c.train_batch_size; }),
    Whole("train_micro_batch_size_per_gpu", 1, 0x1p20)
        .Says("Sequences in a micro-batch of one rank", "2")
        .Flag("--batch")
        .ByName("batch")
        .At([](auto& c) -> auto& { return c.micro_batch_per_rank; }),
    Whole("gradient_accumulation_steps", 1, 0x1p20)
        .Says("Micro-batches in a step", "1")
        .Flag("--accumulate")
        .Keyword("gradient_accumulation_steps")
        .InPython("engine.train_batch takes all of them at once; a loop may give them one by one.")
        .ByName("accumulate")
        .At([](auto& c) -> auto& { return c.gradient_accumulation_steps; }),
    Number("gradient_clipping", 0)
        .Says("Maximum global gradient norm; 0 disables clipping", "1.0")
        .Flag("--clip")
        .Keyword("gradient_clipping")
        .ByName("clip")
        .InfinityIs("0")
        .Settles("1.0", "0")
        .DeepSpeeds("1.0")
        .Python("0 without a configuration of DeepSpeed's")
        .Sets([](auto& o) -> auto& { return o.optimizer.clip; })
        .Answers("gradient_clipping"),
    Object("optimizer"),
    Object("scheduler"),
    Object("fp16"),
    Object("bf16"),
    OnceCalled(Object("bf16"), "bfloat16"),
    Object("zero_optimization"),
    Object("aio").Answers("aio_config", "{}"),
    Object("activation_checkpointing"),
    Object("checkpoint"),
    Object("penstock"),
    Bool("wall_clock_breakdown")
        .Says("Prints where the time of each step went", "false")
        .At([](auto& c) -> auto& { return c.wall_clock_breakdown; })
        .Answers("wall_clock_breakdown", "false"),
    Object("flops_profiler"),
    Object("comms_logger"),
    Object("elasticity"),

    Needless("steps_per_print", KeyType::kAny, "progress is one live line, and `log` has every step")
        .Answers("steps_per_print", "10"),
    Needless("memory_breakdown", KeyType::kBool,
             "every report has the peaks, and penstock plan the bytes of each tier")
        .Answers("memory_breakdown", "false"),
    Needless("dump_state", KeyType::kBool, "penstock inspect shows the state").Answers("dump_state", "false"),
    Needless("log_level", KeyType::kAny, "use `quiet` for less"),
    Needless("timers", KeyType::kAny, kOwnReports),
    Needless("comms_config", KeyType::kObject, kOwnReports),
    Needless("disable_python_gc", KeyType::kBool, "there is no Python"),
    Needless("monitor_config", KeyType::kObject, kOwnReports),
    Object("tensorboard"),
    Object("wandb").OfRank(),
    Ignored("comet", KeyType::kObject, kCometsClient),
    Object("csv_monitor"),
    Ignored(
        "autotuning", KeyType::kObject,
        "the planner chooses tiles, buffers and order on this machine at every start; penstock plan with the "
        "same flags shows what and why, and what another batch or memory would bring"),
    Needless("zero_allow_untested_optimizer", KeyType::kBool, "the optimizer is always Penstock's own")
        .Answers("zero_allow_untested_optimizer", "false"),
    Needless("zero_force_ds_cpu_optimizer", KeyType::kBool, "the optimizer is always Penstock's own")
        .Answers("zero_force_ds_cpu_optimizer", "true"),
    Ignored("communication_data_type", KeyType::kAny, kRankOrderSum),
    Needless("seq_parallel_communication_data_type", KeyType::kAny, "there is no sequence parallelism"),
    AlsoCalled(
        Needless("seq_parallel_communication_data_type", KeyType::kAny, "there is no sequence parallelism"),
        "seq_parallel_comm_data_type"),
    Ignored("prescale_gradients", KeyType::kBool, kRankOrderSum),
    Ignored("gradient_predivide_factor", KeyType::kNumber, kRankOrderSum)
        .Answers("gradient_predivide_factor", "1.0"),
    Needless("sparse_gradients", KeyType::kBool, "gradients are dense; the result is the same")
        .Answers("sparse_gradients_enabled", "false"),
    Needless("disable_allgather", KeyType::kBool, "how blocks are gathered is the planner's choice"),
    Needless("allgather_size", KeyType::kWhole, "how blocks are gathered is the planner's choice"),
    Ignored("data_types", KeyType::kObject, "a block's gradients are accumulated in fp32 and rounded once"),
    Needless("graph_harvesting", KeyType::kBool, "there are no graphs to harvest")
        .Answers("graph_harvesting", "false"),
    Needless("compile", KeyType::kObject, "there is nothing to compile at run time"),
    Needless("use_data_before_expert_parallelism", KeyType::kBool, "all ranks are data-parallel"),
    Bool("managed_gradient_accumulation")
        .Says("Whether the engine counts the micro-batches of a step; if not, each step() updates", "true")
        .EachStart()
        .OnCommandLine("the program makes the steps itself")
        .Neutral("true")
        .At([](auto& c) -> auto& { return c.managed_gradient_accumulation; })
        .Answers("managed_gradient_accumulation", "true"),
    Needless("vocabulary_size", KeyType::kWhole, "the model and `vocab` say it"),
    Needless("dataloader_drop_last", KeyType::kBool, "every batch is complete"),
    Needless("nebula", KeyType::kObject, "checkpoints are Penstock's own"),
    Needless("datastates_ckpt", KeyType::kObject, "checkpoints are Penstock's own"),
    Needless("datastates", KeyType::kObject, "checkpoints are Penstock's own"),

    Refused("amp", "Apex's mixed precision is not served; use bf16 or fp16").Answers("amp_params", "false"),
    Refused("torch_autocast", "autocast is not served; use bf16 or fp16"),
    Refused("gradient_allreduce_op", "gradients are averaged over ranks", "\"mean\""),
    Refused("pipeline", "there is no pipeline parallelism; all ranks are data-parallel"),
    Refused("tensor_parallel", "there is no tensor parallelism; all ranks are data-parallel"),
    Refused("expert_parallel", "there is no expert parallelism; all ranks are data-parallel"),
    Refused("sequence_parallel_size", "there is no sequence parallelism; all ranks are data-parallel", "1"),
    Refused("sparse_attention", "attention is the model's own"),
    Refused("progressive_layer_drop", "it would change the model while it trains, which Penstock does not"),
    Refused("curriculum_learning", "sequences have one length; use `seq`"),
    Refused("data_efficiency", "batches are drawn by seed and step alone"),
    Refused("compression_training", "weights are trained as they are"),
    Refused("quantize_training", "weights are trained as they are"),
    Refused("weight_quantization", "weights are trained as they are"),
    Refused("eigenvalue", "it only serves quantize_training"),
    Refused("hybrid_engine", "Penstock trains; penstock sample generates from a state directory"),
});

constexpr std::string_view kOnePass = "the update is always one fused pass";

constexpr auto kOptimizer = std::to_array<Setting>({
    Choice("type", kServedOptimizers)
        .Says(
            "Algorithm of the update. Lamb reads the state twice a step, and the processor makes its updates",
            "AdamW")
        .Flag("--optimizer")
        .Fixed("optimizer")
        .AsPart()
        .Python("the optimizer of optimizer=, else AdamW")
        .At([](auto& c) -> auto& { return c.optimizer.type; }),
    Object("params").Answers("optimizer_params", "null"),
    Needless("legacy_fusion", KeyType::kBool, kOnePass).Answers("optimizer_legacy_fusion", "false"),
});

constexpr Setting kLr = Number("lr", 0, 1e6).Says("Peak learning rate", "3e-4").Flag("--lr").ByName("lr").At([
](auto& c) -> auto& { return c.optimizer.lr; });
constexpr Setting kWeightDecay = Number("weight_decay", 0, 1e6)
                                     .Says("Weight decay", "0.01 for AdamW")
                                     .Flag("--weight-decay")
                                     .ByName("weight_decay")
                                     .At([](auto& c) -> auto& { return c.optimizer.weight_decay; });
constexpr Setting kEps =
    Number("eps", 0).Says("Added to the denominator of the update", "1e-8; Adagrad 1e-10").ByName("eps").At([
    ](auto& c) -> auto& { return c.optimizer.eps; });
constexpr Setting kBetas = Pair("betas", 0, 1)
                               .Says("Decay of the first and second moment", "0.9, 0.999; Lion 0.9, 0.99")
                               .ByName("beta1|beta2")
                               .Into(
                                   [](Config& c, const json& v) {
                                     c.optimizer.beta1 = v[0].get<double>();
                                     c.optimizer.beta2 = v[1].get<double>();
                                   },
                                   [](const Config& c) {
                                     const OptimizerConfig& o = c.optimizer;
                                     return o.beta1 && o.beta2 ? json{*o.beta1, *o.beta2} : json();
                                   });
constexpr Setting kSetGradNone =
    Needless("set_grad_none", KeyType::kBool, "gradients are freed as soon as they are used");
constexpr Setting kFused = Needless("fused", KeyType::kBool, kOnePass);
constexpr Setting kForeach = Needless("foreach", KeyType::kBool, kOnePass);
constexpr Setting kDifferentiable =
    Needless("differentiable", KeyType::kBool, "nobody differentiates the update");
constexpr Setting kMaximize = Refused("maximize", "the loss is always minimised");
constexpr Setting kMaxGradNorm =
    Refused("max_grad_norm", "give gradient_clipping at the top level instead", "0");
constexpr Setting kFp32States =
    Ignored("fp32_optimizer_states", KeyType::kBool, "penstock.optimizer_states says their type");

constexpr auto kAdam = std::to_array<Setting>({
    kLr,
    kBetas,
    kEps,
    kWeightDecay,
    Bool("adam_w_mode")
        .Says("Weight decay apart from the gradient (AdamW); false adds it to the gradient", "true")
        .PartOf("optimizer")
        .At([](auto& c) -> auto& { return c.optimizer.adam_w_mode; }),
    Bool("torch_adam")
        .Says("LibTorch's Adam, whose weight decay is 0 by default", "false")
        .PartOf("optimizer")
        .At([](auto& c) -> auto& { return c.optimizer.torch_adam; }),
    kSetGradNone,
    kFused,
    kForeach,
    Needless("capturable", KeyType::kBool, "the update is not captured in a graph"),
    kDifferentiable,
    kFp32States,
    Refused("bias_correction", "Adam's bias is always corrected", "true"),
    Refused("amsgrad", "AMSGrad is not served; use AdamW"),
    kMaximize,
    kMaxGradNorm,
});

constexpr auto kAdagrad = std::to_array<Setting>({
    kLr,
    Number("lr_decay", 0)
        .Says("Decay of the learning rate with the number of updates", "0")
        .ByName("lr_decay")
        .At([](auto& c) -> auto& { return c.optimizer.lr_decay; }),
    kEps,
    kWeightDecay,
    kSetGradNone,
    kFused,
    kForeach,
    kDifferentiable,
    kFp32States,
    Refused("initial_accumulator_value", "the sum of squares starts at zero", "0"),
    Refused("amsgrad", "AMSGrad is of Adam and not served"),
    kMaximize,
    kMaxGradNorm,
});

constexpr auto kLion = std::to_array<Setting>({
    kLr,
    kBetas,
    kWeightDecay,
    kSetGradNone,
    kFused,
    kFp32States,
    kMaxGradNorm,
});

constexpr auto kSgd = std::to_array<Setting>({
    kLr,
    Number("momentum", 0, 1).Says("Momentum", "0").ByName("momentum").At([](auto& c) -> auto& {
      return c.optimizer.momentum;
    }),
    Number("dampening", 0, 1).Says("Dampening of the momentum", "0").ByName("dampening").At([
    ](auto& c) -> auto& { return c.optimizer.dampening; }),
    kWeightDecay,
    Bool("nesterov").Says("Nesterov momentum", "false").ByName("nesterov").At([](auto& c) -> auto& {
      return c.optimizer.nesterov;
    }),
    kFused,
    kForeach,
    kDifferentiable,
    kMaximize,
    kMaxGradNorm,
});

// DeepSpeed's FusedLamb.
constexpr auto kLamb = std::to_array<Setting>({
    kLr,
    kBetas,
    kEps,
    kWeightDecay,
    Number("min_coeff", 0).Says("Lower bound of the trust ratio", "0.01").ByName("min_coeff").At([
    ](auto& c) -> auto& { return c.optimizer.min_coeff; }),
    Number("max_coeff", 0).Says("Upper bound of the trust ratio", "10").ByName("max_coeff").At([
    ](auto& c) -> auto& { return c.optimizer.max_coeff; }),
    Bool("bias_correction").Says("Corrects the bias of the moments", "true").ByName("bias_correction").At([
    ](auto& c) -> auto& { return c.optimizer.bias_correction; }),
    Bool("corrects_rate")
        .Says("Corrects the bias by a factor of the learning rate, as DeepSpeed's FusedLamb; false corrects "
              "the "
              "moments before the trust ratio, as in the paper",
              "true")
        .ByName("corrects_rate")
        .At([](auto& c) -> auto& { return c.optimizer.corrects_rate; }),
    kSetGradNone,
    kFused,
    kForeach,
    kDifferentiable,
    kFp32States,
    Refused("eps_inside_sqrt", "eps is added to the root, as without it", "false"),
    Refused("amsgrad", "AMSGrad is not served; use Lamb without it"),
    kMaximize,
    kMaxGradNorm,
});

constexpr auto kScheduler = std::to_array<Setting>({
    Choice("type", "LRRangeTest|OneCycle|WarmupLR|WarmupDecayLR|WarmupCosineLR")
        .Says("Schedule of the learning rate", "none: warm-up, then a cosine; with a configuration constant")
        .PartOf("scheduler")
        .Called("scheduler")
        .Into(
            [](Config& c, const json& v) {
              std::optional<SchedulerType> type;
              Take(v, type);
              SchedulerOf(c).type = type.value_or(SchedulerType::kWarmupLr);
            },
            [](const Config& c) {
              return c.scheduler.has_value() ? json(std::string(Name(c.scheduler->type))) : json();
            })
        .Answers("scheduler_name", "null"),
    Object("params").Answers("scheduler_params", "null"),
});

constexpr Setting kWarmupMinLr =
    Number("warmup_min_lr", 0).Says("Learning rate of the first step", "0").PartOf("scheduler").At([
    ](auto& c) -> auto& { return SchedulerOf(c).warmup_min_lr; });
constexpr Setting kWarmupMaxLr =
    Number("warmup_max_lr", 0)
        .Says("Learning rate after the warm-up", "the optimizer's; WarmupDecayLR 1e-3")
        .PartOf("scheduler")
        .At([](auto& c) -> auto& { return SchedulerOf(c).warmup_max_lr; });
constexpr Setting kWarmupNumSteps =
    Whole("warmup_num_steps", 0).Says("Steps of the warm-up", "1000").PartOf("scheduler").At([
    ](auto& c) -> auto& { return SchedulerOf(c).warmup_num_steps; });
constexpr Setting kWarmupType =
    Choice("warmup_type", "log|linear").Says("Form of the warm-up", "log").PartOf("scheduler").At([
    ](auto& c) -> auto& { return SchedulerOf(c).warmup_type; });
constexpr Setting kTotalNumSteps = Whole("total_num_steps", 1)
                                       .Says("Step at which the decay ends", "the last step of the run")
                                       .PartOf("scheduler")
                                       .At([](auto& c) -> auto& { return SchedulerOf(c).total_num_steps; });

constexpr Setting kLastBatch = Refused(
    "last_batch_iteration", "the schedule begins with the first step, and `resume` continues it", "-1");

constexpr auto kLrRangeTest = std::to_array<Setting>({
    Number("lr_range_test_min_lr", 0).Says("Learning rate of the first step", "1e-3").PartOf("scheduler").At([
    ](auto& c) -> auto& { return SchedulerOf(c).lr_range_test_min_lr; }),
    Whole("lr_range_test_step_size", 1).Says("Steps between increases", "2000").PartOf("scheduler").At([
    ](auto& c) -> auto& { return SchedulerOf(c).lr_range_test_step_size; }),
    Number("lr_range_test_step_rate", 0)
        .Says("Increase of each interval, relative to the first rate", "1")
        .PartOf("scheduler")
        .At([](auto& c) -> auto& { return SchedulerOf(c).lr_range_test_step_rate; }),
    Bool("lr_range_test_staircase")
        .Says("Increases in steps instead of continuously", "false")
        .PartOf("scheduler")
        .At([](auto& c) -> auto& { return SchedulerOf(c).lr_range_test_staircase; }),
    kLastBatch,
});

constexpr auto kOneCycle = std::to_array<Setting>({
    Number("cycle_min_lr", 0)
        .Says("Learning rate at both ends of the cycle", "required")
        .PartOf("scheduler")
        .At([](auto& c) -> auto& { return SchedulerOf(c).cycle_min_lr; }),
    Number("cycle_max_lr", 0)
        .Says("Learning rate at the peak of the cycle", "required")
        .PartOf("scheduler")
        .At([](auto& c) -> auto& { return SchedulerOf(c).cycle_max_lr; }),
    Number("decay_lr_rate", 0)
        .Says("Decay of the learning rate after the cycle", "0")
        .PartOf("scheduler")
        .At([](auto& c) -> auto& { return SchedulerOf(c).decay_lr_rate; }),
    Whole("cycle_first_step_size", 1).Says("Steps of the rising half", "2000").PartOf("scheduler").At([
    ](auto& c) -> auto& { return SchedulerOf(c).cycle_first_step_size; }),
    Whole("cycle_second_step_size", 1)
        .Says("Steps of the falling half", "that of the rising half")
        .PartOf("scheduler")
        .At([](auto& c) -> auto& { return SchedulerOf(c).cycle_second_step_size; }),
    Whole("cycle_first_stair_count", 0)
        .Says("Stairs of the rising half; 0 is continuous", "0")
        .PartOf("scheduler")
        .At([](auto& c) -> auto& { return SchedulerOf(c).cycle_first_stair_count; }),
    Whole("cycle_second_stair_count", 0)
        .Says("Stairs of the falling half", "that of the rising half")
        .PartOf("scheduler")
        .At([](auto& c) -> auto& { return SchedulerOf(c).cycle_second_stair_count; }),
    Whole("decay_step_size", 0)
        .Says("Steps between decays after the cycle; 0 is none", "0")
        .PartOf("scheduler")
        .At([](auto& c) -> auto& { return SchedulerOf(c).decay_step_size; }),
    Bool("cycle_momentum").Says("Cycles the momentum too", "true").PartOf("scheduler").At([
    ](auto& c) -> auto& { return SchedulerOf(c).cycle_momentum; }),
    Number("cycle_min_mom", 0, 1).Says("Momentum at the peak of the cycle", "0.8").PartOf("scheduler").At([
    ](auto& c) -> auto& { return SchedulerOf(c).cycle_min_mom; }),
    Number("cycle_max_mom", 0, 1).Says("Momentum at both ends of the cycle", "0.9").PartOf("scheduler").At([
    ](auto& c) -> auto& { return SchedulerOf(c).cycle_max_mom; }),
    Number("decay_mom_rate", 0).Says("Decay of the momentum after the cycle", "0").PartOf("scheduler").At([
    ](auto& c) -> auto& { return SchedulerOf(c).decay_mom_rate; }),
    kLastBatch,
});

constexpr auto kWarmupLr = std::to_array<Setting>({
    kWarmupMinLr,
    kWarmupMaxLr,
    kWarmupNumSteps,
    kWarmupType,
    kLastBatch,
});

constexpr auto kWarmupDecayLr = std::to_array<Setting>({
    kWarmupMinLr,
    kWarmupMaxLr,
    kWarmupNumSteps,
    kWarmupType,
    kTotalNumSteps,
    kLastBatch,
});

constexpr auto kWarmupCosineLr = std::to_array<Setting>({
    kTotalNumSteps,
    Number("warmup_min_ratio", 0)
        .Says("Learning rate of the first step, relative to the optimizer's", "0")
        .PartOf("scheduler")
        .At([](auto& c) -> auto& { return SchedulerOf(c).warmup_min_ratio; }),
    kWarmupNumSteps,
    Number("cos_min_ratio", 0)
        .Says("Learning rate of the last step, relative to the optimizer's", "1e-4")
        .PartOf("scheduler")
        .At([](auto& c) -> auto& { return SchedulerOf(c).cos_min_ratio; }),
    kWarmupType,
    kLastBatch,
});

constexpr auto kFp16 = std::to_array<Setting>({
    Bool("enabled")
        .Says("Computes in fp16, with a loss scale", "false")
        .Fixed("dtype")
        .AsPart()
        .Called("fp16 or bf16")
        .At([](auto& c) -> auto& { return c.fp16.enabled; }),
    Number("loss_scale", 0, 0x1p127)
        .Says("Fixed loss scale; 0 is dynamic", "0")
        .PartOf("loss_scale")
        .Called("loss scale of fp16")
        .At([](auto& c) -> auto& { return c.fp16.loss_scale; }),
    Whole("initial_scale_power", 0, 127)
        .Says("First dynamic loss scale, a power of 2", "16")
        .PartOf("loss_scale")
        .At([](auto& c) -> auto& { return c.fp16.initial_scale_power; }),
    Whole("loss_scale_window", 1)
        .Says("Steps without overflow before the loss scale doubles", "1000")
        .PartOf("loss_scale")
        .At([](auto& c) -> auto& { return c.fp16.loss_scale_window; }),
    Whole("hysteresis", 1).Says("Overflows before the loss scale is halved", "2").PartOf("loss_scale").At([
    ](auto& c) -> auto& { return c.fp16.hysteresis; }),
    Bool("consecutive_hysteresis")
        .Says("Restores the hysteresis after each step without overflow", "false")
        .PartOf("loss_scale")
        .At([](auto& c) -> auto& { return c.fp16.consecutive_hysteresis; }),
    Number("min_loss_scale", 0x1p-126, 0x1p127)
        .Says("Least dynamic loss scale", "1")
        .PartOf("loss_scale")
        .At([](auto& c) -> auto& { return c.fp16.min_loss_scale; }),
    Needless("auto_cast", KeyType::kBool, "inputs are token ids, which have nothing to cast")
        .Answers("fp16_auto_cast", "false"),
    Needless("fused_mode", KeyType::kBool, "the update is always one fused pass"),
    Refused("fp16_master_weights_and_grads", "masters are fp32: fp16 ones lose small updates")
        .Answers("fp16_master_weights_and_gradients", "false"),
});

constexpr auto kBf16 = std::to_array<Setting>({
    Bool("enabled").Says("Computes in bf16", "false").Fixed("dtype").AsPart().At([](auto& c) -> auto& {
      return c.bf16;
    }),
    Needless("immediate_grad_update", KeyType::kBool,
             "a block's gradient is consumed as early as the plan allows"),
    Ignored("check_grad_overflow", KeyType::kBool, "gradients are always checked"),
    Refused("bf16_master_weights_and_grads", "masters are fp32, kept as bf16 and a 16-bit remainder")
        .Answers("bf16_master_weights_and_gradients", "false"),
    Refused("bf16_optimizer_states", "write \"penstock\": {\"optimizer_states\": \"bf16\"}")
        .Answers("bf16_optimizer_states", "false"),
});

constexpr auto kZero = std::to_array<Setting>({
    Whole("stage", 0, 3).Says("ZeRO stage; 1 and 2 keep weights whole on each of several ranks", "3").At([
    ](auto& c) -> auto& { return c.zero.stage; }),
    Object("offload_param").Answers("zero_offload_param", "null"),
    Object("offload_optimizer").Answers("zero_offload_optimizer", "null"),
    Whole("sub_group_size", 0)
        .Says("Upper bound of a tile, in elements", "the planner's choice")
        .At([](auto& c) -> auto& { return c.zero.sub_group_size_elements; })
        .Answers("zero_sub_group_size", "1000000000"),
    Ignored("reduce_bucket_size", KeyType::kWhole, "a block is reduced as one, in small pieces")
        .AtLeast(0)
        .Answers("zero_reduce_bucket_size", "500000000"),
    Ignored("allgather_bucket_size", KeyType::kWhole, "a block is gathered as one")
        .AtLeast(0)
        .Answers("zero_allgather_bucket_size", "500000000"),
    Whole("stage3_prefetch_bucket_size", 0)
        .Says("Upper bound of weights read ahead of their use, in elements", "the planner's choice")
        .At([](auto& c) -> auto& { return c.zero.prefetch_bucket_size_elements; })
        .Answers("zero_prefetch_bucket_size", "50000000"),
    AlsoCalled(Whole("stage3_prefetch_bucket_size", 0), "prefetch_bucket_size"),
    Whole("stage3_max_live_parameters", 0)
        .Says("Upper bound of weights in flight, in elements", "the planner's choice")
        .At([](auto& c) -> auto& { return c.zero.max_live_parameters_elements; })
        .Answers("zero_max_live_parameters", "1000000000"),
    AlsoCalled(Whole("stage3_max_live_parameters", 0), "max_live_parameters"),
    Whole("stage3_max_reuse_distance", 0)
        .Says("Weights stay in memory only where at most this many elements are used between two uses",
              "no bound")
        .At([](auto& c) -> auto& { return c.zero.max_reuse_distance_elements; })
        .Answers("zero_max_reuse_distance", "1000000000"),
    AlsoCalled(Whole("stage3_max_reuse_distance", 0), "max_reuse_distance"),
    Whole("stage3_param_persistence_threshold", 0)
        .Says("Blocks of at most this many elements stay in memory", "the planner's choice")
        .At([](auto& c) -> auto& { return c.zero.param_persistence_elements; })
        .Answers("zero_param_persistence_threshold", "100000"),
    AlsoCalled(Whole("stage3_param_persistence_threshold", 0), "param_persistence_threshold"),
    Whole("stage3_model_persistence_threshold", 0, 0x1p63)
        .Says("Upper bound of all blocks that stay by the threshold, in elements", "no bound")
        .At([](auto& c) -> auto& { return c.zero.model_persistence_elements; })
        .Answers("zero_model_persistence_threshold", "9223372036854775807"),
    AlsoCalled(Whole("stage3_model_persistence_threshold", 0, 0x1p63), "model_persistence_threshold"),
    Bool("cpu_offload").Says("Old name of offload_optimizer with device cpu").EachStart(),
    Bool("cpu_offload_param").Says("Old name of offload_param with device cpu").EachStart(),

    Needless("contiguous_gradients", KeyType::kBool, "a block's gradients are always contiguous")
        .Answers("zero_contiguous_gradients", "true"),
    Needless("reduce_scatter", KeyType::kBool, kRankOrderSum).Answers("zero_reduce_scatter", "true"),
    Needless("use_multi_rank_bucket_allreduce", KeyType::kBool, kRankOrderSum)
        .Answers("zero_multi_rank_bucket_allreduce", "true"),
    Needless("allgather_partitions", KeyType::kBool, "a block is gathered as one")
        .Answers("zero_allgather_partitions", "true"),
    Needless("overlap_comm", KeyType::kBool, "everything that can overlap does")
        .Answers("zero_overlap_comm", "true"),
    Needless("load_from_fp32_weights", KeyType::kBool, "masters are always exact")
        .Answers("zero_load_from_fp32_weights", "true"),
    Needless("stage3_gather_16bit_weights_on_model_save", KeyType::kBool,
             "penstock export writes whole weights from any state directory"),
    AlsoCalled(Needless("stage3_gather_16bit_weights_on_model_save", KeyType::kBool,
                        "penstock export writes whole weights from any state directory"),
               "gather_16bit_weights_on_model_save"),
    OnceCalled(Needless("stage3_gather_16bit_weights_on_model_save", KeyType::kBool,
                        "penstock export writes whole weights from any state directory"),
               "stage3_gather_fp16_weights_on_model_save"),
    Needless("stage3_module_granularity_threshold", KeyType::kWhole,
             "the unit is a block, given by the model")
        .Answers("zero_module_granularity_threshold", "0"),
    AlsoCalled(Needless("stage3_module_granularity_threshold", KeyType::kWhole,
                        "the unit is a block, given by the model"),
               "module_granularity_threshold"),
    Needless("stage3_use_all_reduce_for_fetch_params", KeyType::kBool, "a block is gathered as one"),
    AlsoCalled(
        Needless("stage3_use_all_reduce_for_fetch_params", KeyType::kBool, "a block is gathered as one"),
        "use_all_reduce_for_fetch_params"),
    Needless("stage3_allgather_sequential", KeyType::kBool, "a block is gathered as one")
        .Answers("zero_allgather_sequential", "false"),
    AlsoCalled(Needless("stage3_allgather_sequential", KeyType::kBool, "a block is gathered as one"),
               "allgather_sequential"),
    Needless("stage3_partition_stream_chunk_size", KeyType::kWhole, "blocks are built one at a time"),
    AlsoCalled(
        Needless("stage3_partition_stream_chunk_size", KeyType::kWhole, "blocks are built one at a time"),
        "partition_stream_chunk_size"),
    Needless("cpu_offload_use_pin_memory", KeyType::kBool, "host memory is always one pinned arena"),
    Needless("ignore_unused_parameters", KeyType::kBool,
             "penstock.missing_gradients says what becomes of a parameter without a gradient")
        .Answers("zero_ignore_unused_parameters", "true"),
    Needless("legacy_stage1", KeyType::kBool, "there is one implementation")
        .Answers("zero_legacy_stage1", "false"),
    Needless("round_robin_gradients", KeyType::kBool, "every block is cut evenly over ranks")
        .Answers("zero_round_robin_gradients", "false"),
    Needless("memory_efficient_linear", KeyType::kBool,
             "a block's backward always recomputes from its saved input"),
    Needless("pipeline_loading_checkpoint", KeyType::kBool, "checkpoints are always streamed"),
    Needless("override_module_apply", KeyType::kBool, "blocks are initialised by their factories"),
    Needless("log_trace_cache_warnings", KeyType::kBool, "a miss of the plan is always said once")
        .Answers("zero_log_trace_cache_warnings", "false"),
    Needless("enable_sanity_checks", KeyType::kBool, "checks are always on")
        .Answers("is_sanity_checks_enabled", "false"),
    Needless("leaf_module", KeyType::kObject, "the unit is a block, given by the model"),
    Needless("compute_grad_norm", KeyType::kBool, "the norm is always computed, as every report has it"),
    Needless("parameter_alignment", KeyType::kBool, "parameters are always aligned"),
    Needless("save_muon_momentum_buffer_in_memory", KeyType::kBool, "it only concerns Muon")
        .Answers("zero_save_muon_momentum_buffer_in_memory", "false"),

    Refused("elastic_checkpoint", "DeepSpeed has dropped it; Penstock's checkpoints need no such key")
        .Answers("zero_elastic_checkpoint", "false"),
    Refused(
        "zenflow",
        "it applies most gradients steps after they were made, which changes the result; here updates hide "
        "behind reads and backward and wait for nothing")
        .Answers("zenflow_config", "null"),
    Bool("zero_quantized_weights")
        .Says("Ranks hand each other weights in 8 bits, with a scale for each 128 (ZeRO++'s qwZ): half the "
              "bytes of bf16. Each weight of another rank is off by up to 0.4% of the largest of its 128",
              "false")
        .Flag("--zero-quantized-weights")
        .Keyword("zero_quantized_weights")
        .InPython("Losses are then not those of whole exchanges. Recorded with the run.")
        .ByName("zero_quantized_weights")
        .Settles("false")
        .NeedsRanks(kNoOtherRanks)
        .Neutral("false")
        .Sets([](auto& o) -> auto& { return o.exchange.weights; })
        .Answers("zero_quantized_weights", "false"),
    Bool("zero_quantized_gradients")
        .Says(
            "Ranks hand each other gradients in 4 bits, with a scale for each 128 (ZeRO++'s qgZ): a quarter "
            "of the bytes of bf16. Each rank's share of a gradient is off by up to 7.2% of the largest "
            "of its 128",
            "false")
        .Flag("--zero-quantized-gradients")
        .Keyword("zero_quantized_gradients")
        .InPython("Losses are then not those of whole exchanges. Recorded with the run.")
        .ByName("zero_quantized_gradients")
        .Settles("false")
        .NeedsRanks(kNoOtherRanks)
        .Neutral("false")
        .Sets([](auto& o) -> auto& { return o.exchange.gradients; })
        .Answers("zero_quantized_gradients", "false"),
    Refused("zero_hpz_partition_size",
            "a second copy of all weights within each host would take the memory that a streamed model does "
            "not have; weights that stay in memory (stage 2) are gathered once a step",
            "1")
        .Answers("zero_hpz_partition_size", "1"),
    Refused("zero_quantized_nontrainable_weights", "weights are stored unchanged")
        .Answers("zero_quantized_nontrainable_weights", "false"),
    Refused(
        "zeropp_loco_param",
        "it corrects the error of zero_quantized_gradients by a second copy of all gradients, which is not "
        "kept")
        .Answers("zeropp_loco_param", "null"),
    Refused("mics_shard_size", "state is cut over all ranks, not over groups", "-1")
        .Answers("mics_shard_size", "-1"),
    Refused("mics_hierarchical_params_gather", "state is cut over all ranks, not over groups"),
});

constexpr auto kOffloadParam = std::to_array<Setting>({
    Choice("device", "none|cpu|nvme")
        .Says("Where weights and optimizer state live: the farther of both offload blocks counts", "none")
        .EachStart()
        .At([](auto& c) -> auto& { return c.zero.offload_param.device; }),
    Text("nvme_path").Says("Directory of the training state").EachStart().OfRank().At([](auto& c) -> auto& {
      return c.zero.offload_param.nvme_path;
    }),
    Whole("buffer_count", 0, 0x1p31)
        .Says("Upper bound of blocks of weights in flight", "the planner's choice")
        .At([](auto& c) -> auto& { return c.zero.offload_param.buffer_count; }),
    Whole("buffer_size", 0)
        .Says("Elements of one buffer: with buffer_count an upper bound of weights in flight",
              "the planner's choice")
        .At([](auto& c) -> auto& { return c.zero.offload_param.buffer_size_elements; }),
    Whole("max_in_cpu", 0)
        .Says("Upper bound of weights that stay in host memory, in elements", "no bound")
        .At([](auto& c) -> auto& { return c.zero.offload_param.max_in_cpu_elements; }),
    Needless("pin_memory", KeyType::kBool, "host memory is always one pinned arena"),
});

constexpr auto kOffloadOptimizer = std::to_array<Setting>({
    Choice("device", "none|cpu|nvme")
        .Says("Where weights and optimizer state live: none (on the computing device), cpu or nvme",
              "nvme; none with a configuration of DeepSpeed's that has neither an offload block nor a "
              "directory")
        .Flag("--offload")
        .Keyword("offload")
        .EachStart()
        .At([](auto& c) -> auto& { return c.zero.offload_optimizer.device; }),
    Text("nvme_path").Says("Directory of the training state").EachStart().OfRank().At([](auto& c) -> auto& {
      return c.zero.offload_optimizer.nvme_path;
    }),
    Whole("buffer_count", 0, 0x1p31)
        .Says("Upper bound of optimizer state in flight, in buffers of sub_group_size",
              "the planner's choice")
        .At([](auto& c) -> auto& { return c.zero.offload_optimizer.buffer_count; }),
    Needless("buffer_size", KeyType::kWhole,
             "the optimizer's buffers have the size of a tile; see sub_group_size"),
    Needless("pin_memory", KeyType::kBool, "host memory is always one pinned arena"),
    Needless("pipeline", KeyType::kBool, "it follows from pipeline_read and pipeline_write"),
    Bool("pipeline_read").Says("Reads optimizer state ahead of the update", "true").At([](auto& c) -> auto& {
      return c.zero.offload_optimizer.pipeline_read;
    }),
    Bool("pipeline_write").Says("Writes optimizer state behind the update", "true").At([](auto& c) -> auto& {
      return c.zero.offload_optimizer.pipeline_write;
    }),
    Needless("fast_init", KeyType::kBool, "blocks go straight to their tier as they are built"),
    Number("ratio", 0, 1)
        .Says("Least fraction of the state that the processor updates; a device updates the rest",
              "the planner's choice")
        .NeedsDevice("the processor updates everything")
        .At([](auto& c) -> auto& { return c.zero.offload_optimizer.ratio; })
        .Answers("zero_partial_offload", "1.0"),
    Ignored(
        "super_offload", KeyType::kBool,
        "DeepSpeed then updates in a process beside backward, and takes an update that overflowed back by "
        "arithmetic; here the planner puts updates beside backward where that is faster, and one that was "
        "wrong is made again from the version before",
        "false")
        .Answers("super_offload", "false"),
    Needless("convert_grad_on_cpu", KeyType::kBool, "the cast is fused into the update"),
    Needless("cpuadam_cores_perc", KeyType::kNumber, "give penstock.update_threads")
        .Answers("cpuadam_cores_perc", "0.9"),
});

constexpr auto kAio = std::to_array<Setting>({
    Whole("block_size", 4096, 0x1p30).Says("Upper bound of one request, in bytes", "measured").OfRank().At([
    ](auto& c) -> auto& { return c.aio.block_size_bytes; }),
    Whole("queue_depth", 1, 65536).Says("Requests in flight for each I/O thread", "measured").OfRank().At([
    ](auto& c) -> auto& { return c.aio.queue_depth; }),
    Whole("intra_op_parallelism", 1, 1024)
        .Says("I/O threads that queue_depth is meant for", "1")
        .OfRank()
        .At([](auto& c) -> auto& { return c.aio.intra_op_parallelism; }),
    AlsoCalled(Whole("intra_op_parallelism", 1, 1024).OfRank(), "thread_count"),
    AlsoCalled(Whole("intra_op_parallelism", 1, 1024).OfRank(), "num_threads"),
    Needless("single_submit", KeyType::kBool, "requests are handed over in batches as they come"),
    Needless("overlap_events", KeyType::kBool, "the queue is always refilled as requests complete"),
    Bool("use_gds")
        .Says("Reads weights from the drive to the device, past host memory (GPUDirect Storage)", "false")
        .NeedsDevice("weights go by way of host memory")
        .Neutral("false")
        .Sets([](auto& o) -> auto& { return o.storage.gds; }),
});

constexpr auto kActivationCheckpointing = std::to_array<Setting>({
    Bool("cpu_checkpointing")
        .Says("Saved activations wait for backward in host memory, and not on the device: as "
              "penstock.saved_activations \"host\", where that is not given",
              "false")
        .NeedsDevice("saved activations are in the memory where they are computed, or where "
                     "penstock.saved_activations says")
        .Neutral("false")
        .At([](auto& c) -> auto& { return c.cpu_checkpointing; }),
    Needless("partition_activations", KeyType::kBool,
             "all ranks are data-parallel: each has its own activations"),
    Needless("number_checkpoints", KeyType::kWhole, "one input is saved for each block"),
    Needless("contiguous_memory_optimization", KeyType::kBool, "saved inputs come from one arena"),
    Needless("synchronize_checkpoint_boundary", KeyType::kBool, "nothing needs it"),
    Needless("profile", KeyType::kBool, kOwnReports),
});

constexpr auto kCheckpoint = std::to_array<Setting>({
    {.name = "tag_validation",
     .use = kNeedless,
     .type = KeyType::kChoice,
     .why = "a checkpoint's tag is its step, which all ranks agree on",
     .choices = "Ignore|Warn|Fail"},
    Needless("use_node_local_storage", KeyType::kBool, "every rank writes to its own directory")
        .Answers("use_node_local_storage", "false"),
    Needless("parallel_write", KeyType::kObject, "every rank writes its own part"),
    Needless("checkpoint_serialization", KeyType::kBool, "the format is Penstock's own")
        .Answers("checkpoint_serialization_enabled", "true"),
    Ignored("writer", KeyType::kObject,
            "DeepSpeed then writes through pinned buffers of its own; here checkpoints always go from pinned "
            "memory past the page cache, as the aio block says"),
    Ignored(
        "load_universal", KeyType::kBool,
        "a checkpoint of DeepSpeed's is recognised by its files, universal or of ZeRO-1, 2 or 3: penstock "
        "import-checkpoint and, from Python, engine.load_checkpoint read each of them",
        "false")
        .Answers("load_universal_checkpoint", "false"),
});

constexpr auto kParallelWrite = std::to_array<Setting>({
    Needless("pipeline_stage", KeyType::kBool, "there are no pipeline stages"),
});

constexpr std::string_view kWriterIsOne = "there is one way to write";

constexpr auto kCheckpointWriter = std::to_array<Setting>({
    {.name = "type",
     .use = kNeedless,
     .type = KeyType::kChoice,
     .why = kWriterIsOne,
     .choices = "mock|python|fast"},
    Needless("decoupled", KeyType::kBool,
             "checkpoints are copied while training goes on, from Python under DeepSpeed's name where this "
             "is true"),
    {.name = "io_buffer_size", .use = kNeedless, .type = KeyType::kWhole, .why = kWriterIsOne, .least = 1},
    Needless("io_buffer_double", KeyType::kBool, kWriterIsOne),
    {.name = "io_multiplier", .use = kNeedless, .type = KeyType::kWhole, .why = kWriterIsOne, .least = 1},
    Needless("show_statistics", KeyType::kBool, kOwnReports),
    {.name = "data_parallel",
     .use = kNeedless,
     .type = KeyType::kChoice,
     .why = "every rank writes its own part",
     .choices = "replica|socket|machine"},
});

template <MonitorConfig Config::*monitor>
constexpr auto kMonitor = std::to_array<Setting>({
    Bool("enabled").Says("Writes scalars of every step", "false").At([](auto& c) -> auto& {
      return (c.*monitor).enabled;
    }),
    Path("output_path").Says("Directory that job_name lies in", "the working directory").OfRank().At([
    ](auto& c) -> auto& { return (c.*monitor).output_path; }),
    Text("job_name").Says("Directory of the files", "DeepSpeedJobName").At([](auto& c) -> auto& {
      return (c.*monitor).job_name;
    }),
});

// Passed on to wandb.init by Python's front end.
constexpr auto kWandb = std::to_array<Setting>({
    Bool("enabled")
        .Says("Sends the scalars of every step to Weights & Biases", "false")
        .EachStart()
        .OnCommandLine(kWandbsClient)
        .Neutral("false")
        .At([](auto& c) -> auto& { return c.wandb.enabled; }),
    Text("project").Says("Its project", "deepspeed").EachStart().At([](auto& c) -> auto& {
      return c.wandb.project;
    }),
    Text("group").Says("Its group of runs", "none").EachStart().At([](auto& c) -> auto& {
      return c.wandb.group;
    }),
    Text("team").Says("Its entity: a team or a user", "the user who is logged in").EachStart().At([
    ](auto& c) -> auto& { return c.wandb.team; }),
});

constexpr auto kFlopsProfiler = std::to_array<Setting>({
    Bool("enabled")
        .Says("Prints the operations of one step", "false")
        .At([](auto& c) -> auto& { return c.flops_profiler.enabled; })
        .Answers("flops_profiler_enabled", "false"),
    Whole("profile_step", 1)
        .Says("Step that is profiled", "1")
        .At([](auto& c) -> auto& { return c.flops_profiler.profile_step; })
        .Answers("flops_profiler_profile_step", "1"),
    Whole("module_depth", -1)
        .Says("Depth of the profile; 0 is the model alone", "-1")
        .FromPython("from Python the profile is of the model as one")
        .At([](auto& c) -> auto& { return c.flops_profiler.module_depth; })
        .Answers("flops_profiler_module_depth", "-1"),
    Whole("top_modules", 0)
        .Says("Blocks that are named as those that take most time", "1")
        .FromPython("from Python the profile is of the model as one")
        .At([](auto& c) -> auto& { return c.flops_profiler.top_modules; })
        .Answers("flops_profiler_top_modules", "1"),
    Bool("detailed")
        .Says("Prints a line for each block", "true")
        .FromPython("from Python the profile is of the model as one")
        .At([](auto& c) -> auto& { return c.flops_profiler.detailed; })
        .Answers("flops_profiler_detailed", "true"),
    Text("output_file")
        .Says("File of the profile", "stderr")
        .OfRank()
        .At([](auto& c) -> auto& { return c.flops_profiler.output_file; })
        .Answers("flops_profiler_output_file", "null"),
    Needless("recompute_fwd_factor", KeyType::kNumber,
             "every stage is computed once more in backward, and the profile says so")
        .Answers("flops_profiler_recompute_fwd_factor", "0.0"),
});

constexpr auto kCommsLogger = std::to_array<Setting>({
    Bool("enabled").Says("Prints a table of the exchanges between ranks at the end", "false").At([
    ](auto& c) -> auto& { return c.comms_logger; }),
    Needless("verbose", KeyType::kBool, "the table at the end has all exchanges; `trace` has each"),
    Needless("prof_all", KeyType::kBool, "the table at the end has all exchanges"),
    Needless("prof_ops", KeyType::kAny, "the table at the end has all exchanges"),
    Needless("debug", KeyType::kBool, "who calls is the plan"),
});

constexpr Setting kMicroBatches =
    Wholes("micro_batch_sizes", 1, 1 << 20)
        .Says("Micro-batches that may be chosen, in sequences", "required")
        .PartOf("batch")
        .Into(
            [](Config& c, const json& v) { c.elasticity.micro_batch_sizes = v.get<std::vector<int64_t>>(); },
            [](const Config& c) {
              const std::vector<int64_t>& sizes = c.elasticity.micro_batch_sizes;
              return sizes.empty() ? json() : json(sizes);
            });
constexpr std::string_view kNodesOfRanks =
    "version 0.2 counts whole nodes and tensor parallelism; leave it at 1, and every rank counts";

constexpr auto kElasticity = std::to_array<Setting>({
    Bool("enabled")
        .Says("Chooses a batch that many numbers of ranks can share", "false")
        .PartOf("batch")
        .At([](auto& c) -> auto& { return c.elasticity.enabled; })
        .Answers("elasticity_enabled", "false"),
    Whole("max_train_batch_size", 1, 0x1p30)
        .Says("Largest batch, in sequences", "required")
        .PartOf("batch")
        .At([](auto& c) -> auto& { return c.elasticity.max_train_batch_size; }),
    kMicroBatches,
    Whole("min_gpus", 1, 0x1p31).Says("Least number of ranks", "1").PartOf("batch").At([](auto& c) -> auto& {
      return c.elasticity.min_gpus;
    }),
    Whole("max_gpus", 1, 0x1p31).Says("Largest number of ranks", "10000").PartOf("batch").At([
    ](auto& c) -> auto& { return c.elasticity.max_gpus; }),
    Bool("prefer_larger_batch")
        .Says("Prefers the larger of equally good batches", "true")
        .PartOf("batch")
        .At([](auto& c) -> auto& { return c.elasticity.prefer_larger_batch; }),
    Bool("ignore_non_elastic_batch_info")
        .Says("Accepts batch sizes beside it, without effect", "false")
        .PartOf("batch")
        .At([](auto& c) -> auto& { return c.elasticity.ignore_non_elastic_batch_info; }),
    Needless("min_time", KeyType::kNumber, "it is for the scheduler that starts the ranks"),
    Needless("version", KeyType::kNumber, "0.1, and 0.2 with one rank a node and no tensor parallelism"),
    Refused("model_parallel_size", kNodesOfRanks, "1"),
    Refused("num_gpus_per_node", kNodesOfRanks, "1"),
});

constexpr auto kPenstock = std::to_array<Setting>({
    Size("host_memory", 1)
        .Says("Hard host memory budget, such as 512MiB or 4GiB", "half of the free memory")
        .Flag("--host-memory")
        .Keyword("host_memory")
        .InPython("It holds weights, gradients, states and transfers and, with state on a drive, the inputs "
                  "that blocks keep for backward, three of each micro-batch apart. What torch takes for "
                  "activations while a block is computed comes on top.")
        .OfRank()
        .Python("no bound; of a model of which nothing trains, half of what is free")
        .At([](auto& c) -> auto& { return c.penstock.host_memory_budget_bytes; }),
    Size("device_memory", 1)
        .Says("Hard device memory budget", "the free memory of the device")
        .Flag("--device-memory")
        .Keyword("device_memory")
        .InPython("It holds the engine's blocks and torch's tensors of a step together. Blocks get what a "
                  "step's tensors, which the first forward finds out, leave of it: weights on their way, "
                  "those that stay, and blocks that live there with their states and are updated there.")
        .Python("none: weights are copied block by block, and no state is on the device")
        .OfRank()
        .NeedsDevice("state is in host memory and on drives")
        .At([](auto& c) -> auto& { return c.penstock.device_memory_budget_bytes; }),
    Paths("state_dirs")
        .Says("Directory of the training state. Several directories share its bytes: in proportion to the "
              "measured "
              "speed of their drives, or to the weights of DIR=WEIGHT",
              "penstock-state")
        .Flag("--state-dir")
        .Keyword("state_dir")
        .InPython("It is made where it is missing. In the configuration, it takes the place of nvme_path.")
        .OfRank()
        .Python("required with offload to nvme")
        .At([](auto& c) -> auto& { return c.penstock.state_dirs; }),
    Choice("durability", "step|checkpoint")
        .Says("What a crash goes back to: the last step, or the last checkpoint", "step")
        .ByName("durability")
        .Settles("\"step\"")
        .NeedsDrive("state in memory is kept by checkpoints")
        .Neutral("\"checkpoint\"")
        .At([](auto& c) -> auto& { return c.penstock.durability; })
        .Sets([](auto& o) -> auto& { return o.storage.durability; }),
    Choice("sync", "process|power")
        .Says("What a commit survives: the end of the process, or a loss of power", "process")
        .ByName("sync")
        .Settles("\"process\"")
        .NeedsDrive("state in memory is kept by checkpoints")
        .Neutral("\"process\"")
        .Sets([](auto& o) -> auto& { return o.storage.sync; }),
    Whole("versions", 1, 3)
        .Says("Versions of everything on the drive", "2")
        .Fixed("")
        .NeedsDrive("state in memory has one")
        .At([](auto& c) -> auto& { return c.penstock.versions; })
        .Sets([](auto& o) -> auto& { return o.storage.versions; }),
    Choice("order", "auto|next_forward|in_backward")
        .Says(
            "When tiles are updated: in backward, which without a drive takes a device with its own memory, "
            "or in the next forward, as Lamb's always are",
            "auto")
        .At([](auto& c) -> auto& { return c.penstock.order; })
        .Sets([](auto& o) -> auto& { return o.optimizer.order; }),
    Choice("prefer", "wear|time")
        .Says("Whether a clipped step may read more to be shorter (time) or not (wear)", "wear")
        .NeedsDrive("no step reads a drive")
        .Neutral("\"wear\"")
        .At([](auto& c) -> auto& { return c.penstock.prefer; })
        .Sets([](auto& o) -> auto& { return o.optimizer.prefer; }),
    Choice("replan", "auto|off")
        .Says("Whether a run whose first steps take half as much again as was predicted or more, or half as "
              "much or less, is planned once more with what they showed (auto) or not (off)",
              "auto")
        .Flag("--replan")
        .Of(Verb::kTrain)
        .Keyword("replan")
        .InPython("The engine plans before a later step and goes on with the same bits; ``engine.log()`` and "
                  "``engine.report()`` say what came of it. With state on a drive, in one process.")
        .At([](auto& c) -> auto& { return c.penstock.replan; }),
    Choice("optimizer_states", "fp32|bf16|8bit")
        .Says("Type of the optimizer's moments: fp32, bf16 or 8bit", "fp32")
        .Flag("--optimizer-states")
        .Fixed("optimizer_states")
        .Settles("\"fp32\"")
        .At([](auto& c) -> auto& { return c.penstock.optimizer_states; })
        .Sets([](auto& o) -> auto& { return o.optimizer.states; }),
    Choice("missing_gradients", "zeros|skip")
        .Says("What a step does to a parameter without a gradient: updates it by zeros, as DeepSpeed does, "
              "or leaves it as it is, as torch.optim does",
              "skip; under DeepSpeed's name zeros, but for accelerate and Trainer")
        .Keyword("missing_gradients")
        .InPython("A gradient is missing if none came in any micro-batch or on any rank. With \"skip\" "
                  "weights and moments keep their bits, and the count of updates stays as it is.")
        .OnCommandLine("the parameters of its models have a gradient in each step")
        .At([](auto& c) -> auto& { return c.penstock.missing_gradients; }),
    Size("tile_bytes", 65536, 0x1p30)
        .Says("Upper bound of the weights of a tile, in bytes", "the planner's choice")
        .Sets([](auto& o) -> auto& { return o.memory.tile_bytes; }),
    Choice("saved_activations", "auto|memory|host|drive")
        .Says("Where the inputs that blocks keep for backward wait for it: in the memory where they are "
              "computed (memory), of a device in host memory (host), or on the drive (drive). With auto they "
              "are in memory as far as the budget goes, and the others in the next tier",
              "auto")
        .Flag("--saved-activations")
        .Keyword("saved_activations")
        .InPython("Losses have the same bits. Inputs that the model's outputs hold as well "
                  "(output_hidden_states=True) take memory all the same, and so does what several blocks are "
                  "given (masks, rotary positions).")
        .At([](auto& c) -> auto& { return c.penstock.saved_activations; }),
    Ignored("io_threads", KeyType::kWhole, "one thread drives a device at its full speed").AtLeast(1),
    Whole("update_threads", 1, 4096).Says("Threads that update", "one per core").OfRank().At([
    ](auto& c) -> auto& { return c.penstock.update_threads; }),
    Choice("placement", "auto|cpu|cuda|const")
        .Says("What stays in memory, as ColossalAI's placement policies", "auto")
        .At([](auto& c) -> auto& { return c.penstock.placement; }),
    Size("placement_const_bytes", 0)
        .Says("Upper bound of what stays with placement const, in bytes", "512MiB")
        .At([](auto& c) -> auto& { return c.penstock.placement_const_bytes; }),
    Number("gpu_margin_mem_ratio", 0, 1)
        .Says("Fraction of the memory that is left which optimizer state takes", "the planner's choice")
        .At([](auto& c) -> auto& { return c.penstock.state_fraction; }),
    Number("wear_budget_tb", 1e-9, 1e9)
        .Says("Terabytes (10^12 bytes) that the run may write to drives", "no bound")
        .At([](auto& c) -> auto& { return c.penstock.wear_budget_tb; }),
    Number("watchdog_seconds", 0, 1e9)
        .Says("Seconds after which a stuck operation is named; 0 is never", "60")
        .Python("0")
        .At([](auto& c) -> auto& { return c.penstock.watchdog_seconds; }),
    Number("watchdog_abort_seconds", 0.001, 1e9)
        .Says("Seconds after which a stuck operation ends the run", "never")
        .At([](auto& c) -> auto& { return c.penstock.watchdog_abort_seconds; }),
    Names("blocks")
        .Says("Names of the modules that are fetched as one; [\"\"] is the whole model", "they are found")
        .Keyword("blocks")
        .InPython("Parameters of none of them stay in memory for a whole pass.")
        .EachStart()
        .OnCommandLine(kPythonsModels)
        .At([](auto& c) -> auto& { return c.penstock.blocks; }),
    Whole("forwards_per_step", 1, 0x1p20)
        .Says("Forwards of the model whose losses a step may use", "one for each micro-batch")
        .Keyword("forwards_per_step")
        .InPython("A loss may be made of several, as of a pair of answers or two views of an image. More are "
                  "noticed as they come, and computed twice.")
        .EachStart()
        .OnCommandLine(kPythonsModels)
        .At([](auto& c) -> auto& { return c.penstock.forwards_per_step; }),
    Choice("dtype", "fp32|bf16|fp16")
        .Says("Type of weights and activations, in the place of bf16.enabled and fp16.enabled, which it may "
              "not contradict",
              "what bf16 and fp16 say")
        .Python("what bf16 and fp16 say, else fp32")
        .Keyword("dtype", "Any")
        .InPython("A torch.dtype, or its name; masters and optimizer states are fp32.")
        .Fixed("")
        .At([](auto& c) -> auto& { return c.penstock.dtype; }),
    Whole("seed", 0, 0x1p62)
        .Says("Seed of what the engine itself draws: the rounding of 8-bit optimizer states", "1")
        .Keyword("seed")
        .Fixed("")
        .OnCommandLine(kSeedFlag)
        .At([](auto& c) -> auto& { return c.penstock.seed; }),
    Text("device")
        .Says("Device that computes forward and backward: cpu, cuda or cuda:1", "the GPU where torch has one")
        .Keyword("device", "Union[None, str, int, torch.device]")
        .InPython("With torchrun each process has its own.")
        .EachStart()
        .OfRank()
        .OnCommandLine(kDeviceFlag)
        .At([](auto& c) -> auto& { return c.penstock.device; }),
    Bool("progress")
        .Says("Draws a line with step, loss, tokens and bytes a second",
              "where a terminal or a notebook shows it; from deepspeed.initialize: false")
        .Keyword("progress")
        .EachStart()
        .OfRank()
        .OnCommandLine(kQuietFlag)
        .At([](auto& c) -> auto& { return c.penstock.progress; }),
    Number("rank_timeout", 1)
        .Says("Heartbeat timeout of other ranks in seconds; 10 times as long for the rendezvous, 60 times "
              "for a rank that answers but makes no progress",
              "30")
        .Keyword("rank_timeout")
        .EachStart()
        .OfRank()
        .OnCommandLine(kRankTimeoutFlag)
        .At([](auto& c) -> auto& { return c.penstock.rank_timeout; }),
    Choice("resume_ranks", "same|any")
        .Says(
            "How many processes go on with a run: as many as made it (same), or any number (any). With any, "
            "its state is cut anew in its directories, and made of the newest checkpoint where parts of it "
            "are gone",
            "same")
        .Flag("--resume-ranks")
        .Keyword("resume_ranks")
        .InPython(
            "As after ``torchrun --max-restarts`` without a lost host. A kill before the new state is "
            "whole leaves the old one. The newest checkpoint is that in the directory of the run's last "
            "``save_checkpoint``.")
        .EachStart()
        .At([](auto& c) -> auto& { return c.penstock.resume_ranks; }),
    Whole("logits_chunk_size", 0, 0x1p30)
        .Says("Tokens whose logits are computed at one time, with their loss; 0: those of all tokens", "0")
        .Keyword("logits_chunk_size")
        .InPython(
            "The head of the model is an nn.Linear. Losses are the same to rounding. What asks for whole "
            "logits before backward gets them; a kernel of one's own that takes their address is refused.")
        .EachStart()
        .OnCommandLine(kPythonsModels)
        .At([](auto& c) -> auto& { return c.penstock.logits_chunk_size; }),
    Names("chunked_modules")
        .Says("Names or classes of modules that act on each token alone (MLPs), which are computed in chunks "
              "of tokens",
              "none")
        .Keyword("chunked_modules", "Optional[Sequence[Union[str, type]]]")
        .InPython("Names are whole, or their ends (\"mlp\"). Backward goes in chunks as well. A module that "
                  "needs other tokens is refused by name in the first forwards.")
        .EachStart()
        .OnCommandLine(kPythonsModels)
        .At([](auto& c) -> auto& { return c.penstock.chunked_modules; }),
    Whole("chunk_size", 1, 0x1p30)
        .Says("Tokens of a chunk of chunked_modules", "as many as a token has features")
        .Keyword("chunk_size")
        .EachStart()
        .OnCommandLine(kPythonsModels)
        .At([](auto& c) -> auto& { return c.penstock.chunk_size; }),
    Path("base_weights")
        .Says("Directory of the weights of frozen parameters: safetensors as they are published, or as "
              "`penstock pack` coded them, which are read where they lie and kept nowhere else",
              "none: the state has them")
        .Keyword("base_weights")
        .InPython("They are no part of the state, so the model may be built without values "
                  "(penstock.init_without_values, or frozen parameters on the meta device). With state on a "
                  "drive, in one process. The run records what the files are: it goes on with these alone, "
                  "wherever they have been moved to.")
        .EachStart()
        .OnCommandLine(kBaseFlag)
        .At([](auto& c) -> auto& { return c.penstock.base_weights; }),
});

// Settings of the command line and of Python that configurations do not have.
constexpr auto kNoKeys = std::to_array<Setting>({
    OnlyFlag("--model")
        .Says("A preset (gpt-tiny, gpt-small, gpt-125m, gpt-350m, gpt-1b, ...), a config.json, or Hugging "
              "Face's "
              "directory of a model: its weights, config and tokenizer",
              "gpt-small")
        .Fixed("model"),
    OnlyFlag("--lora-rank")
        .Says("Train LoRA adapters of this rank; the model's own weights are frozen")
        .Fixed("model"),
    OnlyFlag("--lora-alpha")
        .Says("LoRA scale: adapters are multiplied by alpha / rank", "8, as in PEFT")
        .Fixed("model"),
    OnlyFlag("--lora-dropout").Says("Dropout probability of the adapters' inputs", "0").Fixed("model"),
    OnlyFlag("--lora-targets")
        .Says("Comma-separated names of the adapted matrices, or all-linear",
              "as in PEFT: q_proj,v_proj; c_attn for GPT-2")
        .Fixed("model"),
    OnlyFlag("--vocabulary-tiles")
        .Says("Number of row blocks that embedding and head are split into; auto splits them only if they "
              "are far "
              "larger than a layer",
              "auto")
        .Fixed("model"),
    OnlyFlag("--data").OfRank().Says(
        "Training data: text, JSON or JSON lines (text; prompt and completion; messages; conversations; "
        "instruction and output), or nanoGPT's .bin tokens. The form is detected from the content. Text "
        "becomes tokens by the model's tokenizer, or bytes if there is none. Repeat the flag to mix several "
        "files"),
    OnlyFlag("--data-weights")
        .Says("Sampling weights of the --data files, such as 3,1", "proportional to their tokens")
        .ByName("data_weights"),
    OnlyFlag("--tokenizer")
        .OfRank()
        .Says("tokenizer.json or its directory", "the one in --model or --init-from, if that is a directory")
        .ByName("tokenizer"),
    OnlyFlag("--chat-template")
        .Says("Format that turns messages into text: chatml, llama3 or llama2")
        .ByName("chat_template"),
    OnlyFlag("--skip-broken-lines")
        .Says("Skip unusable lines of .jsonl files and print their number", "the first one is an error")
        .ByName("skip_broken_lines"),
    OnlyFlag("--eval-data").OfRank().Says("Held-out data, in any form of --data"),
    OnlyFlag("--eval-split")
        .Says(
            "Fraction of each --data file, taken from its end, that is held out for evaluation, such as 0.01",
            "0")
        .ByName("eval_split"),
    OnlyFlag("--eval-every").Says("Steps between evaluations", "one at the end"),
    OnlyFlag("--eval-windows").Says("Maximum number of sequences in an evaluation", "all"),
    OnlyFlag("--vocab").Says("Vocabulary size of .bin tokens", "256 for text").Fixed("vocab"),
    OnlyFlag("--config").Says("DeepSpeed's JSON; flags win over it").Keyword("config"),
    OnlyFlag("--device").Says("Device for forward and backward: cpu or cuda", "cpu").OfRank(),
    OnlyFlag("--dtype")
        .Says("Type of weights and activations: bf16, fp16, fp32 or auto", "auto")
        .Fixed("dtype"),
    OnlyFlag("--steps")
        .Says("Number of the last step, counted from the start of the run", "100")
        .ByName("steps"),
    OnlyFlag("--seq")
        .Says("Tokens in a sequence", "the model's context, at most 1024 for Llama-like models")
        .ByName("seq"),
    OnlyFlag("--warmup")
        .Says("Steps of linear warm-up before the cosine", "a tenth of the steps, 100 at most")
        .ByName("schedule"),
    OnlyFlag("--seed").Says("Seed of initial values, data order and dropout", "1").Fixed("seed"),
    OnlyFlag("--threads").Says("Intra-op threads, recorded with the run", "one per core").Once("threads"),
    OnlyFlag("--resume")
        .Says(
            "Continue the run in --state-dir; with --offload none or cpu, and where that directory is empty, "
            "from "
            "the newest checkpoint. Flags that were given another value (--lr, --warmup, --clip, "
            "--weight-decay, --batch, --accumulate, --seq, --data) change the run from the next step on, and "
            "so do changed keys of --config: a line says so, and the run records it")
        .Keyword("resume"),
    OnlyFlag("--overwrite")
        .Says("Replace the run in --state-dir, and the checkpoints in --checkpoint-dir")
        .Keyword("overwrite"),
    OnlyFlag("--init-from")
        .Says("Initial weights: safetensors in Hugging Face's layout, a file, an index or a directory; or an "
              "adapter "
              "of PEFT's, a directory, for the weights of --model")
        .Once(""),
    OnlyFlag("--checkpoint-dir")
        .Says("Directory of checkpoints; with --offload none or cpu it always receives the last step",
              "checkpoints/ in --state-dir"),
    OnlyFlag("--checkpoint-every").Says("Steps between checkpoints, which are written beside training"),
    OnlyFlag("--checkpoint-keep").Says("Number of newest checkpoints to keep", "all"),
    OnlyFlag("--json").OfRank().Says("Print JSON").Of(Verb::kPlan),
    OnlyFlag("--rank-timeout")
        .OfRank()
        .Says("Heartbeat timeout of other ranks in seconds; 10 times as long for the rendezvous, 60 times "
              "for a rank "
              "that answers but makes no progress",
              "30")
        .Of(Verb::kTrain),
    OnlyFlag("--report").OfRank().Says("Write the run's report, a JSON file").Of(Verb::kTrain),
    OnlyFlag("--log")
        .OfRank()
        .Says("Append a JSON line for every committed step and every evaluation")
        .Of(Verb::kTrain),
    OnlyFlag("--prometheus")
        .OfRank()
        .Says("Replace this file, FILE.prom, with the figures of each committed step, for node_exporter")
        .Of(Verb::kTrain),
    OnlyFlag("--trace").OfRank().Says("Write a trace for Perfetto or chrome://tracing").Of(Verb::kTrain),
    OnlyFlag("--check").OfRank().Says("Validate flags and config, then exit").Of(Verb::kTrain),
    OnlyFlag("--quiet").OfRank().Says("Print no progress").Of(Verb::kTrain),
    OnlyKeyword("ranks").Says("Whether the processes of torch.distributed train together",
                              "they do where there are several"),
});

struct Section {
  std::string_view path;
  std::span<const Setting> keys;
};

constexpr auto kSections = std::to_array<Section>({
    {"", kTop},
    {"optimizer", kOptimizer},
    {"optimizer.params/Adam", kAdam},
    {"optimizer.params/AdamW", kAdam},
    {"optimizer.params/Adagrad", kAdagrad},
    {"optimizer.params/Lion", kLion},
    {"optimizer.params/SGD", kSgd},
    {"optimizer.params/Lamb", kLamb},
    {"scheduler", kScheduler},
    {"scheduler.params/LRRangeTest", kLrRangeTest},
    {"scheduler.params/OneCycle", kOneCycle},
    {"scheduler.params/WarmupLR", kWarmupLr},
    {"scheduler.params/WarmupDecayLR", kWarmupDecayLr},
    {"scheduler.params/WarmupCosineLR", kWarmupCosineLr},
    {"fp16", kFp16},
    {"bf16", kBf16},
    {"zero_optimization", kZero},
    {"zero_optimization.offload_param", kOffloadParam},
    {"zero_optimization.offload_optimizer", kOffloadOptimizer},
    {"aio", kAio},
    {"activation_checkpointing", kActivationCheckpointing},
    {"checkpoint", kCheckpoint},
    {"checkpoint.parallel_write", kParallelWrite},
    {"checkpoint.writer", kCheckpointWriter},
    {"csv_monitor", kMonitor<&Config::csv_monitor>},
    {"tensorboard", kMonitor<&Config::tensorboard>},
    {"wandb", kWandb},
    {"flops_profiler", kFlopsProfiler},
    {"comms_logger", kCommsLogger},
    {"elasticity", kElasticity},
    {"penstock", kPenstock},
});

}  // namespace

json ScalarOf(std::string_view scalar) { return ParseJson(scalar, "").value(); }

std::span<const Setting> SectionKeys(std::string_view section) {
  for (const Section& s : kSections) {
    if (s.path == section) return s.keys;
  }
  return {};
}

std::vector<std::string_view> SectionPaths() {
  std::vector<std::string_view> paths;
  for (const Section& s : kSections) paths.push_back(s.path);
  return paths;
}

std::span<const Setting> SettingsWithoutKeys() { return kNoKeys; }

const Setting* FindKey(std::string_view path) {
  const Setting* other = nullptr;
  for (const Section& section : kSections) {
    // The parameters of every optimizer, and of every schedule, are in one place.
    std::string_view place = section.path.substr(0, section.path.find('/'));
    if (!place.empty()) {
      if (!path.starts_with(place) || path.size() <= place.size() || path[place.size()] != '.') continue;
      place = path.substr(place.size() + 1);
    } else {
      place = path;
    }
    for (const Setting& setting : section.keys) {
      if (setting.name != place || !setting.canonical.empty()) continue;
      if (setting.use == KeyUse::kServed) return &setting;
      if (other == nullptr) other = &setting;
    }
  }
  return other;
}

namespace {

constexpr double kUnbounded = 0x1p62;

std::vector<std::string> SplitBars(std::string_view text) {
  return absl::StrSplit(absl::string_view(text.data(), text.size()), '|');
}

// The first row that `is` says yes to; its path in a configuration, "" where it has none.
template <typename Is>
std::pair<const Setting*, std::string> First(const Is& is) {
  for (const Section& section : kSections) {
    for (const Setting& setting : section.keys) {
      if (is(setting)) return {&setting, PathOf(section.path, setting)};
    }
  }
  for (const Setting& setting : kNoKeys) {
    if (is(setting)) return {&setting, ""};
  }
  return {nullptr, ""};
}

}  // namespace

std::string PathOf(std::string_view section, const Setting& setting) {
  const std::string place(section.substr(0, section.find('/')));
  const std::string name(setting.canonical.empty() ? setting.name : setting.canonical);
  return place.empty() ? name : absl::StrCat(place, ".", name);
}

std::pair<const Setting*, std::string> FindFlag(std::string_view flag) {
  return First([flag](const Setting& setting) { return !flag.empty() && setting.flag == flag; });
}

std::pair<const Setting*, std::string> FindKeyword(std::string_view keyword) {
  return First([keyword](const Setting& setting) { return !keyword.empty() && setting.keyword == keyword; });
}

std::string RangeOf(const Setting& setting, std::string_view kind) {
  std::string what(kind);
  if (setting.least <= -kUnbounded) return what;
  if (setting.most >= kUnbounded) return absl::StrFormat("%s of %.10g or more", what, setting.least);
  return absl::StrFormat("%s from %.10g to %.10g", what, setting.least, setting.most);
}

std::string ChoicesOf(const Setting& setting) { return absl::StrJoin(SplitBars(setting.choices), ", "); }

std::string HelpOf(std::string_view flag) {
  const Setting* const setting = FindFlag(flag).first;
  if (setting == nullptr) return "";
  std::string help(setting->help);
  if (!setting->fallback.empty()) absl::StrAppend(&help, " [", std::string(setting->fallback), "]");
  return help;
}

namespace {

bool IsRecordedAs(const Setting& setting, std::string_view name) {
  const std::vector<std::string> names = SplitBars(setting.record);
  return !name.empty() && std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

std::string KeyOfRecord(std::string_view name) {
  const auto [setting, path] =
      First([name](const Setting& each) { return !each.name.empty() && IsRecordedAs(each, name); });
  if (setting == nullptr) return std::string(name);
  return setting->called.empty() ? path : std::string(setting->called);
}

std::string FlagOfRecord(std::string_view name) {
  const Setting* const setting =
      First([name](const Setting& each) { return !each.flag.empty() && IsRecordedAs(each, name); }).first;
  return setting == nullptr ? "" : std::string(setting->flag);
}

namespace {

// As `door` spells the setting of this name, with a value or "". "": there is no setting of this name.
std::string SpeltName(const std::string& name, const std::string& value, Door door) {
  const Setting* const flag = FindFlag(absl::StrCat("--", absl::StrReplaceAll(name, {{"_", "-"}}))).first;
  const Setting* const keyword = FindKeyword(name).first;
  if (flag == nullptr && keyword == nullptr) return "";
  const std::string words = absl::StrReplaceAll(name, {{"_", " "}});
  if (door == Door::kCommandLine) {
    const std::string_view spelling = flag != nullptr ? flag->flag : keyword->flag;
    return absl::StrCat(spelling.empty() ? words : std::string(spelling), value.empty() ? "" : " ", value);
  }
  const std::string spelling = keyword != nullptr ? name : std::string(flag->keyword);
  if (!value.empty()) return absl::StrCat(spelling.empty() ? words : spelling, "='", value, "'");
  if (spelling == "resume" || spelling == "overwrite") return absl::StrCat(spelling, "=True");
  return spelling.empty() ? words : spelling;
}

}  // namespace

std::string Spelt(std::string_view message, Door door) {
  std::string spelt;
  for (;;) {
    const size_t begin = message.find('`');
    const size_t end = begin == std::string_view::npos ? begin : message.find('`', begin + 1);
    if (end == std::string_view::npos) return spelt.append(message);
    const std::string_view quoted = message.substr(begin + 1, end - begin - 1);
    const size_t blank = std::min(quoted.find(' '), quoted.size());
    const std::string words = SpeltName(std::string(quoted.substr(0, blank)),
                                        std::string(quoted.substr(std::min(blank + 1, quoted.size()))), door);
    // The second of two backticks may be the first of two others.
    spelt += words.empty() ? std::string(message.substr(0, end)) : std::string(message.substr(0, begin));
    spelt += words;
    message.remove_prefix(words.empty() ? end : end + 1);
  }
}

bool IsFixedInRecord(std::string_view name) {
  return First([name](const Setting& setting) {
           return setting.on_resume == OnResume::kFixed && IsRecordedAs(setting, name);
         }).first != nullptr;
}

json ValueAt(const Config& config, std::string_view path) {
  const Setting* const setting = FindKey(path);
  return setting == nullptr ? json() : setting->Find(config);
}

json DeepSpeedAnswers() {
  json answers = json::object();
  for (const Section& section : kSections) {
    for (const Setting& setting : section.keys) {
      if (setting.answers.empty()) continue;
      json paths = {PathOf(section.path, setting)};
      for (const Setting& other : section.keys) {
        if (other.canonical == setting.name)
          paths.push_back(absl::StrCat(std::string(section.path), ".", std::string(other.name)));
      }
      const std::string_view value = setting.answer.empty() ? setting.deepspeeds : setting.answer;
      answers[std::string(setting.answers)] = {{"paths", paths}, {"default", ScalarOf(value)}};
    }
  }
  return answers;
}

void SetOptions(const Config& config, zero::EngineOptions* options) {
  for (const Section& section : kSections) {
    for (const Setting& setting : section.keys) {
      if (setting.option == nullptr) continue;
      if (const json value = setting.Find(config); !value.is_null()) setting.option(*options, value);
    }
  }
}

std::vector<const Setting*> SettingsWithFlags() {
  std::vector<const Setting*> found;
  std::set<std::string_view> seen;
  for (const Section& section : kSections) {
    for (const Setting& setting : section.keys) {
      if (!setting.flag.empty() && seen.insert(setting.flag).second) found.push_back(&setting);
    }
  }
  return found;
}

bool HoldsAsConfigured(std::string_view path) {
  const Setting* const setting = FindKey(path);
  return setting != nullptr && setting->use == KeyUse::kServed &&
         setting->on_resume == OnResume::kAsConfigured;
}

void Fill(const std::map<std::string, nlohmann::json>& served, Config* config) {
  for (const auto& [path, value] : served) {
    const Setting* const setting = FindKey(path);
    if (setting != nullptr) setting->Put(*config, value);
  }
}

namespace {

// The rows that records have as they are, each once.
template <typename Visit>
void VisitRecorded(const Visit& visit) {
  std::set<std::string_view> seen;
  for (const Section& section : kSections) {
    for (const Setting& setting : section.keys) {
      const bool is_recorded = setting.whole && setting.HasPlace() && !setting.record.empty();
      if (is_recorded && seen.insert(setting.record).second) visit(setting, SplitBars(setting.record));
    }
  }
}

}  // namespace

std::map<std::string, nlohmann::json> SaidByRecord(const Config& config) {
  std::map<std::string, nlohmann::json> said;
  VisitRecorded([&](const Setting& setting, const std::vector<std::string>& names) {
    const json value = setting.Find(config);
    if (value.is_null()) return;
    for (size_t n = 0; n < names.size(); ++n) said[names[n]] = names.size() > 1 ? value[n] : value;
  });
  return said;
}

void CopyRecorded(const Config& from, const std::function<bool(const std::string&)>& taken, Config* to) {
  VisitRecorded([&](const Setting& setting, const std::vector<std::string>& names) {
    if (!taken(names.front())) return;
    if (const json value = setting.Find(from); !value.is_null()) setting.Put(*to, value);
  });
}

absl::Status Settle(const std::function<absl::StatusOr<json>(const char* name, const json& given,
                                                             const json& otherwise)>& ask,
                    Config* config) {
  absl::Status status;
  VisitRecorded([&](const Setting& setting, const std::vector<std::string>& names) {
    if (setting.settled.empty() || !status.ok()) return;
    const absl::StatusOr<json> value =
        ask(names.front().c_str(), setting.Find(*config), ScalarOf(setting.settled));
    status = value.status();
    if (!status.ok()) return;
    const absl::StatusOr<json> checked =
        CheckValue(setting, absl::StrCat("the run's record: ", names.front()), *value);
    status = checked.status();
    if (status.ok()) setting.Put(*config, *checked);
  });
  return status;
}

void SettleFromPython(Config* config) {
  VisitRecorded([config](const Setting& setting, const std::vector<std::string>&) {
    if (setting.settled.empty() || setting.keyword.empty() || !setting.Find(*config).is_null()) return;
    const bool differs = !setting.settled_from_python.empty();
    setting.Put(*config, ScalarOf(differs ? setting.settled_from_python : setting.settled));
  });
}

json KeptFromPython(const Config& config) {
  json kept = json::object();
  VisitRecorded([&](const Setting& setting, const std::vector<std::string>&) {
    const bool may_change = setting.on_resume == OnResume::kByName && !setting.keyword.empty();
    if (may_change) kept[FindKeyword(setting.keyword).second] = setting.Find(config);
  });
  return kept;
}

json SharedValues(const Config& config) {
  json shared = json::object();
  for (const Section& section : kSections) {
    const Setting* const whole = FindKey(section.path.substr(0, section.path.find('/')));
    if (whole != nullptr && whole->of_rank) continue;
    for (const Setting& setting : section.keys) {
      if (setting.of_rank || !setting.HasPlace() || !setting.canonical.empty()) continue;
      if (json value = setting.Find(config); !value.is_null())
        shared[PathOf(section.path, setting)] = std::move(value);
    }
  }
  return shared;
}

void RemoveWhatRanksMayDifferIn(nlohmann::ordered_json* config) {
  using Pointer = nlohmann::ordered_json::json_pointer;
  for (const Section& section : kSections) {
    const std::string path(section.path);
    const Pointer place(path.empty() ? "" : absl::StrCat("/", absl::StrReplaceAll(path, {{".", "/"}})));
    if (!config->contains(place) || !config->at(place).is_object()) continue;
    for (const Setting& setting : section.keys) {
      if (setting.of_rank) config->at(place).erase(std::string(setting.name));
    }
  }
}

}  // namespace penstock::run
