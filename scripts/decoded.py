"""Print a digest of the batches of each kind of dataset, to compare processors and builds.

python scripts/decoded.py FOLDER    # with the datasets jpeg, png and planes
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from shardkit import CenterCrop, RandomResizedCrop, make_loader, open_dataset
from shardkit.system import native
from shardkit.torch.data.ops import ImageOp

OPERATIONS: tuple[ImageOp, ...] = (RandomResizedCrop(48), CenterCrop(40))


def main(folder: Path) -> None:
    assert native.module() is not None, native.describe()
    for path in sorted(folder.iterdir()):
        whole = hashlib.sha256()
        dataset = open_dataset(path, decode="torch")
        for image, _ in map(dataset.__getitem__, range(len(dataset))):
            whole.update(image.numpy().tobytes())
        print(path.name, "whole", whole.hexdigest())
        for operation in OPERATIONS:
            digest = hashlib.sha256()
            dataset = open_dataset(path, decode=operation)
            for images, _ in make_loader(dataset, 16, shuffle=True, seed=3, num_workers=0):
                digest.update(images.contiguous().numpy().tobytes())
            print(path.name, type(operation).__name__, digest.hexdigest())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
