"""The decoded rows of datasets in memory: what they need, and batches of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from shardkit.errors import UsageError, setting
from shardkit.sampling.order import BatchDraws, Draws, Positions, sample_number
from shardkit.system import compiled
from shardkit.system.machine import free_memory
from shardkit.system.text import amount
from shardkit.system.text import size as in_words
from shardkit.torch.data import nested
from shardkit.torch.data.collate import BatchView, Values
from shardkit.torch.data.crops import RandomCrop
from shardkit.torch.data.datasets import ShardDataset
from shardkit.torch.data.ops import ImageOp
from shardkit.torch.data.read_context import draws_key, new_block
from shardkit.torch.data.schedule import Request
from shardkit.torch.engine.preflight import local_ranks


def resident_bytes(dataset: Any) -> int:
    """Return the bytes that a resident dataset would take, without allocating them.

    Raises UsageError if it cannot be resident, whatever the memory.
    """
    if not len(dataset):
        return 0
    members = [member for _, member, _ in members_of(dataset, torch.device("cpu"))]
    require_same_fields(members)
    return sum(member.bytes for member in members)


def members_of(
    dataset: Any, device: torch.device
) -> Iterator[tuple[nested.Portion, Member, Positions]]:
    """Yield each inner dataset with rows of a dataset, and their positions in memory."""
    for portion in nested.portions(dataset, list(range(len(dataset)))):
        if portion.rows:
            rows, positions = np.unique(portion.rows, return_inverse=True)
            yield portion, Member(portion.dataset, rows, device), positions


class Member:
    """The rows of one dataset that are in memory."""

    def __init__(self, dataset: Any, rows: Positions, device: torch.device) -> None:
        """Determine the memory of each field; `allocate` allocates it."""
        _require_tensors(dataset)
        self.dataset: ShardDataset = dataset
        decodes = dataset.reader.decodes
        crops = {n: op for n, op in decodes.items() if isinstance(op, RandomCrop) and op.random}
        self.whole = dataset.select(rows)
        if crops:
            self.whole.decode = decodes | dict.fromkeys(crops, "torch")
        _require_one_size(self.whole, crops if isinstance(dataset.decode, ImageOp) else ())
        assert self.whole.selected is not None
        self._stored: Positions = self.whole.selected
        first = self.whole[:1]
        self._types = {name: type(value) for name, value in self._by_field(first[0]).items()}
        self.fields: dict[str, _Field] = {}
        for name, block in self._by_field(first.batch).items():
            if not isinstance(block, torch.Tensor):
                raise UsageError(
                    f"resident= stores tensors, but PyTorch has no type for {name!r}",
                    remedy="leave out the field with fields=",
                )
            store = block, len(rows), device, self._is_image(name)
            op = crops.get(name)
            self.fields[name] = _Field(*store) if op is None else _CroppedField(*store, op=op)

    @property
    def bytes(self) -> int:
        """Bytes of all fields."""
        return sum(field.bytes for field in self.fields.values())

    @property
    def row_bytes(self) -> int:
        """Bytes of the values of a row."""
        return sum(field.row_bytes for field in self.fields.values())

    def allocate(self) -> None:
        """Allocate the memory of all fields."""
        for field in self.fields.values():
            field.allocate()

    def put(self, start: int, batch: Any) -> None:
        """Store the decoded rows from ``start`` on; UsageError if they do not fit."""
        for name, block in self._by_field(batch).items():
            if not self.fields[name].put(start, block):
                raise UsageError(
                    "resident= needs values with the same shape and type, but those of "
                    f"{name!r} in {self.dataset.path} differ",
                    remedy="leave out the field with fields=",
                )

    def read(
        self, request: Request, positions: Positions, group: slice | Positions
    ) -> list[torch.Tensor]:
        """Return the bytes of each field."""
        samples = self._stored[positions]
        if request.repeats is not None:
            samples = sample_number(samples, request.repeats[group])
        draws = BatchDraws(draws_key(self.dataset.view, request.seed, request.epoch), samples)
        return [field.take(positions, draws) for field in self.fields.values()]

    def view(self, columns: Sequence[torch.Tensor], *, is_default: bool) -> BatchView:
        """Return samples."""
        values = []
        for (name, field), column in zip(self.fields.items(), columns, strict=True):
            block = field.block(column)
            kind = self._types[name]
            samples: Any = block
            if not is_default and kind is not torch.Tensor:
                samples = block.tolist() if kind is int else block.cpu().numpy()
            values.append(Values(samples, block))
        return BatchView(values, self.dataset.layout)

    def _is_image(self, name: str) -> bool:
        """Return whether values are tensors of shape (3, height, width) in channels-last memory."""
        kind = self.dataset.schema[name].type if name in self.dataset.schema else None
        is_picture = kind is not None and kind.is_picture and not kind.follows
        return is_picture and self._types[name] is torch.Tensor

    def _by_field(self, batch: Any) -> dict[str, Any]:
        """Return the values of a sample or of a batch by field."""
        if isinstance(batch, dict):
            return batch
        return dict(zip(self.dataset.fields, batch, strict=True))


class _Field:
    """The values of a field: the bytes of each row, end to end."""

    def __init__(
        self, block: torch.Tensor, rows: int, device: torch.device, is_image: bool
    ) -> None:
        """Determine how values are stored."""
        self._is_image = is_image
        self._rows = rows
        self._device = device
        self._stored = tuple(self._in_stored_order(block).shape[1:])
        self._dtype = block.dtype
        self._shape = self._stored
        """Shape of a value in a batch, in the order of its bytes."""
        self._data = torch.empty(0)
        self.row_bytes = block.nbytes
        """Bytes of a stored value."""

    @property
    def bytes(self) -> int:
        """Bytes of all rows."""
        return self._rows * self.row_bytes

    @property
    def type(self) -> tuple[Any, ...]:
        """Type and shape of a value in a batch."""
        return self._dtype, self._shape

    def allocate(self) -> None:
        """Allocate black memory."""
        if self._device.type == "cpu":  # NumPy asks for huge pages, which save a quarter of reading
            self._data = torch.from_numpy(np.empty(self.bytes, np.uint8)).zero_()
        else:
            self._data = torch.zeros(self.bytes, dtype=torch.uint8, device=self._device)

    def put(self, start: int, block: torch.Tensor) -> bool:
        """Store the values of rows from ``start`` on; return whether they fit."""
        values = self._in_stored_order(block)
        if (values.dtype, tuple(values.shape[1:])) != (self._dtype, self._stored):
            return False
        flat = values.reshape(len(values), -1).contiguous().view(torch.uint8)
        self._put(slice(start, start + len(values)), flat)
        return True

    def take(self, positions: Positions, draws: BatchDraws) -> torch.Tensor:
        """Return the bytes of the values at ``positions``, of shape (N, bytes), in new memory."""
        return self._select(self._data.view(self._rows, self.row_bytes), positions)

    def block(self, values: torch.Tensor) -> torch.Tensor:
        """Return bytes that `take` returned as a batch has them."""
        block = values.view(self._dtype).view(len(values), *self._shape)
        return block.permute(0, 3, 1, 2) if self._is_image else block

    def _put(self, rows: slice, values: torch.Tensor) -> None:
        self._data.view(self._rows, self.row_bytes)[rows] = values

    def _in_stored_order(self, block: torch.Tensor) -> torch.Tensor:
        return block.permute(0, 2, 3, 1) if self._is_image else block

    def _select(self, source: torch.Tensor, positions: Positions) -> torch.Tensor:
        """Return the bytes at ``positions`` of the first axis of ``source``: (N, bytes)."""
        out = _new_block((len(positions), math.prod(source.shape[1:])), self._device)
        index = on_device(positions, self._device)
        torch.index_select(source, 0, index, out=out.view(len(positions), *source.shape[1:]))
        return out


class _CroppedField(_Field):
    """Images or masks with black margins, so that each random crop is a region of the memory.

    The right margin of a line is the left one of the next, and the lower margin of an image is the
    upper one of the next.
    """

    def __init__(self, *store: Any, op: RandomCrop) -> None:
        """Determine how images are stored: the arguments of `_Field`, and their crop."""
        super().__init__(*store)
        self._op = op
        self._height, self._width = self._stored[:2]
        self._pixel = self.row_bytes // (self._height * self._width)
        self._across, self._down = op.margins(self._width, self._height)
        self._line = self._width + self._across
        self._lines = self._height + self._down
        self._shape = (*op.fixed_size, *self._stored[2:])

    @property
    def bytes(self) -> int:
        """Bytes of all rows with their margins."""
        return self._pixel * (self._line * (self._lines * self._rows + self._down) + self._across)

    def take(self, positions: Positions, draws: BatchDraws) -> torch.Tensor:
        """Return the bytes of the crops of the images at ``positions``, as `_Field.take`."""
        if self._device.type == "cpu" and self._pixel == 3 and compiled.is_available():
            out = _new_block((len(positions), *self._shape), self._device)
            images = self._data.numpy(), self._line, self._lines, self._across, self._down
            numbered = draws.key, draws.numbers
            if compiled.copy_crops(out.numpy(), images, positions, numbered, self._op.flip):
                return out.flatten(1)
        widths, heights = np.full((2, len(positions)), [[self._width], [self._height]])
        numbers = self._op.numbers(widths, heights, lambda: draws)
        assert numbers is not None, "the class is RandomCrop itself"
        lefts = numbers[:, 0]
        tops = numbers[:, 1]
        flips = numbers[:, 4]
        starts = (positions * self._lines + self._down + tops) * self._line + self._across + lefts
        order = np.argsort(flips, kind="stable")
        spans = self._select(self._spans(), starts[order])  # from the first to the last pixel
        height, width = self._op.fixed_size
        line = self._line * self._pixel
        crops = spans.as_strided(
            (len(positions), height, width, self._pixel), (spans.shape[1], line, self._pixel, 1)
        )
        flipped = crops[len(positions) - int(flips.sum()) :]
        flipped.copy_(flipped.flip(2))
        return self._select(crops.flatten(2), np.argsort(order))

    def _spans(self) -> torch.Tensor:
        """Return the bytes of a crop that starts at each pixel: overlapping views of the memory.

        Copying them, with the pixels between the lines of a crop, takes less time than the lines.
        """
        height, width = self._op.fixed_size
        pixels = (height - 1) * self._line + width
        count = self.bytes // self._pixel - pixels + 1
        return self._data.as_strided((count, pixels * self._pixel), (self._pixel, 1))

    def _put(self, rows: slice, values: torch.Tensor) -> None:
        line = self._line * self._pixel
        shape = self._rows, self._height, self._width * self._pixel
        start = self._down * line + self._across * self._pixel
        images = self._data.as_strided(shape, (self._lines * line, line, 1), start)
        images[rows] = values.view(-1, *shape[1:])


def on_device(positions: Positions, device: torch.device) -> torch.Tensor:
    """Return positions on a device. A copy from pinned memory does not wait for the GPU's work."""
    index = torch.from_numpy(positions)
    return index if device.type == "cpu" else index.pin_memory().to(device, non_blocking=True)


def _new_block(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return uninitialized bytes: reused main memory, or memory of PyTorch's own pool."""
    if device.type == "cpu":
        return new_block(shape, shared=True)
    return torch.empty(shape, dtype=torch.uint8, device=device)


def _require_tensors(dataset: Any) -> None:
    """Refuse a dataset whose samples are not tensors, or not the same in each epoch."""
    if not isinstance(dataset, ShardDataset):
        raise UsageError(
            f"resident= reads shardkit datasets, not {type(dataset).__name__}",
            remedy="leave it out",
        )
    for name, function in dataset.reader.transforms.named.items():
        called = getattr(function, "__name__", type(function).__name__)
        raise UsageError(
            f"resident= decodes each sample once, so the {name} {called} cannot run for each epoch",
            remedy="apply it to the batches, or leave out resident=",
        )
    if dataset.reader.windows is not None:
        raise UsageError("resident= stores rows, not windows of rows", remedy="leave out resident=")
    for name in dataset.fields:
        if name in dataset.layout.listed:
            raise UsageError(
                f"resident= stores tensors, but values of {name!r} ({dataset.schema[name].kind}) "
                "differ in shape",
                remedy="leave out the field with fields=",
            )
    follow = dataset.reader.fields.follow
    for decode in dataset.reader.decodes.values():
        if isinstance(decode, ImageOp) and decode.random and follow:
            raise UsageError(
                f"resident= crops only images, and {', '.join(follow)} would have to follow",
                remedy="leave out resident= or follow=",
            )
        if not isinstance(decode, ImageOp) and decode not in ("torch", "numpy"):
            raise UsageError(
                f"resident= stores tensors, but the dataset has {setting('decode', decode)}",
                remedy='use "torch", or an operation such as RandomCrop(32, padding=4)',
            )
        if isinstance(decode, ImageOp) and decode.random and type(decode) is not RandomCrop:
            raise UsageError(
                f"resident= cannot draw {decode} from decoded images",
                remedy="use RandomCrop, or leave out resident=",
            )


def _require_one_size(dataset: ShardDataset, same: Iterable[str]) -> None:
    """Refuse images of several sizes."""
    size_of = {}
    for name in dataset.reader.decodes:
        missing = len(dataset) - int(dataset.has(name).sum())
        if missing:
            raise UsageError(
                f"resident= needs {name!r} in each row, but it is missing in "
                f"{amount(missing, 'row')} of {dataset.path}",
                remedy=f"use dataset.select(dataset.has({name!r}))",
            )
        sizes = _sample_sizes(dataset, name)
        if len(sizes) > 1:
            shown = " and ".join(f"{width} x {height}" for height, width in sizes[:2])
            raise UsageError(
                f"resident= needs images of one size, but {name!r} has {len(sizes)} sizes, such "
                f"as {shown}",
                remedy="use decode=Resize((HEIGHT, WIDTH)) or CenterCrop(SIDE), or convert "
                "with --resize HxW --enlarge",
            )
        size_of[name] = sizes[0]
    first, *others = same or [""]
    for name in others:
        if size_of[name] != size_of[first]:
            raise UsageError(
                f"{first!r} and {name!r} differ in size, so no crop fits both",
                remedy=f"set decode={{{first!r}: ..., {name!r}: ...}} to treat them separately",
            )


def _sample_sizes(dataset: ShardDataset, name: str) -> list[tuple[int, int]]:
    """Return the height and width of all samples of a field of images, each once, ascending."""
    entries = dataset.shards.entries_of(name).read(dataset.stored_rows(np.arange(len(dataset))))
    stored = np.unique(np.stack([entries["height"], entries["width"]], axis=1), axis=0).tolist()
    decode = dataset.reader.decode_of(name)
    if not isinstance(decode, ImageOp):
        return [(height, width) for height, width in stored]
    return sorted({decode.crop(width, height, Draws(0, 0)).size for height, width in stored})


def require_same_fields(members: list[Member]) -> None:
    """Refuse datasets whose samples differ in fields, types or shapes."""
    for member in members[1:]:
        types = [
            {name: field.type for name, field in p.fields.items()} for p in (members[0], member)
        ]
        if types[0] != types[1] or members[0].dataset.layout != member.dataset.layout:
            raise UsageError(
                "resident= needs samples with the same type and shape, but those of "
                f"{members[0].dataset.path} and {member.dataset.path} differ: {types[0]} and "
                f"{types[1]}"
            )


def require_memory(needed: int, device: torch.device) -> None:
    """Refuse a dataset that does not fit."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + unused
        ranks = 1
    else:
        free = free_memory()
        ranks = local_ranks()
    if needed * ranks <= free:
        return
    of_ranks = f" for each of {ranks} ranks" if ranks > 1 else ""
    raise UsageError(
        f"resident={device.type!r} needs {in_words(needed)} of memory{of_ranks}, but only "
        f"{in_words(free)} is free",
        remedy="leave out resident=, or store smaller images (convert --resize)",
    )
