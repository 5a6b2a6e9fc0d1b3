"""Parses PTX text into entries: parameters, registers, shared symbols and instructions.

Nothing here knows what an instruction means; see `decode` and `isa`.
"""

import bisect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from quackish.emulator.errors import PtxError

# Operands


class Register(NamedTuple):
    name: str  # unique in the entry, without "%"


class Immediate(NamedTuple):
    bits: int  # an integer (may be negative), or the bits of a float
    kind: str  # "integer", "f32" or "f64"


class Special(NamedTuple):
    name: str  # such as "%tid.x"


class Symbol(NamedTuple):
    """A parameter, a shared variable or a label."""

    name: str
    offset: int = 0


class Sink(NamedTuple):
    """The operand `_`: a result that nobody wants."""


class Not(NamedTuple):
    operand: Register


class Pair(NamedTuple):
    """`first|second`."""

    first: "Operand"
    second: "Operand"


class Vector(NamedTuple):
    items: tuple["Operand", ...]


class Address(NamedTuple):
    """`[base + offset]`, or `[base, {coordinates}]` of tensor copies."""

    base: "Operand"
    offset: int = 0
    coordinates: tuple["Operand", ...] = ()


Operand = Register | Immediate | Special | Symbol | Sink | Not | Pair | Vector | Address


class Instruction(NamedTuple):
    predicate: Register | None
    negated: bool  # it runs where the predicate is false
    opcode: str  # with all modifiers
    operands: tuple[Any, ...]  # Operand; which kind follows from the opcode
    line: int  # its line in the PTX, from 1
    source: str  # "file:line" of the code it was compiled from, or ""
    text: str


class Parameter(NamedTuple):
    offset: int
    size: int


class Variable(NamedTuple):
    align: int
    size: int  # 0 for the launch's dynamic shared memory


class Entry(NamedTuple):
    """A kernel: an `.entry` of the PTX."""

    name: str
    parameters: dict[str, Parameter]
    parameter_bytes: int
    registers: dict[str, str]  # name -> "pred", "b16", "b32" or "b64"
    shared: dict[str, Variable]
    local: dict[str, Variable]  # variables of each thread: .local, and the parameters of calls
    constants: dict[str, bytes]  # initialized .global variables of the module
    directives: dict[str, tuple[int, ...]]  # such as "reqntid": (384, 1, 1)
    instructions: list[Instruction]
    labels: dict[str, int]  # name -> index of the instruction that follows

    @property
    def source_name(self) -> str:
        """The class or function of the kernel. CuTe DSL's name also has the module and the types of the arguments."""
        method = re.match(r"kernel_cutlass_[^A-Z]*([A-Z]\w*?)_object_at_", self.name)
        function = re.match(r"kernel_cutlass_(\w+?)_tensor", self.name)
        found = method or function
        return found[1] if found else self.name

    @property
    def title(self) -> str:
        """The kernel's name in its source, and where that is."""
        source = next((instruction.source for instruction in self.instructions if instruction.source), "")
        return f"{self.source_name} ({source})" if source else self.source_name


class Module(NamedTuple):
    target: str
    entries: dict[str, Entry]


SIZES = {
    "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4,
    "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16,
}  # fmt: skip
_REGISTER_WIDTHS = {1: "b16", 2: "b16", 4: "b32", 8: "b64", 16: "b128"}


def parse(text: str) -> Module:
    """Parses a module. Raises PtxError for text that it cannot read."""
    text = _without_comments(text)
    target = re.search(r"^\s*\.target\s+(\w+)", text, re.M)
    if target is None:
        raise PtxError("this is not PTX: it has no .target directive")
    files = {int(number): name for number, name in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M)}
    newlines = [match.start() for match in re.finditer("\n", text)]
    entries = {}
    first_entry = re.search(r"\.entry\b", text)
    head = text[: first_entry.start()] if first_entry else text
    module_shared, constants = dict(_symbols("shared", head)), dict(_constants(head))
    for match in re.finditer(r"\.entry\s+([\w$]+)\s*\(", text):
        entry = _entry(text, match, module_shared, constants, files, newlines)
        entries[entry.name] = entry
    return Module(target[1], entries)


def _without_comments(text: str) -> str:
    """Replaces comments, keeping newlines so that line numbers stay right."""
    text = re.sub(r"/\*.*?\*/", lambda match: "\n" * match[0].count("\n"), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


_VARIABLE = r"\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?"


def _symbols(space: str, text: str) -> Iterator[tuple[str, Variable]]:
    """Yields (name, symbol) for each variable of a state space that the text declares."""
    for match in re.finditer(rf"\.{space}{_VARIABLE}", text):
        align, type_, name, count = match.groups()
        # without brackets: one element
        yield name, Variable(int(align or SIZES[type_]), SIZES[type_] * (int(count or 0) if "[" in match[0] else 1))


def _constants(text: str) -> Iterator[tuple[str, bytes]]:
    """Yields (name, bytes) for each initialized array of bytes in global memory, such as the text of a printf."""
    for name, size, values in re.findall(
        r"\.global\s+(?:\.align\s+\d+\s+)?\.b8\s+([\w$]+)\[(\d+)\]\s*=\s*\{([^}]*)\}", text
    ):
        yield name, bytes(int(value, 0) for value in values.split(",")).ljust(int(size), b"\0")


def _entry(
    text: str, match: re.Match, module_shared: dict, constants: dict, files: dict[int, str], newlines: list[int]
) -> Entry:
    """Parses one entry. match: its name; newlines: the positions of line ends, for line numbers."""
    end_of_parameters = text.index(")", match.end())
    parameters, parameter_bytes = _parameters(text[match.end() : end_of_parameters])
    begin = text.index("{", end_of_parameters)
    directives = {
        name: tuple(int(number) for number in re.findall(r"\d+", numbers))
        for name, numbers in re.findall(r"\.(\w+)((?:\s+\d+\s*,?)*)", text[end_of_parameters:begin])
    }
    body = _Body(text, begin + 1, files, newlines)
    body.shared.update(module_shared)
    body.parse()
    return Entry(
        match[1],
        parameters,
        parameter_bytes,
        body.registers,
        body.shared,
        body.local,
        constants,
        directives,
        body.instructions,
        body.labels,
    )


_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+(?:\.\w+\s+|\d+\s+)*)?([\w$]+)(?:\[(\d+)\])?$"
)


def _parameters(text: str) -> tuple[dict[str, Parameter], int]:
    """Returns ({name: parameter}, bytes of the parameter space)."""
    parameters, offset = {}, 0
    for declaration in filter(None, (part.strip() for part in text.split(","))):
        match = _PARAMETER.match(declaration)
        if match is None:
            raise PtxError(f"unknown form of a parameter: {declaration}")
        align, type_, name, count = match.groups()
        size = SIZES[type_] * int(count or 1)
        align = int(align or SIZES[type_])
        offset = -(-offset // align) * align
        parameters[name] = Parameter(offset, size)
        offset += size
    return parameters, offset


class _Body:
    """The statements between an entry's braces. Inline assembly opens scopes with registers and labels of their own."""

    _STATEMENT = re.compile(
        r"\s*(?:(?P<open>\{)|(?P<close>\})|\.loc\s+(?P<file>\d+)\s+(?P<line>\d+)[^\n]*"
        r"|(?P<label>[A-Za-z_$%][\w$]*)\s*:(?!:)|(?P<statement>[^;]+);)"
    )
    _NAME = re.compile(r"%?[A-Za-z_$][\w$]*")

    def __init__(self, text: str, position: int, files: dict[int, str], newlines: list[int]):
        self.text, self.position, self.files, self.newlines = text, position, files, newlines
        self.registers: dict[str, str] = {}
        self.vectors: dict[str, Vector] = {}  # variables of a vector type
        self.shared: dict[str, Variable] = {}
        self.local: dict[str, Variable] = {}
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.scopes: list[dict[str, str]] = [{}]  # innermost last: name as written -> name unique in the entry
        self.num_scopes = 0
        self.source = ""

    def parse(self) -> None:
        """Reads statements up to the brace that closes the entry."""
        while True:
            match = self._STATEMENT.match(self.text, self.position)
            if match is None:
                raise PtxError(f"cannot read the PTX at line {self._line(self.position)}")
            self.position = match.end()
            if match["open"]:
                self._open_scope()
            elif match["close"]:
                self.scopes.pop()
                if not self.scopes:
                    return
            elif match["file"]:
                name = self.files.get(int(match["file"]), "")
                if int(match["line"]):  # line 0: code that no source line made
                    self.source = f"{name}:{match['line']}" if name else ""
            elif match["label"]:
                self.labels[self._renamed(match["label"])] = len(self.instructions)
            else:
                self._statement(" ".join(match["statement"].split()), self._line(match.start("statement")))

    def _line(self, position: int) -> int:
        """The number of the line at a position, from 1."""
        return bisect.bisect_left(self.newlines, position) + 1

    def _open_scope(self) -> None:
        """Enters a scope, and gives its labels names that are unique in the entry."""
        self.num_scopes += 1
        scope: dict[str, str] = {}
        depth, end = 1, self.position
        while depth:
            depth += {"{": 1, "}": -1}.get(self.text[end], 0)
            end += 1
        for label in re.findall(r"(?:^|[\s;{}])([A-Za-z_$][\w$]*)\s*:(?!:)", self.text[self.position : end]):
            scope[label] = f"{label}.{self.num_scopes}"  # branches may come before their label
        self.scopes.append(scope)

    def _renamed(self, name: str) -> str:
        """The unique name of a register or label, by the innermost scope that declares it."""
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    def _statement(self, text: str, line: int) -> None:
        if text.startswith(".reg"):
            self._declare_registers(text)
        elif text.startswith(".shared"):
            self.shared.update(_symbols("shared", text))
        elif text.startswith((".local", ".param")):
            self.local.update(_symbols("local" if text.startswith(".local") else "param", text))
        elif text.startswith(".pragma"):
            pass  # hints for ptxas, such as "nounroll"
        elif text.startswith("."):
            raise PtxError(f"PTX line {line}: unknown directive: {text}")
        else:
            self.instructions.append(self._instruction(text, line))

    def _declare_registers(self, text: str) -> None:
        # "Limited-length vector types are supported": .v2 and .v4. Elements are named .x, .y, .z, .w or .r, .g, .b, .a.
        vector = re.match(r"\.reg\s+\.v([24])\s+", text)
        type_, names = text[vector.end() if vector else len(".reg") :].strip().removeprefix(".").split(None, 1)
        if type_ != "pred" and type_ not in SIZES:
            raise PtxError(f"unknown type of registers: {text}")
        width = "pred" if type_ == "pred" else _REGISTER_WIDTHS[SIZES[type_]]
        for name in (name.strip() for name in names.split(",")):
            counted = re.fullmatch(r"(%?[\w$]+)<(\d+)>", name)
            for written in [f"{counted[1]}{i}" for i in range(int(counted[2]))] if counted else [name]:
                unique = written if len(self.scopes) == 1 else f"{written}.{self.num_scopes}"
                self.scopes[-1][written] = unique
                if vector is None:
                    self.registers[unique] = width
                    continue
                elements = []
                for element in zip("xyzw", "rgba", range(int(vector[1])), strict=False):
                    elements.append(Register(f"{unique}.{element[0]}"))
                    self.registers[elements[-1].name] = width
                    self.scopes[-1].update({f"{written}.{letter}": elements[-1].name for letter in element[:2]})
                self.vectors[unique] = Vector(tuple(elements))

    def _instruction(self, text: str, line: int) -> Instruction:
        match = re.match(r"(?:@(!?)\s*(%?[\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", text)
        if match is None:
            raise PtxError(f"PTX line {line}: cannot read {text}")
        predicate = None
        if match[2]:
            predicate = self._operand(match[2])
            if not isinstance(predicate, Register):
                raise PtxError(f"PTX line {line}: {match[2]} is not a declared predicate: {text}")
        operands = tuple(self._operand(part) for part in _split(match[4]))
        return Instruction(predicate, bool(match[1]), match[3], operands, line, self.source, text)

    def _operand(self, text: str) -> Operand:
        if text.startswith(("{", "(")):  # parentheses: the results and the parameters of a call
            return Vector(tuple(self._operand(part) for part in _split(text[1:-1])))
        if text.startswith("["):
            return self._address(text[1:-1].strip())
        if text.startswith("!"):
            operand = self._operand(text[1:].strip())
            assert isinstance(operand, Register), text
            return Not(operand)
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._operand(first.strip()), self._operand(second.strip()))
        if text == "_":
            return Sink()
        if text[0].isdigit() or text[0] in "+-":
            return _immediate(text)
        name = self._renamed(text)
        if name in self.registers:
            return Register(name)
        if name in self.vectors:
            return self.vectors[name]
        if text.startswith("%"):
            return Special(text)
        base, plus, offset = text.partition("+")
        return Symbol(self._renamed(base.strip()), int(offset, 0) if plus else 0)

    def _address(self, text: str) -> Address:
        parts = _split(text)
        if len(parts) == 2:
            coordinates = self._operand(parts[1])
            assert isinstance(coordinates, Vector), text
            return Address(self._operand(parts[0]), 0, coordinates.items)
        base, plus, offset = text.partition("+")
        return Address(self._operand(base.strip()), int(offset.strip(), 0) if plus else 0)


def _split(text: str) -> list[str]:
    """Splits at commas that no bracket encloses."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character in "{[(":
            depth += 1
        elif character in "}])":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    if text[start:].strip():
        parts.append(text[start:].strip())
    return parts


def _immediate(text: str) -> Immediate:
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        return Immediate(int(text[2:], 16), "f32")
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        return Immediate(int(text[2:], 16), "f64")
    return Immediate(int(text.rstrip("U"), 0), "integer")
