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
from shardkit.cli.printing import some
from shardkit.cli.run import with_flags
from shardkit.errors import ConversionFailed, CorruptDataset, UsageError
from shardkit.system.formatting import amount, size
from shardkit.system.text import as_command, printable


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
            "shardkit: error: /some/file: No space left on device. Rerun",
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


def command_at(path: tuple[str, ...]) -> click.Command:
    command: click.Command = cli
    for name in path:
        assert isinstance(command, click.Group)
        below = command.get_command(click.Context(command), name)
        assert below is not None
        command = below
    return command


@pytest.mark.parametrize("path", commands(cli), ids=" ".join)
def test_every_command_and_every_option_has_help(path: tuple[str, ...]) -> None:
    result = invoke(*path, "--help")
    assert result.exit_code == 0
    assert "\\b" not in result.output  # a mark for Click that was escaped
    command = command_at(path)
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


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["convrt"], "convert"),
        (["convert", "imagfolder"], "imagefolder"),
        (["convert", "tar", "a", "b"], "webdataset"),
        (["convert", "imagefolder", "a", "b", "--to", "tar"], "webdataset"),
        (["split", "a", "--to", "LMDB"], "lmdb"),
    ],
)
def test_a_name_that_is_almost_right_is_suggested(arguments: list[str], meant: str) -> None:
    result = invoke(*arguments)
    assert (result.exit_code, f" Did you mean {meant}?\n" in result.output) == (2, True)


def test_an_unknown_kind_of_files_to_attach_is_named() -> None:
    with pytest.raises(UsageError, match=r"kind of files 'lmbd'; .*\. Did you mean lmdb\?"):
        raise invoke("attach", "lmbd", "photos", "out").exception or AssertionError


def test_a_missing_choice_is_refused_with_all_choices() -> None:
    done = run("convert", "imagefolder", "photos", "made")
    assert done.returncode == 2
    assert "Missing option '--to'" in done.stderr
    assert "\n  hdf5,\n" in done.stderr


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("seed='x' is not an integer from 0 on", "--seed x is not an integer from 0 on"),
        ("resize_mode= requires resize=", "--resize-mode requires --resize"),
        ("quality=0, or leave force= out (check=none)", "--quality 0, or leave --force out"),
        ("force=True replaces it", "--force replaces it"),
        ("staging=/a/b is a file", "--staging /a/b is a file"),
        ("pass splits=True, or splits=False.", "pass --splits, or --no-splits."),
        ("on_error='skip'. force=False", "--on-error skip. force=False"),
        ("name it with staging=.", "name it with --staging."),
        ("seed=0 does not exist", "seed=0 does not exist"),
        ("seed=0/a.jpg is a file, seed=7.jpg too", "seed=0/a.jpg is a file, seed=7.jpg too"),
        ("/x/seed=7 and colors='x' and src=7", "/x/seed=7 and colors='x' and src=7"),
    ],
)
def test_messages_name_options_as_the_command_does(message: str, shown: str) -> None:
    context = click.Context(command_at(("convert", "imagefolder")))
    context.params = {"src": Path("seed=0")}
    assert with_flags(message, context).startswith(shown)


def test_errors_of_python_functions_name_options_as_the_command_does(folder: Path) -> None:
    words = ("convert", "imagefolder", folder, "out", "--to", "lmdb", "--resizer", "torch")
    assert str(invoke(*words).exception) == "--resizer requires --resize"
    with pytest.raises(UsageError, match=r"^resizer= requires resize=$"):
        shardkit.convert(folder, "out", to="lmdb", resizer="torch")


def test_commands_in_messages_can_be_copied() -> None:
    assert as_command("work", Path("my data"), "--claim") == ("`shardkit work 'my data' --claim`")


@pytest.mark.parametrize(
    "words",
    [
        ("doctor", "--budget", "0s"),
        ("tune", "x", "--budget", "0"),
        ("bench", "x", "--seconds", "0"),
        ("ablation", "x", "--seconds", "-1"),
        ("doctor", "x", "--step-ms", "0"),
    ],
)
def test_a_duration_is_above_zero(words: tuple[str, ...]) -> None:
    result = invoke(*words)
    assert (result.exit_code, f"Invalid value for '{words[-2]}'" in result.stderr) == (2, True)


def test_an_empty_path_is_not_the_current_folder() -> None:
    for path in commands(cli):
        names = [param for param in command_at(path).params if isinstance(param, click.Argument)]
        paths = [param for param in names if param.name not in ("record", "names")]
        assert all(isinstance(param.type, click.Path) for param in paths)
        for empty in paths:
            result = invoke(*path, *("" if param is empty else "x" for param in paths))
            assert result.exit_code == 2
            assert empty.human_readable_name in result.stderr.split("Invalid value for")[1]
            assert "': it is empty: give a path or URL" in result.stderr
    for source, target in (("", "x"), ("x", "")):
        with pytest.raises(UsageError, match="is empty"):
            shardkit.convert(source, target, to="lmdb")


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
