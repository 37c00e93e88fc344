"""Trainers as they are with BITSHARD_FAST=1, their steps as graphs by the stand-in: losses, and what ran as graphs."""

import pytest
import torch

peft = pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
trl = pytest.importorskip("trl", reason="trl is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")

from bitshard import graphs  # noqa: E402
from bitshard.graphs import enabled  # noqa: E402
from helpers import switches as environment  # noqa: E402
from helpers.graphs import StandIn  # noqa: E402
from helpers.llama import TOKENS, load_4bit, save_llama  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
FIRST = "the first of its form"
SETTINGS = {
    **{"max_steps": 6, "per_device_train_batch_size": 2, "learning_rate": 3e-3, "logging_steps": 1, "seed": 5},
    **{"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False},
    **{"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}, "max_grad_norm": 0.5},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_llama(folder)
    return folder


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(enabled, "RECORDER", StandIn)


def lora_config(dropout=0.0):
    return peft.LoraConfig(
        r=4, lora_dropout=dropout, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
    )


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(TOKENS - 3))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def text(seed, words):
    numbers = torch.randint(0, TOKENS - 3, (words,), generator=torch.Generator().manual_seed(seed)).tolist()
    return " ".join(f"w{number}" for number in numbers)


def by_trainer(folder, out, dropout=0.0, lengths=(9, 9, 6), resume=False, **options):
    """Padded batches; a collator that sends attention_mask."""

    def collate(rows):
        longest = 10
        ids = torch.tensor([row["ids"] + [0] * (longest - len(row["ids"])) for row in rows])
        mask = torch.tensor([[1] * len(row["ids"]) + [0] * (longest - len(row["ids"])) for row in rows])
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    rows = [{"ids": [3 + (7 * i + j) % 90 for j in range(lengths[i % len(lengths)])]} for i in range(24)]
    transformers.set_seed(3)
    model = peft.get_peft_model(load_4bit(folder), lora_config(dropout))
    arguments = {"output_dir": str(out), "remove_unused_columns": False, **SETTINGS, **options}
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**arguments),
        train_dataset=rows,
        eval_dataset=rows[:4],
        data_collator=collate,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def resumed(folder, out):
    """Evaluation and saving between, then another process's training from the checkpoint."""
    between = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 3}
    by_trainer(folder, out, **between, max_steps=3)
    return by_trainer(folder, out, **between, resume=str(out / "checkpoint-3"))


def by_sft(folder, out, **options):
    rows = {"text": [text(i, 5 + i % 3) for i in range(24)]}
    transformers.set_seed(3)
    trainer = trl.SFTTrainer(
        model=load_4bit(folder),
        args=trl.SFTConfig(output_dir=str(out), max_length=16, **SETTINGS, **options),
        train_dataset=datasets.Dataset.from_dict(rows),
        processing_class=tokenizer(),
        peft_config=lora_config(),
    )
    trainer.train()
    return trainer


def by_dpo(folder, out):
    kinds = {"prompt": (1, 3), "chosen": (2, 4), "rejected": (3, 4)}
    rows = {name: [text(10 * i + seed, n) for i in range(24)] for name, (seed, n) in kinds.items()}
    transformers.set_seed(3)
    trainer = trl.DPOTrainer(
        model=load_4bit(folder),
        args=trl.DPOConfig(output_dir=str(out), max_length=16, **SETTINGS),
        train_dataset=datasets.Dataset.from_dict(rows),
        processing_class=tokenizer(),
        peft_config=lora_config(),
    )
    trainer.train()
    return trainer


def by_grpo(folder, out):
    transformers.set_seed(3)
    trainer = trl.GRPOTrainer(
        model=load_4bit(folder),
        reward_funcs=lambda completions, **_: [float(len(set(words.split()))) for words in completions],
        args=trl.GRPOConfig(output_dir=str(out), max_completion_length=4, num_generations=2, beta=0.1, **SETTINGS),
        train_dataset=datasets.Dataset.from_dict({"prompt": [text(i, 4) for i in range(8)]}),
        processing_class=tokenizer(),
        peft_config=lora_config(),
    )
    trainer.train()
    return trainer


JOBS = {
    "padded": (by_trainer, 2),
    "one length": (lambda *args: by_trainer(*args, lengths=(10,)), 5),
    "dropout": (lambda *args: by_trainer(*args, dropout=0.3), 2),
    "accumulation": (lambda *args: by_trainer(*args, gradient_accumulation_steps=4), 18),
    "label smoothing": (lambda *args: by_trainer(*args, label_smoothing_factor=0.1), 2),
    "evaluation, saving, resume": (resumed, 1),
    "SFT": (by_sft, 2),
    "SFT, packed": (lambda *args: by_sft(*args, packing=True), 2),
    "DPO": (by_dpo, 3),
    "GRPO": (by_grpo, 3),
}


def losses(trainer):
    kept = ("loss", "eval_loss", "grad_norm", "reward", "mean_token_accuracy", "rewards/margins")
    return [{name: entry[name] for name in kept if name in entry} for entry in trainer.state.log_history]


@pytest.mark.parametrize("name", JOBS)
def test_a_job_is_that_without_graphs(folder, tmp_path, name):
    job, replays = JOBS[name]
    with environment.set_to(FUSE="1"):
        expected = losses(job(folder, tmp_path / "plain"))
    with environment.set_to(FAST="1") as given:
        pass
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BITSHARD_FAST", "1")
        environment.switches.read()
        try:
            trainer = job(folder, tmp_path / "graphs")
        finally:
            patch.undo()
            environment.switches.read()
    said = graphs.report(trainer.model)
    assert losses(trainer) == expected and len(expected) >= 3 and not given
    assert said.replays >= replays, said
    assert set(said.eager) <= {FIRST}, said


def test_trl_asks_whether_to_take_positions_out():
    """By this name, which is replaced while a graph is recorded: on a GPU it would wait for the number of labels."""
    import inspect

    from bitshard.graphs import masks
    from trl.trainer import utils

    if not hasattr(utils, "add_fused_lm_head"):
        pytest.skip("this trl has no fused head")
    assert inspect.getsource(utils).count(f"{masks._CHOICE}(") == 1
    assert "if compact else" in inspect.getsource(utils.add_fused_lm_head)
    before = utils._use_triton
    with masks.every_position():
        assert utils._use_triton(torch.device("cuda")) is False
    assert utils._use_triton is before


@pytest.mark.parametrize("name", ["SFT", "DPO"])
def test_positions_without_a_label_change_nothing(folder, tmp_path, name, monkeypatch):
    """Losses of trl's way on GPUs, without graphs, and of graphs, which score every position."""
    from trl.trainer import utils

    job = JOBS[name][0]
    if hasattr(utils, "_use_triton"):
        monkeypatch.setattr(utils, "_use_triton", lambda device: True)
    expected = [entry["loss"] for entry in losses(job(folder, tmp_path / "plain")) if "loss" in entry]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BITSHARD_GRAPHS", "1")
        environment.switches.read()
        try:
            trainer = job(folder, tmp_path / "graphs")
        finally:
            patch.undo()
            environment.switches.read()
    found = [entry["loss"] for entry in losses(trainer) if "loss" in entry]
    assert found == pytest.approx(expected, rel=1e-4) and len(found) >= 3
    assert graphs.report(trainer.model).replays >= 2
