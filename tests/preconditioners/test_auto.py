"""The preconditioner whose rank the data choose."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

from ..helpers import hermitian, PSD


N, SHIFT, KEY = 120, 1e-2, jr.key(0)
K = tx.Adaptive(rtol=1e-4, max_k=64)
MAX_RANK = 80


def decaying(dtype=np.float64, rate=0.8, shift=SHIFT):
    return hermitian(0, 10 * rate ** np.arange(N) + shift, dtype)


def exact(matrix):
    wide = np.promote_types(matrix.dtype, np.float64)
    return np.linalg.slogdet(matrix.astype(wide))[1]


def run(matrix, shift, key, k=K, *settings, state=None):
    """Beside the solution the rank, which is what is left of the products."""
    shift = jnp.asarray(shift, np.finfo(matrix.dtype).dtype)
    return compiled(matrix, shift, key, k, *settings, state=state)


@eqx.filter_jit
def compiled(
    matrix, shift, key, k, num_steps=tx.AdaptiveSteps(), most=MAX_RANK, state=None
):
    operator = lx.MatrixLinearOperator(matrix, PSD)
    outer = tx.AutoPreconditioner(shift, most)
    settings = {"key": key, "state": state, "throw": False, "num_steps": num_steps}
    solution = tx.logdet(operator, k=k, preconditioner=outer, **settings)
    probes = jnp.sum(jnp.isfinite(solution.stats["samples"]))
    spent = probes * num_steps if isinstance(num_steps, int) else 0
    if not isinstance(num_steps, int):
        spent = (probes + 1) * solution.stats["num_steps"]
    return solution, solution.stats["num_matvecs"] - spent


def check(matrix, solution, rtol=1e-4):
    """The tolerance is met, but for the one in 20 that may be beyond."""
    assert solution.result == tx.RESULTS.successful
    assert abs(solution.value / exact(matrix) - 1) <= 1.5 * rtol


@pytest.mark.slow(but=("0.5-1.0", "0.5-1e+100", "0.8-1e-100", "0.8-1.0", "0.8-1e+100"))
@pytest.mark.parametrize("scale", [1e-100, 1.0, 1e100])
@pytest.mark.parametrize("rate", [0.5, 0.8])
def test_value(rate, scale):
    matrix = scale * decaying(rate=rate)
    solution, rank = run(matrix, scale * SHIFT, KEY)
    check(matrix, solution)
    assert rank % 8 == 0
    assert 8 < rank <= MAX_RANK


def test_rank_follows_decay_and_tolerance():
    """The slower the decay, and the smaller the tolerance, the higher the rank."""
    slower = [run(decaying(rate=rate), SHIFT, KEY)[1] for rate in (0.5, 0.7, 0.85)]
    assert slower == sorted(slower)
    assert slower[0] < slower[-1]
    found = [
        run(decaying(), SHIFT, KEY, tx.Adaptive(rtol=rtol, max_k=64))
        for rtol in (1e-2, 1e-4, 1e-6)
    ]
    closer = [rank for _, rank in found]
    assert closer == sorted(closer)
    assert closer[0] < closer[-1]
    for (solution, _), rtol in zip(found, (1e-2, 1e-4, 1e-6), strict=True):
        check(decaying(), solution, rtol)


@pytest.mark.parametrize("shift", [2.0, 1e-3])
@pytest.mark.parametrize("rank", [0, 3])
def test_low_rank_takes_two_blocks(shift, rank):
    """One that is enough, and one to see it. For a multiple of the identity the first
    one sees that none is needed."""
    matrix = hermitian(0, np.where(np.arange(N) < rank, 50.0, 0) + shift)
    solution, found = run(matrix, shift, KEY)
    assert found == (16 if rank else 8)
    assert np.isclose(solution.value, exact(matrix), rtol=1e-11, atol=1e-10)


def test_a_vector_of_shifts():
    """Noise variances over four decades: half as many matvecs as a scalar takes, which
    gets the exact answer, or fewer; and errors within the tolerance for 20 keys."""
    noise = np.random.default_rng(1).permutation(np.geomspace(1e-4, 1.0, N))
    x = np.linspace(0, 1, N)
    matrix = np.exp(-50 * (x[:, None] - x) ** 2) + np.diag(noise)

    @eqx.filter_jit
    def solve(shift, keys):
        def one(key):
            operator = lx.MatrixLinearOperator(matrix, PSD)
            outer = tx.AutoPreconditioner({"a": shift[:20], "b": shift[20:]})
            outer = outer if shift.size == N else tx.AutoPreconditioner(shift[0])
            k = tx.Adaptive(rtol=1e-3)
            found = tx.logdet(operator, k=k, preconditioner=outer, key=key)
            return found.value, found.stats["num_matvecs"]

        return jax.lax.map(one, keys)

    value, spent = solve(jnp.asarray(noise), jr.split(KEY, 20))
    assert np.all(np.abs(value / exact(matrix) - 1) <= 1.5e-3)
    _, spent_by_scalar = solve(jnp.full(1, 1e-4), jr.split(KEY, 2))
    assert np.max(spent) < np.min(spent_by_scalar) / 2


@pytest.mark.slow
def test_does_not_grow_where_it_saves_nothing():
    """On a flat spectrum no rank helps, and few products are lost."""
    matrix = hermitian(0, np.linspace(1.0, 3.0, N))
    solution, rank = run(matrix, 1.0, KEY, 8, 12)
    assert rank <= 8 * 12 / 4 + 8
    assert abs(solution.value - exact(matrix)) <= 4 * solution.std_err


@pytest.mark.slow
def test_single_precision_and_complex():
    matrix = decaying(np.complex64)
    solution, rank = run(matrix, SHIFT, KEY)
    check(matrix, solution)
    assert solution.value.dtype == np.float32
    assert rank < MAX_RANK


@pytest.mark.slow
def test_one_probe_and_less_than_a_block():
    matrix = decaying(rate=0.7)
    solution, rank = run(matrix, SHIFT, KEY, 1, 6, 5)
    assert rank == 5
    assert solution.result == tx.RESULTS.successful
    low, high = solution.stats["bracket"]
    assert low <= solution.value <= high


@pytest.mark.parametrize("factor", [3.0, 1e-3])
def test_a_wrong_shift_is_no_confident_wrong_number(factor):
    """Above the spectrum's end, or far below: less accurate, and it says so."""
    matrix = decaying()
    solution, _ = run(matrix, factor * SHIFT, KEY)
    low, high = solution.interval(0.999)
    assert low <= exact(matrix) <= high
    assert solution.result != tx.RESULTS.successful


@pytest.mark.slow
def test_error_bars_and_gradient():
    """Over 36 keys: mean errors within 4 standard errors, a false alarm in 16000 for
    each of three; the tolerance
    is met by 95 in 100, or three standard errors less."""
    base = decaying(shift=0.0)
    k = tx.Adaptive(rtol=1e-3, max_k=64)

    def value(scale, shift, key):
        solution, _ = run(scale * base + shift * jnp.eye(N), shift, key, k)
        return solution.value

    keys = jr.split(KEY, 36)
    both = jax.jit(jax.vmap(jax.value_and_grad(value, (0, 1)), (None, None, 0)))
    values, slopes = both(1.0, SHIFT, keys)
    matrix = decaying()
    inverse = np.linalg.inv(matrix)
    expected = exact(matrix), np.sum(inverse * base), np.trace(inverse)
    for found, truth in zip((values, *slopes), expected, strict=True):
        assert abs(np.mean(found) - truth) <= 4 * np.std(found, ddof=1) / 6
    inside = np.mean(np.abs(values / expected[0] - 1) <= 1e-3)
    assert inside >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / 36)


@pytest.mark.slow
def test_products_are_counted():
    """By a product that counts its vectors while it runs."""
    matrix, made = decaying(), []

    def product(vectors):
        made.append(vectors.size // N)
        return vectors @ matrix

    def mv(vector):
        like = jax.ShapeDtypeStruct((N,), vector.dtype)
        return jax.pure_callback(product, like, vector, vmap_method="expand_dims")

    structure = jax.ShapeDtypeStruct((N,), jnp.float64)
    operator = lx.FunctionLinearOperator(mv, structure, PSD)
    solution = tx.logdet(
        operator,
        k=10,
        num_steps=4,
        key=KEY,
        preconditioner=tx.AutoPreconditioner(SHIFT, max_rank=1000),
    )
    jax.block_until_ready(solution.value)
    assert sum(made) == solution.stats["num_matvecs"]


@pytest.mark.slow
def test_meshes_pytrees_and_negative_operators():
    """All at once: the numbers of a positive matrix on one device."""
    matrix = decaying()
    solution, _ = run(matrix, SHIFT, KEY)
    settings = {"k": K, "key": KEY, "throw": False}
    settings["preconditioner"] = tx.AutoPreconditioner(SHIFT, MAX_RANK)
    settings["execution"] = tx.Sharded(tx.probe_mesh())

    def mv(tree):
        joined = jnp.concatenate([tree["a"].ravel(), tree["b"]])
        parts = jnp.split(-matrix @ joined, [20])
        return {"a": parts[0].reshape(4, 5), "b": parts[1]}

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float64)  # noqa: E731
    structure = {"a": shape(4, 5), "b": shape(N - 20)}
    tags = lx.negative_semidefinite_tag
    other = tx.logdet(lx.FunctionLinearOperator(mv, structure, tags), **settings)
    assert np.isclose(other.value, solution.value, rtol=1e-10)
    assert np.isclose(other.std_err, solution.std_err, rtol=1e-6)
    assert other.stats["num_matvecs"] == solution.stats["num_matvecs"]


def nystrom(shift):
    operator = lx.MatrixLinearOperator(decaying(), PSD)
    return tx.nystrom_preconditioner(operator, 10, key=KEY, shift=shift)


def test_a_preconditioner_in_another_one_rescales_the_bound():
    """Both are multiples of the identity. The bound of A is one of what they leave."""
    matrix = hermitian(0, np.append(np.full(90, 0.5), np.geomspace(1e6, 1e7, N - 90)))
    operator = lx.MatrixLinearOperator(matrix, PSD)
    settings = {"k": 10, "num_steps": 2, "key": KEY, "throw": False}
    bounded = tx.SLQEstimator(lower_bound=0.5)
    plain = tx.logdet(operator, bounded, **settings)
    nested = tx.Preconditioned(bounded, Multiple(2.0))
    found = tx.logdet(operator, nested, preconditioner=Multiple(10.0), **settings)
    assert np.allclose(found.stats["bracket"], plain.stats["bracket"], rtol=1e-6)


class Multiple(tx.AbstractPreconditioner):
    """Of the identity."""

    factor: float
    num_matvecs: int = 0
    size = N

    @property
    def logdet(self):
        return N * jnp.log(self.factor)

    @property
    def largest(self):
        return jnp.asarray(self.factor)

    def power(self, exponent, x):
        return self.factor**exponent * x

    def control(self, operator, value, probes, execution):
        return value


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: tx.AutoPreconditioner(0.1, 0), ValueError, "`max_rank` must be at"),
        (lambda: tx.AutoPreconditioner(0.1, 2.0), TypeError, "`max_rank` must be an"),
        (lambda: tx.AutoPreconditioner(-1.0), ValueError, "`shift` must be positive"),
        (lambda: tx.AutoPreconditioner(np.inf), ValueError, "`shift` must be positive"),
        (lambda: tx.AutoPreconditioner("1"), TypeError, "`shift` must be a real number"),
        (lambda: tx.AutoPreconditioner(np.zeros(N)), ValueError, "positive, finite ent"),
        (lambda: tx.AutoPreconditioner(()), ValueError, "`shift` must have entries"),
        (lambda: tx.AutoPreconditioner(jnp.ones(2) + 1j), TypeError, "`shift.real`"),
        (lambda: run(decaying(), np.ones(N - 1), KEY), ValueError, "of the size of"),
        (lambda: run(decaying(), SHIFT, None), ValueError, "`key` is missing"),
        (lambda: nystrom(-1.0), ValueError, "`shift` must be finite, 0 or more"),
        (lambda: nystrom(np.inf), ValueError, "`shift` must be finite"),
        (lambda: nystrom(np.nan), ValueError, "`shift` must be a number"),
        (lambda: nystrom(jnp.ones(1)), ValueError, "`shift` must be a scalar, or"),
        (lambda: nystrom("0.1"), TypeError, "`shift` must be a real number"),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.slow
@pytest.mark.usefixtures("without_exact_answers")
def test_a_run_that_goes_on_has_the_preconditioner_of_its_samples():
    """Another tolerance would choose another rank."""
    matrix = decaying(rate=0.9, shift=1.0)

    def solve(rtol, max_k, state=None):
        k = tx.Adaptive(rtol=rtol, max_k=max_k)
        return run(matrix, 1.0, KEY, k, state=state)

    loose, small = solve(0.5, 16)
    solution, rank = solve(1e-6, 64, loose.state)
    _, alone = solve(1e-6, 64)
    assert rank == small < alone
    error = np.abs(solution.value - exact(matrix))
    assert error < 6 * solution.std_err


@pytest.mark.slow
def test_shift_above_eigenvalues_that_the_sketch_sees():
    """Where A less the shift is negative, the preconditioner is the shift."""
    matrix = hermitian(0, np.append(np.full(10, 100.0), np.full(N - 10, 0.1)))
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix), PSD)
    outer = tx.nystrom_preconditioner(operator, 50, key=KEY, shift=0.11)
    assert outer.largest < 101
    settings = {"k": 10, "num_steps": 10, "key": jr.key(1), "preconditioner": outer}
    solution = tx.logdet(operator, **settings)
    assert np.abs(solution.value - exact(matrix)) < 1e-2


SIZE = 200
LOOSE = tx.Adaptive(rtol=1e-2, max_k=64)
SPECTRA = {
    "decaying": 10 * 0.8 ** np.arange(SIZE) + 1e-3,
    "ill conditioned": 10 * 0.8 ** np.arange(SIZE) + 1e-7,
    "flat": np.linspace(1.0, 3.0, SIZE),
    "algebraic": 100.0 * np.arange(1.0, SIZE + 1) ** -2,
}


@eqx.filter_jit
def automatic(matrix, keys, preconditioner="auto"):
    """Values, error bars, 95% intervals and matvecs for each key."""

    def solve(key):
        operator = lx.MatrixLinearOperator(matrix, PSD)
        settings = {"preconditioner": preconditioner, "throw": False}
        solution = tx.logdet(operator, k=LOOSE, key=key, **settings)
        interval = jnp.stack(solution.interval())
        return solution.value, interval, solution.stats["num_matvecs"]

    return jax.lax.map(solve, keys)


def test_nothing_chosen():
    """A call that chooses nothing makes less than a third of the matvecs where the
    spectrum decays. Where it is flat the attempt takes at most a fifth."""
    keys = jr.split(KEY, 4)
    for name in ("decaying", "ill conditioned", "flat"):
        matrix = hermitian(0, SPECTRA[name])
        values, _, spent = automatic(matrix, keys)
        _, _, without = automatic(matrix, keys, None)
        assert np.all(np.abs(values / exact(matrix) - 1) <= 1.5e-2)
        if name == "flat":
            assert np.all(spent - without <= 0.2 * spent), (spent, without)
        else:
            assert np.mean(spent) < np.mean(without) / 3


@pytest.mark.slow
def test_an_attempt_that_is_dropped_changes_nothing():
    """But for its matvecs, a twelfth of all at most."""
    operator = lx.MatrixLinearOperator(hermitian(0, np.linspace(1.0, 3.0, 600)), PSD)
    tried, plain = (
        tx.logdet(operator, key=KEY, **settings)
        for settings in ({}, {"preconditioner": None})
    )
    for one, other in ((tried.value, plain.value), (tried.std_err, plain.std_err)):
        assert one == other
    more = tried.stats["num_matvecs"] - plain.stats["num_matvecs"]
    assert 8 <= more <= plain.stats["num_matvecs"] / 12


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decaying", "algebraic"])
def test_intervals_without_a_shift_cover(name):
    """At least 95 in 100 of 200 intervals, or three standard errors less."""
    matrix = hermitian(0, SPECTRA[name])
    _, intervals, _ = automatic(matrix, jr.split(KEY, 200))
    low, high = intervals.T
    inside = np.mean((low <= exact(matrix)) & (exact(matrix) <= high))
    assert inside >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / 200)


@pytest.mark.slow
def test_numbers_are_taken_as_they_are():
    """Without a preconditioner, where `k` or `num_steps` is a number."""
    operator = lx.MatrixLinearOperator(hermitian(0, SPECTRA["decaying"]), PSD)
    for settings in ({"k": 6, "num_steps": 5}, {"k": LOOSE, "num_steps": 5}, {"k": 6}):
        call = {"key": KEY, "throw": False, **settings}
        found = tx.logdet(operator, **call)
        plain = tx.logdet(operator, preconditioner=None, **call)
        assert found.value == plain.value
        assert found.stats["num_matvecs"] == plain.stats["num_matvecs"]


@pytest.mark.slow
def test_nothing_chosen_for_operators_without_a_logarithm():
    """The failures of a call without a preconditioner."""
    zeros = hermitian(0, np.where(np.arange(SIZE) < 60, 0.0, 1.0))
    negative = hermitian(0, np.linspace(-1.0, 1.0, SIZE))
    for matrix in (np.zeros((SIZE, SIZE)), zeros, negative):
        operator = lx.MatrixLinearOperator(jnp.asarray(matrix), PSD)
        found = tx.logdet(operator, k=LOOSE, key=KEY, throw=False)
        assert found.result == tx.RESULTS.not_positive_definite
        assert not np.isnan(found.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decaying", "flat"])
def test_derivatives_of_a_call_that_chooses_nothing(name):
    """Of first and second order, with and without a rank, also for a Hermitian matrix on
    a mesh."""
    matrix = hermitian(0, SPECTRA[name], np.complex128)
    inverse = np.linalg.inv(matrix)
    gradient = tx.SolveGradient(lx.CG(rtol=1e-8, atol=1e-8))

    def value(shift, **settings):
        operator = lx.MatrixLinearOperator(matrix + shift * jnp.eye(SIZE), PSD)
        return tx.logdet(operator, k=LOOSE, key=KEY, throw=False, **settings).value

    slope = jax.grad(value)(0.0)
    assert np.isclose(slope, np.trace(inverse).real, rtol=0.05)
    curvature = jax.grad(jax.grad(lambda x: value(x, gradient=gradient)))(0.0)
    assert np.isclose(curvature, -np.trace(inverse @ inverse).real, rtol=0.05)
    mesh = tx.Sharded(tx.probe_mesh())
    on_mesh = jax.grad(lambda x: value(x, execution=mesh))(0.0)
    assert np.isclose(on_mesh, slope, rtol=1e-6)
