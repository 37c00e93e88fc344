"""A 4-bit Llama of one layer with LoRA, trained as it is and as graphs that are played: each step compared."""

import peft
import torch
from bitshard import graphs
from helpers.llama import TOKENS, load_4bit


def adapted(folder, dropout=0.0, checkpointing=True):
    model = load_4bit(folder)
    config = peft.LoraConfig(r=4, lora_dropout=dropout, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(model, config)
    if checkpointing:
        model.enable_input_require_grads()
        model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
    model.config.use_cache = False
    return model.train()


def twins(folder, **options):
    """A model with graphs and the same without."""
    ours, theirs = (adapted(folder, **options) for _ in range(2))
    graphs.enable(ours)
    return ours, theirs


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def batch(step, rows=2, length=8, padded=False):
    torch.manual_seed(100 + step)
    ids = torch.randint(0, TOKENS, (rows, length))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, -1 - step % 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def loss_of(model, given):
    return model(**given).loss


def run(model, steps, make=batch, loss=loss_of, accumulate=1, between=None, clear=True):
    """Losses and gradient norms of a training loop."""
    optimizer, found = torch.optim.AdamW(trained(model), lr=1e-2), []
    torch.manual_seed(7)
    for step in range(steps):
        given = make(step)
        torch.manual_seed(1000 + step)
        value = loss(model, given)
        (value / accumulate).backward()
        found.append(value.item())
        if (step + 1) % accumulate == 0:
            found.append(torch.nn.utils.clip_grad_norm_(trained(model), 1.0).item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=clear)
        if between:
            found.append(between(model, step))
    return found


def check(folder, steps=6, replays=None, options=None, **how):
    ours, theirs = twins(folder, **(options or {}))
    assert run(ours, steps, **how) == run(theirs, steps, **how)
    said = graphs.report(ours)
    assert said.replays == (steps - 1 if replays is None else replays), said
    return said
