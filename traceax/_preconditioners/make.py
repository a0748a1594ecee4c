"""Nystrom and pivoted Cholesky preconditioners `P = A_hat + sigma I`.

With an orthonormal basis Q, `A_hat` is the Nystrom approximation of `A - sigma I`,

    A_hat = Y (Q* Y)^-1 Y* = U Lambda U*,    Y = A Q - sigma Q.

For a vector of shifts d, this is done for `S^-1 A S^-1` with `S = diag(d)^(1/2)` and
sigma = 1, for the same number of matvecs.

The basis spans random directions (Frangella, Tropp and Udell, Randomized Nystrom
preconditioning, 2023), or the unit vectors of the pivots that a partial Cholesky
factorisation with complete pivoting chooses (Harbrecht, Peters and Schneider, 2012).

In the code: Q is `basis`, `A Q` is `products`, sigma is `shift`, U is `vectors` and
Lambda is `values`.
"""

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, PyTree, Scalar

from .._core.arithmetic import full_precision
from .._core.checks import check_key, check_positive
from .._core.flat import FlatOperator
from .._core.results import failure, first_failure, RESULTS
from .._core.sampler import draw_for
from .._core.samplers import NormalSampler
from .._numerics.dense import eigh, normalise, thin_svd
from .._numerics.nystrom import nystrom, orthonormalise
from .._operators.convert import OperatorLike
from .._operators.door import enter, EnteredOperator
from .._run.call import call
from .._run.execution import AbstractExecution, Local
from .diagonal import DiagonalPreconditioner
from .low_rank import Preconditioner
from .scaled import checked_shift, ScaledPreconditioner


# The index of the first probe of a preconditioner. An estimate that is given the same key
# draws its probes from the index 0, and these must be independent of the preconditioner:
# the mean of its control variate is zero only then. No real budget is that large.
FIRST_PROBE = 2**30


def _checked_rank(entered: EnteredOperator, rank: int) -> int:
    rank = min(check_positive("rank", rank), entered.size)
    if entered.flat.sign <= 0:
        raise ValueError(
            "A preconditioner needs an `operator` tagged positive semidefinite. Found "
            "one without the tag. If it is, say so: `traceax.as_operator(operator, "
            "tags=lineax.positive_semidefinite_tag)`."
        )
    return rank


def assemble(
    flat: FlatOperator,
    *,
    basis: Inexact[Array, "n r"],
    products: Inexact[Array, "n r"],
    shift: Scalar | float | None,
    structure: PyTree[jax.ShapeDtypeStruct],
    num_matvecs: Int[Array, ""] | int,
    lower_bound: Scalar | None = None,
) -> Preconditioner:
    """The preconditioner from `products = A basis`. The columns of the basis are
    orthonormal, or zero.

    - `shift`: sigma, or None to estimate it. It is raised to the rounding error of the
        matvecs if it is below that.
    - `structure`: of the vectors that the operator applies to.
    - `lower_bound`: a lower bound of the eigenvalues of `P^-1 A` for the requested shift,
        or None. It is lowered if the shift is raised.
    """
    real = jnp.finfo(flat.dtype).dtype
    products, unit = normalise(products)
    size = jnp.linalg.norm(products)
    core = basis.conj().T @ products
    # A zero column of the basis gets a large Ritz value, so that it is not the smallest.
    empty = jnp.sum(jnp.abs(basis), axis=0) == 0
    core = (core + core.conj().T) / 2 + jnp.diag(jnp.where(empty, size, 0))
    ritz_values, ritz_vectors = eigh(core)
    smallest = ritz_values[0] * unit
    if shift is None:
        # A tenth below the smallest Ritz value: near it, but A - sigma I stays positive
        # definite on the basis.
        shift = 0.9 * smallest
    # Below the rounding error of the matvecs, a shift could not be told from zero.
    floor = flat.eps * jnp.where(size > 0, size, 1) * unit
    requested = jax.lax.stop_gradient(jnp.asarray(shift, real))
    shift = jnp.maximum(requested, floor)
    if lower_bound is not None:
        lower_bound = lower_bound * jnp.maximum(requested, 0) / shift
    share = jnp.where(smallest > shift, shift / smallest, 1)
    relative = (shift / unit).astype(flat.dtype)
    shifted = products - relative * basis
    approximation = nystrom(basis, shifted, flat.eps, indefinite=True)
    vectors, s, _ = thin_svd(approximation.factor, flat.eps)
    # `nystrom` approximates `A - sigma I` plus a shift of its own.
    values = s**2 - approximation.shift
    # Values at the level of rounding have vectors that depend on rounding alone, as where
    # columns of the basis are zero.
    resolved = values > flat.eps * values[0]
    return Preconditioner(
        vectors=vectors * resolved,
        values=unit * jnp.where(resolved, values, 0),
        shift=shift,
        # d = (sigma / theta)^(1/2) Q v for the smallest Ritz pair (theta, Q v): if theta
        # is far above sigma, the pair says nothing about the eigenvalues near sigma.
        shift_direction=basis @ (jnp.sqrt(share) * ritz_vectors[:, 0]),
        template=lx.IdentityLinearOperator(structure),
        num_matvecs=num_matvecs,
        result=first_failure(
            flat.sign_failure,
            failure(~jnp.all(jnp.isfinite(products)), RESULTS.nonfinite_product),
        ),
        least=lower_bound,
    )


def nystrom_preconditioner(
    operator: OperatorLike,
    rank: int,
    *,
    key: PRNGKeyArray,
    shift: PyTree[Array | float] | None = None,
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> Preconditioner | ScaledPreconditioner:
    """A [`traceax.Preconditioner`][] from a randomised Nystrom approximation.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jnp.linspace(0.0, 1.0, 300)
        kernel = jnp.exp(-50 * (x[:, None] - x) ** 2) + 0.1 * jnp.eye(300)
        operator = lx.MatrixLinearOperator(kernel, lx.positive_semidefinite_tag)
        key1, key2 = jax.random.split(jax.random.key(0))
        preconditioner = tx.nystrom_preconditioner(operator, rank=20, key=key1, shift=0.1)
        solution = tx.logdet(
            operator, k=10, num_steps=5, key=key2, preconditioner=preconditioner
        )
        print(solution.value, "+-", solution.std_err)
        ```

    **Arguments:**

    - `operator`: an operator tagged positive semidefinite, of any structure and dtype.
    - `rank`: r, the number of random directions, a Python integer; more than n counts
        as n.
    - `key`: a JAX PRNG key.
    - `shift`: a real scalar close to the smallest eigenvalues, such as the noise variance
        of a Gaussian process. It is subtracted before the approximation and added after
        it. The closer it is, the better the preconditioner. `None` estimates it from the
        sketch. Where each observation has a noise variance of its own, pass them all: a
        vector d of the operator's structure, with positive entries. A is then
        approximated in the scale in which they are equal, $P = \\hat A +
        \\mathrm{diag}(d)$. It is constant to derivatives.
    - `execution`: where matvecs run, and how many at a time.
    - `throw`: as in [`traceax.trace`][].

    **Returns:**

    A `Preconditioner`, from r matvecs, all at once, and `O(n r^2)` operations. Several
    arrays of r vectors of length n are in memory while it is made, and one afterwards.
    For a vector of shifts a [`traceax.ScaledPreconditioner`][] with it inside.

    **Raises:**

    - `ValueError`: the tag is missing, `rank` is below 1, or `shift` is negative or
        infinite, or of another structure than vectors.
    - `TypeError`: `rank` is not a Python integer, `shift` not a real number, `operator`
        not an operator, or `key` not a key.
    - An `equinox` run-time error with `throw=True`: a matvec was not finite.

    ??? cite

        ```bibtex
        @article{frangella2023randomized,
            author  = {Frangella, Zachary and Tropp, Joel A. and Udell, Madeleine},
            title   = {Randomized {Nystr\\"om} Preconditioning},
            journal = {SIAM Journal on Matrix Analysis and Applications},
            volume  = {44},
            number  = {2},
            pages   = {718--752},
            year    = {2023},
        }
        ```
    """
    check_key(key)
    entered = enter(operator)
    rank = _checked_rank(entered, rank)
    shift, scaling = checked_shift(shift, entered)
    preconditioner = call(
        _nystrom,
        entered,
        entered.structure,
        rank,
        key,
        shift,
        scaling,
        execution,
        name="nystrom_preconditioner",
        execution=execution,
        throw=throw,
    )
    if scaling is not None:
        return ScaledPreconditioner(preconditioner, scaling)
    return preconditioner


def _nystrom(opened, structure, rank, key, shift, scaling, execution) -> Preconditioner:
    flat = _scaled(opened[0].frozen, scaling)
    probes = draw_for(flat, NormalSampler(), key, FIRST_PROBE + jnp.arange(rank))
    with full_precision(lambda x: execution.matmat(flat, x)) as matmat:
        basis, _, _ = orthonormalise(probes)
        return assemble(
            flat,
            basis=basis,
            products=matmat(basis),
            shift=shift,
            structure=structure,
            num_matvecs=rank,
        )


def _scaled(flat: FlatOperator, scaling: DiagonalPreconditioner | None) -> FlatOperator:
    """The operator in the scale in which all shifts are equal."""
    return flat if scaling is None else scaling.apply_to(flat)


def pivoted_cholesky_preconditioner(
    operator: OperatorLike,
    rank: int,
    *,
    shift: PyTree[Array | float] | None = None,
    diagonal: Inexact[Array, " n"] | None = None,
    throw: bool = True,
) -> Preconditioner | ScaledPreconditioner:
    """A [`traceax.Preconditioner`][] from a partial Cholesky factorisation with complete
    pivoting. It needs the diagonal of the operator, and no randomness.

    Its matvecs are with unit vectors, one after another, each chosen where the remaining
    diagonal is largest. [`traceax.nystrom_preconditioner`][] makes all matvecs at once
    and needs no diagonal: prefer it unless columns of A are cheaper than matvecs.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jnp.linspace(0.0, 1.0, 300)
        kernel = jnp.exp(-50 * (x[:, None] - x) ** 2) + 0.1 * jnp.eye(300)
        operator = lx.MatrixLinearOperator(kernel, lx.positive_semidefinite_tag)
        preconditioner = tx.pivoted_cholesky_preconditioner(operator, rank=20, shift=0.1)
        key = jax.random.key(0)
        solution = tx.logdet(
            operator, k=10, num_steps=5, key=key, preconditioner=preconditioner
        )
        print(solution.value, "+-", solution.std_err)
        ```

    **Arguments:**

    - `operator`: an operator tagged positive semidefinite.
    - `rank`: r, the number of pivots, a Python integer; more than n counts as n.
    - `shift`: as in [`traceax.nystrom_preconditioner`][].
    - `diagonal`: the diagonal of the operator, shape `(n,)`. `None` takes it from the
        operator itself, if lineax knows it.
    - `throw`: as in [`traceax.trace`][].

    **Returns:**

    A `Preconditioner`, from r matvecs, one after another, and `O(n r^2)` operations.
    Three arrays of r vectors of length n are in memory while pivots are chosen, several
    at the end, and one afterwards. For a vector of shifts a
    [`traceax.ScaledPreconditioner`][] with it inside.

    **Raises:**

    - `ValueError`: `diagonal` is missing and lineax does not know it, or has another
        shape; the tag is missing; `rank` is below 1; `shift` is negative or infinite, or
        of another structure than vectors.
    - `TypeError`: `rank` is not a Python integer, `shift` not a real number, or
        `operator` not an operator.
    - An `equinox` run-time error with `throw=True`: a matvec was not finite.

    ??? cite

        ```bibtex
        @article{harbrecht2012low,
            author  = {Harbrecht, Helmut and Peters, Michael and Schneider, Reinhold},
            title   = {On the Low-Rank Approximation by the Pivoted {Cholesky}
                       Decomposition},
            journal = {Applied Numerical Mathematics},
            volume  = {62},
            number  = {4},
            pages   = {428--440},
            year    = {2012},
        }
        ```
    """
    entered = enter(operator)
    rank, n = _checked_rank(entered, rank), entered.size
    shift, scaling = checked_shift(shift, entered)
    if diagonal is None and entered.facts.diagonal_cost > 0:
        raise ValueError(
            "`diagonal` is missing, and lineax does not know it for this `operator`. "
            "Pass it, or use `traceax.nystrom_preconditioner`, which needs no diagonal."
        )
    diagonal = None if diagonal is None else jnp.asarray(diagonal)
    if diagonal is not None and diagonal.shape != (n,):
        raise ValueError(
            f"`diagonal` must have the shape ({n},). Found {diagonal.shape}."
        )
    preconditioner = call(
        _pivoted_cholesky,
        entered,
        entered.structure,
        rank,
        shift,
        scaling,
        diagonal,
        name="pivoted_cholesky_preconditioner",
        execution=Local(),
        throw=throw,
    )
    if scaling is not None:
        return ScaledPreconditioner(preconditioner, scaling)
    return preconditioner


def _pivoted_cholesky(
    opened, structure, rank, shift, scaling, diagonal
) -> Preconditioner:
    flat, facts = opened
    flat, n = _scaled(flat.frozen, scaling), flat.size
    if diagonal is None:
        diagonal = facts.diagonal
    if scaling is not None:
        diagonal = diagonal / scaling.entries
    start = jax.lax.stop_gradient(diagonal.real).astype(jnp.finfo(flat.dtype).dtype)

    def step(i, state):
        """One column of the factor L, `(A e_p - L L* e_p) / d_p^(1/2)` for the pivot p,
        where d, the diagonal of `A - L L*`, is `remaining`."""
        remaining, factor, basis, products = state
        pivot = jnp.argmax(remaining)
        # A pivot at rounding level ends the factorisation: later columns are zero.
        is_usable = remaining[pivot] > flat.eps * jnp.max(start)
        unit = jnp.where(is_usable, jnp.zeros_like(basis[:, 0]).at[pivot].set(1), 0)
        image = flat.mv(unit)
        explained = jnp.matmul(factor, factor[pivot].conj(), precision="highest")
        root = jnp.sqrt(jnp.where(is_usable, remaining[pivot], 1)).astype(flat.dtype)
        column = jnp.where(is_usable, (image - explained) / root, 0)
        # Zero for the pivot itself: rounding must not choose it again.
        remaining = jnp.maximum(remaining - jnp.abs(column) ** 2, 0).at[pivot].set(0)
        set_column = lambda x, y: x.at[:, i].set(y)  # noqa: E731
        return (
            remaining,
            set_column(factor, column),
            set_column(basis, unit),
            set_column(products, image),
        )

    empty = jnp.zeros((n, rank), flat.dtype)
    state = (start, empty, empty, empty)
    *_, basis, products = jax.lax.fori_loop(0, rank, step, state)
    with jax.default_matmul_precision("highest"):
        return assemble(
            flat,
            basis=basis,
            products=products,
            shift=shift,
            structure=structure,
            num_matvecs=rank,
        )
