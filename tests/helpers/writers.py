"""Every writer of checkpoints tried on one tiny model: written, loaded again by its class, and compared.

What a file must give is taken from the model that was written, never from the writer: its outputs with or without the
adapters, and its tensors. `benchmarks/writers.py` runs all architectures by this, `test_writers.py` one of each cause.
"""

import contextlib
import copy
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from bitshard import fsdp, functional
from bitshard.convert.merge import merge_folder
from bitshard.convert.quantize import quantize_folder
from bitshard.weights.inventory import holder_of
from helpers import tiny
from helpers.wrappers import OF_TASKS, adapted_paths
from safetensors import safe_open
from safetensors.torch import save_file

TOLERANCE = 2e-4  # of what is dense: largest difference of an output over its largest value
REQUANTIZED = 2e-3  # of what is quantized again: a value between two codes may take either
CLEAR = (ValueError, NotImplementedError, TypeError, OSError, ImportError)  # of errors that were meant
_EXACT, _DENSE, _AGAIN = "exact", "dense", "quantized again"


class Result(NamedTuple):
    """What came of one try.

    Attributes:
        kind: ok; raises (a clear error before the first byte); WRONG; NAMES (it loads, but its names are not those that
            transformers writes); "left out" (nothing can be said).
        words: the error, or what differs.
    """

    kind: str
    words: str


class Way(NamedTuple):
    """A way to write.

    Attributes:
        base: of the model that has the adapters: "4bit" or "dense".
        adapters: whether what is written has the adapters in it.
        match: how near the loaded model must be.
        packed: whether the folder has 4-bit weights.
        write: function of (subject, wrapped model, folder of its adapter, out).
    """

    base: str
    adapters: bool
    match: str
    packed: bool
    write: object


def settings():
    """NF4, computing in fp32, so that nothing but the writer makes a difference."""
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )


def _save(**options):
    return lambda subject, wrapped, adapter, out: fsdp.save_pretrained(wrapped, out, progress=False, **options)


def _collect(subject, wrapped, adapter, out):
    """What `dense_weights` gives as a folder: as a server has it that knows the model's config."""
    weights = fsdp.dense_weights(wrapped, torch.float32)
    announced, tensors = weights.metadata(), {}
    for name, tensor in weights:
        if name in tensors:
            raise AssertionError(f"{name} came twice")
        tensors[name] = tensor.clone().contiguous()
    came = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()]
    if came != announced:
        wrong = [pair for pair in zip(announced, came, strict=False) if pair[0] != pair[1]]
        raise AssertionError(f"metadata() announced {len(announced)} tensors, {len(came)} came: {wrong[:2]}")
    inner = wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else wrapped
    config = copy.deepcopy(inner.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if set(getattr(inner, "all_tied_weights_keys", None) or ()) & tensors.keys():
        config.tie_word_embeddings = False
    config.save_pretrained(out)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def _quantize(subject, wrapped, adapter, out):
    quantize_folder(subject.dense, out, settings())


def _merge(base, dtype):
    return lambda subject, wrapped, adapter, out: merge_folder(getattr(subject, base), adapter, out, dtype)


FP32 = torch.float32
WAYS = {
    "save": Way("4bit", False, _EXACT, True, _save()),
    "save dtype": Way("4bit", False, _DENSE, False, _save(dtype=FP32)),
    "save merge": Way("4bit", True, _AGAIN, True, _save(merge=True)),
    "save merge dtype": Way("4bit", True, _DENSE, False, _save(merge=True, dtype=FP32)),
    "dense_weights": Way("4bit", True, _DENSE, False, _collect),
    "save (dense)": Way("dense", False, _EXACT, False, _save()),
    "save merge (dense)": Way("dense", True, _DENSE, False, _save(merge=True)),
    "dense_weights (dense)": Way("dense", True, _DENSE, False, _collect),
    "quantize": Way("4bit", False, _EXACT, True, _quantize),
    "merge (dense)": Way("dense", True, _DENSE, False, _merge("dense", FP32)),
    "merge": Way("4bit", True, _DENSE, False, _merge("packed", FP32)),
    "merge 4bit": Way("4bit", True, _AGAIN, True, _merge("packed", None)),
}
PLAIN = ("save", "save dtype", "dense_weights", "save (dense)", "dense_weights (dense)", "quantize")  # no adapter
ADAPTED = tuple(name for name in WAYS if name != "quantize")


def ways_of(wrapper):
    """Names of the ways that make sense with a wrapper (None: without)."""
    return PLAIN if wrapper is None else ADAPTED


class LeftOut(Exception):
    """Nothing can be said about this model, and why."""


class Subject:
    """A tiny model in folders, dense and in 4 bits, as transformers writes it, and what each gives.

    Args:
        cls: class of transformers.
        folder: for its files.
        change: function of a model that is called for each one after it was loaded.
        files: function of the folder of the dense files, which gives them their published names.
        options: settings of its config.

    LeftOut where no tiny model is made, or where transformers' own files give another model.
    """

    def __init__(self, cls, folder, change=None, files=None, **options):
        self.cls, self.folder, self.change = cls, Path(folder), change
        self.dense, self.packed = self.folder / "dense", self.folder / "packed"
        self.note = ""
        try:
            model = tiny.make(cls, **options)
            model.save_pretrained(self.dense)
            if files is not None:
                files(self.dense)
        except Exception as error:
            raise LeftOut(tiny.words(error)) from error
        try:
            expected, self.arguments = tiny.outputs(model)
        except LookupError as error:
            expected, self.arguments, self.note = None, None, f"tensors compared only: {error}"
        self.models, self.given = {}, {}
        again = self._own(self.dense, model, expected)
        if files is not None:
            again.save_pretrained(self.folder / "saved")
        self.names = names_in(self.dense if files is None else self.folder / "saved")
        self._have("dense", again)

    def _have(self, base, model):
        if self.change is not None:
            self.change(model)
        self.models[base], self.given[base] = model, self.outputs(model)

    def prepare(self):
        """The 4-bit model, as transformers quantizes and saves it."""
        try:
            model = self.load(self.dense, quantization_config=settings(), device_map={"": "cpu"})[0]
        except Exception as error:
            raise LeftOut(f"transformers loads none in 4 bits: {tiny.words(error)}") from error
        self._have("4bit", model)
        self.is_packed = any(holder_of(m, n) is not None for m in model.modules() for n in m._parameters)
        if self.change is None:
            self._save_packed(model)

    def _save_packed(self, model):
        """Its folder, where transformers can load that again: not where it fuses packed bytes of several layers."""
        try:
            model.save_pretrained(self.packed)
            again, wrong = self.load(self.packed, **({"device_map": {"": "cpu"}} if self.is_packed else {}))
            if wrong != self.own_complaints or self.given["4bit"] and _gap(self.outputs(again), self.given["4bit"]):
                raise ValueError(wrong or "another model")
        except Exception as error:
            self.note += f" transformers' own 4-bit files do not load: {tiny.words(error)}"
            shutil.rmtree(self.packed, ignore_errors=True)

    def load(self, folder, **options):
        """(model, complaints of loading)."""
        options = {"dtype": FP32, "local_files_only": True, **options}
        model, info = self.cls.from_pretrained(folder, output_loading_info=True, **options)
        wrong = [f"{len(value)} {kind}: {sorted(map(str, value))[:2]}" for kind, value in info.items() if value]
        return model.eval(), "; ".join(wrong)

    def outputs(self, model):
        """What it gives for the arguments of this subject; None where there is no forward."""
        kinds = {config.peft_type.value for config in getattr(model, "peft_config", {}).values()}
        more = {"task_ids": torch.tensor([0])} if kinds & OF_TASKS else {}
        return None if self.arguments is None else tiny.outputs(model, self.arguments, **more)[0]

    def _own(self, folder, model, expected):
        """Loaded again from transformers' own files. LeftOut where that is another model."""
        try:
            again, wrong = self.load(folder)
            gap = _gap(self.outputs(again), expected) if expected is not None else 0.0
        except Exception as error:
            raise LeftOut(f"transformers cannot load its own files: {tiny.words(error)}") from error
        self.own_complaints = wrong
        if gap > TOLERANCE:
            raise LeftOut(f"transformers' own files give another model: {gap:.1e}; {wrong}")
        return again


def _gap(found, expected):
    """Largest difference of an output, over its largest value; outputs of prompts are longer in front."""
    if found.keys() != expected.keys():
        return float("inf")
    worst = 0.0
    for name, one in expected.items():
        other = found[name]
        if other.shape != one.shape:
            return float("inf")
        worst = max(worst, float((other - one).abs().max() / one.abs().max().clamp_min(1e-9)))
    return worst


# ---- tensors ----


def values(model):
    """{key: dense values} of all parameters and saved buffers; of Conv1D as of a linear layer."""
    found = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        transposed = type(module).__name__ == "Conv1D"
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or name in module._non_persistent_buffers_set:
                continue
            held = holder_of(module, name)
            value = tensor.detach()
            if held is not None and held.state is not None:
                value = held.oriented(functional.dequantize_4bit(tensor.data, held.state))
            found[prefix + name] = value.t() if transposed and value.dim() == 2 else value
    return found


def _changed(found, expected, paths, exact):
    """Keys whose values differ, but those below `paths`."""
    wrong = []
    for key, one in expected.items():
        if any(key.startswith(f"{path}.") or key == path for path in paths):
            continue
        other = found.get(key)
        if other is None or other.shape != one.shape:
            wrong.append(f"{key} {'is missing' if other is None else f'is {list(other.shape)}, not {list(one.shape)}'}")
        elif not (torch.equal(other, one) if exact else torch.allclose(other.float(), one.float(), atol=1e-5)):
            wrong.append(f"{key} is off by {float((other.float() - one.float()).abs().max()):.1e}")
    return wrong


def names_in(folder):
    """Names in the safetensors files of a folder."""
    names = set()
    for path in Path(folder).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    return names


# ---- one try ----


def wrapped(subject, way, wrap):
    """(a model under adapters whose values are random, what it gives with them, and without). LeftOut: none is made."""
    base = copy.deepcopy(subject.models[WAYS[way].base])
    try:
        torch.manual_seed(1)
        model = wrap(base)
    except Exception as error:
        raise LeftOut(f"peft makes none: {tiny.words(error)}") from error
    model.eval()
    if any(map(_loses_bias, model.modules())):
        raise LeftOut("peft computes the head, tied to an embedding with trained tokens, without its bias")
    try:
        given = subject.outputs(model)
    except LookupError as error:
        raise LeftOut(f"no forward with it: {error}") from error
    return model, given


def _loses_bias(module):
    """Whether peft's forward leaves out the bias of a layer, which its own merging keeps."""
    base = getattr(module, "base_layer", None)
    return hasattr(module, "trainable_tokens_delta") and getattr(base, "bias", None) is not None


def tried(subject, way, wrap, folder, wrapper_changes_base=False):
    """One Result.

    Args:
        subject, way: a `Subject`, a name of WAYS.
        wrap: function of a model that gives it under adapters; None: no adapters.
        folder: for files, empty.
        wrapper_changes_base: the base under the adapters is another model than before (layer_replication, bias="all").
    """
    spec = WAYS[way]
    try:
        base = subject.models[spec.base]
        before = subject.given[spec.base]
        if wrap is None:
            model, adapted = base, before
        else:
            model, adapted = wrapped(subject, way, wrap)
            if before is not None and not wrapper_changes_base and _gap(adapted, before) < 1e-3:
                raise LeftOut("the adapter changes nothing")
        if wrapper_changes_base and not spec.adapters:
            with model.disable_adapter():
                before = subject.outputs(model)
        expected = adapted if spec.adapters else before
        spec = spec._replace(adapters=spec.adapters or wrapper_changes_base)
        adapter = Path(folder) / "adapter"
        if way.startswith(("merge", "quantize")) and subject.change is not None:
            raise LeftOut("the model is not that of its folder")
        if way.startswith("merge"):
            model, expected = _with_folder(subject, spec, model, adapter, expected)
    except LeftOut as error:
        return Result("left out", str(error))
    return _written(subject, way, spec, wrap, model, adapter, expected, Path(folder))


def _with_folder(subject, spec, model, adapter, expected):
    """For writers that read an adapter's folder: it, and what peft makes of it."""
    from peft import PeftModel

    if not hasattr(subject, "packed") or (spec.base == "4bit" and not names_in(subject.packed)):
        raise LeftOut("no folder in 4 bits")
    try:
        model.save_pretrained(adapter)
        again = PeftModel.from_pretrained(copy.deepcopy(subject.models[spec.base]), adapter).eval()
        given = subject.outputs(again)
    except Exception as error:
        raise LeftOut(f"peft cannot load its own adapter: {tiny.words(error)}") from error
    if given is not None and _gap(given, expected) > TOLERANCE:
        raise LeftOut(f"peft loads another adapter than it has saved: off by {_gap(given, expected):.1e}")
    return again, given


def _written(subject, way, spec, wrap, model, adapter, expected, folder):
    out = folder / "out"
    try:
        spec.write(subject, model, adapter, out)
    except Exception as error:
        return _refused(error, out)
    try:
        found, wrong = subject.load(out, **({"device_map": {"": "cpu"}} if spec.packed and subject.is_packed else {}))
    except Exception as error:
        return Result("WRONG", f"written, but cannot be loaded: {tiny.words(error)}")
    if wrong and wrong != subject.own_complaints:
        return Result("WRONG", f"{wrong}{_far(subject, found, expected)}")
    return _compared(subject, way, spec, wrap, model, found, expected, folder)


def _refused(error, out):
    begun = [path.name for place in (out, Path(f"{out}.partial")) for path in place.glob("*.safetensors*")]
    if begun:
        return Result("WRONG", f"raised after {begun[0]} was begun: {tiny.words(error)}")
    if isinstance(error, CLEAR) and type(error) is not TypeError or "bitshard" in str(error):
        return Result("raises", tiny.words(error))
    return Result("WRONG", f"no clear error: {tiny.words(error)}")


def _far(subject, found, expected):
    with contextlib.suppress(Exception):
        return f"; off by {_gap(subject.outputs(found), expected):.1e}" if expected is not None else ""
    return ""


def _compared(subject, way, spec, wrap, model, found, expected, folder):
    limit = {_EXACT: 0.0, _DENSE: TOLERANCE, _AGAIN: REQUANTIZED}[spec.match]
    beside = ""
    if spec.match == _AGAIN and expected is not None:
        expected, beside = _quantized_again(subject, way, wrap, model, expected, folder)
        limit = 0.5 if "roughly" in beside else limit
    if expected is not None:
        try:
            gap = _gap(subject.outputs(found), expected)
        except LookupError as error:
            return Result("WRONG", f"no forward of what was loaded: {error}")
        if not gap <= limit and spec.match == _AGAIN and len(getattr(model, "active_adapters", ())) > 1:
            beside = "; beside peft's own merging, which quantizes after each adapter"
            gap = _beside_peft(subject, model, found, expected)
        if not gap <= limit:
            return Result("WRONG", f"off by {gap:.1e}{beside}")
    paths = adapted_paths(model) if spec.adapters else []
    replicated = len(names_in(folder / "out")) and hasattr(model, "base_model") and _is_replicated(model)
    if not replicated and subject.change is None:
        wrong = _changed(values(found), values(subject.models[spec.base]), paths, spec.match == _EXACT)
        wrong = [line for line in wrong if not (paths and _is_tied(subject, line.partition(" ")[0]))]
        if wrong:
            return Result("WRONG", f"{len(wrong)} tensors: {wrong[:2]}{beside}")
        wrong = _misnamed(subject, spec, folder / "out")
        if wrong:
            return Result("NAMES", wrong)
    return Result("ok", (beside + (f"; {subject.note}" if subject.note else "")).strip("; "))


def _is_replicated(model):
    config = getattr(model, "peft_config", {}).get("default")
    return bool(getattr(config, "layer_replication", None))


def _is_tied(subject, key):
    tied = getattr(subject.models["dense"], "all_tied_weights_keys", None) or {}
    return key in tied or key in tied.values()


def _misnamed(subject, spec, out):
    """Names that differ from those in transformers' own folder; a tied tensor may have got one of its own."""
    names = names_in(subject.packed) if spec.packed and subject.is_packed else subject.names
    if not names:
        return ""
    found = names_in(out)
    new = {name for name in found - names if not _is_tied(subject, name)}
    lost = names - found
    return "; ".join(f"{word} {sorted(some)[:2]}" for word, some in (("new", new), ("lost", lost)) if some)


def _quantized_again(subject, way, wrap, model, adapted, folder):
    """(what the merged model gives in 4 bits, words on whose word that is).

    Of a dense folder that gives what the adapted model does, quantized as transformers does: of `save_pretrained` with
    a dtype where that is right, else of peft's own merging into dense weights of the same values. Where there is none,
    the adapted model itself, which 4 bits follow roughly.
    """
    for write, beside in ((_by_bitshard, ""), (_by_peft, "; beside peft's dense merging")):
        dense = folder / "reference"
        with contextlib.suppress(Exception):
            write(subject, wrap, model, dense)
            found, wrong = subject.load(dense)
            if wrong == subject.own_complaints and _gap(subject.outputs(found), adapted) <= TOLERANCE:
                again = subject.load(dense, quantization_config=settings(), device_map={"": "cpu"})[0]
                return subject.outputs(again), beside
        shutil.rmtree(dense, ignore_errors=True)
    return adapted, "; roughly compared"


def _beside_peft(subject, model, found, expected):
    """How far it is from what peft's own merging in 4 bits gives, which quantizes after each of several adapters."""
    with contextlib.suppress(Exception):
        return _gap(subject.outputs(found), subject.outputs(copy.deepcopy(model).merge_and_unload()))
    return float("inf")


def _by_bitshard(subject, wrap, model, folder):
    fsdp.save_pretrained(model, folder, merge=True, dtype=FP32, progress=False)


@torch.no_grad()
def _by_peft(subject, wrap, model, folder):
    base = copy.deepcopy(subject.models["dense"])
    decoded = values(subject.models["4bit"])
    for path, module in base.named_modules():
        for name, tensor in module._parameters.items():
            value = decoded.get(f"{path}.{name}" if path else name)
            if tensor is not None and value is not None:
                tensor.copy_(value.t() if type(module).__name__ == "Conv1D" and value.dim() == 2 else value)
    torch.manual_seed(1)
    twin = wrap(base).eval()
    adapter = {name: tensor for name, tensor in model.named_parameters() if tensor.is_floating_point()}
    for name, tensor in twin.named_parameters():
        if tensor.requires_grad and name in adapter and adapter[name].shape == tensor.shape:
            tensor.copy_(adapter[name])
    twin.merge_and_unload().save_pretrained(folder)
