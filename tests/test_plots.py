"""Figures: what they show is what the library computes."""

import json
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from matplotlib.text import Annotation
from PIL import Image

import regard as rg
from regard.core.cost import heads_label, mode_crossover, mode_work
from regard.core.cost_figure import cost_figure
from regard.core.files import save_figure
from regard.core.masks.drawing import masks_figure
from regard.core.weights_figure import weights_figure
from regard.training.curves import curves_figure

DOCS = Path(__file__).parent.parent / "docs"
sys.path.append(str(DOCS))
import explorer_pictures  # noqa: E402
import pictures  # noqa: E402

MECHANISMS = {"softmax": rg.Softmax(), "quadratic": rg.Quadratic()}
TOKENS = ["to", "be", "or", "not", "to", "be"]


def panel() -> torch.Tensor:
    q = k = torch.randn(1, 1, len(TOKENS), 8, generator=torch.Generator().manual_seed(0))
    return rg.weights(q, k, mask=rg.causal)[0, 0]


def texts(axes: object) -> list[str]:
    return [text.get_text() for text in axes.texts]  # type: ignore[attr-defined]


def test_weights_are_drawn_as_they_are_and_hidden_pairs_are_not() -> None:
    weights = panel()
    figure = weights_figure({"softmax": weights}, TOKENS, mask=rg.causal)
    image = figure.axes[0].images[0].get_array()
    visible = rg.causal.draw(len(TOKENS)).visible
    assert torch.equal(torch.from_numpy(~image.mask), visible)
    assert torch.equal(torch.from_numpy(image.filled(0)), weights.masked_fill(~visible, 0))


def test_weights_name_every_token() -> None:
    axes = weights_figure({"softmax": panel()}, TOKENS).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == TOKENS
    assert [label.get_text() for label in axes.get_yticklabels()] == TOKENS


def test_weights_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"panels: expected weights of shape \(2, 2\), got \(6, 6\) for 'softmax'"):
        weights_figure({"softmax": panel()}, ["two", "tokens"])


def test_masks_are_drawn_as_they_are() -> None:
    masks = {"causal": rg.causal, "window": rg.window(before=2, after=1)}
    figure = masks_figure(masks, 8)
    for axes, mask in zip(figure.axes, masks.values(), strict=True):
        assert torch.equal(torch.from_numpy(axes.images[0].get_array().filled()), mask.draw(8).visible)


def test_cost_lines_are_the_cost_and_dots_the_crossover() -> None:
    work = rg.Work(num_heads=8, num_kv_heads=8, mask=rg.causal)
    figure = cost_figure(MECHANISMS, work, modes=["prefill"], shortest=512, longest=32768)
    (axes,) = figure.axes
    lines = [line for line in axes.lines if len(line.get_xdata()) > 2]
    for line, mechanism in zip(lines, MECHANISMS.values(), strict=True):
        assert line.get_ydata()[-1] == rg.cost(mechanism, mode_work(work, "prefill", 32768)).flops
    crossover = rg.crossover(rg.Softmax(), rg.Quadratic(), mode_work(work, "prefill", 2))
    assert [int(line.get_xdata()[0]) for line in axes.lines if line.get_marker() == "o"] == [crossover]
    assert f"{crossover:,}" in texts(axes)


def test_cost_lines_that_coincide_are_drawn_once_and_named_together() -> None:
    figure = cost_figure(MECHANISMS, rg.Work(mask=rg.causal), kv_heads=(32, 8, 1), longest=8192)
    prefill, decode = figure.axes
    assert "softmax, any heads" in texts(prefill)
    assert {"softmax, MHA", "softmax, GQA-8", "softmax, MQA"} <= set(texts(decode))


def test_cost_names_at_the_lines_ends_do_not_touch() -> None:
    figure = cost_figure(MECHANISMS, rg.Work(mask=rg.causal), kv_heads=(32, 16, 8, 4, 2, 1), longest=8192)
    for axes in figure.axes:
        heights = sorted(text.get_position()[1] for text in axes.texts if not isinstance(text, Annotation))
        assert all(high - low > 0.04 for low, high in pairwise(heights))


@pytest.mark.parametrize(("shortest", "longest"), [(0, 8), (8, 8), (9, 8)])
def test_cost_over_no_range_is_refused(shortest: int, longest: int) -> None:
    with pytest.raises(ValueError, match="shortest: expected"):
        cost_figure(MECHANISMS, rg.Work(), shortest=shortest, longest=longest)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="mode: expected one of prefill, decode, got 'train'"):
        mode_work(rg.Work(), "train", 8)


def test_decode_crossover_goes_by_bytes() -> None:
    work = rg.Work(mask=rg.causal)
    length = mode_crossover(rg.Softmax(), rg.Quadratic(), work, "decode")
    assert length is not None
    before, at = (
        [rg.cost(mechanism, mode_work(work, "decode", tokens)).bytes for mechanism in MECHANISMS.values()]
        for tokens in (length - 1, length)
    )
    assert before[1] >= before[0]
    assert at[1] < at[0]


def test_one_head_is_multi_head() -> None:
    assert heads_label(1, 1) == "MHA"


@pytest.mark.parametrize("losses", [(9.0, 0.11), (3.4, 3.1)], ids=["decades", "within one"])
def test_losses_have_plain_numbers_at_their_axis(losses: tuple[float, float]) -> None:
    figure = curves_figure({"run": [{"step": step, "loss": loss} for step, loss in enumerate(losses)]})
    figure.draw_without_rendering()
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels(which="both")]
    low, high = figure.axes[0].get_ylim()
    assert len([label for label in labels if low <= float(label) <= high]) >= 2


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_figures_save_in_the_usual_formats(tmp_path: Path, suffix: str) -> None:
    figure = masks_figure({"causal": rg.causal}, 4, title="one")
    assert save_figure(figure, tmp_path / f"mask.{suffix}").stat().st_size > 0


def test_every_picture_of_the_docs_has_a_maker() -> None:
    screenshots = {f"explorer/{name}" for name in explorer_pictures.PICTURES}
    assert {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.png")} == set(pictures.PICTURES) | screenshots


def test_every_picture_that_the_texts_show_is_there() -> None:
    for text in (DOCS.parent / "README.md", *DOCS.rglob("*.md")):
        for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text.read_text()):
            assert (text.parent / name).is_file(), f"{text} shows {name}"


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_shows_what_the_code_and_the_results_say_now(name: str) -> None:
    stored = json.loads(Image.open(DOCS / name).text[pictures.SHOWN])  # type: ignore[attr-defined]
    now = pictures.shown(pictures.PICTURES[name]())
    assert stored["words"] == now["words"], "older than the code: make pictures"
    for kind in ("lines", "maps"):
        assert len(stored[kind]) == len(now[kind])
        for point, other in zip(stored[kind], now[kind], strict=True):
            assert point == pytest.approx(other, rel=1e-5), "older than the code: make pictures"


def test_a_picture_knows_the_numbers_that_stand_in_it() -> None:
    work = rg.Work(mask=rg.causal, num_kv_heads=8)
    number = mode_crossover(rg.Softmax(), rg.Quadratic(), work, "prefill")
    stored = json.loads(Image.open(DOCS / "cost.png").text[pictures.SHOWN])  # type: ignore[attr-defined]
    assert f"{number:,}  GQA-8" in stored["words"]
