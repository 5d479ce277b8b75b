"""Where a CSV file may be cut: at line ends that are not inside quotes, found a block at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MAX_RECORD = 64 << 20  # bytes
_LF, _CR, _QUOTE = 10, 13, 34
I64 = npt.NDArray[np.int64]


class LineScan:
    """Reads the bytes of a file in order. Quotes count as in the parser: only one that opens a field opens quotes.

    After each `feed`: `end` is the byte after the last line end outside quotes, `records` how many non-empty lines
    (a line inside quotes is none of its own) end there.
    """

    def __init__(self, separator: bytes, quotes: bool) -> None:
        self.end = 0
        self.records = 0
        self._separator = separator
        self._quotes = quotes
        self._rest = b""

    def feed(self, block: bytes) -> bool:
        """Take the next bytes; False if one record is longer than MAX_RECORD."""
        data = self._rest + block
        if not self._quotes or b'"' not in data:
            good = _line_ends(data)
        else:
            good = self._outside(data)
        if not len(good):
            self._rest = data
            return len(data) <= MAX_RECORD
        at = int(good[-1]) + 1
        self.records += _count_records(data, good)
        self.end += at
        self._rest = data[at:]
        return True

    def _outside(self, data: bytes) -> I64:
        """Line ends outside quotes; `data` starts at the start of a record."""
        text = np.frombuffer(data, np.uint8)
        ends = _line_ends(data)
        quotes = np.flatnonzero(text == _QUOTE)
        line = np.searchsorted(ends, quotes)  # the line each quote stands in; len(ends) is the unfinished one
        before = np.where(quotes > 0, text[np.maximum(quotes, 1) - 1], _LF)
        opens = (before == _LF) | (before == _CR) | (before == self._separator[-1])
        starts = np.searchsorted(line, line)  # first quote of the same line
        inside = (np.arange(len(quotes)) - starts) % 2 == 1
        again = (before == _QUOTE) & (np.arange(len(quotes)) > starts)  # "" inside quotes
        odd = np.bincount(line, minlength=len(ends) + 1) % 2 == 1
        odd[line[~inside & ~opens & ~again]] = True  # a stray quote: parity says nothing about this line
        keep = np.ones(len(ends), np.bool_)
        done = -1
        for i in np.flatnonzero(odd[:-1]).tolist():
            if i <= done:
                continue
            start = int(ends[i - 1]) + 1 if i else 0
            last = _record_end(data, start, ends, i, self._separator)
            keep[i:last] = False
            done = last
        return ends[keep]


def _line_ends(data: bytes) -> I64:
    return np.flatnonzero(np.frombuffer(data, np.uint8) == _LF)


def _count_records(data: bytes, ends: I64) -> int:
    """Lines up to the last of `ends` that are not empty."""
    text = np.frombuffer(data, np.uint8)
    starts = np.concatenate([[0], ends[:-1] + 1])
    length = ends - starts
    empty = (length == 0) | ((length == 1) & (text[starts] == _CR))
    return int(len(ends) - empty.sum())


def _record_end(data: bytes, start: int, ends: I64, line: int, separator: bytes) -> int:
    """Number of the line that the record from `start` (in line `line`) ends in; len(ends) if it is not in `data`."""
    at, inside = start, False
    while line < len(ends):
        stop = int(ends[line])
        inside = _lex(data, at, stop, inside, separator)
        if not inside:
            return line
        at, line = stop + 1, line + 1
    return line


def _lex(data: bytes, at: int, stop: int, inside: bool, separator: bytes) -> bool:
    """Whether the line end at `stop` is inside quotes, given whether `at` (a line's start) is."""
    while at <= stop:
        if inside:
            at = data.find(b'"', at, stop)
            if at < 0:
                return True
            doubled = data[at + 1 : at + 2] == b'"'
            inside, at = doubled, at + (2 if doubled else 1)
            if inside:
                continue
        elif data[at : at + 1] == b'"':
            inside, at = True, at + 1
            continue
        following = data.find(separator, at, stop)
        if following < 0:
            return False
        at = following + len(separator)
    return inside
