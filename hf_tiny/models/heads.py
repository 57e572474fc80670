"""Task heads shared by the encoders: labels for a text, a label for each token, a link from each word to another."""

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput, TokenClassifierOutput
from transformers.utils import ModelOutput, logging
from transformers.utils.generic import can_return_tuple

from .layers import (
    Copies,
    Dropout,
    HfTinyTextConfig,
    Recurrence,
    binary_cross_entropy,
    cross_entropy,
    embed,
    layer_norm,
    linear_cross_entropy,
)
from .spelling import FACTOR, PRIME, Spelling, bucket

logger = logging.get_logger(__name__)
Count: TypeAlias = Tensor | int | None  # num_items_in_batch
COUNTED_ONCE = (
    "num_items_in_batch is one count of a step with several micro-batches, and this loss has two parts with counts of their "
    "own: gradients are off by a few percent. Trainer counts labels only: give it larger batches in the place of gradient "
    "accumulation, or pretrain with recipes/pretrain_electra.py, which is exact."
)


class EncoderConfig(HfTinyTextConfig):
    """Of an encoder of texts that has the heads of this file.

    classifier_pooling: what a text is classified by: the "mean" of its tokens' states, or the first one ("cls").
    classifier_dropout: in front of a task's output layer; `hidden_dropout_prob` when None.
    classifier_pairs: a classifier also sees what the two texts of a pair have in common.
    classifier_buckets: numbers into which the tokens of a text, pairs of neighbouring ones and the characters inside of them are
        hashed; a classifier adds a linear model of these counts to its answer (`Surface`); 0: it does not.
    tagger_lstm_size: of each direction of an LSTM over the tokens, between the encoder and the layer that tags them; 0: there
        is none.
    tagger_ngram_buckets: numbers into which the pairs and triples of neighbouring tokens are hashed, whose embeddings a tagger
        adds to the encoder's states; 0: there are none.
    """

    layer_norm_eps: float = 1e-12
    classifier_pooling: str = "mean"
    classifier_dropout: float | int | None = None
    classifier_pairs: bool = False
    classifier_buckets: int = 0
    tagger_lstm_size: int = 0
    tagger_ngram_buckets: int = 0


def read_counts(num_items_in_batch: Count, *found: Tensor) -> Tensor:
    """What losses are divided by: the counts of the whole optimiser step, or `found`, those of this batch.

    num_items_in_batch: a number, or a tensor of one or more. Trainer counts the labels only: what else is counted then
        follows in the proportion of this batch.
    """
    counts = torch.stack(found).float()
    if num_items_in_batch is not None:
        given = torch.as_tensor(num_items_in_batch, device=counts.device).float().flatten()
        if given.numel() >= len(found):
            counts = given[: len(found)]
        else:
            if not torch.compiler.is_compiling() and given != counts[0]:
                logger.warning_once(COUNTED_ONCE)
            counts = counts * (given / counts[0].clamp(min=1))
    return counts.clamp(min=1)  # without any label the loss is 0


def count_items(labels: Tensor, num_items_in_batch: Count) -> Tensor:
    """The first count of the step, or that of the labels in this batch."""
    return read_counts(num_items_in_batch, labels.ne(-100).sum())[0]


def classification_loss(
    logits: Tensor, labels: Tensor, config: PreTrainedConfig, num_items_in_batch: Count, smoothing: float = 0.0
) -> Tensor:
    """The loss of examples with logits (batch, classes), by the `problem_type` of the config:

    - multi_label_classification: binary cross entropy, the mean over the labels of an example, 0 or 1 for each class;
    - regression, also meant by a single class: the squared error, the mean over the values of an example;
    - otherwise cross entropy, with label smoothing: of class numbers (batch,), or of the probability of each class, as
      mixup has it.
    """
    problem = config.problem_type
    if config.num_labels == 1 and problem != "multi_label_classification":
        problem = "regression"
    if problem == "regression" and labels.dim() == 1:
        labels = labels[:, None]
    numbers = problem in ("regression", "multi_label_classification") or labels.is_floating_point()
    if labels.shape != (logits.shape if numbers else logits.shape[:1]):
        raise ValueError(
            f"labels are {labels.dtype} of shape {tuple(labels.shape)}: give class numbers ({len(logits)},), or floats "
            f"{tuple(logits.shape)} with the probability of each class; with problem_type multi_label_classification 0 "
            "or 1 for each class, with regression the values."
        )
    examples = torch.ones_like(labels[:, 0]) if numbers else labels
    count = count_items(examples, num_items_in_batch)
    if problem == "multi_label_classification":
        return binary_cross_entropy(logits, labels, None, logits.shape[1] * count)
    if problem == "regression":
        return F.mse_loss(logits.float(), labels.float(), reduction="sum") / (logits.shape[1] * count)
    return cross_entropy(logits, labels.float() if numbers else labels, count, smoothing)


def token_loss(logits: Tensor, labels: Tensor, num_items_in_batch: Count, smoothing: float = 0.0) -> Tensor:
    """Cross entropy of logits (batch, length, classes) and labels (batch, length), -100 where there is none."""
    count = count_items(labels, num_items_in_batch)
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), count, smoothing)


def predict_tokens(
    layer: nn.Linear,
    x: Tensor,
    labels: Tensor | None,
    num_items_in_batch: Count,
    smoothing: float = 0.0,
    copies: Copies | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of an output layer: the loss and, without smoothing and gradient, the nll, if there are labels; and the logits, unless
    there are labels in training. With copies the logits are logarithms of probabilities."""
    plain = type(layer) is nn.Linear  # one that was wrapped (LoRA ...) runs as it is
    if labels is not None and layer.training and plain and not torch.compiler.is_compiling():
        known = labels.ne(-100)  # sizes that depend on the data would split a compiled graph
        count = count_items(labels, num_items_in_batch)
        known_copies = None if copies is None else Copies(*(part[known] for part in copies))
        return *linear_cross_entropy(x[known], layer, labels[known], count, smoothing, known_copies), None
    logits = layer(x) if copies is None else copies.mix(layer(x))
    if labels is None:
        return None, None, logits
    loss = token_loss(logits, labels, num_items_in_batch, smoothing)
    nll = token_loss(logits.detach(), labels, num_items_in_batch) if smoothing else loss.detach()
    return loss, nll, None if layer.training and plain else logits


class Inputs(NamedTuple):
    """Of an encoder of texts."""

    input_ids: Tensor | None
    attention_mask: Tensor | None
    token_type_ids: Tensor | None
    position_ids: Tensor | None
    inputs_embeds: Tensor | None


class EncoderHead(PreTrainedModel):
    """A model with a head on an encoder of texts, which fills the `output_class`.

    A subclass has `predict(x, inputs, labels, num_items_in_batch)`, which gives, of the encoder's states x (batch, length,
    hidden), the loss, if there are labels, and the logits.
    """

    output_class: type[ModelOutput]

    def encode(self, *inputs: Tensor | None, **kwargs) -> BaseModelOutput:
        return self.base_model(*inputs, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Count = None,
        **kwargs,
    ) -> ModelOutput:
        """labels: a text's class, values or yes and no for each class (see `classification_loss`); or (batch, length) one
        for each token, -100 where it has none."""
        inputs = Inputs(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        outputs = self.encode(*inputs, return_dict=True, **kwargs)
        loss, logits = self.predict(outputs.last_hidden_state, inputs, labels, num_items_in_batch)
        return self.output_class(loss, logits, outputs.hidden_states, outputs.attentions)


def head_dropout(config: PreTrainedConfig) -> Dropout:
    return Dropout(config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout)


class ClassificationHead(nn.Module):
    """ELECTRA's, a hidden layer in front of the output; ModernBERT's has a norm after it."""

    def __init__(self, config: PreTrainedConfig, input_size: int | None = None):
        super().__init__()
        self.dense = nn.Linear(input_size or config.hidden_size, config.hidden_size, bias=not config.modern)
        self.activation = ACT2FN["gelu"]
        self.norm = layer_norm(config, config.hidden_size) if config.modern else nn.Identity()
        self.dropout = head_dropout(config)
        self.out = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.dropout(self.norm(self.activation(self.dense(self.dropout(x))))))


class Classification(EncoderHead):
    """Of texts or tokens, on the encoder `encoder_class`."""

    encoder_class: type[nn.Module]

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, self.encoder_class(config))
        self.build_classifier(config)
        self.post_init()

    def build_classifier(self, config: PreTrainedConfig) -> None:
        self.classifier = ClassificationHead(config)


class PairComparison(nn.Module):
    """What the two texts of a pair have in common: how near each token of a text is to its nearest of the other, as words,
    in context, and whether both are the same, each the mean over the text with weights that are learned (2 x 3 numbers);
    and the difference and the product of the means of their states (2 x hidden)."""

    SCALE = 10.0  # of the six numbers, which would hardly move an output layer at the usual rates

    def __init__(self, words: nn.Embedding, hidden_size: int):
        super().__init__()
        self.weigh = nn.Linear(words.embedding_dim, 1)
        self.size = 6 + 2 * hidden_size

    def forward(self, words: Tensor, x: Tensor, inputs: Inputs) -> Tensor:
        kinds = inputs.token_type_ids
        kinds = x.new_zeros(x.shape[:2], dtype=torch.long) if kinds is None else kinds  # (batch, length)
        there = torch.ones_like(kinds) if inputs.attention_mask is None else inputs.attention_mask
        texts = torch.stack((there * (1 - kinds), there * kinds), dim=1).to(x.dtype)  # (batch, 2, length)
        others = there[:, None] * (kinds[:, :, None] != kinds[:, None])  # (batch, length, length)
        directions, sums = (F.normalize(words, dim=-1), F.normalize(x, dim=-1)), words.sum(-1)
        near = [each @ each.mT for each in directions]
        near.append((sums[:, :, None] == sums[:, None]).to(x.dtype))  # the same word
        nearest = torch.stack(
            [each.masked_fill(others == 0, 0).amax(-1) for each in near], dim=-1
        )  # (batch, length, 3)
        weights = F.softplus(self.weigh(words)).mT * texts
        alike = weights @ nearest / weights.sum(-1, keepdim=True).clamp(min=1e-6)  # (batch, 2, 3)
        one, other = (texts @ x / texts.sum(-1, keepdim=True).clamp(min=1)).unbind(1)
        return torch.cat((self.SCALE * (alike.flatten(1) - 0.5), (one - other).abs(), one * other), dim=-1)


class Surface(nn.Module):
    """A linear model of what a text is written with: its tokens, pairs of neighbouring ones, and the characters inside of
    them (`Spelling`), hashed into numbers. Their counts weigh as in TF-IDF, by how rare they are in the texts to train on
    (`rarity`). Of a pair of texts it sees the product and the difference of both, and gives their cosine, too."""

    SCALE, DROPOUT = 10.0, 0.5  # of its inputs; unscaled they would hardly move a layer at the usual rates

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.texts, self.buckets = 1 + config.classifier_pairs, config.classifier_buckets
        self.spelling = Spelling(config, self.buckets)
        self.register_buffer("rarity", torch.ones(self.buckets))
        self.dropout = Dropout(self.DROPOUT if head_dropout(config).p else 0.0)  # none where the head has none
        self.out = nn.Linear(self.buckets * self.texts, config.num_labels, bias=False)

    def reset(self) -> None:
        init.ones_(self.rarity)
        init.zeros_(self.out.weight)

    def counts(self, ids: Tensor, attention_mask: Tensor | None, kinds: Tensor | None) -> Tensor:
        """(batch, texts, buckets). kinds: which text of a pair each token belongs to."""
        spelled = self.spelling(ids)  # (batch, length, numbers of a token); special tokens have none
        there = spelled[:, :, 0].ne(0).long()
        if attention_mask is not None:
            there = there * attention_mask
        kinds = torch.zeros_like(ids) if kinds is None or self.texts == 1 else kinds
        follow = there[:, :-1] * there[:, 1:] * kinds[:, :-1].eq(kinds[:, 1:])
        pairs = F.pad(bucket(ids[:, :-1], 1 + ids[:, 1:], self.buckets) * follow, (0, 1))
        alone = bucket(ids, torch.zeros_like(ids), self.buckets) * there
        numbers = torch.cat((alone[:, :, None], pairs[:, :, None], spelled * there[:, :, None]), dim=-1)
        places = (numbers + kinds[:, :, None] * self.buckets).flatten(1)
        found = torch.zeros(len(ids), self.texts * self.buckets, device=ids.device)
        found = found.scatter_add(1, places, torch.ones_like(places, dtype=found.dtype)).unflatten(1, (self.texts, -1))
        return F.pad(found[:, :, 1:], (1, 0))  # number 0 is none

    def forward(self, inputs: Inputs, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The logits, and of a pair of texts their cosine (batch, 1); zeros where there are embeddings in the place of tokens.
        x: any states of the batch."""
        if inputs.input_ids is None:
            return x.new_zeros(len(x), 1), x.new_zeros(len(x), 1) if self.texts == 2 else None
        counts = self.counts(inputs.input_ids, inputs.attention_mask, inputs.token_type_ids)
        sides = F.normalize(counts.log1p() * self.rarity, dim=-1)
        if self.texts == 1:
            return self.out(self.dropout(self.SCALE * sides[:, 0])), None
        one, other = sides.unbind(1)
        both = torch.cat((one * other, (one - other).abs()), dim=-1)
        return self.out(self.dropout(self.SCALE * both)), (one * other).sum(-1, keepdim=True).to(x.dtype)

    @torch.no_grad()
    def weigh(self, batches: Iterable[tuple[Tensor, Tensor | None, Tensor | None]]) -> None:
        """Set the rarity of all numbers by the texts to train on: for each batch what `counts` takes."""
        found, texts = torch.zeros_like(self.rarity), 0
        for batch in batches:
            counts = self.counts(*batch)
            found += counts.ne(0).sum((0, 1))
            texts += len(counts) * self.texts
        self.rarity.copy_(((1 + texts) / (1 + found)).log() + 1)


class SequenceClassification(Classification):
    """N -> 1: a label, several labels, or a number for a text."""

    output_class = SequenceClassifierOutput

    def build_classifier(self, config: PreTrainedConfig) -> None:
        words = self.base_model.get_input_embeddings()
        self.pairs = PairComparison(words, config.hidden_size) if config.classifier_pairs else None
        self.surface = Surface(config) if config.classifier_buckets else None
        size = config.hidden_size + (self.pairs.size if self.pairs else 0)
        size += words.embedding_dim if config.classifier_pooling == "words" else 0
        size += 1 if self.surface and self.pairs else 0
        self.classifier = ClassificationHead(config, size)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Surface | Spelling):
            module.reset()

    def predict(self, x, inputs, labels, num_items_in_batch):
        words = embed(self.get_input_embeddings(), inputs.input_ids, inputs.inputs_embeds)
        parts = [self.pooled(x, words, inputs.attention_mask)]
        if self.pairs is not None:
            parts.append(self.pairs(words, x, inputs))
        added = 0
        if self.surface is not None:
            added, cosine = self.surface(inputs, x)
            parts += [] if cosine is None else [PairComparison.SCALE * (cosine - 0.5)]
        logits = self.classifier(torch.cat(parts, dim=-1)) + added
        if labels is None:
            return None, logits
        return classification_loss(logits, labels, self.config, num_items_in_batch), logits

    def pooled(self, x: Tensor, words: Tensor, attention_mask: Tensor | None) -> Tensor:
        if self.config.classifier_pooling == "cls":
            return x[:, 0]
        if self.config.classifier_pooling == "words":
            x = torch.cat((x, F.layer_norm(words, words.shape[-1:])), dim=-1)
        if attention_mask is None:
            return x.mean(1)
        weights = attention_mask.to(x.dtype)[:, :, None]
        return (x * weights).sum(1) / weights.sum(1).clamp(min=1)


class TokenNgrams(nn.Module):
    """The sum of the embeddings of all pairs and triples of neighbouring tokens that a token belongs to."""

    SPANS = ((-1, 0), (0, 1), (-2, 0), (-1, 1), (0, 2))  # the first and the last place, counted from the token

    def __init__(self, buckets: int, size: int):
        super().__init__()
        self.table = nn.Embedding(buckets, size)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        tokens = input_ids + 1 if attention_mask is None else (input_ids + 1) * attention_mask
        around = F.pad(tokens, (2, 2))  # 0: beyond the text
        numbers = []
        for kind, (first, last) in enumerate(self.SPANS):
            number = torch.full_like(input_ids, kind)
            for place in range(2 + first, 3 + last):
                number = (number * FACTOR + around[:, place : place + input_ids.shape[1]]) % PRIME
            numbers.append(number % self.table.num_embeddings)
        return self.table(torch.stack(numbers)).sum(0)


class TokenClassification(Classification):
    """N -> N: a label for each token whose label is not -100."""

    output_class = TokenClassifierOutput

    def build_classifier(self, config: PreTrainedConfig) -> None:
        self.dropout = nn.Identity() if config.modern else head_dropout(config)
        buckets = config.tagger_ngram_buckets
        self.ngrams = TokenNgrams(buckets, config.hidden_size) if buckets else None
        self.lstm = WordLSTM(config.hidden_size, config.tagger_lstm_size) if config.tagger_lstm_size else None
        size = 2 * config.tagger_lstm_size or config.hidden_size
        self.classifier = ClassificationHead(config, size) if config.modern else nn.Linear(size, config.num_labels)

    def predict(self, x, inputs, labels, num_items_in_batch):
        exist = inputs.attention_mask
        if self.ngrams is not None and inputs.input_ids is not None:
            x = x + self.ngrams(inputs.input_ids, exist)
        if self.lstm is not None:
            exist = torch.ones_like(x[:, :, 0], dtype=torch.long) if exist is None else exist
            x = self.lstm(self.dropout(x), exist)
        logits = self.classifier(self.dropout(x))
        return None if labels is None else token_loss(logits, labels, num_items_in_batch), logits


class Perceptron(nn.Sequential):
    """The layer that gives a word its state for one of the roles of a link."""

    def __init__(self, hidden_size: int, size: int, dropout: float):
        super().__init__(nn.Linear(hidden_size, size), ACT2FN["gelu"], Dropout(dropout))


class WordLSTM(nn.Module):
    """Words read in order, from both ends; padding after them changes nothing."""

    def __init__(self, input_size: int, size: int):
        super().__init__()
        self.forwards, self.backwards = Recurrence(input_size, size), Recurrence(input_size, size)

    def forward(self, words: Tensor, exist: Tensor) -> Tensor:
        places = torch.arange(exist.shape[1], device=exist.device)
        size = (exist * (1 + places)).amax(1, keepdim=True)  # (batch, 1): up to the last word there is
        turned = torch.where(places < size, size - 1 - places, places)[:, :, None]  # (batch, words, 1)
        back = self.backwards(words.gather(1, turned.expand(-1, -1, words.shape[-1])))
        ahead = self.forwards(words)
        return torch.cat(
            (ahead, back.gather(1, turned.expand(-1, -1, back.shape[-1]))), dim=-1
        )  # an export keeps any length


class LinkingHead(nn.Module):
    """Biaffine attention over words (Dozat & Manning, 2017): each word chooses a word, or place 0 (root, or none).

    config: see `HfTinyTokenLinkingConfig`; hidden_size: of the encoder.
    """

    def __init__(self, config: PreTrainedConfig, hidden_size: int):
        super().__init__()
        arc_size, label_size, dropout = config.arc_size, config.label_size, config.linking_dropout
        self.dropout = Dropout(dropout)
        self.affixes = nn.Embedding(config.affix_buckets, hidden_size, padding_idx=0) if config.affix_buckets else None
        self.lstm = WordLSTM(hidden_size, config.lstm_size) if config.lstm_size else None
        hidden_size = 2 * config.lstm_size or hidden_size
        self.place_0 = nn.Embedding(1, hidden_size)
        self.arc_from = Perceptron(hidden_size, arc_size, dropout)
        self.arc_to = Perceptron(hidden_size, arc_size, dropout)
        self.arc = nn.Linear(arc_size, arc_size)
        self.label_from = Perceptron(hidden_size, label_size, dropout)
        self.label_to = Perceptron(hidden_size, label_size, dropout)
        self.label = nn.Linear(label_size, config.num_labels * label_size, bias=False)
        self.label_alone = nn.Linear(2 * label_size, config.num_labels)

    def words(self, x: Tensor, word_spans: Tensor) -> tuple[Tensor, Tensor]:
        """The mean over each word's tokens: (batch, words, hidden), and whether there is a word: (batch, words)."""
        places = torch.arange(x.shape[1], device=x.device)
        first, end = word_spans[:, :, :1], word_spans[:, :, 1:]  # (batch, words, 1)
        inside = ((places >= first) & (places < end)).to(x.dtype)  # (batch, words, length)
        sizes = inside.sum(-1, keepdim=True)
        return inside / sizes.clamp(min=1) @ x, sizes.squeeze(-1) > 0

    def forward(self, x: Tensor, word_spans: Tensor, affixes: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Arc logits (batch, words, 1 + words), and what `labels_of` needs: the states of words and of places."""
        words, exist = self.words(x, word_spans)
        if self.affixes is not None and affixes is not None:
            words = words + self.affixes(affixes).sum(2)
        if self.lstm is not None:
            words = self.lstm(self.dropout(words), exist)
        words = self.dropout(words)
        batch, count = exist.shape
        places = torch.cat((self.place_0(word_spans.new_zeros(batch, 1)).to(words.dtype), words), dim=1)
        arcs = self.arc(self.arc_from(words)) @ self.arc_to(places).mT
        itself = torch.eye(count, count + 1, dtype=torch.bool, device=x.device).roll(1, dims=1)
        possible = F.pad(exist, (1, 0), value=True)[:, None] & ~itself  # no padding, and not the word itself
        return arcs.masked_fill(~possible, torch.finfo(arcs.dtype).min), words, places

    def labels_of(self, words: Tensor, chosen: Tensor) -> Tensor:
        """Label logits (..., labels) of links from `words` to `chosen`, both (..., hidden)."""
        start, end = self.label_from(words), self.label_to(chosen)
        pairs = self.label(start).unflatten(-1, (-1, start.shape[-1]))  # (..., labels, size)
        return (pairs @ end[..., None]).squeeze(-1) + self.label_alone(torch.cat((start, end), dim=-1))

    def all_labels(self, words: Tensor, places: Tensor) -> Tensor:
        """Label logits of every link there could be: (batch, words, places, labels)."""
        start, end = self.label_from(words), self.label_to(places)
        pairs = self.label(start).unflatten(-1, (-1, start.shape[-1]))  # (batch, words, labels, size)
        both = torch.einsum("bwls,bps->bwpl", pairs, end)
        # By calls of the layer, not by its weights: it may have an adapter, or lie on another device.
        size = start.shape[-1]
        alone_start, alone_end = self.label_alone(F.pad(start, (0, size))), self.label_alone(F.pad(end, (size, 0)))
        bias = self.label_alone(start.new_zeros(2 * size))
        return both + alone_start[:, :, None] + (alone_end - bias)[:, None]
