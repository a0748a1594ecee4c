"""Curvature products in units of a gradient: the benchmark of curvlinops.

    python benchmarks/run.py published/curvature_products

Two problems with the mean cross-entropy as loss, in float32: a network of layers
784-1024-512-256-128-64-10 with ReLU and a batch of 512, and a transformer. Theirs are
stored in their repository, f-dangel/curvlinops, `docs/examples/basic_usage/benchmark`:
compiled, on an RTX A6000, and their transformer is nanoGPT with 124 million parameters
and a batch of 4 sequences of 1024 tokens. Ours run on the CPU, and our transformer is the
one of `large_curvature.py`, with 3.7 million parameters and 8 sequences of 128 tokens. So
seconds do not compare, but ratios to the time of the loss and its gradient do, and for
the network, which is the same, closely. Medians of interleaved calls, and in brackets
their range. The Fisher matrix by Monte Carlo has one label for each prediction.
"""

import itertools
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import large_curvature as transformer
from tables import head, row
from timing import interleaved, spread

import traceax as tx


SIZES, EXAMPLES = (784, 1024, 512, 256, 128, 64, 10), 512
# Time of a product over that of loss and gradient.
THEIRS = {
    "network": {"Hessian": 1.06, "GGN": 0.86, "empirical Fisher": 1.02, "Fisher": 2.15},
    "transformer": {
        "Hessian": 2.90,
        "GGN": 2.12,
        "empirical Fisher": 2.27,
        "Fisher": 2.41,
    },
}


def network(params, images):
    *hidden, last = params
    for weight, bias in hidden:
        images = jax.nn.relu(images @ weight + bias)
    weight, bias = last
    return images @ weight + bias


def network_problem():
    """Parameters, their logits and the labels."""
    keys = jr.split(jr.key(0), len(SIZES) + 1)
    params = [
        ((2 / a) ** 0.5 * jr.normal(key, (a, b)), jnp.zeros(b))
        for key, (a, b) in zip(keys, itertools.pairwise(SIZES), strict=False)
    ]
    images = jr.uniform(keys[-2], (EXAMPLES, SIZES[0]))
    labels = jr.randint(keys[-1], (EXAMPLES,), 0, SIZES[-1])
    return params, lambda params: network(params, images), labels


def transformer_problem():
    model = transformer.Transformer(jr.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def logits(params):
        outputs = transformer.logits(eqx.combine(params, static))
        return outputs.reshape(-1, outputs.shape[-1])

    return params, logits, transformer.TOKENS[:, 1:].reshape(-1)


def operators(logits, labels):
    """Functions of the parameters to operators."""

    def losses(outputs):
        logs = jax.nn.log_softmax(outputs)
        return -jnp.take_along_axis(logs, labels[:, None], axis=-1)[:, 0]

    def mean(outputs):
        return jnp.mean(losses(outputs))

    def loss(params):
        return mean(logits(params))

    likelihood, key = tx.CategoricalLikelihood(), jr.key(2)
    return loss, {
        "Hessian": lambda params: tx.hessian(loss, params),
        "GGN": lambda params: tx.ggn(logits, mean, params),
        "empirical Fisher": lambda params: tx.empirical_fisher(
            lambda params: losses(logits(params)), params
        ),
        "Fisher": lambda params: tx.fisher(
            logits, params, likelihood=likelihood, key=key
        ),
    }


def measured(problem, rounds):
    """Median and range of the seconds of each product, and the median of the gradient."""
    params, logits, labels = problem
    vector = jax.tree.map(jnp.cos, params)
    loss, makers = operators(logits, labels)
    gradient = jax.jit(jax.value_and_grad(loss))
    calls = {"gradient": lambda: gradient(params)}
    for name, make in makers.items():

        @jax.jit
        def product(params, vector, make=make):
            return make(params).mv(vector)

        calls[name] = lambda product=product: product(params, vector)
    times = interleaved(calls, rounds=rounds)
    base, *_ = times.pop("gradient")
    return times, base


def main(rounds: int) -> None:
    head("problem", "product", "theirs", "ours", "ratio", "gradient, ms")
    problems = {"network": network_problem, "transformer": transformer_problem}
    for name, make in problems.items():
        times, base = measured(make(), rounds)
        for product, theirs in THEIRS[name].items():
            found = times[product]
            ratio = f"{found[0] / base / theirs:.2f}"
            ours, milliseconds = spread(found, base), f"{1e3 * base:.0f}"
            row(name, product, f"{theirs:.2f}", ours, ratio, milliseconds)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
