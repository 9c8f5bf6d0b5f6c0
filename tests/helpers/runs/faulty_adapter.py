"""Source of an adapter that crashes, hangs and is wrong, and a case of each."""

from __future__ import annotations

ADAPTER = """
import os, time
from pathlib import Path
from backends.ggml import GgmlBackend

class Faulty(GgmlBackend):
    delegates = ("ggml",)

    def __init__(self, mark=""):
        super().__init__()
        Path(mark or os.devnull).touch()

    def open(self, case):
        session = super().open(case)
        ops = {n.op for s in case.steps for n in s.graph}
        compute = session.compute
        if "MUL" in ops:
            session.compute = lambda *args, **words: {
                t: 0 * b if t.op == "MUL" else b for t, b in compute(*args, **words).items()
            }
        if "SQR" in ops:  # also in a graph with others
            session.compute = hang
        if "GET_ROWS" in ops:
            session.compute = lambda *_, **__: os.abort()
        return session

def hang(*_, **__):
    while True:
        pass
"""
CRASHES, HANGS = "ops/GET_ROWS-f32+i32-a=32x2,n=1@523", "ops/SQR-f32-ne=65x1@932"
WRONG, RIGHT = "ops/MUL-f32+f32-a=24x5x2,inplace=input@893", "ops/ADD-f32+f32-a=*"
