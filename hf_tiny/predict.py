"""Use a model that a recipe has made: predict, or evaluate on new data.

hf-tiny predict runs/classifier new.tsv > predicted.tsv
hf-tiny predict runs/classifier --text "정말 재미있다" "지루했다"
hf-tiny evaluate runs/classifier labelled.tsv --output_dir runs/classifier_on_labelled
"""

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from accelerate import Accelerator
from transformers import AutoImageProcessor, AutoModel, PreTrainedModel
from transformers.utils import cached_file

from . import arguments, checkpoint, report
from .arguments import Arguments, flag
from .baselines import SAME_FOR_ALL
from .data import predictions
from .data.splits import SplitArguments, say_if_seen
from .errors import InputError
from .processes import start_processes
from .start import load_config, quiet
from .tasks import Task, longest_input
from .tasks.classify import TextTask
from .tasks.embed import EmbedTask, SentenceEncoder
from .tasks.images import ImageTask, MaskedImageTask
from .tasks.parse import LinkTask
from .tasks.pretrain import ContinueTask, TokenTask
from .tasks.tag import TagTask
from .tasks.translate import PairTask
from .tokenizer import load_existing

logger = logging.getLogger(__name__)

# How the name of a model's class ends, what such a model does, the Auto class that loads it, and how it is put to work.
TASKS: dict[str, tuple[str, Any, type[Task]]] = {
    "ForSequenceClassification": ("classify", transformers.AutoModelForSequenceClassification, TextTask),
    "ForTokenClassification": ("tag", transformers.AutoModelForTokenClassification, TagTask),
    "TokenLinkingModel": ("parse", AutoModel, LinkTask),
    "ForConditionalGeneration": ("translate", transformers.AutoModelForSeq2SeqLM, PairTask),
    "MTModel": ("translate", transformers.AutoModelForSeq2SeqLM, PairTask),
    "ForImageClassification": ("images", transformers.AutoModelForImageClassification, ImageTask),
    "ForMaskedImageModeling": ("masked_images", transformers.AutoModelForMaskedImageModeling, MaskedImageTask),
    "ElectraForPreTraining": ("electra", transformers.AutoModelForPreTraining, TokenTask),
    "ForMaskedLM": ("fill_mask", transformers.AutoModelForMaskedLM, TokenTask),
    "ForCausalLM": ("generate", transformers.AutoModelForCausalLM, ContinueTask),
}
EMBED = "embed"  # an encoder that sentence-transformers can load
OF_IMAGES = ("images", "masked_images")


USAGE = {
    "predict": "hf-tiny predict MODEL [FILE ...] [--text TEXT ...] [--output_dir FOLDER] [flags of the model's recipe]",
    "evaluate": "hf-tiny evaluate MODEL FILE ... [--output_dir FOLDER] [flags of the model's recipe]",
}
STANDARD_INPUT = "-"
USUAL_LENGTH = 512  # of a window, where no recipe.yaml says it
ITEMS = 20_000  # that are encoded at once, so that memory is needed for these only


@dataclass(frozen=True, kw_only=True)
class PredictArguments(Arguments):
    """Beside the flags of the model's own recipe, which are as they were in its run."""

    text: list[str] | None = flag(None, "Texts, in place of files.")
    output_dir: str | None = flag(None, "Folder for what is written; by default predictions are printed.")
    per_device_eval_batch_size: int = flag(32, "Samples in a batch.", above=0)
    max_tokens: int = flag(4096, "Number of tokens in a batch, padding included.", low=1)


@dataclass(frozen=True)
class TrainedModel:
    """A model for use, with all that belongs to it.

    name: a folder or a Hub id; of a run that has not finished, its newest checkpoint.
    task: what it does: classify, tag, parse, translate, images, embed, or, without fine-tuning, electra (generator and
        discriminator), fill_mask, generate, masked_images.
    work: how it is put to use.
    processor: the tokenizer or the image processor.
    settings: the flags of the run that made it, by its recipe.yaml; none where there is no such file.
    """

    name: str
    task: str
    work: type[Task]
    model: PreTrainedModel
    processor: object
    settings: dict


def load(name: str) -> TrainedModel:
    """The model of a run, by its folder or its Hub id."""
    name = checkpoint.usable(str(name))
    if Path(name).is_dir():
        checkpoint.check_model(Path(name))
    config = load_config("", name)
    kind = (config.architectures or ["a model without a class"])[0]
    endings = [ending for ending in TASKS if kind.endswith(ending)]
    embeds = file_of(name, "modules.json") is not None
    if not (embeds or endings):
        raise InputError(
            f"{name} holds {kind}, and it is not known what to use it for: fine-tune it first. `hf-tiny --help` lists the recipes."
        )
    task, auto_class, work = (EMBED, AutoModel, EmbedTask) if embeds else TASKS[endings[0]]
    with checkpoint.loaded(f"{name} cannot be loaded"), quiet():
        model = auto_class.from_pretrained(name, trust_remote_code=False)
        processor = (
            AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
            if task in OF_IMAGES
            else load_existing("the model", name, ())
        )
    if embeds:
        model = SentenceEncoder(model, temperature=None)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return TrainedModel(name, task, work, model.float().eval().to(device), processor, _settings(name))


def _settings(name: str) -> dict:
    """A checkpoint lies in the folder of its run, which has the recipe."""
    beside = Path(name).resolve().parent / "recipe.yaml"
    path = file_of(name, "recipe.yaml") or (str(beside) if Path(name).is_dir() and beside.is_file() else None)
    if path is None:
        return {}
    try:
        found = dict(yaml.safe_load(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise InputError(
            f"{path} cannot be read: {error}. Delete it to use the model without the flags of its run."
        ) from error
    return arguments.found_again(found, Path(path).parent)


def file_of(name: str, file: str) -> str | None:
    """A file of a model in a folder or on the Hub, if it has one of that name."""
    absent = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    return cached_file(name, file, **absent)


# Flags


def build(trained: TrainedModel, argv: Sequence[str] = ()) -> Task:
    """The model at work. argv: flags, which win over those of its run."""
    kind = trained.work
    flags = make_dataclass("Flags", [], bases=(kind.ARGUMENTS, PredictArguments), frozen=True, kw_only=True)
    flags.__doc__ = "The defaults are those of the model's run, where it has left a recipe.yaml."
    own = {field.name for field in fields(PredictArguments)}
    settings = {n: value for n, value in trained.settings.items() if n in arguments.known(flags) and n not in own}
    limit = sys.maxsize
    if "max_seq_length" in arguments.known(flags):
        limit = longest_input(trained.model, trained.processor)
        length = settings["max_seq_length"] = min(settings.get("max_seq_length", USUAL_LENGTH), limit)
        settings["doc_stride"] = min(settings.get("doc_stride", length // 2), length // 2)
    given = arguments.parse(flags, [*arguments.as_flags(settings), *argv])
    if vars(given).get("max_seq_length", 0) > limit:
        raise InputError(f"--max_seq_length {given.max_seq_length}: the model reads at most {limit} tokens.")
    return kind(given, trained.model, trained.processor)


def sorted_out(verb: str, argv: Sequence[str]) -> tuple[Task, list[str]]:
    """The model at work and the files: of a command line the words before its flags."""
    count = next((n for n, word in enumerate(argv) if word.startswith("-") and word != STANDARD_INPUT), len(argv))
    (*names,), flags = argv[:count], argv[count:]
    if not names:
        if not {"-h", "--help"} & set(flags):
            raise InputError(f"There is no model. Usage: {USAGE[verb]}")
        print(f"usage: {USAGE[verb]}\n\nThe flags of a model: hf-tiny {verb} MODEL --help")
        sys.exit(0)
    allowed = ("train_file", "dataset_name", "dataset_config_name") if verb == "evaluate" else ()
    training = [field.name for field in fields(SplitArguments) if field.name not in allowed]
    for word in flags:
        if word.startswith("--") and word[2:].partition("=")[0].replace("-", "_") in training:
            raise InputError(f"{word}: this is for training. Files follow the model: {USAGE[verb]}")
    start_processes()
    trained = load(names[0])
    if not trained.work.PREDICTS:
        raise InputError(
            f"{trained.name} is a {type(trained.model).__name__}: it predicts nothing by itself. Fine-tune it first, or look at "
            "it with `hf-tiny demo`."
        )
    return build(trained, flags), names[1:]


def free_folder(task: Task, *patterns: str) -> Path | None:
    """--output_dir, if it was given; what is there is never written over."""
    if task.arguments.output_dir is None:
        return None
    folder = Path(task.arguments.output_dir)
    held = [path.name for pattern in patterns for path in folder.glob(pattern)]
    if held:
        raise InputError(f"--output_dir {folder} holds {held[0]} already. Choose another folder, or delete it.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output_dir {folder} cannot be made: {error.strerror}.") from error
    return folder


# Predicting


def items_of(task: Task, files: Sequence[str]) -> list:
    """What is asked for: texts of --text, files, or standard input."""
    texts = task.arguments.text
    if texts and files:
        raise InputError(f"--text and {files[0]}: give texts or files, not both.")
    if texts:
        return list(task.from_texts([(f"--text {number}", text) for number, text in enumerate(texts, 1)]))
    if files and STANDARD_INPUT not in files:
        return task.read(files, labelled=False)
    if files[1:]:
        raise InputError(f"{STANDARD_INPUT} stands for standard input, which is read alone.")
    if not files and sys.stdin.isatty():
        raise InputError(f"There is nothing to predict. Usage: {USAGE['predict']}; or give texts as standard input.")
    try:
        lines = sys.stdin.buffer.read().decode().splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"Standard input is not UTF-8 ({error}). Give a file, and --encoding.") from error
    found = [(f"standard input:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise InputError("Standard input is empty: there is nothing to predict.")
    return list(task.from_texts(found))


def predicted(task: Task, items: list, folder: Path | None = None) -> Iterator[tuple[str, str | dict]]:
    """The answers, in the order and the format of the items: a suffix, and a line or the columns of a table. folder: for images
    about the first of them."""
    for start in range(0, len(items), ITEMS):
        evaluation = task.evaluation_of(items[start : start + ITEMS], "predictions", labelled=False)
        yield from evaluation.predict(task.model)
        if folder is not None and not start:
            evaluation.draw(folder)


def predict(argv: Sequence[str]) -> None:
    task, files = sorted_out("predict", argv)
    items = items_of(task, files)
    folder = free_folder(task, "predictions*")
    kinds = task.kinds(items)
    if folder is None and (len(kinds) > 1 or kinds & predictions.BINARY):
        raise InputError(f"Predictions for {', '.join(sorted(kinds))} cannot be printed together: give --output_dir.")
    rows = list(predicted(task, items, folder))
    if folder is None:
        predictions.print_rows(rows, sys.stdout)
    else:
        paths = predictions.write(rows, folder, "predictions")
        logger.info(f"{len(items):,} {task.WHAT}: {', '.join(map(str, paths))}")


# Evaluating


def labelled_items(task: Task, files: Sequence[str]) -> list:
    try:
        return task.read(files, labelled=True)
    except InputError as error:
        try:
            task.read(files, labelled=False)
        except InputError:
            raise error from None
        raise InputError(f"{error} Figures need labels; `hf-tiny predict` needs none.") from error


def baseline_figures(task: Task, items: list) -> dict[str, Any]:
    """What the run's baseline scores on the items; nothing where the data that it learns from is gone."""
    logger.info("The data of the run is read again, for a baseline to learn from.")
    try:
        splits = {"train": task.splits()["train"], "eval": items}
    except InputError as error:
        logger.warning(f"No baseline: it learns from the training data of the run, which cannot be read. {error}")
        return {}
    say_if_seen(splits, task.WHAT)
    baseline = task.baseline(splits)
    figures = {n: value for n, value in baseline.figures["eval"].items() if n not in SAME_FOR_ALL}
    return {"baseline_name": baseline.name, **{f"baseline_{name}": value for name, value in figures.items()}}


def evaluate(argv: Sequence[str]) -> None:
    task, files = sorted_out("evaluate", argv)
    if not files:
        raise InputError(f"There is nothing to evaluate on. Usage: {USAGE['evaluate']}")
    items = labelled_items(task, files)
    folder = free_folder(task, "eval_predictions.*", "all_results.json")
    evaluation = task.evaluation_of(items, "eval", labelled=True)
    items = list(evaluation.items)  # of images those that can be read
    figures = evaluation(task.model, Accelerator(cpu=not torch.accelerator.is_available(), mixed_precision="no"))
    results: dict[str, Any] = {f"eval_{name}": value for name, value in figures.items()}
    results |= {"eval_samples": len(items), **baseline_figures(task, items)}
    report.print_figures(results)
    print(f"  {report.compare(results)}")
    if folder is not None:
        evaluation.report(folder)
        (folder / "all_results.json").write_text(json.dumps(results, indent=2))
        logger.info(f"predictions, pictures and all_results.json: {folder}")


def main(argv: Sequence[str] | None = None) -> None:
    verb, *words = sys.argv[1:] if argv is None else argv
    {"predict": predict, "evaluate": evaluate}[verb](words)
