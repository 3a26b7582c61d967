"""Writes tests/golden/mixtures.json: what transformers answers for small mixtures of experts. tests/golden/make llama runs it. The same releases write the same bytes."""
import json
import os
import tempfile

import torch
import transformers

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
OUT = os.path.dirname(os.path.abspath(__file__))
GREEDY = 16

TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 31, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
YARN = {"type": "yarn", "factor": 8.0, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 8}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 5, "first_k_dense_replace": 1,
          "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
QWEN = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
CASES = [
    ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}),
    ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 5, "tie_word_embeddings": True, "head_dim": 8}),
    ("qwen2_moe", {**QWEN, "shared_expert_intermediate_size": 20}),
    ("qwen2_moe", {**QWEN, "shared_expert_intermediate_size": 8, "norm_topk_prob": True, "decoder_sparse_step": 2, "qkv_bias": False}),
    ("qwen3_moe", {**QWEN, "head_dim": 6, "norm_topk_prob": True, "num_experts_per_tok": 4}),
    ("qwen3_moe", {**QWEN, "mlp_only_layers": [1], "tie_word_embeddings": True, "num_experts_per_tok": 1, "attention_bias": True}),
    ("olmoe", {"num_experts": 7, "num_experts_per_tok": 3}),
    ("olmoe", {"num_experts": 4, "num_experts_per_tok": 4, "norm_topk_prob": True, "attention_bias": True}),
    ("granitemoe", {"num_local_experts": 6, "num_experts_per_tok": 2, "embedding_multiplier": 6.0, "residual_multiplier": 0.25,
                    "attention_multiplier": 0.125, "logits_scaling": 5.0, "tie_word_embeddings": True}),
    # Limits that clamp.
    ("gpt_oss", {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 5, "swiglu_limit": 0.25,
                 "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 8}}),
    ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 4, "head_dim": 4, "attention_bias": False, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    # As V2-Lite has them, V2, V3 and Moonlight.
    ("deepseek_v2", {**LATENT, "q_lora_rank": None, "n_shared_experts": 2, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "scoring_func": "softmax",
                     "moe_layer_freq": 1, "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}),
    ("deepseek_v2", {**LATENT, "q_lora_rank": 12, "n_shared_experts": 1, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
                     "routed_scaling_factor": 3.0, "rope_scaling": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.5}}),
    ("deepseek_v3", {**LATENT, "q_lora_rank": 12, "n_group": 4, "topk_group": 2, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1,
                     "attention_bias": True, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    ("deepseek_v3", {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "first_k_dense_replace": 0, "norm_topk_prob": False,
                     "rope_interleave": False, "routed_scaling_factor": 1.5, "tie_word_embeddings": True, "v_head_dim": 9}),
]
# How files with a tensor for each matrix name an expert's gate, up and down. (Granite's files have none.)
SEPARATE = {"mixtral": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3", "block_sparse_moe.experts.{}.w2"),
            "granitemoe": tuple("block_sparse_moe.experts.{}." + each for each in ("gate_proj", "up_proj", "down_proj"))}
DEFAULT = tuple("mlp.experts.{}." + each for each in ("gate_proj", "up_proj", "down_proj"))
ROUTERS = {"mixtral": ("mlp.gate", "block_sparse_moe.gate"), "granitemoe": ("block_sparse_moe.router", "block_sparse_moe.router.layer")}


def drawn(name, shape):
    """Weights that a test can make again: exact in fp32. As in make_models.py."""
    salt = sum((i + 1) * b for i, b in enumerate(name.encode())) % 65521
    e = torch.arange(shape.numel(), dtype=torch.int64)
    values = (((e * 2654435761 + salt * 40503 + 12345) % 2**32) // 65536).double() / 65536 - 0.5
    if name.endswith("norm.weight"):
        values = 1 + values / 4
    return values.view(shape)


def fill(model, kind):
    gate, up, down = SEPARATE.get(kind, DEFAULT)
    old, new = ROUTERS.get(kind, ("", ""))
    with torch.no_grad():
        for name, value in model.state_dict().items():
            layer = name.split(".experts.")[0].rsplit(".", 1)[0] + "."
            if name == "lm_head.weight" and model.config.tie_word_embeddings:
                continue
            if name.endswith("experts.gate_up_proj") and kind != "gpt_oss":
                half = value.shape[1] // 2
                for e in range(value.shape[0]):
                    value[e, :half] = drawn(layer + gate.format(e) + ".weight", value[e, :half].shape)
                    value[e, half:] = drawn(layer + up.format(e) + ".weight", value[e, half:].shape)
            elif kind == "gpt_oss" and ".experts." in name:  # an expert's are named by themselves, and turned there
                which = name.rsplit(".", 1)[1]
                for e in range(value.shape[0]):
                    if which.endswith("_bias"):
                        value[e] = drawn(f"{layer}mlp.experts.{e}.{which[:-5]}.bias", value[e].shape)
                    else:
                        value[e] = drawn(f"{layer}mlp.experts.{e}.{which}.weight", value[e].T.shape).T
            elif name.endswith("experts.down_proj"):
                for e in range(value.shape[0]):
                    value[e] = drawn(layer + down.format(e) + ".weight", value[e].shape)
            else:
                value.copy_(drawn(name.replace(old, new) if old and name.endswith(old + ".weight") else name, value.shape))


def case(kind, keys):
    keys = {**TINY, **keys}
    with tempfile.TemporaryDirectory() as directory:
        old = {"model_type": kind, **keys}
        with open(os.path.join(directory, "config.json"), "w") as file:
            json.dump(old, file)
        config = transformers.AutoConfig.from_pretrained(directory)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        config.save_pretrained(directory)
        with open(os.path.join(directory, "config.json")) as file:
            new = json.load(file)
    fill(model, kind)
    corrections = [value.numel() for name, value in model.named_buffers() if name.endswith("correction_bias")]
    chosen = torch.tensor([[3, 11, 7, 19]])
    with torch.no_grad():
        first = model(chosen).logits[0, -1]
        for _ in range(GREEDY):
            chosen = torch.cat([chosen, model(chosen).logits[:, -1:].argmax(-1)], 1)
    return {"old": old, "config": new, "parameters": sum(p.numel() for p in model.parameters()) + sum(corrections), "logits": [float(x) for x in first], "greedy": chosen[0].tolist()}


cases = [case(*c) for c in CASES]
with open(os.path.join(OUT, "mixtures.json"), "w") as file:
    file.write('{"made_with": ' + json.dumps({"transformers": transformers.__version__, "torch": torch.__version__}) +
               ',\n"cases": [\n  ' + ",\n  ".join(json.dumps(c) for c in cases) + "\n]}\n")
