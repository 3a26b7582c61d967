"""Writes the golden files of tokenizers; tests/golden/make text says what with. The same release writes the same bytes."""
import json
import os
import random
import subprocess
import sys
import unicodedata

import tokenizers
from tokenizers import Tokenizer, trainers

OUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "text")
PROGRAM, COUNT, SEED = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

# ---- The published forms: everything of tokenizer.json but the vocabulary, which is trained here.

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = "|".join([rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
                  rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}",
                  r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
DEEPSEEK = [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"]
DEEPSEEK_LLM = ["[\r\n]", r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕ]+",
                r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥ࠀ-一가-퟿]+"]


def byte_level(use_regex=True, prefix=False):
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": use_regex}


def split(pattern, behavior="Isolated", kind="Regex", invert=False):
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}


def sequence(key, *steps):
    return {"type": "Sequence", key: list(steps)}


def pre(*steps):
    return sequence("pretokenizers", *steps)


def template(*pieces):
    """"<s>" before or behind "$A", with the id filled in later."""
    as_piece = lambda p: {"Sequence": {"id": p[1:], "type_id": 0}} if p[0] == "$" else {"SpecialToken": {"id": p, "type_id": 0}}
    return {"type": "TemplateProcessing", "single": [as_piece(p) for p in pieces],
            "pair": [as_piece(p) for p in pieces] + [{"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {p: {"id": p, "ids": [0], "tokens": [p]} for p in pieces if p[0] != "$"}}


def added(content, **flags):
    return {"content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": True, **flags}


REPLACE_IN = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
REPLACE_OUT = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
FUSED = (REPLACE_OUT, {"type": "ByteFallback"}, {"type": "Fuse"})
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
SENTENCE = [added("<unk>"), added("<s>"), added("</s>")]
CHAT = [added(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
ODD = [added("<|endoftext|>"), added("<mask>", lstrip=True), added("<pad>", rstrip=True),
       added("<both>", lstrip=True, rstrip=True), added("word", single_word=True, special=False),
       added("äö", normalized=True, special=False), added("é", normalized=True, special=False),
       added("  ", special=False), added("<|end", special=False), added("tail ", rstrip=True, special=False)]

FORMS = {
    "gpt2": dict(pre_tokenizer=byte_level(), decoder=byte_level(), post_processor=byte_level(),
                 added=[added("<|endoftext|>", normalized=True)], model={}),
    "gpt2_prefix": dict(pre_tokenizer=byte_level(prefix=True), decoder=byte_level(), added=ODD, model={}),
    "llama3": dict(pre_tokenizer=pre(split(LLAMA3), byte_level(False)), decoder=byte_level(),
                   post_processor=sequence("processors", byte_level(), template("<|begin_of_text|>", "$A")),
                   added=[added("<|begin_of_text|>"), added("<|end_of_text|>"), added("<|eot_id|>")],
                   model={"ignore_merges": True}),
    "qwen2": dict(normalizer={"type": "NFC"}, pre_tokenizer=pre(split(QWEN2), byte_level(False)), decoder=byte_level(),
                  post_processor=byte_level(), added=CHAT, model={}),
    "o200k": dict(pre_tokenizer=pre(split(O200K), byte_level(False)), decoder=byte_level(), added=CHAT, model={}),
    "smollm": dict(pre_tokenizer=pre({"type": "Digits", "individual_digits": True}, byte_level()), decoder=byte_level(),
                   added=CHAT, model={}),
    "deepseek": dict(normalizer=sequence("normalizers"), pre_tokenizer=pre(*map(split, DEEPSEEK), byte_level(False)),
                     decoder=byte_level(), post_processor=template("<s>", "$A", "</s>"), added=SENTENCE, model={}),
    "deepseek_llm": dict(normalizer=sequence("normalizers"), decoder=byte_level(), post_processor=byte_level(), model={},
                         pre_tokenizer=pre(*map(split, DEEPSEEK_LLM), {"type": "Digits", "individual_digits": True},
                                           byte_level(False)),
                         added=[added("<｜begin▁of▁sentence｜>"), added("<｜end▁of▁sentence｜>")]),
    "lines": dict(pre_tokenizer=pre(split(r"^\s*\w|\s+$|[!?]$\n?"), byte_level(False)), decoder=byte_level(), added=[], model={}),
    "spaces_at_ends": dict(pre_tokenizer=pre(split(r"\s+$"), byte_level(False)), decoder=byte_level(), added=[], model={}),
    "llama2": dict(normalizer=sequence("normalizers", {"type": "Prepend", "prepend": "▁"}, REPLACE_IN),
                   decoder=sequence("decoders", *FUSED, STRIP), post_processor=template("<s>", "$A"), added=SENTENCE,
                   model={"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}),
    "llama1": dict(normalizer=sequence("normalizers", {"type": "Prepend", "prepend": "▁"}, REPLACE_IN),
                   decoder=sequence("decoders", *FUSED, STRIP), post_processor=template("<s>", "$A", "</s>"),
                   # Special tokens that are normalized: releases differ in how they are decoded.
                   added=[added(t, normalized=True) for t in ("<unk>", "<s>", "</s>")], decodes=False,
                   model={"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}),
    "mistral": dict(pre_tokenizer=METASPACE, decoder=sequence("decoders", *FUSED, STRIP),
                    post_processor=template("<s>", "$A"), added=SENTENCE + [added("[INST]"), added("[/INST]")],
                    model={"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "ignore_merges": True}),
    "metaspace_split": dict(pre_tokenizer={**METASPACE, "prepend_scheme": "always", "split": True},
                            decoder={**METASPACE, "prepend_scheme": "always", "split": True},
                            post_processor=template("$A", "</s>"), added=SENTENCE,
                            model={"unk_token": "<unk>", "fuse_unk": True}),
    "metaspace_never": dict(normalizer=sequence("normalizers", {"type": "NFKC"}, {"type": "Lowercase"},
                                                {"type": "Strip", "strip_left": True, "strip_right": False}),
                            pre_tokenizer={**METASPACE, "prepend_scheme": "never", "split": True},
                            decoder={**METASPACE, "prepend_scheme": "never"}, added=ODD + SENTENCE[:1],
                            model={"unk_token": "<unk>", "fuse_unk": False}),
    "no_unk": dict(normalizer={"type": "NFD"}, added=[added("<s>")], model={},
                   pre_tokenizer=pre(split(" ", "MergedWithPrevious", "String"), split(r"\w+|[^\w\s]+", "Removed", invert=True))),
}
for behavior in ("Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"):
    FORMS["split_" + behavior.lower()] = dict(
        normalizer={"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "}, decoder=byte_level(), added=[], model={},
        pre_tokenizer=pre(split(r"\d|\h\h", behavior), split(r"[\s\p{P}]{2,3}", behavior, invert=True), byte_level(False)))

# ---- Texts.

WORDS = """the of and to in training streams weights Memory bounded it's they'll WE'RE I'd can't Don'T x's O'Neil foo_bar
    camelCase HTTPServer snake_case größer Straße ÜBER naïve café Œuvre İstanbul ǅ ŉ ſtraße ﬁne Ελληνικά σίγμας Όμως
    привет мир Ёлка שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก 你好世界 東京タワー カタカナ ひらがな 안녕하세요 한국어
    Việt Nam Z͑ͫ̓a̴l̵g̶o e\u0301 A\u030a o\u0302\u0323 q\u0323\u0307 \u1100\u1161\u11a8 각 👩‍👩‍👧‍👦 🇩🇪 👍🏽 😀 ❤️ ½ ² ٣٤ ⅷ 一二三 ①""".split()
PIECES = [" ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", " \n ", "\u00a0", "\u3000", "\u2003", "\u180e", "\u200b", "\u200d",
          "\ufeff", "0", "12", "345", "67890", "3.14", "1,000,000", "0xFF", "==", "!=", "->", "...", "?!", "--", "____", "'", "''",
          "\"", "(", ")", "{", "}", "[]", "//", "/* */", "#include", "<", "<|", "<s>", "</s>", "<unk>", "<|endoftext|>",
          "<|im_start|>", "<|begin_of_text|>", "<|eot_id|>", "<mask>", "<pad>", "<both>", "word", "ÄÖ", "äö", "A\u0308O\u0308",
          "[INST]", "▁", "▁▁", "<0x41>", "Ġ", "Ċ", "tail ", "\x00", "\x7f", "\x85", "\u2028", "\ufffd", "\U0001f9d1", "\U00020000"]
ASSIGNED = [chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")]


MARKS = [c for c in ASSIGNED if unicodedata.combining(c)]


def random_text(draw, most=40):
    text = []
    for _ in range(draw.randint(1, most)):
        kind = draw.randint(0, 9)
        if kind < 4:
            text.append(draw.choice(WORDS) + draw.choice(["", " ", " "]))
        elif kind < 7:
            text.append(draw.choice(PIECES) * draw.choice([1, 1, 1, 2, 3, 7]))
        elif kind < 8:
            text.append("".join(draw.choice("abcdefgh  '.,AB\n") for _ in range(draw.randint(1, 12))))
        elif kind < 9:
            text.append(draw.choice(ASSIGNED) * draw.choice([1, 1, 2]))
            if draw.randint(0, 2) == 0:
                text.append("".join(draw.choice(MARKS) for _ in range(draw.randint(1, 3))))
        else:  # neighbours: one script, its marks
            at = draw.randrange(len(ASSIGNED) - 64)
            text.append("".join(draw.choice(ASSIGNED[at:at + 64]) for _ in range(draw.randint(1, 6))))
    return "".join(text)


FIXED = ["", " ", "  ", "a", " a", "a ", "\n", "Hello world", "Hello  world ", " Hello\n\n  world\t!", "<s>", "<s>a", " <s> a</s> ",
         "x <mask> y", "x<pad>  \n y", "a  <both>  <both>  b", "words word word_ word. sword wordé word\u0301 \u200dword", "é E\u0301 e\u0301ÄÖ A\u0308Ö",
         "a  \n \n  b \n", "a\n", "\n\n a \t", "x!\n y?\n\n", "\u3000\u3000\na \u2003", "<|endoftext|><|endoftext|>", "<|end<|endoftext|", "tail  tail   \n<mask>", "1234567890", "a" * 300, "ab" * 200, " " * 100 + "x",
         "".join(WORDS), " ".join(WORDS), "\u0301\u0301a", "a\u0315\u0300\u05ae\u0062", "\u1100\u1161\u11a8\uac00\u11a8", "日本語" * 60,
         "'S 's 'ſ 'LL 'Ve 'K \u212a", "\u1ec7\u0323", "\u0958\u0929\u093c", "\u2126\u212b\ufb01\u00bd\ufdfa", "\x00\x01", "\ufeffbom", "<0x41><0xE4>"]


def corpus():
    draw = random.Random(7)
    for _ in range(1500):
        yield " ".join(draw.choice(WORDS) for _ in range(12))
        yield random_text(draw)
    for name in ("README.md", "ARCHITECTURE.md"):
        yield "def train(self, steps=10):\n    for i in range(steps):\n        self.step()  # " + name


def trained(name, form):
    byte_level_form = "ByteLevel" in json.dumps(form.get("pre_tokenizer"))
    sections = {k: form.get(k) for k in ("normalizer", "pre_tokenizer", "decoder")}
    empty = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "post_processor": None, **sections,
             "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                       "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                       "vocab": {}, "merges": []}}
    model = form["model"]
    first = [t["content"] for t in form["added"] if "unk_token" in model and t["special"]]
    if model.get("byte_fallback"):
        first += [f"<0x{b:02X}>" for b in range(256)]
    training = json.loads(json.dumps(empty))
    if not byte_level_form and training["pre_tokenizer"] in (None, METASPACE):
        training["pre_tokenizer"] = {**METASPACE, "split": True, "prepend_scheme": "always"}  # else a word is a text
    tokenizer = Tokenizer.from_str(json.dumps(training))
    trainer = trainers.BpeTrainer(vocab_size=300 if name.startswith("split_") else 600 if byte_level_form else 700, show_progress=False, special_tokens=first,
                                  limit_alphabet=1000 if byte_level_form else 180,
                                  initial_alphabet=(tokenizers.pre_tokenizers.ByteLevel.alphabet() if byte_level_form else ["▁"]))
    tokenizer.train_from_iterator(corpus(), trainer)
    learned = json.loads(tokenizer.to_str())
    full = empty
    full["model"].update(vocab=learned["model"]["vocab"], merges=learned["model"]["merges"], **model)
    if model.get("ignore_merges"):  # tokens that no merges make
        for token in ("Ġtraining", "streams", "▁Memory", "\u010a\u010a\u010a"):
            full["model"]["vocab"].setdefault(token, len(full["model"]["vocab"]))
    if name in ("gpt2", "llama2"):  # the older spelling
        full["model"]["merges"] = [" ".join(m) for m in full["model"]["merges"]]
    if name == "smollm":  # a byte that the vocabulary has not
        vocab = full["model"]["vocab"]
        lost = vocab.pop("ñ")  # 0xF1, in no merge
        full["model"]["vocab"] = {t: i - (i > lost) for t, i in vocab.items()}
    vocab = full["model"]["vocab"]
    for token in form["added"]:
        number = vocab.get(token["content"])
        if number is None:
            number = len(vocab) + sum(t["content"] not in vocab for t in full["added_tokens"])
        full["added_tokens"].append({"id": number, **token})
    ids = {t["content"]: t["id"] for t in full["added_tokens"]}
    processor = json.loads(json.dumps(form.get("post_processor")))
    for part in (processor or {}).get("processors", [processor] if processor else []):
        for key, special in part.get("special_tokens", {}).items():
            special["ids"] = [ids[key]]
    full["post_processor"] = processor
    if name == "llama3":  # what is not applied
        full["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    return full


def answers(name, tokenizer, texts):
    tokenizer.no_truncation()
    for text in texts:
        ids = tokenizer.encode(text).ids
        answer = {"ids": ids, "plain": tokenizer.encode(text, add_special_tokens=False).ids}
        if FORMS[name].get("decodes", True):
            answer.update({"text": tokenizer.decode(ids), "shown": tokenizer.decode(ids, skip_special_tokens=False)})
        yield answer


def write(name, full, tokenizer):
    draw = random.Random(20261)
    texts = FIXED + [random_text(draw, 10) for _ in range(40)]
    cases = [{"in": t, **a} for t, a in zip(texts, answers(name, tokenizer, texts))]
    odd = [[draw.randrange(-1, tokenizer.get_vocab_size() + 3) for _ in range(draw.randint(1, 12))] for _ in range(40)]
    decoded = [{"ids": ids, "text": tokenizer.decode([i for i in ids if i >= 0])} for ids in odd]
    if not FORMS[name].get("decodes", True):
        decoded = []
    with open(os.path.join(OUT, name + ".json"), "w") as file:
        file.write('{"made_with": %s,\n"tokenizer": %s,\n"cases": [\n%s\n],\n"decoded": [\n%s\n]}\n' % (
            json.dumps({"tokenizers": tokenizers.__version__}), json.dumps(full, ensure_ascii=True),
            ",\n".join(json.dumps(c) for c in cases), ",\n".join(json.dumps(c) for c in decoded)))


def compare(name, full, tokenizer):
    draw = random.Random(f"{name} {SEED}")
    texts = [random_text(draw) for _ in range(COUNT)]
    path = os.path.join(OUT, name + ".tokenizer")
    with open(path, "w") as file:
        json.dump(full, file)
    try:
        run = subprocess.run([PROGRAM, path], input="".join(json.dumps(t) + "\n" for t in texts), capture_output=True, text=True)
    finally:
        os.remove(path)
    if run.returncode != 0:
        print(f"{name}: {run.stderr.strip()}")
        return 1
    different = []
    for text, theirs, line in zip(texts, answers(name, tokenizer, texts), run.stdout.split("\n")):
        ours = json.loads(line)
        if any(ours[k] != theirs[k] for k in theirs):
            different.append((text, [k for k in theirs if ours[k] != theirs[k]]))
    print(f"{name}: {len(different)} of {len(texts)} texts differ")
    for text, keys in sorted(different, key=lambda d: len(d[0]))[:3]:
        print("  ", keys, ascii(text))
    return len(different)


os.makedirs(OUT, exist_ok=True)
failed = 0
for form_name, form in FORMS.items():
    made = trained(form_name, form)
    loaded = Tokenizer.from_str(json.dumps(made))
    write(form_name, made, loaded)
    if COUNT and os.path.exists(PROGRAM):
        failed += compare(form_name, made, loaded)
sys.exit(failed != 0)
