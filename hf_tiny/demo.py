"""A page in the browser, on which trained models are tried and looked at, alone or side by side.

hf-tiny demo runs/reviews
hf-tiny demo runs/reviews runs/other_reviews --port 7861
hf-tiny demo you/reviews --push_space you/reviews-demo
"""

import ast
import logging
import re
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, SpaceCard, SpaceCardData
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError

from . import arguments, hub
from .arguments import Arguments, flag
from .data import sources
from .data.encoding import Decoding
from .errors import InputError, require
from .predict import TrainedModel, build, file_of, load
from .processes import start_processes
from .signals import Stopped
from .tasks import Task
from .tasks.embed import EmbedTask

logger = logging.getLogger(__name__)

USAGE = "hf-tiny demo MODEL [MODEL ...] [--port PORT] [--lines FILE ...] [--push_space USER/NAME]"
LOOPBACK = "127.0.0.1"
MOST_LABELS = 8  # that are shown with their scores
# Those of common systems that have Hangul. None is fetched.
FONTS = ("Noto Sans KR", "Noto Sans CJK KR", "Apple SD Gothic Neo", "Malgun Gothic", "NanumGothic")
STYLE = "footer {display: none !important} .large .text {font-size: 1.15em}"
MADE_HERE = "hf-tiny-demo"  # a tag of the Spaces that are made here
PACKAGE = Path(__file__).parent
TRAVELS = (".py", ".tsv", ".gz", ".md")  # files of the package that a Space needs: there is none on PyPI
APP = '''"""{models}: made by `hf-tiny demo`."""

from hf_tiny.demo import serve

serve({models!r}, host=None).block_thread()
'''


@dataclass(frozen=True, kw_only=True)
class DemoArguments(Arguments):
    """Models of one kind, on a page that only this machine can open."""

    host: str = flag(LOOPBACK, "Address that the page is served at; 0.0.0.0 lets other machines in.")
    port: int | None = flag(None, "Port of the page; by default the first free one from 7860.", low=1, high=65535)
    share: bool = flag(False, "Also serve the page at a public address of gradio's, for a week.")
    inbrowser: bool | None = flag(None, "Open the page in a browser; by default where there is one with windows.")
    lines: list[str] | None = flag(None, "Files whose lines a text is compared with, for models that give embeddings.")
    push_space: str | None = flag(None, "Serve nothing, but make this Space, user/name, of models on the Hub.")


# The page


def asked(gr: ModuleType, kind: str, label: str, value: Any) -> Any:
    """What a visitor gives: a component of gradio."""
    if kind == "image":
        return gr.Image(label=label, type="pil", sources=["upload", "clipboard"], height=280)
    if kind == "share":
        return gr.Slider(0.1, 0.9, value=0.75, step=0.05, label=label)
    return gr.Textbox(
        label=label, value=value, lines=6 if kind == "lines" else 1, max_lines=10
    )  # of one line Enter asks


def shown(gr: ModuleType, kind: str, label: str) -> Any:
    """A part of an answer: a component of gradio. Whatever comes from a model is text, but for `html`, which is drawn by
    report.py."""
    if kind in ("heat", "marks"):
        return gr.HighlightedText(label=label, elem_classes="large")
    if kind == "table":
        return gr.Dataframe(label=label, interactive=False, datatype="str", wrap=True)
    if kind == "html":
        return gr.HTML(label=label, show_label=True, container=True, padding=True)
    if kind == "image":
        return gr.Image(label=label, height=240, buttons=["download", "fullscreen"])
    return gr.Label(label=label, num_top_classes=MOST_LABELS) if kind == "scores" else gr.Textbox(label=label)


def answering(gr: ModuleType, task: Task, lock: threading.Lock) -> Callable:
    """The values of the components for what a visitor gave; a mistake becomes a message on the page. One at a time: some
    answers change the model for as long as they take."""

    def answer(*given: Any) -> Any:
        with lock:
            try:
                values = task.show(*given)
            except InputError as error:
                raise gr.Error(str(error), print_exception=False) from error
        kinds = list(task.shows.values())
        found = [as_table(value) if kind == "table" else value for kind, value in zip(kinds, values, strict=True)]
        return found if len(found) > 1 else found[0]

    return answer


def as_table(rows: list[list[str]]) -> dict:
    """The first row has the names of the columns."""
    return {"headers": rows[0], "data": rows[1:]}


def examples_of(card: str | None) -> list[str]:
    """The texts that the code of a model's card tries it with: an argument of solve(...), tokenizer(...) or encode(...)."""
    found = re.search(r"^```python\n(.*?)^```$", card or "", re.DOTALL | re.MULTILINE)
    try:
        calls = [node for node in ast.walk(ast.parse(found[1] if found else "")) if isinstance(node, ast.Call)]
        named = [
            call for call in calls if ast.unparse(call.func) in ("solve", "tokenizer", "model.encode") and call.args
        ]
        value = ast.literal_eval(named[0].args[0]) if named else []
    except (SyntaxError, ValueError):
        return []
    values = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str)]


def card_of(name: str) -> str | None:
    path = file_of(name, "README.md")
    return None if path is None else ModelCard.load(path, ignore_metadata_errors=True).text


def page(models: Sequence[tuple[TrainedModel, Task]]) -> Any:
    """Of models of one kind: what is asked for stands once, and the answers beside each other."""
    gr, lock = require("gradio", "demo"), threading.Lock()
    cards = [card_of(trained.name) for trained, _ in models]
    task = models[0][1]
    texts = iter(next(filter(None, map(examples_of, cards)), []))
    names = [trained.name for trained, _ in models]
    with gr.Blocks(title=f"hf-tiny demo: {', '.join(names)}", analytics_enabled=False) as blocks:
        with gr.Row():
            given = [
                asked(gr, kind, label, next(texts, "") if kind == "text" else "") for label, kind in task.asks.items()
            ]
        button = gr.Button("Ask", variant="primary")
        events = [button.click, *(one.submit for one in given if isinstance(one, gr.Textbox))]
        if task.LIVE:
            events.append(given[0].change)
        if given[0].value:
            events.append(blocks.load)
        with gr.Row():
            for (trained, own), card in zip(models, cards, strict=True):
                with gr.Column(elem_classes="model"):
                    gr.Markdown(f"### {hub.escape(trained.name)}")
                    outputs = [shown(gr, kind, label) for label, kind in own.shows.items()]
                    if card:
                        with gr.Accordion("The card of the model", open=False):
                            gr.Markdown(re.sub(r"!\[[^\]]*\]\([^)]*\)", "", card))
                gr.on(
                    events, answering(gr, own, lock), given, outputs, trigger_mode="always_last",
                    show_progress="hidden" if task.LIVE else "minimal",
                )  # fmt: skip
    return blocks


def load_all(names: Sequence[str], lines: Sequence[str] | None = None) -> list[tuple[TrainedModel, Task]]:
    """The models at work, if one page can ask them all."""
    found = [(trained, build(trained)) for trained in map(load, names)]
    (first, task), *others = found
    for trained, other in others:
        if (trained.task, list(other.asks)) != (first.task, list(task.asks)):
            raise InputError(
                f"{trained.name} is a model of another kind ({trained.task}) than {first.name} ({first.task}): one page has models "
                "of one kind. Start another for it."
            )
    if lines:
        paths = sources.expand(list(lines), "--lines", (sources.TEXT,), any_suffix=True)
        texts = [line.strip() for path in paths for _, line in sources.numbered_lines(path, Decoding())]
        for trained, own in found:
            if not isinstance(own, EmbedTask):
                raise InputError(
                    f"--lines: {trained.name} gives no embeddings ({trained.task}), so it has no nearest lines."
                )
            own.lines = tuple(filter(None, texts))
    return found


def serve(
    names: Sequence[str], *, host: str | None = LOOPBACK, port: int | None = None, share: bool = False, lines=None
):
    """Load the models and serve their page; returns it. host: None leaves it to the variables of a Space."""
    gr = require("gradio", "demo")
    blocks = page(load_all(names, lines))
    theme = gr.themes.Default(font=[*FONTS, "ui-sans-serif", "system-ui", "sans-serif"])
    try:
        blocks.launch(
            server_name=host, server_port=port, share=share, prevent_thread_lock=True, quiet=True, theme=theme, css=STYLE,
            ssr_mode=False, footer_links=[], show_error=True,
        )  # fmt: skip
    except OSError as error:
        raise InputError(f"The page cannot be served at {host}: {error}") from error
    if share and not blocks.share_url:
        blocks.close()
        raise InputError(
            "--share: gradio could not make a public address. Leave it out, or see whether there is a network."
        )
    return blocks


# The command


def check_port(host: str, port: int | None) -> None:
    """Before models are loaded, which takes seconds."""
    with socket.socket() as trial:
        try:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port or 0))
        except OSError as error:
            where = f"--host {host}" if port is None else f"--port {port}"
            raise InputError(
                f"{where}: {error.strerror or error}. Choose another; without --port the first free one from 7860 is taken."
            ) from error


def windowed_browser() -> webbrowser.BaseBrowser | None:
    """The browser of this machine, unless it is one for terminals, or there is none."""
    try:
        found = webbrowser.get()
    except webbrowser.Error:
        return None
    return None if type(found) is webbrowser.GenericBrowser else found


def main(argv: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    count = next((n for n, word in enumerate(argv) if word.startswith("-")), len(argv))
    names, given = argv[:count], arguments.parse(DemoArguments, argv[count:])
    if not names:
        raise InputError(f"There is no model. Usage: {USAGE}")
    require("gradio", "demo")
    if given.push_space:
        logging.basicConfig(format="%(message)s", level=logging.INFO)
        return push_space(given.push_space, names)
    check_port(given.host, given.port)
    browser = None if given.inbrowser is False else windowed_browser()
    if given.inbrowser and browser is None:
        raise InputError(
            "--inbrowser: there is no browser with windows here. Leave it out, and open the address elsewhere."
        )
    start_processes()
    blocks = serve(names, host=given.host, port=given.port, share=given.share, lines=given.lines)
    print(
        f"The page is at {blocks.local_url}{f' and {blocks.share_url}' if given.share else ''} until Ctrl-C.",
        flush=True,
    )
    try:
        if browser is not None:
            browser.open(blocks.local_url)
        threading.Event().wait()
    except Stopped as stopped:
        blocks.close()
        raise Stopped(stopped.number, saved=True) from stopped


# The Space


def push_space(name: str, models: Sequence[str]) -> None:
    """Make or renew a Space that serves the page. It carries this package along."""
    hub.check_name("--push_space", name)
    for model in models:
        if Path(model).exists():
            raise InputError(
                f"--push_space: {model} is a folder, and a Space needs a model on the Hub. Push it with `hf-tiny push {model} "
                "--hub_model_id USER/NAME`, and give that name."
            )
    try:
        repo = hub.own_repo("--push_space", name)
        check_space(repo)
    except (HfHubHTTPError, HTTPError) as error:
        raise InputError(f"--push_space {name}: {hub.explain(error)}") from error
    load_all(models)
    if reason := hub.patiently(lambda: upload_space(repo, models), "Add the demo"):
        raise InputError(f"--push_space {name}: {reason}")


def check_space(repo: str) -> None:
    """Refuse to write over a Space that was not made here."""
    try:
        HfApi().space_info(repo)
    except RepositoryNotFoundError:
        return
    if MADE_HERE not in (SpaceCard.load(repo, ignore_metadata_errors=True).data.tags or []):
        raise InputError(
            f"--push_space {repo}: this Space exists, and `hf-tiny demo` has not made it. Choose another name."
        )


def upload_space(repo: str, models: Sequence[str]) -> str:
    packages = [one for one in metadata.requires("hf_tiny") or [] if "extra ==" not in one]
    data = SpaceCardData(
        title=repo.split("/")[1], sdk="gradio", sdk_version=metadata.version("gradio"), app_file="app.py",
        models=list(models), tags=["hf_tiny", MADE_HERE],
    )  # fmt: skip
    files: dict[str, bytes] = {
        "app.py": APP.format(models=list(models)).encode(),
        "requirements.txt": "".join(f"{package}\n" for package in packages).encode(),
        "README.md": f"---\n{data.to_yaml()}\n---\n\nA page for {', '.join(models)}, made by `hf-tiny demo`.\n".encode(),
    }
    for path in sorted(PACKAGE.rglob("*")):
        if path.is_file() and path.suffix in TRAVELS:
            files[f"hf_tiny/{path.relative_to(PACKAGE).as_posix()}"] = path.read_bytes()
    url = HfApi().create_repo(repo, repo_type="space", space_sdk="gradio", exist_ok=True)
    operations = [CommitOperationAdd(path_in_repo=path, path_or_fileobj=content) for path, content in files.items()]
    HfApi().create_commit(repo, operations, commit_message="Add the demo", repo_type="space")
    return str(url)
