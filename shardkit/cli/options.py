"""Options shared by several commands."""

from __future__ import annotations

import click

workers_option = click.option(
    "--workers",
    type=click.IntRange(1),
    metavar="N",
    help="Number of processes.  [default: number of CPUs]",
)

quiet_option = click.option(
    "--quiet", is_flag=True, help="Print only --json output. See the exit code."
)
