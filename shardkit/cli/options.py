"""Options that several commands have."""

from __future__ import annotations

import click

workers_option = click.option(
    "--workers",
    type=click.IntRange(1),
    metavar="N",
    help="Processes.  [default: one for each processor]",
)

quiet_option = click.option(
    "--quiet", is_flag=True, help="Show nothing but --json; the exit code tells."
)
