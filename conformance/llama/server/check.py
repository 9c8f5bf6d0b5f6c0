"""Judges the server of `conform check-model --server`: by URL, or started here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from conformance.ggml.errors import UnavailableError, UsageError
from conformance.llama.model.graphs import Say
from conformance.llama.model.llama_process import LlamaProcess, Setting
from conformance.llama.model.turns import Checking

from . import growth
from .client import Server
from .judge import Judgement, ServerJudge, in_float64
from .running import RunningServer, of_text
from .ways import WAYS


def check_server(
    named: str,
    model: Path,
    llama: LlamaProcess,
    packed: LlamaProcess,
    check: Checking,
    read: Callable[[str], Setting],
    say: Say,
    first: Sequence[int],
    time_limit: float,
) -> Judgement:
    """Judge a server in all ways that it offers, and measure its memory if its process is known.

    Raises:
        UnavailableError: it does not start or answer.
        UsageError: `named` is neither a URL nor a build, or its replies have another form; or the model of a server
            that is started has no vocabulary.
    """

    def words() -> list[str]:
        return llama.words(range(llama.n_vocab))

    with ExitStack() as opened:
        if "://" in named:
            server = Server(named, words, timeout=time_limit)
            pid = growth.listener(server.port) if server.is_local else None
        else:
            start = of_text(named)
            if not llama.has_words:
                raise UsageError(f"{model}: a vocabulary with text expected, which llama-server needs; it has none")
            running = RunningServer(start, model, words, time_limit)
            opened.callback(running.close)
            server, pid = running.client, running.pid
        found = ServerJudge(server, llama, packed, in_float64(llama, check), read, say).judge(tuple(WAYS), first)
        if pid is None:
            found.notes.append("memory was not measured: the server's process is hidden or not on this machine")
            return found
        say("requests, whose memory is measured")
        try:
            found.growth = growth.measure(server, pid, llama.n_vocab)
        except UnavailableError as e:
            found.notes.append(str(e))
    return found
