"""The pages of `hf-tiny demo`: what they compute, and what a visitor sees of it in a real browser."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import webbrowser
from html import unescape
from pathlib import Path
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
import yaml
from fixtures import browser, tiny_run
from fixtures.browser import Visitor
from fixtures.hub_server import HubServer
from fixtures.tiny_models import ELECTRA, LINKING, REFORMER, SEQ2SEQ, VIT
from PIL import Image
from playwright.sync_api import expect

from hf_tiny import HfTinyElectraConfig, cli, demo, models, predict, report
from hf_tiny.errors import InputError
from hf_tiny.models import HfTinyGreyImageProcessor
from hf_tiny.tasks import label_names
from hf_tiny.tasks.embed import SentenceEncoder
from hf_tiny.tasks.tag import spans
from hf_tiny.tokenizer import TokenizerArguments, train_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog"
KOREAN = "나는 어제 책을 읽었다"
LINES = ["pack my box with five dozen liquor jugs", TEXT, "every row is seen once in an epoch"]
HTML = "<img src=x onerror=alert(1)>"
SIZES = {"max_position_embeddings": 32, "initializer_range": 0.5}
GREY = HfTinyGreyImageProcessor(size={"height": 4, "width": 8}, image_mean=[0.5], image_std=[0.5])
CARD = '---\ntags: [a]\n---\n\n# mine\n\n```python\nsolve = pipeline("x", model="m")\nprint(solve({}))\n```\n'


def save(folder: Path, name: str, processor, seed: int = 0, **settings) -> Path:
    """A tiny model with random weights, as a run leaves it; `flags` are those of its run."""
    flags = settings.pop("flags", {"max_seq_length": 16, "doc_stride": 4})
    model_class = vars(models)[name]
    torch.manual_seed(seed)
    model_class(model_class.config_class(**settings)).save_pretrained(folder)
    processor.save_pretrained(folder)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(flags))
    return folder


def text_model(folder: Path, name: str, tokenizer, labels=None, **settings) -> Path:
    sizes = {key: value for key, value in ELECTRA.items() if key != "num_labels"}
    names = {} if labels is None else label_names(labels)
    return save(folder, name, tokenizer, **{**sizes, **SIZES, "vocab_size": len(tokenizer)}, **names, **settings)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer) -> dict[str, Path]:
    home, words = tmp_path_factory.mktemp("models"), {"vocab_size": len(tokenizer)}
    korean = train_tokenizer([KOREAN] * 8, TokenizerArguments(vocab_size=60), model_max_length=32)
    pairs = train_tokenizer(
        [TEXT, KOREAN] * 8, TokenizerArguments(vocab_size=320, tokenizer_model="bpe"), model_max_length=64
    )
    bos, eos, pad = pairs.bos_token_id, pairs.eos_token_id, pairs.pad_token_id
    ids = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad, "decoder_start_token_id": bos}
    encoder = HfTinyElectraConfig(**{**ELECTRA, **SIZES, "vocab_size": len(korean)})
    linking = {**LINKING, **label_names(["root", "nsubj", HTML]), "encoder": encoder}
    linking.pop("num_labels")
    image_labels = {
        **{key: value for key, value in VIT.items() if key != "num_labels"},
        **label_names(["cat", "sky", "소"]),
    }
    moods = ["bad", HTML, "plain"]
    encoder = models.HfTinyElectraModel(HfTinyElectraConfig(**{**ELECTRA, **SIZES, **words}))
    SentenceEncoder(encoder, None).save_pretrained(home / "embed")
    tokenizer.save_pretrained(home / "embed")
    found = {
        "classify": text_model(home / "classify", "HfTinyElectraForSequenceClassification", tokenizer, moods),
        "classify2": text_model(home / "other", "HfTinyElectraForSequenceClassification", tokenizer, moods, seed=1),
        "electra": text_model(home / "electra", "HfTinyElectraForPreTraining", tokenizer),
        "tag": text_model(home / "tag", "HfTinyElectraForTokenClassification", tokenizer, ["O", "B-사람", "I-사람"], seed=2),
        "parse": save(home / "parse", "HfTinyTokenLinkingModel", korean, **linking),
        "subject": save(home / "subject", "HfTinyTokenLinkingModel", korean, **linking, tree=False),
        "translate": save(
            home / "translate", "HfTinySeq2SeqForConditionalGeneration", pairs, seed=5,
            flags={"num_beams": 1, "max_target_length": 8}, **{**SEQ2SEQ, "vocab_size": len(pairs)}, **ids, copy_attention=True,
        ),
        "images": save(home / "images", "HfTinyViTForImageClassification", GREY, flags={}, **image_labels),
        "masked": save(home / "masked", "HfTinyViTForMaskedImageModeling", GREY, flags={}, **VIT),
        "generate": save(home / "generate", "HfTinyReformerForCausalLM", tokenizer, **{**REFORMER, **words}),
        "embed": home / "embed",
    }  # fmt: skip
    (home / "classify" / "README.md").write_text(CARD.format(f'"{TEXT}"'), encoding="utf-8")
    (home / "lines.txt").write_text("\n".join(LINES), encoding="utf-8")
    Image.fromarray((np.arange(32).reshape(4, 8) * 8).astype(np.uint8)).save(home / "image.png")
    return found


def task_of(folder: Path):
    return predict.build(predict.load(str(folder)))


# What is computed


def test_the_words_that_speak_for_a_label_are_gradient_times_input(folders):
    """Longer embeddings of a word's tokens change the logit by as much as is said; here by forward passes only."""
    task, words = task_of(folders["classify"]), TEXT.split()[:5]
    scores, pieces = task.show(" ".join(words))
    assert [word for word, _ in pieces] == words and max(abs(value) for _, value in pieces) == 1
    best = max(range(3), key=lambda label: list(scores.values())[label])
    given = task.processor(" ".join(words), return_tensors="pt")
    word_of = given.word_ids(0)

    def logit(word: int, factor: float) -> float:
        def longer(module, inputs, states):
            scale = torch.tensor([factor if own == word else 1.0 for own in word_of])
            return states * scale[None, :, None]

        hook = task.model.get_input_embeddings().register_forward_hook(longer)
        with torch.no_grad():
            logits = task.model.double()(**given).logits[0]
        hook.remove()
        return float(logits[best] - logits.mean())

    slopes = np.array([logit(word, 1 + 1e-4) - logit(word, 1 - 1e-4) for word in range(len(words))])
    assert np.allclose([value for _, value in pieces], slopes / np.abs(slopes).max(), atol=1e-3)


def test_all_windows_of_a_long_text_and_both_texts_of_a_pair_speak(folders, tmp_path, tokenizer):
    long = " ".join([TEXT] * 4)
    pieces = task_of(folders["classify"]).show(long)[1]
    assert [word for word, _ in pieces] == long.split() and all(value for _, value in pieces)
    flags = {"max_seq_length": 32, "doc_stride": 4, "text_pair_column": "second"}
    pair = task_of(text_model(tmp_path, "HfTinyElectraForSequenceClassification", tokenizer, ["a", "b"], flags=flags))
    assert list(pair.asks) == ["text", "second text"]
    scores, pieces = pair.show("the fox", "the\tdog")
    assert [word for word, _ in pieces] == ["the", "fox", "  |  ", "the", "dog"] and pieces[2][1] is None
    assert sum(scores.values()) == pytest.approx(1)


def test_spans_are_whole_entities_and_the_text_between():
    text, words = "Ada  Lovelace met 민수.", ["Ada", "Lovelace", "met", "민수", "."]
    found = spans(text, words, ["B-PS", "I-PS", "O", "B-PS", "O"], True)
    assert found == [("Ada  Lovelace", "PS"), (" ", None), ("met", None), (" ", None), ("민수", "PS"), (".", None)]
    assert spans("가 나", ["가", "나"], ["NN", "NN"], False) == [("가", "NN"), (" ", None), ("나", "NN")]


def test_arcs_and_tables_escape_what_they_are_given():
    drawn = report.draw_arcs([HTML, "개가"], [2, 0], [HTML, "root"])
    assert HTML not in drawn and drawn.count("&lt;img") == 2 and drawn.count("marker-end") == 2
    assert report.draw_arcs(["가", "나"], [None, 0], ["a", "b"]).count("marker-end") == 1
    assert "<script" not in report.draw_table(np.ones((1, 1)), ["<script>"], ["</td><script>"])


def test_predicates_of_raw_text_are_marked(folders):
    task = task_of(folders["subject"])
    assert task.show("나는 어제 책을 *읽었다")[0].count("marker-end") == 1
    assert task.show("나는 *어제 책을 *읽었다")[0].count("marker-end") == 2
    with pytest.raises(InputError, match=r"which words are predicates is not known. Write \* before each"):
        task.show(KOREAN)


@pytest.mark.parametrize(
    ("argument", "texts"),
    [(f'"{KOREAN}"', [KOREAN]), ('{"text": "a", "text_pair": "b"}', ["a", "b"]), ("image", []), ("broken(", [])],
)
def test_the_card_says_what_to_try(argument, texts):
    assert demo.examples_of(CARD.format(argument)) == texts


def test_there_must_be_something_to_answer(folders):
    for name in ("classify", "tag", "parse", "translate", "electra", "generate", "embed"):
        with pytest.raises(InputError, match=r"There (is no text yet|are no lines)"):
            task_of(folders[name]).show("  ")
    for name in ("images", "masked"):
        with pytest.raises(InputError, match="There is no image yet"):
            task_of(folders[name]).show(None)


# In the browser


@pytest.fixture(scope="module")
def chromium():
    with browser.browser() as found:
        yield found


@pytest.fixture
def visit(folders, chromium):
    """Serves a page, and opens it."""
    opened = []

    def open_page(*names: str, **settings) -> Visitor:
        blocks = demo.serve([str(folders[name]) for name in names], **settings)
        visitor = Visitor(chromium, blocks.local_url)
        opened.append((blocks, visitor))
        return visitor

    yield open_page
    for blocks, visitor in opened:
        assert visitor.requests == [] and visitor.dialogs == []  # nothing from other hosts, no HTML of labels
        visitor.close()
        blocks.close(verbose=False)


def parts(pieces: list) -> list[str]:
    """The texts of a marked text that are not white space."""
    return [piece for piece, _ in pieces if piece.strip()]


def test_a_classifier_shows_scores_and_words_and_the_other_model_beside_it(visit, folders):
    visitor = visit("classify", "classify2")
    tasks = [task_of(folders[name]) for name in ("classify", "classify2")]
    expect(visitor.page.get_by_label("text", exact=True)).to_have_value(TEXT)  # of the card, answered without a click
    for number, text in enumerate((TEXT, "pack my box")):
        if number:
            visitor.type("text", text)
            visitor.ask()
        for place, task in enumerate(tasks):
            scores, pieces = task.show(text)
            column = visitor.page.locator(".model").nth(place)
            words = column.get_by_test_id("highlighted-text").locator(".token")
            expect(words).to_have_text(parts(pieces))
            expect(column.get_by_test_id("label-output-value")).to_have_text(max(scores, key=scores.get))
            percents = sorted((round(100 * score) for score in scores.values()), reverse=True)
            expect(column.locator(".confidence")).to_have_text([f"{percent}%" for percent in percents])
            strongest = max(range(len(pieces)), key=lambda one: abs(pieces[one][1]))
            style = words.nth(strongest).get_attribute("style")
            assert ("239, 68, 60" in style) == (pieces[strongest][1] > 0)  # red speaks for it
    visitor.page.get_by_text("The card of the model").click()
    visitor.page.get_by_role("heading", name="mine").wait_for()


def test_a_discriminator_is_asked_while_its_visitor_types(visit, folders):
    visitor, task = visit("electra"), task_of(folders["electra"])
    tokens = visitor.page.get_by_test_id("highlighted-text").locator(".token.highlighted")
    for text in (TEXT, TEXT.replace("fox", "[MASK]")):
        visitor.type("text", text)  # no click
        pieces, table = task.show(text)
        expect(tokens).to_have_text(parts(pieces))
        shown = [float(re.findall(r"[\d.]+", one.get_attribute("style"))[-1]) for one in tokens.all()]
        assert shown == pytest.approx([value for _, value in pieces if value is not None], abs=6e-3)
    cells = visitor.page.locator(".virtual-row [role=gridcell]")
    expect(cells).to_have_text([cell for row in table[1:] for cell in row])


def test_a_tagger_colours_spans(visit, folders):
    visitor = visit("tag")
    visitor.type("text", TEXT)
    visitor.ask()
    wanted = [f"{piece} {tag}" for piece, tag in task_of(folders["tag"]).show(TEXT)[0] if tag]
    marked = visitor.page.get_by_test_id("highlighted-text").locator(".highlighted")
    expect(marked).to_have_text(wanted)
    assert len(wanted) > 1


def test_a_parser_draws_arcs(visit, folders):
    visitor = visit("parse")
    visitor.type("text", KOREAN)
    visitor.ask()
    expect(visitor.page.locator("svg.arcs text:not(.relation)")).to_have_text(KOREAN.split())
    expect(visitor.page.locator("svg.arcs > path")).to_have_count(4)
    drawn = re.findall(r'class="relation".*?>(.*?)</text>', task_of(folders["parse"]).show(KOREAN)[0])
    expect(visitor.page.locator("svg.arcs .relation")).to_have_text([unescape(relation) for relation in drawn])


def test_an_encoder_decoder_writes_and_shows_what_it_copies(visit, folders):
    visitor = visit("translate")
    visitor.type("text", KOREAN)
    visitor.page.get_by_label("text", exact=True).press("Enter")
    written, table = task_of(folders["translate"]).show(KOREAN)
    expect(visitor.page.locator("td[title]")).to_have_count(table.count("<td "))
    expect(visitor.page.locator("th", has_text="vocabulary")).to_have_count(1)
    assert visitor.page.locator("textarea").nth(1).input_value() == written != ""


def test_an_image_gets_scores_and_the_places_that_were_looked_at(visit, folders):
    visitor, path = visit("images"), folders["images"].parent / "image.png"
    visitor.give_image(path)
    visitor.ask()
    scores, seen = task_of(folders["images"]).show(Image.open(path))
    expect(visitor.page.get_by_test_id("label-output-value")).to_have_text(max(scores, key=scores.get))
    visitor.page.locator("img").nth(1).wait_for()
    size = (
        visitor.page.locator("img")
        .nth(1)
        .evaluate("one => one.decode().then(() => [one.naturalWidth, one.naturalHeight])")
    )
    assert size == [320, 160] == list(seen.size)


def test_a_masked_autoencoder_shows_what_it_saw_and_made_of_it(visit, folders):
    visitor, path = visit("masked"), folders["images"].parent / "image.png"
    visitor.give_image(path)
    visitor.ask()
    expect(visitor.page.locator("img")).to_have_count(3)
    first = visitor.page.locator("img").nth(1).get_attribute("src")
    visitor.ask()
    expect(visitor.page.locator("img").nth(1)).not_to_have_attribute("src", first)  # another mask
    masked, made = task_of(folders["masked"]).show(Image.open(path), 0.75)
    assert masked.size == made.size == (320, 160)
    assert (np.asarray(masked)[20::40, 20::40, 0] == 128).mean() >= 0.75  # 6 of 8 patches are grey


def test_a_text_gets_its_nearest_lines(visit, folders):
    visitor = visit("embed", lines=[str(folders["embed"].parent / "lines.txt")])
    vectors = task_of(folders["embed"]).vectors((TEXT, *LINES))
    cosines = dict(zip(LINES, (vectors[1:] @ vectors[0]).tolist(), strict=True))
    assert cosines[TEXT] == pytest.approx(1)
    visitor.type("text", TEXT)
    for pasted in ([], [LINES[0], LINES[2]]):
        visitor.type("lines to compare it with", "\n".join(pasted))
        visitor.ask()
        order = sorted(pasted or LINES, key=lambda line: -cosines[line])
        cells = [cell for line in order for cell in (f"{cosines[line]:.4f}", line)]
        expect(visitor.page.locator(".virtual-row [role=gridcell]")).to_have_text(cells)


def test_a_language_model_goes_on_and_mistakes_are_said_on_the_page(visit):
    visitor = visit("generate")
    visitor.ask()
    visitor.page.get_by_text("There is no text yet. Write one.").wait_for()
    visitor.type("text", "the quick")
    visitor.ask()
    expect(visitor.page.locator("textarea").nth(1)).to_have_value(re.compile("^the quick .+"))


# The command


def refused(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        cli.main(["demo", *words])
    assert end.value.code == 2
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    return printed


def test_bad_input_is_answered(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "start_processes", lambda: None)
    classifier, tagger = str(folders["classify"]), str(folders["tag"])
    assert "There is no model. Usage: hf-tiny demo MODEL" in refused(capsys)
    assert "lacks config.json" in refused(capsys, str(tmp_path))
    assert f"{tagger} is a model of another kind (tag) than" in refused(capsys, classifier, tagger)
    assert "gives no embeddings (classify)" in refused(
        capsys, classifier, "--lines", str(folders["embed"].parent / "lines.txt")
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"--port {port}: Address already in use. Choose another" in refused(capsys, classifier, "--port", port)
    assert "--host nowhere.invalid" in refused(capsys, classifier, "--host", "nowhere.invalid")
    with mock.patch.object(webbrowser, "get", side_effect=webbrowser.Error):
        assert "there is no browser with windows here" in refused(capsys, classifier, "--inbrowser")
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert 'gradio is not installed: pip install "hf_tiny[demo]"' in refused(capsys, classifier)


def run_cli(*words: str) -> None:
    cli.main(words)


@pytest.mark.slow
def test_the_command_serves_on_loopback_until_it_is_stopped(folders, tmp_path):
    started = tiny_run.start(tmp_path, run_cli, "demo", str(folders["classify"]), "--inbrowser", "False")
    url = browser.address(started)
    assert b"hf-tiny demo" in urllib.request.urlopen(url).read()
    ports = psutil.Process(started.pid).net_connections("inet")
    assert {port.laddr.ip for port in ports if port.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
    started.kill(signal.SIGINT)
    ended = started.wait(60)
    assert ended.code == 130 and "Traceback" not in ended.err and "nothing to save" not in ended.err


# The Space


@pytest.fixture
def hub(tmp_path, folders):
    """A Hub on loopback with a model and with a Space that somebody made by hand."""
    with HubServer(tmp_path / "hub", {"hf_you": ("you", "write"), "hf_other": ("other", "write")}) as server:
        files = {path.name: path.read_bytes() for path in folders["classify"].iterdir() if path.is_file()}
        server.add("you/reviews", files)
        server.add("you/by-hand", {"README.md": b"---\nsdk: gradio\n---\n", "app.py": b"print()"}, "spaces")
        environment = {
            "HF_ENDPOINT": server.url, "HF_TOKEN": "hf_you", "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(tiny_run.ROOT),
        }  # fmt: skip
        yield server, environment


COMMANDS = """
import sys
from hf_tiny import cli
for words in {commands!r}:
    try:
        cli.main(["demo", *words])
    except SystemExit as end:
        print(end.code, flush=True)
"""


def in_one_process(environment: dict, *commands: list[str]) -> tuple[list[int], str]:
    """The exit codes of several commands, and what they said."""
    call = [sys.executable, "-c", COMMANDS.format(commands=commands)]
    ended = subprocess.run(call, env={**os.environ, **environment}, capture_output=True, text=True)
    return list(map(int, ended.stdout.split())), ended.stderr


@pytest.mark.slow
def test_a_space_is_made_that_serves_the_page(hub, tmp_path):
    server, environment = hub
    make = ["you/reviews", "--push_space", "you/reviews-demo"]
    codes, said = in_one_process(environment, make, make)  # made, and renewed
    assert codes == [0, 0], said
    files = server.files("you/reviews-demo", kind="spaces")
    head = yaml.safe_load(files["README.md"].decode().split("---")[1])
    assert head["sdk"] == "gradio" and head["models"] == ["you/reviews"] and head["app_file"] == "app.py"
    needed = files["requirements.txt"].decode()
    assert b"['you/reviews']" in files["app.py"] and "torch" in needed and "extra" not in needed
    space = tmp_path / "space"
    for name, content in files.items():
        (space / name).parent.mkdir(parents=True, exist_ok=True)
        (space / name).write_bytes(content)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {**os.environ, **environment, "PYTHONPATH": str(space), "GRADIO_SERVER_PORT": str(port)}
    with open(tmp_path / "err", "w") as err:
        app = subprocess.Popen([sys.executable, "app.py"], cwd=space, env=settings, stderr=err, stdout=err)
    try:
        end, answer = time.monotonic() + 200, b""
        while not answer:
            assert app.poll() is None and time.monotonic() < end, (tmp_path / "err").read_text()
            try:
                answer = urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=5).read()
            except OSError:
                time.sleep(0.3)
        assert b"hf-tiny demo: you/reviews" in answer
    finally:
        app.kill()
        app.wait()


@pytest.mark.slow
def test_a_space_that_is_not_ours_is_refused(hub, folders):
    server, environment = hub
    codes, said = in_one_process(
        environment,
        ["you/reviews", "--push_space", "you/by-hand"],
        ["you/reviews", "--push_space", "other/demo"],
        [str(folders["classify"]), "--push_space", "you/new"],
        ["you/nothing", "--push_space", "you/new"],
    )
    assert codes == [2, 2, 2, 2] and "Traceback" not in said, said
    assert "this Space exists, and `hf-tiny demo` has not made it" in said
    assert server.files("you/by-hand", kind="spaces")["app.py"] == b"print()"
    assert "--push_space to other/demo, as you: the token may not write there" in said
    assert "is a folder, and a Space needs a model on the Hub" in said
    assert not server.requests("POST /api/repos/create")
