"""Writes a command's result so that an earlier one is lost only to a whole new one."""

import errno
from contextlib import suppress
from pathlib import Path
from stat import S_IMODE

# The folder takes no new file, or this file no other in its place: a container may mount just the file.
_IN_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.ENAMETOOLONG)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside `path`, which then takes its place: all of it, or, if that fails, nothing.

    Links, devices and pipes are written in place, and so is a file that no other can replace.

    Raises:
        OSError: it cannot be written.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_bytes(content)
        return
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_bytes(content)
        if path.exists():
            draft.chmod(S_IMODE(path.stat().st_mode))
        draft.rename(path)
    except OSError as error:
        if error.errno not in _IN_PLACE:
            raise
        path.write_bytes(content)
    finally:
        with suppress(OSError):
            draft.unlink()
