"""One object store: read ranges, list and write objects. Only helper processes import this."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    JoinError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import HTTPStore, from_url

from shardkit.errors import CorruptShard, ShardkitError, UsageError

PART = 8 << 20
"""Bytes of a request: few enough to finish within the time limit at 2.5 Mbit/s."""

_TIMEOUT = "30"
"""Default seconds for one request, with its body."""

_RETRY_SECONDS = 60
"""Seconds after which the client starts no other attempt: of errors before the body."""

_DEADLINE = 120.0
"""Seconds after which a read starts no other attempt: the client does not repeat errors within a
body, nor accepts our check of its length."""

_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)

_SET = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or install boto3 to use ~/.aws, or set "
    "AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to a file of credentials",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}

_DIGEST = "sha256"
"""Metadata of each object that `Store.put` writes."""

_Read = TypeVar("_Read")


class Exists(Exception):
    """The object to create exists, with other content."""


class Missing(UsageError):
    """An object does not exist."""


class Store:
    """The objects below a URL. Threads may share it; forked processes may not.

    Every method raises `ShardkitError` with the reason and the remedy in one line, and without the
    server's own text, which may quote credentials.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._scheme = url.partition(":")[0]
        stated = os.environ.get("AWS_ENDPOINT_URL", "") if self._scheme == "s3" else url
        client: Any = {
            "timeout": f"{os.environ.get('SHARDKIT_STORE_TIMEOUT', _TIMEOUT)}s",
            "allow_http": stated.startswith("http://"),
        }
        retry: Any = {"max_retries": 8, "retry_timeout": timedelta(seconds=_RETRY_SECONDS)}
        more: Any = {"checksum_algorithm": "SHA256"} if self._scheme == "s3" else {}
        if self._scheme == "s3" and not _has_credentials():
            more |= self._configured()
        try:
            if self._scheme in ("http", "https"):
                self._store: Any = HTTPStore.from_url(
                    url, client_options=client, retry_config=retry
                )
            else:
                self._store = from_url(url, client_options=client, retry_config=retry, **more)
        except (BaseError, ValueError) as error:
            raise self._error("", error) from None

    def _configured(self) -> dict[str, Any]:
        """Return boto3's credentials, such as those in ``~/.aws``, if boto3 is installed."""
        try:
            module = import_module("obstore.auth.boto3")
        except ImportError:
            return {}
        try:
            return {"credential_provider": module.Boto3CredentialProvider()}
        except ValueError:  # it has looked everywhere
            raise UsageError(f"{self.url}: there are no credentials; {_SET['s3']}") from None
        except Exception as error:  # of boto3, whose text may quote a file
            reason = type(error).__name__
            raise UsageError(f"{self.url}: ~/.aws cannot be used ({reason}); correct it") from None

    def read(self, name: str, start: int, end: int) -> memoryview:
        """Return the bytes of an object from ``start`` to ``end``, which it must have."""
        data = self._repeated(
            name, lambda: memoryview(obstore.get_range(self._store, name, start=start, end=end))
        )
        if len(data) != end - start:  # the client has checked that the answer is complete
            raise CorruptShard(f"{self.url}/{name} ends at byte {start + len(data)}, too early")
        return data

    def get(self, name: str, most: int) -> bytes | None:
        """Return the content of an object of at most ``most`` bytes; None if it does not exist."""

        def get() -> memoryview:
            found = obstore.get(self._store, name)
            size = found.meta["size"]
            if size > most:
                raise ShardkitError(f"{self.url}/{name} has {size:,} bytes, more than {most:,}")
            return memoryview(found.bytes())

        try:
            return bytes(self._repeated(name, get))
        except Missing:
            return None

    def digest(self, name: str) -> str:
        """Return the SHA-256 that `put` stored with an object, or ""."""
        found = self._repeated(
            name, lambda: obstore.get(self._store, name, options={"head": True}).attributes
        )
        return str(found.get(_DIGEST, ""))

    def version(self, name: str) -> tuple[int, int]:
        """Return the size of an object, and a time in nanoseconds that is its version.

        Stores state seconds. The ETag, which changes with the content, decides the rest.
        """
        found = self._repeated(name, lambda: obstore.head(self._store, name))
        seconds, tag = int(found["last_modified"].timestamp()), str(found["e_tag"])
        return found["size"], seconds * 10**9 + crc32(tag.encode()) % 10**9

    def names(self) -> list[str]:
        """Return the names of the objects directly below the URL, not in folders."""
        with self._named("*"):
            return [each["path"] for each in obstore.list_with_delimiter(self._store)["objects"]]

    def sizes(self) -> dict[str, int]:
        """Return the size of each object below the URL, by name."""
        with self._named("*"):
            listed = obstore.list(self._store)
            return {entry["path"]: entry["size"] for each in listed for entry in each}

    def create(self, name: str, content: bytes) -> None:
        """Write an object that does not exist yet.

        Raises:
            Exists: If it exists with other content. With the same, an earlier attempt wrote it.
        """
        with self._named(name):
            try:
                obstore.put(self._store, name, content, mode="create")
            except AlreadyExistsError:
                if self.get(name, most=1 << 30) != content:
                    raise Exists from None

    def put(self, name: str, file: Path, sha256: str) -> None:
        """Write a file as an object, in parts and with checksums."""
        with self._named(name):
            obstore.put(self._store, name, file, chunk_size=PART, attributes={_DIGEST: sha256})

    def delete(self, name: str) -> None:
        """Delete an object, if it exists."""
        with self._named(name), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, name)

    def _repeated(self, name: str, read: Callable[[], _Read]) -> _Read:
        """Read until it succeeds or the time is over."""
        end, pause = time.monotonic() + _DEADLINE, 0.1
        while True:
            with self._named(name):
                try:
                    return read()
                except (GenericError, JoinError) as error:
                    if time.monotonic() > end or re.search(r"status code: 4(?!29)", str(error)):
                        raise
            time.sleep(pause)
            pause = min(2 * pause, 5.0)

    @contextlib.contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Turn an error of the client into one line that names the object."""
        try:
            yield
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise UsageError(
                    f"{self.url}: there is no such bucket; check its name, the region "
                    "(AWS_REGION) and the server (AWS_ENDPOINT_URL)"
                ) from None
            raise Missing(f"{self.url} contains no {name}") from None
        except (BaseError, OSError) as error:
            raise self._error(name, error) from None

    def _error(self, name: str, error: Exception) -> ShardkitError:
        what = f"{self.url}/{name}".rstrip("/")
        reason, text = _reason(error), str(error)
        remedy = _SET.get(self._scheme, "check that the URL is public")
        stated = self._scheme != "s3" or _has_credentials()
        if re.search("ExpiredToken|TokenRefreshRequired|RequestExpired", text):
            return UsageError(f"{what}: the credentials have expired; renew them ({reason})")
        if re.search("InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken", text):
            return UsageError(f"{what}: the credentials are wrong ({reason}); {remedy}")
        if re.search("AuthorizationHeaderMalformed|PermanentRedirect|IncorrectEndpoint", text):
            region = re.search(r"<Region>([a-z0-9-]{1,32})</Region>|expecting '([a-z0-9-]+)'", text)
            name = next(filter(None, region.groups()), "") if region else "REGION"
            return UsageError(f"{what}: the bucket is in another region; set AWS_REGION={name}")
        if not stated and re.search("169.254|403|401|[Cc]redential|Missing A", text):
            return UsageError(f"{what}: there are no credentials; {remedy}")
        if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
            return UsageError(
                f"{what}: access is denied ({reason}); ask the owner of the bucket for "
                "permission to read and list it, and to write if you upload"
            )
        return ShardkitError(f"{what} cannot be used: {reason}")


def _has_credentials() -> bool:
    """Return whether the environment has credentials for S3, or says that none are needed."""
    anonymous = os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true")
    return anonymous or any(map(os.environ.get, _CREDENTIALS))


def _reason(error: Exception) -> str:
    """Return a short reason without the server's text, which may quote credentials."""
    text = str(error).partition("\nDebug source")[0]
    status = re.search(r"status code: ([0-9]{3}[A-Za-z ]{0,40})", text)
    code = re.search(r"<Code>([A-Za-z0-9]{1,60})</Code>", text)
    if status or code:
        return ", ".join(found[1].strip() for found in (status, code) if found)
    reason = text.partition("\n")[0].rpartition(" - ")[2]
    return re.sub(r"\S*[?@]\S*", "...", reason)[:200]


@lru_cache(maxsize=64)
def open_store(url: str) -> Store:
    """Return the store of a URL; one client for each serves all threads."""
    return Store(url)
