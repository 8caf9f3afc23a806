"""Encoders agree with transformers, and with themselves: padded, batched, permuted, exported."""

import re

import pytest
import torch
import transformers

import peers
import regard as rg
from regard.checkpoints import resolve
from regard.mechanisms import REGISTRY

SENTENCES = [
    "A man is eating food.",
    "Someone is having a meal.",
    "The stock market fell sharply on Monday, and analysts expect it to go on falling for some weeks.",
    "Un chat dort sur le canapé.",
    "x",
    "",
]


def made(**changes: object) -> rg.Encoder:
    torch.manual_seed(0)
    sizes = {"vocabulary_size": 61, "embedding_dim": 16, "num_layers": 3, "num_heads": 4, "context_length": 40}
    model = rg.Encoder(rg.EncoderConfig.bert(**{**sizes, **changes})).double().eval()
    model.initialise(0.4)
    return model


def heads(theirs: object, tokens: torch.Tensor, **options: torch.Tensor) -> dict[str, torch.Tensor]:
    """What transformers gives, by our names."""
    out = theirs(tokens, output_hidden_states=True, **options)
    found = {"hidden": out.hidden_states[-1]}
    if "PreTraining" in type(theirs).__name__:
        found["masked_words"] = out.prediction_logits
        found["next_sentence"] = out.get("seq_relationship_logits", out.get("sop_logits"))
    elif "MaskedLM" in type(theirs).__name__:
        found["masked_words"] = out.logits
    elif "Classification" in type(theirs).__name__:
        found["classify"] = out.logits
    else:
        found["pooled"] = out.pooler_output
    return found


@pytest.mark.parametrize("name", peers.ENCODERS)
@torch.no_grad()
def test_parity_with_transformers(name, tmp_path):
    theirs = peers.encoder(name)
    ours = rg.load(peers.saved(theirs, tmp_path / "model"))
    tokens = peers.sequences()
    kinds = torch.randint(theirs.config.type_vocab_size, tokens.shape)
    right = torch.arange(70) < torch.tensor([[70], [31], [1]])
    left, positions = peers.left_padded(3, 70, 32, 7, 0)
    cases = (
        (torch.ones_like(right), {}, None),
        (right, {"attention_mask": right.long()}, rg.padding([70, 31, 1])),
        (left, {"attention_mask": left.long(), "position_ids": positions}, rg.padding(valid=left)),
    )
    back = None
    for valid, options, mask in cases:
        expected = heads(theirs, tokens, token_type_ids=kinds, **options)
        hidden = ours(tokens, kinds, mask)
        found = {"hidden": hidden}
        for head in expected.keys() - {"hidden"}:
            found[head] = getattr(ours, head)(hidden, *(() if head == "masked_words" else (mask,)))
        for head, tensor in expected.items():
            keep = valid if tensor.ndim == 3 else slice(None)
            if tensor.ndim == 2 and not valid[:, 0].all():  # theirs stand on the first column, which is padding here
                first = valid.long().argmax(-1)
                rolled = torch.stack([row.roll(-int(at)) for row, at in zip(tokens, first, strict=True)])
                turned = torch.stack([row.roll(-int(at)) for row, at in zip(kinds, first, strict=True)])
                kept = (torch.arange(70) < valid.sum(-1, keepdim=True)).long()
                tensor = heads(theirs, rolled, token_type_ids=turned, attention_mask=kept)[head]
            assert (found[head] - tensor)[keep].abs().max() <= 1e-10, head
        if back is None:
            folder = rg.save(ours, tmp_path / "export", layout="huggingface")
            back = type(theirs).from_pretrained(folder)
        again = heads(back, tokens, token_type_ids=kinds, **options)
        assert all(
            (again[head] - expected[head])[valid if expected[head].ndim == 3 else ...].abs().max() <= 1e-12
            for head in again
        )


@pytest.mark.parametrize("mechanism", REGISTRY)
@torch.no_grad()
def test_padded_is_unpadded_and_a_batch_is_one_by_one(mechanism):
    model = made(mechanism=mechanism)
    tokens = peers.sequences(4, 21, 61)
    lengths = [21, 8, 1, 0]
    together = model(tokens, mask=rg.padding(lengths))
    for row, length in enumerate(lengths):
        alone = model(tokens[row : row + 1, :length])
        assert length == 0 or (alone[0] - together[row, :length]).abs().max() <= 1e-10
        assert not together[row, length:].any()
    left = torch.arange(21) >= 21 - torch.tensor(lengths)[:, None]
    moved = torch.zeros_like(tokens)
    for row, length in enumerate(lengths):
        moved[row, 21 - length :] = tokens[row, :length]
    other = model(moved, mask=rg.padding(valid=left))
    assert (other[left] - together[torch.arange(21) < torch.tensor(lengths)[:, None]]).abs().max() <= 1e-10


@torch.no_grad()
def test_without_positions_tokens_may_change_places():
    model = made()
    model.positions.weight.zero_()
    tokens, order = peers.sequences(2, 15, 61), torch.randperm(15)
    assert (model(tokens[:, order]) - model(tokens)[:, order]).abs().max() <= 1e-12


def test_shared_layers_are_shared():
    model = made(num_shared=1, num_layers=5)
    assert len(model.stack.blocks) == 1
    assert {id(block) for block in model.stack.layers} == {id(model.stack.blocks[0])}
    two = made(num_shared=2, num_layers=5)
    assert [list(two.stack.blocks).index(block) for block in two.stack.layers] == [0, 0, 0, 1, 1]


def test_gradients_of_a_ragged_batch_are_those_of_its_rows():
    model = made()
    tokens = peers.sequences(2, 9, 61)
    model(tokens, mask=rg.padding([9, 4])).square().sum().backward()
    together = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    model.zero_grad()
    (model(tokens[:1]).square().sum() + model(tokens[1:, :4]).square().sum()).backward()
    alone = [one.grad for one in model.parameters() if one.grad is not None]
    assert all((a - b).abs().max() <= 1e-9 for a, b in zip(together, alone, strict=True))


def test_a_head_that_is_not_there_is_one_error():
    model = made(masked_words=False, next_sentence=False)
    hidden = model(peers.sequences(1, 4, 61))
    for head in ("masked_words", "next_sentence", "classify"):
        with pytest.raises(ValueError, match="model: expected one with"):
            getattr(model, head)(hidden)
    with pytest.raises(ValueError, match="expected one with a tokenizer"):
        model.embed(["a"])
    with pytest.raises(ValueError, match="pooler: expected True"):
        rg.EncoderConfig(vocabulary_size=9, embedding_dim=4, num_layers=1, num_heads=1, num_classes=2)
    with pytest.raises(ValueError, match="tokens: expected at most 40 tokens"):
        model(torch.zeros(1, 41, dtype=torch.long))
    with pytest.raises(ValueError, match="segments: expected tokens from 0 to 1"):
        model(torch.zeros(1, 3, dtype=torch.long), torch.full((1, 3), 2))
    with pytest.raises(ValueError, match=r"segments: expected one a token, \(1, 3\), got \(1, 2\)"):
        model(torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="segments: expected none"):
        made(num_segments=0)(torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long))


@torch.no_grad()
def test_minilm_embeds_sentences_as_transformers_does():
    ours = rg.load("minilm")
    folder = resolve("minilm")
    theirs, tokenizer = (
        transformers.AutoModel.from_pretrained(folder),
        transformers.AutoTokenizer.from_pretrained(folder),
    )
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    hidden, kept = theirs(**batch).last_hidden_state, batch["attention_mask"][..., None]
    expected = torch.nn.functional.normalize((hidden * kept).sum(1) / kept.sum(1), dim=-1)
    found = ours.embed(SENTENCES)
    assert (found - expected).abs().max() <= 1e-5
    assert (ours.embed(SENTENCES[:1]) - found[:1]).abs().max() <= 1e-5
    likeness = found @ found.T
    assert likeness[0, 1] > 0.6 > 0.2 > likeness[0, 2].abs()
    assert ours.embed([]).shape == (0, 384)
    for wrong in ("one text", ["a", 3]):
        with pytest.raises(ValueError, match="texts: expected a list of texts"):
            ours.embed(wrong)
    with pytest.raises(ValueError, match="batch_size: expected a whole number"):
        ours.embed(["a"], batch_size=0)


@pytest.mark.parametrize(
    ("reaction", "expected"),
    [
        # The example of its documentation: the sulphur takes a fluorine's place beside the nitrogen of the ring.
        (
            "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F",
            [0, 1, 2, 3, 15, 14, 13, 12, 11, 10, 9],
        ),
        # An ester loses its tert-butyl; everything else stays as it was.
        (
            "C1COCCO1.CC(C)(C)OC(=O)CONC(=O)NCc1cccc2ccccc12.Cl>>O=C(O)CONC(=O)NCc1cccc2ccccc12",
            [12, 11, 10, *range(13, 30)],
        ),
    ],
)
@torch.no_grad()
def test_rxnmapper_maps_atoms_with_one_head(reaction, expected):
    """In layer 11, head 6, each atom of the product looks at the atom of the reactants it comes from."""
    model = rg.load("rxnmapper")
    ids = model.tokenizer.encode(reaction)
    names = model.tokenizer.tokens(ids)
    with rg.trace(model, layers=[10], heads=[5]) as trace:
        model(torch.tensor([ids]))
    weights, middle = trace.layers[10].weights[0, 0], names.index(">>")
    atoms = [
        place
        for place, name in enumerate(names)
        if re.fullmatch(r"\[[A-Z][a-z]?[+-]\]|[BCNOSPFI]|Cl|Br|[bcnosp]", name)
    ]
    reactants, product = [p for p in atoms if p < middle], [p for p in atoms if p > middle]
    assert weights[product][:, reactants].argmax(-1).tolist() == expected


@torch.no_grad()
def test_antiberty_fills_in_residues():
    model = rg.load("antiberty")
    heavy = "EVQLVESGGGLVQPGGSLRLSCAASGFTFSSYAMSWVRQAPGKGLEWVSAISGSGGSTYYADSVKGRFTISRDNSKNTLYLQMNSLRAEDTAVYYCAK"
    ids = torch.tensor([model.tokenizer.encode(heavy)])
    hidden = model(ids)
    right = (model.masked_words(hidden).argmax(-1) == ids)[0, 1:-1]
    assert right.float().mean() > 0.9
    places = range(5, 60, 6)
    hits = 0
    for place in places:
        covered = ids.clone()
        covered[0, place] = model.tokenizer.mask
        hits += int(model.masked_words(model(covered))[0, place].argmax() == ids[0, place])
    assert hits >= 8


@pytest.mark.parametrize("mechanism", ["softmax", "elu"])
@torch.no_grad()
def test_with_a_window_tokens_see_their_neighbours_and_the_first(mechanism):
    model = made(window=2, num_layers=1, mechanism=mechanism)
    tokens = peers.sequences(1, 12, 61)
    before = model(tokens)
    other = tokens.clone()
    other[0, 8] = (other[0, 8] + 1) % 61
    changed = (model(other) - before)[0].abs().amax(-1) > 0
    assert changed.nonzero().flatten().tolist() == [0, 6, 7, 8, 9, 10]
    other = tokens.clone()
    other[0, 0] = (other[0, 0] + 1) % 61
    assert ((model(other) - before)[0].abs().amax(-1) > 0).all()


@torch.no_grad()
def test_a_window_as_wide_as_the_text_is_none():
    tokens = peers.sequences(2, 15, 61)
    assert (made(window=14)(tokens) - made()(tokens)).abs().max() <= 1e-12
    assert (made(window=2)(tokens) - made()(tokens)).abs().max() > 1e-3


@torch.no_grad()
def test_padded_is_unpadded_with_a_window_on_either_side():
    model = made(window=2, num_kv_heads=2)
    tokens, lengths = peers.sequences(4, 21, 61), [21, 8, 1, 0]
    together = model(tokens, mask=rg.padding(lengths))
    left = torch.arange(21) >= 21 - torch.tensor(lengths)[:, None]
    moved = torch.zeros_like(tokens)
    for row, length in enumerate(lengths):
        moved[row, 21 - length :] = tokens[row, :length]
        alone = model(tokens[row : row + 1, :length])
        assert length == 0 or (alone[0] - together[row, :length]).abs().max() <= 1e-10
    other = model(moved, mask=rg.padding(valid=left))
    assert (other[left] - together[torch.arange(21) < torch.tensor(lengths)[:, None]]).abs().max() <= 1e-10


def test_the_new_fields_of_a_config_are_checked_written_and_saved(tmp_path):
    model = made(num_kv_heads=2, window=3, num_classes=2, class_names=("no", "yes"), inverted_sentence=True)
    assert rg.EncoderConfig.from_json(model.config.to_json()) == model.config
    again = rg.load(rg.save(model, tmp_path / "own"))
    assert again.config == model.config
    tokens = peers.sequences(2, 9, 61)
    assert torch.equal(again(tokens), model(tokens))
    hidden = model(tokens)
    assert model.inverted_sentence(hidden).shape == (2, 2)
    for own in ({"num_kv_heads": 2}, {"window": 3}, {"inverted_sentence": True}):
        with pytest.raises(ValueError, match="model: expected the form of a Hugging Face model"):
            rg.save(made(**own), tmp_path / "theirs", layout="huggingface")
    former = {key: value for key, value in model.config.to_json().items() if key not in ("window", "class_names")}
    assert rg.EncoderConfig.from_json(former).window is None
    for changes, words in (
        ({"num_kv_heads": 3}, r"num_kv_heads: expected a divisor of num_heads = 4, got 3"),
        ({"window": 0}, "window: expected at least 1 token, got 0"),
        ({"window": 2.5}, "window: expected"),
        ({"window": 2, "mechanism": "channel"}, "window: expected none with Channel"),
        ({"num_classes": 3, "class_names": ("a", "b")}, "class_names: expected 3"),
        ({"pooler": False, "next_sentence": False, "inverted_sentence": True}, "pooler: expected True"),
    ):
        with pytest.raises(ValueError, match=words):
            made(**changes)


def test_class_names_travel_in_hugging_face_folders(tmp_path):
    model = made(masked_words=False, next_sentence=False, num_classes=3, class_names=("red", "green", "blue"))
    folder = rg.save(model, tmp_path / "theirs", layout="huggingface")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert theirs.config.id2label == {0: "red", 1: "green", 2: "blue"}
    assert rg.load(folder).config.class_names == ("red", "green", "blue")
    nameless = made(masked_words=False, next_sentence=False, num_classes=3)
    assert rg.load(rg.save(nameless, tmp_path / "plain", layout="huggingface")).config.class_names == ()


def test_a_window_costs_less():
    sizes = {"vocabulary_size": 61, "embedding_dim": 16, "num_layers": 2, "num_heads": 4}
    whole, near = (rg.Encoder(rg.EncoderConfig(**sizes, window=window)).summary(512) for window in (None, 8))
    assert near.flops < 0.5 * whole.flops
