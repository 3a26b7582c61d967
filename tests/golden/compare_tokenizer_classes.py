"""Compares every tokenizer class that a tokenizer_config.json can name with transformers: the same ids and texts, a note, or a refusal.

usage: compare_tokenizer_classes.py [BASE ...]      after `ninja text_encode_lines` and with transformers; part of tests/golden/make text

BASE: names in tests/golden/text, whose tokenizers are held beside each class, model_type and setting. What has other ids, and no note that
says so, is printed; then the exit status is 1.
"""
import collections
import itertools
import json
import os
import subprocess
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
import transformers  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

GOLDEN, PROGRAM = "tests/golden/text", "build/release/tests/text_encode_lines"
GPT2 = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
BASES = {
    "gpt2": GPT2, "o200k": GPT2, "qwen2": {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "smollm": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}, "deepseek": {"bos_token": "<s>", "eos_token": "</s>"},
    "llama1": LLAMA, "llama2": LLAMA, "mistral": LLAMA,
}
CLASSES = [
    None, "PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "GPT2Tokenizer",
    "GPT2TokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast", "Qwen3_5Tokenizer", "GemmaTokenizer", "CohereTokenizer", "GPTNeoXTokenizer",
    "CodeGenTokenizer", "BloomTokenizerFast", "NoSuchTokenizer",
]
TYPES = ["llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "olmo2", "gpt2"]
SETTINGS = [
    {"legacy": True}, {"legacy": False}, {"add_prefix_space": True}, {"add_prefix_space": False}, {"add_bos_token": True, "add_eos_token": False},
    {"add_bos_token": False, "add_eos_token": True}, {"clean_up_tokenization_spaces": True}, {"split_special_tokens": True},
]
TEXTS = [
    "", "Hello world", " Hello world", "a b  <s> x</s> y", "<|endoftext|>a b", "<|im_start|>user\na<|im_end|>\nno", "größer 3.14 1234",
    "x<unk>y é é", "do n't . , Don't ' s", "<|begin_of_text|> x<|eot_id|> y  \n\n z", "[INST] a [/INST]b",
]
LINES = "".join(json.dumps(text) + "\n" for text in TEXTS)


def ours(directory):
    """What text_encode_lines says, and its notes; or None and why it is refused."""
    done = subprocess.run([PROGRAM, directory], input=LINES, capture_output=True, text=True)
    return (None if done.returncode else [json.loads(line) for line in done.stdout.splitlines()]), done.stderr.strip()


def theirs(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    found = []
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        plain = tokenizer(text, add_special_tokens=False)["input_ids"]
        found.append({"ids": ids, "plain": plain, "text": tokenizer.decode(ids, skip_special_tokens=True), "shown": tokenizer.decode(ids)})
    return type(tokenizer).__name__, found


def shows_normalized(tokenizer):
    """Whether tokenizers 0.23 decodes special tokens to their normalized spelling, where 0.22 has their own (text/README.md)."""
    return any(token["special"] and token["normalized"] for token in tokenizer["added_tokens"])


def compare(base, named, kind, model_type, setting):
    with tempfile.TemporaryDirectory() as directory:
        files = {
            "tokenizer": json.load(open(f"{GOLDEN}/{base}.json"))["tokenizer"], "config": {"model_type": model_type},
            "tokenizer_config": {**({"tokenizer_class": kind} if kind else {}), **named, **setting},
        }
        for stem, content in files.items():
            with open(os.path.join(directory, stem + ".json"), "w") as file:
                json.dump(content, file)
        found, said = ours(directory)
        try:
            opened, expected = theirs(directory)
        except Exception:  # noqa: B902 - a class that has no use for this tokenizer
            return "not opened by transformers", ""
    if found is None:
        return "refused", said
    compared = {"ids", "plain"} if shows_normalized(files["tokenizer"]) else {"ids", "plain", "text", "shown"}
    parts = sorted({part for one, other in zip(found, expected) for part in compared if one[part] != other[part]})
    if not parts:
        return "same", said
    return ("told" if said else "DIFFERS"), f"{opened}: {', '.join(parts)}"


def main():
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    count = collections.Counter()
    for base in sys.argv[1:] or BASES:
        cases = list(itertools.product(CLASSES, TYPES, [{}])) + list(itertools.product(CLASSES, ["llama"], SETTINGS))
        for kind, model_type, setting in cases:
            became, why = compare(base, BASES[base], kind, model_type, setting)
            count[became] += 1
            if became == "DIFFERS":
                print(f"{base}, {kind}, {model_type}, {setting}: {why}", flush=True)
    print(f"transformers {transformers.__version__}: " + ", ".join(f"{became} {number}" for became, number in sorted(count.items())))
    return 1 if count["DIFFERS"] else 0


if __name__ == "__main__":
    sys.exit(main())
