"""Mutants of C++ sources: where they can be, what they change, and how a score is kept and shown."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from conformance.backend.registry import Spec
from conformance.judge.verdict import Result, Verdict
from trust.__main__ import main
from trust.kernels import sanitize, theirs
from trust.kernels.ours import Reach, _in_turn
from trust.kernels.page import page
from trust.kernels.places import KINDS, edits
from trust.kernels.score import SUITES, Answer, Score, Scores, Suite, sample
from trust.kernels.theirs import Clean, Theirs
from trust.kernels.tree import AREAS, HERE, SOURCES, Mutant, Tree, _switched, draw

SOURCE = """
#include <stdio.h>
#define TWICE(x) ((x) + (x))
static const int table[2] = {1, 2};
template <int N> static int fixed() { static_assert(N > 0, "size"); return N + 1; }
int sum(const int * x, int ne0, int ne1, int nb1) {
    int total = 0;
    for (int i1 = 0; i1 < ne1; i1++) {
        for (int i0 = 0; i0 < ne0; i0++) {
            total += x[i1*nb1 + i0];
        }
    }
    if (total > 100 && ne0 != 0) {
        total = -1; // too
    }
    switch (ne0) { case 3: total = total / 2; break; default: break; }
    return ne1 > 1 ? total : 0;
}
int main() {
    int x[64];
    for (int i = 0; i < 64; i++) { x[i] = i + 1; }
    printf("%d %d %d", sum(x, 2, 3, 4), sum(x, 3, 2, 8), fixed<2>());
    return 0;
}
"""


def _mutants() -> list[Mutant]:
    found = edits(SOURCE.encode(), lambda line: line != 3)
    return [Mutant(i, "ops", "ops.cpp", e) for i, e in enumerate(found, 1)]


def test_every_kind_has_a_place() -> None:
    """And nothing constant is one: no array bound, template argument, case label, macro or table."""
    mutants = _mutants()
    assert {m.edit.kind for m in mutants} == set(KINDS)
    lines = SOURCE.splitlines()
    assert all(SOURCE.encode()[m.edit.start : m.edit.end].decode() == m.edit.old for m in mutants)
    touched = {(lines[m.edit.line - 1].strip(), m.edit.old) for m in mutants}
    assert not [t for t in touched if t[0].startswith(("#", "static const", "int x[64]")) or t[1] == "3"]
    assert not [t for t in touched if "static_assert" in t[0] and t[1] == "N > 0"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_mutant_changes_what_its_edit_says(tmp_path: Path) -> None:
    """Each with its number active gives what its edit in the plain source gives, and none what the source gives."""
    chosen: list[Mutant] = []
    for m in _mutants():
        if all(m.edit.end <= c.edit.start or c.edit.end <= m.edit.start for c in chosen):
            chosen.append(m)
    source = SOURCE.encode()
    for m in reversed(chosen):
        source = source[: m.edit.start] + _switched(m).encode() + source[m.edit.end :]
    assert len(source.splitlines()) == len(SOURCE.encode().splitlines())
    (tmp_path / "a.cpp").write_bytes(source)
    built = [
        "g++",
        "-include",
        os.fspath(HERE / "mutant.h"),
        "a.cpp",
        "-x",
        "c",
        os.fspath(HERE / "mutant.c"),
        "-o",
        "a",
    ]
    subprocess.run(built, cwd=tmp_path, check=True)
    assert _ran(tmp_path, 0) == "33 18 3"
    changed = {m.number: _ran(tmp_path, m.number) for m in chosen}
    seen = tmp_path / "seen"
    seen.write_bytes(bytes(len(_mutants()) + 1))
    _ran(tmp_path, 0, MUTANT_SEEN=os.fspath(seen))
    reached = {n for n, byte in enumerate(seen.read_bytes()) if byte}
    assert reached <= {m.number for m in chosen}
    assert {n for n, text in changed.items() if text != "33 18 3"} <= reached
    for m in chosen[:8]:
        new = m.edit.new or ";"
        (tmp_path / "b.cpp").write_bytes(SOURCE.encode()[: m.edit.start] + new.encode() + SOURCE.encode()[m.edit.end :])
        subprocess.run(["g++", "b.cpp", "-o", "b"], cwd=tmp_path, check=True)
        assert (
            subprocess.run(["./b"], cwd=tmp_path, capture_output=True, text=True, check=False).stdout
            == changed[m.number]
        )


def _ran(folder: Path, number: int, **env: str) -> str:
    words = {**os.environ, "MUTANT": str(number), **env}
    return subprocess.run(
        ["./a"], cwd=folder, env=words, capture_output=True, text=True, check=False, timeout=60
    ).stdout


def test_a_draw_repeats_and_has_no_overlap(tmp_path: Path) -> None:
    """The same seed draws the same mutants, as many of each area as asked, and no two of one text."""
    folder = tmp_path / SOURCES / "ggml-cpu"
    folder.mkdir(parents=True)
    (folder / "ops.cpp").write_text(SOURCE)
    lines = {"ggml-cpu/ops.cpp": frozenset(range(1, 40))}
    first, again, other = (draw(tmp_path, lines, 9, seed, ["ops"]) for seed in (1, 1, 2))
    assert first == again != other
    assert len(first) == 9
    ends = [(m.edit.start, m.edit.end) for m in first]
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
    assert draw(tmp_path, {}, 9, 1, ["ops"]) == [], "no line is compiled"


def _tree(folder: Path) -> Tree:
    tree = Tree(folder, _mutants()[:6], 2, 7)
    tree.write()
    return tree


def test_a_tree_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Every mutant, its edit, the seed and how many did not compile."""
    assert Tree.read(_tree(tmp_path).folder) == Tree(tmp_path, _mutants()[:6], 2, 7)


FAKE = r"""#!/bin/sh
if [ "$1" = --list-ops ]; then printf '  ADD\n  MUL\n'; exit 0; fi
echo "Backend 1/1: MUTANT"
for op in $(echo "${4:-ADD,MUL}" | tr , ' '); do
case "$op $MUTANT" in
  "ADD 1") kill -9 $$ ;;
  "MUL 2") printf '[MUL] NMSE = 0.5 > 0.1   MUL(type=f32): \033[1;31mFAIL\033[0m\n'; sleep 60 ;;
  "MUL 3") sleep 60 ;;
  "MUL 4") printf '  MUL(type=f32,x=(1)): \033[1;31mFAIL\033[0m\n'; sleep 60 ;;
esac
[ "$op" = ADD ] && printf '  ADD(type=f16): \033[1;31mFAIL\033[0m\n'
printf "  $op(type=f32,x=(1)): \033[1;32mOK\033[0m\n  $op(type=q4): not supported [MUTANT]\n"
done
"""


def _theirs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Theirs:
    tree = _tree(folder)
    tree.test_backend_ops.parent.mkdir()
    tree.test_backend_ops.write_text(FAKE)
    tree.test_backend_ops.chmod(0o755)
    monkeypatch.setattr(theirs, "_SLACK", 2.0)
    monkeypatch.setattr(theirs, "PATIENCE", 2.0)
    return Theirs(tree)


def test_their_verdicts_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new failure, a death and a hang notice a mutant; a case that fails without one does not, nor does the rest."""
    ours = _theirs(tmp_path, monkeypatch)
    clean = ours.reach(tmp_path / "reach.jsonl")
    assert [(c.op, c.ran, c.failing, c.died) for c in clean.values()] == [
        ("ADD", 1, ["ADD(type=f16)"], False),
        ("MUL", 1, [], False),
    ]
    assert ours.reach(tmp_path / "reach.jsonl") == clean
    both = {op: Clean(op, 0.0, c.ran, c.failing, died=False, seen=[1, 2, 3, 4]) for op, c in clean.items()}
    mutants = {m.number: m for m in _mutants()}
    assert ours.hunt(mutants[1], both, 60) == ("ADD: SIGKILL", 1)
    assert ours.hunt(mutants[2], both, 60) == ("MUL(type=f32)", 2)
    assert ours.hunt(mutants[3], both, 60) == ("MUL: hang", 2)
    assert ours.hunt(mutants[4], both, 60) == ("MUL(type=f32,x=(1))", 2)
    assert ours.hunt(mutants[5], both, 60) == ("", 0)


def test_a_run_of_theirs_notices_at_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds are those of the clean run until the case that fails or kills; a failure beyond that run is none."""
    ours = _theirs(tmp_path, monkeypatch)
    clean = ours.timeline(tmp_path / "timeline.jsonl", 300.0)
    assert [t.name for t in clean] == [
        "ADD(type=f16)", "ADD(type=f32,x=(1))", "ADD(type=q4)", "MUL(type=f32,x=(1))", "MUL(type=q4)",
    ]  # fmt: skip
    assert ours.timeline(tmp_path / "timeline.jsonl", 300.0) == clean
    line = [replace(told, seconds=float(k)) for k, told in enumerate(clean)]
    mutants = {m.number: m for m in _mutants()}
    assert ours.first(mutants[1], ["ADD"], line) == 0.0, "it dies in the first case"
    assert ours.first(mutants[2], ["MUL"], line) is None, "the failing case is none of the clean run"
    assert ours.first(mutants[3], ["MUL"], line) is None, "patience ends"
    assert ours.first(mutants[4], ["ADD", "MUL"], line) == 3.0
    assert ours.first(mutants[5], ["ADD"], line) is None
    assert ours.first(mutants[4], ["SUB"], line) is None


def test_a_journal_goes_on_and_the_page_counts(tmp_path: Path) -> None:
    """A line that a kill left half is judged again; rates count the undetermined as missed."""
    tree = _tree(tmp_path)
    scores = Scores(tree)
    ours = [
        Answer(1, "ours", 3, "FAIL ops/ADD-f32@1", "smoke", 1, 2.0),
        Answer(2, "ours", 3, "FAIL ops/ADD-f32@1", "standard", 1, 2.0),
        Answer(3, "ours", 3),
        Answer(4, "ours", 3, differs="ops/ADD-f32@1"),
        Answer(5, "ours", 3),
        Answer(6, "ours", 0),
    ]
    found = ["ADD(type=f32)", "", "ADD(type=f32)", "", "", ""]
    theirs = [Answer(n, "theirs", int(n < 6), by) for n, by in enumerate(found, 1)]
    judged: list[int] = []

    def judge(m: Mutant, suite: Suite) -> Answer:
        judged.append(m.number)
        return {"ours": ours, "theirs": theirs}[suite][m.number - 1]

    scores.judge = judge  # type: ignore[method-assign]  # no library is built here
    scores.run(tree.mutants[:4], ["ours"], print)
    path = tmp_path / "ours.jsonl"
    path.write_text(path.read_text()[:-9])
    assert scores.read() == {}, "the other suite has judged nothing"
    scores.run(tree.mutants, SUITES, print)
    assert judged == [1, 2, 3, 4, 4, 5, 6, *range(1, 7)]
    assert list(scores.read().values()) == [Score(a, b) for a, b in zip(ours, theirs, strict=True)]
    statuses = [s.status for s in scores.read().values()]
    assert statuses == ["noticed", "noticed", "noticed", "survived", "undetermined", "not reached"]
    shown = page([(tree, scores.read())])
    name = tmp_path.name
    assert f"6 mutants judged ({name}: seed 7); 2 more did not compile. 5 are reached, 4 of them determined" in shown
    (total,) = [line for line in shown.splitlines() if line.startswith("| all")][:1]
    assert [c.strip() for c in total.split("|")[2:-1]] == ["6", "5", "1", "2", "2", "1", "1", "1", "2"]
    assert f"### {name} 4." in shown
    assert f"### {name} 6." not in shown
    both = page([(tree, scores.read())] * 2)
    assert "12 mutants judged" in both
    assert both.count(f"### {name} 4.") == 2


def test_a_sample_is_drawn_by_its_seed() -> None:
    """The first of an order, so that a larger sample holds a smaller one."""
    mutants = _mutants()
    assert sample(mutants, 5, 3) == sample(mutants, 9, 3)[:5]
    assert {len(sample(mutants, 5, s)) for s in range(3)} == {5}
    assert np.unique([m.number for m in sample(mutants, len(mutants), 1)]).size == len(mutants)


def test_refused_cases_run_after_those_that_pass() -> None:
    """A mutant may claim what the device cannot compute; the cheap refusals of a level delay none of its results."""
    add, mul, refused, late = (
        Reach("ops/ADD-f32@1", "", "smoke", 0.2, True, [1]),
        Reach("ops/MUL-f32@1", "", "smoke", 0.1, True, [1]),
        Reach("ops/ADD-q8_0@1", "", "smoke", 0.0, False, [1], refused=True),
        Reach("ops/ADD-f16@1", "", "standard", 0.0, True, [1]),
    )
    assert _in_turn([late, refused, add, mul]) == [mul, add, refused, late]


def test_areas_name_files_of_ggml() -> None:
    """Each has a pattern; none stands twice."""
    patterns = [p for area in AREAS.values() for p in area]
    assert len(patterns) == len(set(patterns))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["page", "{}"], "a folder of `kernels build` expected"),
        (["build", "{}/a.txt", "{}/out"], "a source package of llama-cpp-python expected"),
        (["repeat", "{}/tree", "9"], "mutant 9 is unknown; known: 1 to 6"),
    ],
)
def test_wrong_input_is_one_line(tmp_path: Path, words: list[str], says: str) -> None:
    """It says what was expected, with exit code 2."""
    (tmp_path / "a.txt").write_text("no archive")
    (tmp_path / "tree").mkdir()
    _tree(tmp_path / "tree")
    done = CliRunner().invoke(main, ["kernels", *(w.format(tmp_path) for w in words)])
    assert (done.exit_code, says in done.output) == (2, True), done.output
    assert "Traceback" not in done.output


def test_each_report_of_a_sanitizer_comes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the addresses; what opening the backend reports, also after a death, is left out."""
    log = tmp_path / "logs" / "log.1"
    texts = {
        "a": "SUMMARY: AddressSanitizer: overflow at 0x12 x.c:3",
        "b": "SUMMARY: AddressSanitizer: overflow at 0x99 x.c:3",
    }

    class Fake:
        opened = 0

        def __init__(self, **_: object) -> None: ...

        def backend(self, _: Spec) -> None:
            Fake.opened += 1
            log.write_text("SUMMARY: AddressSanitizer: in opening")

        def case(self, case_id: str) -> str:
            return case_id

        def run(self, _: Spec, cases: list[str]) -> list[Result]:
            log.write_text(texts.get(cases[0], ""))
            return [Result(cases[0], "ggml", Verdict.CRASH if cases[0] == "b" else Verdict.PASS)]

        def restart(self) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr(sanitize, "Runner", Fake)
    monkeypatch.setattr(sanitize, "_runtime", lambda name: name)
    found = list(sanitize.reports(tmp_path / "libmutant.so", "address", ["a", "b", "c"]))
    assert [(r.case, r.summary.partition(":")[0]) for r in found] == [("a", "SUMMARY"), ("b", "CRASH")]
    assert Fake.opened == 2
