"""Property tests of an adapter in three lines: hypothesis draws case ids, the suite judges.

```python
from conformance.properties import check, given_ids

@given_ids("random")
def test_random_graphs(case_id: str) -> None:
    check("my-npu", case_id)
```

An id that fails shrinks to a small one, which `conform run --case ID` runs again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from hypothesis import event, given, settings

from conformance.backend.registry import Spec
from conformance.judge.verdict import Verdict
from conformance.run.runner import Runner
from conformance.run.session.select import build
from conformance.suite.family import Level
from conformance.suite.strategies import case_ids

__all__ = ["case_ids", "check", "given_ids"]

Test = Callable[[str], None]


def given_ids(family: str, level: Level = "standard", **more: Any) -> Callable[[Test], Callable[[], None]]:  # noqa: ANN401  # hypothesis' own settings
    """A decorator of a test of one case id: `hypothesis.given` with the ids of a family.

    Args:
        family: as `conform list cases --family` takes it.
        level: whose ids are drawn, beside others of the same form with another seed.
        more: settings of hypothesis, such as `max_examples=20`. No deadline unless one stands here, since the first
            case of a backend starts its process.

    Raises:
        KeyError: there is no such family.
    """

    def decorate(test: Test) -> Callable[[], None]:
        return settings(**{"deadline": None, **more})(given(case_ids(family, level))(test))

    return decorate


def check(backend: str, case_id: str) -> None:
    """Run a case on a backend and judge it as `conform run` does.

    What the backend refuses is fine: `pytest --hypothesis-show-statistics` tells how many cases were PASS and how many
    UNSUPPORTED.

    Args:
        backend: as `--backend` takes it, `my-npu` or `my-npu?device=1`.
        case_id: `family/params@seed`.

    Raises:
        AssertionError: the verdict is neither PASS nor UNSUPPORTED; the message is the report's own sentence.
        UsageError: there is no such backend or case.
    """
    (result,) = _runner().run(Spec.parse(backend), [build(case_id)])
    event(result.verdict.value)
    if result.verdict not in {Verdict.PASS, Verdict.UNSUPPORTED}:
        raise AssertionError(result.sentence())


@cache
def _runner() -> Runner:
    """One for all examples: backends and reference values stay as they are."""
    return Runner()
