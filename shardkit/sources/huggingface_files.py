"""The files of each split of a Hugging Face dataset: saved folders, and Parquet files."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit.contracts import Recognition
from shardkit.errors import UsageError
from shardkit.record import load_json
from shardkit.sources.folders import below, is_split_name
from shardkit.sources.inputs import find_files
from shardkit.system.files import read_small
from shardkit.system.safe_paths import split_path
from shardkit.system.text import fault, quoted

if TYPE_CHECKING:
    from shardkit.sources.recognize import Overview

_DICT = "dataset_dict.json"
_STATE = "state.json"
"""Files of a folder from ``save_to_disk``: one lists the splits, the other the files of a split."""

_SPLIT = re.compile(r"(?P<split>\w+)-[0-9]{5}-of-[0-9]{5}(-[0-9a-f]+)?\.parquet")
"""The name of a file of one split, as on the Hub."""


_Files = list[tuple[str, str]]
"""Paths of files, each with a short name."""


def find_splits(pattern: str | Path) -> Mapping[str, _Files]:
    """Return the files of each split; the only name is "" without splits."""
    folder = Path(pattern)
    if (folder / _DICT).exists():
        splits = _load(folder / _DICT).get("splits")
        if not isinstance(splits, list) or not splits:
            raise UsageError(f"{folder / _DICT} lists no splits")
        return {str(split): _saved(folder / _plain(split, folder / _DICT)) for split in splits}
    if (folder / _STATE).exists():
        return {"": _saved(folder)}
    if folder.is_dir() and not any(folder.glob("*.parquet")) and (folder / "data").is_dir():
        pattern = folder / "data"
    paths, names, _ = find_files(pattern, (".parquet",))
    files = [*zip(paths, names, strict=True)]
    of_split: defaultdict[str, _Files] = defaultdict(list)
    for file in files:
        of_split[_split_of(os.path.basename(file[0]))].append(file)
    return {"": files} if "" in of_split or len(of_split) == 1 else of_split


def _split_of(file: str) -> str:
    """Return the split of a file by its name, or ""."""
    match = _SPLIT.fullmatch(file)
    stem = file.removesuffix(".parquet")
    return match["split"] if match else stem * is_split_name(stem)


def _saved(folder: Path) -> _Files:
    """Return the files of a folder that ``Dataset.save_to_disk`` wrote."""
    state = folder / _STATE
    listed = _load(state).get("_data_files")
    if not isinstance(listed, list) or not all(isinstance(file, dict) for file in listed):
        raise UsageError(f"{state} lists no files")
    names = [_plain(file.get("filename"), state) for file in listed]
    for name in names:
        if not (folder / name).is_file() or (folder / name).is_symlink():
            raise UsageError(f"{folder / name} is not a file, but {state} lists it")
    return [(str(folder / name), name) for name in names]


def _plain(name: object, where: Path) -> str:
    """Return a file name from an untrusted file."""
    try:
        if isinstance(name, str) and len(split_path(name)) == 1:
            return name
    except ValueError:
        pass
    raise UsageError(f"{where} lists {quoted(name)}, which is not a file name in its folder")


def _load(path: Path) -> dict[str, Any]:
    try:
        return load_json(read_small(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {fault(error)}") from error


def recognize(seen: Overview) -> Iterator[Recognition]:
    """Yield what shows a saved dataset, or Parquet files."""
    if not seen.is_folder:
        if seen.path.suffix == ".parquet":
            yield Recognition("a Parquet file", certain=b"huggingface" in seen.ends())
    elif seen.has(_DICT) or seen.has(_STATE):
        yield Recognition("a folder from save_to_disk")
    else:
        for top in ("", "data", *filter(is_split_name, seen.folders())):
            if (files := seen.files(top, ".parquet")) and not seen.images(top):
                of_hub = b"huggingface" in seen.ends(below(top, files[0]))
                yield Recognition(f"Parquet files such as {below(top, files[0])}", of_hub, top)
