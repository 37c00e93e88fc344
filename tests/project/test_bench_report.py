"""`python benchmarks/bench.py --report`: the file that owners of GPUs send in, here of a CPU and of a played GPU."""

import contextlib
import getpass
import json
import os
import pathlib
import platform
import subprocess
import sys
import types

import pytest
import torch
from bitshard import _C, functional

ROOT = pathlib.Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
import report  # noqa: E402

CPU = torch.device("cpu")
SMALL = report.Scope(((64, 64),), (1, 3), 1 << 12, 1 << 16, 32, 40.0)


def written(path: pathlib.Path) -> tuple[str, dict]:
    text = path.read_text()
    return text, json.loads(text.split("```json\n")[1].split("\n```")[0])


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[str, dict]:
    """The command as an owner runs it, but quick and on the CPU."""
    path = tmp_path_factory.mktemp("report") / "mine.md"
    command = [sys.executable, str(ROOT / "benchmarks/bench.py"), "--report", str(path), "--quick", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=170, env=environment)
    assert not ran.returncode, ran.stderr
    assert report.SEND in ran.stdout
    return written(path)


def test_what_is_in_the_file(whole):
    """Versions, checks that passed, every row of every table with a number, and all of it as JSON."""
    text, result = whole
    assert "## Exact: yes" in text and "What failed or was left out\n\nnothing" in text
    assert result["failures"] == [] and result["dequantize"] == dict.fromkeys(result["dequantize"], 0)
    assert set(result["products"]) == {"bfloat16", "float16", "float32"}
    assert [(layer["N"], layer["K"]) for layer in result["layers"]] == list(report.QUICK.shapes)
    for layer in result["layers"]:
        assert [int(M) for M in layer["rows"]] == list(report.QUICK.rows)
        times = [time for row in layer["rows"].values() for time in row.values()] + list(layer["blocks"].values())
        assert len(times) == 4 * len(report.QUICK.rows) + 3 and min(times) > 0
        assert f" {layer['N']} x {layer['K']} | " in text
    assert min(*result["limits"].values(), *result["host"].values(), result["optimizer"]["step ms"]) > 0
    assert result["versions"]["bitshard"].startswith(_C.version) and torch.__version__ in result["versions"]["torch"]


def test_nothing_of_the_owner_is_in_it(whole):
    text, _ = whole
    for secret in (str(pathlib.Path.home()), str(ROOT), platform.node(), f"/{getpass.getuser()}/"):
        assert len(secret) < 4 or secret not in text, secret


def test_the_name_of_the_file():
    result = {"gpu": {"GPU": "NVIDIA GeForce RTX 4090"}, "date": "2026-01-02"}
    assert report.file_name(result) == "bitshard_report_nvidia-geforce-rtx-4090_2026-01-02.md"
    assert report.file_name({**result, "gpu": {}}) == "bitshard_report_cpu_2026-01-02.md"


# ---- what is wrong is said ----


def test_one_wrong_bit_is_found(monkeypatch):
    right = functional.dequantize_4bit

    def wrong(packed, state):
        values = right(packed, state)
        values.view(torch.int16).flatten()[7] ^= 1
        return values

    monkeypatch.setattr(functional, "dequantize_4bit", wrong)
    assert all(report.wrong_elements(CPU).values())


def test_one_wrong_code_is_found(monkeypatch):
    right = functional.quantize_4bit

    def wrong(x, **settings):
        packed, state = right(x, **settings)
        if _C.isa() == "scalar":
            packed.flatten()[3] ^= 1
        return packed, state

    monkeypatch.setattr(functional, "quantize_4bit", wrong)
    before = _C.isa()
    assert report.wrong_codes(CPU) == 4 and _C.isa() == before


@pytest.mark.parametrize("factor, worst", [(1.0, 1.0), (1.05, float("inf"))])
def test_a_wrong_product_is_found(monkeypatch, factor, worst):
    """A result that is off by a twentieth is over the bound."""
    right = functional.linear_4bit
    monkeypatch.setattr(functional, "linear_4bit", lambda *given: right(*given) * factor)
    found = report.product_errors(CPU, torch.bfloat16)
    assert (found["forward"] <= 1) is (worst == 1.0) and found["gradient"] <= 1 and found["not repeated"] == 0


def test_products_that_differ_from_run_to_run_are_found(monkeypatch):
    right, calls = functional.linear_4bit, []

    def wavering(x, *weight):
        calls.append(1)
        y = right(x, *weight)
        y.flatten()[0] += len(calls) % 2
        return y

    monkeypatch.setattr(functional, "linear_4bit", wavering)
    assert report.product_errors(CPU, torch.float32)["not repeated"] == 30


def test_not_a_number_is_over_every_bound():
    x = torch.ones(2, 2)
    assert report.error_over_bound(torch.full((2, 2), float("nan")), x @ x, x, x) == float("inf")


def test_what_fails_is_written_down_and_the_rest_goes_on(monkeypatch, tmp_path):
    """An op that raises leaves its cells empty; the message stands in the file without folders of the machine."""

    def broken(*_):
        raise RuntimeError(f"no kernel image in {tmp_path}/deep/file.so\nsecond line")

    monkeypatch.setattr(functional, "linear_4bit_dgrad", broken)
    monkeypatch.setattr(report, "QUICK", SMALL)
    text, result = written(report.write(str(tmp_path / "r.md"), "cpu", True))
    assert "## Exact: **no**" in text and "RuntimeError: no kernel image in .../file.so: " in text
    assert str(tmp_path) not in text and "second line" not in text
    assert result["products"] == dict.fromkeys(result["products"]) and result["layers"][0]["rows"] == {
        "1": None,
        "3": None,
    }
    assert result["layers"][0]["blocks"]["dequantize"] > 0 and result["optimizer"]["step ms"] > 0


def test_no_time_left(monkeypatch):
    """Checks are made whatever they take; timings that come too late are left out, and named."""
    result = report.measure(CPU, report.dataclasses.replace(SMALL, seconds=-1.0))
    assert report.is_exact(result) and result["limits"] is None and "not measured" in report.markdown(result, CPU)
    assert {why for _, why in result["failures"]} == {"left out, the time was over"}
    assert report.failure_words(result["failures"]).count("\n") == 0


@pytest.mark.parametrize(
    "text, plainly",
    [
        ("cannot open /opt/somebody/x/lib.so: no", "cannot open .../lib.so: no"),
        ("a/b of 3/4", "a/b of 3/4"),
        ("", "no message"),
        ("first\nsecond", "first"),
    ],
)
def test_messages_without_folders(text, plainly):
    assert report.plain(ValueError(text)) == f"ValueError: {plainly}"


# ---- memory ----


@pytest.mark.parametrize("free", [1 << 30, 6 << 30, 16 << 30, 80 << 30])
def test_memory_is_bounded_by_what_the_card_has(monkeypatch, free):
    """Weights of every shape, both kinds at once, take half of a third of it; one of each is always there."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    memory = report.memory_for(torch.device("cuda", 0))
    assert memory == min(3 << 30, free // 3)
    for N, K in report.WHOLE.shapes:
        dense, packed = 2 * N * K, report.BYTES_4BIT * N * K
        for cold in (256 << 20, 288 << 20):
            both = dense * report.copies(dense, cold, memory) + packed * report.copies(packed, cold, memory)
            assert both <= memory / 2 + dense + packed
    assert report.copies(1 << 20, 256 << 20, 3 << 30) == 24 and report.copies(1 << 40, 1, 1) == 1


def test_too_many_rows_for_the_memory():
    times = report.Times(CPU, SMALL)
    layer = report.Layer(times, 64, 64)
    times.memory = 1 << 20
    with pytest.raises(MemoryError, match="1000000 rows"):
        layer.rows(1_000_000)


# ---- a GPU, played ----


class Card:
    """What of torch.cuda the report uses, for a card of compute capability 7.5 on which a call takes `us`."""

    def __init__(self, us: float = 100.0, captures: bool = True):
        self.now, self.us, self.captures, self.replays, self.recorded = 0.0, us, captures, 0, []
        self.properties = types.SimpleNamespace(
            name="Tesla T4", major=7, minor=5, multi_processor_count=40, L2_cache_size=4 << 20, uuid="secret-identity"
        )

    def call(self) -> None:
        self.now += self.us

    def install(self, monkeypatch) -> None:
        card = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = card.now

            def elapsed_time(self, end):
                return (end.at - self.at) / 1e3

        class Graph:
            def replay(self):
                card.replays += 1
                card.now += card.in_graph

        @contextlib.contextmanager
        def capture(graph):
            before = card.now
            if not card.captures:
                raise RuntimeError("operation not permitted when stream is capturing")
            yield
            card.in_graph, card.now = card.now - before, before

        stream = types.SimpleNamespace(wait_stream=lambda other: None)
        fakes = {
            "Event": Event,
            "CUDAGraph": Graph,
            "graph": capture,
            "Stream": lambda: stream,
            "current_stream": lambda: stream,
            "stream": lambda s: contextlib.nullcontext(),
            "synchronize": lambda: None,
            "mem_get_info": lambda device: (14 << 30, 15 << 30),
            "get_device_properties": lambda device: card.properties,
            "get_device_capability": lambda device: (card.properties.major, card.properties.minor),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)


@pytest.mark.parametrize("us", [3.0, 100.0, 50_000.0])
@pytest.mark.parametrize("captures", [True, False])
def test_times_on_a_gpu(monkeypatch, us, captures):
    """The time of a call, from graphs or, where a call cannot be captured, from the queue; bounded in number."""
    card = Card(us, captures)
    card.install(monkeypatch)
    assert report.on_gpu([card.call] * 3, 0.25) == pytest.approx(us)
    assert (card.replays > 0) is captures
    assert card.now < 1.2e6 + 40 * us


def test_what_is_said_of_a_gpu(monkeypatch):
    """A T4 gets float16, and with a default build the advice to build for it. Its identity is used and not told."""
    Card().install(monkeypatch)
    asked = []

    def smi(command, **_):
        asked.append(command)
        return types.SimpleNamespace(stdout="580.1, P0, 585 MHz, 1590 MHz, 5000 MHz, 5001 MHz, 70.00 W, 40, 3, 16\n")

    monkeypatch.setattr(subprocess, "run", smi)
    monkeypatch.setattr(_C, "cuda_state", lambda: {"architectures": "80,90a,compute_80", "built": True})
    device = torch.device("cuda", 0)
    facts = report.about_gpu(device)
    assert report.sixteen_bits(device) is torch.float16
    assert facts["kernels that load here"] == "none: install again with BITSHARD_CUDA_ARCHS=75 in the environment"
    assert facts["nvidia-smi clocks.max.sm"] == "1590 MHz" and "sm_75, 40 multiprocessors" in facts.values()
    assert "--id=GPU-secret-identity" in asked[0] and "secret" not in str(facts)


def test_kernels_are_named(monkeypatch):
    """By the chooser of the C core; where the build has machine code for a T4, few rows of float16 use tensor cores."""
    Card().install(monkeypatch)
    names = [report.kernel_name(torch.device("cuda", 0), M, 4096, 4096) for M in (1, 4096)]
    assert names[0].startswith("gemv_4bit") and names[1] == "panels" and report.kernel_name(CPU, 1, 64, 64) == "-"


@pytest.mark.skipif(_C.kernel_image(_C.cuda_state()["architectures"], 90) != (90, True), reason="no kernels of sm_90a")
def test_kernels_of_hopper_are_named(monkeypatch):
    """All that the core may choose there, forward and for the input gradient."""
    card = Card()
    card.install(monkeypatch)
    card.properties.major, card.properties.minor, card.properties.multi_processor_count = 9, 0, 132
    device = torch.device("cuda", 0)
    names = [report.kernel_name(device, M, 28672, 8192) for M in (1, 64, 4096)]
    assert names == ["gemv_4bit", "gemm_4bit_sm90", "gemm_4bit_sm90_wide"]
    assert report.kernel_name(device, 1, 28672, 8192, gradient=True) == "gemm_4bit_sm90_wide"
    assert report.kernel_name(device, 1, 1024, 4096, gradient=True) == "panels"


def test_without_nvidia_smi(monkeypatch):
    Card().install(monkeypatch)

    def absent(command, **_):
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(subprocess, "run", absent)
    assert report.nvidia_smi(torch.device("cuda", 0)) == {}


def test_bfloat16_where_tensor_cores_have_it(monkeypatch):
    card = Card()
    card.install(monkeypatch)
    card.properties.major, card.properties.minor = 8, 6
    assert report.sixteen_bits(torch.device("cuda", 0)) is torch.bfloat16 is report.sixteen_bits(CPU)


def test_the_first_gpu_or_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for built, kind in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(_C, "cuda_state", lambda built=built: {"built": built})
        assert report.pick_device(None).type == kind and report.pick_device("cpu").type == "cpu"
