"""The line that says how a training goes: in a terminal, or in a notebook's cell."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import Any, List, Optional, Sequence, Tuple

_REDRAW_SECONDS = 0.1
_PLAIN_SECONDS = 5.0  # between lines where there is no terminal


def count(value: float) -> str:
    """"950", "5.2k", "1.3M"."""
    for unit in ("", "k", "M", "G", "T"):
        if value < 999.5 or unit == "T":
            break
        value /= 1000
    return f"{value:.0f}" if unit == "" else f"{value:.1f}{unit}"


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


# Another bar that is drawn in the same terminal.
def _other_bar() -> bool:
    bars = getattr(getattr(sys.modules.get("tqdm.std"), "tqdm", None), "_instances", ())
    return len(bars) > 0


class Progress:
    """One line that is drawn anew, not more than ten times a second, by the first rank.

    wanted: None where a terminal or a notebook shows it; True: elsewhere as well, a line every five seconds; False: never. It holds
    back while a bar of tqdm is open.
    """

    def __init__(self, wanted: Optional[bool], first: bool = True) -> None:
        first = first and os.environ.get("RANK", "0") == "0"
        self._notebook = _in_notebook()
        self._terminal = not self._notebook and bool(getattr(sys.stderr, "isatty", lambda: False)())
        self.on = first and wanted is not False and (wanted is True or self._notebook or self._terminal)
        self._drawn: Optional[float] = None
        self._newest: Optional[str] = None  # that is not drawn yet
        self._open = False
        self._handle: Any = None

    def show(self, parts: Sequence[Tuple[int, str]]) -> None:
        """parts: (rank, text); where the window is narrow, the highest ranks go first."""
        if not self.on or (self._terminal and _other_bar()):
            return
        self._newest = self._fitted(list(parts))
        now = time.monotonic()
        if self._drawn is None or now - self._drawn >= (_REDRAW_SECONDS if self._terminal or self._notebook else _PLAIN_SECONDS):
            self._drawn = now
            self._draw()

    def tell(self, text: str) -> None:
        """A line that stays, also where none is drawn anew."""
        self._write(f"\r\x1b[K{text}\n" if self._open else f"{text}\n")
        self._open = False

    def finish(self) -> None:
        """The line stays as it is, with the newest figures."""
        if self._newest is not None:
            self._draw()
        if self._open:
            self._write("\n")
        self._open = False

    def _fitted(self, parts: List[Tuple[int, str]]) -> str:
        columns = shutil.get_terminal_size().columns - 1 if self._terminal else 0

        def line() -> str:
            return "  ".join(text for _, text in parts)

        while columns and len(line()) > columns and any(rank for rank, _ in parts):
            highest = max(rank for rank, _ in parts)
            parts = [(rank, text) for rank, text in parts if rank != highest]
        return line()[: columns or None]

    def _draw(self) -> None:
        text, self._newest = self._newest or "", None
        if self._notebook:
            self._draw_in_notebook(text)
        elif self._terminal:
            self._write(f"\r{text}\x1b[K")
            self._open = True
        else:
            self._write(f"{text}\n")

    def _draw_in_notebook(self, text: str) -> None:
        from IPython.display import Pretty, display  # type: ignore[import-not-found]

        if self._handle is None:
            self._handle = display(Pretty(text), display_id=True)
        else:
            self._handle.update(Pretty(text))

    # Progress is no result: where it cannot be written, training goes on.
    @staticmethod
    def _write(text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):
            pass
