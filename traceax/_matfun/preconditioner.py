from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, PRNGKeyArray, Real, Scalar

from .._checks import check_key, check_operator, check_positive
from .._execution import AbstractExecution, full_precision, Local
from .._flat import FlatOperator, flatten, standard_promotion, unflatten
from .._gradient import attach, attach_derivative, Frame
from .._kernel.dense import eigh, normalise, thin_svd
from .._kernel.nystrom import nystrom, orthonormalise
from .._operator.diagonal import diagonal_cost
from .._sampler import draw_for, NormalSampler


class Preconditioner(eqx.Module):
    """$P = \\hat A + \\sigma I$, $\\hat A$ a Nystrom approximation of $A - \\sigma I$:
    for [`traceax.logdet`][] and, through `inverse`, for `lineax.CG`.

    Made by [`traceax.nystrom_preconditioner`][] and
    [`traceax.pivoted_cholesky_preconditioner`][]. Constant to all derivatives, but that a
    differentiable `shift` lowers the variance of the gradient of a log-determinant.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jnp.linspace(0.0, 1.0, 300)
        kernel = jnp.exp(-50 * (x[:, None] - x) ** 2) + 0.1 * jnp.eye(300)
        operator = lx.MatrixLinearOperator(kernel, lx.positive_semidefinite_tag)
        key = jax.random.key(0)
        preconditioner = tx.nystrom_preconditioner(operator, rank=20, key=key, shift=0.1)
        solver = lx.CG(rtol=1e-4, atol=1e-4)
        options = {"preconditioner": preconditioner.inverse()}
        solution = lx.linear_solve(operator, jnp.ones(300), solver, options=options)
        print(preconditioner.logdet, solution.stats["num_steps"])
        ```

    **Attributes:**

    - `vectors`, `values`: shapes `(n, r)` and `(r,)`, of $\\hat A = U \\Lambda U^*$.
    - `shift`: $\\sigma$, of shape `()`.
    - `num_matvecs`: how many products it was made from.
    """

    vectors: Inexact[Array, "n r"]
    values: Real[Array, " r"]
    shift: Real[Array, ""]
    # With Y = (A - sigma I) Q: the approximation is Y H^(-1) Y*, H = Q* Y.
    basis: Inexact[Array, "n r"]  # Q
    quotient: Inexact[Array, "n r"]  # C = Y (H + 0.02 sigma I)^(-1)
    # The derivative of an estimated shift is `d* dA d` with this d; 0 for a given one.
    shift_direction: Inexact[Array, " n"]
    template: lx.IdentityLinearOperator
    num_matvecs: int = eqx.field(static=True)

    @property
    def logdet(self) -> Real[Array, ""]:
        """$\\log\\det P$, exactly, by the matrix determinant lemma."""
        shift = jax.lax.stop_gradient(self.shift)
        rest = self.size * jnp.log(shift)
        return rest + jnp.sum(jnp.log1p(self.values / shift))

    @property
    def size(self) -> int:
        """n."""
        return self.vectors.shape[0]

    @property
    def largest(self) -> Real[Array, ""]:
        """The largest eigenvalue."""
        return jnp.max(self.values) + jax.lax.stop_gradient(self.shift)

    def inverse(self) -> lx.FunctionLinearOperator:
        """$P^{-1}$ as a positive semidefinite `lineax` operator: pass it to
        `lineax.linear_solve` as `options={"preconditioner": preconditioner.inverse()}`.
        One product costs `4 n r` operations."""
        structure = self.template.in_structure()
        tags = lx.positive_semidefinite_tag
        dtype = self.vectors.dtype
        constant = jax.lax.stop_gradient(self)
        return unflatten(lambda x: constant.power(-1.0, x), structure, dtype, tags)

    def power(
        self, exponent: float, x: Inexact[Array, " n *k"]
    ) -> Inexact[Array, " n *k"]:
        """`P**exponent` times flat vectors, the columns of x."""
        shift = jax.lax.stop_gradient(self.shift)
        outer = shift**exponent
        inner = ((self.values + shift) ** exponent - outer).astype(x.dtype)
        part = jnp.matmul(self.vectors.conj().T, x, precision="highest")
        part = jnp.matmul(self.vectors * inner, part, precision="highest")
        return outer.astype(x.dtype) * x + part

    def apply_to(self, operator: FlatOperator) -> FlatOperator:
        """`P^(-1/2) A P^(-1/2)`."""
        fn = _Preconditioned(operator.fn, self)
        return FlatOperator(fn, operator.size, operator.dtype, operator.precision)

    def control(
        self,
        operator: FlatOperator,
        value: Real[Array, ""],
        probes: Inexact[Array, "n k"],
        execution: AbstractExecution,
    ) -> Real[Array, ""]:
        """`value`, with a derivative of mean zero that cancels sampling error.

        In a direction dA it is `tr(P^-1 dP) - mean(z* P^(-1/2) dP P^(-1/2) z)`, with dP
        close to the derivative of P for a fixed basis: what the preconditioner knows of
        `tr(A^-1 dA)` exactly replaces what the probes say of it. Wenger, Pleiss, Hennig,
        Cunningham and Gardner, ICML 2022, arXiv:2107.00243.

        With `dY = (dA - dsigma I) Q` it is `dP = dY C* + C dY* - C (Q* dY) C* +
        dsigma I`, and `x* dP x = Re (2 x - Q g)* dY g + dsigma x* x` for `g = C* x`. The
        multiple of the identity in C bounds dP where H is nearly singular, and moves no
        mean.
        """
        u = self.power(-0.5, probes) / probes.shape[1] ** 0.5
        solved = self.power(-1.0, self.quotient)
        adjoint = self.quotient.conj().T
        shift = jax.lax.stop_gradient(self.shift)
        with jax.default_matmul_precision("highest"):
            g = adjoint @ u
            sampled = 2 * u @ g.conj().T - self.basis @ (g @ g.conj().T)
            left = 2 * solved - self.basis @ (adjoint @ solved) - sampled
        trace = (self.size - self.values.size) / shift + jnp.sum(
            1 / (self.values + shift)
        )
        slope = trace - jnp.sum(jnp.abs(u) ** 2)
        slope -= jnp.sum(left.conj() * self.basis).real
        direction = self.shift_direction[:, None]
        left = jnp.concatenate([left, slope.astype(left.dtype) * direction], axis=1)
        right = jnp.concatenate([self.basis, direction], axis=1)
        slope = jax.lax.stop_gradient(slope)
        value = attach_derivative(value, lambda: slope * self.shift)
        frame = Frame(jax.lax.stop_gradient(left), right)
        return attach(operator, value, frame, execution=execution)


class _Preconditioned(eqx.Module):
    fn: Any
    preconditioner: Preconditioner

    def __call__(self, vector):
        half = self.preconditioner.power
        with standard_promotion():
            return half(-0.5, self.fn(half(-0.5, vector)))


def _prepare(operator: lx.AbstractLinearOperator, rank: int) -> tuple[FlatOperator, int]:
    check_operator(operator)
    rank = min(check_positive("rank", rank), operator.in_size())
    if not lx.is_positive_semidefinite(operator):
        raise ValueError(
            "A preconditioner needs an `operator` tagged positive semidefinite. Found "
            f"one of type {type(operator).__name__} without the tag. If it is, say so: "
            "`lineax.TaggedLinearOperator(operator, lineax.positive_semidefinite_tag)`."
        )
    return flatten(operator).frozen, rank


def _assemble(
    flat: FlatOperator,
    basis: Inexact[Array, "n r"],
    products: Inexact[Array, "n r"],
    shift: Scalar | float | None,
    operator: lx.AbstractLinearOperator,
) -> Preconditioner:
    """From `products = A basis`, the basis orthonormal or with zero columns."""
    real = jnp.finfo(flat.dtype).dtype
    products, unit = normalise(products)
    size = jnp.linalg.norm(products)
    direction = jnp.zeros_like(products[:, 0])
    if shift is None:
        # A tenth below the smallest Ritz value: near it, but A - sigma I stays positive
        # definite on the basis.
        core = basis.conj().T @ products
        empty = jnp.sum(jnp.abs(basis), axis=0) == 0
        core = (core + core.conj().T) / 2 + jnp.diag(jnp.where(empty, size, 0))
        ritz_values, ritz_vectors = eigh(core)
        shift = 0.9 * ritz_values[0] * unit
        direction = 0.9**0.5 * (basis @ ritz_vectors[:, 0])
    floor = flat.eps * jnp.where(size > 0, size, 1)
    shift = jnp.maximum(jnp.asarray(shift, real), floor * unit)
    relative = jax.lax.stop_gradient(shift) / unit
    products = products - relative.astype(flat.dtype) * basis
    approximation = nystrom(basis, products, flat.eps)
    vectors, s, _ = thin_svd(approximation.factor, flat.eps)
    # Rows of the whitener have the length h^(-1/2), for h an eigenvalue of H.
    whitener = approximation.whitener
    damping = 1 / (1 + 0.02 * relative * jnp.sum(jnp.abs(whitener) ** 2, axis=1))
    return Preconditioner(
        vectors=vectors,
        values=unit * jnp.maximum(s**2 - approximation.shift, 0),
        shift=shift,
        basis=basis,
        quotient=(approximation.factor * damping) @ whitener,
        shift_direction=direction,
        template=lx.IdentityLinearOperator(operator.in_structure()),
        num_matvecs=basis.shape[1],
    )


@eqx.filter_jit
def nystrom_preconditioner(
    operator: lx.AbstractLinearOperator,
    rank: int,
    *,
    key: PRNGKeyArray,
    shift: Scalar | float | None = None,
    execution: AbstractExecution = Local(),
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
    - `rank`: r, the number of random directions, a Python integer.
    - `key`: a JAX PRNG key.
    - `shift`: what is known of the smallest eigenvalues, such as the noise variance of a
        Gaussian process: subtracted before, added after. The better it is, the better
        the preconditioner. If it is a differentiated hyperparameter, pass it as such.
        `None` estimates it from the sketch.
    - `execution`: where and how many at a time products are made.

    **Returns:**

    A `Preconditioner`, for `rank` products, all at once, and `O(n r^2)` operations.

    **Raises:**

    - `ValueError`: the tag is missing, or `rank` is below 1.
    - `TypeError`: `rank` is not a Python integer, `operator` not an operator, or `key`
        not a key.

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
    flat, rank = _prepare(operator, rank)
    probes = draw_for(flat, NormalSampler(), key, jnp.arange(rank))
    applied = full_precision(lambda x: execution.matmat(flat, x))
    with standard_promotion(), execution.factorising(), applied as matmat:
        basis, _, _ = orthonormalise(probes)
        return _assemble(flat, basis, matmat(basis), shift, operator)


@eqx.filter_jit
def pivoted_cholesky_preconditioner(
    operator: lx.AbstractLinearOperator,
    rank: int,
    *,
    shift: Scalar | float | None = None,
    diagonal: Inexact[Array, " n"] | None = None,
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
    - `rank`: r, the number of pivots, a Python integer.
    - `shift`: as in [`traceax.nystrom_preconditioner`][].
    - `diagonal`: of the operator, shape `(n,)`. `None`: from the operator itself, if
        lineax knows it.

    **Returns:**

    A `Preconditioner`, for `rank` products and `O(n r^2)` operations.

    **Raises:**

    - `ValueError`: `diagonal` is missing and the operator does not know its own, or has
        another shape; the tag is missing; `rank` is below 1.
    - `TypeError`: `rank` is not a Python integer, or `operator` not an operator.

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
    flat, rank = _prepare(operator, rank)
    n = flat.size
    if diagonal is None:
        if diagonal_cost(operator) > 0:
            raise ValueError(
                "`diagonal` is missing: an operator of type "
                f"{type(operator).__name__} does not know its own without n products. "
                "Pass it, or use `traceax.nystrom_preconditioner`, which needs none."
            )
        diagonal = lx.diagonal(operator)
    if diagonal.shape != (n,):
        raise ValueError(
            f"`diagonal` must have the shape ({n},). Found {diagonal.shape}."
        )
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

    with standard_promotion():
        start = rest
        empty = jnp.zeros((n, rank), flat.dtype)
        state = (rest, empty, empty, empty)
        *_, basis, products = jax.lax.fori_loop(0, rank, step, state)
        with jax.default_matmul_precision("highest"):
            return _assemble(flat, basis, products, shift, operator)
