"""benchmarks/whose.py: looks at what runs go to the owner of the innermost file, in autograd's thread too.

Each test is a process of its own: a lane of the suite has a thread of pytest-xdist, which looks like autograd's.
"""

import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tests")]  # a test runs this file as a program, too

import whose  # noqa: E402
from fsdp.launch import run  # noqa: E402


def played(path: str, source: str) -> dict:
    """The names of a module that says it lies at `path`."""
    names = {"time": time}
    exec(compile(source, path, "exec"), names)  # noqa: S102
    return names


SPIN = "def spin(done):\n    while not done(): pass\n"
LOOKS, PATIENCE = 100, 60  # seconds, on a machine whose cores have other work


def until(enough):
    """Is it so, or has it taken too long?"""
    end = time.monotonic() + PATIENCE
    return lambda: enough() or time.monotonic() > end


def looks_go_to_the_innermost_owner():
    peft = played("/site/peft/layer.py", SPIN)["spin"]
    torch_nn = played("/site/torch/nn/modules/linear.py", "def forward(inner):\n    return inner()\n")["forward"]
    transformers = played("/site/transformers/llama.py", "def layer(call, inner):\n    call(inner)\n")["layer"]
    own = sys.getswitchinterval()
    with whose.watching() as found:
        waited = until(lambda: found["transformers", "llama.py:layer"] >= LOOKS)
        transformers(torch_nn, lambda: [time.sleep(0.01) for _ in iter(waited, True)])
        more = until(lambda: found["peft", "layer.py:spin"] >= found["transformers", "llama.py:layer"] + LOOKS)
        transformers(torch_nn, lambda: peft(more))
    seen = {name: sum(n for (who, _), n in found.items() if who == name) for name in ("peft", "transformers")}
    assert seen["peft"] > seen["transformers"] >= LOOKS, found
    assert found["peft", "layer.py:spin"] == seen["peft"]
    assert sys.getswitchinterval() == own and "spin" in whose.functions(found, "peft")
    lines = whose.table(found, 0.6, 3).splitlines()
    assert "peft" in lines[2] and lines[-1].endswith("| 600.0 | 200000 |")


def a_thread_that_python_started_does_not_count():
    spin = played("/site/peft/layer.py", SPIN)["spin"]
    waiting = played("/site/torch/autograd/graph.py", SPIN)["spin"]
    over = threading.Event()
    beside = threading.Thread(target=spin, args=(over.is_set,))
    with whose.watching() as found:
        beside.start()
        waiting(until(lambda: found["autograd's engine", "graph.py:spin"] >= LOOKS))
        over.set()
        beside.join()
    names = {name for name, _ in found}
    assert found["autograd's engine", "graph.py:spin"] >= LOOKS and "peft" not in names, found


def test_looks_go_to_the_innermost_owner():
    run([sys.executable, __file__, "looks_go_to_the_innermost_owner"], 200)


def test_a_thread_that_python_started_does_not_count():
    run([sys.executable, __file__, "a_thread_that_python_started_does_not_count"], 200)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
