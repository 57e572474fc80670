"""A trained model at work on new data: what the tasks have in common."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import PreTrainedModel

from hf_tiny.arguments import Arguments, flag
from hf_tiny.baselines import Baseline
from hf_tiny.data import sources
from hf_tiny.data.batches import Batch, BucketedBatches
from hf_tiny.data.encoding import Decoding
from hf_tiny.data.splits import known_labels
from hf_tiny.data.windows import Feature
from hf_tiny.errors import InputError
from hf_tiny.evaluation import Evaluation

logger = logging.getLogger(__name__)

FILE = "file"  # stands where messages name a flag
Line = tuple[str, str]  # its place and its text


@dataclass(frozen=True, kw_only=True)
class PredictArguments(Arguments):
    """Beside the flags of the model's own recipe, which are as they were in its run."""

    text: list[str] | None = flag(None, "Texts, in place of files.")
    output_dir: str | None = flag(None, "Folder for what is written; by default predictions are printed.")
    per_device_eval_batch_size: int = flag(32, "Samples in a batch.", above=0)
    max_tokens: int = flag(4096, "Number of tokens in a batch, padding included.", low=1)


class Predictor:
    """A model, its processor and the flags by which data is read. A task has a subclass that says how.

    arguments: a PredictArguments that is also an ARGUMENTS.
    """

    ARGUMENTS: ClassVar[type]  # the flags by which its recipe reads data
    WHAT: ClassVar[str] = "texts"
    TABLES: ClassVar[tuple[str, ...]] = tuple(sources.TABLES)  # files that are not lines of raw text
    OPEN_ENDED: ClassVar[bool] = False  # whether data may have labels that the model does not know

    def __init__(self, model: PreTrainedModel, processor: Any, arguments: Any):
        self.model, self.processor, self.arguments = model, processor, arguments
        self.names: list[str] = [model.config.id2label[number] for number in range(model.config.num_labels)]

    # What a task says

    def from_file(self, path: str, decoding: Decoding, labelled: bool) -> Iterable:
        """The items of a file as the recipe reads it."""
        raise NotImplementedError

    def from_texts(self, lines: list[Line]) -> Iterable:
        """Items without labels from raw text."""
        raise NotImplementedError

    def are_labelled(self, lines: list[Line]) -> bool:
        """Whether lines are as the recipe reads them and not raw text."""
        return False

    def evaluation(self, items: list, labelled: bool, split: str) -> Evaluation:
        raise NotImplementedError

    def train_items(self) -> list:
        """What the model was trained on."""
        raise NotImplementedError

    def baseline(self, splits: dict[str, list]) -> Baseline:
        raise NotImplementedError

    def kinds(self, items: list) -> set[str]:
        """The suffixes of the files that predictions are written to."""
        return {item.kind for item in items}

    # What they share

    def read(self, patterns: Sequence[str], labelled: bool) -> list:
        """The items of files, folders and globs. Those that need no labels may be raw text, an item a line."""
        decoding, items = self.arguments.decoding, []
        for path in sources.expand(list(patterns), FILE, (*self.TABLES, sources.TEXT), any_suffix=True):
            if labelled or sources.kind(path) in self.TABLES:
                items += self.from_file(path, decoding, labelled)
                continue
            lines = [(f"{path}:{number}", line) for number, line in sources.numbered_lines(path, decoding)]
            filled = [line for line in lines if line[1].strip()]
            if self.are_labelled(filled):
                logger.info(f"{path}: its lines have labels, as those that the recipe reads.")
                items += self.from_file(path, decoding, False)
            else:
                decoding.counts["empty lines are left out"] += len(lines) - len(filled)
                items += self.from_texts(filled)
        for problem, count in (+decoding.counts).items():
            logger.warning(f"{count:,} {problem}")
        if not items:
            raise InputError(f"{', '.join(patterns)}: there are no {self.WHAT} in it.")
        return items

    def labels_of(self, items: list) -> list[str]:
        """Those that the model knows, and where labels are open ended then those that only the items have."""
        return known_labels(self.names, items, self.OPEN_ENDED)

    def batches(
        self, features: list[Feature], collate: Callable[[list], Batch], sides=("input_ids",)
    ) -> BucketedBatches:
        size, most = self.arguments.per_device_eval_batch_size, self.arguments.max_tokens
        return BucketedBatches(features, collate, size, most, 0, False, sides)
