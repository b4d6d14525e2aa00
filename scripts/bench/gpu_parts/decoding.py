"""JPEGs decoded on the GPU, by torchcodec or torchvision: images/s, and how far pixels differ."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gpu_parts.job import Job, rate
from isolation import NotAvailable, Progress

Decode = Callable[[Sequence[bytes]], Sequence[torch.Tensor]]
"""Returns images on the device, uint8 of shape (3, H, W)."""

_DECODERS = (("torchcodec", "torchcodec.decoders"), ("torchvision", "torchvision.io"))
_BATCH = 64
_LONGEST = 10.0


def run(values: dict[str, Any], progress: Progress) -> None:
    """Measure what is installed, next to the loader's own decoding; the ratio is over that.

    Raises:
        NotAvailable: If no decoder is installed, or there is no device.
    """
    job = Job.of(values)
    device, stored = job.device, job.dataset("jpeg", "bytes")
    size = 8 if job.is_small else _BATCH
    pillow = job.dataset("jpeg", "pil")
    sample = [stored[row][0] for row in range(size)]
    exact = [np.asarray(pillow[row][0], np.int16) for row in range(size)]
    base = _rate(job, job.dataset("jpeg", "numpy"), None, progress.left / 6)
    progress.add("shardkit, CPU", base, "images/s", ratio=1.0, remark="whole images, not copied")
    problems = []
    for name, module in _DECODERS:
        try:
            decode = decoder(module, sample[0], device)
        except NotAvailable as error:
            problems.append(str(error))
            continue
        remark = difference(decode(sample), exact)
        speed = _rate(job, stored, decode, progress.left / 3)
        progress.add(name, speed, "images/s", ratio=speed / base, remark=remark)
    if len(problems) == len(_DECODERS):
        raise NotAvailable("; ".join(problems))


def decoder(module: str, sample: bytes, device: torch.device) -> Decode:
    """Return a function that decodes a batch with the ``decode_jpeg`` of a module.

    Releases differ in what it takes: a list of tensors, one tensor, or bytes.

    Raises:
        NotAvailable: If the module is missing, or none of these works.
    """
    try:
        decode_jpeg: Any = importlib.import_module(module).decode_jpeg
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[:120]
        raise NotAvailable(f"{module}.decode_jpeg: {reason}") from None
    target = str(device)

    def batch(data: Sequence[bytes]) -> Sequence[torch.Tensor]:
        images: Sequence[torch.Tensor] = decode_jpeg(
            [_tensor(item) for item in data], device=target
        )
        return images

    def tensors(data: Sequence[bytes]) -> Sequence[torch.Tensor]:
        return [decode_jpeg(_tensor(item), device=target) for item in data]

    def plain(data: Sequence[bytes]) -> Sequence[torch.Tensor]:
        return [decode_jpeg(item, device=target) for item in data]

    reasons = []
    for decode in (batch, tensors, plain):
        try:
            (image,) = decode([sample])
            if image.device.type == device.type and image.dtype == torch.uint8 and image.dim() == 3:
                return decode
            reasons.append(
                f"{decode.__name__}: {image.dtype} of {image.dim()} axes on {image.device}"
            )
        except Exception as error:
            reasons.append(f"{decode.__name__}: {' '.join(str(error).split())[:80]}")
    raise NotAvailable(f"{module}.decode_jpeg: {'; '.join(reasons)}")


def difference(images: Sequence[torch.Tensor], expected: Sequence[Any]) -> str:
    """Return how far images are from those of Pillow, in levels of 255."""
    pairs = [
        np.abs(image.cpu().permute(1, 2, 0).numpy().astype(np.int16) - exact)
        for image, exact in zip(images, expected, strict=True)
    ]
    mean = float(np.mean([pair.mean() for pair in pairs]))
    return f"differs from Pillow by {mean:.2f} levels on average, at most {max(map(np.max, pairs))}"


def _rate(job: Job, dataset: Any, decode: Decode | None, seconds: float) -> float:
    """Return images/s of a loader of lists, which a GPU decodes, if at all, from this thread."""
    options = {"collate_fn": _images, "endless": True}
    loader = job.loader(dataset, 8 if job.is_small else _BATCH, "thread", **options)
    batches = (len(batch if decode is None else decode(batch)) for batch in loader)
    seconds = job.seconds(_LONGEST, seconds)
    return rate(batches, 2 * loader.num_workers + 2, seconds, job.device)


def _images(samples: Sequence[Any]) -> list[Any]:
    """Return the images of a batch as a list."""
    return [image for image, _ in samples]


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
