"""`rg.effects`: every head silenced once says what silencing them one by one says."""

import pytest
import torch

import regard as rg
from intervened_models import builders, decoder, loud, run, tokens
from regard.inference.interventions.change import ACTIVE


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    assert not ACTIVE


def test_effects_leave_every_module_in_its_mode():
    model = decoder().train()
    model.stack.layers[0].eval()
    modes = [module.training for module in model.modules()]
    rg.effects(model, tokens(1))
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("builder", builders().values(), ids=builders())
def test_effects_are_those_of_silencing_one_by_one(builder):
    model, ids = builder(), tokens(1)
    measured = rg.effects(model, ids, batch_size=5)
    assert len(measured.heads) == 12
    assert measured.grid().shape == (3, 4)
    before = run(model, ids).log_softmax(-1)
    for effect in measured.heads[::3]:
        with rg.intervene(model, layers=[effect.layer], heads=[effect.head], silence=True):
            after = run(model, ids).log_softmax(-1)
        divergence = (before.exp() * (before - after)).sum(-1).mean()
        assert effect.divergence == pytest.approx(float(divergence), rel=1e-3, abs=1e-6)
        likeliest = after[0, -1].argmax()
        assert effect.top[0] == (str(int(likeliest)), pytest.approx(float(after[0, -1, likeliest].exp()), rel=1e-4))


def test_effects_of_pictures_windows_are_those_of_silencing_one_by_one():
    model = loud(
        rg.DaViT(
            rg.DaViTConfig(num_heads=(2,) * 4, num_groups=(2,) * 4, embedding_dim=(8,) * 4, num_layers=(1,) * 4)
        ).eval()
    )
    image = torch.randn(1, 3, 32, 32)
    measured = rg.effects(model, image)
    before = model(image)
    effect = measured.of(layer=0, head=1)
    with rg.intervene(model, layers=[0], heads=[1], silence=True):
        distance = (model(image) - before).norm() / before.norm()
    assert effect.distance == pytest.approx(float(distance), rel=1e-3)


def test_effects_stop_when_they_are_watched_so():
    def watch(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rg.effects(decoder(), tokens(1), batch_size=1, watch=watch)


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ((), {}, "inputs: expected what the model takes"),
        ((torch.zeros(2, 3, dtype=torch.long),), {}, "inputs: expected one sequence"),
        (("a text",), {}, "inputs: expected tensors for a model without a tokenizer"),
        (("a text", "another"), {}, "inputs: expected one text, got 2 texts"),
        ((torch.zeros(1, 3, dtype=torch.long),), {"batch_size": 0}, "batch_size: expected"),
    ],
)
def test_bad_inputs_of_effects_are_one_clear_error(inputs, options, message):
    with pytest.raises(ValueError, match=message):
        rg.effects(decoder(), *inputs, **options)


def test_effects_are_drawn_and_printed():
    measured = rg.effects(decoder(), tokens(1))
    assert "the strongest first" in repr(measured)
    assert "<table" in measured._repr_html_()
    figure = measured.plot()
    assert figure.get_suptitle() == "Every head of Decoder silenced once"
    assert figure.axes[0].get_xlabel() == "head"
