"""transformers for bench/peers/generate, in the environment with torch, transformers and accelerate.

    generate_transformers.py make MODEL LAYERS WIDTH INNER HEADS KEY_HEADS VOCABULARY [EXPERTS CHOSEN]
    generate_transformers.py oracle|accelerate MODEL PROMPTS TOKENS OFFLOAD LIMIT

Prints a line of JSON: tokens a second behind the first, the tokens, peak RSS.
"""

import json
import pathlib
import sys
import time

import torch
import transformers

import peers


def make(model, layers, width, inner, heads, key_heads, vocabulary, experts=0, chosen=0):
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=key_heads, max_position_embeddings=2048, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    if experts:
        config = transformers.Qwen3MoeConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, moe_intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=key_heads, num_experts=experts, num_experts_per_tok=chosen, norm_topk_prob=True, max_position_embeddings=2048,
            tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
            # Five times the default: with that a text soon repeats a token, and with it the experts of all layers, which memory then has.
            initializer_range=0.1,
        )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model, max_shard_size="1GB")


class FirstToken(transformers.StoppingCriteria):
    """Notes when the first token was there."""

    at = None

    def __call__(self, input_ids, scores, **kwargs):
        self.at = self.at or time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def run(who, model, prompts, tokens, offload, limit):
    options = {"dtype": torch.bfloat16}
    if who == "accelerate":
        # What a layer and its neighbours take beside what stays: half of the limit, as accelerate's users leave room.
        options |= {"device_map": "auto", "max_memory": {"cpu": limit // 2}, "offload_folder": offload}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, **options).eval()
    ids = torch.tensor(json.loads(pathlib.Path(prompts).read_text()))
    first = FirstToken()
    made = loaded.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0,
        stopping_criteria=[first],
    )  # fmt: skip
    seconds = time.perf_counter() - first.at
    rate = (tokens - 1) * len(ids) / seconds
    print(json.dumps({"rate": rate, "tokens": made[:, ids.shape[1] :].tolist(), "rss": peers.own_usage()["rss"]}))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        run(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5], int(sys.argv[6]))
