"""The report's page for everybody: by keyboard, on a phone, by day and night, and nothing told by colour alone."""

from __future__ import annotations

from itertools import combinations

import pytest
from browser import VIEWS, Driver, ask, cause_view, failed_view, go, look, turned

from conformance.report.runs import Runs

pytest_plugins = ("page_fixtures",)
PHONE = 360
HEAD = "document.querySelector('h2').textContent"


@pytest.mark.parametrize("dark", [False, True])
def test_not_run_is_not_unsupported_is_not_zero(at: Driver, dark: bool) -> None:
    """The words not run, unsupported and 0 % differ in sign, colour and ground, and each looks the same everywhere."""
    look(at, dark=dark)
    go(at, "support")
    looks = ask(at, "return looks()")
    three = {word: looks[word] for word in ("not run", "unsupported", "0 %")}
    assert all(len(found) == 1 for found in three.values()), three
    for (a,), (b,) in combinations(three.values(), 2):
        sign, colour, ground, _ = zip(a, b, strict=True)
        assert sign[0] != sign[1]
        assert colour[0] != colour[1]
        assert ground[0] != ground[1]
    for word, (found, *_) in looks.items():
        assert (found[1:3] in [v[0][1:3] for v in three.values()]) == (word in three), word


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read(at: Driver, runs: Runs, dark: bool) -> None:
    """Every text of every view stands out 4.5 to 1 from what is behind it (WCAG AA), by day and by night."""
    look(at, dark=dark)
    for view in (*VIEWS, failed_view(runs), cause_view(runs)):
        go(at, view)
        assert (view, ask(at, "return pale()")) == (view, [])


def test_no_text_is_too_small(at: Driver, runs: Runs) -> None:
    """On a phone text is 12 pixels high at least, and in drawings and charts, which can be made larger, 8.5."""
    look(at, width=400, height=740)
    for view in (*VIEWS, failed_view(runs), cause_view(runs)):
        go(at, view)
        assert (view, ask(at, "return small(12, 8.5)")) == (view, [])


def test_a_phone_scrolls_down_only(at: Driver, runs: Runs) -> None:
    """At 360 pixels no view is wider than the screen; what is wide scrolls in a region of its own that has a name."""
    look(at, width=PHONE, height=740)
    for view in (*VIEWS, failed_view(runs), cause_view(runs)):
        go(at, view)
        assert (view, ask(at, "return document.documentElement.scrollWidth")) == (view, PHONE)
        assert ask(at, "return all('.scroll').filter((e) => !e.ariaLabel || e.tabIndex !== 0).length") == 0


def test_everything_that_acts_has_a_name(at: Driver, runs: Runs) -> None:
    """Nothing but links, buttons, fields and named regions takes the focus, each has a name, and tables have heads."""
    for view in (*VIEWS, failed_view(runs), cause_view(runs)):
        go(at, view)
        assert (view, ask(at, "return odd()")) == (view, [])
        assert ask(at, "return all('table').filter((t) => !t.querySelector('th[scope]')).length") == 0


def test_results_by_keyboard(at: Driver) -> None:
    """Tab reaches a way past the navigation; `/` the search; arrows the rows, Enter opens one, Back returns."""
    _press(at, "TAB")
    assert _focused(at) == ("Skip to the content", True)
    _press(at, "ENTER")
    assert turned(at, "document.activeElement.id", "main") == "main"
    go(at, "results")
    assert ask(at, """return all('.rows tbody a:not([tabindex="-1"])').length""") == 1
    _press(at, "/")
    assert turned(at, "document.activeElement.id", "search") == "search"
    ask(at, "document.querySelector('.rows tbody a').focus()")
    first = _focused(at)[0]
    _press(at, "ARROW_DOWN", "ARROW_DOWN")
    assert _focused(at) == (ask(at, "return all('.rows tbody .main a.row')[2].textContent"), True)
    assert ask(at, """return all('.rows tbody a:not([tabindex="-1"])').length""") == 1
    _press(at, "HOME")
    assert _focused(at)[0] == first
    _press(at, "ENTER")
    assert turned(at, HEAD, first) == first
    at.back()
    assert turned(at, HEAD, "Results") == "Results"


def test_the_matrix_by_keyboard(at: Driver) -> None:
    """The matrix is one stop of Tab; arrows go through its cells, Enter on an op unfolds its types."""
    go(at, "support")
    stops = """return all('.matrix tbody :is(a, button):not([tabindex="-1"])').length"""
    where = "const c = document.activeElement.closest('td, th'); return [c.parentElement.rowIndex, c.cellIndex]"
    lines = "return all('.matrix tbody tr').length"
    assert ask(at, stops) == 1
    ask(at, "document.querySelector('.matrix tbody button').focus()")
    folded = ask(at, lines)
    _press(at, "ENTER")
    assert ask(at, lines) > folded
    assert ask(at, stops) == 1
    assert ask(at, where) == [1, 0]
    _press(at, "ARROW_RIGHT")
    assert ask(at, where) == [1, 1]
    _press(at, "ARROW_DOWN")
    assert ask(at, where) == [2, 1]
    assert _focused(at)[1]
    _press(at, "ARROW_UP", "ARROW_LEFT", "ENTER")
    assert ask(at, lines) == folded


def test_bars_and_points_by_keyboard(at: Driver) -> None:
    """A chart is one stop of Tab; arrows go from bar to bar, and each says what it counts."""
    for view in ("budgets", "speed"):
        go(at, view)
        ask(at, "document.querySelector('.panel svg a').focus()")
        named = "const e = document.activeElement; return e.ariaLabel || e.querySelector('title').textContent"
        first = ask(at, named)
        _press(at, "ARROW_RIGHT")
        assert ask(at, named)
        assert ask(at, named) != first
        assert ask(at, """return all('.panel')[0].querySelectorAll('svg a:not([tabindex="-1"])').length""") == 1


def test_a_drawing_zooms_and_moves(at: Driver, runs: Runs) -> None:
    """Keys and buttons change the size of a graph only, around its middle.

    Dragging and arrows move it, and all of it fits on request.
    """
    from selenium.webdriver import ActionChains  # noqa: PLC0415  # only where there is a browser

    look(at, width=400, height=500)
    go(at, failed_view(runs))
    size = """return [Number(document.querySelector('svg.graph[role=img]').getAttribute('width')),
        document.documentElement.scrollWidth]"""
    drawn, page_width = ask(at, size)
    ask(at, "document.querySelector('.zoom').focus()")
    _press(at, "+", "+", "+", "+", "+", "+")
    assert ask(at, size) == [pytest.approx(drawn * 1.25**6), page_width]
    assert ask(at, "return document.querySelector('output').textContent") == "381 %"
    middle = "const z = document.querySelector('.zoom'); return (z.scrollLeft + z.clientWidth / 2) / z.scrollWidth"
    before = ask(at, middle)
    _press(at, "-")
    assert ask(at, middle) == pytest.approx(before, abs=0.02)
    place = "const z = document.querySelector('.zoom'); return [z.scrollLeft, z.scrollTop]"
    left, top = ask(at, place)
    region = at.find_element("css selector", ".zoom")
    ActionChains(at).move_to_element(region).click_and_hold().move_by_offset(-40, -20).release().perform()
    assert ask(at, place) == [pytest.approx(left + 40, abs=2), pytest.approx(top + 20, abs=2)]
    ask(at, "all('button').find((b) => b.textContent === 'Whole').click()")
    fits = """const z = document.querySelector('.zoom');
        return z.scrollWidth <= z.clientWidth && z.scrollHeight <= z.clientHeight"""
    assert ask(at, fits)
    _press(at, "0")
    assert ask(at, size)[0] == drawn


def _press(driver: Driver, *keys: str) -> None:
    from selenium.webdriver import ActionChains  # noqa: PLC0415  # only where there is a browser
    from selenium.webdriver.common.keys import Keys  # noqa: PLC0415  # as above

    for key in keys:
        ActionChains(driver).send_keys(getattr(Keys, key) if key.isupper() else key).perform()
        ask(driver, "await new Promise(requestAnimationFrame); await new Promise((r) => setTimeout(r))")


def _focused(driver: Driver) -> tuple[str, bool]:
    """The text of what has the focus, and whether that is to be seen."""
    text, outline = ask(
        driver, "const e = document.activeElement; return [e.textContent, getComputedStyle(e).outlineStyle]"
    )
    return text, outline != "none"
