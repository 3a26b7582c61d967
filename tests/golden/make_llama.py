"""Writes tests/golden/llama.json, llama_variants.json and llama_windows.json; tests/golden/make llama says what with. The same releases write the same bytes."""
import json
import os
import tempfile

import torch
import transformers

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
OUT = os.path.dirname(os.path.abspath(__file__))
STEPS = 20
GREEDY = 12

# Keys that a reader of another release may have put there, and which change nothing.
TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 31, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
CASES = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    ("llama", {"rope_theta": 50.0, "rope_scaling": LLAMA3, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("llama", {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "attention_bias": True,
               "mlp_bias": True}),
    ("llama", {"pad_token_id": 0, "tie_word_embeddings": True}),
    ("llama", {"max_position_embeddings": 400, "head_dim": 6}, 1, 300),
    ("mistral", {"sliding_window": None, "head_dim": 8}),
    ("mistral", {"sliding_window": 20}),
    ("qwen2", {"tie_word_embeddings": True, "rope_theta": 1000000.0}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    ("qwen3", {"head_dim": 10, "tie_word_embeddings": True, "rope_theta": 1000000.0}),
    ("qwen3", {"head_dim": 4, "attention_bias": True}),
]
# Other norms, multipliers and layers without positions. Few steps: small results that are normalised make rounding grow.
VARIANTS = [
    ("smollm3", {"num_hidden_layers": 3, "no_rope_layer_interval": 2, "pad_token_id": None}),
    ("smollm3", {"no_rope_layers": [0, 1], "tie_word_embeddings": False, "attention_bias": True, "pad_token_id": 3}),
    ("granite", {"embedding_multiplier": 6.0, "residual_multiplier": 0.25, "attention_multiplier": 0.125,
                 "logits_scaling": 5.0, "tie_word_embeddings": True}),
    ("granite", {"logits_scaling": 0.5, "attention_bias": True, "mlp_bias": True}),
    ("olmo2", {"num_key_value_heads": 1, "rope_theta": 500000.0}),
    ("olmo2", {"tie_word_embeddings": True, "attention_bias": True, "rms_norm_eps": 1e-6}),
]


# Windows that are shorter than the sequences, other rotary positions, and the families that have them.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
FACTORS = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 5.0]}
GEMMA = {"head_dim": 4, "sliding_window": 6, "query_pre_attn_scalar": 5, "bos_token_id": 1, "eos_token_id": 2}
WINDOWS = [
    ("mistral", {"sliding_window": 5}),
    ("mistral", {"sliding_window": 1, "num_key_value_heads": 1}),
    ("mistral", {"sliding_window": 40, "max_position_embeddings": 400}, 1, 300),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "num_hidden_layers": 3}),
    ("qwen3", {"head_dim": 4, "use_sliding_window": True, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}),
    ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 6, "pad_token_id": None}),
    ("llama", {"rope_theta": 50.0, "rope_scaling": YARN}),
    ("llama", {"rope_theta": 50.0, "tie_word_embeddings": True, "head_dim": 8,
               "rope_scaling": {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "mscale": 1.2, "mscale_all_dim": 0.5, "truncate": False}}),
    ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 1.25, "original_max_position_embeddings": 32}}),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64, **FACTORS}}),
    ("phi3", {"pad_token_id": None}),
    ("phi3", {"pad_token_id": 3, "sliding_window": 5, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    # The sequences grow beyond the original context.
    ("phi3", {"pad_token_id": None, "original_max_position_embeddings": 10, "rope_scaling": {"type": "longrope", **FACTORS}}),
    ("phi3", {"pad_token_id": None, "original_max_position_embeddings": 10, "hidden_size": 32, "partial_rotary_factor": 0.5,
              "rope_scaling": {"type": "su", "attention_factor": 1.5, "original_max_position_embeddings": 10, **FACTORS}}),
    ("gemma2", {**GEMMA, "num_hidden_layers": 3}),
    ("gemma2", {**GEMMA, "attention_bias": True, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0, "pad_token_id": 3}),
    ("gemma2", {**GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": None, "sliding_window": 40, "max_position_embeddings": 400}, 1, 300),
    ("gemma3_text", {**GEMMA, "num_hidden_layers": 7}, 2, 18, 1),
    ("gemma3_text", {**GEMMA, "head_dim": 8, "sliding_window_pattern": 2, "rope_theta": 300.0, "rope_local_base_freq": 20.0, "final_logit_softcapping": 3.0,
                     "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
]


def formula(model):
    """Weights that a test can make again: exact in fp32. As in make_models.py."""
    state = model.state_dict()
    with torch.no_grad():
        for name, value in state.items():
            if name == "lm_head.weight" and model.config.tie_word_embeddings:
                continue
            salt = sum((i + 1) * b for i, b in enumerate(name.encode())) % 65521
            e = torch.arange(value.numel(), dtype=torch.int64)
            x = ((e * 2654435761 + salt * 40503 + 12345) % 2**32) // 65536
            drawn = x.double() / 65536 - 0.5
            if name.endswith("norm.weight"):
                drawn = 1 + drawn / 4
            value.copy_(drawn.view(value.shape))


def tokens(batch, length, vocab):
    return torch.tensor([[(7 * i + 5 * r + i * i * (r + 1)) % vocab for i in range(length + 1)] for r in range(batch)])


def case(kind, keys, batch=2, length=18, steps=STEPS):
    keys = {**TINY, **keys}
    with tempfile.TemporaryDirectory() as directory:
        # As a file of transformers 4, and what this release makes of it: both spellings.
        old = {"model_type": kind, **keys}
        with open(os.path.join(directory, "config.json"), "w") as file:
            json.dump(old, file)
        config = transformers.AutoConfig.from_pretrained(directory)
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
        config.save_pretrained(directory)
        with open(os.path.join(directory, "config.json")) as file:
            new = json.load(file)
    formula(model)
    ids = tokens(batch, length, config.vocab_size)
    answer = {"old": old, "config": new, "batch": batch, "length": length,
              "parameters": sum(p.numel() for p in model.parameters()),
              "names": sorted(n for n, _ in model.named_parameters())}
    model.eval()
    with torch.no_grad():
        row = ids[:1, :min(length, 18)]
        logits = model(row).logits[0]
        answer["logits"] = [[float(x) for x in position] for position in logits[::5]] + [[float(x) for x in logits[-1]]]
        answer["positions"] = list(range(0, row.shape[1], 5)) + [row.shape[1] - 1]
        chosen = ids[:1, :4].clone()
        for _ in range(GREEDY):
            chosen = torch.cat([chosen, model(chosen).logits[:, -1:].argmax(-1)], 1)
        answer["greedy"] = chosen[0].tolist()
    loss_of = lambda: torch.nn.functional.cross_entropy(
        model(ids[:, :-1]).logits.view(-1, config.vocab_size), ids[:, 1:].reshape(-1))
    with torch.no_grad():
        answer["evaluation"] = loss_of().item()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002, weight_decay=0.1)
    answer["losses"], answer["norms"] = [], []
    for _ in range(steps):
        loss = loss_of()
        loss.backward()
        answer["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        answer["losses"].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return answer


def keys_of(cls):
    return sorted(set(cls.__dataclass_fields__) - set(transformers.PreTrainedConfig.__dataclass_fields__))


def write(name, cases, classes):
    keys = {cls.model_type: keys_of(cls) for cls in classes}
    with open(os.path.join(OUT, name), "w") as file:
        file.write('{"made_with": ' + json.dumps({"transformers": transformers.__version__, "torch": torch.__version__}) +
                   ',\n"keys": ' + json.dumps(keys) + ',\n"cases": [\n  ' + ",\n  ".join(json.dumps(c) for c in cases) + "\n]}\n")


write("llama.json", [case(*c) for c in CASES],
      (transformers.LlamaConfig, transformers.MistralConfig, transformers.Qwen2Config, transformers.Qwen3Config))
write("llama_windows.json", [case(*c, **({} if len(c) > 4 else {"steps": 8})) for c in WINDOWS],
      (transformers.Phi3Config, transformers.Gemma2Config, transformers.Gemma3TextConfig))
write("llama_variants.json", [case(*c, steps=8) for c in VARIANTS],
      (transformers.SmolLM3Config, transformers.GraniteConfig, transformers.Olmo2Config))
