"""ViT and its masked autoencoder against transformers' own, and everything that theirs gets wrong."""

import json

import pytest
import torch
from fixtures.tiny_models import assert_close
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTForMaskedImageModeling,
    ViTMAEConfig,
    ViTMAEForPreTraining,
    ViTModel,
)

from hf_tiny import HfTinyViTConfig, HfTinyViTModel, InputError
from hf_tiny import HfTinyViTForImageClassification as Classifier
from hf_tiny import HfTinyViTForMaskedImageModeling as Autoencoder
from hf_tiny.convert import vit_from_native
from hf_tiny.models.vit import fixed_visible, patchify, unpatchify

SIZES = {"image_size": 12, "patch_size": 3, "num_channels": 3, "initializer_range": 0.2}
SIZES |= {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
DECODER = {"decoder_hidden_size": 24, "decoder_num_hidden_layers": 2}
DECODER |= {"decoder_num_attention_heads": 3, "decoder_intermediate_size": 40}


def build(model_class: type = Classifier, **changes):
    return model_class(HfTinyViTConfig(**{**SIZES, **DECODER, "num_labels": 5, **changes})).eval()


def images(rows: int = 4, height: int = 12, width: int = 12, channels: int = 3) -> Tensor:
    return torch.randn(rows, channels, height, width, generator=torch.Generator().manual_seed(7))


def visible(rows: int = 4, patches: int = 16, kept: int = 4) -> Tensor:
    return torch.rand(rows, patches, generator=torch.Generator().manual_seed(8)).argsort(1)[:, :kept]


def shake(model: nn.Module) -> nn.Module:
    """Every weight away from 0 and 1, so that none can be forgotten."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


# Parity with transformers


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("qkv_bias", [True, False])
@torch.no_grad()
def test_classification_equals_native(channels, qkv_bias):
    sizes = {**SIZES, "num_channels": channels, "qkv_bias": qkv_bias, "num_labels": 5}
    native = shake(ViTForImageClassification(ViTConfig(**sizes)))
    ours = vit_from_native(native)
    x, labels = images(channels=channels), torch.tensor([4, 0, 2, 2])
    expected, found = native(x, labels=labels), ours(x, labels=labels)
    assert_close(found.logits, expected.logits)
    assert_close(found.loss, expected.loss)
    for height, width in ((24, 24), (9, 9), (6, 15)):  # a square grid stretched to any other is what native can do
        x = images(height=height, width=width, channels=channels)
        assert_close(ours(x).logits, native(x, interpolate_pos_encoding=True).logits)


@torch.no_grad()
def test_states_and_attentions_equal_native():
    native = shake(ViTModel(ViTConfig(**SIZES)))
    native.set_attn_implementation("eager")
    ours = vit_from_native(native)
    ours.set_attn_implementation("eager")
    expected, found = (model(images(), output_attentions=True) for model in (native, ours))
    assert_close(found.last_hidden_state, expected.last_hidden_state)
    assert torch.equal(found.pooler_output, found.last_hidden_state[:, 0])
    for ours, theirs in zip(found.attentions, expected.attentions, strict=True):
        assert_close(ours, theirs)
    with pytest.raises(InputError, match=r"ViTForMaskedImageModeling has no counterpart here: give one of .*ViTModel"):
        vit_from_native(ViTForMaskedImageModeling(ViTConfig(**SIZES, encoder_stride=3)))


def native_mae(**changes) -> ViTMAEForPreTraining:
    native = shake(ViTMAEForPreTraining(ViTMAEConfig(**{**SIZES, **DECODER, **changes})))
    with torch.no_grad():
        native.decoder.decoder_pos_embed[:, 0] = 0  # where trained models have it
    return native


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("norm_pix_loss", [True, False])
def test_mae_equals_native(channels, norm_pix_loss):
    native = native_mae(num_channels=channels, norm_pix_loss=norm_pix_loss)
    ours, x = vit_from_native(native), images(channels=channels)
    noise = torch.rand(4, 16, generator=torch.Generator().manual_seed(3))
    expected = native(x, noise=noise)
    keep = noise.argsort(1)[:, :4]
    for ids_keep in (keep, keep.sort(1).values):
        found = ours(x, ids_keep)
        assert_close(found.loss, expected.loss)
        assert torch.equal(found.mask, expected.mask.bool())
        # Within a patch theirs have the channels last: compare pictures.
        assert_close(unpatchify(found.logits, (4, 4), ours.config), native.unpatchify(expected.logits))
    expected.loss.backward()
    found = ours.train()(x, keep)
    assert found.logits is None
    assert_close(found.loss, expected.loss)
    found.loss.backward()
    assert_close(ours.vit.norm.weight.grad, native.vit.layernorm.weight.grad)
    assert_close(ours.decoder.embed.weight.grad, native.decoder.decoder_embed.weight.grad)
    assert_close(ours.decoder.mask_token.weight.grad, native.decoder.mask_token.grad[0])
    theirs = native.vit.embeddings.patch_embeddings.projection.weight.grad.flatten(1)
    assert_close(ours.vit.embeddings.projection.weight.grad, theirs)


@torch.no_grad()
def test_mae_on_another_grid_equals_native():
    """But for the decoder's positions, which native stretches along one long row: without them, all is equal."""
    native = native_mae()
    native.decoder.decoder_pos_embed.zero_()
    ours, x = vit_from_native(native), images(height=18, width=9)
    noise = torch.rand(4, 18, generator=torch.Generator().manual_seed(3))
    expected = native(x, noise=noise, interpolate_pos_encoding=True)
    assert_close(ours(x, noise.argsort(1)[:, :4]).loss, expected.loss)
    native.decoder.decoder_pos_embed[0, 0] = 1
    with pytest.raises(InputError, match="class token a position"):
        vit_from_native(native)


# What transformers' ViT cannot do


@pytest.mark.parametrize("kind", ["learned", "sinusoidal"])
@torch.no_grad()
def test_rectangular_grids_are_interpolated(kind):
    """What depends on the row alone does not change when there are more columns, and the other way round."""
    model = build(HfTinyViTModel, image_size=(24, 12), position_embedding_type=kind)  # 8 x 4 patches
    positions = model.embeddings.positions
    if kind == "learned":
        by_row, by_column = torch.randn(8, 1, 16).expand(-1, 4, -1), torch.randn(1, 4, 16).expand(8, -1, -1)
        positions.table.weight.copy_(torch.cat((by_row, by_column), dim=-1).flatten(0, 1))
    like = torch.zeros(1)
    known, wide, tall = (positions(grid, like).unflatten(0, grid) for grid in ((8, 4), (8, 10), (5, 4)))
    assert_close(wide[:, :, :16], known[:, :1, :16].expand(-1, 10, -1))
    assert_close(tall[:, :, 16:], known[:1, :, 16:].expand(5, -1, -1))
    assert (wide[0, 1:, 16:] - wide[0, :-1, 16:]).abs().amax(-1).min() > 0.01
    if kind == "sinusoidal":
        assert_close(tall[:, 0, 0], ((torch.arange(5) + 0.5) * 8 / 5 - 0.5).sin())  # the same picture, other middles
    assert model(images(height=24, width=24)).last_hidden_state.shape == (4, 65, 32)


def test_patches_of_any_shape():
    """Each patch is seen whole: its projection is the product with its own pixels, and patches make up the picture."""
    model = build(HfTinyViTModel, image_size=(8, 12), patch_size=(2, 3))
    x = images(height=8, width=12)
    patches = patchify(x, model.config)
    assert patches.shape == (4, 16, 18)
    assert torch.equal(patches[:, 6], x[:, :, 2:4, 6:9].flatten(1))  # the second row's third
    assert torch.equal(unpatchify(patches, (4, 4), model.config), x)
    project = model.embeddings.projection
    convolution = nn.functional.conv2d(x, project.weight.view(32, 3, 2, 3), project.bias, stride=(2, 3))
    assert_close(project(patches), convolution.flatten(2).mT)
    assert model(x).last_hidden_state.shape == (4, 17, 32)


@pytest.mark.parametrize(
    ("patch", "halvings", "left"), [(1, 0, 32), (3, 0, 32 * 9), (4, 2, 32), ((4, 6), 1, 32 * 2 * 3), (12, 2, 32 * 9)]
)
@torch.no_grad()
def test_convolutions_halve_what_patches_can_be_halved(patch, halvings, left):
    """The projection gets what they leave of a patch, which depends on the patch and its surroundings, on nothing else."""
    torch.manual_seed(0)
    model = build(HfTinyViTModel, image_size=24, patch_size=patch, stem="conv")
    stem, x = model.embeddings.stem, images(height=24, width=24)
    convolutions = [layer for layer in stem if isinstance(layer, nn.Conv2d)]
    assert [layer.stride for layer in convolutions] == [(1, 1)] + [(2, 2)] * halvings
    assert model.embeddings.projection.in_features == left
    found = stem(x)
    assert found.shape[2:] == (24 >> halvings, 24 >> halvings)
    assert found.std() > 0.1  # the signal does not fade
    assert_close(stem(x[:1]), found[:1])  # no other image matters
    larger = nn.functional.pad(x, (0, 24, 0, 24))  # nor how large the image is
    assert_close(
        stem(larger)[:, :, : 20 >> halvings, : 20 >> halvings], found[:, :, : 20 >> halvings, : 20 >> halvings]
    )
    assert model(x).last_hidden_state.shape == (4, 1 + torch.Size(model.config.position_grid).numel(), 32)


@pytest.mark.parametrize("new", [24, (6, 15), [12, 24]])
@pytest.mark.parametrize(("kind", "stem"), [("learned", "patch"), ("sinusoidal", "patch"), ("learned", "conv")])
@torch.no_grad()
def test_a_checkpoint_loads_with_another_image_size(new, kind, stem, tmp_path):
    model = build(position_embedding_type=kind, stem=stem)
    model.save_pretrained(tmp_path / "first")
    assert json.loads((tmp_path / "first" / "config.json").read_text())["position_grid"] == [4, 4]
    height, width = (new, new) if isinstance(new, int) else new
    x = images(height=height, width=width)
    folder = tmp_path / "first"
    for again in ("second", "third"):  # saved with the new size, it still knows the grid of its positions
        loaded, info = AutoModelForImageClassification.from_pretrained(folder, image_size=new, output_loading_info=True)
        assert not any(info.values()), info
        assert loaded.config.position_grid == [4, 4]
        assert_close(loaded(x).logits, model(x).logits, 1e-6)
        folder = tmp_path / again
        loaded.save_pretrained(folder)
        new = loaded.config.image_size


def test_sizes_that_do_not_fit(tmp_path):
    message = r"30 x 33 pixels does not divide into patches of 4 x 4: .* 28 x 32, 28 x 36, 32 x 32, 32 x 36"
    with pytest.raises(ValueError, match=message):
        HfTinyViTConfig(image_size=(30, 33), patch_size=4)
    model = build()
    with pytest.raises(ValueError, match=r"12 x 13 pixels .* are 12 x 12, 12 x 15"):
        model(images(width=13))
    with pytest.raises(ValueError, match=r"\(4, 1, 12, 12\), but the model takes \(batch, 3, height, width\)"):
        model(images(channels=1))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"2 x 2 pixels .* are 3 x 3"):
        AutoModel.from_pretrained(tmp_path, image_size=2)
    for changes, message in (
        ({"hidden_size": 30}, "width of 30 does not divide into 4 heads: change hidden_size"),
        ({"decoder_hidden_size": 25}, "width of 25 does not divide into 3 heads: change decoder_hidden_size"),
        ({"position_embedding_type": "sinusoidal", "decoder_hidden_size": 6}, "decoder_hidden_size that 4 divides"),
        ({"pooling": "max"}, "'max': choose one of"),
        ({"drop_path_rate": 1.0}, "from 0 to below 1"),
        ({"patch_size": 1, "num_channels": 1, "norm_pix_loss": True}, "more than one number"),
    ):
        with pytest.raises(ValueError, match=message):
            HfTinyViTConfig(**{**SIZES, **DECODER, **changes})


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixup_labels_are_soft_cross_entropy(smoothing):
    model, x = build(label_smoothing=smoothing), images()
    labels = torch.tensor([4, 0, 2, 2])
    hard = nn.functional.one_hot(labels, 5).float()
    mixed = 0.7 * hard + 0.3 * hard.roll(1, 0)
    outputs = model(x, labels=mixed)
    smooth = (1 - smoothing) * mixed + smoothing / 5
    assert_close(outputs.loss, -(smooth * outputs.logits.log_softmax(-1)).sum() / 4, 1e-6)
    assert_close(model(x, labels=hard).loss, model(x, labels=labels).loss, 1e-6)
    assert_close(model(x, labels=mixed.double(), num_items_in_batch=8).loss, outputs.loss / 2, 1e-6)
    for wrong in (mixed[:, :3], hard.long(), labels.float()):
        with pytest.raises(ValueError, match=r"give class numbers \(4,\), or floats \(4, 5\)"):
            model(x, labels=wrong)


@torch.no_grad()
def test_the_evaluation_mask_is_fixed():
    model, x = build(Autoencoder), images()
    first = model(x)
    before = torch.get_rng_state()
    again = model(x)
    assert torch.equal(torch.get_rng_state(), before)  # nothing was drawn
    assert torch.equal(again.mask, first.mask)
    assert torch.equal(again.loss, first.loss)
    assert torch.equal(model(x[:2]).mask, first.mask[:2])
    assert first.mask.sum(1).tolist() == [12] * 4
    many = fixed_visible(2000, 16, x.device)
    assert many.sort(1).values.diff(dim=1).min() > 0
    assert (torch.bincount(many.flatten(), minlength=16) / 500 - 1).abs().max() < 0.2
    with pytest.raises(ValueError, match="Training needs ids_keep"):
        model.train()(x)


# Masked images


@pytest.mark.parametrize("stem", ["patch", "conv"])
@pytest.mark.parametrize("registers", [0, 2])
@torch.no_grad()
def test_the_encoder_sees_visible_patches_only(registers, stem):
    model = build(Autoencoder, num_register_tokens=registers, stem=stem)
    x, keep = images(), visible()
    outputs = model(x, keep, output_hidden_states=True)
    assert outputs.hidden_states[0].shape == (4, 1 + registers + 4, 32)
    noise = unpatchify(outputs.mask[:, :, None] * torch.randn(4, 16, 27), (4, 4), model.config)
    assert_close(model(x + noise, keep).logits, outputs.logits, 1e-6)
    shuffled = torch.randperm(16).expand(4, -1)
    assert_close(model.vit(x, shuffled).pooler_output, model.vit(x).pooler_output)


@pytest.mark.parametrize("norm_pix_loss", [True, False])
@torch.no_grad()
def test_reconstruction(norm_pix_loss):
    """Visible patches are the picture's. The error of the others, normalised as the loss has it, is the loss."""
    model = build(Autoencoder, norm_pix_loss=norm_pix_loss, image_size=(12, 18), patch_size=(3, 6))
    x, keep = 3 * images(width=18) + 1, visible(patches=12)
    outputs, pictures = model(x, keep), model.reconstruct(x, keep)
    assert pictures.shape == x.shape
    true, guessed = patchify(x, model.config), patchify(pictures, model.config)
    assert torch.equal(guessed[~outputs.mask], true[~outputs.mask])
    error = (guessed - true)[outputs.mask]
    if norm_pix_loss:
        error = error / (true[outputs.mask].var(-1, keepdim=True) + 1e-6).sqrt()
    assert_close(error.square().mean(), outputs.loss)
    assert_close(model.train().reconstruct(x, keep), pictures)


# Options


@torch.no_grad()
def test_without_positions_the_order_of_patches_does_not_matter():
    model, x = build(pooling="mean"), images()
    order = torch.randperm(16)
    shuffled = unpatchify(patchify(x, model.config)[:, order], (4, 4), model.config)
    assert (model(shuffled).logits - model(x).logits).abs().max() > 0.01
    model.vit.embeddings.positions.table.weight.zero_()
    assert_close(model(shuffled).logits, model(x).logits)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("registers", [0, 3])
@torch.no_grad()
def test_pooling_and_registers(pooling, registers):
    model, x = build(pooling=pooling, num_register_tokens=registers), images()
    outputs = model.vit(x)
    assert outputs.last_hidden_state.shape == (4, 1 + registers + 16, 32)
    patches = outputs.last_hidden_state[:, 1 + registers :].mean(1)
    assert_close(outputs.pooler_output, outputs.last_hidden_state[:, 0] if pooling == "cls" else patches, 1e-6)
    assert_close(model(x).logits, model.classifier(outputs.pooler_output))  # computes only what it needs


@torch.no_grad()
def test_layer_scale():
    model, x = build(layer_scale_init_value=0.0), images()
    names = [name for name, _ in model.named_parameters() if "_scale.weight" in name]
    assert len(names) == 2 * 3
    assert_close(model.vit(x).last_hidden_state, model.vit.norm(model.vit.embeddings(x, None)), 1e-6)  # nothing added
    plain = build()
    plain.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if name not in names})
    for name in names:
        model.get_parameter(name).fill_(1)
    assert_close(model(x).logits, plain(x).logits, 1e-6)


@torch.no_grad()
def test_drop_path():
    model = build(Autoencoder, drop_path_rate=0.4)
    assert [layer.drop_path for layer in (*model.vit.layers, *model.decoder.layers)] == [0, 0.2, 0.4, 0, 0]
    layer = model.vit.layers[2]
    x, y = torch.randn(2, 6000, 3, 32)
    assert torch.equal(layer.add(x, y), x + y)  # not in training: all of it
    layer.train()
    factor = ((layer.add(x, y) - x) / y).median(-1).values  # (rows, tokens)
    assert_close(factor, factor[:, :1].expand(-1, 3), 1e-3)  # an image as a whole
    kept = factor[:, 0] > 0.5
    assert_close(factor[kept, 0], torch.full((int(kept.sum()),), 1 / 0.6), 1e-3)
    assert factor[~kept].abs().max() < 1e-3
    assert kept.float().mean().item() == pytest.approx(0.6, abs=0.03)  # so the mean stays
    assert factor.mean().item() == pytest.approx(1, abs=0.05)


# Training


@pytest.mark.parametrize("stem", ["patch", "conv"])
@pytest.mark.parametrize("model_class", [Classifier, Autoencoder])
def test_parts_add_up_to_the_whole(model_class, stem):
    model = build(model_class, stem=stem).double().train()
    given = {"ids_keep": visible()} if model_class is Autoencoder else {"labels": torch.arange(4)}
    batch, count = {"pixel_values": images().double(), **given}, {"ids_keep": 4 * 12, "labels": 4}[next(iter(given))]
    whole = model(**batch).loss
    whole.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    total = 0
    for part in (slice(0, 1), slice(1, 4)):
        loss = model(**{name: tensor[part] for name, tensor in batch.items()}, num_items_in_batch=count).loss
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(whole.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, expected[name], 1e-6)


def test_a_pretrained_encoder_goes_on_to_classify(tmp_path):
    pretrained = build(Autoencoder)
    pretrained.save_pretrained(tmp_path)
    loaded, info = AutoModelForImageClassification.from_pretrained(tmp_path, num_labels=7, output_loading_info=True)
    assert set(info["missing_keys"]) == {"classifier.weight", "classifier.bias"}
    assert not info["unexpected_keys"]
    assert_close(loaded.vit(images()).pooler_output, pretrained.vit(images()).pooler_output, 1e-6)
    assert loaded(images()).logits.shape == (4, 7)
