from typing import Any

import equinox as eqx

from .._estimators.base import AbstractEstimator


class OperatorReport(eqx.Module):
    """What [`traceax.check_operator`][] has found. `print` shows it in words.

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
    - `problems`: what is wrong, in words; empty if nothing is.
    - `findings`: what else was seen, in words.
    - `num_matvecs`: the number of products that were made.

    The following are `None` where an earlier problem leaves nothing to be tested:

    - `as_declared`: whether products have the shapes and dtypes of `out_structure()`.
    - `finite`: whether they are finite.
    - `deterministic`: whether the same vector gives the same product again.
    - `vectorised`: whether products are the same under `jax.vmap`.
    - `linear`: whether the operator is linear.
    - `hermitian`: whether it is symmetric or, if complex, Hermitian.
    - `adjoint`: whether JAX can make products with the adjoint.
    - `ritz_values`: the smallest and the largest one, if it is Hermitian.
    - `semidefinite`: whether these have one sign, up to rounding.
    - `tag`: the strongest tag that fits what was seen.
    - `estimator`: that of the trace by default, for the operator with this tag.
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
        found = {0: "no problem", 1: "1 problem"}.get(count, f"{count} problems")
        lines = [f"{self.title}: {found} in {self.num_matvecs} products."]
        lines += [f"Problem: {text}" for text in self.problems]
        return "\n- ".join([*lines, *self.findings])


class Notes:
    """What has been found so far: fields of a report, and lines in words. Deviations up
    to `allowed` are taken for errors of products, whose dtype has the epsilon `eps`."""

    def __init__(self):
        self.fields: dict[str, Any] = {}
        self.problems: list[str] = []
        self.findings: list[str] = []
        self.eps = self.allowed = 0.0

    def test(self, name: str, passed: bool, finding: str, problem: str) -> bool:
        """Note a field, and one of two lines."""
        self.fields[name] = passed
        if passed:
            self.findings.append(finding)
        else:
            self.problems.append(problem)
        return passed

    def report(self, title: str) -> OperatorReport:
        lines = tuple(self.problems), tuple(self.findings)
        return OperatorReport(title, *lines, **self.fields)
