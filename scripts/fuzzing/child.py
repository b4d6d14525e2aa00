"""The process that fuzzes one target; it may crash or hang, which `watch.py` detects.

    python -m scripts.fuzzing.child FOLDER '{"target": ..., "seed": ..., ...}'

In FOLDER it leaves ``progress`` (see `shared.py`), ``stats.json``, and ``found/*.json``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

if TYPE_CHECKING:
    from scripts.fuzzing.target import Target

_INSTRUMENTED = {"image": ["shardkit", "PIL"], "tar": ["shardkit", "tarfile"]}
"""The modules whose branches guide the fuzzer, where they are more than shardkit."""

_SAME = 3
"""As many of the findings that look the same are kept."""


class Run:
    """Tries inputs, one after the other, and keeps account."""

    def __init__(self, folder: Path, target: Target, seconds: float, count: int) -> None:
        from scripts.fuzzing.shared import Progress

        self.target = target
        self._folder = folder
        self._found = folder / "found"
        self._found.mkdir(exist_ok=True)
        self._progress = Progress(folder / "progress")
        self._outcomes: Counter[str] = Counter()
        self._sites: set[str] = set()
        self._same: Counter[str] = Counter()
        self._slowest = 0.0
        self._count = count
        self._end = time.monotonic() + seconds
        self._saved = 0.0

    def attempt(self, data: bytes) -> None:
        """Try one input; the last one does not return."""
        from scripts.fuzzing.guard import attempt

        self._progress.begin(data)
        result = attempt(self.target, data)
        self._progress.end()
        self._sites.add(result.site)
        self._outcomes[result.outcome] += 1
        self._slowest = max(self._slowest, result.seconds)
        if result.finding is not None:
            self._note(result.finding, data)
        now = time.monotonic()
        done = now >= self._end or self._progress.executions >= self._count
        if done or now > self._saved + 0.5:
            self._saved = now
            self._save()
        if done:
            sys.stderr.flush()
            os._exit(0)  # libFuzzer would not return either

    def _note(self, finding: Any, data: bytes) -> None:
        self._same[finding.signature] += 1
        if self._same[finding.signature] <= _SAME:
            value = {**finding._asdict(), "data": data.hex()}
            (self._found / f"{os.getpid()}-{self._progress.executions}.json").write_text(
                json.dumps(value)
            )

    def _save(self) -> None:
        stats = {
            "executions": self._progress.executions,
            "outcomes": dict(self._outcomes),
            "sites": len(self._sites),
            "slowest": round(self._slowest, 3),
            "findings": dict(self._same),
        }
        beside = self._folder / "stats.new"
        beside.write_text(json.dumps(stats))
        beside.replace(self._folder / "stats.json")


def main(folder: Path, options: dict[str, Any]) -> None:
    """Fuzz until time or number of inputs is up, or the process dies of it."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    with atheris.instrument_imports(include=_INSTRUMENTED.get(options["target"], ["shardkit"])):
        from scripts.fuzzing.guard import limit_memory
        from scripts.fuzzing.target import MAX_BYTES
        from scripts.fuzzing.targets import make
    place = folder / "work" / "place"
    place.mkdir(parents=True, exist_ok=True)
    target = make(options["target"], place)
    limit_memory()
    run = Run(folder, target, options["seconds"], options["count"])
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for number, data in enumerate(target.seeds):
        (corpus / f"seed-{number:03d}").write_bytes(data)

    def mutate(data: bytes, longest: int, number: int) -> bytes:
        change: Callable[[bytes], bytes] = lambda data: atheris.Mutate(data, longest)  # noqa: E731
        return target.mutate(data, random.Random(number), change)[:longest]

    signals = ("abrt", "segv", "bus", "fpe", "ill", "int", "term")
    quiet = [f"-handle_{name}=0" for name in signals]
    limits = ["-timeout=100000", "-rss_limit_mb=0", "-malloc_limit_mb=0", f"-max_len={MAX_BYTES}"]
    more = [f"-seed={options['seed'] + 1}", "-print_final_stats=0", "-verbosity=0"]
    arguments = [sys.argv[0], str(corpus), *quiet, *limits, *more, "-len_control=0"]
    atheris.Setup(arguments, run.attempt, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
