"""Read images and labels from a shardkit dataset of tar files with tarfile and Pillow alone."""

from __future__ import annotations

import io
import itertools
import json
import sys
import tarfile
from pathlib import Path

from PIL import Image

for shard in sorted(Path(sys.argv[1]).glob("shard-*.tar")):
    with tarfile.open(shard, "r:") as archive:
        classes = json.load(archive.extractfile(archive.next()))["classes"]
        groups = itertools.groupby(archive.getmembers()[1:], lambda m: m.name.partition(".")[0])
        for key, members in itertools.islice(groups, 3):
            record = {
                member.name.partition(".")[2]: archive.extractfile(member).read()
                for member in members
            }
            meta = json.loads(record["json"])
            if "raw.npy" in record:  # a header of 128 bytes, then the pixels
                size = meta["width"], meta["height"]
                image = Image.frombytes("RGB", size, record["raw.npy"][128:])
            else:
                name = next(name for name in record if name not in ("cls", "json"))
                image = Image.open(io.BytesIO(record[name])).convert("RGB")
            label = classes[int(record["cls"])] if "cls" in record else None
            print(key, label, image.size)
