"""Check rows of a record of planes (Y4M), and convert them to RGB as libjpeg does."""

from __future__ import annotations

import base64
import re
import sys
import zlib

import numpy as np


def doubled(plane: np.ndarray, axis: int, size: int) -> np.ndarray:
    """Return sums of three parts of the nearest and one part of the next nearest sample."""
    near = np.arange(size) // 2
    far = np.clip(near + np.where(np.arange(size) % 2, 1, -1), 0, plane.shape[axis] - 1)
    return 3 * plane.take(near, axis) + plane.take(far, axis)


def read_planes(record: bytes, top: int = 0, bottom: int | None = None) -> np.ndarray:
    """Return uint8 of shape (height, width, 3): the rows from ``top`` to ``bottom``."""
    header, frame, data = record.split(b"\n", 2)
    width, height, sampling = re.match(rb"YUV4MPEG2 W(\d+) H(\d+) .* C(\w+) ", header).groups()
    width, height = int(width), int(height)
    bottom = height if bottom is None else bottom
    wide, high = sampling in (b"420jpeg", b"422"), sampling == b"420jpeg"
    sides = 2, (height + high) >> high, (width + wide) >> wide

    band = 2 * -(-height // 24)
    first, last = max(top - 2, 0) // band, -(-min(bottom + 2, height) // band)
    needed = np.zeros(len(data), bool)  # the bands of these rows, in all planes
    needed[first * band * width : min(last * band, height) * width] = True
    if sampling != b"mono":
        rows = slice(first * band >> high, last * band >> high)
        needed[width * height :].reshape(sides)[:, rows] = True
    values = np.where(needed, np.frombuffer(data, np.uint8), np.uint8(0))
    checksums = np.frombuffer(base64.b64decode(frame[5:].replace(b" X", b"")), "<u4")[first:last]
    if zlib.crc32(values) ^ zlib.crc32(bytes(len(data))) != np.bitwise_xor.reduce(checksums):
        raise ValueError("the record is damaged")

    values = values.astype(np.int32)
    luma = values[: width * height].reshape(height, width)
    if sampling == b"mono":
        return np.repeat(luma[top:bottom, :, None], 3, 2).astype(np.uint8)
    chroma = values[width * height :].reshape(sides)
    if wide and chroma.shape[2] <= 2:  # libjpeg repeats the samples of narrow images
        chroma = chroma.repeat(2, 2).repeat(1 + high, 1)[:, :height, :width]
    elif wide:
        chroma = doubled(chroma, 1, height) if high else chroma
        odd = np.arange(width) % 2
        chroma = doubled(chroma, 2, width)
        chroma = (chroma + np.where(odd, 7, 8)) >> 4 if high else (chroma + 1 + odd) >> 2
    blue, red = chroma - 128
    green = (-22554 * blue - 46802 * red + 32768) >> 16
    rgb = luma + ((91881 * red + 32768) >> 16), luma + green, luma + ((116130 * blue + 32768) >> 16)
    return np.stack(rgb, 2).clip(0, 255).astype(np.uint8)[top:bottom]


if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:
        print(read_planes(file.read()).shape)
