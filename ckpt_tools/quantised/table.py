"""Every scheme of quantisation that ckpt decodes, by the `quant_method` of config.json."""

from __future__ import annotations

from ckpt_tools.quantised import awq, bnb, comfyui, compressed, fp8, gptq, modelopt, mxfp4, torchao
from ckpt_tools.quantised.scheme import Scheme

SCHEMES: tuple[Scheme, ...] = (
    *(fp8.SCHEME, mxfp4.SCHEME, bnb.SCHEME, compressed.SCHEME),
    *(gptq.SCHEME, gptq.AUTO_ROUND, awq.SCHEME, modelopt.SCHEME, torchao.SCHEME, comfyui.SCHEME),
)


def find_scheme(method: object) -> Scheme | None:
    """Return the scheme of a `quant_method`; None for one that is not known."""
    return next((scheme for scheme in SCHEMES if scheme.method == method), None)
