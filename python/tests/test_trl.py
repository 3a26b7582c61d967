"""TRL's trainers with deepspeed=: losses are those without it."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("trl")

TRAINS = """
    import os, sys, tempfile
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getpid() % 20000))
    import penstock.deepspeed
    import datasets, torch, transformers, trl
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(["a b c d e f g h"] * 3, trainers.WordLevelTrainer(special_tokens=["<unk>", "<eos>"]))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>")

    def model():
        torch.manual_seed(0)
        sizes = dict(vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, pad_token_id=1, eos_token_id=1))

    def losses(trains, given, directory, deepspeed, **models):
        config, trainer, data = trains, given[0], given[1]
        arguments = config(
            output_dir=directory + "/out", max_steps=3, per_device_train_batch_size=2, logging_steps=1, report_to=[], save_strategy="no",
            deepspeed=deepspeed, use_cpu=True, bf16=False, fp16=False, gradient_checkpointing=False, disable_tqdm=True,
        )
        made = trainer(model=model(), args=arguments, train_dataset=datasets.Dataset.from_list(data), processing_class=tokenizer, **models)
        made.train()
        return [float(entry["loss"]) for entry in made.state.log_history if "loss" in entry]

    for name in sys.argv[1:]:
        config, given = trl.SFTConfig, (trl.SFTTrainer, [{"text": "a b c d e f g h"}] * 8)
        found = []
        for engine in (False, True):
            with tempfile.TemporaryDirectory() as directory:
                zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": directory}}
                described = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "zero_optimization": zero}
                found.append(losses(config, given, directory, described if engine else None))
        assert len(found[1]) == 3 and max(abs(one - other) for one, other in zip(*found)) < 1e-5, found
        print(name, found)
"""


@pytest.mark.parametrize("trainer", ["SFT"])
def test_losses_are_those_without_it(in_child, trainer):
    status, out, err = in_child(TRAINS, trainer, timeout=900)
    assert status == 0 and trainer in out, err[-3000:]
