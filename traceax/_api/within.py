"""The argument `k=traceax.Matvecs(total)` of traces of functions and log-determinants."""

from typing import Any

from .._functions.slq import SLQEstimator
from .._functions.within import WithinMatvecs
from .._preconditioners.auto import AutoPreconditioner
from .._run.matvecs import Matvecs, ROUND
from .._run.steps import AdaptiveSteps


def within_matvecs(
    k: Matvecs,
    estimator: Any,
    num_steps: Any,
    preconditioning: Any = None,
    **others: Any,
) -> tuple[WithinMatvecs, int]:
    """The estimator that keeps to the total, and the largest number of its steps, from
    arguments of a call. `others` may not be used beside a total."""
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise ValueError(
            f"`k=traceax.Matvecs(...)` and `{given[0]}` exclude each other. Found both. "
            f"Leave `{given[0]}` out, or pass a number or `traceax.Adaptive()` for `k`."
        )
    plain = isinstance(estimator, SLQEstimator) and estimator.sampler.num_strata == 1
    if not plain:
        raise ValueError(
            "`k=traceax.Matvecs(...)` is for `traceax.SLQEstimator` with independent "
            f"probes. Found {estimator!r}. Leave `estimator` out, or pass a number for "
            "`k`."
        )
    if not isinstance(num_steps, AdaptiveSteps):
        raise ValueError(
            "`num_steps` is chosen by the call where `k=traceax.Matvecs(...)`. Found "
            f"{num_steps!r}. Leave it out, or pass a number for `k`."
        )
    if not isinstance(preconditioning, AutoPreconditioner | None):
        raise ValueError(
            "`preconditioner` is made by the call where `k=traceax.Matvecs(...)`, so "
            f"that its matvecs count. Found `{type(preconditioning).__name__}`. Pass "
            "`traceax.AutoPreconditioner()`, or leave it out."
        )
    most = max(1, min(num_steps.most, k.total // ROUND))
    fields = {"estimator": estimator, "budget": k, "preconditioning": preconditioning}
    return WithinMatvecs(**fields), most
