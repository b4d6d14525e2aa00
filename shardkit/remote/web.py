"""Files of a web server, read without credentials. Only helper processes import this."""

from __future__ import annotations

from http import HTTPStatus

import obstore
from obstore.exceptions import (
    GenericError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
)

from shardkit.errors import ShardkitError, UsageError
from shardkit.remote.client import ObjectStore, reason_of
from shardkit.remote.store import Store


class WebServer(ObjectStore):
    """The files below a URL of a web server, which must support ranges."""

    names = sizes = create = put = delete = Store._refuse
    folders = Store.folders
    listing = Store.listing
    whole = Store.whole

    def digest(self, name: str) -> str:
        """Return "": none is stored."""
        return ""

    def _range(self, name: str, start: int, end: int) -> memoryview:
        """Return the bytes of a file, without trusting the server to send no more than asked."""
        data = bytearray()
        try:
            for block in obstore.get(self._store, name, options={"range": (start, end)}):
                data += block
                if len(data) >= end - start:
                    break
        except GenericError as error:
            if f" {HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE} " not in str(error):
                raise
        return memoryview(data)[: end - start]

    def _error(self, name: str, error: Exception) -> ShardkitError:
        location = f"{self.url}/{name}".rstrip("/")
        reason = reason_of(error)
        if isinstance(error, NotSupportedError):
            return UsageError(
                f"{self.url}: the server does not support ranges;", remedy="download it"
            )
        if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
            return UsageError(
                f"{location}: access is denied ({reason});", remedy="check that it is public"
            )
        if "MissingContentLength" in str(error):
            return UsageError(f"{location}: the server does not report its size")
        if "error sending request" in reason:
            reason += ": the server does not answer; check the network"
        return ShardkitError(f"{location} cannot be used: {reason}")
