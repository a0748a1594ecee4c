"""Calls of compiled code."""

from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from .._core.arithmetic import standard_promotion
from .._core.checks import check_flag, check_instance, needing_wide_integers
from .._core.jax_interfaces import Tracer
from .._core.results import RESULTS
from .._core.solution import Solution
from .execution import AbstractExecution
from .programs import programs


class _Answer(Protocol):
    """What a public call returns. `estimated` are its fields that become NaN where the
    call failed and nothing can be raised."""

    estimated: ClassVar[tuple[str, ...]]

    @property
    def result(self) -> Any: ...


_AnswerT = TypeVar("_AnswerT", bound=_Answer)


def call(
    fn: Callable[..., _AnswerT],
    *args: PyTree,
    name: str,
    execution: AbstractExecution,
    throw: bool,
    hint: Callable[[_AnswerT], str] = lambda _: "",
) -> _AnswerT:
    """`fn(*args)`, compiled, in the contexts that all our code is traced in; raises if it
    failed and `throw` says so, with a `hint` for the answer if it is not traced. `fn`
    must be the same object at each call."""
    check_instance("execution", execution, AbstractExecution, "Sharded(mesh)")
    check_flag("throw", throw)
    before = programs.traced
    with needing_wide_integers():
        answer, failed = _compiled(fn, args, name, execution)
    if programs.traced > before and not isinstance(failed, Tracer):
        programs.note(name, args)
    return _raise_if(failed, answer, execution, hint) if throw else answer


@eqx.filter_jit
def _compiled(fn, args, name, execution) -> tuple[Any, Bool[Array, ""]]:
    programs.traced += 1
    with jax.named_scope(name), standard_promotion(), execution.factorising():
        answer = fn(*args)
    return answer, answer.result != RESULTS.successful


def _raise_if(
    failed: Bool[Array, ""],
    answer: _AnswerT,
    execution: AbstractExecution,
    hint: Callable[[_AnswerT], str],
) -> _AnswerT:
    fields = lambda x: [getattr(x, name) for name in x.estimated]  # noqa: E731
    values = fields(answer)
    if isinstance(failed, Tracer):
        if execution.can_raise:
            values = answer.result.error_if(values, failed)
        else:
            values = jax.tree.map(lambda x: jnp.where(failed, jnp.nan, x), values)
    elif jax.device_get(failed):
        details = answer.details if isinstance(answer, Solution) else ""
        parts = RESULTS[answer.result], details, hint(answer)
        message = "\n\n".join(part for part in parts if part)
        # On one device: an error on one of several would leave the others waiting for it.
        # With `EQX_ON_ERROR=nan` it is NaN rather than an error.
        zero = eqx.error_if(jnp.zeros(()), jnp.ones((), bool), message)
        values = jax.tree.map(lambda x: x + zero.astype(x.dtype), values)
    else:
        return answer
    return eqx.tree_at(fields, answer, values)
