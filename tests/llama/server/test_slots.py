"""Servers with slots: ways that are right, faults that each show in their way, and servers that end or hang."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from marks import needs_wheel
from toy_server import FAULTS, GROWS, N_VOCAB, Toy, ToyLlama, process, read, serving

from conformance.backend.registry import Spec
from conformance.cli import main
from conformance.ggml.errors import BackendCrashError, BackendTimeoutError, UnavailableError, UsageError
from conformance.judge.verdict import Verdict
from conformance.llama.server import growth, running
from conformance.llama.server.check import check_server
from conformance.llama.server.client import Server
from conformance.llama.server.family import NAMES, Player, id_of
from conformance.llama.server.judge import Judgement, ServerJudge
from conformance.llama.server.running import of_build, of_text
from conformance.llama.server.ways import WAYS
from conformance.llama.server.worker import Start, words
from conformance.run.isolation.isolate import Isolation

LLAMA = "llama"


def judged(fault: str, ways: tuple[str, ...] = tuple(WAYS)) -> Judgement:
    """Judge the toy's server."""
    llama, exact = ToyLlama(), ToyLlama(0.5)
    with serving(Toy(fault)) as url:
        judge = ServerJudge(
            Server(url, list),
            llama,  # type: ignore[arg-type]  # has what is asked of it
            ToyLlama(1.5),  # type: ignore[arg-type]  # as above
            lambda talk, how: exact.play(talk, how).logits,
            read,
        )
        return judge.judge(ways)


def test_a_right_server_raises_no_alarm() -> None:
    """It is asked in all ways but one, for which its slots have too few cells."""
    found = judged("")
    assert not found.wrong, found.sentence()
    assert not any(b.excess for b in found.every)
    assert [way for way, blocks in found.blocks.items() if not blocks] == ["fresh-288"]
    assert found.sentence().startswith("the same model: ")


@pytest.mark.parametrize(("fault", "way"), FAULTS.items())
def test_a_planted_fault_shows_in_its_way(fault: str, way: str) -> None:
    """The answer names the way, and no other that is right."""
    found = judged(fault)
    assert found.wrong, found.sentence()
    assert way in found.when
    assert not {"fresh-24"} & {*found.when}
    assert WAYS[way].does in found.sentence()
    assert found.talk is None


def test_a_server_whose_memory_grows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 MB per request is over the limit; without it nothing grows."""
    monkeypatch.setattr(growth, "REQUESTS", 4)
    for fault, over in (("", False), (GROWS, True)):
        with process(fault) as url:
            pid = growth.listener(int(url.rpartition(":")[2]))
            assert pid in {child.pid for child in psutil.Process().children()}
            found = growth.measure(Server(url, list), pid, N_VOCAB)
            assert found.over is over, found.sentence()
    assert 0.9e6 < found.bytes < 1.3e6


def test_a_slow_server_is_not_measured() -> None:
    """The limit of time counts for all requests."""
    with serving(Toy()) as url, pytest.raises(UnavailableError, match="take over 0 s"):
        growth.measure(Server(url, list), psutil.Process().pid, N_VOCAB, seconds=0.0)


@pytest.fixture(scope="module")
def player() -> Iterator[Player]:
    """The wheel's server."""
    it = Player(Spec("ggml"), Isolation(60.0), None)
    yield it
    it.close()


@needs_wheel
@pytest.mark.parametrize("way", ["together", "cached", "saved", "shifted", "cancelled"])
def test_the_real_server_passes(player: Player, way: str) -> None:
    """No way of the wheel's own server raises an alarm."""
    result = player.play(id_of(LLAMA, way))
    assert result.verdict is Verdict.PASS, result.detail


def _process(player: Player) -> psutil.Process:
    """The process of the player's server."""
    _, started = player._made
    return psutil.Process(started.pid)


@needs_wheel
def test_a_server_that_dies_is_a_crash_and_leaves_nothing(player: Player) -> None:
    """After its end all its processes are gone; the next case starts another."""
    player.play(id_of(LLAMA, "fresh-24"))
    server = _process(player)
    server.kill()
    with pytest.raises(BackendCrashError, match="its server died"):
        player.play(id_of(LLAMA, "cached"))
    assert not server.is_running()
    assert player.play(id_of(LLAMA, "fresh-24")).verdict is Verdict.PASS
    server = _process(player)
    player.close()
    assert not server.is_running()


def test_ids_name_a_way() -> None:
    """Another way, or a key that a server lacks, is refused; a level lists every way."""
    for wrong in ("server/llama-real=1,do=other@1", "server/llama-real=1,run=p5,do=cached@1"):
        ran = CliRunner().invoke(main, ["run", "--case", wrong, "--backend", "ggml"])
        assert ran.exit_code == 2, ran.output
    ran = CliRunner().invoke(main, ["list", "cases", "--family", "server", "--level", "smoke"])
    assert [line.rpartition("do=")[2].rpartition("@")[0] for line in ran.output.split() if "do=" in line] == [*NAMES]


@needs_wheel
def test_a_server_that_hangs_is_a_timeout_and_leaves_nothing() -> None:
    """A stopped process is ended after the time limit of a request."""
    player = Player(Spec("ggml"), Isolation(5.0), None)
    try:
        player.play(id_of(LLAMA, "fresh-24"))
        server = _process(player)
        server.suspend()
        with pytest.raises(BackendTimeoutError, match="no answer within 5 s"):
            player.play(id_of(LLAMA, "cached"))
        assert not server.is_running()
    finally:
        player.close()


def test_what_is_no_build_has_no_server(tmp_path: Path) -> None:
    """Neither a URL nor a build is refused with what was expected; a build without a server, too."""
    with pytest.raises(UsageError, match="a URL such as"):
        of_text(str(tmp_path))
    with pytest.raises(UnavailableError, match="no llama-server beside it"):
        of_build(tmp_path)
    (tmp_path / "llama-server").write_text("")
    assert of_text(str(tmp_path / "llama-server")) == {"program": str((tmp_path / "llama-server").resolve())}


def test_a_server_gets_the_options_that_it_knows() -> None:
    """The line has only options of the help, and the context of the case."""
    start = Start("m.gguf", "slots", "llama-server", device="", n_ctx=512, context={"unified": True, "type_k": "q8_0"})
    known = "--model --port --parallel --ctx-size --slot-save-path --cache-type-k --device --kv-unified"
    line = words(start, 80, known)
    assert line[:1] == ["llama-server"]
    pairs = dict(zip(line[1:-1:2], line[2:-1:2], strict=True))
    assert pairs == {
        "--model": "m.gguf", "--port": "80", "--parallel": "2", "--ctx-size": "512", "--slot-save-path": "slots",
        "--cache-type-k": "q8_0", "--device": "none",
    }  # fmt: skip
    assert line[-1] == "--kv-unified"


@needs_wheel
def test_a_server_whose_model_has_no_words_is_not_started() -> None:
    """llama-server aborts at its first request."""
    none: Any = None
    llama: Any = SimpleNamespace(has_words=False)
    with pytest.raises(UsageError, match=r"tiny\.gguf: a vocabulary with text expected, which llama-server needs"):
        check_server("xllamacpp", Path("tiny.gguf"), llama, none, none, none, none, (), 1.0)


def test_a_dead_server_has_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A debugger's backtrace, which ggml prints behind a failed assertion, would hide them."""
    given: dict[str, Any] = {}

    def start(_service: str, **more: object) -> SimpleNamespace:
        given.update(more)
        return SimpleNamespace(ask=lambda _: ({"pid": 1, "url": "http://127.0.0.1:1"}, ()), close=lambda: None)

    monkeypatch.setattr(running, "Worker", start)
    (tmp_path / "model.gguf").touch()
    running.RunningServer({}, tmp_path / "model.gguf", list, 1.0).close()
    assert given["env"]["GGML_NO_BACKTRACE"] == "1"
