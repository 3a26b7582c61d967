"""Saved by transformers, trained at rate 0 and exported by penstock, loaded by transformers: the same bits."""
import array
import json
import os
import subprocess
import sys
import tempfile

import torch
import transformers

PROGRAM = sys.argv[1]
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
CASES = [
    ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500.0, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "tie_word_embeddings": True}),
    ("mistral", {"sliding_window": 64}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 16}),
]


def penstock(*arguments):
    subprocess.run([PROGRAM, *arguments, "--quiet"], check=True)


def round_trip(directory, kind, keys):
    path = lambda name: os.path.join(directory, name)
    os.makedirs(path("model"))
    with open(path("model/config.json"), "w") as file:
        json.dump({"model_type": kind, **TINY, **keys}, file)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path("model"))).float()
    model.save_pretrained(path("model"), max_shard_size="20KB")
    with open(path("tokens.bin"), "wb") as file:
        array.array("H", [(i * 7 + i * i // 3) % TINY["vocab_size"] for i in range(5000)]).tofile(file)
    penstock("train", "--model", path("model"), "--data", path("tokens.bin"), "--state-dir", path("state"), "--steps", "3",
             "--lr", "0", "--weight-decay", "0", "--seq", "16", "--batch", "1", "--dtype", "fp32", "--host-memory", "300MiB")
    for dtype in (torch.float32, torch.bfloat16):
        name = "fp32" if dtype == torch.float32 else "bf16"
        os.makedirs(path(name))
        penstock("export", path("state"), path(name), "--max-shard", "20KB", "--dtype", name)
        again = transformers.AutoModelForCausalLM.from_pretrained(path(name))
        expected, loaded = model.state_dict(), again.state_dict()
        assert set(expected) == set(loaded), set(expected) ^ set(loaded)
        for key, value in expected.items():
            assert loaded[key].dtype == dtype and torch.equal(value.to(dtype), loaded[key]), key
        if dtype == torch.float32:
            ids = torch.arange(20)[None] % TINY["vocab_size"]
            with torch.no_grad():
                assert torch.equal(model.eval()(ids).logits, again.eval()(ids).logits)
        print(f"{kind} {json.dumps(keys)}: the same bits as {name}, {len(os.listdir(path(name)))} files", flush=True)


for number, (kind, keys) in enumerate(CASES):
    torch.manual_seed(number)
    with tempfile.TemporaryDirectory(dir="build") as directory:
        round_trip(directory, kind, keys)
