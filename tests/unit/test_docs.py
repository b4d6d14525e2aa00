"""Documentation: commands, code blocks, examples and links work; the reference is up to date."""

from __future__ import annotations

import inspect
import os
import random
import re
import runpy
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

import pytest
from forked import run_forked, run_script, run_shardkit
from helpers import FORMATS, encoded, invoke, make_tree, picture
from table import for_each

import shardkit

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]
PAGES_SEED = os.environ.get("SHARDKIT_CAMPAIGN_SEED") or f"{datetime.now(UTC):%Y%m%d}"
"""What the order depends on in which pages are followed: the date."""

EXAMPLES = {"lmdb": "read_lmdb.py", "hdf5": "read_hdf5.py", "webdataset": "read_webdataset.py"}

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n+)?^```(?P<kind>\w*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
_RUN_KINDS = ("python", "console", "bash", "sh")


class Block(NamedTuple):
    """One fenced block of a page."""

    kind: str
    body: str
    mark: str
    """The HTML comment just before the block, or an empty string."""


def blocks_of(page: Path) -> list[Block]:
    found = _BLOCK.finditer(page.read_text("utf-8"))
    return [Block(match["kind"], match["body"], match["mark"] or "") for match in found]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with sample_data, as a reader of the documentation has."""
    shutil.copytree(ROOT / "sample_data", tmp_path / "sample_data")
    return tmp_path


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which somebody follows all pages, in a random order."""
    folder = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "sample_data", folder / "sample_data")
    sys.stdout.write(f"order of the pages: SHARDKIT_CAMPAIGN_SEED={PAGES_SEED}\n")
    return folder


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which ``shardkit`` and ``python`` are the ones under test."""
    folder = tmp_path_factory.mktemp("bin")
    for name, command in (("shardkit", " -m shardkit"), ("python", "")):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}"{command} "$@"\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    path = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
    own = {"PATH": path, "COLUMNS": "100"}
    own |= {f"XDG_{kind}_HOME": str(folder / kind) for kind in ("STATE", "CACHE")}
    return {**os.environ, **own}


def _in_random_order(pages: Iterable[Path]) -> list[Path]:
    run = [page for page in pages if any(block.kind in _RUN_KINDS for block in blocks_of(page))]
    return random.Random(PAGES_SEED).sample(run, len(run))


@pytest.mark.slow
@pytest.mark.parametrize("page", _in_random_order(PAGES), ids=lambda page: page.name)
def test_pages_run_in_any_order_in_one_folder(
    page: Path, reader: Path, environment: dict[str, str], request: pytest.FixtureRequest
) -> None:
    """Each code block runs, or is excused; each page makes its own files."""
    if page.name in ("clusters.md", "stores.md"):
        environment = {**environment, **request.getfixturevalue("bucket").environment}
    for block in blocks_of(page):
        if block.kind not in _RUN_KINDS or block.mark.startswith("not run: "):
            continue
        if block.kind == "python":
            script = reader / "block.py"
            script.write_text(block.body, "utf-8")
            done = run_forked(run_script, [script], environment, reader, merged=True)
            assert done.returncode == 0, f"{block.body}\n{done.stdout}"
            script.unlink()
        else:
            run_console(block, reader, environment)


@pytest.mark.slow
def test_the_quickstart_works_on_any_photographs(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """Smaller than the target, of other modes and shapes, and in another number of classes."""
    images = [picture(*size, mode=mode) for mode in ("RGB", "L", "CMYK") for size in SIZES]
    files = {f"{'abc'[n % 3]}/{n}.jpg": encoded(image) for n, image in enumerate(images)}
    clear = {"a/clear.png": encoded(picture(90, 50, mode="RGBA"), "PNG")}
    make_tree(tmp_path / "sample_data", {**files, **clear})
    blocks = blocks_of(ROOT / "README.md")
    (convert, _), *_ = next(found for block in blocks if (found := quickstart_commands(block)))
    (training,) = (block.body for block in blocks if block.kind == "python")
    done = run(convert, tmp_path, environment)
    assert done.returncode == 0, done.stdout
    (tmp_path / "block.py").write_text(training, "utf-8")
    done = run_forked(run_script, [tmp_path / "block.py"], environment, tmp_path, merged=True)
    assert done.returncode == 0, done.stdout


SIZES = [(1, 1), (30, 200), (200, 30), (63, 64), (65, 64), (64, 64), (300, 200)]


def quickstart_commands(block: Block) -> list[tuple[str, str]]:
    is_conversion = block.kind == "console" and "$ shardkit convert" in block.body
    return commands_of(block.body) if is_conversion else []


def run_console(block: Block, place: Path, environment: dict[str, str]) -> None:
    """Run each command of a block, and compare its output with the page."""
    expected = re.fullmatch(r"exits with (\d)", block.mark)
    code = int(expected[1]) if expected else 0
    assert block.mark == "" or expected, f"unknown mark {block.mark!r}"
    for command, shown in commands_of(block.body):
        done = run(command, place, environment)
        assert done.returncode == code, f"$ {command}\n{done.stdout}"
        if shown:
            assert shows(shown, done.stdout), (
                f"$ {command}\nprints\n{done.stdout}\nthe page shows\n{shown}"
            )


def run(command: str, place: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command: plain ones of shardkit in a fork, which has imported torch; others in bash."""
    command = command.replace("\\\n", " ")
    unquoted = re.sub(r"'[^']*'|\"[^\"]*\"", "", command)
    if command.startswith("shardkit ") and not re.search(
        r"[|&;<>$*?{~`]", unquoted.partition(" #")[0]
    ):
        return run_forked(
            run_shardkit, shlex.split(command, comments=True), environment, place, merged=True
        )
    return subprocess.run(
        ["bash", "-c", command],
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        check=False,
    )


def commands_of(body: str) -> list[tuple[str, str]]:
    """Return each command of a console block with the output shown below it."""
    parts = re.split(r"^\$ ", body, flags=re.MULTILINE)
    assert not parts[0].strip(), f"a console block begins with `$ `: {parts[0]!r}"
    found = []
    for part in parts[1:]:
        lines = part.splitlines()
        last = next(number for number, line in enumerate(lines) if not line.endswith("\\"))
        found.append(("\n".join(lines[: last + 1]), "\n".join(lines[last + 1 :])))
    return found


def shows(shown: str, printed: str) -> bool:
    """Return whether ``shown`` equals the output; numbers and ``...`` match anything."""
    pattern = re.escape(masked(shown)).replace(re.escape("..."), ".*")
    return re.fullmatch(pattern, masked(printed), re.DOTALL) is not None


def masked(text: str) -> str:
    lines = [line.rstrip() for line in text.strip().splitlines()]
    text = re.sub(r"\b[0-9a-f]{64}\b", "#", "\n".join(lines))
    return re.sub(r"\b[0-9](?:[0-9.,]*[0-9])?\b", "#", text)


def test_the_comparison_of_output_detects_differences() -> None:
    assert shows("a 1.5 s\n...\nend", "a 22,000 s\nx\ny\nend\n")
    assert not shows("a 1.5 s\nend", "a 1.5 s\nx\nend\n")
    assert not shows("class a", "class b")


def test_tests_named_in_the_reliability_page_exist() -> None:
    """A promise without its test is not checked."""
    text = (DOCS / "reliability.md").read_text("utf-8")
    named = set(re.findall(r"`((?:tests|scripts|shardkit)/[\w./]+)`", text))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    assert "@@" not in text


def test_modules_named_in_the_architecture_exist() -> None:
    text = (DOCS / "architecture.md").read_text("utf-8")
    named = set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", text))
    assert len(named) > 20
    places = (ROOT, ROOT / "shardkit")
    assert [name for name in sorted(named) if not any((at / name).exists() for at in places)] == []


def test_pages_have_executed_blocks() -> None:
    run_ones = [
        block
        for page in PAGES
        for block in blocks_of(page)
        if block.kind in _RUN_KINDS and not block.mark.startswith("not run: ")
    ]
    assert {block.kind for block in run_ones} >= {"python", "console"}
    fences = sum(len(re.findall(r"^```", page.read_text("utf-8"), re.MULTILINE)) for page in PAGES)
    assert fences == 2 * sum(len(blocks_of(page)) for page in PAGES), "a fence is not closed"


_FOLDERS = {
    "encoded": ("sample_data", "--shard-samples", "40"),
    "raw": ("sample_data", "--resize", "24x32", "--encode", "raw"),
    "unlabelled": ("sample_data/star",),
}


@pytest.mark.parametrize("kind", sorted(_FOLDERS))
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_an_example_prints_what_shardkit_reads(
    name: str,
    kind: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    source, *options = _FOLDERS[kind]
    words = ["convert", "imagefolder", source, "made", "--to", name, "--workers", "1", *options]
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    monkeypatch.setattr(sys, "argv", ["example", "made"])
    runpy.run_path(str(DOCS / "examples" / EXAMPLES[name]))
    assert capsys.readouterr().out.splitlines() == expected_lines(place / "made")


def expected_lines(directory: Path) -> list[str]:
    """Return what an example prints: key, label and size of the first three rows of each shard."""
    dataset = shardkit.open_dataset(directory)
    lines, start = [], 0
    for shard in dataset.manifest.shards:
        for row in range(start, start + min(3, shard.rows)):
            image, label = dataset[row]
            name = dataset.classes[label] if dataset.classes else None
            lines.append(f"{dataset.keys[row]} {name} {image.size}")
        start += shard.rows
    return lines


def test_every_format_has_an_example() -> None:
    assert set(FORMATS) == set(EXAMPLES)
    assert {path.name for path in (DOCS / "examples").glob("read_*.py")} == set(EXAMPLES.values())


def test_the_example_of_the_order_computes_that_of_shardkit() -> None:
    runpy.run_path(str(DOCS / "examples" / "order.py"))


@for_each("page", PAGES)
def test_links_between_files_are_valid(page: Path) -> None:
    for link in _LINK.findall(page.read_text("utf-8")):
        name, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = page if not name else page.parent / name
        assert target.exists(), f"{page.name} links to {link}, which does not exist"
        if anchor:
            assert anchor in anchors_of(target), f"{page.name} links to {link}: no such heading"


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.strip().replace(" ", "-") for heading in plain}


def test_names_can_be_imported_as_the_pages_say() -> None:
    entries = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text("utf-8"), re.MULTILINE)
    public = {f"shardkit.{name}" for name in {*shardkit.__all__, "ShardDataModule"}}
    assert public - {*entries} == {"shardkit.__version__"}
    names = {*entries}
    for page in PAGES:
        names |= set(re.findall(r"`(shardkit(?:\.\w+)+)`", page.read_text("utf-8")))
    for name in names - {"shardkit.json"}:  # a file
        resolve_name(name)


def test_each_public_name_has_a_docstring() -> None:
    for name in shardkit.__all__:
        thing = getattr(shardkit, name)
        if name == "__version__":
            continue
        assert inspect.getdoc(thing), f"{name} has no docstring"
        own = vars(thing).items() if inspect.isclass(thing) else ()
        for member, value in own:
            if not member.startswith("_") and (
                inspect.isfunction(value) or type(value) is property
            ):
                assert inspect.getdoc(value), f"{name}.{member} has no docstring"


def test_the_changelog_has_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"## [{shardkit.__version__}]" in changelog


def test_the_citation_has_the_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {shardkit.__version__}\n" in citation
