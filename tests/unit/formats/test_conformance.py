"""Every registered storage format passes the conformance suite."""

from __future__ import annotations

import re

from helpers import FORMATS
from stated import done

from shardkit.testing import FormatConformance


class TestHdf5(FormatConformance):
    name = "hdf5"


class TestLmdb(FormatConformance):
    name = "lmdb"


class TestWebdataset(FormatConformance):
    name = "webdataset"


def test_these_are_all_formats() -> None:
    (offered,) = re.findall(r"--to \[([\w|]+)\]", done("convert", "imagefolder", "--help"))
    assert tuple(offered.split("|")) == FORMATS
