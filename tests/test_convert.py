"""hf_tiny's checkpoints as native ones and back; the way from native ones is also in the tests of each model."""

import pytest
import torch
from fixtures.tiny_models import ELECTRA, REFORMER, SEQ2SEQ, VIT, inputs
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    ModernBertConfig,
    ModernBertModel,
    ReformerConfig,
    ReformerForMaskedLM,
    ReformerForSequenceClassification,
    ReformerModelWithLMHead,
)

from hf_tiny import (
    HfTinyElectraConfig,
    HfTinyElectraForMaskedLM,
    HfTinyElectraForPreTraining,
    HfTinyElectraForSequenceClassification,
    HfTinyElectraForTokenClassification,
    HfTinyElectraModel,
    HfTinyReformerConfig,
    HfTinyReformerForCausalLM,
    HfTinySeq2SeqConfig,
    HfTinySeq2SeqForConditionalGeneration,
    HfTinyTokenLinkingConfig,
    HfTinyTokenLinkingModel,
    HfTinyViTConfig,
    HfTinyViTForImageClassification,
    HfTinyViTForMaskedImageModeling,
    InputError,
    convert,
)
from hf_tiny.models.reformer import LSHAttention
from hf_tiny.tokenizer import TokenizerArguments, train_tokenizer

HEADS = (HfTinyElectraForSequenceClassification, HfTinyElectraForTokenClassification)


def varied(model):
    """Weights large enough for outputs of order 1, and no bias of 0 or norm of 1."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def electra(model_class=HfTinyElectraForPreTraining, **changes):
    settings = {**ELECTRA, "initializer_range": 0.2, "classifier_pooling": "cls", **changes}
    return varied(model_class(HfTinyElectraConfig(**settings)))


def seq2seq(**changes):
    settings = {**SEQ2SEQ, "initializer_range": 0.2, **changes}
    return varied(HfTinySeq2SeqForConditionalGeneration(HfTinySeq2SeqConfig(**settings)))


def assert_same_logits(one, other):
    batch = inputs(type(one), one.config)
    with torch.no_grad():
        found, expected = other(**batch).logits, one(**batch).logits
    assert expected.abs().mean() > 0.1
    if expected.shape[:2] == batch["attention_mask"].shape:
        valid = batch["attention_mask"].bool()
        found, expected = found[valid], expected[valid]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def assert_same_weights(one, other):
    found, expected = other.state_dict(), one.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("sharing", "layers"), [("none", None), ("none", 1), ("embeddings", None), ("all", None)])
def test_electra(sharing, layers):
    """With a generator of half the width, or the same; back again it is the same model, but that nothing more is shared."""
    model = electra(sharing=sharing, generator_size=1 if sharing == "all" else 0.5, generator_layers=layers)
    discriminator, generator = convert.electra_to_native(model)
    assert_same_logits(model, discriminator)
    ours = HfTinyElectraForMaskedLM(model.config)
    ours.load_state_dict(model.state_dict(), strict=False)
    assert_same_logits(ours.eval(), generator)
    assert generator.config.num_hidden_layers == (layers or discriminator.config.num_hidden_layers)
    if layers:  # the way back is for pairs of one depth
        return
    back = convert.electra_from_native(discriminator, generator, "none" if sharing == "all" else sharing)
    if sharing != "all":
        assert_same_weights(model, back)
    assert_same_logits(discriminator, back)


def test_an_electra_whose_generator_is_not_tied():
    discriminator, generator = convert.electra_to_native(electra())
    generator.config.tie_word_embeddings = False
    with pytest.raises(InputError, match="tie_word_embeddings is False: hf_tiny's generator"):
        convert.electra_from_native(discriminator, generator)


@pytest.mark.parametrize("head", HEADS)
def test_electra_heads(head):
    model = electra(head, id2label={0: "a", 1: "b", 2: "c"}, label2id={"a": 0, "b": 1, "c": 2})
    native = convert.electra_head_to_native(model)
    assert native.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert_same_logits(model, native)
    assert_same_weights(model, convert.electra_head_from_native(native))


MODERN = {"architecture": "modern", "rope_theta": 500.0, "generator_size": 1}
ENCODER, MASKED = HfTinyElectraModel, HfTinyElectraForMaskedLM


def assert_same_on_texts(one, other, tolerance: float = 1e-5):
    """Padded and not."""
    batch = inputs(type(one), one.config)
    del batch["token_type_ids"]
    for mask in (batch["attention_mask"], torch.ones_like(batch["input_ids"])):
        given = {**batch, "attention_mask": mask}
        with torch.no_grad():
            found, expected = other(**given)[0], one(**given)[0]
        if expected.shape[:2] == mask.shape:
            found, expected = found[mask.bool()], expected[mask.bool()]
        assert expected.abs().mean() > 0.1
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("model_class", [ENCODER, MASKED, *HEADS])
def test_modern(model_class, pooling, tmp_path):
    """Weight for weight a native ModernBERT, and back."""
    model = electra(model_class, **MODERN, sharing="all", classifier_pooling=pooling, id2label={0: "하나", 1: "둘"})
    model.save_pretrained(tmp_path / "ours")
    command(tmp_path / "ours", tmp_path / "native")
    command(tmp_path / "native", tmp_path / "back")
    auto_class = {ENCODER: AutoModel, MASKED: AutoModelForMaskedLM}
    auto_class |= {HEADS[0]: AutoModelForSequenceClassification, HEADS[1]: AutoModelForTokenClassification}
    native, info = auto_class[model_class].from_pretrained(tmp_path / "native", output_loading_info=True)
    assert native.config.model_type == "modernbert" and not any(info.values()), info
    assert sum(p.numel() for p in native.parameters()) == sum(p.numel() for p in model.parameters())
    assert native.config.id2label == model.config.id2label
    assert_same_on_texts(model, native)
    assert_same_weights(model, model_class.from_pretrained(tmp_path / "back"))


@pytest.mark.parametrize("sharing", ["none", "embeddings", "all"])
def test_a_modern_joint_model(sharing, tmp_path, capsys):
    """Its encoder and its generator; of a narrower generator there is no native one."""
    model = electra(**MODERN, sharing=sharing)
    native = convert.joint_to_native(model)
    assert_same_on_texts(model.electra, native["encoder"])
    ours = MASKED(model.config)
    ours.load_state_dict(model.state_dict(), strict=False)
    assert_same_on_texts(ours.eval(), native["masked_lm"])
    if sharing != "all":
        narrow = electra(**{**MODERN, "sharing": sharing, "generator_size": 0.5})
        assert list(convert.joint_to_native(narrow)) == ["encoder"]
        assert "generator_size is 0.5: ModernBERT has no narrower generator" in capsys.readouterr().err


def test_a_modernbert_that_does_not_fit():
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32, "pad_token_id": 0}
    for changes, message in (
        ({}, "layer_types is .*'sliding_attention'.*: hf_tiny's modern architecture only has"),
        ({"layer_types": ["full_attention"] * 2, "norm_bias": True}, "norm_bias is True"),
    ):
        native = ModernBertModel(ModernBertConfig(**sizes, num_hidden_layers=2, **changes))
        with pytest.raises(InputError, match=message):
            convert.modern_from_native(native)
    with pytest.raises(InputError, match="architecture is 'electra': a native twin of this class only has 'modern'"):
        convert.modern_to_native(electra(MASKED))


def test_seq2seq():
    model = seq2seq()
    model.generation_config.num_beams = 3
    native = convert.seq2seq_to_native(model)
    assert_same_logits(model, native)
    assert_same_weights(model, convert.seq2seq_from_native(native))
    batch = {name: tensor for name, tensor in inputs(type(model), model.config).items() if "decoder" not in name}
    assert torch.equal(*(each.generate(**batch, max_new_tokens=8) for each in (model, native)))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: electra(position_embedding_type="rotary"), "position_embedding_type is 'rotary'"),
        (lambda: electra(norm_first=True), "norm_first is True"),
        (lambda: electra(HEADS[0], classifier_pooling="mean"), "classifier_pooling is 'mean'"),
        (lambda: electra(HEADS[1], tagger_lstm_size=4), "tagger_lstm_size is 4"),
        (lambda: electra(HEADS[0], classifier_pooling="cls", classifier_pairs=True), "classifier_pairs is True"),
        (lambda: electra(HEADS[0], classifier_pooling="cls", classifier_buckets=9), "classifier_buckets is 9"),
        (lambda: electra(HEADS[1], **MODERN, tagger_ngram_buckets=9), "tagger_ngram_buckets is 9"),
        (lambda: seq2seq(position_embedding_type="learned"), "position_embedding_type is 'learned'"),
        (lambda: seq2seq(norm_first=True), "norm_first is True"),
        (lambda: seq2seq(layer_norm_eps=1e-6), "layer_norm_eps is 1e-06"),
        (lambda: seq2seq(tie_word_embeddings=False), "tie_word_embeddings is False"),
        (lambda: seq2seq(v_head_dim=12), "v_head_dim is 12: the native model of transformers only has 16"),
    ],
)
def test_a_field_that_does_not_fit_is_named(make, field):
    model = make()
    with pytest.raises(InputError, match=field):
        convert.CONVERSIONS[type(model)](model)


def test_the_flags_that_would_have_allowed_a_conversion_are_named():
    advice = "A model trained with --position_embedding_type absolute --norm_first False can be converted."
    model = electra(position_embedding_type="rotary", norm_first=True)
    with pytest.raises(InputError, match=f"position_embedding_type is 'rotary': .* only has 'absolute'. {advice}"):
        convert.CONVERSIONS[type(model)](model)


# The command


def command(*arguments) -> None:
    convert.main([str(argument) for argument in arguments])


def test_the_command_takes_electra_there_and_back(tokenizer, tmp_path):
    model = electra(vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    command(tmp_path / "ours", tmp_path / "native")
    loaded, info = ElectraForPreTraining.from_pretrained(tmp_path / "native/discriminator", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_same_logits(model, loaded)
    _, info = ElectraForMaskedLM.from_pretrained(tmp_path / "native/generator", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert AutoConfig.from_pretrained(tmp_path / "native/generator").model_type == "electra"
    for part in convert.PAIR:
        assert AutoTokenizer.from_pretrained(tmp_path / "native" / part).get_vocab() == tokenizer.get_vocab()
        assert not list((tmp_path / "native" / part).glob("*.py"))
    command(tmp_path / "native", tmp_path / "back")
    assert_same_logits(model, HfTinyElectraForPreTraining.from_pretrained(tmp_path / "back"))


@pytest.mark.parametrize(
    ("make", "auto_class", "part"),
    [
        (lambda **sizes: electra(**sizes), AutoModelForPreTraining, "discriminator"),
        (lambda **sizes: electra(MASKED, **MODERN, sharing="all", **sizes), AutoModelForMaskedLM, ""),
        (lambda **sizes: electra(HEADS[0], **MODERN, **sizes), AutoModelForSequenceClassification, ""),
    ],
)
def test_sentences_there_and_back(make, auto_class, part, tmp_path):
    """In Korean and in English: the same ids, and the same answer."""
    sentences = ["나는 어제 재미있는 영화를 봤다.", "The quick brown fox!"]
    tokenizer = train_tokenizer(sentences * 4, TokenizerArguments(vocab_size=128), model_max_length=24)
    model = make(vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    command(tmp_path / "ours", tmp_path / "native")
    command(tmp_path / "native", tmp_path / "back")
    batch = tokenizer(sentences, return_tensors="pt", padding=True)
    assert tokenizer.unk_token_id not in batch["input_ids"]
    real = ... if isinstance(model, HEADS[0]) else batch["attention_mask"].bool()
    for folder in (tmp_path / "native" / part, tmp_path / "back"):
        again = AutoTokenizer.from_pretrained(folder)(sentences)["input_ids"]
        assert again == tokenizer(sentences)["input_ids"]
        with torch.no_grad():
            found, expected = (one(**batch).logits for one in (auto_class.from_pretrained(folder), model))
        torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=1e-5)


def test_the_command_takes_heads_and_seq2seq(tmp_path, capsys):
    for name, model in (("tagger", electra(HEADS[1])), ("translator", seq2seq())):
        model.save_pretrained(tmp_path / name)
        command(tmp_path / name, tmp_path / "native" / name)
        command(tmp_path / "native" / name, tmp_path / "back" / name)
        assert_same_weights(model, type(model).from_pretrained(tmp_path / "back" / name))
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "native/translator").config.model_type == "marian"
    assert "has no tokenizer" in capsys.readouterr().err


def test_what_the_command_refuses(tmp_path, capsys):
    encoder = HfTinyElectraConfig(**ELECTRA)
    linking = HfTinyTokenLinkingModel(HfTinyTokenLinkingConfig(encoder=encoder, arc_size=8, label_size=8))
    linking.save_pretrained(tmp_path / "linking")
    electra().save_pretrained(tmp_path / "cut")
    weights = tmp_path / "cut/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    discriminator, _ = convert.electra_to_native(electra())
    for name in convert.PAIR:
        discriminator.save_pretrained(tmp_path / "pair" / name)
    for source, target, message in (
        ("linking", "new", "HfTinyTokenLinkingModel has no counterpart"),
        ("cut", "new", "cut cannot be loaded: its weights are damaged or were cut short"),
        ("pair", "new", "generator is no ElectraForMaskedLM: it lacks 5 weights, such as generator_lm_head.bias"),
        ("nowhere", "new", "nowhere cannot be loaded"),
        ("linking", "cut", "cut is not empty: choose another folder"),
    ):
        with pytest.raises(SystemExit) as refused:
            command(tmp_path / source, tmp_path / target)
        assert refused.value.code == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("model_class", [HfTinyViTForImageClassification, HfTinyViTForMaskedImageModeling])
def test_vit_there_and_back(model_class, tmp_path):
    height = 8 if model_class is HfTinyViTForImageClassification else 12
    settings = {**VIT, "image_size": [height, 12], "patch_size": 4, "pooling": "cls", "initializer_range": 0.2}
    settings |= {"position_embedding_type": "learned", "num_register_tokens": 0, "layer_scale_init_value": None}
    model = varied(model_class(HfTinyViTConfig(**settings, drop_path_rate=0.0)))
    model.save_pretrained(tmp_path / "ours")
    convert.convert(str(tmp_path / "ours"), tmp_path / "native")
    convert.convert(str(tmp_path / "native"), tmp_path / "back")
    auto = (
        AutoModelForImageClassification if model_class is HfTinyViTForImageClassification else AutoModelForPreTraining
    )
    native, back = auto.from_pretrained(tmp_path / "native"), model_class.from_pretrained(tmp_path / "back")
    assert native.config.model_type in ("vit", "vit_mae")
    assert_same_weights(model, back)
    pixels = torch.randn(2, model.config.num_channels, height, 12)
    with torch.no_grad():
        if model_class is HfTinyViTForImageClassification:
            torch.testing.assert_close(native(pixels).logits, model(pixels).logits, atol=1e-5, rtol=1e-5)
        else:
            noise = torch.rand(2, 9)
            kept = int(9 * (1 - native.config.mask_ratio))
            ours = model(pixels, ids_keep=noise.argsort(1)[:, :kept]).loss
            torch.testing.assert_close(native(pixels, noise=noise).loss, ours, atol=1e-5, rtol=1e-5)


def test_a_vit_that_transformers_does_not_have():
    for change, message in (
        ({"pooling": "mean"}, "pooling is 'mean'"),
        ({"stem": "conv"}, "stem is 'conv': .* 'patch'"),
    ):
        model = HfTinyViTForImageClassification(HfTinyViTConfig(**{**VIT, **change}))
        with pytest.raises(InputError, match=message):
            convert.vit_to_native(model)
    model = HfTinyViTForMaskedImageModeling(HfTinyViTConfig(**{**VIT, "image_size": [4, 8]}))
    with pytest.raises(InputError, match="square"):
        convert.vit_to_native(model)


def native_reformer(model_class=ReformerModelWithLMHead, **changes):
    causal = model_class is ReformerModelWithLMHead
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "attention_head_size": 6}
    sizes |= {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [6, 10], "feed_forward_size": 24, "num_buckets": 4}
    sizes |= {"lsh_attn_chunk_length": 8, "local_attn_chunk_length": 8, "num_hashes": 1, "hash_seed": 5}
    layers = ["local", "lsh", "lsh"] if causal else ["lsh"] * 3
    settings = {**sizes, "attn_layers": layers, "is_decoder": causal, "initializer_range": 0.3, **changes}
    return varied(model_class(ReformerConfig(**settings)))


@torch.no_grad()
@pytest.mark.parametrize("buckets", [4, [2, 4], None])
@pytest.mark.parametrize("native_class", [ReformerModelWithLMHead, ReformerForMaskedLM])
def test_reformer_from_native(native_class, buckets, tmp_path, monkeypatch):
    """One hash, and the rotations that the native model draws: the same logits, where all is in reach and where it is not."""
    native = native_reformer(native_class, num_buckets=buckets)
    native.save_pretrained(tmp_path / "native")
    convert.convert(str(tmp_path / "native"), tmp_path / "ours")
    ours = convert.COUNTERPARTS[native_class].from_pretrained(tmp_path / "ours")

    def rotations(self, rounds: int, count: int, index: int, seed: int, device):
        sizes = buckets if isinstance(buckets, list) else [buckets or 16]  # of 8 chunks, twice as many
        drawn = torch.randn((2, 6, rounds, sum(sizes) // 2), generator=torch.Generator().manual_seed(5))
        drawn = drawn.permute(2, 3, 0, 1).split([size // 2 for size in sizes], 1)[index]
        return torch.nn.functional.pad(drawn, (0, 0, 0, 0, 0, count - drawn.shape[1]))

    monkeypatch.setattr(LSHAttention, "rotations", rotations)
    for length in (64, 8):
        ids = torch.randint(5, 50, (2, length))
        expected = native(ids).logits
        assert expected.std() > 0.3
        torch.testing.assert_close(ours(ids).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: native_reformer(axial_pos_embds=False), "axial_pos_embds is False: hf_tiny's Reformer only has True"),
        (lambda: native_reformer(lsh_num_chunks_before=2), "lsh_num_chunks_before is 2"),
        (lambda: native_reformer(ReformerForMaskedLM, attn_layers=["lsh", "local"]), "attn_layers is .* is not causal"),
    ],
)
def test_a_reformer_that_does_not_fit(make, message):
    model = make()
    with pytest.raises(InputError, match=message):
        convert.CONVERSIONS[type(model)](model)


def test_a_reformers_task_head_has_no_counterpart(tmp_path):
    """The native one is narrower, and has another activation."""
    native_reformer(ReformerForSequenceClassification).save_pretrained(tmp_path / "native")
    with pytest.raises(InputError, match="ReformerForSequenceClassification has no counterpart"):
        convert.convert(str(tmp_path / "native"), tmp_path / "ours")


def test_there_is_no_way_from_a_reformer_to_a_native_one(tmp_path):
    HfTinyReformerForCausalLM(HfTinyReformerConfig(**REFORMER)).save_pretrained(tmp_path / "ours")
    with pytest.raises(InputError, match="HfTinyReformerForCausalLM has no counterpart"):
        convert.convert(str(tmp_path / "ours"), tmp_path / "native")
