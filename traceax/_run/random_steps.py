r"""A random number of Krylov steps, without the bias of a fixed one.

With q_s the Gauss value of a probe after s steps of one run, and a random number N of
steps,

    X = q_s0 + sum_(s0 < s <= N) (q_s - q_(s-1)) / r^(s - s0),    P(N >= s) = r^(s - s0).

The term of s is in the sum with the probability by which it is divided, so the mean of X
over N is the limit of the q_s, the quadratic form itself. This is the coupled sum
estimator of Rhee and Glynn, Operations Research 63, 2015, which Potapczynski, Wu,
Biderman, Pleiss and Cunningham, ICML 2021, take for Gaussian processes. In the code s0 is
`start`, and r is `ratio`.

The errors e_s of the Gauss rules fall like rho^(2 s), with the condition number kappa and
rho = (sqrt(kappa) - 1) / (sqrt(kappa) + 1). So

    Var(X | z) = sum_(s > s0) (e_(s-1)^2 - e_s^2) / r^(s - s0) - e_s0^2
               = e_s0^2 (1 - r) / (r - rho^4),

which is finite for r > rho^4. N has the mean s0 + r / (1 - r).
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Int, PRNGKeyArray, Real, Scalar

from .._core.checks import check_positive, concrete_number, real_scalar
from .._core.threefry import fast_key, fold_in


# Where `max_steps` is left out: as for `AdaptiveSteps`, or so many times `start`.
_MAX_STEPS, _MAX_STEPS_OVER_START = 128, 2
# The memory of a Krylov basis of long vectors is bounded as for `AdaptiveSteps`.
_MAX_BASIS_ENTRIES = 2**28

# The index that turns the key of a call into that of the numbers of steps. Probes have
# the indices 0 to k - 1, and those of preconditioners begin at 2^30.
_STEPS_INDEX = 3 * 2**28
# No number of steps is larger, so that they are integers of 32 bits.
_MOST = 2**24


class RandomSteps(eqx.Module):
    r"""A random number of Krylov steps, for an estimate without quadrature error: pass it
    as `num_steps` to [`traceax.logdet`][], [`traceax.trace_of_function`][] or
    [`traceax.trace_difference`][].

    Each probe makes N steps of one run, $P(N \ge s) = r^{s - s_0}$, and gives

    $$X = q_{s_0} + \sum_{s_0 < s \le N} \frac{q_s - q_{s-1}}{r^{s - s_0}},$$

    with the Gauss values $q_s$ after s steps. The mean of X is the quadratic form itself,
    so the value is unbiased, and `std_err` is its whole error. Samplers that take a
    log-density and its gradient need that: see [MCMC](../how_to/mcmc.md). For all else a
    number of steps, or [`traceax.AdaptiveSteps`][], has a smaller error.

    For a condition number $\kappa$ the variance of X is finite where $r > \rho^4$,
    $\rho = (\sqrt\kappa - 1) / (\sqrt\kappa + 1)$, and that of the derivative where
    $r > \rho^2$. N is $s_0 + r / (1 - r)$ in the mean; by default
    $r / (1 - r) \approx \sqrt\kappa / 3$. So a condition number above 1000 calls for a
    preconditioner first.

    It needs [`traceax.SLQEstimator`][] with [`traceax.Lanczos`][] or
    [`traceax.GolubKahan`][]. Cost: N matvecs for each probe. A block of probes makes as
    many products as its largest N, so where products are expensive pass
    `execution=traceax.Local(block_size=1)`. Each step from `start` on solves an
    eigenvalue problem with `max_steps**3` operations. Memory: `max_steps` vectors of
    length n for each probe of a block.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        matrix = jnp.diag(jnp.linspace(1.0, 100.0, 400))
        operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        steps = tx.RandomSteps(start=15)
        solution = tx.logdet(operator, k=20, num_steps=steps, key=jax.random.key(0))
        print(solution.value, "+-", solution.std_err, solution.stats["num_steps"])
        ```

    `stats["num_steps"]` is the mean of N, and `stats["ratio"]` is r. The bounds and
    brackets of other calls shrink to the value.

    **Attributes:**

    - `start`: $s_0$, the smallest number of steps, a Python integer of 1 or more.
    - `ratio`: r, a number between 0 and 1, which may be traced; or `None`. Then one more
        run, from a probe of its own, finds $\kappa$, and $r = \rho^{3/2}$. It needs a
        function with brackets: see [`traceax.AbstractSpectralFunction`][].
    - `max_steps`: the largest number of steps, a Python integer; a larger number than n
        counts as n. The default is 128 or, if larger, twice `start`; for more than two
        million rows it is smaller. A run that would go on after `max_steps`, and has not
        converged, would bias the value. The result is then `RESULTS.too_few_steps`. So it
        is, in all calls, where this has a probability above 0.1% for a probe and the
        `ratio` that was chosen, or where an eigenvalue may be hidden from the runs. With
        a `ratio` of at most $\rho^4$ for the Ritz values that were seen, the result is
        `RESULTS.infinite_variance`.

    ??? cite

        ```bibtex
        @article{rhee2015unbiased,
            author  = {Rhee, Chang-han and Glynn, Peter W.},
            title   = {Unbiased Estimation with Square Root Convergence for {SDE} Models},
            journal = {Operations Research},
            volume  = {63},
            number  = {5},
            pages   = {1026--1043},
            year    = {2015},
        }

        @inproceedings{potapczynski2021bias,
            author    = {Potapczynski, Andres and Wu, Luhuan and Biderman, Dan and Pleiss,
                         Geoff and Cunningham, John P.},
            title     = {Bias-Free Scalable {Gaussian} Processes via Randomized
                         Truncations},
            booktitle = {International Conference on Machine Learning},
            year      = {2021},
        }
        ```
    """

    start: int = eqx.field(static=True)
    ratio: Scalar | None
    max_steps: int | None = eqx.field(static=True)

    def __init__(
        self,
        start: int,
        ratio: Scalar | float | None = None,
        max_steps: int | None = None,
    ):
        """**Arguments:**

        - `start`: as above.
        - `ratio`: default is `None`, as above.
        - `max_steps`: default is `None`, as above.

        **Raises:**

        `TypeError` or `ValueError` if `start` or `max_steps` is not a Python integer of 1
        or more, if `max_steps` is below `start`, or if `ratio` is not a real scalar
        between 0 and 1.
        """
        self.start = check_positive("start", start)
        if max_steps is not None:
            max_steps = check_positive("max_steps", max_steps)
            if max_steps < self.start:
                raise ValueError(
                    f"`max_steps` must be at least `start`, {self.start}. Found "
                    f"{max_steps}."
                )
        if ratio is not None:
            # An array, so that one program serves all ratios.
            ratio = real_scalar("ratio", ratio)
            number = concrete_number(ratio)
            if number is not None and not 0 < number < 1:
                raise ValueError(
                    f"`ratio` must be between 0 and 1. Found {number}. Leave it out, and "
                    "it follows from the condition number."
                )
        self.ratio, self.max_steps = ratio, max_steps

    @property
    def most(self) -> int:
        """`max_steps`, after `for_size` has set it."""
        assert self.max_steps is not None
        return self.max_steps

    def for_size(self, n: int) -> "RandomSteps":
        """The same for an operator of n rows, with a `max_steps`."""
        start, limit = min(self.start, n), self.max_steps
        if limit is None:
            limit = max(_MAX_STEPS, _MAX_STEPS_OVER_START * start)
            limit = max(start, min(limit, max(_MAX_STEPS // 2, _MAX_BASIS_ENTRIES // n)))
        return RandomSteps(start, self.ratio, min(limit, n))


def refuse_random_steps(num_steps: Any) -> Any:
    """Return the argument, or raise a `ValueError` for `RandomSteps`, where they are not
    taken."""
    if isinstance(num_steps, RandomSteps):
        raise ValueError(
            "`num_steps=traceax.RandomSteps(...)` is for `traceax.logdet`, "
            "`traceax.trace_of_function` and `traceax.trace_difference` of one function, "
            "with `traceax.SLQEstimator` and without `control`. Found another call, "
            "estimator or argument. Pass a number, or `traceax.AdaptiveSteps()`."
        )
    return num_steps


def draw_steps(
    key: PRNGKeyArray, index: Int[Array, ""], start: int, ratio: Real[Array, ""]
) -> Int[Array, ""]:
    """N of the probe with this index, independent of all probes and of the others."""
    key = fold_in(fold_in(key, jnp.asarray(_STEPS_INDEX)), index)
    dtype = jax.dtypes.canonicalize_dtype(float)
    # From u in (0, 1], N - s0 >= j is u <= r^j. As many digits as there are.
    uniform = 1 - jr.uniform(fast_key(key), (), dtype)
    ends = float(jnp.finfo(dtype).tiny), 1 - float(jnp.finfo(dtype).eps)
    rate = -jnp.log(jnp.clip(ratio.astype(dtype), *ends))
    further = jnp.minimum(-jnp.log(uniform) / rate, _MOST)
    return start + jnp.floor(further).astype(jnp.int32)
