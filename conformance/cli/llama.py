"""`conform capture`, `make-model`, `import-capture`, `layout` and `zoo`: what llama.cpp itself builds and runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args

import click

from conformance.backend.registry import Spec, environment, resolve
from conformance.builds.source import locate
from conformance.case import casefile
from conformance.case.case import Case
from conformance.case.reference import FOLDERS
from conformance.causes.cells import CellCause, of_zoo
from conformance.ggml.errors import UsageError
from conformance.ggml.lib.llama import find_llama
from conformance.ggml.text import printable
from conformance.ggml.types import TYPES
from conformance.judge.outcome import Outcome, Why
from conformance.judge.verdict import counted
from conformance.report.progress import Progress, since
from conformance.report.runfile import write_json
from conformance.run.session.environment import header
from conformance.suite import captured
from conformance.suite.decoder import layout as layouts
from conformance.suite.zoo import family
from conformance.suite.zoo.family import Request
from conformance.suite.zoo.model import Architecture, runnable
from conformance.suite.zoo.model import table as architectures
from conformance.suite.zoo.play import PASSES, RUNS, UNSUPPORTED, Device, Played, play
from conformance.suite.zoo.projectors.encoder import Medium
from conformance.suite.zoo.projectors.play import ROOT, capture_projector, play_projector
from conformance.suite.zoo.projectors.relations import MEDIA, RELATIONS
from conformance.suite.zoo.projectors.table import table as projectors
from conformance.suite.zoo.verbs.desk import Kind
from conformance.suite.zoo.verbs.play import play_verbs
from conformance.suite.zoo.verbs.table import VERBS, Verb

from .options import ExistingFile, File, backend_option, json_option
from .output import cell_lines, leave, line, table

BEGIN, END = 80, 220
"""Characters of a long message that are printed."""
SHOWN = 5
"""Differences of one setting that `layout` prints."""
GGML = "ggml"
"""The adapter whose libraries llama.cpp runs on."""
_TYPE = click.Choice(list(TYPES))
Cells = dict[tuple[str, str, str], Played]
"""Architecture or projector, device's name, and run or verb -> what came of it."""
_SWITCH = {"on": "1", "off": "0", None: ""}
_arch_option = click.option("--arch", metavar="NAME", help="An architecture; --list shows them.")
_set_option = click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="A metadata key of the architecture; repeatable."
)
_seed_option = click.option("--seed", type=click.IntRange(0, 10**18 - 1), default=0, show_default=True)
_lib_option = click.option(
    "--lib", metavar="BUILD", help="A build with llama.cpp, as `conform builds` reads it; default: the wheel's."
)
_output_option = click.option("-o", "--output", type=File, metavar="FILE.gguf")
_context_option = click.option("--context", type=click.IntRange(1), default=256, show_default=True,
                               help="Cells of one stream.")  # fmt: skip
_flash_option = click.option("--flash-attn", type=click.Choice(["on", "off"]),
                             help="Default: on, where the architecture can.")  # fmt: skip
_cache_option = click.option("--cache-type", type=_TYPE, default="f16", show_default=True)


@click.command()
@click.argument("model", required=False, type=ExistingFile)
@_arch_option
@_set_option
@click.option("--weight-type", type=_TYPE, default="f32", help="Of the made-up matrices.")
@click.option("--real", is_flag=True, help="Leave out weights that llama.cpp can do without, as model files do.")
@click.option("--run", "plan", metavar="PLAN", help="Such as p250.d8; instead of --prefill and --decode.")
@click.option("--prefill", type=click.IntRange(1), default=5, show_default=True, help="Tokens of each sequence.")
@click.option("--decode", type=click.IntRange(0), default=4, show_default=True, help="Steps after it.")
@click.option("--sequences", type=click.IntRange(1, 64), default=1, show_default=True)
@_context_option
@click.option("--ubatch", type=click.IntRange(1), default=512, show_default=True, help="Tokens of one graph, at most.")
@_flash_option
@click.option("--unified-kv", is_flag=True, help="All sequences share one stream of cells.")
@_cache_option
@click.option("--cache-type-v", type=_TYPE, help="Where V's is another.")
@click.option("--weights", type=click.Choice(["embedded", "reference"]), default="embedded", show_default=True,
              help="Of MODEL.gguf: in the case file, or left in MODEL.gguf, named there with digests.")  # fmt: skip
@click.option("--nodes", type=click.IntRange(0), default=0, help="Record every node of this many graphs.")
@_seed_option
@_lib_option
@click.option("--list", "listing", is_flag=True, help="Show every architecture and whether it runs.")
@click.option("--projector", metavar="NAME", help="A projector; conform zoo --list-projectors shows them.")
@click.option("--medium", type=click.Choice(get_args(Medium)), default="odd", show_default=True, help="Of --projector.")
@_output_option
def capture(
    model: Path | None,
    arch: str | None,
    settings: Sequence[str],
    weight_type: str,
    real: bool,
    plan: str | None,
    prefill: int,
    decode: int,
    sequences: int,
    context: int,
    ubatch: int,
    flash_attn: str | None,
    unified_kv: bool,
    cache_type: str,
    cache_type_v: str | None,
    weights: str,
    nodes: int,
    seed: int,
    lib: str | None,
    listing: bool,
    projector: str | None,
    medium: Medium,
    output: Path | None,
) -> None:
    """Record what llama.cpp runs: MODEL.gguf, or --arch NAME with made-up weights, as a case file.

    With --projector NAME: what libmtmd computes of an image or a sound.
    """
    if listing:
        _list()
        return
    if sum(source is not None for source in (model, arch, projector)) != 1:
        raise UsageError(
            "capture: a model file, or --arch NAME, or --projector NAME expected; --list shows the architectures, "
            "conform zoo --list-projectors the projectors"
        )
    if output is None:
        raise UsageError("capture: -o FILE.gguf is missing")
    if projector is not None:
        others = {
            "--set": settings,
            "--real": real,
            "--run": plan,
            "--nodes": nodes,
            "--weights": weights == "reference",
        }
        _refuse(others, "not with --projector")
        with Progress().of(since(f"libmtmd runs {projector}")):
            capture_projector(projector, medium, output, llama_of(lib), weight_type)
        _report(output, casefile.read_one(output))
        return
    plan = plan or f"p{prefill}" + (f".d{decode}" if decode else "")
    library = llama_of(lib)
    if model is not None:
        arch_only = {"--set": settings, "--real": real, "--weight-type": weight_type != "f32"}
        _refuse(arch_only, "only with --arch; a model file has its own")
        stem = re.sub(r"[^A-Za-z0-9_.]+", "_", model.stem)
        with Progress().of(since(f"llama.cpp runs {model.name}")):
            case = family.record_model(
                Request(
                    id=f"model/{stem}-seqs={sequences},run={plan}@{seed}",
                    stream=f"{stem}@{seed}",
                    model=str(model.resolve()),
                    lib=library,
                    plan=plan,
                    n_ctx=context,
                    n_seq_max=sequences,
                    n_ubatch=ubatch,
                    unified=unified_kv,
                    flash_attn=flash_attn != "off",
                    type_k=cache_type,
                    type_v=cache_type_v or cache_type,
                    nodes=nodes,
                    by_reference=weights == "reference",
                    family="model",
                    params={"model": model.name, "seqs": str(sequences), "run": plan},
                    seed=seed,
                    provenance={"model": model.name},
                )
            )
    else:
        if weights == "reference":
            raise UsageError("capture: --weights reference: only with a model file; --arch has weights as seeds anyway")
        values = {
            "seqs": sequences, "unified": "1" if unified_kv else "", "fa": _SWITCH[flash_attn],
            "cache": cache_type, "cache_v": cache_type_v, "ctx": context, "ubatch": ubatch, "w": weight_type,
            "real": int(real), "nodes": nodes, "set": _settings(settings), "run": plan,
        }  # fmt: skip
        with Progress().of(since(f"llama.cpp runs {arch}")):
            case = family.make(_zoo_id(str(arch), values, seed), library)
    casefile.write(output, case)
    _report(output, case)


def _refuse(given: Mapping[str, object], why: str) -> None:
    """UsageError if the user gave an option that says nothing here."""
    if wrong := [option for option, value in given.items() if value]:
        raise UsageError(f"capture: {', '.join(wrong)}: {why}")


def _zoo_id(arch: str, values: Mapping[str, object], seed: int) -> str:
    """The id of an architecture's case: keys that are empty, or have their default, are left out."""
    keys = [f"{key}={value}" for key, value in values.items() if value and value != family.KEYS[key].default]
    return f"zoo/{arch}{'-' if keys else ''}{','.join(keys)}@{seed}"


def _report(output: Path, case: Case) -> None:
    nodes = sum(len(s.graph) for s in case.steps)
    text = f"{output}: {case.id}, {len(case.steps)} steps, {nodes} nodes, {output.stat().st_size:,} bytes"
    if case.references:
        files = ", ".join(sorted({r.file for r in case.references.values()}))
        text += f"; {len(case.references)} weights are in {files}: keep it beside, or name its folder in {FOLDERS}"
    line(text)


def _settings(settings: Sequence[str]) -> str:
    """`--set` as an id has it: `KEY:VALUE` joined by `+`, a list's numbers joined by `/`."""
    items = []
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[a-z0-9_.]+", key):
            raise UsageError(f"--set {text!r}: KEY=VALUE expected, such as block_count=1")
        value = re.sub(r"[\[\]\s]", "", value).replace(",", "/")
        if not re.fullmatch(r"[A-Za-z0-9_./-]+", value):
            raise UsageError(f"--set {text!r}: a number, true, false, text or a list like [2,0] expected")
        items.append(f"{key}:{value}")
    return "+".join(items)


def _list() -> None:
    rows = [(a.name, _note(a), a.lacks or "runs") for a in architectures().values()]
    table(rows, ["architecture", "", "llama_decode"])
    line(f"{len(runnable(with_variants=True))} of {len(rows)} run")


def _note(arch: Architecture) -> str:
    return "encodes only" if arch.encodes else f"a variant of {arch.of}" if arch.of else ""


@click.command("make-model")
@_arch_option
@_set_option
@click.option("--type", "type_name", type=_TYPE, default="f32", show_default=True, help="Of the matrices.")
@_seed_option
@_lib_option
@_output_option
def make_model(
    arch: str | None, settings: Sequence[str], type_name: str, seed: int, lib: str | None, output: Path | None
) -> None:
    """Write a tiny model with made-up weights, in a GGUF file that llama.cpp loads."""
    if arch is None or output is None:
        raise UsageError("make-model: --arch NAME and -o MODEL.gguf expected")
    case_id = _zoo_id(arch, {"w": type_name, "set": _settings(settings)}, seed)
    request, name, keys, _ = family.read(case_id, llama_of(lib))
    family.make_model(output, request, name, keys)
    line(f"{output}: {name}, {output.stat().st_size:,} bytes")


@click.command("import-capture")
@click.argument("capture", type=ExistingFile)
@click.option("-o", "--output", required=True, type=File, metavar="FILE.gguf")
def import_capture(capture: Path, output: Path) -> None:
    """Turn a capture (JSON beside its .npz) into a case file with expected outputs."""
    case = captured.import_capture(capture)
    casefile.write(output, [case])
    line(f"{output}: {case.id}, {len(case.steps)} steps, {output.stat().st_size:,} bytes")


@click.command()
@click.option(
    "--arch", "archs", multiple=True, type=click.Choice(tuple(layouts.SETTINGS)), help="Repeatable; default: all."
)
@_lib_option
def layout(archs: Sequence[str], lib: str | None) -> None:
    """Compare llama.cpp's graphs with the builder's, node for node; exit code 1 where something moved."""
    rows, differences, library = [], [], llama_of(lib)
    for arch in archs or layouts.SETTINGS:
        for keys in layouts.SETTINGS[arch]:
            theirs, ours = layouts.pair(arch, keys, library)
            moved = list(layouts.moved(theirs, ours))
            nodes = sum(len(step.graph) for step in theirs.steps)
            rows.append((arch, keys, len(theirs.steps), nodes, f"{len(moved)} moved" if moved else "equal"))
            if moved:
                more = [f"  and {len(moved) - SHOWN} more"] if len(moved) > SHOWN else []
                differences += ["", f"{arch}-{keys}", *(f"  {m}" for m in moved[:SHOWN]), *more]
    table(rows, ["architecture", "setting", "graphs", "nodes", "layout"])
    for text in differences:
        line(text)
    differ = sum(row[-1] != "equal" for row in rows)
    leave(Outcome.of(Why.FAILED, [f"{counted(differ, 'setting')} with other graphs"] if differ else []))


@click.command()
@backend_option
@click.option(
    "--arch",
    "globs",
    multiple=True,
    metavar="GLOB",
    help="Architectures; repeatable. Default: all that run, or none beside projectors.",
)
@click.option("--runs", metavar="RUN,…", help=f"Of {', '.join(RUNS)}; default: all, or none beside verbs.")
@click.option("--verb", "verb_globs", multiple=True, metavar="GLOB", help="Verbs; repeatable.")
@click.option("--verbs", "every_verb", is_flag=True, help="Every verb.")
@click.option("--list-verbs", is_flag=True, help="Show every verb, what it does and for which models.")
@click.option(
    "--projector", "projector_globs", multiple=True, metavar="GLOB", help="Projectors of images and sounds; repeatable."
)
@click.option("--projectors", "every_projector", is_flag=True, help="Every projector.")
@click.option("--list-projectors", is_flag=True, help="Show every projector, and what each is asked for.")
@click.option("--run", "plan", default="p5.d4", show_default=True, metavar="PLAN", help="What each sequence decodes.")
@_context_option
@_flash_option
@click.option("--weight-type", type=_TYPE, default="f32", show_default=True)
@_cache_option
@click.option("--all-weights", is_flag=True, help="With weights that llama.cpp has a place for and model files lack.")
@click.option("--time-limit", type=click.FloatRange(min=0, min_open=True), default=60.0, metavar="SECONDS")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Architectures at the same time.")
@json_option
def zoo(
    backends: Sequence[str],
    globs: Sequence[str],
    runs: str | None,
    verb_globs: Sequence[str],
    every_verb: bool,
    list_verbs: bool,
    projector_globs: Sequence[str],
    every_projector: bool,
    list_projectors: bool,
    plan: str,
    context: int,
    flash_attn: str | None,
    weight_type: str,
    cache_type: str,
    all_weights: bool,
    time_limit: float,
    jobs: int,
    json_path: Path | None,
) -> None:
    """Let llama.cpp run every architecture on devices and compare its logits with those of its own CPU run.

    A verb compares two ways through llama.cpp's functions, both on the device: say, a state saved and loaded, or not.
    A projector of libmtmd encodes images and sounds, made up as it is itself, on the device and on the CPU.

    Each architecture runs in processes of its own, so a crash or a hang costs one cell. Exit codes: 1 a cell failed, 3
    none passed or failed, 5 interrupted: see docs/exit-codes.md.
    """
    if list_verbs:
        table([(v.name, v.does, _kinds(v)) for v in VERBS.values()], ["verb", "what it does", "models"])
        return
    if list_projectors:
        _list_projectors()
        return
    wanted = _wanted(
        [device(Spec.parse(text)) for text in backends],
        globs,
        runs,
        ["*"] if every_verb else verb_globs,
        ["*"] if every_projector else projector_globs,
    )
    values = {
        "real": "" if all_weights else "1", "w": weight_type, "fa": _SWITCH[flash_attn], "ctx": context,
        "cache": cache_type, "run": plan,
    }  # fmt: skip
    cells: Cells = {}
    interrupted = Outcome()

    def one(row: str) -> None:
        for (name, run), played in _play(wanted, row, values, time_limit).items():
            cells[row, name, run] = played
            if played.verdict not in PASSES or (played.detail and played.verdict != UNSUPPORTED):
                line(f"{played.verdict} {row} on {name}, {run}: {_ends(played.detail)}", err=True)

    try:
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, [*wanted.archs, *wanted.projectors]))
    except KeyboardInterrupt:
        interrupted = Outcome.of(Why.INTERRUPTED, ["interrupted; what ran is shown"])
    rows = record(cells)
    causes = of_zoo(rows)
    if json_path:
        write_json(json_path, {**header("zoo"), "results": rows, "causes": [c.to_json() for c in causes]})
    _show_all(cells, causes, rows, wanted)
    judged = [p for p in cells.values() if p.verdict not in ("NO REFERENCE", UNSUPPORTED)]
    wrong = sum(p.verdict not in PASSES for p in judged)
    leave(
        Outcome.of(Why.FAILED, [counted(wrong, "failure")] if wrong else [])
        + interrupted
        + Outcome.of(Why.UNEXECUTED, [] if judged else ["nothing passed or failed"])
    )


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What `conform zoo` plays."""

    devices: Sequence[Device]
    archs: Sequence[str]
    runs: Mapping[str, Mapping[str, Any]]
    """Of each architecture: of `RUNS`."""
    verbs: Sequence[str]
    projectors: Sequence[str]
    """Names of rows."""


def _wanted(
    devices: Sequence[Device],
    globs: Sequence[str],
    runs: str | None,
    verb_globs: Sequence[str],
    projector_globs: Sequence[str],
) -> _Wanted:
    """What the options name; UsageError where one fits nothing, or there is no device."""
    if not devices:
        raise UsageError("zoo: --backend NAME expected: a ggml library and its device, as ggml?lib=DIR&device=NAME")
    verbs = _fitting("verb", verb_globs, VERBS)
    chosen = {name: RUNS[name] for name in _runs(runs or ("" if verbs else ",".join(RUNS)))}
    seen = [ROOT + name for name in _fitting("projector", projector_globs, projectors())]
    archs = [a for a in runnable(with_variants=True) if any(fnmatchcase(a, g) for g in globs) or not (globs or seen)]
    if globs and not archs:
        raise UsageError(f"zoo: no architecture fits {', '.join(globs)}; conform capture --list shows them")
    return _Wanted(devices, archs, chosen, verbs, seen)


def _play(wanted: _Wanted, row: str, values: Mapping[str, object], time_limit: float) -> dict[tuple[str, str], Played]:
    """Play an architecture or a projector: (device's name, run's name) -> what came of it."""
    if row in wanted.projectors:
        name, runs = row.removeprefix(ROOT), [*MEDIA, *RELATIONS]
        return play_projector(name, wanted.devices, runs, str(values["w"]), time_limit)
    case_id = _zoo_id(row, values, 1)
    ended = play(case_id, wanted.devices, wanted.runs, time_limit) if wanted.runs else {}
    return {**ended, **(play_verbs(case_id, wanted.devices, wanted.verbs, time_limit) if wanted.verbs else {})}


def _ends(text: str) -> str:
    """A long message by its beginning, which says what was asked, and its end, where the first cause stands."""
    return text if len(text) <= BEGIN + END else f"{text[:BEGIN]} … {text[-END:]}"


def _list_projectors() -> None:
    """Print every projector, and what each is asked for."""
    table([(p.name, p.modality, p.type, p.text) for p in projectors().values()],
          ["projector", "for", "clip.projector_type", "text model"])  # fmt: skip
    table([(r.name, r.does, ", ".join(r.modalities)) for r in RELATIONS.values()], ["relation", "what it does", "for"])


def _show_all(cells: Cells, causes: Sequence[CellCause], rows: Sequence[Mapping[str, Any]], wanted: _Wanted) -> None:
    """Print the tables of architectures and of projectors; then the causes, and what came of each run."""
    number = {c.id: n for n, c in enumerate(causes, 1)}
    numbers = {(r["architecture"], r["backend"], r["run"]): number[r["cause"]] for r in rows if "cause" in r}
    devices = [d.name for d in wanted.devices]
    if wanted.archs:
        _show(cells, numbers, devices, ("architecture", wanted.archs, list(wanted.runs)), ("verb", wanted.verbs))
    if wanted.projectors:
        _show(cells, numbers, devices, ("projector", wanted.projectors, list(MEDIA)), ("relation", list(RELATIONS)))
    for text in cell_lines(causes):
        line(text)
    for column in ((d, run) for d in devices for run in (*wanted.runs, *MEDIA)):
        if counts := _counts(cells, column):
            line(f"{column[0]}, {column[1]}: {counts}")


def _show(
    cells: Cells,
    numbers: Mapping[tuple[str, str, str], int],
    devices: Sequence[str],
    rows: tuple[str, Sequence[str], Sequence[str]],
    ways: tuple[str, Sequence[str]],
) -> None:
    """Print a row per model of the runs, and one per verb or relation.

    `numbers`: cell -> the number of its cause. `rows`: what a row is, the rows and the runs. `ways`: what a verb is
    called, and the verbs.
    """
    heading, names, runs = rows
    columns = [(d, run) for d in devices for run in runs]
    if columns:
        ran = [a for a in names if (a, *columns[0]) in cells]
        shown = [(a, *(_numbered(cells.get((a, *c)), numbers.get((a, *c))) for c in columns)) for a in ran]
        table(shown, [heading, *(f"{printable(d)}\n{run}" for d, run in columns)])
    what, verbs = ways
    if verbs:
        counts = [(verb, *(_counts(cells, (d, verb)) for d in devices)) for verb in verbs]
        table(counts, [what, *(printable(d) for d in devices)])


def device(spec: Spec) -> Device:
    """Where llama.cpp runs for a backend; UsageError if that is no ggml library, UnavailableError if it is not here."""
    whole = resolve(spec)
    options = dict(whole.options)
    if whole.name != GGML:
        raise UsageError(f"{spec}: llama.cpp runs on ggml's own backends only: a spec of the adapter {GGML}")
    lib = llama_of(options.get("lib"))
    return Device(str(spec), lib, options.get("device", ""), environment(spec), options.get("rpc", ""))


def llama_of(build: str | None) -> str:
    """The library with llama.cpp of a build, by any name of it; "" for the wheel's."""
    return str(find_llama(locate(build))) if build else ""


def _fitting(option: str, globs: Sequence[str], names: Iterable[str]) -> list[str]:
    """The names that fit a glob, in order; UsageError names a glob that fits none."""
    names = list(names)
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            raise UsageError(f"--{option} {glob}: one of {', '.join(names)} expected")
    return [name for name in names if any(fnmatchcase(name, glob) for glob in globs)]


def _kinds(verb: Verb) -> str:
    return "all" if len(verb.kinds) == len(get_args(Kind)) else ", ".join(verb.kinds)


def _counts(cells: Cells, column: tuple[str, str]) -> str:
    """How many architectures have which verdict in a column."""
    verdicts = Counter(p.verdict for (_, *where), p in cells.items() if tuple(where) == column)
    return ", ".join(f"{n} {v}" for v, n in sorted(verdicts.items()))


def _runs(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")] if text else []
    for name in names:
        if name not in RUNS:
            raise UsageError(f"--runs: one of {', '.join(RUNS)} expected, {name!r} found")
    return names


def cell(played: Played | None) -> str:
    """The largest NMSE of one run, and its verdict where that is not PASS."""
    if played is None:
        return ""
    error = f"{played.nmse:.1e}" if played.nmse is not None else ""
    splits = played.notes.get("splits", 0)
    where = f" ({splits} splits)" if splits > 1 else ""
    return f"{error}{where}" if played.verdict == "PASS" else f"{played.verdict} {error}".strip()


def _numbered(played: Played | None, cause: int | None) -> str:
    """A cell with the number of its cause in the list below the table."""
    return cell(played) if cause is None else f"{cell(played)} [{cause}]"


def record(cells: Cells) -> list[dict[str, Any]]:
    """Every cell as JSON."""
    return [
        {
            "architecture": arch, "backend": name, "run": run, "verdict": p.verdict, "detail": p.detail,
            "nmse": p.nmse if p.nmse is None or p.nmse < float("inf") else "inf", "batch": p.step, **p.notes,
        }
        for (arch, name, run), p in sorted(cells.items())
    ]  # fmt: skip
