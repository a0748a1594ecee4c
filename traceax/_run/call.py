"""The one way from a public call into a compiled program, and out of it with an error."""

from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from .._core.arithmetic import standard_promotion
from .._core.checks import check_flag, check_instance, explain_index_overflow
from .._core.jax_interfaces import Tracer
from .._core.results import RESULTS
from .._core.solution import Solution
from .._operators.door import EnteredOperator
from .execution import AbstractExecution
from .programs import programs


class _Answer(Protocol):
    """The answer of a public call. Its fields `estimated` become NaN where the call
    failed and cannot raise."""

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
    """Run `fn(*args)` as a compiled program, traced in the contexts that all our code
    needs. `fn` must be the same object at each call, since programs are cached by it. For
    an `EnteredOperator` it is given the pair that `open` returns.

    If the answer is a failure and `throw` is True, an error is raised. Outside of other
    programs its message includes `hint(answer)`."""
    check_instance("execution", execution, AbstractExecution, "Sharded(mesh)")
    check_flag("throw", throw)
    num_traced = programs.traced
    with explain_index_overflow():
        answer, failed = _compiled(fn, args, name, execution)
    # Inside a user's `jit` the call belongs to a program that is compiled once.
    if programs.traced > num_traced and not isinstance(failed, Tracer):
        programs.note(name, args)
    if not throw:
        return answer
    return _raise_if(failed, answer, execution=execution, hint=hint)


@eqx.filter_jit
def _compiled(fn, args, name, execution) -> tuple[Any, Bool[Array, ""]]:
    # This line runs when a program is traced, and not when it is called.
    programs.traced += 1
    with jax.named_scope(name), standard_promotion(), execution.factorising():
        answer = fn(*(x.open() if isinstance(x, EnteredOperator) else x for x in args))
    return answer, answer.result != RESULTS.successful


def _raise_if(
    failed: Bool[Array, ""],
    answer: _AnswerT,
    *,
    execution: AbstractExecution,
    hint: Callable[[_AnswerT], str],
) -> _AnswerT:
    """`answer`, if it did not fail. A failure raises an error, or becomes NaN in a
    program that must not raise."""
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
        # Bad input, although only a matvec shows it.
        if jax.device_get(answer.result == RESULTS.not_null_space).any():
            raise ValueError(message)
        # The error is raised by a program on one device. An error on one of several would
        # leave the others waiting at their next collective. With `EQX_ON_ERROR=nan` the
        # scalar is NaN, and so are the values.
        zero = eqx.error_if(jnp.zeros(()), jnp.ones((), bool), message)
        values = jax.tree.map(lambda x: x + zero.astype(x.dtype), values)
    else:
        return answer
    return eqx.tree_at(fields, answer, values)
