"""What a directory of a store may be made of: somebody else may have put links, pipes and devices there."""

import contextlib
import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path

_LOG = logging.getLogger(__name__)


def warn_of_others(directory: str | os.PathLike[str]) -> None:
    """Log a warning where everyone may write to `directory`: pages carry checksums, not signatures."""
    if os.stat(directory).st_mode & stat.S_IWOTH:
        _LOG.warning("%s may be written to by everyone: whoever can write there can forge pages", directory)


def refuse_plants(files: Iterable[Path], directories: Iterable[Path]) -> None:
    """Raise OSError unless each of these is absent, or a plain file or directory of its own: no link, no pipe."""
    for paths, is_right, what in (files, stat.S_ISREG, "plain file"), (directories, stat.S_ISDIR, "directory"):
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                if not is_right(os.lstat(path).st_mode):
                    raise OSError(f"{path} is no {what}: remove it, or give another directory")


def is_own_directory(*paths: str) -> bool:
    """Whether none of these is a link, or anything else that is no directory. What can't be looked at will do."""
    for path in paths:
        try:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                return False
        except OSError:
            return True  # whoever goes on learns why
    return True
