"""transformers' Trainer with the options that LLaMA-Factory and axolotl give it: losses, norms, rates and evaluations are those without deepspeed=."""

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")
if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("its options are those of transformers 5", allow_module_level=True)

# All of them without an engine first: transformers and accelerate remember that there was one.
TRAINS = """
    import os, sys
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getpid() % 20000))
    import penstock.deepspeed
    import peft, torch, transformers
    from accelerate.state import AcceleratorState
    transformers.logging.set_verbosity_error()
    place = sys.argv[1]

    def llama(**more):
        torch.manual_seed(0)
        sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **more))

    def t5():
        torch.manual_seed(0)
        sizes = dict(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, dropout_rate=0.0)
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))

    def lora():
        return peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))

    def texts(lengths=(16,)):
        draw = torch.Generator().manual_seed(1)
        found = [torch.randint(3, 99, (lengths[number % len(lengths)],), generator=draw) for number in range(48)]
        return [{"input_ids": each, "labels": each.clone(), "attention_mask": torch.ones_like(each)} for each in found]

    def padded(items):
        fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        return {name: torch.nn.utils.rnn.pad_sequence([each[name] for each in items], True, value) for name, value in fill.items()}

    def right(predicted):
        labels = predicted.label_ids[:, 1:]
        return {"right": float((predicted.predictions[0 if isinstance(predicted.predictions, tuple) else ...].argmax(-1)[:, :-1] == labels).mean())}

    def generated(predicted):
        return {"sum": float(predicted.predictions.sum())}

    class TooLarge(transformers.Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            if len(inputs["input_ids"]) > 2 and model.training:
                raise RuntimeError("CUDA out of memory.")
            return super().compute_loss(model, inputs, *args, **kwargs)

    evaluates = dict(eval_strategy="steps", eval_steps=4, per_device_eval_batch_size=4)
    saves = dict(save_strategy="steps", save_steps=4)
    of_several_lengths = dict(data=texts((6, 16, 11, 9)), data_collator=padded)
    cases = {
        "accumulation": dict(gradient_accumulation_steps=3, max_grad_norm=0.3, lr_scheduler_type="cosine", warmup_steps=2, average_tokens_across_devices=False),
        "group_by_length": dict(
            of_several_lengths, train_sampling_strategy="group_by_length", label_smoothing_factor=0.1, lr_scheduler_type="constant_with_warmup",
            warmup_steps=3,
        ),
        "neftune": dict(
            neftune_noise_alpha=5.0, max_grad_norm=0.0, weight_decay=0.1, lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 1e-4},
        ),
        "neftune_accumulated": dict(neftune_noise_alpha=5.0, gradient_accumulation_steps=2, lr_scheduler_type="polynomial"),
        "plateau": dict(evaluates, lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0}, metric_for_best_model="loss"),
        "metrics": dict(evaluates, compute_metrics=right, eval_accumulation_steps=1, eval_on_start=True, include_num_input_tokens_seen="all"),
        "best": dict(evaluates, **saves, load_best_model_at_end=True, save_total_limit=1, learning_rate=5e-2),
        "best_lora": dict(evaluates, **saves, model=lora, load_best_model_at_end=True, save_total_limit=1, learning_rate=5e-2),
        "only_model": dict(
            saves, save_only_model=True, save_total_limit=1, activation_checkpointing=True, num_train_epochs=1, max_steps=-1, dataloader_drop_last=True,
            lr_scheduler_type="inverse_sqrt", warmup_steps=2,
        ),
        "batch_found": dict(auto_find_batch_size=True, kind=TooLarge, stage=2),  # transformers refuses it with stage 3
        "resume": dict(saves, resume=4, lr_scheduler_type="cosine", gradient_accumulation_steps=2),
        "seq2seq": dict(
            evaluates, model=t5, kind=transformers.Seq2SeqTrainer, predict_with_generate=True, generation_max_length=6, generation_num_beams=2,
            compute_metrics=generated,
        ),
        "bf16": dict(bf16=True, tolerance=0.05),
    }

    def run(name, deepspeed):
        AcceleratorState._reset_state(reset_partial_state=True)
        options = dict(cases[name])
        out = os.path.join(place, name + ("-ours" if deepspeed else "-plain"))
        model, data, kind = options.pop("model", llama)(), options.pop("data", texts()), options.pop("kind", transformers.Trainer)
        given = {each: options.pop(each) for each in ("data_collator", "compute_metrics") if each in options}
        resume, _ = options.pop("resume", None), options.pop("tolerance", None)
        nvme = {"device": "nvme", "nvme_path": place}
        zero = {"stage": options.pop("stage", 3), "offload_optimizer": nvme, "stage3_gather_16bit_weights_on_model_save": True}
        zero.update({"offload_param": nvme} if zero["stage"] == 3 else {})
        described = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}
        described.update(train_batch_size="auto", bf16={"enabled": "auto"}, zero_optimization=zero)
        known = dict(save_strategy="no", max_steps=10, learning_rate=1e-2, per_device_train_batch_size=4, logging_steps=1, disable_tqdm=True)
        known = {**known, "report_to": [], "use_cpu": True, "deepspeed": described if deepspeed else None, **options}
        maker = transformers.Seq2SeqTrainingArguments if kind is transformers.Seq2SeqTrainer else transformers.TrainingArguments
        made = kind(model=model, args=maker(output_dir=out, **known), train_dataset=data, eval_dataset=data[:8], **given)
        made.train()
        if resume:
            made = kind(model=llama(), args=maker(output_dir=out, **known), train_dataset=data, eval_dataset=data[:8], **given)
            made.train(resume_from_checkpoint=os.path.join(out, f"checkpoint-{resume}"))
        told = [
            {key: value for key, value in entry.items() if not key.endswith(("runtime", "per_second", "flos"))} for entry in made.state.log_history
        ]
        told.append({"eval_after": made.evaluate()["eval_loss"], "kept": sorted(each for each in os.listdir(out) if each.startswith("checkpoint"))})
        made.save_model(out + "/final")
        return told, out + "/final"

    names = sys.argv[2:]
    plain, ours = ({name: run(name, deepspeed) for name in names} for deepspeed in (False, True))
    for name in names:
        (expected, _), (told, saved) = plain[name], ours[name]
        tolerance = cases[name].get("tolerance", 1e-5)
        assert [sorted(entry) for entry in told] == [sorted(entry) for entry in expected], (name, expected, told)
        for one, other in zip(told, expected):
            for key, value in other.items():
                near = tolerance * 10 if "norm" in key or "right" in key else tolerance
                assert one[key] == value if isinstance(value, list) else abs(float(one[key]) - float(value)) <= near, (name, key, other, one)
        assert any(each.endswith(".safetensors") for each in os.listdir(saved)), name
        print("trained", name, flush=True)
"""

NAMES = ["accumulation", "group_by_length", "neftune", "neftune_accumulated", "plateau", "metrics", "best", "best_lora", "only_model", "batch_found"]
NAMES += ["resume", "seq2seq", "bf16"]


def test_options_do_what_they_do_without_it(in_child, tmp_path):
    status, out, err = in_child(TRAINS, tmp_path, *NAMES, timeout=900)
    assert status == 0, err[-3000:]
    assert [line.split()[1] for line in out.splitlines() if line.startswith("trained")] == NAMES
    assert not [each for each in tmp_path.iterdir() if each.name.startswith("penstock-swap")]
