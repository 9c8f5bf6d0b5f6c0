"""Models that cannot be made or loaded: what is the harness's own, what is the backend's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import conform_here
from gguf import GGUFReader
from marks import needs_wheel

from conformance.ggml.errors import BackendTimeoutError
from conformance.ggml.tensor import Tensor, new_tensor
from conformance.ggml.types import TYPES
from conformance.llama.live import llama
from conformance.llama.live import worker as live_worker
from conformance.llama.live.scenario import id_of
from conformance.llama.zoo import family
from conformance.llama.zoo.family import Request
from conformance.llama.zoo.load import RefusedError, UnloadableError
from conformance.llama.zoo.model import open_writer, write_tensors

CASES = (id_of("llama", "batch-2"), "arch/llama-real=1@1")
Made = Callable[..., Request]


def _verdicts(path: Path, *more: str) -> dict[str, tuple[str, str, int]]:
    """Run `CASES`; case -> verdict, detail and exit code."""
    globs = [word for c in CASES for word in ("--case", c)]
    ended = conform_here("run", "--backend", "ggml", *globs, "--json", path, *more)
    rows = json.loads(path.read_text(encoding="utf-8"))["results"]
    return {r["case"]: (r["verdict"], r["detail"], ended.exit_code) for r in rows}


def _with_another_weight(path: Path, *rest: Any) -> Request:  # noqa: ANN401  # as `prepare`
    """Make a model as ours of an architecture that another build reads otherwise."""
    request = family.prepare(path, *rest)
    reader = GGUFReader(path)
    held = {t.name: np.array(t.data).view(np.uint8).reshape(-1) for t in reader.tensors}
    tensors: list[Tensor] = [new_tensor(TYPES["f32"], *map(int, t.shape), name=t.name) for t in reader.tensors]
    more = new_tensor(TYPES["f32"], 4, name="blk.0.of_next_year.weight")
    held[more.name] = np.zeros(16, np.uint8)
    keys: Mapping[str, Any] = request.provenance["keys"]
    other = path.with_name("other.gguf")
    write_tensors(open_writer(other, "llama", keys), [*tensors, more], lambda t: held[t.name])
    return replace(request, model=str(other))


@needs_wheel
def test_a_model_of_ours_that_a_build_refuses_is_unsupported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A build that reads an architecture's weights otherwise is not blamed; its words are the reason."""
    monkeypatch.setattr(llama, "prepare", _with_another_weight)
    found = _verdicts(tmp_path / "run.json")
    assert {verdict for verdict, _, _ in found.values()} == {"UNSUPPORTED"}
    assert all("no model: " in detail and "wrong number of tensors" in detail for _, detail, _ in found.values())
    assert {code for _, _, code in found.values()} == {3}


@needs_wheel
@pytest.mark.parametrize(("cpu_loads", "error"), [(True, UnloadableError), (False, RefusedError)])
def test_a_device_is_blamed_for_a_model_that_the_cpu_loads(
    cpu_loads: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a refusal on the CPU of the same library shows that the file does not fit."""

    class Model:
        def __init__(self, _: Request, device: str, *__: object) -> None:
            if device or not cpu_loads:
                raise UnloadableError("llama.cpp cannot load it")

        def free(self) -> None:
            pass

    monkeypatch.setattr(live_worker, "DeviceModel", Model)
    with pytest.raises(error):
        live_worker.open_model(Request("", ""), "GPU0")


@needs_wheel
def test_a_model_that_is_not_made_in_time_is_a_timeout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A busy machine makes no case inapplicable: exit code 1, not 3."""
    monkeypatch.setattr(llama, "prepare", lambda _, request, *__: family.ask(request, time_limit=1e-3))
    found = _verdicts(tmp_path / "run.json")
    assert {verdict for verdict, _, _ in found.values()} == {"TIMEOUT"}
    assert all("no model: llama.cpp gave no answer" in detail for _, detail, _ in found.values())
    assert {code for _, _, code in found.values()} == {1}


@needs_wheel
def test_a_model_has_the_time_of_a_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`--time-limit` gives more time to the llama.cpp that makes a model, too."""
    limits: list[float] = []

    def ask(request: Request, time_limit: float = 0.0) -> dict[str, Any]:
        limits.append(time_limit)
        return real(request, time_limit)

    real = family.ask
    monkeypatch.setattr(family, "ask", ask)
    _verdicts(tmp_path / "run.json", "--time-limit", "500")
    assert set(limits) == {500.0}


@needs_wheel
def test_a_reference_that_takes_too_long_is_a_timeout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The CPU that hangs or is busy gives no numbers, but the case applies."""

    class Late(llama.Process):
        def ask(self, **_: object) -> dict[str, Any]:
            raise BackendTimeoutError("no answer within 1 s")

    monkeypatch.setattr(llama, "Process", Late)
    verdict, detail, _ = _verdicts(tmp_path / "run.json")["arch/llama-real=1@1"]
    assert (verdict, detail) == ("TIMEOUT", "no reference: on the CPU: no answer within 1 s")


@needs_wheel
@pytest.mark.parametrize("keys", [{"do": "flash-attn"}, {"fa": 0, "do": "batch-2"}])
def test_v_in_blocks_without_flash_attention_is_unsupported(keys: dict[str, object], tmp_path: Path) -> None:
    """llama.cpp refuses such a context, as it may; the reason is what it says, and nothing else."""
    out, do = tmp_path / "run.json", str(keys.pop("do"))
    conform_here("run", "--backend", "ggml", "--case", id_of("llama", do, cache="q8_0", **keys), "--json", out)
    (row,) = json.loads(out.read_text(encoding="utf-8"))["results"]
    assert row["verdict"] == "UNSUPPORTED"
    assert row["detail"].endswith("quantized V cache requires flash_attn to be enabled")
    assert "reserve" not in row["detail"]
