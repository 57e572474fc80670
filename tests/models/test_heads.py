"""Task heads: against transformers' own, by hand, and in its pipelines."""

import math
from collections import Counter
from zlib import crc32

import pytest
import torch
import torch.nn.functional as F
from fixtures.tiny_models import REFORMER, VIT, assert_close, randomised
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    ElectraConfig,
    ElectraForMultipleChoice,
    ElectraForSequenceClassification,
    ElectraForTokenClassification,
    PreTrainedTokenizerFast,
    pipeline,
)

from hf_tiny import (
    HfTinyElectraConfig,
    HfTinyElectraForPreTraining,
    HfTinyElectraForSequenceClassification,
    HfTinyElectraForTokenClassification,
    HfTinyElectraModel,
    HfTinyReformerConfig,
    HfTinyReformerForSequenceClassification,
    HfTinyTokenLinkingConfig,
    HfTinyTokenLinkingModel,
    HfTinyViTConfig,
    HfTinyViTForImageClassification,
    InputError,
)
from hf_tiny.convert import electra_head_from_native
from hf_tiny.models.heads import Inputs, LinkingHead, PairComparison, Recurrence, count_items, read_counts
from hf_tiny.models.spelling import Spelling, bucket, spelled

SIZES = {
    "vocab_size": 99,
    "embedding_size": 24,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 24,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.2,
}
MODES = {
    "none": {"sharing": "none", "generator_size": 0.5},
    "embeddings": {"sharing": "embeddings", "generator_size": 0.5},
    "all": {"sharing": "all", "generator_size": 1},
}
LINKING = {"arc_size": 16, "label_size": 8, "linking_dropout": 0.0, "initializer_range": 0.2}
CLASSES = (HfTinyElectraForSequenceClassification, HfTinyElectraForTokenClassification)


def batch_of(rows: int = 4, length: int = 12) -> dict[str, Tensor]:
    """Pairs of texts, the first and the last one padded."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, SIZES["vocab_size"], (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    mask[-1, 7:] = 0
    types = (torch.arange(length) > 5).long().repeat(rows, 1)
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "token_type_ids": types}


def token_labels(batch: dict[str, Tensor], num_labels: int = 3) -> Tensor:
    """Different numbers of labels in the rows."""
    labels = (batch["input_ids"] % num_labels).masked_fill(batch["attention_mask"] == 0, -100)
    labels[:, 0], labels[2, 4:] = -100, -100
    return labels


# Against transformers


def test_sequence_classification_equals_transformers():
    native = randomised(ElectraForSequenceClassification(ElectraConfig(**SIZES, id2label={0: "no", 1: "yes", 2: "?"})))
    model = electra_head_from_native(native)
    assert type(model) is HfTinyElectraForSequenceClassification
    assert model.config.id2label == {0: "no", 1: "yes", 2: "?"}
    batch, labels = batch_of(), torch.tensor([0, 2, 1, 1])
    with torch.no_grad():
        found, expected = model(**batch, labels=labels), native(**batch, labels=labels)
    assert found.logits.shape == (4, 3)
    assert_close(found.logits, expected.logits)
    assert_close(found.loss, expected.loss)


def test_regression_equals_transformers():
    native = randomised(ElectraForSequenceClassification(ElectraConfig(**SIZES, num_labels=1)))
    model = electra_head_from_native(native)
    batch, labels = batch_of(), torch.tensor([0.5, -3.0, 2.25, 4.0])
    with torch.no_grad():
        found, expected = model(**batch, labels=labels), native(**batch, labels=labels)
    assert found.logits.shape == (4, 1)
    assert_close(found.logits, expected.logits)
    assert_close(found.loss, expected.loss)


def test_token_classification_equals_transformers():
    native = randomised(ElectraForTokenClassification(ElectraConfig(**SIZES, num_labels=3)))
    model = electra_head_from_native(native)
    assert type(model) is HfTinyElectraForTokenClassification
    batch = batch_of()
    labels = token_labels(batch)
    with torch.no_grad():
        found, expected = model(**batch, labels=labels), native(**batch, labels=labels)
    valid = batch["attention_mask"].bool()
    assert_close(found.logits[valid], expected.logits[valid])
    assert_close(found.loss, expected.loss)


def test_other_native_heads_are_refused():
    with pytest.raises(InputError, match="ElectraForMultipleChoice has no counterpart"):
        electra_head_from_native(ElectraForMultipleChoice(ElectraConfig(**SIZES)))


# From pretraining


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model_class", CLASSES)
def test_a_joint_checkpoint_loads_into_the_heads(mode, model_class, tmp_path):
    """All of the encoder, and nothing else."""
    joint = HfTinyElectraForPreTraining(HfTinyElectraConfig(**SIZES, **MODES[mode])).eval()
    joint.save_pretrained(tmp_path)
    auto_class = {
        HfTinyElectraForSequenceClassification: AutoModelForSequenceClassification,
        HfTinyElectraForTokenClassification: AutoModelForTokenClassification,
    }[model_class]
    for loader in (model_class, auto_class):
        model, info = loader.from_pretrained(tmp_path, num_labels=5, output_loading_info=True)
        assert type(model) is model_class
        own = {name for name, _ in model.named_parameters() if name.startswith("classifier")}
        assert set(info["missing_keys"]) == own
        assert not info["unexpected_keys"]
        assert not info["mismatched_keys"]
        batch = batch_of()
        with torch.no_grad():
            assert_close(model.electra(**batch)[0], joint.electra(**batch)[0], 1e-6)
            assert model(**batch).logits.shape[-1] == 5


@pytest.mark.parametrize("mode", MODES)
def test_a_joint_checkpoint_becomes_the_encoder_of_links(mode, tmp_path):
    joint = HfTinyElectraForPreTraining(HfTinyElectraConfig(**SIZES, **MODES[mode])).eval()
    joint.save_pretrained(tmp_path)
    _, info = HfTinyElectraModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    model = HfTinyTokenLinkingModel.from_encoder(str(tmp_path), num_labels=3, **LINKING)
    assert not model.training
    expected = joint.electra.state_dict()
    found = model.encoder.state_dict()
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
    model.save_pretrained(tmp_path / "links")
    again, info = HfTinyTokenLinkingModel.from_pretrained(tmp_path / "links", output_loading_info=True)
    assert not any(info.values()), info
    assert again.config.encoder.sharing == mode
    batch = batch_of()
    with torch.no_grad():
        assert_close(again.encoder(**batch)[0], joint.electra(**batch)[0], 1e-6)
        assert_close(again(**batch).logits, model(**batch).logits, 1e-6)


def test_links_on_a_native_encoder(tmp_path):
    """Also from a checkpoint with another head, and without the pooler, which links do not need."""
    sizes = {name: SIZES[name] for name in SIZES if name != "embedding_size"}
    native = BertForMaskedLM(BertConfig(**sizes)).eval()
    native.save_pretrained(tmp_path)
    model = HfTinyTokenLinkingModel.from_encoder(str(tmp_path), num_labels=3, **LINKING)
    assert type(model.encoder) is BertModel
    assert not [name for name, _ in model.named_parameters() if "pooler" in name]
    batch = batch_of()
    with torch.no_grad():
        assert_close(model.encoder(**batch)[0], native.bert(**batch)[0], 1e-6)


def test_a_new_head_has_the_precision_of_its_encoder(tmp_path):
    HfTinyElectraModel(HfTinyElectraConfig(**SIZES)).to(torch.float64).save_pretrained(tmp_path)
    model = HfTinyTokenLinkingModel.from_encoder(str(tmp_path), num_labels=3, **LINKING)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert model(**batch_of()).logits.dtype == torch.float64


# Texts and tokens


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_pooling_ignores_padding(pooling):
    model = randomised(
        HfTinyElectraForSequenceClassification(HfTinyElectraConfig(**SIZES, classifier_pooling=pooling, num_labels=3))
    )
    batch = batch_of()
    with torch.no_grad():
        together = model(**batch).logits
        for row, size in enumerate(batch["attention_mask"].sum(1).tolist()):
            alone = {name: tensor[row : row + 1, :size] for name, tensor in batch.items()}
            assert_close(model(**alone).logits[0], together[row])
            del alone["attention_mask"]
            assert_close(model(**alone).logits[0], together[row])
            states = model.electra(**alone).last_hidden_state[0]
            pooled = states[0] if pooling == "cls" else states.mean(0)
            hidden = F.gelu(F.linear(pooled, model.classifier.dense.weight, model.classifier.dense.bias))
            assert_close(model.classifier.out(hidden), together[row])


def copy_direction(lstm: torch.nn.LSTM, end: str, direction: Recurrence) -> None:
    """Let torch's LSTM have our weights."""
    getattr(lstm, f"weight_ih_l0{end}").copy_(direction.input_weight)
    getattr(lstm, f"weight_hh_l0{end}").copy_(direction.state_weight)
    getattr(lstm, f"bias_ih_l0{end}").copy_(direction.bias)
    getattr(lstm, f"bias_hh_l0{end}").zero_()


@pytest.mark.parametrize("architecture", ["electra", "modern"])
def test_an_lstm_over_tokens_reads_no_padding(architecture):
    """The same as torch's LSTM on each text by itself."""
    config = HfTinyElectraConfig(**SIZES, architecture=architecture, num_labels=3, tagger_lstm_size=5)
    model, batch = randomised(HfTinyElectraForTokenClassification(config)), batch_of()
    lstm = torch.nn.LSTM(config.hidden_size, 5, bidirectional=True)
    with torch.no_grad():
        for direction, end in ((model.lstm.forwards, ""), (model.lstm.backwards, "_reverse")):
            copy_direction(lstm, end, direction)
        together = model(**batch).logits
        for row, size in enumerate(batch["attention_mask"].sum(1).tolist()):
            alone = {name: tensor[row : row + 1, :size] for name, tensor in batch.items()}
            states, _ = lstm(model.electra(**alone).last_hidden_state[0])
            assert_close(model.classifier(states), together[row, :size])
            del alone["attention_mask"]
            assert_close(model(**alone).logits[0], together[row, :size])


def test_pairs_and_triples_of_tokens_and_no_padding():
    """Equal neighbours have equal embeddings, whatever else is in a text; padding is none."""
    config = HfTinyElectraConfig(**SIZES, num_labels=3, tagger_ngram_buckets=1000)
    model = randomised(HfTinyElectraForTokenClassification(config))
    ids = torch.tensor([[5, 6, 7, 8, 9, 0, 0], [9, 9, 6, 7, 8, 9, 5]])
    mask = torch.tensor([[1] * 5 + [0] * 2, [1] * 7])
    with torch.no_grad():
        found = model.ngrams(ids, mask)
        assert_close(model.ngrams(ids[:1, :5], None)[0], found[0, :5])
        assert not torch.allclose(found[0, 2], found[1, 3])  # 5 6 7 is not 9 6 7
        own = model.ngrams(torch.tensor([[1, 5, 6, 7, 8, 9, 1]]), None)
        assert_close(own[0, 3], found[0, 2])  # its pairs and triples reach two tokens far
        together = model(input_ids=ids, attention_mask=mask).logits
        assert_close(model(input_ids=ids[:1, :5]).logits[0], together[0, :5])
        states = model.electra(input_ids=ids, attention_mask=mask).last_hidden_state
        assert_close(model.classifier(states + found), together)
        embeds = model.electra.embeddings.word_embeddings(ids)
        assert_close(model(inputs_embeds=embeds, attention_mask=mask).logits, model.classifier(states))


def test_a_pair_is_compared_by_hand_and_without_its_padding():
    """Two texts of two words each: one in both, the other with the nearest of the other text."""
    words = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [1.0, 0.0], [0.6, 0.8]]])  # tokens 0 and 1 | 2 and 3
    states = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [-2.0, 0.0], [0.0, 4.0]]])
    compare = PairComparison(torch.nn.Embedding(9, 2), 2)
    torch.nn.init.zeros_(compare.weigh.weight)  # all words weigh the same
    kinds = torch.tensor([[0, 0, 1, 1]])
    found = compare(words, states, Inputs(None, None, kinds, None, words))
    alike = [
        (1 + 0.8) / 2,
        0.0,
        1 / 2,
        (1 + 0.8) / 2,
        0.0,
        1 / 2,
    ]  # as words, in context (none is nearer than 0), the same
    means = [abs(1 - -1), abs(0 - 2), 1 * -1, 0 * 2]
    assert_close(found[0], torch.tensor([*(10 * (each - 0.5) for each in alike), *map(float, means)]), 1e-6)
    padded = [F.pad(x, (0, 0, 0, 3), value=7.0) for x in (words, states)]
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0]])
    assert_close(compare(*padded, Inputs(None, mask, F.pad(kinds, (0, 3)), None, padded[0])), found, 1e-6)
    with torch.no_grad():
        compare.weigh.weight.copy_(torch.tensor([[3.0, -3.0]]))  # the word that both have counts more than the other
    assert compare(words, states, Inputs(None, None, kinds, None, words))[0, 2] > 10 * (0.9 - 0.5)


@pytest.mark.parametrize("modern", [{}, {"architecture": "modern"}])
def test_a_classifier_of_pairs(modern):
    model = randomised(
        HfTinyElectraForSequenceClassification(HfTinyElectraConfig(**SIZES, **modern, classifier_pairs=True))
    )
    batch = batch_of(4, 12)
    kinds = (torch.arange(12) >= 6).long().expand(4, -1)
    inputs = {"attention_mask": batch["attention_mask"], "token_type_ids": kinds}
    logits = model(batch["input_ids"], **inputs).logits
    words = model.get_input_embeddings()(batch["input_ids"])
    assert_close(model(inputs_embeds=words, **inputs).logits, logits, 1e-5)
    assert model(batch["input_ids"]).logits.isfinite().all()  # of one text only
    plain = HfTinyElectraForSequenceClassification(HfTinyElectraConfig(**SIZES, **modern))
    assert not [name for name in plain.state_dict() if "pairs" in name]  # checkpoints of before have no such weights


def test_a_pooling_that_is_not_known():
    with pytest.raises(ValueError, match="classifier_pooling='max': choose one of cls, mean, words"):
        HfTinyElectraConfig(**SIZES, classifier_pooling="max")


def test_classifier_dropout():
    """Its own, or that of the encoder."""
    for given, expected in ((0.4, 0.4), (0, 0), (None, 0.1)):
        config = HfTinyElectraConfig(**{**SIZES, "hidden_dropout_prob": 0.1}, classifier_dropout=given)
        assert HfTinyElectraForSequenceClassification(config).classifier.dropout.p == expected
        assert HfTinyElectraForTokenClassification(config).dropout.p == expected


def classifier(kind: str, **config) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """A classifier of texts or of images, and a batch of 4."""
    if kind == "texts":
        return randomised(HfTinyElectraForSequenceClassification(HfTinyElectraConfig(**SIZES, **config))), batch_of()
    if kind == "long texts":
        model = HfTinyReformerForSequenceClassification(HfTinyReformerConfig(**{**REFORMER, **config}))
        return randomised(model), {"input_ids": batch_of()["input_ids"] % REFORMER["vocab_size"]}
    model = HfTinyViTForImageClassification(HfTinyViTConfig(**{**VIT, **config}))
    return randomised(model), {"pixel_values": torch.randn(4, 1, 4, 8)}


@pytest.mark.parametrize("kind", ["texts", "long texts", "images"])
def test_problem_types(kind):
    """Of classifiers of texts and of images, against the losses of PyTorch that transformers takes for them."""
    several = torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]])
    cases = {
        "multi_label_classification": (several, F.binary_cross_entropy_with_logits),
        "regression": (several * 3 - 1, F.mse_loss),
        "single_label_classification": (torch.tensor([0, 2, 1, -100]), F.cross_entropy),
        None: (several.softmax(-1), F.cross_entropy),  # mixup's
    }
    for problem, (labels, loss) in cases.items():
        model, batch = classifier(kind, problem_type=problem, num_labels=3)
        outputs = model(**batch, labels=labels)
        expected = loss(outputs.logits, labels)
        assert_close(outputs.loss, expected)
        examples = 3 if problem == "single_label_classification" else 4
        for count in (10, torch.tensor([10, 77])):
            assert_close(model(**batch, labels=labels, num_items_in_batch=count).loss, expected * examples / 10)
    model, batch = classifier(kind, num_labels=1)
    numbers = torch.tensor([0.5, -100.0, 2.25, 4.0])
    for labels in (numbers, numbers[:, None]):
        outputs = model(**batch, labels=labels)
        assert_close(outputs.loss, F.mse_loss(outputs.logits[:, 0], numbers))


@pytest.mark.parametrize("kind", ["texts", "images"])
def test_labels_of_another_shape_are_refused(kind):
    for problem, labels in (
        ("multi_label_classification", torch.tensor([0, 2, 1, 1])),
        ("regression", torch.zeros(4)),
        ("single_label_classification", torch.zeros(4)),
        ("single_label_classification", torch.zeros(4, 3, dtype=torch.long)),
    ):
        model, batch = classifier(kind, problem_type=problem, num_labels=3)
        with pytest.raises(ValueError, match=r"give class numbers \(4,\), or floats \(4, 3\)"):
            model(**batch, labels=labels)


def test_counts():
    """A number, or tensors of one or two; what is not given follows in proportion."""
    found = (torch.tensor(4), torch.tensor(20))
    assert read_counts(None, *found).tolist() == [4, 20]
    assert read_counts(torch.tensor([8, 50]), *found).tolist() == [8, 50]
    for given in (8, torch.tensor(8), torch.tensor([8])):
        assert read_counts(given, *found).tolist() == [8, 40]
    assert read_counts(0, *found).tolist() == [1, 1]
    labels = torch.tensor([[3, -100], [-100, 1]])
    for given, expected in ((None, 2), (7, 7), (torch.tensor(7), 7), (torch.tensor([7, 9]), 7), (0, 1)):
        assert count_items(labels, given) == expected


def linking_model(**changes) -> HfTinyTokenLinkingModel:
    encoder = {"model_type": "hf_tiny_electra", **SIZES}
    return randomised(
        HfTinyTokenLinkingModel(HfTinyTokenLinkingConfig(encoder=encoder, num_labels=3, **LINKING, **changes))
    )


def links_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Words of one and two tokens; 4, 5, 5 and 3 of them."""
    spans = torch.tensor([[1, 3], [3, 4], [4, 6], [6, 8], [8, 11]]).repeat(4, 1, 1)
    spans[0, 4] = spans[3, 3:] = 0
    heads = torch.tensor([[2, 0, 2, 3, -100], [2, 3, 0, 3, 4], [-100, 1, 1, 0, -100], [0, 1, 1, -100, -100]])
    labels = torch.tensor([[1, 0, 1, 2, -100], [2, 1, 0, 1, 2], [-100, 1, 1, 0, -100], [0, 2, 1, -100, -100]])
    affixes = torch.arange(40).reshape(4, 5, 2) * spans[:, :, :1].ne(0)
    return {**batch, "word_spans": spans, "affixes": affixes, "heads": heads, "labels": labels}


WORDS = {"affix_buckets": 40, "lstm_size": 6}
KINDS = ("classes", "tokens", "links", "links of words", "regression", "tokens in order")


def labelled(kind: str) -> tuple[torch.nn.Module, dict[str, Tensor], int]:
    """A model, a batch with labels, and how many it has: a different number in each row, where that can be."""
    batch = batch_of()
    if kind.startswith("links"):
        links = links_of(batch)
        return linking_model(**(WORDS if "words" in kind else {})), links, int(links["heads"].ne(-100).sum())
    config = HfTinyElectraConfig(
        **SIZES, num_labels=1 if kind == "regression" else 3, tagger_lstm_size=5 if kind == "tokens in order" else 0
    )
    if kind == "tokens in order":
        config.tagger_ngram_buckets = 20
    if kind.startswith("tokens"):
        labels = token_labels(batch)
        return (
            randomised(HfTinyElectraForTokenClassification(config)),
            {**batch, "labels": labels},
            int((labels >= 0).sum()),
        )
    labels = torch.tensor([0.5, -3.0, 2.25, 4.0] if kind == "regression" else [0, 2, 1, 1])
    return randomised(HfTinyElectraForSequenceClassification(config)), {**batch, "labels": labels}, 4


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_divided_by_the_items_given(kind):
    """As a number, as a tensor, or as the first of a tensor of two."""
    model, batch, count = labelled(kind)
    with torch.no_grad():
        mean = model(**batch).loss
        for given in (40, torch.tensor(40), torch.tensor([40, 7]), torch.tensor([40.0, 7.0])):
            loss = model(**batch, num_items_in_batch=given).loss
            assert loss.shape == ()
            assert_close(loss, mean * count / 40)


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_add_up(kind):
    model, batch, count = labelled(kind)
    whole = model(**batch).loss
    expected = torch.autograd.grad(whole, list(model.parameters()))
    losses = []
    model.zero_grad()
    for rows in (slice(0, 1), slice(1, 4)):
        part = {name: tensor[rows] for name, tensor in batch.items()}
        losses.append(model(**part, num_items_in_batch=torch.tensor([count, 99])).loss)
        losses[-1].backward()
    assert_close(sum(losses), whole)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("kind", KINDS[:3])  # a number to come near to cannot be missing
def test_without_any_label_the_loss_is_0(kind):
    model, batch, _ = labelled(kind)
    nothing = {**batch, **{name: torch.full_like(batch[name], -100) for name in ("labels", "heads") if name in batch}}
    for given in (None, 0, torch.tensor([0, 30])):
        model.zero_grad()
        loss = model(**nothing, num_items_in_batch=given).loss
        assert loss == 0
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is None or parameter.grad.eq(0).all(), name


# Links


@pytest.fixture
def head() -> LinkingHead:
    config = HfTinyTokenLinkingConfig(arc_size=5, label_size=4, num_labels=3, linking_dropout=0.0)
    return randomised(LinkingHead(config, hidden_size=6))


def test_a_word_is_the_mean_of_its_tokens(head):
    x = torch.randn(2, 7, 6)
    spans = torch.tensor([[[1, 4], [4, 5], [5, 7]], [[2, 3], [0, 2], [0, 0]]])
    words, exist = head.words(x, spans)
    assert exist.tolist() == [[True, True, True], [True, True, False]]
    expected = [[x[0, 1:4].mean(0), x[0, 4], x[0, 5:7].mean(0)], [x[1, 2], x[1, :2].mean(0), torch.zeros(6)]]
    assert_close(words, torch.stack([torch.stack(row) for row in expected]), 1e-6)


def biaffine(head: LinkingHead, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """The score of one link and those of its labels, in Dozat & Manning's terms."""

    def layer(perceptron, x: Tensor) -> Tensor:
        return F.gelu(F.linear(x, perceptron[0].weight, perceptron[0].bias))

    one, other = layer(head.arc_from, start), layer(head.arc_to, end)
    arc = one @ head.arc.weight.T @ other + head.arc.bias @ other
    one, other = layer(head.label_from, start), layer(head.label_to, end)
    products = head.label.weight.view(3, 4, 4)
    labels = [other @ products[label] @ one for label in range(3)]
    return arc, torch.stack(labels) + F.linear(torch.cat((one, other)), head.label_alone.weight, head.label_alone.bias)


def test_scores_by_hand(head):
    x = torch.randn(1, 4, 6)
    spans = torch.tensor([[[0, 1], [1, 3], [3, 4]]])
    arcs, words, places = head(x, spans)
    labels = head.all_labels(words, places)
    assert arcs.shape == (1, 3, 4)
    assert labels.shape == (1, 3, 4, 3)
    states = [x[0, 0], x[0, 1:3].mean(0), x[0, 3]]
    least = torch.finfo(torch.float32).min
    for start in range(3):
        for end, state in enumerate([head.place_0.weight[0], *states]):
            arc, own = biaffine(head, states[start], state)
            assert_close(arcs[0, start, end], torch.tensor(least) if end == start + 1 else arc)
            assert_close(labels[0, start, end], own)
            assert_close(head.labels_of(words[0, start], places[0, end]), own)


def test_labels_of_equals_all_labels(head):
    _, words, places = head(torch.randn(2, 9, 6), torch.tensor([[i, i + 1] for i in range(9)]).expand(2, -1, -1))
    chosen = torch.randint(0, 10, (2, 9))
    rows = torch.arange(2)[:, None]
    everything = head.all_labels(words, places)
    expected = everything[rows, torch.arange(9), chosen]
    assert_close(head.labels_of(words, places[rows, chosen]), expected)


def test_no_word_chooses_itself_or_padding():
    model, batch = linking_model(), links_of(batch_of())
    with torch.no_grad():
        chances = model(**batch).logits.softmax(-1)
    exist = batch["word_spans"][:, :, 1] > 0
    for row in range(4):
        for word in range(5):
            assert chances[row, word, word + 1] == 0
        assert chances[row, :, 1:][:, ~exist[row]].eq(0).all()
    assert_close(chances.sum(-1), torch.ones(4, 5))


def test_the_order_of_words_does_not_matter():
    """Only their places in the text do: with the words the scores change places, and words of padding change nothing."""
    model, batch = linking_model(), links_of(batch_of())
    batch = {name: tensor[1:2] for name, tensor in batch.items()}  # 5 words
    order = torch.tensor([3, 0, 4, 2, 1])  # the new word i is the old word order[i]
    place = torch.cat((torch.zeros(1, dtype=torch.long), order.argsort() + 1))  # old place -> new place
    shuffled = {**batch, "word_spans": batch["word_spans"][:, order], "labels": batch["labels"][:, order]}
    shuffled["heads"] = place[batch["heads"][:, order]]
    columns = torch.cat((torch.zeros(1, dtype=torch.long), order + 1))
    padding = {name: torch.zeros_like(batch[name][:, :2]) for name in ("word_spans", "heads", "labels")}
    longer = {**batch, "word_spans": torch.cat((batch["word_spans"], padding["word_spans"]), 1)}
    for name in ("heads", "labels"):
        longer[name] = torch.cat((batch[name], padding[name] - 100), 1)
    with torch.no_grad():
        expected, found, more = model(**batch), model(**shuffled), model(**longer)
    assert_close(found.logits, expected.logits[:, order][:, :, columns])
    assert_close(found.label_logits, expected.label_logits[:, order][:, :, columns])
    assert_close(found.loss, expected.loss)
    assert_close(more.logits[:, :5, :6], expected.logits)
    assert_close(more.label_logits[:, :5, :6], expected.label_logits)
    assert_close(more.loss, expected.loss)


def test_an_lstm_reads_the_affixes_in_order_and_no_padding():
    """The same as torch's LSTM on each sentence by itself, over the means of tokens and the sums of affixes."""
    model, batch = linking_model(**WORDS), links_of(batch_of())
    head = model.head
    lstm = torch.nn.LSTM(model.encoder.config.hidden_size, WORDS["lstm_size"], bidirectional=True)
    with torch.no_grad():
        for direction, end in ((head.lstm.forwards, ""), (head.lstm.backwards, "_reverse")):
            copy_direction(lstm, end, direction)
        logits = model(**batch).logits
        states = model.encoder(**batch_of()).last_hidden_state
        for row, size in enumerate((4, 5, 5, 3)):
            spans, affixes = batch["word_spans"][row, :size], batch["affixes"][row, :size]
            words = torch.stack([states[row, first:end].mean(0) for first, end in spans.tolist()])
            words, _ = lstm(words + torch.stack([head.affixes.weight[own].sum(0) for own in affixes]))
            places = torch.cat((head.place_0.weight, words))
            expected = head.arc(head.arc_from(words)) @ head.arc_to(places).mT
            others = ~torch.eye(size, size + 1, dtype=torch.bool).roll(1, dims=1)
            assert_close(logits[row, :size, : size + 1][others], expected[others])
        changed = {**batch, "affixes": batch["affixes"].index_fill(1, torch.tensor([4]), 7)}
        found = model(**changed).logits
    assert_close(found[0, :4, :5], logits[0, :4, :5], 0)  # a place without a word
    assert (found[1] - logits[1]).abs().max() > 0.01


def test_the_loss_of_links_by_hand():
    """The head's surprise and the label's, over the words whose head is known; the label at the right head counts."""
    model, batch = linking_model(), links_of(batch_of())
    with torch.no_grad():
        outputs = model(**batch)
    surprise, count = 0.0, 0
    for row in range(4):
        for word, (place, label) in enumerate(
            zip(batch["heads"][row].tolist(), batch["labels"][row].tolist(), strict=True)
        ):
            if place != -100:
                surprise -= outputs.logits[row, word].log_softmax(-1)[place].item()
                surprise -= outputs.label_logits[row, word, place].log_softmax(-1)[label].item()
                count += 1
    assert count == 15
    assert outputs.loss.item() == pytest.approx(surprise / count, rel=1e-5)


def test_training_skips_the_labels_of_all_links():
    model, batch = linking_model(), links_of(batch_of())
    expected = model(**batch)
    found = model.train()(**batch)
    assert found.label_logits is None
    assert_close(found.loss, expected.loss)
    found.loss.backward()
    assert model.head.place_0.weight.grad.abs().max() > 0


def test_a_sentence_of_one_word():
    model, batch = linking_model(), {name: tensor[:1] for name, tensor in batch_of().items()}
    batch["word_spans"] = torch.tensor([[[1, 4]]])
    outputs = model(**batch, heads=torch.tensor([[0]]), labels=torch.tensor([[2]]))
    assert outputs.logits.shape == (1, 1, 2)
    assert outputs.logits.softmax(-1).tolist() == [[[1.0, 0.0]]]
    assert outputs.loss.item() == pytest.approx(-outputs.label_logits[0, 0, 0].log_softmax(-1)[2].item(), rel=1e-5)
    outputs.loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_without_spans_every_token_is_a_word():
    model, batch = linking_model(), batch_of()
    spans = torch.tensor([[i, i + 1] for i in range(12)]) * batch["attention_mask"][:, :, None]
    with torch.no_grad():
        assert_close(model(**batch).logits, model(**batch, word_spans=spans).logits, 0)


def test_head_and_encoder_agree_after_resizing_and_choosing_attention(tmp_path):
    model = linking_model()
    model.resize_token_embeddings(110)
    assert model.config.encoder.vocab_size == model.encoder.config.vocab_size == 110
    model.set_attn_implementation("eager")
    assert model.encoder.config._attn_implementation == "eager"
    model.save_pretrained(tmp_path)
    assert HfTinyTokenLinkingModel.from_pretrained(tmp_path).config.encoder.vocab_size == 110


# Pipelines


def saved(model, tokenizer: PreTrainedTokenizerFast, folder) -> str:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_text_classification_pipeline(tokenizer, tmp_path):
    config = HfTinyElectraConfig(**{**SIZES, "vocab_size": len(tokenizer)}, id2label={0: "부정", 1: "긍정"})
    model = randomised(HfTinyElectraForSequenceClassification(config))
    text = "the quick brown fox"
    with torch.no_grad():
        chances = model(**tokenizer(text, return_tensors="pt")).logits[0].softmax(0)
    run = pipeline("text-classification", model=saved(model, tokenizer, tmp_path), device="cpu")
    found = run(text, top_k=None)
    assert {row["label"]: row["score"] for row in found} == pytest.approx(
        {"부정": chances[0].item(), "긍정": chances[1].item()}, abs=1e-6
    )


def test_token_classification_pipeline(tokenizer, tmp_path):
    names = {0: "NOUN", 1: "VERB", 2: "X"}
    config = HfTinyElectraConfig(**{**SIZES, "vocab_size": len(tokenizer)}, id2label=names)
    model = randomised(HfTinyElectraForTokenClassification(config))
    text = "the quick brown fox"
    encoded = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        best = model(**encoded).logits[0].argmax(-1)[1:-1].tolist()
    run = pipeline("token-classification", model=saved(model, tokenizer, tmp_path), device="cpu", ignore_labels=[])
    found = run(text)
    assert [row["word"] for row in found] == tokenizer.tokenize(text)
    assert [row["entity"] for row in found] == [names[label] for label in best]


# What texts are written with


VOCABULARY = ["[PAD]", "[CLS]", "[SEP]", "Ab", "##b", "한국", "##어", "a", "b", "ab"]


def spelled_model(**settings):
    config = HfTinyElectraConfig(**{**SIZES, "vocab_size": len(VOCABULARY)}, num_labels=3, **settings)
    model = randomised(HfTinyElectraForSequenceClassification(config))
    for module in model.modules():
        if isinstance(module, Spelling):
            module.read([None if token.startswith("[") else token for token in VOCABULARY])
    return model


def test_tokens_are_spelled_by_shape_pairs_and_characters():
    assert spelled("Ab") == ["#-Xx", "▁A", "Ab", "▁", "A", "b"]
    assert spelled("##어") == ["#-", "어"]
    assert spelled("3.5") == ["#-9.9", "▁3", "3.", ".5", "▁", "3", ".", "5"]


def test_a_surface_counts_as_by_hand():
    """Tokens, pairs of tokens and what tokens are spelled with; special tokens and padding are nothing."""
    surface = spelled_model(classifier_buckets=4093).surface
    ids, mask = torch.tensor([[1, 5, 6, 2, 5, 0]]), torch.tensor([[1, 1, 1, 1, 1, 0]])
    counts = surface.counts(ids, mask, None)[0, 0]
    wanted = Counter(int(bucket(torch.tensor(token), torch.tensor(0), 4093)) for token in (5, 6, 5))
    wanted[int(bucket(torch.tensor(5), torch.tensor(1 + 6), 4093))] += 1  # [SEP] stands between the other two
    for token in (5, 6, 5):
        wanted.update(1 + crc32(part.encode()) % 4092 for part in spelled(VOCABULARY[token]))
    assert {place: int(counts[place]) for place in counts.nonzero().flatten().tolist()} == wanted
    surface.weigh([(ids, mask, None), (torch.tensor([[7]]), None, None)])
    place = int(bucket(torch.tensor(5), torch.tensor(0), 4093))
    assert_close(surface.rarity[place], torch.tensor(math.log(3 / 2) + 1))  # in one of two texts
    sides = counts.log1p() * surface.rarity
    logits, cosine = surface.eval()(Inputs(ids, mask, None, None, None), torch.zeros(1))
    assert_close(logits[0], surface.out.weight @ (10 * sides / sides.norm()), 1e-4)
    assert cosine is None


def test_a_surface_compares_the_texts_of_a_pair():
    surface = spelled_model(classifier_buckets=4093, classifier_pairs=True).surface.eval()
    ids, kinds = torch.tensor([[1, 5, 6, 2, 5, 6, 2], [1, 5, 6, 2, 7, 8, 2]]), torch.tensor([[0] * 4 + [1] * 3] * 2)
    _, cosine = surface(Inputs(ids, None, kinds, None, None), torch.zeros(1))
    assert_close(cosine[0], torch.ones(1))
    one, other = (surface.counts(part, None, None)[0, 0] for part in (ids[1:, 1:3], ids[1:, 4:6]))
    assert_close(cosine[1, 0], torch.cosine_similarity(one.log1p(), other.log1p(), dim=0))


@pytest.mark.parametrize("pairs", [False, True])
def test_a_classifier_with_a_surface_reads_no_padding_and_is_saved_whole(pairs, tmp_path):
    model = spelled_model(classifier_buckets=64, classifier_pooling="words", classifier_pairs=pairs)
    ids, kinds = torch.tensor([[1, 5, 6, 2, 3, 4, 2]]), torch.tensor([[0] * 4 + [1] * 3])
    padded = {"input_ids": F.pad(ids, (0, 3)), "token_type_ids": F.pad(kinds, (0, 3))}
    with torch.no_grad():
        logits = model(input_ids=ids, token_type_ids=kinds).logits
        together = model(**padded, attention_mask=torch.tensor([[1] * 7 + [0] * 3])).logits
        assert_close(together, logits)
        embeds = model.get_input_embeddings()(ids)
        assert model(inputs_embeds=embeds, token_type_ids=kinds).logits.shape == logits.shape
        model.save_pretrained(tmp_path)
        again = HfTinyElectraForSequenceClassification.from_pretrained(tmp_path)
        assert_close(again(input_ids=ids, token_type_ids=kinds).logits, logits, 1e-6)


def test_a_new_surface_adds_nothing_to_what_a_pretrained_encoder_says(tmp_path):
    HfTinyElectraModel(HfTinyElectraConfig(**SIZES)).save_pretrained(tmp_path)
    model = HfTinyElectraForSequenceClassification.from_pretrained(tmp_path, classifier_buckets=64, num_labels=3)
    assert not model.surface.spelling.numbers.any() and not model.surface.out.weight.any()
    assert torch.equal(model.surface.rarity, torch.ones(64))
