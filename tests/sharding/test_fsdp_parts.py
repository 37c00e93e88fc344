"""4-bit models that no rank ever holds whole: sharded before they are loaded, or cut while they are loaded.

The workers are in tests/fsdp/parts: native.py under torchrun, cut.py under accelerate, compared with alone.py.
"""

import inspect
import time

import pytest
from fsdp.launch import LIMIT, WORKERS, accelerate_launch, launch, options, passed, results

PARTS = WORKERS / "parts"
SHAPES = "256x256 128x256 98x256 97x100 5x64 2x96 512x688 96x688 96x720 1x64 6x33 768x1536".split()
EXACT = [f"exact_{shape}" for shape in SHAPES] + ["exact_planted"]
CELLS = [
    f"{storage}-{scales}-{dtype}"
    for storage in ("uint8", "bf16", "fp32")
    for scales in ("plain", "nested")
    for dtype in ("bf16", "fp32")
]
MODELS = [f"model_{cell}_{files}" for cell in CELLS for files in ("dense", "packed")]
HALF = [f"model_{cell}_{'packed' if (i + i // 2) % 2 else 'dense'}" for i, cell in enumerate(CELLS)]
SAVED = [f"saved_{name}" for name in ("uint8_dense", "uint8_packed", "bf16_packed", "fp32_dense")]
TRAINED = (
    "loop_beside trainer_plain trainer_sharded loop_sharded loop_fused loop_unsharded merge_plain merge_sharded"
).split()
FAULTS = [
    f"fault_{name}"
    for name in (
        *"truncated truncated_packed absurd_header long_header rows_missing rows_missing_even columns_missing".split(),
        *"columns_missing_even transposed bytes_missing no_absmax no_nested_absmax no_quant_state scales_short".split(),
        *"nested_scales_short nested_scale_negative scale_nan".split(),
    )
]
NATIVE = [*EXACT, *MODELS, *SAVED, "planted", *TRAINED, *FAULTS, "after_faults"]
THREE = [*EXACT, *HALF, SAVED[0], "planted", *TRAINED, "fault_rows_missing", "fault_no_absmax", "after_faults"]
HYBRID = [name for name in MODELS if name.split("_")[1] in ("uint8-nested-bf16", "bf16-plain-fp32", "fp32-nested-fp32")]
HYBRID += ["loop_beside"]
BEFORE = (
    "memory reads_raise state_dicts lone_reads_raise dequantize late_dequantize dora other_weights lone_dequantize "
    "dora_again "
    "switched_off without_efficient_loading hybrid_of_accelerate"
).split()
CUT = [*BEFORE, *FAULTS, "first_models", "later_model", *MODELS, "other_mesh", "planted", "different_files"]
CUT_THREE = [*BEFORE, "first_models", "later_model", *HALF, "other_mesh", "planted", "different_files"]


@pytest.fixture(scope="module")
def folder(parts_folder):
    """The models of alone.py, and what one process makes of them."""
    return parts_folder


def native(folder, ranks):
    name = f"native{ranks}"
    launch(ranks, "cpu_fsdp.py", str(PARTS / "native.py"), *options(folder, name), timeout=LIMIT)
    return results(folder, name, ranks)


def cut(folder, ranks):
    name = f"cut{ranks}"
    accelerate_launch("fsdp2_cut.yaml", "parts/cut.py", *options(folder, name), world=ranks, timeout=LIMIT)
    return results(folder, name, ranks)


@pytest.fixture(scope="module")
def native2(folder):
    return native(folder, 2)


@pytest.fixture(scope="module")
def native3(folder):
    return native(folder, 3)


@pytest.fixture(scope="module")
def native4(folder):
    """Two replicas of two shards."""
    return native(folder, 4)


@pytest.fixture(scope="module")
def cut2(folder):
    return cut(folder, 2)


@pytest.fixture(scope="module")
def cut3(folder):
    return cut(folder, 3)


@pytest.mark.parametrize("check", EXACT)
def test_rows_on_one_rank(folder, check):
    passed(results(folder, "alone", 1), check)


@pytest.fixture
def transformers_can(check, request):
    """Skip what transformers 5.17 has not: HSDP, and a Trainer that trains a model it has sharded (it asks for DDP)."""
    from transformers.distributed import DistributedConfig

    hybrid = request.node.name.startswith("test_sharded_before_loading_on_two_replicas")
    if "dp_replicate_size" not in inspect.signature(DistributedConfig).parameters and (hybrid or "trainer" in check):
        pytest.skip("this transformers has no DistributedConfig(dp_replicate_size) and no Trainer for sharded models")


@pytest.mark.usefixtures("transformers_can")
@pytest.mark.parametrize("check", NATIVE)
def test_sharded_before_loading_on_two_ranks(native2, check):
    passed(native2, check)


@pytest.mark.usefixtures("transformers_can")
@pytest.mark.parametrize("check", THREE)
def test_sharded_before_loading_on_three_ranks(native3, check):
    passed(native3, check)


@pytest.mark.usefixtures("transformers_can")
@pytest.mark.parametrize("check", HYBRID)
def test_sharded_before_loading_on_two_replicas(native4, check):
    passed(native4, check)


@pytest.mark.parametrize("check", CUT)
def test_cut_while_loading_on_two_ranks(cut2, check):
    passed(cut2, check)


@pytest.mark.parametrize("check", CUT_THREE)
def test_cut_while_loading_on_three_ranks(cut3, check):
    passed(cut3, check)


def test_no_check_is_missing(native2, native3, native4, cut2, cut3):
    assert set(native2[0]) == set(NATIVE) and set(native3[0]) == set(THREE) and set(native4[0]) == set(HYBRID)
    assert set(cut2[0]) == set(CUT) and set(cut3[0]) == set(CUT_THREE)


@pytest.mark.parametrize(
    "way, fault, words",
    [
        ("native", "truncated_packed", "SafetensorError: Error while deserializing header: incomplete metadata"),
        ("native", "no_absmax", "model.layers.1.mlp.up_proj.weight: rank 1 of 2 cannot load it"),
        ("native", "row_missing", "model.layers.1.mlp.up_proj.weight: rank 0 of 2 cannot load it"),
        ("cut", "truncated", "SafetensorError: Error while deserializing header: incomplete metadata"),
    ],
    ids=["native-truncated", "native-no_absmax", "native-row_missing", "cut-truncated"],
)
def test_a_rank_that_fails_alone_ends_the_others(folder, way, fault, words):
    """Its own error is in the output, and the launch is over before the others' patience is."""
    arguments = [*options(folder, "lone"), "--only", f"{way},{fault}"]
    began = time.monotonic()
    if way == "native":
        text = launch(2, "cpu_fsdp.py", str(PARTS / "lone.py"), *arguments, timeout=120, fails=True)
    else:
        text = accelerate_launch("fsdp2_cut.yaml", "parts/lone.py", *arguments, timeout=120, fails=True)
    assert words in text
    assert "computed on what it loaded" not in text
    assert time.monotonic() - began < 60
