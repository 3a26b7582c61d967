"""Weights as they are published in fp8 and mxfp4: the same bits as the weights that the published formula gives, and one line for other forms."""

import json
import subprocess
import sys

import pytest

import penstock

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors.torch")
from safetensors.torch import load_file, save_file  # noqa: E402
from test_llm import tiny  # noqa: E402
from test_llm import written as model_in  # noqa: E402
from test_sampling import PROGRAM, logits_of  # noqa: E402

PROMPT = [5, 17, 100, 5, 203]
FP8 = getattr(torch, "float8_e4m3fn", None)
pytestmark = pytest.mark.skipif(FP8 is None, reason="this torch has no float8")
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def blocks_of(scales, block, shape):
    """A scale for each weight."""
    return scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def in_blocks(weight, block, dtype=torch.float32, most=448):
    scales = torch.zeros([-(-size // each) for size, each in zip(weight.shape, block)])
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            scales[i, j] = weight[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]].abs().max() / most
    return scales.to(dtype)


def fp8(name, weight, kind):
    """(tensors as they are published, the weights by the formula in fp32)."""
    shape = weight.shape
    block = {"block": (128, 128), "small blocks": (16, 32), "tensor": tuple(shape), "scalar": tuple(shape), "channel": (1, shape[1]), "channel list": (1, shape[1])}[kind]
    scales = in_blocks(weight, block, torch.bfloat16 if kind.startswith("channel") else torch.float32)
    numbers = (weight / blocks_of(scales, block, shape)).clamp(-448, 448).to(FP8)
    published = scales.reshape({"tensor": (1,), "scalar": (), "channel list": (-1,)}.get(kind, scales.shape))
    suffix = "_scale_inv" if "block" in kind else "_scale"
    more = {name[: -len("weight")] + "input_scale": torch.tensor(0.5)} if kind == "tensor" else {}
    return {name: numbers, name + suffix: published.contiguous(), **more}, numbers.float() * blocks_of(scales, block, shape)


def mxfp4(name, weight, _):
    rows, columns = weight.shape
    groups = weight.reshape(rows, -1, 32)
    exponents = torch.log2(groups.abs().amax(-1).clamp(min=1e-9)).floor() - 2
    scaled = groups / torch.exp2(exponents)[..., None]
    codes = (scaled[..., None] - FP4).abs().argmin(-1).to(torch.uint8)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    decoded = (FP4[codes.long()] * torch.exp2(exponents)[..., None]).reshape(rows, columns)
    return {name + "_blocks": packed.contiguous(), name + "_scales": (exponents + 127).to(torch.uint8)}, decoded


FORMS = {
    "deepseek": ({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, fp8, "block"),
    "small blocks": ({"quant_method": "fp8", "weight_block_size": [16, 32]}, fp8, "small blocks"),
    "per tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8, "tensor"),
    "scalar": ({"quant_method": "fp8"}, fp8, "scalar"),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, fp8, "channel"),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}},
        fp8,
        "channel list",
    ),
    "gpt-oss": ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4, ""),
}


def written(directory, form, dtype):
    """The directory as it is published, and beside it that of the weights by the formula, and the model of these."""
    config, code, kind = FORMS[form]
    torch.manual_seed(11)
    model = tiny("llama").eval()
    tensors = {name: (value * (6 if value.dim() > 1 else 1)).to(dtype) for name, value in model.state_dict().items()}
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.config.torch_dtype = dtype
    published, formula = {}, {}
    for name, value in tensors.items():
        if value.dim() == 2 and "embed" not in name and "lm_head" not in name and (code is fp8 or value.shape[1] % 32 == 0):
            # Of very different sizes, so that each scale counts.
            value = value.float() * torch.exp(torch.linspace(-2, 2, value.shape[0]))[:, None]
            coded, decoded = code(name, value, kind)
            published.update(coded)
            formula[name] = decoded
        else:
            published[name] = formula[name] = value.contiguous()
    whole = directory / "formula"
    model.load_state_dict({name: value.float() for name, value in formula.items()})
    model.to(dtype).save_pretrained(whole, safe_serialization=True)
    model.float().load_state_dict({name: value.to(dtype).float() for name, value in formula.items()})
    coded = directory / "published"
    coded.mkdir()
    save_file(published, coded / "model.safetensors", {"format": "pt"})
    as_published = json.loads((whole / "config.json").read_text())
    (coded / "config.json").write_text(json.dumps({**as_published, "quantization_config": config}))
    (coded / "generation_config.json").write_text((whole / "generation_config.json").read_text())
    return coded, whole, model


def texts(directory, **more):
    with penstock.LLM(directory, **{"host_memory": "256MiB", **more}) as llm:
        made = llm.generate([PROMPT, [7], list(range(150))], max_tokens=12, temperature=1.0, logprobs=3, seed=2)
        return [(text.tokens, [(each.logprob, [top.logprob for top in each.top]) for each in text.logprobs]) for text in made]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_weights_by_the_published_formula_to_the_bit(tmp_path, form, dtype):
    coded, whole, model = written(tmp_path, form, dtype)
    expected = texts(whole)
    assert texts(coded) == expected
    if dtype == torch.float32:
        tokens, logprobs = expected[0]
        reference = logits_of(model, PROMPT)[0].double().log_softmax(-1)
        assert logprobs[0][0] == pytest.approx(float(reference[tokens[0]]), abs=2e-3)


def test_a_budget_that_streams_them_gives_the_same_and_the_least_is_less(tmp_path):
    for form in ("deepseek", "gpt-oss"):
        directory = tmp_path / form.replace(" ", "")
        directory.mkdir()
        coded, _, _ = written(directory, form, torch.bfloat16)
        expected = texts(coded)
        with pytest.raises(MemoryError, match="the least that works here is") as small:
            penstock.LLM(coded, host_memory="1MiB")
        least = str(small.value).split("the least that works here is ")[1].split(":")[0].split(";")[0].strip().rstrip(".")
        number, unit = least.split()[:2]
        assert texts(coded, host_memory=f"{float(number) + 0.3}{unit.rstrip(',')}") == expected


def deepseek(directory):
    """A V3 as it is published, with a layer behind the last, and beside it that of the weights by the formula, in bf16."""
    whole, coded = directory / "formula", directory / "published"
    model_in(whole, "deepseek_v3", torch.bfloat16)
    coded.mkdir()
    tensors, published, formula = load_file(whole / "model.safetensors"), {}, {}
    for name, value in tensors.items():
        if value.dim() == 2 and not any(each in name for each in ("embed", "lm_head", "mlp.gate.")):
            more, decoded = fp8(name, value.float(), "small blocks")
            published.update(more)
            formula[name] = decoded.to(torch.bfloat16)
        else:
            published[name] = formula[name] = value
    assert sum("experts.3.up_proj.weight_scale_inv" in name for name in published) == 2
    further = {name.replace("layers.2.", "layers.3."): value.clone() for name, value in published.items() if "layers.2." in name}
    further.update({"model.layers.3.eh_proj.weight": torch.ones(64, 128), "model.layers.3.enorm.weight": torch.ones(64)})
    save_file(formula, whole / "model.safetensors", {"format": "pt"})
    save_file({**published, **further}, coded / "model.safetensors", {"format": "pt"})
    config = json.loads((whole / "config.json").read_text())
    (coded / "config.json").write_text(json.dumps({**config, "quantization_config": FORMS["small blocks"][0]}))
    (coded / "generation_config.json").write_text((whole / "generation_config.json").read_text())
    return coded, whole


def test_a_deepseek_v3_is_read_as_it_is_published_and_its_further_layer_passed_over(tmp_path):
    coded, whole = deepseek(tmp_path)
    expected = texts(whole)
    assert texts(coded) == expected
    with pytest.raises(MemoryError) as small:
        penstock.LLM(coded, host_memory="1MiB")
    assert texts(coded, host_memory=int(str(small.value).rsplit("(", 1)[1].split()[0])) == expected
    config = json.loads((coded / "config.json").read_text())
    (coded / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(ValueError, match=r"model.layers.3.\S+ has no place in this model"):
        penstock.LLM(coded)


def program(*arguments):
    return subprocess.run([sys.executable, "-c", PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=300)


OTHERS = [
    ({"quant_method": "gptq", "bits": 4}, "GPTQ", "GPTQModel"),
    ({"quant_method": "awq", "bits": 4}, "AWQ", "GPTQModel"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes", "dequantize()"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors pack-quantized", "run_compressed=False"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2", "converts"),
    ({"quant_method": "hqq"}, "hqq", "the tool that made it"),
]


def test_forms_that_are_not_read_are_one_line_with_what_converts_them(tmp_path):
    coded, whole, _ = written(tmp_path, "deepseek", torch.bfloat16)
    config = json.loads((coded / "config.json").read_text())
    for quantization, name, tool in OTHERS:
        (coded / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
        with pytest.raises(ValueError, match="not read") as wrong:
            penstock.LLM(coded)
        assert name in str(wrong.value) and tool in str(wrong.value) and "\n" not in str(wrong.value)
    done = program("generate", coded, "--prompt", "1")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "hqq" in done.stderr
    (whole / "model.safetensors").rename(whole / "model.gguf")
    with pytest.raises((OSError, ValueError), match="model.gguf.*transformers converts it.*gguf_file"):
        penstock.LLM(whole)


def test_scales_that_are_missing_or_of_another_shape_are_named(tmp_path):
    coded, _, _ = written(tmp_path, "deepseek", torch.bfloat16)
    tensors = load_file(coded / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    for change, words in (
        ({name + "_scale_inv": None}, "neither layers.0.self_attn.q_proj.weight_scale_inv nor layers.0.self_attn.q_proj.weight_scale"),
        ({name + "_scale_inv": torch.ones(3, 5)}, r"\[3, 5\] of F32: no scales of a matrix of \[64, 64\]"),
        ({name + "_scale_inv": torch.ones(1, 1, dtype=torch.int32)}, "of I32: no scales"),
    ):
        save_file({key: value for key, value in {**tensors, **change}.items() if value is not None}, coded / "model.safetensors")
        with pytest.raises(ValueError, match=words):
            penstock.LLM(coded)


def test_a_plan_names_fp8_and_asks_for_no_packing_of_it(tmp_path):
    coded, whole, _ = written(tmp_path, "deepseek", torch.bfloat16)
    for directory, form, packs in ((coded, "parameters in fp8;", False), (whole, "parameters in 16 bit;", True)):
        done = program("plan", "--generate", directory, "--host-memory", "64MiB")
        assert done.returncode == 0, done.stderr
        assert form in done.stdout and ("packed in 4 bit" in done.stdout) == packs


def test_inspect_names_their_types(tmp_path):
    for form, name, words in (("deepseek", "fp8", "14 F8_E4M3"), ("gpt-oss", "mxfp4", "U8")):
        directory = tmp_path / name
        directory.mkdir()
        coded, whole, _ = written(directory, form, torch.bfloat16)
        done = program("inspect", coded)
        assert done.returncode == 0 and name in done.stdout and words in done.stdout, done
        assert json.loads(program("inspect", coded, "--json").stdout)["form"] == name
        assert json.loads(program("inspect", whole, "--json").stdout)["form"] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_experts_of_gpt_oss_are_read_as_they_are_published(tmp_path, dtype):
    torch.manual_seed(5)
    model = tiny("gpt_oss").eval()
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.config.torch_dtype = dtype
    published, formula = {}, {}
    for name, value in model.state_dict().items():
        which = name.rsplit(".", 1)[1]
        if which not in ("gate_up_proj", "down_proj") or ".experts." not in name:
            value = (value * (6 if value.dim() > 1 and not which.endswith("_bias") else 1)).to(dtype)
            published[name] = value.contiguous()
            if ".experts." not in name:
                formula[name] = value.contiguous()
                continue
            for number, bias in enumerate(value):
                formula[name.replace(which, f"{number}.{which[:-5]}.bias")] = bias.contiguous()
            continue
        codes, scales, decoded = [], [], []
        for number, turned in enumerate(value):
            made, whole = mxfp4("w", 6 * turned.T.contiguous() * torch.exp(torch.linspace(-1, 1, turned.shape[1]))[:, None], None)
            codes.append(made["w_blocks"])
            scales.append(made["w_scales"])
            decoded.append(whole.T)
            formula[name.replace(which, f"{number}.{which}.weight")] = whole.to(dtype)
        published[name + "_blocks"], published[name + "_scales"] = torch.stack(codes), torch.stack(scales)
        value.copy_(torch.stack(decoded))
    config = json.loads(model.config.to_json_string(use_diff=False))
    directories = {"coded": (published, {"quantization_config": FORMS["gpt-oss"][0]}), "formula": (formula, {})}
    for name, (tensors, more) in directories.items():
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors", {"format": "pt"})
        (tmp_path / name / "config.json").write_text(json.dumps({**config, **more}))
    expected = texts(tmp_path / "formula")
    assert texts(tmp_path / "coded") == expected
    with pytest.raises(MemoryError) as small:
        penstock.LLM(tmp_path / "coded", host_memory="1MiB")
    least = int(str(small.value).rsplit("(", 1)[1].split()[0])
    assert texts(tmp_path / "coded", host_memory=least) == expected
    if dtype == torch.float32:
        for name, value in published.items():
            if name in dict(model.named_parameters()):
                model.get_parameter(name).data.copy_(value)
        reference = logits_of(model, PROMPT)[0].double().log_softmax(-1)
        assert expected[0][1][0][0] == pytest.approx(float(reference[expected[0][0][0]]), abs=2e-3)
    tensors = {**published, "model.layers.0.mlp.experts.down_proj_scales": published["model.layers.0.mlp.experts.down_proj_scales"][:-1]}
    save_file(tensors, tmp_path / "coded" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"down_proj_scales are not \[6, 64, 3, 16\] and \[6, 64, 3\] of U8"):
        penstock.LLM(tmp_path / "coded")
