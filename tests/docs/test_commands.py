"""Every command of README.md and docs/ is run as it stands there and prints what stands there.

`classes.py` says which commands cannot be run, and what is tested of these.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import builds_made
import click
import pytest
from builds_made import pair
from classes import (
    EVERY,
    EXIT,
    FOREIGN,
    NAMED,
    OTHERS,
    PARSED,
    RUN,
    SHELL,
    STAND_INS,
    chosen,
    class_of,
    every_option,
    filled,
    of_class,
    options_in,
    parse,
)
from click.testing import CliRunner
from documents import DOCUMENTS, ROOT, Command, blocks, commands, mentioned_options, pattern
from environments import environment, install
from marks import needs_wheel

from conformance.causes import rank
from conformance.cli import COMMANDS, main
from conformance.cli.options import PERF, PERF_RUN
from conformance.cli.options import RUN as OPTIONS
from conformance.run.session.select import build

KNOWN = ("ops/SUM-f32-ne=5x3,vne=p1023@1", "ops/GET_ROWS-f32+i32-a=33x7,n=12,va=p1023@1", "ops/SUM-f32-ne=5x3@1")
"""What ggml gets wrong for good (docs/measurements/findings/ggml.md)."""
EMPTY = ("builds.toml", "gates.toml", "profile.toml", "vulkan.toml", "own.gguf", "capture.json", "venv/bin/python")
"""Files that the parser alone looks at."""
RAN: set[str] = set()
"""What ran in this process: the same words in a second document run again only if they write or show something."""
WRITES = {"-o", "--json", "--save-failures"}
PROGRESS = re.compile(r"(?m)^[\d,]+ of [\d,]+ on \d+ workers.*\n")
"""Lines of a run that takes seconds, because the machine is busy."""
CHECKOUT = "PATH_OF_THIS_CHECKOUT/"
TREES = {
    "README.md": ("ggml_compute_forward_cumsum", "build", "build.old"),
    "docs/builds.md": ("ggml_compute_forward_cumsum", "build", "build.old"),
    "docs/guides/my-edit.md": ("ggml_compute_forward_cumsum", "build", "build.old"),
    "docs/guides/bump-llama-cpp.md": ("ggml_compute_forward_group_norm", "new", "old"),
}
"""Documents that compare two builds: a function of which one addition subtracts, and names of both builds."""
RUNS = tuple(d for d in DOCUMENTS if any(c.document == d for c in of_class("run")))


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what words in capitals stand for: one small run, a failing case of it, a model, empty folders."""
    folder = tmp_path_factory.mktemp("desk")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        cases = [word for case in KNOWN for word in ("--case", case)]
        _in_process(f"conform run --backend ggml {shlex.join(cases)} --json run.json --save-failures kept")
        _in_process("conform capture llama --model -o tiny.gguf")
    (folder / "ops.txt").touch()
    for night in ("nights", "nightly/2026-11-21"):
        (folder / night).mkdir(parents=True)
        shutil.copy(folder / "run.json", folder / night)
    for name in ("venv/bin", "failures", "ci"):
        (folder / name).mkdir(parents=True)
    for name in ("case.gguf", "kept/case.gguf", "failures/case.gguf"):
        shutil.copy(next((folder / "kept").glob("*SUM*")), folder / name)
    for name in EMPTY:
        (folder / name).touch()
    return folder


@pytest.fixture(autouse=True, scope="module")
def few_architectures() -> Iterator[None]:
    """`conform triage` counts no architectures: llama.cpp lays most of them out, in a minute and a half."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank, "_laid_out", lambda *_: ({"one": []}, 1))
        yield


@needs_wheel
@pytest.mark.parametrize("document", RUNS)
def test_what_a_document_shows_happens(
    document: str, desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commands, one after the other in one folder, end as the text says, and print what it shows, line by line."""
    shutil.copytree(desk, tmp_path, dirs_exist_ok=True)
    if document in TREES:
        if platform.machine() != "x86_64":
            pytest.skip("edits an instruction of x86-64")
        function, new, old = TREES[document]
        pair(function, tmp_path / new, tmp_path / old)
    monkeypatch.chdir(tmp_path)
    files = [block for block in blocks(document) if block.file]
    mine = [c for c in of_class("run") if c.document == document]
    run = _in_shell(tmp_path) if document in SHELL else _run
    wrong = []
    for c in mine:
        while files and files[0].line < c.line:
            block = files.pop(0)
            Path(block.file).write_text("\n".join(block.lines) + "\n", encoding="utf-8")
        text = _short(c)
        if c.shown or c.document in SHELL or text not in RAN or WRITES & set(c.words):
            wrong.append(_held(c, run(text)))
        RAN.add(text)
    assert not any(wrong), "\n".join(filter(None, wrong))


def _short(c: Command) -> str:
    """What runs in place of a command: with words that exist, and shorter where commands.toml says so."""
    text, entry = c.text, RUN.get(c.text, {})
    for old, new in entry.get("replace", {}).items():
        text = text.replace(old, new)
    return filled(f"{text} {entry.get('add', '')}".strip())


def _held(c: Command, done: tuple[int, str]) -> str:
    """What is wrong with how a command ended, and with what it printed; empty where nothing is."""
    code, output = done
    due = RUN.get(c.text, {}).get("exit", EXIT.get(c.document, int(bool(c.shown) and _shows_a_failure(c))))
    if code not in (due if isinstance(due, list) else [due]):
        return f"{c.where}: {c.text}\nexit code {code}, {due} expected:\n{output}"
    output = PROGRESS.sub("", output)
    if c.shown and not pattern(c.shown).fullmatch(output.strip()):
        return f"{c.where}: {c.text}\nprints\n{output}\nand the document shows\n" + "\n".join(c.shown)
    return ""


def _shows_a_failure(c: Command) -> bool:
    return any(line.startswith(("FAIL", "CRASH", "XPASS", "OVERCLAIM", "TIMEOUT")) for line in c.shown or ())


def _run(text: str) -> tuple[int, str]:
    """Exit code and output: `conform` in this process, pytest in one of its own."""
    if text.startswith("conform"):
        return _in_process(text)
    # the desk is no checkout, and lasts no longer than the test
    words = [sys.executable, "-m", *shlex.split(text), "-p", "no:cacheprovider"]
    if "--pyargs" not in words:
        words.insert(3, "--pyargs")
    return _process(words)


def _in_process(text: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, shlex.split(text)[1:], catch_exceptions=False)
    return done.exit_code, done.output


def _process(words: list[str], **variables: str) -> tuple[int, str]:
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=300,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **variables},
    )  # fmt: skip
    return done.returncode, done.stdout


def _in_shell(folder: Path) -> Callable[[str], tuple[int, str]]:
    """A runner of commands in a shell, in a fresh environment into which each new adapter is installed."""
    python = environment(folder / ".venv")
    path = os.pathsep.join([str(python.parent), os.environ["PATH"]])

    def run(text: str) -> tuple[int, str]:
        done = _process(["bash", "-c", text], PATH=path)
        if " new-adapter " in text:
            install(python, folder / shlex.split(text)[2], "--editable")
        return done

    return run


@needs_wheel
@pytest.mark.parametrize("c", of_class("parsed"), ids=lambda c: c.where)
def test_the_parser_takes_what_is_not_run(
    c: Command, desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every word down to each option; backends that the page's conformance.toml names; and each case id builds."""
    shutil.copytree(desk, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for block in blocks(c.document):
        if block.file:
            Path(block.file).write_text("\n".join(block.lines) + "\n", encoding="utf-8")
    context = parse(filled(c.text))
    for case in context.params.get("cases") or ():
        if not set("*?") & set(case):
            build(case)


@pytest.mark.parametrize("c", of_class("named"), ids=lambda c: c.where)
def test_what_is_named_exists(c: Command) -> None:
    """The command, and each option beside it."""
    if c.program == "pytest":
        known = {o.name for o in (*OPTIONS, PERF, *PERF_RUN)} | {"-n", "--pyargs", "--hypothesis-show-statistics"}
        assert set(options_in(c.words)) <= known
        return
    command, rest = chosen(c.words[1:])
    known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
    assert set(options_in(rest)) <= known


@pytest.mark.parametrize("c", of_class("other"), ids=lambda c: c.where)
def test_scripts_of_the_tree_are_there(c: Command) -> None:
    """A file or module of ours in the words of another program exists."""
    for word in c.words[1:]:
        path = word.removeprefix(CHECKOUT)
        if path.startswith(("tests/", "ci/")) and not path.endswith(".txt"):
            assert (ROOT / path).exists()
        if word.startswith(("backends.", "conformance.")):
            assert (ROOT / word.replace(".", "/")).exists()


def test_options_in_the_text_exist() -> None:
    """Inline code that begins with an option names one of ours, or one that `foreign` knows; none there is stale."""
    mentioned = [(f"{d}:{n}", option) for d in DOCUMENTS for n, option in mentioned_options(d)]
    known = every_option()
    assert [(where, option) for where, option in mentioned if option not in known and option not in FOREIGN] == []
    assert set(FOREIGN) <= {option for _, option in mentioned} - known
    assert len(mentioned) > 50


def test_the_numbers_of_cases_in_the_readme_are_true() -> None:
    """`--level smoke|standard|full`: the first two digits of the number that `conform list cases` lists."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"the levels have over ([\d,]+), ([\d,]+) and ([\d,]+)", text)
    listed = [
        _in_process(f"conform list cases --level {level}")[1].count("\n") for level in ("smoke", "standard", "full")
    ]
    assert list(shown) == [f"{int(n / 10**k) * 10**k:,}" for n in listed for k in [len(str(n)) - 2]]


def test_every_command_is_in_a_class() -> None:
    """A program that nobody put into a class is an error, and so are rules that find too little."""
    assert [f"{c.where}: {c.text}" for c in EVERY if not class_of(c)] == []
    assert len(of_class("run")) > 50


def test_the_guides_are_run_whole() -> None:
    """Each command of the five is run, or named alone; the fixtures do what installs and builds."""
    guides = [c for c in EVERY if c.document.startswith("docs/guides/")]
    assert len({c.document for c in guides}) == 5
    assert [f"{c.where}: {c.text}" for c in guides if class_of(c) not in {"run", "named", "other"}] == []
    assert [c.where for c in guides if class_of(c) == "named" and tuple(options_in(c.words))] == []
    assert {c.program for c in guides if class_of(c) == "other"} == {"pip", "python", ".", "cp", "cmake", "mkdir"}


def test_a_guide_says_how_to_make_its_builds() -> None:
    """The script and its words are those by which the guide's commands are tested."""
    made = {c.document: c.words[1:] for c in EVERY if "builds_made.py" in c.text}
    guides = {d: (builds_made.__file__, *words) for d, words in TREES.items() if d.startswith("docs/guides/")}
    assert {d: (str(ROOT / words[0].removeprefix(CHECKOUT)), *words[1:]) for d, words in made.items()} == guides


def test_inline_commands_are_found_and_run(tmp_path: Path) -> None:
    """Code in prose may continue on the next line; it is run unless it is a name, or lacks what it requires."""
    page = tmp_path / "page.md"
    page.write_text(
        "# `conform show FILE`\n\nUse `conform repro\nFILE`, then `conform\nrun`.\n- `conform run --seed`\n\n"
        "| `conform perf gate` |\n"
    )
    found = commands(str(page))
    assert [(c.line, c.place, c.text) for c in found] == [
        (1, "prose", "conform show FILE"),
        (3, "prose", "conform repro FILE"),
        (4, "prose", "conform run"),
        (6, "prose", "conform run --seed"),
        (8, "table", "conform perf gate"),
    ]
    assert [class_of(c) for c in found] == ["run", "run", "named", "named", "parsed"]


def test_no_entry_of_the_table_is_stale() -> None:
    """Each entry of commands.toml is about a command that a document shows, and each replaced text stands in it."""
    shown = {c.text for c in EVERY}
    run = {c.text for c in of_class("run")}
    programs = {c.program for c in of_class("other")}
    assert [text for text in PARSED if text not in shown and text not in DOCUMENTS] == []
    assert [text for text in RUN if text not in run] == []
    assert [program for program in OTHERS if program not in programs] == []
    assert [d for d in (*EXIT, *SHELL) if d not in RUNS] == []
    assert [text for text in NAMED if text not in {c.text for c in of_class("named")}] == []
    assert [old for text, entry in RUN.items() for old in entry.get("replace", {}) if old not in text] == []
    assert [word for word in STAND_INS if not any(word in text for text in shown)] == []
    assert all(entry["why"] for entry in RUN.values())


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        (("1 PASS  0.20 s",), "1 PASS     17.31 s", True),
        (("1 PASS  0.20 s",), "2 PASS     0.20 s", False),
        (("a b", "c"), "a b c", True),
        (("a …", "d"), "a b\nc\nd", True),
        (("a", "d"), "a\nb\nd", False),
        (("budget 2.8 %",), "budget 3.1 %", True),
        (("2.7e-07",), "3.1e-08", True),
        (("NMSE 5e-12",), "NMSE 6e-12", False),
        (("2.63973475 expected",), "2.63973999 expected", True),
        (("2.63973475 expected",), "2.64973475 expected", False),
        (("a. b",), "ax b", False),
        (("exit 3",), "exit 4", False),
    ],
)
def test_what_counts_as_the_same_output(shown: tuple[str, ...], printed: str, same: bool) -> None:
    """Seconds and per cent may be others, lines may be broken elsewhere, `…` stands for any text; nothing else."""
    assert bool(pattern(shown).fullmatch(printed)) is same


def test_every_command_of_ours_is_in_a_document() -> None:
    """Whoever reads the documents meets each `conform` command."""
    assert [name for name in COMMANDS if not any(c.words[1:2] == (name,) for c in EVERY)] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("conform run --levle smoke", "--levle"),
        ("conform rum", "no command 'rum'"),
        ("conform run --level huge", "huge"),
        ("conform repro no-such-file.gguf", "no-such-file.gguf"),
        ("conform shrink", "Missing argument"),
    ],
)
def test_a_false_command_is_noticed(text: str, said: str) -> None:
    """What the parser refuses is an error of the document, and names the word."""
    with pytest.raises(click.UsageError) as e:
        parse(text)
    assert said in f"{e.value.format_message()} {e.value}"


def test_a_word_without_a_stand_in_and_a_program_without_a_class_are_noticed() -> None:
    """Neither passes unseen."""
    with pytest.raises(AssertionError, match="what does WHATEVER stand for"):
        filled("conform repro WHATEVER")
    assert class_of(Command("README.md", 1, "sh", "ninja conform")) == ""
    assert class_of(Command("README.md", 1, "sh", "conform run")) == "run"


def test_what_a_run_does_otherwise_than_shown_is_noticed() -> None:
    """Another exit code and another output are each a sentence with the place; the same is none."""
    c = Command("README.md", 7, "console", "conform list cases", ("a", "…"))
    assert _held(c, (0, "a\nb\n")) == ""
    assert _held(c, (0, "0 of 80 on 2 workers; waiting: 48 of x\na\nb\n")) == ""
    assert "README.md:7" in _held(c, (0, "b\n"))
    assert "exit code 1, 0 expected" in _held(c, (1, "a\nb\n"))
