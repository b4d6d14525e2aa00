"""S3, Google Cloud Storage, Azure and web servers. Only helper processes import this."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from hashlib import md5
from importlib import import_module
from pathlib import Path
from typing import Any
from zlib import crc32

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    JoinError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import from_url

from shardkit.errors import ShardkitError, UsageError
from shardkit.remote.store import ATTEMPTS, Exists, Listed, Missing, Store, timeout
from shardkit.system.text import quoted

CHUNK = 8 << 20
"""Bytes of a request: few enough to finish within the time limit at 2.5 Mbit/s."""

_PAGE = 1000
"""Objects of a listing at a time."""

_LEVEL_SECONDS = 3600
_LEVEL_BYTES = 8 << 30
"""Limits of time and memory of a listing with folders: about 10 million objects."""

_RETRIES = 8
_RETRY_SECONDS = 60
"""Seconds after which the client itself starts no other attempt; `Store` then asks it again. It
gives up sooner if nobody answers: its pauses are short."""

_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)

_SET = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or install boto3 to use ~/.aws, or set "
    "AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to a file of credentials, or set "
    "GOOGLE_SKIP_SIGNATURE=true for a public bucket",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or, for a public "
    "container, AZURE_SKIP_SIGNATURE=true",
}

_ENDPOINT = {
    "s3": "AWS_ENDPOINT_URL",
    "gs": "GOOGLE_BASE_URL",
    "az": "AZURE_STORAGE_ENDPOINT",
}
"""Variables with the address of another server."""

_ISSUERS = "SSL_CERT_FILE"
"""Variable with a file of certificates to trust besides the system's."""

_BAD_NAME = "path segment"
"""Part of the client's errors about names, such as "contained empty path segment"."""

_UNTRUSTED = "InvalidCertificate"

_SIZELESS = "MissingContentLength"

_NO_BUCKET = "NoSuchBucket|ContainerNotFound"

_MD5 = re.compile("[0-9a-f]{32}")
"""An ETag that is the MD5 of its object, most likely."""

_UNTAGGED = 8
"""Objects in succession whose ETag is no MD5, after which none is expected."""

_DIGEST = "sha256"
"""Metadata of each object that `ObjectStore.put` writes."""


class ObjectStore(Store):
    """A store that obstore knows."""

    errors = (BaseError, OSError, ValueError)

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._untagged = 0
        self._scheme = url.partition(":")[0]
        server = os.environ.get(_ENDPOINT.get(self._scheme, ""), "") or url
        client: Any = {"timeout": f"{timeout()}s", "allow_http": server.startswith("http://")}
        if issuers := os.environ.get(_ISSUERS):
            client["root_certificate"] = _certificates(issuers)
        retry: Any = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_SECONDS)}
        more: Any = {"checksum_algorithm": "SHA256"} if self._scheme == "s3" else {}
        if self._scheme == "s3" and _is_set("AWS_REQUEST_PAYER"):
            more["request_payer"] = True
        if self._scheme == "s3" and not _has_credentials():
            more |= self._configured()
        try:
            self._store: Any = from_url(url, client_options=client, retry_config=retry, **more)
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
            raise UsageError(f"{self.url}: no credentials were found; {_SET['s3']}") from None
        except Exception as error:  # of boto3, whose text may quote a file
            reason = type(error).__name__
            raise UsageError(
                f"{self.url}: ~/.aws cannot be used ({reason});", remedy="correct it"
            ) from None

    def _range(self, name: str, start: int, end: int) -> memoryview:
        return memoryview(obstore.get_range(self._store, name, start=start, end=end))

    def _content(self, name: str, most: int) -> bytes:
        answer = obstore.get(self._store, name)
        self._require_small(name, answer.meta["size"], most)
        return bytes(answer.bytes())

    def digest(self, name: str) -> str:
        """Return the SHA-256 that `put` stored with an object, or ""."""
        attributes = self._repeated(
            name, lambda: obstore.get(self._store, name, options={"head": True}).attributes
        )
        return str(attributes.get(_DIGEST, ""))

    def version(self, name: str) -> tuple[int, int]:
        """Return the size of an object, and a time in nanoseconds that is its version.

        Stores state seconds. The ETag, which changes with the content, decides the rest.
        """
        return _version(self._repeated(name, lambda: obstore.head(self._store, name)))

    def names(self) -> list[str]:
        """Return the names of the objects directly below the URL, not in folders."""

        def ask() -> list[str]:
            return [entry["path"] for entry in obstore.list_with_delimiter(self._store)["objects"]]

        return self._repeated("*", ask)

    def sizes(self) -> dict[str, int]:
        """Return the size of each object below the URL, by name."""

        def ask() -> dict[str, int]:
            listed = obstore.list(self._store)
            return {entry["path"]: entry["size"] for page in listed for entry in page}

        return self._repeated("*", ask)

    def folders(self, folder: str) -> tuple[list[str], list[str]]:
        """Return the names of the folders and of the objects directly in a folder."""
        answer = self._repeated(folder or "*", lambda: asyncio.run(self._level(folder)))
        objects = [entry["path"] for entry in answer["objects"]]
        return [_last(path) for path in answer["common_prefixes"]], [*map(_last, objects)]

    def listing(self, folder: str, *, deep: bool) -> Iterator[list[Listed]]:
        """Yield the objects in a folder, perhaps also below it, some at a time.

        A listing that fails after the client's own attempts is not resumed.
        """
        with self._named(folder or "*"):
            if deep:
                for page in obstore.list(self._store, folder or None, chunk_size=_PAGE):
                    yield [*map(_listed, page)]
            else:
                yield [*map(_listed, asyncio.run(self._level(folder))["objects"])]

    async def _level(self, folder: str) -> Any:
        """Return the folders and objects directly in a folder.

        The client collects all pages, of which a hostile server may have no last one.
        """
        request = asyncio.ensure_future(
            obstore.list_with_delimiter_async(self._store, folder or None)
        )
        end = time.monotonic() + _LEVEL_SECONDS
        most = _peak() + _LEVEL_BYTES
        while not (await asyncio.wait({request}, timeout=1))[0]:
            if time.monotonic() > end or _peak() > most:
                request.cancel()
                raise ShardkitError(
                    f"{self.url}/{folder}".rstrip("/") + ": the list of its objects does not end; "
                    "retry, or ask the operator of the store"
                )
        return request.result()

    def whole(self, name: str, size: int, stamp: int) -> bytes | None:
        """Return the content of an object; None if it is not the version that was listed.

        An ETag that looks like an MD5 is one, unless two transfers give the same other bytes:
        objects that are encrypted with a key of the user have others.
        """
        seen = set[str]()
        for _ in range(ATTEMPTS):
            if (version := self._version_of(name, (size, stamp))) is None:
                return None
            tag, content = version
            if not _MD5.fullmatch(tag) or self._untagged == _UNTAGGED:
                return content
            digest = md5(content, usedforsecurity=False).hexdigest()
            if digest == tag:
                self._untagged = 0
                return content
            if digest in seen:
                self._untagged += 1
                return content
            seen.add(digest)
        raise ShardkitError(
            f"{self.url}/{name} arrives with different bytes each time;", remedy="check the network"
        )

    def _version_of(self, name: str, listed: tuple[int, int]) -> tuple[str, bytes] | None:
        """Return the ETag and the content of an object; None if it is another version."""
        size = listed[0]
        if size <= CHUNK:
            return self._read_chunk(name, listed, (0, size), {})
        tag = ""
        chunks = []
        for start in range(0, size, CHUNK):
            end = min(start + CHUNK, size)
            options = {"range": (start, end), **({"if_match": f'"{tag}"'} if tag else {})}
            if (chunk := self._read_chunk(name, listed, (start, end), options)) is None:
                return None
            tag = chunk[0]
            chunks.append(chunk[1])
        return tag, b"".join(chunks)

    def _read_chunk(
        self, name: str, listed: tuple[int, int], span: tuple[int, int], options: Any
    ) -> tuple[str, bytes] | None:
        """Return the ETag and some bytes of an object; None if it is another version."""
        size = span[1] - span[0]

        def ask() -> tuple[str, bytes] | None:
            try:
                answer = obstore.get(self._store, name, options=options)
            except PreconditionError:
                return None
            if _version(answer.meta) != listed:
                return None
            content = answer.bytes() if answer.range == span else b""
            return (answer.meta["e_tag"] or "").strip('"'), bytes(content)

        for _ in range(ATTEMPTS):
            if (answer := self._repeated(name, ask)) is None or len(answer[1]) == size:
                return answer
        raise ShardkitError(
            f"{self.url}/{name}: the store sends more or fewer bytes than it declares"
        )

    def create(self, name: str, content: bytes) -> None:
        """Write an object that does not exist yet.

        Exists if its content differs. If it is the same, an earlier attempt wrote it.
        """

        def write() -> None:
            try:
                obstore.put(self._store, name, content, mode="create")
            except AlreadyExistsError:
                if self.get(name, most=1 << 30) != content:
                    raise Exists from None

        self._repeated(name, write)

    def put(self, name: str, file: Path, sha256: str) -> None:
        """Write a file as an object, in parts and with checksums."""
        digest = {_DIGEST: sha256}
        self._repeated(
            name,
            lambda: obstore.put(self._store, name, file, chunk_size=CHUNK, attributes=digest),
        )

    def delete(self, name: str) -> None:
        """Delete an object, if it exists."""
        with contextlib.suppress(Missing):
            self._repeated(name, lambda: obstore.delete(self._store, name))

    def _is_transient(self, error: Exception) -> bool:
        final = (
            rf"status code: [34](?!29)|invalid list response|{_BAD_NAME}|{_UNTRUSTED}|{_SIZELESS}"
        )
        return isinstance(error, (GenericError, JoinError)) and not re.search(final, str(error))

    def _is_unreachable(self, error: Exception) -> bool:
        return "kind: Connect," in str(error)

    def _missing(self, name: str, error: Exception) -> ShardkitError:
        if not re.search(_NO_BUCKET, str(error)):
            return super()._missing(name, error)
        region = "the region (AWS_REGION) and " if self._scheme == "s3" else ""
        return UsageError(
            f"{self.url}: this bucket does not exist;",
            remedy=f"check its name, {region}the server ({_ENDPOINT[self._scheme]})",
        )

    def _error(self, name: str, error: Exception) -> ShardkitError:
        location = f"{self.url}/{name}".rstrip("/")
        reason = reason_of(error)
        text = str(error)
        if re.search(f"{_BAD_NAME}|{_NO_BUCKET}", text):  # listings have no types of errors for it
            return self._wrong_name(text) if _BAD_NAME in text else self._missing(name, error)
        remedy = _SET[self._scheme]
        without = r"169\.254|Account must be"  # the client asks the machine for credentials
        if self._scheme == "s3" and not _has_credentials():
            without += "|Missing A|403|401|[Cc]redential"
        expired = re.search("ExpiredToken|TokenRefreshRequired|RequestExpired", text)
        wrong = "InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|AuthenticationF"
        if expired or re.search(wrong, text):
            end = (
                f"have expired; renew them ({reason})"
                if expired
                else f"are wrong ({reason}); {remedy}"
            )
            return UsageError(f"{location}: the credentials {end}")
        if re.search("AuthorizationHeaderMalformed|PermanentRedirect|IncorrectEndpoint", text):
            region = re.search(r"<Region>([a-z0-9-]{1,32})</Region>|expecting '([a-z0-9-]+)'", text)
            name = next(filter(None, region.groups()), "") if region else "REGION"
            return UsageError(
                f"{location}: the bucket is in another region;", remedy=f"set AWS_REGION={name}"
            )
        if re.search(without, text):
            return UsageError(f"{location}: no credentials were found; {remedy}")
        if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
            return self._denied(location, reason)
        if "error sending request" in reason:
            server = _ENDPOINT[self._scheme]
            reason += f": the server does not answer; check the network and {server}"
        return ShardkitError(f"{location} cannot be used: {reason}")

    def _denied(self, location: str, reason: str) -> UsageError:
        asks_to_pay = self._scheme == "s3" and not _is_set("AWS_REQUEST_PAYER")
        payer = "; for a requester-pays bucket, set AWS_REQUEST_PAYER=true" if asks_to_pay else ""
        return UsageError(
            f"{location}: access is denied ({reason});",
            remedy="ask the owner of the bucket for permission to read and list it, and to "
            f"write if you upload{payer}",
        )

    def _wrong_name(self, text: str) -> UsageError:
        key = re.search(r'Path "([^"]{1,1024})"', text)
        return UsageError(
            f"{self.url} has an object whose name has //, a folder . or .., or a control "
            f"character{': ' + quoted(key[1]) if key else ''}; it cannot be read",
            remedy="rename it, or choose a folder without it",
        )


def _certificates(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise UsageError(
            f"{_ISSUERS}={file} cannot be read: {error.strerror}", remedy="Correct it."
        ) from None


def _peak() -> int:
    """Return the largest amount of memory that this process has used, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _version(meta: Mapping[str, Any]) -> tuple[int, int]:
    seconds = int(meta["last_modified"].timestamp())
    tag = str(meta["e_tag"])
    stamp = seconds * 10**9 + crc32(tag.encode()) % 10**9
    return meta["size"], stamp % 2**63  # a server may state any year


def _listed(meta: Mapping[str, Any]) -> Listed:
    return Listed(meta["path"], *_version(meta))


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _has_credentials() -> bool:
    """Return whether the environment has credentials for S3, or says that none are needed."""
    return _is_set("AWS_SKIP_SIGNATURE") or any(map(os.environ.get, _CREDENTIALS))


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true")


def reason_of(error: Exception) -> str:
    """Return a short reason without the server's text, which may quote credentials."""
    text = str(error).partition("\nDebug source")[0]
    if _UNTRUSTED in str(error):
        return (
            "its certificate is not valid; if you trust its issuer, set "
            f"{_ISSUERS} to a file with the issuer's certificate"
        )
    if "redirect" in text:
        return "it redirects to an unencrypted URL, or endlessly"
    status = re.search(r"status code: ([0-9]{3}[A-Za-z ]{0,40})", text)
    code = re.search(r"<Code>([A-Za-z0-9]{1,60})</Code>", text)
    if status or code:
        return ", ".join(match[1].strip() for match in (status, code) if match)
    reason = text.partition("\n")[0].rpartition(" - ")[2]
    return re.sub(r"\S*[?@]\S*", "...", reason)[:200]
