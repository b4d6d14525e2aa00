"""`doctor` names the slow line, the slow images and the files of loaders drawn at random.

The loaders are made from parts that the tests of `doctor` do not use.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from campaign import draw
from helpers import encoded, invoke
from PIL import Image

pytestmark = [pytest.mark.measures, pytest.mark.timeout(600)]

SLOW = (
    "hashlib.blake2b(BYTES * 100).digest()",
    "zlib.compress(NOISE, 9)",
    "time.sleep(0.012)",
    "np.sort(np.tile(STRINGS, 3))",
    "sorted(map(hash, WORDS), reverse=True)",
    "re.findall(r'(a|b)*c', TEXT)",
    "pickle.loads(pickle.dumps(WORDS * 4))",
    "select.select([], [], [], 0.011)",
)
"""Lines of about 10 ms, in Python, in native code, or waiting."""

CHEAP = ("total = sum(range(200))", "name = str(row) * 3", "check = zlib.crc32(BYTES[:100])")

ENGINES = (
    "DataLoader(Own(), 8, num_workers=2)",
    "DataLoader(Own(), 8)",
    "DataLoader(Own(), 8, num_workers=1, multiprocessing_context='spawn')",
    "make_loader(Own(), 8, engine='thread', num_workers=2)",
    "make_loader(Own(), 8, engine='helper', num_workers=2)",
    "make_loader(Own(), 8, engine='process', num_workers=2)",
)

HEAD = """
import hashlib, pickle, re, select, time, zlib
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from shardkit import make_loader

BYTES = bytes(range(256)) * 300
NOISE = np.random.default_rng(0).bytes(400_000)
WORDS = [f"word{n}" for n in range(30_000)]
STRINGS = np.array(WORDS)
TEXT = "ab" * 400
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder for a module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def diagnosed(name: str) -> dict[str, Any]:
    done = invoke(
        "doctor", "--loader", f"{name}:loader", "--step-ms", 2, "--budget", "5s", "--json"
    )
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_a_planted_line_is_named(seed: int, place: Path) -> None:
    rng = draw("lines", seed)
    slow, engine = rng.choice(SLOW), ENGINES[seed % len(ENGINES)]
    body = rng.sample(CHEAP, rng.randint(0, 3))
    body.insert(rng.randint(0, len(body)), f"value = {slow}")
    method = rng.choice(("load", "fetch", "read_one"))
    text = HEAD + "\n" * rng.randint(1, 40)
    text += f"class Own(Dataset):\n    def {method}(self, row):\n"
    text += textwrap.indent("\n".join(body), " " * 8) + "\n"
    text += (
        f"    def __len__(self): return 400\n    def __getitem__(self, row):\n"
        f"        self.{method}(row)\n        return torch.zeros(3, 8, 8), row\n"
    )
    text += f"def loader(): return {engine}\n"
    (place / f"lines{seed}.py").write_text(text)
    line = text[: text.index(slow)].count("\n") + 1

    first, *_ = diagnosed(f"lines{seed}")["profile"]["lines"]
    assert (Path(first["file"]).name, first["line"]) == (f"lines{seed}.py", line)
    assert first["function"] == f"Own.{method}"
    assert first["time"] > 0.5


@pytest.mark.parametrize("seed", range(3))
def test_a_planted_tail_is_named(seed: int, place: Path) -> None:
    rng = draw("tail", seed)
    slow = sorted(rng.sample(range(300), rng.randint(8, 20)))
    text = f"""{HEAD}
class Own(Dataset):
    def __len__(self): return 300
    def __getitem__(self, row):
        time.sleep({rng.uniform(0.06, 0.12):.3f} if row in {slow} else 0.001)
        return torch.zeros(3, 8, 8), row % 7
def loader(): return DataLoader(Own(), 8, num_workers=2)
"""
    (place / f"tail{seed}.py").write_text(text)

    tail = diagnosed(f"tail{seed}")["profile"]["tail"]
    assert tail["images"] < 0.12
    assert tail["time"] > 0.5
    assert {int(name.removeprefix("row ")) for name in tail["examples"]} <= set(slow)
    assert not tail["passing"]


@pytest.mark.parametrize("seed", range(3))
def test_the_files_of_an_own_dataset_are_tried_as_shards(seed: int, place: Path) -> None:
    rng = draw("files", seed)
    kind, side = ("JPEG", "PNG", "WEBP")[seed], rng.randint(24, 60)
    noise = np.random.default_rng(seed)
    for row in range(40):
        file = place / "pictures" / f"set{row % 3}" / f"{row:03d}.{kind.lower()}"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = noise.integers(0, 255, (60, 80, 3), np.uint8)
        file.write_bytes(encoded(Image.fromarray(pixels), kind))
    text = f"""{HEAD}
from pathlib import Path
from PIL import Image
class Own(Dataset):
    def __init__(self):
        self.all = sorted(Path("pictures").glob("*/*"))
    def __len__(self): return len(self.all)
    def __getitem__(self, row):
        image = Image.open(self.all[row]).convert("RGB").resize(({side}, {side}))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), row
def loader(): return DataLoader(Own(), 8, num_workers=1)
"""
    (place / f"files{seed}.py").write_text(text)

    found = diagnosed(f"files{seed}")
    name = "the same images as a shardkit dataset"
    (remedy,) = [each for each in found["diagnosis"]["remedies"] if each["remedy"]["name"] == name]
    assert remedy["verdict"] != "failed"
    assert remedy["remedy"]["decode"] == f"RandomResizedCrop({side})"
