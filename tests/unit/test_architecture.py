"""Imports point downward, between packages and inside each."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "shardkit"

LAYERS = (
    "_version errors",
    "system",
    "record contracts registry",
    "codecs",
    "formats sources stores",
    "dataset sampling",
    "conversion",
    "torch._compat",
    "exporting reporting verification torch.data",
    "torch.engine",
    "torch",
    "measure.runner",
    "measure.bench measure.tune measure.doctor",
    "measure",
    "cli testing",
    "__main__ __init__",
)
"""Packages and root modules, lowest first. None imports a higher one, or its neighbor."""

INSIDE = {
    "": ("_version errors", "record", "contracts", "registry", "__init__ __main__"),
    "cli": (
        "console measure_options options",
        "main show",
        "url_source",
        "convert_report diff doctor_report export index info ladder merge repair report "
        "show_records split upload verify",
        "append bench convert doctor jobs tune",
        "attach index_export",
    ),
    "codecs": (
        "decode_errors geometry quantizers quiet reduced resize structure",
        "foreign jpeg_faults turbo",
        "image",
        "measures properties scaling",
    ),
    "conversion": (
        "disk download entry_files exchange fingerprint geometry trusted",
        "recipe",
        "assemble bulk command exclude lock options plan upload",
        "build combine parted_scan",
        "staging",
        "finished jobs merge",
        "build_all store_jobs",
        "manifests",
        "convert",
        "append attach",
    ),
    "dataset": (
        "columns handles manifest",
        "attached index parts reports",
        "index_builder index_reader remote",
        "directory located",
        "shard_files",
        "shardset",
        "decode selection",
        "facts filling source",
        "splitting",
    ),
    "exporting": (
        "output records",
        "archive folder",
        "parquet",
        "export",
        "tar_index",
    ),
    "formats": (
        "hdf5_layout lmdb_pages table",
        "ranges",
        "hdf5 lmdb webdataset",
    ),
    "measure": (),
    "measure.bench": (
        "report",
        "bench page",
        "ladder",
    ),
    "measure.doctor": (
        "stored",
        "pipeline",
        "checks profile",
        "remedies",
        "judgement",
        "doctor",
    ),
    "measure.runner": (
        "environment folder gil page_cache spec",
        "material",
        "steps",
        "timing",
        "session",
        "process",
        "rounds",
    ),
    "measure.tune": (
        "search",
        "tune",
    ),
    "reporting": (
        "facts neighbors",
        "collection records",
        "channels fields identical",
        "findings",
        "pictures report",
        "charts",
        "page",
    ),
    "sampling": ("order ranks", "epochs weighted"),
    "sources": (
        "arrow_reader crc32c divided hdf5_reader images inputs labels library_process lmdb_reader "
        "spool tf_example",
        "image_files listing npy_files samples table_rows tar_members tfrecord_file",
        "imagefolder kept located tar_parts",
        "named_files",
        "cifar coco hdf5 huggingface lmdb mnist npy table tfrecord voc webdataset",
    ),
    "stores": ("cache process store urls", "client fetch filesystem mirror write"),
    "system": (
        "bootstrap machine native safe_paths scratch text",
        "cluster files formatting pool",
        "npy",
    ),
    "testing": (
        "strategies tools",
        "damage datasets sources storage",
        "conformance",
    ),
    "torch": (
        "_compat",
        "batch_size monitor prefetch sampler tuned",
        "loader",
        "lightning",
    ),
    "torch.data": (
        "collate memory ops",
        "read_context",
        "batch_rows",
        "images",
        "values",
        "datasets",
        "nested",
        "sampled",
        "samplers schedule",
        "resume",
        "iterable",
    ),
    "torch.engine": (
        "failure options preflight ring",
        "fetch",
        "threads workers",
        "processes",
    ),
    "verification": (
        "diff record_comparison reindex",
        "shard_check",
        "remote source_match",
        "describe repair source_comparison",
        "verify",
        "receipt",
    ),
}
"""The modules of each package, lowest first. None imports a higher one, or its neighbor."""

APART = (("torch", "verification"), ("torch", "conversion"), ("formats", "codecs"))
"""Packages of which the first never imports the second, although it stands higher."""

HEAVY = {
    "torch": ("torch", "measure", "codecs.scaling"),  # the recipe loads that module on demand
    "h5py": ("formats", "sources.hdf5_reader"),
    "lmdb": ("formats", "sources.lmdb_reader"),
    "lightning": ("torch.lightning",),
    "pyarrow": ("exporting.parquet", "sources.arrow_reader"),
    "fsspec": ("stores.filesystem",),
    "obstore": ("stores.client",),
}
"""Libraries that only these packages or modules import."""

LAZY = {"recipe": "shardkit.codecs.scaling"}
"""The one module that is loaded inside a function: it needs torch."""


class Import(NamedTuple):
    module: str
    """What is imported, as a module if it is one of the package."""
    at_top: bool
    typing_only: bool


def module_of(path: Path) -> str:
    """Return the dotted name in the package: ``torch.data.ops``; a package is its ``__init__``."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


FILES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def package_of(module: str) -> str:
    return module.rpartition(".")[0]


def layer_of(module: str) -> tuple[int, str]:
    """Return the number and name of the longest entry of LAYERS that contains the module."""
    found = [
        (len(place), number, place)
        for number, places in enumerate(LAYERS)
        for place in places.split()
        if module == place or module.startswith(place + ".")
    ]
    assert found, f"shardkit/{module}: no layer holds it; add it to LAYERS"
    _, number, place = max(found)
    return number, place


def tier_of(module: str) -> int:
    """Return the number of the tier in INSIDE; a package's own ``__init__`` is above all."""
    package, _, name = module.rpartition(".")
    tiers = INSIDE[package]
    return next((n for n, tier in enumerate(tiers) if name in tier.split()), len(tiers))


def imports(path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text("utf-8"))
    typing_only = {
        id(node)
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    top = {id(node) for node in tree.body}
    top |= {id(node) for block in tree.body if isinstance(block, ast.Try) for node in block.body}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            module = node.module or ""
            submodules = [f"{module}.{alias.name}" for alias in node.names]
            names = [name if name[9:] in FILES else module for name in submodules]
        for name in names:
            yield Import(name, id(node) in top, id(node) in typing_only)


def own(module: str) -> str | None:
    """Return the name inside the package, or None for a library."""
    if module.split(".", maxsplit=1)[0] != "shardkit":
        return None
    name = module[9:]
    return name if name in FILES else f"{name}.__init__".lstrip(".")


def test_every_module_has_a_layer() -> None:
    for package, tiers in INSIDE.items():
        listed = sorted(name for tier in tiers for name in tier.split())
        found = sorted(
            name.rpartition(".")[2]
            for name in FILES
            if package_of(name) == package and (not name.endswith("__init__") or not package)
        )
        assert listed == found, f"shardkit/{package}: INSIDE lists other modules than there are"
    for name in FILES:
        assert package_of(name) in INSIDE, f"{name}: INSIDE does not list its package"


def test_imports_point_downward() -> None:
    wrong = []
    for name, path in FILES.items():
        for each in imports(path):
            target = own(each.module)
            if target is None or (each.typing_only and name == "__init__"):
                continue
            if package_of(target) == package_of(name):
                fine = tier_of(target) < tier_of(name)
            else:
                (number, place), (other, its_place) = layer_of(name), layer_of(target)
                fine = other < number or place == its_place
            if not fine or any(
                name.split(".")[0] == a and target.split(".")[0] == b for a, b in APART
            ):
                wrong.append(f"{name} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_imports_are_at_the_top() -> None:
    for name, path in FILES.items():
        for each in imports(path):
            lazy = LAZY.get(name.rpartition(".")[2]) == each.module
            assert each.at_top or each.typing_only or lazy, f"{name} imports {each.module} late"


def test_heavy_libraries_stay_in_their_packages() -> None:
    for name, path in FILES.items():
        for each in imports(path):
            allowed = HEAVY.get(each.module.split(".")[0])
            if allowed is not None and not each.typing_only:
                inside = any(name == place or name.startswith(place + ".") for place in allowed)
                assert inside, f"{name} imports {each.module}"


def test_one_module_handles_forks() -> None:
    knowing = {
        name for name, path in FILES.items() if "register_at_fork" in path.read_text("utf-8")
    }

    assert knowing == {"dataset.handles"}


def test_no_format_or_source_is_named_outside_the_registry() -> None:
    for name, path in FILES.items():
        if layer_of(name)[0] < layer_of("torch.data")[0] and name.split(".")[0] not in (
            "formats",
            "sources",
            "registry",
        ):
            strings = {
                node.value
                for node in ast.walk(ast.parse(path.read_text("utf-8")))
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
            assert not strings & {"lmdb", "hdf5", "webdataset", "imagefolder"}, name
