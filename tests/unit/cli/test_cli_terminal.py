"""Names in files cannot control a terminal, and closed streams do not affect the work.

Click removes escape sequences where the output is no terminal, so these tests have one.
"""

from __future__ import annotations

import copy
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import DEADLINE, make_folder, make_tree, run_main, shardkit_command
from hostile.forging import forge, with_meta
from manifests import sealed
from repairing import flip

from shardkit import convert

EVIL = "\x1b]0;owned\x07\x9b31m\u202e\udcff\r\nFAKE\x08"
"""A title, a color, another direction, a byte that is no text, a line of its own, a deletion."""

KEY = EVIL.replace("\udcff", "")  # a key is text

ALLOWED = re.compile(rb"\x1b\[A|\r|\n")
"""What progress bars and lines consist of."""

ALONE = ("--workers", 1)

MANY = """
import json, runpy, sys
for arguments in json.loads(open(sys.argv[1]).read()):
    sys.argv[1:] = arguments
    try:
        runpy.run_module("shardkit", run_name="__main__")
    except SystemExit as end:
        print("code", end.code, flush=True)
"""


def on_terminal(command: Sequence[str], **options: Any) -> bytes:
    """Return the output of a command that runs on a terminal."""
    mine, other = pty.openpty()
    with subprocess.Popen(command, stdin=other, stdout=other, stderr=other, **options) as process:
        os.close(other)
        shown, end = b"", time.monotonic() + DEADLINE
        while time.monotonic() < end:
            try:
                part = os.read(mine, 1 << 16)
            except OSError:  # nobody has the other end anymore
                break
            shown += part
        os.close(mine)
        assert process.wait(DEADLINE) == 0, shown[-3000:].decode(errors="backslashreplace")
    return shown


def show(tmp_path: Path, commands: Sequence[Sequence[object]]) -> str:
    """Run commands on one terminal; check and return all output."""
    (tmp_path / "commands").write_text(json.dumps([[str(a) for a in each] for each in commands]))
    shown = on_terminal([sys.executable, "-c", MANY, str(tmp_path / "commands")])
    text = ALLOWED.sub(b"", shown).decode()
    assert [each for each in text if not each.isprintable()] == []
    assert not re.search(rb"[\r\n]FAKE", shown)
    assert b"Traceback" not in shown
    assert shown.count(b"code") >= len(commands)
    return shown.decode()


def texts(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the position of each string in JSON; names of entries count too."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield (*path, name, None)
            yield from texts(each, (*path, name))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from texts(each, (*path, number))
    elif isinstance(value, str):
        yield path


def planted(value: Any, path: tuple[Any, ...]) -> Any:
    """Return a copy of JSON with `EVIL` at the end of one text."""
    value = inner = copy.deepcopy(value)
    name = path[-2] if path[-1] is None else path[-1]
    for each in path[: -2 if path[-1] is None else -1]:
        inner = inner[each]
    if path[-1] is None:
        inner[name + EVIL] = inner.pop(name)
    else:
        inner[name] += EVIL
    return value


@pytest.fixture
def place(folder: Path, tmp_path: Path) -> Path:
    make_tree(folder, {"cat/bad.jpg": b"x", "cat/list.txt": b"x"})
    convert(folder, tmp_path / "made", to="lmdb", shard_samples=4, on_error="skip", workers=1)
    return tmp_path / "made"


@pytest.mark.slow
def test_texts_of_a_manifest_are_escaped(place: Path, folder: Path, tmp_path: Path) -> None:
    value = json.loads((place / "shardkit.json").read_bytes())
    paths = [path for path in texts(value) if path[0] != "digest"]
    commands = []
    for number, path in enumerate(paths[::3]):
        copied = shutil.copytree(place, tmp_path / f"copy {number}")
        (copied / "shardkit.json").write_bytes(sealed(planted(value, path)))
        commands += [["info", copied], ["verify", copied, *ALONE], ["index", copied]]
        commands += [["repair", copied, "--from", folder, *ALONE]]
    shown = show(tmp_path, commands)
    assert len(paths) > 30
    assert shown.count("owned") > 10


@pytest.mark.slow
def test_texts_of_a_receipt_are_escaped(place: Path, folder: Path, tmp_path: Path) -> None:
    how = ("--against", folder, "--write-receipt", tmp_path / "receipt")
    assert run_main("verify", place, *how, *ALONE).returncode == 0
    value = json.loads((tmp_path / "receipt").read_bytes())
    commands = []
    for number, path in enumerate(texts(value)):
        forged = tmp_path / f"receipt {number}"
        forged.write_bytes(sealed(planted(value, path)))
        commands.append(["verify", place, "--check-receipt", forged, *ALONE])
    assert "owned" in show(tmp_path, commands)


@pytest.mark.slow
def test_keys_and_paths_of_records_are_escaped(place: Path, folder: Path, tmp_path: Path) -> None:
    def change(records: list[Any]) -> list[Any]:
        return [
            with_meta(replace(record, key=f"{record.key}{KEY}"), path=f"{number}{EVIL}")
            for number, record in enumerate(records)
        ]

    forge(place, change)
    flip(place / "shard-000000.lmdb")
    commands: list[list[object]] = [
        ["verify", place, *how, *ALONE] for how in (["--level", "decode"], ["--against", folder])
    ]
    commands += [["repair", place, "--from", folder, *ALONE], ["index", place], ["info", place]]
    assert "owned" in show(tmp_path, commands)


@pytest.mark.slow
def test_names_in_a_source_are_escaped(tmp_path: Path) -> None:
    name = f"n{EVIL}"
    source = tmp_path / f"photos{name}"
    make_folder(source, ["cat", name])
    make_tree(source, {f"{name}/{name}.jpg": b"bad", f"cat/{name}.txt": b"x", f".{name}": b"x"})
    made, photos = tmp_path / f"made{name}", str(source)
    how = ["convert", "imagefolder", photos, made, "--to", "lmdb", *ALONE]
    commands = [[*how, "--dry-run"], how, [*how, "--on-error", "skip"], ["info", made]]
    commands += [["verify", made, "--against", photos, *ALONE], ["verify", f"{made}{name}"]]
    commands += [
        ["repair", made, "--from", photos, *ALONE],
        ["index", made],
        [name],
        ["info", f"--{name}"],
    ]
    commands += [["convert", name, "out"], [*how, "--class-order", name], [*how, "--resize", name]]
    bench = ["--rounds", "1", "--seconds", "0.1", "--cache", "warm", "--loader", "plain"]
    commands += [["bench", made, photos, *bench], ["bench", name], ["doctor", name], ["tune", name]]
    assert show(tmp_path, commands).count("owned") >= len(commands) - 2


def test_json_is_exact_on_a_terminal(place: Path) -> None:
    value = json.loads((place / "shardkit.json").read_bytes())
    value["software"][EVIL] = EVIL
    (place / "shardkit.json").write_bytes(sealed(value))
    shown = on_terminal(shardkit_command("info", place, "--json"))
    assert json.loads(shown)["datasets"][""]["software"][EVIL] == EVIL
    assert shown.isascii()
    assert b"\x1b" not in shown


def test_progress_fits_a_narrow_terminal(place: Path) -> None:
    narrow = ["sh", "-c", 'stty rows 9 cols 40; exec "$@"', "sh"]
    shown = on_terminal([*narrow, *shardkit_command("verify", place)]).decode()
    states = [line for line in re.split(r"[\r\n]", shown) if line.startswith("verifying")]
    assert any("0/? ? left" in line for line in states)
    assert max(map(len, states)) <= 40


def test_a_warning_is_one_line_and_a_long_text_is_shortened() -> None:
    code = f"""
import runpy, sys, warnings
sys.argv[1:] = ["--version"]
try:
    runpy.run_module("shardkit", run_name="__main__")
except SystemExit:
    pass
warnings.warn({EVIL!r})
warnings.warn("begin" + "x" * (1 << 22) + "end")
"""
    _, first, second, end = on_terminal([sys.executable, "-c", code]).split(b"\n")
    assert first.startswith(b"shardkit: warning: \\x1b]0;owned")
    assert second.startswith(b"shardkit: warning: begin")
    assert len(second) < 30_000
    assert second.endswith(b"end\r")
    assert end == b""


# --- streams that are closed ---


CLOSED = ((1,), (0, 1, 2))


def code_without(numbers: Sequence[int], *arguments: object) -> int:
    """Return the exit code of a command started without these standard streams."""
    closing = " ".join(f"{number}>&-" for number in numbers)
    return subprocess.run(
        ["/bin/sh", "-c", f'"$@" {closing}', "sh", *shardkit_command(*arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=DEADLINE,
        check=False,
    ).returncode


@pytest.mark.parametrize("numbers", CLOSED, ids=str)
@pytest.mark.slow
def test_closed_streams_do_not_change_the_exit_code(
    folder: Path, tmp_path: Path, numbers: Sequence[int]
) -> None:
    made = tmp_path / "made"
    how = ("convert", "imagefolder", folder, made, "--to", "webdataset", "--workers", 2)
    assert code_without(numbers, *how) == 0
    assert code_without(numbers, "verify", made) == 0
    flip(made / "shard-000000.tar")
    assert code_without(numbers, "verify", made) == 1


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.slow
def test_a_closed_pipe_does_not_change_the_exit_code(
    folder: Path, tmp_path: Path, as_json: bool
) -> None:
    made = tmp_path / "made"
    convert(folder, made, to="lmdb", workers=1)
    for code in (0, 1):
        command = shardkit_command("verify", made, *["--json"] * as_json)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout
            assert process.stderr
            process.stdout.close()
            said = process.stderr.read().decode()
            assert process.wait(DEADLINE) == code, said
        assert "Traceback" not in said
        assert "Exception ignored" not in said
        flip(made / "shard-000000.lmdb")
