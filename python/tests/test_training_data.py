"""initialize(training_data=): micro-batches in the order of DeepSpeed's loader, which is torch's DistributedSampler's."""

import itertools
import json

import pytest

torch = pytest.importorskip("torch")

import penstock  # noqa: E402
import penstock.deepspeed as deepspeed  # noqa: E402
from engine_models import all_names, batches, net, plain_losses, step  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler  # noqa: E402

SAMPLES = [{name: value[row] for name, value in batch.items()} for batch in batches(3) for row in range(4)][:10]


def config(tmp_path, **more):
    nvme = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}
    return {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "zero_optimization": nvme, **more}


def expected_batches(world=1, rank=0, **options):
    sampler = DistributedSampler(SAMPLES, world, rank)
    return list(DataLoader(SAMPLES, 4, sampler=sampler, **options))


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a[name], b[name]) for a, b in zip(one, other) for name in b)


def test_training_from_the_loader_is_plain_training(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, _, loader, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config(tmp_path), training_data=SAMPLES)
    assert engine.training_dataloader is loader and len(loader) == 3
    made = [step(engine, batch) for batch in itertools.islice(deepspeed.utils.RepeatingLoader(loader), 10)]
    engine.destroy()
    expected, _ = plain_losses(net(), all_names(net()), [[batch] for batch in itertools.islice(itertools.cycle(expected_batches()), 10)])
    assert made == pytest.approx(expected, abs=1e-5)


def test_collate_fn_and_the_last_batch(tmp_path, recwarn):
    model = net()
    given = config(tmp_path, dataloader_drop_last=True)
    engine, _, loader, _ = deepspeed.initialize(model=model, config=given, training_data=SAMPLES, collate_fn=lambda items: [len(items)])
    assert list(loader) == [[4], [4]] and len(loader) == 2 and engine.dataloader_drop_last()
    assert not any("dataloader_drop_last" in str(warning.message) for warning in recwarn)
    in_order = engine.deepspeed_io(SAMPLES, batch_size=5, route="eval", collate_fn=torch.utils.data.default_collate, num_local_io_workers=0)
    assert same(list(in_order), [torch.utils.data.default_collate(SAMPLES[begin : begin + 5]) for begin in (0, 5)])
    for wrong in (iter(SAMPLES), 7):
        with pytest.raises(TypeError, match="give it to a torch.utils.data.DataLoader yourself"):
            engine.deepspeed_io(wrong)
    engine.destroy()


def test_an_epoch_can_be_set_and_next_wants_iter():
    from deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader

    loader = DeepSpeedDataLoader(SAMPLES, 4, pin_memory=False, local_rank=0, tput_timer=None, num_local_io_workers=0)
    with pytest.raises(TypeError, match="iter"):
        next(loader)
    first = list(loader)
    assert same(first, expected_batches()) and same(list(loader), first)
    loader.data_sampler.set_epoch(1)
    assert not same(list(loader), first)
    assert list(itertools.islice(RepeatingLoader([1, 2]), 5)) == [1, 2, 1, 2, 1]


def test_penstocks_own_name_has_it(tmp_path):
    model = net()
    engine, _, loader, _ = penstock.initialize(model, {"train_micro_batch_size_per_gpu": 4}, training_data=SAMPLES, offload="none")
    assert same(list(loader), expected_batches())
    engine.close()
    with pytest.raises(ValueError, match="train_micro_batch_size_per_gpu"):
        penstock.initialize(net(), training_data=SAMPLES, offload="none")


RANK = """
    import json, sys
    import penstock.deepspeed as deepspeed, torch
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": sys.argv[1]}}}
    model = torch.nn.Linear(2, 2)
    engine, _, loader, _ = deepspeed.initialize(model=model, config=config, training_data=list(range(10)))
    print("TOLD", json.dumps([batch.tolist() for batch in loader]))
"""


def test_each_rank_has_its_part(on_ranks, tmp_path):
    told = []
    for status, out, err in on_ranks(RANK, 2, tmp_path):
        assert status == 0, err[-2000:]
        told.append(json.loads(out.split("TOLD ")[1]))
    for rank, found in enumerate(told):
        assert found == [batch.tolist() for batch in DataLoader(range(10), 2, sampler=DistributedSampler(range(10), 2, rank))]
    assert sorted(each for rank in told for batch in rank for each in batch) == list(range(10))
