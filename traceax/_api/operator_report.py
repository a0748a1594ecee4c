"""What `check_operator` reports."""

from typing import Any

import equinox as eqx

from .._estimators.base import AbstractEstimator


class OperatorReport(eqx.Module):
    """The result of [`traceax.check_operator`][]. `print` shows it in words.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        operator = lx.MatrixLinearOperator(jnp.eye(100))
        report = tx.check_operator(operator, key=jax.random.key(0))
        print(report.successful, report.hermitian, report.ritz_values)
        ```

    **Attributes:**

    - `title`: the class, size and dtype of the operator.
    - `problems`: a sentence for each problem; empty if there is none.
    - `findings`: a sentence for each other observation.
    - `num_matvecs`: the number of matvecs that were made.

    The following are `None` where an earlier problem makes the test meaningless:

    - `as_declared`: whether matvecs have the shapes and dtypes of `out_structure()`.
    - `finite`: whether they are finite.
    - `deterministic`: whether the same vector gives the same result again.
    - `vectorised`: whether matvecs are the same under `jax.vmap`.
    - `linear`: whether the operator is linear.
    - `hermitian`: whether it is symmetric or, if complex, Hermitian.
    - `adjoint`: whether JAX can make matvecs with the adjoint.
    - `ritz_values`: the smallest and the largest Ritz value, if it is Hermitian.
    - `semidefinite`: whether these have one sign, up to rounding.
    - `tag`: the strongest tag that fits the observations.
    - `estimator`: the default estimator of the trace, for the operator with this tag.
    """

    title: str
    problems: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    num_matvecs: int = 0
    as_declared: bool | None = None
    finite: bool | None = None
    deterministic: bool | None = None
    vectorised: bool | None = None
    linear: bool | None = None
    hermitian: bool | None = None
    adjoint: bool | None = None
    ritz_values: tuple[float, float] | None = None
    semidefinite: bool | None = None
    tag: Any = None
    estimator: AbstractEstimator | None = None

    @property
    def successful(self) -> bool:
        """Whether no problem was found."""
        return not self.problems

    def __repr__(self) -> str:
        count = len(self.problems)
        summary = {0: "no problem", 1: "1 problem"}.get(count, f"{count} problems")
        lines = [f"{self.title}: {summary} in {self.num_matvecs} matvecs."]
        lines += [f"Problem: {text}" for text in self.problems]
        return "\n- ".join([*lines, *self.findings])


class Notes:
    """The fields and the sentences of a report that is being written. Deviations up to
    `allowed` count as errors of the matvecs, whose dtype has the epsilon `eps`."""

    def __init__(self):
        self.fields: dict[str, Any] = {}
        self.problems: list[str] = []
        self.findings: list[str] = []
        self.eps = self.allowed = 0.0

    def test(self, name: str, passed: bool, finding: str, problem: str) -> bool:
        """Note whether a test passed, with the `finding` if it did, and else with the
        `problem`."""
        self.fields[name] = passed
        if passed:
            self.findings.append(finding)
        else:
            self.problems.append(problem)
        return passed

    def report(self, title: str) -> OperatorReport:
        return OperatorReport(
            title=title,
            problems=tuple(self.problems),
            findings=tuple(self.findings),
            **self.fields,
        )
