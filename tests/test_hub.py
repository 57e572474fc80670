"""The curves, the card, the summary, and a push that cannot reach the Hub; test_push.py has one to push to."""

import ast
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import transformers
import yaml
from fixtures import tiny_run
from fixtures.tiny_models import ELECTRA
from fixtures.tiny_run import write_text
from huggingface_hub import parse_eval_result_entries
from PIL import Image

from hf_tiny import HfTinyElectraConfig, HfTinyElectraForPreTraining, HfTinyElectraModel, InputError, hub, report

pytestmark = pytest.mark.slow

FLAGS = tiny_run.flags(max_steps=4, max_seq_length=32, per_device_train_batch_size=4, vocab_size=300, logging_steps=2)
TOKEN = "hf_dummyDummyDummy"


def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def run_and_push(port: int, *flags) -> None:
    huggingface_hub.constants.ENDPOINT = f"http://127.0.0.1:{port}"
    huggingface_hub.constants.HF_HUB_OFFLINE = False
    hub.WAITS = (0.05,)
    tiny_run.run_recipe(*flags)


@pytest.fixture(scope="module")
def pushed(tmp_path_factory):
    """A finished run whose push could not reach the Hub."""
    folder = tmp_path_factory.mktemp("pushed")
    flags = ["--output_dir", folder / "my run", "--train_file", write_text(folder / "text.txt"), *FLAGS]
    flags += ["--push_to_hub", "--hub_model_id", "someone/something"]
    ended = tiny_run.start(folder, run_and_push, closed_port(), *map(str, flags), env={"HF_TOKEN": TOKEN}).wait()
    return folder / "my run", ended


def test_a_failed_push_leaves_the_run_intact(pushed):
    run, ended = pushed
    assert ended.code == 0, ended.err
    assert "The push failed" in ended.err
    assert f"The model is safe in {run}; push it later with: hf-tiny push" in ended.err
    assert "--hub_model_id someone/something" in ended.err
    assert "Traceback" not in ended.err
    assert TOKEN not in ended.out + ended.err
    expected = {"README.md", "all_results.json", "config.json", "curves.png", "metrics.jsonl", "model.safetensors"}
    assert expected | {"recipe.yaml", "tokenizer.json", "checkpoint-4"} <= set(os.listdir(run))


def test_no_file_holds_the_token(pushed):
    files = [path for path in pushed[0].rglob("*") if path.is_file()]
    assert len(files) > 15
    assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []


def test_the_push_command_fails_with_a_message(pushed, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "WAITS", (0.05,))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(sys, "argv", ["hub", "push", str(pushed[0]), "--hub_model_id", "someone/something"])
    with pytest.raises(SystemExit, match=r"^error: .*Connection refused"):
        hub.main()


def test_a_checkpoint_that_cannot_get_a_second_name_leaves_nothing_behind(tmp_path, monkeypatch, caplog):
    def refused(*names):
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "config.json").write_text("{}")
    hub.Pusher(tmp_path, hub.HubArguments(hub_model_id="someone/something")).save(tmp_path / "checkpoint-2")
    assert "checkpoint-2 is not pushed: " in caplog.text and "pushed at its end" in caplog.text
    assert os.listdir(tmp_path) == ["checkpoint-2"]


@pytest.fixture
def uploaded(monkeypatch, tmp_path) -> dict[str | None, Path]:
    """What would be pushed, by its branch."""
    found = {}

    def upload(folder: Path, flags: hub.HubArguments, title: str) -> str:
        found[flags.hub_revision] = Path(shutil.copytree(folder, tmp_path / f"pushed-{len(found)}"))
        return flags.repo(folder)

    monkeypatch.setattr(hub, "upload", upload)
    return found


@pytest.mark.parametrize("architecture", ["electra", "modern"])
def test_the_native_twin_is_pushed_as_the_main_files(uploaded, tokenizer, tmp_path, architecture):
    config = {**ELECTRA, "architecture": architecture, "vocab_size": len(tokenizer)}
    model, run = HfTinyElectraForPreTraining(HfTinyElectraConfig(**config)), tmp_path / "run"
    hub.require_native(model)
    model.save_pretrained(run)
    tokenizer.save_pretrained(run)
    (run / "README.md").write_text("---\ntags: [hf_tiny]\n---\n\n# 이름\n\nText.\n", encoding="utf-8")
    hub.Pusher(run, hub.HubArguments(hub_model_id="someone/something", push_native=True)).finish()
    assert uploaded.keys() == {"hf_tiny", None}
    assert (uploaded["hf_tiny"] / "electra.py").exists()
    native, card = uploaded[None], (uploaded[None] / "README.md").read_text(encoding="utf-8")
    main = {"electra": "ElectraForPreTraining", "modern": "ModernBertModel"}[architecture]
    assert type(getattr(transformers, main).from_pretrained(native)).__name__ == main
    assert not list(native.rglob("*.py"))
    assert card.startswith(f"---\ntags: [hf_tiny]\n---\n\n# 이름\n\nThe files here are `{main}`")
    assert 'on the branch `hf_tiny` (`revision="hf_tiny"`).\n\n\nText.\n' in card
    assert ("in `generator/` `ElectraForMaskedLM`" in card) == (architecture == "electra")


def test_a_model_without_a_native_twin_is_refused_at_once():
    model = HfTinyElectraForPreTraining(HfTinyElectraConfig(**ELECTRA, norm_first=True))
    with pytest.raises(InputError, match="--push_native: norm_first is True: the native model"):
        hub.require_native(model)


def test_the_curves_are_an_image_of_sensible_size(pushed):
    with Image.open(pushed[0] / "curves.png") as image:
        assert image.format == "PNG"
        assert image.width == 1200
        assert 500 < image.height < 2000
        assert len(image.convert("RGB").getcolors(1 << 24)) > 20  # something is drawn


def test_the_card_holds_what_was_measured(pushed):
    run, _ = pushed
    card = (run / "README.md").read_text(encoding="utf-8")
    results = json.loads((run / "all_results.json").read_text())
    assert card.startswith("---\n")
    header = yaml.safe_load(card.split("---\n")[1])
    assert (header["library_name"], header["pipeline_tag"]) == ("transformers", "fill-mask")
    assert {"hf_tiny", "electra"} <= set(header["tags"])
    rows = dict(re.findall(r"^\| (eval_\w+) \| (\S+) \|$", card, re.MULTILINE))
    assert rows == {name: report.number(value) for name, value in results.items() if name.startswith("eval_")}
    assert len(rows) == 9
    assert "accelerate launch --quiet recipes/pretrain_electra.py --output_dir" in card
    assert "'" + str(run) + "'" in card  # quoted, as its name has a space
    assert f"4 steps, {results['train_tokens']:,} tokens" in card
    assert f"{results['num_parameters']:,} parameters" in card
    assert "# my run" in card
    assert "{{" not in card and "None" not in card and "not stated" not in card


def test_the_python_of_the_card_runs_without_hf_tiny(pushed, tmp_path):
    card = (pushed[0] / "README.md").read_text(encoding="utf-8")
    snippet = re.search(r"```python\n(.*?)```", card, re.DOTALL).group(1).replace("PATH_OR_ID", str(pushed[0]))
    code = f"import sys; sys.modules['hf_tiny'] = None\n{snippet}\nprint('hidden', *hidden.shape)"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "Do you wish to run the custom code?" not in ended.stdout
    assert re.search(r"^hidden 1 \d+ 128$", ended.stdout, re.MULTILINE)


def test_the_summary_names_figures_and_next_commands(pushed):
    run, ended = pushed
    results = json.loads((run / "all_results.json").read_text())
    for name in results:
        assert (f"  {name} " in ended.out) == name.startswith("eval_")
    for words in (
        f"minutes, {results['train_steps']} steps, {results['train_tokens']:,} tokens, {results['num_parameters']:,} param",
        f"curves:  {run / 'curves.png'}",
        f"card:    {run / 'README.md'}",
        "use it:  from transformers import AutoModel",
        f'AutoModel.from_pretrained("{run}"',
        "push it: ",
    ):
        assert words in ended.out


LABELS = [
    "a|b",
    "</td><script>alert(1)</script>",
    "<b>",
    "*loud*",
    "__init__",
    "B-PER_X",
    "`code`",
    "two\nlines",
    "[link](x)",
]


def test_what_users_wrote_is_escaped_in_a_card(tmp_path):
    card = hub.Card(
        template="finetuned",
        data="my|data/*.txt, <script>.tsv",
        pipeline="text-classification",
        task="A classifier of texts",
        base="scratch",
        example='He said "no\\yes"\n<b>',
        labels=LABELS,
    )
    results = {"eval_f1": 0.5, "train_steps": 1, "train_tokens": 2, "train_runtime": 3.0, "num_parameters": 4}
    results |= {"num_processes": 1, "num_threads": 1}
    model = HfTinyElectraModel(HfTinyElectraConfig(vocab_size=8, hidden_size=8, num_attention_heads=2))
    (tmp_path / "_name_").mkdir()
    hub.write_card(tmp_path / "_name_", model, results, card, {})
    text = (tmp_path / "_name_" / "README.md").read_text(encoding="utf-8")
    escaped = [
        r"a\|b",
        r"\</td\>\<script\>alert(1)\</script\>",
        r"\<b\>",
        r"\*loud\*",
        r"\_\_init\_\_",
        "B-PER_X",
        r"\`code\`",
        "two lines",
        r"\[link\](x)",
    ]
    assert f"Labels: {', '.join(escaped)}." in text
    assert r"- Data: my\|data/\*.txt, \<script\>.tsv" in text and "\n# \\_name\\_\n" in text
    (line,) = re.findall(r"^print\(solve\((.*)\)\)$", text, re.MULTILINE)
    assert ast.literal_eval(line) == card.example
    assert "2 tokens in 3 s" in text and "| eval_f1 | 0.5 |" in text
    body = re.sub(r"^```.*?^```$", "", text.split("---\n", 2)[2], flags=re.DOTALL | re.MULTILINE)
    assert not re.search(r"(?<!\\)<", body)  # nothing of it is HTML


def test_scores_on_a_dataset_of_the_hub_are_for_its_leaderboard(tmp_path):
    card = hub.Card(
        template="finetuned", pipeline_tag="token-classification", pipeline="x", task="A tagger", base="scratch"
    )
    results = {
        "eval_loss": 0.1,
        "eval_f1": 0.5,
        "test_loss": 0.1,
        "test_ppl": 3.0,
        "test_f1": 0.25,
        "test_accuracy": 0.9,
    }
    results |= {"baseline_name": "words", "baseline_f1": 0.4, "baseline_test_f1": 0.125, "num_parameters": 4}
    results |= {"train_steps": 1, "train_tokens": 2, "train_runtime": 3.0, "num_processes": 1, "num_threads": 1}
    model = HfTinyElectraModel(HfTinyElectraConfig(vocab_size=8, hidden_size=8, num_attention_heads=2))
    flags = {"dataset_name": "klue/klue", "dataset_config_name": "ner", "trackio_space_id": "you/watch"}
    hub.write_card(tmp_path, model, results, card, flags)
    (path,) = (tmp_path / ".eval_results").iterdir()
    assert path.name == "klue--klue.yaml"
    (entry,) = parse_eval_result_entries(yaml.safe_load(path.read_text()))
    assert (entry.dataset_id, entry.task_id, entry.value) == ("klue/klue", "ner", 0.25)
    assert entry.notes == "f1 on the test part; baseline 0.125"
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    for line in ("| figure | value | baseline |", "|---|---|---|", "| eval_f1 | 0.5 | 0.4 |", "| test_f1 | 0.25 | 0.125 |",
                 "| test_loss | 0.1 |  |"):  # fmt: skip
        assert f"\n{line}\n" in text
    header = yaml.safe_load(text.split("---\n")[1])
    assert "trackio:https://huggingface.co/spaces/you/watch" in header["tags"]
    measured = header["model-index"][0]["results"]
    assert {"f1", "accuracy"} <= {metric["type"] for one in measured for metric in one["metrics"]}
    (tmp_path / "local").mkdir()
    hub.write_card(tmp_path / "local", model, results, card, {"train_file": ["mine.conll"]})
    assert not (tmp_path / "local" / ".eval_results").exists()  # nobody knows that data


@pytest.mark.parametrize(("text", "shown"), [("a b", "`a b`"), ("a `b`", "`` a `b` ``"), ("```", "```` ``` ````")])
def test_code_may_hold_backticks(text, shown):
    assert hub.code(text) == shown


def test_the_command_of_a_run(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/home/me/repo/recipes/pretrain_vit.py", "--seed", "1"])
    assert hub.command() == "accelerate launch --quiet recipes/pretrain_vit.py --seed 1"
    monkeypatch.setattr(sys, "argv", ["/lib/site-packages/hf_tiny/recipes/pretrain_vit.py", "--output_dir", "a b"])
    assert hub.command() == "hf-tiny pretrain-vit --output_dir 'a b'"
