"""Sources of one kind as the splits of one folder or file, such as COCO's files of annotations."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from shardkit.contracts import Entry, Scan, Source
from shardkit.errors import CorruptDataset, UsageError, setting
from shardkit.record import Record
from shardkit.registry import get_source, open_source
from shardkit.sources.opening import MEMBER, Described
from shardkit.sources.recognize import Recognized, left_out, the_kinds
from shardkit.system.files import as_name, as_text, split_text_path
from shardkit.system.text import fault, name_list


class Member(NamedTuple):
    """The source of a split."""

    source: Source
    paths: Sequence[str]
    """Its path below the folder, and that of its images; none if the path has all splits."""


class Together(Source):
    """Sources of one kind, each of which is a split, in the folder ``root``.

    ``commands`` convert each by itself; they are for messages.
    """

    def __init__(
        self, root: Path, members: Mapping[str, Member], commands: Sequence[str] = ()
    ) -> None:
        self.root = root
        self.members = members
        self.commands = commands
        self.unread: Sequence[str] = ()
        """Names next to the files in the folder, for a note."""
        self.kind = next(iter(members.values())).source.kind

    def __str__(self) -> str:
        return str(self.root)

    def paths(self) -> Sequence[Path]:
        """Return the folder or file."""
        return [self.root]

    def describe(self, split: str) -> Mapping[str, Any]:
        """Return the description of a split, with its paths in the folder."""
        source, paths = self.members[split]
        name = as_text(self.root.resolve().name)
        return {**source.describe(""), "name": name, MEMBER: list(paths)}

    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        """List the images of all splits, which share their classes."""
        scans = {name: member.source.scan(classes) for name, member in self.members.items()}
        divided = [name for name, scan in scans.items() if "" not in scan.splits]
        if divided and self.commands:
            raise UsageError(
                f"{self}: {divided[0]} has its own splits;",
                remedy=f"convert each separately: {', and '.join(self.commands)}",
            )
        if divided:
            raise CorruptDataset(
                "the manifest lists a source with several splits as the source of one split"
            )
        union = _united([scan.classes or () for scan in scans.values()], classes)
        if any(scan.classes != union for scan in scans.values() if scan.classes):
            scans = {name: member.source.scan(union) for name, member in self.members.items()}
        first, *others = ({**scan.schema, "label": None} for scan in scans.values())
        if any(schema != first for schema in others):
            fields = "; ".join(f"{name}: {name_list(scan.schema)}" for name, scan in scans.items())
            raise UsageError(
                f"{self}: the splits have different fields, or classes of boxes ({fields});",
                remedy=f"convert each file separately: {', and '.join(self.commands)}",
            )
        every = [*scans.values()]
        labeled = next((scan for scan in every if scan.classes), every[0])
        return Scan(
            source=self,
            splits={
                name: replace(scan.splits[""], source=self, split=name)
                for name, scan in scans.items()
            },
            classes=union,
            ignored={name: scan.ignored[""] for name, scan in scans.items()},
            problems={name: scan.problems[""] for name, scan in scans.items()},
            understood=_joined({name: scan.understood for name, scan in scans.items()}),
            notes=[
                *[f"next to it but not read: {name_list(self.unread)}"] * bool(self.unread),
                *(f"{name}: {note}" for name, scan in scans.items() for note in scan.notes),
            ],
            fields=labeled.fields,
            exact_sizes=all(scan.exact_sizes for scan in every),
        )

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of an image."""
        return self.members[split].source.read("", entry)

    def locate(self, split: str, entry: Entry) -> str:
        """Return the location of an image."""
        return self.members[split].source.locate("", entry)

    def files(self, split: str, entries: Sequence[Entry]) -> Sequence[bytes] | None:
        """Return the file of each image, if records have no other fields."""
        return self.members[split].source.files("", entries)


def _joined(understood: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the text of each term, with the splits if it is not the same for all."""
    terms = dict.fromkeys(term for texts in understood.values() for term in texts)
    joined = {}
    for term in terms:
        texts = {split: of[term] for split, of in understood.items() if term in of}
        differs = len(set(texts.values())) > 1
        joined[term] = (
            "; ".join(f"{split}: {text}" for split, text in texts.items())
            if differs
            else next(iter(texts.values()))
        )
    return joined


def _united(
    listed: Sequence[Sequence[str]], classes: Sequence[str] | None
) -> tuple[str, ...] | None:
    """Return the classes of all splits: those of an earlier conversion first, numbers by value."""
    longest = max(listed, key=len)
    if all(list(longest[: len(names)]) == list(names) for names in listed):
        return tuple(longest) or None
    earlier = list(classes or ())
    return (*earlier, *sorted({name for names in listed for name in names}.difference(earlier)))


def together(root: Path, kinds: Mapping[str, Recognized], options: Mapping[str, Any]) -> Together:
    """Return the source of splits that were recognized in a folder.

    ``options`` are those of all of them; those that were recognized fill in for None.
    """
    _require_own_roots(root, kinds, options.get("root"))
    chosen = {key: value for key, value in options.items() if value not in (None, False)}
    recognized = {name: _recognized(kind.by.options(root)) for name, kind in kinds.items()}
    if any("labels" in of for of in recognized.values()):  # rows of other splits may have one each
        for of in recognized.values():
            of.update({"labels": of.pop("label")} if "label" in of else {})
    members = {
        name: Member(
            open_source(
                kind.kind, root / as_name(kind.by.inside), **{**recognized[name], **chosen}
            ),
            kind.paths,
        )
        for name, kind in kinds.items()
    }
    commands = [kind.command(root, (f"DST/{name}", "--to", "lmdb")) for name, kind in kinds.items()]
    labels = {str(of["label"]) for of in recognized.values() if "label" in of}
    if len(labels) > 1 and chosen.keys().isdisjoint(("label", "labels")):
        raise UsageError(
            f"{root}: the label columns of the splits differ ({name_list(sorted(labels))})",
            remedy=f"pass {setting('label')} or convert each separately: {', and '.join(commands)}",
        )
    return Together(root, members, commands)


def _recognized(words: Sequence[str]) -> dict[str, Any]:
    """Return the words of a command as options."""
    values = [*words[1:], ""][: len(words)]
    return {
        word[2:].replace("-", "_"): True if value[:2] in ("", "--") else value
        for word, value in zip(words, values, strict=True)
        if word.startswith("--")
    }


def _require_own_roots(
    root: Path, kinds: Mapping[str, Recognized], root_option: str | None
) -> None:
    """Refuse the folder of one split for all splits, where each has its own."""
    roots = {os.path.realpath(root / as_name(kind.paths[-1])) for kind in kinds.values()}
    if root_option is not None and len(roots) > 1 and os.path.realpath(root_option) in roots:
        raise UsageError(
            f"{setting('root', root_option)} is the folder of one split of {root}, which has "
            f"{name_list(kinds)}",
            remedy="leave it out: the folder of each split is known",
        )


def open_folder(kind: str, folder: str | Path, options: Mapping[str, Any]) -> Together:
    """Return all sources of a kind in a folder, as splits."""
    kinds = the_kinds(folder, only=kind)
    source = together(Path(folder), kinds, options)
    source.unread = left_out(folder, kinds.values())
    return source


def reopen(kind: str, root: Path, described: Described) -> Together:
    """Return the source that the manifests of splits describe."""
    members = {}
    for name, description in described.items():
        paths = _paths(description)
        inner = {key: value for key, value in description.items() if key != MEMBER}
        path = Path("@".join(str(root / as_name(inside)) for inside in paths) or root)
        members[name] = Member(get_source(kind).find(path, {"": inner}), paths)
    return Together(root, members)


def _paths(description: Mapping[str, Any]) -> Sequence[str]:
    try:
        paths = description[MEMBER]
        if len(paths) > 2 or any("{" in path and ".." in path for path in paths):
            raise ValueError("there are too many, or they are outside the source")
        for path in filter(None, paths):
            split_text_path(path)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptDataset(
            f"the manifest does not list the files of the split: {fault(error)}"
        ) from error
    return tuple(paths)
