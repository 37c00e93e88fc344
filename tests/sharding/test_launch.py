"""What the environment says about sharding, and what loading does about it; no process group needed."""

import gc
import logging
import os
import weakref

import pytest
import torch
from bitshard import functional
from bitshard.nn.linear import Linear4bit, LinearNF4
from bitshard.process import launch
from bitshard.tensor import Params4bit
from torch import nn

CUT = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
READ_AHEAD = "HF_DEACTIVATE_ASYNC_LOAD"
LARGE = nn.Identity()  # stands for a layer that waits for its weight


@pytest.fixture
def two(monkeypatch):
    """A process of two in which nothing was sharded yet; a function that sets its environment."""
    for name in (*CUT, READ_AHEAD, "BITSHARD_CUT", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch, "world", lambda: 2)
    for name in ("_sharded", "_turned_off_read_ahead", "_warned_of_fsdp1"):
        monkeypatch.setattr(launch, name, False)
    monkeypatch.setattr(launch, "_waiting", weakref.WeakKeyDictionary())

    def environment(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return environment


@pytest.mark.parametrize(
    ("environment", "expected"),
    (
        ({}, False),
        (CUT, True),
        ({**CUT, "FSDP_VERSION": "1"}, False),
        ({**CUT, "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}, False),
        ({**CUT, "ACCELERATE_USE_FSDP": "false"}, False),
        ({**CUT, "ACCELERATE_USE_DEEPSPEED": "true"}, False),
        ({**CUT, "BITSHARD_CUT": "0"}, False),
        ({"BITSHARD_CUT": "1"}, True),
        ({**CUT, "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}, False),
        ({**CUT, "PARALLELISM_CONFIG_TP_SIZE": "1"}, True),
    ),
)
def test_who_keeps_parts(two, environment, expected):
    two(**environment)
    assert launch.keeps_parts() is expected


def test_one_process_keeps_whole_weights(two, monkeypatch):
    two(**CUT, BITSHARD_CUT="1")
    monkeypatch.setattr(launch, "world", lambda: 1)
    assert not launch.keeps_parts()


def test_models_are_whole_once_one_was_sharded(two):
    two(**CUT)
    launch.note_sharding()
    assert not launch.keeps_parts()
    two(BITSHARD_CUT="1")
    assert launch.keeps_parts()


def test_a_value_that_says_nothing_raises(two):
    two(BITSHARD_CUT="maybe")
    with pytest.raises(ValueError, match="BITSHARD_CUT=maybe"):
        launch.keeps_parts()


def meta_layer():
    with torch.device("meta"):
        return Linear4bit(64, 32)


def test_reading_ahead_is_off_while_parts_are_kept(two):
    two(**CUT)
    meta_layer()
    assert os.environ[READ_AHEAD] == "1"
    launch.note_sharding()
    assert READ_AHEAD not in os.environ


def test_a_users_choice_of_reading_ahead_stays(two):
    two(**CUT, **{READ_AHEAD: "0"})
    meta_layer()
    launch.note_sharding()
    assert os.environ[READ_AHEAD] == "0"


def test_reading_ahead_stays_on_elsewhere(two):
    meta_layer()
    assert READ_AHEAD not in os.environ


def test_transformers_reserves_the_size_of_a_part(two):
    """Its `caching_allocator_warmup` would allocate the whole 4-bit model on each GPU."""
    from transformers import BitsAndBytesConfig, LlamaConfig
    from transformers.modeling_utils import get_total_byte_count
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    class Model(nn.Module):
        all_tied_weights_keys = {}
        config = LlamaConfig()

        def __init__(self):
            super().__init__()
            self.layer = meta_layer()
            self.norm = nn.Parameter(torch.empty(10, dtype=torch.bfloat16, device="meta"))

        def get_parameter_or_buffer(self, name):
            return self.get_parameter(name)

    quantizer = Bnb4BitHfQuantizer(BitsAndBytesConfig(load_in_4bit=True), pre_quantized=False)
    model, gpu = Model(), torch.device("cuda", 0)
    where = dict.fromkeys(("layer.weight", "norm"), gpu)
    assert get_total_byte_count(model, where, quantizer)[gpu] == 64 * 32 / 2 + 20
    two(**CUT)
    assert get_total_byte_count(model, where, quantizer)[gpu] == 64 * 32 / 2 / 2 + 20
    assert model.layer.weight.numel() == 64 * 32  # whoever else asks


def test_out_of_memory_says_what_a_shard_needs(two, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("out of memory, tried to allocate 2 GiB.")

    launch._waiting[LARGE] = 2**33
    monkeypatch.setattr(functional, "quantize_4bit", full)
    with pytest.raises(torch.OutOfMemoryError, match=r"tried to allocate 2 GiB.*4.12 GiB, 2.06 for each of 2 ranks"):
        Linear4bit(64, 32).to("cpu")
    quantized = LinearNF4(64, 32, quant_storage=torch.float32)
    monkeypatch.undo()
    state = quantized.to("cpu").quant_state
    column = torch.empty(256, 1, device="meta")
    monkeypatch.setattr(launch, "world", lambda: 2)
    launch._waiting[LARGE] = 2**33
    monkeypatch.setattr(functional, "quantize_4bit", full)
    # the first weight of a model that was sharded first: the others are still to come
    Params4bit.of_state(column, state, torch.float32, None).new_zeros(128, 1)
    with pytest.raises(torch.OutOfMemoryError, match="2.06 for each of 2 ranks"):
        Linear4bit(64, 32).to("cpu")
    launch.note_sharding()
    with pytest.raises(torch.OutOfMemoryError) as error:
        Linear4bit(64, 32).to("cpu")
    assert "ranks" not in str(error.value)  # nothing is being loaded any more


def test_layers_that_are_gone_wait_no_longer(two):
    layers = [meta_layer() for _ in range(3)]
    one = layers[0].weight.numel()
    assert launch.waiting_elements() == 3 * one > 0
    del layers[0]
    for _ in range(3):  # where another thread is collecting, gc.collect() returns at once, with nothing collected
        gc.collect()  # a layer and its weight know each other
    assert launch.waiting_elements() == 2 * one
    launch.note_sharding()
    assert launch.waiting_elements() == 0


def test_a_cpu_that_is_out_of_memory_says_so_too(two, monkeypatch):
    """torch has no type for it: its words are what accelerate's find_executable_batch_size looks for."""
    words = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8"

    def full(*args, **kwargs):
        raise RuntimeError(words)

    launch._waiting[LARGE] = 2**33
    monkeypatch.setattr(functional, "quantize_4bit", full)
    with pytest.raises(RuntimeError, match="can't allocate memory.*2.06 for each of 2 ranks"):
        Linear4bit(64, 32).to("cpu")


def test_fsdp1_is_told_what_it_takes(two, monkeypatch, caplog):
    two(ACCELERATE_USE_FSDP="true", FSDP_VERSION="1")
    monkeypatch.setattr(launch, "sharding_begins", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    launch._waiting[LARGE] = 2**33
    with caplog.at_level(logging.WARNING, "bitshard"):
        for _ in range(2):
            Linear4bit(64, 32).to("cpu")
    (record,) = caplog.records
    assert "4.12 GiB" in record.getMessage() and "fsdp_version: 2" in record.getMessage()
