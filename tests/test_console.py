"""Progress where output is no terminal: plain lines, by a clock of the test's."""

import io
import threading

import pytest

from quackish.bench import console


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_lines_come_every_few_seconds():
    said, clock = [], Clock()
    lines = console.PlainLines(lambda: f"at {clock.now:.0f}", said.append, clock)
    for clock.now in (100, 104, 105, 107, 109.9, 110, 126):
        lines.tick()
    assert said == ["at 105", "at 110", "at 126"]
    lines.say("something else")
    clock.now += 4.9
    lines.tick()
    assert said[3:] == ["something else"]


def test_lines_come_while_the_caller_is_busy():
    shown = threading.Event()
    with console.PlainLines(lambda: "a line", lambda line: shown.set(), every_s=1e-3):
        assert shown.wait(60)


def output(is_terminal: bool, transient: bool = False) -> str:
    """What a bar writes that is at 3 of 12 after a minute, and at the end after two."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    clock, file = Clock(), io.StringIO()
    made = Console(file=file, force_terminal=is_terminal, width=40)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    options = dict(get_time=clock, transient=transient, auto_refresh=False, speed_estimate_period=600)
    with console.progress_class()(*columns, console=made, **options) as bar:
        task = bar.add_task("RMSNorm", total=12)
        bar.update(task, completed=1)
        clock.now += 60
        bar.update(task, completed=3, description="[3] backward 8192x4096 of bfloat16")
        if bar.lines:
            bar.lines.tick()
            bar.lines.tick()
        clock.now += 60
        bar.update(task, completed=12)
    return file.getvalue()


def test_a_file_gets_plain_lines_and_a_terminal_a_bar():
    pytest.importorskip("rich")
    first, last = output(is_terminal=False).splitlines()
    assert first.split() == "[3] backward 8192x4096 of bfloat16 3/12 0:04:30".split()
    assert last.split()[-2:] == ["12/12", "0:00:00"]
    assert output(is_terminal=False, transient=True).splitlines() == [first]
    assert "\x1b[" in output(is_terminal=True)
    assert "━" in output(is_terminal=True)
    assert isinstance(console.progress(), console.progress_class())
