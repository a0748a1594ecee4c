import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, PyTree, Real

from .._core.arithmetic import standard_promotion
from .._core.flat import FlatOperator, freeze
from .._core.results import RESULTS
from .._operators.door import unflatten
from .._run.budget import Budget
from .._run.execution import AbstractExecution
from .._run.gradient import attach, Frame
from .._run.steps import AdaptiveSteps


class AbstractPreconditioning(eqx.Module):
    """What [`traceax.logdet`][] takes as `preconditioner`: one, or how one is made for
    the call."""

    @abc.abstractmethod
    def prepare(
        self,
        operator: FlatOperator,
        *,
        k: int | Budget,
        num_steps: int | AdaptiveSteps,
        key: PRNGKeyArray | None,
        execution: AbstractExecution,
    ) -> "AbstractPreconditioner":
        """The preconditioner for a call.

        **Arguments:**

        - `operator`: A, as a map of flat vectors.
        - `k`, `num_steps`: what the call is to spend.
        - `key`, `execution`: as given to it.

        **Returns:**

        A preconditioner of the size of the operator, constant to derivatives of it.
        """


class AbstractPreconditioner(AbstractPreconditioning):
    """A positive definite $P \\approx A$ with a known determinant, for
    [`traceax.logdet`][]: $\\log\\det A = \\log\\det P + \\mathrm{tr}
    \\log(P^{-1/2} A P^{-1/2})$.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        class Jacobi(tx.AbstractPreconditioner):
            # The diagonal of A.
            diagonal: jax.Array
            num_matvecs: int = 0

            @property
            def size(self):
                return self.diagonal.size

            @property
            def logdet(self):
                return jnp.sum(jnp.log(self.diagonal))

            @property
            def largest(self):
                return jnp.max(self.diagonal)

            def power(self, exponent, x):
                return (self.diagonal**exponent * x.T).T

        scales = jnp.linspace(1.0, 1e4, 300)
        matrix = jnp.diag(scales) + 0.1 * jnp.ones((300, 300))
        operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        settings = {"k": 10, "num_steps": 5, "key": jax.random.key(0)}
        plain = tx.logdet(operator, **settings)
        jacobi = tx.logdet(operator, preconditioner=Jacobi(scales), **settings)
        exact = jnp.linalg.slogdet(matrix)[1]
        print(abs(jacobi.value - exact) < abs(plain.value - exact) / 100)  # True
        ```

    **Attributes:**

    - `size`: n.
    - `logdet`: $\\log\\det P$, a real scalar.
    - `largest`: the largest eigenvalue of P, a real scalar.
    - `num_matvecs`: how many products with A it was made from.
    - `least`: a number that $P^{-1/2} A P^{-1/2}$ is known not to be below, or `None`.
    """

    num_matvecs: eqx.AbstractVar[int | Int[Array, ""]]

    def prepare(self, operator: FlatOperator, **_: Any) -> "AbstractPreconditioner":
        """Itself, if it is of the size of the operator."""
        check_size(self, operator.size)
        return self

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """n, a Python integer: the number of rows of P, which is that of A."""

    @property
    @abc.abstractmethod
    def logdet(self) -> Real[Array, ""]:
        """$\\log\\det P$, exactly: real, of shape `()`."""

    @property
    @abc.abstractmethod
    def largest(self) -> Real[Array, ""]:
        """The largest eigenvalue of P: real, of shape `()`. A lower bound of A divided by
        it is one of $P^{-1/2} A P^{-1/2}$."""

    @property
    def least(self) -> Real[Array, ""] | None:
        return None

    @abc.abstractmethod
    def power(
        self, exponent: float, x: Inexact[Array, " n *k"]
    ) -> Inexact[Array, " n *k"]:
        """$P^p x$.

        **Arguments:**

        - `exponent`: p, -1/2 in a log-determinant.
        - `x`: a flat vector, shape `(n,)`, or several, the columns of shape `(n, k)`.

        **Returns:**

        An array like `x`.
        """

    def diagonal_of_power(self, exponent: float) -> Real[Array, " n"]:
        """The diagonal of $P^p$, by default from its products with unit vectors.

        **Arguments:**

        - `exponent`: p, -1 for [`traceax.diagonal_of_function`][].

        **Returns:**

        An array of shape `(n,)`.
        """

        def entry(index):
            unit = jnp.zeros_like(self.largest, shape=self.size).at[index].set(1)
            return self.power(exponent, unit)[index].real

        return jax.lax.map(entry, jnp.arange(self.size))

    @property
    def structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        """Of the vectors that `inverse` applies to: by default arrays of shape `(n,)`."""
        return jax.ShapeDtypeStruct((self.size,), self.largest.dtype)

    def inverse(self) -> lx.FunctionLinearOperator:
        """$P^{-1}$ as a positive semidefinite `lineax` operator: pass it to
        `lineax.linear_solve` as `options={"preconditioner": preconditioner.inverse()}`.

        **Returns:**

        An operator on vectors of the structure of A, constant to derivatives.
        """
        structure, tags = self.structure, lx.positive_semidefinite_tag
        dtype = jnp.result_type(*jax.tree.leaves(structure))
        constant = freeze(self)
        return unflatten(lambda x: constant.power(-1.0, x), structure, dtype, tags)

    def control(
        self,
        operator: FlatOperator,
        value: Real[Array, ""],
        probes: Inexact[Array, "n k"],
        execution: AbstractExecution,
    ) -> Real[Array, ""]:
        """The estimate, with a derivative added whose mean is zero: a control variate,
        made of the derivative of $\\log\\det P$ in that of A, which cancels sampling
        error.

        **Arguments:**

        - `operator`: A, as a map of flat vectors.
        - `value`: the estimate of $\\mathrm{tr} \\log(P^{-1/2} A P^{-1/2})$.
        - `probes`: those that it was made from, shape `(n, k)`.
        - `execution`: where products are to be made.

        **Returns:**

        A number equal to `value`; by default `value` itself, which adds nothing.
        """
        return value

    def apply_to(self, operator: FlatOperator) -> FlatOperator:
        """$P^{-1/2} A P^{-1/2}$.

        **Arguments:**

        - `operator`: A, as a map of flat vectors.

        **Returns:**

        Another such map.
        """
        fn = Congruence(operator.fn, self)
        return dataclasses.replace(operator, fn=fn)


@eqx.filter_jit
def _log_determinant(values: Array, shift: Array, size: int) -> Array:
    return size * jnp.log(shift) + jnp.sum(jnp.log1p(values / shift))


def check_size(preconditioner: AbstractPreconditioner, n: int) -> None:
    """Raise unless it has n rows."""
    if preconditioner.size != n:
        raise ValueError(
            "`preconditioner` must be of the size of `operator`. Found "
            f"{preconditioner.size} and {n}. Make it from this operator, for example "
            "`traceax.nystrom_preconditioner(operator, rank, key=key)`."
        )


class Preconditioner(AbstractPreconditioner):
    """$P = \\hat A + \\sigma I$, $\\hat A$ a Nystrom approximation of $A - \\sigma I$:
    for [`traceax.logdet`][] and, through `inverse`, for `lineax.CG`.

    Made by [`traceax.nystrom_preconditioner`][] and
    [`traceax.pivoted_cholesky_preconditioner`][]. Constant to all derivatives.

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
    - `result`: a [`traceax.RESULTS`][] member: `successful` or `nonfinite_product`.
    - `least`: a lower bound of $P^{-1/2} A P^{-1/2}$, where one is known.
    """

    vectors: Inexact[Array, "n r"]
    values: Real[Array, " r"]
    shift: Real[Array, ""]
    # The derivative of the smallest eigenvalue is about `d* dA d` with this d.
    shift_direction: Inexact[Array, " n"]
    template: lx.IdentityLinearOperator
    num_matvecs: int | Int[Array, ""]
    result: RESULTS
    least: Real[Array, ""] | None = None  # pyright: ignore
    estimated: ClassVar[tuple[str, ...]] = ("vectors", "values", "shift")

    def prepare(self, operator: FlatOperator, **_: Any) -> AbstractPreconditioner:
        """Itself, constant to derivatives."""
        return jax.lax.stop_gradient(super().prepare(operator))

    @property
    def logdet(self) -> Real[Array, ""]:
        """$\\log\\det P$, exactly, by the matrix determinant lemma."""
        return _log_determinant(self.values, self.shift, self.size)

    @property
    def size(self) -> int:
        """n."""
        return self.vectors.shape[0]

    @property
    def largest(self) -> Real[Array, ""]:
        """The largest eigenvalue."""
        return jnp.max(self.values) + self.shift

    @property
    def structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.template.in_structure()

    def power(
        self, exponent: float, x: Inexact[Array, " n *k"]
    ) -> Inexact[Array, " n *k"]:
        """`P**exponent` times flat vectors, the columns of x."""
        outer = self.shift**exponent
        inner = ((self.values + self.shift) ** exponent - outer).astype(x.dtype)
        part = jnp.matmul(self.vectors.conj().T, x, precision="highest")
        part = jnp.matmul(self.vectors * inner, part, precision="highest")
        return outer.astype(x.dtype) * x + part

    def diagonal_of_power(self, exponent: float) -> Real[Array, " n"]:
        """The diagonal of `P**exponent`."""
        outer = self.shift**exponent
        inner = (self.values + self.shift) ** exponent - outer
        squares = jnp.abs(self.vectors) ** 2
        return outer + jnp.matmul(squares, inner, precision="highest")

    def control(
        self,
        operator: FlatOperator,
        value: Real[Array, ""],
        probes: Inexact[Array, "n k"],
        execution: AbstractExecution,
    ) -> Real[Array, ""]:
        """`value`, with a derivative of mean zero that cancels sampling error.

        In a direction dA it is `tr(P^-1 dP) - mean(z* P^(-1/2) dP P^(-1/2) z)`, with dP
        close to the derivative of P: what the preconditioner knows of `tr(A^-1 dA)`
        exactly replaces what the probes say of it. Wenger, Pleiss, Hennig, Cunningham and
        Gardner, ICML 2022, arXiv:2107.00243.

        dP is dA on the range of U and between it and the complement, and dsigma times
        the identity on the complement, `dsigma = d* dA d`. With `dY = (dA - dsigma I) U`
        it is `x* dP x = Re (2 x - U g)* dY g + dsigma x* x` for `g = U* x`. The vectors x
        are those of `_split`.
        """
        u = self._split(probes / probes.shape[1] ** 0.5)
        basis, inverse = self.vectors, 1 / (self.values + self.shift)
        with jax.default_matmul_precision("highest"):
            g = basis.conj().T @ u
            sampled = 2 * u @ g.conj().T - basis @ (g @ g.conj().T)
            left = basis * inverse - sampled
        trace = (self.size - self.values.size) / self.shift + jnp.sum(inverse)
        slope = trace - jnp.sum(jnp.abs(u) ** 2) - jnp.sum(left.conj() * basis).real
        direction = self.shift_direction[:, None]
        left = jnp.concatenate([left, slope.astype(left.dtype) * direction], axis=1)
        right = jnp.concatenate([basis, direction], axis=1)
        frame = Frame(jax.lax.stop_gradient(left), right)
        return attach(operator, value, frame, execution=execution)

    def _split(self, z: Inexact[Array, "n k"]) -> Inexact[Array, "n p"]:
        """The vectors x over which the control variate sums `x* dP x`, from a probe z.

        `M = P^(-1/2) A P^(-1/2)` is close to the identity on the range of U. For a pair
        of eigenvectors, one in it and one outside, the derivative of `z* log(M) z` has
        the weight `log(m) / (m - 1)` with the other's eigenvalue m, and `z* K z` of
        `K = P^(-1/2) dP P^(-1/2)` has 1. So the coupling of the two, which has mean zero,
        gets the weight for the largest m that is expected.
        """
        last = self.values[self.num_matvecs - 1]
        smallest = last / self.shift
        weight = jnp.where(smallest > 0, jnp.log1p(smallest) / smallest, 1)
        weight = weight.astype(z.dtype)
        with jax.default_matmul_precision("highest"):
            part = self.vectors @ (self.vectors.conj().T @ z)
        parts = jnp.concatenate([part, z - part], axis=1)
        both = [weight**0.5 * z, (1 - weight) ** 0.5 * parts]
        return self.power(-0.5, jnp.concatenate(both, axis=1))


class Congruence(eqx.Module):
    """`P^(-1/2) A P^(-1/2)`, or of a map that stacks several A, those of each."""

    fn: Callable[[Array], Array]
    preconditioner: AbstractPreconditioner
    stacked: int = eqx.field(static=True, default=1)

    def __call__(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " m"]:
        half = self.preconditioner.power
        with standard_promotion():
            images = jnp.split(self.fn(half(-0.5, vector)), self.stacked)
            return jnp.concatenate([half(-0.5, image) for image in images])
