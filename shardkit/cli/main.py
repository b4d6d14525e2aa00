"""The ``shardkit`` command. Subcommands are imported on use, so that ``--help`` is fast."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from shardkit._version import __version__
from shardkit.cli.run import Run, error_fields, hinted, open_streams, say, show_usage_error
from shardkit.errors import STOPS, ShardkitError, UsageError, spelled
from shardkit.system import native
from shardkit.system.text import shell, suggestion

_COMMANDS: dict[str, dict[str, str]] = {
    "Create": {
        "convert": "Create a sharded dataset.",
        "work": "Build shards of a planned conversion.",
        "commit": "Publish the dataset that jobs built.",
        "attach": "Read files from other programs in place.",
        "upload": "Upload a dataset to an object store.",
    },
    "Check": {
        "verify": "Find every damaged byte of a dataset.",
        "repair": "Rebuild damaged files of a dataset from its source.",
        "index": "Rebuild a dataset's index from its shards.",
        "diff": "Show how two datasets differ, by key.",
    },
    "Inspect": {
        "info": "Show a dataset's format, sizes, classes and recipe.",
        "show": "Show records of a dataset, or save their pictures as a contact sheet.",
        "report": "Show the contents and problems of datasets on one page.",
    },
    "Change": {
        "append": "Add images to a dataset.",
        "fields": "Add, replace and remove fields without rewriting shards.",
        "merge": "Merge datasets into one.",
        "split": "Divide a dataset into train, val and test.",
        "export": "Write a dataset as a folder of images, tables or tar archives.",
    },
    "Measure": {
        "doctor": "Find out what limits loading, and what would help.",
        "tune": "Find the fastest loader settings on this machine.",
        "bench": "Compare the reading speed of datasets and image folders.",
    },
    "Shell": {
        "completion": "Print the completion script for bash, zsh or fish.",
    },
}
"""Names and help of the commands, by heading. Each is an object of a module of its own name."""


class _Commands(click.Group):
    """The commands of `_COMMANDS`, imported when they are used."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse words: --json is an option of each command, and here of --version alone."""
        version_as_json = {*args} == {"--version", "--json"}  # which `Run` knows
        return super().parse_args(ctx, ["--version"] if version_as_json else args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return [name for commands in _COMMANDS.values() for name in commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a command; None if the name is unknown."""
        if cmd_name not in self.list_commands(ctx):
            return None
        name = cmd_name.replace("-", "_")
        with _memory_of_libraries():
            module = import_module(f"shardkit.cli.{name}")
        command: click.Command = getattr(module, f"{name}_command")
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return names and options that start as given, without loading the commands."""
        texts = {name: text for commands in _COMMANDS.values() for name, text in commands.items()}
        names = [name for name in texts if name.startswith(incomplete)]
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*(CompletionItem(name, help=texts[name]) for name in names), *options]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return name, command and arguments; suggest a command for an unknown name."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            raise hinted(error, ctx, suggestion(args[0], self.list_commands(ctx))) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the lists of commands without loading them."""
        for heading, commands in _COMMANDS.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{name:<12}", text) for name, text in commands.items()])


@contextlib.contextmanager
def _memory_of_libraries() -> Iterator[None]:
    """Raise `MemoryError` if a library that is imported lacks memory.

    OpenBLAS raises SIGINT in its own process if it cannot start its threads: that is no Ctrl-C.
    """
    wait: Any = getattr(signal, "sigtimedwait", lambda *_: None)  # macOS has none
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    except ImportError as error:
        if "failed to map segment" in str(error):
            raise MemoryError(str(error)) from error
        raise
    finally:
        interruption = wait({signal.SIGINT}, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if interruption is not None and interruption.si_pid == os.getpid():
            raise MemoryError("a library cannot start its threads")
        if interruption is not None:
            signal.raise_signal(signal.SIGINT)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=lambda context, _, wanted: _show_version(context) if wanted else None,
    help="Show the version and whether the compiled module is used; --json prints both as JSON.",
)
def cli() -> None:
    """Convert image folders to open shards, prove every byte, and train from them repeatably.

    \b
    Start with:
      shardkit convert imagefolder PHOTOS DATASET --to lmdb
      shardkit verify DATASET
    and in Python:
      from shardkit import open_dataset
      dataset = open_dataset("DATASET", transform=...)

    Exit codes, the same for every command: 0 success, 1 damage found or operation failed, 2 usage
    error.
    """


def _show_version(context: click.Context) -> None:
    run = context.ensure_object(Run)
    compiled = native.describe()
    text = f"shardkit {__version__} (compiled module: {compiled})"
    if (licenses := native.PACKAGE / "licenses").exists():  # of what a wheel is linked with
        text += f"\nlicenses of the included libraries: {licenses}"
    fields = {"version": __version__, "compiled_module": compiled}
    run.report(lambda: fields, lambda: click.echo(text))
    run.end(0)
    context.exit()


def main() -> NoReturn:
    """Run the command line; each error becomes one message, perhaps as JSON, and an exit code."""
    gc.disable()  # until a command is loaded: what imports create stays
    if not {*sys.argv[1:2]} & {"report", *_COMMANDS["Measure"]}:  # which run code of users, or BLAS
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # starting more takes NumPy 40 ms
    open_streams()
    signal.signal(signal.SIGTERM, _Ending())
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as in background jobs, and by nohup
            signal.signal(number, _Ending())
    run = Run(json="--json" in sys.argv, owns_process=True)
    try:
        code = cli.main(prog_name="shardkit", standalone_mode=False, obj=run)
    except click.ClickException as error:
        show_usage_error(error)
        run.end(error.exit_code, _usage_fields(error))
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt) as error:
        _fail(run, 130, _interrupted(), error_fields(error, "interrupted", remedy=_resuming()))
    except ShardkitError as error:
        what = spelled(error.problem, run.spell).rstrip("".join(STOPS))
        if error.lacks:
            again = shell("shardkit", *sys.argv[1:], spelled(error.lacks, run.spell))
            error.remedy = f"{error.remedy}: {again}"
        remedy = None if error.remedy is None else spelled(error.remedy, run.spell)
        code = 2 if isinstance(error, UsageError) else 1
        option = None if error.option is None else run.spell(error.option, "")
        fields = error_fields(error, what, where=error.where or option, remedy=remedy)
        _fail(run, code, error.text(run.spell), fields)
    except MemoryError as error:
        what = "out of memory" + (f": {error}" if str(error) else "")
        _fail(run, 1, what, error_fields(error, what))
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        remedy = "Rerun the command once the file system allows it."
        fields = error_fields(error, what, remedy=remedy, where=error.filename)
        _fail(run, 1, f"{what}. {remedy}", fields)
    except SystemExit as end:  # by a signal, whose message is printed
        run.end(int(end.code or 0), error_fields(end, "interrupted", remedy=_resuming()))
        raise
    except Exception as error:
        run.end(1, error_fields(error, str(error)))
        raise
    sys.exit(code or 0)


def _resuming() -> str | None:
    """Return what to do after an interruption, of commands that can resume."""
    can_resume = sys.argv[1:2] in (["convert"], ["attach"], ["append"], ["merge"], ["fields"])
    return "Rerun the same command to resume." if can_resume else None


def _interrupted() -> str:
    return f"interrupted. ({remedy})" if (remedy := _resuming()) else "interrupted."


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
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(2, f"shardkit: error: {_interrupted()}\n".encode())
        if again:
            os._exit(128 + number)
        sys.exit(128 + number)


def _fail(run: Run, code: int, message: str, fields: Mapping[str, Any]) -> NoReturn:
    say(f"shardkit: error: {message}", err=True)
    run.end(code, fields)
    sys.exit(code)


def _usage_fields(error: click.ClickException) -> dict[str, Any]:
    """Return an error of Click as JSON values."""
    param = getattr(error, "param", None)
    where = getattr(error, "option_name", None)
    remedy = vars(error).get("remedy")
    if isinstance(param, click.Parameter):
        where = param.opts[-1] if isinstance(param, click.Option) else param.human_readable_name
    what = error.format_message()
    if remedy is not None:
        what = what.removesuffix(f" {remedy}")
    elif what.startswith(error.message):  # what follows is a hint of Click
        remedy = what.removeprefix(error.message).strip(" ()") or None
        what = error.message
    if remedy is None and isinstance(error, click.UsageError) and error.ctx is not None:
        remedy = f"Try '{error.ctx.command_path} --help' for help."
    return error_fields(error, what, where=where, remedy=remedy)
