"""Identifiers and salts. The server mints every id; client text never becomes part of a file name."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets

from kv_services.errors import InvalidRequest

_SESSION = re.compile(r"s_[a-z2-7]{26}")
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_REQUEST = re.compile(r"[!-~]{0,128}")


def new_session_id(secret: bytes, tenant: str, request_id: str) -> str:
    """Mint a session id: "s_" and 26 base32 characters, 128 bits.

    A request id always gives the same session id, so that a repeated creation finds what the first one made, whatever
    happened in between. Nobody without the secret can guess it. An empty request id gives a random one.
    """
    name = f"{tenant}\0{request_id}".encode()
    data = (
        hmac.digest(secret, b"\0session\0" + name, "sha256")[:16] if request_id else secrets.token_bytes(16)
    )
    return "s_" + base64.b32encode(data).decode().rstrip("=").lower()


def is_session_id(text: str) -> bool:
    """Tell whether `text` has the form of a minted id."""
    return _SESSION.fullmatch(text) is not None


def cache_salt(secret: bytes, tenant: str) -> str:
    """Derive a tenant's salt, 64 hex digits: HMAC-SHA256 of its name under the data directory's secret."""
    return hmac.digest(secret, tenant.encode(), "sha256").hex()


def salt_id(salt: str) -> str:
    """Name a salt without telling it, 16 hex digits: a log remembers which secret its page keys come from."""
    return hashlib.sha256(f"kvdrive salt {salt}".encode()).hexdigest()[:16]


def catalog_namespace(secret: bytes) -> str:
    """Derive the prefix that keeps data directories apart in one Redis, 16 hex digits."""
    return hmac.digest(secret, b"\0catalog", "sha256").hex()[:16]


def check_tenant(tenant: str) -> str:
    """Return the tenant's name.

    Raises:
        InvalidRequest: it has another form.
    """
    if not _TENANT.fullmatch(tenant):
        raise InvalidRequest(f"x-kvdrive-tenant is {tenant!r}; it must match {_TENANT.pattern}", value=tenant)
    return tenant


def check_request_id(request_id: str) -> str:
    """Return the request id; it may be empty.

    Raises:
        InvalidRequest: it has another form.
    """
    if not _REQUEST.fullmatch(request_id):
        raise InvalidRequest(
            f"request_id is {request_id!r}; it must be at most 128 printable ASCII characters",
            value=request_id,
            limit=128,
        )
    return request_id
