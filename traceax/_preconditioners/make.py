import math

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, PyTree, Scalar

from .._core.arithmetic import full_precision
from .._core.checks import check_key, check_positive, real_scalar
from .._core.flat import FlatOperator
from .._core.results import failure, RESULTS
from .._core.sampler import draw_for, NormalSampler
from .._numerics.dense import eigh, normalise, thin_svd
from .._numerics.nystrom import nystrom, orthonormalise
from .._operators.checks import check_is_operator
from .._operators.diagonal import diagonal_cost
from .._operators.door import enter
from .._run.call import call
from .._run.execution import AbstractExecution, Local
from .base import Preconditioner


# The index at which the probes of a preconditioner begin, among all that are drawn from
# one key: those of the estimate that takes it are others.
FIRST_PROBE = 2**30


def _checked_rank(operator: lx.AbstractLinearOperator, rank: int) -> int:
    check_is_operator(operator)
    rank = min(check_positive("rank", rank), operator.in_size())
    if not lx.is_positive_semidefinite(operator):
        raise ValueError(
            "A preconditioner needs an `operator` tagged positive semidefinite. Found "
            f"one of type {type(operator).__name__} without the tag. If it is, say so: "
            "`lineax.TaggedLinearOperator(operator, lineax.positive_semidefinite_tag)`."
        )
    return rank


def _checked_shift(shift: Scalar | float | None) -> Scalar | None:
    """As an array, so that another number is no other program. Raise for one that is
    negative or infinite, but leave those on a device there."""
    if shift is None:
        return None
    scalar = real_scalar("shift", shift)
    if not isinstance(shift, jax.Array) and not 0 <= float(shift) < math.inf:
        raise ValueError(f"`shift` must be finite, 0 or more. Found {shift!r}.")
    return scalar


def assemble(
    flat: FlatOperator,
    basis: Inexact[Array, "n r"],
    products: Inexact[Array, "n r"],
    shift: Scalar | float | None,
    structure: PyTree[jax.ShapeDtypeStruct],
    num_matvecs: Int[Array, ""] | int,
    least: Scalar | None = None,
) -> Preconditioner:
    """From `products = A basis`, the basis orthonormal or with zero columns; `structure`
    is that of a vector. `least` is the smallest eigenvalue of `P^-1 A` that there may be
    where the shift is as asked; it is made larger where rounding would drown it."""
    real = jnp.finfo(flat.dtype).dtype
    products, unit = normalise(products)
    size = jnp.linalg.norm(products)
    core = basis.conj().T @ products
    empty = jnp.sum(jnp.abs(basis), axis=0) == 0
    core = (core + core.conj().T) / 2 + jnp.diag(jnp.where(empty, size, 0))
    ritz_values, ritz_vectors = eigh(core)
    smallest = ritz_values[0] * unit
    if shift is None:
        # A tenth below the smallest Ritz value: near it, but A - sigma I stays positive
        # definite on the basis.
        shift = 0.9 * smallest
    floor = flat.eps * jnp.where(size > 0, size, 1) * unit
    asked = jax.lax.stop_gradient(jnp.asarray(shift, real))
    shift = jnp.maximum(asked, floor)
    if least is not None:
        least = least * jnp.maximum(asked, 0) / shift
    share = jnp.where(smallest > shift, shift / smallest, 1)
    relative = (shift / unit).astype(flat.dtype)
    rest = products - relative * basis
    approximation = nystrom(basis, rest, flat.eps, indefinite=True)
    vectors, s, _ = thin_svd(approximation.factor, flat.eps)
    return Preconditioner(
        vectors=vectors,
        values=unit * jnp.maximum(s**2 - approximation.shift, 0),
        shift=shift,
        shift_direction=basis @ (jnp.sqrt(share) * ritz_vectors[:, 0]),
        template=lx.IdentityLinearOperator(structure),
        num_matvecs=num_matvecs,
        result=failure(~jnp.all(jnp.isfinite(products)), RESULTS.nonfinite_product),
        least=least,
    )


def nystrom_preconditioner(
    operator: lx.AbstractLinearOperator,
    rank: int,
    *,
    key: PRNGKeyArray,
    shift: Scalar | float | None = None,
    execution: AbstractExecution = Local(),
    throw: bool = True,
) -> Preconditioner:
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

    - `operator`: a positive-semidefinite-tagged operator, of any structure and dtype.
    - `rank`: r, the number of random directions, a Python integer; more than n counts
        as n.
    - `key`: a JAX PRNG key.
    - `shift`: about the size of the smallest eigenvalues, such as the noise variance of
        a Gaussian process; it is subtracted before the approximation and added after
        it. The better it is, the better the preconditioner. `None` estimates it from
        the sketch. Constant to derivatives.
    - `execution`: where and how many at a time products are made.
    - `throw`: as in [`traceax.trace`][].

    **Returns:**

    A `Preconditioner`, from r products, all at once, and `O(n r^2)` operations.
    While it is made several arrays of r vectors of length n are held, and one is kept.

    **Raises:**

    - `ValueError`: the tag is missing, `rank` is below 1, or `shift` is negative or
        infinite.
    - `TypeError`: `rank` is not a Python integer, `shift` not a real number, `operator`
        not an operator, or `key` not a key.
    - An `equinox` run-time error with `throw=True`: a product was not finite.

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
    rank, shift = _checked_rank(operator, rank), _checked_shift(shift)
    structure = operator.in_structure()
    arguments = (enter(operator), structure, rank, key, shift, execution)
    name = "nystrom_preconditioner"
    return call(_nystrom, *arguments, name=name, execution=execution, throw=throw)


def _nystrom(opened, structure, rank, key, shift, execution) -> Preconditioner:
    flat = opened[0].frozen
    probes = draw_for(flat, NormalSampler(), key, FIRST_PROBE + jnp.arange(rank))
    with full_precision(lambda x: execution.matmat(flat, x)) as matmat:
        basis, _, _ = orthonormalise(probes)
        return assemble(flat, basis, matmat(basis), shift, structure, rank)


def pivoted_cholesky_preconditioner(
    operator: lx.AbstractLinearOperator,
    rank: int,
    *,
    shift: Scalar | float | None = None,
    diagonal: Inexact[Array, " n"] | None = None,
    throw: bool = True,
) -> Preconditioner:
    """A [`traceax.Preconditioner`][] from a partial Cholesky factorisation with complete
    pivoting, which needs the diagonal of the operator, and no randomness.

    Its products are with unit vectors, one after another, each chosen where the
    remaining diagonal is largest. [`traceax.nystrom_preconditioner`][] makes them all at
    once and needs no diagonal: prefer it unless columns are cheaper than products.

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

    - `operator`: a positive-semidefinite-tagged operator.
    - `rank`: r, the number of pivots, a Python integer; more than n counts as n.
    - `shift`: as in [`traceax.nystrom_preconditioner`][].
    - `diagonal`: of the operator, shape `(n,)`. `None`: from the operator itself, if
        lineax knows it.
    - `throw`: as in [`traceax.trace`][].

    **Returns:**

    A `Preconditioner`, from r products, one after another, and `O(n r^2)`
    operations. While pivots are chosen three arrays of r vectors of length n are held,
    at the end several, and one is kept.

    **Raises:**

    - `ValueError`: `diagonal` is missing and the operator does not know its own, or has
        another shape; the tag is missing; `rank` is below 1; `shift` is negative or
        infinite.
    - `TypeError`: `rank` is not a Python integer, `shift` not a real number, or
        `operator` not an operator.
    - An `equinox` run-time error with `throw=True`: a product was not finite.

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
    rank, n = _checked_rank(operator, rank), operator.in_size()
    shift = _checked_shift(shift)
    if diagonal is None and diagonal_cost(operator) > 0:
        raise ValueError(
            f"`diagonal` is missing: an operator of type {type(operator).__name__} does "
            "not know its own without n products. Pass it, or use "
            "`traceax.nystrom_preconditioner`, which needs none."
        )
    diagonal = None if diagonal is None else jnp.asarray(diagonal)
    if diagonal is not None and diagonal.shape != (n,):
        raise ValueError(
            f"`diagonal` must have the shape ({n},). Found {diagonal.shape}."
        )
    structure = operator.in_structure()
    arguments = (enter(operator), structure, rank, shift, diagonal)
    name = "pivoted_cholesky_preconditioner"
    return call(_pivoted_cholesky, *arguments, name=name, execution=Local(), throw=throw)


def _pivoted_cholesky(opened, structure, rank, shift, diagonal) -> Preconditioner:
    flat, facts = opened
    flat, n = flat.frozen, flat.size
    if diagonal is None:
        diagonal = facts.diagonal
    rest = jax.lax.stop_gradient(diagonal.real).astype(jnp.finfo(flat.dtype).dtype)

    def step(i, state):
        rest, factor, basis, products = state
        pivot = jnp.argmax(rest)
        alive = rest[pivot] > flat.eps * jnp.max(start)
        unit = jnp.where(alive, jnp.zeros_like(basis[:, 0]).at[pivot].set(1), 0)
        product = flat.mv(unit)
        known = jnp.matmul(factor, factor[pivot].conj(), precision="highest")
        root = jnp.sqrt(jnp.where(alive, rest[pivot], 1)).astype(flat.dtype)
        column = jnp.where(alive, (product - known) / root, 0)
        rest = jnp.maximum(rest - jnp.abs(column) ** 2, 0).at[pivot].set(0)
        set_column = lambda x, y: x.at[:, i].set(y)  # noqa: E731
        return (
            rest,
            set_column(factor, column),
            set_column(basis, unit),
            set_column(products, product),
        )

    start = rest
    empty = jnp.zeros((n, rank), flat.dtype)
    state = (rest, empty, empty, empty)
    *_, basis, products = jax.lax.fori_loop(0, rank, step, state)
    with jax.default_matmul_precision("highest"):
        return assemble(flat, basis, products, shift, structure, rank)
