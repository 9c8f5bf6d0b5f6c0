"""Property tests of an adapter in three lines: hypothesis draws case ids, the suite judges.

    from conformance.properties import check, given_ids

    @given_ids("random")
    def test_random_graphs(case_id: str) -> None:
        check("my-npu", case_id)

A failing id shrinks to a small one, which `conform run --case ID` runs again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from conformance.backend.registry import Spec
from conformance.judge.verdict import Verdict
from conformance.run.runner import Runner
from conformance.run.session.select import build
from conformance.suite import FAMILIES, alias, random_graphs
from conformance.suite.family import Level

__all__ = ["case_ids", "check", "given_ids"]

Test = Callable[[str], None]


def given_ids(family: str, level: Level = "standard", **more: Any) -> Callable[[Test], Callable[[], None]]:  # noqa: ANN401  # hypothesis' own settings
    """Decorate a test of one case id: `hypothesis.given` with the ids of a family.

    Args:
        family: name, as for `conform list cases --family`.
        level: its ids are drawn, also with other seeds.
        more: settings of hypothesis, such as `max_examples=20`. There is no deadline by default, because the first
            case of a backend starts its process.

    Raises:
        KeyError: there is no such family.
    """

    def decorate(test: Test) -> Callable[[], None]:
        return settings(**{"deadline": None, **more})(given(case_ids(family, level))(test))

    return decorate


def check(backend: str, case_id: str) -> None:
    """Run a case on a backend and judge it as `conform run` does.

    UNSUPPORTED is accepted: `pytest --hypothesis-show-statistics` prints how many cases were PASS and how many
    UNSUPPORTED.

    Args:
        backend: as for `--backend`: `my-npu` or `my-npu?device=1`.
        case_id: `family/params@seed`.

    Raises:
        AssertionError: the verdict is neither PASS nor UNSUPPORTED; the message is the report's sentence.
        UsageError: there is no such backend or case.
    """
    (result,) = _runner().run(Spec.parse(backend), [build(case_id)])
    event(result.verdict.value)
    if result.verdict not in {Verdict.PASS, Verdict.UNSUPPORTED}:
        raise AssertionError(result.sentence())


@cache
def _runner() -> Runner:
    """Return the runner of all examples, which keeps backends open and expected values cached."""
    return Runner()


SEEDS = st.integers(0, 10**9)


def case_ids(family: str, level: Level = "standard") -> st.SearchStrategy[str]:
    """Return ids of a family's level, also with other seeds; shrinks towards small cases.

    For `random` and `alias` every key is drawn separately.

    Raises:
        KeyError: unknown family.
    """
    if family == random_graphs.NAME:
        return _random()
    if family == alias.NAME:
        return _alias()
    ids = st.sampled_from(list(FAMILIES[family].ids(level)))
    if not FAMILIES[family].seeded:
        return ids
    return ids | st.builds(lambda i, seed: f"{i.rpartition('@')[0]}@{seed}", ids, SEEDS)


def _random() -> st.SearchStrategy[str]:
    low, high = random_graphs.NODES
    return st.builds(
        lambda nodes, steps, d, w, cache, rare, seed: (
            f"{random_graphs.NAME}/nodes={nodes},steps={steps},d={d},w={w},cache={cache},rare={rare}@{seed}"
        ),
        st.integers(low, high),
        st.integers(1, 4),
        st.sampled_from((32, 64)),
        st.sampled_from(random_graphs.WEIGHTS),
        st.sampled_from(random_graphs.CACHES),
        st.sampled_from((0, 1)),
        SEEDS,
    )


def _alias() -> st.SearchStrategy[str]:
    return st.builds(
        lambda what, tokens, order, seed: f"{alias.NAME}/differs={what},tokens={tokens},order={order}@{seed}",
        st.sampled_from(list(alias.DIFFERS)),
        st.integers(1, 8),
        st.sampled_from(("abab", "ab", "ba", "aab")),
        SEEDS,
    )
