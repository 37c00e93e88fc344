"""FSDP2 one option at a time, and the state dicts: tests/fsdp/run_checks.py on one to four processes."""

import json

import pytest
from fsdp.launch import launch, passed

BROADCAST = (
    "broadcast_whole broadcast_without_scales broadcast_adapters broadcast_scales_of_a_base broadcast_declared "
    "broadcast_parts broadcast_short"
).split()
CHECKS = (
    *"ranks_that_differ ranks_that_differ_in_scales ranks_agree_once".split(),
    *"replicas_that_differ replicas_agree_once replicas_of_fsdp1_that_differ".split(),
    *"ddp_of_ranks_that_differ ddp_of_equal_ranks what_ranks_bring".split(),
    *"offload checkpointing gather_in_place no_reshard freed_after_use single_layers".split(),
    *"inference_mode eval_modes hsdp".split(),
    *"assign assign_misfits later_gathers dequantize describe replicated".split(),
    *"sharded_state_dict torch_save contradictions full_state_dict torch_full_state_dict".split(),
    *BROADCAST,
    *"embedding_units embedding_tied_head embedding_state_dicts embedding_load".split(),
    *"another_kind another_kind_in_files another_kind_quantized_after_sharding another_kind_differs".split(),
    *"dcp resume loss_curves casts_raise fp16 fsdp1_options fsdp1_shared_weight fsdp1_state_dicts".split(),
    *"int8_dcp int8_full_state_dict int8_entries_of_files int8_torch_state_dicts int8_misfits int8_offload".split(),
    *"int8_loaded_before int8_float_weights int8_refusals int8_words int8_ddp".split(),
)
THREE_RANKS = (
    *"ranks_that_differ ranks_that_differ_in_scales ranks_agree_once".split(),
    *"gather_in_place inference_mode sharded_state_dict full_state_dict dcp offload assign dequantize".split(),
    "later_gathers",
    *"int8_dcp int8_full_state_dict int8_torch_state_dicts int8_misfits".split(),
    *BROADCAST,
    *"embedding_units embedding_tied_head embedding_state_dicts".split(),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints, shared by the launches: what two ranks wrote, three read."""
    return tmp_path_factory.mktemp("checkpoints")


def results(world, folder, *options):
    out = folder / f"axes{world}.json"
    print(launch(world, "run_checks.py", "--out", str(out), "--dir", str(folder), *options))
    return json.loads(out.read_text())["ranks"]


@pytest.fixture(scope="module")
def two(folder):
    return results(2, folder)


@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks(two, check):
    passed(two, check)


def test_no_check_is_missing(two):
    assert set(two[0]) == set(CHECKS)


def test_one_rank(folder):
    """fully_shard on one process: nothing is gathered, everything else is the same.

    torch's FSDP2 of one process cannot run under inference_mode, dense layers included.
    """
    left_out = ("freed_after_use", "describe", "loss_curves", "inference_mode")
    checks = [name for name in CHECKS if name not in left_out]
    for name, result in results(1, folder, "--only", ",".join(checks))[0].items():
        assert "error" not in result, f"{name}: {result['trace']}"


def test_three_ranks(two, folder):
    """Uneven everywhere; DCP also reads what two ranks wrote."""
    ranks = results(3, folder, "--only", ",".join(THREE_RANKS))
    for rank in ranks:
        assert {name: rank[name].get("error") for name in rank} == dict.fromkeys(THREE_RANKS)
    assert ranks[0]["dcp"]["ok"] >= 2


def test_hybrid_sharding_on_four_ranks(folder):
    """Two replicas of two shards, of FSDP2 and of FSDP1, equal and not."""
    checks = "hsdp fsdp1_options replicas_that_differ replicas_agree_once replicas_of_fsdp1_that_differ".split()
    for rank in results(4, folder, "--only", ",".join(checks)):
        for name in checks:
            assert "error" not in rank[name], rank[name].get("trace")
