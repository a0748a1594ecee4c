"""The answer of `spectral_density`: a measure that is read in several ways.

Probe i gives a Gauss rule, the masses w_ij (`weights`) at the Ritz values theta_ij
(`nodes`). With k probes, the integral of a function g is estimated by

    (1 / k) sum_i sum_j w_ij g(theta_ij),

where g is a Gaussian around t for the density, and a step for the cumulative one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, ArrayLike, Int, Real, Scalar

from .._core.arithmetic import standard_promotion
from .._core.jax_interfaces import Tracer
from .._core.moments import Moments
from .._core.report import counted, fetch, has_numbers, table
from .._core.results import describe_failures, RESULTS


class SpectralDensity(eqx.Module):
    r"""An estimate, from `k` probes, of the spectral measure, which has the mass $1/n$ at
    each eigenvalue. Made by [`traceax.spectral_density`][].

    Probe $i$ gives a Gauss rule, with masses $w_{ij}$ at the nodes $\theta_{ij}$.
    Quantities of the measure are computed for each rule, and reported as their mean over
    rules with its standard error.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        operator = lx.DiagonalLinearOperator(jnp.array([1.0, 2.0, 3.0, 4.0]))
        measure = tx.spectral_density(operator, k=5, num_steps=4, key=jax.random.key(0))
        fraction, std_err = measure.cumulative(2.5)
        print(f"{fraction:.2f}")  # 0.50
        density, std_err = measure(jnp.linspace(0, 5, 6), width=0.2)
        ```

    **Attributes:**

    - `nodes`: the Ritz values, shape `(k, num_steps)`, ascending in each row, real, in
        the units of the eigenvalues.
    - `weights`: the masses, of the same shape. Each row sums to 1.
    - `num_matvecs`: the number of matvecs that it was made from, an integer.
    - `num_steps`: the number of steps of each probe, an integer. If it was chosen, arrays
        have room for more: the further nodes have no weight.
    - `result`: a [`traceax.RESULTS`][] member: `successful` or `nonfinite_product`.

    Where a Krylov space was exhausted early, as with few distinct eigenvalues, the other
    nodes of a row are inside the spectrum and have no weight, or share that of a node
    from which they differ by rounding.
    """

    nodes: Real[Array, "k s"]
    weights: Real[Array, "k s"]
    num_matvecs: Int[Array, ""] | int
    num_steps: Int[Array, ""] | int
    result: Any = eqx.field(default_factory=lambda: RESULTS.successful)
    estimated: ClassVar[tuple[str, ...]] = ("nodes", "weights")

    @property
    def largest(self) -> Real[Array, ""]:
        """The largest Ritz value of all probes, an estimate of the largest eigenvalue
        from below: the eigenvalue is at least as large, up to rounding.

        It is accurate after some tens of steps if the eigenvalue stands apart. It has no
        error bar: [`traceax.eigsh`][] gives an interval. A scalar array, of the shape of
        the batch for a batch of measures.
        """
        return jnp.max(self.nodes, axis=(-2, -1))

    @property
    def smallest(self) -> Real[Array, ""]:
        """The smallest Ritz value of all probes, an estimate of the smallest eigenvalue
        from above, as `largest` is one from below."""
        return jnp.min(self.nodes, axis=(-2, -1))

    def __repr__(self) -> str:
        parts = self.nodes, self.weights, jax.tree.leaves(self.result)
        counts = self.num_matvecs, self.num_steps
        if not has_numbers(*parts, counts):
            return eqx.tree_pformat(self)
        nodes, weights, (result,), (num_matvecs, num_steps) = fetch((*parts, counts))
        used, (*batch, k, _) = nodes[weights > 0], nodes.shape
        rows = [("result", text) for text in describe_failures(result)]
        if used.size:
            rows.append(("Ritz values", f"{used.min():.4g} to {used.max():.4g}"))
        rules = f"{counted(k, 'probe')} of {counted(num_steps, 'step')}"
        rows.append(("cost", f"{counted(num_matvecs, 'matvec')}, {rules}"))
        suffix = f", a batch of shape {tuple(batch)}" if batch else ""
        return table(f"Spectral density{suffix}", rows)

    def __call__(
        self, t: Real[ArrayLike, "*p"], width: Scalar | float
    ) -> tuple[Real[Array, "*p"], Real[Array, "*p"]]:
        """The density at `t`, smoothed by a Gaussian.

        **Arguments:**

        - `t`: real points of any shape, in the units of the eigenvalues.
        - `width`: the standard deviation of the Gaussian, a positive real number in the
            same units. If it is the range of the spectrum over `num_steps`, quadrature
            errors were below a thousandth of the peak of the density in measurements. At
            half of that width, single nodes show as bumps.

        **Returns:**

        The pair `density, std_err`, both of the shape of `t`, in inverse units of the
        eigenvalues. The integral of the density is 1. `std_err` is the standard error of
        the mean over probes at each point alone, `inf` with one probe; errors at
        neighbouring points are correlated. No matvec is made. Memory is an array of
        `points * k * num_steps` numbers, so use `jax.lax.map` for very many points.

        **Raises:**

        - `TypeError`: `t` or `width` is not real.
        - `ValueError`: `width` is not one positive number; the measure is a batch of
            several.
        """
        width = _real("width", width, self.nodes.dtype)
        if width.shape != () or not (isinstance(width, Tracer) or width > 0):
            raise ValueError(
                f"`width` must be one positive number. Found {width}. Pass, for example, "
                "a fiftieth of the range of the eigenvalues."
            )
        return self._mean(Partial(_gaussian, width), t)

    def cumulative(
        self, t: Real[ArrayLike, "*p"]
    ) -> tuple[Real[Array, "*p"], Real[Array, "*p"]]:
        """The fraction of the eigenvalues that are at most `t`.

        A rule jumps at its nodes, by their weights. Between two nodes its error is at
        most the larger of their weights (the inequalities of Chebyshev, Markov and
        Stieltjes). The standard error does not count this error, and more steps reduce
        it. At an eigenvalue itself, rounding decides on which side it counts.

        **Arguments:**

        - `t`: real points of any shape, in the units of the eigenvalues.

        **Returns:**

        The pair `fraction, std_err`, both of the shape of `t`. Memory is that of a call
        of the density.

        **Raises:**

        - `TypeError`: `t` is not real.
        - `ValueError`: the measure is a batch of several.
        """
        return self._mean(Partial(_step), t)

    def _mean(self, kernel: Callable[[Array], Array], t: Any) -> tuple[Array, Array]:
        """The mean over rules of the integral of `kernel(t - node)`, and its error."""
        if self.nodes.ndim != 2:
            raise ValueError(
                "This is a batch of measures, with `nodes` of shape "
                f"{self.nodes.shape}. Take one at a time: `jax.vmap(lambda density: "
                "density(t, width))(densities)`."
            )
        return _mean_over_rules(self, kernel, _real("t", t, self.nodes.dtype))


def _real(name: str, value: Any, dtype: Any) -> Array:
    if not eqx.is_array_like(value) and not isinstance(value, list | tuple):
        kind = f"an object of type {type(value).__name__}"
    elif jnp.iscomplexobj(array := jnp.asarray(value)):
        kind = f"the dtype {array.dtype}"
    else:
        return array.astype(dtype)
    raise TypeError(f"`{name}` must be real. Found {kind}. Pass its real part.")


def _gaussian(width: Scalar, distance: Array) -> Array:
    return jnp.exp(-((distance / width) ** 2) / 2) / ((2 * jnp.pi) ** 0.5 * width)


def _step(distance: Array) -> Array:
    return (distance >= 0).astype(distance.dtype)


@eqx.filter_jit
def _mean_over_rules(
    density: SpectralDensity, kernel: Callable[[Array], Array], t: Real[Array, "*p"]
) -> tuple[Real[Array, "*p"], Real[Array, "*p"]]:
    # Samples are means of one rule each: rules of different probes are independent, while
    # the nodes of one rule are not.
    def moments_at(t):
        values = jnp.sum(density.weights * kernel(t - density.nodes), axis=1)
        moments = Moments.of(values)
        return moments.mean, moments.std_err()

    with standard_promotion():
        mean, std_err = jax.vmap(moments_at)(t.reshape(-1))
    return mean.reshape(t.shape), std_err.reshape(t.shape)
