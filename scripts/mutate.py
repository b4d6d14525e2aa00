"""Seed bugs into the writer, the checker and the loader, one at a time, and check that tests fail.

    .venv/bin/python scripts/mutate.py            all of them; exits with 1 if one survives
    .venv/bin/python scripts/mutate.py -k digest  bugs whose name contains a word

Each bug changes a few words of the source, in a copy. A bug that no test notices shows a missing
test.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DEADLINE = 250
PYTEST = "-m pytest -x -q -p no:cacheprovider -m 'not slow'"


class Mutant(NamedTuple):
    """One seeded bug, and the tests that must notice it."""

    name: str
    file: str
    """In the package."""
    old: str
    new: str
    tests: str
    """Arguments of pytest: files, and words that select tests."""


BUILD, EXAMINE = "conversion/build.py", "verification/shard_check.py"
INDEXING = "dataset/index_builder.py"
WORK = "conversion/staging.py"
VERIFY = "verification/verify.py"
REPAIR = "verification/repair.py"
RECEIPT = "verification/receipt.py"
MUTANTS = (
    # The writer.
    Mutant(
        "a record is dropped",
        BUILD,
        "                records.append(record)\n",
        "                if row != 2:\n                    records.append(record)\n",
        "tests/unit/conversion/test_build.py",
    ),
    Mutant(
        "a record is dropped and not missed",
        BUILD,
        "            else:\n                records.append(record)\n",
        "            else:\n"
        "                if row == 2:\n"
        "                    continue\n"
        "                records.append(record)\n",
        "tests/unit/conversion/test_build.py -k in_order",
    ),
    Mutant(
        "two records are swapped",
        BUILD,
        "        for row in range(len(source)):\n",
        "        for row in [*range(len(source))][::-1]:\n",
        "tests/unit/conversion/test_build.py -k in_order",
    ),
    Mutant(
        "a bad image is left out silently",
        BUILD,
        "                tally.bad.append(Problem(",
        "                (Problem(",
        "tests/unit/conversion/test_build.py",
    ),
    Mutant(
        "what was written is not compared when read back",
        BUILD,
        "if checksum != next(expected, None):",
        "if next(expected, None) is None:",
        "tests/unit/conversion/test_build.py -k reads_back",
    ),
    Mutant(
        "lost records are not missed when read back",
        BUILD,
        "    if len(set(index.keys)) != len(checksums):",
        "    if False:",
        "tests/unit/conversion/test_build.py -k reads_back",
    ),
    Mutant(
        "a shard made of something else is used again",
        BUILD,
        'if value["made_of"] != task.digest:',
        'if value["made_of"] is None:',
        "tests/unit/conversion/test_build.py tests/unit/conversion/test_convert.py "
        "-k 'something_else or fixed'",
    ),
    Mutant(
        "a shard that the disk has changed is used again",
        BUILD,
        "            and has_sha256(task.path, result.entry.sha256)\n",
        "",
        "tests/unit/conversion/test_build.py -k disk_has_changed",
    ),
    Mutant(
        "a lack of memory is an image's fault",
        BUILD,
        "            except MemoryError:  #",
        "            except ZeroDivisionError:  #",
        "tests/unit/conversion/test_build.py -k memory",
    ),
    Mutant(
        "a file is renamed before it is on the disk",
        "system/files.py",
        "        sync(temporary)\n        temporary.replace(path)\n",
        "        temporary.replace(path)\n",
        "tests/unit/system/test_files.py",
    ),
    Mutant(
        "a partial write counts as complete",
        "system/files.py",
        "    while rest:  # a disk",
        "    if rest:  # a disk",
        "tests/unit/system/test_files.py",
    ),
    Mutant(
        "the manifest is moved first",
        WORK,
        "key=lambda path: (path.name == MANIFEST_NAME, ",
        "key=lambda path: (path.name != MANIFEST_NAME, ",
        "tests/unit/conversion/test_staging.py tests/unit/conversion/test_convert.py "
        "-k 'last or any_step'",
    ),
    Mutant(
        "an older dataset loses its shards before its manifest",
        WORK,
        "        for name in manifests:\n            remove(self.target, name)\n",
        "        for name in reversed(old):\n            remove(self.target, name)\n",
        "tests/unit/conversion/test_convert.py -k 'any_step and single'",
    ),
    Mutant(
        "leftovers of earlier work are published",
        WORK,
        "            if self.target / name not in wanted:",
        "            if False:",
        "tests/unit/conversion/test_convert.py -k 'removed_between or any_step'",
    ),
    Mutant(
        "two conversions work in one place",
        "conversion/lock.py",
        "        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "",
        "tests/unit/conversion/test_staging.py -k only_one",
    ),
    Mutant(
        "a changed file of the source is not noticed",
        "conversion/fingerprint.py",
        "    found += _file_differences(compared, bad)\n",
        "",
        "tests/unit/conversion/test_staging.py -k different",
    ),
    # The checker.
    Mutant(
        "a shard's digest is not compared",
        VERIFY,
        "        if examined.sha256 != task.entry.sha256:",
        "        if False:",
        "tests/unit/verification/test_verify.py -k 'of_any_file or in_place'",
    ),
    Mutant(
        "the digest of the index is not compared",
        VERIFY,
        "sha256_of(path, place) != entry.sha256:",
        "False:",
        "tests/unit/verification/test_verify.py -k column_of_the_index",
    ),
    Mutant(
        "a missing file is not missed",
        VERIFY,
        '            blame(entry.name, "it is missing")\n',
        "",
        "tests/unit/verification/test_verify.py -k missing_file",
    ),
    Mutant(
        "a split's manifest is not compared",
        VERIFY,
        "        if manifest.digest != digest:",
        "        if False:",
        "tests/unit/verification/test_verify.py -k 'another_valid or swapped_splits'",
    ),
    Mutant(
        "a record's checksum is not compared by verify",
        INDEXING,
        '        for name in ("checksum", "label"',
        '        for name in ("label"',
        "tests/unit/verification/test_verify.py -k byte_of_an_image",
    ),
    Mutant(
        "a record's key is not compared",
        INDEXING,
        "    if found.record.key != index.keys[row]:",
        "    if False:",
        "tests/unit/verification/test_verify.py -k to_the_key",
    ),
    Mutant(
        "a shard's own metadata is not compared",
        EXAMINE,
        '    if not wrong:\n        return []\n    reason = f"{task.entry.name} was',
        '    if wrong or not wrong:\n        return []\n    reason = f"{task.entry.name} was',
        "tests/unit/verification/test_record_comparison.py -k lie",
    ),
    Mutant(
        "a record's checksum is not compared on reading",
        "dataset/located.py",
        "            if checksum(head, data) != self._checksums[number]:",
        "            if False:",
        "tests/unit/dataset/test_shardset.py",
    ),
    Mutant(
        "a damaged row of the index is accepted",
        "dataset/located.py",
        "        if (wrong := damaged_rows(self._index)).any():",
        "        if (wrong := damaged_rows(self._index)).all() and len(self) > 9:",
        "tests/unit/dataset/test_shardset.py",
    ),
    Mutant(
        "the neighboring image is read",
        "dataset/shardset.py",
        "        index = self.entries_of(field).read(rows)\n",
        "        index = self.entries_of(field).read((rows + 1) % len(self))\n",
        "tests/unit/dataset/test_shardset.py",
    ),
    Mutant(
        "a dataset that took another's place is read",
        "dataset/directory.py",
        "        if stamp != self._stamp:",
        "        if False:",
        "tests/unit/dataset/test_shardset.py tests/unit/torch/data/test_datasets.py "
        "-k 'rewritten or place or replaced or same_dataset'",
    ),
    Mutant(
        "a part of a read is taken for all of it",
        "dataset/handles.py",
        "        while found < len(buffer):",
        "        if found < len(buffer):",
        "tests/unit/dataset/test_handles.py",
    ),
    Mutant(
        "a shard of another size is read",
        "dataset/handles.py",
        "        if found.st_size != size:",
        "        if False:",
        "tests/unit/dataset/test_handles.py",
    ),
    Mutant(
        "a forked child shares the files of its parent",
        "dataset/handles.py",
        "os.register_at_fork(after_in_child=_POOL.reset)\n",
        "",
        "tests/unit/dataset/test_handles.py",
    ),
    Mutant(
        "the checksum of a tar header is not compared",
        "formats/webdataset.py",
        "        if stated != _sum(header) - _sum(header[148:156]) + 8 * 0x20:",
        "        if False:",
        "tests/unit/formats/test_webdataset.py",
    ),
    # Loading.
    Mutant(
        "two epochs have one order",
        "sampling/order.py",
        'derive_key("rows", self.seed, epoch)',
        'derive_key("rows", self.seed, epoch // 2)',
        "tests/unit/sampling/test_order.py",
    ),
    Mutant(
        "all samples draw the same numbers",
        "sampling/order.py",
        "_hash(sample + 1))",
        "_hash(1))",
        "tests/unit/sampling/test_order.py",
    ),
    Mutant(
        "two ranks read the same batches",
        "sampling/ranks.py",
        "consumed + rank_shard.rank * first",
        "consumed + rank_shard.rank // 2 * first",
        "tests/unit/sampling/test_ranks.py",
    ),
    Mutant(
        "the last step of an epoch is lost",
        "sampling/ranks.py",
        "    if rank_shard.drop_last or rest <= 0:",
        "    if True:",
        "tests/unit/sampling/test_ranks.py",
    ),
    Mutant(
        "a resumed run repeats a batch",
        "torch/data/resume.py",
        "            self._epoch, self._consumed = run.epoch, consumed\n",
        "            self._epoch, self._consumed = run.epoch, max(0, consumed - 2)\n",
        "tests/unit/torch/data/test_schedule.py",
    ),
    Mutant(
        "the next epoch does not continue where the last one ended",
        "sampling/epochs.py",
        "divmod(epoch * self.size(order), each)",
        "divmod(epoch * each, each)",
        "tests/unit/sampling/test_epochs.py",
    ),
    Mutant(
        "a group's rows come in the same order in each turn",
        "sampling/weighted.py",
        "keys = step_keys(keys, turns.astype(np.uint64))",
        "keys = step_keys(keys, 0 * turns.astype(np.uint64))",
        "tests/unit/sampling/test_weighted.py",
    ),
    Mutant(
        "views draw the same random numbers",
        "torch/data/schedule.py",
        "self.repeats * views + view",
        "self.repeats * views",
        "tests/unit/torch/test_sampling.py -k views",
    ),
    Mutant(
        "padding counts as samples",
        "torch/data/schedule.py",
        "                padding=end - start - len(real),\n",
        "                padding=0,\n",
        "tests/unit/torch/data/test_schedule.py",
    ),
    Mutant(
        "threads give batches in the order in which they are ready",
        "torch/engine/threads.py",
        "            if not self._in_order:",
        "            if True:",
        "tests/unit/torch/engine/test_threads.py",
    ),
    Mutant(
        "a block is filled again while its batch is in use",
        "torch/data/memory.py",
        "        lent, number = buffer.reshape(shape), id(buffer)",
        "        lent, number = buffer.reshape(shape), id(buffer)\n"
        "        self._free[size].append(buffer)",
        "tests/unit/torch/data/test_memory.py",
    ),
    Mutant(
        "a slot is filled again while its batch is in use",
        "torch/engine/ring.py",
        "if self._flags[number] == _FREE and slot.lent() is None",
        "if slot.lent() is None",
        "tests/unit/torch/engine/test_ring.py",
    ),
    Mutant(
        "a slot is filled again while a worker uses it",
        "torch/engine/ring.py",
        "if self._flags[number] == _FREE and slot.lent() is None",
        "if self._flags[number] == _FREE",
        "tests/unit/torch/engine/test_ring.py",
    ),
    Mutant(
        "a stored image of another size is decoded",
        "dataset/decode.py",
        "        if pixels.shape != shape and not (any(at_least) and",
        "        if False and not (any(at_least) and",
        "tests/unit/dataset/test_decode.py",
    ),
    Mutant(
        "a part of an image is taken one pixel too far left",
        "dataset/decode.py",
        "            return Part(piece, inside.left, inside.top, eighths / 8)",
        "            return Part(piece, inside.left + 1, inside.top, eighths / 8)",
        "tests/unit/dataset/test_decode.py",
    ),
    # Records with several fields.
    Mutant(
        "a column is not compared with the records",
        INDEXING,
        "        if value != index.columns[name].packed(row):",
        "        if False:",
        "tests/unit/conversion/test_convert_fields.py -k lie_of_the_index",
    ),
    Mutant(
        "the entry of another field is not compared with the records",
        INDEXING,
        "        if packed != index.apart[name][row].tobytes():",
        "        if False:",
        "tests/unit/conversion/test_convert_fields.py -k lie_of_the_index",
    ),
    Mutant(
        "boxes are not turned with their image",
        "conversion/geometry.py",
        "    return np.stack(turned.get(view.orientation, (left, top, right, bottom)), axis=1)",
        "    return np.stack(turned.get(0, (left, top, right, bottom)), axis=1)",
        "tests/unit/conversion/test_record_geometry.py -k boxes",
    ),
    Mutant(
        "a missing value counts as one",
        "dataset/columns.py",
        "    present = None if has.all() else has",
        "    present = None",
        "tests/unit/dataset/test_columns.py",
    ),
    Mutant(
        "a mask is cropped by the window of another record",
        "torch/data/images.py",
        "move_mask(mask, frame_of(self.pieces[number], ",
        "move_mask(mask, frame_of(self.pieces[0], ",
        "tests/unit/torch/data/test_fields.py -k one_window",
    ),
    Mutant(
        "boxes and keypoints are not flipped with their image",
        "codecs/geometry.py",
        "        moved[:, 0::2] = frame.size[0] - moved[:, 0::2]\n",
        "        pass\n",
        "tests/unit/codecs/test_geometry.py -k exact",
    ),
    Mutant(
        "left and right stay in a flipped image",
        "codecs/geometry.py",
        "if frame.flip and names else moved",
        "if False else moved",
        "tests/unit/codecs/test_geometry.py -k keypoints",
    ),
    Mutant(
        "a keypoint outside of the crop stays",
        "codecs/geometry.py",
        "    seen = (points[..., 2:] > 0) & ",
        "    seen = (points[..., 2:] > 0) | ",
        "tests/unit/codecs/test_geometry.py -k keypoints",
    ),
    Mutant(
        "a missing number is read as zero",
        "torch/data/values.py",
        "    if present is not None and not present.all():\n",
        "    if False:\n",
        "tests/unit/torch/data/test_fields.py -k each_kind",
    ),
    Mutant(
        "the rows of a batch have the boxes of the first",
        "torch/data/values.py",
        "        value = column.value(number)\n",
        "        value = column.value(0)\n",
        "tests/unit/torch/data/test_fields.py -k a_batch_has",
    ),
    Mutant(
        "a selection reads other rows",
        "torch/data/datasets.py",
        "BatchRows(self._shards, self._stored(rows), context)",
        "BatchRows(self._shards, self._shards.resolve_rows(rows), context)",
        "tests/unit/torch/data/test_fields.py -k selection",
    ),
    # The comparison with the source, receipts, repair.
    Mutant(
        "a file that is not in the dataset is not missed",
        "verification/source_match.py",
        "        for path in sorted(by_path.keys() - there)",
        "        for path in sorted(by_path.keys() & set())",
        "tests/unit/verification/test_record_comparison.py -k lie",
    ),
    Mutant(
        "the order of rows is not compared",
        "verification/source_match.py",
        "    if wrong and len(found) == len(expected):",
        "    if False:",
        "tests/unit/verification/test_record_comparison.py -k 'order or lie'",
    ),
    Mutant(
        "another image counts as the file's",
        "verification/record_comparison.py",
        '                return f"its {name} differs from its file"',
        '                return ""',
        "tests/unit/verification/test_record_comparison.py -k lie",
    ),
    Mutant(
        "another label counts as the file's",
        "verification/record_comparison.py",
        "    if record.label != expected.label:",
        "    if False:",
        "tests/unit/verification/test_record_comparison.py -k lie",
    ),
    Mutant(
        "any two images count as similar",
        "verification/record_comparison.py",
        "        if psnr < ALIKE_PSNR:",
        "        if psnr < 0:",
        "tests/unit/verification/test_record_comparison.py -k 'similar or worse'",
    ),
    Mutant(
        "an edited receipt is accepted",
        RECEIPT,
        "    if digest is None or digest != _digest(value):",
        "    if False:",
        "tests/unit/verification/test_receipt.py",
    ),
    Mutant(
        "another dataset passes a receipt",
        RECEIPT,
        '    if then["digest"] == now["digest"] and',
        "    if True or",
        "tests/unit/verification/test_receipt.py",
    ),
    Mutant(
        "a rebuilt shard that differs is moved into place",
        REPAIR,
        "        elif built.result.entry is None or built.result.entry.sha256 != entry.sha256:",
        "        elif built.result.entry is None:",
        "tests/unit/verification/test_repair_refusals.py",
    ),
    Mutant(
        "the content digest leaves out what columns hold",
        "dataset/index.py",
        "            files |= self._column_files(name, field, lacking=name in lacking)\n",
        "            self._column_files(name, field, lacking=name in lacking)\n",
        "tests/unit/dataset/test_content_digest.py -k each_difference",
    ),
    Mutant(
        "a forged content digest is not noticed",
        "verification/verify.py",
        "    if content != manifest.content_digest:",
        "    if False:",
        "tests/unit/dataset/test_content_digest.py -k forged",
    ),
    Mutant(
        "a damaged record is copied",
        "dataset/shardset.py",
        "            reason = difference(found, 0, part)[0]",
        '            reason = difference(found, 0, part)[0] and ""',
        "tests/unit/dataset/test_source.py -k damage",
    ),
    Mutant(
        "images that are added move others to another side",
        "sources/divided.py",
        "                found[self.side_of(group)] += rows",
        '                found[self.side_of(f"{group}{len(members)}")] += rows',
        "tests/unit/sources/test_divided.py -k 'never_changes or move_no_others'",
    ),
    Mutant(
        "a group is on two sides",
        "sources/divided.py",
        "        members: dict[str, list[int]] = defaultdict(list)\n"
        "        for row, group in enumerate(groups):\n",
        "        members: dict[str, list[int]] = defaultdict(list)\n"
        '        for row, group in enumerate(f"{g}/{n}" for n, g in enumerate(groups)):\n',
        "tests/unit/sources/test_divided.py -k group_is_never",
    ),
)


def copy_to(folder: Path) -> None:
    """Copy what the tests of a mutant need."""
    for name in ("shardkit", "tests", "docs", "sample_annotations", "sample_data", "scripts"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "plots")
        )
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder / name)


def outcome(mutant: Mutant, folder: Path) -> str:
    """Return "caught" or "survived", or what went wrong, with the end of the output."""
    path = folder / "shardkit" / mutant.file
    text = path.read_text("utf-8")
    if text.count(mutant.old) != 1:
        return f"is {text.count(mutant.old)} times in {mutant.file}: not exactly once"
    path.write_text(text.replace(mutant.old, mutant.new), "utf-8")
    try:
        done = subprocess.run(
            ["bash", "-c", f'exec "$0" {PYTEST} {mutant.tests}', PYTHON],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    finally:
        path.write_text(text, "utf-8")
    found = {0: "survived", 1: "caught"}.get(done.returncode, "cannot be tested")
    return found if found == "caught" else f"{found}\n{done.stdout[-2000:]}"


PYTHON = sys.executable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("-k", dest="word", default="", help="only bugs whose name holds this")
    word = parser.parse_args().word
    chosen = [mutant for mutant in MUTANTS if word in mutant.name]
    caught = 0
    with tempfile.TemporaryDirectory() as scratch:
        copy_to(Path(scratch))
        for mutant in chosen:
            found = outcome(mutant, Path(scratch))
            caught += found == "caught"
            print(f"{mutant.name}: {found}", flush=True)
    print(f"{caught} of {len(chosen)} seeded bugs were caught")
    sys.exit(0 if caught == len(chosen) else 1)


if __name__ == "__main__":
    main()
