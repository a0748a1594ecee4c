import gc
import os
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path


# LAPACK's own threads, times the workers of pytest-xdist, would wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Nearly all of the time is compilation. Without optimisation it takes half. With the
# older way to emit fused operations it takes a third of that, and in one piece a quarter
# less again; later, without XLA's fusions for a library of kernels, a quarter less. An
# unknown flag ends the process. Eight simulated devices, of which most tests use one.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=8 "
    + {
        "0.10": "--xla_cpu_use_fusion_emitters=false"
        " --xla_cpu_parallel_codegen_split_count=1",
        "0.12": "--xla_cpu_experimental_ynn_fusion_type=",
    }.get(version("jaxlib")[:4], ""),
)

import equinox.internal as eqxi
import hypothesis
import jax
import jaxtyping
import pytest


jax.config.update("jax_enable_x64", True)
# It would look through all that tracing has made, for a tenth of the time: see below.
gc.disable()

# Random operators: a short profile, and `--hypothesis-profile=long`. A compilation takes
# longer than any deadline, and what was found before is found again by the seed.
_EVERY = {"deadline": None, "database": None}
hypothesis.settings.register_profile("short", max_examples=3, derandomize=True, **_EVERY)
hypothesis.settings.register_profile("long", max_examples=50, **_EVERY)
hypothesis.settings.load_profile("short")

# Shapes and dtypes in annotations are checked at run time, except where users' mistakes
# arrive: those modules have messages of their own, which are tested.
_CHECKED = (
    "_core.flat",
    "_core.moments",
    "_core.quantity",
    "_core.sampler",
    "_core.sign_moments",
    "_core.solution",
    "_estimators",
    "_functions.all_eigenvalues",
    "_functions.base",
    "_functions.deflated_forms",
    "_functions.deflation_budget",
    "_functions.krylov_aware",
    "_functions.slq",
    "_krylov.arnoldi_recurrence",
    "_krylov.block_lanczos",
    "_krylov.golub_kahan_recurrence",
    "_krylov.lanczos_recurrence",
    "_numerics",
    "_operators.batches",
    "_operators.curvature",
    "_operators.data_gram",
    "_operators.determinant",
    "_operators.diagonal",
    "_operators.gram",
    "_operators.stacked",
    "_quadrature.quadratic_form",
    "_quadrature.rules",
    "_quadrature.tridiagonal",
    "_run.exact",
    "_run.execution",
    "_run.gradient",
    "_run.sharded",
)
jaxtyping.install_import_hook(
    [f"traceax.{name}" for name in _CHECKED], "beartype.beartype"
)


ALL_ITEMS = pytest.StashKey[list[pytest.Item]]()


def pytest_addoption(parser):
    parser.addoption(
        "--all", action="store_true", help="slow tests too, which are most of the time"
    )


def kept(marker):
    """Patterns of the cases that are not slow, of a test marked
    `@pytest.mark.slow(but=...)`."""
    patterns = marker.kwargs.get("but", ())
    return (patterns,) if isinstance(patterns, str) else patterns


def case_of(item):
    """What a name of a test has in brackets."""
    return item.name.partition("[")[2].removesuffix("]")


def is_slow(item):
    marker = item.get_closest_marker("slow")
    return marker is not None and not any(
        fnmatchcase(case_of(item), pattern) for pattern in kept(marker)
    )


def pytest_collection_modifyitems(config, items):
    """Without `--all` slow tests are left out, unless they are asked for by name."""
    config.stash[ALL_ITEMS] = list(items)
    if config.option.all or any("::" in arg for arg in config.args):
        return
    config.hook.pytest_deselected(items=[item for item in items if is_slow(item)])
    items[:] = [item for item in items if not is_slow(item)]


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "error")
    # Cases of one test call from the same line.
    line = "ignore:.* was compiled 3 times from this line"
    config.addinivalue_line("filterwarnings", line)
    # What one worker has compiled, another one or the next run reads, unless it is just
    # being written.
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent")
    folder = config.cache.mkdir("compiled")
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        # Locations of up to 100 frames of each operation take time.
        "jax_traceback_in_locations_limit": 0,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


def pytest_collection_finish():
    """What is imported and collected stays, and need not be looked through for garbage
    after each module."""
    gc.collect()
    gc.freeze()


def forget_compiled_programs():
    jax.clear_caches()
    gc.collect()


def forget_if_many():
    """Programs hold memory maps of the process, of which Linux allows 65530: with more,
    the next compilation is a segmentation fault."""
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_text().splitlines()) > 20000:
        forget_compiled_programs()


@pytest.fixture(autouse=True, scope="module")
def after_each_module():
    """Modules share few programs."""
    yield
    forget_compiled_programs()


@pytest.fixture
def getkey():
    getkey = eqxi.GetKey(20261121)
    print(f"seed of getkey: {getkey.seed}")
    return getkey


@pytest.fixture
def without_exact_answers(monkeypatch):
    """Chosen steps that are too few are told, as for operators that are too large for the
    exact answer. Programs do not depend on what is patched."""
    from traceax._api.diagonal_of_function_task import DiagonalOfFunction
    from traceax._api.log_trace_exp_task import LogTraceExp
    from traceax._api.trace_difference import _TraceDifference
    from traceax._functions.task import AbstractFunctionTask
    from traceax._run.call import _compiled

    tasks = AbstractFunctionTask, _TraceDifference, DiagonalOfFunction, LogTraceExp
    for task in tasks:
        monkeypatch.setattr(task, "exact_limit", lambda self, operator: 0)
    _compiled._cached.clear_cache()
    yield
    _compiled._cached.clear_cache()


@pytest.fixture
def as_users_call():
    """Without the run-time checks of annotations, which would come before ours."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
