"""`conformance.toml`: names for backends, what they get, and that a wrong word is one line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from planted_adapter import planted_adapter
from sessions_of_pytest import session

from conformance import shipped
from conformance.backend import registry
from conformance.backend.registry import Named, Spec
from conformance.case import strict
from conformance.cli import main
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.judge.verdict import Result as Judged
from conformance.judge.verdict import Verdict
from conformance.run.isolation.isolate import IsolatedBackend, open_backend, runs_here
from conformance.run.session import settings
from conformance.run.session.select import available, parse_specs, stage_of, staged
from conformance.suite import FAMILIES

CASE = FAMILIES["ops"].ids("smoke")[0]
NORMS = "ops/NORM-*"
LEVELS = {name: sum(fnmatchcase(i, NORMS) for i in FAMILIES["ops"].ids(name)) for name in ("smoke", "standard")}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory of its own, and no names left behind."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    registry.define({})


def _write(text: str, name: str = settings.FILE) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _conform(*args: str) -> Result:
    return CliRunner().invoke(main, list(args), catch_exceptions=False)


def test_without_a_file_there_are_only_installed_names() -> None:
    """No file, no names but those of adapters."""
    assert settings.load(None) == settings.Settings()
    assert not registry.defined()


def test_a_name_is_its_adapter_with_its_options() -> None:
    """A name resolves to its adapter and options; what the spec says comes on top, and the name stays in results."""
    _write('[backend.two]\nadapter = "ggml"\noptions = { threads = 2, device = "CPU" }\n')
    settings.load(None)
    spec = Spec.parse("two?threads=1")
    assert str(spec) == "two?threads=1"
    assert registry.resolve(spec) == Spec("ggml", (("threads", "1"), ("device", "CPU")))
    assert registry.adapter("two") is registry.adapter("ggml")
    assert registry.resolve(Spec("cpu")) == Spec("cpu")


def test_reading_alone_registers_nothing() -> None:
    """The names of the registry stay; those of the file are returned."""
    registry.define({"x": Named("cpu")})
    _write('[backend.two]\nadapter = "ggml"\n')
    assert list(settings.read(None).named) == ["two"]
    assert list(registry.defined()) == ["x"]


def test_an_installed_name_has_a_level_and_waivers(here: Path) -> None:
    """A table of an adapter's own name sets these, and makes no new name."""
    _write('[backend.cpu]\nlevel = "full"\nwaivers = "w.toml"\n')
    found = settings.load(None)
    assert not registry.defined()
    assert found.level(Spec("cpu"), None) == "full"
    (here / "w.toml").write_text("", encoding="utf-8")
    assert [s.name for s in found.waivers_of([Spec("cpu"), Spec("ggml")], None)] == ["cpu"]


def test_a_backend_with_options_has_a_table_of_its_own(here: Path) -> None:
    """It counts for this backend alone, before the table of the name."""
    _write('[backend.cpu]\nlevel = "full"\n[backend."cpu?fault=x"]\nlevel = "standard"\nwaivers = "w.toml"\n')
    found = settings.load(None)
    (here / "w.toml").write_text("", encoding="utf-8")
    one, other = Spec.parse("cpu?fault=x"), Spec.parse("cpu?fault=y")
    assert [found.level(s, None) for s in (one, other, Spec("cpu"))] == ["standard", "full", "full"]
    assert list(found.waivers_of([one, other, Spec("cpu")], None)) == [one]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[backend.x\n", "conformance.toml: "),
        ("[backends.x]\n", "conformance.toml: backends: is unknown; known: backend"),
        ("backend = 1\n", "conformance.toml: [backend]: tables [backend.NAME] expected, 1 found"),
        ("[backend]\nx = 1\n", "conformance.toml: [backend.x]: a table expected, 1 found"),
        ("[backend.x]\n", "conformance.toml: [backend.x] adapter: one of "),
        ('[backend.x]\nadapter = "gml"\n', "found"),
        ("[backend.x]\nadapter = ['ggml']\n", "[backend.x] adapter: one of"),
        (
            '[backend.cpu]\nadapter = "ggml"\n',
            "[backend.cpu]: another name, or only level and waivers in the table",
        ),
        ('[backend."a?b"]\nadapter = "ggml"\n', "[backend.a?b]: a name of letters"),
        ('[backend."a?b"]\nlevel = "full"\n', "[backend.a?b]: NAME?key=value, as the run prints it, expected"),
        ('[backend.x]\nadapter = "ggml"\noption = {}\n', "[backend.x] option: is unknown; known: adapter, options"),
        ('[backend.x]\nadapter = "ggml"\noptions = 1\n', "[backend.x] options: a table expected, 1 found"),
        ('[backend.x]\nadapter = "ggml"\noptions.lib = [1]\n', "[backend.x] options.lib: a text or a whole number"),
        ('[backend.x]\nadapter = "ggml"\noptions.lib = true\n', "[backend.x] options.lib: a text"),
        ('[backend.x]\nadapter = "ggml"\nenvironment.A = 1\n', "[backend.x] environment.A: a text or false expected"),
        ('[backend.x]\nadapter = "ggml"\nenvironment."A=B" = "1"\n', "[backend.x] environment: a variable"),
        ('[backend.x]\nadapter = "ggml"\nlevel = "big"\n', "[backend.x] level: one of smoke, standard, full expected"),
        ('[backend.x]\nadapter = "ggml"\nwaivers = 1\n', "[backend.x] waivers: a file expected, 1 found"),
    ],
)
def test_a_wrong_word_is_one_line(text: str, says: str) -> None:
    """Whatever is wrong with the file is one line that names it, the table and the key, and exit code 2."""
    _write(text)
    result = _conform("list", "backends", "cpu")
    assert result.exit_code == 2
    lines = result.output.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("conform: conformance.toml: ")
    assert says in lines[0]


@pytest.mark.parametrize("kind", ["device", "pipe", "folder", "large"])
def test_a_file_that_settings_name_is_regular_and_of_bounded_size(
    here: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endless device, a pipe without a writer, a folder and a large file end with exit code 2 and one line."""
    path = here / "w.toml"
    if kind == "device":
        path = Path("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        monkeypatch.setattr(strict, "MAX_TEXT", 1 << 20)
        path.write_text("#" * (1 << 20) + "#")
    _write(f'[backend.cpu]\nwaivers = "{path}"\n')
    result = _conform("run", "--backend", "cpu", "--case", CASE)
    assert result.exit_code == 2
    (line,) = result.output.strip().splitlines()
    assert line.startswith(f"conform: {path}: ")
    assert line.endswith("a file of at most 1 MiB expected" if kind == "large" else "a regular file expected")


def test_an_option_that_the_adapter_lacks_names_the_table() -> None:
    """An unknown option is found when the backend is named, and blamed on the file."""
    _write('[backend.x]\nadapter = "ggml"\noptions.colour = "red"\n')
    result = _conform("run", "--backend", "x", "--case", CASE)
    assert result.exit_code == 2
    assert "conformance.toml: [backend.x] options: option 'colour' is unknown; its options: lib" in result.output


def test_a_library_is_loaded_only_for_a_backend_that_is_named(here: Path) -> None:
    """Without --backend the file's backends are neither run nor opened; the list says that they are there."""
    (here / "no-library.so").write_text("no library")
    _write('[backend.x]\nadapter = "ggml"\noptions.lib = "./no-library.so"\n')
    settings.load(None)
    assert parse_specs([]) == [Spec(n) for n in registry.defaults()]
    listed = here / "b.json"
    result = _conform("list", "backends", "--json", str(listed))
    assert result.exit_code == 0, result.output
    assert json.loads(listed.read_text())["backends"]["x"] == {"opened": False, "adapter": "ggml"}
    _, lacking = available([Spec("x")])
    assert list(lacking) == [Spec("x")]


def test_paths_are_relative_to_the_file(here: Path) -> None:
    """`./` and `../` in options and variables, and the waivers' path, start at the file's folder; other texts stay."""
    path = _write(
        '[backend.x]\nadapter = "ggml"\nwaivers = "w.toml"\n'
        'options = { lib = "../lib/a.so", device = "CPU" }\nenvironment = { P = "./p", Q = "q", R = false }\n',
        "sub/folder/any.toml",
    )
    found = settings.load(path)
    assert found.waivers == {"x": Path("sub/folder/w.toml")}
    assert registry.resolve(Spec("x")).options == (("lib", str(here / "sub" / "lib" / "a.so")), ("device", "CPU"))
    assert registry.environment(Spec("x")) == {"P": str(here / "sub" / "folder" / "p"), "Q": "q", "R": None}


ADAPTER = """
import os
from backends.cpu import CpuBackend
from conformance.backend.interface import DeviceInfo

AT_IMPORT = os.environ.get("SEEN", "nothing")

class Seeing(CpuBackend):
    def info(self):
        return DeviceInfo("seeing", "CPU", f"{AT_IMPORT} {os.environ.get('GONE', 'gone')}")
"""


@pytest.fixture
def seeing(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An adapter whose info says what the environment was when it was imported."""
    monkeypatch.setenv("GONE", "still here")
    with planted_adapter(here, monkeypatch, "seeing", ADAPTER, "Seeing"):
        yield


@pytest.mark.usefixtures("seeing")
def test_the_environment_is_there_before_the_adapter() -> None:
    """Variables are set, and others taken away, in the worker before the adapter is imported; here nothing changes."""
    registry.define({"x": Named("seeing", environment=(("SEEN", "set"), ("GONE", None)))})
    backend = IsolatedBackend(Spec("x"))
    try:
        assert backend.info().description == "set gone"
    finally:
        backend.close()
    assert "SEEN" not in os.environ
    assert os.environ["GONE"] == "still here"


def test_an_environment_means_a_process_of_its_own() -> None:
    """Even the reference is isolated where it has an environment."""
    registry.define({"x": Named("cpu", environment=(("A", "1"),)), "y": Named("cpu")})
    assert not runs_here(Spec("x"))
    assert runs_here(Spec("y"))
    backend = open_backend(Spec("x"))
    try:
        assert isinstance(backend, IsolatedBackend)
    finally:
        backend.close()


def test_stages_see_through_a_name() -> None:
    """A stage that a name's options say counts, and another one can be asked for."""
    registry.define({"x": Named("openvino-stateless", (("stage", "translate"),)), "y": Named("openvino-stateless")})
    assert stage_of(Spec("x")) == "translate"
    assert staged(Spec("x"), "translate") == Spec("x")
    assert stage_of(staged(Spec("x"), "run")) == "run"
    assert staged(Spec("y", (("stage", "translate"),)), "run") == Spec("y")


def test_three_names_of_one_adapter_are_three_backends(here: Path) -> None:
    """Runs of names are kept apart in the record, and a saved name is found again by `repro`."""
    tables = (f'[backend.{n}]\nadapter = "ggml"\nenvironment.N = "{n}"\n' for n in ("one", "two", "three"))
    config = _write("\n".join(tables), "names.toml")
    out = here / "r.json"
    named = [a for n in ("one", "two", "three") for a in ("--backend", n)]
    result = _conform("run", "--config", str(config), *named, "--case", CASE, "--json", str(out))
    assert result.exit_code == 0, result.output
    assert [r["backend"] for r in json.loads(out.read_text())["results"]] == ["one", "two", "three"]
    unknown = _conform("run", "--backend", "one", "--case", CASE)
    assert unknown.exit_code == 2
    assert "'one' is not installed" in unknown.output


def test_each_backend_runs_at_its_own_level(here: Path) -> None:
    """Where --level is not given each backend runs at its own; where it is, all run at that."""
    _write('[backend.x]\nadapter = "ggml"\nlevel = "standard"\n')
    out = here / "r.json"
    command = ("run", "--backend", "x", "--backend", "ggml", "--case", NORMS, "--json", str(out))

    def counts() -> dict[str, int]:
        backends = [r["backend"] for r in json.loads(out.read_text())["results"]]
        return {name: backends.count(name) for name in ("x", "ggml")}

    assert _conform(*command).exit_code == 0
    assert counts() == {"x": LEVELS["standard"], "ggml": LEVELS["smoke"]}
    assert _conform(*command, "--level", "smoke").exit_code == 0
    assert counts() == {"x": LEVELS["smoke"], "ggml": LEVELS["smoke"]}


def test_a_name_of_the_reference_is_held_against_the_real_ggml(here: Path) -> None:
    """Under another name, too, the reference is not its own oracle."""
    _write('[backend.mine]\nadapter = "cpu"\n')
    out = here / "r.json"
    result = _conform("run", "--backend", "mine", "--backend", "cpu", "--case", CASE, "--json", str(out))
    assert result.exit_code == 0, result.output
    mine, cpu = json.loads(out.read_text())["results"]
    assert {k: v for k, v in mine.items() if k in {"nmse", "budget_used"}} == {
        k: v for k, v in cpu.items() if k in {"nmse", "budget_used"}
    }


def test_waivers_that_come_along_are_named_from_anywhere(here: Path) -> None:
    """`package:` names a file of the package; one that is not there is refused with what to do."""
    _write('[backend.ggml]\nwaivers = "package:waivers/ggml.toml"\n')
    (known,) = settings.load(None).waivers_of([Spec("ggml")], None).values()
    assert known.entries
    _write('[backend.ggml]\nwaivers = "package:waivers/nope.toml"\n')
    with pytest.raises(UsageError, match="no such file; this installation lacks it"):
        settings.load(here / settings.FILE)


def test_the_known_failures_of_ggml_are_known_at_any_seed() -> None:
    """No glob of its waivers names a seed, but for a case in which roundings may change as much."""
    own = settings.read_waivers(shipped.path(settings.FOLDER, "ggml.toml"))
    globs = [g for w in own.entries for g in (w.case, *w.excepted) if "*" in g]
    assert [g for g in globs if g.endswith("@1")] == ["scenario/deepseek32-*,do=shift@1"]


def test_pytest_takes_names_too(here: Path) -> None:
    """`pytest conformance` knows --config, names and their levels."""
    config = _write('[backend.x]\nadapter = "ggml"\nlevel = "standard"\n', "names.toml")
    out = here / "r.json"
    words = ("--backend", "x", "--backend", "ggml", "--case", NORMS, "--json", str(out))
    done = session("--config", str(config.absolute()), *words)
    assert done.returncode == 0, done.stdout
    backends = [r["backend"] for r in json.loads(out.read_text())["results"]]
    assert (backends.count("x"), backends.count("ggml")) == (LEVELS["standard"], LEVELS["smoke"])
    wrong = session("--config", "no.toml")
    assert wrong.returncode == 4
    assert "'no.toml' does not exist" in wrong.stderr + wrong.stdout


def test_errors_of_one_name_do_not_hide_another() -> None:
    """A named backend that this machine cannot have is said so by its name."""
    registry.define({"x": Named("ggml", (("lib", "nowhere"),))})
    with pytest.raises((UnavailableError, UsageError)):
        open_backend(Spec("x"))


def test_what_the_package_knows_is_said_where_no_waivers_are_named() -> None:
    """A failure of ggml that its shipped waivers expect is still one, with a line that names them; others have none."""
    crash = Judged("ops/IM2COL_3D-f32-x,src1=p1023@1", "ggml?lib=/x", Verdict.CRASH)
    other = replace(crash, case="ops/ADD-x@1")
    names = 'waivers = "package:waivers/ggml.toml" in conformance.toml (docs/waivers.md)'
    told = list(settings.known_lines([crash, other], settings.NO_WAIVERS))
    assert told == [f"1 of 2 failing cases known: {names}"]
    own = settings.read_waivers(shipped.path(settings.FOLDER, "ggml.toml"))
    book = settings.WaiverBook({Spec.parse(crash.backend): own}, settings.today())
    assert list(settings.known_lines([crash], book)) == []
    assert list(settings.known_lines([other, replace(crash, backend="cpu")], settings.NO_WAIVERS)) == []
