"""A run file, a saved case, a record and a settings file of the current directory choose no library and no folder."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import conform
from evil_library import Evil, evil, needs_compiler
from run_files import cause, document, result, written_to

from conformance.backend import registry
from conformance.case import casefile
from conformance.run.session.select import build

pytestmark = needs_compiler
OP = "ops/SUM-f32-ne=5x3@1"
SETTINGS = {
    "a library": 'options = { lib = "./evil.so" }',
    "a variable": 'environment = { LD_PRELOAD = "./evil.so" }',
}
"""What a stranger's conformance.toml says of the adapter ggml."""


@pytest.fixture
def stranger(tmp_path: Path) -> Evil:
    """A library in a stranger's folder."""
    return evil(tmp_path / "evil.so")


def _saved(folder: Path, backend: str) -> Path:
    case = build(OP)
    case.provenance = {"seen": {"backend": backend, "verdict": "FAIL"}}
    casefile.write(folder / "case.gguf", case)
    return folder / "case.gguf"


def _run(folder: Path, *backends: str) -> Path:
    rows = [result(OP, b, "FAIL") for b in backends]
    return written_to(folder / "run.json", document(rows))


def _record(folder: Path, backend: str) -> Path:
    found = {**document([result(OP, backend, "FAIL")]), "causes": [cause("SUM-1", [OP], backend)]}
    return written_to(folder / "run.json", found)


def _command(folder: Path, command: str, backend: str) -> list[Any]:
    """A command, and the file from which it learns its backend."""
    if command == "triage":
        return [command, _run(folder, backend), "--budget", "3s", "--no-confirm"]
    return [command, _saved(folder, backend), *(["--budget", "1s"] if command == "shrink" else [])]


def _refused(done: Any, backend: str) -> None:  # noqa: ANN401  # a completed process
    """Exit code 2 and one line, which ends with a command that repeats the backend."""
    assert (done.returncode, done.stdout) == (2, ""), done
    (line,) = done.stderr.strip().splitlines()
    words = shlex.split(line.partition("To run it: ")[2])
    assert words[-2:] == ["--backend", backend], line


@pytest.mark.parametrize("backend", ["my-npu", "sched?devices=my-npu,cpu"])
@pytest.mark.parametrize("command", ["repro", "shrink"])
def test_a_case_of_a_backend_that_is_not_here(tmp_path: Path, command: str, backend: str) -> None:
    """The message says for which it was saved and asks for another, which then runs."""
    words = _command(tmp_path, command, backend)
    done = conform(*words)
    assert done.returncode == 2
    assert f"saved for backend '{backend}', which is not installed here; name another with --backend" in done.stderr
    assert "not installed" not in conform(*words, "--backend", "cpu").stderr


@pytest.mark.parametrize(
    ("command", "form"),
    [("triage", "ggml?lib={}"), ("repro", "sched?devices=ggml:lib={},cpu"), ("shrink", "ggml?lib={}")],
)
def test_no_file_loads_a_library(tmp_path: Path, stranger: Evil, command: str, form: str) -> None:
    """It is loaded as soon as the user repeats the backend, and not before."""
    backend = form.format(stranger.library)
    words = _command(tmp_path, command, backend)
    _refused(conform(*words), backend)
    assert not stranger.ran()
    conform(*words, "--backend", backend)
    assert stranger.ran()


@pytest.mark.parametrize(
    ("command", "settings", "backend"),
    [
        ("triage", "a variable", "mine"),
        ("repro", "a variable", "sched?devices=mine,cpu"),
        ("repro", "a library", "mine"),
        ("shrink", "a library", "sched?devices=mine,cpu"),
    ],
)
def test_no_settings_of_the_current_directory_run(
    tmp_path: Path, stranger: Evil, command: str, settings: str, backend: str
) -> None:
    """A name that they define runs where the user names the backend or the settings, and not by a file."""
    (tmp_path / "conformance.toml").write_text(f'[backend.mine]\nadapter = "ggml"\n{SETTINGS[settings]}\n')
    words = _command(tmp_path, command, backend)
    _refused(conform(*words, cwd=tmp_path), backend)
    assert not stranger.ran()
    conform(*words, "--backend", backend, cwd=tmp_path)
    assert stranger.ran()
    conform(*words, "--config", "conformance.toml", cwd=tmp_path)
    assert stranger.ran()


@pytest.mark.parametrize(
    ("words", "settings"), [(["run", "--case", OP], "a library"), (["show", OP, "--scheduler", "sched"], "a variable")]
)
def test_settings_that_nobody_names_open_nothing(
    tmp_path: Path, stranger: Evil, words: list[str], settings: str
) -> None:
    """Without --backend the installed adapters run, and no name of the current directory."""
    (tmp_path / "conformance.toml").write_text(f'[backend.mine]\nadapter = "ggml"\n{SETTINGS[settings]}\n')
    assert conform(*words, cwd=tmp_path).returncode in (0, 1)
    assert not stranger.ran()


def test_settings_cannot_take_the_name_of_the_scheduler(tmp_path: Path, stranger: Evil) -> None:
    """A file may choose `sched`."""
    (tmp_path / "conformance.toml").write_text('[backend.sched]\nadapter = "ggml"\noptions = { lib = "./evil.so" }\n')
    done = conform("show", OP, "--scheduler", "sched", cwd=tmp_path)
    assert (done.returncode, stranger.ran()) == (2, False)
    assert "[backend.sched]" in done.stderr


@pytest.mark.parametrize(
    ("command", "backend"),
    [("triage", "ggml?lib=pypi:llama-cpp-python==0.3.16"), ("triage", "openvino-stateless?cache_dir=made"),
     ("repro", "ggml?profile=profile.toml"), ("repro", "ggml?env.GGML_TRACE=1"),
     ("shrink", "sched?devices=ggml:env.GGML_TRACE=1,cpu")],
)  # fmt: skip
def test_no_file_downloads_or_writes(tmp_path: Path, command: str, backend: str) -> None:
    """Neither a package nor a folder comes from a file."""
    words = _command(tmp_path, command, backend)
    before = sorted(p.name for p in tmp_path.iterdir())
    _refused(conform(*words, cwd=tmp_path, env={"XDG_CACHE_HOME": str(tmp_path)}), backend)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_run_file_is_refused_before_anything_runs(tmp_path: Path, stranger: Evil) -> None:
    """Its other backends do not run first; passes are not run again, so they may be of any backend."""
    evil_ = f"ggml?lib={stranger.library}"
    done = conform("triage", _run(tmp_path, "cpu", evil_), "--budget", "3s", "--no-confirm")
    _refused(done, evil_)
    rows = [result(OP, evil_, "PASS"), result(OP, "cpu", "PASS")]
    done = conform("triage", written_to(tmp_path / "run.json", document(rows)))
    assert (done.returncode, done.stderr, stranger.ran()) == (0, "", False)


def test_bisect_takes_its_device_from_no_stranger(tmp_path: Path, stranger: Evil) -> None:
    """A record's own library is never used; an address needs the user's word."""
    record = _record(tmp_path, f"ggml?lib={stranger.library}&device=RPC0&rpc=localhost:50052")
    words: list[str | Path] = [record, "SUM-1", tmp_path / "none-1", tmp_path / "none-2"]
    done = conform("bisect", *words)
    _refused(done, "ggml?device=RPC0&rpc=localhost:50052")
    named = conform("bisect", *words, "--backend", "ggml?device=RPC0&rpc=localhost:50052")
    assert "none-1: no such file or folder" in named.stderr
    assert not stranger.ran()


PARSES = {
    "run/session/untrusted.py": "the one place for what a file says",
    "run/session/select.py": "--backend",
    "run/session/settings.py": "to tell a spec from a name; opens nothing",
    "run/isolation/worker.py": "the parent process",
    "properties.py": "the argument of an author's test",
    "llama/release/cases.py": "the name of a result of this process",
    "testrun.py": "names of the backends that this run asked, for digests; opens nothing",
    "causes/bug_report/proof.py": "to say what a program must do; opens nothing",
    "cli/bugs.py": "--backend, --scheduler",
    "llama/cli/model.py": "--backend",
    "report/page/tables.py": "the build in the title of a page; opens nothing",
    "cli/perf.py": "names of ours",
    "llama/cli/build.py": "to take the library away; untrusted.py decides on the rest",
}
"""Modules that make a backend of a text -> whose text it is."""


def test_a_text_becomes_a_backend_in_known_places() -> None:
    """Whoever reads a file goes by `untrusted.backends_of`; another place says here whose text it parses."""
    root = Path(registry.__file__).parents[1]
    found = {p.relative_to(root).as_posix() for p in root.rglob("*.py") if "Spec.parse" in p.read_text("utf-8")}
    assert found == set(PARSES)


@pytest.mark.skipif(sys.platform == "win32", reason="names a device of POSIX")
def test_a_journal_is_a_regular_file(tmp_path: Path) -> None:
    """A device never ends, and a pipe waits for its writer."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in ("/dev/zero", str(pipe)):
        found = conform("run", "--backend", "cpu", "--case", "ops/ADD-*", "--journal", path)
        assert (found.returncode, "a regular file expected" in found.stderr) == (2, True)
