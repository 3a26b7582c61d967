"""Losses of two engines, and of one that computes twice: what plain PyTorch computes, or refused with the way out."""

import pytest

torch = pytest.importorskip("torch")

import penstock  # noqa: E402
import penstock.deepspeed as deepspeed  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = pytest.mark.skipif(not hasattr(torch.autograd.graph, "get_gradient_edge"), reason="torch before 2.1 does not ask for gradients at edges")
bce = nn.functional.binary_cross_entropy_with_logits


class Plain:
    """A model and its optimizer with an engine's calls."""

    def __init__(self, model, zeros):
        self.model, self.zeros = model, zeros
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def __call__(self, *args):
        return self.model(*args)

    def backward(self, loss):
        loss.backward()

    def step(self):
        self.optimizer.step()
        if self.zeros:
            self.optimizer.zero_grad()

    def zero_grad(self):
        self.optimizer.zero_grad()


@pytest.fixture
def made(tmp_path):
    """A function (kind, inputs, outputs, seed) to an engine, or what stands for one."""
    engines = []

    def make(kind, inputs, outputs, seed, zeros=False, **options):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, outputs))
        if kind == "plain":
            return Plain(model, zeros)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        place = tmp_path / str(len(engines))
        if kind == "penstock":
            engines.append(penstock.initialize(model=model, optimizer=optimizer, state_dir=str(place), **options)[0])
        else:
            config = {
                "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "penstock": options,
                "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(place)}},
            }  # fmt: skip
            engines.append(deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0])
        return engines[-1]

    yield make
    for engine in engines:
        engine.destroy() if isinstance(engine, deepspeed.DeepSpeedEngine) else engine.close()


def compare(train, kind):
    assert train(kind) == pytest.approx(train("plain"), abs=1e-5)


# The discriminator's gradients of the generator's step are not wanted; without zero_grad they join its next step, as in plain PyTorch.
@pytest.mark.parametrize("zeroed", [True, False])
@pytest.mark.parametrize("generator_first", [True, False])
@pytest.mark.parametrize("kind", ["penstock", "deepspeed"])
def test_a_generator_and_a_discriminator(made, kind, generator_first, zeroed):
    def train(kind):
        generator, judge = made(kind, 8, 4, 0, zeros=not zeroed), made(kind, 4, 1, 1, zeros=not zeroed)
        torch.manual_seed(5)
        losses = []
        ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)

        def step_of_generator(fake):
            if zeroed:
                generator.zero_grad()
            loss = bce(judge(fake), ones)
            generator.backward(loss)
            generator.step()
            losses.append(loss.item())

        def step_of_judge(real, fake):
            if zeroed:
                judge.zero_grad()
            loss = bce(judge(real), ones) + bce(judge(fake.detach()), zeros)
            judge.backward(loss)
            judge.step()
            losses.append(loss.item())

        for _ in range(20):
            real, fake = torch.randn(16, 4) + 2, generator(torch.randn(16, 8))
            if generator_first:
                step_of_generator(fake)
                step_of_judge(real, fake)
            else:
                step_of_judge(real, fake)
                step_of_generator(fake)
        return losses

    compare(train, kind)


@pytest.mark.parametrize("kind", ["penstock", "deepspeed"])
def test_gradients_through_a_student_and_a_teacher(made, kind):
    def train(kind):
        student, teacher = made(kind, 8, 4, 0), made(kind, 8, 4, 1)
        torch.manual_seed(5)
        losses = []
        for number in range(20):
            x = torch.randn(16, 8)
            student.zero_grad()
            teacher.zero_grad()
            loss = (student(x) - teacher(x)).pow(2).mean()
            if number % 3:
                loss = loss + teacher(x + 1).pow(2).mean()  # once more
            student.backward(loss)
            teacher.step()
            student.step()
            losses.append(loss.item())
        return losses

    compare(train, kind)


@pytest.mark.parametrize("kind", ["penstock", "deepspeed"])
def test_what_an_engine_gives_goes_into_it_and_into_another(made, kind):
    def train(kind):
        first, second = made(kind, 8, 8, 0), made(kind, 8, 4, 1)
        torch.manual_seed(5)
        losses = []
        for _ in range(20):
            x = torch.randn(16, 8)
            first.zero_grad()
            second.zero_grad()
            loss = (first(first(x)) - x).pow(2).mean()
            first.backward(loss)
            first.step()
            first.zero_grad()
            chained = second(first(x)).pow(2).mean()
            second.backward(chained)
            first.step()
            second.step()
            losses += [loss.item(), chained.item()]
        return losses

    compare(train, kind)


@pytest.mark.parametrize("kind", ["penstock", "deepspeed"])
def test_one_engine_before_another_and_once_more_in_a_loss(made, kind):
    """Refused with the way out, which is right."""

    def train(kind, **options):
        first, second = made(kind, 8, 4, 0, **options), made(kind, 4, 2, 1)
        torch.manual_seed(5)
        losses = []
        for _ in range(20):
            x, y = torch.randn(16, 8), torch.randn(16, 8)
            first.zero_grad()
            second.zero_grad()
            loss = second(first(x)).pow(2).mean() + first(y).pow(2).mean()
            second.backward(loss)
            second.step()
            first.step()
            losses.append(loss.item())
        return losses

    with pytest.raises(RuntimeError, match="forwards_per_step="):
        train(kind)
    assert train(kind, forwards_per_step=2) == pytest.approx(train("plain"), abs=1e-5)


def test_weights_are_not_changed_while_another_engines_backward_waits_for_the_step(made):
    """The forward that it came to is computed again in step(), with the weights that it had."""
    student, teacher = made("penstock", 8, 4, 0), made("penstock", 8, 4, 1)
    torch.manual_seed(5)
    for number in range(2):
        x = torch.randn(16, 8)
        loss = (student(x) - teacher(x)).pow(2).mean() + teacher(x + 1).pow(2).mean()
        student.backward(loss)
        if number:
            with pytest.raises(RuntimeError, match=r"0\.weight is changed between a backward and its step\(\)"):
                teacher.module[0].weight.data.mul_(2)
            with pytest.raises(RuntimeError, match="a step is open"):
                teacher.load_checkpoint("nowhere")
        teacher.step()
        student.step()


def in_fp16(made, inputs, outputs, seed, scale, **options):
    return made("penstock", inputs, outputs, seed, config={"fp16": {"enabled": True, "loss_scale": scale}}, **options)


SCALED = r"this loss is of Sequential in fp(16|32), which scales gradients by \d+, and of Sequential in fp(16|32).*Give both engines bf16, or fp32"


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("accumulates", [{}, {"forwards_per_step": 2}])
@pytest.mark.parametrize("from_fp16", [True, False])
def test_engines_with_other_loss_scales_in_one_loss_are_refused_by_name(made, from_fp16, accumulates, twice):
    half, whole = in_fp16(made, 8, 4, 0, 128, **accumulates), made("penstock", 8, 4, 1, **accumulates)
    torch.manual_seed(5)
    x = torch.randn(16, 8)
    first, second = (half, whole) if from_fp16 else (whole, half)
    for number in range(2):
        loss = (half(x).float() - whole(x)).pow(2).mean()
        if twice:
            loss = loss + whole(x + 1).pow(2).mean()
        with pytest.raises(RuntimeError, match=SCALED):
            first.backward(loss)
        first.zero_grad()
        second.zero_grad()
    # Of each alone, and of both without gradients of one, it is served.
    if not accumulates:
        half.backward((half(x).float() - whole(x).detach()).pow(2).mean())
        half.step()
        whole.backward((half(x).detach().float() - whole(x)).pow(2).mean())
        whole.step()


def test_a_generator_in_fp16_before_a_judge_in_fp32_is_refused_by_name(made):
    generator, judge = in_fp16(made, 8, 4, 0, 128), made("penstock", 4, 1, 1)
    torch.manual_seed(5)
    for _ in range(2):
        fake = generator(torch.randn(16, 8))
        judge.backward(bce(judge(torch.randn(16, 4)), torch.ones(16, 1)) + bce(judge(fake.detach().float()), torch.zeros(16, 1)))
        judge.step()
        loss = bce(judge(fake.float()), torch.ones(16, 1))
        for engine in (generator, judge):
            with pytest.raises(RuntimeError, match=SCALED):
                engine.backward(loss)
        judge.zero_grad()
        generator.zero_grad()


def test_a_loss_scale_of_one_is_no_other_scale(made):
    half, whole = in_fp16(made, 8, 4, 0, 1), made("penstock", 8, 4, 1)
    torch.manual_seed(5)
    for _ in range(3):
        x = torch.randn(16, 8)
        loss = (half(x).float() - whole(x)).pow(2).mean()
        half.backward(loss)
        whole.step()
        half.step()
