"""The process that fuzzes one target; it may crash or hang, which `watch.py` detects.

    python -m scripts.fuzzing.child FOLDER '{"target": ..., "seed": ..., ...}'

In FOLDER it leaves ``input``, the present input, and ``stats.json``, what came of all others.
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
    from scripts.fuzzing.guard import Finding
    from scripts.fuzzing.target import Target

_INSTRUMENTED = {"image": ["shardkit", "PIL"], "tar": ["shardkit", "tarfile"]}
"""The modules whose branches guide the fuzzer, where they are more than shardkit."""


class Run:
    """Tries inputs, one after the other, and keeps account."""

    def __init__(self, folder: Path, target: Target, seconds: float, count: int) -> None:
        self.target = target
        self._folder = folder
        self._outcomes: Counter[str] = Counter()
        self._times: Counter[str] = Counter()
        self._found: dict[str, tuple[str, str, str, str]] = {}
        self._slowest = 0.0
        self._count = count
        self._end = time.monotonic() + seconds
        self._saved = 0.0

    def attempt(self, data: bytes) -> None:
        """Try one input; the last one does not return."""
        from scripts.fuzzing.guard import attempt

        (self._folder / "input").write_bytes(data)
        result = attempt(self.target, data)
        self._outcomes[result.outcome] += 1
        self._slowest = max(self._slowest, result.seconds)
        if result.finding is not None:
            self._note(result.finding, data)
        now = time.monotonic()
        done = now >= self._end or self._outcomes.total() >= self._count
        if done or now > self._saved + 0.5:
            self._saved = now
            self._save()
        if done:
            sys.stderr.flush()
            os._exit(0)  # libFuzzer would not return either

    def _note(self, finding: Finding, data: bytes) -> None:
        self._times[finding.signature] += 1
        *_, shortest = self._found.get(finding.signature, (None,))
        if shortest is None or 2 * len(data) < len(shortest):
            self._found[finding.signature] = (*finding, data.hex())
            self._saved = 0.0  # save it now: the next input may end this process

    def _save(self) -> None:
        stats = {
            "outcomes": self._outcomes,
            "slowest": self._slowest,
            "times": self._times,
            "found": [*self._found.values()],
        }
        beside = self._folder / "stats.new"
        beside.write_text(json.dumps(stats))
        beside.replace(self._folder / "stats.json")


def main(folder: Path, options: dict[str, Any]) -> None:
    """Fuzz until time or number of inputs is up, or the process dies of it."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    with atheris.instrument_imports(include=_INSTRUMENTED.get(options["target"], ["shardkit"])):
        from scripts.fuzzing.guard import limit_process
        from scripts.fuzzing.target import MAX_BYTES
        from scripts.fuzzing.targets import make
    place = folder / "work" / "place"
    place.mkdir(parents=True, exist_ok=True)
    target = make(options["target"], place)
    limit_process()
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
