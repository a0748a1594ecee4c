"""Estimates of several functions of one operator, from the same Krylov runs.

A Krylov space does not depend on the function. So one run of each probe gives a quadratic
form for every function: its value, its bracket and its derivative are those that the
function has alone. The forms of one probe are samples with a joint distribution, of which
the covariance of the estimates follows.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Real

from .._core.flat import FlatOperator
from .._core.quantity import Trace
from .._core.results import first_failure
from .._core.solution import Estimate
from .._quadrature.function_tree import FunctionTree
from .._quadrature.functions import AbstractSpectralFunction
from .._run.budget import Budget
from .._run.gradient import attach_derivative
from .._run.gradient_steps import GradientTarget
from .._run.steps import Steps
from .._run.stream import Streamed
from .samples import estimate_of_forms


class Traces(Trace):
    """The traces of several functions, an array that users see as a PyTree.

    - `treedef`: its structure.
    """

    treedef: Any = eqx.field(static=True, kw_only=True)

    def arrange(self, entries: Array) -> PyTree[Array]:
        return jax.tree.unflatten(self.treedef, list(entries))


def quantity_of(function: AbstractSpectralFunction | FunctionTree) -> Trace:
    """The quantity that users see, one trace or several."""
    if isinstance(function, FunctionTree):
        return Traces(treedef=function.treedef)
    return Trace()


# Entries of `extra` that all functions share.
_SHARED = ("ritz_values", "num_steps", "history", "freedom")


def estimate_of_members(
    streamed: Streamed,
    function: AbstractSpectralFunction | FunctionTree,
    operator: FlatOperator,
    k: int | Budget,
    steps: Steps,
    excess: Callable[..., Real[Array, ""]],
    target: GradientTarget,
    extremes: Real[Array, "2"],
) -> Estimate:
    """`estimate_of_forms` of one function; of several, one estimate of all."""
    settings: dict[str, Any] = {"operator": operator, "k": k, "steps": steps}
    settings |= {"target": target, "extremes": extremes}
    if not isinstance(function, FunctionTree):
        return estimate_of_forms(
            streamed, function=function, excess=excess, live=streamed.mean, **settings
        )
    moments, (errors, extreme, residuals, strata) = streamed.summary[0], streamed.others
    values = moments.mean
    estimates = []
    for i, member in enumerate(function.members):
        constant = values[i]
        one = dataclasses.replace(
            streamed,
            samples=streamed.samples[:, i],  # pyright: ignore[reportOptionalSubscript]
            others=(errors[:, i], extreme, residuals[:, i], strata),
            summary=(moments.parts[i], streamed.summary[1]),
        )
        estimates.append(
            estimate_of_forms(
                one,
                function=member,
                excess=lambda *form: excess(*form, values=values),
                # The derivative of all values is attached at once.
                live=lambda constant=constant: constant,
                **settings,
            )
        )
    joint = join_estimates(function, estimates)
    skewness = jnp.stack([part.forms.skewness for part in moments.parts])
    return dataclasses.replace(
        joint,
        value=attach_derivative(joint.value, streamed.mean),
        samples=streamed.samples,
        skewness=skewness,
    )


def join_estimates(function: FunctionTree, estimates: Sequence[Estimate]) -> Estimate:
    """One estimate of the values of all functions, an array of shape `(f,)`, from one of
    each. Entries of `extra` that differ between functions become PyTrees."""
    first = estimates[0]
    extra = {
        name: x
        if name in _SHARED
        else function.arrange([each.extra[name] for each in estimates])
        for name, x in first.extra.items()
        if name != "skewness"
    }
    if "freedom" in extra:
        freedoms = [each.extra["freedom"] for each in estimates]
        extra["freedom"] = jnp.min(jnp.stack(freedoms))

    def stack(name, axis=0):
        parts = [getattr(each, name) for each in estimates]
        return None if parts[0] is None else jnp.stack(parts, axis=axis)

    return dataclasses.replace(
        first,
        value=stack("value"),
        std_err=stack("std_err"),
        samples=stack("samples", axis=1),
        magnitude=jnp.stack([jnp.asarray(each.magnitude) for each in estimates]),
        unresolved=jnp.stack([jnp.asarray(each.unresolved) for each in estimates]),
        result=first_failure(*(each.result for each in estimates)),
        extra=extra,
        bounds=stack("bounds", axis=-1),
        proven_bounds=stack("proven_bounds", axis=-1),
    )


def join_members(
    function: AbstractSpectralFunction | FunctionTree, estimates: Sequence[Estimate]
) -> Estimate:
    """The estimate of a function, or of all functions of a tree."""
    if not isinstance(function, FunctionTree):
        return estimates[0]
    return join_estimates(function, estimates)
