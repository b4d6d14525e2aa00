"""Scaling with torch, whose code for bytes takes a fifth of Pillow's time.

For reading, where torch is loaded in any case; of conversions only one whose recipe asks for it
loads this file, since torch takes a second and 200 MB in each process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardkit.codecs.image import Pixels


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch from starting threads: its callers are as many as the processors.

    The number of threads is the process's own: it is put back at the end.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def scale(pixels: Pixels, size: tuple[int, int], filter_: str) -> Pixels:
    """Return ``pixels`` scaled to ``size``, antialiased.

    torch computes as Pillow does, in two passes over bytes, but with weights of 15 bits instead of
    22: of the values of photographs 0.3 % differ by one, and one in a million by two (bicubic).
    The number of threads and the processor's instruction set do not change them.

    Args:
        pixels: uint8 of shape (height, width, 3), writable; a part of an image may be a view.
        size: Width and height.
        filter_: ``bicubic`` or ``bilinear``.

    Returns:
        uint8 of shape (height, width, 3), C-contiguous; ``pixels`` itself if it has that size.
    """
    width, height = size
    if pixels.shape[:2] == (height, width):
        return pixels
    # One image with its channels last in memory, which the fast code asks for: nothing is copied.
    batch = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
    scaled = torch.nn.functional.interpolate(batch, (height, width), mode=filter_, antialias=True)
    result: Pixels = scaled[0].permute(1, 2, 0).contiguous().numpy()
    return result
