"""The table of op rules: what ggml's constructors make, and assert, for every op the framework knows.

`build.Builder` asks it what a new node is; `check_node` asks it whether a node from a file could have been built.
"""

from __future__ import annotations

from conformance.ggml.errors import GraphError
from conformance.ggml.tensor import Tensor

from .rules_base import Layout, Rule
from .rules_layout import LAYOUT_RULES
from .rules_math import MATH_RULES
from .rules_matrix import MATRIX_RULES
from .rules_model import MODEL_RULES
from .rules_recurrent import RECURRENT_RULES
from .rules_sparse import SPARSE_RULES

RULES: dict[str, Rule] = {
    **LAYOUT_RULES, **MATH_RULES, **MODEL_RULES, **RECURRENT_RULES, **MATRIX_RULES, **SPARSE_RULES
}  # fmt: skip
"""Op name -> rule."""


def check_node(t: Tensor) -> None:
    """Check that a constructor of ggml could have made `t` from its `src` and `op_params`, and that ggml would run it.

    Raises:
        GraphError: an op without a rule; a source too few or too many; an assertion of ggml that breaks; or a type,
            shape, stride, view or parameter other than the constructor's.
    """
    rule = RULES.get(t.op)
    if rule is None:
        raise GraphError(f"{t}: the framework does not support {t.op} yet; it knows {', '.join(RULES)}")
    try:
        _check_counts(t, rule)
        layout = rule.layout(t)
        if layout != (t.type, t.ne, t.nb, t.view_src, t.view_offs):
            raise _differs(t, layout)
        if rule.runs is not None:
            rule.runs(t)
    except GraphError as e:
        raise GraphError(f"{t}: {e}") from None


def _check_counts(t: Tensor, rule: Rule) -> None:
    src, n = t.src, rule.max_src or rule.n_src
    if len(src) > n and any(s is not None for s in src[n:]):
        raise GraphError(f"{t.op} takes at most {n} src, {len(src)} found")
    if len(src) < rule.n_src or None in src[: rule.n_src]:
        raise GraphError(f"{t.op} needs {rule.n_src} src, {sum(s is not None for s in src)} found")
    if t in src and (t.op != "CPY" or t is src[0]):
        raise GraphError("only ggml_cast makes a node its own src, and only the second")
    if any(t.op_params[rule.n_params :]):
        raise GraphError(f"{t.op} has {rule.n_params} op_params, so the rest must be 0: {list(t.op_params)}")


def _differs(t: Tensor, layout: Layout) -> GraphError:
    names = ("type", "ne", "nb", "view_src", "view_offs")
    found = (t.type, t.ne, t.nb, t.view_src, t.view_offs)
    what = next(k for k, a, b in zip(names, layout, found, strict=True) if a != b)
    k = names.index(what)
    return GraphError(f"ggml gives this node {what} {layout[k]}, {found[k]} found")
