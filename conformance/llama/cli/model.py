"""`conform check-model`: compares backends with llama.cpp on its own CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from conformance.backend.registry import REFERENCE, Spec
from conformance.case.case import Case
from conformance.cli.cases import architecture_of
from conformance.cli.options import BUDGET, ExistingFile, Folder, backend_option, isolation, json_option
from conformance.cli.output import leave, line, table
from conformance.ggml.errors import ConformanceError, UsageError
from conformance.judge.outcome import Outcome, Why
from conformance.llama.live.llama import Device, device, llama_of
from conformance.llama.model import against, figures, layers, modelfile, plausible, turns
from conformance.llama.model.answer import NOT_RUN, WRONG, Answer, number
from conformance.llama.model.check import Check, InterruptedCheckError, Text
from conformance.llama.model.finding import Finding
from conformance.llama.model.layers import Files
from conformance.llama.model.llama_process import Decoded, LlamaProcess, Setting, Talk, alone
from conformance.llama.model.modelfile import ModelFile
from conformance.llama.model.server import Judge, Server
from conformance.llama.zoo.model import table as architectures
from conformance.report.progress import Progress
from conformance.report.runfile import write_json
from conformance.run.isolation.isolate import Isolation, open_backend
from conformance.run.session.environment import header

T = TypeVar("T")
PROMPT = "The capital of France is"
"""The default prompt."""
MADE_UP = 8
"""Length in tokens of the prompt for a model whose vocabulary has no texts."""
READ = 256
"""Maximum tokens of a text for perplexity, because the logits of each are in memory."""
SHARE = 1 / 3
"""Share of --budget for the float64 reference in one arithmetic, and for shrinking."""
SHOWN = 5
"""Maximum number of changed tokens to print."""
FOUND = 20
"""Maximum number of findings about a file to print."""
PIECES, PER_VALUE, PLAYED = 96 << 20, 2, 32
"""Bytes: for a piece, and per value of the largest tensor without and with a prompt."""


@click.command("check-model")
@click.argument("model", type=click.Path(path_type=Path))
@backend_option
@click.option(
    "--compare", type=ExistingFile, metavar="FILE", help="File that MODEL was made from, or of the same model."
)
@click.option("--prompt", metavar="TEXT", help=f"Default: {PROMPT!r}.")
@click.option("--tokens", metavar="N,N,…", help="Prompt as token ids, for a vocabulary without text.")
@click.option("--turns", "turns_file", type=ExistingFile, metavar="FILE", help="Play the conversations in FILE.")
@click.option("--server", "url", metavar="URL",
              help="Judge a server's tokens and log probabilities (/v1/completions).")  # fmt: skip
@click.option("--setting", "settings", multiple=True, metavar="KEY=VALUE,…",
              help=f"Setting of the context: {', '.join(turns.KEYS)}; repeatable.")  # fmt: skip
@click.option("--decode", type=click.IntRange(0), default=64, show_default=True, metavar="N",
              help="Number of tokens of each answer.")  # fmt: skip
@click.option("--lib", metavar="BUILD", help="Build with llama.cpp (docs/builds.md); default: the wheel's.")
@BUDGET.click(default="6m", show_default=True)
@click.option("--perplexity", "text_file", type=ExistingFile, metavar="FILE",
              help="Also measure the perplexity of the text in FILE.")  # fmt: skip
@click.option("-o", "--output", type=Folder, metavar="DIR", help="Save the minimised case of a wrong result in DIR.")
@json_option
@isolation
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
    arch = architecture_of(model)
    document: dict[str, Any] = {**header("check-model"), "model": model.name}
    findings: list[Finding] = []
    stopped = Outcome()
    cpu = Device("llama.cpp", llama_of(lib))
    known = architectures().get(arch)
    flash_attn = known is None or known.flash_attn
    load = partial(_load, arch=arch, cpu=cpu, time_limit=10 * isolation.time_limit)
    if compare or not (backends or url):
        a, b = modelfile.read(model), modelfile.read(compare) if compare else None
        findings, logits = _check_file(a, b), None
        if b:
            plain = turns.setting("", flash_attn=flash_attn)
            layer, logits, stopped = _until_ctrl_c(
                lambda: _by_layers(a, b, load, lambda llama: _prompt(llama, prompt, tokens), plain)
            )
            findings += layer
        stopped += _unread(a)
        document["file"] = {"compared": compare.name if compare else None, "logits": logits,
                            "findings": [f.to_json() for f in findings]}  # fmt: skip
    broken = Outcome.of(Why.FAILED, [f"{model}: {WRONG}"] if any(f.wrong for f in findings) else [])
    if stopped.exit_code or not (backends or url):
        _end(document, json_path, broken + stopped)
    specs = [Spec.parse(text) for text in dict.fromkeys(backends)]
    chosen = settings or (turns.SETTINGS if turns_file else ("",))
    played = [turns.setting(s, flash_attn=flash_attn) for s in chosen]
    share = budget * SHARE / len(played)
    with _progress(f"llama.cpp maps {model.stat().st_size >> 20} MiB and decodes on its CPU") as say:

        def check(case: Case, talk: Talk, decoded: Decoded, setting: Setting) -> Check:
            made = Check(model, case, talk, decoded, _device, isolation, setting, share, text, output, share)
            made.say, made.told = say, partial(line, err=True)
            return made

        with closing(load(model)) as llama:
            text = None if text_file is None else _text(llama, text_file)
            talk = (
                turns.talk(llama, turns_file, decode) if turns_file else alone(_prompt(llama, prompt, tokens), decode)
            )
            if url:
                with closing(load(model, cpu=replace(cpu, device="CPU"))) as packed:
                    judge = Judge(Server(url, llama), llama, packed, check, flash_attn, say)
                    judged = judge.judge(talk[0][0].prompt if prompt or tokens else ())
                line(f"{url}: {judged.sentence()}")
                document["server"] = judged.to_json()
                broken += Outcome.of(Why.FAILED, [f"{url}: {WRONG}"] if judged.verdict == WRONG else [])
                talk = judged.talk or talk
            skipped = None if settings else lambda s, why: line(f"{s.text}: not played: {why}", err=True)
            answers, cut = _collect(
                turns.answers(
                    llama, talk, played, specs, check, lambda *of: document.update(_begin(llama, *of)), skipped
                ),
                lambda answer: _show(answer, llama, text.perplexity if text else None),
            )
    last = _table(answers)
    if json_path:
        document.update(decode=decode, perplexity=text.perplexity if text else None)
        by_backend = {
            name: {**a.to_json(), "settings": [x.summary() for x in answers if x.backend == name]}
            for name, a in last.items()
        }
        write_json(json_path, {**document, "backends": by_backend})
    leave(
        broken
        + cut
        + Outcome.of(Why.FAILED, [f"{name}: {WRONG}" for name, a in last.items() if a.verdict == WRONG])
        + Outcome.of(Why.UNEXECUTED, [f"{name}: {NOT_RUN}" for name, a in last.items() if a.verdict == NOT_RUN])
    )


def _collect(found: Iterable[Answer], show: Callable[[Answer], None]) -> tuple[list[Answer], Outcome]:
    """Show and return answers; Ctrl-C ends with what is known, and an outcome that says so."""
    answers: list[Answer] = []
    try:
        for answer in found:
            answers.append(answer)
            show(answer)
    except InterruptedCheckError as e:
        return [*answers, e.answer], Outcome.of(Why.INTERRUPTED, ["interrupted"])
    return answers, Outcome.of(Why.INTERRUPTED, [])


def _check_file(a: ModelFile, b: ModelFile | None) -> list[Finding]:
    """Check a file, by itself and against another; print and return the findings."""
    model = a.path
    largest = max((t.n_blocks * t.type.blck_size for t in a.readable() if t.type), default=0)
    takes = PIECES + (PLAYED if b else PER_VALUE) * largest
    line(f"{model}: {a.arch or 'no architecture'}, {len(a.tensors)} tensors, {len(a.data) >> 20} MiB; "
         f"checking takes at most {takes >> 20} MiB of memory", err=True)  # fmt: skip
    found = _findings([plausible.header(a), against.header(a, b) if b else ()])
    with _progress(f"reading {model.name}") as say:
        found += _findings([against.tensors(a, b, say) if b else (), plausible.values(a, say)])
    if not any(a.readable()):
        line(f"{model}: it has no tensors that can be read, so no values were checked")
    elif not any(f.wrong for f in found):
        line(f"{model}: {f'equal to {b.path} but for the cost of its types' if b else 'nothing is implausible'}")
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


def _end(document: dict[str, Any], json_path: Path | None, outcome: Outcome) -> NoReturn:
    """Write the record of a file, and exit."""
    if json_path:
        write_json(json_path, document)
    leave(outcome)


def _until_ctrl_c(
    play: Callable[[], tuple[list[Finding], dict[str, Any] | None]],
) -> tuple[list[Finding], dict[str, Any] | None, Outcome]:
    try:
        return *play(), Outcome()
    except KeyboardInterrupt:
        return [], None, Outcome.of(Why.INTERRUPTED, ["interrupted; layers were not compared"])


def _by_layers(
    a: ModelFile,
    b: ModelFile,
    load: Callable[[Path], LlamaProcess],
    prompt: Callable[[LlamaProcess], Sequence[int]],
    setting: Setting,
) -> tuple[list[Finding], dict[str, Any] | None]:
    """Play a prompt through two files; return the first wrong node and the logits' KL."""
    with _progress("layers: llama.cpp loads both files") as say, ExitStack() as opened:
        both = _accepted(lambda: [opened.enter_context(closing(load(file.path))) for file in (b, a)])
        asked = prompt(both[0]) if both else []
        recorded = _accepted(lambda: [llama.record(alone(asked), setting, every=True) for llama in both])
        if not recorded:
            return [], None
        (expected, right), (decoded, case) = recorded
        logits = None
        if decoded.logits.shape == expected.logits.shape:
            f = figures.measure(decoded.logits, expected.logits)
            line(f"layers: {f.sentence()}")
            logits = {"tokens": list(asked), "kl": {"max": number(f.kl_max), "mean": number(f.kl_mean)}, "top1": f.top1}
        reference = opened.enter_context(closing(open_backend(Spec(REFERENCE))))
        found = _accepted(lambda: [layers.first(Files(a, b), case, right, reference, say)])
    if found == [None]:
        line("layers: no node differs by more than its types cost")
    return _findings([[f for f in found if f]]), logits


def _accepted(results: Callable[[], list[T]]) -> list[T]:
    """Return results; none, with the reason printed, if a file is refused."""
    try:
        return results()
    except ConformanceError as e:
        line(f"layers: not compared: {e}")
        return []


def _findings(sources: Iterable[Iterable[Finding]]) -> list[Finding]:
    """Collect and print findings, the worst first; also if the search is interrupted."""
    found: list[Finding] = []
    try:
        found.extend(chain.from_iterable(sources))
    finally:
        found.sort(key=lambda f: f.rank)
        for f in found[:FOUND]:
            line(f"{'' if f.wrong else 'unusual, '}{f.sentence()}")
        if len(found) > FOUND:
            line(f"and {len(found) - FOUND} more; --json FILE has all")
    return found


def _load(model: Path, arch: str, cpu: Device, time_limit: float) -> LlamaProcess:
    """Start llama.cpp with the model; UsageError with advice if it cannot load it."""
    try:
        return LlamaProcess(model, cpu, time_limit=time_limit)
    except UsageError as e:
        known = "; conform capture lists the architectures that it knows, --lib BUILD selects another llama.cpp"
        hint = known if arch not in architectures() else "; is the file complete?" if "cannot load" in str(e) else ""
        raise UsageError(f"{model}: {e}{hint}") from None


def _device(spec: Spec) -> Device:
    """Return the device for a spec; by default the library's CPU with repacked weights."""
    found = device(spec)
    return found if found.device else replace(found, device="CPU")


def _prompt(llama: LlamaProcess, prompt: str | None, tokens: str | None) -> list[int]:
    """Return the tokens of the given prompt, or of a default one; UsageError if it is invalid."""
    if tokens is not None:
        try:
            return [int(t) for t in tokens.split(",")]
        except ValueError:
            raise UsageError(f"--tokens {tokens[:40]!r}: numbers joined by commas expected, such as 1,15,7") from None
    if prompt is None and not llama.has_words:
        return [t % llama.n_vocab for t in range(1, MADE_UP + 1)]
    return llama.tokens(PROMPT if prompt is None else prompt)


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


def _begin(llama: LlamaProcess, talk: Talk, decoded: Decoded, case: Case) -> dict[str, Any]:
    """Print the prompts and llama.cpp's tokens; return them for the record."""
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


def _show(answer: Answer, llama: LlamaProcess, reference: float | None) -> None:
    """Print the answer, and the text that the backend generated if it differs."""
    line(f"{answer.name}: {answer.sentence()}")
    if answer.cause:
        line(f"  {answer.cause}")
    if answer.flips:
        line(f"  greedy: {''.join(llama.words(answer.tokens))}")
    for flip in answer.flips[:SHOWN]:
        ours, theirs = llama.words([flip.expected, flip.found])
        line(f"  row {flip.row}: {ours!r}, on the backend {theirs!r}: margin {flip.margin:.2g}, "
             f"rounding {flip.rounding:.2g}")  # fmt: skip
    if answer.reading is not None:
        r = answer.reading
        line(f"  perplexity {answer.perplexity:.4g} (llama.cpp {reference:.4g}), KL {r.kl_max:.1g} at most, "
             f"{r.kl_mean:.1g} on average, top 1 {r.top1:.1%}")  # fmt: skip
    for note in answer.notes:
        line(f"  {note}")


def _table(answers: Sequence[Answer]) -> dict[str, Answer]:
    """Print a row per answer; return the last answer of each backend."""
    rows = [
        (a.name, a.verdict, *_figures(a), f"{a.seconds:.0f}", "" if a.resident is None else a.resident >> 20)
        for a in answers
    ]
    heads = ["backend", "answer", "KL max", "KL mean", "top 1", "least margin", "s", "MiB held"]
    if rows:
        table(rows, heads, disable_numparse=True)
    return {a.backend: a for a in answers}


def _figures(answer: Answer) -> tuple[str, str, str, str]:
    f = answer.figures
    if f is None:
        return "", "", "", ""
    return f"{f.kl_max:.1e}", f"{f.kl_mean:.1e}", f"{f.top1:.1%}", f"{float(f.margin.min()):.2g}"
