"""Run by test_native.py with the original bitsandbytes: what its native library looks like, and what it computes.

upstream_native.py describe             JSON: argtypes of the CUDA functions, tables, and how unknown names answer
upstream_native.py cpu FOLDER           calls the CPU functions with the inputs in FOLDER; writes what they gave
upstream_native.py gemv FOLDER          the same for cgemm_4bit_inference_naive_* on a GPU
"""

import ctypes as ct
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import bitsandbytes as bnb
import torch
from safetensors.torch import load_file, save_file

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Recorder:
    """Takes what bitsandbytes.backends.cuda.ops sets on a library that this machine cannot load."""

    def __init__(self):
        self.functions = {}

    def __getattr__(self, name):
        return self.functions.setdefault(name, SimpleNamespace())


def cuda_functions() -> dict[str, SimpleNamespace]:
    """name -> function with argtypes and restype, for every one that upstream sets them for."""
    recorder = Recorder()
    torch._C._cuda_getCurrentRawStream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    bnb.cextension.lib = recorder
    sys.modules.pop("bitsandbytes.backends.cuda.ops", None)
    bnb._ops.register_kernel = lambda *names: lambda function: function
    import bitsandbytes.backends.cuda.ops  # noqa: F401

    return {name: function for name, function in recorder.functions.items() if hasattr(function, "argtypes")}


def answer(call) -> str:
    """The error that a call ends with."""
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return ""


def cpu_library() -> bnb.cextension.BNBNativeLibrary:
    """The CPU library, also where the package has loaded another."""
    place = Path(bnb.__file__).parent / "libbitsandbytes_cpu.so"
    return bnb.cextension.BNBNativeLibrary(ct.CDLL(str(place)))


def describe() -> dict:
    library, cpu = bnb.cextension.lib, cpu_library()
    facts = {
        "unknown": [hasattr(library, "cnonsense"), answer(library.cnonsense), answer(library["cnonsense"])],
        "kept": library.cnonsense is library.cnonsense,
        "compiled_with_cuda": library.compiled_with_cuda,
        "same": bnb.functional.lib is library,
        "tables": {name: bnb.functional.get_4bit_type(name, device="cpu").tolist() for name in ("nf4", "fp4")},
        "avx512": [bool(cpu.has_avx512f_cpu()), bool(cpu.has_avx512bf16_cpu())],
        "cpu_argtypes": cpu.cdequantize_blockwise_cpu_nf4_fp32.argtypes,
        "cpu_restype": cpu.cdequantize_blockwise_cpu_nf4_fp32.restype.__name__,
    }
    functions = cuda_functions()
    facts["argtypes"] = {name: [t.__name__ for t in function.argtypes] for name, function in functions.items()}
    facts["restypes"] = {name: function.restype and function.restype.__name__ for name, function in functions.items()}
    return facts


def call_cpu(folder: Path) -> None:
    """Quantize x by the map, and dequantize both forms."""
    given = load_file(folder / "inputs.safetensors")
    pointer, lib, n = bnb.functional.get_ptr, cpu_library(), given["x"].numel()
    rows, columns = given["shape"].tolist()
    sizes = (ct.c_longlong(64), ct.c_longlong(n))
    made = {"code": torch.empty(n, dtype=torch.uint8), "absmax": torch.empty(n // 64), "values": torch.empty(n)}
    made.update(nf4=torch.empty(n), fp4=torch.empty(n))
    scratch = given["map"].clone()  # its first entry is set to -1
    lib.cquantize_blockwise_cpu_fp32(*map(pointer, (scratch, given["x"], made["absmax"], made["code"])), *sizes)
    lib.cdequantize_blockwise_cpu_fp32(
        *map(pointer, (given["map"], given["code"], given["absmax"], made["values"])), *sizes
    )
    for name in ("nf4", "fp4"):
        function = lib[f"cdequantize_blockwise_cpu_{name}_fp32"]
        addresses = map(pointer, (given["packed"], given["absmax"], made[name]))
        function(*addresses, ct.c_longlong(64), ct.c_longlong(rows), ct.c_longlong(columns))
    functional = bnb.functional
    state = functional.QuantState(given["absmax"].clone(), torch.Size([32, n // 32]), None, 64, "nf4", torch.float32)
    made["reordered"], state = functional._convert_weight_packed_for_cpu(given["packed"], state)
    made["reordered_absmax"] = state.absmax
    save_file(made, folder / "outputs.safetensors")


def call_gemv(folder: Path) -> None:
    """Products of one row, for every case in the folder's index."""
    given, made = load_file(folder / "inputs.safetensors", device="cuda"), {}
    stream = torch.cuda.current_stream().cuda_stream
    for case in json.loads((folder / "cases.json").read_text()):
        key, m, k, blocksize = case["key"], case["m"], case["k"], case["blocksize"]
        addresses = [given[f"{key}/{name}"].data_ptr() for name in ("x", "packed", "absmax", "table")]
        made[key] = torch.empty(m, device="cuda", dtype=DTYPES[case["dtype"]])
        function = bnb.cextension.lib[f"cgemm_4bit_inference_naive_{case['dtype']}"]
        function(m, 1, k, *addresses, made[key].data_ptr(), m, k // 2, m, blocksize, stream)
    torch.cuda.synchronize()
    save_file(made, folder / "outputs.safetensors")


if __name__ == "__main__":
    if sys.argv[1] == "describe":
        print(json.dumps(describe()))
    else:
        {"cpu": call_cpu, "gemv": call_gemv}[sys.argv[1]](Path(sys.argv[2]))
