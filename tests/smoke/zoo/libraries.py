"""Models of timm and diffusers, as their users build them; each needs its library."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Timm(nn.Module):
    """An image classifier of timm with its own dropout and stochastic depth."""

    def __init__(self, name, **options):
        super().__init__()
        import timm

        self.model = timm.create_model(name, pretrained=False, num_classes=5, **options)
        self.size = options.get("img_size", 32)

    def example_batch(self, batch_size, seq_len):
        return {"images": torch.randn(batch_size, 3, self.size, self.size), "labels": torch.arange(batch_size)}

    def forward(self, images, labels):
        return functional.cross_entropy(self.model(images), labels)


def timm_vit():
    size = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    return Timm("vit_tiny_patch16_224", drop_rate=0.1, drop_path_rate=0.2, **size)


def timm_resnet():
    return Timm("resnet10t", drop_rate=0.2)


def timm_convnext():
    return Timm("convnext_atto", drop_path_rate=0.2, depths=(1, 1, 2, 1), dims=(8, 16, 32, 64))


def timm_regnet():
    return Timm("regnetx_002")


def timm_efficientnet():
    return Timm("mobilenetv3_small_050", drop_path_rate=0.2)


def timm_swin():
    size = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}
    return Timm("swin_tiny_patch4_window7_224", **size)


class Denoiser(nn.Module):
    """A network of diffusers with a scheduler's noise: the loop of its training examples, in a forward."""

    def __init__(self, network):
        super().__init__()
        from diffusers import DDPMScheduler

        self.network, self.scheduler = network, DDPMScheduler(100)

    def example_batch(self, batch_size, seq_len):
        return {"latents": torch.randn(batch_size, 4, 8, 8), "text": torch.randn(batch_size, 6, 16)}

    def forward(self, latents, text):
        noise, when = torch.randn_like(latents), torch.randint(0, 100, (len(latents),), device=latents.device)
        noisy = self.scheduler.add_noise(latents, noise, when)
        kept = (torch.rand(len(text), 1, 1, device=text.device) > 0.1) * text
        return functional.mse_loss(self.network(noisy, when, kept).sample, noise)


def diffusers_unet():
    from diffusers import UNet2DConditionModel

    blocks = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    size = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4, "attention_head_dim": 4}
    return Denoiser(UNet2DConditionModel(8, cross_attention_dim=16, dropout=0.1, **blocks, **size))


def diffusers_pixart():
    from diffusers import PixArtTransformer2DModel

    class Pixart(PixArtTransformer2DModel):
        def forward(self, noisy, when, text):
            resolution = {"resolution": None, "aspect_ratio": None}
            found = super().forward(noisy, text, when, added_cond_kwargs=resolution)
            found.sample = found.sample.chunk(2, 1)[0]
            return found

    size = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "patch_size": 2}
    return Denoiser(
        Pixart(in_channels=4, out_channels=8, cross_attention_dim=16, caption_channels=16, dropout=0.1, **size)
    )


class Autoencoder(nn.Module):
    """diffusers' AutoencoderKL: samples its latents, returns reconstruction and loss."""

    def __init__(self):
        super().__init__()
        from diffusers import AutoencoderKL

        self.model = AutoencoderKL(
            block_out_channels=(8, 16),
            norm_num_groups=4,
            latent_channels=4,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
        )

    def example_batch(self, batch_size, seq_len):
        return {"images": torch.randn(batch_size, 3, 16, 16)}

    def forward(self, images):
        posterior = self.model.encode(images).latent_dist
        found = self.model.decode(posterior.sample()).sample
        return found, functional.mse_loss(found, images) + 1e-3 * posterior.kl().mean()
