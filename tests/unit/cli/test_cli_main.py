from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import click
import pytest
from helpers import invoke, make_folder, python, run, shardkit_command

import shardkit
from shardkit.cli import main as module
from shardkit.cli.main import cli, main
from shardkit.cli.show import amount, some
from shardkit.errors import ConversionFailed, CorruptDataset, UsageError
from shardkit.system.formatting import size
from shardkit.system.text import printable


def exits(monkeypatch: pytest.MonkeyPatch, error: BaseException | int | None) -> int:
    """Return the exit code of the command line if its command raises, or returns, ``error``."""

    def command(**_: Any) -> int | None:
        if isinstance(error, BaseException):
            raise error
        return error

    monkeypatch.setattr(module.cli, "main", command)
    with pytest.raises(SystemExit) as caught:
        main()
    code = caught.value.code
    assert isinstance(code, int)
    return code


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (None, 0, ""),
        (0, 0, ""),
        (1, 1, ""),
        (UsageError("what is wrong"), 2, "shardkit: error: what is wrong\n"),
        (ConversionFailed("the disk"), 1, "shardkit: error: the disk\n"),
        (CorruptDataset("a byte"), 1, "shardkit: error: a byte\n"),
        (KeyboardInterrupt(), 130, "shardkit: error: interrupted."),
        (click.Abort(), 130, "shardkit: error: interrupted."),
        (BrokenPipeError(), 1, ""),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/some/file"),
            1,
            "shardkit: error: No space left on device: /some/file\n",
        ),
        (click.UsageError("wrong option"), 2, "Error: wrong option\n"),
    ],
    ids=repr,
)
def test_every_outcome_has_its_exit_code_and_at_most_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException | int | None,
    code: int,
    message: str,
) -> None:
    assert exits(monkeypatch, error) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(message)
    assert shown.err.count("\n") == bool(message)


def test_an_error_without_a_file_name_does_not_print_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits(monkeypatch, OSError(errno.EIO, os.strerror(errno.EIO))) == 1
    assert "None" not in capsys.readouterr().err


def test_help_has_examples() -> None:
    for arguments in ([], ["-h"], ["--help"]):
        result = invoke(*arguments)
        assert "shardkit convert imagefolder PHOTOS DATASET --to lmdb" in result.output
        assert "Exit codes" in result.output
        for name in ("convert", "verify", "info", "index"):
            assert f"  {name} " in result.output


def commands(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    context = click.Context(group)
    found: list[tuple[str, ...]] = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        found.append((*path, name))
        if isinstance(command, click.Group):
            found += commands(command, (*path, name))
    return found


@pytest.mark.parametrize("path", commands(cli), ids=" ".join)
def test_every_command_and_every_option_has_help(path: tuple[str, ...]) -> None:
    result = invoke(*path, "--help")
    assert result.exit_code == 0
    command: click.Command = cli
    for name in path:
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), name)
        assert found is not None
        command = found
    assert command.help
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name


@pytest.mark.parametrize("arguments", [["nonsense"], ["convert", "nonsense"], ["--nonsense"]])
def test_unknown_commands_and_options_are_refused(arguments: list[str]) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "nonsense" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_choice_is_refused_with_all_choices() -> None:
    done = run("convert", "imagefolder", "photos", "made")
    assert done.returncode == 2
    assert "Missing option '--to'" in done.stderr
    assert "\n  hdf5,\n" in done.stderr


def test_python_m_shardkit_runs_the_command() -> None:
    done = run("--version")
    start = f"shardkit {shardkit.__version__} (compiled module: "
    assert (done.returncode, done.stdout.startswith(start)) == (0, True)
    assert shardkit_command()[1:] == ["-m", "shardkit"]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["convert", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = """
import sys
from shardkit.cli.main import main
try:
    main()
except SystemExit as end:
    heavy = {"torch", "numpy", "PIL", "h5py", "lmdb", "simplejpeg", "tqdm"} & sys.modules.keys()
    print("loaded:", sorted(heavy), "code:", end.code)
"""
    done = python(code, *arguments)
    if arguments == ["convert", "--help"]:  # it lists the filters, and Pillow knows them
        loaded = done.stdout.partition("loaded:")[2]
        assert "'PIL'" in loaded
        assert not any(name in loaded for name in ("torch", "h5py", "lmdb"))
    else:
        assert "loaded: [] code: 0" in done.stdout


def test_convert_help_loads_no_storage_library() -> None:
    code = """
import sys
from shardkit.cli.main import main
try:
    main()
except SystemExit as end:
    print("loaded:", sorted({"torch", "h5py", "lmdb", "webdataset"} & sys.modules.keys()))
"""
    assert "loaded: []" in python(code, "convert", "imagefolder", "--help").stdout


def test_a_closed_pipe_is_not_a_traceback(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "photos", [f"class {n}" for n in range(60)], each=1)
    code = f"""
import subprocess, sys
command = {shardkit_command()!r} + sys.argv[1:]
process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
process.stdout.close()
print(process.stderr.read().decode(), process.wait())
"""
    done = python(code, "convert", "imagefolder", source, tmp_path / "o", "--to=lmdb", "--dry-run")
    assert "Traceback" not in done.stdout
    assert "Exception ignored" not in done.stdout


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (1, "image", "1 image"),
        (0, "image", "0 images"),
        (2000, "image", "2,000 images"),
        (2, "class", "2 classes"),
        (2, "entry", "2 entries"),
        (2, "bad file", "2 bad files"),
    ],
)
def test_counts_have_plurals(count: int, noun: str, text: str) -> None:
    assert amount(count, noun) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (1 << 20, "1.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 40, "1.0 TiB"),
        (1 << 50, "1024.0 TiB"),
    ],
)
def test_sizes_are_readable(count: int, text: str) -> None:
    assert size(count) == text


def test_names_are_escaped_for_the_terminal() -> None:
    assert printable("größe ★") == "größe ★"
    assert printable("a\nb\x1b[31m") == "a\\nb\\x1b[31m"
    assert printable("\udcff") == "\\udcff"
    assert some(["a", "b\n"]) == "a, b\\n"
    assert some([str(n) for n in range(20)], 3) == "0, 1, 2 ... (20 in all)"
