"""Memory reuse: never while a reference exists, and always afterwards."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections import OrderedDict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DEADLINE
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch.utils.dlpack import from_dlpack

from shardkit.torch.data.memory import BlockPool, map_tensors, new_shared, pin

Pair = namedtuple("Pair", "images labels")


class Alias:
    """An alias of a block, and a function to read through it."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def values(self) -> Any:
        held = self.held
        if isinstance(held, (torch.UntypedStorage, torch.TypedStorage)):
            return np.array(list(held), np.uint8)
        if isinstance(held, torch.Tensor):
            return held.detach().numpy()
        if isinstance(held, (list, dict)):
            return Alias(next(iter(held.values() if isinstance(held, dict) else held))).values()
        return np.asarray(held)


WAYS: dict[str, Any] = {
    "the tensor itself": lambda block: block,
    "a view": lambda block: block.view(-1),
    "a row": lambda block: block[-1],
    "one element": lambda block: block[0, 0],
    "permuted": lambda block: block.permute(1, 0),
    "strided": lambda block: block[:, ::2],
    "detached": lambda block: block.detach(),
    "data": lambda block: block.data,
    "another type": lambda block: block.view(torch.int8).view(torch.uint8),
    "numpy": lambda block: block.numpy(),
    "a view of numpy": lambda block: block.numpy()[1:, ::2].T,
    "numpy and back": lambda block: torch.from_numpy(block.numpy())[1:],
    "a memoryview": lambda block: memoryview(block.numpy()),
    "its storage": lambda block: block.untyped_storage(),
    "its typed storage": lambda block: block.storage(),
    "over its storage": lambda block: torch.empty(0, dtype=torch.uint8).set_(
        block.untyped_storage()
    ),
    "dlpack": from_dlpack,
    "numpy by dlpack": np.from_dlpack,
    "unbound": lambda block: list(block.unbind(0)),
    "in a dict": lambda block: {"images": block[0]},
    "as_strided": lambda block: block.as_strided((2,), (3,), 1),
    "expanded": lambda block: block[:1].expand(9, -1),
}

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")


def address(block: torch.Tensor) -> int:
    return block.untyped_storage().data_ptr()


@pytest.mark.parametrize("way", WAYS)
def test_a_block_is_not_reused_while_an_alias_exists(way: str) -> None:
    pool = BlockPool(4)
    block = pool.new((4, 6))
    block.fill_(7)
    place, alias = address(block), Alias(WAYS[way](block))
    del block
    gc.collect()
    others = [pool.new((4, 6)) for _ in range(3)]
    for other in others:
        other.fill_(9)
        assert address(other) != place
    assert (alias.values() == 7).all()
    del alias
    assert address(pool.new((4, 6))) == place  # and at once, without the garbage collector


class Pool(RuleBasedStateMachine):
    """Blocks created, aliased and freed in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(3)
        self.seen: list[tuple[int, list[Alias]]] = []
        self.fill = 0

    @rule(width=st.sampled_from([2, 6]), way=st.sampled_from(sorted(WAYS)))
    def make(self, width: int, way: str) -> None:
        block = self.pool.new((4, width))
        self.fill = self.fill % 250 + 1
        block.fill_(self.fill)
        self.seen.append((self.fill, [Alias(WAYS[way](block))]))

    @precondition(lambda self: self.seen)
    @rule(data=st.data(), way=st.sampled_from(["numpy", "its storage", "detached", "data"]))
    def look(self, data: st.DataObject, way: str) -> None:
        _, aliases = data.draw(st.sampled_from(self.seen))
        tensors = [alias.held for alias in aliases if isinstance(alias.held, torch.Tensor)]
        if tensors:
            aliases.append(Alias(WAYS[way](tensors[0])))

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.seen) - 1))
        aliases = self.seen[number][1]
        aliases.pop(data.draw(st.integers(0, len(aliases) - 1)))
        if not aliases:
            self.seen.pop(number)

    @invariant()
    def nothing_seen_has_changed(self) -> None:
        for fill, aliases in self.seen:
            for alias in aliases:
                assert (alias.values() == fill).all()


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


def test_blocks_freed_in_other_threads_are_reused_by_one_at_a_time() -> None:
    pool = BlockPool(16)
    wrong: list[int] = []
    places: set[int] = set()
    start = threading.Barrier(4)

    def work(number: int) -> None:
        start.wait(DEADLINE)
        held: list[torch.Tensor] = []
        for step in range(300):
            block = pool.new((3, 5))
            block.fill_(number)
            places.add(address(block))
            held.append(block)
            if step % 3 == 2:
                wrong.extend(n for n in held if not bool((n == number).all()))  # type: ignore[misc]
                held.clear()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert wrong == []
    assert len(places) <= 12 + 16  # as many as were ever held, and a few kept


def test_blocks_are_reused_by_size_not_shape() -> None:
    pool = BlockPool(2)
    block = pool.new((2, 6))
    place = address(block)
    del block
    assert address(pool.new((2, 7))) != place
    again = pool.new((3, 4))
    assert address(again) == place
    assert (again.shape, again.dtype) == ((3, 4), torch.uint8)
    assert again.is_contiguous()


def test_a_smaller_block_takes_the_memory_of_a_larger_one() -> None:
    pool = BlockPool(2)
    block = pool.new((4, 6))
    place = address(block)
    del block
    smaller = pool.new((2, 6))
    assert address(smaller) == place
    smaller.fill_(3)
    del smaller
    assert address(pool.new((1, 6))) != place
    assert address(pool.new((4, 6))) == place


def test_the_number_of_free_blocks_is_limited() -> None:
    pool = BlockPool(2)
    blocks = [pool.new((1 << 12,)) for _ in range(5)]
    for block in blocks:
        block.fill_(1)
    places = {address(block) for block in blocks}
    del block
    blocks.clear()
    assert sum(len(free) for free in pool._free.values()) == 2
    assert len(places & {address(pool.new((1 << 12,))) for _ in range(2)}) >= 1
    assert pool._lent == {}


@pytest.mark.slow
def test_a_block_outlives_its_pool() -> None:
    pool = BlockPool(2)
    block = pool.new((3, 3))
    block.fill_(5)
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert bool((block == 5).all())
    del block
    gc.collect()
    assert gone() is None


def test_a_block_may_be_viewed_as_floats() -> None:
    pool = BlockPool(1)
    floats = pool.new((2, 8)).view(torch.float32)
    floats.fill_(1.5)
    assert address(pool.new((2, 8))) != address(floats)
    assert floats.tolist() == [[1.5, 1.5]] * 2


# What is done with the tensors of a batch.


def test_map_tensors_keeps_containers_and_other_values() -> None:
    def double(part: Any) -> Any:
        return part * 2 if isinstance(part, torch.Tensor) else map_tensors(double, part)

    class Other:
        pass

    one, other = torch.ones(2), Other()
    found = double({"a": [one, (one, 3)], "b": Pair(one, "x"), "c": other, "d": None, "e": b"y"})
    assert list(found) == ["a", "b", "c", "d", "e"]
    assert type(found["b"]) is Pair
    assert type(found["a"]) is list
    assert type(found["a"][1]) is tuple
    for tensor in (found["a"][0], found["a"][1][0], found["b"].images):
        assert tensor.tolist() == [2, 2]
    assert found["a"][1][1] == 3
    assert found["b"].labels == "x"
    assert found["c"] is other
    assert found["d"] is None
    assert found["e"] == b"y"


def test_map_tensors_keeps_the_class_of_a_dict() -> None:
    found = map_tensors(lambda part: part, OrderedDict(b=1, a=2))
    assert type(found) is OrderedDict
    assert list(found) == ["b", "a"]


def test_pin_copies_only_unpinned_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: set[int] = set()

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        copied = tensor.clone()
        locked.add(copied.data_ptr())
        return copied

    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.data_ptr() in locked)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    already = pin_memory(torch.ones(3))
    elsewhere, sparse = torch.empty(2, device="meta"), torch.eye(2).to_sparse()
    batch = Pair({"x": [already, torch.zeros(2), elsewhere, sparse]}, (torch.arange(3), "name", 4))
    found = pin(batch)
    assert type(found) is Pair
    assert found.images["x"][0] is already
    assert found.images["x"][2] is elsewhere, "a collate function may decode on a GPU"
    assert found.images["x"][3] is sparse
    assert found.labels[1:] == ("name", 4)
    for tensor in (found.images["x"][1], found.labels[0]):
        assert tensor.data_ptr() in locked
    assert found.images["x"][1].tolist() == [0, 0]
    assert found.labels[0].tolist() == [0, 1, 2]


def test_shared_memory_is_shared_and_has_the_requested_size() -> None:
    for size in (0, 1, 4096, 100_001):
        block = new_shared(size)
        assert (block.dtype, block.shape) == (torch.uint8, (size,))
        assert block.is_shared()  # type: ignore[no-untyped-call]
        block.fill_(3)
        assert int(block.sum()) == 3 * size
        if size:
            assert ctypes.string_at(block.data_ptr(), 1) == b"\x03"
