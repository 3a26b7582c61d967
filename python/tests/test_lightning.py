"""Lightning's DeepSpeedStrategy: losses, metrics and checkpoints are those of Lightning without it."""

import importlib.util
import json

import pytest

pytest.importorskip("torch")
if not any(map(importlib.util.find_spec, ("lightning", "pytorch_lightning"))):
    pytest.skip("Lightning is not installed (pip install lightning)", allow_module_level=True)

TRAINS = """
    import json, logging, os, sys, warnings
    import penstock.deepspeed
    try:
        import lightning.pytorch as pl
        from lightning.pytorch.strategies import DeepSpeedStrategy
    except ImportError:
        import pytorch_lightning as pl
        from pytorch_lightning.strategies import DeepSpeedStrategy
    import torch
    from torch import nn
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning|torch")

    class Lit(pl.LightningModule):
        rate, dropout = 3e-3, 0.0

        def __init__(self):
            super().__init__()
            self.make()

        def make(self):
            self.net = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(self.dropout)) for _ in range(3)], nn.Linear(16, 4))

        def forward(self, x):
            return self.net(x)

        def compute(self, batch):
            x, y = batch
            return nn.functional.cross_entropy(self.net(x), y)

        def training_step(self, batch, batch_idx):
            loss = self.compute(batch)
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.compute(batch))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=self.rate)

    class CallsItself(Lit):
        def compute(self, batch):
            x, y = batch
            return nn.functional.cross_entropy(self(x), y)

    class AutoEncoder(Lit):
        '''Lightning's first example.'''
        def make(self):
            self.encoder = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
            self.decoder = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 16))

        def compute(self, batch):
            return nn.functional.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])

    class OwnParameter(Lit):
        def make(self):
            super().make()
            self.scale = nn.Parameter(torch.full((4,), 0.7))

        def compute(self, batch):
            return nn.functional.cross_entropy(self.net(batch[0]) * self.scale, batch[1])

    class Dictionary(Lit):
        '''Batches of a dictionary, steps that return one, attributes that a step changes, random numbers.'''
        dropout = 0.2

        def make(self):
            super().make()
            self.seen = []

        def training_step(self, batch, batch_idx):
            self.seen.append(batch_idx)
            loss = nn.functional.cross_entropy(self.net(batch["x"]), batch["y"])
            self.log_dict({"train_loss": loss, "seen": float(len(self.seen))}, on_step=True, on_epoch=True)
            return {"loss": loss, "logits": loss.detach()}

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", nn.functional.cross_entropy(self.net(batch["x"]), batch["y"]))

    class Schedules(Lit):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.rate)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-2, total_steps=20)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class Configures(Lit):
        '''Makes its modules where DeepSpeed would.'''
        def make(self):
            self.net = None

        def configure_model(self):
            if self.net is None:
                torch.manual_seed(5)
                super().make()

    class Manual(Lit):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            loss = self.compute(batch)
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return loss

    class ValidatesOtherwise(AutoEncoder):
        '''Calls in validation what training calls, more often and in another order.'''
        def validation_step(self, batch, batch_idx):
            again = self.encoder(self.decoder(self.encoder(batch[0])))
            self.log("val_loss", nn.functional.mse_loss(self.decoder(again), batch[0]))

    class Losses(pl.Callback):
        def __init__(self):
            self.losses, self.validated = [], []

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.losses.append(float(outputs["loss"]))

        def on_validation_end(self, trainer, module):
            self.validated.append(float(trainer.callback_metrics["val_loss"]))

    class Rows(torch.utils.data.Dataset):
        def __init__(self, named):
            torch.manual_seed(1)
            self.x, self.y, self.named = torch.randn(80, 16), torch.randint(4, (80,)), named

        def __len__(self):
            return 80

        def __getitem__(self, i):
            return {"x": self.x[i], "y": self.y[i]} if self.named else (self.x[i], self.y[i])

    def fit(kind, strategy, ckpt_path=None, **options):
        '''Twenty batches, ten an epoch.'''
        torch.manual_seed(0)
        module, told = kind(), Losses()
        rows = Rows(kind is Dictionary)
        given = dict(max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, use_distributed_sampler=False)
        given.update(dict(enable_checkpointing=False, callbacks=[told], default_root_dir=sys.argv[1]), **options)
        trainer = pl.Trainer(strategy=strategy, **given)
        loader = torch.utils.data.DataLoader(rows, batch_size=8)
        trainer.fit(module, loader, torch.utils.data.DataLoader(rows, batch_size=40), ckpt_path=ckpt_path)
        means = {name: float(value) for name, value in trainer.callback_metrics.items() if name != "train_loss_step"}
        return dict(losses=told.losses, validated=told.validated, means=means), trainer, module

    def on_drive(**more):
        return DeepSpeedStrategy(
            stage=3, offload_optimizer=True, offload_parameters=True, offload_params_device="nvme", offload_optimizer_device="nvme",
            nvme_path=sys.argv[1] + "/nvme", **more,
        )
"""

CASES = {
    "net": ("Lit", {}),
    "forward": ("CallsItself", {}),
    "encoder and decoder": ("AutoEncoder", {}),
    "a parameter of its own": ("OwnParameter", {}),
    "dictionaries": ("Dictionary", {}),
    "a scheduler": ("Schedules", {}),
    "configure_model": ("Configures", {}),
    "manual optimization": ("Manual", {}),
    "another validation": ("ValidatesOtherwise", {}),
    "accumulation": ("Lit", {"accumulate_grad_batches": 2}),
    "accumulation of encoder and decoder": ("AutoEncoder", {"accumulate_grad_batches": 2}),
    "accumulation of dictionaries": ("Dictionary", {"accumulate_grad_batches": 2, "num_sanity_val_steps": 0}),
    "clipping": ("Lit", {"gradient_clip_val": 0.05}),
    "validation within": ("AutoEncoder", {"val_check_interval": 3}),
}


@pytest.mark.parametrize("accumulates", [False, True], ids=["step by step", "accumulated"])
def test_losses_and_metrics_are_lightnings_own(in_child, tmp_path, accumulates):
    cases = {name: case for name, case in CASES.items() if accumulates == ("accumulate_grad_batches" in case[1])}
    status, out, error = in_child(
        TRAINS + """
    told = {}
    for name, (kind, options) in json.loads(sys.argv[2]).items():
        own, _, _ = fit(globals()[kind], "auto", **options)
        with_engine, trainer, _ = fit(globals()[kind], on_drive(), **options)
        told[name] = [own, with_engine, type(trainer.model).__name__]
    print(json.dumps(told))
    """, tmp_path, json.dumps(cases), timeout=1200,
    )  # fmt: skip
    assert status == 0, error
    told = json.loads(out.splitlines()[-1])
    assert set(told) == set(cases)
    for name, (own, with_engine, model) in told.items():
        assert model == "DeepSpeedEngine" and len(own["losses"]) == 20 and len(set(own["losses"])) > 15, name
        for what in ("losses", "validated"):
            assert with_engine[what] == pytest.approx(own[what], abs=1e-5), (name, what)
        assert with_engine["means"] == pytest.approx(own["means"], abs=1e-5), name


def test_a_fit_goes_on_from_its_checkpoint(in_child, tmp_path):
    """As Lightning's own: weights, moments, scheduler, epoch and batch."""
    status, out, error = in_child(
        TRAINS + """
    def keeps(*_):
        return dict(enable_checkpointing=True, callbacks=[Losses(), pl.callbacks.ModelCheckpoint(sys.argv[1] + "/kept", save_last=True)])

    own, _, _ = fit(Schedules, "auto", max_epochs=2)
    first, trainer, module = fit(Schedules, on_drive(), max_epochs=1, **keeps())
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    path = sys.argv[1] + "/kept/last.ckpt"
    told = Losses()
    second, trainer, _ = fit(Schedules, on_drive(), ckpt_path=path, max_epochs=2, callbacks=[told])
    evaluated = pl.Trainer(strategy=on_drive(), accelerator="cpu", devices=1, logger=False, use_distributed_sampler=False, enable_progress_bar=False)
    read = torch.utils.data.DataLoader(Rows(False), batch_size=40)
    validated = evaluated.validate(Schedules(), read, ckpt_path=path)[0]["val_loss"]
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    masters = get_fp32_state_dict_from_zero_checkpoint(path)
    same = all(torch.equal(masters[name], value) for name, value in weights.items())
    print(json.dumps([own["losses"], told.losses, own["validated"], validated, trainer.global_step, same]))
    """, tmp_path,
    )  # fmt: skip
    assert status == 0, error
    own, again, own_validated, validated, steps, same = json.loads(out.splitlines()[-1])
    assert len(again) == 10 and again == pytest.approx(own[10:], abs=1e-5) and steps == 20 and same
    assert validated == pytest.approx(own_validated[1], abs=1e-5)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
def test_precisions_of_the_trainer_are_the_engines(in_child, tmp_path, precision):
    status, out, error = in_child(
        TRAINS + """
    own, _, _ = fit(AutoEncoder, "auto")
    half, trainer, module = fit(AutoEncoder, on_drive(), precision=sys.argv[2])
    engine = trainer.model
    print(json.dumps([own["losses"], half["losses"], engine.bfloat16_enabled(), engine.fp16_enabled()]))
    """, tmp_path, precision,
    )  # fmt: skip
    assert status == 0, error
    own, half, bf16, fp16 = json.loads(out.splitlines()[-1])
    assert (bf16, fp16) == (precision.startswith("bf16"), precision == "16-mixed")
    assert half == pytest.approx(own, abs=0.05) and half != own


def test_more_devices_than_processes_are_refused(in_child, tmp_path):
    """Lightning would wait for processes that nobody starts."""
    status, out, error = in_child(
        TRAINS + """
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # as penstock.run does
    try:
        fit(Lit, on_drive(), devices=2)
    except RuntimeError as error:
        print(error)
    """, tmp_path,
    )  # fmt: skip
    assert status == 0, error
    assert out.splitlines()[-1] == "devices=2, and this is the only process: torchrun --nproc-per-node 2 -m penstock.run SCRIPT starts as many"


def test_fabric_and_the_strategies_names(in_child, tmp_path):
    status, out, error = in_child(
        TRAINS + """
    import lightning
    torch.manual_seed(0)
    plain = Lit().net
    torch.manual_seed(0)
    fabric = lightning.Fabric(strategy="deepspeed_stage_3_offload", accelerator="cpu", devices=1)
    fabric.launch()
    net = Lit().net
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    other = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    losses = []
    for number in range(20):
        torch.manual_seed(number)
        x, y = torch.randn(8, 16), torch.randint(4, (8,))
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        expected = nn.functional.cross_entropy(plain(x), y)
        expected.backward()
        other.step()
        other.zero_grad()
        losses.append([loss.item(), expected.item()])
    by_name, trainer, _ = fit(AutoEncoder, "deepspeed_stage_2_offload")
    own, _, _ = fit(AutoEncoder, "auto")
    trainer.save_checkpoint(sys.argv[1] + "/by_name.ckpt")
    evaluates = pl.Trainer(strategy="deepspeed_stage_2", accelerator="cpu", devices=1, logger=False, use_distributed_sampler=False, enable_progress_bar=False)
    read = torch.utils.data.DataLoader(Rows(False), batch_size=40)
    validated = evaluates.validate(AutoEncoder(), read, ckpt_path=sys.argv[1] + "/by_name.ckpt")[0]["val_loss"]
    print(json.dumps([losses, by_name["losses"], own["losses"], type(trainer.model).__name__, validated, own["validated"][-1]]))
    """, tmp_path,
    )  # fmt: skip
    assert status == 0, error
    losses, by_name, own, model, validated, own_validated = json.loads(out.splitlines()[-1])
    assert validated == pytest.approx(own_validated, abs=1e-5)
    assert [each for each, _ in losses] == pytest.approx([each for _, each in losses], abs=1e-5)
    assert by_name == pytest.approx(own, abs=1e-5) and model == "DeepSpeedEngine"
