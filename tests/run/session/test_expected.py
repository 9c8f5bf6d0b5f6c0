"""Expected values on disk: what is found is what would be computed, whatever happens to the files; they are bounded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from conformance.case.case import Case
from conformance.cli import main
from conformance.ggml.arithmetic import EXACT, GGML_CPU, Arithmetic
from conformance.run import oracle
from conformance.run.execute import StepValues
from conformance.run.oracle import Oracle
from conformance.run.session import expected
from conformance.run.session.expected import PLACE, Expected, key
from conformance.run.session.select import build

OP = "ops/MUL_MAT-q4_0+f32-a=256x16,b=256x5x3@155"
CASES = (
    OP,
    "ops/SET_ROWS-bf16+f16+i64-a=31x6,n=5@266",
    "random/nodes=6,steps=4,d=16,w=q4_0,cache=f32@117",
    "kv_growth/llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,fa=0,run=at254.d4.back3.d2@457",
)
FLASH = (
    "tbo/FLASH_ATTN_EXT(hsk=128,hsv=128,nh=4,nr23=[1,1],kv=512,nb=3,mask=0,sinks=0,max_bias=0.000000,"
    "logit_softcap=0.000000,prec=f32,type_K=f16,type_V=f16,permute=[0,1,2,3],kv_view=1,v_is_view_of_k=0,n_kv_max=0)@0"
)
LOADED = "import sys, backends.cpu; print(*(m.__file__ for n, m in sys.modules.items() if n[:4] in ('conf', 'back')))"


@pytest.fixture
def worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case is worth a file."""
    monkeypatch.setattr(expected, "WORTH", 0)
    monkeypatch.setattr(expected, "PER_BYTE", 0)


def _values(place: Path, cases: Sequence[Case], arithmetic: Arithmetic = GGML_CPU) -> list[list[StepValues]]:
    with closing(Oracle(disk=Expected(place))) as it:
        return [e.steps for e in it.expect(cases, arithmetic)]


def _bytes(values: list[StepValues]) -> list[list[bytes]]:
    return [[v.all[t].tobytes() for t in (*v.outputs, *v.caches)] for v in values]


def _files(place: Path) -> list[Path]:
    return [p for p in place.rglob("*") if p.is_file()]


def _refuse(_: object, cases: Sequence[Case]) -> list[list[StepValues]]:
    assert not cases, f"{cases} computed again"
    return []


@pytest.mark.usefixtures("worth")
def test_a_later_run_finds_what_this_one_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and caches of every step, to the bit, for the same ids built anew; nothing is computed for them."""
    first = _values(tmp_path, list(map(build, CASES)))
    monkeypatch.setattr(oracle, "run_together", _refuse)
    again = _values(tmp_path, list(map(build, CASES)))
    assert [sorted(map(sorted, _bytes(v))) for v in again] == [sorted(map(sorted, _bytes(v))) for v in first]
    assert all(v.outputs or v.caches for values in again for v in values)


@pytest.mark.usefixtures("worth")
@pytest.mark.parametrize("how", ["flipped", "cut", "longer", "empty"])
def test_a_file_that_was_damaged_is_computed_again(tmp_path: Path, how: str) -> None:
    """Wherever a byte is wrong, missing or too many: no wrong value is found, and the next run finds the right one."""
    case = build(OP)
    (right,) = map(_bytes, _values(tmp_path, [case]))
    (path,) = _files(tmp_path)
    whole = path.read_bytes()
    for i in range(0, len(whole), 97):
        flipped = whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :]
        path.write_bytes({"flipped": flipped, "cut": whole[:i], "longer": whole + whole[: i + 1], "empty": b""}[how])
        assert list(map(_bytes, _values(tmp_path, [case]))) == [right]
        assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("case", "cached"),
    [
        ("SOFT_MAX-f32-ne=1024x1024", False),
        ("MUL_MAT-f32+f32-a=4096x1024,b=4096x1", False),
        ("MUL_MAT-f32+f32-a=512x512,b=512x512", True),
        ("ADD-f32+f32-a=7x5", False),
    ],
)
def test_only_what_takes_longer_than_its_digest_is_cached(tmp_path: Path, case: str, cached: bool) -> None:
    """Exponentials take no longer than reading their bytes; a product of squares does."""
    assert (Expected(tmp_path).entry(build(f"ops/{case}@1"), EXACT) is not None) is cached


def test_a_sum_in_f16_counts_term_by_term(tmp_path: Path) -> None:
    """The same attention is cached only in the arithmetic that rounds after each cell."""
    case = build(FLASH)
    entries = [Expected(tmp_path).entry(case, replace(EXACT, flash_attn_sum=to)) for to in ({}, {"f16": "f16"})]
    assert [e is not None for e in entries] == [False, True]


@given(st.data())
def test_other_content_has_another_name(data: st.DataObject) -> None:
    """One bit of any leaf, an op param or another arithmetic is another name; another id of the same content is not."""
    case = build(data.draw(st.sampled_from(CASES)))
    name = key(case, GGML_CPU)
    assert key(replace(case, id="other/id@1", seed=5), GGML_CPU) == name != key(case, EXACT)
    leaves = [x for d in (case.persistent, *(s.inputs for s in case.steps)) for x in d.items() if x[1].nbytes]
    t, held = data.draw(st.sampled_from(leaves))
    changed = held.copy()
    changed[data.draw(st.integers(0, held.nbytes - 1))] ^= np.uint8(1 << data.draw(st.integers(0, 7)))
    own = next(d for d in (case.persistent, *(s.inputs for s in case.steps)) if t in d)
    own[t] = changed
    assert key(case, GGML_CPU) != name
    own[t] = held
    node = data.draw(st.sampled_from([n for s in case.steps for n in s.graph]))
    params = node.op_params
    node.op_params = (params[0] + 1, *params[1:])
    assert key(case, GGML_CPU) != name
    node.op_params = params
    assert key(case, GGML_CPU) == name


def test_the_name_knows_all_code_that_computes(tmp_path: Path) -> None:
    """Every module that the reference loads is among the files, and a change of any file is another version."""
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    loaded = {Path(p) for p in done.stdout.split()}
    assert {p for p in loaded - set(expected.files()) if p.parent.name not in {"backends", "conformance"}} == set()
    assert any(p.name == "matmul.py" for p in loaded)
    copies = []
    for i, path in enumerate(expected.files()):
        copies.append(tmp_path / str(i) / path.name)
        copies[-1].parent.mkdir()
        copies[-1].write_bytes(path.read_bytes())
    assert expected.digest(copies) == expected.code()
    for copy in copies:
        held = copy.read_bytes()
        copy.write_bytes(held + b"#")
        assert expected.digest(copies) != expected.code()
        copy.write_bytes(held)


@pytest.mark.usefixtures("worth")
def test_the_folder_stays_within_its_limit(tmp_path: Path) -> None:
    """What was not read for longest goes; a value that alone is an eighth of the limit is not kept."""
    cases = [build(f"{OP.rpartition('@')[0]}@{seed}") for seed in range(24)]
    limit = 16 * 4096
    for k, case in enumerate(cases):
        kept = Expected(tmp_path, limit)
        entry = kept.entry(case, EXACT)
        assert entry is not None
        kept.add(entry, _values(tmp_path / "other", [case], EXACT)[0])
        os.utime(entry.path, (k, k))
        kept.trim()
        left = [p for p in _files(tmp_path) if "other" not in p.parts]
        assert len(left) * 4096 <= limit
        assert entry.path in left
    assert Expected(tmp_path, 8 * 900).entry(cases[0], EXACT) is None


@pytest.mark.usefixtures("worth")
def test_what_a_killed_process_left_is_deleted(tmp_path: Path) -> None:
    """An unfinished file of over an hour ago; one of a process that may be alive stays."""
    for name, age in (("old", 4000), ("new", 10)):
        path = tmp_path / "ab" / f".unfinished-{name}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"torn")
        stamp = path.stat().st_mtime - age
        os.utime(path, (stamp, stamp))
    _values(tmp_path, [build(OP)])
    assert sorted(p.name for p in (tmp_path / "ab").iterdir() if p.name.startswith(".")) == [".unfinished-new"]


def test_processes_share_the_folder(tmp_path: Path) -> None:
    """Two at once over the same case: all of them pass, and one whole file is left."""
    words = [sys.executable, "-m", "conformance.cli", "run", "--backend", "ggml"]
    words += ["--case", "ops/MUL_MAT-f32+f32-a=512x512,b=512x512@1"]
    runs = [subprocess.Popen(words, env={**os.environ, PLACE: str(tmp_path)}) for _ in range(2)]
    assert [r.wait() for r in runs] == [0, 0]
    (path,) = _files(tmp_path)
    assert not path.name.startswith(".")
    assert path.stat().st_size == 8 + 4 * 512 * 512


@pytest.mark.usefixtures("worth")
def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    """A file stands where the folder should be: values are computed as ever."""
    (tmp_path / "file").write_bytes(b"")
    case = build(OP)
    assert list(map(_bytes, _values(tmp_path / "file", [case]))) == list(map(_bytes, _values(tmp_path, [case])))


@pytest.mark.usefixtures("worth")
def test_it_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty variable keeps nothing; without it, one run keeps what the next one takes."""
    words = ["run", "--backend", "ggml", "--case", OP]
    monkeypatch.setenv(PLACE, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert CliRunner().invoke(main, words).exit_code == 0
    assert not _files(tmp_path)
    monkeypatch.delenv(PLACE)
    assert CliRunner().invoke(main, words).exit_code == 0
    assert _files(tmp_path / "ggml-conformance" / "expected")
    monkeypatch.setattr(oracle, "run_together", _refuse)
    assert CliRunner().invoke(main, words).exit_code == 0
