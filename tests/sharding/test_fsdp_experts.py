"""4-bit experts under FSDP2 and FSDP1, on two and three processes; the worker is tests/fsdp/parts/moe.py."""

import json
import sys

import pytest
import torch
import transformers
from bitshard.transformers import FourBitConfig
from fsdp.launch import LIMIT, WORKERS, accelerate_launch, launch, options, passed, results, run
from helpers import moe, tiny
from transformers import AutoModelForCausalLM

LOADED = ("in_parts", "native", "by_units", "units_of_experts")
TWO = [f"{how}_{cell}" for cell in ("qwen3_moe_nested", "gpt_oss_plain") for how in LOADED]
TWO += [f"training_{how}_{what}" for what in (*moe.FAMILIES, "in_16_bits") for how in ("fsdp1", "fsdp2")]
TWO += [f"{what}_{family}" for family in ("qwen3_moe", "gpt_oss") for what in ("saved", "merged", "merging")]
TWO += [f"dense_{how}_{family}" for family in moe.FAMILIES for how in ("fsdp1", "fsdp2")]
TWO += [f"late_adapters_{how}_{family}" for how in ("native", "by_units") for family in ("qwen3_moe", "gpt_oss")]
TWO += ["training_checkpointing", "training_fused_fsdp1", "training_fused_fsdp2", "fsdp1_orig", "fsdp1_flat", "offload"]
TWO += ["merging_fsdp1", "published_mxfp4", "published_fp8", "parallel_plans"]
TWO += [f"kept_mxfp4_{how}" for how in ("by_units", "in_parts", "native", "whole", "fsdp1", "state_dicts")]
TWO += [f"kept_nvfp4_{what}_{how}" for what in moe.NVFP4 for how in ("by_units", "native", "in_parts")]
TWO += ["distributed_checkpoint", "distributed_checkpoint_gpt_oss", "quantizing_shards"]
SCALARS = [f"kept_nvfp4_{layout}_native" for layout in ("modelopt", "compressed-tensors")]
THREE = [f"{how}_few_nested" for how in LOADED if how != "native"] + ["training_fsdp2_few", "distributed_checkpoint"]
FOUR = ["hybrid_qwen3_moe", "hybrid_gpt_oss"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Dense and packed files: qwen3_moe and gpt_oss with 3 experts, which 2 ranks do not divide; `few` has 2 for 3."""
    folder = tmp_path_factory.mktemp("moe")
    for name, family, count in (("qwen3_moe", "qwen3_moe", 8), ("gpt_oss", "gpt_oss", 3), ("few", "qwen3_moe", 2)):
        model = moe.model(family, count)
        model.save_pretrained(folder / name)
        for parameter in model.parameters():
            parameter.data.neg_()
        model.save_pretrained(folder / f"{name}-other")
        for nested in (False, True):
            config = FourBitConfig(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested)
            packed = AutoModelForCausalLM.from_pretrained(
                folder / name, quantization_config=config, dtype=torch.float32, device_map="cpu"
            )
            packed.save_pretrained(folder / f"{name}-{'nested' if nested else 'plain'}")
    for family in moe.FAMILIES:
        if not (folder / family).exists():
            moe.model(family, 4).save_pretrained(folder / family)
    moe.save_mxfp4(moe.model("gpt_oss", 3, intermediate_size=64), folder / "mxfp4")
    moe.save_mxfp4(moe.model("gpt_oss", 3, intermediate_size=64), folder / "mxfp4-other", seed=1)
    for name in moe.NVFP4:
        layout, _, family = name.partition(" ")
        sizes = {"intermediate_size": 64} if family == "mixtral" else {"moe_intermediate_size": 64}
        model = moe.model(family, 3, **sizes) if family else tiny.llama(vocab_size=moe.VOCABULARY)
        moe.save_nvfp4(model, folder / f"nvfp4-{name}", layout)
    wide = dict.fromkeys(("hidden_size", "moe_intermediate_size", "intermediate_size"), 128)
    moe.save_fp8(moe.model("deepseek_v3", 4, **wide), folder / "fp8")
    return folder


def ranks(folder, count):
    launch(count, "parts/moe.py", *options(folder, f"moe{count}"), timeout=LIMIT)
    return results(folder, f"moe{count}", count)


@pytest.fixture(scope="module")
def two(folder):
    return ranks(folder, 2)


@pytest.fixture(scope="module")
def three(folder, two):
    """Reads a checkpoint of `two`."""
    return ranks(folder, 3)


@pytest.fixture(scope="module")
def four(folder, two):
    """As `three`."""
    return ranks(folder, 4)


def test_all_checks_ran(two, three, four):
    for found, names in ((two, TWO), (three, THREE), (four, FOUR)):
        assert [sorted(rank) for rank in found] == [sorted(names)] * len(found)


@pytest.mark.parametrize("name", TWO)
def test_two_ranks(two, name):
    if transformers.__version__.startswith("5.17.") and name in SCALARS:
        pytest.skip("transformers 5.17 cuts scalars of NVFP4 along a dimension that they lack (IndexError)")
    passed(two, name)


@pytest.mark.parametrize("name", THREE)
def test_more_ranks_than_experts(three, name):
    passed(three, name)


@pytest.mark.parametrize("name", FOUR)
def test_hybrid(four, name):
    passed(four, name)


def test_trainer_under_accelerate(folder):
    """FSDP2 with efficient loading, `experts.enable()`, adapters on stacks: losses of one process with as many rows.

    The program also resumes from a checkpoint and compares.
    """
    out = folder / "trainer"
    accelerate_launch("fsdp2_cut.yaml", "moe_trainer.py", str(folder / "qwen3_moe"), "2", f"{out}2", timeout=LIMIT)
    run([sys.executable, str(WORKERS / "moe_trainer.py"), str(folder / "qwen3_moe"), "4", f"{out}1"], LIMIT)
    two, one = (json.loads((folder / name).read_text()) for name in ("trainer2", "trainer1"))
    assert len(one["losses"]) == 3 and two["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert (
        "sharded by FSDP2 over 2 ranks: 12 weights, 4 of them stacks of experts" in two["kept"]
        and "not sharded" in one["kept"]
    )
