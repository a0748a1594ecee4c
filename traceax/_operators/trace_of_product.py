"""The trace of a product `B A` with a second operator B.

From pairs of vectors with E[sum_i y_i l_i*] = A,

    tr(B A) = E sum_i l_i* B y_i.

In the code l is `left` and y is `image`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, PyTree, Real

from .._core.chirp import rotate
from .._core.flat import as_complex, FlatOperator
from .._core.quantity import AbstractQuantity, norm_bound
from .door import enter, EnteredOperator


class TraceOfProduct(AbstractQuantity):
    r"""The trace $\mathrm{tr}(BA)$ of the product with another operator B, a scalar, for
    [`traceax.estimate`][] of A. With $A = e^{-\beta H}$ as a [`traceax.function_of`][] H,
    the ratio of this and the trace is a thermal average of B.

    B is applied to the matvecs with A: once to each of them with
    [`traceax.HutchinsonEstimator`][]; with estimators that take their probes together up
    to a hundred times as often, for the error bar. `stats["num_matvecs"]` counts those
    with A alone. B needs no tag and no adjoint. Compiled programs are shared by operators
    of the same code, and derivatives in the arrays of B work as those in the arrays of A.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        energies = jnp.linspace(0.0, 3.0, 300)
        operator = lx.DiagonalLinearOperator(energies)
        boltzmann = tx.function_of(operator, lambda x: jnp.exp(-x), num_steps=20)
        quantities = {"sum": tx.TraceOfProduct(operator), "Z": tx.Trace()}
        estimator, key = tx.HutchinsonEstimator(), jax.random.key(0)
        solution = tx.estimate(boltzmann, quantities, estimator, k=10, key=key)
        energy = solution.transform(lambda t: t["sum"] / t["Z"])
        print(f"{energy.value:.1f}")  # 0.8
        ```
    """

    other: Any

    def for_structure(self, structure: PyTree[jax.ShapeDtypeStruct]) -> "TraceOfProduct":
        entered = enter(self.other, name="other")
        if structure not in (entered.structure, as_complex(entered.structure)):
            raise ValueError(
                "`other` of `traceax.TraceOfProduct` must be applied to vectors of the "
                f"structure of `operator`. Found other.in_structure()={entered.structure}"
                f" for operator.out_structure()={structure}. Cast or reshape one of them."
            )
        return TraceOfProduct(entered)

    def open(self) -> "TraceOfProduct":
        if isinstance(self.other, FlatOperator):
            return self
        assert isinstance(self.other, EnteredOperator)
        return TraceOfProduct(self.other.open()[0])

    def _apply(self, image: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        assert isinstance(self.other, FlatOperator)
        other = self.other.complexified if jnp.iscomplexobj(image) else self.other
        return other.mv(image)

    def read(self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]) -> Array:
        return jnp.vdot(left, self._apply(image), precision="highest")

    def size(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]
    ) -> Real[Array, ""]:
        return norm_bound(jnp.abs(left * self._apply(image)))

    def magnitude(self, images: Inexact[Array, "p n"]) -> Real[Array, ""]:
        norms = jnp.linalg.norm(jax.vmap(self._apply)(images), axis=1)
        return jnp.linalg.norm(norms)

    def marks(
        self, left: Inexact[Array, " n"], image: Inexact[Array, " n"]
    ) -> Inexact[Array, ""]:
        return self.read(rotate(left), image)

    def comparable(self, hermitian: bool) -> bool:
        return False  # The product of Hermitian operators is not Hermitian.


TraceOfProduct.__init__.__doc__ = """**Arguments:**

- `other`: B, a square matrix or operator on the same vectors as A.
"""
