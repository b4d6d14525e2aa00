"""Compare what two commits write, print and read: every file, message and batch.

    python scripts/compare_commits.py OLD [NEW] [--only PATTERN] [--show] [--keep FOLDER]

Runs the scenarios of scripts/comparing/scenarios.py with both commits, side by side. NEW is the
working tree by default. Prints a row for each scenario that differs; exits with 1 if there is one.
A hand-over (a plan, a work folder or a loader state of OLD that NEW continues) may instead be
refused, with one message and exit code 2. Both need the environment of this Python; OLD also
tests/support.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import fnmatch
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.comparing.scenarios import Scenario, scenarios  # noqa: E402

SIDE = Path(__file__).parent / "comparing" / "side.py"

Results = dict[str, dict[str, Any]]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", metavar="OLD", help="commit")
    parser.add_argument("new", metavar="NEW", nargs="?", help="commit [default: working tree]")
    parser.add_argument("--only", metavar="PATTERN", help="only these scenarios, such as 'jobs-*'")
    parser.add_argument("--show", action="store_true", help="show all differences of the output")
    parser.add_argument("--all", action="store_true", help="print equal scenarios, too")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="leave all files here")
    given = parser.parse_args(arguments)
    with contextlib.ExitStack() as stack:
        if given.keep:
            base = given.keep.resolve()
            base.mkdir()
        else:
            base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-")))
        trees = {"old": checkout(given.old, base / "old-tree")}
        trees["new"] = checkout(given.new, base / "new-tree") if given.new else ROOT
        make_inputs(trees["old"], base / "inputs")
        chosen = needed(list(scenarios()), given.only)
        old, new, handed = run_all(chosen, trees, base)
    rows = [row(name, old[name], new[name]) for name in old]
    rows += [row(f"{name} (handed over)", old[name], handed[name], handed=True) for name in handed]
    return print_table(rows, every=given.all, show=given.show)


def checkout(commit: str, tree: Path) -> Path:
    """Write the files of a commit to a folder, with its compiled module."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=-1, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(tree, filter="data")
    modules = list(ROOT.glob("shardkit/_native*.so"))
    if modules and _c_sources(tree) == _c_sources(ROOT):
        shutil.copy(modules[0], tree / "shardkit")
    else:
        hook = next(tree.glob("**/hatch_build.py"))
        code = (
            "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); "
            "from hatch_build import compile_to; compile_to(*map(Path, sys.argv[2:]))"
        )
        target = tree / "shardkit/_native.abi3.so"
        command = [sys.executable, "-c", code, str(hook.parent), str(target), str(hook.parent)]
        subprocess.run(command, check=True)
    return tree


def _c_sources(tree: Path) -> dict[str, bytes]:
    """Return the content of each file of the compiled module, wherever its folder is."""
    folder = next(tree.glob("**/hatch_build.py")).parent
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".c", ".h")
    }


def make_inputs(tree: Path, inputs: Path) -> None:
    inputs.mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{tree}:{tree}/tests/support"}
    script = SIDE.with_name("inputs.py")
    subprocess.run([sys.executable, script, tree, inputs], env=environment, check=True)


def needed(every: Sequence[Scenario], pattern: str | None) -> list[Scenario]:
    """Return the scenarios whose names match, and those that write what they read."""
    wanted = {each.name for each in every if fnmatch.fnmatch(each.name, pattern or "*")}
    for scenario in reversed(every):
        if scenario.name in wanted:
            words = " ".join(scenario.first + scenario.second).split()
            wanted |= {word.partition("/")[0] for word in words}
    return [scenario for scenario in every if scenario.name in wanted]


def run_all(
    chosen: Sequence[Scenario], trees: dict[str, Path], base: Path
) -> tuple[Results, Results, Results]:
    """Return the results of both commits, and those of the new one with the old one's files."""
    plain = [{"name": each.name, "steps": each.first + each.second} for each in chosen]
    first = [{"name": f"{each.name}-handed", "steps": each.first} for each in chosen if each.second]
    second = [
        {"name": each.name, "out": f"{each.name}-handed", "steps": each.second}
        for each in chosen
        if each.second
    ]
    with store("old", "new") as address, ThreadPoolExecutor() as pool:
        before = Side(trees["old"], base / "old", address, core=0)
        after = Side(trees["new"], base / "new", address, core=1)
        old = pool.submit(before.run, [*plain, *first], base / "old.jsonl")
        new = pool.submit(after.run, plain, base / "new.jsonl")
        old_results, new_results = old.result(), new.result()
        handed = before._replace(tree=trees["new"]).run(second, base / "handed.jsonl")
    return {each.name: old_results[each.name] for each in chosen}, new_results, handed


class Side(NamedTuple):
    """A commit, and where its commands run."""

    tree: Path
    folder: Path
    address: str
    """Of the S3 server; the bucket has the name of the folder."""
    core: int

    def run(self, work: Sequence[dict[str, Any]], record: Path) -> Results:
        """Run scenarios; return and record what each did, as one line of JSON."""
        for name in ("home", "tmp"):
            (self.folder / name).mkdir(exist_ok=True, parents=True)
        environment = {
            **{
                name: value for name, value in os.environ.items() if not name.startswith("SHARDKIT")
            },
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.address,
            "COLUMNS": "100",
            "HOME": str(self.folder / "home"),
            "XDG_STATE_HOME": str(self.folder / "home"),
            "OPENBLAS_NUM_THREADS": "1",  # a process with threads must not fork
            "PYTHONPATH": str(self.tree),
            "TMPDIR": str(self.folder / "tmp"),
        }
        command = [sys.executable, str(SIDE), str(self.tree), str(self.folder), str(self.core)]
        text = json.dumps(work).encode()
        with record.open("wb") as file:
            subprocess.run(command, input=text, stdout=file, env=environment, check=True)
        results = [json.loads(line) for line in record.read_text().splitlines()]
        return {result["name"]: result for result in results}


@contextlib.contextmanager
def store(*buckets: str) -> Iterator[str]:
    """Run an S3 server with some empty buckets; yield its address."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it prints each request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    try:
        for bucket in buckets:
            request = urllib.request.Request(f"{address}/{bucket}", method="PUT")
            urllib.request.urlopen(request, timeout=20).close()
        yield address
    finally:
        server.stop()


class Row(NamedTuple):
    """The comparison of a scenario."""

    name: str
    equal: int
    """Files that are equal."""
    different: int
    first: str
    """The first difference, or the message of a refusal; empty if there is none."""
    failed: bool
    diff: list[str]
    """Lines of the output that differ."""


def row(name: str, old: dict[str, Any], new: dict[str, Any], *, handed: bool = False) -> Row:
    """Compare the results of a scenario; of one handed over, only the steps after that."""
    steps = old["steps"][-len(new["steps"]) :] if handed else old["steps"]
    last = new["steps"][-1]
    errors = re.findall("(?m)^shardkit: error: .*", last["output"])
    if handed and last["exit"] == 2 and len(errors) == 1 and "Traceback" not in last["output"]:
        return Row(name, 0, 0, f"refused: {errors[0]}", failed=False, diff=[])
    files = sorted({*old["files"], *new["files"]})
    different = [path for path in files if old["files"].get(path) != new["files"].get(path)]
    before, after = (
        [line for step in each for line in lines(step)] for each in (steps, new["steps"])
    )
    diff = list(difflib.unified_diff(before, after, "old", "new", lineterm="", n=1))
    changed = [line for line in diff[2:] if line[0] in "+-"]
    first = [*(f"{path} {_how(path, old, new)}" for path in different), *changed]
    return Row(
        name,
        len(files) - len(different),
        len(different),
        first[0] if first else "",
        failed=bool(first),
        diff=diff,
    )


def lines(step: dict[str, Any]) -> list[str]:
    return [f"$ {step['step']}", *step["output"].splitlines(), f"exit {step['exit']}"]


def _how(path: str, old: dict[str, Any], new: dict[str, Any]) -> str:
    if path in old["files"] and path in new["files"]:
        return "differs"
    return "is missing" if path in old["files"] else "is new"


def print_table(rows: Sequence[Row], *, every: bool, show: bool) -> int:
    """Print the rows that differ, or all, and a sum; return the exit code."""
    print("| scenario | equal files | different | first difference |\n|---|--:|--:|---|")
    for each in rows:
        if each.failed or each.first or every:
            print(f"| {each.name} | {each.equal} | {each.different} | {each.first[:150]} |")
    if show:
        print(*("\n".join(["", each.name, *each.diff]) for each in rows if each.failed), sep="\n")
    failed = sum(each.failed for each in rows)
    files = sum(each.equal + each.different for each in rows)
    print(f"\n{len(rows) - failed} of {len(rows)} scenarios equal, with {files} files")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
