"""Models that are healthy, as people write them: a smoke run must find nothing in any of them.

From a shell, in `tests/`: `python -m smoke.zoo [NAME …]` walks them and prints the table.
"""

from __future__ import annotations

import importlib.util

FACTORIES = {
    "text": (
        "Gpt masked_apart GptLossFirst GptCheckpointed GptReentrant GptFrozen wrapped compiled_blocks "
        "compiled_in_place compiled_root Llama MixtureModel Recurrent gru Translator Seq2Seq Classifier StateSpace "
        "Adapted Several Odd Hyper Recommender Graph ActorCritic"
    ),
    "images": (
        "ResNet FrozenNorm Averaging Segmenter Vit Masked Mixer Diffusion FlowMatching Vae VqVae Critic OldSpectral "
        "Normed Contrastive Sound Flow Radiance"
    ),
    "structures": (
        "Logs Clip ClipLocal Dino BarlowTwins SyncNorm Balanced Orthogonal Measured ByNumpy CompiledFunctions Mapped "
        "Cast Recomputed Rounded Energy Shared SharedNorm Repeated Hooked MultiTask Supervised Fno Tagger "
        "Velocity Copier"
    ),
    "libraries": (
        "timm_vit timm_resnet timm_convnext timm_regnet timm_efficientnet timm_swin diffusers_unet diffusers_pixart "
        "Autoencoder"
    ),
}
SPECS = {name: f"smoke.zoo.{part}:{name}" for part, names in FACTORIES.items() for name in names.split()}
"""Name → what `--factory` takes."""
CONFIGS = [
    *("GPT2LMHeadModel", "BertForMaskedLM", "RobertaForMaskedLM", "ElectraForMaskedLM", "DistilBertForMaskedLM"),
    *("AlbertForMaskedLM", "BartForConditionalGeneration", "OPTForCausalLM", "GPTNeoXForCausalLM", "FalconForCausalLM"),
    *("PhiForCausalLM", "Gemma2ForCausalLM", "MixtralForCausalLM", "MambaForCausalLM", "ViTForImageClassification"),
    *("BloomForCausalLM", "GPTBigCodeForCausalLM", "Qwen3MoeForCausalLM", "DeiTForImageClassification"),
]
"""Classes of transformers, walked by a config with their own dropout."""
NEEDS = {"timm": "timm", "diff": "diffusers", "Auto": "diffusers"}


def lacks(name):
    """The library that a model needs and that is not installed; None when it can be walked."""
    library = NEEDS.get(name[:4])
    return library if library and importlib.util.find_spec(library) is None else None
