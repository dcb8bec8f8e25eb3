"""Counts the values of a JSON text as it comes, so that a body of millions is never parsed."""

import re

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


class ValueCounter:
    """Counts commas and opening brackets outside of strings: no fewer than there are values, less
    one."""

    def __init__(self) -> None:
        self.num_values = 0
        self._is_in_string = False
        self._rest = b""  # a backslash, whose character is still to come

    def feed(self, piece: bytes) -> None:
        """Counts the next bytes, in a time that is linear in their number."""
        text = self._rest + piece
        num_backslashes = len(text) - len(text.rstrip(b"\\"))
        end = len(text) - num_backslashes % 2
        self._rest = text[end:]
        # The last mark ends a string that is cut, or stays as one that nothing follows: so every
        # other one has its partner, and the search never begins again.
        begin = b'"' if self._is_in_string else b""
        outside = _STRING.sub(b"", begin + text[:end] + b'"')
        self._is_in_string = not outside.endswith(b'"')
        self.num_values += sum(map(outside.count, (b",", b"[", b"{")))
