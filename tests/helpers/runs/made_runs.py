"""Run files as large as wanted, of every kind, with everything that a report has to tell apart. No case runs."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from conformance.case.case import JSON
from conformance.causes.cause import assigned, in_order
from conformance.judge.cause import Cause, Condition
from conformance.judge.evidence import Error, Fault, Numbers, Place
from conformance.judge.verdict import Result, Totals, Verdict
from conformance.run.session.select import case_ids

BACKENDS = ("cpu", "ggml", "openvino-stateless", "openvino-stateful", "npu", "sched?devices=xdna2,cpu")
_BAD = (Verdict.FAIL, Verdict.CRASH, Verdict.OVERCLAIM, Verdict.TIMEOUT, Verdict.VACUOUS)
_NO_EMITTER = ("ops/SSM_SCAN", "ops/ROLL", "ops/SOLVE_TRI")
_DEVICES = {"cpu": "eager", "ggml": "eager"}


def header(kind: str, name: str, written: str, machine: str = "0123456789ab") -> dict[str, JSON]:
    """The begin of a document; `name` makes its run."""
    return {
        "schema": 1,
        "kind": kind,
        "run": sha256(name.encode()).hexdigest()[:32],
        "written": written,
        "environment": {
            "machine": machine,
            "python": "3.11.7",
            "system": "Linux x86_64",
            "cpu": "a processor",
            "cores": 2,
            "packages": {"numpy": "2.4.6", "openvino": "2026.4.1"},
            "unavailable": {},
        },
    }


def conformance(count: int, name: str = "night", backends: Sequence[str] = BACKENDS) -> dict[str, JSON]:
    """A run of about `count` results over `backends`, with every verdict.

    Two ops are refused, one never passes, a single op diverges and one dies whatever is drawn; some cases do not
    run on every backend. Causes explain what is wrong or died of itself, but nothing else that failed.
    """
    rng = random.Random(name)  # noqa: S311  # no secret
    listed = [i for i in case_ids((), (), "full") if not i.startswith("tbo/")]  # two thirds of them, and all alike
    per = -(-count // len(backends))
    ids = [listed[k % len(listed)] + ("" if k < len(listed) else f"{k // len(listed)}") for k in range(per)]
    if per < len(listed):
        ids = listed[:: len(listed) // per][:per]
        first = [next(i for i in listed if not _ran(i, "npu")), next(i for i in listed if i.startswith(_NO_EMITTER))]
        ids = [*first, *(i for i in ids[len(first) :] if _ran(i, "npu") and i not in first)]
    single = [i for i in ids if i.startswith("ops/") and _ran(i, backends[-1])]
    given = {(i, backends[-1]): v for i, v in zip(single, (Verdict.FAIL, Verdict.CRASH), strict=False)}
    results = [_result(rng, i, b, given.get((i, b))) for i in ids for b in backends if _ran(i, b)][:count]
    causes = _explain(results)
    totals = Totals()
    for r in results:
        totals.add(r)
    begun = header("conformance", name, "2026-11-20T02:30:00Z")
    begun["environment"]["unavailable"] = {"openvino-gpu": "no device GPU on this machine"}
    rows: dict[str, JSON] = {
        "results": [r.to_json() for r in assigned(results, causes)],
        "causes": [c.to_json() for c in causes],
    }
    return {**begun, **rows, "totals": totals.to_json()}


def base(count: int) -> dict[str, JSON]:
    """The night before `conformance`: other cases fail, six pairs are not there yet and one is there no more."""
    document = conformance(count, "the night before")
    gone = Result("ops/ADD-f32+f32-a=3@999", "cpu", Verdict.FAIL, notes=("wrong </script><b>",)).to_json()
    return {**document, "written": "2026-11-19T02:30:00Z", "results": [*document["results"][6:], gone], "totals": None}


def _explain(results: Sequence[Result]) -> list[Cause]:
    """A cause for each op (or family), backend and verdict of FAIL and CRASH."""
    alike: dict[tuple[str, str, Verdict], list[Result]] = {}
    for r in results:
        if r.verdict in {Verdict.FAIL, Verdict.CRASH}:
            family, _, rest = r.case.partition("/")
            op = rest.partition("-")[0] if family == "ops" else ""
            alike.setdefault((op or family, r.backend, r.verdict), []).append(r)
    causes = []
    for (what, backend, verdict), of in alike.items():
        name = sha256(f"{what} {verdict}".encode()).hexdigest()[:8]
        cases = sorted({r.case for r in of}, key=lambda c: (len(c), c))
        causes.append(
            Cause(
                name, f"{what} with src[0].type f16 </script><b>&amp; is {verdict} in {len(cases)} cases", backend,
                verdict, what, "" if verdict is Verdict.FAIL else "its process died (SIGABRT)",
                (Condition("src[0].type", "f16"), Condition("src[1].ne[2]", ">1")), tuple(cases), "always",
                {"architectures": len(what), "failed": len(cases), "passed": 0}, f"causes/{name}",
            )
        )  # fmt: skip
    return in_order(causes)


def _ran(case: str, backend: str) -> bool:
    return not (backend == "npu" and case.startswith(("ops/SUM", "zoo/")))


def _result(rng: random.Random, case: str, backend: str, given: Verdict | None) -> Result:
    if backend in {"npu", "openvino-stateful"} and case.startswith(_NO_EMITTER):
        refused = f"{case[4:].partition('-')[0]} node_0: no emitter for this op"
        return Result(case, backend, Verdict.UNSUPPORTED, error=Error(refused, "no emitter for this op"))
    chance = rng.random()
    verdict = given or _verdict(chance, case, backend)
    used = 0.0 if rng.random() < 0.4 else min(0.99, 10 ** rng.gauss(-2.5, 1.0))
    exact = None if rng.random() < 0.7 else used * 1e-5
    seconds, steps = 10 ** rng.gauss(-3, 0.5), 1 if case.startswith("ops/") else 4
    witness: dict[str, JSON] = {
        "device": backend, "path": _DEVICES.get(backend, "translated"), "nodes": rng.randrange(1, 120),
        "compiles": int(backend not in _DEVICES), "cache_hits": rng.randrange(3), "splits": 0, "copies": 0,
        "bytes": {"host": 64 * rng.randrange(400)},
        "kernels": {"MatMul": rng.randrange(9), "Eltwise": rng.randrange(40)},
        "notes": [f"{rng.randrange(30)} views read by slice"], "stage": "run",
    }  # fmt: skip
    r = Result(case, backend, verdict, used, used * 1e-13, exact, seconds, steps, witness, fresh=chance > 0.9995)
    if verdict is Verdict.XFAIL:
        words = "step 0: MUL_MAT node_0 diverges at [0, 0, 0, 0]: as a waiver says"
        return replace(r, waived=Verdict.FAIL, budget_used=3.5).noted(words)
    if verdict is Verdict.FAIL:
        return _failed(r, rng)
    if verdict in {Verdict.CRASH, Verdict.TIMEOUT, Verdict.OVERCLAIM}:
        words = "</script><b>&amp; <!-- not markup"
        message = f"{backend}: computing steps[0]: its process died (SIGABRT): {words}"
        return Result(
            case, backend, verdict, seconds=seconds, where=Place(Fault.NODE, 0, 0, "ADD", "node_0"),
            error=Error(message, words, "SIGABRT"), fresh=r.fresh,
        )  # fmt: skip
    if verdict is Verdict.VACUOUS:
        return replace(r, error=Error("its demand compiles <= 2 is unmet: 5 compiles"))
    return replace(r, waived=Verdict.FAIL) if verdict is Verdict.XPASS else r


def _verdict(chance: float, case: str, backend: str) -> Verdict:
    never = backend.startswith("sched") and case.startswith("ops/CUMSUM")
    if never or (backend not in {"cpu", "ggml"} and chance < 0.012):
        return _BAD[int(chance * 1e6) % len(_BAD)]
    if backend == "npu" and chance > 0.998:
        return Verdict.XFAIL
    return Verdict.XPASS if backend == "npu" and chance > 0.9977 else Verdict.PASS


def _failed(r: Result, rng: random.Random) -> Result:
    op = r.case.partition("/")[2].partition("-")[0].partition(".")[0]
    used = None if rng.random() < 0.2 else 10 ** rng.uniform(0.1, 9)
    nmse = 10 ** rng.uniform(-9, 0)
    numbers = Numbers((3, 5, 0, 0), rng.gauss(0, 1), rng.gauss(0, 1), nmse, 1e-12)
    where = Place(Fault.NODE, 0, 0, op, "node_0", "f32[64, 4, 1, 1]", numbers)
    saved = f"failures/{r.case.replace('/', '_')}_{r.backend}.gguf"
    return replace(r, budget_used=used, nmse=nmse, where=where, saved=saved)


UNITS = (("prefill@pp512", "tokens", 512), ("decode@past=512", "tokens", 64), ("load", "bytes", 1 << 24))


def perf(night: int, slower: float = 1.0) -> dict[str, JSON]:
    """Timings of one night; `slower` divides what openvino-stateful does. One unit fails, one gate of four does."""
    rng = random.Random(night)  # noqa: S311  # as above
    results: list[Result] = []
    for unit, of, work in UNITS:
        for backend, pace in (("ggml", 1.0), ("openvino-stateless", 1.6), ("openvino-stateful", 0.9 * slower)):
            case = f"perf/{unit}/llama-l=2,embd=256@1"
            if backend == "openvino-stateless" and unit == "load":
                results.append(Result(case, backend, Verdict.FAIL, notes=("its case is FAIL",)))
                continue
            base = pace * work / (900 if of == "tokens" else 4e8)
            seconds = sorted(base * rng.lognormvariate(0, 0.03) for _ in range(16))
            ends = {"seconds": seconds[8], "seconds.low": seconds[3], "seconds.high": seconds[12], "rounds": 16}
            counters = {"compiles": 2, "copies": 0, "bytes": 4096}
            metrics = {**ends, f"{of}_per_second": work / seconds[8], **counters}
            results.append(Result(case, backend, Verdict.PASS, metrics=metrics))
    gates = (Verdict.PASS, Verdict.FAIL, Verdict.UNSUPPORTED)
    results += [
        Result(f"gate/gate {k}", "openvino-stateful", v, error=None if v is Verdict.PASS else Error(f"it is {v}"),
               metrics={"estimate": 0.56 + k / 9, "limit": 0.7})
        for k, v in enumerate(gates)
    ]  # fmt: skip
    begun = header("conformance", f"perf {night}", f"2026-11-{night:02d}T03:00:00Z")
    return {**begun, "asked": dict(Counter(r.backend for r in results)), "results": [r.to_json() for r in results]}


def write(folder: Path, count: int, nights: int = 12) -> list[Path]:
    """All of them as files of `folder`."""
    documents = {"conformance": conformance(count)}
    documents |= {f"perf-{n:02d}": perf(n, 1.0 if n < 8 else 1.25) for n in range(1, nights + 1)}
    paths = []
    for name, document in documents.items():
        paths.append(folder / f"{name}.json")
        paths[-1].write_text(json.dumps(document), encoding="utf-8")
    return paths
