"""What the matrix leaves out, one thing at a time; each file of checks/ has the checks of one subject.

    torchrun --nproc-per-node 2 tests/fsdp/run_checks.py [--only NAME,NAME] [--out result.json] [--dir SHARED_FOLDER]

A name is that of a check (`offload`) or of a file (`options`: all checks in it). Every check raises where something is
not exact; its error text becomes the result. NCCL with GPUs, else gloo.
"""

import traceback

import torch.distributed as dist
from checks import (
    agreement,
    another_kind,
    broadcast,
    casts,
    checkpoints,
    curves,
    embeddings,
    fsdp1,
    full_state_dicts,
    int8,
    options,
    report,
    state_dicts,
    weights,
)
from common import finish, start

FILES = (
    agreement,
    another_kind,
    options,
    weights,
    report,
    state_dicts,
    full_state_dicts,
    broadcast,
    checkpoints,
    curves,
    embeddings,
    casts,
    fsdp1,
    int8,
)


def checks_of(file):
    """{name: function} of the functions check_<name> of a module, in their order."""
    return {name.removeprefix("check_"): value for name, value in vars(file).items() if name.startswith("check_")}


def chosen(only):
    """The checks that `only` names, or all; SystemExit for a name that is no check and no file."""
    by_file = {file.__name__.rpartition(".")[2]: checks_of(file) for file in FILES}
    every = {name: check for checks in by_file.values() for name, check in checks.items()}
    wanted = {}
    for name in only.split(",") if only else by_file:
        if name not in every and name not in by_file:
            raise SystemExit(f"no check or file of checks is called {name!r}: {' '.join([*by_file, *every])}")
        wanted |= by_file.get(name) or {name: every[name]}
    return wanted


def main():
    device, args = start()
    results = {}
    for name, check in chosen(args.only).items():
        try:
            results[name] = {"ok": check(device, args)}
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-3000:]}
        if dist.get_rank() == 0 or "error" in results[name]:
            print(
                f"rank {dist.get_rank()} {name:24s} {results[name].get('trace', results[name].get('ok'))}", flush=True
            )
        if "error" in results[name]:
            break  # collectives of the ranks may be out of step
    finish(results, args)


if __name__ == "__main__":
    main()
