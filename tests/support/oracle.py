"""The crash oracle: disturb a conversion, check it, rerun it, and compare the result.

It knows the command line, what a dataset is, and the name of the folder that a conversion works in;
nothing of how it works there.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from campaign import cases, draw
from faulty import FAIL, NOTHING, SIGNAL_AFTER, SIGNAL_BEFORE, TEAR, Bench, Fault, Outcome
from helpers import jpeg, make_folder, make_tree, tree
from power import LOST_BYTES, LOST_NAMES, Cut, Disk, files_by_inode

from shardkit import verify
from shardkit.dataset.manifest import MANIFEST_NAME
from shardkit.errors import UsageError

WORK = ".shardkit-work"
TRASH = ".shardkit-trash"
HIDDEN = ".shardkit-*"
"""A folder next to the target that is to be exchanged with it."""

Tree = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A conversion to repeat."""

    name: str
    source: str
    options: tuple[str, ...]
    shards: int
    older: bool = False
    """Whether it replaces a dataset of other options, with ``--force``."""
    others: str = ""
    """Path of another file in the older dataset's folder."""
    to: str = ""
    target: str = "out"
    """Where the dataset goes; the folders above it are made on the way."""

    def of(self, to: str) -> Case:
        """Return the case for a format."""
        return replace(self, to=to)

    def __str__(self) -> str:
        return f"{self.to} {self.name}"


_FEW = ("--shard-samples", "4")

TOO_DEEP = "/".join("d" * 70) + "/notes.txt"
"""A file in so many folders that the dataset's folder is not exchanged."""

CASES = (
    Case(name="one folder", source="photos", options=_FEW, shards=3),
    Case(name="splits", source="splits", options=_FEW, shards=4),
    Case(name="resized", source="photos", options=(*_FEW, "--resize", "12"), shards=3),
    Case(name="bad files", source="spoilt", options=(*_FEW, "--on-error", "skip"), shards=3),
    Case(name="replaced", source="photos", options=(*_FEW, "--force"), shards=3, older=True),
    Case(name="deep", source="photos", options=_FEW, shards=3, target="new/folders/out"),
    Case(name="splits over", source="splits", options=(*_FEW, "--force"), shards=4, older=True),
    *(
        Case(
            name=name,
            source="photos",
            options=(*_FEW, "--force"),
            shards=3,
            older=True,
            others=others,
        )
        for name, others in (("other files", "more/notes.txt"), ("file by file", TOO_DEEP))
    ),
)


def make_sources(root: Path) -> None:
    """Create the source folders of the cases, unless they exist."""
    if root.exists():
        return
    make_folder(root / "photos", each=6)
    make_folder(root / "splits/train", each=4)
    make_folder(root / "splits/val", each=3)
    make_folder(root / "spoilt", each=5)
    spoilt = {"cat/bad.jpg": jpeg(20, 20)[:-40], "dog/none.png": b"", "dog/text.txt": b"text"}
    make_tree(root / "spoilt", spoilt)


class Oracles:
    """The oracles of the cases, created on request."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._made: dict[Case, Oracle] = {}

    def of(self, name: str, to: str) -> Oracle:
        """Return the oracle of a case for a format."""
        case = next(case for case in CASES if case.name == name).of(to)
        if case not in self._made:
            self._made[case] = Oracle(self.bench, case)
        return self._made[case]


class Oracle:
    """Runs a case undisturbed, then with faults."""

    def __init__(self, bench: Bench, case: Case) -> None:
        self.case = case
        self.bench = bench
        self.target = self.bench.root / case.target
        self._sources = bench.folder / "sources"
        self._before = bench.folder / "before" / str(case)
        """What stands in the target's place before each run."""
        make_sources(self._sources)
        self._before.mkdir(parents=True)
        self.prepare(self._before)
        if case.others:
            make_tree(self._before / "out", {case.others: b"not of the dataset"})
        self.older = tree(self._before / "out")
        self.reset()
        self.first = self.run(Fault(traced=True))
        """The undisturbed run."""
        assert self.first.code == 0, self.first.story()
        self.kinds = kinds_of(self.bench.trace)
        """Number of each call of the undisturbed run to what it did, as faults.c calls it."""
        self.commits = commits_of(self.bench.trace)
        """Numbers of the calls after which a manifest had its name: there it is dangerous."""
        self.expected = tree(self.target)

    def prepare(self, before: Path) -> None:
        """Create what stands in the target's place before each run."""
        if self.case.older:
            older = ["--to", "webdataset", "--shard-samples", "5", "--seed", "9"]
            source = self._sources / ("splits" if self.case.source == "photos" else "photos")
            self.make("convert", "imagefolder", source, before / "out", *older, "--no-splits")

    def make(self, *command: object) -> None:
        """Run a command that must succeed."""
        made = self.bench.run(*command)
        assert made.code == 0, made.story()

    @property
    def command(self) -> list[object]:
        """The command under test."""
        case = self.case
        source = self._sources / case.source
        given = ["--to", case.to, "--json", *case.options]
        if "--workers" not in given:
            given += ["--workers", "1"]
        return ["convert", "imagefolder", source, self.target, *given]

    def reset(self) -> None:
        """Restore the state before the first run."""
        shutil.rmtree(self.bench.root)
        shutil.copytree(self._before, self.bench.root)

    def run(self, fault: Fault | None = None, mistake: str | None = None) -> Outcome:
        """Run the command."""
        return self.bench.run(*self.command, fault=fault, mistake=mistake)

    def found(self) -> dict[str, str]:
        """Return the content of the target."""
        return tree(self.target) if self.target.exists() else {}

    def disturb(self, fault: Fault, mistake: str | None = None) -> Point:
        """Disturb a new run, and return all problems that it leaves."""
        self.reset()
        outcome = self.run(fault, mistake)
        point = Point(fault=fault, outcome=outcome)
        point.wrong += self.look(outcome)
        self.finish(point, mistake)
        return point

    def fail(self, fault: Fault) -> Point:
        """Let calls fail as in ``fault``, and return all problems that follow."""
        point = self.disturb(fault)
        point.wrong += complaints(fault, point.outcome, self.target)
        return point

    def look(self, outcome: Outcome | None = None) -> list[str]:
        """Return the problems of the target between a disturbed run and the next one."""
        wrong = []
        if outcome is not None:
            if "Traceback" in outcome.stderr:
                wrong.append(f"it ended with a traceback: {outcome.story()}")
            if outcome.code < 0 and outcome.code not in _ASKED_FOR:
                wrong.append(f"it crashed: {outcome.story()}")
        there = without_work(self.found())
        if self.case.older and self.case.others != TOO_DEEP and MANIFEST_NAME not in there:
            wrong.append("readers find no dataset")
        manifests = [name for name in there if Path(name).name == MANIFEST_NAME]
        if MANIFEST_NAME in there and there not in (self.older, self.expected):
            wrong.append(f"readers find neither the older nor the newer dataset: {[*there]}")
        for name in manifests:
            wrong += damaged_rows((self.target / name).parent)
        return wrong

    def finish(self, point: Point, mistake: str | None = None, *, exact: bool = True) -> None:
        """Rerun the command; add its problems to ``point``.

        Args:
            point: What was found so far.
            mistake: The mistake that the second run makes, too.
            exact: Whether all shards must be kept that stand whole on the disk.
        """
        done, written = self.finished_shards(), self.is_published()
        again = self.run(mistake=mistake)
        if again.code != 0:
            point.wrong.append(f"the same command again fails: {again.story()}")
        elif again.code == 0:
            point.kept = again.json().get("reused_shards", done)
            # A shard counts once its part of the index stands beside it; until then it is redone.
            if not written and not (done - 1 if exact else 0) <= point.kept <= done:
                point.wrong.append(f"{point.kept} shards were kept, {done} were done")
        if differences := different(self.expected, self.found()):
            point.wrong.append(f"after the same command again: {differences}")
        if others := self._others():
            point.wrong.append(f"files stand beside the target: {others}")

    def _others(self) -> list[str]:
        above = {self.target, *self.target.parents}
        found = [path for path in self.bench.root.rglob("*") if path not in above]
        return [str(path) for path in found if self.target not in path.parents]

    def finished_shards(self) -> int:
        """Return the number of complete shards: published, in work, or about to be exchanged."""
        sums = [
            value
            for name, value in self.expected.items()
            if Path(name).name.startswith("shard-") and value != "folder"
        ]
        siblings = self.target.parent.glob(HIDDEN) if self.target.parent.exists() else ()
        there = [
            value
            for found in (self.found(), *map(tree, siblings))
            for name, value in found.items()
            if Path(name).name.startswith("shard-") and value != "folder"
        ]
        return sum(value in there for value in sums)

    def is_published(self) -> bool:
        """Whether readers see the new dataset."""
        return (self.target / MANIFEST_NAME).exists() and (
            without_work(tree(self.target)) == self.expected
        )


NAMES = tuple(case.name for case in CASES)


@dataclass(kw_only=True)
class Point:
    """The findings after one fault."""

    fault: Fault
    outcome: Outcome
    cut: Cut | None = None
    """What the disk lost, if the power was cut."""
    kept: int = 0
    """Shards that the next run kept."""
    wrong: list[str] = field(default_factory=list)


_ASKED_FOR = {-signal.SIGKILL, -signal.SIGHUP}


_WORDS = {errno.ENOSPC: "full", errno.EDQUOT: "full", errno.EIO: os.strerror(errno.EIO)}
"""What a message must say of an error."""


def complaints(fault: Fault, outcome: Outcome, target: Path) -> list[str]:
    """Return the problems with the command line's report of a disk error."""
    if outcome.code == 0:  # it could do without, as at the end, when it clears up
        return []
    wrong = []
    if outcome.code != 1:
        wrong.append(f"the exit code is not 1: {outcome.story()}")
    if outcome.stderr.count("\n") != 1 or not outcome.stderr.startswith("shardkit: error: "):
        wrong.append(f"the error is not told in one line: {outcome.story()}")
    words = [_WORDS[fault.code]]
    if ".lmdb" in outcome.stderr and fault.times == 1:
        words.append(_WORDS[errno.EIO])  # LMDB calls all errors so; afterwards nothing is wrong
    if str(target) not in outcome.stderr or not any(word in outcome.stderr for word in words):
        wrong.append(f"the error does not say what and where: {outcome.story()}")
    return wrong


def damaged_rows(directory: Path) -> list[str]:
    """Return the findings of `verify` in a dataset that readers can open."""
    try:
        found = verify(directory)
    except UsageError as error:
        return [f"{directory} cannot be opened: {error}"]
    return [f"{finding.file}: {finding.reason}" for finding in found.findings]


def without_work(there: Tree) -> dict[str, str]:
    """Return a tree without the work folder."""
    return {name: value for name, value in there.items() if name.split("/")[0] not in (WORK, TRASH)}


def different(expected: Tree, found: Tree) -> str:
    """Return how two trees differ, or ""."""
    parts = {
        "lacking": sorted(expected.keys() - found.keys()),
        "too much": sorted(found.keys() - expected.keys()),
        "other": sorted(n for n in expected.keys() & found.keys() if expected[n] != found[n]),
    }
    return "; ".join(f"{word}: {', '.join(names)}" for word, names in parts.items() if names)


def kinds_of(trace: Path) -> dict[int, str]:
    """Return the operation of each call of a traced run, by its number."""
    lines = (line.split("\t") for line in trace.read_text("utf-8").splitlines())
    return {int(number): kind for number, kind, *_ in lines}


def commits_of(trace: Path) -> list[int]:
    """Return the calls of a traced run that gave a manifest its name, or exchanged two folders."""
    lines = (line.split("\t") for line in trace.read_text("utf-8").splitlines())
    return [
        int(call)
        for call, kind, _, *rest in lines
        if kind == "exchange" or (kind == "enter" and MANIFEST_NAME in rest)
    ]


def kill_points(oracle: Oracle, count: int) -> Iterator[Fault]:
    """Give the first and last calls, and ``count`` others, each with a way to be killed there.

    Among the others are those around the last time that a manifest got its name: the commit.
    """
    chosen = draw(oracle.case)
    total = oracle.first.calls
    middle = chosen.sample(range(2, total), min(count, total - 2))
    if count > 4:
        middle[:4] = range(oracle.commits[-1] - 1, oracle.commits[-1] + 3)
    for at in sorted({1, *middle, total}):
        torn = oracle.kinds.get(at) == "write" and chosen.random() < 0.6
        action = TEAR if torn else chosen.choice((SIGNAL_BEFORE, SIGNAL_AFTER))
        yield Fault(action=action, at=at)


def error_points(oracle: Oracle, codes: Sequence[int], count: int, times: int) -> Iterator[Fault]:
    """Give ``count`` calls that fail ``times`` times with one of the errors."""
    chosen = draw(oracle.case, *codes, times)
    total = oracle.first.calls
    for number, at in enumerate(sorted(chosen.sample(range(1, total + 1), min(count, total)))):
        yield Fault(action=FAIL, at=at, times=times, code=codes[number % len(codes)])


def cut_power(oracle: Oracle, at: int, cut: Cut) -> Point:
    """Cut the power at a call, 0 for the end; return all that is wrong with what comes of it."""
    oracle.reset()
    root = oracle.bench.root
    disk = Disk.of(root)
    fault = Fault(action=SIGNAL_BEFORE if at else NOTHING, at=at, traced=True)
    point = Point(fault=fault, outcome=oracle.run(fault), cut=cut)
    disk.replay(oracle.bench.trace, cut.deaf)
    lost = root.with_name("lost")
    root.rename(lost)
    disk.leave(cut, files_by_inode(lost, oracle.bench.keep), root)
    shutil.rmtree(lost)
    point.wrong += oracle.look(point.outcome)
    if point.outcome.code == 0 and not oracle.is_published():
        point.wrong.append("a conversion that had succeeded was lost")
    oracle.finish(point, exact=False)
    return point


def power_cuts(oracle: Oracle, count: int) -> Iterator[tuple[int, Cut]]:
    """Give ``count`` calls, and what the disk then loses; and ways of it at the end."""
    chosen = draw(oracle.case, "power")
    ways = [(data, names) for data in LOST_BYTES for names in LOST_NAMES]
    for number, (data, names) in enumerate(cases(ways, 3)):
        yield 0, Cut(data=data, names=names, seed=number)
    near = [commit + after for commit in oracle.commits[-2:] for after in (1, 2)]
    for number in range(count):
        data, names = ways[number % len(ways)]
        at = chosen.randint(1, oracle.first.calls)
        if number % 2:
            at, names = min(chosen.choice(near), oracle.first.calls), "some"
        yield at, Cut(data=data, names=names, seed=chosen.randrange(1 << 30))
