"""Commands whose functions take objects: one decorator for options, results and exit codes."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import click

from shardkit.cli.options import click_options
from shardkit.cli.printing import as_json, show_problems
from shardkit.cli.run import Output, Run, flags_of
from shardkit.errors import BadImages, Problem, ShardkitError
from shardkit.options import make
from shardkit.system.pool import fork_workers

Function = Callable[..., "int | None"]

_LISTED = 20
"""Maximum bad images to show; --json prints all."""


class Command(click.Command):
    """A command that makes objects of its options, and passes them to a function.

    The function is called with the `Run`, an object of each class of ``options``, and all other
    values by name: arguments, and options in ``params``. It returns the exit code; None is 0. Its
    docstring is the help.
    """

    def __init__(
        self,
        name: str,
        function: Function,
        params: Sequence[click.Parameter],
        options: Sequence[type[Any]],
        **details: Any,
    ) -> None:
        params = [*params, *click_options(*options, Output)]
        details = {"help": inspect.cleandoc(function.__doc__ or ""), **details}
        super().__init__(name, params=params, **details)
        self._function = function
        self._options = options

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the lists of options under their headings."""
        headings: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                headings.setdefault(getattr(param, "heading", "") or "Options", []).append(record)
        for heading, records in headings.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def invoke(self, ctx: click.Context) -> Any:
        """Call the function, and exit with its code."""
        run = ctx.ensure_object(Run)
        if run.owns_process:
            fork_workers()
            gc.freeze()  # what imports created stays; `main` disabled collecting it
            gc.enable()
        values = dict(ctx.params)
        run.output = make(Output, values)
        try:
            objects = [make(kind, values) for kind in self._options]
            code = self._function(run, *objects, **values) or 0
        except ShardkitError as error:
            if isinstance(error, BadImages):
                _report_bad(run, error.problems)
            run.spell = flags_of(ctx)
            raise
        if code:
            run.show_hidden()
        run.end(code)
        ctx.exit(code)


def _report_bad(run: Run, problems: Sequence[Problem]) -> None:
    if not run.output.json:
        show_problems(problems, limit=_LISTED)
    elif problems:
        run.report(lambda: {"bad": as_json(problems)})


def command(
    name: str, *params: click.Parameter, options: Sequence[type[Any]] = ()
) -> Callable[[Function], Command]:
    """Return a decorator that makes a function a command; see `Command`."""
    return lambda function: Command(name, function, params, options)
