"""hf_tiny's models with what others have built for transformers: PEFT, `dtype`, `device_map`, ONNX, sentence-transformers."""

import copy

import onnxruntime
import pytest
import torch
from fixtures.tiny_models import (
    CASES,
    FAMILIES,
    FIRST,
    assert_close,
    build_case,
    inputs,
    loss_of,
    run,
    tiny_config,
    typical_error,
)
from peft import LoraConfig, PeftModel, get_peft_model
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling, Transformer

from hf_tiny import (
    HfTinyElectraConfig,
    HfTinyElectraForPreTraining,
    HfTinyElectraForSequenceClassification,
    HfTinyElectraForTokenClassification,
    HfTinyElectraModel,
    HfTinyReformerForCausalLM,
    HfTinyReformerModel,
    HfTinySeq2SeqForConditionalGeneration,
    HfTinyViTForImageClassification,
    HfTinyViTForMaskedImageModeling,
)

TASKS = {
    HfTinyElectraForSequenceClassification: {"task_type": "SEQ_CLS"},
    # As with native models, PEFT trains the output layer whole and has to be told that it gets no adapter.
    HfTinyElectraForTokenClassification: {"task_type": "TOKEN_CLS", "exclude_modules": ["classifier"]},
    HfTinySeq2SeqForConditionalGeneration: {"task_type": "SEQ_2_SEQ_LM"},
}
ONNX = (
    HfTinyElectraForPreTraining,
    HfTinyReformerForCausalLM,
    HfTinyViTForImageClassification,
    HfTinyViTForMaskedImageModeling,
)
LORA = FAMILIES + [case for case in FIRST if case.values[0][0][2] in TASKS and case not in FAMILIES]
LORA += [case for case in CASES if case.values[0][0][2] is HfTinyElectraForPreTraining and case not in LORA]  # sharing


@pytest.fixture
def case(request):
    return request.param


@pytest.fixture
def auto_class(case):
    return case[0][1]


@pytest.fixture
def model(case, tmp_path):
    """A tiny model, which is also in tmp_path."""
    model = build_case(case)
    model.save_pretrained(tmp_path)
    return model


def answers(model) -> torch.Tensor:
    """All that a model says: in the loss of ELECTRA the generator has a part too."""
    return torch.cat([run(model).flatten(), loss_of(model).detach().flatten()])


@pytest.mark.parametrize("case", LORA, indirect=True)
def test_lora(model, auto_class, tmp_path):
    """Trained, saved, loaded on the model that it was made for, merged, and saved as a plain model."""
    before, task = answers(model), TASKS.get(type(model), {})
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(r=4, target_modules="all-linear", **task)).train()
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    batch = inputs(type(model), model.config, training=True)
    for _ in range(5):
        outputs = adapted(**batch)
        loss = outputs.loss if "loss" in outputs else (outputs[0] - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    expected = answers(adapted.eval().get_base_model())
    assert (expected - before).abs().mean() > 0.01
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(auto_class.from_pretrained(tmp_path), tmp_path / "adapter").eval()
    assert type(loaded) is type(adapted)
    assert_close(answers(loaded.get_base_model()), expected)
    prompt = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    written = loaded.generate(**prompt, max_new_tokens=8) if model.can_generate() else None
    merged = loaded.merge_and_unload()
    assert_close(answers(merged), expected, 1e-4)
    merged.save_pretrained(tmp_path / "merged")
    plain, info = auto_class.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert type(plain) is type(model) and not any(info.values()), info
    assert plain.state_dict().keys() == model.state_dict().keys()
    assert_close(answers(plain), expected, 1e-4)
    if written is not None:
        assert torch.equal(plain.generate(**prompt, max_new_tokens=8), written)


@pytest.mark.parametrize("case", FIRST, indirect=True)
def test_bfloat16(model, auto_class, tmp_path):
    expected = run(model)
    low = auto_class.from_pretrained(tmp_path, dtype="bfloat16")
    low.save_pretrained(tmp_path / "low")
    for loaded in (low, auto_class.from_pretrained(tmp_path / "low", dtype="auto")):
        assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
        found = run(loaded)
        assert found.dtype == torch.bfloat16
        assert typical_error(model, found.float() - expected) < 0.05 * expected.abs().mean()


@pytest.mark.parametrize("case", FAMILIES, indirect=True)
def test_device_maps(model, auto_class, tmp_path):
    """Also of a model that is larger than the memory: some of it, then all of it, stays on the disk."""
    expected, size = run(model), model.get_memory_footprint()
    for where in ("cpu", "auto"):
        assert_close(run(auto_class.from_pretrained(tmp_path, device_map=where)), expected, 1e-6)
    batch = inputs(type(model), model.config)
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        without_types = model(**batch)[0]
    for share, places in ((0.6, {"cpu", "disk"}), (0, {"disk"})):
        settings = {"max_memory": {"cpu": int(share * size)}, "offload_folder": tmp_path / f"disk-{share}"}
        loaded = auto_class.from_pretrained(tmp_path, device_map="auto", **settings)
        whole = type(model.base_model) is HfTinyReformerModel and model.base_model is not model  # its layers run as one
        assert set(loaded.hf_device_map.values()) == ({"disk"} if whole else places)
        assert_close(run(loaded), expected, 1e-6)
        with torch.no_grad():
            assert_close(loaded(**batch)[0], without_types, 1e-6)


@pytest.mark.parametrize("case", [one for one in FIRST if one.values[0][0][2] in ONNX], indirect=True)
def test_onnx(model, tmp_path):
    """For any number of rows, and of tokens; what it says is compared with another size than it was exported with."""
    batch, texts = inputs(type(model), model.config), {0: "rows", 1: "tokens"}
    if type(model) is HfTinyReformerForCausalLM:
        del batch["token_type_ids"]
    free = {name: texts for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch}
    free |= {name: {0: "rows"} for name in ("pixel_values", "ids_keep") if name in batch}
    torch.onnx.export(model, (), tmp_path / "model.onnx", kwargs=batch, dynamic_shapes=free, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for rows, tokens in ((3, 9), (2, 5)):
        smaller = {name: batch[name][(slice(rows), slice(tokens))[: len(free[name])]] for name in free}
        found = session.run(None, {name: tensor.numpy() for name, tensor in smaller.items()})[0]
        with torch.no_grad():
            expected = model(**smaller)[0]
        assert_close(torch.from_numpy(found), expected, 1e-5)


def test_sentence_transformers(tokenizer, tmp_path):
    """A sentence is the mean of its tokens, whatever else is in the batch; saved and loaded."""
    torch.manual_seed(0)
    model = HfTinyElectraModel(tiny_config(HfTinyElectraConfig, "embeddings", vocab_size=len(tokenizer))).eval()
    model.save_pretrained(tmp_path / "encoder")
    tokenizer.save_pretrained(tmp_path / "encoder")
    encoder = Transformer(str(tmp_path / "encoder"))
    made = SentenceTransformer(modules=[encoder, Pooling(32, "mean")], device="cpu")
    made.save(str(tmp_path / "sentences"))
    sentences = ["the lazy dog", "the quick brown fox jumps over"]
    for one in (made, SentenceTransformer(str(tmp_path / "sentences"), device="cpu")):
        found = one.encode(sentences, convert_to_tensor=True)
        for sentence, vector in zip(sentences, found, strict=True):
            with torch.no_grad():
                hidden = model(**tokenizer(sentence, return_tensors="pt")).last_hidden_state
            assert_close(vector, hidden[0].mean(0), 1e-6)
