"""Builds bitshard._C: C sources as C, and those of cuda/ into fatbins that are embedded in the extension.

Needs gcc (or clang) and nothing of torch. nvcc is used where found (PATH, CUDA_HOME, /usr/local/cuda); without it the
build goes on CPU-only and says so. Environment:
  BITSHARD_CUDA=0            leave CUDA out even where nvcc is found
  BITSHARD_CUDA_ARCHS=all    every architecture, or a list such as 80,90a,compute_90 (compute_* embeds PTX), or native:
                             that of this machine's GPUs, as nvidia-smi names them, in a fraction of the time
  BITSHARD_WERROR=1          compiler warnings are errors
  BITSHARD_SANITIZE=1        AddressSanitizer and UndefinedBehaviorSanitizer in the extension

The façade, a project of its own below python/bitsandbytes, is built as a wheel and carried along, unpacked, as
bitshard_cli/facade: `bitshard use` and `bitshard run` take it from there.
"""

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
VERSION = "0.1.0"

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit("bitshard needs Python with the GIL: this one is free-threaded, and the C core keeps state without locks")

NEWEST_FLAG = "-mavxvnni"  # of gcc 11 and clang 12; what is compiled without it is right, and slower
C_FLAGS = [
    *("-std=gnu11", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"),
    "-fexceptions",  # errors leave an op as a C++ exception thrown by torch and unwind through C frames
    "-ffp-contract=off",  # the formats are defined by separately rounded products and sums
    "-fno-strict-aliasing",
]
NVCC_FLAGS = ["-std=c++17", "-O3", "--ftz=false", "--prec-div=true", "--fmad=true"]
ARCHITECTURES_DEFAULT = "75,80,90a,compute_80"  # a T4 has no newer card's code to fall back on
DURATION = (  # benchmarks/results/build_times_202611.md
    "The default, 75,80,90a,compute_80, takes 5 minutes of CPU time, 90a alone 4, 75 or 86 alone 1.5; more beside "
    "other work. BITSHARD_CUDA_ARCHS=native compiles for the GPUs of this machine only"
)
# To compile: begun first, so that no core is left with one of them at the end
LONGEST = ("optimizer", "calibration", "gemm_int8_sm90", "gemm_4bit_sm90_wide")
NO_NATIVE = "BITSHARD_CUDA_ARCHS=native: {}; name the architecture, as in BITSHARD_CUDA_ARCHS=86, or leave it out"
# Of the cards in machines of each kind, on Arm also Orin, Thor and GB10. GB10, sm_121, takes the code of sm_120, whose
# kernels are the same but for 13 of 199 (nvcc 13.0.88); its own would make the wheel a tenth larger.
ARCHITECTURES_ALL = {
    "x86_64": "75,80,86,89,90a,100,120,compute_120",
    "aarch64": "75,80,87,90a,100,110,120,compute_120",
}
# What C is compiled for, as uname -m says it: _PYTHON_HOST_PLATFORM=linux-aarch64 beside a cross compiler as CC
MACHINE = sysconfig.get_platform().rpartition("-")[2]


def c_sources(leave_out: str = "") -> dict[str, list[str]]:
    """{source: flags of its instruction set} of csrc/sources.txt, which says what its lines mean; without those of a
    word, or of another machine."""
    flags, foreign, sources = {}, {leave_out}, {}
    for line in (ROOT / "csrc" / "sources.txt").read_text().splitlines():
        first, *words = line.partition("#")[0].split() or [""]
        if first == "flags":
            name, machine, *flags[words[0]] = words
            foreign |= {name} if machine != MACHINE else set()
        elif first and foreign.isdisjoint(words):
            sources[f"csrc/{first}"] = [flag for word in words for flag in flags.get(word, [])]
    return sources


def find_nvcc() -> str | None:
    """Path of nvcc, or None where CUDA is switched off or absent."""
    if os.environ.get("BITSHARD_CUDA") == "0":
        return None
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    return shutil.which("nvcc") or shutil.which(str(Path(home) / "bin" / "nvcc"))


def cuda_include(nvcc: str) -> list[str]:
    """Folder of cuda.h, where there is one beside nvcc or in the usual place."""
    homes = [Path(nvcc).resolve().parent.parent, Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")]
    return [str(home / "include") for home in homes if (home / "include" / "cuda.h").exists()][:1]


def architectures() -> list[str]:
    """Architecture names as nvcc numbers: '90a' for machine code, 'compute_80' for PTX."""
    chosen = os.environ.get("BITSHARD_CUDA_ARCHS", ARCHITECTURES_DEFAULT)
    if chosen == "native":
        return list(native())
    return (ARCHITECTURES_ALL[MACHINE] if chosen == "all" else chosen).replace(";", ",").split(",")


@functools.cache
def native() -> tuple[str, ...]:
    """Architectures of this machine's GPUs, each once; ends the build where they cannot be known."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except FileNotFoundError:
        sys.exit(NO_NATIVE.format("there is no nvidia-smi on the PATH"))
    said = asked.stdout.split("\n") if asked.returncode == 0 else []
    capabilities = {line.strip() for line in said if line.strip()}
    if asked.returncode or not capabilities:
        sys.exit(NO_NATIVE.format(f"nvidia-smi named no GPU: {asked.stdout.strip() or 'no output'}"))
    for text in capabilities:
        if not re.fullmatch(r"\d+\.\d", text):
            sys.exit(NO_NATIVE.format(f"nvidia-smi said {text!r} for a compute capability"))
        if float(text) < 7.5:
            sys.exit(NO_NATIVE.format(f"a GPU has compute capability {text}, and bitshard's kernels need 7.5"))
    numbers = sorted(int(text.replace(".", "")) for text in capabilities)
    return tuple("90a" if number == 90 else str(number) for number in numbers)


def gencode(arch: str) -> str:
    number = arch.removeprefix("compute_")
    return f"-gencode=arch=compute_{number},code={arch if arch != number else 'sm_' + number}"


def headers() -> list[Path]:
    """All that a kernel includes: those beside it and the lowest ones of the C core."""
    return sorted([*(ROOT / "cuda").rglob("*.*h"), *(ROOT / "csrc/core").glob("*.*h")])


def cuda_sources() -> dict[Path, list[str]]:
    """{source: architectures of this build that it is compiled for} of cuda/sources.txt."""
    lines = [line.split() for line in (ROOT / "cuda" / "sources.txt").read_text().splitlines()]
    listed = {ROOT / "cuda" / line[0]: line[1:] for line in lines if line and line[0] != "#"}
    return {source: [arch for arch in architectures() if not only or arch in only] for source, only in listed.items()}


def digest(made_by: list[str], source: Path) -> str:
    """Of a command's part, of a source and of all headers: the name of what is made of them."""
    found = hashlib.sha256(repr(made_by).encode())
    for file in (source, *headers()):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def nvcc_command(nvcc: str, source: Path) -> list[str]:
    """What compiles a source, but for where to."""
    chosen, folders = cuda_sources().get(source, architectures()), ["-I", str(ROOT / "csrc"), "-I", str(ROOT)]
    return [nvcc, *NVCC_FLAGS, *map(gencode, chosen), *folders, "-fatbin", str(source)]


def fatbin_of(command: list[str], source: Path, folder: Path) -> Path:
    """Where the result lies; another one for each command, nvcc's own variable, source and header.

    The same in another copy of the tree, so that a build folder may be copied with it.
    """
    made_by = [part.replace(str(ROOT), ".") for part in [*command, os.environ.get("NVCC_APPEND_FLAGS", "")] if part]
    return folder / f"{source.stem}-{digest(made_by, source)}.fatbin"


def compile_fatbin(nvcc: str, source: Path, folder: Path) -> Path:
    """nvcc's fatbin of one source; reused where source, headers, flags and compiler are unchanged.

    Beside it nvcc's PTX for each architecture, <source>-<digest>.<architecture>.ptx, which tests/ptx/ runs.
    """
    command = nvcc_command(nvcc, source)
    fatbin = fatbin_of(command, source, folder)
    if not fatbin.exists():
        partial = fatbin.with_suffix(f".{os.getpid()}.partial")
        with tempfile.TemporaryDirectory(dir=folder) as kept:
            subprocess.run([*command, "-o", str(partial), "--keep", "--keep-dir", kept], check=True)
            for ptx in Path(kept).glob("*.ptx"):
                ptx.replace(folder / f"{source.stem}-{digest(NVCC_FLAGS, source)}{ptx.name.removeprefix(source.stem)}")
        partial.replace(fatbin)
    return fatbin


def is_compiled(nvcc: str, source: Path, folder: Path) -> bool:
    """Whether `compile_fatbin` has nothing to do."""
    return fatbin_of(nvcc_command(nvcc, source), source, folder).exists()


def compile_fatbins(nvcc: str, sources: list[Path], folder: Path) -> list[Path]:
    """Fatbins of all sources, in their order. What nvcc has to compile is counted on stderr, with seconds."""
    new = [source for source in sources if not is_compiled(nvcc, source, folder)]
    cores, begin = os.cpu_count() or 1, time.monotonic()
    if new:
        say(f"nvcc compiles {len(new)} CUDA sources for {','.join(architectures())} on {cores} cores. {DURATION}")

    def timed(source: Path) -> tuple[Path, float]:
        own = time.monotonic()
        return compile_fatbin(nvcc, source, folder), time.monotonic() - own

    with ThreadPoolExecutor(cores) as pool:
        compiled = {pool.submit(timed, source): source for source in new}
        for count, done in enumerate(as_completed(compiled), 1):
            own, total = done.result()[1], time.monotonic() - begin
            say(f"nvcc {count} of {len(new)}: {compiled[done].name} in {own:.0f} s, {total:.0f} s since the start")
    return [compile_fatbin(nvcc, source, folder) for source in sources]


def say(line: str) -> None:
    """At once, also where pip reads it."""
    print(f"bitshard: {line}", file=sys.stderr, flush=True)


def embed(fatbins: dict[str, Path | None], assembly: Path) -> None:
    """An assembler file that gives each fatbin the symbol bsh_fatbin_<stem>; None: of no architecture of this build."""
    lines = ['.section .note.GNU-stack,"",@progbits', ".section .rodata"]
    for stem, fatbin in fatbins.items():
        symbol = f"bsh_fatbin_{stem}"
        lines += [
            f".global {symbol}",
            f".hidden {symbol}",
            ".balign 16",
            f"{symbol}:",
            *([f'.incbin "{fatbin}"'] if fatbin else []),
            ".byte 0",
        ]
    assembly.write_text("\n".join(lines) + "\n")


class BuildExtension(build_ext):
    """Per-file flags for the instruction sets, and the embedded fatbins."""

    def build_extension(self, ext: Extension) -> None:
        temporary = Path(self.build_temp).resolve()
        temporary.mkdir(parents=True, exist_ok=True)
        nvcc = find_nvcc()
        self.compiler.src_extensions.append(".S")
        isa_flags = c_sources(leave_out="no-cuda" if nvcc else "cuda")
        sources = [Path(source) for source in isa_flags]
        include_dirs = [*self.include_dirs, str(ROOT / "csrc"), str(ROOT)]  # the root: "cuda/...", sizes of kernels
        macros = [("BSH_VERSION", f'"{VERSION}"'), ("_GNU_SOURCE", None)]
        macros.append(("Py_LIMITED_API", "0x030a0000"))
        extra_flags = ["-Werror"] if os.environ.get("BITSHARD_WERROR") == "1" else []
        sanitize = ["-fsanitize=address,undefined"] if os.environ.get("BITSHARD_SANITIZE") == "1" else []
        if nvcc:
            macros.append(("BSH_CUDA_ARCHS", f'"{",".join(architectures())}"'))
            sources.append(self.embed_cuda(nvcc, temporary))
            include_dirs += cuda_include(nvcc)
        else:
            macros.append(("BSH_NO_CUDA", None))
            say("nvcc not found or switched off: this build is CPU-only")

        absent = [] if self.knows(NEWEST_FLAG) else [NEWEST_FLAG]

        def compile_one(source: Path) -> str:
            relative = os.path.relpath(source, ROOT)
            of_isa = [flag for flag in isa_flags.get(relative, []) if flag not in absent]
            flags = C_FLAGS + of_isa + extra_flags + sanitize if source.suffix == ".c" else []
            (object_file,) = self.compiler.compile(
                [relative], str(temporary), macros, include_dirs, extra_postargs=flags
            )
            return object_file

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, sources))
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}.partial")
        self.compiler.link_shared_object(
            objects, str(partial), libraries=["dl", "m", "pthread"], extra_postargs=sanitize
        )
        partial.replace(target)

    def knows(self, flag: str) -> bool:
        """Whether the compiler has a flag."""
        command = [*self.compiler.compiler, flag, "-E", "-xc", os.devnull]
        return subprocess.run(command, capture_output=True).returncode == 0

    def embed_cuda(self, nvcc: str, temporary: Path) -> Path:
        listed = cuda_sources()
        sources = sorted((s for s in listed if listed[s]), key=lambda source: (source.stem not in LONGEST, source))
        made = dict(zip(sources, compile_fatbins(nvcc, sources, temporary), strict=True))
        assembly = temporary / "fatbins.S"
        embed({source.stem: made.get(source) for source in sorted(listed)}, assembly)
        return assembly


FACADE = ROOT / "python" / "bitsandbytes"
BUILD_WHEEL = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


class BuildPython(build_py):
    """The modules, and the façade unpacked among them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode and FACADE.is_dir():
            carry_facade(Path(self.build_lib) / "bitshard_cli" / "facade")


def carry_facade(target: Path) -> None:
    """What the façade's wheel holds, as `bitshard use` installs it: with a line on who installed it."""
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder, "project")
        unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
        shutil.copytree(FACADE, project, ignore=unwanted)
        made = subprocess.run(
            [sys.executable, "-c", BUILD_WHEEL, folder], cwd=project, check=True, stdout=subprocess.PIPE, text=True
        )
        shutil.rmtree(target, ignore_errors=True)
        with zipfile.ZipFile(Path(folder, made.stdout.split()[-1])) as wheel:
            wheel.extractall(target)
    (info,) = target.glob("*.dist-info")
    (info / "INSTALLER").write_text("bitshard\n")
    record = (info / "RECORD").read_text().splitlines()
    (info / "RECORD").write_text("\n".join([f"{info.name}/INSTALLER,,", *record]) + "\n")


setup(
    version=VERSION,
    ext_modules=[
        Extension(
            "bitshard._C",
            list(c_sources()),
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildExtension, "build_py": BuildPython},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
