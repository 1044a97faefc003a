"""A progress bar for commands that go through a recording."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(total: int, quiet: bool, title: str = "replay") -> Iterator[Callable[[int], object]]:
    """A bar on standard error, if there is tqdm; what it gives is told how many events more are done."""
    try:
        from tqdm import tqdm  # optional dependency
    except ImportError:
        yield lambda count: None
        return
    with tqdm(total=total, desc=title, unit="event", disable=quiet, file=sys.stderr) as bar:
        yield bar.update
