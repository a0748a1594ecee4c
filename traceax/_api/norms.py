"""Norms of an operator and of its rows, and inner products of operators.

For probes w_i with the identity as covariance, `E w_i w_i* = I`, the means of

    ||A w_i||^2,    |e_a* A w_i|^2,    (A_j w_i)* (A_l w_i)

are unbiased for `||A||_F^2`, for the squared norm of row a, and for `tr(A_j* A_l)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, PRNGKeyArray, PyTree

from .._core.checks import check_instance
from .._core.norms import FrobeniusNorm, FrobeniusProducts, RowNorms
from .._core.solution import Solution
from .._estimators.base import AbstractEstimator, Measurement
from .._estimators.hutchinson import HutchinsonEstimator
from .._operators.checks import operator_first
from .._operators.convert import OperatorLike
from .._operators.door import enter
from .._operators.stacked import stack_operators
from .._run.adaptive import Adaptive, DEFAULT_BUDGET
from .._run.execution import AbstractExecution, Local
from .._run.solve import solve
from .measure import measure


@operator_first
def frobenius_norm(
    operator: OperatorLike,
    estimator: AbstractEstimator = HutchinsonEstimator(),
    *,
    k: int | Adaptive = DEFAULT_BUDGET,
    key: PRNGKeyArray | None = None,
    state: PyTree[Array] | None = None,
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> Solution[Array]:
    """Estimate the Frobenius norm of a linear operator from `k` matvecs.

    The estimate is the root of the mean of $\\|A \\omega_i\\|^2$, which is unbiased for
    the square. Where singular values decay, `traceax.XNysTraceEstimator()` is many times
    more accurate: it takes the root of the trace of $A A^*$, by `k // 2` matvecs with $A$
    and as many with $A^*$. For rectangular operators, see [`traceax.schatten_norm`][]
    with `p=2` and `num_steps=1`.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        matrix = jax.random.normal(jax.random.key(0), (500, 500))
        operator = lx.MatrixLinearOperator(matrix)
        solution = tx.frobenius_norm(operator, k=50, key=jax.random.key(1))
        print(solution.value, "+-", solution.std_err, "exactly", jnp.linalg.norm(matrix))
        ```

    **Arguments:**

    - `operator`: as for [`traceax.trace`][], but it may be rectangular, on arrays or
        PyTrees; let it have m rows and n columns.
    - `k`: the number of matvecs, with the adjoint included, a Python integer or
        [`traceax.Adaptive`][]. With `k >= min(m, n)` the answer is exact, from n matvecs,
        or where m is smaller from m matvecs with the adjoint. Operators of known
        structure, as [`traceax.kronecker`][], and sparse matrices need none.
    - `key`, `state`, `execution`, `throw`: as for [`traceax.trace`][].
    - `estimator`: an estimator whose samples are matvecs with random vectors, as
        [`traceax.HutchinsonEstimator`][], the default. Any other estimator of the trace
        is given the operator $A A^*$, tagged positive semidefinite.

    **Returns:**

    A [`traceax.Solution`][] with a real scalar `value`. `stats["samples"]` are samples
    of the square of the norm. Where a square over- or underflows its dtype, the call
    fails and the value is infinite or NaN. Derivatives are those of the estimate: they
    are unbiased for the square, and for the root they have a relative bias of up to
    `0.2 / k`. Memory: one block of probes, or the memory of another `estimator`.

    **Raises:**

    The errors of [`traceax.trace`][].
    """
    return measure(
        FrobeniusNorm(),
        operator,
        estimator,
        square=False,
        k=k,
        key=key,
        state=state,
        execution=execution,
        throw=throw,
    )


@operator_first
def row_norms(
    operator: OperatorLike,
    estimator: AbstractEstimator = HutchinsonEstimator(),
    *,
    k: int | Adaptive = DEFAULT_BUDGET,
    key: PRNGKeyArray | None = None,
    state: PyTree[Array] | None = None,
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> Solution[Any]:
    """Estimate the Euclidean norm of each row of a linear operator from `k` matvecs.

    The estimates are the roots of the means of $|e_a^* A \\omega_i|^2$, which are
    unbiased for the squares. For the norms of the columns, pass `operator.T`. Where
    singular values decay, `traceax.XNysDiagEstimator()` is more accurate: it takes the
    roots of the diagonal of $A A^*$. Rows whose squares underflow count as zero beside
    others that do not.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        matrix = jax.random.normal(jax.random.key(0), (500, 500))
        operator = lx.MatrixLinearOperator(matrix)
        solution = tx.row_norms(operator, k=50, key=jax.random.key(1))
        exact = jnp.linalg.norm(matrix, axis=1)
        print(jnp.mean(jnp.abs(solution.value - exact) < 2 * solution.std_err))
        ```

    **Arguments:**

    - `operator`, `estimator`, `k`, `key`, `state`, `execution`, `throw`: as for
        [`traceax.frobenius_norm`][], with estimators of the diagonal.

    **Returns:**

    A [`traceax.Solution`][], whose `value` and `std_err` are real PyTrees of the
    structure of the operator's images. `stats["num_samples"]` is the number of samples.
    Derivatives are those of the estimate: they are unbiased for the squares, and for the
    roots they have a relative bias of up to `1 / k`. Where the estimate of a square is
    negative, the row is 0, its `std_err` is the root of the standard error of the square,
    and its derivative is 0. Memory: one block of probes with its matvecs, and four
    numbers for each row (eight with fewer than 16 probes), from which value and error bar
    are computed; or with another `estimator` about half of what it holds for a diagonal,
    since `A A*` gets `k // 2` probes.

    **Raises:**

    The errors of [`traceax.trace`][], and a `ValueError` where the estimator does not
    estimate diagonals.
    """
    return measure(
        RowNorms(),
        operator,
        estimator,
        square=False,
        k=k,
        key=key,
        state=state,
        execution=execution,
        throw=throw,
    )


def frobenius_products(
    operators: Sequence[OperatorLike],
    estimator: AbstractEstimator = HutchinsonEstimator(),
    *,
    k: int | Adaptive = DEFAULT_BUDGET,
    key: PRNGKeyArray | None = None,
    state: PyTree[Array] | None = None,
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> Solution[Array]:
    """Estimate $\\mathrm{tr}(A_i^* A_j)$ for all pairs of several square operators, from
    `k` matvecs with each.

    The estimate is the mean of $(A_i \\omega)^* (A_j \\omega)$, with the same random
    vectors for all operators. For symmetric operators these are the $\\mathrm{tr}(A_i
    A_j)$ of the moment equations for variance components (Haseman-Elston regression).

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jax.random.normal(jax.random.key(0), (300, 100))
        identity = lx.IdentityLinearOperator(jax.ShapeDtypeStruct((300,), x.dtype))
        operators = [lx.MatrixLinearOperator(x @ x.T / 100), identity]
        solution = tx.frobenius_products(operators, k=30, key=jax.random.key(1))
        print(solution.value, "+-", solution.std_err)
        ```

    **Arguments:**

    - `operators`: a list of p square matrices or operators, of the same structure and
        dtype.
    - `estimator`: an estimator whose samples are matvecs with random vectors. Default:
        [`traceax.HutchinsonEstimator`][].
    - `k`, `key`, `state`, `execution`, `throw`: as for [`traceax.trace`][]; with
        [`traceax.Adaptive`][] the errors of all entries together are compared with the
        tolerance.

    **Returns:**

    A [`traceax.Solution`][], whose `value` has the shape `(p, p)` and is Hermitian and,
    up to rounding, positive semidefinite, with a standard error for each entry.
    `stats["num_matvecs"]` is the number of matvecs with each operator. Values are
    unbiased, and so are their derivatives. Memory: one block of probes and its matvecs
    with each.

    **Raises:**

    The errors of [`traceax.trace`][], a `TypeError` where `operators` is not a list or
    empty, and a `ValueError` where structures differ or the estimator is of another kind.

    ??? cite

        ```bibtex
        @article{wu2018scalable,
            author  = {Wu, Yue and Sankararaman, Sriram},
            title   = {A Scalable Estimator of {SNP} Heritability for Biobank-Scale Data},
            journal = {Bioinformatics},
            volume  = {34},
            number  = {13},
            pages   = {i187--i194},
            year    = {2018},
        }
        ```
    """
    if not isinstance(operators, Sequence) or len(operators) == 0:
        raise TypeError(
            "`operators` must be a list of at least one matrix or operator. "
            f"Found an object of type {type(operators).__name__}, empty or no list. "
            "Pass, for example, `[first, second]`."
        )
    check_instance("estimator", estimator, AbstractEstimator, "HutchinsonEstimator()")
    named = {f"operators[{i}]": operator for i, operator in enumerate(operators)}
    stack, _ = stack_operators(named)
    # The stacked operator makes the matvecs with all of them from the same probes.
    task = Measurement(estimator=estimator, quantity=FrobeniusProducts(len(operators)))
    return solve(
        task,
        enter(stack, square=False),
        k=k,
        key=key,
        state=state,
        execution=execution,
        throw=throw,
    )
