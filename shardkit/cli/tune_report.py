"""What ``shardkit tune`` prints: one screen for people, or JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardkit.cli.console import say
from shardkit.cli.show import amount, line, table
from shardkit.measure.tune.ledger import Rates
from shardkit.measure.tune.limits import LeftOut
from shardkit.measure.tune.search import ENOUGH
from shardkit.measure.tune.trials import LEAST_ROUNDS
from shardkit.measure.tune.tune import TuneReport
from shardkit.system.formatting import percent, size, speedup_words
from shardkit.system.text import printable

_TRIED = 8
_LEFT_OUT = 3
_TOO_MANY = "suggested max number of worker"
"""Of PyTorch's warning, which knows nothing of what a worker waits for."""
_WARM = 0.95
"""Part of the files in memory from which on a dataset counts as warm."""


def show_report(report: TuneReport) -> None:
    """Print a report."""
    chosen = report.chosen
    say(
        f"{printable(report.name)}{_split(report)}: "
        f"{amount(report.images, 'image')}{_sample(report)}, "
        f"{size(report.mean_bytes)} each (measured for {report.seconds:.1f} s)"
    )
    line("best", f"{chosen.candidate}{' (the defaults)' if report.is_default else ''}")
    line("speed", f"{_spread(chosen.rates)}; the first batch after {report.first:.2f} s")
    line("gain", _gain(report))
    if report.held is not None:
        line("GIL", _held(report))
    if report.step_seconds is not None:
        _show_step(report)
    if len(report.starts) > 1:
        ways = (f"{method} {seconds:.2f} s" for method, seconds in report.starts.items())
        line("start", f"the first batch comes after: {', '.join(ways)}")
    line("tried", "images/s: median, lowest, highest, rounds; one round is a first, short look")
    table(
        [
            (
                str(each.candidate),
                *(f"{rate:,.0f}" for rate in (r.median, r.low, r.high)),
                str(r.rounds),
            )
            for each in report.tried
            for r in (each.rates,)
        ],
        limit=_TRIED,
    )
    _show_left_out(report)
    for note in _notes(report):
        line("note", note)
    line("paste", report.call())


def show_written(out: Path) -> None:
    """Print which file has the settings, and how it is used."""
    line("written", f"{out}; or paste make_loader(dataset, shuffle=True, tuned={str(out)!r})")


def as_json(report: TuneReport) -> dict[str, Any]:
    """Return a report as JSON values."""
    return {
        **asdict(report),
        "is_default": report.is_default,
        "headroom": report.headroom,
        "paste": report.call(),
    }


def _split(report: TuneReport) -> str:
    return f", split {printable(report.split)}" if report.split else ""


def _sample(report: TuneReport) -> str:
    return f", {report.measured:,} of them drawn at random" * (report.measured < report.images)


def _spread(rates: Rates) -> str:
    return (
        f"{rates.median:,.0f} images/s ({rates.low:,.0f} to {rates.high:,.0f} in "
        f"{amount(rates.rounds, 'round')})"
    )


def _gain(report: TuneReport) -> str:
    if report.default is None:
        return "the defaults cannot be measured here: see what was left out"
    if report.is_default:
        return "none: no candidate is likely to beat the defaults; keeping them"
    if (report.headroom or 0) >= ENOUGH:
        return (
            f"the cheapest that is enough for the step; the defaults "
            f"({report.default.candidate}) give {_spread(report.default.rates)}"
        )
    default, gain = f"the defaults ({report.default.candidate})", report.gain
    if gain is None:
        rates = _spread(report.default.rates)
        return f"unknown: no round measured both; {default} give {rates}"
    known = gain.rounds >= LEAST_ROUNDS and gain.low > 1
    sure = f", certainly {gain.low:.2f}x or more" if known else ""
    speedup = speedup_words(gain.middle, gain.lowest, gain.highest, gain.rounds)
    return f"{speedup}{sure}, compared with {default}"


def _held(report: TuneReport) -> str:
    what, whose = "making a sample", "the"
    if report.has_transform and report.needs_processes:
        what, whose = "the transform", "a sample's"
    text = f"{what} holds the GIL {percent(report.held or 0)} of {whose} time"
    if report.needs_processes and report.chosen.candidate.engine == "process":
        return f"{text}: worker processes"
    return f"{text}: threads share it" if not report.needs_processes else text


def _show_step(report: TuneReport) -> None:
    step, headroom = report.step_seconds or 0.0, report.headroom or 0.0
    batch = report.chosen.candidate.batch_size
    if headroom >= ENOUGH:
        text = f"loading could feed {headroom:.1f} x what the step takes"
    elif headroom >= 1:
        text = f"loading keeps up, with little to spare: {headroom:.2f} x what the step takes"
    else:
        text = f"the step waits for data: loading gives {headroom:.2f} x what it takes"
    line("step", f"{1000 * step:.1f} ms for {amount(batch, 'image')}: {text}")
    if report.in_loop is not None:
        line(
            "loop",
            f"{report.in_loop.rate:,.0f} images/s with the step; it waits for data "
            f"{percent(report.in_loop.waiting)} of the time",
        )


def _show_left_out(report: TuneReport) -> None:
    alike: dict[str, list[LeftOut]] = {}
    for each in report.left_out:
        alike.setdefault(f"{each.reason}/{each.remedy}", []).append(each)
    for same in list(alike.values())[:_LEFT_OUT]:
        first, more = same[0], f" and {len(same) - 1} more" if len(same) > 1 else ""
        remedy = f" ({first.remedy})" if first.remedy else ""
        line("left out", f"{first.candidate}{more}: {printable(first.reason)}{remedy}")
    if len(alike) > _LEFT_OUT:
        line("left out", f"others, for {len(alike) - _LEFT_OUT:,} reasons (--json prints all)")


def _notes_on_memory(report: TuneReport) -> list[str]:
    known = report.resident is not None
    if known and (report.resident or 0.0) >= _WARM:
        return []
    before = f"{percent(report.resident or 0.0)} of the files were cached at the start"
    if report.from_memory:
        told = [f"{before}: rates are for cached files; a first epoch runs at disk speed"]
        return told if known else []
    before = f"{before}, and " if known else ""
    return [f"{before}no file was read before: rates are at disk speed"]


def _notes(report: TuneReport) -> list[str]:
    notes = [printable(each) for each in report.warnings if _TOO_MANY not in each]
    if len(notes) < len(report.warnings):
        notes.append("PyTorch will warn of more workers than processors: here they were measured")
    default = report.default
    if default and default.candidate.batch_size != report.chosen.candidate.batch_size:
        notes.append(
            "the batch size changes what is learned, too: "
            f"--batch-size {default.candidate.batch_size} keeps it"
        )
    notes += _notes_on_memory(report)
    if report.processes and report.has_transform and report.chosen.candidate.engine == "thread":
        notes.append(
            "random numbers of the transform do not repeat in threads: mark it with "
            "shardkit.with_rng if it may run in several threads"
        )
    if report.load.disturbs:
        notes.append(f"{report.load}: what is best then may not be so on an idle machine")
    if report.out_of_time:
        notes.append("not all was looked at in that time: a longer --budget may find more")
    return notes
