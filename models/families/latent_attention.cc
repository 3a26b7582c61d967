#include "models/families/latent_attention.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace penstock::models {
namespace {

constexpr const char *kQuery = "self_attn.q_proj", *kQueryDown = "self_attn.q_a_proj",
                     *kQueryNorm = "self_attn.q_a_layernorm", *kQueryUp = "self_attn.q_b_proj",
                     *kDown = "self_attn.kv_a_proj_with_mqa", *kNorm = "self_attn.kv_a_layernorm",
                     *kUp = "self_attn.kv_b_proj";
constexpr const char* kInterleave = "rope_interleave";

// The keys of a latent's sizes, and what transformers has where config.json says nothing.
struct SizeKey {
  const char* key;
  int64_t LatentShape::*size;
  int64_t usual;
};
constexpr SizeKey kSizes[] = {{"kv_lora_rank", &LatentShape::rank, 512},
                              {"q_lora_rank", &LatentShape::query_rank, 1536},
                              {"qk_nope_head_dim", &LatentShape::plain, 128},
                              {"qk_rope_head_dim", &LatentShape::turned, 64},
                              {"v_head_dim", &LatentShape::value, 128}};

}  // namespace

bool IsLatentType(std::string_view model_type) {
  return model_type == "deepseek_v2" || model_type == "deepseek_v3";
}

void ReadLatent(std::string_view model_type, ModelKeys* keys, LatentConfig* latent) {
  const auto refuse = [&](const char* key) {
    if (keys->Find(key) != nullptr)
      keys->Wrong(key, absl::StrCat("which no ", std::string(model_type), " has"));
  };
  if (!IsLatentType(model_type)) {
    for (const SizeKey& each : kSizes) refuse(each.key);
    bool interleaves = false;
    keys->Switch(kInterleave, &interleaves);
    if (interleaves) refuse(kInterleave);
    return;
  }
  for (const SizeKey& each : kSizes) {
    latent->shape.*each.size = each.usual;
    keys->Whole(each.key, &(latent->shape.*each.size));
  }
  if (keys->IsNull("q_lora_rank")) {  // queries are made of what the layer takes, by one matrix
    latent->shape.query_rank = 0;
  } else if (latent->shape.query_rank < 1 && keys->Find("q_lora_rank") != nullptr) {
    keys->Wrong("q_lora_rank", "neither null nor 1 or more");
  }
  latent->turns_neighbours = model_type == "deepseek_v2" || !keys->IsNull(kInterleave);
  keys->Switch(kInterleave, &latent->turns_neighbours);
  if (model_type == "deepseek_v2" && !latent->turns_neighbours)
    keys->Wrong(kInterleave, "and positions turn neighbours in every deepseek_v2");
}

void WriteLatent(std::string_view model_type, const LatentConfig& latent, nlohmann::ordered_json* json) {
  if (!IsLatentType(model_type)) return;
  for (const SizeKey& each : kSizes) (*json)[each.key] = latent.shape.*each.size;
  if (latent.shape.query_rank == 0) (*json)["q_lora_rank"] = nullptr;
  if (model_type == "deepseek_v3") (*json)[kInterleave] = latent.turns_neighbours;
}

absl::Status CheckLatent(const LatentConfig& latent) {
  for (const SizeKey& each : kSizes) {
    const int64_t size = latent.shape.*each.size;
    if (each.size == &LatentShape::query_rank && size == 0) continue;
    RETURN_IF_ERROR(CheckSize(each.key, size, 1 << 16));
  }
  return absl::OkStatus();
}

void ForLatentParameters(const LatentShape& latent, int64_t width, int64_t heads, bool bias,
                         absl::FunctionRef<void(const char* name, int64_t in, int64_t out, bool bias)> matrix,
                         absl::FunctionRef<void(const char* name, int64_t width)> norm) {
  const int64_t queries = heads * latent.query_depth();
  if (latent.query_rank > 0) {
    matrix(kQueryDown, width, latent.query_rank, bias);
    norm(kQueryNorm, latent.query_rank);
    matrix(kQueryUp, latent.query_rank, queries, false);
  } else {
    matrix(kQuery, width, queries, false);
  }
  matrix(kDown, width, latent.rank + latent.turned, bias);
  norm(kNorm, latent.rank);
  matrix(kUp, latent.rank, heads * (latent.plain + latent.value), false);
}

int64_t LatentParameters(const LatentShape& latent, int64_t width, int64_t heads) {
  int64_t sum = 0;
  ForLatentParameters(
      latent, width, heads, false, [&sum](const char*, int64_t in, int64_t out, bool) { sum += in * out; },
      [](const char*, int64_t) {});
  return sum;
}

LatentFunction LatentFunctionOf(const LatentConfig& latent) {
  LatentFunction function;
  if (latent.shape.query_rank > 0) {
    function.query_down = kQueryDown;
    function.query_norm = kQueryNorm;
  }
  function.query = latent.shape.query_rank > 0 ? kQueryUp : kQuery;
  function.down = kDown;
  function.norm = kNorm;
  function.up = kUp;
  function.turns_neighbours = latent.turns_neighbours;
  return function;
}

}  // namespace penstock::models
