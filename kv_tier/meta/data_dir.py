"""The data directory: its tree, its owners, its secret. Every file name of the store is built here.

<data dir>/            0700
|- spans/              <span id, 16 hex digits>.span, .tmp-<the same> while being written
|- keys/               <span id, 16 hex digits>.key, the wrapped keys of encrypted spans
|- quarantine/         spans that failed validation, kept for inspection
|- sessions/           <session id>.log, one token log per session
|- catalog/            files of the embedded metadata store
|- engine.lock         flock of the one engine, holding its pid
|- service.lock        flock of the one service, holding its pid
|- engine.sock         control socket of the engine
`- secret              32 random bytes, 0600: tenants' salts are derived from it
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from kv_tier.meta.errors import DataDirBusy, DataDirError, DataDirForeign

Role = Literal["engine", "service", "reader"]

SECRET_BYTES = 32
MAX_SOCKET_PATH_BYTES = 107
_SUBDIRECTORIES = ("spans", "keys", "quarantine", "sessions", "catalog")
_SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_SPAN_NAME = re.compile(r"([0-9a-f]{16})\.span")
_KEY_NAME = re.compile(r"([0-9a-f]{16})\.key")
_SPAN_ID = re.compile(r"(?:\.tmp-)?([0-9a-f]{16})")
_TEMPORARY_PREFIX = ".tmp-"
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def span_name(span_id: int) -> str:
    """Name the file of a span.

    Raises:
        ValueError: span_id does not fit in 64 bits.
    """
    if not 0 <= span_id < 2**64:
        raise ValueError(f"span id {span_id}: must be in 0..2**64-1")
    return f"{span_id:016x}.span"


def temporary_name(span_id: int) -> str:
    """Name the file of a span while it is written; the name lists apart from finished spans."""
    return _TEMPORARY_PREFIX + span_name(span_id).removesuffix(".span")


def is_temporary(name: str) -> bool:
    return name.startswith(_TEMPORARY_PREFIX)


def parse_span_name(name: str) -> int | None:
    """Return the span id of a file name, None when it is not a span's."""
    match = _SPAN_NAME.fullmatch(name)
    return int(match[1], 16) if match else None


def key_name(span_id: int) -> str:
    """Name the file of a span's wrapped key."""
    return span_name(span_id).removesuffix(".span") + ".key"


def parse_key_name(name: str) -> int | None:
    """Return the span id of a wrapped key's file name, None when it is none."""
    match = _KEY_NAME.fullmatch(name)
    return int(match[1], 16) if match else None


def claimed_id(name: str) -> int:
    """Return the span id that a file's name takes, whatever the file is; 0 when it takes none."""
    match = _SPAN_ID.match(name)
    return int(match[1], 16) if match else 0


def lock_owner(path: Path) -> str | None:
    """Return the pid that a lock file names if the lock is held, without touching the lock; None otherwise."""
    with contextlib.suppress(OSError):
        inode = str(path.stat().st_ino)
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if "FLOCK" in fields and fields[-3].rpartition(":")[2] == inode:
                return path.read_text().strip() or "unknown"
    return None


def check_session_id(session_id: str) -> str:
    """Return ``session_id`` unchanged when it may become part of a file name.

    Raises:
        ValueError: it is not 1 to 64 letters, digits, ``_`` and ``-`` starting with a letter or digit.
    """
    if not _SESSION_ID.fullmatch(session_id):
        raise ValueError(f"session id {session_id!r}: must match {_SESSION_ID.pattern}")
    return session_id


class DataDir:
    """Own a data directory in one role until closed or the process dies.

    The kernel drops the lock with its owner, so a successor takes over at once; children made by fork
    do not keep it. File operations inside are relative to the directory handles, which stay valid
    should the path be renamed.

    Attributes:
        path: absolute path.
        role: "engine" or "service"; "reader" owns nothing and must change nothing.
        spans_fd, keys_fd, quarantine_fd, sessions_fd, catalog_fd: directory handles, owned by this object; for a reader
            ``keys_fd`` is -1 where there is no such directory.
    """

    def __init__(self, path: Path, role: Role, root_fd: int, lock_fd: int, fds: dict[str, int]) -> None:
        self.path = path
        self.role: Role = role
        self.root_fd = root_fd
        self.spans_fd = fds["spans"]
        self.keys_fd = fds["keys"]
        self.quarantine_fd = fds["quarantine"]
        self.sessions_fd = fds["sessions"]
        self.catalog_fd = fds["catalog"]
        self._lock_fd = lock_fd
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close_in_child(this()))

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, role: Role) -> Self:
        """Create what is missing, take the role's lock, check that files can be written.

        Args:
            path: an empty or absent directory, or one that this product made.
            role: one engine and one service may own a directory at a time.

        Raises:
            DataDirBusy: another process has the role here; the message names its pid.
            DataDirForeign: the directory belongs to another user, or holds somebody else's files.
            DataDirError: it cannot be created, locked or written.
        """
        assert role in ("engine", "service"), role
        root = Path(os.path.abspath(path))
        with contextlib.ExitStack() as opened:
            root_fd = _open_root(root)
            opened.callback(os.close, root_fd)
            fds = {}
            for name in _SUBDIRECTORIES:
                fds[name] = _open_subdirectory(root, root_fd, name)
                opened.callback(os.close, fds[name])
            lock_fd = _take_lock(root, root_fd, role)
            opened.callback(os.close, lock_fd)
            _check_writable(root, fds["spans"])
            _create_secret(root, root_fd)
            opened.pop_all()
        return cls(root, role, root_fd, lock_fd, fds)

    @classmethod
    def inspect(cls, path: str | os.PathLike[str]) -> Self:
        """Open an existing data directory to read it: no lock is taken, nothing is created or changed.

        Raises:
            DataDirForeign: it is not a data directory, or belongs to another user.
            DataDirError: it cannot be opened.
        """
        root = Path(os.path.abspath(path))
        with contextlib.ExitStack() as opened:
            with _naming(root, "open"):
                root_fd = os.open(root, _DIRECTORY_FLAGS)
            opened.callback(os.close, root_fd)
            _check_ours(root, root_fd, may_be_empty=False)
            fds = {}
            for name in _SUBDIRECTORIES:
                if name == "keys" and not (root / name).exists():
                    fds[name] = -1  # no engine that encrypts was here
                    continue
                with _naming(root / name, "open"):
                    fds[name] = os.open(name, _DIRECTORY_FLAGS | os.O_NOFOLLOW, dir_fd=root_fd)
                opened.callback(os.close, fds[name])
            opened.pop_all()
        return cls(root, "reader", root_fd, -1, fds)

    def close(self) -> None:
        """Give up the lock and the handles; closing twice is harmless."""
        for name in (
            "_lock_fd",
            "root_fd",
            "spans_fd",
            "keys_fd",
            "quarantine_fd",
            "sessions_fd",
            "catalog_fd",
        ):
            if (fd := getattr(self, name)) >= 0:
                setattr(self, name, -1)
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def span_path(self, span_id: int) -> Path:
        return self.path / "spans" / span_name(span_id)

    def quarantine_path(self, name: str) -> Path:
        """Locate a file moved out of ``spans/``."""
        return self.path / "quarantine" / name

    def token_log_name(self, session_id: str) -> str:
        """Name a session's token log relative to ``sessions_fd``.

        Raises:
            ValueError: the id may not become part of a file name.
        """
        return f"{check_session_id(session_id)}.log"

    def token_log_path(self, session_id: str) -> Path:
        """Locate a session's token log; raises as ``token_log_name``."""
        return self.path / "sessions" / self.token_log_name(session_id)

    def session_ids(self) -> list[str]:
        """List the sessions that have a token log, sorted; other files are passed over."""
        with _naming(self.path / "sessions", "list"):
            names = os.listdir(self.sessions_fd)
        stems = [name.removesuffix(".log") for name in names if name.endswith(".log")]
        return sorted(stem for stem in stems if _SESSION_ID.fullmatch(stem))

    @property
    def catalog_path(self) -> Path:
        return self.path / "catalog"

    @property
    def engine_socket_path(self) -> Path:
        """Locate the engine's control socket.

        Raises:
            DataDirError: the path is longer than a Unix socket address can hold.
        """
        path = self.path / "engine.sock"
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise DataDirError(
                f"{path}: {len(os.fsencode(path))} bytes, a Unix socket path holds {MAX_SOCKET_PATH_BYTES}: "
                "use a shorter data directory path"
            )
        return path

    def secret(self) -> bytes:
        """Read the directory's 32-byte secret.

        Raises:
            DataDirError: it is unreadable, has another length, or others may read it.
        """
        path = self.path / "secret"
        with _naming(path, "read"):
            fd = os.open("secret", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self.root_fd)
            try:
                mode = stat.S_IMODE(os.fstat(fd).st_mode)
                value = os.read(fd, SECRET_BYTES + 1)
            finally:
                os.close(fd)
        if mode & 0o077:
            raise DataDirError(f"{path}: mode {mode:04o} lets others read it: run chmod 600 on it")
        if len(value) != SECRET_BYTES:
            raise DataDirError(
                f"{path}: {len(value)} bytes, must be {SECRET_BYTES}: restore it from a backup "
                "(with another secret every stored session is unreachable)"
            )
        return value


def _close_in_child(data_dir: DataDir | None) -> None:
    """Drop a forked child's copies, so that the lock lives and dies with the owner alone."""
    if data_dir is not None:
        data_dir.close()


@contextlib.contextmanager
def _naming(path: Path, operation: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataDirError(
            f"cannot {operation} {path}: {os.strerror(error.errno or 0)}: "
            "check the path, its permissions and its disk"
        ) from error


def _open_root(root: Path) -> int:
    with _naming(root, "create"):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _naming(root, "open"):
        fd = os.open(root, _DIRECTORY_FLAGS)
    try:
        _claim_root(root, fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _claim_root(root: Path, fd: int) -> None:
    """Refuse a directory that is not ours before anything in it, or its mode, is touched."""
    mode = _check_ours(root, fd, may_be_empty=True)
    if mode != 0o700:
        with _naming(root, "chmod"):
            os.fchmod(fd, 0o700)


def _check_ours(root: Path, fd: int, *, may_be_empty: bool) -> int:
    """Refuse a directory of another user or with other contents; returns its mode."""
    with _naming(root, "list"):
        status = os.fstat(fd)
        names = set(os.listdir(fd)) - {"lost+found"}
    if status.st_uid != os.geteuid():
        raise DataDirForeign(
            f"{root}: belongs to uid {status.st_uid}, this process runs as uid {os.geteuid()}: "
            "run as its owner or use another directory"
        )
    if names and "spans" not in names:
        raise DataDirForeign(
            f"{root}: holds {min(names)!r} and no 'spans', so it is not a data directory: "
            "use an empty or a new one"
        )
    if not names and not may_be_empty:
        raise DataDirForeign(f"{root}: is empty, so it is not a data directory: name the engine's --data-dir")
    return stat.S_IMODE(status.st_mode)


def _open_subdirectory(root: Path, root_fd: int, name: str) -> int:
    with _naming(root / name, "create"):
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=root_fd)
        return os.open(name, _DIRECTORY_FLAGS | os.O_NOFOLLOW, dir_fd=root_fd)


def _take_lock(root: Path, root_fd: int, role: Role) -> int:
    name = f"{role}.lock"
    with _naming(root / name, "open"):
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(name, flags, 0o600, dir_fd=root_fd)
    try:
        with _naming(root / name, "lock"):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
                raise DataDirBusy(
                    f"{root}: the {role} with pid {owner} owns it: stop it or use another data directory"
                ) from None
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode("ascii"), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_writable(root: Path, spans_fd: int) -> None:
    name = f"{_TEMPORARY_PREFIX}probe-{os.getpid()}"
    with _naming(root / "spans", "write to"):
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=spans_fd)
        try:
            os.pwrite(fd, b"probe", 0)
        finally:
            os.close(fd)
            with contextlib.suppress(FileNotFoundError):  # the engine clears leftovers while a service starts
                os.unlink(name, dir_fd=spans_fd)


def _create_secret(root: Path, root_fd: int) -> None:
    """Create the secret whole or not at all; of two creators at once, the first link wins."""
    name = f"{_TEMPORARY_PREFIX}secret-{secrets.token_hex(8)}"
    with _naming(root / "secret", "create"):
        with contextlib.suppress(FileNotFoundError):
            os.stat("secret", dir_fd=root_fd, follow_symlinks=False)
            return
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=root_fd)
        try:
            os.pwrite(fd, secrets.token_bytes(SECRET_BYTES), 0)
            os.fsync(fd)
            with contextlib.suppress(FileExistsError):
                os.link(name, "secret", src_dir_fd=root_fd, dst_dir_fd=root_fd)
        finally:
            os.close(fd)
            os.unlink(name, dir_fd=root_fd)
        os.fsync(root_fd)
