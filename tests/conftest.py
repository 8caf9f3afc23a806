"""Set-up for all tests: random numbers are seeded, a worker has one thread, and SIGINT interrupts."""

import os
import signal
from collections.abc import Iterator

# Some CPUs advertise matrix tiles they may not use; bfloat16 products then die. Must be set before torch is loaded.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import jaxtyping
import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # GPU kernels run in Triton's interpreter
# A shell starts its background jobs with SIGINT ignored, and so would be every process that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

WITHOUT_NUMBERS = ("regard.commands", "regard.training.data", "regard.training", "test_cli", "hostile")
"""Commands, texts, runs and broken files: their numbers are those of layers and models, which have their own tests."""
TRACED = (
    "test_compile", "test_transforms", "test_export", "test_kernels", "test_softmax_kernels", "test_shared_gpu",
)  # fmt: skip
"""Tests of what torch traces, of code that torch.compile makes, and of Triton's interpreter."""
ABOVE = (
    "test_encoder", "test_transformer", "test_t5", "test_vision", "test_davit", "test_trace", "test_trace_huggingface",
    "test_trace_patterns", "test_trace_files", "test_trace_contents", "test_trace_pictures", "test_trace_layers",
    "test_summary", "test_plots", "test_masks",
    "test_mask_structure", "test_mask_arguments", "test_mask_drawing", "test_errors", "test_user_formulas",
    "test_own_mechanism", "test_own_mechanism_files", "test_replay", "test_arm", "test_compiler", "test_imports",
    "test_decoder", "test_checkpoints", "test_checkpoint_dtypes",
    "test_huggingface", "test_gguf", "test_generation", "test_prompt_cache", "test_beams", "test_sampling",
    "test_stop_strings", "test_copies", "test_cost", "test_recurrent", "test_own_state", "test_intervene",
    "test_effects", "test_explorer", "test_explorer_changes", "test_explorer_requests", "test_explorer_server",
    "test_explorer_export", "test_explorer_page", "test_explorer_page_changes", "test_explorer_page_files",
)  # fmt: skip
"""Tests of what computes by layers that have tests of their own, of masks and messages, and of other processors."""


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Tests are `numeric`, and run once more on other instruction sets, unless they or their module are about something
    else."""
    for item in items:
        names = list(vars(item.module).values())
        elsewhere = item.module.__name__ in TRACED + ABOVE or item.get_closest_marker("once") is not None
        if torch in names and not elsewhere and not any(_home(name).startswith(WITHOUT_NUMBERS) for name in names):
            item.add_marker("numeric")


def _home(thing: object) -> str:
    """The module that a module's global is or comes from."""
    home = getattr(thing, "__module__", None) or getattr(thing, "__name__", "")
    return home if isinstance(home, str) else ""


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def own_errors() -> Iterator[None]:
    """The annotations' own checks off, as they are for users: the library's words are under test."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the arguments of a kernel are kept and reused for later launches with the same key. The interpreter
    passes arguments every time, so here each launch is compared with the first launch under its key."""
    from regard.core.kernels import (
        band_attention,
        decode_attention,
        feature_attention,
        launch,
        square_attention,
        step_attention,
    )

    launched: dict = {}
    plain = launch.launch

    def checked(launches, place, kernel, grid, tensors, describe, fresh=()):
        key = id(launches), place, *[None if x is None else x.data_ptr() % 16 for x in tensors]
        _, before = launched.setdefault(
            key, (launches, (kernel, describe()))
        )  # kept alive, so that no other object has its id
        assert before == (kernel, describe()), f"{place} does not tell launches of {kernel.__name__} apart"
        plain(launches, place, kernel, grid, tensors, describe, fresh)

    for module in (band_attention, decode_attention, feature_attention, square_attention, step_attention):
        monkeypatch.setattr(module, "launch", checked)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels for GPUs serve on this CPU too, and calls like one before are run again: the names of paths that were
    chosen for the others, in order."""
    from regard.core import attention
    from regard.core.calls import repeats
    from regard.core.mechanisms import softmax
    from regard.core.paths import band, gpu, reference, split

    names: list[str] = []
    choose = attention.choose

    def noted(call, path):
        names.append(choose(call, path).name)
        return choose(call, path)

    monkeypatch.setattr(gpu, "missing", lambda call: None)
    monkeypatch.setattr(softmax, "PATHS", (split.PATH, band.PATH, reference.PATH))
    monkeypatch.setattr(repeats, "_launched", lambda q: True)
    monkeypatch.setattr(repeats, "_kept_runs", {})
    monkeypatch.setattr(attention, "choose", noted)
    return names
