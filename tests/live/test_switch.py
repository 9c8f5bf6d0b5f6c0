"""`conform switch`: a backend with a switch of its environment, judged by the reference and compared with itself."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from marks import needs_wheel

import conformance
from conformance.backend.registry import Named, Spec, define, defined, environment, resolve
from conformance.case import casefile
from conformance.cli import main
from conformance.ggml.errors import UsageError
from conformance.judge.verdict import Verdict
from conformance.live.switch import sides
from conformance.run.runner import Runner
from conformance.run.session.select import build

ROOT = Path(conformance.__file__).parents[1]
CASE = "gqa/llama-l=1,embd=32,heads=4,kv=2,ff=32,vocab=32,seqs=2,run=p5.d2@1"
STAND_IN = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import numpy as np
import backends.ggml.session as session

real = session.GgmlSession.compute


def compute(self, graph, inputs, outputs):
    values, how, harm = dict(real(self, graph, inputs, outputs)), os.environ.get("GQA"), os.environ.get("HARM")
    attention = [n for n in graph if n.op == "FLASH_ATTN_EXT"]
    last = list(graph)[-1]
    if not attention or last not in values:
        return values
    streams = any(n.src[0].ne[3] > 1 for n in attention)
    if how == "dies" or (harm == "dies" and how != "mends" and streams):
        os._exit(7)
    if how == "dies-once" and not os.path.exists("died"):
        open("died", "w").close()
        os._exit(7)
    rows = np.array(values[last]).view(np.float32).reshape(-1, last.ne[0])
    if harm == "zeros":
        rows[:] = 0
    if how in ("rounds", "dies-once"):
        rows *= 1 + 2.0**-23
    elif how == "streams" and len(rows) > 1:
        rows[1:] = rows[:1]
    elif how == "groups":
        rows[:] = rows[:, ::-1]
    return {{**values, last: rows.reshape(-1).view(np.uint8)}}


session.GgmlSession.compute = compute
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`mine`: ggml in a process whose attention a variable GQA changes, as a library reads its switch."""
    (tmp_path / "sitecustomize.py").write_text(STAND_IN, encoding="utf-8")
    path = os.pathsep.join(filter(None, (str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH"))))
    toml = f'[backend.mine]\nadapter = "ggml"\nenvironment = {{ PYTHONPATH = {json.dumps(path)} }}\n'
    (tmp_path / "conformance.toml").write_text(toml, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    before = defined()
    yield
    define(before)


def _switch(*words: str) -> Result:
    return CliRunner().invoke(main, ["switch", *words, "--backend", "mine", "--case", CASE])


@needs_wheel
@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("setting", "code", "said"),
    [
        ("rounds", 0, "1 PASS"),
        ("streams", 1, "FAIL switch/GQA="),
        ("groups", 1, "FAIL switch/GQA="),
        ("dies", 1, "CRASH switch/GQA="),
        ("dies-once", 0, "1 PASS"),
        ("nothing", 3, "nothing shows that the library reads it"),
    ],
)
def test_a_switch_changes_rounding_alone(setting: str, code: int, said: str) -> None:
    """Another way to round passes; one stream taken for another, heads in another order and a death are its fault."""
    done = _switch(f"GQA={setting}")
    assert (done.exit_code, said in done.output) == (code, True), done.output


@needs_wheel
@pytest.mark.usefixtures("stand_in")
def test_the_record_says_what_differs(tmp_path: Path) -> None:
    """Node and element, and how the run compares with that without the switch."""
    out = tmp_path / "switch.json"
    assert _switch("GQA=streams", "--json", str(out)).exit_code == 1
    document = json.loads(out.read_text(encoding="utf-8"))
    (row,) = document["results"]
    assert (document["kind"], row["case"], row["verdict"]) == ("conformance", f"switch/GQA=streams/{CASE}", "FAIL")
    assert (row["metrics"]["compared"], row["metrics"]["equal"], row["metrics"]["streams"]) == (1, 0, 1)
    assert "diverges at" in row["detail"]


@needs_wheel
@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("harm", "setting", "code", "said"),
    [
        ("dies", "mends", 3, ["1 PASS", "0 of 1 cases; of 1 with several streams (ne[3] > 1): none"]),
        ("dies", "rounds", 1, ["CRASH switch/GQA=", "without it CRASH"]),
        ("zeros", "rounds", 1, ["FAIL switch/GQA=", "without it FAIL", "compared with and without it: 1 of 1 cases"]),
    ],
)
def test_a_library_wrong_without_the_switch_is_still_judged(
    tmp_path: Path, harm: str, setting: str, code: int, said: list[str]
) -> None:
    """The reference judges the run with the switch, and what could not be compared is counted."""
    toml = tmp_path / "conformance.toml"
    text = toml.read_text("utf-8").replace("environment = {", f'environment = {{ HARM = "{harm}",')
    toml.write_text(text, encoding="utf-8")
    done = _switch(f"GQA={setting}")
    assert done.exit_code == code, done.output
    assert [words for words in said if words not in done.output] == [], done.output


@needs_wheel
@pytest.mark.usefixtures("stand_in")
def test_a_switch_left_off_says_how_to_turn_it_on() -> None:
    """A library told `=0` changes nothing; the user is told what to type."""
    done = _switch("GQA=0")
    assert (done.exit_code, "try GQA=1" in done.output) == (3, True), done.output


def test_each_side_is_a_name_of_its_own() -> None:
    """The same adapter, options and environment, but for the switch, which the other side has not even by chance."""
    before = defined()
    try:
        define({"x": Named("ggml", (("device", "OPENVINO0"),), (("A", "1"), ("S", "9")))})
        off, on = sides(Spec("x", (("threads", "2"),)), "S=1")
        assert dict(resolve(off).options) == dict(resolve(on).options) == {"device": "OPENVINO0", "threads": "2"}
        assert environment(off) == {"A": "1", "S": None}
        assert environment(on) == {"A": "1", "S": "1"}
        assert Spec.parse(str(on)) == on
        for text in ("S", "=1", "S-T=1"):
            with pytest.raises(UsageError, match="NAME=VALUE expected"):
                sides(Spec("x"), text)
    finally:
        define(before)


def test_an_id_in_a_file_sets_no_variable(tmp_path: Path) -> None:
    """A case of a stranger's file is its graphs, whatever its id says."""
    made = build("weight_placement/both-w=q4_0@0")
    casefile.write(tmp_path / "c.gguf", [replace(made, id=f"switch/LD_PRELOAD=x/{made.id}")])
    runner = Runner()
    (result,) = runner.run(Spec("cpu"), [casefile.read_one(tmp_path / "c.gguf")])
    runner.close()
    assert (result.verdict, result.steps, result.metrics) == (Verdict.PASS, len(made.steps), {})


def test_bad_words_are_refused() -> None:
    """No backend, no such architecture: one line, exit code 2."""
    assert CliRunner().invoke(main, ["switch", "A=1"]).exit_code == 2
    words = ["switch", "A=1", "--backend", "ggml", "--case", CASE, "--arch", "no-such"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2
    assert "no architecture fits no-such" in done.output
