"""What a run found, and which findings end it."""

from collections.abc import Iterable

from quackish.emulator.errors import Circumstances, Fault, Place
from quackish.emulator.rules import FAULT, RULES


class Findings:
    """Decides about each finding: it is raised, kept in `found`, or dropped."""

    def __init__(self, suppress: Iterable[tuple[str, str]] = (), all_races: bool = False):
        """suppress: (rule, "file.py:line" or "file.py") of findings to drop; all_races: keep them, and go on"""
        self.suppress, self.all_races = list(suppress), all_races
        self.found: list[Fault] = []
        self.launch: Circumstances | None = None  # the launch that runs
        self._seen: set[tuple] = set()
        for rule, _ in self.suppress:
            known = [name for name, rule in RULES.items() if rule.goes_on or rule.severity != FAULT]
            if rule not in known:
                raise ValueError(f"emulator.record: suppress has rule {rule!r}; expected one of {', '.join(known)}")

    def add(self, finding: Fault) -> None:
        """Raises the finding if it ends the run. Of those with the same rule and PTX lines, the first one is kept."""
        if any(rule == finding.rule and _is_at(place, finding) for rule, place in self.suppress):
            return
        if finding.severity == FAULT and not (self.all_races and RULES[finding.rule].goes_on):
            raise finding
        finding.launch = self.launch
        second = finding.second and finding.second.ptx_line
        key = finding.rule, self.launch and self.launch.kernel, finding.ptx_line, second
        if key not in self._seen:
            self._seen.add(key)
            self.found.append(finding)


def _is_at(place: str, finding: Fault) -> bool:
    """True if one of the finding's two instructions is at a place. Which of a race comes second depends on the seed."""
    return any(_matches(place, at) for at in (finding.place, finding.second) if at)


def _matches(place: str, at: Place) -> bool:
    file, colon, line = place.rpartition(":")
    if colon and line.isdigit():
        return at.line == int(line) and f"/{at.file}".endswith(f"/{file}")
    return f"/{at.file}".endswith(f"/{place}")
