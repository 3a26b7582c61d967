"""penstock.LLM: transformers' tokens, the same texts whichever way they are asked for, and errors that say what to do."""

import json
import os
import subprocess
import sys
import threading

import pytest

import penstock

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LLAMA = dict(vocab_size=300, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)

YARN = {"type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64}
LATENT = dict(num_hidden_layers=3, num_key_value_heads=4, kv_lora_rank=20, qk_nope_head_dim=14, qk_rope_head_dim=10, v_head_dim=18, first_k_dense_replace=1,
              n_routed_experts=12, num_experts_per_tok=3, moe_intermediate_size=40)  # fmt: skip


def tiny(family):
    if family == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=256))
    config, model = {
        "llama": ("LlamaConfig", "LlamaForCausalLM"),
        "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
        "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM"),
        "granite": ("GraniteConfig", "GraniteForCausalLM"),
        "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
        "mistral": ("MistralConfig", "MistralForCausalLM"),
        "phi3": ("Phi3Config", "Phi3ForCausalLM"),
        "phi3-longrope": ("Phi3Config", "Phi3ForCausalLM"),
        "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
        "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
        "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
        "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
        "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
        "olmoe": ("OlmoeConfig", "OlmoeForCausalLM"),
        "granitemoe": ("GraniteMoeConfig", "GraniteMoeForCausalLM"),
        "gpt_oss": ("GptOssConfig", "GptOssForCausalLM"),
        "deepseek_v2-lite": ("DeepseekV2Config", "DeepseekV2ForCausalLM"),
        "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM"),
        "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
        "deepseek_v3-16b": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    }[family]
    if not hasattr(transformers, config):
        pytest.skip(f"this transformers has no {config}")
    more = {
        "qwen3": {"head_dim": 16},
        "smollm3": {"num_hidden_layers": 3, "no_rope_layer_interval": 2, "pad_token_id": 3},
        "granite": {"embedding_multiplier": 6.0, "residual_multiplier": 0.25, "attention_multiplier": 0.125, "logits_scaling": 5.0},
        "mistral": {"sliding_window": 24},
        "phi3": {"pad_token_id": None, "sliding_window": 17},
        # Two of the prompts grow beyond the original context, and one begins there.
        "phi3-longrope": {
            "pad_token_id": None, "original_max_position_embeddings": 50,
            "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 50, "short_factor": [1.0 + i / 9 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]},
        },
        "gemma2": {"num_hidden_layers": 3, "head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0},
        "gemma3": {"num_hidden_layers": 7, "head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 20},
        "mixtral": {"num_local_experts": 6, "sliding_window": 24},
        "qwen2_moe": {"num_hidden_layers": 3, "num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 72, "mlp_only_layers": [1]},
        "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "head_dim": 24, "norm_topk_prob": True},
        "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "eos_token_id": None},
        "granitemoe": {"num_local_experts": 5, "residual_multiplier": 0.25, "attention_multiplier": 0.125, "logits_scaling": 5.0},
        "gpt_oss": {"intermediate_size": 96, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 30, "swiglu_limit": 0.05},
        "deepseek_v2-lite": {**LATENT, "q_lora_rank": None, "n_shared_experts": 2, "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
        "deepseek_v2": {
            **LATENT, "q_lora_rank": 24, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2, "routed_scaling_factor": 4.0,
            "rope_scaling": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.6},
        },
        "deepseek_v3": {**LATENT, "q_lora_rank": 24, "n_group": 3, "topk_group": 2, "attention_bias": True, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        # As Moonlight has them.
        "deepseek_v3-16b": {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "rope_interleave": False, "rope_theta": 50000.0},
    }.get(family, {})
    made = getattr(transformers, config)(**{**LLAMA, **more}, tie_word_embeddings=family in ("qwen2", "gemma2", "gemma3"))
    made._attn_implementation = "eager"
    return getattr(transformers, model)(made)


def written(directory, family="llama", dtype=torch.float32):
    torch.manual_seed(3)
    model = tiny(family).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)  # so that no two tokens are nearly as likely
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.uniform_(-0.3, 0.3)
    model = model.to(dtype)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    model.save_pretrained(directory, safe_serialization=True)
    return model


def greedy(model, prompt, count):
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt):]


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3", "smollm3", "granite", "olmo2", "mistral", "phi3", "phi3-longrope", "gemma2", "gemma3"])
def test_greedy_tokens_are_those_of_transformers(directory, family):
    model = written(directory, family)
    prompts = [[1, 2, 3], [250, 7], [9] * 40, list(range(3, 150))]
    with penstock.LLM(directory, host_memory="256MiB") as llm:
        texts = llm.generate(prompts, max_tokens=20)
    assert [text.tokens for text in texts] == [greedy(model, prompt, 20) for prompt in prompts]
    assert all(text.finish == "length" for text in texts)
    assert [text.prompt_tokens for text in texts] == [len(prompt) for prompt in prompts]


MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "deepseek_v2-lite", "deepseek_v2", "deepseek_v3", "deepseek_v3-16b"]


@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_of_experts_make_the_tokens_of_transformers_within_the_least_memory(directory, family):
    model = written(directory, family)
    prompts = [[1, 2, 3], [250, 7], [9] * 40, list(range(3, 150))]
    expected = [greedy(model, prompt, 20) for prompt in prompts]
    with penstock.LLM(directory, host_memory="256MiB") as llm:
        assert [text.tokens for text in llm.generate(prompts, max_tokens=20)] == expected
        experts = llm.report()["experts"]
        assert experts["in_memory"] == experts["all"] > 0
        assert experts["hits"] + experts["misses"] == experts["used"] > 0
    with pytest.raises(MemoryError) as small:
        penstock.LLM(directory, host_memory="1MiB")
    least = int(str(small.value).rsplit("(", 1)[1].split()[0])
    with penstock.LLM(directory, host_memory=least) as llm:
        assert llm.planned_bytes <= least
        assert [text.tokens for text in llm.generate(prompts, max_tokens=20)] == expected
        experts = llm.report()["experts"]
        assert experts["in_memory"] < experts["all"]
        assert experts["misses"] > 0 and experts["read_bytes"] > 0


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_in_one_tensor_are_read_in_place(directory, family):
    model = written(directory, family)
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("this transformers writes one form alone")
    model.save_pretrained(directory, save_original_format=False)
    prompts = [[1, 2, 3], [9] * 40]
    with penstock.LLM(directory, host_memory="256MiB") as llm:
        assert [text.tokens for text in llm.generate(prompts, max_tokens=12)] == [greedy(model, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize(
    "unusual",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "mscale_all_dim": 0.8}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64, "mscale_all_dim": 0.5}},
        {"rope_scaling": {**YARN, "truncate": None}},
        {"rope_interleave": None},
        {"norm_topk_prob": None},
    ],
    ids=["linear-mscale", "llama3-mscale", "truncate-null", "interleave-null", "norm-null"],
)  # fmt: skip
def test_a_deepseek_v3_is_computed_as_transformers_reads_what_few_configurations_say(directory, unusual):
    written(directory, "deepseek_v3")
    file = os.path.join(directory, "config.json")
    with open(file) as stream:
        config = json.load(stream)

    def tokens(**given):
        with open(file, "w") as stream:
            json.dump({**{name: value for name, value in config.items() if name != "rope_parameters"}, **given}, stream)
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
        with penstock.LLM(directory, host_memory="256MiB") as llm:
            texts = llm.generate(prompts, max_tokens=20)
        assert [text.tokens for text in texts] == [greedy(model, prompt, 20) for prompt in prompts]
        return [text.tokens for text in texts]

    prompts = [[1, 2, 3], list(range(3, 150))]
    usual = {"rope_scaling": {**unusual["rope_scaling"], **({"truncate": True} if "truncate" in unusual["rope_scaling"] else {"mscale_all_dim": 0.0})}} if "rope_scaling" in unusual else {}
    assert tokens(**unusual) != tokens(**usual)


def test_corrections_of_scores_are_kept_in_fp32(directory):
    torch_files = pytest.importorskip("safetensors.torch")
    written(directory, "deepseek_v3-16b", torch.bfloat16)
    file = os.path.join(directory, "model.safetensors")
    tensors = torch_files.load_file(file)

    def texts(corrections):  # which alone choose, where every score is the same
        for name in tensors:
            if ".mlp.gate." in name:
                tensors[name] = corrections.clone() if name.endswith("correction_bias") else torch.zeros_like(tensors[name])
        torch_files.save_file(tensors, file, {"format": "pt"})
        with penstock.LLM(directory, host_memory="256MiB") as llm:
            return [text.tokens for text in llm.generate([[1, 2, 3], [9] * 40], max_tokens=12)]

    number = torch.arange(12, dtype=torch.float32)
    assert len(set((8 + number / 100).to(torch.bfloat16).tolist())) < 4
    assert texts(8 + number / 100) == texts(number) != texts(-number)


def test_a_text_depends_on_prompt_seed_and_options_alone(directory):
    written(directory, dtype=torch.bfloat16)
    prompts = [[5, 6, 7], [8] * 30, [200], [1, 2]]
    options = dict(max_tokens=24, temperature=0.9, top_p=0.9, top_k=40, seed=11)
    with penstock.LLM(directory, host_memory="256MiB") as roomy:
        expected = roomy.generate(prompts, **options)
        alone = [roomy.generate([prompt], **{**options, "seed": 11 + i})[0] for i, prompt in enumerate(prompts)]
        assert roomy.generate(prompts, **{**options, "seed": 12}) != expected
    assert alone == expected
    with pytest.raises(MemoryError) as small:
        penstock.LLM(directory, host_memory="1MiB")
    least = int(str(small.value).rsplit("(", 1)[1].split()[0])
    with penstock.LLM(directory, host_memory=least) as lean:
        assert lean.planned_bytes <= least
        assert lean.generate(prompts, **options) == expected
    with penstock.LLM(directory, host_memory="256MiB", batch=1, kv="nvme", kv_dir=directory) as other:
        assert other.generate(prompts, **options) == expected


def test_a_budget_that_is_too_small_is_told_the_least_that_works(directory):
    written(directory)
    with pytest.raises(MemoryError, match=r"^host_memory 1.0 MiB is too small: the least that works here is"):
        penstock.LLM(directory, host_memory=1 << 20)


def test_a_stream_has_the_text_of_generate_in_parts(directory):
    written(directory)
    with penstock.LLM(directory, host_memory="256MiB") as llm:
        whole = llm.generate([[1, 2, 3]], max_tokens=30, temperature=0.7, seed=4)[0]
        stream = llm.stream([1, 2, 3], max_tokens=30, temperature=0.7, seed=4)
        parts = list(stream)
        assert "".join(parts) == whole.text == stream.text
        assert (stream.tokens, stream.finish) == (whole.tokens, "length")
        assert list(stream) == []


def test_a_stream_that_is_closed_ends_its_text(directory):
    written(directory)
    with penstock.LLM(directory, host_memory="256MiB", batch=1) as llm:
        for _ in range(20):  # a busy machine may make all of it before it is closed
            with llm.stream([1, 2, 3], max_tokens=250) as stream:
                first = next(stream)
            assert first
            assert list(stream) == []
            # The one place is free for the next.
            assert len(llm.generate([[4, 5]], max_tokens=3)[0].tokens) == 3
            if len(stream.tokens) < 250:
                break
            assert stream.finish in ("length", "cancelled")
        assert stream.finish == "cancelled" or len(stream.tokens) == 250
        waiting = [llm.stream([1, 2, 3], max_tokens=250) for _ in range(3)]  # but one of which have not begun
        for stream in waiting:
            stream.close()
            assert stream.finish in ("cancelled", "length")
        llm.generate([[4, 5]], max_tokens=3)
        assert waiting[-1].finish == "cancelled" and waiting[-1].text == ""
        whole = llm.stream([1, 2], max_tokens=2)
        list(whole)
        whole.close()
        assert whole.finish == "length"


def test_stop_strings_end_a_text_before_them(directory):
    model = written(directory)
    tokens = greedy(model, [1, 2, 3], 12)
    stop = f" {tokens[6]} "
    text = "".join(f"{token} " for token in tokens)
    with penstock.LLM(directory, host_memory="256MiB") as llm:
        made = llm.generate([[1, 2, 3]], max_tokens=12, stop=["no such text", stop])[0]
        assert made.text == text[: text.index(stop)]
        assert made.finish == "stop"
        assert "".join(llm.stream([1, 2, 3], max_tokens=12, stop=stop)) == made.text


def test_several_threads_may_call(directory):
    model = written(directory)
    prompts = [[i + 1, 2 * i + 3, 7] for i in range(12)]
    made = [None] * len(prompts)
    with penstock.LLM(directory, host_memory="256MiB", batch=4) as llm:

        def work(i):
            made[i] = llm.generate([prompts[i]], max_tokens=10)[0].tokens

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert made == [greedy(model, prompt, 10) for prompt in prompts]


def test_a_prompt_beyond_what_the_model_takes_is_refused(directory):
    written(directory)
    with penstock.LLM(directory, host_memory="256MiB") as llm:
        assert llm.max_length == 256
        with pytest.raises(ValueError, match="256"):
            llm.generate([[1] * 256])
        with pytest.raises(ValueError, match="300"):
            llm.generate([[300]])
        with pytest.raises(ValueError, match="at least one token"):
            llm.generate([[]])
        for token in (300, -1, 2**40, 2**70, -(2**70), 10**5000):
            for call in (llm.generate, llm.stream):
                with pytest.raises(ValueError, match=r"a prompt has token .*, and the model has 300, from 0 to 299") as refused:
                    call([1, token])
                assert "\n" not in str(refused.value) and (str(token) if abs(token) <= 2**70 else "a number of 16610 bits") in str(refused.value)
        made = llm.generate([[1] * 250], max_tokens=100)[0]
        assert (len(made.tokens), made.finish) == (6, "length")
    with pytest.raises(ValueError, match="max_length"):
        penstock.LLM(directory, host_memory="256MiB", max_length=257)


def test_wrong_arguments_are_refused_by_name(directory):
    written(directory)
    with pytest.raises(TypeError, match="'host_memory'"):
        penstock.LLM(directory, host_memry="1GiB")
    with pytest.raises(ValueError, match="device_memory"):
        penstock.LLM(directory, device_memory="1GiB")
    with pytest.raises(ValueError, match="kv"):
        penstock.LLM(directory, kv="disk")
    with pytest.raises((OSError, ValueError), match="nowhere"):
        penstock.LLM(directory / "nowhere")
    with penstock.LLM(directory, host_memory="256MiB") as llm:
        with pytest.raises(TypeError, match="'max_tokens'"):
            llm.generate([[1]], max_token=3)
        for name, wrong in [("max_tokens", 0), ("temperature", -1), ("top_p", 0), ("top_p", 1.5), ("top_k", -1), ("seed", -1), ("stop", [""])]:
            with pytest.raises(ValueError, match=name):
                llm.generate([[1]], **{name: wrong})
            with pytest.raises(ValueError, match=name):
                llm.stream([1], **{name: wrong})
        with pytest.raises(TypeError, match="token ids"):
            llm.generate([[1.5]])
    with pytest.raises(ValueError, match="closed"):
        llm.generate([[1]])
    llm.close()


def test_closing_ends_what_is_under_way(directory):
    written(directory)
    llm = penstock.LLM(directory, host_memory="256MiB")
    stream = llm.stream([1, 2], max_tokens=250)
    next(stream)
    llm.close()
    with pytest.raises(OSError):
        for _ in range(1000):
            next(stream)
            if stream.finish == "length":  # it was faster
                raise OSError
    assert stream.finish in ("cancelled", "length")


def byte_tokenizer(directory, template):
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}))
    return made


TEMPLATE = """{{ bos_token }}{% for message in messages %}
{% if message.role not in ["user", "assistant"] %}{{ raise_exception("no such role") }}{% endif %}
[{{ message.role }}] {{ message.content | tojson }}
{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"""


def test_chat_writes_the_prompt_of_the_models_own_template(directory):
    pytest.importorskip("jinja2")
    model = written(directory)
    tokenizer = byte_tokenizer(directory, TEMPLATE)
    messages = [{"role": "user", "content": "Drei Flüsse?"}]
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), bos_token="<s>", eos_token="</s>")
    prompt = theirs.apply_chat_template(messages, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True)
    expected = greedy(model, tokenizer.encode(prompt, add_special_tokens=False).ids, 8)
    with penstock.LLM(directory, host_memory="256MiB") as llm:
        assert llm.chat_prompt(messages) == prompt
        answer = llm.chat(messages, max_tokens=8)
        assert answer.tokens[:8] == expected[: len(answer.tokens)]
        assert "".join(llm.chat(messages, max_tokens=8, stream=True)) == answer.text
        with pytest.raises(ValueError, match="no such role"):
            llm.chat([{"role": "captain", "content": ""}])
        with pytest.raises(TypeError, match="messages"):
            llm.chat("hello")


def test_chat_without_a_template_says_so(directory):
    written(directory)
    with penstock.LLM(directory, host_memory="256MiB") as llm, pytest.raises(ValueError, match="chat template"):
        llm.chat([{"role": "user", "content": "hello"}])


WITHOUT = """
    import importlib.abc, sys

    class Missing(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name.split(".")[0] in ("torch", "numpy", "jinja2"):
                raise ImportError(name + " is not here")

    sys.meta_path.insert(0, Missing())
    import penstock

    with penstock.LLM(sys.argv[1], host_memory="256MiB") as llm:
        print(llm.generate([[1, 2, 3]], max_tokens=5)[0].tokens)
        try:
            llm.chat([{"role": "user", "content": "hello"}])
        except ImportError as error:
            print(error)
    assert not {"torch", "numpy"}.intersection(sys.modules)
"""


def test_it_needs_no_torch_and_chat_says_that_it_needs_jinja2(directory, in_child):
    model = written(directory)
    byte_tokenizer(directory, TEMPLATE)
    code, out, err = in_child(WITHOUT, directory)
    assert code == 0, err
    assert out.splitlines()[0] == str(greedy(model, [1, 2, 3], 5))
    assert "penstock[chat]" in out


def test_the_wheels_program_generates_packs_and_plans(directory):
    model = written(directory)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def run(*arguments):
        program = "import sys; from penstock._programs import penstock; sys.argv[0] = 'penstock'; penstock()"
        return subprocess.run([sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=300)

    made = run("generate", directory, "--prompt", "1 2 3", "--tokens", 5, "--host-memory", "256MiB", "--json", "--quiet")
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["tokens"] == greedy(model, [1, 2, 3], 5)
    packed = run("pack", directory, directory / "packed", "--weights", 8)
    assert packed.returncode == 0, packed.stderr
    with penstock.LLM(directory / "packed", host_memory="256MiB") as llm:
        assert len(llm.generate([[1, 2, 3]], max_tokens=5)[0].tokens) == 5
    plan = run("plan", "--generate", directory, "--host-memory", "256MiB", "--json")
    assert plan.returncode == 0, plan.stderr
    assert json.loads(plan.stdout)["weights"] == 16
    refused = run("generate", directory, "--prompt", "1", "--device", "cuda")
    assert refused.returncode == 2 and "LibTorch" in refused.stderr
    assert run("plan", "--data", "x").returncode == 2


def test_a_conversation_may_be_an_iterator_and_a_template_may_mark_what_is_generated(directory):
    written(directory)
    byte_tokenizer(directory, "{{ bos_token }}{% for m in messages %}{% generation %}<{{ m.content }}>{% endgeneration %}{% endfor %}")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    del config["bos_token"]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    with penstock.LLM(directory, host_memory="256MiB") as llm:
        assert llm.chat_prompt({"role": "user", "content": word} for word in ("a", "b")) == "<s><a><b>"
        with pytest.raises(TypeError, match="list of dictionaries"):
            llm.chat_prompt("a")


def test_a_forked_child_is_told_that_a_text_is_not_its_own(directory):
    written(directory)
    with penstock.LLM(directory, host_memory="256MiB") as llm:
        stream = llm.stream([1, 2, 3], max_tokens=100)
        next(stream)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                next(stream)
            except RuntimeError as error:
                code = 0 if "forked child" in str(error) else 2
            stream.close()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(stream.tokens) >= 1


def test_frozen_weights_that_have_moved_are_where_base_weights_says(tmp_path):
    """Of a run of `penstock train --lora-rank`, whose base is read where it lies."""
    program = os.environ.get("PENSTOCK_PROGRAM") or os.path.join(os.path.dirname(__file__), "..", "..", "build", "release", "bin", "penstock")
    if not os.path.exists(program):
        pytest.skip("needs the programs: make build")
    base, moved, state = tmp_path / "base", tmp_path / "moved", tmp_path / "run"
    written(base, dtype=torch.bfloat16)
    (tmp_path / "text.bin").write_bytes(b"".join(token.to_bytes(2, "little") for token in list(range(1, 250)) * 20))
    words = ["train", "--model", base, "--lora-rank", "4", "--data", tmp_path / "text.bin", "--state-dir", state, "--steps", "2", "--seq", "32", "--batch", "1", "--dtype", "bf16", "--quiet"]
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    prompts = [[5, 6, 7], [80, 81]]

    def texts(**options):
        with penstock.LLM(state, host_memory="256MiB", **options) as llm:
            return [text.tokens for text in llm.generate(prompts, max_tokens=12)]

    expected = texts()
    base.rename(moved)
    assert texts(base_weights=moved) == expected
    with pytest.raises((OSError, ValueError), match=r"base_weights=DIR") as error:
        texts()
    assert "--" not in str(error.value)
    with pytest.raises(ValueError, match=r"^base_weights .*leave it out"):
        penstock.LLM(moved, host_memory="256MiB", base_weights=moved)
