"""The examples that train on images with masks and captions learn from the sample data."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from forked import run_forked, run_script

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample data with masks, captions and boxes, as the docstrings of the scripts say."""
    target = tmp_path_factory.mktemp("examples") / "fields"
    convert = runpy.run_path(str(EXAMPLES / "convert_fields.py"))["main"]
    convert(str(ROOT / "sample_data"), str(ROOT / "docs" / "examples" / "annotations"), str(target))
    return target


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("segment", 90.0), ("caption", 70.0)])
def test_the_scripts_learn_what_they_state(path: Path, name: str, least: float) -> None:
    done = run_forked(run_script, [EXAMPLES / f"{name}.py", path], deadline=250)
    assert done.returncode == 0, done.stderr
    (found,) = re.findall(r"^(?:overlap|accuracy) ([0-9.]+)%$", done.stdout, re.MULTILINE)
    assert float(found) >= least
