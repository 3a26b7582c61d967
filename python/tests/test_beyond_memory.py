"""A state of at least eight times the memory that an engine gets: 20 steps with plain PyTorch's losses."""

import copy

import pytest

torch = pytest.importorskip("torch")

import penstock  # noqa: E402
from engine_models import batches, net  # noqa: E402

STEPS = 20


def adamw(model):
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)


def loss_of(out):
    return getattr(out, "loss", out)


def losses_of(engine, data):
    losses = []
    for micro_batches in data:
        total = 0.0
        for batch in micro_batches:
            loss = loss_of(engine(**batch))
            engine.backward(loss)
            engine.step()
            total += loss.item() / len(micro_batches)
        losses.append(total)
    return losses


def plain_losses(model, data):
    model = copy.deepcopy(model)
    optimizer = adamw(model)
    losses = []
    for micro_batches in data:
        optimizer.zero_grad()
        total = 0.0
        for batch in micro_batches:
            loss = loss_of(model(**batch)) / len(micro_batches)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return losses


def whole():
    model = net(layers=32, width=256, tied=False)
    with torch.no_grad():
        for parameter in (model.embed.weight, model.head.weight):
            parameter.mul_(0.02)
    return model


def adapted():
    """A model of which an adapter trains beside a frozen base."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=50, hidden_size=256, intermediate_size=512, num_hidden_layers=32, num_attention_heads=4)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)


@pytest.mark.parametrize("what", ["plain", "LoRA", "accumulation"])
@pytest.mark.filterwarnings("ignore")
def test_twenty_steps_with_an_eighth_of_the_state_in_memory(tmp_path, what):
    count = 2 if what == "accumulation" else 1
    many = batches(STEPS * count, size=2)
    data = [many[count * number : count * (number + 1)] for number in range(STEPS)]
    model = adapted() if what == "LoRA" else whole()
    if what == "LoRA":
        data = [[{"input_ids": batch["x"], "labels": batch["x"]} for batch in micro_batches] for micro_batches in data]
    expected = plain_losses(model, data)

    def engine_of(model, place, **options):
        given = {"optimizer": adamw(model), "gradient_clipping": 1.0, "gradient_accumulation_steps": count, **options}
        return penstock.initialize(model=model, state_dir=str(tmp_path / place), **given)[0]

    with engine_of(copy.deepcopy(model), "as it likes") as engine:
        engine.eval()(**data[0][0])
        plan = engine.plan()
    budget = max(plan["state_bytes"] // 8, plan["least_host_memory_bytes"])
    with engine_of(model, "bounded", host_memory=budget) as engine:
        assert losses_of(engine, data) == pytest.approx(expected, abs=1e-5)
        plan = engine.plan()
        assert plan["peak_managed_bytes"] <= plan["host_memory_bytes"] <= budget
        assert plan["state_bytes"] >= 8 * plan["host_memory_bytes"]
