"""Lightning's BitsandbytesPrecision on a CPU: layers replaced, quantized by the move to the device, trained, saved."""

import torch
from common import as_bytes, error_of, run
from torch import nn

MODES = ("nf4", "nf4-dq", "fp4", "fp4-dq")


def make(mode):
    """A model converted as Fabric does it, and moved; Fabric itself admits the plugin on CUDA only."""
    from lightning.fabric.plugins import BitsandbytesPrecision

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64, bias=False), nn.Linear(64, 8))
    plugin = BitsandbytesPrecision(mode, dtype=torch.bfloat16, ignore_modules={"3"})
    return plugin, plugin.convert_module(model).to("cpu")


def steps(plugin, model):
    """Losses of the layer that stays dense, trained behind the packed ones."""
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    model.requires_grad_(False)
    model[3].to(torch.bfloat16).requires_grad_(True)
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.1)
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


def main(options):
    args = options.parse_args()
    result = {}
    for name in ("replaced", "replaced_meta"):
        result[name] = {}
        with error_of(result[name], "error"):
            result[name].update(replaced(name.endswith("meta")))
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
