"""``shardkit work``: build the shards of a planned conversion."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from shardkit.cli.options import argument, restated
from shardkit.cli.printing import as_json, show_problems
from shardkit.cli.run import Run, say
from shardkit.cli.runner import command
from shardkit.cluster.work import WorkOptions, work
from shardkit.conversion.task import Built
from shardkit.system.text import amount, as_command, quoted
from shardkit.system.urls import as_url

_TASK_VARIABLE = "SLURM_ARRAY_TASK_ID"


def _task(ctx: click.Context, _: click.Parameter, value: int | None) -> int | None:
    """Return the number of the task: without ``--task`` and ``--claim``, that of Slurm's job."""
    text = os.environ.get(_TASK_VARIABLE)
    if value is not None or ctx.params.get("claim") or not text:
        return value
    if not (text.isascii() and text.isdigit()):
        raise click.UsageError(
            f"{_TASK_VARIABLE} is {quoted(text)}, not a task number: unset it, or pass --task N "
            "or --claim",
            ctx,
        )
    return int(text)


@dataclass(frozen=True, kw_only=True)
class CommandOptions(WorkOptions):
    """Options of `shardkit work`."""

    task: int | None = restated(WorkOptions, "task", shown=_TASK_VARIABLE, callback=_task)


@command("work", argument("dst"), options=(CommandOptions,))
def work_command(run: Run, options: CommandOptions, *, dst: Path) -> None:
    """Build shards of the conversion that `convert --plan-only` planned in DST.

    If DST is a URL, each shard is uploaded and then deleted locally.
    """
    tasks = list[dict[str, Any]]()
    run.report(lambda: {"tasks": tasks})

    def on_task(number: int, count: int, built: Built) -> None:
        entry = built.result.entry
        problems = built.result.bad
        tasks.append(
            {
                "task": number,
                "shard": entry.name if entry else None,
                "rows": entry.rows if entry else 0,
                "kept": built.kept,
                "bad": as_json(problems),
            }
        )
        if run.is_text:
            kept = " (already done)" if built.kept else ""
            result = f"{entry.name}, {amount(entry.rows, 'record')}{kept}" if entry else "not built"
            say(f"task {number} of {count}: {result}")
        if entry and not run.output.json:
            show_problems(problems)

    words = {
        **vars(options),
        # The plan may be anybody's.
        "on_open": lambda jobs: say(f"reading {jobs.kind} {jobs.source}", err=True),
        "on_task": on_task,
    }
    if not work(dst, **words) and run.is_text:
        say(
            "no task is left to claim. Once all jobs have ended, run "
            f"{as_command('commit', as_url(dst) or dst)}, or use --take-over to build the tasks of "
            "killed jobs"
        )
