// The table. Names and defaults are those of DeepSpeed up to 0.19 (deepspeed/runtime/config.py, constants.py,
// precision_config.py, zero/config.py, zero/offload_config.py, swap_tensor/aio_config.py).
#include "zero/config/config_keys.h"

#include <array>

namespace penstock::zero {
namespace {

constexpr KeyUse kServed = KeyUse::kServed;
constexpr KeyUse kNeedless = KeyUse::kNeedless;
constexpr KeyUse kIgnored = KeyUse::kIgnored;
constexpr KeyUse kRefused = KeyUse::kRefused;
constexpr double kInf = std::numeric_limits<double>::infinity();

// Builders, so that each line of the table names only what matters to it.
constexpr KeySpec Bool(std::string_view name) {
  return {.name = name, .use = kServed, .type = KeyType::kBool};
}
constexpr KeySpec Text(std::string_view name) {
  return {.name = name, .use = kServed, .type = KeyType::kText};
}
constexpr KeySpec Path(std::string_view name) {
  return {.name = name, .use = kServed, .type = KeyType::kPath};
}
constexpr KeySpec Object(std::string_view name) {
  return {.name = name, .use = kServed, .type = KeyType::kObject};
}
constexpr KeySpec Whole(std::string_view name, double least, double most = 0x1p62) {
  return {.name = name, .use = kServed, .type = KeyType::kWhole, .least = least, .most = most};
}
constexpr KeySpec Number(std::string_view name, double least, double most = kInf) {
  return {.name = name, .use = kServed, .type = KeyType::kNumber, .least = least, .most = most};
}
constexpr KeySpec Size(std::string_view name, double least, double most = 0x1p62) {
  return {.name = name, .use = kServed, .type = KeyType::kSize, .least = least, .most = most};
}
constexpr KeySpec Choice(std::string_view name, std::string_view choices) {
  return {.name = name, .use = kServed, .type = KeyType::kChoice, .choices = choices};
}
constexpr KeySpec Needless(std::string_view name, KeyType type, std::string_view why) {
  return {.name = name, .use = kNeedless, .type = type, .why = why};
}
constexpr KeySpec Ignored(std::string_view name, KeyType type, std::string_view why,
                          std::string_view neutral = "") {
  return {.name = name, .use = kIgnored, .type = type, .why = why, .neutral = neutral};
}
constexpr KeySpec Refused(std::string_view name, std::string_view why, std::string_view neutral = "") {
  return {.name = name, .use = kRefused, .type = KeyType::kAny, .why = why, .neutral = neutral};
}
constexpr KeySpec AlsoCalled(KeySpec spec, std::string_view other) {
  spec.canonical = spec.name;
  spec.name = other;
  return spec;
}
constexpr KeySpec OnceCalled(KeySpec spec, std::string_view old) {
  spec = AlsoCalled(spec, old);
  spec.old_name = true;
  return spec;
}

constexpr std::string_view kOwnReports = "Penstock has its own: --report, --log and --trace, always complete";
constexpr std::string_view kWandbsClient =
    "its client is Python's; switch tensorboard on and upload its directory with wandb sync "
    "--sync-tensorboard DIR, or give --log, whose lines are objects that wandb.log takes";
constexpr std::string_view kCometsClient =
    "its client is Python's; give --log, whose lines are objects that comet's log_metrics takes, or switch "
    "tensorboard on";
constexpr std::string_view kPythonsModels =
    "it is about models of Python, whose front end serves it; the command line knows the blocks of its "
    "models";
constexpr std::string_view kRankOrderSum =
    "gradients cross ranks as bytes and are summed in fp32 in the order of ranks";

constexpr auto kTop = std::to_array<KeySpec>({
    Whole("train_batch_size", 1),
    Whole("train_micro_batch_size_per_gpu", 1),
    Whole("gradient_accumulation_steps", 1),
    Number("gradient_clipping", 0),
    Object("optimizer"),
    Object("scheduler"),
    Object("fp16"),
    Object("bf16"),
    OnceCalled(Object("bf16"), "bfloat16"),
    Object("zero_optimization"),
    Object("aio"),
    Object("activation_checkpointing"),
    Object("checkpoint"),
    Object("penstock"),
    Bool("wall_clock_breakdown"),
    Object("flops_profiler"),
    Object("comms_logger"),
    Object("elasticity"),

    Needless("steps_per_print", KeyType::kAny, "progress is one live line, and --log has every step"),
    Needless("memory_breakdown", KeyType::kBool,
             "every report has the peaks, and penstock plan the bytes of each tier"),
    Needless("dump_state", KeyType::kBool, "penstock inspect shows the state"),
    Needless("log_level", KeyType::kAny, "use --quiet for less"),
    Needless("timers", KeyType::kAny, kOwnReports),
    Needless("comms_config", KeyType::kObject, kOwnReports),
    Needless("disable_python_gc", KeyType::kBool, "there is no Python"),
    Needless("monitor_config", KeyType::kObject, kOwnReports),
    Object("tensorboard"),
    Ignored("wandb", KeyType::kObject, kWandbsClient),
    Ignored("comet", KeyType::kObject, kCometsClient),
    Object("csv_monitor"),
    Ignored(
        "autotuning", KeyType::kObject,
        "the planner chooses tiles, buffers and order on this machine at every start; penstock plan with the "
        "same flags shows what and why, and what another batch or memory would bring"),
    Needless("zero_allow_untested_optimizer", KeyType::kBool, "the optimizer is always Penstock's own"),
    Needless("zero_force_ds_cpu_optimizer", KeyType::kBool, "the optimizer is always Penstock's own"),
    Ignored("communication_data_type", KeyType::kAny, kRankOrderSum),
    Needless("seq_parallel_communication_data_type", KeyType::kAny, "there is no sequence parallelism"),
    AlsoCalled(
        Needless("seq_parallel_communication_data_type", KeyType::kAny, "there is no sequence parallelism"),
        "seq_parallel_comm_data_type"),
    Ignored("prescale_gradients", KeyType::kBool, kRankOrderSum),
    Ignored("gradient_predivide_factor", KeyType::kNumber, kRankOrderSum),
    Needless("sparse_gradients", KeyType::kBool, "gradients are dense; the result is the same"),
    Needless("disable_allgather", KeyType::kBool, "how blocks are gathered is the planner's choice"),
    Needless("allgather_size", KeyType::kWhole, "how blocks are gathered is the planner's choice"),
    Ignored("data_types", KeyType::kObject, "a block's gradients are accumulated in fp32 and rounded once"),
    Needless("graph_harvesting", KeyType::kBool, "there are no graphs to harvest"),
    Needless("compile", KeyType::kObject, "there is nothing to compile at run time"),
    Needless("use_data_before_expert_parallelism", KeyType::kBool, "all ranks are data-parallel"),
    Ignored("managed_gradient_accumulation", KeyType::kBool,
            "the program makes the steps itself; from Python each step() updates then", "true"),
    Needless("vocabulary_size", KeyType::kWhole, "the model and --vocab say it"),
    Needless("dataloader_drop_last", KeyType::kBool, "every batch is complete"),
    Needless("nebula", KeyType::kObject, "checkpoints are Penstock's own"),
    Needless("datastates_ckpt", KeyType::kObject, "checkpoints are Penstock's own"),
    Needless("datastates", KeyType::kObject, "checkpoints are Penstock's own"),

    Refused("amp", "Apex's mixed precision is not served; use bf16 or fp16"),
    Refused("torch_autocast", "autocast is not served; use bf16 or fp16"),
    Refused("gradient_allreduce_op", "gradients are averaged over ranks", "\"mean\""),
    Refused("pipeline", "there is no pipeline parallelism; all ranks are data-parallel"),
    Refused("tensor_parallel", "there is no tensor parallelism; all ranks are data-parallel"),
    Refused("expert_parallel", "there is no expert parallelism; all ranks are data-parallel"),
    Refused("sequence_parallel_size", "there is no sequence parallelism; all ranks are data-parallel", "1"),
    Refused("sparse_attention", "attention is the model's own"),
    Refused("progressive_layer_drop", "it would change the model while it trains, which Penstock does not"),
    Refused("curriculum_learning", "sequences have one length; use --seq"),
    Refused("data_efficiency", "batches are drawn by seed and step alone"),
    Refused("compression_training", "weights are trained as they are"),
    Refused("quantize_training", "weights are trained as they are"),
    Refused("weight_quantization", "weights are trained as they are"),
    Refused("eigenvalue", "it only serves quantize_training"),
    Refused("hybrid_engine", "Penstock trains; penstock sample generates from a state directory"),
});

constexpr std::string_view kOnePass = "the update is always one fused pass";

constexpr auto kOptimizer = std::to_array<KeySpec>({
    Choice("type", kServedOptimizers),
    Object("params"),
    Needless("legacy_fusion", KeyType::kBool, kOnePass),
});

constexpr KeySpec kBetas = {.name = "betas", .use = kServed, .type = KeyType::kPair, .least = 0, .most = 1};
constexpr KeySpec kSetGradNone =
    Needless("set_grad_none", KeyType::kBool, "gradients are freed as soon as they are used");
constexpr KeySpec kFused = Needless("fused", KeyType::kBool, kOnePass);
constexpr KeySpec kForeach = Needless("foreach", KeyType::kBool, kOnePass);
constexpr KeySpec kDifferentiable =
    Needless("differentiable", KeyType::kBool, "nobody differentiates the update");
constexpr KeySpec kMaximize = Refused("maximize", "the loss is always minimised");
constexpr KeySpec kMaxGradNorm =
    Refused("max_grad_norm", "give gradient_clipping at the top level instead", "0");
constexpr KeySpec kFp32States =
    Ignored("fp32_optimizer_states", KeyType::kBool, "penstock.optimizer_states says their type");

constexpr auto kAdam = std::to_array<KeySpec>({
    Number("lr", 0),
    kBetas,
    Number("eps", 0),
    Number("weight_decay", 0),
    Bool("adam_w_mode"),
    Bool("torch_adam"),
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

constexpr auto kAdagrad = std::to_array<KeySpec>({
    Number("lr", 0),
    Number("lr_decay", 0),
    Number("eps", 0),
    Number("weight_decay", 0),
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

constexpr auto kLion = std::to_array<KeySpec>({
    Number("lr", 0),
    kBetas,
    Number("weight_decay", 0),
    kSetGradNone,
    kFused,
    kFp32States,
    kMaxGradNorm,
});

constexpr auto kSgd = std::to_array<KeySpec>({
    Number("lr", 0),
    Number("momentum", 0, 1),
    Number("dampening", 0, 1),
    Number("weight_decay", 0),
    Bool("nesterov"),
    kFused,
    kForeach,
    kDifferentiable,
    kMaximize,
    kMaxGradNorm,
});

constexpr auto kScheduler = std::to_array<KeySpec>({
    Choice("type", "LRRangeTest|OneCycle|WarmupLR|WarmupDecayLR|WarmupCosineLR"),
    Object("params"),
});

constexpr KeySpec kLastBatch = Refused(
    "last_batch_iteration", "the schedule begins with the first step, and --resume continues it", "-1");

constexpr auto kLrRangeTest = std::to_array<KeySpec>({
    Number("lr_range_test_min_lr", 0),
    Whole("lr_range_test_step_size", 1),
    Number("lr_range_test_step_rate", 0),
    Bool("lr_range_test_staircase"),
    kLastBatch,
});

constexpr auto kOneCycle = std::to_array<KeySpec>({
    Number("cycle_min_lr", 0),
    Number("cycle_max_lr", 0),
    Number("decay_lr_rate", 0),
    Whole("cycle_first_step_size", 1),
    Whole("cycle_second_step_size", 1),
    Whole("cycle_first_stair_count", 0),
    Whole("cycle_second_stair_count", 0),
    Whole("decay_step_size", 0),
    Bool("cycle_momentum"),
    Number("cycle_min_mom", 0, 1),
    Number("cycle_max_mom", 0, 1),
    Number("decay_mom_rate", 0),
    kLastBatch,
});

constexpr auto kWarmupLr = std::to_array<KeySpec>({
    Number("warmup_min_lr", 0),
    Number("warmup_max_lr", 0),
    Whole("warmup_num_steps", 0),
    Choice("warmup_type", "log|linear"),
    kLastBatch,
});

constexpr auto kWarmupDecayLr = std::to_array<KeySpec>({
    Number("warmup_min_lr", 0),
    Number("warmup_max_lr", 0),
    Whole("warmup_num_steps", 0),
    Choice("warmup_type", "log|linear"),
    Whole("total_num_steps", 1),
    kLastBatch,
});

constexpr auto kWarmupCosineLr = std::to_array<KeySpec>({
    Whole("total_num_steps", 1),
    Number("warmup_min_ratio", 0),
    Whole("warmup_num_steps", 0),
    Number("cos_min_ratio", 0),
    Choice("warmup_type", "log|linear"),
    kLastBatch,
});

constexpr auto kFp16 = std::to_array<KeySpec>({
    Bool("enabled"),
    Number("loss_scale", 0, 0x1p127),
    Whole("initial_scale_power", 0, 127),
    Whole("loss_scale_window", 1),
    Whole("hysteresis", 1),
    Bool("consecutive_hysteresis"),
    Number("min_loss_scale", 0x1p-126, 0x1p127),
    Needless("auto_cast", KeyType::kBool, "inputs are token ids, which have nothing to cast"),
    Needless("fused_mode", KeyType::kBool, "the update is always one fused pass"),
    Refused("fp16_master_weights_and_grads", "masters are fp32: fp16 ones lose small updates"),
});

constexpr auto kBf16 = std::to_array<KeySpec>({
    Bool("enabled"),
    Needless("immediate_grad_update", KeyType::kBool,
             "a block's gradient is consumed as early as the plan allows"),
    Ignored("check_grad_overflow", KeyType::kBool, "gradients are always checked"),
    Refused("bf16_master_weights_and_grads", "masters are fp32, kept as bf16 and a 16-bit remainder"),
    Refused("bf16_optimizer_states", "write \"penstock\": {\"optimizer_states\": \"bf16\"}"),
});

constexpr auto kZero = std::to_array<KeySpec>({
    Whole("stage", 0, 3),
    Object("offload_param"),
    Object("offload_optimizer"),
    Whole("sub_group_size", 0),
    Whole("reduce_bucket_size", 0),
    Whole("allgather_bucket_size", 0),
    Whole("stage3_prefetch_bucket_size", 0),
    AlsoCalled(Whole("stage3_prefetch_bucket_size", 0), "prefetch_bucket_size"),
    Whole("stage3_max_live_parameters", 0),
    AlsoCalled(Whole("stage3_max_live_parameters", 0), "max_live_parameters"),
    Whole("stage3_max_reuse_distance", 0),
    AlsoCalled(Whole("stage3_max_reuse_distance", 0), "max_reuse_distance"),
    Whole("stage3_param_persistence_threshold", 0),
    AlsoCalled(Whole("stage3_param_persistence_threshold", 0), "param_persistence_threshold"),
    Whole("stage3_model_persistence_threshold", 0, 0x1p63),
    AlsoCalled(Whole("stage3_model_persistence_threshold", 0, 0x1p63), "model_persistence_threshold"),
    Bool("cpu_offload"),
    Bool("cpu_offload_param"),

    Needless("contiguous_gradients", KeyType::kBool, "a block's gradients are always contiguous"),
    Needless("reduce_scatter", KeyType::kBool, kRankOrderSum),
    Needless("use_multi_rank_bucket_allreduce", KeyType::kBool, kRankOrderSum),
    Needless("allgather_partitions", KeyType::kBool, "a block is gathered as one"),
    Needless("overlap_comm", KeyType::kBool, "everything that can overlap does"),
    Needless("load_from_fp32_weights", KeyType::kBool, "masters are always exact"),
    Needless("stage3_gather_16bit_weights_on_model_save", KeyType::kBool,
             "penstock export writes whole weights from any state directory"),
    AlsoCalled(Needless("stage3_gather_16bit_weights_on_model_save", KeyType::kBool,
                        "penstock export writes whole weights from any state directory"),
               "gather_16bit_weights_on_model_save"),
    OnceCalled(Needless("stage3_gather_16bit_weights_on_model_save", KeyType::kBool,
                        "penstock export writes whole weights from any state directory"),
               "stage3_gather_fp16_weights_on_model_save"),
    Needless("stage3_module_granularity_threshold", KeyType::kWhole,
             "the unit is a block, given by the model"),
    AlsoCalled(Needless("stage3_module_granularity_threshold", KeyType::kWhole,
                        "the unit is a block, given by the model"),
               "module_granularity_threshold"),
    Needless("stage3_use_all_reduce_for_fetch_params", KeyType::kBool, "a block is gathered as one"),
    AlsoCalled(
        Needless("stage3_use_all_reduce_for_fetch_params", KeyType::kBool, "a block is gathered as one"),
        "use_all_reduce_for_fetch_params"),
    Needless("stage3_allgather_sequential", KeyType::kBool, "a block is gathered as one"),
    AlsoCalled(Needless("stage3_allgather_sequential", KeyType::kBool, "a block is gathered as one"),
               "allgather_sequential"),
    Needless("stage3_partition_stream_chunk_size", KeyType::kWhole, "blocks are built one at a time"),
    AlsoCalled(
        Needless("stage3_partition_stream_chunk_size", KeyType::kWhole, "blocks are built one at a time"),
        "partition_stream_chunk_size"),
    Needless("cpu_offload_use_pin_memory", KeyType::kBool, "host memory is always one pinned arena"),
    Needless("ignore_unused_parameters", KeyType::kBool,
             "a parameter without a gradient has a gradient of zero"),
    Needless("legacy_stage1", KeyType::kBool, "there is one implementation"),
    Needless("round_robin_gradients", KeyType::kBool, "every block is cut evenly over ranks"),
    Needless("memory_efficient_linear", KeyType::kBool,
             "a block's backward always recomputes from its saved input"),
    Needless("pipeline_loading_checkpoint", KeyType::kBool, "checkpoints are always streamed"),
    Needless("override_module_apply", KeyType::kBool, "blocks are initialised by their factories"),
    Needless("log_trace_cache_warnings", KeyType::kBool, "a miss of the plan is always said once"),
    Needless("enable_sanity_checks", KeyType::kBool, "checks are always on"),
    Needless("leaf_module", KeyType::kObject, "the unit is a block, given by the model"),
    Needless("compute_grad_norm", KeyType::kBool, "the norm is always computed, as every report has it"),
    Needless("parameter_alignment", KeyType::kBool, "parameters are always aligned"),
    Needless("save_muon_momentum_buffer_in_memory", KeyType::kBool, "it only concerns Muon"),

    Refused("elastic_checkpoint", "DeepSpeed has dropped it; Penstock's checkpoints need no such key"),
    Refused(
        "zenflow",
        "it applies most gradients steps after they were made, which changes the result; here updates hide "
        "behind reads and backward and wait for nothing"),
    Refused("zero_hpz_partition_size", "there is no secondary partition of ZeRO++", "1"),
    Refused("zero_quantized_weights",
            "blocks are gathered unchanged: losses are bit-identical to an unsharded run"),
    Refused("zero_quantized_nontrainable_weights", "weights are stored unchanged"),
    Refused("zero_quantized_gradients", "gradients are exchanged unchanged: losses do not depend on it"),
    Refused("zeropp_loco_param", "it only serves zero_quantized_gradients"),
    Refused("mics_shard_size", "state is cut over all ranks, not over groups", "-1"),
    Refused("mics_hierarchical_params_gather", "state is cut over all ranks, not over groups"),
});

constexpr auto kOffloadParam = std::to_array<KeySpec>({
    Choice("device", "none|cpu|nvme"),
    Text("nvme_path"),
    Whole("buffer_count", 0, 0x1p31),
    Whole("buffer_size", 0),
    Whole("max_in_cpu", 0),
    Needless("pin_memory", KeyType::kBool, "host memory is always one pinned arena"),
});

constexpr auto kOffloadOptimizer = std::to_array<KeySpec>({
    Choice("device", "none|cpu|nvme"),
    Text("nvme_path"),
    Whole("buffer_count", 0, 0x1p31),
    Needless("buffer_size", KeyType::kWhole,
             "the optimizer's buffers have the size of a tile; see sub_group_size"),
    Needless("pin_memory", KeyType::kBool, "host memory is always one pinned arena"),
    Needless("pipeline", KeyType::kBool, "it follows from pipeline_read and pipeline_write"),
    Bool("pipeline_read"),
    Bool("pipeline_write"),
    Needless("fast_init", KeyType::kBool, "blocks go straight to their tier as they are built"),
    Number("ratio", 0, 1),
    Ignored(
        "super_offload", KeyType::kBool,
        "DeepSpeed then updates in a process beside backward, and takes an update that overflowed back by "
        "arithmetic; here the planner puts updates beside backward where that is faster, and one that was "
        "wrong is made again from the version before",
        "false"),
    Needless("convert_grad_on_cpu", KeyType::kBool, "the cast is fused into the update"),
    Needless("cpuadam_cores_perc", KeyType::kNumber, "give penstock.update_threads"),
});

constexpr auto kAio = std::to_array<KeySpec>({
    Whole("block_size", 4096, 0x1p30),
    Whole("queue_depth", 1, 65536),
    Whole("intra_op_parallelism", 1, 1024),
    AlsoCalled(Whole("intra_op_parallelism", 1, 1024), "thread_count"),
    AlsoCalled(Whole("intra_op_parallelism", 1, 1024), "num_threads"),
    Needless("single_submit", KeyType::kBool, "requests are handed over in batches as they come"),
    Needless("overlap_events", KeyType::kBool, "the queue is always refilled as requests complete"),
    Bool("use_gds"),
});

constexpr auto kActivationCheckpointing = std::to_array<KeySpec>({
    Ignored("cpu_checkpointing", KeyType::kBool,
            "the inputs that are saved, one for each block, stay in the memory of the device that computes",
            "false"),
    Needless("partition_activations", KeyType::kBool,
             "all ranks are data-parallel: each has its own activations"),
    Needless("number_checkpoints", KeyType::kWhole, "one input is saved for each block"),
    Needless("contiguous_memory_optimization", KeyType::kBool, "saved inputs come from one arena"),
    Needless("synchronize_checkpoint_boundary", KeyType::kBool, "nothing needs it"),
    Needless("profile", KeyType::kBool, kOwnReports),
});

constexpr auto kCheckpoint = std::to_array<KeySpec>({
    {.name = "tag_validation",
     .use = kNeedless,
     .type = KeyType::kChoice,
     .why = "a checkpoint's tag is its step, which all ranks agree on",
     .choices = "Ignore|Warn|Fail"},
    Needless("use_node_local_storage", KeyType::kBool, "every rank writes to its own directory"),
    Needless("parallel_write", KeyType::kObject, "every rank writes its own part"),
    Needless("checkpoint_serialization", KeyType::kBool, "the format is Penstock's own"),
    Ignored("writer", KeyType::kObject,
            "DeepSpeed then writes through pinned buffers of its own; here checkpoints always go from pinned "
            "memory past the page cache, as the aio block says"),
    Ignored("load_universal", KeyType::kBool,
            "a checkpoint of DeepSpeed's is told by its files, universal or of ZeRO-1, 2 or 3: penstock "
            "import-checkpoint and, from Python, engine.load_checkpoint read each of them",
            "false"),
});

constexpr auto kParallelWrite = std::to_array<KeySpec>({
    Needless("pipeline_stage", KeyType::kBool, "there are no pipeline stages"),
});

constexpr std::string_view kWriterIsOne = "there is one way to write";

constexpr auto kCheckpointWriter = std::to_array<KeySpec>({
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

constexpr auto kMonitor = std::to_array<KeySpec>({
    Bool("enabled"),
    Path("output_path"),
    Text("job_name"),
});

constexpr auto kFlopsProfiler = std::to_array<KeySpec>({
    Bool("enabled"),
    Whole("profile_step", 1),
    Whole("module_depth", -1),
    Whole("top_modules", 0),
    Bool("detailed"),
    Text("output_file"),
    Needless("recompute_fwd_factor", KeyType::kNumber,
             "every stage is computed once more in backward, and the profile says so"),
});

constexpr auto kCommsLogger = std::to_array<KeySpec>({
    Bool("enabled"),
    Needless("verbose", KeyType::kBool, "the table at the end has all exchanges; --trace has each"),
    Needless("prof_all", KeyType::kBool, "the table at the end has all exchanges"),
    Needless("prof_ops", KeyType::kAny, "the table at the end has all exchanges"),
    Needless("debug", KeyType::kBool, "who calls is the plan"),
});

constexpr KeySpec kMicroBatches = {
    .name = "micro_batch_sizes", .use = kServed, .type = KeyType::kWholes, .least = 1, .most = 1 << 20};
constexpr std::string_view kNodesOfRanks =
    "version 0.2 counts whole nodes and tensor parallelism; leave it at 1, and every rank counts";

constexpr auto kElasticity = std::to_array<KeySpec>({
    Bool("enabled"),
    Whole("max_train_batch_size", 1, 0x1p30),
    kMicroBatches,
    Whole("min_gpus", 1, 0x1p31),
    Whole("max_gpus", 1, 0x1p31),
    Bool("prefer_larger_batch"),
    Bool("ignore_non_elastic_batch_info"),
    Needless("min_time", KeyType::kNumber, "it is for the scheduler that starts the ranks"),
    Needless("version", KeyType::kNumber, "0.1, and 0.2 with one rank a node and no tensor parallelism"),
    Refused("model_parallel_size", kNodesOfRanks, "1"),
    Refused("num_gpus_per_node", kNodesOfRanks, "1"),
});

constexpr auto kPenstock = std::to_array<KeySpec>({
    Size("host_memory", 1),
    Size("device_memory", 1),
    {.name = "state_dirs", .use = kServed, .type = KeyType::kPaths},
    Choice("durability", "step|checkpoint"),
    Choice("sync", "process|power"),
    Whole("versions", 1, 3),
    Choice("order", "auto|next_forward|in_backward"),
    Choice("prefer", "wear|time"),
    Choice("optimizer_states", "fp32|bf16|8bit"),
    Size("tile_bytes", 65536, 0x1p30),
    Whole("io_threads", 1, 1024),
    Whole("update_threads", 1, 4096),
    Choice("placement", "auto|cpu|cuda|const"),
    Size("placement_const_bytes", 0),
    Number("gpu_margin_mem_ratio", 0, 1),
    Number("wear_budget_tb", 1e-9, 1e9),
    Number("watchdog_seconds", 0, 1e9),
    Number("watchdog_abort_seconds", 0.001, 1e9),
    Ignored("blocks", KeyType::kAny, kPythonsModels),
    Ignored("forwards_per_step", KeyType::kWhole, kPythonsModels),
});

struct Section {
  std::string_view path;
  std::span<const KeySpec> keys;
};

constexpr auto kSections = std::to_array<Section>({
    {"", kTop},
    {"optimizer", kOptimizer},
    {"optimizer.params/Adam", kAdam},
    {"optimizer.params/AdamW", kAdam},
    {"optimizer.params/Adagrad", kAdagrad},
    {"optimizer.params/Lion", kLion},
    {"optimizer.params/SGD", kSgd},
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
    {"csv_monitor", kMonitor},
    {"tensorboard", kMonitor},
    {"flops_profiler", kFlopsProfiler},
    {"comms_logger", kCommsLogger},
    {"elasticity", kElasticity},
    {"penstock", kPenstock},
});

}  // namespace

std::span<const KeySpec> SectionKeys(std::string_view section) {
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

}  // namespace penstock::zero
