"""The door: the one place where a lineax operator becomes a map of flat vectors.

A public call enters its operator once. Tracing gives the *code* of the operator: the
setup, which is all computations before any matvec, and the matvec. A compiled program
depends on that code, and not on the Python objects that it was traced from. So an
operator that is constructed anew in each pass of a loop is compiled once.
"""

import functools as ft
from collections.abc import Callable, Hashable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, DTypeLike, Inexact, PyTree, Real

from .._core.approximation import approximation_error
from .._core.arithmetic import standard_promotion
from .._core.checks import explain_index_overflow
from .._core.code import Code, FlatFunction
from .._core.flat import FlatOperator, from_flat, to_flat
from .._core.jax_interfaces import ClosedJaxpr, jaxpr_as_fun
from .._core.linearity import why_not_linear
from .checks import checked_operator
from .determinant import SignLog, structured_log_det
from .diagonal import diagonal_cost
from .rows import rows_of
from .spectrum import Spectrum, spectrum_of
from .tags import dtypes, Symmetry, symmetry_of


class Facts(eqx.Module):
    """Facts that lineax knows about an operator, most of them without a matvec.

    - `diagonal`: the diagonal, shape `(n,)`, if it costs less than n matvecs; else None.
    - `determinant`: its sign and logarithm, where the structure gives them; else None.
    - `spectrum`: all eigenvalues of a Hermitian operator, where the structure gives them;
        else None.
    - `rows`: the norm of each row, shape `(m,)`, where the structure gives them; else
        None.
    - `diagonal_cost`: the number of matvecs that the diagonal costs, n at most.
    """

    diagonal: Inexact[Array, " n"] | None
    determinant: SignLog | None
    spectrum: Spectrum | None
    rows: Real[Array, " m"] | None
    diagonal_cost: int = eqx.field(static=True)


class EnteredOperator(eqx.Module):
    """An operator that has come through the door. Compiled programs `open` it.

    - `arrays`: the arrays that the code of the operator closes over, then the arrays of
        the operator itself.
    - `structure`: the structure of the vectors that it is applied to, a PyTree of
        `jax.ShapeDtypeStruct`.
    - `image`: the structure of its images.
    - `_setup`: the code of the setup, which returns the leaves of the flat operator and
        of its facts.
    - `_treedef`: the PyTree structure of this pair.
    """

    arrays: list[Array]
    structure: PyTree[jax.ShapeDtypeStruct]
    image: PyTree[jax.ShapeDtypeStruct]
    _setup: Code = eqx.field(static=True)
    _treedef: Any = eqx.field(static=True)

    @property
    def flat(self) -> FlatOperator:
        """The operator without its arrays: sizes, dtypes and tags."""
        return self._unflatten([None] * self._treedef.num_leaves)[0]

    @property
    def facts(self) -> Facts:
        """The facts without their arrays: what they cost."""
        return self._unflatten([None] * self._treedef.num_leaves)[1]

    @property
    def code(self) -> Code:
        """The code of a matvec."""
        return self.flat.fn.code  # pyright: ignore[reportFunctionMemberAccess]

    @property
    def square(self) -> bool:
        """Whether images have the structure of the vectors."""
        return self.image == self.structure

    @property
    def size(self) -> int:
        """n, the length of the flat vectors that the operator is applied to."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.structure))

    def open(self) -> tuple[FlatOperator, Facts]:
        """Run the setup, and return the flat operator and its facts."""
        count = len(self._setup.jaxpr.constvars)
        closed = ClosedJaxpr(self._setup.jaxpr, self.arrays[:count])
        return self._unflatten(jaxpr_as_fun(closed)(*self.arrays[count:]))

    def _unflatten(self, leaves: list[Any]) -> tuple[FlatOperator, Facts]:
        return jax.tree.unflatten(self._treedef, leaves)


def enter(
    operator: Any, *, name: str = "operator", square: bool = True, second: Any = None
) -> EnteredOperator:
    """Convert a matrix to an operator, check it and trace it. `name` is the name of the
    argument in error messages. `second` is the argument that follows it: if that is an
    operator, and the first is none, the message says that they are swapped."""
    operator, inputs, outputs = checked_operator(
        operator, name=name, square=square, second=second
    )
    leaves, treedef = jax.tree.flatten(operator)
    arrays = [leaf for leaf in leaves if eqx.is_array(leaf)]
    others = tuple(None if eqx.is_array(leaf) else leaf for leaf in leaves)
    # Inside of the trace no array has values, so the signs of arrays are read here.
    symmetry = symmetry_of(operator)
    assumed = tuple(
        i for i, x in enumerate(arrays) if any(x is y for y in symmetry.assumed)
    )
    # JAX caches traces by the objects that the operator consists of: an operator that is
    # the same object as in an earlier call is not traced again.
    static = treedef, others, symmetry._replace(assumed=assumed)
    with standard_promotion(), explain_index_overflow():
        traced = _trace.trace(static, arrays)
        setup, opened = traced.jaxpr, traced.out_info
        if len(setup.in_avals) > len(arrays):
            # The operator closes over values that an outer transformation traces.
            # `jax.jit` turns them into hidden arguments, which have no values here;
            # `jax.make_jaxpr` turns them into constants, which have.
            trace = jax.make_jaxpr(ft.partial(_open, static), return_shape=True)
            setup, opened = trace(arrays)
    return EnteredOperator(
        arrays=[*setup.consts, *arrays],
        structure=inputs,
        image=outputs,
        _setup=Code.of(setup.jaxpr),
        _treedef=jax.tree.structure(opened),
    )


def _open(
    static: tuple[Any, tuple[Hashable, ...], Symmetry], arrays: list[Array]
) -> tuple[FlatOperator, Facts]:
    treedef, others, symmetry = static
    remaining = iter(arrays)
    leaves = [next(remaining) if leaf is None else leaf for leaf in others]
    operator = jax.tree.unflatten(treedef, leaves)
    assumed = tuple(arrays[i] for i in symmetry.assumed)
    return flatten(operator, symmetry._replace(assumed=assumed)), _facts(operator)


# It is never compiled, only traced: a `jax.jit` function caches its traces.
_trace = jax.jit(_open, static_argnums=0)


def _facts(operator: lx.AbstractLinearOperator) -> Facts:
    cost, size = diagonal_cost(operator), operator.in_size()
    square = operator.in_structure() == operator.out_structure()
    dtype, _ = dtypes(operator)
    diagonal = None
    # A diagonal at the cost of n matvecs is no fact: it costs as much as an exact answer.
    if square and cost < size:
        diagonal = lx.diagonal(operator).astype(dtype)
    determinant, spectrum = structured_log_det(operator), spectrum_of(operator)
    rows = rows_of(operator)
    if rows is not None:
        rows = rows.norms.astype(jnp.finfo(dtype).dtype)
    return Facts(diagonal, determinant, spectrum, rows, cost)


def flatten(
    operator: lx.AbstractLinearOperator, symmetry: Symmetry | None = None
) -> FlatOperator:
    """Convert an operator to a map of flat vectors: the leaves of PyTrees are joined one
    after another.

    This takes no matvec. `lineax.linearise` makes the computations that do not depend on
    the vector once, and the returned operator holds their results.

    **Arguments:**

    - `operator`: a `lineax.AbstractLinearOperator` of any structure.
    - `symmetry`: of the operator, where that was found outside of a trace.

    **Returns:**

    A [`traceax.internal.FlatOperator`][] of the size of the operator, and of its dtype or
    float32, whichever is more precise.

    **Raises:**

    `ValueError` if tracing shows that a function is not linear.
    """
    structure = operator.in_structure()
    dtype, precision = dtypes(operator)
    linear = lx.linearise(operator)

    def mv(vector):
        return to_flat(linear.mv(from_flat(vector, structure)), dtype)

    symmetry = symmetry or symmetry_of(operator)
    sign_holds = None
    if symmetry.assumed:
        # NaN passes: it makes a matvec that is not finite, which is reported as such.
        sign_holds = ~jnp.stack([jnp.any(x < 0) for x in symmetry.assumed]).any()
    size = operator.in_size()
    fn = FlatFunction.of(mv, shape=(size,), dtype=dtype)
    # All other operators of lineax are linear by construction.
    if _has_function(operator):
        _check_linear(fn)
    return FlatOperator(
        fn=fn,
        size=size,
        dtype=dtype,
        precision=precision,
        hermitian=symmetry.hermitian,
        sign=symmetry.sign,
        sign_holds=sign_holds,
        error=approximation_error(fn.code.jaxpr),
    )


def _has_function(operator: lx.AbstractLinearOperator) -> bool:
    """Whether the operator contains a user's function, which may not be linear."""
    is_function = lambda x: isinstance(x, lx.FunctionLinearOperator)  # noqa: E731
    return any(map(is_function, jax.tree.leaves(operator, is_leaf=is_function)))


def _check_linear(fn: FlatFunction) -> None:
    """Raise if the code of a matvec shows that it is not linear."""
    if (reason := why_not_linear(fn.code.jaxpr)) is not None:
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
    """Convert a map of flat vectors to an operator on PyTrees of `structure`."""

    def mv(tree):
        # JAX may trace this later, outside the context of the call.
        with standard_promotion():
            return from_flat(fn(to_flat(tree, dtype)), structure)

    return lx.FunctionLinearOperator(mv, structure, tags)
