"""Running a case whose caches are saved after the first step and written back after the second.

That is what `llama_state_set_data` does: bytes of caches, read at one time and written at another, between two graphs.
"""

from __future__ import annotations

import time

from conformance.backend.interface import Backend
from conformance.case.case import Case
from conformance.ggml.tensor import pack

from .execute import Execution, StepValues


def execute_restored(backend: Backend, case: Case) -> Execution:
    """As `execute`, with the state of the first step once more after the second.

    Args:
        backend: runs it; where it has opaque caches nothing is run.
        case: validated.

    Raises:
        BackendError: the backend failed.
    """
    caches = case.caches()
    steps: list[StepValues] = []
    start = time.perf_counter()
    with backend.open(case) as session:
        opaque = session.opaque().intersection(caches)
        saved = {}
        for k, step in enumerate(() if opaque else case.steps):
            for data in step.inputs.values():
                data.flags.writeable = False  # as in `execute`
            found = session.compute(step.graph, step.inputs, step.outputs)
            steps.append(StepValues(dict(found), {t: pack(session.read(t), t, 0) for t in caches}))
            if k == 0:
                saved = {t: session.read(t) for t in caches}
            elif k == 1:
                for t, data in saved.items():
                    session.write(t, data)
        witness = session.witness()
    return Execution(steps, witness, time.perf_counter() - start, opaque)
