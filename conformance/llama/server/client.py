"""The client of a server with OpenAI's completions endpoint, and of llama-server's slots."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from conformance.case.case import JSON
from conformance.ggml.errors import BackendTimeoutError, UnavailableError, UsageError

CANDIDATES = 20
"""Log probabilities per token."""
TIMEOUT = 600.0
"""Seconds for an answer of the server."""
IDLE = 5.0
"""Seconds in which slots are free after a request was cancelled."""
LOCAL = ("127.0.0.1", "localhost", "::1")
"""Hosts that no proxy reaches."""
PORTS = {"http": 80, "https": 443}
"""Scheme of a URL -> its port if the URL names none."""

Candidates = Mapping[int, float]
"""Token -> log probability."""
T = TypeVar("T")


class RefusedError(UnavailableError):
    """The server answered with an error."""


class Candidate(msgspec.Struct):
    """A token as llama-server writes it."""

    id: int
    logprob: float
    top_logprobs: list[Candidate] = []


class Logprobs(msgspec.Struct):
    """Log probabilities: llama-server's, or OpenAI's, which has texts in place of ids."""

    content: list[Candidate] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float]] = []


class Choice(msgspec.Struct):
    """One completion."""

    logprobs: Logprobs | None = None


class PromptTokens(msgspec.Struct):
    """Where the tokens of a prompt came from."""

    cached_tokens: int = 0


class Usage(msgspec.Struct):
    """Numbers of tokens."""

    completion_tokens: int
    prompt_tokens_details: PromptTokens | None = None


class Completion(msgspec.Struct):
    """The reply of a completions endpoint."""

    choices: list[Choice]
    usage: Usage | None = None


class Slot(msgspec.Struct):
    """A slot of llama-server."""

    id: int
    n_ctx: int
    is_processing: bool


def address(url: str) -> tuple[str, int]:
    """Return host and port of an HTTP URL; UsageError for another text."""
    try:
        found = urlsplit(url)
        port = found.port
    except ValueError as e:
        raise UsageError(f"--server {url!r}: a URL such as http://127.0.0.1:8080 expected: {e}") from None
    if found.scheme not in PORTS or not found.hostname or len(url.split()) != 1:
        raise UsageError(f"--server {url!r}: a URL such as http://127.0.0.1:8080 expected")
    return found.hostname, PORTS[found.scheme] if port is None else port


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy tokens, with the server's candidates for each."""

    tokens: Sequence[int] = ()
    """None if the reply lacks some: llama-server leaves out those that end within a character."""
    rows: Sequence[Candidates] = ()
    cached: int = 0
    """Number of tokens of the prompt that the server did not compute again."""


class Server:
    """A server; UsageError for a URL of another kind.

    `words` returns the texts of all tokens, for a server that sends no ids. `ended` raises if the server's process is
    known and has ended.
    """

    def __init__(
        self, url: str, words: Callable[[], Sequence[str]], ended: Callable[[], object] = lambda: None,
        timeout: float = TIMEOUT,
    ) -> None:  # fmt: skip
        host, self.port = address(url)
        self.is_local = host in LOCAL
        self.root = url.rstrip("/").removesuffix("/v1")
        self.url = f"{self.root}/v1/completions"
        own = urllib.request.ProxyHandler({}) if self.is_local else urllib.request.ProxyHandler()
        self._open = urllib.request.build_opener(own).open
        self._words, self._ids, self._ended, self._timeout = words, dict[str, int](), ended, timeout

    def complete(self, prompt: Sequence[int], n: int, **more: JSON) -> Answer:
        """Return up to `n` greedy tokens after a prompt; `more` are llama-server's own fields.

        Raises:
            RefusedError: it refuses the prompt.
            UnavailableError: there is no server.
            UsageError: the reply has another form.
        """
        reply = self._ask("/v1/completions", self._completion(prompt, n, **more), Completion)
        found = reply.choices[0].logprobs if reply.choices else None
        if found is None or not (found.content or (found.top_logprobs and all(found.top_logprobs))):
            raise UsageError(f"{self.url}: the reply has no log probabilities; llama-server and vLLM give them")
        usage = reply.usage
        cached = usage.prompt_tokens_details.cached_tokens if usage and usage.prompt_tokens_details else 0
        if usage and usage.completion_tokens != len(found.content or found.tokens):
            return Answer(cached=cached)
        if found.content:
            rows = [{t.id: t.logprob for t in (c, *c.top_logprobs)} for c in found.content]
            return Answer([c.id for c in found.content], rows, cached)
        return self._by_text(found, cached)

    def cancel(self, prompt: Sequence[int], n: int, **more: JSON) -> None:
        """Ask for a completion, and leave after its first token.

        Raises:
            RefusedError: a slot still works `IDLE` seconds later, or as `complete`.
            UnavailableError: there is no server.
        """
        asked = self._request("/v1/completions", {**self._completion(prompt, n, **more), "stream": True})
        self._send(asked, lambda response: response.readline())
        begun = time.monotonic()
        while any(slot.is_processing for slot in self.slots()):
            if time.monotonic() - begun > IDLE:
                raise RefusedError(f"{self.root}: a slot still works {IDLE:g} s after its request was cancelled")
            time.sleep(0.005)

    def slots(self) -> Sequence[Slot]:
        """Return all slots; UnavailableError if the server does not list any."""
        return self._ask("/slots", None, list[Slot])

    def slot(self, i: int, action: str, file: str = "") -> None:
        """Save a slot to a file, restore or erase it; RefusedError as `complete`."""
        self._ask(f"/slots/{i}?action={action}", {"filename": file}, dict[str, object])

    def _completion(self, prompt: Sequence[int], n: int, **more: JSON) -> dict[str, JSON]:
        return {"prompt": list(prompt), "max_tokens": n, "temperature": 0, "logprobs": CANDIDATES, "ignore_eos": True,
                "cache_prompt": False, **more}  # fmt: skip

    def _request(self, path: str, body: dict[str, JSON] | None) -> urllib.request.Request:
        data = None if body is None else json.dumps(body).encode()
        return urllib.request.Request(f"{self.root}{path}", data, {"Content-Type": "application/json"})  # noqa: S310

    def _ask(self, path: str, body: dict[str, JSON] | None, kind: type[T]) -> T:
        asked = self._request(path, body)
        try:
            return msgspec.json.decode(self._send(asked, lambda response: response.read()), type=kind)
        except msgspec.MsgspecError as e:
            raise UsageError(f"{asked.full_url}: the reply of a completions endpoint expected: {e}") from None

    def _send(self, asked: urllib.request.Request, read: Callable[[http.client.HTTPResponse], bytes]) -> bytes:
        try:
            with self._open(asked, timeout=self._timeout) as response:
                return read(response)
        except urllib.error.HTTPError as e:
            said = e.read(400).decode(errors="replace")
            raise RefusedError(f"{asked.full_url}: HTTP {e.code}: {said}") from None
        except TimeoutError:
            late = f"{asked.full_url}: no answer within {self._timeout:g} s; --time-limit SECONDS waits longer"
            raise BackendTimeoutError(late) from None
        except OSError as e:
            self._ended()
            raise UnavailableError(f"{asked.full_url}: {getattr(e, 'reason', e)}; is the server running?") from None
        except http.client.HTTPException as e:
            self._ended()
            raise UnavailableError(f"{asked.full_url}: a reply in HTTP expected: {type(e).__name__}: {e}") from None

    def _by_text(self, found: Logprobs, cached: int) -> Answer:
        """Find tokens by their texts, up to the first whose text is not that of one token alone."""
        if not self._ids:
            words = self._words()
            many = Counter(words)
            self._ids = {w: i for i, w in enumerate(words) if many[w] == 1}
        ids = [self._ids.get(text) for text in found.tokens]
        upto = ids.index(None) if None in ids else len(ids)
        known = [i for i in ids[:upto] if i is not None]
        rows = [{self._ids[w]: x for w, x in row.items() if w in self._ids} for row in found.top_logprobs]
        return Answer(known, rows[: len(known)], cached)
