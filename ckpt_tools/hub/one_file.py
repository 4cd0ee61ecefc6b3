"""One image LoRA as the directory that `push` takes: its file, copies for other programs, and what the card is told."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ckpt_tools.adapters.architectures import ARCHITECTURES, candidates
from ckpt_tools.adapters.architectures.choose import choose_families
from ckpt_tools.adapters.read.opening import read_adapter
from ckpt_tools.adapters.read.sidecars import MODEL_FAMILY
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.hub.card import CardFacts, LoadFacts
from ckpt_tools.hub.check import DIFFUSERS_LORA, SINGLE_FILES
from ckpt_tools.hub.facts import BASE_KEYS, base_model_of, tag_of
from ckpt_tools.hub.training import ai_toolkit_config, training_of, value_at
from ckpt_tools.options import refuse_other
from ckpt_tools.storage.source import LocalSource
from ckpt_tools.text import escape_name

_TARGETS = ("comfyui", "diffusers", "kohya")  # Whose adapters are one file


@contextmanager
def staged(path: str, asked: CardFacts, also: Sequence[str]) -> Iterator[tuple[str, CardFacts, list[str]]]:
    """Lend the directory to push, what is known beside its files, and notes; errors in it name the user's own file."""
    from ckpt_tools.adapters.export import export_lora

    (place, name), (held, real) = os.path.split(os.path.abspath(path)), os.path.split(os.path.realpath(path))
    copies, notes, stem = (
        dict[str, str](),
        list[str](),
        re.sub(r"[^\w.-]", "_", os.path.splitext(name)[0], flags=re.ASCII),
    )
    with LocalSource(held) as source, tempfile.TemporaryDirectory(prefix="ckpt-push-") as aside:
        (facts, family), directory = _facts(path, place, asked), os.path.join(aside, "repository")
        os.mkdir(directory)
        source.size(real)
        shutil.copyfile(path, os.path.join(directory, name))
        source.check_unchanged()
        try:
            for target in dict.fromkeys(re.findall(r"[^,\s]+", ",".join(also))):
                refuse_other(target, _TARGETS, "a program that one file can be written for", "--also")
                own = DIFFUSERS_LORA if target == "diffusers" else f"{stem}_{target}.safetensors"
                if own == name:
                    raise UsageError(f"--also {target} writes {own}, and so is the file called", where=path)
                result = export_lora(path, os.path.join(aside, target), to=target, architecture=family)
                notes += [f"{own}: {each}" for each in (*(f.what for f in result.findings), *result.conversion.notes)]
                if not result.ok:
                    raise UsageError(notes[-1], where=path)
                written, _ = result.conversion.files[0]
                os.replace(os.path.join(aside, target, written), os.path.join(directory, own))
                copies[target] = own
            yield directory, replace(facts, load=LoadFacts(weight_name=name, files=copies)), notes
        except CkptError as error:
            error.where = error.where and error.where.replace(directory, place)
            if "--architecture" in (error.hint or ""):
                error.hint = f"name its base (--base-model), or write each copy: ckpt export-lora {path} DIR"
            raise


def complete(about: CardFacts, found: CardFacts) -> CardFacts:
    """Return what is known beside the files together with what they tell."""
    if about.load is None:
        return found
    load, files = found.load or LoadFacts(is_adapter=True), about.load.files
    load = replace(load, files=files, loaders=tuple(dict.fromkeys((*load.loaders, *files))))
    library = "diffusers" if "diffusers" in files else found.library
    return replace(about.or_else(found), library=library, load=load, notes=about.notes)


def _facts(path: str, root: str, asked: CardFacts) -> tuple[CardFacts, str | None]:
    """Return what the header and the trainer's config tell, notes about all that stays open, and the model family."""
    with read_adapter(path, as_part=True) as read:
        header, names = read.opened.metadata, choose_families(read.adapter, base=None)
    if read.adapter.convention not in SINGLE_FILES or names == ("llm",):
        hint = f"push a directory: ckpt export-lora {path} DIR writes one"
        raise UsageError("only a LoRA of an image or video model can be pushed as one file", where=path, hint=hint)
    config = ai_toolkit_config(root)
    named = (*map(header.get, BASE_KEYS), value_at(config, "model.name_or_path"))
    texts = [text for text in named if isinstance(text, str) and text]
    its = next((base for text in texts if (base := base_model_of(text, root=root)[0])), None)
    said, base = header.get("modelspec.trigger_phrase") or value_at(config, "trigger_word"), asked.base_model or its
    words, possible = said if isinstance(said, str) else None, candidates([each.path for each in read.adapter.modules])
    if len(names) != 1:  # of models that share these names the base tells which
        names = tuple(name for name in possible if base in ARCHITECTURES[name].bases) or names
    families = [ARCHITECTURES[name] for name in names]
    bases = {base: licence for family in families for base, licence in family.bases.items()}
    tags, title = [tag_of(family.title) for family in families], " or ".join(family.title for family in families)
    notes = [f"{title or 'model family not known'}: {read.adapter.convention} names"]
    stated = {f"header {key}": re.sub(r"_v?|/.*", "", header[key]) for key in MODEL_FAMILY if key in header}
    for origin, text in (stated | {"base model": (base or "").rpartition("/")[2]}).items():
        if tags and tag_of(text) not in (None, *tags):
            what = f"{origin} is {escape_name(text)}, but the modules are those of {title}"
            if base is None:
                raise UsageError(what, where=path, hint="if the header is wrong, name the base: --base-model ORG/NAME")
            notes.append(what)
    if its not in (None, base):
        notes.append(f"the file names {its} as its base, --base-model {base}")
    kind, _, own = bases.get(base or "", "").partition(" ")
    option = f"--license {kind or 'NAME'}" + f" --license-name {own} --license-link URL" * bool(own)
    option += f"; what the license of {base} ({own or kind or 'see its card'}) allows is your decision" * bool(base)
    missing = {
        "base model": (base, "--base-model ORG/NAME" + f", for instance {', '.join(bases)}" * bool(bases)),
        "trigger words": (asked.instance_prompt or words, "--instance-prompt TEXT"),
        "license": (asked.license or asked.license_name or asked.license_link, option),
    }
    notes += [f"{what}: not known, and not on the card; {hint}" for what, (value, hint) in missing.items() if not value]
    facts = CardFacts(base_model=its, instance_prompt=words, training=training_of(path), notes=tuple(notes))
    return facts, names[0] if len(names) == 1 else None
