"""Encryption at rest: AES-256-GCM with a random key for every span, wrapped by one that never lies in the data directory.

    key file (0600)  master key ──wraps──> keys/<id>.key  data key ──seals──> spans/<id>.span: every page, and every index section
                                                                              that tells of tokens or keys, on its own

Without its wrap a span is noise: removing ``keys/<id>.key`` shreds it, whatever is left of the span. `docs/extent_format.md` has
the bytes.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from kv_tier.meta.errors import ConfigError, CorruptExtentError, FingerprintMismatch

KEY_BYTES = 32
TAG_BYTES = 16
NONCE_BYTES = 12
WRAP_MAGIC = b"KVDRWRAP"
WRAP_VERSION = 1
WRAP_HEAD = struct.Struct(
    "<8sIIQ8s"
)  # magic, version, zero, span id, master key id: associated data of the wrap
WRAP_BYTES = WRAP_HEAD.size + NONCE_BYTES + KEY_BYTES + TAG_BYTES

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


class SpanCipher:
    """Seal and open the parts of one span; a part has a number that is never used twice, and is its nonce.

    Args:
        key: 32 random bytes, this span's alone.
        associated: the span's header fields, bound to every part.
    """

    def __init__(self, key: bytes, associated: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(key)
        self._associated = associated

    @staticmethod
    def _nonce(kind: int, number: int) -> bytes:
        return struct.pack("<IQ", kind, number)

    def seal(self, kind: int, number: int, data: bytes | memoryview) -> bytes:
        """Return ciphertext and tag of part ``number`` of section ``kind``."""
        return self._cipher.encrypt(self._nonce(kind, number), data, self._associated)

    def seal_rows(self, kind: int, first: int, rows: Bytes) -> Bytes:
        """Seal [n, size] as the parts from ``first`` on: [n, size + 16]."""
        sealed = b"".join(self.seal(kind, first + n, row.data) for n, row in enumerate(rows))
        return np.frombuffer(sealed, np.uint8).reshape(len(rows), -1)

    def open(self, kind: int, number: int, data: bytes | memoryview) -> bytes | None:
        """Return the plaintext of a part; None when it is not what was sealed."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(self._nonce(kind, number), data, self._associated)
        except InvalidTag:
            return None

    def open_rows(self, kind: int, numbers: Ints, rows: Bytes) -> tuple[Bytes, npt.NDArray[np.bool_]]:
        """Open parts: ([n, size - 16], zeros where one fails; [n] whether it is what was sealed)."""
        size = rows.shape[1] - TAG_BYTES
        plain = np.zeros((len(rows), size), np.uint8)
        good = np.ones(len(rows), np.bool_)
        for n, number in enumerate(numbers.tolist()):
            found = self.open(kind, number, rows[n].data)
            if found is None:
                good[n] = False
            else:
                plain[n] = np.frombuffer(found, np.uint8)
        return plain, good


@dataclass(frozen=True)
class DataKey:
    """The key of one span, and its wrap, the content of ``keys/<id>.key``."""

    key: bytes = field(repr=False)
    wrap: bytes = field(repr=False)


class Keyring:
    """Make, wrap and unwrap the keys of spans under a master key."""

    def __init__(self, master_key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        assert len(master_key) == KEY_BYTES, len(master_key)
        self._cipher = AESGCM(master_key)
        self.key_id = hashlib.sha256(b"kvdrive master key id" + master_key).digest()[:8]

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Read the master key: 64 hexadecimal digits, in a file that its owner alone can read.

        Raises:
            ConfigError: it cannot be read, is open to others, or holds something else; the content is never shown.
        """
        name = Path(path)
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                status, content = os.fstat(fd), os.read(fd, 4 * KEY_BYTES)
            finally:
                os.close(fd)
        except OSError as error:
            raise ConfigError(f"encryption_key_file={name} cannot be read: {error.strerror}") from error
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise ConfigError(
                f"encryption_key_file={name} has mode {mode:04o} and belongs to uid {status.st_uid}: it must be this "
                f"user's (uid {os.geteuid()}) and closed to others; run chmod 600 on it"
            )
        try:
            master_key = bytes.fromhex(content.decode("ascii").strip())
        except ValueError:
            master_key = b""
        if len(master_key) != KEY_BYTES:
            raise ConfigError(
                f"encryption_key_file={name} must hold {2 * KEY_BYTES} hexadecimal digits, found {len(content)} bytes of "
                f"something else; make one with: openssl rand -hex {KEY_BYTES}"
            )
        return cls(master_key)

    def new_key(self, span_id: int) -> DataKey:
        """Draw the key of a new span."""
        key, nonce = secrets.token_bytes(KEY_BYTES), secrets.token_bytes(NONCE_BYTES)
        head = WRAP_HEAD.pack(WRAP_MAGIC, WRAP_VERSION, 0, span_id, self.key_id)
        return DataKey(key, head + nonce + self._cipher.encrypt(nonce, key, head))

    def unwrap(self, wrap: bytes, span_id: int) -> bytes:
        """Return the key of a span.

        Raises:
            CorruptExtentError: the wrap is damaged, or another span's: the span is lost.
            FingerprintMismatch: another master key made it.
        """
        from cryptography.exceptions import InvalidTag

        if len(wrap) != WRAP_BYTES:
            raise CorruptExtentError(
                f"the wrap of span {span_id} has {len(wrap)} bytes, must have {WRAP_BYTES}"
            )
        head, nonce, sealed = wrap[: WRAP_HEAD.size], wrap[WRAP_HEAD.size :][:NONCE_BYTES], wrap[-48:]
        magic, version, zero, owner, key_id = WRAP_HEAD.unpack(head)
        if (magic, zero, owner) != (WRAP_MAGIC, 0, span_id):
            raise CorruptExtentError(f"the wrap of span {span_id} is damaged, or that of span {owner}")
        if (version, key_id) != (WRAP_VERSION, self.key_id):
            raise FingerprintMismatch(
                f"span {span_id} is encrypted under another key (wrap version {version}, key {key_id.hex()}, here "
                f"{self.key_id.hex()}): pass the encryption_key_file that wrote it"
            )
        try:
            return self._cipher.decrypt(nonce, sealed, head)
        except InvalidTag:
            raise CorruptExtentError(f"the wrap of span {span_id} is damaged") from None
