"""Memory and time of curvature products of a transformer.

    python benchmarks/run.py large_curvature

In units of a gradient: a causal transformer of 3.7 million parameters, in Equinox, with
the mean cross-entropy of 8 sequences of 128 tokens, in float32. Memory is what the
compiled program takes besides its arguments, for one vector and for a block of four.
Times are for one vector.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from tables import head, row
from timing import interleaved

import traceax as tx


WIDTH, HEADS, LAYERS, WORDS, LENGTH, EXAMPLES = 256, 4, 4, 1024, 128, 8


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    mlp: eqx.nn.MLP

    def __init__(self, key):
        keys = jr.split(key)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[0])
        self.norms = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, x):
        y, mask = jax.vmap(self.norms[0])(x), jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        x = x + self.attention(y, y, y, mask)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Transformer(eqx.Module):
    words: jax.Array
    places: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        words, places, head, *blocks = jr.split(key, 3 + LAYERS)
        self.words = 0.02 * jr.normal(words, (WORDS, WIDTH))
        self.places = 0.02 * jr.normal(places, (LENGTH, WIDTH))
        self.blocks = list(map(Block, blocks))
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, WORDS, use_bias=False, key=head)

    def __call__(self, tokens):
        x = self.words[tokens] + self.places
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


TOKENS = jr.randint(jr.key(1), (EXAMPLES, LENGTH + 1), 0, WORDS)


def logits(model):
    return jax.vmap(model)(TOKENS[:, :-1])


def cross_entropy(outputs):
    logs = jax.nn.log_softmax(outputs)
    return -jnp.mean(jnp.take_along_axis(logs, TOKENS[:, 1:, None], axis=-1))


def loss(model):
    return cross_entropy(logits(model))


OPERATORS = {
    "Hessian, exact": lambda model: tx.hessian(loss, model),
    'Hessian, `product="difference"`': lambda model: tx.hessian(
        loss, model, product="difference"
    ),
    "`ggn`": lambda model: tx.ggn(logits, cross_entropy, model),
    "`fisher`, 1 sample": lambda model: tx.fisher(
        logits, model, likelihood=tx.CategoricalLikelihood(), key=jr.key(2)
    ),
}


def compiled(fn, *arguments):
    """The program, and its memory in bytes beside arguments."""
    program = jax.jit(fn).lower(*arguments).compile()
    memory = program.memory_analysis()
    assert memory is not None
    return program, memory.temp_size_in_bytes


def main() -> None:
    params, static = eqx.partition(Transformer(jr.key(0)), eqx.is_inexact_array)
    vector = jax.tree.map(jnp.cos, params)
    block = jax.tree.map(lambda x: jnp.stack([x] * 4), vector)
    gradient, unit = compiled(
        jax.grad(lambda params: loss(eqx.combine(params, static))), params
    )
    memory, calls = {}, {"gradient": lambda: gradient(params)}
    for name, make in OPERATORS.items():

        def product(params, vector, make=make):
            return make(eqx.combine(params, static)).mv(vector)

        program, one = compiled(product, params, vector)
        _, four = compiled(jax.vmap(product, (None, 0)), params, block)
        memory[name] = one / unit, four / unit
        calls[name] = lambda program=program: program(params, vector)
    times = interleaved(calls, rounds=5)
    base = times.pop("gradient")[0]
    head("product", "memory", "of a block of 4", "time")
    for name, (median, *_) in times.items():
        one, four = memory[name]
        row(name, f"{one:.2f}", f"{four:.2f}", f"{median / base:.1f}")


if __name__ == "__main__":
    main()
