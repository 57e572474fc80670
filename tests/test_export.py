"""Models as ONNX files: what they say is what PyTorch's say, and @huggingface/transformers reads those with a native twin."""

import json
import sys

import numpy as np
import pytest
import torch
from fixtures.programs import run_in_node
from fixtures.tiny_models import ELECTRA, LINKING, REFORMER, SEQ2SEQ, VIT
from PIL import Image
from transformers import pipeline

from hf_tiny import HfTinyElectraConfig, cli, export, models
from hf_tiny.errors import InputError
from hf_tiny.models import HfTinyGreyImageProcessor
from hf_tiny.models.heads import Surface
from hf_tiny.tasks import read_spelling
from hf_tiny.tasks.embed import SentenceEncoder

LABELS = {"id2label": {0: "나쁨", 1: "보통", 2: "좋음"}, "label2id": {"나쁨": 0, "보통": 1, "좋음": 2}}
SETTINGS = {  # what a native twin needs
    "HfTinyElectraForSequenceClassification": {**ELECTRA, **LABELS, "classifier_pooling": "cls"},
    "HfTinyElectraForTokenClassification": {**ELECTRA, **LABELS, "architecture": "modern"},
    "HfTinyElectraForPreTraining": ELECTRA,
    "HfTinyViTForImageClassification": {**VIT, **LABELS},
}
SENTENCES = ["the quick brown fox", "five lazy dogs in a box"]
GREY = HfTinyGreyImageProcessor(size={"height": 4, "width": 8}, image_mean=[0.5], image_std=[0.5])


def save(folder, name: str, processor, settings: dict) -> str:
    """A model whose answers differ clearly from each other."""
    config = vars(models)[name].config_class(**settings, initializer_range=0.2)
    if processor is not GREY and "encoder" not in settings:
        config.vocab_size = len(processor)
    torch.manual_seed(0)
    model = vars(models)[name](config)
    read_spelling(model, processor)
    for module in model.modules():
        if isinstance(module, Surface):
            torch.nn.init.normal_(module.out.weight)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("HfTinyElectraForSequenceClassification", {**ELECTRA, "position_embedding_type": "rotary"}),
        ("HfTinyElectraForTokenClassification", {**ELECTRA, "tagger_lstm_size": 8, "tagger_ngram_buckets": 100}),
        (
            "HfTinyElectraForSequenceClassification",
            {**ELECTRA, "classifier_pairs": True, "classifier_pooling": "words", "classifier_buckets": 100},
        ),
        ("HfTinyTokenLinkingModel", {**LINKING, "encoder": HfTinyElectraConfig(**{**ELECTRA, "vocab_size": 120})}),
        ("HfTinySeq2SeqForConditionalGeneration", SEQ2SEQ),
        ("HfTinyViTForMaskedImageModeling", VIT),
    ],
)
def test_what_has_no_twin_is_exported_for_onnx_runtime(tmp_path, tokenizer, capsys, name, settings):
    folder = save(tmp_path / "모델", name, GREY if settings is VIT else tokenizer, settings)
    export.export(folder, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out" / "onnx").iterdir()} == {"model.onnx", "model_quantized.onnx"}
    assert "Not for a browser" in capsys.readouterr().out
    assert "transformers.js" not in (tmp_path / "out" / "README.md").read_text()
    model = export.predict.load(folder).model
    batch = export.random_inputs(model, 3, 9)
    with torch.no_grad():
        expected = model(**batch)
    found = export.session_outputs(tmp_path / "out" / "onnx" / "model.onnx", batch)
    place = [name for name, value in expected.items() if torch.is_tensor(value)].index("logits")
    np.testing.assert_allclose(found[place], expected["logits"].numpy(), atol=1e-4)
    if name == "HfTinyTokenLinkingModel":
        np.testing.assert_allclose(found[1], expected["label_logits"].numpy(), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "q8"])
def test_a_classifier_says_the_same_in_node(tmp_path, tokenizer, dtype):
    folder = save(tmp_path / "run", "HfTinyElectraForSequenceClassification", tokenizer,
                  SETTINGS["HfTinyElectraForSequenceClassification"])  # fmt: skip
    export.export(folder, tmp_path / "out")
    found = run_in_node(tmp_path / "out", "text-classification", SENTENCES, dtype, top_k=3)
    expected = pipeline("text-classification", model=folder, top_k=3)(SENTENCES)
    for one, other in zip(found, expected, strict=True):
        assert [label["label"] for label in one] == [label["label"] for label in other]
        scores = [[label["score"] for label in labels] for labels in (one, other)]
        np.testing.assert_allclose(*scores, atol=1e-4 if dtype == "fp32" else 0.1)


@pytest.mark.slow
def test_a_tagger_says_the_same_in_node(tmp_path, tokenizer):
    """As a ModernBERT."""
    name = "HfTinyElectraForTokenClassification"
    folder = save(tmp_path / "run", name, tokenizer, SETTINGS[name])
    export.export(folder, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "modernbert"
    found = run_in_node(tmp_path / "out", "token-classification", SENTENCES, ignore_labels=[])
    expected = pipeline("token-classification", model=folder, ignore_labels=[])(SENTENCES)
    for one, other in zip(found, expected, strict=True):
        words = [
            [token["word"] for token in tokens if token["word"] not in tokenizer.all_special_tokens]
            for tokens in (one, other)
        ]
        assert words[0] == words[1]
        inner = [
            [token for token in tokens if token["word"] not in tokenizer.all_special_tokens] for tokens in (one, other)
        ]
        assert [token["entity"] for token in inner[0]] == [token["entity"] for token in inner[1]]
        np.testing.assert_allclose(*([token["score"] for token in tokens] for tokens in inner), atol=1e-4)


@pytest.mark.slow
def test_a_generator_fills_masks_in_node(tmp_path, tokenizer):
    folder = save(tmp_path / "run", "HfTinyElectraForPreTraining", tokenizer, ELECTRA)
    export.export(folder, tmp_path / "out")
    assert (tmp_path / "out" / "discriminator" / "onnx" / "model.onnx").exists()
    text = f"the quick {tokenizer.mask_token} fox"
    (found,) = run_in_node(tmp_path / "out" / "generator", "fill-mask", [text])
    expected = pipeline("fill-mask", model=folder)(text)
    assert [one["token_str"] for one in found] == [one["token_str"] for one in expected]
    np.testing.assert_allclose(*([one["score"] for one in part] for part in (found, expected)), atol=1e-4)


@pytest.mark.slow
def test_embeddings_are_the_same_in_node(tmp_path, tokenizer):
    config = HfTinyElectraConfig(**{**ELECTRA, "architecture": "modern", "vocab_size": len(tokenizer)})
    SentenceEncoder(models.HfTinyElectraModel(config), None).save_pretrained(tmp_path / "run")
    tokenizer.save_pretrained(tmp_path / "run")
    export.export(str(tmp_path / "run"), tmp_path / "out")
    found = run_in_node(tmp_path / "out", "feature-extraction", SENTENCES, pooling="mean", normalize=True)
    model = export.predict.load(str(tmp_path / "run")).model
    for text, one in zip(SENTENCES, found, strict=True):
        with torch.no_grad():
            expected = model(**tokenizer(text, return_tensors="pt")).embeddings
        np.testing.assert_allclose(one, expected.numpy(), atol=1e-4)


@pytest.mark.slow
def test_images_are_classified_alike_in_node(tmp_path):
    folder = save(
        tmp_path / "run", "HfTinyViTForImageClassification", GREY, SETTINGS["HfTinyViTForImageClassification"]
    )
    export.export(folder, tmp_path / "out")
    pixels = np.random.default_rng(0).integers(0, 255, (4, 8), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    (found,) = run_in_node(tmp_path / "out", "image-classification", [str(tmp_path / "image.png")], top_k=3)
    expected = pipeline("image-classification", model=folder)(str(tmp_path / "image.png"))
    assert [one["label"] for one in found] == [one["label"] for one in expected]
    np.testing.assert_allclose(*([one["score"] for one in part] for part in (found, expected)), atol=1e-3)


def test_a_model_that_differs_is_not_written(tmp_path, tokenizer, monkeypatch):
    folder = save(tmp_path / "run", "HfTinyElectraForSequenceClassification", tokenizer, ELECTRA)
    monkeypatch.setattr(export, "session_outputs", lambda path, batch: [np.full((16, 3), np.nan)])
    with pytest.raises(InputError, match="differs from PyTorch's by nan"):
        export.export(folder, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "changes"),
    [
        ("SequenceClassification", {"num_hashes": 2}),
        ("TokenClassification", {"position_embedding_type": "rotary", "lsh_attn_chunk_length": 20}),
        ("MaskedLM", {"attn_layers": ["lsh"], "num_buckets": [2, 4]}),
        ("CausalLM", {"attn_layers": ["lsh"], "use_cache": True}),
        ("CausalLM", {"attn_layers": ["lsh"], "attend_across_buckets": True}),
    ],
)
def test_a_reformer_reads_texts_of_any_length(tmp_path, tokenizer, head, changes):
    """Of a part of a chunk, and of many chunks; padding has no answer of its own."""
    folder = save(tmp_path / "run", f"HfTinyReformerFor{head}", tokenizer, {**REFORMER, **changes})
    export.export(folder, tmp_path / "out")
    model = export.predict.load(folder).model
    for rows, tokens in ((1, 2), (3, 4), (2, 9), (5, 25)):
        batch = export.random_inputs(model, rows, tokens)
        with torch.no_grad():
            expected = model(**batch).logits.numpy()
        (found,) = export.session_outputs(tmp_path / "out" / "onnx" / "model.onnx", batch)
        real = ... if head == "SequenceClassification" else batch["attention_mask"].bool().numpy()
        np.testing.assert_allclose(found[real], expected[real], atol=1e-4)


def test_few_texts_of_a_reformer_may_differ(tmp_path, tokenizer, monkeypatch, capsys):
    """Rounding moves a token into another bucket now and then: said, and more than that is a mistake."""
    model = models.HfTinyReformerForSequenceClassification(models.HfTinyReformerConfig(**REFORMER)).eval()
    monkeypatch.setattr(torch.onnx, "export", lambda *args, **kwargs: None)
    monkeypatch.setattr(export, "quantize", lambda path, small: None)

    def outputs(path, batch):
        with torch.no_grad():
            found = model(**batch).logits.numpy()
        found[:moved] += 0.01
        return [found]

    monkeypatch.setattr(export, "session_outputs", outputs)
    moved = 1
    assert export.write_onnx(model, tmp_path)[0] == 0
    assert "In 1 of 16 random texts, rounding has moved a token" in capsys.readouterr().out
    moved = 5
    with pytest.raises(InputError, match=r"differs from PyTorch's by 0\.01"):
        export.write_onnx(model, tmp_path)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["nowhere/at/all"], "there is no such folder"),
        (["empty"], "lacks config.json"),
        (["run", "--output_dir", "run"], "is not empty"),
    ],
)
def test_what_cannot_be_exported_is_refused(tmp_path, tokenizer, capsys, monkeypatch, flags, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    save(tmp_path / "run", "HfTinyElectraForSequenceClassification", tokenizer, ELECTRA)
    with pytest.raises(SystemExit) as end:
        cli.main(["export", *flags])
    assert end.value.code == 2 and reason in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "run"]


def test_without_onnxruntime_the_extra_is_named(tmp_path, tokenizer, monkeypatch):
    folder = save(tmp_path / "run", "HfTinyElectraForSequenceClassification", tokenizer, ELECTRA)
    monkeypatch.setitem(sys.modules, "onnxruntime.quantization", None)
    with pytest.raises(InputError, match=r'onnxruntime is not installed: pip install "hf_tiny\[onnx\]"'):
        export.export(folder, tmp_path / "out")
