from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import refused

from shardkit.errors import CorruptShard
from shardkit.formats.webdataset import FORMAT, TarReader
from shardkit.record import Record
from shardkit.system.npy import npy_header
from shardkit.testing import read_shard, records, write_shard

KINDS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def pack(path: Path, members: Mapping[str, bytes], kind: str = "ustar") -> Path:
    """Write a tar file with Python's library."""
    with tarfile.open(path, "w", format=KINDS[kind]) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def fields_by_name(path: Path) -> dict[str, bytes]:
    """Return the content that our reader reads, by member name."""
    return {
        f"{record.key}.{name}": value
        for record in read_shard(FORMAT, path)
        for name, value in record.fields.items()
    }


def checked(header: bytes) -> bytes:
    """Return a header with its correct checksum."""
    blank = header[:148] + b" " * 8 + header[156:]
    return blank[:148] + b"%06o\0 " % sum(blank) + blank[156:]


def header_of(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.USTAR_FORMAT)


END = bytes(1024)


# --- tars of others ---

NAMES = st.from_regex(r"([a-zA-Z0-9 _\-ü★]{1,30}/){0,9}[a-zA-Z0-9 _\-ü★]{1,90}", fullmatch=True)


@settings(max_examples=30)
@given(
    keys=st.lists(NAMES, max_size=6, unique=True),
    values=st.lists(st.binary(max_size=1500), min_size=6, max_size=6),
    kind=st.sampled_from(sorted(KINDS)),
)
@example(
    keys=["a/" * 60 + "b", "c" * 99, "d" * 100, "e/" + "f" * 99], values=[b"1"] * 6, kind="gnu"
)
def test_the_walk_finds_what_tarfile_wrote(keys: list[str], values: list[bytes], kind: str) -> None:
    members = {f"{key}.txt": value for key, value in zip(keys, values, strict=False)}
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = pack(Path(folder) / "t.tar", members, kind)
        except ValueError:
            return  # a name that ustar cannot hold
        assert fields_by_name(path) == members
        with tarfile.open(path) as archive:
            expected = [(member.offset_data, member.size) for member in archive]
        reader = TarReader(path)
        assert [(*fields["txt"],) for fields in reader.ranges()] == expected
        reader.close()


@settings(max_examples=15)
@given(content=records())
def test_tarfile_finds_what_we_wrote(content: list[Record]) -> None:
    expected = [
        (f"{record.key}.{name}", record.fields[name])
        for record in content
        for name in sorted(record.fields)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = write_shard(FORMAT, Path(folder) / "t.tar", content)
        with tarfile.open(path) as archive:
            members = archive.getmembers()[1:]
            files = [archive.extractfile(member) for member in members]
            data = [file.read() if file else None for file in files]
        assert path.stat().st_size % 10240 == 0
    assert list(zip([member.name for member in members], data, strict=True)) == expected


@pytest.mark.skipif(shutil.which("tar") is None, reason="there is no tar command")
def test_a_sparse_member_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "a.bin").open("wb") as file:
        file.truncate(1 << 20)
        file.seek(300_000)
        file.write(b"in the middle")
    (tmp_path / "b.bin").write_bytes(b"after it")
    command = ["tar", "--sparse", "-cf", str(tmp_path / "t.tar"), "-C", str(tmp_path)]
    done = subprocess.run([*command, "a.bin", "b.bin"], check=False, capture_output=True)
    if done.returncode:
        pytest.skip("this tar makes no sparse members")
    with pytest.raises(CorruptShard):
        read_shard(FORMAT, tmp_path / "t.tar")


def test_a_hard_link_is_refused(tmp_path: Path) -> None:
    """GNU tar stores the second name of a file so; ignoring it would lose a record."""
    path = tmp_path / "t.tar"
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("a.jpg")
        info.size = 1
        archive.addfile(info, io.BytesIO(b"A"))
        link = tarfile.TarInfo("b.jpg")
        link.type, link.linkname = tarfile.LNKTYPE, "a.jpg"
        archive.addfile(link)
    with refused(CorruptShard, 1024):
        read_shard(FORMAT, path)


def test_a_name_ends_at_its_first_zero_byte(tmp_path: Path) -> None:
    header = header_of("a.txt", 1)
    header = checked(b"a.txt\0junk of old" + header[17:])
    (tmp_path / "t.tar").write_bytes(header + b"A" + bytes(511) + END)
    with tarfile.open(tmp_path / "t.tar") as archive:
        assert archive.getnames() == ["a.txt"]
    assert fields_by_name(tmp_path / "t.tar") == {"a.txt": b"A"}


def test_a_folder_in_the_oldest_tar_format_is_ignored(tmp_path: Path) -> None:
    header = header_of("folder/", 0)
    folder = checked(header[:156] + b"\0" + header[157:257] + bytes(255))
    (tmp_path / "t.tar").write_bytes(folder + header_of("folder/a.txt", 0) + END)
    assert fields_by_name(tmp_path / "t.tar") == {"folder/a.txt": b""}


@pytest.mark.parametrize(
    "members",
    [
        ["a.jpg", "b.jpg", "a.cls"],
        ["a.jpg", "a.jpg"],
        ["README"],
        ["folder/.hidden"],
        [".hidden.jpg"],
        ["a."],
        ["a.JPG"],
        ["a.b.c.jpg"],
        ["a.raw.npy"],
    ],
)
def test_a_tar_that_breaks_the_rules_is_a_corrupt_shard(members: list[str], tmp_path: Path) -> None:
    path = tmp_path / "t.tar"
    with tarfile.open(path, "w") as archive:
        for name in members:
            archive.addfile(tarfile.TarInfo(name))
    with refused(CorruptShard):
        read_shard(FORMAT, path)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"7", b"\xff", b"[" * 100_000, b'["ab"]'])
def test_a_damaged_description_is_a_corrupt_shard(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(CorruptShard, match="JSON"):
        read_shard(FORMAT, pack(tmp_path / "t.tar", {"__shardkit__": content}))


@pytest.mark.parametrize("values", [0, 11, 13])
def test_pixels_that_contradict_their_header_are_corrupt(values: int, tmp_path: Path) -> None:
    header = npy_header((2, 2, 3))
    whole = {"a.raw.npy": header + bytes(12)}
    damaged = {"b.raw.npy": header + bytes(values)}
    for number, members in enumerate((damaged, whole | damaged)):
        with pytest.raises(CorruptShard, match="array"):
            read_shard(FORMAT, pack(tmp_path / str(number), members))


# --- damage ---


@pytest.mark.parametrize("at", [0, 104, 140, 150, 270, 500])
def test_a_changed_byte_of_a_header_is_a_corrupt_shard(at: int, tmp_path: Path) -> None:
    path = pack(tmp_path / "t.tar", {"a.txt": b"A"})
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with refused(CorruptShard):
        read_shard(FORMAT, path)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [b"-0000001000\0", b"-0000002000\0", b"-0000000001\0"])
def test_a_negative_size_neither_hangs_nor_passes(size: bytes, tmp_path: Path) -> None:
    header = header_of("a.txt", 1)
    header = checked(header[:124] + size + header[136:])
    (tmp_path / "t.tar").write_bytes(header + b"A" + bytes(511) + END)
    with pytest.raises(CorruptShard):
        read_shard(FORMAT, tmp_path / "t.tar")


def test_a_tar_appended_to_another_is_refused(tmp_path: Path) -> None:
    one = pack(tmp_path / "one", {"a.txt": b"A"}).read_bytes()
    (tmp_path / "both").write_bytes(one + pack(tmp_path / "two", {"b.txt": b"B"}).read_bytes())
    with pytest.raises(CorruptShard, match="end"):
        read_shard(FORMAT, tmp_path / "both")


def extension(kind: bytes, content: bytes) -> bytes:
    """Return an extension header with its content."""
    header = header_of("extension", len(content))
    return checked(header[:156] + kind + header[157:]) + content + bytes(-len(content) % 512)


def pax(*records: tuple[str, str]) -> bytes:
    """Return the content of a PAX header."""
    content = b""
    for keyword, value in records:
        text = f" {keyword}={value}\n".encode()
        length = len(text) + len(str(len(text) + 2))
        content += b"%d" % length + text
    return content


MEMBER = header_of("a.txt", 1) + b"A" + bytes(511)


def test_sizes_in_pax_headers_and_in_binary_are_read(tmp_path: Path) -> None:
    header = header_of("b.txt", 1)
    binary = checked(header[:124] + b"\x80" + (1).to_bytes(11, "big") + header[136:])
    without = checked(header_of("a.txt", 0))
    (tmp_path / "t.tar").write_bytes(
        extension(b"x", pax(("size", "1"), ("mtime", "1.5")))
        + without
        + b"A"
        + bytes(511)
        + binary
        + b"B"
        + bytes(511)
        + END
    )
    assert fields_by_name(tmp_path / "t.tar") == {"a.txt": b"A", "b.txt": b"B"}


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        (extension(b"x", pax(("size", "-1"))), ()),
        (extension(b"x", pax(("GNU.sparse.major", "1"))), ()),
        (extension(b"g", pax(("path", "b.txt"))), ()),
        (extension(b"x", pax(*[("mtime", "1")] * 5000)), ()),
        (extension(b"x", bytes(1 << 21)), ("2097152",)),
        (extension(b"x", pax(("mtime", "1"))) * 100, ()),
    ],
    ids=["size", "sparse", "global", "records", "long", "many"],
)
def test_an_extension_that_breaks_the_rules_is_a_corrupt_shard(
    headers: bytes, reason: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "t.tar").write_bytes(headers + MEMBER + END)
    with refused(CorruptShard, *reason):
        read_shard(FORMAT, tmp_path / "t.tar")
