"""Azure's storage emulator for tests: ``npm install -g azurite``."""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator

from helpers import wait_until

PROGRAM = shutil.which("azurite-blob")

_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Both are Microsoft's published ones for the emulator."""


@contextlib.contextmanager
def running(container: str) -> Iterator[dict[str, str]]:
    """Run the emulator with an empty container; yield the variables of its clients."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [PROGRAM or "azurite-blob", "--inMemoryPersistence", "--skipApiVersionCheck"]
    emulator = subprocess.Popen(
        [*command, "--silent", "--disableTelemetry", "--blobPort", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: _listens(port), "the emulator")
        _create(f"http://127.0.0.1:{port}/{_ACCOUNT}/{container}")
        yield {
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
            "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{_ACCOUNT}",
        }
    finally:
        emulator.kill()
        emulator.wait()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def _create(url: str) -> None:
    """Create a container: one request, signed with the account's key."""
    stated = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    path = f"/{_ACCOUNT}{urllib.parse.urlsplit(url).path}"
    lines = [*map(":".join, stated.items()), path, "restype:container"]
    text = "PUT" + 12 * "\n" + "\n".join(lines)
    digest = hmac.new(base64.b64decode(_KEY), text.encode(), hashlib.sha256).digest()
    stated["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"
    request = urllib.request.Request(f"{url}?restype=container", method="PUT", headers=stated)
    urllib.request.urlopen(request, timeout=20).close()
