"""``shardkit work`` and ``shardkit commit``: a conversion in jobs."""

from __future__ import annotations

from pathlib import Path

import click

from shardkit.cli.console import emit, say
from shardkit.cli.convert_report import made_as_json, show_made, show_problems
from shardkit.cli.show import amount, progress_bar
from shardkit.conversion.convert import commit
from shardkit.conversion.store_jobs import open_jobs
from shardkit.errors import BadImages, UsageError
from shardkit.stores.urls import as_url


@click.command("work")
@click.argument("dst", type=click.Path(path_type=Path))
@click.option(
    "--task",
    type=click.IntRange(0),
    envvar="SLURM_ARRAY_TASK_ID",
    metavar="N",
    help="Build the shard of this task.  [default: SLURM_ARRAY_TASK_ID]",
)
@click.option(
    "--claim", is_flag=True, help="Build tasks that no other job has, until none is left."
)
@click.option(
    "--take-over",
    is_flag=True,
    help="With --claim, also build tasks that other jobs claimed but have not finished. At worst "
    "a task runs twice, which does no harm.",
)
@click.option(
    "--source",
    type=click.Path(path_type=Path),
    metavar="SRC",
    help="Path of the source on this machine, if it is another one than planned.",
)
@click.option(
    "--staging",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="If DST is a URL: folder for the shard that is being built.  [default: temporary folder]",
)
def work_command(  # noqa: PLR0913 - Click passes each option by name
    dst: Path,
    *,
    task: int | None,
    claim: bool,
    take_over: bool,
    source: Path | None,
    staging: Path | None,
) -> None:
    """Build shards of the conversion that `convert --plan-only` planned in DST.

    If DST is a URL, each shard is uploaded, then removed here.
    """
    if take_over and not claim:
        raise UsageError("--take-over needs --claim")
    if task is None and not claim:
        raise UsageError("choose --task N or --claim; outside Slurm, no task number is given")
    built_here = bad = 0
    with open_jobs(dst, source, staging) as jobs:
        for number in jobs.claimed(take_over=take_over) if claim else (task or 0,):
            built = jobs.build(number)
            kept = " (already done)" if built.kept else ""
            entry = built.result.entry
            done = f"{entry.name}, {amount(entry.rows, 'record')}{kept}" if entry else "not built"
            say(f"task {number} of {len(jobs)}: {done}")
            show_problems(built.result.bad)
            bad += len(built.result.bad) * (entry is None)
            built_here += 1
    if not built_here:
        say(
            "no task is left to claim: once all jobs have ended, run `shardkit commit "
            f"{as_url(dst) or dst}`, or build what killed ones left with --take-over"
        )
    if bad:
        raise BadImages(
            f"{amount(bad, 'bad file')}. Fix bad files, or plan again with --on-error skip --force."
        )


@click.command("commit")
@click.argument("dst", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace the dataset in DST, if it is local.")
@click.option(
    "--staging",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="If DST is a URL: folder for index and manifest.  [default: temporary folder]",
)
@click.option("--quiet", is_flag=True, help="Print only --json output.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def commit_command(
    dst: Path, *, force: bool, staging: Path | None, quiet: bool, as_json: bool
) -> None:
    """Publish the dataset in DST once `work` has built all shards. It reads no shard."""
    with progress_bar("committing", quiet=True) as tally:
        made = commit(dst, force=force, staging=staging)
    shown = as_url(dst) or dst
    if as_json:
        emit(made_as_json(shown, made, tally))
    elif not quiet:
        show_made(None, shown, made, tally)
