from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, PRNGKeyArray, PyTree

from .._core.flat import freeze, to_flat
from .._estimators.auto_diagonal import AutoDiagonalEstimator
from .._estimators.base import AbstractEstimator
from .._operators.convert import convert, OperatorLike
from .._preconditioners.diagonal import DiagonalPreconditioner
from .._run.adaptive import Adaptive, DEFAULT_BUDGET
from .._run.execution import AbstractExecution, Local
from .diagonal import diagonal


def jacobi_preconditioner(
    operator: OperatorLike,
    estimator: AbstractEstimator = AutoDiagonalEstimator(),
    *,
    k: int | Adaptive = DEFAULT_BUDGET,
    key: PRNGKeyArray | None = None,
    state: PyTree[Array] | None = None,
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> DiagonalPreconditioner:
    """A [`traceax.DiagonalPreconditioner`][] from an estimate of the diagonal of an
    operator.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        matrix = jnp.diag(jnp.logspace(0.0, 4.0, 300)) + 0.1
        operator = lx.FunctionLinearOperator(
            lambda v: matrix @ v,
            jax.ShapeDtypeStruct((300,), matrix.dtype),
            lx.positive_semidefinite_tag,
        )
        jacobi = tx.jacobi_preconditioner(operator, k=10, key=jax.random.key(0))
        solver = lx.CG(rtol=1e-5, atol=1e-5)
        options = {"preconditioner": jacobi.inverse()}
        solution = lx.linear_solve(operator, jnp.ones(300), solver, options=options)
        print(solution.stats["num_steps"])
        ```

    **Arguments:**

    - `operator`: as for [`traceax.diagonal`][]; positive (or negative) semidefinite, or
        the preconditioner is of little use.
    - `estimator`, `k`, `key`, `state`, `execution`, `throw`: as for
        [`traceax.diagonal`][].

    **Returns:**

    A preconditioner whose entries are the modulus of each entry of the diagonal, or its
    standard error where that is larger, and 1 where both are 0. It has no derivatives;
    the derivatives of a solve do not depend on it. Pass it as a `preconditioner`, and its
    `.inverse()` to `lineax.linear_solve`.

    Cost: the matvecs and the memory of [`traceax.diagonal`][]. The preconditioner keeps
    one vector of length n, and a product with it takes n operations.

    **Raises:**

    The errors of [`traceax.diagonal`][].
    """
    settings = {"k": k, "key": key, "state": state}
    settings |= {"execution": execution, "throw": throw}
    operator = convert(operator, name="operator")
    solution = diagonal(operator, estimator, **settings)
    return freeze(
        DiagonalPreconditioner(
            entries=_positive_entries(
                solution.value, solution.std_err, operator.in_structure()
            ),
            template=lx.IdentityLinearOperator(operator.in_structure()),
            num_matvecs=solution.stats["num_matvecs"],
        )
    )


@eqx.filter_jit
def _positive_entries(
    value: PyTree[Array], std_err: PyTree[Array], structure: PyTree[jax.ShapeDtypeStruct]
) -> Array:
    dtype = jnp.result_type(*jax.tree.leaves(std_err))
    entries, errors = (
        to_flat(jax.tree.map(jnp.abs, value), dtype),
        to_flat(std_err, dtype),
    )
    # The error of a single sample is not known.
    size = jnp.maximum(entries, jnp.where(jnp.isfinite(errors), errors, 0))
    # Neither an entry nor its inverse overflows, in the dtype of the operator.
    largest = min(float(jnp.finfo(leaf.dtype).max) for leaf in jax.tree.leaves(structure))
    size = jnp.clip(size, 1 / largest, largest)
    return jnp.where((entries > 0) | (jnp.isfinite(errors) & (errors > 0)), size, 1)
