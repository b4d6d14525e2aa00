"""Decode errors: bad images are told from lack of memory."""

from __future__ import annotations

import io
import re
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import FORMATS, encoded, jpeg, make_dataset, make_tree, picture, png, python
from PIL import Image, ImageFile, PngImagePlugin
from refusals import refused

from shardkit import convert, open_dataset
from shardkit.codecs import image as codec
from shardkit.codecs import quiet
from shardkit.codecs.decode_errors import as_bad_image, require_memory
from shardkit.codecs.foreign import identify
from shardkit.codecs.image import decode, encode, inspect
from shardkit.errors import BadImage
from shardkit.pipeline import convert_record
from shardkit.recipe import Recipe
from shardkit.record import FOREIGN_FIELD, Record

SCARCE = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from helpers import encoded, np, picture, png
from shardkit.codecs.image import decode, inspect
from shardkit.errors import BadImage

image = picture(1200, 1200)
files = (
    ("jpg", encoded(image, "JPEG")),
    ("jpg", encoded(image, "JPEG", progressive=True, subsampling=0)),
    ("jpg", encoded(image.convert("CMYK"), "JPEG")),
    ("png", encoded(image.convert("RGBA"), "PNG", compress_level=1)),
    ("webp", encoded(image, "WEBP", quality=50, method=0)),
    ("webp", encoded(image, "WEBP", lossless=True, method=0)),
    ("gif", encoded(image.quantize(16), "GIF")),
    ("tiff", encoded(image, "TIFF", compression="tiff_lzw")),
    ("bmp", encoded(image, "BMP")),
    ("ppm", encoded(image, "PPM")),
)
for field, data in files:
    good = decode(data, field).tobytes()
    for room in range(0, 40, 2):
        status = open("/proc/self/status").read()
        mapped = int(status.split("VmSize:")[1].split()[0]) * 1024
        resource.setrlimit(resource.RLIMIT_AS, (mapped + (room << 20), -1))
        try:
            inspect(data, field)
            pixels = decode(data, field)
            found = "good" if pixels.tobytes() == good else "other pixels"
            del pixels
        except MemoryError:
            found = "no memory"
        except BadImage as error:
            found = f"blamed: {error}"
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
        print(field, found)
"""


@pytest.mark.slow
def test_an_image_is_never_blamed_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # what is freed is gone
    done = python(SCARCE, (Path(__file__).parents[2] / "support"))
    assert done.returncode == 0, done.stderr
    found = set(done.stdout.splitlines())
    kinds = ("jpg", "png", "webp", "gif", "tiff", "bmp", "ppm")
    assert found <= {f"{kind} {end}" for kind in kinds for end in ("good", "no memory")}
    assert found >= {f"{kind} good" for kind in kinds}
    assert found >= {f"{kind} no memory" for kind in ("jpg", "png", "webp")}


SAMPLES = {
    "jpg": encoded(picture(mode="CMYK"), "JPEG"),
    "png": png(mode="P"),  # others may be checked without Pillow
    "webp": encoded(kind="WEBP"),
    "gif": encoded(kind="GIF"),
    "bmp": encoded(kind="BMP"),
    "tiff": encoded(kind="TIFF"),
    "ppm": encoded(kind="PPM"),
}
SHORTAGES = (MemoryError(), OSError("out of memory error when reading image file"))


def fail(error: Exception) -> Callable[..., Any]:
    def failing(*_: object, **__: object) -> Any:
        raise error

    return failing


@pytest.mark.usefixtures("without_native")
@pytest.mark.parametrize("field", SAMPLES)
@pytest.mark.parametrize("shortage", SHORTAGES, ids=repr)
def test_a_lack_of_memory_passes_through(
    monkeypatch: pytest.MonkeyPatch, field: str, shortage: Exception
) -> None:
    record = Record("a", {field: SAMPLES[field]})
    monkeypatch.setitem(codec._OPENERS, field, fail(shortage))
    with pytest.raises(MemoryError):
        decode(SAMPLES[field], field)
    with pytest.raises(MemoryError):
        convert_record(Recipe(), record)
    if field != "jpg":  # whose header simplejpeg reads
        with pytest.raises(MemoryError):
            convert_record(Recipe(check="none"), record)
    monkeypatch.undo()
    monkeypatch.setattr(Image.Image, "load", fail(shortage))
    monkeypatch.setattr(ImageFile.ImageFile, "load", fail(shortage))
    for kind in ("Tiff", "Gif", "WebP", "Png"):
        plugin = vars(codec)[f"{kind}ImagePlugin"]
        monkeypatch.setattr(vars(plugin)[f"{kind}ImageFile"], "load", fail(shortage))
    with pytest.raises(MemoryError):
        decode(SAMPLES[field], field)


@pytest.mark.parametrize("reason", ["Insufficient memory (case 4)", "Memory allocation failure"])
def test_simplejpeg_s_out_of_memory_messages_are_recognized(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr("simplejpeg.decode_jpeg", fail(ValueError(reason)))
    with pytest.raises(MemoryError, match=re.escape(reason)):
        decode(jpeg(), "jpg")


@pytest.mark.usefixtures("without_native")  # whose encoder is not Pillow's
@pytest.mark.parametrize("field", ["jpg", "png", "webp"])
def test_a_lack_of_memory_while_encoding_passes_through(
    monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    for shortage in (MemoryError(), OSError("out of memory error when writing image file")):
        monkeypatch.setattr(Image.Image, "save", fail(shortage))
        with pytest.raises(MemoryError):
            encode(np.asarray(picture()), field, 90)


@pytest.mark.usefixtures("without_native")
@pytest.mark.parametrize("to", FORMATS)
def test_a_conversion_never_skips_an_image_for_lack_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Any
) -> None:
    source = make_tree(tmp_path / "photos", {"a/1.png": png(mode="P"), "a/2.jpg": jpeg()})
    monkeypatch.setitem(codec._OPENERS, "png", fail(MemoryError()))
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - the kind is for others to choose
        convert(source, tmp_path / "set", to=to, on_error="skip")
    assert not isinstance(caught.value, BadImage)
    assert not (tmp_path / "set" / "shardkit.json").exists()


def test_the_reason_is_readable() -> None:
    for error, said in (
        (AssertionError(), "its parts contradict each other (AssertionError)"),
        (IndexError("list index out of range"), "contradict each other (IndexError: list index"),
        (OSError("decoder error -2"), "it is odd: its data are damaged"),
        (SyntaxError("not a <_io.BytesIO object at 0x7f00> file"), "it is odd: not a file"),
        (ValueError("no memory of this"), "it is odd: no memory of this"),
    ):
        with pytest.raises(BadImage, match=re.escape(said)), as_bad_image("it is odd"):
            raise error


def test_an_images_text_about_memory_is_ignored() -> None:
    require_memory("Too much memory used in text chunks")
    require_memory("Token too long: out of memory")


def test_an_ambiguous_error_is_decided_by_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(BadImage), as_bad_image("it is odd", 1 << 20):
        raise OSError("decoder error -9")
    monkeypatch.setattr("numpy.empty", fail(MemoryError()))
    with pytest.raises(MemoryError), as_bad_image("it is odd", 1 << 20):
        raise OSError("decoder error -9")


INTERRUPTED = {**SAMPLES, FOREIGN_FIELD: encoded(kind="TGA")}
MOMENTS = 60


class Interruption:
    """Sends this process a signal at the given call or return of a function."""

    def __init__(self, at: int = -1) -> None:
        self.at = at
        self.events = 0

    def __call__(self, *_: object) -> None:
        self.events += 1
        if self.events == self.at:
            signal.raise_signal(signal.SIGALRM)

    def run(self, *functions: Callable[[], object]) -> None:
        previous = sys.getprofile()
        sys.setprofile(self)
        try:
            for function in functions:
                function()
        finally:
            sys.setprofile(previous)


@pytest.fixture(params=[RuntimeError, TimeoutError, ValueError])
def time_limit(request: pytest.FixtureRequest) -> Iterator[type[Exception]]:
    """Type of the exception that a handler of SIGALRM raises."""

    def end(*_: object) -> None:
        raise request.param("time is up")

    previous = signal.signal(signal.SIGALRM, end)
    yield request.param
    signal.signal(signal.SIGALRM, previous)
    quiet._here.depth = 0  # Python has a step between entering a context and its `with` block


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a deletion
@pytest.mark.parametrize("field", INTERRUPTED)
def test_an_image_is_never_blamed_for_a_signal(field: str, time_limit: type[Exception]) -> None:
    if field == "tiff" and time_limit is not RuntimeError:
        pytest.skip("Pillow's TIFF reader handles these itself")
    data = INTERRUPTED[field]
    steps: list[Callable[[], object]] = [
        partial(inspect, data, field),
        partial(decode, data, field),
    ]
    if field == FOREIGN_FIELD:
        steps.append(partial(identify, io.BytesIO(data)))
    complete = Interruption()
    complete.run(*steps)
    ended = []
    for at in range(1, complete.events, max(1, complete.events // MOMENTS)):
        try:
            Interruption(at).run(*steps)  # its handler may return to a library that goes on
        except time_limit as error:
            ended.append(error)
    assert {(type(error), str(error)) for error in ended} == {(time_limit, "time is up")}


def test_the_fault_of_an_image_counts_after_a_signal(time_limit: type[Exception]) -> None:
    try:
        signal.raise_signal(signal.SIGALRM)
    except time_limit:
        with pytest.raises(BadImage):
            decode(jpeg()[:300], "jpg")


@pytest.mark.usefixtures("without_native")
def test_a_conversion_never_skips_an_image_for_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, time_limit: type[Exception]
) -> None:
    source = make_tree(tmp_path / "photos", {"a/1.png": png(mode="P"), "a/2.jpg": jpeg()})
    load = Image.Image.load

    def interrupted(image: Image.Image) -> Any:
        signal.raise_signal(signal.SIGALRM)
        return load(image)

    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", interrupted)
    with refused(time_limit) as caught:
        convert(source, tmp_path / "set", to="lmdb", on_error="skip", workers=1)
    assert type(caught.value) is time_limit
    monkeypatch.undo()
    done = convert(source, tmp_path / "set", to="lmdb", on_error="skip", workers=1)
    assert len(open_dataset(tmp_path / "set")) == 2, done


def test_samples_and_transforms_are_never_blamed_for_a_signal(
    tmp_path: Path, time_limit: type[Exception]
) -> None:
    class Slow(list[Any]):
        def __getitem__(self, number: Any) -> Any:
            signal.raise_signal(signal.SIGALRM)

    def slow(_: object) -> None:
        signal.raise_signal(signal.SIGALRM)

    with refused(time_limit):
        convert(Slow([1]), tmp_path / "set", to="lmdb", on_error="skip", fields=("image", "label"))
    source = make_tree(tmp_path / "photos", {"a/1.png": png()})
    with refused(time_limit):
        open_dataset(make_dataset(source, tmp_path / "other"), transform=slow)[0]
