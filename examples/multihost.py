"""The log-determinant of a kernel matrix on all devices of all processes.

Start as many copies of one command as there are processes. On SLURM, Open MPI, Kubernetes
or TPU pods, JAX finds the others itself:

    srun python examples/multihost.py

Elsewhere, say where the first one is, how many there are, and which one this is:

    python examples/multihost.py 127.0.0.1:9876 2 0 &
    python examples/multihost.py 127.0.0.1:9876 2 1
"""

import sys
import time

import jax
import jax.numpy as jnp
import lineax as lx

import traceax as tx


def kernel_operator(length_scale):
    x = jax.random.uniform(jax.random.key(0), (2000, 2))
    square = jnp.sum((x[:, None] - x) ** 2, axis=-1)
    kernel = jnp.exp(-square / (2 * length_scale**2)) + 0.1 * jnp.eye(len(x))
    return lx.MatrixLinearOperator(kernel, lx.positive_semidefinite_tag)


def main():
    if len(sys.argv) == 1:
        jax.distributed.initialize()
    else:
        address, num_processes, process_id = sys.argv[1:]
        jax.distributed.initialize(address, int(num_processes), int(process_id))

    # From here on, nothing knows how many processes there are. Each runs the same
    # program on the same arrays and has the same answer.
    execution = tx.Sharded(tx.probe_mesh())

    def log_det(length_scale):
        operator = kernel_operator(length_scale)
        settings = {"k": 32, "num_steps": 30, "key": jax.random.key(1)}
        solution = tx.logdet(operator, execution=execution, **settings)
        return solution.value, solution.std_err

    run = jax.jit(jax.value_and_grad(log_det, has_aux=True))
    jax.block_until_ready(run(0.3))
    start = time.perf_counter()
    (value, std_err), slope = jax.block_until_ready(run(0.3))
    seconds = time.perf_counter() - start
    if jax.process_index() == 0:
        print(f"{jax.process_count()} processes, {jax.device_count()} devices")
        print(f"log-determinant {value:.1f} +- {std_err:.1f}, ", end="")
        print(f"its derivative {slope:.1f}, {seconds:.2f} s")


if __name__ == "__main__":
    main()
