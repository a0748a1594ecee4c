from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, PyTree

from .._checks import check_hermitian, check_operator, check_positive
from .._flat import FlatOperator, flatten, hermitian_tag, unflatten
from .._kernel.lanczos import lanczos
from .._kernel.quadrature import apply_to_first, ritz
from .callables import as_spectral_function
from .functions import AbstractSpectralFunction
from .quadratic_form import values_at


class _Action(eqx.Module):
    """`v -> f(A) v`, by Lanczos from v."""

    operator: FlatOperator
    function: AbstractSpectralFunction
    num_steps: int = eqx.field(static=True)

    def __call__(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        arrays, static = eqx.partition(self, eqx.is_array)
        action = eqx.combine(_refuse_derivative(arrays), static)

        def conjugate(_, v):
            return action.product(v.conj()).conj()

        # Linear in the vector, whatever Lanczos does with it; f(A) is Hermitian, so its
        # transpose is its complex conjugate.
        return jax.lax.custom_linear_solve(
            lambda v: v, vector, lambda _, v: action.product(v), conjugate
        )

    def product(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        flat, function = self.operator, self.function
        run = lanczos(flat.mv, vector, self.num_steps, eps=flat.eps)
        nodes, vectors = ritz(run.alpha, run.beta)
        values = values_at(function, nodes, flat.eps)
        # For the zero vector there is no Krylov space, and f(0) may be infinite.
        first = jnp.where(run.norm > 0, apply_to_first(nodes, vectors, values), 0)
        return run.norm * jnp.matmul(first, run.basis, precision="highest")


@eqx.filter_custom_jvp
def _refuse_derivative(arrays: PyTree[Array]) -> PyTree[Array]:
    return arrays


@_refuse_derivative.def_jvp
def _refuse_derivative_rule(primals, tangents) -> Any:
    if any(t is not None for t in jax.tree.leaves(tangents)):
        raise NotImplementedError(
            "`traceax.function_of` has no derivative with respect to the operator or the "
            "function's parameters. For the trace of a function, and its derivative, use "
            "`traceax.trace_of_function` or `traceax.logdet`."
        )
    return primals[0], tangents[0]


def function_of(
    operator: lx.AbstractLinearOperator,
    function: AbstractSpectralFunction | Callable[[Any], Any],
    num_steps: int,
) -> lx.FunctionLinearOperator:
    """$f(A)$ as an operator: each product $f(A) v$ by `num_steps` steps of Lanczos.

    Hand it to [`traceax.trace`][] to use Hutch++, XTrace or XNysTrace on $f(A)$, to
    `lineax.diagonal`, or multiply with it.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        matrix = 3 * jnp.eye(300) - jnp.eye(300, k=1) - jnp.eye(300, k=-1)
        operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        inverse = tx.function_of(operator, tx.Inverse(), num_steps=50)
        solution = tx.trace(inverse, tx.XTraceEstimator(), k=40, key=jax.random.key(0))
        print(solution.value, "+-", solution.std_err)
        ```

    **Arguments:**

    - `operator`: a Hermitian operator, tagged as symmetric or semidefinite, or in complex
        arithmetic with `traceax.hermitian_tag`.
    - `function`: as in [`traceax.trace_of_function`][].
    - `num_steps`: Lanczos steps for each product, a Python integer; more than n count as
        n. The result is exact for polynomials of degree below it.

    **Returns:**

    A `lineax.FunctionLinearOperator` of the structure of `operator`, tagged symmetric if
    real, and positive semidefinite if $f \\ge 0$ on its domain. One product costs
    `num_steps` products with `operator`, and as many vectors of memory.

    The error of the Lanczos approximation depends on the vector, so the operator is
    linear only to that accuracy. Derivatives with respect to the vector work; one with
    respect to `operator` raises `NotImplementedError`. Eigenvalues outside the domain are
    not reported: those below it count as its end, where a callable gives NaN it is NaN.

    **Raises:**

    - `TypeError`: `operator`, `function` or `num_steps` is not of its kind.
    - `ValueError`: `operator` is not square or not known to be Hermitian; `num_steps` is
        below 1.

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
    check_operator(operator)
    check_hermitian(operator)
    num_steps = min(check_positive("num_steps", num_steps), operator.in_size())
    flat = flatten(operator)
    function = as_spectral_function(function, flat.dtype)
    real = not jnp.issubdtype(flat.dtype, jnp.complexfloating)
    tags = [lx.symmetric_tag if real else hermitian_tag]
    if function.nonnegative:
        tags.append(lx.positive_semidefinite_tag)
    action = _Action(flat, function, num_steps)
    return unflatten(action, operator.in_structure(), flat.dtype, frozenset(tags))
