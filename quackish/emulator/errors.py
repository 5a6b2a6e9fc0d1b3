"""The errors of the emulator."""


class Fault(RuntimeError):
    """The emulated program did something that the PTX manual forbids."""


class ToolMissing(RuntimeError):
    """This machine lacks a program that the emulator needs."""
