"""Models that are healthy, as people write them: a smoke run must find nothing in any of them.

From a shell, in `tests/`: `python -m smoke.zoo [NAME …]` walks them and prints the table.
"""

from __future__ import annotations

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
}
SPECS = {name: f"smoke.zoo.{part}:{name}" for part, names in FACTORIES.items() for name in names.split()}
"""Name → what `--factory` takes."""
