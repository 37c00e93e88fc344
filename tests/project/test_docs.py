"""README and docs: code blocks run, commands are run by a test or say that they need GPUs, links lead somewhere."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fsdp.launch import launch, run
from helpers import upstream
from helpers.graphs import Played
from helpers.versions import transformers_takes_peft

pytest.importorskip("peft")
pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
README, DROP_IN = ROOT / "README.md", ROOT / "docs" / "drop-in.md"
PAGES = sorted([README, ROOT / "SECURITY.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.md")])
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# Each command as it stands there, without its comment: the test that runs it, or what `make test` and CI do themselves.
COMMANDS = {
    "pip install . ./python/bitsandbytes": "Makefile:. ./python/bitsandbytes",
    "python -m bitshard": "tests/cli/test_report.py::test_sound_installation",
    "pip install bitshard-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl && bitshard use": (
        "tests/project/test_wheels.py::test_into_an_empty_environment"
    ),
    "bitshard report": "tests/cli/test_run.py::test_the_report_asks_upstream",
    "bitshard use": "tests/cli/test_switch.py::test_there_and_back",
    "bitshard unuse": "tests/cli/test_switch.py::test_there_and_back",
    "bitshard run train.py": "tests/cli/test_run.py::test_a_script_and_its_children",
    "bitshard run accelerate launch --config_file examples/fsdp2.yaml train.py": (
        "tests/cli/test_run.py::test_workers_of_a_launcher"
    ),
    "bitshard quantize Llama-3-8B Llama-3-8B-nf4 --nested": "tests/cli/test_convert.py::test_the_commands",
    "bitshard quantize Llama-3-8B Llama-3-8B-int8 --bits 8": "tests/models/test_int8_models.py::test_quantized_folder",
    "bitshard quantize Llama-3-8B Llama-3-8B-nf4 --calibrate text.txt": (
        "tests/calibration/test_calibration.py::test_the_command"
    ),
    "bitshard quantize Llama-3-8B Llama-3-8B-nf4 --calibrate text.txt --device cuda": (
        "tests/calibration/test_calibration.py::test_the_command"
    ),
    "bitshard quantize Llama-3-8B Llama-3-8B-nf4 --calibrate text.txt --adapter start --rank 16": (
        "tests/calibration/test_calibration.py::test_the_command"
    ),
    "bitshard merge Llama-3-8B-nf4 adapter Llama-3-8B-tuned": "tests/cli/test_convert.py::test_mistakes_in_merging",
    "bitshard merge base adapter out --to 4bit --calibrate text.txt --device cuda": (
        "tests/calibration/test_merged_adapters.py::test_the_command"
    ),
    "bitshard inspect Llama-3-8B-nf4": "tests/cli/test_convert.py::test_the_commands",
    "bitshard plan llama-3-70b --gpus 2x80 --nested --lora-dtype bfloat16 --seq 512 --time H100": (
        "tests/plan/test_time.py::test_commands_of_the_pages"
    ),
    "bitshard plan llama-3-70b --gpus 2x80 --nested --seq 512 --time H100": (
        "tests/plan/test_time.py::test_commands_of_the_pages"
    ),
    "bitshard plan llama-3-8b --gpus 4x24 --nested --time 4090 --link pcie4 --replicas 2": (
        "tests/plan/test_time.py::test_commands_of_the_pages"
    ),
    "bitshard plan qwen2.5-32b --gpus 2x24 --seq 2048 --nested --lora-rank 16": (
        "tests/cli/test_planning.py::test_commands_of_the_pages"
    ),
    "bitshard plan llama-3-70b --gpus 2x24 --seq 512 --nested --optimizer adamw_8bit --lora-dtype bfloat16 "
    "--gather-in-place --load native --offload activations": "tests/cli/test_planning.py::test_commands_of_the_pages",
    "bitshard plan qwen3-30b-a3b --nested --experts --lora-experts --lora-rank 8 --lora-dtype bfloat16 "
    "--optimizer adamw_8bit": "tests/cli/test_planning.py::test_commands_of_the_pages",
    "make wheels": "tests/project/test_wheels.py::wheels",
    "make release": "tests/project/test_wheels.py::wheels",
    "torchrun --nproc-per-node 2 examples/first.py": "tests/project/test_docs.py::test_first_py",
    "accelerate launch --config_file examples/fsdp2.yaml train.py": (
        "tests/project/test_docs.py::test_the_readme_trains"
    ),
    "make demo": "tests/project/test_docs.py::test_demo",
    "make test": "Makefile:$(python) -m pytest $(TESTS)",
    "make test QUICK=1": "tests/project/test_docs.py::test_what_quick_runs_is_there",
    "make aarch64": "Makefile:release/try_aarch64.py --out",
    "make lint": ".ci/run:make lint",
    "make dev": "tests/project/test_docs.py::test_targets_of_make",
    "make tools-tests": "tests/project/test_docs.py::test_targets_of_make",
    "make worlds": "tests/project/test_docs.py::test_targets_of_make",
    "make newest": "tests/project/test_docs.py::test_targets_of_make",
    "make oldest": "tests/project/test_docs.py::test_targets_of_make",
    "accelerate launch --config_file examples/fsdp2.yaml examples/sft.py --model FOLDER_OR_NAME --data FILE": (
        "tests/project/test_examples.py::test_sft_trains_alike_under_both_versions"
    ),
    "torchrun --nproc-per-node 2 examples/fsdp_qlora.py --model FOLDER --text FILE --train-type qlora --low-memory "
    "--fsdp 2 --save OUT": "tests/project/test_examples.py::test_fsdp_qlora_from_the_command_line",
    "python examples/fsdp2_two_gpus.py --model FOLDER_OR_NAME --text FILE --output OUT": (
        "tests/project/test_examples.py::test_two_gpus_train_as_one_does"
    ),
    "CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tests/fsdp/run_checks.py --only torch_save": (
        "tests/project/test_docs.py::test_one_check_alone"
    ),
    "CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tests/fsdp/run_checks.py --only state_dicts": (
        "tests/sharding/test_fsdp_axes.py::test_two_ranks"
    ),
    "python examples/moe.py --tiny": "tests/project/test_examples.py::test_moe",
    "python benchmarks/bench.py --report": "tests/project/test_bench_report.py::test_what_is_in_the_file",
    "MODEL=folder torchrun --nproc-per-node 2 train70b.py": "tests/project/test_docs.py::test_the_script_for_70b",
}


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of a page's fenced blocks."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def python_blocks(page: Path) -> list[str]:
    return [text for language, text in blocks(page) if language == "python"]


def commands() -> list[tuple[str, str, str]]:
    """(page, command, comment) of every line of a bash block."""
    found = []
    for page in PAGES:
        for line in "".join(text for language, text in blocks(page) if language == "bash").splitlines():
            command, _, comment = line.partition("  #")
            found.append((page.name, command.strip(), comment))
    return found


# ---- what is there ----


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_say_what_they_are(page):
    """Code is python or bash, the rest text; no block is indented, which nothing here would find."""
    assert {language for language, _ in blocks(page)} <= {"python", "bash", "text"}
    outside = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert "```" not in outside and not re.findall(r"^(?: {4}|\t).*", outside, re.MULTILINE)


def test_python_blocks_have_a_test():
    """The pages whose blocks the tests below run; fsdp/documented.py itself fails where it leaves one out."""
    assert {page.name: len(python_blocks(page)) for page in PAGES if python_blocks(page)} == {
        "README.md": 1,
        "calibration.md": 1,  # in test_calibration.py
        "drop-in.md": 2,  # the second in test_experts.py
        "embeddings.md": 1,  # in test_embeddings.py
        "int8.md": 1,  # in test_int8_models.py
        "experts.md": 4,  # there, too
        "fsdp.md": 7,
        "llama70b.md": 1,
        "lora.md": 2,
        "merging.md": 1,  # in test_merge_aware.py
        "serving.md": 2,  # in test_serving.py
    }


@pytest.mark.parametrize("page, command, comment", commands())
def test_commands_have_a_test(page, command, comment):
    """Each is run by a test that exists, or says that it needs GPUs."""
    if command not in COMMANDS:
        assert "GPUs" in comment, f"{page}: nothing runs {command!r}, and it does not say that it needs GPUs"
        return
    file, _, name = COMMANDS[command].replace("::", ":").partition(":")
    source = (ROOT / file).read_text(encoding="utf-8")
    if file.endswith(".py"):
        names = {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
        assert name in names, COMMANDS[command]
    else:
        assert name in source, COMMANDS[command]


def test_no_command_is_gone():
    assert COMMANDS.keys() <= {command for _, command, _ in commands()}


def anchor(heading: str) -> str:
    """The anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, heading = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        if heading:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in map(anchor, headings), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_cells_of_tables_are_short(page):
    """Two lines at most: 200 characters as they are shown, links as their text."""
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    cells = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell) for row in rows for cell in row.strip("|").split(" | ")]
    assert not [cell for cell in cells if len(cell) > 200]


# They tell how a measurement was organised, or what somebody had hoped for; a page says what was measured, on what, how
NOT_FOR_READERS = (
    r"the targets?\b|its target\b|targets:|\(targets?\b|aimed for|was wanted|hours earlier|(?:that|same) day"
)


@pytest.mark.parametrize(
    "page", [*PAGES, *sorted((ROOT / "benchmarks/results").glob("*.md"))], ids=lambda page: page.name
)
def test_pages_say_what_was_measured(page):
    assert re.search(NOT_FOR_READERS, "Of float16 nothing is below its target.")
    found = re.findall(NOT_FOR_READERS, page.read_text(encoding="utf-8"), re.IGNORECASE)
    assert not found


def ruled_out_words() -> list[str]:
    """The left column of the first table of "Words" in docs/contributing.md."""
    words = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8").partition("\n## Words\n")[2]
    table = words.partition("| not | but |\n|---|---|\n")[2].partition("\n\n")[0]
    return [row.strip("| ").split(" | ")[0] for row in table.splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_use_the_words_of_the_field(page):
    """Outside of code no page has a word that docs/contributing.md rules out, in any ending."""
    words = ruled_out_words()
    assert len(words) >= 10
    text = page.read_text(encoding="utf-8")
    if page.name == "contributing.md":
        text = text.partition("\n## Words\n")[0]
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    ruled_out = r"\b(?:" + "|".join(words).replace(" ", r"\s+") + r")(?:s|d|ed|ing)?\b"
    assert not re.findall(ruled_out, text, re.IGNORECASE)


def results() -> list[str]:
    """The sections of docs/results.md."""
    return (ROOT / "docs" / "results.md").read_text(encoding="utf-8").split("\n## ")[1:]


def test_results_have_one_number_a_cell_and_a_record():
    """A number or a range with its unit; each table links to what it is from, beside a number or in its section."""
    number, record = r"(?:[-\d][\d,.]*|to|of|us|ms|s|min|GiB|GB/s| )*", r"\[[^]]+\]\(\.\./benchmarks/results/\w+\.md\)"
    rows = []
    for section in results():
        assert "../benchmarks/results/" in section
        tables = re.findall(r"^\|.*\n\|[-|]+\n((?:\|.*\n)+)", section, re.MULTILINE)
        rows += [[cell.strip() for cell in row[1:-1].split("|")] for table in tables for row in table.splitlines()]
    assert len(rows) > 100
    assert not [row for row in rows if not all(re.fullmatch(rf"{number}|{record}", cell) for cell in row[1:])]


# ---- the README ----


def test_the_readme_is_short_and_begins_with_what_works():
    """Two commands that a bare clone can run are in the first 20 lines, before anything that must be had first."""
    text = README.read_text(encoding="utf-8")
    first, rest = "\n".join(text.splitlines()[:20]), text.partition("\n## ")[0]
    assert re.findall(r"^(make \w+)  #", first, re.MULTILINE) == ["make demo", "make test"]
    assert rest.count("```") == 2 and "![" in rest and "wheel" not in rest and "pip install" not in rest
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [
        *("Install", "Train", "Three numbers", "Better 4-bit weights", "Four limits", "More")
    ]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert len(re.sub(r"\]\([^)]*\)", "]", prose).split()) <= 700


def test_the_readme_s_numbers_are_results():
    """Three of them, each in a section of docs/results.md that links to the same file; four limits."""
    parts = dict(
        re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    )
    numbers = re.findall(r"^- \*\*(?:0 of )?([\d.]+).*?\]\((\S+?)\)", parts["Three numbers"], re.MULTILINE | re.DOTALL)
    assert len(numbers) == 3 == parts["Three numbers"].count("\n- ") and parts["Four limits"].count("\n- ") == 4
    for number, record in numbers:
        assert (ROOT / record).exists()
        found = [part for part in results() if record in part and re.search(rf"\b{re.escape(number)}", part)]
        assert found, (number, record)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Folder of examples/tiny.py's model; its text is beside it."""
    folder = tmp_path_factory.mktemp("docs") / "tiny"
    run([sys.executable, str(ROOT / "examples" / "tiny.py"), str(folder)], 120)
    return folder / "model"


def first_py() -> str:
    """The first block of docs/drop-in.md."""
    return python_blocks(DROP_IN)[0]


def printed(out: str) -> str:
    """What a script printed, without what gloo of torch 2.10 says of each connection.

    Gloo writes its lines in pieces, and the ranks' pieces mix: of one a number or an empty line may be left over.
    """
    lines = out.splitlines(True)
    return "".join(line for line in lines if "peer ranks" not in line and not re.fullmatch(r"\d*\s*", line))


def test_first_py():
    """It is the file, and prints what docs/drop-in.md says it prints."""
    file = ROOT / "examples" / "first.py"
    assert file.read_text(encoding="utf-8").endswith(f'"""\n\n{first_py()}')
    (shown,) = [text for language, text in blocks(DROP_IN) if language == "text"]
    assert printed(run([*TORCHRUN, str(file)], 120, bare=True)) == shown


def test_bitsandbytes_prints_false(tmp_path):
    """What docs/drop-in.md says of the original, by the same lines without ours; it is right where nothing is cast."""
    lines = "".join(line for line in first_py().splitlines(True) if "describe" not in line)
    script = "import bitsandbytes\nassert '+' not in bitsandbytes.__version__\n"
    script += lines + lines.replace("param_dtype=torch.float16", "param_dtype=None")
    (tmp_path / "first.py").write_text(script)
    place = os.pathsep.join([str(upstream.folder()), os.environ.get("PYTHONPATH", "")])
    said = "the same bits as before sharding"
    output = run([*TORCHRUN, str(tmp_path / "first.py")], 120, bare=True, PYTHONPATH=place)
    assert printed(output) == f"{said}: False\n{said}: True\n"


def shim(version: int) -> list[str]:
    """`accelerate launch` with an example's config, on a machine without a GPU."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    config = str(ROOT / "examples" / f"fsdp{version}.yaml")
    return [*command, "--config_file", config, str(ROOT / "examples" / "cpu_fsdp.py")]


def test_the_readme_trains(model, tmp_path, monkeypatch):
    """Its training script with another model, data and fewer steps, and the line that proves sharding."""
    (script,) = python_blocks(README)
    for written, here in (
        ('"meta-llama/Llama-3.1-8B"', repr(str(model))),
        ("max_steps=100", "max_steps=2, report_to=[]"),
        ("my_dataset", "datasets.Dataset.from_dict({'input_ids': rows, 'labels': rows})"),
    ):
        assert script.count(written) == 1
        script = script.replace(written, here)
    proof = "bitshard.fsdp.describe(trainer.model)"
    assert f"print({proof})" in README.read_text(encoding="utf-8")
    script = f"import datasets, bitshard.fsdp\nrows = [list(range(24))] * 32\n{script}print({proof}, flush=True)\n"
    (tmp_path / "train.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    output = run([*shim(2), "train.py"], 240, fresh=True)
    assert output.count("4-bit base sharded by FSDP2 over 2 ranks: 14 weights, ") == 2 and "(1/2.00)" in output
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_demo(model, tmp_path):
    """What `make demo` runs, on a tiny model: the three runs agree, the base is sharded, training helped.

    `accelerate launch` in real interpreters for FSDP1 and FSDP2: the demo sets variables that are read at import.
    """
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--quick", "--model", str(model)]
    output = run([*command, "--output", str(tmp_path)], 240)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["quality"]["NF4 after"] < result["quality"]["NF4"] and "(bound 1e-05)" in output
    packed = {name: [report["packed_bytes"] for report in ranks] for name, ranks in result["reports"].items()}
    assert packed["FSDP2"] == [packed["one process"][0] / 2] * 2 and sum(packed["FSDP1"]) >= packed["one process"][0]
    assert (tmp_path / "curves.png").stat().st_size > 10_000


# ---- docs ----


@transformers_takes_peft  # one block saves adapters of transformers
def test_blocks_of_fsdp(tmp_path):
    """Every block of docs/fsdp.md on two processes; the worker fails where it leaves one out."""
    output = launch(2, "documented.py", str(ROOT / "docs" / "fsdp.md"), str(tmp_path))
    ran = {int(number) for number in re.findall(r"BLOCK (\d+) ran", output)}  # a rank's output may be inside another's
    assert ran == set(range(len(python_blocks(ROOT / "docs" / "fsdp.md"))))


def test_the_lines_of_lora(model, capsys):
    """docs/lora.md: all layers of a model are fused, and said to be."""
    import bitshard.lora
    from peft import LoraConfig, get_peft_model

    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, quantization_config=config)
    scope = {"bitshard": bitshard, "LoraConfig": LoraConfig, "get_peft_model": get_peft_model, "model": loaded}
    exec(python_blocks(ROOT / "docs" / "lora.md")[0], scope)
    assert capsys.readouterr().out == "14 LoRA layers: 14 fused\n"


def test_the_step_as_one_graph(model, monkeypatch):
    """docs/lora.md: a loop with a captured step, played without a GPU, trains as one without."""
    from bitshard.graphs import captured_step

    if not torch.cuda.is_available():
        monkeypatch.setattr(captured_step, "Graph", Played)
        monkeypatch.setattr(captured_step, "DEVICE", "cpu")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model).to(device)
    ids = torch.arange(3, 19, device=device)[None]
    batch = {"input_ids": ids, "labels": ids}
    scope = {"bitshard": sys.modules["bitshard"], "model": loaded, "batch": batch, "batches": [batch] * 4}
    scope["optimizer"] = torch.optim.SGD(loaded.parameters(), lr=0.1)
    first = loaded(**batch).loss.item()
    exec(python_blocks(ROOT / "docs" / "lora.md")[1], scope)
    assert scope["loss"].item() < first


def test_the_script_for_70b(model, tmp_path):
    """train70b.py on a small model in nested NF4, over gloo: losses fall, and each rank has data of its own."""
    quantize = (
        "import sys, torch, transformers as t\n"
        "config = t.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True,"
        " bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_storage=torch.bfloat16)\n"
        "load = t.AutoModelForCausalLM.from_pretrained\n"
        "load(sys.argv[1], dtype=torch.bfloat16, quantization_config=config).save_pretrained(sys.argv[2])\n"
    )
    run([sys.executable, "-c", quantize, str(model), str(tmp_path / "nf4")], 120)
    (script,) = python_blocks(ROOT / "examples" / "llama70b.md")
    for written, here in (
        ('torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n', ""),
        ('"nccl"', '"gloo"'),
        ("in batches():", "in [torch.arange(3, 27)[None] + dist.get_rank()] * 4:"),
        ("lr=1e-4", "lr=1e-2"),
    ):
        assert script.count(written) == 1, written
        script = script.replace(written, here)
    (tmp_path / "train70b.py").write_text(f"{script}\nimport sys\nsys.stdout.flush()\ndist.barrier()\nos._exit(0)\n")
    output = run([*TORCHRUN, str(tmp_path / "train70b.py")], 240, MODEL=str(tmp_path / "nf4"))
    losses = [float(line) for line in output.splitlines() if re.fullmatch(r"\d+\.\d{4}", line)]
    assert len(losses) == 4 and losses[-1] < losses[0]


def test_one_check_alone(tmp_path):
    """The first line of "One FSDP check alone" in docs/contributing.md."""
    output = launch(2, "run_checks.py", "--only", "torch_save", "--dir", str(tmp_path))
    assert "torch_save" in output


@pytest.mark.parametrize("target", ["dev", "tools-tests", "worlds", "newest", "oldest"])
def test_targets_of_make(target):
    """Too long to run here, but make knows what to do."""
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "-m p" in done.stdout, done.stderr


def test_the_dockerfile_ends_in_the_demo():
    """Nothing here builds an image: what it runs are targets of make, in a tree without what this machine has built."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    made = [line.split()[2:] for line in lines if line.startswith("RUN make ")]
    made.append(json.loads(lines[-1].removeprefix("CMD "))[1:])
    assert made == [[".venv/.installed"], ["demo"]]
    for target in made:
        done = subprocess.run(["make", "-n", *target], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    (packages,) = [line for line in lines if line.startswith("RUN apt-get ")]
    assert {"gcc", "make", "python3-dev", "python3-venv"} <= set(packages.split())
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {".venv", ".cache", "build", "**/*.so"} <= set(ignored)


def test_what_quick_runs_is_there():
    """make gives pytest the lines of tests/quick.txt: files, and functions in them."""
    lines = [line for line in (ROOT / "tests" / "quick.txt").read_text().splitlines() if not line.startswith("#")]
    given = ("MAKEFLAGS", "MFLAGS", "TESTS", "PYTHON", "LANES", "PYTEST")  # of the run of make that this is part of
    environment = {name: value for name, value in os.environ.items() if name not in given}
    command = ["make", "-n", "test", "QUICK=1"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert " ".join(["-m pytest", *lines]) in done.stdout, done.stdout + done.stderr
    for line in lines:
        file, _, name = line.partition("::")
        source = (ROOT / file).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in source, line


def test_paths_in_pages_exist():
    """Files and folders that design.md and contributing.md name in code: as they stand, below csrc or in the engine."""
    named = re.compile(r"`((?:[\w.]+/)+(?:[\w.]+\.(?:py|pyi|c|h|cu|cuh|sh|txt|md))?)`")
    roots = [ROOT / name for name in (".", "csrc", "python/bitshard", "tests", "benchmarks")]
    for page in ("design.md", "contributing.md"):
        found = named.findall((ROOT / "docs" / page).read_text())
        assert len(found) > 10
        assert not [name for name in found if not any((root / name).exists() for root in roots)]
    section = (ROOT / "docs/design.md").read_text().partition("\nInside `sharding/`")[2].partition("\nInside `")[0]
    sharding = re.findall(r"`((?:weights|checkpoints|loading)/\w+)`", section)
    modules = {f"{path.parent.name}/{path.stem}" for path in (ROOT / "python/bitshard/sharding").glob("*/[!_]*.py")}
    assert set(sharding) == modules
    folders = {path.parent.name for path in (ROOT / "python/bitshard").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)/` \|", (ROOT / "docs/design.md").read_text(), re.MULTILINE)) >= folders
