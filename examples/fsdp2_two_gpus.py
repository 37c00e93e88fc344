"""QLoRA with FSDP2 on two small GPUs (2 x T4 is the model case), against one GPU, as one plot.

    python examples/fsdp2_two_gpus.py --model FOLDER_OR_NAME --text FILE --output OUT
    python examples/fsdp2_two_gpus.py --tiny --output OUT       # a made model, for a machine without a hub or GPUs

Three launches of this file train the same adapters on the same batches: on one GPU; on two, with what
examples/fsdp2_small_gpus.yaml sets (float16 with a scaled loss, parameters in host memory, sharded checkpoints), up to
the middle; and on two again from the checkpoint to the end. OUT gets curves.png, result.json and the adapter; the
program fails where the curves are further apart than AGREEMENT. Without GPUs two processes compute in float32.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import bitshard.fsdp
import qlora
import tiny
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

EXAMPLES = Path(__file__).resolve().parent
CUDA, WORLD = torch.cuda.is_available(), int(os.environ.get("WORLD_SIZE", "1"))
DTYPE = torch.float16 if CUDA else torch.float32  # a T4 has no bfloat16, and not every CPU multiplies float16
# Largest relative difference between the losses of one and of two GPUs at one step. float32: the order of sums over
# ranks. float16: gradients that are summed with 11 bits.
AGREEMENT = {torch.float32: 1e-5, torch.float16: 1e-2}
FIRST_SCALE = 2.0**12  # of float16's loss; it doubles every 2,000 steps without an overflow


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; `argv` replaces it when the script is called from Python."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub name of a causal language model")
    parser.add_argument("--text", help="UTF-8 text file to train on")
    parser.add_argument("--tiny", action="store_true", help="a made model and text instead, see examples/tiny.py")
    parser.add_argument("--output", default="two-gpus-out")
    parser.add_argument("--steps", type=int, default=40, help="half of them before the checkpoint")
    parser.add_argument("--batch", type=int, default=2, help="sequences per step, of all GPUs together")
    parser.add_argument("--length", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--worker", action="store_true", help="be one process of a launch")
    parser.add_argument("--resume", help="checkpoint folder that a worker goes on from")
    options = parser.parse_args(argv)
    if options.tiny:
        options.model, options.text = map(str, tiny.make(Path(options.output, "tiny").resolve()))
    if not (options.model and options.text):
        parser.error("give --model and --text, or --tiny")
    return options


# ---- one process of a launch ----


def build(options: argparse.Namespace) -> Trainer:
    """The trainer of this process; which way it shards is the launch's business."""
    set_seed(0)
    training = TrainingArguments(  # before the model: this starts the process group
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch // WORLD,
        learning_rate=options.lr,
        lr_scheduler_type="constant",  # one that depends on the number of steps would not survive the interruption
        fp16=CUDA,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=1,
        save_strategy="steps",
        save_steps=options.steps,
        report_to="none",
    )
    model = AutoModelForCausalLM.from_pretrained(
        options.model,
        dtype=DTYPE,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=DTYPE,
        ),
    )
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    return Trainer(
        model=get_peft_model(model, lora),  # peft makes adapters of float32, which float16's loss scaling needs
        args=training,
        train_dataset=qlora.cut(tokenizer, Path(options.text).read_text(encoding="utf-8"), options.length),
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )


def scale_losses(accelerator: Accelerator) -> None:
    """Let float16 begin, and resume, without a step that is lost.

    torch's first scale of 2^16 overflows gradients of float16 that are summed over ranks, and each overflow skips a
    step. And to load an optimizer under FSDP2, accelerate steps it once, with zeros in its gradients, where a scaler
    that has scaled nothing yet ends in an AssertionError ("_scale is None").
    """
    scaler = accelerator.scaler
    if scaler is not None:
        scaler.load_state_dict({**scaler.state_dict(), "scale": FIRST_SCALE})
        scaler.scale(torch.zeros((), device=accelerator.device))


def work(options: argparse.Namespace) -> None:
    """Train; rank 0 writes what happened, all save the adapter."""
    trainer = build(options)
    scale_losses(trainer.accelerator)
    trainer.train(resume_from_checkpoint=options.resume)
    share = bitshard.fsdp.measure(trainer.model)
    if WORLD > 1 and (share.fsdp != "FSDP2" or share.own_packed > 0.6 * share.packed):
        sys.exit(f"not sharded: {bitshard.fsdp.describe(trainer.model)}")
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        peak = torch.cuda.max_memory_allocated() / 2**30 if CUDA else None
        result = {"losses": losses, "peak_gib": peak, "sharding": bitshard.fsdp.describe(trainer.model)}
        Path(options.output, "run.json").write_text(json.dumps(result, indent=1))
    if WORLD > 1:  # a sharded checkpoint is for resuming, the adapter for everything else
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()


# ---- the launches ----


def launch(options: argparse.Namespace, name: str, processes: int, steps: int, resume: Path | None = None) -> dict:
    """Run workers until step `steps`; what rank 0 wrote."""
    output = Path(options.output, name)
    command = [sys.executable]
    environment = os.environ | {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // processes, 1))}
    if processes > 1:
        command += ["-m", "accelerate.commands.launch", "--config_file", str(EXAMPLES / "fsdp2_small_gpus.yaml")]
        command += ["--num_processes", str(processes), "--main_process_port", "0"]
    elif CUDA:
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if processes > 1 and not CUDA:  # see examples/cpu_fsdp.py; torch offloads to the host from GPUs only
        command += ["--mixed_precision", "no", "--fsdp_offload_params", "false", str(EXAMPLES / "cpu_fsdp.py")]
    command += [__file__, "--worker", "--output", str(output), "--steps", str(steps), "--model", options.model]
    command += ["--text", options.text, "--batch", str(options.batch), "--length", str(options.length)]
    command += ["--lr", str(options.lr), *(["--resume", str(resume)] if resume else [])]
    print(f"== {name}", flush=True)
    subprocess.run(command, env=environment, check=True)
    return json.loads((output / "run.json").read_text())


def plot(one: list[float], two: list[float], middle: int, file: Path) -> None:
    """Draw both curves over one another, and what sets them apart below."""
    try:
        import matplotlib
    except ImportError:
        sys.exit(f"no plot: pip install matplotlib. The losses are in {file.with_name('result.json')}")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(2, sharex=True, figsize=(7, 6), height_ratios=(2, 1), layout="constrained")
    steps, what = range(1, len(one) + 1), "GPU" if CUDA else "process"
    upper.plot(steps, one, "-", color="C0", linewidth=2.5, label=f"one {what}")
    upper.plot(steps, two, "--", color="C1", linewidth=2.5, label=f"two {what}s, FSDP2".replace("sss", "sses"))
    for axis in (upper, lower):
        axis.axvline(middle + 0.5, color="gray", linestyle=":", label="resumed from a sharded checkpoint")
    lower.plot(steps, apart(one, two), color="C1", marker=".")
    upper.set(title="QLoRA", ylabel="training loss (nats per token)")
    lower.set(xlabel="step", ylabel="relative difference")
    upper.legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def apart(one: list[float], two: list[float]) -> list[float]:
    """The relative difference at each step."""
    return [abs(a - b) / abs(a) for a, b in zip(one, two, strict=True)]


def main() -> None:
    """Launch, compare, plot; or be a worker."""
    options = parse()
    if options.worker:
        work(options)
        return
    Path(options.output).mkdir(parents=True, exist_ok=True)
    middle, output = options.steps // 2, Path(options.output)
    one = launch(options, "one", 1, options.steps)
    first = launch(options, "two", 2, middle)
    rest = launch(options, "resumed", 2, options.steps, output / "two" / f"checkpoint-{middle}")
    two = first["losses"] + rest["losses"][-(options.steps - middle) :]
    gap = max(apart(one["losses"], two))
    bound = AGREEMENT[DTYPE]
    result = {"gap": gap, "bound": bound, "one": one, "two": first, "resumed": rest}
    (output / "result.json").write_text(json.dumps(result, indent=1))
    print(f"{rest['sharding']}\nlargest relative difference at one step: {gap:.1e} (bound {bound:.0e})", flush=True)
    plot(one["losses"], two, middle, output / "curves.png")
    if not gap <= bound:
        sys.exit("one and two GPUs disagree")


if __name__ == "__main__":
    main()
