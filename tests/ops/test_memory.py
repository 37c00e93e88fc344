"""Ops that run out of memory raise what torch raises, in its words, which is what others catch."""

import subprocess
import sys

import pytest
import torch
from bitshard import functional, ops
from bitshard.nn.linear import Linear4bit
from bitshard.sharding.together import Ranks

WORDS = "DefaultCPUAllocator: can't allocate memory: you tried to allocate"
# A process whose memory is full, and what its ops say. Their sizes are more than a freed block of another size holds.
FULL = """
import resource

import torch
from bitshard import functional
from bitshard.nn.linear import Linear4bit

layer = Linear4bit(1024, 2048, bias=False, compute_dtype=torch.float32, compress_statistics=False).to("cpu")
x = torch.randn(4096, 1024)
layer(x[:64])
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + 2**21, resource.getrlimit(resource.RLIMIT_AS)[1]))
for name, call in (
    ("torch", lambda: torch.empty(2**23)),
    ("linear_4bit", lambda: layer(x)),
    ("dequantize_4bit", lambda: functional.dequantize_4bit(layer.weight.data, layer.quant_state)),
    ("quantize_blockwise", lambda: torch.ops.bitshard.quantize_blockwise(x, torch.ones(256), torch.empty(0), 256)),
):
    try:
        call()
        print(name, "nothing", "", sep="|")
    except RuntimeError as error:
        print(name, type(error).__name__, str(error).replace(chr(10), " "), sep="|")
"""


def test_cpu_ops_say_it_in_torch_s_words():
    """Type and words of torch, the op's name and the bytes: by them accelerate makes its batches smaller."""
    memory = pytest.importorskip("accelerate.utils.memory")
    done = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, timeout=120)
    said = [line.split("|") for line in done.stdout.splitlines()]
    assert [name for name, *_ in said] == ["torch", "linear_4bit", "dequantize_4bit", "quantize_blockwise"], done.stderr
    for name, kind, words in said:
        assert kind == "RuntimeError" and WORDS in words and memory.should_reduce_batch_size(RuntimeError(words))
        assert name == "torch" or f"{name}: no memory for" in words and "cpu:-1" not in words


@pytest.fixture
def full_gpu(monkeypatch):
    """Every op of the C core fails with what it says where a GPU is full."""
    words = "CUDA out of memory. Tried to allocate 64.00 MiB. an_op: no memory for a tensor, 67108864 bytes on cuda:0"

    def fail(*args, **kwargs):
        raise RuntimeError(words)

    for op in ops.OPS:
        monkeypatch.setattr(op, "_op", ops._raising(fail))
    return words


def test_gpu_ops_raise_torch_s_type(full_gpu):
    """By name, as a packet's overload and from the functions above them."""
    memory = pytest.importorskip("accelerate.utils.memory")
    x = torch.randn(64, 64)
    for call in (
        lambda: ops.quantize_4bit(x, 64, 0, torch.uint8),
        lambda: torch.ops.bitshard.checksum.default(x),
        lambda: functional.quantize_4bit(x),
        lambda: Linear4bit(64, 64).to("cpu"),
    ):
        with pytest.raises(torch.OutOfMemoryError) as error:
            call()
        assert str(error.value).startswith(full_gpu) and memory.should_reduce_batch_size(error.value)


def test_batches_get_smaller(full_gpu):
    memory = pytest.importorskip("accelerate.utils.memory")
    tried = []

    @memory.find_executable_batch_size(starting_batch_size=8)
    def train(batch_size):
        tried.append(batch_size)
        if batch_size > 2:
            ops.checksum(torch.zeros(batch_size))

    train()
    assert tried[0] == 8 and tried[-1] <= 2


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="blocksize") as error:
        ops.quantize_4bit(torch.randn(64), 63, 0, torch.uint8)
    assert type(error.value) is RuntimeError and not ops.is_out_of_memory(error.value)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError(f"{WORDS} 8 bytes.")])
def test_a_rank_that_is_out_of_memory_raises_that(monkeypatch, error):
    """And not the error that tells the others of it."""
    from bitshard.sharding import together

    monkeypatch.setattr(together, "everyone", lambda fact: [fact, fact])
    ranks = Ranks()
    ranks.world, ranks.collective = 2, True

    def action():
        raise error

    with pytest.raises(type(error)) as seen:
        ranks.together("loading", action)
    assert seen.value is error


def test_a_step_of_many_parameters_says_so_too(monkeypatch):
    """With what the error tells of the parameters that were updated."""
    from bitshard.optim import update

    def fail(batches):
        error = RuntimeError(
            "CUDA out of memory. Tried to allocate 1.00 MiB. optimizer: (1 of 2 parameters were updated)"
        )
        error.done = [True, False]
        raise error

    monkeypatch.setattr(update._C, "optimizer_steps", fail)
    with pytest.raises(torch.OutOfMemoryError) as error:
        update.update_all([])
    assert error.value.done == [True, False]
