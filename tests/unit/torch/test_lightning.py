"""Lightning runs that stop anywhere and resume with the exact next batch."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from engines import Crew
from helpers import make_dataset, make_tree, png
from lightning.pytorch.callbacks import ModelCheckpoint
from loading import Print, Prints, prints, prints_of, row_order
from ranks import in_ranks
from refusals import refused
from torch.utils.data import Subset

import shardkit
from shardkit import (
    Balanced,
    RandomResizedCrop,
    ShardDataModule,
    ThroughputMonitor,
    make_loader,
    open_dataset,
)
from shardkit.errors import UsageError

pytestmark = [
    # Lightning asks PyTorch's tree of a batch in a way that PyTorch would rather have otherwise.
    pytest.mark.filterwarnings(r"ignore:.isinstance\(treespec, LeafSpec\):FutureWarning"),
    pytest.mark.filterwarnings(r"ignore:.isinstance\(treespec, LeafSpec\):DeprecationWarning"),
]

ROWS = 23
BATCH = 4
STEPS = 6
"""Batches in an epoch, the last of three samples."""
EPOCHS = 3

CROP = RandomResizedCrop(8)
"""Each sample depends on random numbers: so a tail is equal only if these are."""

THREADS: dict[str, Any] = {"engine": "thread", "num_workers": 2}
PROCESSES: dict[str, Any] = {"engine": "process", "num_workers": 1, "start_method": "fork"}
OPTIONS = {"thread": THREADS, "helper": {**PROCESSES, "engine": "helper"}, "process": PROCESSES}


class Seen(NamedTuple):
    """A batch as the training step received it."""

    epoch: int
    number: int
    batch: Prints


class Recorder(pl.LightningModule):
    """A model that learns nothing and remembers all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[Seen] = []
        self.validated: list[list[Prints]] = []

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        self.seen.append(Seen(self.current_epoch, number, prints(batch)))
        return self.weight.sum()

    def on_validation_start(self) -> None:
        self.validated.append([])

    def validation_step(self, batch: Any, number: int) -> None:
        self.validated[-1].append(prints(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Stopped(Exception):
    """Ends a run abruptly, like a power cut."""


class StopAt(pl.Callback):
    """Saves a checkpoint in one of Lightning's hooks, after some steps, and stops the run."""

    def __init__(self, hook: str, step: int, path: Path | None) -> None:
        self._hook, self._step, self._path = hook, step, path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._stop("batch", trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._stop("epoch", trainer)

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._stop("validation", trainer)

    def _stop(self, hook: str, trainer: pl.Trainer) -> None:
        if hook != self._hook or trainer.global_step != self._step or trainer.sanity_checking:
            return
        if self._path is not None:
            trainer.save_checkpoint(self._path)
        raise Stopped


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 23 images to train on, and one of 5 to validate on."""
    root = tmp_path_factory.mktemp("lightning")
    for name, rows, first in (("train", ROWS, 0), ("validation", 5, 100)):
        files: dict[str, bytes | None] = {
            f"{'ab'[n % 2]}/{n:03d}.png": png(11, 10, first + n) for n in range(rows)
        }
        make_dataset(make_tree(root / "photos" / name, files), root / name)
    return root


@pytest.fixture(scope="module")
def undisturbed(root: Path) -> list[Seen]:
    """The batches of an uninterrupted run."""
    seen = fit(root, module(root, THREADS)).seen
    assert [(one.epoch, one.number) for one in seen] == [
        (epoch, number) for epoch in range(EPOCHS) for number in range(STEPS)
    ]
    for epoch in range(EPOCHS):
        assert sum(len(one.batch) for one in seen if one.epoch == epoch) == ROWS
    assert len({one.batch[0] for one in seen}) == len(seen), "epochs and batches differ"
    return seen


def module(root: Path, options: dict[str, Any], **choices: Any) -> ShardDataModule:
    training = open_dataset(root / "train", decode=CROP)
    choices = {"validation": root / "validation", "batch_size": BATCH, "seed": 3, **choices}
    return ShardDataModule(training, **options, **choices)


def trainer(root: Path, *callbacks: pl.Callback, **choices: Any) -> pl.Trainer:
    saving = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    return pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=saving,
        default_root_dir=root,
        callbacks=list(callbacks),
        **{"max_epochs": EPOCHS, **choices},
    )


def fit(
    root: Path,
    data: ShardDataModule,
    *callbacks: pl.Callback,
    checkpoint: Path | None = None,
    **choices: Any,
) -> Recorder:
    """Run to the end or until a callback stops the run."""
    model, runs = Recorder(), trainer(root, *callbacks, **choices)
    try:
        runs.fit(model, data, ckpt_path=checkpoint, weights_only=True)
    except Stopped:
        assert callbacks
    else:
        assert not any(isinstance(callback, StopAt) for callback in callbacks), "never stopped"
    finally:
        for loader in (runs.train_dataloader, runs.val_dataloaders):
            if loader:  # Lightning keeps what was stopped in a circle; workers would live on in it
                loader.close()
    return model


Case = tuple[str, int, dict[str, Any]]
"""A hook, the steps after which the run is stopped there, and options of the trainer."""

STOPS: list[Case] = [
    ("batch", 1, {}),
    ("batch", STEPS - 1, {}),
    ("batch", STEPS, {}),
    ("batch", STEPS + 1, {}),
    ("epoch", STEPS, {}),
    ("epoch", 2 * STEPS, {}),
    ("validation", STEPS, {}),
    ("validation", STEPS + 2, {"val_check_interval": 2}),
    ("batch", STEPS + 3, {"num_sanity_val_steps": 0}),
]


@pytest.mark.parametrize(
    ("engine", "case"),
    [
        ("thread", ("batch", STEPS + 2, {"reload_dataloaders_every_n_epochs": 1})),
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in zip(itertools.cycle(("thread", "process", "helper")), STOPS)
        ),
    ],
)
def test_a_run_resumes_with_the_exact_next_batch(
    root: Path, undisturbed: list[Seen], tmp_path: Path, case: Case, engine: str
) -> None:
    hook, step, choices = case
    saved = tmp_path / "saved.ckpt"
    stop = StopAt(hook, step, saved)
    data = module(root, OPTIONS[engine])

    before = fit(root, data, stop, **choices)
    after = fit(root, module(root, OPTIONS[engine]), checkpoint=saved, **choices)

    assert before.seen == undisturbed[:step]
    assert after.seen == undisturbed[step:]


@pytest.mark.filterwarnings("ignore:Total length of .list. across ranks is zero:UserWarning")
def test_a_run_without_validation_resumes_too(
    root: Path, undisturbed: list[Seen], tmp_path: Path
) -> None:
    stop = StopAt("batch", STEPS + 2, tmp_path / "saved.ckpt")

    before = fit(root, module(root, THREADS, validation=None), stop)
    after = fit(root, module(root, THREADS, validation=None), checkpoint=tmp_path / "saved.ckpt")

    assert before.seen + after.seen == undisturbed
    assert before.validated == after.validated == []


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
def test_lightnings_own_checkpoints_suffice(
    root: Path, undisturbed: list[Seen], tmp_path: Path
) -> None:
    first, second = (
        ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_last=True) for _ in range(2)
    )

    fit(root, module(root, THREADS), first, StopAt("batch", 11, None))
    after = fit(root, module(root, THREADS), second, checkpoint=tmp_path / "last.ckpt")

    assert after.seen == undisturbed[8:]


class Watched(ShardDataModule):
    """A data module whose training loader is watched, as docs/measuring.md shows it."""

    def train_dataloader(self) -> Any:
        self.monitor = ThroughputMonitor(super().train_dataloader())
        return self.monitor


def test_a_monitored_run_is_the_same_and_resumes(
    root: Path, undisturbed: list[Seen], tmp_path: Path
) -> None:
    def watched() -> Watched:
        training = open_dataset(root / "train", decode=CROP)
        validation = root / "validation"
        return Watched(training, validation, batch_size=BATCH, seed=3, **THREADS)

    saved, data, again = tmp_path / "saved.ckpt", watched(), watched()
    before = fit(root, data, StopAt("batch", STEPS + 2, saved)).seen
    after = fit(root, again, checkpoint=saved).seen
    assert before + after == undisturbed
    assert data.monitor.report.batches == STEPS + 2
    assert again.monitor.report.images == (EPOCHS - 1) * ROWS - 2 * BATCH


def test_a_new_run_with_the_same_data_starts_over(root: Path, undisturbed: list[Seen]) -> None:
    data = module(root, THREADS)
    fit(root, data, StopAt("batch", STEPS + 2, None))

    assert fit(root, data).seen == undisturbed


def test_the_same_data_can_be_resumed(root: Path, undisturbed: list[Seen], tmp_path: Path) -> None:
    data = module(root, THREADS)
    fit(root, data, StopAt("batch", STEPS + 2, tmp_path / "saved.ckpt"))
    fit(root, data, max_epochs=1)

    after = fit(root, data, checkpoint=tmp_path / "saved.ckpt")

    assert after.seen == undisturbed[STEPS + 2 :]


@pytest.mark.parametrize("steps", [STEPS - 1, STEPS, STEPS + 3])
def test_after_max_steps_a_checkpoint_has_the_position(
    root: Path, undisturbed: list[Seen], tmp_path: Path, steps: int
) -> None:
    """Lightning counts the epoch as done in which ``max_steps`` ended the run; the data do not."""
    model, stopped = Recorder(), trainer(root, max_steps=steps)
    stopped.fit(model, module(root, THREADS))
    stopped.save_checkpoint(tmp_path / "saved.ckpt")

    after = fit(
        root, module(root, THREADS), checkpoint=tmp_path / "saved.ckpt", max_epochs=EPOCHS + 1
    )

    assert model.seen == undisturbed[:steps]
    tail = [one.batch for one in undisturbed[steps:]]
    assert [one.batch for one in after.seen][: len(tail)] == tail


def test_a_function_may_make_the_loader_with_any_argument(root: Path, tmp_path: Path) -> None:
    dataset = open_dataset(root / "train", decode=CROP)
    make = partial(
        make_loader, dataset, BATCH, sampler=Balanced(), samples_per_epoch=STEPS * BATCH, seed=3
    )
    loader, expected = make(), list[Prints]()
    for _ in range(2):
        expected += [prints(batch) for batch in loader]
    saved = tmp_path / "saved.ckpt"

    data = ShardDataModule(make, root / "validation")
    before = fit(root, data, StopAt("batch", STEPS + 2, saved), max_epochs=2)
    after = fit(root, data, checkpoint=saved, max_epochs=2)

    assert [one.batch for one in before.seen + after.seen] == expected
    views = ShardDataModule(make, partial(make_loader, dataset, 2, views=2)).val_dataloader()
    assert not torch.equal(*(images for images, _ in next(iter(views))))
    subset = ShardDataModule(Subset(dataset, [3, 5]), batch_size=2, shuffle=False)
    _, labels = next(iter(subset.train_dataloader()))
    assert labels.tolist() == dataset.targets[[3, 5]].tolist()
    with refused(UsageError, "shardkit.make_loader"):
        ShardDataModule(partial(list)).train_dataloader()


LIMIT = 3
"""Value of ``limit_train_batches``, below the number of batches."""


def limited(root: Path) -> list[Prints]:
    """Return the batches of a run with `LIMIT`: the first ones of each epoch."""
    dataset = open_dataset(root / "train", decode=CROP)
    loader = make_loader(dataset, BATCH, shuffle=True, seed=3, num_workers=0)
    return [one for _ in range(EPOCHS) for one in prints_of(itertools.islice(loader, LIMIT))]


def plain_loader(root: Path) -> Any:
    dataset = open_dataset(root / "train", decode=CROP)
    return make_loader(dataset, BATCH, shuffle=True, seed=3, **THREADS)


@pytest.mark.parametrize(
    ("limit", "stop"),
    [
        (LIMIT, ("batch", 0)),
        (LIMIT, ("epoch", 0)),
        ((LIMIT + 0.1) / STEPS, ("batch", 1)),
        ((LIMIT + 0.1) / STEPS, ("validation", 0)),
        (STEPS + 1, ("batch", 0)),
        (STEPS + 1, ("epoch", 0)),
    ],
)
def test_epochs_of_limited_batches_resume_exactly(
    root: Path, undisturbed: list[Seen], tmp_path: Path, limit: float, stop: tuple[str, int]
) -> None:
    saved, (hook, more) = tmp_path / "saved.ckpt", stop
    length = LIMIT if limit < STEPS else STEPS
    expected = limited(root) if limit < STEPS else [one.batch for one in undisturbed]

    step, data = 2 * length + more, module(root, THREADS)
    before = fit(root, data, StopAt(hook, step, saved), limit_train_batches=limit).seen
    after = fit(root, module(root, THREADS), checkpoint=saved, limit_train_batches=limit).seen
    assert [one.batch for one in before] == expected[:step]
    assert [one.batch for one in after] == expected[step:]


@pytest.mark.filterwarnings("ignore:You defined a .validation_step. but:UserWarning")
@pytest.mark.parametrize("limit", [1.0, LIMIT])
@pytest.mark.parametrize("stop", [("batch", 1), ("epoch", 0)])
def test_a_loader_passed_to_fit_resumes_exactly(
    root: Path, undisturbed: list[Seen], tmp_path: Path, limit: float, stop: tuple[str, int]
) -> None:
    saved, (hook, more) = tmp_path / "saved.ckpt", stop
    length, expected = STEPS, [one.batch for one in undisturbed]
    if limit == LIMIT:
        length, expected = LIMIT, limited(root)

    step, before, after = 2 * length + more, Recorder(), Recorder()
    run = trainer(root, StopAt(hook, step, saved), limit_train_batches=limit)
    with pytest.raises(Stopped):
        run.fit(before, plain_loader(root))
    again = trainer(root, limit_train_batches=limit)
    again.fit(after, plain_loader(root), ckpt_path=saved, weights_only=True)

    assert [one.batch for one in before.seen] == expected[:step]
    assert [one.batch for one in after.seen] == expected[step:]


@pytest.mark.filterwarnings("ignore:You defined a .validation_step. but:UserWarning")
def test_a_loader_that_cannot_know_its_limit_warns(root: Path, tmp_path: Path) -> None:
    """A checkpoint of the last batch before the limit has the position in the epoch before."""
    saved = tmp_path / "saved.ckpt"
    run = trainer(root, StopAt("batch", 2 * LIMIT, saved), limit_train_batches=LIMIT)
    with pytest.raises(Stopped):
        run.fit(Recorder(), plain_loader(root))
    again = trainer(root, limit_train_batches=LIMIT)
    with pytest.warns(RuntimeWarning, match=r"starts epoch 2, .*limit_train_batches.*DataModule"):
        again.fit(Recorder(), plain_loader(root), ckpt_path=saved, weights_only=True)


def test_overfitting_repeats_the_first_batches(root: Path, undisturbed: list[Seen]) -> None:
    seen = fit(root, module(root, THREADS), overfit_batches=2).seen

    assert [one.batch for one in seen] == [one.batch for one in undisturbed[:2]] * EPOCHS


def test_worker_processes_end_with_the_run(root: Path) -> None:
    crew = Crew()
    trainer(root, max_epochs=1).fit(Recorder(), module(root, PROCESSES))
    crew.ends()


@pytest.mark.slow
def test_worker_processes_of_a_failed_run_end_with_its_garbage_collection(root: Path) -> None:
    gc.collect()
    crew = Crew()
    with pytest.raises(Stopped):
        trainer(root, StopAt("batch", 2, None)).fit(Recorder(), module(root, PROCESSES))
    gc.collect()
    crew.ends()


class Rows(pl.LightningModule):
    """Records the rows of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: dict[str, list[Any]] = {"train": [[], []], "validation": [[], []]}

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        self.seen["train"][self.current_epoch].append(batch[2].tolist())
        return self.weight.sum()

    def validation_step(self, batch: Any, number: int) -> None:
        self.seen["validation"][self.current_epoch].append(batch[2].tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def rows_of_a_rank(root: Path, _: dict[str, Any]) -> dict[str, list[Any]]:
    os.environ["LOCAL_RANK"] = str(torch.distributed.get_rank())  # as launchers do
    both = root / "train", root / "validation"
    data = ShardDataModule(*both, batch_size=2, with_rows=True, num_workers=1)
    choices: dict[str, Any] = {"strategy": "ddp", "devices": 2, "num_sanity_val_steps": 0}
    model = Rows()
    trainer(root, max_epochs=2, **choices).fit(model, data)
    return model.seen


def test_the_ranks_of_a_trainer_divide_each_step(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    zero, one = in_ranks(2, tmp_path / "ranks", rows_of_a_rank, root, {})
    order = row_order(shuffle=True)
    for epoch in range(2):
        rows = order.rows(epoch, np.arange(ROWS)).tolist()
        steps = list(zip(zero["train"][epoch], one["train"][epoch], strict=True))
        assert [mine + theirs for mine, theirs in steps[:-1]] == [
            rows[start : start + 4] for start in range(0, 20, 4)
        ]
        assert steps[-1] == ([rows[20]], [rows[21]])
        assert zero["validation"][epoch] == [[0, 1], [4]]
        assert one["validation"][epoch] == [[2, 3]]


def test_each_validation_reads_every_sample_once_in_stored_order(root: Path) -> None:
    stored = open_dataset(root / "validation", decode="torch")
    every: list[Print] = prints((*zip(*stored[:], strict=True),))

    validated = fit(root, module(root, PROCESSES), max_epochs=2).validated

    assert validated == [[every[:4], every[4:]]] * 3, "the sanity check, and two epochs"


def test_a_directory_is_opened_to_give_tensors(root: Path) -> None:
    data = ShardDataModule(str(root / "train"), batch_size=BATCH, shuffle=False)

    images, labels = next(iter(data.train_dataloader()))

    assert images.shape == (BATCH, 3, 10, 11)
    assert images.dtype == torch.uint8
    np.testing.assert_array_equal(labels, open_dataset(root / "train").targets[:BATCH])
    assert data.val_dataloader() == []
    again = pickle.loads(pickle.dumps(ShardDataModule(root / "train")))  # as Lightning spawns
    assert again.val_dataloader() == []


def test_a_module_for_validation_only_has_nothing_to_train_on(root: Path) -> None:
    data = ShardDataModule(None, root / "validation", batch_size=BATCH)
    assert sum(len(labels) for _, labels in data.val_dataloader()) == 5
    with refused(UsageError, "train="):
        data.train_dataloader()


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"resident": "cpu", "engine": "process"}, "engine='process'"),
        ({"resident": "cuda", "num_workers": 2}, "num_workers="),
        ({"resident": "cuda", "pin_memory": True}, "pin_memory="),
    ],
)
def test_options_that_contradict_each_other_are_refused_before_a_run(
    options: dict[str, Any], fact: str, root: Path
) -> None:
    with refused(UsageError, "resident=", fact):
        ShardDataModule(root, **options)


@pytest.mark.parametrize("missing", ["lightning", "lightning.pytorch"])
def test_without_lightning_the_error_names_the_package(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name == "shardkit.torch.lightning" or name.startswith("lightning"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)

    with pytest.raises(
        ModuleNotFoundError, match=re.escape("pip install 'shardkit[lightning]'")
    ) as caught:
        shardkit.ShardDataModule  # noqa: B018

    assert caught.value.name == "lightning"
    assert "shardkit.ShardDataModule needs lightning" in str(caught.value)
    assert shardkit.make_loader is not None, "all else works"


def test_an_error_of_another_package_is_not_taken_for_a_missing_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "shardkit.torch.lightning", raising=False)
    monkeypatch.setitem(sys.modules, "shardkit.torch.loader", None)

    with pytest.raises(ModuleNotFoundError, match=r"shardkit\.torch\.loader") as caught:
        shardkit.ShardDataModule  # noqa: B018

    assert "pip install" not in str(caught.value)
