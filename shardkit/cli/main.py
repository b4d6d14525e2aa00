"""The ``shardkit`` command; others are loaded when they are called, so that ``--help`` is quick."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Mapping
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

import click

from shardkit import __version__
from shardkit.errors import ShardkitError, UsageError


class LazyGroup(click.Group):
    """A group whose commands stand in a table: name to ``module:attribute`` and a line of help."""

    def __init__(self, *args: Any, table: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of the table."""
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a command, or return None if there is none of that name."""
        if cmd_name not in self._table:
            return None
        module, _, attribute = self._table[cmd_name][0].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without loading them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._table.items()])


@click.group(
    cls=LazyGroup,
    table={
        "convert": ("shardkit.cli.convert:convert_group", "Make a dataset of shards from images."),
        "verify": ("shardkit.cli.verify:verify_command", "Find every damaged byte of a dataset."),
        "repair": (
            "shardkit.cli.repair:repair_command",
            "Make damaged files of a dataset anew from its source.",
        ),
        "info": ("shardkit.cli.info:info_command", "Tell what a dataset is and how it was made."),
        "index": ("shardkit.cli.index:index_command", "Rebuild a dataset's index from its shards."),
        "doctor": (
            "shardkit.cli.doctor:doctor_command",
            "Tell where the time goes, what limits loading, and what would help.",
        ),
        "tune": (
            "shardkit.cli.tune:tune_command",
            "Find the loader settings that are best on this machine.",
        ),
        "bench": (
            "shardkit.cli.bench:bench_command",
            "Measure how fast datasets and image folders are read.",
        ),
    },
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="shardkit %(version)s")
def cli() -> None:
    """Convert image folders to open shards, prove every byte, train at the speed of the hardware.

    \b
    Start with:
      shardkit convert imagefolder PHOTOS DATASET --to lmdb
      shardkit verify DATASET
    and in Python:
      from shardkit import LMDBDataset
      dataset = LMDBDataset("DATASET", transform=...)

    Exit codes: 0 all is well, 1 damage was found or the work failed, 2 the command cannot be done
    as it was given.
    """


def main() -> NoReturn:
    """Run the command line; errors become one message and an exit code, never a traceback."""
    signal.signal(signal.SIGTERM, _Ending())
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as it is for jobs in the background
        signal.signal(signal.SIGINT, _Ending())
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the terminal cannot show is escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        code = cli.main(prog_name="shardkit", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _fail(_interrupted(), 130)
    except ShardkitError as error:
        _fail(str(error), 2 if isinstance(error, UsageError) else 1)
    except MemoryError:
        _fail("memory ran out", 1)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        _fail(f"{error.strerror}: {error.filename}" if error.filename else str(error), 1)
    sys.exit(code or 0)


def _interrupted() -> str:
    """Return what is said of an interruption; a conversion keeps what was done."""
    if sys.argv[1:2] == ["convert"]:
        return "interrupted. (A conversion goes on when its command is given again.)"
    return "interrupted."


class _Ending:
    """Turns a signal into an exit that cleans up; the second one does not wait for that.

    Either way the work so far is kept, and the workers end: with the cleaning, or with us.
    """

    def __init__(self) -> None:
        self._asked = False

    def __call__(self, number: int, frame: FrameType | None) -> NoReturn:
        again, self._asked = self._asked, True
        if number == signal.SIGINT and not again:
            raise KeyboardInterrupt
        if number == signal.SIGINT or not again:
            os.write(2, f"shardkit: error: {_interrupted()}\n".encode())
        if again:
            os._exit(128 + number)
        sys.exit(128 + number)


def _fail(message: str, code: int) -> NoReturn:
    click.echo(f"shardkit: error: {message}", err=True)
    sys.exit(code)
