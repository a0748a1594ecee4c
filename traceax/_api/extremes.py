"""What `eigsh` and `svds` have in common: the answer, checks, derivatives and errors."""

from __future__ import annotations

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PRNGKeyArray, PyTree, Real

from .._core.checks import check_key, check_positive, concrete_number, real_scalar
from .._core.flat import FlatOperator, from_flat
from .._core.report import as_number, describe_values, fetch, has_numbers, reading
from .._core.results import failure, first_failure, RESULTS
from .._core.sampler import require_key
from .._krylov.extreme_eigenpairs import ExtremePairs
from .._krylov.thick_restart import Sizes
from .._run.execution import AbstractExecution
from .._run.gradient import attach, PairFrame, refuse_derivative
from .._run.undifferentiable import undifferentiable


class AbstractExtremes(eqx.Module):
    """A few eigenvalues or singular values, with vectors and residuals. A subclass adds
    properties for the vectors.

    - `values`: the values, shape `(num,)`, with derivatives.
    - `raw`: what has no derivative: vectors, residuals and errors.
    """

    values: eqx.AbstractVar[Real[Array, " num"]]
    result: eqx.AbstractVar[Any]
    stats: eqx.AbstractVar[dict[str, Any]]
    raw: eqx.AbstractVar[dict[str, PyTree[Array]]]
    quantity: eqx.AbstractVar[str]
    estimated: ClassVar[tuple[str, ...]] = ("values", "raw")

    @property
    def residuals(self) -> Real[Array, " num"]:
        """The norms of the residuals, shape `(num,)`."""
        return self.constant("residuals")

    def interval(self) -> tuple[Real[Array, " num"], Real[Array, " num"]]:
        """For each value an interval that contains an eigenvalue, or a singular value, of
        the operator: the value plus and minus the norm of the residual and an allowance
        for rounding.

        Where values are close to each other, it does not say which one.

        **Returns:**

        The lower and the upper ends, real arrays of the shape of `values`.
        """
        error = self.constant("errors")
        return self.values - error, self.values + error

    def constant(self, name: str) -> PyTree[Array]:
        """An entry of `raw`. Where the values carry a derivative, it raises."""
        message = (
            f"The {name} of a `traceax.{type(self).__name__}` have no derivative; only "
            "its `values` have one. To use them as constants, take them from "
            f"`jax.lax.stop_gradient(pairs)`, where `pairs` is the "
            f"`{type(self).__name__}`."
        )
        return refuse_derivative(self.raw[name], self.values, message=message)

    @property
    def successful(self) -> Bool[Array, ...]:
        """Whether the call succeeded; an array for a batch."""
        return self.result == RESULTS.successful

    @property
    def matvecs(self) -> int | Array:
        """The number of matrix-vector products. A Python integer, or an array inside of
        a program and for a batch."""
        return as_number(self.stats["num_matvecs"])

    def __repr__(self) -> str:
        errors = self.raw.get("errors")
        parts = self.values, errors, jax.tree.leaves(self.result), self.stats
        if not has_numbers(*parts):
            return eqx.tree_pformat(self)
        with reading():
            values, errors, (result,), stats = fetch(parts)
            return describe_values(
                title=self.quantity,
                values=values,
                errors=errors,
                result=result,
                stats=stats,
            )

    @property
    def details(self) -> str:
        """A sentence with the numbers of a failed call."""
        return (
            f"Found the values {self.values} with residuals {self.raw['residuals']} "
            f"after {self.stats['num_matvecs']} matvecs."
        )


def unflatten_columns(columns: Array, structure: PyTree) -> PyTree[Array]:
    """The columns as PyTrees of this structure, stacked along a leading axis."""
    return jax.vmap(lambda column: from_flat(column, structure))(columns.T)


def check_call(
    num: Any, k: Any, rtol: Any, key: PRNGKeyArray | None, *, size: int, cost: int
) -> tuple[Sizes, int, Real[Array, ""]]:
    """Check the arguments, for an operator whose smaller side is `size`. `cost` is the
    number of matvecs that one vector takes."""
    num, k = check_positive("num", num), check_positive("k", k)
    if num > size:
        raise ValueError(
            f"`num` must be at most the size of the operator, {size}. Found {num}."
        )
    sizes = Sizes.of(num)
    exact = sizes.fills(size)
    least = size if exact else cost * (sizes.least + num)
    if k < least:
        raise ValueError(
            f"`k` must be at least {least} for {num} of {size} values. Found {k}."
        )
    # An array, so that a program serves all tolerances.
    tolerance = real_scalar("rtol", rtol)
    number = concrete_number(tolerance)
    if number is not None and not 0 <= number < 1:
        raise ValueError(
            f"`rtol` must be at least 0 and less than 1. Found {rtol}. Pass, for "
            "example, 1e-4; 0 asks for all digits."
        )
    check_key(key)
    if not exact:
        require_key(key)
    return sizes, k, tolerance


def tolerance_of(rtol: Any, flat: FlatOperator, sizes: Sizes) -> Real[Array, ""]:
    """The tolerance of residuals relative to the norm of A, at least that of rounding."""
    real = jnp.finfo(flat.dtype).dtype
    return jnp.maximum(jnp.asarray(rtol, real), _least_residual(flat, sizes))


def _least_residual(flat: FlatOperator, sizes: Sizes) -> float:
    """The relative size of residuals that are only rounding: of matvecs, and of the
    factorisation of a matrix of the size of a basis, of which 40 rows were seen to leave
    8 times the machine epsilon for eigenvalues, and 40 for singular values."""
    return flat.rounding + sizes.most * float(jnp.finfo(flat.dtype).eps)


class Judged(eqx.Module):
    """Values with their derivative, the half-widths of their intervals, and a result."""

    values: Real[Array, " num"]
    errors: Real[Array, " num"]
    result: Any


def judge(
    flat: FlatOperator,
    pairs: ExtremePairs,
    *,
    rtol: Any,
    sizes: Sizes,
    execution: AbstractExecution,
) -> Judged:
    """Give the values their derivative, and see whether the residuals are small."""
    left, right = pairs.vectors[0], pairs.vectors[-1]
    rounding = flat.rounding * pairs.scale
    errors = pairs.residuals + rounding
    # The derivative `u* dA v` is that of a simple value. A Ritz value that is not among
    # the wanted ones counts as it is, since its residual may be large.
    gaps = jnp.abs(pairs.values[:, None] - pairs.values)
    gaps = jnp.where(jnp.eye(len(errors), dtype=bool), jnp.inf, gaps - errors)
    apart = jnp.all(gaps > errors[:, None], axis=1)
    others = jnp.abs(pairs.values[:, None] - pairs.others)
    apart &= jnp.all(others > errors[:, None], axis=1)
    if len(pairs.vectors) > 1:
        # A singular value has a kink at zero.
        apart &= pairs.values > errors
    values = attach(flat, pairs.values, PairFrame(left, right), execution=execution)
    # What the run took for small enough, and the rounding of the last step.
    tolerance = tolerance_of(rtol, flat, sizes) + _least_residual(flat, sizes)
    converged = jnp.all(pairs.residuals <= tolerance * pairs.scale)
    finite = jnp.all(jnp.isfinite(errors)) & jnp.all(jnp.isfinite(pairs.values))
    return Judged(
        values=undifferentiable(values, ~apart),
        errors=errors,
        result=first_failure(
            failure(~finite, RESULTS.nonfinite_product),
            failure(~converged, RESULTS.not_converged),
        ),
    )
