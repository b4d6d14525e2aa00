"""A report as one self-contained HTML page, without scripts."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from operator import itemgetter

import numpy as np

from shardkit.record import NO_LABEL
from shardkit.reporting.charts import COLORS, class_bars, histogram
from shardkit.reporting.fields import sampled_rows
from shardkit.reporting.findings import KINDS, Findings, Group
from shardkit.reporting.pictures import COLORS as BOX_COLORS
from shardkit.reporting.pictures import data_uri, picture
from shardkit.reporting.report import DatasetReport
from shardkit.system.text import amount, printable, shortened, size

MARK = "made by shardkit report"
"""At the start of each page, so that only these are ever overwritten."""

_SIDE = 128
"""Side of a picture in pixels: about 3 KB."""

_CLASSES = 24
_PER_CLASS = 8
_SEED = 0
"""Maximum contact sheets, and pictures on each; seed of their choice."""

_GROUPS = 10
_PER_GROUP = 6
"""Maximum groups of each finding to show, and pictures of each."""

_BALANCE = 40
"""Maximum classes in the chart of the class balance."""

_CAPTION = 80
"""Maximum characters of a caption below a picture."""

_LISTED = 1 << 15
"""Maximum bytes of a list of keys to download from the page."""

_EMBEDDED = 3_800_000
"""Maximum bytes of all pictures, so that a page has less than 5 MB."""

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="generator" content="{mark}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: #8884; --soft: #8881; --bar: #0072B2; --link: #005a8e; }}
@media (prefers-color-scheme: dark) {{ :root {{ --bar: #56B4E9; --link: #7cc4f0; }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; padding: 1rem; max-width: 76rem; overflow-wrap: anywhere;
  font: 16px/1.5 system-ui, sans-serif; background: Canvas; color: CanvasText; }}
h1 {{ font-size: 1.6rem; margin: .5rem 0; }}
h2 {{ font-size: 1.25rem; margin: 2.5rem 0 .75rem; border-bottom: 1px solid var(--line); }}
h3 {{ font-size: 1rem; margin: 1rem 0 .4rem; }}
a {{ color: var(--link); }}
nav ul {{ display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: 0; list-style: none; }}
code, pre {{ font: .86em ui-monospace, "DejaVu Sans Mono", monospace; }}
code {{ white-space: nowrap; }}
pre {{ overflow-x: auto; padding: .7rem; background: var(--soft); border: 1px solid var(--line);
  border-radius: .4rem; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }}
th, td {{ padding: .25rem .9rem .25rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); overflow-wrap: normal; }}
th.n, td.n {{ text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }}
.scroll + .scroll {{ margin-top: 1rem; }}
.grid-of-charts {{ display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(18rem, 100%), 1fr)); }}
.grid-of-charts figcaption {{ font-weight: 600; }}
svg {{ width: 100%; height: auto; font: 12px system-ui, sans-serif; fill: CanvasText; }}
svg.wide {{ min-width: 32rem; max-width: 46rem; }}
.bar {{ fill: var(--bar); }} .grid, .axis {{ stroke: CanvasText; fill: none; opacity: .5; }}
.grid {{ opacity: .12; }}
figure {{ margin: 0; }}
.pictures {{ display: flex; flex-wrap: wrap; gap: .75rem; padding: 0; margin: 0;
  list-style: none; }}
.pictures li {{ width: 8.5rem; font-size: .78rem; line-height: 1.3; }}
.pictures .frame {{ display: flex; align-items: center; justify-content: center; height: 8rem;
  background: var(--soft); border-radius: .3rem; }}
.pictures img {{ width: 100%; height: 100%; object-fit: contain; display: block; }}
.pictures .key {{ font-weight: 600; display: block; margin-top: .2rem; }}
.groups {{ display: flex; flex-wrap: wrap; gap: .75rem; }}
.group {{ padding: .6rem .8rem; border: 1px solid var(--line); border-radius: .4rem; }}
.group p, .none {{ margin: 0 0 .3rem; font-size: .9rem; }}
details {{ border: 1px solid var(--line); border-radius: .4rem; padding: .4rem .8rem;
  margin: .5rem 0; }}
summary {{ cursor: pointer; font-weight: 600; }}
.swatch {{ display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; }}
@media (max-width: 36rem) {{ table {{ font-size: .85rem; }} th, td {{ padding-right: .5rem; }}
  td:nth-child(2), td:last-child:not(.n) {{ min-width: 8rem; }}
  .pictures li {{ width: calc(50% - .4rem); }} .group {{ width: 100%; }} }}
:focus-visible {{ outline: 3px solid var(--link); outline-offset: 2px; }}
</style>
<body>
<header>
<h1>{title}</h1>
<p>{summary}</p>
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main>
{sections}
</main>
</body>
</html>
"""


def page(report: DatasetReport) -> str:
    """Return a report as an HTML page of less than 5 MB, however many images there are.

    It makes no request and runs no script. It needs the datasets, whose images it shows.
    """
    album = _Album(report)
    sections = {
        "Findings": _findings(report, album),
        "Contact sheets": _sheets(report, album),
        "Overview": _overview(report),
        "Channel statistics": _channels(report),
        "Distributions": _charts(report),
        "Classes": _classes(report),
    }
    if report.fields:
        sections["Fields"] = _fields(report)
    return _PAGE.format(
        mark=MARK,
        title=_safe(f"Report on {_names(report)}"),
        summary=_summary(report),
        links="".join(f'<li><a href="#{_id(name)}">{name}</a></li>' for name in sections),
        sections="\n".join(
            f'<section aria-labelledby="{_id(name)}"><h2 id="{_id(name)}">{name}</h2>\n{text}\n'
            "</section>"
            for name, text in sections.items()
        ),
    )


def _names(report: DatasetReport) -> str:
    """Return the names of the datasets, and that of the directory if all are its splits."""
    members = report.images.members
    names = ", ".join(member.name for member in members)
    if any(member.name != member.shards.dataset.split for member in members):
        return names
    return f"{members[0].shards.directory.absolute().parent.name}: {names}"


def _id(name: str) -> str:
    return name.lower().replace(" ", "-")


def _safe(text: str) -> str:
    return escape(printable(text, 300))


def _summary(report: DatasetReport) -> str:
    images = report.images
    nonempty = sum(bool(finding.groups) for finding in report.findings)
    datasets = f" in {len(images.members)} datasets" if len(images.members) > 1 else ""
    classes = f", {amount(len(images.classes), 'class')}" if images.classes else ""
    kinds = amount(nonempty, "kind") + " of findings" if nonempty else "no findings"
    return f"{amount(int(images.present.sum()), 'image')}{datasets}{classes}; {kinds}."


class _Album:
    """The pictures of a page, each made once."""

    def __init__(self, report: DatasetReport) -> None:
        self._images = report.images
        self._several = len(report.images.members) > 1
        self._made: dict[int, str] = {}
        self._bytes = 0

    def item(self, row: int, note: str = "") -> str:
        """Return the item of a list that shows an image with its key, path, class and a note."""
        image = self._images.image(row)
        if row not in self._made:
            shown = data_uri(picture(image.member.shards, image.row, _SIDE))
            self._made[row] = f'<img src="{shown}" alt="{_safe(image.path)}">'
        self._bytes += len(self._made[row])
        frame = self._made[row] if self._bytes <= _EMBEDDED else "image not shown"
        lines = [_safe(image.path)] if image.path != image.key else []
        label = self._images.label(row)
        where = image.member.name if self._several else ""
        described = ", ".join(filter(None, (where, label and f"class {label}", note)))
        if described:
            lines.append(_safe(described))
        for name, field in image.member.shards.schema.items():
            if field.kind == "text":
                caption = image.member.shards.values(name, [image.row]).value(0)
                if caption:
                    lines.append(f"<q>{escape(shortened(caption, _CAPTION))}</q>")
        text = f'<span class="key">{_safe(image.key)}</span>{"<br>".join(lines)}'
        return f'<li><div class="frame">{frame}</div>{text}</li>'

    def items(self, rows: Iterable[int]) -> str:
        return f'<ul class="pictures">{"".join(map(self.item, rows))}</ul>'


class _Link(str):
    """The text of a link to the part of the page with this name."""


def _table(head: Sequence[str], rows: Iterable[Sequence[object]], name: str) -> str:
    """Return a table; numbers are right-aligned, and each `_Link` is a link."""

    def cell(value: object) -> str:
        if isinstance(value, int):
            return f'<td class="n">{value:,}</td>'
        text = _safe(str(value))
        is_link = isinstance(value, _Link)
        return f'<td><a href="#{text}">{text}</a></td>' if is_link else f"<td>{text}</td>"

    first, *others = rows
    heads = [
        f'<th scope="col"{" class=n" * isinstance(value, int)}>{title}</th>'
        for title, value in zip(head, first, strict=True)
    ]
    lines = ["".join(heads), *("".join(map(cell, row)) for row in (first, *others))]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name}">'
        f"<table>{body}</table></div>"
    )


def _overview(report: DatasetReport) -> str:
    overview = report.overview()
    columns = itemgetter("name", "format", "rows", "shards")
    rows = [
        (*columns(dataset), size(dataset["bytes"]), dataset["digest"][:16])
        for dataset in overview["datasets"]
    ]
    datasets = _table(("Dataset", "Format", "Rows", "Shards", "Bytes", "Digest"), rows, "Datasets")
    facts = [
        ("Images", f"{overview['images']:,}"),
        ("Encoded size of images", size(overview["image_bytes"])),
        ("Classes", f"{len(overview['classes']):,}"),
        ("Kinds", _listed(overview["kinds"])),
        ("Pixel modes", _listed(overview["modes"])),
        ("With an ICC profile", f"{overview['with_icc_profile']:,}"),
        ("With several frames", f"{overview['with_several_frames']:,}"),
    ]
    if report.embedding is not None:
        facts.append(("Field with embeddings", report.embedding))
    return datasets + _table(("Property", "Value"), facts, "Properties")


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"


def _channels(report: DatasetReport) -> str:
    if not report.images.measured.any():
        return "<p>No image can be decoded.</p>"
    rows = [
        (name, f"{mean:.4f}", f"{std:.4f}")
        for name, mean, std in zip(("red", "green", "blue"), report.mean, report.std, strict=True)
    ]
    table = _table(("Channel", "Mean", "Standard deviation"), rows, "Channels")
    return (
        f"<p>From 0 to 1. Each image has the same weight.</p>{table}"
        f'<p>To paste:</p><pre tabindex="0">{_safe(report.normalize)}</pre>'
    )


def _charts(report: DatasetReport) -> str:
    figures = [
        f"<figure><figcaption>{_safe(chart.title)}</figcaption>{histogram(chart)}</figure>"
        for chart in report.histograms
    ]
    return f'<div class="grid-of-charts">{"".join(figures)}</div>'


def _classes(report: DatasetReport) -> str:
    counts = report.class_counts
    if not counts:
        return "<p>The dataset has no labels.</p>"
    ranked = sorted(counts.items(), key=lambda item: -sum(item[1]))
    note = ""
    if len(ranked) > _BALANCE:
        half = _BALANCE // 2
        ranked = ranked[:half] + ranked[-half:]
        note = f"<p>The {half} largest and the {half} smallest of {len(counts):,} classes.</p>"
    names = [member.name for member in report.images.members]
    legend = ""
    if len(names) > 1:
        swatches = [
            f'<span class="swatch" style="background:{color}"></span>{_safe(name)}'
            for name, color in zip(names, itertools.cycle(COLORS), strict=False)
        ]
        legend = f"<p>{''.join(swatches)}</p>"
    return note + legend + class_bars(dict(ranked), names)


def _sheets(report: DatasetReport, album: _Album) -> str:
    images = report.images
    labels = np.where(images.present, images.labels, NO_LABEL - 1)
    numbers = [*range(len(images.classes)), NO_LABEL]
    counts = np.bincount(labels[labels >= NO_LABEL] - NO_LABEL, minlength=len(numbers))
    present = [number for number in numbers if counts[number - NO_LABEL]]
    chosen = [present[n] for n in sampled_rows(len(present), _CLASSES, _SEED)]
    blocks = []
    if len(chosen) < len(present):
        blocks.append(f"<p>{len(chosen)} of {len(present):,} classes, drawn at random.</p>")
    for number in chosen:
        rows = np.flatnonzero(labels == number)
        drawn = rows[sampled_rows(len(rows), _PER_CLASS, _SEED)]
        name = "Without a label" if number == NO_LABEL else images.classes[number]
        blocks.append(f"<h3>{_safe(name)} ({amount(len(rows), 'image')})</h3>")
        blocks.append(album.items(drawn.tolist()))
    return "\n".join(blocks)


def _fields(report: DatasetReport) -> str:
    rows = map(itemgetter("dataset", "name", "kind", "rows", "what", "summary"), report.fields)
    head = ("Dataset", "Field", "Kind", "Rows examined", "Counted", "Distribution")
    blocks = [_table(head, rows, "List of fields")]
    for field in report.fields:
        counts = sorted(field.get("counts", {}).items(), key=lambda item: -item[1])[:_BALANCE]
        if counts:
            name = f"{field['name']}: {field['kind']} by class"
            colors = None
            if field["kind"] == "boxes":  # those in the pictures
                names = enumerate(field["counts"])
                colors = {label: BOX_COLORS[n % len(BOX_COLORS)] for n, label in names}
            bars = class_bars({label: [count] for label, count in counts}, [field["name"]], colors)
            blocks.append(f"<h3>{_safe(name)}</h3>{bars}")
    return "".join(blocks)


def _findings(report: DatasetReport, album: _Album) -> str:
    rows = [
        (_Link(finding.kind), KINDS[finding.kind], len(finding.groups), finding.rows)
        for finding in report.findings
        if finding.groups
    ]
    empty = [finding for finding in report.findings if not finding.groups]
    none = [finding.kind for finding in empty if finding.judged]
    blocks = []
    if rows:
        head = ("Finding", "Meaning", "Groups", "Images")
        blocks.append(_table(head, rows, "List of findings"))
    blocks.append(f'<p class="none">Nothing found: {_safe(", ".join(none) or "-")}.</p>')
    blocks += [
        f'<p class="none">{finding.kind}: {_safe(finding.note)}.</p>'
        for finding in empty
        if finding.note
    ]
    blocks += [_finding(report, finding, album) for finding in report.findings if finding.groups]
    return "\n".join(blocks)


def _finding(report: DatasetReport, finding: Findings, album: _Album) -> str:
    shown = finding.groups[:_GROUPS]
    single = all(len(group.rows) == 1 for group in shown)
    if single:
        items = "".join(album.item(group.rows[0], group.note) for group in shown)
        body = f'<ul class="pictures">{items}</ul>'
    else:
        body = (
            f'<div class="groups">{"".join(_group(report, group, album) for group in shown)}</div>'
        )
    more = len(finding.groups) - len(shown)
    if more:
        body += f"<p>... and {more:,} more. <code>shardkit report --json</code> lists all.</p>"
    if finding.note:
        body += f"<p>{_safe(finding.note)}.</p>"
    if not finding.complete:
        body += "<p>There are more similar pairs than can be listed. Use a lower --distance.</p>"
    return (
        f'<details open id="{finding.kind}">'
        f"<summary>{finding.kind}: {amount(finding.rows, 'image')}</summary>"
        f"<p>{_safe(KINDS[finding.kind])}.</p>{body}{_downloads(report, finding)}</details>"
    )


def _group(report: DatasetReport, group: Group, album: _Album) -> str:
    """Return the pictures of a group: at least one of each dataset and class, if there are few."""
    labels = report.images.labels
    members = report.images.member
    firsts = {(int(members[row]), int(labels[row])): row for row in reversed(group.rows)}
    rows = list(dict.fromkeys([*firsts.values(), *group.rows]))[:_PER_GROUP]
    distance = "" if group.distance is None else f"distance {group.distance}"
    text = ", ".join(filter(None, (distance, group.note)))
    if len(group.rows) > _PER_GROUP:
        text += f"; {_PER_GROUP} of {len(group.rows):,} images"
    return f'<div class="group"><p>{_safe(text)}</p>{album.items(sorted(rows))}</div>'


def _downloads(report: DatasetReport, finding: Findings) -> str:
    """Return links to the lists of keys to leave out, which are in the page."""
    links = []
    lists = report.exclude_lists(finding)
    if sum(map(len, lists.values())) > _LISTED:
        return "<p>Too many keys to list here: --exclude DIR writes them to files.</p>"
    splits = {member.name: member.shards.dataset.split for member in report.images.members}
    for member, text in lists.items():
        content = base64.b64encode(text.encode()).decode("ascii")
        name = _safe(report.list_name(finding, member))
        split = f"{_safe(splits[member])}=" if splits[member] else ""
        links.append(
            f"<code>--exclude {split}</code>"
            f'<a download="{name}" href="data:text/plain;base64,{content}">{name}</a>'
        )
    if not links:
        return ""
    return f"<p>To leave these out: <code>shardkit convert ...</code> {', '.join(links)}</p>"
