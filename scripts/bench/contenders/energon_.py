"""energon, the loader of Megatron: WebDataset shards with an index, through its own loader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import webdataset
from contenders.adapter import BATCH, TRANSFORMS, WORKERS, Batch
from contenders.library import Library, decoded
from megatron import energon  # type: ignore[import-not-found]
from megatron.energon.flavors.webdataset import (  # type: ignore[import-not-found]
    BaseWebdatasetFactory,
)
from PIL import Image

_SHARDS, _BUFFER, _SEQUENCE = 8, 1000, 100
"""As in `webdataset_`; and samples that are read in a row, as in energon's documentation."""


@energon.stateless  # type: ignore[untyped-decorator]
def _cook(sample: dict[str, Any]) -> Any:
    return energon.ImageClassificationSample(
        **energon.basic_sample_keys(sample), image=sample["jpg"], label=int(sample["cls"])
    )


class _Encoder(energon.DefaultTaskEncoder):  # type: ignore[misc]
    """Decodes, transforms and joins as the other libraries do."""

    decoder = None
    cookers = (energon.Cooker(_cook),)

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._transform = TRANSFORMS[kind]

    @energon.stateless(restore_seeds=True)  # type: ignore[untyped-decorator]
    def encode_sample(self, sample: Any) -> Any:
        sample.image = self._transform(decoded(sample.image))
        return sample

    def batch(self, samples: list[Any]) -> Batch:
        images = torch.stack([sample.image for sample in samples])
        return images, torch.tensor([sample.label for sample in samples])


class Adapter(Library):
    """Its dataset for training."""

    distribution = "megatron-energon"
    name = "energon"

    def write(self, target: Path) -> None:
        """Write tar files, and let energon index them."""
        most = -(-len(self.entries) // _SHARDS)
        with webdataset.ShardWriter(str(target / "%06d.tar"), maxcount=most, verbose=0) as sink:
            for number, (data, label) in enumerate(self.stored()):
                sink.write({"__key__": f"{number:08d}", "jpg": data, "cls": label})
        names = [path.name for path in sorted(target.glob("*.tar"))]
        BaseWebdatasetFactory.prepare_dataset(
            target, names, split_parts_ratio=[("train", 1.0)], workers=1
        )
        kind = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
        (target / ".nv-meta" / "dataset.yaml").write_text(kind, "utf-8")

    def loader(self, path: Path) -> Any:
        """Return its loader, which ends after each epoch."""
        dataset = energon.get_train_dataset(
            path,
            worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=WORKERS),
            batch_size=BATCH,
            shuffle_buffer_size=_BUFFER,
            max_samples_per_sequence=_SEQUENCE,
            task_encoder=_Encoder(self.task.kind),
            repeat=False,
        )
        return energon.get_loader(dataset)

    def samples(self, path: Path) -> Iterator[tuple[Image.Image, int]]:
        """Read the tar files one after the other."""
        urls = [str(file) for file in sorted(path.glob("*.tar"))]
        dataset = webdataset.WebDataset(urls, shardshuffle=False)
        yield from dataset.decode("pil").to_tuple("jpg", "cls")
