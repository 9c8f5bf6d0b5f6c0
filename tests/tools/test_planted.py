"""Planted faults: they are where the table says, the suite notices them, and a crash or a hang is noticed too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from night_script import lives, until

from conformance.cli import main
from conformance.ggml.errors import UsageError
from conformance.judge.verdict import FAILURES, Verdict
from conformance.planted import campaign
from conformance.planted.campaign import Hunter
from conformance.planted.faults import FOLDER, ROOT, Fault, control, load, read
from conformance.suite import FAMILIES

FAULTS = {f.name: f for f in read([FOLDER])}
ABORTS = Fault(
    "aborts", "dies", "cpu", ("ops",), "backends/cpu/rows.py",
    "y: Values = x / np.fmax", "import os; os.abort(); y: Values = x / np.fmax",
)  # fmt: skip
HANGS = replace(ABORTS, name="hangs", new="import time; time.sleep(600); y: Values = x / np.fmax")


def test_there_are_at_least_sixty() -> None:
    """The corpus has the size that its kill rates are quoted for, and every family hunts something."""
    assert len(FAULTS) >= 60


@pytest.mark.parametrize("name", FAULTS)
def test_each_stands_in_the_source_and_changes_it(name: str) -> None:
    """A fault whose place has moved is an error, not a survivor."""
    fault = FAULTS[name]
    source = (ROOT / fault.file).read_text(encoding="utf-8")
    assert fault.apply(source) != source
    assert all(f in FAMILIES for f in fault.families)


def test_noticed_by_every_family_that_is_named() -> None:
    """At level smoke some faults of one line are noticed, by the families that their table names."""
    names = ("mask-off-by-one", "cache-row-late", "scale-of-wrong-block", "output-stale", "positions-stale")
    faults = [replace(FAULTS[n], families=("kv_growth",)) for n in names]
    hunts = campaign.run(faults, "smoke")
    assert [(h.fault, h.noticed) for h in hunts] == [(n, True) for n in names]


def test_an_adapter_as_it_is_is_not_noticed() -> None:
    """The copy that faults are planted in is right without one: no false alarm comes from the loader."""
    (hunt,) = campaign.run([control("cpu", ["kv_growth"])], "smoke")
    assert not hunt.noticed


def test_a_copy_shares_nothing_with_the_original() -> None:
    """Planting leaves the adapter of the program alone."""
    faulty, plain = load(FAULTS["mask-off-by-one"]), load(control("cpu", ["ops"]))
    assert type(faulty) is not type(plain)
    assert type(faulty).__module__ != "backends.cpu"


def test_a_crash_and_a_hang_are_noticed_and_cost_nothing_else() -> None:
    """A fault that takes its process down, or never answers, is noticed; those after it are hunted all the same."""
    later = replace(FAULTS["argsort-ascending"], families=("ops",))
    hunts = campaign.run([ABORTS, HANGS, later], "smoke", limit=8.0)
    assert [(h.fault, h.noticed, h.verdict) for h in hunts] == [
        ("aborts", True, "CRASH"),
        ("hangs", True, "CRASH"),
        ("argsort-ascending", True, "FAIL"),
    ]


def test_a_hunt_ends_with_its_campaign() -> None:
    """Once the campaign is gone, killed at that, a worker that hangs in a fault ends."""
    if os.name != "posix":
        pytest.skip("ended by its keeper, which is POSIX")
    request = {"faults": [asdict(HANGS)], "level": "smoke", "done": [], "start": {}}
    code = (
        "import json, sys, time\n"
        "from conformance.process import Worker\n"
        "worker = Worker('conformance.planted.campaign', time_limit=600)\n"
        "event, _ = worker.ask(json.loads(sys.argv[1]))\n"
        "while event['event'] != 'runs':\n"
        "    event, _ = worker.ask(None)\n"
        "print(worker.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, json.dumps(request)], stdout=subprocess.PIPE) as campaign:
        assert campaign.stdout is not None
        worker = int(campaign.stdout.readline())
        assert lives(worker)
        campaign.kill()
    until(lambda: not lives(worker))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "[[fault]] tables expected"),
        ("[[fault]]\nname = 1", "name: a text expected"),
        ('[[fault]]\nname="a"\nsays="b"\nof="cpu"\nfile="c"\nold="d"\nnew="e"\nfamilies=["nope"]', "'nope' is unknown"),
        ("[[fault", "Expected"),
    ],
)
def test_a_broken_table_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    """What is wrong with a table of faults is said in one line that names the field."""
    path = tmp_path / "f.toml"
    path.write_text(text, encoding="utf-8")
    result = CliRunner().invoke(main, ["planted", "--faults", str(path)])
    assert result.exit_code == 2
    assert said.lower() in result.output.lower()
    assert len(result.output.strip().splitlines()) == 1


def test_tables_that_are_missing_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without its tables says so, and what to do."""
    for module in ("conformance.planted.faults", "conformance.cli.checks"):
        monkeypatch.setattr(f"{module}.FOLDER", tmp_path)
    result = CliRunner().invoke(main, ["planted"])
    assert result.exit_code == 2
    assert "install ggml-conformance again" in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_a_fault_that_cannot_be_planted_is_an_error() -> None:
    """A place that is not there is never counted as a survivor."""
    moved = replace(ABORTS, old="no such line")
    with pytest.raises(UsageError, match="expected once"):
        campaign.run([moved], "smoke")


def test_exit_code_says_whether_all_were_noticed(tmp_path: Path) -> None:
    """One that no family can see makes the command fail and is named."""
    path = tmp_path / "f.toml"
    path.write_text(
        "[[fault]]\nname='harmless'\nsays='a docstring'\nof='cpu'\nfamilies=['kv_growth']\n"
        "file='backends/cpu/rows.py'\nold='Of equals the last'\nnew='Of equals one'\n",
        encoding="utf-8",
    )
    result = CliRunner().invoke(main, ["planted", "--faults", str(path)])
    assert result.exit_code == 1
    assert "not noticed: harmless" in result.output


def test_a_relation_opens_a_copy_with_its_options() -> None:
    """Where a relation opens the backend once more with options of its own, the hunt opens the same copy with them."""
    faults = [control("openvino-stateless", ["relations"])]
    hunter = Hunter(faults)
    try:
        (spec,) = [f.spec for f in faults]
        found = hunter.run(spec, [hunter.case(next(i for i in FAMILIES["relations"].ids("smoke") if "/warm-" in i))])
    finally:
        hunter.close()
    assert [(r.verdict, r.detail) for r in found] == [(Verdict.PASS, "")]


def test_a_fault_behind_a_scheduler_is_in_its_devices_too() -> None:
    """A scheduler is copied with its devices: one of the scheduler's own and one of a device's are both noticed."""
    names = ("sched-cache-not-carried", "xdna2-write-forgotten")
    assert [(h.fault, h.noticed) for h in campaign.run([FAULTS[n] for n in names], "smoke")] == [
        (n, True) for n in names
    ]


def test_a_worker_gives_way_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hunt of many turns finds what one of one turn finds, each case run once."""
    faults = [replace(FAULTS["argsort-ascending"], families=("ops",)), control("cpu", ["ops"])]
    whole = campaign.run(faults, "smoke")
    monkeypatch.setattr(campaign, "TURN", 3)
    monkeypatch.setattr(campaign, "CROWDED", 0)
    turns, done, start, found = 0, set[tuple[str, str]](), dict[str, int](), {}
    kind = "turn"
    while kind == "turn":
        turns += 1
        for event in campaign.hunt(faults, "smoke", set(done), dict(start)):
            kind = event["event"]
            if kind == "cases":
                start[event["family"]] = event["at"]
            elif kind in ("noticed", "survived"):
                done.add((event["fault"], event["family"]))
                found[event["fault"]] = kind == "noticed"
    assert turns > 1
    assert found == {h.fault: h.noticed for h in whole}


TINY = "l=1,embd=32,heads=2,kv=1,ff=32,vocab=32"
CLASSES = {
    "types": ("iq4-xs-scale-off-by-one", "ops/GET_ROWS-iq4_xs+i32-a=256x5,n=9@466"),
    "values": ("silu-overflows", "ops/UNARY.SILU-f32-ne=67x4,data=range@983"),
    "ties": ("argmax-adds-equals-up", "ops/ARGMAX-f32-ne=64x9,data=ties@3"),
    "shapes": (
        "mask-of-first-head",
        "ops/FLASH_ATTN_EXT-f32+f32-q=64x3x6x4,k=64x32x3x4,mask=32x5x6x2,hide=bias,vm=off@696",
    ),
    "sizes": ("rows-by-16-bits", "ops/GET_ROWS-q4_0+i32-a=32x131080,n=40@547"),
    "prompts": (
        "npu-tokens-of-first-chunk",
        f"kv_growth/llama-{TINY},cache=f16,ctx=1024,ubatch=1024,run=at255.p257.d1@877",
    ),
    "xdna2 alone": (
        "xdna2-scale-of-next-row",
        "blocks/llama-l=1,embd=2048,heads=4,kv=2,head=16,ff=32,vocab=32,ctx=256,w=f16,run=at20.p3.d1,block=attn_q@783",
    ),
    "devices": ("sched-cache-not-carried", "weight_placement/shared-w=f32,d=2048@138"),
    "weights in mid-session": ("session-weight-form-stays", f"relations/weights-{TINY},w=q8_0,run=p9.d2@714"),
    "caches nobody reads": ("session-rows-lost-unread", f"relations/unread-{TINY},run=p9.d3@693"),
    "other outputs": ("session-plan-of-first-outputs", f"relations/reused-{TINY},run=p9.d4@838"),
    "equal but for a parameter": ("session-size-without-op-params", "alias/differs=eps,of=decoder@645"),
    "cost": ("ov-lifting-off", f"kv_growth/llama-{TINY},write=cpy,fa=0,run=at254.d4.reset.p3.d1@800"),
    "threads": ("ov-thread-part-lost", f"relations/threads-{TINY},run=p9.d2@550"),
}
"""What 115 mutants showed that earlier suites did not see -> a fault of that class, and a case of `smoke`."""


@pytest.mark.parametrize(("fault", "case_id"), CLASSES.values(), ids=CLASSES)
def test_each_class_of_blind_spots_is_seen(fault: str, case_id: str) -> None:
    """The case stands at smoke and fails with the fault; without it the adapter passes."""
    assert case_id in FAMILIES[case_id.partition("/")[0]].ids("smoke")
    plants = [FAULTS[fault], control(FAULTS[fault].of, ())]
    hunter = Hunter(plants)
    try:
        faulty, plain = (hunter.run(p.spec, [hunter.case(case_id)])[0] for p in plants)
    finally:
        hunter.close()
    assert (faulty.verdict in FAILURES, plain.verdict) == (True, Verdict.PASS), (faulty, plain)
