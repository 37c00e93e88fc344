"""Kernels as they stand in the built extension, read without tools of CUDA: fatbins, machine code, the host's table.

A fatbin is a header of 16 bytes (magic, version, header size, payload size) and entries, each a header and a payload:
PTX, of which nobody knows the registers before a driver compiles it, or machine code as an ELF file. There ".nv.info"
has attributes of kernels by symbol (registers, stack), ".nv.info.<kernel>" those of one (threads of a block),
".nv.shared.<kernel>" the size of its static shared memory and ".text.<kernel>" its instructions, those of functions
that it calls at the end.
"""

import dataclasses
import functools
import pathlib
import struct

FATBIN_MAGIC, PTX, MACHINE_CODE = struct.pack("<I", 0xBA55ED50), 1, 2
COMPRESSED, ONE_GPU_ONLY = 0xA000, 1 << 20  # flags of an entry
MAX_THREADS, FRAME_SIZE, MIN_STACK_SIZE, REGCOUNT = 0x05, 0x11, 0x12, 0x2F  # attributes
SIZED = 4  # how an attribute's value is given: a size and that many bytes; else it is the two bytes of the size
RESERVED_SHARED = 1024  # of every block from sm_80 on; machine code of sm_90 and newer counts it where it is used
NOBITS, RELOCATIONS, FUNCTION = 8, 4, 2  # ELF: types of sections, of a symbol
RELATIVE = {62: 8, 183: 1027}  # of a relocation, by machine: x86-64, AArch64


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What a launch takes: registers and bytes of local memory of a thread, static shared memory of a block."""

    name: str
    registers: int
    shared: int
    local: int
    max_threads: int | None  # of __launch_bounds__
    code: bytes = dataclasses.field(repr=False)  # its own, without the functions that it calls


@dataclasses.dataclass(frozen=True)
class Image:
    """One entry of a fatbin. `arch`: 10 * major + minor; `only`: as in "90a"."""

    fatbin: int  # which fatbin of the file
    kind: int
    arch: int
    only: bool
    data: bytes = dataclasses.field(repr=False)

    @property
    def name(self) -> str:
        """As nvcc numbers it: "80", "90a", "compute_80"."""
        return f"{'compute_' if self.kind == PTX else ''}{self.arch}{'a' if self.only else ''}"


# ---- fatbins ----


@functools.cache
def images(path: str | pathlib.Path) -> tuple[Image, ...]:
    """All entries of all fatbins in a file, in their order."""
    blob = pathlib.Path(path).read_bytes()
    found: list[Image] = []
    at, fatbins = blob.find(FATBIN_MAGIC), 0
    while at >= 0:
        _, version, header, size = struct.unpack_from("<IHHQ", blob, at)
        end = at + header + size
        if version == 1 and header == 16 and end <= len(blob):
            found += _entries(blob, at + header, end, fatbins)
            fatbins += 1
        else:
            end = at + len(FATBIN_MAGIC)  # these four bytes by chance
        at = blob.find(FATBIN_MAGIC, end)
    return tuple(found)


def _entries(blob: bytes, at: int, end: int, fatbin: int) -> list[Image]:
    found = []
    while at < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", blob, at)
        (arch,), (flags,) = struct.unpack_from("<I", blob, at + 28), struct.unpack_from("<Q", blob, at + 40)
        data = blob[at + header : at + header + size]
        if kind == MACHINE_CODE and flags & COMPRESSED:
            raise ValueError(f"machine code of sm_{arch} is compressed: nvcc -no-compress leaves it readable")
        if kind == MACHINE_CODE and data[:4] != b"\x7fELF":
            raise ValueError(f"machine code of sm_{arch} is no ELF file: a form of fatbin that is not known here")
        found.append(Image(fatbin, kind, arch, bool(flags & ONE_GPU_ONLY), data))
        at += header + size
    return found


# ---- machine code ----


@dataclasses.dataclass(frozen=True)
class _Section:
    index: int
    info: int
    size: int
    data: bytes


def _text(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()


def _sections(elf: bytes) -> dict[str, _Section]:
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    width, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    rows = [struct.unpack_from("<IIQQQQIIQQ", elf, offset + i * width) for i in range(count)]
    data = [b"" if row[1] == NOBITS else elf[row[4] : row[4] + row[5]] for row in rows]
    return {_text(data[names], row[0]): _Section(i, row[7], row[5], data[i]) for i, row in enumerate(rows)}


def _attributes(info: bytes) -> list[tuple[int, bytes]]:
    """(attribute, value) of a section of nv.info."""
    found, at = [], 0
    while at + 4 <= len(info):
        how, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        found.append((attribute, info[at : at + size] if how == SIZED else b""))
        at += size if how == SIZED else 0
    return found


def _symbols(sections: dict[str, _Section]) -> list[tuple[str, int, int, int]]:
    """(name, type, section, first byte in it) of each symbol, in order."""
    symbols, strings = sections[".symtab"].data, sections[".strtab"].data
    rows = [struct.unpack_from("<IBBHQQ", symbols, i) for i in range(0, len(symbols), 24)]
    return [(_text(strings, name), info & 15, section, value) for name, info, _, section, value, _ in rows]


@functools.cache
def kernels(image: Image) -> dict[str, Kernel]:
    """Kernels of one image of machine code, by name."""
    sections = _sections(image.data)
    symbols = _symbols(sections)
    numbers: dict[str, dict[int, int]] = {}
    for attribute, value in _attributes(sections[".nv.info"].data):
        if attribute in (REGCOUNT, FRAME_SIZE, MIN_STACK_SIZE):
            symbol, number = struct.unpack("<II", value)
            numbers.setdefault(symbols[symbol][0], {})[attribute] = number
    found = {}
    for section, text in sections.items():
        name = section.removeprefix(".text.")
        if section == name or f".nv.info.{name}" not in sections:
            continue
        bounds = [value for kind, value in _attributes(sections[f".nv.info.{name}"].data) if kind == MAX_THREADS]
        threads = struct.unpack("<III", bounds[0])[0] if bounds else None
        own = numbers[name]
        if image.arch < 90 and text.info >> 24 != own[REGCOUNT]:  # older machine code has the number twice
            raise ValueError(f"sm_{image.arch}, {name}: {own[REGCOUNT]} registers, or {text.info >> 24}")
        called = [at for symbol, kind, index, at in symbols if kind == FUNCTION and index == text.index and at > 0]
        shared = sections[f".nv.shared.{name}"].size if f".nv.shared.{name}" in sections else 0
        if image.arch >= 90 and shared >= RESERVED_SHARED:
            shared -= RESERVED_SHARED
        local = max(own[FRAME_SIZE], own[MIN_STACK_SIZE])
        found[name] = Kernel(name, own[REGCOUNT], shared, local, threads, text.data[: min(called, default=None)])
    return found


# ---- what the host asks for ----


@functools.cache
def named_by_host(path: str | pathlib.Path, names: frozenset[str]) -> set[str]:
    """Those of `names` that the data of the extension points to, as its objects bsh_cuda_kernel do.

    Such a pointer is an address, for which the dynamic linker has a relocation; by these they are found.
    """
    blob = pathlib.Path(path).read_bytes()
    (machine,), (offset,) = struct.unpack_from("<H", blob, 0x12), struct.unpack_from("<Q", blob, 0x28)
    width, count = struct.unpack_from("<HH", blob, 0x3A)
    rows = [struct.unpack_from("<IIQQQQIIQQ", blob, offset + i * width) for i in range(count)]
    found = set()
    for _, kind, _, _, start, size, *_ in rows:
        for entry in range(start, start + size, 24) if kind == RELOCATIONS else ():
            _, info, address = struct.unpack_from("<QQq", blob, entry)
            section = next((row for row in rows if row[3] and row[3] <= address < row[3] + row[5]), None)
            if info & 0xFFFFFFFF == RELATIVE[machine] and section is not None and section[1] != NOBITS:
                at = section[4] + address - section[3]
                found.add(blob[at : blob.find(b"\0", at, at + 80)].decode("latin1"))
    return found & names
