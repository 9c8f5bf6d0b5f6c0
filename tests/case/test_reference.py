"""Weights that stay in their model file: found by name, held to a digest, and of no use to a stranger's case file."""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from random_cases import small_case

from conformance.case import casefile
from conformance.case.codec import dump
from conformance.case.reference import FOLDERS, Reference, load_references
from conformance.cli import main
from conformance.ggml.errors import CaseFileError
from conformance.llama.zoo import family as zoo

OFFSET = 100


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A case file whose weight lies in `model.gguf` beside it."""
    monkeypatch.delenv(FOLDERS, raising=False)
    case = small_case()
    weight, data = next(iter(case.persistent.items()))
    (tmp_path / "model.gguf").write_bytes(bytes(OFFSET) + data.tobytes() + bytes(50))
    case.references = {weight: Reference("model.gguf", OFFSET)}
    casefile.write(tmp_path / "case.gguf", case)
    return tmp_path / "case.gguf"


def test_the_same_case_comes_back(path: Path) -> None:
    """Read beside its model the case is the one with embedded weights, in a file that lacks their bytes."""
    case = casefile.read_one(path)
    assert next(iter(case.persistent.values())).tobytes() not in path.read_bytes()
    (doc, blobs), (want, expected) = dump(case), dump(small_case())
    assert doc == want
    assert {k: v.tobytes() for k, v in blobs.items()} == {k: v.tobytes() for k, v in expected.items()}
    assert list(case.references.values()) == [Reference("model.gguf", OFFSET)]


def test_written_again_it_is_the_same_file(path: Path) -> None:
    """What was read by reference is written by reference."""
    again = path.with_name("again.gguf")
    casefile.write(again, casefile.read_one(path))
    assert again.read_bytes() == path.read_bytes()


def test_the_user_may_say_where_the_model_is(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Away from its model the file is refused with what to do, and read once a folder is named."""
    (tmp_path / "other").mkdir()
    moved = path.rename(tmp_path / "other" / "case.gguf")
    with pytest.raises(CaseFileError, match=f"'model.gguf' was not found: .* {FOLDERS}"):
        casefile.read_one(moved)
    assert casefile.read_one(moved, models=[tmp_path]).references
    monkeypatch.setenv(FOLDERS, os.pathsep.join([str(tmp_path / "nowhere"), str(tmp_path)]))
    assert casefile.read_one(moved).references


@pytest.mark.parametrize("at", [OFFSET, OFFSET + 40])
def test_a_model_that_has_changed_is_refused(path: Path, at: int) -> None:
    """One other byte in what is used is another model."""
    model = path.with_name("model.gguf")
    data = bytearray(model.read_bytes())
    data[at] ^= 1
    model.write_bytes(data)
    with pytest.raises(CaseFileError, match="is not the recorded model"):
        casefile.read_one(path)


def test_a_model_of_another_size_is_refused(path: Path) -> None:
    """A file that ends too early, is empty or is a folder is one clear error."""
    model = path.with_name("model.gguf")
    model.write_bytes(model.read_bytes()[: OFFSET + 9])
    with pytest.raises(CaseFileError, match=f"from {OFFSET} on expected, 'model.gguf' has {OFFSET + 9}"):
        casefile.read_one(path)
    model.write_bytes(b"")
    with pytest.raises(CaseFileError, match="was not found"):
        casefile.read_one(path)
    model.unlink()
    model.mkdir()
    with pytest.raises(CaseFileError, match="was not found"):
        casefile.read_one(path)


def _entry(**other: object) -> dict[str, object]:
    data = bytes(range(10))
    entry: dict[str, object] = {
        "persistent": 0,
        "file": "m.gguf",
        "offset": 0,
        "size": 10,
        "sha256": sha256(data).hexdigest(),
    }
    return entry | other


@pytest.mark.parametrize(
    ("entries", "field"),
    [
        ({}, "references"),
        ([[]], "references[0]"),
        ([{**_entry(), "more": 1}], "references[0]"),
        ([_entry(offset=-1)], "references[0].offset"),
        ([_entry(offset=2**63)], "references[0].offset"),
        ([_entry(offset=True)], "references[0].offset"),
        ([_entry(size=0)], "references[0].size"),
        ([_entry(size=10.0)], "references[0].size"),
        ([_entry(size=2**62)], "references[0]"),
        ([_entry(offset=1)], "references[0]"),
        ([_entry(sha256="0" * 64)], "references[0].sha256"),
        ([_entry(sha256=0)], "references[0].sha256"),
        ([_entry(), _entry()], "references[1].persistent"),
        ([_entry(), _entry(persistent=1)], "references[1]"),
        ([_entry(file="absent.gguf")], "references[0].file"),
        *(
            ([_entry(file=name)], "references[0].file")
            for name in (
                "", ".", "..", "../m.gguf", "/etc/passwd", "a/m.gguf", "a\\m.gguf", "c:m.gguf", ".hidden", "m\0.gguf",
                "m\n.gguf", "m" * 300, "\ud800",
            )
        ),
    ],
)  # fmt: skip
def test_a_stranger_s_entry_is_refused(tmp_path: Path, entries: object, field: str) -> None:
    """Whatever an entry says, it names no place, reads no byte twice and nothing outside the file."""
    (tmp_path / "m.gguf").write_bytes(bytes(range(10)))
    with pytest.raises(CaseFileError) as e:
        load_references(entries, [tmp_path])
    assert e.value.field == field
    assert str(e.value).isprintable()


def test_a_pipe_is_no_model(tmp_path: Path) -> None:
    """What is no regular file is not opened: reading it could wait for ever."""
    make: Callable[[Path], None] | None = getattr(os, "mkfifo", None)
    if make is None:
        pytest.skip("no pipes with names here")
    make(tmp_path / "m.gguf")
    with pytest.raises(CaseFileError, match="was not found"):
        load_references([_entry()], [tmp_path])


def test_bytes_are_mapped_and_cannot_be_written_to(tmp_path: Path) -> None:
    """A view of the file itself: a model of gigabytes takes no memory of its own, and stays what it is."""
    (tmp_path / "m.gguf").write_bytes(bytes(range(10)))
    blobs, found = load_references([_entry()], [tmp_path])
    assert found == {0: Reference("m.gguf", 0)}
    assert blobs["p0"].tolist() == list(range(10))
    with pytest.raises(ValueError, match="read-only"):
        blobs["p0"][0] = 1
    assert type(blobs["p0"]) is np.ndarray


@pytest.mark.skipif(bool(zoo.available()), reason=zoo.available() or "llama.cpp is here")
def test_a_recording_of_a_model_file(tmp_path: Path) -> None:
    """Recorded by reference the case is the same, smaller by its weights, and passes on ggml."""
    model, whole, light = (str(tmp_path / n) for n in ("m.gguf", "whole.gguf", "light.gguf"))
    run = CliRunner()
    assert run.invoke(main, ["capture", "llama", "--model", "--set", "block_count=1", "-o", model]).exit_code == 0
    for path, how in ((whole, "embedded"), (light, "reference")):
        done = run.invoke(main, ["capture", model, "-o", path, "--weights", how, "--run", "p5.d1"])
        assert done.exit_code == 0, done.output
    assert "weights are in m.gguf" in done.output
    a, b = casefile.read_one(whole), casefile.read_one(light)
    (doc, blobs), (want, expected) = dump(b), dump(a)
    assert doc == want
    assert {k: v.tobytes() for k, v in blobs.items()} == {k: v.tobytes() for k, v in expected.items()}
    saved = sum(b.persistent[t].nbytes for t in b.references)
    assert Path(light).stat().st_size < Path(whole).stat().st_size - saved // 2
    replayed = run.invoke(main, ["repro", light, "--backend", "ggml"])
    assert replayed.exit_code == 0, replayed.output


def test_only_a_model_file_can_be_referred_to(tmp_path: Path) -> None:
    """`--arch` has no file that weights could stay in."""
    done = CliRunner().invoke(main, ["capture", "llama", "--weights", "reference", "-o", str(tmp_path / "a.gguf")])
    assert done.exit_code == 2
    assert "only with a model file" in done.output
