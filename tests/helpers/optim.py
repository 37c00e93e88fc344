"""What the tests of optimizers share: every class with arguments that it takes, gradients, comparing state."""

import bitsandbytes as bnb
import torch

ALGORITHMS = ("Adagrad", "Adam", "AdamW", "AdEMAMix", "LAMB", "LARS", "Lion", "RMSprop", "SGD")
PAGED = ("Adam", "AdamW", "AdEMAMix", "Lion")
CLASSES = [f"{name}{bits}bit" for name in ALGORITHMS for bits in (8, 32)]
TRAINER_NAMES = [  # all of the Trainer's `optim` that are bitsandbytes'
    *("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit"),
    *("ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"),
    *("lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit"),
    *("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
]


def make(name, params, **options):
    """An optimizer of a class by name, with momentum and a decay of weights."""
    if name.removeprefix("Paged").startswith(("SGD", "LARS")):
        options.setdefault("momentum", 0.9)
    return getattr(bnb.optim, name)(list(params), **{"lr": 1e-2, "weight_decay": 1e-2, **options})


def gradients(params, step, dtype=None):
    """A gradient for each parameter, a function of its place and of the step."""
    found = []
    for index, p in enumerate(params):
        generator = torch.Generator().manual_seed(1000 * index + step)
        found.append(torch.randn(p.shape, generator=generator).to(dtype or p.dtype))
    return found


def train(optimizer, params, steps):
    """These steps, each with its gradients."""
    for step in steps:
        for p, gradient in zip(params, gradients(params, step), strict=True):
            p.grad = gradient
        optimizer.step()


def values_of(state, n):
    """float32 values of state<n>, whether in 8 bits or in 32."""
    value = state[f"state{n}"]
    if value.dtype == torch.float32:
        return value
    absmax = state[f"absmax{n}"]
    pairs = [(value, absmax)] if absmax.dim() == 1 else zip(value, absmax, strict=True)
    parts = [bnb.functional.dequantize_blockwise(v, absmax=a, code=state[f"qmap{n}"], blocksize=256) for v, a in pairs]
    return parts[0] if len(parts) == 1 else torch.stack(parts)


def same_state(left, right, exact, what):
    """The same keys and step; the same tensors where `exact`, else values within 3 % of the largest of the state."""
    assert left.keys() == right.keys() and left["step"] == right["step"], (what, left.keys(), right.keys())
    for key, value in left.items():
        if isinstance(value, torch.Tensor) and exact:
            assert torch.equal(value, right[key]), (what, key)
    for n in (1, 2):
        if f"state{n}" in left and not exact and left[f"state{n}"].numel():
            a, b = values_of(left, n), values_of(right, n)
            assert (a - b).abs().max() <= 0.03 * b.abs().max() + 1e-12, (what, n, (a - b).abs().max(), b.abs().max())
