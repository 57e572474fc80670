"""A model that a recipe has made, used: loaded, asked, evaluated on new data."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from fixtures.tiny_models import ELECTRA, LINKING, REFORMER, SEQ2SEQ, VIT
from PIL import Image
from transformers import pipeline

from hf_tiny import (
    HfTinyElectraConfig,
    HfTinyElectraForSequenceClassification,
    HfTinyElectraForTokenClassification,
    HfTinySeq2SeqConfig,
    HfTinySeq2SeqForConditionalGeneration,
    models,
    predict,
)
from hf_tiny.data.windows import WindowEncoder
from hf_tiny.errors import InputError
from hf_tiny.models import HfTinyGreyImageProcessor
from hf_tiny.tasks import label_names
from hf_tiny.tasks.embed import SentenceEncoder
from hf_tiny.tokenizer import TokenizerArguments, train_tokenizer

SETTINGS = {"max_seq_length": 16, "text_column": "문장"}
CLASSES = {
    "HfTinyElectraForSequenceClassification": (ELECTRA, "classify"),
    "HfTinyElectraForTokenClassification": (ELECTRA, "tag"),
    "HfTinyElectraForPreTraining": (ELECTRA, "electra"),
    "HfTinyElectraForMaskedLM": (ELECTRA, "fill_mask"),
    "HfTinyReformerForSequenceClassification": (REFORMER, "classify"),
    "HfTinyReformerForCausalLM": (REFORMER, "generate"),
    "HfTinyTokenLinkingModel": ({**LINKING, "encoder": HfTinyElectraConfig(**{**ELECTRA, "vocab_size": 120})}, "parse"),
    "HfTinySeq2SeqForConditionalGeneration": (SEQ2SEQ, "translate"),
    "HfTinyViTForImageClassification": (VIT, "images"),
    "HfTinyViTForMaskedImageModeling": (VIT, "masked_images"),
}


def save(folder, name: str, processor) -> str:
    """A tiny model with random weights, as a run leaves it."""
    model_class = vars(models)[name]
    config = model_class.config_class(**CLASSES[name][0])
    if CLASSES[name][0] is not VIT and "encoder" not in CLASSES[name][0]:
        config.vocab_size = len(processor)
    torch.manual_seed(0)
    model_class(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    (folder / "recipe.yaml").write_text("# hf-tiny\n" + yaml.safe_dump(SETTINGS, allow_unicode=True), encoding="utf-8")
    return str(folder)


@pytest.fixture(autouse=True)
def same_process(monkeypatch):
    """What a command sets for its whole process, threads and the log among it, would stay for later tests."""
    monkeypatch.setattr(predict, "start_processes", lambda: None)


@pytest.mark.parametrize("name", CLASSES)
def test_a_model_says_what_it_is_for(tmp_path, tokenizer, name):
    grey = HfTinyGreyImageProcessor(size={"height": 4, "width": 8}, image_mean=[0.5], image_std=[0.5])
    folder = save(tmp_path, name, grey if CLASSES[name][0] is VIT else tokenizer)
    found = predict.load(folder)
    assert (found.task, type(found.model).__name__) == (CLASSES[name][1], name)
    assert found.settings == SETTINGS and not found.model.training
    assert type(found.processor) is (type(grey) if CLASSES[name][0] is VIT else type(tokenizer))


def test_sentence_embeddings_are_known_by_their_modules(tmp_path, tokenizer):
    SentenceEncoder(models.HfTinyElectraModel(HfTinyElectraConfig(**ELECTRA)), None).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    found = predict.load(str(tmp_path))
    assert found.task == "embed" and isinstance(found.model, SentenceEncoder) and found.settings == {}


def test_the_newest_checkpoint_of_a_stopped_run_has_the_settings_of_its_run(tmp_path, tokenizer):
    checkpoint = tmp_path / "checkpoint-7"
    save(checkpoint, "HfTinyElectraForSequenceClassification", tokenizer)
    (checkpoint / "recipe.yaml").rename(tmp_path / "recipe.yaml")
    assert predict.load(str(checkpoint)).settings == SETTINGS


def test_what_is_no_trained_model_is_refused(tmp_path, tokenizer):
    with pytest.raises(InputError, match="nowhere: there is no such folder"):
        predict.load(str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match=r"lacks config\.json"):
        predict.load(str(tmp_path))
    save(tmp_path, "HfTinyElectraForSequenceClassification", tokenizer)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["HfTinyElectraModel"]}))
    with pytest.raises(InputError, match="HfTinyElectraModel, and it is not known what to use it for"):
        predict.load(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "recipe.yaml").write_text("- a list")
    with pytest.raises(InputError, match=r"recipe\.yaml cannot be read"):
        predict.load(str(tmp_path))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    with pytest.raises(InputError, match=r"there is no tokenizer|no tokenizer could be loaded"):
        predict.load(str(tmp_path))


# Predicting


MOODS = ["bad", "good", "plain"]


def classifier(folder, tokenizer, labels=MOODS, settings=None, **config) -> str:
    """A tiny classifier with random weights, as a run leaves it."""
    torch.manual_seed(1)
    names = label_names(labels, several=config.pop("several", False))
    sizes = {**ELECTRA, "vocab_size": len(tokenizer), "max_position_embeddings": 32, "initializer_range": 0.5}
    sizes.pop("num_labels")
    HfTinyElectraForSequenceClassification(HfTinyElectraConfig(**sizes, **names)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"max_seq_length": 16, "doc_stride": 4, **(settings or {})}))
    return str(folder)


def tagger(folder, tokenizer, labels, settings=None, unit="words") -> str:
    torch.manual_seed(2)
    sizes = {**ELECTRA, "vocab_size": len(tokenizer), "max_position_embeddings": 32, "initializer_range": 1.0}
    sizes.pop("num_labels")
    config = HfTinyElectraConfig(**sizes, **label_names(labels), tagged_unit=unit)
    HfTinyElectraForTokenClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"max_seq_length": 16, "doc_stride": 4, **(settings or {})}))
    return str(folder)


def printed(capsys, *argv) -> list[str]:
    predict.main(["predict", *map(str, argv)])
    return capsys.readouterr().out.splitlines()


def pipeline_answers(folder: str, texts: list[str]) -> list[tuple[str, float]]:
    answers = pipeline("text-classification", model=folder)(texts)
    return [(answer["label"], round(answer["score"], 4)) for answer in answers]


TEXT_LINES = ["the quick brown fox", "pack my box", "a lazy dog jumps over five jugs", "every row is seen once"]


def test_raw_text_gets_the_answers_of_a_pipeline_in_its_order(tmp_path, tokenizer, capsys, monkeypatch):
    folder = classifier(tmp_path / "model", tokenizer)
    file = tmp_path / "new.txt"
    file.write_text("\n\n".join(TEXT_LINES) + "\n", encoding="utf-8")
    wanted = [
        [label, f"{score:.4f}".rstrip("0"), text]
        for text, (label, score) in zip(TEXT_LINES, pipeline_answers(folder, TEXT_LINES), strict=True)
    ]
    lines = [line.split("\t") for line in printed(capsys, folder, file)]
    assert [line[::2] for line in lines] == [line[::2] for line in wanted]
    for line, (_, score) in zip(lines, pipeline_answers(folder, TEXT_LINES), strict=True):
        assert float(line[1]) == pytest.approx(score, abs=2e-4)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(TEXT_LINES).encode())))
    assert [line.split("\t") for line in printed(capsys, folder)] == lines
    assert [line.split("\t") for line in printed(capsys, folder, "--text", *TEXT_LINES)] == lines


def test_a_table_keeps_its_columns_and_needs_no_label(tmp_path, tokenizer, capsys):
    folder = classifier(tmp_path / "model", tokenizer, settings={"text_column": "문장"})
    file = tmp_path / "new.csv"
    file.write_text("id;문장\n" + "".join(f"{n};{text}\n" for n, text in enumerate(TEXT_LINES)), encoding="utf-8-sig")
    head, *rows = printed(capsys, folder, file)
    assert head == "id,문장,prediction,prediction_score"
    labels = [label for label, _ in pipeline_answers(folder, TEXT_LINES)]
    assert [row.split(",")[:3] for row in rows] == [
        [str(n), text, label] for n, (text, label) in enumerate(zip(TEXT_LINES, labels, strict=True))
    ]
    out = tmp_path / "out"
    predict.main(["predict", folder, str(file), "--output_dir", str(out)])
    assert (out / "predictions.csv").read_text(encoding="utf-8-sig").splitlines() == [head, *rows]
    with pytest.raises(InputError, match=r"holds predictions\.csv already"):
        predict.main(["predict", folder, str(file), "--output_dir", str(out)])


def test_a_long_text_is_the_mean_of_its_windows_as_in_training(tmp_path, tokenizer, capsys):
    folder = classifier(tmp_path / "model", tokenizer)
    text = " ".join(TEXT_LINES * 3)
    loaded = predict.load(folder)
    windows = next(WindowEncoder(tokenizer, 16, 4).texts([text], [None]))
    assert len(windows) > 2
    with torch.no_grad():
        logits = [loaded.model(input_ids=torch.from_numpy(w["input_ids"])[None]).logits[0] for w in windows]
    label, score, _ = printed(capsys, folder, "--text", text)[0].split("\t")
    probabilities = torch.stack(logits).mean(0).softmax(-1)
    assert label == MOODS[int(probabilities.argmax())]
    assert float(score) == pytest.approx(float(probabilities.max()), abs=1e-4)


def test_several_labels_and_numbers_are_predicted(tmp_path, tokenizer, capsys):
    several = classifier(tmp_path / "several", tokenizer, several=True)
    number = classifier(tmp_path / "number", tokenizer, labels=None)
    for line, text in zip(printed(capsys, several, "--text", *TEXT_LINES), TEXT_LINES, strict=True):
        labels, scores, same = line.split("\t")
        assert same == text and len(labels.split(",")) == len(scores.split(","))
        assert all(float(score) > 0.5 for score in scores.split(",") if score)
    lines = [line.split("\t") for line in printed(capsys, number, "--text", *TEXT_LINES)]
    assert [line[1] for line in lines] == TEXT_LINES and all(len(line) == 2 and float(line[0]) for line in lines)


def test_a_pair_stands_in_one_line(tmp_path, tokenizer, capsys):
    folder = classifier(tmp_path / "model", tokenizer, settings={"text_pair_column": "second"})
    line = printed(capsys, folder, "--text", "the fox\tthe dog")[0].split("\t")
    answer = pipeline("text-classification", model=folder)({"text": "the fox", "text_pair": "the dog"})
    assert line[0] == answer["label"] and line[2:] == ["the fox", "the dog"]
    assert float(line[1]) == pytest.approx(answer["score"], abs=2e-4)
    with pytest.raises(InputError, match="--text 1: the model reads pairs of texts"):
        predict.main(["predict", folder, "--text", "the fox"])


def test_lines_with_known_labels_are_read_as_in_training(tmp_path, tokenizer, capsys):
    folder = classifier(tmp_path / "model", tokenizer)
    file = tmp_path / "lines.txt"
    file.write_text("good the fox\nbad the dog\n", encoding="utf-8")
    assert [line.split("\t")[::3] for line in printed(capsys, folder, file)] == [
        ["good", "the fox"],
        ["bad", "the dog"],
    ]


def test_a_tagger_answers_columns_trees_and_raw_text_alike(tmp_path, tokenizer, capsys):
    folder = tagger(tmp_path / "model", tokenizer, ["O", "B-PS", "I-PS", "B-LC"])
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
    (tmp_path / "raw.txt").write_text(" ".join(words) + "\n", encoding="utf-8")
    (tmp_path / "words.conll").write_text("\n".join(words) + "\n", encoding="utf-8")
    rows = "".join(f"{n}\t{word}" + "\t_" * 8 + "\n" for n, word in enumerate(words, 1))
    (tmp_path / "trees.conllu").write_text(rows + "\n", encoding="utf-8")
    (tmp_path / "table.jsonl").write_text(json.dumps({"tokens": words}) + "\n", encoding="utf-8")
    raw = printed(capsys, folder, tmp_path / "raw.txt")
    assert [line.split()[0] for line in raw[:-1]] == words
    tags = [line.split()[1] for line in raw[:-1]]
    assert len(set(tags)) > 1 and printed(capsys, folder, tmp_path / "words.conll") == raw
    assert [line.split("\t")[3] for line in printed(capsys, folder, tmp_path / "trees.conllu")[:-1]] == tags
    assert json.loads(printed(capsys, folder, tmp_path / "table.jsonl")[0])["prediction"] == tags


def test_a_tagger_of_characters_tags_raw_text_by_character(tmp_path, tokenizer, capsys):
    folder = tagger(tmp_path / "model", tokenizer, ["O", "B-PS", "I-PS"], unit="characters")
    lines = printed(capsys, folder, "--text", "the fox")
    assert [line.split("\t")[0] for line in lines[:-1]] == list("the fox")
    assert {line.split("\t")[1] for line in lines[:-1]} <= {"O", "B-PS", "I-PS"}


def test_a_parser_writes_trees_for_raw_text_as_its_pipeline_does(tmp_path, tokenizer, capsys):
    folder = save(tmp_path, "HfTinyTokenLinkingModel", tokenizer)
    text = "the quick fox jumps."
    lines = printed(capsys, folder, "--text", text)
    assert lines[0] == f"# text = {text}" and "SpaceAfter=No" in lines[4]
    found = [(row[1], int(row[6]), row[7]) for row in (line.split("\t") for line in lines[1:-1])]
    links = pipeline("dependency-parsing", model=folder)(text)
    assert found == [(link["word"], link["head"], link["relation"]) for link in links]


def test_a_finder_of_subjects_needs_to_know_the_predicates(tmp_path, tokenizer, capsys):
    folder = save(tmp_path, "HfTinyTokenLinkingModel", tokenizer)
    config = json.loads((tmp_path / "config.json").read_text())
    names = label_names(["nsubj", "omitted", "csubj"])
    config |= {"tree": False, "id2label": names["id2label"], "label2id": names["label2id"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="--text 1: which words are predicates is not known"):
        predict.main(["predict", folder, "--text", "the fox"])
    trees = tmp_path / "trees.conllu"
    trees.write_text("1\tfox\t_\tNOUN\t_\t_\t_\t_\t_\t_\n2\tjumps\t_\tVERB\t_\t_\t_\t_\t_\t_\n", encoding="utf-8")
    first, second, _ = printed(capsys, folder, trees)
    assert first.endswith("\t_") and "Subject=" in second


def test_an_encoder_decoder_writes_a_line_for_a_line(tmp_path, capsys):
    bpe = TokenizerArguments(vocab_size=320, tokenizer_model="bpe")
    tokenizer = train_tokenizer(TEXT_LINES * 4, bpe, model_max_length=64)
    torch.manual_seed(0)
    config = HfTinySeq2SeqConfig(
        **{**SEQ2SEQ, "vocab_size": len(tokenizer)}, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        decoder_start_token_id=tokenizer.bos_token_id,
    )  # fmt: skip
    HfTinySeq2SeqForConditionalGeneration(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    flags = ["--num_beams", "1", "--max_target_length", "8"]
    lines = printed(capsys, tmp_path, "--text", *TEXT_LINES, *flags)
    assert len(lines) == len(TEXT_LINES)
    table = tmp_path / "new.jsonl"
    table.write_text("".join(json.dumps({"source": text}) + "\n" for text in TEXT_LINES), encoding="utf-8")
    assert [json.loads(line)["prediction"] for line in printed(capsys, tmp_path, table, *flags)] == lines


def test_embeddings_of_texts_and_cosines_of_pairs(tmp_path, tokenizer, capsys):
    config = HfTinyElectraConfig(**{**ELECTRA, "vocab_size": len(tokenizer)})
    SentenceEncoder(models.HfTinyElectraModel(config), None).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    first, second = (json.loads(line)["embedding"] for line in printed(capsys, tmp_path, "--text", *TEXT_LINES[:2]))
    assert sum(value * value for value in first) == pytest.approx(1, abs=1e-3)
    table = tmp_path / "pairs.jsonl"
    table.write_text(json.dumps({"source": TEXT_LINES[0], "target": TEXT_LINES[1]}) + "\n", encoding="utf-8")
    cosine = float(json.loads(printed(capsys, tmp_path, table)[0])["prediction"])
    assert cosine == pytest.approx(sum(a * b for a, b in zip(first, second, strict=True)), abs=1e-3)


def test_electra_suspects_tokens_and_fills_masks(tmp_path, tokenizer, capsys):
    folder = save(tmp_path, "HfTinyElectraForPreTraining", tokenizer)
    row = json.loads(printed(capsys, folder, "--text", "the [MASK] fox", "--top_k", "2")[0])
    assert row["tokens"][1] == "[MASK]" and len(row["replaced"]) == len(row["tokens"])
    loaded = predict.load(folder)
    with torch.no_grad():
        logits = loaded.model(**tokenizer("the [MASK] fox", return_tensors="pt")).logits[0, 1:-1]
    assert row["replaced"] == pytest.approx(logits.sigmoid().tolist(), abs=1e-3)
    filled = pipeline("fill-mask", model=folder)("the [MASK] fox", top_k=2)
    assert list(row["prediction"][0]) == [answer["token_str"] for answer in filled]


def test_images_are_found_in_folders_and_named_by_path(tmp_path, capsys):
    grey = HfTinyGreyImageProcessor(size={"height": 4, "width": 8}, image_mean=[0.5], image_std=[0.5])
    folder = save(tmp_path / "model", "HfTinyViTForImageClassification", grey)
    (tmp_path / "new").mkdir()
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 255, (4, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "new" / f"{number}.png")
    head, *rows = printed(capsys, folder, tmp_path / "new")
    assert head == "image,prediction,prediction_score"
    for number, row in enumerate(rows):
        path, label, score = row.split(",")
        answer = pipeline("image-classification", model=folder)(path)[0]
        assert path.endswith(f"{number}.png") and label == answer["label"]
        assert float(score) == pytest.approx(answer["score"], abs=2e-3)
    predict.main(["predict", folder, str(tmp_path / "new"), "--output_dir", str(tmp_path / "out")])
    assert (tmp_path / "out" / "predictions.csv").read_text().splitlines() == [head, *rows]
    with Image.open(tmp_path / "out" / "predictions_attention.png") as image:
        assert image.height == 450  # three rows: the image, what of it the model looks at, and how much


# Evaluating


def evaluated(folder: str, *argv) -> dict:
    out = Path(folder).parent / "evaluated"
    predict.main(["evaluate", folder, *map(str, argv), "--output_dir", str(out)])
    return json.loads((out / "all_results.json").read_text())


def test_a_classifier_is_measured_on_new_data_beside_its_baseline(tmp_path, tokenizer, capsys):
    rows = [("great fox", "good"), ("awful dog", "bad"), ("a box", "plain")] * 8
    train, new = tmp_path / "train.tsv", tmp_path / "new.tsv"
    for path in (train, new):
        path.write_text("text\tlabel\n" + "".join(f"{a}\t{b}\n" for a, b in rows), encoding="utf-8")
    folder = classifier(tmp_path / "model", tokenizer, settings={"train_file": [str(train)], "max_train_samples": 20})
    results = evaluated(folder, new)
    labels = [label for label, _ in pipeline_answers(folder, [text for text, _ in rows])]
    right = sum(label == gold for label, (_, gold) in zip(labels, rows, strict=True)) / len(rows)
    assert results["eval_accuracy"] == pytest.approx(right) and results["eval_majority"] == pytest.approx(1 / 3)
    assert results["baseline_accuracy"] == 1.0 and results["baseline_name"].startswith("TF-IDF")
    assert results["eval_samples"] == len(rows)
    assert (tmp_path / "evaluated" / "eval_confusion.png").exists()
    assert (tmp_path / "evaluated" / "eval_predictions.tsv").exists()
    printed_ = capsys.readouterr().out
    assert "baseline 1" in printed_ and "does not beat its baseline" in printed_


def test_an_image_that_cannot_be_read_is_named_once_and_not_counted(tmp_path, caplog):
    grey = HfTinyGreyImageProcessor(size={"height": 4, "width": 8}, image_mean=[0.5], image_std=[0.5])
    folder = save(tmp_path / "model", "HfTinyViTForImageClassification", grey)
    for split in ("train", "new"):
        for number in range(6):
            path = tmp_path / split / f"LABEL_{number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((4, 8), 40 * number, dtype=np.uint8)).save(path)
    broken = tmp_path / "new" / "LABEL_0" / "broken.png"
    broken.write_bytes(b"no image")
    settings = {"train_file": [str(tmp_path / "train")], "skip_bad_images": True, "validation_split_percentage": 20.0}
    Path(folder, "recipe.yaml").write_text(yaml.safe_dump(settings))
    with caplog.at_level("INFO", logger="hf_tiny"):
        results = evaluated(folder, tmp_path / "new")
    assert caplog.text.count(str(broken)) == 1
    assert results["eval_samples"] == 6 and results["baseline_accuracy"] <= 1


def test_what_has_no_labels_is_refused_and_the_verb_for_it_named(tmp_path, tokenizer, caplog):
    folder = classifier(tmp_path / "model", tokenizer)
    file = tmp_path / "new.tsv"
    file.write_text("text\nthe fox\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"no column 'label'.*`hf-tiny predict` needs none"):
        predict.main(["evaluate", folder, str(file)])
    file.write_text("text\tlabel\nthe fox\thappy\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"new\.tsv:2: the label 'happy' is not in the training data"):
        predict.main(["evaluate", folder, str(file)])


def test_the_training_data_of_a_run_is_found_from_elsewhere(tmp_path, tokenizer, monkeypatch):
    """Its relative paths start where it was started, also if there is a file of the same name here."""
    texts, labels = ["great fox", "awful dog", "a box"] * 8, ["good", "bad", "plain"] * 8
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for path, answers in ((tmp_path / "훈련.tsv", labels), (elsewhere / "훈련.tsv", labels[::-1])):
        rows = "".join(f"{text}\t{label}\n" for text, label in zip(texts, answers, strict=True))
        path.write_text(f"text\tlabel\n{rows}", encoding="utf-8")
    settings = {"train_file": ["훈련.tsv"], "output_dir": "runs/model", "max_train_samples": 20}
    folder = classifier(tmp_path / "runs" / "model", tokenizer, settings=settings)
    monkeypatch.chdir(elsewhere)
    assert evaluated(folder, tmp_path / "훈련.tsv")["baseline_accuracy"] == 1.0


def test_without_its_training_data_a_model_has_no_baseline(tmp_path, tokenizer, caplog):
    folder = classifier(tmp_path / "model", tokenizer, settings={"train_file": ["gone.tsv"]})
    file = tmp_path / "new.tsv"
    file.write_text("text\tlabel\nthe fox\tgood\nthe dog\tbad\n", encoding="utf-8")
    results = evaluated(folder, file)
    assert "baseline_accuracy" not in results and "eval_accuracy" in results
    assert "No baseline" in caplog.text and "gone.tsv" in caplog.text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "There is no model"),
        (["./nowhere"], "no such folder"),
        (["{model}", "missing.tsv"], "file missing.tsv: there is no such file"),
        (["{model}", "missing.tsv", "--output_dir", "out"], "file missing.tsv: there is no such file"),
        (["{model}", "new.xlsx"], "new.xlsx"),
        (["{model}", "image.png"], "image.png"),
        (["{images}", "two.csv"], "two.csv"),
        (["{model}", "--test_file", "x"], "--test_file: this is for training"),
        (["{model}", "x", "--text", "y"], "--text and x"),
        (["{model}", "--texts", "y"], "Unknown flag --texts"),
        (["{model}", "--max_seq_length", "64", "--text", "y"], "the model reads at most 32 tokens"),
        (["{model}", "broken.parquet"], "broken.parquet: the file cannot be read"),
        (["{model}", "two.csv", "two.jsonl"], "give --output_dir"),
        (["{masked}", "--text", "a"], "it predicts nothing by itself"),
    ],
)
def test_wrong_commands_are_answered(tmp_path, tokenizer, monkeypatch, argv, words):
    monkeypatch.chdir(tmp_path)
    for name in ("new.xlsx", "broken.parquet"):
        (tmp_path / name).write_bytes(b"PK no table")
    (tmp_path / "two.csv").write_text("text\na\n")
    (tmp_path / "two.jsonl").write_text('{"text": "a"}\n')
    grey = HfTinyGreyImageProcessor(size={"height": 4, "width": 8}, image_mean=[0.5], image_std=[0.5])
    Image.new("RGB", (4, 4)).save(tmp_path / "image.png")
    places = {"model": classifier(tmp_path / "model", tokenizer)}
    for place, kind in (("masked", "MaskedImageModeling"), ("images", "ImageClassification")):
        if f"{{{place}}}" in argv:
            places[place] = save(tmp_path / place, f"HfTinyViTFor{kind}", grey)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError) as error:
        predict.main(["predict", *(word.format(**places) for word in argv)])
    assert words in str(error.value) and sorted(tmp_path.rglob("*")) == before
