"""Disturb conversions at thousands of calls: kills, torn writes, disk errors, power cuts.

    scripts/crash [--points 2000] [--format hdf5,lmdb] [--fault kill,power] [--case splits]
                  [--seed 1] [--show 5]

Each point disturbs a conversion at one call that reaches the disk, checks the target, and reruns
the conversion. The result must equal that of an undisturbed run, byte for byte. Requires Linux and
gcc.
Exits with 1 if there is any difference.
"""

from __future__ import annotations

import argparse
import errno
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle, islice, product
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1] / "tests/support"))

from faulty import FAIL, FOREVER, SIGNAL_BEFORE, Bench, Fault, compiler
from helpers import FORMATS
from oracle import NAMES, Oracle, Oracles, Point, cut_power, kill_points, power_cuts

ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT)


@dataclass
class Row:
    """What came of one kind of fault in one format."""

    points: int = 0
    hit: int = 0
    """Points at which the fault came to pass."""
    died: int = 0
    resumed: int = 0
    """Conversions that the same command finished."""
    kept: int = 0
    """Shards that those kept."""
    wrong: list[str] = field(default_factory=list)


def kill(oracle: Oracle, count: int, seed: int) -> Iterator[Point]:
    """Kill at ``count`` calls, some in the middle of a write."""
    for fault in kill_points(oracle, max(0, count - 2), seed):
        point = oracle.disturb(fault)
        if not point.outcome.killed:
            point.wrong.append(f"it did not die: {point.outcome.story()}")
        yield point


def fail(oracle: Oracle, count: int, seed: int) -> Iterator[Point]:
    """Let ``count`` calls fail, once or from then on."""
    chosen = random.Random(f"{seed} {oracle.case} fail")
    for number in range(count):
        at = chosen.randint(1, oracle.first.calls)
        times = FOREVER if number % 2 else 1
        yield oracle.fail(Fault(action=FAIL, at=at, times=times, code=chosen.choice(ERRORS)))


def power(oracle: Oracle, count: int, seed: int) -> Iterator[Point]:
    """Cut the power at ``count`` calls, and after the end."""
    cuts = list(power_cuts(oracle, count, seed))
    for at, cut in random.Random(f"{seed} {oracle.case} power").sample(cuts, count):
        yield cut_power(oracle, at, cut)


def interrupt(oracle: Oracle, count: int, seed: int) -> Iterator[Point]:
    """Send SIGTERM, SIGINT or SIGHUP at ``count`` calls, once or twice in a row."""
    chosen = random.Random(f"{seed} {oracle.case} interrupt")
    for _ in range(count):
        code = chosen.choice((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
        at, times = chosen.randint(1, oracle.first.calls), chosen.choice((1, 2))
        yield oracle.disturb(Fault(action=SIGNAL_BEFORE, at=at, times=times, code=code))


FAULTS: dict[str, Callable[[Oracle, int, int], Iterator[Point]]] = {
    "kill": kill,
    "fail": fail,
    "power": power,
    "interrupt": interrupt,
}


def main(arguments: list[str] | None = None) -> int:
    given = _parse(arguments)
    if compiler() is None:
        sys.exit("it needs Linux and gcc")
    pairs = list(product(given.format, given.fault, given.case))
    shares = [given.points // len(pairs)] * len(pairs)
    for number in islice(cycle(range(len(pairs))), given.points % len(pairs)):
        shares[number] += 1
    rows = {(to, fault): Row() for to, fault, _ in pairs}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder) / "bench")
        oracles = Oracles(bench)
        for (to, fault, name), share in zip(pairs, shares, strict=True):
            run(rows[to, fault], fault, oracles.of(name, to), share, given.seed)
        bench.close()
    show(rows, given.show)
    return 1 if any(row.wrong for row in rows.values()) else 0


def run(row: Row, fault: str, oracle: Oracle, count: int, seed: int) -> None:
    """Do ``count`` points of one kind and add them to ``row``."""
    for point in FAULTS[fault](oracle, count, seed):
        row.points += 1
        row.hit += point.outcome.acted > 0 or point.fault.at == 0
        row.died += point.outcome.code != 0
        row.resumed += not point.wrong
        row.kept += point.kept
        where = f"{oracle.case}, call {point.fault.at} of {oracle.first.calls}"
        row.wrong += [f"{where}, {describe(point)}: {wrong}" for wrong in point.wrong]
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{oracle.case}, {fault}: {row.points} points, ")
            sys.stderr.write(f"{len(row.wrong)} differences\033[K")


def describe(point: Point) -> str:
    """Return what happened to a call, for a message."""
    fault = point.fault
    if fault.action == FAIL:
        return f"{errno.errorcode[fault.code]} {'from then on' if fault.times > 1 else 'once'}"
    if point.cut is not None:
        return str(point.cut)
    return f"{signal.Signals(fault.code).name}, action {fault.action}, times {fault.times}"


def show(rows: dict[tuple[str, str], Row], limit: int) -> None:
    """Print the table, and the first differences of each row."""
    titles = ("format", "fault", "points", "hit", "ended", "resumed", "shards kept", "differences")
    lines: list[tuple[str, ...]] = [titles]
    for (to, fault), row in rows.items():
        numbers = (row.points, row.hit, row.died, row.resumed, row.kept, len(row.wrong))
        lines.append((to, fault, *map("{:,}".format, numbers)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            cell.ljust(width) if number < 2 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("| " + " | ".join(cells) + " |")
        if line is titles:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    for row in rows.values():
        for wrong in row.wrong[:limit]:
            words = " ".join(wrong.split())
            print(f"- {words if len(words) < 500 else f'{words[:200]} ... {words[-280:]}'}")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    points = "Conversions that are disturbed, over all formats, faults and cases (2000)."
    parser.add_argument("--points", type=int, default=2000, help=points)
    for name, known in (("format", FORMATS), ("fault", tuple(FAULTS)), ("case", NAMES)):
        text = f"Some of {', '.join(known)}; with a comma between them (all)."
        parser.add_argument(f"--{name}", type=_some(known), default=list(known), help=text)
    parser.add_argument("--seed", type=int, default=1, help="Decides the points (1).")
    parser.add_argument("--show", type=int, default=5, help="Differences shown of each row (5).")
    return parser.parse_args(arguments)


def _some(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return parse


if __name__ == "__main__":
    sys.exit(main())
