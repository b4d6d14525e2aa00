"""The conformance suite for sources: listing, reading, and datasets converted from them."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.attaching.attach import attach
from shardkit.contracts import AttachableSource, Located, PartedSource, Scan, Source, SourceKind
from shardkit.conversion.convert import convert
from shardkit.errors import BadImage, BadImages
from shardkit.registry import get_source
from shardkit.system.pool import Progress
from shardkit.testing.tools import NEW_PROCESS, call_in, contents, open_files, random_image
from shardkit.torch.data.datasets import open_dataset
from shardkit.verification.repair import repair
from shardkit.verification.verify import verify

_NAMES = ("cat/1.png", "dog/2.png", "cat/3.png", "bird/größer.png", "dog/a b.png", "bird/6.png")
_RESERVED = {"kind", "images", "limit", "order", "seed", "division"}


class SourceConformance:
    """Tests of a source.

    Subclass it in a test module, with methods to make and damage a source::

        class TestCsv(SourceConformance):
            name = "csv"

            def make(self, folder, images):
                ...  # write the images and the table below ``folder``
                return folder / "table.csv"

            def spoil(self, path, image):
                (path.parent / image).write_bytes(b"")

    The source must be registered.
    """

    name: str
    """Name of the source in the registry."""

    pixels: bool = False
    """Whether the source stores plain pixels, so that any bytes are an image."""

    labels: bool = True
    """Whether its records have labels."""

    options: Mapping[str, Any] = {}
    """Options to open it with."""

    in_place: bool = True
    """Whether its files can be attached, if those of its kind can be: they are not compressed."""

    def make(self, folder: Path, images: Mapping[str, bytes]) -> Path:
        """Make a source below ``folder`` and return its path.

        Args:
            folder: An empty folder.
            images: Content of each PNG file, by path; the path's first part is the class.
        """
        raise NotImplementedError

    def spoil(self, path: Path, image: str) -> None:
        """Overwrite an image of the source at ``path`` with bytes that are not an image.

        If the source stores plain pixels, change some of them.
        """
        raise NotImplementedError

    @pytest.fixture
    def kind(self) -> SourceKind:
        """The kind under test; override the fixture to use an unregistered one."""
        return get_source(self.name)

    @pytest.fixture
    def images(self) -> dict[str, bytes]:
        """Content of each PNG file, by path."""
        return {name: _png(seed) for seed, name in enumerate(_NAMES)}

    @pytest.fixture
    def path(self, tmp_path: Path, images: dict[str, bytes]) -> Path:
        """A source of `images`."""
        (tmp_path / "source").mkdir()
        return self.make(tmp_path / "source", images)

    @pytest.fixture
    def source(self, kind: SourceKind, path: Path) -> Source:
        """The open source at `path`."""
        return kind.open(path, **self.options)

    def test_the_source_has_the_name_of_its_kind(self, kind: SourceKind, source: Source) -> None:
        assert source.kind == kind.name
        assert str(source)

    def test_a_scan_lists_each_image_once(self, source: Source, images: dict[str, bytes]) -> None:
        scan = source.scan()
        assert _contents(scan) == self._expected(images)
        (listed,) = scan.splits.values()
        for unique in ({entry.path for entry in listed.entries}, {e.key for e in listed.entries}):
            assert len(unique) == len(images)
        for entry, record in zip(listed.entries, listed.read(range(len(listed))), strict=True):
            assert (record.key, record.label) == (entry.key, entry.label)
            assert record.meta["path"] == entry.path
            assert self.pixels or len(record.fields["png"]) == entry.bytes

    def test_scans_are_repeatable(self, kind: SourceKind, path: Path) -> None:
        first = _listed(kind.open(path, **self.options).scan())
        assert _listed(kind.open(path, **self.options).scan()) == first
        assert call_in(NEW_PROCESS, _scan, kind.open(path, **self.options)) == first

    def test_parts_list_what_a_scan_lists(self, source: Source) -> None:
        """Only if it is a `shardkit.contracts.PartedSource`."""
        if not isinstance(source, PartedSource):
            return
        parts = source.parts(2)[1]
        listed = [listed_entry for part in parts for listed_entry in source.list_part(part).entries]
        splits = source.scan().splits.values()
        assert listed == [(images.split, entry) for images in splits for entry in images.entries]

    def test_files_have_what_is_read(self, source: Source) -> None:
        """Only if `shardkit.contracts.Source.files` returns some."""
        (images,) = source.scan().splits.values()
        for path, record, entry in zip(
            images.files() or (), images.read(range(len(images))), images.entries, strict=False
        ):
            status = os.stat(path)
            assert (status.st_size, status.st_mtime_ns) == (entry.bytes, entry.stamp)
            assert Path(os.fsdecode(path)).read_bytes() == record.fields["png"]

    def test_files_are_read_in_place(
        self, kind: SourceKind, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Only if its kind has `shardkit.contracts.Attaching`."""
        attaching = kind.attaching
        in_files = attaching is not None and not attaching.whole_files
        assert isinstance(source, AttachableSource) == in_files
        if attaching is None or not self.in_place:
            return
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # remembers permissions
        if isinstance(source, AttachableSource):
            self._check_places(source)
        attach(source, tmp_path / "index")
        _convert(source, tmp_path / "made", shuffle=False)
        attached, converted = (
            open_dataset(tmp_path / name, decode="numpy") for name in ("index", "made")
        )
        assert list(attached.paths) == list(converted.paths)
        for row in range(len(converted)):
            assert np.array_equal(attached[row][0], converted[row][0])
        assert verify(tmp_path / "index", "decode").ok

    def _check_places(self, source: AttachableSource) -> None:
        """Check that the files have the fields where the source says."""
        (images,) = source.scan().splits.values()
        by_file = [(path, members.entries) for path, members in source.by_file(images)]
        assert [entry for _, members in by_file for entry in members] == list(images.entries)
        for path, members in by_file:
            located = [*source.located(images.split, members)]
            for item in located:
                assert isinstance(item, Located)
                for name, offset in item.offsets.items():
                    data = bytes(item.record.fields[name])
                    assert path.read_bytes()[offset:].startswith(data)

    def test_a_pickled_source_reads_the_same(self, source: Source) -> None:
        (images,) = source.scan().splits.values()
        expected = images.read(range(len(images)))
        assert len(pickle.dumps(source)) < 4000
        assert call_in(NEW_PROCESS, images.read, range(len(images))) == expected

    def test_threads_read_the_same(self, source: Source) -> None:
        (images,) = source.scan().splits.values()
        rows = [row % len(images) for row in range(60)]
        with ThreadPoolExecutor(4) as pool:
            records = list(pool.map(lambda row: images.read([row])[0], rows))
        assert records == images.read(rows)

    def test_reading_leaves_few_files_open(self, source: Source) -> None:
        before = open_files()
        (images,) = source.scan().splits.values()
        for _ in range(20):
            images.read(range(len(images)))
        assert open_files() <= before + 10  # those of a dataset's index

    def test_the_description_is_json_without_absolute_paths(
        self, source: Source, tmp_path: Path
    ) -> None:
        for split in source.scan().splits:
            described = dict(source.describe(split))
            assert json.loads(json.dumps(described)) == described
            assert isinstance(described["name"], str)
            assert not described.keys() & _RESERVED
            assert str(tmp_path) not in json.dumps(described)

    def test_a_source_is_found_from_its_description(
        self, kind: SourceKind, source: Source, path: Path
    ) -> None:
        scan = source.scan()
        described = {split: source.describe(split) for split in scan.splits}
        restored = kind.find(path, described)
        for images in scan.splits.values():  # as a job does, which has the entries
            assert [restored.read(images.split, entry) for entry in images.entries] == images.read(
                range(len(images))
            )
        again = restored.scan(scan.classes)
        assert _listed(again) == _listed(scan)
        assert again.classes == scan.classes
        for split, images in scan.splits.items():
            assert list(source.relist(again, split, ())) == list(images.entries)

    def test_labels_follow_given_classes(self, source: Source, images: dict[str, bytes]) -> None:
        if not self.labels:
            pytest.skip("it has no labels")
        classes = ["none", *reversed(source.scan().classes or ())]
        scan = source.scan(classes)
        assert list(scan.classes or ())[: len(classes)] == classes
        assert _contents(scan) == self._expected(images)

    def test_a_spoiled_image_is_a_bad_image(self, source: Source, path: Path) -> None:
        (images,) = source.scan().splits.values()
        self.spoil(path, images.entries[0].path)
        with pytest.raises(BadImage):
            images.read([0])
        assert images.locate(0)
        if self.pixels:
            return
        with pytest.raises(BadImage):
            source.scan().splits[images.split].read([0])

    def test_the_number_of_workers_does_not_change_a_byte(
        self, source: Source, tmp_path: Path
    ) -> None:
        _convert(source, tmp_path / "one", workers=1)
        _convert(source, tmp_path / "two", workers=2)
        assert contents(tmp_path / "one") == contents(tmp_path / "two")

    def test_an_interrupted_conversion_resumes_to_the_same_bytes(
        self, kind: SourceKind, path: Path, tmp_path: Path
    ) -> None:
        _convert(kind.open(path, **self.options), tmp_path / "whole")

        images = 0

        def stop(progress: Progress) -> None:
            nonlocal images
            images += progress.images
            if images > 2:  # the first shard is finished
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            convert(
                kind.open(path, **self.options),
                tmp_path / "made",
                to="lmdb",
                shard_samples=2,
                on_progress=stop,
            )
        assert not (tmp_path / "made" / "shardkit.json").exists()
        resumed = convert(
            kind.open(path, **self.options), tmp_path / "made", to="lmdb", shard_samples=2
        )
        assert resumed.reused_shards == 1
        assert contents(tmp_path / "made") == contents(tmp_path / "whole")

    def test_a_finished_conversion_is_recognized(
        self, kind: SourceKind, path: Path, tmp_path: Path
    ) -> None:
        _convert(kind.open(path, **self.options), tmp_path / "made")
        assert convert(
            kind.open(path, **self.options), tmp_path / "made", to="lmdb", shard_samples=2
        ).unchanged

    def test_a_dataset_is_verified_against_its_source(
        self, source: Source, path: Path, tmp_path: Path
    ) -> None:
        _convert(source, tmp_path / "made")
        dataset = open_dataset(tmp_path / "made", decode="bytes")
        samples = [dataset[row] for row in range(len(dataset))]
        classes = (*(dataset.classes or ()), "")  # without labels, they are -1
        contents = sorted((classes[label], image) for image, label in samples)
        assert contents == _contents(source.scan())
        result = verify(tmp_path / "made", against=path)
        assert result.findings == []
        assert result.source is not None
        assert (result.source.files, result.source.left_out) == (len(dataset), 0)
        self.spoil(path, dataset.paths[0])
        changed = verify(tmp_path / "made", against=path)
        assert len(changed.findings) == 1

    def test_a_dataset_is_repaired_from_its_source(
        self, source: Source, path: Path, tmp_path: Path
    ) -> None:
        _convert(source, tmp_path / "made")
        before = contents(tmp_path / "made")
        shard = open_dataset(tmp_path / "made").manifest.shards[1].name
        (tmp_path / "made" / shard).unlink()
        assert repair(tmp_path / "made", path).findings == []
        assert contents(tmp_path / "made") == before

    def test_skipped_images_stay_skipped_in_verify_and_repair(
        self, source: Source, path: Path, tmp_path: Path
    ) -> None:
        if self.pixels:
            pytest.skip("any bytes are an image")
        (images,) = source.scan().splits.values()
        self.spoil(path, images.entries[3].path)
        with pytest.raises(BadImages):
            _convert(source, tmp_path / "made")
        _convert(source, tmp_path / "skipped", on_error="skip")
        assert len(open_dataset(tmp_path / "skipped")) == len(images) - 1
        assert verify(tmp_path / "skipped", against=path).findings == []

    def test_listed_images_are_left_out_and_stay_known(
        self, source: Source, path: Path, tmp_path: Path
    ) -> None:
        (images,) = source.scan().splits.values()
        by_key = images.entries[2]
        by_path = images.entries[4]
        (tmp_path / "list").write_text(f"key:{by_key.key}\n{by_path.path}\n")
        dataset = tmp_path / "made"
        convert(source, dataset, to="lmdb", shard_samples=2, exclude=tmp_path / "list")
        expected = {entry.path for entry in images.entries} - {by_key.path, by_path.path}
        assert {*open_dataset(dataset).paths} == expected
        report = dataset / "ignored.jsonl"
        shard = open_dataset(dataset).manifest.shards[0].name
        for damaged in (None, report, dataset / shard):
            if damaged is not None:
                damaged.unlink()
                assert repair(dataset, path).findings == []
            assert verify(dataset, against=path).findings == []

    def _expected(self, images: Mapping[str, bytes]) -> list[tuple[str, bytes]]:
        """Return class name and bytes of each image, sorted; "" without labels."""
        named = ((name.partition("/")[0] * self.labels, data) for name, data in images.items())
        return sorted(named)


def _convert(source: Source, target: Path, **options: Any) -> None:
    convert(source, target, to="lmdb", shard_samples=2, **options)


def _png(seed: int) -> bytes:
    """Return a small PNG file of random pixels."""
    file = io.BytesIO()
    random_image(seed).save(file, "png")
    return file.getvalue()


def _scan(source: Source) -> dict[str, Sequence[object]]:
    return _listed(source.scan())


def _listed(scan: Scan) -> dict[str, Sequence[object]]:
    return {split: list(images.entries) for split, images in scan.splits.items()}


def _contents(scan: Scan) -> list[tuple[str, bytes]]:
    """Return class name and bytes of each image, sorted."""
    (images,) = scan.splits.values()
    records = images.read(range(len(images)))
    classes = (*(scan.classes or ()), "")  # without labels, they are -1
    return sorted((classes[r.label], r.fields["png"]) for r in records)
