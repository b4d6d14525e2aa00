"""Other verbs that write files, killed at any call: a rerun is done and cleans up."""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from campaign import cases, draw, points
from faulty import SIGNAL_AFTER, SIGNAL_BEFORE, Bench, Fault, compiler
from helpers import make_folder, make_tree, tree

from shardkit import ShardkitError, describe, open_dataset, verify

pytestmark = pytest.mark.skipif(compiler() is None, reason="it needs Linux and gcc")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("crash-outputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder / "root/tmp"))
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        bench = Bench(folder)
        make_inputs(bench)
        yield bench
        bench.close()


def make_inputs(bench: Bench) -> None:
    """Make what stands in the bench's root before each run."""
    before = bench.folder / "before"
    make_tree(before, {"tmp": None})
    photos = make_folder(bench.folder / "photos", each=6)
    shutil.copy(photos / "cat/000.jpg", photos / "dog/twin.jpg")  # for report
    make_folder(bench.folder / "more", ["cow"])
    made = before / "made"
    restore(bench)
    run(bench, "convert", "imagefolder", photos, made, "--to", "webdataset", "--shard-samples", 4)
    paths = sorted(open_dataset(made).paths)
    rows = "".join(f"{path},text {number}\n" for number, path in enumerate(paths))
    (bench.folder / "table.csv").write_text(f"path,caption\n{rows}")
    run(bench, "split", made, "--val", 0.3, "--test", 0.2, "--out", before / "lists")
    run(bench, "export", made, bench.folder / "tars", "--layout", "webdataset")
    run(bench, "attach", bench.folder / "tars/data-{000000..000001}.tar", before / "old_index")
    (before / "report.html").write_text("made by shardkit report")
    (before / "exclude").mkdir()
    (before / "exclude/near-duplicate.txt").write_text("old\n")


def restore(bench: Bench) -> None:
    shutil.rmtree(bench.root)
    shutil.copytree(bench.folder / "before", bench.root)


def run(bench: Bench, *command: object) -> None:
    done = bench.run(*command)
    assert done.code == 0, done.story()


def one_division(root: Path) -> None:
    """Check that no row is in two lists."""
    lists = [set(path.read_text().splitlines()[1:]) for path in root.glob("lists/*.txt")]
    assert all(not one & other for one, other in itertools.combinations(lists, 2))


def one_report(root: Path) -> None:
    names = {path.name for path in (root / "exclude").glob("[!.]*")}
    assert not {"near-duplicate.txt", "exact-duplicate.txt"} <= names


def one_index(root: Path) -> None:
    """Check that an index is the old one or the new one, or that there is none yet."""
    assert describe(root / "old_index")[""]["rows"] in (8, 13)
    with contextlib.suppress(ShardkitError):
        assert describe(root / "index")[""]["rows"] == 13


def nothing(_: Path) -> None:
    pass


TARS = "IN/tars/data-{000000..000003}.tar"

COMMANDS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "split": ("split ROOT/made --val 0.5 --seed 7 --out ROOT/lists --force", one_division),
    "export": ("export ROOT/made ROOT/files", nothing),
    "csv": ("export ROOT/made ROOT/files --layout csv", nothing),
    "report": (
        "report ROOT/made -o ROOT/report.html --exclude ROOT/exclude --workers 1",
        one_report,
    ),
    "attach": (f"attach {TARS} ROOT/index --workers 1", one_index),
    "attach again": (f"attach {TARS} ROOT/old_index --workers 1", one_index),
    "receipt": (
        "verify ROOT/made --against IN/photos --write-receipt ROOT/receipt.json --workers 1",
        nothing,
    ),
    "append": ("append ROOT/made --from IN/more --workers 1", nothing),
    "fields": ("fields add ROOT/made --from IN/table.csv --field caption --workers 1", nothing),
}
"""The command of each verb, and a check after a kill."""


@pytest.mark.parametrize("verb", cases(COMMANDS, 4))
def test_a_killed_verb_is_done_by_a_rerun(bench: Bench, verb: str) -> None:
    command, check = COMMANDS[verb]
    places = {"ROOT": str(bench.root), "IN": str(bench.folder)}
    words = [re.sub("^(ROOT|IN)", lambda name: places[name[0]], word) for word in command.split()]
    restore(bench)
    first = bench.run(*words, fault=Fault(traced=True))
    assert first.code == 0, first.story()
    expected = without_times(bench.root)
    chosen = draw("outputs", verb)
    middle = chosen.sample(range(2, first.calls), min(points(4, 60), first.calls - 2))
    for at in sorted({*middle, first.calls - 1, first.calls}):
        restore(bench)
        fault = Fault(action=chosen.choice((SIGNAL_BEFORE, SIGNAL_AFTER)), at=at)
        killed = bench.run(*words, fault=fault)
        assert killed.killed, (fault, killed.story())
        check(bench.root)
        assert verify(bench.root / "made").ok, fault
        again = bench.run(*words)
        assert again.code == 0, (fault, again.story())
        assert without_times(bench.root) == expected, fault


def without_times(root: Path) -> dict[str, str]:
    """Return the files below a folder; of a receipt and a report, only that they are there.

    Python itself tries ``TMPDIR`` with a file of four bytes, whose name has eight letters.
    """
    return {
        name: "" if name in ("receipt.json", "report.html") else value
        for name, value in tree(root).items()
        if not re.fullmatch("tmp/[a-z0-9_]{8}", name) or (root / name).stat().st_size > 4
    }
