"""Print numbers, tables and progress on a terminal."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from shardkit.cli.run import Run, flags_of, say
from shardkit.errors import Problem
from shardkit.kinds.field import Schema
from shardkit.record import IMAGE
from shardkit.system.late import load
from shardkit.system.pool import Progress
from shardkit.system.text import amount, printable, shortened

_WIDTH = 100

if TYPE_CHECKING:  # measuring loads torch, and a bar tqdm, which converting does not need
    from shardkit.cli.bar import Bar
    from shardkit.measure.runner.rounds import Watch


def line(name: str, text: str) -> None:
    """Print a named line of a summary."""
    say(f"  {name:<9} {text}")


def show_text(text: str) -> None:
    """Print the lines of a text."""
    for text_line in text.split("\n"):
        say(text_line)


def table(rows: Sequence[Sequence[str]], *, limit: int | None = None) -> None:
    """Print at most ``limit`` rows; the first column is left-aligned, all others right-aligned."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows[:limit]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        say("    " + "  ".join(cells))
    for more in more_lines(rows, limit):
        say(f"    {more}")


def wrapped(text: str, indent: str, *, first: str) -> None:
    """Print a text in lines of 100 characters, which start with ``indent``, or ``first``."""
    lines = textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for text_line in lines:
        say(text_line)


def record_noun(schema: Schema) -> str:
    """Return what users call a record: an image, unless it has none."""
    return "image" if IMAGE in schema else "record"


def some(names: Sequence[str], limit: int = 8, *, counted: bool = True) -> str:
    """Return the first ``limit`` names, separated by commas, and perhaps the number of all."""
    text = ", ".join(printable(name) for name in names[:limit])
    more = f" ... ({len(names):,} in total)" if counted else " ..."
    return text + (more if len(names) > limit else "")


_NOTES = {
    "orientation": "with an EXIF orientation, which readers do not apply; convert --orient does",
    "odd": "with harmless JPEG faults, such as extra bytes; readers decode them as Pillow does",
    "damaged": "with lost JPEG data, due to --tolerate-damage; readers decode them as Pillow does",
    "dropped": "lost boxes or keypoints that the crop cut off; --resize-mode pad keeps them all",
    "frames": "with several frames or pages; readers use the first",
    "small": "smaller than the target size of an earlier conversion",
}


def show_notes(notes: Mapping[str, int], recipe: Mapping[str, Any]) -> None:
    """Print a dataset's notes on images that were stored unchanged."""
    for name, count in notes.items():
        text = _NOTES.get(name, name)
        if name == "small" and recipe["resize"]:
            text = _small(count == 1, recipe)
        line("noted", f"{amount(count, 'image')} {text}")


def _small(is_one: bool, recipe: Mapping[str, Any]) -> str:
    """Return what is true of images that are smaller than the size they should get."""
    text = f"{'is' if is_one else 'are'} smaller than {'x'.join(map(str, recipe['resize']))}"
    if recipe["resize_mode"] in ("crop", "stretch"):  # in other modes, sizes vary anyway
        text += (
            f" and {'keeps its size' if is_one else 'keep their sizes'}: loaders cannot stack "
            "whole images of different sizes"
        )
    return f"{text}; --enlarge scales {'it' if is_one else 'them'} up"


def ignored_counts(ignored: Mapping[str, int]) -> str:
    """Return the numbers of files that a conversion ignored, by reason."""
    return "; ".join(f"{count:,} {printable(reason)}" for reason, count in ignored.items())


class Tally:
    """Adds up progress reports, and may show them in a bar."""

    def __init__(self, run: Run, bar: Bar | None = None) -> None:
        self._run = run
        self._bar = bar
        self.images = 0
        self.bytes = 0
        """Bytes of encoded images read."""
        self.bad = 0

    @property
    def seconds(self) -> float:
        """Seconds since the start of the run, above 0."""
        return max(self._run.seconds, 1e-9)

    def __call__(self, progress: Progress) -> None:
        """Add a report and update the bar."""
        self.images += progress.images
        self.bytes += progress.bytes
        self.bad += progress.bad
        if (bar := self._bar) is not None:
            bar.total = progress.total or bar.total
            rate = self.bytes / 1e6 / self.seconds
            bar.set_postfix_str(f"{rate:.1f} MB/s read, {self.bad} bad", refresh=False)
            bar.update(progress.images)


@contextlib.contextmanager
def progress_bar(run: Run, action: str) -> Iterator[Tally]:
    """Show progress within the block if standard error is a terminal.

    ``action`` is one word for the work.
    """
    # What matters most comes first: a narrow terminal shows the start.
    shape = (
        "{desc} {percentage:.0f}%|{bar}| {n_fmt}/{total_fmt} {remaining} left{postfix}, {rate_fmt}"
    )
    with _bar(run, desc=action, unit="img", bar_format=shape) as bar:
        yield Tally(run, bar)


@contextlib.contextmanager
def measuring_bar(run: Run, *, unit: str = "measurement") -> Iterator[Watch]:
    """Show the current measurement within the block if standard error is a terminal."""
    shape = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} {unit}{postfix}"
    with _bar(run, desc="measuring", unit=unit, bar_format=shape) as bar:

        def watch(text: str, done: float, total: float) -> None:
            if bar is None:
                return
            bar.total = total
            bar.set_postfix_str(shortened(text, 50), refresh=False)
            bar.update(done - bar.n)
            bar.refresh()

        yield watch


def _bar(run: Run, **details: Any) -> contextlib.AbstractContextManager[Bar | None]:
    """Return a progress bar; None if it would not be seen."""
    if run.output.quiet or not sys.stderr.isatty():
        return contextlib.nullcontext()
    bar: Bar = load("shardkit.cli.bar:Bar")(leave=False, **details)
    return bar


def as_json(problems: Iterable[Problem]) -> list[dict[str, str]]:
    """Return path and reason of problems; options are as the command that runs has them."""
    spell = flags_of(click.get_current_context())
    return [problem.spelled(spell) for problem in problems]


def show_problems(problems: Sequence[Problem], *, limit: int | None = None) -> None:
    """Print bad images, at most ``limit`` for a command that prints all with ``--json``."""
    for text in problem_lines(problems, limit=limit):
        say(f"  bad: {text}", err=True)


def problem_lines(problems: Sequence[Problem], *, limit: int | None) -> list[str]:
    """Return bad images as text, at most ``limit``."""
    listed = as_json(problems[:limit])
    texts = [f"{printable(problem['path'])}: {problem['reason']}" for problem in listed]
    return [*texts, *more_lines(problems, limit)]


def more_lines(items: Sequence[object], limit: int | None) -> list[str]:
    """Return a line with the number of items beyond ``limit``, if there are any."""
    more = 0 if limit is None else len(items) - limit
    return [f"... and {more:,} more (--json prints all)"] if more > 0 else []
