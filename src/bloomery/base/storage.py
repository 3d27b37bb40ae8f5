"""Files that are whole or absent: atomic writes, append-only lines that never tear, a run folder proven writable."""

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

from bloomery.base.bounded import SMALL_BYTES, open_regular
from bloomery.base.errors import Problem, StorageError, mask, on_one_line
from bloomery.base.signals import is_stopped
from bloomery.base.units import format_bytes

_NO_SYNC_HERE = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF}
"""What file systems without fsync answer (some FUSE and network mounts). Not a lost write."""
_SYNC_AFTER_LINES = 256
_PROBE_BYTES = 4096


def open_plain(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """`os.open` for files that we name: an OSError where a link, a pipe or a device has the name. Also the `opener` of
    `open`. Links in the folders before the name are followed."""
    return open_regular(path, flags | os.O_NOFOLLOW, mode)


def own_folder(path: Path, *, parents: bool = False, may_be_linked: bool = False) -> Path:
    """Make a folder in which we name, replace and delete files, or take the one that is there. StorageError where it is
    a link; `may_be_linked`: unless that is a link of this user, or of whoever owns the folder it lies in."""
    with writing(path, "create the folder"):
        path.mkdir(parents=parents, exist_ok=True)
        facts = path.lstat()
        is_theirs = not may_be_linked or facts.st_uid not in (os.geteuid(), path.parent.stat().st_uid)
        if stat.S_ISLNK(facts.st_mode) and is_theirs:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return path


@contextlib.contextmanager
def opened_folder(folder: Path) -> Iterator[int]:
    """A descriptor of a folder that is no link: what is done by it is done there, whatever takes its name meanwhile."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sweep_folder(folder: Path, is_swept: Callable[[str], bool]) -> None:
    """Delete what has such names in a folder that is no link. What cannot be deleted stays."""
    with contextlib.suppress(OSError), opened_folder(folder) as descriptor:
        for name in filter(is_swept, os.listdir(descriptor)):
            remove_tree(name, dir_fd=descriptor)


def remove_tree(path: str | os.PathLike[str], *, dir_fd: int | None = None) -> None:
    """Delete a folder, a file, or a link, but never what a link leads to. What cannot be deleted stays."""
    try:
        os.unlink(path, dir_fd=dir_fd)
    except OSError:  # rmtree refuses links, and holds every folder by a descriptor
        shutil.rmtree(path, ignore_errors=True, dir_fd=dir_fd)


def write_atomically(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Readers see the old file or the new one, also after a power cut. StorageError if it cannot be written."""
    target = Path(path)
    temporary = target.parent / f".tmp-{os.getpid()}-{secrets.token_hex(4)}"
    with writing(target):
        try:
            with open(temporary, "xb") as file:
                write_all(file.fileno(), data.encode() if isinstance(data, str) else data)
            publish(temporary, target)
        finally:
            with contextlib.suppress(OSError):  # gone already when the rename succeeded
                temporary.unlink()


def make_folder(path: str | os.PathLike[str]) -> Path:
    """Create the folder and prove, by writing, that a run can live in it."""
    folder = Path(path)
    with writing(folder, "create the folder"):
        folder.mkdir(parents=True, exist_ok=True)
    with writing(folder, "write in the folder"), tempfile.TemporaryFile(dir=folder) as probe:
        write_all(probe.fileno(), bytes(_PROBE_BYTES))
        sync(probe.fileno())
    return folder


@contextlib.contextmanager
def locked(folder: Path, share: tuple[int, int] | None = None) -> Iterator[str]:
    """Hold the folder against other processes that ask the same way; StorageError names the one that has it. Holders of
    different shares, (k, n) with one n, work in it beside each other.

    The lock goes with the process, however it ends. One that is stopped (SIGSTOP) holds nobody up: a new lock takes the
    place of its lock, and what is said of that is yielded.
    """
    path = folder / (f".lock-{share[0]}-of-{share[1]}" if share else ".lock")
    descriptor, taken_over = _take_lock(path)
    try:
        with contextlib.suppress(OSError):  # only for the message to others
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        # Everybody takes his own lock before he looks at those of others, so that of two at once no one goes unseen.
        for other in sorted({folder / ".lock", *folder.glob(".lock-*-of-*")} - {path}):
            if other.exists() and not (share and other.name.endswith(f"-of-{share[1]}")):
                found, said = _take_lock(other, fcntl.LOCK_SH)  # others may be looking at the same moment
                os.close(found)
                taken_over = taken_over or said
        yield taken_over
    finally:
        os.close(descriptor)


def _take_lock(path: Path, how: int = fcntl.LOCK_EX) -> tuple[int, str]:
    """(its descriptor, from whom it was taken over, if it was)."""
    with writing(path):
        descriptor = open_plain(path, os.O_RDWR | os.O_CREAT)
    if try_lock(descriptor, how):
        return descriptor, ""
    holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
    os.close(descriptor)
    if not _is_stopped(holder):
        remedy = "wait for it or stop it, or use another --run-dir"
        raise StorageError(Problem(f"{path.parent} is in use by {holder}", remedy=remedy))
    path.unlink(missing_ok=True)
    return _take_lock(path, how)[0], f"{holder} is stopped, so this start takes {path.parent} over"


def try_lock(file: int | IO[bytes], how: int = fcntl.LOCK_EX) -> bool:
    """False where another process holds it. File systems without locks let everyone in."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def _is_stopped(holder: str) -> bool:
    """Whether `process 123 on this host` is stopped by a signal or a debugger."""
    words = holder.split()
    is_here = len(words) == 4 and words[1].isdigit() and words[3] == socket.gethostname()
    return is_here and is_stopped(int(words[1]))


@contextlib.contextmanager
def writing(path: str | os.PathLike[str], action: str = "write") -> Iterator[None]:
    """An OSError inside becomes the StorageError that says what to do about `path`."""
    try:
        yield
    except OSError as error:
        what = f"cannot {action} {on_one_line(str(path))}: {reason(error)}"
        raise StorageError(Problem(what, remedy=_remedy(Path(path), error.errno))) from error


@contextlib.contextmanager
def written_to(option: str, then: str = "") -> Iterator[None]:
    """For commands whose place is not chosen by --run-dir: a StorageError inside names `option`, and adds `then`."""
    try:
        yield
    except StorageError as error:
        problems = [replace(each, remedy=each.remedy.replace("--run-dir", option) + then) for each in error.problems]
        raise StorageError(problems) from error


def publish(partial: Path, final: Path) -> None:
    """Give a written file its name: whoever sees the name sees all of it, also after a power cut."""
    with open(partial, "rb") as file:
        sync(file.fileno())
    os.replace(partial, final)
    sync_folder(final.parent)


def reason(error: OSError | None) -> str:
    """`No space left on device (ENOSPC)`."""
    if error is None or error.errno is None:
        return str(error or "unknown reason")
    return f"{error.strerror or os.strerror(error.errno)} ({errno.errorcode.get(error.errno, error.errno)})"


_IN_THE_WAY = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENXIO, errno.EFBIG)
_ADVICE = {
    "free space or raise the quota": (errno.ENOSPC, errno.EDQUOT),
    "the place is read-only for this user: change its permissions or mount": (errno.EROFS, errno.EACCES, errno.EPERM),
    "something stands in its place, and links, pipes and devices are not followed: move it away": _IN_THE_WAY,
    "raise the number of files that may be open (`ulimit -n`)": (errno.EMFILE, errno.ENFILE),
}


def _remedy(path: Path, number: int | None) -> str:
    advice = (text for text, numbers in _ADVICE.items() if number in numbers)
    room = f" ({free_space(path)})" if number in (errno.ENOSPC, errno.EDQUOT) else ""
    return f"{next(advice, 'check the disk or mount (`df`, `dmesg`)')}, or choose another --run-dir{room}"


def free_space(path: Path) -> str:
    """`12 KiB free`, or that the file system has run out of file entries. Looks at the nearest folder that exists."""
    for folder in (path, *path.parents):  # not absolute: the working directory may be gone
        with contextlib.suppress(OSError):
            facts = os.statvfs(folder)
            if facts.f_files and not facts.f_favail:
                return "it has no file entries left: delete files"
            return f"{format_bytes(facts.f_bavail * facts.f_frsize)} free"
    return "free space unknown"


class AppendFile:
    """Lines appended to a file; other processes may append to it too. A full disk loses nothing: unwritten lines wait
    in memory."""

    def __init__(self, path: str | os.PathLike[str], *, is_whole: Callable[[bytes], bool] | None = None) -> None:
        """`is_whole` judges a last line that lacks its newline; without it such a line is text, kept and completed."""
        self.path = Path(path)
        self.last_error: OSError | None = None
        self.repaired = ""
        """What was repaired when the file was opened, for a log; empty when it was in order."""
        self.belongs_to_another: Callable[[], bool] = lambda: False
        """When this is true, nothing more is written."""
        self._lines: list[bytes] = []
        """Those that are not known to be on the disk."""
        self._written = 0
        """How many of them are in the file."""
        self._closed = False
        with writing(self.path, "open"):
            self._descriptor = open_plain(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            self._size = self._synced_size = self._repair(is_whole)

    @property
    def pending_lines(self) -> int:
        """Lines that are not in the file yet."""
        return len(self._lines) - self._written

    def append(self, line: str) -> bool:
        """False if this line, or one before it, could not be written; the next append or flush tries again."""
        assert "\n" not in line, "a record is one line"
        assert not self._closed, f"{self.path} is closed"
        self._lines.append(mask(line).encode(errors="replace") + b"\n")
        is_written = self._write()
        return self.flush() if is_written and self._written >= _SYNC_AFTER_LINES else is_written

    def flush(self) -> bool:
        """Write what waits and bring it to the disk. False if that is not possible now."""
        if not self._write():
            return False
        try:
            sync(self._descriptor)
        except OSError as error:
            # Network file systems report a full disk only here, and the kernel then forgets the data: write it again.
            self._written, self._size = 0, self._synced_size
            return self._fail(error)
        self._synced_size, self._written = self._size, 0
        self._lines.clear()
        return True

    def close(self) -> None:
        """StorageError if lines remain; it names the rescue file that holds them."""
        if self._closed:
            return
        self._closed = True
        complete = self.flush()
        with contextlib.suppress(OSError):  # everything was synced or is waiting
            os.close(self._descriptor)
        if complete:
            return
        raise StorageError(
            Problem(
                what=f"{self.pending_lines} line(s) could not be written to {self.path}: {reason(self.last_error)}",
                rule=self._rescue(),
                remedy=_remedy(self.path, getattr(self.last_error, "errno", 0)),
            )
        )

    def _write(self) -> bool:
        if (self.pending_lines or self.last_error) and self.belongs_to_another():
            del self._lines[self._written :]
            return True
        try:
            if self.last_error is not None:
                self._cut()
            for line in self._lines[self._written :]:
                if (end := os.lseek(self._descriptor, 0, os.SEEK_END)) != self._size:  # another process has appended
                    self._size = self._synced_size = end
                write_all(self._descriptor, line)
                self._size += len(line)
                self._written += 1
        except OSError as error:
            return self._fail(error)
        self.last_error = None
        return True

    def _fail(self, error: OSError) -> bool:
        self.last_error = error
        with contextlib.suppress(OSError):  # then it is cut before the next write
            self._cut()
        return False

    def _cut(self) -> None:
        """Remove what was torn or not synced, unless another process has appended since: nothing of its is cut."""
        waiting = b"".join(self._lines[self._written :])
        tail = os.pread(self._descriptor, len(waiting) + 1, self._size)
        if waiting.startswith(tail.rstrip(b"\0")):  # a failed sync may leave zeros
            os.ftruncate(self._descriptor, self._size)

    def _rescue(self) -> str:
        try:
            name = f"{tempfile.gettempdir()}/bloomery-rescue-{secrets.token_hex(8)}-{self.path.name}"
            with open(name, "xb") as file:
                file.writelines(self._lines[self._written :])
        except OSError as error:
            return f"these lines are lost, because the system's temporary folder failed too: {reason(error)}"
        return f"nothing is lost: they are in {name}; append that file to {self.path.name} when there is room"

    def _repair(self, is_whole: Callable[[bytes], bool] | None) -> int:
        """Repair a last line without newline, as kill -9 or a power cut leave it. Returns the size of the good file."""
        size = os.fstat(self._descriptor).st_size
        start = max(0, size - SMALL_BYTES)
        end = os.pread(self._descriptor, SMALL_BYTES, start)
        tail = end[end.rfind(b"\n") + 1 :]
        if len(tail) == SMALL_BYTES:
            raise OSError(errno.EFBIG, f"it ends in a line of more than {format_bytes(SMALL_BYTES)}")
        if not tail:
            return size
        start = size - len(tail)
        kept = tail.strip(b"\0").decode(errors="ignore").encode()  # a power cut can leave zeros or half a character
        if is_whole is not None and not is_whole(kept):
            kept = b""
        if kept != tail:
            os.ftruncate(self._descriptor, start)
        if kept:  # where all of it is, nothing is cut: another process may be about to append
            write_all(self._descriptor, b"\n" if kept == tail else kept + b"\n")
            self.repaired = f"{self.path}: completed the last line, which lacked its newline"
        else:
            self.repaired = f"{self.path}: removed a torn last line of {len(tail)} bytes, left by an earlier crash"
        return os.lseek(self._descriptor, 0, os.SEEK_END)


def append_line(path: Path, line: str) -> None:
    """To a file that another process may append to as well. OSError if it cannot be written."""
    descriptor = open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        write_all(descriptor, mask(line).encode(errors="replace") + b"\n")
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """However small the portions are in which the system takes it."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync(descriptor: int) -> None:
    """Bring a file or folder to the disk."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC_HERE:
            raise


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def reserve(descriptor: int, size: int) -> None:
    """Take the room that a file will need, so that a full disk is known before the first byte. OSError if it is.

    The system call, not posix_fallocate: that one writes into every block where the file system cannot reserve.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if fallocate is None or size == 0:
        return
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(descriptor, 0, 0, size) != 0:
        number = ctypes.get_errno()
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise OSError(number, os.strerror(number))
