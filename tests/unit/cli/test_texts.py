"""How texts of the command are made: names of options in messages, parts of errors, lists."""

from __future__ import annotations

import pickle

import click

from shardkit import UsageError
from shardkit.cli.main import cli
from shardkit.cli.printing import some
from shardkit.cli.run import error_fields, flags_of
from shardkit.errors import setting, spelled


def test_messages_name_options_as_python_and_as_the_command_do() -> None:
    convert = cli.get_command(click.Context(cli), "convert")
    assert isinstance(convert, click.Group)
    command = convert.get_command(click.Context(convert), "imagefolder")
    assert command is not None
    spell = flags_of(click.Context(command))
    for name, value, python, flag in (
        ("seed", "x", "seed='x'", "--seed x"),
        ("quality", 0, "quality=0", "--quality 0"),
        ("force", True, "force=True", "--force"),
        ("splits", False, "splits=False", "--no-splits"),
        ("force", False, "force=False", "force=False"),
        ("shard_size", None, "shard_size=None", "shard_size=None"),
        ("views", 2, "views=2", "views=2"),  # the command has none
        ("staging", "it's", 'staging="it\'s"', "--staging 'it'\"'\"'s'"),
    ):
        text = f"see {setting(name, value)}."
        assert (spelled(text), spelled(text, spell)) == (f"see {python}.", f"see {flag}.")
    text = f"{setting('resize_mode')} requires {setting('resize')}"
    assert spelled(text, spell) == "--resize-mode requires --resize"
    assert spelled("seed=0 does not exist", spell) == "seed=0 does not exist"


def test_the_parts_of_an_error() -> None:
    error = UsageError("/a is not /b;", remedy=f"try {setting('force', True)}", where="/c")
    error = pickle.loads(pickle.dumps(error))
    assert str(error) == "/a is not /b; try force=True"
    assert error_fields(error, str(error))["where"] == "/c"
    assert str(UsageError("it is", remedy="Wait.")) == "it is. Wait."
    assert str(UsageError("it is", remedy="wait")) == "it is: wait"
    assert str(UsageError("it is")) == "it is"


def test_lists_are_escaped_and_shortened() -> None:
    assert some(["a", "b\n"]) == "a, b\\n"
    assert some([str(n) for n in range(20)], 3) == "0, 1, 2 ... (20 in all)"
