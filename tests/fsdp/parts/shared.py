"""What the workers that load models in parts share: models on disk, how they are loaded and compared, a runner."""

import argparse
import contextlib
import datetime
import itertools
import json
import logging
import os
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1]))
from common import Spy, as_bytes, same_bytes, wrong_bytes  # noqa: E402, F401
from helpers import tiny  # noqa: E402
from transformers import AutoModelForCausalLM, BitsAndBytesConfig  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402

VOCABULARY = 96
TOKENS = torch.arange(48).view(2, 24) * 7 % VOCABULARY
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "uint8": torch.uint8}
# (storage, nested scales, dtype of the model)
CELLS = list(itertools.product(("uint8", "bf16", "fp32"), (False, True), ("bf16", "fp32")))
EVERY = [(cell, packed) for cell in CELLS for packed in (False, True)]  # from dense and from packed files
HALF = [(cell, bool((i + i // 2) % 2)) for i, cell in enumerate(CELLS)]  # each storage and level from either once
LAYERS = 14  # 4-bit ones
GROUP_TIMEOUT = 25  # seconds that a rank waits for the others in a collective


def name_of(storage, nested, dtype):
    return f"{storage}-{'nested' if nested else 'plain'}-{dtype}"


def make_dense(folder):
    """A Llama in fp32 whose query rows 2 and 3 ranks divide between blocks, unlike its MLP of 173 rows and columns."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 96, "intermediate_size": 173, "num_key_value_heads": 2}
    tiny.llama(folder, attention_bias=True, initializer_range=0.1, pad_token_id=0, **sizes)


def quantization(storage="uint8", nested=True):
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_quant_storage=DTYPES[storage],
    )


def load(folder, storage="uint8", nested=True, dtype="fp32", packed=False, **options):
    """The model of a cell, from `folder`/dense or (`packed`) from the pre-quantized files of that cell."""
    if packed:
        return load_from(f"{folder}/{name_of(storage, nested, dtype)}", dtype, **options)
    return load_from(f"{folder}/dense", dtype, quantization_config=quantization(storage, nested), **options)


def load_from(path, dtype="fp32", **options):
    return AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], **options)


def linears(model):
    """{name: layer} of the 4-bit layers, also of peft's wrapping."""
    return {name: layer for name, layer in model.named_modules() if "Linear4bit" in type(layer).__name__}


@torch.no_grad()
def logits(model):
    return model(input_ids=TOKENS).logits


def differing(found, expected):
    """Keys whose dtype, shape or bytes differ, without the JSON entries, which a sharded model pads with spaces."""
    keys = {key for key in {*found, *expected} if "quant_state." not in key}
    return sorted(
        key for key in keys if key not in found or key not in expected or not same_bytes(found[key], expected[key])
    )


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


@contextlib.contextmanager
def environment(**values):
    """Variables set, or with None removed, while this is open."""
    before = {name: os.environ.get(name) for name in values}
    assign(values)
    try:
        yield
    finally:
        assign(before)


def assign(values):
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@contextlib.contextmanager
def logged(name):
    """The messages that a logger gets while this is open."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def refused(action, *words, kinds=(ValueError, RuntimeError)):
    """The text of the error that `action` must raise, which must have all `words`."""
    try:
        action()
    except kinds as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{missing} not in: {error}"
        return str(error)
    raise AssertionError(f"nothing was raised, expected an error with {words}")


def start():
    """Join a gloo group if there is a launcher; the options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True, help="folder of alone.py's models")
    parser.add_argument("--out", required=True, help="JSON results; each rank adds its number")
    parser.add_argument("--only", default="", help="comma-separated beginnings of the names of checks; else all")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=GROUP_TIMEOUT))
    return args


def run(checks, args):
    """Run {name: function} on all ranks, write each rank's results, and leave.

    A check that fails alike on all ranks leaves them in step, and the next one follows; else it was the last one.
    """
    results = {}
    steps = dist.FileStore(f"{args.out}.steps", world())
    wanted = tuple(args.only.split(","))
    for name, check in checks.items():
        if not name.startswith(wanted):
            continue
        began = time.monotonic()
        try:
            results[name] = {"ok": check(args.dir)}
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-4000:]}
            print(f"rank {rank()} {name}: {results[name]['trace']}", flush=True)
        results[name]["seconds"] = round(time.monotonic() - began, 2)
        if not in_step(steps, name, "error" in results[name]):
            break
    with open(f"{args.out}.{rank()}", "w") as file:
        json.dump(results, file, indent=1)
    sys.stdout.flush()
    leave(steps)


def in_step(steps, name, failed):
    """Whether all ranks passed, or all failed."""
    steps.set(f"{name}/{rank()}", str(failed))
    keys = [f"{name}/{other}" for other in range(world())]
    steps.wait(keys, datetime.timedelta(seconds=2 * GROUP_TIMEOUT))
    return len({steps.get(key) for key in keys}) == 1


def leave(steps):
    """All at once, and without the interpreter's shutdown, which gloo's thread can abort (see ../common.py)."""
    in_step(steps, "leave", False)
    os._exit(0)
