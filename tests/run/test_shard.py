"""Shards of a run: together the whole, no case twice, and a missing one is noticed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from sessions_of_pytest import session

from conformance.cli import main
from conformance.ggml.errors import UsageError
from conformance.run.session.shard import LARGEST, WHOLE, Shard, missing, parse, whole
from conformance.suite import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
IDS = st.lists(st.builds("{}/{}@{}".format, st.sampled_from("abc"), st.text("xyz", max_size=3), st.integers(0, 99)))
OF = st.integers(1, 12)


@given(IDS, OF)
def test_shards_make_the_whole_and_share_nothing(ids: list[str], of: int) -> None:
    """All shards' shares together are the ids, each once; each share keeps their order."""
    shares = [Shard(k, of).share(ids) for k in range(1, of + 1)]
    assert sorted(i for s in shares for i in s) == sorted(set(ids))
    order = list(dict.fromkeys(ids))
    assert all(s == [i for i in order if i in s] for s in shares)


@given(IDS, OF)
def test_each_family_is_dealt_evenly(ids: list[str], of: int) -> None:
    """No shard has over one case more of a family than another."""
    for family in "abc":
        counts = [sum(i.startswith(family) for i in Shard(k, of).share(ids)) for k in range(1, of + 1)]
        assert max(counts) - min(counts) <= 1


@given(IDS, OF, st.randoms())
def test_who_lists_the_same_cases_deals_alike(ids: list[str], of: int, shuffle: random.Random) -> None:
    """Neither the order of the ids nor one that occurs twice decides whose a case is, nor what the whole is called."""
    other = [*ids, *ids[:1]]
    shuffle.shuffle(other)
    assert all(set(Shard(k, of).share(ids)) == set(Shard(k, of).share(other)) for k in range(1, of + 1))
    assert whole(ids) == whole(other)


def test_a_share_is_the_same_on_every_machine() -> None:
    """The deal is a function of the ids alone, fixed for all Pythons: a hash of this process would give another."""
    ids = [f"f/{n}@1" for n in range(8)]
    assert [Shard(k, 3).share(ids) for k in (1, 2, 3)] == SHARES
    assert whole(ids) == DIGEST


SHARES = [["f/4@1", "f/6@1", "f/7@1"], ["f/0@1", "f/2@1", "f/5@1"], ["f/1@1", "f/3@1"]]
DIGEST = "53bd76509ac31dbc"


def test_small_families_do_not_all_begin_with_the_first_shard() -> None:
    """Families of one case each are spread."""
    ids = [f"family{n}/x@1" for n in range(64)]
    counts = [len(Shard(k, 4).share(ids)) for k in range(1, 5)]
    assert min(counts) >= 8


@given(OF, st.integers(1, 12))
def test_texts_come_back(of: int, index: int) -> None:
    """`I/N` is read as it is written; one index over the number is refused."""
    if index <= of:
        assert parse(str(Shard(index, of))) == Shard(index, of)
    else:
        with pytest.raises(UsageError):
            parse(f"{index}/{of}")


WRONG = ["", "1", "0/1", "2/1", "01/2", "1/02", "1/0", "-1/2", "1/2 ", "1/2\n", "1/10000", "a/b", "¹/2"]


@pytest.mark.parametrize("text", WRONG)
def test_wrong_texts_are_one_line(text: str) -> None:
    """Any other text is refused with what was expected, exit code 2."""
    result = CliRunner().invoke(main, ["run", "--shard", text])
    assert result.exit_code == 2
    assert result.output == f"conform: --shard {text!r}: I/N with 1 <= I <= N <= {LARGEST} expected, as 2/4\n"


def test_missing_shards_are_named() -> None:
    """Shards of one whole complete each other; those of another whole do not."""
    ids = ["f/1@1", "f/2@1"]
    first, third, other = Shard(1, 3).to_json(ids), Shard(3, 3).to_json(ids), Shard(2, 3).to_json(ids[:1])
    assert missing([]) == []
    assert missing([Shard(2, 3).to_json(ids), first, third]) == []
    assert missing([first, third]) == ["shard 2 of 3 is missing: about 33 % of the cases did not run"]
    assert len(missing([first, third, other])) == 2


def test_the_command_line_and_pytest_deal_alike(tmp_path: Path) -> None:
    """`conform run` and `pytest conformance` give a shard the same cases and their documents the same name of it."""
    words = ["--backend", "ggml", "--family", "ops", "--case", "ops/ADD-*", "--shard", "2/2", "--json"]
    run = CliRunner().invoke(main, ["run", *words, str(tmp_path / "a.json")])
    assert run.exit_code == 0, run.output
    assert session(*words, str(tmp_path / "b.json")).returncode == 0
    a, b = (json.loads((tmp_path / n).read_text()) for n in ("a.json", "b.json"))
    ids = [i for i in FAMILIES["ops"].ids("smoke") if i.startswith("ops/ADD-")]
    assert {r["case"] for r in a["results"]} == {r["case"] for r in b["results"]} == set(Shard(2, 2).share(ids))
    assert a["shard"] == b["shard"] == Shard(2, 2).to_json(ids)


def test_one_shard_is_the_whole(tmp_path: Path) -> None:
    """1/1 takes everything and its document speaks of no shard."""
    assert parse("1/1") == WHOLE
    assert WHOLE.share(["b/1", "a/1", "b/1"]) == ["b/1", "a/1"]
    out = tmp_path / "r.json"
    case = FAMILIES["ops"].ids("smoke")[0]
    CliRunner().invoke(main, ["run", "--backend", "ggml", "--case", case, "--shard", "1/1", "--json", str(out)])
    assert "shard" not in json.loads(out.read_text())
