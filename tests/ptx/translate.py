"""PTX to C: each kernel becomes a function that one thread runs, over the machine of machine.h.

    python tests/ptx/translate.py FILE.ptx KERNEL ... > FILE.c

What nvcc makes of a kernel, inline assembly included, is what runs. Registers keep bits without a type; an instruction
`fma.rn.f32 d, a, b, c` becomes `d = ptx_fma_rn_f32(a, b, c)`, and the C compiler names one that the machine has not.
Only what is particular in its operands is spelled out here: memory, branches, comparisons, vectors, exchanges.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field, replace
from functools import cache

SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
WIDTHS = {"pred": "uint32_t", "b8": "uint8_t", "b16": "uint16_t", "b32": "uint32_t", "f32": "uint32_t"}
WIDTHS |= {
    "b64": "uint64_t",
    "f64": "uint64_t",
    "s32": "uint32_t",
    "u32": "uint32_t",
    "u64": "uint64_t",
    "s64": "uint64_t",
}
WIDTHS |= {"u16": "uint16_t", "s16": "uint16_t", "f16": "uint16_t", "f16x2": "uint32_t"}
HEAD = re.compile(r"(?:\.visible\s+|\.weak\s+)?\.(entry|func)\s+(?:\(([^)]*)\)\s*)?([\w$]+)\s*\(([^)]*)\)[^{;]*([{;])")
BRACE, SPACE, LABEL = re.compile(r"[{}]"), re.compile(r"\s*"), re.compile(r"([\w$]+):")
VARIABLE = re.compile(
    r"\.(global|shared|const|local)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(\[(\d*)\])?(?:\s*=\s*(.*))?$", re.S
)
SPECIAL = {
    "%tid": "t->tid[{}]",
    "%ntid": "t->run->block[{}]",
    "%ctaid": "t->cta->id[{}]",
    "%nctaid": "t->run->grid[{}]",
    "%laneid": "(t->index & 31)",
    "%cluster_ctarank": "t->cta->rank",
    "%cluster_nctarank": "t->run->cluster",
    "%clusterid": "(t->cta->id[{}] / ({} ? 1 : t->run->cluster))",
    "%nclusterid": "(t->run->grid[{}] / ({} ? 1 : t->run->cluster))",
    "%cluster_ctaid": "({1} ? 0 : t->cta->rank)",
}


def identifier(name: str) -> str:
    return re.sub(r"[^\w]", "_", name.lstrip("%"))


def size_of(kind: str) -> int:
    return 4 if kind == "f16x2" else SIZES[kind.lstrip("bsuf")]


@dataclass
class Function:
    """One .entry or .func: bytes of its parameters, of a function's result first, and statements."""

    kind: str
    name: str
    parameters: dict[str, int]
    body: str
    registers: dict[str, str] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    local: dict[str, int] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)


@dataclass
class Layout:
    """Where shared variables of known size lie, in the order in which they are met."""

    places: dict[str, int] = field(default_factory=dict)
    end: int = 0

    def place(self, name: str, size: int, align: int) -> int:
        if name not in self.places:
            self.places[name] = -(-self.end // align) * align
            self.end = self.places[name] + size
        return self.places[name]


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*", "", re.sub(r"/\*.*?\*/", "", text, flags=re.S))


def closing(text: str, start: int) -> int:
    """Index behind the brace that closes the one before `start`."""
    depth = 1
    for brace in BRACE.finditer(text, start):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return brace.end()
    raise ValueError("a brace is not closed")


def parameters_of(text: str) -> dict[str, int]:
    """{name: bytes} in order."""
    found = {}
    for declaration in filter(None, (part.strip() for part in text.split(","))):
        kind, name, count = re.fullmatch(
            r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?", declaration
        ).groups()
        found[name] = size_of(kind) * int(count or 1)
    return found


def functions_of(text: str) -> dict[str, Function]:
    found = {}
    for head in HEAD.finditer(text):
        kind, results, name, parameters, end = head.groups()
        if end == "{":
            body = text[head.end() : closing(text, head.end()) - 1]
            parameters = parameters_of(results or "") | parameters_of(parameters)
            found[name] = Function(kind, name, parameters, body)
    return found


def variables_of(text: str) -> dict[str, tuple[str, int, str]]:
    """{name: (space, bytes, initial bytes as C)} of the module's variables."""
    outside = text
    for head in reversed(list(HEAD.finditer(text))):
        if head.group(5) == "{":
            outside = outside[: head.start()] + outside[closing(text, head.end()) :]
    found = {}
    for statement in re.findall(r"\.(?:global|shared|const)\s[^;]*", outside):
        space, _, kind, name, array, count, initial = VARIABLE.match(statement).groups()
        found[name] = (space, size_of(kind) * int(count or (0 if array else 1)), initial or "{0}")
        assert initial is None or kind == "b8", f"initial values of {name} are no bytes"
    return found


def statements(body: str):
    """ "{", "}", (label,) and statements, in order."""
    at = 0
    while True:
        at = SPACE.match(body, at).end()
        if at >= len(body):
            return
        if body[at] in "{}":
            yield body[at]
            at += 1
            continue
        label = LABEL.match(body, at)
        if label:
            yield (label.group(1),)
            at = label.end()
            continue
        end = body.index(";", at)
        yield " ".join(body[at:end].split())
        at = end + 1


def operands_of(text: str) -> list[str]:
    """Split at commas outside brackets, braces and parentheses."""
    found, depth, last = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0:
            found.append(text[last:i].strip())
            last = i + 1
    return [*found, text[last:].strip()] if text.strip() else []


class Translator:
    """One function's statements to C; scopes of inline assembly get names of their own."""

    def __init__(self, function: Function, variables: dict[str, tuple[str, int, str]], layout: Layout):
        self.f, self.variables, self.layout = function, variables, layout
        self.scopes: list[dict[str, str]] = [{}]
        self.labels: list[dict[str, str]] = [{}]
        self.fresh = 0
        self.sums = set(re.findall(r"wgmma\.mma_async\S*\s+\{\s*([^,\s]+)", function.body))  # the first of each D
        self.zeros: set[str] = set()  # registers that hold a constant 0, up to the next label

    # -- names --

    def declare(self, kind: str, names: str) -> None:
        for name in (part.strip() for part in names.split(",")):
            counted = re.fullmatch(r"(%?[\w$]+)<(\d+)>", name)
            if counted:
                self.scopes[-1][counted.group(1) + "<"] = kind  # any number behind it
                continue
            self.fresh += len(self.scopes) > 1
            unique = identifier(name) + (f"_s{self.fresh}" if len(self.scopes) > 1 else "")
            self.scopes[-1][name] = unique
            self.f.registers[unique] = kind

    def register(self, name: str) -> str | None:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
            stem = name.rstrip("0123456789") + "<"
            if stem in scope and name != stem[:-1]:
                self.f.registers.setdefault(identifier(name), scope[stem])
                return identifier(name)
        return None

    def width(self, operand: str) -> int:
        kind = self.f.registers[self.register(operand)]
        return 4 if kind == "pred" else size_of(kind)

    def symbol(self, name: str) -> str | None:
        """A variable's address in its own space; a parameter's is a pointer."""
        if name in self.f.parameters:
            if self.f.kind == "func":
                return f"(uint64_t){identifier(name)}"
            place = 0
            for other, size in self.f.parameters.items():
                place = -(-place // min(size & -size, 8)) * min(size & -size, 8)
                if other == name:
                    break
                place += size
            return f"((uint64_t)t->run->parameters + {place})"
        if name in self.f.shared:
            return f"ptx_shared_base(t, {self.f.shared[name]})"
        if name in self.f.local:
            return f"(uint64_t){identifier(name)}"
        if name in self.variables:
            if self.variables[name][0] == "shared":  # of no size: what the launch adds
                size = self.variables[name][1]
                return f"ptx_shared_base(t, {self.layout.place(name, size, 16) if size else 'STATIC_SHARED'})"
            return f"(uint64_t){identifier(name)}"
        return None

    def value(self, operand: str) -> str:
        """An operand that is read."""
        if operand.startswith("!"):
            return f"!{self.value(operand[1:])}"
        if (name := self.register(operand)) is not None:
            return name
        if operand.startswith("%"):
            base, _, axis = operand.partition(".")
            index = "xyz".index(axis) if axis else 0
            return SPECIAL[base].format(index, index)
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", operand):
            return f"0x{operand[2:]}u"
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", operand):
            return f"0x{operand[2:]}ull"
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)[uU]?", operand):
            number = int(operand.rstrip("uU"), 0)
            return f"{number}" if -(2**31) < number < 2**31 else f"{number}{'ull' if number > 0 else 'll'}"
        name, _, offset = operand.partition("+")
        if (place := self.symbol(name.strip())) is not None:
            return f"({place} + {offset.strip() or 0})"
        raise ValueError(f"operand {operand} in {self.f.name}")

    def address(self, operand: str) -> str:
        inner = operand.strip()[1:-1].strip()
        base, _, offset = inner.partition("+")
        base, offset = base.strip(), offset.strip() or "0"
        return f"({self.value(base)} + ({offset}))"

    # -- statements --

    def run(self) -> list[str]:
        parsed = list(statements(self.f.body))
        self.rename_labels(parsed)
        depth, number = [0], 0
        for statement in parsed:
            if statement == "{":
                number += 1
                depth.append(number)
                self.scopes.append({})
                self.labels.append(self.of_scope[number])
            elif statement == "}":
                depth.pop()
                self.scopes.pop()
                self.labels.pop()
            elif isinstance(statement, tuple):
                self.zeros.clear()
                self.f.lines.append(f"{self.label(statement[0])}:;")
            else:
                self.statement(statement)
        return self.f.lines

    def rename_labels(self, parsed: list) -> None:
        """Each scope's labels, before any is used."""
        self.of_scope, stack, number = {0: {}}, [0], 0
        for statement in parsed:
            if statement == "{":
                number += 1
                self.of_scope[number] = {}
                stack.append(number)
            elif statement == "}":
                stack.pop()
            elif isinstance(statement, tuple):
                self.of_scope[stack[-1]][statement[0]] = f"{identifier(statement[0])}_{stack[-1]}"
        self.labels = [self.of_scope[0]]

    def label(self, name: str) -> str:
        return next(scope[name] for scope in reversed(self.labels) if name in scope)

    def statement(self, text: str) -> None:
        if text.startswith("."):
            self.directive(text)
            return
        guard = re.match(r"@(!?)(%?[\w$]+)\s+", text)
        if guard:
            text = text[guard.end() :]
        name, _, rest = text.partition(" ")
        code = self.instruction(name, operands_of(rest)) + self.constant_sums(name, operands_of(rest))
        self.f.lines.append(f"if ({guard.group(1)}{self.value(guard.group(2))}) {{ {code} }}" if guard else code)

    def constant_sums(self, name: str, operands: list[str]) -> str:
        """Keeps whether the sums that a wgmma adds to are a constant 0: ptxas then multiplies without adding."""
        target = operands[0].strip("{").partition(",")[0] if operands else ""
        known = name == "mov.f32" and (operands[1] == "0f00000000" or operands[1] in self.zeros)
        (self.zeros.add if known else self.zeros.discard)(target)
        return f" {self.constant(target)} = {int(known)};" if target in self.sums else ""

    def constant(self, sums: str) -> str:
        name = f"constant_{self.value(sums)}"
        self.f.registers[name] = "pred"
        return name

    def directive(self, text: str) -> None:
        if text.startswith(".reg"):
            _, kind, names = text.split(None, 2)
            self.declare(kind.lstrip("."), names)
        elif text.startswith((".shared", ".local")):
            space, align, kind, name, _, count, _ = VARIABLE.match(text).groups()
            size = size_of(kind) * int(count or 1)
            if space == "shared":
                self.f.shared[name] = self.layout.place(f"{self.f.name}.{name}", size, int(align or 1))
            else:
                self.f.local[name] = size
        elif text.startswith(".param"):
            ((name, size),) = parameters_of(text).items()
            self.fresh += 1
            self.f.registers[f"{identifier(name)}_s{self.fresh}"] = f"bytes{size}"
            self.scopes[-1][name] = f"{identifier(name)}_s{self.fresh}"
        elif not text.startswith((".pragma", ".loc", ".maxn")):
            raise ValueError(f"directive {text}")

    def instruction(self, name: str, operands: list[str]) -> str:
        parts = name.split(".")
        special = getattr(self, f"do_{parts[0]}", None)
        if special:
            return special(parts, operands)
        function = "ptx_" + re.sub(r"\W+", "_", name)
        values = [self.value(operand) for operand in operands[1:]]
        return f"{self.value(operands[0])} = {function}({', '.join(values)});"

    # -- control --

    def do_bra(self, parts, operands):
        return f"goto {self.label(operands[0])};"

    def do_ret(self, parts, operands):
        return "return;"

    do_exit = do_ret

    def do_trap(self, parts, operands):
        return 'ptx_fail(t, "trap");'

    def do_call(self, parts, operands):
        called = next(operand for operand in operands if not operand.startswith("("))
        lists = [operands_of(operand.strip("()")) for operand in operands if operand.startswith("(")]
        arguments = [self.scopes_of(name) for names in lists for name in names]
        return f"ptx_func_{identifier(called)}({', '.join(['t', *arguments])});"

    def scopes_of(self, name: str) -> str:
        return next(scope[name] for scope in reversed(self.scopes) if name in scope)

    # -- memory --

    def pointer(self, space: str, operand: str, size: int, what: str) -> str:
        inner = operand.strip()[1:-1].partition("+")
        argument = next((scope[inner[0].strip()] for scope in reversed(self.scopes) if inner[0].strip() in scope), "")
        if space == "param" and self.f.registers.get(argument, "").startswith("bytes"):
            return f"{argument} + {inner[2].strip() or 0}"
        return f"ptx_{space}(t, {self.address(operand)}, {size}, {what})"

    def do_ld(self, parts, operands):
        parts = ["shared" if part == "shared::cluster" else part for part in parts]
        space = next((s for s in ("global", "shared", "param", "local", "const") if s in parts), "generic")
        kind, target = parts[-1], operands[0]
        names = operands_of(target.strip("{}")) if target.startswith("{") else [target]
        one = size_of(kind)
        code = "ptx_spin(t); " if "acquire" in parts or "volatile" in parts or "relaxed" in parts else ""
        code += f"{{ const uint8_t *from = {self.pointer(space, operands[1], one * len(names), 0)}; "
        for i, register in enumerate(names):
            if register != "_":
                code += (
                    f"{self.value(register)} = ptx_get_{'s' if kind[0] == 's' else 'u'}{8 * one}(from + {i * one}); "
                )
        return code + "}"

    def do_st(self, parts, operands):
        space = next((s for s in ("global", "shared", "param", "local") if s in parts), "generic")
        kind, source = parts[-1], operands[1]
        names = operands_of(source.strip("{}")) if source.startswith("{") else [source]
        one = size_of(kind)
        code = f"{{ uint8_t *to = {self.pointer(space, operands[0], one * len(names), 1)}; "
        for i, operand in enumerate(names):
            code += f"ptx_put_u{8 * one}(to + {i * one}, {self.value(operand)}); "
        return code + "}"

    def do_atom(self, parts, operands):
        space = next((s for s in ("global", "shared") if s in parts), "generic")
        operation, kind = (
            next(p for p in parts if p in ("add", "exch", "max", "min", "or", "and", "cas", "inc")),
            parts[-1],
        )
        pointer = self.pointer(space, operands[1], size_of(kind), 1)
        values = ", ".join(self.value(operand) for operand in operands[2:])
        return f"{self.value(operands[0])} = ptx_atom_{operation}_{kind}({pointer}, {values});"

    def do_red(self, parts, operands):
        space = next((s for s in ("global", "shared") if s in parts), "generic")
        operation, kind = next(p for p in parts if p in ("add", "max", "min", "or", "and")), parts[-1]
        pointer = self.pointer(space, operands[0], size_of(kind), 1)
        return f"(void)ptx_atom_{operation}_{kind}({pointer}, {self.value(operands[1])});"

    def do_cvta(self, parts, operands):
        way = "_to" if "to" in parts else ""
        space = next(s for s in ("global", "shared", "param", "local", "const") if s in parts)
        value = self.value(operands[1])
        if space == "shared":
            value = f"ptx_cvta{way}_shared(t, {value})"
        return f"{self.value(operands[0])} = {value};"

    def do_prefetch(self, parts, operands):
        return f"ptx_prefetch(t, {self.address(operands[0])});" if "global" in parts else ";"

    def do_fence(self, parts, operands):
        return ";"

    do_prefetchu = do_membar = do_nanosleep = do_discard = do_fence

    def do_setmaxnreg(self, parts, operands):
        return f"ptx_registers(t, {self.value(operands[0])});"

    def do_griddepcontrol(self, parts, operands):
        return "t->waited = true;" if parts[1] == "wait" else ";"

    # -- plain operands of an unusual shape --

    def do_mov(self, parts, operands):
        target, source = operands
        if target.startswith("{"):
            code, shift = "{ const uint64_t whole = " + self.value(source) + "; ", 0
            for name in operands_of(target.strip("{}")):
                if name != "_":
                    code += f"{self.value(name)} = whole >> {shift}; "
                shift += 8 * (self.width(name) if name != "_" else 2)
            return code + "}"
        if source.startswith("{"):
            values, shift = [], 0
            one = size_of(parts[-1]) // len(operands_of(source.strip("{}")))
            for name in operands_of(source.strip("{}")):
                mask = f"{(1 << 8 * one) - 1}ull"
                values.append(f"((uint64_t){self.value(name)} & {mask}) << {shift}")
                shift += 8 * one
            return f"{self.value(target)} = {' | '.join(values)};"
        return f"{self.value(target)} = {self.value(source)};"

    def do_setp(self, parts, operands):
        compare, kind = parts[1], "_".join(parts[-2:]) if "ftz" in parts else parts[-1]
        code = f"ptx_{compare}_{kind}({self.value(operands[1])}, {self.value(operands[2])})"
        if len(operands) == 4:
            joined = {"and": "&", "or": "|", "xor": "^"}[next(p for p in parts if p in ("and", "or", "xor"))]
            code = f"({code} {joined} {self.value(operands[3])})"
        first, _, second = operands[0].partition("|")
        if second:
            raise ValueError("setp with two results")
        return f"{self.value(first)} = {code};"

    def do_selp(self, parts, operands):
        _, a, b, p = (self.value(operand) for operand in operands)
        return f"{self.value(operands[0])} = {p} ? {a} : {b};"

    # -- collectives --

    def do_shfl(self, parts, operands):
        target, _, good = operands[0].partition("|")
        values = ", ".join(self.value(operand) for operand in operands[1:])
        good = f"&{self.value(good)}" if good else "NULL"
        return f"{self.value(target)} = ptx_shfl(t, PTX_{parts[2].upper()}, {values}, {good});"

    def do_vote(self, parts, operands):
        value, mask = self.value(operands[1]), self.value(operands[2])
        return f"{self.value(operands[0])} = ptx_vote_{parts[2]}(t, {value}, {mask});"

    def do_redux(self, parts, operands):
        value, mask = self.value(operands[1]), self.value(operands[2])
        return f"{self.value(operands[0])} = ptx_redux_{parts[2]}_{parts[3]}(t, {value}, {mask});"

    def do_activemask(self, parts, operands):
        raise ValueError("activemask: lanes run apart here")

    def do_elect(self, parts, operands):
        target, _, good = operands[0].partition("|")
        leader = f"{self.value(target)} = " if target != "_" else ""
        mask = self.value(operands[1])
        return (
            f"{leader}__builtin_ctz({mask}); {self.value(good)} = (t->index & 31) == (uint32_t)__builtin_ctz({mask});"
        )

    def do_bar(self, parts, operands):
        if parts[1] == "warp":
            return f"ptx_meet(t, {self.value(operands[0])});"
        if parts[1] == "red":
            threads = self.value(operands[2]) if len(operands) == 4 else "0"
            barrier, value = self.value(operands[1]), self.value(operands[-1])
            return f"{self.value(operands[0])} = ptx_bar_red_{parts[2]}(t, {barrier}, {threads}, {value});"
        threads = self.value(operands[1]) if len(operands) == 2 else "0"
        return f"ptx_bar_{parts[1]}(t, {self.value(operands[0])}, {threads});"

    def do_barrier(self, parts, operands):
        return f"ptx_cluster_{parts[2]}(t);" if parts[1] == "cluster" else self.do_bar(parts, operands)

    def do_mma(self, parts, operands):
        shape, kind = parts[3], parts[7]
        d, a, b, c = (operands_of(operand.strip("{}")) for operand in operands)
        deposit = ", ".join(self.value(name) for name in (*a, *b, *c))
        code = f"{{ const uint32_t in[] = {{{deposit}}}; uint32_t out[4]; ptx_mma_{shape}_{kind}(t, in, out); "
        return code + " ".join(f"{self.value(name)} = out[{i}];" for i, name in enumerate(d)) + " }"

    def do_ldmatrix(self, parts, operands):
        names = operands_of(operands[0].strip("{}"))
        transposed = int("trans" in parts)
        code = f"{{ uint32_t out[4]; ptx_ldmatrix(t, {self.address(operands[1])}, {len(names)}, {transposed}, out); "
        return code + " ".join(f"{self.value(name)} = out[{i}];" for i, name in enumerate(names)) + " }"

    def do_wgmma(self, parts, operands):
        if parts[1] != "mma_async":
            return {"fence": ";", "commit_group": "ptx_wgmma_commit(t);"}.get(
                parts[1], f"ptx_wgmma_wait(t, {self.value(operands[0]) if operands else 0});"
            )
        columns, kind = int(re.search(r"n(\d+)k(?:16|32)", parts[4]).group(1)), parts[-1]
        adds = f"ptx_adds({self.value(operands[3])}, {self.constant(operands[0][1:].partition(',')[0].strip())})"
        d, a = operands_of(operands[0].strip("{}")), operands_of(operands[1].strip("{}"))
        registers = ", ".join(f"&{self.value(name)}" for name in d)
        if not operands[1].startswith("{"):
            assert operands[4:] == ([] if kind == "s8" else ["1", "1", "0", "0"]), f"wgmma {operands[4:]}"
            values = ", ".join(self.value(operand) for operand in operands[1:3])
            call = f"ptx_wgmma_tiles(t, PTX_{kind.upper()}, {columns}, d, {values}, {adds})"
            return f"{{ uint32_t *const d[] = {{{registers}}}; {call}; }}"
        assert operands[4:] == ["1", "1", "0"], f"wgmma {operands[4:]}"
        values = ", ".join(self.value(name) for name in a)
        code = f"{{ uint32_t *const d[] = {{{registers}}}; const uint32_t a[] = {{{values}}}; "
        return code + f"ptx_wgmma_{kind}(t, {columns}, d, a, {self.value(operands[2])}, {adds}); }}"

    # -- asynchronous copies and their barriers --

    def do_cp(self, parts, operands):
        rest = parts[2:]
        if rest[0] == "commit_group":
            return "ptx_copy_commit(t);"
        if rest[0] in ("wait_group", "wait_all"):
            return f"ptx_copy_wait(t, {self.value(operands[0]) if operands else 0});"
        if rest[0] == "mbarrier":
            raise ValueError(".".join(parts))
        if rest[:2] == ["bulk", "prefetch"]:
            return ";"
        if rest[:2] == ["bulk", "tensor"]:
            to, source, barrier = operands[:3]
            name, place = operands_of(source.strip("[]"))
            column, row = (self.value(one) for one in operands_of(place.strip("{}")))
            blocks = self.value(operands[3]) if len(operands) > 3 else "1u << t->cta->rank"
            where = f"{self.address(to)}, {self.value(name)}, {column}, {row}, {self.address(barrier)}, {blocks}"
            return f"ptx_tensor_copy(t, {where});"
        if rest[0] == "bulk":
            to, source, barrier = (self.address(operands[i]) for i in (0, 1, 3))
            return f"ptx_bulk_copy(t, {to}, {source}, {self.value(operands[2])}, {barrier});"
        size = self.value(operands[2])
        taken = self.value(operands[3]) if len(operands) > 3 else size
        return f"ptx_copy(t, {self.address(operands[0])}, {self.address(operands[1])}, {size}, {taken});"

    def do_mbarrier(self, parts, operands):
        address = {op: self.address(op) for op in operands if op.startswith("[")}
        if parts[1] == "init":
            return f"ptx_mbarrier_init(t, {address[operands[0]]}, {self.value(operands[1])});"
        if parts[1] in ("try_wait", "test_wait"):
            wait = f"ptx_mbarrier_wait(t, {address[operands[1]]}, {self.value(operands[2])})"
            return f"{self.value(operands[0])} = {wait};"
        if parts[1] == "arrive":
            expected = self.value(operands[2]) if "expect_tx" in parts else "0"
            return f"ptx_mbarrier_arrive(t, {address[operands[1]]}, {expected});"
        if parts[1] == "expect_tx":
            return f"ptx_mbarrier_expect(t, {address[operands[0]]}, {self.value(operands[1])});"
        if parts[1] == "inval":
            return ";"
        raise ValueError(".".join(parts))


def c_of(function: Function) -> str:
    """The C function of a kernel or of a function that it calls."""
    prefix = "ptx_kernel_" if function.kind == "entry" else "ptx_func_"
    arguments = "" if function.kind == "entry" else "".join(f", uint8_t *{identifier(p)}" for p in function.parameters)
    out = [f"static void {prefix}{identifier(function.name)}(ptx_thread *const t{arguments}) {{"]
    for name, kind in sorted(function.registers.items()):
        out.append(f"  uint8_t {name}[{kind[5:]}];" if kind.startswith("bytes") else f"  {WIDTHS[kind]} {name} = 0;")
    for name, size in function.local.items():
        out.append(f"  _Alignas(16) uint8_t {identifier(name)}[{size}];")
    return "\n".join([*out, "  (void)t;", *(f"  {line}" for line in function.lines), "}", ""])


@cache
def module_of(text: str) -> tuple[dict[str, Function], dict[str, tuple[str, int, str]]]:
    """Functions and variables of a PTX text."""
    text = without_comments(text)
    return functions_of(text), variables_of(text)


def translate(text: str, kernels: list[str]) -> str:
    """A C file with the kernels named, and all that they call."""
    functions, variables = module_of(text)
    functions = {
        name: replace(function, registers={}, shared={}, local={}, lines=[]) for name, function in functions.items()
    }
    wanted, done, layout = list(kernels), [], Layout()
    while wanted:
        function = functions[wanted.pop()]
        if function not in done:
            Translator(function, variables, layout).run()
            done.append(function)
            lines = "\n".join(function.lines)
            wanted += [name for name in functions if f"ptx_func_{identifier(name)}(" in lines]
    out = ['#include "machine.h"', f"enum {{ STATIC_SHARED = {-(-layout.end // 1024) * 1024} }};"]
    used, tables = "\n".join(line for function in done for line in function.lines), []
    for name, (space, size, initial) in variables.items():
        if space != "shared" and identifier(name) in used:
            out.append(f"static _Alignas(16) const uint8_t {identifier(name)}[{size}] = {initial};")
            tables.append(f"{{{identifier(name)}, {size}}}")
    for function in done:
        if function.kind == "func":
            arguments = "".join(", uint8_t *" for _ in function.parameters)
            out.append(f"static void ptx_func_{identifier(function.name)}(ptx_thread *{arguments});")
    out += [c_of(function) for function in done]
    names = ", ".join(f'{{"{name}", ptx_kernel_{identifier(name)}}}' for name in kernels)
    out.append(f"const ptx_entry ptx_entries[] = {{{names}, {{0}}}};")
    out.append(f"const ptx_table ptx_tables[] = {{{', '.join([*tables, '{0}'])}}};")
    out.append("const uint32_t ptx_static_shared = STATIC_SHARED;")
    waits = any("t->waited = true" in line for function in done for line in function.lines)
    out.append(f"const bool ptx_overlaps = {str(waits).lower()};")
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        sys.stdout.write(translate(file.read(), sys.argv[2:]))
