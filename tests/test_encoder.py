"""Encoders agree with transformers, and with themselves: padded, batched, permuted, exported."""

import itertools
import json
import re
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import peers
import regard as rg
from regard.checkpoints import resolve
from regard.core.mechanisms import REGISTRY
from regard.models.encoder import POOLINGS, pool

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
    model.initialise(20)
    return model


def heads(theirs: object, tokens: torch.Tensor, **options: torch.Tensor) -> dict[str, torch.Tensor]:
    """What transformers gives, by our names."""
    out = theirs(tokens, output_hidden_states=True, **options)
    outputs = {"hidden": out.hidden_states[-1]}
    if "PreTraining" in type(theirs).__name__:
        outputs["masked_words"] = out.prediction_logits
        outputs["next_sentence"] = out.get("seq_relationship_logits", out.get("sop_logits"))
    elif "MaskedLM" in type(theirs).__name__:
        outputs["masked_words"] = out.logits
    elif "Classification" in type(theirs).__name__:
        outputs["classify"] = out.logits
    else:
        outputs["pooled"] = out.pooler_output
    return outputs


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
        outputs = {"hidden": hidden}
        for head in expected.keys() - {"hidden"}:
            outputs[head] = getattr(ours, head)(hidden, *(() if head == "masked_words" else (mask,)))
        for head, tensor in expected.items():
            keep = valid if tensor.ndim == 3 else slice(None)
            if tensor.ndim == 2 and not valid[:, 0].all():  # theirs stand on the first column, which is padding here
                first = valid.long().argmax(-1)
                rolled = torch.stack([row.roll(-int(at)) for row, at in zip(tokens, first, strict=True)])
                turned = torch.stack([row.roll(-int(at)) for row, at in zip(kinds, first, strict=True)])
                kept = (torch.arange(70) < valid.sum(-1, keepdim=True)).long()
                tensor = heads(theirs, rolled, token_type_ids=turned, attention_mask=kept)[head]
            assert (outputs[head] - tensor)[keep].abs().max() <= 1e-10, head
        if back is None:
            folder = rg.save(ours, tmp_path / "export", layout="huggingface")
            back = type(theirs).from_pretrained(folder)
        again = heads(back, tokens, token_type_ids=kinds, **options)
        assert all(
            (again[head] - expected[head])[valid if expected[head].ndim == 3 else ...].abs().max() <= 1e-12
            for head in again
        )


@pytest.mark.parametrize("mechanism", [name for name, mechanism in REGISTRY.items() if not mechanism.ordered])
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
    together = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    (model(tokens[:1]).square().sum() + model(tokens[1:, :4]).square().sum()).backward()
    alone = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
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
    with pytest.raises(ValueError, match=r"segments: expected one per token, \(1, 3\), got \(1, 2\)"):
        model(torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="segments: expected None"):
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
    vectors = ours.embed(SENTENCES)
    assert (vectors - expected).abs().max() <= 1e-5
    assert (ours.embed(SENTENCES[:1]) - vectors[:1]).abs().max() <= 1e-5
    likeness = vectors @ vectors.T
    assert likeness[0, 1] > 0.6 > 0.2 > likeness[0, 2].abs()
    assert ours.embed([]).shape == (0, 384)
    assert torch.equal(ours.embed(text for text in SENTENCES), vectors)
    for wrong in ("one text", ["a", 3], None, 3):
        with pytest.raises(ValueError, match="texts: expected a list of texts"):
            ours.embed(wrong)
    with pytest.raises(ValueError, match="batch_size: expected a whole number"):
        ours.embed(["a"], batch_size=0)


# What a sentence-transformers folder may say, and what it means for the hidden states (T, E) of one text, a token at a
# time. `skipped` tokens are the prompt's.
THEIR_POOLINGS = {
    "cls": lambda x, skipped: x[skipped],
    "max": lambda x, skipped: x[skipped:].amax(0),
    "mean": lambda x, skipped: x[skipped:].mean(0),
    "mean_sqrt_len_tokens": lambda x, skipped: x[skipped:].sum(0) / (len(x) - skipped) ** 0.5,
    "weightedmean": lambda x, skipped: (
        sum((at + 1) * x[at] for at in range(skipped, len(x))) / sum(range(skipped + 1, len(x) + 1))
    ),
    "lasttoken": lambda x, skipped: x[-1],
}
SWITCHES = ["cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "query", ":", "Query", *(f"w{number}" for number in range(90))]
SENTENCE_TYPES = "sentence_transformers.models."


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def sentence_folder(root, theirs, *, inside="", modules=("Pooling",), pooling=None, limits=None, prompts=None):
    """A sentence-transformers folder: a model of transformers, its tokenizer, and what modules.json lists."""
    weights = peers.saved(theirs, root / inside)
    (weights / "vocab.txt").write_text("\n".join(WORDS))
    write_json(weights / "tokenizer_config.json", {"do_lower_case": False})
    folders = [("Transformer", inside), *((kind, f"{at}_{kind}") for at, kind in enumerate(modules, 1))]
    rows = [{"idx": i, "path": path, "type": SENTENCE_TYPES + kind} for i, (kind, path) in enumerate(folders)]
    write_json(root / "modules.json", rows)
    if "Pooling" in modules:
        write_json(root / "1_Pooling" / "config.json", {"pooling_mode": "mean"} if pooling is None else pooling)
    if limits is not None:
        write_json(weights / "sentence_bert_config.json", limits)
    if prompts is not None:
        write_json(root / "config_sentence_transformers.json", prompts)
    return root


@st.composite
def sentence_layouts(draw):
    """The poolings, and the keywords of a folder that says them, in the words of old versions or of new ones."""
    modes = draw(st.lists(st.sampled_from(list(THEIR_POOLINGS)), min_size=1, max_size=3, unique=True))
    pooling = {draw(st.sampled_from(["word_embedding_dimension", "embedding_dimension"])): 32}
    if draw(st.booleans()):
        pooling["pooling_mode"] = modes[0] if len(modes) == 1 and draw(st.booleans()) else modes
    else:
        modes = [mode for mode in THEIR_POOLINGS if mode in modes]
        pooling |= {f"pooling_mode_{s}": m in modes for s, m in zip(SWITCHES, THEIR_POOLINGS, strict=True)}
    prompt = draw(st.sampled_from(["", "query: ", "Query w3 "]))
    included = draw(st.booleans())
    limits = {"max_seq_length": draw(st.sampled_from([None, 6, 20, 99])), "do_lower_case": draw(st.booleans())}
    return modes, {
        "inside": draw(st.sampled_from(["", "0_Transformer"])),
        "modules": ["Pooling", *draw(st.sampled_from([[], ["Normalize"], ["Dropout", "Normalize"]]))],
        "pooling": pooling | ({} if included else {"include_prompt": False}),
        "limits": draw(st.sampled_from([limits, None])),
        "prompts": {"prompts": {"p": prompt}, "default_prompt_name": "p" if prompt else None},
    }


@settings(max_examples=15, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
@given(layout=sentence_layouts(), kind=st.sampled_from(["bert-plain", "albert"]))
@torch.no_grad()
def test_a_sentence_transformers_folder_says_how_texts_become_vectors(layout, kind):
    modes, options = layout
    theirs = peers.encoder(kind)
    theirs = theirs if kind == "bert-plain" else theirs.albert
    with tempfile.TemporaryDirectory() as root:
        model = rg.load(sentence_folder(Path(root) / "theirs", theirs, **options))
        texts = ["w1 w2 w3 Query w4", "", "w9", "w5 w6 " * 7]
        vectors = model.embed(texts)
        prompt, limits = options["prompts"]["prompts"]["p"], options["limits"] or {}
        context = theirs.config.max_position_embeddings
        most = min(limits.get("max_seq_length") or context, context)

        def ids(text):
            words = re.findall(r"\w+|:", text.lower() if limits.get("do_lower_case") else text)
            return [2, *(WORDS.index(word) for word in words)][: most - 1]

        skipped = 0 if not prompt or options["pooling"].get("include_prompt", True) else len(ids(prompt))
        for vector, text in zip(vectors, texts, strict=True):
            hidden = theirs(torch.tensor([[*ids(prompt + text), 3]])).last_hidden_state[0]
            expected = torch.cat([THEIR_POOLINGS[mode](hidden, skipped) for mode in modes])
            if "Normalize" in options["modules"]:
                expected = expected / expected.norm()
            assert (vector - expected).abs().max() <= 1e-10
        for form in ("regard", "huggingface"):
            again = rg.load(rg.save(model, Path(root) / form, layout=form))
            assert torch.equal(again.embed(texts), vectors)
            rg.save(again, Path(root) / form, layout="regard")  # over it, with nothing left of its other files
            assert not (Path(root) / form / "modules.json").exists()
        assert torch.allclose(model.embed(texts, normalize=True).norm(dim=-1), torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules": ["Pooling", "Dense"]}, "expected an encoder, a Pooling and perhaps Normalize, got Dense"),
        ({"modules": ["LSTM", "Pooling"]}, "got LSTM"),
        ({"modules": ["Normalize", "Pooling"]}, "expected an encoder, a Pooling and perhaps Normalize, got Normalize"),
        ({"modules": ["SpladePooling"]}, "got SpladePooling"),
        ({"pooling": {"pooling_mode": "attention"}}, "expected a pooling of cls, max, .* got .*attention"),
        ({"pooling": {"pooling_mode": ["mean", 3]}}, "expected a pooling of"),
        ({"pooling": {"pooling_mode": []}}, "expected a pooling of"),
        ({"pooling": {"pooling_mode_attention": True}}, "got .*pooling_mode_attention"),
        ({"pooling": {"pooling_mode_mean_tokens": "yes"}}, "got .*pooling_mode_mean_tokens"),
        ({"pooling": {}}, "expected a pooling of cls, .*, got none, which"),
        ({"pooling": {"word_embedding_dimension": 32}}, "expected a pooling of cls, .*, got none, which"),
        ({"pooling": {f"pooling_mode_{switch}": False for switch in SWITCHES}}, "expected a pooling of .*, got none"),
        ({"pooling": {"word_embedding_dimension": 33}}, "expected the model's width, 32, got 33"),
        ({"limits": {"max_seq_length": "long"}}, "expected max_seq_length to be a whole number"),
        ({"limits": {"max_seq_length": 0}}, "expected max_seq_length to be a whole number"),
        ({"prompts": {"default_prompt_name": "q", "prompts": {}}}, "expected a text for default_prompt_name"),
    ],
)
def test_what_a_sentence_transformers_folder_asks_for_in_vain_is_named(options, message, tmp_path):
    folder = sentence_folder(tmp_path / "model", peers.encoder("bert-plain"), **options)
    with pytest.raises(rg.CheckpointError, match=message):
        rg.load(folder)
    (folder / "modules.json").unlink()
    assert rg.load(folder).config.pooling == ("mean",)


@pytest.mark.parametrize("path", ["../1_Pooling", "/etc", "a/b", "..", ".", None, 3])
def test_modules_stay_inside_their_folder(path, tmp_path):
    folder = sentence_folder(tmp_path / "model", peers.encoder("bert-plain"))
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["path"] = path
    write_json(folder / "modules.json", modules)
    with pytest.raises(rg.CheckpointError, match="expected modules with a type and a folder name"):
        rg.load(folder)


@torch.no_grad()
def test_pooled_vectors_see_no_padding_and_empty_texts_are_zero():
    hidden = torch.randn(4, 9, 5)
    hidden[0, 7:] = torch.nan
    lengths = [7, 9, 1, 0]
    for modes in itertools.permutations(POOLINGS, 2):
        together = pool(hidden, rg.padding(lengths), modes, 1)
        assert not together[2:].any()  # the prefix was all, or there was nothing
        for row in (0, 1):
            alone = pool(hidden[row : row + 1, : lengths[row]], None, modes, 1)
            assert torch.allclose(together[row], alone[0], atol=1e-6)
        left = torch.arange(9) >= 9 - torch.tensor(lengths)[:, None]
        moved = torch.stack([row.roll(9 - length, 0) for row, length in zip(hidden, lengths, strict=True)])
        assert torch.allclose(pool(moved, rg.padding(valid=left), modes, 1), together, atol=1e-6)


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
    model = made(window=rg.Window(3, 1), num_layers=1, mechanism=mechanism)
    tokens = peers.sequences(1, 12, 61)
    before = model(tokens)
    other = tokens.clone()
    other[0, 8] = (other[0, 8] + 1) % 61
    changed = (model(other) - before)[0].abs().amax(-1) > 0
    assert changed.nonzero().flatten().tolist() == [0, 7, 8, 9, 10, 11]
    other = tokens.clone()
    other[0, 0] = (other[0, 0] + 1) % 61
    assert ((model(other) - before)[0].abs().amax(-1) > 0).all()


@torch.no_grad()
def test_a_window_as_wide_as_the_text_is_none():
    tokens = peers.sequences(2, 15, 61)
    assert (made(window=rg.Window(14, 14))(tokens) - made()(tokens)).abs().max() <= 1e-12
    assert (made(window=rg.Window(2, 2))(tokens) - made()(tokens)).abs().max() > 1e-3


@torch.no_grad()
def test_padded_is_unpadded_with_a_window_on_either_side():
    model = made(window=rg.Window(2, 2), num_kv_heads=2)
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
    model = made(
        num_kv_heads=2, window=rg.Window(3, 3), num_classes=2, class_names=("no", "yes"), inverted_sentence=True
    )
    assert rg.EncoderConfig.from_json(model.config.to_json()) == model.config
    again = rg.load(rg.save(model, tmp_path / "own"))
    assert again.config == model.config
    tokens = peers.sequences(2, 9, 61)
    assert torch.equal(again(tokens), model(tokens))
    hidden = model(tokens)
    assert model.inverted_sentence(hidden).shape == (2, 2)
    for change in ({"num_kv_heads": 2}, {"window": rg.Window(3, 3)}, {"inverted_sentence": True}):
        words = f"got a model whose {next(iter(change))} cannot be written in a config of bert"
        with pytest.raises(ValueError, match=words):
            rg.save(made(**change), tmp_path / "theirs", layout="huggingface")
    former = {key: value for key, value in model.config.to_json().items() if key not in ("window", "class_names")}
    assert rg.EncoderConfig.from_json(former).window is None
    for changes, words in (
        ({"num_kv_heads": 3}, r"num_kv_heads: expected a divisor of num_heads = 4, got 3"),
        ({"window": 2}, r"window: expected .*, 2 on each side Window\(before=2, after=2\)"),
        ({"window": 2.5}, "window: expected"),
        ({"window": rg.Window(9, 9), "mechanism": "channel"}, "window: expected none with Channel"),
        ({"num_classes": 3, "class_names": ("a", "b")}, "class_names: expected 3"),
        ({"pooling": ("mean", "middle")}, "pooling: expected some of first, last, max, mean"),
        ({"pooling": ()}, "pooling: expected some of"),
        ({"text_length": 41}, "text_length: expected at most context_length = 40, got 41"),
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
    whole, near = (
        rg.Encoder(rg.EncoderConfig(**sizes, window=window)).summary(512) for window in (None, rg.Window(8, 8))
    )
    assert near.flops < 0.5 * whole.flops
