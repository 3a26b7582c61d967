"""penstock.init_on_disk: models that are built larger than memory have the values of a plain build."""

import os

import pytest

torch = pytest.importorskip("torch")

import penstock  # noqa: E402
from engine_models import Net, batches  # noqa: E402
from penstock._engine._on_disk import is_on_disk  # noqa: E402
from torch import nn  # noqa: E402


def same(first, second):
    state, other = first.state_dict(), second.state_dict()
    assert list(state) == list(other)
    for name, value in state.items():
        assert value.dtype == other[name].dtype and torch.equal(value, other[name]), name


def on_disk(model):
    return [name for name, parameter in model.named_parameters() if is_on_disk(parameter)]


class Initialised(nn.Module):
    """Parameters that have values before they are registered, ties, buffers, something in bf16."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(64, 64))
        self.body = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(2))
        self.embed = nn.Embedding(100, 64, padding_idx=3)
        self.head = nn.Linear(64, 100, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(64)
        self.half = nn.Linear(64, 64).to(torch.bfloat16)
        nn.init.orthogonal_(self.scale)
        self.apply(lambda module: nn.init.trunc_normal_(module.weight, std=0.02) if isinstance(module, nn.Linear) else None)


@pytest.mark.parametrize("build", [Initialised, lambda: Net(width=96, dropout=0.1), lambda: Initialised().to(torch.bfloat16)])
def test_values_are_those_of_a_plain_build(tmp_path, build):
    torch.manual_seed(3)
    plain = build()
    drawn = torch.rand(3)
    torch.manual_seed(3)
    with penstock.init_on_disk(tmp_path / "built"):
        model = build()
        assert torch.equal(torch.rand(3), drawn)
        assert os.listdir(tmp_path / "built") == []  # files without names
    same(model, plain)
    large = {name for name, p in model.named_parameters() if p.numel() * p.element_size() >= 4096}
    assert large and set(on_disk(model)) == large
    assert nn.Module.register_parameter.__module__ == "torch.nn.modules.module" and nn.Linear(64, 64).weight is not None
    assert not on_disk(nn.Linear(64, 64))


def test_a_failed_build_leaves_torch_as_it_was(tmp_path, monkeypatch):
    before = nn.Module.register_parameter, nn.Module._apply
    with pytest.raises(ZeroDivisionError):
        with penstock.init_on_disk(tmp_path):
            nn.Linear(64, 64)
            raise ZeroDivisionError
    assert (nn.Module.register_parameter, nn.Module._apply) == before

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        with penstock.init_on_disk(tmp_path):
            nn.Linear(64, 64)
    assert os.listdir(tmp_path) == [] and (nn.Module.register_parameter, nn.Module._apply) == before


def test_it_trains_as_a_model_in_memory_does(tmp_path):
    losses = []
    for place in (None, tmp_path / "built"):
        torch.manual_seed(0)
        if place is None:
            model = Net(width=64)
        else:
            with penstock.init_on_disk(place):
                model = Net(width=64)
        engine = penstock.initialize(
            model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), state_dir=str(tmp_path / f"run-{place is None}")
        )[0]
        with engine:
            for batch in batches(4):
                loss = engine(**batch)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
    assert losses[:4] == losses[4:]


def test_transformers_models(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=200, n_positions=32)
    torch.manual_seed(1)
    plain = transformers.AutoModelForCausalLM.from_config(config)
    torch.manual_seed(1)
    with penstock.init_on_disk(tmp_path / "built"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    same(model, plain)
    assert "transformer.wte.weight" in on_disk(model)
    plain.save_pretrained(tmp_path / "saved")
    for dtype in (torch.float32, torch.bfloat16):
        with penstock.init_on_disk(tmp_path / "built"):
            loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=dtype)
        assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ
        same(loaded, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=dtype))
        assert "transformer.wte.weight" in on_disk(loaded) and loaded.lm_head.weight is loaded.transformer.wte.weight


def test_deepspeeds_zero_init_builds_where_its_weights_go(tmp_path):
    from penstock import _deepspeed

    where = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path / "nvme")}}}
    with _deepspeed.Init(config_dict_or_path=where):
        assert is_on_disk(nn.Linear(64, 64).weight)
    for other in ({}, {"config_dict_or_path": {"zero_optimization": {"stage": 3}}}, {"config_dict_or_path": where, "enabled": False}):
        with _deepspeed.Init(**other):
            assert not is_on_disk(nn.Linear(64, 64).weight)


# A model of four times what the process may take on top of torch: built (or loaded), handed over, trained. Peaks are the kernel's.
MEASURED = """
    import json, sys
    import torch
    import penstock
    from torch import nn

    how, place = sys.argv[1:]
    LIMIT, WIDTH, LAYERS = (40 + 64) << 20, 1024, 104  # the budget, and 64 MiB
    torch.set_num_threads(1)

    class Model(nn.Module):
        def __init__(self, layers=LAYERS, width=WIDTH):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

        def forward(self, x):
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            return x.pow(2).mean()

    def resident(which):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith(which))

    def train(model, name):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = penstock.initialize(model=model, optimizer=optimizer, state_dir=f"{place}/{name}", host_memory=40 << 20)[0]
        with engine:
            for _ in range(2):
                loss = engine(torch.ones(2, model.layers[0].in_features))
                engine.backward(loss)
                engine.step()
        return loss.item()

    train(Model(3, 64), "small")
    before = resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    torch.manual_seed(0)
    if how == "built":
        with penstock.init_on_disk(place):
            model = Model()
    else:
        from safetensors import safe_open
        with penstock.init_on_disk(place):
            with torch.device("meta"):
                model = Model()
            with safe_open(f"{place}/weights", framework="pt") as file:
                for name in file.keys():
                    layer = model.get_submodule(name.rpartition(".")[0])
                    layer.weight = nn.Parameter(file.get_slice(name)[...])
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    built = resident("VmHWM") - before
    loss = train(model, "large")
    print(json.dumps({"size": size, "limit": LIMIT, "built": built, "peak": resident("VmHWM") - before, "loss": loss}))
"""


@pytest.mark.parametrize("how", ["built", "loaded"])
def test_a_model_of_four_times_what_the_process_takes(tmp_path, in_child, how):
    import json

    if how == "loaded":
        save_file = pytest.importorskip("safetensors.torch").save_file
        torch.manual_seed(0)
        save_file({f"layers.{n}.weight": nn.Linear(1024, 1024, bias=False).weight.data for n in range(104)}, tmp_path / "weights")
    status, out, err = in_child(MEASURED, how, tmp_path)
    assert status == 0, err
    told = json.loads(out)
    assert told["size"] >= 4 * told["limit"] and told["loss"] > 0
    assert told["built"] < told["limit"], told
    assert told["peak"] < told["limit"], told
