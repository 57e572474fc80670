"""The model card, and the way to the Hub.

hf-tiny push runs/mine --hub_model_id you/name
"""

import argparse
import json
import logging
import math
import os
import platform
import re
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import jinja2
import torch
import yaml
from huggingface_hub import (
    CommitOperationAdd,
    EvalResult,
    EvalResultEntry,
    HfApi,
    ModelCard,
    ModelCardData,
    eval_result_entries_to_yaml,
    get_token,
)
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects, parse_ratelimit_headers, validate_repo_id
from transformers import PreTrainedModel

from . import checkpoint
from .arguments import CHECKSUM, flag
from .errors import InputError
from .progress import LOWER_IS_BETTER
from .report import compare, number, push_command

logger = logging.getLogger(__name__)

TEMPLATES = Path(__file__).with_name("model_cards")  # in a checkout a link
MEASURED = ("eval_", "test_", "baseline_", "forgetting_")
BASELINES = ("majority",)  # figures of somebody who has learned nothing: in the card, not in its index
SPLITS = {"eval": "validation", "test": "test"}
EVAL_RESULTS = ".eval_results"  # a folder that the Hub reads: scores on datasets that it has
NOT_PUSHED = [
    *("checkpoint-*", "abandoned-*", ".draft-*", ".lock", "hf_tiny/*"),  # the last: what tensorboard reads
    *("trainer_state.json", "ema.safetensors", checkpoint.MANIFEST, *(f"*{suffix}" for suffix in checkpoint.PICKLED)),
    f"{checkpoint.SHARDED_OPTIMIZER}/*",
]
PREDICTIONS = "*_predictions.*"
OWN_BRANCH = "hf_tiny"  # of the model itself, where its native twin is pushed
WAITS = (1.0, 5.0, 25.0)  # seconds before another try
LONGEST_WAIT = 600.0  # when the Hub asks for more, the push fails
NOT_LOGGED_IN = "you are not logged in: use `hf auth login`, or set HF_TOKEN"
ADVICE = {
    401: "the Hub does not know the token: log in again with `hf auth login`, or set HF_TOKEN",
    403: "the token may not write there: use one with the role `write`, or a --hub_model_id of your own",
    404: "there is no such repository or revision",
}


@dataclass(frozen=True, kw_only=True)
class HubArguments:
    """What of a run is pushed, and where to."""

    GROUP: ClassVar[str] = "Hub"

    push_to_hub: bool = flag(False, "Push the finished model.")
    hub_model_id: str | None = flag(None, "user/name on the Hub; by default the folder's name under your own.")
    hub_private_repo: bool = flag(False, "Make the repository private.")
    push_predictions: bool = flag(False, "Push the predictions, too: they hold the held-out rows of your data.")
    hub_strategy: str = flag(
        "end", "When to push: every_save pushes each checkpoint, too.", choices=("end", "every_save")
    )
    hub_revision: str | None = flag(None, "Branch to push to; it is made when it does not exist.")
    push_native: bool = flag(
        False,
        "Push the native twin of the model, which transformers reads by itself; the model goes to the branch hf_tiny.",
    )
    hub_license: str | None = flag(None, "Licence that the card names, such as apache-2.0.")
    hub_language: list[str] | None = flag(None, "Languages that the card names, such as en ko.")

    def repo(self, folder: Path) -> str:
        return self.hub_model_id or folder.resolve().name

    def of_model(self) -> "HubArguments":
        """Where the model itself goes: its native twin has the branch that was asked for."""
        return replace(self, hub_revision=OWN_BRANCH) if self.push_native else self


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a model card says beside the figures of the run."""

    template: str | None = None  # a file of model_cards/; by default that of the model's family
    data: str = "not stated"
    pipeline_tag: str | None = None  # the task, as the Hub calls it
    pipeline: str | None = None  # the task, as transformers.pipeline calls it
    options: str = ""  # more arguments of it, as code
    task: str = ""  # what the model is: "A tagger of words"
    base: str = ""  # what it was fine-tuned from
    example: str | dict[str, str] = ""  # an input to try it with
    labels: Sequence[str] | None = None
    scoring: str = ""  # how the figures were measured
    unit: str = "tokens"  # what the run counts
    num_beams: int = 1
    mask: str | None = None  # the tokenizer's mask token


def escape(text: str) -> str:
    """A text of the user's for Markdown: a table, a list of labels."""
    return re.sub(r"([\\`*\[\]<>|~]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", " ".join(text.split()))


def code(text: str) -> str:
    """The same as code, in which nothing is escaped."""
    ticks = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{ticks} {text} {ticks}" if "`" in text else f"`{text}`"


def command() -> str:
    """The command of this run, as it can be typed again."""
    script = Path(sys.argv[0])
    if script.parent.parent.name == "hf_tiny":  # installed with the wheel
        return shlex.join(["hf-tiny", script.stem.replace("_", "-"), *sys.argv[1:]])
    return shlex.join(["accelerate", "launch", "--quiet", f"{script.parent.name}/{script.name}", *sys.argv[1:]])


def header(name: str, family: str, figures: dict[str, float], card: Card, flags: dict) -> ModelCardData:
    """What the Hub reads of a card. The run's flags name the base model and the dataset, if these are on the Hub, the
    licence and the languages."""
    base, dataset = (on_hub(flags.get(name)) for name in ("model_name_or_path", "dataset_name"))
    space = flags.get("trackio_space_id") or ""
    languages = [
        code for code in map(flags.get, ("source_lang", "target_lang")) if re.fullmatch("[a-z]{2}", code or "")
    ]
    measured = [
        EvalResult(
            card.pipeline_tag or "other", dataset or "other", card.data, metric, value, dataset_split=SPLITS[split]
        )
        for (split, _, metric), value in ((figure.partition("_"), value) for figure, value in figures.items())
        if split in SPLITS and math.isfinite(value) and not metric.startswith(BASELINES)
    ]
    return ModelCardData(
        library_name="transformers",
        tags=[
            "hf_tiny",
            family,
            *(["trackio", f"trackio:https://huggingface.co/spaces/{space}"] if "/" in space else []),
        ],
        pipeline_tag=card.pipeline_tag,
        language=flags.get("hub_language") or languages or None,
        license=flags.get("hub_license"),
        datasets=dataset and [dataset],
        base_model=base,
        model_name=name,
        eval_results=measured or None,
    )


def on_hub(name: str | None) -> str | None:
    return None if name is None or Path(name).exists() else name


def beside_baseline(figures: dict[str, float]) -> list[tuple[str, float, float | None]]:
    """What was measured, each with what the baseline has there."""
    own = {name: value for name, value in figures.items() if not name.startswith("baseline_")}
    return [(name, value, figures.get(f"baseline_{name.removeprefix('eval_')}")) for name, value in own.items()]


def write_eval_results(output_dir: Path, results: dict, card: Card, flags: dict) -> None:
    """The main score of a fine-tuned model on a dataset of the Hub, for its leaderboards; on the test part if there is one."""
    dataset = on_hub(flags.get("dataset_name"))
    scores = [(name, value) for name, value in results.items() if name.startswith(("eval_", "test_"))]
    scores = [one for one in scores if not one[0].endswith((*LOWER_IS_BETTER, *BASELINES)) and math.isfinite(one[1])]
    if dataset is None or not card.base or not scores:
        return
    name, value = min(
        scores, key=lambda one: one[0].startswith("eval_")
    )  # the first one of the test, if there is a test
    split, _, metric = name.partition("_")
    baseline = results.get(f"baseline_{name.removeprefix('eval_')}")
    notes = f"{metric} on the {SPLITS[split]} part" + ("" if baseline is None else f"; baseline {number(baseline)}")
    entry = EvalResultEntry(dataset, flags.get("dataset_config_name") or "default", value, notes=notes)
    path = output_dir / EVAL_RESULTS / f"{dataset.replace('/', '--')}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(eval_result_entries_to_yaml([entry]), allow_unicode=True), encoding="utf-8")


def write_card(
    output_dir: Path,
    model: PreTrainedModel,
    results: dict[str, float],
    card: Card,
    flags: dict,
    commands: Sequence[str] = (),
) -> None:
    """README.md from the template of the card; only what was measured goes in. commands: of the run, in their order."""
    name, family = output_dir.resolve().name, model.config.model_type.removeprefix("hf_tiny_")
    figures = {name: value for name, value in results.items() if name.startswith(MEASURED) and name != "baseline_name"}
    data = header(name, family, figures, card, flags).to_yaml()
    fields = {
        **vars(card),
        "card_data": data,
        "name": name,
        "figures": beside_baseline(figures),
        "results": results,
        "comparison": escape(compare(results)),
        "config": model.config.to_dict(),
        "commands": commands or [command()],
        "hardware": f"{results['num_processes']} process(es) with {results['num_threads']} thread(s) each, {hardware()}",
        "images": sorted(path.name for path in output_dir.glob("*.png")),
    }
    path = TEMPLATES / f"{card.template or family}.md"
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, loader=jinja2.FileSystemLoader(TEMPLATES))
    quote = partial(json.dumps, ensure_ascii=False)
    environment.filters.update(number=number, escape=escape, code=code, quote=quote)
    try:
        text = environment.from_string(path.read_text(encoding="utf-8")).render(fields)
    except (jinja2.TemplateError, TypeError) as error:  # TypeError: an unknown field in a format
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
        logger.warning(
            f"{path}:{lines[-1] if lines else '?'}: {error}. README.md has its header only: correct it there."
        )
        text = f"---\n{data}\n---\n\n# {name}\n"
    write_eval_results(output_dir, results, card, flags)
    ModelCard(text).save(output_dir / "README.md")


def hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    gpu = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return f"{platform.machine()} CPU" if gpu is None else gpu.type


def check_name(option: str, name: str) -> None:
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise InputError(f"{option} {name}: {error}") from error


def own_repo(option: str, name: str) -> str:
    """The full name of a repository that the token may write to, or would make."""
    if get_token() is None:
        raise InputError(f"{option}: {NOT_LOGGED_IN}.")
    user = HfApi().whoami()
    role = user["auth"].get("accessToken", {}).get("role")
    owner = name.split("/")[0] if "/" in name else user["name"]
    if role == "read" or owner not in (user["name"], *(one["name"] for one in user["orgs"])):
        raise InputError(f"{option} to {name}, as {user['name']}: {ADVICE[403]}.")
    return name if "/" in name else f"{owner}/{name}"


def check_push(flags: HubArguments, output_dir: Path) -> None:
    """Before the training: whether the token may write there, and who will be able to read it."""
    name = flags.repo(output_dir)
    check_name("--hub_model_id", name)
    try:
        repo = own_repo("--push_to_hub", name)
        private = HfApi().repo_info(repo).private
    except RepositoryNotFoundError:
        private = flags.hub_private_repo
    except HfHubHTTPError as error:
        if error.response.status_code in ADVICE:
            raise InputError(f"--push_to_hub: {explain(error)}") from error
        logger.warning(f"The Hub cannot say now whether {name} can be pushed to: {explain(error)}")
        return
    except (HTTPError, OSError) as error:
        logger.warning(f"The Hub cannot be reached now: {explain(error)}. The model will be pushed at the end.")
        return
    readers = "private: only its members can read it" if private else "public: everybody can read it"
    logger.info(f"The model will be pushed to {repo}, which is {readers}.")


def shorten_paths(text: str, folder: Path) -> str:
    """Names in place of the paths on this machine that the run's flags have."""
    flags = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    values = [one for value in flags.values() for one in (value if isinstance(value, list) else [value])]
    texts = {value for value in (*values, str(folder)) if isinstance(value, str) and "/" in value}
    local = {value for value in texts if value.startswith((".", "/", "~")) or Path(value).exists()}
    for path in sorted(local, key=len, reverse=True):  # a path may be the beginning of another one
        text = text.replace(path, Path(path).name)
    return re.sub(rf"^{CHECKSUM}.*\n", "", text, flags=re.MULTILINE)  # of the longer ones


def upload(folder: Path, flags: HubArguments, title: str) -> str:
    """The model in `folder` becomes one commit; returns the address of the repository."""
    checkpoint.check_model(folder)
    if get_token() is None:
        raise InputError(NOT_LOGGED_IN)
    api = HfApi()
    url = api.create_repo(flags.repo(folder), private=flags.hub_private_repo or None, exist_ok=True)
    if flags.hub_revision:
        api.create_branch(url.repo_id, branch=flags.hub_revision, exist_ok=True)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    kept = [*NOT_PUSHED, *([] if flags.push_predictions else [PREDICTIONS])]
    files: dict[str, Path | bytes] = {name: folder / name for name in filter_repo_objects(names, ignore_patterns=kept)}
    for name in {"README.md", "recipe.yaml"} & files.keys():
        text = (folder / name).read_text(encoding="utf-8").replace("PATH_OR_ID", url.repo_id)
        files[name] = (shorten_paths(text, folder) if "recipe.yaml" in files else text).encode()
    operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in files.items()]
    # upload_folder may make several commits.
    api.create_commit(url.repo_id, operations, commit_message=title, revision=flags.hub_revision)
    return str(url)


def patience(error: Exception, wait: float) -> float | None:
    """Seconds after which another try is worth it; None: it is not."""
    if isinstance(error, HfHubHTTPError):
        status, headers = error.response.status_code, error.response.headers
        asked, limit = headers.get("Retry-After", ""), parse_ratelimit_headers(headers)
        used_up = limit is not None and limit.remaining == 0
        wait = max(wait, int(asked) if asked.isdigit() else 0, limit.reset_in_seconds if used_up else 0)
        return wait if (status in (408, 429) or status >= 500) and wait <= LONGEST_WAIT else None
    return wait if isinstance(error, HTTPError) else None  # the connection failed


def explain(error: Exception) -> str:
    """What went wrong, for people, and without the token, which some errors quote."""
    text = re.sub(r"Bearer [^'\"]*", "Bearer <token>", " ".join(str(error).split()) or type(error).__name__)
    advice = ADVICE.get(error.response.status_code) if isinstance(error, HfHubHTTPError) else None
    return f"{advice}. The Hub says: {text}" if advice else text


def push(folder: Path, flags: HubArguments, title: str = "Add the model") -> str | None:
    return patiently(lambda: upload(folder, flags, title), title)


def patiently(upload: Callable[[], str], title: str):
    """Push something as one commit, with patience; returns None, or why it was in vain. It raises nothing.

    upload: does it, and returns the address of the repository.
    """
    for wait in (*WAITS, math.inf):
        try:
            logger.info(f"  pushed:  {upload()} ({title})")
            return None
        except Exception as error:  # whatever it is, it must not cost the run; the client wraps some in a RuntimeError
            inner = error.__cause__ if isinstance(error, RuntimeError) else None
            cause = inner if isinstance(inner, Exception) else error
            seconds = patience(cause, wait)
            if seconds is None or seconds == math.inf:
                return explain(cause)
            logger.warning(f"The push is tried again in {seconds:g} s: {explain(cause)}")
            time.sleep(seconds)


def require_native(model: PreTrainedModel) -> None:
    """Refuse a model that has no native twin, and say why."""
    from . import convert  # it loads the code of every native model

    try:
        convert.converted(model)
    except InputError as error:
        raise InputError(f"--push_native: {error}") from error


def push_native(folder: Path, flags: HubArguments) -> str | None:
    """Like `push`: the native twin of the model in `folder`, with its card, its pictures and its recipe."""
    from . import convert

    with TemporaryDirectory() as name:
        target = Path(name)
        try:
            convert.convert(str(folder), target, main_at_top=True)
        except InputError as error:
            return str(error)
        for suffix in ("*.md", "*.png", "all_results.json", "recipe.yaml", f"{EVAL_RESULTS}/*"):
            for path in folder.glob(suffix):
                (target / path.relative_to(folder)).parent.mkdir(exist_ok=True)
                shutil.copy(path, target / path.relative_to(folder))
        if (card := target / "README.md").exists():
            text = card.read_text(encoding="utf-8")
            head, title, rest = re.split(r"(?m)(^# .*\n)", text, maxsplit=1)
            card.write_text(f"{head}{title}\n{native_note(target)}\n{rest}", encoding="utf-8")
        return push(target, flags, "Add the native model")


def push_all(folder: Path, flags: HubArguments) -> str | None:
    """The finished model, and where it is asked for its native twin."""
    return push(folder, flags.of_model()) or (push_native(folder, flags) if flags.push_native else None)


def native_note(folder: Path) -> str:
    """What a card says of the files beside it."""
    paths = sorted(folder.rglob("config.json"), key=lambda path: (path.parent != folder, path))
    main, *others = [json.loads(path.read_text(encoding="utf-8"))["architectures"][0] for path in paths]
    parts = [f", and in `{path.parent.name}/` `{part}`" for path, part in zip(paths[1:], others, strict=True)]
    return (
        f"The files here are `{main}`{''.join(parts)}, which transformers reads without `trust_remote_code`. What follows is about "
        f'the model that they were converted from, on the branch `{OWN_BRANCH}` (`revision="{OWN_BRANCH}"`).\n'
    )


class Pusher:
    """Pushes beside the training, one model after the other, each as it was when it was handed over."""

    def __init__(self, output_dir: Path, flags: HubArguments):
        self.output_dir, self.flags = output_dir, replace(flags, hub_model_id=flags.repo(output_dir))
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.failed = -math.inf  # when

    def save(self, saved: Path) -> None:
        """Push a checkpoint. It may be deleted meanwhile, so its files get a second name."""
        snapshot = saved.with_name(f".draft-push-{saved.name}")
        try:
            shutil.copytree(saved, snapshot, copy_function=os.link)
        except OSError as error:  # a disk that has no second names, or no room for them
            shutil.rmtree(snapshot, ignore_errors=True)
            logger.warning(
                f"{saved.name} is not pushed: {error}. Training goes on, and the model is pushed at its end."
            )
        else:
            self.thread.submit(self._save, snapshot, saved.name, time.monotonic())

    def _save(self, snapshot: Path, name: str, since: float) -> None:
        # Those that waited behind a failure would fail too.
        reason = push(snapshot, self.flags.of_model(), f"Add {name}") if since > self.failed else None
        if reason:
            self.failed = time.monotonic()
            logger.warning(f"{name} was not pushed: {reason}. Training goes on, and the model is pushed at its end.")
        shutil.rmtree(snapshot, ignore_errors=True)

    def finish(self) -> None:
        """Push the finished model, and wait for it."""
        if reason := self.thread.submit(push_all, self.output_dir, self.flags).result():
            options = ["--hub_revision", self.flags.hub_revision] if self.flags.hub_revision else []
            options += ["--push_native"] if self.flags.push_native else []
            again = push_command(self.output_dir, self.flags.repo(self.output_dir), *options)
            safe = f"The model is safe in {self.output_dir}; push it later with: {again}"
            logger.warning(f"The push failed: {reason}. {safe}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="hf-tiny", description="Push a finished model to the Hub.")
    parser.add_argument("command", choices=["push"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hub_model_id", required=True, help="user/name on the Hub")
    parser.add_argument("--hub_private_repo", action="store_true")
    parser.add_argument("--hub_revision", help="the branch to push to; it is made when it does not exist")
    parser.add_argument("--push_predictions", action="store_true", help="push the predictions, too")
    parser.add_argument(
        "--push_native", action="store_true", help="the native twin there, the model to the branch hf_tiny"
    )
    given = vars(parser.parse_args(argv))
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO)
    del given["command"]
    if reason := push_all(given.pop("folder"), HubArguments(**given)):
        sys.exit(f"error: {reason}")


if __name__ == "__main__":
    main()
