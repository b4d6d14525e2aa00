"""The corpus of odd and hostile files, each with its expected outcome."""

from __future__ import annotations

from dataclasses import replace

from hostile import animations, files, jpegs, pngs, rasters
from hostile.cases import Case

CASES: tuple[Case, ...] = tuple(
    replace(case, folder=f"{number:03d}")
    for number, case in enumerate(
        (*jpegs.CASES, *pngs.CASES, *animations.CASES, *rasters.CASES, *files.CASES)
    )
)
"""All cases, in the order of the table in the docs."""
