"""Lists of image files that sources parse: tables, COCO's JSON, VOC's XML, YOLO's labels; masks."""

from __future__ import annotations

from pathlib import Path

from helpers import png

from scripts.fuzzing.targets.sources import GIF, SourceTarget


class ListTarget(SourceTarget):
    """A list next to two images, one of them in a folder."""

    names = (
        *(b"../x.gif", b"/x.gif", b"in/x.gif", b"./x.gif"),
        *(b"in", b"x.gif", b"..", b"\xff", b"\0"),
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "in").mkdir()
        for name in ("x.gif", "in/x.gif"):
            (folder / name).write_bytes(GIF)


class CsvTarget(ListTarget):
    """Rows of texts."""

    name = "source-csv"
    kind = "table"
    file = "t.csv"
    options = (
        {"image": "a", "label": "b"},
        {"image": "a", "labels": "b", "boxes": "c:xywh", "keep": "d?,e=d:json?", "file": "f=e?"},
    )
    tokens = (*ListTarget.names, *b'" "" , [[1,2,3,4]] 1e9 -0 |'.split(), b"\r", b"\n")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seeds = [
            b'a,b,c,d,e\nx.gif,k|l,"[[1,2,3,4]]",7,in/x.gif\nin/x.gif,l,"[[1,2,3,4,""k""]]",,\n',
            b"\xef\xbb\xbfa,b,c\r\nx.gif,7,\r\nin/x.gif,8,[]\r\n",
            b'a,b\n"x.gif",k\n\n../x.gif,k\nx.gif\n',
        ]


class JsonLinesTarget(ListTarget):
    """Rows of JSON."""

    name = "source-jsonl"
    kind = "table"
    file = "t.jsonl"
    options = (
        {"image": "a", "label": "b"},
        {"image": "a", "labels": "b", "boxes": "c:/0:xyxy", "box_labels": "f", "keep": "d?,e=c?"},
    )
    tokens = (
        *ListTarget.names,
        *(b'{"a":"x.gif"}', b"NaN", b"Infinity", b"[", b"]", b"{", b"}", b'"\\ud800"', b"1e999"),
        *(b"9" * 5000, b"[" * 900, b"\n", b"null", b"true", b"[[1,2,3,4]]", b'"'),
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seeds = [
            b'{"a": "x.gif", "b": 3, "c": [[[1, 2, 3, 4]]], "f": ["k"], "d": 1.5}\n'
            b'{"a": "in/x.gif", "b": 0, "c": [[]], "f": [], "d": null}\n',
            b'{"a": "x.gif", "b": ["k", "l"], "c": [[[0, 0, 1, 1]]], "f": [2], "d": {"x": [1]}}',
        ]


class CocoTarget(ListTarget):
    """Images and annotations as JSON."""

    name = "source-coco"
    kind = "coco"
    file = "x.json"
    tokens = (
        *ListTarget.names,
        *(b'"id":1', b'"image_id":1', b'"category_id":9', b'"bbox":[1,2,3,4]', b"NaN", b"1e999"),
        *(b'"images":[', b'"annotations":[', b'"categories":[', b"{}", b"[]", b"]", b"}", b","),
        *(b"[" * 900, b"9" * 5000, b'"\\udc80"', b"true", b"null", b'"keypoints":["k"]'),
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        images = b'"images":[{"id":1,"file_name":"x.gif"},{"id":2,"file_name":"in/x.gif"}]'
        self.seeds = [
            b'{"info":{},%b,"annotations":[{"image_id":1,"category_id":9,"bbox":[0,0,1,1],'
            b'"segmentation":{"counts":"a","size":[1,1]},"keypoints":[1,2,2]}],'
            b'"categories":[{"id":9,"name":"k","keypoints":["a"]},{"id":3,"name":"l"}]}' % images,
            b'{"annotations":[{"image_id":2,"caption":"a"},{"image_id":2}],%b}' % images,
            b"{%b}" % images,
        ]


class VocTarget(ListTarget):
    """An annotation as XML, in VOC's folders."""

    name = "source-voc"
    kind = "voc"
    file = "Annotations/0.xml"
    whole = True
    tokens = (
        *ListTarget.names,
        *(b"<!DOCTYPE a [<!ENTITY b 'c'>]>", b"&b;", b"&#0;", b"<![CDATA[", b"]]>", b"<object>"),
        *(b"</object>", b"<name>k</name>", b"<bndbox>", b"<b>" * 500),
        *(b"nan", b"1e999", b"<?xml ?>"),
        *(b'<?xml version="1.0" encoding="utf-16"?>', b'encoding="rot13"', b"xmlns:a='b'"),
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for name in ("Annotations", "JPEGImages/in"):
            (folder / name).mkdir(parents=True)
        for name in ("x.gif", "in/x.gif"):
            (folder / "JPEGImages" / name).write_bytes(GIF)
        box = b"<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>1</xmax><ymax>1</ymax></bndbox>"
        thing = b"<object><name>k</name><part><name>l</name></part>%b</object>" % box
        self.seeds = [
            b"<annotation><filename>x.gif</filename>%b%b</annotation>" % (thing, thing),
            b"<?xml version='1.0'?><annotation><filename>in/x.gif</filename></annotation>",
            b"<!DOCTYPE a SYSTEM '../x'><annotation><filename>x.gif</filename></annotation>",
        ]


class YoloTarget(ListTarget):
    """A description, and after a line with three dashes the labels of an image."""

    name = "source-yolo"
    kind = "yolo"
    file = "data.yaml"
    whole = True
    tokens = (
        *ListTarget.names,
        *(b"---\n", b"train: ", b"val: ", b"path: ", b"names: ", b"kpt_shape: [1, 3]\n", b"*a"),
        *(b"&a ", b"nan", b"1e999", b"-0", b"0.5", b"[" * 900, b"9" * 5000, b"!!python/name:os"),
        *(b"images", b"images/../../x", b"list.txt", b"{0: k}"),
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for name in ("images", "labels"):
            (folder / name).mkdir()
        (folder / "images/x.png").write_bytes(png(1, 1))
        (folder / "list.txt").write_bytes(b"./images/x.png\n../x.gif\n")
        self.seeds = [
            b"names: [k, l]\ntrain: images\n---\n1 .5 .5 1 1\n0 .1 .2 .5 .2 .3 .8\n",
            b"path: /x\nnames: {0: k}\ntrain: [list.txt]\nkpt_shape: [1, 3]\n"
            b"---\n0 .5 .5 1 1 .5 .5 2\n",
        ]

    def check(self, data: bytes) -> str:
        description, _, labels = data.partition(b"---\n")
        (self.folder / "labels/x.txt").write_bytes(labels)
        return super().check(description)


class PairsTarget(ListTarget):
    """A mask of an image."""

    name = "source-pairs"
    kind = "pairs"
    file = "masks/x.png"
    whole = True
    tokens = (GIF, b"\x89PNG\r\n\x1a\n", b"IHDR", b"IDAT", b"IEND", b"\xff" * 4, b"\0" * 4)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for name in ("images", "masks"):
            (folder / name).mkdir()
        (folder / "images/x.png").write_bytes(png(1, 1))
        self.seeds = [GIF, png(1, 1, mode="L")]
