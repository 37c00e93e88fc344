"""Lightning's BitsandbytesPrecision on a CPU: layers replaced, quantized by the move to the device, trained, saved.

Fabric itself admits the plugin on CUDA only, and so do the plugin's `quantize_` and its hook for float state dicts.
"""

import torch
from common import as_bytes, error_of, run
from torch import nn

MODES = ("nf4", "nf4-dq", "fp4", "fp4-dq")
INT8_MODES = ("int8", "int8-training")


def make(mode, seed=0):
    """A model converted as Fabric does it, and moved."""
    from lightning.fabric.plugins import BitsandbytesPrecision

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64, bias=False), nn.Linear(64, 8))
    dtype = torch.float16 if mode in INT8_MODES else torch.bfloat16
    if mode in INT8_MODES:  # the original rounds weights to float16 before it quantizes them
        model.half().float()
    plugin = BitsandbytesPrecision(mode, dtype=dtype, ignore_modules={"3"})
    return plugin, plugin.convert_module(model).to("cpu")


def steps(plugin, model, everything=False):
    """Losses of the layer that stays dense, trained behind the packed ones; or of all layers that can be trained."""
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    x[:, 5] *= 20  # a column that is above the threshold of int8
    model[3].to(plugin.dtype)
    if not everything:
        model.requires_grad_(False)
        model[3].requires_grad_(True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(4):
        with plugin.forward_context():
            output = plugin.convert_output(model(plugin.convert_input(x)))
        loss = output.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def replaced(meta):
    """What the plugin's own `quantize` does, which accepts CUDA only: packed bytes put into the layer by hand."""
    from lightning.fabric.plugins.precision import bitsandbytes as plugin

    bnb = plugin._import_bitsandbytes()
    torch.manual_seed(0)
    values = torch.randn(128, 64)
    layer = plugin._NF4DQLinear(64, 128, bias=False, device="meta" if meta else "cpu")
    old = layer.weight
    packed, state = bnb.functional.quantize_4bit(
        values.half(),
        blocksize=old.blocksize,
        compress_statistics=old.compress_statistics,
        quant_type=old.quant_type,
        quant_storage=old.quant_storage,
    )
    layer.weight = plugin._replace_param(old, packed, state)
    layer.weight.bnb_quantized = True
    x = torch.randn(3, 64, requires_grad=True)
    out = layer(x)
    out.sum().backward()
    keys = sorted(layer.state_dict())
    return {"out": out.flatten()[:64].tolist(), "grad": x.grad.flatten().tolist(), "keys": keys}


def replaced_int8():
    """What the plugin's `quantize` does with an int8 layer: codes put there by `.data =`, scales beside them."""
    from lightning.fabric.plugins.precision import bitsandbytes as plugin

    bnb = plugin._import_bitsandbytes()
    torch.manual_seed(0)
    values = torch.randn(128, 64).half()
    layer = plugin._Int8LinearInference(64, 128, device="cpu")
    weight = layer.weight
    codes, scales, _ = bnb.functional.int8_vectorwise_quant(values.contiguous())
    weight.data = codes
    weight.CB = codes
    weight.SCB = scales
    layer.weight = weight
    x = torch.randn(12, 64).half().requires_grad_()
    out = layer(x)
    out.sum().backward()
    keys = sorted(layer.state_dict())
    return {"out": out.flatten()[:64].tolist(), "grad": x.grad.flatten().tolist(), "keys": keys}


def loaded_int8():
    """A layer's codes and scales loaded into another quantized one: the plugin's hook takes codes out of the dict."""
    layers = []
    for seed in (0, 1):
        _, model = make("int8", seed)
        layers.append(model[0])
    source, layer = layers
    found = {"differed": as_bytes(layer.weight).tolist() != as_bytes(source.weight).tolist()}
    with error_of(found, "refused"):
        layer.load_state_dict(source.state_dict())
    found["codes_loaded"] = as_bytes(layer.weight).tolist() == as_bytes(source.weight).tolist()
    found["scales_loaded"] = layer.state_dict()["SCB"].tolist() == source.state_dict()["SCB"].tolist()
    return found


def int8_mode(mode):
    """Codes, scales, keys and losses of one of the plugin's int8 modes."""
    plugin, model = make(mode)
    layers, trains = [model[0], model[2]], mode == "int8-training"
    result = {
        "classes": [type(layer.weight).__name__ for layer in layers],
        "dtypes": [str(layer.weight.dtype) for layer in layers],
        "trained": [layer.weight.requires_grad for layer in layers],
        "thresholds": [layer.state.threshold for layer in layers],
        "bytes": [as_bytes(layer.weight.detach()).tolist() for layer in layers],
        "keys": sorted(model.state_dict()),
    }
    if trains:
        before = [layer.weight.detach().clone() for layer in layers]
    else:
        result["scales"] = [layer.state_dict()["SCB"].tolist() for layer in layers]
    result["losses"] = steps(plugin, model, everything=trains)
    if trains:
        result["moved"] = [not torch.equal(a, layer.weight) for a, layer in zip(before, layers, strict=True)]
    return result


def main(options):
    args = options.parse_args()
    result = {}
    for name in ("replaced", "replaced_meta"):
        result[name] = {}
        with error_of(result[name], "error"):
            result[name].update(replaced(name.endswith("meta")))
    for mode in INT8_MODES:
        result[mode] = int8_mode(mode)
    for name, case in (("replaced_int8", replaced_int8), ("loaded_int8", loaded_int8)):
        result[name] = {}
        with error_of(result[name], "error"):
            result[name].update(case())
    for mode in MODES:
        plugin, model = make(mode)
        layers = [model[0], model[2]]
        state = model.state_dict()
        kind = f"0.weight.quant_state.bitsandbytes__{mode[:3]}"
        result[mode] = {
            "classes": [type(layer.weight).__name__ for layer in layers],
            "dtypes": [str(layer.weight.dtype) for layer in layers],
            "bytes": [as_bytes(layer.weight).tolist() for layer in layers],
            "keys": sorted(state),
            "has_state": kind in state,
            "losses": steps(plugin, model),
        }
    return args, result


run(main)
