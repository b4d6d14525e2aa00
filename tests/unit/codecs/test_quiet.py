from __future__ import annotations

import copy
import pickle
import threading
import warnings
from typing import Any

import pytest
from helpers import python

from shardkit.codecs.quiet import quiet


def test_quiet_affects_one_thread_only() -> None:
    said: list[str] = []
    inside, done = threading.Event(), threading.Event()

    def loud() -> None:
        inside.wait(60)
        try:
            warnings.warn("loud", UserWarning, stacklevel=1)
        except UserWarning as warning:
            said.append(str(warning))
        done.set()

    thread = threading.Thread(target=loud)
    thread.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with quiet(), quiet():
            warnings.warn("quiet", UserWarning, stacklevel=1)
            inside.set()
            assert done.wait(60)
        with pytest.raises(UserWarning, match="loud again"):
            warnings.warn("loud again", UserWarning, stacklevel=1)
    thread.join(60)
    assert said == ["loud"]


def test_quiet_works_if_others_change_the_filters() -> None:
    for change in (warnings.resetwarnings, lambda: warnings.simplefilter("error")):
        with warnings.catch_warnings():
            change()
            count = len(warnings.filters)
            for _ in range(3):
                with quiet():
                    warnings.warn("quiet", UserWarning, stacklevel=1)
            assert len(warnings.filters) <= count + 1


def test_quiet_ends_with_an_exception() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError), quiet():
            raise KeyError
        with pytest.raises(UserWarning):
            warnings.warn("loud", UserWarning, stacklevel=1)


def test_the_filters_can_be_pickled() -> None:
    """Joblib does that: filters must be picklable, and harmless in the other process."""
    with quiet():
        pass
    sent = pickle.loads(pickle.dumps(warnings.filters))
    assert copy.deepcopy(warnings.filters)
    assert len(sent) == len(warnings.filters)
    with warnings.catch_warnings():
        filters: Any = warnings.filters
        filters[:] = sent
        with pytest.warns(UserWarning, match="heard"):
            warnings.warn("heard", UserWarning, stacklevel=1)


def test_libtiff_prints_nothing() -> None:
    """It would name no file; in a process of its own, since the handler stays."""
    code = """
import io
import numpy as np
from PIL import Image
from shardkit.codecs.image import decode
from shardkit.errors import BadImage
file = io.BytesIO()
pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
Image.fromarray(pixels).save(file, "tiff", compression="tiff_lzw")
data = bytearray(file.getvalue())
data[200:400] = bytes([255]) * 200
try:
    decode(bytes(data), "tiff")
except BadImage as error:
    print(error)
"""
    done = python(code)
    assert (done.stdout, done.stderr) == ("it cannot be decoded: its data are damaged\n", "")
