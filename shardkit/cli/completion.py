"""``shardkit completion``: complete commands and options in a shell.

Shells run it each time they start, so it loads no more than Click.
"""

from __future__ import annotations

import click
from click.shell_completion import shell_complete


@click.command("completion")
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def completion_command(context: click.Context, shell: str) -> None:
    """Print the script that makes SHELL complete commands, options and paths.

    \b
    Examples:
      echo 'eval "$(shardkit completion bash)"' >> ~/.bashrc
      echo 'eval "$(shardkit completion zsh)"' >> ~/.zshrc
      shardkit completion fish > ~/.config/fish/completions/shardkit.fish
    """
    root = context.find_root().command
    shell_complete(root, {}, "shardkit", "_SHARDKIT_COMPLETE", f"{shell}_source")
