"""Options are stated once: signatures, help and commands derive from the classes."""

from __future__ import annotations

import inspect
import pickle
import pydoc
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import numpy as np
import pytest
from click.testing import CliRunner
from refusals import refused
from table import for_each

import shardkit
from shardkit import (
    EpochBatchSampler,
    IterableShardDataset,
    ShardDataset,
    make_loader,
    open_dataset,
)
from shardkit.cli.main import cli
from shardkit.conversion.convert import Asked, plan_conversion
from shardkit.errors import UsageError, setting
from shardkit.options import (
    about,
    changed,
    describe,
    group,
    make,
    option,
    options_of,
    require_valid,
    restored,
    same_option,
    takes,
    words,
)
from shardkit.recipe import Recipe
from shardkit.torch.data.order_options import OrderOptions
from shardkit.torch.data.reader_options import ReaderOptions
from shardkit.torch.engine.options import LoaderOptions


@dataclass(frozen=True, kw_only=True)
class Paint:
    HEADING: ClassVar[str] = "Paint"

    color: str = option("red", help=f"Color; see {setting('gloss')}.", choices=("red", "blue"))
    gloss: bool = option(False, help="Shine.", requires="layers", left_out=True)
    layers: int | None = option(None, help="Coats.", parse=int)
    hours: float = option(1.5, help="Time to dry.", left_out=True, is_positive=True)

    def __post_init__(self) -> None:
        require_valid(self)


def test_an_option_is_parsed_checked_described_and_spelled() -> None:
    given: dict[str, Any] = {"layers": "2", "gloss": True, "other": 1}
    paint = make(Paint, given)
    assert (paint, given) == (Paint(layers=2, gloss=True), {"other": 1})
    assert describe(Paint()) == {"color": "red", "layers": None}
    assert restored(Paint, describe(paint)) == paint
    assert words(Paint, changed(paint)) == ["--gloss", "--layers", "2"]
    with refused(UsageError, "color='green'"):
        Paint(color="green")
    with pytest.raises(UsageError, match="gloss= requires layers="):
        Paint(gloss=True)
    hours: Any
    for hours in (0, -1.0, float("nan"), float("inf"), "2"):
        with refused(UsageError, "hours=", "number"):
            Paint(hours=hours)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Some options."""

    size: int = option(
        3,
        help="The size, which is explained in a text that is so long that it continues in a "
        f"second line; see {setting('text')}, not ``a --flag``.",
    )


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a text ends."""

    end: str = field(metadata=about("The end."))


@dataclass(frozen=True, kw_only=True)
class Both:
    """Two groups."""

    sizes: Options = group(Options)
    ending: Ending = group(Ending)


@takes(Options)
def double(options: Options, text: str) -> str:
    """Return a text twice.

    Args:
        text: The text.

    Raises:
        ValueError: Never.
    """
    return text * 2 * options.size


@takes(Both)
def ended(both: Both, text: str, *, times: int = 1) -> str:
    """Return a text with an end."""
    return text * both.sizes.size * times + both.ending.end


@takes(Options, Ending)
def ended_alike(options: Options, ending: Ending, text: str) -> str:
    """Return a text with an end."""
    return ended(text, size=options.size, end=ending.end)


class Doubled:
    """A text."""

    @takes(Options)
    def __init__(self, options: Options, text: str) -> None:
        """Take a text.

        Args:
            text: The text.
        """
        self.options = options
        self.text = text


def test_functions_and_methods_are_called_with_the_fields() -> None:
    assert double("a", size=1) == double(text="a", size=1) == "aa"
    doubled = Doubled("a", size=2)
    assert (doubled.options, doubled.text) == (Options(size=2), "a")
    assert ended("a", size=2, end=".", times=2) == "aaaa."
    assert ended_alike("a", end="!") == "aaa!"
    with refused(TypeError, "'end'"):
        ended("a")
    assert pickle.loads(pickle.dumps(double)) is double


@for_each(
    ("function", "paths"),
    [(shardkit.append, ("", "x")), (shardkit.attach, ("x.tar", "")), (shardkit.split, ("",))],
)
def test_an_empty_path_is_not_the_current_folder(
    function: Callable[..., object], paths: tuple[str, ...]
) -> None:
    with refused(UsageError, "URL"):
        function(*paths)


FUNCTIONS: dict[Callable[..., Any], tuple[str, ...]] = {
    shardkit.append: ("x", "y"),
    shardkit.attach: ("x.tar", "y"),
    shardkit.bench: ("x",),
    shardkit.convert: ("x", "y"),
    shardkit.doctor: ("x",),
    shardkit.export: ("x", "y"),
    shardkit.fields.add: ("x", "y"),
    shardkit.fields.replace: ("x", "y"),
    shardkit.split: ("x",),
    shardkit.tune: ("x",),
    shardkit.verify: ("x",),
    make_loader: ("x",),
    open_dataset: ("x",),
    EpochBatchSampler: ("x",),
    IterableShardDataset: ("x",),
    ShardDataset: ("x",),
}
"""Public functions, and arguments that they would only look at later."""

ANY = {"against", "batch_size", "decode", "sampler", "values", "watch"}
"""Options that the work itself checks."""


@for_each("function", FUNCTIONS)
def test_no_option_takes_any_object(function: Any) -> None:
    parameters = inspect.signature(function).parameters
    required = {"to": "lmdb", "field": ("a",), "batch_size": 1}
    given = {name: value for name, value in required.items() if name in parameters}
    call = vars(function).get("__init__", function)  # of a class
    for item in call.__options__:
        if item.name not in ANY:
            with pytest.raises(UsageError, match=f"{item.name}.*<object object"):
                function(*FUNCTIONS[function], **{**given, item.name: object()})


@for_each(
    ("function", "options", "words"),
    [
        (shardkit.convert, {"to": 3}, "to=3 is unknown; choose from hdf5, lmdb, webdataset"),
        (shardkit.convert, {"class_order": 3}, "class_order=3 must be text or a path"),
        (shardkit.convert, {"recipe": "x"}, "recipe='x' must be Recipe or None"),
        (shardkit.convert, {"on_progress": "x"}, "on_progress='x' must be a function or None"),
        (shardkit.convert, {"limit": True}, "limit=True must be an integer or None"),
        (shardkit.convert, {"val": "0.1"}, "val='0.1' must be a number"),
        (shardkit.convert, {"exclude": 3}, "exclude=3 must be text, a path or a list"),
        (shardkit.convert, {"force": 1}, "force=1 must be True or False"),
        (open_dataset, {"fields": "image"}, "must be a list such as ['image'] or None"),
        (open_dataset, {"fields": [3]}, "fields=[3] must be a list such as ['image'] or None"),
        (open_dataset, {"transform": 3}, "must be a function, ImageOp, a dict or None"),
        (open_dataset, {"split": Path("x")}, "must be text or None"),
        (shardkit.fields.add, {"field": None}, "field=None must be a list such as ['image']"),
        (make_loader, {"seed": 1.0}, "seed=1.0 must be an integer or None"),
        (make_loader, {"timeout": "9"}, "timeout='9' must be a number"),
        (make_loader, {"batch_size": None}, "batch_size="),
    ],
)
def test_a_value_of_another_type_is_refused_with_what_is_allowed(
    function: Callable[..., Any], options: dict[str, Any], words: str
) -> None:
    given = {"to": "lmdb", **options} if function is shardkit.convert else options
    with refused(UsageError, words):
        function(*FUNCTIONS[function], **given)


def test_numbers_lists_and_paths_of_other_libraries_are_taken() -> None:
    options = OrderOptions(seed=np.int64(3))  # type: ignore[arg-type]
    assert changed(options) == {"seed": 3}
    names: Any = dict.fromkeys(["image"])
    assert changed(ReaderOptions(fields=names, root=PurePosixPath("x")))["fields"] == names


def test_the_signature_and_the_docstring_have_all_arguments() -> None:
    assert (
        str(inspect.signature(double)) == "(\n    text: str,\n    *,\n    size: int = 3,\n) -> str"
    )
    assert list(inspect.signature(Doubled).parameters) == ["text", "size"]
    assert (
        inspect.getdoc(double)
        == """Return a text twice.

Args:
    text: The text.
    size: The size, which is explained in a text that is so long that it continues in a second
        line; see ``text``, not ``a --flag``.

Raises:
    ValueError: Never."""
    )
    assert (
        inspect.getdoc(Doubled.__init__)
        == (inspect.getdoc(double) or "")
        .replace("Return a text twice.", "Take a text.")
        .partition("\n\nRaises")[0]
    )


def test_the_changes_of_options_are_those_from_their_defaults() -> None:
    assert changed(Options(size=4)) == {"size": 4}
    assert changed(Ending(end="b")) == {}


def test_no_two_options_of_a_function_have_one_name() -> None:
    """One of the two values would be lost."""
    with refused(TypeError, "size"):
        takes(Both, Options)


def test_an_option_of_two_classes_is_stated_once() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Wall:
        color: str = same_option(Paint, "color", metavar="COLOR")

    (same,), (paint, *_) = options_of(Wall), options_of(Paint)
    assert (same.heading, same.help, same.choices) == ("Paint", paint.help, paint.choices)
    assert (same.metavar, paint.metavar, Wall().color) == ("COLOR", None, "red")


def test_help_lists_every_option_of_a_loader_and_of_a_dataset() -> None:
    own = {"dataset", "batch_size", "tuned"}
    for function, kinds, others in (
        (make_loader, (OrderOptions, LoaderOptions), own),
        (open_dataset, (ReaderOptions,), {"path"}),
    ):
        names = {item.name for kind in kinds for item in fields(kind)} | others
        assert set(inspect.signature(function).parameters) == names
        assert all(f"    {name}: " in (function.__doc__ or "") for name in names)


def test_help_of_convert_lists_all_options() -> None:
    text = pydoc.render_doc(shardkit.convert)
    names = [*inspect.signature(shardkit.convert).parameters]
    assert all(f"        {name}: " in text for name in names)
    stated = [item.name for kind in fields(Asked) for item in options_of(kind.metadata["group"])]
    assert sorted(names) == sorted(["source", "target", "recipe", *stated])
    assert {"source", "to", "resize", "schema", "val", "workers"} < {*names}


def test_a_misspelled_keyword_is_refused(tmp_path: Path) -> None:
    """By mypy, too: it would report an unused ignore."""
    with refused(TypeError, "'resise'"):
        shardkit.convert("sample_data", tmp_path / "out", to="lmdb", resise=8)  # type: ignore[call-arg]
    with refused(TypeError, "make_loader()", "keyword argument 'shufle'", "Did you mean shuffle?"):
        make_loader([1], 1, shufle=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="decod"):
        open_dataset(tmp_path, decod="torch")  # type: ignore[call-arg]
    for kind in (ShardDataset, IterableShardDataset):
        with pytest.raises(TypeError, match="decod"):
            kind(tmp_path, decod="torch")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="sead"):
        EpochBatchSampler([1], 1, sead=1)  # type: ignore[call-arg]
    with refused(TypeError, "'dataset'"):
        make_loader()  # type: ignore[call-arg]
    make_loader(dataset=[1], batch_size=1, engine="thread", num_workers=0)


def test_an_option_of_a_data_loader_names_what_replaces_it() -> None:
    for name, way in (
        ("batch_sampler", "sampler="),
        ("worker_init_fn", "shardkit.with_rng"),
        ("generator", "seed="),
        ("multiprocessing_context", "start_method="),
        ("pin_memory_device", "DevicePrefetcher"),
    ):
        with refused(TypeError, f"make_loader() got an unexpected keyword argument {name!r}", way):
            make_loader([1], 1, **dict[str, Any]({name: None}))


def test_a_flag_is_true_or_false_and_a_message_is_short(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    values: list[Any] = ["yes", 1, [], "x" * 100_000]
    for wrong in values:
        with refused(UsageError, "force"):
            shardkit.convert(tmp_path / "photos", tmp_path / "made", to="lmdb", force=wrong)
        with refused(UsageError, "as_dict"):
            open_dataset(tmp_path / "photos", as_dict=wrong)
        with refused(UsageError, "pin_memory"):
            make_loader(range(3), 1, pin_memory=wrong)


def test_a_value_of_another_type_is_refused_with_its_option(tmp_path: Path) -> None:
    number: Any = 5
    windows = shardkit.Windows("label", "label", {"image": (0,)})
    for name in ("fields", "follow", "windows", "split"):
        with refused(UsageError, f"{name}=5"):
            open_dataset(tmp_path, **{name: number})
    with refused(UsageError, "fields=5"):
        open_dataset(tmp_path, windows=windows, fields=number)
    for name in ("exclude", "fields"):
        with refused(UsageError, f"{name}=5"):
            shardkit.convert("sample_data", tmp_path / "new", to="lmdb", **{name: number})
    nothing: Any = None
    with refused(UsageError, "workers=None"):
        shardkit.convert("sample_data", tmp_path / "new", to="lmdb", workers=nothing)
    with refused(UsageError, "tuned=5"):
        make_loader([1], 1, tuned=number)


def test_a_required_keyword_is_required() -> None:
    """By mypy, too."""
    with refused(TypeError, "'to'"):
        shardkit.convert("photos", "out")  # type: ignore[call-arg]


def test_a_recipe_takes_the_place_of_its_options(tmp_path: Path) -> None:
    recipe = Recipe(resize=8)
    plan = plan_conversion("sample_data", tmp_path / "out", to="lmdb", recipe=recipe)
    assert plan.options.recipe == recipe
    with refused(UsageError):
        plan_conversion("sample_data", tmp_path, to="lmdb", recipe=recipe, encode="png")


def test_sources_refuse_unknown_options() -> None:
    with refused(UsageError):
        shardkit.open_source("coco", "annotations.json", rot="photos")


def test_the_command_shows_its_options_under_headings() -> None:
    text = CliRunner().invoke(cli, ["convert", "imagefolder", "--help"]).output
    headings = [line[:-1] for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings == ["Shards", "Images", "Source", "Division", "Running", "Output", "Options"]
    assert text.index("Running:") < text.index("--workers") < text.index("Output:")
