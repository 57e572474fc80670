"""The image processor of models that read grey images."""

from transformers import ViTImageProcessorPil
from transformers.image_utils import ImageType, get_image_type


class HfTinyGreyImageProcessor(ViTImageProcessorPil):
    """ViT's image processor, for one channel: images with colours, as transformers' pipelines load all of them, become
    grey again."""

    image_mean = [0.5]
    image_std = [0.5]

    def process_image(self, image, do_convert_rgb: bool | None = None, input_data_format=None, **kwargs):
        if get_image_type(image) == ImageType.PIL:
            image = (image if image.mode == "L" else image.convert("RGB")).convert("L")
        image = super().process_image(image, do_convert_rgb=False, input_data_format=input_data_format, **kwargs)
        if image.shape[0] == 1:
            return image
        # Pillow's own weights, and for bytes its rounding: equal colours keep their value
        red, green, blue = image[:3]
        grey = (19595.0 * red + 38470.0 * green + 7471.0 * blue)[None] / 65536
        return (grey + 0.5 * (image.dtype == "uint8")).astype(image.dtype)
