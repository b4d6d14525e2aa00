"""The content digest: equal for equal records in any container, different for any other record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fields import SCHEMA, make_fields, sample_of
from helpers import FORMATS, png
from hostile.damage import edit

from shardkit import (
    BlockShuffle,
    CorruptDataset,
    Field,
    convert,
    make_loader,
    open_dataset,
    reindex,
    verify,
)

CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "key": lambda sample: sample.update(key="another"),
    "image": lambda sample: sample.update(image=png(26, 20, 99)),
    "mask": lambda sample: sample["mask"].__setitem__((0, 0), 77),
    "label": lambda sample: sample.update(label="bee"),
    "tags": lambda sample: sample.update(tags=["old"]),
    "price": lambda sample: sample.update(price=0.75),
    "caption": lambda sample: sample.update(caption="number 2 äß★"),
    "extra": lambda sample: sample["extra"].update(number=3),
    "boxes": lambda sample: sample["boxes"][1].__setitem__(4, 0),
    "latent": lambda sample: sample["latent"].__setitem__((0, 0, 0), 0),
    "half": lambda sample: sample.update(half=sample["half"] + 1),
    "wave": lambda sample: sample.update(wave=sample["wave"].T.copy()),
    "blob": lambda sample: sample.update(blob=b"\0\2"),
    "missing": lambda sample: sample.update(caption=None),
}


def digest_of(samples: list[dict[str, Any]], place: Path, **options: Any) -> str:
    options = {"to": "lmdb", "shuffle": False, "workers": 1, **options}
    made = convert(samples, place, schema=SCHEMA, **options)
    return made.manifests[""].content_digest


def test_format_and_shards_do_not_matter(tmp_path: Path) -> None:
    samples = [sample_of(number) for number in range(10)]
    found = {
        digest_of(samples, tmp_path / f"{to}{size}", to=to, shard_samples=size)
        for to in FORMATS
        for size in (3, 10)
    }
    assert len(found) == 1


@pytest.mark.slow
def test_each_difference_matters(tmp_path: Path) -> None:
    samples = [sample_of(number) for number in range(4)]
    found = {"none": digest_of(samples, tmp_path / "none")}
    for name, change in CHANGES.items():
        changed = [sample_of(number) for number in range(4)]
        change(changed[2])
        found[name] = digest_of(changed, tmp_path / name)
    found["fewer"] = digest_of(samples[:3], tmp_path / "fewer")
    found["order"] = digest_of(samples, tmp_path / "order", shuffle=True)
    assert len(set(found.values())) == len(found), found


def test_class_names_matter(tmp_path: Path) -> None:
    samples = [sample_of(number) | {"label": number % 3} for number in range(4)]
    named = {**SCHEMA, "label": Field("label", classes=("x", "bee", "cat"))}
    other = convert(samples, tmp_path / "b", to="lmdb", schema=named, shuffle=False, workers=1)
    assert digest_of(samples, tmp_path / "a") != other.manifests[""].content_digest


def test_a_forged_digest_is_found(tmp_path: Path) -> None:
    place = make_fields(tmp_path / "made")
    edit(place, lambda manifest: manifest.update(content_digest="0" * 64))
    (finding,) = verify(place, "quick").findings
    assert (finding.file, "content digest" in finding.reason) == ("shardkit.json", True)
    with pytest.raises(CorruptDataset, match="manifest"):
        reindex(place)


@pytest.mark.parametrize("shuffle", [False, True, BlockShuffle(rows=2, buffer=4)])
def test_a_state_continues_in_another_format(tmp_path: Path, shuffle: bool | BlockShuffle) -> None:
    datasets = [
        open_dataset(make_fields(tmp_path / to, to, whole=True), fields=["label", "latent"])
        for to in FORMATS
    ]
    loaders = [
        make_loader(dataset, 3, shuffle=shuffle, seed=4, num_workers=1) for dataset in datasets
    ]
    batches = iter(loaders[0])
    next(batches)
    state = loaders[0].state_dict()
    rest = [labels.tolist() for _, labels in batches]
    for loader in loaders[1:]:
        loader.load_state_dict(state)
        assert [labels.tolist() for _, labels in loader] == rest
    for loader in loaders:
        loader.close()
