"""A toy language model, and a server of it with slots like llama-server's, each of whose faults can be planted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import takewhile
from socketserver import BaseRequestHandler
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.llama.model.llama_process import Setting, Talk
from conformance.llama.model.turns import setting

F32 = NDArray[np.float32]
N_VOCAB, N_CTX, SLOTS = 64, 128, 2
_E = np.random.default_rng(1).normal(size=(3, N_VOCAB, N_VOCAB))
"""Matrices by which tokens in cells, in states and in the rounding change the logits."""
ROUNDING = 1e-4

FAULTS = {
    "another slot's cache": "together",
    "a prompt cache one token too long": "cached",
    "a restored slot without its state": "saved",
    "a shift that keeps old positions": "shifted",
    "a cancelled request leaks its cells": "cancelled",
}
"""Fault -> the way that must show it."""
GROWS = "1 MB per request"


@dataclass
class Slot:
    """The cells of a sequence, and the state after each."""

    tokens: list[int] = field(default_factory=list)
    pos: list[int] = field(default_factory=list)
    states: list[NDArray[np.float64]] = field(default_factory=list)

    def add(self, token: int) -> None:
        """Decode one token."""
        before = self.states[-1] if self.states else np.zeros(N_VOCAB)
        self.states.append(0.8 * before + _E[1, token])
        self.pos.append(self.pos[-1] + 1 if self.pos else 0)
        self.tokens.append(token)

    def logits(self, noise: float = 0.0) -> F32:
        """Return the logits after the last token; `noise` is another rounding."""
        far = self.pos[-1] - np.array(self.pos)
        seen = (1 / (1 + far)) @ _E[0, self.tokens]
        logits: F32 = (0.5 * (seen + self.states[-1]) * (1 + noise * _E[2, self.tokens[-1]])).astype(np.float32)
        return logits

    def keep(self, n: int) -> None:
        """Remove all cells but the first ones."""
        del self.tokens[n:], self.pos[n:], self.states[n:]

    def shift(self, keep: int, n: int, *, moves: bool = True) -> None:
        """Discard `n` cells behind the first ones; the others move down."""
        del self.tokens[keep : keep + n], self.pos[keep : keep + n], self.states[keep : keep + n]
        self.pos[keep:] = [p - n * moves for p in self.pos[keep:]]


class ToyLlama:
    """A `LlamaProcess` with the toy; another rounding for each setting, unless `exact`."""

    n_vocab, adds_bos = N_VOCAB, False

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale

    def play(self, talk: Talk, how: Setting) -> Any:  # noqa: ANN401  # what is read of a `Decoded`
        """Play one slot."""
        noise = self._scale * ROUNDING * (1 + len(how.text) % 5) if how.text or self._scale != 1 else 0.0
        slot, rows, said = Slot(), list[F32](), list[int]()
        for t, turn in enumerate(talk[0]):
            if t and how.shift:
                slot.shift(how.keep, how.shift)
            for token in turn.prompt:
                slot.add(token)
            rows.append(slot.logits(noise))
            for k in range(turn.decode if turn.forced is None else len(turn.forced)):
                said.append(int(rows[-1].argmax()) if turn.forced is None else turn.forced[k])
                slot.add(said[-1])
                rows.append(slot.logits(noise))
        return SimpleNamespace(logits=np.array(rows), tokens=said)


def read(text: str) -> Setting:
    """Parse a setting."""
    return setting(text, flash_attn=True)


class Toy:
    """The server's slots; `fault` is planted."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.slots = [Slot() for _ in range(SLOTS)]
        self.saved = Slot()
        self.busy = 0
        self.leaked = 0
        self.held: list[bytes] = []
        self.lock = threading.Lock()

    def complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Answer a request; ValueError if it does not fit."""
        if self.fault == GROWS:
            self.held.append(os.urandom(1) * (1 << 20))
        prompt, i = asked["prompt"], asked.get("id_slot", 0)
        slot, other = self.slots[i], self.slots[1 - i]
        if len(prompt) >= N_CTX - self.leaked:
            raise ValueError(f"{len(prompt)} tokens exceed {N_CTX - self.leaked} cells")
        same = sum(1 for _ in takewhile(lambda x: x[0] == x[1], zip(slot.tokens, prompt, strict=False)))
        n = min(same, len(prompt) - 1) if asked.get("cache_prompt") else 0
        n += self.fault == "a prompt cache one token too long" and 0 < n < min(len(slot.tokens), len(prompt) - 1)
        slot.keep(n)
        if self.fault == "another slot's cache" and n > 1:
            n = min(n, len(other.tokens))
            slot.tokens[:n], slot.states[:n] = other.tokens[:n], other.states[:n]
        for token in prompt[len(slot.tokens) :]:
            slot.add(token)
        content = list[Any]()
        for k in range(asked["max_tokens"]):
            if k:
                self._shift(slot, asked)
                slot.add(content[-1]["id"])
            x = slot.logits(ROUNDING / 2)
            x = x - np.log(np.exp(x.astype(np.float64)).sum())
            top = np.argsort(-x)[: asked["logprobs"]].tolist()
            each = [{"id": t, "logprob": float(x[t])} for t in top]
            content.append({**each[0], "top_logprobs": each})
        usage = {"completion_tokens": len(content), "prompt_tokens_details": {"cached_tokens": n}}
        return {"choices": [{"logprobs": {"content": content}}], "usage": usage}

    def _shift(self, slot: Slot, asked: dict[str, Any]) -> None:
        if len(slot.tokens) + 1 >= N_CTX:
            moves = self.fault != "a shift that keeps old positions"
            slot.shift(asked.get("n_keep", 0), asked.get("n_discard", N_CTX // 2), moves=moves)

    def cancelled(self, prompt: Sequence[int]) -> None:
        """End a request whose client has left."""
        if self.fault == "a cancelled request leaks its cells":
            self.leaked += len(prompt)

    def action(self, i: int, action: str) -> None:
        """Save, restore or erase a slot."""
        slot = self.slots[i]
        if action == "save":
            self.saved = Slot([*slot.tokens], [*slot.pos], [*slot.states])
        elif action == "restore":
            states = self.saved.states
            if self.fault == "a restored slot without its state":
                states = [np.zeros(N_VOCAB) for _ in states]
            self.slots[i] = Slot([*self.saved.tokens], [*self.saved.pos], [*states])
        else:
            slot.keep(0)


def handler(toy: Toy) -> type[BaseHTTPRequestHandler]:  # noqa: C901  # one short method each
    """Return what answers the requests of one connection."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply([{"id": i, "n_ctx": N_CTX, "is_processing": toy.busy > 0} for i in range(SLOTS)])

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with toy.lock:
                if self.path.startswith("/slots/"):
                    toy.action(int(self.path[7]), self.path.partition("action=")[2])
                    self._reply({})
                elif asked.get("stream"):
                    toy.busy += 1
                    self._stream(asked)
                    toy.busy -= 1
                else:
                    self._complete(asked)

        def _complete(self, asked: dict[str, Any]) -> None:
            try:
                self._reply(toy.complete(asked))
            except ValueError as e:
                self._reply({"error": str(e)}, 500)

        def _stream(self, asked: dict[str, Any]) -> None:
            self.send_response(200)
            self.end_headers()
            try:
                for _ in range(1000):
                    self.wfile.write(b"data: {}\n\n")
                    self.wfile.flush()
                    time.sleep(0.001)
            except OSError:
                toy.cancelled(asked["prompt"])

        def _reply(self, body: object, status: int = 200) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_request(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def listening(answers: type[BaseRequestHandler]) -> Iterator[str]:
    """Answer connections on loopback; yield the URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), answers) as http:
        http.daemon_threads = True
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()


def serving(toy: Toy) -> AbstractContextManager[str]:
    """Serve the toy on loopback; its value is the URL."""
    return listening(handler(toy))


@contextmanager
def process(fault: str) -> Iterator[str]:
    """Serve the toy in a process of its own, whose memory nothing else changes; yield the URL."""
    command = [sys.executable, __file__, fault]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        yield child.stdout.readline().strip()


if __name__ == "__main__":
    with serving(Toy(sys.argv[1])) as _url:
        sys.stdout.write(f"{_url}\n")
        sys.stdout.flush()
        sys.stdin.read()  # until the test ends
