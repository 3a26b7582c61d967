"""How tokens are chosen: transformers' own processors and OpenAI's formulas, by the same draws, at all three doors."""

import json
import subprocess
import sys
from itertools import islice

import pytest

import penstock

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from test_llm import written  # noqa: E402

PROMPT = [5, 17, 100, 5, 203]
PROGRAM = "import sys; from penstock._programs import penstock; sys.argv[0] = 'penstock'; penstock()"


def draws(seed):
    """std::mt19937_64's numbers, as parts of 1."""
    mask = (1 << 64) - 1
    state = [seed & mask]
    for i in range(1, 312):
        state.append((6364136223846793005 * (state[-1] ^ (state[-1] >> 62)) + i) & mask)
    while True:
        for i in range(312):
            y = (state[i] & ~0x7FFFFFFF & mask) | (state[(i + 1) % 312] & 0x7FFFFFFF)
            state[i] = state[(i + 156) % 312] ^ (y >> 1) ^ (0xB5026F5AA96619E9 if y & 1 else 0)
        for x in list(state):
            x ^= (x >> 29) & 0x5555555555555555
            x ^= (x << 17) & 0x71D67FFFEDA60000
            x ^= (x << 37) & 0xFFF7EEE000000000
            x ^= x >> 43
            yield (x >> 11) * 2.0**-53


def logits_of(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[:, -1].float()


CLOSE = 1e-5  # probabilities that differ by rounding: products are summed in another order here


def expected(model, count, seed, options, made, ends=()):
    """The text that transformers' processors, and OpenAI's penalties by hand, make with these draws; of tokens between which only rounding
    decides, the one that was made.
    """
    of = transformers
    text, draw = [], draws(seed)
    while len(text) < count:
        scores = logits_of(model, PROMPT + text)
        ids = torch.tensor([PROMPT + text])
        for token, bias in options.get("logit_bias", {}).items():
            scores[0, token] += bias
        if "repetition_penalty" in options:
            scores = of.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"])(ids, scores)
        for token in set(text):
            scores[0, token] -= options.get("frequency_penalty", 0) * text.count(token) + options.get("presence_penalty", 0)
        if "min_tokens" in options:
            scores = of.MinNewTokensLengthLogitsProcessor(len(PROMPT), options["min_tokens"], list(ends))(ids, scores)
        scores = of.TemperatureLogitsWarper(float(options["temperature"]))(ids, scores)
        for name, processor in (("top_k", of.TopKLogitsWarper), ("top_p", of.TopPLogitsWarper), ("min_p", of.MinPLogitsWarper)):
            if name in options:
                scores = processor(options[name])(ids, scores)
        weights = scores[0].double().softmax(-1)
        sums, point = weights.sort(descending=True, stable=True).values.cumsum(0), next(draw)
        token = int(weights.sort(descending=True, stable=True).indices[int(torch.searchsorted(sums, point * sums[-1], right=True))])
        if len(text) < len(made) and weights[made[len(text)]] > 0:
            of_made = weights[made[len(text)]]
            least, most = weights[weights > of_made * (1 + CLOSE)].sum(), weights[weights >= of_made * (1 - CLOSE)].sum()
            if least - CLOSE <= point * sums[-1] <= most + CLOSE:
                token = made[len(text)]
        text.append(token)
        if text[-1] in ends:
            break
    return text


OPTIONS = [
    dict(temperature=3.0),
    dict(temperature=5.0, top_k=7),
    dict(temperature=4.0, top_p=0.8),
    dict(temperature=5.0, min_p=0.6),
    dict(temperature=3.0, repetition_penalty=1.7),
    dict(temperature=6.0, top_k=200, top_p=0.9, min_p=0.3, repetition_penalty=0.8),
    dict(temperature=1.0, presence_penalty=1.9),
    dict(temperature=1.0, frequency_penalty=1.5),
    dict(temperature=1.0, presence_penalty=-2.0, frequency_penalty=-1.0, repetition_penalty=1.1),
    dict(temperature=4.0, logit_bias={7: 30.0, 9: -100.0, 11: 28.0}),
]


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    model = written(directory)
    with penstock.LLM(directory, host_memory="256MiB") as llm:
        yield directory, model, llm


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options))
def test_a_token_is_chosen_among_what_transformers_processors_leave(opened, options):
    _, model, llm = opened
    plain = [text.tokens for text in llm.generate([PROMPT], max_tokens=20, n=4, seed=40, temperature=options["temperature"])]
    made = [text.tokens for text in llm.generate([PROMPT], max_tokens=20, n=4, seed=40, **options)]
    assert made == [expected(model, 20, 40 + i, options, text) for i, text in enumerate(made)]
    assert made != plain or len(options) == 1
    assert len({tuple(each) for each in made}) > 1


def test_the_draws_are_those_of_the_standard_library():
    # The 10,000th of the default seed, as the C++ standard has it.
    assert next(islice(draws(5489), 9999, None)) == (9981545732273789042 >> 11) * 2.0**-53


def ends_with(directory, **more):
    (directory / "generation_config.json").write_text(json.dumps(more))


def test_what_generation_config_says_is_what_transformers_generates(tmp_path):
    model = written(tmp_path)
    prompt = torch.tensor([PROMPT])
    with penstock.LLM(tmp_path, host_memory="256MiB") as llm:
        plain = llm.generate([PROMPT], max_tokens=24)[0]
        assert not llm.notes
    ends = [plain.tokens[3], plain.tokens[9]]
    for config in ({"repetition_penalty": 1.4}, {"min_new_tokens": 7}, {"repetition_penalty": 1.2, "min_new_tokens": 12, "max_new_tokens": 15}):
        ends_with(tmp_path, eos_token_id=ends, **config)
        reference = model.generate(prompt, do_sample=False, eos_token_id=ends, pad_token_id=0, **{"max_new_tokens": 24, **config})[0, len(PROMPT) :].tolist()
        with penstock.LLM(tmp_path, host_memory="256MiB") as llm:
            assert ", ".join(llm.notes).endswith(" where nothing else is asked for")
            more = {} if "max_new_tokens" in config else {"max_tokens": 24}
            made = llm.generate([PROMPT], **more)[0]
            assert made.tokens == [token for token in reference if made.finish != "end" or token not in ends or token != reference[-1]], config
            asked = llm.generate([PROMPT], max_tokens=24, repetition_penalty=1, min_tokens=0)[0]
            assert (asked.tokens, asked.finish) == (plain.tokens[: plain.tokens.index(ends[0])] if ends[0] in plain.tokens else plain.tokens, "end")
    sampled = dict(temperature=4.0, top_k=20, top_p=0.9, min_p=0.02)
    ends_with(tmp_path, do_sample=True, num_beams=3, typical_p=0.9, stop_strings=["xyz"], **sampled)
    with penstock.LLM(tmp_path, host_memory="256MiB") as llm:
        made = llm.generate([PROMPT], max_tokens=20, seed=6)[0].tokens
        assert made == expected(model, 20, 6, sampled, made)
        assert llm.generate([PROMPT], max_tokens=20, temperature=0, repetition_penalty=1)[0].tokens == plain.tokens[:20]
        assert any("not followed: num_beams 3, typical_p 0.9" in note for note in llm.notes) and any('stop ["xyz"]' in note for note in llm.notes)
    ends_with(tmp_path, do_sample=False, **sampled)
    with penstock.LLM(tmp_path, host_memory="256MiB") as llm:
        assert llm.generate([PROMPT], max_tokens=24)[0].tokens == plain.tokens
        made = llm.generate([PROMPT], max_tokens=20, seed=6, temperature=4.0)[0].tokens
        assert made == expected(model, 20, 6, sampled, made)
    ends_with(tmp_path, top_p=3, do_sample=True)
    with penstock.LLM(tmp_path, host_memory="256MiB") as llm:
        assert any("top_p 3 (must be above 0 and at most 1)" in note for note in llm.notes)
        made = llm.generate([PROMPT], max_tokens=20, seed=6)[0].tokens
        assert made == expected(model, 20, 6, dict(temperature=1.0), made)


def test_no_text_ends_before_min_tokens(tmp_path):
    model = written(tmp_path)
    with penstock.LLM(tmp_path, host_memory="256MiB") as llm:
        plain = llm.generate([PROMPT], max_tokens=24)[0].tokens
    ends = [plain[2], plain[5]]
    ends_with(tmp_path, eos_token_id=ends)
    with penstock.LLM(tmp_path, host_memory="256MiB") as llm:
        for least in (1, 4, 11):
            options = dict(temperature=4.0, min_tokens=least, top_k=30)
            made = llm.generate([PROMPT], max_tokens=24, n=6, seed=3, **options)
            for i, text in enumerate(made):
                reference = expected(model, 24, 3 + i, options, text.tokens, ends)
                assert text.tokens == (reference[:-1] if text.finish == "end" else reference) and len(text.tokens) >= least


def test_logprobs_are_the_models_before_any_option(opened):
    _, model, llm = opened
    options = dict(max_tokens=12, temperature=4.0, repetition_penalty=1.5, seed=5)
    plain = llm.generate([PROMPT], **options)[0]
    made = llm.generate([PROMPT], logprobs=4, **options)[0]
    assert plain.logprobs is None and made.tokens == plain.tokens and made.text == plain.text
    assert [each.token for each in made.logprobs] == made.tokens
    for i, each in enumerate(made.logprobs):
        reference = logits_of(model, PROMPT + made.tokens[:i])[0].double().log_softmax(-1)
        assert each.logprob == pytest.approx(float(reference[each.token]), abs=1e-3)
        values, ids = reference.topk(4)
        assert [likely.token for likely in each.top] == ids.tolist()
        assert [likely.logprob for likely in each.top] == pytest.approx(values.tolist(), abs=1e-3)
    assert b"".join(each.bytes for each in made.logprobs).decode() == made.text
    assert [each.begins for each in made.logprobs] == [len(b"".join(other.bytes for other in made.logprobs[:i])) for i in range(12)]
    none = llm.generate([PROMPT], logprobs=0, **options)[0]
    assert [(each.token, each.logprob) for each in none.logprobs] == [(each.token, each.logprob) for each in made.logprobs] and not any(each.top for each in none.logprobs)
    with llm.stream(PROMPT, logprobs=4, **options) as stream:
        for _ in stream:
            seen = stream.logprobs  # it goes on meanwhile
            assert seen == made.logprobs[: len(seen)]
        assert stream.logprobs == made.logprobs


def test_several_texts_of_a_prompt_are_those_that_are_asked_for_one_by_one(opened):
    _, _, llm = opened
    options = dict(max_tokens=10, temperature=4.0)
    prompts = [PROMPT, [9], PROMPT, list(range(200))]
    made = llm.generate(prompts, n=3, seed=20, **options)
    assert [text.tokens for text in made] == [llm.generate([prompts[i // 3]], seed=20 + i, **options)[0].tokens for i in range(12)]
    assert [text.prompt_tokens for text in made] == [5, 5, 5, 1, 1, 1, 5, 5, 5, 200, 200, 200]


WRONG = [
    ("temperature", -1, "from 0 to 1e+06"),
    ("top_p", 0, "above 0 and at most 1"),
    ("min_p", 1.5, "from 0 to 1"),
    ("repetition_penalty", 0, "above 0"),
    ("presence_penalty", 2.5, "from -2 to 2"),
    ("frequency_penalty", -3, "from -2 to 2"),
    ("min_tokens", -1, "from 0 to"),
    ("logprobs", 21, "from 0 to 20"),
]


def test_options_beyond_their_bounds_are_named_with_them(opened):
    directory, _, llm = opened
    for name, value, words in [*WRONG, ("n", 0, "from 1 to 128"), ("logit_bias", {3: 101}, "from -100 to 100"), ("logit_bias", {300: 1}, "the model has 300")]:
        with pytest.raises(ValueError, match=name) as wrong:
            llm.generate([PROMPT], **{name: value})
        assert words in str(wrong.value), wrong.value
    for name, value in [("temperature", "hot"), ("logit_bias", [3]), ("logit_bias", {"x": 1}), ("logprobs", 1.5), ("n", "3")]:
        with pytest.raises(TypeError, match=name):
            llm.generate([PROMPT], **{name: value})
    with pytest.raises(ValueError, match="min_tokens is 9: must be at most max_tokens, which is 4"):
        llm.stream(PROMPT, max_tokens=4, min_tokens=9)
    flags = [(name.replace("_", "-"), value, words) for name, value, words in WRONG]
    for name, value, words in [*flags, ("n", 0, "from 1 to 128"), ("logit-bias", "3=101", "from -100 to 100"), ("logit-bias", "300=1", "model's 300"), ("logit-bias", "3", "15043=-5")]:
        done = program("generate", directory, "--prompt", "1 2", "--host-memory", "256MiB", "--json", f"--{name}={value}")
        assert done.returncode == 2 and f"--{name} {value}" in done.stderr and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    for more, words in ((["--tokens", "4", "--min-tokens", "9"], "the 4 of --tokens"), (["--stream", "--n", "2"], "--n"), (["--logprobs", "2"], "--json")):
        done = program("generate", directory, "--prompt", "1 2", *([] if more[0] == "--logprobs" or more[0] == "--stream" else ["--json"]), *more)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr


def program(*arguments):
    return subprocess.run([sys.executable, "-c", PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=300)


def test_the_program_makes_the_texts_of_the_package(opened, tmp_path):
    directory, _, llm = opened
    options = dict(temperature=4.0, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-0.25, min_tokens=2, logit_bias={7: 9.0, 3: -100.0})
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if name != "logit_bias"]
    flags += ["--logit-bias=7=9", "--logit-bias=3=-100"]
    prompts = [PROMPT, [9, 10]]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"tokens": each}) + "\n" for each in prompts))
    asked = ["generate", directory, "--prompts", tmp_path / "prompts.jsonl", "--host-memory", "256MiB", "--max-tokens", 9, "--seed", 31, "--logprobs", 2, "--n", 3, *flags]
    done = program(*asked, "--quiet")
    assert done.returncode == 0, done.stderr
    lines = sorted(map(json.loads, done.stdout.splitlines()), key=lambda line: line["index"])
    made = llm.generate(prompts, n=3, max_tokens=9, seed=31, logprobs=2, **options)
    assert [line["tokens"] for line in lines] == [text.tokens for text in made]
    assert [line["sample"] for line in lines] == [0, 1, 2] * 2 and [line["index"] for line in lines] == list(range(6))
    for line, text in zip(lines, made):
        assert [each["logprob"] for each in line["logprobs"]] == [each.logprob for each in text.logprobs]
        assert [[likely["token"] for likely in each["top"]] for each in line["logprobs"]] == [[likely.token for likely in each.top] for each in text.logprobs]
    # A list goes on sample by sample, and other options are another list.
    out = tmp_path / "out.jsonl"
    assert program(*asked, "--out", out).returncode == 0
    whole = out.read_text().splitlines(keepends=True)
    assert len(whole) == 6
    out.write_text("".join(whole[:4]))
    assert program(*asked, "--out", out).returncode == 0
    assert sorted(map(json.loads, out.read_text().splitlines()), key=lambda line: line["index"]) == sorted(map(json.loads, whole), key=lambda line: line["index"])
    other = program(*["--presence-penalty=0.75" if each == "--presence-penalty=0.5" else each for each in asked], "--out", out)
    assert other.returncode != 0 and "--overwrite" in other.stderr
