"""What transformers' common tests ask of a model beyond test_models.py: weights from nowhere, other shapes, all of `generate`.

docs/design.md has the list of those tests, and which of ours answers each.
"""

import copy

import pytest
import torch
from fixtures.tiny_models import (
    CASES,
    FAMILIES,
    FIRST,
    TEXTS,
    assert_close,
    build_case,
    inputs,
    loss_of,
    run,
    tiny_config,
)
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, ViTImageProcessor, pipeline
from transformers.configuration_utils import get_head_shapes

from hf_tiny import (
    HfTinyElectraForSequenceClassification,
    HfTinyElectraModel,
    HfTinyReformerForSequenceClassification,
    HfTinyReformerModel,
    HfTinyTokenLinkingConfig,
    HfTinyTokenLinkingModel,
    HfTinyViTConfig,
    HfTinyViTModel,
)
from hf_tiny.models import AUTO_CLASSES

WRITERS = [case for case in CASES if case.values[0][0][2].can_generate()]
LABELLED = [case for case in FIRST if case.values[0][0][2].__name__.endswith(("Classification", "LinkingModel"))]
LEARNERS = [case for case in FIRST if not case.values[0][0][2].__name__.endswith("Model") or case in FAMILIES]
LABELS = {"id2label": {0: "가", 1: "나"}, "label2id": {"가": 0, "나": 1}}
HEADS = [case for case in FIRST if case.values[0][0][2].__name__.partition("For")[2]]


@pytest.fixture(params=CASES)
def case(request):
    return request.param


@pytest.fixture
def model(case) -> PreTrainedModel:
    return build_case(case)


# Weights


def test_from_empty_memory(case):
    """As from_pretrained makes models: on the device "meta", and every weight and buffer that no file has is set anew."""
    (config_class, _, model_class), variant = case
    config = tiny_config(config_class, variant)
    expected = dict(model_class(copy.deepcopy(config)).named_buffers())
    with torch.device("meta"):
        model = model_class(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 99)
    model.init_weights()
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), name
    found = dict(model.named_buffers())
    assert found.keys() == expected.keys()
    for name, buffer in expected.items():
        assert torch.equal(found[name], buffer), name
    assert torch.isfinite(run(model.eval())).all()


def test_a_file_without_weights(model, tmp_path):
    """Each that is missing is named, a tied one at most once too often."""
    model.save_pretrained(tmp_path)
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    every = {name for name, _ in loaded.named_parameters(remove_duplicate=False)}
    assert {name for name, _ in loaded.named_parameters()} <= set(info["missing_keys"]) <= every
    assert set(info["unexpected_keys"]) == {"other"}
    assert torch.isfinite(run(loaded)).all()


@pytest.mark.parametrize("case", FIRST, indirect=True)
def test_weights_in_memory(model):
    weights = model.state_dict()
    loaded = type(model).from_pretrained(None, config=model.config, state_dict=copy.deepcopy(weights))
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, weights[name]) and tensor.is_contiguous(), name


@pytest.mark.parametrize("case", HEADS, indirect=True)
def test_a_head_on_a_saved_base_model(model, tmp_path):
    assert model.base_model is getattr(model, model.base_model_prefix, model)
    model.base_model.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    weights = model.state_dict()
    for name, tensor in loaded.state_dict().items():
        assert name in info["missing_keys"] or torch.equal(tensor, weights[name]), name
    inside = {id(parameter) for parameter in model.base_model.parameters()}
    outside = {name for name, parameter in model.named_parameters() if id(parameter) not in inside}
    assert set(info["missing_keys"]) == outside
    assert not info["unexpected_keys"]


@pytest.mark.parametrize("case", LABELLED, indirect=True)
def test_another_number_of_labels(model, tmp_path):
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        type(model).from_pretrained(tmp_path, num_labels=7)
    loaded, info = type(model).from_pretrained(
        tmp_path, num_labels=7, ignore_mismatched_sizes=True, output_loading_info=True
    )
    changed = {name for name, *_ in info["mismatched_keys"]}
    assert changed and not info["missing_keys"] and not info["unexpected_keys"]
    weights = model.state_dict()
    for name, tensor in loaded.state_dict().items():
        assert torch.isfinite(tensor).all()
        assert (tensor.shape != weights[name].shape) if name in changed else torch.equal(tensor, weights[name]), name
    outputs = loaded(**inputs(type(model), model.config))
    assert (outputs.label_logits if "label_logits" in outputs else outputs.logits).shape[-1] == 7


@pytest.mark.parametrize("case", [case for case in FAMILIES if case in TEXTS], indirect=True)
def test_resized_embeddings_stay(model):
    model.resize_token_embeddings(61)
    expected = copy.deepcopy(model.state_dict())
    model.post_init()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


# Configurations


@pytest.mark.parametrize("config_class", AUTO_CLASSES, ids=lambda cls: cls.__name__)
def test_configs(config_class, tmp_path):
    """Without arguments, in a subfolder, with the fields that every config has, and with another number of labels."""
    assert config_class().to_dict() == config_class().to_dict()
    common = {"output_attentions": True, "return_dict": False, "architectures": ["A"], "problem_type": "regression"}
    config = tiny_config(config_class, **common, num_labels=2, **LABELS)
    config.save_pretrained(tmp_path / "inside")
    loaded = config_class.from_pretrained(tmp_path, subfolder="inside")
    assert loaded.to_dict() == config.to_dict()
    assert {name: getattr(loaded, name) for name in common} == common
    assert {name: getattr(loaded, name) for name in LABELS} == LABELS
    loaded.num_labels = 5
    assert len(loaded.id2label) == len(loaded.label2id) == 5
    with pytest.raises(OSError, match="missing"):
        config_class.from_pretrained(tmp_path / "missing")


def test_the_parts_of_a_composite_model_choose_their_attention(tmp_path):
    HfTinyTokenLinkingModel(tiny_config(HfTinyTokenLinkingConfig)).save_pretrained(tmp_path)
    for chosen in ({"": "eager", "encoder": "eager"}, {"encoder": "eager"}, "eager"):
        loaded = HfTinyTokenLinkingModel.from_pretrained(tmp_path, attn_implementation=chosen)
        assert loaded.config.encoder._attn_implementation == loaded.encoder.config._attn_implementation == "eager"
        assert loaded.encoder.config is loaded.config.encoder


# Training


@pytest.mark.parametrize("case", FAMILIES, indirect=True)
def test_inputs_require_gradients(model):
    """As adapters on a frozen model need it, with and without gradient checkpointing."""
    model.train().requires_grad_(False)
    assert not loss_of(model).requires_grad
    model.enable_input_require_grads()
    assert loss_of(model).requires_grad
    model.disable_input_require_grads()
    assert not loss_of(model).requires_grad
    model.enable_input_require_grads()
    for reentrant in (True, False):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert loss_of(model).requires_grad


@pytest.mark.parametrize("case", LEARNERS, indirect=True)
def test_a_batch_is_learned(model):
    batch = inputs(type(model), model.config, training=True)
    optimizer = torch.optim.Adam(model.train().parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        torch.manual_seed(0)
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


# Generating


def prompt_of(model: PreTrainedModel) -> dict[str, Tensor]:
    batch = inputs(type(model), model.config)
    return {name: batch[name][:2] for name in ("input_ids", "attention_mask")}


def settled(model: PreTrainedModel) -> PreTrainedModel:
    """Without an end, and with a number of buckets that stays, from the third chunk on: cached is uncached then."""
    model.generation_config.eos_token_id = None
    model.config.num_buckets = 4
    return model


HOW = {
    "greedy": {},
    "sampled": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 2, "num_return_sequences": 2},
    "sampled beams": {"num_beams": 2, "do_sample": True},
}


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", WRITERS, indirect=True)
def test_all_that_generate_tells(model, how, use_cache):
    model, steps = settled(model), 3
    model.set_attn_implementation("eager")
    wanted = ("scores", "logits", "hidden_states", "attentions")
    told = model.generate(
        **prompt_of(model),
        **HOW[how],
        **{f"output_{name}": True for name in wanted},
        return_dict_in_generate=True,
        max_new_tokens=steps,
        use_cache=use_cache,
    )
    config, both = model.config, model.config.is_encoder_decoder
    before = 1 if both else 9
    asked = 2 * HOW[how].get("num_return_sequences", 1)
    rows = max(asked, 2 * HOW[how].get("num_beams", 1))
    assert told.sequences.shape == (asked, before + steps)
    assert len(told.scores) == len(told.logits) == steps
    assert {one.shape for one in told.scores + told.logits} == {(rows, config.vocab_size)}
    if how == "greedy":
        assert torch.equal(torch.stack(told.scores, 1).argmax(-1), told.sequences[:, before:])
    layers = config.decoder_layers if both else config.num_hidden_layers
    states, attentions = (told[f"{'decoder_' if both else ''}{name}"] for name in wanted[2:])
    assert len(states) == len(attentions) == steps
    for step in range(steps):
        known, new = before + step, before + step if step == 0 or not use_cache else 1
        assert [one.shape for one in states[step]] == [(rows, new, config.hidden_size)] * (layers + 1)
        assert [one.shape for one in attentions[step]] == [(rows, config.num_attention_heads, new, known)] * layers
        if both:
            seen = [one.shape for one in told.cross_attentions[step]]
            assert seen == [(rows, config.num_attention_heads, new, 9)] * layers
    if use_cache:
        assert told.past_key_values.get_seq_length() == before + steps - 1
    if use_cache and not both:
        heads, size = get_head_shapes(config)  # with which transformers makes a cache beforehand
        assert {one.keys.shape for one in told.past_key_values.layers} == {(rows, heads, before + steps - 1, size)}
    if both:
        assert len(told.encoder_hidden_states) == len(told.encoder_attentions) + 1 == config.encoder_layers + 1


@pytest.mark.parametrize("case", WRITERS, indirect=True)
def test_generation_goes_on_from_a_cache(model):
    model, given = settled(model), {"return_dict_in_generate": True, "output_scores": True}
    prompt = prompt_of(model)
    whole = model.generate(**prompt, **given, max_new_tokens=4)
    first = model.generate(**prompt, **given, max_new_tokens=3)
    if model.config.is_encoder_decoder:
        prompt |= {"decoder_input_ids": first.sequences, "decoder_attention_mask": torch.ones_like(first.sequences)}
    else:
        prompt["input_ids"] = first.sequences
        prompt["attention_mask"] = nn.functional.pad(prompt["attention_mask"], (0, 3), value=1)
    last = model.generate(**prompt, **given, past_key_values=first.past_key_values, max_new_tokens=1)
    assert torch.equal(last.sequences, whole.sequences)
    assert_close(last.scores[0], whole.scores[3])
    assert last.past_key_values.get_seq_length() == whole.past_key_values.get_seq_length()


@pytest.mark.parametrize("helper", ["itself", "another", "the prompt"])
@pytest.mark.parametrize("case", WRITERS, indirect=True)
def test_with_help_the_output_is_that_of_greedy_search(model, helper):
    model = settled(model)
    other = {"itself": model, "another": type(model)(model.config).eval()}.get(helper)
    help_ = {"prompt_lookup_num_tokens": 2} if other is None else {"assistant_model": other}
    prompt = {name: tensor[:1] for name, tensor in prompt_of(model).items()}
    expected = model.generate(**prompt, max_new_tokens=6)
    assert torch.equal(model.generate(**prompt, **help_, max_new_tokens=6), expected)


@pytest.mark.parametrize("case", WRITERS, indirect=True)
@torch.no_grad()
def test_logits_to_keep(model):
    batch = inputs(type(model), model.config)
    batch.pop("token_type_ids", None)
    whole = model(**batch).logits
    for kept, places in ((1, slice(-1, None)), (0, slice(None)), (torch.tensor([0, 2]), [0, 2])):
        assert_close(model(**batch, logits_to_keep=kept).logits, whole[:, places], 1e-6)


@pytest.mark.parametrize("case", WRITERS, indirect=True)
def test_a_static_cache(model):
    model = settled(model)
    expected = model.generate(**prompt_of(model), max_new_tokens=6)
    found = model.generate(**prompt_of(model), max_new_tokens=6, cache_implementation="static", disable_compile=True)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("case", WRITERS, indirect=True)
def test_other_beginnings(model):
    """Embeddings in the place of tokens, positions that are given, or nothing at all."""
    model = settled(model)
    prompt = prompt_of(model)
    expected = model.generate(**prompt, max_new_tokens=4)
    if not model.config.to_dict().get("copy_attention"):
        embedded = model.get_input_embeddings()(prompt["input_ids"])
        found = model.generate(inputs_embeds=embedded, attention_mask=prompt["attention_mask"], max_new_tokens=4)
        assert torch.equal(found, expected[:, -found.shape[1] :])
    if not model.config.is_encoder_decoder:
        places = (prompt["attention_mask"].cumsum(1) - 1).clamp(min=0)
        assert torch.equal(model.generate(**prompt, position_ids=places, max_new_tokens=4), expected)
        found = model.generate(bos_token_id=7, max_new_tokens=4)
        assert torch.equal(found, model.generate(torch.tensor([[7]]), max_new_tokens=4))


# Pipelines: the others are in test_heads.py and in the tests of the recipes


def of_texts(model_class: type, tokenizer, **changes) -> dict:
    """What `pipeline` takes."""
    config = tiny_config(model_class.config_class, vocab_size=len(tokenizer), **changes)
    return {"model": model_class(config).eval(), "tokenizer": tokenizer, "device": "cpu"}


@pytest.mark.parametrize("model_class", [HfTinyElectraModel, HfTinyReformerModel])
def test_feature_extraction(model_class, tokenizer):
    solve = pipeline("feature-extraction", **of_texts(model_class, tokenizer))
    texts = ["the lazy dog", "the quick brown fox jumps"]
    for batch_size in (1, 2):
        for text, found in zip(texts, solve(texts, batch_size=batch_size), strict=True):
            with torch.no_grad():
                expected = solve.model(**tokenizer(text, return_tensors="pt")).last_hidden_state
            assert_close(torch.tensor(found)[:, : expected.shape[1]], expected)


@pytest.mark.parametrize(
    "model_class", [HfTinyElectraForSequenceClassification, HfTinyReformerForSequenceClassification]
)
def test_zero_shot_classification(model_class, tokenizer):
    """The share of the entailed label among those of all candidates."""
    labels = {"contradiction": 0, "neutral": 1, "entailment": 2}
    solve = pipeline("zero-shot-classification", **of_texts(model_class, tokenizer, label2id=labels))
    found = solve("the lazy dog", ["fox", "dog"], hypothesis_template="a {}")
    with torch.no_grad():
        pairs = (tokenizer("the lazy dog", f"a {word}", return_tensors="pt") for word in ("fox", "dog"))
        expected = torch.stack([solve.model(**pair).logits[0, 2] for pair in pairs]).softmax(0)
    assert_close(
        torch.tensor([dict(zip(found["labels"], found["scores"], strict=True))[w] for w in ("fox", "dog")]), expected
    )


def test_image_feature_extraction():
    processor = ViTImageProcessor(size={"height": 4, "width": 8})
    model = HfTinyViTModel(tiny_config(HfTinyViTConfig, num_channels=3)).eval()
    images = [Image.new("RGB", (9, 5), color) for color in ("red", "blue")]
    solve = pipeline("image-feature-extraction", model=model, image_processor=processor, device="cpu")
    with torch.no_grad():
        expected = model(**processor(images, return_tensors="pt")).last_hidden_state
    assert_close(torch.tensor(solve(images)).squeeze(1), expected)
