"""A budget in matvecs, whose use is chosen from what the first of them show."""

import equinox as eqx

from .._core.checks import check_positive


# The number of probes of a round. Their spread is an error bar with three degrees of
# freedom; with two probes it would have one, and an interval four times as wide.
ROUND = 4
# Where the spectrum begins at a known bound, the Gauss-Radau value of a logarithm is
# nearer to the true one than the Gauss value: for six spectra of kernels and of decaying
# eigenvalues, preconditioned or not, the true value was at 0.06 to 0.5 of the bracket,
# seen from there. This point is taken. The error bar counts the bracket on both sides.
SHARE_OF_BRACKET = 0.3
# The smallest total: two steps for each probe of a round.
_SMALLEST = 2 * ROUND


class Matvecs(eqx.Module):
    r"""A total number of matvecs, to be used as well as possible: pass it as `k` to
    [`traceax.logdet`][] or [`traceax.trace_of_function`][], without `num_steps`.

    The call makes at most `total` matvecs with A (of a general operator, with $A$ and
    $A^*$ together), whatever the data, and decides how to use them:

    - For a log-determinant of an operator tagged semidefinite, a Nystrom preconditioner
        grows as long as the error at the end of the budget is expected to fall.
    - Four probes make steps until the quadrature error is below the sampling error that
        the rest of the budget can reach. These runs are continued, not repeated.
    - The rest goes to as many probes as it allows, in rounds of four, or else to
        further steps.

    `stats["num_matvecs"]`, `"num_steps"` and `"num_samples"` say how many matvecs, steps
    and probes there were. `std_err` and [`traceax.Solution.interval`][] count both
    errors. There may be four samples only, and then intervals are about 1.6 times as wide
    as those of many samples with the same `std_err`. A `total` of n or more gives the
    exact answer, from n matvecs.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import lineax as lx
        import traceax as tx

        x = jnp.linspace(0.0, 1.0, 500)
        kernel = jnp.exp(-50 * (x[:, None] - x) ** 2) + 0.1 * jnp.eye(500)
        operator = lx.MatrixLinearOperator(kernel, lx.positive_semidefinite_tag)
        solution = tx.logdet(operator, k=tx.Matvecs(60), key=jax.random.key(0))
        print(solution.value, "+-", solution.std_err, solution.stats["num_matvecs"])
        ```

    Memory: for the preconditioner up to `2 total` vectors of length n, at most $2^{28}$
    numbers; for the probes a Krylov basis of up to 128 vectors for each of four.

    **Attributes:**

    - `total`: a Python integer, 8 or more.
    """

    total: int = eqx.field(static=True)

    def __init__(self, total: int):
        """**Arguments:**

        - `total`: as above.

        **Raises:**

        `TypeError` or `ValueError` if `total` is not a Python integer of 8 or more.
        """
        self.total = check_positive("total", total)
        if self.total < _SMALLEST:
            raise ValueError(f"`total` must be at least {_SMALLEST}. Found {total}.")

    @property
    def most_for_rank(self) -> int:
        """What is left to a preconditioner beside two steps of each probe."""
        return self.total - _SMALLEST
