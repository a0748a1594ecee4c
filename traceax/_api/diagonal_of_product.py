"""The diagonal of a function of an operator between another operator and its adjoint."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, PRNGKeyArray, PyTree

from .._core.norms import RowNorms
from .._core.solution import Solution
from .._functions.base import check_of_eigenvalues, check_real_on_reals
from .._operators.checks import check_hermitian
from .._operators.convert import OperatorLike
from .._operators.door import enter
from .._quadrature.callables import as_spectral_function
from .._quadrature.functions import AbstractSpectralFunction
from .._run.adaptive import Adaptive, DEFAULT_BUDGET
from .._run.execution import AbstractExecution, Local
from .._run.solve import solve
from .._run.steps import AdaptiveSteps, check_steps
from .diagonal_of_product_task import DiagonalOfProduct, ProductDiagonal


def diagonal_of_product(
    factor: OperatorLike,
    operator: OperatorLike,
    function: AbstractSpectralFunction | Callable[[Any], Any],
    *,
    k: int | Adaptive = DEFAULT_BUDGET,
    num_steps: int | AdaptiveSteps = AdaptiveSteps(),
    key: PRNGKeyArray | None = None,
    state: PyTree[Array] | None = None,
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> Solution[Any]:
    r"""Estimate the diagonal of $X f(B) X^*$ for a Hermitian operator B: leverages
    $X (X^* X)^{-1} X^*$, predictive variances $K_* K^{-1} K_*^*$, and other quadratic
    forms $x_a^* f(B) x_a$ of all rows of X at the same time.

    Where B is small, the answer is exact. Otherwise probes have the length of B, and
    every entry has about the same relative error, $\sqrt{2/k}$ where $f \ge 0$, however
    large or small the entries are. [`traceax.diagonal`][] of the whole product has an
    error of the size of its other entries.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jax.random.normal(jax.random.key(0), (1000, 20))
        leverages = tx.diagonal_of_product(x, x.T @ x, tx.Inverse(), k=20).value
        print(f"{jnp.sum(leverages):.3f}")  # 20.000

        # The variance that a Gaussian process predicts, with the kernel k(0) = 1.
        points, new = jnp.linspace(0.0, 1.0, 400), jnp.linspace(0.0, 1.1, 5)
        between = jnp.exp(-50 * (new[:, None] - points) ** 2)
        kernel = jnp.exp(-50 * (points[:, None] - points) ** 2) + 0.1 * jnp.eye(400)
        explained = tx.diagonal_of_product(
            between,
            tx.as_operator(kernel, tags=lx.positive_semidefinite_tag),
            tx.Inverse(),
            k=200,
            key=jax.random.key(1),
        )
        print(1 - explained.value, "+-", explained.std_err)
        ```

    **Arguments:**

    - `factor`: X, any matrix or operator on the vectors of `operator`, with images of any
        structure; let it have m rows.
    - `operator`, `function`: B, of size n, and f, as for [`traceax.function_of`][].
    - `k`: the number of probes, a Python integer or [`traceax.Adaptive`][]. Default: an
        error of 1%, as for [`traceax.trace`][]. With `k >= n` the answer is exact, from n
        matvecs with `operator`, n with `factor`, and a dense factorisation.
    - `num_steps`: as for [`traceax.diagonal_of_function`][].
    - `key`, `state`, `execution`, `throw`: as for [`traceax.trace`][].

    **Returns:**

    A [`traceax.Solution`][], whose `value` and `std_err` are real PyTrees of the
    structure of the images of `factor`. Where `function.nonnegative`, a sample is
    $|X f(B)^{1/2} z|^2$, entry by entry, from one matvec with `factor`. For any other
    function it is $\mathrm{Re}\, \overline{X z} \circ X f(B) z$, from two; entries with a
    small $x_a^* f(B) x_a$ beside $\|x_a\| \|f(B) x_a\|$ then have a larger error.

    `std_err`, [`traceax.Solution.interval`][], `stats` and the number of matvecs with
    `operator` are as for [`traceax.diagonal_of_function`][]. `stats["truncation_error"]`
    is the root-mean-square error of the entries from the Krylov approximation.

    First derivatives in the arrays of `factor`, `operator` and `function` estimate the
    derivatives of the diagonal. Memory: `num_steps` vectors of length n and one of length
    m for each probe of a block; with `k >= n`, $O(n^2 + m n)$.

    **Raises:**

    - The errors of [`traceax.diagonal_of_function`][].
    - `TypeError`: `function` has complex values.
    - `ValueError`: `factor` does not take the vectors of `operator`.
    """
    entered = enter(operator, second=function)
    entered_factor = enter(factor, name="factor", square=False)
    check_hermitian(entered.flat)
    if entered_factor.structure != entered.structure:
        raise ValueError(
            "`factor` must take the vectors of `operator`, since `factor f(operator) "
            f"factor*` is formed. Found factor.in_structure()={entered_factor.structure} "
            f"for operator.in_structure()={entered.structure}. For the operator `X.T @ "
            "X`, the factor is X."
        )
    function = as_spectral_function(function, entered.flat.dtype)
    check_of_eigenvalues(function)
    check_real_on_reals(function, entered.flat.dtype)
    task = DiagonalOfProduct(
        factor=entered_factor,
        quantity=ProductDiagonal(
            rows=RowNorms().for_structure(entered_factor.image),
            paired=not function.nonnegative,
        ),
        function=function,
        num_steps=check_steps(num_steps, entered.size),
    )
    return solve(
        task, entered, k=k, key=key, state=state, execution=execution, throw=throw
    )
