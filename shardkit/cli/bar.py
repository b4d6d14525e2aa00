"""Progress bars on a terminal; `shardkit.cli.printing` loads them where there is one."""

from __future__ import annotations

from tqdm import tqdm

from shardkit.system.text import printable


class Bar(tqdm):  # type: ignore[type-arg]
    """A progress bar on standard error that escapes control characters in names."""

    def set_description_str(self, desc: str | None = None, refresh: bool | None = True) -> None:
        """Set the text before the bar."""
        super().set_description_str(printable(desc or ""), refresh)

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        """Set the text after the bar."""
        super().set_postfix_str(printable(s), refresh)
