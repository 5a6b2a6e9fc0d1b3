"""The errors of the emulator."""


class Fault(RuntimeError):
    """The emulated program did something that the PTX manual forbids."""


class ToolMissing(RuntimeError):
    """This machine lacks a program that the emulator needs."""


class PtxError(ValueError):
    """The PTX cannot be read, or has an instruction that the emulator does not know."""
