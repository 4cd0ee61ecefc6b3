"""The verdict is about effect: what `check-lora` says of a file, beside what the loader really makes of it.

A file is a trainer's spelling of one adapter, of rank 4 and alpha 8: the factors, and a place for the scale. diffusers
loads it into its own model; ComfyUI's map and maths are those of `comfyui_keys`. The effect is what was added, divided
by what was trained: "raises", "nothing", "part", or one number for all modules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from adapters.comfyui_keys import patched
from adapters.image_models import ALL, OF_DIFFUSERS, adapter, delta, linears, lora, to_target
from adapters.test_diffusers import MIXIN, load
from adapters.test_names import key_map, native_weights
from names.keymaps import backward
from safetensors.torch import save_file
from torch import nn

from ckpt_tools import api
from ckpt_tools.adapters.adapter import AdapterModule
from ckpt_tools.adapters.check import check_lora
from ckpt_tools.adapters.ecosystems.loader_report import LoaderReport
from ckpt_tools.errors import CkptError, UsageError

Tensors = dict[str, torch.Tensor]
Modules = list[AdapterModule[torch.Tensor]]
Trained = tuple[Tensors, dict[str, str]]  # What a trainer writes: tensors and header
RANK, ALPHA = 4, 8.0
WIDTHS = {"flux1": "single", "chroma": "single", "lumina2": "", "hunyuan_video": "single"}
"""diffusers' conversions of these have the published widths written in, for modules with this in their names."""
COMFYUI = ("flux1", "flux2", "sd3", "qwen_image")


def component(name: str) -> str:
    return "unet" if name.startswith("sd") and name != "sd3" else "transformer"


def trained(name: str, **options: object) -> Modules:
    torch.manual_seed(0)
    paths = {path: shape for path, shape in linears(ALL[name][1]()).items() if _is_trained(path)}
    options = {"rank": RANK, "alpha": ALPHA} | options
    return [lora(path, shape, **options) for path, shape in paths.items()]


def _is_trained(path: str) -> bool:
    """Is it a layer of a block? Of SDXL's hundreds, those of two resolutions. Grouped kernels have other factors."""
    is_large = path.startswith(("down_blocks.2", "up_blocks.1"))
    return ("block" in path or path.startswith("layers")) and not (is_large or path.endswith(".conv_depth"))


def factors(modules: Modules, prefix: str, *, down: str = "lora_A", up: str = "lora_B", flat: bool = False) -> Tensors:
    found = {}
    for module in modules:
        path = prefix + (module.path.replace(".", "_") if flat else module.path)
        found |= {f"{path}.{down}.weight": module.factors["A"], f"{path}.{up}.weight": module.factors["B"]}
    return found


def alphas(tensors: Tensors, value: float = ALPHA) -> Tensors:
    ends = (".lora_down.weight", ".lora_A.weight")
    modules = [name.removesuffix(end) for name in tensors for end in ends if name.endswith(end)]
    return {f"{module}.alpha": torch.tensor(value) for module in modules}


def header(name: str, modules: Modules, **settings: object) -> dict[str, str]:
    config = {"r": RANK, "lora_alpha": ALPHA, "target_modules": [module.path for module in modules], **settings}
    document = {f"{component(name)}.{key}": value for key, value in config.items()}
    return {"format": "pt", "lora_adapter_metadata": json.dumps(document)}


def with_alphas(tensors: Tensors) -> Tensors:
    return tensors | alphas(tensors)


def exported(name: str, modules: Modules, target: str) -> Tensors:
    return dict(to_target(adapter(modules), target, architecture=ALL[name][0]).tensors)


def simpletuner(name: str, modules: Modules) -> Trained:
    return factors(modules, f"{component(name)}."), header(name, modules)


def of_onetrainer(name: str, modules: Modules) -> Tensors:
    prefix = "lora_unet_" if component(name) == "unet" else "lora_transformer_"
    return with_alphas(factors(modules, prefix, down="lora_down", up="lora_up", flat=True))


def patterns(name: str, modules: Modules) -> Trained:
    first = modules[0].path
    return factors(modules, f"{component(name)}."), header(name, modules, alpha_pattern={first: ALPHA / 2})


SPELLINGS: Mapping[str, Callable[[str, Modules], Trained]] = {
    "diffusers, header": simpletuner,
    "diffusers, rsLoRA": lambda n, m: (factors(m, f"{component(n)}."), header(n, m, use_rslora=True)),
    "diffusers, alpha_pattern": patterns,
    "diffusers, wrong rank": lambda n, m: (factors(m, f"{component(n)}."), header(n, m, r=RANK * 2)),
    "diffusers, no alpha": lambda n, m: (factors(m, f"{component(n)}."), {}),
    "diffusers, header lora_alpha": lambda n, m: (factors(m, f"{component(n)}."), {"lora_alpha": "8"}),
    "diffusers, header network_alpha": lambda n, m: (factors(m, f"{component(n)}."), {"network_alpha": "8"}),
    "diffusers, header transformer.lora_alpha": lambda n, m: (
        factors(m, f"{component(n)}."), {f"{component(n)}.lora_alpha": "8"},
    ),
    "diffusers, alphas": lambda n, m: (with_alphas(factors(m, f"{component(n)}.")), {}),
    "diffusers, alphas and header": lambda n, m: (with_alphas(factors(m, f"{component(n)}.")), header(n, m)),
    "diffusers, half of the alphas": lambda n, m: (
        factors(m, f"{component(n)}.") | alphas(factors(m[::2], f"{component(n)}.")), {},
    ),
    "OneTrainer, dots": lambda n, m: (
        with_alphas(factors(m, f"{component(n)}.", down="lora_down", up="lora_up")), {},
    ),
    "OneTrainer, bare": lambda n, m: (with_alphas(factors(m, "", down="lora_down", up="lora_up")), {}),
    "OneTrainer, legacy": lambda n, m: (of_onetrainer(n, m), {}),
    "OneTrainer, legacy, attention": lambda n, m: (of_onetrainer(n, [x for x in m if ".attn" in x.path]), {}),
    "DiffSynth": lambda n, m: (factors(m, "", down="lora_A.default", up="lora_B.default"), {}),
    "PEFT's root": lambda n, m: (factors(m, "base_model.model."), {}),
    "kohya": lambda n, m: (exported(n, m, "kohya"), {"ss_network_alpha": "8.0"}),
    "kohya, alpha in the header": lambda n, m: (
        {k: v for k, v in exported(n, m, "kohya").items() if not k.endswith(".alpha")}, {"ss_network_alpha": "8.0"},
    ),
    "ComfyUI": lambda n, m: (exported(n, m, "comfyui"), {}),
    "ComfyUI, bare": lambda n, m: (
        {key.removeprefix("diffusion_model."): tensor for key, tensor in exported(n, m, "comfyui").items()}, {},
    ),
}  # fmt: skip


def meant(spelling: str, modules: Modules) -> dict[str, float]:
    """Module → the scale that was meant."""
    scales = {module.path: ALPHA / RANK for module in modules}
    if spelling == "diffusers, rsLoRA":
        return dict.fromkeys(scales, ALPHA / RANK**0.5)
    if spelling == "diffusers, alpha_pattern":
        return scales | {modules[0].path: ALPHA / 2 / RANK}
    if spelling == "diffusers, half of the alphas":
        return scales | {module.path: 1.0 for module in modules[1::2]}
    no_alpha = ("diffusers, no alpha", "DiffSynth", "PEFT's root")
    return dict.fromkeys(scales, 1.0) if spelling in no_alpha else scales


def in_diffusers(name: str, file: Path, model: nn.Module) -> dict[str, torch.Tensor] | None:
    """What diffusers adds, by module; None when it raises."""
    try:
        load(name, file, file_name=file.name, **{component(name): model})
    except Exception:  # whatever it raises: the question is whether it does
        return None
    added = {}
    for path, module in model.named_modules():
        for adapter_name in getattr(module, "lora_A", {}):
            added[path] = module.get_delta_weight(adapter_name).detach().double()
    return added


def in_comfyui(name: str, tensors: Tensors, model: nn.Module, modules: Modules) -> dict[str, torch.Tensor]:
    """What ComfyUI adds, under diffusers' names."""

    native = {key: tensor.double() for key, tensor in native_weights(name, model).items()}
    after, _ = patched(name, native, {key: tensor.double() for key, tensor in tensors.items()})
    back = backward(key_map(name), {key: after[key] - native[key] for key in native}, dict(model.config))
    paths = [module.path for module in modules]
    return {path: back[f"{path}.weight"] for path in paths if back[f"{path}.weight"].abs().max() > 1e-9}


Effect = str | float


def effect_of(added: Mapping[str, torch.Tensor] | None, modules: Modules, scales: Mapping[str, float]) -> Effect:
    """What a loader did: to all modules alike, or in a word."""
    if added is None:
        return "raises"
    if not added:
        return "nothing"
    if {*added} != {module.path for module in modules}:
        return "part"
    found = []
    for module in modules:
        want = scales[module.path] * (delta(module) / (module.alpha.value / RANK)).flatten(1)
        got = added[module.path].flatten(1)
        factor = float((got * want).sum() / (want * want).sum())
        if (got - factor * want).abs().max() > 1e-5 * got.abs().max():
            return "other numbers"
        found.append(factor)
    return max(found, key=lambda factor: abs(factor - 1))


def said(report: LoaderReport) -> Effect:
    if report.loads is None:
        return "not known"
    if not report.loads:
        return "raises"
    if not report.changes:
        return "nothing"
    ignoring = {"loader-ignores", "loader-incomplete"}
    codes = {finding.code for finding in report.findings if finding.severity == "error"}
    if codes & ignoring and report.unmatched and not all(each.endswith(".alpha") for each in report.unmatched):
        return "part"
    return report.factor if report.factor is not None else "not known"


def agrees(one: Effect, other: Effect) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-4 * abs(other)
    return one == other


def files(name: str, directory: Path) -> Iterator[tuple[str, Modules, Path, Tensors]]:
    """Every spelling of a family that its trainers have."""
    for spelling, make in SPELLINGS.items():
        modules = trained(name)
        if name in WIDTHS and spelling.startswith(("kohya", "ComfyUI")):
            modules = [module for module in modules if WIDTHS[name] not in module.path]
        if spelling.endswith("attention"):
            modules = [module for module in modules if ".attn" in module.path]
        try:
            tensors, metadata = make(name, modules) if modules else ({}, {})
        except UsageError:  # a family without such names
            continue
        if tensors:
            file = directory / f"{spelling.replace(', ', '-').replace(' ', '-')}.safetensors"
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file, metadata=metadata)
            yield spelling, modules, file, tensors


@pytest.mark.full(but=["sd3", "qwen_image"])
@pytest.mark.parametrize("name", MIXIN)
def test_verdict_is_the_effect(name: str, tmp_path: Path) -> None:
    """What diffusers and ComfyUI do with 14 to 21 spellings of the family: some 500 answers in all."""
    family, make = ALL[name]
    wrong, count = [], 0
    for spelling, modules, file, tensors in files(name, tmp_path):
        reports = check_lora(file, architecture=family, loaders=["diffusers", "comfyui"]).loaders
        loaded = [in_diffusers(name, file, make())]
        loaded += [in_comfyui(name, tensors, make(), modules)] if name in COMFYUI else []
        for report, added in zip(reports, loaded, strict=False):
            real = effect_of(added, modules, meant(spelling, modules))
            count += 1
            if report.loads is None and name in OF_DIFFUSERS:
                continue  # names that other tools may have for these
            is_ok = report.is_whole == (isinstance(real, float) and abs(real - 1) < 1e-4)
            if not (is_ok and agrees(said(report), real)):
                wrong.append((spelling, report.loader, real, said(report), report.findings))
    assert not wrong
    assert count >= 14


def test_every_place_of_the_scale_counts(tmp_path: Path) -> None:
    """The example of the trackers: alpha stands in diffusers' header, and ComfyUI does not read it."""
    tensors, metadata = simpletuner("flux1", trained("flux1"))
    file = tmp_path / "style.safetensors"
    save_file(tensors, file, metadata=metadata)
    result = check_lora(file, architecture="flux1", loaders=["comfyui"])
    (finding,) = result.findings
    assert (result.verdict, finding.code) == ("fails", "loader-misreads")
    assert "0.5 times the trained change: alpha is 8 (header lora_adapter_metadata) for rank 4" in finding.what
    (document,) = result.to_dict()["loaders"]
    assert (document["loader"], document["factor"]) == ("comfyui", 0.5)
    api.export_lora(file, tmp_path / "out", to="comfyui", architecture="flux1")
    mended = check_lora(next((tmp_path / "out").glob("*.safetensors")), architecture="flux1", loaders=["comfyui"])
    assert (mended.verdict, mended.loaders[0].factor) == ("loads", 1.0)


# Damages: of each, ComfyUI or diffusers makes something else than was trained, or nothing.

KOHYA, HEADER = "kohya", "diffusers, header"


def lost(*ends: str, every: int = 1) -> Callable[[Tensors, dict[str, str]], None]:
    def damage(tensors: Tensors, _: dict[str, str]) -> None:
        for name in [name for name in tensors if name.endswith(ends)][::every]:
            del tensors[name]

    return damage


def changed(end: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors, dict[str, str]], None]:
    def damage(tensors: Tensors, _: dict[str, str]) -> None:
        tensors.update({name: make(tensor) for name, tensor in tensors.items() if name.endswith(end)})

    return damage


def said_in_header(**settings: object) -> Callable[[Tensors, dict[str, str]], None]:
    def damage(_: Tensors, metadata: dict[str, str]) -> None:
        document = json.loads(metadata["lora_adapter_metadata"])
        document |= {f"transformer.{key}": value for key, value in settings.items()}
        metadata["lora_adapter_metadata"] = json.dumps(document)

    return damage


def renamed(old: str, new: str) -> Callable[[Tensors, dict[str, str]], None]:
    def damage(tensors: Tensors, _: dict[str, str]) -> None:
        moved = {name: tensors.pop(name) for name in list(tensors) if old in name}
        tensors.update({name.replace(old, new): tensor for name, tensor in moved.items()})

    return damage


def exchanged(one: str, other: str) -> Callable[[Tensors, dict[str, str]], None]:
    def damage(tensors: Tensors, _: dict[str, str]) -> None:
        names = {name: name.replace(one, "\0").replace(other, one).replace("\0", other) for name in tensors}
        moved = {names[name]: tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(moved)

    return damage


def header_of(key: str, value: str) -> Callable[[Tensors, dict[str, str]], None]:
    return lambda _, metadata: metadata.update({key: value})


DAMAGES = {
    "alphas doubled": (KOHYA, changed(".alpha", lambda tensor: tensor * 2)),
    "alphas negative": (KOHYA, changed(".alpha", lambda tensor: -tensor)),
    "alphas 0": (KOHYA, changed(".alpha", lambda tensor: tensor * 0)),
    "alphas not numbers": (KOHYA, changed(".alpha", lambda tensor: tensor * float("nan"))),
    "half of the alphas lost": (KOHYA, lost(".alpha", every=2)),
    "half of the alphas lost, without a header": ("ComfyUI", lost(".alpha", every=2)),
    "all alphas lost": (KOHYA, lost(".alpha")),
    "another network_alpha": (KOHYA, header_of("ss_network_alpha", "16")),
    "a second alpha in the header": (KOHYA, header_of("lora_alpha", "32")),
    "an alpha in the header that is no number": ("diffusers, no alpha", header_of("lora_alpha", "x")),
    "an infinite alpha in the header": ("diffusers, no alpha", header_of("network_alpha", "1e400")),
    "half of the ups lost": (KOHYA, lost(".lora_up.weight", every=2)),
    "half of the downs lost": (KOHYA, lost(".lora_down.weight", every=2)),
    "ups and downs exchanged": (KOHYA, exchanged("lora_up", "lora_down")),
    "blocks that the model lacks": (KOHYA, renamed("blocks_1_", "blocks_40_")),
    "attention and MLP exchanged": (KOHYA, exchanged("x_block_attn_qkv", "x_block_mlp_fc1")),
    "image and text of a layer exchanged, wider": (KOHYA, exchanged("context_block_mlp_fc1", "x_block_attn_proj")),
    "header of another rank": (HEADER, said_in_header(r=RANK * 2)),
    "alpha 0 in the header": (HEADER, said_in_header(lora_alpha=0)),
    "header of another model": (HEADER, header_of("lora_adapter_metadata", '{"unet.r": 4, "unet.lora_alpha": 8}')),
    "header that is cut off": (HEADER, header_of("lora_adapter_metadata", '{"transformer.r": 4, "transfor')),
    "names of another family": (HEADER, renamed("transformer_blocks", "double_stream_blocks")),
    "prefix of another component": (HEADER, renamed("transformer.", "unet.")),
    "ranks that disagree": (HEADER, changed("1.attn.to_q.lora_A.weight", lambda tensor: tensor[:2])),
    "a factor of zeros": (HEADER, changed("0.attn.to_q.lora_A.weight", torch.zeros_like)),
    "a factor that is infinite": (HEADER, changed("0.attn.to_q.lora_B.weight", lambda t: t * float("inf"))),
}  # fmt: skip


@pytest.fixture(scope="module")
def sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sd3")
    ALL["sd3"][1]().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("damage", DAMAGES)
def test_no_damage_is_called_whole(damage: str, sd3: Path, tmp_path: Path) -> None:
    spelling, make = DAMAGES[damage]
    tensors, metadata = SPELLINGS[spelling]("sd3", trained("sd3"))
    file = tmp_path / "style.safetensors"
    loader = "diffusers" if spelling == HEADER else "comfyui"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata=metadata)
    assert check_lora(file, base=sd3, loaders=[loader]).verdict == "loads"
    make(tensors, metadata)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata=metadata)
    assert verdict_of(file, sd3, loader) != "loads"


@pytest.mark.parametrize("said", ["Dynamic", "None", ""])
def test_header_without_a_number_says_nothing_against_alphas(said: str, sd3: Path, tmp_path: Path) -> None:
    """As sd-scripts' own resizing writes it: the tensors tell."""
    tensors, _ = SPELLINGS[KOHYA]("sd3", trained("sd3"))
    save_file(tensors, tmp_path / "a.safetensors", metadata={"ss_network_alpha": said})
    assert verdict_of(tmp_path / "a.safetensors", sd3, "comfyui") == "loads"


def verdict_of(file: Path, base: Path, loader: str) -> str:
    try:
        return check_lora(file, base=base, loaders=[loader]).verdict
    except CkptError:
        return "no adapter"
