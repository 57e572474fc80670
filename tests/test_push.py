"""To the Hub and back, with the real client: what is pushed, what can go wrong, who can load it afterwards.

HF_ENDPOINT is read when huggingface_hub is imported, so all of it happens in other processes.
"""

import functools
import json
import logging
import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import huggingface_hub
import pytest
import torch
import yaml
from datasets import Dataset
from fixtures import tiny_models, tiny_run
from fixtures.hub_server import HubServer
from PIL import Image
from safetensors.torch import load_file, save_file

from hf_tiny import (
    HfTinyElectraForMaskedLM,
    HfTinyElectraForPreTraining,
    HfTinySeq2SeqConfig,
    HfTinySeq2SeqForConditionalGeneration,
    HfTinyViTConfig,
    HfTinyViTForImageClassification,
    InputError,
    convert,
)
from hf_tiny import hub as library
from hf_tiny.data import corpus
from hf_tiny.models import AUTO_CLASSES, model_classes
from hf_tiny.train import Callback

pytestmark = pytest.mark.slow

WRITE, READ, OTHER = "hf_WriteTokenOfSomeone", "hf_ReadTokenOfSomeone", "hf_WriteTokenOfAnother"
UNSENDABLE = "hf_Unsendable\x0bToken"
TOKENS = {WRITE: ("someone", "write"), READ: ("someone", "read"), OTHER: ("another", "write")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("push")


@pytest.fixture(scope="module")
def environment(folder):
    return {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "HF_HOME": str(folder / "home"), "HF_TOKEN": ""}


@pytest.fixture(scope="module")
def hub(folder, environment):
    """A Hub, and processes that know no other one."""
    with HubServer(folder / "hub", TOKENS) as server:
        environment["HF_ENDPOINT"] = server.url
        with mock.patch.dict(os.environ, environment):
            forkserver._forkserver._stop()
            yield server
            forkserver._forkserver._stop()


def run_python(folder: Path, *arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess:
    command, environment = [sys.executable, *arguments], {**os.environ, **env}
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)


def start(folder: Path, function, *arguments, token: str = WRITE) -> tiny_run.Ended:
    return tiny_run.start(folder, function, *arguments, env={"HF_TOKEN": token}).wait()


def assert_pushed(hub: HubServer, run: Path, repo: str) -> None:
    """All that the model needs, and nothing that belongs to the training."""
    pushed = hub.files(repo)
    code = {name.split(".")[0] + ".py" for name in json.loads(pushed["config.json"])["auto_map"].values()}
    assert {"README.md", "config.json", *code, "heads.py", "layers.py", "model.safetensors"} <= pushed.keys()
    assert pushed["model.safetensors"] == (run / "model.safetensors").read_bytes()
    assert not [name for name in pushed if re.search(r"checkpoint|draft|lock$|\.pt$|trainer_state|manifest", name)]


# What goes wrong: toy runs that push, one after the other in one process


@dataclass
class Case:
    """A run whose push fails, and the command that makes up for it."""

    message: str  # a pattern of what people are told
    token: str = WRITE
    fault: dict | None = None
    repo: str | None = None  # someone/<name> when None
    settings: dict = field(default_factory=dict)


NOT_FOUND = {"X-Error-Code": "RepoNotFound"}
FAILURES = {
    "no-token": Case("you are not logged in: use `hf auth login`, or set HF_TOKEN", token=""),
    "unknown-token": Case("the Hub does not know the token", token="hf_nobody"),
    "read-only-token": Case("the token may not write there: use one with the role `write`", token=READ),
    "bad-token": Case("Illegal header value b.Bearer <token>", token=UNSENDABLE),
    "taken": Case("or a --hub_model_id of your own", repo="another/taken"),
    "gone": Case("there is no such repository", fault={"status": 404, "headers": NOT_FOUND}),
    "conflict": Case("409", fault={"status": 409}),
    "down": Case("500", fault={"status": 500, "times": 4}),
    "too-busy": Case("429", fault={"status": 429, "headers": {"Retry-After": "3600"}}),
    "cut": Case("isconnected|reset|roken pipe", fault={"times": 4, "after": 100}),
}
SUCCESSES = {
    "waited": {},
    "every": {
        "max_steps": 6,
        "save_steps": 2,
        "save_total_limit": 1,
        "hub_strategy": "every_save",
        "hub_revision": "trial",
    },
    "away": {"save_steps": 2, "hub_strategy": "every_save"},
    "odd": {},
    "unnamed": {"hub_model_id": None},
}


class Messages(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Watch(Callback):
    """When each step ended; the fifth waits for the push of the checkpoint of the second."""

    def __init__(self, folder: Path):
        self.folder, self.moments = folder, {}

    def on_step_end(self, state, model) -> None:
        self.moments[state.step] = time.monotonic()
        (self.folder / "moments.json").write_text(json.dumps(self.moments))
        made, end = self.folder / "hub/models/someone/every/repo.json", time.monotonic() + 60
        while state.step == 5 and time.monotonic() < end:
            if made.exists() and "Add checkpoint-2" in made.read_text():
                break
            time.sleep(0.05)


def run_toys(folder: str) -> None:
    """Each toy in its own folder; results.json holds what people were told."""
    library.WAITS = (0.05, 0.05, 0.05)
    told, heard = {}, Messages()
    logging.getLogger("hf_tiny").addHandler(heard)
    original = tiny_run.train
    for name, settings in {**SUCCESSES, **{name: case.settings for name, case in FAILURES.items()}}.items():
        case = FAILURES.get(name, Case(""))
        os.environ["HF_TOKEN"] = case.token
        place = {"push_to_hub": True, "hub_model_id": case.repo or f"someone/{name}"}
        card = library.Card(template=f"{folder}/odd", unit="1") if name == "odd" else None
        tiny_run.train = functools.partial(original, card=card)
        watch = [Watch(Path(folder))] if name == "every" else []
        tiny_run.train_here(Path(folder, name), watch, **{"max_steps": 4, "save_steps": 0, **place, **settings})
        told[name], heard.lines[:] = list(heard.lines), []
        if name in FAILURES:
            os.environ["HF_TOKEN"] = WRITE
            sys.argv = ["hub.py", "push", f"{folder}/{name}", "--hub_model_id", f"someone/{name}"]
            library.main()
    Path(folder, "told.json").write_text(json.dumps(told))


@pytest.fixture(scope="module")
def told(hub, folder):
    """What people were told of each push. Runs that pushed in vain have been pushed again."""
    (folder / "odd.md").write_text("---\n{{ card_data }}\n---\n\n# {{ name }}, {{ unit }}\n\n{{ unknown_field }}\n")
    hub.add("another/taken", {"README.md": b"# Mine\n"})
    hub.add("someone/waited", {"old.txt": b"kept"})
    hub.fail("/repos/create", 500)  # waited
    hub.fail("PUT /lfs/", after=5000)
    hub.fail("/someone/waited/commit/", 429, headers={"Retry-After": "2"})
    hub.fail("/someone/every/branch/", 503, headers={"Retry-After": "4"})
    hub.fail("/someone/away/preupload/", 404, headers=NOT_FOUND)
    for name, case in FAILURES.items():
        if case.fault:
            hub.fail(f"/someone/{name}/commit/", **case.fault)
    ended = start(folder, run_toys, str(folder))
    assert ended.code == 0, ended.err
    assert not [fault for fault in hub.faults if fault.times], "a fault was not met"
    return json.loads((folder / "told.json").read_text())


def assert_intact(run: Path) -> None:
    """The run has ended well, whatever came of the push."""
    assert {"README.md", "all_results.json", "config.json", "model.safetensors", "checkpoint-4"} <= set(os.listdir(run))
    assert not list(run.glob(".draft-*"))


@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_push_costs_nothing_and_is_made_up_for(hub, folder, told, name):
    run, repo, case = folder / name, f"someone/{name}", FAILURES[name]
    assert_intact(run)
    failed = told[name][-1]
    assert failed.startswith("The push failed: ") and re.search(case.message, failed)
    command = f"hf-tiny push {run} --hub_model_id {case.repo or repo}"
    assert failed.endswith(f"The model is safe in {run}; push it later with: {command}")
    assert_pushed(hub, run, repo)
    if case.fault:
        tries = 1 if case.fault.get("times", 1) == 1 else 4
        statuses = [one.status for one in hub.requests(f"/{repo}/commit/")]
        assert statuses == [case.fault.get("status", 0)] * tries + [200]
    assert hub.files("another/taken").keys() == {".gitattributes", "README.md"}


def test_what_passes_is_waited_for(hub, folder, told):
    """A repository that is there already, a 500, a cut in the middle of the weights, a 429 that asks for 2 seconds."""
    assert_intact(folder / "waited")
    assert [line[:32] for line in told["waited"][:2]] == [
        "The push is tried again in 0.05 ",
        "The push is tried again in 2 s: ",
    ]
    assert "failed" not in " ".join(told["waited"])
    assert_pushed(hub, folder / "waited", "someone/waited")
    assert hub.files("someone/waited")["old.txt"] == b"kept"
    assert hub.titles("someone/waited")[:2] == ["Add the model", "Add files"]
    refused, taken = hub.requests("/someone/waited/commit/")
    assert (refused.status, taken.status) == (429, 200)
    assert taken.moment - refused.moment >= 2
    weights = [one.status for one in hub.requests("PUT /lfs/")]
    assert weights[:2] == [0, 200]
    assert weights.count(200) == len({one.path for one in hub.requests("PUT /lfs/")})  # each file once, whatever failed


def test_checkpoints_are_pushed_beside_the_training(hub, folder, told):
    """In order, to a branch, each as one commit."""
    run = folder / "every"
    moments = json.loads((folder / "moments.json").read_text())
    assert moments["3"] - moments["2"] < 4  # what the first push had to wait
    refused, created = hub.requests("/someone/every/branch/")[:2]
    assert created.moment - refused.moment >= 4 and created.moment < moments["6"]
    assert "tried again in 4 s" in told["every"][0] and "not pushed" not in " ".join(told["every"])
    assert [path.name for path in run.glob("*checkpoint-*")] == ["checkpoint-6"]
    titles = ["Add the model", "Add checkpoint-6", "Add checkpoint-4", "Add checkpoint-2", "initial commit"]
    assert hub.titles("someone/every", "trial") == titles
    assert hub.files("someone/every").keys() == {".gitattributes"}
    commits = [sha for sha, _ in hub.history("models", "someone/every", "trial")]
    first, last = (hub.files("someone/every", commits[number]) for number in (3, 0))
    assert {"config.json", "electra.py", "model.safetensors"} <= first.keys() <= last.keys()
    assert "README.md" in last and first["model.safetensors"] != last["model.safetensors"]
    assert not [name for name in first if name.endswith(".pt") or name in ("manifest.json", "trainer_state.json")]


def test_a_repository_that_is_gone_for_a_while(hub, folder, told):
    """A checkpoint that could not be pushed is named; the finished model is pushed."""
    assert_intact(folder / "away")
    assert told["away"][0].startswith("checkpoint-2 was not pushed: there is no such repository or revision.")
    assert "The push failed" not in " ".join(told["away"])
    assert_pushed(hub, folder / "away", "someone/away")


def test_without_a_name_the_model_is_pushed_under_that_of_its_folder(hub, folder, told):
    assert "failed" not in " ".join(told["unnamed"])
    assert_pushed(hub, folder / "unnamed", "someone/unnamed")


def test_a_card_template_with_an_unknown_field(hub, folder, told):
    assert_intact(folder / "odd")
    expected = f"{folder / 'odd.md'}:7: 'unknown_field' is undefined. README.md has its header only: correct it there."
    assert expected in told["odd"]
    assert_pushed(hub, folder / "odd", "someone/odd")
    assert hub.files("someone/odd")["README.md"].endswith(b"---\n\n# odd\n")


def push_all(folders: dict[str, str]) -> None:
    """{folder: repository}"""
    flags = {path: library.HubArguments(hub_model_id=repo) for path, repo in folders.items()}
    print(json.dumps({path: library.push(Path(path), flags[path]) for path in folders}))


def test_folders_that_cannot_be_pushed(hub, folder, told):
    run = folder / "no-token"
    cases = {
        "no-config": ("lacks config.json: there is no finished model in it. Its newest checkpoint is", "config.json"),
        "short": ("model.safetensors is damaged or was cut short", None),
        "pickle": ("has only pytorch_model.bin, a pickle file, and loading that can run any code", "model.safetensors"),
        "renamed": ("model.safetensors is a pickle file by another name", None),
        "empty": ("has no weights", "model.safetensors"),
        "checkpoint": ("is damaged: optimizer.pt differs from its checksum", None),
    }
    for name, (_, missing) in cases.items():
        shutil.copytree(run / "checkpoint-4" if name == "checkpoint" else run, folder / name)
        if missing:
            (folder / name / missing).unlink()
    weights = (run / "model.safetensors").read_bytes()
    (folder / "short" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    torch.save({"a": torch.zeros(1)}, folder / "pickle" / "pytorch_model.bin")
    torch.save({"a": torch.zeros(1)}, folder / "renamed" / "model.safetensors")
    (folder / "checkpoint" / "optimizer.pt").write_bytes(b"")
    repaired = {str(folder / "no-config" / "checkpoint-4"): "someone/repaired"}
    ended = start(folder, push_all, {str(folder / name): f"someone/{name}" for name in cases} | repaired)
    reasons = json.loads(ended.out)
    for name, (message, _) in cases.items():
        assert message in reasons[str(folder / name)]
        assert not hub.place("models", f"someone/{name}").exists()
    assert hub.files("someone/repaired")["model.safetensors"] == weights


# Data


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_data_set_is_read_from_the_hub(hub, folder, kind, streaming):
    """Both give the same text, in private repositories too; a stream downloads no file as a whole."""
    lines = tiny_run.write_text(folder / "rows.txt").read_text(encoding="utf-8").splitlines()
    repo = f"someone/{kind}-{streaming}"
    files = {}
    for number in range(3):
        path = folder / f"train-{number}.{kind}"
        rows = Dataset.from_dict({"body": lines[number::3]})
        rows.to_json(path, force_ascii=False) if kind == "jsonl" else rows.to_parquet(path, batch_size=40)
        files[f"data/train-{number}.{kind}"] = path.read_bytes()
    files[f"data/validation-0.{kind}"] = files[f"data/train-0.{kind}"]
    hub.add(repo, files, "datasets", private=True)
    run = folder / repo
    flags = tiny_run.flags(
        output_dir=run, dataset_name=repo, text_column="body", max_steps=3, max_seq_length=32, vocab_size=300,
        per_device_train_batch_size=4, max_eval_samples=8, streaming=streaming,
    )  # fmt: skip
    ended = start(folder, tiny_run.run_plain, "pretrain_electra", *flags)
    assert ended.code == 0, ended.err
    assert json.loads((run / "all_results.json").read_text())["train_tokens"] == 3 * 4 * 32
    assert len(json.loads((run / "tokenizer.json").read_text())["model"]["vocab"]) == 195
    kept = Path(os.environ["HF_HOME"]) / "hub" / f"datasets--{repo.replace('/', '--')}"
    size = sum(path.stat().st_size for path in kept.rglob("*") if path.is_file())
    assert (size < 1000) == streaming and sum(map(len, files.values())) > 10_000
    other = tiny_run.flags(output_dir=folder / "other", text_column="text")
    refused = start(folder, tiny_run.run_plain, "pretrain_electra", *flags, *other)
    assert refused.code == 2 and "only 'body'" in refused.err


def print_fingerprints(*names: str) -> None:
    settings = ({"dataset_name": name, "streaming": True} for name in names)
    print(json.dumps([corpus.Corpus(corpus.CorpusArguments(**one)).fingerprint for one in settings]))


def test_streams_of_the_same_name_are_not_taken_for_each_other(hub, folder):
    """Nor before and after a commit: what is kept of a stream, its tokenizer, is found by this."""
    rows = b'{"text": "the old ship sails"}\n' * 200
    for owner in ("someone", "another"):
        hub.add(f"{owner}/letters", {"train.jsonl": rows}, "datasets")
    seen = json.loads(start(folder, print_fingerprints, "someone/letters", "another/letters").out)
    assert seen == json.loads(start(folder, print_fingerprints, "someone/letters", "another/letters").out)
    changed = {"train.jsonl": hub.store("train.jsonl", rows.replace(b"old", b"new"))}
    hub.commit("datasets", "someone/letters", "main", "New letters", changed)
    seen += json.loads(start(folder, print_fingerprints, "someone/letters").out)
    assert len(set(seen)) == 3


# From the recipes


TEXTS = [("the ship sails under a red moon", "ship"), ("seven letters over cold green hills", "mail")]


OTHERS = {  # name -> recipe, and flags beside those that all have
    "translator": ("finetune_seq2seq", {"vocab_size": 400}),
    "patches": ("pretrain_vit", {}),
    "digits": ("finetune_images", {}),
    "parser": ("finetune_parser", {"model_name_or_path": "someone/electra"}),
    "reformer": ("pretrain_reformer", {"vocab_size": 400, "max_seq_length": 64}),
}


@pytest.fixture(scope="module")
def recipes(hub, folder):
    """ELECTRA pretrained on a data set of the Hub, a classifier and a parser fine-tuned from it, and the other models, all
    pushed."""
    lines = tiny_run.write_text(folder / "text.txt").read_text(encoding="utf-8").splitlines()
    rows = "".join(json.dumps({"text": line}, ensure_ascii=False) + "\n" for line in lines)
    hub.add("someone/texts", {"train.jsonl": rows.encode(), "README.md": b"# Texts\n"}, "datasets", private=True)
    flags = tiny_run.flags(
        output_dir=folder / "electra", dataset_name="someone/texts", max_steps=20, max_seq_length=32, vocab_size=300,
        per_device_train_batch_size=4, hub_model_id="someone/electra", hub_license="mit",
    )  # fmt: skip
    flags += ["--push_to_hub", "--hub_private_repo", "--hub_language", "en", "ko"]
    ended = start(folder, tiny_run.run_recipe, *flags)
    assert ended.code == 0, ended.err
    labelled = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in TEXTS * 10)
    (folder / "labelled.jsonl").write_text(labelled)
    flags = tiny_run.flags(
        output_dir=folder / "classifier", train_file=folder / "labelled.jsonl", model_name_or_path="someone/electra",
        max_steps=2, hub_model_id="someone/classifier",
    )  # fmt: skip
    tuned = start(folder, tiny_run.run_named, "finetune_classifier", *flags, "--push_to_hub")
    assert tuned.code == 0, tuned.err
    others = {}
    for name, (recipe, settings) in OTHERS.items():
        settings = {**settings, "train_file": folder / "text.txt"} if name == "reformer" else settings
        flags = tiny_run.flags(
            output_dir=folder / name, max_steps=20, max_eval_samples=8, hub_model_id=f"someone/{name}", **settings
        )
        others[name] = start(folder, tiny_run.run_plain, recipe, *flags, "--push_to_hub")
        assert others[name].code == 0, others[name].err
    return {"electra": ended, "classifier": tuned, **others}


def header(hub: HubServer, repo: str) -> dict:
    return yaml.safe_load(hub.files(repo)["README.md"].decode().split("---\n")[1])


def test_what_the_recipes_push(hub, folder, recipes):
    for name in recipes:
        pushed = hub.files(f"someone/{name}")
        assert_pushed(hub, folder / name, f"someone/{name}")
        assert {"all_results.json", "recipe.yaml", "metrics.jsonl"} <= pushed.keys()
        assert {"tokenizer.json", "preprocessor_config.json"} & pushed.keys()
        assert hub.titles(f"someone/{name}") == ["Add the model", "initial commit"]
        assert b"PATH_OR_ID" not in pushed["README.md"]
    assert hub.read("models", "someone/electra")["private"] and not hub.read("models", "someone/classifier")["private"]


def test_the_headers_of_their_cards(hub, folder, recipes):
    card = header(hub, "someone/electra")
    assert (card["license"], card["language"]) == ("mit", ["en", "ko"])
    assert card["datasets"] == ["someone/texts"] and "base_model" not in card
    results = json.loads((folder / "electra" / "all_results.json").read_text())
    (index,) = card["model-index"]
    (measured,) = index["results"]
    assert (index["name"], measured["task"]["type"]) == ("electra", "fill-mask")
    assert measured["dataset"] == {"type": "someone/texts", "name": "someone/texts", "split": "validation"}
    found = {f"eval_{metric['type']}": metric["value"] for metric in measured["metrics"]}
    assert found == {name: value for name, value in results.items() if name.startswith("eval_")}
    card = header(hub, "someone/classifier")
    assert card["base_model"] == "someone/electra" and not {"license", "datasets", "language"} & card.keys()
    assert card["model-index"][0]["results"][0]["task"]["type"] == "text-classification"


# To other processes


def push_tiny(folder: str) -> None:
    """A tiny model of every row of the table, saved, run, and pushed under the name of its class."""
    for config_class, _, model_class in model_classes():
        torch.manual_seed(0)
        config = tiny_models.tiny_config(config_class)
        model, name = model_class(config).eval(), model_class.__name__
        batch = tiny_models.inputs(model_class, config)
        with torch.no_grad():
            save_file({**batch, "expected": model(**batch)[0].contiguous()}, f"{folder}/{name}.safetensors")
        model.save_pretrained(f"{folder}/{name}")
        assert library.push(Path(folder, name), library.HubArguments(hub_model_id=f"someone/{name}")) is None


NATIVE = {  # what becomes of an export, by its Auto class
    "native-discriminator": ("AutoModelForPreTraining", "electra"),
    "native-generator": ("AutoModelForMaskedLM", "electra"),
    "native-image": ("AutoModelForImageClassification", "vit"),
    "native-translator": ("AutoModelForSeq2SeqLM", "marian"),
}


def export(*arguments) -> None:
    sys.argv = ["convert.py", *map(str, arguments)]
    convert.main()


def push_native(folder: str) -> None:
    """An ELECTRA as the paper has it (transformers has no other), trained for 20 steps and pushed, comes from the Hub;
    it and two tiny models are exported by the command, run, and pushed."""
    tiny_run.train_here(
        Path(folder, "paper"), max_steps=20, save_steps=0, push_to_hub=True, hub_model_id="someone/paper"
    )
    export("someone/paper", f"{folder}/native-electra")
    vit = HfTinyViTConfig(**{**tiny_models.VIT, "pooling": "cls", "num_register_tokens": 0, "drop_path_rate": 0.0})
    models = {
        "native-discriminator": HfTinyElectraForPreTraining.from_pretrained("someone/paper"),
        "native-generator": HfTinyElectraForMaskedLM.from_pretrained("someone/paper"),
        "native-image": HfTinyViTForImageClassification(vit),
        "native-translator": HfTinySeq2SeqForConditionalGeneration(HfTinySeq2SeqConfig(**tiny_models.SEQ2SEQ)),
    }
    for name, model in models.items():
        target = Path(folder, "native-electra", name.removeprefix("native-"))
        if not target.exists():
            model.save_pretrained(f"{folder}/{name}-before")
            export(f"{folder}/{name}-before", target)
        batch = tiny_models.inputs(type(model), model.config)
        for mask in {"attention_mask", "decoder_attention_mask"} & batch.keys():
            batch[mask].fill_(1)  # what padding says is nobody's business
        with torch.no_grad():
            save_file({**batch, "expected": model.eval()(**batch).logits}, f"{folder}/{name}.safetensors")
        assert library.push(target, library.HubArguments(hub_model_id=f"someone/{name}")) is None


def load_here(folder: str) -> None:
    """With hf_tiny and without remote code."""
    import transformers

    for _, auto_class, model_class in model_classes():
        saved = load_file(f"{folder}/{model_class.__name__}.safetensors")
        expected = saved.pop("expected")
        load = getattr(transformers, auto_class.__name__).from_pretrained
        for loader in (load, model_class.from_pretrained):
            model = loader(f"someone/{model_class.__name__}").eval()
            assert type(model) is model_class
            with torch.no_grad():
                torch.testing.assert_close(model(**saved)[0], expected, atol=1e-6, rtol=1e-6)
    model = transformers.AutoModelForPreTraining.from_pretrained("someone/electra")
    assert type(model).__module__ == "hf_tiny.models.electra"
    os.chdir(folder)
    Image.new("L", (8, 8)).save("image.png")
    for name in ("electra", "classifier", *OTHERS):
        card = Path(huggingface_hub.hf_hub_download(f"someone/{name}", "README.md")).read_text(encoding="utf-8")
        for snippet in re.findall(r"```python\n(.*?)```", card, re.DOTALL):
            exec(snippet, {})  # of ELECTRA with its own code
    print("loaded")


ELSEWHERE = """
import importlib.abc, json, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_tiny":
            raise ModuleNotFoundError("hf_tiny is blocked in this process")

sys.meta_path.insert(0, Blocker())
import torch, transformers
from safetensors.torch import load_file

def close(one, other, tolerance=1e-6):
    torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)

def everything():
    with torch.no_grad():
        for auto_class, name in rows:
            batch = load_file(f"{folder}/{name}.safetensors")
            expected = batch.pop("expected")
            load = getattr(transformers, auto_class).from_pretrained
            model, info = load(f"someone/{name}", trust_remote_code=True, output_loading_info=True)
            assert not info["missing_keys"] and not info["unexpected_keys"], (name, info)
            close(model.eval()(**batch)[0], expected)
        for name, (auto_class, kind) in native.items():
            batch = load_file(f"{folder}/{name}.safetensors")
            expected = batch.pop("expected")
            model, info = getattr(transformers, auto_class).from_pretrained(f"someone/{name}", output_loading_info=True)
            assert not info["missing_keys"] and not info["unexpected_keys"], (name, info)
            assert model.config.model_type == kind and type(model).__module__.startswith("transformers.models.")
            close(model.eval()(**batch).logits, expected, 1e-5)
        tokenizer = transformers.AutoTokenizer.from_pretrained("someone/electra")
        batch = tokenizer("the old ship sails", return_tensors="pt")
        for auto_class in ("AutoModel", "AutoModelForPreTraining", "AutoModelForMaskedLM"):
            load = getattr(transformers, auto_class).from_pretrained
            found, expected = (
                load(place, trust_remote_code=True).eval()(**batch)[0] for place in ("someone/electra", f"{folder}/electra")
            )
            close(found, expected)

folder, rows, native, snippet = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
everything()
exec(snippet)
assert hidden.shape[-1] == 128
assert not any(name.split(".")[0] == "hf_tiny" for name in sys.modules)
print("loaded")
"""


@pytest.fixture(scope="module")
def tiny(hub, folder):
    ended = start(folder, push_tiny, str(folder))
    assert ended.code == 0, ended.err


def test_every_model_loads_where_hf_tiny_is(hub, folder, tiny, recipes):
    ended = start(folder, load_here, str(folder))
    assert "loaded" in ended.out, ended.err


@pytest.fixture(scope="module")
def native(hub, folder):
    ended = start(folder, push_native, str(folder))
    assert ended.code == 0, ended.err


def test_every_model_loads_where_hf_tiny_is_not(hub, folder, environment, tiny, recipes, native):
    """With its own code, or exported as a native one; the Python of ELECTRA's card too. First from the Hub, then in
    another process from the cache."""
    assert not [name for repo in NATIVE for name in hub.files(f"someone/{repo}") if name.endswith(".py")]
    card = hub.files("someone/electra")["README.md"].decode()
    snippet = re.search(r"```python\n(.*?)```", card, re.DOTALL).group(1)
    assert '"someone/electra"' in snippet
    rows = [(auto_class.__name__, model_class.__name__) for _, auto_class, model_class in model_classes()]
    assert {name for _, name in rows} >= {head.__name__ for heads in AUTO_CLASSES.values() for head in heads.values()}
    home = {"HF_HOME": str(folder / "home-elsewhere"), "HF_TOKEN": WRITE, "OMP_NUM_THREADS": "1"}
    arguments = ["-I", "-c", ELSEWHERE, str(folder), json.dumps(rows), json.dumps(NATIVE), snippet]
    for offline in ("0", "1"):
        asked = len(hub.log)
        ended = run_python(folder, *arguments, env={**environment, **home, "HF_HUB_OFFLINE": offline})
        (folder / f"elsewhere-{offline}.log").write_text(ended.stdout + ended.stderr)
        assert "loaded" in ended.stdout, ended.stderr
    assert len(hub.log) == asked
    assert {one.token for one in hub.requests("/cdn/")} == {None}


def load_revisions(folder: str, revisions: list[str]) -> None:
    with pytest.raises(OSError, match="does not appear to have"):  # there is nothing in main
        HfTinyElectraForPreTraining.from_pretrained("someone/every")
    for revision in revisions:
        state = HfTinyElectraForPreTraining.from_pretrained("someone/every", revision=revision).state_dict()
        expected = load_file(f"{folder}/{revision}.safetensors")
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items()), revision
    print("loaded")


def test_a_revision_is_the_model_of_then(hub, folder, told):
    """Of a branch, and of a commit in its past."""
    (past,) = [
        sha for sha, one in hub.history("models", "someone/every", "trial") if one["title"] == "Add checkpoint-2"
    ]
    weights = {revision: hub.files("someone/every", revision)["model.safetensors"] for revision in ("trial", past)}
    assert weights["trial"] != weights[past]
    for revision, content in weights.items():
        (folder / f"{revision}.safetensors").write_bytes(content)
    ended = start(folder, load_revisions, str(folder), list(weights))
    assert "loaded" in ended.out, ended.err


def download(repo: str) -> None:
    from datasets import load_dataset
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
    from transformers import AutoConfig

    print(Path(hf_hub_download(repo, "big.bin")).stat().st_size)
    HfApi().create_tag("someone/HfTinyElectraModel", tag="v1")
    assert [tag.name for tag in HfApi().list_repo_refs("someone/HfTinyElectraModel").tags] == ["v1"]
    assert AutoConfig.from_pretrained("someone/HfTinyElectraModel", revision="v1").hidden_size == 32
    for refused, wanted in ((RevisionNotFoundError, {"revision": "v2"}), (RepositoryNotFoundError, {"token": False})):
        with pytest.raises(refused):
            hf_hub_download("someone/electra", "metrics.jsonl", **wanted)
    whole = load_dataset("someone/texts", split="train")
    streamed = load_dataset("someone/texts", split="train", streaming=True)
    assert [row["text"] for row in streamed] == whole["text"][:] and len(whole) == 400
    print("done")


def test_downloads(hub, folder, tiny, recipes):
    """A cut download goes on where it was; revisions and rights are honoured; a data set is read whole and streamed."""
    hub.add("someone/big", {"big.bin": bytes(12 << 20)})
    hub.fail("GET /cdn/", after=11 << 20)
    ended = start(folder, download, "someone/big")
    assert ended.out.split() == [str(12 << 20), "done"], ended.err
    cut = next(number for number, one in enumerate(hub.log) if one.path.startswith("/cdn/") and one.status == 0)
    again = next(one for one in hub.log[cut + 1 :] if one.path == hub.log[cut].path)
    assert (again.status, again.range) == (206, f"bytes={10 << 20}-")


def use_heavy(folder: str) -> None:
    """With a disk that is full, by a recipe and by a command; then the command with room on the disk."""
    tiny_run.fill_disk()
    settings = {"output_dir": f"{folder}/heavy", "train_file": f"{folder}/labelled.jsonl", "max_steps": 1}
    tries = (
        lambda: tiny_run.run_named(
            "finetune_classifier", *tiny_run.flags(**settings, model_name_or_path="someone/heavy")
        ),
        lambda: export("someone/heavy-paper", f"{folder}/heavy-native"),
    )
    for once in tries:
        with pytest.raises(SystemExit) as ended:
            once()
        print(ended.value, file=sys.stderr)
    assert not Path(folder, "heavy-native").exists()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    export("someone/heavy-paper", f"{folder}/heavy-native")
    print("done")


def test_a_full_disk(hub, folder, recipes, native):
    """The download's error is told with what it was for; with room on the disk the same command goes through."""
    hub.add("someone/heavy", hub.files("someone/electra"))
    hub.add("someone/heavy-paper", hub.files("someone/paper"))
    ended = start(folder, use_heavy, str(folder))
    assert ended.out.endswith("done\n"), ended.err
    assert re.search("error: --model_name_or_path someone/heavy: .*File too large", ended.err)
    assert re.search("error: someone/heavy-paper cannot be loaded: .*File too large", ended.err)
    assert {"discriminator", "generator"} == {path.name for path in (folder / "heavy-native").iterdir()}


# From the wheel

INSTALLED = """
import json, os, sys
from pathlib import Path

place, libraries, folder = sys.argv[1:]
sys.path[:0] = [place, libraries]  # without site, so that no .pth file leads to a checkout
assert not [path for path in sys.path[1:] if os.path.exists(os.path.join(path, "hf_tiny"))]
from transformers import AutoModelForPreTraining
from hf_tiny import convert, hub

model = AutoModelForPreTraining.from_pretrained("someone/paper")
assert sys.modules[type(model).__module__].__file__ == f"{place}/hf_tiny/models/electra.py"
sys.argv = ["convert.py", "someone/paper", f"{folder}/wheel-native"]
convert.main()
target = Path(folder, "wheel-native", "discriminator")
results = json.loads(Path(folder, "paper", "all_results.json").read_text())
hub.write_card(target, model, results, hub.Card(pipeline_tag="fill-mask"), {})
sys.argv = ["hub.py", "push", str(target), "--hub_model_id", "someone/from-wheel"]
hub.main()
assert all(module.__file__.startswith(place) for name, module in sys.modules.items() if name.split(".")[0] == "hf_tiny")
"""


def test_from_the_wheel(hub, folder, environment, native):
    """What the wheel holds, installed in an empty folder, loads, converts, writes a card and pushes."""
    source, place = folder / "source", folder / "installed"
    for name in ("hf_tiny", "model_cards", "recipes"):
        shutil.copytree(tiny_run.ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "hf_tiny_cli.py"):
        shutil.copy(tiny_run.ROOT / name, source)
    pip, offline = ("-m", "pip", "--disable-pip-version-check"), ("--no-deps", "--no-index")
    built = run_python(folder, *pip, "wheel", *offline, "--no-build-isolation", "-w", "wheels", "./source", env={})
    assert built.returncode == 0, built.stderr
    (wheel,) = (folder / "wheels").iterdir()
    installed = run_python(folder, *pip, "install", *offline, "--target", str(place), str(wheel), env={})
    assert installed.returncode == 0, installed.stderr
    assert (place / "bin" / "hf-tiny").is_file() and (place / "hf_tiny" / "py.typed").is_file()
    assert (place / "hf_tiny" / "recipes" / "accelerate" / "cpu_2proc.yaml").is_file()
    command = f"import sys; sys.path.insert(0, {str(place)!r}); import hf_tiny_cli; hf_tiny_cli.main()"
    shown = run_python(folder, "-I", "-S", "-c", command, "--help", env={})  # which needs no other package
    assert "pretrain-electra" in shown.stdout and "Pretrain ELECTRA from raw text." in shown.stdout, shown.stderr
    settings = {**environment, "HF_TOKEN": WRITE, "OMP_NUM_THREADS": "1"}
    libraries = sysconfig.get_path("purelib")
    ended = run_python(folder, "-I", "-S", "-c", INSTALLED, str(place), libraries, str(folder), env=settings)
    assert ended.returncode == 0, ended.stderr
    assert "README.md has its header only" not in ended.stderr
    pushed = hub.files("someone/from-wheel")
    assert {"README.md", "config.json", "model.safetensors"} <= pushed.keys()
    assert json.loads(pushed["config.json"])["model_type"] == "electra" and b"\n## " in pushed["README.md"]


def test_no_file_holds_a_token(hub, folder, told, recipes, tiny, native):
    """Of the runs, the logs, the caches, and of what was pushed."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 500 and any("blobs" in path.parts for path in files)
    wanted = [token.encode() for token in (*TOKENS, "hf_Unsendable", FAILURES["unknown-token"].token)]
    assert [path for path in files if any(token in path.read_bytes() for token in wanted)] == []


# Before the training, and what of a person's data is pushed


def check_all(cases: list[list[str]]) -> None:
    """[token, name, private] -> the first line of the log, or the refusal."""
    heard = Messages()
    logging.getLogger("hf_tiny").addHandler(heard)
    logging.getLogger("hf_tiny").setLevel(logging.INFO)
    told = []
    for token, name, private in cases:
        os.environ["HF_TOKEN"] = token
        flags = library.HubArguments(push_to_hub=True, hub_model_id=name, hub_private_repo=bool(private))
        try:
            library.check_push(flags, Path("runs/mine"))
        except InputError as error:
            heard.lines.append(str(error))
        told.append(heard.lines.copy())
        heard.lines.clear()
    print(json.dumps(told))


def test_a_push_that_cannot_succeed_is_refused_before_the_training(hub, folder):
    hub.add("someone/hidden", {"README.md": b"# Mine\n"}, private=True)
    cases = {
        ("", "someone/new", ""): "--push_to_hub: you are not logged in: use `hf auth login`, or set HF_TOKEN.",
        ("hf_nobody", "someone/new", ""): "--push_to_hub: the Hub does not know the token",
        (READ, "someone/new", ""): "--push_to_hub to someone/new, as someone: the token may not write there",
        (WRITE, "another/new", ""): "--push_to_hub to another/new, as someone: the token may not write there",
        (WRITE, "a b", ""): "--hub_model_id a b: ",
        (WRITE, "someone/new", ""): "The model will be pushed to someone/new, which is public: everybody can read it.",
        (WRITE, "someone/new", "1"): "The model will be pushed to someone/new, which is private: only its members can",
        (WRITE, "someone/hidden", ""): "The model will be pushed to someone/hidden, which is private",
        (WRITE, "new", ""): "The model will be pushed to someone/new, which is public",
    }
    hub.fail("GET /api/models/someone/down", 500)
    ended = start(folder, check_all, [*map(list, cases), [WRITE, "someone/down", ""]])
    assert ended.code == 0, ended.err
    *told, down = json.loads(ended.out)
    for (line,), expected in zip(told, cases.values(), strict=True):
        assert line.startswith(expected)
    assert down[0].startswith("The Hub cannot say now whether someone/down can be pushed to")


def test_a_run_is_refused_before_it_reads_data(hub, folder):
    flags = ["--push_to_hub", "--hub_model_id", "another/mine", "--train_file", "nothing.tsv"]
    ended = start(folder, tiny_run.run_plain, "finetune_classifier", *flags, "--output_dir", str(folder / "refused"))
    tiny_run.assert_refused(ended, "--push_to_hub to another/mine, as someone", "a --hub_model_id of your own")


@pytest.mark.parametrize("predictions", [False, True])
def test_data_and_paths_stay_at_home(hub, folder, predictions):
    """The held-out rows are pushed on request only, and no file says where on this machine anything is."""
    home = folder / f"secret-{predictions}"
    home.mkdir()
    rows = "".join(f"{'good' if i % 2 else 'bad'}\tsentence number {i} of mine\n" for i in range(30))
    (home / "reviews.tsv").write_text("label\ttext\n" + rows)
    repo = f"someone/data-{predictions}"
    settings = {"train_file": home / "reviews.tsv", "output_dir": home / "run", "max_steps": 2, "vocab_size": 100}
    settings |= {"num_hidden_layers": 1, "hub_model_id": repo, "push_to_hub": True, "push_predictions": predictions}
    ended = start(folder, tiny_run.run_plain, "finetune_classifier", *tiny_run.flags(**settings))
    assert ended.code == 0, ended.err
    first = ended.err.splitlines()[1]  # after the name of the recipe
    assert first == f"The model will be pushed to {repo}, which is public: everybody can read it."
    pushed = hub.files(repo)
    assert ("validation_predictions.tsv" in pushed) is predictions
    assert (home / "run" / "validation_predictions.tsv").exists()
    assert [name for name, data in pushed.items() if str(folder).encode() in data] == []
    assert b"train_file:\n- reviews.tsv\n" in pushed["recipe.yaml"]
    assert b"--train_file reviews.tsv" in pushed["README.md"]
    assert str(home) in (home / "run" / "recipe.yaml").read_text()
