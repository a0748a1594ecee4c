"""The parts of a solution that is a function of the scalars of another one.

The samples of such a solution are `f(T) + sum_j df/dT_j (t_ij - T_j)`, with the samples
t_ij of the scalars T_j: their mean is its value. Quadrature errors d_j of the scalars add
up to `sum_j |df/dT_j| d_j`.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Real

from .arithmetic import standard_promotion
from .covariance import (
    Correlation,
    covariance_of,
    errors_of_parts,
    join_parts,
    real_parts,
)
from .jax_interfaces import Jaxpr, Literal
from .moments import Moments, sampling_quantiles
from .transform import propagate


class Scalars(eqx.Module):
    """The scalars of a solution as real numbers, of which complex scalars have two (see
    `covariance.py`), with the samples that they have in common.

    - `value`, `std_err`: the scalars and their error bars, shape `(p,)`.
    - `rounding`: the part of their error bars that is rounding.
    - `correlation`: of their other errors.
    - `samples`: shape `(m, p)`, infinite where no sample was made; None if there are
        none.
    """

    value: Real[Array, " p"]
    std_err: Real[Array, " p"]
    rounding: Real[Array, " p"]
    correlation: Correlation
    samples: Real[Array, "m p"] | None

    @classmethod
    def of(cls, value: PyTree, std_err: PyTree, stats: dict[str, Any]) -> "Scalars":
        """The scalars among the leaves of `value`, which have one dtype. Raise if there
        is none, or if they are several whose covariance is not known."""
        if not _scalars(value):
            shapes = [jnp.shape(x) for x in jax.tree.leaves(value)]
            raise ValueError(
                "`value` must have a scalar. Found arrays of shape "
                f"{shapes}, whose entries have error bars but no covariance. Estimate "
                "scalars as well: `traceax.estimate`."
            )
        numbers, errors = jnp.stack(_scalars(value)), jnp.stack(_scalars(std_err))
        parts, samples = real_parts(numbers), stats.get("joint_samples")
        if samples is None and "samples" in stats:
            samples = stats["samples"][:, None]
        if samples is None:
            if len(numbers) > 1:
                raise ValueError(
                    "The covariance of several scalars follows from their samples, which "
                    f"this solution does not have. Found {len(numbers)} scalars. Use one "
                    "of them, or `traceax.estimate`."
                )
            errors = jnp.resize(errors, parts.shape)
            matrix = jnp.eye(parts.size, dtype=parts.dtype)
            alone = Correlation(matrix, None, of_samples=False)
            return cls(parts, errors, jnp.zeros_like(errors), alone, None)
        made = jnp.isfinite(samples[:, 0])
        rounding = jnp.zeros_like(errors)
        if "rounding_std_err" in stats:
            rounding = jnp.stack(_scalars(stats["rounding_std_err"]))
        errors, rounding = (errors_of_parts(x, samples, made) for x in (errors, rounding))
        correlation = Correlation.of(samples, made, stats.get("correlation"))
        samples = jnp.where(made[:, None], real_parts(samples), jnp.inf)
        return cls(parts, errors, rounding, correlation, samples)

    @property
    def covariance(self) -> Real[Array, "p p"]:
        matrix, finite = self.correlation.matrix, jnp.isfinite(self.std_err)
        known = (self.std_err > 0) & finite
        share = jnp.where(known, self.rounding / jnp.where(known, self.std_err, 1), 0)
        common = jnp.sqrt(jnp.maximum((1 - share) * (1 + share), 0))
        mixed = matrix * common * common[:, None]
        matrix = jnp.where(jnp.eye(len(mixed), dtype=bool), 1, mixed)
        return covariance_of(matrix, self.std_err)


def _scalars(tree: PyTree[Array]) -> list[Array]:
    return [x for x in jax.tree.leaves(tree) if jnp.ndim(x) == 0]


def check_function(fn: Callable[[PyTree], PyTree], value: PyTree) -> None:
    """Raise if the function uses an array of the value, whose entries have error bars but
    no covariance, or does not return scalars."""
    code, out = jax.make_jaxpr(fn, return_shape=True)(value)
    pairs = zip(jax.tree.leaves(value), _used(code.jaxpr), strict=True)
    arrays = [x.shape for x, is_used in pairs if is_used and x.ndim > 0]
    if arrays:
        raise ValueError(
            "`fn` must be a function of the scalars of `value`: the covariance of the "
            f"entries of an array is not known. Found that it uses arrays of shape "
            f"{arrays}. Leave them out."
        )
    kinds = [(x.shape, str(x.dtype)) for x in jax.tree.leaves(out)]
    inexact = all(jnp.issubdtype(dtype, jnp.inexact) for _, dtype in kinds)
    if len(set(kinds)) != 1 or kinds[0][0] != () or not inexact:
        raise ValueError(
            "`fn` must return a floating-point scalar, or a PyTree of such scalars of "
            f"one dtype. Found leaves of shapes and dtypes {kinds}."
        )


def _used(code: Jaxpr) -> list[bool]:
    """For each argument, whether a result depends on it."""
    used = {x for x in code.outvars if not isinstance(x, Literal)}
    for eqn in reversed(code.eqns):
        if used.intersection(eqn.outvars):
            used |= {x for x in eqn.invars if not isinstance(x, Literal)}
    return [x in used for x in code.invars]


@eqx.filter_jit
def transformed(
    fn: Callable[[PyTree], PyTree], value: PyTree, std_err: PyTree, stats: dict[str, Any]
) -> dict[str, Any]:
    """The value of `fn(value)`, its `std_err` and `stats`, and whether a critical number
    of the function may be zero (`near_zero`)."""
    with standard_promotion(), jax.default_matmul_precision("highest"):
        return _transformed(fn, value, std_err, stats)


def _transformed(fn, value, std_err, stats) -> dict[str, Any]:
    results, (leaves, treedef) = fn(value), jax.tree.flatten(value)
    leaves, std_err, stats = jax.lax.stop_gradient((leaves, std_err, stats))
    scalars, dtype = Scalars.of(leaves, std_err, stats), leaves[0].dtype

    def evaluate(parts):
        numbers = iter(join_parts(parts, dtype))
        filled = [next(numbers) if x.ndim == 0 else x for x in leaves]
        out = fn(jax.tree.unflatten(treedef, filled))
        return real_parts(jnp.stack(jax.tree.leaves(out)))

    def arrange(numbers):
        return jax.tree.unflatten(jax.tree.structure(results), list(numbers))

    flat = jax.lax.stop_gradient(jnp.stack(jax.tree.leaves(results)))
    confidence = jnp.asarray(0.95, scalars.value.dtype)
    counts = {x: stats[x] for x in ("num_samples", "freedom") if x in stats}
    quantile = sampling_quantiles(confidence, flat[0], counts)
    reach = scalars.std_err
    if "bounds" in stats:
        distance, bars = _errors_of_bounds(stats["bounds"], scalars)
        reach = jnp.maximum(reach, bars + distance / quantile)
    settings = {"quantile": quantile, "reach": reach}
    settings |= {"correlation": scalars.correlation, "rounding": scalars.rounding}
    whole = propagate(evaluate, scalars.value, scalars.std_err, **settings)
    sizes = jnp.where(jnp.isfinite(scalars.std_err), scalars.std_err, 0)
    slopes = jnp.where(
        sizes > 0,
        whole.slopes / jnp.where(sizes > 0, sizes, 1),
        jax.jacfwd(evaluate)(scalars.value),
    )
    error = arrange(_magnitude(whole.std_err, flat.dtype))
    removed = ("samples", "joint_samples", "correlation", "skewness")
    removed += ("bounds", "proven_bounds", "bracket", "sample_brackets")
    removed += ("rounding_std_err",)
    new = {name: x for name, x in stats.items() if name not in removed}
    new["std.err"] = error
    if scalars.samples is not None:
        made = jnp.isfinite(scalars.samples[:, :1])
        moves = jnp.where(made, scalars.samples - scalars.value, 0)
        samples = join_parts(moves @ slopes.T, flat.dtype) + flat
        samples = jnp.where(made, samples, jnp.inf)
        skewness = Moments.of(samples, made[:, 0]).skewness
        new["skewness"] = arrange(skewness)
        if isinstance(results, jax.Array):
            new["samples"] = samples[:, 0]
            if "freedom" not in stats:
                del new["skewness"]
        else:
            new |= {"joint_samples": samples, "correlation": whole.correlation}
            # 0 times an infinite error is 0.
            moves = jnp.where(slopes == 0, 0, jnp.abs(slopes) * scalars.rounding)
            rounding = _magnitude(jnp.linalg.norm(moves, axis=1), flat.dtype)
            new["rounding_std_err"] = arrange(rounding)
    for name in ("bounds", "proven_bounds"):
        if name in stats:
            distance, bars = _errors_of_bounds(stats[name], scalars)
            sampling = propagate(evaluate, scalars.value, bars, **settings).std_err
            # Not infinity times 0.
            terms = jnp.abs(slopes) * jnp.where(slopes == 0, 0, distance)
            apart = _magnitude(jnp.sum(terms, axis=1), flat.dtype)
            sampling = _magnitude(sampling, flat.dtype)
            ends = jnp.stack([flat.real - apart, flat.real + apart])
            both = jnp.stack([ends, jnp.broadcast_to(sampling, ends.shape)], axis=1)
            new[name] = arrange(jnp.moveaxis(both, -1, 0))
    return {
        "value": results,
        "std_err": error,
        "stats": new,
        "near_zero": whole.near_zero,
    }


def _magnitude(parts: Real[Array, " p"], dtype: jnp.dtype) -> Real[Array, " o"]:
    """The errors of numbers of this dtype from those of their parts."""
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return parts
    return jnp.hypot(*jnp.split(parts, 2))


def _errors_of_bounds(
    bounds: PyTree[Array], scalars: Scalars
) -> tuple[Real[Array, " p"], Real[Array, " p"]]:
    """The larger distance of each scalar from its bounds, and their larger standard
    error."""
    pairs = jnp.stack([x for x in jax.tree.leaves(bounds) if x.ndim == 2])
    ends, bars = pairs[:, :, 0], jnp.max(pairs[:, :, 1], axis=1)
    middle = scalars.value[: len(ends), None]
    distance = jnp.where(ends == middle, 0, jnp.abs(ends - middle))
    repeat = lambda x: jnp.resize(x, scalars.value.shape)  # noqa: E731
    return repeat(jnp.max(distance, axis=1)), repeat(bars)
