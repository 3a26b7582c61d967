"""A program of peft and Hugging Face's Trainer that knows nothing of Penstock: one training for each kind of adapter, what it saves, and what is
left when the adapter is merged into the model."""

import json
import sys


MERGED = ("LoRA", "DoRA", "AdaLoRA", "parameters", "experts", "tokens", "second of two")


def main(methods, steps, out, deepspeed):
    import peft
    import torch
    import transformers
    from accelerate.state import AcceleratorState

    transformers.logging.set_verbosity_error()
    targets = ["q_proj", "v_proj"]
    kinds = {
        "LoRA": lambda: peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"),
        "DoRA": lambda: peft.LoraConfig(r=4, target_modules=targets, use_dora=True, task_type="CAUSAL_LM"),
        "IA3": lambda: peft.IA3Config(target_modules=[*targets, "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
        "VeRA": lambda: peft.VeraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"),
        "AdaLoRA": lambda: peft.AdaLoraConfig(
            init_r=4, target_r=2, tinit=2, tfinal=4, deltaT=2, total_step=steps, target_modules=targets, task_type="CAUSAL_LM"
        ),
        "parameters": lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["mlp.down_proj.weight"], task_type="CAUSAL_LM"),
        "experts": lambda: peft.LoraConfig(
            r=4, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"], task_type="CAUSAL_LM"
        ),
        "tokens": lambda: peft.LoraConfig(r=4, target_modules=targets, trainable_token_indices=[5, 6, 70], task_type="CAUSAL_LM"),
        "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
        "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
        "P-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=16, task_type="CAUSAL_LM"),
        "second of two": lambda: peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"),
    }

    class Allocate(transformers.TrainerCallback):
        """As peft's pages say: once each step, after it and before zero_grad."""

        def on_optimizer_step(self, args, state, control, model=None, **_):
            if hasattr(model.base_model, "update_and_allocate"):
                model.base_model.update_and_allocate(state.global_step + 1)

    for method in methods:
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(0)
        size = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
        if method == "experts":
            model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**size, num_local_experts=4))
        else:
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size))
        model = peft.get_peft_model(model, kinds[method]())
        if method == "second of two":
            model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"], task_type="CAUSAL_LM"))
            model.set_adapter("second")
        data = [{"input_ids": torch.randint(3, 99, (16,))} for _ in range(32)]
        for each in data:
            each["labels"] = each["input_ids"].clone()

        class Watch(transformers.TrainerCallback):
            def on_log(self, args, state, control, logs=None, **_):
                if "loss" in logs:
                    print("TOLD", json.dumps([f"{method} {state.global_step}", float(logs["loss"]), float(logs["grad_norm"])]), flush=True)  # noqa: B023

        args = transformers.TrainingArguments(
            output_dir=f"{out}/{method}", per_device_train_batch_size=4, max_steps=steps, logging_steps=1, save_strategy="no", report_to=[],
            deepspeed=deepspeed, learning_rate=1e-2, weight_decay=0.1, use_cpu=True, disable_tqdm=True,
            max_grad_norm=1e6 if method == "AdaLoRA" else 1.0,  # it looks at gradients, which DeepSpeed gives as they are before clipping
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=args, train_dataset=data, callbacks=[Watch(), Allocate()])
        trainer.train()
        trainer.save_model(f"{out}/{method}/final")
        place = f"{out}/{method}/final" + ("/second" if method == "second of two" else "")
        saved = peft.utils.load_peft_weights(place, device="cpu")
        total = sum(float(value.double().abs().sum()) for value in saved.values())
        print("TOLD", json.dumps([f"{method} saved", sorted(saved), total]), flush=True)
        if method not in MERGED:
            continue
        merged = model.merge_and_unload()  # whose engine goes on
        merged.save_pretrained(f"{out}/{method}/merged")
        found = type(merged).from_pretrained(f"{out}/{method}/merged").state_dict()
        total = sum(float(value.double().abs().sum()) for value in found.values())
        print("TOLD", json.dumps([f"{method} merged", sorted(found), total]), flush=True)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
