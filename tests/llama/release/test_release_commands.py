"""`conform build` from the shell: an error is one line, and nothing is lost."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from marks import needs_wheel
from run_files import cause, document, result, written_to

from conformance.builds.build import Build, DeviceOf
from conformance.cli import main
from conformance.ggml.errors import UnavailableError
from conformance.ggml.lib.files import WHEEL
from conformance.llama.cli import build as commands
from conformance.llama.release import prepare
from conformance.perf.units import BY_ID

RUN = {**document([result("ADD-1", "ggml?lib=x", "FAIL")]), "causes": [cause("ADD", ["ADD-1"], "ggml?lib=x")]}
TOML = '[[fault]]\nlink = "https://x.y/1"\n'


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["test", "nowhere"], "/nowhere: no such file or folder"),
        (["test", "pypi:xllamacpp"], "with an exact version"),
        (["test", "{file}"], "cannot be loaded"),
        (["test", "a", "--unit", "decode", "--isa", "arm64"], "--unit: units of this processor expected, found --isa"),
        (["test", "a", "--unit", "nothing"], "no unit of level standard matches 'nothing'"),
        (["bisect", "{file}", "ADD", "a"], "at least two builds expected, from old to new"),
        (["bisect", "{file}", "SUB-1", "a", "b"], "no cause or unit SUB-1; it has ADD"),
        (["bisect", "{counts}", "decode", "a", "b"], "no cause or unit decode; it has load, op/ROPE@n=64"),
        (["bisect", "{counts}", "load", "a", "b"], "several units load; it has perf/load/"),
        (["bisect", "{counts}", "op/ROPE@n=64", "a", "b"], "/a: no such file or folder"),
        (["bisect", "{file}", "ADD", "a", "b"], "/a: no such file or folder"),
        (["bisect", "{toml}", "ADD", "a", "b"], "past.toml"),
        (["state", "{toml}", "-o", "{page}"], "past.toml fault: is unknown; known: units, released"),
        (["state", "{days}", "-o", "{page}"], "days.toml released a: a day such as 2025-08-28 expected, 'May' found"),
    ],
)
def test_wrong_words_end_with_a_line(words: list[str], said: str, tmp_path: Path) -> None:
    """Exit code 2, and what was expected."""
    record = written_to(tmp_path / "run.json", RUN)
    toml = tmp_path / "past.toml"
    toml.write_text(TOML)
    days = tmp_path / "days.toml"
    days.write_text('[released]\na = "May"\n')
    counted = [u.id for u in BY_ID.values() if u.name in ("load", "op/ROPE@n=64")]
    counts = written_to(tmp_path / "counts.json", document([result(u, "ggml", "PASS") for u in counted]))
    names = {"file": record, "counts": counts, "toml": toml, "days": days, "page": tmp_path / "page"}
    ran = CliRunner().invoke(main, ["build", *(w.format(**names) for w in words)])
    assert (ran.exit_code, said in ran.output) == (2, True), ran.output


@needs_wheel
def test_a_build_on_which_no_case_ran_has_no_word_of_failures(tmp_path: Path) -> None:
    """With no time for a case, terminal and summary say that none ran and why; the exit code is not 0."""
    words = ("--device", "CPU", "--level", "smoke", "--budget", "1s", "-o", str(tmp_path))
    ran = CliRunner().invoke(main, ["build", "test", WHEEL, "--against", WHEEL, *words])
    assert ran.exit_code == 5, ran.output
    assert "no cases ran: " in ran.stdout
    assert "time limit (--budget)" in ran.stdout
    assert "failure" not in ran.stdout
    assert (tmp_path / "summary.md").read_text().startswith("# Conformance: no cases ran, ")


def test_the_state_of_builds_is_one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each build is tested once; one that cannot be tested is exit code 1 and no row, one not tested to the end 5."""
    tested = []

    def test(names: tuple[str, None], *about: Any, jobs: int | None) -> Any:  # noqa: ANN401, ARG001  # as `_tested`
        new, paths, day = names[0], about[4], about[5]
        tested.append(new)
        if new == "c":
            raise UnavailableError("build c: not there")
        backend = f"ggml?lib={new}"
        memory = result("memory/llama-real=1@1", backend, "PASS", metrics={"resident": 10.0})
        speed = result("perf/decode@past=0/llama-l=2@1", backend, "PASS", metrics={"instructions": 7.0, "seconds": 1.0})
        builds = {"build": {"name": new, "released": day}, "devices": [{"name": "CPU", "backend": backend}]}
        left = [{"backend": backend, "case": "zoo", "reason": "--budget", "cause": "time limit", "count": 9}]
        missing = {"missing": left} if new == "d" else {}
        written_to(paths[0], {**document([("ADD-1", backend, "FAIL"), memory, speed]), **missing, "builds": builds})
        return SimpleNamespace(interrupted=False)

    monkeypatch.setattr(commands, "_tested", test)
    toml, page = tmp_path / "builds.toml", tmp_path / "page"
    toml.write_text("[released]\nb = 2026-02-01\na = 2026-01-01\nc = 2026-03-01\n")
    for _ in range(2):
        ran = CliRunner().invoke(main, ["build", "state", str(toml), "-o", str(page)])
        assert (ran.exit_code, "could not be tested: build c: not there" in ran.output) == (1, True), ran.output
    assert tested == ["b", "a", "c", "c"]
    text = (page / "index.html").read_text()
    found = json.loads(text.split('id="data">')[1].split("</script>")[0])["builds"]
    assert [(b["name"], b["released"]) for b in found] == [("a", "2026-01-01"), ("b", "2026-02-01")]
    assert found[0]["figures"] == [["CPU", "llama", "resident", 10.0], ["CPU", "decode@past=0", "instructions", 7.0]]
    toml.write_text("[released]\nb = 2026-02-01\n")
    assert CliRunner().invoke(main, ["build", "state", str(toml), "-o", str(page)]).exit_code == 0
    toml.write_text("[released]\nd = 2026-02-01\n")
    for _ in range(2):
        ran = CliRunner().invoke(main, ["build", "state", str(toml), "-o", str(page)])
        assert (ran.exit_code, "no result for 9 cases" in ran.output) == (5, True), ran.output


def test_units_without_the_cpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would not be counted, and nothing would say so."""
    here = Build("x", Path("/x"), "", "", (DeviceOf("CPU", "CPU", "", False, ("CPU",)),), (), llama=False, left_out=())
    monkeypatch.setattr(prepare, "probe", lambda *_, **__: here)
    monkeypatch.setattr(commands, "check_callgrind", lambda: None)
    ran = CliRunner().invoke(main, ["build", "test", "x", "--unit", "op/*", "--device", "CPU threads"])
    assert (ran.exit_code, "--device CPU threads: CPU expected among them" in ran.output) == (2, True), ran.output


@needs_wheel
def test_a_budget_that_is_too_short_leaves_a_page(tmp_path: Path) -> None:
    """Exit code 5, and what did not run is in the record, whatever took the time; nothing is left beside it."""
    page = tmp_path / "page"
    words = ["build", "test", WHEEL, "--device", "CPU threads", "--level", "smoke", "--budget", "1s", "-o", str(page)]
    ran = CliRunner().invoke(main, words)
    assert ran.exit_code == 5, ran.output
    assert sorted(p.name for p in page.iterdir()) == ["index.html", "run.json", "summary.md"]
    found = json.loads((page / "run.json").read_text())
    assert {m["cause"] for m in found["missing"]} == {"time limit"}
    left = sum(m.get("count", 1) for m in found["missing"])
    assert left + len(found["results"]) == sum(found["asked"].values())


def test_a_vulkan_driver_on_the_cpu_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a device shows only if it is named."""
    vulkan = DeviceOf("Vulkan0", "CPU", "llvmpipe", software=True, buffer_types=("Vulkan0",))

    def probe(name: str, environment: Mapping[str, str] | None = None, isa: str = "") -> Build:
        devices = (vulkan,) if environment else ()
        return Build(name, Path("/x"), "0.26.0", "", devices, (), llama=False, left_out=(), isa=isa)

    monkeypatch.setattr(prepare, "probe", probe)
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "")  # what the test leaves behind is undone
    monkeypatch.delenv("GGML_VK_VISIBLE_DEVICES")
    assert prepare.inspect("x", lambda _: None).devices == (vulkan,)
    assert os.environ["GGML_VK_VISIBLE_DEVICES"] == "0"
