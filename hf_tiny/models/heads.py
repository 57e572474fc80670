"""Task heads shared by the encoders: one label for a text, a label for each token, a link from each word to another."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_outputs import SequenceClassifierOutput, TokenClassifierOutput
from transformers.utils.generic import can_return_tuple

from .layers import Dropout, cross_entropy

POOLING = ("cls", "mean")


def count_items(labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    """What a loss is divided by: the first count of the whole optimiser step, or the labels of this batch."""
    given = labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch
    return torch.as_tensor(given, device=labels.device).flatten()[0].clamp(min=1)  # without labels the loss is 0


def head_dropout(config: PreTrainedConfig) -> Dropout:
    return Dropout(config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout)


class ClassificationHead(nn.Module):
    """ELECTRA's: a hidden layer on the first token's state, or on the mean of all."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.pooling = config.classifier_pooling
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN["gelu"]
        self.dropout = head_dropout(config)
        self.out = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        if self.pooling == "cls":
            x = x[:, 0]
        elif attention_mask is None:
            x = x.mean(1)
        else:
            weights = attention_mask.to(x.dtype)[:, :, None]
            x = (x * weights).sum(1) / weights.sum(1).clamp(min=1)
        return self.out(self.dropout(self.activation(self.dense(self.dropout(x)))))


class SequenceClassification:
    """N -> 1 on the encoder `encoder_class`: a label, or a number when there is one output (regression)."""

    encoder_class: type[nn.Module]

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        if config.problem_type == "multi_label_classification":
            raise ValueError("Several labels for one text are not supported: choose one label a text, or regression.")
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, self.encoder_class(config))
        self.classifier = ClassificationHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs,
    ) -> SequenceClassifierOutput:
        """labels (batch,): the class of each text, or its value."""
        outputs = self.base_model(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        logits = self.classifier(outputs.last_hidden_state, attention_mask)
        loss = None
        if labels is not None:
            count = count_items(labels, num_items_in_batch)
            if self.num_labels == 1 or self.config.problem_type == "regression":
                loss = F.mse_loss(logits.float().squeeze(-1), labels.float(), reduction="sum") / count
            else:
                loss = cross_entropy(logits, labels, count)
        return SequenceClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class TokenClassification:
    """N -> N on the encoder `encoder_class`: a label for each token whose label is not -100."""

    encoder_class: type[nn.Module]

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, self.encoder_class(config))
        self.dropout = head_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs,
    ) -> TokenClassifierOutput:
        """labels (batch, length): -100 where a token has none."""
        outputs = self.base_model(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), count_items(labels, num_items_in_batch))
        return TokenClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class Perceptron(nn.Sequential):
    """The layer that gives a word its state for one of the roles of a link."""

    def __init__(self, hidden_size: int, size: int, dropout: float):
        super().__init__(nn.Linear(hidden_size, size), ACT2FN["gelu"], Dropout(dropout))


class LinkingHead(nn.Module):
    """Biaffine attention over words (Dozat & Manning, 2017): each word chooses a word, or place 0 (root, or none)."""

    def __init__(self, hidden_size: int, arc_size: int, label_size: int, num_labels: int, dropout: float):
        super().__init__()
        self.place_0 = nn.Embedding(1, hidden_size)
        self.dropout = Dropout(dropout)
        self.arc_from = Perceptron(hidden_size, arc_size, dropout)
        self.arc_to = Perceptron(hidden_size, arc_size, dropout)
        self.arc = nn.Linear(arc_size, arc_size)
        self.label_from = Perceptron(hidden_size, label_size, dropout)
        self.label_to = Perceptron(hidden_size, label_size, dropout)
        self.label = nn.Linear(label_size, num_labels * label_size, bias=False)
        self.label_alone = nn.Linear(2 * label_size, num_labels)

    def words(self, x: Tensor, word_spans: Tensor) -> tuple[Tensor, Tensor]:
        """The mean over each word's tokens: (batch, words, hidden), and whether there is a word: (batch, words)."""
        places = torch.arange(x.shape[1], device=x.device)
        first, end = word_spans[:, :, :1], word_spans[:, :, 1:]  # (batch, words, 1)
        inside = ((places >= first) & (places < end)).to(x.dtype)  # (batch, words, length)
        sizes = inside.sum(-1, keepdim=True)
        return inside / sizes.clamp(min=1) @ x, sizes.squeeze(-1) > 0

    def forward(self, x: Tensor, word_spans: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Arc logits (batch, words, 1 + words), and what `labels_of` needs: the states of words and of places."""
        words, exist = self.words(x, word_spans)
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
