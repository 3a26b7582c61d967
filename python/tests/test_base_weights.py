"""Adapters beside weights that are read where they lie: as they are published, or packed in 8 or 4 bit."""

import json
import os
import subprocess
import sys

import penstock
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SIZE = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}


def config(tied=False, **more):
    return transformers.LlamaConfig(**SIZE, tie_word_embeddings=tied, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more)


def published(directory, tied=False):
    torch.manual_seed(4)
    transformers.LlamaForCausalLM(config(tied)).save_pretrained(directory)
    return directory


def program(*words):
    text = "import sys; from penstock._programs import penstock; sys.argv[0] = 'penstock'; penstock()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-c", text, *map(str, words)], capture_output=True, text=True, env=environment, timeout=300)


def packed(directory, out, bits):
    done = program("pack", directory, out, "--weights", bits)
    assert done.returncode == 0, done.stderr
    return out


def adapted(model, **more):
    torch.manual_seed(7)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, **more))


def without_values(tied=False, **more):
    with penstock.init_without_values():
        model = transformers.AutoModelForCausalLM.from_config(config(tied))
    return adapted(model, **more)


def engine_of(model, directory, **options):
    trained = [each for each in model.parameters() if each.requires_grad]
    options.setdefault("gradient_clipping", 1.0)
    return penstock.initialize(model=model, optimizer=torch.optim.AdamW(trained, lr=1e-2), state_dir=directory, **options)[0]


def batches(count):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 96, (2, 12), generator=generator) for _ in range(count)]


def train(engine, data):
    losses = []
    for ids in data:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def plainly(model, data):
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    losses = []
    for ids in data:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_([each for each in model.parameters() if each.requires_grad], 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_losses_are_those_of_the_weights_that_lie_there(tmp_path, bits, tied):
    directory = published(tmp_path / "model", tied)
    where = packed(directory, tmp_path / "packed", bits) if bits else directory
    data = batches(6)
    with engine_of(without_values(tied), tmp_path / "state", base_weights=where) as engine:
        losses = train(engine, data[:3])
        told, plan = engine.log(), engine.plan()
        values = {name: value.clone() for name, value in engine.state_dict().items() if "lora" not in name}
        losses += train(engine, data[3:])
        steps = engine.report()["steps"]
    assert any(f"{f' in {bits} bit' if bits else ''}, are read where they lie, in {where}, and copied nowhere" in line for line in told)

    def with_values():
        model = adapted(transformers.LlamaForCausalLM(config(tied)))
        missing, unexpected = model.load_state_dict(values, strict=False)
        assert not unexpected and all("lora" in name for name in missing)
        return model

    # The very bits of weights that were copied, and plain PyTorch's to rounding.
    with engine_of(with_values(), tmp_path / "copied") as engine:
        assert train(engine, data) == losses
        copied = engine.plan()
    assert losses == pytest.approx(plainly(with_values(), data), abs=1e-5)
    if not bits:
        assert losses == pytest.approx(plainly(adapted(transformers.LlamaForCausalLM.from_pretrained(directory)), data), abs=1e-5)
    # State and writes are the adapters', and a step reads the files twice.
    model = without_values(tied)
    adapters = sum(each.numel() for each in model.parameters() if each.requires_grad)
    base = sum(each.stat().st_size for each in where.glob("*.safetensors"))
    assert plan["state_bytes"] < copied["state_bytes"] and plan["state_bytes"] <= 12 * (adapters + 4 * 4096)
    assert plan["nvme_read_bytes_per_step"] <= 2.05 * base + 16 * (adapters + 4 * 4096)
    assert all(step["nvme_write_bytes"] <= 16 * (adapters + 4 * 4096) for step in steps)


def test_a_run_goes_on_with_its_weights_wherever_they_are_and_with_no_others(tmp_path):
    where = packed(published(tmp_path / "model"), tmp_path / "packed", 4)
    data = batches(6)
    with engine_of(without_values(), tmp_path / "one", base_weights=where) as engine:
        expected = train(engine, data)
    with engine_of(without_values(), tmp_path / "state", base_weights=where) as engine:
        assert train(engine, data[:2]) == expected[:2]
        engine.save_checkpoint(tmp_path / "kept", tag="kept", wait=True)
    with engine_of(without_values(), tmp_path / "state", resume=True) as engine:  # where they were
        assert train(engine, data[2:4]) == expected[2:4]
    moved = tmp_path / "moved"
    where.rename(moved)
    with pytest.raises((OSError, RuntimeError), match=f"{where}.*not there.*base_weights=DIR"):
        train(engine_of(without_values(), tmp_path / "state", resume=True), data[4:])
    with engine_of(without_values(), tmp_path / "state", resume=True, base_weights=moved) as engine:
        assert train(engine, data[4:5]) == expected[4:5]
    with engine_of(without_values(), tmp_path / "state", resume=True) as engine:  # where they were last
        assert train(engine, data[5:]) == expected[5:]
    with engine_of(without_values(), tmp_path / "loaded", base_weights=moved) as engine:
        engine.load_checkpoint(tmp_path / "kept", "kept")
        assert train(engine, data[2:]) == expected[2:]
    with engine_of(without_values(), tmp_path / "begun", base_weights=moved, overwrite=True) as engine:
        train(engine, data[:1])
        engine.load_checkpoint(tmp_path / "kept", "kept")
        assert train(engine, data[2:]) == expected[2:]
    # One byte that is another, and another model's.
    file = next(moved.glob("*.safetensors"))
    bytes_there = bytearray(file.read_bytes())
    bytes_there[-1] ^= 1
    file.write_bytes(bytes_there)
    with pytest.raises((OSError, RuntimeError), match=f"{file}: not the weights that this run's adapters were made for .its bytes are others.*base_weights=DIR"):
        train(engine_of(without_values(), tmp_path / "state", resume=True), data[:1])
    verified = program("verify", tmp_path / "state", "--json")
    assert verified.returncode == 1 and not json.loads(verified.stdout)["whole"]


def test_adapters_are_saved_and_the_files_are_not_merged_into(tmp_path):
    where = packed(published(tmp_path / "model"), tmp_path / "packed", 8)
    data = batches(4)
    model = without_values()
    with engine_of(model, tmp_path / "state", base_weights=where) as engine:
        train(engine, data)
        model.save_pretrained(tmp_path / "adapter")
        model.eval()
        with torch.no_grad():
            expected = model(input_ids=data[0]).logits
        values = dict(engine.state_dict())
        with pytest.raises(RuntimeError, match="q_proj.* is frozen and read from .*, which is not written"):
            model.merge_and_unload()
    whole = adapted(transformers.LlamaForCausalLM(config()))
    whole.load_state_dict(values)
    base = whole.unload()
    found = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(found(input_ids=data[0]).logits, expected, atol=1e-5, rtol=1e-5)


def test_the_configuration_and_a_plan_have_it_and_frozen_parameters_may_be_on_the_meta_device(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    where = packed(published(tmp_path / "model"), tmp_path / "packed", 4)
    with accelerate.init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(config())
    model.requires_grad_(False)
    torch.manual_seed(2)
    model.model.norm.weight = torch.nn.Parameter(torch.rand(64))  # what trains has a value of its own
    given = {"penstock": {"base_weights": str(where)}}
    data = batches(2)
    example = {"input_ids": data[0], "labels": data[0]}
    plan = penstock.plan(model, example=example, config=given, state_dir=tmp_path / "state", optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
    copied = penstock.plan(model, example=example, state_dir=tmp_path / "state", optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
    with engine_of(model, tmp_path / "state", config=given) as engine:
        losses = train(engine, data)
        assert engine.plan()["nvme_read_bytes_per_step"] > 0
        assert engine.plan()["state_bytes"] <= 12 * 4096
    assert losses[0] != losses[1]
    assert plan["nvme_bytes_per_param_per_step"] < 0.5 * copied["nvme_bytes_per_param_per_step"]


TRAINER = """
import json, sys
import test_base_weights as here, torch, transformers
given, out = json.loads(sys.argv[1]), sys.argv[2]
data = [{"input_ids": ids[0], "labels": ids[0]} for ids in here.batches(12)]
arguments = transformers.TrainingArguments(
    output_dir=out, per_device_train_batch_size=2, max_steps=3, logging_steps=1, save_strategy="no", report_to=[], learning_rate=1e-2, use_cpu=True,
    disable_tqdm=True, deepspeed=given or None,
)
model = here.without_values() if given else here.adapted(transformers.LlamaForCausalLM(here.config()))
if not given:
    model.load_state_dict(torch.load(sys.argv[3]), strict=False)
trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
trainer.train()
trainer.save_model(out + "/final")
print("TOLD", json.dumps([each["loss"] for each in trainer.state.log_history if "loss" in each]))
"""


def test_trainer_trains_beside_packed_weights(tmp_path):
    pytest.importorskip("accelerate")
    import trainer

    where = packed(published(tmp_path / "model"), tmp_path / "packed", 4)
    with engine_of(without_values(), tmp_path / "values", base_weights=where) as engine:
        train(engine, batches(1))
        torch.save({name: value for name, value in engine.state_dict().items() if "lora" not in name}, tmp_path / "values.pt")

    def told(given, out):
        words = [json.dumps(given), str(tmp_path / out), str(tmp_path / "values.pt")]
        (tmp_path / "script.py").write_text(TRAINER)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, os.path.dirname(__file__)])}
        launcher = ["-m", "penstock.run"] if given else []
        done = subprocess.run([sys.executable, *launcher, str(tmp_path / "script.py"), *words], capture_output=True, text=True, env=environment, timeout=400)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("TOLD "))[len("TOLD ") :])

    ours = told({**trainer.config(tmp_path / "nvme"), "penstock": {"base_weights": str(where)}}, "ours")
    assert ours == pytest.approx(told({}, "plain"), abs=1e-5)
    saved = [peft.utils.load_peft_weights(str(tmp_path / out / "final"), device="cpu") for out in ("ours", "plain")]
    assert saved[0].keys() == saved[1].keys() and saved[0]
    for name, value in saved[1].items():
        torch.testing.assert_close(saved[0][name], value, atol=1e-5, rtol=1e-4)


def test_a_device_with_memory_of_its_own_has_the_same_bits(tmp_path, monkeypatch):
    where = packed(published(tmp_path / "model"), tmp_path / "packed", 4)
    data = batches(4)
    with engine_of(without_values(), tmp_path / "host", base_weights=where) as engine:
        expected = train(engine, data)
        state_bytes = engine.plan()["state_bytes"]
    monkeypatch.setenv("PENSTOCK_TEST_DEVICE", "capacity=256MiB,latency=1e-4")
    with engine_of(without_values(), tmp_path / "device", base_weights=where) as engine:
        assert train(engine, data) == expected
        plan, report = engine.plan(), engine.report()
    assert plan["state_bytes"] == state_bytes and plan["least_device_memory_bytes"] > 0 and report["totals"]["h2d_bytes"] > 0
    with engine_of(without_values(), tmp_path / "least", base_weights=where, device_memory=plan["least_device_memory_bytes"]) as engine:
        assert train(engine, data) == expected
    monkeypatch.delenv("PENSTOCK_TEST_DEVICE")
    with engine_of(without_values(), tmp_path / "device", resume=True) as engine:  # a run goes on on either
        on_host = train(engine, data[:1])
    monkeypatch.setenv("PENSTOCK_TEST_DEVICE", "capacity=256MiB")
    with engine_of(without_values(), tmp_path / "host", resume=True) as engine:
        assert train(engine, data[:1]) == on_host


def test_what_cannot_be_is_refused_by_name(tmp_path):
    where = published(tmp_path / "model")
    bits = packed(where, tmp_path / "packed", 8)
    data = batches(1)

    def refused(model, words, kind=ValueError, **options):
        options.setdefault("base_weights", where)
        with pytest.raises(kind, match=words):
            train(engine_of(model, tmp_path / "state", **options), data)
        assert not (tmp_path / "state").exists() or not list((tmp_path / "state").rglob("penstock.store"))

    other = config()
    other.num_hidden_layers = 4
    refused(adapted(transformers.LlamaForCausalLM(other)), "model.layers.3.* is frozen, and no tensor there has its name")
    other.num_hidden_layers = 2
    refused(adapted(transformers.LlamaForCausalLM(other)), "model.layers.2.* has no place in this model: give the directory that has this model's weights")
    other = config()
    other.intermediate_size = 96
    refused(adapted(transformers.LlamaForCausalLM(other)), r"gate_proj.weight is \[128, 64\] there and \[96, 64\] in this model")
    refused(without_values(), "built without a value .*base_weights=DIR says where", base_weights=None)
    refused(without_values(), "tmp.*nowhere|nowhere", base_weights=tmp_path / "nowhere", kind=(ValueError, OSError))
    refused(without_values(), "cannot be read where it lies: .* is published in fp32, and the run computes in 16 bit", dtype=torch.bfloat16)
    with penstock.init_without_values():
        model = transformers.LlamaForCausalLM(config())
    refused(model, "embed_tokens.weight was built without a value .*and trains")
    refused(without_values(modules_to_save=["lm_head"]), "lm_head.modules_to_save.* built without a value .*, or is made of what was, and trains")
    refused(without_values(use_dora=True), "lora_magnitude_vector.* built without a value .*, or is made of what was, and trains")
    model = without_values()
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    refused(model, "lora_A.second.weight is frozen, and no tensor there has its name")
    with penstock.init_without_values():
        model = transformers.LlamaForCausalLM(config()).requires_grad_(False)
    with pytest.raises(ValueError, match="base_weights: no parameter of the model requires a gradient"):
        penstock.initialize(model=model, state_dir=tmp_path / "state", base_weights=where)[0](input_ids=data[0])
    with penstock.init_without_values():
        tied, (one, other) = torch.nn.Parameter(torch.ones(4, 4)), (torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        one.weight, other.weight = tied, tied
    assert one.weight is other.weight and one.weight is not tied
    with penstock.init_without_values():
        gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=96))
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=96)).save_pretrained(tmp_path / "gpt")
    turned = packed(tmp_path / "gpt", tmp_path / "packed gpt", 8)
    gpt = peft.get_peft_model(gpt, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    refused(gpt, "of a Conv1D, is .in, out.: give the directory that they were packed of", base_weights=turned)
    model = adapted(transformers.LlamaForCausalLM(config()))
    trained = [each for each in model.parameters() if each.requires_grad]
    with pytest.raises(ValueError, match="base_weights: it is served with state on a drive"):
        penstock.initialize(model=model, optimizer=torch.optim.AdamW(trained, lr=1e-2), offload="cpu", base_weights=bits)
    with engine_of(adapted(transformers.LlamaForCausalLM(config())), tmp_path / "own") as engine:
        train(engine, data)
    with pytest.raises(ValueError, match="base_weights: the run that is gone on with has the weights of its frozen parameters itself"):
        train(engine_of(without_values(), tmp_path / "own", resume=True, base_weights=bits), data)
