"""`conform check-model`: compares backends with llama.cpp on its own CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import NoReturn

import click

from conformance.backend.registry import Spec
from conformance.case.case import JSON
from conformance.cli import options
from conformance.cli.output import leave, line, table
from conformance.ggml.errors import ConformanceError, UsageError
from conformance.judge.outcome import Outcome, Why
from conformance.judge.verdict import MissingCause, Request, Result
from conformance.llama.live.llama import Device, llama_of
from conformance.llama.model import filecheck, modelfile, turns
from conformance.llama.model.adapter import is_adapter
from conformance.llama.model.check import InterruptedCheckError, ModelCheck, Text
from conformance.llama.model.family import LOADING, ggml_device, load, setting_of
from conformance.llama.model.filecheck import Load
from conformance.llama.model.finding import Finding
from conformance.llama.model.layers import Files
from conformance.llama.model.llama_process import LlamaProcess, Setting, alone
from conformance.llama.model.modelcase import DECODE, LAYERS, PROMPT, ModelCase
from conformance.llama.model.modelfile import ModelFile
from conformance.llama.model.modelrun import NOT_RUN, WRONG, ModelRun
from conformance.llama.model.recording import ModelRecording
from conformance.llama.server.check import check_server
from conformance.report.progress import Progress
from conformance.report.runfile import record, write_json
from conformance.report.runs import placement_lines
from conformance.run.isolation.isolate import Isolation

READ = 256
"""Maximum tokens of a text for perplexity, because the logits of each are in memory."""
SHARE = 1 / 3
"""Share of --budget for the float64 reference in one arithmetic, and for shrinking."""
SHOWN = 5
"""Maximum number of changed tokens to print."""
NAMED = 3
"""Maximum number of tensors and keys in the last line."""
UNSEEN = "--compare FILE also finds swapped or scaled tensors, and keys with other values"
FOUND = 20
"""Maximum number of findings about a file to print."""
PIECES, PER_VALUE, PLAYED = 96 << 20, 2, 32
"""Bytes: for a piece, and per value of the largest tensor without and with a prompt."""
INTERRUPTED = "interrupted"


@dataclass(slots=True)
class Checked:
    """Results of the command, for its record."""

    results: list[Result] = field(default_factory=list)
    request: Request = field(default_factory=Request)
    about: dict[str, JSON] = field(default_factory=dict)
    """The record's entry `model`: what results have no field for."""

    def add(self, *results: Result) -> None:
        """Add results, each of a case that was requested."""
        self.results += results
        for r in results:
            self.ask(r.backend, r.case)

    def ask(self, backend: str, case_id: str) -> None:
        """Request a case, unless it is."""
        cases = self.request.cases.setdefault(backend, [])
        cases += [] if case_id in cases else [case_id]

    def write(self, path: Path | None) -> None:
        """Write the record; cases without a result were interrupted."""
        if path is not None:
            missing = self.request.missing(self.results, INTERRUPTED, cause=MissingCause.INTERRUPTED)
            write_json(path, {**record(self.results, asked=self.request, missing=missing), "model": self.about})


@click.command("check-model")
@click.argument("model", type=click.Path(path_type=Path))
@options.backend_option
@click.option(
    "--compare", type=options.ExistingFile, metavar="FILE", help="File that MODEL was made from, or of the same model."
)
@click.option("--prompt", metavar="TEXT", help=f"Default: {PROMPT!r}.")
@click.option("--tokens", metavar="N,N,…", help="Prompt as token ids, for a vocabulary without text.")
@click.option(
    "--turns", "turns_file", type=options.ExistingFile, metavar="FILE", help="Play the conversations in FILE."
)
@click.option("--server", "url", metavar="URL",
              help="Judge a server by URL, or llama-server by its path or build.")  # fmt: skip
@click.option("--setting", "settings", multiple=True, metavar="KEY=VALUE,…",
              help=f"Setting of the context: {', '.join(turns.KEYS)}; repeatable.")  # fmt: skip
@click.option("--decode", type=click.IntRange(0), default=DECODE, show_default=True, metavar="N",
              help="Number of tokens of each answer.")  # fmt: skip
@click.option("--lib", metavar="BUILD", help="Build with llama.cpp (docs/builds.md); default: the wheel's.")
@options.BUDGET.click(default="6m", show_default=True)
@click.option("--perplexity", "text_file", type=options.ExistingFile, metavar="FILE",
              help="Also measure the perplexity of the text in FILE.")  # fmt: skip
@click.option(
    "-o", "--output", type=options.Folder, metavar="DIR", help="Save the minimised case of a wrong result in DIR."
)
@options.json_option
@options.isolation
def check_model(
    model: Path,
    backends: Sequence[str],
    compare: Path | None,
    prompt: str | None,
    tokens: str | None,
    turns_file: Path | None,
    url: str | None,
    settings: Sequence[str],
    decode: int,
    lib: str | None,
    budget: float,
    text_file: Path | None,
    output: Path | None,
    json_path: Path | None,
    isolation: Isolation,
) -> None:
    """Check MODEL.gguf: the file, by itself or against another, or backends that run it.

    Without --backend the file is checked: its metadata, tokenizer and values; with --compare against another file of
    the same model, in any types. With --backend the first wrong layer, node and step of each backend is located:
    llama.cpp generates tokens on its own CPU, and every backend gets the same tokens. On a backend of the adapter
    `ggml` llama.cpp itself runs; any other adapter runs the graphs that llama.cpp built. With --turns conversations
    are played, with each --setting until a backend is wrong, and again as one prompt. With --server a server is judged;
    if it is wrong, backends get its worst prompt. Exit codes: 0 right, or different only by rounding, 1 the file, a
    backend or the server is wrong, 2 bad input, 3 nothing was checked, or a backend could not run the model.
    """
    if sum(given is not None for given in (prompt, tokens, turns_file)) > 1:
        raise UsageError("check-model: one of --prompt, --tokens and --turns expected, several given")
    asked = ModelCase(model, _numbers(tokens), decode=decode, prompt=prompt, turns=turns_file, compare=compare)
    read = setting_of(model)
    cpu = Device("llama.cpp", llama_of(lib))
    loaded = partial(load, cpu=cpu, time_limit=LOADING * isolation.time_limit)
    done = Checked(about={"file": model.name})
    stopped = broken = Outcome()
    if compare or not (backends or url):
        stopped = _check_file(asked, done, loaded, read(""))
        broken = _broken(model, done.results)
    if stopped.exit_code or not (backends or url):
        _end(done, json_path, broken + stopped)
    specs = [Spec.parse(text) for text in dict.fromkeys(backends)]
    played = [read(s) for s in settings or (turns.SETTINGS if turns_file else ("",))]
    share = budget * SHARE / len(played)
    with _progress(f"llama.cpp maps {model.stat().st_size >> 20} MiB and decodes on its CPU") as say:

        def check(recording: ModelRecording) -> ModelCheck:
            limits = share, text, output, share
            return ModelCheck(model, recording, ggml_device, isolation, *limits, say, told=partial(line, err=True))

        with closing(loaded(model)) as llama:
            text = None if text_file is None else _text(llama, text_file)
            plain = replace(asked, compare=None)
            talk = plain.talk(llama) if specs else []
            if url:
                with closing(loaded(model, cpu=replace(cpu, device="CPU"))) as packed:
                    first = plain.first(llama) if prompt or tokens else ()
                    judged = check_server(url, model, llama, packed, check, read, say, first, isolation.time_limit)
                line(f"{url}: {judged.sentence()}")
                for note in judged.notes:
                    line(f"  {note}")
                done.add(judged.result(plain.id))
                done.about["server"] = judged.to_json()
                broken += Outcome.of(Why.FAILED, [f"{url}: {WRONG}"] if judged.fails else [])
                if judged.talk:
                    talk, worst = judged.talk, judged.worst.asked
                    plain = ModelCase(model, worst.prompt, worst.answer, decode=len(worst.answer))
            skipped = None if settings else lambda s, why: line(f"{s.text}: not played: {why}", err=True)
            for spec in specs:
                done.ask(str(spec), plain.of(played[0]))
            runs, cut = _collect(
                turns.runs(
                    llama,
                    talk,
                    played,
                    specs,
                    check,
                    lambda of: done.about.update(_begin(llama, of)),
                    skipped,
                    plain.of,
                ),
                lambda run: _show(run, llama, text.perplexity if text else None),
            )
    last = _table(runs)
    for run in runs:
        done.ask(run.backend, run.case)
        found = run.result()
        done.add(*([] if found is None else [found]))
    done.about |= {"perplexity": text.perplexity if text else None, "runs": [run.to_json() for run in runs]}
    done.write(json_path)
    leave(
        broken
        + cut
        + Outcome.of(Why.FAILED, [f"{name}: {WRONG}" for name, run in last.items() if run.is_wrong])
        + Outcome.of(Why.UNEXECUTED, [f"{name}: {NOT_RUN}" for name, run in last.items() if run.word == NOT_RUN])
    )


def _numbers(tokens: str | None) -> list[int]:
    try:
        return [] if tokens is None else [int(t) for t in tokens.split(",")]
    except ValueError:
        raise UsageError(f"--tokens {str(tokens)[:40]!r}: numbers joined by commas expected, such as 1,15,7") from None


def _collect(found: Iterable[ModelRun], show: Callable[[ModelRun], None]) -> tuple[list[ModelRun], Outcome]:
    """Show and return runs; Ctrl-C ends with what is known, and an outcome that says so."""
    runs: list[ModelRun] = []
    try:
        for run in found:
            runs.append(run)
            show(run)
    except InterruptedCheckError as e:
        return [*runs, e.run], Outcome.of(Why.INTERRUPTED, [INTERRUPTED])
    return runs, Outcome()


def _check_file(asked: ModelCase, done: Checked, loaded: Load, setting: Setting) -> Outcome:
    """Check a file, by itself and against another; return why less was checked."""
    a, b = modelfile.read(asked.model), modelfile.read(asked.compare) if asked.compare else None
    done.about["compared"] = asked.compare.name if asked.compare else None
    done.add(*filecheck.results(asked, a, _of_file(a, b)))
    if b is None or is_adapter(a):
        return _unread(a)
    done.ask(*reversed(filecheck.pair_of(asked, LAYERS)))
    try:
        done.add(_by_layers(asked, Files(a, b), loaded, setting))
    except KeyboardInterrupt:
        return Outcome.of(Why.INTERRUPTED, [f"{INTERRUPTED}; layers were not compared"]) + _unread(a)
    return _unread(a)


def _broken(model: Path, results: Sequence[Result]) -> Outcome:
    """Return the outcome of a file: where it is wrong, and what to do."""
    names = list(dict.fromkeys(r.where.name for r in results if r.fails_run and r.where))
    if not names:
        return Outcome()
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    named = ", ".join(names[:NAMED])
    return Outcome.of(Why.FAILED, [f"{model}: {WRONG} in {named}{more}; download it again, or make it from its source"])


def _of_file(a: ModelFile, b: ModelFile | None) -> list[Finding]:
    """Print and return the findings about a file, by itself and against another."""
    model = a.path
    largest = max((t.n_blocks * t.type.blck_size for t in a.readable() if t.type), default=0)
    takes = PIECES + (PLAYED if b else PER_VALUE) * largest
    line(f"{model}: {a.arch or 'no architecture'}, {len(a.tensors)} tensors, {a.n_bytes >> 20} MiB; "
         f"checking takes at most {takes >> 20} MiB of memory", err=True)  # fmt: skip
    found = _findings(filecheck.of_headers(a, b))
    with _progress(f"reading {model.name}") as say:
        found += _findings(filecheck.of_values(a, b, say))
    if not any(a.readable()):
        line(f"{model}: it has no tensors that can be read, so no values were checked")
    elif not any(f.wrong for f in found):
        right = f"equal to {b.path} but for the cost of its types" if b else f"nothing is implausible; {UNSEEN}"
        line(f"{model}: {f'its factors fit {b.path}' if b and is_adapter(a) else right}")
    return found


def _unread(file: ModelFile) -> Outcome:
    """Return the outcome of a file without tensors, of which no value can be checked."""
    return Outcome.of(Why.UNEXECUTED, [] if any(file.readable()) else [f"{file.path}: no tensors were checked"])


@contextmanager
def _progress(begin: str) -> Iterator[Callable[[str], None]]:
    """Show the latest words that the yielded function got."""
    state = [begin]
    with Progress().of(lambda: state[0]):
        yield lambda words: state.__setitem__(0, words)


def _end(done: Checked, json_path: Path | None, outcome: Outcome) -> NoReturn:
    """Write the record of a file, and exit."""
    done.write(json_path)
    leave(outcome)


def _by_layers(asked: ModelCase, files: Files, loaded: Load, setting: Setting) -> Result:
    """Decode a prompt with two files, print and return what the comparison node by node found."""
    with _progress("layers: llama.cpp loads both files") as say:
        try:
            compared = filecheck.by_layers(
                files, loaded, asked.first, setting, say, lambda text: line(f"layers: {text}")
            )
        except ConformanceError as e:
            line(f"layers: not compared: {e}")
            return filecheck.refused(asked, str(e))
    if compared.found is None:
        line("layers: no node differs by more than its types cost")
    else:
        _findings([compared.found])
    return compared.result(asked)


def _findings(source: Iterable[Finding]) -> list[Finding]:
    """Collect and print findings, the worst first; also if the search is interrupted."""
    found: list[Finding] = []
    try:
        found.extend(source)
    finally:
        found.sort(key=lambda f: f.rank)
        for f in found[:FOUND]:
            line(f"{'' if f.wrong else 'unusual, '}{f.sentence()}")
        if len(found) > FOUND:
            line(f"and {len(found) - FOUND} more; --json FILE has all")
    return found


def _utf8(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as e:
        raise UsageError(f"{file}: UTF-8 expected, byte {e.start} is invalid; iconv converts it") from None


def _text(llama: LlamaProcess, file: Path) -> Text:
    """Run llama.cpp on the first tokens of a text; UsageError for fewer than two."""
    tokens = llama.tokens(_utf8(file))[:READ]
    if len(tokens) < 2:
        raise UsageError(f"{file}: at least two tokens expected for a perplexity, {len(tokens)} found")
    return Text(tokens, *llama.record(alone(tokens), every=True))


def _begin(llama: LlamaProcess, recording: ModelRecording) -> dict[str, JSON]:
    """Print the prompts and llama.cpp's tokens; return them for the record."""
    talk, decoded, case = recording.talk, recording.decoded, recording.case
    caches = sum(len(case.persistent[t]) for t in case.caches())
    weights = sum(len(data) for data in case.persistent.values()) - caches
    pairs = [
        (turn.prompt, answer)
        for slot, answers in zip(talk, decoded.answers, strict=True)
        for turn, answer in zip(slot, answers, strict=True)
    ]
    texts = [["".join(llama.words(tokens)) for tokens in pair] for pair in pairs]
    for (prompt, answer), (asked, said) in zip(pairs, texts, strict=True):
        line(f"prompt, {len(prompt)} tokens: {asked}")
        line(f"llama.cpp, {len(answer)} tokens: {said}")
    takes = PIECES + PLAYED * max(prod(t.ne) for t in case.persistent)
    line(f"weights {weights >> 20} MiB, mapped from the file; caches {caches / (1 << 20):.1f} MiB; "
         f"a backend holds as much, the reference at most {takes >> 20} MiB", err=True)  # fmt: skip
    return {
        "prompt": [token for prompt, _ in pairs for token in prompt],
        "tokens": decoded.tokens,
        "text": "".join(chain.from_iterable(texts)),
    }


def _show(run: ModelRun, llama: LlamaProcess, reference: float | None) -> None:
    """Print the verdict, and the text that the backend generated if it differs."""
    line(f"{run.name}: {run.sentence()}")
    found = run.result()
    for text in placement_lines([] if found is None else [found]):
        line(f"  {text}")
    if run.cause:
        line(f"  {run.cause}")
    if run.flips:
        line(f"  greedy: {''.join(llama.words(run.tokens))}")
    for flip in run.flips[:SHOWN]:
        ours, theirs = llama.words([flip.expected, flip.found])
        line(f"  row {flip.row}: {ours!r}, on the backend {theirs!r}: margin {flip.margin:.2g}, "
             f"rounding {flip.rounding:.2g}")  # fmt: skip
    if run.reading is not None:
        r = run.reading
        line(f"  perplexity {run.perplexity:.4g} (llama.cpp {reference:.4g}), KL {r.kl_max:.1g} at most, "
             f"{r.kl_mean:.1g} on average, top 1 {r.top1:.1%}")  # fmt: skip
    for note in run.notes:
        line(f"  {note}")


def _table(runs: Sequence[ModelRun]) -> dict[str, ModelRun]:
    """Print a row per run; return the last run of each backend."""
    rows = [
        (a.name, a.word, *_figures(a), f"{a.seconds:.0f}", "" if a.resident is None else a.resident >> 20) for a in runs
    ]
    heads = ["backend", "answer", "KL max", "KL mean", "top 1", "least margin", "s", "MiB held"]
    if rows:
        table(rows, heads, disable_numparse=True)
    return {a.backend: a for a in runs}


def _figures(run: ModelRun) -> tuple[str, str, str, str]:
    f = run.figures
    if f is None:
        return "", "", "", ""
    return f"{f.kl_max:.1e}", f"{f.kl_mean:.1e}", f"{f.top1:.1%}", f"{float(f.margin.min()):.2g}"
