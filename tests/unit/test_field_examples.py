"""The examples that train on images with masks and captions learn from the sample data."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch
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


def example(name: str, epochs: int) -> ModuleType:
    """Import an example and shorten its training."""
    spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["EPOCHS"] = epochs
    torch.manual_seed(0)
    return module


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute in one thread, as the scripts do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_a_segmentation_learns(path: Path) -> None:
    segment = example("segment", 3)
    before = segment.overlap(segment.Network(2).eval(), str(path))
    assert segment.overlap(segment.train(str(path)), str(path)) > before + 0.1


@pytest.mark.slow
def test_captions_become_words_and_back(path: Path) -> None:
    caption = example("caption", 2)
    captions = caption.open_dataset(path).column("caption").tolist()
    words = caption.Words(captions)
    assert words.decode(words.encode(captions)) == captions
    network = caption.train(str(path), words)
    assert 0 <= caption.accuracy(network, str(path), words) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("segment", 90.0), ("caption", 70.0)])
def test_the_scripts_learn_what_they_state(path: Path, name: str, least: float) -> None:
    done = run_forked(run_script, [EXAMPLES / f"{name}.py", path], deadline=250)
    assert done.returncode == 0, done.stderr
    (found,) = re.findall(r"^(?:overlap|accuracy) ([0-9.]+)%$", done.stdout, re.MULTILINE)
    assert float(found) >= least
