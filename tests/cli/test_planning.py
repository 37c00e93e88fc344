"""`bitshard plan`: memory on paper against memory that was measured, and against the real bytes of tiny models."""

import json
import re
import resource
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from bitshard import planning
from bitshard.planning import meter, played, shapes, text
from bitshard_cli import main
from bitshard_cli.plan import EXAMPLE
from helpers import moe
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

GIB = 2**30
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SMALL = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def known():
    """Models by name, each built once."""
    made = {}
    return lambda name: made.setdefault(name, planning.Model(name))


def peak(model, **options):
    return planning.plan(model, **options).memory.worst().total / GIB


def tables(file):
    """Rows of the Markdown tables of a results file, each a dictionary by the head of its column."""
    head = None
    for line in (RESULTS / file).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            head = None
        elif head is None:
            head = cells
        elif not set(cells[0]) <= {"-", ":"}:
            yield dict(zip(head, cells, strict=False))


# ---- against what was measured --------------------------------------------------------------------------------------


def job_of_70b(tokens, options):
    """The job of a row: `1 x 512` and the options of benchmarks/llama70b.py."""
    batch, seq = map(int, re.fullmatch(r"(\d+) x (\d+)", tokens).groups())
    words = re.findall(r"--([\w-]+)(?: (\w+))?", options)
    given = {name: value for name, value in words}
    job = {"rank": 16, "lora_dtype": given.get("lora-dtype", "bfloat16"), "autocast": False, "nested": True}
    job |= {"optimizer": "adamw_torch_fused", "gpus": 2, "sharding": "fsdp2", "seq": seq, "batch": batch}
    vocabulary = {"inplace": "in_place"}.get(given.get("vocabulary"), given.get("vocabulary", "gathered"))
    job |= {"load": "parts" if given.get("load") == "cut" else "native", "vocabulary": vocabulary}
    job["loss_chunk"] = 128 if given.get("loss") == "chunked" or vocabulary == "split" else 0
    job |= {"offload_weights": "offload-weights" in given, "offload_activations": "offload-activations" in given}
    return job | {"library": "bitsandbytes" if "upstream" in options else "bitshard"}


def test_70b(known):
    """Within 5 % of every peak that was measured on two GPUs, and of the loading's."""
    found, previous, column = 0, "", "step: allocated, reserved"
    for row in tables("llama70b_2xh200_202611.md"):
        measured = re.match(r"\**(\d+\.\d+), ", row.get(column, ""))
        if measured is None:
            continue
        options = (
            row["options"]
            if "--load" not in previous or "the same" not in row["options"]
            else previous + row["options"]
        )
        previous = row["options"]
        plan = planning.plan(known("llama-3-70b"), **job_of_70b(row["tokens a GPU"], options))
        assert plan.memory.worst().total / GIB == pytest.approx(float(measured[1]), rel=0.05), row
        load = re.match(r"\d+\.\d+", row.get("load: peak") or row.get("load: peak, s"))
        if plan.loading and "layerwise" not in options:
            assert plan.loading["load"] / GIB == pytest.approx(float(load[0]), rel=0.05), row
        found += 1
    assert found == 11


def test_experts(known):
    """Within 3 % of what a training step of Qwen3-30B-A3B took, in 4 bits, and within 5 % in 16."""
    found = 0
    for row in tables("experts_h200_202611.md"):
        if "peak, allocated" not in row:
            continue
        job = {"seq": int(row["tokens"]), "rank": int(row["r"]), "lora_experts": True, "lora_dtype": "bfloat16"}
        job |= {"optimizer": "adamw_8bit", "nested": True, "experts_4bit": True, "autocast": False}
        if row["weights"] == "16-bit":
            continue  # attention was in 16 bits, too
        assert peak(known("qwen3-30b-a3b"), **job) == pytest.approx(float(row["peak, allocated"]), rel=0.03), row
        found += 1
    assert found == 4


def test_experts_on_two_gpus(known):
    """Within 3 % of what each of two GPUs had in a step of gpt-oss-120b's shape."""
    peaks = {row["what"]: float(row["allocated"]) for row in tables("gpt_oss_120b_2xh100_202611.md") if "what" in row}
    job = {"gpus": 2, "sharding": "fsdp2", "seq": 2048, "rank": 8, "lora_experts": True, "lora_dtype": "bfloat16"}
    job |= {"optimizer": "adamw_8bit", "nested": True, "experts_4bit": True, "autocast": False, "load": "native"}
    plan = planning.plan(known("gpt-oss-120b"), **job)
    assert plan.memory.worst().total / GIB == pytest.approx(peaks["every later step, peak"], rel=0.03)


def test_other_models(known):
    """Within 2 % of what torch's allocator had, for models of six architectures."""
    found = set()
    base = {
        "rank": 16,
        "lora_dtype": "bfloat16",
        "optimizer": "adamw_torch_fused",
        "nested": True,
        "experts_4bit": True,
    }
    for row in tables("plan_h200_202611.md"):
        if "planned, GiB" not in row:
            continue
        words = dict(part.split(" ", 1) for part in row["job"].split(", "))
        job = {
            name: json.loads(value.lower()) if value[0] in "0123456789TF" else value for name, value in words.items()
        }
        assert peak(known(row["model"]), **{**base, **job}) == pytest.approx(float(row["allocated"]), rel=0.02), row
        found.add(row["model"])
    assert len(found) == 6


def test_loading_of_8b(known):
    """The peaks of loading and of what accelerate or peft do next, from 16-bit files, by each way."""
    ways = {
        "one process, whole": {"gpus": 1, "sharding": "none"},
        'accelerate, parts ("cut")': {"load": "parts"},
        "`DistributedConfig(fsdp_size=2)`": {"load": "native"},
        "accelerate, whole (`BITSHARD_CUT=0`)": {"load": "whole"},
        "accelerate, bitsandbytes": {"library": "bitsandbytes"},
    }
    rows = [row for row in tables("loading_2xh200_202611.md") if row.get("files") == "16 bits" and row["way"] in ways]
    assert len(rows) == len(ways)
    for row in rows:
        job = {"gpus": 2, "sharding": "fsdp2", "rank": 16, "nested": True, **ways[row["way"]]}
        loading = planning.plan(known("llama-3-8b"), **job).loading
        for phase, column in (("load", "load: peak"), ("prepare", "prepare: peak")):
            assert loading[phase] / GIB == pytest.approx(float(row[column].strip("*")), rel=0.03), (row, phase)


# ---- against real bytes ---------------------------------------------------------------------------------------------


def four_bit(nested):
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a tiny Llama in 16 bits."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    options = {key: value for key, value in SMALL.items() if key != "model_type"}
    AutoModelForCausalLM.from_config(LlamaConfig(**options), dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("nested", [True, False])
def test_weights_of_a_tiny_model(tiny, nested):
    model = AutoModelForCausalLM.from_pretrained(tiny, quantization_config=four_bit(nested), device_map="cpu")
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    real = dict.fromkeys(("4-bit weights", "scales", "second level of the scales", "16-bit", "adapters"), 0)
    for name, parameter in model.named_parameters():
        state = getattr(parameter, "quant_state", None)
        kind = "adapters" if "lora_" in name else "16-bit" if state is None else "4-bit weights"
        real[kind] += parameter.nbytes
        if state is not None:
            real["scales"] += state.absmax.nbytes
            real["second level of the scales"] += state.state2.absmax.nbytes if nested else 0
    plan = planning.plan(tiny, rank=8, nested=nested)
    whole = plan.memory.whole()
    whole["16-bit"] = whole.pop("embeddings and head") + whole.pop("other 16-bit weights")
    for part, size in {**whole, "adapters": plan.memory.adapters()}.items():
        assert size == pytest.approx(real[part], rel=0.05, abs=64), part


def test_8bit_weights_of_a_tiny_model(tiny):
    """Byte for byte: codes, and a scale for each row."""
    config = BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(tiny, quantization_config=config, device_map="cpu")
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    layers = [module for module in model.modules() if isinstance(module, bnb.nn.Linear8bitLt)]
    codes, scales = (sum(each.nbytes for each in column) for column in zip(*map(codes_and_scales, layers), strict=True))
    dense = sum(p.nbytes for name, p in model.named_parameters() if "lora_" not in name) - codes
    plan = planning.plan(tiny, rank=8, bits=8)
    whole = plan.memory.whole()
    assert (whole["8-bit weights"], whole["scales"], whole["second level of the scales"]) == (codes, scales, 0.0)
    assert whole["embeddings and head"] + whole["other 16-bit weights"] == pytest.approx(dense, abs=64)
    adapters = sum(p.nbytes for name, p in model.named_parameters() if "lora_" in name)
    assert plan.memory.adapters() == adapters and len(layers) == 7 * SMALL["num_hidden_layers"]


def codes_and_scales(layer):
    return layer.weight.data, layer.state.SCB


def test_8bit_shards(known):
    """Codes and scales are shared out as 4-bit ones are, a unit is gathered whole; FSDP1 keeps the scales whole."""
    one, two = (
        planning.plan(known("llama-3-8b"), bits=8, gpus=n, sharding="fsdp2" if n > 1 else "none") for n in (1, 2)
    )
    first = planning.plan(known("llama-3-8b"), bits=8, gpus=2, sharding="fsdp1").memory
    for part in ("8-bit weights", "scales"):
        assert two.memory.shard()[part] == one.memory.whole()[part] / 2
    assert first.shard()["scales"] == one.memory.whole()["scales"]
    unit = one.memory.layers[0]
    rows = 2 * 4096 + 2 * 1024 + 2 * 14336 + 4096
    assert tuple(map(sum, zip(*unit.packed, strict=True))) == (218_103_808, rows)
    assert two.memory.gathered(unit) - two.memory.adapters_of(unit) - unit.dense == 218_103_808 + 4 * rows
    assert two.bitsandbytes() is None and text.data(two)["bitsandbytes"] is None
    assert "bitsandbytes cannot shard 8-bit layers" in text.text(two) and "| bitsandbytes |" not in text.text(two)
    smaller = {change.name: change for change in one.changes()}
    assert smaller["4-bit layers"].needs == one.other(bits=4).needs and "nested scales" not in smaller
    theirs, layer = one.bitsandbytes().memory, one.memory.played()[0]
    assert theirs.whole() == one.memory.whole() and "| bitsandbytes |" in text.text(one)
    assert theirs.played()[0].forward > layer.forward and theirs.played()[0].backward > layer.backward


def test_code_that_does_not_run_on_the_meta_device(tiny, monkeypatch):
    """Activations are estimated then, and the plan says so."""
    played_one = planning.plan(tiny, seq=256)
    assert played_one.estimated is None

    def ask(*args, **kwargs):
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")

    monkeypatch.setattr(played.Attention, "forward", ask)
    plan = planning.plan(tiny, seq=256)
    assert plan.estimated.startswith("NotImplementedError: Cannot copy") and plan.estimated in text.text(plan)
    guessed, real = (sum(layer.saved for layer in each.memory.played()) for each in (plan, played_one))
    assert guessed == pytest.approx(real, rel=0.1)


@pytest.mark.parametrize("family", sorted(moe.FAMILIES))
def test_weights_of_tiny_experts(family):
    from bitshard import experts

    model = moe.model(family)
    config = model.config.to_dict()
    experts.quantize(model, blocksize=32)
    stacks = [p for module in model.modules() for p in module._parameters.values() if hasattr(p, "quant_state")]
    codes, scales = sum(p.nbytes for p in stacks), sum(p.quant_state.absmax.nbytes for p in stacks)
    linear = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    plan = planning.plan(config, experts_4bit=True, skip=tuple(linear), blocksize=32, nested=True)
    assert plan.memory.whole()["4-bit weights"] == codes and plan.memory.whole()["scales"] == scales


def real_peaks(model, ids):
    """What lives behind the forward of a real model, and the most in its backward, metered."""
    with meter.Meter([*model.parameters(), *model.buffers(), ids]) as metered:
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss
        kept = metered.live
        metered.since()
        loss.backward()
    return kept, metered.peak


@pytest.mark.parametrize("bits", [4, 8])
def test_a_real_step(tiny, bits):
    """A forward and backward of bitshard's and peft's layers on the CPU keep what was played on the meta device."""
    config = four_bit(True) if bits == 4 else BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(
        tiny, quantization_config=config, device_map="cpu", dtype=torch.bfloat16
    )
    lora = LoraConfig(r=8, target_modules="all-linear")
    model = get_peft_model(model, lora, autocast_adapter_dtype=False).train()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    model.enable_input_require_grads()
    ids = torch.zeros(2, 192, dtype=torch.long)
    kept, most = real_peaks(model, ids)
    options = {"rank": 8, "lora_dtype": "bfloat16", "seq": 192, "batch": 2, "checkpointing": False}
    options |= {"nested": True} if bits == 4 else {"bits": 8}
    memory = planning.plan(tiny, **options).memory
    saved = sum(layer.saved for layer in memory.played())
    head = 2 * 192 * SMALL["vocab_size"] * 4 + 3 * 2 * 192 * SMALL["hidden_size"] * 2  # of the loss, and the last norm
    assert saved + head == pytest.approx(kept, rel=0.08)
    activations = sum(
        memory.worst().parts.get(part, 0.0) for part in ("activations kept for backward", "logits and loss")
    )
    assert activations == pytest.approx(most, rel=0.08)


def test_the_meter():
    weight = torch.empty(64, 64, device="meta")
    x = torch.empty(8, 64, device="meta", requires_grad=True)
    with meter.Meter([weight, x]) as metered:
        y = (x @ weight.t()).relu()
        assert metered.live == 2 * 8 * 64 * 4 or metered.live == 8 * 64 * 4  # relu keeps its result only
        z = y[:2].clone()
        before = metered.live
        del z
        assert metered.live == before - 2 * 64 * 4
        metered.since()
        torch.empty(1000, dtype=torch.uint8, device="meta")
        assert metered.peak == metered.live + 1024


# ---- what is asked ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(shapes.KNOWN))
def test_known_shapes(name, known):
    """Parameters as published, in billions."""
    published = {
        "smollm2-135m": 0.1345, "llama-3.2-1b": 1.236, "llama-3.2-3b": 3.213, "llama-3-8b": 8.030, "llama-3-70b": 70.55,
        "llama-3.1-405b": 405.9, "mistral-7b": 7.248, "qwen2.5-7b": 7.616, "qwen2.5-32b": 32.76, "qwen2.5-72b": 72.71,
        "qwen3-8b": 8.191, "qwen3-32b": 32.76, "qwen3-30b-a3b": 30.53, "qwen3-235b-a22b": 235.1, "gpt-oss-20b": 20.91,
        "gpt-oss-120b": 116.8, "mixtral-8x7b": 46.70, "deepseek-v3": 671.0,
    }  # fmt: skip
    billions = sum(parameter.numel() for parameter in known(name).model.parameters()) / 1e9
    assert billions == pytest.approx(published[name], rel=2e-3)
    assert planning.plan(known(name), gpus=8, sharding="fsdp2", seq=64).needs > 0


def test_options_save_what_they_say(known):
    """Each option that is offered gives what the plan with it has, and a remedy without superfluous options."""
    plan = planning.plan(known("llama-3-70b"), gpus=2, sharding="fsdp2")
    assert not plan.fits and plan.bitsandbytes().needs > plan.needs
    for change in plan.changes():
        assert change.needs == plan.other(**change.options).needs < plan.needs
    remedy = plan.remedy()
    assert remedy.fits and plan.other(**remedy.options).fits
    for option in remedy.options:
        rest = {name: value for name, value in remedy.options.items() if name != option}
        if option != "checkpointing":
            assert not plan.other(**rest).fits, option


def test_nothing_helps(known):
    plan = planning.plan(known("llama-3-8b"), gib=1.0)
    assert plan.remedy() is None and "No options that are known make it fit" in text.text(plan)


def test_sharding_and_the_host(known):
    """More GPUs need less each, FSDP1 no second copy but whole scales; the host gets what leaves the GPU."""
    two, four = (planning.plan(known("llama-3-8b"), gpus=n, sharding="fsdp2", nested=True) for n in (2, 4))
    assert four.peak < two.peak and four.links["other GPUs"] > two.links["other GPUs"]
    whole = planning.plan(known("llama-3-8b"), gpus=2, sharding="fsdp1", nested=True).memory
    assert whole.shard()["scales"] == 2 * two.memory.shard()["scales"]
    away = planning.plan(known("llama-3-8b"), gpus=2, sharding="fsdp2", nested=True, offload_weights=True)
    assert away.loading is None and away.host["weights"] == pytest.approx(sum(two.memory.shard().values()), rel=0.01)
    assert not planning.plan(known("llama-3-8b")).links
    paged = planning.plan(known("llama-3-8b"), optimizer="paged_adamw_8bit")
    assert paged.host["states of the optimizer"] == paged.memory.states() > 0 == paged.memory.states_on_gpu()
    assert planning.plan(known("llama-3.2-1b"), gpus=2, sharding="fsdp2").memory.worst().total > 0  # a tied head


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seq": 0}, "seq is 0, expected at least 1"),
        ({"gib": float("nan")}, "a GPU of nan GiB"),
        ({"optimizer": "adamw"}, "optimizer is 'adamw', expected one of adamw_torch"),
        ({"gpus": 2}, "2 GPUs without sharding"),
        ({"vocabulary": "in_place"}, "is of FSDP2, the job has none"),
        ({"loss_chunk": -1}, "loss_chunk is -1"),
        ({"bits": 2}, "bits is 2, expected 4 or 8"),
        ({"bits": 8, "nested": True}, "nested: scales of 4-bit models, the job has 8-bit layers"),
        ({"bits": 8, "experts_4bit": True}, "experts_4bit: experts of 4-bit models"),
        ({"bits": 8, "head_4bit": True}, "head_4bit: a head of 4-bit models"),
        ({"bits": 8, "gpus": 2, "sharding": "fsdp2", "load": "native"}, "load 'native': a DistributedConfig shards"),
        ({"targets": ("q_proj", "qproj")}, "adapters on 'qproj' cannot be planned for llama-3-8b, but on down_proj, "),
        ({"skip": ("",)}, "no module of llama-3-8b has '' in its name"),
        ({"skip": ("vision",)}, "no module of llama-3-8b has 'vision' in its name"),
    ],
)
def test_jobs_that_make_no_sense(options, words):
    with pytest.raises(ValueError, match=words):
        planning.plan("llama-3-8b", **options)


def test_the_command(tiny, tmp_path, capsys):
    assert main.main(["plan", str(tiny), "--gpus", "2x0.5", "--nested", "--lora-rank", "8", "--seq", "128"]) == 0
    said = capsys.readouterr().out
    assert "2 GPUs of 0.5 GiB, FSDP2; 1 x 128 tokens on each" in said and "bitsandbytes" in said
    picture = tmp_path / "plan.svg"
    command = ["plan", str(tiny / "config.json"), "--json", "--picture", str(picture), "--offload", "activations"]
    assert main.main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["peak"]["total"] == pytest.approx(sum(found["peak"]["parts"].values()))
    assert "only while loading" in re.sub(r"<!--|-->", "", picture.read_text())


def test_commands_of_the_pages(capsys):
    """What they plan fits, and so does the example of --help."""
    pages = ("plan.md", "experts.md", "commands.md")
    found = [line for page in pages for line in (ROOT / "docs" / page).read_text().splitlines()]
    commands = {line.partition("  #")[0].strip() for line in found if line.startswith("bitshard plan ")}
    assert len(commands) == 6 and EXAMPLE in commands
    commands = [command.split() for command in commands]
    for command in commands:
        assert main.main(command[1:]) == 0
        assert "\nFits: " in capsys.readouterr().out, command


@pytest.mark.parametrize("kind", ["whisper", "t5", "bart"])
def test_encoder_decoders_are_refused(kind):
    """Their decoders alone are causal language models of transformers, which would leave out the rest."""
    with pytest.raises(ValueError, match=f"{kind}: an encoder-decoder model, of which a plan would leave out"):
        planning.plan({"model_type": kind})


def test_a_decoder_of_an_encoder_decoder():
    """Saved by itself, as a language model."""
    small = {"d_model": 64, "decoder_layers": 2, "decoder_ffn_dim": 64, "decoder_attention_heads": 4, "vocab_size": 96}
    found = planning.plan({"model_type": "bart", "is_encoder_decoder": False, "is_decoder": True, **small}, seq=64)
    assert text.header(found)[0].startswith("bart (BartForCausalLM): ")


VISION = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56,
    "patch_size": 14,
}  # fmt: skip


def test_what_is_planned_is_said():
    """Models of images are planned for text, with their towers' weights; and the class that the config names."""
    tower = {"model_type": "clip_vision_model", **VISION}
    config = {"model_type": "llava", "text_config": SMALL, "vision_config": tower}
    found = planning.plan({**config, "architectures": ["LlavaForConditionalGeneration"]}, seq=64)
    assert text.header(found)[0].startswith("llava (LlavaForConditionalGeneration): ")
    said = "\n".join(text.verdict(found))
    assert "Planned for text: activations of its parts for vision are left out. Count their tokens in --seq" in said
    assert text.data(found)["class"] == "LlavaForConditionalGeneration" and len(text.data(found)["notes"]) == 1
    towers = [name for name, _ in found.model.layers() if "vision" in name]
    assert towers and not found.estimated
    encoder = {"model_type": "bert", "architectures": ["BertForMaskedLM"], **VISION, "vocab_size": 96}
    masked = planning.plan(encoder, seq=64)
    said = "\n".join(text.verdict(masked))
    assert "The config names BertForMaskedLM; planned is BertLMHeadModel, a language model" in said
    assert not planning.plan(SMALL | {"architectures": ["LlamaForCausalLM"]}, seq=64).notes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent"], "absent: No config.json here, and no known name (smollm2-135m,"),
        (["llama-3-8b", "--gpus", "two"], "--gpus two: expected a number of GPUs and GiB, such as 2x24"),
        (["llama-3-8b", "--offload", "everything"], "--offload everything: expected weights or activations"),
        (["{folder}/broken"], "config.json: no JSON"),
        (["{folder}/list"], "config.json: expected a JSON object, found list"),
        (["{folder}/kindless"], "config.json: it has no model_type"),
        (["{folder}/strange"], "strange"),
        (["{folder}/encoder"], "encoder: no language model of transformers: it has none of type 'vit'"),
        (["{folder}/uneven"], "Field 'hidden_size' expected int, got str (value: 'many')"),
        (["{folder}/deep"], "config.json: no JSON (maximum recursion"),
        (["{folder}/negative"], "negative: no language model of transformers: Trying to create tensor with negative"),
        (["{folder}/binary"], "config.json: no JSON ('utf-8' codec"),
        (["{folder}"], "No config.json here"),
        (["llama-3-8b", "--picture", "{folder}/absent/x.png"], "absent/x.png: No such file or directory"),
        (["llama-3-8b", "--picture", "{folder}/x.xyz"], "x.xyz: a picture's name ends in .png"),
        (["llama-3-8b", "--picture", "{folder}"], "a picture's name ends in .png"),
    ],
)
def test_mistakes_of_the_user(arguments, words, tmp_path, capsys):
    configs = {
        "broken": "{", "list": "[]", "kindless": "{}", "strange": '{"model_type": "strange"}',
        "encoder": '{"model_type": "vit"}', "uneven": json.dumps({**SMALL, "hidden_size": "many"}),
        "deep": "[" * 100_000, "negative": json.dumps({**SMALL, "hidden_size": -64}), "binary": "\u00ff",
    }  # fmt: skip
    for name, words_of in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(words_of, encoding="latin-1")
    status = main.main(["plan", *(argument.format(folder=tmp_path) for argument in arguments)])
    said = capsys.readouterr()
    wrong_argument = {"--gpus", "--offload"} & set(arguments)
    assert status == (2 if wrong_argument else 1) and words in said.err and said.err.count("\n") == 1 and not said.out
    assert "BITSHARD_TRACEBACK" not in said.err and not [path for path in tmp_path.rglob("*x.*")]


def test_a_full_disk(tiny, tmp_path, capsys):
    """A real write that fails: no half picture, one line."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        status = main.main(["plan", str(tiny), "--picture", str(tmp_path / "plan.png")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert status == 1 and said == f"bitshard: {tmp_path / 'plan.png'}: File too large\n"
    assert not list(tmp_path.iterdir())


PARTS = (
    "4-bit weights", "scales", "second level of the scales", "embeddings and head", "other 16-bit weights", "adapters",
    "gradients of adapters", "states of the optimizer", "activations kept for backward", "activations of one layer",
    "gathered units", "logits and loss", "workspaces",
)  # fmt: skip


def test_what_is_said_for_people_and_for_programs(known):
    """Every part, loading, the host, the links, what each option saves, bitsandbytes: in the text and in the JSON."""
    job = {"gpus": 2, "sharding": "fsdp2", "nested": True, "offload_activations": True, "batch": 2, "rank": 8}
    plan = planning.plan(known("llama-3-8b"), **job, targets=("q_proj", "v_proj"), optimizer="paged_adamw_8bit")
    found, said = json.loads(json.dumps(text.data(plan))), text.text(plan)
    in_gib = lambda size: f"{size / GIB:.2f}"  # noqa: E731
    named = {part for moment in plan.memory.moments() for part in moment.parts}
    assert named | {"states of the optimizer"} == set(PARTS)
    assert all(f"| {part} | {in_gib(size)} |" in said for part, size in found["peak"]["parts"].items())
    for phase, line in (("load", "loading"), ("prepare", "sharding, adapters")):
        pair = (found["loading"][phase], found["bitsandbytes"]["loading"][phase])
        assert f"| {line} | {in_gib(pair[0])} | {in_gib(pair[1])} |" in said
    for what, size in [*found["host"].items(), *found["links"].items()]:
        assert size > 0 and f"{what} {in_gib(size)} GiB" in said
    assert found["host"].keys() == {"activations", "states of the optimizer"} and found["links"].keys() == {
        "other GPUs",
        "host",
    }
    assert found["changes"]
    for change in found["changes"]:
        assert change["saves"] == found["needs"] - change["needs"] > 0
        assert f"| {change['name']} | {in_gib(change['saves'])} | {'yes' if change['fits'] else 'no'} |" in said
    assert f"{in_gib(found['fragments'])} fragments and {in_gib(found['outside'])} outside torch" in said


def test_the_options_of_the_command(tiny, capsys):
    """Each arrives in the job."""
    words = "--gpus 4x80 --seq 64 --batch 3 --lora-rank 4 --targets q_proj,v_proj --optimizer lion_8bit --fsdp 1"
    assert (
        main.main(["plan", str(tiny), "--load-in-8bit", *words.split(), "--offload", "weights,activations", "--json"])
        == 0
    )
    job = json.loads(capsys.readouterr().out)["job"]
    wanted = {
        "bits": 8, "gpus": 4, "gib": 80.0, "seq": 64, "batch": 3, "rank": 4, "targets": ["q_proj", "v_proj"],
        "optimizer": "lion_8bit", "sharding": "fsdp1", "offload_weights": True, "offload_activations": True,
    }  # fmt: skip
    assert job.items() >= wanted.items()


def test_units_are_counted_once_for_all_plans(known, monkeypatch):
    """A large model is planned in seconds: of 20 options none that leaves the weights as they are counts anew."""
    counted, count = [], planning.Model._counted
    monkeypatch.setattr(planning.Model, "_counted", lambda self, job: counted.append(job) or count(self, job))
    model = planning.Model(SMALL)
    text.text(planning.plan(model, gpus=2, sharding="fsdp2", gib=0.1))
    assert 0 < len(counted) <= 8


def test_the_tables_of_the_page(known):
    """docs/experts.md shows what the plan says."""
    page = (ROOT / "docs" / "experts.md").read_text(encoding="utf-8")
    for name, gpus, gib in (("qwen3-30b-a3b", 1, 24), ("gpt-oss-120b", 2, 47)):
        job = {"gpus": gpus, "gib": gib, "sharding": "fsdp2" if gpus > 1 else "none", "rank": 8, "lora_experts": True}
        job |= {"lora_dtype": "bfloat16", "optimizer": "adamw_8bit", "nested": True, "experts_4bit": True}
        assert "\n".join(text.parts(planning.plan(known(name), **job))) in page, name


def test_attention_is_played_as_the_kernels_keep_it():
    q, k = torch.empty(1, 4, 16, 8, device="meta"), torch.empty(1, 2, 16, 8, device="meta")
    q.requires_grad_()
    with meter.Meter([q, k]) as metered:
        out, _ = played._attention(None, q, k, k)
    assert out.shape == (1, 16, 4, 8) and metered.live == 4 * 16 * 8 * 4 + 512  # one result, and a float per row
