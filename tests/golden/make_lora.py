"""Writes tests/golden/lora.json; tests/golden/make lora says what with. The same releases write the same bytes."""
import json
import os
import tempfile
import warnings

import peft
import torch
import transformers

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
OUT = os.path.dirname(os.path.abspath(__file__))
STEPS = 20
LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 31, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 31, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
CASES = [
    ("llama", LLAMA, {}),
    ("llama", LLAMA, {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}),
    ("llama", {**LLAMA, "tie_word_embeddings": True, "num_key_value_heads": 1},
     {"r": 3, "lora_alpha": 6, "target_modules": ["k_proj", "o_proj", "mlp.down_proj"]}),
    ("llama", LLAMA, {"r": 2, "target_modules": ["q_proj", "lm_head"]}),
    ("mistral", {**LLAMA, "sliding_window": None, "head_dim": 8}, {"r": 2, "lora_alpha": 3}),
    ("qwen2", {**LLAMA, "tie_word_embeddings": True}, {"target_modules": ["q_proj", "k_proj", "v_proj"]}),
    ("qwen3", {**LLAMA, "head_dim": 10}, {"r": 4, "target_modules": "all-linear"}),
    ("gpt2", GPT2, {}),
    ("gpt2", GPT2, {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}),
    ("gpt2", GPT2, {"r": 5, "target_modules": ["mlp.c_proj", "c_attn"]}),
]


def formula(named, scale=1.0):
    """Weights that a test can make again: exact in fp32, by published names. As in make_llama.py."""
    with torch.no_grad():
        for name, value in named.items():
            salt = sum((i + 1) * b for i, b in enumerate(name.encode())) % 65521
            e = torch.arange(value.numel(), dtype=torch.int64)
            x = ((e * 2654435761 + salt * 40503 + 12345) % 2**32) // 65536
            drawn = x.double() / 65536 - 0.5
            if name.endswith("norm.weight") or (".ln_" in name and name.endswith("weight")):
                drawn = 1 + drawn / 4
            value.copy_(drawn.view(value.shape) * scale)


def tokens(batch, length, vocab):
    return torch.tensor([[(7 * i + 5 * r + i * i * (r + 1)) % vocab for i in range(length + 1)] for r in range(batch)])


def case(kind, keys, lora, batch=2, length=18):
    config = transformers.AutoConfig.for_model(kind, **keys)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        with open(os.path.join(directory, "config.json")) as file:
            written = json.load(file)
    tied = config.tie_word_embeddings
    formula({n: v for n, v in model.state_dict().items() if not (tied and n == "lm_head.weight")})
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **lora))
    # By the names in PEFT's files. Small: large ones make of a last bit a third digit within 20 steps.
    own = {n.replace(".default", ""): p for n, p in adapted.named_parameters() if p.requires_grad}
    formula(own, 0.125)
    with tempfile.TemporaryDirectory() as directory:
        adapted.save_pretrained(directory, save_embedding_layers=False)
        with open(os.path.join(directory, "adapter_config.json")) as file:
            adapter = json.load(file)
    adapter["target_modules"] = sorted(adapter["target_modules"])
    ids = tokens(batch, length, config.vocab_size)
    answer = {"config": written, "lora": lora, "adapter": adapter, "batch": batch, "length": length,
              "names": sorted(own), "parameters": sum(p.numel() for p in own.values())}
    loss_of = lambda: torch.nn.functional.cross_entropy(
        adapted(ids[:, :-1]).logits.view(-1, config.vocab_size), ids[:, 1:].reshape(-1))
    adapted.eval()
    with torch.no_grad():
        answer["evaluation"] = loss_of().item()
    adapted.train()
    optimizer = torch.optim.AdamW(own.values(), lr=0.002, weight_decay=0.1)
    answer["losses"], answer["norms"] = [], []
    for _ in range(STEPS):
        loss = loss_of()
        loss.backward()
        answer["norms"].append(torch.nn.utils.clip_grad_norm_(list(own.values()), 1.0).item())
        answer["losses"].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    adapted.eval()
    merged = adapted.merge_and_unload().eval()
    with torch.no_grad():
        answer["logits"] = [float(x) for x in merged(ids[:1, :length]).logits[0, -1]]
        chosen = ids[:1, :4].clone()
        for _ in range(8):
            chosen = torch.cat([chosen, merged(chosen).logits[:, -1:].argmax(-1)], 1)
        answer["greedy"] = chosen[0].tolist()
    return answer


cases = [case(*c) for c in CASES]
made_with = {"transformers": transformers.__version__, "torch": torch.__version__, "peft": peft.__version__}
with open(os.path.join(OUT, "lora.json"), "w") as file:
    file.write('{"made_with": ' + json.dumps(made_with) + ',\n"cases": [\n  ' +
               ",\n  ".join(json.dumps(c) for c in cases) + "\n]}\n")
