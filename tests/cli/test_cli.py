"""The command line: what it prints, its exit codes, and that bad input is one line."""

from __future__ import annotations

import io
import json
import re
import shlex
import time
from collections.abc import Sequence
from math import inf
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result
from gguf import GGUFWriter

from conformance.backend.registry import Spec
from conformance.builds.archive import cache
from conformance.case import casefile
from conformance.case.case import Case
from conformance.cli import main
from conformance.ggml.errors import ConformanceError
from conformance.ggml.text import shell
from conformance.judge.verdict import Result as Record
from conformance.judge.verdict import Verdict
from conformance.report.progress import Progress, Steps
from conformance.report.runs import budget_used
from conformance.run.runner import Runner
from conformance.run.session.select import build, case_ids
from conformance.suite import FAMILIES

CASE = FAMILIES["ops"].ids("smoke")[0]


def _conform(*args: str) -> Result:
    return CliRunner().invoke(main, list(args), catch_exceptions=False)


def _one_line(result: Result) -> str:
    assert result.exit_code == 2
    lines = result.output.strip().splitlines()
    assert "Traceback" not in result.output
    return lines[-1]


def test_run_writes_the_whole_record(tmp_path: Path) -> None:
    """`--json` holds schema, environment, one result per case and backend with every field, and totals."""
    out = tmp_path / "r.json"
    result = _conform("run", "--case", CASE, "--backend", "cpu", "--backend", "ggml", "--json", str(out))
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    always = {"schema", "kind", "run", "written", "environment", "results", "totals", "asked", "missing"}
    assert set(document) == {*always, "gating", "selection"}
    assert document["schema"] == 1
    fields = {"case", "backend", "verdict", "budget_used", "nmse", "seconds", "steps", "witness", "where"}
    assert all(fields | {"error", "notes", "saved", "detail"} <= set(r) for r in document["results"])
    assert [(r["case"], r["backend"], r["verdict"]) for r in document["results"]] == [
        (CASE, "cpu", "PASS"),
        (CASE, "ggml", "PASS"),
    ]
    assert document["totals"]["PASS"] == document["totals"]["executed"] == 2


def test_a_case_file_runs_and_reproduces(tmp_path: Path) -> None:
    """A case saved to a file runs by `run FILE` and by `repro FILE`, and says so."""
    path = tmp_path / "c.gguf"
    casefile.write(path, [build(CASE)])
    for command in ("run", "repro"):
        result = _conform(command, str(path), "--backend", "ggml")
        assert result.exit_code == 0, result.output
        assert "1 PASS" in result.output


WRONG = "ops/GET_ROWS-f32+i32-a=33x7,n=12,va=p1023@1"
"""A case that ggml's CPU gets wrong."""


@pytest.mark.parametrize("command", ["repro", "run", "shrink"])
def test_an_id_in_place_of_a_file_is_recognised(command: str) -> None:
    """The command that runs it is named; what is no id is only absent."""
    more = ["-o", "small.gguf"] if command == "shrink" else []
    done = _conform(command, CASE, *more)
    assert done.exit_code == 2
    assert (
        f"this is the id of a case: `{shell(['conform', 'run', '--backend', 'NAME', '--case', CASE])}`" in done.output
    )
    assert "does not exist" in _conform(command, "ops/nothing@1", *more).output


def test_a_failure_says_how_to_run_it_again(tmp_path: Path) -> None:
    """By its id; by its file if one was saved; not at all with -q; and the command gives the same failure."""
    kept = ("--save-failures", str(tmp_path / "kept"))
    again = shell(["conform", "run", "--case", WRONG, "--backend", "ggml"])
    first = _conform("run", "--backend", "ggml", "--case", WRONG)
    assert f"  reproduce: {again}\n" in first.output
    assert _conform(*shlex.split(again)[1:]).output.splitlines()[0] == first.output.splitlines()[0]
    assert "reproduce" not in _conform("run", "--backend", "ggml", "--case", WRONG, "-q").output
    assert f"reproduce: conform repro {tmp_path}" in _conform("run", "--backend", "ggml", "--case", WRONG, *kept).output


def test_a_run_leaves_no_empty_folder(tmp_path: Path) -> None:
    """Copies of the cases of a file are removed after the run, and so is their folder."""
    path, kept = tmp_path / "c.gguf", tmp_path / "kept"
    casefile.write(path, [build(WRONG)])
    assert _conform("run", str(path), "--backend", "ggml", "--save-failures", str(kept)).exit_code == 1
    assert [p.suffix for p in kept.rglob("*")] == [".gguf"]


def test_repro_has_one_default_backend() -> None:
    """Its help says so once."""
    text = " ".join(_conform("repro", "--help").output.split())
    assert "Backend, repeatable; default: the one for which each case was saved." in text
    assert text.count("the one for which each case was saved") == 1


def test_show_prints_and_draws(tmp_path: Path) -> None:
    """`show` prints the graph as a table, from an id or a file, and draws it."""
    svg = tmp_path / "g.svg"
    result = _conform("show", CASE, "-o", str(svg))
    assert result.exit_code == 0
    assert CASE in result.output
    assert svg.read_text().startswith("<svg")


def test_cases_lists_ids() -> None:
    """`cases` prints ids and nothing else, so that a shell can use them."""
    result = _conform("list", "cases", "--family", "ops", "--level", "smoke")
    assert result.output.split() == list(FAMILIES["ops"].ids("smoke"))


def test_backends_lists_all_with_versions(tmp_path: Path) -> None:
    """Every installed backend stands in the table; ggml's own version is in it."""
    out = tmp_path / "b.json"
    result = _conform("list", "backends", "--json", str(out))
    assert result.exit_code == 0
    document = json.loads(out.read_text())["backends"]
    assert [n for n, about in document.items() if not about["default"]] == ["xdna2"]
    assert {"cpu", "ggml", "npu", "openvino-stateful", "openvino-stateless"} <= set(document)
    assert document["ggml"]["versions"]["ggml"] in result.output


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("run", "--backend", "nope"), "backend 'nope' is not installed"),
        (("run", "--backend", "ggml?lib=/nowhere.so", "--case", CASE), "/nowhere.so"),
        (("run", "--backend", "ggml?device=NOPE", "--case", CASE), "NOPE"),
        (("run", "--backend", "ggml?colour=red"), "option 'colour' is unknown"),
        (("run", "--backend", "ggml?x"), "key=value"),
        (("run", "--family", "nope"), "family 'nope' is unknown"),
        (("run", "--case", "ops/NOPE*"), "no case of level smoke matches"),
        (
            ("run", "--case", "ops/SCALE-f32-ne=4096x9*"),
            "no case of level smoke matches 'ops/SCALE-f32-ne=4096x9*'; --level full has 1",
        ),
        (("run", "--case", "ops/NOPE-f32@0"), "ops"),
        (("show", "nope.gguf"), "no such file"),
        (("show", "nope"), "nope: no such file, and not a case id"),
        (("show", CASE, "--step", "7"), "has steps 0 to 0"),
        (("run", "--level", "huge"), "huge"),
        (("run", "--json", "/no/such/folder/r.json", "--case", CASE), "a file in an existing"),
    ],
)
def test_wrong_words_are_one_line(args: tuple[str, ...], says: str) -> None:
    """Wrong usage exits with 2 and one line that says what was expected."""
    assert says in _one_line(_conform(*args))


def test_a_file_that_is_no_case_is_one_line(tmp_path: Path) -> None:
    """A file of another kind exits with 2 and names the field that is wrong."""
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    for command in ("run", "repro", "show"):
        _one_line(_conform(command, str(path)))
    capture = tmp_path / "x.json"
    capture.write_text("[1, 2")
    _one_line(_conform("capture", str(capture), "-o", str(tmp_path / "y.gguf")))
    assert not (tmp_path / "y.gguf").exists()


def test_nothing_executed_is_exit_3() -> None:
    """A run in which every case is refused exits with 3: not one number was checked."""
    refused = next(i for i in FAMILIES["ops"].ids("smoke") if i.startswith("ops/SET_ROWS-q2_K"))
    result = _conform("run", "--case", refused, "--backend", "openvino-stateless")
    assert result.exit_code == 3, result.output
    assert "1 UNSUPPORTED" in result.output


def test_a_bundle_of_nothing_is_one_line(tmp_path: Path) -> None:
    """An empty bundle cannot be written by accident and run as a success."""
    path = tmp_path / "empty.gguf"
    with pytest.raises(ConformanceError):
        casefile.write(path, [])


def test_a_model_is_told_from_a_case(tmp_path: Path) -> None:
    """A model file, a text and a folder in place of a case are one line each that says what they are."""
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    for k in range(9):
        writer.add_uint32(f"llama.key_{k}", k)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    (tmp_path / "notes.gguf").write_text("no case at all")
    for name, says in (
        ("model.gguf", "this is a model (llama, 10 keys), not a case: `conform check-model"),
        ("notes.gguf", "this is a text file, not a case"),
    ):
        for command in ("run", "repro", "shrink", "show"):
            assert says in _one_line(_conform(command, str(tmp_path / name)))
    for command in ("run", "repro", "shrink", "show"):
        assert "this is a folder; name a file in it:" in _one_line(_conform(command, str(tmp_path)))


def test_a_line_for_each_result_and_reasons_counted() -> None:
    """-v names each result and why it is UNSUPPORTED, with reasons counted; -q has one line for each backend."""
    words = ("run", "--backend", "ggml", "--backend", "xdna2", "--case", CASE)
    said = _conform(*words, "-v").output
    assert f"PASS {CASE} on ggml" in said
    assert f"UNSUPPORTED {CASE} on xdna2: " in said
    assert "1 case unsupported by xdna2, by reason:" in said
    stored = (
        "run",
        "--backend",
        "ggml",
        "--backend",
        "xdna2",
        "--case",
        "ops/ARANGE-f32-start=-3.0,stop=20.0,step=0.1@16",
    )
    counted = ["ggml: 1 PASS; golden: 1 compared", "xdna2: 1 UNSUPPORTED"]
    assert _conform(*stored, "-q").output.splitlines()[:2] == counted


@pytest.mark.parametrize(
    ("variables", "colours"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"NO_COLOR": "1"}, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_colour_is_asked_for(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], colours: bool) -> None:
    """Verdicts have a colour on a terminal, or where FORCE_COLOR asks for it; NO_COLOR is stronger."""
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(main, ["run", "--backend", "ggml", "--case", CASE, "-v"])
    assert ("\x1b[32m" in done.output) is colours


def test_help_says_whole_sentences() -> None:
    """The list of commands cuts none of them short."""
    assert "..." not in _conform("--help").output.replace("[ARGS]...", "")


@pytest.mark.parametrize(
    ("words", "begun", "gives"),
    [
        (["run", "--backend"], "open", ["openvino-stateful", "openvino-stateless"]),
        (["run", "--family"], "kv", ["kv_growth"]),
        (["run", "--case"], "kv", ["kv_growth/"]),
        (["show"], CASE[:-1], [CASE]),
    ],
)
def test_a_shell_completes_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], begun: str, gives: list[str]
) -> None:
    """Backends, families and cases, without reading what lies in the working directory."""
    (tmp_path / "conformance.toml").write_text("not TOML at all [")
    monkeypatch.chdir(tmp_path)
    found = [item.value for item in ShellComplete(main, {}, "conform", "_C").get_completions(words, begun)]
    assert set(gives) <= set(found)


def test_a_shell_completes_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were downloaded before, by the names by which they were; then files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for folder in ("pypi/a==1.0", "pypi/b==2.0", "npm/@a+b@3.0"):
        (cache() / folder).mkdir(parents=True)
    for words in (["list", "builds"], ["build", "test"], ["build", "test", "x", "--against"]):
        complete = ShellComplete(main, {}, "conform", "_C").get_completions
        assert [(i.value, i.type) for i in complete(words, "pypi:a")] == [("pypi:a==1.0", "plain"), ("pypi:a", "file")]
        assert "npm:@a/b@3.0" in [i.value for i in complete(words, "npm:")]


@pytest.mark.parametrize(
    ("used", "says"), [([], "–"), ([0.5, 0.25], "50 %"), ([3.81e12], "> 1000×"), ([inf, 2.0], "∞")]
)
def test_budgets_used_can_be_read(used: list[float], says: str) -> None:
    """Neither inf nor 3.81e+12 stands in a table."""
    assert budget_used([Record("c", "b", Verdict.FAIL, budget_used=u) for u in used]) == says


def test_a_terminal_sees_one_line_and_a_log_some() -> None:
    """A terminal sees the case at work and since when on one line that is updated; a log gets whole lines."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    steps = Steps("ggml", 7000, "npu", clock=iter([0.0, 0.0, 12.0]).__next__)
    steps.at("ops/X@1\x1b[2J")
    steps.failures = 2
    for stream, begins, ends in ((Terminal(), "\r\x1b[K", "\r\x1b[K"), (io.StringIO(), "", "\n")):
        progress = Progress(stream, period=60)
        with progress.of(lambda: "ggml: 0 of 7, ops/X@1\x1b[2J"):
            progress.show()
        assert stream.getvalue() == f"{begins}ggml: 0 of 7, ops/X@1?[2J{ends}"
    assert str(steps) == "ggml: 0 of 7,000, 2 failed, then npu, ops/X@1\x1b[2J: 12 s"


def test_a_log_gets_lines_ever_less_often() -> None:
    """Each wait is twice as long as the one before, whichever backend runs."""
    stream = io.StringIO()
    progress = Progress(stream, period=0.05)
    for _ in range(2):
        with progress.of(lambda: "x"):
            time.sleep(0.5)
    assert 1 <= len(stream.getvalue().splitlines()) <= 4  # after 0.05, 0.15, 0.35 and 0.75 s


def test_each_backend_says_how_it_ended_and_what_is_next() -> None:
    """On stderr as it ends; the totals have the wall time, and -q has neither."""
    words = ("run", "--backend", "ggml", "--backend", "xdna2", "--case", CASE)
    said = CliRunner().invoke(main, words)
    ended = [
        re.sub(r"[0-9.]+ s$", "T", re.sub(r"[0-9.]+ s;", "T;", x)) for x in said.stderr.splitlines() if " of " not in x
    ]
    assert ended == ["ggml: 1 PASS in T; next: xdna2", "xdna2: 1 UNSUPPORTED in T"]
    assert re.search(r"^total: 1 PASS, 1 UNSUPPORTED in [0-9.]+ s$", said.stdout, re.MULTILINE)
    quiet = CliRunner().invoke(main, [*words, "-q"])
    assert (quiet.stderr, "total" in quiet.stdout) == ("", False)


def test_a_failure_describes_the_sources_of_its_node() -> None:
    """Type, `ne`, `nb` in bytes and the layout in words; -q leaves them out."""
    words = ("run", "--backend", "ggml", "--case", "ops/GET_ROWS-f32+i32-a=33x7,n=12,va=p1023@1")
    lines = _conform(*words).output.splitlines()
    assert lines[0].startswith("FAIL ops/GET_ROWS")
    a, ids = [x for x in lines if x.startswith("  src")]
    assert a.startswith("  src0 token_embd.weight (permuted): f32 ne=[33, 7, 1, 1] nb=[28, 4, 924, 924], transposed, ")
    assert a.endswith("view of token_embd.weight at byte 0")
    assert ids == "  src1 ids: i32 ne=[12, 1, 1, 1] nb=[4, 48, 48, 48], contiguous"
    assert "  src0" not in _conform(*words, "-q").output


def test_a_drawing_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """`show -o` into a folder that is not there or takes no files: exit code 2, nothing left beside it."""
    cases = CliRunner().invoke(main, ["list", "cases", "--family", "ops"]).output.split()
    case_id = cases[0]
    for path in (tmp_path / "absent" / "x.svg", Path("/proc/x.svg")):
        done = CliRunner().invoke(main, ["show", case_id, "-o", str(path)])
        assert done.exit_code == 2, done.output
        assert "cannot be written" in done.output.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
    fine = CliRunner().invoke(main, ["show", case_id, "-o", str(tmp_path / "x.svg")])
    assert (fine.exit_code, [p.name for p in tmp_path.iterdir()]) == (0, ["x.svg"])
    case = tmp_path / "case.gguf"
    casefile.write(case, [build(case_id)])
    before = case.read_bytes()
    assert CliRunner().invoke(main, ["show", str(case), "-o", str(case)]).exit_code == 2
    assert case.read_bytes() == before


def test_a_budget_is_kept_and_what_did_not_run_is_listed(tmp_path: Path) -> None:
    """--budget starts no case later; the rest is listed with the reason, in the record too: the run is incomplete."""
    path = tmp_path / "run.json"
    ids = FAMILIES["ops"].ids("smoke")[:40]
    words = [w for i in ids for w in ("--case", i)]
    done = _conform("run", "--backend", "cpu", *words, "--budget", "0.000001s", "--json", str(path))
    assert done.exit_code == 5
    assert f"no result for {len(ids)} cases on cpu: time limit (--budget)" in done.output
    missing = json.loads(path.read_text(encoding="utf-8"))["missing"]
    assert {m["cause"] for m in missing} == {"time limit"}
    assert [m["case"] for m in missing] == list(ids)
    assert _conform("run", "--backend", "cpu", *words, "--budget", "10m").exit_code == 0


def test_a_backend_without_time_to_answer_has_not_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the end of --budget cuts off is missing; it is no TIMEOUT of the backend."""
    monkeypatch.setattr(Runner, "run", _slow)
    path = tmp_path / "run.json"
    words = [w for i in case_ids((), ("ops/ADD-*",), "smoke")[:3] for w in ("--case", i)]
    done = _conform("run", "--backend", "cpu", *words, "--budget", "0.6s", "--json", str(path))
    assert done.exit_code == 5
    document = json.loads(path.read_text(encoding="utf-8"))
    assert [r["verdict"] for r in document["results"]] == ["PASS"]
    assert len(document["missing"]) == 2


def _slow(_: Runner, spec: Spec, cases: Sequence[Case]) -> list[Record]:
    """The first case, which is a batch of its own, passes; the others are cut off."""
    time.sleep(0.4)
    return [Record(c.id, str(spec), Verdict.PASS if len(cases) == 1 else Verdict.TIMEOUT) for c in cases]
