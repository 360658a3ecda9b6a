"""An ensemble as one program: the clients as branches, and the weighted mean of their outputs."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedmerge.architecture.model_code import ModelCode, outputs_of, tensors_in
from fedmerge.architecture.tensor_names import load_checkpoint
from fedmerge.checkpoint import (
    Checkpoint,
    from_state_dict,
    open_checkpoint,
    values_digest,
    write_program,
)
from fedmerge.errors import ArchitectureError, CheckpointError, UsageError
from fedmerge.merging.averages import Averaging
from fedmerge.merging.client_modules import ClientModules
from fedmerge.merging.merge_record import MergeRecord
from fedmerge.merging.onnx_export import TOLERANCE, exported
from fedmerge.merging.output_differences import relative_difference
from fedmerge.merging.quality import IMAGE_AXES, ensemble_weights
from fedmerge.merging.result import Merge
from fedmerge.merging.session import Session
from fedmerge.values.clients import Client

_STATE_DICT = "let the output end in .pt: one net that holds all clients, at a higher cost"
_MEMBER = re.compile(r"members\.(\d+)\.(.+)")
_WEIGHTS = "weights"
_OPTIONAL = "num_batches_tracked"  # which old files do without
_ROUNDING = 1e-6  # of weights in single precision


class Branches(nn.Module):
    """Runs every member and returns the mean of their outputs; the weights sum to 1."""

    weights: Tensor  # (members, …), as the outputs are broadcast

    def __init__(self, members: Sequence[nn.Module], weights: Tensor) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.register_buffer(_WEIGHTS, weights, persistent=False)

    def forward(self, *inputs: Any) -> Tensor:
        """Return Σ ω_j f_j(inputs) of the members j."""
        parts = []
        for number, member in enumerate(self.members):
            (own,) = tensors_in(member(*inputs))
            parts.append(self.weights[number] * own)
        return torch.stack(parts).sum(0)


def branched(session: Session) -> Merge:
    """Return a session's clients side by side as branches: nothing is matched or placed."""
    if not session.can_run:
        raise UsageError(
            "a program holds clients as they are run, and files alone can't be run",
            f"give the model's code with `model`; or {_STATE_DICT}",
        )
    if session.options.dtype is not None:
        raise UsageError("`dtype`: a program holds the clients' numbers as they are run")
    return Merge(
        session=session,
        widths={},
        placements=[{} for _ in session.clients],
        groups=(),
        width_limit=None,
        warnings=session.warnings,
        is_program=True,
    )


def write_branches(merge: Merge, path: Path, *, force: bool) -> Merge:
    """Write a merge of branches as an exported program, and its record beside it.

    What is returned also warns of a program that runs on batches of one size only.
    """
    modules = ClientModules(replace(merge.session, device="cpu"))
    inputs = modules.sample_inputs()
    each = [outputs_of(model, inputs) for model in modules.clients]
    weights = _branch_weights(merge.session.averaging, _only(each[0]))
    expected = (weights * torch.stack([own[0] for own in each])).sum(0)
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "model.pt2"
        branches = Branches(modules.clients, weights).eval()
        run, any_batch = exported(branches, inputs, draft, format="pt2", takes_list=True)
        difference = relative_difference([expected], run(inputs))
        if not difference <= TOLERANCE:
            raise ArchitectureError(
                f"the program's outputs differ from the clients' mean by {difference:.2g}",
                _STATE_DICT,
            )
        if not any_batch:
            way = "" if merge.session.model is not None else " (with `model` perhaps on any)"
            warning = f"the program runs on batches of {len(inputs[0])} samples only{way}"
            merge = replace(merge, warnings=(*merge.warnings, warning))
        written = open_checkpoint(draft)
        digests = {name: written.tensor_digest(name) for name in written.tensors}
        write_program(path, draft.read_bytes(), merge.record(digests), force=force)
    return merge


def _only(outputs: Sequence[Tensor]) -> Tensor:
    """Return the one tensor of a model's outputs, of which a mean can be had."""
    floats = [tensor for tensor in outputs if tensor.is_floating_point() and tensor.dim()]
    if len(outputs) != 1 or not floats:
        raise ArchitectureError(
            f"the model returns {len(outputs)} tensors, {len(floats)} of them numbers per sample: "
            "an ensemble's program is the mean of one",
            _STATE_DICT,
        )
    return floats[0]


def _branch_weights(averaging: Averaging, output: Tensor) -> Tensor:
    """Return what each member counts for each output, as the outputs are broadcast."""
    axis = 1 if output.dim() >= IMAGE_AXES else output.dim() - 1
    count = output.shape[axis] if output.dim() > 1 else 1
    members = range(len(averaging.client_weights))
    each = torch.stack(ensemble_weights(averaging, members, count)).double()
    shape = [1] * output.dim()
    shape[axis] = count
    return (each / each.sum(0)).to(output.dtype).reshape(len(each), *shape)


def member_count(checkpoint: Checkpoint) -> int:
    """Return how many clients an ensemble's program holds; 0 for any other file."""
    if checkpoint.program is None or _WEIGHTS not in checkpoint.program.constants:
        return 0
    found = [_MEMBER.fullmatch(name) for name in checkpoint.tensors]
    numbers = {int(name[1]) for name in found if name is not None}
    return len(numbers) if None not in found and numbers == set(range(len(numbers))) else 0


def load_branches(code: ModelCode, checkpoint: Checkpoint) -> nn.Module:
    """Return an ensemble's program as the user's own models, of which the file has the tensors."""
    members = [
        from_state_dict(
            {name: checkpoint.read_torch(own) for name, own in names.items()},
            name=checkpoint.name,
        )
        for names in _members(checkpoint)
    ]
    return Branches([load_checkpoint(code.build, own) for own in members], _weights_of(checkpoint))


def _members(checkpoint: Checkpoint) -> list[dict[str, str]]:
    """Return the names of every member's tensors, and what the file calls them."""
    members: list[dict[str, str]] = [{} for _ in range(member_count(checkpoint))]
    for name in checkpoint.tensors:
        found = _MEMBER.fullmatch(name)
        assert found is not None
        members[int(found[1])][found[2]] = name
    return members


def _weights_of(checkpoint: Checkpoint) -> Tensor:
    assert checkpoint.program is not None
    stored = checkpoint.program.constants[_WEIGHTS]
    if stored is None or stored.problem:
        raise CheckpointError(f"{checkpoint.name}: its program has no weights of its members")
    weights: Tensor = stored.load()
    if len(weights) != member_count(checkpoint):
        raise CheckpointError(f"{checkpoint.name}: its program has weights of other members")
    return weights


def client_differences(
    checkpoint: Checkpoint, record: MergeRecord, session: Session
) -> Iterator[str]:
    """Yield every tensor and weight of an ensemble's program that is not its clients'."""
    members = _members(checkpoint)
    if len(members) != len(session.clients):
        yield f"the program has {len(members)} members, the record {len(session.clients)} clients"
        return
    for client, member in zip(session.aligned, members, strict=True):
        yield from _member_differences(checkpoint, session, client, member)
    stored = _weights_of(checkpoint)
    shape = [axis for axis in stored.shape[1:] if axis > 1] or [1]
    expected = torch.stack(
        ensemble_weights(session.averaging, range(len(members)), shape[0])
    ).double()
    expected = (expected / expected.sum(0)).reshape(len(members), -1)
    if not torch.allclose(stored.double().reshape(len(members), -1), expected, atol=_ROUNDING):
        yield "the members' weights are not those of the recorded options"
    if record.parameters != session.ensemble_parameters:
        yield "the recorded parameters are not those of the clients"


def _member_differences(
    checkpoint: Checkpoint, session: Session, client: Client, member: Mapping[str, str]
) -> Iterator[str]:
    first = session.aligned[0]
    names = _paired(session.clients[0], member)
    if names is None:
        yield f"{client.name}'s tensors are not those of a member"
        return
    for name, stored in names.items():
        source = client if name in client.tensors else first
        values = source.read(source.aliases.get(name, name))
        dtype = checkpoint.tensors[stored].dtype
        if values_digest(values, dtype) != checkpoint.tensor_digest(stored):
            yield f"tensor '{stored}' is not {client.name}'s '{name}'"


def _paired(first: Checkpoint, member: Mapping[str, str]) -> dict[str, str] | None:
    """Return the file's name of every tensor of a client: the same, prefixed, or by order."""
    needed = [own for own in member if own.rpartition(".")[2] != _OPTIONAL]
    written = {name: first.output_name(name) for name in first.tensors}
    for names in (written, {name: name for name in first.tensors}):
        if set(needed) <= set(names.values()) <= set(member):
            return {name: member[own] for name, own in names.items()}
    in_order = list(member) if len(member) == len(first.tensors) else needed
    if len(in_order) != len(first.tensors):
        return None
    return {name: member[own] for name, own in zip(first.tensors, in_order, strict=True)}


def output_differences(checkpoint: Checkpoint, session: Session) -> Iterator[str]:
    """Say if the file's graph gives something else than the mean of its clients' outputs."""
    from fedmerge.architecture.from_code import ExportedProgram

    modules = ClientModules(replace(session, device="cpu"))
    inputs = modules.sample_inputs()
    each = [outputs_of(model, inputs) for model in modules.clients]
    weights = _branch_weights(session.averaging, _only(each[0]))
    expected = (weights * torch.stack([own[0] for own in each])).sum(0)
    change = relative_difference(
        [expected],
        outputs_of(ExportedProgram(checkpoint.program), inputs),  # type: ignore[arg-type]
    )
    if not change <= TOLERANCE:
        yield f"the program's outputs differ from the clients' mean by {change:.2g}"
