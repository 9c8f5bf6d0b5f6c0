"""What a saved case says of itself chooses no library, no folder and no address: its writer may be a stranger."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import CliRunner

from backends.cpu import CpuBackend
from conformance.backend import registry
from conformance.backend.registry import Named
from conformance.case import casefile
from conformance.case.case import JSON
from conformance.cli import main
from conformance.ggml.errors import UsageError
from conformance.run.session.select import build
from conformance.run.session.untrusted import backends_of
from conformance.suite import FAMILIES

OP = FAMILIES["ops"].ids("smoke")[0]
FILE = Path("a case.gguf")


class Unsaid(CpuBackend):
    """A third party's: it does not say which of its options are places."""

    opened: ClassVar[list[str]] = []

    def __init__(self, plugin_path: str = "", mode: str = "") -> None:
        super().__init__()
        self.opened.append(plugin_path + mode)


@pytest.fixture
def unsaid(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`unsaid` is installed."""
    real = registry.adapter
    monkeypatch.setattr(registry, "adapter", cache(lambda n: Unsaid if n == "unsaid" else real(n)))
    monkeypatch.setattr(registry, "names", lambda: ["cpu", "ggml", "openvino-stateless", "xdna2", "unsaid"])
    mine = (("lib", "/mine"),)
    registry.define({"mine": Named("ggml", mine, chosen=True), "theirs": Named("ggml", mine)})
    yield
    registry.define({})


@pytest.mark.usefixtures("unsaid")
@pytest.mark.parametrize(
    "text",
    ["cpu", "ggml?device=CPU&buffer=CPU_REPACK&threads=2", "openvino-stateless?stage=translate&precision=default",
     "openvino-stateless?device=GPU.0", "xdna2?k=64%2B128", "sched?devices=xdna2:k=64,cpu&buffers=apart", "mine",
     "unsaid?mode=fast"],
)  # fmt: skip
def test_plain_options_are_taken(text: str) -> None:
    """Adapters with words and numbers, a scheduler of such, and names of settings that the user chose."""
    assert backends_of(FILE, [text], ["conform", "repro", str(FILE)]) == {text: registry.Spec.parse(text)}


@pytest.mark.usefixtures("unsaid")
@pytest.mark.parametrize(
    "text",
    ["ggml?lib=./evil", "ggml?lib=evil", "ggml?lib=", "openvino-stateless?cache_dir=/any/dir",
     "openvino-stateless?cache_dir=dir", "ggml?device=/dev/x", "ggml?device=..", "ggml?device=~",
     "ggml?device=C%3A%5Cx",
     "ggml?device=http%3A%2F%2Fx", "ggml?device=evil.so", "sched?devices=ggml:lib=evil,cpu",
     "sched?devices=cpu,sched:devices=ggml%3Alib%3Devil", "mine?device=x", "mine?lib=", "xdna2?k=4000000000",
     "unsaid?plugin_path=x", "unsaid?mode=a%2Fb", "unsaid?mode=conformance", "ggml?device=x%00",
     "ggml?device=CPU&lib=evil", "theirs", "theirs?device=CPU", "sched?devices=theirs,cpu"],
)  # fmt: skip
def test_places_are_refused(text: str) -> None:
    """Nothing that names a place is taken; the refusal has the command that asks for it, quoted for a shell."""
    with pytest.raises(UsageError) as e:
        backends_of(FILE, [text], ["conform", "repro", str(FILE)])
    command = str(e.value).partition("To run it: ")[2]
    assert shlex.split(command.replace("$'", "'"))[:4] == ["conform", "repro", str(FILE), "--backend"]


def _saved(folder: Path, provenance: dict[str, JSON]) -> Path:
    case = build(OP)
    case.provenance = provenance
    casefile.write(folder / "case.gguf", case)
    return folder / "case.gguf"


@pytest.mark.parametrize("command", ["repro", "shrink"])
def test_a_file_opens_no_library(tmp_path: Path, command: str) -> None:
    """`repro` and `shrink` end with exit code 2 and one line before anything is opened or written."""
    there = tmp_path / "cache"
    path = _saved(tmp_path, {"seen": {"backend": f"openvino-stateless?cache_dir={there}", "verdict": "FAIL"}})
    done = CliRunner().invoke(main, [command, str(path)])
    assert (done.exit_code, there.exists(), len(done.output.splitlines())) == (2, False, 1)
    assert f"--backend 'openvino-stateless?cache_dir={there}'" in done.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["case.gguf"]


@pytest.mark.parametrize("command", ["repro", "shrink"])
@pytest.mark.parametrize(
    "said",
    [None, 5, [], "x", {"backend": 5}, {"backend": None}, {"backend": ["cpu"]}, {"backend": "cpu", "verdict": [1]},
     {"backend": "cpu", "first_divergence": [2], "nmse": {"a": 1}, "detail": 3}, {"backend": "?"}, {"backend": ""},
     {"backend": "cpu?x"}, {"backend": "sched?devices="}, {"backend": "\x1b[2J\nPASS"}, {"backend": "\0"}],
)  # fmt: skip
def test_provenance_of_any_type_is_no_traceback(tmp_path: Path, said: JSON, command: str) -> None:
    """Whatever stands where a record should, a command ends as one of ours does, and no line is forged."""
    path = _saved(tmp_path, {"seen": said})
    more = ["--backend", "cpu"] if not (isinstance(said, dict) and isinstance(said.get("backend"), str)) else []
    done = CliRunner().invoke(main, [command, str(path), *more])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    assert not any(line.startswith("PASS\n") for line in done.output.splitlines())
    assert "\x1b" not in done.output
