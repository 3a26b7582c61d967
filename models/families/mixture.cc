#include "models/families/mixture.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"

namespace penstock::models {
namespace {

// How a model_type spells its mixtures, and what it has where its config.json says nothing, as transformers.
struct Spelling {
  std::string_view type;
  const char* experts_key;  // of their number
  int64_t experts = 0, chosen = 0;
  int64_t inner = 0;                // of moe_intermediate_size; 0: an expert has intermediate_size
  int64_t shared_inner = 0;         // of shared_expert_intermediate_size; 0: no expert is shared
  bool normalizes = false;          // where there is no norm_topk_prob
  bool has_normalizes_key = false;  // norm_topk_prob
  bool rounds_weights = true;
  bool some_layers = false;  // decoder_sparse_step and mlp_only_layers
  // In published files; the experts of a layer in one tensor are under `fused`.
  const char *router = "mlp.gate", *experts_name = "mlp.experts";
  const char *gate = "gate_proj", *up = "up_proj", *down = "down_proj";
  const char* other_router = nullptr;  // as transformers 5 may write them
  const char *fused_gate_up = "mlp.experts.gate_up_proj", *fused_down = "mlp.experts.down_proj";
  double pair_limit = 0;  // of swiglu_limit; 0: gate and up are apart
  int deepseek = 0;       // 2, 3: groups, and layers from one on
  int64_t shared = 0;     // of n_shared_experts, as one of so many times inner
};
constexpr auto kSpellings = std::to_array<Spelling>(
    {{.type = "mixtral",
      .experts_key = "num_local_experts",
      .experts = 8,
      .chosen = 2,
      .normalizes = true,
      .rounds_weights = false,
      .router = "block_sparse_moe.gate",
      .experts_name = "block_sparse_moe.experts",
      .gate = "w1",
      .up = "w3",
      .down = "w2",
      .other_router = "mlp.gate"},
     {.type = "qwen2_moe",
      .experts_key = "num_experts",
      .experts = 60,
      .chosen = 4,
      .inner = 1408,
      .shared_inner = 5632,
      .has_normalizes_key = true,
      .some_layers = true},
     {.type = "qwen3_moe",
      .experts_key = "num_experts",
      .experts = 128,
      .chosen = 8,
      .inner = 768,
      .has_normalizes_key = true,
      .some_layers = true},
     {.type = "olmoe", .experts_key = "num_experts", .experts = 64, .chosen = 8, .has_normalizes_key = true},
     {.type = "granitemoe",
      .experts_key = "num_local_experts",
      .experts = 8,
      .chosen = 2,
      .normalizes = true,
      .router = "block_sparse_moe.router.layer",
      .experts_name = "block_sparse_moe.experts",
      .other_router = "block_sparse_moe.router",
      .fused_gate_up = "block_sparse_moe.input_linear.weight",
      .fused_down = "block_sparse_moe.output_linear.weight"},
     {.type = "gpt_oss",
      .experts_key = "num_local_experts",
      .experts = 128,
      .chosen = 4,
      .normalizes = true,
      .router = "mlp.router",
      .gate = "",
      .up = "gate_up_proj",
      .pair_limit = 7},
     {.type = "deepseek_v2",
      .experts_key = "n_routed_experts",
      .experts = 64,
      .inner = 1407,
      .rounds_weights = false,
      .deepseek = 2,
      .shared = 2},
     {.type = "deepseek_v3",
      .experts_key = "n_routed_experts",
      .experts = 256,
      .chosen = 8,
      .inner = 2048,
      .normalizes = true,
      .has_normalizes_key = true,
      .rounds_weights = false,
      .deepseek = 3,
      .shared = 1}});
// Granite's, where transformers 5 writes its own form.
constexpr const char *kGraniteGateUp = "block_sparse_moe.experts.gate_up_proj",
                     *kGraniteDown = "block_sparse_moe.experts.down_proj";

constexpr const char* kCorrection = "mlp.gate.e_score_correction_bias";  // DeepSeek V3's

std::string SharedOf(const Spelling& spelling) {
  return spelling.deepseek > 0 ? "mlp.shared_experts" : "mlp.shared_expert";
}

const Spelling* SpellingOf(std::string_view type) {
  const auto found = std::find_if(kSpellings.begin(), kSpellings.end(),
                                  [type](const Spelling& s) { return s.type == type; });
  return found == kSpellings.end() ? nullptr : &*found;
}

// Which layers have a mixture: every decoder_sparse_step-th, but for those of mlp_only_layers.
void ReadLayers(const Spelling& spelling, int64_t layers, ModelKeys* keys, MixtureConfig* mixture) {
  int64_t step = 1;
  if (spelling.deepseek > 0) {
    int64_t first = spelling.deepseek == 3 ? 3 : 0;
    keys->Whole("first_k_dense_replace", &first);
    keys->Whole("moe_layer_freq", &step);
    if (step != 1) keys->Wrong("moe_layer_freq", "and transformers takes 1");
    for (int64_t i = 0; i < layers; ++i) mixture->layers.push_back(i >= first);
    return;
  }
  std::vector<bool> dense(static_cast<size_t>(std::max<int64_t>(layers, 0)), false);
  if (spelling.some_layers) {
    keys->Whole("decoder_sparse_step", &step);
    if (step < 1) return keys->Wrong("decoder_sparse_step", "not 1 or more");
    if (const nlohmann::json* given = keys->Find("mlp_only_layers"); given != nullptr) {
      if (!given->is_array()) return keys->Wrong("mlp_only_layers", "not a list of layers");
      for (const nlohmann::json& each : *given) {
        if (!each.is_number_integer() || each.get<int64_t>() < 0)
          return keys->Wrong("mlp_only_layers", "not a list of layers");
        if (each.get<int64_t>() < layers) dense[each.get<size_t>()] = true;
      }
    }
  }
  for (int64_t i = 0; i < layers; ++i)
    mixture->layers.push_back(!dense[static_cast<size_t>(i)] && (i + 1) % step == 0);
}

// The clamped product of a gate and a row beside it, which gpt-oss alone has.
void ReadPairs(std::string_view model_type, ModelKeys* keys, double* limit) {
  double alpha = 1.702;
  for (const auto& [key, value] : {std::pair{"swiglu_limit", limit}, {"swiglu_alpha", &alpha}}) {
    keys->Number(key, value);
    if (model_type != "gpt_oss" && keys->Find(key) != nullptr)
      keys->Wrong(key, absl::StrCat("which no ", std::string(model_type), " has"));
  }
  if (model_type != "gpt_oss") return;
  if (!(*limit > 0 && *limit <= 1e6)) keys->Wrong("swiglu_limit", "not above 0 and at most 1e6");
  if (alpha != 1.702) keys->Wrong("swiglu_alpha", "and 1.702 alone is computed");
}

// One matrix for gate and up, turned in files. Biases come first, so that an expert's matrices lie side by
// side where they are packed.
template <typename Add>
void AddPairedExperts(const Spelling& s, const MixtureConfig& mixture, const std::string& prefix,
                      int64_t width, const Add& add) {
  struct Matrix {
    const char *name, *fused;
    int64_t rows, columns;
  };
  const Matrix matrices[] = {{s.up, s.fused_gate_up, 2 * mixture.inner, width},
                             {s.down, s.fused_down, width, mixture.inner}};
  const auto u = [](int64_t n) { return static_cast<uint64_t>(n); };
  const auto for_all = [&](auto&& each) {
    for (int64_t e = 0; e < mixture.experts; ++e) {
      for (const Matrix& m : matrices) each(m, e, absl::StrCat(s.experts_name, ".", e, ".", m.name));
    }
  };
  for_all([&](const Matrix& m, int64_t e, const std::string& name) {
    add(name + ".bias", m.rows, 0,
        {{.name = absl::StrCat(prefix, m.fused, "_bias"),
          .shape = {u(mixture.experts), u(m.rows)},
          .first = e * m.rows}},
        static_cast<int>(e));
  });
  for_all([&](const Matrix& m, int64_t e, const std::string& name) {
    add(name + ".weight", m.rows, m.columns,
        {{.name = prefix + m.fused,
          .shape = {u(mixture.experts), u(m.columns), u(m.rows)},
          .first = e * m.rows * m.columns,
          .transposed = true}},
        static_cast<int>(e));
  });
}

// DeepSeek's: one shared expert, groups of experts, and a factor of all weights.
void ReadDeepSeek(const Spelling& s, ModelKeys* keys, MixtureConfig* mixture) {
  const auto must_be = [&](const char* key, std::string_view value) {
    if (const nlohmann::json* given = keys->Find(key); given != nullptr && *given != value)
      keys->Wrong(key,
                  absl::StrCat("and ", std::string(value), " alone is computed in a ", std::string(s.type)));
  };
  int64_t shared = s.shared;
  keys->Whole("n_shared_experts", &shared);
  if (shared < 1 || shared > 1 << 10) keys->Wrong("n_shared_experts", "not from 1 to 1024");
  mixture->shared_inner = shared * mixture->inner;
  mixture->scaling = s.deepseek == 3 ? 2.5 : 1;
  keys->Number("routed_scaling_factor", &mixture->scaling);
  if (!(mixture->scaling > 0 && mixture->scaling <= 1e6))
    keys->Wrong("routed_scaling_factor", "not above 0 and at most 1e6");
  bool grouped = s.deepseek == 3;
  if (s.deepseek == 3) {
    must_be("scoring_func", "sigmoid");
    must_be("topk_method", "noaux_tc");
    mixture->groups = 8;
    mixture->chosen_groups = 4;
  } else {
    must_be("scoring_func", "softmax");
    const nlohmann::json* const method = keys->Find("topk_method");
    grouped = method != nullptr && *method == "group_limited_greedy";
    if (method != nullptr && !grouped && *method != "greedy")
      keys->Wrong("topk_method", "neither greedy nor group_limited_greedy");
    // transformers passes it over, and DeepSeek's own code does not.
    bool normalizes = false;
    keys->Switch("norm_topk_prob", &normalizes);
    if (normalizes) keys->Wrong("norm_topk_prob", "which transformers computes in no deepseek_v2");
    if (grouped && (keys->Find("n_group") == nullptr || keys->Find("topk_group") == nullptr))
      keys->Wrong("topk_method", "without n_group and topk_group");
  }
  if (!grouped) return;
  keys->Whole("n_group", &mixture->groups);
  keys->Whole("topk_group", &mixture->chosen_groups);
  const int64_t groups = mixture->groups, chosen = mixture->chosen_groups;
  const int64_t least = s.deepseek == 3 ? 2 : 1;  // of a group, whose two highest scores are summed
  if (groups < 1 || mixture->experts % groups != 0 || mixture->experts / groups < least) {
    keys->Fail(absl::StrCat("model: n_group is ", groups, ", and ", mixture->experts,
                            " experts are not in as many groups of ", least, " or more"));
  } else if (chosen < 1 || chosen > groups || chosen * (mixture->experts / groups) < mixture->chosen) {
    keys->Fail(absl::StrCat("model: topk_group is ", chosen, ", not so many of ", groups, " groups of ",
                            mixture->experts / groups, " experts that ", mixture->chosen,
                            " experts of a token are in them"));
  }
}

// The keys of a DeepSeek's mixture, which no other type has.
constexpr const char* kDeepSeekKeys[] = {
    "n_routed_experts", "n_shared_experts",      "n_group",        "topk_group",           "topk_method",
    "scoring_func",     "routed_scaling_factor", "moe_layer_freq", "first_k_dense_replace"};

}  // namespace

void ReadMixture(std::string_view model_type, int64_t layers, int64_t inner, ModelKeys* keys,
                 MixtureConfig* mixture) {
  const Spelling* const spelling = SpellingOf(model_type);
  const bool deepseek = spelling != nullptr && spelling->deepseek > 0;
  for (const char* key : kDeepSeekKeys) {
    if (!deepseek && keys->Find(key) != nullptr)
      keys->Wrong(key, absl::StrCat("which no ", std::string(model_type), " has"));
  }
  if (spelling == nullptr) {
    double limit = 0;
    ReadPairs(model_type, keys, &limit);
    for (const char* key : {"num_local_experts", "num_experts"}) {
      int64_t experts = 0;
      keys->Whole(key, &experts);
      if (experts > 1) keys->Wrong(key, absl::StrCat("which no ", std::string(model_type), " has"));
    }
    return;
  }
  // transformers 5 takes both names for their number.
  const bool local = keys->Find("num_local_experts") != nullptr;
  const char* const key = deepseek ? spelling->experts_key : local ? "num_local_experts" : "num_experts";
  mixture->experts = spelling->experts;
  mixture->chosen = spelling->chosen;
  keys->Whole(key, &mixture->experts);
  for (const char* const same : {"num_experts", "num_local_experts"}) {
    int64_t other = mixture->experts;
    keys->Whole(same, &other);
    if (other != mixture->experts) keys->Wrong(same, absl::StrCat("and ", key, " is ", mixture->experts));
  }
  if (spelling->chosen == 0) keys->Needed("num_experts_per_tok", &mixture->chosen);
  keys->Whole("num_experts_per_tok", &mixture->chosen);
  if (mixture->experts < 1 || mixture->experts > 1 << 16) keys->Wrong(key, "not from 1 to 65536");
  if (mixture->chosen < 1 || mixture->chosen > mixture->experts)
    keys->Fail(absl::StrCat("model: num_experts_per_tok is ", mixture->chosen, ", and a layer has ",
                            mixture->experts, " experts"));
  mixture->inner = spelling->inner > 0 ? spelling->inner : inner;
  if (spelling->inner > 0) keys->Whole("moe_intermediate_size", &mixture->inner);
  mixture->shared_inner = spelling->shared_inner;
  if (spelling->shared_inner > 0) keys->Whole("shared_expert_intermediate_size", &mixture->shared_inner);
  if (mixture->inner < 1 || mixture->inner > 1 << 24)
    keys->Fail(absl::StrCat("model: moe_intermediate_size is ", mixture->inner, ", not from 1 to ", 1 << 24));
  if (spelling->shared_inner > 0 && (mixture->shared_inner < 1 || mixture->shared_inner > 1 << 24))
    keys->Wrong("shared_expert_intermediate_size", "not 1 or more");
  mixture->normalizes =
      spelling->normalizes && !(spelling->has_normalizes_key && keys->IsNull("norm_topk_prob"));
  keys->Switch("norm_topk_prob", &mixture->normalizes);
  if (deepseek) ReadDeepSeek(*spelling, keys, mixture);
  if (!spelling->has_normalizes_key && mixture->normalizes != spelling->normalizes)
    keys->Wrong("norm_topk_prob", absl::StrCat("which no ", std::string(model_type), " has"));
  mixture->pair_limit = spelling->pair_limit;
  ReadPairs(model_type, keys, &mixture->pair_limit);
  double clip = 0;
  keys->Number("clip_qkv", &clip);
  if (keys->Find("clip_qkv") != nullptr) keys->Wrong("clip_qkv", "which is not computed");
  // Each expert has parameters by name.
  if (layers > 0 && layers <= 10'000 && mixture->experts > (1 << 20) / layers) {
    keys->Fail(absl::StrCat("model: ", layers, " layers of ", mixture->experts,
                            " experts: more than 1048576 experts in all are not served"));
    return;
  }
  if (layers <= 10'000) ReadLayers(*spelling, layers, keys, mixture);
}

void WriteMixture(std::string_view model_type, const MixtureConfig& mixture, nlohmann::ordered_json* json) {
  const Spelling* const spelling = SpellingOf(model_type);
  if (spelling == nullptr) return;
  (*json)[spelling->experts_key] = mixture.experts;
  (*json)["num_experts_per_tok"] = mixture.chosen;
  if (spelling->inner > 0) (*json)["moe_intermediate_size"] = mixture.inner;
  if (spelling->shared_inner > 0) (*json)["shared_expert_intermediate_size"] = mixture.shared_inner;
  if (spelling->has_normalizes_key) (*json)["norm_topk_prob"] = mixture.normalizes;
  if (spelling->pair_limit > 0) (*json)["swiglu_limit"] = mixture.pair_limit;
  if (spelling->deepseek > 0) {
    (*json)["n_shared_experts"] = mixture.shared_inner / mixture.inner;
    (*json)["routed_scaling_factor"] = mixture.scaling;
    (*json)["n_group"] = mixture.groups;
    (*json)["topk_group"] = mixture.chosen_groups;
    if (spelling->deepseek == 2)
      (*json)["topk_method"] = mixture.groups > 1 ? "group_limited_greedy" : "greedy";
    (*json)["first_k_dense_replace"] = std::count(mixture.layers.begin(), mixture.layers.end(), false);
  }
  if (!spelling->some_layers) return;
  (*json)["decoder_sparse_step"] = 1;
  (*json)["mlp_only_layers"] = nlohmann::ordered_json::array();
  for (size_t i = 0; i < mixture.layers.size(); ++i) {
    if (!mixture.layers[i]) (*json)["mlp_only_layers"].push_back(i);
  }
}

void AddMixture(std::string_view model_type, const MixtureConfig& mixture, const std::string& prefix,
                int64_t width, double deviation, BlockDescription* block) {
  const Spelling& s = *SpellingOf(model_type);
  const auto add = [&](const std::string& name, int64_t rows, int64_t columns, std::vector<OtherPlace> others,
                       int expert) {
    block->parameters.push_back({.name = name,
                                 .published = prefix + name,
                                 .rows = rows,
                                 .columns = columns,
                                 .deviation = deviation,
                                 .other_places = std::move(others),
                                 .expert = expert});
  };
  const auto u = [](int64_t n) { return static_cast<uint64_t>(n); };
  std::vector<OtherPlace> router;
  if (s.other_router != nullptr) {
    router.push_back({absl::StrCat(prefix, s.other_router, ".weight"), {u(mixture.experts), u(width)}, 0});
  }
  add(absl::StrCat(s.router, ".weight"), mixture.experts, width, std::move(router), -1);
  if (s.pair_limit > 0) {
    add(absl::StrCat(s.router, ".bias"), mixture.experts, 0, {}, -1);
    AddPairedExperts(s, mixture, prefix, width, add);
    return;
  }
  if (s.deepseek == 3) add(kCorrection, mixture.experts, 0, {}, -1);
  if (mixture.shared_inner > 0) {
    if (s.deepseek == 0) add("mlp.shared_expert_gate.weight", 1, width, {}, -1);
    const std::string shared = SharedOf(s);
    add(shared + ".gate_proj.weight", mixture.shared_inner, width, {}, -1);
    add(shared + ".up_proj.weight", mixture.shared_inner, width, {}, -1);
    add(shared + ".down_proj.weight", width, mixture.shared_inner, {}, -1);
  }
  std::vector<std::pair<std::string, std::string>> fused = {{s.fused_gate_up, s.fused_down}};
  if (model_type == "granitemoe") fused.emplace_back(kGraniteGateUp, kGraniteDown);
  const int64_t matrix = mixture.inner * width;
  for (int64_t e = 0; e < mixture.experts; ++e) {
    // Where the matrix begins in a layer's tensor, the gate being half 0 of what is fused with it.
    const auto in_gate_up = [&](int64_t half) {
      std::vector<OtherPlace> places;
      for (const auto& [name, down] : fused) {
        places.push_back(
            {prefix + name, {u(mixture.experts), u(2 * mixture.inner), u(width)}, (2 * e + half) * matrix});
      }
      return places;
    };
    std::vector<OtherPlace> in_down;
    for (const auto& [gate_up, name] : fused)
      in_down.push_back({prefix + name, {u(mixture.experts), u(width), u(mixture.inner)}, e * matrix});
    const auto name_of = [&](const char* which) {
      return absl::StrCat(s.experts_name, ".", e, ".", which, ".weight");
    };
    const auto number = static_cast<int>(e);
    add(name_of(s.gate), mixture.inner, width, in_gate_up(0), number);
    add(name_of(s.up), mixture.inner, width, in_gate_up(1), number);
    add(name_of(s.down), width, mixture.inner, std::move(in_down), number);
  }
}

MixtureFunction MixtureFunctionOf(std::string_view model_type, const MixtureConfig& mixture) {
  MixtureFunction function;
  const Spelling* const s = SpellingOf(model_type);
  if (s == nullptr) return function;
  function.layers = mixture.layers;
  function.router = s->router;
  function.experts = s->experts_name;
  function.gate = s->gate;
  function.up = s->up;
  function.down = s->down;
  function.normalizes = mixture.normalizes;
  function.pair_limit = mixture.pair_limit;
  function.rounds_weights = s->rounds_weights;
  function.sigmoid = function.sums_two = s->deepseek == 3;
  function.wide = s->deepseek > 0;
  if (s->deepseek == 3) function.correction = kCorrection;
  function.groups = mixture.groups;
  function.chosen_groups = mixture.chosen_groups;
  function.scaling = mixture.scaling;
  if (mixture.shared_inner > 0) {
    if (s->deepseek == 0) function.shared_router = "mlp.shared_expert_gate";
    const std::string shared = SharedOf(*s);
    function.shared_gate = shared + ".gate_proj";
    function.shared_up = shared + ".up_proj";
    function.shared_down = shared + ".down_proj";
  }
  return function;
}

std::set<std::string> RoutersOf(const LanguageModel& model) {
  std::set<std::string> names;
  const std::optional<Decoder> decoder = model.decoder();
  if (!decoder.has_value()) return names;
  for (const BlockDescription& block : decoder->blocks) {
    for (const ParameterDescription& parameter : block.parameters) {
      if (decoder->function.mixture.IsRouter(parameter.name)) names.insert(parameter.published);
    }
  }
  return names;
}

}  // namespace penstock::models
