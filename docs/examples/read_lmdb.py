"""Read images and labels from a shardkit dataset of LMDB files with lmdb and Pillow alone."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import lmdb
from PIL import Image

for shard in sorted(Path(sys.argv[1]).glob("shard-*.lmdb")):
    environment = lmdb.open(str(shard), subdir=False, readonly=True, lock=False)
    with environment.begin() as transaction:
        classes = json.loads(transaction.get(b"__shardkit__"))["classes"]
        for row in range(3):
            prefix, record = b"%09d." % row, {}
            cursor = transaction.cursor()
            found = cursor.set_range(prefix)
            while found and cursor.key().startswith(prefix):
                record[cursor.key().removeprefix(prefix).decode()] = cursor.value()
                found = cursor.next()
            if not record:
                break
            meta = json.loads(record["json"])
            if "raw.npy" in record:  # a header of 128 bytes, then the pixels
                size = meta["width"], meta["height"]
                image = Image.frombytes("RGB", size, record["raw.npy"][128:])
            else:
                name = next(name for name in record if name not in ("__key__", "cls", "json"))
                image = Image.open(io.BytesIO(record[name])).convert("RGB")
            label = classes[int(record["cls"])] if "cls" in record else None
            print(record["__key__"].decode(), label, image.size)
    environment.close()
