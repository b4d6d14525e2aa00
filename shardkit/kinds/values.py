"""Python values as users give them: tensors, numbers and names of classes."""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardkit.kinds.field import Field
from shardkit.system.text import quoted, shortened


class BFloat16(np.ndarray):
    """The bits of a bfloat16 tensor, as uint16."""


def as_numpy(value: Any) -> Any:
    """Return a tensor as an array of its values, and anything else unchanged.

    NumPy has no bfloat16: such values become float32, which holds them exactly.
    """
    if not is_tensor(value):
        return value
    try:
        tensor = value.detach().cpu().contiguous()
    except RuntimeError as error:  # it is sparse, or has no values
        raise ValueError(f"the tensor cannot become an array: {error}") from error
    return (tensor.float() if _is_bfloat16(tensor) else tensor).numpy()


def as_bits(value: Any) -> Any:
    """Return the array of `as_numpy`, but keep bfloat16 as `BFloat16`."""
    if not is_tensor(value) or not _is_bfloat16(value):
        return as_numpy(value)
    bits = value.detach().cpu().contiguous().view(sys.modules["torch"].int16).numpy()
    return bits.view(np.uint16).view(BFloat16)


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor of PyTorch."""
    return hasattr(value, "detach") and hasattr(value, "cpu")


def _is_bfloat16(tensor: Any) -> bool:
    return str(tensor.dtype) == "torch.bfloat16"


def as_list(value: Any) -> list[Any]:
    """Return the elements of a tensor, an array or any iterable."""
    value = as_numpy(value)
    return value.tolist() if isinstance(value, np.ndarray) else list(value)


def class_number(field: Field, value: Any) -> int:
    """Return the number of a class, given as a number or name; else ValueError or TypeError."""
    classes = field.classes or ()
    if isinstance(value, str):
        if value not in classes:
            raise ValueError(f"{quoted(value)} is not one of {len(classes)} classes")
        return classes.index(value)
    number = np.asarray(as_numpy(value))
    if number.size != 1 or number.dtype.kind not in "iu":
        raise TypeError(f"it is not a label: {shortened(str(value), 40)}")
    label = int(number.reshape(()))
    if not 0 <= label < len(classes):
        raise ValueError(f"the label {label} is not between 0 and {len(classes) - 1}")
    return label


_MOST_JSON = 16 << 20
"""Maximum bytes of a value that is parsed: 16 MiB of brackets become 400 MB of lists."""


def parse_json(data: bytes) -> Any:
    """Return the JSON value in a file.

    Raises ValueError if there is none or it is too large, RecursionError if nested too deeply.
    """
    if len(data) > _MOST_JSON:
        raise ValueError(f"it has over {_MOST_JSON:,} bytes")
    return json.loads(data)


def pack_classes(field: Field, labels: Sequence[Any]) -> bytes:
    """Return numbers of classes as int32; ValueError if one is no class."""
    count = len(field.classes or ())
    for label in labels:
        if type(label) is not int or not 0 <= label < count:
            raise ValueError(f"{str(label)[:60]} is not one of {count} labels")
    return struct.pack(f"<{len(labels)}i", *labels)


def pack_coordinates(numbers: Sequence[float]) -> bytes:
    """Return coordinates as float64; TypeError if one is not finite."""
    if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
        raise TypeError("a coordinate is not a number")
    return struct.pack(f"<{len(numbers)}d", *numbers)
