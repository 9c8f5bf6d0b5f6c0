"""Which cases a run takes."""

import re
from fnmatch import translate

from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.run.session.select import case_ids
from conformance.suite import FAMILIES

ALL = [i for f in FAMILIES.values() if not f.lacks() for i in f.ids("smoke")]


@st.composite
def globs(draw: st.DrawFn) -> str:
    """An id of which one part is a wildcard, a class of characters, or cut off."""
    text = draw(st.sampled_from(ALL))
    begin = draw(st.integers(0, len(text)))
    end = draw(st.integers(begin, len(text)))
    wild = draw(st.sampled_from(["*", "?" * (end - begin), "[!/]*"]))
    return text[:begin] + wild + text[end:]


@settings(max_examples=30)  # each reads all ids of smoke
@given(st.lists(globs(), min_size=1, max_size=3))
def test_a_glob_takes_what_it_matches_of_every_family(drawn: list[str]) -> None:
    """Families that are not listed, because no id of theirs can match, hold none that does."""
    expected = [[i for i in ALL if re.match(translate(g), i)] for g in drawn]
    if all(expected):
        assert case_ids([], drawn, "smoke") == [i for i in ALL if any(i in e for e in expected)]
