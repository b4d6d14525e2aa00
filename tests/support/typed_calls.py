"""Calls that are only type-checked: mypy reports each comment here that ignores no error."""

from __future__ import annotations

from torch import Tensor

import shardkit
from shardkit.torch.loader import Loader


def wrong() -> None:
    shardkit.convert("photos", "out", to="zip")  # type: ignore
    shardkit.convert("photos", "out", to="lmdb", encode="gif")  # type: ignore
    shardkit.convert("photos", "out", to="lmdb", on_error="ignore")  # type: ignore
    shardkit.convert("photos", "out", to="lmdb", resise=8)  # type: ignore
    shardkit.convert("photos", "out")  # type: ignore
    dataset = shardkit.LMDBDataset("out", decode="jpeg")  # type: ignore
    shardkit.make_loader(dataset, 4, engine="threads")  # type: ignore
    shardkit.verify("out", "slow")  # type: ignore
    shardkit.Rank(remainder="keep")  # type: ignore


def right() -> None:
    shardkit.convert("photos", "out", to="lmdb", encode="raw", on_error="skip", resize=8)
    dataset: shardkit.ShardDataset = shardkit.LMDBDataset("out", decode="torch")
    dataset = shardkit.open_dataset("out", decode=shardkit.CenterCrop(8))
    loader: Loader[tuple[Tensor, Tensor]] = shardkit.make_loader(dataset, 4, engine="thread")
    for images, labels in loader:
        images.float().mean(labels.tolist())
