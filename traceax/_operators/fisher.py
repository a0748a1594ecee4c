r"""The Fisher matrix of a model, with labels that are drawn from the model itself:

    F = (1/N) sum_i E[g_i g_i^T],    g_i = d/dx log p(y_i | z_i(x)),    y_i ~ p(. | z_i),

for N labels y_i and the outputs z of the model. S labels are drawn for each i, and with
the Jacobian J of the model, and L the Jacobian in z of all N S log-probabilities,

    F = E[J^T L^T L J] / (N S).

So S labels cost no further pass through the model. Labels of a batch are drawn from a key
of its own. For categorical and Gaussian likelihoods F is the Gauss-Newton matrix.
Martens, "New Insights and Perspectives on the Natural Gradient Method", JMLR 21, 2020.

Labels are constants, so the derivative of g g^T alone is not that of F. The factor
exp(log p - stop(log p)), which is 1, adds what is missing: the change of the probability
of the labels. Foerster et al., "DiCE", ICML 2018.
"""

import abc
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, PRNGKeyArray, PyTree, Real

from .._core.checks import check_instance, check_key, check_positive
from .._core.sampler import require_key
from .batches import batches_with_keys, mean_operator
from .curvature import check_outputs, jacobian_at, jacobian_gram, SEMIDEFINITE


class AbstractLikelihood(eqx.Module):
    """The distribution of labels, given the outputs of a model; an argument of
    [`traceax.fisher`][].

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import traceax as tx

        class Poisson(tx.AbstractLikelihood):
            # The outputs are logarithms of rates.
            def sample(self, key, outputs):
                return jax.random.poisson(key, jnp.exp(outputs))

            def log_prob(self, outputs, labels):
                return labels * outputs - jnp.exp(outputs)

        x = jnp.arange(6.0).reshape(3, 2) / 5
        model = lambda w: x @ w
        settings = {"likelihood": Poisson(), "num_samples": 1000}
        operator = tx.fisher(model, jnp.ones(2), key=jax.random.key(0), **settings)
        print(operator.mv(jnp.ones(2)).shape)  # (2,)
        ```
    """

    @abc.abstractmethod
    def sample(self, key: PRNGKeyArray, outputs: PyTree[Array]) -> PyTree[Array]:
        """Draw a label for each example.

        **Arguments:**

        - `key`: a JAX PRNG key.
        - `outputs`: what the model returns.

        **Returns:**

        Labels, any PyTree of arrays.
        """

    @abc.abstractmethod
    def log_prob(
        self, outputs: PyTree[Array], labels: PyTree[Array]
    ) -> Real[Array, "..."]:
        """The logarithm of the probability, or of its density, of each label.

        **Arguments:**

        - `outputs`: what the model returns.
        - `labels`: what `sample` returns.

        **Returns:**

        An array with an entry for each label that is independent of the others. The
        Fisher matrix is the mean over these entries. Terms that do not depend on the
        outputs may be left out.
        """


class CategoricalLikelihood(AbstractLikelihood):
    """Classes, whose probabilities are the softmax of the outputs, of shape
    `(..., classes)`. Each index of the other axes is a label of its own, such as that of
    an image, or a token of a text. Its Fisher matrix is the Gauss-Newton matrix of the
    mean cross-entropy.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import traceax as tx

        likelihood = tx.CategoricalLikelihood()
        logits = jnp.array([[0.0, 99.0], [99.0, 0.0]])
        labels = likelihood.sample(jax.random.key(0), logits)
        print(labels)  # [1 0]
        ```
    """

    def sample(self, key: PRNGKeyArray, outputs: PyTree[Array]) -> PyTree[Array]:
        return jax.random.categorical(key, outputs)

    def log_prob(
        self, outputs: PyTree[Array], labels: PyTree[Array]
    ) -> Real[Array, "..."]:
        logs = jax.nn.log_softmax(outputs)
        return jnp.take_along_axis(logs, labels[..., None], axis=-1)[..., 0]


class GaussianLikelihood(AbstractLikelihood):
    """Normally distributed labels of variance 1, whose means are the outputs, of shape
    `(examples, ...)`. Each index of the first axis is a label. Its Fisher matrix is the
    Gauss-Newton matrix of the mean over examples of half the squared errors, summed over
    the other axes.

    !!! Example

        ```python
        import jax.numpy as jnp
        import traceax as tx

        likelihood = tx.GaussianLikelihood()
        print(likelihood.log_prob(jnp.zeros((2, 3)), jnp.ones((2, 3))))  # [-1.5 -1.5]
        ```
    """

    def sample(self, key: PRNGKeyArray, outputs: PyTree[Array]) -> PyTree[Array]:
        return outputs + jax.random.normal(key, outputs.shape, outputs.dtype)

    def log_prob(
        self, outputs: PyTree[Array], labels: PyTree[Array]
    ) -> Real[Array, "..."]:
        squares = (labels - outputs) ** 2
        return -0.5 * jnp.sum(squares, axis=tuple(range(1, squares.ndim)))


class _Model(eqx.Module):
    """A model of a batch, given the pair of the batch and its key."""

    model: Callable[..., Any]

    def __call__(self, x: PyTree, batch: tuple[PyTree, PRNGKeyArray]) -> PyTree[Array]:
        return self.model(x, batch[0])


def _key_of(x: PyTree, batch: tuple[PyTree, PRNGKeyArray]) -> PRNGKeyArray:
    return batch[1]


class _Fisher(eqx.Module):
    """The Fisher matrix of one batch, from a model and its key, as functions of `x`."""

    likelihood: AbstractLikelihood
    num_samples: int = eqx.field(static=True)

    def __call__(
        self,
        model: Callable[[PyTree], PyTree[Array]],
        key: Callable[[PyTree], PRNGKeyArray],
        x: PyTree,
    ) -> lx.TaggedLinearOperator:
        jacobian, outputs = jacobian_at(model, x), model(x)
        check_outputs("model", outputs, jnp.floating)
        keys = jax.random.split(key(x), self.num_samples)
        draw = lambda key: self.likelihood.sample(key, outputs)  # noqa: E731
        labels = jax.lax.stop_gradient(jax.vmap(draw)(keys))

        def log_probs(outputs):
            each = lambda labels: self.likelihood.log_prob(outputs, labels)  # noqa: E731
            return jax.vmap(each)(labels)

        logs = log_probs(outputs)
        check_outputs("likelihood.log_prob", logs, jnp.floating)
        # The root of the factor, because L has it twice.
        factors = jnp.exp((logs - jax.lax.stop_gradient(logs)) / 2) / logs.size**0.5
        gram = jacobian_gram(lambda outputs: factors * log_probs(outputs), outputs)
        jacobian, gram = lx.linearise(jacobian), lx.linearise(gram)
        return lx.TaggedLinearOperator(jacobian.T @ gram @ jacobian, SEMIDEFINITE)


def fisher(
    model: Callable[..., PyTree[Array]],
    x: PyTree,
    batches: PyTree | Iterable[PyTree] | None = None,
    *,
    likelihood: AbstractLikelihood,
    key: PRNGKeyArray,
    num_samples: int = 1,
    chunk_size: int = 1,
) -> lx.AbstractLinearOperator:
    r"""The Fisher matrix of a model, with labels drawn from the model's own predictions:
    the mean over N labels of $E[g_i g_i^T]$, where $g_i$ is the gradient at `x` of the
    log-probability of a random label, and the expectation is a mean over `num_samples`
    of them.

    Unlike the [empirical Fisher matrix][traceax.empirical_fisher] it needs no labels. It
    is random, and its mean over keys is the Fisher matrix, which for categorical and
    Gaussian likelihoods is the [Gauss-Newton matrix][traceax.ggn].

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import traceax as tx

        x = jnp.arange(6.0).reshape(3, 2) / 5
        settings = {"likelihood": tx.GaussianLikelihood(), "key": jax.random.key(0)}
        operator = tx.fisher(lambda w: x @ w, jnp.ones(2), num_samples=10_000, **settings)
        print(f"{tx.trace(operator, k=2).value:.1f}")  # 0.7
        ```

    **Arguments:**

    - `model`: from `x` to outputs, any PyTree of floating-point arrays: `model(x)`, or
        `model(x, batch)` if there are batches.
    - `x`, `batches`, `chunk_size`: as in [`traceax.hessian`][], so that labels of all
        batches have the same weight.
    - `likelihood`: the distribution of labels, given the outputs:
        [`traceax.CategoricalLikelihood`][] for logits, [`traceax.GaussianLikelihood`][]
        for means, or a subclass of [`traceax.AbstractLikelihood`][].
    - `key`: a JAX PRNG key, from which labels are drawn, the same in all matvecs. Batches
        have keys of their own, by their numbers.
    - `num_samples`: how many labels are drawn for each that the data would have. They
        share the passes through the model.

    **Returns:**

    A positive-semidefinite-tagged operator. One matvec costs about one forward-mode and
    one reverse-mode derivative of `model`, and with batches an evaluation, whatever
    `num_samples`. Memory is that of [`traceax.ggn`][], and `num_samples` arrays of the
    size of the outputs.

    Labels are those of the key, so error bars of estimates do not count that they are
    random: compare several keys. Derivatives in `x` count the change of the probability
    of labels; their means over keys are those of the Fisher matrix.

    **Raises:**

    `TypeError` if `model` or `likelihood.log_prob` does not return floating-point arrays,
    or `likelihood` or `key` is of another type; `ValueError` if `num_samples` is below 1;
    for `x`, `batches` and `chunk_size` as [`traceax.hessian`][].

    ??? cite

        ```bibtex
        @article{martens2020new,
            author  = {Martens, James},
            title   = {New Insights and Perspectives on the Natural Gradient Method},
            journal = {Journal of Machine Learning Research},
            volume  = {21},
            number  = {146},
            pages   = {1--76},
            year    = {2020},
        }
        ```
    """
    check_instance("likelihood", likelihood, AbstractLikelihood, "GaussianLikelihood()")
    check_key(key)
    require_key(key)
    make = _Fisher(likelihood, check_positive("num_samples", num_samples))
    if batches is None and chunk_size == 1:
        return make(model, lambda _: key, x)
    if batches is not None:
        batches = batches_with_keys(batches, key)
    return mean_operator(
        make,
        _Model(model),
        _key_of,
        x=x,
        batches=batches,
        chunk_size=chunk_size,
        tags=SEMIDEFINITE,
    )
