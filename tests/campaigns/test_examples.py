"""The scripts of the docs learn what they state from the sample data."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from campaign import cases
from forked import run_forked, run_script

from shardkit import convert

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"

LEAST = {"train": 95.0, "segment": 90.0, "caption": 70.0}
"""Percent. `train.py` states 100, and 99 for other seeds: this is four images below, since another
machine may sum in another order."""


@pytest.mark.parametrize("name", cases(LEAST, 1))
def test_the_scripts_learn_what_they_state(tmp_path: Path, name: str) -> None:
    script, dataset = EXAMPLES / f"{name}.py", tmp_path / "dataset"
    if name == "train":
        convert(ROOT / "sample_data", dataset, to="lmdb")
    else:  # with masks, captions and boxes, as the docstrings say
        main = runpy.run_path(str(EXAMPLES / "convert_fields.py"))["main"]
        main(str(ROOT / "sample_data"), str(EXAMPLES / "annotations"), str(dataset))

    done = run_forked(run_script, [script, dataset, tmp_path / "run"], deadline=250)

    assert done.returncode == 0, done.stderr
    (found,) = re.findall(r"^(?:overlap|accuracy) ([0-9.]+)%$", done.stdout, re.MULTILINE)
    assert LEAST[name] <= float(found) <= 100
