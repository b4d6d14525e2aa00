"""How numbers, tables and progress look on a terminal."""

from __future__ import annotations

import contextlib
import json
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

from shardkit.measure.words import json_value, printable, shortened
from shardkit.pool import Progress, Report

_WIDTH = 100

if TYPE_CHECKING:  # what measures loads torch, which commands that convert do without
    from shardkit.measure.rounds import Watch


def amount(count: int, noun: str) -> str:
    """Return a count with its noun: "1 image", "2,000 images"."""
    plural = (
        f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}{'es' if noun[-1] == 's' else 's'}"
    )
    return f"{count:,} {noun if count == 1 else plural}"


def line(name: str, text: str) -> None:
    """Print a named line of a summary."""
    click.echo(f"  {name:<9} {text}")


def table(rows: Sequence[Sequence[str]], *, limit: int | None = None) -> None:
    """Print at most ``limit`` rows in columns, the first to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows[:limit]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        click.echo("    " + "  ".join(cells))
    if limit is not None and len(rows) > limit:
        click.echo(f"    ... and {len(rows) - limit:,} more (--json gives all)")


def wrapped(text: str, indent: str, *, first: str, cut: bool = False) -> None:
    """Print a text in lines of 100 characters.

    Args:
        text: What is printed.
        indent: What every line but the first begins with.
        first: What the first line begins with.
        cut: Whether words that are longer than a line, such as paths, are cut.
    """
    click.echo(
        textwrap.fill(
            text,
            _WIDTH,
            initial_indent=first,
            subsequent_indent=indent,
            break_long_words=cut,
            break_on_hyphens=False,
        )
    )


def some(names: Sequence[str], limit: int = 8) -> str:
    """Return names as a list in one line, shortened."""
    text = ", ".join(printable(name) for name in names[:limit])
    return text + (f" ... ({len(names):,} in all)" if len(names) > limit else "")


_NOTES = {
    "orientation": "with an EXIF orientation, which readers do not apply; --orient turns them",
    "small": "smaller than --resize asks for, which kept their size; --enlarge scales them up",
    "frames": "with several frames or pages; readers take the first",
}


def show_notes(notes: Mapping[str, int]) -> None:
    """Print what a conversion noticed and left as it was."""
    for name, count in notes.items():
        line("noted", f"{amount(count, 'image')} {_NOTES.get(name, name)}")


def emit(value: Any) -> None:
    """Print a value as JSON, for machines; null stands for a number that is not one."""
    click.echo(json.dumps(json_value(value), indent=1, allow_nan=False))


@contextlib.contextmanager
def progress_bar(total: int, action: str, *, quiet: bool) -> Iterator[Report]:
    """Show progress on standard error while the block runs, unless it is no terminal.

    Args:
        total: Number of images.
        action: What is done, in one word.
        quiet: Whether to show nothing.
    """
    begun = time.monotonic()
    done = bad = 0
    with tqdm(total=total, desc=action, unit="img", disable=quiet or None, leave=False) as bar:

        def advance(progress: Progress) -> None:
            nonlocal done, bad
            done += progress.bytes
            bad += progress.bad
            rate = done / 1e6 / max(time.monotonic() - begun, 1e-9)
            bar.set_postfix_str(f"{rate:.1f} MB/s, {bad} bad", refresh=False)
            bar.update(progress.images)

        yield advance


@contextlib.contextmanager
def looks_bar(*, quiet: bool) -> Iterator[Watch]:
    """Show on standard error what is measured while the block runs, unless it is no terminal.

    Args:
        quiet: Whether to show nothing.
    """
    with tqdm(desc="measuring", unit="look", disable=quiet or None, leave=False) as bar:

        def watch(text: str, done: int, total: int) -> None:
            bar.total = total
            bar.set_postfix_str(shortened(text, 50), refresh=False)
            bar.update(done - bar.n)
            bar.refresh()

        yield watch
