"""A baseline of known causes: written, filled in by a person, read, and held against a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.causes.baseline import KNOWABLE, Baseline, Known, Ran, Seen, Selection, parse, ran, read, write
from conformance.causes.cause import unique_ids
from conformance.causes.difference import Difference, compare
from conformance.causes.same import same
from conformance.ggml.errors import UsageError
from conformance.judge.cause import Cause, Condition
from conformance.judge.verdict import FAILURES, Result, Verdict
from conformance.judge.wrong import KINDS, Wrong

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
CAUSES = st.builds(
    Cause,
    id=TEXT.filter(lambda t: bool(t.strip())), sentence=TEXT, backend=TEXT, verdict=st.sampled_from(sorted(FAILURES)),
    op=TEXT, message=TEXT, conditions=st.lists(st.builds(Condition, TEXT, TEXT), max_size=3).map(tuple),
    cases=st.lists(TEXT, min_size=1, max_size=3).map(tuple),
)  # fmt: skip


def _between(before: Sequence[Cause], after: Sequence[Cause]) -> Difference:
    return compare(Baseline("").renewed(before), after)


def _cause(name: str = "a1", backend: str = "npu") -> Cause:
    return Cause(
        name, f"MUL_MAT with src[0].type = {name} is wrong", backend, Verdict.FAIL, "MUL_MAT", "",
        (Condition("src[0].type", name), Condition("src[1].ne[2]", ">1")), (f"ops/MUL_MAT-{name}@1", "ops/X@2"),
    )  # fmt: skip


@given(st.lists(CAUSES, max_size=4, unique_by=lambda c: (c.id, c.backend)))
def test_what_is_written_is_read_back(causes: list[Cause]) -> None:
    """Whatever a cause holds, its entry comes back with each field, and nothing differs from it."""
    made = Baseline("b.toml").renewed(causes)
    back = parse(made.to_toml(), "b.toml")
    assert back == made
    assert [(e.cause.sentence, e.cause.conditions, e.reason, e.link) for e in back.entries] == [
        (c.sentence, c.conditions, "", "") for c in causes
    ]
    assert compare(back, causes).outcome().exit_code == 0


IDS = st.one_of(TEXT, st.from_regex(r"ops/[a-z]{1,3}@[0-9]", fullmatch=True))
SEEN = st.builds(
    Seen,
    st.sampled_from(sorted(KNOWABLE)),
    st.none() | st.builds(Wrong, st.sampled_from(KINDS), st.floats(0, 1e30).map(lambda x: float(f"{x:.2e}"))),
    st.lists(TEXT, max_size=2).map(tuple),
)
SELECTIONS = st.builds(
    Selection,
    st.sampled_from(["smoke", "full"]), st.none() | st.integers(0, 2**32), st.lists(TEXT, max_size=2).map(tuple),
    st.lists(TEXT, max_size=2).map(tuple), st.lists(TEXT, max_size=2).map(tuple), TEXT,
)  # fmt: skip
RUNS = st.builds(
    lambda backend, selection, cases: Ran(
        backend, selection, frozenset(c for c, s in cases.items() if s is None), {c: s for c, s in cases.items() if s}
    ),
    TEXT, st.none() | SELECTIONS, st.dictionaries(IDS, st.none() | SEEN, max_size=6),
)  # fmt: skip


@given(st.lists(RUNS, max_size=3, unique_by=lambda r: r.backend))
def test_what_the_cases_gave_is_read_back(runs: list[Ran]) -> None:
    """Whatever their ids are called; each is a line by itself, in the order of the ids."""
    made = Baseline("b.toml").renewed([], runs)
    lines = "".join(made.to_cases())
    assert parse(made.to_toml(), "b.toml", lines.encode()) == made
    assert len(lines.splitlines()) == len(runs) + sum(len(r.passed) + len(r.failed) for r in runs)
    assert lines.isascii()


def _written(tmp_path: Path) -> Path:
    """A baseline of one backend with a case that passes and one that fails."""
    path = tmp_path / "known.toml"
    results = [Result("ops/A@1", "npu", Verdict.PASS), Result("ops/X@2", "npu", Verdict.FAIL, cause="a")]
    write(path, [_cause("a")], "-o", ran(results, [_cause("a")], {}))
    return path


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"PASS"', '"FAIL"', r"line 2: a case with its verdict expected"),
        ('["ops/A@1", "PASS"]\n', "", r"known\.toml\.cases: does not belong to .*known\.toml; write both again"),
        ("ops/A@1", "ops/B@1", r"known\.toml\.cases: does not belong to "),
        ('["ops/A@1"', '["ops/X@2"', r"line 3: a case with its verdict expected"),
        ('{"backend": "npu"}', '{"backend": "cpu"}', r"run 1 backend: npu has no cases in "),
        ('{"backend": "npu"}', '{"backend": "npu"}\n{"backend": "npu"}', r"line 2: the cases of npu occur twice"),
        ('{"backend": "npu"}', '{"backend": "cpu"}\n{"backend": "npu"}', r"cpu has no \[\[run\]\] in "),
        ("null, null", '"numbers", -1', r"line 3: a case with its verdict expected"),
        ("null, null", '"numbers", NaN', r"known\.toml\.cases: line 3"),
        ('["ops/A@1"', "[" * 1000, r"known\.toml\.cases: line 2"),
    ],
)
def test_a_file_of_cases_that_somebody_changed_is_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    """One line names the file, the line, and what was expected: a case that is taken out would be coverage lost."""
    path = _written(tmp_path)
    beside = path.with_name("known.toml.cases")
    text = beside.read_text(encoding="utf-8")
    assert old in text
    beside.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(UsageError, match=says) as raised:
        read(path)
    assert len(str(raised.value).splitlines()) == 1


def test_both_files_belong_together(tmp_path: Path) -> None:
    """Without its cases a baseline is refused, and written again it keeps what people said."""
    path = _written(tmp_path)
    path.write_text(path.read_text(encoding="utf-8").replace('reason = ""', 'reason = "no kernel"'), encoding="utf-8")
    path.with_name("known.toml.cases").unlink()
    with pytest.raises(UsageError, match=r"known\.toml\.cases, which cannot be read; keep both files together"):
        read(path)
    _written(tmp_path)
    assert [e.reason for e in read(path).entries] == ["no kernel"]


def test_a_baseline_of_an_older_version_is_read_and_says_what_it_cannot_see(tmp_path: Path) -> None:
    """It has causes and no cases, and asks to be written again."""
    path = tmp_path / "known.toml"
    path.write_text(Baseline("").renewed([_cause("a")]).to_toml(), encoding="utf-8")
    old = read(path)
    assert compare(old, [_cause("a")], [Result("ops/new@1", "npu", Verdict.FAIL, cause="a")]).outcome().exit_code == 0
    (said,) = old.unseeing()
    assert said.endswith(f"write it again: conform triage RUN.json --write-baseline {path}")
    assert not read(_written(tmp_path)).unseeing()


def test_reason_and_link_stay_when_it_is_written_again(tmp_path: Path) -> None:
    """A second writing keeps the words of people, drops what is gone, and says what is still to fill in."""
    path = tmp_path / "known.toml"
    made = write(path, [_cause("a"), _cause("b")], "-o")
    assert made.unfilled() == [f"{path}: cause 1 (a) reason: fill it in", f"{path}: cause 2 (b) reason: fill it in"]
    text = path.read_text(encoding="utf-8").replace('reason = ""', 'reason = "no kernel"', 1)
    path.write_text(text.replace('link = ""', 'link = "https://x/7"', 1), encoding="utf-8")
    write(path, [_cause("c"), _cause("a")], "-o")
    again = read(path)
    assert [(e.cause.id, e.reason, e.link) for e in again.entries] == [("c", "", ""), ("a", "no kernel", "https://x/7")]
    assert again.unfilled() == [f"{path}: cause 1 (c) reason: fill it in"]


def test_no_other_file_is_overwritten(tmp_path: Path) -> None:
    """A file that is no baseline stays, and so does the place of one that cannot be written."""
    path = tmp_path / "waivers.toml"
    path.write_text("[[waiver]]\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"waivers\.toml waiver: is unknown; known: run, cause"):
        write(path, [_cause()], "-o")
    assert path.read_text(encoding="utf-8") == "[[waiver]]\n"
    with pytest.raises(UsageError, match=r"-o .*cannot be written"):
        write(tmp_path / "no" / "known.toml", [_cause()], "-o")


def test_a_new_cause_and_one_that_is_gone_are_named() -> None:
    """Both fail the run and are told, new ones first; what an entry is found by is id and backend, whatever is said."""
    known = Baseline("b.toml").renewed([_cause("a"), _cause("b"), _cause("c", "ggml")])
    told = replace(known.entries[1], reason="no kernel")
    baseline = replace(known, entries=(known.entries[0], told, known.entries[2]))
    found = compare(baseline, [_cause("d"), replace(_cause("a"), sentence="said otherwise"), _cause("c")])
    assert [c.id for c in found.new] == ["d", "c"]
    assert [e.key for e in found.gone] == [("b", "npu"), ("c", "ggml")]
    assert [c.sentence for c in found.known] == ["said otherwise"]
    assert found.outcome().exit_code == 1
    assert found.outcome().lines() == [
        "new: d on npu, FAIL: MUL_MAT with src[0].type = d is wrong (smallest case of 2: ops/MUL_MAT-d@1)",
        "new: c on npu, FAIL: MUL_MAT with src[0].type = c is wrong (smallest case of 2: ops/MUL_MAT-c@1)",
        "gone: b on npu, FAIL: MUL_MAT with src[0].type = b is wrong (no kernel)",
        "gone: c on ggml, FAIL: MUL_MAT with src[0].type = c is wrong",
    ]


@pytest.mark.parametrize(("causes", "code"), [("ab", 0), ("ba", 0), ("a", 1), ("abc", 1), ("", 1)])
def test_the_exit_code(causes: str, code: int) -> None:
    """0 where no cause is new and none is gone, 1 otherwise."""
    baseline = Baseline("b.toml").renewed([_cause("a"), _cause("b")])
    assert compare(baseline, [_cause(c) for c in causes]).outcome().exit_code == code


def test_entries_of_a_backend_that_did_not_run_are_not_gone() -> None:
    """A run on one backend says nothing of the others; one without any result lacks them all."""
    baseline = Baseline("b.toml").renewed([_cause("a"), _cause("b", "ggml")])
    results = [Result("ops/X@2", "npu", Verdict.FAIL, cause="a")]
    assert compare(baseline, [_cause("a")], results).outcome().exit_code == 0
    passes = [Result("ops/X@2", "npu", Verdict.PASS)]
    assert [e.cause.id for e in compare(baseline, [], passes).gone] == ["a"]
    assert [e.cause.id for e in compare(baseline, []).gone] == ["a", "b"]


def test_two_runs_differ_by_their_causes() -> None:
    """What the later run has and the earlier not, and the other way round; equal runs differ by nothing."""
    before, after = [_cause("a"), _cause("b")], [_cause("b"), _cause("c")]
    found = _between(before, after)
    gone = [e.cause for e in found.gone]
    assert [[c.id for c in of] for of in (found.new, gone, found.known)] == [["c"], ["a"], ["b"]]
    assert found.outcome().exit_code == 1
    assert (_between(before, before).outcome().lines(), _between(before, before).outcome().exit_code) == ([], 0)


def test_a_hostile_text_forges_no_line() -> None:
    """Line breaks and escapes of a cause are shown by their numbers."""
    found = _between([], [replace(_cause(), sentence="x\nnew: nothing\x1b[2J\u202e")])
    (line,) = found.outcome().lines()
    assert line.isprintable()
    assert r"x\x0anew: nothing\x1b[2J\u202e" in line


ENTRY = Baseline("b.toml").renewed([_cause()]).to_toml()


def _with(old: str, new: str) -> Callable[[], str]:
    assert old in ENTRY
    return lambda: ENTRY.replace(old, new)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (lambda: "cause = 5", r"b\.toml: \[\[cause\]\] tables expected, 5 found"),
        (lambda: "cause = [5]", r"b\.toml: \[\[cause\]\] tables expected"),
        (lambda: "x = 1", r"b\.toml x: is unknown; known: run, cause"),
        (lambda: "[[cause]", r"b\.toml: "),
        (lambda: ENTRY + ENTRY, r"b\.toml: cause 2 id: another than that of cause 1 expected, 'a1' found"),
        (lambda: ENTRY + "expiry = 1", r"b\.toml: cause 1 expiry: is unknown; known: id, sentence, backend, verdict,"),
        (_with('id = "a1"', 'id = " "'), r"b\.toml: cause 1 id: a text that is not empty expected, ' ' found"),
        (_with('id = "a1"\n', ""), r"b\.toml: cause 1 id: a text expected, nothing found"),
        (_with('"FAIL"', '"PASS"'), r"b\.toml: cause 1 verdict: one of FAIL, .* expected, 'PASS' found"),
        (_with('reason = ""', "reason = 3"), r"b\.toml: cause 1 reason: a text expected, 3 found"),
        (_with('reason = ""\n', ""), r"b\.toml: cause 1 reason: a text expected, nothing found"),
        (_with('link = ""', 'link = "javascript:x"'), r"b\.toml: cause 1 link: an http\(s\) address, or an empty text"),
        (_with('[["src[0].type"', '[["x"], ["y"'), r"b\.toml: cause 1 conditions: a list of pairs of texts expected"),
        (_with('"a1"], [', "3], ["), r"b\.toml: cause 1 conditions: a list of pairs of texts expected"),
    ],
)
def test_one_error_names_entry_and_key(text: Callable[[], str], says: str) -> None:
    """A wrong entry is one line that names the file, the entry, the key, what was expected and what came."""
    with pytest.raises(UsageError, match=says) as raised:
        parse(text(), "b.toml")
    assert len(str(raised.value).splitlines()) == 1


def test_an_entry_may_stand_by_itself() -> None:
    """`Known.of` takes a cause as it is, and what was said of it."""
    said = replace(Known.of(_cause()), reason="r", link="https://x")
    assert Known.of(_cause(), said) == said


def _of(verdict: Verdict, message: str, *conditions: tuple[str, str]) -> Cause:
    """A cause whose id says nothing."""
    name = sha256(repr((verdict, message, conditions)).encode()).hexdigest()
    return Cause(name, "", "npu", verdict, "", message, tuple(Condition(*c) for c in conditions), ("a",))


WRONG, ERROR = partial(_of, Verdict.FAIL, ""), partial(_of, Verdict.OVERCLAIM, "no such kernel")
MUL_MAT, ADD, BOTH = ("op", "MUL_MAT"), ("op", "ADD"), ("op", "ADD|MUL_MAT")
ANY_TYPE = ("any source.type", "q4_K|q5_K")
TYPED, DEAD, DIED = ("src[0].type", "f16"), partial(_of, Verdict.CRASH), "its process died ({})".format


@pytest.mark.parametrize(
    ("before", "after", "one"),
    [
        pytest.param(ERROR(MUL_MAT, ("src[0].type", "q4_K")), ERROR(MUL_MAT), True, id="an error of an op"),
        pytest.param(ERROR(), ERROR(("a node reads", "a part of a cache")), True, id="an error of a graph"),
        pytest.param(ERROR(), ERROR(MUL_MAT), True, id="an error whose node was found"),
        pytest.param(ERROR(ADD), ERROR(MUL_MAT), False, id="an error of two ops"),
        pytest.param(ERROR(ADD), _of(Verdict.OVERCLAIM, "other words", ADD), False, id="two errors of an op"),
        pytest.param(
            WRONG(MUL_MAT, ("src[0].type", "q4_K")), WRONG(BOTH, ("any source.type", "q4_K|q5_K")), True, id="a type"
        ),
        pytest.param(WRONG(ADD, ("src[0].type", "q4_K")), WRONG(ADD, ("src[0].type", "f16")), False, id="two types"),
        pytest.param(
            WRONG(ADD, ("src[0].layout", "permuted"), ("src[0].ne[1]", "> 2")),
            WRONG(ADD, ("src[0].layout", "permuted"), ("another node", "yes")),
            True,
            id="sizes and another node",
        ),
        pytest.param(WRONG(ADD, ("src[0].ne[0]", "> 31")), WRONG(ADD, ("src[0].ne[0]", "> 255")), False, id="sizes"),
        pytest.param(WRONG(ADD, ("scale", "!= 1.0")), WRONG(ADD), False, id="wrong numbers with less to go by"),
        pytest.param(WRONG(), WRONG(("steps", "> 1")), False, id="wrong numbers of a graph"),
        pytest.param(DEAD(DIED("SIGSEGV"), ADD, TYPED), DEAD(DIED("SIGABRT"), ADD, TYPED), True, id="two signals"),
        pytest.param(DEAD(DIED("SIGSEGV"), ADD, TYPED), WRONG(ADD, TYPED), False, id="damage and wrong numbers"),
        pytest.param(WRONG(ADD), _of(Verdict.CRASH, "its process died (SIGSEGV)", ADD), False, id="verdicts"),
    ],
)
def test_a_cause_that_ended_otherwise_is_the_same(before: Cause, after: Cause, *, one: bool) -> None:
    """An error by words and op, wrong numbers by what they say beside sizes; both ways, and words of people stay."""
    for a, b in ((before, after), (after, before)):
        baseline = Baseline("b.toml", (Known.of(a, replace(Known.of(a), reason="no kernel")),))
        found = compare(baseline, [b])
        assert (found.outcome().exit_code == 0, bool(found.known), not found.new, not found.gone) == (one,) * 4
        assert [e.reason for e in baseline.renewed([b]).entries] == ["no kernel" if one else ""]


def test_of_causes_that_are_alike_each_is_one_other() -> None:
    """The likest first, and what has its own id is nobody else's: so a second cause like a known one is new."""
    typed = partial(WRONG, ADD)
    known = [typed(("src[0].type", "q4_K|q5_K")), typed(("src[0].type", "f16|bf16"))]
    found = [typed(("src[0].type", "bf16")), typed(("src[0].type", "q4_K|q6_K")), typed(("src[0].type", "q5_K"))]
    is_one = same(known, found)
    assert {found.index(c) for c in found if (c.id, c.backend) in is_one} == {0, 2}
    assert len(set(is_one.values())) == 2
    twin = same([known[0]], [known[0], found[2]])
    assert twin == {(known[0].id, "npu"): (known[0].id, "npu")}


def test_causes_with_one_id_get_unique_ids() -> None:
    """The one with most cases keeps it, whatever the order; the others have ids of their conditions."""
    many = replace(_cause("a"), cases=("1", "2", "3"))
    few = [replace(_cause("b"), id="a"), replace(_cause("c"), id="a")]
    ids = {c.conditions: c.id for c in unique_ids([*few, many])}
    assert ids[many.conditions] == "a"
    assert len(set(ids.values())) == 3
    assert ids == {c.conditions: c.id for c in unique_ids([many, *reversed(few)])}
