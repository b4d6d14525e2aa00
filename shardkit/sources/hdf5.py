"""HDF5 files from other programs: one dataset of all images, or of each split, or one per image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from shardkit.contracts import Attaching, Recognition, Source, SourceKind
from shardkit.sources.columns import NONE, lost_labels
from shardkit.sources.hdf5_datasets import SUFFIXES, columns_of, datasets_of
from shardkit.sources.hdf5_images import Hdf5Images, Hdf5Options
from shardkit.sources.hdf5_rows import Hdf5Rows
from shardkit.sources.inputs import find_files, refusing
from shardkit.sources.recognize import Overview, having, split_in
from shardkit.sources.together import Member, Together

_SIGNATURE = b"\x89HDF\r\n\x1a\n"


def _open(pattern: str | Path, options: Hdf5Options) -> Source:
    """Open a source of rows, of splits or, if each dataset is an image, of datasets."""
    if Hdf5Images.fits(pattern, options):
        return Hdf5Images(pattern, options)
    names = _splits(pattern, options)
    members = {
        split: Member(Hdf5Rows(pattern, replace(options, image=name), split), ())
        for split, name in names.items()
    }
    return Together(Path(pattern), members) if members else Hdf5Rows(pattern, options)


def _splits(pattern: str | Path, options: Hdf5Options) -> Mapping[str, str]:
    """Return the images of each split if a file has several, such as ``x_train`` and ``x_test``.

    There are none if the user named datasets, or if labels of the same length are of no split: they
    could belong to another one.
    """
    path, *others = find_files(pattern, SUFFIXES).paths
    is_given = options.image or options.keep or options.name or options.label not in (None, NONE)
    if others or is_given:
        return {}
    with refusing(path):
        columns = columns_of(path, datasets_of(path))
    images = [column for column in columns if column.holds == "image"]
    splits = {split_in(image.name): image for image in images}
    if not 1 < len(splits) == len(images) or "" in splits:
        return {}
    for split, image in splits.items():
        alike = [column.name for column in columns if column.rows == image.rows]
        if lost_labels([name for name in alike if split_in(name) != split], image.name):
            return {}
    return {split: image.name for split, image in splits.items()}


def _recognize(seen: Overview) -> Iterator[Recognition]:
    """Yield what shows HDF5 files; only files of MATLAB 7.3 or later are such."""
    if seen.path.suffix.lower() != ".mat":
        yield from having(suffixes=(".h5", ".hdf5"))(seen)
    elif _SIGNATURE in seen.ends(size=1024):
        yield Recognition("a .mat file in HDF5 format")


SOURCE = SourceKind(
    name=Hdf5Rows.kind,
    title="Convert HDF5 files from other programs.",
    help="""Convert a dataset of images in HDF5 files to a dataset in DST.

    SRC is a file, a folder of .h5, .hdf5 or .mat files (MATLAB 7.3), or a quoted pattern with
    {000..999}, * or ?. Images are uint8 arrays, which become PNG files, or bytes of encoded images.
    h5py reads them in a separate process, so a damaged file cannot crash the conversion. Links to
    other files are not followed. x_train, y_train, x_test and y_test in one file become splits. If
    each image is a separate dataset, its group is the class; --image '*/image' --label '*/label'
    selects the datasets of images and labels.

    \b
    Examples:
      shardkit convert hdf5 camelyon.h5 dataset --to lmdb --image x --label y
      shardkit convert hdf5 'part-*.h5' dataset --to webdataset --image train/jpeg --dry-run
    """,
    options=Hdf5Options,
    of_files=True,
    refuses_shards=True,
    attaching=Attaching(
        title="HDF5 files with a dataset of images.",
        help="""Index the images in HDF5 files where they are, as a dataset in INDEX_DIR.

        ARCHIVES is a file, a folder of them, or a quoted pattern with {000..999}, * or ?. Images
        are encoded bytes, or uint8 arrays of height x width x 3, in a dataset without compression.

        \b
        Example:
          shardkit attach hdf5 camelyon.h5 camelyon-index --image x --label y
        """,
    ),
    recognize=_recognize,
    source=_open,
)
