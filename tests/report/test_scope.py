"""A green run states its scope: level, ops that passed, ops that were refused, and where to look next."""

from __future__ import annotations

import json
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from commands import conform
from planted_adapter import planted_adapter
from run_files import document, written_to
from sessions_of_pytest import session

from conformance.judge.verdict import Result, Verdict
from conformance.report.junit import junit
from conformance.report.markdown import markdown
from conformance.report.page import page
from conformance.report.runfile import Selection
from conformance.report.runs import read_runs
from conformance.report.scope import scopes, scopes_of
from conformance.suite.family import LEVELS
from conformance.suite.ops import KNOWN, ids

ADDER = '''
from conformance.backend.interface import DeviceInfo
from conformance.backend.kernel import KernelBackend


class Adder(KernelBackend):
    """Adds F32 tensors of one shape, and loses the end of rows that smoke does not have."""

    name = "adder"

    def kernels(self):
        return {"ADD": self.add}

    def refuses(self, node):
        a, b = node.src[:2]
        return "" if node.type.name == a.type.name == b.type.name == "f32" and a.ne == b.ne else "one shape of F32 only"

    def info(self):
        return DeviceInfo("adder", "CPU", "sums")

    def add(self, node, dst, src):
        dst[...] = src[0] + src[1]
        if dst.shape[-1] == 33:
            dst[..., -1] = src[0][..., -1]
'''
GREEN = "adder: 5 of 123 ops passed a case at level smoke; refused: ACC, ADD1, ADD_ID, ADD_REL_POS and 114 more; "
FURTHER = "conform run --backend adder --level standard --case 'ops/ADD-*'"


@pytest.fixture
def adder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A backend that refuses nearly all, and is wrong where its level has no case."""
    with planted_adapter(tmp_path, monkeypatch, "adder", ADDER, "Adder"):
        yield "adder"


def test_a_green_run_of_a_refusing_backend_names_the_command_that_finds_its_bug(adder: str) -> None:
    """The command in the scope of a green run finds a bug for which its level has no case."""
    green = conform("run", "--backend", adder, "--family", "ops")
    assert green.returncode == 0, green.stdout
    assert f"{GREEN}further: {FURTHER}\n" in green.stdout, green.stdout
    found = conform("run", *shlex.split(FURTHER)[2:])
    assert found.returncode == 1
    assert "FAIL ops/ADD-f32+f32-" in found.stdout


def test_pytest_states_the_scope_and_quiet_runs_do_not(adder: str) -> None:
    """One line per backend in both command lines; none with -q."""
    words = ("--backend", adder, "--case", "ops/ADD-*", "--case", "ops/MUL-*")
    scope = f"{adder}: 1 of 123 ops passed a case at level smoke; "
    loud, quiet = session(*words), session(*words, "-q")
    assert (loud.returncode, quiet.returncode) == (0, 0), loud.stdout
    assert (loud.stdout.count(scope), quiet.stdout.count(scope)) == (1, 0)
    assert "of 123 ops" not in conform("run", *words, "-q").stdout


def test_every_level_has_a_case_of_every_op() -> None:
    """The number of ops in a scope holds at each level."""
    for level in LEVELS:
        assert {i.removeprefix("ops/").partition("-")[0] for i in ids(level)} == set(KNOWN)


def _selection(level: str, *cases: str, families: tuple[str, ...] = (), files: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "levels": {"x": level}, "families": list(families), "cases": list(cases), "files": list(files),
        "seed": None, "shard": "1/1",
    }  # fmt: skip


def _made(selection: dict[str, Any]) -> Selection:
    return Selection(**selection)


@pytest.mark.parametrize(
    ("selection", "further"),
    [
        (_selection("smoke"), "--level standard --case 'ops/ADD-*'"),
        (_selection("smoke", families=("ops", "kv_growth")), "--level standard --case 'ops/ADD-*'"),
        (_selection("standard", "ops/A*"), "--level full --case 'ops/A*'"),
        (
            _selection("smoke", "ops/ADD-f32+f32-a=3@1", "zoo/llama@1"),
            "--level smoke --case 'ops/ADD-*' --case 'zoo/*'",
        ),
        (_selection("smoke", *(f"ops/ADD-{i}*" for i in range(6))), "--level smoke"),
        (_selection("full", "ops/ADD-*"), "--level full"),
        (_selection("full"), "--level full --fresh 1000"),
    ],
)
def test_the_next_command_has_cases_that_this_run_had_not(selection: dict[str, Any], further: str) -> None:
    """More of the same, then all of the level, then new random cases."""
    rows = [
        Result("ops/ADD-f32+f32-a=3@1", "x", Verdict.PASS),
        Result("ops/MUL-f32+f32-a=3@1", "x", Verdict.UNSUPPORTED),
    ]
    (scope,) = scopes(_made(selection), rows)
    assert (scope.passed, scope.refused) == (("ADD",), ("MUL",))
    assert str(scope).endswith(f"; further: conform run --backend x {further}")


def test_an_op_counts_as_refused_only_if_every_case_of_it_is() -> None:
    """A known failure is neither a pass nor a refusal; a refused type of an op that passes is not listed."""
    cases = [("A", "PASS"), ("A", "UNSUPPORTED"), ("B", "XFAIL"), ("B", "UNSUPPORTED"), ("C", "UNSUPPORTED")]
    rows = [Result(f"ops/{op}-f32-n={i}@1", "x", Verdict(v)) for i, (op, v) in enumerate(cases)]
    (scope,) = scopes(_made(_selection("smoke")), rows)
    assert (scope.passed, scope.refused) == (("A",), ("C",))


def test_a_run_without_cases_of_ops_names_the_families_that_passed() -> None:
    """It counts no ops: it had none alone in a graph."""
    verdicts = {"gqa/a@1": Verdict.PASS, "gqa/b@1": Verdict.PASS, "zoo/c@1": Verdict.UNSUPPORTED}
    rows = [Result(case, "x", verdict) for case, verdict in verdicts.items()]
    (scope,) = scopes(_made(_selection("smoke", families=("gqa", "zoo"))), rows)
    assert str(scope).startswith("x: gqa passed a case at level smoke; further: conform run --backend x --level stand")
    (scope,) = scopes(_made(_selection("smoke", families=("zoo",))), rows[2:])
    assert str(scope).startswith("x: no family passed a case at level smoke; ")


def test_a_run_of_named_cases_has_no_level() -> None:
    """An id may be of another level than the selection's, so the sentence names none."""
    (scope,) = scopes(_made(_selection("smoke", "gqa/a@1")), [Result("gqa/a@1", "x", Verdict.PASS)])
    assert str(scope).startswith("x: gqa passed a case; further: conform run --backend x --level smoke ")


def test_a_backend_with_failures_has_no_scope() -> None:
    """The scope says how far a success reaches."""
    rows = [Result("ops/ADD-f32-a=3@1", "x", Verdict.PASS), Result("ops/MUL-f32-a=3@1", "x", Verdict.FAIL)]
    assert not scopes(_made(_selection("smoke")), rows)


def test_cases_without_a_level_have_no_scope() -> None:
    """Cases of a file, of live families and of timed units do not stand for a level of ops."""
    passed = Verdict.PASS
    assert not scopes(_made(_selection("smoke", files=("a.gguf",))), [Result("ops/ADD-f32-a=3@1", "x", passed)])
    assert not scopes(
        _made(_selection("smoke")), [Result("memory/llama@1", "x", passed), Result("perf/a/b@1", "x", passed)]
    )


def test_reports_state_the_scope(tmp_path: Path) -> None:
    """The page, the Markdown summary and JUnit have the line of the terminal; shards of one run count together."""
    first = {**document([("ops/ADD-f32-a=3@1", "x", "PASS")]), "selection": _selection("smoke")}
    second = {**document([("ops/MUL-f32-a=3@1", "x", "UNSUPPORTED")]), "selection": _selection("smoke")}
    runs = read_runs([written_to(tmp_path / f"{i}.json", d) for i, d in enumerate((first, second))])
    (scope,) = scopes_of(runs)
    text = (
        "x: 1 of 123 ops passed a case at level smoke; refused: MUL; further: conform run --backend x --level standard "
    )
    assert str(scope) == f"{text}--case 'ops/ADD-*'"
    html = page(runs, now=datetime(2026, 1, 3, tzinfo=timezone.utc))
    shown = json.loads(html.split('id="data">')[1].split("</script>")[0])["scopes"]
    assert ["; further: ".join(s) for s in shown] == [str(scope)]
    assert "## Scope\n" in markdown(runs)
    assert "x: 1 of 123 ops passed a case at level smoke; refused: MUL" in markdown(runs)
    suite = ET.fromstring(junit(runs))[0]  # noqa: S314  # written above
    assert [p.attrib["value"] for p in suite.iter("property") if p.attrib["name"] == "scope"] == [str(scope)]


def test_an_older_run_of_the_same_cases_has_no_scope_of_its_own(tmp_path: Path) -> None:
    """A run whose results are all replaced by newer ones covers nothing any more."""
    rows = [("ops/ADD-f32-a=3@1", "x", "PASS")]
    old = {**document(rows, written="2026-01-01T00:00:00Z"), "selection": _selection("smoke")}
    new = {**document(rows, written="2026-01-02T00:00:00Z"), "selection": _selection("standard")}
    runs = read_runs([written_to(tmp_path / f"{i}.json", d) for i, d in enumerate((old, new))])
    assert [s.level for s in scopes_of(runs)] == ["standard"]
