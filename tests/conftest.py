"""Fixtures: the instruction sets and devices that this machine can run, small threads, no environment of a launcher."""

import contextlib
import gc
import os
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest

os.environ["BITSHARD_PLUGIN"] = "0"  # an original bitsandbytes, which tests compare with, runs its own kernels
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two lanes have a core each, and most ops here are tiny

import torch  # noqa: E402
from bitshard import _C  # noqa: E402
from bitshard_cli import installed  # noqa: E402
from helpers import bytes, warm  # noqa: E402

# Variables of accelerate and torchrun that change the container of packed bytes.
LAUNCHER = ("ACCELERATE_USE_FSDP", "RANK", "WORLD_SIZE", "LOCAL_RANK", "FSDP_VERSION", "ACCELERATE_MIXED_PRECISION")
LAUNCHER += ("ACCELERATE_USE_DEEPSPEED", "FSDP_CPU_RAM_EFFICIENT_LOADING")


def pytest_configure(config):
    """One server of interpreters of each kind for all lanes: the controller's."""
    if not hasattr(config, "workerinput") and warm.PROGRAM not in os.environ:
        config.warm = [warm.start()]
        if not warm.GPU:
            config.warm.append(warm.start(warm.BARE, warm.BARE_IMPORTS))


def pytest_terminal_summary(terminalreporter, config):
    servers = config.warm if hasattr(config, "warm") else []
    threads = [name for one in servers for name in warm.ask({"cpu": ""}, one.variable).get("threads", [])]
    if threads:
        terminalreporter.write_line(f"No forks: imports started threads {threads}; all interpreters were real ones")


def pytest_unconfigure(config):
    for server in getattr(config, "warm", []):
        warm.stop(server)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from helpers.lanes import Lanes

    return Lanes(config, log)


def pytest_collection_modifyitems(config, items):
    """In lanes the longest files come first."""
    if hasattr(config, "workerinput"):
        from helpers.lanes import place

        items.sort(key=lambda item: place(item.nodeid.partition("::")[0]))


def pytest_collection_finish(session):
    """What imports and collection made stays: a `gc.collect()` of a test need not look at it, which takes 0.8 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """Tests run as one process that was not launched to shard; a test that needs a variable sets it."""
    if "BITSHARD_KEEP_ENVIRONMENT" not in os.environ:
        for name in LAUNCHER:
            monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=[*(f"cpu-{isa}" for isa in _C.isas()), *(["cuda"] if torch.cuda.is_available() else [])])
def device(request):
    """Each instruction set of this CPU, and the GPU where there is one: the device to put tensors on."""
    if request.param == "cuda":
        yield torch.device("cuda", torch.cuda.current_device())
        return
    before = _C.isa()
    _C.set_isa(request.param.removeprefix("cpu-"))
    yield torch.device("cpu")
    _C.set_isa(before)


@pytest.fixture(scope="session")
def parts_folder(tmp_path_factory):
    """The models of tests/fsdp/parts/alone.py, and what one process makes of them."""
    from fsdp.launch import WORKERS, run

    folder = tmp_path_factory.mktemp("parts")
    command = [sys.executable, str(WORKERS / "parts" / "alone.py")]
    run([*command, "--dir", str(folder), "--out", str(folder / "alone")], 240)
    return folder


@pytest.fixture
def fresh_dynamo():
    """Nothing compiled before, and no warnings of the compiler."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def group():
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def planted():
    """planted(): from now on fused LoRA layers have a scale that is wrong by a fiftieth in every product with B."""
    from helpers.lora import wrong_scale

    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(wrong_scale())


@pytest.fixture
def assert_equal():
    """assert_equal(actual, expected) of helpers/bytes.py."""
    return bytes.assert_equal


@pytest.fixture(scope="session")
def facade(tmp_path_factory):
    """The façade as the engine's wheel carries it; built here where the engine runs from its source tree."""
    if (installed.CARRIED / "bitsandbytes").is_dir():
        return installed.CARRIED
    folder = tmp_path_factory.mktemp("facade")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    shutil.copytree(Path(__file__).resolve().parents[1] / "python" / "bitsandbytes", folder / "project")
    subprocess.run([*command, str(folder / "project")], check=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder / "carried")
    return folder / "carried"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of a Llama of one layer; a module that needs others has a fixture of this name."""
    from helpers.llama import save_llama

    folder = tmp_path_factory.mktemp("llama")
    save_llama(folder)
    return folder


@pytest.fixture
def played_graphs(monkeypatch):
    """Graphs that run their bodies again, for machines without a GPU."""
    from bitshard.graphs import enabled
    from helpers.graphs import StandIn

    monkeypatch.setattr(enabled, "RECORDER", StandIn)
