"""Any call that reads may fail: that is no damage, nothing is lost, and a rerun finishes."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from campaign import cases, draw, points
from faulty import FAIL, Bench, Fault, Outcome, compiler
from helpers import FORMATS, jpeg, make_folder, make_tree, tree
from oracle import WORK

pytestmark = pytest.mark.skipif(compiler() is None, reason="it needs Linux and gcc")

ERRORS = (errno.EIO, errno.EMFILE, errno.ESTALE, errno.EACCES)

FORBIDDEN = ("damaged", "--force", "Remove", "Traceback", "Plan again", "shardkit index")
"""What the report of a failed read must not contain."""

_OPTIONS = ("--shard-samples", "4", "--json")
_AT_ONCE = ("--workers", "1")


@dataclass(frozen=True)
class Step:
    """A command, and the commands that prepare what it works on. `{}` stands for the dataset."""

    name: str
    command: tuple[str, ...]
    before: tuple[tuple[str, ...], ...] = ()
    changes: bool = True
    """Whether it writes to the dataset."""


def _convert(to: str, *more: str) -> tuple[str, ...]:
    return ("convert", "imagefolder", "{sources}/photos", "{}", "--to", to, *_OPTIONS, *more)


def steps_of(to: str) -> list[Step]:
    """Return the commands to test with a format."""
    made = _convert(to, *_AT_ONCE)
    other = _convert(to, *_AT_ONCE, "--seed", "9")
    plan = _convert(to, "--plan-only")
    tasks = [("work", "{}", "--task", str(number)) for number in range(3)]
    return [
        Step("convert", made),
        Step("convert again", made, (made,)),
        Step("replace", (*made, "--force"), (other,)),
        Step("resume", made, (plan, *tasks[:2])),
        Step("plan", plan),
        Step("work", tasks[1], (plan, *tasks[:1])),
        Step("work again", tasks[1], (plan, *tasks)),
        Step("claim", ("work", "{}", "--claim"), (plan, *tasks[:1])),
        Step("commit", ("commit", "{}", "--json"), (plan, *tasks)),
        Step("append", ("append", "{}", "--from", "{sources}/more", "--json", *_AT_ONCE), (made,)),
        Step("verify", ("verify", "{}", *_AT_ONCE), (made,), changes=False),
        Step("quick", ("verify", "{}", "--level", "quick"), (made,), changes=False),
        Step("repair", ("repair", "{}", "--from", "{sources}/photos", *_AT_ONCE), (made,), False),
        Step("info", ("info", "{}"), (made,), changes=False),
        Step("load", ("load", "{}"), (made,), changes=False),
    ]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("reads"))
    make_folder(bench.folder / "sources/photos", each=6)
    more = {f"{name}/new.jpg": jpeg(30, 20, seed) for seed, name in enumerate(("cat", "dog"))}
    make_tree(bench.folder / "sources/more", more)
    yield bench
    bench.close()


class Run:
    """A step, undisturbed first and then with failing reads."""

    def __init__(self, bench: Bench, step: Step) -> None:
        self.bench, self.step = bench, step
        self.target = bench.root / "out"
        self._saved = bench.folder / "saved"
        shutil.rmtree(self._saved, ignore_errors=True)
        shutil.rmtree(bench.root)
        bench.root.mkdir()
        for command in step.before:
            outcome = self._do(command)
            assert outcome.code == 0, (command, outcome.story())
        shutil.copytree(bench.root, self._saved, symlinks=True)
        self.before = tree(self.target) if self.target.exists() else {}
        first = self._do(step.command, Fault(reads=True, traced=True))
        assert first.code == 0, (step, first.story())
        self.calls = first.calls
        self.kinds = dict(
            line.split("\t", 1) for line in bench.trace.read_text("utf-8").splitlines()
        )
        self.expected = self._there()

    def _do(self, command: tuple[str, ...], fault: Fault | None = None) -> Outcome:
        names = {"sources": str(self.bench.folder / "sources")}
        return self.bench.run(*(word.format(self.target, **names) for word in command), fault=fault)

    def _there(self) -> Mapping[str, str]:
        """Return what is below the root; claims, and their folders, may come and go."""
        there = tree(self.bench.root)
        return {name: value for name, value in there.items() if "/claims/" not in name}

    def fail(self, fault: Fault) -> list[str]:
        """Let reads fail; return all problems."""
        shutil.rmtree(self.bench.root)
        shutil.copytree(self._saved, self.bench.root, symlinks=True)
        outcome = self._do(self.step.command, fault)
        wrong = []
        kind = self.kinds.get(str(fault.at), "")
        usage = (
            "Invalid value for",
            os.strerror(errno.EACCES),
        )  # Click's checks; no right to write
        if outcome.code not in (0, 1) and not any(word in outcome.stderr for word in usage):
            wrong.append("the exit code is not 1")
        text = outcome.stderr + outcome.stdout * (outcome.code != 0)
        wrong += [f"it says {word!r}" for word in FORBIDDEN if word in text]
        if outcome.code == 1 and str(self.bench.root) not in text and "shard-" not in text:
            wrong.append("it names no file")
        there = self._there()
        published = self.expected.items() <= there.items()
        if outcome.code and not published and (lost := self._lost(there)):
            wrong.append(f"it removed {lost}")
        if not published or self.step.name != "commit":
            again = self._do(self.step.command)
            if again.code:
                wrong.append(f"the same command again fails: {again.story()}")
            elif self._there() != self.expected:
                wrong.append("after the same command again, the result differs")
        if wrong:
            wrong.append(f"{kind}: {outcome.story()} {outcome.stdout[-300:]}")
        return wrong

    def _lost(self, there: Mapping[str, str]) -> list[str]:
        """Return the finished shards, and the files of datasets, that are gone."""
        present = set(there.values())
        before = self.before
        return [
            name
            for name, content in before.items()
            if content not in present and (WORK not in name or Path(name).name.startswith("shard-"))
        ]


STEPS = {step.name: number for number, step in enumerate(steps_of(""))}


@pytest.mark.parametrize(("name", "to"), cases(itertools.product(STEPS, FORMATS), len(STEPS)))
def test_a_read_that_fails_is_not_damage(bench: Bench, name: str, to: str) -> None:
    run = Run(bench, steps_of(to)[STEPS[name]])
    chosen = draw(name, to)
    for _ in range(points(2, 120)):
        at, code = chosen.randint(1, run.calls), chosen.choice(ERRORS)
        wrong = run.fail(Fault(action=FAIL, at=at, code=code, reads=True))
        assert not wrong, (os.strerror(code), at, wrong)
