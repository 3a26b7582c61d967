"""Writes tests/golden/text_config/*.json: what transformers makes of a tokenizer.json and the files beside it.

Run by tests/golden/make text. The tokenizer.json are those of tests/golden/text; the classes are those that a
tokenizer_config.json can name for them.
"""
import json
import os
import shutil
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
import transformers  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
BASES, OUT = os.path.join(HERE, "text"), os.path.join(HERE, "text_config")


def token(content, **flags):
    return {"content": content, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False,
            "special": True, **flags}


def named(content, **flags):
    return {"__type": "AddedToken", **token(content, **flags)}


FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
THINK = {"603": token("<think>", special=False), "604": token("</think>", special=False), "605": token("<tool>")}
CONFIGS = {
    # A token that only tokenizer_config.json names, and a pad token that no file has an id for.
    "pad": ("qwen2", {"tokenizer_config": {**FAST, "pad_token": "[PAD]", "eos_token": "<|im_end|>"}}),
    "decoder": ("qwen2", {"tokenizer_config": {**FAST, "eos_token": "<|im_end|>", "added_tokens_decoder": {
        "600": token("<|endoftext|>"), "601": token("<|im_start|>"), "602": token("<|im_end|>"), **THINK}}}),
    "decoder_qwen2": ("qwen2", {"tokenizer_config": {
        "tokenizer_class": "Qwen2Tokenizer", "pad_token": "<|endoftext|>", "eos_token": "<|im_end|>", "unk_token": None,
        "bos_token": None, "add_prefix_space": False, "added_tokens_decoder": {
            "600": token("<|endoftext|>"), "601": token("<|im_start|>"), "602": token("<|im_end|>"), **THINK}}}),
    # Ids with a gap, out of order, of tokens that are there, with other properties, and of the vocabulary.
    "odd_ids": ("qwen2", {"tokenizer_config": {**FAST, "bos_token": "<w>", "added_tokens_decoder": {
        "900": token("<think>", special=False, normalized=True), "800": token("<x>", rstrip=True),
        "602": token("<|im_end|>", lstrip=True), "700": token("training", single_word=True, special=False),
        "64": token("a", special=False)}}}),
    "extra": ("qwen2", {"tokenizer_config": {**FAST, "image_token": "<img>", "audio_token": "<think>",
                                             "additional_special_tokens": ["<tool>", named("<x>", lstrip=True)],
                                             "bos_token": named("<w>", rstrip=True)}}),
    "extra_named": ("qwen2", {"tokenizer_config": {**FAST, "extra_special_tokens": {"z_token": "<tool>", "a_token": "<think>"}}}),
    "older": ("qwen2", {"tokenizer_config": {**FAST, "bos_token": "<w>", "eos_token": "<x>"},
                        "special_tokens_map": {"bos_token": "<|im_start|>", "eos_token": token("<|im_end|>"), "pad_token": "[PAD]"},
                        "added_tokens": {"<think>": 604, "<tool>": 603, "[PAD]": 605}}),
    "no_config": ("qwen2", {"special_tokens_map": {"eos_token": "<|im_end|>", "pad_token": "[PAD]"}}),
    "gpt2": ("gpt2", {"tokenizer_config": {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>",
                                           "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "pad_token": "[PAD]"}}),
    "gpt2_prefix": ("gpt2", {"tokenizer_config": {
        "tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>", "add_prefix_space": True, "pad_token": "<|endoftext|>"}}),
    "llama3": ("llama3", {"tokenizer_config": {**FAST, "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>",
                                               "pad_token": "<pad>", "add_eos_token": True, "model_max_length": 4,
                                               "clean_up_tokenization_spaces": True}}),
    "mistral": ("mistral", {"tokenizer_config": {
        "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": False,
        "pad_token": "[PAD]", "add_bos_token": True, "add_eos_token": True, "added_tokens_decoder": {
            "0": token("<unk>"), "1": token("<s>"), "2": token("</s>"), "3": token("[INST]"), "4": token("[/INST]"),
            "704": token("<think>", special=False, normalized=True)}}}),
    "llama2": ("llama2", {"tokenizer_config": {**FAST, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
                                               "pad_token": "[PAD]", "additional_special_tokens": ["<tool>"]}}),
}
TEXTS = ["", "Hello world", " Hello [PAD] world", "<think>so it is.</think> yes <tool>", "a<x>  b <w> \n c", "<|im_start|>user\na<|im_end|>\n",
         "x  <|im_end|>  y", "training streams, training.", "untraining <THINK> <img>", "[INST] a [/INST]<s>b</s>", "<pad><|eot_id|>x .",
         "größer <tool><tool> 3.14", "<|endoftext|>a b", "do n't . ,"]

os.makedirs(OUT, exist_ok=True)
for name, (base, files) in CONFIGS.items():
    with open(os.path.join(BASES, base + ".json")) as file:
        tokenizer_json = json.load(file)["tokenizer"]
    directory = tempfile.mkdtemp()
    try:
        for stem, content in {"tokenizer": tokenizer_json, **files}.items():
            with open(os.path.join(directory, stem + ".json"), "w") as file:
                json.dump(content, file)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        cases = []
        for text in TEXTS:
            ids = tokenizer(text)["input_ids"]
            cases.append({"in": text, "ids": ids, "plain": tokenizer(text, add_special_tokens=False)["input_ids"],
                          "text": tokenizer.decode(ids, skip_special_tokens=True), "shown": tokenizer.decode(ids)})
        special = {key: getattr(tokenizer, key + "_token_id") for key in ("bos", "eos", "unk", "pad")}
        for key in special:  # a class's own defaults are no part of the files
            if getattr(tokenizer, key + "_token") is None:
                special[key] = None
        with open(os.path.join(OUT, name + ".json"), "w") as file:
            file.write('{"made_with": %s,\n"base": "%s",\n"files": %s,\n"class": "%s",\n"length": %d,\n"special": %s,\n"cases": [\n%s\n]}\n' % (
                json.dumps({"transformers": transformers.__version__}), base, json.dumps(files), type(tokenizer).__name__,
                len(tokenizer), json.dumps(special), ",\n".join(json.dumps(c) for c in cases)))
    finally:
        shutil.rmtree(directory)
