"""transformers' pipeline("dependency-parsing"): from a text or its words to the links between them. This file travels with a
parser: where hf_tiny is not installed, the pipeline needs trust_remote_code=True."""

import itertools
import os
import sys

import numpy as np
import torch
from torch import Tensor
from transformers import Pipeline

from .trees import maximum_spanning_tree
from .words import WordTokenizer, affixes, split_words

TASK, MODEL_TYPE = "dependency-parsing", "hf_tiny_token_linking"


class DependencyParsingPipeline(Pipeline):
    """For each word {"id", "word", "head", "relation", "score"}: ids count from 1, head 0 is the root (or none), and
    the score is the probability of head and relation together.

    It takes a text, which `split_words` splits, or a list of words, or a list of texts or of lists of words. Strings in
    a list are the words of one sentence, unless there is white space in one of them: then each is a text.
    `is_split_into_words` True or False says which of the two they are.
    """

    _load_processor = False
    _load_image_processor = False
    _load_video_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        if self.model.config.model_type != MODEL_TYPE:
            raise ValueError(
                f"{TASK} needs a model that links words ({MODEL_TYPE}), but this one is {self.model.config.model_type}: "
                "fine-tune it first."
            )
        self.model.eval()  # in training it does not compute the labels of all links
        self.tokenizer.padding_side = "right"  # word_spans count tokens from the left
        self.words = WordTokenizer(self.tokenizer)
        positions = self.model.config.get_text_config().to_dict().get("max_position_embeddings", sys.maxsize)
        self.window = min(self.tokenizer.model_max_length, positions)

    def _sanitize_parameters(self, **kwargs) -> tuple[dict, dict, dict]:
        if kwargs:
            raise ValueError(f"{TASK} does not know {', '.join(kwargs)}.")
        return {}, {}, {}

    def __call__(self, inputs, *, is_split_into_words: bool | None = None, **kwargs):
        if not isinstance(inputs, list):  # one text, or a stream of sentences
            return super().__call__(inputs, **kwargs)
        if not inputs:
            return []
        if all(isinstance(item, str) for item in inputs):
            if is_split_into_words is None:
                is_split_into_words = not any(len(item.split()) > 1 for item in inputs)
            if is_split_into_words:
                return super().__call__([inputs], **kwargs)[0]
        return super().__call__(inputs, **kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs) -> None:
        """Model and tokenizer: with the model goes this file, and its configuration names this class."""
        self.model.save_pretrained(save_directory, **kwargs)
        self.tokenizer.save_pretrained(save_directory, **kwargs)

    def encode(self, words: list[str]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The tokens of the words, exactly as in training, and which of them each word has: (words, 2)."""
        tokens = self.words.tokens([(self.words.space if place else "") + word for place, word in enumerate(words)])
        ends = np.cumsum([self.words.before, *map(len, tokens)])
        return self.words.framed(list(itertools.chain(*tokens))), np.stack([ends[:-1], ends[1:]], axis=1)

    def preprocess(self, sentence: str | list[str]) -> dict[str, Tensor | list[str]]:
        words = split_words(sentence) if isinstance(sentence, str) else list(sentence)
        feature, spans = self.encode(words)
        size = len(feature["input_ids"])
        if size > self.window:
            raise ValueError(
                f"The model reads at most {self.window} tokens, but the {len(words)} words from {words[0]!r} to "
                f"{words[-1]!r} are {size}: give one sentence at a time."
            )
        arrays = {**feature, "attention_mask": np.ones(size, dtype=np.int64), "word_spans": spans}
        if buckets := self.model.config.affix_buckets:
            arrays["affixes"] = affixes(words, buckets)
        return {**{name: torch.from_numpy(array)[None] for name, array in arrays.items()}, "words": words}

    def _forward(self, model_inputs: dict) -> dict:
        words = model_inputs.pop("words")
        outputs = self.model(**model_inputs)
        return {"arcs": outputs.logits, "labels": outputs.label_logits, "words": words}

    def postprocess(self, outputs: dict) -> list[dict[str, str | int | float]]:
        words = outputs["words"]
        count = len(words)
        if not words:
            return []
        arcs, labels = outputs["arcs"][0, :count, : count + 1].float(), outputs["labels"][0].float()
        heads = maximum_spanning_tree(arcs.numpy()) if self.model.config.tree else arcs.argmax(1).numpy()
        probabilities = arcs.softmax(1)
        links = []
        for number, (word, head) in enumerate(zip(words, heads.tolist(), strict=True)):
            score, label = labels[number, head].softmax(0).max(0)
            link = {"id": number + 1, "word": word, "head": head, "relation": self.model.config.id2label[label.item()]}
            links.append({**link, "score": (probabilities[number, head] * score).item()})
        return links
