"""How many planted faults `shardkit report` finds, and how many it finds that are none.

    python scripts/bench/findings.py PHOTOS [--fashion FOLDER]

PHOTOS is a folder of class folders of photographs. FOLDER has the files of Fashion-MNIST (Debian:
dataset-fashion-mnist, in /usr/share/datasets): a small network is trained on labels of which 1,000
are wrong, which takes some minutes, and its embeddings shall find them.
"""

from __future__ import annotations

import argparse
import gzip
import io
import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageFilter
from torch import nn

import shardkit
from shardkit.reporting.report import DatasetReport

QUALITIES = (50, 75, 90, 95)
SIGMAS = (2, 3, 4, 6, 10)
EPOCHS, BATCH, WRONG = 4, 256, 1000


def main() -> None:
    """Print one line for each kind of fault."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("photos", type=Path)
    parser.add_argument("--fashion", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    photos = [Image.open(path).convert("RGB") for path in sorted(args.photos.glob("*/*"))]
    rng = np.random.default_rng(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        turned(root / "turned", photos, rng)
        parts(root / "parts", photos, rng)
        blurred(root / "blurred", photos, rng)
        if args.fashion:
            wrong_labels(root / "fashion", args.fashion, rng)


def turned(root: Path, photos: list[Image.Image], rng: np.random.Generator) -> None:
    """Plant each photograph turned in all ways, compressed again and scaled."""
    for name, scale in (("full size", 1.0), ("half size", 0.5)):
        images = {f"a/{n:03}": encoded(photo, 92) for n, photo in enumerate(photos)}
        for (n, photo), turn in itertools.product(enumerate(photos), Image.Transpose):
            size = (max(1, int(photo.width * scale)), max(1, int(photo.height * scale)))
            copy = photo.resize(size, Image.Resampling.LANCZOS).transpose(turn)
            images[f"b/{n:03}_{turn.value}"] = encoded(copy, int(rng.choice(QUALITIES)))
        made = report(root / name.split()[0], images)
        groups = finding(made, "near-duplicate-classes").groups
        names = [{made.images.keys[row][2:5] for row in group.rows} for group in groups]
        wrong = sum(len(of) > 1 for of in names)
        found = sum(len(group.rows) - 1 for group in groups) - wrong
        count = len(photos) * len(Image.Transpose)
        print(f"turned copies, {name}: {found / count:.1%} of {count:,} found, {wrong} wrong")


def parts(root: Path, photos: list[Image.Image], rng: np.random.Generator) -> None:
    """Compare photographs, their thirds, and crops of others: no pair is similar."""
    images = {}
    for n, photo in enumerate(photos):
        images[f"a/{n:03}"] = encoded(photo, 90)
        for y, x in itertools.product(range(3), range(3)):
            width, height = photo.width // 3, photo.height // 3
            part = photo.crop((x * width, y * height, (x + 1) * width, (y + 1) * height))
            images[f"a/{n:03}_{y}{x}"] = encoded(part, 90)
    made = report(root, images)
    found = [
        f"{', '.join(made.images.keys[row] for row in group.rows)} ({group.note})"
        for kind in ("near-duplicate", "near-duplicate-classes")
        for group in finding(made, kind).groups
    ]
    pairs = len(images) * (len(images) - 1) // 2
    print(f"parts of photographs: {len(found)} of {pairs:,} pairs called similar: {found}")


def blurred(root: Path, photos: list[Image.Image], rng: np.random.Generator) -> None:
    """Blur photographs; and count those called blurred that are not, scaled and cropped."""
    for sigma in SIGMAS:
        soft = [photo.filter(ImageFilter.GaussianBlur(sigma)) for photo in photos]
        images = {
            f"a/{n:03}": encoded(photo, int(rng.choice(QUALITIES))) for n, photo in enumerate(soft)
        }
        count = finding(report(root / str(sigma), images), "blurred").rows
        print(f"blurred with a sigma of {sigma}: {count / len(photos):.1%} found")
    for name in ("as they are", "scaled", "cropped"):
        images = {}
        for n, photo in enumerate(photos):
            part = rng.uniform(0.4, 0.95)
            size = (max(1, int(photo.width * part)), max(1, int(photo.height * part)))
            left, top = (
                int(rng.integers(0, a - b + 1)) for a, b in zip(photo.size, size, strict=True)
            )
            changed = {
                "as they are": photo,
                "scaled": photo.resize(size, Image.Resampling.LANCZOS),
                "cropped": photo.crop((left, top, left + size[0], top + size[1])),
            }[name]
            images[f"a/{n:03}"] = encoded(changed, int(rng.choice(QUALITIES)))
        count = finding(report(root / name.split()[0], images), "blurred").rows
        print(f"photographs {name}: {count / len(photos):.1%} called blurred")


def wrong_labels(root: Path, folder: Path, rng: np.random.Generator) -> None:
    """Plant wrong labels, train a network with them, and look for them by its embeddings."""
    names = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
    pixels, truth = (gzip.decompress((folder / name).read_bytes()) for name in names)
    images = np.frombuffer(pixels, np.uint8, offset=16).reshape(-1, 28, 28)
    labels = np.frombuffer(truth, np.uint8, offset=8).astype(np.int64)
    wrong = rng.choice(len(labels), WRONG, replace=False)
    labels[wrong] = (labels[wrong] + rng.integers(1, 10, WRONG)) % 10
    source = root.with_name("idx")
    source.mkdir()
    for name, data in zip(
        names, (pixels, truth[:8] + labels.astype(np.uint8).tobytes()), strict=True
    ):
        (source / name).write_bytes(gzip.compress(data, 1))
    shardkit.convert(shardkit.open_source("mnist", source, split="train"), root, to="lmdb")
    order = [int(Path(key).name) for key in shardkit.open_dataset(root).keys]
    shardkit.add_fields(root, {"embedding": trained(images, labels)[order]})
    made = shardkit.report(root, embedding="embedding")
    found = {int(Path(made.images.keys[row]).name) for row in finding(made, "label-error").exclude}
    right = len(found & set(wrong.tolist()))
    print(f"wrong labels: precision {right / len(found):.2f}, recall {right / WRONG:.2f}")


def trained(
    pixels: npt.NDArray[np.uint8], labels: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """Train a small network for `EPOCHS`; return its embeddings of all images."""
    torch.manual_seed(0)
    images, targets = torch.from_numpy(pixels)[:, None] / 255 - 0.29, torch.from_numpy(labels)
    layers: list[nn.Module] = []
    for before, after in ((1, 32), (32, 64), (64, 64)):
        layers += [
            nn.Conv2d(before, after, 3, padding=1),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 9, 128), nn.ReLU())
    head = nn.Linear(128, 10)
    steps = EPOCHS * -(-len(images) // BATCH)
    optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], 2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(EPOCHS):
        for batch in torch.tensor_split(torch.randperm(len(images)), steps // EPOCHS):
            loss = nn.functional.cross_entropy(head(body(images[batch])), targets[batch])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
    body.eval()
    with torch.no_grad():
        return torch.cat([body(batch) for batch in torch.tensor_split(images, 60)]).numpy()


def report(root: Path, images: dict[str, bytes]) -> DatasetReport:
    """Convert encoded images to a dataset and examine it."""
    source = root.with_name(f"{root.name}-files")
    for name, data in images.items():
        path = source / f"{name}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    shardkit.convert(source, root, to="lmdb")
    return shardkit.report(root)


def finding(made: DatasetReport, kind: str) -> Any:
    """Return the findings of one kind."""
    return next(each for each in made.findings if each.kind == kind)


def encoded(image: Image.Image, quality: int) -> bytes:
    """Return an image as JPEG."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()


if __name__ == "__main__":
    main()
