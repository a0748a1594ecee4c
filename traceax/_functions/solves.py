r"""Traces of words in an inverse, `tr(A^-1 B_1 A^-1 B_2 ... A^-1 B_p)`, by linear solves.

For a probe z with E[z z*] = I the sample of a word is

    v = x* B_1 y_2,    x = A^-* z,    y_j = A^-1 B_j y_(j+1),    y_(p+1) = z,

so that words share x, and those that end alike share y_j. A solver S is inexact, and
every system `A y = b` is solved twice:

    y' = S(b'),    y = y' + S(b - A y'),

where b' and b are made of earlier solutions of the first and of the second kind. The
sample v' of the first kind differs from v by about its own error, which is far larger
than that of v. So `|v - v'|` bounds the error of v, for any operator, word and solver
that reduces residuals, without a bound of the spectrum; rounding errors count as well.
Where the dual solution y_1 is at hand, the residual of x is corrected for:

    v = x* B_1 y_2 + (z - A* x)* y_1,    with the error  (z - A* x)* A^-1 (b_1 - A y_1).

The derivative, with x_1 = x and x_(j+1) = A^-* B_j* x_j, is

    dv = sum_j (x_j* dB_j y_(j+1) - x_j* dA y_j).

The correction: Pierce and Giles, "Adjoint recovery of superconvergent functionals from
PDE approximations", SIAM Review 42, 2000. Solving twice: Higham, Accuracy and Stability
of Numerical Algorithms, chapter 12 (iterative refinement).
"""

from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .._core.chirp import rotate
from .._core.flat import FlatOperator, freeze
from .._core.quantity import norm_bound
from .._core.results import failure, first_failure, RESULTS
from .._numerics.dense import two_norm
from .._run.execution import Local
from .._run.gradient import AbstractFrame, attach, refuse_derivative
from .inexact_solve import AbstractSolve


# The indices of the operators of a word.
Word = tuple[int, ...]


class Solution(eqx.Module):
    """The solutions of one system of both kinds, and the residual of the better one."""

    first: Inexact[Array, " n"]
    second: Inexact[Array, " n"]
    residual: Inexact[Array, " n"]


class Report(eqx.Module):
    """What is known of all solves for one probe.

    - `result`: the first failure.
    - `steps`: of the solver.
    - `residual`: the largest residual, relative to its right-hand side.
    """

    result: Any
    steps: Int[Array, ""]
    residual: Real[Array, ""]

    @classmethod
    def empty(cls, dtype: jnp.dtype) -> "Report":
        successful: Any = RESULTS.successful
        real = jnp.finfo(dtype).dtype
        return cls(successful, jnp.zeros((), jnp.int32), jnp.zeros((), real))


class Operators(eqx.Module):
    """A and the operators of words, all of one dtype.

    - `flat`: A.
    - `others`: the operators that words name by their indices.
    - `method`: how systems with A are solved.
    """

    flat: FlatOperator
    others: tuple[FlatOperator, ...]
    method: AbstractSolve

    def solve_twice(
        self, first: Array, second: Array, report: Report, *, adjoint: bool = False
    ) -> tuple[Solution, Report]:
        """Solve a system for right-hand sides of both kinds."""
        apply = self.flat.adjoint_mv if adjoint else self.flat.mv
        start, result, steps = self.method(self.flat, first, adjoint=adjoint)
        change, other, more = self.method(
            self.flat, second - apply(start), adjoint=adjoint
        )
        solution = start + change
        residual = second - apply(solution)
        size = two_norm(second)
        relative = two_norm(residual) / jnp.where(size > 0, size, 1)
        # A solver may report success and return anything.
        useless = failure(~(relative < 0.5), RESULTS.breakdown)
        return Solution(start, solution, residual), Report(
            first_failure(report.result, result, other, useless),
            report.steps + steps + more,
            jnp.maximum(report.residual, relative),
        )


class _Frame(AbstractFrame):
    """The frame of the derivative of one word in one operator: A, or that of index
    `position` in the word. Solves that the sample does not need are made here, where a
    derivative is taken.

    - `operators`: those of the word, with derivatives.
    - `left_vector`: x.
    - `rights`: the solutions at hand, by their words.
    """

    operators: Operators
    probe: Inexact[Array, " n"]
    left_vector: Inexact[Array, " n"]
    rights: dict[Word, Inexact[Array, " n"]]
    word: Word = eqx.field(static=True)
    position: int | None = eqx.field(static=True)
    linear: ClassVar[bool] = False
    refusal: ClassVar[str] = (
        "Traces of solves have first derivatives only. Take finite differences of those, "
        "with the same key."
    )

    def _lefts(self) -> list[Array]:
        frozen, lefts = freeze(self.operators), [self.left_vector]
        for index in self.word[:-1]:
            image = frozen.others[index].adjoint_mv(lefts[-1])
            lefts.append(frozen.method(frozen.flat, image, adjoint=True)[0])
        return lefts

    def _solution(self, word: Word) -> Array:
        """`y_j` for the rest of a word from j on."""
        if word in self.rights:
            return self.rights[word]
        frozen, image = freeze(self.operators), self.probe
        if word:
            inner = self._solution(word[1:]) if word[1:] else self.probe
            image = frozen.others[word[0]].mv(inner)
        return frozen.method(frozen.flat, image, adjoint=False)[0]

    @property
    def right(self) -> Inexact[Array, "n p"]:  # pyright: ignore
        if self.position is not None:
            rest = self.word[self.position + 1 :]
            return (self._solution(rest) if rest else self.probe)[:, None]
        rests = [self.word[j:] for j in range(max(len(self.word), 1))]
        return jnp.stack([self._solution(rest) for rest in rests], axis=1)

    def left(self, operator: FlatOperator) -> Inexact[Array, "n p"]:
        columns = jnp.stack(self._lefts(), axis=1)
        # The sign belongs to the derivative of the inverse.
        j = self.position
        columns = -columns if j is None else columns[:, j, None]
        return refuse_derivative(columns, self.operators, message=self.refusal)


class Sample(eqx.Module):
    """The samples of all words for one probe.

    - `values`: the samples, with their derivatives.
    - `errors`: by how much solves may have made them wrong.
    - `sizes`, `marks`: as those of `AbstractQuantity`.
    - `report`: of the solves.
    """

    values: Inexact[Array, " q"]
    errors: Real[Array, " q"]
    sizes: Real[Array, " q"]
    marks: Inexact[Array, " q"]
    report: Report


def sample_words(
    operators: Operators, words: tuple[Word, ...], probe: Inexact[Array, " n"]
) -> Sample:
    """The samples of all words for one probe."""
    frozen = freeze(operators)
    probe = probe.astype(frozen.flat.dtype)
    x, solutions, report = _solutions(frozen, words, probe)
    rights = {word: solution.second for word, solution in solutions.items()}
    rows = []
    for word in words:
        first, second = _right_sides(frozen, solutions, word, probe)
        before, value = dot(x.first, first), dot(x.second, second)
        if word in solutions:
            dual = solutions[word]
            residual = probe - frozen.flat.adjoint_mv(x.first)
            before += dot(residual, dual.first)
            value += dot(x.residual, dual.second)
        error, size = jnp.abs(value - before), norm_bound(jnp.abs(x.second * second))
        mark = dot(rotate(x.second), second)
        for position in (None, *range(len(word))):
            varied = operators.flat
            if position is not None:
                varied = operators.others[word[position]]
            frame = _Frame(  # pyright: ignore[reportCallIssue]
                operators=operators,
                probe=probe,
                left_vector=x.second,
                rights=rights,
                word=word,
                position=position,
            )
            value = attach(varied, value, frame, execution=Local())
        rows.append((value, error, size, mark))
    values, errors, sizes, marks = map(jnp.stack, zip(*rows, strict=True))
    return Sample(values, errors, sizes, marks, report)


def _right_sides(
    frozen: Operators, solutions: dict[Word, Solution], word: Word, probe: Array
) -> tuple[Array, Array]:
    """The right-hand sides of both kinds of the system for `y_1` of a word."""
    if not word:
        return probe, probe
    index, *rest = word
    mv = frozen.others[index].mv
    if not rest:
        image = mv(probe)
        return image, image
    inner = solutions[tuple(rest)]
    return mv(inner.first), mv(inner.second)


def _solutions(
    frozen: Operators, words: tuple[Word, ...], probe: Inexact[Array, " n"]
) -> tuple[Solution, dict[Word, Solution], Report]:
    """x, the y_j by the words that they are for, and a report."""
    report = Report.empty(frozen.flat.dtype)
    x, report = frozen.solve_twice(probe, probe, report, adjoint=True)
    solutions: dict[Word, Solution] = {}
    for suffix in suffixes(words):
        sides = _right_sides(frozen, solutions, suffix, probe)
        solutions[suffix], report = frozen.solve_twice(*sides, report)
    if frozen.flat.hermitian:
        solutions[()] = x
    return x, solutions, report


def suffixes(words: tuple[Word, ...]) -> list[Word]:
    """The words whose systems the samples need, short ones first."""
    found = {word[j:] for word in words for j in range(1, len(word))}
    return sorted(found, key=lambda word: (len(word), word))


def dot(x: Inexact[Array, " n"], y: Inexact[Array, " n"]) -> Inexact[Array, ""]:
    return jnp.vdot(x, y, precision="highest")
