"""`DevicePrefetcher`: batches are copied to a device and normalized while the model computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from shardkit.errors import UsageError
from shardkit.system.text import quoted
from shardkit.torch.data.memory import map_tensors


@dataclass(frozen=True)
class Normalize:
    """Convert images to floating point: ``(image / 255 - mean) / std``.

    Integers of other dtypes are divided by the largest number of their dtype instead of 255, such
    as 65535 of uint16. Floating-point images are not divided.

    Normalizing on the device needs a quarter of the bus traffic and no CPU time.

    Raises:
        UsageError: If mean and std differ in length, or the dtype is not floating point.
    """

    mean: Sequence[float] = (0.485, 0.456, 0.406)
    std: Sequence[float] = (0.229, 0.224, 0.225)
    """One number for each channel, for values from 0 to 1; the defaults are those of ImageNet."""
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        channels = [np.asarray(values) for values in (self.mean, self.std)]
        numbers = all(values.ndim == 1 and values.dtype.kind in "iuf" for values in channels)
        if not (
            numbers
            and len(self.mean) == len(self.std)
            and np.isfinite(channels).all()
            and (channels[1] > 0).all()
        ):
            raise UsageError(
                f"mean={self.mean} and std={self.std} must have one finite value for each channel, "
                "and std must be above 0"
            )
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise UsageError(f"dtype must be a floating-point type, not {self.dtype!r}")

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Return images of shape (N, C, H, W) as `dtype`, in the same memory format.

        Raises:
            UsageError: If they have another number of channels than ``mean``.
        """
        channels = images.shape[-3]
        if channels != len(self.mean) != 1:
            raise UsageError(
                f"Normalize has {len(self.mean)} values for images with {channels} channels",
                remedy="pass one value of mean and std for each channel",
            )
        most = 1 if images.dtype.is_floating_point else torch.iinfo(images.dtype).max
        scale, shift = _constants(tuple(self.mean), tuple(self.std), most, images.device)
        values = images.to(torch.float32)
        values = values.div_(scale.view(-1, 1, 1)).sub_(shift.view(-1, 1, 1))
        return values.to(self.dtype)


@lru_cache(maxsize=16)
def _constants(
    mean: tuple[float, ...], std: tuple[float, ...], most: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return divisor and shift on ``device``; cached, since each copy would synchronize."""
    scale = torch.tensor([most * value for value in std], device=device)
    shift = torch.tensor([m / s for m, s in zip(mean, std, strict=True)], device=device)
    return scale, shift


def _require_device(device: torch.device | str) -> torch.device:
    """Return a device, without initializing CUDA: then, worker processes could not fork."""
    try:
        named = torch.device(device)
    except (RuntimeError, TypeError):
        raise UsageError(f"{quoted(device)} is not a device, such as 'cuda' or 'cpu'") from None
    if named.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            f"{str(named)!r} needs a CUDA device, but none is available", remedy="use 'cpu'"
        )
    return named


class DevicePrefetcher:
    """Yields the batches of a loader on a device; on CUDA, the next is copied while one is used.

    The copy runs on a separate stream, asynchronously from pinned memory. The current stream waits
    for it only when the batch is yielded. Each tensor is recorded on that stream
    (``record_stream``), so its memory is not reused before the model has finished with it. The
    loader's batch is kept until it is copied. Tensors that the loader created on the device are
    used after the work that is then queued on the current stream. On other devices, or if the
    loader holds its dataset there (``resident="cuda"``), it moves a batch on request.

    ``len``, ``dataset``, ``batch_size``, ``set_epoch``, ``epoch`` and state are those of the
    loader. The state describes the position after the last batch yielded, although the loader is
    one batch ahead.
    """

    def __init__(
        self,
        loader: Any,
        device: torch.device | str,
        normalize: Normalize | None = None,
    ) -> None:
        """Create a prefetcher.

        Args:
            loader: A shardkit loader, or any iterable of batches.
            device: Device for the batches.
            normalize: Applied on the device to images: uint8 tensors with four dimensions.

        Raises:
            UsageError: If ``loader`` is not a loader, or the device does not exist.
        """
        # A `WebLoader` is a dataset, too: a pipeline of stages, of which one is a loader.
        stages = getattr(loader, "pipeline", ())
        yields_samples = isinstance(loader, (str, Dataset)) and not any(
            isinstance(stage, DataLoader) for stage in stages
        )
        if yields_samples or not hasattr(loader, "__iter__"):
            raise UsageError(
                f"DevicePrefetcher needs a loader, such as make_loader(...) returns, not {loader!r}"
            )
        self.loader = loader
        self.device = _require_device(device)
        self._normalize = normalize
        self._state: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def __repr__(self) -> str:
        return f"DevicePrefetcher({self.loader!r}, {str(self.device)!r})"

    @property
    def dataset(self) -> Any:
        """The dataset of the loader."""
        return self.loader.dataset

    @property
    def batch_size(self) -> int | None:
        """The batch size of the loader."""
        size: int | None = self.loader.batch_size
        return size

    def __iter__(self) -> Iterator[Any]:
        is_copied = getattr(getattr(self.loader, "options", None), "resident", None) != "cuda"
        on_side = self.device.type == "cuda" and is_copied
        batches = self._side_stream() if on_side else self._in_turn()
        for state, batch in batches:
            self._state = state
            yield batch
        self._state = None

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration read ``epoch``."""
        self.loader.set_epoch(epoch)
        self._state = None

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration reads, or the one being read."""
        return int(self.loader.epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last batch yielded.

        Raises:
            UsageError: If the loader has no state.
        """
        if not hasattr(self.loader, "state_dict"):
            raise UsageError(
                f"a {type(self.loader).__name__} has no state",
                remedy="use a loader from make_loader",
            )
        return dict(self.loader.state_dict() if self._state is None else self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state`` in the next iteration."""
        self.loader.load_state_dict(state)
        self._state = None

    def _source(self) -> Iterator[tuple[dict[str, Any] | None, Any]]:
        """Yield each batch of the loader with the state after it."""
        stateful = hasattr(self.loader, "state_dict")
        for batch in self.loader:
            yield (self.loader.state_dict() if stateful else None), batch

    def _in_turn(self) -> Iterator[tuple[dict[str, Any] | None, Any]]:
        for state, batch in self._source():
            yield state, self._move(batch)

    def _side_stream(self) -> Iterator[tuple[dict[str, Any] | None, Any]]:
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        waiting: tuple[dict[str, Any] | None, Any, torch.cuda.Event] | None = None
        for state, batch in self._source():
            _await_tensors(batch, side)
            with torch.cuda.stream(side):
                moved = self._copy(batch)
                copied = _recorded(side)
                moved = self._normalized(moved)
                ready = _recorded(side)
            try:
                if waiting is not None:
                    yield _hand_over(side.device, *waiting)
            finally:
                # From here on, the loader may reuse the memory of `batch`, which need not be that
                # of PyTorch's allocator. The copy was issued before the step that has ended now.
                copied.synchronize()
            waiting = state, moved, ready
        if waiting is not None:
            yield _hand_over(side.device, *waiting)

    def _move(self, batch: Any) -> Any:
        return self._normalized(self._copy(batch))

    def _copy(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return map_tensors(self._copy, item)
        return item.to(self.device, non_blocking=True)

    def _normalized(self, item: Any) -> Any:
        if self._normalize is None:
            return item
        if not isinstance(item, torch.Tensor):
            return map_tensors(self._normalized, item)
        return self._normalize(item) if item.dtype == torch.uint8 and item.dim() == 4 else item


def _await_tensors(batch: Any, side: torch.cuda.Stream) -> None:
    """Make ``side`` wait for the tensors of a batch that are on a device, and keep them for it."""
    for tensor in _tensors(batch):
        if tensor.is_cuda:
            side.wait_stream(torch.cuda.current_stream(tensor.device))
            tensor.record_stream(side)


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return an event at the end of the work that ``stream`` has now."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _hand_over(
    device: torch.device, state: dict[str, Any] | None, batch: Any, ready: torch.cuda.Event
) -> tuple[dict[str, Any] | None, Any]:
    """Return state and batch for the current stream, which waits until the batch is ready."""
    current = torch.cuda.current_stream(device)
    current.wait_event(ready)
    for tensor in _tensors(batch):
        tensor.record_stream(current)
    return state, batch


def _tensors(batch: Any) -> list[torch.Tensor]:
    """Return the tensors in a batch."""
    tensors: list[torch.Tensor] = []
    _collect(tensors, batch)
    return tensors


def _collect(tensors: list[torch.Tensor], item: Any) -> Any:
    # Not a closure: it would be part of a cycle, and keep the batch until the garbage collector.
    if not isinstance(item, torch.Tensor):
        return map_tensors(partial(_collect, tensors), item)
    tensors.append(item)
    return item
