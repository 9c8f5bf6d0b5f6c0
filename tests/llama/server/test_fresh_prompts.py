"""`conform check-model --server`: a server on loopback that runs the model, and ones that run it wrongly."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import BaseRequestHandler

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from marks import needs_wheel
from toy_server import listening

from conformance.cli import main
from conformance.ggml.errors import BackendTimeoutError, UnavailableError, UsageError
from conformance.llama.live.llama import Device, Models
from conformance.llama.model.check import ModelCheck
from conformance.llama.model.figures import F32, log_softmax
from conformance.llama.model.llama_process import LlamaProcess, alone
from conformance.llama.model.recording import ModelRecording
from conformance.llama.model.turns import setting
from conformance.llama.server import judge as server
from conformance.llama.server.client import Answer, Server
from conformance.llama.server.family import METADATA
from conformance.llama.server.judge import Continuation, Judgement, ServerJudge, distance, in_float64
from conformance.llama.server.ways import FRESH, TOKENS, Asked
from conformance.run.isolation.isolate import Isolation

Served = Callable[[list[int], int], F32]
"""Return the logits after a prompt and after each of n - 1 greedy tokens."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of llama in F32, so that rounding is small."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    made = CliRunner().invoke(main, ["capture", "llama", "--model", "-o", str(path)])
    assert made.exit_code == 0, made.output
    return path


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """An alarm after few prompts, which is not as sure."""
    monkeypatch.setattr(server, "ALARM", 0.06)


@pytest.fixture(scope="module")
def llama(model: Path) -> Iterator[LlamaProcess]:
    """llama.cpp's plain CPU."""
    with closing(LlamaProcess(model, Device("llama.cpp"))) as it:
        yield it


@contextmanager
def serving(served: Served, *, ids: bool = True, lost: int = 0) -> Iterator[str]:
    """Serve completions on loopback, with ids as llama-server does, or with texts; yield the URL.

    The reply lacks `lost` of its tokens.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            rows = [log_softmax(x) for x in served(asked["prompt"], asked["max_tokens"])]
            best = [np.argsort(-x)[: asked["logprobs"]].tolist() for x in rows]
            content = [
                {"id": top[0], "logprob": x[top[0]], "top_logprobs": [{"id": t, "logprob": x[t]} for t in top]}
                for x, top in zip(rows, best, strict=True)
            ]
            texts = {
                "tokens": [f"<{top[0]}>" for top in best],
                "top_logprobs": [{f"<{t}>": x[t] for t in top} for x, top in zip(rows, best, strict=True)],
            }
            choice = {"logprobs": {"content": content} if ids else texts}
            usage = {"completion_tokens": len(rows) + lost}
            body = json.dumps({"choices": [choice], "usage": usage}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_request(self, *_: object) -> None:
            pass

    with listening(Handler) as url:
        yield url


@pytest.fixture(scope="module")
def judged(model: Path, llama: LlamaProcess) -> Iterator[Callable[..., Judgement]]:
    """Judge what is served; a server and the judge share the processes."""
    with closing(LlamaProcess(model, Device("llama.cpp", "", "CPU"))) as packed:

        def judge(served: Served, *, ids: bool = True) -> Judgement:
            def check(recording: ModelRecording) -> ModelCheck:
                return ModelCheck(model, recording, lambda spec: Device(str(spec)))

            with serving(served, ids=ids) as url:
                client = Server(url, lambda: llama.words(range(llama.n_vocab)))
                return ServerJudge(client, llama, packed, in_float64(llama, check)).judge()

        yield judge


def playing(llama: LlamaProcess, text: str, changed: Callable[[F32, int], F32] = lambda x, _: x) -> Served:
    """Serve the model with a setting; `changed` gets logits and the position of their first row."""

    def served(prompt: list[int], n: int) -> F32:
        logits = llama.play(alone(prompt, n - 1), setting(text, flash_attn=True)).logits[-n:]
        return changed(logits, len(prompt) - 1)

    return served


def _late(logits: F32, first: int) -> F32:
    at = first + np.arange(len(logits))[:, None]
    return np.where(at < 256, logits, logits * np.float32(1.1))


@needs_wheel
@pytest.mark.parametrize("ids", [True, False])
def test_the_same_model_raises_no_alarm(judged: Callable[..., Judgement], llama: LlamaProcess, ids: bool) -> None:
    """Another size of batches is right, whether a server names tokens by ids or texts."""
    if not ids:
        llama.words = lambda tokens: [f"<{t}>" for t in tokens]  # type: ignore[method-assign]
    found = judged(playing(llama, "ubatch=8"), ids=ids)
    assert not found.wrong
    assert tuple(found.blocks) == FRESH
    assert 2 * server.LEAST * TOKENS <= found.tokens < 2 * server.PROMPTS * TOKENS
    assert not any(b.excess for b in found.every)
    assert found.sentence().startswith("the same model: ")


@needs_wheel
@pytest.mark.parametrize(
    ("text", "changed", "words"),
    [
        ("cache=q4_0", lambda x, _: x, "cache=q4_0 explains it"),
        ("", lambda x, _: np.roll(x, 1, 1), "another model or other weights, 0% of tokens agree"),
        ("", lambda x, _: np.hstack([x, x + 1]), "another model or other weights, 0% of tokens agree"),
        ("", _late, "wrong from position 256 on"),
    ],
)
def test_wrong_servers_are_told_apart(
    judged: Callable[..., Judgement], llama: LlamaProcess, text: str, changed: Callable[[F32, int], F32], words: str
) -> None:
    """A quantised cache, other weights, and a fault of late positions each have their words."""
    found = judged(playing(llama, text, changed))
    assert found.wrong
    assert found.e_value >= 1 / server.ALARM
    assert found.sentence().endswith(words), found.sentence()


@needs_wheel
def test_the_command_hands_the_worst_prompt_over(model: Path, llama: LlamaProcess, tmp_path: Path) -> None:
    """A wrong server ends with 1, and a backend gets the prompt and tokens on which it was worst."""
    record = tmp_path / "server.json"
    with serving(playing(llama, "", lambda x, _: np.roll(x, 1, 1))) as url:
        call = ["check-model", str(model), "--server", f"{url}/v1", "--backend", "cpu", "--json", str(record)]
        ran = CliRunner().invoke(main, call)
    assert ran.exit_code == 1, ran.output
    found = json.loads(record.read_text("utf-8"))
    server_, cpu = found["results"]
    assert (server_["backend"], server_["verdict"]) == (f"{url}/v1/completions", "FAIL")
    assert (cpu["backend"], cpu["verdict"]) == ("cpu", "PASS")
    assert len(found["model"]["tokens"]) == TOKENS
    shown = CliRunner().invoke(main, ["report", str(record), "-o", str(tmp_path / "page")])
    assert shown.exit_code == 1, shown.output
    assert "/v1/completions" in (tmp_path / "page" / "index.html").read_text("utf-8")
    ran = CliRunner().invoke(main, ["check-model", str(model), "--server", "127.0.0.1:1"])
    assert (ran.exit_code, "a URL such as" in ran.output) == (2, True), ran.output


def test_what_is_no_server() -> None:
    """A message says what the URL gave; a reply that lacks tokens has none."""
    with pytest.raises(UnavailableError, match="is the server running"):
        Server("http://127.0.0.1:1", list).complete([1], 1)
    with serving(lambda *_: np.zeros((0, 4), np.float32)) as url, pytest.raises(UsageError, match="no log prob"):
        Server(url, list).complete([1], 1)
    with serving(lambda *_: np.zeros((1, 4), np.float32), lost=1) as url:
        assert Server(url, list).complete([1], 2) == Answer()


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:99999", "http://127.0.0.1:abc", "http://[::1", "http://", "ftp://127.0.0.1", "http://a b"],
)
def test_what_is_no_url(url: str) -> None:
    """A text that is no URL of HTTP is refused before anything is asked."""
    with pytest.raises(UsageError, match=r"a URL such as http://127\.0\.0\.1:8080 expected"):
        Server(url, list)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "a reply in HTTP expected: BadStatusLine: SSH-2.0-OpenSSH_9.2"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n[]", "a reply in HTTP expected: IncompleteRead"),
        (b"", "is the server running"),
    ],
)
def test_a_port_without_http(reply: bytes, words: str) -> None:
    """The message has what came instead; a connection that closes is one without a server."""
    with _port(reply) as url, pytest.raises(UnavailableError, match=words):
        Server(url, list).slots()


def test_a_port_that_says_nothing() -> None:
    """The time limit ends the wait, and the message names its option."""
    with _port(None) as url, pytest.raises(BackendTimeoutError, match=r"no answer within 0\.2 s; --time-limit"):
        Server(url, list, timeout=0.2).slots()


@contextmanager
def _port(reply: bytes | None) -> Iterator[str]:
    """Answer each connection on loopback with the same bytes, with none for None; yield the URL."""
    ended = threading.Event()

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            if reply is None:
                ended.wait()
            else:
                self.request.sendall(reply)

    with listening(Handler) as url:
        try:
            yield url
        finally:
            ended.set()


@needs_wheel
def test_a_prompt_is_tokenised_only_if_it_is_needed(tmp_path: Path) -> None:
    """A vocabulary that lacks letters ends llama.cpp, but a server is asked for tokens."""
    models = Models(Isolation(), METADATA)
    try:
        path = shutil.copy(models.use("server/llama-real=1,do=fresh-24@1").model, tmp_path / "words.gguf")
    finally:
        models.close()
    for more, words in (
        (["--backend", "ggml"], "--tokens 1,2,3"),
        (["--server", "http://127.0.0.1:1"], "is the server running"),
    ):
        ran = CliRunner().invoke(main, ["check-model", str(path), *more])
        assert (ran.exit_code, words in ran.output) == (2, True), ran.output


@given(st.lists(st.booleans(), max_size=12), st.integers(1, 5))
def test_the_e_process_is_a_fair_bet(excesses: list[bool], variants: int) -> None:
    """With an excess of probability 1 / (m + 1) the mean of the next value is the present one."""

    def value(outcomes: list[bool]) -> float:
        blocks = [Continuation(Asked([], [0]), 2.0 * e, 1.0, 0) for e in outcomes]
        return Judgement("", {"fresh-24": blocks}, variants).e_value

    p = 1 / (variants + 1)
    mean = p * value([*excesses, True]) + (1 - p) * value([*excesses, False])
    assert mean == pytest.approx(value(excesses))


def test_the_distance_is_about_kl() -> None:
    """For a small difference d is the KL divergence; NaN is infinitely far."""
    p = np.array([0.1, 0.2, 0.3, 0.4])
    q = p * (1 + 0.01 * np.array([1, -1, 1, -0.5]))
    q /= q.sum()
    kl = float(np.sum(p * np.log(p / q)))
    rows = [[dict(enumerate(np.log(x).tolist()))] for x in (p, q)]
    assert distance(*rows) == pytest.approx(kl, rel=0.02)
    assert distance(rows[0], [{0: float("nan")}]) == np.inf
