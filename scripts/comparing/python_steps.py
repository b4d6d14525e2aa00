"""Steps in Python. Names that a commit renamed are stated once, in `_public`."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CLASSES = ("cat", "dog")


def _public(*names: str) -> Any:
    """Return the first of some public names that this commit has."""
    import shardkit

    return next(getattr(shardkit, name) for name in names if hasattr(shardkit, name))


def samples(target: str, to: str) -> None:
    """Convert samples with a field of each kind; some lack some."""
    field = _public("Field")
    schema = {
        "label": field("label", classes=CLASSES),
        "tags": field("labels", classes=("a", "b", "c")),
        "boxes": field("boxes", classes=("beak", "paw")),
        "joints": field("keypoints", classes=("left", "right")),
        "ragged": field("array", "<i2"),
    }
    _public("convert")(
        list(_samples()), target, to=to, schema=schema, shard_samples=5, seed=1, workers=1
    )


def _samples() -> Iterator[dict[str, Any]]:
    for n in range(12):
        sample = {
            "key": f"record/{n}",
            "image": _picture(n, 3),
            "second": _picture(n + 50, 3),
            "mask": Image.fromarray(np.full((12, 16), n % 5, np.uint8)),
            "label": n % 2,
            "tags": [tag for tag in range(3) if (n >> tag) & 1],
            "score": (n - 4) / 8,
            "count": 200 + n,
            "caption": "größe ★\n" * n,
            "info": {"n": n, "list": [None, True, 0.5]},
            "boxes": [[0, 1, 2.5 + n, 3, n % 2]] * (n % 3),
            "joints": [[[n + 0.5, 1, 2], [2, n, 1]]] * (n % 3),
            "latent": np.arange(n, n + 12, dtype="<f2").reshape(3, 4),
            "ragged": np.arange(2 * n, dtype="<i2").reshape(n, 2),
            "blob": bytes(range(n)),
        }
        if n == 7:
            for name in ("mask", "score", "caption", "info", "boxes", "joints", "ragged", "blob"):
                sample[name] = None
        yield sample


def _picture(seed: int, channels: int) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (12, 16, channels), np.uint8)
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def damage(dataset: str) -> None:
    """Change a byte in the middle of the first shard, and truncate the last one."""
    shards = sorted(Path(dataset).glob("shard-*"))
    content = bytearray(shards[0].read_bytes())
    content[len(content) // 2] ^= 1
    shards[0].write_bytes(content)
    shards[-1].write_bytes(shards[-1].read_bytes()[:-700])


def killed(source: str, target: str, to: str) -> None:
    """Start a conversion that is killed once some shards are complete."""
    images = 0

    def stop(progress: Any) -> None:
        nonlocal images
        images += progress.images
        if images > 50:
            os.kill(os.getpid(), signal.SIGKILL)

    _public("convert")(source, target, to=to, shard_samples=20, workers=1, on_progress=stop)


def epochs(path: str, engine: str) -> None:
    """Print digests of two epochs, and of one that is resumed in the middle."""
    loader = _loader(path, engine)
    for _ in range(2):
        for batch in loader:
            print(_digest(batch))
        print("end of epoch")
    first = _loader(path, engine)
    batches = iter(first)
    next(batches)
    state = json.loads(json.dumps(first.state_dict()))
    again = _loader(path, engine)
    again.load_state_dict(state)
    expected = [_digest(batch) for batch in batches]
    print("resumed", [_digest(batch) for batch in again] == expected, len(expected))


def _loader(path: str, engine: str, **options: Any) -> Any:
    import shardkit

    crop = _public("RandomResizedCrop")(24)
    options["engine"] = engine
    if hasattr(shardkit, "LoaderOptions"):  # of commits before `make_loader` took its fields
        options["options"] = _public("LoaderOptions")(engine=options.pop("engine"))
    return _public("make_loader")(
        _public("open_dataset")(path, decode=crop),
        4 if "samples" in path else 16,
        shuffle=True,
        seed=5,
        num_workers=2,
        **options,
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(_bytes(value)).hexdigest()[:16]


def _bytes(value: Any) -> bytes:
    """Return the content of a batch, which may be nested."""
    import torch

    if isinstance(value, torch.Tensor):
        header = f"{value.dtype}{tuple(value.shape)}".encode()
        return header + value.contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return b"".join(str(name).encode() + _bytes(part) for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return b"[" + b"".join(map(_bytes, value)) + b"]"
    return repr(value).encode()


def save(path: str, state: str) -> None:
    """Write the state of a loader in the middle of its second epoch."""
    loader = _loader(path, "thread")
    for _ in loader:
        pass
    batches = iter(loader)
    next(batches)
    next(batches)
    Path(state).write_text(json.dumps(loader.state_dict()))


def resume(path: str, state: str) -> None:
    """Print what a loader of this state reads next."""
    loader = _loader(path, "thread")
    try:
        loader.load_state_dict(json.loads(Path(state).read_text()))
    except _public("ShardkitError") as error:
        print(f"shardkit: error: {error}")
        raise SystemExit(2) from None
    for _ in range(2):
        for batch in loader:
            print(_digest(batch))


def samplers(path: str) -> None:
    """Print an epoch of each sampler."""
    make, dataset = _public("make_loader"), _public("open_dataset")(path, decode="bytes")
    collate: Any = list
    options = {"num_workers": 0, "collate_fn": collate}
    for name, more in {
        "balanced": {"sampler": _public("Balanced")(), "samples_per_epoch": 40},
        "weighted": {"sampler": _public("Weighted")([1.0, 3.0] * (len(dataset) // 2))},
        "views": {"views": 2, "shuffle": True},
        "repeats": {"aug_repeats": 3, "shuffle": True, "samples_per_epoch": 50},
        "blocks": {"shuffle": _public("BlockShuffle")()},
        "last": {"drop_last": True},
    }.items():
        for batch in make(dataset, 7, seed=2, **more, **options):
            print(name, _digest(batch))


def ranks(path: str) -> None:
    """Print an epoch of each rank of three."""
    import shardkit

    dataset = _public("open_dataset")(path, decode=_public("RandomResizedCrop")(24))
    for number in range(3):
        rank = _public("Rank", "RankShard")(rank=number, world_size=3)
        options = {"rank": rank}
        if hasattr(shardkit, "LoaderOptions"):  # of commits before `make_loader` took its fields
            options = {"options": _public("LoaderOptions")(rank_shard=rank)}
        for batch in _public("make_loader")(dataset, 8, shuffle=True, **options):
            print(number, _digest(batch))


def iterable(path: str) -> None:
    """Print an epoch of an iterable dataset, and of a batch sampler in PyTorch's loader."""
    from torch.utils.data import DataLoader

    crop = _public("RandomResizedCrop")(24)
    streamed = _public("IterableTarDataset")(path, decode=crop, shuffle=True, seed=3)
    for batch in DataLoader(streamed, batch_size=16, num_workers=2):
        print("iterable", _digest(batch))
    dataset = _public("open_dataset")(path, decode=crop)
    sampler = _public("EpochBatchSampler")(dataset, 16, shuffle=True, seed=3)
    for batch in DataLoader(dataset, batch_sampler=sampler, collate_fn=_public("collate")):
        print("sampler", _digest(batch))


def rows(path: str) -> None:
    """Print the samples of a dataset, read row by row, and its columns."""
    dataset = _public("open_dataset")(path, decode="numpy")
    for row in range(len(dataset)):
        print(row, dataset.keys[row], _digest(_plain(dataset[row])))


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value
