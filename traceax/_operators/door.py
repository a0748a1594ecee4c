"""The door: the one place where an operator of lineax becomes a map of flat vectors.

A public call enters its operator once. What tracing finds is the *code* of the operator:
what is computed before any product, and the product. A compiled program depends on that
code, and not on the Python objects that it was traced from, so that an operator made anew
in each pass of a loop is compiled once.
"""

import functools as ft
from collections.abc import Callable, Hashable
from typing import Any

import equinox as eqx
import jax
import lineax as lx
from jaxtyping import Array, DTypeLike, Inexact, PyTree

from .._core.arithmetic import standard_promotion
from .._core.checks import needing_wide_integers
from .._core.code import Code, FlatFunction
from .._core.flat import FlatOperator, from_flat, to_flat
from .._core.jax_interfaces import ClosedJaxpr, jaxpr_as_fun
from .._core.linearity import why_not_linear
from .checks import check_is_operator
from .determinant import SignLog, structured_log_det
from .diagonal import diagonal_cost
from .tags import dtypes, is_hermitian, sign_of


class Facts(eqx.Module):
    """What lineax knows of an operator without a product.

    - `diagonal`: shape `(n,)`, the diagonal, if it costs less than n products.
    - `diagonal_cost`: how many products it costs; n where it is not known.
    - `determinant`: its sign and logarithm, where the structure gives them.
    """

    diagonal: Inexact[Array, " n"] | None
    determinant: SignLog | None
    diagonal_cost: int = eqx.field(static=True)


class EnteredOperator(eqx.Module):
    """An operator that has come through the door. Compiled programs `open` it.

    - `arrays`: those of the operator, and those that its code closes over.
    - `structure`: of the vectors that it is applied to, a PyTree of
        `jax.ShapeDtypeStruct`.
    - `square`: whether products have the same one.
    """

    arrays: list[Array]
    structure: PyTree[jax.ShapeDtypeStruct]
    square: bool = eqx.field(static=True)
    _setup: Code = eqx.field(static=True)
    _form: Any = eqx.field(static=True)

    @property
    def flat(self) -> FlatOperator:
        """The operator without its arrays: sizes, dtypes and tags."""
        return self._unflatten([None] * self._form.num_leaves)[0]

    @property
    def size(self) -> int:
        return self.flat.size

    def open(self) -> tuple[FlatOperator, Facts]:
        """The operator, after what it computes before any product."""
        count = len(self._setup.jaxpr.constvars)
        closed = ClosedJaxpr(self._setup.jaxpr, self.arrays[:count])
        return self._unflatten(jaxpr_as_fun(closed)(*self.arrays[count:]))

    def _unflatten(self, leaves: list[Any]) -> tuple[FlatOperator, Facts]:
        return jax.tree.unflatten(self._form, leaves)


def enter(
    operator: Any, *, name: str = "operator", square: bool = True, second: Any = None
) -> EnteredOperator:
    """Check an operator, and trace it; `second` is the argument that comes after it."""
    check_is_operator(operator, name=name, square=square, second=second)
    leaves, treedef = jax.tree.flatten(operator)
    arrays = [leaf for leaf in leaves if eqx.is_array(leaf)]
    others = tuple(None if eqx.is_array(leaf) else leaf for leaf in leaves)
    # JAX keeps what it has traced, by the objects that the operator consists of.
    with standard_promotion(), needing_wide_integers():
        traced = _trace.trace((treedef, others), arrays)
    setup = traced.jaxpr
    return EnteredOperator(
        [*setup.consts, *arrays],
        operator.in_structure(),
        operator.in_structure() == operator.out_structure(),
        Code.of(setup.jaxpr),
        jax.tree.structure(traced.out_info),
    )


@ft.partial(jax.jit, static_argnums=0)
def _trace(
    static: tuple[Any, tuple[Hashable, ...]], arrays: list[Array]
) -> tuple[FlatOperator, Facts]:
    treedef, others = static
    remaining = iter(arrays)
    leaves = [next(remaining) if leaf is None else leaf for leaf in others]
    operator = jax.tree.unflatten(treedef, leaves)
    return flatten(operator), _facts(operator)


def _facts(operator: lx.AbstractLinearOperator) -> Facts:
    cost, size = diagonal_cost(operator), operator.in_size()
    square = operator.in_structure() == operator.out_structure()
    diagonal = None
    if square and cost < size:
        diagonal = lx.diagonal(operator).astype(dtypes(operator)[0])
    return Facts(diagonal, structured_log_det(operator), cost)


def flatten(operator: lx.AbstractLinearOperator) -> FlatOperator:
    """The operator as a map of flat vectors: the leaves of PyTrees are joined one after
    another.

    It makes no product. What does not depend on the vector is computed once, by
    `lineax.linearise`, and held as long as the result.

    **Arguments:**

    - `operator`: a `lineax.AbstractLinearOperator` of any structure.

    **Returns:**

    A [`traceax.internal.FlatOperator`][] of the size and dtype of the operator, at least
    float32.

    **Raises:**

    `ValueError` for a function of which tracing shows that it is not linear.
    """
    structure = operator.in_structure()
    dtype, precision = dtypes(operator)
    linear = lx.linearise(operator)

    def mv(vector):
        return to_flat(linear.mv(from_flat(vector, structure)), dtype)

    size = operator.in_size()
    product = FlatFunction.of(mv, (size,), dtype)
    if _has_function(operator):
        _check_linear(product)
    return FlatOperator(
        product, size, dtype, precision, is_hermitian(operator), sign_of(operator)
    )


def _has_function(operator: lx.AbstractLinearOperator) -> bool:
    """Whether a function of the user, that may not be linear, is a part of it."""
    is_function = lambda x: isinstance(x, lx.FunctionLinearOperator)  # noqa: E731
    return any(map(is_function, jax.tree.leaves(operator, is_leaf=is_function)))


def _check_linear(product: FlatFunction) -> None:
    if (reason := why_not_linear(product.code.jaxpr)) is not None:
        raise ValueError(
            f"`operator` must be linear. Found a function that is not: {reason}. For the "
            "derivative of a function at a point x, pass `traceax.hessian(function, x)` "
            "if it returns a scalar, or `lineax.JacobianLinearOperator(lambda x, _: "
            "function(x), x)`."
        )


def unflatten(
    fn: Callable[[Array], Array],
    structure: PyTree,
    dtype: DTypeLike,
    tags: object,
) -> lx.FunctionLinearOperator:
    """A map of flat vectors as an operator on PyTrees of `structure`."""

    def mv(tree):
        with standard_promotion():
            return from_flat(fn(to_flat(tree, dtype)), structure)

    return lx.FunctionLinearOperator(mv, structure, tags)
