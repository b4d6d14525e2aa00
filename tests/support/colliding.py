"""Threads and processes that would meet if they took no turns; imports little, as workers do."""

from __future__ import annotations

from pathlib import Path

from shardkit.system.turns import in_turn

ROUNDS = 100


def collide(path: Path, rounds: int = ROUNDS) -> int:
    """Return how often another thread or process was in its turn during this one's."""
    collisions = 0
    for _ in range(rounds):
        with in_turn(), in_turn():
            try:
                path.open("x").close()
                path.unlink()
            except OSError:
                collisions += 1
    return collisions
