"""A model of transformers in memory, whose linear layers and experts become calibrated 4-bit ones in place."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from bitshard.calibration.decoder import Decoder, float32_products
from bitshard.calibration.folder import LayerProgress, require_4bit, require_ids, targets_of
from bitshard.calibration.layers import LayerReport, Layers, Made, Walked, calibrate_layers
from bitshard.calibration.tuning import TuneProgress, settings_of, tune
from bitshard.formats.container import repack
from bitshard.sharding.loading.skeleton import Skeleton
from bitshard.weights.inventory import holders_of
from bitshard.weights.tensor import Params4bit


def calibrate(
    model: Any,
    ids: Tensor,
    quantization_config: Any,
    *,
    device: str | torch.device | None = None,
    tune_steps: int | None = None,
    seed: int = 0,
    layer_progress: LayerProgress = lambda reports, total: reports,
    tune_progress: TuneProgress = lambda steps, total: steps,
) -> list[LayerReport]:
    """Make a dense model a 4-bit one, as from_pretrained with this config would, with calibrated weights.

    A decoder layer at a time is copied in float32 to the device; tuning needs more (`tuning.tune`). 4-bit layers
    outside the decoder layers are quantized as always. Where an error is raised the model is as it was.

    Args:
        model: of transformers, dense, in float32, float16 or bfloat16; it is changed.
        ids: int64 [S, L], samples of L tokens each.
        quantization_config: BitsAndBytesConfig(load_in_4bit=True, ...), or FourBitConfig for experts, too.
        device: on which layers run; None: the model's.
        tune_steps: of tuning scales after all layers are calibrated; None: `tuning.STEPS` on a GPU, else 0. Where it
            gains nothing, scales stay as they are calibrated, with a warning.
        seed: of the order in which tuning sees samples.
        layer_progress: wraps the reports of decoder layers, (reports, how many layers).
        tune_progress: wraps the steps of tuning, (numbers, how many).

    Returns:
        What became of each decoder layer.
    """
    if getattr(model, "is_quantized", False):
        raise ValueError(f"{type(model).__name__}: this model is quantized already")
    require_4bit(quantization_config)
    require_ids(model, ids)
    device = torch.device(device) if device is not None else model.device
    settings = settings_of(tune_steps, seed, device, len(ids))
    packed = Skeleton(
        model.config, quantization_config, model.dtype, torch.device("cpu"), type(model)._from_config, own_dtypes=True
    )
    decoder = Decoder(model, device)
    targets = targets_of(packed, decoder.path)
    made: dict[str, Made] = {}
    was_training = model.training
    model.eval()

    def load(number: int) -> nn.Module:
        return copy.deepcopy(decoder.layers[number]).to(device, torch.float32)

    def keep(number: int, found: dict[str, Made], report: LayerReport) -> None:
        made.update({key: _on_host(each) for key, each in found.items()})

    layers = Layers(decoder, load, lambda number: targets.get(number, []), lambda number: None, keep)
    walked = Walked() if settings.steps else None
    try:
        with float32_products("highest"):
            reports = list(layer_progress(calibrate_layers(layers, ids, walked=walked), len(decoder.layers)))
        if walked is not None:
            made, tuned = tune(layers, made, walked, settings, tune_progress)
            if not tuned.kept:
                warnings.warn(tuned.line(), stacklevel=2)
    finally:
        model.train(was_training)
    _exchange(model, packed.quantizer, made)
    return reports


def _on_host(made: Made) -> Made:
    return made._replace(packed=made.packed.cpu(), state=made.state.moved(torch.device("cpu")))


def _exchange(model: Any, quantizer: Any, made: dict[str, Made]) -> None:
    """Put 4-bit layers in the place of the dense ones, with the weights that were made, or quantized now."""
    dense = dict(model.named_parameters())
    quantizer.preprocess_model(model=model, dtype=model.dtype, device_map=None)
    places = [(path, held) for path, module in model.named_modules() for held in holders_of(module)]
    for path, held in places:
        key = f"{path}.{held.name}" if path else held.name
        held.take(_weight(held, dense.pop(key), made.get(key)))
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:  # biases of the new layers
            parent, _, leaf = name.rpartition(".")
            model.get_submodule(parent)._parameters[leaf] = dense[name]
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)


def _weight(held: Any, dense: Tensor, made: Made | None) -> Params4bit:
    """A 4-bit weight for the place of a dense one."""
    old = held.owner._parameters[held.name]
    if made is None:
        return Params4bit(dense.data, requires_grad=False, **{**old.__dict__, "module": held.layer}).to(dense.device)
    data = repack(made.packed, old.quant_storage, made.state)
    return Params4bit.from_prequantized(data, made.state.as_dict(packed=True), device=dense.device, module=held.layer)
