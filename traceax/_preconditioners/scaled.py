"""A preconditioner of a scaled operator: `P = S Q S` with a diagonal S.

With noise variances d on the diagonal of A, `S = diag(d)^(1/2)` makes them equal: Q is a
preconditioner of `S^-1 A S^-1`, whose noise is I. Then

    P = W W*,    W = S Q^(1/2),    log det P = log det Q + sum_i log d_i.

In the code: Q is `inner`, and `S^2 = diag(d)` is `scaling`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Inexact, Int, PyTree, Real, Scalar

from .._core.checks import real_scalar
from .._core.flat import FlatOperator, freeze, to_flat
from .._operators.door import EnteredOperator
from .._run.execution import AbstractExecution
from .base import AbstractPreconditioner
from .diagonal import DiagonalPreconditioner


class ScaledPreconditioner(AbstractPreconditioner):
    """$P = S Q S$ for a diagonal $S$ and a preconditioner $Q$ of $S^{-1} A S^{-1}$.
    [`traceax.nystrom_preconditioner`][] and [`traceax.pivoted_cholesky_preconditioner`][]
    make one where their `shift` is a vector. It is constant to all derivatives.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jnp.linspace(0.0, 1.0, 300)
        noise = jnp.geomspace(0.01, 1.0, 300)
        kernel = jnp.exp(-50 * (x[:, None] - x) ** 2) + jnp.diag(noise)
        operator = lx.MatrixLinearOperator(kernel, lx.positive_semidefinite_tag)
        key1, key2 = jax.random.split(jax.random.key(0))
        made = tx.nystrom_preconditioner(operator, rank=20, key=key1, shift=noise)
        print(isinstance(made, tx.ScaledPreconditioner))  # True
        solution = tx.logdet(operator, k=10, key=key2, preconditioner=made)
        print(solution.value, "+-", solution.std_err)
        ```

    **Attributes:**

    - `inner`: Q.
    - `scaling`: $S^2$, a [`traceax.DiagonalPreconditioner`][].

    It costs as much as `inner`, and n operations more for each vector.
    """

    inner: AbstractPreconditioner
    scaling: DiagonalPreconditioner

    def __init__(self, inner: AbstractPreconditioner, scaling: DiagonalPreconditioner):
        """**Arguments:**

        - `inner`: as above.
        - `scaling`: as above.
        """
        self.inner = inner
        self.scaling = scaling

    def prepare(self, operator: FlatOperator, **call: Any) -> "ScaledPreconditioner":
        scaling = freeze(self.scaling.prepare(operator))
        inner = self.inner.prepare(scaling.apply_to(operator), **call)
        return ScaledPreconditioner(inner, scaling)

    @property
    def num_matvecs(self) -> int | Int[Array, ""]:  # pyright: ignore
        return self.inner.num_matvecs

    @property
    def size(self) -> int:
        """n, the number of rows."""
        return self.scaling.size

    @property
    def structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.scaling.structure

    @property
    def logdet(self) -> Real[Array, ""]:
        """$\\log\\det P$."""
        return self.inner.logdet + self.scaling.logdet

    @property
    def largest(self) -> Real[Array, ""]:
        """An upper bound of the eigenvalues, a real scalar."""
        return self.inner.largest * self.scaling.largest

    @property
    def least(self) -> Real[Array, ""] | None:
        return self.inner.least

    def power(
        self, exponent: float, x: Inexact[Array, " n *k"]
    ) -> Inexact[Array, " n *k"]:
        """$P^p x$ for p = 1 and -1. Other powers of a product have no closed form, and
        none is needed: see `whiten`."""
        self._check_exponent(exponent)
        outer = self.scaling.power
        return outer(exponent / 2, self.inner.power(exponent, outer(exponent / 2, x)))

    def diagonal_of_power(self, exponent: float) -> Real[Array, " n"]:
        """The diagonal of $P^p$ for p = 1 and -1."""
        self._check_exponent(exponent)
        outer = self.scaling.diagonal_of_power(exponent)
        return outer * self.inner.diagonal_of_power(exponent)

    def whiten(self, x: Inexact[Array, " n *k"]) -> Inexact[Array, " n *k"]:
        return self.inner.whiten(self.scaling.whiten(x))

    def whiten_adjoint(self, x: Inexact[Array, " n *k"]) -> Inexact[Array, " n *k"]:
        return self.scaling.whiten_adjoint(self.inner.whiten_adjoint(x))

    def control(
        self,
        operator: FlatOperator,
        value: Real[Array, ""],
        probes: Inexact[Array, "n k"],
        execution: AbstractExecution,
    ) -> Real[Array, ""]:
        # S is constant, so the derivative of A acts on `S^-1 A S^-1` alone.
        scaled = freeze(self.scaling).apply_to(operator)
        return self.inner.control(scaled, value, probes, execution)

    def _check_exponent(self, exponent: float) -> None:
        if abs(exponent) != 1:
            raise ValueError(
                f"`exponent` must be 1 or -1 for a `{type(self).__name__}`. Found "
                f"{exponent}. For a root of P use `whiten`."
            )


def checked_shift(
    shift: PyTree[Array | float] | None, operator: EnteredOperator
) -> tuple[Scalar | None, DiagonalPreconditioner | None]:
    """The argument `shift` of a preconditioner: a scalar for the scaled operator, and the
    scaling, which is None unless the shift is a vector.

    Numbers and NumPy arrays must be finite, and not negative (a vector of them positive).
    JAX arrays are not looked at, and so stay on their device."""
    if shift is None:
        return None, None
    structure = operator.structure
    if not is_vector(shift):
        scalar = real_scalar("shift", shift)
        if not isinstance(shift, jax.Array) and not 0 <= float(shift) < math.inf:
            raise ValueError(f"`shift` must be finite, 0 or more. Found {shift!r}.")
        return scalar, None
    leaves, treedef = jax.tree.flatten(shift)
    shapes = [jnp.shape(leaf) for leaf in leaves]
    expected = [leaf.shape for leaf in jax.tree.leaves(structure)]
    if treedef != jax.tree.structure(structure) or shapes != expected:
        raise ValueError(
            "`shift` must be a scalar, or have the structure of the vectors of "
            f"`operator`, {structure}. Found {jax.eval_shape(lambda: shift)}."
        )
    dtype = jnp.finfo(operator.flat.dtype).dtype
    entries = jax.lax.stop_gradient(to_flat(checked_vector(shift), dtype))
    return jnp.ones((), dtype), scaling_by(entries, structure)


def is_vector(shift: PyTree[Array | float]) -> bool:
    """Whether it is an array of shifts, or a PyTree of them, and not one number."""
    is_leaf = jax.tree.structure(shift) == jax.tree.structure(0)
    return not is_leaf or getattr(shift, "ndim", 0) > 0


def checked_vector(shift: PyTree[Array | float]) -> PyTree[Array]:
    """A vector of shifts as arrays, or raise if it is empty or complex, or a NumPy array
    with entries that are not positive and finite."""
    if not jax.tree.leaves(shift):
        raise ValueError(f"`shift` must have entries. Found {shift!r}.")
    for leaf in jax.tree.leaves(shift):
        if jnp.iscomplexobj(leaf):
            raise TypeError(
                "`shift` must be real. Found complex entries. Pass `shift.real`."
            )
        if isinstance(leaf, np.ndarray) and not np.all((leaf > 0) & np.isfinite(leaf)):
            raise ValueError("`shift` must have positive, finite entries. Found others.")
    return jax.device_put(shift)


def scaling_by(
    entries: Real[Array, " n"], structure: PyTree[jax.ShapeDtypeStruct]
) -> DiagonalPreconditioner:
    """The diagonal preconditioner that makes these shifts equal to 1."""
    template = lx.IdentityLinearOperator(structure)
    # An array, as all leaves of the state of a run are.
    none = jnp.zeros((), jnp.int32)
    return DiagonalPreconditioner(entries=entries, template=template, num_matvecs=none)
