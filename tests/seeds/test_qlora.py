"""4-bit base weights: sharded, trained under adapters, saved with their quant state: bitsandbytes' own bytes."""

from __future__ import annotations

import json

import pytest
import torch
from fsdp2.ranks import run_ranks
from safetensors.torch import load_file, save_file
from seeds import ditty_model as small, guide
from torch.distributed.tensor import DTensor

from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.checkpoint.layout import parse_mesh
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.fsdp2 import Policy, Precision, build_device_mesh, load_checkpoint, save_checkpoint, shard_model
from ckpt_tools.fsdp2.audit import audit
from ckpt_tools.fsdp2.lora import add_lora, base_name, load_adapters
from ckpt_tools.fsdp2.qlora import Quantisation, load_quantised, quantise_linears

pytestmark = pytest.mark.full

BLOCKS = "ResidualBlock,TransformerBlock"
LORA = {"peft_type": "LORA", "r": 4, "target_modules": ["a", "b"], "init_lora_weights": False}
KINDS = {"uint8": (torch.uint8, True), "bfloat16": (torch.bfloat16, True), "single": (torch.uint8, False)}


def quantised(model, kind):
    storage, double = KINDS[kind]
    quantise_linears(model, Quantisation(storage=storage, double_quant=double), skip=["decoder.**"])
    return model


def unsharded(kind):
    """The quantised model on one rank, by bitsandbytes, and its own state dict."""
    model = quantised(small.build(), kind)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    return add_lora(model, LORA), state


def sharded(mesh, kind, param_dtype=None, adapters=True):
    with torch.device("meta"):
        model = small.Ditty()
    quantised(model, kind)
    if adapters:
        model = add_lora(model, LORA)
    shard_model(model, mesh, Policy(precision=Precision(param_dtype=param_dtype)), blocks=BLOCKS)
    return model


def as_bytes(tensor):
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def plain(model):
    """The base's part of a state dict under its plain names, as bytes."""
    return {name: as_bytes(tensor) for key, tensor in model.state_dict().items() if (name := base_name(key))}


def gradients(model):
    return [as_bytes(p.grad).view(torch.float32) for p in model.parameters() if p.requires_grad]


def everything(rank, world_size, directory):
    """All of it on the same ranks: importing bitsandbytes and peft takes longer than the work."""
    (directory / "broken").mkdir(exist_ok=True)
    results = train(rank, world_size, directory)
    guided = by_the_guide(rank, world_size, directory / "model.safetensors")
    return results, guided, refuse(rank, world_size, directory / "broken")


def evaluated(model):
    """The loss in eval mode, in which bitsandbytes would repack weights in place on some CPUs."""
    with torch.no_grad():
        losses = [small.loss_of(model.eval(), step).item() for step in (0, 0)]
    model.train()
    assert losses[0] == losses[1]
    return losses[0]


def train(rank, world_size, directory):
    mesh = build_device_mesh(parse_mesh(f"dp_shard={world_size}"))
    results = {}
    for kind, (storage, _) in KINDS.items():
        reference, own = unsharded(kind)
        expected = [small.loss_of(reference, 0, each) for each in range(world_size)]
        (sum(expected) / world_size).backward()
        if rank == 0:
            save_file(own, directory / f"{kind}.safetensors")
        # In bfloat16 the bytes are gathered as they are, and the rest of the model is cast: its losses differ.
        dtype = storage if storage.is_floating_point else None
        found = {}
        sources = {"full": "model.safetensors", "packed": f"{kind}.safetensors", "saved": kind}
        for source, file in sources.items():
            model = sharded(mesh, kind, dtype)
            torch.distributed.barrier()
            report = load_quantised(model, directory / file)
            loss = small.loss_of(model, 0, rank)
            loss.backward()
            findings = [(finding.code, finding.where) for finding in audit(model, phase="backward")]
            state = plain(model)
            found[source] = {
                "loss": (loss.item(), expected[rank].item()),
                "error": max(
                    ((one - other).norm() / other.norm()).item()
                    for one, other in zip(gradients(model), gradients(reference), strict=True)
                ),
                "same": {name: torch.equal(state[name], as_bytes(tensor)) for name, tensor in own.items()},
                "more": sorted(set(state) - set(own)),
                "local": sum(p.to_local().nbytes for p in model.parameters() if p.dtype == storage),
                "whole": sum(p.nbytes for p in model.parameters() if p.dtype == storage),
                "evaluated": (evaluated(model), evaluated(reference)),
                "missing": report.missing,
                "findings": findings,
            }
            if source == "packed":
                save_checkpoint(model, None, directory / kind)
        if kind == "uint8":
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
            optimizer.step()
            save_checkpoint(model, optimizer, directory / "adapters", trainable_only=True)
            after = small.loss_of(model, 1, rank).item()
            again = sharded(mesh, kind)
            load_quantised(again, directory / "model.safetensors")
            load_adapters(again, directory / "adapters")
            found["resumed"] = after, small.loss_of(again, 1, rank).item()
            found["trained"] = companions(mesh, kind, directory, rank, world_size)
        results[kind] = found
    return results


def companions(mesh, kind, directory, rank, world_size):
    """Losses of three steps, sharded and not."""
    model, (reference, _) = sharded(mesh, kind), unsharded(kind)
    load_quantised(model, directory / "model.safetensors")
    both = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (model, reference)]
    losses = []
    for step in range(3):
        loss, rows = small.loss_of(model, step, rank), [small.loss_of(reference, step, r) for r in range(world_size)]
        loss.backward()
        (sum(rows) / world_size).backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        losses.append((loss.item(), rows[rank].item()))
    return losses


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("qlora")
    save_file(small.build().state_dict(), path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def ran(directory):
    return run_ranks(2, everything, directory, timeout=150)


@pytest.fixture(scope="module")
def trained(ran):
    return [results for results, _, _ in ran]


@pytest.mark.parametrize("source", ["full", "packed", "saved"])
@pytest.mark.parametrize("kind", KINDS)
def test_qlora_sharded_holds_and_computes_what_bitsandbytes_does(trained, kind, source):
    for result in trained:
        found = result[kind][source]
        assert all(found["same"].values()), [name for name, same in found["same"].items() if not same]
        assert found["more"] == []
        assert found["missing"] == ()
        assert found["findings"] == []
        # Two layers in each of four blocks, and the bridge.
        packed = [name for name in found["same"] if name.endswith("quant_state.bitsandbytes__nf4")]
        assert len(packed) == 9
        loss, expected = found["loss"]
        if kind == "bfloat16":
            assert loss == pytest.approx(expected, rel=2e-2)  # everything else in bfloat16: 2^-9 per rounding
        else:
            assert loss == pytest.approx(expected, rel=1e-6)
            assert found["error"] < 1e-5
            assert found["evaluated"][0] == pytest.approx(found["evaluated"][1], rel=1e-6)


def test_qlora_trains_sharded_as_it_does_unsharded(trained):
    for result in trained:
        losses = result["uint8"]["trained"]
        assert len({expected for _, expected in losses}) == 3
        for loss, expected in losses:
            assert loss == pytest.approx(expected, rel=1e-6)


def test_qlora_packed_bytes_are_shared_out(trained):
    for kind in KINDS:
        parts = [result[kind]["saved"]["local"] for result in trained]
        assert sum(parts) == trained[0][kind]["saved"]["whole"]
        assert max(parts) < 0.6 * sum(parts)


def test_qlora_checkpoint_has_scales_in_parts_and_the_rest_once(trained, directory):
    with open_path(str(directory / "uint8")) as opened:
        chunks = {entry.fqn: len(entry.chunks) for entry in opened.checkpoint.tensors}
    name = "model.base_model.model.encoder.0.a.base_layer.weight"
    assert (chunks[name], chunks[f"{name}.absmax"]) == (2, 2)
    rest = ("quant_map", "nested_absmax", "nested_quant_map", "quant_state.bitsandbytes__nf4")
    assert [chunks[f"{name}.{part}"] for part in rest] == [1] * 4


def test_qlora_adapters_resume_over_a_base_that_is_quantised_again(trained, directory):
    for result in trained:
        after, again = result["uint8"]["resumed"]
        assert after == again
    with open_path(str(directory / "adapters")) as opened:
        names = [entry.fqn for entry in opened.checkpoint.tensors if entry.fqn.startswith("model.")]
    # Every `a` and `b`: two in each residual block, one in each transformer block.
    assert len(names) == 2 * (2 * 3 + 2)
    assert all(".lora_A." in name or ".lora_B." in name for name in names)


def by_the_guide(rank, world_size, path):
    names = {"Ditty": small.Ditty, "rank": rank, "world_size": world_size}
    names["weights"] = load_file(path) if rank == 0 else None
    guide.run("fsdp2-cookbook", "accelerate-qlora", names)
    model, optimizer = names["model"], names["optimizer"]
    losses = []
    for _ in range(6):
        loss = small.loss_of(model, 0, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    own = unsharded("bfloat16")[1]
    state = plain(model)
    return losses, set(state) == set(own) and all(torch.equal(state[name], as_bytes(own[name])) for name in own)


def test_qlora_with_the_real_model_on_rank_0_alone(ran):
    for _, (losses, is_same), _ in ran:
        assert is_same
        assert losses[-1] < 0.9 * losses[0]


# What is refused.


def refuse(rank, world_size, directory):
    mesh = build_device_mesh(parse_mesh(f"dp_shard={world_size}"))
    own = unsharded("uint8")[1]
    key = "encoder.0.a.weight.quant_state.bitsandbytes__nf4"
    text = json.loads(bytes(own[key].tolist()))
    told = {}

    def attempt(name, state, kind="uint8", load=load_quantised):
        path = directory / f"{name}.safetensors"
        if rank == 0:
            save_file(state, path)
        torch.distributed.barrier()
        try:
            load(sharded(mesh, kind, adapters=False), path)
        except (UsageError, UnreadableError) as error:
            told[name] = type(error).__name__, error.what
        else:
            told[name] = "nothing", ""

    def with_text(**changes):
        return own | {key: torch.tensor(list(json.dumps(text | changes).encode()), dtype=torch.uint8)}

    attempt("sound", own)
    attempt("one layer without", {name: tensor for name, tensor in own.items() if name != key})
    attempt("no scales", {name: tensor for name, tensor in own.items() if name != "encoder.0.a.weight.absmax"})
    attempt("other shape", with_text(shape=[16, 32]))
    attempt("other dtype", with_text(dtype="load"))
    attempt("infinite offset", with_text(nested_offset=float("inf")))
    attempt("further field", with_text(more=1))
    attempt("no text", own | {key: torch.zeros(8, dtype=torch.uint8)})
    attempt("single for double", own, "single")
    attempt("not by load_quantised", own, load=lambda model, path: load_checkpoint(model, path, strict=False))
    model = sharded(mesh, "bfloat16", torch.float32, adapters=False)
    load_quantised(model, directory.parent / "model.safetensors")
    with pytest.raises(UsageError) as caught:
        small.loss_of(model, 0)
    told["gathered in another dtype"] = "UsageError", caught.value.what
    bare = {name: tensor for name, tensor in own.items() if ".weight." not in name}
    attempt("bytes alone", bare, load=lambda model, path: load_checkpoint(model, path, strict=False))
    model = sharded(mesh, "uint8", adapters=False)
    load_checkpoint(model, directory / "bytes alone.safetensors", strict=False)
    with pytest.raises(UsageError) as caught:
        small.loss_of(model, 0)
    told["forward without it"] = "UsageError", caught.value.what
    return told


@pytest.mark.parametrize(
    ("name", "kind", "what"),
    [
        ("one layer without", "UnreadableError", "8 of 9 layers are quantised in the checkpoint"),
        ("no scales", "UnreadableError", "1 missing: encoder.0.a.weight.absmax"),
        ("other shape", "UnreadableError", "shape is [16, 32] in the quant state, but [32, 16] in the layer"),
        ("other dtype", "UnreadableError", "the quant state says dtype 'load'"),
        ("infinite offset", "UnreadableError", "the quant state says nested_offset inf"),
        ("further field", "UnreadableError", "the quant state does not have the fields blocksize, dtype"),
        ("no text", "UnreadableError", "the quant state is not JSON"),
        ("single for double", "UnreadableError", "the quant state does not have the fields blocksize, dtype"),
        (
            "not by load_quantised",
            "UnreadableError",
            "unexpected quant state of a 4-bit layer: quant_state.bitsandbytes__nf4",
        ),
        ("gathered in another dtype", "UsageError", "stored as torch.bfloat16 but gathered as torch.float32"),
        ("forward without it", "UsageError", "the 4-bit layer has no quant state"),
    ],
)
def test_qlora_checkpoint_that_cannot_be_right_is_refused(ran, name, kind, what):
    for _, _, told in ran:
        assert told[name][0] == kind
        assert what in told[name][1]
    assert ran[0][2]["sound"] == ("nothing", "")


def test_quantise_linears_that_cannot_be_meant_is_refused():
    for skip, what in (("head", "'head' matches no linear layer"), ("**", "no linear layer to quantise")):
        with pytest.raises(UsageError, match=what):
            quantise_linears(small.build(), skip=[skip])
    with pytest.raises(UsageError, match="float64 cannot hold"):
        Quantisation(storage=torch.float64)
    with pytest.raises(UsageError, match="unknown 4-bit type 'int4'"):
        Quantisation(quant_type="int4")
    model = torch.nn.Sequential(torch.nn.Linear(5, 1))
    with pytest.raises(UsageError, match=r"1 × 5 weights of 4 bits cannot be packed into torch\.float32"):
        quantise_linears(model, Quantisation(storage=torch.float32))
