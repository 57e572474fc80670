"""The Vision Transformer (Dosovitskiy et al., 2021), and its pretraining as a masked autoencoder (He et al., 2022)."""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from .heads import Count, classification_loss, count_items
from .layers import (
    BlockSizes,
    Dropout,
    EncoderBlock,
    HfTinyConfig,
    HfTinyPreTrainedModel,
    SelfAttention,
    layer_norm,
    sinusoids,
)

__all__ = ["HfTinyViTConfig", "HfTinyViTForImageClassification", "HfTinyViTForMaskedImageModeling", "HfTinyViTModel"]

Size = int | list[int] | tuple[int, ...]  # (height, width), or one number for both


def height_and_width(size: Size) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


@strict
class HfTinyViTConfig(HfTinyConfig):
    """The paper's base model; `decoder_...` are the sizes of the light decoder of masked image modelling.

    image_size, patch_size: in pixels; one number, or (height, width).
    stem: what a patch is projected from: its pixels ("patch"), or what convolutions make of it and its surroundings ("conv").
    pooling: what an image is classified by: the class token ("cls"), or the "mean" of its patches.
    position_embedding_type: "learned", or "sinusoidal" in two dimensions.
    position_grid: the rows and columns of patches that positions were made for; those of `image_size` when None. An image
        with another grid gets positions in between.
    drop_path_rate: how often the last block leaves out a layer for an image in training; earlier ones do so more rarely.
    layer_scale_init_value: of a learned factor for each dimension of what a layer adds; none when None.
    num_register_tokens: tokens that belong to no patch, after the class token.
    norm_pix_loss: the pixels to be guessed are normalised by mean and deviation of their patch.
    """

    model_type = "hf_tiny_vit"
    choices = {"position_embedding_type": ("learned", "sinusoidal"), "stem": ("patch", "conv")}
    norm_first = True

    image_size: Size = 224
    patch_size: Size = 16
    stem: str = "patch"
    num_channels: int = 3
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    layer_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    qkv_bias: bool = True
    pooling: str = "cls"
    position_embedding_type: str = "learned"
    position_grid: list[int] | tuple[int, ...] | None = None
    drop_path_rate: float | int = 0.0
    layer_scale_init_value: float | int | None = None
    num_register_tokens: int = 0
    decoder_hidden_size: int = 512
    decoder_num_hidden_layers: int = 8
    decoder_num_attention_heads: int = 16
    decoder_intermediate_size: int = 2048
    norm_pix_loss: bool = False
    label_smoothing: float | int = 0.0

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        # As JSON has them: a saved config must equal the one that is loaded.
        self.image_size = self.image_size if isinstance(self.image_size, int) else list(self.image_size)
        self.patch_size = self.patch_size if isinstance(self.patch_size, int) else list(self.patch_size)
        self.position_grid = list(self.position_grid or self.grid_size(self.image_size))
        for name in ("label_smoothing", "drop_path_rate"):
            self.require(name, 0 <= getattr(self, name) < 1, "choose a share from 0 to below 1.")
        for part in ("", "decoder_"):
            size, heads = getattr(self, f"{part}hidden_size"), getattr(self, f"{part}num_attention_heads")
            self.require_heads(size, heads, f"{part}hidden_size or {part}num_attention_heads")
            if self.position_embedding_type == "sinusoidal" and size % 4:
                raise ValueError(f"Sinusoidal positions need a {part}hidden_size that 4 divides, not {size}.")
        if self.norm_pix_loss and self.patch_dim == 1:
            raise ValueError("norm_pix_loss needs patches of more than one number: a single one has no deviation.")

    @property
    def patch_dim(self) -> int:
        """How many numbers a patch has."""
        height, width = height_and_width(self.patch_size)
        return height * width * self.num_channels

    def grid_size(self, image_size: Size) -> tuple[int, int]:
        """The rows and columns of patches in an image."""
        image, patch = height_and_width(image_size), height_and_width(self.patch_size)
        if image[0] % patch[0] or image[1] % patch[1]:
            near = [{max(a // b, 1) * b, -(-a // b) * b} for a, b in zip(image, patch, strict=True)]
            sizes = ", ".join(f"{height} x {width}" for height in sorted(near[0]) for width in sorted(near[1]))
            raise ValueError(
                f"An image of {image[0]} x {image[1]} pixels does not divide into patches of {patch[0]} x {patch[1]}: "
                f"the nearest sizes that do are {sizes}."
            )
        return image[0] // patch[0], image[1] // patch[1]


def patchify(pixel_values: Tensor, config: HfTinyViTConfig) -> Tensor:
    """(batch, channels, height, width) to (batch, patches, channels * patch height * patch width), row by row."""
    if pixel_values.dim() != 4 or pixel_values.shape[1] != config.num_channels:
        raise ValueError(
            f"pixel_values are {tuple(pixel_values.shape)}, but the model takes (batch, {config.num_channels}, height, "
            "width): convert the images to grey or RGB, as it was trained."
        )
    return cut(pixel_values, config.grid_size(pixel_values.shape[2:]))


def cut(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """(batch, channels, height, width) to (batch, places of the grid, numbers of each)."""
    places = x.unflatten(3, (grid[1], -1)).unflatten(2, (grid[0], -1))
    return places.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpatchify(patches: Tensor, grid: tuple[int, int], config: HfTinyViTConfig) -> Tensor:
    """What `patchify` was given."""
    parts = patches.unflatten(2, (config.num_channels, *height_and_width(config.patch_size))).unflatten(1, grid)
    return parts.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def moments(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each patch."""
    return patches.mean(-1, keepdim=True), (patches.var(-1, keepdim=True) + 1e-6).sqrt()


def take(x: Tensor, ids: Tensor) -> Tensor:
    """The rows `ids` (batch, n) of x (batch, rows, size), whole rows at a time: `gather` goes number by number."""
    starts = torch.arange(x.shape[0], device=x.device)[:, None] * x.shape[1]
    return F.embedding(starts + ids, x.flatten(0, 1))


def fixed_visible(rows: int, patches: int, device: torch.device) -> Tensor:
    """A quarter of the patches for each row of a batch (rows, kept), always the same: by a hash, not by a random stream."""
    x = torch.arange(rows * patches, device=device) + 0x9E3779B9
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF
    return (x ^ (x >> 16)).view(rows, patches).argsort(1)[:, : max(1, patches // 4)]


class GridPositions(nn.Module):
    """A vector for each place of a grid, row by row."""

    def __init__(self, config: HfTinyViTConfig, size: int):
        super().__init__()
        self.size = size
        self.grid = height_and_width(config.position_grid or config.grid_size(config.image_size))
        self.learned = config.position_embedding_type == "learned"
        if self.learned:
            self.table = nn.Embedding(self.grid[0] * self.grid[1], size)

    def forward(self, grid: tuple[int, int], like: Tensor) -> Tensor:
        """(places, size). Another grid than that of `position_grid` is laid over the same image."""
        if not self.learned:
            rows, columns = (self.along(*sizes, like) for sizes in zip(grid, self.grid, strict=True))
            both = (rows[:, None].expand(-1, len(columns), -1), columns.expand(len(rows), -1, -1))
            return torch.cat(both, dim=-1).flatten(0, 1)
        table = self.table(torch.arange(self.table.num_embeddings, device=like.device))  # a call: it may be offloaded
        if grid == self.grid:
            return table
        known = table.mT.unflatten(1, self.grid)[None]  # (1, size, rows, columns)
        return F.interpolate(known, size=grid, mode="bicubic", align_corners=False)[0].flatten(1).mT

    def along(self, count: int, known: int, like: Tensor) -> Tensor:
        """(count, size / 2) for the middles of `count` places where `known` were."""
        places = (torch.arange(count, device=like.device) + 0.5) * (known / count) - 0.5
        return sinusoids(places[None], self.size // 2, like.dtype)[0]


class ConvStem(nn.Sequential):
    """Convolutions in the place of pixels (Xiao et al., 2021): one that keeps the size of the image, and more that halve it
    while halves of a patch are whole. Without normalisation, which would make an image depend on its batch or its size."""

    def __init__(self, config: HfTinyViTConfig):
        height, width = height_and_width(config.patch_size)
        halvings = min(
            (side & -side).bit_length() - 1 for side in (height, width)
        )  # of the larger power of two in both
        sizes = [max(1, config.hidden_size >> left) for left in range(halvings, -1, -1)]
        layers = [nn.Conv2d(config.num_channels, sizes[0], 3, padding=1), nn.GELU()]
        for before, after in pairwise(sizes):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GELU()]
        super().__init__(*layers)
        self.patch_dim = sizes[-1] * (height >> halvings) * (width >> halvings)  # numbers that are left of a patch


class ViTEmbeddings(nn.Module):
    """One projection of every patch, with its position; before them the class token and the registers, which have none."""

    def __init__(self, config: HfTinyViTConfig):
        super().__init__()
        self.config = config
        self.stem = ConvStem(config) if config.stem == "conv" else None
        self.projection = nn.Linear(self.stem.patch_dim if self.stem else config.patch_dim, config.hidden_size)
        self.prefix = nn.Embedding(1 + config.num_register_tokens, config.hidden_size)
        self.positions = GridPositions(config, config.hidden_size)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, pixel_values: Tensor, visible: Tensor | None) -> Tensor:
        pixel_values = pixel_values.to(self.projection.weight.dtype)
        patches, grid = patchify(pixel_values, self.config), self.config.grid_size(pixel_values.shape[2:])
        positions = self.positions(grid, patches)
        if self.stem is not None:
            if visible is not None:  # a masked patch must not be seen in those beside it
                seen = patches.new_zeros(patches.shape[:2]).scatter(1, visible, 1.0)
                pixel_values = unpatchify(patches * seen[:, :, None], grid, self.config)
            patches = cut(self.stem(pixel_values), grid)
        if visible is not None:
            patches, positions = take(patches, visible), F.embedding(visible, positions)
        x = self.projection(patches) + positions
        prefix = self.prefix(torch.arange(self.prefix.num_embeddings, device=x.device))
        return self.dropout(torch.cat((prefix.to(x.dtype).expand(x.shape[0], -1, -1), x), dim=1))


class LayerScale(nn.Module):
    def __init__(self, size: int, value: float):
        super().__init__()
        self.value = value
        self.weight = nn.Parameter(torch.full((size,), float(value)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class ViTBlock(EncoderBlock):
    """`EncoderBlock` with the norm before each layer, and the options of images: drop-path and LayerScale."""

    def __init__(self, config: HfTinyViTConfig, sizes: BlockSizes, drop_path: float = 0.0):
        super().__init__(config, sizes)
        self.drop_path = drop_path
        if not config.qkv_bias:
            self.attention.qkv.register_parameter("bias", None)
        value = config.layer_scale_init_value
        self.attention_scale = nn.Identity() if value is None else LayerScale(sizes.hidden_size, value)
        self.feed_forward_scale = nn.Identity() if value is None else LayerScale(sizes.hidden_size, value)

    def forward(self, x: Tensor, queries: slice | None = None, **kwargs) -> Tensor:  # type: ignore[override]  # no masks
        """queries: of which tokens the output is needed; of all when None."""
        y, _ = self.attention(self.attention_norm(x), None, None, queries=queries, **kwargs)
        x = self.add(x if queries is None else x[:, queries], self.attention_scale(y))
        return self.add(x, self.feed_forward_scale(self.feed_forward(self.feed_forward_norm(x))))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        if self.training and self.drop_path > 0:
            kept = torch.rand(y.shape[0], 1, 1, device=y.device) >= self.drop_path
            y = y * (kept / (1 - self.drop_path)).to(y.dtype)
        return self.dropout(y, residual=x)


class HfTinyViTPreTrainedModel(HfTinyPreTrainedModel):
    config: HfTinyViTConfig
    base_model_prefix = "vit"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _can_compile_fullgraph = True
    _no_split_modules = ["ViTEmbeddings", "ViTBlock"]
    _can_record_outputs = {"hidden_states": ViTBlock, "attentions": SelfAttention}
    _input_embed_layer = "projection"
    _keys_to_ignore_on_load_unexpected = [r"^decoder\.", r"^classifier\."]  # of another head

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, LayerScale):
            init.constant_(module.weight, module.value)
        if isinstance(module, nn.Conv2d):  # by what goes in: the initialisation of linear layers would fade with depth
            init.kaiming_normal_(module.weight)


class HfTinyViTModel(HfTinyViTPreTrainedModel):
    def __init__(self, config: HfTinyViTConfig):
        super().__init__(config)
        config.grid_size(config.image_size)  # it may have been changed after the config was made
        self.embeddings = ViTEmbeddings(config)
        sizes = BlockSizes(config.hidden_size, config.num_attention_heads, config.intermediate_size)
        depth, rate = config.num_hidden_layers, config.drop_path_rate
        self.layers = nn.ModuleList(ViTBlock(config, sizes, rate * i / max(1, depth - 1)) for i in range(depth))
        self.norm = layer_norm(config, config.hidden_size)
        self.pooled = slice(0, 1) if config.pooling == "cls" else slice(1 + config.num_register_tokens, None)
        self.post_init()

    @capture_outputs
    def forward(
        self, pixel_values: Tensor, visible: Tensor | None = None, pooled_only: bool = False, **kwargs
    ) -> BaseModelOutputWithPooling:
        """
        pixel_values (batch, channels, height, width): of any size that the patch divides.
        visible (batch, kept): the patches to look at, counted row by row; all when None.
        pooled_only: the last block serves only the tokens that are pooled, and `last_hidden_state` has no others.
        last_hidden_state (batch, 1 + registers + patches, hidden): the class token comes first.
        """
        x = self.embeddings(pixel_values, visible)
        *first, last = self.layers
        for layer in first:
            x = layer(x, **kwargs)
        x = self.norm(last(x, queries=self.pooled if pooled_only else None, **kwargs))
        return BaseModelOutputWithPooling(x, (x if pooled_only else x[:, self.pooled]).mean(1))


class HfTinyViTForImageClassification(HfTinyViTPreTrainedModel):
    def __init__(self, config: HfTinyViTConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.vit = HfTinyViTModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        num_items_in_batch: Count = None,
        **kwargs,
    ) -> ImageClassifierOutput:
        """labels: the class of each image (batch,), or floats (batch, classes): see `classification_loss`."""
        recorded = kwargs.get("output_hidden_states", self.config.output_hidden_states) or kwargs.get(
            "output_attentions", self.config.output_attentions
        )
        outputs = self.vit(pixel_values, pooled_only=not recorded, return_dict=True, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        loss = None
        if labels is not None:
            smoothing = self.config.label_smoothing
            loss = classification_loss(logits, labels, self.config, num_items_in_batch, smoothing)
        return ImageClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)


@dataclass
class HfTinyViTForMaskedImageModelingOutput(ModelOutput):
    """
    loss: the mean squared error of a masked patch's pixels, summed over masked patches and divided by their count.
    logits (batch, patches, numbers of a patch): the pixels of every patch, with `norm_pix_loss` normalised ones; in
        training only when asked for.
    mask (batch, patches): True where a patch was masked.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    mask: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class MAEDecoder(nn.Module):
    """From the encoder's states of visible patches to pixels."""

    def __init__(self, config: HfTinyViTConfig):
        super().__init__()
        size = config.decoder_hidden_size
        sizes = BlockSizes(size, config.decoder_num_attention_heads, config.decoder_intermediate_size)
        self.embed = nn.Linear(config.hidden_size, size)
        self.mask_token = nn.Embedding(1, size)
        self.positions = GridPositions(config, size)
        self.layers = nn.ModuleList(ViTBlock(config, sizes) for _ in range(config.decoder_num_hidden_layers))
        self.norm = layer_norm(config, size)
        self.out = nn.Linear(size, config.patch_dim)

    def forward(self, x: Tensor, visible: Tensor, masked: Tensor, grid: tuple[int, int], every: bool) -> Tensor:
        """Pixels of the visible (if `every`) and then of the masked patches. They need not stand in the order of the
        picture: only the positions know it."""
        x = self.embed(x)
        positions = self.positions(grid, x)
        prefix = x.shape[1] - visible.shape[1]
        known = x[:, prefix:] + F.embedding(visible, positions)
        hidden = F.embedding(masked, positions) + self.mask_token(masked.new_zeros(1))
        x = torch.cat((x[:, :prefix], known, hidden.to(x.dtype)), 1)
        *first, last = self.layers
        for layer in first:
            x = layer(x)
        return self.out(self.norm(last(x, queries=slice(prefix if every else prefix + visible.shape[1], None))))


class HfTinyViTForMaskedImageModeling(HfTinyViTPreTrainedModel):
    """A masked autoencoder: the encoder sees the visible patches only, and a light decoder guesses the others."""

    def __init__(self, config: HfTinyViTConfig):
        super().__init__(config)
        self.vit = HfTinyViTModel(config)
        self.decoder = MAEDecoder(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        ids_keep: Tensor | None = None,
        num_items_in_batch: Count = None,
        output_logits: bool | None = None,
        **kwargs,
    ) -> HfTinyViTForMaskedImageModelingOutput:
        """
        ids_keep (batch, kept): the visible patches, counted row by row, in any order. Outside training, when None, a fixed
            quarter of them.
        num_items_in_batch: how many masked patches the whole optimiser step has; counted in this batch when None.
        output_logits: whether visible patches get logits too; when None, they do unless in training.
        """
        if ids_keep is None and self.training:
            raise ValueError("Training needs ids_keep, the visible patches: a fixed mask would teach little.")
        patches, grid = patchify(pixel_values, self.config), self.config.grid_size(pixel_values.shape[2:])
        batch, count, _ = patches.shape
        if ids_keep is None:
            ids_keep = fixed_visible(batch, count, patches.device)
        mask = torch.ones(batch, count, dtype=torch.bool, device=patches.device).scatter(1, ids_keep, False)
        masked_first = torch.arange(count, device=patches.device) + count * ~mask
        masked = masked_first.argsort(1)[:, : count - ids_keep.shape[1]]

        outputs = self.vit(pixel_values, ids_keep, return_dict=True, **kwargs)
        every = not self.training if output_logits is None else output_logits
        pixels = self.decoder(outputs.last_hidden_state, ids_keep, masked, grid, every)
        target = take(patches, masked).float()
        if self.config.norm_pix_loss:
            mean, deviation = moments(target)
            target = (target - mean) / deviation
        guessed = pixels[:, pixels.shape[1] - masked.shape[1] :].float()
        loss = F.mse_loss(guessed, target, reduction="sum") / self.config.patch_dim
        loss = loss / count_items(masked, num_items_in_batch)
        logits = take(pixels, torch.cat((ids_keep, masked), dim=1).argsort(1)) if every else None
        return HfTinyViTForMaskedImageModelingOutput(loss, logits, mask, outputs.hidden_states, outputs.attentions)

    @torch.no_grad()
    def reconstruct(self, pixel_values: Tensor, ids_keep: Tensor | None = None) -> Tensor:
        """The pictures with guessed pixels in their masked patches. Those of `norm_pix_loss` get back the mean and the
        deviation of the true patch."""
        outputs = self(pixel_values, ids_keep, output_logits=True, return_dict=True)
        true, guessed = patchify(pixel_values, self.config), outputs.logits.to(pixel_values.dtype)
        if self.config.norm_pix_loss:
            mean, deviation = moments(true)
            guessed = guessed * deviation + mean
        patches = torch.where(outputs.mask[:, :, None], guessed, true)
        return unpatchify(patches, self.config.grid_size(pixel_values.shape[2:]), self.config)
