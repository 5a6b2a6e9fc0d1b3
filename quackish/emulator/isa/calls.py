"""Calls of functions, of which there is one: vprintf."""

import re

import numpy as np

from quackish.emulator.isa import action
from quackish.emulator.memory import CONSTANT_WINDOW, LOCAL_WINDOW

# A directive of printf: what Python's % takes, a length that C needs, and the conversion.
_DIRECTIVE = re.compile(r"%([-+ #0]*\d*(?:\.\d+)?)(hh|h|ll|l|z|)([diouxXcfFeEgGps%])")


@action("call.uni", "{u64*1}, symbol, {u64*2}")
def call(lanes, results, name, parameters):
    if name != "vprintf":
        raise NotImplementedError(f"a call of {name}; the emulator knows vprintf")
    local, threads = lanes.cta.local, lanes.threads
    texts, arguments = (local.load(threads, offsets, 8).view(np.uint64)[:, 0] for offsets in parameters)
    for thread, text, argument in zip(threads.tolist(), texts.tolist(), arguments.tolist(), strict=True):
        memory = local.bytes[thread, argument - LOCAL_WINDOW :] if argument else np.zeros(0, np.uint8)
        print(_formatted(_text(lanes, text), memory, lambda address: _text(lanes, address)), end="")


def _text(lanes, address):
    """The text at an address of an initialized variable."""
    place, offset = divmod(address - CONSTANT_WINDOW, 1 << 32)
    content = list(lanes.cta.grid.program.entry.constants.values())[place]
    return content[offset:].partition(b"\0")[0].decode(errors="replace")


def _formatted(text, memory, text_at):
    """printf's result. memory: its arguments, each of 4 or 8 bytes and aligned to its size."""
    position = 0

    def argument(match):
        nonlocal position
        flags, length, conversion = match.groups()
        if conversion == "%":
            return "%"
        size = 8 if conversion in "fFeEgGps" or length in ("l", "ll", "z") else 4
        position = -(-position // size) * size
        kind = "f" if conversion in "fFeEgG" else "i" if conversion in "dic" else "u"
        value = memory[position : position + size].view(f"{kind}{size}")[0].item()
        position += size
        if conversion == "p":
            return f"{value:#x}"
        return f"%{flags}{conversion}" % (text_at(value) if conversion == "s" else value)

    return _DIRECTIVE.sub(argument, text)
