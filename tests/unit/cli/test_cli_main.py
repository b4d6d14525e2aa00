"""The command itself: help, exit codes, names and texts, and what it imports."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import re
import shlex
import signal
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import click
import pytest
from helpers import DEADLINE, execute, make_folder, python, run, run_main, shardkit_command
from refusals import refused, refuses

import shardkit
from shardkit import convert
from shardkit.cli import main
from shardkit.cli.main import cli
from shardkit.cli.printing import some
from shardkit.cli.run import flags_of
from shardkit.errors import (
    ConversionFailed,
    CorruptDataset,
    Problem,
    UsageError,
    located,
    setting,
    spelled,
)

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/some/file")

OUTCOMES: list[tuple[BaseException | int | None, int, str]] = [
    (None, 0, ""),
    (0, 0, ""),
    (1, 1, ""),
    (UsageError("what is wrong"), 2, "shardkit: error: what is wrong\n"),
    (ConversionFailed("the disk"), 1, "shardkit: error: the disk\n"),
    (CorruptDataset("a byte"), 1, "shardkit: error: a byte\n"),
    (KeyboardInterrupt(), 130, "shardkit: error: interrupted."),
    (click.Abort(), 130, "shardkit: error: interrupted."),
    (BrokenPipeError(), 1, ""),
    (FULL, 1, f"shardkit: error: /some/file: {FULL.strerror}. "),
    (OSError(errno.EIO, "no file name"), 1, f"shardkit: error: [Errno {errno.EIO}] no file name"),
    (click.UsageError("wrong option"), 2, "Error: wrong option\n"),
]
"""What a command raises or returns, its exit code, and the start of its only line."""


def test_every_outcome_has_its_exit_code_and_at_most_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for outcome, code, message in OUTCOMES:

        def command(*, outcome: BaseException | int | None = outcome, **_: object) -> int | None:
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr("shardkit.cli.main.cli.main", command)
        done = run_main("info", "x")
        assert (done.returncode, done.stdout) == (code, "")
        assert done.stderr.startswith(message)
        assert done.stderr.count("\n") == bool(message)


@cache
def shown(*path: str) -> str:
    """Return the help of a command."""
    done = run_main(*path, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@cache
def commands(*path: str) -> list[tuple[str, ...]]:
    """Return the commands below a group, and those below these."""
    text, found = shown(*path), list[tuple[str, ...]]()
    if "COMMAND [ARGS]..." in text.splitlines()[0]:
        for name in re.findall(r"^  ([a-z]\S*) {2,}\S", text, re.MULTILINE):
            found += [(*path, name), *commands(*path, name)]
    return found


@pytest.mark.slow
def test_every_command_and_every_option_has_help() -> None:
    paths = commands()
    assert {"convert", "verify", "info", "index", "tune"} <= {path[0] for path in paths}
    assert ("convert", "imagefolder") in paths
    for path in paths:
        text = shown(*path)
        assert "\\b" not in text  # a mark for Click that was escaped
        usage, about, *_ = text.split("\n\n")
        assert usage.startswith(f"Usage: shardkit {' '.join(path)} ")
        assert about.strip().endswith((".", ":"))
        sections = re.split(r"^[A-Z][a-z]+:$", text, maxsplit=1, flags=re.MULTILINE)[1]
        options = re.findall(r"^  -.*\n.*", sections, re.MULTILINE)
        assert options
        for option in options:
            assert re.search(r"\S {2,}\S|\n {10}", option), (path, option)


def test_help_has_examples_and_exit_codes() -> None:
    for words in ((), ("-h",), ("--help",)):
        done = run_main(*words)
        for fact in ("shardkit convert imagefolder PHOTOS DATASET --to lmdb", "Exit codes"):
            assert fact in done.stdout + done.stderr


def test_unknown_names_are_refused_and_a_similar_one_is_suggested() -> None:
    """Click words some of these errors."""
    for words, facts in {
        "nonsense": ("nonsense",),
        "convert nonsense": ("nonsense",),
        "--nonsense": ("nonsense",),
        "convrt": ("convrt", " Did you mean convert?\n"),
        "convert imagfolder": (" Did you mean imagefolder?\n",),
        "convert tar a b": (" Did you mean webdataset?\n",),
        "convert imagefolder a b --to tar": (" Did you mean webdataset?\n",),
        "convert imagefolder a b": ("'--to'", "hdf5,", "lmdb,", "webdataset"),
        "split a --to LMDB": (" Did you mean lmdb?\n",),
        "attach lmbd photos out": ("'lmbd'", " Did you mean lmdb?\n"),
        "doctor --budget 0s": ("'--budget'",),
        "tune x --budget 0": ("'--budget'",),
        "bench x --seconds 0": ("'--seconds'",),
        "doctor x --step-ms 0": ("'--step-ms'",),
    }.items():
        done = run_main(*words.split())
        assert (done.returncode, done.stdout) == (2, ""), words
        assert all(fact in done.stderr for fact in facts), done.stderr


def test_messages_name_options_as_the_command_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("photos", "mixed/train", "mixed/other"):
        make_folder(tmp_path / folder, each=1)
    convert("photos", "made", to="lmdb", workers=1)
    for words, fact in {
        "imagefolder photos out --val 1.5": "--val 1.5 must be",
        "imagefolder photos made --limit 1": "--force replaces",
        "imagefolder mixed out": "--splits if all are splits or --no-splits",
        "imagefolder photos out --dct-scaling": "--dct-scaling requires --resize",
        "imagefolder photos seed=7 --staging /a/b": "seed=7 is local; --staging is",
        "imagefolder seed=0 out": "seed=0 does",
        "imagefolder seed=0/a.jpg out": "seed=0/a.jpg does",
    }.items():
        refuses(2, "convert", *words.split(), "--to", "lmdb", facts=(fact,))
    with refused(UsageError, "dct_scaling= requires resize="):
        convert("photos", "out", to="lmdb", dct_scaling=True)


@pytest.mark.slow
def test_an_empty_path_is_not_the_current_folder() -> None:
    count = 0
    for path in commands():
        names = re.findall(r" \[?([A-Z]+)\b", shown(*path).splitlines()[0].split("[OPTIONS]")[1])
        for empty in set(names) - {"COMMAND", "ARGS", "RECORD", "RECORDS", "NAMES"}:
            done = run_main(*path, *("" if name == empty else "x" for name in names))
            assert done.returncode == 2
            assert empty in done.stderr.split("Invalid value for")[1], path
            count += 1
    assert count > 40
    for source, target in (("", "x"), ("x", "")):
        with refused(UsageError, "empty"):
            convert(source, target, to="lmdb")


def _lack_memory() -> None:
    raise ImportError("libX.so: failed to map segment from shared object")


def _raise_as_openblas_does() -> None:
    signal.raise_signal(signal.SIGINT)  # it lacks the memory for its threads, and goes on
    _lack_memory()


def _press_ctrl_c() -> None:
    subprocess.run(["kill", "-INT", str(os.getpid())], check=True)


@pytest.mark.parametrize(
    ("importing", "code", "message"),
    [
        (_lack_memory, 1, "out of memory: libX.so: failed to map segment"),
        (_raise_as_openblas_does, 1, "out of memory: a library cannot start its threads"),
        (_press_ctrl_c, 130, "interrupted."),
    ],
)
def test_memory_that_libraries_lack_is_no_interruption(
    monkeypatch: pytest.MonkeyPatch, importing: Callable[[], None], code: int, message: str
) -> None:
    monkeypatch.setattr(main, "import_module", lambda name: importing())
    done = run_main("info", "dataset")
    assert done.returncode == code
    assert done.stderr.strip().startswith(f"shardkit: error: {message}")


def test_python_m_shardkit_runs_the_command() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith(f"shardkit {shardkit.__version__} (compiled module: ")


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        ("--help,--version,completion zsh", "torch,h5py,lmdb,webdataset,numpy,PIL,simplejpeg,tqdm"),
        # They list the filters, which Pillow knows.
        pytest.param(
            "convert --help,convert imagefolder --help",
            "torch,h5py,lmdb,webdataset",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_help_loads_nothing_heavy(words: str, heavy: str) -> None:
    code = """
import runpy, sys
words, heavy = (argument.split(",") for argument in sys.argv[1:])
for command in words:
    sys.argv[1:] = command.split()
    try:
        runpy.run_module("shardkit", run_name="__main__")
    except SystemExit as end:
        print("loaded:", *sorted({*heavy} & sys.modules.keys()), "code:", end.code)
"""
    assert python(code, words, heavy).stdout.count("loaded: code: 0\n") == words.count(",") + 1


def test_bash_completes_names_of_commands_and_values(tmp_path: Path) -> None:
    ours = tmp_path / "shardkit"
    ours.write_text(f'#!/bin/sh\nexec {shlex.join(shardkit_command())} "$@"\n')
    ours.chmod(0o700)
    code = """
eval "$($1 completion bash)"
for words in "ver" "completion z"; do
    COMP_WORDS=(shardkit $words) COMPREPLY=()
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _shardkit_completion "$1"
    echo "${COMPREPLY[@]}"
done
"""
    command = ["bash", "-c", code, "bash", str(ours)]
    done = execute(*command, check=True)
    assert done.stdout == "verify\nzsh\n"


def test_completion_needs_a_shell_that_it_knows() -> None:
    for shell in ("zsh", "fish"):
        assert f"_SHARDKIT_COMPLETE={shell}_complete" in run_main("completion", shell).stdout
    for words in ([], ["tcsh"], ["zsh", "fish"]):
        assert run_main("completion", *words).returncode == 2


def test_a_closed_pipe_is_not_a_traceback() -> None:
    command = shardkit_command("--help")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.close()
        assert process.stderr
        assert process.stderr.read() == b""
        process.wait(DEADLINE)


# How texts of the command are made: names of options in messages, parts of errors, lists.


def test_messages_name_options_as_python_and_as_the_command_do() -> None:
    convert = cli.get_command(click.Context(cli), "convert")
    assert isinstance(convert, click.Group)
    command = convert.get_command(click.Context(convert), "imagefolder")
    assert command is not None
    spell = flags_of(click.Context(command))
    for name, value, spelling, flag in (
        ("seed", "x", "seed='x'", "--seed x"),
        ("quality", 0, "quality=0", "--quality 0"),
        ("force", True, "force=True", "--force"),
        ("splits", False, "splits=False", "--no-splits"),
        ("force", False, "force=False", "force=False"),
        ("shard_size", None, "shard_size=None", "shard_size=None"),
        ("views", 2, "views=2", "views=2"),  # the command has none
        ("staging", "it's", 'staging="it\'s"', "--staging 'it'\"'\"'s'"),
    ):
        text = f"see {setting(name, value)}."
        assert (spelled(text), spelled(text, spell)) == (f"see {spelling}.", f"see {flag}.")
    text = f"{setting('resize_mode')} requires {setting('resize')}"
    assert spelled(text, spell) == "--resize-mode requires --resize"
    assert spelled("seed=0 does not exist", spell) == "seed=0 does not exist"


def test_the_parts_of_an_error() -> None:
    error = UsageError("/a is not /b;", remedy=f"try {setting('force', True)}", where="/c")
    error = pickle.loads(pickle.dumps(error))
    assert str(error) == "/a is not /b; try force=True"
    assert (error.where, error.option) == ("/c", None)
    error = UsageError(f"{setting('resize_mode', 'pad')} requires {setting('resize')}")
    with contextlib.suppress(UsageError), located("/a"):
        raise error
    assert (error.where, error.option) == (None, "resize_mode")
    error = UsageError(f"/a is no folder, so {setting('resize')} is not used")
    with contextlib.suppress(UsageError), located("/b"), located("/a"):
        raise error
    assert (error.where, error.option) == ("/a", None)
    problem = Problem(path="x", reason=f"too few pixels ({setting('enlarge', True)} accepts it)")
    assert (problem.settings, problem.reason) == (
        ["enlarge"],
        "too few pixels (the option enlarge=True accepts it)",
    )
    assert str(UsageError("it is", remedy="Wait.")) == "it is. Wait."
    assert str(UsageError("it is", remedy="wait")) == "it is: wait"
    assert str(UsageError("it is")) == "it is"


def test_lists_are_escaped_and_shortened() -> None:
    assert some(["a", "b\n"]) == "a, b\\n"
    assert some([str(n) for n in range(20)], 3) == "0, 1, 2 ... (20 in total)"
