"""Trainers as they are with BITSHARD_FAST=1, their steps as graphs by the stand-in: losses, and what ran as graphs."""

import pytest
import torch

peft = pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
trl = pytest.importorskip("trl", reason="trl is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")

from bitshard import graphs  # noqa: E402
from helpers import switches as environment  # noqa: E402
from helpers.llama import TOKENS, load_4bit  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
FIRST = "the first of its form"
SETTINGS = {
    **{"max_steps": 6, "per_device_train_batch_size": 2, "learning_rate": 3e-3, "logging_steps": 1, "seed": 5},
    **{"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False},
    **{"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}, "max_grad_norm": 0.5},
}


pytestmark = pytest.mark.usefixtures("played_graphs")


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


def by_trl(folder, trainer, config, rows, **options):
    transformers.set_seed(3)
    made = trainer(
        model=load_4bit(folder),
        args=config,
        train_dataset=datasets.Dataset.from_dict(rows),
        processing_class=tokenizer(),
        peft_config=lora_config(),
        **options,
    )
    made.train()
    return made


def texts(**kinds):
    """{name: 24 texts of so many words}, by {name: (seed, words)}."""
    return {name: [text(10 * i + seed, n) for i in range(24)] for name, (seed, n) in kinds.items()}


def by_sft(folder, out, **options):
    config = trl.SFTConfig(output_dir=str(out), max_length=16, **SETTINGS, **options)
    return by_trl(folder, trl.SFTTrainer, config, {"text": [text(i, 5 + i % 3) for i in range(24)]})


def by_dpo(folder, out):
    config = trl.DPOConfig(output_dir=str(out), max_length=16, **SETTINGS)
    return by_trl(folder, trl.DPOTrainer, config, texts(prompt=(1, 3), chosen=(2, 4), rejected=(3, 4)))


def by_kto(folder, out):
    config = trl.KTOConfig(output_dir=str(out), max_length=16, **SETTINGS)
    rows = {**texts(prompt=(1, 3), completion=(2, 4)), "label": [i % 2 == 0 for i in range(24)]}
    return by_trl(folder, trl.KTOTrainer, config, rows)


def by_grpo(folder, out):
    config = trl.GRPOConfig(output_dir=str(out), max_completion_length=4, num_generations=2, beta=0.1, **SETTINGS)

    def rewards(completions, **_):
        return [float(len(set(words.split()))) for words in completions]

    return by_trl(folder, trl.GRPOTrainer, config, {"prompt": [text(i, 4) for i in range(8)]}, reward_funcs=rewards)


class Loop:
    """What a loop with accelerate leaves, as trainers do."""

    def __init__(self, model, history):
        self.model, self.state = model, transformers.TrainerState(log_history=history)


def by_accelerate(folder, out):
    """Accumulation and clipping by accelerate, an evaluation after each epoch."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    transformers.set_seed(3)
    model = peft.get_peft_model(load_4bit(folder), lora_config())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    rows = [{"input_ids": torch.randint(0, TOKENS, (8,)), "attention_mask": torch.ones(8).long()} for _ in range(8)]
    data = torch.utils.data.DataLoader([{**row, "labels": row["input_ids"]} for row in rows], batch_size=2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    history = []
    for _ in range(3):
        model.train()
        for given in data:
            with accelerator.accumulate(model):
                loss = model(**given, use_cache=False).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    history.append({"grad_norm": float(accelerator.clip_grad_norm_(model.parameters(), 0.5))})
                optimizer.step()
                optimizer.zero_grad()
            history.append({"loss": loss.item()})
        model.eval()
        with torch.no_grad():
            history.append({"eval_loss": model(**given).loss.item()})
    return Loop(accelerator.unwrap_model(model), history)


JOBS = {
    "accelerate": (by_accelerate, 11),
    "padded": (by_trainer, 2),
    "one length": (lambda *args: by_trainer(*args, lengths=(10,)), 5),
    "dropout": (lambda *args: by_trainer(*args, dropout=0.3), 2),
    "accumulation": (lambda *args: by_trainer(*args, gradient_accumulation_steps=4), 18),
    "label smoothing": (lambda *args: by_trainer(*args, label_smoothing_factor=0.1), 2),
    "evaluation, saving, resume": (resumed, 1),
    "SFT": (by_sft, 2),
    "SFT, packed": (lambda *args: by_sft(*args, packing=True), 2),
    "DPO": (by_dpo, 3),
    "KTO": (by_kto, 3),
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
    with environment.read_as(FAST="1"):
        trainer = job(folder, tmp_path / "graphs")
    said = graphs.report(trainer.model)
    assert losses(trainer) == expected and len(expected) >= 3 and not given
    assert said.replays >= replays, said
    assert set(said.eager) <= {FIRST}, said


@pytest.mark.parametrize(
    "job, values, waits",
    [
        (by_trainer, {"FAST": "1"}, False),
        (by_sft, {"FAST": "1"}, False),
        (by_trainer, {"GRAPHS": "1", "NO_LOSS_WAIT": "1"}, False),
        (by_trainer, {"FAST": "1", "NO_LOSS_WAIT": "0"}, True),
        (by_trainer, {"FAST": "1", "GRAPHS": "0"}, True),  # launches nothing
    ],
)
def test_a_trainer_whose_steps_are_graphs_does_not_wait_for_losses(folder, tmp_path, job, values, waits, caplog):
    caplog.set_level("INFO", logger="bitshard")
    with environment.read_as(**values):
        trainer = job(folder, tmp_path)
    lines = [text for text in caplog.messages if "NO_LOSS_WAIT=1" in text or "logging_nan_inf_filter" in text]
    assert trainer.args.logging_nan_inf_filter is waits and len(lines) == (not waits)
    assert waits or f"this {type(trainer).__name__} has logging_nan_inf_filter=False" in lines[0]


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
    with environment.read_as(GRAPHS="1"):
        trainer = job(folder, tmp_path / "graphs")
    found = [entry["loss"] for entry in losses(trainer) if "loss" in entry]
    assert found == pytest.approx(expected, rel=1e-4) and len(found) >= 3
    assert graphs.report(trainer.model).replays >= 2


def test_masks_are_those_without_a_graph(folder, monkeypatch):
    """While a graph is recorded transformers makes every mask; here attention gets what it gets without one."""
    from bitshard.graphs import masks
    from transformers import masking_utils

    got, recording, attention = [], [], torch.nn.functional.scaled_dot_product_attention

    def attends(*args, attn_mask=None, **kwargs):
        got.append(None if attn_mask is None else attn_mask.clone())
        return attention(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attends)
    monkeypatch.setattr(masking_utils, "is_tracing", lambda *_: bool(recording))
    model = load_4bit(folder).train()
    ids = torch.arange(24).view(2, 12)
    padding = torch.ones_like(ids)
    padding[0, -3:] = 0
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    calls = {
        "no mask": {"input_ids": ids},
        "ones": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        "zeros": {"input_ids": ids, "attention_mask": padding},
        "packed": {"input_ids": ids[:1], "position_ids": positions},
    }
    for name, given in calls.items():
        notes = []
        with masks.noted(notes):
            model(**given, use_cache=False)
        recording.append(name)
        with masks.given(notes):
            model(**given, use_cache=False)
        model(**given, use_cache=False)
        recording.clear()
        without, recorded, made = got
        got.clear()
        assert (without is None) is (name in ("no mask", "ones")) is (notes == [None]), name
        assert (recorded is None) is (without is None), name
        assert without is None or torch.equal(recorded, without), name
        assert made is not None, name


def test_no_number_is_copied_to_a_device():
    from bitshard.graphs import masks
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func.__name__)
            return func(*args, **(kwargs or {}))

    called = []
    with masks._NoCopies(), Seen():
        found = torch.tensor(0.5, device="meta", dtype=torch.bfloat16)
        rows = torch.tensor([1.0])
    assert (found.dtype, found.shape, found.device.type, rows.tolist()) == (torch.bfloat16, (), "meta", [1.0])
    assert called.count("full.default") == 1 and "_to_copy.default" not in called


def blocks_of(name, ids):
    """What transformers gives flex attention, not compiled, and how often it was made."""
    from torch.nn.attention import flex_attention
    from transformers import masking_utils

    made, create = [], flex_attention.create_block_mask

    def creates(*args, _compile=False, **kwargs):
        made.append(create(*args, **kwargs))
        return made[-1]

    config = transformers.LlamaConfig(attn_implementation="flex_attention", sliding_window=4)
    call = {"config": config, "inputs_embeds": torch.zeros(*ids.shape, 8), "past_key_values": None}
    padding, positions = torch.ones_like(ids), torch.arange(ids.shape[1])[None]
    if name == "zeros":
        padding[0, -3:] = 0
    call["attention_mask"] = None if name in ("no mask", "packed") else padding
    call["position_ids"] = positions % 5 if name == "packed" else positions
    makes = masking_utils.create_sliding_window_causal_mask if name == "window" else masking_utils.create_causal_mask

    def mask():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(masking_utils, "create_block_mask", creates)
            return makes(**call)

    return mask, made


@pytest.mark.parametrize("name", ["no mask", "ones", "window", "zeros", "packed"])
def test_masks_of_blocks(name):
    """One that follows from the shape is the same object while a graph is recorded; another is made from its inputs."""
    from bitshard.graphs import masks

    mask, made = blocks_of(name, torch.arange(24)[None])
    notes = []
    with masks.noted(notes):
        first = mask()
    with masks.given(notes):
        second = mask()
    by_shape = name in ("no mask", "ones", "window")
    assert (second is first) is by_shape and len(made) == 2 - by_shape
    assert torch.equal(first.to_dense(), second.to_dense())
    assert masks.for_any_shape(notes) is not by_shape


def test_what_a_mask_function_reads():
    from bitshard.graphs import masks

    rows, limit = torch.zeros(3), 5
    plain = [lambda b, h, q, k: q >= k, lambda b, h, q, k: k > q - limit, lambda b, h, q, k, shift=2: q + shift >= k]
    plain.append(lambda b, h, q, k: plain[0](b, h, q, k))  # closes over itself
    reading = [lambda b, h, q, k: rows[q] > 0, lambda b, h, q, k, given=rows: given[q] > 0]
    reading += [lambda b, h, q, k: reading[0](b, h, q, k), lambda b, h, q, k: SEEN[q] > 0]
    assert [masks._reads_tensors(function) for function in plain + reading] == [False] * 4 + [True] * 4


SEEN = torch.zeros(3)


def test_another_number_of_masks():
    from bitshard.graphs import masks
    from bitshard.graphs.calls import Refused
    from transformers import masking_utils

    registry = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    before = {name: registry[name] for name in registry}
    with pytest.raises(Refused, match="another number of attention masks"), masks.given([None]):
        pass
    with pytest.raises(Refused, match="another number of attention masks"), masks.given([]):
        registry["sdpa"]()
    assert {name: registry[name] for name in registry} == before and "sdpa" not in registry._local_mapping
