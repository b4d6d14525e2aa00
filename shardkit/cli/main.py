"""The ``shardkit`` command. Subcommands are imported on use, so that ``--help`` is fast."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

import click

from shardkit._version import __version__
from shardkit.cli.console import open_streams, say, show_usage_error
from shardkit.errors import ShardkitError, UsageError
from shardkit.system import native


class LazyGroup(click.Group):
    """A group of commands from a table: name to ``module:attribute`` and a line of help."""

    def __init__(self, *args: Any, table: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of the table."""
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a command; None if the name is unknown."""
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
        "convert": ("shardkit.cli.convert:convert_group", "Create a dataset of shards."),
        "work": ("shardkit.cli.jobs:work_command", "Build shards of a planned conversion."),
        "commit": ("shardkit.cli.jobs:commit_command", "Publish the dataset that jobs built."),
        "attach": (
            "shardkit.cli.attach:attach_command",
            "Read files of other programs in place.",
        ),
        "append": ("shardkit.cli.append:append_command", "Add images to a dataset."),
        "merge": ("shardkit.cli.merge:merge_command", "Merge datasets into one."),
        "index-export": (
            "shardkit.cli.index_export:index_export_command",
            "Write the tar indexes of other tools.",
        ),
        "verify": ("shardkit.cli.verify:verify_command", "Find every damaged byte of a dataset."),
        "repair": (
            "shardkit.cli.repair:repair_command",
            "Rebuild damaged files of a dataset from its source.",
        ),
        "upload": ("shardkit.cli.upload:upload_command", "Upload a dataset to an object store."),
        "info": (
            "shardkit.cli.info:info_command",
            "Show a dataset's format, sizes, classes and recipe.",
        ),
        "diff": ("shardkit.cli.diff:diff_command", "Show how two datasets differ, by key."),
        "export": (
            "shardkit.cli.export:export_command",
            "Write a dataset as a folder of images, tables or tar archives.",
        ),
        "report": (
            "shardkit.cli.report:report_command",
            "Show what is in datasets, and what is wrong with it, on one page.",
        ),
        "show": (
            "shardkit.cli.show_records:show_command",
            "Show records of a dataset, or write a sheet of their pictures.",
        ),
        "split": ("shardkit.cli.split:split_command", "Divide a dataset into train, val and test."),
        "index": ("shardkit.cli.index:index_command", "Rebuild a dataset's index from its shards."),
        "doctor": (
            "shardkit.cli.doctor:doctor_command",
            "Find out what limits loading, and what would help.",
        ),
        "tune": (
            "shardkit.cli.tune:tune_command",
            "Find the fastest loader settings on this machine.",
        ),
        "bench": (
            "shardkit.cli.bench:bench_command",
            "Compare the reading speed of datasets and image folders.",
        ),
        "ladder": (
            "shardkit.cli.ladder:ladder_command",
            "Measure the speedup of each improvement to data loading.",
        ),
    },
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=lambda context, _, wanted: _show_version(context) if wanted else None,
    help="Show the version and whether the compiled module is used.",
)
def cli() -> None:
    """Convert image folders to open shards, prove every byte, and train at full hardware speed.

    \b
    Start with:
      shardkit convert imagefolder PHOTOS DATASET --to lmdb
      shardkit verify DATASET
    and in Python:
      from shardkit import LMDBDataset
      dataset = LMDBDataset("DATASET", transform=...)

    Exit codes, the same for every command: 0 success, 1 damage found or operation failed, 2 usage
    error.
    """


def _show_version(context: click.Context) -> None:
    click.echo(f"shardkit {__version__} (compiled module: {native.describe()})")
    context.exit()


def main() -> NoReturn:
    """Run the command line; each error becomes one message and an exit code."""
    open_streams()
    signal.signal(signal.SIGTERM, _Ending())
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # ignored in background jobs
        signal.signal(signal.SIGINT, _Ending())
    try:
        code = cli.main(prog_name="shardkit", standalone_mode=False)
    except click.ClickException as error:
        show_usage_error(error)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _fail(_interrupted(), 130)
    except ShardkitError as error:
        _fail(str(error), 2 if isinstance(error, UsageError) else 1)
    except MemoryError:
        _fail("out of memory", 1)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        _fail(f"{error.strerror}: {error.filename}" if error.filename else str(error), 1)
    sys.exit(code or 0)


def _interrupted() -> str:
    """Return the message for an interruption; a conversion can resume."""
    if sys.argv[1:2] in (["convert"], ["attach"], ["append"], ["merge"]):
        return "interrupted. (Rerun the same command to resume.)"
    return "interrupted."


class _Ending:
    """Turns a signal into an exit that cleans up; a second signal exits at once.

    Either way, finished work is kept and worker processes end.
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
    say(f"shardkit: error: {message}", err=True)
    sys.exit(code)
