"""What `NPUW_LLM` can follow of a trajectory: one sequence, causal, that grows at its end or goes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from conformance.ggml.tensor import Bytes, Tensor, strided

from .llm_form import Decoder, Leaves, UnfitError

Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Run:
    """A step of one sequence."""

    tokens: Array
    first: int
    """Position of the first token: how many stand before it."""
    wanted: Array
    """Tokens whose logits are asked for, as places among `tokens`."""

    @property
    def past(self) -> int:
        """Tokens of the sequence after this step."""
        return self.first + len(self.tokens)


@dataclass(slots=True)
class History:
    """The cells that hold the tokens of the sequence, in the order of their positions."""

    cells: Array = field(default_factory=lambda: np.empty(0, np.int64))

    def step(self, decoder: Decoder, inputs: Mapping[Tensor, Bytes]) -> Run:
        """Read a step, and follow it.

        Args:
            decoder: its graph.
            inputs: leaf -> its bytes.

        Raises:
            UnfitError: it does not go on, or back, with one causal sequence.
        """
        leaves, given = decoder.leaves, {**inputs, **decoder.rows}
        n = decoder.n_tokens
        tokens, positions = _vector(leaves.tokens, given, n), _vector(leaves.positions, given, n)
        places = [_vector(t, given, n) for t in leaves.cells]
        first = int(positions[0])
        if (positions != np.arange(first, first + n)).any():
            raise UnfitError("positions that do not follow one another; it holds one sequence")
        if not 0 <= first <= len(self.cells):
            raise UnfitError(
                f"begins at position {first} with {len(self.cells)} tokens before it; what a cache holds cannot be "
                f"given to it, only computed"
            )
        if any((p != places[0]).any() for p in places):
            raise UnfitError("K and V of a token go to different cells")
        cells = np.concatenate([self.cells[:first], places[0]])
        if len(set(cells.tolist())) < len(cells):
            raise UnfitError("a cell of the sequence is overwritten while later tokens still see it")
        _check_mask(leaves, given[leaves.mask], cells, first)
        self.cells = cells
        return Run(tokens, first, _wanted(decoder, given))


def _vector(t: Tensor, given: Mapping[Tensor, Bytes], n: int) -> Array:
    x = strided(given[t], t).astype(np.int64).reshape(-1)
    if len(x) != n:
        raise UnfitError(f"{t}: one number for each of {n} tokens expected")
    return x


def _wanted(decoder: Decoder, given: Mapping[Tensor, Bytes]) -> Array:
    picks = decoder.leaves.picks
    if picks is None:
        return np.arange(decoder.n_tokens)
    wanted = strided(given[picks], picks).astype(np.int64).reshape(-1)
    if ((wanted < 0) | (wanted >= decoder.n_tokens)).any():
        raise UnfitError(f"{picks}: picks tokens that the step does not have")
    return wanted


def _check_mask(leaves: Leaves, data: Bytes, cells: Array, first: int) -> None:
    """It makes the mask itself: a token sees itself and all before it."""
    mask = strided(data, leaves.mask)[0, 0].astype(np.float32)
    n, seen = len(cells) - first, mask.shape[1]
    if cells.max() >= seen:
        raise UnfitError(f"a token's cell is beyond the {seen} that the mask has")
    want = np.full((n, seen), -np.inf, np.float32)
    for i in range(n):
        want[i, cells[: first + i + 1]] = 0.0
    if not np.array_equal(mask[:n], want):
        raise UnfitError("a mask that is not causal over one sequence; it makes its own")
