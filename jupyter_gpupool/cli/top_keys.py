# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What the keys of ``jupyter gpupool top`` do: they select, sort, and give orders. Pure.

If htop or nvitop has the same function, this program uses the same key. After a key for an order,
the program asks for the values of the order. It sends the order when the user confirms it with
``y``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Sequence

from ..units import format_seconds
from .picture import Style
from .top_table import SORTS, TopRow, head, in_order, lines, rows

Snapshot = Mapping[str, Any]

#: The longest delay, in minutes, that a user may enter for an order that takes a slice back. The
#: broker has the same limit.
MAX_MINUTES = 7 * 24 * 60

_HELP = (
    "Up, Down, PgUp, PgDn, Home, End   select a session",
    "< >  or  , .                      sort by another column;  I reverses the order",
    "W  M  P  T                        sort by waste, slice, busy share, unused time",
    "r   release: the pool takes the slice back after some minutes, even in use",
    "R   cancel the release: the kernel keeps its slice",
    "n   another priority class",
    "k   (or F9) end the kernel",
    "d   drain a GPU    p   pause a GPU    u   put a GPU back into service",
    "h   this help      q   quit",
    "",
    "BUSY: while a kernel had a slice, it used CUDA for this share of the time. UNUSED: the rest.",
    "Waste is the slice times UNUSED. Only admins give orders. The owner sees who did, and why.",
)


@dataclass(frozen=True)
class TopOrder:
    """A message for the broker."""

    kind: str
    fields: Mapping[str, Any]


@dataclass
class Question:
    """A question on the last line of the screen.

    ``accept`` takes the user's answer. It returns the next question, an order, or an error text.
    """

    text: str
    accept: Callable[[str], Question | TopOrder | str]
    #: Whether the question is answered with one key: ``y`` for yes, any other key for no.
    yes: bool = False
    typed: str = ""


def parse_minutes(text: str) -> float:
    """Return the minutes that a person typed.

    Raises
    ------
    ValueError
        If ``text`` is not a number or out of range. The error's text is a sentence for people.
    """
    try:
        value = float(text.strip())
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_MINUTES:  # NaN fails this comparison, too
        what = repr(text.strip()) if text.strip() else "Nothing"
        raise ValueError(f"{what} is not a number of minutes above 0 and up to {MAX_MINUTES}.")
    return value


@dataclass
class Top:
    """The state of the screen."""

    sort: str = SORTS[0]
    inverted: bool = False
    selected: str = ""
    help: bool = False
    #: The broker's answer to the last order, or the reason why no order was sent.
    message: str = ""
    question: Question | None = None
    _rows: list[TopRow] = field(default_factory=list)
    _snapshot: Snapshot | None = None

    def update(self, snapshot: Snapshot) -> None:
        """Store a new status. The selected session stays selected as long as it exists."""
        self._snapshot = snapshot
        before = [row.id for row in self._rows]
        self._rows = in_order(rows(snapshot), self.sort, inverted=self.inverted)
        now = [row.id for row in self._rows]
        if self.selected not in now:
            at = before.index(self.selected) if self.selected in before else 0
            self.selected = now[min(at, len(now) - 1)] if now else ""

    @property
    def row(self) -> TopRow | None:
        """The selected session."""
        return next((row for row in self._rows if row.id == self.selected), None)

    # ------------------------------------------------------------------ keys

    def press(self, key: str) -> TopOrder | None:
        """Handle a key; return an order if this key completes one, else None."""
        if self.question is not None:
            return self._answer(self.question, key)
        self.message = ""
        if self.help:
            self.help = False
        elif key in ("h", "?", "f1"):
            self.help = True
        elif key in _MOVES:
            self._move(_MOVES[key])
        elif key in _SORT_KEYS:
            self._resort(_SORT_KEYS[key])
        elif key in ("<", ",", ">", "."):
            step = -1 if key in ("<", ",") else 1
            self._resort(SORTS[(SORTS.index(self.sort) + step) % len(SORTS)])
        elif key == "I":
            self.inverted = not self.inverted
            self._resort(self.sort)
        else:
            self._ask(key)
        return None

    def _move(self, step: int) -> None:
        ids = [row.id for row in self._rows]
        if ids:
            at = ids.index(self.selected) + step
            self.selected = ids[min(max(at, 0), len(ids) - 1)]

    def _resort(self, sort: str) -> None:
        self.sort = sort
        self._rows = in_order(self._rows, sort, inverted=self.inverted)

    def _answer(self, question: Question, key: str) -> TopOrder | None:
        if key == "escape" or (question.yes and key != "y"):
            self.question, self.message = None, "Nothing was changed."
            return None
        if not question.yes and key != "enter":
            if key == "backspace":
                question.typed = question.typed[:-1]
            elif len(key) == 1 and key.isprintable():
                question.typed += key
            return None
        found = question.accept(question.typed.strip())
        if isinstance(found, str):
            self.message, question.typed = found, ""
            return None
        self.message = ""
        self.question = found if isinstance(found, Question) else None
        return found if isinstance(found, TopOrder) else None

    def _ask(self, key: str) -> None:
        row = self.row
        of_session = {
            "r": self._recall, "R": self._stay, "k": self._end, "f9": self._end,
        }  # fmt: skip
        of_gpu = {"d": "drain", "p": "pause", "u": "resume"}
        if key not in of_session and key not in of_gpu and key != "n":
            return
        if self._snapshot is None:
            return
        if not self._snapshot.get("admin"):
            self.message = "Only root, the broker's user and c.GPUPool.admins may do that."
        elif key in of_gpu:
            self.question = self._device(of_gpu[key], self._snapshot["devices"])
        elif row is None:
            self.message = "No session is selected."
        elif key == "n":
            classes = (self._snapshot.get("limits") or {}).get("priorities") or ()
            self.question = self._priority(row, [*classes])
        else:
            self.question = of_session[key](row)

    def _recall(self, row: TopRow) -> Question:
        def accept(text: str) -> Question | TopOrder | str:
            try:
                minutes = parse_minutes(text)
            except ValueError as error:
                return str(error)
            return _confirm(
                f"Take the slice of {_called(row)} back in {format_seconds(60 * minutes)}?",
                TopOrder("recall", {"session": row.id, "minutes": minutes}),
            )

        return Question(f"Take the slice of {_called(row)} back after how many minutes?", accept)

    def _stay(self, row: TopRow) -> Question:
        return _confirm(
            f"Let {_called(row)} keep its slice?",
            TopOrder("recall", {"session": row.id, "cancel": True}),
        )

    def _priority(self, row: TopRow, names: Sequence[str]) -> Question:
        def accept(text: str) -> Question | TopOrder | str:
            if text not in names:
                return f"There is no priority class {text!r}."
            return _confirm(
                f"Move {_called(row)} from the class {row.priority} to {text}?",
                TopOrder("prioritise", {"session": row.id, "priority": text}),
            )

        return Question(f"Priority class of {_called(row)} ({', '.join(names)}):", accept)

    def _end(self, row: TopRow) -> Question:
        return _confirm(
            f"End {_called(row)}? Its variables are lost.", TopOrder("end", {"session": row.id})
        )

    def _device(self, action: str, devices: Sequence[Mapping[str, Any]]) -> Question:
        known = [str(device["index"]) for device in devices]

        def accept(text: str) -> Question | TopOrder | str:
            if text not in known:
                return f"There is no GPU {text!r}; there are {', '.join(known) or 'none'}."
            return _confirm(
                f"{_DOES[action].format(text)}",
                TopOrder("maintain", {"action": action, "device": text}),
            )

        return Question(f"{action.capitalize()} which GPU ({', '.join(known)})?", accept)

    # ------------------------------------------------------------------ picture

    def picture(self, style: Style, height: int) -> tuple[list[str], int]:
        """Return the lines of the screen, and the number of the selected line (-1: none)."""
        if self._snapshot is None:
            return [self.message or "Asking the broker ..."], -1
        if self.help:
            return [*_HELP, "", "Any key goes back."], -1
        top = head(self._snapshot, style)
        table = lines(self._rows, self.sort, style)
        last = self._last_line()
        room = max(1, height - len(top) - 4)
        if len(top) > height // 2:
            top = top[:1]
            room = max(1, height - 5)
        at = next((n for n, row in enumerate(self._rows) if row.id == self.selected), 0)
        first = max(0, min(at - room // 2, len(self._rows) - room))
        shown = table[1:][first : first + room]
        if not shown:
            shown = ["No kernel is in the pool."]
        found = [*top, "", table[0], *shown]
        found += [""] * max(0, height - 1 - len(found)) + [style.cut(last, style.width)]
        return found, (len(top) + 2 + at - first if self._rows else -1)

    def _last_line(self) -> str:
        if self.question is not None:
            note = f"{self.message} " if self.message else ""
            typed = "" if self.question.yes else f" {self.question.typed}_  (Esc goes back)"
            return f"{note}{self.question.text}{typed}"
        return self.message or _KEYS


_KEYS = "h help  < > sort  r release  n priority  k end  d drain  p pause  u resume  q quit"
_MOVES = {
    "up": -1, "down": 1, "pageup": -10, "pagedown": 10, "home": -(1 << 30), "end": 1 << 30,
}  # fmt: skip
_SORT_KEYS = {"W": "waste", "M": "slice", "P": "busy", "T": "unused"}
_DOES = {
    "drain": "Drain GPU {}? Its kernels go on elsewhere.",
    "pause": "Pause GPU {}? Its kernels wait until the GPU is back.",
    "resume": "Test GPU {} and put it back into service?",
}


def _called(row: TopRow) -> str:
    return f"{row.name or row.id} ({row.owner})"


def _confirm(text: str, order: TopOrder) -> Question:
    return Question(f"{text} y/n", lambda _: order, yes=True)
