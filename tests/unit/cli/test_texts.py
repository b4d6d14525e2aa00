"""How texts of the command are made: names of options in messages, parts of errors, lists."""

from __future__ import annotations

import pickle
from pathlib import Path

import click
import pytest

from shardkit import UsageError
from shardkit.cli.main import cli
from shardkit.cli.printing import some
from shardkit.cli.run import error_fields, with_flags


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("seed='x' is not an integer from 0 on", "--seed x is not an integer from 0 on"),
        ("resize_mode= requires resize=", "--resize-mode requires --resize"),
        ("quality=0, or leave force= out (check=none)", "--quality 0, or leave --force out"),
        ("force=True replaces it", "--force replaces it"),
        ("staging=/a/b is a file", "--staging /a/b is a file"),
        ("pass splits=True, or splits=False.", "pass --splits, or --no-splits."),
        ("on_error='skip'. force=False", "--on-error skip. force=False"),
        ("name it with staging=.", "name it with --staging."),
        ("seed=0 does not exist", "seed=0 does not exist"),
        ("seed=0/a.jpg is a file, seed=7.jpg too", "seed=0/a.jpg is a file, seed=7.jpg too"),
        ("/x/seed=7 and colors='x' and src=7", "/x/seed=7 and colors='x' and src=7"),
    ],
)
def test_messages_name_options_as_the_command_does(message: str, shown: str) -> None:
    convert = cli.get_command(click.Context(cli), "convert")
    assert isinstance(convert, click.Group)
    command = convert.get_command(click.Context(convert), "imagefolder")
    assert command is not None
    context = click.Context(command)
    context.params = {"src": Path("seed=0")}
    assert with_flags(message, context).startswith(shown)


def test_the_parts_of_an_error() -> None:
    error = pickle.loads(pickle.dumps(UsageError("/a is not /b", where="/c")))
    assert error_fields(error, str(error))["where"] == "/c"
    fields = error_fields(KeyboardInterrupt(), "interrupted. (Rerun the command to resume.)")
    assert (fields["what"], fields["remedy"]) == ("interrupted", "Rerun the command to resume.")


def test_lists_are_escaped_and_shortened() -> None:
    assert some(["a", "b\n"]) == "a, b\\n"
    assert some([str(n) for n in range(20)], 3) == "0, 1, 2 ... (20 in all)"
