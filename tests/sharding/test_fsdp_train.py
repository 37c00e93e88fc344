"""The real stack on two processes: Trainer, SFTTrainer, DoRA, merging, resume, saving; FSDP2, FSDP1, torchrun."""

import importlib.metadata
import json
import sys

import pytest
from bitshard import tensor
from fsdp.launch import WORKERS, accelerate_launch, launch, made_model, run
from packaging import version

BASELINE = "trainer trainer_bf16 sft sft_dora dora kbit fp16".split()
# save_state and fp32_base come first: they make an Accelerator of their own
FSDP2 = [
    "save_state",
    *BASELINE,
    *"resume resume_full adapter merge merge_dora save_pretrained loaded_early".split(),
]
FSDP1 = "fp32_base trainer trainer_bf16 sft sft_dora dora planted merge_fsdp1".split()
# relative, of each loss; a planted fault makes 4e-3 or more
BOUNDS = {
    "trainer": 1e-5,
    "dora": 1e-5,
    "trainer_bf16": 1e-3,
    "sft": 1e-3,
    "sft_dora": 1e-3,
    "kbit": 1e-3,
    "fp16": 1e-3,
}
# trl before 1.15 casts DoRA's magnitudes to bfloat16 as well; of these 1.14.2 is what pip installs for Python 3.10
TRL_KEEPS_MAGNITUDES = version.parse(importlib.metadata.version("trl")) >= version.parse("1.15")
BASE_BYTES = 21888  # packed bytes of the tiny model's 14 linears; 684 scales


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama and its tokenizer in model/, and room for runs."""
    return made_model(tmp_path_factory.mktemp("train"))


def options(folder, name, scenarios):
    out = folder / name
    out.mkdir()
    return ["--only", ",".join(scenarios), "--model", str(folder / "model"), "--dir", str(out), "--out", str(out / "r")]


def results(folder, name, ranks=2):
    """The results of all ranks, which must agree about losses; rank 0's."""
    ranks = [json.loads((folder / name / f"r.{rank}").read_text()) for rank in range(ranks)]
    for rank in ranks:
        for scenario, result in rank.items():
            assert "error" not in result, f"{scenario}: {result['trace']}"
    return ranks[0]


@pytest.fixture(scope="module")
def alone(folder):
    """One process."""
    run([sys.executable, str(WORKERS / "train.py"), *options(folder, "alone", BASELINE)], 240)
    return results(folder, "alone", 1)


@pytest.fixture(scope="module")
def broken(folder):
    """The same with one packed word in 1,000 changed."""
    run([sys.executable, str(WORKERS / "train.py"), "--plant", *options(folder, "broken", BASELINE)], 240)
    return results(folder, "broken", 1)


@pytest.fixture(scope="module")
def fsdp2(folder):
    """accelerate launch with FSDP2."""
    accelerate_launch("fsdp2.yaml", "train.py", *options(folder, "fsdp2", FSDP2), timeout=480)
    return results(folder, "fsdp2")


@pytest.fixture(scope="module")
def cut(folder):
    """The same with efficient loading: each rank keeps its part of every model, the first one and later ones."""
    names = [*BASELINE, "resume"]
    accelerate_launch("fsdp2_cut.yaml", "train.py", *options(folder, "cut", names), timeout=480, BITSHARD_CUT="1")
    return results(folder, "cut")


@pytest.fixture(scope="module")
def fsdp1(folder):
    """accelerate launch with FSDP1."""
    accelerate_launch("fsdp1.yaml", "train.py", "--fsdp", "1", *options(folder, "fsdp1", FSDP1))
    return results(folder, "fsdp1")


def gap(a, b):
    assert len(a) == len(b) >= 2
    return max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("scenario", BASELINE)
def test_fsdp2_gives_the_losses_of_one_process(alone, fsdp2, scenario):
    assert gap(alone[scenario]["losses"], fsdp2[scenario]["losses"]) <= BOUNDS[scenario]


@pytest.mark.parametrize("scenario", BASELINE)
def test_weights_loaded_in_parts_give_the_losses_of_one_process(alone, broken, cut, scenario):
    assert gap(alone[scenario]["losses"], cut[scenario]["losses"]) <= BOUNDS[scenario]
    assert gap(broken[scenario]["losses"], cut[scenario]["losses"]) > BOUNDS[scenario]


def test_a_run_on_parts_resumes(fsdp2, cut):
    assert "FSDP2 over 2 ranks" in cut["resume"]["report"]
    assert gap(fsdp2["resume"]["losses"], cut["resume"]["losses"]) <= BOUNDS["trainer"]


@pytest.mark.parametrize("scenario", ("trainer", "trainer_bf16", "sft", "sft_dora", "dora"))
def test_fsdp1_gives_the_losses_of_one_process(alone, fsdp1, scenario):
    assert gap(alone[scenario]["losses"], fsdp1[scenario]["losses"]) <= BOUNDS[scenario]


def test_what_is_trained_gets_one_dtype_only_where_fsdp_needs_it(alone, fsdp1, fsdp2):
    for found in (alone, fsdp1, fsdp2):
        assert found["sft"]["dtypes"] == ["bfloat16"]
    given = ["bfloat16", "float32"] if TRL_KEEPS_MAGNITUDES else ["bfloat16"]
    assert alone["sft_dora"]["dtypes"] == given
    assert fsdp1["sft_dora"]["dtypes"] == (given[-1:] if tensor._FSDP1_CLIPS_ONE_DTYPE else given)
    assert fsdp2["sft_dora"]["dtypes"] == given[-1:]


def test_other_fsdp2_options_give_the_same(folder, alone):
    """Efficient loading, whole state dicts, and layers that stay gathered after forward (and are merged so)."""
    names = ["save_state", "trainer", "resume_full", "merge"]
    accelerate_launch("fsdp2_options.yaml", "train.py", *options(folder, "options", names))
    found = results(folder, "options")
    assert gap(alone["trainer"]["losses"], found["trainer"]["losses"]) <= BOUNDS["trainer"]
    assert all("(1/2.00)" in found[name]["report"] for name in names)


@pytest.mark.parametrize("scenario", BASELINE)
def test_a_planted_fault_leaves_the_curve(broken, fsdp1, fsdp2, scenario):
    for sharded in (fsdp1, fsdp2):
        if scenario in sharded:
            assert gap(broken[scenario]["losses"], sharded[scenario]["losses"]) > BOUNDS[scenario]


def test_a_planted_fault_raises_under_fsdp1(fsdp1):
    assert "checksum" in fsdp1["planted"]["error_seen"]


def test_default_uint8_storage_is_sharded(fsdp1, fsdp2):
    """As accelerate would not do by itself: it leaves integer weights whole on every rank."""
    line = fsdp2["trainer"]["report"]
    assert f"FSDP2 over 2 ranks: 14 weights, {BASE_BYTES // 2:,} of {BASE_BYTES:,} bytes (1/2.00)" in line
    assert "342 of 684 bytes of scales (sharded)" in line
    assert "FSDP1 over 2 ranks" in fsdp1["trainer"]["report"]


@pytest.mark.parametrize(
    "scenario", ("save_state", "resume", "resume_full", "adapter", "merge", "merge_dora", "save_pretrained")
)
def test_fsdp2_saves_resumes_and_merges(fsdp2, scenario):
    """The scenario's own assertions hold; see tests/fsdp/train.py."""
    assert "FSDP2 over 2 ranks" in fsdp2[scenario]["report"]


def test_a_saved_base_trains_again(alone, fsdp2):
    """Losses on the checkpoint written from shards, loaded pre-quantized, are those of the original."""
    assert gap(alone["trainer"]["losses"][:2], fsdp2["save_pretrained"]["losses"]) <= BOUNDS["trainer"]


def test_merging_under_fsdp1_raises(fsdp1):
    assert "full_state_dict" in fsdp1["merge_fsdp1"]["error_seen"]


def test_a_base_of_another_dtype_than_fsdp1_computes_in_raises(fsdp1):
    assert "dtype= of from_pretrained" in fsdp1["fp32_base"]["error_seen"]


def test_weights_loaded_before_the_launch_are_sharded(alone, fsdp2):
    """accelerate would leave their 14 uint8 parameters whole on every rank."""
    found = fsdp2["loaded_early"]
    assert "FSDP2 over 2 ranks" in found["report"]
    assert gap(alone["trainer"]["losses"][:2], found["losses"]) <= BOUNDS["trainer"]


@pytest.mark.parametrize("version", [1, 2])
def test_bare_torchrun_shards_default_storage(folder, alone, version):
    name = f"torchrun{version}"
    arguments = ["--fsdp", str(version), *options(folder, name, ["torchrun_late", "torchrun"])]
    launch(2, "cpu_fsdp.py", str(WORKERS / "train.py"), *arguments)
    found = results(folder, name)
    sharded = ["torchrun", "torchrun_late"] if version == 2 else ["torchrun"]
    for scenario in sharded:
        assert f"FSDP{version} over 2 ranks" in found[scenario]["report"]
        assert gap(alone["trainer"]["losses"], found[scenario]["losses"]) <= BOUNDS["trainer"]
    if version == 1:
        assert "FSDP1" in found["torchrun_late"]["error_seen"]
        assert "bnb_4bit_quant_storage" in found["torchrun_late"]["error_seen"]


def test_damage_by_use_orig_params_raises(folder):
    arguments = options(folder, "orig", ["orig_params"])
    accelerate_launch("fsdp1_orig_params.yaml", "train.py", "--fsdp", "1", *arguments)
    text = results(folder, "orig")["orig_params"]["error_seen"]
    assert "checksum" in text and "use_orig_params" in text
