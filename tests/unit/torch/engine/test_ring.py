"""Reused slots of shared memory: the pixels of any batch arrive and stay valid."""

from __future__ import annotations

import gc
import os
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing
from helpers import DEADLINE
from torch.utils.data import Dataset

from shardkit import make_loader
from shardkit.torch.data.read_context import new_block
from shardkit.torch.engine.ring import INLINE_BYTES, Ring, Slots

Pair = namedtuple("Pair", "images labels")
LARGE = INLINE_BYTES + 4096
"""Bytes of a tensor that does not go through the pipe."""


class Link:
    """Both ends of one worker's slots in one process; messages are pickled as by a queue."""

    def __init__(self, slots: int = 3, worker: int = 0) -> None:
        self.ring = Ring(worker + 1, slots)
        self.slots = Slots(worker, self.ring.flags)
        self.sent_bytes = 0

    def send(self, batch: Any) -> Any:
        packed = self.slots.pack(batch)
        self.sent_bytes = len(packed)
        return self.ring.unpack(packed)

    def block(self, value: int, shape: tuple[int, ...] = (4, 6)) -> torch.Tensor:
        block = self.slots.new(shape)
        block.fill_(value)
        return block

    def taken(self) -> list[int]:
        return [int(flag) for flag in self.ring.flags[-1]]


@pytest.fixture
def link() -> Link:
    return Link()


def assert_all(tensor: torch.Tensor, value: float) -> None:
    assert tensor.numel()
    assert bool((tensor == value).all())


def fill_every_slot(link: Link, shape: tuple[int, ...] = (4, 6)) -> None:
    """Write into all memory of that size that the worker thinks it may use."""
    for _ in range(2):
        held = [link.block(99, shape) for _ in range(len(link.taken()) + 1)]
        del held


class Held:
    """What a custom ``collate_fn`` may return: an object with a block inside."""

    def __init__(self, images: torch.Tensor) -> None:
        self.images = images


# One block, one slot.


def test_a_slot_is_reused_only_after_its_last_tensor_is_freed(link: Link) -> None:
    received = link.send(link.block(1))
    assert link.taken() == [1, 0, 0]
    other = link.send(link.block(2))
    assert link.taken() == [1, 1, 0]
    assert_all(received, 1)
    del received
    assert link.taken() == [0, 1, 0]
    again = link.send(link.block(3))
    assert link.taken() == [1, 1, 0]
    assert_all(other, 2)
    assert_all(again, 3)


def test_memory_is_sent_once_and_then_by_number(link: Link) -> None:
    places = set()
    for value in range(6):
        received = link.send(link.block(value))
        assert_all(received, value)
        places.add(received.data_ptr())
        assert (link.sent_bytes < 400) == (value > 0)
        del received
    assert len(places) == 1


ALIASES: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda t: t[1:, ::2],
    lambda t: t.view(-1)[3:],
    lambda t: t.permute(1, 0),
    lambda t: t.detach(),
    lambda t: t.numpy(),
    lambda t: t.numpy()[1:],
    lambda t: t.untyped_storage(),
    lambda t: t.view(torch.int8),
    lambda t: memoryview(t.numpy().data),
)


def test_an_alias_keeps_the_slot(link: Link) -> None:
    for alias in ALIASES:
        received = link.send(link.block(7))
        kept = alias(received)
        del received
        gc.collect(0)
        fill_every_slot(link)
        values = np.array(list(kept), np.uint8) if isinstance(kept, torch.UntypedStorage) else kept
        assert (np.asarray(values) == 7).all()
        del kept, values
        assert link.taken()[0] == 0


VIEWS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda b: b[1:],
    lambda b: b[:, 2:5],
    lambda b: b.permute(1, 0),
    lambda b: b.view(2, 3, 4).permute(2, 0, 1),
    lambda b: b[::2, 1::3],
    lambda b: b[2, 3],
    lambda b: b[1:1],
    lambda b: b[:1].expand(5, 6),
    lambda b: b.as_strided((2, 3), (1, 2), 5),
)


def test_views_keep_values_shape_and_strides(link: Link) -> None:
    for view in VIEWS:
        block = link.slots.new((4, 6))
        block.copy_(torch.arange(24).view(4, 6))
        part = view(block)
        expected = part.clone()
        received = link.send(part)
        assert torch.equal(received, expected)
        assert received.shape == part.shape
        assert received.stride() == part.stride()
        del block, part
        fill_every_slot(link)
        assert torch.equal(received, expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.int16, torch.float32])
def test_a_block_viewed_as_another_type_keeps_that_type(link: Link, dtype: torch.dtype) -> None:
    block = link.slots.new((4, 8))
    block.copy_(
        torch.arange(32).view(4, 8) % 2 if dtype == torch.bool else torch.arange(32).view(4, 8)
    )
    part = block.view(dtype)[1:]
    expected = part.clone()
    del block
    received = link.send([part])[0]
    del part
    assert link.taken() == [1, 0, 0]
    assert received.dtype == dtype
    assert torch.equal(received, expected)
    fill_every_slot(link, (4, 8))
    assert torch.equal(received, expected)
    del received
    assert link.taken() == [0, 0, 0]


def test_a_type_that_does_not_fill_the_slot_arrives_as_a_copy(link: Link) -> None:
    block = link.block(1, (7,))
    received = link.send(block[:4].view(torch.float32))
    assert link.taken() == [0, 0, 0]
    assert torch.equal(received, block[:4].view(torch.float32))


# Several tensors, and things that cannot be seen into.


def test_two_views_of_one_slot_stay_valid(link: Link) -> None:
    block = link.slots.new((4, 6))
    block.copy_(torch.arange(24).view(4, 6))
    one, two, three = link.send({"all": block, "top": block[:2], "rest": [block[2:]]}).values()
    expected = torch.arange(24, dtype=torch.uint8).view(4, 6)
    del one
    fill_every_slot(link)
    assert torch.equal(two, expected[:2])
    assert torch.equal(three[0], expected[2:])


def test_parts_of_a_slot_in_one_message_are_not_copied(link: Link) -> None:
    one, two = link.send(((block := link.block(5))[:1], block[1:2]))
    assert one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()
    del block, one
    assert link.taken() == [1, 0, 0]
    assert two.eq(5).all()
    del two
    assert link.taken() == [0, 0, 0]


@pytest.mark.parametrize("visible", [False, True])
def test_a_block_in_an_unknown_object_is_never_reused(link: Link, visible: bool) -> None:
    """The worker cannot know the object's lifetime, so its memory is not reused."""
    received = link.send(link.block(1))  # the slot is known to the main process
    del received
    block = link.block(4)
    batch = (block, Held(block)) if visible else Held(block)
    arrived = link.send(batch)
    held = arrived[1] if visible else arrived
    del block, batch, arrived
    gc.collect()
    assert link.taken() == [0, 0, 0]
    fill_every_slot(link)
    assert_all(held.images, 4)
    for value in (5, 6):  # and the slot goes on with other memory
        received = link.send(link.block(value))
        assert_all(received, value)
        assert_all(held.images, 4)
        del received


def test_a_worker_that_keeps_a_block_it_sent_keeps_its_values(link: Link) -> None:
    """A collate function may mix each batch with the one before it."""
    kept = link.block(4)
    received = link.send(kept)
    del received
    fill_every_slot(link)
    assert_all(kept, 4)


def test_a_failed_batch_releases_its_slots(link: Link) -> None:
    for _ in range(10):
        link.block(1)
        link.block(2)
    assert link.taken() == [0, 0, 0]
    received = link.send(link.block(3))
    link.block(4)
    assert link.taken() == [1, 0, 0]
    assert_all(received, 3)


def test_more_batches_than_slots_may_be_kept(link: Link) -> None:
    held = [link.send(link.block(value)) for value in range(9)]
    assert link.taken() == [1, 1, 1]
    for value, received in enumerate(held):
        assert_all(received, value)
    del received
    held.clear()
    assert link.taken() == [0, 0, 0]
    assert_all(link.send(link.block(77)), 77)


def test_batches_of_changing_sizes_arrive(link: Link) -> None:
    held: list[tuple[int, torch.Tensor]] = []
    for value in range(40):
        received = link.send(link.block(value, (1 + value * 7 % 5, 6)))
        assert_all(received, value)
        held = [*held[-3:], (value, received)]
        for expected, tensor in held:
            assert_all(tensor, expected)


def test_a_smaller_block_takes_the_memory_of_a_larger_one(link: Link) -> None:
    """An epoch ends with a smaller batch, and the next one begins with a whole one."""
    places = set()
    for value, rows in enumerate((4, 3, 4, 2, 4)):
        received = link.send(link.block(value, (rows, 6)))
        assert_all(received, value)
        assert received.shape == (rows, 6)
        places.add(received.data_ptr())
        del received
    assert len(places) == 1


def test_a_much_smaller_block_leaves_the_memory_to_larger_ones(link: Link) -> None:
    small, large = (1, 6), (4, 6)
    assert_all(link.send(link.block(1, large)), 1)
    one = link.send(link.block(2, small))
    other = link.send(link.block(3, large))
    assert link.taken() == [1, 1, 0]
    assert_all(one, 2)
    assert_all(other, 3)


def test_workers_do_not_share_slots() -> None:
    ring = Ring(2, 2)
    sides = [Slots(worker, ring.flags) for worker in range(2)]
    received = []
    for value, slots in enumerate(sides):
        slots.new((4,)).fill_(9)
        block = slots.new((4,))
        block.fill_(value)
        received.append(ring.unpack(slots.pack(block)))
    assert ring.flags.tolist() == [[1, 0], [1, 0]]
    assert_all(received[0], 0)
    assert_all(received[1], 1)


# Tensors that lie in no slot.


def strange_tensors() -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors of every kind that a transform or collate function may create."""
    count = LARGE // 4
    yield "small", torch.arange(6.0).view(2, 3)
    yield "scalar", torch.tensor(3.5)
    yield "empty", torch.empty(0, 5)
    yield "empty rows", torch.empty(3, 0, dtype=torch.int64)
    yield "large", torch.arange(count, dtype=torch.float32)
    yield "at the limit", torch.arange(INLINE_BYTES // 8)
    yield "large, part of larger", torch.arange(2.0 * count)[count // 2 : -3]
    yield "large, every second", torch.arange(2.0 * count)[::2]
    yield "large, transposed", torch.arange(float(count // 100 * 100)).view(100, -1).t()
    yield "small, transposed", torch.arange(6).view(2, 3).t()
    yield "expanded", torch.arange(3.0).view(3, 1).expand(3, count)
    yield "bool", torch.arange(9) % 2 == 0
    yield "half", torch.arange(9, dtype=torch.float16)
    yield "bfloat16", torch.arange(9, dtype=torch.bfloat16)
    yield "complex", torch.arange(9) * 1j
    yield "requires grad", torch.arange(9.0, requires_grad=True)
    yield "large, requires grad", torch.zeros(count, requires_grad=True)
    yield "parameter", torch.nn.Parameter(torch.ones(3))
    yield "sparse", torch.eye(4).to_sparse()
    yield "shared already", torch.arange(float(count)).share_memory_()  # type: ignore[no-untyped-call]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # PyTorch's own, on unpickling
@pytest.mark.parametrize("beside", [False, True])
def test_any_tensor_arrives(link: Link, beside: bool) -> None:
    for name, tensor in strange_tensors():
        batch = [link.block(8), tensor] if beside else [tensor]
        received = link.send(batch)
        found = received[-1]
        fill_every_slot(link)
        assert type(found) is type(tensor), name
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        assert found.requires_grad == tensor.requires_grad, name
        assert torch.equal(found.detach().to_dense(), tensor.detach().to_dense()), name
        if beside:
            assert_all(received[0], 8)


def test_small_channels_last_tensors_keep_their_memory_order(link: Link) -> None:
    """As with threads and with a plain DataLoader."""
    images = torch.rand(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    received = link.send(images)
    assert torch.equal(received, images)
    assert received.is_contiguous(memory_format=torch.channels_last)


def test_an_empty_block_arrives_with_other_empty_tensors(link: Link) -> None:
    block = link.slots.new((0, 4))
    one, two = link.send((block, torch.empty(0, 5)))
    assert (one.shape, one.dtype) == ((0, 4), torch.uint8)
    assert (two.shape, two.dtype) == ((0, 5), torch.float32)


class Named(dict[str, Any]):
    """A dict whose values are also attributes, as in some libraries."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@pytest.mark.parametrize(
    "make",
    [
        lambda one, two: (one, two),
        lambda one, two: [one, two],
        lambda one, two: {"a": one, "b": two},
        Pair,
        lambda one, two: OrderedDict(a=one, b=two),
        lambda one, two: Named(a=one, b=two),
    ],
    ids=["tuple", "list", "dict", "namedtuple", "OrderedDict", "a dict's subclass"],
)
def test_containers_keep_their_type(link: Link, make: Any) -> None:
    batch = make(link.block(3), [torch.arange(4), "name", 5, None, 1.5, b"x"])
    received = link.send(batch)
    fill_every_slot(link)
    assert type(received) is type(batch)
    parts = list(received.values()) if isinstance(received, dict) else list(received)
    assert_all(parts[0], 3)
    assert parts[1][0].tolist() == [0, 1, 2, 3]
    assert parts[1][1:] == ["name", 5, None, 1.5, b"x"]


def test_numpy_arrays_of_a_slot_stay_valid(link: Link) -> None:
    block = link.block(6)
    received, array = link.send((block, block.numpy()[1:]))
    fill_every_slot(link)
    assert_all(received, 6)
    assert (array == 6).all()


# Through real workers.


class Rows(Dataset[Any]):
    """Batches of blocks that hold their row's number."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitems__(self, rows: Sequence[int]) -> list[Any]:
        block = new_block((len(rows), 40, 50), shared=True)
        for values, row in zip(block, rows, strict=True):
            values.fill_(row % 251)
        return [block, torch.tensor(rows), rows]

    def __getitem__(self, row: int) -> Any:
        return self.__getitems__([row])


def as_blocks(samples: Any) -> Any:
    block, numbers, _ = samples
    return block, numbers, torch.full((len(block), LARGE // 4), float(numbers[0]))


def hidden(samples: Any) -> Any:
    return Held(samples[0]), samples[1]


def check(block: torch.Tensor, numbers: torch.Tensor) -> None:
    assert torch.equal(block[:, 0, 0], (numbers % 251).to(torch.uint8))
    assert torch.equal(block.amin((1, 2)), block.amax((1, 2)))


def in_workers(dataset: Rows, batch_size: int, **options: Any) -> Any:
    given: dict[str, Any] = {"num_workers": 1, "collate_fn": as_blocks, **options}
    return make_loader(
        dataset, batch_size, engine="process", start_method="fork", timeout=DEADLINE, **given
    )


def test_unknown_objects_from_workers_stay_valid() -> None:
    loader = in_workers(Rows(60), 3, collate_fn=hidden)
    held = list(loader)
    for found, numbers in held:
        check(found.images, numbers)
    loader.close()


def test_freeing_a_copy_in_a_fork_frees_nothing(link: Link) -> None:
    """The child has our callbacks and shares the flags; only we know what is still seen here."""
    received = link.send(link.block(1))
    child = os.fork()
    if child == 0:
        del received
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert link.taken() == [1, 0, 0]
    assert_all(received, 1)
