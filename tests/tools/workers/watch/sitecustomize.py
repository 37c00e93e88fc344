"""Every interpreter that finds this folder on its path writes what `Trainer` trained to the file $WATCHED, as JSON.

So a tool can be started by its own command, and nothing of it is replaced: the Trainer's model is looked at before and
after `train`, by `common.layers_of`, and the gradients of the first step are compared with those of dense layers. With
$PLAYED the stand-in of tests/helpers/graphs.py plays graphs on the CPU, and what ran as graphs is written instead.
"""

import importlib.abc
import importlib.util
import json
import os
import sys

NAME = "transformers.trainer"


class Finder(importlib.abc.MetaPathFinder):
    """Lets `watch` see transformers.trainer as soon as it has been imported."""

    def find_spec(self, name, path=None, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            import torch

            execute(module)
            torch.manual_seed(5)  # axolotl draws LoRA's first values before its seed is set; torch's own differs by run
            watch(module.Trainer)

        spec.loader.exec_module = exec_module
        return spec


def watch(trainer: type) -> None:
    """Wrap `Trainer.train`, and `training_step` for the first step."""
    train, training_step = trainer.train, trainer.training_step
    first = {}

    def watched_step(self, model, *args, **kwargs):
        loss = training_step(self, model, *args, **kwargs)
        if not first and "PLAYED" not in os.environ:
            from dense import gradient_gap

            first["gradient_gap"] = gradient_gap(model, lambda: training_step(self, model, *args, **kwargs))
        return loss

    def watched(self, *args, **kwargs):
        from common import layers_of, which

        before = layers_of(self.model)
        result = train(self, *args, **kwargs)
        losses = [entry["loss"] for entry in self.state.log_history if "loss" in entry]
        found = {"bitsandbytes": which(), "trainer": type(self).__name__, "losses": [float(loss) for loss in losses]}
        found |= {"before": before, "after": layers_of(self.model), **first}
        if "PLAYED" in os.environ:
            found |= played(self.model)
        found["trained"] = sum(one.numel() for one in self.model.parameters() if one.requires_grad)
        with open(os.environ["WATCHED"] + ".part", "w") as file:
            json.dump(found, file)
        os.replace(file.name, os.environ["WATCHED"])  # whole as soon as it is there: beside.py waits for it
        return result

    if "PLAYED" in os.environ:
        from bitshard.graphs import enabled
        from graphs import StandIn

        enabled.RECORDER = StandIn
    trainer.train, trainer.training_step = watched, watched_step


def played(model) -> dict:
    """What ran as graphs."""
    from bitshard import graphs, lora

    report = graphs.report(model)
    return {"replays": report.replays, "eager": report.eager, "fused": str(lora.report(model))}


if "WATCHED" in os.environ:
    sys.meta_path.insert(0, Finder())
