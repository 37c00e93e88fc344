"""benchmarks/job.py, graphs_check.py, graphs_ranks.py: they run without a GPU, and see what they are there to see."""

import json
import os
import sys
import time
from pathlib import Path

import bitshard.graphs
import pytest
import torch
from fsdp.launch import run

pytest.importorskip("trl")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import graphs_check  # noqa: E402
import graphs_ranks  # noqa: E402
import job  # noqa: E402
import job_clock  # noqa: E402
import launches  # noqa: E402

SMALL = "--hidden 64 --intermediate 96 --layers 2 --heads 4 --kv-heads 2 --vocabulary 128 --commit none".split()


def test_a_job_is_timed_alone_and_under_fsdp2(tmp_path):
    """One launch each of Trainer: every number that a CPU has, the same first loss, and a table."""
    out = tmp_path / "result.md"
    command = [sys.executable, str(BENCHMARKS / "job.py"), *SMALL, "--cases", "plain", "--tokens", "16", "--warm", "3"]
    run([*command, "--windows", "2", "--steps", "2", "--out", str(out)], 240)
    records = [json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()]
    alone, sharded = (record for record in records if "part" in record)
    for record, gpus in ((alone, 1), (sharded, 2)):
        assert (record["gpus"], record["part"], record["case"]) == (gpus, "16", "plain")
        assert record["tokens_per_step"] == 16 * gpus and len(record["windows_ms"]) == 2
        assert min(record[name] for name in ("step_ms", "tokens_per_s", "clip_ms", "optimizer_ms")) > 0
        assert len(record["losses"]) == 3 and "14 LoRA layers" in record["fused"]
    assert alone["share"] == 1 and 0.4 < sharded["share"] < 0.75
    assert sharded["losses"][0] == pytest.approx(alone["losses"][0], abs=0.5)
    text = out.read_text()
    assert "On a CPU, which says nothing about GPUs" in text and text.count("| plain |") == 4


@pytest.mark.skipif(not hasattr(bitshard.graphs, "enable"), reason="this bitshard.graphs has CapturedStep only")
def test_a_job_is_compared_with_its_graphs(tmp_path):
    out = tmp_path / "result.md"
    command = [sys.executable, str(BENCHMARKS / "graphs_check.py"), *SMALL, "--stand-in", "--gpus", "1"]
    run([*command, "--only", "sft", "--multiple", "16", "--steps", "8", "--out", str(out)], 240)
    assert "| right" in out.read_text() and "By the stand-in" in out.read_text()


# ---- verdicts ----


def ran(losses, norms=(1.0, 2.0, 1.5), captures=1, replays=2, eager=1, **more) -> dict:
    graphs = {"captures": captures, "replays": replays, "eager": {"the first of its form": eager}}
    return {"losses": list(losses), "norms": list(norms), "evaluated": [], "seconds": 1.0, **graphs, **more}


RIGHT = ran([4.0, 3.0, 2.0])


@pytest.mark.parametrize(
    ("job_name", "graphs", "words"),
    [
        ("sft", RIGHT, "right"),
        ("sft", ran([4.0, 3.001, 2.0]), "right"),
        ("sft", ran([4.0, 3.1, 2.0]), "losses 1.0e-01 apart, 2.0e-02 allowed"),
        ("sft", ran([4.0, 3.0]), "losses inf apart"),
        ("sft", ran([4.0, 3.0, float("nan")]), "losses inf apart"),
        ("sft", ran([4.0, 3.0, 2.0], norms=[1.0, 2.2, 1.5]), "norms 2.0e-01 apart"),
        ("sft", ran([4.0, 3.0, 2.0], captures=0, replays=0, eager=3), "not captured"),
        ("sft", ran([4.0, 3.0, 2.0], replays=1, eager=2), "not captured"),
        ("dropout", ran([4.0, 3.0, 3.0]), "losses 1.0e+00 apart"),
        ("dropout", ran([9.0, 9.1, 9.2]), "losses 7.2e+00 apart"),
        ("clipping", ran([4.0, 3.0, 2.0]), "right"),
    ],
)
def test_what_is_wrong_with_graphs_is_said(job_name, graphs, words):
    record = {"gpus": 1, "job": job_name, "eager": RIGHT, "again": RIGHT, "graphs": graphs}
    assert graphs_check.verdict(record)[0].startswith(words), graphs_check.verdict(record)


@pytest.mark.parametrize(
    "part, status, happened, words",
    [
        ("late", 0, True, ""),
        ("late", 1, True, "exit status 1"),
        ("lengths", 1, False, "exit status 1"),
        ("raises", 1, True, ""),
        ("leaves", 1, False, "exit status 1 before anything had happened"),
    ],
)
def test_how_a_launch_of_ranks_may_end(part, status, happened, words):
    assert graphs_ranks.unexpected(part, status, happened) == words


def test_two_runs_without_graphs_widen_what_is_allowed():
    record = {"gpus": 1, "job": "sft", "eager": RIGHT, "again": ran([4.0, 3.05, 2.0]), "graphs": ran([4.0, 3.1, 2.0])}
    assert graphs_check.verdict(record)[0] == "right"


# ---- the clock and the table ----


def test_losses_from_sums_and_times_of_windows(monkeypatch):
    """Trainer adds losses up until it logs; a window is between two marks, and tokens are those of its steps."""
    clock = job_clock.Clock(warm=3, windows=2, steps=2, profile=False)
    monkeypatch.setattr(job_clock, "now", iter([0.0, 1.0, 4.0]).__next__)
    sums = [5.0, 9.0, 12.0, 1.0, 1.0, 1.0, 1.0]
    for step, total in enumerate(sums, 1):
        clock.end_of_step(step, torch.tensor(total))
        if step == 2:
            clock.logged()
    assert clock.total == 10 and [clock.splits(step) for step in (7, 8, 10, 11)] == [False, True, True, False]
    found = clock.result([100, 100, 100, 8, 8, 16, 16, 100, 100, 100])
    assert found["losses"] == [5.0, 4.0, 12.0]
    assert found["windows_ms"] == [500.0, 1500.0] and found["step_ms"] == 1000.0
    assert found["tokens_per_s"] == 48 / 4.0 and found["tokens_per_step"] == 12.0


def test_rows_are_medians_of_rounds_and_failures_stay(tmp_path):
    """A case that failed in one round keeps its other rounds; speeds are by tokens a second."""
    base = {"job": "trainer", "gpus": 1, "part": "512"}
    times = [{"step_ms": ms, "windows_ms": [ms], "tokens_per_s": 512e3 / ms} for ms in (100.0, 120.0, 400.0)]
    records = [{**base, "case": "fast", **time} for time in times[:2]] + [{**base, "case": "fast", "error": "lost"}]
    records += [{**base, "case": "upstream", **times[2]}, {**base, "case": "bf16", "error": "OutOfMemoryError: x"}]
    rows = job.merged(records)
    assert list(rows) == [(1, "512", "upstream"), (1, "512", "fast"), (1, "512", "bf16")]
    assert rows[1, "512", "fast"]["step_ms"] == 110.0
    speed = (512e3 / 100 + 512e3 / 120) / 2 / (512e3 / 400)
    assert job.speed(rows, (1, "512", "fast"), "upstream") == f"{speed:.2f}"
    assert job.speed(rows, (1, "512", "fast"), "bf16") == "-" and "| bf16 " not in job.times(rows)
    remarks = job.remarks(records, rows)
    assert "512, bf16: OutOfMemoryError: x" in remarks and "512, fast: 1 of 3 rounds failed: lost" in remarks


def test_a_launch_is_ended_with_what_it_started(tmp_path):
    """torchrun's ranks are sessions of their own."""
    child = "import time; time.sleep(600)"
    source = f"import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)"
    source += f"; open({str(tmp_path / 'pid')!r}, 'w').write(str(c.pid)); c.wait()"

    def allow(seconds: float) -> str:
        return "enough" if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() else ""

    status, reason = launches.watched([sys.executable, "-c", source], dict(os.environ), tmp_path / "log", allow)
    assert status and reason == "enough"
    stat, end = Path("/proc", (tmp_path / "pid").read_text(), "stat"), time.monotonic() + 10
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < end:
        time.sleep(0.05)
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
