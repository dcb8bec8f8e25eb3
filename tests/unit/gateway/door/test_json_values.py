"""Values of a JSON text, counted before it is parsed."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.door.json_values import ValueCounter

TEXTS = st.text(st.sampled_from('"\\\\[]{},:ab'), max_size=6)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=30,
)


def _num_values(value: Any) -> int:
    children = value.values() if isinstance(value, dict) else value
    return 1 + sum(map(_num_values, children)) if isinstance(value, dict | list) else 1


@given(VALUES, st.integers(1, 20))
def test_no_value_is_missed_however_the_text_is_cut(value: Any, size: int) -> None:
    text = json.dumps(value).encode()
    counter, whole = ValueCounter(), ValueCounter()
    for start in range(0, len(text), size):
        counter.feed(text[start : start + size])
    whole.feed(text)
    assert counter.num_values == whole.num_values
    # A closing bracket is the end of a value: an empty list has an opening one only.
    assert _num_values(value) - 1 <= counter.num_values <= 2 * _num_values(value)


def test_what_stands_in_strings_does_not_count() -> None:
    for text in (b'"' + b"[{,," * 9, b'"\\\\' + b"[" * 9, b'"\\"' + b"[" * 9 + b'"'):
        counter = ValueCounter()
        counter.feed(text)
        assert counter.num_values == 0
