"""Hugging Face's tokenizers over the text of text_bench, on one thread: python text_peer.py TOKENIZER.json TEXT"""
import os
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
import tokenizers

tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1])
with open(sys.argv[2], encoding="utf-8", newline="") as file:
    text = file.read()
for name, documents in (("Encode/documents", text.split("\n\n")), ("Encode/whole", [text])):
    start = time.process_time()
    tokens = sum(len(tokenizer.encode(document).ids) for document in documents)
    seconds = time.process_time() - start
    print(f"{name}: {len(text.encode()) / seconds / 2**20:.2f} MiB/s of CPU time, {tokens} tokens, tokenizers {tokenizers.__version__}")
