"""Whether this process can call around torch's dispatcher, which calls did, and memory at low addresses."""

import ctypes
import itertools
import mmap
import threading

import pytest
import torch
from bitshard import _C

HAS_TABLE = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
calls_directly = pytest.mark.skipif(not HAS_TABLE, reason="this torch has no exchange table")


class _WithoutFallback:
    """A context without the ops behind the C core's functions; of several threads the last one puts them back."""

    def __init__(self):
        self.lock, self.inside, self.behind = threading.Lock(), 0, None

    def __enter__(self):
        with self.lock:
            if self.inside == 0:
                self.behind = _C.fall_back(None)
            self.inside += 1

    def __exit__(self, *error):
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                _C.fall_back(self.behind)


without_fallback = _WithoutFallback()


class Alone:
    """The functions of the C core without the ops behind them: None where they fall back."""

    def __getattr__(self, name):
        def call(*arguments):
            with without_fallback:
                return getattr(_C, name)(*arguments)

        return call


alone = Alone()


def noting(taken, name, function):
    """A function, of the C core for example, that notes its name where it does not fall back on the op."""

    def call(*arguments):
        with without_fallback:
            result = function(*arguments)
        taken.extend([name] if result is not None else [])
        return result if result is not None or not name.startswith(("linear", "dequantize")) else function(*arguments)

    return call


_LOW = itertools.count(1 << 36, 1 << 24)
_MAP_FIXED_NOREPLACE = 0x100000


def at_low_address(tensor):
    """A copy on the CPU below 2^40, where the heap of an interpreter lies that is not position-independent.

    Its 16 MiB of addresses are never unmapped.
    """
    assert tensor.nbytes <= 1 << 24
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
    place = ctypes.CDLL(None).mmap
    place.restype, place.argtypes = (
        ctypes.c_ssize_t,
        [ctypes.c_size_t, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long],
    )
    address = place(next(_LOW), tensor.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, 0)
    memory = torch.frombuffer((ctypes.c_ubyte * tensor.nbytes).from_address(address), dtype=tensor.dtype)
    assert memory.data_ptr() == address and 0 < address < 1 << 40
    return memory.view(tensor.shape).copy_(tensor)
