"""Templates: cgraphs that differ only in sizes, strides and offsets, which become symbols.

    plan --sample_of--> Sample(structure, numbers, kinds)         one walk over the graph's tensors
    graphs --template_of--> Template                              equal structure, different numbers
    Template.symbolic(plan) --emit--> a model with one parameter per expression of symbols
    Template.bind(numbers) --> the values of these parameters in another graph; None if it does not fit

`lift`, `factor` and `sample` are private to this package. Emitters calculate with the integers of a symbolic plan,
which are `Sym`s: `+ - * // %` keep the expression, and `assumptions` records each comparison.
"""

from .lift import Template, copied, template_of
from .sample import Sample, sample_of
from .sym import Assumption, Const, Expr, Sym, Symbol, assumptions, evaluate, expr_of, poly_of, same

__all__ = [
    "Assumption",
    "Const",
    "Expr",
    "Sample",
    "Sym",
    "Symbol",
    "Template",
    "assumptions",
    "copied",
    "evaluate",
    "expr_of",
    "poly_of",
    "same",
    "sample_of",
    "template_of",
]
