"""`scripts/mutate.py` changes one node of the syntax tree, and finds the tests that must notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import mutate

SOURCE = '''
def first(rows: int = 7) -> bool:
    """Return something."""
    if rows:
        print(rows)
    return not (rows < 3 and True)


class Names:
    def second(self, names):
        if names is None:  # pragma: no cover
            return 5
        names += [f"é{4 + 1}" for _ in names]
        raise ValueError(6 + 1)
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mutate, "PACKAGE", tmp_path)
    (tmp_path / "remote").mkdir()
    path = tmp_path / "remote/names.py"
    path.write_text(SOURCE, "utf-8")
    return path


def test_each_operator_changes_what_runs_and_no_message(file: Path) -> None:
    changes = [(m.name.split(":", 1)[1], m.old, m.new) for m in mutate.mutations(file)]

    assert changes == [
        ("first:negate:1", "rows", "(not rows)"),
        ("first:drop:1", "print(rows)", "pass"),
        ("first:negate:2", "not (rows < 3 and True)", "(rows < 3 and True)"),
        ("first:operator:1", "rows < 3 and True", "(rows < 3 or True)"),
        ("first:compare:1", "rows < 3", "(rows <= 3)"),
        ("first:constant:1", "3", "4"),
        ("first:constant:2", "True", "False"),
        ("Names.second:drop:1", 'names += [f"é{4 + 1}" for _ in names]', "pass"),
    ]


def test_tests_of_the_same_name_come_first() -> None:
    named, users, packages = mutate.suites_of("dataset/handles.py", mutate.ROOT)

    assert named == ["tests/unit/dataset/test_handles.py"]
    assert "tests/unit/dataset/test_shardset.py" in users
    assert not set(named) & set(users)
    assert "tests/unit/conversion" in packages
    for file in {mutant.file for mutant in mutate.chosen(["remote"])}:
        assert next(mutate.suites_of(file, mutate.ROOT), None), file


def test_another_seed_gives_another_sample_of_the_same_size(file: Path) -> None:
    mutants = mutate.mutations(file)
    samples = [mutate.sample(mutants, 3, seed) for seed in "abcd"]

    assert mutate.sample(mutants[::-1], 3, "a") == samples[0]
    assert [len(sample) for sample in samples] == [3] * 4
    assert any(sample != samples[0] for sample in samples)
