"""Functions of a Hermitian operator as operators.

With the basis V and the tridiagonal T of `num_steps` Lanczos steps from v, a matvec is

    f(A) v ~ ||v|| V f(T) e_1

(Saad 1992). `_functions/action.py` implements it.
"""

from collections.abc import Callable
from typing import Any

import lineax as lx

from .._core.flat import as_complex
from .._functions.action import Action
from .._functions.base import check_of_eigenvalues
from .._operators.checks import check_hermitian, checked_operator
from .._operators.convert import OperatorLike
from .._operators.door import flatten, unflatten
from .._operators.tags import hermitian_tag, is_complex
from .._quadrature.callables import as_spectral_function
from .._quadrature.domain import is_complex_on_reals
from .._quadrature.functions import AbstractSpectralFunction
from .._run.steps import AdaptiveSteps, check_steps


def function_of(
    operator: OperatorLike,
    function: AbstractSpectralFunction | Callable[[Any], Any],
    num_steps: int | AdaptiveSteps = AdaptiveSteps(share=1e-5),
) -> lx.FunctionLinearOperator:
    """$f(A)$ as an operator: each matvec $f(A) v$ is a run of Lanczos.

    Pass it to [`traceax.trace`][] to use Hutch++, XTrace or XNysTrace on $f(A)$, or to
    `lineax.diagonal`, or call its `mv`.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        matrix = 3 * jnp.eye(300) - jnp.eye(300, k=1) - jnp.eye(300, k=-1)
        operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        inverse = tx.function_of(operator, tx.Inverse())
        solution = tx.trace(inverse, tx.XTraceEstimator(), k=40, key=jax.random.key(0))
        print(solution.value, "+-", solution.std_err)
        ```

    **Arguments:**

    - `operator`: a Hermitian operator, tagged as symmetric or semidefinite, or in complex
        arithmetic with `traceax.hermitian_tag`.
    - `function`: as in [`traceax.trace_of_function`][].
    - `num_steps`: the number of Lanczos steps for each matvec, a Python integer; more
        than n count as n. The result is exact for polynomials of degree below it. Or
        [`traceax.AdaptiveSteps`][], the default: each matvec makes as many steps as
        reduce the estimate of its error to `share` of its norm, $10^{-5}$ by default. It
        is NaN if `max_steps`, 128 by default, are too few.

    **Returns:**

    A `lineax.FunctionLinearOperator` of the structure of `operator`, tagged symmetric,
    or `traceax.hermitian_tag` if complex, and positive semidefinite if $f \\ge 0$ on its
    domain. If the values of f are complex, as those of `Exp(-1j * t)`, it is an operator
    on complex vectors without a tag, and for a real `operator` takes twice as many
    matvecs. One matvec costs `num_steps` matvecs with `operator`, and as many vectors of
    memory; with adaptive steps up to a third more matvecs than it needs, and `max_steps`
    vectors.

    The error of the Lanczos approximation depends on the vector, so the operator is
    linear only to that accuracy. First derivatives with respect to the vector, the
    arrays of `operator` and those of `function` work; higher ones raise
    `NotImplementedError`. A derivative in the operator is computed from the Ritz vectors:
    in reverse mode by one more run and `num_steps` matvecs with the derivative of the
    operator, in forward mode by `num_steps` more runs. The two modes truncate different
    Krylov spaces, and agree only to the accuracy of the run. A matvec is NaN where a
    Ritz value is outside the domain, beyond rounding.

    **Raises:**

    - `TypeError`: `operator`, `function` or `num_steps` is not of its kind.
    - `ValueError`: `operator` is not square or not known to be Hermitian; `num_steps` is
        below 1; `function` is a function of singular values.

    ??? cite

        ```bibtex
        @article{saad1992analysis,
            author  = {Saad, Yousef},
            title   = {Analysis of Some {Krylov} Subspace Approximations to the Matrix
                       Exponential Operator},
            journal = {SIAM Journal on Numerical Analysis},
            volume  = {29},
            number  = {1},
            pages   = {209--228},
            year    = {1992},
        }
        ```
    """
    operator, structure, _ = checked_operator(operator, second=function)
    flat = flatten(operator)
    check_hermitian(flat)
    num_steps = check_steps(num_steps, flat.size)
    function = as_spectral_function(function, flat.dtype)
    check_of_eigenvalues(function)
    structure = operator.in_structure()
    tags = [hermitian_tag if is_complex(operator) else lx.symmetric_tag]
    if is_complex_on_reals(function, flat.dtype):
        flat, structure, tags = flat.complexified, as_complex(structure), []
    if function.nonnegative:
        tags.append(lx.positive_semidefinite_tag)
    most = num_steps.most if isinstance(num_steps, AdaptiveSteps) else num_steps
    action = Action(operator=flat, function=function, most=most, steps=num_steps)
    return unflatten(
        action,
        structure=structure,
        dtype=flat.dtype,
        tags=frozenset(tags),
    )
