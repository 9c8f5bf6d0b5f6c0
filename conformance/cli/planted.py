"""`conform planted`: does the suite see planted bugs?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path

import click
from tabulate import tabulate

from conformance.ggml.errors import UsageError
from conformance.ggml.text import printable
from conformance.planted import campaign
from conformance.planted.campaign import Hunt
from conformance.planted.faults import FOLDER, Fault, control, read
from conformance.report.runfile import write_json
from conformance.run.session.environment import header
from conformance.suite import FAMILIES
from conformance.suite.family import Level

from .options import family_option, json_option, level_option


@click.command()
@click.option("--faults", "paths", multiple=True, type=click.Path(path_type=Path, exists=True), metavar="FILE|DIR",
              help="TOML files of faults; default: those that come along.")  # fmt: skip
@click.option("--fault", "globs", multiple=True, metavar="GLOB", help="Only these faults, repeatable.")
@click.option("--of", "adapters", multiple=True, metavar="ADAPTER", help="Only faults of this adapter, repeatable.")
@family_option
@level_option
@json_option
def planted(
    paths: Sequence[Path],
    globs: Sequence[str],
    adapters: Sequence[str],
    families: Sequence[str],
    level: Level,
    json_path: Path | None,
) -> None:
    """Plant known bugs in the adapters, one at a time, and print which the suite notices, per family.

    Exit code 1 where a fault is noticed by none of its families, or an adapter without a fault is.
    """
    faults = _chosen(read(list(paths) or [FOLDER]), globs, adapters, families)
    used = {
        of: sorted({n for f in faults if f.of == of for n in f.families}) for of in dict.fromkeys(f.of for f in faults)
    }
    controls = [_named(control(of, names), of) for of, names in used.items()]
    hunts = campaign.run([*faults, *controls], level, _progress)
    unnoticed = _report(faults, controls, hunts)
    if json_path:
        rows = [asdict(h) for h in hunts]
        write_json(
            json_path, {**header("planted"), "level": level, "faults": [asdict(f) for f in faults], "hunts": rows}
        )
    sys.exit(1 if unnoticed else 0)


def _named(fault: Fault, of: str) -> Fault:
    return Fault(f"{fault.name}-{of}", fault.says, of, fault.families, "", "", "")


def _chosen(faults: list[Fault], globs: Sequence[str], adapters: Sequence[str], families: Sequence[str]) -> list[Fault]:
    if unknown := [f for f in families if f not in FAMILIES]:
        raise UsageError(f"family {unknown[0]!r} is unknown; known: {', '.join(FAMILIES)}")
    chosen = []
    for f in faults:
        kept = tuple(n for n in f.families if not families or n in families)
        named = not globs or any(fnmatchcase(f.name, g) for g in globs)
        if kept and named and (not adapters or f.spec.name.partition("+")[0] in adapters):
            chosen.append(Fault(f.name, f.says, f.of, kept, f.file, f.old, f.new))
    if not chosen:
        raise UsageError("planted: no fault is left by --fault, --of and --family")
    return chosen


def _progress(hunt: Hunt) -> None:
    word = f"{hunt.verdict} {hunt.case}" if hunt.noticed else "not noticed"
    click.echo(f"{hunt.fault}: {hunt.family}: {word}", err=True)


def _report(faults: Sequence[Fault], controls: Sequence[Fault], hunts: Sequence[Hunt]) -> bool:
    """Print the tables; whether a fault was missed or an adapter as it is was not let pass."""
    plain = {c.name for c in controls}
    found = {h.fault for h in hunts if h.noticed} - plain
    missed = [f for f in faults if f.name not in found]
    alarms = [h for h in hunts if h.noticed and h.fault in plain]
    rows = []
    for family in FAMILIES:
        asked = [h for h in hunts if h.family == family and h.fault not in plain]
        if asked:
            n = sum(h.noticed for h in asked)
            rows.append((family, f"{n} of {len(asked)}", f"{100 * n / len(asked):.0f} %"))
    rows.append(("any of its families", f"{len(faults) - len(missed)} of {len(faults)}",
                 f"{100 * (len(faults) - len(missed)) / len(faults):.0f} %"))  # fmt: skip
    click.echo(tabulate(rows, ["family", "faults noticed", "kill rate"]))
    click.echo(f"false alarms on {', '.join(c.of for c in controls)}: {len(alarms)}")
    for f in missed:
        click.echo(f"not noticed: {f.name} ({f.of}): {f.says}")
    for h in alarms:
        click.echo(printable(f"false alarm: {h.fault}: {h.case}: {h.detail}"))
    return bool(missed or alarms)
