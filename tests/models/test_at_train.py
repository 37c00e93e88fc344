"""BITSHARD_FUSE, BITSHARD_GRAPHS, BITSHARD_FAST: which module they act on, when, what they say; and whole trainings."""

import copy
import gc
import json
import logging
import sys
import weakref
from pathlib import Path

import pytest
import torch
from bitshard import graphs, lora
from bitshard.huggingface import at_train
from bitshard.nn.linear import Linear4bit
from bitshard.nn.parametrize import replace_parameter_4bit
from bitshard.process import foreign, switches
from fsdp.launch import run
from helpers import switches as environment
from helpers.copies import pickled
from torch import nn

peft = pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from helpers.llama import TOKENS, load_4bit  # noqa: E402
from helpers.lora import fused_calls, layers, model, randomize  # noqa: E402

LINEARS = 7  # of the decoder layer of helpers/llama.py


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.INFO, logger="bitshard")
    return lambda: [
        (record.levelname, record.getMessage()) for record in caplog.records if "BITSHARD_" in record.getMessage()
    ]


@pytest.fixture
def fast():
    """BITSHARD_FAST=1; what `graphs.enable` was called with."""
    with environment.set_to(FAST="1") as enabled:
        yield enabled


def quantized(*names):
    """A module with 4-bit layers of these names, in eval mode as `from_pretrained` leaves it."""
    found = nn.Module()
    found.is_loaded_in_4bit = True  # as peft asks
    for name in names or ("layer",):
        setattr(found, name, Linear4bit(64, 64, bias=False, quant_type="nf4"))
    return found.to("cpu").eval()


def fused(wrapped):
    return sum(type(layer) is lora.layer.FusedLinear4bit for layer in layers(wrapped))


# ---- the variables ----


@pytest.mark.parametrize(
    "values, on",
    [
        ({}, {}),
        ({"FUSE": "1"}, {"fuse": "BITSHARD_FUSE"}),
        ({"GRAPHS": "1", "FUSE": "0", "EXPERTS": ""}, {"graphs": "BITSHARD_GRAPHS"}),
        ({"FAST": "1"}, dict.fromkeys(("fuse", "graphs", "no_loss_wait"), "BITSHARD_FAST")),
        ({"FAST": "1", "GRAPHS": "0"}, dict.fromkeys(("fuse", "no_loss_wait"), "BITSHARD_FAST")),
        ({"FAST": "1", "NO_LOSS_WAIT": "0"}, dict.fromkeys(("fuse", "graphs"), "BITSHARD_FAST")),
        ({"NO_LOSS_WAIT": "1"}, {"no_loss_wait": "BITSHARD_NO_LOSS_WAIT"}),
        ({"FAST": "0", "FUSE": "1", "EXPERTS": "1"}, {"experts": "BITSHARD_EXPERTS", "fuse": "BITSHARD_FUSE"}),
        ({"MERGE_AWARE": "1"}, {"merge_aware": "BITSHARD_MERGE_AWARE"}),
        ({"ARITHMETIC": "int8"}, {"arithmetic": "BITSHARD_ARITHMETIC"}),
    ],
)
def test_what_variables_mean(values, on, told):
    with environment.set_to(**values):
        assert switches.on == switches.Switches(**on) and (switches.acting is None) is not bool(on.keys() - {"experts"})
    assert switches.on == switches.Switches() and not told()


def test_another_value_gets_one_line(told, monkeypatch):
    monkeypatch.setattr(switches, "_warned", set())
    with environment.set_to(FUSE="yes", EXPERTS="true"):
        switches.read()
        assert switches.on == switches.Switches() and switches.acting is None
    with environment.set_to(GRAPHS="on"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(switches, "_warned", set())
        patch.setenv("RANK", "1")
        switches.read()
    said = "is ignored: expected 1 (on), 0 (off) or nothing"
    expected = {f"BITSHARD_FUSE=yes {said}", f"BITSHARD_EXPERTS=true {said}", f"BITSHARD_GRAPHS=on {said}"}
    assert len(told()) == 3 and {text for level, text in told() if level == "WARNING"} == expected


def test_without_a_switch_a_layer_looks_at_nothing(monkeypatch):
    monkeypatch.setattr(foreign, "outermost", lambda *_: pytest.fail("a look at the call stack"))
    with environment.set_to():
        layer = quantized().train().layer
        assert layer.training and not layer.packed_weight.unwatched


# ---- which module ----


class Freezing(nn.Sequential):
    """A train of its own around torch's, as detection models have."""

    def train(self, mode=True):
        super().train(mode)
        self[0].training = False
        return self


def test_the_outermost_module_once(fast):
    """eval() is nothing, a part of a model neither, nor a layer alone; another module around it is another model."""
    inner = quantized("a", "b")
    inner.eval()
    inner.a.train()
    assert fast == []
    for _ in range(2):
        assert inner.train() is inner and inner.b.training
    outer = Freezing(nn.Identity(), nn.Sequential(inner))
    for _ in range(2):
        outer.train()
        outer[1].train()
        inner.train()
    assert fast == [inner, outer] and inner.b.training and not outer[0].training
    other = quantized()
    other.train()
    assert fast == [inner, outer, other]


def test_every_class_with_packed_weights(fast):
    """int8 layers, and parameters of any module; experts below."""
    eight = model(threshold=0.0).train()
    parametrized = nn.Sequential(nn.Linear(64, 64))
    replace_parameter_4bit(parametrized[0], "weight")
    parametrized.train()
    assert fast == [eight, parametrized] and isinstance(layers(eight)[0], lora.layer.FusedLinear8bitLt)


def test_experts(fast):
    from bitshard import experts
    from helpers import moe

    mixture = moe.model("qwen3_moe")
    experts.quantize(mixture)
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["mlp.experts.down_proj"])
    wrapped = peft.get_peft_model(mixture, config).train()
    assert fast == [wrapped] and lora.report(wrapped).fused and not lora.report(wrapped).left


def test_around_a_model_that_is_known(fast, told, group):
    """The base, peft's model around it, DDP and torch.compile around that, which stand for what is inside."""
    base = quantized("0").requires_grad_(False).train()
    wrapped = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0"]))
    assert fast == [base] and fused(wrapped) == 0
    wrapped.train()
    assert fast == [base, wrapped] and fused(wrapped) == 1
    ddp = nn.parallel.DistributedDataParallel(wrapped)
    compiled = torch.compile(ddp, backend="eager")
    for outer in (ddp, compiled, wrapped, wrapped.base_model, base):
        outer.train()
    assert fast == [base, wrapped]
    again = nn.parallel.DistributedDataParallel(torch.compile(model(), backend="eager")).train()
    assert fast == [base, wrapped, again.module._orig_mod] and fused(again) == 1
    graphs_of = "BITSHARD_FAST=1: CUDA graphs of this {} (bitshard.graphs.enable)".format
    peft_model = [graphs_of("PeftModel"), "BITSHARD_FAST=1: 1 LoRA layers: 1 fused"]
    assert [text for _, text in told()] == [graphs_of("Module"), *peft_model, *peft_model]


def test_under_fsdp2(fast, group, monkeypatch):
    """fully_shard, before and after a first train(), leaves the module what it is."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # torch before 2.12 shards no uint8
    for first in (True, False):
        wrapped = model(bias=False)
        before = wrapped.train() if first else wrapped
        fully_shard(wrapped, mesh=init_device_mesh("cpu", (1,)))
        assert wrapped.train() is before and fast[-1] is wrapped and lora.report(wrapped).fused
        wrapped(torch.ones(2, 128)).sum().backward()
    assert len(fast) == 2


def test_copies_and_pickles(fast):
    """They hold nothing of what was done to the model, and are models of their own."""
    wrapped = model().train()
    twins = copy.deepcopy(wrapped), pickled(wrapped)
    for twin in twins:
        assert fused(twin) == 1 and [*vars(twin)] == [*vars(wrapped)]
        assert twin.train() is fast[-1]
    assert fast == [wrapped, *twins]


def test_a_model_is_let_go(fast):
    """Neither the look at the call stack nor what is known of a model keeps it, in a function that is called train."""

    def train():
        wrapped = nn.Sequential(model())
        wrapped.train()
        fast.clear()
        gone = weakref.ref(wrapped), weakref.ref(layers(wrapped)[0].base_layer.weight)
        del wrapped
        gc.collect()
        return [ref() for ref in gone]

    before = len(at_train._known), len(at_train._said), len(at_train._captured)
    assert train() == [None, None]
    assert (len(at_train._known), len(at_train._said), len(at_train._captured)) == before


def test_from_the_inside_out(fast):
    """As `apply` calls modules."""
    wrapped = model(shapes=((96, 128), (64, 96)))
    wrapped.apply(lambda module: module.train())
    assert fused(wrapped) == 2 and fast[-1] is wrapped


# ---- what is done ----


def test_by_hand_too(fast):
    """Before the switch and after it; what a script has undone stays so."""
    wrapped = model()
    graphs.enable(wrapped)
    lora.fuse(wrapped)
    wrapped.train()
    lora.fuse(wrapped)
    assert fused(wrapped) == 1 and fast == [wrapped, wrapped]
    lora.unfuse(wrapped)
    wrapped.train()
    assert fused(wrapped) == 0


def test_adapters_that_come_later(told):
    """A model without adapters is looked at again in each train()."""
    with environment.set_to(FAST="1") as enabled:
        base = quantized("0", "1").requires_grad_(False)
        for _ in range(2):
            base.train()
        peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["1"]), base)
        assert fused(base) == 0
        for _ in range(2):
            base.train()
        assert fused(base) == 1 and enabled == [base]
    assert [text for _, text in told()][1:] == ["BITSHARD_FAST=1: 1 LoRA layers: 1 fused"]


@pytest.mark.parametrize(
    "made, level, text",
    [
        (model, "INFO", "1 LoRA layers: 1 fused"),
        (lambda: model(lora_bias=True), "WARNING", "1 LoRA layers: 0 fused, 1 left to peft (1: A or B has a bias"),
        (lambda: nn.Sequential(quantized(), dense()), "WARNING", "none of the 1 LoRA layers of this Sequential can be"),
        (quantized, None, None),
    ],
)
def test_what_it_says(told, made, level, text):
    """One line, unless another module around the model changes it; a warning where nothing is fused."""
    with environment.set_to(FUSE="1") as enabled:
        found = made()
        for _ in range(2):
            found.train()
        nn.Sequential(found).train()
    assert not enabled and [level for level, _ in told()] == ([level] if level else [])
    assert not level or (text in told()[0][1] and told()[0][1].startswith("BITSHARD_FUSE=1"))


def dense():
    """A LoRA layer on a weight that is not quantized."""
    return peft.get_peft_model(nn.Sequential(nn.Linear(8, 8)), peft.LoraConfig(target_modules=["0"]))


def test_what_graphs_refuse_is_said_once(told):
    with environment.set_to(GRAPHS="1"), pytest.MonkeyPatch.context() as patch:

        def refuse(_):
            raise ValueError("bitshard.graphs.enable: no GPU")

        patch.setattr(graphs, "enable", refuse)
        wrapped = model()
        for _ in range(2):
            wrapped.train()
        assert fused(wrapped) == 0
    expected = "BITSHARD_GRAPHS=1: no CUDA graphs of this PeftModel. bitshard.graphs.enable: no GPU"
    assert told() == [("WARNING", expected)]


def test_only_rank_0_speaks(fast, told, group, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    model().train()
    assert len(fast) == 1 and not told()


# ---- a model whose train() is never called ----


def test_a_line_where_nobody_calls_train(told):
    """One for a process, at a first forward with gradients; a look at logits before is none."""
    x = torch.ones(2, 128)
    with environment.set_to(FAST="1"):
        wrapped = model()
        with torch.no_grad():
            wrapped(x)
        assert not told()
        for _ in range(2):
            wrapped(x).sum().backward()
        model()(x).sum().backward()
    expected = "BITSHARD_FAST=1: no effect on this PeftModel, for its train() was not called since it was made; "
    assert told() == [("WARNING", f"{expected}call model.train() before the first step")]


@pytest.mark.parametrize("threshold", [None, 0.0])
def test_a_line_where_train_was_called_too_early(told, threshold):
    """Of the base, which had no adapters; graphs are on then. Of int8 layers, too."""
    with environment.set_to(FUSE="1", GRAPHS="1"):
        wrapped = model(threshold=threshold)
        base = wrapped.unload().requires_grad_(False).train()
        wrapped = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0"]))
        wrapped(torch.ones(2, 128)).sum().backward()
    (_, first), (level, second) = told()
    assert "CUDA graphs of this Sequential" in first and level == "WARNING"
    assert second.startswith("BITSHARD_FUSE=1: no effect on this PeftModel, for its train() was not called since")


def test_no_line_without_need(told):
    """In a wrapper that has a forward only; of what is not trained, or without adapters; without a switch."""

    class Wrapper(nn.Module):
        def __init__(self, inside):
            super().__init__()
            self.inside = inside

        def forward(self, x):
            return self.inside(x)

    x = torch.ones(2, 128)
    with environment.set_to():
        off = model()
    with environment.set_to(FUSE="1"):
        Wrapper(model().train())(x).sum().backward()
        model().requires_grad_(False)(x)
        quantized().layer(torch.ones(2, 64, requires_grad=True)).sum().backward()
        off(x).sum().backward()
    assert [level for level, _ in told()] == ["INFO"]


# ---- whole trainings ----


def adapted(folder):
    transformers.set_seed(3)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    found = peft.get_peft_model(load_4bit(folder), config)
    torch.manual_seed(8)
    randomize(found)
    return found


def rows():
    ids = torch.randint(3, TOKENS, (8, 16), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": row, "labels": row} for row in ids]


SETTINGS = {
    **{"max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 3e-3, "logging_steps": 1, "seed": 5},
    **{"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False},
}


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def by_trainer(folder, out, by_hand, **options):
    arguments = transformers.TrainingArguments(output_dir=str(out), **SETTINGS, **options)
    trainer = transformers.Trainer(model=adapted(folder), args=arguments, train_dataset=rows())
    if by_hand:
        lora.fuse(trainer.model)
    trainer.train()
    return trainer.model, losses(trainer)


def checkpointed(*args):
    return by_trainer(*args, gradient_checkpointing=True)


def by_accelerate(folder, out, by_hand):
    """A loop that calls train() at the start of each epoch, with an evaluation between."""
    import accelerate

    accelerator, wrapped = accelerate.Accelerator(cpu=True), adapted(folder)
    if by_hand:
        lora.fuse(wrapped)
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.05)
    wrapped, optimizer = accelerator.prepare(wrapped, optimizer)
    batch, found = torch.tensor([row["input_ids"] for row in rows()]), []
    for _ in range(2):
        wrapped.train()
        for part in batch.chunk(2):
            loss = wrapped(input_ids=part, labels=part).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss))
        wrapped.eval()
        with torch.no_grad():
            found.append(float(wrapped(input_ids=batch, labels=batch).loss))
    return wrapped, found


def by_sft(folder, out, by_hand):
    """trl makes the adapter itself."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2, "one": 3, "two": 4}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    transformers.set_seed(3)
    trainer = trl.SFTTrainer(
        model=load_4bit(folder),
        args=trl.SFTConfig(output_dir=str(out), max_length=16, **SETTINGS),
        train_dataset=datasets.Dataset.from_dict({"text": ["one two one two two one"] * 8}),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    if by_hand:
        lora.fuse(trainer.model)
    trainer.train()
    return trainer.model, losses(trainer)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("training", [by_trainer, checkpointed, by_accelerate, by_sft])
def test_a_training_is_that_of_fuse_by_hand(folder, tmp_path, training, told):
    """The same losses, bit for bit, by fused calls, from the first step on."""
    with environment.set_to(), fused_calls() as calls:
        expected, by_hand = training(folder, tmp_path, True)[1], len(calls)
    with environment.set_to(FAST="1") as enabled, fused_calls() as calls:
        trained, found = training(folder, tmp_path, False)
    assert found == expected and len(found) >= 3 and len(calls) == by_hand >= 3 * LINEARS
    assert enabled == [trained] and f"{LINEARS} LoRA layers: {LINEARS} fused" in told()[-1][1] and len(told()) == 2
    assert isinstance(trained, peft.PeftModel)


SCRIPT = """
import logging, sys
sys.path.append(sys.argv[3])
logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stdout)
import transformers, peft, torch, json
from helpers.llama import load_4bit
transformers.set_seed(3)
config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
model = peft.get_peft_model(load_4bit(sys.argv[1]), config)
rows = [{"input_ids": [3, 5, 8, 9], "labels": [3, 5, 8, 9]}] * 4
settings = json.loads(sys.argv[2])
transformers.Trainer(model=model, args=transformers.TrainingArguments(**settings), train_dataset=rows).train()
"""


def test_a_script_that_nobody_edits(folder, tmp_path):
    """With nothing but the variable in its environment."""
    settings = json.dumps({**SETTINGS, "max_steps": 1, "output_dir": str(tmp_path)})
    tests = str(Path(__file__).parents[1])
    said = run([sys.executable, "-c", SCRIPT, str(folder), settings, tests], 120, BITSHARD_FUSE="1")
    lines = [line for line in said.splitlines() if "BITSHARD_" in line]
    assert lines == [f"bitshard: BITSHARD_FUSE=1: {LINEARS} LoRA layers: {LINEARS} fused"], said[-2000:]


def test_they_are_read_at_import():
    """And again when transformers is imported, as BITSHARD_EXPERTS is; peft is not imported for it."""
    code = (
        "import os, sys, bitshard; from bitshard.huggingface import at_train; from bitshard.process import switches\n"
        "print(switches.on.fuse, switches.acting is at_train.ACTS, 'bitshard.lora' in sys.modules, end=' ')\n"
        "os.environ.update(BITSHARD_FUSE='0', BITSHARD_GRAPHS='1'); import transformers.quantizers.auto\n"
        "print(*switches.on, 'peft' in sys.modules)"
    )
    said = run([sys.executable, "-c", code], 60, bare=True, BITSHARD_FUSE="1")
    assert said.split() == ["BITSHARD_FUSE", "True", "False", "BITSHARD_GRAPHS", "False"]
