"""Sampling: the right distribution, top-k, top-p and min-p, penalties and log-probabilities."""

import pytest
import torch
import transformers

import regard as rg
from generating import PROMPTS, SIZES, made
from regard.inference.generation.sampling import Sampling


def test_draws_follow_the_models_distribution():
    """Chi-square of 20,000 first tokens, and of the second given the first, against the model's own probabilities."""
    torch.manual_seed(2)
    model = rg.Decoder(rg.DecoderConfig(**{**SIZES, "vocabulary_size": 12})).double().eval()
    model.initialise(4)
    with torch.no_grad():
        wanted = (model(torch.tensor([[3, 1]]))[0, -1] / 0.9).softmax(-1)
    texts = rg.generate(model, [[3, 1]], max_new_tokens=2, temperature=0.9, n=20000, seed=1)
    first = torch.bincount(torch.tensor([text.tokens[0] for text in texts]), minlength=12)
    assert _chi_square(first, wanted) < 38  # 11 degrees of freedom: exceeded once in 10,000
    favourite = int(first.argmax())
    with torch.no_grad():
        after = (model(torch.tensor([[3, 1, favourite]]))[0, -1] / 0.9).softmax(-1)
    second = [text.tokens[1] for text in texts if text.tokens[0] == favourite]
    assert _chi_square(torch.bincount(torch.tensor(second), minlength=12), after) < 38
    assert _chi_square(first, after.roll(1)) > 38


def _chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"top_k": 7}, transformers.TopKLogitsWarper(7)),
        ({"top_p": 0.7}, transformers.TopPLogitsWarper(0.7)),
        ({"min_p": 0.1}, transformers.MinPLogitsWarper(0.1)),
    ],
)
def test_cuts_are_those_of_transformers(ours, theirs):
    for seed in range(20):
        logits = 3 * torch.randn(50, generator=torch.Generator().manual_seed(seed))
        expected = theirs(None, logits[None])[0].isfinite()
        assert torch.equal(Sampling(temperature=1.0, **ours).cut(logits).isfinite(), expected)


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-30])
@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_the_likeliest_token_is_drawn_at_any_small_temperature(temperature, options):
    logits = torch.tensor([[10.0, 20.0, 30.0], [-10.0, -30.0, -20.0], [1e38, 2e38, -3e38]])
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
    assert Sampling(temperature=temperature, **options).draw(logits, generators).tolist() == [2, 0, 1]


def test_the_repetition_penalty_is_that_of_transformers():
    logits, seen = torch.randn(30), [3, 4, 4, 29]
    expected = transformers.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([seen]), logits[None])[0]
    assert torch.allclose(Sampling(repetition_penalty=1.7).penalised(logits, seen), expected)


@torch.no_grad()
def test_log_probabilities_are_the_models():
    model = made("gqa")
    texts = rg.generate(model, [PROMPTS[0]], max_new_tokens=6, temperature=2.0, top_k=5, seed=0, log_probabilities=True)
    tokens = torch.tensor([[*PROMPTS[0], *texts[0].tokens]])
    scores = model(tokens).log_softmax(-1)[0, 2:-1].gather(1, tokens[0, 3:, None])[:, 0]
    assert texts[0].log_probabilities == pytest.approx(scores.tolist(), abs=1e-10)
    assert rg.generate(model, [PROMPTS[0]], max_new_tokens=2)[0].log_probabilities is None


@torch.no_grad()
@pytest.mark.parametrize("alternatives", [1, 4, 10**6])
def test_alternatives_are_the_likeliest_tokens_of_each_step(alternatives):
    model = made("gqa")
    options = {"max_new_tokens": 5, "temperature": 2.0, "seed": 0, "log_probabilities": True}
    texts = rg.generate(model, PROMPTS, alternatives=alternatives, **options)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        probabilities = model(torch.tensor([[*prompt, *text.tokens]])).softmax(-1)[0, len(prompt) - 1 : -1]
        expected = probabilities.topk(min(alternatives, probabilities.shape[-1]))
        assert [[token for token, _ in step] for step in text.alternatives] == expected.indices.tolist()
        for step, values in zip(text.alternatives, expected.values.tolist(), strict=True):
            assert [probability for _, probability in step] == pytest.approx(values, abs=1e-10)
    plain = rg.generate(model, PROMPTS, **options)
    assert [text.tokens for text in plain] == [text.tokens for text in texts]
    assert plain[0].alternatives is None


@pytest.mark.parametrize("vocabulary", [300, 5000])
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
def test_cuts_and_draws_of_rows_are_those_of_each_alone_to_the_last_bit(vocabulary, spread):
    logits = spread * torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(3))
    logits[1] = logits[1].round()  # ties at every border
    for options in ({"top_p": 0.9}, {"top_p": 0.999}, {"top_p": 1.0}, {"top_k": 30, "top_p": 0.7}, {"min_p": 0.2}, {}):
        sampling = Sampling(temperature=0.7, **options)
        cut = sampling.cut(logits)
        assert torch.equal(cut, torch.stack([sampling.cut(row) for row in logits]))
        if options == {"top_p": 1.0}:
            assert cut.isfinite().all()
        elif options.keys() == {"top_p"}:  # by sorting everything
            ordered = (logits.double() / 0.7).sort(descending=True).values
            before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
            kept = (before < options["top_p"]).sum(-1)
            least = ordered.gather(-1, kept[:, None] - 1)
            assert torch.equal(cut.isfinite(), logits.double() / 0.7 >= least)
        together = sampling.draw(logits, [torch.Generator().manual_seed(seed) for seed in range(5)])
        for seed, row in enumerate(logits):
            assert int(together[seed]) == int(sampling.draw(row[None], [torch.Generator().manual_seed(seed)]))
