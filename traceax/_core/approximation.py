"""A mark in traced code which says that a product is an approximation, with the size of
its relative error.

The mark is the identity, by the name that `jax.ad_checkpoint.checkpoint_name` gives to a
value, so it survives all that may be made of the product: sums, multiples, loops over
batches, and functions that call it.
"""

from collections.abc import Iterator
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, PyTree

from .jax_interfaces import ClosedJaxpr, Jaxpr


_MARK = "traceax: relative error "


def mark_approximation(image: PyTree[Array], error: float) -> PyTree[Array]:
    """The same image of a vector, marked as an approximation with this relative error."""
    return jax.tree.map(lambda x: checkpoint_name(x, f"{_MARK}{error}"), image)


def approximation_error(code: Jaxpr) -> float:
    """The largest error that is marked in the code of a product; 0 if none is."""
    names = (str(eqn.params.get("name")) for eqn in equations(code))
    marks = [name for name in names if name.startswith(_MARK)]
    return max((float(mark.removeprefix(_MARK)) for mark in marks), default=0.0)


def equations(code: Jaxpr) -> Iterator[Any]:
    """All equations of a jaxpr, and those of the jaxprs in it."""
    for eqn in code.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from equations(inner)


def inner_jaxprs(eqn: Any) -> Iterator[Jaxpr]:
    """The jaxprs that an equation calls, such as the body of a loop."""
    for leaf in jax.tree.leaves(list(eqn.params.values())):
        if isinstance(leaf, ClosedJaxpr):
            yield leaf.jaxpr
        elif isinstance(leaf, Jaxpr):
            yield leaf
