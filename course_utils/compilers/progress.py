"""One line for whoever waits for a compiler. Floor 1."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

SECONDS = 2.0


@contextlib.contextmanager
def line(text: str) -> Iterator[None]:
    """``text`` is shown while what is in the ``with`` goes on after 2 s.

    Only where somebody sits: in a terminal, or at a page that takes input,
    which nothing that runs a notebook to store its outputs does.
    """
    if sys.stderr.isatty():
        show = _written
    elif _taking_input():
        show = _displayed
    else:
        yield
        return
    shown: list[Callable[[], Any]] = []
    timer = threading.Timer(SECONDS, lambda: shown.append(show(text)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # it may be at it
        for remove in shown:
            remove()


def _taking_input() -> bool:
    """Whether this is a notebook's process, and asked by a front end."""
    python = sys.modules.get("IPython")
    shell = python.get_ipython() if python else None
    return getattr(getattr(shell, "kernel", None), "_allow_stdin", False)


def _written(text: str) -> Callable[[], Any]:
    def write(words: str) -> None:
        sys.stderr.write(words)
        sys.stderr.flush()

    write(text)
    return lambda: write("\r\033[K")


def _displayed(text: str) -> Callable[[], Any]:
    from IPython.display import display

    handle = display({"text/plain": text}, raw=True, display_id=True)
    return lambda: handle.update({"text/plain": "", "text/html": ""},
                                 raw=True)
