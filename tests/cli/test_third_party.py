"""A package from outside the repository adds a family, a live family and a command, each by an entry point."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.case import casefile
from conformance.cli import COMMANDS
from conformance.ggml.errors import UnavailableError
from conformance.installed import Parts
from conformance.run.live import LIVE
from conformance.suite import FAMILIES

FAMILY = '''
"""A family of one op."""

import numpy as np

from conformance.case.case import Case, Step
from conformance.ggml.ops.build import Builder, build_forward_expand
from conformance.ggml.tensor import FLAG_INPUT, new_tensor
from conformance.ggml.types import F32
from conformance.suite.family import Family, split_id, with_seed

open("loaded", "a").close()


def build(case_id):
    n = int(split_id(case_id, "their-graphs", "N")[0])
    x = new_tensor(F32, n, name="x", flags=FLAG_INPUT)
    y = Builder().add(x, x)
    data = np.arange(n, dtype="<f4").view(np.uint8)
    return Case(case_id, {}, [Step(build_forward_expand(y), {x: data}, (y,))], family="their-graphs")


FAMILY = Family("their-graphs", "sums", lambda level: [with_seed("their-graphs", n) for n in ("4", "8")], build)
UNNAMED = Family("another", "sums", lambda level: [], build)
'''
MISTAKES = """
def unfilled(case_id):
    case = build(case_id)
    case.steps[0].inputs.clear()
    return case


def refused(case_id):
    x = new_tensor(F32, 4)
    Builder().mul_mat(x, new_tensor(F32, 5))


def raises(case_id):
    return {}["x"]


def ids(level):
    return ["their-graphs/4@1"]


UNFILLED, REFUSED, RAISES = (Family("their-graphs", "mistakes", ids, f) for f in (unfilled, refused, raises))
NAMELESS = Family("their-graphs", "mistakes", lambda level: ["4@1"], build)
"""
LIVE_FAMILY = '''
"""A live family that looks at the name of a backend."""

from conformance.judge.verdict import Result, Verdict
from conformance.run.live import LiveFamily, without_steps

open("loaded", "a").close()


class Player:
    def __init__(self, spec, isolation, save):
        self.spec = spec

    def play(self, case_id):
        return Result(case_id, str(self.spec), Verdict.PASS, metrics={"letters": float(len(self.spec.name))})

    def close(self):
        pass


FAMILY = LiveFamily("their-live", "names", lambda level: ["their-live/name@0"], without_steps, player=Player)
'''
COMMAND = '''
"""A command."""

import click


@click.command()
@click.argument("who")
def greet(who):
    """Greet somebody."""
    click.echo(f"hello {who}")
'''
ENTRIES = """
[conformance.families]
their-graphs = their_family:FAMILY
their-broken = their_broken:FAMILY
their-misnamed = their_family:UNNAMED
their-confused = their_live:FAMILY
ops = their_family:FAMILY
memory = their_family:FAMILY

[conformance.live_families]
their-live = their_live:FAMILY
their-broken-live = their_broken:FAMILY
gqa = their_live:FAMILY

[conformance.commands]
greet = their_command:greet
their-broken = their_broken:command
their-number = their_command:__doc__
run = their_command:greet
"""
MODULES = {
    "their_family": FAMILY,
    "their_live": LIVE_FAMILY,
    "their_command": COMMAND,
    "their_broken": "1 / 0\n",
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of packages that holds theirs, as pip would leave it."""
    folder = tmp_path / "site"
    info = folder / "their_package-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    for name, source in MODULES.items():
        (folder / f"{name}.py").write_text(source)
    return folder


def _conform(site: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))}
    return _called([sys.executable, "-m", "conformance.cli", *words], site.parent, {**env, **variables})


def _called(command: Sequence[str], folder: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_a_family_is_listed_and_run(site: Path) -> None:
    """`--family NAME` and an id of it: its cases are judged as ours are."""
    listed = _conform(site, "list", "cases", "--family", "their-graphs")
    assert listed.stdout.split() == [i for i in listed.stdout.split() if i.startswith("their-graphs/")]
    assert len(listed.stdout.split()) == 2
    done = _conform(site, "run", "--family", "their-graphs", "--backend", "ggml", "-q")
    assert (done.returncode, "2 PASS" in done.stdout) == (0, True), done
    one = _conform(site, "run", "--case", "their-graphs/8@*", "--backend", "ggml", "-q")
    assert (one.returncode, "1 PASS" in one.stdout) == (0, True), one


def test_the_families_are_listed_with_their_summaries(site: Path) -> None:
    """`list families` prints the summary and the default of each family, also beside a broken one."""
    done = _conform(site, "list", "families", "--json", "families.json")
    rows = {name: rest for name, *rest in map(str.split, done.stdout.splitlines()[2:])}
    assert done.returncode == 0
    assert (rows["ops"][0], rows["their-graphs"], rows["audit"][:2]) == (
        "yes",
        ["if", "named", "sums"],
        ["if", "named"],
    )
    assert rows["their-broken"][2:4] == ["not", "available:"]
    found = json.loads((site.parent / "families.json").read_text())["families"]
    assert found["their-graphs"] == {"available": True, "default": False, "summary": "sums"}
    assert set(found) >= {*FAMILIES.ours(), *LIVE.ours()}


def test_a_live_family_is_listed_and_run(site: Path) -> None:
    """Its player answers for the case, and the case is in the totals."""
    assert _conform(site, "list", "cases", "--family", "their-live").stdout.split() == ["their-live/name@0"]
    done = _conform(site, "run", "--family", "their-live", "--backend", "ggml", "-q")
    assert (done.returncode, "1 PASS" in done.stdout) == (0, True), done


def test_the_family_of_the_manual_runs(site: Path) -> None:
    """The example of docs/suite.md is a whole module: its cases pass, and a wrong key is one message."""
    page = (Path(__file__).parents[2] / "docs" / "suite.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (site / "residual.py").write_text(example)
    entries = next(site.glob("*.dist-info")) / "entry_points.txt"
    entries.write_text("[conformance.families]\nresidual = residual:FAMILY\n")
    done = _conform(
        site, "run", "--family", "residual", "--level", "full", "--backend", "ggml", "--backend", "cpu", "-q"
    )
    assert (done.returncode, done.stdout.count("6 PASS")) == (0, 2), done
    wrong = _conform(site, "run", "--case", "residual/embed=7@1", "--backend", "ggml")
    assert "conform: case 'residual/embed=7@1': key 'embed' is unknown; did you mean embd?" in wrong.stderr


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("UNFILLED", "builds an invalid case their-graphs/4@1: steps[0]: NONE x f32[4, 1, 1, 1] is neither persistent"),
        ("REFUSED", "cannot build their-graphs/4@1: MUL_MAT: GGML_ASSERT(ggml_can_mul_mat(a, b)) failed"),
        ("RAISES", "cannot build their-graphs/4@1: KeyError: 'x' (their_family.py:"),
        ("NAMELESS", "lists the id '4@1'; their-graphs/PARAMS@SEED expected (with_seed)"),
    ],
)
def test_a_mistake_in_a_family_is_no_verdict(site: Path, mistake: str, said: str) -> None:
    """The message begins with the family, and no backend is blamed."""
    (site / "their_family.py").write_text(f"{FAMILY}{MISTAKES}FAMILY = {mistake}\n")
    done = _conform(site, "run", "--family", "their-graphs", "--backend", "ggml")
    assert done.returncode == 2
    assert f"conform: family 'their-graphs' {said}" in " ".join(done.stderr.split())
    assert not any(word in done.stdout for word in ("OVERCLAIM", "CRASH", "PASS"))


def test_a_command_is_called_and_in_the_help(site: Path) -> None:
    """`conform NAME` runs it; the help says whose it is, and imports none of theirs."""
    assert _conform(site, "greet", "you").stdout == "hello you\n"
    (site / "their_command.py").write_text("1 / 0\n")
    told = _conform(site, "--help")
    assert told.returncode == 0
    assert "greet" in told.stdout
    assert "Command of the package their-package." in told.stdout
    assert "run    " in told.stdout
    done = _conform(site, "", _CONFORM_COMPLETE="bash_complete", COMP_WORDS="conform gre", COMP_CWORD="1")
    assert "their" not in done.stderr


def test_a_third_party_module_is_loaded_only_if_it_is_named(site: Path) -> None:
    """A run without it, a list of all cases and the help import none of theirs."""
    for words in (["run", "--case", "ops/ADD-f32*", "--backend", "cpu", "-q"], ["list", "cases"], ["--help"]):
        done = _conform(site, *words)
        assert done.returncode == 0, done
        assert "their" not in done.stdout or words == ["--help"]
    assert not (site.parent / "loaded").exists()
    _conform(site, "list", "cases", "--family", "their-graphs")
    assert (site.parent / "loaded").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--family", "their-broken"], "family 'their-broken': their_broken:FAMILY cannot be imported: ZeroDiv"),
        (["run", "--case", "their-broken/*"], "family 'their-broken': their_broken:FAMILY cannot be imported: ZeroDiv"),
        (["run", "--family", "their-broken-live"], "live family 'their-broken-live': their_broken:FAMILY cannot be"),
        (["run", "--family", "their-misnamed"], "their-package: its name is 'another', 'their-misnamed' expected"),
        (["run", "--family", "their-confused"], "their-package: a Family expected, LiveFamily found"),
        (["their-broken"], "command 'their-broken': their_broken:command cannot be imported: ZeroDivisionError"),
        (["their-number"], "their-package: a click.Command expected, str found"),
    ],
)
def test_a_broken_one_is_one_message(site: Path, words: list[str], said: str) -> None:
    """It says what is broken and where it is from, with exit code 2 and no traceback."""
    done = _conform(site, *words)
    assert done.returncode == 2
    assert said in " ".join((done.stdout + done.stderr).split())
    assert "Traceback" not in done.stderr


def test_ours_win(site: Path) -> None:
    """Another package's `ops`, `run`, or graph family with the name of a live one does not replace ours."""
    for words in (["ops/ADD-f32*"], ["gqa/*"]):
        found, plain = (_conform(where, "list", "cases", *words) for where in (site, site.parent))
        assert found.returncode == 0
        assert found.stdout == plain.stdout
    memory = _conform(site, "list", "cases", "--family", "memory")
    assert memory.stdout.startswith("memory/")
    assert not (site.parent / "loaded").exists()


@pytest.mark.parametrize("family", ["their-graphs", "their-live"])
def test_a_file_loads_none(site: Path, family: str) -> None:
    """A case file whose id names another package's family runs as it is, and a report of it is made: nothing loads."""
    case = next(iter(FAMILIES["ops"].ids("smoke")))
    casefile.write(site.parent / "case.gguf", replace(FAMILIES["ops"].build(case), id=f"{family}/8@1", family=family))
    for words in (
        ["run", "case.gguf", "--backend", "cpu", "--backend", "ggml", "--json", "run.json"],
        ["show", "case.gguf"],
        ["report", "run.json", "-o", "page.html"],
    ):
        done = _conform(site, *words)
        assert done.returncode == 0, done
    assert not (site.parent / "loaded").exists()


def test_a_journal_answers_for_no_other_family(site: Path) -> None:
    """An edit of a family, whose ids stay, builds another case: no earlier result is reused."""
    words = ("run", "--case", "their-graphs/8@*", "--backend", "ggml", "--journal", "journal")
    assert _conform(site, *words).returncode == 0
    assert "reused" in _conform(site, *words).stderr
    (site / "their_family.py").write_text(FAMILY.replace(".add(x, x)", ".mul(x, x)"))
    done = _conform(site, *words)
    assert (done.returncode, "changed since its run was started" in done.stderr) == (2, True), done


def test_ours_are_entry_points_as_theirs_are() -> None:
    """Every family, live family and command of ours is found in the metadata, and can be loaded."""
    for parts in (FAMILIES, LIVE, COMMANDS):
        assert parts.ours()
        assert len([parts[name] for name in parts.ours()]) == len(parts.ours())


def test_metadata_that_are_too_old_say_so() -> None:
    """A checkout that was installed before a family came says how to get it, and does not leave it out."""
    old: Parts[object] = Parts("conformance.nothing", "family", lambda _name, _value: "", ["ops"])
    assert list(old) == ["ops"]
    with pytest.raises(UnavailableError, match=r"family 'ops': .* install ggml-conformance again"):
        _ = old["ops"]
