"""Extreme eigenvalues of Hermitian operators, by thick-restart block Lanczos.

The kernel is `_krylov/extreme_eigenpairs.py`.
"""

from __future__ import annotations

from typing import Any, get_args

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree, Real, Scalar

from .._core.arithmetic import full_precision
from .._core.checks import describe
from .._core.sampler import draw_for
from .._core.samplers import NormalSampler
from .._krylov.extreme_eigenpairs import all_eigenpairs, extreme_eigenpairs, Which
from .._operators.checks import check_hermitian
from .._operators.convert import OperatorLike
from .._operators.door import enter
from .._run.call import call
from .._run.execution import AbstractExecution, Local
from .extremes import (
    AbstractExtremes,
    check_call,
    judge,
    tolerance_of,
    unflatten_columns,
)


class Eigenpairs(AbstractExtremes):
    """Extreme eigenvalues of a Hermitian operator, made by [`traceax.eigsh`][].

    !!! Example

        ```python
        import jax.numpy as jnp
        import traceax as tx

        pairs = tx.eigsh(jnp.diag(jnp.array([1.0, 2.0, 3.0])), 2)
        print(pairs.successful, pairs.matvecs)  # True 3
        print(pairs.vectors.shape)  # (2, 3)
        print(pairs)
        ```

    `print` shows each value, rounded to two digits of the half-width of its interval,
    and what it cost.

    **Attributes:**

    - `values`: the eigenvalues, real, shape `(num,)`. The most extreme one is the first:
        they descend, and for `which="smallest"` they ascend. For `which="both"` they
        descend from the largest to the smallest of the operator.
    - `vectors`: orthonormal eigenvectors, a PyTree of the structure of the vectors of the
        operator, each leaf with a leading axis of length `num`.
    - `residuals`: $\\|A u - \\lambda u\\|$ for each pair, computed from matvecs with the
        vectors that are returned (for operators in half precision before they are
        rounded to it), shape `(num,)`.
    - `result`: a [`traceax.RESULTS`][] member: `successful`, `not_converged` or
        `nonfinite_product`.
    - `stats`: `"num_matvecs"` is the number of matrix-vector products, and `"exact"` says
        whether the pairs are those of a dense factorisation.
    - `successful`, `matvecs`, `quantity`: as for [`traceax.Solution`][].
    - `raw`: vectors, residuals and half-widths of intervals, without a check that no
        derivative is asked for.

    Only `values` have a derivative. While one is computed, reading `vectors`, `residuals`
    or `interval()` raises `NotImplementedError`; `jax.lax.stop_gradient(pairs)` has all
    of them as constants.
    """

    values: Real[Array, " num"]
    raw: dict[str, PyTree[Array]]
    result: Any
    stats: dict[str, Any]
    quantity: str = eqx.field(static=True, default="Eigenvalues")

    @property
    def vectors(self) -> PyTree[Array]:
        """The eigenvectors, along a leading axis."""
        return self.constant("vectors")


def _eigenpairs(opened, key, rtol, sizes, k, which, structure, execution) -> Eigenpairs:
    flat, _ = opened
    frozen = flat.frozen
    exact = sizes.fills(flat.size)

    def draw(number):
        columns = sizes.block * number + jnp.arange(sizes.block)
        return draw_for(frozen, NormalSampler(), key, columns)

    with full_precision(lambda x: execution.matmat(frozen, x)) as matmat:
        if exact:
            like = jnp.zeros((flat.size, 1), flat.dtype)
            pairs = all_eigenpairs(matmat, like, sizes.num, which=which)
        else:
            pairs = extreme_eigenpairs(
                matmat,
                draw,
                sizes,
                which=which,
                tolerance=tolerance_of(rtol, flat, sizes),
                max_matvecs=k,
                eps=flat.eps,
            )
    judged = judge(flat, pairs, rtol=rtol, sizes=sizes, execution=execution)
    ends = "at both ends" if which == "both" else which
    count = "" if sizes.num == 1 else f"{sizes.num} "
    return Eigenpairs(
        values=judged.values,
        raw={
            "vectors": unflatten_columns(pairs.vectors[0], structure),
            "residuals": pairs.residuals,
            "errors": judged.errors,
        },
        result=judged.result,
        stats={"num_matvecs": pairs.num_matvecs, "exact": jnp.asarray(exact)},
        quantity=f"Eigenvalues, the {count}{ends}",
    )


def eigsh(
    operator: OperatorLike,
    num: int,
    *,
    which: Which = "largest",
    k: int = 1000,
    rtol: Scalar | float = 1e-4,
    key: PRNGKeyArray | None = None,
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> Eigenpairs:
    r"""Find the largest or the smallest eigenvalues of a Hermitian operator, with
    eigenvectors, by block Lanczos with thick restarts.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        matrix = 2 * jnp.eye(500) - jnp.eye(500, k=1) - jnp.eye(500, k=-1)
        operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        pairs = tx.eigsh(operator, 3, key=jax.random.key(0))
        print(pairs)
        low, high = pairs.interval()
        residual = matrix @ pairs.vectors[0] - pairs.values[0] * pairs.vectors[0]
        print(jnp.linalg.norm(residual), pairs.residuals[0])
        ```

    **Arguments:**

    - `operator`: a Hermitian operator, and tagged so, as in
        [`traceax.trace_of_function`][]; on arrays or PyTrees, of any floating dtype.
    - `num`: the number of eigenvalues, a Python integer.
    - `which`: `"largest"`, `"smallest"` or `"both"`: the algebraically largest or
        smallest eigenvalues, or half of `num` from each end (if `num` is odd, one more of
        the largest). These are not the largest in modulus.
    - `k`: the largest number of matrix-vector products, a Python integer. The call makes
        as many as it needs. Default: 1000.
    - `rtol`: the largest norm of a residual, relative to the largest modulus of an
        eigenvalue; a real number, 0 for all digits. Default: $10^{-4}$. The error of an
        eigenvalue is at most the residual, and mostly about its square over the distance
        to the next eigenvalue.
    - `key`: a PRNG key for the start vectors; not needed for small operators.
    - `execution`, `throw`: as in [`traceax.trace`][].

    **Returns:**

    [`traceax.Eigenpairs`][], in real arithmetic where the operator is real. An operator
    that is not much larger than the Krylov basis, $n < \max(40, 2\, \mathrm{num} + 24)$
    rounded up to a multiple of 8, plus 2, is factorised instead, from n matvecs.

    Each interval is certain to contain an eigenvalue, but an eigenvalue may have been
    missed. Random start vectors make that unlikely, especially where eigenvalues are well
    separated. Blocks of two vectors find both copies of a double eigenvalue; with
    tolerances far above rounding, further copies of an eigenvalue of higher multiplicity
    may be missed. For `num=1` blocks have one vector, which takes fewer matvecs.

    Derivatives of `values` in the operator's arrays are of first order,
    $d\lambda = u^* dA\, u$, and cost `num` matvecs with derivatives. Their relative error
    is about the residual over the distance to the next eigenvalue: pass a smaller `rtol`
    than for the values. Where two values cannot be told apart, no derivative exists, and
    it is NaN. Second derivatives raise `NotImplementedError`.

    Cost: the matvecs are made two at a time; for each one `O(n m)` operations, with
    `m = max(40, 2 num + 24)`. Memory: `m` vectors of length n, and twice that briefly at
    each restart. The last `num` matvecs compute the residuals.

    **Raises:**

    - `TypeError`: an argument is not of its kind; `num` or `k` is not a Python integer.
    - `ValueError`: `operator` is not square or not known to be Hermitian; `num` is below
        1 or above n; `k` is too small for `num`; `which` is none of the three, or
        `"both"` of one eigenvalue; `rtol` is not between 0 and 1; `key` is missing.
    - An `equinox` run-time error with `throw=True`: a matvec was not finite; a residual
        was above the tolerance after `k` matvecs.

    ??? cite

        ```bibtex
        @article{wu2000thick,
            author  = {Wu, Kesheng and Simon, Horst},
            title   = {Thick-Restart {Lanczos} Method for Large Symmetric Eigenvalue
                       Problems},
            journal = {SIAM Journal on Matrix Analysis and Applications},
            volume  = {22},
            number  = {2},
            pages   = {602--616},
            year    = {2000},
        }
        ```
    """
    entered = enter(operator, second=num)
    check_hermitian(entered.flat)
    sizes, k, rtol = check_call(num, k, rtol, key, size=entered.size, cost=1)
    if not isinstance(which, str) or which not in get_args(Which):
        raise ValueError(
            '`which` must be "largest", "smallest" or "both". Found '
            f"{describe(which)}. Eigenvalues count with their signs."
        )
    if which == "both" and num == 1:
        raise ValueError(
            '`which="both"` needs `num` of 2 or more. Found 1. Pass 2 for the largest '
            "and the smallest eigenvalue."
        )
    return call(
        _eigenpairs,
        entered,
        key,
        rtol,
        sizes,
        k,
        which,
        entered.structure,
        execution,
        name="eigsh",
        execution=execution,
        throw=throw,
        hint=lambda pairs: pairs.details,
    )
