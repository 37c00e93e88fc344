"""Checkpoints with one fault each, and the error that loading them must end with.

`make` writes them beside the good ones. A fault is a function of the good files' bytes or tensors.
"""

import shutil
import struct
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from shared import logged, name_of, quantization

PACKED = name_of("uint8", True, "fp32")
PLAIN = name_of("bf16", False, "fp32")
WEIGHT = "model.layers.1.mlp.up_proj.weight"  # [173, 96]: its rows are gathered before they are quantized
EVEN = "model.layers.1.self_attn.q_proj.weight"  # [96, 96]: each rank quantizes its own rows


def truncated(data):
    return data[:-1000]


def absurd_header(data):
    return struct.pack("<Q", 1 << 60) + data[8:]


def long_header(data):
    """A header longer than the file."""
    return struct.pack("<Q", len(data)) + data[8:]


def rows_missing(key, count=2):
    return lambda tensors: tensors.update({key: tensors[key][:-count].contiguous()})


def columns_missing(key):
    return lambda tensors: tensors.update({key: tensors[key][:, :-32].contiguous()})


def transposed(tensors):
    tensors[WEIGHT] = tensors[WEIGHT].T.contiguous()


def bytes_missing(tensors):
    tensors[WEIGHT] = tensors[WEIGHT][:-64].contiguous()


def without(entry):
    def fault(tensors):
        del tensors[f"{WEIGHT}.{entry}"]

    return fault


def scales_short(tensors):
    tensors[f"{WEIGHT}.absmax"] = tensors[f"{WEIGHT}.absmax"][:-4].contiguous()


def nested_scales_short(tensors):
    tensors[f"{WEIGHT}.nested_absmax"] = tensors[f"{WEIGHT}.nested_absmax"][:-1].contiguous()


def nested_scale_negative(tensors):
    tensors[f"{WEIGHT}.nested_absmax"][0] *= -1


def scale_nan(tensors):
    """The last one, which the last rank reads."""
    tensors[f"{WEIGHT}.absmax"][-1] = torch.nan


# name: (checkpoint, fault of its bytes or of its tensors, words of the error or of what is logged with it)
BYTES = {
    "truncated": ("dense", truncated, ["afetensor"]),
    "truncated_packed": (PACKED, truncated, ["afetensor"]),
    "absurd_header": ("dense", absurd_header, ["eader"]),
    "long_header": (PACKED, long_header, ["eader"]),
}
TENSORS = {
    "rows_missing": ("dense", rows_missing(WEIGHT), [WEIGHT, "[173, 96]"]),
    "rows_missing_even": ("dense", rows_missing(EVEN), [EVEN, "[96, 96]"]),
    "columns_missing": ("dense", columns_missing(WEIGHT), [WEIGHT, "[173, 96]"]),
    "columns_missing_even": ("dense", columns_missing(EVEN), [EVEN, "[96, 96]"]),
    "transposed": ("dense", transposed, [WEIGHT, "[173, 96]"]),
    "bytes_missing": (PACKED, bytes_missing, [WEIGHT]),
    "no_absmax": (PACKED, without("absmax"), [WEIGHT, "absmax"]),
    "no_nested_absmax": (PACKED, without("nested_absmax"), [WEIGHT, "nested_absmax"]),
    "no_quant_state": (PACKED, without("quant_state.bitsandbytes__nf4"), [WEIGHT, "quant_state"]),
    "scales_short": (PACKED, scales_short, [WEIGHT]),
    "nested_scales_short": (PACKED, nested_scales_short, [WEIGHT]),
    "nested_scale_negative": (PACKED, nested_scale_negative, [WEIGHT, "nested_absmax are", "below zero"]),
    "scale_nan": (PLAIN, scale_nan, [WEIGHT, "absmax are not finite", "nan"]),
}
FAULTS = {**BYTES, **TENSORS}
# of 172 rows the last of two ranks reads 86, as many as of 173
UNEVEN = {"row_missing": ("dense", rows_missing(WEIGHT, 1), [WEIGHT, "[173, 96]"])}


def folder_of(folder, name):
    return f"{folder}/fault-{name}"


def make(folder):
    for name, (source, fault, _) in {**FAULTS, **UNEVEN}.items():
        target = Path(folder_of(folder, name))
        shutil.copytree(f"{folder}/{source}", target)
        file = target / "model.safetensors"
        if name in BYTES:
            file.write_bytes(fault(file.read_bytes()))
            continue
        with safe_open(file, "pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        fault(tensors)
        save_file(tensors, file, {"format": "pt"})
    others = Path(f"{folder}/other-dense")
    shutil.copytree(f"{folder}/dense", others)
    with safe_open(f"{folder}/dense/model.safetensors", "pt") as opened:
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    generator = torch.Generator().manual_seed(7)
    tensors[WEIGHT] = torch.randn(tensors[WEIGHT].shape, generator=generator) * 0.1
    save_file(tensors, others / "model.safetensors", {"format": "pt"})


def must_fail(name, load):
    """`load(options)` of the faulty files must raise; error and log must name what is wrong.

    Of dense files twice, for nested and for plain scales. The texts.
    """
    source, _, words = FAULTS[name]
    texts = []
    for options in [{"nested": True}, {"nested": False}] if source == "dense" else [None]:
        with logged("transformers") as messages:
            try:
                load({} if options is None else {"quantization_config": quantization(**options)})
            except Exception as error:
                text = "\n".join([f"{type(error).__name__}: {error}", *messages])
            else:
                raise AssertionError(f"loaded files with this fault: {name}, {options}")
        missing = [word for word in words if word not in text]
        assert not missing, f"{missing} not in: {text}"
        assert "imed out" not in text, text
        texts.append(text[:2000])
    return texts
