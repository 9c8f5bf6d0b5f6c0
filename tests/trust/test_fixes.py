"""The list of known bugs that a rule chooses."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import datetime, timedelta, timezone

from hypothesis import given
from hypothesis import strategies as st

from conformance.case.strict import parse_toml
from trust.past import backtest, fixes
from trust.past.fixes import FACTS, LIST, Package, pair, text

DAY = datetime(2026, 1, 1, tzinfo=timezone.utc)


def test_the_list_is_what_the_rule_chooses() -> None:
    """`python -m tests.trust.past.fixes` writes it, with the same bytes each time; no entry is in both lists."""
    facts = parse_toml(FACTS.read_text(encoding="utf-8"), FACTS.name)
    written = LIST.read_text(encoding="utf-8")
    assert text(fixes.fixes(), facts) == written, "run python -m tests.trust.past.fixes"
    drawn, known = (backtest.read(FACTS.with_name(name)) for name in ("backtest-drawn.toml", "backtest.toml"))
    assert not {f.link for f in drawn} & {f.link for f in known}
    assert all(f.known for f in known)


@given(st.lists(st.from_regex(r"[0-9]{5}", fullmatch=True), unique=True), st.randoms(use_true_random=False))
def test_the_draw_depends_on_the_names_alone(names: list[str], dice: random.Random) -> None:
    """Neither their order nor names that were not drawn matter."""
    drawn = fixes.drawn(names, n=5)
    assert len(drawn) == min(5, len(names))
    assert drawn <= set(names)
    assert fixes.drawn(dice.sample(names, len(names)), n=5) == drawn
    assert fixes.drawn(sorted(drawn), n=5) == drawn


@given(st.lists(st.integers(0, 60), min_size=1, unique=True), st.integers(0, 60), st.none() | st.integers(0, 60))
def test_a_pair_has_the_fix_between_it(days: list[int], merged: int, since: int | None) -> None:
    """The bad package lacks the fix and has its fault, the good one has the fix; or a sentence says why not."""
    among = [Package("p", str(d), DAY + timedelta(d), DAY + timedelta(d, hours=20)) for d in sorted(days)]
    came = None if since is None else DAY + timedelta(since)
    fix = replace(fixes.fixes()[0], merged=DAY + timedelta(merged), since=came)
    found = pair(fix, among)
    if isinstance(found, str):
        assert found.startswith(("no package before", "no package after"))
        return
    bad, good = found
    assert bad.last < fix.merged < good.first
    assert fix.since is None or fix.since < bad.first
    assert not [p for p in among if bad.last < p.last < fix.merged or fix.merged < p.first < good.first]
