"""The file-system calls that the store is made of: relative to folder descriptors, flushed, bounded, never following links.

POSIX only, as is CUDA on the machines this package serves.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager

#: Nothing that the store reads is larger; a larger file is not ours.
MAX_FILE = 64 << 20

#: What a network file system says of a file that another client has just replaced or removed. Worth one more try.
TRANSIENT = frozenset({errno.ENOENT, errno.ESTALE, errno.EBUSY})

#: The process is short of something; says nothing about the file.
SHORTAGE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})

#: Folders left by a process that may still run on another machine are not swept before this age, seconds.
ORPHAN_AGE = 24 * 3600

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class Unusable(Exception):
    """A file or folder is there but cannot be trusted; the text is the reason."""


@contextmanager
def folder(path: str | os.PathLike[str], dir_fd: int | None = None, follow: bool = False) -> Iterator[int]:
    """A descriptor of the folder ``path``, closed at the end."""
    fd = os.open(path, (_READ & ~os.O_NOFOLLOW if follow else _READ) | os.O_DIRECTORY, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def owned(fd: int, what: str) -> None:
    """Raises Unusable where another user owns ``fd`` or can write it: kernels are code, and code is taken from its owner only."""
    status = os.fstat(fd)
    if status.st_uid != os.geteuid():
        raise Unusable(f"{what} belongs to uid {status.st_uid}, this process runs as uid {os.geteuid()}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Unusable(f"{what} can be written by other users (mode {stat.S_IMODE(status.st_mode):04o}); chmod go-w makes it usable")


def read(path: str, limit: int = MAX_FILE) -> bytes:
    """The bytes of a regular file, links followed. Raises OSError, or Unusable for what is no such file or too large."""
    return _read(os.open(path, _READ & ~os.O_NOFOLLOW | os.O_NONBLOCK), path, limit, False)


def read_at(name: str, dir_fd: int, limit: int = MAX_FILE, private: bool = False) -> bytes:
    """As ``read``, of a file in an open folder and never through a link; ``private``: Unusable unless only this user can write it."""
    return _read(os.open(name, _READ | os.O_NONBLOCK, dir_fd=dir_fd), name, limit, private)


def _read(fd: int, name: str, limit: int, private: bool) -> bytes:
    # Opened with O_NONBLOCK: a FIFO that lies where a file should would wait for a writer for ever.
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise Unusable(f"{name} is not a regular file")
        if private:
            owned(fd, name)
        if status.st_size > limit:
            raise Unusable(f"{name} has {status.st_size} bytes, more than the {limit} allowed")
        parts = []
        while part := os.read(fd, status.st_size + 1):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def write(name: str | os.PathLike[str], data: bytes, dir_fd: int | None = None, mode: int = 0o600) -> None:
    """Writes a new file and flushes it to disk; refuses to touch an existing one."""
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode, dir_fd=dir_fd)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        # Without this a power cut after the rename leaves an entry of the right length full of zeros.
        os.fsync(fd)
    finally:
        os.close(fd)


def flush_folder(fd: int) -> None:
    """Makes names in a folder durable, where its file system can."""
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network and FUSE file systems refuse to flush folders; the rename is still atomic for live readers.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise


def replace(path: str | os.PathLike[str], data: bytes, mode: int = 0o644) -> None:
    """Puts ``data`` at ``path`` at once: readers see the old bytes or the new ones, also after a crash."""
    target = os.fspath(path)
    parent = os.path.dirname(target) or "."
    # The temporary name is beside the target: a rename from /tmp fails with EXDEV where /tmp is another file system.
    temporary = os.path.join(parent, private_name(os.path.basename(target)))
    try:
        write(temporary, data, mode=mode)
        os.chmod(temporary, mode)  # whatever the umask says: packaged roots are read by other users
        os.rename(temporary, target)
    except BaseException:
        try:
            os.unlink(temporary)
        except OSError:
            pass
        raise
    with folder(parent, follow=True) as fd:
        flush_folder(fd)


def make_shared(path: str) -> None:
    """Creates a folder that other users can read, whatever the umask says; leaves existing ones as they are."""
    if os.path.isdir(path):
        return
    make_shared(os.path.dirname(path))
    try:
        os.mkdir(path, 0o755)
        os.chmod(path, 0o755)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def remove(path: str) -> None:
    """Removes a file or folder as far as it can; what is left is swept another day."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        try:
            os.unlink(path)
        except OSError:
            pass


def private_name(purpose: str) -> str:
    """A hidden name that tells who made it: ``.<purpose>-<host tag>-<pid>-<random>``. See is_orphan."""
    return f".{purpose}-{_host_tag()}-{os.getpid()}-{secrets.token_hex(4)}"


def is_orphan(name: str, modified: float) -> bool:
    """Whether the maker of a private_name is gone: its process is dead, or unknown here and the thing is a day old."""
    parts = name.rsplit("-", 3)
    if len(parts) < 4 or not name.startswith("."):
        return False
    if time.time() - modified > ORPHAN_AGE:
        return True
    tag, pid = parts[-3], parts[-2]
    if tag != _host_tag() or not pid.isdigit() or int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass  # it lives, as another user
    return False


def sweep(path: str, *purposes: str) -> int:
    """Removes what dead processes left in a folder under private names made for these purposes. Returns how many."""
    mine = tuple(f".{purpose}-" for purpose in purposes)
    swept = 0
    try:
        found = list(os.scandir(path))
    except OSError:
        return 0
    for entry in found:
        if not entry.name.startswith(mine):
            continue
        try:
            orphan = is_orphan(entry.name, entry.stat(follow_symlinks=False).st_mtime)
        except OSError:
            continue  # its maker has just finished
        if orphan:
            remove(entry.path)
            swept += 1
    return swept


def _host_tag() -> str:
    """Tells apart hosts, boots and containers: a pid means something only within one of them."""
    import hashlib

    facts = [socket.gethostname()]
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            facts.append(file.read())
        facts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        pass
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:8]


def exchange(first: str, second: str, dir_fd: int) -> bool:
    """Swaps two names of one folder in one step (Linux renameat2). False where kernel, libc or file system cannot."""
    import ctypes

    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    swap = 2  # RENAME_EXCHANGE
    return bool(rename(dir_fd, os.fsencode(first), dir_fd, os.fsencode(second), swap) == 0)


def describe(error: Exception) -> str:
    """An error of the file system in words, without a traceback's noise."""
    if isinstance(error, OSError) and error.errno is not None:
        name = errno.errorcode.get(error.errno, str(error.errno))
        return f"{os.strerror(error.errno)} ({name})" + (f": {error.filename}" if error.filename else "")
    return str(error)
