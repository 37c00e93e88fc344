"""A few QLoRA steps of a tiny Llama with `Trainer`, in one process or on several, as a tool would set them up.

--patch axolotl   axolotl's patches of FSDP2, as its loader applies them for `fsdp_version: 2` and `load_in_4bit`
--patch unsloth   unsloth's wrapper around accelerate's FSDP2 preparation
--zero 2|3        DeepSpeed, through `TrainingArguments(deepspeed=...)`
"""

import os
from pathlib import Path

import torch
from common import LENGTH, ROWS, TOKENS, base_bytes, make_model, package_without_init, run, spies, wrong_bytes

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def axolotl():
    """What axolotl.loaders.patch_manager does before it loads a model, and what its Accelerator then uses."""
    from axolotl.monkeypatch import fsdp2_qlora
    from axolotl.monkeypatch.accelerate.fsdp2 import patch_accelerate_fsdp2

    fsdp2_qlora.apply_init_sharded_param_patch()
    fsdp2_qlora.apply_init_unsharded_param_patch()
    fsdp2_qlora.apply_init_dtype_attrs_patch()
    assert fsdp2_qlora.apply_init_sharded_param_patch._axolotl_patched
    assert fsdp2_qlora.apply_init_unsharded_param_patch._axolotl_patched
    patch_accelerate_fsdp2()


def unsloth():
    """unsloth.models.fsdp2_qlora around accelerate's preparation, as unsloth.models.fsdp2 puts it there.

    The files themselves: the package's `__init__`, and what is done after the wrap, ask for triton.
    """
    import accelerate.accelerator

    for name in ("unsloth", "unsloth.models"):
        package_without_init(name)
    from unsloth.models.fsdp2_qlora import fsdp2_qlora_wrap

    original = accelerate.accelerator.fsdp2_prepare_model

    def prepare(accelerator, model):
        with fsdp2_qlora_wrap(model, original) as info:
            assert info["patched"] and not info["reverted"], info
            return original(accelerator, model)

    accelerate.accelerator.fsdp2_prepare_model = prepare


def deepspeed(stage, bf16):
    return {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": bf16},
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
    }


def load(args, config_class):
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, args.dtype)
    options = {} if args.storage == "default" else {"bnb_4bit_quant_storage": getattr(torch, args.storage)}
    config = config_class(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        **options,
    )
    return AutoModelForCausalLM.from_pretrained(
        args.model, dtype=dtype, quantization_config=config, device_map=args.map
    )


def main(options):
    options.add_argument("--model", type=Path, required=True, help="folder; made where it is missing")
    options.add_argument("--patch", default="none", choices=["none", "axolotl", "unsloth"])
    options.add_argument("--zero", type=int, default=0)
    options.add_argument("--dtype", default="float32")
    options.add_argument("--storage", default="default")
    options.add_argument("--dora", action="store_true")
    options.add_argument("--sft", action="store_true", help="trl's SFTTrainer, which adds the adapter itself")
    options.add_argument("--bf16", action="store_true", help="mixed precision")
    options.add_argument("--loaded-by", default="cpu", choices=["cpu", "none"], help="device_map")
    args = options.parse_args()
    args.map = {"": "cpu"} if args.loaded_by == "cpu" else None
    if not args.model.exists():
        make_model(args.model)
    torch.set_num_threads(1)
    {"axolotl": axolotl, "unsloth": unsloth, "none": lambda: None}[args.patch]()
    import datasets
    from peft import LoraConfig, get_peft_model
    from transformers import BitsAndBytesConfig, PreTrainedTokenizerFast, Trainer, TrainingArguments, set_seed
    from trl import SFTConfig, SFTTrainer

    if args.sft:
        config_class, extra = SFTConfig, {"max_length": LENGTH, "bf16": False, "gradient_checkpointing": False}
    else:
        config_class, extra = TrainingArguments, {"bf16": args.bf16}

    arguments = config_class(
        output_dir=str(args.out / "run"),
        per_device_train_batch_size=4 // WORLD,
        max_steps=4,
        learning_rate=1e-2,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        seed=5,
        use_cpu="ACCELERATE_USE_FSDP" not in os.environ,
        **extra,
        **({"deepspeed": deepspeed(args.zero, args.bf16)} if args.zero else {}),
    )
    model = load(args, BitsAndBytesConfig)
    watched = spies(model)
    set_seed(3)
    lora = LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=args.dora, lora_dropout=0.0
    )
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(3, TOKENS, (ROWS, LENGTH), generator=generator).tolist()
    data = datasets.Dataset.from_dict({"input_ids": rows, "labels": rows, "attention_mask": [[1] * LENGTH] * ROWS})
    if args.sft:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model)
        trainer = SFTTrainer(
            model=model, args=arguments, train_dataset=data, processing_class=tokenizer, peft_config=lora
        )
    else:
        trainer = Trainer(model=get_peft_model(model, lora), args=arguments, train_dataset=data)
    trainer.train()
    return (
        args,
        {
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "wrong": wrong_bytes(watched),
            "base": base_bytes(trainer.model),
            "wrapped": type(trainer.model_wrapped).__name__,
        },
    )


run(main)
