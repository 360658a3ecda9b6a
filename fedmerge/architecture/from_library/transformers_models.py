"""Models of the library transformers, built from a config.json; nothing is fetched or trusted."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedmerge.architecture.from_code.modules import float_tensors
from fedmerge.architecture.from_library.example_inputs import (
    dtype_of_input,
    example_inputs,
    names_of_inputs,
)
from fedmerge.checkpoint import open_checkpoint
from fedmerge.checkpoint.model_folders import ModelFolder
from fedmerge.checkpoint.paths import model_file
from fedmerge.errors import ArchitectureError, UserCodeError
from fedmerge.user_code import state_of, user_code
from fedmerge.values.clients import TensorInfo

LIBRARY = "transformers"
INSTALL = "pip install 'fedmerge[hf]'"
OWN_CODE = "give the code that you trust with `model`, e.g. `model=net.py:build`"

# Where weights would be of a kind of their own, kernels be fetched, or a precision be set.
_NOT_OURS = ("_attn_implementation", "attn_implementation", "dtype", "torch_dtype")
_DEPTHS = (  # fields that say how many layers there are
    *("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_decoder_layers"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_blocks"),
)
_NOT_ITS_OWN = "does config.json belong to these weights?"
MOST_LARGER = 4  # times the numbers in its file that a model may have

# What people use of a model's outputs; caches and inner states would count as outputs, too.
_OUTPUTS = ("last_hidden_state", "pooler_output", "text_embeds", "image_embeds")


class ConfiguredModel(nn.Module):
    """What a model of transformers is besides, so that it is fed like any other module.

    Fed by position, it returns what people use of its outputs, as tensors; fed by keyword, it is
    the library's own.
    """

    folder: ModelFolder  # where the model is from
    library_class: type[nn.Module]
    known_names: dict[tuple[str, ...], dict[str, str]]  # by the names of a file

    def forward(self, *inputs: Tensor, **named: Any) -> Any:
        """Run the library's model on inputs in the usual order, or by their own names."""
        forward: Any = super().forward
        if named or not inputs:
            return forward(**named)
        outputs = forward(**dict(zip(names_of_inputs(self, len(inputs)), inputs, strict=True)))
        used = [value for name, value in outputs.items() if name in _OUTPUTS or "logits" in name]
        scores = [value for name, value in outputs.items() if "logits" in name]
        found = [value for value in scores or used or [outputs[0]] if isinstance(value, Tensor)]
        return found[0] if len(found) == 1 else tuple(found)

    def example_inputs(self) -> tuple[Tensor, ...]:
        """Return random inputs on which the model runs."""
        return example_inputs(self)

    @property
    def vocabulary(self) -> int | None:
        """How many tokens the model knows, if any; its first embedding may be of positions."""
        config: Any = self.config
        size = getattr(config.get_text_config(), "vocab_size", None)
        return size if isinstance(size, int) else None

    def input_dtype(self, number: int, count: int) -> torch.dtype:
        """Return the dtype of one of so many inputs."""
        return dtype_of_input(names_of_inputs(self, count)[number])

    def names_of_file(self, tensors: Mapping[str, TensorInfo], source: str) -> dict[str, str]:
        """Return the model's name of every tensor of a file that the library's loader reads.

        It goes by names: where they are those of the folder's own file, so are the shapes that it
        is told, since a merge may be wider than config.json says.
        """
        key = tuple(tensors)
        if key not in self.known_names:
            own = _tensors_in(self.folder)
            shapes = own if own.keys() == tensors.keys() else tensors
            self.known_names[key] = _loaded_names(self, shapes, source)
        return self.known_names[key]


def build_from_folder(folder: ModelFolder) -> ConfiguredModel:
    """Return the model that a folder's config.json describes, at random weights."""
    _check_trusted(folder)
    kind = _class_of(folder)
    _check_size(folder, kind)
    with user_code(f"{folder.label}: {LIBRARY} can't build the model", hint=OWN_CODE), _alone():
        model: Any = kind(_config_of(folder.config, folder.label))
        model.__class__ = _configured(kind)
        model.folder, model.library_class, model.known_names = folder, kind, {}
        model.config.use_cache = False
    return cast("ConfiguredModel", model.eval())


def config_shapes(
    model: ConfiguredModel, config: Mapping[str, Any], source: str
) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of a model's tensors under another configuration; None if there is none."""
    try:
        built = _without_numbers(model.library_class, config, source)
    except UserCodeError:
        return None
    return {name: tuple(tensor.shape) for name, tensor in state_of(built).items()}


def _without_numbers(kind: Any, config: Mapping[str, Any], source: str) -> nn.Module:
    """Return a model that has shapes and nothing else."""
    with user_code(f"{source}: {LIBRARY} can't build the model", hint=OWN_CODE), _alone():
        made = _config_of(config, source)
        with torch.device("meta"):
            built: nn.Module = kind(made)
    return built


def is_installed() -> bool:
    """Whether the library is there; it is not imported for that."""
    return find_spec(LIBRARY) is not None


def _check_trusted(folder: ModelFolder) -> None:
    """Refuse configurations that ask for code, for other kinds of weights, or for too much."""
    if not is_installed():
        raise ArchitectureError(
            f"{folder.label}: a model of {LIBRARY}, which is not installed",
            f"{INSTALL}, or give the model's code with `model`",
        )
    if "auto_map" in folder.config:
        raise ArchitectureError(
            f"{folder.label}: asks for code of its own (auto_map), which is never run", OWN_CODE
        )
    if "quantization_config" in folder.config:
        raise ArchitectureError(
            f"{folder.label}: the weights are quantised, which have no mean",
            "merge the models that they were made from, and quantise the result",
        )


def _check_size(folder: ModelFolder, kind: Any) -> None:
    """Refuse a configuration of a much larger net than the weights beside it, before it is built.

    Layers cost time even where they have no numbers, so they are counted first.
    """
    own = _tensors_in(folder)
    if not own:
        return
    parts = (folder.config, *(v for v in folder.config.values() if isinstance(v, Mapping)))
    numbers = (part.get(name, 0) for part in parts for name in _DEPTHS)
    layers = max((value for value in numbers if isinstance(value, int)), default=0)
    if layers > len(own):
        raise ArchitectureError(
            f"{folder.label}: says {layers:,} layers, but its weights are {len(own):,} tensors",
            _NOT_ITS_OWN,
        )
    described = _without_numbers(kind, folder.config, folder.label).parameters()
    wanted, found = sum(p.numel() for p in described), sum(info.size for info in own.values())
    if wanted > MOST_LARGER * found:
        raise ArchitectureError(
            f"{folder.label}: describes a model of {wanted:,} numbers, its weights have {found:,}",
            _NOT_ITS_OWN,
        )


def _class_of(folder: ModelFolder) -> Any:
    """Return the library's class that the configuration names, or that of its family."""
    with user_code(f"{LIBRARY} can't be imported", hint=INSTALL):
        library = import_module(LIBRARY)
    names = folder.config.get("architectures") or ()
    named = next((name for name in names if isinstance(name, str)), None)
    kind = getattr(library, named, None) if named and named.isidentifier() else None
    if isinstance(kind, type) and issubclass(kind, library.PreTrainedModel):
        return kind
    if named is not None:
        raise ArchitectureError(
            f"{folder.label}: {LIBRARY} {library.__version__} has no model '{named}'", OWN_CODE
        )
    return library.AutoModel._model_mapping[type(_config_of(folder.config, folder.label))]


def _config_of(raw: Mapping[str, Any], source: str) -> Any:
    """Return the library's configuration, without what would fetch or convert something."""
    mapping = import_module(LIBRARY).CONFIG_MAPPING
    family = raw.get("model_type")
    if family not in mapping:
        raise ArchitectureError(
            f"{source}: {LIBRARY} knows no family '{family}'", "update it, or give code by `model`"
        )
    return mapping[family].from_dict({k: v for k, v in raw.items() if k not in _NOT_OURS})


@cache
def _configured(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a model that is fed by position, under the library's name."""
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (ConfiguredModel, kind), own)


@contextmanager
def _alone() -> Iterator[None]:
    """Let the library neither fetch, nor warn, nor draw bars for a while."""
    constants: Any = import_module("huggingface_hub.constants")
    logging = import_module(f"{LIBRARY}.utils.logging")
    was_offline, verbosity = constants.HF_HUB_OFFLINE, logging.get_verbosity()
    has_bars = logging.is_progress_bar_enabled()
    constants.HF_HUB_OFFLINE = True
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        constants.HF_HUB_OFFLINE = was_offline
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def _tensors_in(folder: ModelFolder) -> dict[str, TensorInfo]:
    """Return what the weights in a folder are called, and their shapes."""
    if model_file(folder.path) is None:
        return {}
    own = open_checkpoint(folder.path)
    return {own.output_name(name): info for name, info in own.tensors.items()}


_MARK = 0.5  # at the end of a tensor's last axis: shows where the loader turns it


def _loaded_names(
    model: ConfiguredModel, tensors: Mapping[str, TensorInfo], source: str
) -> dict[str, str]:
    """Return where the library's own loader puts each tensor of a file.

    It is given the file's names and shapes with values that tell them apart: a renamed tensor is
    found by its value, whatever the rules were, and a tied one under all of its names.
    """
    named = {name: info for name, info in tensors.items() if info.dtype != "bool"}
    marked = {name: _marked(k, info) for k, (name, info) in enumerate(named.items(), 1)}
    what = f"{source}: {LIBRARY} does not load its tensors"
    with user_code(what, hint=_NOT_ITS_OWN), _alone():
        loader: Any = model.library_class
        loaded, told = loader.from_pretrained(
            None,
            config=_config_of(model.folder.config, source),
            state_dict=marked,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # which we say ourselves
            dtype=torch.float32,
            attn_implementation=_attention_of(model),
        )
    _check_complete(told, source)
    order, ties = list(named), float_tensors(model)[1]
    names: dict[str, str] = {}
    twins: dict[str, str] = {}  # tensors of the file that go to further names of tied ones
    for name, tensor in state_of(loaded).items():
        if not tensor.numel():
            continue
        number = int(tensor.reshape(-1)[0])
        found = order[number - 1] if 0 < number <= len(order) else None
        if found is None or not _is_whole(tensor, marked[found]):
            raise ArchitectureError(
                f"{source}: {LIBRARY} makes '{name}' of several tensors of the file",
                "units of such models (mixtures of experts, mostly) can't be matched yet; "
                "fine-tunes of one are averaged with `method=average`, with a `base` or without",
            )
        (twins if name in ties else names)[found] = name
    _check_tied({found: name for found, name in twins.items() if found not in names}, ties, source)
    return names


def _check_tied(twins: Mapping[str, str], ties: Mapping[str, str], source: str) -> None:
    """Refuse a file that holds a tied tensor twice: nothing keeps the two alike in a merge."""
    for found, name in twins.items():
        raise ArchitectureError(
            f"{source}: holds '{found}', which config.json ties to '{ties[name]}'",
            "load it with transformers and save it again",
        )


def _attention_of(model: Any) -> str:
    implementation: str = model.config._attn_implementation
    return implementation


def _marked(number: int, info: TensorInfo) -> Tensor:
    """Return a tensor of a shape that says its number, and which of its axes is the last."""
    row = torch.full(info.shape[-1:], float(number) if info.is_float else number)
    if info.is_float and len(info.shape) > 1 and row.numel() > 1:
        row[-1] += _MARK
    return row.expand(info.shape)


def _is_whole(tensor: Tensor, marked: Tensor) -> bool:
    """Return whether a tensor is a file's as it is: not turned, nor a part, nor joined."""
    return tensor.shape == marked.shape and bool((tensor == marked).all())


def _check_complete(told: Mapping[str, Any], source: str) -> None:
    """Refuse files without some of the model's tensors, or with some of another shape."""
    for kind, problem in (("missing_keys", "has no"), ("mismatched_keys", "has another shape of")):
        found = sorted(map(str, told.get(kind) or ()))
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            raise ArchitectureError(
                f"{source}: {problem} '{found[0]}'{more}, which the model of its config.json has",
                "give a folder that the library saved, or the model's code with `model`",
            )
