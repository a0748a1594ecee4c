"""Tags of operators."""

import copy
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from traceax._operators.door import flatten
from traceax._operators.tags import symmetry_of

from ..helpers import hermitian, matrix_free, PSD


MATRIX = hermitian(0, np.linspace(1.0, 4.0, 40)).astype(np.float32)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies_of_the_hermitian_tag(copied):
    matrix = jnp.asarray(MATRIX, np.complex64)
    assert copied(tx.hermitian_tag) is tx.hermitian_tag
    operator = copied(lx.MatrixLinearOperator(matrix, tx.hermitian_tag))
    assert flatten(operator).hermitian


def test_hermitian_tag_of_a_transpose():
    """It stays, and the transpose is the conjugate."""
    matrix = jnp.asarray(hermitian(0, np.linspace(1.0, 4.0, 40), np.complex128))
    operator = lx.MatrixLinearOperator(matrix, tx.hermitian_tag)
    flat = flatten((operator + 2.0 * operator).T)
    assert flat.hermitian
    vector = jnp.arange(40.0) + 0j
    assert np.allclose(flat.mv(vector), 3 * matrix.conj() @ vector)


N = 40
SPECTRUM = np.linspace(1.0, 4.0, N)
NOISE = np.geomspace(0.1, 2.0, N)


def operators(dtype):
    """A semidefinite operator, a symmetric one, and the identity."""
    matrix = hermitian(0, SPECTRUM, dtype)
    tagged = lx.MatrixLinearOperator(jnp.asarray(matrix), PSD)
    tag = tx.hermitian_tag if np.iscomplexobj(matrix) else lx.symmetric_tag
    plain = lx.MatrixLinearOperator(jnp.asarray(matrix), tag)
    return tagged, plain, lx.IdentityLinearOperator(tagged.in_structure())


def diagonal(entries, dtype=np.float64):
    return lx.DiagonalLinearOperator(jnp.asarray(entries, dtype))


@pytest.mark.parametrize("dtype", [np.float64, np.complex128, np.float32, jnp.bfloat16])
def test_signs_of_sums(dtype):
    """The sign where every value is known, and whether the sum is Hermitian."""
    psd, plain, one = operators(np.float64 if dtype == jnp.bfloat16 else dtype)
    if dtype == jnp.bfloat16:
        psd, plain = (
            lx.MatrixLinearOperator(x.matrix.astype(dtype), x.tags) for x in (psd, plain)
        )
        one = lx.IdentityLinearOperator(psd.in_structure())
    noise, zero = diagonal(NOISE, dtype), diagonal(np.zeros(N), dtype)
    mixed = diagonal(NOISE - 1, dtype)
    for operator, sign in [
        (psd + noise, 1),
        (psd + 0.5 * one, 1),
        ((psd + noise).T, 1),
        (lx.conj(psd + noise), 1),
        (2.0 * psd + psd / 3.0, 1),
        (-(psd / -2.0), 1),
        (-(psd + noise) * 2.0, -1),
        (-psd - noise, -1),
        (psd + mixed, 0),
        (psd - noise, 0),
        (psd - 0.1 * one, 0),
        (-psd + noise, 0),
        (psd + plain, 0),
        (plain + noise, 0),
        (lx.TaggedLinearOperator(psd + noise, lx.symmetric_tag), 1),
        (lx.TaggedLinearOperator(psd + mixed, PSD), 1),
        # Zeros have both signs.
        (psd + zero, 1),
        (-psd + zero, -1),
        (psd * 0.0 - psd, -1),
    ]:
        assert symmetry_of(operator) == (True, sign, ()), operator


def test_signs_on_trees():
    """A curvature matrix with a ridge, and with one for each layer."""
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    curvature = tx.ggn(lambda p: p["w"].sum(0) + p["b"], lambda y: jnp.sum(y**2), params)
    ridge = 0.1 * lx.IdentityLinearOperator(curvature.in_structure())
    assert symmetry_of(curvature + ridge).sign == 1
    for scale, sign in ((0.1, 1), (-0.1, 0)):
        layers = {"w": 0.2 * params["w"], "b": scale * params["b"]}
        each = lx.DiagonalLinearOperator(layers)
        assert symmetry_of(curvature + each).sign == sign


def test_complex_entries_are_not_hermitian():
    psd, plain, one = operators(np.complex128)
    lossy = diagonal(NOISE + 1j, np.complex128)
    for operator in (psd + lossy, plain + lossy, 1j * psd, psd + 1j * one, psd @ psd):
        assert symmetry_of(operator) == (False, 0, ())
    assert symmetry_of((1 + 0j) * plain) == (True, 0, ())


def test_signs_of_traced_values():
    """Assumed where a tag makes them matter, and nowhere else."""
    psd, plain, one = operators(np.float64)
    lossy, *_ = operators(np.complex128)
    found = {}

    def look(c, d):
        noise = lx.DiagonalLinearOperator(d)
        for name, operator in {
            "multiple": c * psd,
            "negative": -psd / c - noise,
            "sum": psd + c * noise + c * one,
            "difference": psd - c * one,
            "indefinite": plain + noise,
            "alone": c * one + noise,
            "tagged": lx.TaggedLinearOperator(psd - c * one, PSD),
            "complex": lossy + lx.DiagonalLinearOperator(d + 0j),
        }.items():
            hermitian, sign, assumed = symmetry_of(operator)
            found[name] = hermitian, sign, [x.ndim for x in assumed]
        return c

    jax.eval_shape(look, jnp.ones(()), jnp.ones(N))
    assert found == {
        "multiple": (True, 1, [0]),
        "negative": (True, -1, [0, 1]),
        "sum": (True, 1, [0, 1, 0]),
        "difference": (True, 0, []),
        "indefinite": (True, 0, []),
        "alone": (True, 0, []),
        "tagged": (True, 1, []),
        # Traced entries of a complex dtype may not be real.
        "complex": (False, 0, []),
    }


SETTINGS = {"k": 20, "num_steps": 12, "key": jax.random.key(0), "throw": False}


@pytest.mark.slow(but="float64")
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_log_determinant_of_a_sum(dtype):
    """As many matvecs as with a tag, and the same value and derivative."""
    matrix = hermitian(0, SPECTRUM, dtype)
    noise = diagonal(NOISE, dtype)

    def solve(matrix, tag_sum):
        operator = matrix_free(matrix, PSD) + noise
        if tag_sum:
            operator = lx.TaggedLinearOperator(operator, PSD)
        return tx.logdet(operator, **SETTINGS)

    slope, solution = eqx.filter_grad(
        lambda matrix: (lambda x: (x.value, x))(solve(matrix, False)), has_aux=True
    )(matrix)
    tagged = solve(matrix, True)
    exact = np.linalg.slogdet(matrix + np.diag(NOISE))[1]
    assert solution.stats["num_matvecs"] == tagged.stats["num_matvecs"] == 240
    assert np.isclose(solution.value, tagged.value, rtol=1e-12)
    assert abs(solution.value - exact) < 4 * solution.std_err
    assert solution.stats["sign"] == 1
    expected = np.trace(np.linalg.inv(matrix + np.diag(NOISE)) @ matrix)
    assert np.isclose(np.sum(slope * matrix).real, expected.real, rtol=0.2)


@pytest.mark.slow
def test_known_negative_values_take_the_general_path():
    matrix = hermitian(0, SPECTRUM)
    operator = matrix_free(matrix, PSD) + diagonal(-np.linspace(2.0, 2.4, N))
    solution = tx.logdet(operator, **SETTINGS)
    exact = np.linalg.slogdet(matrix - np.diag(np.linspace(2.0, 2.4, N)))[1]
    assert solution.result == tx.RESULTS.successful
    assert solution.stats["num_matvecs"] == 480
    assert abs(solution.value - exact) < 4 * max(solution.std_err, 1)


KEY = SETTINGS["key"]
FEW = {"k": 10, "key": KEY, "throw": False}
RELYING = {
    "logdet": lambda a, _: tx.logdet(a, **SETTINGS),
    "trace": lambda a, _: tx.trace(a, **FEW),
    "nystrom": lambda a, _: tx.nystrom_preconditioner(a, 5, key=KEY, throw=False),
    "diagonal": lambda a, _: tx.diagonal(a, **FEW),
    "exact": lambda a, _: tx.logdet(a, k=N, throw=False),
}
OTHERS = {
    "hutchinson": lambda a, _: tx.trace(a, tx.HutchinsonEstimator(), **FEW),
    "exp": lambda _, c: tx.trace_of_function(c, tx.Exp(), **SETTINGS),
    "xtrace": lambda a, _: tx.trace(a, tx.XTraceEstimator(), **FEW),
    "norm": lambda a, _: tx.frobenius_norm(a, **FEW),
}
QUICK = {"logdet", "trace", "nystrom", "hutchinson"}


@pytest.mark.slow(but="quick")
@pytest.mark.parametrize("which", ["quick", "other"])
def test_a_traced_sign_is_checked(which):
    """Where it is relied on and nowhere else, for each member of a batch: `A + c I` and
    `c A`."""
    matrix = hermitian(0, SPECTRUM)
    names = {x for x in RELYING | OTHERS if (x in QUICK) == (which == "quick")}

    @jax.vmap
    def solve(c):
        psd = matrix_free(jnp.asarray(matrix), PSD)
        total = psd + c * lx.IdentityLinearOperator(psd.in_structure())
        made = {x: (RELYING | OTHERS)[x](total, c * psd) for x in sorted(names)}
        flags = {x: y.result == tx.RESULTS.assumed_sign for x, y in made.items()}
        return flags, made

    flags, made = eqx.filter_jit(solve)(jnp.array([0.5, -0.5, 1.5]))
    for name, flag in flags.items():
        assert flag.tolist() == [False, name in RELYING, False], name
    if which == "quick":
        solution = made["logdet"]
        assert np.all(solution.stats["num_matvecs"] == 240)
        exact = np.linalg.slogdet(matrix + 0.5 * np.eye(N))[1]
        assert abs(solution.value[0] - exact) < 4 * solution.std_err[0]


def test_a_wrong_sign_raises_a_message_that_names_it():
    psd = matrix_free(jnp.asarray(hermitian(0, SPECTRUM)), PSD)
    with pytest.raises(Exception, match="was assumed to have no negative entry"):
        eqx.filter_jit(lambda c: tx.trace(c * psd, k=5, key=KEY).value)(-1.0)


@pytest.mark.slow
def test_wrong_signs_in_other_calls():
    """The density relies on the sign; a diagonal of the inverse only with P."""
    matrix = hermitian(0, SPECTRUM)
    psd = matrix_free(jnp.asarray(matrix), PSD)
    outer = tx.nystrom_preconditioner(psd, 5, key=KEY)

    @eqx.filter_jit
    def solve(c):
        settings = SETTINGS | {"k": 4}
        inverse = {"preconditioner": outer} | settings
        return (
            tx.gaussian_log_prob(psd * c, jnp.ones(N), **settings).result,
            tx.diagonal_of_function(psd * c, tx.Inverse(), **inverse).result,
        )

    assert [x == tx.RESULTS.successful for x in solve(1.0)] == [True, True]
    assert [x == tx.RESULTS.assumed_sign for x in solve(-1.0)] == [True, True]
