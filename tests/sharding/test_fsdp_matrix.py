"""FSDP1 and FSDP2 on gloo: every storage, param_dtype, world size and split is exact or raises as documented."""

import json

import pytest
from bitshard import tensor
from fsdp.launch import launch

STORAGES = ("uint8", "bf16", "fp16", "fp32")
PARAM_DTYPES = ("none", "bf16", "fp16", "fp32")
SPLITS = ("even", "uneven")
STACKS = ("4 experts", "5 experts", "2 experts")
SHORT_BLOCKS = ("mxfp4", "nvfp4")
NEWEST_UINT8 = (2, 12)  # from here on fully_shard takes integer parameters


@pytest.fixture(scope="module", params=[1, 2, 3])
def cells(request, tmp_path_factory):
    """(world, results per rank) of one launch of the full product."""
    out = tmp_path_factory.mktemp("matrix") / "result.json"
    print(launch(request.param, "matrix.py", "--out", str(out)))
    return request.param, json.loads(out.read_text())


def everywhere(cells, name):
    return [rank[name] for rank in cells[1]["ranks"]]


def exact(result):
    """No byte wrong; and with words changed afterwards weight, scales and output were all seen to be wrong."""
    return type(result) is list and result[:2] == [0, 0] and result[2] > 0 and result[3] > 0 and result[4] == 0


@pytest.mark.parametrize("split", SPLITS + STACKS)
@pytest.mark.parametrize("storage", STORAGES)
def test_fsdp2_is_exact_in_every_cell(cells, storage, split):
    for param_dtype in PARAM_DTYPES:
        name = f"fsdp2 {storage} {param_dtype} {split}"
        assert all(exact(result) for result in everywhere(cells, name)), (name, everywhere(cells, name))


@pytest.mark.parametrize("split", SPLITS)
def test_fsdp2_true_uint8(cells, split):
    """uint8 that stays uint8: exact where torch shards integers at all, which is also what other tests go by."""
    major_minor = tuple(int(part) for part in cells[1]["torch"].split(".")[:2])
    assert tensor._FSDP2_TAKES_INTEGERS == (major_minor >= NEWEST_UINT8)
    for param_dtype in PARAM_DTYPES:
        for result in everywhere(cells, f"fsdp2 true-uint8 {param_dtype} {split}"):
            if major_minor >= NEWEST_UINT8:
                assert exact(result), result
            else:
                assert result.startswith("ValueError: FSDP2 of torch") and "bnb_4bit_quant_storage" in result


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("dtype", ("bf16", "fp16", "fp32"))
def test_int8_is_exact_or_names_the_setting(cells, dtype, split):
    """LLM.int8 in a container of the weight's own dtype: FSDP2 in every cell, FSDP1 where nothing is cast."""
    for param_dtype in PARAM_DTYPES:
        name = f"int8-{dtype} {param_dtype} {split}"
        assert all(exact(result) for result in everywhere(cells, f"fsdp2 {name}")), everywhere(cells, f"fsdp2 {name}")
        for result in everywhere(cells, f"fsdp1 {name}"):
            if param_dtype in ("none", dtype):
                assert exact(result), (name, result)
            else:
                assert result.startswith("ValueError") and "param_dtype" in result, result


@pytest.mark.parametrize("split", SPLITS + STACKS)
@pytest.mark.parametrize("quant_type", SHORT_BLOCKS)
def test_short_blocks_are_exact_or_name_the_setting(cells, quant_type, split):
    """MXFP4 and NVFP4, weights and stacks, stored as bfloat16."""
    for param_dtype in PARAM_DTYPES:
        name = f"{quant_type} {param_dtype} {split}"
        assert all(exact(result) for result in everywhere(cells, f"fsdp2 {name}")), everywhere(cells, f"fsdp2 {name}")
        for result in everywhere(cells, f"fsdp1 {name}"):
            if param_dtype in ("none", "bf16"):
                assert exact(result), (name, result)
            else:
                assert result.startswith("ValueError") and "param_dtype" in result, result


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("storage", STORAGES)
def test_fsdp1_is_exact_or_names_the_setting(cells, storage, split):
    container = "bf16" if storage == "uint8" else storage  # of the weights that were quantized
    for param_dtype in PARAM_DTYPES:
        for result in everywhere(cells, f"fsdp1 {storage} {param_dtype} {split}"):
            if param_dtype in ("none", container):
                assert exact(result), (param_dtype, result)
            else:
                assert result.startswith("ValueError") and "param_dtype" in result, result
                assert "bnb_4bit_quant_storage" in result


@pytest.mark.parametrize("stacks", STACKS)
@pytest.mark.parametrize("storage", STORAGES)
def test_fsdp1_with_stacks_is_exact_or_names_the_setting(cells, storage, stacks):
    """In memory they are of the model's dtype, bfloat16, whatever the storage of files is."""
    for param_dtype in PARAM_DTYPES:
        for result in everywhere(cells, f"fsdp1 {storage} {param_dtype} {stacks}"):
            if param_dtype in ("none", "bf16"):
                assert exact(result), (param_dtype, result)
            else:
                assert result.startswith("ValueError") and "param_dtype" in result, result


def test_fsdp1_true_uint8_names_the_setting(cells):
    for split in SPLITS:
        for result in everywhere(cells, f"fsdp1 true-uint8 none {split}"):
            assert result.startswith("ValueError: FSDP1 cannot shard") and "bnb_4bit_quant_storage" in result


def test_planted_faults_are_seen(cells):
    """One word in 1,000 changed behind the back of the comparison: it must not report an exact cell."""
    for result in everywhere(cells, "fsdp2 planted weight"):
        assert result[0] > 0 and result[1] == 0
    for version in (1, 2):
        for result in everywhere(cells, f"fsdp{version} planted scales"):
            assert result[0] == 0 and result[1] > 0
    for result in everywhere(cells, "fsdp1 planted weight"):
        assert result.startswith("ValueError") and "checksum" in result


def test_no_cell_is_missing(cells):
    expected = 2 * len(PARAM_DTYPES) * (len(SPLITS) * (len(STORAGES) + 1) + len(STACKS) * len(STORAGES)) + 4
    expected += 2 * len(PARAM_DTYPES) * len(SPLITS) * 3  # int8
    expected += 2 * len(PARAM_DTYPES) * len(SPLITS + STACKS) * len(SHORT_BLOCKS)
    assert all(len(rank) == expected for rank in cells[1]["ranks"])
