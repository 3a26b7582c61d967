"""llama.cpp for bench/peers/generate, in the environment with llama-cpp-python and gguf.

    generate_llama_cpp.py make MODEL FILE.gguf
    generate_llama_cpp.py llama.cpp FILE.gguf PROMPTS TOKENS OFFLOAD LIMIT

Prints a line of JSON: tokens a second behind the first, the tokens, peak RSS.
"""

import ctypes
import json
import os
import pathlib
import sys
import time

import numpy

import peers

NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    # of a mixture
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp",
    "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
}  # fmt: skip
WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}


def tensors(model):
    """Name and bf16 bits (uint16) of each tensor, one in memory at a time."""
    for shard in sorted(pathlib.Path(model).glob("*.safetensors")):
        with open(shard, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
            for name, at in header.items():
                if name == "__metadata__":
                    continue
                begin, end = at["data_offsets"]
                file.seek(8 + size + begin)
                yield name, numpy.frombuffer(file.read(end - begin), dtype=numpy.uint16).reshape(at["shape"])


def renamed(model, experts):
    """The same under llama.cpp's names: the matrices of a layer's experts are one tensor of three dimensions."""
    stacks = {}
    for name, bits in tensors(model):
        if name in WHOLE:
            yield WHOLE[name], bits
            continue
        _, _, layer, rest = name.split(".", 3)
        rest = rest.removesuffix(".weight")
        if not rest.startswith("mlp.experts."):
            yield f"blk.{layer}.{NAMES[rest]}.weight", bits
            continue
        number, which = rest.removeprefix("mlp.experts.").split(".")
        name = f"blk.{layer}.{NAMES[which]}.weight"
        stack = stacks.setdefault(name, {})
        stack[int(number)] = bits
        if len(stack) == experts:
            yield name, numpy.stack([stack[e] for e in range(experts)])
            del stacks[name]
    if stacks:
        raise SystemExit(f"{model}: {next(iter(stacks))} has fewer than {experts} experts")


def make(model, path):
    import gguf

    config = json.loads((pathlib.Path(model) / "config.json").read_text())
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    depth = config.get("head_dim") or config["hidden_size"] // heads
    experts = config.get("num_experts") or config.get("num_local_experts", 0)
    writer = gguf.GGUFWriter(path, "qwen3moe" if experts else "llama", use_temp_file=True)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    writer.add_rope_dimension_count(depth)
    if experts:
        writer.add_key_length(depth)
        writer.add_value_length(depth)
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for name, bits in renamed(model, experts):
        for of, count in (("attn_q", heads), ("attn_k", key_heads)):
            if not experts and f".{of}." in name:  # of a Llama llama.cpp turns neighbours, transformers halves
                bits = bits.reshape(count, 2, bits.shape[0] // count // 2, bits.shape[1]).swapaxes(1, 2).reshape(bits.shape)
        if bits.ndim == 1 or "ffn_gate_inp" in name:  # norms and routers are fp32 there
            writer.add_tensor(name, (bits.astype(numpy.uint32) << 16).view(numpy.float32))
        else:
            writer.add_tensor(name, numpy.ascontiguousarray(bits).view(numpy.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def run(path, prompts, tokens):
    import llama_cpp

    rows = json.loads(pathlib.Path(prompts).read_text())
    length = len(rows[0])
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.use_mmap, params.n_gpu_layers = True, 0
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise SystemExit("llama.cpp could not load the model")
    wanted = llama_cpp.llama_context_default_params()
    wanted.n_ctx = len(rows) * (length + tokens + 8)
    wanted.n_batch = wanted.n_ubatch = max(512, len(rows))
    wanted.n_seq_max = len(rows)
    wanted.n_threads = wanted.n_threads_batch = os.cpu_count()
    context = llama_cpp.llama_init_from_model(model, wanted)
    if not context:
        raise SystemExit("llama.cpp could not make a context")
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(len(rows) * length, 0, 1)

    def decode(entries):
        """entries: (text, position, token, whether its logits are wanted)."""
        batch.n_tokens = len(entries)
        for i, (text, position, token, wants) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wants
            batch.seq_id[i][0] = text
        if llama_cpp.llama_decode(context, batch) != 0:
            raise SystemExit("llama_decode failed")
        chosen = []
        for i, (_, _, _, wants) in enumerate(entries):
            if wants:
                logits = llama_cpp.llama_get_logits_ith(context, i)
                chosen.append(int(numpy.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (vocabulary,)).argmax()))
        return chosen

    last = []
    for text, row in enumerate(rows):
        last += decode([(text, position, token, position == length - 1) for position, token in enumerate(row)])
    made = [[token] for token in last]
    begin = time.perf_counter()
    for step in range(1, tokens):
        last = decode([(text, length + step - 1, token, True) for text, token in enumerate(last)])
        for text, token in zip(made, last):
            text.append(token)
    rate = (tokens - 1) * len(rows) / (time.perf_counter() - begin)
    print(json.dumps({"rate": rate, "tokens": made, "rss": peers.own_usage()["rss"]}))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(sys.argv[2], sys.argv[3])
    else:
        run(sys.argv[2], sys.argv[3], int(sys.argv[4]))
